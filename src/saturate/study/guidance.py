"""In which order to try techniques: what the diagnosis of the baseline names comes first."""

from __future__ import annotations

from collections.abc import Sequence

from saturate.records.analysis import Finding

#: A technique that can remove no more of a step than this has its turn after those of which nobody can say anything.
LITTLE = 0.05

#: First parts of the key of a technique that nothing names: it takes minutes to find out; it can give but little.
SLOW, LAST = 3, 4


def promise(identity: str, bound: float | None, findings: Sequence[Finding], slow_start: bool = False) -> tuple[int, float]:
    """Sort key of a technique, the most promising first.

    `bound` is the largest share of a step (0 to 1) that it says it can remove; None: nothing bounds it. A finding that
    names it says how much its cause is worth, and that was seen in this workload. So the named come first, by what their
    largest finding could give and no more than their own bound; then the bounded; then those nobody can say anything of.
    What nothing names and takes minutes to find out (`slow_start`) comes after them: in that time several others have their
    turn. Last comes what can give but little.
    """
    shares = _shares(identity, findings)
    if shares:
        return 0, -min(max(shares), 1.0 if bound is None else bound)
    if bound is not None and bound <= LITTLE:
        return LAST, -bound
    if slow_start and not any(identity in finding.techniques for finding in findings):
        return SLOW, 0.0
    return (2, 0.0) if bound is None else (1, -bound)


def promised_gain(identity: str, bound: float | None, findings: Sequence[Finding]) -> float:
    """The most that the findings which name a technique let it give (0.5: half as fast again), within its own bound; 0 when
    none names it."""
    shares = _shares(identity, findings)
    share = min(max(shares, default=0.0), 1.0 if bound is None else bound)
    return 1.0 / (1.0 - share) - 1.0 if share < 1.0 else float("inf")


def _shares(identity: str, findings: Sequence[Finding]) -> list[float]:
    """Of a step, by finding that names it: what mending its cause could remove, 0 to 1."""
    return [1.0 - 1.0 / finding.bound for finding in findings if identity in finding.techniques and finding.bound]
