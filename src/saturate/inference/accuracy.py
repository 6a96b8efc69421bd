"""Is a candidate as accurate as the baseline, within a budget? The user's check gives scores; pairs of them are compared.

The check is asked for one value per sample. Baseline and candidate answer the same samples, so the samples' own
difficulty cancels: what counts is the drop of each, `baseline - candidate` (turned round where lower is better). The
mean drop is bounded from above and from below (`bounds`), each with the budget's confidence by itself:

    pass        the upper bound lies within the budget
    fail        the lower bound lies beyond it
    undecided   neither; a check of `samples_needed` samples in all would mostly let it pass, if drops stay as they are

A single number has no spread that anybody could know: it certifies nothing, except where every answer was identical.
Contenders that meet the same samples of the confirmation one after the other share what the confidence leaves: `level`.
"""

from __future__ import annotations

import numbers
import random
from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import ceil, fsum, inf, isfinite, sqrt
from statistics import NormalDist
from typing import Any, ClassVar

from saturate.errors import UsageError
from saturate.inference import bounds
from saturate.inference.scores import Scores, UnusableScores
from saturate.records.inference import Verdict

#: More samples than anybody checks: "no number of samples helps".
MOST_SAMPLES = 10**9

#: A check of as many samples as are said to be needed passes with this chance, where the drops that were seen are the
#: true ones.
POWER = 0.8

#: Of the chance of a false pass that is left, each contender gets this share, and the next ones what remains: 2/3, 2/9,
#: 2/27... The first is mostly the winner, so it should not pay much for the others.
SPENT = 2 / 3

#: Fewer samples than this are not split into selection and confirmation: each part would say nothing.
FEWEST_TO_SPLIT = 20

#: The largest number below 1, where levels end: after some thirty turns they would round to 1, which nothing reaches. That gives
#: away no more than is lost in rounding.
HIGHEST = 1 - 2.0**-53

#: Scores may lie outside of their range by rounding, as a cosine of 1.0000001 does; a share of the range.
_BEYOND = 1e-5

#: Drops of 0.90 - 0.89 are not 0.01 in binary; a verdict must not hang on that.
ROUNDING = 1e-12

_SEED = 20261120


@dataclass(frozen=True)
class Budget:
    """How much accuracy may be given up for speed, and how sure to be.

    max_drop: in units of the check's score (0.01 is one percentage point of an accuracy between 0 and 1), or a share of
    the baseline's score where `relative`. confidence: of the verdict, on one side; None asks for point estimates, which
    certify nothing. metric: which entry counts, where the check returns a dict of several. score_range: (lowest, highest)
    value that a sample's score can have: what an unseen sample may lose at most (None: `bounds.reach` says what is assumed).
    max_flips: the share of samples whose answer may change between right and wrong, whichever way (None: any): as many may get
    better as get worse, and the score does not show it. Needs a value of right or wrong per sample.
    Raises `UsageError` for values that mean nothing.
    """

    max_drop: float
    relative: bool = False
    higher_is_better: bool = True
    confidence: float | None = 0.95
    metric: str | None = None
    score_range: tuple[float, float] | None = None
    max_flips: float | None = None

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
        if self.score_range is not None and not _is_range(self.score_range):
            raise UsageError(f"a budget's score_range is a pair of numbers, the lower one first, not {self.score_range!r}",
                             remedy="write (0, 100) for scores in per cent")
        if self.max_flips is not None and not (_is_number(self.max_flips) and 0 <= self.max_flips < 1):
            raise UsageError(f"a budget's max_flips is a share of the samples, from 0 to 1; this is {self.max_flips!r}",
                             remedy="write 0.02 where 2 % of the answers may change between right and wrong")
        for name in ("max_drop", "confidence", "max_flips"):        # records hold Python's numbers, not numpy's
            if (value := getattr(self, name)) is not None:
                object.__setattr__(self, name, float(value))

    @property
    def sign(self) -> int:
        """What turns `baseline - candidate` into a drop."""
        return 1 if self.higher_is_better else -1

    def problem(self, baseline: Scores) -> str | None:
        """Why no candidate can be judged by this budget, given the baseline's scores; None where all is well."""
        if self.relative and baseline.mean == 0:
            return "the baseline's score is 0, so a relative drop has no meaning"
        low, high = self.score_range or (0.0, _scale(baseline))
        if not self.relative and self.max_drop >= high - low:
            return f"a drop of {self.max_drop:g} allows anything: the scores lie between {low:g} and {high:g}"
        return self.outside(baseline)

    def outside(self, scores: Scores) -> str | None:
        """Which score cannot be, by the range that was given."""
        if self.score_range is None:
            return None
        low, high = self.score_range
        slack = _BEYOND * (high - low)
        other = next((value for value in scores.values or (scores.mean,) if not low - slack <= value <= high + slack), None)
        return None if other is None else f"a score of {other:g} lies outside of the score_range, {low:g} to {high:g}"


