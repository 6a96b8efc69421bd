"""Update each parameter as soon as its gradient is complete, and free the gradient.

What it does
------------
While the backward pass runs, a parameter whose gradient has arrived is updated by the script's own optimizer, and the
gradient is dropped. Instead of all gradients, memory holds one at a time.

When it helps
-------------
Where memory is short: gradients take as much as the parameters.

When it hurts
-------------
Small parameters are updated one by one, where an optimizer handles lists of them at once; so without a memory limit it is
not tried. It rules out whatever needs all gradients together: clipping them by their norm, accumulating them, scaling the
loss, averaging them between processes.

Numerics
--------
`exact`: the optimizer's own code on the same numbers, one parameter after the other; its kernels treat each parameter
separately. If something else holds a parameter when its gradient is complete, the rest of the backward pass may still read it
(through `.detach()` or `.data`, or where it was used frozen): in such a step, the script's own `step` updates it. One case cannot be
noticed: a weight that is first fetched, past autograd, while the backward pass runs, by a backward function of the script's own, or by
a checkpointed forward that uses the detached weight and is computed again. With `fused-optimizer`, a step of SGD that its kernels would
leave to the script's own (some parameters have momentum, others none yet) is fused here: rounded otherwise, as that technique is.

How it is applied
-----------------
A hook on each parameter runs the optimizer's `step` with a group of that one parameter; state, step counts and settings
are the script's, and so is the file that it saves. The script's own `step` then finds no gradients left and does only the rest of
its work: hooks, schedulers, counters. Parameters that are frozen at the beginning, or added to the optimizer later, are left to that
step, even once they are trained.

Two steps are watched first. Nothing is applied if the script reads, changes or adds up gradients, or if between backward and step it
changes a learning rate, writes to weights, runs the model or saves it; nor if it has built another optimizer with the same parameters.
If it does any of that to gradients, settings or weights later, it gets an error that says so, because a missing gradient would be
silently wrong. (Writes through `.data` are looked for in all weights at the third step, then in another one at each, on a GPU at every 64th.)
If the script builds another optimizer later and goes on with it (LBFGS after Adam), gradients are kept for the script's own steps from that
optimizer's first `zero_grad` or step on; a step of it that comes after gradients were used is an error.

A backward pass whose step never comes (a loop that is left in between) has updated the weights all the same. A line on stderr says so when
the weights are saved or run, or at the end, and the next backward pass is an error. A script that only reads weights by hand between
backward and step (for an average that it keeps of them) is not noticed: it reads the updated ones.

References
----------
PyTorch tutorials, "How to save memory by fusing the optimizer step into the backward pass".
Lv et al., "Full Parameter Fine-tuning for Large Language Models with Limited Resources" (LOMO), ACL 2024.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from saturate.records.facts import Evidence, Facts, OptimizerFacts
from saturate.techniques import _common, _shortage, _updatable, _updates
from saturate.techniques._api import Eligible, Ineligible, NotApplied, Proof, Technique, Touch

TECHNIQUE = Technique(
    id="optimizer-in-backward",
    title="optimizer steps inside of backward",
    numerics="exact",
    stage="model",
    # Whoever scales, splits or repeats the backward pass, or keeps its gradients, cannot have them updated on the way.
    touches=(Touch("backward"), Touch("zero-grad"), Touch("gradients")),
)

#: Applied before the first step, whose gradients would be what does not fit.
EARLY = True


@dataclass(frozen=True)
class Options:
    """Nothing to choose."""


def eligible(facts: Facts) -> Eligible | Ineligible:
    refusal = _refusal(facts)
    if refusal:
        return Ineligible(refusal)
    short = _shortage.shortage(facts)
    if not short:
        return Ineligible("it mainly saves memory, and memory is not short (`tune --fit` sets a limit)")
    return Eligible(short)


def _refusal(facts: Facts) -> str:
    """Why it cannot be right for this workload; "" when it may be."""
    if not facts.optimizers:
        return "no torch optimizer stepped"
    reasons = [reason for reason in map(_why_not, facts.optimizers) if reason]
    if reasons:
        return reasons[0]
    if facts.micro_steps > 1:
        return f"gradients of {facts.micro_steps} micro-steps are added up before they are used"
    if facts.world_size > 1 or any(module.distributed for module in facts.modules):
        return "gradients are averaged between processes before they are used"
    if facts.grad_scaler:
        return "the script scales its loss, and needs all gradients to undo that"
    if facts.gradients_read:
        return "the script reads gradients (clips them, for one)"
    return ""


def _why_not(optimizer: OptimizerFacts) -> str:
    if optimizer.kind not in _updatable.KINDS or not optimizer.module.startswith("torch.optim"):
        return f"{_common.spelled(optimizer.kind or 'the optimizer', optimizer.module)} is not known to update each parameter by itself"
    if optimizer.sparse or optimizer.differentiable:
        return f"{optimizer.kind} has sparse gradients or is differentiable"
    return ""


def apply(context: Any, options: Options) -> str:
    torch = context.torch
    if not context.optimizers:
        raise NotApplied("no optimizer is known")
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        raise NotApplied("gradients are averaged between processes before they are used")
    for optimizer in context.optimizers:
        reason = _updatable.why_not(optimizer, torch)
        if reason:
            raise NotApplied(reason)
    reason = _updatable.shared(context.optimizers, context.built_optimizers)
    if reason:
        raise NotApplied(reason)

    def refuse(reason: str) -> None:
        _shortage.refuse(context, TECHNIQUE.id, reason)

    updates = _updates.Updates(context, lambda line: context.note(TECHNIQUE.id, line), refuse)
    return f"{updates.install()} parameters to be updated in backward, after two steps under watch"


def active(evidence: Evidence, options: Options) -> Proof:
    seen = evidence.notes.get(TECHNIQUE.id, "")
    return Proof(bool(seen) and not seen.startswith(_updates.ENDED),
                 seen or _shortage.refusal(evidence.notes, TECHNIQUE.id) or "no parameter was updated in backward")


def as_code(options: Options) -> str:
    return (
        "# Once the optimizer is made and loaded. Its own step() finds no gradients left, and only does what else it does.\n"
        "groups = {p: group for group in optimizer.param_groups for p in group[\"params\"] if p.requires_grad}\n"
        "\n"
        "def update(p):\n"
        "    whole, optimizer.param_groups = optimizer.param_groups, [{**groups[p], \"params\": [p]}]\n"
        "    optimizer.step()\n"
        "    optimizer.param_groups = whole\n"
        "    p.grad = None\n"
        "\n"
        "for p in groups:\n"
        "    p.register_post_accumulate_grad_hook(update)"
    )
