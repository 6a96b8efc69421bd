"""Which blocks to recompute so that activations stay within a number of bytes, for the least time. Pure functions.

A pass is what happens between two backward passes: the calls of blocks (visits) in the order of the forward, and between
them what other modules save. Going back, a block that is recomputed holds all of its activations once more, on top of
what the blocks before it hold: so the peak is not simply the sum of what the forward leaves.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from saturate.techniques import _common

KEEP, OPERATORS, WHOLE = MODES = ("keep", "operators", "whole")


@dataclass(frozen=True)
class Visit:
    """One call of a block, or (`block` None) what was saved in between. Bytes are of storages that no other visit holds;
    the others are named by a key into the table of `sizes`."""

    block: int | None = None
    inner_bytes: int = 0                    # saved inside: neither arguments nor results of the block
    arguments: frozenset[int] = frozenset() # every tensor that the block was given; held wherever it is recomputed
    read: frozenset[int] = frozenset()      # arguments, or with block None anything, that the backward reads
    results: frozenset[int] = frozenset()   # results of the block that its own backward reads
    product_bytes: int = 0                  # results of matrix products and attention; held when the rest is recomputed
    needed_bytes: int = 0                   # of those, what is part of `inner_bytes`
    buffer_bytes: int = 0                   # copies of buffers that the forward changes; held to recompute

    def held(self, mode: str) -> tuple[int, frozenset[int]]:
        """What it holds from its forward to its backward."""
        if mode == KEEP:
            return self.inner_bytes, self.read | self.results
        return self.buffer_bytes + (self.product_bytes if mode == OPERATORS else 0), self.arguments

    def recomputed(self, mode: str, sizes: dict[int, int]) -> int:
        """Bytes that its backward makes again before it frees any."""
        if mode == KEEP:
            return 0
        again = self.inner_bytes + sum(sizes[key] for key in self.results)
        return again - self.needed_bytes if mode == OPERATORS else again


@dataclass(frozen=True)
class Cost:
    """Nanoseconds that recomputing a block adds to a step; None: it cannot be recomputed that way."""

    whole_ns: float | None = None
    operators_ns: float | None = None

    def of(self, mode: str) -> float:
        found = {KEEP: 0.0, OPERATORS: self.operators_ns, WHOLE: self.whole_ns}[mode]
        return float("inf") if found is None else found


@dataclass(frozen=True)
class Profile:
    """What was measured over one step: passes, the sizes of shared storages, the cost of each block, and the storages that
    the script itself holds on to (its batch, the model's outputs), so that no backward frees them."""

    passes: tuple[tuple[Visit, ...], ...]
    sizes: dict[int, int]
    costs: tuple[Cost, ...]
    kept: frozenset[int] = frozenset()
    why_no_products: str = ""       # where no block can be recomputed but for its products

    def peak(self, modes: Sequence[str]) -> int:
        """The most bytes of activations alive at any moment."""
        return max((_peak(visits, self.sizes, modes, self.kept) for visits in self.passes), default=0)

    def time(self, modes: Sequence[str]) -> float:
        """Nanoseconds of recomputing in a step."""
        return sum(cost.of(mode) for cost, mode in zip(self.costs, modes))

    def usable(self, mode: str) -> list[int]:
        return [block for block, cost in enumerate(self.costs) if cost.of(mode) < float("inf")]

    def uniform(self, mode: str, every: int = 1) -> list[str]:
        """Every n-th of the blocks that allow it."""
        chosen = set(self.usable(mode)[::every])
        return [mode if block in chosen else KEEP for block in range(len(self.costs))]


def _peak(visits: Sequence[Visit], sizes: dict[int, int], modes: Sequence[str], kept: frozenset[int]) -> int:
    chosen = [KEEP if visit.block is None else modes[visit.block] for visit in visits]
    holders: Counter[int] = Counter()
    live = 0
    for visit, mode in zip(visits, chosen):
        own, shared = visit.held(mode)
        live += own + sum(sizes[key] for key in shared if not holders[key])
        holders.update(shared)
    highest = live
    for visit, mode in zip(reversed(visits), reversed(chosen)):
        highest = max(highest, live + visit.recomputed(mode, sizes))
        own, shared = visit.held(mode)
        holders.subtract(shared)
        live -= own + sum(sizes[key] for key in shared if not holders[key] and key not in kept)
    return highest


def choose(profile: Profile, budget_bytes: float) -> list[str] | None:
    """The mode of each block; None when not even recomputing everything meets the budget.

    Greedy by time per byte over the lower hull of each block's choices, which is optimal up to the last step (the linear
    relaxation of the knapsack with choices); ties go to earlier blocks, whose recomputation finds the later ones' memory
    free. Then every block is given back what it does not need to give, the most expensive first. The usual uniform
    policies compete, so that none of them can be better by what was measured.
    """
    found = [modes for modes in _candidates(profile, budget_bytes) if profile.peak(modes) <= budget_bytes]
    if not found:
        return None
    return min((_trimmed(profile, modes, budget_bytes) for modes in found), key=profile.time)


def _candidates(profile: Profile, budget_bytes: float) -> Iterator[list[str]]:
    modes = [KEEP] * len(profile.costs)
    for block, mode in [(None, ""), *_upgrades(profile)]:
        if block is not None:
            modes = [mode if index == block else old for index, old in enumerate(modes)]
        if profile.peak(modes) <= budget_bytes:
            break
    yield modes
    for mode, every in ((WHOLE, 1), (WHOLE, 2), (WHOLE, 4), (OPERATORS, 1)):
        yield profile.uniform(mode, every)


def _upgrades(profile: Profile) -> list[tuple[int, str]]:
    """Steps from KEEP towards WHOLE, cheapest per byte first."""
    freed: list[dict[str, int]] = [{OPERATORS: 0, WHOLE: 0} for _ in profile.costs]
    for visits in profile.passes:
        for visit in visits:
            if visit.block is not None:
                for mode, bytes_ in freed[visit.block].items():
                    freed[visit.block][mode] = bytes_ + visit.inner_bytes - visit.held(mode)[0]
    steps = []
    for block, cost in enumerate(profile.costs):
        part, whole = freed[block][OPERATORS], freed[block][WHOLE]
        part_ns, whole_ns = cost.of(OPERATORS), cost.of(WHOLE)
        partial = part > 0 and part_ns < float("inf")
        if partial and (whole <= 0 or part_ns * whole < whole_ns * part):
            steps.append((part_ns / part, block, OPERATORS))
            if whole > part and part_ns < whole_ns < float("inf"):
                steps.append(((whole_ns - part_ns) / (whole - part), block, WHOLE))
        elif whole > 0 and whole_ns < float("inf"):
            steps.append((whole_ns / whole, block, WHOLE))
    return [(block, mode) for _, block, mode in sorted(steps, key=lambda step: step[:2])]


def _trimmed(profile: Profile, modes: list[str], budget_bytes: float) -> list[str]:
    """No block can be moved to a cheaper mode any more without breaking the budget."""
    modes = list(modes)
    for block in sorted(range(len(modes)), key=lambda index: -profile.costs[index].of(modes[index])):
        for cheaper in MODES[: MODES.index(modes[block])]:
            before = modes[block]
            if profile.costs[block].of(cheaper) > profile.costs[block].of(before):
                continue
            modes[block] = cheaper
            if profile.peak(modes) <= budget_bytes:
                break
            modes[block] = before
    return modes


def headline(profile: Profile, modes: Sequence[str]) -> str:
    plain, peak = profile.peak([KEEP] * len(modes)), profile.peak(modes)
    counts = [f"{modes.count(mode)} of {len(modes)} blocks {words}" for mode, words in
              ((WHOLE, "recomputed"), (OPERATORS, "recomputed but for products and attention")) if mode in modes]
    forward = sum(cost.whole_ns or 0.0 for cost in profile.costs)
    return (f"{' and '.join(counts)}: activations {_common.mebibytes(peak)} instead of {_common.mebibytes(plain)}, "
            f"for {profile.time(modes) / max(1.0, forward):.0%} of the blocks' forward time again")
