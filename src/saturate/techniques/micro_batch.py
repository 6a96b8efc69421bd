"""Run every batch as smaller micro-batches inside the model, with the gradient of the whole batch.

What it does
------------
Cuts each batch into `chunks` parts where it enters the model, joins the outputs before the script's loss sees them, and
runs each part again in the backward: the activations of one part are held instead of those of the whole batch. The global
batch, the loss and the optimizer's steps stay the script's own.

When it helps
-------------
Memory is what limits the training, and activations are most of it.

When it hurts
-------------
It costs one more forward, and smaller parts use the device less well. Outputs, and the loss computed from them, are still
those of the whole batch.

Numerics
--------
`stream`: without dropout, chunks add up in another order and that is all (`reordering`); with it they draw other random
numbers than a whole batch does, and the same ones again in their backward; what is drawn once for all samples of a batch (noise
on a weight, whether a layer is left out) is drawn once for each chunk. Refused, with the reason: models whose samples
depend on each other (BatchNorm in training mode, contrastive losses inside the model), that change state in their forward
(their own, what it reaches outside, or what it is given: a list of auxiliary losses, a counter), that have random generators of
their own, or that reduce a loss in a way that is not recognised. A mean that torch's own loss functions took is weighted by how many
entries it is the mean of, padding left out; negatives in a loss outside of the model see the whole batch.
Of several outputs, each has the gradient that comes from outside of the model: where one is computed from another, a hook on the
other, its `retain_grad` and `torch.autograd.grad` to it do not see what comes through the first, and nothing says so.

How it is applied
-----------------
Around the forward of the outermost trained modules. The first call is watched, then eight of its samples are run whole and
in two chunks, with random numbers set aside; every output and gradient must agree before anything is cut. Then the first
batch that would be cut is compared in the same way as a whole, in the very chunks asked for, and again after 1, 2, 4, 8...
batches: a mixture of experts with room for a share of the batch drops nothing of a small one, and not always of a large
one. Such a comparison takes what a step of the script's own takes; what does not fit is compared as far as it does, and a
line on stderr says so. A coupling that shows only in batches between those looked at is not seen. A part runs again with the
random numbers, modes, attributes and buffers of its forward; where it gives something else all the same, because the script has
changed what the model reads elsewhere, the backward raises an error. A call that the script captures in a CUDA graph is not cut, and a
line on stderr says so. Only splitting is offered: merging the script's own accumulation steps is not. From outside of the loop it
could only be done by drawing the
batches of a whole update ahead, running the model on all of them when the script gives it the first, and holding each loss's
gradient back until the last. The script's own code between loader and model (copies, augmentation, noise) would have to run
ahead of the script; and until the last backward no parameter has the gradient that the script may read, clip, unscale or
decide by. A loss that is skipped because it is not finite, in the last micro-step, would leave all others out of a clipping
that has happened by then, and nothing shows that beforehand. Where transformers' Trainer owns the loop, `merged-micro-batches` does it;
elsewhere batch size and accumulation are two arguments of a framework, and `saturate fit` says how large the first may be.

References
----------
Huang et al., "GPipe: Efficient Training of Giant Neural Networks using Pipeline Parallelism", NeurIPS 2019 (micro-batches).
Chen et al., "Training Deep Nets with Sublinear Memory Cost", 2016 (running the forward again).
Gao et al., "Scaling Deep Contrastive Learning Batch Size under Memory Limited Setup", RepL4NLP 2021 (a loss over the whole
batch, gradients by chunks).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from saturate.records.facts import Evidence, Facts
from saturate.techniques import _chunk_guard, _common
from saturate.techniques._api import Eligible, Ineligible, Proof, Technique, Touch

TECHNIQUE = Technique(
    id="micro-batch",
    title="exact micro-batches",
    numerics="stream",
    stage="model",
    touches=(Touch("forward", _chunk_guard.ORDER), Touch("micro-batches")),
)

#: Share of the device's memory from which on it is worth a trial without being asked for a limit.
SCARCE = 0.85


@dataclass(frozen=True)
class Options:
    """`chunks`: how many parts each batch is cut into; never more than it has samples."""

    chunks: int = 2

    def __post_init__(self) -> None:
        if self.chunks < 2:
            raise ValueError(f"chunks is {self.chunks}; a batch is cut into 2 or more")


def eligible(facts: Facts) -> Eligible | Ineligible:
    if (refused := _common.why_no_chunks(facts)) is not None:
        return refused
    if facts.memory_limit_bytes:
        return Eligible("a memory limit was asked for")
    if not facts.device_memory_bytes or facts.device_reserved_bytes < SCARCE * facts.device_memory_bytes:
        return Ineligible("memory is not scarce, and it costs time" + _merging(facts))
    share = facts.device_reserved_bytes / facts.device_memory_bytes
    return Eligible(f"{share:.0%} of the device's memory is taken")


def _merging(facts: Facts) -> str:
    if facts.micro_steps < 2 or len(facts.optimizers) != 1:        # several backward passes of a GAN are no accumulation
        return ""
    if facts.trainer is not None and not facts.trainer.never_merged:
        return f"; fewer and larger ones than the script's {facts.micro_steps} per update are made by merged-micro-batches"
    return (f"; fewer and larger ones than the script's {facts.micro_steps} per update are not made from outside of its loop: "
            "its own batch size and accumulation do that, and `saturate fit` says what fits")


def variants(facts: Facts) -> list[Options]:
    return [Options(chunks=2), Options(chunks=4), Options(chunks=8)]


def apply(context: Any, options: Options) -> str:
    def wrap(module: Any) -> None:
        say = _chunk_guard.speaker(context, TECHNIQUE.id, module)
        _chunk_guard.Guard(context, module, Always(context, options), say)

    count = _common.wrap_all(context, wrap)
    return f"forward of {count} module(s) in {options.chunks} chunks, with the gradients of the whole batch"


class Always:
    """A `_chunk_guard.Policy`: every batch in the same number of chunks; in more where they do not fit."""

    whole_runs = True           # as it did in the steps before this had its turn

    def __init__(self, context: Any, options: Options):
        self.context = context
        self.parts = options.chunks

    def runs_whole(self, shapes: tuple[Any, ...]) -> bool:
        return False

    def chunks(self, size: int, samples: int) -> int:
        return min(self.parts, samples)

    def smaller(self, size: int, chunks: int, why: str) -> None:
        self.parts = max(self.parts, chunks)

    def began(self, size: int, chunks: int, shapes: tuple[Any, ...]) -> Callable[[], None]:
        return lambda: self.context.note(TECHNIQUE.id, f"backward by {chunks} chunks")


def active(evidence: Evidence, options: Options) -> Proof:
    seen = evidence.notes.get(TECHNIQUE.id, "")
    return Proof(bool(seen), seen or "no batch was cut: the reason is on stderr")


def as_code(options: Options) -> str:
    return (
        "# exact for a mean loss over equally weighted samples that do not depend on each other\n"
        f"for some, wanted in zip(inputs.chunk({options.chunks}), targets.chunk({options.chunks})):\n"
        "    (loss_fn(model(some), wanted) * len(some) / len(inputs)).backward()\n"
        "optimizer.step()"
    )
