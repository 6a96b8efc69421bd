"""Fingerprints what a worker process gets a copy of: two are equal unless something has changed in between.

A worker that lives from one epoch to the next keeps the dataset as it was when the worker began. A script that changes it in
between (a curriculum, an epoch number, labels that are corrected, augmentation that ends) would train on what it no longer has. A
glance goes through attributes, containers, closures, the globals that the code of items names (in modules of the user's too), and
values of the user's classes. It reads all of the numbers, text, containers, arrays, tensors and tables (of pandas and polars) in them:
one label of millions may be another one. It is bounded in time, and one that did not get to the end tells nothing. Taken for equal is
only what lies inside of other objects of C and Rust, and on a device.
"""

from __future__ import annotations

import array
import functools
import logging
import math
import os
import pickle
import sys
import time
import types
import zlib
from typing import Any

from saturate.data.contents import CONTAINERS, METHODS, PLAIN, is_standard, parts_of, slots

#: Share of the time that goes into glances, and how many seconds more.
LOOKED, LOOKED_S = 0.01, 0.03

#: A glance may wait, for data that come from a disk or for a core, as many times as long as it may compute.
PATIENCE = 4.0

#: Bytes of an array that are read at once, and how many are read in a second at most.
PIECE_BYTES, MOST_BYTES_S = 1 << 20, 1e10

#: Modules whose objects are told by what they pickle, in pieces: values, tables, and what we put into a dataset ourselves.
_BY_VALUE = {"datetime", "decimal", "fractions", "pathlib", "uuid", "pandas", "polars", "saturate"}


def glance(*things: Any, seconds: float = math.inf, trained: frozenset[int] = frozenset()) -> tuple[int, int] | None:
    """Something to compare with == to another glance at the same things; None where it cannot be told what they are like, or not in
    that time. It holds no reference to any of them. Tensors whose ids are in `trained`, and modules that hold one, are passed over."""
    look = _Look(seconds, trained)
    try:
        look.dump(things)
        return look.bytes, look.sum
    except Exception:  # noqa: BLE001 - an object that raises when it is looked at, or a list in itself; or there was no more time
        return None
    finally:
        look.met.clear()                    # it holds itself


class Watch:
    """Glances at the same things, again and again. One that the last has shown to take too long is not begun."""

    def __init__(self) -> None:
        self._asked = time.perf_counter()
        self._needs_s = 0.0
        self.took_s = 0.0                   # the last one, as time counts in a glance

    def at_pass(self, *things: Any) -> tuple[int, int] | None:
        """As a pass begins: it may take a share of the time since the one before, and in any case a little."""
        now = time.perf_counter()
        allowed_s, self._asked = LOOKED * (now - self._asked) + LOOKED_S, now
        seen = self.within(allowed_s, *things)
        if not self.took_s:
            self._needs_s /= 2              # the machine may have been slow then
        return seen

    def within(self, allowed_s: float, *things: Any, trained: frozenset[int] = frozenset()) -> tuple[int, int] | None:
        self.took_s = 0.0
        if allowed_s < self._needs_s:
            return None
        began, cpu = time.perf_counter(), time.thread_time()
        seen = glance(*things, seconds=allowed_s, trained=trained)
        self.took_s = _spent_s(began, cpu)
        self._needs_s = time.thread_time() - cpu if seen is not None else 4 * allowed_s
        return seen


def _spent_s(began: float, cpu: float) -> float:
    """Since these times of the clock and of the thread: what was computed, or a share of what was waited, for a disk or for a core."""
    return max(time.thread_time() - cpu, (time.perf_counter() - began) / PATIENCE)


class _TooLong(Exception):
    """There is no more time for this glance."""


