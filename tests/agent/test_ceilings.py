"""FLOPs of a step against closed form; measured ceilings are positive and change nothing."""

from __future__ import annotations

import contextlib
import time
import types
from typing import Any

import pytest


def test_flops_of_a_step_match_closed_form(script, start):
    source = """
    import torch, torch.nn as nn
    model = nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 8))
    opt = torch.optim.SGD(model.parameters(), lr=1e-3)
    x = torch.randn(16, 32)
    while True:
        opt.zero_grad(); model(x).pow(2).mean().backward(); opt.step()
    """
    trial = start(str(script(source)))
    trial.wait_ready()
    first, second = 2 * 16 * 32 * 64, 2 * 16 * 64 * 8
    # Forward, gradient of the weights, and gradient of the input of the second layer only.
    assert trial.ask("facts")["flops_per_step"] == 2 * first + 3 * second


def test_ceilings_are_measured_and_leave_the_random_numbers_alone(script, start):
    import torch

    from saturate.agent import ceilings

    state = torch.get_rng_state()
    rates = ceilings.measure(torch, "cpu")
    assert torch.equal(state, torch.get_rng_state())
    assert rates.pop("unknown") == {} and set(rates) == {"float32", "bfloat16", "copy"}
    assert all(rate > 1e8 for rate in rates.values())


def test_a_script_that_stops_its_own_clock_is_not_measured_for_ever(monkeypatch):
    """As a library that freezes time does. The study ended: the command was hung."""
    from saturate.agent import ceilings

    monkeypatch.setattr(time, "perf_counter", lambda: 0.0)
    runs = iter(range(10**6))       # by the script's clock, it would want one more
    assert 0 < ceilings._seconds(None, "cpu", lambda: next(runs), budget=1e-3) < 1


GIB = 1 << 30
CUBLAS = "CUDA error: CUBLAS_STATUS_NOT_SUPPORTED when calling `cublasGemmEx`"


class Array:
    def __init__(self, device: Device, count: int, dtype: str):
        self.device, self.count, self.dtype = device, count, dtype
        device.take(count * (4 if dtype == "float32" else 2))

    def numel(self) -> int:
        return self.count

    def __matmul__(self, other: Array) -> Array:
        if self.dtype == self.device.refuses:
            raise RuntimeError(CUBLAS)
        return Array(self.device, self.count, self.dtype)

    def copy_(self, other: Array) -> None: ...


class Device:
    """torch with a CUDA device of which so much is free; `lies`: what the driver calls free besides, and another program takes meanwhile.
    `refuses`: a format that its cuBLAS does not multiply."""

    float32, bfloat16 = "float32", "bfloat16"
    no_grad = contextlib.nullcontext

    def __init__(self, free: int, refuses: str = "", lies: int = 0):
        self.free, self.refuses, self.lies, self.sizes, self.current = free, refuses, lies, [], None     # type: ignore[var-annotated]
        self.cuda = types.SimpleNamespace(device=self._on, mem_get_info=lambda: (self.free + self.lies, 80 * GIB),
                                          empty_cache=lambda: self.sizes.append("emptied"), synchronize=lambda: None)

    @contextlib.contextmanager
    def _on(self, device: Any) -> Any:
        self.current = device
        yield
        self.current = "the script's"

    def take(self, size: int) -> None:
        assert self.current == "cuda:1", "another device than the one that trains"
        if size > self.free:
            raise RuntimeError("CUDA out of memory. Tried to allocate.\nGPU 1 has")
        self.sizes.append(size)

    def ones(self, *shape: int, device: str, dtype: str) -> Array:
        return Array(self, shape[0] * shape[-1] if len(shape) == 2 else shape[0], dtype)

    def empty_like(self, array: Array) -> Array:
        return Array(self, array.count, array.dtype)


@pytest.mark.parametrize(("device", "product", "copy", "unknown"), [
    (Device(60 * GIB), 8192, GIB, {}),
    (Device(3 * GIB), 8192, GIB // 2, {}),
    (Device(GIB // 2), 4096, 0, {"copy": "it needs more memory than the training leaves free"}),
    (Device(GIB // 8), 0, 0, dict.fromkeys(["float32", "bfloat16", "copy"], "it needs more memory than the training leaves free")),
    (Device(60 * GIB, refuses="bfloat16"), 8192, GIB, {"bfloat16": CUBLAS}),
    (Device(GIB // 64, lies=60 * GIB), 0, 0, dict.fromkeys(["float32", "bfloat16", "copy"], "CUDA out of memory. Tried to allocate.")),
], ids=["empty", "some", "little", "full", "refuses", "taken meanwhile"])
def test_a_full_device_leaves_out_what_does_not_fit(device: Device, product: int, copy: int, unknown: dict[str, str], monkeypatch) -> None:
    """It stopped the study: the agent had failed. And the training goes on at the same gate: of what is free half is left."""
    from saturate.agent import ceilings

    monkeypatch.setattr(ceilings, "_SECONDS", 0.0)
    found = ceilings.measure(device, "cuda", "cuda:1")
    assert found.pop("unknown") == unknown and set(found) == {"float32", "bfloat16", "copy"} - set(unknown)
    taken = [size for size in device.sizes if size != "emptied"]
    assert max(taken, default=0) == max(4 * product * product, copy) and 4 * max(taken, default=0) <= device.free
    assert device.sizes[-1] == "emptied" and device.current == "the script's"


@pytest.mark.parametrize(("rates", "words"), [
    ({"float32": 1e12, "bfloat16": 4e12, "copy": 1e9, "unknown": {}}, "of 4 TFLOP/s, the fastest matrix product measured here (bfloat16)"),
    ({"float32": 1e12, "unknown": {"bfloat16": "no room"}}, "measured here (float32); not measured: bfloat16: no room"),
    ({"copy": 1e9, "unknown": {"float32": "no room", "bfloat16": "refused"}}, "1 TFLOP a step; not measured: float32: no room; bfloat16: refused"),
    ({}, ""), (None, ""),
])
def test_what_was_not_measured_is_said(rates: Any, words: str) -> None:
    from saturate.records.facts import Facts
    from saturate.study import summary

    study: Any = types.SimpleNamespace(facts=Facts(flops_per_step=10**12), baseline={"ceilings": rates, "step_ms": 500.0}, final=None)
    assert summary._ceiling(study).endswith(words) and bool(words) is bool(summary._ceiling(study))
