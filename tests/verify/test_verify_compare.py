"""Verdicts on made-up series: what each check sees, without any training."""

from __future__ import annotations

import itertools
import math
import random
from array import array
from dataclasses import replace

import pytest

from saturate.verify.compare import bitwise, compare
from saturate.verify.deviation import deviation
from saturate.verify.series import Series
from saturate.verify.tolerance import SEPARATED, informative, repeated, tolerance, unrepeatable

N, SEGMENTS = 60, [4, 8, 8]


def made(seed=0, *, jitter=0.0, tamper=None):
    """A falling loss, and 20 parameters in three tensors that walk; `jitter` is relative noise on everything."""
    path, noise = random.Random(0), random.Random(seed)

    def near(value):
        return value * (1 + jitter * noise.uniform(-1, 1))

    position = [path.uniform(0.5, 1) for _ in range(sum(SEGMENTS))]
    losses, norms, samples = [], [], []
    for k in range(N):
        step = [near(0.01 * path.gauss(0, 1)) for _ in position]
        if tamper:
            step = tamper(k, step)
        position = [p + s for p, s in zip(position, step)]
        losses.append([near(2.0 * 0.98**k + 0.1 * path.random()), near(2.0 * 0.98**k)])
        norms.append(near(1 + path.random()))
        samples.append(array("d", position))
    return Series(losses, norms, samples, "F B F B S", [f"batch {k}" for k in range(N)], SEGMENTS)


BASE = made()
TIGHT = tolerance(BASE)


def changed(column, k, value):
    """BASE with one entry of one column replaced."""
    entries = list(getattr(BASE, column))
    entries[k] = value
    return replace(BASE, **{column: entries})


def test_the_same_series_passes_and_is_bitwise_equal():
    assert compare(BASE, made(), TIGHT).passed and bitwise(BASE, made())
    assert informative(BASE) is None


def test_lbfgs_may_stop_its_search_one_evaluation_earlier():
    """Its tolerance is met or missed by the last bits; Lightning's one evaluation per step is no search."""
    search = replace(BASE, motif="S0")
    fewer = replace(search, losses=[*BASE.losses[:5], BASE.losses[5][:1], *BASE.losses[6:]])
    wide = tolerance(BASE, twins=[made(1, jitter=0.3), made(2, jitter=0.3)], rounding=0.01)
    assert compare(search, fewer, wide).passed
    single = replace(search, losses=[losses[:1] for losses in BASE.losses])
    twice = replace(search, losses=[*single.losses[:5], BASE.losses[5], *single.losses[6:]])
    assert "micro-steps" in compare(single, twice, wide).reason


@pytest.mark.parametrize("candidate, reason", [
    (changed("losses", 40, [math.nan, 1.0]), "loss is nan in update 40"),
    (changed("losses", 40, [1.0, math.inf]), "loss is inf in update 40"),
    (changed("grad_norms", 7, math.nan), "gradient norm is nan in update 7"),
    (changed("grad_norms", 7, 0.0), "gradient norm deviates by inf % in update 7"),
    (changed("samples", 9, array("d", [math.nan] * 20)), "parameters are not finite after update 9"),
    (changed("samples", 9, array("d", [0.0] * 19)), "update 9 has 19 sampled parameters instead of 20"),
    (changed("samples", 9, BASE.samples[8]), "update 9 is missing"),
    (changed("losses", 5, [1.0]), "update 5 has 1 micro-steps instead of 2"),
    (changed("digests", 3, "another batch"), "update 3 was computed from other data"),
    (replace(BASE, motif="F B S"), "the step changed"),
    (replace(BASE, losses=BASE.losses[:50], grad_norms=BASE.grad_norms[:50], samples=BASE.samples[:50]),
     "it stopped after 50 of 60 updates")])
def test_what_no_tolerance_covers(candidate, reason):
    wide = tolerance(BASE, twins=[made(1, jitter=0.3), made(2, jitter=0.3)], rounding=0.01)
    verdict = compare(BASE, candidate, wide)
    assert not verdict.passed and verdict.reason.startswith(reason)
    assert not bitwise(BASE, candidate) or "step changed" in reason or "other data" in reason
    for curve in verdict.curves:
        for column in (curve.baseline, curve.candidate, curve.tolerance):
            assert all(map(math.isfinite, column))


