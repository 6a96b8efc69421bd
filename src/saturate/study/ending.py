"""What ends a study from outside, in words for the user."""

from __future__ import annotations

import errno
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import msgspec

from saturate.errors import EnvironmentProblem, SaturateError, SaturateFailed, StudyDamaged, WorkloadFailed
from saturate.records.result import StudyRecord
from saturate.trial.process import TrialEnded


class Interrupted(KeyboardInterrupt):
    """Ctrl-C or SIGTERM. Everything that ran was stopped; `record` holds the best so far, and the study can be resumed."""

    def __init__(self, record: StudyRecord):
        super().__init__("interrupted")
        self.record = record


@contextmanager
def in_our_words(folder: Path) -> Iterator[None]:
    """Turn what the workload, the study file and the operating system may raise into a SaturateError with cause and remedy, and
    a bug of our own into SaturateFailed, so that what was found until then is written all the same."""
    try:
        yield
    except SaturateError:
        raise
    except TrialEnded as ended:
        raise WorkloadFailed(
            "the command failed when it was run again", cause=f"{ended.outcome.kind.replace('_', ' ')}: {ended.outcome.reason}",
            remedy=ended.outcome.remedy or "run it several times without saturate",
        ) from ended
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
            "the operating system refuses something that tuning needs", cause=str(error), remedy="saturate doctor looks for the cause",
        ) from error
    except Exception as bug:
        raise SaturateFailed.of(bug) from bug
