"""Occupancy proxies against hand-computed values, and when they abstain."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from traces import V100, Recording

from saturate.records.analysis import Occupancy
from saturate.trace.breakdown import communication, work
from saturate.trace.columns import DeviceInfo, Trace
from saturate.trace.launches import launching_calls
from saturate.trace.occupancy import occupancy, resident_blocks
from saturate.trace.windows import window

A100 = DeviceInfo(id=0, name="NVIDIA A100-SXM4-80GB", sms=108, threads_per_sm=2048, memory_bytes=80 << 30,
                  capability=(8, 0), shared_bytes_per_sm=167936, registers_per_sm=65536)


def measured(trace: Trace, device: DeviceInfo | None = V100) -> tuple[Occupancy, dict[str, str]]:
    here = window(trace, 0)
    return occupancy(trace, device, here, work(trace, 0, here, communication(trace, launching_calls(trace))))


def kernel(made: Recording, start: int, end: int, blocks: int = 160, threads: int = 256, registers: int = 32,
           shared_bytes: int = 0, **columns: Any) -> None:
    made.kernel("k", start, end, blocks=blocks, threads=threads, registers=registers, shared_bytes=shared_bytes,
                **columns)


@pytest.mark.parametrize("device, threads, registers, shared, blocks", [
    (V100, 256, 32, 0, 8),          # 2048 threads
    (V100, 64, 16, 0, 32),          # the architecture's limit
    (V100, 256, 64, 0, 4),          # 64 x 32 = 2048 registers per warp, 32 warps
    (V100, 64, 88, 3328, 10),       # 5 warps in each partition of 16384 registers, not 23 in all
    (V100, 128, 32, 40000, 2),      # 98304 bytes
    (A100, 128, 32, 41984, 3),      # a quarter of 167936 bytes, and 1024 more per block
    (V100, 1000, 32, 0, 2),         # 32 warps, the last one not full
    (replace(V100, capability=(7, 5), threads_per_sm=1024), 32, 16, 0, 16),
])
def test_resident_blocks(device: DeviceInfo, threads: int, registers: int, shared: int, blocks: int) -> None:
    """By hand from the tables of the CUDA programming guide; the fourth is a kernel of the shared V100 trace."""
    made = Recording(device)
    kernel(made, 0, 10, threads=threads, registers=registers, shared_bytes=shared)
    assert resident_blocks(made.trace(), np.array([0]), device).tolist() == [blocks]


def test_means_are_weighted_by_time_in_the_window() -> None:
    """80 SMs. 30 ns: 40 blocks, half of the SMs. 10 ns in the step: 960 blocks, 12 per SM where 8 fit, 1.5 waves."""
    made = Recording(V100)
    made.step(0, 100)
    kernel(made, 10, 40, blocks=40)
    kernel(made, 90, 110, blocks=960)
    kernel(made, 200, 900, blocks=1)
    found, unknown = measured(made.trace())
    assert not unknown
    assert found.sm_fill == pytest.approx((30 * 0.5 + 10 * 1.0) / 40)
    assert found.sm_fill_of_step == pytest.approx((30 * 0.5 + 10 * 1.0) / 100), "gaps count as 0"
    assert found.tail == pytest.approx((30 * 0.0625 + 10 * 0.75) / 40)
    assert found.occupancy == pytest.approx((30 * 0.5 / 8 + 10 * 1.0) / 40)


def test_streams_side_by_side_do_not_fill_a_step_twice() -> None:
    made = Recording(V100)
    made.step(0, 100)
    kernel(made, 0, 100, stream=1)
    kernel(made, 0, 100, stream=2)
    assert measured(made.trace())[0].sm_fill_of_step == 1.0


def test_a_grid_that_is_not_known_makes_it_abstain() -> None:
    """The graph replay of the shared traces: 1 % of the kernel time has a grid, and 0.0007 would be no occupancy."""
    made = Recording(V100)
    made.step(0, 100)
    kernel(made, 0, 95)
    made.kernel("replayed", 95, 100)
    assert measured(made.trace())[0].sm_fill == 1.0
    made.kernel("replayed", 94, 95, stream=3)
    found, unknown = measured(made.trace())
    assert found == Occupancy(sm_fill=None, sm_fill_of_step=None, tail=None, occupancy=None)
    assert set(unknown) == {"occupancy.sm_fill", "occupancy.sm_fill_of_step", "occupancy.tail", "occupancy.occupancy"}
    assert "6%" in unknown["occupancy.sm_fill"]


def test_without_device_facts_the_recorded_proxies_remain() -> None:
    made = Recording()
    made.step(0, 10)
    kernel(made, 0, 10, blocks_per_sm=0.25, occupancy=0.19)
    found, unknown = measured(made.trace(), None)
    assert (found.sm_fill, found.tail, found.occupancy) == (0.25, None, pytest.approx(0.19))
    assert "occupancy.tail" in unknown


def test_no_kernel_in_the_window() -> None:
    made = Recording(V100)
    made.step(0, 10)
    kernel(made, 100, 110)
    assert measured(made.trace())[1]["occupancy.sm_fill"] == "no kernel ran in the window"
