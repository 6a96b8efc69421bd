"""How far do two answers agree? In decibels, in whole numbers that differ, and in rows whose largest entry is another one.

Works on outputs as a worker returns them: a list of batches, each a flat list of CPU tensors. The agreement is the
signal-to-noise ratio of a candidate's output against the baseline's, in decibels, of the tensor that agrees least: about
120 to 140 for float32 in another order, 60 to 70 for TF32 and float16, 35 to 55 for bfloat16, 15 to 45 for 8 bits. Numbers that
stand for "masked" are no signal. Whether it is enough, `guards` says.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import inf, isfinite, log10
from typing import Any

from saturate.inference import samples

Batches = Sequence[Sequence[Any]]

#: What bit-identical outputs are shown as (and its negative, where nothing agrees): records hold no infinity.
IDENTICAL_DB = 400.0

#: An argmax chooses from fewer entries than this, and a rounding goes to the neighbour: whole numbers that differ by more than
#: one, where either is negative or larger than this, are no tie.
_MOST_ENTRIES = 2**24

#: A number of at least the first size that occurs again and again in a tensor stands for "masked", and one of at least the
#: second always.
_MASK, _ANY_MASK = 1e4, 1e30

#: Above the largest number of float16 a mask may become infinite in a shorter format.
_OVERFLOWS = 65504.0

#: One rounding of bfloat16, the coarsest format, changes a number by less than this share.
_ROUNDING = 2.0**-7


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
class Level:
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


def levels_of(torch: Any, baseline: Batches, candidate: Batches) -> list[Level]:
    levels: list[Level] = []
    for one, two in zip(baseline, candidate):
        for place, (wanted, got) in enumerate(zip(one, two)):
            if place == len(levels):
                levels.append(Level(kind(wanted) == "whole"))
            if wanted.shape == got.shape or are_texts(wanted, got):     # else there is no telling which row is which
                _add(torch, levels[place], wanted, got)
    return levels


def _add(torch: Any, level: Level, wanted: Any, got: Any) -> None:
    wanted, got = samples.dense(wanted), samples.dense(got)
    level.count += max(wanted.numel(), got.numel())
    if level.whole:
        if wanted.shape != got.shape:           # texts: what only one of them has differs
            length = min(wanted.shape[1], got.shape[1])
            longer = wanted if wanted.shape[1] > length else got
            level.changed += tokens(longer[:, max(0, length - 1):]) - min(1, length) * len(wanted)     # what repeats their last one is padding
            wanted, got = wanted[:, :length], got[:, :length]
        other = wanted != got
        level.changed += int(other.sum())
        one, two = wanted[other].double(), got[other].double()
        entries = (torch.minimum(one, two) >= 0) & (torch.maximum(one, two) < _MOST_ENTRIES)
        level.far += int(((one - two).abs() > 1).logical_and(~entries).sum())
        return
    wanted, got = wide(torch, wanted), wide(torch, got)
    masked, number = masks(torch, wanted), wanted.isfinite()
    used = ~_without_number(wanted, got) & ~overflown(masked, wanted, got)
    level.changed += int((wanted != got)[used].sum())
    computed = wanted[number & ~masked].square()
    level.signal += float(computed.sum())
    off = wanted - got
    # A mask is no signal: it would drown all others. Its rounding counts as that of a number of the usual size.
    rounded = masked & (off.abs() <= _ROUNDING * wanted.abs())
    usual = float(computed.mean().sqrt()) if computed.numel() else 0.0
    level.noise += float(torch.where(rounded, usual * off / wanted, off)[used].square().sum())


def masks(torch: Any, wanted: Any) -> Any:
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


def overflown(masked: Any, wanted: Any, got: Any) -> Any:
    """Masks that a shorter format has rounded to infinity."""
    return masked & got.isinf() & (wanted.sign() == got.sign()) & (wanted.abs() > _OVERFLOWS)


def wide(torch: Any, tensor: Any) -> Any:
    tensor = tensor.to_dense() if tensor.layout != torch.strided else tensor
    return torch.view_as_real(tensor.resolve_conj()).double() if tensor.is_complex() else tensor.double()


def kind(tensor: Any) -> str:
    return "complex" if tensor.is_complex() else "fractions" if tensor.is_floating_point() else "whole"


def are_texts(wanted: Any, got: Any) -> bool:
    """Whether both may be generated tokens, (samples, length)."""
    return kind(wanted) == "whole" and wanted.dim() == got.dim() == 2 and wanted.shape[0] == got.shape[0]


def tokens(ids: Any) -> int:
    """Tokens of all rows, each up to the first of those that its end repeats."""
    if not ids.numel():
        return 0
    padding = (ids == ids[:, -1:]).flip(1).long().cumprod(1).sum(1)
    return int((ids.shape[1] - padding + 1).sum())