def test_a_tolerance_grows_with_what_the_twins_show():
    twins = [made(seed, jitter=1e-3) for seed in (1, 2)]
    allowed = tolerance(BASE, twins=twins)
    assert compare(BASE, made(9, jitter=1e-3), allowed).passed
    assert not compare(BASE, made(9, jitter=1e-3), TIGHT).passed
    assert not compare(BASE, made(9, jitter=0.05), allowed).passed
    # the same knowledge may come from A/A runs
    assert compare(BASE, made(9, jitter=1e-3), tolerance(BASE, aa=twins)).passed


def louder(by):
    return replace(BASE, losses=[[loss + by for loss in losses] for losses in BASE.losses])


def test_four_times_what_a_repetition_deviates_is_allowed_and_ten_times_that_is_not_near():
    allowed = tolerance(BASE, aa=[louder(1e-3)])
    assert compare(BASE, louder(3.9e-3), allowed).passed
    for off, nearly in ((4.1e-3, True), (39e-3, True), (41e-3, False)):
        verdict = compare(BASE, louder(off), allowed)
        assert not verdict.passed and verdict.nearly is nearly
    run = grown(1e-5, 1e-5, 1e-5)
    assert tolerance(BASE, aa=[run]).drift[-1] == pytest.approx(12 * deviation(BASE, run).drift[-1]), "what adds up over a run gets more"
    assert TIGHT.gradient[50] / TIGHT.gradient[2] == pytest.approx(7), "a floor grows as independent errors do: by the root of 49 updates"


@pytest.mark.parametrize(("lost", "passed"), [(1, True), (2, False)])
def test_of_a_run_that_was_ended_one_record_may_be_cut_short(lost, passed):
    cut = replace(BASE, losses=BASE.losses[:-lost], grad_norms=BASE.grad_norms[:-lost], samples=BASE.samples[:-lost], digests=BASE.digests[:-lost])
    assert compare(BASE, cut, TIGHT).passed is passed


def test_a_jump_from_the_perturbation_itself_does_not_widen_the_tolerance():
    def jump(k, step):
        return [s + 5.0 for s in step] if k == 2 else step
    allowed = tolerance(BASE, twins=[made(tamper=jump)])
    assert max(allowed.turn[:5]) < 0.02
    assert not compare(BASE, made(tamper=jump), allowed).passed


@pytest.mark.parametrize("factor", [0.9, 1.1])
def test_longer_or_shorter_updates_are_seen(factor):
    verdict = compare(BASE, made(tamper=lambda k, step: [factor * s for s in step] if k >= 2 else step), TIGHT)
    assert verdict.reason.startswith("update norm deviates by 1") and "in update 2" in verdict.reason


def test_updates_of_the_right_length_in_another_direction_are_seen():
    def turned(k, step):
        return [-s if i % 2 and k >= 2 else s for i, s in enumerate(step)]
    verdict = compare(BASE, made(tamper=turned), TIGHT)
    assert verdict.reason.startswith("update cosine is ") and "in update 2: it points" in verdict.reason
    assert verdict.reason.endswith("0.005 rad allowed")
    assert [curve.metric for curve in verdict.curves if not curve.passed] == ["update cosine"]


def test_a_tensor_that_lags_behind_is_seen():
    def slow(k, step):
        return [0.3 * s for s in step[:4]] + step[4:] if k >= 2 else step
    verdict = compare(BASE, made(tamper=slow), TIGHT)
    assert verdict.reason == "a tensor travels only 30.0% of its way in the baseline"


def test_a_tensor_that_stands_still_is_seen_in_its_update():
    def frozen(k, step):
        return [0.0] * 4 + step[4:] if k == 33 else step
    assert compare(BASE, made(tamper=frozen), TIGHT).reason.startswith("tensor 0 did not move in update 33")


def test_noise_in_one_tensor_of_three_is_left_to_the_other_two():
    rng = random.Random(5)

    def noisy(k, step):
        return [rng.gauss(0, 0.01) for _ in range(4)] + step[4:] if k >= 2 else step
    verdict = compare(BASE, made(tamper=noisy), TIGHT)
    assert verdict.passed


