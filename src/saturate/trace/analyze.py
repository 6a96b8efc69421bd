"""From columns to what is printed: one `Device` per device of each trace, and what is wrong with the traces."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import msgspec
import numpy as np

from saturate.records.analysis import Analysis, DataWait, Device, Gaps, Limit, Occupancy, Problem, Roofline, overall
from saturate.records.ceilings import Ceilings
from saturate.trace import breakdown, collectives, gaps, integrity, one_run, ranks
from saturate.trace.columns import Column, Trace
from saturate.trace.each_step import each_step
from saturate.trace.intervals import length
from saturate.trace.labels import labels
from saturate.trace.occupancy import occupancy
from saturate.trace.roofline import roofline
from saturate.trace.verdict import verdict
from saturate.trace.view import SHORT_NS, View, facts, joined, view
from saturate.trace.windows import CPU, devices, kernels_of

#: Fields of Device that a blocked conclusion leaves empty.
FIELDS: dict[str, dict[str, Any]] = {
    "steps": {"step_ns": None, "busy_of_step": None},
    "busy": {"busy_of_span": None, "busy_of_step": None, "compute_ns": None, "exposed_communication_ns": None,
             "exposed_copy_ns": None, "idle_ns": None, "each_step": []},
    "communication": {"communication_ns": None, "communication_overlap": None, "exposed_communication_ns": None},
    "gaps": {"gaps": Gaps(input=None, host_late=None, sync=None, already_launched=None, unattributed=None),
             "gap_ns": {}, "edge_ns": {}, "window_gap_ns": {}},
    "kernels": {"kernels": None, "short_kernels": None, "median_kernel_ns": None, "median_launch_delay_ns": None},
    "occupancy": {"occupancy": Occupancy(sm_fill=None, sm_fill_of_step=None, tail=None, occupancy=None)},
    "roofline": {"roofline": Roofline(coverage=None, operators=[])},
}


def analyze(traces: Iterable[Trace], ceilings: Ceilings | Iterable[Ceilings] | None = None) -> Analysis:
    """All that the traces say but the findings, which are the rules' to make.

    One trace after the other is looked at and let go, so an iterator keeps no more than one in memory.
    """
    parts, seen, members = [], [], []
    for trace in traces:
        parts.append(analyze_one(trace, ceilings))
        seen.append(collectives.observe(trace))
        members.append(one_run.member(trace))
    together = ranks.compared(members, [each for own in seen for each in own])
    whole = combine(ranked(parts, seen, together), stragglers=together.stragglers)
    mixed = not_one_run(together)
    if mixed:
        whole = msgspec.structs.replace(whole, integrity=integrity.verdict(whole.integrity.problems + mixed))
    if not together.unknown:
        return whole
    return msgspec.structs.replace(whole, unknown=whole.unknown | {"stragglers": together.unknown})


def not_one_run(compared: ranks.Ranks) -> list[Problem]:
    """What is wrong where files cannot be compared as the ranks of one run: each by itself still tells of itself."""
    return [Problem(id="not-one-run", message=compared.unknown, blocks=["ranks"])] if compared.mixed else []


def ranked(parts: Sequence[Analysis], seen: Sequence[Sequence[collectives.Seen]], compared: ranks.Ranks) -> list[Analysis]:
    """The analyses of the files, with the ranks that were given a number where a file does not say its own. `seen`: the
    ranks of each file, as they were compared."""
    if not compared.numbers:
        return list(parts)
    numbers = iter(compared.numbers)
    numbered = [[(each, next(numbers)) for each in own] for own in seen]
    return [msgspec.structs.replace(part, devices=[_ranked(device, own) for device in part.devices])
            for part, own in zip(parts, numbered, strict=True)]


def _ranked(device: Device, numbered: Sequence[tuple[collectives.Seen, int]]) -> Device:
    if device.rank is not None:
        return device
    own = [number for seen, number in numbered if seen.devices is None or device.id in seen.devices]
    if len(own) == 1:
        unknown = {field: reason for field, reason in device.unknown.items() if field != "rank"}
        return msgspec.structs.replace(device, rank=own[0], unknown=unknown)
    why = f"collectives of {len(own)} ranks ran on this device" if own else device.unknown["rank"]
    return msgspec.structs.replace(device, unknown=device.unknown | {"rank": why})


def analyze_one(trace: Trace, ceilings: Ceilings | Iterable[Ceilings] | None = None) -> Analysis:
    """Without what needs several ranks."""
    of = joined(trace)
    views = [view(of, device) for device in devices(trace)]
    found = [view_.problems for view_ in views] or [of.problems]
    table, left_out = labels(trace, of.launches)
    records = [_device(seen, ceilings) for seen in views]
    unknown = {"annotations": f"{left_out} more names, of less time, are left out"} if left_out else {}
    if any(row["device_ns"] is None for row in table):
        unknown["annotations.device_ns"] = "no launch was recorded, so what a device did for a label is not known"
    return Analysis(sources=[trace.source], devices=records, integrity=integrity.verdict(_distinct(found)),
                    verdict=overall(records), findings=[], annotations=table, unknown=unknown)


def combine(parts: Sequence[Analysis], **fields: Any) -> Analysis:
    """Several traces' analyses as one, with `fields` replaced. Of several, problems and reasons name their file."""
    if len(parts) == 1:
        return msgspec.structs.replace(parts[0], **fields)
    problems = [msgspec.structs.replace(problem, message=f"{part.sources[0]}: {problem.message}")
                for part in parts for problem in part.integrity.problems]
    records = [device for part in parts for device in part.devices]
    totals: dict[str, dict[str, Any]] = {}
    for row in (row for part in parts for row in part.annotations):
        total = totals.setdefault(row["name"], {**row, "count": 0, "total_ns": 0, "device_ns": 0})
        for field in ("count", "total_ns", "device_ns"):
            total[field] = None if row[field] is None or total[field] is None else total[field] + row[field]
    unknown = {field: f"{part.sources[0]}: {reason}" for part in parts for field, reason in part.unknown.items()}
    return Analysis(sources=[source for part in parts for source in part.sources], devices=records,
                    integrity=integrity.verdict(problems), verdict=overall(records), findings=[],
                    annotations=sorted(totals.values(), key=lambda row: -row["total_ns"]),
                    unknown=unknown, **fields)


