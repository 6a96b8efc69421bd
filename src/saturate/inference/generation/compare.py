"""Is it still the same text? Tokens of one way to generate against those of the plain loop, and two logits that are
too close to call."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

#: New tokens over the plain loop's, beyond which a way to generate answers shorter or longer rather than faster
#: (MLPerf's range).
LENGTHS = (0.9, 1.1)


@dataclass(frozen=True)
class Agreement:
    """Of greedy tokens. `tied` rows differ from where two logits were closer than rounding; `different` rows differ
    for no such reason, the first of them at token `at` of row `row`."""

    rows: int
    identical: int
    tied: int
    different: int
    tokens: int
    length_ratio: float
    row: int | None = None
    at: int | None = None
    margin: float | None = None

    @property
    def share(self) -> float:
        return self.identical / self.rows

    def words(self) -> str:
        if self.different:
            where = f"row {self.row} differs from the plain loop at token {self.at}"
            return f"{where}, where the two logits are {self.margin:.3g} apart"
        same = f"token-identical to the plain loop on {self.tokens} tokens"
        return same if not self.tied else f"{same}, but for {self.tied} of {self.rows} rows that part at a tie"


def agreement(
    prompts: Sequence[Sequence[int]],
    plain: Sequence[Sequence[int]],
    other: Sequence[Sequence[int]],
    tolerance: float,
    last_logits: Callable[[Sequence[int]], Any],
) -> Agreement:
    """last_logits(text): [vocabulary], of the model as it is, for the token that follows. Where a row first differs,
    its two tokens' logits there tell whether that was a tie, at most `tolerance` apart. What follows a tie is another
    text, and is not compared."""
    identical = tied = different = tokens = 0
    first: tuple[int | None, int | None, float | None] = (None, None, None)
    for row, (prompt, ours, theirs) in enumerate(zip(prompts, plain, other, strict=True)):
        at = next((i for i, (a, b) in enumerate(zip(ours, theirs)) if a != b), min(len(ours), len(theirs)))
        tokens += at
        if len(ours) == len(theirs) == at:
            identical += 1
            continue
        margin = float("inf")   # one ended, the other went on: no choice between two tokens explains that
        if at < min(len(ours), len(theirs)):
            logits = last_logits([*prompt, *ours[:at]])
            margin = float((logits[ours[at]] - logits[theirs[at]]).abs())
        if margin <= tolerance:
            tied += 1
        else:
            different += 1
            first = (row, at, margin) if first[0] is None else first
    ratio = sum(map(len, other)) / sum(map(len, plain))
    return Agreement(len(plain), identical, tied, different, tokens, ratio, *first)
