"""What things consist of: attributes, containers, closures, and the globals that the code of items names. Finds open files and random
generators in them, which two processes must not share.
"""

from __future__ import annotations

import collections
import functools
import io
import itertools
import logging
import random
import socket
import sys
import types
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

from saturate.data.cache_key import is_users, named_in, of_a_value
from saturate.data.code_names import global_names, unseeded

#: Things among which open files and generators are looked for, at most: some 20 ms.
MOST = 20_000

#: Items of a container that are looked at for these; of a longer one, as many that are spread over it.
EACH = 256

#: Methods of an object by which items are made.
METHODS = ("__getitem__", "__getitems__", "__call__", "forward")

#: Other things that a fork may not share.
_CONNECTIONS = {("sqlite3", "Connection"), ("sqlite3", "Cursor"), ("lmdb", "Environment"), ("lmdb", "Transaction"), ("netCDF4", "Dataset"),
                ("tables", "File"), ("psycopg2", "connection"), ("psycopg2", "cursor"), ("psycopg", "Connection"), ("duckdb", "DuckDBPyConnection"),
                # Files that a library of C holds by itself, with one place in each, or threads that do not live in a fork.
                ("pysam", "FastaFile"), ("pysam", "AlignmentFile"), ("pysam", "VariantFile"), ("pysam", "TabixFile"), ("cv2", "VideoCapture"),
                ("decord", "VideoReader"), ("av", "InputContainer"), ("rasterio", "DatasetReader"), ("osgeo", "Dataset"),
                ("openslide", "OpenSlide"), ("soundfile", "SoundFile"), ("pyedflib", "EdfReader"), ("pyBigWig", "bigWigFile"),
                ("torchcodec", "VideoDecoder"), ("torchcodec", "AudioDecoder"), ("torchaudio", "StreamReader"), ("torio", "StreamingMediaDecoder")}

PLAIN = (type(None), bool, int, float, complex, str)

#: Containers whose subclasses are read as they are.
CONTAINERS = (list, tuple, collections.deque, set, frozenset, dict)


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
    return next((type(thing).__name__ for thing in _walk(things, _parts_and_classes) if is_generator(thing)), "")


def unseeded_source(*things: Any) -> str:
    """What the code by which items are made draws from that nothing seeds (`numpy.random.default_rng()`), or "". No state shows that
    it was drawn from, and where it seldom has an effect, a few items do not show it either."""
    return next((name for thing in _walk(things) if isinstance(thing, types.FunctionType) and not is_standard(thing.__module__)
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


def _walk(things: Iterable[Any], parts: Callable[[Any], list[Any]] | None = None) -> Iterator[Any]:
    """Each thing that is not plain; what lies near the surface comes first."""
    pending, met = collections.deque(things), {}        # by id, and held: another object could get the number of one that has gone
    for _ in range(MOST):
        if not pending:
            return
        thing = pending.popleft()
        if not isinstance(thing, PLAIN) and id(thing) not in met:
            met[id(thing)] = thing
            yield thing
            pending.extend((parts or parts_of)(thing))


def parts_of(thing: Any) -> list[Any]:
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
        return [*(getattr(thing, name, None) for name in slots(type(thing))), type(thing)]
    methods = [method for name in METHODS if isinstance(method := getattr(type(thing), name, None), types.FunctionType)]
    return [dict(own), *methods, type(thing)]


def _of_class(kind: type) -> list[Any]:
    """What a class of the user's gives all its objects: values, and the methods by which items are made."""
    if not is_users(kind.__module__):
        return []
    values = {name: value for name, value in vars(kind).items()
              if not name.startswith("__") and (isinstance(value, (*PLAIN, *CONTAINERS)) or hasattr(type(value), "dtype"))}
    return [values, *_methods_of(kind), *kind.__bases__]


def _methods_of(kind: type) -> list[types.FunctionType]:
    """Those by which items are made, and those that their code names."""
    pending, found = list(METHODS), {}
    while pending:
        name = pending.pop()
        method = getattr(kind, name, None)
        method = getattr(method, "fget", None) or getattr(method, "__func__", method)
        if name not in found and isinstance(method, types.FunctionType) and is_users(method.__module__):
            found[name] = method
            pending.extend(named for code in _codes(method) for named in code.co_names)
    return list(found.values())


def _parts_and_classes(thing: Any) -> list[Any]:
    """`parts_of`, also what the classes of an object hold, and all their methods; nothing of the standard library."""
    if isinstance(thing, types.FunctionType) and is_standard(thing.__module__):
        return []
    parts = parts_of(thing)
    if isinstance(getattr(thing, "__dict__", None), dict) and not isinstance(thing, (types.FunctionType, types.ModuleType)):
        parts = [*parts, *(value for kind in type(thing).__mro__ if not is_standard(kind.__module__) for value in vars(kind).values())]
    return parts


def is_standard(module: str | None) -> bool:
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


def slots(kind: type) -> list[str]:
    found = []
    for base in kind.__mro__:
        names = base.__dict__.get("__slots__", ())
        found.extend([names] if isinstance(names, str) else names)
    return [name for name in found if not name.startswith("__")]
