"""What a fit knows of a script that ended by itself: what any of its ranks said."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from saturate.study.fit_process import Process, Window

BEFORE = Window(peak_bytes=100, idle_bytes=10, retries=2, steps=8, timed=8, seconds=1.0, samples=64, delivered=8, evaluations=3, saves=2, cpu_share=1.0)


def ended(*ranks: dict[str, Any], metered: int = 0) -> Process:
    """A process whose ranks said this when they ended, in the order in which they did."""
    process = object.__new__(Process)
    notices = [{"at": "motif_changed"}, *({"at": "ended", "steps": 40, "raised": False, "fit": one} for one in ranks)]
    process.trial = SimpleNamespace(server=SimpleNamespace(notices=notices))     # type: ignore[assignment]
    process.meter = SimpleNamespace(peak_bytes=lambda: metered)                  # type: ignore[assignment]
    return process


def said(evaluations: int, saves: int, device: tuple[int, int] | None = None) -> dict[str, Any]:
    return {"evaluations": evaluations, "saves": saves,
            "device": device and {"reserved_bytes": device[0], "retries": device[1], "idle_bytes": 0, "room_bytes": 0}}


WORKER, FIRST = said(0, 0, (300, 1)), said(5, 4, (200, 2))


@pytest.mark.parametrize("ranks", [(WORKER, FIRST), (FIRST, WORKER)])
def test_the_order_in_which_ranks_end_changes_nothing(ranks):
    """Where rank 1 left first, an epoch's evaluation and checkpoint on rank 0 were called unseen, and rank 0's peak was the answer's."""
    seen = ended(*ranks).at_its_end(BEFORE)
    assert (seen.peak_bytes, seen.retries, seen.evaluations, seen.saves) == (300, 3, 5, 4)
    assert (seen.steps, seen.samples) == (BEFORE.steps, BEFORE.samples)


def test_nothing_becomes_less_than_it_was():
    """The rank that evaluates and saves was killed with its launcher."""
    seen = ended(said(0, 0, (50, 0))).at_its_end(BEFORE)
    assert (seen.peak_bytes, seen.retries, seen.evaluations, seen.saves) == (100, 2, 3, 2)
    assert ended().at_its_end(BEFORE) == BEFORE


def test_on_a_cpu_the_meter_saw_the_peak():
    seen = ended(said(1, 0), said(0, 1), metered=500).at_its_end(None)
    assert (seen.peak_bytes, seen.evaluations, seen.saves) == (500, 1, 1)
