"""How often a race is wrong when nothing differs, and how often it finds what does differ.

    python bench/aa.py --simulated [1000]       replayed noise, standard library only
    python bench/aa.py --real 40 [--load]       real trials, by the product's own engine

Every simulated race replays recorded step times (`bench/data/`): consecutive rounds of one recorded A/A pair from a
random start, A and B exchanged at random, without that pair's own median; and the bias between processes is drawn
from measured pairs. Before each race, three A/A pairs of the same noise give its `between_sd`, as in a study. "quiet"
asks for +5 %, "loaded" (a busy loop on each core) for +8 %.

The real races start fresh pairs of processes of `workloads/difference.py`, which can be made slower by a known share.

A false verdict is `faster` or `slower` for an A/A race, or the wrong sign for a real difference. The peer is what is
often done instead: one pair of processes, the median of its rounds, and the threshold, without an interval.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from math import log, log1p
from pathlib import Path
from statistics import fmean, median
from typing import Any

from _output import close, write_json

from saturate.measure import race, stats

DATA = Path(__file__).parent / "data"
GAINS = {"quiet": 0.05, "loaded": 0.08}
AA_PAIRS, AA_ROUNDS = 3, 10
THRESHOLD = log1p(0.02)


@dataclass(frozen=True)
class Noise:
    """Recorded pairs: per round the log-ratio without the pair's median, and the seconds that both blocks took."""

    pairs: list[list[tuple[float, float]]]
    biases: list[float]

    def pair(self, rng: random.Random, log_gain: float) -> Iterator[tuple[float, float]]:
        """Endless rounds of one fresh pair: (log-ratio, seconds)."""
        recorded, start, sign = rng.choice(self.pairs), rng.randrange(1000), rng.choice((-1, 1))
        bias = rng.choice(self.biases) * rng.choice((-1, 1))
        k = start
        while True:
            ratio, seconds = recorded[k % len(recorded)]
            yield log_gain + bias + sign * ratio, seconds
            k += 1


def load(condition: str) -> Noise:
    """The recorded noise of a condition."""
    found = json.loads((DATA / f"step_times_{condition}.json").read_text())
    biases = json.loads((DATA / "pair_biases.json").read_text())["pairs"]
    pairs = []
    for pair in found["pairs"]:
        ratios = [log(sum(a[1:]) / sum(b[1:])) for a, b in zip(pair["a"], pair["b"])]  # the first step never counts
        seconds = [(sum(a) + sum(b)) / 1000 for a, b in zip(pair["a"], pair["b"])]
        centre = median(ratios)
        pairs.append([(ratio - centre, took) for ratio, took in zip(ratios, seconds)])
    return Noise(pairs, biases)


@dataclass(frozen=True)
class Outcome:
    verdict: str
    peer: str                           # what the median of the first pair alone says
    pairs: int
    rounds: int
    seconds: float                      # simulated: of the timed blocks, both sides; real: all
    covered: bool                       # whether the interval holds the true ratio


def outcome(decision: race.Decision, pairs: race.Pairs, gain: float, seconds: float) -> Outcome:
    found, alone = decision.estimate, median(pairs[0])
    peer = "faster" if alone > THRESHOLD else "slower" if alone < -THRESHOLD else "no_difference"
    covered = found is not None and found.low <= log1p(gain) <= found.high
    return Outcome(decision.verdict, peer, len(pairs), sum(map(len, pairs)), seconds, covered)


def simulate(noise: Noise, gain: float, rng: random.Random) -> Outcome:
    """One A/A calibration and one race."""
    aa = [[next(rounds)[0] for _ in range(AA_ROUNDS)] for rounds in (noise.pair(rng, 0.0) for _ in range(AA_PAIRS))]
    between = race.between_sd(aa)
    pairs: list[list[float]] = []
    source: Iterator[tuple[float, float]] = iter(())
    seconds = 0.0
    while (decision := race.next_action(pairs, between)).action != "stop":
        if decision.action == "new_pair":
            pairs.append([])
            source = noise.pair(rng, log1p(gain))
        ratio, took = next(source)
        pairs[-1].append(ratio)
        seconds += took
    return outcome(decision, pairs, gain, seconds)


def simulated(races: int, seed: int, startup_s: float) -> list[dict[str, Any]]:
    rows = []
    for condition, found in GAINS.items():
        noise = load(condition)
        for gain in (0.0, found):
            rng = random.Random(f"{condition} {gain} {seed}")
            rows.append(report("simulated", condition, gain, [simulate(noise, gain, rng) for _ in range(races)], startup_s))
    return rows


