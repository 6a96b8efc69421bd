"""Many small files, or text to be parsed, as a few memory-mapped Arrow files that Hugging Face `datasets` reads.

    DST/data-00000.arrow ...     shards, Arrow IPC streams: rows are found without reading what lies between them
    DST/dataset_info.json        columns and their types
    DST/state.json               names of the shards: written last, so an unfinished pack is not loaded by mistake
    DST/.pack.json               what was packed from what, shard by shard: what an interrupted pack goes on from

Every file is written under another name, made durable, and then renamed; a shard that is there is whole.
"""

from __future__ import annotations

import errno
import fcntl
import json
import os
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from saturate.checkpoints import durable
from saturate.data.pack_rows import Source
from saturate.errors import EnvironmentProblem, UsageError

MANIFEST, STATE, INFO, LOCK = ".pack.json", "state.json", "dataset_info.json", ".pack.lock"
#: Of the manifest, and of how rows are made of a source: what another version began would be gone on with in other rows.
VERSION = 2

#: A shard that was being written.
PART = re.compile(r"data-\d{5,}\.arrow\.part")

#: Bytes of one shard, unless the user wants another size: few enough files, small enough to copy and to redo.
SHARD_BYTES = 256 * 2**20

LOADER, AS_TENSORS = ("from datasets import load_from_disk", "data = load_from_disk({path!r}){form}"), '.with_format("torch")'

#: Of images, where DALI is installed: see `data.dali`.
DALI_LOADER = ("from saturate.data.dali import loader", "data = loader({path!r}, batch_size=64, size=224)")


def loader(schema: Any, path: str) -> list[str]:
    """Lines of Python that read what was packed into `path`: as tensors, unless torch has none for one of the columns (dates, times,
    decimal numbers)."""
    form = "" if any(_beyond_torch(column.type) for column in schema) else AS_TENSORS
    return [line.format(path=path, form=form) for line in LOADER]


def _beyond_torch(kind: Any) -> bool:
    from pyarrow import types

    inner = (kind.field(number).type for number in range(kind.num_fields))
    return types.is_temporal(kind) or types.is_decimal(kind) or any(map(_beyond_torch, inner))


@dataclass(frozen=True)
class Shard:
    name: str
    rows: int
    bytes: int
    read_bytes: int         # of the source

    def valid(self) -> bool:
        """Whether the fields are of their kinds: they may come from a file."""
        return isinstance(self.name, str) and all(type(count) is int and count >= 0 for count in (self.rows, self.bytes, self.read_bytes))


@dataclass(frozen=True)
class Outcome:
    """All shards of a packed dataset. `resumed_rows`: how many of their rows were there already."""

    shards: list[Shard]
    resumed_rows: int

    @property
    def rows(self) -> int:
        return sum(shard.rows for shard in self.shards)

    @property
    def bytes(self) -> int:
        return sum(shard.bytes for shard in self.shards)


def pack(source: Source, destination: Path, shard_bytes: int = SHARD_BYTES,
         progress: Callable[[int], None] = lambda read_bytes: None) -> Outcome:
    """Write `source` to `destination`, or finish what an earlier call began. `progress` gets bytes of the source.

    Raises UsageError when `destination` holds something else, or a pack of another source; EnvironmentProblem when it
    cannot be written. What was finished stays in both cases.
    """
    with _problems(destination), _alone(destination):
        shards = _finished(source, destination, shard_bytes)
        resumed_rows = sum(shard.rows for shard in shards)
        read = sum(shard.read_bytes for shard in shards)
        progress(read)
        if not (destination / STATE).exists():
            for shard in _write(source, destination, shard_bytes, shards, progress):
                shards.append(shard)
                _put(destination / MANIFEST, _manifest(source, shard_bytes, shards))
            if not shards:
                raise UsageError("there is not a single row to pack")
            if changed := source.changed():
                raise UsageError(f"{changed} changed while it was packed", cause="what was packed may be of both states",
                                 remedy="wait until nothing writes to the source, remove what was packed, and pack it again")
            _put(destination / INFO, {"features": source.features} if source.features else {})
            _put(destination / STATE, _state(source, shards))
        return Outcome(shards, resumed_rows)


@contextmanager
def _problems(destination: Path) -> Iterator[None]:
    """Errors of the file system in the user's words. Reading the source is included: its message names the file."""
    try:
        yield
    except OSError as error:
        message, remedy = f"packing into {destination} failed", "what was packed is kept: mend the cause and run the same command again"
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            message, remedy = "no space is left for the packed data", "free some space and run the same command again: it goes on where it stopped"
        elif error.errno == errno.EFBIG:
            message = "a file of the packed data became larger than files may be here"
            remedy = "raise that limit (ulimit -f) and run the same command again, or pack into another folder with a smaller --shard-size"
        raise EnvironmentProblem(message, cause=str(error), remedy=remedy) from error


