"""Models and steps for the tests of activation checkpointing: each is a trap for whoever runs a forward twice."""

from __future__ import annotations

import collections
import random

import torch
from torch import nn
from torch.nn import functional as F

from saturate.agent.context import Context
from saturate.techniques import _checkpointing, activation_checkpointing

WIDTH = 16


class Block(nn.Module):
    """Attention and a perceptron, both with dropout."""

    def __init__(self, dropout: float = 0.2):
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.mlp = nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH), nn.Dropout(dropout))
        self.dropout = dropout

    def forward(self, x):
        q, k, v = self.qkv(self.norm(x)).unsqueeze(1).chunk(3, dim=-1)
        y = F.scaled_dot_product_attention(q, k, v, dropout_p=self.dropout if self.training else 0.0).squeeze(1)
        x = x + self.out(y)
        return x + self.mlp(x)


class Stack(nn.Module):
    def __init__(self, make=Block, count: int = 6):
        super().__init__()
        self.stem = nn.Linear(4, WIDTH)
        self.blocks = nn.ModuleList(make() for _ in range(count))
        self.head = nn.Linear(WIDTH, 5)

    def forward(self, x):
        x = self.stem(x)
        for block in self.blocks:
            x = self.call(block, x)
        return self.head(x)

    def call(self, block, x):
        return block(x)


class Inner(nn.Module):
    """What the other blocks are built around: composite, with something to save."""

    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x):
        return x + self.down(torch.tanh(self.up(x)))


