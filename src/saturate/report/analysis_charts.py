"""Charts of an analysis: the roofline of its operators and a bar for each step.

As in `svg`, no chart scales its text: widths are percentages, heights pixels, and the axes stand outside in HTML.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence

from saturate.records.analysis import Operator, Roofline, StepParts
from saturate.report import analysis_words as say
from saturate.report.markup import Markup, tag

NUMBERED = 12  # operators whose rank stands beside their dot
_RADIUS = (3.0, 17.0)
SMALL = 0.002  # of the drawn time: operators below it do not stretch the axes
_COLUMN = 60  # pixels that a step may be wide: few steps make no chart of blocks
STEPS = 80  # bars; more are thinner than their gaps on a phone
#: Ceilings that are rates of bytes; all others are rates of FLOPs.
BANDWIDTHS = ("copy", "read", "write", "triad", "pinned", "pageable")


def plottable(operators: Sequence[Operator]) -> list[tuple[int, Operator]]:
    """(rank, operator) of those with a place in the plane: judged against a roof, with FLOPs, bytes and time."""
    return [
        (rank, each)
        for rank, each in enumerate(operators, 1)
        if each.limit and each.flops and each.bytes and min(each.flops, each.bytes, each.time_ns) > 0
    ]


def rates(roofline: Roofline, operators: Sequence[Operator]) -> dict[str, float]:
    """FLOP/s ceilings worth drawing: of the number formats that occur, or all where none is known."""
    all_rates = {
        name: value
        for name, value in roofline.ceilings.items()
        if not any(word in name for word in BANDWIDTHS) and math.isfinite(value) and value > 0
    }
    used = {name for each in operators for name in each.dtypes.split(", ")}
    fastest = (
        max((each.flops or 0) / (each.time_ns / 1e9) for each in operators if "float32" in each.dtypes)
        if "float32" in used
        else 0.0
    )
    if fastest > all_rates.get("float32", math.inf):
        used.add("tfloat32")  # fp32 tensors, multiplied by units that round them
    return {name: value for name, value in all_rates.items() if name in used} or all_rates


def bandwidth(roofline: Roofline) -> float | None:
    """Bytes per second of the slanted roof."""
    value = roofline.ceilings.get("copy")
    return value if value is not None and math.isfinite(value) and value > 0 else None


def roofline(roof: Roofline, operators: Sequence[Operator]) -> Markup | None:
    """FLOP/s over FLOPs per byte, both logarithmic: ceilings as lines, operators as dots whose area is their time.
    None when there is nothing to place."""
    placed = plottable(operators)
    if not placed:
        return None
    points = [(rank, each, each.flops / each.bytes, each.flops / (each.time_ns / 1e9)) for rank, each in placed]
    tops, speed = rates(roof, [each for _, each in placed]), bandwidth(roof)
    ridges = [top / speed for top in tops.values()] if speed else []
    # What takes no time must not squeeze the rest into a corner: it sits at the edge.
    least = SMALL * sum(each.time_ns for _, each in placed)
    large = [point for point in points if point[1].time_ns >= least]
    x_low, x_high = _decades([x for _, _, x, _ in large] + ridges)
    # Room for the name of the highest roof.
    y_low, y_high = _decades([y for _, _, _, y in large] + [1.8 * top for top in tops.values()])

    def across(x: float) -> str:
        return _pc((math.log10(x) - x_low) / (x_high - x_low))

    def down(y: float) -> str:
        return _pc((y_high - math.log10(y)) / (y_high - y_low))

    parts: list[Markup] = []
    for power in range(x_low + 1, x_high):
        parts.append(tag("line", x1=across(10.0**power), x2=across(10.0**power), y1="0", y2="100%", class_="grid"))
    for power in range(y_low + 1, y_high):
        parts.append(tag("line", x1="0", x2="100%", y1=down(10.0**power), y2=down(10.0**power), class_="grid"))
    lines, names = _roofs(tops, speed, (x_low, x_high), (y_low, y_high), across, down)
    parts += lines
    longest = max(each.time_ns for _, each, _, _ in points)
    # The longest first, so that small dots stay visible on large ones; numbers on top of them all.
    points.sort(key=lambda point: -point[1].time_ns)
    parts += [_dot(each, across(x), down(y), longest) for _, each, x, y in points]
    parts += [
        tag("text", str(rank), x=across(x), y=down(y), dy="4", class_="number")
        for rank, _, x, y in points
        if rank <= NUMBERED
    ] + names
    label = f"Roofline: {len(points)} operators by arithmetic intensity and achieved rate; the table has the numbers"
    chart = tag("svg", *parts, class_="roofline", role="img", aria_label=label)
    ticks = [tag("span", say.size(10.0**power, "")) for power in range(y_high, y_low - 1, -1)]
    below = [tag("span", _plain(10.0**power)) for power in range(x_low, x_high + 1)]
    return tag(
        "div",
        tag("div", *ticks, class_="axis"),
        chart,
        tag("div", *below, class_="below"),
        tag("div", "FLOP/s, over FLOPs per byte of compulsory traffic", class_="what"),
        class_="scatter",
    )


def _roofs(
    tops: Mapping[str, float],
    speed: float | None,
    xs: tuple[int, int],
    ys: tuple[int, int],
    across: Callable[[float], str],
    down: Callable[[float], str],
) -> tuple[list[Markup], list[Markup]]:
    """The slanted line of bandwidth up to the highest ridge, and a level line from each number format's ridge on; and
    their names."""
    lines: list[Markup] = []
    names: list[Markup] = []
    x_end, y_start = 10.0 ** xs[1], 10.0 ** ys[0]
    best = max(tops.values(), default=10.0 ** ys[1])
    if speed:
        left = max(10.0 ** xs[0], y_start / speed)
        right = min(best / speed, x_end)
        if left < right:
            lines.append(
                tag(
                    "line",
                    x1=across(left),
                    y1=down(speed * left),
                    x2=across(right),
                    y2=down(speed * right),
                    class_="roof slant",
                )
            )
            middle = math.sqrt(left * right)
            names.append(
                tag(
                    "text",
                    f"copy {say.size(speed, 'B/s')}",
                    x=across(middle),
                    y=down(speed * middle),
                    dx="-10",
                    dy="-6",
                    text_anchor="end",
                    class_="name",
                )
            )
    for name, top in tops.items():
        start = min(top / speed, x_end) if speed else 10.0 ** xs[0]
        lines.append(
            tag("line", x1=across(max(start, 10.0 ** xs[0])), y1=down(top), x2="100%", y2=down(top), class_="roof")
        )
        names.append(
            tag(
                "text",
                f"{name} {say.size(top, 'FLOP/s')}",
                x="100%",
                y=down(top),
                dx="-6",
                dy="-10",
                text_anchor="end",
                class_="name",
            )
        )
    return lines, names


def _dot(each: Operator, x: str, y: str, longest: int) -> Markup:
    radius = _RADIUS[0] + (_RADIUS[1] - _RADIUS[0]) * math.sqrt(each.time_ns / longest)
    told = f"{each.name} {say.signature(each)}: {say.time(each.time_ns)}, {say.kind(each)}"
    return tag("circle", tag("title", told), cx=x, cy=y, r=f"{radius:.1f}", class_=each.limit)


def _pc(share: float) -> str:
    """A place along an axis, kept inside the chart."""
    return f"{100 * min(max(share, 0.0), 1.0):.2f}%"


def _decades(values: Sequence[float]) -> tuple[int, int]:
    """Whole powers of ten around the values, at least one apart."""
    low = math.floor(math.log10(min(values)))
    high = math.ceil(math.log10(max(values)))
    return low, max(high, low + 1)


def _plain(value: float) -> str:
    return f"{value:g}" if value < 1000 else say.size(value, "").strip()


def steps(each: Sequence[StepParts], parts: Sequence[say.Part]) -> Markup | None:
    """One column per step, as high as the step is long, in the shades of `parts`; None for fewer than two."""
    shown = list(each)[:STEPS]
    lengths = [sum(getattr(step, f"{part.key}_ns") for part in parts) for step in shown]
    longest = max(lengths, default=0)
    if longest <= 0 or len(shown) < 2:
        return None  # one step is the bar above
    width, pixels = 100 / len(shown), min(len(shown) * _COLUMN, 10_000)
    drawn: list[Markup] = []
    for index, (step, length) in enumerate(zip(shown, lengths)):
        top = 100.0
        told = [f"step {index + 1}: {say.time(length)}"]
        columns = []
        for part in parts:
            ns = getattr(step, f"{part.key}_ns")
            height = 100 * ns / longest
            top -= height
            told.append(f"{part.name} {say.time(ns)}")
            if ns > 0:
                columns.append(
                    tag(
                        "rect",
                        x=f"{index * width:.3f}%",
                        width=f"{width:.3f}%",
                        y=f"{top:.2f}%",
                        height=f"{height:.2f}%",
                        class_=f"shade{part.shade}",
                    )
                )
        drawn.append(tag("g", tag("title", ", ".join(told)), *columns))
    note = f"step {len(shown):,}" + (f" of {len(each):,}" if len(each) > len(shown) else "")
    label = f"{len(shown)} steps of {say.time(min(lengths))} to {say.time(longest)}"
    return tag(
        "div",
        tag("svg", *drawn, width=pixels, role="img", aria_label=label),
        tag(
            "div",
            tag("span", "step 1"),
            tag("span", f"longest {say.time(longest)}"),
            tag("span", note),
            class_="below",
        ),
        class_="each",
    )


def key(names: Sequence[tuple[str, str]]) -> Markup:
    """Dots of the roofline and what they mean: (class, words)."""
    return tag(
        "p",
        *(
            tag("span", tag("svg", tag("circle", cx="8", cy="5", r="5", class_=css), aria_hidden="true"), name)
            for css, name in names
        ),
        class_="key",
    )
