"""What a search among ways to generate says in the end: its verdict, its record, and reasons in words."""

from __future__ import annotations

import math
from dataclasses import asdict
from typing import Any

import msgspec

from saturate.inference.generation import measure
from saturate.measure.race import Estimate
from saturate.records.generation import GenerationCandidate, GenerationRecord

THRESHOLD = 0.02        # the gain that counts

#: Why a way was not tried that would have been, with more time.
TIME_OVER = "too little time was left"


def no_time(needed_s: float) -> str:
    """The reason, with what there would have to be left of it."""
    return f"{TIME_OVER}: to try it and to confirm the best takes about {max(1, math.ceil(needed_s))} s here"


def is_open(row: GenerationCandidate) -> bool:
    """Whether a way that was raced may be the answer, and nobody knows: undecided in a race or in accuracy, or without its turn to be
    confirmed. While there is one, it is not known that nothing helps."""
    if row.fate == "undecided":
        return (row.speedup or 0.0) >= 1.0 + THRESHOLD
    return row.fate in ("inconclusive", "dominated")


def record_of(search: Any, best: Any, base: GenerationCandidate, seconds: float, given_s: float | None = None) -> GenerationRecord:
    """The whole search, for reports. search: a `search.Search` that has come to its end; best: the `search.Ready` that it returned;
    given_s: what it was to take."""
    undecided = search.interrupted or bool(search.cut_short) or any(map(is_open, search.found))
    sampling, faster = search.request.sampling, best.label != "plain"
    base = base if faster else msgspec.structs.replace(base, fate="kept")
    return GenerationRecord(
        model=type(search.given.model).__name__,
        device=str(search.plain.target.device),
        torch=str(search.torch.__version__),
        threads=search.torch.get_num_threads(),
        batch_size=max(map(len, search.selection)),
        prompts=sum(len(batch) for batch in (*search.selection, *search.confirmation)),
        max_new_tokens=search.request.max_new_tokens,
        sampling=asdict(sampling),
        verdict="faster" if best.record.fate == "kept" else "inconclusive" if undecided else "nothing_helps",
        baseline=base,
        best=best.record if faster else base,
        candidates=search.found,
        notes=search.notes,
        seconds=round(seconds, 1),
        given_s=given_s,
        phases=search.phases.found,
    )


def race_words(outcome: str, found: Estimate) -> str:
    """Why a way that is right is not faster, or not known to be."""
    if outcome != "inconclusive":
        return "slower than the plain loop" if outcome == "slower" else "about as fast as the plain loop"
    cut_short = found.rounds < measure.MOST_ROUNDS * found.pairs
    missing = "the time ended first: give it more" if cut_short else "a quieter machine or longer answers may tell"
    return f"{found.rounds} rounds do not tell whether it is faster; {missing}"


def speculation_words(record: GenerationCandidate) -> str:
    """"acceptance 0.83 at cost ratio 0.07: 2.10x (2.05x predicted)"; where the text was quoted, that is said apart."""
    drafts = record.speculation
    assert drafts is not None
    quotes = ""
    if drafts.quoted_acceptance_rate is not None:
        quotes = f"{drafts.quoted_share:.0%} quoted from the text, with acceptance {drafts.quoted_acceptance_rate:.2f}"
    if drafts.acceptance_rate is None:
        return f"{quotes}: {record.speedup:.2f}x" if quotes else "nothing could be drafted"
    alone = " of the draft alone" if quotes else ""
    expected = "" if drafts.predicted_speedup is None else f" ({drafts.predicted_speedup:.2f}x predicted{alone})"
    ratio = "" if drafts.cost_ratio is None else f" at cost ratio {drafts.cost_ratio:.2f}"
    return f"acceptance {drafts.acceptance_rate:.2f}{ratio}{', ' * bool(quotes)}{quotes}: {record.speedup:.2f}x{expected}"
