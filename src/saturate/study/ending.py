"""What ends a study from outside, in words for the user."""

from __future__ import annotations

import errno
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import msgspec

from saturate.errors import (
    EnvironmentProblem,
    InjectionDefeated,
    SaturateError,
    SaturateFailed,
    StudyDamaged,
    WorkloadFailed,
)
from saturate.records.result import StudyRecord
from saturate.report import words
from saturate.trial import starting
from saturate.trial.outcome import Outcome
from saturate.trial.process import TrialEnded


class Interrupted(KeyboardInterrupt):
    """Ctrl-C or SIGTERM. Everything that ran was stopped; `record` holds the best so far, and the study can be resumed."""

    def __init__(self, record: StudyRecord):
        super().__init__("interrupted")
        self.record = record


_REFUSED = "the operating system refuses something that tuning needs"
#: What Python says, as a RuntimeError, where this user may have no more threads.
_NO_THREAD = "can't start new thread"

#: Ends of a trial that are no fault of the command.
OURS = ("agent_failed", "cage_refused", "not_started", "refused_by_isolation", "clock_disagrees")


def failure(outcome: Outcome, problem: str, otherwise: str, evidence: str = "") -> SaturateError:
    """What to raise where the command as it is ended so: `problem` and, where the end suggests no remedy, `otherwise` are said
    of a failure of its own."""
    cause = f"{outcome.kind.replace('_', ' ')}: {outcome.reason}"
    if outcome.kind == "no_agent":
        return InjectionDefeated("saturate cannot reach this command", cause=outcome.reason, remedy=outcome.remedy)
    if outcome.kind in OURS:
        return EnvironmentProblem("saturate fails here, not the command", cause=cause, evidence=evidence,
                                  remedy=outcome.remedy or "saturate doctor looks for the cause")
    return WorkloadFailed(problem, cause=cause, evidence=evidence, remedy=outcome.remedy or otherwise)


def failed_again(ended: TrialEnded) -> SaturateError:
    """What to raise where the command ran before, and now ended so. Its log is the evidence: the verbs show its end."""
    problem, remedy = "the command failed when it was run again", "run it several times without saturate"
    if ended.steps:         # the first process may never have come so far
        problem, remedy = f"{problem}, after {words.count(ended.steps, 'training step')}", f"{remedy}, for more steps than that"
    return failure(ended.outcome, problem, remedy, str(ended.log or ""))


@contextmanager
def in_our_words(folder: Path) -> Iterator[None]:
    """Turn what the workload, the study file and the operating system may raise into a SaturateError with cause and remedy, and
    a bug of our own into SaturateFailed, so that what was found until then is written all the same."""
    try:
        yield
    except SaturateError:
        raise
    except TrialEnded as ended:
        raise failed_again(ended) from ended
    except msgspec.ValidationError as error:
        raise StudyDamaged(
            "the study holds an answer that is none", cause=str(error),
            remedy=f"move {folder} away and run the command again; nothing in it is deleted",
        ) from error
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise EnvironmentProblem(
                f"the disk of {folder} is full", cause=str(error),
                remedy="free space there, or choose another disk with --dir FOLDER; the same command goes on from here",
            ) from error
        raise EnvironmentProblem(
            _REFUSED, cause=str(error), remedy=starting.NO_MORE if error.errno in starting.LIMITS else "saturate doctor looks for the cause",
        ) from error
    except Exception as bug:
        if isinstance(bug, MemoryError) or _NO_THREAD in str(bug):
            raise EnvironmentProblem(_REFUSED, cause=str(bug) or "memory ran out", remedy=starting.NO_MORE) from bug
        raise SaturateFailed.of(bug) from bug