def test_a_gradient_norm_that_was_never_measured_is_not_compared():
    blind = replace(BASE, grad_norms=[math.nan] * N)
    verdict = compare(blind, replace(BASE, grad_norms=[5.0] * N), tolerance(blind))
    assert verdict.passed and informative(blind) is None


@pytest.mark.parametrize("baseline, reason", [
    (replace(BASE, losses=[[] for _ in range(N)]), "no loss was seen"),
    (replace(BASE, losses=[[0.0, 0.0]] * N), "the loss is zero"),
    (replace(BASE, losses=[[0.7, 0.7]] * N), "the same in every update (0.7)"),
    (changed("losses", 3, [math.nan, 1.0]), "not finite (update 3)"),
    (changed("samples", N - 1, array("d", [math.inf] * 20)), "parameters are not finite"),
    (replace(BASE, grad_norms=[0.0] * N), "all gradients are zero"),
    (replace(BASE, samples=[BASE.samples[0]] * N), "move in only 0 of 58"),
    (replace(BASE, samples=[BASE.samples[min(k, 11)] for k in range(N)]), "moves in only 10 of 58"),
    (replace(BASE, samples=[BASE.samples[min(k, 11)] for k in range(N)], losses=[BASE.losses[min(k, 12)] for k in range(N)]),
     "converged after update 11"),
    (replace(BASE, samples=[BASE.samples[min(k, 11)] for k in range(N)], grad_norms=[BASE.grad_norms[min(k, 11)] for k in range(N)]),
     "goes on with another model after update 11"),
    (replace(BASE, samples=[array("d")] * N), "no parameters were sampled")])
def test_a_baseline_that_proves_nothing_is_refused(baseline, reason):
    assert reason in informative(baseline)


def test_a_baseline_repeats_itself_but_for_rounding():
    assert unrepeatable(BASE, BASE) is None
    assert unrepeatable(BASE, made(jitter=2.0**-9)) is None
    late = replace(BASE, losses=[*BASE.losses[:5], *[[9.0, 9.0]] * (N - 5)], digests=[*BASE.digests[:5], *["other"] * (N - 5)])
    assert unrepeatable(BASE, late) is None, "what is amplified later is what a tolerance is for"


@pytest.mark.parametrize("repetition, reason", [
    (changed("digests", 1, "another batch"), "had other data in update 1"),
    (replace(BASE, samples=[row[:-1] for row in BASE.samples]), "had trained other tensors"),
    (changed("losses", 0, [2.2, 2.2]), "its first updates are others"),
    (changed("losses", 1, [2.2, 2.2]), "its first updates are others"),
    (changed("grad_norms", 0, 1.05 * BASE.grad_norms[0]), "its first updates are others"),
    (changed("samples", 0, array("d", [0.3] * sum(SEGMENTS))), "its first updates are others"),
    (changed("samples", 1, array("d", [2 * a - b for a, b in zip(BASE.samples[0], BASE.samples[1])])), "its first updates are others")])
def test_a_baseline_that_is_another_training_each_time_is_refused(repetition, reason):
    assert reason in unrepeatable(BASE, repetition)


def test_a_search_amplifies_within_its_first_step():
    """LBFGS evaluates its closure as often as the last bits say: only the start of its first step is its own."""
    search = replace(BASE, motif="S0")
    other = replace(changed("losses", 1, [2.2, 2.2]), motif="S0", grad_norms=[2 * norm for norm in BASE.grad_norms])
    assert unrepeatable(search, other) is None
    assert "its first updates are others" in unrepeatable(search, replace(changed("losses", 0, [2.2, 2.2]), motif="S0"))


def test_an_update_of_the_baseline_that_is_not_finite_or_does_not_move_is_skipped():
    """A loss scaler skips its first updates: the baseline gives nothing to hold these against."""
    odd = replace(changed("grad_norms", 5, math.inf), samples=[*BASE.samples[:5], BASE.samples[4], *BASE.samples[6:]])
    found = deviation(odd, BASE)
    assert math.isnan(found.gradient[5]) and math.isnan(found.turn[5])
    assert informative(odd) is None


