"""What became of a technique in a search, and how a race is read for it."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from saturate.records.result import TechniqueOutcome
from saturate.study.candidates import Candidate, Set, names
from saturate.study.racing import Result
from saturate.trial.process import TrialEnded

#: Fates of candidates whose trial did not come to an end by itself; all others failed.
FATES = {"not_applied": "not_applied", "not_active": "not_applied", "motif_differs": "rejected_numerics",
         "trains_otherwise": "rejected_numerics", "too_short": "inconclusive", "not_in_time": "inconclusive", "diverged": "inconclusive"}

#: Of a kept technique that the final set was not raced without.
UNCHECKED = "whether the final set needs it was not checked"


@dataclass
class Fate:
    """What is known of one technique so far."""

    fate: str
    reason: str
    candidate: Candidate | None = None
    gain: float | None = None
    gain_ci: tuple[float, float] | None = None

    def is_open(self, threshold: float) -> bool:
        """Whether a gain that counts (`threshold`) is neither shown nor excluded: undecided, and its interval reaches that far."""
        return self.fate == "inconclusive" and (self.gain_ci is None or self.gain_ci[1] > threshold)

    def with_word(self, word: str) -> Fate:
        """The same, with more to its reason."""
        return replace(self, reason=f"{self.reason}; {word}")

    def outcome(self, identity: str, numerics: str) -> TechniqueOutcome:
        return TechniqueOutcome(
            id=identity, fate=self.fate, reason=self.reason, numerics=numerics,  # type: ignore[arg-type]
            options=self.candidate.options_dict() if self.candidate else {}, gain=self.gain, gain_ci=self.gain_ci,
        )


def leads(later: Result, earlier: Result) -> bool:
    """Whether a later variant of a technique is ahead of an earlier one by more than one standard error of their difference.
    The most promising comes first, for reasons that a race on warm steps may not see (a cold first epoch, for one), and the
    fastest of several readings that scatter is often the luckiest."""
    ahead = math.log1p(later.gain) - math.log1p(earlier.gain)
    widths = [math.log1p(high) - math.log1p(low) for low, high in (one.gain_ci or (0.0, 0.0) for one in (later, earlier))]
    scatter = math.hypot(*widths) / (2 * 1.96)
    return ahead > (scatter if math.isfinite(scatter) else 0.0)


def how(ended: TrialEnded) -> str:
    """How a trial ended, in words."""
    return f"{ended.outcome.kind.replace('_', ' ')}: {ended.outcome.reason}"


def of_end(ended: TrialEnded, against: Set) -> tuple[str, str]:
    """Fate and reason of a candidate whose comparison with a set without it a process did not live through. The end of the one that
    is without the candidate says nothing of it."""
    if ended.side == "a":
        return "inconclusive", f"{names(against)}, which it was compared with, ended: {how(ended)}"
    return FATES.get(ended.outcome.kind, "failed"), how(ended)


def cut_short(known: Fate, candidate: Candidate, fate: str, reason: str) -> Fate:
    """What is known of a technique after a race that ended so. What was earned before, by the kept set or by another variant that
    was measured, stays as it is, with a word of this."""
    if known.fate == "kept":
        return known.with_word(f"{UNCHECKED}: {reason}")
    if known.gain is not None and known.candidate != candidate:
        return known.with_word(f"{candidate.label()}: {fate.replace('_', ' ')}, {reason}")
    return replace(known, fate=fate, reason=reason, candidate=candidate)


def in_words(result: Result) -> tuple[str, str]:
    """Fate and reason of a raced candidate. "kept" means: fast enough to be kept, if it verifies."""
    low, high = result.gain_ci or (math.nan, math.nan)
    interval = f"[{low:+.1%}, {high:+.1%}]"
    verdict = result.decision.verdict
    if verdict == "faster":
        return "kept", f"{result.gain:+.1%} {interval}"
    if verdict == "slower":
        return "slower", f"{result.gain:+.1%} {interval}"
    if verdict == "no_difference":
        return "no_difference", f"{result.gain:+.1%} {interval}: less than counts"
    return "inconclusive", f"{result.gain:+.1%} {interval}: could be more or less than counts"
