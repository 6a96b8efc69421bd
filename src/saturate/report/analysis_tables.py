"""The tables of an analysis page."""

from __future__ import annotations

from saturate.records.analysis import Analysis, ModuleCost, Operator, Profile, Sync
from saturate.report import analysis_words as say
from saturate.report import words
from saturate.report.markup import Markup, join, table, tag
from saturate.report.sections import section

OPERATORS = 40  # rows; the embedded record has the rest
MODULES = 80
LABELS = 60


def _rest(number: int) -> Markup:
    return tag("p", f"{number:,} more in the embedded record.", class_="soft small") if number > 0 else Markup("")


def operators(found: list[Operator], told: str) -> Markup:
    """Operators, ranked by recoverable time. `told`: a reason that stands above the table; no row repeats it."""

    def line(rank: int, each: Operator) -> list[object]:
        name = join(
            [
                tag("b", each.name),
                tag("span", tag("code", say.signature(each)), class_="sub"),
                tag("span", _kernels(each), class_="sub") if each.kernels else "",
            ]
        )
        roof = f"{100 * each.efficiency:.0f} %" if each.efficiency is not None else "\u2013"
        reason = "; ".join(reason for reason in dict.fromkeys(each.unknown.values()) if reason != told)
        return [
            str(rank),
            name,
            say.time(each.recoverable_ns) if each.recoverable_ns is not None else "\u2013",
            join([say.time(each.time_ns), tag("span", words.count(each.calls, "call"), class_="sub")]),
            roof,
            join([say.kind(each), tag("span", reason, class_="sub") if reason else ""]),
        ]

    shown = [line(rank, each) for rank, each in enumerate(found[:OPERATORS], 1)]
    return join(
        [
            table(
                ["No.", "Operator", "Recoverable", "Time", "Of its roof", "Limit"],
                shown,
                label="Operators",
                numeric=[2, 3, 4],
                class_="stacked ranked operators",
            ),
            _rest(len(found) - OPERATORS),
        ]
    )


def _kernels(each: Operator) -> str:
    first = words.one_line(each.kernels[0])
    cut = first if len(first) <= 90 else first[:89] + "\u2026"
    return cut + (f" and {words.count(len(each.kernels) - 1, 'more kernel')}" if len(each.kernels) > 1 else "")


def places(profile: Profile) -> Markup | None:
    """Source lines: where the host waits for the device, and the slowest code below the dataset."""

    def lines(found: list[Sync]) -> list[list[object]]:
        return [
            [
                tag("code", say.line(each)) if each.file else say.line(each),
                each.what,
                f"{words.ms(each.ms_per_step)} ms",
                "" if each.calls_per_step is None else f"{each.calls_per_step:g}",
            ]
            for each in sorted(found, key=lambda each: -each.ms_per_step)
        ]

    head = ["Line", "What", "Time per step", "Calls per step"]
    body: list[object] = []
    if profile.syncs:
        body += [
            tag("h3", "Where the host waits for the device"),
            table(head, lines(profile.syncs), label="Synchronisations", numeric=[2, 3]),
        ]
    if profile.input_lines:
        body += [
            tag("h3", "The slowest input code"),
            table(head, lines(profile.input_lines), label="Input code", numeric=[2, 3]),
        ]
    for title, found in (
        ("Graph breaks", profile.graph_breaks),
        ("Recompilations", profile.recompiles),
        ("Left on the CPU", profile.off_device),
    ):
        if found:
            body += [tag("h3", title), tag("ul", *(tag("li", tag("code", each)) for each in found), class_="small")]
    return section("lines", "Lines of your code", "", *body) if body else None


def modules(profile: Profile) -> Markup | None:
    """Modules, in the model's own order, with what each costs."""
    found = profile.modules
    if not found:
        return None

    def line(each: ModuleCost) -> list[object]:
        return [
            join([tag("b", each.name or "(root)"), tag("span", each.kind, class_="sub")]),
            f"{words.ms(each.forward_ms)} ms",
            f"{words.ms(each.self_ms)} ms",
            say.size(each.flops, "FLOP") if each.flops is not None else "\u2013",
            say.size(each.memory_bytes) if each.memory_bytes is not None else "\u2013",
        ]

    return section(
        "modules",
        "Modules",
        "Of one step\u2019s forward, under the profiler; itself: without its children.",
        table(
            ["Module", "Forward", "Itself", "FLOPs", "Memory kept"],
            [line(each) for each in found[:MODULES]],
            label="Modules",
            numeric=[1, 2, 3, 4],
        ),
        _rest(len(found) - MODULES),
    )


def devices(analysis: Analysis) -> Markup | None:
    """All devices, and who waits for whom; None for a single one without peers."""
    if len(analysis.devices) < 2 and not analysis.stragglers:
        return None
    body: list[object] = []
    if len(analysis.devices) > 1:
        lines: list[list[object]] = []
        for each in analysis.devices:
            whole, _ = say.window(each)
            lines.append(
                [
                    join(
                        [
                            tag("b", say.place(each), class_="nowrap"),
                            tag("span", words.one_line(each.source), class_="sub"),
                        ]
                    ),
                    say.LIMITS[each.verdict][0],
                    say.time(whole),
                    say.share(each.busy_of_step),
                    say.share(each.busy_of_span),
                    say.share(say.of(each.exposed_communication_ns, whole)),
                    say.share(each.data_wait.exposed),
                ]
            )
        head = [
            "Device",
            "Verdict",
            "Window",
            "Busy of steps",
            "Busy of span",
            "Exposed communication",
            "Exposed input wait",
        ]
        body.append(table(head, lines, label="Devices", numeric=[2, 3, 4, 5, 6]))
    if analysis.stragglers:
        late = sorted(analysis.stragglers, key=lambda each: -each.late_ns)
        rows: list[list[object]] = [
            [
                f"rank {each.rank}",
                say.time(each.late_ns),
                say.time(each.wait_ns),
                say.time(each.transfer_ns),
                f"{each.collectives:,}",
            ]
            for each in late
        ]
        body += [
            tag("h3", "Who waits for whom"),
            tag(
                "p",
                "Over the collectives that all ranks took part in. Transfer is the shortest duration over the ranks, "
                "summed; waiting is what a rank spent beyond it.",
                class_="soft small",
            ),
            table(
                ["Rank", "Late", "Waits for peers", "Transfer", "Collectives"],
                rows,
                label="Stragglers",
                numeric=[1, 2, 3, 4],
            ),
        ]
    return section("devices", "Devices and ranks", "", *body)


def annotations(analysis: Analysis) -> Markup | None:
    """Labels of the user (record_function, NVTX), by time."""
    found = sorted(analysis.annotations, key=lambda each: -_int(each, "total_ns"))
    if not found:
        return None
    lines: list[list[object]] = [
        [
            str(each.get("name", "")),
            f"{_int(each, 'count'):,}",
            say.time(_int(each, "total_ns")),
            say.time(_int(each, "device_ns")) if each.get("device_ns") is not None else "\u2013",
        ]
        for each in found[:LABELS]
    ]
    return section(
        "labels",
        "Labels",
        "Ranges that the program named: on the host, and the device work launched inside.",
        table(["Label", "Count", "On the host", "On the device"], lines, label="Labels", numeric=[1, 2, 3]),
        _rest(len(found) - LABELS),
    )


def _int(each: dict[str, object], name: str) -> int:
    value = each.get(name)
    return value if isinstance(value, int) else 0
