"""An artifact: a program in a folder, with what it takes to trust it elsewhere.

    manifest.json       records.artifact.Manifest: format, recipe, scores, machine, versions, digest of every file
    (program files)     as the format stored them: an ONNX file, a .pt2 package ...
    examples.bin        real inputs and what the program answered to them: raw tensors, described in the manifest
    reproduce.py        without saturate: how it is called, and how it is made again (see lines.py)

Nothing here is unpickled, ever. The digests show damage, of the manifest too, and a file that was replaced. They are no
signature: who can rewrite the manifest with its digest can make it name another program, and programs of machine code (AOTInductor, TensorRT) are to
be trusted like any other compiled library.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import importlib
import os
import pkgutil
import re
import stat
import warnings
from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import msgspec

from saturate.checkpoints import durable
from saturate.errors import ArtifactDamaged, EnvironmentProblem, SaturateError, UsageError
from saturate.inference import examples, folders, guards, hardware, lines, probe
from saturate.inference.facts import SEED
from saturate.inference.techniques._api import LOSSLESS, Entry
from saturate.records import artifact as records
from saturate.records.artifact import MadeOn, Manifest
from saturate.records.inference import Best, CandidateRecord, ModelFacts

MANIFEST, EXAMPLES, REPRODUCE = "manifest.json", "examples.bin", "reproduce.py"

_MANIFEST_BYTES = 64 * 2**20  # no manifest is larger; what is, is not read

#: No machine has more cores. Some libraries end the process where they cannot start as many threads as they are told to.
_MOST_THREADS = 4096

#: Agreement with the stored answers that a verification asks for, dB. Not more than float association leaves between
#: two machines, not less than an error of a tenth; between them, what the program's own agreement with the model is:
#: if the machine changes the answers more than the optimization did, then the score that was measured does not hold.
_MOST_DB, _LEAST_DB, _UNKNOWN_DB = 60.0, 20.0, 30.0


# -- storing ---------------------------------------------------------------------------------------------------------


def store(
    folder: str | os.PathLike[str],
    entry: Entry,
    *,
    program: Path,
    record: CandidateRecord,
    facts: ModelFacts,
    threads: int,
    inputs: Sequence[tuple[Any, ...]] = (),
    outputs: Sequence[Any] = (),
    device: str = "",
) -> Path:
    """Build the artifact `folder` from the program files that `entry` names in the folder `program`; returns its
    path.

    `inputs` are batches, `outputs` what the stored candidate answered to each, in the model's own structure; the first few are kept. `device`:
    where the program was made ("cuda:1"), if that is known better than by `facts`. An existing artifact is replaced, whole or not at all. Raises
    UsageError where something else is in its place, and EnvironmentProblem when the disk is full.
    """
    import torch

    folder = Path(folder)
    with folders.building(folder, is_artifact) as new:
        folders.copy(program, new, entry.files)
        kept, why_none = examples.write(torch, new / EXAMPLES, inputs, outputs)
        (new / REPRODUCE).write_text(lines.reproduce(record, facts.kind, entry, threads), encoding="utf-8")
        manifest = Manifest(
            created=datetime.now(UTC).isoformat(timespec="seconds"),
            model=facts.kind,
            candidate=record.id,
            numerics=record.numerics,
            recipe=record.techniques,
            kept_layers=record.kept_layers,
            code=record.code,
            agreement_db=record.agreement,
            made_on=hardware.here(torch, device or facts.device, threads, ("torch", *facts.installed)),
            format=entry.format,
            program=list(entry.files),
            settings=entry.settings,
            examples=kept,
            no_examples=why_none,
            files=folders.inventory(new, [*entry.files, EXAMPLES, REPRODUCE]),
        )
        (new / MANIFEST).write_bytes(encoded(manifest))
    return folder


def next_folder(parent: Path) -> Path:
    """The next number as a name: none that an artifact in `parent` has, or had while a later one is there."""
    numbers = [int(path.name) for path in parent.glob("*") if path.name.isdecimal()]
    return parent / f"{max(numbers, default=0) + 1}"


def confirm(folder: str | os.PathLike[str], scores: Best) -> None:
    """Write what was measured on the re-loaded artifact into its manifest."""
    folder = Path(folder)
    manifest = msgspec.structs.replace(read(folder), scores=scores)
    with folders.problems(folder), folders.held(folder):
        durable.replace(folder / MANIFEST, lambda stream: stream.write(encoded(manifest)))


def encoded(manifest: Manifest) -> bytes:
    """The bytes of manifest.json, with the digest of what it says."""
    plain = {**msgspec.to_builtins(manifest), "schema": records.SCHEMA}
    return msgspec.json.format(msgspec.json.encode({**plain, "digest": digest(plain)}), indent=1) + b"\n"


def digest(plain: dict[str, Any]) -> str:
    """Of everything that a manifest says but the digest itself."""
    said = {key: value for key, value in plain.items() if key != "digest"}
    return hashlib.sha256(msgspec.json.encode(said, order="sorted")).hexdigest()


# -- loading ---------------------------------------------------------------------------------------------------------


def is_artifact(folder: Path) -> bool:
    """Whether the folder says that it is one, whatever its state."""
    try:
        return msgspec.json.decode(_manifest_bytes(Path(folder)), type=dict).get("kind") == records.KIND
    except (ArtifactDamaged, ValueError, RecursionError):
        return False


def read(folder: str | os.PathLike[str]) -> Manifest:
    """The manifest alone; the files are not looked at. Raises ArtifactDamaged."""
    folder = Path(folder)
    data = _manifest_bytes(folder)
    try:
        plain = msgspec.json.decode(data, type=dict)
        if plain.get("kind") != records.KIND:
            raise _foreign(folder, f"its {MANIFEST} is of another kind")
        if plain.get("schema") not in records.READ:
            raise ArtifactDamaged(
                f"the artifact {folder} is of another version of saturate",
                cause=f"its schema is {plain.get('schema')!r}, and this version reads {' and '.join(map(str, records.READ))}",
                remedy="load it with the version that made it, or make it again",
            )
        if plain["schema"] > 1 and plain.get("digest") != digest(plain):
            raise folders.damaged(folder, f"what {MANIFEST} says does not have the SHA-256 that it names")
        return msgspec.convert(plain, Manifest)
    except (ValueError, RecursionError) as error:  # not UTF-8, not JSON, or of another shape
        raise folders.damaged(folder, f"{MANIFEST} is not readable: {error}") from error


def size_bytes(folder: str | os.PathLike[str]) -> int:
    """Of all files that the manifest names."""
    return sum(stored.size_bytes for stored in read(folder).files)


def checked(folder: str | os.PathLike[str]) -> Manifest:
    """The manifest, once every file matches its digest. Raises ArtifactDamaged."""
    folder = Path(folder)
    manifest = read(folder)
    fixed_threads(manifest)
    if not {*manifest.program, EXAMPLES} <= {stored.path for stored in manifest.files}:
        raise folders.damaged(folder, "its manifest does not list its program")
    folders.check(folder, manifest.files)
    return manifest


def fixed_threads(manifest: Manifest) -> int | None:
    """The threads that a program brings along; None where it takes those of its process. Raises ArtifactDamaged for no number of threads."""
    session = manifest.settings.get("session") or {}
    found = manifest.settings.get("threads") or (session.get("threads") if isinstance(session, dict) else session)
    for given in (found, manifest.made_on.threads):
        number = re.fullmatch(r"[0-9]{1,6}", str(given)) if isinstance(given, int | str) else None
        if given and (number is None or not 0 < int(number[0]) <= _MOST_THREADS):
            raise ArtifactDamaged(
                "the artifact names no number of threads that there could be",
                cause=f"threads is {str(given)[:80]!r}",
                remedy="make it again with saturate optimize",
            )
    return int(found) if found else None


def examples_of(torch: Any, folder: str | os.PathLike[str]) -> list[tuple[tuple[Any, ...], list[Any]]]:
    """The stored batches, on the CPU: (inputs, tensors of the answer). Raises ArtifactDamaged."""
    folder = Path(folder)
    try:
        return examples.read(torch, (folder / EXAMPLES).read_bytes(), read(folder).examples)
    except (OSError, ValueError) as error:
        raise folders.damaged(folder, f"its examples: {error}") from error


def answer_examples(folder: str) -> None:
    """Call the program on its stored inputs, in this process: what `probe` asks another one to try."""
    torch, manifest = require_torch(), checked(folder)
    module = importlib.import_module(f"saturate.inference.formats.{manifest.format}")
    call = module.load(torch, Path(folder), Entry(manifest.format, list(manifest.program), dict(manifest.settings)))
    for inputs, _ in examples_of(torch, folder):
        call(*examples.moved(torch, inputs, "cpu"))


def load(folder: str | os.PathLike[str], *, verify: bool = False, threads: int | None = None, **modules: Any) -> Artifact:
    """The artifact in `folder`, ready to be called as the model was. threads: where several processes share the cores, the most that a program
    may take which brings its own number of CPU threads along (ONNX Runtime, OpenVINO); other programs take those of torch in this process.
    modules: `model` and `draft` of one that generates, where it does not know how to build them (`generation.artifact`).

    Every file must match its digest. On hardware that may change its answers it warns; `verify=True`, or `Artifact.verify()`, runs it on its
    stored inputs and compares. Machine code for another processor is tried in another process first. A program for a GPU runs on the one with
    the number that it was made on, whatever the current device is: a process that is to use another one is started with `CUDA_VISIBLE_DEVICES`.
    Raises ArtifactDamaged, and EnvironmentProblem where a library or a device is missing here, where the processor lacks what the program needs,
    or where it does not verify.
    """
    if threads is not None and (not isinstance(threads, int) or isinstance(threads, bool) or threads < 1):
        raise UsageError(f"threads is {threads!r}", remedy="a whole number, at least 1, or None for those that it was measured with")
    folder = Path(folder)
    folders.tidy(folder)
    manifest = checked(folder)
    torch = require_torch()
    made_on = manifest.made_on
    if made_on.device == "cuda" and not torch.cuda.is_available():
        raise EnvironmentProblem(
            f"the artifact {folder} was made for a GPU, and torch finds none here",
            cause=f"made on {made_on.device_name or 'a CUDA device'}",
            remedy="load it there",
        )
    place = place_of(torch, made_on)
    now = hardware.here(torch, place, made_on.threads, tuple(made_on.versions))
    probe.demand(folder, manifest, now)
    other = hardware.other_hardware(made_on, now)
    differences = (*other, *hardware.other_software(made_on, now))
    with _current(torch, place):
        program = _program(torch, folder.absolute(), manifest, differences, modules, threads)
    found = Artifact(folder.absolute(), manifest, differences, program, torch, place, threads)
    if verify:
        found.verify().demand()
    elif other:
        warnings.warn(
            f"{folder}: {'; '.join(other)}. Its answers may differ here: verify() compares them with those that were "
            "stored, and your own check is the judge",
            stacklevel=2,
        )
    return found


def place_of(torch: Any, made_on: MadeOn) -> str:
    """Where a program runs here: on the GPU that it was made on, by its number; on the current one where there are fewer, or
    its number is not known."""
    kind, index = made_on.device.partition(":")[0], made_on.device_index
    return f"cuda:{index}" if kind == "cuda" and index is not None and 0 <= index < torch.cuda.device_count() else kind


def _current(torch: Any, place: str) -> contextlib.AbstractContextManager[Any]:
    """The GPU of a program as the current one: libraries load it there, and CUDA graphs record the streams of no other."""
    return torch.cuda.device(place) if ":" in place else contextlib.nullcontext()


def _manifest_bytes(folder: Path) -> bytes:
    path = folder / MANIFEST
    try:
        status = path.lstat()
        if not stat.S_ISREG(status.st_mode) or status.st_size > _MANIFEST_BYTES:
            raise folders.damaged(folder, f"{MANIFEST} is no file of the kind and size of a manifest")
        return path.read_bytes()
    except (FileNotFoundError, NotADirectoryError) as error:
        raise _foreign(folder, f"it has no {MANIFEST}" if folder.is_dir() else "it is no folder") from error
    except OSError as error:
        raise folders.damaged(folder, str(error)) from error


def _foreign(folder: Path, cause: str) -> ArtifactDamaged:
    return ArtifactDamaged(f"{folder} is no artifact of saturate", cause=cause, remedy="saturate optimize makes one")


def require_torch() -> Any:
    """The module. Raises EnvironmentProblem where it cannot be imported."""
    try:
        import torch
    except ImportError as error:
        raise EnvironmentProblem(
            "an artifact needs torch to be loaded by saturate",
            cause=str(error),
            remedy="install torch; an ONNX artifact runs without it, see docs/optimize.md",
        ) from error
    return torch


def _program(
    torch: Any, folder: Path, manifest: Manifest, differences: Sequence[str], modules: dict[str, Any], threads: int | None
) -> Any:
    """What the format's `load` gives."""
    from saturate.inference import formats

    known = [info.name for info in pkgutil.iter_modules(formats.__path__) if not info.name.startswith("_")]
    if manifest.format not in known:
        raise folders.damaged(folder, f"its format {manifest.format!r} is none of {', '.join(known)}")
    module = importlib.import_module(f"{formats.__name__}.{manifest.format}")
    if modules and manifest.format != "generation":
        raise UsageError(f"the artifact {folder} is whole: it takes no {', '.join(modules)}", remedy="leave it out")
    try:
        return module.load(torch, folder, Entry(manifest.format, list(manifest.program), _with_threads(manifest, threads)), **modules)
    except SaturateError:
        raise
    except Exception as error:  # libraries raise anything for a program that they cannot load
        line = next((line.strip() for line in str(error).splitlines() if line.strip()), "no message")
        raise ArtifactDamaged(
            f"the program of the artifact {folder} cannot be loaded",
            cause=f"{type(error).__name__}: {line}",
            evidence="; ".join(differences),
            remedy="load it where it was made, or make it again here" if differences else "make it again",
        ) from error


