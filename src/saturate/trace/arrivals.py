"""Stragglers where collectives leave no kernels: on CPUs (gloo, MPI) the host's own spans tell who came late.

The backend labels a collective from the moment a rank issues it until it is done, whichever thread does the work, so the
start is the arrival and the rest is as in `ranks`.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Sequence

import numpy as np

from saturate.records.analysis import Straggler
from saturate.trace.columns import Trace
from saturate.trace.launches import named
from saturate.trace.ranks import Key, Kind, Seen, across
from saturate.trace.windows import CPU, window

_COLLECTIVE = re.compile(r"^(gloo|mpi|ucc):")


def stragglers(traces: Sequence[Trace]) -> list[Straggler]:
    """Each rank across the collectives that all ranks issued equally often; empty where that cannot be told."""
    return across([observe(trace) for trace in traces]).stragglers


def observe(trace: Trace) -> Seen:
    """The collectives of one rank inside its steps, by kind and in order."""
    steps = window(trace, CPU).steps
    low, high = (steps.start[0], steps.end[-1]) if len(steps.start) else (0, 0)
    seen: dict[Key, list[tuple[int, int]]] = defaultdict(list)
    for events in (trace.annotations, trace.operators):
        rows = np.flatnonzero(named(trace, events.name, _COLLECTIVE) & (events.start >= low) & (events.start < high))
        for row in rows.tolist():
            key = Key(Kind("", trace.names[events.name[row]], ""), "step", -1)
            seen[key].append((int(events.start[row]), int(events.end[row])))
    columns = {key: np.array(sorted(spans), "i8") + trace.origin_ns for key, spans in seen.items()}
    return Seen(
        rank=trace.rank, source=trace.source, starts={key: spans[:, 0] for key, spans in columns.items()},
        ends={key: spans[:, 1] for key, spans in columns.items()},
    )
