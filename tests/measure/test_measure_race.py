import random
import time
from math import expm1, log, log1p, sqrt
from statistics import NormalDist

import pytest

from saturate.measure.race import (
    PRIOR_BETWEEN_SD,
    Estimate,
    Limits,
    between_sd,
    by_state,
    estimate,
    look_confidence,
    next_action,
    noise_floor,
    verdict,
)
from saturate.measure.stats import median_se

LIMITS = Limits()


def pair(rng, true, bias_sd=0.012, round_sd=0.03, rounds=12):
    """One simulated fresh pair: a constant bias, and rounds of which one in twenty is wild."""
    centre = true + rng.gauss(0, bias_sd)
    return [centre + rng.gauss(0, round_sd * (8 if rng.random() < 0.05 else 1)) for _ in range(rounds)]


def race(rng, true, between=PRIOR_BETWEEN_SD, limits=LIMITS, **noise):
    """A whole sequential race; returns its decision and the number of pairs."""
    pairs, source = [], []
    while (decision := next_action(pairs, between, limits=limits)).action != "stop":
        if decision.action == "new_pair":
            pairs.append([])
            source = pair(rng, true, rounds=limits.max_rounds, **noise)
        pairs[-1].append(source[len(pairs[-1])])
    return decision, len(pairs)


@pytest.mark.parametrize("pairs", [1, 2, 3, 5])
def test_interval_holds_the_truth_for_any_number_of_pairs(pairs):
    """1000 races each: coverage of the 95 % interval. An interval over rounds alone covers about half of them."""
    rng = random.Random(pairs)
    held = 0
    for _ in range(1000):
        found = estimate([pair(rng, 0.05) for _ in range(pairs)])
        held += found.low <= 0.05 <= found.high
    assert 0.935 <= held / 1000 <= 0.995


@pytest.mark.parametrize("rounds", [2, 3])
@pytest.mark.parametrize("scatter", [0.02, 0.1, 0.2])
def test_interval_holds_the_truth_where_a_pair_was_cut_short(rounds, scatter):
    """Of two rounds that scatter by 10 %, every fifth interval missed it: they agree by chance, and seem to leave no doubt."""
    rng, held, called = random.Random(rounds), 0, 0
    for _ in range(1000):
        found = estimate([pair(rng, 0.0, round_sd=scatter, rounds=rounds)])
        held += found.low <= 0.0 <= found.high
        called += verdict(found) in ("faster", "slower")
    assert held / 1000 >= 0.935 and called / 1000 <= 0.05


def test_the_interval_is_that_of_the_formula():
    """By hand: two pairs 0.1 apart, whose rounds do not scatter. Each weighs 1 / 0.05^2, so their spread is 2, beside six pairs of a prior."""
    found, half = estimate([[0.1] * 6, [0.2] * 6], 0.05), 2.3646 * sqrt((6 + 2) / 7 / 800)      # Student's t with 7 degrees of freedom
    assert found.log_ratio == pytest.approx(0.15)
    assert (found.high - 0.15, 0.15 - found.low) == pytest.approx((half, half), rel=1e-4)
    learned = 0.012**2 * 6 / 8          # two pairs that do not differ
    assert noise_floor([[0.0] * 6] * 2) == pytest.approx(expm1(2.3646 * sqrt(6 / 7 * learned / 2)), rel=1e-4)


def test_more_rounds_of_one_pair_do_not_hide_the_bias_of_the_pair():
    rng = random.Random(0)
    found = estimate([pair(rng, 0.0, rounds=400)])
    assert 1.8 * PRIOR_BETWEEN_SD <= found.high - found.log_ratio <= 3 * PRIOR_BETWEEN_SD
    three = estimate([pair(rng, 0.0, rounds=400) for _ in range(3)])
    assert three.high - three.low < 0.75 * (found.high - found.low)


def test_pairs_that_disagree_more_than_expected_widen_the_interval():
    calm = estimate([[0.05] * 6, [0.05] * 6, [0.05] * 6])
    torn = estimate([[0.15] * 6, [-0.05] * 6, [0.05] * 6])
    assert torn.log_ratio == pytest.approx(calm.log_ratio)
    assert torn.high - torn.low > 3 * (calm.high - calm.low)


def test_a_noisy_pair_counts_less_than_a_quiet_one():
    quiet, noisy = [0.10, 0.101, 0.099, 0.10, 0.10, 0.1], [0.9, -0.4, 0.5, 0.0, 0.7, -0.2]
    assert estimate([quiet, noisy]).log_ratio == pytest.approx(0.10, abs=0.01)


