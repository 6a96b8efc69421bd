"""Floating-point work that the count of a step has missed, found by the kernels of a trace.

The count adds up what torch's dispatcher calls (`agent.flopcount`). Code that launches kernels by itself (an extension or a Triton
kernel in an autograd.Function, as in Transformer Engine and some versions of flash-attn) is no such call, and neither is the replay
of a captured graph: their products count as nothing. A trace shows their kernels, under names that are not of torch's operators.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from saturate.records.analysis import Analysis, Operator
from saturate.trace._matrix_costs import NAMESPACES
from saturate.trace._memory_costs import GENERATED
from saturate.trace.operators import NO_OPERATOR, REPLAYED

#: Names of kernels that multiply matrices or attend. Not `fbgemm_gpu::permute_2D_data`, nor a layer norm's `GammaBeta`.
_PRODUCT = re.compile(r"(?<!fb)gemm|matmul|attn|attention|flash|fmha|sdpa|nvjet|cutlass|(?<!ga)mma", re.IGNORECASE)
#: Names of kernels that pass over their tensors once or twice, in the packages that launch them past torch's operators. Those of
#: Inductor with them: pointwise ones, reductions, and several of these in one (`triton_for_`, of a compiled foreach optimizer).
_PASS = re.compile(r"norm|gamma_?beta|softmax|cross_?entropy|rope|rotary|swiglu|geglu|silu|gelu|relu|dropout|multi_tensor|elementwise|"
                   r"embedding|^triton_(poi|red|per|for)_", re.IGNORECASE)
#: Share of the kernel time that may be of kernels of which nothing is known: a count says no more than that exactly.
_UNKNOWN_AT_MOST = 0.05


def unseen(operators: Sequence[Operator], left_out: Sequence[str], device: str) -> list[Operator]:
    """Those of the operators that the count leaves out (`left_out`, by name), or that no call of torch's dispatcher launched. On a
    CPU rows of other names are the time between operators, in which a step of autograd or a label calls them."""
    return [one for one in operators if one.name in left_out or one.unknown.get("flops") in (NO_OPERATOR, REPLAYED)
            or (device != "cpu" and _outside(one))]


def missed(analysis: Analysis, left_out: Sequence[str]) -> str:
    """Why the count of a model on an accelerator says nothing; "" where it does. Operators that it names as left out are known to be
    missing, unless they multiply. Kernels without any operator do not tell: theirs may have run before the recording began."""
    for problem in analysis.integrity.problems:
        if problem.id == "graph-replay":
            return f"what a replayed graph does is not counted: {problem.message}"
    operators = analysis.devices[0].roofline.operators if analysis.devices else []
    launched = [one for one in operators if _outside(one) and one.unknown.get("flops") != NO_OPERATOR]
    for one in launched:
        if kernel := next(filter(_PRODUCT.search, one.kernels), ""):
            return f"{_named(one)} launches kernels that are not counted, as no operator of torch does: {_short(kernel)}"
    unknown = [one for one in launched if one.name not in left_out and not all(map(_PASS.search, one.kernels))]
    total = sum(one.time_ns for one in operators)
    share = sum(one.time_ns for one in unknown) / total if total else 0.0
    if share <= _UNKNOWN_AT_MOST:
        return ""
    longest = max(unknown, key=lambda one: one.time_ns)
    return (f"{share:.0%} of the kernel time is of kernels that no operator of torch launches, and what they do is not counted: most of it "
            f"in {_named(longest)}")


def _outside(one: Operator) -> bool:
    """Whether no operator of torch launches these kernels, nor one that a formula models, nor its compiler."""
    compiled = one.name.startswith(GENERATED) or (one.kernels and all(name.startswith(GENERATED) for name in one.kernels))
    return one.flops is None and one.name.partition("::")[0] not in NAMESPACES and not compiled


def _named(one: Operator) -> str:
    return "a replayed graph" if one.unknown.get("flops") == REPLAYED else _short(one.name)


def _short(name: str) -> str:
    return name if len(name) <= 100 else f"{name[:97]}..."
