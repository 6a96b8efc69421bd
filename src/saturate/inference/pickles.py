"""What goes from the user's process to the candidates' processes as pickles: the model, its inputs, what it answers.

Both ends are this user's processes, and the files lie in a folder that only this user can reach; nothing else is ever
unpickled here. An artifact is not: see `saturate.inference.artifact`.

Classes and functions that another process can import travel by name. Those of `__main__`, and of modules that a fresh
process would not find, travel by value, which takes cloudpickle (the extra `inference`). A script is never run again.
"""

from __future__ import annotations

import ctypes
import functools
import importlib
import itertools
import os
import pickle
import sys
import weakref
from pathlib import Path
from types import FunctionType, ModuleType, SimpleNamespace
from typing import Any

from saturate.checkpoints import durable
from saturate.errors import EnvironmentProblem, UsageError

EXTRA = "pip install 'saturate[inference]'"


#: Classes that went by value from this process, by module and name. Their instances come back as instances of them:
#: what another process made of such a class would be another class.
_SENT: weakref.WeakValueDictionary[tuple[str, str], type] = weakref.WeakValueDictionary()

#: Of the modules that are made for functions which came by value.
_NUMBERS = itertools.count(1)


class NotImportable(pickle.PicklingError):
    """A class or function that another process could only get by value, which takes cloudpickle."""


class NotRegistered(pickle.PicklingError):
    """An operator that another process would not know: what registers it is never run there."""


@functools.cache
def pickler() -> type[pickle.Pickler]:
    """The class that writes pickles: cloudpickle's where it is installed."""
    try:
        import cloudpickle
    except ImportError:
        return _ByName

    class ByValue(cloudpickle.Pickler):
        """cloudpickle, which also takes by value what lives in a module that a fresh process would not find."""

        def dump(self, thing: Any) -> None:
            self._registered: list[Any] = []
            self._known: dict[str, bool] = {}
            self._classes: dict[tuple[str, str], set[type]] = {}
            self._globals: dict[int, _Globals | _Imported] = {}
            try:
                super().dump(thing)
            finally:
                for module in self._registered:     # the user may use cloudpickle too
                    cloudpickle.unregister_pickle_by_value(module)
            for name, classes in self._classes.items():
                if len(classes) == 1:               # two local classes of one name cannot be told apart
                    _SENT[name] = classes.pop()
                else:
                    _SENT.pop(name, None)

        def reducer_override(self, thing: Any) -> Any:
            _check_operators(thing, self._known)
            for reduced in (_parametrized(thing), _quantized(thing), _imported(thing), _operator(thing)):
                if reduced is not None:
                    return reduced
            module = _foreign_module(thing, self._known)
            if module is not None and module.__name__ not in ("__main__",
                                                              *cloudpickle.list_registry_pickle_by_value()):
                cloudpickle.register_pickle_by_value(module)
                self._registered.append(module)
            reduced = super().reducer_override(thing)
            if isinstance(thing, type) and reduced is not NotImplemented:
                self._classes.setdefault((thing.__module__, thing.__qualname__), set()).add(thing)
            return self._at_home(thing, reduced) if isinstance(thing, FunctionType) and reduced is not NotImplemented else reduced

        def _at_home(self, function: Any, reduced: Any) -> Any:
            """What cloudpickle makes a function from, with globals that are those of a module where it is read: of its own one, where
            that can be imported there, as of a function in a function of a library."""
            make, arguments, *rest = reduced
            if len(arguments) < 2 or not isinstance(arguments[1], dict):
                return reduced                      # another version of cloudpickle makes functions otherwise
            code, names, *more = arguments          # functions of one module share `names`, which cloudpickle keeps alive
            if self._imported_again(function) and rest and isinstance(rest[0], tuple) and "__globals__" in rest[0][-1]:
                rest[0][-1]["__globals__"] = {}     # what is there already, and might not be picklable
                names = self._globals.setdefault(id(names), _Imported(function.__module__))
                return make, (code, names, *more), *rest
            return make, (code, self._globals.setdefault(id(names), _Globals(names)), *more), *rest

        def _imported_again(self, function: Any) -> bool:
            """Whether its globals are those of a module that another process imports, rather than gets by value."""
            module = sys.modules.get(function.__module__ or "")
            return (module is not None and function.__globals__ is vars(module) and _foreign_module(function, self._known) is None
                    and module.__name__.partition(".")[0] not in cloudpickle.list_registry_pickle_by_value())

    return ByValue


class _Globals:
    """Becomes the namespace of a new module where it is read, with these names in it."""

    def __init__(self, names: dict[str, Any]):
        self.names = names

    def __reduce__(self) -> Any:
        return _namespace, (self.names,)


class _Imported:
    """Becomes the namespace of the module of this name where it is read."""

    def __init__(self, name: str):
        self.name = name

    def __reduce__(self) -> Any:
        return _namespace_of, (self.name,)


