"""For the tests of saves: the technique applied in this process, and a disk that can be held up."""

from __future__ import annotations

import functools
import os
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from saturate.agent.context import Context
from saturate.checkpoints import persist
from saturate.checkpoints.own_calls import quiet
from saturate.techniques import async_checkpoint

LEAST_WAIT_S = 0.1


@contextmanager
def applied(mode: str = "thread") -> Iterator[Context]:
    """The technique, in this process."""
    context = Context(torch)
    context.owner = "async-checkpoint"
    async_checkpoint.apply(context, async_checkpoint.Options(mode))
    try:
        yield context
    finally:
        context.undo()


@contextmanager
def as_another() -> Iterator[None]:
    """In here, files are seen as another process sees them: nothing waits."""
    with quiet(), quiet():
        yield


class Disk:
    """Writes of the background thread begin only when `go` is called, or fail with `error`."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch):
        self._free = threading.Event()
        self._free.set()
        self.error: OSError | None = None
        self.written: list[int] = []
        original = persist.write

        def write(descriptor: int, buffers: Any) -> int:
            if threading.current_thread().name == "saturate-checkpoints":
                assert self._free.wait(60.0), "nobody let the disk go on"
                if self.error is not None:
                    error, self.error = self.error, None
                    raise error
            self.written.append(descriptor)
            return original(descriptor, buffers)

        monkeypatch.setattr(persist, "write", write)

    def hold(self) -> None:
        self._free.clear()

    def go(self) -> None:
        self._free.set()

    def waits(self, operation: Callable[[], Any]) -> Any:
        """Assert that `operation` does not end before the disk goes on; what it returned."""
        found: list[Any] = []

        def run() -> None:
            try:
                found.append(operation())
            except BaseException as error:  # noqa: BLE001 - handed to the test, which must see it
                found.append(error)

        thread = threading.Thread(target=run, daemon=True)
        thread.start()
        thread.join(LEAST_WAIT_S)
        assert thread.is_alive(), "it did not wait"
        self.go()
        thread.join(60.0)
        assert not thread.is_alive(), "it waits for ever"
        if isinstance(found[0], BaseException):
            raise found[0]
        return found[0]


def on_disk(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, str]]:
    """What reaches the disk from now on, in its order: ("sync", name), ("name", the new one), ("remove", name). Temporary files are "new".
    A kill does not show an order: what a process has written, the system keeps. A power failure may keep any of what was not synced.
    To be called before techniques are applied, which guard some of these functions."""
    done: list[tuple[str, str]] = []

    def noted(what: str, operation: Callable[..., Any], named: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(operation)
        def act(*given: Any, **more: Any) -> Any:
            name = Path(os.fsdecode(named(*given))).name
            found = operation(*given, **more)
            done.append((what, "new" if name.startswith(".saturate-") else name))
            return found

        return act

    monkeypatch.setattr(os, "fsync", noted("sync", os.fsync, lambda descriptor: os.readlink(f"/proc/self/fd/{descriptor}")))
    for name in ("rename", "replace"):
        monkeypatch.setattr(os, name, noted("name", getattr(os, name), lambda old, new: new))
    monkeypatch.setattr(os, "unlink", noted("remove", os.unlink, lambda path: path))
    return done


def state(seed: int = 0, size: int = 1 << 16) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(seed)
    return {"weight": torch.randn(size, generator=generator), "step": seed, "name": "déjà vu"}


def same(found: dict[str, Any], wanted: dict[str, Any]) -> bool:
    return list(found) == list(wanted) and found["step"] == wanted["step"] and torch.equal(found["weight"], wanted["weight"])