def refuse_other(budget: Any) -> None:
    """Raise UsageError for what is given as a budget, and is none."""
    if budget is not None and not isinstance(budget, Budget):
        raise UsageError(f"the budget is {budget!r:.100}", cause=f"it is a {type(budget).__name__}, not a saturate.Budget",
                         remedy="budget=saturate.Budget(max_drop=0.01)")


@dataclass(frozen=True)
class Judgement:
    """One candidate against the budget. `drop` is in units of the score, or a share of the baseline's where relative."""

    verdict: Verdict
    drop: float
    drop_ci: tuple[float, float] | None     # each end holds with the budget's confidence by itself
    samples_needed: int | None              # of the check in all, selection included; None: no number would do
    flip_rate: float | None                 # share of right or wrong answers that changed; None: other scores
    reason: str
    samples: int | None = None

    def numbers(self) -> tuple[float | None, tuple[float, float] | None]:
        """(drop, drop_ci) for a record, which holds no infinity: an unbounded interval says nothing, and the reason why."""
        ends = self.drop_ci
        return self.drop if isfinite(self.drop) else None, ends if ends is not None and all(map(isfinite, ends)) else None


def _is_number(value: Any) -> bool:
    return isinstance(value, numbers.Real) and not isinstance(value, bool)


def _is_range(value: Any) -> bool:
    return (isinstance(value, (tuple, list)) and len(value) == 2 and all(_is_number(end) and isfinite(end) for end in value)
            and value[0] < value[1])


def _scale(scores: Scores) -> float:
    """The upper end of scores that are right or wrong; inf for others, and where all are 0: they may be distances."""
    if scores.values is None or not any(scores.values):
        return inf
    return bounds.two_valued(scores.values) or inf


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


def level(confidence: float | None, turn: int) -> float | None:
    """The confidence of the contender that meets the samples of the confirmation as number `turn`, from 0. However many
    follow, all their bounds hold together with `confidence` (Bonferroni's inequality). A bound at its own level holds for
    every budget, so that a contender may be judged by another one later."""
    return None if confidence is None else min(HIGHEST, 1 - (1 - confidence) * SPENT * (1 - SPENT) ** turn)


def unsplit(judgement: Judgement, why: str = "") -> Judgement:
    """Of a check with fewer samples than `FEWEST_TO_SPLIT`, or one that cannot be split (`why`): those that choose a candidate cannot
    confirm it."""
    if judgement.verdict != "pass" or judgement.samples is None:
        return judgement
    if why:
        return replace(judgement, verdict="undecided", drop_ci=None, samples_needed=None, reason=why)
    needed = max(FEWEST_TO_SPLIT, 2 * judgement.samples)
    reason = (f"{judgement.samples} samples are too few to split into some that choose and others that confirm; "
              f"about {needed} samples in all would do")
    return replace(judgement, verdict="undecided", drop_ci=None, samples_needed=needed, reason=reason)


def compare(baseline: Scores, candidate: Scores, budget: Budget, *, share: float = 1.0, confirmed_at: float | None = None,
            unpaired: str = "") -> Judgement:
    """The verdict on a candidate. `share`: of the check's samples, these are; `confirmed_at`: the confidence at which it
    will have to pass (None: the budget's). Both only change the number of samples that are said to be needed. `unpaired`: why values at
    one place are not known to be of one sample; their means still compare, but which answers changed is not known.

    Raises `UnusableScores` where the two are not scores of the same samples, and where the budget means nothing for
    these scores (`Budget.problem`).
    """
    problem = budget.problem(baseline) or budget.outside(candidate)
    if problem is not None:
        raise UnusableScores(problem, Budget.REMEDY)
    if (baseline.values is None) != (candidate.values is None):
        raise UnusableScores("the check returned values per sample for one model and a single number for the other")
    if baseline.values is None or candidate.values is None:
        return _few_flips(_single(baseline, candidate, budget), budget)
    if len(baseline.values) != len(candidate.values):
        raise UnusableScores(
            f"the check returned {len(baseline.values)} scores for the baseline, {len(candidate.values)} for the candidate",
            "return one value per sample, for the same samples in the same order each time")
    found = _paired(baseline.values, candidate.values, budget, share, confirmed_at or budget.confidence)
    return _few_flips(replace(found, flip_rate=None) if unpaired else found, budget, unpaired)


def _few_flips(found: Judgement, budget: Budget, unpaired: str = "") -> Judgement:
    """The same, unless more answers changed between right and wrong than the budget lets, or nobody knows how many did."""
    if budget.max_flips is None or found.verdict == "fail":
        return found
    if found.flip_rate is None:
        return replace(found, verdict="undecided", samples_needed=None,
                       reason=unpaired or "max_flips asks how many answers changed, which only a value of right or wrong per sample tells")
    if found.flip_rate <= budget.max_flips:
        return found
    return replace(found, verdict="fail", samples_needed=None,
                   reason=f"{found.flip_rate:.1%} of the answers changed between right and wrong, {budget.max_flips:.1%} is allowed")


