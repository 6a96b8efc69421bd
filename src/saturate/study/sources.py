"""The code that a command runs, and whether somebody changed it while it was measured.

A study takes minutes, and every process of it reads the user's files anew: two programs would be compared, and the recipe
would be of neither. So each process that has started is followed by a look at the files, and so is each that has failed.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from saturate.errors import EnvironmentProblem
from saturate.machine import fingerprint

#: Arguments that name such files are settings, which a script reads as it does its modules. Others may be what it writes.
_SETTINGS = {".py", ".sh", ".yaml", ".yml", ".json", ".toml", ".cfg", ".ini", ".conf", ".gin"}


def digests(loaded: Iterable[str], argv: Sequence[str], cwd: Path) -> dict[str, str]:
    """SHA-256 by path, of the files of the modules that the command has loaded and of the settings that its arguments name.
    What only a trial sees, since the command wrote it there, is left out."""
    words = [word.rpartition("=")[2] for word in argv[1:]]
    named = [str(cwd / word) for word in words if os.path.splitext(word)[1] in _SETTINGS]
    found = {path: fingerprint.digest(Path(path)) for path in (*loaded, *named)}
    return {path: digest for path, digest in found.items() if digest}


def changed(files: Mapping[str, str]) -> list[str]:
    """Those whose content is another one now, or that are gone."""
    return [path for path, digest in files.items() if fingerprint.digest(Path(path)) != digest]


def problem(files: Mapping[str, str]) -> EnvironmentProblem | None:
    """The error of a study whose files have changed since it began; None: they have not."""
    other = changed(files)
    if not other:
        return None
    more = f" and {len(other) - 3} more" if len(other) > 3 else ""
    return EnvironmentProblem(
        "the command's code was changed while it was measured", cause=f"{', '.join(other[:3])}{more}",
        remedy="run it again: it begins anew, or goes on if the files are put back; to work on them meanwhile, tune a copy "
               "(git worktree add)")
