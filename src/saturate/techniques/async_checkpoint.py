"""Let training go on while its checkpoints are written.

What it does
------------
`torch.save` returns once a consistent copy of the state is staged; the file is written meanwhile, atomically: a
temporary file, fsync, rename, fsync of the folder. Whatever then looks at the file waits until it is there. A crash at
any byte leaves the previous checkpoint whole. The same holds for safetensors, for Lightning's saves, and for
`torch.distributed.checkpoint.save`, whose shards get new names where the folder holds a checkpoint already: it is the old one until
`.metadata` names the new ones.

When it helps
-------------
Checkpoints of hundreds of megabytes or more, disks slower than memory, trainings that leave a core or the disk idle.
Also where nothing gets faster: a plain `torch.save` that is killed leaves a file that does not load.

When it hurts
-------------
Host memory holds the state once more, and the disk needs room for the new file beside the old one. If there is room for only one of
them, `torch.save` overwrites the old one, as it does by itself, and a line on stderr says that this save was not atomic; safetensors,
Lightning and distributed checkpoints keep the old one, and fail. Where processor and disk are busy anyway, writing later costs as much
as writing now. So in mode "auto" the ways to write (now, by a thread, by a helper process) are measured in the run itself, slowdown of
the steps included, and the cheapest in total is chosen. A barrier right after the save waits for the file, because other ranks may open it
then. A process that is already running and learns of the file in some other way (a queue, a reduced flag) may look too early.

Numerics
--------
`exact`: no computation is touched. When `torch.save` returns, the copy is complete, or ordered before all later work of
the GPU, so no later write can tear it. Files hold what `torch.save` would have written, record by record.

How it is applied
-----------------
torch's zip writer is replaced by one that stages. Functions of `os`, `open`, ways to start processes and distributed
barriers first check whether a file is pending that they could see, announce (`latest`) or outlive. If a write fails, a line on
stderr says so, and the next save raises its OSError; so does, until then, anything that would announce a checkpoint beside it or remove
another one. In the end the exit code is nonzero.

Saved plainly, and as slowly as before, are files that are not regular, have hard links or may not be replaced, and saves in torch's old
format, into memory, and into files that the script opened itself (`with open(path, "wb") as f: torch.save(state, f)`): what the script does
with such a file next (write on, fsync, rename) must find all bytes there. Give `torch.save` the path instead.

References
----------
PyTorch documentation, "torch.save" and "Distributed Checkpoint", section on asynchronous saves.
Mohan et al., "CheckFreq: Frequent, Fine-Grained DNN Checkpointing", FAST 2021.
"""

from __future__ import annotations

import atexit
import json
import os
import time
from dataclasses import dataclass
from typing import Any, Literal

from saturate import notices
from saturate.records.facts import Evidence, Facts
from saturate.techniques._api import Eligible, Ineligible, NotApplied, Proof, Technique, Touch

TECHNIQUE = Technique(
    id="async-checkpoint",
    title="asynchronous, atomic checkpoints",
    numerics="exact",
    stage="import",
    touches=(Touch("checkpoint-writer"),),
)

#: The note with `checkpoints.costs.Costs.summary` as JSON, as of the latest save.
COSTS_NOTE = f"{TECHNIQUE.id}:costs"

#: What a rank may tell others by: they may open its files afterwards.
_BARRIERS = ("barrier", "monitored_barrier", "all_gather_object", "gather_object", "broadcast_object_list",
             "scatter_object_list", "destroy_process_group")


@dataclass(frozen=True)
class Options:
    """`mode`: "auto" measures which way costs least; "thread", "process" and "sync" are the ways."""

    mode: Literal["auto", "thread", "process", "sync"] = "auto"


def eligible(facts: Facts) -> Eligible | Ineligible:
    if not facts.saves and facts.saves_into_files:
        return Ineligible(f"{facts.saves_into_files} save(s) went into files that the script opened itself, and stay synchronous: the "
                          "script may write on, or read them back at once; give torch.save the path instead")
    if not facts.saves:
        return Ineligible("no checkpoint was saved in the steps observed; add it to the recipe by hand: "
                          f"[[technique]] id = \"{TECHNIQUE.id}\"")
    return Eligible(f"{facts.saves} save(s) of {facts.save_bytes / facts.saves / 1e6:,.1f} MB took "
                    f"{facts.save_s / facts.saves:.3f} s each")