def _namespace_of(name: str) -> dict[str, Any]:
    return vars(importlib.import_module(name))


def _namespace(names: dict[str, Any]) -> dict[str, Any]:
    """The globals of a new module. It has a name of its own: the reader's `__main__` is another one."""
    origin = str(names.get("__name__", "")).strip("_").replace(".", "_")
    module = ModuleType(f"saturate_sent_{origin}_{next(_NUMBERS)}")
    vars(module).update({**names, "__name__": module.__name__})
    sys.modules[module.__name__] = module
    return vars(module)


def sent_classes() -> frozenset[tuple[str, str]]:
    """Module and name of the classes that went by value, for a process that sends instances of them back."""
    return frozenset(_SENT)


def sent_class(module: str, name: str) -> type | None:
    return _SENT.get((module, name))


class _ByName(pickle.Pickler):
    """The standard library's, which would leave it to the other process to find out that there is no such class."""

    def dump(self, thing: Any) -> None:
        self._known: dict[str, bool] = {}
        super().dump(thing)

    def reducer_override(self, thing: Any) -> Any:
        for parts in (_parametrized(thing), _quantized(thing)):
            if parts is not None:
                return parts
        module = _foreign_module(thing, self._known)
        if module is not None:
            raise NotImportable(f"{thing.__qualname__} is of {module.__name__}, known to this process only")
        return NotImplemented


def _parametrized(thing: Any) -> Any:
    """What a module whose weights are computed from others (weight_norm, for one) is made from; None for anything else.
    Its class was made for it alone, so torch refuses to pickle it."""
    parametrize = sys.modules.get("torch.nn.utils.parametrize")
    if parametrize is None or "_modules" not in getattr(thing, "__dict__", ()) or not parametrize.is_parametrized(thing):
        return None
    return _parametrize, (parametrize.type_before_parametrizations(thing), list(thing.parametrizations)), dict(vars(thing))


def _parametrize(cls: type, names: list[str]) -> Any:
    """A module of this class without its state, whose attributes `names` are computed."""
    from torch.nn.utils import parametrize

    module = cls.__new__(cls)
    parametrize._inject_new_class(module)
    for name in names:
        parametrize._inject_property(module, name)
    return module


def _quantized(thing: Any) -> Any:
    """What one of torch's quantized layers is made from; None for anything else. It restores its state by a method that takes for granted
    what unpickling alone does not make."""
    kind = type(thing)
    own = kind.__module__.startswith("torch.ao.nn.") and "_modules" in getattr(thing, "__dict__", ())
    restores = own and next(cls for cls in kind.__mro__ if "__setstate__" in vars(cls)).__module__.startswith("torch.ao.nn.")
    return (_blank, (kind,), thing.__getstate__()) if restores else None


def _blank(cls: type) -> Any:
    """A module of this class without anything of its own."""
    from torch.nn import Module

    module = cls.__new__(cls)
    Module.__init__(module)
    return module


def _imported(thing: Any) -> Any:
    """How a module of a class of its own (torch.ops, one that imports its parts late) is found in another process; None for
    anything else. Plain ones cloudpickle takes by itself."""
    if not isinstance(thing, ModuleType) or type(thing) is ModuleType:
        return None
    name = thing.__name__
    found = sys.modules.get(name) is thing and importable(name.partition(".")[0])
    return (importlib.import_module, (name,)) if found else None


def _operator(thing: Any) -> Any:
    """How an operator of torch, or a namespace of them, is found in another process; None for anything else."""
    ops = sys.modules.get("torch._ops")
    if ops is None:
        return None
    if isinstance(thing, ops._OpNamespace):
        return _find_operator, (thing.__name__.removeprefix("torch.ops."),)
    if isinstance(thing, ops.OpOverloadPacket):
        return _find_operator, tuple(thing._qualified_op_name.split("::"))
    if isinstance(thing, ops.OpOverload):
        return _find_operator, (*thing._schema.name.split("::"), thing._overloadname)
    if isinstance(thing, defined_operators().get("", type(None))):
        return _find_definition, (thing._init_fn.__module__, thing._qualname)
    return None


def _find_operator(*names: str) -> Any:
    return functools.reduce(getattr, names, importlib.import_module("torch").ops)


def _find_definition(module: str, name: str) -> Any:
    importlib.import_module(module)         # which registers it
    return defined_operators()[name]


def defined_operators() -> dict[str, Any]:
    """What torch.library.custom_op has defined, by "namespace::name", and its class as ""."""
    library = sys.modules.get("torch._library.custom_ops")
    return {**library.OPDEFS, "": library.CustomOpDef} if library is not None else {}


