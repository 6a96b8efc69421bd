"""What a search that was killed has left in its folder, and folders that such searches have left."""

from __future__ import annotations

import contextlib
import shutil
import time
from pathlib import Path

import msgspec

from saturate.checkpoints import durable
from saturate.errors import SaturateError
from saturate.inference import artifact, process
from saturate.trial.lock import FolderLock

#: Nothing changed in a folder for so long: whoever was told of it has had the time to go on there, and no search works in it, not even one
#: of another machine whose locks this one does not see (some network file systems).
QUIET_S = 24 * 3600.0


class _Stored(msgspec.Struct):
    artifact: str | None = None


class _Result(_Stored):
    """Of result.json, where the artifacts are that it tells of."""

    unconfirmed: _Stored | None = None


def clear_away(folder: Path) -> None:
    """Remove programs and copies of the model that no search needs any more, files that were being written, and artifacts that never were
    a result. Hold the folder's lock. What was found, logs and results stay."""
    process.clear_away(folder / "processes")
    for place in (folder, folder / "source"):
        with contextlib.suppress(OSError):
            durable.remove_litter(str(place))
    for copy in (folder / "program", *(folder / "sources").glob("baseline-*"), *(folder / "sources").glob("artifact-*")):
        shutil.rmtree(copy, ignore_errors=True)
    named = _named(folder / "result.json")
    for path in (folder / "artifacts").glob("*") if named is not None else ():
        if path.name.isdecimal() and path.name not in named and not _confirmed(path):
            shutil.rmtree(path, ignore_errors=True)


def _named(result: Path) -> set[str] | None:
    """Names of the artifacts that a result tells of; None: nobody knows."""
    try:
        found = msgspec.json.decode(result.read_bytes(), type=_Result)
    except FileNotFoundError:
        return set()
    except (OSError, ValueError, RecursionError):
        return None
    return {Path(one.artifact).name for one in (found, found.unconfirmed) if one is not None and one.artifact}


def _confirmed(path: Path) -> bool:
    """Whether it was a result, or nobody can tell: another version may have made it."""
    try:
        return artifact.read(path).scores is not None
    except SaturateError:
        return True


def clear_forsaken(parent: Path, prefix: str) -> None:
    """Remove the folders of searches without a workdir that ended without a result, killed or by an error, and were left alone for
    `QUIET_S`."""
    for folder in parent.glob(f"{prefix}{8 * '[0-9a-f]'}"):
        with contextlib.suppress(SaturateError, OSError):
            names = {path.name for path in folder.iterdir()} if not folder.is_symlink() else set()
            ours = "source" in names or names == {"lock"}       # no more, where the inputs were refused
            if ours and "result.json" not in names and time.time() - _changed(folder) > QUIET_S:
                with FolderLock(folder):
                    process.clear_away(folder / "processes")
                    shutil.rmtree(folder)


def _changed(folder: Path) -> float:
    """When a search did something here last, by the system's clock. Its lock does not tell: clearing away takes it, too."""
    written = (folder, *folder.glob("candidates.jsonl"), *folder.glob("processes"), *folder.glob("processes/*/output.log"))
    return max(path.stat().st_mtime for path in written)
