"""Two analyses side by side: in a terminal, and as a page."""

from __future__ import annotations

from collections.abc import Iterator

from saturate.records.analysis import Finding
from saturate.records.comparison import Change, Comparison, DeviceComparison, OperatorChange
from saturate.report import analysis_words as say
from saturate.report import words
from saturate.report.analysis import LABEL, Rows, columns, finished
from saturate.report.cells import fit, wrap
from saturate.report.markup import Markup, join, table, tag
from saturate.report.paint import MIN_WIDTH, labelled, paints
from saturate.report.sections import facts, section

OPERATORS, NOTES, DEVICES = 6, 4, 2

_NAMES = {
    "compute": "computation",
    "exposed_communication": "exposed communication",
    "exposed_copy": "exposed copies",
    "busy_of_step": "busy",
    "busy_of_span": "busy",
    "communication_overlap": "hidden by computation",
    "data_wait_raw": "input wait, raw",
    "data_wait_exposed": "input wait, exposed",
    "host_late": "host late",
    "already_launched": "already launched",
}
_ADVICE = "Traces explain a difference; only a race of unprofiled runs decides that there is one."


def named(change: Change) -> str:
    """What changed, in words."""
    return _NAMES.get(change.name, words.one_line(change.name.replace("_", " ")))


def value(number: float | None, unit: str) -> str:
    """One side of a change."""
    if number is None:
        return say.UNKNOWN
    return say.time(round(number)) if unit.startswith("ns") else say.share(number)


def ratio(number: float | None, times: str = "x") -> str:
    """Old over new: above 1, the new one is smaller."""
    if number is None:
        return ""
    return f"{number:,.0f}{times}" if number >= 100 else words.ratio(number, times=times)


def title(record: Comparison, times: str = "x") -> str:
    """How the step changed, as far as traces can tell."""
    steps = [device.step for device in record.devices if device.step.ratio is not None]
    if not steps:
        return "Lengths cannot be compared"
    slowest = max(steps, key=lambda step: step.new or 0.0)
    direction = "shorter" if (slowest.ratio or 0.0) > 1 else "longer"
    factor = max(slowest.ratio or 0.0, 1 / (slowest.ratio or 1.0))
    text = words.ratio(factor, times=times)
    if text == words.ratio(1.0, times=times):
        return "The recorded step is as long as before"
    return f"The recorded step is {text} {direction}"


def detail(record: Comparison) -> str:
    """The numbers behind the title."""
    known = [device.step for device in record.devices if device.step.old is not None and device.step.new is not None]
    if known:
        slowest = max(known, key=lambda step: step.new or 0.0)
        return f"{value(slowest.old, slowest.unit)} -> {value(slowest.new, slowest.unit)} per step"
    reasons = [device.step.unknown for device in record.devices if device.step.unknown]
    return words.one_line((record.notes or reasons or ["the traces have no device in common"])[0])


def verdicts(record: Comparison) -> str:
    """What limited each."""
    old, new = (say.LIMITS[verdict][0].lower() for verdict in (record.old_verdict, record.new_verdict))
    return f"{old}, before and after" if old == new else f"{old} -> {new}"


def not_judged(record: Comparison) -> list[tuple[str, list[Finding], str]]:
    """(side, findings of it alone, why they are neither gone nor new), for each side that has any."""
    sides = (
        ("old", record.not_judged_by_new, "gone", "new"),
        ("new", record.not_judged_by_old, "new", "old"),
    )
    return [
        (which, found, f"{words.count(len(found), 'finding')} of the {which} trace alone: whether "
         f"{'it is' if len(found) == 1 else 'they are'} {fate} cannot be told, as the {other} trace does not carry what "
         f"{'it rests' if len(found) == 1 else 'they rest'} on")
        for which, found, fate, other in sides
        if found
    ]  # fmt: skip


def next_command(record: Comparison) -> str:
    """What to type next."""
    left = [*record.findings_new, *record.findings_kept, *record.not_judged_by_old]
    techniques = list(dict.fromkeys(name for finding in left for name in finding.techniques))
    only = ["--only", ",".join(techniques)] if techniques else []
    return words.shell(["saturate", "tune", *only, "--", "python", "train.py"])


