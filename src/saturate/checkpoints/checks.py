"""Is a checkpoint whole? For stores, chunk by chunk, and for plain files as far as their format tells."""

from __future__ import annotations

import os
import stat
import zipfile
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, Literal

from saturate.checkpoints import durable, forecast, manifests, parts, pointer, shards, target
from saturate.checkpoints.chunks import Entry, Store, digest_of
from saturate.errors import CheckpointDamaged, SaturateError

#: Endings of files that are looked at in a folder; a file that is named is always looked at.
ENDINGS = (".pt", ".pth", ".ckpt", ".bin", ".safetensors", ".tar", shards.ENDING)

#: Files that are being written; they stay where a process is killed meanwhile.
_LEFTOVERS = (durable.TEMPORARY, target.LITTER)
#: What is said of one, by whether a process is writing it.
_LEFT = {True: "a process saves it now", False: "a process was killed while it saved; it can be removed",
         None: "a process saves it now, or was killed while it did: whether it is locked cannot be seen"}


@dataclass(frozen=True)
class Check:
    """One thing that was looked at. `unknown`: the format holds nothing to check against."""

    path: str
    kind: Literal["checkpoint", "pointer", "torch", "safetensors", "pack", "leftover", "other"]
    outcome: Literal["whole", "damaged", "unknown"]
    size_bytes: int | None
    problem: str = ""


# -- a store ---------------------------------------------------------------------------------------------------------


def check_store(store: Store) -> Iterator[Check]:
    """Every pack, every chunk in them, every checkpoint. Hold the lock (shared)."""
    store.refresh()
    damaged = dict(_damaged_chunks(store))
    by_pack: dict[str, list[str]] = defaultdict(list)
    for digest, problem in damaged.items():
        by_pack[store.index[digest].pack].append(f"chunk {digest.hex()[:12]}: {problem}")
    for path in sorted(store.packs.iterdir()):
        if path.name.startswith(durable.TEMPORARY):
            continue            # a save that is going on, or one that was killed: no checkpoint needs it
        problems = [store.problems[path.name]] if path.name in store.problems else by_pack[path.name]
        more = f" and {len(problems) - 1} more" if len(problems) > 1 else ""
        yield Check(str(path), "pack", "damaged" if problems else "whole", path.stat().st_size, "".join(problems[:1]) + more)
    found, unreadable = manifests.all_of(store)
    for name, problem in unreadable.items():
        yield Check(name, "checkpoint", "damaged", None, problem)
    for manifest in found:
        problem = _problem_of(store, manifest, damaged)
        yield Check(f"{manifest.id} {manifest.path}", "checkpoint", "damaged" if problem else "whole", manifest.file_bytes, problem)


def _damaged_chunks(store: Store) -> Iterator[tuple[bytes, str]]:
    """Decode and hash every chunk once, each delta right after its base."""
    above: dict[bytes | None, list[tuple[bytes, Entry]]] = defaultdict(list)
    for digest, entry in store.index.items():
        above[entry.base].append((digest, entry))
    pending: list[tuple[bytes, Entry, bytes]] = [(digest, entry, b"") for digest, entry in above[None]]
    while pending:
        digest, entry, base = pending.pop()
        try:
            data = store.decoded(digest, entry, base)
            problem = "" if digest_of(data) == digest else "its bytes are not those that were saved"
        except CheckpointDamaged as error:
            data, problem = b"", error.cause
        if problem:
            yield digest, problem
        pending += [(leaning, its, data) for leaning, its in above[digest]]     # of a damaged one: damaged too, and said


def _problem_of(store: Store, manifest: manifests.Manifest, damaged: dict[bytes, str]) -> str:
    try:
        needed = store.bases_of(manifests.addresses(store, manifest))
    except SaturateError as error:
        return ": ".join(filter(None, (error.message, error.cause)))
    missing = [digest for digest in needed if digest not in store.index]
    if missing:
        return f"{len(missing)} of its {len(needed)} chunks are missing, the first is {missing[0].hex()[:12]}"
    broken = [digest for digest in needed if digest in damaged]
    if broken:
        return f"{len(broken)} of its {len(needed)} chunks are damaged, the first is {broken[0].hex()[:12]}"
    return ""


# -- files -----------------------------------------------------------------------------------------------------------


def files_in(folder: Path) -> Iterator[Path]:
    """Files below a folder that look like checkpoints by their names; stores are left out."""
    for place, folders, names in os.walk(folder):
        folders[:] = sorted(name for name in folders if not (Path(place) / name / "store.json").exists())
        yield from (Path(place) / name for name in sorted(names) if name.endswith(ENDINGS) or name.startswith(_LEFTOVERS))


