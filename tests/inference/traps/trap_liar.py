"""Rounds the weights to bfloat16, and says that only the order of sums changes.

What it does
------------
Rounds the weights to bfloat16, and says that only the order of sums changes.

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

TECHNIQUE = technique("trap-liar", "reordering")


def apply(context: Any, options: Options) -> str:
    torch, model = context.torch, context.model
    model.rounds = 0
    model.head.weight.data = model.head.weight.data.to(torch.bfloat16).float()
    return "no waste, and weights in bfloat16"


__all__ = ["TECHNIQUE", "Options", "active", "apply", "as_code", "bound", "eligible", "variants"]
