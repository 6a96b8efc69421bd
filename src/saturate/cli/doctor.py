"""Look for what keeps this machine, folder and Python from tuning, with the exact fix for each."""

from __future__ import annotations

import argparse
import dataclasses
import json
from pathlib import Path

from saturate.cli._output import paint
from saturate.machine import doctor

_STYLES = {"ok": ("green",), "note": ("yellow",), "problem": ("bold", "red"), "unknown": ("yellow",)}
_BLOCKED = 3


def configure(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--python", metavar="PATH", help="the Python of your training (default: the one on PATH)")
    parser.add_argument("--dir", type=Path, default=Path(), metavar="PATH", help="where tune would run (default: here)")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--paste", action="store_true", help="leave out names of users, homes and hosts, for a public issue")


def execute(arguments: argparse.Namespace) -> int:
    """Exit code 0 when tune can work here, 3 when a problem prevents it."""
    folder = arguments.dir.absolute()
    checks = doctor.examine(arguments.python, folder, extra=[("isolation", lambda: _isolation(folder))])
    problems = [check for check in checks if check.status == "problem"]
    if arguments.json:
        text = json.dumps({"schema": 1, "ready": not problems, "checks": [dataclasses.asdict(check) for check in checks]})
    else:
        text = rendered(checks, plain=arguments.paste)
    print(doctor.redact(text) if arguments.paste else text)
    return _BLOCKED if problems else 0


def rendered(checks: list[doctor.Check], plain: bool = False) -> str:
    """One line per check, a fix below those that have one, the conclusion last."""
    width = max(len(check.name) for check in checks)
    lines = []
    for check in checks:
        label = check.status.ljust(7)
        lines.append(f"{label if plain else paint(label, *_STYLES[check.status])}  {check.name.ljust(width)}  {check.found}")
        if check.fix:
            lines.append(f"{'':7}  {'':{width}}  fix: {check.fix}")
    count = sum(check.status == "problem" for check in checks)
    return "\n".join([*lines, "", f"{count} problem{'s' * (count > 1)} to fix before tune can work" if count else "ready to tune"])


def _isolation(folder: Path) -> doctor.Check:
    """Trials run on copy-on-write overlays where the kernel allows it; otherwise writes are intercepted."""
    from saturate.trial import planning

    permitted, reason = planning.probe(folder)
    if permitted:
        return doctor.Check("isolation", "ok", reason or "overlays are permitted")
    return doctor.Check("isolation", "note", f"no overlays ({reason}); writes of trials will be intercepted instead",
                        "nothing has to be done; to permit overlays, allow unprivileged user namespaces")