def check_files(files: list[Path]) -> Iterator[Check]:
    """Those that a folder holds, each by itself; then what checkpoints lack that consist of several. A training may run beside it: what it
    removes meanwhile is left out, and so is what a checkpoint lacks only at first.
    """
    needed = {folder: shards.named(folder) for folder in {file.parent for file in files if file.name.endswith(shards.ENDING)}}
    lacking = {folder: _lacking(folder) for folder in dict.fromkeys(file.parent for file in files)}
    for file in files:
        if needed.get(file.parent) and file.name.endswith(shards.ENDING) and file.name not in needed[file.parent]:
            check = Check(str(file), "leftover", "unknown", _size(file),
                          "the checkpoint there does not name it: a process saves it now, or was killed while it did")
        else:
            check = check_file(file, named=False)
        if check.outcome == "whole" or os.path.lexists(file):
            yield check
    for folder, before in lacking.items():
        now = _lacking(folder) if before else []
        yield from (check for check in before if check in now)


def _lacking(folder: Path) -> list[Check]:
    """What is missing of checkpoints in a folder that consist of several files."""
    try:
        names = os.listdir(folder)
    except OSError:             # it is gone
        return []
    problem = shards.problem_of_folder(folder, names) if any(name.endswith(shards.ENDING) for name in names) else ""
    found = [Check(str(folder / shards.METADATA), "torch", "damaged", None, problem)] if problem else []
    return found + [Check(str(folder / name), "safetensors" if ".safetensors" in name else "torch", "damaged", None, lacks)
                    for name, lacks in parts.problems(folder, names)]


def _size(path: Path) -> int | None:
    """None where it is gone."""
    try:
        return path.stat().st_size
    except FileNotFoundError:
        return None


def check_file(path: Path, named: bool = True) -> Check:
    """One file, by what its format can tell. `named`: somebody said that it is a checkpoint; of one that only lies in a folder
    its name says no more than that it may be one (tokens are `train.bin` too, images `train.tar`).
    """
    if path.name.startswith(_LEFTOVERS):
        return Check(str(path), "leftover", "unknown", _size(path), _LEFT[durable.is_written(path)])
    found = pointer.read(path)
    if found is not None:
        return _check_pointer(path, found)
    try:
        if not stat.S_ISREG(os.stat(path).st_mode):
            return Check(str(path), "other", "unknown", None, "no regular file: opening a pipe would wait for its writer")
        with open(path, "rb") as stream:
            size = stream.seek(0, os.SEEK_END)
            stream.seek(0)
            start = stream.read(8)
            stream.seek(0)
            if path.name.endswith(shards.ENDING) and any(start):
                return _check_shard(path, stream, size)
            if start.startswith(b"PK"):
                return _check_zip(path, stream, size)
            if start.startswith(b"\x80") and not path.name.endswith(".safetensors"):
                return Check(str(path), "other", "unknown", size, "a pickle holds nothing to check it against")
            forecast.safetensors_header(stream, size)
            return Check(str(path), "safetensors", "whole", size, "header and length only: the format holds no checksums")
    except forecast.OtherFormat as error:
        kind = "safetensors" if path.name.endswith(".safetensors") else "other"
        # After a power failure a file may be empty, or of zeros.
        lost = size == 0 or (not any(start) and path.name.endswith((".pt", ".pth", ".ckpt", shards.ENDING)))
        return Check(str(path), kind, "damaged" if named or lost or kind == "safetensors" else "unknown", size, str(error))
    except (OSError, ValueError) as error:
        kind = "safetensors" if path.name.endswith(".safetensors") else "other"
        if not os.path.lexists(path):       # a link that leads nowhere is there
            return Check(str(path), kind, "unknown", None, "it was removed meanwhile")
        return Check(str(path), kind, "damaged", None, str(error))


def _check_pointer(path: Path, found: pointer.Pointer) -> Check:
    try:
        with pointer.resolved(found, path) as (store, manifest):
            stream = manifests.StoredFile(store, manifest)
            buffer = bytearray(manifests.LARGEST_CHUNK)
            while stream.readinto(buffer):
                pass
            return Check(str(path), "pointer", "whole", manifest.file_bytes)
    except SaturateError as error:
        return Check(str(path), "pointer", "damaged", None, ": ".join(filter(None, (error.message, error.cause))))


def _check_shard(path: Path, stream: BinaryIO, size: int) -> Check:
    if stream.read(2) != b"PK":
        return Check(str(path), "other", "unknown", size, "compressed, or of a format that holds nothing to check it against")
    problem = shards.problem_of_shard(stream, size)
    return Check(str(path), "torch", "damaged" if problem else "whole", size, problem)


def _check_zip(path: Path, stream: BinaryIO, size: int) -> Check:
    try:
        with zipfile.ZipFile(stream) as archive:
            names = archive.namelist()
            bad = archive.testzip()
    except Exception as error:  # noqa: BLE001 - what damage does to each way of packing; other files are still to be looked at
        return Check(str(path), "torch", "damaged", size, f"{type(error).__name__}: {error}")
    if bad is not None:
        return Check(str(path), "torch", "damaged", size,
                     f"{bad} has another checksum (or was saved with torch.serialization.set_crc32_options(False))")
    if not any(name.endswith("/data.pkl") for name in names):
        return Check(str(path), "other", "unknown", size, "a zip file, but not one of torch")
    return Check(str(path), "torch", "whole", size)
