"""Where saves are seen: the zip writer of `torch.save`, safetensors' file writer, distributed checkpoints, Lightning.

`torch.save` looks its zip writer up by name at every call, so a script that took `from torch import save` is seen too,
and torch pickles as it always does. Saves into file objects stay what they are: their bytes are the caller's.
"""

from __future__ import annotations

import contextlib
import importlib
import io
import os
import sys
import threading
from collections.abc import Callable
from typing import Any

from saturate import notices
from saturate.checkpoints import archive, distributed
from saturate.checkpoints.guards import Guards, holders
from saturate.checkpoints.host_memory import available_bytes
from saturate.checkpoints.own_calls import inside
from saturate.checkpoints.staging import Recorder
from saturate.checkpoints.target import Unsuitable
from saturate.checkpoints.writer import Writer
from saturate.importwatch import once_imported

_local = threading.local()


class Saves:
    """Hands what this process saves to `writer`. `saved` is called after each file that was handed over."""

    def __init__(self, torch: Any, writer: Writer, saved: Callable[[], None]):
        self.torch = torch
        self.writer = writer
        self.saved = saved

    def zip_writer(self, original: Any) -> Any:
        """What replaces `torch.serialization._open_zipfile_writer`."""
        serialization = self.torch.serialization

        def open_zipfile_writer(name_or_buffer: Any) -> Any:
            skipping = getattr(getattr(serialization, "_serialization_tls", None), "skip_data", False)
            if isinstance(name_or_buffer, (io.BufferedWriter, io.BufferedRandom, io.FileIO)) and not inside():
                self.writer.leave_alone()
            if not isinstance(name_or_buffer, (str, os.PathLike)) or skipping:
                return original(name_or_buffer)
            name = os.fspath(name_or_buffer)
            if not isinstance(name, str) or not archive.archive_name(name):
                return original(name_or_buffer)
            return _Recording(self, name, original)

        return open_zipfile_writer

    def storage_cpu(self, original: Any) -> Any:
        """What replaces `UntypedStorage.cpu`: while torch writes its records, a storage stays on the GPU; it is copied
        with all others, by a side stream."""

        def cpu(storage: Any) -> Any:
            if getattr(_local, "records", False) and storage.device.type == "cuda":
                return storage
            return original(storage)

        return cpu

    def safetensors_file(self, module: Any) -> Any:
        """What replaces `safetensors.torch.serialize_file`."""
        original, serialize = module.serialize_file, module.serialize

        def serialize_file(tensors: Any, filename: Any, *args: Any, **kwargs: Any) -> None:
            if _held(tensors):
                try:
                    content = serialize(tensors, *args, **kwargs)
                    self.hand_over(os.fspath(filename), "", [("", content, len(content))], archive.DEFAULT_ALIGNMENT)
                    return
                except (OSError, sys.modules["safetensors"].SafetensorError):
                    raise
                except Unsuitable:
                    pass
                except Exception as failure:  # noqa: BLE001 - a guest fails open: whatever is wrong with us, the file is saved
                    notices.tell(f"saturate: {filename} is saved plainly: {type(failure).__name__}: {failure}\n")
            self.writer.wait_for(list(self.writer.pending))
            original(tensors, filename, *args, **kwargs)

        return serialize_file

    def atomic_save(self, original: Any) -> Any:
        """What replaces Lightning's `_atomic_save(checkpoint, path)`, which builds the whole file in memory first. It moves a new
        file to its place, so that the old one is never written over."""

        def atomic_save(checkpoint: Any, filepath: Any) -> None:
            if "://" in str(filepath):
                original(checkpoint, filepath)
            else:
                _local.whole = True
                try:
                    self.torch.save(checkpoint, os.fspath(filepath))
                finally:
                    _local.whole = False

        return atomic_save

    def shards(self, replace: Callable[[Any, str, Any], None]) -> Callable[[Any], None]:
        """What is to be done with `torch.distributed.checkpoint` once it is imported."""
        def cover(module: Any) -> None:
            if self.writer.closed or not hasattr(module, "save"):       # taken back meanwhile; before torch 2.2
                return
            held = distributed.Shards(self.torch, self.writer, self.saved).save(module.save)
            for user, name, _ in holders([id(module.save)]):
                replace(user, name, held)

        return cover

    def hand_over(self, path: str, folder: str, records: list[tuple[str, Any, int]], alignment: int) -> None:
        over = bool(folder) and not getattr(_local, "whole", False)     # safetensors puts new files in the place of old ones, too
        self.writer.save(os.path.abspath(path), folder, records, alignment, over)
        self.saved()


