"""A search that ends early: Ctrl-C, or a machine that gives out, takes with it what was found until then."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from saturate.errors import CheckUnusable, EnvironmentProblem
from saturate.inference.confirm import Confirmed, contenders
from saturate.inference.failures import WorkerFailed
from saturate.inference.phases import Phases
from saturate.inference.racing import Race
from saturate.inference.result import Result, record_of
from saturate.records.inference import OptimizeRecord, Unconfirmed

if TYPE_CHECKING:
    from saturate.inference.lab import Lab
    from saturate.inference.search import Search


@dataclass
class Ending:
    """What is known of the winner, filled in step by step. `began`: time.monotonic() of the call. `phases`: what it went into since.
    `lossless`: the best lossless
    candidate; where there is none, and `unraced` gives no reason, it is the model itself."""

    search: Search
    lab: Lab
    notes: list[str]
    began: float
    phases: Phases
    won: Confirmed | None = None
    final: Race | None = None
    lossless: Confirmed | None = None
    versus: Race | None = None
    unraced: str = "the search was ended before that race"      # why `lossless` is not known, or there is no `versus`
    record: OptimizeRecord | None = None        # complete: only the files are missing

    def recorded(self, complete: bool = True) -> OptimizeRecord:
        return record_of(self.search, self.lab, self.won, self.lossless, self.final, self.versus, self.unraced, notes=self.notes,
                         began=self.began, phases=self.phases.found, complete=complete)

    @contextlib.contextmanager
    def told(self) -> Iterator[None]:
        """What ends the search in here has attributes `record` and `result`, unless not even the model was measured. The report
        and result.json are written, where that is possible."""
        try:
            yield
        except KeyboardInterrupt as interruption:
            note = f"interrupted: the same call with workdir={str(self.lab.folder)!r} goes on from here"
            interruption.add_note(note)         # a traceback shows it
            self._attach(interruption, note)
            raise
        except (CheckUnusable, EnvironmentProblem) as problem:
            self._attach(problem, f"{problem.message}: {problem.cause}")
            raise
        except WorkerFailed as failure:
            problem = EnvironmentProblem("a process that the search cannot do without has ended", cause=failure.reason,
                                         remedy="look for what ends processes here, and give the same command again: with "
                                                f"workdir={str(self.lab.folder)!r} it goes on from here")
            self._attach(problem, f"{problem.message}: {problem.cause}")
            raise problem from failure

    def _attach(self, error: Any, note: str) -> None:
        if self.search.baseline is None:
            return
        self.notes = [note, *self.notes]
        record = self._cut_off() if self.record is None else msgspec.structs.replace(self.record, notes=self.notes)
        try:
            result = Result.of(record, self.search, self.lab)
        except EnvironmentProblem:              # a full disk, perhaps
            result = Result(record, self.search, self.lab)
        error.result, error.record = result, result.record
        kept = record.artifact or (record.unconfirmed.artifact if record.unconfirmed is not None else None)
        self.lab.discard(Path(kept) if kept is not None else None)         # of the others each holds a copy of the model

    def _cut_off(self) -> OptimizeRecord:
        if self.search.objective == "throughput":       # one call that answers sooner was not the objective
            self.won = self.final = None
        record = self.recorded(complete=False)
        return record if record.best is not None else msgspec.structs.replace(record, unconfirmed=so_far(self.search, self.lab))


def so_far(search: Search, lab: Lab) -> Unconfirmed | None:
    """The best that could have been confirmed; what is stored has come further than what is not."""
    best = max(contenders(search), key=lambda one: (one.candidate in lab.stored, search.value(one)), default=None)
    if best is None:
        return None
    stored = lab.stored.get(best.candidate)
    return Unconfirmed(id=best.candidate.label(), speedup=best.speedup or 1.0, artifact=None if stored is None else str(stored))