def test_bitwise_knows_nan_and_length():
    odd = changed("grad_norms", 5, math.nan)
    assert bitwise(odd, changed("grad_norms", 5, math.nan))
    assert not bitwise(BASE, changed("losses", 59, [0.0, 0.0]))
    assert not bitwise(BASE, replace(BASE, losses=BASE.losses[:-1]))


def grown(*factors: float) -> Series:
    """BASE, whose three tensors are longer by these factors from update 2 on, more so in each."""
    samples = []
    for k, sample in enumerate(BASE.samples):
        changed_ = array("d", sample)
        for (begin, end), factor in zip(BASE.parts(), factors):
            for place in range(begin, end):
                changed_[place] *= 1 + factor * max(0, k - 1)
        samples.append(changed_)
    return replace(BASE, samples=samples)


def test_a_drift_is_what_tensors_agree_on():
    """Half of a convolutional net's tensors drift by 1e-4 in either direction once a ReLU flips, half not at all: their median
    jumps between the two. A lost weight decay lengthens all of them."""
    together = deviation(BASE, grown(1e-5, 1.1e-5, 0.9e-5)).drift
    assert together[-1] == pytest.approx(1e-5 * (N - 2), rel=0.1) and together[2:] == sorted(together[2:])
    assert deviation(BASE, grown(-1e-5, -1.1e-5, -0.9e-5)).drift[2:] == pytest.approx(together[2:], rel=0.01)
    for factors in ((1e-4, -1e-5, 1e-9), (1e-4, -1e-4, 1e-4), (-1e-4, 0.0, 0.0)):
        assert max(deviation(BASE, grown(*factors)).drift[2:]) < 1e-6, factors
    verdict = compare(BASE, grown(1e-5, 1e-5, 1e-5), TIGHT)
    assert not verdict.passed and verdict.nearly and "parameter drift" in verdict.reason


@pytest.mark.parametrize(("relative", "absolute", "passes"), [(0.0, 0.004, True), (0.1, 0.0, False)])
def test_a_short_update_is_held_to_what_cancels_in_it(relative, absolute, passes):
    """Seen: momentum turned round, one update was a fourth as long as those around it, and a bf16 twin did not show it. Errors
    are as large as ever there; a learning rate that is wrong by a tenth shows in all the other updates."""
    def run(error):
        lengths = [0.002 if k == 40 else 0.1 for k in range(N)]
        positions = itertools.accumulate(length * (1 + relative * bool(error)) + absolute * 0.05 * (error if k == 40 else 0)
                                         for k, length in enumerate(lengths))
        return Series([[1.0 / (k + 1)] for k in range(N)], [1.0] * N, [array("d", [position]) for position in positions])

    baseline = run(0)
    assert compare(baseline, run(1), tolerance(baseline, rounding=2.0**-9)).passed == passes


def with_statistics(base=BASE, *, momentum=0.1, times=1, near=lambda value: value, finite=True, acting=2, clock=None):
    """`base` with three buffers, as of a normalisation: one follows what it sees, which is elsewhere after twenty updates, another is
    constant; the third is what `clock` says."""
    seen, rows, mean = random.Random(3), [], [0.0] * 3
    for k in range(N):
        batch = [near((2.0 if k < 20 else 6.0) + seen.gauss(0, 0.2)) for _ in mean]
        for _ in range(times if k >= acting else 1):
            share = momentum if k >= acting else 0.1
            mean = [(1 - share) * m + share * b for m, b in zip(mean, batch)]
        rows.append(array("d", [*mean, 1.0, 7.0, clock() if clock else 0.0] if finite or k < 30 else [math.nan] * 6))
    return replace(base, statistics=rows, statistics_segments=[3, 2, 1])


