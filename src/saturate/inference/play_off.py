"""The best of a search beside those that came close to it, once more, in fresh processes.

Two processes of one program differ by some percent from one start to the next (4.9 and 5.4 times the baseline of a ResNet-50, in two
searches), so the fastest of several screenings is partly the luckiest.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from saturate.inference import racing
from saturate.inference.failures import WorkerFailed

if TYPE_CHECKING:
    from saturate.inference.candidates import Candidate
    from saturate.inference.search import Search

#: What comes within this factor of the best runs beside it; at most so many rivals, whose processes are what it costs.
CLOSE, RIVALS = 1.08, 2


def run(search: Search) -> None:
    """What each gave before counts as much as what it gives now. Whoever is behind is closed first: two live beside the baseline."""
    holder = search.best()
    if search.objective == "memory" or holder is None:
        return
    rivals = [one for one in search.ranked()[1:] if CLOSE * search.value(one) >= search.value(holder)][:RIVALS]
    if not rivals or not any(one.candidate in search.fresh for one in (holder, *rivals)):
        return
    if not search.room_for(holder, rivals[0]):      # their processes would start for nothing
        return
    search.progress(f"close to each other: {', '.join(one.candidate.label() for one in (holder, *rivals))}; once more, side by side")
    lanes: list[racing.Lane] = []
    try:
        _enter(search, holder.candidate, lanes)
        for rival in rivals:
            if not search.time_left():
                return
            _enter(search, rival.candidate, lanes)
            first, second = holder.speedup or 1.0, rival.speedup or 1.0
            rival.again(first * math.sqrt(second / first * racing.screen(*lanes)))
            search.note(rival)
            ahead = search.value(rival) > search.value(holder)
            holder = rival if ahead else holder
            lanes.pop(0 if ahead else 1).worker.close()
    except WorkerFailed as error:
        search.progress(f"not compared once more: {error}")
    finally:
        for lane in lanes:
            lane.worker.close()


def _enter(search: Search, candidate: Candidate, lanes: list[racing.Lane]) -> None:
    """A fresh process, ready and frozen; among the `lanes` from its start on, so that it is closed whatever happens."""
    lanes.append(racing.Lane(search.lab.start(candidate), 0))
    lanes[-1].calls = racing.Lane.of(lanes[-1].worker).calls
