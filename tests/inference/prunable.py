"""Models whose layers can be cut, with a batch each: convolutions and attention as people write them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.nn import functional


class Net(nn.Module):
    """Layers by name, and a forward that is a function of them."""

    def __init__(self, forward: Callable[..., Any], **layers: nn.Module):
        super().__init__()
        self.run = forward
        for name, layer in layers.items():
            self.add_module(name, layer)

    def forward(self, *inputs: Any) -> Any:
        return self.run(self, *inputs)


def convolutional() -> Net:
    def run(net: Any, x: Any) -> Any:
        x = functional.max_pool2d(torch.sigmoid(net.norm(net.first(x))), 2)
        return net.out(torch.sigmoid(net.wide(functional.relu(net.second(x)).flatten(1))))

    return Net(run, first=nn.Conv2d(1, 16, 3, padding=1), norm=nn.BatchNorm2d(16), second=nn.Conv2d(16, 32, 3, padding=1),
               wide=nn.Linear(32 * 16, 64), out=nn.Linear(64, 10))


def depthwise() -> Net:
    def run(net: Any, x: Any) -> Any:
        x = functional.hardswish(net.after(functional.relu6(net.norm(net.each(net.before(x))))))
        return net.out(functional.adaptive_avg_pool2d(x, 1).flatten(1))

    return Net(run, before=nn.Conv2d(3, 16, 1), each=nn.Conv2d(16, 16, 3, padding=1, groups=16), norm=nn.BatchNorm2d(16),
               after=nn.Conv2d(16, 24, 1), out=nn.Linear(24, 5))


def joined() -> Net:
    def run(net: Any, x: Any) -> Any:
        both = torch.cat([functional.relu(net.one(x)), x, functional.relu(net.other(x))], dim=1)
        padded = functional.pad(functional.relu(net.three(both)), (0, 0, 0, 0, 0, 8))
        return {"mask": net.out(padded), "constant": 3}

    return Net(run, one=nn.Conv2d(3, 16, 1), other=nn.Conv2d(3, 24, 3, padding=1), three=nn.Conv2d(43, 16, 1), out=nn.Conv2d(24, 2, 1))


def shared() -> Net:
    def run(net: Any, x: Any) -> Any:
        x = functional.relu(net.into(x))
        for _ in range(3):
            x = functional.relu(net.again(x)) + x
        return net.out(x)

    return Net(run, into=nn.Linear(12, 32), again=nn.Linear(32, 32), out=nn.Linear(32, 4))


def gated() -> Net:
    def run(net: Any, x: Any) -> Any:
        gate, value = net.both(x).chunk(2, dim=-1)
        return net.down(functional.silu(gate) * value) + net.last(functional.glu(net.pair(x)))

    return Net(run, both=nn.Linear(12, 96), down=nn.Linear(48, 4), pair=nn.Linear(12, 32), last=nn.Linear(16, 4))


class Encoder(nn.Module):
    """Tied embedding, torch's own transformer layers."""

    def __init__(self, batch_first: bool = True, norm_first: bool = False):
        super().__init__()
        self.embedding = nn.Embedding(50, 32)
        layer = nn.TransformerEncoderLayer(32, 4, 64, batch_first=batch_first, norm_first=norm_first)
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.out = nn.Linear(32, 50)
        self.out.weight = self.embedding.weight

    def forward(self, ids: Any, padding: Any = None) -> Any:
        return self.out(self.encoder(self.embedding(ids), src_key_padding_mask=padding))


class Fused(nn.Module):
    """One linear layer for query, key and value."""

    def __init__(self) -> None:
        super().__init__()
        self.num_heads, self.head_dim, self.width = 4, 8, 32
        self.qkv, self.out = nn.Linear(32, 96), nn.Linear(32, 32)

    def forward(self, x: Any) -> Any:
        query, key, value = self.qkv(x).reshape(*x.shape[:2], 3, self.num_heads, self.head_dim).permute(2, 0, 3, 1, 4).unbind(0)
        found = functional.scaled_dot_product_attention(query, key, value)
        return self.out(found.transpose(1, 2).reshape(*x.shape[:2], self.width))


class Separate(nn.Module):
    """Several heads of the query share one of key and value; repeated by expansion and by repeat_interleave."""

    def __init__(self, heads: int, shared: int) -> None:
        super().__init__()
        self.n_heads, self.n_shared, self.size = heads, shared, 32 // heads
        self.query, self.out = nn.Linear(32, 32), nn.Linear(32, 32)
        self.key, self.value = nn.Linear(32, shared * self.size), nn.Linear(32, shared * self.size)

    def forward(self, x: Any) -> Any:
        rows, length = x.shape[:2]
        query, key, value = (layer(x).view(rows, length, count, self.size).transpose(1, 2) for layer, count in (
            (self.query, self.n_heads), (self.key, self.n_shared), (self.value, self.n_shared)))
        times = self.n_heads // self.n_shared
        key = key[:, :, None].expand(rows, self.n_shared, times, length, self.size).reshape(rows, self.n_heads, length, self.size)
        weights = (query @ key.transpose(-1, -2) / self.size**0.5).softmax(-1)
        found = weights @ value.repeat_interleave(times, dim=1)
        return self.out(found.transpose(1, 2).reshape(rows, length, -1))


