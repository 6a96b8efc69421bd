"""The sections of an analysis page: what limits the workload, where its time goes, what mending it would give."""

from __future__ import annotations

from collections.abc import Iterator

from saturate.records.analysis import Analysis, Device, Evidence, Finding, Profile
from saturate.report import analysis_charts as charts
from saturate.report import analysis_method as method
from saturate.report import analysis_tables as tables
from saturate.report import analysis_words as say
from saturate.report import svg, words
from saturate.report.markup import Markup, join, table, tag
from saturate.report.sections import facts, rows, section, swatch

Section = tuple[str, str, Markup | None]


def every(analysis: Analysis) -> Iterator[Section]:
    """(anchor, name in the navigation, section or None where there is nothing to say)."""
    device = say.focus(analysis)
    profile = analysis if isinstance(analysis, Profile) else None
    yield "time", "Time", _time(analysis, device)
    yield "gaps", "Gaps", _gaps(device)
    yield "findings", "Findings", _findings(analysis)
    yield "roofline", "Roofline", _roofline(device)
    if profile is not None:
        yield "lines", "Source lines", tables.places(profile)
        yield "modules", "Modules", tables.modules(profile)
        yield "memory", "Memory", _memory(profile)
    yield "devices", "Devices", tables.devices(analysis)
    yield "labels", "Labels", tables.annotations(analysis)
    yield "integrity", "Integrity", method.integrity(analysis)


def verdict(analysis: Analysis) -> Markup:
    """The band at the top: the verdict, the number it rests on, and what frames it."""
    brand = tag("p", tag("b", "saturate"), _of_what(analysis), class_="brand")
    because = say.because(analysis)
    body = [tag("h1", say.title(analysis)), tag("p", f"{words.capital(because)}.", class_="lede")]
    body.append(facts(_frame(analysis)))
    return tag("header", brand, *body, class_="verdict", id="verdict")


def _of_what(analysis: Analysis) -> Markup:
    """Of a profile the command, which tells one from another; of an analysis the files."""
    if isinstance(analysis, Profile) and analysis.command:
        return join([" profile of ", tag("code", words.shell(analysis.command))])
    files = [words.one_line(source).rpartition("/")[2] for source in analysis.sources]
    named = ", ".join(files[:3]) + (f" and {len(files) - 3:,} more" if len(files) > 3 else "")
    return join([" profile" if isinstance(analysis, Profile) else " analysis", f" of {named}" if named else ""])


def _frame(analysis: Analysis) -> list[tuple[str, object]]:
    device = say.focus(analysis)
    pairs: list[tuple[str, object]] = []
    if device is not None:
        where = say.place(device) if len(analysis.devices) > 1 or device.rank is not None else ""
        pairs.append(
            ("Device", join([say.named(device), tag("span", f" ({where})", class_="soft") if where else ""]))
        )
        if device.steps and device.step_ns is not None:
            pairs.append(("Steps recorded", f"{device.steps:,} of {say.time(device.step_ns // device.steps)}"))
    if isinstance(analysis, Profile):
        if analysis.step_ms is not None:
            pairs.append(("Step without a profiler", f"{words.ms(analysis.step_ms)}\u00a0ms"))
        if analysis.loader_cost is not None:
            pairs.append(("Loader", ", ".join(say.loader_cost(analysis.loader_cost))))
        if analysis.mfu is not None:
            pairs.append(("Model FLOPs utilization", say.share(analysis.mfu)))
    if device is not None:
        busy = (("Busy, of the steps", device.busy_of_step), ("Busy, of the span", device.busy_of_span))
        pairs += [(name, say.share(value)) for name, value in busy if value is not None]
    best = max((finding.bound for finding in analysis.findings if finding.bound is not None), default=None)
    if best is not None:
        pairs.append(("Largest bound", words.bound(best, times="\u00d7")))
    blocking = sum(bool(problem.blocks) for problem in analysis.integrity.problems)
    pairs.append(("Trace", words.count(blocking, "problem") if blocking else "supports every conclusion"))
    return pairs


def _stacked(name: object, parts: list[say.Part], whole: int, told: str) -> Markup:
    drawn = svg.stack([(part.name, part.ns, part.shade) for part in parts], whole, label=told)
    return tag("li", tag("p", name), drawn)


