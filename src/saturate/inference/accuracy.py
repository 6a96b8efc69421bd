"""Is a candidate as accurate as the baseline, within a budget? The user's check gives scores; pairs of them are compared.

The check is asked for one value per sample. Baseline and candidate answer the same samples, so the samples' own
difficulty cancels: what counts is the drop of each, `baseline - candidate` (turned round where lower is better). The
mean drop is bounded from above and from below (`bounds`), each with the budget's confidence by itself:

    pass        the upper bound lies within the budget
    fail        the lower bound lies beyond it
    undecided   neither; `samples_needed` would let it pass, if the drops stayed as they are

A single number has no spread that anybody could know: it certifies nothing, except where every answer was identical.
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import fsum, isfinite
from typing import Any, ClassVar

from saturate.errors import UsageError
from saturate.inference import bounds
from saturate.records.inference import Verdict

#: More samples than anybody checks: "no number of samples helps".
MOST_SAMPLES = 10**9

#: Drops of 0.90 - 0.89 are not 0.01 in binary; a verdict must not hang on that.
ROUNDING = 1e-12

_SEED = 20261120


class UnusableScores(ValueError):
    """What a check returned cannot be compared; the message says why, `remedy` what to do."""

    def __init__(self, message: str, remedy: str = ""):
        super().__init__(message)
        self.remedy = remedy


@dataclass(frozen=True)
class Budget:
    """How much accuracy may be given up for speed, and how sure to be.

    max_drop: in units of the check's score (0.01 is one percentage point of an accuracy between 0 and 1), or a share of
    the baseline's score where `relative`. confidence: of the verdict, on one side; None asks for point estimates, which
    certify nothing. metric: which entry counts, where the check returns a dict of several.
    Raises `UsageError` for values that mean nothing.
    """

    max_drop: float
    relative: bool = False
    higher_is_better: bool = True
    confidence: float | None = 0.95
    metric: str | None = None

    #: For what `problem` says.
    REMEDY: ClassVar[str] = ("without relative=True, max_drop is in the unit of the scores: 0.01 is one percentage point "
                             "of scores between 0 and 1")

    def __post_init__(self) -> None:
        if not _is_number(self.max_drop) or not isfinite(self.max_drop) or self.max_drop < 0:
            raise UsageError(f"a budget's max_drop is a number of at least 0, not {self.max_drop!r}",
                             remedy="write 0.01 for a drop of one percentage point of an accuracy between 0 and 1")
        if self.relative and self.higher_is_better and self.max_drop >= 1:
            raise UsageError(f"a relative drop of {self.max_drop:g} allows a score of zero: everything would pass",
                             remedy="write 0.01 for one per cent of the baseline's score")
        if self.confidence is not None and not (_is_number(self.confidence) and 0.5 < self.confidence < 1):
            raise UsageError(f"a budget's confidence lies between 0.5 and 1, or is None; this is {self.confidence!r}",
                             remedy="write 0.95 for 95 %")
        if self.metric is not None and not isinstance(self.metric, str):
            raise UsageError(f"a budget's metric is a key of the dict that the check returns, not {self.metric!r}")

    @property
    def sign(self) -> int:
        """What turns `baseline - candidate` into a drop."""
        return 1 if self.higher_is_better else -1

    def problem(self, baseline: Scores) -> str | None:
        """Why no candidate can be judged by this budget, given the baseline's scores; None where all is well."""
        if self.relative and baseline.mean == 0:
            return "the baseline's score is 0, so a relative drop has no meaning"
        scale = None if baseline.values is None else bounds.two_valued(baseline.values)
        if scale is not None and not self.relative and self.max_drop >= scale:
            return f"a drop of {self.max_drop:g} allows anything: the scores lie between 0 and {scale:g}"
        return None


@dataclass(frozen=True)
class Scores:
    """What a check said about one candidate: one value per sample, or a single number (`values` is None then)."""

    mean: float
    values: tuple[float, ...] | None = None
    metric: str = ""                                # the key, where the check returned a dict
    others: tuple[tuple[str, float], ...] = ()      # means of its other entries
    identical: bool = False                         # they rest on the very answers of the baseline

    def at(self, indices: Sequence[int]) -> Scores:
        """The scores of some samples. Raises UnusableScores where there are no values per sample."""
        if self.values is None:
            raise UnusableScores("a single number cannot be split into samples")
        return _per_sample([self.values[index] for index in indices], self.metric)


