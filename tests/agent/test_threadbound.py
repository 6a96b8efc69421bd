"""Steps of a training may run in one thread after the other; modes and profilers belong to the one that enters them."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from saturate.agent import flopcount
from saturate.agent.threadbound import Entered, enter_mode

torch = pytest.importorskip("torch")

LOOP = """
import threading, torch
model = torch.nn.Linear(8, 8)
optimizer = torch.optim.AdamW(model.parameters())
def step():
    optimizer.zero_grad(); model(torch.randn(4, 8)).mean().backward(); optimizer.step()
"""
A_THREAD_EACH = LOOP + """
while True:
    thread = threading.Thread(target=step); thread.start(); thread.join()
"""
A_FEW_THREADS = LOOP + """
from concurrent.futures import ThreadPoolExecutor
pools = [ThreadPoolExecutor(1) for _ in range(2)]
while True:
    for pool in pools: pool.submit(step).result()
"""


def product() -> Any:
    """16 operations."""
    return torch.ones(2, 2) @ torch.ones(2, 2)


def test_a_mode_is_left_in_its_own_thread_only() -> None:
    counter = flopcount.flop_counter(torch)
    with ThreadPoolExecutor(1) as pool:
        entered = pool.submit(enter_mode, counter).result()
        assert not entered.leave()
        pool.submit(product).result()
        assert counter.flops == 16
        counter.off = True
        pool.submit(product).result()
        assert counter.flops == 16
        assert pool.submit(entered.leave).result()
        assert pool.submit(lambda: torch.utils._python_dispatch._get_current_dispatch_mode_stack()).result() == []


def test_a_mode_that_lies_below_another_waits() -> None:
    ours, theirs = flopcount.flop_counter(torch), flopcount.flop_counter(torch)
    entered = enter_mode(ours)
    with theirs:
        assert not entered.leave()
    assert entered.leave()


def test_what_a_thread_entered_is_gone_with_it() -> None:
    found: list[Entered] = []
    thread = threading.Thread(target=lambda: found.append(enter_mode(flopcount.flop_counter(torch))))
    thread.start()
    thread.join()
    assert found[0].leave()


@pytest.mark.parametrize("source", [A_THREAD_EACH, A_FEW_THREADS], ids=["a thread for each step", "a few threads"])
def test_steps_in_several_threads_are_timed_and_not_counted(source: str, start: Any, script: Any, tmp_path: Any) -> None:
    trial = start(str(script(source)))
    trial.wait_ready()
    facts = trial.ask("facts")
    assert facts["flops_per_step"] is None and facts["flops_unknown"] == flopcount.ELSEWHERE
    assert len(trial.run_block(1, 5).step_ns) == 5
    assert trial.look("modules", 1, 3)["flops_unknown"] == flopcount.ELSEWHERE
    assert "more than one thread" in trial.look("record", 1, 3, folder=str(tmp_path), step_ms=1.0)["problem"]
    assert len(trial.run_block(1, 5).step_ns) == 5