def real(races: int, differences: int, loaded: bool, smoke: bool) -> list[dict[str, Any]]:
    """Races of fresh processes, stopped as the product's last race is; with `loaded` beside a busy loop on each core."""
    from _race import Arena, Contestant, say, script

    from saturate.study.confirming import FINAL
    from saturate.study.tune import AA

    limits = race.Limits(max_pairs=1, min_rounds=2, max_rounds=2) if smoke else FINAL
    condition = "loaded" if loaded else "quiet"
    gain = GAINS[condition]

    def one(arena: Arena, question: str, a: Contestant, b: Contestant, true_gain: float) -> Outcome:
        began = time.monotonic()
        found = arena.race(question, a, b, limits)
        said = outcome(found.decision, found.pairs, true_gain, time.monotonic() - began)
        say(f"{question}: {said.verdict}, by one pair's median {said.peer}; {said.pairs} pairs, {said.seconds:.0f} s")
        return said

    with busy(os.cpu_count() or 1 if loaded else 0), Arena() as arena:
        plain = arena.contestant("plain", script("difference"))
        slower = arena.contestant("slower", script("difference", "--slower", str(gain)))
        arena.learn_noise(plain, limits if smoke else AA)
        same = [one(arena, f"A/A {n}", plain, plain, 0.0) for n in range(races)]
        rows = [report("real", condition, 0.0, same)]
        if differences:
            apart = [one(arena, f"A/B {n}", slower, plain, gain) for n in range(differences)]
            rows.append(report("real", condition, gain, apart))
    return rows


@contextmanager
def busy(loops: int) -> Iterator[None]:
    """That many processes that compute for nothing, while the block runs."""
    running = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(loops)]
    try:
        yield
    finally:
        for process in running:
            process.kill()
            process.wait()


def report(kind: str, condition: str, gain: float, outcomes: list[Outcome], startup_s: float = 0.0) -> dict[str, Any]:
    """Print one block of lines; returns what it says as one row."""
    races = len(outcomes)

    wrong = ("slower",) if gain else ("slower", "faster")
    counts = Counter(o.verdict for o in outcomes)
    false, peer = rate(counts, wrong), rate(Counter(o.peer for o in outcomes), wrong)
    print(f"{kind} {condition}, true {gain:+.0%}: " + ", ".join(f"{v} {n}" for v, n in counts.most_common()))
    print(f"    false verdicts {as_share(false)}; by one pair's median {as_share(peer)}")
    found = rate(counts, ("faster",)) if gain else None
    if found:
        print(f"    found {as_share(found)}")
    pairs, seconds = fmean(o.pairs for o in outcomes), fmean(o.seconds for o in outcomes)
    cost = (f"{seconds:.0f} s of blocks, {seconds + pairs * startup_s:.0f} s with {startup_s:.0f} s to start each pair"
            if startup_s else f"{seconds:.0f} s")
    print(f"    interval holds the truth {fmean(o.covered for o in outcomes):.1%}; mean {pairs:.1f} pairs, "
          f"{fmean(o.rounds for o in outcomes):.0f} rounds, {cost}", flush=True)
    return {"kind": kind, "condition": condition, "gain": gain, "races": races, "verdicts": dict(counts),
            "false": false, "peer_false": peer, "found": found, "mean_seconds": seconds + pairs * startup_s}


def rate(counts: Counter[str], verdicts: tuple[str, ...]) -> tuple[float, float, float]:
    """Share of these verdicts, with its interval."""
    hits, races = sum(counts[verdict] for verdict in verdicts), counts.total()
    return hits / races, *stats.wilson(hits, races)


def as_share(rate: tuple[float, float, float]) -> str:
    return "{:.1%} [{:.1%}, {:.1%}]".format(*rate)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--simulated", type=int, nargs="?", const=1000, metavar="RACES", help="the default: 1000")
    parser.add_argument("--real", type=int, default=0, metavar="RACES", help="A/A races of real processes")
    parser.add_argument("--differences", type=int, default=20, metavar="RACES", help="real races of a true difference, with --real")
    parser.add_argument("--load", action="store_true", help="real races beside a busy loop on each core")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--startup-s", type=float, default=12.0, help="two fresh processes, start to steady state (simulated)")
    parser.add_argument("--smoke", action="store_true", help="as little as runs: does it work?")
    parser.add_argument("--json", type=Path, metavar="FILE")
    args = parser.parse_args()
    if args.smoke:
        args.simulated, args.real, args.differences = 5, 1, 1
    rows = []
    if args.simulated or not args.real:
        rows += simulated(args.simulated or 1000, args.seed, args.startup_s)
    if args.real:
        rows += real(args.real, args.differences, args.load, args.smoke)
    met = all(row["false"][0] <= 0.05 and (row["found"] is None or row["found"][0] >= 0.9) for row in rows)
    write_json(args.json, "aa", rows, None if args.smoke else met)
    return close(met, args.smoke, "false verdicts <= 5 %, differences found >= 90 %")


if __name__ == "__main__":
    raise SystemExit(main())
