"""The user's limits on the time of a call and on memory: does what was measured pass one, and are there enough calls to tell?

Of a few calls the slowest is the 99th percentile, and something else on the machine may have held that one up. So a few calls
refuse nobody, unless more of them were slow than chance allows; from `ENOUGH_CALLS` on the percentile itself decides.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from saturate.inference import racing
from saturate.measure.stats import at_least
from saturate.records.inference import Timing

#: Fewer calls than `ENOUGH_CALLS` pass a limit where chance would show as many slow ones less often than this.
DOUBT = 0.05

#: Of so many calls one slow one is not the 99th percentile.
ENOUGH_CALLS = 101


def over_limit(timing: Timing | None, memory_bytes: int | None, limits: Mapping[str, float]) -> str | None:
    """Which of the user's limits this passes."""
    for name, most in limits.items():
        if name == "peak_memory_gb":
            if memory_bytes is None:
                return f"{name} is not known here, at most {most:g} was asked for"
            have = memory_bytes / 1e9
        else:                               # p50_ms, p90_ms, p99_ms
            have = getattr(timing, name.removesuffix("_ms")) if timing else math.inf
        if have > most:
            shown = next(text for digits in (3, 6, 17) if float(text := f"{have:.{digits}g}") > most)     # not "is 15, at most 15"
            return f"{name} is {shown}, at most {most:g} was asked for"
    return None


def surely_over_limit(times_ns: Sequence[int], memory_bytes: int | None, limits: Mapping[str, float]) -> str | None:
    """The same of a few calls, beyond doubt."""
    sure = {name: most for name, most in limits.items() if name == "peak_memory_gb" or _exceeded(name, times_ns, most)}
    return over_limit(racing.timing(list(times_ns)), memory_bytes, sure)


def model_over_limit(times_ns: Sequence[int], memory_bytes: int | None, limits: Mapping[str, float]) -> str | None:
    """Which limit the user's own model passes, beyond doubt however many calls there are: what is said against it leads to another one that
    may be slower. That nobody knows its memory says nothing."""
    return surely_over_limit(times_ns, memory_bytes, {name: most for name, most in limits.items() if name != "peak_memory_gb" or memory_bytes is not None})


def too_few_calls(times_ns: Sequence[int], memory_bytes: int | None, limits: Mapping[str, float], instead: bool = False) -> bool:
    """Whether these pass a limit, and more calls might not; or (`instead`: that it keeps them is all that speaks for it) whether these
    keep all, and more might not."""
    if over_limit(racing.timing(list(times_ns)), memory_bytes, limits) is not None:
        return not decided(times_ns, memory_bytes, limits)
    return instead and len(times_ns) < ENOUGH_CALLS and not all(_kept(name, times_ns, most) for name, most in limits.items() if name != "peak_memory_gb")


def decided(times_ns: Sequence[int], memory_bytes: int | None, limits: Mapping[str, float]) -> bool:
    """Whether more calls need not be made where the first seemed to pass a limit. That the percentile falls below the limit on the way
    is no reason to stop: it would favour who is judged."""
    return len(times_ns) >= ENOUGH_CALLS or surely_over_limit(times_ns, memory_bytes, limits) is not None


def _exceeded(name: str, times_ns: Sequence[int], most_ms: float) -> bool:
    """Whether more calls were slower than chance allows, if this percentile ("p99_ms") kept the limit. One never is more: of five
    calls chance alone would hardly show it, but whatever else the machine does may hold one up."""
    slower = _slower(times_ns, most_ms)
    return slower > 1 and at_least(slower, len(times_ns), _share(name)) < DOUBT


def _kept(name: str, times_ns: Sequence[int], most_ms: float) -> bool:
    """Whether fewer calls were slower than chance allows, if this percentile passed the limit."""
    return 1.0 - at_least(_slower(times_ns, most_ms) + 1, len(times_ns), _share(name)) < DOUBT


def _slower(times_ns: Sequence[int], most_ms: float) -> int:
    return sum(value > most_ms * 1e6 for value in times_ns)


def _share(name: str) -> float:
    """Of the calls, how many may be slower than a percentile ("p99_ms")."""
    return 1.0 - int(name[1:].partition("_")[0]) / 100
