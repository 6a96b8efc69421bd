"""Look for what keeps this machine from training at its best and from tuning, with the exact fix for each."""

from __future__ import annotations

import argparse
import dataclasses
import shutil
import textwrap
from pathlib import Path

from saturate.cli._output import answer, paint
from saturate.machine import doctor

_STYLES = {"ok": ("green",), "note": ("yellow",), "problem": ("bold", "red"), "unknown": ("yellow",)}
_BLOCKED = 3
_STATUS_WIDTH = 7
_WIDE = 80                  # below, a check's text stands under its name instead of beside it
_WIDEST = 120


def configure(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--python", metavar="PATH", help="the Python of your training (default: the one on PATH)")
    parser.add_argument("--dir", type=Path, default=Path(), metavar="PATH", help="where tune would run (default: here)")
    parser.add_argument("--data", type=Path, metavar="PATH", help="where your data lies: its read rate is measured (default: --dir)")
    parser.add_argument("--measure", action="store_true", help="measure what the device can do at most: bandwidths, matmul rates")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--paste", action="store_true", help="for a public issue: leave out what identifies you and the machine")


def execute(arguments: argparse.Namespace) -> int:
    """Exit code 0 when tune can work here, 3 when a problem prevents it."""
    folder = arguments.dir.absolute()
    data = arguments.data.absolute() if arguments.data else None
    checks = doctor.examine(arguments.python, folder, extra=[("isolation", lambda: _isolation(folder))], data=data,
                            measure=arguments.measure)
    checks = [doctor.redacted(check, names=arguments.paste) for check in checks]
    problems = [check for check in checks if check.status == "problem"]
    if arguments.json:
        answer({"schema": 1, "ready": not problems, "checks": [dataclasses.asdict(check) for check in checks]})
    else:
        width = _WIDEST if arguments.paste else min(shutil.get_terminal_size((100, 24)).columns, _WIDEST)
        print(rendered(checks, width, plain=arguments.paste))
    return _BLOCKED if problems else 0


def rendered(checks: list[doctor.Check], width: int = 100, plain: bool = False) -> str:
    """Each check with a fix below it where there is one, the conclusion last; no line is wider than `width` unless a
    single word is."""
    names = max(len(check.name) for check in checks)
    beside = _STATUS_WIDTH + 2 + names + 2 if width >= _WIDE else 0
    lines = []
    for check in checks:
        label = check.status.ljust(_STATUS_WIDTH)
        label = label if plain else paint(label, *_STYLES[check.status])
        indent = beside or _STATUS_WIDTH + 2
        texts = _wrapped(check.found, width - indent)
        if check.fix:
            texts += _wrapped(f"fix: {check.fix}", width - indent)
        if beside:
            lines.append(f"{label}  {check.name.ljust(names)}  {texts.pop(0)}")
        else:
            lines.append(f"{label}  {check.name}")
        lines += [f"{'':{indent}}{text}" for text in texts]
    return "\n".join([*lines, "", conclusion(checks)])


def conclusion(checks: list[doctor.Check]) -> str:
    """What it comes to: what could be better, where something could, then whether tune can work."""
    problems, notes = (sum(check.status == status for check in checks) for status in ("problem", "note"))
    noted = f"{notes} thing{'s' * (notes > 1)} could be better\n" if notes else ""
    if problems:
        return f"{noted}{problems} problem{'s' * (problems > 1)} to fix before tune can work"
    return f"{noted}ready to tune"


def _wrapped(text: str, width: int) -> list[str]:
    return textwrap.wrap(text, max(width, 20), break_long_words=False, break_on_hyphens=False) or [""]


def _isolation(folder: Path) -> doctor.Check:
    """Trials run on copy-on-write overlays where the kernel allows it; otherwise writes are intercepted."""
    from saturate.trial import planning

    if not folder.is_dir():
        return doctor.Check("isolation", "unknown", f"there is no folder {folder}",
                            "create it, or choose another for the study: saturate tune --dir PATH")
    permitted, reason = planning.probe(folder)
    if permitted:
        return doctor.Check("isolation", "ok", reason or "overlays are permitted")
    return doctor.Check("isolation", "note", f"no overlays ({reason}); writes of trials will be intercepted instead; {planning.guards()}",
                        "nothing has to be done; to permit overlays, allow unprivileged user namespaces")
