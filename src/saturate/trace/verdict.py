"""What limits a device: one word, from the breakdown and the roofline. Definitions: docs/analysis.md.

A device that computes during 85 % of the window or more is compute- or memory-bound if half of its modelled time is.
On a CPU, where the same processor calls and computes, it is host-bound if half of it is operators that have next to
nothing to do. Otherwise the verdict is the largest of exposed input wait, exposed communication, and the idle time that came from
late launches, waiting hosts, and work that was queued already.
"""

from __future__ import annotations

from collections.abc import Mapping

from saturate.records.analysis import Limit, Roofline

BUSY_AT_LEAST = 0.85            # of the window
CLASS_AT_LEAST = 0.50           # of the modelled time
COVERED_AT_LEAST = 0.60         # modelled of the kernel time: less says nothing about the whole


def verdict(window_ns: int, compute_ns: int, losses: Mapping[Limit, int], others: Mapping[str, int],
            roofline: Roofline, calls: Limit | None = None) -> tuple[Limit, str]:
    """The limit, and where it is unknown the reason. `calls`: what operators argue for that are too short to be near a ceiling.

    Nanoseconds of the window: `compute_ns` computing, `losses` by the limit that they argue for, `others` by the
    name of what has no limit of its own (gaps without a cause, exposed copies).
    """
    if not window_ns:
        return "unknown", "there is no time to explain"
    if compute_ns >= BUSY_AT_LEAST * window_ns:
        limit = _by_roofline(roofline, calls)
        if limit:
            return limit, ""
        covered = "none" if roofline.coverage is None else f"{roofline.coverage:.0%}"
        return "unknown", (f"the device computes for {compute_ns / window_ns:.0%} of the window and the roofline "
                           f"models {covered} of its time, so computation and memory cannot be told apart")
    if max(losses.values(), default=0) <= sum(others.values()):
        parts = [f"{name} ({ns / window_ns:.0%} of the window)" for name, ns in others.items() if ns]
        return "unknown", f"no limit is named for the largest loss: {' and '.join(parts) or 'nothing was lost'}"
    return max(losses, key=lambda limit: losses[limit]), ""


def _by_roofline(roofline: Roofline, calls: Limit | None) -> Limit | None:
    if roofline.coverage is None or roofline.coverage < COVERED_AT_LEAST:
        return None
    modelled = {"compute": 0, "memory": 0, "latency": 0}
    for operator in roofline.operators:
        if operator.limit is not None:
            modelled[operator.limit] += operator.time_ns
    total = sum(modelled.values())
    for kind, limit in (("compute", "compute-bound"), ("memory", "memory-bound"), ("latency", calls)):
        if total and modelled[kind] >= CLASS_AT_LEAST * total:
            return limit        # type: ignore[return-value]
    return None