class _Look(pickle.Pickler):
    """A sum over what pickle would write of things, were all of them told by what they hold. What is built in it writes by itself, a
    million numbers in 10 ms; other objects, each once, as `reducer_override` says. Nothing is kept of it, and nothing is read from it."""

    def __init__(self, seconds: float, trained: frozenset[int] = frozenset()):
        super().__init__(self, 5)
        self.fast = True                    # no notes on each text and list: those take ten times as long
        self.bytes, self.sum = 0, 0
        self.met: dict[int, tuple[int, Any]] = {}       # by id, and held
        self._trained = trained
        self._seconds, self._began, self._cpu = seconds, time.perf_counter(), time.thread_time()

    def write(self, data: Any) -> None:
        size = memoryview(data).nbytes
        self.in_time(size)
        self.bytes += size
        self.sum = zlib.crc32(data, self.sum)

    def in_time(self, more: int = 0) -> None:
        if _spent_s(self._began, self._cpu) + more / MOST_BYTES_S > self._seconds:
            raise _TooLong

    def reducer_override(self, thing: Any) -> Any:
        if thing is _thing or _by_value(type(thing)):
            return NotImplemented
        self.in_time()
        if id(thing) in self.met:
            return _thing, (self.met[id(thing)][0],)
        if self._trained and self._is_trained(thing):
            return _thing, ("trained",)
        self.met[id(thing)] = len(self.met), thing
        seen, inside = self._look(thing)
        return _thing, (type(thing).__qualname__, seen), inside

    def _is_trained(self, thing: Any) -> bool:
        torch = sys.modules["torch"]
        if isinstance(thing, torch.nn.Module):
            return any(id(parameter) in self._trained for parameter in thing.parameters())
        return id(thing) in self._trained

    def _look(self, thing: Any) -> tuple[Any, Any]:
        """What one thing is, and what it consists of."""
        torch, numpy = sys.modules.get("torch"), sys.modules.get("numpy")
        if torch is not None and isinstance(thing, torch.Tensor):
            return self._tensor(thing)
        if numpy is not None and isinstance(thing, numpy.ndarray):
            return self._array(thing)
        if numpy is not None and isinstance(thing, numpy.generic):
            return (thing.dtype.num, str(thing.dtype) if thing.dtype.kind in "mMV" else None, thing.tobytes()), []
        if isinstance(thing, (array.array, memoryview)):
            return thing.tobytes(), []
        if isinstance(thing, (range, slice)) or (numpy is not None and isinstance(thing, numpy.dtype)):
            return repr(thing), []
        own = [getattr(thing, "__dict__", None), [getattr(thing, name, None) for name in slots(type(thing))], type(thing)]
        for kind in (*PLAIN, bytes, bytearray):
            if isinstance(thing, kind):     # of a class below: an IntEnum, say
                return kind.__repr__(thing), own
        for kind in CONTAINERS:
            if isinstance(thing, kind):
                return None, [list(kind.items(thing) if kind is dict else kind.__iter__(thing)), *own]
        if isinstance(thing, types.MappingProxyType):
            return None, list(thing.items())
        if isinstance(thing, types.MethodType):
            return id(thing.__func__), parts_of(thing)
        if isinstance(thing, types.FunctionType):
            return id(thing.__code__), [] if is_standard(thing.__module__) else parts_of(thing)
        if isinstance(own[0], dict) and not isinstance(thing, (type, types.ModuleType, logging.Logger, functools.partial)):
            methods = [method for name in METHODS if isinstance(method := getattr(type(thing), name, None), types.FunctionType)]
            return id(thing), [*own, *methods]
        return id(thing), parts_of(thing)

    def _tensor(self, tensor: Any) -> tuple[Any, Any]:
        torch = sys.modules["torch"]
        kind = str(tensor.dtype), tuple(tensor.shape), str(tensor.layout)
        if tensor.device.type != "cpu":
            return (id(tensor), tensor._version, *kind), []
        plain = tensor.detach().resolve_conj().resolve_neg()
        if tensor.layout is torch.sparse_coo:
            return kind, [plain._indices(), plain._values()]
        if plain.dtype.is_floating_point and plain.element_size() < 4:      # some of these numpy does not have
            plain = plain.view(torch.int16 if plain.element_size() == 2 else torch.uint8)
        self._read(plain.numpy())
        return kind, []

    def _array(self, array: Any) -> tuple[Any, Any]:
        kind = str(array.dtype), array.shape
        mapped = _mapped(array)
        if mapped is not None:              # only the file can change it
            seen = os.stat(mapped.filename)
            place = array.__array_interface__["data"][0] - mapped.__array_interface__["data"][0]
            return (*kind, place, array.strides, str(mapped.filename), mapped.offset, seen.st_size, seen.st_mtime_ns), []
        own = getattr(array, "__dict__", None)      # of a masked array, its mask
        if array.dtype.hasobject:
            return kind, [array.tolist(), own]
        self._read(array)
        return kind, [own]

    def _read(self, array: Any) -> None:
        """In the order of its places, wherever they lie in memory."""
        numpy = sys.modules["numpy"]
        array = array.reshape(1) if not array.ndim else array
        rows = max(1, len(array) * PIECE_BYTES // max(1, array.nbytes))
        for at in range(0, len(array), rows):
            self.write(numpy.ascontiguousarray(array[at:at + rows]).reshape(-1).view(numpy.uint8))


def _thing() -> None:
    """Stands in a pickle before what is told of a thing."""


@functools.lru_cache(4096)
def _by_value(kind: type) -> bool:
    if kind.__module__ == "pyarrow.lib":        # columns of pandas; a table of its own is never changed, and may be all of a disk
        return kind.__name__.endswith(("Array", "Buffer", "Type"))
    return any(str(base.__module__).partition(".")[0] in _BY_VALUE for base in kind.__mro__)


def _mapped(array: Any) -> Any:
    """The part of a file, open for reading only, that an array lies in; or None."""
    numpy, found = sys.modules["numpy"], None
    while isinstance(array, numpy.ndarray):
        if isinstance(array, numpy.memmap) and array.mode == "r" and array.filename is not None:
            found = array
        array = array.base
    return found
