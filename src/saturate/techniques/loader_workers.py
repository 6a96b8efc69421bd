"""Load and prepare batches in worker processes, ahead of the training step.

What it does
------------
Gives DataLoaders that run in the training process some worker processes, keeps them alive between epochs, and may let
them work further ahead. Where the script has workers already, other numbers of them are tried too. Where several loaders take turns,
a loader's workers live on from its second pass.

When it helps
-------------
The step waits for its input: decoding, augmentation, tokenization, slow storage.

When it hurts
-------------
No core is left for the workers, or batches are so cheap that handing them over costs more than making them. Each worker
holds a copy of what the dataset touches. Datasets that count or cache inside `__getitem__` do so once per worker.

If the script changes its dataset between epochs, or seeds anew, workers are restarted. If it does so within a pass, the training
process makes the remaining batches of that pass, and if that happens again, all batches from then on. To notice changes, all lists,
dictionaries, arrays and tables of the dataset are read when a pass begins (a million numbers, or 50 MB, in some 10 ms); if that takes more
than a hundredth of the time, workers are restarted for each pass instead. A change inside other objects of a library in C or Rust
reaches the workers only when they are restarted.

Numerics
--------
`stream`: random augmentation draws from each worker's own seed. Batches come in the same order as without workers, for which three
differences of torch are evened out:

- torch draws one random number when it starts workers for an epoch, but not where they persist, which would shuffle later epochs
  differently. For workers that persist because of this technique it is drawn all the same. Later epochs are in another order only
  if items draw from torch's own generator, which also shuffles the loader.
- With workers a sampler is asked for its first batches, and draws its seed, when a pass begins; without, at the first `next`. Workers that
  this technique adds get their first work at the first `next` too, so that `zip(a, b)` of two loaders shuffles as without.
- What a sampler draws from a generator of the script's for batches that are requested ahead (as RandomSampler does behind its last index)
  becomes visible when the training reaches them.

Because batches are requested ahead, a sampler that goes on where the last pass ended would skip some when a pass is left early. A sampler
that is or holds an iterator, or sets attributes between two indices, is left alone; one that keeps its place in another way (in a list)
is not recognised. A sampler that draws between two indices from the global generators is left alone, too. Workers are seeded from
torch's generator, or from the loader's own: if a script seeds that before a pass (an evaluation that sees the same crops each time, an
epoch that can be resumed), they restart with it. A seed for python's `random` or numpy alone does not reach them.

How it is applied
-----------------
Arguments of `DataLoader` that stand at their defaults are changed when it is built; with `override` also a number of workers that
the script chose. Counts respect the CPU quota, memory and /dev/shm. A copy of a loader, or a pickled one, restarts its workers for
each pass. Left alone are:

- iterable datasets (each worker would read everything), and loaders of fewer than two batches;
- datasets that hold device tensors or open files;
- datasets with a random generator of their own (or of their transforms, as in MONAI and albumentations): each worker would draw the same
  from its copy; a line on stderr says so;
- where workers are spawned: datasets that cannot be pickled, and scripts that would train in such a worker (without
  `if __name__ == "__main__":`);
- samplers that keep their place, and a loader that a dataset reads inside of a worker.

If workers fail because a dataset or its collate function uses CUDA, calls the model that is being trained (to choose hard examples,
say) or makes batches that cannot be pickled (a generator, an object of a local class), or if the kernel ends them for want of memory, the
training process makes the batches from there on. (Where the script has workers itself, it ends as it would without this technique, unless
they are of a dataset of which another loader was given some.) Not noticed are items that are computed from the model's parameters without
a call of a module, from a copy of the model that the script updates beside it (an average of its weights), or by workers that are not
forked (which hold a copy of the model as well), nor where the dataset itself catches the error. A batch over which a worker fails for
another reason is made once more in the training process, which raises there what the script alone would raise, if anything. Where no
process can be started, there are no workers.

References
----------
PyTorch documentation, "torch.utils.data", sections "Single- and Multi-process Data Loading" and "Platform-specific
behaviors".
PyTorch recipes, "Performance Tuning Guide", section "Enable asynchronous data loading and augmentation".
"""

