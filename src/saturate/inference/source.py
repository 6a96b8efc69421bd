"""The user's model and inputs on their way to the candidates' processes: a private folder that each of them opens.

The model stays as it is in the user's process. What is written is a copy of it (where it lives on a GPU, on the CPU),
some batches of the inputs, batches for calibration, and how the user trains. Tensors are mapped into memory where
they are read, so that many processes share one copy of the weights.
"""

from __future__ import annotations

import dataclasses
import json
import os
import shutil
import stat
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from saturate.checkpoints import durable
from saturate.errors import EnvironmentProblem, UsageError
from saturate.inference import batches, identity, pickles, session
from saturate.inference.called import device_of, find
from saturate.inference.techniques._api import Train
from saturate.records.inference import ModelFacts

_MANIFEST = "source.json"
_MODEL, _INPUTS, _OTHERS, _CALIBRATION, _TRAIN, _LOADER, _FACTS = (
    "model.pt", "inputs.pt", "others.pt", "calibration.pt", "train.pt", "loader.pt", "facts.pt")
_EXPORTS = "exports"


class NotMade(Exception):
    """This process does not find the modules of the model, or not as they were where it came from; the message is Python's error."""


@dataclass(frozen=True)
class Source:
    """What was written. `notes` are sentences for the user."""

    folder: Path
    kind: str                   # class name of the model; "" where there is none (an artifact brings its own)
    device: str                 # "cpu", "cuda" or "cuda:1"
    training: bool              # the model came in training mode
    threads: int                # torch's, in the user's process
    batches: int                # measured ones
    calibration_samples: int
    trainable: bool
    student: bool
    generates: bool             # what is called is the module's method `generate`
    model_hash: str
    inputs_hash: str            # of measured and calibration batches
    notes: tuple[str, ...]
    train_hash: str = ""        # of how the user trains; "" without
    switches: dict[str, str] = field(default_factory=dict, hash=False)      # of torch, see `session.of_process`; of none on a CPU

    @staticmethod
    def write(folder: Path, model: Any, inputs: Any, calibration: Any = None, train: Train | None = None, *,
              device: str | None = None, switches: dict[str, str] | None = None) -> Source:
        """Write all that a candidate needs into `folder`, which becomes private.

        `model`: an nn.Module, a bound method of one, or `functools.partial` of either; None where only artifacts will
        be run. `inputs`, `calibration`: see `batches.take`; without calibration, inputs are split. `device`: where all of
        it will run; None: where the model is, the CPU without one. `switches`: of torch, that each process starts with; None:
        those of this process where that is a GPU.
        Raises UsageError for what cannot be used, EnvironmentProblem where the file system refuses.
        """
        import torch

        folder = Path(folder)
        called, notes = find(torch, model)
        devices: set[str] = set()
        measured = given = batches.take(torch, inputs, devices=devices)
        calibrate = [] if calibration is None else batches.take(torch, calibration, "calibration")
        if called is not None:
            for what, taken in (("inputs", measured), ("calibration", calibrate)):
                for batch in taken:
                    batches.check_call(called.function(called.module), batch, what)
            device = device or device_of(called.module, devices)
        device = device or "cpu"
        if switches is None:
            switches = {} if device == "cpu" else session.of_process(torch)
        if calibration is None:
            measured, calibrate, more = batches.split(torch, measured)
            notes += more
        else:
            measured, rest = batches.without_last(torch, measured)
            if rest:
                notes.append("the last batch of inputs is smaller than the others and is not measured")
        others = batches.of_other_sizes(torch, batches.without_last(torch, given)[0], measured)
        _check_train(train)
        _make_private(folder)
        for name in (_MANIFEST, _FACTS):        # of an earlier model
            (folder / name).unlink(missing_ok=True)
        _remove_exports(folder)
        if called is not None:
            pickles.save(torch, called, folder / _MODEL, "the model")
        pickles.save(torch, measured, folder / _INPUTS, "inputs")
        pickles.save(torch, others, folder / _OTHERS, "inputs")
        pickles.save(torch, calibrate, folder / _CALIBRATION, "calibration")
        pickles.save(torch, train and dataclasses.replace(train, loader=None), folder / _TRAIN, "train")
        pickles.save(torch, train and train.loader, folder / _LOADER, "train")
        made = Source(
            folder=folder, kind=type(called.module).__name__ if called else "", device=device,
            training=called is not None and called.module.training, threads=torch.get_num_threads(),
            batches=len(measured), calibration_samples=batches.total_samples(torch, calibrate),
            trainable=train is not None,
            student=train is not None and train.student is not None, generates=called is not None and called.method == "generate",
            model_hash=identity.of_model(torch, called.module, called.words()) if called else "",
            inputs_hash=identity.of_batches(torch, measured, calibrate), notes=tuple(notes),
            train_hash=identity.of_train(torch, train), switches=switches,
        )
        with _writing(folder):
            made._describe()
        return made

    def serving(self, folder: Path, batch: tuple[Any, ...], *, model: bool) -> Source:
        """The same model, or none (an artifact brings its own), for another batch: a new folder. The file of the model is the same, so
        everything in it is where it was. Raises EnvironmentProblem."""
        made = Source.write(folder, None, [batch], [batch], device=self.device, switches=self.switches)
        if not model:
            return made
        check_private(self.folder)
        made = dataclasses.replace(made, kind=self.kind, training=self.training, model_hash=self.model_hash)
        with _writing(folder):
            (folder / _MODEL).unlink(missing_ok=True)
            try:
                os.link(self.folder / _MODEL, folder / _MODEL)
            except OSError:             # not every file system has links
                shutil.copyfile(self.folder / _MODEL, folder / _MODEL)
            made._describe()
        return made

    def _describe(self) -> None:
        """Write the manifest: what `open` reads. Raises OSError."""
        text = json.dumps({one.name: getattr(self, one.name) for one in dataclasses.fields(self) if one.name != "folder"})
        durable.replace(self.folder / _MANIFEST, lambda stream: stream.write(text.encode()))

    @property
    def identity(self) -> str:
        """Of the model and its inputs."""
        return f"{self.model_hash} {self.inputs_hash}"

    @staticmethod
    def open(folder: Path, identity: str | None = None) -> Source:
        """What `write` left in `folder`. Raises EnvironmentProblem where it is not there, others could have changed
        it, or another model or other inputs than those of `identity` are in its place by now."""
        folder = Path(folder)
        check_private(folder)
        try:
            fields = json.loads((folder / _MANIFEST).read_text(encoding="utf-8"))
            found = Source(folder=folder, **{**fields, "notes": tuple(fields["notes"])})
        except (OSError, ValueError, TypeError, KeyError) as error:
            raise EnvironmentProblem(f"{folder} holds no source of a search",
                                     cause=f"{type(error).__name__}: {error}",
                                     remedy="run the search again") from error
        if identity not in (None, found.identity):
            raise EnvironmentProblem(f"{folder} holds another model, or other inputs, than this search began with",
                                     cause="another search has worked in the same folder since",
                                     remedy="run the search again, in a folder of its own: workdir (--workdir DIR)")
        return found

    def model(self, torch: Any, *, in_place: bool = False) -> Any:
        """A module in the mode in which it came; a method of one is a module of its own here. It is on the CPU, or (`in_place`) on the
        device that it came from: `to` moves weights and buffers, but no tensor that is a plain attribute or an argument that was
        given already. Raises NotMade."""
        check_private(self.folder)
        try:
            module = pickles.load(torch, self.folder / _MODEL, None if in_place else "cpu").as_module(torch)
        except (ImportError, AttributeError) as error:
            raise NotMade(f"{type(error).__name__}: {error}") from error
        _as_constructed(module)
        return module

    def inputs(self, torch: Any, device: str = "cpu") -> list[tuple[Any, ...]]:
        """The measured batches. A candidate's process asks for them on its device; the search has them on the CPU, where it compares
        what is answered to them, and leaves a GPU's memory to the candidates."""
        check_private(self.folder)
        return pickles.load(torch, self.folder / _INPUTS, device)

    def others(self, torch: Any, device: str = "cpu") -> list[tuple[Any, ...]]:
        """Batches of the inputs that are not measured and have sizes that no measured one has, where `inputs` are."""
        check_private(self.folder)
        return pickles.load(torch, self.folder / _OTHERS, device)

    def calibration(self, torch: Any) -> list[tuple[Any, ...]]:
        """The batches for calibration, on the CPU."""
        check_private(self.folder)
        return pickles.load(torch, self.folder / _CALIBRATION)

    def train(self, torch: Any) -> Train | None:
        """How the user trains. What the loss holds (weights of classes, for one) is where it was, beside the model; the data is on the
        CPU, from where each batch is moved: every candidate has this, and most do not train."""
        check_private(self.folder)
        train = pickles.load(torch, self.folder / _TRAIN, "cpu" if self.device == "cpu" else None)
        return train and dataclasses.replace(train, loader=pickles.load(torch, self.folder / _LOADER))

    def facts(self, torch: Any) -> ModelFacts | None:
        """What the first process found out about the model; None: none did yet."""
        check_private(self.folder)
        return pickles.load(torch, self.folder / _FACTS) if (self.folder / _FACTS).exists() else None

    @property
    def exports(self) -> Path:
        """A folder that the first candidate who exports the model makes for all (see `techniques._onnx_exports`)."""
        return self.folder / _EXPORTS

    @property
    def headers(self) -> Path:
        """A folder for what compilers make of headers of C++ (see `launching.make_temporary`)."""
        return self.folder / "inductor" / "precompiled_headers"

    def without_shared(self) -> None:
        """Remove what candidates have left for each other and is large: exports (a copy of the model's weights each), compiled headers (150 MB
        each). Who needs one makes it again."""
        with suppress(OSError):
            _remove_exports(self.folder)
        shutil.rmtree(self.headers, ignore_errors=True)

    def keep_facts(self, torch: Any, facts: ModelFacts) -> None:
        pickles.save(torch, facts, self.folder / _FACTS, "facts")


