"""What is left of a process's GPU when a call has failed there."""

from __future__ import annotations

import contextlib
from typing import Any

from saturate.inference import users_code
from saturate.records import sizes

#: Of a GPU's memory, what others hold of it and is worth a word; a context without tensors takes some hundred MiB.
_COUNTS = 0.05


def broken(torch: Any) -> bool:
    """Whether the GPU answers nothing in this process any more, as after an assertion in a kernel: an index out of range is one."""
    try:
        torch.cuda.synchronize()
    except users_code.RAISED:
        return True
    return False


def who_holds(torch: Any, error: BaseException) -> str:
    """What a reason says of other processes, where it was the GPU's memory that was full."""
    if not isinstance(error, torch.cuda.OutOfMemoryError):
        return ""
    with contextlib.suppress(RuntimeError):
        free, total = torch.cuda.mem_get_info()
        return held_by_others(total, free, torch.cuda.memory_reserved())
    return ""


def held_by_others(total_bytes: int, free_bytes: int, own_bytes: int) -> str:
    """Where others hold a part of a GPU's memory that counts, how much.

    >>> held_by_others(80 * 2**30, 2**30, 29 * 2**30)
    "; other processes, the model's own among them, hold 50.00 GiB of 80.00 GiB: alone it may fit"
    >>> held_by_others(80 * 2**30, 2**30, 78 * 2**30)
    ''
    """
    others_bytes = total_bytes - free_bytes - own_bytes
    if others_bytes < _COUNTS * total_bytes:
        return ""
    return (f"; other processes, the model's own among them, hold {sizes.show(others_bytes)} of {sizes.show(total_bytes)}: "
            "alone it may fit")
