"""Is the candidate still the same training?"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from itertools import takewhile

from saturate.records.result import NumericsCurve
from saturate.verify import settings
from saturate.verify.apart import lacks, untold
from saturate.verify.broken import broken, opposed
from saturate.verify.deviation import FIRST_ACTING, METRICS, Deviation, deviation
from saturate.verify.series import Series
from saturate.verify.tolerance import SEPARATED, Tolerance

#: Up to this many times what is allowed is not far. What a kink makes of rounding begins small; other random numbers, another
#: learning rate or gradients that are summed are a hundred times outside in the update where they begin.
NEAR = 10.0


@dataclass(frozen=True)
class Verdict:
    """`passed` None: nothing can be told. `reason` says why it did not pass, or how close it came. The caller fills in the subject of the
    `curves`. `nearly`: it did not pass, but where it left the tolerance first it was not far outside, or its optimizers were set to something
    else, which may follow the loss; with more twins it might be inside."""

    passed: bool | None
    reason: str
    curves: list[NumericsCurve] = field(default_factory=list)
    nearly: bool = False


def bitwise(baseline: Series, candidate: Series) -> bool:
    """Whether every loss, gradient norm and sample of parameters and buffers is identical (class `exact`); nan equals nan, and what is
    nan of the baseline's buffers is not compared (see `repeated`)."""

    def same(a: float, b: float) -> bool:
        return a == b or (a != a and b != b)

    def equal(left: list, right: list) -> bool:
        return len(left) == len(right) and all(
            len(a) == len(b) and all(map(same, a, b)) for a, b in zip(left, right))

    def buffers_equal() -> bool:
        ours, theirs = baseline.statistics_segments, candidate.statistics_segments
        if not ours or not theirs:
            return True             # of a study that was begun before buffers were recorded, one run has none
        if ours != theirs and sorted(ours) == sorted(theirs):
            return True             # two wrappers of one model stand in no order of their own: nothing can be compared
        return ours == theirs and all(a != a or a == b for left, right in zip(baseline.statistics, candidate.statistics)
                                      for a, b in zip(left, right))

    return (equal(baseline.losses, candidate.losses) and equal([baseline.grad_norms], [candidate.grad_norms])
            and equal(baseline.samples, candidate.samples) and buffers_equal())


def _other_training(baseline: Series, candidate: Series) -> str | None:
    """A difference that no tolerance covers: another program, other data, other parameters, a run that broke off."""
    if baseline.motif and candidate.motif and baseline.motif != candidate.motif:
        return f"the step changed: {candidate.motif!r} instead of {baseline.motif!r}"
    if len(candidate) < len(baseline) - 1:      # one record may be cut short when a run is ended
        return f"it stopped after {len(candidate)} of {len(baseline)} updates"
    for k, (expected, found) in enumerate(zip(baseline.losses, candidate.losses)):
        if len(expected) != len(found) and not baseline.searches:
            return f"update {k} has {len(found)} micro-steps instead of {len(expected)}"
    for k, (expected, found) in enumerate(zip(baseline.digests, candidate.digests)):
        if expected and found and expected != found:
            return f"update {k} was computed from other data"
    for k, (expected, found) in enumerate(zip(baseline.samples, candidate.samples)):
        if len(expected) != len(found):
            return f"update {k} has {len(found)} sampled parameters instead of {len(expected)}"
    return None


def _set_otherwise(baseline: Series, candidate: Series, settled: int) -> str | None:
    """What optimizers are set to otherwise in the first so many updates."""
    for k, (ours, theirs) in enumerate(zip(baseline.settings[:settled], candidate.settings)):
        for name, expected, found in settings.otherwise(ours, theirs):
            return f"{name} is {found} in update {k} instead of {expected}: what the optimizer is set to is not what the script sets"
    return None


def _percent(log_ratio: float) -> str:
    """Two digits that count, for ratios near one and far from it."""
    return f"{100 * math.expm1(log_ratio):.3g} %"


def _excess(found: Deviation, allowed: Tolerance, k: int) -> tuple[str, float] | None:
    """The first metric of update k outside its tolerance, in words and as a multiple of what is allowed."""
    for metric, values, limits in zip(METRICS, found.series(), allowed.series()):
        value, limit = values[k], limits[k]
        if math.isnan(value) or value <= limit:
            continue
        if metric == "update cosine":
            reason = (f"update cosine is {1 - value * value / 2:.4f} in update {k}: it points {value:.2g} rad elsewhere, "
                      f"{limit:.2g} rad allowed")
        elif metric == "running statistics":
            reason = (f"running statistics of a module go elsewhere: {value:.0%} of their way off in update {k}, {limit:.0%} allowed "
                      "(evaluation would use them)")
        elif metric == "loss":
            reason = f"loss deviates by {value:.3g} in update {k}, {limit:.3g} allowed"
        else:
            reason = f"{metric} deviates by {_percent(value)} in update {k}, {_percent(limit)} allowed"
        return reason, value / limit if limit else math.inf
    return None


