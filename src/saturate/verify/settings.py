"""What optimizers are set to, compared: the same learning rate, to the last bit but for its format, in every update."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from saturate.verify.series import Series

#: How far apart two readings of one number may be, relative: a rate may be held as a tensor of 32 bits.
APART = 1e-6

Settings = tuple[tuple[str, Any], ...]


def otherwise(ours: Sequence[Settings | None], theirs: Sequence[Settings | None]) -> Iterator[tuple[str, Any, Any]]:
    """(name, of ours, of theirs) for what is set otherwise, by tensor. What either does not have, or not as a number, is not compared."""
    for one, other in dict.fromkeys(zip(ours, theirs)):
        known = dict(other or ())
        for name, expected in one or ():
            if not _alike(expected, known.get(name)):
                yield name, expected, known[name]


def _alike(expected: Any, found: Any) -> bool:
    if isinstance(expected, tuple) and isinstance(found, tuple):
        return len(expected) == len(found) and all(map(_alike, expected, found))
    if not (isinstance(expected, float) and isinstance(found, float)):
        return True
    return expected == found or expected != expected or abs(expected - found) <= APART * max(abs(expected), abs(found))


def settled(baseline: Series, others: Sequence[Series]) -> int:
    """In how many updates these runs set their optimizers as the baseline does. A rate that follows the loss (a plateau, how far a policy
    went) is another one where rounding is."""
    return next((k for k, ours in enumerate(baseline.settings)
                 if any(any(otherwise(ours, other.settings[k])) for other in others if k < len(other.settings))), len(baseline.settings))
