"""The loop that generates: a prefill, then rounds. A round drafts some tokens (none without a drafter), has the
target verify them in one forward, and keeps what the target would have chosen.

Rows of a batch are at positions of their own: each accepts what it accepts, and one that ends early stands still
while the others go on. The cache always holds all tokens but the last of every row; the last is fed at the head of
the next round.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

from saturate.errors import UsageError
from saturate.inference.generation import sampling as choice
from saturate.inference.generation.draft_length import Costs, DraftLength
from saturate.inference.generation.models import Decoder, without_gradients
from saturate.inference.generation.sampling import Sampling

Batch = Sequence[Sequence[int]]


@dataclass(frozen=True)
class Request:
    """What is asked of one batch. eos: tokens that end a row; they are part of what is returned."""

    max_new_tokens: int
    sampling: Sampling = choice.GREEDY
    eos: frozenset[int] = frozenset()

    def __post_init__(self) -> None:
        """Raises UsageError for what is no number of tokens, no sampling, and for ends that are no tokens."""
        if not isinstance(self.sampling, Sampling):
            raise UsageError(f"sampling is {type(self.sampling).__name__}", remedy="saturate.generation.Sampling(temperature=..., top_k=..., top_p=...), "
                             "or None for greedy")
        if not choice.whole(self.max_new_tokens) or self.max_new_tokens < 1:
            raise UsageError(f"max_new_tokens {self.max_new_tokens!r}", remedy="a whole number, at least 1")
        if not all(map(choice.whole, self.eos)):
            raise UsageError(f"eos {sorted(map(str, self.eos))}", remedy="numbers of tokens that end a text")
        # numpy's numbers cannot be stored in an artifact
        object.__setattr__(self, "max_new_tokens", int(self.max_new_tokens))
        object.__setattr__(self, "eos", frozenset(map(int, self.eos)))

    def like(self, max_new_tokens: int | None, seed: int | None) -> Request:
        """The same with another number of tokens, or another seed."""
        sampling = self.sampling if seed is None else replace(self.sampling, seed=seed)
        return replace(self, max_new_tokens=self.max_new_tokens if max_new_tokens is None else max_new_tokens, sampling=sampling)


@dataclass
class Run:
    """One batch, generated. `tokens` are the new ones of each row. Times end when the device is done."""

    tokens: list[list[int]]
    prompt_tokens: int
    prefill_ns: int = 0
    decode_ns: int = 0
    steps: int = 0                      # forwards of the target after the prefill
    drafted: int = 0                    # tokens, by the draft
    judged: int = 0                     # drafted tokens up to the first of a round that did not stay
    stayed: int = 0
    quoted: int = 0                     # the same three of what the text itself gave in the draft's place
    quoted_judged: int = 0
    quoted_stayed: int = 0
    rounds: int = 0                     # steps with drafts, or quotes
    row_rounds: int = 0                 # the same, counted by row
    row_tokens: int = 0                 # that these gave their rows: none behind drafts of a row that is unsure, or ended by them
    ties: int = 0                       # rows whose next token a forward of one token had to decide

    @property
    def new_tokens(self) -> int:
        return sum(map(len, self.tokens))

    @property
    def total_ns(self) -> int:
        return self.prefill_ns + self.decode_ns

    @property
    def acceptance_rate(self) -> float | None:
        """Chance that a token of the draft stays, given that those before it did. None: nothing was drafted."""
        return self.stayed / self.judged if self.judged else None

    @property
    def quoted_acceptance_rate(self) -> float | None:
        """The same, of tokens that were quoted in the draft's place."""
        return self.quoted_stayed / self.quoted_judged if self.quoted_judged else None

    def count(self, proposed: int, judged: int, stayed: int, *, quoted: bool) -> None:
        """One row's drafts, or quotes, of one round."""
        if quoted:
            self.quoted, self.quoted_judged, self.quoted_stayed = (
                self.quoted + proposed, self.quoted_judged + judged, self.quoted_stayed + stayed)
        else:
            self.drafted, self.judged, self.stayed = self.drafted + proposed, self.judged + judged, self.stayed + stayed