def _check_operators(thing: Any, known: dict[str, bool]) -> None:
    """Raises NotRegistered for an operator that a module registers which no other process imports (a script, mostly), and for
    a function that would go by value and names one."""
    defined = defined_operators()
    kind = defined.pop("", type(None))
    if isinstance(thing, kind):
        defined = {thing._qualname: thing}
    elif isinstance(thing, FunctionType) and defined and _foreign_module(thing, known) is not None:
        words = set(thing.__code__.co_names)
        defined = {name: one for name, one in defined.items() if {"ops", *name.split("::")} <= words}
    else:
        return
    for name, one in defined.items():
        module = _foreign_module(one._init_fn, known)
        if module is not None:
            raise NotRegistered(f"{module.__name__} registers the operator {name}, and is not imported in another process")


def _foreign_module(thing: Any, known: dict[str, bool]) -> Any:
    """The module of a class or function, where a fresh process would not find it; else None."""
    name = getattr(thing, "__module__", None) if isinstance(thing, (type, FunctionType)) else None
    if not isinstance(name, str) or name not in sys.modules:
        return None
    top = name.partition(".")[0]
    if top not in known:
        known[top] = importable(top)
    return None if known[top] else sys.modules[name]


def importable(top: str) -> bool:
    """Whether a fresh process with this `sys.path` would import the same file under this top-level name."""
    if top == "__main__":
        return False
    module = sys.modules.get(top)
    if module is None or top in sys.stdlib_module_names:
        return True
    for finder in sys.meta_path:
        spec = finder.find_spec(top, None) if hasattr(finder, "find_spec") else None
        if spec is not None:
            break
    else:
        return False
    ours = getattr(module, "__file__", None)
    return not ours or not spec.origin or os.path.realpath(ours) == os.path.realpath(spec.origin)


def save(torch: Any, value: Any, path: Path, what: str) -> None:
    """Write `value` to a file whose tensors can be mapped into memory. Whole or not at all.

    Raises UsageError where it cannot be pickled, and EnvironmentProblem where the file system refuses.
    """
    new = durable.temporary(path.parent)
    module = SimpleNamespace(__name__="saturate", Pickler=pickler())
    try:
        with open(new, "xb") as file:
            torch.save(value, file, pickle_module=module, pickle_protocol=pickle.HIGHEST_PROTOCOL)
        os.replace(new, path)
    except NotImportable as error:
        raise UsageError(f"{what} cannot be sent to another process", cause=str(error),
                         remedy=f"{EXTRA}, or move the definition into a module of its own") from error
    except NotRegistered as error:
        raise UsageError(f"{what} cannot be sent to another process", cause=str(error),
                         remedy="put the operator, and the model that uses it, into a module of their own, and import that") from error
    except Exception as error:  # a model's own __reduce__ may raise anything; it is named and raised again
        if of_the_file_system(error):
            raise EnvironmentProblem(f"{what} cannot be written to {path.parent}", cause=_line(error),
                                     remedy="free some space, or choose another folder with workdir") from error
        raise UsageError(f"{what} cannot be sent to another process", cause=_line(error),
                         remedy="every candidate runs in a process of its own: leave out what cannot be pickled "
                                "(open files, locks, generators, connections), or make it in the forward") from error
    finally:
        new.unlink(missing_ok=True)


def of_the_file_system(error: BaseException | None) -> bool:
    """torch's writer reports what the file said as the context of an error of its own."""
    while error is not None:
        if isinstance(error, OSError) or "PytorchStreamWriter failed" in str(error):
            return True
        error = error.__cause__ or error.__context__
    return False


def _line(error: BaseException) -> str:
    line = next((line.strip() for line in str(error).splitlines() if line.strip()), "no message")
    return f"{type(error).__name__}: {line[:300]}"


def load(torch: Any, path: Path, device: str | None = "cpu") -> Any:
    """What `save` wrote, its tensors on `device`; None: each where it was. On the CPU they are mapped, so that processes share
    them; a process that changes one gets a copy of the pages it changed."""
    return torch.load(str(path), map_location=device, mmap=not _huge_pages(), weights_only=False)


def _huge_pages() -> bool:
    """Whether memory comes in huge pages unasked. Mapped files never do, so a model on one would be slower than the
    same model in the user's process, and the baseline would look worse than it is."""
    try:
        return "[always]" in Path("/sys/kernel/mm/transparent_hugepage/enabled").read_text(encoding="ascii")
    except OSError:
        return False        # another kernel: it has none


def memory_of(tensor: Any) -> memoryview:
    """The bytes of a contiguous strided CPU tensor, not copied. The view keeps the tensor: mostly it is a copy that nobody
    else holds. Not through numpy, which has no bfloat16 and may not be there."""
    size_bytes = tensor.numel() * tensor.element_size()
    if not size_bytes:
        return memoryview(b"")
    memory = (ctypes.c_char * size_bytes).from_address(tensor.data_ptr())
    memory.tensor = tensor      # ctypes knows an address only, and whoever frees the tensor frees what lies there
    return memoryview(memory).cast("B")