def test_estimate_is_symmetric_and_speaks_of_speedups():
    rng = random.Random(3)
    pairs = [pair(rng, log(2)) for _ in range(3)]
    found = estimate(pairs)
    mirrored = estimate([[-r for r in rounds] for rounds in pairs])
    assert mirrored.log_ratio == pytest.approx(-found.log_ratio)
    assert (mirrored.low, mirrored.high) == pytest.approx((-found.high, -found.low))
    assert found.speedup_ci[0] < found.speedup < found.speedup_ci[1]
    assert found.speedup == pytest.approx(2, rel=0.05)
    assert (found.pairs, found.rounds) == (3, 36)


@pytest.mark.parametrize("pairs", [[], [[0.1]], [[0.1, 0.2], [0.1]]])
def test_estimate_refuses_what_has_no_spread(pairs):
    with pytest.raises(ValueError):
        estimate(pairs)


@pytest.mark.parametrize("low, high, pairs, expected", [
    (0.03, 0.05, 3, "faster"), (0.01, 0.05, 3, "inconclusive"), (-0.05, -0.03, 3, "slower"),
    (-0.05, -0.01, 3, "no_difference"), (-0.01, 0.01, 3, "no_difference"), (-0.03, 0.03, 3, "inconclusive"),
    (0.03, 0.05, 2, "inconclusive"), (-0.05, -0.03, 1, "inconclusive"), (0.3, 0.5, 1, "faster"),
    (-0.5, -0.3, 1, "slower"), (-0.2, 0.3, 6, "inconclusive")])
def test_verdicts(low, high, pairs, expected):
    assert verdict(Estimate((low + high) / 2, low, high, pairs, 10 * pairs)) == expected


def test_threshold_is_a_share_of_speed():
    just_above = Estimate(log1p(0.12), log1p(0.101), log1p(0.14), 3, 30)
    assert verdict(just_above, 0.10) == "faster"
    assert verdict(just_above, 0.102) == "inconclusive"


def test_between_sd_learns_from_aa_pairs_and_keeps_to_the_prior_without():
    rng = random.Random(5)
    assert between_sd([]) == PRIOR_BETWEEN_SD
    assert between_sd([[0.1]]) == PRIOR_BETWEEN_SD
    wide = between_sd([pair(rng, 0, bias_sd=0.06) for _ in range(40)])
    assert 0.04 < wide < 0.07
    exact = between_sd([[0.0] * 8 for _ in range(40)])
    assert exact < 0.4 * PRIOR_BETWEEN_SD
    # scatter of rounds alone is not bias
    assert between_sd([pair(rng, 0, bias_sd=0, round_sd=0.1) for _ in range(20)]) < 2 * PRIOR_BETWEEN_SD


def test_noise_floor_shrinks_with_pairs_and_grows_with_noise():
    rng = random.Random(6)
    few = noise_floor([pair(rng, 0) for _ in range(2)])
    many = noise_floor([pair(rng, 0) for _ in range(8)])
    assert 0.003 < many < few < 0.06
    assert noise_floor([pair(rng, 0, bias_sd=0.05) for _ in range(8)]) > 2 * many


def test_race_starts_with_a_pair_and_asks_for_rounds():
    assert next_action([]).action == "new_pair"
    assert next_action([[]]).action == "more_rounds"
    assert next_action([[0.7] * 5]).action == "more_rounds"
    assert next_action([[0.7] * 6]).verdict == "faster"


@pytest.mark.parametrize(("noise", "action"), [(0.4, "new_pair"), (0.6, "more_rounds")])
def test_more_rounds_are_made_until_their_noise_is_half_of_what_pairs_differ_by(noise, action):
    rounds = [-2.0, -1.0, -0.5, 0.5, 1.0, 2.0]
    scale = noise * PRIOR_BETWEEN_SD / median_se(rounds)
    assert next_action([[log1p(0.02) + scale * one for one in rounds]]).action == action


@pytest.mark.parametrize(("share", "action"), [(0.95, "more_rounds"), (1.05, "stop")])
def test_while_the_rounds_of_a_pair_scatter_only_what_leaves_no_doubt_is_called(share, action):
    """By hand: Student's t of 99.9 % with 6 degrees of freedom. At 99 % it would be 3.7, and each further round another look."""
    rounds, error = [-2.0, -1.0, -0.5, 0.5, 1.0, 2.0], 5 * PRIOR_BETWEEN_SD
    scale, needed = error / median_se(rounds), 5.9588 * sqrt(PRIOR_BETWEEN_SD**2 + error**2)
    found = next_action([[log1p(0.02) + share * needed + scale * one for one in rounds]])
    assert (found.action, found.verdict) == (action, "faster" if action == "stop" else "inconclusive")


def test_a_large_gain_needs_one_short_pair_and_a_small_one_at_least_three():
    rng = random.Random(7)
    decision, pairs = race(rng, log(1.8))
    assert (decision.verdict, pairs) == ("faster", 1)
    assert decision.estimate.rounds <= 12
    decision, pairs = race(rng, log(1.04), between=0.001, bias_sd=0.0, round_sd=0.001)
    assert (decision.verdict, pairs) == ("faster", 3)
    decision, pairs = race(rng, log(0.5))
    assert (decision.verdict, pairs) == ("slower", 1)


