"""Whether what a study would begin next still ends within its budget. A refusal names the budget that would do."""

from __future__ import annotations

import math
import time

from saturate.study.racing import Result
from saturate.study.state import Study
from saturate.study.verification import UPDATES, budget_needed

#: A budget in which one technique can be tried: so many times what starting and the first verification run take.
NEEDED = 4

#: What may do where a search ended before it was through, as a multiple of the budget that it had.
LONGER = 2


def too_late(study: Study, end: float) -> str | None:
    """Why the first verification run is not begun, or None: its updates alone do not end within the budget. `study` then knows the
    budget that would do."""
    if study.store.answer("informative") is not None:       # a resumed study has made it
        return None
    step_ms, now = study.baseline["step_ms"], time.monotonic()
    updates_s = UPDATES * step_ms / 1e3
    if now + updates_s < end:
        return None
    run_s = study.baseline["startup_s"] + updates_s
    study.needs_budget = budget_needed(step_ms, NEEDED * (now - study.started + run_s))
    left_s = max(0.0, end - now)
    return (f"the budget of {study.request.budget_s:.0f} s ends before anything can be timed: {left_s:.0f} s are left, and the first "
            f"verification run takes about {run_s:.0f} s; give it --budget {study.needs_budget}, or a smaller configuration")


def out_of_time(study: Study, end: float) -> str | None:
    """Why nothing can be timed within the budget, or None: starting and one verification run have used it up. `study` then
    knows the budget that would do."""
    now = time.monotonic()
    if now < end:
        return None
    spent_s = now - study.started
    study.needs_budget = f"{math.ceil(NEEDED * spent_s / 60)}m"
    return (f"the budget of {study.request.budget_s:.0f} s ended before anything could be timed: starting and the first verification run "
            f"took {spent_s:.0f} s; give it --budget {study.needs_budget}, or a smaller configuration")


def time_for_another(result: Result, end: float) -> bool:
    """Whether one more pair would end in time, if it takes as long as those before it: most of that is starting, which no
    deadline cuts short."""
    return time.monotonic() + result.pair_s <= end
