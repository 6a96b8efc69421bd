"""What `analyze` and `profile` end with in a terminal: the verdict first, the next command last."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

from saturate.records.analysis import Analysis, Device, Finding, ModuleCost, Profile, Sync
from saturate.report import analysis_words as say
from saturate.report import words
from saturate.report.cells import cells, cut, fit, wrap
from saturate.report.paint import BLUE, BOLD, GREEN, MIN_WIDTH, YELLOW, Paint, labelled, labelled_line, paints

LABEL = 11  # width of the label column
BAR = 60  # the longest bar: a finer one says no more

#: Rows of each table: the page and `--json` hold them all.
FINDINGS, OPERATORS, PLACES, RANKS, PROBLEMS = 5, 5, 3, 8, 4

#: Reasons that stand elsewhere in the summary, or say that there was nothing to know.
_TOLD = frozenset({"data_wait", "roofline", "communication_overlap", "verdict", "findings"})
#: What only accelerators have.
_OF_DEVICES = frozenset({"short_kernels", "median_kernel_ns", "median_launch_delay_ns", "gaps", "occupancy"})

_BLOCKS = "\u2588\u2593\u2592\u2591"
Rows = list[tuple[str, str]]


def can_draw(encoding: str | None) -> bool:
    """Whether a stream of this encoding can show block characters."""
    try:
        _BLOCKS.encode(encoding or "ascii")
    except (UnicodeEncodeError, LookupError):
        return False
    return True


def summary(analysis: Analysis, *, width: int, color: bool, blocks: bool = True) -> str:
    """The analysis, or profile, as plain lines without a trailing newline.

    `width` is in terminal cells; only paths and commands may exceed it, so that they can be copied. `color` adds ANSI
    codes, which do not count as width. Without `blocks`, everything is ASCII.
    """
    width = max(width, MIN_WIDTH)
    paint = paints(color)
    room = width - LABEL
    rows: Rows = []
    device = say.focus(analysis)
    if device is not None:
        rows += _device(analysis, device, room)
    rows += _profile_top(analysis, room, paint, blocks) if isinstance(analysis, Profile) else []
    if device is not None and not (isinstance(analysis, Profile) and analysis.split):
        rows += _window(device, room, paint, blocks)
    if device is not None:
        rows += _waits(analysis, device, room)
    rows += _ranks(analysis, room)
    rows += _profile_places(analysis, room) if isinstance(analysis, Profile) else []
    rows += _findings(analysis, room, paint)
    if device is not None and not isinstance(analysis, Profile):
        rows += _operators(device, room)
    rows += _problems(analysis, room)
    for label, path in (("trace", getattr(analysis, "trace", "")), ("report", getattr(analysis, "report", ""))):
        rows += [(label, words.clean(path))] if path else []
    return finished(headline(analysis, width, paint), rows, say.next_command(analysis), paint, blocks)


def finished(head: list[str], rows: Rows, command: str, paint: Paint, blocks: bool) -> str:
    """Head, labelled rows and the next command as one text, in ASCII without `blocks`."""
    lines = [*head, *(labelled_line(label, text, LABEL, paint) for label, text in rows), labelled_line("next", command, LABEL, paint, BOLD)]
    text = "\n".join(lines)
    return text if blocks else text.encode("ascii", "replace").decode()


def headline(analysis: Analysis, width: int, paint: Paint) -> list[str]:
    """The verdict and the number it rests on, in at most three lines."""
    title = say.title(analysis)
    codes = (BOLD, GREEN) if analysis.verdict == "compute-bound" else (BOLD, YELLOW)
    lines = wrap(f"{title}: {say.because(analysis)}", width, 3)
    return [paint(title, *codes) + lines[0].removeprefix(title), *lines[1:]] if lines[0].startswith(title) else lines


def flow(parts: Sequence[str], width: int, separator: str = ", ") -> list[str]:
    """Parts on as many lines of `width` cells as they need, broken between them; only one too long for a line breaks
    inside."""
    lines: list[str] = []
    room = width - len(separator.rstrip())  # each line but the last ends with a separator
    for part in filter(None, parts):
        if lines and cells(lines[-1] + separator + part) <= room:
            lines[-1] += separator + part
        else:
            if lines:
                lines[-1] += separator.rstrip()
            lines += wrap(part, room, 2)
    return lines


def drawn(parts: Sequence[say.Part], width: int, paint: Paint, blocks: bool) -> str:
    """A bar of `width` cells: each boundary is where it belongs to half a cell, so that errors do not add up."""
    total = sum(part.ns for part in parts)
    if total <= 0 or any(part.ns < 0 for part in parts):
        return ""
    ends = [round(width * end / total) for end in accumulate(part.ns for part in parts)]
    spans = [end - start for start, end in zip([0, *ends], ends)]
    return "".join(
        paint((part.block if blocks else part.letter) * span, YELLOW if part.waits else BLUE)
        for part, span in zip(parts, spans)
    )


def _device(analysis: Analysis, device: Device, room: int) -> Rows:
    several = len(analysis.devices) > 1
    which = say.places(analysis.devices)[analysis.devices.index(device)]
    facts = [
        say.named(device),
        which if (several or device.rank is not None) and which != say.named(device) else "",
        words.count(device.kernels, "kernel") if device.kernels else "",
        f"{words.count(device.steps, 'step')} of {say.time(device.step_ns // device.steps)}"
        if device.steps and device.step_ns is not None
        else "no steps",
    ]
    rows = labelled("device", flow(facts, room))
    if several:
        traces = len({each.source for each in analysis.devices})
        rows.append(
            (
                "",
                fit(
                    f"1 of {len(analysis.devices):,} devices in {words.count(traces, 'trace')}; the others are below",
                    room,
                ),
            )
        )
    return rows


def _window(device: Device, room: int, paint: Paint, blocks: bool) -> Rows:
    """The exclusive parts of the window."""
    whole, name = say.window(device)
    parts = say.parts(device)
    if not parts or not whole:
        return []
    bar = drawn(parts, min(room, BAR), paint, blocks)
    told = [f"{part.letter if not blocks else part.block} {part.name} {say.share(part.ns / whole)}" for part in parts]
    rows = [("time", bar), *labelled("", flow(told, room, "  "))]
    return [*rows, ("", fit(f"of {name}, {say.time(whole)}", room))]


def _waits(analysis: Analysis, device: Device, room: int) -> Rows:
    """What cuts across the parts: both denominators, input wait, communication, the causes of gaps."""
    whole, name = say.window(device)
    rows: Rows = []
    busy = [f"{say.share(device.busy_of_step)} of the steps"] if device.step_ns is not None else []
    span = [f"{say.time(device.span_ns)} from the first to the last event"] if device.span_ns is not None else []
    if device.busy_of_step is not None or device.busy_of_span is not None:
        rows += labelled("busy", flow([*busy, f"{say.share(device.busy_of_span)} of the span", *span], room))
    if device.kernels:
        rows += labelled("input", _input(device, name, room))
    if device.communication_ns:
        hidden = f"{say.share(device.communication_overlap)} of it hidden by computation"
        compared = analysis.stragglers and "stragglers" not in analysis.unknown
        alone = "" if compared else "includes waiting for peers"
        amount = f"{say.time(device.communication_ns)}, {say.share(say.of(device.communication_ns, whole))} of {name}"
        rows += labelled("network", flow([amount, hidden, alone], room))
    causes = [f"{cause} {say.share(value)}" for cause, value, _ in say.gaps(device) if value]
    if causes:
        rows += labelled("gaps", flow([*causes, "of the idle time inside the span"], room))
    return rows + labelled("edges", flow(say.edges(device), room))


def _input(device: Device, name: str, room: int) -> list[str]:
    wait = device.data_wait
    if wait.exposed is None:
        why = device.unknown.get("data_wait", "no loader events in the trace")
        return wrap(f"{say.UNKNOWN}: {why}", room, 2)
    return flow(
        [f"waited {say.share(wait.raw)} of {name}", f"{say.share(wait.exposed)} with an idle device (exposed)"], room
    )


def _ranks(analysis: Analysis, room: int) -> Rows:
    """Devices by idleness, and who waits for whom."""
    rows: Rows = []
    if len(analysis.devices) > 1:

        def idle(device: Device) -> float:
            return -(say.of(device.idle_ns, say.window(device)[0]) or 0.0)

        shown = sorted(analysis.devices, key=idle)[:RANKS]
        named = dict(zip(map(id, analysis.devices), say.places(analysis.devices)))
        table = [
            [
                named[id(each)],
                f"idle {say.share(say.of(each.idle_ns, say.window(each)[0]))}",
                f"network {say.share(say.of(each.exposed_communication_ns, say.window(each)[0]))}",
                say.LIMITS[each.verdict][0].lower(),
            ]
            for each in shown
        ]
        rows += labelled("devices", columns(table, room, numeric={1, 2}))
        rows += _more(len(analysis.devices) - len(shown), room)
    if analysis.stragglers:
        late = sorted(analysis.stragglers, key=lambda each: -each.late_ns)[:PLACES]
        table = [
            [
                f"rank {each.rank}",
                f"late {say.time(each.late_ns)}",
                f"waits {say.time(each.wait_ns)}",
                f"transfers {say.time(each.transfer_ns)}",
                f"in {words.count(each.collectives, 'collective')}",
            ]
            for each in late
        ]
        rows += labelled("peers", columns(table, room, numeric={1, 2, 3}))
    return rows


def _more(number: int, room: int) -> Rows:
    return [("", fit(f"+{number:,} more, see --json or --html", room))] if number > 0 else []


def columns(table: Sequence[Sequence[str]], width: int, numeric: set[int], elastic: int | None = None) -> list[str]:
    """Aligned lines of at most `width` cells; the `elastic` column gives way first, then the last ones go."""
    table = [[words.one_line(text) for text in row] for row in table]
    if not table:
        return []
    widths = [max(cells(row[index]) for row in table) for index in range(len(table[0]))]
    keep = len(widths)
    least = 16
    while (
        keep > 2
        and sum(widths[:keep]) + 2 * (keep - 1) > width
        and (
            elastic is None
            or elastic >= keep
            or sum(widths[:keep]) - widths[elastic] + min(least, widths[elastic]) + 2 * (keep - 1) > width
        )
    ):
        keep -= 1
    if elastic is not None and elastic < keep:
        widths[elastic] = min(
            widths[elastic], max(width - (sum(widths[:keep]) - widths[elastic]) - 2 * (keep - 1), 8)
        )
    lines = []
    for row in table:
        texts = [cut(text, widths[index]) for index, text in enumerate(row[:keep])]
        padded = [
            " " * (widths[index] - cells(text)) + text
            if index in numeric
            else text + " " * (widths[index] - cells(text))
            for index, text in enumerate(texts)
        ]
        lines.append(cut("  ".join(padded).rstrip(), width))
    return lines


def _findings(analysis: Analysis, room: int, paint: Paint) -> Rows:
    if not analysis.findings:
        return labelled("findings", wrap(say.no_findings(analysis), room, 2))
    most = PLACES if isinstance(analysis, Profile) else FINDINGS
    rows: Rows = []
    for number, finding in enumerate(analysis.findings[:most], 1):
        lines = _finding(number, finding, room, most == FINDINGS, paint)
        rows += labelled("findings" if number == 1 else "", lines)
    return rows + _more(len(analysis.findings) - most, room)


def _finding(number: int, finding: Finding, room: int, full: bool, paint: Paint) -> list[str]:
    head = words.one_line(f"{number}. {say.bound(finding)}: {finding.title}")
    trust = f" ({finding.confidence} confidence)"
    # Rather the whole title than how sure it is, which the reason's numbers tell as well.
    head = head + trust if cells(head + trust) <= room else fit(head, room)
    inner = room - 3
    lines = wrap(finding.reason, inner, 2)
    helps = say.helps(finding) if full else ""  # a profile's next command names the techniques
    lines += [f"-> {line}" for line in wrap(helps, inner - 3, 1)] if helps else []
    return [paint(head, BOLD), *("   " + line for line in lines)]


def _operators(device: Device, room: int) -> Rows:
    """What could be recovered, operator by operator."""
    found = say.operators(device)
    if not found:
        return []
    roofline = device.roofline
    table = [["recoverable", "time", "of roof", "limit", "operator"]]
    table += [
        [
            say.time(each.recoverable_ns) if each.recoverable_ns is not None else "-",
            say.time(each.time_ns),
            f"{100 * each.efficiency:.0f} %" if each.efficiency is not None else "-",
            say.kind(each),
            f"{each.name} {say.signature(each)}",
        ]
        for each in found[:OPERATORS]
    ]
    # The name comes last on the line but says most: the limit gives way before it.
    if room < 80:
        table = [[*row[:3], row[4]] for row in table]
    rows = labelled("operators", columns(table, room, numeric={0, 1, 2}, elastic=len(table[0]) - 1))
    if roofline.coverage is None:
        return rows + labelled("", wrap(f"no roof: {roofline.source}", room, 2) if roofline.source else [])
    modelled = f"modelled: {say.share(roofline.coverage)} of kernel time"
    return rows + labelled("", flow([modelled, f"roof: {roofline.source}"], room, "; "))


def _problems(analysis: Analysis, room: int) -> Rows:
    rows: Rows = []
    headline = analysis.unknown.get("verdict")      # stands above already
    problems = [problem for problem in analysis.integrity.problems if problem.message != headline]
    for problem in problems[:PROBLEMS]:
        blocked = f" (no conclusion on: {', '.join(problem.blocks)})" if problem.blocks else ""
        rows += labelled("problem" if problem.blocks else "note", wrap(f"{problem.message}{blocked}", room, 2))
    rows += _more(len(problems) - PROBLEMS, room)
    told = _TOLD | (_OF_DEVICES if any(device.id < 0 for device in analysis.devices) else frozenset())
    told |= {"stragglers", "rank"} if len(analysis.devices) < 2 else set()
    blocked = [
        f"{name}: {reason}"
        for name, reason in say.unknowns(analysis, told)
        if reason not in {problem.message for problem in analysis.integrity.problems}
    ]
    rows += labelled("not known", [fit(text, room) for text in blocked[:PROBLEMS]])
    return rows + _more(len(blocked) - PROBLEMS, room)


def _profile_top(profile: Profile, room: int, paint: Paint, blocks: bool) -> Rows:
    step = [f"{words.ms(profile.step_ms)} ms without a profiler" if profile.step_ms is not None else ""]
    if profile.step_ms_profiled is not None:
        steps = profile.recorded_steps or profile.split_steps
        recorded = f" ({words.count(steps, 'step')})" if steps else ""
        step.append(f"{words.ms(profile.step_ms_profiled)} ms while recorded{recorded}")
    rows = labelled("step", flow(step, room))
    if profile.loader_cost is not None:
        rows += labelled("loader", flow(say.loader_cost(profile.loader_cost), room))
    parts = say.split(profile)
    total = sum(part.ns for part in parts)
    if total > 0:
        told = [f"{part.letter} {part.name} {say.share(part.ns / total)}" for part in parts]
        rows += [("split", drawn(parts, min(room, BAR), paint, blocks)), *labelled("", flow(told, room, "  "))]
    flops = [
        f"{name} {say.share(value)}"
        for name, value in (
            ("MFU", profile.mfu),
            ("HFU", profile.hfu),
            ("of the measured ceiling", profile.mfu_achievable),
        )
        if value is not None
    ]
    if flops and profile.flops_coverage is not None:
        flops.append(f"FLOPs known for {say.share(profile.flops_coverage)} of operator time")
    if flops and profile.flops_left_out:
        flops.append(say.left_out(profile))
    rows += labelled("flops", flow(flops, room))
    memory = profile.memory
    kinds = [f"{name} {say.size(getattr(memory, key))}" for key, name in say.MEMORY.items() if getattr(memory, key)]
    kinds += [f"{say.size(line.bytes)} by {line.file}:{line.line}" for line in memory.lines[:1]]
    peak = [f"peak {say.size(memory.peak)}"] if memory.peak is not None else []
    return rows + labelled("memory", flow([*peak, *kinds], room))


def _profile_places(profile: Profile, room: int) -> Rows:
    """Where to look: lines, modules, what the compiler did."""
    rows = labelled("syncs", _places(profile.syncs, room, PLACES))
    rows += labelled("input code", _places(profile.input_lines, room, 1))
    slow: list[ModuleCost] = sorted(profile.modules, key=lambda each: -each.self_ms)[: PLACES - 1]
    table = [
        [
            each.name or "(root)",
            each.kind,
            f"{words.ms(each.self_ms)} ms itself",
            f"{words.ms(each.forward_ms)} ms forward",
        ]
        for each in slow
    ]
    rows += labelled("modules", columns(table, room, numeric={2, 3}, elastic=0))
    seen = ((profile.graph_breaks, "graph break"), (profile.recompiles, "recompile"))
    rows += labelled("compiler", flow([words.count(len(found), name) for found, name in seen if found], room))
    off = profile.off_device
    more = f"+{len(off) - PLACES:,} more" if len(off) > PLACES else ""
    return rows + labelled("on the CPU", flow([*map(words.one_line, off[:PLACES]), more], room))


def _places(places: Sequence[Sync], room: int, most: int) -> list[str]:
    shown = sorted(places, key=lambda each: -each.ms_per_step)[:most]
    return columns(
        [
            [
                say.line(each),
                each.what,
                f"{words.ms(each.ms_per_step)} ms per step",
                "" if each.calls_per_step is None else f"{each.calls_per_step:g} call{'' if each.calls_per_step == 1 else 's'}",
            ]
            for each in shown
        ],
        room,
        numeric={2, 3},
        elastic=0,
    )