class Normed(Inner):
    """Running statistics; two of them differ in how they are averaged."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.BatchNorm1d(WIDTH), nn.BatchNorm1d(WIDTH, momentum=None)

    def forward(self, x):
        x = self.first(x.transpose(1, 2))
        return super().forward(self.second(x).transpose(1, 2))


class Seldom(Inner):
    """Running statistics in a branch that is taken now and then."""

    def __init__(self):
        super().__init__()
        self.first = nn.BatchNorm1d(WIDTH, affine=False)

    def forward(self, x):
        return super().forward(self.first(x.transpose(1, 2)).transpose(1, 2) if random.random() < 0.4 else x)


class PowerIteration(Inner):
    """A buffer that is read before it is changed: the second run must see the old one."""

    def __init__(self):
        super().__init__()
        self.register_buffer("state", torch.full((WIDTH,), 0.5))

    def forward(self, x):
        scale = self.state.clone()
        with torch.no_grad():
            self.state = self.state * 0.9 + 0.1 * x.mean((0, 1))
        return super().forward(x * (1 + scale))


class PythonRandom(Inner):
    """Stochastic depth by Python's and numpy's generators."""

    def forward(self, x):
        import numpy

        return super().forward(x * (0.5 + random.random() + numpy.random.random()))


class Rich(Inner):
    """Keywords, nested arguments, and a tuple with None, a number and a named tuple in it."""

    Result = collections.namedtuple("Result", "hidden nothing")

    def forward(self, x, *, scale=None, pair=None, flag=True):
        assert flag and scale is not None
        y = F.dropout(super().forward(x * scale) + pair[0] * pair[1]["more"], 0.3)
        return y * 0.3, None, 3, self.Result(y * 0.3, None)


class RichStack(Stack):
    def __init__(self):
        super().__init__(Rich)

    def call(self, block, x):
        out = block(x, scale=x.sigmoid(), pair=(x.cos(), {"more": x.sin()}))
        assert out[1] is None and out[2] == 3 and isinstance(out[3], Rich.Result)
        return out[0] + out[3].hidden


class KeywordsOnly(Inner):
    """No positional tensor at all, and dropout."""

    def forward(self, *, x):
        return F.dropout(super().forward(x), 0.3)


class KeywordStack(Stack):
    def __init__(self):
        super().__init__(KeywordsOnly)

    def call(self, block, x):
        return block(x=x)


class InPlaceProduct(Inner):
    """Changes the result of a matrix product: it may be recomputed, but not kept."""

    def forward(self, x):
        return x + self.down(F.relu(self.up(x), inplace=True))


# -- blocks that must be left alone ------------------------------------------------------------------------------------


class InPlaceArgument(Inner):
    def forward(self, x):
        return super().forward(x.mul_(1.5))


class Counter(Inner):
    def __init__(self):
        super().__init__()
        self.calls = 0

    def forward(self, x):
        self.calls += 1
        return super().forward(x) * (1 + 0.1 * (self.calls % 2))


class Logger(Inner):
    def __init__(self):
        super().__init__()
        self.seen = []

    def forward(self, x):
        self.seen.append(float(x.detach().sum()))
        return super().forward(x)


class Hooked(Inner):
    def __init__(self):
        super().__init__()
        self.up.register_forward_hook(lambda module, args, output: output * 1.1)


class OwnGenerator(Inner):
    def __init__(self):
        super().__init__()
        self.generator = torch.Generator().manual_seed(0)

    def forward(self, x):
        return super().forward(x * torch.rand(1, generator=self.generator))


class ReturnsProduct(Inner):
    def forward(self, x):
        return self.down(torch.tanh(self.up(x)))


class AddingStack(Stack):
    """Changes what a block returned in place: a kept product would be spoilt."""

    def __init__(self):
        super().__init__(ReturnsProduct)

    def call(self, block, x):
        y = block(x)
        y += x
        return y


class Masked(Inner):
    def forward(self, x, mask):
        return super().forward(x) + mask


class MaskStack(Stack):
    """Uses one mask for all blocks, and changes it in between. No backward reads it, so that is allowed."""

    def __init__(self):
        super().__init__(Masked)

    def forward(self, x):
        self.mask = torch.ones(1, 1, WIDTH)
        return super().forward(x)

    def call(self, block, x):
        y = block(x, self.mask)
        self.mask.mul_(0.5)
        return y


class Clamped(Inner):
    """Changes a weight without leaving a trace in its version."""

    def forward(self, x):
        self.up.weight.data.mul_(0.9)
        return super().forward(x)


class Cached(Inner):
    def forward(self, x, cache):
        return super().forward(x)


class CacheStack(Stack):
    def __init__(self):
        super().__init__(Cached)

    def call(self, block, x):
        return block(x, object())


class Filling(Inner):
    """Puts an auxiliary loss into a list or dict that it is given."""

    def forward(self, x, losses):
        if isinstance(losses, dict):
            losses[len(losses)] = x.sigmoid()
        else:
            losses[0].append(x.sigmoid())
        return super().forward(x)


class FillStack(Stack):
    def __init__(self, make=list):
        super().__init__(Filling)
        self.make = make

    def forward(self, x):
        self.losses = {} if self.make is dict else [[]]
        y, losses = super().forward(x), self.losses
        del self.losses
        found = list(losses.values()) if self.make is dict else losses[0]
        assert len(found) == 6
        return y + sum(found).mean()

    def call(self, block, x):
        return block(x, self.losses)


class Latest(Inner):
    """Reads the last entry of a list."""

    def forward(self, x, earlier):
        return super().forward(x * earlier[-1])


class GrowingStack(Stack):
    """Fills a list between its blocks, which read it."""

    def __init__(self):
        super().__init__(Latest)

    def forward(self, x):
        self.earlier = [torch.ones(())]
        return super().forward(x)

    def call(self, block, x):
        y = block(x, self.earlier)
        self.earlier.append(y.tanh())
        return y


class Recomputing(Inner):
    def forward(self, x):
        from torch.utils.checkpoint import checkpoint

        return checkpoint(super().forward, x, use_reentrant=False)


class Wild(Inner):
    """Differs from run to run in a way that nobody can see coming."""

    calls = 0

    def forward(self, x):
        Wild.calls += 1
        return super().forward(x + Wild.calls)


# -- training ----------------------------------------------------------------------------------------------------------


def engine_of(context, model, options, *optimizers):
    """Apply the technique as the agent does, and keep hold of its engine."""
    kept = []
    original = _checkpointing.Checkpointing.__init__

    def init(self, *args, **kwargs):
        kept.append(self)
        original(self, *args, **kwargs)

    context.modules, context.optimizers, context.device = (model,), optimizers, "cpu"
    _checkpointing.Checkpointing.__init__ = init
    try:
        activation_checkpointing.apply(context, options)
    finally:
        _checkpointing.Checkpointing.__init__ = original
    return kept[0]


class Run:
    """A training of some steps: losses, gradients of every step, final state, and the engine (None without options)."""

    def __init__(self, make, options=None, steps=4, rows=lambda step: 3, lr=0.003, backward=torch.Tensor.backward):
        import numpy

        torch.manual_seed(0)
        random.seed(0)
        numpy.random.seed(0)
        Wild.calls = 0
        self.model = make().train()
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=lr)
        self.context, self.engine = Context(torch), None
        if options is not None:
            self.engine = engine_of(self.context, self.model, options, self.optimizer)
        self.losses, self.gradients = [], []
        for step in range(steps):
            loss = self.model(torch.randn(rows(step), 7, 4)).square().mean()
            self.optimizer.zero_grad()
            backward(loss)
            self.losses.append(loss.item())
            self.gradients.append([p.grad.clone() for p in self.model.parameters()])
            self.optimizer.step()
        self.state = {name: value.clone() for name, value in self.model.state_dict().items()}
        self.drawn = torch.rand(1).item(), random.random(), numpy.random.random()

    def differs_from(self, other) -> str:
        if self.losses != other.losses:
            return f"losses {self.losses} and {other.losses}"
        for step, (ours, theirs) in enumerate(zip(self.gradients, other.gradients)):
            if not all(map(torch.equal, ours, theirs)):
                return f"gradients of step {step}"
        wrong = [name for name, value in self.state.items() if not torch.equal(value, other.state[name])]
        return f"state of {wrong}" if wrong else "" if self.drawn == other.drawn else "random numbers"
