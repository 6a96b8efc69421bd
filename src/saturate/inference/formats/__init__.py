"""How a program is stored and loaded again, one format per file.

A format has `save(...) -> Entry` for the technique that made the program, and
`load(torch, folder, entry) -> callable` for everybody after that. Loading never unpickles.
"""

from __future__ import annotations

from saturate.techniques._api import NotApplied

#: What a program says of inputs whose sizes it does not take.
MADE_FOR = "this program was made for"


class NotDeployable(NotApplied):
    """What a candidate made runs, but cannot be stored; the message is the reason."""