@dataclass(frozen=True)
class Judgement:
    """One candidate against the budget. `drop` is in units of the score, or a share of the baseline's where relative."""

    verdict: Verdict
    drop: float
    drop_ci: tuple[float, float] | None     # each end holds with the budget's confidence by itself
    samples_needed: int | None              # to pass, if the drops stay as they are; None: no number would do
    flip_rate: float | None                 # share of right or wrong answers that changed; None: other scores
    reason: str
    samples: int | None = None


def read(returned: Any, metric: str | None = None) -> Scores:
    """The scores in what a check returned: a number, one value per sample (list, tuple, or anything of one dimension
    with `tolist`: tensors, arrays), or a dict of such. Booleans count as 0 and 1.

    Raises `UnusableScores` for anything else, for NaN and infinity, and for no values at all.
    """
    if isinstance(returned, Mapping):
        return _chosen(returned, metric)
    if metric is not None:
        raise UnusableScores(f"the budget is about {metric!r}, but the check returned no dict",
                             "leave `metric` out, or return a dict from the check")
    return _scores(returned, "")


def _chosen(returned: Mapping[Any, Any], metric: str | None) -> Scores:
    names = [str(key) for key in returned]
    if metric is None and len(returned) != 1:
        raise UnusableScores(f"the check returned {len(returned)} metrics ({', '.join(names)})",
                             f"say which one counts: Budget(metric={names[0]!r})" if names else "return at least one")
    chosen = names[0] if metric is None else metric
    if chosen not in names:
        raise UnusableScores(f"the check returned no {chosen!r}", f"it returned {', '.join(names)}")
    found = {str(key): value for key, value in returned.items()}
    scores = _scores(found.pop(chosen), chosen)
    others = tuple((name, _scores(value, name).mean) for name, value in found.items())
    return Scores(scores.mean, scores.values, chosen, others)


def _scores(returned: Any, metric: str) -> Scores:
    label = f"{metric}: " if metric else ""
    dimensions = getattr(returned, "ndim", None)
    if hasattr(returned, "tolist") and isinstance(dimensions, int):
        if dimensions > 1:
            raise UnusableScores(f"{label}the check returned {dimensions} dimensions, {tuple(returned.shape)}",
                                 "return one number, or one value per sample")
        returned = returned.tolist()
    if isinstance(returned, (list, tuple)):
        return _per_sample([_number(value, label) for value in returned], metric)
    return Scores(_number(returned, label), metric=metric)


def _per_sample(values: list[float], metric: str) -> Scores:
    if not values:
        raise UnusableScores("the check returned no scores at all")
    return Scores(fsum(values) / len(values), tuple(values), metric)


def _number(value: Any, label: str) -> float:
    if isinstance(value, (str, bytes)) or not hasattr(value, "__float__"):
        raise UnusableScores(f"{label}the check returned {_named(value)}",
                             "return a number, one value per sample, or a dict of such")
    try:
        number = float(value)
    except (TypeError, ValueError, OverflowError, RuntimeError) as error:   # torch: RuntimeError for many elements
        raise UnusableScores(f"{label}the check returned {_named(value)}, which is no number ({error})") from error
    if not isfinite(number):
        raise UnusableScores(f"{label}the check returned {number}", "a score must be a finite number for every sample")
    return number