@pytest.mark.parametrize(("changes", "reason"), [
    ({"momentum": 0.0}, "running statistics of a module go elsewhere: 100% of their way off in update 2, 50% allowed"),
    ({"times": 2}, "running statistics of a module go elsewhere: 90% of their way off in update 2, 50% allowed"),
    ({"near": lambda value: 3 * value}, "running statistics of a module go elsewhere"),
    ({"momentum": 0.0, "acting": 4}, "running statistics of a module go elsewhere: 100% of their way off in update 11, 50% allowed"),
    ({"momentum": 0.0, "acting": 12}, "running statistics of a module go elsewhere: 100% of their way off in update 20, 50% allowed"),
    ({"times": 2, "acting": 18}, "running statistics of a module go elsewhere: 86% of their way off in update 20, 50% allowed"),
    ({"finite": False}, "running statistics of a module are not finite, or of another size, after update 30")], ids=[
    "frozen", "twice", "scaled", "frozen in a window", "frozen later", "twice later", "nan"])
def test_running_statistics_that_the_training_loss_does_not_show_are_compared(changes, reason):
    """Of a normalisation they are read in evaluation only: losses, gradients and updates were bit-identical with other ones."""
    base, other = with_statistics(), with_statistics(**changes)
    wide = tolerance(base, twins=[replace(with_statistics(made(1, jitter=0.3)), statistics=base.statistics)], rounding=0.01)
    assert not bitwise(base, other)
    verdict = compare(base, other, wide)
    assert not verdict.passed and verdict.reason.startswith(reason)
    for left, right in ((base, other), (base, BASE), (BASE, base)):
        deviation(left, right)


def test_running_statistics_that_only_round_otherwise_pass():
    noise = random.Random(1)
    base, other = with_statistics(), with_statistics(near=lambda value: value * (1 + noise.uniform(-1, 1) * 2**-8))
    assert bitwise(base, with_statistics()) and not bitwise(base, other)
    assert compare(base, other, tolerance(base)).passed


def test_buffers_that_the_baseline_itself_does_not_repeat_are_not_compared():
    """A clock says nothing, neither where it refuses a candidate nor where it would allow one anything."""
    base, again, other = (with_statistics(clock=random.Random(seed).random) for seed in range(3))
    frozen = with_statistics(momentum=0.0, clock=random.Random(4).random)
    assert not bitwise(base, again) and not compare(base, other, tolerance(base)).passed
    told = repeated(base, again)
    assert bitwise(told, other) and compare(told, other, tolerance(told, aa=[again])).passed
    assert not bitwise(told, frozen) and not compare(told, frozen, tolerance(told, aa=[again])).passed
    assert repeated(told, again) is told and repeated(base, BASE) is base
    noisy = replace(with_statistics(near=lambda value: 1.001 * value), losses=[[2.0]] * N)
    assert repeated(base, noisy) is base            # sums in another order, from the first update on: that is what a tolerance is for
    rounded = with_statistics(near=lambda value: value * (1 + 2**-24), clock=random.Random(5).random)
    assert sum(map(math.isnan, repeated(base, rounded).statistics[-1])) == 1        # the clock, not what is a bit otherwise
    half = replace(told, statistics=[[math.nan, *row[1:]] for row in told.statistics])
    assert not compare(half, frozen, tolerance(half)).passed                        # the rest of that buffer is compared
    turned = replace(base, statistics=[[*row[3:], *row[:3]] for row in base.statistics], statistics_segments=[2, 1, 3])
    assert bitwise(base, turned)
    shrunk = replace(base, statistics=[row[:5] for row in base.statistics], statistics_segments=[3, 2])
    assert not bitwise(base, shrunk)


def apart(seed, *, noise=0.2, gradients=1.0):
    """Four tensors of 64 entries, whose updates have a direction and, in each run, noise of its own from update 1 on."""
    path, own = random.Random(0), random.Random(seed)
    position, rows = [path.uniform(0.5, 1) for _ in range(256)], []
    for k in range(N):
        step = [path.gauss(0, 1) for _ in position]
        position = [p + 0.01 * (d + (noise * own.gauss(0, 1) if k else 0.0)) for p, d in zip(position, step)]
        rows.append(array("d", position))
    norms = [(1 + 0.98**k) * (1 + 0.1 * noise * own.uniform(-1, 1)) * (gradients if k >= 2 else 1.0) for k in range(N)]
    return Series([[2.0 * 0.98**k] for k in range(N)], norms, rows, segments=[64] * 4)


