"""Whose fault the end of a trial is, said in an error with the exit code of that."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest

from saturate.cli._running import show_log
from saturate.errors import EnvironmentProblem, InjectionDefeated, SaturateError, SaturateFailed, WorkloadFailed
from saturate.study import ending
from saturate.trial.outcome import KINDS, Outcome
from saturate.trial.process import TrialEnded


@pytest.mark.parametrize("kind", ending.OURS)
def test_what_fails_on_our_side_after_the_baseline_is_not_the_commands(kind) -> None:
    """Seen: an agent that could not write a file had the user run the command several times without saturate."""
    with pytest.raises(EnvironmentProblem) as raised, ending.in_our_words(Path("study")):
        raise TrialEnded(Outcome(kind, "OSError: [Errno 27] File too large"))
    error = raised.value
    assert (error.exit_code, error.message) == (3, "saturate fails here, not the command") and "doctor" in error.remedy


def test_what_fails_on_the_commands_side_stays_the_commands() -> None:
    with pytest.raises(WorkloadFailed, match="run again") as raised, ending.in_our_words(Path("study")):
        raise TrialEnded(Outcome("crashed", "ValueError: heads"))
    assert raised.value.exit_code == 4 and raised.value.cause == "crashed: ValueError: heads"


def test_what_fails_later_than_the_first_process_came_says_when() -> None:
    """A script that failed at the end of its first epoch, behind all steps of the first process, was told to be run several times."""
    error = ending.failed_again(TrialEnded(Outcome("crashed", "AttributeError: TPU"), steps=118))
    assert error.message == "the command failed when it was run again, after 118 training steps" and error.remedy.endswith("for more steps than that")


def test_an_agent_that_never_woke_up_is_no_failure_of_the_command() -> None:
    assert isinstance(ending.failed_again(TrialEnded(Outcome("no_agent", "`python -I` ignores PYTHONPATH"))), InjectionDefeated)


def test_every_end_has_an_error() -> None:
    assert all(isinstance(ending.failed_again(TrialEnded(Outcome(kind, ""))), SaturateError) for kind in KINDS) and set(ending.OURS) <= set(KINDS)


@pytest.mark.parametrize("raised", [RuntimeError("can't start new thread"), MemoryError(), BlockingIOError(errno.EAGAIN, os.strerror(errno.EAGAIN)),
                                    OSError(errno.EMFILE, os.strerror(errno.EMFILE))], ids=lambda error: type(error).__name__)
def test_limits_of_this_user_are_no_errors_of_saturates_own(raised) -> None:
    with pytest.raises(EnvironmentProblem) as caught, ending.in_our_words(Path("study")):
        raise raised
    assert not isinstance(caught.value, SaturateFailed) and "ulimit" in caught.value.remedy and caught.value.cause


def test_the_last_words_of_a_command_that_fails_later_are_shown(start, script, capsys) -> None:
    """They were for the first run only: an A/A race or a verification that it did not live through named no log."""
    trial = start(str(script("print('my last words')\nraise ValueError('heads')")))
    with pytest.raises(WorkloadFailed, match="run again") as raised, ending.in_our_words(Path("study")):
        trial.wait_ready()
    show_log(raised.value)
    assert "my last words" in capsys.readouterr().err and raised.value.evidence == str(trial.log)
