"""Races for the benchmarks, by the product's own engine, also between two different commands.

`study.racing.Racer` races two sets of techniques on one command. Here a `Contestant` (a command with its techniques)
stands where a set stands, and `Arena` where the workbench stands, so fresh pairs, gate, freezing, rounds and
sequential stopping are those of the product.
"""

from __future__ import annotations

import json
import math
import shutil
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from saturate.errors import SaturateError, TooNoisy
from saturate.measure.race import Limits
from saturate.records import recipe as recipes
from saturate.records.options import options_from
from saturate.records.result import StudyRecord
from saturate.study.bench import Bench
from saturate.study.candidates import Candidate, Set
from saturate.study.live import Live, on_side
from saturate.study.racing import Racer, Result
from saturate.study.state import Request
from saturate.study.store import Store
from saturate.study.tune import AA, environment_of_user, tune
from saturate.techniques import _registry
from saturate.trial.process import TrialEnded, Workload

WORKLOADS = Path(__file__).resolve().parent / "workloads"


@dataclass(frozen=True)
class Contestant:
    """A command with techniques. All but `bench` and `techniques` is what the engine asks a technique for."""

    id: str
    bench: Bench
    techniques: Set = ()
    merges: int = 1

    def options_dict(self) -> dict[str, Any]:
        return {}

    def label(self) -> str:
        return self.id


class Arena:
    """Owns what a benchmark starts and writes: a scratch folder, one workbench per command. Use it in a `with`."""

    def __init__(self, threshold: float = 0.02, warm_up_s: float = 60.0):
        self.folder = Path(tempfile.mkdtemp(prefix="saturate-bench-"))
        self.home = self.folder / "home"            # the working directory of every workload
        self.home.mkdir()
        self.warm_up_s = warm_up_s
        self.store = Store(self.folder / "races")
        self.racer = Racer(self, threshold)         # type: ignore[arg-type] - it uses what stands below, and the store
        self._benches: dict[str, Bench] = {}
        self._owners: dict[str, Bench] = {}         # by the folder of the trial

    def __enter__(self) -> Arena:
        return self

    def __exit__(self, *exception: object) -> None:
        for bench in self._benches.values():
            bench.close()
            bench.store.close()
        self.store.close()
        shutil.rmtree(self.folder)

    # -- contestants -----------------------------------------------------------------------------------------------

    def bench(self, argv: list[str]) -> Bench:
        """The workbench of one command, made when first asked for."""
        text = json.dumps(argv)
        if text not in self._benches:
            folder = self.folder / f"command{len(self._benches)}"
            workload = Workload(argv, self.home, environment_of_user())
            self._benches[text] = Bench(workload, folder, folder, Store(folder), 5 * self.warm_up_s, say)
        return self._benches[text]

    def contestant(self, name: str, argv: list[str], techniques: Set = ()) -> Contestant:
        return Contestant(name, self.bench(argv), techniques)

    def tune(self, argv: list[str], budget_s: float, only: frozenset[str] | None, smoke: bool) -> tuple[StudyRecord, Set]:
        """Tune a command as a user does; its record and the set that its recipe holds. Raises the SaturateError that
        ended it; a smoke run goes on with nothing kept on a machine that is too noisy."""
        folder = self.folder / f"tune{len(list(self.folder.glob('tune*')))}"
        request = Request(argv, self.home, environment_of_user(), folder, budget_s=budget_s, only=only)
        record, error = tune(request, lambda line: say(f"    {line}"))
        if error is not None and not (smoke and isinstance(error, TooNoisy)):
            raise error
        registry = _registry.load()
        entries = recipes.read(Path(record.result.recipe)).techniques
        return record, tuple(Candidate(registry[e.id], options_from(registry[e.id], e.options)) for e in entries)

    # -- what a Racer asks of a bench ------------------------------------------------------------------------------

    def live(self, purpose: str, side: tuple[Contestant]) -> Live:
        live = side[0].bench.live(purpose, side[0].techniques)
        self._owners[str(live.trial.spec.folder)] = side[0].bench
        return live

    def live_pair(self, purpose_a: str, a: tuple[Contestant], purpose_b: str, b: tuple[Contestant]) -> tuple[Live, Live]:
        first = on_side("a", lambda: self.live(purpose_a, a))
        try:
            return first, on_side("b", lambda: self.live(purpose_b, b))
        except TrialEnded:
            self.finish_live(first)
            raise

    def prove_still(self, live: Live) -> None:
        self._owners[str(live.trial.spec.folder)].prove_still(live)

    def finish_live(self, live: Live) -> None:
        self._owners.pop(str(live.trial.spec.folder)).finish_live(live)

    # -- races -----------------------------------------------------------------------------------------------------

    def race(self, question: str, a: Contestant, b: Contestant, limits: Limits, min_pairs: int = 1) -> Result:
        """Is B faster than A? Raises TrialEnded when one of them does not run."""
        return self.racer.run(question, (a,), (b,), limits, math.inf, min_pairs=min_pairs)   # type: ignore[arg-type]

    def learn_noise(self, contestant: Contestant, limits: Limits = AA) -> Result:
        """Race a contestant against itself, as a study does before its first question."""
        found = self.race(f"A/A {contestant.id}", contestant, contestant, limits)
        self.racer.noise.learn(found.pairs, found.work)
        return found


def say(line: str) -> None:
    """Progress goes to standard error; standard output holds results only."""
    print(line, file=sys.stderr, flush=True)


def script(name: str, *arguments: str) -> list[str]:
    """The command of one of the benchmarks' workloads."""
    return [sys.executable, str(WORKLOADS / f"{name}.py"), *arguments]


def time_ratio(result: Result) -> tuple[float, float, float]:
    """Time of B over time of A, with its interval: below 1 when B is faster."""
    found = result.decision.estimate
    if found is None:
        return math.nan, 0.0, math.inf
    return math.exp(-found.log_ratio), math.exp(-found.high), math.exp(-found.low)


def guarded(main: Callable[[], int]) -> int:
    """Run a benchmark; an error of saturate's is shown as its command shows it."""
    try:
        return main()
    except SaturateError as error:
        say(error.card())
        return error.exit_code
