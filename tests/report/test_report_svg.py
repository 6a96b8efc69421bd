"""Charts: what is drawn, where, and that no number can break one."""

from __future__ import annotations

import math
import re

import msgspec
import pytest
import study_parts

from saturate.report import svg


def numbers(text, attribute):
    return [float(value) for value in re.findall(rf'\b{attribute}="(-?[\d.]+)%?"', text)]


def curve(baseline, candidate, tolerance, metric="loss"):
    return msgspec.structs.replace(
        study_parts.curve("s", metric, updates=1), baseline=baseline, candidate=candidate, tolerance=tolerance
    )


def test_a_bar_has_the_length_of_its_value():
    assert numbers(svg.bar(30, 120, label="", css="base"), "width")[0:2] == [100.0, 25.0]


@pytest.mark.parametrize(
    ("value", "full"), [(math.nan, 1), (1, math.nan), (math.inf, 1), (1, 0), (0, 0), (-1, 1), (5, 1)]
)
def test_a_bar_survives_any_number(value, full):
    text = svg.bar(value, full, label="", css="base", interval=(value, value), reference=value)
    assert "nan" not in text and "inf" not in text
    assert all(0 <= width <= 100 for width in numbers(text, "width"))


def test_stack_segments_follow_each_other_to_the_total():
    text = svg.stack([("a", 30, 0), ("b", 0, 1), ("c", 50, 2)], 100, label="")
    starts = [float(v) for v in re.findall(r'<svg x="([\d.]+)%"', text)]
    assert starts == [0.0, 30.0]
    assert re.findall(r"<text[^>]*>(\w)</text>", text) == ["a", "c"]


def test_dots_lie_on_the_side_of_the_faster_program_and_clip_visibly():
    text = svg.dots([[0.1, -0.1, 0.0, 9.0, math.nan]], 0.5, 0.02, label="")
    right, left, zero, far = numbers(text, "cx")
    assert left < 50 < right and zero == 50 and right + left == pytest.approx(100)
    assert far == 99 and text.count("dot open") == 1


def test_dots_of_one_study_share_a_scale_that_ignores_one_outlier():
    many = [[[0.01] * 500, [5.0]]]
    assert svg.extent_of(many) < 0.2
    assert svg.extent_of([]) > 0


def test_thinning_keeps_every_spike():
    candidate = [0.0] * 10_000
    candidate[3333], candidate[7777] = 1.0, -1.0
    chosen = svg.thinned(curve([0.0] * 10_000, candidate, [1.0] * 10_000), 100)
    assert {0, 3333, 7777, 9999} <= set(chosen) and len(chosen) <= 104


def test_thinning_keeps_a_short_series_whole():
    assert svg.thinned(curve([1.0] * 50, [1.0] * 50, []), 160) == list(range(50))


def test_the_band_of_a_cosine_is_a_least_value():
    assert svg.allowed(curve([1.0], [0.99], [0.9], "update cosine"), 0) == (0.9, math.inf)
    assert svg.allowed(curve([1.0], [0.99], [0.25]), 0) == (0.75, 1.25)
    assert svg.allowed(curve([1.0], [0.99], []), 0) == (-math.inf, math.inf)


def path(text, css):
    """Points of one path, back from its relative coordinates."""
    data = re.search(rf'd="([^"]*)" class="{css}"', text).group(1)
    runs = []
    for run in data.split("M")[1:]:
        start, _, moves = run.rstrip("z").partition("l")
        x, y = map(int, start.replace("h0", "").split())
        points, steps = [(x, y)], [int(v) for v in moves.split()]
        for dx, dy in zip(steps[::2], steps[1::2]):
            x, y = x + dx, y + dy
            points.append((x, y))
        runs.append(points)
    return runs


def test_a_curve_is_drawn_where_its_values_are():
    text, low, high = svg.plot(curve([0.0, 1.0], [0.0, 0.5], [0.1, 0.1]), 10, css="plot", label="")
    (base,), (cand,) = path(text, "base"), path(text, "cand")
    assert (base[0][0], base[-1][0]) == (0, 400)
    assert base[0][1] > cand[-1][1] > base[-1][1], "down is smaller"
    assert cand[-1][1] == pytest.approx(200 * (high - 0.5) / (high - low), abs=1)
    assert low < -0.1 and high > 1.1, "the band is inside"


def test_a_series_that_is_not_finite_has_a_gap():
    text, _, _ = svg.plot(curve([1.0] * 5, [1.0, 1.1, math.nan, 1.2, 1.1], [0.5] * 5), 10, css="plot", label="")
    assert [len(run) for run in path(text, "cand")] == [2, 2]


def test_a_candidate_that_explodes_does_not_flatten_the_rest():
    _, low, high = svg.plot(curve([1.0, 2.0], [1.0, 1e30], [0.1, 0.1]), 10, css="plot", label="")
    assert high - low < 10


@pytest.mark.parametrize(
    "build",
    [
        lambda: curve([], [], []),
        lambda: curve([math.nan], [math.nan], [0.1]),
        lambda: curve([1.0], [math.inf], [0.1]),
    ],
)
def test_nothing_finite_is_nothing_drawn(build):
    assert svg.plot(build(), 10, css="plot", label="") is None


@pytest.mark.parametrize("values", [[0.0], [5.0], [1e-300] * 3, [1e300, -1e300]])
def test_flat_and_extreme_series_are_drawn(values):
    text, low, high = svg.plot(curve(values, values, [0.0] * len(values)), 10, css="plot", label="")
    assert low < high and "nan" not in text
