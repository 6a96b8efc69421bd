"""What generation costs: prefill and decode apart, rounds by their number of drafts, and two loops against each
other."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from statistics import median
from typing import Any

from saturate.inference.generation.decode import Batch, Loop, Request, Run, Sequences
from saturate.inference.generation.draft_length import Costs, predicted
from saturate.inference.generation.models import without_gradients
from saturate.inference.generation.sampling import Sampling
from saturate.measure.race import Estimate, estimate
from saturate.records.generation import GenerationTiming, SpeculationRecord

#: A race ends after so many rounds, or when its time is over, but not before the first number of them.
FEWEST_ROUNDS, MOST_ROUNDS = 3, 8

_REPEATS = 5


def costs(loop: Loop, batch: Batch, request: Request) -> Costs | None:
    """Of rounds without drafts and with a few numbers of them, taken in turns after the prefill of `batch`.
    None where the model's context has no room for a draft."""
    assert loop.drafter is not None
    torch = loop.torch
    probe = replace(loop, drafter=_Always(loop.drafter))
    endless, longest = replace(request, eos=frozenset(), max_new_tokens=max(2, request.max_new_tokens)), max(map(len, batch))
    if loop.target.context is not None and longest + endless.max_new_tokens > loop.target.context:
        return None         # one new token has room, and no draft of it
    contexts = [context for context in (loop.target.context, loop.drafter.context) if context is not None]
    room = min((context - longest - 1 for context in contexts), default=max(loop.choices))      # behind the first new token
    lengths = sorted(
        {
            length
            for length in (loop.choices[0], loop.choices[len(loop.choices) // 2], loop.choices[-1])
            if length <= room
        }
    )
    if not lengths:
        return None
    with without_gradients(torch, loop.inference):
        sequences = probe.prefill(batch, endless)
        found: dict[int, list[tuple[int, int]]] = {length: [] for length in (0, *lengths)}
        for _ in range(_REPEATS + 1):
            for length, times in found.items():
                loop.drafter.settle(sequences)
                seen = probe.round(sequences, length, endless, append=False)
                times.append((seen.draft_ns, seen.verify_ns))
    # The least of each: a round does the same work every time, and what else runs on the machine only adds to it.
    least = {length: tuple(min(column) for column in zip(*times)) for length, times in found.items()}
    drafts, verifies = zip(*least.values())
    return Costs(tuple(least), drafts, verifies)


class _Always:
    """A drafter that has as many drafts as were asked for: what stands in `ids` fills up. For the cost, not for the
    tokens."""

    quoted: Sequence[bool] = ()

    def __init__(self, drafter: Any):
        self._drafter, self.context = drafter, drafter.context

    def start(self, sequences: Sequences, capacity: int) -> None:
        self._drafter.start(sequences, capacity)

    def propose(self, sequences: Sequences, length: int, sampling: Sampling, generator: Any) -> tuple[list[int], Any]:
        _, q = self._drafter.propose(sequences, length, sampling, generator)
        return [length] * len(sequences.known), q

    def settle(self, sequences: Sequences) -> None:
        self._drafter.settle(sequences)


def race(a: Callable[[Batch], Run], b: Callable[[Batch], Run], batches: Sequence[Batch], seconds: float = math.inf,
         most: int = MOST_ROUNDS) -> tuple[Estimate, list[Run], list[Run]]:
    """ln(time of A / time of B) per new token, with its interval, and all runs."""
    ratios, before, after = rounds(a, b, batches, seconds, most)
    return estimate([ratios]), before, after


def rounds(a: Callable[[Batch], Run], b: Callable[[Batch], Run], batches: Sequence[Batch], seconds: float = math.inf,
           most: int = MOST_ROUNDS) -> tuple[list[float], list[Run], list[Run]]:
    """ln(time of A / time of B) per new token of each round, and all runs. In each round both generate from the same
    batch, one after the other, in turns first."""
    ended = time.monotonic() + seconds
    ratios: list[float] = []
    runs: tuple[list[Run], list[Run]] = ([], [])
    while len(ratios) < FEWEST_ROUNDS or (len(ratios) < most and time.monotonic() < ended):
        batch = batches[len(ratios) % len(batches)]
        order = (0, 1) if len(ratios) % 2 == 0 else (1, 0)
        for side in order:
            runs[side].append((a, b)[side](batch))
        ratios.append(math.log(_ns_per_token(runs[0][-1]) / _ns_per_token(runs[1][-1])))
    return ratios, *runs


def timing(runs: Sequence[Run]) -> GenerationTiming:
    """Of at least one run."""
    behind = [(run.new_tokens - len(run.tokens), run.decode_ns) for run in runs]
    tokens, decode_ns = map(sum, zip(*behind))
    return GenerationTiming(
        prefill_ms=median(run.prefill_ns for run in runs) / 1e6,
        prefill_ms_per_token=sum(run.prefill_ns for run in runs) / sum(run.prompt_tokens for run in runs) / 1e6,
        decode_ms_per_token=decode_ns / tokens / 1e6 if tokens else None,
        decode_tokens_per_s=tokens / decode_ns * 1e9 if tokens else None,
        tokens_per_s=sum(run.new_tokens for run in runs) / sum(run.total_ns for run in runs) * 1e9,
        runs=len(runs),
    )


def speculation(name: str, runs: Sequence[Run], found: Costs | None, choices: Sequence[int]) -> SpeculationRecord:
    """How drafts fared in `runs`."""
    names = ("drafted", "judged", "stayed", "quoted", "quoted_judged", "quoted_stayed", "row_rounds", "row_tokens")
    total = {name: sum(getattr(run, name) for run in runs) for name in names}
    rounds = total["row_rounds"]
    rate = total["stayed"] / total["judged"] if total["judged"] else None
    length, speedup = (None, None) if found is None or rate is None else predicted(rate, found, choices)
    return SpeculationRecord(
        drafter=name,
        acceptance_rate=rate,
        quoted_acceptance_rate=total["quoted_stayed"] / total["quoted_judged"] if total["quoted_judged"] else None,
        quoted_share=total["quoted"] / (total["quoted"] + total["drafted"]) if rounds else None,
        tokens_per_round=total["row_tokens"] / rounds if rounds else None,
        draft_length=(total["drafted"] + total["quoted"]) / rounds if rounds else None,
        cost_ratio=None if found is None else found.ratio,
        verify_ratio=None if found is None else found.verify(found.lengths[-1]),
        predicted_speedup=speedup,
        predicted_length=length,
        ties=sum(run.ties for run in runs),
    )


def _ns_per_token(run: Run) -> float:
    return run.total_ns / run.new_tokens
