"""Where in its code a process was when a fault (SIGSEGV, say) ended it, as Python's faulthandler wrote it down."""

from __future__ import annotations

import os
import re

_PLACE = re.compile(r'^Current thread 0x[0-9a-f]+[^\n]*\(most recent call first\):\n  File "([^"\n]+)", line (\d+) in ([^\n]+)$', re.MULTILINE)


def place(printed: str) -> str:
    """The function that was being called, in words for a reason; "" where nothing tells.

    >>> place('Current thread 0x00007f (most recent call first):\\n  File "/usr/lib/torch/_package.py", line 1045 in _load_aoti\\n')
    ', in _load_aoti (_package.py, line 1045)'
    >>> place("Segmentation fault")
    ''
    """
    found = _PLACE.findall(printed)
    return "" if not found else f", in {found[-1][2]} ({os.path.basename(found[-1][0])}, line {found[-1][1]})"
