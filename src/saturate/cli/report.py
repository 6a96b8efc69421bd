"""Print the path of the newest report in the study folder: of `tune`, `profile`, `fit` or `optimize`."""

from __future__ import annotations

import argparse
from pathlib import Path

from saturate.errors import UsageError


def configure(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--dir", type=Path, default=Path(".saturate"), metavar="PATH", help="the study folder (default: .saturate)")


def execute(arguments: argparse.Namespace) -> int:
    print(last(arguments.dir))
    return 0


def last(folder: Path) -> Path:
    """The newest report at most two levels below `folder`, absolute. Raises UsageError when there is none."""
    # Deeper down lie the files that trials wrote, thousands of them.
    found = [path for pattern in ("report.html", "*/report.html", "*/*/report.html") for path in folder.glob(pattern) if path.is_file()]
    if not found:
        raise UsageError(f"there is no report in {folder}", remedy="saturate tune -- python train.py writes one")
    return max(found, key=lambda path: path.stat().st_mtime_ns).resolve()
