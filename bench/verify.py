"""How often is an honest change rejected, and a broken one passed?

    python bench/verify.py

Tiny trainings (a perceptron, a convolutional net, a transformer; AdamW and SGD; tests/verify/tiny_trainings.py), many seeds of
each. Honest: bf16 autocast, the fused optimizer, the sums of a batch in another order. Broken: gradients summed instead of
averaged, a skipped step, a learning rate off by a tenth, a dropped micro-batch, gradients of the step before, a frozen layer,
a weight decay that is lost, elements of gradients in other places, weights but not biases at another rate; running statistics of a normalisation that are frozen, at once or later, or counted twice. The product's own verdict, with as many twins as it asks for; beside it what one writes by hand:
`torch.testing.assert_close` of the losses of all updates, at its tolerance for the number format.

A broken change is judged at the tolerance of bf16, the widest there is.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from _output import close, write_json

from saturate.measure import stats
from saturate.study.verification import ROUNDING, TWINS
from saturate.verify import compare as comparison
from saturate.verify.series import ROUNDING as ONE_ROUNDING
from saturate.verify.series import Series
from saturate.verify.tolerance import informative, tolerance

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests" / "verify"))
from tiny_trainings import MATRIX_BUGS, STATISTICS_BUGS, Plan, train, twins

BF16, FLOAT32 = ROUNDING["precision"], ONE_ROUNDING["float32"]
TARGET = 0.05

PLANS = [Plan(model=model, optimizer=optimizer) for model in ("mlp", "convnet", "transformer") for optimizer in ("adamw", "sgd")]
HONEST = {"bf16 autocast": ({"bf16": True}, BF16), "fused optimizer": ({"fused": True}, FLOAT32),
          "another order of sums": ({"reverse_batch": True}, FLOAT32)}
BROKEN = ("gradient sum", "skipped step", "learning rate", "dropped micro-batch", "stale gradients", "frozen layer", "no weight decay",
          "other places", *MATRIX_BUGS, *STATISTICS_BUGS)


def ours(plan: Plan, candidate: Series, rounding: float) -> tuple[bool, int]:
    """(whether it passes, with how many twins), as `study.verification` decides it."""
    baseline = train(plan)
    asked = 1
    found = comparison.compare(baseline, candidate, tolerance(baseline, [], twins(plan, rounding, asked), rounding))
    if found.nearly:
        asked = TWINS
        found = comparison.compare(baseline, candidate, tolerance(baseline, [], twins(plan, rounding, asked), rounding))
    return found.passed, asked


def by_hand(plan: Plan, candidate: Series, rounding: float) -> bool:
    expected, found = (torch.tensor(series.losses, dtype=torch.bfloat16 if rounding == BF16 else torch.float32)
                       for series in (train(plan), candidate))
    try:
        torch.testing.assert_close(found, expected)
    except AssertionError:
        return False
    return True


def trials(seeds: int, changes: dict[str, tuple[dict[str, Any], float]]) -> Iterator[tuple[str, Plan, Series, float]]:
    for plan in (replace(plan, seed=seed) for plan in PLANS for seed in range(seeds)):
        if informative(train(plan)) is not None:
            continue
        for name, (change, rounding) in changes.items():
            if (plan.optimizer == "adamw" or not change.get("fused")) and (plan.model == "convnet" or name not in STATISTICS_BUGS):
                yield name, plan, train(replace(plan, **change)), rounding


def rate(hits: int, number: int) -> str:
    low, high = stats.wilson(hits, number)
    return f"{hits} of {number} [{low:.1%}, {high:.1%}]"


def count(seeds: int, changes: dict[str, tuple[dict[str, Any], float]], wrong: Callable[[bool], bool]) -> list[dict[str, Any]]:
    """One row for each kind of change: how often we, and the check by hand, are wrong."""
    rows: dict[str, dict[str, Any]] = {name: {"change": name, "trials": 0, "wrong": 0, "by_hand": 0, "more_twins": 0} for name in changes}
    for name, plan, candidate, rounding in trials(seeds, changes):
        passed, asked = ours(plan, candidate, rounding)
        row = rows[name]
        row["trials"] += 1
        row["wrong"] += wrong(passed)
        row["by_hand"] += wrong(by_hand(plan, candidate, rounding))
        row["more_twins"] += asked > 1
    return list(rows.values())


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=11, metavar="N", help="of each training (default: 11)")
    parser.add_argument("--json", type=Path, metavar="FILE")
    parser.add_argument("--smoke", action="store_true", help="one seed")
    args = parser.parse_args()
    seeds = 1 if args.smoke else args.seeds
    honest = count(seeds, HONEST, wrong=lambda passed: not passed)
    broken = count(seeds, {bug: ({"bug": bug}, BF16) for bug in BROKEN}, wrong=lambda passed: passed)
    for title, rows in (("honest, rejected", honest), ("broken, passed", broken)):
        print(f"{title:<30}{'saturate':<30}{'assert_close':<30}asked for {TWINS} twins")
        for row in rows:
            print(f"  {row['change']:<28}{rate(row['wrong'], row['trials']):<30}{rate(row['by_hand'], row['trials']):<30}"
                  f"{row['more_twins']} of {row['trials']}")
    totals = [(sum(row["wrong"] for row in rows), sum(row["trials"] for row in rows)) for rows in (honest, broken)]
    print(f"honest changes rejected: {rate(*totals[0])}; broken ones passed: {rate(*totals[1])}")
    met = max(wrong / number for wrong, number in totals) <= TARGET
    write_json(args.json, "verify", [*honest, *broken], None if args.smoke else met)
    return close(met, args.smoke, f"at most {TARGET:.0%} wrong either way")


if __name__ == "__main__":
    sys.exit(main())
