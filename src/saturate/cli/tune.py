"""Find what makes a training command faster, prove that it still trains the same, and write a recipe.

The command runs many times, for a short while each, in a cage: files that it writes are thrown away, trackers are
offline. Nothing outside the study folder changes.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import sys
import time
from pathlib import Path
from typing import TextIO

import msgspec

from saturate.cli._output import coloured
from saturate.errors import SaturateError, UsageError
from saturate.records.result import StepTime, TuneResult

TAKES_COMMAND = True


def configure(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--budget", type=duration, default=600.0, metavar="TIME", help="how long to search: 90s, 10m, 2h (default: 10m)")
    parser.add_argument("--only", type=ids, metavar="IDS", help="try these techniques only (comma-separated)")
    parser.add_argument("--skip", type=ids, default=frozenset(), metavar="IDS", help="do not try these techniques")
    parser.add_argument("--allow", choices=["convergence"], help="also try techniques that change the training itself")
    parser.add_argument("--threshold", type=percent, default=0.02, metavar="SHARE", help="the gain that counts (default: 2%%)")
    parser.add_argument("--fit", type=memory, metavar="LIMIT",
                        help="find the fastest recipe that needs no more memory than this: 20GiB, 512MiB; of the device, or resident on a CPU")
    parser.add_argument("--step", type=step, metavar="WHAT", help="what ends a step, if it is found wrongly: backward:4, optimizer:1")
    parser.add_argument("--race", choices=["auto", "concurrent", "alternate"], default="auto",
                        help="whether two processes are raced side by side or one after the other (default: by memory)")
    parser.add_argument("--timeout", type=duration, default=300.0, metavar="TIME", help="longest silence that is no hang (default: 5m)")
    parser.add_argument("--dir", type=Path, default=Path(".saturate"), metavar="PATH", help="the study folder (default: .saturate)")
    parser.add_argument("--json", action="store_true", help="print the result as one JSON object on standard output")


def execute(arguments: argparse.Namespace) -> int:
    from saturate.report import terminal
    from saturate.study import summary
    from saturate.study.ending import Interrupted
    from saturate.study.state import Request
    from saturate.study.tune import environment_of_user, tune

    command = arguments.command
    directory = arguments.dir.absolute()
    if shutil.which(command[0]) is None:
        raise UsageError(f"there is no command {command[0]!r}", remedy="check its spelling, or give its path")

    def show(result: TuneResult) -> None:
        if arguments.json:
            print(msgspec.json.encode(result).decode(), flush=True)

    try:
        request = Request(
            argv=command, cwd=Path.cwd(), environment=environment_of_user(), directory=directory,
            budget_s=arguments.budget, threshold=arguments.threshold, only=arguments.only, skip=arguments.skip,
            allow_convergence=arguments.allow == "convergence", race_mode=arguments.race, step=arguments.step,
            timeout_s=arguments.timeout, limit_bytes=arguments.fit,
        )
        with one_signal_interrupts():
            record, error = tune(request, Progress(sys.stderr))
    except UsageError:
        raise
    except SaturateError as problem:
        show(_nothing(command, problem.message))
        raise
    except Interrupted as interruption:
        show(interruption.record.result)
        print(f"best so far: {interruption.record.result.recipe}; the same command goes on from here", file=sys.stderr)
        raise
    except KeyboardInterrupt:
        show(_nothing(command, "interrupted"))
        raise
    except Exception as bug:
        show(_nothing(command, f"saturate itself failed: {type(bug).__name__}: {bug}"))
        raise
    error = error or summary.verification_error(record)
    show(record.result)
    if error is not None:
        show_log(error)
        raise error
    width = min(120, shutil.get_terminal_size((80, 24)).columns)
    stream = sys.stderr if arguments.json else sys.stdout
    print(terminal.summary(record, width=width, color=coloured(stream)), file=stream)
    return 0


class Progress:
    """One line per thing that was found out, on standard error, with the time since the start."""

    def __init__(self, stream: TextIO):
        self.stream = stream
        self.began = time.monotonic()
        self.gone = False

    def __call__(self, line: str) -> None:
        seconds = int(time.monotonic() - self.began)
        if self.gone:
            return
        try:
            print(f"[{seconds // 60:2d}:{seconds % 60:02d}] {line}", file=self.stream, flush=True)
        except OSError:
            self.gone = True        # the terminal was closed: nobody reads, but the study goes on


class one_signal_interrupts:
    """The first Ctrl-C, SIGTERM or SIGHUP ends a tune: trials are killed and the best so far is written. Later ones
    change nothing, so that they cannot end the cleaning up. A signal that was ignored stays ignored (nohup)."""

    def __enter__(self) -> None:
        import signal

        pending = True

        def interrupt(number: int, frame: object) -> None:
            nonlocal pending
            if pending:
                pending = False
                raise KeyboardInterrupt

        numbers = [n for n in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP) if signal.getsignal(n) is not signal.SIG_IGN]
        self.before = {number: signal.signal(number, interrupt) for number in numbers}

    def __exit__(self, *exception: object) -> None:
        import signal

        for number, handler in self.before.items():
            signal.signal(number, handler)


def show_log(error: SaturateError) -> None:
    """The workload's own last words, before our error: they are what the user needs to see."""
    if not error.evidence.endswith("output.log") or not os.path.exists(error.evidence):
        return
    with open(error.evidence, encoding="utf-8", errors="replace") as file:
        lines = file.read().splitlines()
    print("\n".join(["", *lines[-30:], ""]), file=sys.stderr)


def _nothing(command: list[str], reason: str) -> TuneResult:
    """The object for a tune that could not even begin."""
    return TuneResult(
        run="", command=command, baseline=StepTime(), tuned=StepTime(), speedup=None, speedup_ci=None,
        verdict="inconclusive", verified=None, verified_reason=reason, noise_floor=None, break_even_steps=None,
        techniques=[], recipe="", report="",
    )


def duration(text: str) -> float:
    """Seconds in "90", "90s", "10m", "1.5h".

    >>> duration("1.5h")
    5400.0
    """
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*(s|m|h|min|)", text.strip())
    if not match or float(match[1]) <= 0:
        raise argparse.ArgumentTypeError(f"{text!r} is not a time such as 90s, 10m or 2h")
    return float(match[1]) * {"s": 1, "": 1, "m": 60, "min": 60, "h": 3600}[match[2]]


def percent(text: str) -> float:
    """A share in "2%" or "0.02"."""
    try:
        value = float(text.removesuffix("%")) / (100 if text.endswith("%") else 1)
    except ValueError:
        value = -1.0
    if not 0 < value < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a share such as 2% or 0.02")
    return value


def memory(text: str) -> int:
    """Bytes in "20GiB"."""
    from saturate.records import sizes

    try:
        return sizes.parse(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def ids(text: str) -> frozenset[str]:
    return frozenset(word.strip() for word in text.split(",") if word.strip())


def step(text: str) -> str:
    if not re.fullmatch(r"(backward|optimizer):\d+", text):
        raise argparse.ArgumentTypeError(f"{text!r} is neither backward:N (N backward passes a step) nor optimizer:N (the N-th, from 0)")
    return text
