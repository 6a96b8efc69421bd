"""Choose how many CPU threads one operation uses.

What it does
------------
Sets torch's number of threads for the process; runtimes of stage `runtime` take over the number.

When it helps
-------------
Small models, for which waking threads costs more than they save; machines with two logical processors to a core, whose
vector units two threads only share; containers whose quota is below the machine's core count.

When it hurts
-------------
Large operations with too few threads. A number that is best alone is not best beside other work on the machine.

Numerics
--------
`reordering`: sums are split among another number of threads.

How it is applied
-----------------
`torch.set_num_threads` before anything runs. Not more than the candidate may use. The proof is the number that torch
reports after the first call.

References
----------
PyTorch documentation, "CPU threading and TorchScript inference", section "Tuning the number of threads".
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from saturate.inference import session
from saturate.inference.techniques._api import Context, Eligible, Ineligible, NotApplied, Proof, Technique, Touch
from saturate.machine import facts as machine
from saturate.records.inference import ModelFacts

TECHNIQUE = Technique(
    id="threads",
    title="CPU threads",
    numerics="reordering",
    stage="session",
    touches=(Touch("threads"),),
)


@dataclass(frozen=True)
class Options:
    """`count` threads for one operation."""

    count: int = 1

    def __post_init__(self) -> None:
        if self.count < 1:
            raise ValueError(f"count is {self.count}, and must be at least 1")


def eligible(facts: ModelFacts) -> Eligible | Ineligible:
    if facts.device != "cpu":
        return Ineligible("the model computes on an accelerator")
    if not _counts(facts):
        return Ineligible("one core and one thread: nothing to choose")
    return Eligible(f"{facts.threads} thread(s) on {facts.cores} core(s)")


def _counts(facts: ModelFacts) -> list[int]:
    """One thread per core, all logical processors, one: without the number that is used already."""
    physical = min(machine.physical_cores() or facts.cores, facts.cores)
    return [count for count in dict.fromkeys([physical, facts.cores, 1]) if count >= 1 and count != facts.threads]


def variants(facts: ModelFacts) -> Sequence[Options]:
    return [Options(count) for count in _counts(facts)]


def apply(context: Context, options: Options) -> str:
    if options.count > context.threads:
        raise NotApplied(f"this candidate may use {context.threads} thread(s)")
    session.switch(context, "threads", options.count)
    context.threads = options.count
    return f"{options.count} CPU thread(s)"


def active(context: Context, options: Options) -> Proof:
    if session.switches(context).get("threads") != str(options.count):
        return Proof(False, "the number of threads was not set")
    found = context.torch.get_num_threads()
    return Proof(found == options.count, f"torch uses {found} thread(s)")


def as_code(options: Options) -> str:
    return f"torch.set_num_threads({options.count})"
