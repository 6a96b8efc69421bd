"""What the bytecode of a function tells: the names in it that mean something of its module, the environment variables that it reads, and
where it draws random numbers that nothing seeds."""

from __future__ import annotations

import dis
import functools
import os
import types
from typing import Any

#: Instructions that read a name where the code's module defines it.
_READS = frozenset({"LOAD_GLOBAL", "LOAD_NAME", "LOAD_FROM_DICT_OR_GLOBALS", "IMPORT_NAME"})


@functools.lru_cache(4096)              # a glance asks for the same functions before and after each batch
def global_names(code: types.CodeType) -> tuple[str, ...]:
    """Names that the code reads as globals, or as builtins, or imports. `co_names` holds those of attributes as well: `self.images` has nothing
    to do with the `images` of a loop at the top of the script.

    >>> global_names((lambda self: len(self.images) + SIZE).__code__)
    ('len', 'SIZE')
    """
    return tuple(dict.fromkeys(step.argval for step in dis.get_instructions(code) if step.opname in _READS))


@functools.lru_cache(4096)
def imports(code: types.CodeType) -> tuple[tuple[str, int, tuple[str, ...]], ...]:
    """What the code itself imports when it runs: the name of a module, by how many packages it is relative (0: it is whole), and the names
    that are taken from it.

    >>> imports(compile("def f():\\n    from ..a import b", "", "exec").co_consts[0])
    (('a', 2, ('b',)),)
    """
    steps = [step for step in dis.get_instructions(code) if step.opname not in NO_STEPS]
    return tuple((step.argval, steps[place - 2].argval, tuple(steps[place - 1].argval or ())) for place, step in enumerate(steps)
                 if step.opname == "IMPORT_NAME")


#: What gives other random numbers each time, whatever was seeded before.
_ENTROPY = frozenset({"SystemRandom", "getrandom", "randbelow", "randbits", "urandom"})
#: Generators that do so where they are made without a seed.
_SEEDABLE = frozenset({"MT19937", "PCG64", "PCG64DXSM", "Philox", "Random", "RandomState", "SFC64", "SeedSequence", "default_rng"})
#: Instructions that do nothing, or prepare a call.
NO_STEPS = ("CACHE", "EXTENDED_ARG", "NOP", "PRECALL", "PUSH_NULL", "RESUME")


@functools.lru_cache(4096)
def unseeded(code: types.CodeType) -> str:
    """The name of a source of random numbers in the code that no seed decides, or "".

    >>> unseeded((lambda self: numpy.random.default_rng().random()).__code__)
    'default_rng'
    >>> unseeded((lambda self, index: numpy.random.default_rng(index).random()).__code__)
    ''
    """
    steps = [step for step in dis.get_instructions(code) if step.opname not in NO_STEPS]
    for step, after in zip(steps, steps[1:]):
        made = after.opname.startswith("CALL") and after.arg == 0
        if step.opname.startswith("LOAD_") and (step.argval in _ENTROPY or (step.argval in _SEEDABLE and made)):
            return str(step.argval)
    return ""


#: What reads the environment, by name and as a global under any name.
ENVIRONMENT = {"environ": os.environ, "environb": os.environb, "getenv": os.getenv, "getenvb": os.getenvb}


def environment_names(code: types.CodeType, namespace: dict[str, Any]) -> list[Any]:
    """Names of the environment variables that a piece of code reads; None for each time that it does not write one out."""
    if not any(_is_environment(name, namespace) for name in (*code.co_names, *code.co_freevars)):
        return []
    steps = [step for step in dis.get_instructions(code) if step.opname not in NO_STEPS]
    return [_variable(steps, place) for place, step in enumerate(steps) if _is_environment(step.argval, namespace)]


def _variable(steps: list[dis.Instruction], place: int) -> str | None:
    """What stands behind `environ` or `getenv`, as in `os.environ["A"]`, `environ.get("A")`, `os.getenv("A", other)`; or before, as
    in `"A" in os.environ`."""
    named = place + 1
    while named < len(steps) and steps[named].argval in ("get", "setdefault", "pop"):
        named += 1
    ends = [(step.opname, step.argval, step.argrepr) for step in steps[named + 1:named + 3]]
    whole = any("SUBSCR" in name or text == "[]" or (name == "CALL" and count == 1) for name, count, text in ends[:1])
    whole = whole or any(name == "CALL" and count == 2 for name, count, _ in ends[1:])
    if steps[place + 1].opname == "CONTAINS_OP":
        named, whole = place - (2 if "ATTR" in steps[place].opname else 1), place > 1
    if not whole or steps[named].opname != "LOAD_CONST" or not isinstance(steps[named].argval, (str, bytes)):
        return None
    return os.fsdecode(steps[named].argval)


def _is_environment(name: Any, namespace: dict[str, Any]) -> bool:
    return isinstance(name, str) and (name in ENVIRONMENT or any(namespace.get(name) is one for one in ENVIRONMENT.values()))
