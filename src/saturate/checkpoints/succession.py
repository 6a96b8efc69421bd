"""Saves a distributed checkpoint into a folder that holds one: the old one stays loadable until the new one is.

torch's own writes into the old shards, and removes `.metadata` before it renames the new one to it: a kill meanwhile leaves neither
checkpoint. `.metadata` names the shards, so new ones may be called anything: here they get names that nothing has yet, and
renaming `.metadata` over the old one is what changes the checkpoint. Then the shards of the old one are removed.
In a folder without a checkpoint the files are called as torch calls them.
"""

from __future__ import annotations

import copy
import dataclasses
import os
import re
import secrets
from collections.abc import Callable
from pathlib import Path
from typing import Any

from saturate import notices
from saturate.checkpoints import shards
from saturate.checkpoints.durable import sync_folder

#: How the shards of one rank begin, whatever stands behind it.
_OF_RANK = re.compile(r"__\d+_")


def follows(writer: Any) -> bool:
    """Whether a writer of the script's own is torch's plain one, which may overwrite: only that is known here."""
    from torch.distributed.checkpoint import FileSystemWriter

    return type(writer) is FileSystemWriter and bool(getattr(writer, "overwrite", True))


def successor(folder: Path, like: Any = None) -> Any:
    """A `FileSystemWriter` for one save into `folder`, with the settings of `like` but its threads."""
    from torch.distributed.checkpoint import FileSystemWriter

    writer = FileSystemWriter(folder) if like is None else copy.copy(like)
    writer.__class__ = _successor_of(FileSystemWriter)
    writer.reset(folder)
    writer.fs = _renaming_only(type(writer.fs))()
    writer.thread_count = 1         # others would be threads of the script to our guards, and wait for what they are to write
    writer.per_thread_copy_ahead = 0    # all of it is in host memory; torch would make a context on GPU 0 to copy ahead, on every rank
    writer.sync_files = True        # the old shards go when the new ones are there, also after a power failure
    writer.before, writer.prefix = set(), ""
    return writer


def tidy(folder: Path, writer: Any, metadata: Any) -> None:
    """After a save that ended: remove what this rank wrote before, and what the checkpoint before it named. Where a folder is the
    node's own, each rank sees its own files only."""
    named = {entry.relative_path for entry in metadata.storage_data.values()}
    own = _OF_RANK.match(writer.prefix)
    _remove(folder, lambda name: name not in named and (name in writer.before or (own is not None and name.startswith(own[0]))))


def give_up(folder: Path, writer: Any) -> None:
    """After a save that failed: remove what this rank wrote, unless it is the checkpoint by now, or has torch's names."""
    if _OF_RANK.fullmatch(writer.prefix) is None and writer.prefix:
        named = shards.named(folder)
        _remove(folder, lambda name: name.startswith(writer.prefix) and name not in named)


def _remove(folder: Path, unwanted: Callable[[str], bool]) -> None:
    try:
        for name in os.listdir(folder):
            if name.endswith(shards.ENDING) and unwanted(name):
                (folder / name).unlink(missing_ok=True)         # another rank may be at it, too
    except OSError as error:
        notices.tell(f"saturate: files of an earlier checkpoint stay in {folder}: {error}\n")


def _renaming_only(plain: type) -> type:
    """The file system of a writer, for which nothing is removed before something else is renamed to its name."""

    class Renaming(plain):  # type: ignore[misc]
        def rm_file(self, path: Any) -> None:
            """`rename` replaces it."""

    return Renaming


def _successor_of(plain: type) -> type:
    class Successor(plain):  # type: ignore[misc]
        """`before`: the shards that are named by the checkpoint that was there. `prefix`: how this rank's begin."""

        def prepare_global_plan(self, plans: list[Any]) -> list[Any]:
            """On one rank, for all: torch gives each rank a prefix, to which something new is added."""
            plans = super().prepare_global_plan(plans)
            folder = Path(self.path)
            if not (folder / shards.METADATA).exists():
                return plans
            self.before = shards.named(folder)
            new = secrets.token_hex(4)
            return [dataclasses.replace(plan, storage_data=dataclasses.replace(
                plan.storage_data, prefix=f"{plan.storage_data.prefix}{new}_")) for plan in plans]

        def write_data(self, plan: Any, planner: Any) -> Any:
            self.prefix = plan.storage_data.prefix
            written = super().write_data(plan, planner)
            written.wait()
            sync_folder(Path(self.path))        # the names, before `.metadata` has them
            return written

        def finish(self, metadata: Any, results: Any) -> None:
            super().finish(metadata, results)
            sync_folder(Path(self.path))        # before any rank hears of it, and removes the old ones

    return Successor