def _time(analysis: Analysis, device: Device | None) -> Markup:
    title = "Where the time goes"
    bars, body = [], []
    profile = analysis if isinstance(analysis, Profile) else None
    split = say.split(profile) if profile is not None else []
    split_ns = sum(part.ns for part in split)
    if split_ns > 0:
        steps = words.count(profile.split_steps, "step") if profile.split_steps else "the recorded steps"
        name = join([tag("b", "What the step does"), f", of {steps}, {say.time(split_ns)}"])
        bars.append(_stacked(name, split, split_ns, _told(split, split_ns)))
        body.append(_parts_table(split, split_ns, "these steps"))
    parts = say.parts(device) if device is not None else []
    whole, window = say.window(device) if device is not None else (None, "")
    if parts and whole:
        who = "What the device does" if device.id >= 0 else "What operators do"
        name = join([tag("b", who), f", of {window}, {say.time(whole)}"])
        bars.append(_stacked(name, parts, whole, _told(parts, whole)))
        body.append(_parts_table(parts, whole, window))
    if not bars:
        return section("time", title, f"The parts of the window are not known: {say.because(analysis)}.")
    each = charts.steps(device.each_step, parts) if device is not None and parts else None
    if each is not None:
        body += [
            tag("h3", "Step by step"),
            tag("p", "One column per step: its height is the time of the step, its shades are those of the table.", class_="soft small"),
            each,
        ]
    edge = say.edges(device) if device is not None else []
    lede = "The parts do not overlap, and sum to the window exactly, to the nanosecond."
    if device is not None and device.kernels and device.step_ns is None:
        lede += " The trace has no steps, so the window is the span: first to last event on the device."
    return section(
        "time",
        title,
        lede,
        tag("ol", *bars, class_="bars"),
        *body,
        _waits(device),
        tag("p", f"Idle inside the steps, but outside the span: {', '.join(edge)}.", class_="fine soft small")
        if edge
        else "",
    )


def _told(parts: list[say.Part], whole: int) -> str:
    return ", ".join(f"{part.name} {say.share(part.ns / whole)}" for part in parts)


def _parts_table(parts: list[say.Part], whole: int, window: str) -> Markup:
    lines = [
        [
            swatch(part.shade, part.name),
            say.share(part.ns / whole),
            say.time(part.ns),
            f"{part.ns:,}",
        ]
        for part in parts
    ]
    return table(
        ["Part", f"Of {window}", "Time", "Nanoseconds"],
        lines,
        label=f"Parts of {window}",
        numeric=[1, 2, 3],
        foot=["Sum", say.share(1.0), say.time(whole), f"{sum(part.ns for part in parts):,}"],
        class_="compact parts",
    )


def _waits(device: Device | None) -> Markup:
    """Input wait and overlap: shares that cut across the exclusive parts."""
    if device is None or not device.kernels:
        return Markup("")
    wait, (_, window) = device.data_wait, say.window(device)
    if wait.raw is None:
        reason = device.unknown.get("data_wait", "the trace holds no loader events")
        pairs = [("Input wait", f"{say.UNKNOWN}: {reason}")]
    else:
        pairs = [
            (f"Input wait, raw, of {window}", say.share(wait.raw)),
            (f"Input wait, exposed, of {window}", say.share(wait.exposed)),
        ]
    if device.communication_ns:
        pairs.append(("Communication, hidden or not", say.time(device.communication_ns)))
        pairs.append(("Hidden by computation, of it", say.share(device.communication_overlap)))
    if device.median_kernel_ns is not None:
        pairs.append(("Median kernel", say.time(device.median_kernel_ns)))
    if device.short_kernels is not None:
        pairs.append(("Kernels below 10 us", say.share(device.short_kernels)))
    if device.median_launch_delay_ns is not None:
        pairs.append(("Median launch to start", say.time(device.median_launch_delay_ns)))
    occupancy = device.occupancy
    for name, value in (
        ("SMs filled, at most", occupancy.sm_fill),
        ("SMs filled, of the steps", occupancy.sm_fill_of_step),
        ("Occupancy, at most", occupancy.occupancy),
        ("Fullness of the last wave", occupancy.tail),
    ):
        if value is not None:
            pairs.append((name, say.share(value)))
    return facts([*pairs], "facts plain small")


def _gaps(device: Device | None) -> Markup | None:
    found = say.gaps(device) if device is not None else []
    if not found:
        return None
    lines = [
        (
            swatch(shade, name),
            svg.bar(
                value, 1.0, label=f"{name}: {say.share(value)} of the idle time inside the span", css=f"shade{shade}"
            ),
            tag("b", say.share(value)),
        )
        for name, value, shade in found
    ]
    total = sum(device.gap_ns.values())
    lede = "Why the device was idle, of its idle time inside the span" + (f", {say.time(total)}." if total else ".")
    return section("gaps", "Why the device waits", lede, rows(lines, "rows short"))


