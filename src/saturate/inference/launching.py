"""What a candidate's process is begun with, whether it starts afresh or is forked: a command, an environment, a private folder."""

from __future__ import annotations

import os
import secrets
import shutil
import sys
from pathlib import Path

from saturate.errors import EnvironmentProblem
from saturate.inference.formats.aoti import SCRATCH
from saturate.inference.source import Source
from saturate.trial import layers

#: Every process of a candidate has this variable, with a value of its own.
MARK = "SATURATE_WORKER"

#: What the name of a folder ends with in which Inductor's compiler is at work.
_BUILDING = "_CxxBuild"

#: Variables of the user's process that a candidate's process does not get: one would keep torch from reading what
#: that process wrote, the other asks for the agent of `saturate run`.
_UNWANTED = ("TORCH_FORCE_WEIGHTS_ONLY_LOAD", "SATURATE_PLAN")


def python(statements: str) -> list[str]:
    """The command of a fresh interpreter with this one's `sys.path`."""
    return [sys.executable, "-c", f"import sys; sys.path[:] = {path()!r}; {statements}"]


def path() -> list[str]:
    return [entry or os.getcwd() for entry in sys.path if isinstance(entry, str)]


def environment(source: Source, folder: Path, threads: int, token: str) -> dict[str, str]:
    """Of a process with this private `folder`; `token` is the value of `MARK`."""
    found = {name: value for name, value in os.environ.items() if name not in _UNWANTED}
    return found | {
        "OMP_NUM_THREADS": str(threads), "MKL_NUM_THREADS": str(threads), "PYTHONUNBUFFERED": "1", "PYTHONFAULTHANDLER": "1",
        "TORCHINDUCTOR_CACHE_DIR": str(source.folder.absolute() / "inductor"), SCRATCH: str(folder / "scratch"), MARK: token,
        # A compiler that is killed removes none of its temporary files.
        "TMPDIR": str(layers.scratch_folder(folder))}


def make_temporary(source: Source, own: Path) -> None:
    """The TMPDIR of a process with the private folder `own`. In it Inductor looks, whatever TORCHINDUCTOR_CACHE_DIR says, for headers of C++
    that it has precompiled, and makes them anew where there are none: ten seconds and more of each process that compiles, or loads what was
    compiled. So all of a search have one folder for them. Raises OSError.
    """
    temporary = layers.make_scratch(own)
    if not sys.platform.startswith("linux") or "clang" in os.environ.get("CXX", ""):
        return          # clang takes a header only where it was compiled
    _remove_unfinished(source.headers)
    for folder in (source.headers.parent, source.headers):      # not the source's own, which is private
        folder.mkdir(exist_ok=True)
    there = temporary / layers.inductor_folder() / source.headers.name
    there.parent.mkdir(exist_ok=True)
    there.symlink_to(source.headers.absolute())


def _remove_unfinished(headers: Path) -> None:
    """Headers whose compiler was killed, which would be taken for whole. Inductor has a folder beside each until it is done; no process of a search
    compiles while another one starts."""
    for building in headers.glob(f"*{_BUILDING}"):
        (headers / f"{building.name.removesuffix(_BUILDING)}.gch").unlink(missing_ok=True)
        shutil.rmtree(building)


def private(folder: Path) -> Path:
    """A new folder inside of `folder` that only this user can enter."""
    own = folder / f"process-{secrets.token_hex(4)}"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        own.mkdir(mode=0o700)
    except OSError as error:
        raise EnvironmentProblem(f"no folder for a candidate's process in {folder}", cause=str(error),
                                 remedy="free some space, or choose another folder with workdir") from error
    return own


def discard(own: Path) -> None:
    """Remove what a process wrote into its private folder `own`, and into its TMPDIR."""
    temporary = layers.scratch_folder(own.absolute())
    for folder in (own / "scratch", temporary):
        shutil.rmtree(folder, ignore_errors=True)
    layers.let_go(temporary)
