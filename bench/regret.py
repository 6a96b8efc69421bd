"""What tune's search misses, and what it saves: its result against the best of all subsets.

    python bench/regret.py [--workload char_gpt]

For each workload, in one run:

    scout         tune, with time enough: which techniques apply, and with which options
    exhaustive    every subset of the (at most five) techniques that gave most alone, with the options that the scout found
                  best, raced against the baseline with the limits of the search; conflicting ones left out. The
                  fastest that verifies wins. Techniques that do not apply, fail, or are rejected are no candidates
    tune          once more, from nothing, in a quarter of the time that the exhaustive search took (its budget is that, less
                  some seconds of reserve): it is judged
    direct race   the winner against tune's set, in fresh pairs, because the fastest of many measurements is too good

Both sides pay for their own baseline, noise and verification, and begin with cold caches. Regret is the time of a step with
tune's set over that with the winner. Some twenty minutes per workload on two cores.
"""

from __future__ import annotations

import argparse
import math
import time
from dataclasses import dataclass
from itertools import combinations
from pathlib import Path
from typing import Any

from _output import as_text, close, write_json
from _race import Arena, guarded, say, script, time_ratio

from saturate.errors import WorkloadFailed
from saturate.measure.race import Limits
from saturate.records.options import options_from
from saturate.records.result import StudyRecord, TechniqueOutcome
from saturate.study import baseline
from saturate.study.bench import Bench
from saturate.study.candidates import Candidate, Set, key
from saturate.study.confirming import FINAL
from saturate.study.racing import ADD, SCREEN, Racer, Result
from saturate.study.state import Request, Study
from saturate.study.tune import AA, racer_of
from saturate.study.verification import Verifier
from saturate.techniques import _registry
from saturate.trial.process import TrialEnded

WORKLOADS = ("char_gpt", "conv_images", "slow_rows", "lstm_text")
MOST = 5
TARGET_REGRET, TARGET_SHARE = 1.03, 0.25

#: What a study may take beyond its budget: the tuned step is split afterwards, and processes are ended. The latest eleven took at most
#: 8.2 s more, however long their budget was (LOG.md).
OVERRUN_S = 10.0

#: A technique with one of these fates is not part of any subset.
EXCLUDED = ("not_applicable", "not_applied", "failed", "rejected_numerics")


@dataclass(frozen=True)
class Care:
    """How much is measured."""

    budget_s: float
    only: frozenset[str] | None
    noise: Limits = AA
    subset: Limits = ADD
    direct: Limits = FINAL


SMOKE = Care(5.0, frozenset({"fused-optimizer", "loader-workers"}), *[Limits(max_pairs=1, min_rounds=2, max_rounds=2)] * 3)


def candidates(record: StudyRecord, only: frozenset[str] | None) -> list[Candidate]:
    """Every technique that could be in a subset, with the options that tune found best."""
    registry = _registry.load()

    def usable(outcome: TechniqueOutcome) -> bool:
        asked = only is None or outcome.id in only
        return asked and outcome.fate not in EXCLUDED and registry[outcome.id].TECHNIQUE.numerics != "convergence"

    return [Candidate(registry[o.id], options_from(registry[o.id], o.options)) for o in record.result.techniques if usable(o)]


def speedups_alone(record: StudyRecord) -> dict[str, tuple[float, float]]:
    """(speed-up, upper end of its interval) of each technique that tune raced alone, by its label with options."""
    return {race.b[0]: (race.speedup, race.speedup_ci[1]) for race in record.races
            if not race.a and len(race.b) == 1 and race.question.startswith("screen ")}


def subsets(chosen: list[Candidate]) -> list[Set]:
    """All subsets but the empty one, conflicts left out, each in the order in which it is applied."""
    found = []
    for count in range(1, len(chosen) + 1):
        for members in combinations(chosen, count):
            modules = [c.module for c in members]
            if not _registry.conflicts(modules):
                order = _registry.ordered(modules)
                found.append(tuple(sorted(members, key=lambda c: order.index(c.module))))
    return found


