"""The first half of the report: verdict, measured staircase, where a step's time goes, every technique's fate."""

from __future__ import annotations

from collections.abc import Mapping

from saturate.records.result import StudyRecord, TechniqueOutcome
from saturate.report import svg, words
from saturate.report.markup import Markup, join, table, tag, with_interval
from saturate.report.style import SHADES

NBSP = "\u00a0"
_TRIED = ("rejected_numerics", "failed", "not_applied", "slower", "inconclusive", "no_difference")
_UNTRIED = ("not_tried", "not_applicable")


def section(anchor: str, title: str, lede: object, *body: object) -> Markup:
    """A titled section that the navigation can reach."""
    intro = [tag("p", lede)] if lede else []
    return tag(
        "section", tag("h2", title, id=f"{anchor}-title"), *intro, *body, id=anchor, aria_labelledby=f"{anchor}-title"
    )


def rows(items: list[tuple[object, Markup, object]], css: str = "rows") -> Markup:
    """Label, chart and value on one line each; on a phone the chart goes below the two."""
    return tag(
        "ol",
        *(tag("li", tag("span", label), chart, tag("span", value, class_="value")) for label, chart, value in items),
        class_=css,
    )


def facts(pairs: list[tuple[str, object]], css: str = "facts") -> Markup:
    """Labelled values side by side."""
    return tag("dl", *(tag("div", tag("dt", label), tag("dd", value)) for label, value in pairs), class_=css)


def swatch(shade: int, name: str) -> Markup:
    """A name beside the shade that stands for it in a chart."""
    return join([tag("span", class_=f"swatch shade{shade}", aria_hidden="true"), name])


def fate(outcome: TechniqueOutcome) -> Markup:
    """A fate as its sign and its word."""
    return tag("span", svg.sign(outcome.fate), words.FATES[outcome.fate], class_="fate")


def milliseconds(value: float | None) -> str:
    """A step time with its unit."""
    return words.ms(value) + (f"{NBSP}ms" if value is not None else "")


def verdict(record: StudyRecord) -> Markup:
    """The band at the top: the answer, whether it is proven, before and after, and the numbers that frame it."""
    result, answer = record.result, words.headline(record, "\u00d7")
    if answer.kind == "win":
        title = words.ratio(result.speedup, times="\u00d7") + " faster"
    else:
        title = answer.title
    body = [tag("h1", title), _lede(record, answer)]
    chart = _change(record, answer.kind == "win")
    if chart:
        body.append(chart)
    body.append(facts(_frame(record)))
    if starts := _starts(record):
        body.append(facts(starts, "facts plain small"))
    if record.machine:
        body.append(facts([*record.machine.items()], "facts plain small"))
    if record.notes:
        body.append(tag("ul", *(tag("li", note) for note in record.notes), class_="notes small", aria_label="Notes"))
    brand = tag(
        "p", tag("b", "saturate"), f" {record.saturate}, study {result.run}, {record.created}", class_="brand"
    )
    return tag("header", brand, *body, class_=answer.kind, id="verdict")


def _lede(record: StudyRecord, answer: words.Headline) -> Markup:
    result = record.result
    status, shape = {
        True: ("Verified", "kept"),
        False: ("Not verified", "rejected_numerics"),
        None: ("Cannot verify", "inconclusive"),
    }[result.verified]
    proof = join(
        [
            tag("span", svg.sign(shape), status, class_="status"),
            f": {result.verified_reason}" if result.verified_reason else "",
            ". ",
        ]
    )
    if answer.kind != "win":
        if result.verified is None and (not result.verified_reason or answer.kind == "inconclusive"):
            proof = Markup("")  # nothing was kept, so there was nothing to verify
        # The reason of the headline often is the reason of the verification: say it once.
        why = answer.why if answer.why != result.verified_reason or not proof else ""
        return tag("p", _sentence(answer.detail).replace("->", "\u2192"), proof, _sentence(why), class_="lede")
    interval = result.speedup_ci
    text = (
        ""
        if interval is None
        else f"Interval {words.ratio(result.speedup, interval).partition(' ')[2]}, "
        "measured in a race against the unchanged script."
    )
    return tag("p", proof, text, class_="lede")


def _sentence(text: str) -> str:
    return f"{words.capital(text)}. " if text else ""


def _change(record: StudyRecord, won: bool) -> Markup | None:
    before, after = record.result.baseline.step_ms, record.result.tuned.step_ms
    if before is None or after is None:
        return None
    full = max(before, after)
    if won:
        lines = [("before", before, "base"), ("after", after, "tuned")]
    elif words.kept(record) or record.result.speedup_ci is not None:
        lines = [("before", before, "base"), ("tried", after, "time")]
    else:       # nothing was put in the baseline's place: its own time is the only one
        lines = [("baseline", before, "base")]
    return tag(
        "div",
        rows(
            [
                (
                    name,
                    svg.bar(value, full, label=f"{name}: {words.ms(value)} ms per step", css=css),
                    join([tag("b", words.ms(value)), f"{NBSP}ms/step"]),
                )
                for name, value, css in lines
            ]
        ),
        class_="change",
    )


