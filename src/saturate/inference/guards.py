"""Does a candidate behave like the baseline? What a score does not show, and what a candidate without a check rests on.

Works on outputs as a worker returns them: a list of batches, each a flat list of CPU tensors. The agreement is the
signal-to-noise ratio of a candidate's output against the baseline's, in decibels, of the tensor that agrees least: about
120 to 140 for float32 in another order, 60 to 70 for TF32 and float16, 35 to 55 for bfloat16, 15 to 45 for 8 bits.
"""

from __future__ import annotations

from collections.abc import Sequence, Set
from dataclasses import dataclass
from math import inf, isfinite, log10
from typing import Any, Literal

from saturate.inference import samples
from saturate.techniques import _trees

Batches = Sequence[Sequence[Any]]

#: What bit-identical outputs are shown as (and its negative, where nothing agrees): records hold no infinity.
IDENTICAL_DB = 400.0

#: Less agreement than this is no float association, by the coarsest format that the baseline computes in. The orders of
#: sums in deep networks cost up to some 50 of the 144 dB of float32; the next coarser format has 66.
REORDERED_DB = {"float64": 220.0, "float32": 85.0, "float16": 45.0, "bfloat16": 30.0}

#: As a precision of `examine`: float32 whose products round their inputs to TensorFloat-32. Its limit is that of float16, which rounds
#: alike. One rounding of the inputs (`perturbed`) crosses roundings of TF32 in each layer, as another order of sums does: where that
#: agrees better, so must a candidate, up to the last. In networks of 1 to 32 layers one that does not round at all, and differs by all
#: of the baseline's roundings, is 15 to 25 dB below it, and bfloat16 33 to 43.
TF32, TF32_DB, TF32_TWIN_SLACK_DB, TF32_MOST_DB = "tf32", 45.0, 25.0, 60.0

#: A model that enlarges small differences also enlarges those that the order of sums makes. Less agreement than this below
#: what one rounding of its inputs does (`perturbed`) is still no other format: the next coarser one is 70 dB away or more.
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

#: An argmax chooses from fewer entries than this, and a rounding goes to the neighbour: whole numbers that differ by more than
#: one, where either is negative or larger than this, are no tie.
_MOST_ENTRIES = 2**24

#: Generated text is as long as the baseline's, or it only looks fast (as in the rules of MLPerf Inference); and what a detector finds is
#: as much.
LENGTHS = (0.9, 1.1)

#: A number of at least the first size that occurs again and again in a tensor stands for "masked", and one of at least the
#: second always.
_MASK, _ANY_MASK = 1e4, 1e30

#: Above the largest number of float16 a mask may become infinite in a shorter format.
_OVERFLOWS = 65504.0

#: One rounding of bfloat16, the coarsest format, changes a number by less than this share.
_ROUNDING = 2.0**-7


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
    format that the baseline computes in, or `TF32`. again: the baseline's outputs a second time. twin: those on `perturbed` inputs.
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
    levels = _levels(torch, baseline, candidate)
    if lossless:
        own = _comparable(torch, baseline, again), _comparable(torch, baseline, twin)
        limits = [_least(numerics, precision, place, *own) for place in range(len(levels))]
        findings.append(_promise(numerics, levels, limits, [_ties(place, level, spare, *own) for place, level in enumerate(levels)]))
    agreement_db = min((level.decibels for level in levels if not level.whole and (level.count or not counted)), default=None)
    if agreement_db is not None:
        agreement_db = max(-IDENTICAL_DB, min(agreement_db, IDENTICAL_DB))
    return Behaviour(tuple(findings), agreement_db, flip_rate(baseline, candidate))


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
    return bool(one.dim() == two.dim() >= 1 and one.shape[1:] == two.shape[1:] and not _text(one, two))


def missing(outputs: Batches) -> float:
    """The share of the values that are no numbers (NaN); 1 where there are no values."""
    tensors = [tensor for batch in outputs for tensor in batch]
    count = sum(tensor.numel() for tensor in tensors)
    nan = sum(int(samples.dense(tensor).isnan().sum()) for tensor in tensors)
    return nan / count if count else 1.0