def _closest(found: Deviation, allowed: Tolerance) -> str:
    """How much of its tolerance the worst metric used."""
    used = [(value / limit, metric, k)
            for metric, values, limits in zip(METRICS, found.series(), allowed.series())
            for k, (value, limit) in enumerate(zip(values, limits)) if not math.isnan(value) and 0 < limit < math.inf]
    if not used:
        return "nothing deviates"
    share, metric, k = max(used)
    closest = f"{metric} in update {k}, {share:.0%} of what is allowed"
    return f"within tolerance for {len(found.loss)} updates; closest: {closest}"


def _curves(
    baseline: Series, candidate: Series, found: Deviation, allowed: Tolerance, reason: str, failed: str
) -> list[NumericsCurve]:
    """Plots of loss, gradient norm and update cosine, each up to its first value that is not finite."""
    n = len(found.loss)
    cosine = [math.nan if math.isnan(turn) else max(-1.0, 1 - turn * turn / 2) for turn in found.turn]
    columns = {
        "loss": ([baseline.loss(k) for k in range(n)], [candidate.loss(k) for k in range(n)], allowed.loss),
        "gradient norm": (baseline.grad_norms, candidate.grad_norms,
                          [b * math.expm1(limit) for b, limit in zip(baseline.grad_norms, allowed.gradient)]),
        "update cosine": ([1.0] * (n - 1), cosine[1:], allowed.least_cosine[1:]),
    }
    curves = []
    for metric, triple in columns.items():
        rows = list(takewhile(lambda row: all(map(math.isfinite, row)), zip(*triple)))
        base, other, limits = [list(column) for column in zip(*rows)] or ([], [], [])
        curves.append(NumericsCurve(
            subject="", metric=metric, baseline=base, candidate=other, tolerance=limits,
            passed=metric != failed, reason=reason if metric == failed else ""))
    return curves


def compare(baseline: Series, candidate: Series, tolerance: Tolerance) -> Verdict:
    """Whether `candidate` trains like `baseline` within `tolerance`, update by update.

    The reason names the first violated metric with its update, what was observed, and what is allowed. Ask
    `informative(baseline)` first: a baseline that shows nothing would let everything pass.
    """
    other = _other_training(baseline, candidate)
    if other is not None:
        return Verdict(False, other)
    otherwise = _set_otherwise(baseline, candidate, tolerance.settled)
    if otherwise is not None:
        return Verdict(False, otherwise, nearly=True)
    found = deviation(baseline, candidate)
    reason, times = None, math.inf
    for k in range(len(found.loss)):
        reason = next((text for what, text in broken(baseline, candidate, k) if what not in tolerance.excused[k]), None)
        if reason is None and (outside := _excess(found, tolerance, k)) is not None:
            reason, times = outside
        if reason is not None:
            break
    early = [k for k in range(FIRST_ACTING, len(found.loss)) if tolerance.turn[k] < SEPARATED]
    if reason is None and (part := opposed(baseline, candidate, early)) is not None:
        reason = f"tensor {part} goes the other way than in the baseline, in most updates"
    if reason is None and found.slowest > tolerance.slowest:
        reason, times = f"a tensor travels only {math.exp(-found.slowest):.1%} of its way in the baseline", found.slowest / tolerance.slowest
    if reason is None and abs(found.moves) > tolerance.moves:
        reason, times = (f"{math.exp(found.moves):.3g} times as many entries move as in the baseline, where an update moves only a few; "
                         f"{math.exp(tolerance.moves):.3g} times as many or as few allowed"), abs(found.moves) / tolerance.moves
    unknown = None
    if reason is None and tolerance.apart is not None:
        unknown = untold(tolerance.apart)
        if unknown is None and (lack := lacks(baseline, candidate, found, tolerance.apart)) is not None:
            reason, times = lack
    failed = next((metric for metric in METRICS if reason and reason.startswith(metric)), "")
    curves = _curves(baseline, candidate, found, tolerance, reason or "", failed)
    if unknown is not None:
        return Verdict(None, unknown, curves)
    return Verdict(reason is None, reason or _closest(found, tolerance), curves, reason is not None and times <= NEAR)
