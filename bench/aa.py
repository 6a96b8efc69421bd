"""How often a race is wrong when nothing differs, and how often it finds what does differ.

    python bench/aa.py --simulated [1000]

Every simulated race replays recorded step times (`bench/data/`): consecutive rounds of one recorded A/A pair from a
random start, A and B exchanged at random, without that pair's own median; and the bias between processes is drawn
from measured pairs. Before each race, three A/A pairs of the same noise give its `between_sd`, as in a study. "quiet"
asks for +5 %, "loaded" (a busy loop on each core) for +8 %. A false verdict is `faster` or `slower` for an A/A race,
or the wrong sign for a real difference. Standard library only.
"""

from __future__ import annotations

import argparse
import json
import random
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from math import log, log1p
from pathlib import Path
from statistics import fmean, median

from saturate.measure import race, stats

DATA = Path(__file__).parent / "data"
GAINS = {"quiet": 0.05, "loaded": 0.08}
AA_PAIRS, AA_ROUNDS = 3, 10


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
    pairs: int
    rounds: int
    seconds: float                      # of the timed blocks, both sides
    covered: bool                       # whether the interval holds the true ratio


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
    found = decision.estimate
    covered = found.low <= log1p(gain) <= found.high
    return Outcome(decision.verdict, len(pairs), sum(map(len, pairs)), seconds, covered)


def report(condition: str, gain: float, races: int, seed: int, startup_s: float) -> tuple[int, int]:
    """Simulate, print one block of lines; returns (false verdicts, detections)."""
    rng = random.Random(f"{condition} {gain} {seed}")
    noise = load(condition)
    outcomes = [simulate(noise, gain, rng) for _ in range(races)]
    counts = Counter(outcome.verdict for outcome in outcomes)
    false = counts["slower"] + (counts["faster"] if gain == 0 else 0)
    low, high = stats.wilson(false, races)
    print(f"{condition:6s} true {gain:+.0%}: " + ", ".join(f"{v} {n}" for v, n in counts.most_common()))
    print(f"    false verdicts {false / races:.2%} [{low:.2%}, {high:.2%}]")
    if gain:
        low, high = stats.wilson(counts["faster"], races)
        print(f"    found {counts['faster'] / races:.1%} [{low:.1%}, {high:.1%}]")
    pairs, blocks = fmean(o.pairs for o in outcomes), fmean(o.seconds for o in outcomes)
    print(f"    interval holds the truth {fmean(o.covered for o in outcomes):.1%}; mean {pairs:.1f} pairs, "
          f"{fmean(o.rounds for o in outcomes):.0f} rounds, {blocks:.0f} s of blocks, "
          f"{blocks + pairs * startup_s:.0f} s with {startup_s:.0f} s to start each pair")
    return false, counts["faster"]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--simulated", type=int, nargs="?", const=1000, default=1000, metavar="RACES")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--startup-s", type=float, default=12.0, help="two fresh processes, start to steady state")
    args = parser.parse_args()
    good = True
    for condition, gain in GAINS.items():
        false, _ = report(condition, 0.0, args.simulated, args.seed, args.startup_s)
        wrong, found = report(condition, gain, args.simulated, args.seed, args.startup_s)
        good &= max(false, wrong) <= 0.05 * args.simulated and found >= 0.9 * args.simulated
    print("targets met" if good else "TARGETS MISSED", "(false verdicts <= 5 %, differences found >= 90 %)")
    return 0 if good else 1


if __name__ == "__main__":
    raise SystemExit(main())
