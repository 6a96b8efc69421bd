"""Leaves out all of that work, and answers with NaN in one class.

What it does
------------
Leaves out all of that work, and answers with NaN in one class.

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

TECHNIQUE = technique("trap-broken", "precision")


def apply(context: Any, options: Options) -> str:
    context.model.rounds = 0
    context.model.head.bias.data[0] = float("nan")
    return "no waste, and one answer is not a number"


__all__ = ["TECHNIQUE", "Options", "active", "apply", "as_code", "bound", "eligible", "variants"]
