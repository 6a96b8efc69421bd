"""Which layers suffer most from few bits."""

from __future__ import annotations

import math
import time
from collections import OrderedDict

import pytest

from saturate.inference import sensitivity

torch = pytest.importorskip("torch", reason="needs torch")
nn = torch.nn


def outlier(layer: nn.Linear) -> nn.Linear:
    """Its inputs hold one value that leaves few steps for all others, and its weights do not care for that one."""
    with torch.no_grad():
        layer.weight[:, 0] = 0
    return layer


class Scaled(nn.Module):
    """Makes the first feature huge."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.cat([x[..., :1] + 1000.0, x[..., 1:]], -1)


def chain() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(OrderedDict(
        first=nn.Linear(16, 16), act=nn.Tanh(), scaled=Scaled(), bad=outlier(nn.Linear(16, 16)), act2=nn.Tanh(), last=nn.Linear(16, 4))).eval()


def test_the_layer_with_outliers_is_first() -> None:
    model, inputs = chain(), [(torch.randn(8, 16),)]
    ranking = sensitivity.rank(torch, model, inputs)
    assert [name for name, _ in ranking][0] == "bad"
    assert {name for name, _ in ranking} == {"first", "bad", "last"}
    scores = dict(ranking)
    assert scores["bad"] < scores["first"] - 10 and scores["first"] > 25
    assert [score for _, score in ranking] == sorted(score for _, score in ranking)


def test_scores_are_what_rounding_that_one_layer_by_hand_gives() -> None:
    model, x = chain(), torch.randn(8, 16)
    low, high = x.min().clamp(max=0), x.max().clamp(min=0)
    scale = (high - low) / 255
    zero = (-low / scale).round()
    rounded_x = ((x / scale + zero).round().clamp(0, 255) - zero) * scale
    with torch.no_grad():
        exact = model(x).double()
        steps = model.first.weight.abs().amax(1, keepdim=True) / 127
        original = model.first.weight.clone()
        model.first.weight.copy_((original / steps).round() * steps)
        changed = model(rounded_x).double()
        model.first.weight.copy_(original)
    expected = 10 * math.log10(exact.square().sum() / (exact - changed).square().sum())
    assert dict(sensitivity.rank(torch, model, [(x,)]))["first"] == pytest.approx(expected, abs=1e-3)


def test_the_model_is_left_as_it_was() -> None:
    model, inputs = chain(), [(torch.randn(8, 16),)]
    before = {name: value.clone() for name, value in model.state_dict().items()}
    fast = torch.backends.mha.get_fastpath_enabled()
    sensitivity.rank(torch, model, inputs)
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())
    assert torch.backends.mha.get_fastpath_enabled() == fast


def test_products_inside_attention_functions_and_reused_layers_are_seen() -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv = nn.Conv2d(1, 4, 3)
            self.attend = nn.MultiheadAttention(4, 2, batch_first=True)
            self.twice = nn.Linear(4, 4)
            self.table = nn.Parameter(torch.randn(4, 4))
            self.bias = nn.Parameter(torch.randn(4))

        def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
            x = self.conv(x).flatten(2).transpose(1, 2)
            x = self.attend(x, x, x, need_weights=False)[0]
            x = self.twice(torch.tanh(self.twice(x)))
            return {"out": x @ self.table, "sum": torch.addmm(self.bias, x[:, 0], self.table), "id": x.argmax(-1)}

    torch.manual_seed(0)
    ranking = dict(sensitivity.rank(torch, Model().eval(), [(torch.randn(2, 1, 6, 6),)]))
    assert set(ranking) == {"conv", "attend", "twice", ""}
    assert all(math.isfinite(score) for score in ranking.values())


def test_a_transformer_layer_is_looked_into() -> None:
    """torch would run all of it as one operator."""
    layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True).eval()
    assert {name for name, _ in sensitivity.rank(torch, layer, [(torch.randn(2, 5, 8),)])} == {"self_attn", "linear1", "linear2"}


def test_a_deadline_leaves_the_rest_behind_the_measured_ones() -> None:
    model, inputs = chain(), [(torch.randn(8, 16),)]
    ranking = sensitivity.rank(torch, model, inputs, deadline_s=time.monotonic() - 1)
    assert [name for name, _ in ranking][0] == "bad"
    assert len(ranking) == 3


def test_a_model_that_returns_no_numbers_is_ranked_by_its_layers() -> None:
    class Answer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.model = chain()

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.model(x).argmax(-1)

    assert [name for name, _ in sensitivity.rank(torch, Answer().eval(), [(torch.randn(8, 16),)])][0] == "model.bad"


def test_a_masked_output_does_not_hide_the_rest() -> None:
    class Masked(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.model = chain()

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.model(x).masked_fill(torch.tensor([True, False, False, False]), -math.inf)

    scores = dict(sensitivity.rank(torch, Masked().eval(), [(torch.randn(8, 16),)]))
    assert all(math.isfinite(score) for score in scores.values())


def test_randomness_at_inference_is_the_same_in_each_forward() -> None:
    class Random(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.model = chain()

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return nn.functional.dropout(self.model(x), 0.5, training=True)

    model, inputs = Random().eval(), [(torch.randn(8, 16),)]
    assert sensitivity.rank(torch, model, inputs) == sensitivity.rank(torch, model, inputs)
    assert dict(sensitivity.rank(torch, model, inputs))["model.first"] > 25


def test_few_batches_are_enough_and_none_is_an_error() -> None:
    calls = []

    class Counting(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            calls.append(len(x))
            return super().forward(x)

    sensitivity.rank(torch, Counting(4, 4).eval(), [(torch.randn(8, 4),)] * 50)
    assert len(calls) <= 2 * math.ceil(sensitivity.SAMPLES / 8) + 1
    with pytest.raises(ValueError, match="no inputs"):
        sensitivity.rank(torch, nn.Linear(4, 4), [])
