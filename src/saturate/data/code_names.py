"""The names in a piece of code that mean something of its module, apart from those of attributes."""

from __future__ import annotations

import dis
import functools
import types

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