def _with_threads(manifest: Manifest, most: int | None) -> dict[str, Any]:
    """The settings, where the program brings no more threads along than `most`."""
    settings, own = dict(manifest.settings), fixed_threads(manifest)
    if most is None or own is None or own <= most:
        return settings
    if settings.get("threads"):
        return {**settings, "threads": most}
    return {**settings, "session": {**settings["session"], "threads": str(most)}}


@dataclass(frozen=True)
class Verification:
    """What the stored inputs gave here, beside what they gave where the artifact was made."""

    ok: bool
    agreement_db: float | None  # the least of all outputs; inf: identical; None: there was nothing to compare
    demanded_db: float
    reason: str

    def demand(self) -> None:
        """Raises EnvironmentProblem unless it is ok."""
        if not self.ok:
            raise EnvironmentProblem(
                "the artifact does not verify on this machine",
                cause=self.reason,
                remedy="run saturate optimize here: the best program of this machine may be another one",
            )


@dataclass
class Artifact:
    """A loaded artifact: called as the model was; it records no gradients. `differences` are sentences about this
    machine and its libraries, as far as they are not those that it was made with."""

    folder: Path
    info: Manifest
    differences: tuple[str, ...]
    _call: Any = field(repr=False)
    _torch: Any = field(repr=False)
    place: str = "cpu"  # "cuda" or "cuda:1": inputs must be there
    _threads: int | None = field(default=None, repr=False)

    def __call__(self, *inputs: Any, **named: Any) -> Any:
        if ":" not in self.place:
            return self._call(*inputs, **named)
        with _current(self._torch, self.place):
            return self._call(*inputs, **named)

    def __repr__(self) -> str:
        return f"<Artifact {self.info.candidate} of {self.info.model}, format {self.info.format}, in {self.folder}>"

    def __reduce__(self) -> Any:
        """A copy, or the one that another process unpickles, is loaded from the folder again."""
        return functools.partial(load, threads=self._threads), (str(self.folder),)

    def verify(self) -> Verification:
        """Run the stored inputs and compare with the stored answers. A model with randomness draws what it drew when they were stored."""
        from saturate.inference.pruning.values import seeded

        torch, demanded = self._torch, _demanded_db(self.info)
        worst = float("inf")
        compared = 0
        for inputs, expected in examples_of(torch, self.folder):
            try:
                with seeded(torch, SEED):
                    got = examples.tensors_of(torch, self(*examples.moved(torch, inputs, self.place)))
            except Exception as error:  # noqa: BLE001 - whatever a program raises on its inputs, it does not verify
                words = f"it fails on its own inputs: {type(error).__name__}: {error}"
                return Verification(False, None, demanded, words)
            if [(one.dtype, tuple(one.shape)) for one in got] != [(one.dtype, tuple(one.shape)) for one in expected]:
                return Verification(False, None, demanded, "its answer has other shapes or number types than the one that was stored")
            worst = min([worst, *(examples.agreement_db(torch, a, b.cpu()) for a, b in zip(expected, got))])
            compared += len(got)
        if not compared:
            why = self.info.no_examples or "no tensor in its answers"
            return Verification(False, None, demanded, f"there is nothing to compare: {why}")
        same = worst == float("inf")
        words = "its answers are those stored" if same else f"its answers agree with those stored to {worst:.0f} dB"
        ok = worst >= demanded
        return Verification(ok, worst, demanded, words if ok else f"{words}, and {demanded:.0f} dB are asked for")

    def save(self, folder: str | os.PathLike[str]) -> Path:
        """Copy the artifact, every digest checked. One that is there is replaced, whole or not at all. Raises what
        `store` raises, and ArtifactDamaged."""
        target = Path(folder)
        with folders.building(target, is_artifact) as new:
            folders.copy(self.folder, new, [stored.path for stored in self.info.files])
            folders.check(new, self.info.files)
            (new / MANIFEST).write_bytes(encoded(self.info))
        return target


def _demanded_db(manifest: Manifest) -> float:
    if manifest.numerics not in LOSSLESS:
        return _UNKNOWN_DB if manifest.agreement_db is None else min(max(manifest.agreement_db, _LEAST_DB), _MOST_DB)
    answered = {leaf.dtype for example in manifest.examples for leaf in example.output_leaves}
    return min([_MOST_DB, *(guards.REORDERED_DB[name] for name in answered if name in guards.REORDERED_DB)])