@contextmanager
def _alone(destination: Path) -> Iterator[None]:
    """One pack per destination. The kernel lets go of the lock however the process ends."""
    if destination.exists() and not destination.is_dir():
        raise UsageError(f"{destination} is a file", remedy="name a folder that is new or holds an unfinished pack")
    destination.mkdir(parents=True, exist_ok=True)
    # A pack that was killed before its first manifest leaves no more than its lock and a temporary file.
    foreign = [] if (destination / MANIFEST).exists() else [
        path.name for path in destination.iterdir() if path.name != LOCK and not path.name.startswith(durable.TEMPORARY)]
    if foreign:
        raise UsageError(f"{destination} is not empty", cause=f"it holds {', '.join(sorted(foreign)[:3])}",
                         remedy="name a folder that is new or holds an unfinished pack")
    # A link there is not followed: opened so, the file that it leads to would lose its content.
    with open(os.open(destination / LOCK, os.O_WRONLY | os.O_CREAT | os.O_NOFOLLOW, 0o666), "wb") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise EnvironmentProblem(f"another process packs into {destination}", remedy="wait for it, or stop it") from error
        yield


def _finished(source: Source, destination: Path, shard_bytes: int) -> list[Shard]:
    """The shards of an earlier call, and the plan of this one on disk."""
    for left in destination.iterdir():
        if PART.fullmatch(left.name) or left.name.startswith(durable.TEMPORARY):      # nothing that somebody else put there
            left.unlink()
    path = destination / MANIFEST
    if not path.exists():
        _put(path, _manifest(source, shard_bytes, []))
        return []
    try:
        manifest = json.loads(path.read_text(encoding="utf-8"))
        shards = [Shard(**shard) for shard in manifest["shards"]]
        made_from = manifest["version"], manifest["source"], manifest["shard_bytes"]
        if not all(shard.valid() for shard in shards):
            raise ValueError("a shard is not one")
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise UsageError(f"{path} is damaged", cause=str(error), remedy="pack into another folder") from error
    if not shards:              # it held no row, or was stopped before: nothing is there that another source could be mixed with
        _put(path, _manifest(source, shard_bytes, []))
        return []
    if made_from != (VERSION, source.fingerprint(), shard_bytes):
        raise UsageError(f"{destination} holds a pack of something else",
                         cause="files of the source changed since, another --kind or --shard-size was asked for, or another version of saturate began it",
                         remedy="pack into another folder, or remove this one")
    for shard in shards:
        if Path(shard.name).name != shard.name or not (destination / shard.name).is_file() \
                or (destination / shard.name).stat().st_size != shard.bytes:
            raise UsageError(f"{destination / shard.name} is missing or was changed", remedy="pack into another folder")
    return shards


def _write(source: Source, destination: Path, shard_bytes: int, done: list[Shard],
           progress: Callable[[int], None]) -> Iterator[Shard]:
    import pyarrow as pa

    before = sum(shard.read_bytes for shard in done)
    number = len(done)
    batches = source.batches(sum(shard.rows for shard in done))
    schema = source.schema
    if source.features:
        schema = schema.with_metadata({"huggingface": json.dumps({"info": {"features": source.features}})})
    batch = next(batches, None)
    while batch is not None:
        name = f"data-{number:05d}.arrow"
        part = destination / f"{name}.part"
        rows = read = 0
        with open(part, "wb") as file:
            with pa.ipc.new_stream(file, schema) as writer:
                while batch is not None and (not rows or file.tell() < shard_bytes):
                    writer.write_batch(batch.rows.replace_schema_metadata(schema.metadata))
                    rows, read = rows + batch.rows.num_rows, read + batch.read_bytes
                    progress(before + read)
                    batch = next(batches, None)
            file.flush()
            os.fsync(file.fileno())
            size = file.tell()
        os.rename(part, destination / name)
        durable.sync_folder(destination)
        before, number = before + read, number + 1
        yield Shard(name, rows, size, read)


def _manifest(source: Source, shard_bytes: int, shards: list[Shard]) -> dict[str, Any]:
    return {"version": VERSION, "kind": source.kind, "source": source.fingerprint(), "shard_bytes": shard_bytes,
            "shards": [vars(shard) for shard in shards]}


def _state(source: Source, shards: list[Shard]) -> dict[str, Any]:
    """As `datasets.Dataset.save_to_disk` writes it."""
    return {"_data_files": [{"filename": shard.name} for shard in shards], "_fingerprint": source.fingerprint(),
            "_format_columns": None, "_format_kwargs": {}, "_format_type": None, "_output_all_columns": False,
            "_split": None}


def _put(path: Path, content: dict[str, Any]) -> None:
    """Replace a small file, whole or not at all."""
    durable.replace(path, lambda stream: stream.write(json.dumps(content, indent=1).encode()))