def _frame(record: StudyRecord) -> list[tuple[str, object]]:
    """The numbers that a reader needs to weigh the verdict."""
    result = record.result
    kept, tried = len(words.kept(record)), len(_of(record, _TRIED))
    pairs = [
        ("Techniques kept", f"{kept} of {kept + tried} tried" if kept + tried else "none was tried"),
        (
            "Noise floor (A/A)",
            "\u00b1" + words.percent(result.noise_floor) if result.noise_floor is not None else words.UNMEASURED,
        ),
        ("A gain counts from", words.percent(record.threshold)),
    ]
    change = words.memory_change(record)
    if change:
        pairs.append(("Memory", change))
    payback = words.break_even(record)
    if payback:
        pairs.insert(1, ("Pays back", payback))
    return pairs


def _starts(record: StudyRecord) -> list[tuple[str, object]]:
    """What comes before the steady state of either."""
    times = [("Start of the baseline", record.result.baseline)]
    if words.kept(record):
        times.append(("Start of the tuned script", record.result.tuned))
    return [(name, said) for name, time in times if (said := words.start(time))]


def staircase(record: StudyRecord) -> Markup:
    """The measured step time as techniques were added, with intervals."""
    if not record.staircase:
        return section("staircase", "Measured staircase", "No step time was measured, so there is no staircase.")
    base = record.staircase[0].step_ms
    spans = [
        None
        if step.speedup_ci is None or min(step.speedup_ci) <= 0
        else (base / step.speedup_ci[1], base / step.speedup_ci[0])
        for step in record.staircase
    ]
    full = max([step.step_ms for step in record.staircase] + [span[1] for span in spans if span])
    lines = []
    for index, (step, span) in enumerate(zip(record.staircase, spans)):
        speed = words.ratio(step.speedup, step.speedup_ci, "\u00d7")
        value = tag("b", milliseconds(step.step_ms))
        if index:
            value = join([value, tag("br"), tag("span", speed, class_="soft small nowrap")])
        chart = svg.bar(
            step.step_ms,
            full,
            interval=span,
            reference=base if index else None,
            css="tuned" if index else "base",
            label=f"{step.label}: {words.ms(step.step_ms)} ms per step" + (f", {speed}" if index else ""),
        )
        title = words.one_line(record.titles.get(step.label.removeprefix("+").strip(), ""))
        label = tag("b", step.label)
        if title:
            label = join([label, tag("br"), tag("span", title, class_="soft small")])
        lines.append((label, chart, value))
    if len(lines) == 1:
        lede = "Time of one step of the unchanged script, in milliseconds. Nothing was kept on top of it."
        return section("staircase", "Measured staircase", lede, rows(lines))
    return section(
        "staircase",
        "Measured staircase",
        "Time of one step, in milliseconds, after each technique was added to those above it. The last bar was "
        "measured against the baseline, which the dashed line marks; each bar in between was measured against the bar above it, "
        "and stands on that one. Whiskers are the interval of the bar\u2019s own race.",
        rows(lines),
    )


def step_split(record: StudyRecord) -> Markup:
    """Where a step's time goes before and after, on one scale, with the numbers as a table."""
    before, after = record.split_before, record.split_after
    title = "Where a step\u2019s time goes"
    if not before:
        return section("step", title, "The parts of a step were not measured.")
    names = list(dict.fromkeys([*before, *after]))
    columns = [("before", before)] + ([("after", after)] if after else [])
    full = max(_total(split) for _, split in columns)

    def bar_of(name: str, split: Mapping[str, float]) -> Markup:
        parts = [(part, split.get(part, 0.0), index % SHADES) for index, part in enumerate(names)]
        told = ", ".join(f"{part} {words.ms(value)} ms" for part, value, _ in parts)
        return svg.stack(parts, full, label=f"{name}: {told}")

    def line(head: object, values: list[float]) -> list[object]:
        shown: list[object] = [head, *(words.ms(value) for value in values)]
        return shown + [_change_text(*values)] if len(values) == 2 else shown

    # The unit stands in the head: with it in every cell, the table would not fit on a phone.
    head = ["Part", "Before, ms", *(["After, ms", "Change, ms"] if after else [])]
    body = [
        line(swatch(index % SHADES, part), [split.get(part, 0.0) for _, split in columns]) for index, part in enumerate(names)
    ]
    return section(
        "step",
        title,
        ("Both bars have the same scale. " if after else "") + "The split explains; only the races decide."
        + (" Here it explains less than half of what they found: it is of a few steps of one process each." if words.unexplained(record) else ""),
        rows(
            [(name, bar_of(name, split), tag("b", milliseconds(_total(split)))) for name, split in columns],
            "rows two",
        ),
        table(
            head,
            body,
            label="Parts of a step",
            numeric=range(1, len(head)),
            foot=line("Step", [_total(split) for _, split in columns]),
            class_="compact",
        ),
        *_diagnosis(record),
    )


