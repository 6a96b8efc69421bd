"""Find the fastest way to run a model that stays within an accuracy budget, and prove it.

    saturate optimize mypkg.model:build --inputs mypkg.data:loader
    saturate optimize mypkg.model:build --inputs mypkg.data:loader --check mypkg.eval:score --max-drop 1% --budget 20m

The names are of functions, package.module:function or path/file.py:function. build() returns the module; loader()
gives an iterable of tuples of positional inputs; score(run) calls run(*inputs) as it would the model, and returns a
float, a dict or, best, one value per sample. Without --check, only what does not change the answers is tried. A part
of the inputs calibrates quantization, unless --calibration names others.
"""

from __future__ import annotations

import argparse
import math
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stdout
from pathlib import Path
from typing import Any

import msgspec

from saturate.cli._options import duration, ids
from saturate.cli._output import coloured, present, show_json, width, with_program
from saturate.cli._running import Progress, one_signal_interrupts
from saturate.cli.bench import threads
from saturate.errors import SaturateError, UsageError
from saturate.records.inference import CandidateRecord, OptimizeRecord

#: What --limit takes, and what it is of.
LIMITS = {"p50_ms": "per call", "p90_ms": "per call", "p99_ms": "per call", "peak_memory_gb": "10^9 bytes"}


