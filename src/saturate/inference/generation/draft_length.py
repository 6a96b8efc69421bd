"""How many tokens to draft: what gives the most tokens per second, from what was accepted and what a round costs.

A round drafts k tokens and verifies them in one forward of the target. With a_i the chance that the i-th draft stays,
given that those before it did, it gives 1 + a_1 + a_1 a_2 + ... + a_1 ... a_k tokens (Leviathan et al., "Fast
inference from transformers via speculative decoding", ICML 2023; there all a_i are one number). What it costs is
measured, for the model, the batch and the machine at hand: verifying several tokens is not always as cheap as one. And where a round
ends at two logits that cannot be told apart (in 16 bits, often), a plain step of the whole batch has to follow, which is a part of its cost.
Standard library only; pure arithmetic.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

#: Share by which what was seen counts less after every round: text changes.
FORGET = 0.02

#: For how many drafts the mean over all places counts at a place of which little is known.
PRIOR_DRAFTS = 4.0

#: Acceptance that is assumed before anything was seen, for as many drafts.
FIRST_GUESS = 0.7

#: Steps from giving drafts up to trying one again: twice as many each time that it did not pay, at most the second.
FIRST_PAUSE, LONGEST_PAUSE = 4, 32


def expected_tokens(acceptance: Sequence[float]) -> float:
    """Tokens of a round with len(acceptance) drafts, the one that always follows included."""
    total, reached = 1.0, 1.0
    for chance in acceptance:
        reached *= chance
        total += reached
    return total


@dataclass(frozen=True)
class Costs:
    """Nanoseconds of a round by the number of drafted tokens: drafting, and everything else. `lengths` begins with 0,
    a plain step, and ascends; between its entries cost is linear, beyond the last it goes on as it ended."""

    lengths: tuple[int, ...]
    draft_ns: tuple[float, ...]
    verify_ns: tuple[float, ...]

    def relative(self, length: int) -> float:
        """Of a round, in plain steps."""
        return self._at(self.draft_ns, length) / self.verify_ns[0] + self.verify(length)

    def verify(self, length: int) -> float:
        """Of its verification, in plain steps."""
        return self._at(self.verify_ns, length) / self.verify_ns[0]

    @property
    def ratio(self) -> float:
        """Of one drafted token to one plain step, at the longest round measured."""
        return self.draft_ns[-1] / self.lengths[-1] / self.verify_ns[0]

    def _at(self, values: Sequence[float], length: int) -> float:
        above = next((i for i, known in enumerate(self.lengths) if known >= length), len(self.lengths) - 1)
        if above == 0:
            return values[0]
        slope = (values[above] - values[above - 1]) / (self.lengths[above] - self.lengths[above - 1])
        return values[above - 1] + slope * (length - self.lengths[above - 1])


@dataclass
class DraftLength:
    """Chooses the next round's length among `choices` (ascending, without 0). `may_stop`: 0, no drafts, is a choice
    too, with a probe now and then."""

    costs: Costs
    choices: tuple[int, ...]
    may_stop: bool = True
    _stayed: list[float] = field(default_factory=list)      # by place: drafts that stayed, and that were judged
    _judged: list[float] = field(default_factory=list)
    _rows: int = 1                                          # of the latest round
    _looked: float = 0.0                                    # places of rows that were looked at, and those where two logits tied
    _ties: float = 0.0
    _idle: int = 0
    _pause: int = FIRST_PAUSE
    _known: dict[int, tuple[int, float]] = field(default_factory=dict)      # by room: best length, speed-up

    def observe(self, counts: Sequence[int], stayed: Sequence[int], unsure: Sequence[bool] = ()) -> None:
        """After a round: how many drafts each row had, and how many of them stayed. What comes behind the first that
        did not was not judged. unsure: rows whose next token a plain step has to decide."""
        self._known.clear()
        self._rows = len(counts)
        self._looked = self._looked * (1 - FORGET) + sum(stayed) + len(stayed)
        self._ties = self._ties * (1 - FORGET) + sum(unsure)
        self._stayed = [value * (1 - FORGET) for value in self._stayed]
        self._judged = [value * (1 - FORGET) for value in self._judged]
        for count, kept in zip(counts, stayed):
            for place in range(min(count, kept + 1)):
                while place >= len(self._judged):
                    self._judged.append(0.0)
                    self._stayed.append(0.0)
                self._judged[place] += 1
                self._stayed[place] += place < kept

    def acceptance(self, length: int) -> list[float]:
        """Estimated chances by place."""
        mean = (sum(self._stayed) + PRIOR_DRAFTS * FIRST_GUESS) / (sum(self._judged) + PRIOR_DRAFTS)
        padded = [*zip(self._stayed, self._judged), *[(0.0, 0.0)] * length][:length]
        return [(kept + PRIOR_DRAFTS * mean) / (judged + PRIOR_DRAFTS) for kept, judged in padded]

    def speedup(self, length: int) -> float:
        """Tokens per time of rounds with `length` drafts, over plain steps. A row that is unsure gets no token behind its drafts, and all get
        one of the plain step that follows."""
        tokens = expected_tokens(self.acceptance(length))       # as many places are looked at
        tied = min(1.0, tokens * self._ties / (self._looked + PRIOR_DRAFTS))
        follows = 1 - (1 - tied) ** self._rows
        return (tokens - tied + follows) / (self.costs.relative(length) + follows)

    def choose(self, room: int) -> int:
        """At most `room`."""
        room = min(room, self.choices[-1])
        if room not in self._known:     # steps without drafts teach nothing, and must not pay for thinking
            possible = {length: self.speedup(length) for length in self.choices if length <= room}
            best = max(possible, key=lambda length: possible[length], default=0)
            self._known[room] = best, possible.get(best, 0.0)
        best, speedup = self._known[room]
        if not best:
            return 0
        if not self.may_stop or speedup > 1:
            self._idle, self._pause = 0, FIRST_PAUSE
            return best
        self._idle += 1
        if self._idle < self._pause:
            return 0
        self._idle, self._pause = 0, min(2 * self._pause, LONGEST_PAUSE)
        return best


def predicted(acceptance_rate: float, costs: Costs, choices: Sequence[int]) -> tuple[int, float]:
    """The best length, and its speed-up over plain steps, if every draft stays with `acceptance_rate`."""
    found = {length: expected_tokens([acceptance_rate] * length) / costs.relative(length) for length in choices}
    best = max(found, key=lambda length: found[length])
    return best, found[best]