def apply(context: Any, options: Options) -> str:
    from saturate.checkpoints import seams
    from saturate.checkpoints.costs import Costs
    from saturate.checkpoints.guards import Guards
    from saturate.checkpoints.writer import Writer

    if os.name != "posix":
        raise NotApplied("files cannot be replaced atomically here")
    ways = [way for way in ("sync", "thread", "process") if way != "process" or hasattr(os, "memfd_create")]
    costs = Costs(ways, None if options.mode == "auto" else options.mode)

    def note(text: str) -> None:
        context.note(TECHNIQUE.id, text)
        context.note(COSTS_NOTE, json.dumps(costs.summary()))

    writer = Writer(context.torch, costs, note)
    guards = Guards(writer)
    context.on_undo(guards.undo)
    guards.install()
    covered = seams.install(context.torch, writer, guards, context.set_attribute)
    _watch_steps(context, writer, guards)
    _hold_barriers(context, guards)
    _at_exit(context, writer, guards)
    return f"{', '.join(covered)}: staged, then written atomically ({options.mode})"


def _watch_steps(context: Any, writer: Any, guards: Any) -> None:
    """Time steps with and without a file on its way; the first one without gives deadly signals back. The first one with holds them where
    a thread of the script's own has saved, which may not."""
    from torch.optim.optimizer import register_optimizer_step_post_hook

    def stepped(optimizer: Any, args: Any, kwargs: Any) -> None:
        writing = bool(writer.pending)
        writer.costs.step(time.perf_counter(), writing)
        if not writing:
            guards.release_signals()
        elif not guards.signals_held:
            guards.hold_signals()

    context.on_undo(register_optimizer_step_post_hook(stepped).remove)


def _hold_barriers(context: Any, guards: Any) -> None:
    from saturate.checkpoints.guards import holders

    distributed = context.torch.distributed
    if not distributed.is_available():
        return
    held = {id(barrier): guards.waiting(barrier) for barrier in (getattr(distributed, name) for name in _BARRIERS)}
    for module, name, barrier in holders(held):         # the script may have taken one by name
        context.set_attribute(module, name, held[id(barrier)])


def _at_exit(context: Any, writer: Any, guards: Any) -> None:
    def finish() -> None:
        guards.at_exit()
        if (writer.costs.files or writer.costs.left_alone) and not writer.foreign:
            notices.tell(f"saturate: {TECHNIQUE.id}: {writer.describe()}\n")

    atexit.register(finish)
    context.on_undo(lambda: atexit.unregister(finish))


def active(evidence: Evidence, options: Options) -> Proof:
    seen = evidence.notes.get(TECHNIQUE.id, "")
    return Proof("checkpoint(s)" in seen, seen or "no checkpoint was saved")


def as_code(options: Options) -> str:
    later = options.mode != "sync"
    imports = ("import copy\nimport os\nfrom concurrent.futures import ThreadPoolExecutor\nfrom torch.utils._pytree import tree_leaves\n"
               if later else "import os\n")
    write = (
        "\n"
        "def write(state, path):\n"
        "    with open(f\"{path}.tmp\", \"wb\") as file:\n"
        "        torch.save(state, file)\n"
        "        file.flush()\n"
        "        os.fsync(file.fileno())\n"
        "    os.replace(f\"{path}.tmp\", path)      # whole or not at all\n"
        "    folder = os.open(os.path.dirname(os.path.abspath(path)), os.O_RDONLY)\n"
        "    os.fsync(folder)\n"
        "    os.close(folder)\n"
        "\n"
    )
    if not later:
        return f"{imports}{write}write(state, path)      # in place of torch.save(state, path)"
    return (
        f"{imports}{write}"
        "writer = ThreadPoolExecutor(max_workers=1)\n"
        "# In place of torch.save(state, path); the training may go on once the copy is there:\n"
        "clones = {id(leaf): leaf.detach().to(\"cpu\", copy=True) for leaf in tree_leaves(state) if torch.is_tensor(leaf)}\n"
        "saving = writer.submit(write, copy.deepcopy(state, clones), path)\n"
        "# Before the next save, before anything reads the file, and at the end:\n"
        "saving.result()      # waits, and raises what the write raised"
    )
