"""How much sooner does a race know, when two processes take short turns instead of whole blocks, and begin them on the same CPU?

    python bench/turns.py [--seconds 80]

Turns: the step times of one process are recorded, and rounds of a race between it and itself are read from them, as if every other
block were another process's: once in whole blocks (the block of one, then that of the other), once with the same number of
steps in short turns, as `study.racing` runs them, with the steps that are skipped. On that time line lies what else the
machine does, and both ways see the same of it. What a change of turns costs besides skipped steps (freezing, thawing, the gate) is
measured on the living process and added. What counts is the time until the median of rounds is known well enough: the variance of a
round times its seconds. Printed is how many times as long whole blocks need, with the 95 % interval of a bootstrap over
pieces of the recording.

CPUs: two living processes of one program race, as `study.racing` does it, each round once with the second of two turns beginning on
the CPU of the first, and once on another one, as the scheduler may leave it for a whole race. Printed is how many times as long
those on two CPUs need, by the variance of rounds, with the interval of a bootstrap over rounds. Needs two CPUs.
"""

from __future__ import annotations

import argparse
import math
import os
import random
import statistics
import time
from pathlib import Path
from typing import Any

from _output import as_text, close, write_json
from _race import Arena, guarded, say, script

from saturate.measure import stationary
from saturate.measure.stats import mad_sd
from saturate.study.live import Live
from saturate.study.racing import run_block

WORKLOADS = ("lstm_text", "char_gpt", "conv_images")
PIECES = 16
ROUNDS = 40
FINEST = 1e-6                           # of few rounds, a bootstrap may draw one alone, which does not scatter
Rounds = list[tuple[float, float]]      # (log-ratio, nanoseconds)


def recorded(live: Live, seconds: float) -> list[int]:
    """Nanoseconds per step of a process that runs alone."""
    live.trial.thaw()
    steps: list[int] = []
    while sum(steps) < seconds * 1e9:
        steps += live.trial.run_block(0, max(2, round(2e3 / live.step_ms))).step_ns
    live.trial.freeze()
    return steps


def change_ns(live: Live) -> float:
    """What a turn takes besides its steps."""
    extra = []
    for _ in range(20):
        began = time.monotonic_ns()
        block = run_block(live, 0, 2)
        extra.append(time.monotonic_ns() - began - sum(block.timed_ns))
    return statistics.median(extra)


