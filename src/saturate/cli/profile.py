"""Run a training command once, look where its time goes, and say what limits it.

Steps are timed without a profiler first; then a few are recorded with one. The command runs isolated, as in `saturate
tune`: files that it writes are thrown away, trackers are offline. Trace, record and report stay in the study folder.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from saturate.cli._options import add_study_options, duration, must_exist
from saturate.cli._output import coloured, present, show_json, width, with_program
from saturate.cli._running import Progress, answered, one_signal_interrupts
from saturate.records.analysis import Profile

TAKES_COMMAND = True


def configure(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--steps", type=count, metavar="N",
                        help="steps to record (default: 5 to 40, so that they take 0.4 s; fewer where they are long)")
    parser.add_argument("--budget", type=duration, default=300.0, metavar="TIME", help="how long to wait for a steady step (default: 5m)")
    parser.add_argument("--with", dest="recorder", choices=["torch", "nsys"], default="torch",
                        help="what records: torch.profiler, or Nsight Systems (default: torch)")
    parser.add_argument("--synthetic-input", action="store_true",
                        help="also time steps that replay one batch, which shows what the loader costs")
    add_study_options(parser)
    parser.add_argument("-v", "--verbose", action="store_true", help="say all that the report says, not only what matters most")


def execute(arguments: argparse.Namespace) -> int:
    from saturate.report import analysis
    from saturate.report.profile_brief import brief
    from saturate.study.profile import nothing, profile
    from saturate.study.state import Request
    from saturate.study.tune import environment_of_user

    command = arguments.command
    must_exist(command)

    def show(found: Profile) -> None:
        if arguments.json:
            show_json(found)

    request = Request(argv=command, cwd=Path.cwd(), environment=environment_of_user(), directory=arguments.dir.absolute(),
                      budget_s=arguments.budget, step=arguments.step, timeout_s=arguments.timeout)
    with answered(lambda reason: show(nothing(request, reason))), one_signal_interrupts():
        found = profile(request, arguments.steps, Progress(sys.stderr), nsys=arguments.recorder == "nsys", synthetic=arguments.synthetic_input)
    show(found)
    stream = sys.stderr if arguments.json else sys.stdout
    blocks = analysis.can_draw(getattr(stream, "encoding", None))
    summary = analysis.summary if arguments.verbose else brief
    present(with_program(summary(found, width=width(stream), color=coloured(stream), blocks=blocks)), stream)
    return 0


def count(text: str) -> int:
    if not text.isdecimal() or not 2 <= int(text) <= 1000:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of steps from 2 to 1000")
    return int(text)