def summary(record: Comparison, *, width: int, color: bool, blocks: bool = True) -> str:
    """The comparison as plain lines without a trailing newline; arguments as of `analysis.summary`."""
    width = max(width, MIN_WIDTH)
    paint, room = paints(color), width - LABEL
    heading = title(record)
    first = wrap(f"{heading}: {detail(record)}", width, 3)
    lines = (
        [paint(heading, "1") + first[0].removeprefix(heading), *first[1:]] if first[0].startswith(heading) else first
    )
    rows: Rows = [("verdict", fit(verdicts(record), room))]
    for device in record.devices[:DEVICES]:
        rows += _device(device, len(record.devices) > 1, room)
    if len(record.devices) > DEVICES:
        rows.append(("", fit(f"+{len(record.devices) - DEVICES:,} more devices, see --json", room)))
    for label, findings in (
        ("gone", record.findings_gone),
        ("new", record.findings_new),
        ("still", record.findings_kept),
        *((f"{which} alone", found) for which, found, _ in not_judged(record)),
    ):
        rows += labelled(label, [fit(f"{say.bound(each)}: {each.title}", room) for each in findings])
    for _, _, why in not_judged(record):
        rows += labelled("note", wrap(why, room, 2))
    for note in record.notes[:NOTES]:
        rows += labelled("note", wrap(note, room, 2))
    if len(record.notes) > NOTES:
        rows.append(("", fit(f"+{len(record.notes) - NOTES:,} more, see --json", room)))
    rows += labelled("remember", wrap(_ADVICE, room, 2))
    return finished(lines, rows, next_command(record), paint, blocks)


def _device(device: DeviceComparison, several: bool, room: int) -> Rows:
    rows: Rows = []
    if several:
        place = f"rank {device.rank}, device {device.id}" if device.rank is not None else f"device {device.id}"
        rows.append(("device", fit(place, room)))
    for label, changes in (
        ("step", [device.step, *device.parts]),
        ("shares", shares_beside(device)),
        ("idle", device.gaps),
    ):
        lines = [
            [
                named(each),
                value(each.old, each.unit),
                "->",
                value(each.new, each.unit),
                ratio(each.ratio),
                each.unit.removeprefix("ns "),
            ]
            for each in changes
            if worth_a_line(each)
        ]
        rows += labelled(label, columns(lines, room, numeric={1, 3, 4}))
    operators = [
        [
            each.fate,
            value(each.old_ns, "ns"),
            "->",
            value(each.new_ns, "ns"),
            ratio(each.ratio),
            f"{each.name} {each.shapes} {each.dtypes}",
        ]
        for each in device.operators[:OPERATORS]
    ]
    rows += labelled("operators", columns(operators, room, numeric={1, 3, 4}, elastic=5))
    if why := device.unknown.get("operators"):
        rows += labelled("operators", wrap(f"{say.UNKNOWN}: {why}", room, 2))
    left = device.operators_left_out + max(0, len(device.operators) - OPERATORS)
    if left:
        rows.append(("", fit(f"+{left:,} that changed less", room)))
    return rows


def shares_beside(device: DeviceComparison) -> list[Change]:
    """The shares without those of the parts, whose lengths are told."""
    parts = {part.name for part in device.parts}
    return [share for share in device.shares if share.name not in parts]


def worth_a_line(change: Change) -> bool:
    """Whether either side knows it and it is not zero on both."""
    return bool(change.old or change.new) or (change.old is None) != (change.new is None)


def sections(record: Comparison) -> Iterator[tuple[str, str, Markup]]:
    """(anchor, name in the navigation, section) of the page."""
    for index, device in enumerate(record.devices):
        rank = f"rank {device.rank}, " if device.rank is not None else ""
        where = f"{rank}device {device.id}" if len(record.devices) > 1 or rank else "Before and after"
        anchor = f"device-{index}"
        yield (
            anchor,
            where,
            section(
                anchor,
                where,
                "Lengths are per step. Ratios are old over new: above 1, the new one is smaller.",
                *_tables(device),
            ),
        )
    findings = [
        (name, found)
        for name, found in (
            ("Gone", record.findings_gone),
            ("New", record.findings_new),
            ("Still there", record.findings_kept),
            *((f"Of the {which} trace alone", found) for which, found, _ in not_judged(record)),
        )
        if found
    ]
    body: list[object] = [part for name, found in findings for part in (tag("h3", name), _list(found))]
    yield (
        "findings",
        "Findings",
        section("findings", "Findings", "" if body else "Neither analysis has findings.", *body),
    )
    notes = [tag("li", note) for note in [*(why for _, _, why in not_judged(record)), *record.notes]]
    yield (
        "method",
        "Method",
        section(
            "method",
            "What limits the comparison",
            _ADVICE,
            tag("ul", *notes, class_="problems") if notes else "",
            tag("h3", "Next"),
            tag("pre", tag("code", next_command(record))),
        ),
    )


