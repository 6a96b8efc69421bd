"""Choose how many CPU threads a single operation uses, where they run, and how they wait.

What it does
------------
Sets the number of OpenMP threads, and optionally binds them to cores or lets idle ones sleep at once.

When it helps
-------------
Containers whose CPU quota is below the machine's core count (PyTorch counts the machine's cores); small models, for which
starting threads costs more than they save; loader workers that compete with spinning threads.

When it hurts
-------------
Large operations with too few threads. Sleeping threads take longer to wake, so many tiny parallel operations suffer.
Where threads are bound, those that the script starts in Python, and programs that it starts (spawned loader workers too), have only
the core of the thread that starts them.

Numerics
--------
`reordering`: reductions are split among another number of threads.

How it is applied
-----------------
Through environment variables of the new process. Bound threads pin the main thread too, and forked loader workers would
inherit its single core, so each forked child gets the process's full set of cores back.

References
----------
PyTorch documentation, "CPU threading and TorchScript inference", section "Tuning the number of threads".
PyTorch recipes, "Performance Tuning Guide", section "Utilize OpenMP".
OpenMP API Specification, environment variables OMP_NUM_THREADS, OMP_PROC_BIND, OMP_PLACES, OMP_WAIT_POLICY.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from typing import Any

from saturate.records.facts import Evidence, Facts
from saturate.techniques import _common
from saturate.techniques._api import Eligible, Ineligible, Proof, Technique, Touch

TECHNIQUE = Technique(
    id="cpu-threads",
    title="CPU threads",
    numerics="reordering",
    stage="environment",
    touches=(Touch("cpu-threads"),),
)


@dataclass(frozen=True)
class Options:
    """`threads` per process; `bind` pins them to cores; `passive` lets idle threads sleep instead of spin."""

    threads: int = field(default=1, metadata={"minimum": 1, "maximum": 4096})     # beyond that OpenMP ends the process
    bind: bool = False
    passive: bool = False


def eligible(facts: Facts) -> Eligible | Ineligible:
    cores = _common.per_rank(facts.machine.cpu_count, facts)
    if facts.threads > cores:
        return Eligible(f"{facts.threads} threads for {cores} core(s)")
    if facts.device != "cpu":
        return Ineligible("the training computes on an accelerator and does not use more threads than cores")
    if cores == 1 and facts.threads == 1:
        return Ineligible("one core and one thread: nothing to choose")
    return Eligible(f"{facts.threads} thread(s) on {cores} core(s)")


def variants(facts: Facts) -> list[Options]:
    cores = _common.per_rank(facts.machine.cpu_count, facts)
    physical = min(cores, _common.per_rank(facts.machine.physical_cores or cores, facts))
    counts = dict.fromkeys([physical, cores, max(1, cores // 2), 1])
    found = [Options(threads=count) for count in counts if count != facts.threads]
    if cores > 1:
        # Not bound beside loader workers, nor for several ranks: all of them would choose the same cores.
        if facts.world_size == 1 and not any(loader.num_workers for loader in facts.loaders):
            found.append(Options(threads=physical, bind=True))
        found.append(Options(threads=physical, passive=True))
    return found or [Options(threads=cores)]


def environment(options: Options) -> dict[str, str]:
    variables = {"OMP_NUM_THREADS": str(options.threads), "MKL_NUM_THREADS": str(options.threads)}
    if options.bind:
        variables |= {"OMP_PROC_BIND": "close", "OMP_PLACES": "cores"}
    if options.passive:
        variables["OMP_WAIT_POLICY"] = "PASSIVE"
    return variables


def apply(context: Any, options: Options) -> str:
    if options.bind and hasattr(os, "sched_setaffinity"):
        everything = _cores_of_the_process()
        os.register_at_fork(after_in_child=lambda: os.sched_setaffinity(0, everything))
    context.note(TECHNIQUE.id, f"{options.threads} threads requested")
    return f"{options.threads} CPU threads, bound {options.bind}, passive waiting {options.passive}"


def _cores_of_the_process() -> set[int]:
    """Cores allowed before OpenMP bound the calling thread: those of the parent, which started this process."""
    try:
        return set(os.sched_getaffinity(os.getppid())) | set(os.sched_getaffinity(0))
    except OSError:         # the parent is gone or belongs to somebody else
        return set(os.sched_getaffinity(0))


def active(evidence: Evidence, options: Options) -> Proof:
    wanted = environment(options)
    missing = [name for name, value in wanted.items() if evidence.environment.get(name) != value]
    if missing:
        return Proof(False, f"the process does not have {', '.join(missing)} as set")
    if evidence.threads != options.threads:
        return Proof(False, f"torch uses {evidence.threads} thread(s): the script sets the number itself")
    return Proof(True, f"torch uses {evidence.threads} thread(s)")


def as_code(options: Options) -> str:
    lines = ["# in the shell, before Python starts:", *(f"export {name}={value}" for name, value in environment(options).items())]
    if options.bind:
        lines += [
            "# in the script, where a loader has workers: they would all share the one core that the main thread is bound to",
            "import functools",
            "import os",
            "",
            "def on_cores(cores, worker):",
            "    os.sched_setaffinity(0, cores)",
            "",
            "cores = os.sched_getaffinity(os.getppid()) | os.sched_getaffinity(0)",
            "loader = DataLoader(dataset, ..., worker_init_fn=functools.partial(on_cores, cores))",
        ]
    return "\n".join(lines)
