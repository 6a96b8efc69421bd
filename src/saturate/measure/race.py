"""Is B faster than A? Statistics of a race between fresh pairs of processes.

A race is a list of *pairs*; a pair is two fresh processes; its entries are per-round log-ratios ln(time_A / time_B),
so positive means that B is faster. Two processes of the very same program differ by a constant of 1 to 3 % (layout of
memory, hash seeds, which core) that more rounds never remove. So there are two levels:

    pair median = ln(speed-up) + bias of this pair + noise of its rounds

The noise of the rounds is the bootstrap error of the median, in closed form. The bias is resampled over pairs; as a
few pairs do not show how wide it spreads, their spread is blended with `between_sd`, what A/A races of this workload
(or a prior) say it is. Pairs are weighted by their precision, and the interval is Student's t with the blended
spread: random effects as in Hartung and Knapp (Statistics in Medicine 20, 2001) with a prior. It needs no random
numbers, is honest at one pair, and narrows with the number of pairs.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from math import exp, expm1, hypot, log1p, sqrt
from statistics import median
from typing import Literal

from saturate.measure.stats import median_se, t_quantile, wilson

Verdict = Literal["faster", "no_difference", "slower", "inconclusive"]
Pairs = Sequence[Sequence[float]]

#: Standard deviation of the log-ratio between fresh pairs of one program, before this workload's own A/A is known:
#: 12 A/A pairs of 40 rounds on a two-core virtual machine gave 0.013 (bench/data/pair_biases.json).
PRIOR_BETWEEN_SD = 0.012

#: How many observed pairs that prior, and then `between_sd`, counts for.
PRIOR_PAIRS = 6

#: A claim smaller than this rests on at least `FEWEST_PAIRS` fresh pairs, whatever its interval says.
SMALL_CLAIM = log1p(0.05)
FEWEST_PAIRS = 3

#: The scatter of so many rounds is known well enough. Only a race that the budget or the script ends has fewer.
FEW_ROUNDS = 4

#: Nominal levels that keep the level of the whole sequence at 5 % with 1, 2, ... looks (Pocock, Biometrika 64, 1977).
POCOCK = (0.05, 0.0294, 0.0221, 0.0182, 0.0158, 0.0142, 0.0130, 0.0120, 0.0112, 0.0106)

#: Level of a look before a pair has all its rounds: so strict that it adds nothing that matters (Haybittle-Peto).
EARLY_LEVEL = 0.001


@dataclass(frozen=True)
class Estimate:
    """ln(time_A / time_B) with its interval; `exp` of each is a speed-up of B over A."""

    log_ratio: float
    low: float
    high: float
    pairs: int
    rounds: int                         # in all pairs together
    confidence: float = 0.95

    @property
    def speedup(self) -> float:
        return exp(self.log_ratio)

    @property
    def speedup_ci(self) -> tuple[float, float]:
        return exp(self.low), exp(self.high)


@dataclass(frozen=True)
class Limits:
    """How much a race may cost."""

    max_pairs: int = 6
    min_rounds: int = 6                 # of a pair, before it is looked at
    max_rounds: int = 30                # of a pair


@dataclass(frozen=True)
class Decision:
    """What a race does next, and what is known so far. `estimate` is None before anything can be estimated."""

    action: Literal["more_rounds", "new_pair", "stop"]
    verdict: Verdict
    estimate: Estimate | None
    reason: str


@lru_cache(maxsize=1024)
def _pair(rounds: tuple[float, ...]) -> tuple[float, float]:
    """Median of one pair and its standard error; cached, because finished pairs are looked at again and again.

    How far two or three rounds scatter hardly shows how far they may: two that agree by chance would claim anything. Their error
    is as much wider as Student's t of so few is than that of `PRIOR_PAIRS`, which `estimate` allows for.
    """
    n = len(rounds)
    few = t_quantile(0.975, n - 1) / t_quantile(0.975, PRIOR_PAIRS) if n < FEW_ROUNDS else 1.0
    return median(rounds), few * median_se(rounds)


def estimate(pairs: Pairs, between_sd: float = PRIOR_BETWEEN_SD, confidence: float = 0.95) -> Estimate:
    """The speed-up with an interval that covers both the noise of rounds and the bias of pairs.

    `between_sd` is the standard deviation of the bias between pairs, natural-log units (see `between_sd`).
    Raises ValueError without pairs, or for a pair with fewer than two rounds.
    """
    if not pairs:
        raise ValueError("no pairs to estimate from")
    found = [_pair(tuple(rounds)) for rounds in pairs]
    weights = [1 / max(between_sd**2 + error**2, 1e-16) for _, error in found]
    total = sum(weights)
    centre = sum(w * m for w, (m, _) in zip(weights, found)) / total
    spread = sum(w * (m - centre) ** 2 for w, (m, _) in zip(weights, found))    # about (pairs - 1) when as expected
    n = len(pairs)
    df = PRIOR_PAIRS + n - 1
    half = t_quantile(0.5 + confidence / 2, df) * sqrt((PRIOR_PAIRS + spread) / df / total)
    return Estimate(centre, centre - half, centre + half, n, sum(map(len, pairs)), confidence)


def verdict(estimate: Estimate, threshold: float = 0.02) -> Verdict:
    """What an interval says about a gain of `threshold` (0.02: B does 2 % more steps per second).

    faster: the whole interval lies above the threshold; slower: all of it lies below the threshold's mirror image
    (A gains that much over B); no_difference: it excludes a gain of the threshold, so B is not worth having;
    inconclusive: it includes both. A claim below 5 % from fewer than three pairs is inconclusive.
    """
    gain = log1p(threshold)
    small = abs(estimate.log_ratio) < SMALL_CLAIM and estimate.pairs < FEWEST_PAIRS
    if estimate.low > gain:
        return "inconclusive" if small else "faster"
    if estimate.high < -gain:
        return "inconclusive" if small else "slower"
    return "no_difference" if estimate.high < gain else "inconclusive"


def by_state(pairs: Pairs, states: Sequence[bool], confidence: float = 0.95) -> Estimate:
    """The speed-up on average where A's process is slow by chance in some pairs (`states`: of each, whether it was) and B's never is.

    Some pairs show the whole gain and the others none, so their mean is uncertain although each is clear. Within a state pairs
    differ as little as ever; what is uncertain besides is how often a process is slow (Wilson's interval of that share). The
    three are independent, and their intervals are put together as in Zou and Donner (Statistics in Medicine 27, 2008).
    Raises ValueError unless both states were seen.
    """
    slow, other = (estimate([pair for pair, state in zip(pairs, states) if state is wanted], PRIOR_BETWEEN_SD, confidence)
                   for wanted in (True, False))
    share = slow.pairs / len(pairs)
    fewest, most = wilson(slow.pairs, len(pairs), confidence)
    centre = share * slow.log_ratio + (1 - share) * other.log_ratio
    within = hypot(share * (slow.high - slow.log_ratio), (1 - share) * (other.high - other.log_ratio))      # both are symmetric
    more = slow.log_ratio - other.log_ratio
    down, up = (share - fewest, most - share) if more > 0 else (most - share, share - fewest)
    return Estimate(centre, centre - hypot(within, more * down), centre + hypot(within, more * up),
                    len(pairs), slow.rounds + other.rounds, confidence)


def between_sd(aa_pairs: Pairs, prior: float = PRIOR_BETWEEN_SD) -> float:
    """Standard deviation of the bias between fresh pairs, from A/A races (their true log-ratio is zero).

    The mean of the observed squares, less what the noise of rounds explains, blended with a prior that counts for
    `PRIOR_PAIRS` pairs (the mean of an inverse-gamma posterior, up to its degrees of freedom). Pairs with fewer than
    two rounds carry no information and are left out; without any, the prior is returned.
    """
    known = [_pair(tuple(rounds)) for rounds in aa_pairs if len(rounds) > 1]
    observed = max(0.0, sum(m * m - e * e for m, e in known))
    return sqrt((PRIOR_PAIRS * prior**2 + observed) / (PRIOR_PAIRS + len(known)))


def noise_floor(aa_pairs: Pairs) -> float:
    """Half-width of the 95 % interval of this A/A race, as a share (0.012: 1.2 %): smaller gains cannot be seen with
    as many pairs. Raises ValueError without pairs."""
    found = estimate(aa_pairs, between_sd(aa_pairs))
    return expm1((found.high - found.low) / 2)


def look_confidence(max_pairs: int) -> float:
    """Confidence of the interval after each complete pair, such that the first verdict of up to `max_pairs` looks is
    wrong at most 5 % of the time."""
    if max_pairs <= len(POCOCK):
        return 1 - POCOCK[max_pairs - 1]
    return 1 - 0.05 / max_pairs


def next_action(
    pairs: Pairs,
    between_sd: float = PRIOR_BETWEEN_SD,
    threshold: float = 0.02,
    limits: Limits = Limits(),
    over: bool = False,
) -> Decision:
    """Sequential stopping: more rounds in the last pair, a new pair of fresh processes, or stop.

    A pair is complete when the noise of its rounds is half of the bias between pairs (more rounds would not help),
    or at `max_rounds`. Whether it is complete does not depend on the ratio, so the looks that count are one per pair,
    and `look_confidence` pays for them. Inside a pair a verdict is only taken at `EARLY_LEVEL`, for differences that
    leave no doubt. `over`: time or the script ended the race, not a ratio, so the last pair counts as complete. The
    returned estimate is the one decided by: its interval stays valid under this stopping rule.
    """
    if not pairs or not pairs[-1]:
        return Decision("new_pair" if not pairs else "more_rounds", "inconclusive", None, "nothing measured yet")
    last = tuple(pairs[-1])
    if len(last) < max(2, 0 if over else limits.min_rounds):
        return Decision("more_rounds", "inconclusive", None, f"{len(last)} rounds in this pair")
    complete = over or len(last) >= limits.max_rounds or _pair(last)[1] <= between_sd / 2
    confidence = look_confidence(limits.max_pairs) if complete else 1 - EARLY_LEVEL
    found = estimate(pairs, between_sd, confidence)
    answer = verdict(found, threshold)
    if answer != "inconclusive":
        return Decision("stop", answer, found, f"the {100 * confidence:.1f} % interval decides")
    if not complete:
        return Decision("more_rounds", answer, found, "the rounds of this pair still scatter")
    if over or len(pairs) >= limits.max_pairs:
        return Decision("stop", answer, found, f"undecided after {len(pairs)} pairs")
    return Decision("new_pair", answer, found, "the bias between pairs of processes still hides the difference")