def other_batches(inputs: Sequence[tuple[Any, ...]]) -> list[tuple[Any, ...]]:
    """A batch of one sample and a partial one, cut from the first batch; none where it has no batch dimension, one
    sample only, a tensor that is not dense, or anything else that may belong to the samples (a text, the number of them).
    Worth a comparison where the baseline takes them."""
    if not inputs:
        return []
    leaves = [leaf for _, leaf in _trees.leaves(inputs[0])]
    sizes = {leaf.shape[0] for leaf in leaves if samples.is_tensor(leaf) and leaf.dim()}
    if len(sizes) != 1 or samples.images(inputs[0]):
        return []
    size = sizes.pop()
    if not all(_dense(leaf) if samples.is_tensor(leaf) else leaf is None or isinstance(leaf, (bool, int, float)) for leaf in leaves):
        return []
    if not all(samples.is_tensor(one) or _belongs_to_none(one, size) for one in inputs[0]):
        return []
    return [_trees.copied(inputs[0], lambda path, leaf, count=count: leaf[:count] if samples.is_tensor(leaf) and leaf.dim() else leaf)
            for count in sorted({1, size - size // 3} - {size, 0})]


def shown(batch: tuple[Any, ...]) -> str:
    """A batch by the shapes of its tensors.

    >>> shown(())
    'an input without tensors'
    """
    shapes = [str(list(tensor.shape)) for tensor in samples.tensors(batch) if tensor.dim()]
    return f"an input of {', '.join(shapes)}" if shapes else "an input without tensors"


def _belongs_to_none(given: Any, size: int) -> bool:
    """Whether an argument that is no tensor stays as it is in a batch of another size, but for the tensors inside: a setting. A number
    may be that of the samples, and inside of a container it may belong to one of them."""
    if isinstance(given, (bool, float)) or given is None:
        return True
    if isinstance(given, int):
        return given != size
    plain = [leaf for leaf in samples.leaves(given) if not samples.is_tensor(leaf)]
    return len(plain) != size and all(leaf is None or isinstance(leaf, bool) for leaf in plain)


def perturbed(torch: Any, inputs: Sequence[tuple[Any, ...]]) -> list[tuple[Any, ...]] | None:
    """The same batches with every fraction moved by one rounding of its format, up or down; None where there is none."""
    generator = torch.Generator().manual_seed(0)

    def movable(leaf: Any) -> bool:
        return samples.is_tensor(leaf) and leaf.is_floating_point() and _dense(leaf)

    def moved(path: tuple[Any, ...], leaf: Any) -> Any:
        if not movable(leaf):
            return leaf
        sign = 2 * torch.randint(2, leaf.shape, generator=generator).to(leaf) - 1
        return leaf * (1 + sign * torch.finfo(leaf.dtype).eps)

    if not any(map(movable, samples.tensors(inputs))):
        return None
    return [_trees.copied(batch, moved) for batch in inputs]


def _dense(tensor: Any) -> bool:
    return str(tensor.layout) == "torch.strided"


def flip_rate(baseline: Batches, candidate: Batches) -> float | None:
    """Share of rows whose largest entry is another one, of the first output that looks like class scores: fractions in
    two dimensions (samples, classes), or else in three. None where there is no such output."""
    for dimensions in (2, 3):
        pairs = [(wanted, got) for one, two in zip(baseline, candidate) for wanted, got in _first(one, two, dimensions)]
        rows = sum(wanted[..., 0].numel() for wanted, _ in pairs)
        if rows:
            return sum(int((wanted.argmax(-1) != got.argmax(-1)).sum()) for wanted, got in pairs) / rows
    return None


def _first(one: Sequence[Any], two: Sequence[Any], dimensions: int) -> list[tuple[Any, Any]]:
    def scores(wanted: Any) -> bool:
        return wanted.dim() == dimensions and wanted.is_floating_point() and wanted.shape[-1] > 1

    return [(samples.dense(wanted), samples.dense(got)) for wanted, got in zip(one, two)
            if scores(wanted) and wanted.shape == got.shape][:1]


@dataclass
class _Level:
    """One output tensor over all batches: energies, or how many whole numbers differ."""

    whole: bool
    signal: float = 0.0
    noise: float = 0.0
    changed: int = 0
    far: int = 0            # of the whole numbers that differ: no ties
    count: int = 0

    @property
    def decibels(self) -> float:
        if self.noise == 0:
            return inf
        return 10 * log10(self.signal / self.noise) if self.signal > 0 and isfinite(self.noise) else -inf


def _levels(torch: Any, baseline: Batches, candidate: Batches) -> list[_Level]:
    levels: list[_Level] = []
    for one, two in zip(baseline, candidate):
        for place, (wanted, got) in enumerate(zip(one, two)):
            if place == len(levels):
                levels.append(_Level(_kind(wanted) == "whole"))
            if wanted.shape == got.shape or _text(wanted, got):     # else there is no telling which row is which
                _add(torch, levels[place], wanted, got)
    return levels


def _comparable(torch: Any, baseline: Batches, other: Batches | None) -> list[_Level] | None:
    """Levels of outputs of the baseline itself; None where there are none, or of other shapes."""
    if other is None or _structure(baseline, other) is not None or _lengths_differ(baseline, other):
        return None
    return _levels(torch, baseline, other)


def _add(torch: Any, level: _Level, wanted: Any, got: Any) -> None:
    wanted, got = samples.dense(wanted), samples.dense(got)
    level.count += max(wanted.numel(), got.numel())
    if level.whole:
        if wanted.shape != got.shape:           # texts: what only one of them has differs
            length = min(wanted.shape[1], got.shape[1])
            longer = wanted if wanted.shape[1] > length else got
            level.changed += _tokens(longer[:, max(0, length - 1):]) - min(1, length) * len(wanted)     # what repeats their last one is padding
            wanted, got = wanted[:, :length], got[:, :length]
        other = wanted != got
        level.changed += int(other.sum())
        one, two = wanted[other].double(), got[other].double()
        entries = (torch.minimum(one, two) >= 0) & (torch.maximum(one, two) < _MOST_ENTRIES)
        level.far += int(((one - two).abs() > 1).logical_and(~entries).sum())
        return
    wanted, got = _wide(torch, wanted), _wide(torch, got)
    masked, number = _masked(torch, wanted), wanted.isfinite()
    used = ~_without_number(wanted, got) & ~_overflown(masked, wanted, got)
    level.changed += int((wanted != got)[used].sum())
    computed = wanted[number & ~masked].square()
    level.signal += float(computed.sum())
    off = wanted - got
    # A mask is no signal: it would drown all others. Its rounding counts as that of a number of the usual size.
    rounded = masked & (off.abs() <= _ROUNDING * wanted.abs())
    usual = float(computed.mean().sqrt()) if computed.numel() else 0.0
    level.noise += float(torch.where(rounded, usual * off / wanted, off)[used].square().sum())


def _masked(torch: Any, wanted: Any) -> Any:
    """Where the baseline has a finite number that stands for "masked" (`_MASK`)."""
    huge = wanted.isfinite() & (wanted.abs() >= _MASK)
    values, place, counts = torch.unique(wanted[huge], return_inverse=True, return_counts=True)
    found = torch.zeros_like(huge)
    found[huge] = ((counts > 1) | (values.abs() >= _ANY_MASK))[place]
    rest = wanted[wanted.isfinite() & ~found]
    return found & bool((rest != 0).any())          # of large numbers only, none is special


def _without_number(wanted: Any, got: Any) -> Any:
    """Where there is nothing to compare: the baseline has no number, or an infinity where the candidate has one too, or
    what stands for it."""
    return wanted.isnan() | (wanted.isinf() & (wanted.sign() == got.sign()) & (got.abs() > _ANY_MASK / 2))


def _overflown(masked: Any, wanted: Any, got: Any) -> Any:
    """Masks that a shorter format has rounded to infinity."""
    return masked & got.isinf() & (wanted.sign() == got.sign()) & (wanted.abs() > _OVERFLOWS)


def _wide(torch: Any, tensor: Any) -> Any:
    tensor = tensor.to_dense() if tensor.layout != torch.strided else tensor
    return torch.view_as_real(tensor.resolve_conj()).double() if tensor.is_complex() else tensor.double()


def _kind(tensor: Any) -> str:
    return "complex" if tensor.is_complex() else "fractions" if tensor.is_floating_point() else "whole"


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
            if wanted.shape != got.shape and not _text(wanted, got) and not (place in counted and _rows_differ(wanted, got)):
                return f"tensor {place} of its output has the shape {tuple(got.shape)}, the baseline's {tuple(wanted.shape)}"
    return None


def _name(tensor: Any) -> str:
    return str(tensor.dtype).removeprefix("torch.")


def _text(wanted: Any, got: Any) -> bool:
    """Whether both may be generated tokens, (samples, length)."""
    return _kind(wanted) == "whole" and wanted.dim() == got.dim() == 2 and wanted.shape[0] == got.shape[0]


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
    pairs = [(wanted, got) for one, two in zip(baseline, candidate) for wanted, got in zip(one, two) if _text(wanted, got)]
    wanted, got = sum(_tokens(one) for one, _ in pairs), sum(_tokens(two) for _, two in pairs)
    ratio = got / wanted if wanted else 1.0
    return Finding("length", LENGTHS[0] <= ratio <= LENGTHS[1], f"its texts are {ratio:.0%} as long as the baseline's")


def _tokens(ids: Any) -> int:
    """Tokens of all rows, each up to the first of those that its end repeats."""
    if not ids.numel():
        return 0
    padding = (ids == ids[:, -1:]).flip(1).long().cumprod(1).sum(1)
    return int((ids.shape[1] - padding + 1).sum())


def _finite(torch: Any, baseline: Batches, candidate: Batches, *, shorter: bool) -> Finding:
    """`shorter`: the candidate may compute in a shorter format, which has no room for some masks."""
    for number, (one, two) in enumerate(zip(baseline, candidate)):
        for place, (wanted, got) in enumerate(zip(one, two)):
            if _kind(wanted) == "whole":
                continue
            wanted, got = _wide(torch, wanted), _wide(torch, got)
            same = wanted.shape == got.shape
            lost = (wanted.isfinite() if same else wanted.isfinite().all()) & ~got.isfinite()
            if shorter and same:
                lost &= ~_overflown(_masked(torch, wanted), wanted, got)
            if broken := int(lost.sum()):
                return Finding("finite", False, f"{broken} values in tensor {place} of its output on batch {number} are not "
                                                "finite, where the baseline's are")
    return Finding("finite", True, "finite where the baseline is")


def _least(numerics: str, precision: str, place: int, again: Sequence[_Level] | None,
           twin: Sequence[_Level] | None) -> float:
    """The least agreement of a tensor that is still what the candidate promises, dB. Below `LEAST_DB` nothing is."""
    least = inf if numerics == "exact" else REORDERED_DB.get(precision, REORDERED_DB["float32"])
    if numerics == "reordering" and precision == TF32:
        least = max(TF32_DB, min(TF32_MOST_DB, twin[place].decibels - TF32_TWIN_SLACK_DB if twin else TF32_DB))
    elif twin and numerics == "reordering":
        least = min(least, twin[place].decibels - TWIN_SLACK_DB)
    return min(least, again[place].decibels - REPEAT_SLACK_DB) if again else least


def _ties(place: int, level: _Level, spare: int, *own: Sequence[_Level] | None) -> int:
    """How many whole numbers of a tensor may differ by the order of sums. `own`: how much the baseline changes itself."""
    itself = max((levels[place].changed for levels in own if levels), default=0)
    return max(spare, int(level.count >= ONE_OF), int(TIES * level.count), min(itself, max(1, int(REPEATS_SHARE * level.count))))


def _promise(numerics: str, levels: Sequence[_Level], limits: Sequence[float], ties: Sequence[int]) -> Finding:
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
