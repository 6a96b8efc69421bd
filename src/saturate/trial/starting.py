"""Why a trial's command was not even started: what the supervisor says of itself, or the line that its child leaves in the log,
and what it means."""

from __future__ import annotations

import errno
import re

from saturate.trial.outcome import Outcome

#: STAGE is what failed: see `supervise._run_workload`.
_LINE = re.compile(r"^saturate: could not start: (?P<stage>[a-z ]+): (?P<why>(?P<error>\w+): .*)$", re.MULTILINE)

#: Limits of the machine or of this user, which are no fault of the command.
LIMITS = (errno.EAGAIN, errno.ENOMEM, errno.EMFILE, errno.ENFILE)

_REMEDIES = {
    "standard input": "give standard input as a file that you may read",
    "working directory": "start it again in a folder that stays",
}
_NO_INTERPRETER = "begin it with a line such as #!/bin/sh, or name its interpreter in the command, as in `bash SCRIPT`"
NO_MORE = "allow this user more processes, open files and memory (ulimit -a shows the limits), or end other programs"
_NO_SPACE = "free space there, or choose another disk with --dir FOLDER"
_NOT_EXECUTABLE = "make it executable with chmod +x, or name its interpreter in the command"


def not_started(report: dict[str, object] | None, log: str) -> Outcome | None:
    """What the supervisor's report and the log say of a command that was not started; None: it was."""
    if report is not None and report.get("ended") == "not_started":
        why = str(report["why"])
        return Outcome("not_started", f"the process that watches the command cannot work: {why[:300]}",
                       _NO_SPACE if _says(why, errno.ENOSPC, errno.EDQUOT) else NO_MORE)
    found = _LINE.search(log) if report is not None and report.get("code") in (126, 127) else None
    if found is None:
        return None
    stage, why = found["stage"], found["why"][:300]
    if stage != "program":
        return Outcome("not_started", f"{stage}: {why}", _REMEDIES.get(stage, ""))
    if _says(why, errno.ENOEXEC):
        return Outcome("command_not_found", f"it has no first line that says what runs it: {why}", _NO_INTERPRETER)
    if found["error"] == "PermissionError":
        return Outcome("command_not_found", why, _NOT_EXECUTABLE)
    if _says(why, *LIMITS):
        return Outcome("not_started", f"{stage}: {why}", NO_MORE)
    return Outcome("command_not_found", why, "check the command's name and path")


def _says(why: str, *numbers: int) -> bool:
    """Whether an OSError of one of these numbers is told."""
    return any(f"[Errno {number}]" in why for number in numbers)
