"""Page-locking of a host buffer, with a CUDA runtime made up: a refusal is no error of the script's."""

from __future__ import annotations

import contextlib
import types

import pytest

torch = pytest.importorskip("torch")

from saturate.checkpoints.arena import Arena  # noqa: E402 - after the check for torch

DEVICE = torch.device("cuda", 1)


class Runtime:
    """Remembers the error of a call that failed, which the next launch of a kernel raises and clears, as CUDA and torch do."""

    def __init__(self, *statuses):
        self.statuses, self.last, self.launched = list(statuses), 0, []
        self.cuda = types.SimpleNamespace(cudart=lambda: self, device=self.made_current)
        self.current, self.asked = torch.device("cuda", 0), []      # on which devices the runtime was called: each gets a context
        self.frombuffer, self.uint8, self.inference_mode = torch.frombuffer, torch.uint8, torch.inference_mode

    @contextlib.contextmanager
    def made_current(self, device):
        before, self.current = self.current, device
        yield
        self.current = before

    def cudaHostRegister(self, pointer, size, flags):
        self.asked.append(self.current)
        self.last = self.statuses.pop(0)
        return self.last

    def cudaHostUnregister(self, pointer):
        self.asked.append(self.current)
        self.launched.append("unregistered")

    def ones(self, size, *, device):
        self.launched.append(device)
        error, self.last = self.last, 0
        if error:
            raise RuntimeError("CUDA error: out of memory")


def test_a_refusal_is_not_left_for_the_script_s_next_kernel():
    runtime = Runtime(2)
    arena = Arena(runtime, 1 << 12)
    arena.pin(DEVICE)
    assert runtime.last == 0 and runtime.launched == [DEVICE]       # on the device that is trained on: no context on another one
    arena.pin(DEVICE)                                               # and it is not asked for again
    arena.close()
    assert runtime.launched == [DEVICE] == runtime.asked and runtime.current.index == 0


def test_what_was_granted_is_given_back_and_launches_nothing():
    runtime = Runtime(0)
    arena = Arena(runtime, 1 << 12)
    arena.pin(DEVICE)
    arena.pin(DEVICE)
    assert runtime.launched == []
    arena.close()
    assert runtime.launched == ["unregistered"] and runtime.asked == [DEVICE, DEVICE] and runtime.current.index == 0
