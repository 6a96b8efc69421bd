"""What the sets that ran needed at most, and the limit that they are asked to keep."""

from __future__ import annotations

from saturate.records import sizes
from saturate.study.candidates import Set, key
from saturate.study.store import Store

#: Share of the limit that a set must leave free when it runs for the first time: the peaks of one program differ from run to
#: run, and what was taken into the recipe must still fit the next time.
MARGIN = 0.01


class Peaks:
    """By set, bytes, from every timed trial: of torch's allocator on a CUDA device, resident on a CPU."""

    def __init__(self, store: Store, limit_bytes: int | None = None):
        self.store = store
        self.limit_bytes = limit_bytes

    def note(self, techniques: Set, peak_bytes: int) -> None:
        self.store.set_answer(f"peak {key(techniques)}", max(peak_bytes, self.of(techniques) or 0))

    def of(self, techniques: Set) -> int | None:
        """The most that any trial of this set needed; None: none ran."""
        return self.store.answer(f"peak {key(techniques)}")

    def allowed(self, techniques: Set) -> int | None:
        """What a trial of this set may need; None: no matter how much. The baseline need not keep the limit."""
        if self.limit_bytes is None or not techniques:
            return None
        return self.limit_bytes if self.of(techniques) is not None else int(self.limit_bytes * (1 - MARGIN))

    def too_much(self, techniques: Set) -> str | None:
        """Why this set is known not to keep the limit; None when it does, was not tried, or there is no limit."""
        peak = self.of(techniques)
        if self.limit_bytes is None or peak is None or peak <= self.limit_bytes:
            return None
        return f"needs {sizes.show(peak)}, the limit is {sizes.show(self.limit_bytes)}"
