"""Does a candidate behave like the baseline? What a score does not show, and what a candidate without a check rests on.

Works on outputs as a worker returns them (`agreement.Batches`). How far two of them agree is measured in `agreement`; here is
what that must be, and what else a candidate is held to. What it is asked beside the user's own inputs is made in `variations`.
"""

from __future__ import annotations

from collections.abc import Sequence, Set
from dataclasses import dataclass
from math import inf
from typing import Any, Literal

from saturate.inference import agreement, samples
from saturate.inference.agreement import IDENTICAL_DB, Batches, Level

#: Less agreement than this is no float association, by the coarsest format that the baseline computes in. The orders of
#: sums in deep networks cost up to some 50 of the 144 dB of float32; the next coarser format has 66.
REORDERED_DB = {"float64": 220.0, "float32": 85.0, "float16": 45.0, "bfloat16": 30.0}

#: As a precision of `examine`: float32 whose products round their inputs to TensorFloat-32. Its limit is that of float16, which rounds
#: alike. One rounding of the inputs (`variations.perturbed`) crosses roundings of TF32 in each layer, as another order of sums does: where that
#: agrees better, so must a candidate, up to the last. In networks of 1 to 32 layers one that does not round at all, and differs by all
#: of the baseline's roundings, is 15 to 25 dB below it, and bfloat16 33 to 43.
TF32, TF32_DB, TF32_TWIN_SLACK_DB, TF32_MOST_DB = "tf32", 45.0, 25.0, 60.0

#: A model that enlarges small differences also enlarges those that the order of sums makes. Less agreement than this below
#: what one rounding of its inputs does (`variations.perturbed`) is still no other format: the next coarser one is 70 dB away or more.
TWIN_SLACK_DB = 40.0

#: Below the agreement of the baseline with itself.
REPEAT_SLACK_DB = 10.0

#: Neither of the two reaches below this. An answer of zeros agrees to 0 dB, 8 bits to 15 to 45, and what differs more than
#: this from call to call is called random (`REPEATS_DB`): at an error of 3 % nothing tells another order of sums from another
#: format or from damage. A model that is more sensitive has no candidate that can be shown to be lossless.
LEAST_DB = 30.0

#: Two runs on one input that differ more than this, or in this share of whole numbers, are random: the order of sums in
#: bfloat16 makes some 40 dB, dropout 5 to 15.
REPEATS_DB, REPEATS_SHARE = 30.0, 0.05

#: Whole numbers that may differ by the order of sums: ties of an argmax, of a rounding. This share of many, and one of at least
#: so many. A tie is rarer than one in a thousand, so where one of a few numbers differs, it is the candidate that is wrong, unless
#: the baseline changes as many itself (then no more than `REPEATS_SHARE`, but for one).
TIES, ONE_OF = 0.001, 100

#: Generated text is as long as the baseline's, or it only looks fast (as in the rules of MLPerf Inference); and what a detector finds is
#: as much.
LENGTHS = (0.9, 1.1)


@dataclass(frozen=True)
class Finding:
    """What one guard says."""

    guard: Literal["structure", "finite", "agreement", "determinism", "length"]
    passed: bool
    what: str


@dataclass(frozen=True)
class Behaviour:
    findings: tuple[Finding, ...]
    agreement_db: float | None = None       # None: nothing with fractions in the outputs, or no way to compare
    flip_rate: float | None = None          # share of rows whose largest entry is another one; None: no class scores

    @property
    def problem(self) -> str | None:
        """What the first guard that failed says."""
        return next((finding.what for finding in self.findings if not finding.passed), None)


def examine(torch: Any, baseline: Batches, candidate: Batches, *, numerics: str, precision: str = "float32",
            again: Batches | None = None, twin: Batches | None = None, generates: bool = False, spare: int = 0,
            counted: Set[int] = frozenset()) -> Behaviour:
    """Compare a candidate's outputs with the baseline's on the same batches.

    numerics: what the candidate promises; "exact" and "reordering" are held to it. precision: the coarsest floating-point
    format that the baseline computes in, or `TF32`. again: the baseline's outputs a second time. twin: those on `variations.perturbed` inputs.
    generates: integer outputs of two dimensions are generated text. spare: so many ties are allowed in any case, however few
    whole numbers there are. counted: the places of tensors that are as long as there is something to tell (`counted`): other
    numbers may find more or less.
    """
    lossless = numerics in ("exact", "reordering")
    counted = frozenset() if lossless else counted
    other = _structure(baseline, candidate, counted)
    if other is not None:
        return Behaviour((Finding("structure", False, other),))
    findings = [Finding("structure", True, "the same tensors, shapes and kinds of numbers")]
    if counted:
        findings.append(_count(baseline, candidate, counted))
    if generates or _lengths_differ(baseline, candidate, counted):
        findings.append(_length(baseline, candidate))
    findings.append(_finite(torch, baseline, candidate, shorter=not lossless))
    levels = agreement.levels_of(torch, baseline, candidate)
    if lossless:
        own = _comparable(torch, baseline, again), _comparable(torch, baseline, twin)
        limits = [_least(numerics, precision, place, *own) for place in range(len(levels))]
        findings.append(_promise(numerics, levels, limits, [_ties(place, level, spare, *own) for place, level in enumerate(levels)]))
    agreement_db = min((level.decibels for level in levels if not level.whole and (level.count or not counted)), default=None)
    if agreement_db is not None:
        agreement_db = max(-IDENTICAL_DB, min(agreement_db, IDENTICAL_DB))
    return Behaviour(tuple(findings), agreement_db, agreement.flip_rate(baseline, candidate))


