"""Tiny real trainings with planted bugs, recorded as the agent records them. One thread, a fraction of a second
each."""

from __future__ import annotations

import functools
from collections.abc import Iterable
from contextlib import nullcontext
from dataclasses import dataclass, replace

import torch
from torch import nn

from saturate.agent.sample import perturb, spread
from saturate.verify.series import Series

UPDATES = 52


@dataclass(frozen=True)
class Plan:
    """One training; the fields after `clip` are what a lying technique does to it, from update 2 on."""

    model: str = "transformer"
    optimizer: str = "adamw"
    micro: int = 2
    lr: float | None = None
    weight_decay: float = 0.1
    seed: int = 0                       # of parameters and data
    updates: int = UPDATES
    perturb: float = 0.0                # relative, once, after update 1
    perturb_seed: int = 0
    bf16: bool = False
    fused: bool = False
    reverse_batch: bool = False         # the same sums in another order
    double: bool = False                # parameters, data and losses in float64
    autocast: bool = False              # to bf16, by the script itself
    low: str = ""                       # number format of parameters and activations, shorter than float32
    wide: bool = False                  # between operators nothing is rounded to a shorter format, as in fused kernels
    bug: str = ""
    data_seed: int | None = None
    from_start: bool = False            # the bug acts from update 0

    @property
    def dtype(self) -> torch.dtype:
        return torch.float64 if self.double else getattr(torch, self.low or "float32")


class Block(nn.Module):
    def __init__(self, width: int):
        super().__init__()
        self.one, self.two = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width))

    def forward(self, x):
        q, k, v = self.qkv(self.one(x)).chunk(3, -1)
        x = x + self.out(nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True))
        return x + self.mlp(self.two(x))


class Transformer(nn.Module):
    """Next token of a noisy arithmetic sequence."""

    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(17, 32)
        self.blocks = nn.Sequential(Block(32), Block(32))
        self.head = nn.Linear(32, 17)

    def forward(self, x):
        return self.head(self.blocks(self.embedding(x)))


class Unbiased(nn.Module):
    """A language model as they are fine-tuned: no biases, normalisations that only scale, weights of 0.02. In 16 bits, a small learning
    rate moves a few entries of each tensor in an update."""

    def __init__(self):
        super().__init__()
        self.embedding, self.head = nn.Embedding(17, 32), nn.Linear(32, 17, bias=False)
        self.up = nn.ModuleList(nn.Linear(32, 64, bias=False) for _ in range(4))
        self.down = nn.ModuleList(nn.Linear(64, 32, bias=False) for _ in range(4))
        self.norms = nn.ModuleList(nn.RMSNorm(32) for _ in range(5))
        for matrix in (self.embedding, self.head, *self.up, *self.down):
            nn.init.normal_(matrix.weight, std=0.02)

    def forward(self, x):
        x = self.embedding(x)
        for norm, up, down in zip(self.norms, self.up, self.down):
            x = x + down(nn.functional.silu(up(norm(x))))
        return self.head(self.norms[-1](x))


def _transformer_batch(generator):
    start = torch.randint(0, 17, (8, 1), generator=generator)
    stride = torch.randint(1, 4, (8, 1), generator=generator)
    tokens = (start + stride * torch.arange(13)) % 17
    return tokens[:, :-1], tokens[:, 1:]


def _image_batch(generator):
    labels = torch.randint(0, 4, (16,), generator=generator)
    images = torch.randn(16, 3, 8, 8, generator=generator) + labels.view(-1, 1, 1, 1) * 0.3
    return images, labels


def _mlp():
    return nn.Sequential(nn.Flatten(), nn.Linear(192, 64), nn.ReLU(), nn.Linear(64, 32), nn.Tanh(), nn.Linear(32, 4))


def _convnet():
    return nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 16, 3, stride=2, padding=1),
        nn.BatchNorm2d(16), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(16, 4))