def configure(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", metavar="MODEL", help="a function that returns the module: mypkg.model:build")
    parser.add_argument(
        "--inputs", required=True, metavar="NAME", help="a function that returns an iterable of tuples of inputs"
    )
    parser.add_argument(
        "--calibration",
        metavar="NAME",
        help="a function that returns inputs to calibrate quantization with (default: a part of --inputs)",
    )
    parser.add_argument(
        "--check", metavar="NAME", help="a function that scores run(*inputs): float, dict, or a value per sample"
    )
    parser.add_argument(
        "--max-drop", type=share, metavar="DROP", help="what the score may lose, in its own points: 1%% or 0.01"
    )
    parser.add_argument(
        "--max-flips", type=share, metavar="SHARE",
        help="how many answers may change between right and wrong, whichever way (default: any)",
    )
    parser.add_argument("--relative", action="store_true", help="--max-drop is a share of the model's own score")
    parser.add_argument("--lower-is-better", action="store_true", help="a lower score is a better one")
    parser.add_argument(
        "--metric", metavar="KEY", help="which entry counts, where the check returns a dict of several"
    )
    parser.add_argument(
        "--score-range",
        type=float,
        nargs=2,
        metavar=("LOW", "HIGH"),
        help="between which values a sample's score lies (default: 0 and 1 where all do, else between 0 and those seen)",
    )
    parser.add_argument(
        "--confidence",
        type=confidence,
        default=0.95,
        metavar="SHARE",
        help="how surely the loss is within --max-drop; `none` for point estimates (default: 95%%)",
    )
    parser.add_argument(
        "--train",
        metavar="NAME",
        help="a function that returns saturate.Train, or (loader, loss): unlocks recovery, QAT, distillation",
    )
    parser.add_argument(
        "--budget",
        type=duration,
        default=1200.0,
        metavar="TIME",
        help="how long to search: 90s, 20m, 2h (default: 20m)",
    )
    parser.add_argument(
        "--objective",
        choices=["latency", "throughput", "memory"],
        default="latency",
        help="what to improve (default: latency)",
    )
    parser.add_argument(
        "--limit",
        type=limit,
        action="append",
        default=[],
        metavar="NAME=VALUE",
        help=f"a limit to keep, repeatable: {', '.join(f'{name} ({unit})' for name, unit in LIMITS.items())}",
    )
    parser.add_argument(
        "--threads", type=threads, metavar="N", help="CPU threads of the model (default: as torch has it)"
    )
    parser.add_argument(
        "--only", type=ids, default=frozenset(), metavar="IDS", help="try these techniques only (comma-separated)"
    )
    parser.add_argument("--skip", type=ids, default=frozenset(), metavar="IDS", help="do not try these techniques")
    parser.add_argument(
        "--workdir",
        type=Path,
        default=Path(".saturate/optimize"),
        metavar="DIR",
        help="the study folder; the same command goes on in it (default: .saturate/optimize)",
    )
    parser.add_argument("--json", action="store_true", help="print the result as one JSON object on standard output")


def execute(arguments: argparse.Namespace) -> int:
    answer = sys.stdout  # before the user's code gets it
    with one_signal_interrupts() as signals:
        with _answer_alone():
            code, record, problem = _searched(arguments)
            signals.enough()  # what was found is told whole
        if arguments.json:
            show_json(record, answer)
        if problem is None or getattr(problem, "record", None) is not None:
            _show(record, sys.stderr if arguments.json or problem is not None else sys.stdout)
    if problem is not None:
        raise problem
    return code


def _searched(arguments: argparse.Namespace) -> tuple[int, OptimizeRecord, BaseException | None]:
    """Exit code, what to print, and what to raise after it. Only what the parser of the options refuses has no record."""
    try:
        with Progress(sys.stderr, arguments.budget) as say:
            return 0, _search(arguments, say), None
    except SaturateError as problem:
        found = getattr(problem, "record", None)  # the machine gave out in the middle of it
        return problem.exit_code, found or nothing(arguments, problem.message, problem.cause), problem
    except KeyboardInterrupt as interruption:
        found = getattr(interruption, "record", None)  # what the search had found until then, if it had begun
        record = _interrupted(found) if found is not None else nothing(arguments, "interrupted", "")
        return 130, record, interruption
    except Exception as bug:  # noqa: BLE001 - raised again once the object is printed
        return 3, nothing(arguments, f"saturate itself failed: {type(bug).__name__}: {bug}", ""), bug


def _interrupted(record: OptimizeRecord) -> OptimizeRecord:
    """What was not tried may help: without a winner there is no answer."""
    notes = [note for note in record.notes if not note.startswith("interrupted")]
    return msgspec.structs.replace(
        record,
        verdict=record.verdict if record.best is not None else "inconclusive",
        notes=["interrupted: the same command goes on from here", *notes],
    )


def _search(arguments: argparse.Namespace, say: Progress) -> OptimizeRecord:
    from saturate.cli._callables import call, resolve

    if (arguments.check is None) != (arguments.max_drop is None):
        raise UsageError(
            "--check and --max-drop belong together: one scores, the other says what may be lost",
            remedy="give both, or neither for a search that does not change the answers",
        )
    if arguments.max_flips is not None and arguments.check is None:
        raise UsageError("--max-flips counts answers that --check calls right or wrong", remedy="give --check and --max-drop too")
    if len(limits := dict(arguments.limit)) < len(arguments.limit):
        raise UsageError("a --limit is given twice", remedy="give each name once")
    named = {
        "model": arguments.model,
        "--inputs": arguments.inputs,
        "--calibration": arguments.calibration,
        "--check": arguments.check,
        "--train": arguments.train,
    }
    workdir = arguments.workdir.absolute()  # before the user's code changes the directory
    # All names before any is called: a typo must not cost a minute of building.
    found = {option: resolve(text, option) for option, text in named.items() if text is not None}

    from saturate.inference import api
    from saturate.inference.accuracy import Budget
    from saturate.inference.techniques import _registry

    api.known(_registry.load(), arguments.only, arguments.skip)
    budget = None
    if arguments.max_drop is not None:
        budget = Budget(
            max_drop=arguments.max_drop,
            relative=arguments.relative,
            higher_is_better=not arguments.lower_is_better,
            confidence=arguments.confidence,
            metric=arguments.metric,
            score_range=tuple(arguments.score_range) if arguments.score_range else None,
            max_flips=arguments.max_flips,
        )
    model = call(found["model"], f"{arguments.model}()")
    inputs = call(found["--inputs"], f"{arguments.inputs}()")
    calibration = None
    if "--calibration" in found:
        calibration = _given(call(found["--calibration"], f"{arguments.calibration}()"), arguments.calibration)
    train = _train(call(found["--train"], f"{arguments.train}()"), arguments.train) if "--train" in found else None
    result = api.optimize(
        model,
        inputs=inputs,
        check=found.get("--check"),
        budget=budget,
        objective=arguments.objective,
        limits=limits,
        time=arguments.budget,
        train=train,
        calibration=calibration,
        workdir=workdir,
        threads=arguments.threads,
        only=arguments.only,
        skip=arguments.skip,
        progress=say,
    )
    return result.record


def _given(calibration: Any, name: str) -> Any:
    if calibration is None:  # it would be taken for no option at all
        raise UsageError(
            f"--calibration: {name}() returned None", remedy="return an iterable of tuples of positional inputs"
        )
    return calibration


def _train(given: Any, name: str) -> Any:
    from saturate.inference.techniques._api import Train

    if isinstance(given, tuple) and len(given) == 2:
        return Train(*given)
    if isinstance(given, Train):
        return given
    raise UsageError(
        f"--train: {name}() returned a {type(given).__name__}",
        remedy="return saturate.Train(loader, loss), or (loader, loss)",
    )


def _show(record: OptimizeRecord, stream: Any) -> None:
    from saturate.report import inference as report

    present(with_program(report.summary(record, width=width(stream), color=coloured(stream))), stream)


@contextmanager
def _answer_alone() -> Iterator[None]:
    """What is written to standard output in here goes to standard error: what the user's code prints, and what
    libraries write below Python."""
    sys.stdout.flush()
    kept = os.dup(1)
    os.dup2(2, 1)
    try:
        with redirect_stdout(sys.stderr):
            yield
    finally:
        os.dup2(kept, 1)
        os.close(kept)


def nothing(arguments: argparse.Namespace, message: str, cause: str) -> OptimizeRecord:
    """The object for a search that found nothing, or could not begin."""
    reason = f"{message}: {cause}" if cause else message
    baseline = CandidateRecord(id="baseline", techniques=[], fate="failed", reason=reason)
    return OptimizeRecord(
        run="",
        model=arguments.model,
        device="",
        machine="",
        torch="",
        objective=arguments.objective,
        batch_size=None,
        max_drop=arguments.max_drop,
        relative=arguments.relative,
        confidence=arguments.confidence,
        limits=dict(arguments.limit),
        verdict="inconclusive",
        baseline=baseline,
        best_lossless=None,
        best=None,
        candidates=[],
        notes=[reason],
    )


def share(text: str) -> float:
    """Points of a score in "1%" or "0.01".

    >>> share("1%"), share("0.5")
    (0.01, 0.5)
    """
    try:
        value = float(text.removesuffix("%")) / (100 if text.endswith("%") else 1)
    except ValueError:
        value = -1.0
    if not 0 <= value < math.inf:
        raise argparse.ArgumentTypeError(f"{text!r} is not a drop such as 1% or 0.01")
    return value


def confidence(text: str) -> float | None:
    """A share in "95%" or "0.95"; None for "none"."""
    if text == "none":
        return None
    try:
        value = share(text)
    except argparse.ArgumentTypeError:
        value = 0.0
    if not 0.5 < value < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a confidence between 50% and 100%")
    return value


def limit(text: str) -> tuple[str, float]:
    """A name and a number in "p99_ms=15"."""
    from saturate.records.spelling import suggestion

    name, _, number = text.partition("=")
    if name not in LIMITS:
        raise argparse.ArgumentTypeError(
            f"{name!r} is none of {', '.join(LIMITS)}; {suggestion(name, LIMITS)}".rstrip("; ")
        )
    try:
        value = float(number)
    except ValueError:
        value = -1.0
    if not 0 < value < math.inf:
        raise argparse.ArgumentTypeError(f"{text!r} is not a limit such as p99_ms=15")
    return name, value
