"""Take the least important channels, heads and hidden units out of the model: the same layers, narrower.

What it does
------------
Finds which dimensions of which layers belong together (channels between convolutions through BatchNorm, residual
additions, concatenations; heads of an attention; hidden units of an MLP), scores them, and removes the least important
ones from all of their layers. What is left is an ordinary module of the same classes with fewer parameters, which runs,
exports and quantizes like the original.

When it helps
-------------
Networks with more width than their task needs, on any device and runtime, since the products themselves shrink. ResNet-50
without half of its channels: 3.9x fewer operations, 2.2x faster (Torch-Pruning's figures). With training data the
accuracy mostly comes back.

When it hurts
-------------
Without training data accuracy falls quickly, so only small shares are tried then. Cutting a few percent may be slower than the
original: widths that are no multiple of 8 (16 on a GPU) fit the vector units badly, so widths stay such multiples.

Numerics
--------
`convergence`: it is another function. The cut itself is proved: the smaller model computes what the original computes
with zeros in the place of what was removed.

How it is applied
-----------------
One forward is recorded below autograd; from its operations follows which indices go together, a normalization over channels or a
use as an output keeps a width, and what is not understood stays. Importance is the change of the outputs to first order on
calibration batches. Every cut is compared with zeros in its place and taken back where they differ. Then, with `train`, a
short training with the original as the teacher and the user's loss; without, new BatchNorm statistics.

References
----------
Li et al., "Pruning Filters for Efficient ConvNets", ICLR 2017.
Molchanov et al., "Importance Estimation for Neural Network Pruning", CVPR 2019.
Fang et al., "DepGraph: Towards Any Structural Pruning", CVPR 2023.
Michel et al., "Are Sixteen Heads Really Better than One?", NeurIPS 2019.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from saturate.inference.techniques import _training
from saturate.inference.techniques._api import Context, Eligible, Ineligible, Proof, Technique, Touch
from saturate.records.inference import ModelFacts

TECHNIQUE = Technique(
    id="structured-pruning",
    title="narrower layers",
    numerics="convergence",
    stage="train",
    touches=(Touch("network"), Touch("weights-trained", 10)),
)

PREPARE_S = 60.0


@dataclass(frozen=True)
class Options:
    """`ratio`: share of each width that goes. `heads`: whether attention loses heads too. `importance`: "taylor" or
    "magnitude". `multiple`: of which widths stay multiples; 0: 16 on a GPU, 8 elsewhere."""

    ratio: float = 0.25
    heads: bool = True
    importance: str = "taylor"
    multiple: int = 0


def eligible(facts: ModelFacts) -> Eligible | Ineligible:
    layers = facts.linears + facts.convolutions
    if layers < 2 or not facts.dtypes:
        return Ineligible("it takes two layers with floating-point weights to have a width between them")
    return Eligible(f"{layers} layers whose widths may be cut, {'with' if facts.trainable else 'without'} training afterwards")


def variants(facts: ModelFacts) -> Sequence[Options]:
    # A generating model sizes its key-value cache by the heads in its configuration.
    return [Options(ratio, heads=not facts.generates) for ratio in ((0.5, 0.25) if facts.trainable else (0.25, 0.125))]


def bound(facts: ModelFacts) -> float | None:
    return 2.2


def apply(context: Context, options: Options) -> str:
    model, report = _training.smaller(context, options.ratio, options.importance, options.heads, options.multiple)
    said = report.sentence()
    if context.train is not None:
        said += f"; {_training.recover(context, model, context.model).sentence()}"
    elif _training.recalibrate(context, model):
        said += "; BatchNorm statistics anew from the calibration batches"
    context.model = model
    context.notes[TECHNIQUE.id] = str(report.parameters[0])
    return said


def active(context: Context, options: Options) -> Proof:
    now = sum(parameter.numel() for parameter in context.model.parameters())
    before = context.notes.get(TECHNIQUE.id)
    if before is None:
        return Proof(False, f"the model has its {now} parameters")
    return Proof(now < int(before), f"{now} parameters instead of {before}")


def as_code(options: Options) -> str:
    return (
        "import copy\n"
        "from torch import nn\n"
        "from torch.nn import functional as F\n"
        "original, seen = copy.deepcopy(model), []\n"
        "model.requires_grad_(True)\n"
        "# for each group of layers that share a width: conv -> norm -> following\n"
        "hook = following.register_forward_pre_hook(lambda module, given: seen.append(given[0]))\n"
        "output = model(*calibration[0])\n"
        "hook.remove()\n"
        "x = seen.pop()\n"
        "gradient, = torch.autograd.grad((torch.randn_like(output).sign() * output).sum(), x)\n"
        "score = (x * gradient).sum((2, 3)).square().sum(0)\n"
        f"keep = score.topk(max(8, int(len(score) * {1 - options.ratio}) // 8 * 8)).indices.sort().values\n"
        "conv.weight, conv.out_channels = nn.Parameter(conv.weight[keep].detach()), len(keep)\n"
        "conv.bias = nn.Parameter(conv.bias[keep].detach()) if conv.bias is not None else None\n"
        "norm.weight, norm.bias = nn.Parameter(norm.weight[keep].detach()), nn.Parameter(norm.bias[keep].detach())\n"
        "norm.running_mean, norm.running_var = norm.running_mean[keep], norm.running_var[keep]\n"
        "following.weight, following.in_channels = nn.Parameter(following.weight[:, keep].detach()), len(keep)\n"
        "optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)\n"
        "for *batch, target in loader:      # and bring it back\n"
        "    output = model(*batch)\n"
        "    (loss(output, target) + F.kl_div(output.log_softmax(-1), original(*batch).softmax(-1), reduction='batchmean')).backward()\n"
        "    optimizer.step(); optimizer.zero_grad()"
    )
