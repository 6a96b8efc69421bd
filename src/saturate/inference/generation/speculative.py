"""Drafts from a smaller model, and what can make it unfit to draft for a target."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from saturate.errors import UsageError
from saturate.inference.generation import sampling as choice
from saturate.inference.generation.decode import Sequences
from saturate.inference.generation.models import STEP_TOKENS, Decoder
from saturate.inference.generation.prompt_lookup import PromptLookup
from saturate.inference.generation.sampling import Sampling

#: Share of drafts that stay, before anything was seen; and how much of what is known gives way to each round.
_UNKNOWN, _STEP = 0.7, 0.25


#: The numbers of tokens that a compiled draft is fed at the head of a round.
COMPILED_COUNTS = (1, 2, 4, 8, STEP_TOKENS)


def filled_up(count: int, counts: tuple[int, ...], room: int) -> int:
    """The least of `counts` (ascending) that holds `count` tokens, or `count` itself where none does, or where the shortest row has
    not as many (`room`): what is fed beyond `count` are tokens that the cache holds already.

    >>> [filled_up(count, (1, 2, 4, 8, 16), 12) for count in (1, 3, 5, 9, 17)]
    [1, 4, 8, 9, 17]
    """
    return next((one for one in counts if count <= one <= room), count)


class ModelDrafter:
    """Drafts with a model, one token at a time. vocabulary: how many logits the target has; the draft's are cut or
    filled up to that. known_tokens: how many numbers of tokens the draft can look up; None: not known. Others are shown to it as
    the last of them: what it then drafts will hardly stay, but no text can end it. counts: numbers of tokens that what the
    target added is filled up to, where each number costs a compilation; empty: it is fed as it is."""

    quoted: Sequence[bool] = ()

    def __init__(self, torch: Any, decoder: Decoder, vocabulary: int, known_tokens: int | None = None,
                 counts: tuple[int, ...] = ()):
        self.name, self.context = decoder.name, decoder.context
        self._torch, self._decoder, self._vocabulary = torch, decoder, vocabulary
        self._known_tokens = None if known_tokens is None or known_tokens >= vocabulary else known_tokens
        self._counts = counts
        self._held: list[int] = []              # tokens that the draft's cache holds, by row

    def start(self, sequences: Sequences, capacity: int) -> None:
        rows, longest = len(sequences.known), max(sequences.prompt)
        self._decoder.start(rows, capacity)
        self._held = [0] * rows
        if self.context is None or longest <= self.context:
            self._decoder.feed(self._shown(sequences.ids), [0] * rows, longest, keep=1)
            self._held = list(sequences.prompt)

    def propose(self, sequences: Sequences, length: int, sampling: Sampling, generator: Any) -> tuple[list[int], Any]:
        torch, ids = self._torch, sequences.ids
        known = sequences.heads()
        # What the target added is fed first. Rows that lack less than others feed more than they need.
        lacking = [tokens - held for tokens, held, done in zip(known, self._held, sequences.done) if not done]
        count = filled_up(max(lacking), self._counts, min(known))
        starts = [max(0, tokens - count) for tokens in known]
        logits = self._decoder.feed(self._shown(ids), starts, count)
        rows = torch.arange(len(known), device=ids.device)
        logits = logits[
            rows, torch.tensor([tokens - start - 1 for tokens, start in zip(known, starts)], device=ids.device)
        ]
        drawn, q = [], []
        at = torch.tensor(known, device=ids.device).unsqueeze(1)
        for place in range(length):
            logits = self._fit(logits)
            if sampling.greedy:
                token = logits.argmax(-1)
            else:
                # Where its logits are no numbers it guesses: any distribution is one to draw drafts from.
                q.append(choice.distribution(torch, logits, sampling).nan_to_num_(1 / self._vocabulary))
                token = choice.draw(torch, q[-1], generator)
            drawn.append(token)
            ids.scatter_(1, at + place, token.unsqueeze(1))
            if place + 1 < length:
                logits = self._decoder.feed(self._shown(ids), [tokens + place for tokens in known], 1)[:, 0]
        self._held = [tokens + length - 1 for tokens in known]
        return [0 if done else length for done in sequences.done], torch.stack(q, 1) if q else None

    def settle(self, sequences: Sequences) -> None:
        """What did not stay is forgotten, at once: rounds without drafts may follow, and would hide it."""
        self._held = [min(held, tokens - 1) for held, tokens in zip(self._held, sequences.lengths)]

    def overwritten(self, row: int, start: int) -> None:
        """From place `start` on other tokens stand in a row than it drafted: what its cache holds from there on is of no use."""
        self._held[row] = min(self._held[row], start)

    def _shown(self, ids: Any) -> Any:
        return ids if self._known_tokens is None else ids.clamp(max=self._known_tokens - 1)

    def _fit(self, logits: Any) -> Any:
        """To the target's vocabulary: what the draft cannot say has no chance."""
        lacking = self._vocabulary - logits.shape[-1]
        if lacking <= 0:
            return logits[..., :self._vocabulary]
        return self._torch.cat([logits, logits.new_full((*logits.shape[:-1], lacking), float("-inf"))], -1)


