"""Set the smallest weights to zero, more and more of them while the rest is trained: a smaller file, not a faster model.

What it does
------------
Weights of linear layers and convolutions whose magnitude is small become exactly zero, with training data step by step
along a cubic schedule, so that the others take over. Shapes stay, and so does every runtime's speed.

When it helps
-------------
Size on disk and in transfer: zeros compress. What the weights take compressed is in the table, and in the report before and
after.

When it hurts
-------------
Dense kernels multiply zeros like other numbers, so latency does not change; runtimes with sparse kernels are rare.
Without training data much above a fifth of the weights costs accuracy.

Numerics
--------
`convergence`: it is another function.

How it is applied
-----------------
Per parameter (embeddings, biases and norms are left alone), the smallest share by magnitude; the share follows
s (1 - (1 - t)^3) over the first seven tenths of the training and stays for the rest. The mask acts after each step of the
optimizer. The model teaches: its outputs and the user's loss are the target. Without `train` it is done at once.

References
----------
Zhu and Gupta, "To prune, or not to prune: exploring the efficacy of pruning for model compression", 2017.
Han et al., "Learning both Weights and Connections for Efficient Neural Networks", NeurIPS 2015.
"""

from __future__ import annotations

import copy
import ctypes
import re
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from saturate.inference.techniques import _training
from saturate.inference.techniques._api import (
    COMPRESSED_BYTES,
    Context,
    Eligible,
    Ineligible,
    NotApplied,
    Proof,
    Technique,
    Touch,
)
from saturate.records.inference import ModelFacts

TECHNIQUE = Technique(
    id="magnitude-pruning",
    title="zeros for small weights (size, not speed)",
    numerics="convergence",
    stage="train",
    touches=(Touch("weights-trained"),),        # alone: training after it would fill the zeros in again
)

PREPARE_S = 60.0

#: Of the training, until the final share is reached.
RAMP = 0.7

#: The mask moves when the share has grown by this.
STRIDE = 0.01

#: Of each parameter, to estimate the compressed size from.
SAMPLE_BYTES = 1 << 22


#: Layers, by their names in torch.nn, that multiply by their weights; and how modules are called that scale by them, or look them up.
LAYERS = ("Linear", "Bilinear", "Conv1d", "Conv2d", "Conv3d", "ConvTranspose1d", "ConvTranspose2d", "ConvTranspose3d", "RNNBase", "RNNCellBase",
          "MultiheadAttention")
_SCALES = re.compile("norm|embed|scale", re.IGNORECASE)


@dataclass(frozen=True)
class Options:
    """`sparsity`: share of zeros in each weight."""

    sparsity: float = 0.2


def eligible(facts: ModelFacts) -> Eligible | Ineligible:
    if not facts.linears + facts.convolutions or not facts.dtypes:
        return Ineligible("no linear layer or convolution with floating-point weights")
    return Eligible(f"zeros in {facts.linears + facts.convolutions} layers make a smaller file; no runtime here is faster for it")


def variants(facts: ModelFacts) -> Sequence[Options]:
    return [Options(0.8), Options(0.5)] if facts.trainable else [Options(0.2)]


def bound(facts: ModelFacts) -> float | None:
    return 1.0


def apply(context: Context, options: Options) -> str:
    if not 0.0 < options.sparsity < 1.0:
        raise NotApplied(f"a share of {options.sparsity} of the weights cannot be zero")
    torch = context.torch
    model = copy.deepcopy(context.model)
    weights = _weights(torch, model)
    if not weights:
        raise NotApplied("no layer that multiplies by a weight of its own")
    before = _compressed_bytes(weights)
    pruner = _Pruner(torch, weights, options.sparsity)
    said = ""
    if context.train is not None:
        recovery = _training.recover(context, model, context.model, after_step=pruner.step, ready=pruner.done)
        said = f"; {recovery.sentence()}"
    pruner.step(1.0)
    share = _zeros(weights)
    after = _compressed_bytes(weights)
    context.model = model
    context.notes[COMPRESSED_BYTES] = str(round(after))
    context.notes[TECHNIQUE.id] = (f"{share:.1%} of {sum(weight.numel() for weight in weights)} weights are zero; compressed they take "
                                   f"{after / 1e6:.2f} MB instead of {before / 1e6:.2f} MB")
    return f"{context.notes[TECHNIQUE.id]}{said}; dense kernels are not faster for it"