MODELS = {"transformer": (Transformer, _transformer_batch), "unbiased": (Unbiased, _transformer_batch), "mlp": (_mlp, _image_batch),
          "convnet": (_convnet, _image_batch)}
RATES = {"adamw": 3e-3, "sgd": 0.1}
#: What they make of the learning rate.
RATE_BUGS = {"learning rate": 0.9, "half the learning rate": 0.5, "twice the learning rate": 2.0, "ten times the learning rate": 10.0}
#: What they make of the updates of weights, but not of biases and scales.
MATRIX_BUGS = {"matrices at half the rate": 0.55, "matrices at twice the rate": 2.0}
#: What they make of the running statistics of a normalisation, and from which update on. Twice is as a block does that is run again.
STATISTICS_BUGS = {"frozen statistics": (0.0, 2), "statistics twice": (0.19, 2), "statistics frozen later": (0.0, 20)}


def _optimizer(plan: Plan, model: nn.Module):
    rate = plan.lr if plan.lr is not None else RATES[plan.optimizer]
    if plan.optimizer == "adamw":
        return torch.optim.AdamW(model.parameters(), rate, weight_decay=plan.weight_decay, fused=plan.fused)
    return torch.optim.SGD(model.parameters(), rate, momentum=0.9, weight_decay=plan.weight_decay / 100)


def _sample(tensors: Iterable[torch.Tensor]) -> list[torch.Tensor]:
    return [spread(tensor, 64).clone() for tensor in tensors]


class WideBetweenProducts(torch.overrides.TorchFunctionMode):
    """Operands and results of matrix products and convolutions are rounded to a short format, and nothing else is: what compilers
    make of a forward in that format, where they fuse the operators in between."""

    def __init__(self, dtype):
        super().__init__()
        self.dtype = dtype

    def __torch_function__(self, function, types, args=(), kwargs=None):
        if function not in (nn.functional.linear, torch.conv2d, nn.functional.scaled_dot_product_attention):
            return function(*args, **(kwargs or {}))
        args = [arg.to(self.dtype).float() if isinstance(arg, torch.Tensor) else arg for arg in args]
        return function(*args, **(kwargs or {})).to(self.dtype).float()


def _in_float32(model, x):
    x, *values = (v.float() if v.is_floating_point() else v for v in (x, *model.parameters(), *model.buffers()))
    names = [name for name, _ in (*model.named_parameters(), *model.named_buffers())]
    given = dict(zip(names, values))
    out = torch.func.functional_call(model, given, x)
    for name, buffer in model.named_buffers():      # what a normalisation has counted
        if given[name] is not buffer:
            buffer.copy_(given[name])
    return out


def _loss(plan: Plan, model, x, y):
    if plan.reverse_batch:
        x, y = x.flip(0), y.flip(0)
    if plan.wide:
        with WideBetweenProducts(plan.dtype if plan.low else torch.bfloat16):
            out = _in_float32(model, x)
    elif plan.bug == "float32 forward":
        out = _in_float32(model, x)
    else:
        with torch.autocast("cpu", torch.bfloat16) if plan.bf16 or plan.autocast else nullcontext():
            out = model(x)
    out = out.double() if plan.double else out.float()
    loss = nn.functional.cross_entropy(out.flatten(0, -2), y.flatten())
    if plan.bug == "constant loss":
        return loss * 0 + 1.0
    return loss * 0 if plan.bug == "zero loss" else loss


