"""The memory of a step by kind and by line of code, from what the windows of a profile saw."""

from __future__ import annotations

from collections.abc import Callable

from saturate.records.analysis import Memory, MemoryLine
from saturate.records.observations import MemorySeen
from saturate.study.seen import Seen

KINDS = ("parameters", "gradients", "optimizer_state", "activations")


def breakdown(seen: Seen, shorten: Callable[[str], str]) -> Memory:
    """Bytes at the peak of a step. Activations are what autograd keeps for the backward pass; "other" is what is left:
    batches, temporary results, libraries' workspaces."""
    kinds = seen.sample.get("memory", {})
    device = seen.sample.get("device_memory")
    saved = seen.modules.get("saved_bytes")
    lines = [MemoryLine(file=shorten(file), line=line, function=function, bytes=size,
                        inside=f"{shorten(library)}:{number} {name}" if library else "")
             for file, line, function, library, number, name, size in seen.modules.get("memory_lines", [])]
    unknown = {}
    if not lines:
        unseen = seen.notes.get("modules", "no allocation of a step could be traced to a line")
        unknown["lines"] = seen.modules.get("memory_lines_unknown") or unseen
    if device is None:
        why = "the CPU allocator keeps no peak"
        unknown |= {"peak": why, "reserved": why, "fragmentation": why, "allocator_retries": why, "other": why}
        if saved is None:
            unknown["activations"] = seen.notes.get("modules", "what is kept for the backward pass was not seen")
        return Memory(**kinds, activations=saved, limit=seen.facts.machine.memory_bytes, lines=lines, unknown=unknown)
    rest = max(0, device["peak"] - sum(kinds.values()))
    kept = rest if saved is None else min(saved, rest)
    if saved is None:
        unknown["other"] = "not told apart from activations"
    reserved = device["reserved"]
    return Memory(
        **kinds, activations=kept, other=None if saved is None else rest - kept, peak=device["peak"], reserved=reserved,
        fragmentation=1.0 - device["active_peak"] / reserved if reserved else None,
        allocator_retries=device["retries"], limit=device["total"], lines=lines, unknown=unknown,
    )


def observed(memory: Memory, seen: Seen) -> MemorySeen:
    """The same for the rules, as shares."""
    known = sum(getattr(memory, kind) or 0 for kind in KINDS)
    whole = memory.peak or (known if memory.activations is not None else 0)
    shares = {kind: _share(getattr(memory, kind), whole) for kind in KINDS}
    most = memory.lines[0] if memory.lines else None
    used = memory.peak if memory.peak is not None else seen.resident_bytes
    return MemorySeen(
        used=_share(used, memory.limit or 0), held=_share(memory.reserved, memory.limit or 0), fragmentation=memory.fragmentation,
        allocator_retries=memory.allocator_retries,
        **shares, line=place(most) if most else "", line_share=_share(most.bytes, whole) if most else None,
    )


def place(line: MemoryLine) -> str:
    """ "train.py:41 forward", with the library's own line where the user's only calls it."""
    return f"{line.file}:{line.line} {line.function}" + (f" (in {line.inside})" if line.inside else "")


def _share(part: int | None, whole: int) -> float | None:
    return None if part is None or whole <= 0 else min(1.0, part / whole)
