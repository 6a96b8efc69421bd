"""What `saturate fit --knob` keeps of the sizes that it starts, without a process."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from saturate.measure.memory_model import Point
from saturate.study.fit import Asked, _answer
from saturate.study.fit_knob import KnobSearch
from saturate.study.fit_process import Window
from saturate.study.state import Request
from saturate.trial.outcome import Outcome
from saturate.trial.process import TrialEnded, Workload

LIMIT = 1000


def search(*words: str) -> KnobSearch:
    workload = Workload(["python", "t.py", *words], Path.cwd(), {})
    meter = SimpleNamespace(exceeded_bytes=None, late=False)
    made = KnobSearch(bench=SimpleNamespace(meter=meter), memory_bytes=None, target="throughput", asked_most=None, accelerated=True,     # type: ignore[arg-type]
                      budget_s=1.0, deadline=float("inf"), say=lambda line: None, limit_bytes=LIMIT, facts={"device": "cuda", "micro_steps": 1},
                      knob="--batch-size", workload=workload)
    made.idle_bytes, made.points = 0.0, [Point(2, 20)]
    return made


class Sized:
    """A process of one size, of which each sample takes 10 bytes and 1 ms. It runs out of memory after so many blocks."""

    def __init__(self, size: int, peak: int | None = None, blocks: int = 99):
        self.size, self.peak, self.blocks, self.steps_so_far = size, peak or 10 * size, blocks, 0

    def run(self, size: None, steps: int, **options: Any) -> Window:
        self.blocks -= 1
        if self.blocks < 0:
            raise TrialEnded(Outcome("out_of_memory_device", "CUDA out of memory"))
        return Window(self.peak, 0, 0, steps, steps, 0.001 * steps * self.size, steps * self.size, self.size, 0, 0, 1.0)


def prove(made: KnobSearch, process: Sized) -> None:
    made._prove(process, process.size, fresh=False, began=0.0)      # type: ignore[arg-type]


def answered(made: KnobSearch, target: str) -> int | None:
    return _answer(Asked(Request(argv=[], cwd=Path.cwd(), environment={}, directory=Path.cwd()), target=target), made)


def test_the_speed_of_a_size_that_does_not_fit_is_no_matter():
    made = search()
    for size in (16, 32):
        prove(made, Sized(size))
    prove(made, Sized(64, peak=LIMIT - 1))          # too close
    with pytest.raises(TrialEnded):
        prove(made, Sized(48, blocks=6))
    assert [one.micro_batch for one in made.throughput.curve()] == list(made.proofs) == [16, 32]
    assert made.throughput.knee == 16 and "one process after the other" in made.throughput.note, "also where the last process died"
    assert (answered(made, "throughput"), answered(made, "memory")) == (16, 32)


def test_what_a_size_was_that_fails_later_is_forgotten():
    made = search()
    for size in (16, 32, 48):
        prove(made, Sized(size))
    made._fails(32)
    for by_size in (made.proofs, made.throughput.rates, made.throughput.shares, made.throughput.step_s):
        assert list(by_size) == [16]
    assert made.throughput.knee is None and made.utilisation() == (None, "")
    assert answered(made, "throughput") == 16


@pytest.mark.parametrize(("own", "smaller"), [(96, 8), (100, 12), (16, 2), (8, 2), (1, 2), (1024, 128)])
def test_where_the_own_size_does_not_start_a_multiple_is_tried_that_the_script_takes(own, smaller):
    assert search("--batch-size", str(own))._smaller() == smaller
    assert search()._smaller() == 2