def _distinct(found: list[list[Problem]]) -> list[Problem]:
    """Problems of all devices of a trace, each once."""
    distinct: dict[tuple[str, str], Problem] = {}
    for problem in (problem for problems in found for problem in problems):
        distinct.setdefault((problem.id, problem.message), problem)
    return list(distinct.values())


def _device(seen: View, ceilings: Ceilings | Iterable[Ceilings] | None) -> Device:
    trace, here, parts = seen.joined.trace, seen.window, seen.parts
    info = facts(trace, seen.device)
    blocked = integrity.blocked(seen.problems)
    span = breakdown.parts(seen.work, here.span)
    kernels, unknown = _kernels(seen)
    if seen.device == CPU:
        full = FIELDS["occupancy"]["occupancy"]
        unknown |= ON_A_CPU
    else:
        full, reasons = occupancy(trace, info, here, seen.work)
        unknown |= reasons
    roof = _roofline(seen, ceilings, blocked)
    limit, why = _verdict(seen, roof, blocked)
    idle_in_span = sum(seen.gap_ns.values())
    # What of the idle time is input counts under the other causes where the loader was not recorded: it is not known, and not zero.
    told = [cause for cause in gaps.CLASSES if cause != "input" or seen.waiting is not None]
    device = Device(
        id=seen.device, name=info.name if info else _host_name(seen), rank=trace.rank,
        source=trace.source, steps=here.count, span_ns=span.window_ns, step_ns=parts.window_ns,
        busy_of_span=_share(span.busy_ns, span.window_ns), busy_of_step=_share(parts.busy_ns, parts.window_ns),
        compute_ns=parts.compute_ns, exposed_communication_ns=parts.exposed_communication_ns,
        exposed_copy_ns=parts.exposed_copy_ns, idle_ns=parts.idle_ns, communication_ns=parts.communication_ns,
        communication_overlap=_share(parts.overlapped_ns, parts.communication_ns),
        data_wait=DataWait(
            raw=None if seen.waiting is None else _share(length(seen.waiting), parts.window_ns),
            exposed=None if seen.waiting is None else _share(length(seen.exposed_wait), parts.window_ns)),
        gaps=Gaps(**{cause: _share(seen.gap_ns.get(cause, 0), idle_in_span) if cause in told else None for cause in gaps.CLASSES}),
        gap_ns=_of(told, seen.gap_ns), edge_ns=_of(told, seen.edge_ns), window_gap_ns=_of(told, seen.idle_ns), each_step=each_step(here, seen.work), roofline=roof, occupancy=full,
        verdict=limit, **kernels)
    for missing, field, reason in (
            (trace.rank is None, "rank", "the trace does not say its rank"),
            (limit == "unknown", "verdict", why),
            (not span.window_ns, "busy_of_span", "nothing that was recorded took any time"),
            (not parts.communication_ns, "communication_overlap", "no communication was recorded"),
            (seen.waiting is None, "data_wait", OF_WHOM if here.untold else NO_LOADER),
            (not parts.window_ns, "data_wait", "nothing that was recorded took any time"),
            (not idle_in_span, "gaps", "the device was never idle inside its span"),
            (seen.waiting is None and idle_in_span, "gaps.input", "what of it was waiting for input is not known, and counts under the other causes"),
            (roof.coverage is None, "roofline", roof.source or "there is no kernel time to model")):
        if missing:
            unknown.setdefault(field, reason)
    return _without(device, blocked, unknown)


