"""The winner without saturate, as Python to copy: the three lines that call the stored program, and those that make it of
the user's model.

Each format writes its own three lines (`formats.*.lines`), which end in `answers`; imports are not counted. TensorRT's runtime
and models that generate take more lines than three. Each technique writes what it did to `model` (`as_code`), so that several may
stand one behind the other; what answers stands behind the last.
"""

from __future__ import annotations

import importlib
import re
from collections.abc import Callable
from pathlib import Path

from saturate.inference.techniques._api import Entry
from saturate.records.artifact import Manifest
from saturate.records.inference import CandidateRecord

#: What the lines that make a candidate take from the user, and what it is.
YOURS = {
    "model": "your model in evaluation mode, a torch.nn.Module that takes the inputs: where you call a method of one, or with more arguments, one that does so",
    "inputs": "one batch, a tuple",
    "calibration": "a list of batches that quantization may look at",
    "loader": "batches of training data, tuples (*inputs, target)",
    "loss": "your loss(output, target)",
    "make_student": "a function that makes the smaller network to train",
    "following": "with conv and norm: layers of the model that share a width",
}

#: What stands behind the lines of a candidate's techniques.
ANSWER = "with torch.no_grad():\n    answers = model(*inputs)"


def whole(parts: list[str], threads: int | None) -> str:
    """The lines of a candidate's techniques, in order, as lines that answer. `threads`: what it was measured with."""
    first = [] if threads is None else [f"torch.set_num_threads({threads})"]
    return "\n".join([*first, *parts, ANSWER])


def serving(entry: Entry, threads: int, place: Callable[[str], str]) -> str:
    """Three lines, imports aside, that call the stored program on `inputs` and end in `answers`, a flat list of what the
    model answered. `place` writes the path of a file of the artifact as Python."""
    module = importlib.import_module(f"saturate.inference.formats.{entry.format}")
    return module.lines(entry, threads, place)


def of_artifact(folder: Path, manifest: Manifest) -> str:
    """`serving`, of the artifact that is in `folder`."""
    entry = Entry(manifest.format, manifest.program, manifest.settings)
    return serving(entry, manifest.made_on.threads, lambda name: repr(str(folder.absolute() / name)))


def reproduce(record: CandidateRecord, model: str, entry: Entry, threads: int) -> str:
    """The module reproduce.py of an artifact. It finds the program beside itself: a path of the machine that made the
    artifact would be of no use on another, and is nobody's business there."""
    serve = serving(entry, threads, lambda name: f"Path(__file__).with_name({name!r})")
    make = record.code.strip("\n") or "# Nothing was changed: the model as it is."
    named = [f"# {name}: {meaning}" for name, meaning in YOURS.items() if re.search(rf"\b{name}\b", f"{serve}\n{make}")]
    about = f"{record.id}, without saturate; of {model}." if model else f"{record.id}, without saturate."
    return "\n".join([
        repr(about), "", *(["# Give these names first.", *named, ""] if named else []),
        "import torch", "from pathlib import Path", "", "# The program that is stored beside this file.", serve, "",
        "# The same, made again of your model. It writes files into the working directory: let that be another folder.", make, "",
    ])


__all__ = ["ANSWER", "YOURS", "of_artifact", "reproduce", "serving", "whole"]