@functools.lru_cache(maxsize=512)
def train(plan: Plan) -> Series:
    """Run the plan and record it."""
    torch.set_num_threads(1)
    torch.manual_seed(plan.seed)
    build, batch = MODELS[plan.model]
    model = build().to(plan.dtype)
    optimizer = _optimizer(plan, model)
    generator = torch.Generator().manual_seed(plan.seed + 1000)
    losses, norms, samples, statistics, stale = [], [], [], [], None
    for k in range(plan.updates):
        acts = k >= 2 or plan.from_start
        now = plan if acts else replace(plan, bf16=False, reverse_batch=False, wide=False, bug="")
        bug = plan.bug if acts else ""
        if plan.data_seed is not None and k == (0 if plan.from_start else 2):
            generator = torch.Generator().manual_seed(plan.data_seed)
        if bug in RATE_BUGS and k == 2:
            for group in optimizer.param_groups:
                group["lr"] *= RATE_BUGS[bug]
        if bug == "no weight decay":
            for group in optimizer.param_groups:
                group["weight_decay"] = 0.0
        if bug in STATISTICS_BUGS and k == STATISTICS_BUGS[bug][1]:
            for module in model.modules():
                if isinstance(module, nn.BatchNorm2d):
                    module.momentum = STATISTICS_BUGS[bug][0]
        losses.append([])
        for m in range(plan.micro):
            x, y = batch(generator)
            x = x.to(plan.dtype) if x.is_floating_point() else x
            loss = _loss(now, model, x, y)
            losses[-1].append(float("nan") if bug == "nan" and k == 40 else float(loss.detach()))
            scale = 1 if bug == "gradient sum" else plan.micro
            if not (bug == "dropped micro-batch" and m == plan.micro - 1):
                (loss / scale).backward()
        parameters = list(model.parameters())
        if bug == "stale gradients":
            fresh = [p.grad.clone() for p in parameters]
            for p, old in zip(parameters, stale or fresh):
                p.grad.copy_(old)
            stale = fresh
        elif plan.bug == "stale gradients":
            stale = [p.grad.clone() for p in parameters]
        if bug == "frozen layer":
            parameters[-4].grad = None
        if bug == "other places":           # of the gradient's elements in each matrix or kernel, as where two layouts are mixed up
            for p in parameters:
                if p.dim() > 1:
                    p.grad = p.grad.movedim(1, -1).contiguous().view(p.shape) if p.dim() > 2 else p.grad.t().contiguous().view(p.shape)
        before = [p.detach().clone() for p in parameters] if bug in MATRIX_BUGS else []
        norms.append(float(torch.linalg.vector_norm(torch.stack(
            [p.grad.norm() for p in parameters if p.grad is not None]))))
        if not (bug == "skipped step" and k == 30):
            optimizer.step()
        for p, was in zip(parameters, before):
            if p.dim() > 1:
                p.data.copy_(was + MATRIX_BUGS[bug] * (p.detach() - was))
        optimizer.zero_grad()
        if plan.perturb and k == 1:
            noise = torch.Generator().manual_seed(plan.perturb_seed)
            with torch.no_grad():
                for p in parameters:
                    if plan.low:
                        perturb(torch, p, plan.perturb, torch.randint(0, 2, p.shape, generator=noise, dtype=torch.int8) * 2 - 1)
                    else:
                        p.mul_(1 + plan.perturb * (2 * torch.rand(p.shape, generator=noise) - 1))
        parts = _sample(model.parameters())
        samples.append(torch.cat(parts).tolist())
        held = _sample(buffer for buffer in model.buffers() if buffer.is_floating_point() and buffer.element_size() >= 4)
        statistics.append(torch.cat(held).tolist() if held else [])
    return Series(losses, norms, samples, motif="F B " * plan.micro + "S", segments=[len(part) for part in parts],
                  precision="float64" if plan.double else "float32", formats=[str(plan.dtype).removeprefix("torch.")] * len(parts),
                  arithmetic=plan.low or "bfloat16" * plan.autocast,
                  statistics=statistics if held else [], statistics_segments=[len(part) for part in held],
                  dimensions=[p.dim() for p in parameters])


def twins(plan: Plan, perturb: float, count: int = 2) -> list[Series]:
    clean = replace(plan, bug="", bf16=False, fused=False, reverse_batch=False, wide=False, data_seed=None)
    return [train(replace(clean, perturb=perturb, perturb_seed=7 + i)) for i in range(count)]
