"""Inline SVG charts.

No chart scales its text: bars and dots use percentages of the width and fixed heights, and curves are stretched with
strokes that do not scale, their labels standing outside in HTML. So everything reads as well on a phone as on a desk.
Colours are classes of the style sheet; nothing is told by colour alone.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

import msgspec

from saturate.records.result import NumericsCurve
from saturate.report.markup import Markup, tag

_BAR_HEIGHT = 22
_LANE = 9  # height of one pair in a dot plot, pixels
_WIDE, _HIGH = 400, 200  # a plot's own coordinates: whole numbers there are finer than its pixels
_STRETCH = 0.02  # log-ratio where the scale of a dot plot turns from linear to logarithmic
_OFF_SCALE = 2.0  # a candidate may widen the plot of the baseline and its tolerance this many times

# Strokes of a 16 x 16 sign for each fate: told apart by shape alone.
_SIGNS = {
    "kept": ("M3 8.5l3.4 3.5L13 4.5", "sign strong"),
    "rejected_numerics": ("M4 4l8 8M12 4l-8 8", "sign strong"),
    "failed": ("M8 3v6.2M8 12v1", "sign strong"),
    "not_applied": ("M8 3.5a4.5 4.5 0 1 0 .01 0M4.8 11.2l6.4-6.4", "sign"),
    "slower": ("M8 3v10M4 9l4 4 4-4", "sign"),
    "inconclusive": ("M2.5 9c1.8-3.6 3.7-3.6 5.5-1s3.700 2.600 5.500-1", "sign"),
    "no_difference": ("M3 6h10M3 10h10", "sign"),
    "not_tried": ("M4 8h.01M8 8h.01M12 8h.01", "sign strong"),
    "not_applicable": ("M4 8h8", "sign"),
}


def sign(fate: str) -> Markup:
    """The sign of a fate; decoration beside the word, so hidden from screen readers."""
    path, css = _SIGNS[fate]
    return tag("svg", tag("path", d=path), class_=css, viewBox="0 0 16 16", aria_hidden="true")


def _pc(share: float) -> str:
    """A share of the width as a percentage, kept inside the chart; 0 where there is no number to draw."""
    return f"{100 * min(max(share, 0.0), 1.0):.2f}%" if math.isfinite(share) else "0%"


def bar(
    value: float,
    full: float,
    *,
    label: str,
    css: str,
    interval: tuple[float, float] | None = None,
    reference: float | None = None,
) -> Markup:
    """A horizontal bar of `value` out of `full`, with a whisker for its interval and a dashed line at `reference`."""
    full = full if full > 0 and math.isfinite(full) else 1.0
    middle = _BAR_HEIGHT / 2
    parts = [tag("rect", x="0", y="3", width=_pc(value / full), height=_BAR_HEIGHT - 6, rx="2", class_=css)]
    if reference is not None:
        at = _pc(reference / full)
        # Beyond the bar's own height, so that the lines of successive bars meet.
        parts.append(tag("line", x1=at, x2=at, y1=-_BAR_HEIGHT, y2=2 * _BAR_HEIGHT, class_="reference"))
    if interval is not None:
        low, high = (_pc(end / full) for end in interval)
        # Twice: a wide line in the page's colour keeps the thin one visible on the bar.
        for stroke in ("whisker halo", "whisker"):
            parts.append(tag("line", x1=low, x2=high, y1=middle, y2=middle, class_=stroke))
            for end in (low, high):
                parts.append(tag("line", x1=end, x2=end, y1=middle - 4, y2=middle + 4, class_=stroke))
    return tag("svg", *parts, class_="bar", width="100%", height=_BAR_HEIGHT, role="img", aria_label=label)


def stack(parts: Sequence[tuple[str, float, int]], full: float, *, label: str) -> Markup:
    """One bar of `(name, value, shade)` segments out of `full`; names are written where they fit."""
    full = full if full > 0 and math.isfinite(full) else 1.0
    drawn, start = [], 0.0
    for name, value, shade in parts:
        if not (math.isfinite(value) and value > 0):
            continue
        share = value / full
        # About 60 characters of this size fit a phone's width: a name that does not fit is in the table below anyway.
        text = [tag("text", name, x="6", y="21", class_=f"on{shade}")] if share * 56 > len(name) + 1 else []
        drawn.append(
            tag(
                "svg",
                tag("title", name),
                tag("rect", width="100%", height="34", class_=f"shade{shade}"),
                *text,
                x=_pc(start),
                width=_pc(share),
                height="34",
            )
        )
        start += share
    return tag("svg", *drawn, class_="stack", width="100%", height="34", role="img", aria_label=label)


def dots(pairs: Sequence[Sequence[float]], extent: float, threshold: float, *, label: str) -> Markup:
    """One dot per round, one lane per pair, over log-ratios from -extent to +extent; values beyond sit at the edge as
    open dots. Solid line: no difference; shaded: too small to count; thin lines: 10 % either way.

    The scale is an inverse hyperbolic sine: near zero it shows the noise of an A/A race beside a large gain.
    """
    height = _LANE * max(len(pairs), 1) + 6

    def at(log_ratio: float) -> float:
        return 0.5 + math.asinh(log_ratio / _STRETCH) / math.asinh(extent / _STRETCH) / 2

    def rule(log_ratio: float, css: str) -> Markup:
        x = _pc(at(log_ratio))
        return tag("line", x1=x, x2=x, y1="0", y2=height, class_=css)

    low, high = at(-math.log1p(threshold)), at(math.log1p(threshold))
    parts = [tag("rect", x=_pc(low), width=_pc(high - low), y="0", height=height, class_="band"), rule(0, "zero")]
    parts += [rule(side * math.log1p(0.1), "tick") for side in (-1, 1)]
    for lane, ratios in enumerate(pairs):
        y = 3 + _LANE * (lane + 0.5)
        for value in ratios:
            if math.isfinite(value):
                inside = abs(value) < extent
                x = min(max(at(value), 0.01), 0.99)
                parts.append(tag("circle", cx=_pc(x), cy=y, r="2.6", class_="dot" if inside else "dot open"))
    return tag("svg", *parts, class_="dots", width="100%", height=height, role="img", aria_label=label)


def extent_of(races: Iterable[Sequence[Sequence[float]]]) -> float:
    """A half-width that holds nearly all log-ratios of all races: the same scale makes their noise comparable."""
    sizes = sorted(abs(value) for pairs in races for ratios in pairs for value in ratios if math.isfinite(value))
    return max(sizes[int(0.99 * (len(sizes) - 1))] * 1.25, 0.15) if sizes else 0.15


def thinned(curve: NumericsCurve, points: int) -> list[int]:
    """Indices worth drawing: all, or per bucket the candidate's least and greatest, so that no spike is lost."""
    length = min(len(curve.baseline), len(curve.candidate))
    if length <= points:
        return list(range(length))
    buckets = max(points // 2, 1)
    chosen = {0, length - 1}
    for bucket in range(buckets):
        inside = range(bucket * length // buckets, (bucket + 1) * length // buckets)
        finite = [i for i in inside if math.isfinite(curve.candidate[i])]
        chosen.update(
            (min(finite, key=curve.candidate.__getitem__), max(finite, key=curve.candidate.__getitem__))
            if finite
            else (inside[0],)
        )
    return sorted(chosen)


def allowed(curve: NumericsCurve, index: int) -> tuple[float, float]:
    """The band at one update: around the baseline, or for a cosine above a least value. Infinite: anything goes."""
    tolerance = curve.tolerance[index] if index < len(curve.tolerance) else math.inf
    if math.isnan(tolerance):
        return -math.inf, math.inf
    if "cosine" in curve.metric:
        return tolerance, math.inf
    return curve.baseline[index] - tolerance, curve.baseline[index] + tolerance


def difference(curve: NumericsCurve) -> NumericsCurve:
    """The curve as deviations from its baseline: there the band is visible when it is thin beside the series."""
    pairs = zip(curve.baseline, curve.candidate)
    return msgspec.structs.replace(
        curve, candidate=[theirs - base for base, theirs in pairs], baseline=[0.0] * len(curve.baseline)
    )


def plot(curve: NumericsCurve, points: int, *, css: str, label: str) -> tuple[Markup, float, float] | None:
    """Tolerance band, baseline (dashed) and candidate (solid), with the least and greatest value of the axis; None
    when there is nothing finite to draw. A candidate far outside is drawn at the edge."""
    at = thinned(curve, points)
    band = [allowed(curve, i) for i in at]
    core = [v for i, ends in zip(at, band) for v in (curve.baseline[i], *ends) if math.isfinite(v)]
    wild = [curve.candidate[i] for i in at if math.isfinite(curve.candidate[i])]
    if not core or not wild:
        return None
    low, high = min(core), max(core)
    reach = _OFF_SCALE * ((high - low) or abs(high) or 1.0)
    low, high = max(min(low, *wild), low - reach), min(max(high, *wild), high + reach)
    margin = 0.04 * (high - low) or abs(high) or 1.0
    low, high = low - margin, high + margin
    last = max(at[-1], 1)

    def point(index: int, value: float) -> tuple[int, int]:
        y = (high - min(max(value, low), high)) / (high - low)
        return round(_WIDE * index / last), round(_HIGH * y)

    def line(values: Sequence[float], css: str) -> Markup:
        runs: list[list[tuple[int, int]]] = [[]]
        for index in at:
            if math.isfinite(values[index]):
                runs[-1].append(point(index, values[index]))
            elif runs[-1]:
                runs.append([])
        return tag("path", d="".join(_path(run) for run in runs), class_=css)

    edge = [point(i, ends[1]) for i, ends in zip(at, band)]
    edge += [point(i, ends[0]) for i, ends in zip(reversed(at), reversed(band))]
    parts = [
        tag("path", d=_path(edge) + "z", class_="band"),
        line(curve.baseline, "base"),
        line(curve.candidate, "cand"),
    ]
    chart = tag(
        "svg",
        *parts,
        class_=css,
        viewBox=f"0 0 {_WIDE} {_HIGH}",
        preserveAspectRatio="none",
        role="img",
        aria_label=label,
    )
    return chart, low, high


def _path(points: Sequence[tuple[int, int]]) -> str:
    """Path data through the points, by differences: half the bytes of coordinates."""
    if not points:
        return ""
    moves = [f"{x - a} {y - b}" for (a, b), (x, y) in zip(points, points[1:])]
    return f"M{points[0][0]} {points[0][1]}" + ("l" + " ".join(moves) if moves else "h0")
