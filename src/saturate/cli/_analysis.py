"""From files to an analysis: read, break down, look for causes, put the ranks together. Needs numpy.

Files are read one after the other, and only what is printed is kept of each, so memory does not grow with their size.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TextIO

import msgspec

from saturate.cli._output import with_program
from saturate.errors import TraceError
from saturate.findings import _registry as rules
from saturate.machine import ceilings
from saturate.records.analysis import (
    Analysis,
    Device,
    Finding,
    Integrity,
    Limit,
    Problem,
    Straggler,
    at_work,
    overall,
)
from saturate.records.ceilings import Ceilings
from saturate.records.observations import CommunicationSeen, Observations
from saturate.report import analysis as terminal
from saturate.report import analysis_compare, analysis_html, words
from saturate.techniques import _registry as techniques
from saturate.trace import collectives, one_run, ranks
from saturate.trace.analyze import analyze_one, combine, not_one_run, ranked
from saturate.trace.collectives import Seen
from saturate.trace.columns import Trace
from saturate.trace.compare import compare
from saturate.trace.observe import observations
from saturate.trace.read import read
from saturate.trace.trim import Trimmed

#: With more files than that, a device keeps its `OPERATORS` operators of most recoverable time and no single steps,
#: and a file its `OPERATORS` longest labels.
MANY, OPERATORS = 16, 20

Shown = tuple[msgspec.Struct, str, Callable[[], str]]


@dataclass(frozen=True)
class Reduced:
    """What is kept of one file."""

    analysis: Analysis
    seen: list[Observations]  # one for each device
    collectives: list[Seen]
    member: one_run.Member


class Progress:
    """Which file is read and how far, on standard error: one line that changes, or without a terminal a few lines."""

    REDRAW_S, LINE_S = 0.1, 10.0

    def __init__(self, stream: TextIO):
        self.stream = stream
        self.drawn = time.monotonic()  # nothing is said of what is quick
        self.width = 0

    def of(self, path: Path, number: int, files: int) -> Callable[[float], None]:
        """The callback for one file, which takes the share that is read."""
        name = words.one_line(path.name)[:60] + (f" ({number:,} of {files:,})" if files > 1 else "")

        def show(share: float) -> None:
            now, live = time.monotonic(), self.stream.isatty()
            if now - self.drawn < (self.REDRAW_S if live else self.LINE_S):
                return
            self.drawn = now
            line = f"reading {name} {share:4.0%}"
            self._write("\r" + line.ljust(self.width) if live else line + "\n")
            self.width = len(line)

        return show

    def clear(self) -> None:
        """Give the line back."""
        if self.width and self.stream.isatty():
            self._write("\r" + " " * self.width + "\r")
        self.width = 0

    def _write(self, text: str) -> None:
        try:
            self.stream.write(text)
            self.stream.flush()
        except OSError:
            return  # the terminal was closed; the analysis goes on


def analysed(files: Sequence[Path], progress: Progress, **look: Any) -> Shown:
    """The record, its text, and what makes its page."""
    record = analysis_of(files, progress)
    return record, with_program(terminal.summary(record, **look)), lambda: analysis_html.render(record)


def compared(old: Path, new: Path, progress: Progress, **look: Any) -> Shown:
    """The same of a comparison."""
    record = compare(analysis_of([old], progress), analysis_of([new], progress), rules.judges)
    return record, with_program(analysis_compare.summary(record, **look)), lambda: analysis_html.render_comparison(record)


def kept(done: Trimmed) -> str:
    """What of a trace was written, and of how much."""
    events = f"{done.events:,} of {done.of_events:,} events"
    if done.steps:
        return f"{len(done.steps):,} of {words.count(done.of_steps, 'step')}, {events}"
    if done.window_ns == done.of_ns:
        return f"no steps are marked: its whole length, {events}"
    return f"no steps are marked: {done.window_ns / 1e6:,.1f} of {done.of_ns / 1e6:,.1f} ms, {events}"


def analysis_of(files: Sequence[Path], progress: Progress) -> Analysis:
    """All files together. One that cannot be read is left out, and said; raises the first TraceError if none can."""
    parts: list[Reduced] = []
    errors: list[TraceError] = []
    # The CPU of a trace has no name, so nothing says that it is this machine's.
    measured = [record for record in ceilings.kept().records if record.device != "cpu"]
    for number, path in enumerate(files, 1):
        try:
            trace = read(path, progress.of(path, number, len(files)))
            parts.append(reduced(trace, measured, lighter=len(files) > MANY))
        except TraceError as error:
            errors.append(error)
        finally:
            progress.clear()
    if not parts:
        raise errors[0]
    return together(
        parts, [Problem(id="unreadable", message=f"left out: {error.message}", blocks=["ranks"]) for error in errors]
    )


def reduced(trace: Trace, measured: Sequence[Ceilings] = (), lighter: bool = False) -> Reduced:
    """What is kept of a trace. `measured`: the ceilings that are known on this machine."""
    analysis = analyze_one(trace, measured)
    seen = [observations(trace, device) for device in analysis.devices]
    if lighter:
        analysis = msgspec.structs.replace(
            analysis,
            devices=[_lighter(device) for device in analysis.devices],
            annotations=analysis.annotations[:OPERATORS],
        )
        seen = [
            replace(each, operators=tuple(sorted(each.operators, key=lambda o: -o.share)[:OPERATORS]))
            for each in seen
        ]
    return Reduced(analysis, seen, collectives.observe(trace), one_run.member(trace))


def _lighter(device: Device) -> Device:
    operators = sorted(device.roofline.operators, key=lambda each: -(each.recoverable_ns or 0))
    roofline = msgspec.structs.replace(device.roofline, operators=operators[:OPERATORS])
    why = f"left out: more than {MANY} traces at once"
    unknown = {**device.unknown, "each_step": why}
    if len(operators) > OPERATORS:
        unknown["roofline.operators"] = f"{len(operators) - OPERATORS:,} of less recoverable time {why}"
    return msgspec.structs.replace(device, roofline=roofline, each_step=[], unknown=unknown)


def together(parts: Sequence[Reduced], unread: Sequence[Problem] = ()) -> Analysis:
    """The analysis of all ranks, with findings."""
    compared = ranks.compared([part.member for part in parts], [each for part in parts for each in part.collectives])
    whole = combine(ranked([part.analysis for part in parts], [part.collectives for part in parts], compared))
    unknown, problems = dict(whole.unknown), [*unread, *problems_of(parts)]
    if compared.unknown and (len(parts) > 1 or compared.stragglers):
        unknown["stragglers"] = compared.unknown
    problems += not_one_run(compared)
    problems += [Problem(id="ranks", message=note, blocks=[]) for note in compared.notes if compared.stragglers]
    alone = [each for part in parts for each in part.seen]
    seen = [
        with_peers(each, device, compared.stragglers, compared.world_size)
        for device, each in zip(whole.devices, alone, strict=True)
    ]
    known = frozenset(techniques.load())
    devices = [
        judged(silent(device, rules.unanswered(each)), rules.verdict(each))
        for device, each in zip(whole.devices, seen, strict=True)
    ]
    found = [(device, rules.detect(each, known)) for device, each in zip(devices, seen, strict=True)]
    integrity = Integrity(ok=not any(problem.blocks for problem in problems), problems=problems)
    return msgspec.structs.replace(
        whole,
        devices=devices,
        integrity=integrity,
        verdict=overall(devices),
        findings=merged(found),
        stragglers=compared.stragglers,
        unknown=unknown,
    )


def silent(device: Device, ids: Sequence[str]) -> Device:
    """The device with the rules beside what is not known of it whose silence is no answer."""
    unknown = {rules.unanswered_field(id): "what this rule looks at was not recorded" for id in ids}
    return msgspec.structs.replace(device, unknown=device.unknown | unknown) if unknown else device


def judged(device: Device, limit: Limit) -> Device:
    """The device with its verdict; a reason for having none goes with the "unknown" that it explains."""
    if limit == "unknown":
        return msgspec.structs.replace(device, verdict=limit)
    unknown = {field: reason for field, reason in device.unknown.items() if field != "verdict"}
    return msgspec.structs.replace(device, verdict=limit, unknown=unknown)


def problems_of(parts: Sequence[Reduced]) -> list[Problem]:
    """The problems of all files, the same one of several files once."""
    found: dict[tuple[str, str], tuple[Problem, list[str]]] = {}
    for part in parts:
        for problem in part.analysis.integrity.problems:
            found.setdefault((problem.id, problem.message), (problem, []))[1].extend(part.analysis.sources)
    if len(parts) == 1:
        return [problem for problem, _ in found.values()]
    return [
        msgspec.structs.replace(problem, message=f"{sources[0]}{_more(len(sources) - 1)}: {problem.message}")
        for problem, sources in found.values()
    ]


def _more(files: int) -> str:
    return f" and {words.count(files, 'other')}" if files else ""


def with_peers(
    seen: Observations, device: Device, stragglers: Sequence[Straggler], world_size: int | None = None
) -> Observations:
    """What only several ranks together tell: how much of the communication was waiting, and for whom. `world_size`: of
    the run, where the trace of this device alone does not say it."""
    mine = next((each for each in stragglers if each.rank == device.rank), None)
    if mine is None:
        return seen
    latest = max(stragglers, key=lambda each: each.late_ns)
    time_ns = mine.wait_ns + mine.transfer_ns
    known: CommunicationSeen = replace(
        seen.communication,
        world_size=world_size or seen.communication.world_size,
        compared=len(stragglers),
        peer_wait=mine.wait_ns / time_ns if time_ns else None,
        slowest_rank=latest.rank,
        late_ms_per_step=latest.late_ns / 1e6 / device.steps if device.steps else None,
        late_rank_waits_ms_per_step=latest.wait_ns / 1e6 / device.steps if device.steps else None,
    )
    return replace(seen, communication=known)


def merged(found: Sequence[tuple[Device, Sequence[Finding]]]) -> list[Finding]:
    """Each finding once, as the device shows it that has most to gain, in the order of the rules' registry."""
    best: dict[str, tuple[Device, Finding]] = {}
    count: dict[str, int] = {}
    working = set(map(id, at_work([device for device, _ in found])))
    for device, findings in found:
        for finding in findings if id(device) in working else ():
            count[finding.id] = count.get(finding.id, 0) + 1
            if finding.id not in best or (finding.bound or 0.0) > (best[finding.id][1].bound or 0.0):
                best[finding.id] = (device, finding)
    if any(id != rules.ALONE for id in best):
        best.pop(rules.ALONE, None)  # one device has nothing to gain, but the run has
    several = len(found) > 1
    shown = [
        msgspec.structs.replace(finding, reason=f"{finding.reason} {_shown_by(device, count[id], len(found))}")
        if several
        else finding
        for id, (device, finding) in best.items()
    ]
    return sorted(shown, key=rules.rank)


def _shown_by(device: Device, count: int, devices: int) -> str:
    place = f"rank {device.rank}, device {device.id}" if device.rank is not None else f"device {device.id}"
    where = f"{place} of {words.one_line(device.source)}" if device.rank is None and device.source else place
    return f"(Numbers of {where}; {count:,} of {devices:,} devices show it.)"
