"""Kill a training at random moments, start it again, and compare it with one that was left alone.

The command runs isolated, as in `saturate tune`: what it writes is thrown away at the end, but a process that is
started again finds what the killed one left. It ends with 0 whatever it found; see `verdict` and `drills`.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from saturate.cli._options import add_study_options, duration, must_exist, words
from saturate.cli._output import coloured, present, show_json, width, with_program
from saturate.cli._running import Progress, answered, one_signal_interrupts
from saturate.records.command_line import joined
from saturate.records.drill import DrillResult

if TYPE_CHECKING:
    from saturate.study.drill import Request

TAKES_COMMAND = True


def configure(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--resume-args", type=words, default=[], metavar="ARGS",
                        help="what to add when a killed run is started again: --resume-args=\"--resume ckpt.pt\"")
    parser.add_argument("--kills", type=kills, default=2, metavar="N",
                        help="kills while it trains; one more follows while it saves (default: 2)")
    parser.add_argument("--steps", type=steps, metavar="N",
                        help="updates of the uninterrupted run (default: until it has saved once more than it is killed)")
    parser.add_argument("--budget", type=duration, default=600.0, metavar="TIME", help="how long in all (default: 10m)")
    parser.add_argument("--seed", type=int, default=0, metavar="N", help="chooses the moments of the kills (default: 0)")
    add_study_options(parser)


def execute(arguments: argparse.Namespace) -> int:
    from saturate.report import drill as report
    from saturate.study.drill import Request, drill
    from saturate.study.tune import environment_of_user

    command = arguments.command
    must_exist(command)

    def show(result: DrillResult) -> None:
        if arguments.json:
            show_json(result)

    request = Request(
        argv=command, cwd=Path.cwd(), environment=environment_of_user(), directory=arguments.dir.absolute(),
        resume_args=arguments.resume_args, kills=arguments.kills, steps=arguments.steps, budget_s=arguments.budget,
        timeout_s=arguments.timeout, step=arguments.step, seed=arguments.seed,
    )
    with answered(lambda reason: show(nothing(request, reason))), one_signal_interrupts(), Progress(sys.stderr, arguments.budget) as say:
        result = drill(request, say)
    show(result)
    stream = sys.stderr if arguments.json else sys.stdout
    present(with_program(report.summary(result, width=width(stream), color=coloured(stream))), stream)
    return 0


def nothing(request: Request, reason: str) -> DrillResult:
    """The object for a drill that could not be carried out."""
    again = ["saturate", "drill", *request.options(request.resume_args), "--", *request.argv]
    return DrillResult(run="", command=request.argv, resume_command=request.argv, verdict="inconclusive", reason=reason,
                       next_command=joined(again))


def kills(text: str) -> int:
    if not text.isdecimal() or not 1 <= int(text) <= 20:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of kills from 1 to 20")
    return int(text)


def steps(text: str) -> int:
    if not text.isdecimal() or int(text) < 2:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of updates, at least 2")
    return int(text)
