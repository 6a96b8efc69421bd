"""Write only what changed since the last checkpoint.

What it does
------------
`torch.save` to a path cuts the file that it would write into chunks and stores those that
the store does not hold yet, as differences from the chunk in the same place of the last checkpoint where that is
smaller. At the path stands a small file that names the checkpoint; `torch.load` under `saturate run` follows it, also
from a buffer that the script has read it into. Each checkpoint loads by itself: chunks that any checkpoint needs stay
until `saturate checkpoint gc` is told otherwise, whatever other files are removed.

The first two saves of a series (`ckpt_100.pt`, `ckpt_200.pt`) are plain and are compared; where that shows little to
gain, it says so and all saves stay plain. When the script ends, the newest checkpoint of each series becomes a plain
file, also under the names that `os.rename`, `os.replace` or `os.link` gave it; a copy by Python's `shutil` always is one.

When it helps
-------------
Scripts that keep many checkpoints: a frozen backbone with an adapter (about 1 % of the
bytes), sparse embeddings (5 %), dense training with AdamW (about half). It saves bytes written and kept, not time: a
save takes longer where deltas are coded.

When it hurts
-------------
While the script runs, programs that read the files in another way than `torch.load` or
`shutil` see the small ones: `cp`, `rsync` and uploads copy the name of a checkpoint and not the checkpoint.
`saturate checkpoint export FILE` makes it a plain one. A script that keeps only its newest checkpoints gains little,
because deltas depend on what was removed; when the store takes twice the room of plain files, saves are plain again.
Restoring reads up to `chain` + 1 versions of each chunk.

Numerics
--------
`exact`: a restored checkpoint holds the very bytes that `torch.save` wrote; each chunk is checked by its digest.

How it is applied
-----------------
`torch.save`, Lightning's writer, `shutil.copyfile` and the functions of `os` that rename files are wrapped. Saves to
streams, in torch's old format, in forked children, of less than 1 MiB, by other functions (safetensors, distributed
checkpoints) are left alone. If saving to the store fails (the disk is full, the store is gone), a plain save happens
instead, and one line on standard error says so. What a killed process left behind in a save is removed by the next save there.

References
----------
A. Eisenman et al., "Check-N-Run: a Checkpointing System for Training Deep Learning
Recommendation Models" (NSDI 2022).
"""

from __future__ import annotations

import atexit
import functools
import json
import os
import shutil
import sys
from dataclasses import dataclass, field
from pathlib import Path
from posix import getpid
from typing import Any

from saturate import notices
from saturate.checkpoints import keeper, pointer
from saturate.checkpoints.guards import holders
from saturate.records.facts import Evidence, Facts
from saturate.techniques._api import Eligible, Ineligible, Proof, Technique, Touch

TECHNIQUE = Technique(
    id="incremental-checkpoint",
    title="incremental checkpoints",
    numerics="exact",
    stage="import",
    touches=(Touch("checkpoint-writer"),),
    status="experimental",
)


#: Modules of Lightning that hold the name of its writer.
_LIGHTNING = ("lightning.fabric.plugins.io.torch_io", "lightning_fabric.plugins.io.torch_io")


@dataclass(frozen=True)
class Options:
    """`store` is a folder, from the working directory; `chain` is the most deltas between a chunk and one that stands
    by itself (0: no deltas); `memory_mib` bounds the copies of chunks that are kept to make deltas against, which are
    read from the store where they are not kept.
    """

    store: str = ".saturate/checkpoints"
    chain: int = field(default=8, metadata={"minimum": 0, "maximum": 255})
    memory_mib: int = field(default=512, metadata={"minimum": 0})


def eligible(facts: Facts) -> Eligible | Ineligible:
    return Ineligible("it saves bytes, not time, so no race can judge it; `saturate checkpoint advise --forecast OLD NEW` says "
                      "what it would save, and a recipe takes it by hand")


def apply(context: Any, options: Options) -> str:
    torch = context.torch

    def say(line: str) -> None:
        notices.tell(f"saturate: {line}\n")
        context.note(TECHNIQUE.id, line)

    keeping = keeper.Keeper(Path(options.store).absolute(), options.chain, options.memory_mib << 20, say)
    original = torch.save

    @functools.wraps(original)
    def save(obj: Any, f: Any, *args: Any, **kwargs: Any) -> None:
        new_format = len(args) < 3 and kwargs.get("_use_new_zipfile_serialization", True)
        if new_format and isinstance(f, str | os.PathLike) and isinstance(os.fspath(f), str):
            keeping.save(os.fspath(f), lambda target: original(obj, target, *args, **kwargs))
        else:
            original(obj, f, *args, **kwargs)

    # Where the script has put a function of its own for `torch.save`, that may call the other one: it is left alone.
    for module, name, _ in holders([id(original)]):
        context.set_attribute(module, name, save)
    for name in _LIGHTNING:
        module = sys.modules.get(name)
        if module is not None and hasattr(module, "_atomic_save"):
            context.set_attribute(module, "_atomic_save", _lightning(module._atomic_save, keeping, original))
    standing = {id(move): keeping.following(move, keeps=move is os.link) for move in (os.rename, os.replace, os.link)}
    standing[id(shutil.copyfile)] = pointer.copying(shutil.copyfile)
    for module, name, found in holders(standing):
        context.set_attribute(module, name, standing[id(found)])
    context.set_attribute(os, "_exit", _ending(os._exit, keeping.close))
    atexit.register(keeping.close)
    context.on_undo(lambda: (keeping.close(), atexit.unregister(keeping.close)))
    return f"torch.save keeps what changed in {options.store}, once a comparison shows that this saves bytes"


def _ending(leave: Any, close: Any) -> Any:
    """`os._exit`, which calls nothing that was registered for the end: that of a script, and of the watchdog."""
    owner = getpid()

    @functools.wraps(leave)
    def ending(status: int) -> None:
        if getpid() == owner:        # not a forked worker
            close()
        leave(status)

    return ending


def _lightning(original: Any, keeping: keeper.Keeper, torch_save: Any) -> Any:
    """Lightning's writer, which saves into memory first."""
    def atomic_save(checkpoint: Any, filepath: Any) -> None:
        def write(target: Any) -> None:
            if isinstance(target, str):
                original(checkpoint, filepath)
            else:
                torch_save(checkpoint, target)

        if "://" in str(filepath):
            original(checkpoint, filepath)
        else:
            keeping.save(os.fspath(filepath), write)

    return atomic_save


def active(evidence: Evidence, options: Options) -> Proof:
    note = evidence.notes.get(TECHNIQUE.id)
    return Proof(note is not None, note or "no two saves of one series were seen")


def as_code(options: Options) -> str:
    given = f"store = {json.dumps(options.store, ensure_ascii=False)}, chain = {options.chain}, memory_mib = {options.memory_mib}"
    return ("# There is nothing in torch to write for this; put it into a recipe:\n"
            f'# [[technique]]\n# id = "{TECHNIQUE.id}"\n# options = {{ {given} }}')