def rounds(steps: list[int], turns: int, rest: int, each: int, change: float) -> Rounds:
    """All rounds of one way to take turns that fit one after the other, begun at many places."""
    draw = random.Random(0)
    found: Rounds = []
    for begin in range(0, max(1, 2 * each), max(1, each // 2)):
        at, turn = begin, 0
        while True:
            start, sides = at, (0, 0)
            for _ in range(turns):
                skip = rest + (draw.randrange(2) if each == 1 else 0)
                first, second = (sum(steps[at + n * (skip + each) + skip: at + (n + 1) * (skip + each)]) for n in (0, 1))
                sides = (sides[0] + first, sides[1] + second) if turn % 2 == 0 else (sides[0] + second, sides[1] + first)
                at, turn = at + 2 * (skip + each), turn + 1
            if at > len(steps):
                break
            found.append((math.log(sides[0] / sides[1]), sum(steps[start:at]) + 2 * turns * change))
    return found


def cost(found: Rounds) -> float:
    """Robust variance of a round times its length."""
    return mad_sd([ratio for ratio, _ in found]) ** 2 * statistics.fmean(length for _, length in found)


def compared(steps: list[int], change: float) -> tuple[tuple[float, float, float], dict[str, Any]]:
    """How many times as long whole blocks need, its interval, and how rounds scatter either way."""
    step_ms = statistics.median(steps) / 1e6
    _, block = stationary.block_steps(step_ms)
    ways = {"whole": (1, 1, block), "turns": stationary.in_turns(step_ms, block)}
    size = len(steps) // PIECES
    pieces = [[rounds(steps[n * size: (n + 1) * size], *way, change) for way in ways.values()] for n in range(PIECES)]

    def ratio(chosen: list[list[Rounds]]) -> float:
        whole, turns = ([one for piece in chosen for one in piece[kind]] for kind in (0, 1))
        return cost(whole) / cost(turns)

    draw = random.Random(1)
    drawn = sorted(ratio(draw.choices(pieces, k=PIECES)) for _ in range(1000))
    scatter = {kind: mad_sd([one for piece in pieces for one, _ in piece[number]]) for number, kind in enumerate(ways)}
    return (ratio(pieces), drawn[25], drawn[-26]), scatter


def on_cpus(first: Live, second: Live, apart: bool, turns: int, rest: int, each: int) -> float:
    """The log-ratio of one round."""
    spent = {"first": 0, "second": 0}
    lives = {"first": first, "second": second}
    for turn in range(turns):
        leads, follows = list(lives) if turn % 2 == 0 else list(lives)[::-1]
        spent[leads] += sum(run_block(lives[leads], rest, each).timed_ns)
        here = lives[leads].trial.cpus[0]
        there = min(os.sched_getaffinity(0) - {here}, key=lambda cpu: abs(cpu - here)) if apart else here      # near: of one NUMA node
        spent[follows] += sum(run_block(lives[follows], rest, each, [there]).timed_ns)
    return math.log(spent["first"] / spent["second"])


def placed(first: Live, second: Live, pairs: int) -> tuple[float, float, float]:
    """How many times as long a race on two CPUs needs, from so many rounds of either kind, side by side."""
    step_ms = min(first.step_ms, second.step_ms)
    way = stationary.in_turns(step_ms, stationary.block_steps(step_ms)[1])
    found = []
    for index in range(pairs):
        one = {apart: on_cpus(first, second, apart, *way) for apart in ((True, False) if index % 2 else (False, True))}
        found.append((one[True], one[False]))

    def ratio(chosen: list[tuple[float, float]]) -> float:
        apart, same = (max(FINEST, mad_sd(list(side))) for side in zip(*chosen))
        return (apart / same) ** 2

    draw = random.Random(2)
    drawn = sorted(ratio(draw.choices(found, k=pairs)) for _ in range(1000))
    return ratio(found), drawn[25], drawn[-26]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workload", choices=WORKLOADS, action="append", help="default: all")
    parser.add_argument("--seconds", type=float, default=80.0, help="of recording, for each workload (default: 80)")
    parser.add_argument("--smoke", action="store_true", help="as little as runs: does it work?")
    parser.add_argument("--json", type=Path, metavar="FILE")
    arguments = parser.parse_args()
    rows: list[dict[str, Any]] = []
    for name in arguments.workload or (WORKLOADS[:1] if arguments.smoke else WORKLOADS):
        say(name)
        with Arena() as arena:
            bench = arena.bench(script(name))
            live = bench.live("recorded", ())
            other = bench.live("raced", ())
            try:
                change, steps = change_ns(live), recorded(live, 20.0 if arguments.smoke else arguments.seconds)
                cpus = placed(live, other, 6 if arguments.smoke else ROUNDS) if len(os.sched_getaffinity(0)) > 1 else None
            finally:
                bench.finish_live(live)
                bench.finish_live(other)
        ratio, scatter = compared(steps, change)
        rows.append({"workload": name, "ratio": ratio, "change_ms": change / 1e6, "scatter": scatter, "cpus": cpus})
        print(f"{name:12} whole blocks / turns {as_text(ratio)}  a round scatters by {scatter['whole']:.1%} / {scatter['turns']:.1%}; "
              f"a change of turns takes {change / 1e6:.1f} ms", flush=True)
        print(f"{name:12} two CPUs / one       {as_text(cpus) if cpus else '- (there is one CPU)'}", flush=True)
    met = all(row["ratio"][0] >= 1 and (row["cpus"] is None or row["cpus"][0] >= 1) for row in rows)
    write_json(arguments.json, "turns", rows, None if arguments.smoke else met)
    return close(met, arguments.smoke, "turns take no longer than whole blocks, nor one CPU than two")


if __name__ == "__main__":
    raise SystemExit(guarded(main))
