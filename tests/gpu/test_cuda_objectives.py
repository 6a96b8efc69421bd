"""Searches on a GPU by throughput and by memory. Each takes about a minute."""

from __future__ import annotations

import ctypes
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("cloudpickle", reason="the extra inference")

import saturate  # noqa: E402 - after the check for torch
from saturate.inference.device_memory import DeviceMemory  # noqa: E402

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")]

WIDTH, LAYERS = 2048, 8
WEIGHTS = 4 * LAYERS * WIDTH * WIDTH            # 128 MiB


def searched(folder: Path, objective: str, technique: str) -> Any:
    torch.manual_seed(0)
    model = torch.nn.Sequential(*(part for _ in range(LAYERS) for part in (torch.nn.Linear(WIDTH, WIDTH), torch.nn.ReLU()))).cuda().eval()
    inputs = [(torch.rand(8, WIDTH, device="cuda"),) for _ in range(3)]
    return saturate.optimize(model, inputs, objective=objective, time="60s", only=(technique,), workdir=folder, threads=2).record


def test_what_is_taken_beside_the_allocator_counts() -> None:
    """By a library that asks the driver itself."""
    driver, pointer, size = ctypes.CDLL("libcuda.so.1"), ctypes.c_uint64(), 256 * 2**20
    torch.zeros(1, device="cuda")       # the allocator has its first block, and this thread its context
    memory = DeviceMemory(torch)
    before = memory.peak_bytes()
    assert driver.cuMemAlloc_v2(ctypes.byref(pointer), ctypes.c_size_t(size)) == 0
    try:
        grown = memory.peak_bytes() - before
    finally:
        driver.cuMemFree_v2(pointer)
    assert 0.9 * size < grown < 1.5 * size


def test_the_memory_of_each_is_known(tmp_path: Path) -> None:
    record = searched(tmp_path / "study", "memory", "cuda-graphs")
    row = next(row for row in record.candidates if row.id == "cuda-graphs")
    for known in (record.baseline, row):
        assert known.peak_memory_bytes is not None and known.peak_memory_bytes >= WEIGHTS, known


def test_a_search_with_a_check_ends_with_what_it_can_show(tmp_path: Path) -> None:
    """What is compared of the device, scored there, stored, and loaded again."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(*(part for _ in range(LAYERS) for part in (torch.nn.Linear(WIDTH, WIDTH), torch.nn.ReLU()))).cuda().eval()
    inputs = [(torch.rand(8, WIDTH, device="cuda"),) for _ in range(4)]
    scored = [torch.rand(8, WIDTH, device="cuda") for _ in range(8)]
    wanted = [model(x).detach() for x in scored]

    def check(run: Any) -> list[float]:
        errors = [(run(x) - known).square().mean(1) / known.square().mean() for x, known in zip(scored, wanted)]
        return torch.cat(errors).neg().exp().tolist()

    result = saturate.optimize(model, inputs, check=check, budget=saturate.Budget(max_drop=0.01), time="90s", only=("cuda-graphs", "fp16"),
                               workdir=tmp_path / "study", threads=2)
    record = result.record
    assert record.device == "cuda" and not any("cannot be called in this process" in note for note in record.notes), record.notes
    assert {part["id"] for row in record.candidates for part in row.techniques} >= {"cuda-graphs", "fp16"}
    assert not any("same device" in row.reason for row in record.candidates), record.candidates
    if record.best is not None:
        torch.testing.assert_close(result(scored[0]), wanted[0], rtol=5e-2, atol=5e-2)


def test_samples_per_second_are_counted(tmp_path: Path) -> None:
    record = searched(tmp_path / "study", "throughput", "cuda-graphs")
    if record.verdict != "faster":
        pytest.skip(f"{record.verdict}: only a winner is served in several ways")
    assert record.throughput and all(row.samples_per_s > 0 for row in record.throughput), record
