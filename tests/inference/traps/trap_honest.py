"""Leaves out three quarters of the work that changes nothing.

What it does
------------
Leaves out three quarters of the work that changes nothing.

When it helps
-------------
In the trap suite.

When it hurts
-------------
In the trap suite.

Numerics
--------
What it says, which may be a lie.

How it is applied
-----------------
Plainly.

References
----------
None.
"""

from __future__ import annotations

from typing import Any

from trap_model import Nothing as Options
from trap_model import active, as_code, bound, eligible, technique, variants

TECHNIQUE = technique("trap-honest", "precision")


def apply(context: Any, options: Options) -> str:
    context.model.rounds //= 4
    return "three quarters of the waste are gone"


__all__ = ["TECHNIQUE", "Options", "active", "apply", "as_code", "bound", "eligible", "variants"]
