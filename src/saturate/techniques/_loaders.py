"""Which DataLoaders can get worker processes, judged from the arguments that they are built with. Used by `loader-workers`."""

from __future__ import annotations

import ast
import dis
import math
import multiprocessing
import pickle
import random
import sys
import tokenize
import types
from collections.abc import Iterator
from typing import Any

from saturate.data import contents

#: Functions of python's `random`, numpy and torch that draw from the generators that everything draws from.
_DRAWS = frozenset({"random", "randint", "randrange", "choice", "choices", "sample", "shuffle", "uniform", "normal", "gauss", "rand", "randn",
                    "random_", "randperm", "multinomial", "permutation", "bernoulli", "random_sample", "normalvariate"})


def may_have_workers(dataset: Any, arguments: dict[str, Any], torch: Any) -> bool:
    """Whether a loader of map-style samples that has no workers may have some: it has two batches or more, and workers can
    receive its dataset."""
    return batches(dataset, arguments) >= 2 and not _on_device(dataset, torch) and _can_cross(dataset, arguments)


def batches(dataset: Any, arguments: dict[str, Any]) -> int:
    """Of one epoch."""
    try:
        if arguments.get("batch_sampler") is not None:
            return len(arguments["batch_sampler"])
        return math.ceil(len(dataset) / (arguments.get("batch_size") or 1))
    except (TypeError, NotImplementedError):        # no length: the user drives it with a sampler of his own
        return 1 << 30


def keeps_its_place(sampler: Any, outer: tuple[Any, ...] = ()) -> bool:
    """Whether a sampler may go on where the last pass over it was left: what workers are asked for ahead would be skipped then. It,
    or a sampler that it draws from, is an iterator, holds one, or sets attributes between two indices."""
    held, known = list(getattr(sampler, "__dict__", {}).values()), (*outer, sampler)
    return (any(hasattr(type(value), "__next__") for value in (sampler, *held))
            or _sets_between_yields(getattr(getattr(type(sampler), "__iter__", None), "__code__", None))
            or any(keeps_its_place(value, known) for value in held if _is_sampler(value) and not any(value is one for one in known)))


def _is_sampler(value: Any) -> bool:
    return any(kind.__name__ == "Sampler" for kind in type(value).__mro__)


def samplers_in(sampler: Any) -> Iterator[Any]:
    """It, and those that it draws from."""
    pending, met = [sampler], []
    while pending:
        current = pending.pop()
        if any(current is one for one in met):
            continue
        met.append(current)
        yield current
        pending.extend(value for value in getattr(current, "__dict__", {}).values() if _is_sampler(value))


def draws_as_it_goes(sampler: Any) -> str:
    """The class of a sampler of the user's, here or below, whose `__iter__` draws between two indices from the generators that
    everything draws from; or "". Workers are asked for batches ahead: it would draw before what the training draws in between."""
    for one in samplers_in(sampler):
        function = getattr(type(one), "__iter__", None)
        if not type(one).__module__.startswith("torch.") and isinstance(function, types.FunctionType):
            steps = _between_yields(function.__code__)
            named = {step.argval for step in steps if isinstance(step.argval, str)}
            values = [function.__globals__.get(name) for name in named]
            given = any(isinstance(names, tuple) and "generator" in names for names in function.__code__.co_consts)     # `generator=`
            whole = named & _DRAWS and any(getattr(value, "__name__", "") in ("random", "numpy", "torch", "numpy.random")
                                           for value in values if isinstance(value, types.ModuleType))
            if not given and (whole or any(getattr(value, "__self__", None) is random._inst for value in values)):
                return type(one).__name__
    return ""


def _sets_between_yields(code: Any) -> bool:
    """Whether a generator sets an attribute in the loop of its first `yield`, or anywhere behind."""
    return any(step.opname == "STORE_ATTR" for step in _between_yields(code))


def _between_yields(code: Any) -> list[dis.Instruction]:
    """What a generator does in the loop of its first `yield`, and behind."""
    if code is None:
        return []
    steps = list(dis.get_instructions(code))
    yields = [step.offset for step in steps if step.opname == "YIELD_VALUE"]
    loops = [(step.argval, step.offset) for step in steps if "JUMP" in step.opname and (step.argval or 0) < step.offset]
    begins = [target for target, end in loops if any(target <= place <= end for place in yields)]
    return [step for step in steps if step.offset >= min(begins + yields)] if yields else []


def _on_device(dataset: Any, torch: Any) -> bool:
    """Whether the dataset, or the one that it is a view of, holds accelerator tensors: they do not survive a fork."""
    while dataset is not None:
        values = list(getattr(dataset, "__dict__", {}).values())
        values += [item for value in values if isinstance(value, (list, tuple)) for item in value[:64]]
        if any(isinstance(value, torch.Tensor) and value.device.type != "cpu" for value in values):
            return True
        dataset = getattr(dataset, "__dict__", {}).get("dataset")
    return False


def _can_cross(dataset: Any, arguments: dict[str, Any]) -> bool:
    """Whether workers can receive the dataset: a forked one has it already, but shares the place in open files; any other must
    unpickle it."""
    chosen = arguments.get("multiprocessing_context")
    method = chosen if isinstance(chosen, str) else chosen.get_start_method() if chosen else start_method()
    if method == "fork":
        return not shared_file(dataset, arguments.get("collate_fn"))
    if _trains_when_imported():
        return False
    try:
        pickle.Pickler(_Sink()).dump((dataset, arguments.get("collate_fn"), arguments.get("worker_init_fn")))
    except Exception:  # noqa: BLE001 - any object's own __reduce__ may raise anything, and then workers cannot start
        return False
    return True


def start_method() -> str:
    """How this process starts others. To ask for it plainly would settle it, and a script that chooses another one later would fail."""
    return multiprocessing.get_start_method(allow_none=True) or multiprocessing.get_all_start_methods()[0]


def _trains_when_imported() -> bool:
    """Whether processes that are not forked would train as well: they import the script's main module, as `multiprocessing.spawn` does,
    and nothing in it keeps its training for the main process."""
    main = sys.modules.get("__main__")
    path, name = getattr(main, "__file__", None), getattr(getattr(main, "__spec__", None), "name", None) or ""
    if path is None or name.rpartition(".")[2] == "__main__":
        return False
    try:
        with tokenize.open(path) as file:
            tree = ast.parse(file.read())
    except (OSError, SyntaxError, ValueError):
        return True
    return not any(isinstance(part, ast.Name) and part.id == "__name__"
                   for statement in tree.body if isinstance(statement, ast.If) for part in ast.walk(statement.test))


def shared_file(dataset: Any, collate_fn: Any) -> str:
    """What forked workers would share of a dataset and its collate function: the class of an open file, or ""."""
    try:
        return contents.open_file(dataset, collate_fn)
    except Exception as error:  # noqa: BLE001 - an object that raises when it is looked at had better be left alone
        return type(error).__name__


def own_generator(dataset: Any, collate_fn: Any) -> str:
    """What each worker would draw the same numbers from: the class of a random generator of the dataset's or its collate function's
    own, or ""."""
    try:
        return contents.own_generator(dataset, collate_fn)
    except Exception as error:  # noqa: BLE001 - an object that raises when it is looked at had better be left alone
        return type(error).__name__


class _Sink:
    """A file that keeps nothing: a dataset may be larger than memory allows to hold twice."""

    def write(self, data: Any) -> int:
        return len(data)
