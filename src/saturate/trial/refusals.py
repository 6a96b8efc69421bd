"""Did the cage's refusal end a command? Then it has not failed by itself, and this says what was refused."""

from __future__ import annotations

import os
import re

from saturate.trial.cage import SHADOW, CagePlan
from saturate.trial.log_text import decisive
from saturate.trial.outcome import Outcome

#: What the system says of a write that the cage refuses, by mode.
_READ_ONLY = re.compile(r"Read-only file system|\[Errno 30\]|errno = 30\b")
_GUARDED = re.compile(r"Permission denied|Operation not permitted|\[Errno 1?[13]\]|errno = 1?[13]\b")

#: What an overlay in a trial cannot do, and the folder below it can: to rename a folder that was there before, and to change what
#: belongs to an owner or a group that the trial's namespace does not know.
_ACROSS = re.compile(r"Invalid cross-device link|\[Errno 18\]|errno = 18\b")
_FOREIGN = re.compile(r"Value too large for defined data type|\[Errno 75\]|errno = 75\b")

#: What is said of a file that lies where interception has redirected it, by who looks for it where the script made it.
_ABSENT = re.compile(r"No such file or directory|\[Errno 2\]|errno = 2\b")

#: The innermost frame in an experiment tracker, and what it says of being kept offline (`agent/trackers.py`).
_TRACKER = re.compile(r' *File "[^"]*/(?P<name>wandb|comet_ml|neptune|clearml|swanlab|mlflow|aim|trackio)/[^"]*", line \d+, in ')
_FRAME = re.compile(r'^ *File "', re.MULTILINE)
_OFFLINE = re.compile(r"\boffline\b|\w*Offline\w*", re.IGNORECASE)

_QUOTED = re.compile(r"['\"‘`]([^'\"’`\n]+)['\"’]")
_ABSOLUTE = re.compile(r"(?<![\w./])/[^\s'\":,;)]+")
#: As in "script.sh: line 2: out/log: Permission denied".
_BEFORE = re.compile(r"([^:\n]+): (?:Read-only file system|Permission denied|Operation not permitted|No such file or directory)")

#: A program without a traceback says why it ends in its last lines; what it said before, it survived.
_LAST_LINES = 8

_WITHOUT_OVERLAYS = "if the command works without saturate, run it where overlays are allowed: saturate doctor says what forbids them here"
_INTERCEPTED = "set SATURATE_ISOLATION=intercept, which redirects what Python writes anywhere"
_AS_ASKED = "if the command works without saturate, unset SATURATE_ISOLATION: overlays, where the kernel allows them, refuse less"


def by_isolation(outcome: Outcome, plan: CagePlan, log: str) -> Outcome | None:
    """What to say instead of `outcome` where the cage refused what this user may do outside of it; None: it did not."""
    if outcome.kind not in ("crashed", "exited"):
        return None
    if (tracker := _asks_online(log)) and outcome.kind == "crashed":
        return Outcome("refused_by_isolation", f"{outcome.reason} (trials keep {tracker} offline)",
                       f"if the command works without saturate, switch {tracker} off for it (WANDB_MODE=disabled), or leave out what it asks of it")
    told = decisive(log).splitlines()
    last = told if outcome.kind == "crashed" else told[-_LAST_LINES:]
    remedy = _AS_ASKED if plan.asked else _WITHOUT_OVERLAYS
    if plan.mode == "intercept" and (line := next(filter(lambda line: _redirected(line, plan), reversed(last)), None)):
        return Outcome("refused_by_isolation", f"{line.strip()[:300]} (writes are intercepted here: what the script made there, C libraries and "
                                               "programs other than Python do not find)", remedy)
    if plan.mode == "intercept" and not plan.guarded:
        return None
    if plan.mode == "overlay" and (line := next(filter(lambda line: _beyond_overlays(line, plan.cwd), reversed(last)), None)):
        # As where an overlay is refused from the start: who started the trial goes on in the other mode.
        return Outcome("cage_refused", f"{line.strip()[:300]} (an overlay cannot do that to what was there before the trial)", _INTERCEPTED)
    pattern = _READ_ONLY if plan.mode == "overlay" else _GUARDED
    lines = [line for line in last if pattern.search(line)]
    line = next((line.strip()[:300] for line in reversed(lines) if _allowed_outside(line, plan.cwd)), None)
    if line is None:
        return None
    if plan.mode == "overlay":
        return Outcome("refused_by_isolation", f"{line} (read-only in a trial, which does not write there for real)", _elsewhere(plan))
    return Outcome("refused_by_isolation", f"{line} (writes are intercepted here: those of C libraries, of programs other than Python and "
                                           "of sockets are refused)", remedy)


def _asks_online(log: str) -> str:
    """The tracker that raised because it is offline; "" where none did."""
    told = decisive(log)
    frames = list(_FRAME.finditer(told))
    found = _TRACKER.match(told, frames[-1].start()) if frames else None
    return found["name"] if found and _OFFLINE.search(told, found.end()) else ""


def _elsewhere(plan: CagePlan) -> str:
    if plan.layout == "root":
        return f"let it write elsewhere, or {_INTERCEPTED}"
    return f"name that folder in the command (--output-dir=FOLDER), let it write below home, /tmp or the working directory, or {_INTERCEPTED}"


def _beyond_overlays(line: str, cwd: str) -> bool:
    """Whether the line tells of what only the overlay refuses."""
    if _ACROSS.search(line):
        places = [_existing(path) for path in _paths_in(line, cwd)]
        return len(places) > 1 and len({os.stat(place).st_dev for place in places}) == 1
    return bool(_FOREIGN.search(line)) and _allowed_outside(line, cwd)


def _redirected(line: str, plan: CagePlan) -> bool:
    """Whether the line misses something that is there in this trial alone, or whose folder is: what Python itself misses is not there
    in that folder either."""
    if not _ABSENT.search(line):
        return False
    python = "[Errno 2]" in line
    places = {place for path in _paths_in(line, plan.cwd) for place in ((path,) if python else (path, os.path.dirname(path)))}
    shadow = os.path.join(plan.run_dir, SHADOW)
    return any(os.path.exists(shadow + os.path.realpath(place)) and not os.path.exists(place) for place in places)


def _allowed_outside(line: str, cwd: str) -> bool:
    """Whether a path that the line names can be written without the cage. True where it names none: sockets do not."""
    paths = _paths_in(line, cwd)
    return not paths or any(os.access(_existing(path), os.W_OK) for path in paths)


def _paths_in(line: str, cwd: str) -> list[str]:
    named = _QUOTED.findall(line) or _ABSOLUTE.findall(line) or _BEFORE.findall(line)
    return [os.path.join(cwd, name.strip()) for name in named if not name.strip().startswith("[Errno")]


def _existing(path: str) -> str:
    """The path, or the nearest folder above it that is there."""
    while not os.path.lexists(path) and path != os.path.dirname(path):
        path = os.path.dirname(path)
    return path
