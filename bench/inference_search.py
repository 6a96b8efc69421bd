"""Does the staged search find nearly the best candidate, for a fraction of the cost of trying all?

The peer is exhaustive: every set of techniques and options that goes together (one variant of each, no training), each in
a process of its own, screened and scored like in the search. The fastest measured of many looks faster than it is, so the two
winners race each other once more, in fresh pairs, and that ratio counts. Both sides pay for their own repairs; storing and
confirming the winner is the same for both and is left out.

    python bench/inference_search.py [--smoke] [--json FILE] [--models resnet50,...]
"""

from __future__ import annotations

import argparse
import itertools
import math
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import torch
from _inference_models import NAMES, build
from _output import as_text, close, write_json

from saturate.inference import api, plan, racing
from saturate.inference.accuracy import Budget
from saturate.inference.candidates import Candidate
from saturate.inference.search import Search
from saturate.measure.race import Limits

#: Of the exhaustive optimum's speed, for at most so much of its time.
LEAST_SPEED, MOST_TIME = 0.95, 0.30

#: Agreement with float32's own top-1, as in `inference.py`.
MAX_DROP = 0.4

#: A smoke run's techniques: two runtimes and a number format need no compiler.
SMOKE = ("onnx-runtime", "nhwc-layout", "bf16")

class Exhaustive(Search):
    """Tries everything where the search would try a stage."""

    def _walk(self, supply: Callable[[], Iterable[Candidate]]) -> None:
        super()._walk(lambda: everything(self.pool))

    def _outrun(self, candidate: Candidate) -> None:
        """Nothing is left out for what others have shown."""


def everything(pool: plan.Pool) -> Iterator[Candidate]:
    """Every set with at most one variant of each technique whose parts go together, small ones first."""
    parts = [*pool.switches, *pool.runtimes, *pool.numbers]
    for size in range(1, len(parts) + 1):
        found = False
        for chosen in itertools.combinations(parts, size):
            candidate = Candidate.of(list(chosen))
            if len({part.id for part in chosen}) == size and candidate.conflict() is None:
                found = True
                yield candidate
        if not found:       # nothing of this size goes together, so nothing larger does
            return


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--smoke", action="store_true", help="tiny shapes and three techniques, nothing is judged")
    parser.add_argument("--json", type=Path, metavar="FILE")
    parser.add_argument("--models", default="resnet50", help=f"of {','.join(NAMES)} (default: resnet50)")
    arguments = parser.parse_args()
    rows = []
    with tempfile.TemporaryDirectory(prefix="saturate-bench-") as folder:
        for name in arguments.models.split(","):
            rows.append(contest(name, arguments.smoke, Path(folder) / name))
            show(rows[-1])
    met = all(row["speed"][0] >= LEAST_SPEED and row["time_share"] <= MOST_TIME for row in rows)
    write_json(arguments.json, "inference_search", rows, None if arguments.smoke else met)
    return close(met, arguments.smoke,
                 f"at least {LEAST_SPEED:.0%} of the exhaustive optimum for at most {MOST_TIME:.0%} of its time")


def contest(name: str, smoke: bool, folder: Path) -> dict[str, Any]:
    """Search and exhaustive peer on one model; the winners' race."""
    folder.mkdir()
    subject = build(name, smoke)
    with torch.no_grad():
        expected = [subject.model(*batch).argmax(1) for batch in subject.held_out]

    def check(run: Callable[..., Any]) -> list[float]:
        return [float((run(*batch).argmax(1) == right).all()) for batch, right in zip(subject.held_out, expected)]

    found = {}
    for side in (Search, Exhaustive):
        say(f"{name}: {side.__name__.lower()}")
        found[side] = walked(side, subject, check, folder / side.__name__.lower(), SMOKE if smoke else ())
    staged, exhaustive = found[Search], found[Exhaustive]
    best, ours, lab = exhaustive["winner"], staged["winner"], staged.pop("lab")
    exhaustive.pop("lab")
    speed = (1.0, 1.0, 1.0)
    if ours != best:
        limits = Limits(max_pairs=1, min_rounds=3, max_rounds=4) if smoke else Limits(max_pairs=4, max_rounds=20)
        race = racing.race(lambda: lab.start(best), lambda: lab.start(ours), limits=limits)
        speed = (race.estimate.speedup, *race.estimate.speedup_ci) if race.estimate else (math.nan, 0.0, math.inf)
    return {"model": name, "speed": speed, "time_share": staged["seconds"] / exhaustive["seconds"],
            "search": {**staged, "winner": staged["winner"].label()},
            "exhaustive": {**exhaustive, "winner": exhaustive["winner"].label()}}


class Walked(Exception):
    """Ends `saturate.optimize` when its search has ended: storing and confirming are the same for both sides."""


def walked(side: type[Search], subject: Any, check: Callable[..., Any], folder: Path, only: tuple[str, ...]) -> dict[str, Any]:
    """One whole walk of `saturate.optimize`: its winner, how many candidates ran, and how long that took."""
    found: dict[str, Any] = {}

    class Timed(side):      # type: ignore[valid-type, misc]
        def run(self, baseline_worker: Any) -> None:
            self.pool.trained.clear()
            began = time.monotonic()
            super().run(baseline_worker)
            best = self.best()
            found.update(winner=best.candidate if best else Candidate(), speedup=best.speedup if best else 1.0,
                         seconds=time.monotonic() - began, tried=len(self.tried), lab=self.lab)
            raise Walked

    before, api.Search = api.Search, Timed
    try:
        api.optimize(subject.model, inputs=subject.inputs, check=check, budget=Budget(max_drop=MAX_DROP), time="24h", threads=1,
                     workdir=folder, only=only, progress=lambda text: say(f"    {text}"))
    except Walked:
        return found
    finally:
        api.Search = before
    raise RuntimeError("the search did not run")


def show(row: dict[str, Any]) -> None:
    search, exhaustive = row["search"], row["exhaustive"]
    print(f"{row['model']:10} search / exhaustive optimum {as_text(row['speed'])}  in {row['time_share']:.0%} of its time")
    for label, side in (("search", search), ("exhaustive", exhaustive)):
        print(f"    {label:10} {side['winner']} ({side['speedup']:.2f}x eager); {side['tried']} candidates in {side['seconds']:.0f} s")
    sys.stdout.flush()


def say(line: str) -> None:
    """Progress goes to standard error; standard output holds results only."""
    print(line, file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main())
