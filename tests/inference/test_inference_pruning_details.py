"""What a cut leaves as it was: numbers that happen to be the old width, classes of one's own; and padded batches after it."""

from __future__ import annotations

from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="pruning works on torch modules")

from prunable import Net  # noqa: E402 - after the check for torch
from torch import nn  # noqa: E402
from torch.nn import functional  # noqa: E402

from saturate.inference.pruning import attention, shrink  # noqa: E402


def cut(model: Any, batch: tuple[Any, ...], **options: Any) -> tuple[Any, shrink.Shrunk]:
    return shrink.shrink(torch, model, [batch], [], **{"ratio": 0.5, "multiple": 8, **options})


class Scaled(nn.Module):
    """As wide as the longest text that it looks at."""

    def __init__(self, needs_width: bool) -> None:
        super().__init__()
        self.dim = self.max_len = 64
        self.needs_width = needs_width
        self.weight = nn.Parameter(torch.rand(64) + 0.5)

    def forward(self, x: Any) -> Any:
        x = x[:, -self.max_len:]
        return x.reshape(x.shape[0], -1, self.dim) * self.weight if self.needs_width else x * self.weight


@pytest.mark.parametrize("needs_width", [True, False])
def test_a_number_that_happens_to_be_the_width_stays(needs_width: bool) -> None:
    """A batch of ten tokens does not tell the width from the longest text: half of it went, too."""
    torch.manual_seed(0)
    model = Net(lambda net, x: net.out(functional.relu(net.scaled(net.into(x)))), into=nn.Linear(8, 64), scaled=Scaled(needs_width),
                out=nn.Linear(64, 4)).eval()
    smaller, report = cut(model, (torch.randn(4, 10, 8),))
    assert smaller.scaled.weight.shape == (32,) and report.cut
    assert smaller.scaled.max_len == 64 and smaller.scaled.dim == (32 if needs_width else 64)
    assert smaller(torch.randn(2, 50, 8)).shape == (2, 50, 4)


class Padded(nn.Module):
    """torch's own encoder as it comes."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.TransformerEncoder(nn.TransformerEncoderLayer(32, 4, 64, batch_first=True), 2)
        self.out = nn.Linear(32, 5)

    def forward(self, x: Any, padding: Any = None) -> Any:
        return self.out(self.encoder(x, src_key_padding_mask=padding))


@pytest.mark.parametrize("padded", [True, False])
def test_an_encoder_that_lost_heads_takes_padded_batches(padded: bool) -> None:
    """Its layers were given nested tensors, which attention with fewer heads does not take."""
    torch.manual_seed(0)
    model = Padded().eval()
    x, padding = torch.randn(4, 7, 32), torch.arange(7)[None] >= torch.tensor([[7], [5], [3], [6]])
    smaller, report = cut(model, (x, padding) if padded else (x,))
    assert type(smaller.encoder.layers[0].self_attn) is attention.PrunedMultiheadAttention, report.sentence()
    assert model.encoder.use_nested_tensor and not smaller.encoder.use_nested_tensor
    with torch.no_grad():
        found = smaller(x, padding)
        alone = smaller(x[1:2, :5])
    torch.testing.assert_close(found[1:2, :5], alone, rtol=1e-4, atol=1e-5)


def test_an_encoder_that_keeps_its_heads_is_as_it_was() -> None:
    torch.manual_seed(0)
    smaller, _ = cut(Padded().eval(), (torch.randn(4, 7, 32),), heads=False)
    assert smaller.encoder.use_nested_tensor and smaller.encoder.layers[0].linear1.out_features == 32


class Louder(nn.MultiheadAttention):
    """Code of its own around torch's."""

    def forward(self, *given: Any, **more: Any) -> Any:
        found, weights = super().forward(*given, **more)
        return found * 2, weights


@pytest.mark.parametrize("kind", [nn.MultiheadAttention, Louder])
def test_attention_of_a_class_of_ones_own_keeps_it(kind: type[nn.MultiheadAttention]) -> None:
    torch.manual_seed(0)
    model = Net(lambda net, x: net.out(functional.relu(net.up(net.attention(x, x, x, need_weights=False)[0]))),
                attention=kind(32, 4, batch_first=True), up=nn.Linear(32, 32), out=nn.Linear(32, 3)).eval()
    smaller, report = cut(model, (torch.randn(2, 5, 32),))
    if kind is Louder:
        assert type(smaller.attention) is Louder and smaller.attention.num_heads == 4
        assert any("it is a Louder" in reason for reason in report.left_alone)
    else:
        assert type(smaller.attention) is attention.PrunedMultiheadAttention and smaller.attention.num_heads == 2
        again, _ = cut(smaller, (torch.randn(2, 5, 32),), multiple=1)
        assert type(again.attention) is attention.PrunedMultiheadAttention and again.attention.num_heads == 1, "torch's once more"
