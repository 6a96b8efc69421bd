"""Keep Python's garbage collector from walking over the long-lived objects of a training.

What it does
------------
After some steps, everything that is alive (modules, parameters, datasets, imported libraries) is collected once and moved
to the collector's permanent generation; the threshold for the next collections is raised. The collector stays on, or off where
the script switched it off.

When it helps
-------------
Steps of a few milliseconds in processes with many Python objects, above all when ranks pause at different times and wait
for each other.

When it hurts
-------------
Objects that were frozen and are dropped later stay in memory if they are in a reference cycle, as models are, until the script calls
`gc.collect()`. That call takes as long as without this technique.

Numerics
--------
`exact`: no computation is touched.

How it is applied
-----------------
A hook after the first optimizer's step counts to `after_steps`, then calls `gc.collect`, `gc.freeze` and
`gc.set_threshold`, once. Without an optimizer this happens at once. When the script calls `gc.collect()`, frozen objects are looked at
too, and what is left is frozen again, unless the script had frozen something itself before.

References
----------
Python documentation, "gc - Garbage Collector interface", functions `freeze` and `set_threshold`.
"""

from __future__ import annotations

import functools
import gc
from dataclasses import dataclass, field
from typing import Any

from saturate.records.facts import Evidence, Facts
from saturate.techniques import _common
from saturate.techniques._api import Eligible, Ineligible, Proof, Technique, Touch

TECHNIQUE = Technique(
    id="gc-freeze",
    title="frozen garbage collector",
    numerics="exact",
    stage="model",
    acts_on="process",
    touches=(Touch("garbage-collector"),),
)

#: Share of the step below which pauses of the collector are not worth a trial.
LEAST_PAUSE = 0.005


@dataclass(frozen=True)
class Options:
    """`threshold` is the number of container allocations (less deallocations) between two collections."""

    threshold: int = field(default=50_000, metadata={"minimum": 1, "maximum": 2**31 - 1})     # a C int
    after_steps: int = field(default=3, metadata={"minimum": 1})


def eligible(facts: Facts) -> Eligible | Ineligible:
    if not facts.gc_enabled:
        return Ineligible("the script switched the collector off")
    pause = _common.share(facts.gc_ms_per_step, facts.step_ms)
    if pause is None or pause < LEAST_PAUSE:
        return Ineligible(f"the collector takes {pause or 0.0:.2%} of a step")
    return Eligible(f"the collector takes {pause:.1%} of a step, with {facts.gc_objects:,} objects tracked")


def bound(facts: Facts) -> float | None:
    return _common.share(facts.gc_ms_per_step, facts.step_ms)


def apply(context: Any, options: Options) -> str:
    already_frozen = gc.get_freeze_count()
    before: list[tuple[int, int, int]] = []     # the script's own thresholds, once ours are set

    def undo() -> None:
        if before:
            gc.set_threshold(*before.pop())
        if not already_frozen:      # freezing cannot be taken back in part
            gc.unfreeze()

    def freeze() -> None:
        gc.collect()
        gc.freeze()
        own = gc.get_threshold()
        if own[0]:                  # 0 switches the collector off
            before.append(own)
            gc.set_threshold(max(own[0], options.threshold), *own[1:])
        context.note(TECHNIQUE.id, f"{gc.get_freeze_count() - already_frozen} objects frozen")

    context.on_undo(undo)
    if not already_frozen:
        context.set_attribute(gc, "collect", _collecting_all(gc.collect))
    if not context.optimizers:
        freeze()
        return f"collector frozen, threshold {options.threshold}"
    left = options.after_steps

    # It stays behind: torch goes over an optimizer's hooks while it calls them, so none may remove itself.
    def count(optimizer: Any, args: Any, kwargs: Any) -> None:
        nonlocal left
        left -= 1
        if left == 0:
            freeze()

    context.on_undo(context.optimizers[0].register_step_post_hook(count).remove)
    return f"collector frozen after {options.after_steps} more steps, threshold {options.threshold}"


def _collecting_all(original: Any) -> Any:
    """`gc.collect`, which looks at frozen objects too where it is asked for all generations: a script that drops its model calls it for the
    memory."""

    @functools.wraps(original)
    def collect(*args: Any, **kwargs: Any) -> Any:
        if args or kwargs or not gc.get_freeze_count():
            return original(*args, **kwargs)
        gc.unfreeze()
        try:
            return original()
        finally:
            gc.freeze()

    return collect


def active(evidence: Evidence, options: Options) -> Proof:
    seen = evidence.notes.get(TECHNIQUE.id, "")
    if seen and evidence.gc_frozen:
        return Proof(True, seen)
    return Proof(False, "the collector's permanent generation was not filled")


def as_code(options: Options) -> str:
    return (
        f"import gc       # once, after {options.after_steps} steps:\n"
        "gc.collect()\n"
        "gc.freeze()\n"
        f"gc.set_threshold(max({options.threshold}, gc.get_threshold()[0]), *gc.get_threshold()[1:])"
    )