def _diagnosis(record: StudyRecord) -> list[Markup]:
    """What the baseline loses time to, as a short profile of it saw; `saturate profile` says more."""
    if not record.findings:
        return []
    lines = [
        [finding.title, "" if finding.bound is None else words.bound(finding.bound, "\u00d7"), finding.reason]
        for finding in record.findings
    ]
    return [
        tag("h3", "What limits the baseline"),
        table(["Cause", "What it could give", "Seen in a short profile"], lines, label="Findings", short=[1], class_="stacked causes"),
    ]


def _total(split: Mapping[str, float]) -> float:
    return sum(split.values())


def _change_text(before: float, after: float) -> str:
    difference = after - before
    minus = "\u2212" if difference < 0 else "+"
    return "0" if difference == 0 else f"{minus}{words.ms(abs(difference))}"


def techniques(record: StudyRecord) -> Markup:
    """Every technique with its fate and reason: kept, then tried, then untried (folded)."""
    outcomes = record.result.techniques
    if not outcomes:
        return section("techniques", "Every technique", "No technique was considered.")
    total = words.ratio(record.result.speedup, record.result.speedup_ci, "\u00d7")
    lede = (
        "Gains do not add up. A marginal gain is what the final set loses without the technique; the total, "
        f"{total}, was measured by itself."
        if words.kept(record)
        else "Every technique that saturate knows, and why it was not kept."
    )
    together = words.memory(record.result.peak_bytes, record.result.baseline_peak_bytes).replace("-", "\u2212")
    body: list[object] = []
    if words.kept(record):
        body += [
            tag("h3", "Kept"),
            _outcomes(record, words.kept(record), "Marginal gain", "Kept", ["Measured together", "", "", with_interval(total), together]),
        ]
    tried = _of(record, _TRIED)
    if tried:
        body += [tag("h3", "Tried, not kept"), _outcomes(record, tried, "Gain alone", "Tried, not kept")]
    untried = _of(record, _UNTRIED)
    if untried:
        counts = " and ".join(
            f"{sum(o.fate == fate for o in untried)} {words.FATES[fate]}"
            for fate in _UNTRIED
            if any(o.fate == fate for o in untried)
        )
        lines = [[_name(record, o), fate(o), o.reason, o.numerics] for o in untried]
        body.append(
            tag(
                "details",
                tag("summary", words.capital(counts)),
                table(["Technique", "Fate", "Reason", "Numerics"], lines, label="Not tried", short=[1, 3]),
            )
        )
    return section("techniques", "Every technique", lede, tag("div", *body))


def _of(record: StudyRecord, fates: tuple[str, ...]) -> list[TechniqueOutcome]:
    found = [outcome for outcome in record.result.techniques if outcome.fate in fates]
    return sorted(found, key=lambda outcome: (fates.index(outcome.fate), -(outcome.gain or 0.0)))


def _name(record: StudyRecord, outcome: TechniqueOutcome) -> Markup:
    title, chosen = record.titles.get(outcome.id, ""), words.options(outcome)
    return join(
        [
            tag("b", outcome.id),
            tag("span", title, class_="sub") if title else "",
            tag("code", chosen, class_="sub") if chosen else "",
        ]
    )


def _outcomes(
    record: StudyRecord, outcomes: list[TechniqueOutcome], measured: str, label: str, foot: list[object] | None = None
) -> Markup:
    lines = []
    for outcome in outcomes:
        interval = words.gain_interval(outcome.gain_ci).replace("-", "\u2212")
        number = (
            tag("b", words.gain(outcome.gain).replace("-", "\u2212"))
            if outcome.gain is not None
            else tag("span", words.UNMEASURED, class_="soft")
        )
        lines.append(
            [
                _name(record, outcome),
                join(
                    [
                        tag("span", fate(outcome), class_="keep" if outcome.fate == "kept" else None),
                        tag("span", outcome.reason, class_="sub") if outcome.reason else "",
                    ]
                ),
                outcome.numerics,
                join([number, tag("span", interval, class_="sub") if interval else ""]),
                words.memory(outcome.peak_bytes, record.result.baseline_peak_bytes).replace("-", "\u2212"),
            ]
        )
    if not any(line[4] for line in lines):      # a record of before memory was measured
        lines, foot = [line[:4] for line in lines], foot and foot[:4]
    return table(
        ["Technique", "Fate and reason", "Numerics", measured, "Peak memory"][: len(lines[0])],
        lines,
        label=label,
        numeric=[3, 4][: len(lines[0]) - 3],
        short=[2],
        foot=foot,
        class_="stacked outcomes",
    )