def _findings(analysis: Analysis) -> Markup:
    lede = (
        "Causes of lost time, the largest bound first; those without a bound stand before those with a small one. "
        "A bound is the most that fixing the cause could gain."
    )
    if not analysis.findings:
        why = say.no_findings(analysis)
        return section("findings", "Findings", f"{words.capital(why)}.")
    return section(
        "findings", "Findings", lede, tag("ol", *(_card(finding) for finding in analysis.findings), class_="cards")
    )


def _card(finding: Finding) -> Markup:
    body = [tag("h3", tag("span", finding.title), tag("b", say.bound(finding, "\u00d7"))), tag("p", finding.reason)]
    if finding.evidence:
        lines = [
            [each.metric, _number(each), _threshold(each), tag("code", each.where) if each.where else ""]
            for each in finding.evidence
        ]
        used = [index for index in range(4) if index < 2 or any(line[index] for line in lines)]
        names = ("Evidence", "Value", "Threshold", "Where")
        body.append(
            table(
                [names[index] for index in used],
                [[line[index] for index in used] for line in lines],
                label=f"Evidence of {finding.title}",
                numeric=[place for place, index in enumerate(used) if index in (1, 2)],
            )
        )
    helps = say.helps(finding)
    if helps:
        body.append(tag("p", tag("b", "What helps: "), helps + ".", class_="helps"))
    body.append(tag("p", tag("code", finding.id), f", {finding.confidence} confidence", class_="id"))
    return tag("li", *body)


def _number(evidence: Evidence) -> str:
    if evidence.unit.startswith("of "):
        return f"{say.share(evidence.value)} {evidence.unit}"
    return f"{evidence.value:,.4g} {evidence.unit}".strip()


def _threshold(evidence: Evidence) -> str:
    if evidence.threshold is None:
        return ""
    return say.share(evidence.threshold) if evidence.unit.startswith("of ") else f"{evidence.threshold:,.4g}"


def _roofline(device: Device | None) -> Markup | None:
    if device is None or not device.roofline.operators:
        return None
    roof, operators = device.roofline, say.operators(device)
    chart = charts.roofline(roof, operators)
    body: list[object] = []
    if chart is not None:
        drawn = len(charts.plottable(operators))
        body.append(chart)
        body.append(
            charts.key(
                [
                    ("memory", "limited by memory"),
                    ("compute", "limited by arithmetic"),
                    ("latency", "too short to fill the device"),
                ]
            )
        )
        left = len(operators) - drawn
        note = "The area of a dot is its operator\u2019s time, its number the row below."
        if left:
            note += f" {left:,} without FLOPs or without a roof have no place here."
        body.append(tag("p", note, class_="soft small"))
    lede = f"Operators by their time. Nothing is compared with a roof: {roof.source}."
    if roof.coverage is not None:
        lede = (
            "Operators by the time that their roof says could be recovered; "
            f"{say.share(roof.coverage)} of kernel time is modelled. Ceilings: {roof.source}."
        )
    return section("roofline", "Operators and their roof", lede, *body, tables.operators(operators, roof.source))


def _memory(profile: Profile) -> Markup | None:
    memory = profile.memory
    known = {name: getattr(memory, key) for key, name in say.MEMORY.items() if getattr(memory, key) is not None}
    pairs = [
        (name, value)
        for name, value in (
            ("Peak", say.size(memory.peak) if memory.peak is not None else ""),
            ("Held by the allocator", say.size(memory.reserved) if memory.reserved is not None else ""),
            (
                "Of it unused (fragmentation)",
                say.share(memory.fragmentation) if memory.fragmentation is not None else "",
            ),
            ("Allocator retries", f"{memory.allocator_retries:,}" if memory.allocator_retries is not None else ""),
            ("There is, on the device or machine", say.size(memory.limit) if memory.limit is not None else ""),
        )
        if value
    ]
    if not known and not pairs:
        return None
    full = max([*known.values(), 1])
    lines = [
        (name, svg.bar(value, full, label=f"{name}: {say.size(value)}", css="time"), tag("b", say.size(value)))
        for name, value in known.items()
    ]
    missing = tag(
        "p",
        "Not known: "
        + "; ".join(f"{name.replace('_', ' ')}: {reason}" for name, reason in memory.unknown.items())
        + ".",
        class_="fine soft small",
    )
    return section(
        "memory",
        "Memory at the peak of a step",
        "",
        rows(lines, "rows short"),
        facts([*pairs], "facts plain small"),
        facts([(f"{line.file}:{line.line} {line.function}" + (f" (in {line.inside})" if line.inside else ""), say.size(line.bytes))
               for line in memory.lines[:5]], "facts plain small") if memory.lines else "",
        missing if memory.unknown else "",
    )
