"""The user's check on a candidate: `scored` runs `check(run)` and turns whatever happens into data, scores or a problem with a name.

It remembers which samples the check used (calibration data must not be among them) and what the answers were. Whether a check can judge at
all is asked in `controls`; `of_candidate` asks whether it still can.
"""

from __future__ import annotations

import contextlib
import io
import sys
import time
import traceback
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Literal, TextIO

from saturate.errors import CheckUnusable
from saturate.inference import samples, users_code
from saturate.inference.failures import CheckFailed, WorkerFailed
from saturate.inference.samples import Seen
from saturate.inference.scores import Scores, UnusableScores, read
from saturate.report import tracebacks

#: Of what a check prints, so many characters are kept.
MOST_OUTPUT = 64 * 1024

Check = Callable[[Callable[..., Any]], Any]


@dataclass(frozen=True)
class Problem:
    """Why a check gave no scores that can be used.

    raised, exited: the check ended by itself. unusable: what it returned. silent: it never asked for an answer. run: the
    model failed on what the check gave it. Found by the controls: blind (the answers do not matter), direction (noise is
    better), unstable (two runs differ by more than the budget), budget (it means nothing for these scores).
    """

    kind: Literal["raised", "exited", "unusable", "silent", "run", "blind", "direction", "unstable", "budget"]
    what: str
    remedy: str = ""


@dataclass(frozen=True)
class Scored:
    """One run of the check. `scores` is None where there is a `problem`."""

    scores: Scores | None
    problem: Problem | None
    samples: Seen                       # every input sample that the check used
    asked: str                          # digest of all inputs, in order
    answers: str                        # digest of all answers, in order: equal where every bit is
    calls: int
    output: str                         # what the check printed, and the traceback where it raised
    seconds: float
    failure: Exception | None = None    # what `run` raised first
    fractions: bool = False             # whether there were any among the answers

    def required(self) -> Scores:
        """The scores. Raises CheckFailed without them; what `run` raised, where that is why."""
        if self.failure is not None:
            raise self.failure
        if self.problem is not None or self.scores is None:
            raise CheckFailed(self.problem.what if self.problem is not None else "the check gave no scores")
        return self.scores


def scored(check: Check, run: Callable[..., Any], metric: str | None = None, *, echo: TextIO | None = None) -> Scored:
    """Run the check. What it prints is shown on `echo` (default: stderr), not on stdout.

    Never raises for what the check or `run` does, except KeyboardInterrupt and the like.
    """
    recorder = _Recorder(run)
    printed = _Tee(echo or sys.stderr)
    scores, problem = None, None
    start = time.monotonic()
    try:
        with users_code.forks_end(), contextlib.redirect_stdout(printed):
            returned = check(recorder)
    except SystemExit as error:
        problem = Problem("exited", f"the check ended the program (exit code {error.code})", "return the score instead")
    except (Exception, GeneratorExit) as error:  # noqa: BLE001 - the user's code may raise anything; it becomes a problem with a name
        printed.keep(tracebacks.of_user(error))
        problem = Problem("raised", f"the check raised {_last_line(error)}{_place(error)}",
                          "call it by itself with the model in evaluation mode in place of run: it must work there first")
    else:
        try:
            scores = read(returned, metric)
        except UnusableScores as error:
            problem = Problem("unusable", str(error), error.remedy)
    if recorder.interruption is not None:   # the check has swallowed it
        raise recorder.interruption
    if recorder.failure is not None:        # also where the check caught it: such scores are of something else
        scores = None
        said = recorder.failure.reason if isinstance(recorder.failure, WorkerFailed) else _last_line(recorder.failure)
        problem = Problem("run", f"the model failed on what the check gave it: {said}",
                          "call model(*batch) by itself on a batch of the check: it must work there first")
    elif problem is None and recorder.calls == 0:
        scores, problem = None, Problem("silent", "the check never called the function that it was given",
                                        "a check gets run, which has the model's signature: answer = run(*inputs)")
    return Scored(scores, problem, recorder.samples, recorder.asked.hex(), recorder.answers.hex(),
                  recorder.calls, printed.text(), time.monotonic() - start, recorder.failure, recorder.fractions)


def of_candidate(check: Check, run: Callable[..., Any], model: Callable[[], AbstractContextManager[Callable[..., Any]]],
                 metric: str | None = None) -> Scored:
    """`scored`, on a candidate. Where the check ends by itself, it is asked for the model once more (`model`: its `run`, in a process of
    its own), and then for the candidate again: what is out of order by now, data that is gone for one, is not held against that.

    Raises CheckUnusable where the check has no score for the model any more.
    """
    found = scored(check, run, metric)
    if found.problem is None or found.problem.kind == "run":
        return found
    with model() as own:
        again = scored(check, own, metric)
    if again.problem is not None:
        raise CheckUnusable(f"the check works no more: {again.problem.what}", cause="that happens with the model itself, for which it worked before",
                            evidence=again.output[-2000:], remedy="look at what it depends on (files, memory, services), and give the same command "
                                                                  "again, with the same workdir: what was found is known there")
    return scored(check, run, metric)


class _Recorder:
    """`run`, remembering what it was asked and what it answered."""

    def __init__(self, run: Callable[..., Any]):
        self.run = run
        self.calls = 0
        self.samples = Seen()
        self.asked, self.answers = samples.Digest(), samples.Digest()
        self.failure: Exception | None = None
        self.interruption: KeyboardInterrupt | None = None
        self.fractions = False

    def __call__(self, *inputs: Any, **named: Any) -> Any:
        self.calls += 1
        given = (*inputs, *named.values())
        self.samples.add(given)
        self.asked.feed(given)
        try:
            answer = self.run(*inputs, **named)
        except KeyboardInterrupt as error:
            self.interruption = error
            raise
        except Exception as error:
            self.failure = self.failure or error
            raise
        self.answers.feed(answer)
        self.fractions = self.fractions or any(tensor.is_floating_point() or tensor.is_complex() for tensor in samples.tensors(answer))
        return answer

    def __getattr__(self, name: str) -> Any:
        # Most functions that evaluate begin with model.eval(): what is missing is not theirs to look for in here.
        raise AttributeError(f"what a check gets is a function and no module: it has no {name!r}, and answers as in evaluation mode, "
                             "on the device that the model is on")


class _Tee(io.TextIOBase):
    """Shows what is written, and keeps the first part of it."""

    def __init__(self, echo: TextIO):
        self.echo = echo
        self.kept = io.StringIO()

    def writable(self) -> bool:
        return True

    def write(self, text: str) -> int:
        self.echo.write(text)
        self.keep(text)
        return len(text)

    def flush(self) -> None:
        self.echo.flush()

    def keep(self, text: str) -> None:
        self.kept.write(text[:max(0, MOST_OUTPUT - self.kept.tell())])

    def text(self) -> str:
        return self.kept.getvalue()


def _last_line(error: BaseException) -> str:
    return traceback.format_exception_only(error)[-1].strip()


def _place(error: BaseException) -> str:
    where = tracebacks.place(error)
    return f" ({where})" if where else ""
