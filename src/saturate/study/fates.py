"""What became of a technique in a search, and how a race is read for it."""

from __future__ import annotations

import math
from dataclasses import dataclass

from saturate.records.result import TechniqueOutcome
from saturate.study.candidates import Candidate
from saturate.study.racing import Result

#: Fates of candidates whose trial did not come to an end by itself; all others failed.
FATES = {"not_applied": "not_applied", "not_active": "not_applied", "motif_differs": "rejected_numerics",
         "trains_otherwise": "rejected_numerics", "too_short": "inconclusive"}


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
