"""Fingerprints what a worker process gets a copy of: two are equal unless something has changed in between. Also finds open files and
random generators in it.

A worker that lives from one epoch to the next keeps the dataset as it was when the worker began. A script that changes it in
between (a curriculum, an epoch number, labels that are corrected, augmentation that ends) would train on what it no longer has. A
glance goes through attributes, containers, closures, the globals that the code of items names (in modules of the user's too), and
values of the user's classes. It reads all of the numbers, text, containers, arrays, tensors and tables (of pandas and polars) in them:
one label of millions may be another one. It is bounded in time, and one that did not get to the end tells nothing. Taken for equal is
only what lies inside of other objects of C and Rust, and on a device.
"""

from __future__ import annotations

import array
import collections
import functools
import io
import itertools
import logging
import math
import os
import pickle
import random
import socket
import sys
import time
import types
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

from saturate.data.cache_key import is_users, named_in, of_a_value
from saturate.data.code_names import global_names, unseeded

#: Share of the time that goes into glances, and how many seconds more.
LOOKED, LOOKED_S = 0.01, 0.03

#: A glance may wait for data that come from a disk as many times as long as it may compute.
PATIENCE = 4.0

#: Bytes of an array that are read at once, and how many are read in a second at most.
PIECE_BYTES, MOST_BYTES_S = 1 << 20, 1e10

#: Things among which open files and generators are looked for, at most: some 20 ms.
MOST = 20_000

#: Items of a container that are looked at for these; of a longer one, as many that are spread over it.
EACH = 256

#: Methods of an object by which items are made.
_METHODS = ("__getitem__", "__getitems__", "__call__", "forward")

#: Other things that a fork may not share.
_CONNECTIONS = {("sqlite3", "Connection"), ("sqlite3", "Cursor"), ("lmdb", "Environment"), ("lmdb", "Transaction"), ("netCDF4", "Dataset"),
                ("tables", "File"), ("psycopg2", "connection"), ("psycopg2", "cursor"), ("psycopg", "Connection"), ("duckdb", "DuckDBPyConnection"),
                # Files that a library of C holds by itself, with one place in each, or threads that do not live in a fork.
                ("pysam", "FastaFile"), ("pysam", "AlignmentFile"), ("pysam", "VariantFile"), ("pysam", "TabixFile"), ("cv2", "VideoCapture"),
                ("decord", "VideoReader"), ("av", "InputContainer"), ("rasterio", "DatasetReader"), ("osgeo", "Dataset"),
                ("openslide", "OpenSlide")}

_PLAIN = (type(None), bool, int, float, complex, str)

#: Containers whose subclasses are read as they are.
_CONTAINERS = (list, tuple, collections.deque, set, frozenset, dict)

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
        self.took_s = 0.0                   # the last one

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
        self.took_s = time.perf_counter() - began
        self._needs_s = time.thread_time() - cpu if seen is not None else 4 * allowed_s
        return seen


def open_file(*things: Any) -> str:
    """The class of an open file or connection in these things, or "". Forked workers would share its place with each other: one moves
    it while another reads."""
    return next((type(thing).__name__ for thing in _walk(things) if _is_open_file(thing) or _is_open_connection(thing)), "")


def open_connection(*things: Any) -> str:
    """The class of an open connection, or "": of a socket, or what a library says that a fork must not use."""
    return next((type(thing).__name__ for thing in _walk(things) if _is_open_connection(thing)), "")


def own_generator(*things: Any) -> str:
    """The class of a random generator in these things, in their classes or in what their code names, or "". What is drawn from it goes
    on from item to item: two processes that each have a copy draw the same numbers, and an item that is not made draws none."""
    return next((type(thing).__name__ for thing in _walk(things, _inside_and_classes) if is_generator(thing)), "")


def unseeded_source(*things: Any) -> str:
    """What the code by which items are made draws from that nothing seeds (`numpy.random.default_rng()`), or "". No state shows that
    it was drawn from, and where it seldom has an effect, a few items do not show it either."""
    return next((name for thing in _walk(things) if isinstance(thing, types.FunctionType) and not _is_standard(thing.__module__)
                 for code in _codes(thing) if (name := unseeded(code))), "")