def _drop(before: float, after: float, budget: Budget) -> float:
    """From means."""
    return budget.sign * (before - after) / (abs(before) if budget.relative else 1.0)


def _single(baseline: Scores, candidate: Scores, budget: Budget) -> Judgement:
    drop = _drop(baseline.mean, candidate.mean, budget)
    if budget.confidence is None:
        return _point_estimate(drop, budget, None, None)
    if candidate.identical:
        return Judgement("pass", drop, None, None, None, "every answer is the baseline's, bit for bit")
    seen = f"a drop of {_words(drop, budget)} was seen, {_words(budget.max_drop, budget)} is allowed"
    return Judgement("undecided", drop, None, None, None,
                     f"a single number cannot certify: {seen}; return one value per sample from the check")


def _point_estimate(drop: float, budget: Budget, flips: float | None, samples: int | None) -> Judgement:
    passed = _within(drop, budget)
    words = f"a drop of {_words(drop, budget)}, {'within' if passed else 'beyond'} {_words(budget.max_drop, budget)}"
    return Judgement("pass" if passed else "fail", drop, None, None, flips, f"{words} (point estimate)", samples)


def _paired(before: Sequence[float], after: Sequence[float], budget: Budget, share: float, confirmed_at: float | None) -> Judgement:
    n = len(before)
    scale = bounds.two_valued((*before, *after))
    if scale is not None and budget.score_range not in (None, (0, scale)):
        scale = None        # by chance: they can have other values
    reference = abs(fsum(before) / n) if budget.relative else 1.0
    drop = budget.sign * fsum(b - a for b, a in zip(before, after)) / n / reference
    flips = None if scale is None else sum(b != a for b, a in zip(before, after)) / n
    if budget.confidence is None:
        return _point_estimate(drop, budget, flips, n)
    bound, later = (_bound(before, after, budget, scale is not None, confidence) for confidence in (budget.confidence, confirmed_at))
    if bound is None or later is None:
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
        verdict, needed = "undecided", None
        more = "no number of samples would do"
        if not _within(drop, budget):
            more = "the drop that was seen is beyond the budget"
        elif (enough := _samples_needed(later, _scatter(before, after, budget), n, budget)) is not None:
            needed = ceil(enough / share)
            more = f"about {needed} samples in all would do"
        reason = (f"{n} samples cannot tell: the drop may be as large as {_words(high, budget)}, "
                  f"{_words(budget.max_drop, budget)} is allowed; {more}")
    return Judgement(verdict, drop, (low, high), needed, flips, reason, n)


def _bound(before: Sequence[float], after: Sequence[float], budget: Budget, binary: bool, confidence: float | None) -> bounds.Bound | None:
    assert confidence is not None
    if binary:
        return bounds.proportions(before, after, budget.sign, budget.relative, confidence)
    reach = bounds.reach((*before, *after), budget.score_range)
    return None if reach is None else bounds.spread(before, after, budget.sign, budget.relative, confidence, reach)


def _within(drop: float, budget: Budget) -> bool:
    return drop <= budget.max_drop + ROUNDING * max(1.0, budget.max_drop)


def _words(drop: float, budget: Budget) -> str:
    return f"{100 * drop:.3g} %" if budget.relative else f"{drop:.3g}"


def _scatter(before: Sequence[float], after: Sequence[float], budget: Budget) -> float:
    """Standard deviation of one sample's drop, as it is compared with the budget."""
    n = len(before)
    mean = fsum(before) / n
    drops = [budget.sign * (b - a) - (budget.max_drop * b * (1 if mean > 0 else -1) if budget.relative else 0.0) for b, a in zip(before, after)]
    centre = fsum(drops) / n
    return sqrt(fsum((x - centre) ** 2 for x in drops) / n) / (abs(mean) if budget.relative else 1.0)


def _samples_needed(bound: bounds.Bound, scatter: float, n: int, budget: Budget) -> int | None:
    """The smallest number of samples that pass with a chance of `POWER`, where drops are like those seen; None: above
    `MOST_SAMPLES`. `scatter`: of one sample's drop; the mean drop of others is larger than the one seen by as much."""
    unlucky = NormalDist().inv_cdf(POWER) * scatter

    def enough(samples: int) -> bool:
        return _within(bound(samples, 1) + unlucky / sqrt(samples), budget)

    low, high = n, 2 * n
    while not enough(high):
        low, high = high, 2 * high
        if high > MOST_SAMPLES:
            return None
    while high - low > max(1, low // 1000):
        middle = (low + high) // 2
        low, high = (low, middle) if enough(middle) else (middle, high)
    return high