class Sequences:
    """The tokens of a batch, prompts first. `ids` [rows, capacity] is on the device; behind a row's length it holds
    drafts, or anything."""

    def __init__(self, torch: Any, prompts: Sequence[Sequence[int]], request: Request, capacity: int, device: Any):
        self.known = [list(prompt) for prompt in prompts]
        self.prompt = [len(prompt) for prompt in prompts]
        self.limit = [length + request.max_new_tokens for length in self.prompt]
        self.done = [False] * len(prompts)
        self._eos = request.eos
        padded = [row + [row[-1]] * (capacity - len(row)) for row in self.known]
        self.ids = torch.tensor(padded, dtype=torch.long, device=device)

    @property
    def lengths(self) -> list[int]:
        return [len(row) for row in self.known]

    def heads(self) -> list[int]:
        """Lengths at which the next round begins. A row that is done goes on behind the longest that is not, or it
        could leave the model's context; what it computes there is not looked at."""
        longest = max((len(row) for row, done in zip(self.known, self.done) if not done), default=len(self.known[0]))
        return [min(len(row), longest) for row in self.known]

    def room(self) -> int:
        """Drafts that could still be of use to a row: what follows them is one token more."""
        return max(limit - len(row) - 1 for row, limit, done in zip(self.known, self.limit, self.done) if not done)

    def append(self, row: int, tokens: Sequence[int]) -> None:
        """Up to the row's limit, or to the first token that ends it."""
        for token in tokens:
            if self.done[row]:
                return
            self.known[row].append(token)
            self.done[row] = token in self._eos or len(self.known[row]) >= self.limit[row]


class Drafter(Protocol):
    """Proposes what may come next. `quoted`: whether what it last proposed for a row came from the text, in the place
    of its own; empty: for none."""

    context: int | None
    quoted: Sequence[bool]

    def start(self, sequences: Sequences, capacity: int) -> None:
        """A new batch; the prompts are known."""

    def propose(self, sequences: Sequences, length: int, sampling: Sampling, generator: Any) -> tuple[list[int], Any]:
        """Write up to `length` drafts of row i into sequences.ids from its length on. Returns how many each row got,
        and the distributions they were drawn from, [rows, length, vocabulary]; None: certain, or greedy."""

    def settle(self, sequences: Sequences) -> None:
        """A round is over: `sequences` are what stayed of it."""


@dataclass
class Round:
    """One forward of the target and what it decided."""

    counts: list[int]                   # drafts by row
    stayed: list[int]
    unsure: list[bool]
    tokens: list[list[int]]             # by row: drafts that stayed, and unless unsure the token that follows them
    draft_ns: int = 0
    verify_ns: int = 0


