"""From what the windows of a profile saw to its record: traces analysed, observations completed, rules asked."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec

from saturate.findings import _registry as rules
from saturate.machine import accelerators
from saturate.records.analysis import Analysis, Memory, ModuleCost, Problem, Profile, Sync
from saturate.records.ceilings import Ceilings
from saturate.records.command_line import joined
from saturate.records.facts import BY_HAND, Facts, LoaderFacts
from saturate.records.observations import (
    CommunicationSeen,
    CompilerSeen,
    LoaderSeen,
    MachineSeen,
    Observations,
    SyncSeen,
)
from saturate.study import counted, memory, unheard, unprofiled, waits
from saturate.study.seen import Seen
from saturate.study.state import Request
from saturate.trace import analyze, phases, windows
from saturate.trace import observe as trace_observations
from saturate.trace.columns import Trace
from saturate.trace.launches import launching_calls
from saturate.trace.read import read
from saturate.trace.roofline import by_tf32

#: Fewer looks at a process say nothing about its state.
_LEAST_SAMPLES = 10

#: Rows of each table of a profile.
_MOST_SYNCS, _MOST_LINES, _MOST_MODULES = 20, 5, 100


#: Where `diagnose` has no answer.
EMPTY = "no operator ran in the steps that were recorded"


def diagnose(request: Request, seen: Seen, known: frozenset[str]) -> Profile | None:
    """The profile of one run; None where the trace holds nothing. `known`: the ids of techniques that exist here. Raises TraceError."""
    traces = [unheard.told(read(path), seen.facts.device) for path in seen.traces]
    first = traces[0]
    analysis = analyze.analyze(traces, seen.ceilings)
    if not windows.devices(first):
        return None
    device = windows.devices(first)[0]
    launches = launching_calls(first)
    view = windows.window(first, device, launches)
    base = of_trace(first, analysis, seen.facts)
    recorded = phases.split(first, device, launches)
    clocked = seen.sample["parts"]
    told = seen.facts.device == "cpu" or "busy" not in base.integrity_blocks      # what the device did, and so the parts of a step
    split = {} if not told else phases.calibrated(first, clocked) if device == windows.CPU else recorded
    shorten = _shortener(request.cwd)
    observed = observe(seen, analysis, base, split, shorten)
    findings = rules.detect(observed, known)
    profiled_ms = sum(recorded.values()) / view.count / 1e6 if view.count else None
    recorded_input = recorded["input"] / max(1, sum(recorded.values())) if seen.facts.device == "cpu" else None
    record = Record(seen, shorten, unprofiled.factor(seen, profiled_ms, recorded_input), analysis)
    rates, coverage, input_lines = record.rates(), record.coverage(analysis), record.input_lines()  # they also find out what is unknown
    if not told:
        record.unknown["split"] = analysis.devices[0].unknown["busy_of_step"]
    integrity = analysis.integrity
    if seen.sample.get("fetched_elsewhere"):
        integrity = msgspec.structs.replace(integrity, problems=[*integrity.problems, _ELSEWHERE])
    if seen.facts.device == "cpu":      # of a trace that nothing is known of, it is worth a note that no accelerator worked
        problems = [problem for problem in integrity.problems if problem.id != "no-accelerator"]
        problems += unprofiled.uneven(seen, profiled_ms, recorded_input)
        integrity = msgspec.structs.replace(integrity, problems=problems)
    split_steps = view.count if split is recorded else seen.sample["clocked_steps"] if told else 0
    apart = [*unprofiled.other_steps(seen.step_ms, split, split_steps), *unprofiled.long_steps(view, windows.loader(first, view), device)]
    integrity = msgspec.structs.replace(integrity, problems=[*integrity.problems, *apart])
    return Profile(
        **{**{name: getattr(analysis, name) for name in Analysis.__struct_fields__},
           "integrity": integrity, "verdict": rules.verdict(observed), "findings": findings,
           "unknown": {**analysis.unknown, **seen.notes, **record.unknown}},
        command=request.argv,
        step_ms=seen.step_ms,
        loader_cost=seen.loader_cost,
        step_ms_profiled=profiled_ms,
        split=split,
        split_steps=split_steps,
        recorded_steps=view.count,
        **rates,
        flops_per_step=record.flops,
        flops_coverage=coverage,
        flops_left_out=record.left_out,
        memory=record.memory(),
        syncs=record.syncs(waits.of_trace(base, record.shorten, record.unprofiled)),
        input_lines=input_lines,
        modules=record.modules(),
        off_device=seen.record.get("off_device", []),
        graph_breaks=[shorten(text) for text in observed.compiler.graph_break_reasons],
        recompiles=[shorten(text) for text in observed.compiler.recompile_reasons],
        trace=str(seen.traces[0]),
        next_command=next_command(request, [name for finding in findings for name in finding.techniques]),
    )


_ELSEWHERE = Problem(id="loader-in-thread", blocks=[], message=(
    "another thread reads the loader: how long training waits for that thread is not known, and looks like other host code"))


def next_command(request: Request, techniques: list[str]) -> str:
    """The tune command that tries what the findings name."""
    words = ["saturate", "tune"]
    if techniques:
        words += ["--only", ",".join(dict.fromkeys(techniques))]
    return joined([*words, *request.options(), "--", *request.argv])


def _shortener(cwd: Path) -> Callable[[str], str]:
    """Paths below the working directory are shown relative to it."""
    above = os.path.join(cwd, "")
    return lambda text: text.replace(above, "")


class Record:
    """The parts of a Profile that do not come from the trace."""

    def __init__(
        self, seen: Seen, shorten: Callable[[str], str], unprofiled: float = 1.0, analysis: Analysis | None = None,
    ):
        self.seen = seen
        self.unprofiled = unprofiled        # what a time of the recorded steps is without the profiler, as a factor
        self.facts = seen.facts
        self.shorten = shorten
        self.analysis = analysis
        self.unknown: dict[str, str] = {}
        facts, found = seen.facts, seen.modules
        if "flops" not in found:
            found = {"flops": facts.flops_per_step, "flops_unknown": facts.flops_unknown, "flops_left_out": facts.flops_left_out}
        self.left_out = list(found.get("flops_left_out", ()))
        #: Why the count is not that of the model though there is one.
        self.missed = counted.missed(analysis, self.left_out) if analysis and facts.device != "cpu" else ""
        unknown = found.get("flops_unknown", "") or self.missed
        #: Executed operations of a step, recomputed ones included; None: not counted.
        self.executed = None if unknown else found["flops"]
        self.flops = None if self.executed is None else self.executed - found.get("recomputed_flops", 0)
        if self.flops is None:
            self.unknown["flops_per_step"] = unknown or "operations of compiled code cannot be counted from outside"

    def rates(self) -> dict[str, float | None]:
        """MFU, HFU and MFU against the measured rate (Chowdhery et al. 2022, PaLM, appendix B)."""
        names = ("mfu", "hfu", "mfu_achievable")
        if not self.flops or not self.seen.step_ms or self.executed is None:
            why = "the model's operations per step are not known"
            self.unknown |= dict.fromkeys(names, why)
            return dict.fromkeys(names)
        seconds, format_ = self.seen.step_ms / 1e3, number_format(self.facts, self.analysis)
        if self.facts.device == "cpu":
            peak, why = None, "there is no table of the peak rates of CPUs"
        else:
            spec = accelerators.find(self.facts.device_name)
            peak = spec.rates.get(format_) if spec else None
            why = f"the peak rate of {self.facts.device_name} for {format_} is not known"
        measured = self.seen.ceilings.rates.get(format_) if self.seen.ceilings else None
        found = {
            "mfu": peak and self.flops / seconds / peak,
            "hfu": peak and self.executed / seconds / peak,
            "mfu_achievable": measured and self.flops / seconds / measured,
        }
        for name, value in found.items():
            if value is None:
                unmeasured = self.seen.notes.get(name, f"the rate of {format_} was not measured")
                self.unknown[name] = unmeasured if name == "mfu_achievable" else why
            elif value > 1.0:
                self.unknown[name] = f"{value:.2f} is more than the device can do: the count or the rate is wrong"
                found[name] = None
        return found

    def coverage(self, analysis: Analysis) -> float | None:
        """Share of operator time that the count covers."""
        operators = analysis.devices[0].roofline.operators if analysis.devices else []
        total = sum(one.time_ns for one in operators)
        if self.flops is None or not total:
            uncounted = self.missed or "no operations were counted"
            self.unknown["flops_coverage"] = uncounted if self.flops is None else "no operator was recorded"
            return None
        return 1 - sum(one.time_ns for one in counted.unseen(operators, self.left_out, self.facts.device)) / total

    def memory(self) -> Memory:
        return memory.breakdown(self.seen, self.shorten)

    def syncs(self, others: tuple[SyncSeen, ...] = ()) -> list[Sync]:
        """The waits with a line, and those of a trace (`others`), of which copies to the device have one."""
        found = [self._place(file, line, what, calls, ns * self.unprofiled, self.seen.record["steps"])
                 for file, line, what, calls, ns in self.seen.record.get("syncs", [])]
        found += map(waits.shown, others)
        return sorted(found, key=lambda sync: -sync.ms_per_step)[:_MOST_SYNCS]

    def input_lines(self) -> list[Sync]:
        """The slowest code below the dataset; of workers, which are other processes, the dataset's own method and the user's
        function that collates."""
        sample = self.seen.sample
        dataset, taken = sample.get("dataset"), sample["parts"].get("input", 0) if sample else 0
        if not dataset or not taken:
            return []
        self.unknown["input_lines.calls_per_step"] = "seen by looking at the process now and then, which counts no calls"
        looks = 0 if sample["workers"] else sample["fetch_samples"]
        if looks < _LEAST_SAMPLES:
            what = f"{dataset['kind']}.{dataset['function']}"
            if collate := dataset.get("collate"):       # which of the two is slow cannot be seen from here
                what += f" and {collate['function']} of {self.shorten(collate['file'])}:{collate['line']}"
            what += f" (in {sample['workers']} worker{'s' * (sample['workers'] > 1)})" if sample["workers"] else ""
            return [self._place(dataset["file"], dataset["line"], what, None, taken, sample["clocked_steps"])]
        return [self._place(file, line, function, None, taken * count / looks, sample["clocked_steps"])
                for file, line, function, count in sample["lines"][:_MOST_LINES]]

    def _place(self, file: str, line: int, what: str, calls: int | None, ns: float, steps: int) -> Sync:
        return Sync(file=self.shorten(file), line=line, what=what, calls_per_step=None if calls is None else calls / steps,
                    ms_per_step=ns / steps / 1e6)

    def modules(self) -> list[ModuleCost]:
        rows = msgspec.convert(self.seen.modules.get("modules", []), list[ModuleCost])
        if self.missed:         # in which of them is not known
            rows = [msgspec.structs.replace(row, flops=None) for row in rows]
        return sorted(rows, key=lambda row: -row.forward_ms)[:_MOST_MODULES]


def number_format(facts: Facts, analysis: Analysis | None = None) -> str:
    """The format that most matrix products run in. Convolutions take TF32 by torch's default, whatever is allowed for products: the names
    of their kernels tell."""
    if facts.autocast:
        return facts.autocast
    stored = [dtype for module in facts.modules for dtype in module.dtypes]
    format_ = stored[0] if stored else "float32"
    if format_ != "float32" or facts.device != "cuda":
        return format_
    operators = analysis.devices[0].roofline.operators if analysis is not None and analysis.devices else []
    by_units = sum(one.flops or 0 for one in operators if by_tf32(one.kernels))
    return "tfloat32" if facts.tf32_matmul or 2 * by_units > sum(one.flops or 0 for one in operators) else format_


# -- what the rules look at --------------------------------------------------------------------------------------------


def of_trace(trace: Trace, analysis: Analysis, facts: Facts) -> Observations:
    """What the first trace tells by itself; of a device without the waits that `HostSyncs` timed, with their lines."""
    if not analysis.devices:
        return Observations()
    return trace_observations.observations(trace, analysis.devices[0], labelled=facts.device == "cpu")


def observe(
    seen: Seen, analysis: Analysis, base: Observations, split: dict[str, int], shorten: Callable[[str], str],
) -> Observations:
    """What the trace tells (`base`, of `of_trace`), with what only a live run can tell."""
    facts, sample, record = seen.facts, seen.sample, seen.record
    total = sum(split.values())
    optimizer = facts.optimizers[0] if facts.optimizers else None
    cpu = facts.device == "cpu"
    fetched = seen.input_share if cpu else None
    faster = unprofiled.factor(seen, base.step_ms, base.input_wait_raw if cpu else None)
    if fetched is not None:
        base = unprofiled.beside_input(base, fetched)
    changes: dict[str, Any] = {
        "device": facts.device,
        "device_name": facts.device_name or facts.machine.cpu_name,
        "capability": None if facts.rocm or not facts.capability else tuple(facts.capability),       # AMD's is no CUDA one
        "bf16_native": facts.machine.cpu_bf16_native if cpu else base.bf16_native if facts.rocm else facts.cuda_bf16_native,
        "bf16_rate": _bf16_rate(seen.ceilings),
        "step_ms": seen.step_ms,
        "step_ms_recorded": base.step_ms,
        "gc_pause": sample["gc_ns"] / sample["wall_ns"] if sample else None,
        "gc_collections_per_step": sample["gc_pauses"] / sample["steps"] if sample else None,
        **_collections_called(sample, shorten),
        "kernel_time": min(1.0, sample["kernel_ns"] / max(1, sample["process_cpu_ns"])) if sample else None,
        "page_faults": sample["page_faults"] / sample["steps"] if sample else None,
        "optimizer_kind": optimizer.kind if optimizer else "",
        "optimizer_fused": optimizer.fused if optimizer else None,
        "optimizer_tensors": optimizer.parameters if optimizer else None,
        "updated_by_hand": optimizer is None and facts.motif.endswith(BY_HAND),
        "tf32_allowed": facts.tf32_matmul if not cpu else None,
        "off_device": tuple(record["off_device"]) if "off_device" in record else None,
        "loader": _loader(seen, shorten),
        "syncs": waits.timed(record, shorten, faster) + waits.of_trace(base, shorten, faster),
        "compiler": _compiler(record),
        "memory": memory.observed(memory.breakdown(seen, shorten), seen),
        "communication": _communication(base.communication, facts, analysis, split, total),
        "machine": MachineSeen(**seen.telemetry) if seen.telemetry and not cpu else base.machine,      # of a GPU that others use
    }
    changes["batch_size"] = changes["loader"].batch_size
    if total:
        changes |= {name: split[name] / total for name in ("forward", "backward", "optimizer")}
    if cpu and total and sample and sum(sample["parts"].values()):      # as the split, of steps without a profiler
        changes["update"] = sample["parts"].get("optimizer", 0) / sum(sample["parts"].values())
    if fetched is not None:        # without a profiler, and nothing to hide behind
        changes |= {"input_wait": min(1.0, fetched), "input_wait_raw": min(1.0, fetched)}
    return dataclasses.replace(base, **changes)


def _bf16_rate(ceilings: Ceilings | None) -> float | None:
    """Of products in bfloat16, over that in float32; unknown where other processes had the cores while they were measured."""
    rates = ceilings.rates if ceilings and not ceilings.busy else {}
    return rates["bfloat16"] / rates["float32"] if rates.get("bfloat16") and rates.get("float32") else None


def _collections_called(sample: dict[str, Any], shorten: Callable[[str], str]) -> dict[str, Any]:
    """The line that calls `gc.collect()`, and what that takes."""
    for file, line, ns in sample.get("gc_called", []):
        return {"gc_called": f"{shorten(file)}:{line}", "gc_called_share": min(1.0, ns / sample["wall_ns"])}
    return {}


def _loader(seen: Seen, shorten: Callable[[str], str]) -> LoaderSeen:
    facts, sample = seen.facts, seen.sample
    loader = next((one for one in facts.loaders if one.num_workers == sample.get("num_workers")),
                  facts.loaders[0] if facts.loaders else None)
    if not sample or loader is None or not sample.get("dataset"):
        return LoaderSeen(cpu_count=facts.machine.cpu_count)
    wall, workers = sample["wall_ns"], sample["workers"]
    read = sample["read_bytes"]
    lines, dataset = sample["lines"], sample["dataset"]
    sampled = lines and not workers and sample["fetch_samples"] >= _LEAST_SAMPLES
    collate = dataset.get("collate")        # where nothing was sampled, either it or the dataset is slow
    places = [lines[0][:3]] if sampled else [(one["file"], one["line"], one["function"]) for one in (dataset, collate) if one]
    return LoaderSeen(
        num_workers=loader.num_workers, batch_size=loader.batch_size, pin_memory=loader.pin_memory,
        persistent_workers=loader.persistent_workers, tensor_rows=loader.tensor_rows,
        cpu_count=facts.machine.cpu_count, busy_cores=_busy_cores(sample, facts),
        fetch_cpu=_fetch_cpu(sample, loader), io_wait=_io_wait(sample),
        read_bytes_per_s=read / wall * 1e9 if read is not None else None,
        slowest=" or ".join(f"{shorten(file)}:{line} {function}" for file, line, function in places if file),
    )


def _busy_cores(sample: dict[str, Any], facts: Facts) -> float:
    """Of those that the process may use. What other programs take of them is not free either."""
    own = sample["process_cpu_ns"] / sample["wall_ns"]
    if sample["worker_ns"]:
        own += sample["workers"] * sample["worker_cpu_ns"] / sample["worker_ns"]
    own *= facts.world_size             # ranks are alike
    if facts.machine.cpu_count is None or not sample["idle_ns"]:
        return own
    idle = [sample["idle_ns"].get(str(cpu)) for cpu in os.sched_getaffinity(0)]
    if None in idle:
        return own
    return max(own, facts.machine.cpu_count - sum(idle) / sample["wall_ns"])


def _fetch_cpu(sample: dict[str, Any], loader: LoaderFacts) -> float | None:
    """CPU time of the fetches over their wall time, of workers over the time that they were there; several threads count as one. Time
    in which they were ready to run and other processes had the cores is left out: it says nothing about this code."""
    if sample["workers"]:
        return _share_of_time(sample["worker_cpu_ns"], sample["worker_ns"] - sample["worker_queued_ns"])
    if loader.num_workers or not sample["fetch_ns"]:
        return None         # its workers were gone when they were looked at
    return _share_of_time(sample["fetch_cpu_ns"], sample["fetch_ns"] - sample["fetch_queued_ns"])


def _share_of_time(used_ns: int, had_ns: int) -> float | None:
    return min(1.0, used_ns / had_ns) if had_ns > 0 else None


def _io_wait(sample: dict[str, Any]) -> float | None:
    """Share of the looks at the fetching processes that found them waiting for storage."""
    looks, waiting = (sample["worker_samples"], sample["worker_waiting"]) if sample["workers"] \
        else (sample["fetch_samples"], sample["fetch_waiting"])
    return waiting / looks if looks >= _LEAST_SAMPLES else None


def _compiler(record: dict[str, Any]) -> CompilerSeen:
    seen = record.get("compiler")
    if seen is None or not seen["compiled"]:
        return CompilerSeen(compiled=None if seen is None else False)
    return CompilerSeen(
        compiled=True, recompiles=seen["recompiles"], recompile_reasons=tuple(seen["recompile_reasons"]),
        compile_share=min(1.0, seen["compile_s"] / seen["window_s"]), graph_breaks=seen["graph_breaks"],
        graph_break_reasons=tuple(seen["graph_break_reasons"]), recompile_limit_hit=seen["limit_hit"],
    )


def _communication(
    base: CommunicationSeen, facts: Facts, analysis: Analysis, split: dict[str, int], total: int,
) -> CommunicationSeen:
    changes: dict[str, Any] = {"world_size": facts.world_size}
    if base.exposed is None and total:
        changes["exposed"] = split["communication"] / total
    if analysis.stragglers and split and total:
        device = analysis.devices[0]
        last = max(analysis.stragglers, key=lambda one: one.late_ns)
        mine = next((one for one in analysis.stragglers if one.rank == device.rank), None)      # whose exposed communication it is
        moved = mine.wait_ns + mine.transfer_ns if mine is not None else 0
        steps = max(1, device.steps)
        changes |= {"slowest_rank": last.rank, "late_ms_per_step": last.late_ns / steps / 1e6,
                    "late_rank_waits_ms_per_step": last.wait_ns / steps / 1e6,
                    "peer_wait": mine.wait_ns / moved if mine is not None and moved else None, "compared": len(analysis.stragglers)}
    return dataclasses.replace(base, **changes)
