"""Whether what a study would begin next still ends within its budget. A refusal names the budget that would do."""

from __future__ import annotations

import math
import time

from saturate.measure import stationary
from saturate.study.race_pair import LEAST_ROUNDS
from saturate.study.racing import Result
from saturate.study.state import Study
from saturate.study.verification import UPDATES, budget_needed

#: A budget in which one technique can be tried: so many times what starting and the first verification run take.
NEEDED = 4

#: How late the first technique may surely end before nothing is begun at all: this share of the budget, and with a short one so many
#: seconds. Who starts slowly on a busy machine may well be faster the next time.
SLACK_SHARE, LEAST_SLACK_S = 0.2, 30.0

#: What may do where a search ended before it was through, as a multiple of the budget that it had.
LONGER = 2


def too_late(study: Study, end: float) -> str | None:
    """Why the first verification run is not begun, or None: its updates alone do not end within the budget. `study` then knows that,
    and the budget that would do."""
    if study.store.answer("informative") is not None:       # a resumed study has made it
        return None
    step_ms, now = study.baseline["step_ms"], time.monotonic()
    updates_s = UPDATES * step_ms / 1e3
    if now + updates_s < end:
        return None
    run_s = study.baseline["startup_s"] + updates_s
    study.out_of_time, study.needs_budget = True, budget_needed(step_ms, NEEDED * (now - study.started + run_s))
    left_s = max(0.0, end - now)
    return (f"the budget of {study.request.budget_s:.0f} s ends before anything can be timed: {left_s:.0f} s are left, and the first "
            f"verification run takes about {run_s:.0f} s; give it --budget {study.needs_budget}, or a smaller configuration")


def out_of_time(study: Study, end: float, run_s: float | None = None) -> str | None:
    """Why nothing can be tried within the budget, or None: starting and one verification run have used it up, or leave less than the
    baseline against itself and one technique surely take. `run_s`: how long that run took; None in a resumed study, which had it before
    and may know the noise as well. `study` then knows that, and the budget that would do."""
    now, budget_s = time.monotonic(), study.request.budget_s
    least_s = 0.0 if run_s is None else _least_s(study, run_s)
    if now < end and now + least_s <= end + max(SLACK_SHARE * budget_s, LEAST_SLACK_S):
        return None
    spent_s = now - study.started
    study.out_of_time, study.needs_budget = True, f"{math.ceil(NEEDED * spent_s / 60)}m"
    why = f"starting and the first verification run took {spent_s:.0f} s"
    if now < end:
        why += f", and the baseline against itself and one technique take another {least_s:.0f} s at least"
    what = "ended before anything could be timed" if now >= end else "ends before anything can be tried"
    return f"the budget of {budget_s:.0f} s {what}: {why}; give it --budget {study.needs_budget}, or a smaller configuration"


def _least_s(study: Study, run_s: float) -> float:
    """What the baseline against itself and one technique surely take, without which the former is of no use: two starts (the two of a
    pair may start at once), three warm-ups, and twice the fewest rounds. The first start may have been slow because the machine was
    cold: the verification run, which took `run_s` in all, has started since."""
    step_ms = study.baseline.get("step_ms")
    if step_ms is None:         # it does not run in this memory
        return 0.0
    rounds = LEAST_ROUNDS * 2 * sum(stationary.block_steps(step_ms))
    return float(2 * min(study.baseline["startup_s"], run_s) + (3 * stationary.LEAST_STEPS + 2 * rounds) * step_ms / 1e3)


def time_for_another(result: Result, end: float) -> bool:
    """Whether one more pair would end in time, if it takes as long as those before it: most of that is starting, which no
    deadline cuts short."""
    return time.monotonic() + result.pair_s <= end
