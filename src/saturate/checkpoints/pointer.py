"""What stands at a checkpoint's path when its bytes are in a store: a small file that names the checkpoint.

It is a file of torch's own format. `torch.load` under `saturate run` finds the checkpoint behind it; without
saturate, `torch.load` fails with an error that says how to get a plain file, whatever its `weights_only` is.
"""

from __future__ import annotations

import contextlib
import functools
import io
import json
import os
import stat
import zipfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from saturate import notices
from saturate.checkpoints import durable, manifests
from saturate.checkpoints.chunks import Store
from saturate.errors import CheckpointDamaged, SaturateError

SCHEMA = 1
_MEMBER = "archive/saturate.json"

#: A pointer is shorter than this: longer files need not be opened to know that they are none.
LARGEST_BYTES = 1 << 14

#: What `torch.load` says without saturate: the unpickler names the global that it does not find or does not allow.
ADVICE = ("this file only names a checkpoint in a saturate store, run `saturate checkpoint export FILE` to make it a plain one",
          " Or load it under `saturate run`")


@dataclass(frozen=True)
class Pointer:
    """`store` is absolute, `relative` the same from the pointer's folder: a tree that was moved is found again."""

    store: str
    relative: str
    checkpoint: str


def write(path: Path, store: Store, manifest: manifests.Manifest) -> None:
    """Put a pointer in the place of `path`."""
    folder = store.folder.resolve()
    fields = {"schema": SCHEMA, "store": str(folder), "relative": os.path.relpath(folder, durable.target(path).parent),
              "checkpoint": manifest.id}
    content = io.BytesIO()
    with zipfile.ZipFile(content, "w") as archive:
        # Protocol 2, a global that cannot exist, stop: the names are all that an unpickler reads.
        archive.writestr("archive/data.pkl", b"\x80\x02c" + "\n".join(ADVICE).encode() + b"\n.")
        archive.writestr("archive/version", "3\n")
        archive.writestr(_MEMBER, json.dumps(fields))
    durable.replace(path, lambda stream: stream.write(content.getvalue()))


def read(path: Path | str) -> Pointer | None:
    """The pointer in a file; None when it holds none, or cannot be read."""
    try:
        return look(path)
    except (OSError, ValueError, TypeError):
        return None             # whatever it is, torch.load will say it better


def look(path: Path | str) -> Pointer | None:
    """The pointer in a file; None when it holds none. Raises OSError where that cannot be seen, ValueError or TypeError
    for what is no path."""
    seen = os.stat(path)
    if not stat.S_ISREG(seen.st_mode) or not 0 < seen.st_size <= LARGEST_BYTES:
        return None             # not even opened: a pipe would notice
    with open(path, "rb") as stream:
        return _in(stream.read(LARGEST_BYTES + 1))


def _in(content: bytes) -> Pointer | None:
    """The pointer that a file of this content is; None when it is none."""
    try:
        if not content.startswith(b"PK") or _MEMBER.encode() not in content:
            return None
        with zipfile.ZipFile(io.BytesIO(content)) as archive:
            if archive.getinfo(_MEMBER).file_size > LARGEST_BYTES:
                return None
            fields = json.loads(archive.read(_MEMBER))
        texts = [fields[name] for name in ("store", "relative", "checkpoint")]
    except (OSError, ValueError, TypeError, KeyError, RuntimeError, NotImplementedError, zipfile.BadZipFile, RecursionError):
        return None             # a zip of something else, or a damaged one
    if fields.get("schema") != SCHEMA or not all(isinstance(text, str) and "\0" not in text for text in texts):
        return None
    return Pointer(*texts)


def store_of(pointer: Pointer, path: Path) -> Store:
    """The store that a pointer file at `path` leads to. Raises CheckpointDamaged when it is not there, or cannot be read."""
    problem: SaturateError | None = None
    for folder in _places(pointer, path):
        try:
            return Store.open(folder)
        except SaturateError as error:
            problem = error
    if problem is not None:
        raise CheckpointDamaged(f"{path} names checkpoint {pointer.checkpoint[:40]}, whose store cannot be used",
                                cause=": ".join(filter(None, (problem.message, problem.cause))), remedy=problem.remedy) from problem
    raise CheckpointDamaged(f"{path} names checkpoint {pointer.checkpoint[:40]}, which is not in {pointer.store}",
                            cause="the store was moved or removed, or the checkpoint was removed by gc",
                            remedy="saturate checkpoint export --store FOLDER FILE, where the store now is")


def _places(pointer: Pointer, path: Path) -> list[Path]:
    """Store folders that hold the checkpoint, or that do not let one see whether they do."""
    folders = dict.fromkeys([Path(pointer.store), path.resolve().parent / pointer.relative])
    return [folder for folder in folders
            if _may_exist(folder / "store.json") and _may_exist(Store(folder).manifests / f"{pointer.checkpoint}.json")]


