"""What a process takes of a GPU's memory, on a stand-in of a device: torch's allocator, and what other libraries take beside it."""

from __future__ import annotations

import os
import types
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="the inference worker needs torch")

from saturate.inference import device_memory  # noqa: E402 - after the check for torch
from saturate.inference.device_memory import DeviceMemory, knows_processes  # noqa: E402
from saturate.inference.formats import aoti  # noqa: E402
from saturate.inference.worker import Server  # noqa: E402

MIB = 2**20
CONTEXT, TOTAL = 500 * MIB, 80 * 2**30


class Device:
    """torch.cuda and nvidia-ml-py of a device that this process shares with others."""

    class NVMLError(Exception):
        pass

    def __init__(self, *, pid: int | None = None, lists: bool = True, tells: bool = True):
        """`pid`: by which the driver knows this process. `lists`: whether it tells processes; `tells`: whether CUDA tells what is free."""
        self.pid, self.lists, self.tells = os.getpid() if pid is None else pid, lists, tells
        self.context = self.reserved = self.peak = self.plain = 0
        self.others = 3000 * MIB

    def reserve(self, size: int) -> None:
        """By torch's allocator; a negative size gives back."""
        self.reserved += size
        self.peak = max(self.peak, self.reserved)

    # torch.cuda

    def mem_get_info(self) -> tuple[int, int]:
        self.context = CONTEXT
        if not self.tells:
            raise RuntimeError("not supported")
        return TOTAL - self.context - self.reserved - self.plain - self.others, TOTAL

    def memory_reserved(self) -> int:
        return self.reserved

    def max_memory_reserved(self) -> int:
        return self.peak

    # nvidia-ml-py

    def nvmlInit(self) -> None: ...

    def nvmlDeviceGetCount(self) -> int:
        return 2

    def nvmlDeviceGetHandleByIndex(self, index: int) -> int:
        return index

    def nvmlDeviceGetComputeRunningProcesses(self, handle: int) -> list[Any]:
        if not self.lists:
            raise self.NVMLError("not supported")
        own = self.context + self.reserved + self.plain
        listed = [(self.pid, own), (1, self.others)] if handle else [(2, 7 * MIB)]
        return [types.SimpleNamespace(pid=pid, usedGpuMemory=size) for pid, size in listed]


def watched(device: Device, monkeypatch: pytest.MonkeyPatch, *, container: bool = False) -> DeviceMemory:
    monkeypatch.setattr(device_memory, "knows_processes", lambda proc: not container)
    return DeviceMemory(types.SimpleNamespace(cuda=device), device)


def test_what_is_taken_beside_the_allocator_counts(monkeypatch):
    """AOTInductor, TensorRT and ONNX Runtime ask the device by themselves: a model served by them seemed to need nothing."""
    device = Device()
    memory = watched(device, monkeypatch)
    assert memory.peak_bytes() == 0, "the context is nobody's"
    assert not memory.whole_device
    device.reserve(300 * MIB)
    device.reserve(-100 * MIB)
    device.plain += 900 * MIB
    assert memory.peak_bytes() == 1200 * MIB, "the most that the allocator held"
    device.others += 5000 * MIB
    assert memory.peak_bytes() == 1200 * MIB, "other programs are not counted where the driver tells whose it is"


@pytest.mark.parametrize("given", [{"lists": False}, {"pid": 77}], ids=str)
def test_without_the_driver_s_account_it_is_the_growth_of_the_device(given, monkeypatch):
    device = Device(**given)
    device.reserve(10 * MIB)
    memory = watched(device, monkeypatch)
    device.reserve(200 * MIB)
    device.plain += 900 * MIB
    assert memory.peak_bytes() == 1110 * MIB
    device.others -= 2000 * MIB
    assert memory.peak_bytes() == 210 * MIB, "never less than the allocator's"


def test_in_a_container_another_process_may_have_this_one_s_number(monkeypatch):
    device = Device()
    memory = watched(device, monkeypatch, container=True)
    device.others += 5 * MIB
    assert memory.peak_bytes() == 5 * MIB, "the device's growth"
    assert memory.whole_device


def test_what_nobody_tells_is_not_known(monkeypatch):
    device = Device(lists=False, tells=False)
    memory = watched(device, monkeypatch)
    device.reserve(200 * MIB)
    assert memory.peak_bytes() is None


def test_a_driver_that_stops_telling_makes_it_unknown(monkeypatch):
    device = Device()
    memory = watched(device, monkeypatch)
    device.lists = False
    assert memory.peak_bytes() is None


def test_the_first_namespace_is_known_by_its_number(tmp_path: Path, monkeypatch):
    assert not knows_processes(tmp_path), "no such file"
    (tmp_path / "self" / "ns").mkdir(parents=True)
    (tmp_path / "self" / "ns" / "pid").touch()
    assert not knows_processes(tmp_path)
    monkeypatch.setattr(device_memory, "_FIRST_NAMESPACE", (tmp_path / "self" / "ns" / "pid").stat().st_ino)
    assert knows_processes(tmp_path)


def test_a_server_asks_from_the_moment_it_takes_its_device(monkeypatch):
    server, made = Server(), []
    cuda = types.SimpleNamespace(set_device=lambda device: made.append(device))
    monkeypatch.setattr("saturate.inference.worker.DeviceMemory",
                        lambda torch: made.append("memory") or types.SimpleNamespace(peak_bytes=lambda: 7))
    assert server.do_memory() is None, "on a CPU the supervisor knows"
    server.torch = types.SimpleNamespace(cuda=cuda)
    source = types.SimpleNamespace(device="cuda:1", inputs=lambda torch, device: made.append(f"inputs on {device}") or [])
    server._take_device(source, None)
    assert made == ["cuda:1", "memory", "inputs on cuda"] and server.do_memory() == 7


def test_weights_of_compiled_programs_lie_in_torch_s_allocator_on_a_gpu():
    assert aoti.weights_in_allocator("cpu") == {}
    found = aoti.weights_in_allocator("cuda")
    with torch._inductor.config.patch(found):
        from torch._inductor.cpp_builder import get_caching_allocator_macro

        assert get_caching_allocator_macro() == [" AOT_INDUCTOR_USE_CACHING_ALLOCATOR"]


def test_a_torch_without_that_option_is_not_asked_for_it(monkeypatch):
    monkeypatch.setattr(torch._inductor, "config", types.SimpleNamespace(aot_inductor=types.SimpleNamespace()))
    assert aoti.weights_in_allocator("cuda") == {}
