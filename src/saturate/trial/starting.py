"""Why a trial's command was not even started: the line that the supervisor's child leaves in the log, and what it means."""

from __future__ import annotations

import re

from saturate.trial.outcome import Outcome

#: STAGE is what failed: see `supervise._run_workload`.
_LINE = re.compile(r"^saturate: could not start: (?P<stage>[a-z ]+): (?P<why>(?P<error>\w+): .*)$", re.MULTILINE)

_REMEDIES = {
    "standard input": "give standard input as a file that you may read",
    "working directory": "start it again in a folder that stays",
}
_NO_INTERPRETER = "begin it with a line such as #!/bin/sh, or name its interpreter in the command, as in `bash SCRIPT`"
_NOT_EXECUTABLE = "make it executable with chmod +x, or name its interpreter in the command"


def not_started(report: dict[str, object] | None, log: str) -> Outcome | None:
    """What the supervisor's report and the log say of a command that was not started; None: it was."""
    found = _LINE.search(log) if report is not None and report.get("code") in (126, 127) else None
    if found is None:
        return None
    stage, why = found["stage"], found["why"][:300]
    if stage != "program":
        return Outcome("not_started", f"{stage}: {why}", _REMEDIES.get(stage, ""))
    if "[Errno 8]" in why:
        return Outcome("command_not_found", f"it has no first line that says what runs it: {why}", _NO_INTERPRETER)
    if found["error"] == "PermissionError":
        return Outcome("command_not_found", why, _NOT_EXECUTABLE)
    return Outcome("command_not_found", why, "check the command's name and path")