def _list(found: list[Finding]) -> Markup:
    return tag(
        "ul",
        *(
            tag("li", tag("b", finding.title), f" ({say.bound(finding, chr(0xD7))}). {finding.reason}")
            for finding in found
        ),
    )


def _tables(device: DeviceComparison) -> list[object]:
    body: list[object] = []
    for name, changes in (
        ("Time per step", [device.step, *device.parts]),
        ("Shares", shares_beside(device)),
        ("Idle time by cause", device.gaps),
    ):
        lines: list[list[object]] = [
            [
                join([tag("b", named(each)), tag("span", each.unit.removeprefix("ns "), class_="sub")]),
                value(each.old, each.unit),
                value(each.new, each.unit),
                ratio(each.ratio, "\u00d7"),
                tag("span", each.unknown, class_="soft small") if each.unknown else "",
            ]
            for each in changes
        ]
        # Columns in which nothing stands are left out.
        used = [index for index in range(5) if index < 3 or any(line[index] for line in lines)]
        names = ("Quantity", "Old", "New", "Old / new", "Not known")
        if lines:
            body += [
                tag("h3", name),
                table(
                    [names[index] for index in used],
                    [[line[index] for index in used] for line in lines],
                    label=name,
                    numeric=[index for index in used if index in (1, 2, 3)],
                    class_="stacked",
                ),
            ]
    if device.operators:
        lines = [_operator(each) for each in device.operators]
        left = f"{device.operators_left_out:,} operators changed less." if device.operators_left_out else ""
        body += [
            tag("h3", "Operators"),
            table(
                ["Operator", "Fate", "Old per step", "New per step", "Old / new"],
                lines,
                label="Operators",
                numeric=[2, 3, 4],
                short=[1],
            ),
            tag("p", left, class_="soft small"),
        ]
    if why := device.unknown.get("operators"):
        body += [tag("h3", "Operators"), tag("p", f"{words.capital(say.UNKNOWN)}: {why}.", class_="soft small")]
    return body


def _operator(each: OperatorChange) -> list[object]:
    kernels = [
        f"{side}: {', '.join(found[:2])}" + (f" and {len(found) - 2:,} more" if len(found) > 2 else "")
        for side, found in (("old", each.kernels_old), ("new", each.kernels_new))
        if found
    ]
    name = join(
        [
            tag("b", each.name),
            tag("span", tag("code", f"{each.shapes} {each.dtypes}"), class_="sub"),
            *(tag("span", line, class_="sub") for line in kernels),
        ]
    )
    return [name, each.fate, value(each.old_ns, "ns"), value(each.new_ns, "ns"), ratio(each.ratio, "\u00d7")]


def _files(sources: list[str]) -> str:
    return ", ".join(map(words.one_line, sources[:2])) + (
        f" and {len(sources) - 2:,} more" if len(sources) > 2 else ""
    )


def header(record: Comparison) -> Markup:
    """The band at the top of the page."""
    old, new = _files(record.old), _files(record.new)
    brand = tag("p", tag("b", "saturate"), f" comparison of {old} with {new}", class_="brand")
    devices = sorted({each.new_name for each in record.devices if each.new_name})
    pairs: list[tuple[str, object]] = [("Verdict", verdicts(record).replace("->", "\u2192"))]
    pairs += [("Device", ", ".join(devices))] if devices else []
    pairs.append(
        (
            "Findings",
            f"{len(record.findings_gone)} gone, {len(record.findings_new)} new, "
            f"{len(record.findings_kept)} still there"
            + "".join(f", {len(found)} of the {which} trace alone" for which, found, _ in not_judged(record)),
        )
    )
    lede = detail(record).replace("->", "\u2192")
    return tag(
        "header",
        brand,
        tag("h1", title(record, "\u00d7")),
        tag("p", f"{words.capital(lede)}.", class_="lede"),
        facts(pairs),
        class_="verdict",
        id="verdict",
    )
