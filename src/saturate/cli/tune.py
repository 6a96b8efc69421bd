"""Find what makes a training command faster, prove that it still trains the same, and write a recipe.

The command runs many times, for a short while each, and isolated: files that it writes are thrown away, experiment
trackers are offline, and nothing outside the study folder changes.
"""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from saturate.cli._options import add_study_options, duration, ids, memory, must_exist, percent
from saturate.cli._output import answer, coloured, present, show_json, tell, width, with_program
from saturate.cli._running import Progress, answered, one_signal_interrupts, show_log
from saturate.errors import TooNoisy

if TYPE_CHECKING:
    from saturate.records.result import TuneResult

TAKES_COMMAND = True


def configure(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--budget", type=duration, default=600.0, metavar="TIME", help="how long to search: 90s, 10m, 2h (default: 10m)")
    parser.add_argument("--only", type=ids, metavar="IDS", help="try these techniques only (comma-separated)")
    parser.add_argument("--skip", type=ids, default=frozenset(), metavar="IDS", help="do not try these techniques")
    parser.add_argument("--allow", choices=["convergence"],
                        help="also try techniques that change the training itself (of the built-in ones only global-batch does, and that one "
                             "is put into a recipe by hand)")
    parser.add_argument("--threshold", type=percent, default=0.02, metavar="SHARE", help="the gain that counts (default: 2%%)")
    parser.add_argument("--fit", type=memory, metavar="LIMIT",
                        help="find the fastest recipe that needs no more memory than this: 20GiB, 512MiB; of the device, or resident on a CPU")
    parser.add_argument("--race", choices=["auto", "concurrent", "alternate"], default="auto",
                        help="whether two processes are raced side by side or one after the other (default: by memory)")
    add_study_options(parser)


def execute(arguments: argparse.Namespace) -> int:
    command = arguments.command
    must_exist(command)

    def show(result: TuneResult) -> None:
        if arguments.json:
            show_json(result)

    def show_nothing(reason: str) -> None:
        if arguments.json:
            answer(_nothing(command, reason))

    def so_far(interruption: KeyboardInterrupt) -> bool:
        record = getattr(interruption, "record", None)      # of a study.ending.Interrupted
        if record is None:
            return False
        show(record.result)
        tell(f"{_stands(record.result)}; the same command goes on from here\n")
        return True

    with answered(show_nothing, so_far):
        from saturate.report import terminal
        from saturate.study import summary
        from saturate.study.state import Request
        from saturate.study.tune import environment_of_user, tune

        request = Request(
            argv=command, cwd=Path.cwd(), environment=environment_of_user(), directory=arguments.dir.absolute(),
            budget_s=arguments.budget, threshold=arguments.threshold, only=arguments.only, skip=arguments.skip,
            allow_convergence=arguments.allow == "convergence", race_mode=arguments.race, step=arguments.step,
            timeout_s=arguments.timeout, limit_bytes=arguments.fit,
        )
        with one_signal_interrupts(), Progress(sys.stderr, arguments.budget) as say:
            record, error = tune(request, say, on_end=say.ends)
    show(record.result)
    found = error or summary.verdict_error(record)
    stream = sys.stderr if arguments.json else sys.stdout
    if found is None or (error is None and isinstance(found, TooNoisy)):
        present(with_program(terminal.summary(record, width=width(stream), color=coloured(stream))), stream)
    if found is not None:
        show_log(found)
        raise found
    return 0


def _stands(result: TuneResult) -> str:
    """What a study that was interrupted has so far: its recipe is there from the first moment on, and empty as long as nothing is kept."""
    kept = any(technique.fate == "kept" for technique in result.techniques)
    return f"best so far: {result.recipe}" if kept else "nothing is kept so far"


def _nothing(command: list[str], reason: str) -> dict[str, Any]:
    """The object for a tune that could not even begin: that of a `TuneResult`, which needs a library that may be what is missing. There
    may be no folder for a recipe, or it is another study's: its recipe is an empty file that is there on every machine."""
    unknown = dict.fromkeys((
        "speedup", "speedup_ci", "verified", "noise_floor", "break_even_steps", "peak_bytes", "baseline_peak_bytes", "limit_bytes", "fits"))
    no_step = dict.fromkeys(("step_ms", "startup_s", "warmup_s", "compile_s", "recompiles"))
    return {
        "schema": 1, "run": "", "command": command, "baseline": no_step, "tuned": no_step, "verdict": "inconclusive",
        "verified_reason": reason, "break_even_reason": reason, "techniques": [], "recipe": os.devnull, "report": "", **unknown,
    }
