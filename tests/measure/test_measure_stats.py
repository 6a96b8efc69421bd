import random
from statistics import NormalDist, median, stdev

import pytest

from saturate.measure import breakeven
from saturate.measure.stats import mad_sd, median_se, quantile, t_quantile, wilson

#: Published two-sided 95 % and 99 % points of Student's t.
STUDENT = [(0.975, 1, 12.706), (0.975, 2, 4.303), (0.975, 5, 2.571), (0.975, 10, 2.228), (0.975, 30, 2.042),
           (0.995, 1, 63.657), (0.995, 4, 4.604), (0.995, 7, 3.499), (0.995, 20, 2.845)]


@pytest.mark.parametrize("p, df, expected", STUDENT)
def test_student_quantiles_are_those_of_the_tables(p, df, expected):
    assert t_quantile(p, df) == pytest.approx(expected, abs=6e-4)


def test_student_quantile_tends_to_the_normal_one_and_refuses_nonsense():
    assert t_quantile(0.975, 2000) == pytest.approx(NormalDist().inv_cdf(0.975), abs=2e-3)
    for p, df in ((0.4, 5), (1.0, 5), (0.9, 0)):
        with pytest.raises(ValueError):
            t_quantile(p, df)


@pytest.mark.parametrize("count, exactness", [(15, 0.03), (16, 0.12)])     # an even count: upper or lower median
def test_error_of_the_median_is_the_one_a_bootstrap_would_find(count, exactness):
    rng = random.Random(1)
    values = [rng.gauss(0, 1) for _ in range(count)]
    resampled = [median(rng.choices(values, k=count)) for _ in range(20_000)]
    assert median_se(values) == pytest.approx(stdev(resampled), rel=exactness)


def test_error_of_the_median_ignores_a_wild_round():
    values = [0.01, -0.01, 0.02, -0.02, 0.0, 0.01, -0.01, 0.015, -0.015]
    assert median_se([*values, 5.0]) < 0.02
    four = [0.01, -0.01, 0.02, 5.0]         # 0.015 in the middle; five times what the others scatter by is 0.11
    assert median_se(four) == median_se([*four[:3], 0.015 + 5 * mad_sd(four)]) < 0.05
    with pytest.raises(ValueError):
        median_se([0.1])


def test_two_rounds_that_agree_by_chance_do_not_make_a_third_an_outlier():
    assert median_se([1.0, -1.0, 1.0]) > 0.5
    assert median_se([0.5, -0.3, 0.501]) > 0.2


def test_quantile_and_mad():
    assert quantile([4, 1, 3, 2], 0.5) == 2.5
    assert quantile([7], 0.9) == 7
    with pytest.raises(ValueError):
        quantile([], 0.5)
    rng = random.Random(2)
    normal = [rng.gauss(0, 2) for _ in range(4000)]
    assert mad_sd([*normal, *[1e9] * 40]) == pytest.approx(2, rel=0.08)


def test_wilson_interval():
    low, high = wilson(10, 200)     # published example: 5 % of 200
    assert (low, high) == pytest.approx((0.0274, 0.0896), abs=1e-4)
    assert wilson(0, 40)[0] == pytest.approx(0, abs=1e-12)
    assert wilson(0, 40)[1] == pytest.approx(0.0876, abs=1e-3)
    with pytest.raises(ValueError):
        wilson(0, 0)


@pytest.mark.parametrize("baseline, tuned, startup, expected", [
    (100.0, 50.0, 10.0, 200), (100.0, 50.0, 10.01, 201), (100.0, 100.0, 1.0, None), (50.0, 60.0, -5.0, None),
    (100.0, 50.0, 0.0, 0), (100.0, 50.0, -3.0, 0)])
def test_break_even(baseline, tuned, startup, expected):
    assert breakeven.steps(baseline, tuned, startup) == expected
