"""A command below a supervisor (`supervise`): how trials, and the candidates of `optimize`, are started and ended."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from saturate.trial import tree
from saturate.trial.launch import PACKAGE

#: In the command's folder, until the supervisor has read it: what it starts, with the user's environment.
ORDER = "supervise.json"

#: How long a supervisor may take to kill its tree.
_KILLING_S = 15.0


def start(folder: Path, order: dict[str, Any], pass_fds: Sequence[int] = ()) -> subprocess.Popen[bytes]:
    """The supervisor, which starts what `order` says: "argv", "cwd", "environment", "log", and what else `supervise` knows. Whatever
    this raises (a full disk, no process more, Ctrl-C), the environment is not left in `folder`."""
    path = write(folder, order)
    try:
        return subprocess.Popen(
            [sys.executable, "-I", "-S", str(PACKAGE / "trial" / "supervise.py"), str(path)],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, pass_fds=pass_fds, start_new_session=True,
        )
    except BaseException:
        path.unlink(missing_ok=True)
        raise


def write(folder: Path, order: dict[str, Any]) -> Path:
    """The file that a supervisor reads and removes. Whatever this raises, it is not left."""
    path = folder / ORDER
    try:
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
        with open(descriptor, "w", encoding="utf-8") as file:
            json.dump({**order, "import_root": str(PACKAGE.parent)}, file)
        return path
    except BaseException:
        path.unlink(missing_ok=True)
        raise


def end(supervisor: subprocess.Popen[bytes], folder: Path, mark: str, grace_s: float = 0.0) -> dict[str, object] | None:
    """Wait `grace_s` for the command to end by itself, then have what is left killed. The supervisor's report; None where it was killed
    itself, and for one that has been ended before.

    `mark`: an entry in the environment of every process of the command, and of no other: what a killed supervisor watched over is
    nobody's child."""
    assert supervisor.stdin and supervisor.stdout
    if supervisor.stdout.closed:
        return None
    with contextlib.suppress(subprocess.TimeoutExpired):
        supervisor.wait(timeout=grace_s or 0.001)
    _tell(supervisor)
    try:
        supervisor.wait(timeout=_KILLING_S)
    except subprocess.TimeoutExpired:
        tree.kill(supervisor.pid)
        supervisor.kill()
        supervisor.wait()
    line = supervisor.stdout.readline()
    whole = line.endswith(b"\n")
    if not whole:
        tree.kill_marked(os.fsencode(mark))
    (folder / ORDER).unlink(missing_ok=True)        # where it was killed before it read that
    supervisor.stdout.close()                       # last: an interruption before it begins anew
    return json.loads(line) if whole else None


def _tell(supervisor: subprocess.Popen[bytes]) -> None:
    """That it is to kill its tree, now. The byte is for where a fork of this process holds the pipe open, too."""
    pipe = supervisor.stdin
    assert pipe is not None
    if not pipe.closed:                 # it was told before
        with contextlib.suppress(BrokenPipeError):      # it is gone already
            os.write(pipe.fileno(), b".")
        pipe.close()


def printed(log: Path, most: int) -> str:
    """The last `most` bytes of what the command printed; of a living one only the first half megabyte is there."""
    try:
        with open(log, "rb") as file:
            file.seek(0, os.SEEK_END)
            file.seek(max(0, file.tell() - most))
            return file.read().decode("utf-8", "replace")
    except FileNotFoundError:
        return ""