class QuotingDrafter:
    """A draft model, and in its place the text itself for rows that repeat themselves, as long as that was right more
    often: repetition is what small models guess worst, and it costs nothing to look up."""

    def __init__(self, model: ModelDrafter, lookup: PromptLookup):
        self.name, self.context = model.name, model.context
        self.quoted: Sequence[bool] = ()
        self._model, self._lookup = model, lookup
        self._right: list[dict[bool, float]] = []       # by row and by whether quoted: share that stayed, of late
        self._proposed: list[tuple[bool, int, list[int]]] = []      # quoted, from which place on, tokens

    def start(self, sequences: Sequences, capacity: int) -> None:
        self._model.start(sequences, capacity)
        self._lookup.start(sequences, capacity)
        self._right = [{True: _UNKNOWN, False: _UNKNOWN} for _ in sequences.known]
        self._proposed = []

    def propose(self, sequences: Sequences, length: int, sampling: Sampling, generator: Any) -> tuple[list[int], Any]:
        quotes = [drafts if right[True] >= right[False] else []
                  for drafts, right in zip(self._lookup.found(sequences, length), self._right)]
        alone = all(drafts or done for drafts, done in zip(quotes, sequences.done))
        counts, q, own = [0] * len(quotes), None, [[] for _ in quotes]
        if not alone:
            if not sampling.greedy:     # the distribution of a batch's drafts is one
                quotes = [[] for _ in quotes]
            counts, q = self._model.propose(sequences, length, sampling, generator)
            own = _written(sequences, counts)
        for row, drafts in enumerate(quotes):
            self._lookup.write(sequences, row, drafts)
            if drafts and own[row]:
                self._model.overwritten(row, len(sequences.known[row]) + _alike(drafts, own[row]))
            counts[row] = len(drafts) or counts[row]
        self.quoted = [bool(drafts) for drafts in quotes]
        self._proposed = [(bool(drafts), len(known), drafts or drafted)
                          for known, drafts, drafted in zip(sequences.known, quotes, own)]
        return counts, q

    def settle(self, sequences: Sequences) -> None:
        self._model.settle(sequences)
        for (quoted, start, tokens), right, known in zip(self._proposed, self._right, sequences.known):
            came = known[start:start + len(tokens)]
            if tokens and came:
                stayed = _alike(tokens, came)
                right[quoted] += _STEP * (stayed / min(len(tokens), stayed + 1) - right[quoted])
        self._proposed = []


def _written(sequences: Sequences, counts: list[int]) -> list[list[int]]:
    """What stands behind each row's tokens, as many as `counts`. One transfer from the device."""
    return [row[len(known):len(known) + count] for row, known, count in zip(sequences.ids.tolist(), sequences.known, counts)]


def _alike(one: Sequence[int], other: Sequence[int]) -> int:
    """How many tokens two texts begin with alike."""
    return next((place for place, (first, second) in enumerate(zip(one, other)) if first != second), min(len(one), len(other)))


def refuse_unfit(
    target: str, target_width: int, draft: str, draft_width: int, tokenizers: tuple[Any, Any] | None
) -> None:
    """Raise UsageError where the tokens of a draft are not the target's. tokenizers: (target's, draft's), anything
    with `get_vocab()` or a mapping from text to number. With equal ones the widths of the logits may differ: models
    pad them."""
    if tokenizers is None:
        if target_width != draft_width:
            raise UsageError(
                f"the draft {draft} has a vocabulary of {draft_width} tokens, the target {target} of {target_width}",
                cause="a drafted number would mean another token to the target",
                remedy="choose a draft with the target's tokenizer; where both have the same and pad differently, "
                "pass tokenizers=(target's, draft's)",
            )
        return
    ours, theirs = (dict(known.get_vocab() if hasattr(known, "get_vocab") else known) for known in tokenizers)
    different = sorted(text for text in ours.keys() | theirs.keys() if ours.get(text) != theirs.get(text))
    if different:
        first = different[0]
        raise UsageError(
            f"the tokenizers of {target} and {draft} differ in {len(different)} of {len(ours)} tokens",
            evidence=f"{first!r} is {ours.get(first)} to the target and {theirs.get(first)} to the draft",
            remedy="choose a draft with the target's tokenizer",
        )