class _Recording:
    """The context manager that `torch.save` enters in the place of its zip writer."""

    def __init__(self, saves: Saves, name: str, original: Any):
        self.saves = saves
        self.name = name
        self.original = original
        self.recorder = _LocalRecorder()

    def __enter__(self) -> Recorder:
        return self.recorder

    def __exit__(self, kind: Any, error: Any, trace: Any) -> None:
        _local.records = False
        if kind is not None:
            return          # it could not be pickled: nothing was written, and what is there stays
        recorder, version = self.recorder, _version(self.saves.torch)
        recorder.records.append(("version", version, len(version)))
        try:
            self.saves.hand_over(self.name, archive.archive_name(self.name), recorder.records, recorder.alignment())
        except Unsuitable:
            self._plainly()
        except OSError:
            raise
        except Exception as failure:  # noqa: BLE001 - a guest fails open: whatever is wrong with us, the file is saved
            notices.tell(f"saturate: {self.name} is saved plainly: {type(failure).__name__}: {failure}\n")
            self._plainly()

    def _plainly(self) -> None:
        """As torch would have done it, in its turn."""
        self.saves.writer.wait_for(list(self.saves.writer.pending))
        with self.original(self.name) as file:
            for name, data, size in self.recorder.records[:-1]:
                on_device = not isinstance(data, bytes) and data.device.type != "cpu"
                file.write_record(name, data.cpu() if on_device else data, size)


class _LocalRecorder(Recorder):
    """Records are written after everything was pickled: an object that saves something itself does so before."""

    def write_record(self, name: str, data: Any, size: int) -> None:
        _local.records = True
        super().write_record(name, data, size)


_versions: list[bytes] = []


def _version(torch: Any) -> bytes:
    """The format version that this torch writes at the end of its archives."""
    if not _versions:
        import zipfile

        buffer = io.BytesIO()
        torch.serialization.save(0, buffer)     # not `torch.save`, for which a script may have put one of its own
        with zipfile.ZipFile(buffer) as file:
            _versions.append(file.read("archive/version"))
    return _versions[0]


def _hands_over_storages(torch: Any, original: Any) -> bool:
    """Whether this torch gives its zip writer storages; an address on a GPU could not be read."""
    recorder = Recorder()
    torch.serialization._open_zipfile_writer = lambda name: contextlib.nullcontext(recorder)
    try:
        torch.serialization.save(torch.zeros(1, device="cpu"), "a")       # written nowhere, unless a script's own `torch.save` were asked
    finally:
        torch.serialization._open_zipfile_writer = original
    return not recorder.addresses


def _imported(name: str) -> Any:
    """A module of the user's environment; None where it cannot be imported: then the script cannot save with it either."""
    try:
        return importlib.import_module(name)
    except Exception:  # noqa: BLE001 - a broken installation, or a stand-in, raises anything
        return None


def _held(tensors: Any) -> bool:
    """Whether memory holds the file of these beside them, which safetensors writes from the tensors themselves. It is given their bytes,
    or (from release 0.7 on) says where they are."""
    available = available_bytes()
    size = sum(len(one["data"]) if isinstance(one, dict) else one.data_len for one in tensors.values())
    return available is None or size <= available // 2


_DISTRIBUTED = "torch.distributed.checkpoint"

#: Modules of Lightning that hold the name of its writer.
_LIGHTNING = ("lightning.fabric.plugins.io.torch_io", "lightning_fabric.plugins.io.torch_io")


def install(torch: Any, writer: Writer, guards: Guards, replace: Callable[[Any, str, Any], None]) -> list[str]:
    """Put the seams in with `replace(owner, name, value)`. Returns what is covered, in words.

    A script may import what it saves with at its first save: safetensors is imported here where it is installed; distributed
    checkpoints, which most scripts do without, are met when they are imported. Lightning is there, or it does not train.
    """
    saves = Saves(torch, writer, guards.hold_signals)
    covered = ["torch.save"]
    original = torch.serialization._open_zipfile_writer
    if _hands_over_storages(torch, original):
        replace(torch.UntypedStorage, "cpu", saves.storage_cpu(torch.UntypedStorage.cpu))
    replace(torch.serialization, "_open_zipfile_writer", saves.zip_writer(original))
    module = _imported("safetensors.torch")
    if module is not None and hasattr(module, "serialize_file") and hasattr(module, "serialize"):
        replace(module, "serialize_file", saves.safetensors_file(module))
        opens = sys.modules["safetensors"].safe_open
        held = guards.looking(opens)
        for user, name, _ in holders([id(opens)]):
            replace(user, name, held)                   # its users took it by name
        covered.append("safetensors")
    if torch.distributed.is_available():
        once_imported(_DISTRIBUTED, saves.shards(replace))
        covered.append(_DISTRIBUTED)
    for name in _LIGHTNING:
        module = sys.modules.get(name)
        if module is not None and hasattr(module, "_atomic_save"):
            replace(module, "_atomic_save", saves.atomic_save(module._atomic_save))
            covered.append("Lightning")
    return covered
