"""Shared by all tests: where Python is, and how to start a trial of a few lines of training."""

from __future__ import annotations

import os
import signal
import sys
import textwrap
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

# One thread per process: two libgomp teams on two cores spin against each other and are slower by up to twenty times.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("MKL_NUM_THREADS", "1")

# What a test imports of ONNX Runtime itself reports to nobody.
os.environ.setdefault("ORT_DISABLE_TELEMETRY", "1")

# What is printed is as wide as a terminal that says nothing of its width, also where tests run side by side.
os.environ.pop("COLUMNS", None)

# Under nohup, or in the background of a script, SIGHUP and SIGINT are ignored, and every process that a test starts would
# inherit that. A handler is not inherited: with one, children start with the default.
for _number, _handler in ((signal.SIGHUP, lambda *_: None), (signal.SIGINT, signal.default_int_handler)):
    if signal.getsignal(_number) is signal.SIG_IGN:
        signal.signal(_number, _handler)


@pytest.fixture
def clean_environment() -> dict[str, str]:
    """The environment of a user who runs a script: no PYTHONPATH of ours."""
    return {k: v for k, v in os.environ.items() if not k.startswith(("SATURATE", "PYTHON", "PYTEST"))}


@pytest.fixture
def script(tmp_path: Path) -> Callable[[str, str], Path]:
    """Write dedented source to a file in the test's folder."""

    def write(source: str, name: str = "train.py") -> Path:
        path = tmp_path / name
        path.write_text(textwrap.dedent(source), encoding="utf-8")
        return path

    return write


@pytest.fixture
def start(tmp_path: Path, clean_environment: dict[str, str]) -> Iterator[Callable]:
    """Start a trial of a command, without a cage; ended after the test."""
    from saturate.trial.process import Trial, TrialSpec, Workload

    started: list[Trial] = []

    def begin(*command: str, timeout_s: float = 60.0, **spec: object) -> Trial:
        folder = tmp_path / f"trial{len(started)}"
        argv = [sys.executable, *command] if command[0].endswith(".py") or command[0].startswith("-") else list(command)
        trial = Trial(Workload(argv, tmp_path, clean_environment, timeout_s),
                      TrialSpec(id=folder.name, purpose="test", folder=folder, **spec))  # type: ignore[arg-type]
        started.append(trial)
        return trial

    yield begin
    for trial in started:
        trial.stop()
