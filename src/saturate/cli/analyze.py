"""Say where the time of recorded steps went, and how much fixing it could gain at most.

Reads what torch.profiler exports (Kineto JSON, also gzipped) and what `nsys export --type sqlite` writes. Several
files are the ranks of one run.
"""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path
from typing import Any

from saturate.checkpoints import durable
from saturate.cli._output import coloured, place_of, present, show_json, tell, width
from saturate.errors import EnvironmentProblem, UsageError
from saturate.records.spelling import suggestion

#: Files on one command line. A run has fewer ranks, and each costs seconds; more is a glob that went wrong.
MOST = 4096


def configure(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("files", nargs="*", metavar="FILE", help="a trace; several are the ranks of one run")
    parser.add_argument("--against", nargs=2, type=Path, metavar=("OLD", "NEW"), help="compare two traces instead")
    parser.add_argument(
        "--trim", type=Path, metavar="OUT", help="also write a small trace of a few steps, for Perfetto"
    )
    parser.add_argument("--steps", type=positive, default=3, metavar="N", help="steps that --trim keeps (default: 3)")
    parser.add_argument("--html", type=Path, metavar="PATH", help="also write the analysis as one HTML file")
    parser.add_argument("--json", action="store_true", help="print one JSON object on standard output")


def execute(arguments: argparse.Namespace) -> int:
    """Exit code 0 also when a trace carries no conclusion: that is an answer."""
    files = _files(arguments)
    try:
        from saturate.cli import _analysis as analysis
    except ImportError as error:
        if (error.name or "").partition(".")[0] != "numpy":
            raise
        raise EnvironmentProblem(
            "reading a trace needs numpy, which is not installed here",
            cause=str(error),
            remedy="pip install 'saturate[trace]'",
        ) from error

    stream = sys.stderr if arguments.json else sys.stdout
    progress = analysis.Progress(sys.stderr)
    if arguments.against:
        record, text, page = analysis.compared(*files, progress, **_look(stream))
    else:
        record, text, page = analysis.analysed(files, progress, **_look(stream))
    if arguments.json:
        show_json(record)
    present(text, stream)
    if arguments.html:
        _write(arguments.html, page())
        tell(f"wrote {arguments.html}\n")
    if arguments.trim:
        from saturate.trace.trim import trim

        done = trim(files[0], arguments.trim, arguments.steps)
        size = arguments.trim.stat().st_size
        tell(f"wrote {arguments.trim} ({analysis.kept(done)}; {size:,} bytes), which opens in Perfetto\n")
    return 0


def _files(arguments: argparse.Namespace) -> list[Path]:
    """The files to read. Raises UsageError before any is read: a long list takes long."""
    names = list(dict.fromkeys(arguments.files))
    if again := len(arguments.files) - len(names):
        tell(f"{again:,} of the {len(arguments.files):,} traces were named before, and are read once\n")
    if len(names) > MOST:
        raise UsageError(
            f"{len(names):,} traces at once: at most {MOST:,} are read",
            cause=f"the first is {names[0]}",
            remedy="a sample of the ranks tells as much: every tenth, say",
        )
    files = [Path(name) for name in names]
    if arguments.against:
        if files:
            raise UsageError("--against takes its two traces itself", remedy="saturate analyze --against OLD NEW")
        files = list(arguments.against)
    if not files:
        raise UsageError(
            "saturate analyze needs a trace",
            remedy="saturate analyze trace.json.gz; saturate profile -- python train.py records one",
        )
    if arguments.trim and (arguments.against or len(files) > 1):
        raise UsageError("--trim takes one trace", remedy="saturate analyze FILE --trim OUT")
    missing = [path for path in files if _absent(path)]
    if missing:
        raise UsageError(
            f"there is no file {missing[0]}" + (f", nor {len(missing) - 1:,} more" if missing[1:] else ""),
            remedy=_near(missing[0]) or "check the path; saturate profile -- python train.py records a trace",
        )
    if arguments.trim and _head(files[0]).startswith(b"SQLite format 3"):
        raise UsageError(
            "--trim takes a Kineto trace",
            cause=f"{files[0]} is an SQLite database, which Perfetto does not open",
            remedy="leave --trim away: the analysis reads it as it is",
        )
    places = []
    for option, out in (("--html", arguments.html), ("--trim", arguments.trim)):
        if out is not None:
            places.append(place_of(out, option))
            if any(_same(out, path) for path in files):
                raise UsageError(f"{option} would overwrite the trace {out}", remedy="name another file")
    if len(places) > len(set(places)):
        raise UsageError("--html and --trim would write to the same file", remedy="name two files")
    return files


def _near(path: Path) -> str:
    """The file beside it that it may have been meant to name."""
    try:
        return suggestion(path.name, [entry.name for entry in path.absolute().parent.iterdir()])
    except OSError:
        return ""


def _absent(path: Path) -> bool:
    try:
        return not path.exists()
    except OSError:  # it cannot be seen; who reads it says why
        return False


def _head(path: Path) -> bytes:
    """The first bytes; of a file that cannot be read, none: who reads it says why. Never of a pipe, which would wait."""
    try:
        with path.open("rb") if path.is_file() else open(os.devnull, "rb") as file:
            return file.read(16)
    except OSError:
        return b""


def _same(one: Path, other: Path) -> bool:
    try:
        return os.path.samefile(one, other)
    except OSError:  # one of them is not there
        return False


def _look(stream: Any) -> dict[str, Any]:
    """How text looks on `stream`."""
    from saturate.report.analysis import can_draw

    return {"width": width(stream), "color": coloured(stream), "blocks": can_draw(stream.encoding)}


def _write(path: Path, text: str) -> None:
    """All of the file or nothing of it. Raises EnvironmentProblem where it cannot be written."""
    try:
        durable.replace_text(place_of(path, "--html"), text)
    except OSError as error:
        raise EnvironmentProblem(
            f"{path} cannot be written", cause=error.strerror or str(error), remedy="free some space there, or name another place"
        ) from error


def positive(text: str) -> int:
    """A whole number from 1."""
    if not text.isascii() or not text.isdigit() or not 0 < int(text) < 10**6:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number from 1")
    return int(text)
