"""What a read of a value is called, and the line it is on."""

from __future__ import annotations

import contextlib
import time

import pytest

torch = pytest.importorskip("torch")

from saturate.agent.hostsyncs import HostSyncs  # noqa: E402
from saturate.agent.hostsyncs import _copies_to as copies_to  # noqa: E402


def test_every_read_is_called_what_it_is():
    syncs = HostSyncs(torch, "cpu", time.perf_counter_ns, lambda text: contextlib.nullcontext(), lambda: False)
    value = torch.tensor(0.5)
    syncs.on()
    try:
        value.item()
        f"{value:.3f}"
        str(value)
        bool(value > 0)
        float(value)
        value.tolist()
    finally:
        syncs.off()
    found = sorted((line, what) for _, line, what in syncs.found)
    assert [what for _, what in found] == ["Tensor.item", "format(Tensor)", "print", "bool(Tensor)", "float(Tensor)", "Tensor.tolist"]
    assert [line - found[0][0] for line, _ in found] == list(range(6))
    assert all(file == __file__ for file, _, _ in syncs.found)


def test_a_copy_to_the_device_tells_its_line_and_what_stays_tells_none(monkeypatch):
    """Here `meta` stands for the device: what is copied there is labelled, and so is nothing else."""
    labels = []
    syncs = HostSyncs(torch, "cuda", time.perf_counter_ns, lambda text: labels.append(text) or contextlib.nullcontext(), lambda: False)
    value = torch.zeros(3)
    syncs.on()
    try:
        syncs._device = "meta"
        moved = value.to("meta"); again = moved.to("meta")      # noqa: E702 - one line, one label
        value.to(torch.device("meta"), torch.float64)
        value.to(moved)
        value.to(torch.float16)
        assert copies_to(torch, "cuda", (0,), {}) and copies_to(torch, "cuda", (), {"device": 1}) and not copies_to(torch, "cpu", (0,), {})
        value.to("meta", non_blocking=True)
    finally:
        syncs.off()
    first = labels[0].removeprefix(f"upload {__file__}:").split()
    assert again is moved and labels == [f"upload {__file__}:{int(first[0]) + n} Tensor.to" for n in range(3)] and not syncs.found
