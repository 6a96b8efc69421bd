"""Charts of an optimization: latency against loss of accuracy with memory as area, and bars of latency.

As in `svg`, no chart scales its text: places are percentages, dots pixels, and the axes stand outside in HTML.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from saturate.records.inference import CandidateRecord, OptimizeRecord
from saturate.records.sizes import show
from saturate.report import inference as tables
from saturate.report import inference_words as say
from saturate.report import svg, words
from saturate.report.markup import Markup, join, tag

BARS = 12  # of candidates; the table has all
_RADIUS = (4.0, 16.0)  # pixels
_TICKS = 5
_REACH = 4.0  # budgets: what loses more sits at the edge, so that the budget itself can be seen
_MARGIN = 0.08  # of each axis, on both sides

#: The style sheet of these charts. Colour is told by words too: in the key, in the table, and by `title`.
RULES = """
.pareto{height:24rem;width:100%;background:var(--panel)}
.pareto.drops{background:none}
.pareto .grid{stroke:var(--rule)}
.pareto text{font-size:12px;fill:var(--ink);paint-order:stroke;stroke:var(--panel);stroke-width:3}
.pareto.drops text{fill:var(--soft);stroke:none}
.pareto circle,.key circle{fill-opacity:.75;stroke-width:1.5}
.pareto .within,.key .within{fill:var(--accent);stroke:var(--accent)}
.pareto .beyond,.key .beyond{fill:var(--shade7);stroke:var(--shade7)}
.pareto .asis,.key .asis{fill:var(--base);stroke:var(--base)}
.pareto .edge{fill:var(--panel)}
.pareto .front{stroke:var(--accent);stroke-width:1.5;stroke-dasharray:2 3}
.pareto .budget{stroke:var(--ink);stroke-dasharray:6 4}
.pareto .whisker{stroke-width:1;opacity:.55}
@media(min-width:62.01rem){.decisions th:first-child{width:36%}}
@media(max-width:44rem){.pareto{height:19rem}}
"""


@dataclass(frozen=True)
class Point:
    record: CandidateRecord
    x: float  # ms
    y: float  # drop
    x_ends: tuple[float, float] | None
    y_ends: tuple[float, float] | None
    css: str
    memory_bytes: int | None


@dataclass(frozen=True)
class Axis:
    """From values to shares of the width (or height); values beyond sit at the edges."""

    low: float
    high: float

    def share(self, value: float) -> float:
        inner = (value - self.low) / (self.high - self.low)
        return _MARGIN + (1 - 2 * _MARGIN) * min(max(inner, 0.0), 1.0)

    def holds(self, value: float) -> bool:
        return self.low <= value <= self.high

    def ticks(self) -> list[float]:
        """At equal distances over the whole length, margins included."""
        start = self.low - _MARGIN / (1 - 2 * _MARGIN) * (self.high - self.low)
        step = (self.high - self.low) / (1 - 2 * _MARGIN) / (_TICKS - 1)
        return [start + step * index for index in range(_TICKS)]


def points(record: OptimizeRecord) -> list[Point]:
    """Baseline and candidates that have a time and a place, the largest dot first: small ones stay visible."""
    found = []
    for one in (record.baseline, *record.candidates):
        drop = 0.0 if one is record.baseline else tables.place_of(one)
        times = one.latency_ms
        if times is None or drop is None or not (times.p50 > 0 and math.isfinite(times.p50) and math.isfinite(drop)):
            continue
        css = "asis" if one is record.baseline else "within" if one.fate in ("kept", "dominated") else "beyond"
        found.append(
            Point(
                one,
                times.p50,
                drop,
                _latency_ends(record, one),
                one.accuracy_drop_ci,
                css,
                one.peak_memory_bytes if one.peak_memory_bytes is not None else one.size_bytes,
            )
        )
    return sorted(found, key=lambda point: -(point.memory_bytes or 0))


def _latency_ends(record: OptimizeRecord, one: CandidateRecord) -> tuple[float, float] | None:
    """The interval of the speed-up as milliseconds, from the baseline's median."""
    base = record.baseline.latency_ms
    if base is None or one.speedup_ci is None or min(one.speedup_ci) <= 0:
        return None
    return base.p50 / one.speedup_ci[1], base.p50 / one.speedup_ci[0]


