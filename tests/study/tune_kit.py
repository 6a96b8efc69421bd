"""Drives `saturate tune` as a user does, in a process of its own, and checks what must hold however it ends."""

from __future__ import annotations

import contextlib
import os
import re
import subprocess
import sys
import textwrap
import time
import uuid
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import msgspec

from saturate.records import recipe as recipes
from saturate.records.result import TuneResult

TRAINING = """
import os, signal, sys, time, torch
torch.manual_seed(0)
model = torch.nn.Linear(8, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)

def step():
    optimizer.zero_grad()
    model(torch.randn(4, 8)).pow(2).mean().backward()
    optimizer.step()
    time.sleep(0.001)
"""

#: saturate with fewer pairs and rounds: what is tested is not the statistics.
_SATURATE = """
import sys
from saturate.cli import main
from saturate.measure.race import Limits
from saturate.study import combining, confirming, search, standing, tune
few = Limits(max_pairs=1, min_rounds=2, max_rounds=3)
tune.AA = confirming.FINAL = search.SCREEN = search.ADD = standing.ADD = standing.RETRY = combining.SCREEN = combining.ADD = few
confirming.MOST_FINAL_PAIRS = 1
sys.exit(main.main(sys.argv[1:]))
"""


@dataclass
class Ended:
    code: int
    stdout: str
    stderr: str

    @property
    def result(self) -> TuneResult:
        """The one object on standard output."""
        assert self.stdout.count("\n") == 1, f"not one line: {self.stdout!r}\n{self.stderr}"
        return msgspec.json.decode(self.stdout, type=TuneResult)


@dataclass
class Folder:
    """A user's folder with a script, and everything started in it recognisable by a variable in its environment."""

    path: Path
    mark: str = field(default_factory=lambda: f"SATURATE_TEST_MARK={uuid.uuid4().hex}")

    def write(self, name: str, text: str) -> Path:
        path = self.path / name
        path.write_text(textwrap.dedent(text), encoding="utf-8")
        return path

    def environment(self) -> dict[str, str]:
        clean = {k: v for k, v in os.environ.items() if not k.startswith(("SATURATE", "PYTHON", "PYTEST"))}
        name, _, value = self.mark.partition("=")
        return {**clean, name: value, "OMP_NUM_THREADS": "1", "PYTHONDONTWRITEBYTECODE": "1"}

    def command(self, *options: str, argv: tuple[str, ...] = ()) -> list[str]:
        return [sys.executable, "-c", _SATURATE, "tune", "--json", "--budget", "30s", "--timeout", "60s", "--only", "gc-freeze", *options,
                "--", *(argv or (sys.executable, "train.py"))]

    def start(self, *options: str, argv: tuple[str, ...] = (), prefix: tuple[str, ...] = ()) -> subprocess.Popen[str]:
        return subprocess.Popen([*prefix, *self.command(*options, argv=argv)], cwd=self.path, env=self.environment(),
                                stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)

    def tune(self, *options: str, argv: tuple[str, ...] = (), prefix: tuple[str, ...] = ()) -> Ended:
        with self.start(*options, argv=argv, prefix=prefix) as process:
            stdout, stderr = process.communicate(timeout=180)
        return Ended(process.returncode, stdout, stderr)

    def alive(self) -> dict[int, str]:
        """Processes started here that still run."""
        found = {}
        for name in filter(str.isdigit, os.listdir("/proc")):
            with contextlib.suppress(OSError):      # it ended meanwhile, or is another user's
                if self.mark.encode() in Path(f"/proc/{name}/environ").read_bytes().split(b"\0"):
                    found[int(name)] = Path(f"/proc/{name}/cmdline").read_bytes().replace(b"\0", b" ").decode()[:200]
        return found

    def wait_until_nothing_lives(self, seconds: float = 60.0) -> dict[int, str]:
        deadline = time.monotonic() + seconds
        while (left := self.alive()) and time.monotonic() < deadline:
            time.sleep(0.05)
        return left


def no_traceback_of_ours(text: str) -> bool:
    return not re.search(r'File "[^"]*saturate[/\\](?:cli|study|trial|measure|verify|report|records)', text)


def recipe_is_empty(result: TuneResult) -> bool:
    return recipes.read(result.recipe).techniques == []


@contextlib.contextmanager
def untouched(*folders: Path) -> Iterator[None]:
    """Everything in the folders but `.saturate` is as it was."""
    before = _snapshot(folders)
    yield
    assert _snapshot(folders) == before


def _snapshot(folders: tuple[Path, ...]) -> Mapping[str, tuple[int, bytes]]:
    found = {}
    for folder in folders:
        for top, below, files in os.walk(folder):
            below[:] = [name for name in below if name != ".saturate"]
            for name in [*below, *files]:
                path = Path(top, name)
                found[str(path)] = path.lstat().st_mode, path.read_bytes() if path.is_file() else b""
    return found
