"""After a trial: hand its caches on to later trials, and throw its other writes away."""

from __future__ import annotations

import contextlib
import getpass
import hashlib
import json
import os
import re
import shutil
import stat
from pathlib import Path

from saturate.trial import abandoned, supervised, tree
from saturate.trial.cage import INDEX, LAYERS, SHADOW, CagePlan

#: In the run folder: that of the rehearsal of its cage.
REHEARSAL = "rehearsal"

_ELSEWHERE = Path("/tmp")       # whatever TMPDIR says: its path may be as long
_SOCKET_PATH_BYTES = 107        # sun_path, less the final zero
_SOCKET_NAME_BYTES = 36         # "/pymp-xxxxxxxx/listener-xxxxxxxx" and torch's "/torch-shm-dir-XXXXXX/manager.sock"

_locks: dict[Path, int] = {}    # of the folders under /tmp that this process has made


def collect_caches(run_dir: Path, study_dir: Path, plan: CagePlan) -> Path:
    """Move what an ended trial added to the user's cache folders into the study, and return the folder to give to
    later plans as `lower_caches`. Nothing else that the trial wrote is in it. In mode "intercept" there is nothing to
    move: caches are really written there.
    """
    handed = study_dir / "caches"
    handed.mkdir(exist_ok=True)
    index = run_dir / INDEX
    if index.exists():
        for layer in json.loads(index.read_text()):
            if layer["at"] in plan.caches:
                target = Path(f"{handed}{layer['at']}")
                _like(layer["at"], target)
                _merge(run_dir / layer["upper"], target)
    return handed


def _like(path: str, target: Path) -> None:
    """Make `target`, the mirror of `path`, with the mode and owner of the original's last folder."""
    target.mkdir(parents=True, exist_ok=True)
    try:
        seen = os.stat(path)
    except FileNotFoundError:
        return
    target.chmod(stat.S_IMODE(seen.st_mode) | 0o700)
    if os.geteuid() == 0:
        os.chown(target, seen.st_uid, seen.st_gid)


def _merge(source: Path, target: Path) -> None:
    """Move everything in `source` into `target`; folders that both have are merged, files of `source` win."""
    for entry in os.scandir(source):
        there = target / entry.name
        if entry.is_dir(follow_symlinks=False) and there.is_dir() and not there.is_symlink():
            _merge(Path(entry.path), there)
        else:
            if there.is_dir() and not there.is_symlink():
                shutil.rmtree(there)
            os.replace(entry.path, there)


def inductor_folder() -> str:
    """The name of the folder that torch's Inductor has for a user, in /tmp or the TMPDIR."""
    try:
        name = getpass.getuser()
    except (KeyError, ImportError, OSError):        # an id without a name, usual in containers
        name = f"uid_{os.getuid()}"
    return "torchinductor_" + re.sub(r'[\\/:*?"<>|]', "_", name)


def scratch_folder(run_dir: Path) -> Path:
    """The TMPDIR of an intercepted trial, and of a candidate of `optimize`: in the run folder, or, where the path of a socket
    there would be too long, a folder under /tmp whose name follows from the run folder's."""
    inside = run_dir / "tmp"
    if len(os.fsencode(inside)) <= _SOCKET_PATH_BYTES - _SOCKET_NAME_BYTES:
        return inside
    digest = hashlib.sha256(os.fsencode(run_dir)).hexdigest()[:abandoned.DIGITS]
    return _ELSEWHERE / f"{_prefix()}{digest}"


def _prefix() -> str:
    return f"saturate-{os.geteuid()}-"


def make_scratch(run_dir: Path) -> Path:
    """One under /tmp is held by this process until `let_go`, and those go that killed processes have left there. Raises PermissionError
    when it belongs to someone else."""
    folder = scratch_folder(run_dir)
    elsewhere = folder.parent == _ELSEWHERE
    if elsewhere:
        let_go(folder)
        abandoned.clear(_ELSEWHERE, _prefix())
    while True:
        try:
            folder.mkdir(mode=0o700, exist_ok=True)
            seen = folder.lstat()
        except FileNotFoundError:
            if not folder.parent.is_dir():
                raise
            continue                # somebody took it for abandoned, before it was held
        if not stat.S_ISDIR(seen.st_mode) or seen.st_uid != os.geteuid():
            raise PermissionError(f"{folder} belongs to another user")
        if not elsewhere:
            return folder
        try:
            lock = abandoned.locked(folder, wait=True)
        except OSError:
            return folder           # no locks here: there nobody removes it either
        if lock is not None:        # else somebody took it for abandoned, and removed it
            _locks[folder] = lock
            return folder


def let_go(folder: Path) -> None:
    """Whoever made this folder here is done with it."""
    if (lock := _locks.pop(folder, None)) is not None:
        os.close(lock)


def discard(run_dir: Path, plan: CagePlan | None = None) -> None:
    """Delete what a trial wrote outside its run folder in its own view. The rest of the run folder (logs, results) stays.

    Works on what a killed trial left: folders of mode 000 (overlayfs makes one) are opened first.
    """
    scratch = Path(plan.scratch) if plan and plan.scratch else scratch_folder(run_dir.resolve())
    for folder in (run_dir / LAYERS, run_dir / SHADOW, run_dir / REHEARSAL):
        _remove(folder)
    with contextlib.suppress(FileNotFoundError):        # another process clears away what a killed trial has left, too, and goes on with it
        _remove(scratch)
    let_go(scratch)
    (run_dir / INDEX).unlink(missing_ok=True)


def left_behind(run_dir: Path) -> bool:
    """Whether something lies there that no trial leaves which was ended by its controller."""
    return any(path.exists() for path in (*(run_dir / name for name in (LAYERS, SHADOW, INDEX, supervised.ORDER, REHEARSAL)), scratch_folder(run_dir.resolve())))


def clear_away(run_dir: Path) -> None:
    """End and `discard` a trial whose controller was killed."""
    tree.kill_marked(os.fsencode(f"SATURATE_PLAN={run_dir / 'plan.json'}"))     # its supervisor does so too
    (run_dir / supervised.ORDER).unlink(missing_ok=True)
    discard(run_dir)


def _remove(folder: Path) -> None:
    if folder.is_symlink() or not folder.exists():
        return
    os.chmod(folder, 0o700)
    for entry in os.scandir(folder):
        if entry.is_dir(follow_symlinks=False):
            _remove(Path(entry.path))
        else:
            os.unlink(entry.path)
    os.rmdir(folder)