def _may_exist(path: Path) -> bool:
    try:
        os.stat(path)
    except (FileNotFoundError, NotADirectoryError):
        return False
    except OSError:
        return True
    return True


@contextlib.contextmanager
def resolved(pointer: Pointer, path: Path, folder: Path | None = None) -> Iterator[tuple[Store, manifests.Manifest]]:
    """The store (in `folder`, where given) and the manifest behind a pointer, locked against removal."""
    with (Store.open(folder) if folder else store_of(pointer, path)) as store, store.locked(alone=False):
        store.refresh()
        yield store, manifests.read(store, pointer.checkpoint)


# -- in the user's process -------------------------------------------------------------------------------------------


def loading(original: Callable[..., Any]) -> Callable[..., Any]:
    """`torch.load` that follows pointers. Everything else goes to the original untouched."""
    @functools.wraps(original)
    def load(f: Any, *args: Any, **kwargs: Any) -> Any:
        path = _path_of(f)
        pointer = read(path) if path is not None else _in_memory(f)
        if pointer is None:
            return original(f, *args, **kwargs)
        with resolved(pointer, Path(path or os.curdir)) as (store, manifest), manifests.opened(store, manifest) as stream:
            try:
                # There is no file to map: it is read, which gives the same tensors.
                return original(stream, *args, **{**kwargs, "mmap": False})
            except Exception:       # torch answers a broken stream in words of its own; the stream knows what broke it
                if stream.raw.problem is not None:      # type: ignore[attr-defined]
                    raise stream.raw.problem from None  # type: ignore[attr-defined]
                raise

    return load


def copying(original: Callable[..., Any]) -> Callable[..., Any]:
    """`shutil.copyfile` (behind copy, copy2, copytree and move) that copies the checkpoint and not its pointer."""
    @functools.wraps(original)
    def copyfile(src: Any, dst: Any, *, follow_symlinks: bool = True) -> Any:
        pointer = read(src) if isinstance(src, str | os.PathLike) and (follow_symlinks or not os.path.islink(src)) else None
        if pointer is None or (os.path.exists(dst) and os.path.samefile(src, dst)):
            return original(src, dst, follow_symlinks=follow_symlinks)
        try:
            with resolved(pointer, Path(src)) as (store, manifest):
                manifests.copy(store, manifest, Path(dst))
        except SaturateError as error:
            if _places(pointer, Path(src)):         # a pointer to what is gone stays one, as a link would
                said = ": ".join(filter(None, (error.message, error.cause)))
                notices.tell(f"saturate: {dst} only names the checkpoint that {src} names, its bytes were not copied: {said}\n")
            return original(src, dst, follow_symlinks=follow_symlinks)
        return dst

    return copyfile


def _in_memory(f: Any) -> Pointer | None:
    """The pointer in a buffer: scripts read a file by themselves, and hand over what was in it."""
    if not isinstance(f, io.BytesIO) or f.closed or not 0 < len(f.getbuffer()) - f.tell() <= LARGEST_BYTES:
        return None
    return _in(bytes(f.getbuffer()[f.tell():]))


def _path_of(f: Any) -> str | None:
    """The file behind what was given to `torch.load`: a path, or a file that was opened and not read yet (of this
    process's own or a library's kind; one that unpacks what it reads is no matter: a packed file is no pointer).
    """
    if isinstance(f, str | os.PathLike):
        path: Any = os.fspath(f)
    else:
        path = getattr(f, "name", None)
        try:
            fresh = isinstance(path, str) and f.tell() == 0 and _leads_to(path, f)
        except (AttributeError, OSError, ValueError):       # not a file, a pipe, or closed
            fresh = False
        if not fresh:
            return None
    return path if isinstance(path, str) else None


def _leads_to(path: str, f: Any) -> bool:
    """Whether an open file is still where its name leads: it may have been renamed, or the script changed its folder."""
    try:
        here = os.fstat(f.fileno())
    except (AttributeError, OSError, ValueError):
        return True                     # a library's kind, which does not tell
    return os.path.samestat(here, os.stat(path))


def plain(path: Path, folder: Path | None = None, output: Path | None = None) -> manifests.Manifest | None:
    """Replace a pointer by the plain file (or write that to `output`). None when there is no pointer at `path`."""
    pointer = read(path)
    if pointer is None:
        return None
    with resolved(pointer, path, folder) as (store, manifest):
        manifests.copy(store, manifest, output or path)
    return manifest


def names(path: str, manifest: manifests.Manifest) -> bool:
    """Whether the file at `path` names that checkpoint."""
    found = read(path)
    return found is not None and found.checkpoint == manifest.id
