"""Drafts from the text itself: where the last few tokens stood before, what followed them then is proposed again.

Free, and right often where a text repeats itself: code, edits, answers that quote. After Saxena, "Prompt lookup
decoding" (2023).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from saturate.inference.generation.decode import Sequences
from saturate.inference.generation.sampling import Sampling


class Index:
    """Where each run of `shortest` to `longest` tokens of one growing text ended last."""

    def __init__(self, longest: int = 4, shortest: int = 2):
        self._sizes = range(longest, shortest - 1, -1)
        self._ends: dict[tuple[int, ...], int] = {}
        self._seen = 0

    def following(self, tokens: Sequence[int], count: int) -> list[int]:
        """`count` tokens that followed the latest earlier occurrence of the end of `tokens`, of the longest run that has
        one; none without. Where the text ends before, what followed is repeated: it was the period of a repetition.
        `tokens` may only have grown since the last call."""
        for end in range(self._seen, len(tokens)):              # runs that end before the last token
            for size in self._sizes:
                if end >= size:
                    self._ends[tuple(tokens[end - size:end])] = end
        self._seen = max(self._seen, len(tokens))
        for size in self._sizes:
            if len(tokens) > size and (end := self._ends.get(tuple(tokens[-size:]))) is not None:
                return [tokens[end + place % (len(tokens) - end)] for place in range(count)]
        return []


class PromptLookup:
    """A drafter that needs no model."""

    context = None
    name = "prompt lookup"
    quoted: Sequence[bool] = ()         # its quotes are its own drafts: they stand in the place of no other's

    def __init__(self, torch: Any, longest: int = 4, shortest: int = 2):
        self._torch, self._longest, self._shortest = torch, longest, shortest
        self._indexes: list[Index] = []

    def start(self, sequences: Sequences, capacity: int) -> None:
        self._indexes = [Index(self._longest, self._shortest) for _ in sequences.known]

    def propose(self, sequences: Sequences, length: int, sampling: Sampling, generator: Any) -> tuple[list[int], Any]:
        found = self.found(sequences, length)
        for row, drafts in enumerate(found):
            self.write(sequences, row, drafts)
        return [len(drafts) for drafts in found], None

    def found(self, sequences: Sequences, length: int) -> list[list[int]]:
        """Drafts of each row; none for one that is done."""
        return [[] if done else index.following(tokens, length)
                for index, tokens, done in zip(self._indexes, sequences.known, sequences.done)]

    def write(self, sequences: Sequences, row: int, drafts: list[int]) -> None:
        """Put them behind the row's tokens."""
        if drafts:
            start, ids = len(sequences.known[row]), sequences.ids
            ids[row, start:start + len(drafts)] = self._torch.tensor(drafts, device=ids.device)

    def settle(self, sequences: Sequences) -> None:
        """What was refused was never noted."""