def test_a_tensor_of_four_that_goes_the_other_way_is_seen():
    """The medians over tensors, and what three quarters of them do, say nothing of it."""
    base = apart(0, noise=0.0)
    turned = [array("d", [*[2 * start - now for start, now in zip(base.samples[1], row[:64])], *row[64:]]) if k > 1 else row
              for k, row in enumerate(base.samples)]
    noise, lost = random.Random(9), [row for row in base.samples[:2]]
    for k in range(2, N):
        lost.append(array("d", [*[p + 0.01 * noise.gauss(0, 1) for p in lost[-1][:64]], *base.samples[k][64:]]))
    allowed = tolerance(base, twins=[apart(1, noise=1e-3)])
    assert compare(base, replace(base, samples=turned), allowed).reason == "tensor 0 goes the other way than in the baseline, in most updates"
    assert compare(base, replace(base, samples=lost), allowed).passed, "noise that has no effect, as of the key bias of attention"


@pytest.mark.parametrize("factor", [0.25, 50.0])
@pytest.mark.parametrize("repeats", [True, False])
def test_wrong_gradients_show_where_a_training_separates_at_once(factor, repeats):
    """Adam hides their size from the updates. Once these may point anywhere, gradients a hundred times too large were allowed."""
    base, again = apart(1), apart(1 if repeats else 2)
    allowed = tolerance(base, aa=[again], twins=[apart(3)])
    assert min(allowed.turn[2:]) >= SEPARATED and not compare(base, apart(4, gradients=factor), allowed).passed
    assert compare(base, apart(4), allowed).passed
    assert (unrepeatable(base, again) is None) is repeats, "nothing is compared where it does not repeat its own first updates"


def odd(seed, kind):
    """A run of BASE's data that differs from it in one way or another."""
    draw, run = random.Random(seed), made(seed, jitter=10 ** random.Random(seed).uniform(-6, -0.5))
    wrong = {"zero": 0.0, "nan": math.nan, "inf": math.inf}.get(kind)
    if wrong is not None:
        run = replace(run, grad_norms=[wrong if draw.random() < 0.2 else norm for norm in run.grad_norms])
    if kind in ("nan", "inf"):
        run = replace(run, losses=[[loss, wrong] if draw.random() < 0.1 else [loss, loss] for loss, _ in run.losses],
                      samples=[array("d", [wrong] * 20) if draw.random() < 0.05 or k == N - 1 else row for k, row in enumerate(run.samples)])
    if kind == "still":
        begin = draw.randrange(N - 10)
        run = replace(run, samples=[array("d", [*run.samples[min(k, begin)][:4], *row[4:]]) for k, row in enumerate(run.samples)])
        run = replace(run, samples=[run.samples[k - (k % 7 == 3)] for k in range(N)])
    if kind == "elsewhere":
        run = made(seed, tamper=lambda k, step: [draw.choice([-3.0, 0.1, 1.0]) * s for s in step])
    return run


@pytest.mark.parametrize("kind", ["near", "zero", "nan", "inf", "still", "elsewhere"])
@pytest.mark.parametrize("seed", range(8))
def test_a_tolerance_allows_the_runs_that_it_comes_from(seed, kind):
    base, run = BASE, odd(seed, kind)
    if seed % 2:
        draw = random.Random(100 + seed)
        base = replace(base, grad_norms=[draw.choice([0.0, 0.05, 1.0, 1.5]) for _ in range(N)])
    verdict = compare(base, run, tolerance(base, [run, made(50 + seed, jitter=1e-5)]))
    told = kind not in ("still", "elsewhere")       # a run that keeps little of its direction tells nothing, in 20 entries
    assert verdict.passed or verdict.passed is None and not told, verdict.reason
    others = tolerance(base, [made(50 + seed, jitter=1e-5)])
    assert kind in ("near", "zero") or not compare(base, run, others).passed