def active(context: Context, options: Options) -> Proof:
    said = context.notes.get(TECHNIQUE.id)
    weights = _weights(context.torch, context.model)
    share = _zeros(weights) if weights else None        # None: another technique has packed them
    if said is None or (share is not None and share < 0.99 * options.sparsity):
        return Proof(False, f"{share or 0.0:.1%} of the weights are zero")
    return Proof(True, said)


def as_code(options: Options) -> str:
    return (
        "embedded = {id(layer.weight) for layer in model.modules() if isinstance(layer, (torch.nn.Embedding, torch.nn.EmbeddingBag))}\n"
        f"layers = tuple(getattr(torch.nn, name) for name in {LAYERS})      # add those of your own that multiply by their weights\n"
        "weights = {id(x): x for layer in model.modules() if isinstance(layer, layers) for x in layer.parameters(recurse=False)}\n"
        "weights = [x for x in weights.values() if x.ndim > 1 and x.is_floating_point() and id(x) not in embedded]\n"
        "def prune(share):\n"
        "    for weight in weights:\n"
        "        size = weight.detach().abs()\n"
        "        weight.data *= size > size.flatten().kthvalue(max(1, round(share * size.numel()))).values\n"
        "optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)\n"
        "for step, (*batch, target) in enumerate(loader):\n"
        "    loss(model(*batch), target).backward(); optimizer.step(); optimizer.zero_grad()\n"
        f"    prune({options.sparsity} * (1 - (1 - min(step / ({RAMP} * len(loader)), 1)) ** 3))\n"
        f"prune({options.sparsity})"
    )


class _Pruner:
    """Keeps the smallest weights at zero, a growing share of them."""

    def __init__(self, torch: Any, weights: list[Any], sparsity: float) -> None:
        self.torch, self.weights, self.sparsity = torch, weights, sparsity
        self.share = 0.0
        self.masks: list[Any] = []

    def done(self) -> bool:
        return self.share >= self.sparsity

    def step(self, progress: float) -> None:
        share = self.sparsity * (1.0 - (1.0 - min(progress / RAMP, 1.0)) ** 3)
        with self.torch.no_grad():
            if share >= self.share + STRIDE or (share >= self.sparsity and not self.done()):
                self.share, self.masks = share, [_mask(self.torch, weight, share) for weight in self.weights]
            for weight, mask in zip(self.weights, self.masks):
                weight.mul_(mask)


def _mask(torch: Any, weight: Any, share: float) -> Any:
    count = round(share * weight.numel())
    mask = torch.ones(weight.numel(), dtype=torch.bool, device=weight.device)
    mask[weight.detach().abs().flatten().topk(count, largest=False).indices] = False
    return mask.view(weight.shape)


def _weights(torch: Any, model: Any) -> list[Any]:
    """What is multiplied, each once: plain floating-point parameters. Not what an embedding looks up, also where a layer shares it."""
    looked_up = {id(module.weight) for module in model.modules() if isinstance(module, (torch.nn.Embedding, torch.nn.EmbeddingBag))}
    found = {id(weight): weight for module in model.modules() for weight in module.parameters(recurse=False)
             if type(weight) is torch.nn.Parameter and weight.is_floating_point() and _multiplies(torch, module, weight)}
    return [weight for key, weight in found.items() if key not in looked_up]


def _multiplies(torch: Any, module: Any, weight: Any) -> bool:
    """Whether a module multiplies by its parameter. Of the known layers all with two dimensions do (attention's biases have three, the first two
    of size 1). Of modules that are not torch's own nobody knows: not those that scale (a vector, however many dimensions of size 1 it has)
    or are added to every sample of a batch (a first dimension of size 1)."""
    if isinstance(module, tuple(getattr(torch.nn, name) for name in LAYERS)):
        return weight.ndim > 1 and tuple(weight.shape[:2]) != (1, 1)
    foreign = not type(module).__module__.startswith("torch.nn.") and not _SCALES.search(type(module).__name__)
    return foreign and weight.ndim > 1 and weight.shape[0] > 1 and sum(size > 1 for size in weight.shape) > 1


def _zeros(weights: list[Any]) -> float:
    return sum(int((weight == 0).sum()) for weight in weights) / sum(weight.numel() for weight in weights)


def _compressed_bytes(weights: list[Any]) -> float:
    """By zlib, from the beginning of each."""
    total = 0.0
    for weight in weights:
        flat = weight.detach().cpu().contiguous()
        size = flat.numel() * flat.element_size()
        sample = ctypes.string_at(flat.data_ptr(), min(size, SAMPLE_BYTES))
        total += len(zlib.compress(sample, 1)) * size / max(len(sample), 1)
    return total
