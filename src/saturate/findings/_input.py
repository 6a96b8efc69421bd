"""What the rules about input share: how long is too long, and what the pipeline is short of."""

from __future__ import annotations

import math
from typing import Literal

from saturate.findings._api import Rule
from saturate.findings._common import concludes, finding, number, of_step, percent, reaches
from saturate.records.analysis import Evidence, Finding
from saturate.records.observations import LoaderSeen, Observations

#: Exposed wait for input, of the step.
INPUT_WAIT = 0.10
#: Share of a fetch that computes, below which it mostly waits; and share that waits for storage.
FETCH_COMPUTES = 0.5
FETCH_WAITS = 0.5
#: Cores that nothing uses: at least this many, and at least this share of all.
SPARE_CORES = 0.3
SPARE_SHARE = 0.1

#: The technique that helps a TensorDataset, and nothing else.
ROWS_AT_ONCE = "batch-assembly"

Shortage = Literal["cpu", "io", "workers"]


def shortage(loader: LoaderSeen, waited: float) -> Shortage | None:
    """What keeps the pipeline from delivering in time; None where the observations do not tell. `waited`: how long the step waits for
    it, of the step."""
    workers, all_cores, free = loader.num_workers, loader.cpu_count, _free_cores(loader)
    if reaches(loader.io_wait, FETCH_WAITS):
        return "io"
    if loader.fetch_cpu is None or workers is None or not loader.fetch_cpu >= 0.0:
        return None
    if loader.fetch_cpu < FETCH_COMPUTES:
        return None if workers and _taken_by_others(loader, waited) else "io"
    if workers == 0 or free is False:
        return "cpu"  # fetched in the training process itself, where cores do not matter yet, or no core is left
    if free and all_cores is not None and workers < all_cores:
        return "workers"
    return None


def _free_cores(loader: LoaderSeen) -> bool | None:
    """Whether some cores have nothing to do."""
    if loader.cpu_count is None or loader.busy_cores is None or not 0.0 < loader.cpu_count < math.inf:
        return None
    return loader.cpu_count - loader.busy_cores >= max(SPARE_CORES, SPARE_SHARE * loader.cpu_count)


def _taken_by_others(loader: LoaderSeen, waited: float) -> bool:
    """Whether no core is free although the training waits and its workers sleep: other programs have the cores then, and a batch that is
    handed over late, from process to process, looks the same as one that waits for storage. Where the wait is short, the time that is left to
    others is too: half of it tells."""
    if _free_cores(loader) is not False:
        return False
    assert loader.cpu_count is not None and loader.busy_cores is not None
    most = max(SPARE_CORES, SPARE_SHARE * loader.cpu_count)
    return loader.busy_cores > (1.0 - waited) * loader.cpu_count + min(most, waited * loader.cpu_count / 2)


def waits(rule: Rule, seen: Observations, kind: Shortage | None) -> bool:
    """Whether the step waits for input, and for this reason."""
    waited = seen.input_wait
    return concludes(seen, rule) and reaches(waited, INPUT_WAIT) and shortage(seen.loader, waited or 0.0) == kind


def waiting(
    rule: Rule, seen: Observations, because: str, evidence: list[Evidence], advice: str, direct: bool = True
) -> Finding:
    """The finding, where `waits` holds."""
    wait = seen.input_wait or 0.0
    place = f", slowest at {seen.loader.slowest}" if seen.loader.slowest else ""
    return finding(
        rule,
        seen,
        f"The next batch is waited for in {percent(wait)} of the step: {because}{place}.",
        [
            of_step("exposed wait for input", wait, INPUT_WAIT, seen.loader.slowest),
            *evidence,
            *number("wait for input, hidden or not", seen.input_wait_raw, "of the step"),
        ],
        wait if seen.device == "cpu" else may_vanish(seen, wait),
        direct=direct,
        techniques=_helping(rule, seen.loader),
        advice=advice,
    )


def _helping(rule: Rule, loader: LoaderSeen) -> tuple[str, ...]:
    """The rule's techniques without the one for rows that are stacked one by one, unless that is what the loader does."""
    return tuple(name for name in rule.techniques if name != ROWS_AT_ONCE or loader.tensor_rows)


def may_vanish(seen: Observations, wait: float) -> float:
    """The most that can vanish with the wait, on an accelerator: the host comes earlier by all of it, also by what the device's work hid, and
    with that goes what it does idly before its next launch; but never more than the device is idle."""
    if seen.input_wait_raw is None or seen.busy is None:
        return wait
    return max(wait, min(seen.input_wait_raw, 1.0 - seen.busy))


def cores(loader: LoaderSeen) -> list[Evidence]:
    """How many cores are busy, of how many."""
    return [*number("busy cores", loader.busy_cores, "cores"), *number("usable cores", loader.cpu_count, "cores")]
