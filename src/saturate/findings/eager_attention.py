"""Attention is written out as products and a softmax, and stores its whole matrix of weights.

What it means
-------------
softmax(Q K^T) V as separate operators writes and reads the matrix of attention weights, of sequence length squared,
several times. A fused kernel (scaled dot product attention, flash attention) never stores it.

Evidence
--------
Time of the two products and of the softmax, mask, scale and dropout between them, as a share of the step; the
slowest softmax with its shape; whether `scaled_dot_product_attention` itself ran as these parts.

Threshold
---------
10 % of the step.

Not to be confused with
-----------------------
A softmax over classes, which has no products around it. Attention that already is fused. Unaligned shapes: an odd
sequence length makes the products slow as well, and fusing removes both.

What helps
----------
`torch.nn.functional.scaled_dot_product_attention`; in libraries, their option for it
(`attn_implementation="sdpa"`). The compiler recognises some forms of it. Where that function is called and has no fused
kernel for what it was given, other arguments: on a CPU none takes dropout, or a mask that needs gradients. The bound
takes the whole time of the parts, although the products' arithmetic stays.

References
----------
Dao et al., "FlashAttention: Fast and Memory-Efficient Exact Attention with IO-Awareness", 2022. PyTorch
documentation, "torch.nn.functional.scaled_dot_product_attention".
"""

from __future__ import annotations

from saturate.findings._api import Rule
from saturate.findings._common import concludes, finding, number, of_step, percent, reaches
from saturate.records.analysis import Finding
from saturate.records.observations import Observations

RULE = Rule(
    id="eager-attention",
    title="attention that is not fused",
    techniques=("compile",),
    needs=frozenset({"steps", "kernels"}),
)

#: The parts of attention, of the step.
LEAST = 0.10


def answers(seen: Observations) -> bool:
    return seen.attention_eager is not None


def detect(seen: Observations) -> Finding | None:
    share = seen.attention_eager
    if not concludes(seen, RULE) or share is None or not reaches(share, LEAST):
        return None
    softmaxes = [one for one in seen.operators if "softmax" in one.name]
    slowest = max(softmaxes, key=lambda one: one.share, default=None)
    evidence = [of_step("products and softmax of attention", share, LEAST)]
    if slowest is not None:
        evidence += number(
            "slowest softmax", slowest.share, "of the step", where=f"{slowest.name} {slowest.shapes}".strip()
        )
    fell_back = seen.attention_fell_back
    return finding(
        RULE,
        seen,
        f"Attention as separate products and softmax takes {percent(share)} of the step"
        f"{', although scaled_dot_product_attention is called' * fell_back}.",
        evidence,
        share,
        techniques=() if seen.compiler.compiled else None,
        advice=_other_arguments(seen) if fell_back else "call torch.nn.functional.scaled_dot_product_attention",
    )


def _other_arguments(seen: Observations) -> str:
    """What helps where scaled_dot_product_attention has no fused kernel for what it was given."""
    if seen.device == "cpu":
        return "no fused kernel of a CPU takes dropout in attention, or a mask that needs gradients: do without, if the training allows it"
    return "look for what no fused kernel takes: inside torch.nn.attention.sdpa_kernel(SDPBackend.FLASH_ATTENTION) torch says why"