from __future__ import annotations

import contextlib
import math
import multiprocessing
import os
import tempfile
import weakref
from dataclasses import dataclass, field
from typing import Any

from saturate import notices, ranks
from saturate.records.facts import Evidence, Facts, LoaderFacts
from saturate.techniques import _common, _loaders, _passes_with_workers
from saturate.techniques._api import Eligible, Ineligible, Proof, Technique, Touch
from saturate.techniques._given import Given, referable
from saturate.techniques._standard import standard

TECHNIQUE = Technique(
    id="loader-workers",
    title="DataLoader workers",
    numerics="stream",
    stage="import",
    touches=(Touch("loader", 10), Touch("loader-workers")),
)

#: The note on why loaders are left alone; of as many reasons at most.
LEFT_ALONE = f"{TECHNIQUE.id}:left alone"
MOST_REASONS = 3

#: Open files that a training with workers may have, where the system allows so many.
MOST_FILES = 65_536

#: Batches that each worker keeps ready by default (torch's own).
PREFETCH = 2


#: Why some loaders have none.
_ITERABLE = "the dataset is iterable: workers would change what is read"
_IN_A_WORKER = "it is read inside of a worker, which can have none of its own"


#: Bytes that the folder of temporary files may have in its path, so that a socket of `multiprocessing` below it has no more than the 107
#: of unix(7): it is bound to "pymp-XXXXXXXX/listener-XXXXXXXX" there.
MOST_OF_A_PATH = 107 - len("/pymp-XXXXXXXX/listener-XXXXXXXX")


@dataclass(frozen=True)
class Options:
    """`prefetch` counts batches per worker. `override`: loaders that have workers get this number of them, too."""

    workers: int = field(default=1, metadata={"minimum": 1, "maximum": 4096})
    persistent: bool = True
    prefetch: int = field(default=PREFETCH, metadata={"minimum": 1, "maximum": 4096})
    override: bool = False


def _refusal(loader: LoaderFacts) -> str:
    if loader.iterable:
        return _ITERABLE
    if loader.holds_device_tensors:
        return "the dataset yields tensors that live on a device already"
    return ""


def eligible(facts: Facts) -> Eligible | Ineligible:
    answer = _common.waits_for_loaders(facts, _refusal)
    if answer and _most_workers(facts) < 1:
        return Ineligible("/dev/shm or memory does not hold one batch more")
    if answer and not variants(facts):
        return Ineligible("the script chose persistence and prefetching itself, and as many workers as there are cores for")
    return answer


