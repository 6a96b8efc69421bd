"""What the user asked for, and the state of a study while it runs."""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Any

import saturate
from saturate.errors import SaturateError
from saturate.machine import facts as machine
from saturate.machine import fingerprint, gpus
from saturate.records import sizes
from saturate.records.analysis import Finding
from saturate.records.facts import Facts
from saturate.study.racing import Racer, Result
from saturate.study.search import Search
from saturate.study.store import Store
from saturate.trial import standard_input
from saturate.verify.series import SCHEMA

#: What the environment says of the terminal, the login or the job, which is another one when a killed study is taken up again. No
#: training depends on it. Any other name may be one that the script reads (WIDTH=1024), or one of its libraries (OMP_NUM_THREADS);
#: so may some that terminals use (WINDOW, LINES).
_PASSING = re.compile("|".join((
    "_|SHLVL|PWD|OLDPWD|HOSTNAME",              # of the shell; the working directory is asked for by itself
    "TERM|TERM_(PROGRAM|PROGRAM_VERSION|SESSION_ID)|COLORTERM|WINDOWID|VTE_VERSION|(GNOME_TERMINAL|KITTY|KONSOLE|VSCODE)_.*",
    "TMUX|TMUX_PANE|STY",
    "DISPLAY|WAYLAND_DISPLAY|XAUTHORITY|SESSION_MANAGER|XDG_(SESSION_.*|RUNTIME_DIR|SEAT|VTNR)|(DBUS|SSH)_.*|GPG_(TTY|AGENT_INFO)",
    "INVOCATION_ID|JOURNAL_STREAM|SYSTEMD_EXEC_PID",    # of a unit of systemd, which a desktop is as well
    "SLURM_(JOB_?ID|JOB_(START|END)_TIME|RESTART_COUNT|TASK_PID|STEP_LAUNCHER_PORT|SRUN_COMM_PORT)",    # a job that was put back
)))


@dataclass(frozen=True)
class Request:
    """What the user asked for."""

    argv: list[str]
    cwd: Path
    environment: dict[str, str]
    directory: Path
    budget_s: float = 600.0
    threshold: float = 0.02
    only: frozenset[str] | None = None
    skip: frozenset[str] = frozenset()
    allow_convergence: bool = False
    race_mode: str = "auto"             # "concurrent", "alternate", or "auto": by memory
    step: str | None = None             # "backward:4" or "optimizer:1": overrides what was found
    timeout_s: float = 300.0
    limit_bytes: int | None = None       # `--fit`: the most memory that the recipe may need

    def options(self) -> list[str]:
        """What makes `tune` ask the same question again, as words of a command line; how long it may take in all is left out."""
        given = {
            "--only": ",".join(sorted(self.only)) if self.only is not None else None,
            "--skip": ",".join(sorted(self.skip)) or None,
            "--allow": "convergence" if self.allow_convergence else None,
            "--threshold": repr(self.threshold) if self.threshold != Request.threshold else None,
            "--fit": sizes.exact(self.limit_bytes) if self.limit_bytes else None,
            "--step": self.step,
            "--timeout": f"{self.timeout_s!r}s" if self.timeout_s != Request.timeout_s else None,
            "--race": self.race_mode if self.race_mode != Request.race_mode else None,
            "--dir": str(self.directory) if self.directory != self.cwd / ".saturate" else None,
        }
        return [word for name, value in given.items() if value is not None for word in (name, value)]

    def script(self) -> str:
        """SHA-256 of the file that holds the training, as it is now."""
        return fingerprint.digest_of(self.argv, self.cwd)

    def identity(self) -> str:
        """The same for a command that asks the same question again, so that it can resume where its `surroundings` are the same."""
        parts = [self.argv, str(self.cwd), sorted(self.only or ()), self.only is None, sorted(self.skip), self.allow_convergence,
                 self.threshold, self.race_mode, self.step, *([self.limit_bytes] if self.limit_bytes else [])]
        return _sha256(parts)

    def surroundings(self) -> dict[str, str]:
        """What the command's own program is and reads, and what it runs on, which counts as much as the words do: a digest of each. Two
        machines may share a home folder, and a job may be put back on another one, or get fewer cores of the same."""
        program = shutil.which(self.argv[0], path=self.environment.get("PATH")) or self.argv[0]
        environment = {name: value for name, value in self.environment.items() if not _PASSING.fullmatch(name)}
        stdin, offset = standard_input.source()
        return {
            "the version of saturate": saturate.__version__,
            "the format of recorded trainings": str(SCHEMA),
            "the script": self.script(),
            "the interpreter": _sha256(os.path.realpath(self.cwd / program)),
            "the machine": _sha256([machine.cpu_name(), machine.cpu_count(), sorted(gpu.name for gpu in gpus.observe(None)), gpus.driver_version()]),
            "the environment": _sha256(sorted(environment.items())),
            "standard input": _sha256([fingerprint.digest(Path(stdin)), offset]),
        }


def _sha256(value: Any) -> str:
    return hashlib.sha256(json.dumps(value).encode()).hexdigest()


@dataclass
class Study:
    """The state of one tune while it runs, and what a record is made from at any moment."""

    request: Request
    folder: Path
    store: Store
    registry: dict[str, ModuleType]
    say: Callable[[str], None]
    script: str = ""                    # SHA-256 of the file that holds the training, when the study began
    started: float = field(default_factory=time.monotonic)
    facts: Facts | None = None
    baseline: dict[str, Any] = field(default_factory=dict)
    findings: list[Finding] = field(default_factory=list)   # of a brief profile of the baseline
    search: Search | None = None
    racer: Racer | None = None
    aa: Result | None = None
    final: Result | None = None
    tuned: dict[str, Any] = field(default_factory=dict)
    needs_budget: str = ""              # "27m": the --budget that would do, where this one is too short for anything
    out_of_time: bool = False           # ... and that is the refusal
    refusal: str | None = None          # why nothing can be measured or verified; the verdict is then inconclusive
    refused: str = ""                   # the kind of outcome behind it, of which `saturate explain` says more
    deviated: str = ""                  # how the final set, which had verified, trained otherwise in its last race
    nothing_fits: bool = False          # sets were looked for that keep the memory limit, and there is none
    starved: str = ""                   # the baseline runs out of memory by itself, and how that showed
    notes: list[str] = field(default_factory=list)
    error: SaturateError | None = None
    isolation: str = ""
    on_end: Callable[[float], None] | None = None   # told when the budget ends (time.monotonic); a resumed study has less of it left

    @property
    def recipe_path(self) -> Path:
        return self.folder / "recipe.toml"

    @property
    def report_path(self) -> Path:
        return self.folder / "report.html"