def pareto(record: OptimizeRecord) -> Markup | None:
    """Latency to the right, loss of accuracy downwards: up and left is better. None where no candidate was scored, or
    nothing but the baseline has a time."""
    placed = points(record)
    if len(placed) < 2 or all(point.record.accuracy_drop is None for point in placed):
        return None
    across = _logarithmic(placed)
    down = _drops(placed, record.max_drop)
    parts: list[Markup] = []
    for index in range(1, _TICKS - 1):
        at = _pc(index / (_TICKS - 1))
        parts.append(tag("line", x1=at, x2=at, y1="0", y2="100%", class_="grid"))
    ticks = round_values(down.low, down.high)
    drops = [(_pc(down.share(value)), say.drop(value, record.relative)) for value in ticks]
    parts += [tag("line", x1="0", x2="100%", y1=at, y2=at, class_="grid") for at, _ in drops]
    if record.max_drop is not None and down.holds(record.max_drop):
        at = _pc(down.share(record.max_drop))
        parts.append(tag("line", x1="0", x2="100%", y1=at, y2=at, class_="budget"))
        parts.append(
            tag(
                "text",
                f"budget {say.drop(record.max_drop, record.relative)}",
                x="100%",
                dx="-6",
                y=at,
                dy="14",
                text_anchor="end",
            )
        )
    parts += _front(record, across, down)
    parts += [line for point in placed for line in _whiskers(point, across, down)]
    most = max((point.memory_bytes or 0 for point in placed), default=0)
    parts += [_dot(point, across, down, most, record.relative) for point in placed]
    parts += _names(record, placed, across, down, most)
    label = f"{len(placed)} programs by latency and loss of accuracy; the table below has the numbers"
    below = [tag("span", words.ms(math.exp(value))) for value in across.ticks()]
    return tag(
        "div",
        tag(
            "svg",
            *(tag("text", text, x="100%", y=at, dy="4", text_anchor="end") for at, text in drops),
            class_="pareto drops",
            aria_hidden="true",
        ),
        tag("svg", *parts, class_="pareto", role="img", aria_label=label),
        tag("div", *below, class_="below"),
        tag("div", "across: ms per call (median); down: what the score lost", class_="what"),
        class_="scatter",
    )


def _logarithmic(placed: Sequence[Point]) -> Axis:
    ends = [value for point in placed for value in (point.x, *(point.x_ends or ()))]
    low, high = math.log(min(ends)), math.log(max(ends))
    return Axis(low, high) if high - low > 0.05 else Axis(low - 0.05, high + 0.05)


def _drops(placed: Sequence[Point], budget: float | None) -> Axis:
    """All drops, but not further than a few budgets."""
    ends = [value for point in placed for value in (point.y, *(point.y_ends or ())) if math.isfinite(value)]
    low, high = min(0.0, *ends), max(0.0, *ends)
    if budget:
        low, high = max(low, -_REACH * budget), min(max(high, 1.25 * budget), _REACH * budget)
    return Axis(low, high) if high > low else Axis(low, low + 1e-3)


def round_values(low: float, high: float) -> list[float]:
    """A few round numbers between two.

    >>> round_values(-0.004, 0.04)
    [0.0, 0.01, 0.02, 0.03, 0.04]
    """
    power = 10.0 ** math.floor(math.log10(high - low))
    step = next(factor * power for factor in (0.2, 0.5, 1.0, 2.0) if (high - low) / (factor * power) < 6)
    first = math.ceil(low / step - 1e-9)
    return [float(f"{index * step:.12g}") for index in range(first, math.floor(high / step + 1e-9) + 1)]


def _at(point: Point, across: Axis, down: Axis) -> tuple[str, str]:
    return _pc(across.share(math.log(point.x))), _pc(down.share(point.y))


def _radius(point: Point, most: int) -> float:
    if not most or point.memory_bytes is None:
        return _RADIUS[0]
    return max(_RADIUS[0], _RADIUS[1] * math.sqrt(point.memory_bytes / most))


def _dot(point: Point, across: Axis, down: Axis, most: int, relative: bool) -> Markup:
    x, y = _at(point, across, down)
    memory = f", {show(point.memory_bytes)}" if point.memory_bytes is not None else ""
    lost = f"{say.drop(point.y, relative)}{say.drop_interval(point.y_ends, relative)}"
    told = f"{point.record.id}: {words.ms(point.x)} ms, drop {lost}{memory}"
    css = point.css if down.holds(point.y) else f"{point.css} edge"
    return tag("circle", tag("title", told), cx=x, cy=y, r=f"{_radius(point, most):.1f}", class_=css)