@dataclass
class Loop:
    """A target with its drafter, ready to generate. `tolerance`: see proof.py. `choices`: lengths of drafts to choose
    from; a single one is always taken."""

    torch: Any
    target: Decoder
    drafter: Drafter | None = None
    tolerance: float = 0.0
    costs: Costs | None = None
    choices: tuple[int, ...] = (1, 2, 3, 4, 5, 6, 8, 10)
    may_stop: bool = True
    clock: Callable[[], int] = time.perf_counter_ns     # nanoseconds
    inference: bool = False             # see `models.without_gradients`
    price: Callable[[Batch, Request], Costs | None] | None = None   # measures the costs on a batch; None: lengths are not chosen by them
    known_tokens: int | None = None     # how many numbers of tokens the target can look up; None: not known
    fits: Callable[[list[int], int], None] = lambda lengths, most: None     # refuses prompts of these lengths, texts of at most so many tokens
    behind_window: Callable[[Batch], float] | None = None   # proves, once, how it is called behind its sliding window
    _generator: Any = field(default=None, repr=False)

    def generate(self, prompts: Sequence[Sequence[int]], request: Request) -> Run:
        """Prompts of any lengths, each with at least one token. Raises UsageError where they, or what is asked for,
        do not fit the model, and where its logits are not finite."""
        with without_gradients(self.torch, self.inference):
            self.check(prompts, request)
            if self.price is not None and self.costs is None:       # no batch before had room for a draft
                self.costs = self.price(prompts, request)
            started = self._now()
            sequences = self.prefill(prompts, request)
            run = Run([], sum(sequences.prompt), prefill_ns=self._now() - started)
            started = self._now()
            self._decode(sequences, request, run)
            run.decode_ns = self._now() - started
        run.tokens = [row[start:] for row, start in zip(sequences.known, sequences.prompt)]
        return run

    def generate_all(self, batches: Sequence[Batch], request: Request) -> list[Run]:
        """The batches of one call."""
        return [self.generate(batch, replace(request, sampling=request.sampling.of_batch(number)))
                for number, batch in enumerate(batches)]

    def prefill(self, prompts: Sequence[Sequence[int]], request: Request) -> Sequences:
        """All prompts through the target, and the first new token of each."""
        longest = self.check(prompts, request)
        capacity = self._capacity(longest, request)
        self._generator = self.torch.Generator(self.target.device).manual_seed(request.sampling.seed)
        sequences = Sequences(self.torch, prompts, request, capacity, self.target.device)
        self.target.start(len(prompts), capacity)
        alike = min(sequences.prompt) == longest
        logits = self.target.feed(sequences.ids, [0] * len(prompts), longest, keep=1 if alike else None)
        rows = self.torch.arange(len(prompts), device=logits.device)
        behind = self.torch.tensor(sequences.prompt, device=logits.device) - (longest - logits.shape[1]) - 1
        self._accept(sequences, logits[rows, behind].unsqueeze(1), [0] * len(prompts), None, request, append=True)
        if self.drafter is not None:
            self.drafter.start(sequences, capacity)
        return sequences

    def round(self, sequences: Sequences, length: int, request: Request, append: bool = True) -> Round:
        """Draft, verify, accept. append False: only look; the sequences stay as they are."""
        began = self._now() if not append else 0
        counts, q = [0] * len(sequences.known), None
        if length:
            assert self.drafter is not None
            counts, q = self.drafter.propose(sequences, length, request.sampling, self._generator)
        length = max(counts)
        drafted = self._now() if not append else 0
        logits = self.target.feed(sequences.ids, [known - 1 for known in sequences.heads()], length + 1)
        found = self._accept(sequences, logits, counts, q, request, append)
        if not append:
            found.draft_ns, found.verify_ns = drafted - began, self._now() - drafted
        elif self.drafter is not None:
            self.drafter.settle(sequences)
        return found

    def _decode(self, sequences: Sequences, request: Request, run: Run) -> None:
        lengths = (
            None
            if self.drafter is None or self.costs is None
            else DraftLength(self.costs, self.choices, self.may_stop)
        )
        unpriced = self.may_stop and self.price is not None and self.costs is None     # nobody knows whether drafts pay
        plain = False
        while not all(sequences.done):
            active, before = [not done for done in sequences.done], sequences.lengths
            length = 0
            if self.drafter is not None and not plain and not unpriced:
                room = self._room(sequences)
                length = lengths.choose(room) if lengths is not None else min(self.choices[-1], room)
            found = self.round(sequences, length, request)
            plain = any(tie and row for tie, row in zip(found.unsure, active))
            rows = [row for row, working in enumerate(active) if working]
            counts, stayed = [found.counts[row] for row in rows], [found.stayed[row] for row in rows]
            if lengths is not None and any(counts):
                lengths.observe(counts, stayed, [found.unsure[row] for row in rows])
            run.steps += 1
            run.rounds += any(counts)
            run.row_rounds += sum(count > 0 for count in counts)
            run.ties += sum(found.unsure[row] for row in rows)
            quoted = self.drafter.quoted if self.drafter is not None else ()
            for row, count, kept in zip(rows, counts, stayed):
                added = len(sequences.known[row]) - before[row]     # an end within what stayed cuts off the rest
                run.row_tokens += added * (count > 0)
                judged = min(count, kept + (not found.unsure[row]), added)
                run.count(count, judged, min(kept, added), quoted=bool(quoted) and quoted[row])

    def _accept(
        self, sequences: Sequences, logits: Any, counts: list[int], q: Any, request: Request, append: bool
    ) -> Round:
        """Logits [rows, k + 1, vocabulary] -> what stays. One transfer from the device."""
        torch, length = self.torch, logits.shape[1] - 1
        known = torch.tensor(sequences.heads(), device=logits.device).unsqueeze(1)
        places = known + torch.arange(length + 1, device=logits.device)
        drafted = sequences.ids.gather(1, places)
        rows, finite = len(counts), logits.amax((1, 2)).isfinite()
        unsure = torch.zeros(rows, dtype=torch.bool, device=logits.device)
        real = torch.tensor(counts, device=logits.device)
        if request.sampling.greedy and not length:
            stay, following = torch.zeros_like(real), logits[:, 0].argmax(-1)
        elif request.sampling.greedy:
            stay, following, unsure = choice.accept_greedy(torch, logits, drafted[:, :length], real, self.tolerance)
        else:
            # Where logits are not finite, anything may be drawn: the row is refused below.
            p = choice.distribution(torch, logits, request.sampling).nan_to_num_(1.0)
            if length:
                stay, following = choice.accept_sampled(
                    torch, p, None if q is None else q[:, :length], drafted[:, :length], real, self._generator
                )
            else:
                stay, following = torch.zeros_like(real), choice.draw(torch, p[:, 0], self._generator)
        if append:
            sequences.ids.scatter_(1, places.gather(1, stay.unsqueeze(1)), following.unsqueeze(1))
        head = torch.stack([finite.long(), stay, following, unsure.long()], 1)
        answer = torch.cat([head, drafted[:, :length]], 1).tolist()
        if not all(row[0] for row, done in zip(answer, sequences.done) if not done):
            raise UsageError(
                f"the logits of {self.target.name} are not finite", remedy="check the weights and their dtype"
            )
        found = Round(counts, [row[1] for row in answer], [bool(row[3]) for row in answer],
                      [row[4:4 + row[1]] + ([] if row[3] else [row[2]]) for row in answer])
        if append:
            for row, tokens in enumerate(found.tokens):
                sequences.append(row, tokens)
        return found

    def _room(self, sequences: Sequences) -> int:
        """How many drafts fit: into what is still asked for, and into the contexts of both models."""
        longest = max(known for known, done in zip(sequences.lengths, sequences.done) if not done)
        assert self.drafter is not None
        contexts = [
            context - longest for context in (self.target.context, self.drafter.context) if context is not None
        ]
        return max(0, min([sequences.room(), *contexts]))

    def check(self, prompts: Sequence[Sequence[int]], request: Request) -> int:
        """The longest prompt's tokens. Raises UsageError where the batch does not fit the model; where it is the first
        that leaves the model's sliding window, also where it cannot be called rightly there."""
        if not prompts or not all(prompts):
            raise UsageError(
                "an empty prompt", remedy="every prompt needs at least one token, such as the one that begins a text"
            )
        most = float("inf") if self.known_tokens is None else self.known_tokens - 1
        for row, prompt in enumerate(prompts):      # on a GPU, looking up another would end the process
            if min(prompt) < 0 or max(prompt) > most:
                raise UsageError(
                    f"prompt {row} holds token {min(prompt) if min(prompt) < 0 else max(prompt)}; "
                    f"{self.target.name} knows 0 to {most}",
                    remedy="use the tokenizer that belongs to the model",
                )
        longest, context = max(map(len, prompts)), self.target.context
        if context is not None and longest + request.max_new_tokens > context:
            raise UsageError(
                f"{longest} tokens of prompt and {request.max_new_tokens} new ones; "
                f"{self.target.name} takes {context}{self.target.context_words}",
                remedy="shorten the prompts, or lower max_new_tokens",
            )
        self.fits([len(prompt) for prompt in prompts], self._capacity(longest, request))
        window = self.target.window if self.behind_window is not None else None
        if self.behind_window is not None and window is not None and self._capacity(longest, request) > window:
            self.tolerance = max(self.tolerance, self.behind_window(prompts))
            self.behind_window = None
        return longest

    def _capacity(self, longest: int, request: Request) -> int:
        """Tokens of the longest sequence, with drafts that may not stay."""
        return longest + request.max_new_tokens + (max(self.choices) if self.drafter is not None else 0) + 1

    def _now(self) -> int:
        """Nanoseconds, with nothing outstanding on the device."""
        if str(self.target.device).startswith("cuda"):
            self.torch.cuda.synchronize(self.target.device)
        return self.clock()