def _most_workers(facts: Facts, prefetch: int = PREFETCH) -> int:
    """Workers that the CPU quota, half of /dev/shm and a tenth of memory allow this rank."""
    batch = max((loader.batch_bytes or 0 for loader in facts.loaders), default=0)
    memory = facts.machine.memory_bytes
    limits = [per for per in (facts.machine.shm_bytes, memory // 5 if memory is not None else None) if per is not None]
    most = _common.per_rank(facts.machine.cpu_count, facts)
    for limit in limits:
        if batch > 0:
            most = min(most, int(limit / 2 / max(1, facts.world_size) // (batch * (prefetch + 1))))
    return most


def variants(facts: Facts) -> list[Options]:
    most = _most_workers(facts)
    if most < 1:
        return []
    if all(loader.num_workers for loader in facts.loaders if not _refusal(loader)):
        return _beside_the_scripts(facts, most)
    needed = _needed(facts, most, facts.input_wait_ms)
    # Never fewer than needed: where a warm cache makes batches, one worker races as fast as many, and a cold epoch waits for it.
    counts = dict.fromkeys([needed, most, max(needed, most // 2)])
    found = [Options(workers=count) for count in counts]
    if _most_workers(facts, 2 * PREFETCH) >= found[0].workers:
        found.append(Options(workers=found[0].workers, prefetch=2 * PREFETCH))
    return found


def _beside_the_scripts(facts: Facts, most: int) -> list[Options]:
    """For loaders that all have workers: other numbers of them, and what the script left at its default."""
    loaders = [loader for loader in facts.loaders if not _refusal(loader)]
    count = max((loader.num_workers for loader in loaders), default=1)
    most = min(most, _most_workers(facts, max((loader.prefetch_factor or PREFETCH for loader in loaders), default=PREFETCH)))
    # They make a batch in each step together: one of them takes as many steps as there are.
    needed = _needed(facts, most, count * facts.step_ms)
    others = [Options(workers=number, override=True) for number in dict.fromkeys([needed, most]) if number != count]
    settings = []
    if any(loader.prefetch_factor in (None, PREFETCH) for loader in loaders) and _most_workers(facts, 2 * PREFETCH) >= min(count, most):
        settings.append(Options(workers=count, prefetch=2 * PREFETCH))
    if not all(loader.persistent_workers for loader in loaders):
        settings.append(Options(workers=count))
    return [*others, *settings] if needed > count else [*settings, *others]


def _needed(facts: Facts, most: int, batch_ms: float) -> int:
    """As many workers as it takes to make a batch, which takes one of them `batch_ms`, in the time that the rest of the step takes."""
    rest = facts.step_ms - _common.exposed_input_ms(facts)
    if not (rest > 0 and batch_ms > 0):
        return most
    return max(1, min(most, math.ceil(min(batch_ms / rest, most))))


def bound(facts: Facts) -> float | None:
    return _common.waiting(facts)


def apply(context: Any, options: Options) -> str:
    count = 0
    made_persistent: weakref.WeakValueDictionary[int, Any] = weakref.WeakValueDictionary()     # datasets by id
    given_workers = Given()
    reasons: dict[str, None] = {}

    def leave_alone(reason: str) -> None:
        reasons[reason] = None
        context.note(LEFT_ALONE, "; ".join(list(reasons)[:MOST_REASONS]))

    def rewrite(dataset: Any, arguments: dict[str, Any], given: frozenset[str]) -> dict[str, Any]:
        nonlocal count
        if reason := _left_alone(dataset, arguments, options, context.torch):
            leave_alone(reason)
            return {}
        changes = _changes(dataset, arguments, options)
        if "persistent_workers" in changes:
            made_persistent[id(dataset)] = dataset
        if "num_workers" in changes and not arguments.get("num_workers"):
            given_workers.add(dataset)
            _allow_files()
        if changes:
            count += 1
            context.note(TECHNIQUE.id, f"{count} DataLoader(s) rewritten")
        return changes

    def ours(loader: Any) -> bool:
        return loader.persistent_workers and made_persistent.get(id(loader.dataset)) is loader.dataset

    def lost(loader: Any) -> str:
        reason = _lost(loader, given_workers)
        if reason:
            leave_alone(reason)
        return reason

    context.on_loader(rewrite)
    _passes_with_workers.keep(context, ours, given_workers, lost, _say_once)
    also = ", whatever the script chose" if options.override else ""
    return f"DataLoaders get up to {options.workers} workers{also}, persistent {options.persistent}, prefetch {options.prefetch}"


def _allow_files() -> None:
    """Each tensor of a worker's is an open file for as long as it lives, and a training may keep some of every batch."""
    resource = standard("resource")
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = MOST_FILES if hard == resource.RLIM_INFINITY else min(hard, MOST_FILES)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        with contextlib.suppress(OSError, ValueError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


def _lost(loader: Any, given: Given) -> str:
    """Why a loader that has workers cannot keep them, or ""."""
    if multiprocessing.current_process().daemon:
        return _IN_A_WORKER
    if loader not in given:
        return ""
    file = _loaders.shared_file(loader.dataset, loader.collate_fn)
    return f"its workers would share an open file ({file})" if file else _draws_alone(loader.dataset, loader.collate_fn)


def _draws_alone(dataset: Any, collate_fn: Any) -> str:
    """Why each worker would draw the same numbers as the others, or "": then the loader gets none, and a line on stderr says so."""
    own = _loaders.own_generator(dataset, collate_fn)
    return _said(f"{type(dataset).__name__} or its collate_fn has a random generator of its own ({own}): each worker would draw "
                 "the same numbers from a copy of it") if own else ""


def _draws_between(sampler: Any) -> str:
    """Why a sampler that is asked ahead would draw before the training what it draws after it, or "": a line on stderr says so."""
    kind = _loaders.draws_as_it_goes(sampler)
    return _said(f"{kind} draws random numbers between two indices: asked for batches ahead by workers, it would draw them before "
                 "those that the training draws") if kind else ""


def _said(reason: str) -> str:
    _say_once(f"{reason}, so there are none")
    return reason


def _say_once(line: str) -> None:
    if ranks.rank() == 0:
        notices.tell_once(f"saturate: {TECHNIQUE.id}: {line}\n")


def _left_alone(dataset: Any, arguments: dict[str, Any], options: Options, torch: Any) -> str:
    """Why nothing is changed about a DataLoader, or ""."""
    if isinstance(dataset, torch.utils.data.IterableDataset):
        return _ITERABLE
    if multiprocessing.current_process().daemon:
        return _IN_A_WORKER
    samplers = arguments.get("sampler"), arguments.get("batch_sampler")
    for sampler in samplers:
        if _loaders.keeps_its_place(sampler):
            return f"{type(sampler).__name__} may go on where the last pass was left: workers are asked for batches ahead"
    if arguments.get("num_workers") and not options.override:
        return ""
    if _loaders.batches(dataset, arguments) < 2:
        return "it has fewer than two batches"
    if torch.multiprocessing.get_sharing_strategy() == "file_descriptor" and len(os.fsencode(tempfile.gettempdir())) > MOST_OF_A_PATH:
        return (f"tensors of workers come through a socket in {tempfile.gettempdir()}, and there its path is longer than Linux allows, so that no batch "
                "would arrive: name a shorter folder in TMPDIR")
    if not _loaders.may_have_workers(dataset, arguments, torch):
        return f"workers cannot receive {type(dataset).__name__}: it holds tensors of a device or an open file, or cannot be brought to spawned ones"
    return _draws_alone(dataset, arguments.get("collate_fn")) or next(filter(None, map(_draws_between, samplers)), "")


def _changes(dataset: Any, arguments: dict[str, Any], options: Options) -> dict[str, Any]:
    """What to change about one DataLoader that can have workers. An argument that the user gave its default value counts as left alone:
    frameworks pass all of them."""
    changes: dict[str, Any] = {}
    workers = arguments.get("num_workers") or 0
    if (not workers or options.override) and (count := min(options.workers, _loaders.batches(dataset, arguments))) != workers:
        changes["num_workers"] = count
        if not workers and arguments.get("multiprocessing_context") is None:
            changes["multiprocessing_context"] = _loaders.start_method()    # else to start them settles it for the script
    # `_keep_order` must know a persistent one again.
    if options.persistent and referable(dataset) and not arguments.get("persistent_workers"):
        changes["persistent_workers"] = True
    if options.prefetch != PREFETCH and arguments.get("prefetch_factor") is None:
        changes["prefetch_factor"] = options.prefetch
    return changes


def active(evidence: Evidence, options: Options) -> Proof:
    seen, reason = evidence.notes.get(TECHNIQUE.id, ""), evidence.notes.get(LEFT_ALONE, "")
    why = f": {reason}" if reason else ""
    if not seen:
        return Proof(False, f"no DataLoader was rewritten{why}")
    if not any(loader.num_workers for loader in evidence.loaders):
        return Proof(False, f"the DataLoader that the training reads from has no workers{why}")
    if not evidence.live_workers:
        return Proof(False, "no worker process was seen alive")
    return Proof(True, f"{seen}, {evidence.live_workers} worker processes alive")


def as_code(options: Options) -> str:
    return (
        f"loader = DataLoader(dataset, ..., num_workers={options.workers}, "
        f"persistent_workers={options.persistent}, prefetch_factor={options.prefetch})"
    )
