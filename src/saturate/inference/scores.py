"""What the user's check returned, read into scores: one number, one value per sample, or a dict of such."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import fsum, isfinite
from typing import Any

#: A score beyond this has no square whose square is a number: nothing could be computed of it, nor would it be an answer.
MOST_SCORE = 1e75


class UnusableScores(ValueError):
    """What a check returned cannot be compared; the message says why, `remedy` what to do."""

    def __init__(self, message: str, remedy: str = ""):
        super().__init__(message)
        self.remedy = remedy


@dataclass(frozen=True)
class Scores:
    """What a check said about one candidate: one value per sample, or a single number (`values` is None then)."""

    mean: float
    values: tuple[float, ...] | None = None
    metric: str = ""                                # the key, where the check returned a dict
    others: tuple[tuple[str, float], ...] = ()      # means of its other entries
    identical: bool = field(default=False, compare=False)   # they rest on the baseline's very answers, bit for bit

    def at(self, indices: Sequence[int]) -> Scores:
        """The scores of some samples. Raises UnusableScores where there are no values per sample."""
        if self.values is None:
            raise UnusableScores("a single number cannot be split into samples")
        return replace(_per_sample([self.values[index] for index in indices], self.metric), identical=self.identical)


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
    others = tuple((name, mean) for name, value in found.items() if (mean := _mean(value, name)) is not None)
    return Scores(scores.mean, scores.values, chosen, others)


def _mean(returned: Any, name: str) -> float | None:
    """Of an entry that is only shown; None for a matrix, a text or NaN, which nobody asked to compare."""
    try:
        return _scores(returned, name).mean
    except UnusableScores:
        return None


def _scores(returned: Any, metric: str) -> Scores:
    label = f"{metric}: " if metric else ""
    dimensions = getattr(returned, "ndim", None)
    if hasattr(returned, "tolist") and isinstance(dimensions, int):
        if dimensions > 1:
            raise UnusableScores(f"{label}the check returned {dimensions} dimensions, {tuple(returned.shape)}",
                                 "return one number, or one value per sample")
        returned = returned.tolist()
    if isinstance(returned, (list, tuple)):
        _refuse_batches(returned, label)
        return _per_sample([_number(value, label) for value in returned], metric)
    return Scores(_number(returned, label), metric=metric)


def _refuse_batches(returned: Sequence[Any], label: str) -> None:
    """A loop that appends what it has of each batch makes a list of lists: each of these may be as long as a batch. A tensor with one
    value is a number to Python, an array with one is none from numpy 2.4 on."""
    for value in returned:
        several = isinstance(value, (list, tuple)) or (hasattr(value, "tolist") and getattr(value, "ndim", 0) and
                                                       (not hasattr(value, "untyped_storage") or value.numel() != 1))
        if several:
            raise UnusableScores(f"{label}the check returned a {type(returned).__name__} that holds {_named(value)} where a number should be",
                                 "put the values of all batches into one list: torch.cat(scores), numpy.concatenate(scores), or scores.extend")


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
    if abs(number) > MOST_SCORE:
        raise UnusableScores(f"{label}the check returned {number:.3g}", f"a score lies within {MOST_SCORE:g} of 0: the logarithm of a perplexity does")
    return number


def _named(value: Any) -> str:
    return "None" if value is None else f"a {type(value).__name__}"
