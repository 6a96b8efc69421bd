"""Matrix products whose rows do not start at multiples of 16 bytes, so that slow kernels run.

What it means
-------------
Tensor cores load 16 bytes at a time. A matrix whose rows hold, say, 5185 numbers of 2 bytes starts most rows
elsewhere, and the library falls back to kernels that load one number at a time (`_align1` in their name). One odd
dimension is enough.

Evidence
--------
Kernel names with an alignment of 1 or 2 elements; where names do not tell, operators of low efficiency with a
dimension that is not a multiple of 16 bytes. Each operator with its shapes, its share of the step and its
efficiency against the roof.

Threshold
---------
Such operators take 5 % of the step together. Without a telling kernel name a dimension counts when it is at least
64 and the operator reaches less than 40 % of its roof; where its roof is not known the confidence is low.

Not to be confused with
-----------------------
Plain fp32 kernels (`simt`), which are always written for an alignment of 1. Operators limited by launches or by
memory at a high rate. Dimensions that are odd but not the length of a row, such as a number of samples.

What helps
----------
Padding the dimension to a multiple of 8 (16-bit formats): vocabulary, sequence length, hidden size. The compiler
pads matrix products by itself. For attention, a fused kernel does not store the unaligned matrix at all.

References
----------
NVIDIA, "Matrix Multiplication Background User's Guide", section "Tensor Core Requirements". PyTorch recipes,
"Performance Tuning Guide", section "Use mixed precision and AMP" (multiples of 8).
"""

from __future__ import annotations

import re

from saturate.findings._api import Rule
from saturate.findings._common import at_most, concludes, finding, number, of_step, percent, reaches
from saturate.records.analysis import Finding
from saturate.records.observations import Observations, OperatorSeen

RULE = Rule(
    id="unaligned-shapes",
    title="unaligned matrix dimensions",
    techniques=("compile",),
    needs=frozenset({"steps", "kernels"}),
)

#: Time of the unaligned operators together, of the step.
LEAST = 0.05
#: Elements per load from which a kernel counts as aligned is one more than this.
UNALIGNED = 2
LOAD_BYTES = 16
LEAST_DIMENSION = 64
INEFFICIENT = 0.4
PLACES = 3

_ALIGNMENT = re.compile(r"align0*(\d{1,9})")          # a longer number is no alignment, and aligned by its beginning
_KERNEL = re.compile(r"\w+_align\d+")
_PRODUCTS = ("mm", "bmm", "addmm", "baddbmm", "matmul")


def answers(seen: Observations) -> bool:
    return any(one.dims for one in seen.operators)


def detect(seen: Observations) -> Finding | None:
    if seen.device == "cpu" or not concludes(seen, RULE):
        return None
    found = [one for one in seen.operators if _unaligned(one, bool(seen.tf32_allowed))]
    share = at_most(*(one.share for one in found))
    if not reaches(share, LEAST):
        return None
    worst = max(found, key=lambda one: one.share)
    named = any(_by_kernel(one) for one in found)
    kernels = " on kernels that load one or two numbers at a time" if named else ""
    evidence = [of_step("operators with unaligned rows", share, LEAST)]
    for one in sorted(found, key=lambda one: -one.share)[:PLACES]:
        evidence += number("unaligned operator", one.share, "of the step", where=_called(one))
        evidence += number("efficiency", one.efficiency, "of the roof", INEFFICIENT, where=_called(one))
    parts = [one.recoverable for one in found]
    return finding(
        RULE,
        seen,
        f"{_called(worst)} and the like take {percent(share)} of the step{kernels}.",
        evidence,
        share if None in parts else at_most(*parts),
        direct=named or all(one.efficiency is not None for one in found),
        techniques=() if seen.compiler.compiled else None,
        advice="pad the dimension to a multiple of 8, or use a fused attention kernel",
    )


def _called(one: OperatorSeen) -> str:
    """Operator and shapes; of a kernel that belongs to no operator, the part of its name that says how it loads."""
    kernel = _KERNEL.search(one.name)
    return kernel.group() if kernel else f"{one.name} {one.shapes}".strip()


def _unaligned(one: OperatorSeen, tf32: bool) -> bool:
    named = _by_kernel(one)
    if named is not None:
        return named
    return (one.efficiency is None or one.efficiency < INEFFICIENT) and bool(odd_rows(one, tf32))


def _by_kernel(one: OperatorSeen) -> bool | None:
    """What the kernels' names say; None: nothing."""
    found = [int(digits) for name in one.kernels if "simt" not in name for digits in _ALIGNMENT.findall(name)]
    return min(found) <= UNALIGNED if found else None


def odd_rows(one: OperatorSeen, tf32: bool) -> list[int]:
    """Row lengths of a product's matrices that are no multiple of a load: K of the first, N of the second."""
    matrices = [dims for dims in one.dims if len(dims) >= 2][-2:]
    element = _element_bytes(one.dtypes, tf32)
    if one.name.rpartition("::")[2] not in _PRODUCTS or len(matrices) < 2 or element is None:
        return []
    lengths = {matrices[0][-1], matrices[1][-1]}
    return sorted(n for n in lengths if n >= LEAST_DIMENSION and n * element % LOAD_BYTES)


def _element_bytes(dtypes: str, tf32: bool) -> int | None:
    """Bytes per number on tensor cores; None: this format does not run there."""
    text = dtypes.lower()
    if "float8" in text or "int8" in text:
        return 1
    if "bfloat16" in text or "float16" in text or "half" in text:
        return 2
    return 4 if tf32 and "float" in text and "64" not in text else None