def is_generator(thing: Any) -> bool:
    """Whether it is a random generator, but for those that everything draws from."""
    torch, numpy = sys.modules.get("torch"), sys.modules.get("numpy")
    if torch is not None and isinstance(thing, torch.Generator):
        return thing is not torch.default_generator and thing not in torch.cuda.default_generators
    if isinstance(thing, random.Random):
        return thing is not random._inst
    if numpy is None or not hasattr(numpy, "random"):
        return False
    kinds = numpy.random.Generator, numpy.random.RandomState, numpy.random.BitGenerator
    return isinstance(thing, kinds) and thing is not numpy.random.mtrand._rand


def _is_open_file(thing: Any) -> bool:
    return isinstance(thing, io.IOBase) and not isinstance(thing, (io.BytesIO, io.StringIO)) and not thing.closed and thing.readable()


def _is_open_connection(thing: Any) -> bool:
    if isinstance(thing, socket.socket):
        return thing.fileno() >= 0
    kind = type(thing)
    if kind.__module__.partition(".")[0] == "h5py" and kind.__name__ in ("File", "Group", "Dataset"):
        return bool(thing)
    if (kind.__module__.partition(".")[0], kind.__name__) in _CONNECTIONS:
        return True
    # Some classes of C call another module theirs, as lmdb's do `builtins`.
    return any(kind.__name__ == name and getattr(sys.modules.get(module), name, None) is kind for module, name in _CONNECTIONS)


def _walk(things: Iterable[Any], inside: Callable[[Any], list[Any]] | None = None) -> Iterator[Any]:
    """Each thing that is not plain; what lies near the surface comes first."""
    pending, met = collections.deque(things), {}        # by id, and held: another object could get the number of one that has gone
    for _ in range(MOST):
        if not pending:
            return
        thing = pending.popleft()
        if not isinstance(thing, _PLAIN) and id(thing) not in met:
            met[id(thing)] = thing
            yield thing
            pending.extend((inside or _inside)(thing))


def _inside(thing: Any) -> list[Any]:
    """What one thing consists of; of a long container, some."""
    torch, numpy = sys.modules.get("torch"), sys.modules.get("numpy")
    if isinstance(thing, (bytes, bytearray, set, frozenset)):
        return []
    if (torch is not None and isinstance(thing, torch.Tensor)) or (numpy is not None and isinstance(thing, numpy.ndarray)):
        return []
    if isinstance(thing, (list, tuple, collections.deque)):
        return _spread(thing)
    if isinstance(thing, Mapping) and type(thing).__module__ in ("builtins", "collections"):
        return [part for item in itertools.islice(thing.items(), EACH) for part in item]
    if isinstance(thing, functools.partial):
        return [thing.func, thing.args, thing.keywords]
    if isinstance(thing, types.MethodType):
        return [thing.__self__, thing.__func__]
    if isinstance(thing, types.FunctionType):
        return list(reached(thing))
    if isinstance(thing, type):
        return _of_class(thing)
    if isinstance(thing, (types.BuiltinFunctionType, types.MethodWrapperType)):
        owner = getattr(thing, "__self__", None)
        return [owner] if of_a_value(thing) or is_generator(owner) else []
    if isinstance(thing, (types.ModuleType, logging.Logger)):      # a logger leads to all others
        return []
    own = getattr(thing, "__dict__", None)
    if not isinstance(own, dict):
        return [*(getattr(thing, name, None) for name in _slots(type(thing))), type(thing)]
    methods = [method for name in _METHODS if isinstance(method := getattr(type(thing), name, None), types.FunctionType)]
    return [dict(own), *methods, type(thing)]


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
        spent_s = max(time.thread_time() - self._cpu, (time.perf_counter() - self._began) / PATIENCE)
        if spent_s + more / MOST_BYTES_S > self._seconds:
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
        own = [getattr(thing, "__dict__", None), [getattr(thing, name, None) for name in _slots(type(thing))], type(thing)]
        for kind in (*_PLAIN, bytes, bytearray):
            if isinstance(thing, kind):     # of a class below: an IntEnum, say
                return kind.__repr__(thing), own
        for kind in _CONTAINERS:
            if isinstance(thing, kind):
                return None, [list(kind.items(thing) if kind is dict else kind.__iter__(thing)), *own]
        if isinstance(thing, types.MappingProxyType):
            return None, list(thing.items())
        if isinstance(thing, types.MethodType):
            return id(thing.__func__), _inside(thing)
        if isinstance(thing, types.FunctionType):
            return id(thing.__code__), [] if _is_standard(thing.__module__) else _inside(thing)
        if isinstance(own[0], dict) and not isinstance(thing, (type, types.ModuleType, logging.Logger, functools.partial)):
            methods = [method for name in _METHODS if isinstance(method := getattr(type(thing), name, None), types.FunctionType)]
            return id(thing), [*own, *methods]
        return id(thing), _inside(thing)

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