def _whiskers(point: Point, across: Axis, down: Axis) -> list[Markup]:
    x, y = _at(point, across, down)
    found = []
    if point.x_ends is not None:
        low, high = (_pc(across.share(math.log(end))) for end in point.x_ends)
        found.append(tag("line", x1=low, x2=high, y1=y, y2=y, class_="whisker"))
    if point.y_ends is not None and down.holds(point.y):
        low, high = (_pc(down.share(end)) for end in point.y_ends)
        found.append(tag("line", x1=x, x2=x, y1=low, y2=high, class_="whisker"))
    return found


def _front(record: OptimizeRecord, across: Axis, down: Axis) -> list[Markup]:
    """Stairs through those that nothing else beats in both."""
    steps = [
        (_pc(across.share(math.log(one.latency_ms.p50))), _pc(down.share(tables.place_of(one) or 0.0)))
        for one in tables.front([record.baseline, *record.candidates])
        if one.latency_ms is not None
    ]
    found = []
    for (x, y), (next_x, next_y) in zip(steps, steps[1:]):
        found += [
            tag("line", x1=x, x2=next_x, y1=y, y2=y, class_="front"),
            tag("line", x1=next_x, x2=next_x, y1=y, y2=next_y, class_="front"),
        ]
    return found


def _names(record: OptimizeRecord, placed: Sequence[Point], across: Axis, down: Axis, most: int) -> list[Markup]:
    """Names beside the dots that matter; the table has the others."""
    lossless = record.best_lossless.id if record.best_lossless is not None else None
    found = []
    for point in placed:
        told = [
            name
            for name, holds in (
                ("baseline", point.record is record.baseline),
                ("best", point.record.fate == "kept"),
                ("best lossless", point.record.id == lossless),
            )
            if holds
        ]
        if point.record is record.baseline:
            told = told[:1]
        if told:
            x, y = _at(point, across, down)
            right = across.share(math.log(point.x)) > 0.6
            # The baseline below its dot: on a phone it is close to the best lossless one.
            away = _radius(point, most) + (14 if point.record is record.baseline else 5)
            found.append(
                tag(
                    "text",
                    ", ".join(told),
                    x=x,
                    y=y,
                    dy=f"{away if point.record is record.baseline else -away:.0f}",
                    text_anchor="end" if right else "start",
                )
            )
    return found


def bars(record: OptimizeRecord) -> Markup | None:
    """Latency of the baseline and the fastest candidates, for a search that scored nothing."""
    timed = [
        one
        for one in (record.baseline, *record.candidates)
        if one.latency_ms is not None and math.isfinite(one.latency_ms.p50)
    ]
    if len(timed) < 2:
        return None
    shown = [record.baseline] if record.baseline in timed else []
    shown += sorted(
        (one for one in timed if one is not record.baseline),
        key=lambda one: one.latency_ms.p50 if one.latency_ms else 0.0,
    )[:BARS]
    ends = {one.id: _latency_ends(record, one) for one in shown}
    full = 1.05 * max([one.latency_ms.p50 for one in shown if one.latency_ms], default=1.0)
    rows = []
    for one in shown:
        value = one.latency_ms.p50 if one.latency_ms else 0.0
        rows.append(
            tag(
                "li",
                tag("span", "baseline" if one is record.baseline else one.id),
                svg.bar(
                    value,
                    full,
                    label=f"{one.id}: {words.ms(value)} ms",
                    css="tuned" if one.fate == "kept" else "base",
                    interval=ends[one.id],
                ),
                tag("span", f"{words.ms(value)} ms", class_="value"),
            )
        )
    return tag("ol", *rows, class_="rows short")


def key() -> Markup:
    """What the dots mean."""
    names = (
        ("asis", "the model as it is"),
        ("within", "within the budget and the limits"),
        ("beyond", "not, or not shown to be"),
    )
    return tag(
        "p",
        *(
            tag("span", tag("svg", tag("circle", cx="8", cy="5", r="4.5", class_=css), aria_hidden="true"), name)
            for css, name in names
        ),
        tag("span", join(["area: peak memory; lines: intervals; dotted: the front"])),
        class_="key",
    )


def _pc(share: float) -> str:
    return f"{100 * share:.2f}%"
