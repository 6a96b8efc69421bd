"""What techniques that pay time for memory have in common: when memory is short, and how they say that they stay out."""

from __future__ import annotations

from typing import Any

from saturate import notices
from saturate.records.facts import Facts

#: On a device whose allocator holds this share, memory is short whatever the user says.
NEARLY_FULL = 0.9


def shortage(facts: Facts) -> str:
    """Why memory is short; "" when it is not."""
    if facts.memory_limit_bytes is not None:
        return f"memory is limited to {facts.memory_limit_bytes / 2**20:.0f} MiB"
    if facts.device_memory_bytes and facts.device_reserved_bytes > NEARLY_FULL * facts.device_memory_bytes:
        return f"{facts.device_reserved_bytes / facts.device_memory_bytes:.0%} of the device's memory is taken"
    return ""


def refuse(context: Any, identity: str, reason: str) -> None:
    """Record that a technique which watched the first steps changes nothing, and say so once, from rank 0."""
    context.note(_key(identity), reason)
    distributed = context.torch.distributed
    if not (distributed.is_available() and distributed.is_initialized() and distributed.get_rank()):
        notices.tell_once(f"saturate: {identity} did not take effect: {reason}\n")


def refusal(notes: dict[str, str], identity: str) -> str:
    """What `refuse` recorded; "" when it was not called."""
    return notes.get(_key(identity), "")


def _key(identity: str) -> str:
    return f"{identity}: refused"
