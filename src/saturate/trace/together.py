"""How long operators run together: kernels on several streams run at once, and a share of the step counts each moment once."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from saturate.records.analysis import Operator
from saturate.trace.columns import Column
from saturate.trace.intervals import contains, intersect, length, union
from saturate.trace.operators import groups
from saturate.trace.view import View
from saturate.trace.windows import CPU, kernels_of

#: Time of kernels over the time in which any of them ran, up to which times are summed: less changes no share that a rule
#: looks at, and to find whose each kernel is once more takes as long as the first time.
ALONE = 1.01

Key = tuple[str, str, str]


class Together:
    """Nanoseconds of the window in which any of some operators ran.

    Where no two kernels ran at once that is the sum of their times, as always on a CPU: there an operator's time is its
    own, without what it calls.
    """

    def __init__(self, seen: View) -> None:
        self._seen = seen
        self._rows: dict[Key, list[Column]] = {}
        if seen.device != CPU and _at_once(seen):
            of = seen.joined
            for group in groups(of.trace, seen.device, seen.window, of.launches, of.communicating):
                self._rows.setdefault((group.name, group.shapes, group.dtypes), []).extend(group.rows)

    def ns(self, operators: Iterable[Operator]) -> int:
        if not self._rows:
            return sum(operator.time_ns for operator in operators)
        keys = {(operator.name, operator.shapes, operator.dtypes) for operator in operators}
        rows = [part for key in keys for part in self._rows.get(key, ())]
        return _covered(self._seen, np.concatenate(rows)) if rows else 0

    def recoverable_ns(self, operator: Operator) -> int | None:
        """What of an operator's time above the roof is the step's, too."""
        if operator.recoverable_ns is None or not self._rows or not operator.time_ns:
            return operator.recoverable_ns
        return operator.recoverable_ns * self.ns([operator]) // operator.time_ns


def _at_once(seen: View) -> bool:
    gpu = seen.joined.trace.gpu
    rows = kernels_of(seen.joined.trace, seen.device)
    rows = rows[~seen.joined.communicating[rows]]
    rows = rows[contains(seen.window.steps, gpu.start[rows])]
    return int((gpu.end[rows] - gpu.start[rows]).sum()) > ALONE * _covered(seen, rows)


def _covered(seen: View, rows: Column) -> int:
    gpu = seen.joined.trace.gpu
    return length(intersect(union(gpu.start[rows], gpu.end[rows]), seen.window.steps))