def _of_class(kind: type) -> list[Any]:
    """What a class of the user's gives all its objects: values, and the methods by which items are made."""
    if not is_users(kind.__module__):
        return []
    values = {name: value for name, value in vars(kind).items()
              if not name.startswith("__") and (isinstance(value, (*_PLAIN, *_CONTAINERS)) or hasattr(type(value), "dtype"))}
    return [values, *_methods_of(kind), *kind.__bases__]


def _methods_of(kind: type) -> list[types.FunctionType]:
    """Those by which items are made, and those that their code names."""
    pending, found = list(_METHODS), {}
    while pending:
        name = pending.pop()
        method = getattr(kind, name, None)
        method = getattr(method, "fget", None) or getattr(method, "__func__", method)
        if name not in found and isinstance(method, types.FunctionType) and is_users(method.__module__):
            found[name] = method
            pending.extend(named for code in _codes(method) for named in code.co_names)
    return list(found.values())


def _inside_and_classes(thing: Any) -> list[Any]:
    """`_inside`, also what the classes of an object hold, and all their methods; nothing of the standard library."""
    if isinstance(thing, types.FunctionType) and _is_standard(thing.__module__):
        return []
    inside = _inside(thing)
    if isinstance(getattr(thing, "__dict__", None), dict) and not isinstance(thing, (types.FunctionType, types.ModuleType)):
        inside = [*inside, *(value for kind in type(thing).__mro__ if not _is_standard(kind.__module__) for value in vars(kind).values())]
    return inside


def _is_standard(module: str | None) -> bool:
    return (module or "").partition(".")[0] in sys.stdlib_module_names


def _spread(items: Any) -> list[Any]:
    step = max(1, len(items) // EACH)
    return [items[at] for at in range(0, len(items), step)]


def reached(function: types.FunctionType) -> Iterator[Any]:
    """What the code of a function reads besides its arguments: its closure, its defaults, and the globals that it names."""
    yield from _cells(function)
    yield from _globals(function)


def _cells(function: types.FunctionType) -> Iterator[Any]:
    for cell in function.__closure__ or ():
        try:
            yield cell.cell_contents
        except ValueError:                  # not filled yet
            continue
    yield from function.__defaults__ or ()


def _globals(function: types.FunctionType) -> Iterator[Any]:
    """The values of the names that its code, and the code inside of it, reads from its module. Code of libraries is not followed."""
    if "site-packages" in function.__code__.co_filename:
        return
    for code in _codes(function):
        for name in global_names(code):
            value = function.__globals__.get(name)
            if name in function.__globals__:
                yield value
            if isinstance(value, types.ModuleType) and is_users(value.__name__):
                yield from named_in(value, code.co_names)


def _codes(function: types.FunctionType) -> Iterator[types.CodeType]:
    """Its code, and the code inside of it."""
    codes = [function.__code__]
    while codes:
        code = codes.pop()
        codes.extend(constant for constant in code.co_consts if isinstance(constant, types.CodeType))
        yield code


def _slots(kind: type) -> list[str]:
    found = []
    for base in kind.__mro__:
        names = base.__dict__.get("__slots__", ())
        found.extend([names] if isinstance(names, str) else names)
    return [name for name in found if not name.startswith("__")]
