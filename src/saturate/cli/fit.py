"""Find the largest batch that really trains within a limit of memory, and how throughput grows with the batch.

A few sizes are measured, the largest that should fit is predicted, and exactly that one is proved in a fresh process: for
50 steps, with the largest samples, an evaluation and a checkpoint. Without such a proof there is no answer (`inconclusive`).
The answer is advice: nothing is changed. The command runs at most four times, isolated, as in `saturate tune`; a process
that passes the limit is ended at once.
"""

from __future__ import annotations

import argparse
import re
import sys
from pathlib import Path

from saturate.cli._options import add_study_options, duration, memory, must_exist
from saturate.cli._output import coloured, present, show_json, tell, width, with_program
from saturate.cli._running import Progress, answered, one_signal_interrupts
from saturate.records.fit import Fit

TAKES_COMMAND = True


def configure(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--memory", type=memory, metavar="SIZE",
                        help="the limit: 4GiB. On a CPU of all processes of the command (required there), on a GPU of torch's allocator "
                             "(default: what the device has to give)")
    parser.add_argument("--target", choices=["memory", "throughput"], default="memory",
                        help="the largest batch, or the smallest that is as fast as any (default: memory)")
    parser.add_argument("--knob", type=knob, metavar="ARGUMENT",
                        help="search the script's own argument instead of its DataLoader: --knob=--batch-size")
    parser.add_argument("--max", type=size, dest="most", metavar="N", help="try no larger batch")
    parser.add_argument("--budget", type=duration, default=600.0, metavar="TIME", help="how long to search: 90s, 10m, 2h (default: 10m)")
    add_study_options(parser)


def execute(arguments: argparse.Namespace) -> int:
    from saturate.report import analysis
    from saturate.report import fit as report
    from saturate.study.fit import Asked, Interrupted, fit, nothing
    from saturate.study.state import Request
    from saturate.study.tune import environment_of_user

    command = arguments.command
    must_exist(command)

    def show(found: Fit) -> None:
        if arguments.json:
            show_json(found)

    def so_far(interruption: KeyboardInterrupt) -> bool:
        if not isinstance(interruption, Interrupted):
            return False
        show(interruption.found)
        if interruption.found.micro_batch is not None:
            tell(f"best so far: a batch of {interruption.found.micro_batch}\n")
        elif interruption.found.measured_batch is not None:
            tell(f"measured so far, not proved: a batch of {interruption.found.measured_batch}\n")
        return True

    request = Request(argv=command, cwd=Path.cwd(), environment=environment_of_user(), directory=arguments.dir.absolute(),
                      budget_s=arguments.budget, step=arguments.step, timeout_s=arguments.timeout)
    asked = Asked(request, arguments.memory, arguments.target, arguments.knob, arguments.most)
    with answered(lambda reason: show(nothing(asked, reason)), so_far), one_signal_interrupts(), Progress(sys.stderr, arguments.budget) as say:
        found = fit(asked, say)
    show(found)
    stream = sys.stderr if arguments.json else sys.stdout
    blocks = analysis.can_draw(getattr(stream, "encoding", None))
    present(with_program(report.summary(found, width=width(stream), color=coloured(stream), blocks=blocks)), stream)
    return 0


def size(text: str) -> int:
    if not re.fullmatch(r"[1-9]\d{0,8}", text):
        raise argparse.ArgumentTypeError(f"{text!r} is not a batch size")
    return int(text)


def knob(text: str) -> str:
    if not re.fullmatch(r"-{1,2}[A-Za-z][\w.-]*", text):
        raise argparse.ArgumentTypeError(f"{text!r} is not an argument such as --batch-size")
    return text
