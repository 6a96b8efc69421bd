"""Copies from a GPU into a snapshot, with a CUDA runtime made up: on which devices it is called, and until when the device writes."""

from __future__ import annotations

import contextlib
import threading
import types

import pytest

torch = pytest.importorskip("torch")

from saturate.checkpoints import staging  # noqa: E402 - after the check for torch

FIRST, SECOND = torch.device("cuda", 0), torch.device("cuda", 1)


class Runtime(threading.local):
    """torch.cuda with two devices. A thread begins on the first one; whichever is current where the runtime is called gets a context."""

    contexts: set = set()       # of all threads

    def __init__(self):
        self.current = FIRST

    def device(self, device):
        @contextlib.contextmanager
        def made_current():
            before, self.current = self.current, device
            yield
            self.current = before           # torch only does so where that one has a context

        return made_current()

    @contextlib.contextmanager
    def stream(self, stream):
        before = self.current
        self.set_device(stream.device)
        yield
        self.set_device(before)

    def set_device(self, device):
        if device != self.current:
            self.current = device
            self.contexts.add(device)

    def Stream(self, device):
        return Stream(self, device)

    current_stream = default_stream = Stream

    def Event(self):
        return Stream(self, SECOND)


class Stream:
    def __init__(self, runtime, device):
        self.runtime, self.device = runtime, device

    def wait_stream(self, stream):
        pass

    wait_event = record = wait_stream

    def record_event(self):
        return self

    def synchronize(self):
        self.runtime.contexts.add(self.runtime.current)


class Source(types.SimpleNamespace):
    device = SECOND

    def record_stream(self, stream):
        assert stream.device == SECOND


def staged_from(runtime, copied):
    place = types.SimpleNamespace(copy_=lambda source, non_blocking: copied.append(source))
    staged = staging.Staged(types.SimpleNamespace(pin=lambda device: None), [])
    staging._from_device(types.SimpleNamespace(cuda=runtime), staged, [(place, Source())])
    return staged


def test_no_device_gets_a_context_but_the_one_that_the_tensors_are_on():
    """A script may name cuda:1 and make no device its current one; and what waits for the copies is a thread, which has the first device."""
    runtime, copied = Runtime(), []
    Runtime.contexts = set()
    staged = staged_from(runtime, copied)
    assert len(copied) == 1 and runtime.contexts <= {SECOND}
    waiting = threading.Thread(target=staged.wait)
    waiting.start()
    waiting.join()
    assert runtime.contexts == {SECOND} and runtime.current == FIRST and staged.event is None


def test_a_snapshot_that_fails_is_left_once_the_device_writes_into_it_no_more(monkeypatch):
    """Its memory is given back to the system."""
    log = []
    tensor = types.SimpleNamespace(device=SECOND)
    arena = types.SimpleNamespace(tensor=bytearray(64), memory=bytearray(64))
    monkeypatch.setattr(staging, "_as_bytes", lambda torch, data: bytes(16))

    def queued(torch, staged, remote):
        staged.event = types.SimpleNamespace(synchronize=lambda: log.append("waited"))

    def no_threads(torch, pairs):
        log.append("failed")
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(staging, "_from_device", queued)
    monkeypatch.setattr(staging, "_from_host", no_threads)
    with pytest.raises(RuntimeError, match="new thread"):
        staging.stage(torch, [("data/0", tensor, 16)], arena, 64)
    assert log == ["failed", "waited"]


def test_copies_that_were_begun_are_waited_for_where_a_later_one_fails():
    def fails(source, non_blocking):
        raise KeyboardInterrupt

    runtime, copied = Runtime(), []
    staged = staging.Staged(types.SimpleNamespace(pin=lambda device: None), [])
    places = [types.SimpleNamespace(copy_=lambda source, non_blocking: copied.append(source)), types.SimpleNamespace(copy_=fails)]
    with pytest.raises(KeyboardInterrupt):
        staging._from_device(types.SimpleNamespace(cuda=runtime), staged, [(place, Source()) for place in places])
    assert copied and staged.event is not None
