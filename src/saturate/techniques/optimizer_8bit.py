"""Keep the running averages of Adam and AdamW in 8 bits between steps.

What it does
------------
Adam holds two running averages for each parameter, 8 bytes in float32, twice the parameter itself. Between steps they
are kept in 8 bits each, with scales per block of 256 values; in a step a few tensors at a time get their values back.

When it helps
-------------
Under a memory limit, with many trained parameters: 2.05 instead of 8 bytes per parameter (4 where parameters are
bfloat16). So it is tried under `saturate tune --fit` only.

When it hurts
-------------
Always a little in time: every value is decoded and encoded once per step. That shows where the optimizer is a large
share of the step, which means few samples per parameter, and on CPUs. While a checkpoint is made, its state is there as
ordinary tensors too: 8 bytes per parameter more, on the device.

Numerics
--------
`precision`. The update is computed by the optimizer's own kernel from decoded averages; what is rounded is what the
next step begins with: the direction of each value to 1.6 % of the largest in its block, the average of squares to one
of 254 steps between the smallest and the largest. Rounding alternates so that it has no bias over steps.

How it is applied
-----------------
The optimizer stays as it is: class, groups, learning rates, schedulers. A hook before its step shows it its groups
piece by piece. `state_dict`, copies and pickles hold ordinary tensors, and such are loaded, so checkpoints work with
and without. Left as they are: tensors of fewer than 4096 values, DTensors (FSDP), groups with amsgrad, capturable or
differentiable, and optimizers that are built after the first training forward. The optimizer of torchao could not
take the place of one that is there: its learning rate must be a tensor, so schedulers fail, its class and its saved
state are others, and it compiles a kernel for each shape.

References
----------
Dettmers et al., "8-bit Optimizers via Block-wise Quantization", arXiv 2110.02861.
Xu et al., "Pushing the Limits of Low-Bit Optimizers: A Focus on EMA Dynamics", arXiv 2505.00347.
pytorch/ao, torchao/optim (AdamW8bit).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from saturate.records.facts import Evidence, Facts, OptimizerFacts
from saturate.techniques import _adam_codes, _at_rest, _common
from saturate.techniques._api import Eligible, Ineligible, NotApplied, Proof, Technique, Touch

TECHNIQUE = Technique(
    id="optimizer-8bit",
    title="Adam's averages in 8 bits",
    numerics="precision",
    stage="model",
    touches=(Touch("optimizer-state"), Touch("gradients", 10),),
)

EARLY = True

KINDS = ("Adam", "AdamW")


@dataclass(frozen=True)
class Options:
    """`smallest`: tensors with fewer values keep their averages as they are; their bytes do not matter, their rounding might."""

    smallest: int = field(default=4096, metadata={"minimum": 1})


def _refusal(optimizer: OptimizerFacts) -> str:
    if optimizer.kind not in KINDS or not optimizer.module.startswith("torch.optim"):
        return f"{optimizer.kind or 'the optimizer'} is not torch's Adam or AdamW"
    if optimizer.sparse or optimizer.differentiable or optimizer.capturable:
        return f"{optimizer.kind} is sparse, differentiable or capturable"
    if any(not dtype.startswith(("float32", "bfloat16", "float16")) for dtype in optimizer.dtypes):
        return f"{optimizer.kind} updates parameters that are not float32, bfloat16 or float16"
    return ""


def eligible(facts: Facts) -> Eligible | Ineligible:
    if facts.memory_limit_bytes is None:
        return Ineligible("it saves memory and costs time; tune --fit tries it")
    if not facts.optimizers:
        return Ineligible("no torch optimizer stepped")
    refusals = [_refusal(optimizer) for optimizer in facts.optimizers]
    if all(refusals):
        return Ineligible(refusals[0])
    return Eligible("two averages per parameter can rest in 8 bits each")


def apply(context: Any, options: Options) -> str:
    classes = {getattr(context.torch.optim, kind) for kind in KINDS}
    suitable = [optimizer for optimizer in context.optimizers if type(optimizer) in classes and _steps_in_pieces(optimizer)]
    if not suitable:
        raise NotApplied("no Adam or AdamW without amsgrad, capturable and differentiable")
    totals = [0, 0, 0]

    def report(plain_bytes: int, resting_bytes: int, tensors: int) -> None:
        totals[:] = totals[0] + plain_bytes, totals[1] + resting_bytes, totals[2] + tensors
        context.note(TECHNIQUE.id, f"{totals[2]} averages rest in {_common.mebibytes(totals[1])} instead of {_common.mebibytes(totals[0])}")

    form = _adam_codes.EightBits(context.torch)
    kept = [optimizer for optimizer in suitable if _at_rest.large_enough(context.torch, optimizer, options.smallest)]
    if not kept:
        raise NotApplied(f"no tensor of {options.smallest} floating-point values or more is trained")
    for optimizer in kept:
        _at_rest.Keeper(context, optimizer, form, options.smallest, report)
    return f"the averages of {len(kept)} optimizer(s) rest in 8 bits"


def _steps_in_pieces(optimizer: Any) -> bool:
    return not any(group.get("amsgrad") or group.get("capturable") or group.get("differentiable") for group in optimizer.param_groups)


def active(evidence: Evidence, options: Options) -> Proof:
    seen = evidence.notes.get(TECHNIQUE.id, "")
    return Proof(bool(seen), seen or "no optimizer has put its state to rest")


def as_code(options: Options) -> str:
    least = "" if options.smallest == 4096 else f"# torchao's own limit is 4096 values in a tensor, not {options.smallest}\n"
    return (
        f"# pip install torchao; schedulers must then fill the tensor that is group[\"lr\"]\n{least}"
        "from torchao.optim import Adam8bit, AdamW8bit\n"
        "kind = AdamW8bit if isinstance(optimizer, torch.optim.AdamW) else Adam8bit\n"
        "optimizer = kind([{**group} for group in optimizer.param_groups])"
    )
