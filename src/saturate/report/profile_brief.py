"""A profile on one screen: the verdict first, the split, where to look, what to mend, the next command last.

Each fact has one line. What is left out stands in `analysis.summary` (`--verbose`), on the page and in `--json`.
"""

from __future__ import annotations

from collections.abc import Sequence

from saturate.records.analysis import Profile, Sync
from saturate.report import analysis_words as say
from saturate.report import words
from saturate.report.analysis import BAR, LABEL, Rows, drawn, finished, flow, headline
from saturate.report.cells import cells, fit, wrap
from saturate.report.paint import MIN_WIDTH, Paint, labelled, paints

#: Findings that are named.
FINDINGS = 3
#: Parts of a step below this share are left out of the legend: they would read 0 %.
_LEAST_SHARE = 0.005


def brief(profile: Profile, *, width: int, color: bool, blocks: bool = True) -> str:
    """The profile as plain lines without a trailing newline: about a dozen at 80 cells, more where it is narrower.

    `width` is in terminal cells; only paths and commands may exceed it. `color` adds ANSI codes, which do not count.
    Without `blocks`, everything is ASCII.
    """
    width = max(width, MIN_WIDTH)
    paint = paints(color)
    room = width - LABEL
    rows: Rows = [("step", fit(_step(profile), room))]
    rows += _split(profile, room, paint, blocks)
    if profile.loader_cost is not None:         # it was asked for
        rows += labelled("loader", flow(say.loader_cost(profile.loader_cost), room))
    for label, text in (("flops", _flops(profile)), ("memory", _memory(profile, room)),
                        ("syncs", _place(profile.syncs, "line")), ("input code", _place(profile.input_lines, "line")),
                        ("modules", _module(profile)), ("compiler", _compiler(profile)), ("on the CPU", _off_device(profile))):
        rows += [(label, fit(text, room))] if text else []
    rows += _findings(profile, room, paint)
    rows += [("problem", fit(problem.message, room)) for problem in profile.integrity.problems
             if problem.blocks and problem.message != profile.unknown.get("verdict")][:1]        # that stands above
    for problem in filter(lambda one: one.id == "long-steps", profile.integrity.problems):      # what stands above is of those
        rows += labelled("note", wrap(problem.message, room, 3))
    rows += [("report", words.clean(profile.report))] if profile.report else []
    return finished(headline(profile, width, paint), rows, say.next_command(profile), paint, blocks)


def _step(profile: Profile) -> str:
    device = say.focus(profile)
    if profile.step_ms is None and profile.step_ms_profiled is None:
        return "not measured"
    ranks = f" and {words.count(len(profile.devices) - 1, 'other')}" if len(profile.devices) > 1 else ""
    told = [f"{words.ms(profile.step_ms)} ms" + (f" on {say.named(device)}{ranks}" if device is not None else "")]
    if profile.step_ms_profiled is not None:
        steps = profile.recorded_steps or profile.split_steps
        told.append(f"{words.ms(profile.step_ms_profiled)} ms while {words.count(steps, 'step')} were recorded")
    return "; ".join(told)


def _split(profile: Profile, room: int, paint: Paint, blocks: bool) -> Rows:
    parts = say.split(profile)
    total = sum(part.ns for part in parts)
    if total <= 0:
        return []
    told = [f"{part.letter} {part.name} {100 * part.ns / total:.0f} %" for part in parts if part.ns >= _LEAST_SHARE * total]
    return [("split", drawn(parts, min(room, BAR), paint, blocks)), *labelled("", flow(told, room, "  "))]


def _flops(profile: Profile) -> str:
    rates = [(name, value) for name, value in (("MFU", profile.mfu), ("HFU", profile.hfu)) if value is not None]
    told = [f"{name} {say.share(value)}" for name, value in rates]
    if profile.mfu_achievable is not None:
        told.append(f"{say.share(profile.mfu_achievable)} of the measured ceiling")
    if told and profile.flops_coverage is not None:
        told.append(f"known for {say.share(profile.flops_coverage)} of the time")
    if told and profile.flops_left_out:
        told.append(say.left_out(profile))
    return ", ".join(told)


def _memory(profile: Profile, room: int) -> str:
    """As many kinds as fit, the largest first."""
    memory = profile.memory
    kinds = sorted(((size, name) for key, name in say.MEMORY.items() if (size := getattr(memory, key))), reverse=True)
    told = f"peak {say.size(memory.peak)}" if memory.peak is not None else ""
    for size, name in kinds:
        more = ", ".join(filter(None, (told, f"{name} {say.size(size)}")))
        if cells(more) > room:
            break
        told = more
    return told


def _place(places: Sequence[Sync], noun: str) -> str:
    """The costliest line, and how many there are besides."""
    first = max(places, key=lambda each: each.ms_per_step, default=None)
    if first is None:
        return ""
    noun = noun if all(each.file for each in places) else "place"       # waits inside operators have no line
    more = f", +{words.count(len(places) - 1, noun)}" if len(places) > 1 else ""
    file = "/".join(first.file.rsplit("/", 2)[-2:])     # with its folder: a library may have a train.py of its own
    where = f"{file}:{first.line} " if first.file else ""
    return f"{where}{first.what}, {words.ms(first.ms_per_step)} ms per step{more}"


def _module(profile: Profile) -> str:
    """The costliest layer by its own time."""
    first = max(profile.modules, key=lambda each: each.self_ms, default=None)
    if first is None:
        return ""
    return f"{first.name or '(root)'} ({first.kind}), {words.ms(first.self_ms)} ms per step in its own forward"


def _compiler(profile: Profile) -> str:
    seen = ((profile.graph_breaks, "graph break"), (profile.recompiles, "recompile"))
    told = [words.count(len(found), name) for found, name in seen if found]
    where = next((text for found, _ in seen for text in found[:1]), "")
    return ", ".join(told) + (f": {where}" if told else "")


def _off_device(profile: Profile) -> str:
    more = f", +{len(profile.off_device) - 1:,} more" if len(profile.off_device) > 1 else ""
    return f"{profile.off_device[0]}{more}" if profile.off_device else ""


def _findings(profile: Profile, room: int, paint: Paint) -> Rows:
    if not profile.findings:
        return [("findings", fit(say.no_findings(profile), room))]
    shown = [f"{number}. {say.bound(finding)}: {finding.title}" for number, finding in enumerate(profile.findings[:FINDINGS], 1)]
    left = len(profile.findings) - FINDINGS
    more = f" (+{left:,} more: --verbose)" if left > 0 else ""
    heads = [*shown[:-1], fit(shown[-1], room - len(more)) + more]
    return labelled("findings", [paint(fit(head, room), "1") for head in heads])