class Stubborn(nn.Module):
    """The width of a head from the width of the input, as in nanoGPT: heads cannot go."""

    def __init__(self) -> None:
        super().__init__()
        self.n_head, self.n_embd = 4, 32
        self.attention, self.out = nn.Linear(32, 96), nn.Linear(32, 32)

    def forward(self, x: Any) -> Any:
        rows, length, width = x.shape
        parts = (part.view(rows, length, self.n_head, width // self.n_head).transpose(1, 2)
                 for part in self.attention(x).split(self.n_embd, dim=2))
        found = functional.scaled_dot_product_attention(*parts, is_causal=True)
        return self.out(found.transpose(1, 2).contiguous().view(rows, length, width))


class Layers(nn.Module):
    """Two transformer layers around an attention."""

    def __init__(self, attention: Callable[[], nn.Module]):
        super().__init__()
        self.into, self.out = nn.Linear(8, 32), nn.Linear(32, 6)
        self.attention = nn.ModuleList(attention() for _ in range(2))
        self.norm = nn.ModuleList(nn.LayerNorm(32) for _ in range(4))
        self.up = nn.ModuleList(nn.Linear(32, 128) for _ in range(2))
        self.down = nn.ModuleList(nn.Linear(128, 32) for _ in range(2))

    def forward(self, x: Any) -> Any:
        x = self.into(x)
        for index in range(2):
            x = x + self.attention[index](self.norm[2 * index](x))
            x = x + self.down[index](functional.gelu(self.up[index](self.norm[2 * index + 1](x))))
        return self.out(x.mean(1))


def images() -> tuple[Any, ...]:
    return (torch.randn(4, 3, 8, 8),)


def tokens() -> tuple[Any, ...]:
    return (torch.randn(4, 5, 8),)


def ids() -> tuple[Any, ...]:
    return (torch.randint(50, (4, 7)),)


def padded_ids() -> tuple[Any, ...]:
    return torch.randint(50, (4, 7)), torch.arange(7)[None] >= torch.tensor([[7], [5], [3], [6]])


#: model, a batch, and the widths that half of everything leaves, by module and attribute.
CASES: dict[str, tuple[Callable[[], nn.Module], Callable[[], tuple[Any, ...]], dict[str, int]]] = {
    "convolutional": (convolutional, lambda: (torch.randn(4, 1, 8, 8),), {
        "first.out_channels": 8, "norm.num_features": 8, "second.in_channels": 8, "second.out_channels": 16, "wide.in_features": 256,
        "wide.out_features": 32, "out.in_features": 32, "out.out_features": 10}),
    "depthwise": (depthwise, images, {"before.out_channels": 8, "each.groups": 8, "each.in_channels": 8, "after.out_channels": 16}),
    "joined": (joined, images, {"one.out_channels": 8, "other.out_channels": 16, "three.in_channels": 27, "out.in_channels": 16}),
    "shared": (shared, lambda: (torch.randn(4, 12),), {"into.out_features": 16, "again.in_features": 16, "again.out_features": 16}),
    "gated": (gated, lambda: (torch.randn(4, 12),), {"both.out_features": 48, "down.in_features": 24, "pair.out_features": 16}),
    "encoder": (Encoder, ids, {"encoder.layers.0.self_attn.num_heads": 2, "encoder.layers.1.linear1.out_features": 32}),
    "padding": (Encoder, padded_ids, {"encoder.layers.0.self_attn.num_heads": 2, "encoder.layers.1.linear1.out_features": 32}),
    "length first": (lambda: Encoder(False, True), ids, {"encoder.layers.0.self_attn.num_heads": 2}),
    "fused": (lambda: Layers(Fused), tokens, {"attention.0.num_heads": 2, "attention.1.width": 16, "attention.0.qkv.out_features": 48,
                                              "up.0.out_features": 64, "attention.0.head_dim": 8}),
    "separate": (lambda: Layers(lambda: Separate(4, 4)), tokens, {"attention.0.n_heads": 2, "attention.1.key.out_features": 16}),
    "shared heads": (lambda: Layers(lambda: Separate(8, 4)), tokens, {"attention.0.n_heads": 4, "attention.0.n_shared": 2,
                                                                      "attention.1.key.out_features": 8}),
    "stubborn": (lambda: Layers(Stubborn), tokens, {"up.0.out_features": 64, "attention.0.attention.out_features": 96}),
}
