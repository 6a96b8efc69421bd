"""Verdicts where one rounding makes another trajectory of a training within a few updates: made-up series that come apart as TabNet does."""

from __future__ import annotations

import math
import random
from array import array
from dataclasses import replace
from operator import sub

import pytest

from saturate.verify.apart import LEAST_ALIKE
from saturate.verify.broken import LEAST_UPDATES
from saturate.verify.compare import compare
from saturate.verify.deviation import FIRST_ACTING
from saturate.verify.series import Series
from saturate.verify.tolerance import SEPARATED, tolerance

N, SEGMENTS = 52, [16] * 48


def falls(k):
    """How much of an update two runs share, on TabNet: they come apart from update 4 on."""
    return max(0.35, 1.0 - 0.055 * (k - 3)) if k > 3 else 1.0


def at_once(k):
    return 1.0 if k <= FIRST_ACTING else 0.0


def run(seed, shared=falls, noise=1e-4, first=FIRST_ACTING):
    """The same direction in every run as far as it is `shared`, and one of its own; losses fall, and differ once it is apart."""
    path, own = random.Random(0), random.Random(seed)
    position, rows, losses, norms, way = [path.gauss(0, 1) for _ in range(sum(SEGMENTS))], [], [], [], None
    for k in range(N):
        drawn = [path.gauss(0, 1) for _ in position]
        way = drawn if way is None else [0.7 * w + 0.7 * d for w, d in zip(way, drawn)]
        share = shared(k) * (1 - (noise if seed and k >= first else 0.0))
        rest = math.sqrt(max(0.0, 1 - share * share))
        position = [p + 0.003 * (share * w + rest * own.gauss(0, 1)) for p, w in zip(position, way)]
        rows.append(array("d", position))
        losses.append([2.5 * 0.97**k + 0.05 * path.random() + 0.02 * rest * own.gauss(0, 1)])
        norms.append((1 + 0.98**k + 0.3 * path.random()) * math.exp(0.1 * rest * own.gauss(0, 1)))
    return Series(losses, norms, rows, segments=SEGMENTS)


BASE = run(0)


def made(change, losses=None, base=BASE):
    """`base`, each of whose acting updates is changed."""
    rows = list(map(list, base.samples[:FIRST_ACTING]))
    for k in range(FIRST_ACTING, N):
        rows.append([at + step for at, step in zip(rows[-1], change(list(map(sub, base.samples[k], base.samples[k - 1]))))])
    return replace(base, samples=rows, losses=losses or base.losses)


def signs(drawn):
    return lambda step: [drawn.choice((-1, 1)) * value for value in step]


def ascent(step):
    return [-value for value in step]


def shuffled(step):
    return random.Random(3).sample(step, len(step))


def one_tensor_ascends(step):
    return [*ascent(step[:16]), *step[16:]]


FIRST_LOSS = [BASE.losses[0]] * N
CORRUPTED = {
    "ascent": lambda base: made(ascent, base=base),
    "random signs": lambda base: made(signs(random.Random(1)), base=base),
    "shuffled": lambda base: made(shuffled, base=base),
    "ascent, constant loss": lambda base: made(ascent, FIRST_LOSS, base),
    "random signs, constant loss": lambda base: made(signs(random.Random(1)), FIRST_LOSS, base),
    "constant loss": lambda base: replace(base, losses=FIRST_LOSS),
    "twice as long": lambda base: made(lambda step: [2 * value for value in step], base=base),
    "half as long": lambda base: made(lambda step: [0.5 * value for value in step], base=base),
    "one tensor ascends": lambda base: made(one_tensor_ascends, base=base),
    "another direction": lambda base: run(9, shared=lambda k: 1.0 if k < FIRST_ACTING else 0.0),
}


def allowed(base=BASE, shared=falls, twins=1):
    return tolerance(base, [base], [run(seed, shared) for seed in range(1, 1 + twins)], 2.0**-24)


def test_these_series_come_apart_as_tabnet_does():
    """All updates may point anywhere, as the tolerance looks ahead."""
    assert min(allowed().turn[FIRST_ACTING:]) >= SEPARATED and allowed().apart.by == 5
    assert LEAST_ALIKE < allowed().apart.alike < 0.7 and len(allowed().apart.parts) > 40