def _of(causes: Iterable[str], lengths: dict[str, int]) -> dict[str, int]:
    return {cause: lengths[cause] for cause in causes if cause in lengths}


NO_LOADER = "the training thread recorded no DataLoader.__next__, so waiting for input cannot be told"
OF_WHOM = "several processes marked steps, and which of them waited for this device's input is not known"
ON_A_CPU = {
    "gaps": "a CPU has no queue of launched work whose gaps could be explained",
    "occupancy": "the share of an accelerator's threads; a CPU has none",
}


def _host_name(seen: View) -> str:
    """What to call a device that the trace does not describe; the host's operators only where they are all there was."""
    alone = not any(problem.id == "unknown-accelerator" for problem in seen.problems)
    return "cpu" if seen.device == CPU and alone else ""


def _share(part: int, whole: int) -> float | None:
    return part / whole if whole else None


def _verdict(seen: View, roof: Roofline, blocked: Mapping[str, str]) -> tuple[Limit, str]:
    for conclusion in ("busy", "gaps"):
        if conclusion in blocked:
            return "unknown", blocked[conclusion]
    parts, exposed = seen.parts, length(seen.exposed_wait)
    losses: dict[Limit, int] = {"input-bound": exposed, "communication-bound": parts.exposed_communication_ns}
    others = {"copies that no computation hides": parts.exposed_copy_ns}
    if seen.device == CPU:
        losses["host-bound"] = parts.idle_ns - exposed      # the interpreter: in no operator, and not in the loader
    else:
        losses |= {"host-bound": seen.idle_ns["host_late"], "sync-bound": seen.idle_ns["sync"],
                   "device-wait-bound": seen.idle_ns["already_launched"]}
        others["idle time of unknown cause"] = seen.idle_ns["unattributed"]
    return verdict(parts.window_ns, parts.compute_ns, losses, others, roof, "host-bound" if seen.device == CPU else None)


def _kernels(seen: View) -> tuple[dict[str, Any], dict[str, str]]:
    trace, launches = seen.joined.trace, seen.joined.launches
    rows = kernels_of(trace, seen.device)
    if not len(rows):
        why = "no kernels were recorded"
        return {"kernels": 0}, {"short_kernels": why, "median_kernel_ns": why, "median_launch_delay_ns": why}
    time = trace.gpu.end[rows] - trace.gpu.start[rows]
    single = rows[(launches[rows] >= 0) & ~integrity.replayed(trace, launches)[rows]]
    delay = np.maximum(trace.gpu.start[single] - trace.calls.start[launches[single]], 0)     # less is a drift of the clocks
    unknown = {} if len(single) else {
        "median_launch_delay_ns": "no kernel has a launch of its own: not recorded, or replayed from a graph"}
    return {"kernels": len(rows), "short_kernels": float((time < SHORT_NS).mean()), "median_kernel_ns": _median(time),
            "median_launch_delay_ns": _median(delay) if len(single) else None}, unknown


def _median(values: Column) -> int:
    """The middle one, of an even number the lower: a time that was recorded, not a mean of two."""
    middle = (len(values) - 1) // 2
    return int(np.partition(values, middle)[middle])


def _roofline(seen: View, ceilings: Ceilings | Iterable[Ceilings] | None, blocked: Mapping[str, str]) -> Roofline:
    if "roofline" in blocked:
        return FIELDS["roofline"]["roofline"]
    of = seen.joined
    return roofline(of.trace, seen.device, seen.window, ceilings, of.launches, of.communicating)


def _without(device: Device, blocked: Mapping[str, str], unknown: dict[str, str]) -> Device:
    """The record without what the trace cannot carry, and with the reasons for all that is missing."""
    changes: dict[str, Any] = {}
    for conclusion, reason in blocked.items():
        changes |= FIELDS[conclusion]
        unknown |= {field: reason for field in FIELDS[conclusion]}
    if "busy" in blocked:
        changes["data_wait"] = msgspec.structs.replace(device.data_wait, exposed=None)
        unknown["data_wait.exposed"] = blocked["busy"]
    return msgspec.structs.replace(device, **changes, unknown=unknown)