def test_a_gradient_that_is_nearly_nothing_is_compared_with_the_others():
    """Of a hinge loss whose samples are learnt but for a few, an update may have no gradient in one of two honest runs: "gradient norm
    deviates by inf %", and the perturbed baseline itself was outside of what it allowed."""
    base = changed("grad_norms", 20, 0.02)
    solved, one_more = (changed("grad_norms", 20, value) for value in (0.0, 0.06))
    allowed = tolerance(base, twins=[solved])
    assert compare(base, solved, allowed).passed and compare(base, one_more, allowed).passed
    assert not compare(base, changed("grad_norms", 20, 0.4), allowed).passed, "far more than nothing"
    vanished = changed("grad_norms", 21, 0.0)
    assert "deviates by inf % in update 21" in compare(BASE, vanished, TIGHT).reason
    assert compare(BASE, vanished, tolerance(BASE, twins=[vanished])).passed, "in the perturbed baseline it vanishes as well"
    assert not compare(BASE, changed("grad_norms", 22, 0.0), tolerance(BASE, twins=[vanished])).passed, "in that update only"


def test_a_loss_that_is_zero_at_first_and_mostly_has_no_tolerance_to_divide_by():
    """A study ended with "saturate itself failed": division by zero."""
    zero = replace(BASE, losses=[[0.0] if k < N - 6 else losses for k, losses in enumerate(BASE.losses)])
    verdict = compare(zero, zero, tolerance(zero, [zero]))
    assert verdict.passed and "within tolerance" in verdict.reason


def scheduled(rates, decay=0.01, momentum=None, betas=(0.9, 0.999)):
    """BASE, with what its optimizer is set to for each of its three tensors."""
    return replace(BASE, settings=[[(("lr", rate), ("weight_decay", decay), ("momentum", momentum), ("betas", betas))] * len(SEGMENTS)
                                   for rate in rates])


FALLING = [1e-4 * (1 - k / 5000) for k in range(N)]


@pytest.mark.parametrize(("candidate", "reason"), [
    (scheduled([1e-4] * N), "lr is 0.0001 in update 1 instead of 9.998e-05"),
    (scheduled(FALLING, decay=0.0), "weight_decay is 0.0 in update 0 instead of 0.01"),
    (scheduled(FALLING, betas=(0.9, 0.99)), "betas is (0.9, 0.99) in update 0 instead of (0.9, 0.999)"),
    (scheduled(FALLING, betas=(0.9,)), "betas is (0.9,) in update 0"),
    (scheduled([rate * (1 + 1e-5) for rate in FALLING]), "lr is "),
    (scheduled([rate * (1 + 1e-7) for rate in FALLING]), ""),       # read from a tensor of 32 bits
    (replace(BASE, settings=[]), ""),                               # not recorded
    (replace(BASE, settings=[[None] * 3] * N), ""),                 # held by an optimizer that nobody knows
])
def test_a_lost_schedule_or_decay_is_seen_before_it_has_changed_anything(candidate, reason):
    """A rate that falls over thousands of updates has hardly moved when a verification run ends: its loss is no news there."""
    baseline = scheduled(FALLING)
    verdict = compare(baseline, candidate, tolerance(baseline, [scheduled(FALLING)]))
    assert verdict.passed is (reason == "") and verdict.reason.startswith(reason)


def test_a_rate_that_follows_the_loss_is_compared_while_the_baseline_repeats_it():
    """A plateau is left an update later where losses are rounded: the baseline's own repetition says from when on."""
    plateau, later = ([1e-3] * at + [1e-4] * (N - at) for at in (20, 24))
    baseline = scheduled(plateau)
    assert compare(baseline, scheduled(later), tolerance(baseline, [scheduled(later)])).passed
    assert not compare(baseline, scheduled([2e-3] * N), tolerance(baseline, [scheduled(later)])).passed


def test_a_rate_that_follows_the_loss_may_follow_it_sooner_than_in_the_twin():
    """A candidate rounds in each update, and leaves a plateau before the twin does: it was rejected for what "the script sets"."""
    baseline, twin, sooner, first = (scheduled([1e-3] * at + [1e-4] * (N - at)) for at in (24, 20, 16, 8))
    allowed = tolerance(baseline, [baseline], [twin])
    assert compare(baseline, sooner, allowed).passed
    found = compare(baseline, first, allowed)
    assert not found.passed and found.nearly, "more twins may tell"
