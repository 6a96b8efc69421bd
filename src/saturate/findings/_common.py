"""What the rules share: when something may be concluded, which shares make sense, how a finding is put together."""

from __future__ import annotations

import math

from saturate.findings._api import STEPS_FOR_HIGH, STEPS_FOR_MEDIUM, STEPS_TO_CONCLUDE, Rule, bound
from saturate.records.analysis import Confidence, Evidence, Finding
from saturate.records.observations import Observations

#: The largest share that a bound divides by the rest of: what is left of more is smaller than the error of any share.
MOST = 0.99

_LEVELS: tuple[Confidence, ...] = ("low", "medium", "high")


def concludes(seen: Observations, rule: Rule) -> bool:
    """Whether enough steps were observed and the trace carries what the rule needs."""
    return seen.steps >= STEPS_TO_CONCLUDE and not rule.needs & seen.integrity_blocks


def reaches(share: float | None, threshold: float) -> bool:
    """Whether a share is known and at least `threshold`. False for NaN, and for more than the whole: that is an error
    in what was observed, not good news."""
    return share is not None and threshold <= share <= 1.0


def below(share: float | None, threshold: float) -> bool:
    """Whether a share is known and less than `threshold`."""
    return share is not None and 0.0 <= share < threshold


def per_step(ms: float | None, step_ms: float | None) -> float | None:
    """Milliseconds per step as a share of the step, at most 1: `ms` may be from steps that a profiler made longer."""
    if ms is None or step_ms is None or not (ms >= 0.0 and step_ms > 0.0):
        return None
    return min(1.0, ms / step_ms)


def recorded_ms(seen: Observations) -> float | None:
    """Length of the steps that host times per step are from: a profiler makes both longer."""
    return seen.step_ms if seen.step_ms_recorded is None else seen.step_ms_recorded


def without(share: float | None, *parts: float | None) -> float | None:
    """What is left of a share when the parts of it that are known to have another cause are taken away."""
    return None if share is None else max(0.0, share - sum(part for part in parts if part is not None and part > 0.0))


def at_most(*shares: float | None) -> float:
    """Sum of the known shares, as a share: the most that can vanish together."""
    return min(1.0, sum(share for share in shares if share is not None and share > 0.0))


def one_line(text: str, most: int = 160) -> str:
    """Text from elsewhere (a compiler's reason, a name) as part of a sentence."""
    words = " ".join(text.split())
    return words if len(words) <= most else f"{words[: most - 3]}..."


def percent(share: float) -> str:
    return f"{100 * share:.1f} %"


def of_step(metric: str, share: float, threshold: float | None = None, where: str = "") -> Evidence:
    return Evidence(metric=metric, value=share, unit="of the step", threshold=threshold, where=where)


def number(
    metric: str, value: float | None, unit: str = "", threshold: float | None = None, where: str = ""
) -> list[Evidence]:
    """The evidence, or none where the number is not known or makes no sense."""
    if value is None or not math.isfinite(value):
        return []
    return [Evidence(metric=metric, value=float(value), unit=unit, threshold=threshold, where=where)]


def finding(
    rule: Rule,
    seen: Observations,
    reason: str,
    evidence: list[Evidence],
    lost: float | None,
    *,
    direct: bool = True,
    techniques: tuple[str, ...] | None = None,
    advice: str = "",
) -> Finding:
    """`lost` is the largest share of the step that could vanish; None: no bound is known. `direct`: the evidence is
    the cause itself, not a symptom that has other causes too."""
    return Finding(
        id=rule.id,
        title=rule.title,
        reason=reason,
        evidence=evidence,
        bound=None if lost is None else bound(min(lost, MOST)),
        confidence=_confidence(seen, direct),
        techniques=list(rule.techniques if techniques is None else techniques),
        advice=advice,
    )


def _confidence(seen: Observations, direct: bool) -> Confidence:
    """By the number of steps; one lower for indirect evidence and for a damaged trace each."""
    level = (seen.steps >= STEPS_FOR_MEDIUM) + (seen.steps >= STEPS_FOR_HIGH)
    return _LEVELS[max(0, level - (not direct) - bool(seen.integrity_blocks))]