def repeats(torch: Any, once: Batches, again: Batches) -> Finding:
    """Whether a candidate gives the same outputs twice on the same inputs."""
    levels = _comparable(torch, once, again)
    if levels is None:
        return Finding("determinism", False, "two runs on the same input give outputs of different shapes")
    worst = min((level.decibels for level in levels if not level.whole), default=inf)
    changed = max((level.changed / level.count for level in levels if level.whole and level.count), default=0.0)
    if worst < REPEATS_DB or changed > REPEATS_SHARE:
        shown = f"agree to {worst:.0f} dB only" if worst < REPEATS_DB else f"differ in {changed:.0%} of the whole numbers"
        return Finding("determinism", False, f"it is random: two runs on the same input {shown}")
    return Finding("determinism", True, f"two runs agree to {min(worst, IDENTICAL_DB):.0f} dB")


def counted(inputs: Sequence[tuple[Any, ...]], outputs: Batches) -> frozenset[int]:
    """The places of output tensors whose length is a matter of what is in the input, as that of a detector's boxes: inputs of the same
    shapes have answers that differ in their first dimension and in no other."""
    places: set[int] = set()
    first: dict[Any, Sequence[Any]] = {}
    for batch, answer in zip(inputs, outputs):
        known = first.setdefault(tuple(tuple(tensor.shape) for tensor in samples.tensors(batch)), answer)
        if len(known) == len(answer):
            places.update(place for place, (one, two) in enumerate(zip(known, answer)) if one.shape != two.shape and _rows_differ(one, two))
    return frozenset(places)


def _rows_differ(one: Any, two: Any) -> bool:
    return bool(one.dim() == two.dim() >= 1 and one.shape[1:] == two.shape[1:] and not agreement.are_texts(one, two))


def missing(outputs: Batches) -> float:
    """The share of the values that are no numbers (NaN); 1 where there are no values."""
    tensors = [tensor for batch in outputs for tensor in batch]
    count = sum(tensor.numel() for tensor in tensors)
    nan = sum(int(samples.dense(tensor).isnan().sum()) for tensor in tensors)
    return nan / count if count else 1.0


def _comparable(torch: Any, baseline: Batches, other: Batches | None) -> list[Level] | None:
    """Levels of outputs of the baseline itself; None where there are none, or of other shapes."""
    if other is None or _structure(baseline, other) is not None or _lengths_differ(baseline, other):
        return None
    return agreement.levels_of(torch, baseline, other)


def _structure(baseline: Batches, candidate: Batches, counted: Set[int] = frozenset()) -> str | None:
    """How the candidate's tensors differ from the baseline's in number, kind or shape (but for the length of texts, and of what is
    `counted`)."""
    if len(baseline) != len(candidate):
        return f"it answered {len(candidate)} of {len(baseline)} batches"
    for one, two in zip(baseline, candidate):
        if len(one) != len(two):
            return f"it returns {len(two)} tensors instead of {len(one)}"
        for place, (wanted, got) in enumerate(zip(one, two)):
            if wanted.dtype.is_floating_point != got.dtype.is_floating_point or wanted.is_complex() != got.is_complex():
                return f"tensor {place} of its output is {_name(got)}, the baseline's is {_name(wanted)}"
            if wanted.shape != got.shape and not agreement.are_texts(wanted, got) and not (place in counted and _rows_differ(wanted, got)):
                return f"tensor {place} of its output has the shape {tuple(got.shape)}, the baseline's {tuple(wanted.shape)}"
    return None


def _name(tensor: Any) -> str:
    return str(tensor.dtype).removeprefix("torch.")