def test_race_ends_within_its_limits():
    limits = Limits(max_pairs=2, min_rounds=4, max_rounds=7)
    decision, pairs = race(random.Random(8), 0.02, limits=limits, round_sd=0.5)
    assert (decision.action, decision.verdict, pairs) == ("stop", "inconclusive", 2)
    assert decision.estimate.rounds == 14


def test_repeated_looks_keep_the_level():
    """At the worst case for `faster`, a true gain of exactly the threshold, 0.5 % of 1500 races claimed more than it;
    with a plain 95 % interval at every look 5.7 % did. At most 2.5 % may (one side of 5 %)."""
    rng = random.Random(9)
    claims = sum(race(rng, log1p(0.02), round_sd=0.02)[0].verdict == "faster" for _ in range(600))
    assert claims <= 0.025 * 600


def test_processes_that_differ_more_than_the_prior_says_do_not_fool_an_aa_race():
    """Bias 2.5 times the prior's, known only from three A/A pairs."""
    rng = random.Random(12)
    false = 0
    for _ in range(300):
        learned = between_sd([pair(rng, 0.0, bias_sd=0.03) for _ in range(3)])
        false += race(rng, 0.0, between=learned, bias_sd=0.03)[0].verdict in ("faster", "slower")
    assert false <= 0.05 * 300


def test_aa_races_are_not_called_and_real_differences_are():
    rng = random.Random(10)
    false = sum(race(rng, 0.0)[0].verdict in ("faster", "slower") for _ in range(200))
    found = sum(race(rng, log1p(0.05))[0].verdict == "faster" for _ in range(200))
    assert false <= 4
    assert found >= 180


def test_look_confidence_keeps_the_level_of_all_looks_together():
    """Simulated: means of more and more values that have no mean, each looked at with the same interval."""
    rng, races, most = random.Random(13), 8000, 10
    limits, wrong = [NormalDist().inv_cdf((1 + look_confidence(n)) / 2) for n in range(1, most + 1)], [0] * most
    for _ in range(races):
        total, furthest = 0.0, 0.0
        for n in range(1, most + 1):
            total += rng.gauss(0, 1)
            furthest = max(furthest, abs(total) / sqrt(n))
            wrong[n - 1] += furthest > limits[n - 1]
    assert all(0.042 * races < count < 0.058 * races for count in wrong), wrong
    assert [1 - look_confidence(n) for n in (11, 15)] == pytest.approx([0.05 / 11, 0.05 / 15]), "Bonferroni's, beyond the table"


def test_estimate_is_cheap():
    rng = random.Random(11)
    pairs = [pair(rng, 0.03, rounds=30) for _ in range(6)]
    start = time.process_time()
    for _ in range(20):
        estimate([[r + 1e-9 * time.perf_counter_ns() for r in rounds] for rounds in pairs])
    assert (time.process_time() - start) / 20 < 0.02


def test_pairs_that_show_all_or_nothing_are_judged_by_state():
    """A's process is slow by chance in some pairs; the mean over five cannot tell, and each pair is clear."""
    quiet, slow = [0.004, -0.003, 0.001, -0.002, 0.002, 0.0], [0.223, 0.219, 0.225, 0.221, 0.218, 0.222]
    pairs, states = [slow, quiet, slow], [True, False, True]
    assert verdict(estimate(pairs, 0.1, look_confidence(5))) == "inconclusive"
    found = by_state(pairs, states)
    assert verdict(found) == "faster" and found.pairs == 3 and found.rounds == 18
    assert found.log_ratio == pytest.approx(2 / 3 * 0.2215, abs=1e-3) and found.high < 0.25
    assert found.low < 0.1, "how often a process is slow is not known from three"
    for other in ([-r for r in slow], quiet):       # slower in the other state; and a state that makes no difference
        assert verdict(by_state([slow if other is not quiet else quiet, other, other], [True, False, False])) != "faster"
    with pytest.raises(ValueError):
        by_state([quiet] * 3, [False] * 3)


@pytest.mark.parametrize("gain", [0.0, 0.22])
def test_the_interval_by_state_covers_the_mean_over_all_processes(gain):
    """2,000 simulated races of three to five pairs; a process of A is slow four times in ten."""
    rng, missed, claimed, share = random.Random(3), 0, 0, 0.4
    for number in range(2000):
        states = [rng.random() < share for _ in range(3 + number % 3)]
        if len(set(states)) == 2:
            found = by_state([pair(rng, gain if state else 0.0) for state in states], states)
            missed += not found.low <= share * gain <= found.high
            claimed += verdict(found) == "faster"
    assert missed <= 0.06 * 2000
    assert claimed <= 0.01 * 2000 if gain == 0 else claimed > 0.4 * 2000
