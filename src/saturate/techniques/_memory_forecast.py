"""How much memory there is, and what a batch of a given size will need, from what earlier ones took."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

from saturate.checkpoints.host_memory import available_bytes
from saturate.techniques._standard import standard

resource = standard("resource")

#: Share of the memory up to which a batch is trusted to fit again.
TRUSTED = 0.85


@dataclass(frozen=True)
class Memory:
    """Bytes: in use now, the most that was ever in use, and how much may be in use (None: not known)."""

    used: int
    peak: int
    capacity: int | None


def memory(torch: Any, device: Any, limit_bytes: int = 0) -> Memory:
    """Of the process on a `torch.device`, which need not be CUDA's current one. `limit_bytes` (0: none) lowers the capacity."""
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        used = torch.cuda.memory_allocated(device)
        capacity = free + torch.cuda.memory_reserved(device)
        found = Memory(used, torch.cuda.max_memory_allocated(device), capacity)
    elif device.type == "cpu":
        used = _resident_bytes()
        available = available_bytes()
        found = Memory(used, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
                       None if available is None else used + available)
    else:
        found = Memory(0, 0, None)
    if limit_bytes:
        return Memory(found.used, found.peak, min(limit_bytes, found.capacity or limit_bytes))
    return found


def _resident_bytes() -> int:
    try:
        with open("/proc/self/statm", encoding="ascii") as file:
            return int(file.read().split()[1]) * resource.getpagesize()
    except OSError:
        return 0                    # no /proc: nothing is forecast


@dataclass
class Forecast:
    """What sizes need. A size is the entries of all input tensors; memory grows with it at least proportionally."""

    seen: list[tuple[int, int, int]] = field(default_factory=list)     # (size, bytes used before, peak bytes)

    def observe(self, size: int, before: Memory, after: Memory) -> None:
        """A batch ran. Says something only where it needed more than anything before it."""
        if after.peak > before.peak:
            self.seen.append((size, before.used, after.peak))

    def bytes_per_entry(self) -> float | None:
        """The steeper of: from the start of the largest batch to its peak; from one peak to the next."""
        if not self.seen:
            return None
        size, used, peak = max(self.seen)
        slopes = [(peak - used) / size]
        if len(self.seen) > 1:
            smaller, _, lower = sorted(self.seen)[-2]
            if smaller < size:
                slopes.append((peak - lower) / (size - smaller))
        return max(slopes)

    def chunks(self, size: int, now: Memory) -> int:
        """Into how many chunks a batch should be cut so that it fits."""
        slope = self.bytes_per_entry()
        if slope is None or slope <= 0 or now.capacity is None:
            return 1
        room = TRUSTED * now.capacity - now.used
        if room <= 0:
            return 1                # what is there already is too much: no batch size mends that
        return max(1, math.ceil(size * slope / room))