@pytest.mark.parametrize("twins", [1, 3])
@pytest.mark.parametrize("kind", CORRUPTED)
def test_what_is_another_training_does_not_verify(kind, twins):
    """Seen on TabNet: any loss of the baseline's range and any direction was allowed in every update, and gradients with the wrong sign passed."""
    verdict = compare(BASE, CORRUPTED[kind](BASE), allowed(twins=twins))
    assert verdict.passed is False, verdict.reason


@pytest.mark.parametrize(("third", "passed"), [(2, True), (3, False)])
def test_a_candidate_may_be_a_third_of_the_run_ahead_of_the_twin(third, passed):
    """It rounds in every update, and the twin was perturbed once."""
    def apart_from(third):
        begins = FIRST_ACTING + 1 + (third - 1) * ((N - FIRST_ACTING) // 3)
        return replace(run(1), losses=[[loss + 0.1 * (-1) ** k * (k >= begins)] for k, (loss,) in enumerate(BASE.losses)])

    verdict = compare(BASE, apart_from(1), tolerance(BASE, [BASE], [apart_from(third)], 2.0**-24))
    assert verdict.passed is passed, verdict.reason


def test_a_tensor_that_goes_its_own_way_in_a_twin_may_go_it_in_a_candidate():
    limits = tolerance(BASE, [BASE], [made(one_tensor_ascends, base=run(1))], 2.0**-24)
    verdict = compare(BASE, made(one_tensor_ascends), limits)
    assert verdict.passed, verdict.reason


@pytest.mark.parametrize("seed", range(20))
def test_honest_runs_verify_with_any_twin(seed):
    assert compare(BASE, BASE, allowed()).passed
    other = tolerance(BASE, [BASE], [run(100 + seed)], 2.0**-24)
    for candidate in (run(200 + seed), run(300 + seed, shared=lambda k: falls(k + 1))):        # one that rounds in every update is ahead
        verdict = compare(BASE, candidate, other)
        assert verdict.passed, verdict.reason


@pytest.mark.parametrize("kind", ["honest", *CORRUPTED])
def test_where_twins_keep_no_direction_nothing_is_told(kind):
    base = run(0, at_once)
    candidate = run(2, at_once) if kind == "honest" else CORRUPTED[kind](base)
    verdict = compare(base, candidate, allowed(base, at_once))
    assert not verdict.passed
    if kind in ("honest", "ascent", "random signs"):
        assert verdict.passed is None and "amplifies one rounding until, by update 5, its updates may point anywhere" in verdict.reason
        assert not verdict.nearly, "no other twin helps"


def test_few_entries_have_a_direction_by_chance():
    few = [replace(series, samples=[row[:16] for row in series.samples], segments=[16]) for series in (BASE, run(1), run(2))]
    limits = tolerance(few[0], [], [few[1]], 2.0**-24)
    assert limits.apart.least >= 1 and compare(few[0], few[2], limits).passed is None


def test_the_first_acting_update_is_computed_from_the_baselines_parameters():
    """Nothing can have come apart before it, and so its loss is held to what a rounding makes of the next few."""
    limits = allowed()
    assert max(limits.loss[:FIRST_ACTING + 1]) < 0.5 < min(limits.loss[FIRST_ACTING + 1:])
    wrong = replace(BASE, losses=[*BASE.losses[:FIRST_ACTING], [1.7], *BASE.losses[FIRST_ACTING + 1:]])
    assert f"in update {FIRST_ACTING}, " in compare(BASE, wrong, limits).reason


@pytest.mark.parametrize("together", [LEAST_UPDATES, 30, N])
def test_a_training_that_stays_together_long_enough_is_judged_by_its_updates(together):
    """With the look ahead of the tolerance, that takes half as many again, and two."""
    since = together * 3 // 2 + 6

    def shared(k):
        return falls(k - since + 4) if k > since else 1.0
    base = run(0, shared)
    limits = allowed(base, shared)
    assert limits.apart is None and sum(turn < SEPARATED for turn in limits.turn[FIRST_ACTING:]) >= min(together, N - FIRST_ACTING)
    assert compare(base, run(2, shared), limits).passed
    assert not compare(base, made(ascent, base=base), limits).passed
