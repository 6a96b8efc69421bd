"""What the loader costs: blocks of ordinary steps and of steps with one batch replayed, in turns, in one process.

The difference is what a loader that takes no time at all would save, and no data technique can save more. Paired like
a race (A B, B A): what else the machine does meanwhile hits both.
"""

from __future__ import annotations

import math
import statistics

from saturate.measure import stationary, stats
from saturate.records.analysis import LoaderCost
from saturate.records.facts import Facts
from saturate.trial.process import Trial

#: Pairs of blocks, and how long all of them may take before fewer must do.
ROUNDS, LEAST_ROUNDS = 8, 4
MOST_S = 60.0


def measure(trial: Trial, facts: Facts, step_ms: float) -> LoaderCost | str:
    """The cost, or why there is none to measure. Raises TrialEnded."""
    if not facts.loaders:
        return "the training does not read from a DataLoader"
    loader = max(facts.loaders, key=lambda one: one.num_workers)
    skip, steps = stationary.block_steps(step_ms, loader.num_workers, loader.prefetch_factor or 2, queued=facts.device != "cpu")
    pair_s = 2 * (skip + steps + 1) * step_ms / 1e3
    lead = stationary.lead_steps(step_ms, queued=facts.device != "cpu")
    rounds = max(LEAST_ROUNDS, min(ROUNDS, int(MOST_S / pair_s)))
    found: list[tuple[float, float]] = []
    for number in range(rounds):
        if number % 2:
            replayed = _replayed(trial, lead, steps)
            ordinary = trial.run_block(skip, steps).mean_ns
        else:
            ordinary = trial.run_block(skip, steps).mean_ns
            replayed = _replayed(trial, lead, steps)
        if replayed is None:
            return "no batch of a DataLoader was asked for in these steps"
        found.append((ordinary, replayed))
    return summed(found)


def _replayed(trial: Trial, lead: int, steps: int) -> float | None:
    """Mean nanoseconds of steps with a replayed batch; None when none was replayed. All but the first of the `lead` steps before them
    replay it, too. A window ends within the step that follows it, which is an ordinary one."""
    block = trial.run_block(lead, steps + 1, watch={"kind": "replay", "skip": 1, "steps": lead - 1 + steps})
    seen = trial.ask("seen")
    if not seen or not seen["replayed"]:
        return None
    return statistics.fmean(block.step_ns[:-1] or block.step_ns)


def summed(pairs: list[tuple[float, float]]) -> LoaderCost:
    """The cost from (ordinary, replayed) nanoseconds per step, by round, with a 95 % interval of its share of the
    step."""
    logs = [math.log(replayed / ordinary) for ordinary, replayed in pairs]
    middle = statistics.median(logs)
    reach = stats.median_se(logs) * stats.t_quantile(0.975, len(logs) - 1)
    ordinary = statistics.median(first for first, _ in pairs) / 1e6
    share = -math.expm1(middle)
    return LoaderCost(
        step_ms=ordinary, replayed_step_ms=ordinary * (1 - share), cost_ms=ordinary * share, share=share,
        share_ci=(-math.expm1(middle + reach), -math.expm1(middle - reach)), rounds=len(pairs),
    )
