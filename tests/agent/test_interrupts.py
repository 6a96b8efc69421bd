"""What a signal handler of the script raises while code of ours runs is the script's to catch."""

from __future__ import annotations

import functools
import signal
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import saturate
from saturate.techniques._interrupts import from_signal_handler

torch = pytest.importorskip("torch")


class TimeUp(Exception):
    pass


class Handler:
    def method(self, number: int, frame: Any) -> None:
        raise TimeUp

    __call__ = method


def function(*arguments: Any) -> None:
    raise TimeUp


def once(number: int, frame: Any) -> None:
    signal.signal(number, signal.SIG_DFL)
    raise TimeUp


def through_another(number: int, frame: Any) -> None:
    def limit() -> None:
        raise TimeUp

    limit()


HANDLERS = {"function": function, "method": Handler().method, "object": Handler(), "lambda": lambda *arguments: function(),
            "partial": functools.partial(lambda name, number, frame: function(), "name"), "once": once, "nested": through_another}


def interrupted() -> None:
    signal.raise_signal(signal.SIGUSR1)


@pytest.fixture(autouse=True)
def restored() -> Any:
    before = signal.getsignal(signal.SIGUSR1)
    yield
    signal.signal(signal.SIGUSR1, before)


@pytest.mark.parametrize("kind", HANDLERS)
def test_a_handler_is_told_by_its_frame(kind: str) -> None:
    signal.signal(signal.SIGUSR1, HANDLERS[kind])
    with pytest.raises(TimeUp) as caught:
        interrupted()
    assert from_signal_handler(caught.value)


def test_what_looks_at_its_caller_in_our_own_code_is_no_handler() -> None:
    """The wrappers of `profile` hold the frame of whoever waits for a tensor."""
    ours = {"sys": sys, "__name__": "saturate.agent.looks", "TimeUp": TimeUp}
    exec("def looks():\n    frame = sys._getframe(1)\n    raise TimeUp\n", ours)
    with pytest.raises(TimeUp) as caught:
        ours["looks"]()
    assert not from_signal_handler(caught.value)
    ours["__name__"] = "the_script_s"
    with pytest.raises(TimeUp) as caught:
        ours["looks"]()
    assert from_signal_handler(caught.value), "the same in another module is taken for one"


def test_other_exceptions_are_not_a_handler_s() -> None:
    with pytest.raises(TimeUp) as caught:
        function(1, sys)
    assert not from_signal_handler(caught.value)
    try:
        try:
            signal.signal(signal.SIGUSR1, function)
            interrupted()
        except TimeUp:
            raise ValueError            # noqa: B904 - raised while the script handles the other one
    except ValueError as error:
        assert not from_signal_handler(error)


def session_of(torch: Any) -> Any:
    from saturate.agent.session import Session

    return Session(torch, {"mode": "run", "techniques": []})


def test_it_passes_through_the_agent_which_stays() -> None:
    session = session_of(torch)
    signal.signal(signal.SIGUSR1, function)
    with pytest.raises(TimeUp):
        session.guard(interrupted)
    assert not session.dead
    assert session.guard(lambda: 1) == 1


def test_what_was_half_done_is_taken_back(capsys: Any) -> None:
    session = session_of(torch)
    undone: list[int] = []
    session.undo.append(lambda: undone.append(1))
    signal.signal(signal.SIGUSR1, function)
    with pytest.raises(TimeUp):
        session.guard(session.whole, interrupted)
    assert session.dead and undone == [1]
    assert "was interrupted by a signal handler of the script and withdrew" in capsys.readouterr().err


def test_it_passes_through_what_is_told_before_the_agent_is_there(monkeypatch: Any) -> None:
    """Any other error of the stream is nobody's concern."""
    source = Path(saturate.__file__).parent / "agent" / "inject" / "sitecustomize.py"
    monkeypatch.setattr(sys, "_saturate_awake", True, raising=False)        # nothing is to begin here
    module: dict[str, Any] = {"__name__": "sitecustomize", "__file__": str(source)}
    with pytest.raises(ModuleNotFoundError, match="sitecustomize"):
        exec(compile(source.read_text(encoding="utf-8"), str(source), "exec"), module)
    signal.signal(signal.SIGUSR1, function)
    monkeypatch.setattr(sys, "stderr", SimpleNamespace(write=lambda text: interrupted()))
    with pytest.raises(TimeUp):
        module["_tell"]("something")
    monkeypatch.setattr(sys, "stderr", SimpleNamespace(write=lambda text: 1 / 0))
    module["_tell"]("something")


def test_our_own_errors_stay_ours(capsys: Any) -> None:
    session = session_of(torch)
    assert session.guard(lambda: 1 / 0) is None and session.dead
    assert "the agent failed and withdrew" in capsys.readouterr().err


def test_an_optimizer_s_step_that_was_interrupted_does_not_go_on() -> None:
    """Else every later backward pass would seem to lie within it."""
    session = session_of(torch)
    session.phase = "discover"
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], lr=0.1)
    session.step_begins(optimizer)      # and never ends
    session.step_begins(optimizer)
    session.step_ends(optimizer)
    assert not session.stepping
