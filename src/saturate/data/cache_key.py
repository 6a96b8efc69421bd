"""Which version of a dataset is it? A digest of everything that its items are made from, as far as that can be told.

    code        the bytecode of its class, and of the user's functions, classes and constants that this code names, and the
                environment variables that it reads; libraries, and modules that are imported when an item is made, by the file
                that they come from, its size and time
    attributes  values, arrays by their bytes; functions with what they close over
    files       every attribute that names a file, by size and time; a folder with everything below it, and below folders that
                links in it lead to

What cannot be told (open files, locks, a model that trains, gigabytes of arrays, variables whose names are computed) is
`Unknowable`: no key, no cache.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import os
import stat
import sys
import types
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from saturate.data import module_files
from saturate.data.code_names import ENVIRONMENT, environment_names, global_names

#: Most bytes of arrays in memory that are hashed, and most files below folders that are looked at.
MOST_BYTES = 2 << 30
MOST_FILES = 1_000_000
#: Most files whose stamps are kept.
MOST_MET = 100_000
_DEEPEST = 60

#: Distributions whose versions matter whether the code names them or not: what decodes and transforms.
_LIBRARIES = ("torch", "torchvision", "torchaudio", "numpy", "pillow", "pillow-simd", "opencv-python", "opencv-python-headless",
              "scipy", "scikit-image", "albumentations", "kornia", "transformers", "tokenizers", "datasets", "pandas", "pyarrow",
              "h5py", "librosa", "soundfile")

_STDLIB = os.path.dirname(os.path.realpath(os.__file__)) + os.sep


class Unknowable(Exception):
    """The message says what about the dataset has no fingerprint."""


#: Where no data lies that a user would change.
_SYSTEM = ("/proc/", "/sys/", "/dev/", "/etc/", "/usr/", "/lib/", "/lib64/", sys.prefix + os.sep, sys.base_prefix + os.sep)


def digest(dataset: Any, *more: Any, files: dict[str, tuple[int, int]] | None = None) -> bytes:
    """32 bytes. `files` is filled with the regular files that are met, by absolute path, and their `stamp`s: with the first `MOST_MET`
    and one more where there are more. Raises Unknowable."""
    walk = _Walk(files)
    torch = sys.modules.get("torch")
    walk.value((sys.version_info[:3], _versions(), torch and str(torch.get_default_dtype()), more), 0)
    walk.value(dataset, 0)
    return walk.hash.digest()


def beside(opened: Sequence[str], named: Mapping[str, Any]) -> dict[str, tuple[int, int]]:
    """Files like those that were opened to make items and that the dataset does not name, by absolute path, with their `stamp`s: masks,
    say, whose paths are made from those of the pictures. They lie in the folders of those, and in the ones beside them where there are
    several in one, as of classes. Raises Unknowable."""
    hidden: dict[str, set[str]] = {}
    for path in opened:
        if path not in named and not path.startswith(_SYSTEM) and "/site-packages/" not in path and not path.endswith((".py", ".pyc")):
            hidden.setdefault(os.path.splitext(path)[1], set()).add(os.path.dirname(path))
    found: dict[str, tuple[int, int]] = {}
    for ending, folders in hidden.items():
        above = {os.path.dirname(folder) for folder in folders}
        if len(folders) > 1 == len(above):
            folders = {entry.path for entry in _entries(*above) if entry.is_dir()}
        for entry in _entries(*folders):
            if os.path.splitext(entry.name)[1] == ending and entry.is_file():
                found[entry.path] = stamp(entry.stat())
        if len(found) > MOST_FILES:
            raise Unknowable(f"there are more than {MOST_FILES} files like those that its items are made from, too many to watch")
    return found


def _entries(*folders: str) -> Iterator[os.DirEntry[str]]:
    for folder in folders:
        with contextlib.suppress(OSError), os.scandir(folder) as entries:       # it has gone, or went meanwhile
            yield from entries


def stamp(seen: os.stat_result) -> tuple[int, int]:
    """What would change when the content of a file did: its size in bytes and its time in ns."""
    return seen.st_size, seen.st_mtime_ns


@functools.cache
def _versions() -> dict[str, str]:
    """Of what is installed, not of what happens to be imported so far: that changes while a script runs."""
    from importlib import metadata

    found = {}
    for name in _LIBRARIES:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return found


class _Walk:
    def __init__(self, met: dict[str, tuple[int, int]] | None) -> None:
        self.hash = hashlib.blake2b(digest_size=32)
        self.met = met
        self.seen: dict[int, int] = {}
        self.kept: list[Any] = []           # ids stay taken while the walk lasts
        self.bytes = 0
        self.files = 0
        self.folders: set[str] = set()
        self.where = "dataset"

    def add(self, kind: str, *data: Any) -> None:
        self.hash.update(repr((kind, *data)).encode("utf-8", "backslashreplace"))

    def value(self, value: Any, depth: int) -> None:
        kind = type(value)
        if kind in (type(None), bool, int, float, complex):
            self.add("value", value)
        elif kind is str:
            self.add("text", value)
            self.path(value)
        elif kind in (bytes, bytearray):
            self.add("bytes", len(value))
            self.hash.update(value)
        elif depth > _DEEPEST:
            raise Unknowable(f"{self.where} is nested too deeply")
        elif id(value) in self.seen:
            self.add("again", self.seen[id(value)])
        else:
            self.seen[id(value)] = len(self.seen)
            self.kept.append(value)
            self.compound(value, kind, depth + 1)

    def compound(self, value: Any, kind: type, depth: int) -> None:
        if kind in (tuple, list):
            self.add(kind.__name__, len(value))
            for item in value:
                self.value(item, depth)
        elif kind in (dict, types.MappingProxyType):
            self.add("dict", len(value))
            for key, item in value.items():
                self.value(key, depth)
                self.value(item, depth)
        elif kind in (set, frozenset):
            if not all(type(item) in (str, int, float, bytes, bool, type(None), tuple) for item in value):
                raise Unknowable(f"{self.where} holds a set of objects, which have no order")
            self.add("set", sorted(map(repr, value)))
        elif isinstance(value, os.PathLike):
            self.value(os.fsdecode(value), depth)
        elif isinstance(value, types.ModuleType):
            self.module(value)
        elif isinstance(value, type):
            self.of_class(value, depth)
        elif isinstance(value, types.FunctionType):
            self.function(value, depth)
        elif isinstance(value, types.MethodType):
            self.value(value.__func__, depth)
            self.value(value.__self__, depth)
        elif isinstance(value, (types.BuiltinFunctionType, types.MethodWrapperType, types.MethodDescriptorType,
                                types.WrapperDescriptorType, types.GetSetDescriptorType, types.MemberDescriptorType)):
            self.add("builtin", getattr(value, "__module__", None), value.__qualname__)
            self.source_of(getattr(value, "__module__", None) or "")        # of a compiled module, which may be the user's
            if of_a_value(value):
                self.value(value.__self__, depth)
        elif isinstance(value, functools.partial):
            self.value((value.func, value.args, value.keywords), depth)
        elif isinstance(value, (property, classmethod, staticmethod, functools.cached_property)):
            self.value([getattr(value, name, None) for name in ("fget", "__func__", "func")], depth)
        elif not self.array(value, kind, depth):
            self.instance(value, kind, depth)

    # -- data ------------------------------------------------------------------------------------------------------

    def array(self, value: Any, kind: type, depth: int) -> bool:
        torch, numpy = sys.modules.get("torch"), sys.modules.get("numpy")
        if torch is not None and isinstance(value, torch.Tensor):
            self.tensor(value)
            return True
        if torch is not None and isinstance(value, (torch.dtype, torch.device, torch.Size)):
            self.add("torch", repr(value))
            return True
        if torch is not None and isinstance(value, torch.nn.Module) and any(p.requires_grad for p in value.parameters()):
            raise Unknowable(f"{self.where} holds a module that may be trained ({kind.__name__})")
        if numpy is None or not isinstance(value, (numpy.ndarray, numpy.generic, numpy.dtype)):
            return False
        if isinstance(value, numpy.memmap) and value.filename is not None:
            self.add("mapped", str(value.dtype), value.shape, value.offset)
            self.path(str(value.filename))
        elif isinstance(value, numpy.dtype) or value.dtype.hasobject:
            self.add("array", repr(value) if isinstance(value, numpy.dtype) else value.shape)
            if not isinstance(value, numpy.dtype):
                self.value(value.tolist(), depth)
        else:
            self.add("array", value.dtype.str, value.shape)
            self.room_for(value.nbytes)
            self.hash.update(numpy.ascontiguousarray(value).data)
        return True

    def tensor(self, value: Any) -> None:
        if value.device.type != "cpu":
            raise Unknowable(f"{self.where} holds a tensor on {value.device}")
        self.add("tensor", str(value.dtype), tuple(value.shape), str(value.layout))
        self.room_for(value.numel() * value.element_size())
        if str(value.layout) != "torch.strided":
            raise Unknowable(f"{self.where} holds a tensor of layout {value.layout}")
        import ctypes

        whole = value.detach().resolve_conj().resolve_neg().contiguous()
        size = whole.numel() * whole.element_size()
        if size:
            self.hash.update((ctypes.c_char * size).from_address(whole.data_ptr()))

    def room_for(self, size: int) -> None:
        self.bytes += size
        if self.bytes > MOST_BYTES:
            raise Unknowable(f"it holds more than {MOST_BYTES >> 30} GiB in memory, too much to hash")

    def path(self, text: str) -> None:
        """If `text` names a file or folder that exists: what would change when its content did."""
        if not text.strip(os.sep) or len(text) > 4095 or "\0" in text or "\n" in text:
            return                          # a separator alone splits text: it does not mean every file of the machine
        try:
            seen = os.stat(text)
        except (OSError, ValueError):
            return                          # most text names no file
        self.add("file", seen.st_size if stat.S_ISREG(seen.st_mode) else 0, seen.st_mtime_ns)
        if stat.S_ISREG(seen.st_mode):
            self.meet(os.path.abspath(text), seen)
        if stat.S_ISDIR(seen.st_mode):
            self.folder(os.path.realpath(text))

    def folder(self, path: str) -> None:
        if any(path == done or path.startswith(done + os.sep) for done in self.folders):
            return
        self.folders.add(path)
        pending = [path]
        while pending:
            current = pending.pop()
            try:
                entries = sorted(os.scandir(current), key=lambda entry: entry.name)
            except PermissionError:
                self.add("unreadable", current)     # not for the dataset to read either
                continue
            for entry in entries:
                self.files += 1
                if self.files > MOST_FILES:
                    raise Unknowable(f"there are more than {MOST_FILES} files below {path}, too many to watch")
                if entry.is_dir(follow_symlinks=False):
                    pending.append(entry.path)
                    continue
                try:
                    seen = entry.stat()
                except OSError:
                    self.add("dangling", entry.name)
                    continue
                if stat.S_ISDIR(seen.st_mode):          # a link to a folder: what lies there is read as well
                    real = os.path.realpath(entry.path)
                    self.add("link", entry.path[len(path):], real)
                    self.folder(real)
                    continue
                self.add("entry", entry.path[len(path):], seen.st_size, seen.st_mtime_ns)
                self.meet(entry.path, seen)

    def meet(self, path: str, seen: os.stat_result) -> None:
        if self.met is not None and len(self.met) <= MOST_MET:
            self.met[path] = stamp(seen)

    # -- objects and code --------------------------------------------------------------------------------------------

    def instance(self, value: Any, kind: type, depth: int) -> None:
        self.value(kind, depth)
        if kind.__module__.partition(".")[0] == "datasets" and isinstance(getattr(value, "_fingerprint", None), str):
            # Hugging Face's datasets keep a fingerprint of their own, of files and transformations.
            told = ("_fingerprint", "_format_type", "_format_columns", "_format_kwargs")
            self.value({name: vars(value).get(name) for name in told}, depth)
            return
        if callable(getattr(value, "__wrapped__", None)) and not is_users(kind.__module__):     # functools.lru_cache, for one
            self.value(value.__wrapped__, depth)
            return
        own = kind.__reduce_ex__ is object.__reduce_ex__ and kind.__reduce__ is object.__reduce__
        plain = own and getattr(kind, "__getstate__", None) is getattr(object, "__getstate__", None)
        if plain and hasattr(value, "__dict__") and not _built_in_base(kind):
            slots = {name: getattr(value, name) for cls in kind.__mro__ for name in _slots(cls) if hasattr(value, name)}
            self.attributes({**vars(value), **slots}, depth)
            return
        try:
            reduced = value.__reduce_ex__(4)
        except Exception as error:      # any object's own __reduce__ may raise anything: then it cannot be told
            raise Unknowable(f"{self.where} holds a {kind.__name__}, which has no state to compare ({error})") from error
        if isinstance(reduced, str):
            self.add("global", kind.__module__, reduced)
            return
        self.value(reduced[:3], depth)
        for items in reduced[3:5]:
            self.value(list(items) if items is not None else None, depth)

    def attributes(self, found: dict[str, Any], depth: int) -> None:
        before = self.where
        self.add("attributes", len(found))
        for name, item in found.items():
            self.where = f"its attribute {name}" if depth <= 2 else before
            self.add("name", name)
            self.value(item, depth)
        self.where = before

    def module(self, module: types.ModuleType) -> None:
        self.add("module", module.__name__)
        self.source_of(module.__name__)

    def source_of(self, name: str) -> None:
        """A library by the file of the module that something comes from."""
        file = getattr(sys.modules.get(name), "__file__", None)
        try:
            seen = os.stat(file) if file else None
        except OSError:
            seen = None                     # in a zip file, or gone: its name must do
        self.add("source", name, seen and (seen.st_size, seen.st_mtime_ns))

    def of_class(self, cls: type, depth: int) -> None:
        self.add("class", cls.__module__, cls.__qualname__)
        if not is_users(cls.__module__):
            if cls.__module__ != "builtins":
                self.source_of(cls.__module__)
            return
        for base in cls.__bases__:
            self.value(base, depth)
        for name, member in vars(cls).items():
            # Python keeps notes of its own on classes, under such names: `__slotnames__` once an instance was copied.
            notes = name == "_abc_impl" or (name.startswith("__") and name.endswith("__"))
            if not notes or isinstance(member, types.FunctionType):
                self.add("member", name)
                self.value(member, depth)

    def function(self, function: Any, depth: int) -> None:
        self.add("function", function.__module__, function.__qualname__)
        if not is_users(function.__module__):
            self.source_of(function.__module__ or "")
        else:
            self.code(function.__code__, function.__globals__, depth)
        self.value((function.__defaults__, function.__kwdefaults__), depth)
        for cell in function.__closure__ or ():
            try:
                self.value(cell.cell_contents, depth)
            except ValueError:
                self.add("empty cell")

    def code(self, code: types.CodeType, namespace: dict[str, Any], depth: int) -> None:
        """Bytecode, constants, and what the names in it mean where it would run."""
        self.add("code", code.co_code, code.co_varnames, code.co_names, code.co_flags)
        for constant in code.co_consts:
            if isinstance(constant, types.CodeType):
                self.code(constant, namespace, depth)
            else:
                self.value(constant, depth)
        variables = environment_names(code, namespace)
        if None in variables:
            raise Unknowable(f"{code.co_qualname} reads environment variables whose names it does not write out")
        for name in sorted(set(variables)):
            self.add("environment", name)
            self.value(os.environ.get(name), depth)
        self.imported(code, namespace, depth)
        for name in global_names(code):
            found = namespace.get(name)
            if any(found is one for one in ENVIRONMENT.values()):
                continue                # seen above: most of the environment has nothing to do with items
            if isinstance(found, types.ModuleType) and is_users(found.__name__):
                for meant in named_in(found, code.co_names):
                    self.value(meant, depth)
            elif name in namespace:
                self.value(found, depth)

    def imported(self, code: types.CodeType, namespace: dict[str, Any], depth: int) -> None:
        """What the code imports when it runs: as if its names were globals where it is there already, otherwise by its files."""
        names = module_files.named(code, namespace.get("__package__") or "")
        for name in names:
            module = sys.modules.get(name)
            if module is not None and is_users(name):
                for meant in named_in(module, code.co_names):
                    self.value(meant, depth)
            elif module is not None:
                self.source_of(name)
        for name, seen in module_files.behind([name for name in names if name not in sys.modules], _is_installed):
            self.add("source", name, seen)


def of_a_value(function: Any) -> bool:
    """Whether it is a method of something that is told by what it holds: `names.get` of a dictionary."""
    owner = getattr(function, "__self__", None)
    return isinstance(owner, (dict, list, tuple, set, frozenset, str, bytes, bytearray)) or hasattr(owner, "dtype")


def named_in(module: types.ModuleType, names: Iterable[str]) -> Iterator[Any]:
    """`helpers.load`, `package.settings.SIZE`: whatever of a module of the user's code with these names could mean."""
    pending, met = [module], {id(module)}
    while pending:
        current = vars(pending.pop(0))
        for value in (current[name] for name in names if name in current):
            if not isinstance(value, types.ModuleType) or not is_users(value.__name__):
                yield value
            elif id(value) not in met:
                met.add(id(value))
                pending.append(value)


def is_users(module: str | None) -> bool:
    """Whether a module is the user's own code rather than an installed library's."""
    if module is None or module == "__main__":
        return True
    if module.partition(".")[0] in sys.stdlib_module_names or module.startswith("saturate."):
        return False
    file = getattr(sys.modules.get(module), "__file__", None)
    if file is None:
        return module in sys.modules        # made by hand; what is not there at all is built in
    return not _is_installed(file)


@functools.lru_cache(4096)
def _is_installed(file: str) -> bool:
    real = os.path.realpath(file)
    return "site-packages" in real or "dist-packages" in real or real.startswith(_STDLIB)


def _built_in_base(kind: type) -> bool:
    """Whether instances hold more than their attributes: a subclass of list or of a C type."""
    return any(base is not object and base.__flags__ & (1 << 9) == 0 for base in kind.__mro__)


def _slots(cls: type) -> list[str]:
    found = vars(cls).get("__slots__", ())
    return [found] if isinstance(found, str) else [name for name in found if not name.startswith("__")]
