"""Operators whose usual translation to ONNX is right at ordinary inputs only: at all others, too, in both runtimes."""

from __future__ import annotations

import math
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="torch")
for name in ("onnx", "onnxruntime", "onnxscript", "openvino"):
    pytest.importorskip(name, reason="the extra saturate[inference]")

import torch.nn.functional as F  # noqa: E402 - after the checks for what is optional
from torch import nn  # noqa: E402

from saturate.inference.techniques import _onnx_translations, onnx_runtime, openvino_runtime  # noqa: E402
from saturate.inference.techniques._api import Context, NotApplied  # noqa: E402
from saturate.records.inference import ModelFacts  # noqa: E402

INSTALLED = {"onnx": "1.23", "onnxruntime": "1.30", "onnxscript": "0.7", "openvino": "2026.1"}
BOTH = pytest.mark.parametrize("technique", [onnx_runtime, openvino_runtime], ids=lambda one: one.TECHNIQUE.id)


class Calls(nn.Module):
    def __init__(self, function: Any):
        super().__init__()
        self.function = function

    def forward(self, *inputs):
        return self.function(*inputs)


def program(function: Any, inputs: tuple[Any, ...], technique: Any, folder: Any) -> Any:
    """What the technique makes of the function, given ordinary inputs."""
    dtypes = tuple({str(one.dtype).removeprefix("torch.") for one in inputs if one.is_floating_point()} or {"float32"})
    facts = ModelFacts(torch=torch.__version__, dtypes=dtypes, installed=INSTALLED, cores=2, batch_size=inputs[0].shape[0])
    context = Context(torch, Calls(function).eval(), "cpu", [inputs], [inputs], facts, folder, 1)
    technique.apply(context, technique.Options())
    return context.call


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_the_logarithm_of_a_sigmoid_is_finite(dtype, tmp_path):
    call = program(F.logsigmoid, (torch.randn(4, 8, dtype=dtype),), onnx_runtime, tmp_path)
    x = torch.tensor([-1000.0, -104.0, -30.0, -1.0, 0.0, 1.0, 30.0, 1000.0], dtype=dtype).expand(4, 8).contiguous()
    assert torch.allclose(call(x), F.logsigmoid(x), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_sum_of_logarithms_is_finite(dtype, tmp_path):
    call = program(lambda x: torch.logaddexp(x, x.flip(1)), (torch.randn(4, 8, dtype=dtype),), onnx_runtime, tmp_path)
    for values in ([-1000.0, -999.0, -30.0, -1.0, -1.5, 20.0, -1001.0, -1000.0], [1000.0, 90.0, 0.0, 1.0, 1.0, 5.0, 90.0, -1000.0],
                   [-torch.inf, torch.inf, -torch.inf, 1.0, 2.0, -torch.inf, torch.inf, 3.0]):
        x = torch.tensor(values, dtype=dtype).expand(4, 8).contiguous()
        torch.testing.assert_close(call(x), torch.logaddexp(x, x.flip(1)))


@BOTH
def test_a_direction_along_an_axis_has_torchs_sign(technique, tmp_path):
    call = program(torch.atan2, (torch.randn(3, 9), torch.randn(3, 9)), technique, tmp_path)
    sides = torch.tensor([0.0, -0.0, 1.0, -1.0, 1e-30, -1e-30, 3.0, -3.0, 0.5])
    y, x = sides.repeat_interleave(9).reshape(9, 9), sides.repeat(9).reshape(9, 9)
    known = ~((y == 0) & (x == 0))          # of no direction torch says 0 or pi, by the sign of the zero in x
    torch.testing.assert_close(call(y, x)[known], torch.atan2(y, x)[known])
    assert (call(torch.zeros(1, 9), torch.zeros(1, 9)) == 0).all()


@BOTH
@pytest.mark.parametrize("mode", ["floor", "trunc", "//", "%", "fmod"])
def test_whole_numbers_are_divided_as_such(technique, mode, tmp_path):
    """In float32 a time of the day shortly before midnight is the next day."""
    day = 86_400

    def divided(stamp, other):
        if mode == "//":
            return stamp // day, stamp // other
        if mode == "%":
            return stamp % day, stamp % other
        if mode == "fmod":
            return torch.fmod(stamp, day), torch.fmod(stamp, other)
        return torch.div(stamp, day, rounding_mode=mode), torch.div(stamp, other, rounding_mode=mode)

    call = program(divided, (torch.arange(12), torch.full((12,), 7)), technique, tmp_path)
    stamps = torch.tensor([20_400 * day - 1, 20_400 * day, 20_400 * day - 30, -1, -day, -day - 1, 0, 1, 2**31 - 1, -(2**31) + 1, 5, -5])
    by = torch.tensor([7, -7, 3, 2, -2, 10, 5, -5, 2**30, 1000, -3, 3])
    for got, wanted in zip(call(stamps, by), divided(stamps, by), strict=True):
        assert torch.equal(got, wanted), (got, wanted)


def attention(query, key, value, mask):
    return F.scaled_dot_product_attention(query, key, value, attn_mask=mask)


@BOTH
@pytest.mark.parametrize("of", [torch.bool, torch.float32])
@pytest.mark.parametrize("dimensions", [3, 4])
def test_a_row_that_a_mask_hides_entirely_is_nothing(technique, of, dimensions, tmp_path):
    """It was the mean of all that it may not see, or no number."""
    batch = (2, 4, 5, 8)[-dimensions:]
    given = [torch.randn(batch) for _ in range(3)]
    shown = torch.ones(5, 5, dtype=torch.bool).tril()
    call = program(attention, (*given, mask_of(shown, of)), technique, tmp_path)
    hidden = shown.clone()
    hidden[1], hidden[3] = False, False
    for mask in (shown, hidden):
        wanted = attention(*given, mask_of(mask, of))
        torch.testing.assert_close(call(*given, mask_of(mask, of)), wanted)
    assert (wanted[..., 1, :] == 0).all()


def mask_of(shown, of):
    return shown if of is torch.bool else torch.zeros(shown.shape).masked_fill(~shown, -math.inf)


@BOTH
def test_padding_that_leaves_nothing_of_a_text(technique, tmp_path):
    layer = nn.MultiheadAttention(16, 4, batch_first=True).eval()

    def called(x, padded):
        return layer(x, x, x, key_padding_mask=padded, need_weights=False)[0]

    some, all_of_it = torch.zeros(2, 6, dtype=torch.bool), torch.zeros(2, 6, dtype=torch.bool)
    some[0, 4:], all_of_it[1] = True, True
    x = torch.randn(2, 6, 16)
    call = program(called, (x, some), technique, tmp_path)
    for padded in (some, all_of_it):
        torch.testing.assert_close(call(x, padded), called(x, padded))


@BOTH
@pytest.mark.parametrize("how", [{"is_causal": True}, {"scale": 0.3}, {"enable_gqa": True}, {"enable_gqa": True, "is_causal": True}], ids=str)
def test_attention_is_torchs_in_all_its_forms(technique, how, tmp_path):
    heads = 2 if "enable_gqa" in how else 4
    given = torch.randn(2, 4, 5, 8), torch.randn(2, heads, 7, 8), torch.randn(2, heads, 7, 6)
    call = program(lambda q, k, v: F.scaled_dot_product_attention(q, k, v, **how), given, technique, tmp_path)
    for rows in (2, 3):
        other = [torch.randn(rows, *one.shape[1:]) for one in given]
        torch.testing.assert_close(call(*other), F.scaled_dot_product_attention(*other, **how))


class SmallAdded(nn.Module):
    def __init__(self, small: float):
        super().__init__()
        self.small = small

    def forward(self, x):
        return x / (x.norm(dim=1, keepdim=True) + self.small), x * (1 + 100 * self.small)


@BOTH
@pytest.mark.parametrize("small", [1e-6, 1e-8, 1e-12])
def test_a_small_constant_is_not_left_out(technique, small, tmp_path):
    """The exporter's optimizer takes what is nearly 0 for 0: a row of zeros, normalized, was no number."""
    call = program(SmallAdded(small), (torch.randn(4, 12),), technique, tmp_path)
    x = torch.randn(4, 12)
    x[1], x[2] = 0, 1e-10
    for got, wanted in zip(call(x), SmallAdded(small)(x), strict=True):
        torch.testing.assert_close(got, wanted)


@BOTH
def test_sizes_are_divided_downwards(technique, tmp_path):
    """The usual ceiling is -(-n // 3); the exporter rounds towards zero, which is right where nothing is left."""
    def padded(x):
        return F.pad(x, (0, -(-x.shape[1] // 3) * 3 - x.shape[1])), x[:, :x.shape[1] // 2]

    facts = ModelFacts(torch=torch.__version__, dtypes=("float32",), installed=INSTALLED, cores=2, batch_size=2, varying_shapes=True)
    inputs = [(torch.randn(2, size),) for size in (12, 9)]
    context = Context(torch, Calls(padded).eval(), "cpu", inputs, inputs, facts, tmp_path, 1)
    technique.apply(context, technique.Options())
    for size in (7, 8, 9, 10, 31):
        x = torch.randn(2, size)
        for got, wanted in zip(context.call(x), padded(x), strict=True):
            assert torch.equal(got, wanted), size


@pytest.mark.parametrize("function", [torch.maximum, torch.minimum, lambda x, y: x.clamp(min=5), lambda x, y: x.clamp(0, 2**40), lambda x, y: x.sign(),
                                      lambda x, y: x // y, lambda x, y: x % y], ids=["maximum", "minimum", "clamp", "between", "sign", "//", "%"])
def test_whole_numbers_of_64_bits_are_compared_as_such(function, tmp_path):
    """ONNX Runtime takes the low half for a number with a sign: moments of the same month were compared wrongly."""
    call = program(function, (torch.arange(1, 9), torch.arange(9, 1, -1)), onnx_runtime, tmp_path)
    moments = torch.tensor([1_765_000_000_123, 1_766_000_000_123, 1_767_000_000_999, 1_768_000_000_000, 2**31, 3 * 10**9, -(2**31) - 5, 2**40 + 1])
    assert torch.equal(call(moments, moments.roll(1)), function(moments, moments.roll(1)))


@BOTH
@pytest.mark.parametrize("function", [
    lambda x: x.clamp(min=0), lambda x: x.clamp(min=-0.5), lambda x: x.clamp(max=1), lambda x: torch.clamp_min(x, 0.5), lambda x: torch.clamp_max(x, 0.5),
    lambda x: x.clamp(min=x.new_tensor(0.25)), lambda x: x.clamp(-1, 1)], ids=["zero", "min", "max", "clamp_min", "clamp_max", "tensor", "both"])
def test_infinities_pass_a_bound_on_the_other_side(technique, function, tmp_path):
    """They became the largest finite number."""
    call = program(function, (torch.randn(2, 5),), technique, tmp_path)
    x = torch.tensor([[torch.inf, -torch.inf, 0.0, 1.5, -1.5]]).expand(2, 5).contiguous()
    assert torch.equal(call(x), function(x))


@BOTH
@pytest.mark.parametrize("dtype", [torch.uint8, torch.int8, torch.int32, torch.int64])
def test_whole_numbers_have_bounds_too(technique, dtype, tmp_path):
    x = torch.arange(10, dtype=dtype).reshape(2, 5)
    call = program(lambda x: ((x + 1).clamp(min=0), (x + 1).clamp(min=5), (x + 1).clamp(max=5)), (x,), technique, tmp_path)
    for got, wanted in zip(call(x), ((x + 1).clamp(min=0), (x + 1).clamp(min=5), (x + 1).clamp(max=5)), strict=True):
        assert torch.equal(got, wanted)


@BOTH
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_negative_numbers_are_shifted_with_their_sign(technique, dtype, tmp_path):
    x = torch.tensor([0, 1, 5, -1, -20, -(2**20), 2**20], dtype=dtype)
    call = program(lambda x: (x >> 1, (x >> 8) & 255), (x.abs(),), technique, tmp_path)
    for got, wanted in zip(call(x), (x >> 1, (x >> 8) & 255), strict=True):
        assert torch.equal(got, wanted)


def test_an_exporter_whose_rules_are_elsewhere_is_not_trusted(tmp_path, monkeypatch):
    monkeypatch.setattr(_onnx_translations, "_IDLE_RULES", "onnxscript.rewriter.no_such_rules")
    with pytest.raises(NotApplied, match="leaves out small constants"):
        program(torch.relu, (torch.randn(2, 3),), onnx_runtime, tmp_path)


def test_the_exporters_optimizer_is_as_it_was_for_others(tmp_path):
    import onnxscript.rewriter as rewriter

    before = rewriter._DEFAULT_REWRITE_RULES
    program(torch.relu, (torch.randn(2, 3),), onnx_runtime, tmp_path)
    assert rewriter._DEFAULT_REWRITE_RULES is before
