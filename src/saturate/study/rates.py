"""How often events (backward passes, an optimizer's steps) come in a step, and whether they come as often in another process."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from statistics import NormalDist

from saturate.measure.stats import t_quantile

#: Steps that followed each other, and how often each event came in them.
Window = tuple[int, Mapping[str, float]]

#: Rates may always differ by this share: the accumulation at the end of an epoch is uneven.
UNEVEN = 0.15

#: And by what chance makes of them, to the certainty of so many standard errors: a step may have a random number of backward passes.
SURE = 4.0


def rate(windows: Sequence[Window], token: str) -> float:
    """How often the event comes in a step."""
    return sum(events.get(token, 0) for _, events in windows) / sum(steps for steps, _ in windows)


def _error(windows: Sequence[Window], token: str) -> float:
    """`SURE` standard errors of the number of one step, by Student where few windows tell how they scatter; 0 where they do not, or
    where nobody knows."""
    if len(windows) < 2:
        return 0.0
    expected = rate(windows, token)
    variance = sum((events.get(token, 0) - steps * expected) ** 2 / steps for steps, events in windows) / (len(windows) - 1)
    return t_quantile(NormalDist().cdf(SURE), len(windows) - 1) * math.sqrt(variance)


def differ(expected: Sequence[Window], found: Sequence[Window], token: str, known: Sequence[Window] = (), fewer: float = 1.0) -> bool:
    """Whether the event comes more or less often in the steps that were `found` than in the `expected` ones. `known`: more windows of
    the same program, which tell how its steps scatter. `fewer`: so many of the expected backward passes may be one of those found, or
    that one of several (see `Technique.merges`); none of them has to be, for some micro-steps cannot be merged."""
    usual, (few, many) = rate(expected, token), sorted(sum(steps for steps, _ in windows) for windows in (expected, found))
    chance = _error([*known, *expected], token) * math.sqrt(1 / few + 1 / many)
    times, often = 1 / fewer if token == "B" else 1.0, rate(found, token)

    def beyond(share: float) -> float:
        return UNEVEN * share * usual + 1 / few + share * chance

    least, most = min(1.0, times), max(1.0, times)
    return often < least * usual - beyond(least) or often > most * usual + beyond(most)


def merged(windows: Sequence[Window], factor: float) -> list[Window]:
    """What these windows would be where so many backward passes are one."""
    return [(steps, {token: often / factor if token == "B" else often for token, often in events.items()}) for steps, events in windows]
