"""An ONNX file of the model, made once for all candidates that begin with one.

Of what it takes to prepare a small model for a runtime, exporting it is most (`bench/candidate_start.py`), and the runtimes, their
8-bit programs, each repair of those and what is stored in the end all begin with the same file. The first candidate leaves it in
`Context.exports`, where nobody writes to it any more; the others read it there. A refusal is kept as well, for each would meet it again.
"""

from __future__ import annotations

import copy
import json
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from saturate.inference import structure
from saturate.inference.techniques._api import FOR_ALL_S, Context, NotApplied

#: The file with the graph; where its weights lie beside it, that is `model.onnx.data`.
NAME = "model.onnx"

_ABOUT = "export.json"


@dataclass(frozen=True)
class Exported:
    """An ONNX file, the signature with which it is called (see `formats._program`), the classes of
    its output, of each value in the graph the modules that made it, as in `named_modules`, and whether it gathers the
    nearest pixels of an interpolation (`_onnx_interpolation`)."""

    path: Path
    signature: dict[str, Any]
    classes: dict[str, type]
    owners: dict[str, frozenset[str]]
    gathered: bool = False

    def sizes(self) -> str:
        """What it may be called with, for the user."""
        free = sorted({size for tensor in self.signature["tensors"] for size in tensor["shape"] if isinstance(size, str)})
        return f"{len(free)} free size(s)" if free else "only for the shapes of these inputs"


def once(context: Context, make: Callable[[Path], Exported]) -> Exported:
    """What `make` exports the context's model to, in a folder that it is given; or what it made for another candidate.

    Raises what `make` raises, and NotApplied with the reason that it had for another candidate.
    """
    if context.exports is None:
        return make(context.folder)
    if not context.exports.is_dir():
        mine = context.folder / "export"
        mine.mkdir()
        began = time.monotonic()
        _describe(mine, make)
        context.notes[FOR_ALL_S] = str(time.monotonic() - began)
        try:
            mine.rename(context.exports)        # whole, or not at all
        except OSError:
            if not context.exports.is_dir():    # another candidate was first, which is as good
                raise
    return _described(context, context.exports)


def _describe(folder: Path, make: Callable[[Path], Exported]) -> None:
    """Let `make` export into the folder, and write what is to be known about that. Raises what it raises, but for a NotApplied that the next
    candidate would meet as well."""
    try:
        made = make(folder)
        about: dict[str, Any] = {"signature": made.signature, "gathered": made.gathered, "owners": {name: sorted(modules) for name, modules in made.owners.items()}}
    except NotApplied as error:
        if _of_the_moment(error):
            raise
        about = {"refused": str(error)}
    (folder / _ABOUT).write_text(json.dumps(about), encoding="utf-8")


def _described(context: Context, folder: Path) -> Exported:
    about = json.loads((folder / _ABOUT).read_text(encoding="utf-8"))
    if "refused" in about:
        raise NotApplied(about["refused"])
    owners = {name: frozenset(modules) for name, modules in about["owners"].items()}
    return Exported(folder / NAME, about["signature"], _classes(context), owners, about["gathered"])


def _classes(context: Context) -> dict[str, type]:
    """Of an answer. They are this process's own: those of a script have no module that others could import."""
    with context.torch.no_grad():
        return structure.classes_in(context.model(*copy.deepcopy(context.inputs[0])))       # a model may write to its inputs


def _of_the_moment(error: BaseException) -> bool:
    """Whether it, or what it came from, is about memory or files: there may be more of that later."""
    seen: BaseException | None = error
    while seen is not None:
        if isinstance(seen, (MemoryError, OSError)) or "memory" in str(seen).lower():
            return True
        seen = seen.__cause__
    return False
