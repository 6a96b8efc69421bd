"""Where the host waits for the device: every place that turns a tensor into a number or text, or copies one to the device, with the
user's line. What waits inside other operators (`nonzero`) a trace shows, without the line.

On a CPU nothing waits, but the same places keep a step from running elsewhere or being compiled; there a tensor that
becomes a number is counted where the user's code asks for it, and not where torch's own does (an optimizer reads its
step count, a sampler its permutation).
"""

from __future__ import annotations

import sys
import threading
from typing import Any

from saturate.agent.attributes import replace
from saturate.agent.places import Places

#: Methods of Tensor that wait, and what they are called in a report.
_NUMBERS = {"item": "Tensor.item", "tolist": "Tensor.tolist", "__bool__": "bool(Tensor)", "__float__": "float(Tensor)",
            "__int__": "int(Tensor)", "__index__": "int(Tensor)", "__repr__": "print", "__format__": "format(Tensor)"}
_COPIES = {"cpu": "Tensor.cpu", "numpy": "Tensor.numpy", "to": "Tensor.to"}
#: Methods of Tensor that copy to the device.
_UPLOADS = {"to": "Tensor.to", "cuda": "Tensor.cuda"}


class HostSyncs:
    """Patches while it is on. `device` is where training runs; `label(text)` is a context manager around each wait, its text "sync" or
    "upload", the place, and what waits there; `loading()` is true while a batch is fetched, whose numbers are the dataset's own affair.
    How long an upload waits is left to the trace: what the host does before the copy is no wait."""

    def __init__(self, torch: Any, device: str, clock: Any, label: Any, loading: Any):
        self.found: dict[tuple[str, int, str], list[int]] = {}     # (file, line, what) -> [calls, nanoseconds]
        self._torch = torch
        self._device = device
        self._clock = clock
        self._label = label
        self._loading = loading
        self._places = Places(torch)
        self._thread = threading.get_ident()
        self._inside = False
        self._undo: list[Any] = []

    def on(self) -> None:
        methods = {**_NUMBERS, **(_COPIES if self._device != "cpu" else {})}
        for name, what in methods.items():
            self._undo.append(replace(self._torch.Tensor, name, self._method(name, what)))
        for name, what in _UPLOADS.items() if self._device == "cuda" else ():
            self._undo.append(replace(self._torch.Tensor, name, self._upload(name, what)))
        if self._device == "cuda":
            for owner, name, what in ((self._torch.cuda, "synchronize", "torch.cuda.synchronize"),
                                      (self._torch.cuda.Event, "synchronize", "Event.synchronize"),
                                      (self._torch.cuda.Stream, "synchronize", "Stream.synchronize")):
                self._undo.append(replace(owner, name, self._call(getattr(owner, name), what)))

    def off(self) -> None:
        while self._undo:
            self._undo.pop()()

    def _method(self, name: str, what: str) -> Any:
        original = getattr(self._torch.Tensor, name)

        def method(this: Any, *args: Any, **kwargs: Any) -> Any:
            frame = sys._getframe(1)
            if self._inside or not self._waits(name, this, args, kwargs, frame):
                return original(this, *args, **kwargs)
            return self._timed(what, frame, original, this, *args, **kwargs)

        method.__name__ = name
        return method

    def _upload(self, name: str, what: str) -> Any:
        original = getattr(self._torch.Tensor, name)

        def method(this: Any, *args: Any, **kwargs: Any) -> Any:
            if self._inside or threading.get_ident() != self._thread or this.device.type != "cpu":
                return original(this, *args, **kwargs)
            if name == "to" and not _copies_to(self._torch, self._device, args, kwargs):
                return original(this, *args, **kwargs)
            file, line = self._where(sys._getframe(1))
            with self._label(f"upload {file}:{line} {what}"):
                return original(this, *args, **kwargs)

        method.__name__ = name
        return method

    def _where(self, frame: Any) -> tuple[str, int]:
        place = self._places.nearest(frame)
        return place[:2] if place is not None else ("", 0)

    def _call(self, original: Any, what: str) -> Any:
        def call(*args: Any, **kwargs: Any) -> Any:
            frame = sys._getframe(1)
            if self._inside or threading.get_ident() != self._thread or self._places.kind(frame.f_code.co_filename) == 0:
                return original(*args, **kwargs)
            return self._timed(what, frame, original, *args, **kwargs)

        return call

    def _waits(self, name: str, tensor: Any, args: tuple[Any, ...], kwargs: dict[str, Any], frame: Any) -> bool:
        if threading.get_ident() != self._thread or tensor.device.type != self._device:
            return False
        if self._device == "cpu":
            return not self._loading() and self._places.kind(frame.f_code.co_filename) > 0
        return name != "to" or _copies_to(self._torch, "cpu", args, kwargs)

    def _timed(self, what: str, frame: Any, original: Any, *args: Any, **kwargs: Any) -> Any:
        file, line = self._where(frame)
        self._inside = True
        try:
            with self._label(f"sync {file}:{line} {what}"):
                began = self._clock()
                try:
                    return original(*args, **kwargs)
                finally:
                    entry = self.found.setdefault((file, line, what), [0, 0])
                    entry[0] += 1
                    entry[1] += self._clock() - began
        finally:
            self._inside = False


def _copies_to(torch: Any, device: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether `Tensor.to` was asked for a copy on a device of this kind that it waits for."""
    flags = [value for value in args[1:] if isinstance(value, bool)]        # non_blocking, then copy
    if kwargs.get("non_blocking") or (flags and flags[0]):
        return False
    targets = [*args[:1], *(kwargs[name] for name in ("device", "other") if name in kwargs)]
    for target in targets:
        if isinstance(target, torch.Tensor):
            return target.device.type == device
        if isinstance(target, torch.device):
            return target.type == device
        if isinstance(target, str):
            return target.startswith(device)
        if isinstance(target, int):         # the number of an accelerator
            return device != "cpu"
    return False
