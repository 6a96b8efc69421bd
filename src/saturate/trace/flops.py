"""What an operator must do, from its name and the shapes and formats of its arguments: FLOPs and compulsory bytes.

FLOPs are those of the closed formulas that `_matrix_costs` states, whatever algorithm a library picks. Bytes are a
lower bound: each distinct input read once, each output written once, at the recorded formats. So an operator's
arithmetic intensity is an upper bound, and the efficiency of a memory-bound one a lower bound.
"""

from __future__ import annotations

import re

from saturate.trace import _matrix_costs, _memory_costs
from saturate.trace._arguments import Arguments, Cost, Unknown
from saturate.trace.columns import Signature

__all__ = ["MOST", "NO_SIZES", "Cost", "cost", "explained", "format_in"]

#: Operations or bytes. More than the fastest device does in two hours, and more than a JSON integer can say.
MOST = 1 << 63
NO_SIZES = "its sizes make no sense"

#: The format of tensors in a kernel's name: its first template argument that is one
#: (`multi_tensor_apply_kernel<...<float, ...>`, `CatArrayBatchedCopy<OpaqueType<2u>, ...>`).
_FORMAT = re.compile(r"OpaqueType<(?P<opaque>\d{1,9})u?>|\b(?P<bfloat16>BFloat16|bfloat16)\b|\b(?P<float16>Half)\b|"
                     r"(?<=[<, ])(?P<float64>double)\b|(?<=[<, ])(?P<float32>float)\b")


def cost(name: str, signature: Signature, hint: str = "") -> Cost | None:
    """The cost of one call; None where no formula is known, or the trace does not hold what it needs.

    `hint`: the format ("float32") of tensors inside lists, which the profiler does not record; see `format_in`.
    """
    return explained(name, signature, hint)[0]


def explained(name: str, signature: Signature, hint: str = "") -> tuple[Cost | None, str]:
    """As `cost`, with the reason where there is none."""
    args = Arguments(signature, hint)
    try:
        formula = _matrix_costs.FORMULAS.get(name)
        if formula is not None:
            found: Cost | None = formula(args)
        elif name.startswith(_memory_costs.GENERATED):
            found = _memory_costs.generated(args)
        else:
            found = _memory_costs.cost(name[6:], args) if name.startswith("aten::") else None
    except Unknown as error:
        return None, str(error)
    if found and max(abs(found.flops), abs(found.bytes)) >= MOST:
        return None, NO_SIZES
    return found, "" if found else "no formula for this operator"


def format_in(kernel: str) -> str:
    """The format of the tensors that a kernel works on, from its name; "" where the name does not tell.

    >>> format_in("void at::native::CatArrayBatchedCopy<at::native::OpaqueType<2u>, unsigned int>")
    'bits16'
    """
    found = _FORMAT.search(kernel)
    if found is None:
        return ""
    if found["opaque"]:
        return f"bits{8 * int(found['opaque'])}"
    return found.lastgroup or ""