def _named(value: Any) -> str:
    return "None" if value is None else f"a {type(value).__name__}"


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def split(samples: int, share: float = 0.5) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Indices for the selection of candidates (a `share` of all) and for the confirmation of the winner, disjoint and
    the same each time. The best of many on one set of samples is partly the luckiest on it: the winner's curse.

    Raises ValueError where one of the two would be empty.
    """
    chosen = round(samples * share)
    if not 0 < chosen < samples:
        raise ValueError(f"{samples} samples cannot be split")
    order = list(range(samples))
    random.Random(_SEED).shuffle(order)     # not by position: data sets are sorted
    return tuple(sorted(order[:chosen])), tuple(sorted(order[chosen:]))


def compare(baseline: Scores, candidate: Scores, budget: Budget, *, identical: bool = False) -> Judgement:
    """The verdict on a candidate. `identical`: every answer that the check received was the baseline's, bit for bit.

    Raises `UnusableScores` where the two are not scores of the same samples, and where the budget means nothing for
    these scores (`Budget.problem`).
    """
    problem = budget.problem(baseline)
    if problem is not None:
        raise UnusableScores(problem, Budget.REMEDY)
    if (baseline.values is None) != (candidate.values is None):
        raise UnusableScores("the check returned values per sample for one model and a single number for the other")
    if baseline.values is None or candidate.values is None:
        return _single(baseline, candidate, budget, identical)
    if len(baseline.values) != len(candidate.values):
        raise UnusableScores(
            f"the check returned {len(baseline.values)} scores for the baseline, {len(candidate.values)} for the candidate",
            "return one value per sample, for the same samples in the same order each time")
    return _paired(baseline.values, candidate.values, budget)


def _single(baseline: Scores, candidate: Scores, budget: Budget, identical: bool) -> Judgement:
    reference = abs(baseline.mean) if budget.relative else 1.0
    drop = budget.sign * (baseline.mean - candidate.mean) / reference
    if budget.confidence is None:
        return _point_estimate(drop, budget, None, None)
    if identical:
        return Judgement("pass", drop, None, None, None, "every answer is the baseline's, bit for bit")
    seen = f"a drop of {_words(drop, budget)} was seen, {_words(budget.max_drop, budget)} is allowed"
    return Judgement("undecided", drop, None, None, None,
                     f"a single number cannot certify: {seen}; return one value per sample from the check")


def _point_estimate(drop: float, budget: Budget, flips: float | None, samples: int | None) -> Judgement:
    passed = _within(drop, budget)
    words = f"a drop of {_words(drop, budget)}, {'within' if passed else 'beyond'} {_words(budget.max_drop, budget)}"
    return Judgement("pass" if passed else "fail", drop, None, None, flips, f"{words} (point estimate)", samples)


def _paired(before: Sequence[float], after: Sequence[float], budget: Budget) -> Judgement:
    n = len(before)
    scale = bounds.two_valued((*before, *after))
    reference = abs(fsum(before) / n) if budget.relative else 1.0
    drop = budget.sign * fsum(b - a for b, a in zip(before, after)) / n / reference
    flips = None if scale is None else sum(b != a for b, a in zip(before, after)) / n
    if budget.confidence is None:
        return _point_estimate(drop, budget, flips, n)
    method = bounds.spread if scale is None else bounds.proportions
    bound = method(before, after, budget.sign, budget.relative, budget.confidence)
    if bound is None:
        reason = "one sample" if n == 1 else "scores that are all one number"
        reason += " cannot show how far a score may change"
        return Judgement("undecided", drop, None, None, flips, reason, n)
    low, high = bound(n, -1), bound(n, 1)
    if _within(high, budget):
        verdict, needed = "pass", None
        reason = f"the drop is at most {_words(high, budget)}, {_words(budget.max_drop, budget)} is allowed"
    elif not _within(low, budget):
        verdict, needed = "fail", None
        reason = f"the drop is at least {_words(low, budget)}, {_words(budget.max_drop, budget)} is allowed"
    else:
        verdict, needed = "undecided", _samples_needed(bound, n, budget)
        beyond = drop >= budget.max_drop
        more = "the drop that was seen is beyond the budget" if beyond else "no number of samples would do"
        more = more if needed is None else f"about {needed} samples would do"
        reason = (f"{n} samples cannot tell: the drop may be as large as {_words(high, budget)}, "
                  f"{_words(budget.max_drop, budget)} is allowed; {more}")
    return Judgement(verdict, drop, (low, high), needed, flips, reason, n)


def _within(drop: float, budget: Budget) -> bool:
    return drop <= budget.max_drop + ROUNDING * max(1.0, budget.max_drop)


def _words(drop: float, budget: Budget) -> str:
    return f"{100 * drop:.3g} %" if budget.relative else f"{drop:.3g}"


def _samples_needed(bound: bounds.Bound, n: int, budget: Budget) -> int | None:
    """The smallest number of samples, with drops like those seen, whose upper bound is within the budget; None: above
    `MOST_SAMPLES`."""
    low, high = n, 2 * n
    while not _within(bound(high, 1), budget):
        low, high = high, 2 * high
        if high > MOST_SAMPLES:
            return None
    while high - low > max(1, low // 1000):
        middle = (low + high) // 2
        low, high = (low, middle) if _within(bound(middle, 1), budget) else (middle, high)
    return high


