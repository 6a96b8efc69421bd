"""How a program is stored and loaded again, one format per file.

A format has `save(...) -> Entry` for the technique that made the program, and
`load(torch, folder, entry) -> callable` for everybody after that. Loading never unpickles.
"""

from __future__ import annotations

from saturate.techniques._api import NotApplied


class OtherSizes(ValueError):
    """A program was called with inputs of sizes that it was not made for."""


class NotDeployable(NotApplied):
    """What a candidate made runs, but cannot be stored; the message is the reason."""