def _as_constructed(module: Any) -> None:
    """Tell transformers what it is told where a model of it is constructed: which outputs (hidden states, attentions) it may collect of a
    class. It keeps that for each process, and this one was given a model that another one had constructed."""
    told = getattr(sys.modules.get("transformers.modeling_utils"), "_CAN_RECORD_REGISTRY", None)
    for part in module.modules() if isinstance(told, dict) else ():
        if (outputs := getattr(part, "_can_record_outputs", None)) is not None:
            dict.__setitem__(told, str(type(part)), outputs)        # its own class of a dictionary would take the model as a key


def without_model(folder: Path) -> None:
    """Remove the model from what `Source.write` wrote, of which no process is started any more: it may be gigabytes."""
    with suppress(OSError):
        (folder / _MODEL).unlink(missing_ok=True)


def _remove_exports(folder: Path) -> None:
    """Raises OSError where they stay."""
    if os.path.lexists(folder / _EXPORTS):
        shutil.rmtree(folder / _EXPORTS)


def _check_train(train: Train | None) -> None:
    if train is None:
        return
    if not isinstance(train, Train):
        raise UsageError(f"`train` is a {type(train).__name__}", remedy="train=saturate.Train(loader=..., loss=...)")
    if not callable(train.loss):
        raise UsageError("`train.loss` cannot be called", cause=f"it is a {type(train.loss).__name__}",
                         remedy="train.loss=torch.nn.functional.cross_entropy, or a function of (output, target)")
    if not isinstance(train.loader, Iterable) and not hasattr(type(train.loader), "__getitem__"):
        raise UsageError(f"`train.loader` is a {type(train.loader).__name__}", cause="it cannot be iterated over",
                         remedy="give an iterable of tuples (*inputs, target): a DataLoader, a list")
    if hasattr(train.loader, "__next__"):       # iter() would start the processes of a DataLoader
        raise UsageError("`train.loader` can be read only once",
                         cause="it is an iterator, and each epoch of each candidate starts anew",
                         remedy="give a DataLoader, a list, or an object whose __iter__ starts over")


@contextmanager
def _writing(folder: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise EnvironmentProblem(f"{folder} cannot be written to", cause=str(error),
                                 remedy="free some space, or choose another folder with workdir") from error


def _make_private(folder: Path) -> None:
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)       # at once: a search that is killed behind this goes on in its workdir
        status = folder.lstat()
        if stat.S_ISDIR(status.st_mode) and status.st_uid == os.geteuid():
            folder.chmod(0o700)
    except OSError as error:
        raise EnvironmentProblem(f"the folder {folder} cannot be made", cause=str(error),
                                 remedy="choose another one with workdir") from error
    check_private(folder)


def check_private(folder: Path) -> None:
    """Raises EnvironmentProblem unless `folder` belongs to this user, who alone can reach what is in it: what lies
    there is unpickled, which runs whatever it says."""
    try:
        status = folder.lstat()
    except OSError as error:
        raise EnvironmentProblem(f"there is no folder {folder}", cause=str(error),
                                 remedy="run the search again") from error
    if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.geteuid() or stat.S_IMODE(status.st_mode) & 0o077:
        raise EnvironmentProblem(f"{folder} is not private",
                                 cause="it is a link, belongs to another user, or others may enter it",
                                 remedy="choose a folder of your own with workdir; saturate makes it private")
