"""What is wrong with an update whatever the tolerance: it yields no usable number, or does not move what the baseline moves."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from operator import mul
from statistics import fmean

from saturate.verify.deviation import FIRST_ACTING, norm, tells, tells_of_all, update_of
from saturate.verify.series import Series

#: A tensor goes the other way where the cosines of so many of its updates, of so many sampled entries or more, are below this on average.
#: Those of one that moves by noise alone (the key bias of attention under Adam) are zero on average, in few entries by chance only.
OPPOSED, LEAST_UPDATES, LEAST_ENTRIES = -0.5, 8, 16


def broken(baseline: Series, candidate: Series, k: int) -> Iterator[tuple[str, str]]:
    """What of update k is broken, and that in words. Unchanged runs of a training at the edge of what its format holds may break in the
    same update: then the same thing says nothing of a candidate (see `Tolerance.excused`)."""
    for expected, found in zip(baseline.losses[k], candidate.losses[k]):
        if math.isfinite(expected) and not math.isfinite(found):
            yield "loss", f"loss is {found} in update {k}, the baseline's is {expected:.6g}"
            break
    expected, found = baseline.grad_norms[k], candidate.grad_norms[k]
    if math.isfinite(expected) and not math.isfinite(found):
        yield "gradient", f"gradient norm is {found} in update {k}, the baseline's is {expected:.6g}"
    if not all(map(math.isfinite, candidate.samples[k])) and all(map(math.isfinite, baseline.samples[k])):
        yield "parameters", f"parameters are not finite after update {k}"
    if k < FIRST_ACTING:
        return
    if baseline.statistics and baseline.statistics_segments == candidate.statistics_segments and any(
            math.isfinite(a) and not math.isfinite(b) for a, b in zip(baseline.statistics[k], candidate.statistics[k])):
        yield "statistics", f"running statistics of a module are not finite, or of another size, after update {k}"
    change, other = update_of(baseline, k), update_of(candidate, k)
    if not any(other) and tells_of_all(baseline, change, baseline.samples[k]):
        yield "update", f"update {k} is missing: no parameter moved, the baseline's did"
    for part, (begin, end) in enumerate(baseline.parts()):
        if any(other[begin:end]) or baseline.coarse(part):
            continue        # of 16 bits: where an update is near half a unit in all entries, it may vanish in one of two honest runs
        if tells(baseline, part, change[begin:end], baseline.samples[k][begin:end], 16):
            yield f"tensor {part}", f"tensor {part} did not move in update {k}, the baseline's did"


def opposed(baseline: Series, candidate: Series, updates: Sequence[int]) -> int | None:
    """A tensor that goes the other way in these updates: the medians over tensors do not show what few of them do."""
    return next((part for part, cosine in cosines(baseline, candidate, updates).items() if cosine < OPPOSED), None)


def cosines(baseline: Series, candidate: Series, updates: Sequence[int]) -> dict[int, float]:
    """Of each tensor with enough entries, the mean cosine of its updates with the baseline's, where enough of these updates have one."""
    found: dict[int, list[float]] = {}
    parts = [(part, begin, end) for part, (begin, end) in enumerate(baseline.parts()) if end - begin >= LEAST_ENTRIES]
    for k in updates:
        ours, theirs = update_of(baseline, k), update_of(candidate, k)
        for part, begin, end in parts:
            a, b = ours[begin:end], theirs[begin:end]
            if tells(baseline, part, a, baseline.samples[k][begin:end]) and any(b) and all(map(math.isfinite, b)):
                found.setdefault(part, []).append(math.fsum(map(mul, a, b)) / (norm(a) * norm(b)))
    return {part: fmean(values) for part, values in found.items() if len(values) >= LEAST_UPDATES}
