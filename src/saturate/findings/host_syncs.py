"""The host stops inside the step to read a value.

What it means
-------------
`.item()`, `.cpu()`, printing a tensor, or `if tensor:` make the host wait until the device has computed the value.
Meanwhile it launches nothing, so the device runs dry afterwards. On a CPU there is nothing to wait for, but each
read leaves the tensor library, and a loop that reads one element at a time spends the step in the interpreter.

Evidence
--------
On an accelerator: how long the host waits, the idle time of the device while the host waited or was late, and for
each place in the source, or operator that waits inside (`nonzero`, a mask as an index), the waits per step and their
time. On a CPU: reads per step and their time.

Threshold
---------
On an accelerator: 5 % of the step, which is both waited for and idle because of the host. On a CPU: at least 1 read
per step, and reads that take 2 % of the step. Where there are at least 10 % as many reads as operators, they are a
loop over elements, and the bound includes the interpreter around them.

Not to be confused with
-----------------------
Copies to the device from pageable memory: they make the host wait too, and `pageable-copies` reports them. Waiting
while the device is busy: the host has nothing better to do, and loses nothing. A host that is always late, waits or
not: then it is launch-bound. Tiny operators: the reads themselves are operators, so they are not blamed on
launches.

What helps
----------
Read values every so many steps, or collect tensors and read them together. Keep decisions on the device
(`torch.where`). Print numbers that were read once.

References
----------
PyTorch recipes, "Performance Tuning Guide", section "Avoid unnecessary CPU-GPU synchronization". NVIDIA Nsight
Systems, expert system rule "CUDA Synchronization APIs".
"""

from __future__ import annotations

from saturate.findings._api import Rule
from saturate.findings._common import (
    at_most,
    concludes,
    finding,
    number,
    of_step,
    per_step,
    percent,
    reaches,
    without,
)
from saturate.findings._host import mendable, reading, reads, waited
from saturate.records.analysis import Evidence, Finding
from saturate.records.observations import Observations, SyncSeen

RULE = Rule(id="host-syncs", title="the host waits for values", needs=frozenset({"steps", "gaps"}))

#: Lost by waits, of the step.
LEAST = 0.05
#: On a CPU: reads per step, and their time, of the step.
LEAST_READS = 1.0
LEAST_READING = 0.02
#: Places that are named.
PLACES = 3


def detect(seen: Observations) -> Finding | None:
    if not concludes(seen, RULE):
        return None
    return _on_cpu(seen) if seen.device == "cpu" else _on_device(seen)


def _on_device(seen: Observations) -> Finding | None:
    idle, places = seen.sync_idle, reads(seen)
    if idle is None or (seen.syncs and not places):
        return None
    waiting = waited(seen, places)
    if places and waiting is not None:
        lost = mendable(seen, waiting)
    else:  # which waits there were is not known: all of them but the copies
        lost = at_most(without(idle, per_step(seen.copies.pageable_ms, seen.step_ms)))
    if not reaches(lost, LEAST):
        return None
    reason = f"Waiting for values of the device costs up to {percent(lost)} of the step{_first(places)}."
    evidence = [
        of_step("idle that these waits can cause", lost, LEAST),
        *number("waits of the host", waiting, "of the step"),
        *number("idle while the host waited", idle, "of the step"),
    ]
    return finding(RULE, seen, reason, evidence + _places(places), lost, direct=bool(places), advice=_ADVICE)


def _on_cpu(seen: Observations) -> Finding | None:
    places = reads(seen)
    calls = sum(one.calls_per_step for one in places)
    share = waited(seen, places)
    if share is None or not calls >= LEAST_READS or not reaches(share, LEAST_READING):
        return None
    lost = reading(seen)
    reason = f"{calls:.0f} reads of values per step take {percent(share)} of it{_first(places)}."
    evidence = [of_step("reads of values", share, LEAST_READING), *number("reads", calls, "per step", LEAST_READS)]
    return finding(RULE, seen, reason, evidence + _places(places), lost, advice=_ADVICE)


_ADVICE = "read values every so many steps, or collect them and read them together"


def _by_time(places: tuple[SyncSeen, ...]) -> list[SyncSeen]:
    return sorted(places, key=lambda one: (-one.ms_per_step, one.where))


def _first(places: tuple[SyncSeen, ...]) -> str:
    return f", most of it at {first.where} ({first.what})" if places and (first := _by_time(places)[0]).where else ""


def _places(places: tuple[SyncSeen, ...]) -> list[Evidence]:
    return [
        Evidence(metric=one.what or "wait", value=one.ms_per_step, unit="ms per step", where=one.where)
        for one in _by_time(places)[:PLACES]
    ]