def _lengths_differ(baseline: Batches, candidate: Batches, counted: Set[int] = frozenset()) -> bool:
    """Of anything but what is `counted`."""
    return any(wanted.shape != got.shape for one, two in zip(baseline, candidate)
               for place, (wanted, got) in enumerate(zip(one, two)) if place not in counted)


def _count(baseline: Batches, candidate: Batches, counted: Set[int]) -> Finding:
    wanted, got = (sum(len(answer[place]) for answer in answers for place in counted) for answers in (baseline, candidate))
    chance = 2 * wanted ** 0.5 + 1          # of a few, one more or less is no tenth
    passed = LENGTHS[0] * wanted - chance <= got <= LENGTHS[1] * wanted + chance
    return Finding("length", passed, f"its answers hold {got} entries on the inputs, the baseline's {wanted}")


def _length(baseline: Batches, candidate: Batches) -> Finding:
    """Lengths without what the ends repeat (padding)."""
    pairs = [(wanted, got) for one, two in zip(baseline, candidate) for wanted, got in zip(one, two) if agreement.are_texts(wanted, got)]
    wanted, got = sum(agreement.tokens(one) for one, _ in pairs), sum(agreement.tokens(two) for _, two in pairs)
    ratio = got / wanted if wanted else 1.0
    return Finding("length", LENGTHS[0] <= ratio <= LENGTHS[1], f"its texts are {ratio:.0%} as long as the baseline's")


def _finite(torch: Any, baseline: Batches, candidate: Batches, *, shorter: bool) -> Finding:
    """`shorter`: the candidate may compute in a shorter format, which has no room for some masks."""
    for number, (one, two) in enumerate(zip(baseline, candidate)):
        for place, (wanted, got) in enumerate(zip(one, two)):
            if agreement.kind(wanted) == "whole":
                continue
            wanted, got = agreement.wide(torch, wanted), agreement.wide(torch, got)
            same = wanted.shape == got.shape
            lost = (wanted.isfinite() if same else wanted.isfinite().all()) & ~got.isfinite()
            if shorter and same:
                lost &= ~agreement.overflown(agreement.masks(torch, wanted), wanted, got)
            if broken := int(lost.sum()):
                return Finding("finite", False, f"{broken} values in tensor {place} of its output on batch {number} are not "
                                                "finite, where the baseline's are")
    return Finding("finite", True, "finite where the baseline is")


def _least(numerics: str, precision: str, place: int, again: Sequence[Level] | None,
           twin: Sequence[Level] | None) -> float:
    """The least agreement of a tensor that is still what the candidate promises, dB. Below `LEAST_DB` nothing is."""
    least = inf if numerics == "exact" else REORDERED_DB.get(precision, REORDERED_DB["float32"])
    if numerics == "reordering" and precision == TF32:
        least = max(TF32_DB, min(TF32_MOST_DB, twin[place].decibels - TF32_TWIN_SLACK_DB if twin else TF32_DB))
    elif twin and numerics == "reordering":
        least = min(least, twin[place].decibels - TWIN_SLACK_DB)
    return min(least, again[place].decibels - REPEAT_SLACK_DB) if again else least


def _ties(place: int, level: Level, spare: int, *own: Sequence[Level] | None) -> int:
    """How many whole numbers of a tensor may differ by the order of sums. `own`: how much the baseline changes itself."""
    itself = max((levels[place].changed for levels in own if levels), default=0)
    return max(spare, int(level.count >= ONE_OF), int(TIES * level.count), min(itself, max(1, int(REPEATS_SHARE * level.count))))


def _promise(numerics: str, levels: Sequence[Level], limits: Sequence[float], ties: Sequence[int]) -> Finding:
    """Whether a candidate that calls itself lossless is. `ties`: so many whole numbers may differ."""
    claim = f"it calls itself {numerics}, but"
    for place, (level, least) in enumerate(zip(levels, limits)):
        if level.whole:
            if level.far or level.changed > (0 if numerics == "exact" else ties[place]):
                return Finding("agreement", False, f"{claim} {level.changed} of {level.count} whole numbers in tensor {place} of its "
                                                   "output differ from the baseline's")
        elif level.decibels < max(least, LEAST_DB):
            if least < LEAST_DB:
                return Finding("agreement", False, "it cannot be shown to be lossless: one rounding of its inputs, or another call, changes the "
                                                   f"model's own answer by too much, and tensor {place} of the output agrees to {level.decibels:.0f} dB")
            demanded = "every bit is" if least == inf else f"{least:.0f} dB are"
            return Finding("agreement", False, f"{claim} tensor {place} of its output agrees with the baseline's to "
                                               f"{level.decibels:.0f} dB, {demanded} demanded")
    return Finding("agreement", True, f"{numerics}, as it promises")