class Exhaustive:
    """The peer: measures everything, with the same engine and the same care."""

    racer: Racer
    verifier: Verifier

    def __init__(self, bench: Bench, care: Care):
        self.bench, self.care = bench, care

    def run(self, pool: list[Candidate], alone: dict[str, tuple[float, float]]) -> tuple[Set, int]:
        """The fastest subset that verifies (perhaps none: the baseline), and how many subsets were raced."""
        self.begin()
        found = self.racer.run("A/A", (), (), self.care.noise, math.inf)
        self.racer.noise.learn(found.pairs, found.work)
        if self.verifier.check_baseline() is not None:
            return (), 0
        raced = [(result.gain, subset) for subset in subsets(self._most_effective(pool, alone))
                 if (result := self._race("subset", subset, self.care.subset)) is not None]
        self.racer.drop_base()
        for gain, subset in sorted(raced, key=lambda entry: -entry[0]):
            if gain <= 0:
                break
            if self.verifier.verify(subset).passed:
                return subset, len(raced)
        return (), len(raced)

    def begin(self) -> None:
        """As tune does, by its own functions: what a step is, how it is raced, how many verification runs are recorded at once."""
        bench, asked = self.bench, self.bench.workload
        study = Study(Request(asked.argv, asked.cwd, asked.environment, bench.study_dir), bench.folder, bench.store, {}, say)
        if not baseline.establish(study, bench, lambda *_: []):
            raise WorkloadFailed("this workload cannot be measured", cause=study.refusal or "")
        self.racer = racer_of(study, bench)
        self.verifier = Verifier(bench, baseline.at_once(study, self.racer.mode, bench.pace))

    def _most_effective(self, pool: list[Candidate], alone: dict[str, tuple[float, float]]) -> list[Candidate]:
        """The best alone, but for those that are slower beyond doubt; what tune had no time to screen is screened here."""
        for candidate in pool:
            if candidate.label() not in alone:
                result = self._race("screen", (candidate,), SCREEN)
                alone = {**alone, candidate.label(): (result.record.speedup, result.record.speedup_ci[1]) if result else (0.0, 0.0)}
        running = [c for c in pool if alone[c.label()][1] > 1.0]
        return sorted(running, key=lambda c: -alone[c.label()][0])[:MOST]

    def _race(self, question: str, subset: Set, limits: Limits) -> Result | None:
        label = " + ".join(c.label() for c in subset)
        try:
            result = self.racer.run(question, (), subset, limits, math.inf, share_base=True)
        except TrialEnded as ended:
            if ended.side == "a":
                raise
            say(f"    {label}: {ended}")
            return None
        say(f"    {label}: {result.gain:+.1%}")
        return result


def measure(name: str, sizes: list[str], care: Care) -> dict[str, Any]:
    """One workload; prints its lines and returns its row."""
    argv = script(name, *sizes)
    with Arena() as arena:
        say(f"{name}: scout")
        scouted, _ = arena.tune(argv, care.budget_s, care.only, smoke=care is SMOKE)
        pool = candidates(scouted, care.only)

        say(f"{name}: exhaustive")
        peer = Exhaustive(arena.bench(argv), care)
        began = time.monotonic()
        best, raced = peer.run(pool, speedups_alone(scouted))
        peer_s = time.monotonic() - began

        budget_s = max(TARGET_SHARE * peer_s - OVERRUN_S, TARGET_SHARE / 2 * peer_s)
        say(f"{name}: tune in {budget_s:.0f} s")
        began = time.monotonic()
        record, tuned = arena.tune(argv, budget_s, care.only, smoke=care is SMOKE)
        tune_s = time.monotonic() - began

        say(f"{name}: direct race")
        regret = (1.0, 1.0, 1.0)                # the same set: nothing to measure
        if key(best) != key(tuned):
            regret = time_ratio(peer.racer.run("direct", best, tuned, care.direct, math.inf, min_pairs=care.direct.max_pairs))
    share = tune_s / peer_s
    print(f"{name:12s} tuned / best {as_text(regret)}  tune took {share:.0%} of the time ({tune_s:.0f} s, {raced} subsets {peer_s:.0f} s)")
    print(f"             tuned: {names(tuned)}; best: {names(best)}", flush=True)
    return {"workload": name, "regret": regret, "time_share": share, "tune_s": tune_s, "exhaustive_s": peer_s, "subsets": raced,
            "tuned": [c.label() for c in tuned], "best": [c.label() for c in best], "speedup": record.result.speedup}


def names(techniques: Set) -> str:
    return " + ".join(c.label() for c in techniques) or "baseline"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workload", choices=WORKLOADS, action="append", help="one of the four (default: all)")
    parser.add_argument("--budget", type=float, default=400.0, metavar="SECONDS", help="the scout's (default: 400)")
    parser.add_argument("--only", metavar="IDS", help="these techniques only (comma-separated), on both sides")
    parser.add_argument("--smoke", action="store_true", help="as little as runs: does it work?")
    parser.add_argument("--json", type=Path, metavar="FILE")
    args = parser.parse_args()
    care = SMOKE if args.smoke else Care(args.budget, frozenset(args.only.split(",")) if args.only else None)
    sizes = ["--width", "16", "--rows", "256", "--batch", "8"] if args.smoke else []
    rows = [measure(name, sizes, care) for name in (["slow_rows"] if args.smoke else args.workload or WORKLOADS)]
    regret, share = max(row["regret"][0] for row in rows), max(row["time_share"] for row in rows)
    print(f"worst of {len(rows)}: tuned / best {regret:.3f}, {share:.0%} of the time")
    met = regret <= TARGET_REGRET and share <= TARGET_SHARE
    write_json(args.json, "regret", rows, None if args.smoke else met)
    return close(met, args.smoke, "tuned / best <= 1.03 in <= 25 % of the time")


if __name__ == "__main__":
    raise SystemExit(guarded(main))
