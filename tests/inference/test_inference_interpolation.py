"""Interpolation and averages over windows in ONNX at sizes that vary: the model's own answer, or a refusal by name."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch", reason="torch")
for name in ("onnx", "onnxruntime", "onnxscript", "openvino"):
    pytest.importorskip(name, reason="the extra saturate[inference]")

import onnx  # noqa: E402 - after the checks for what is optional
import torch.nn.functional as F  # noqa: E402
from torch import nn  # noqa: E402

from saturate.inference.techniques import onnx_runtime, openvino_bf16, openvino_int8_static, openvino_runtime  # noqa: E402
from saturate.inference.techniques._api import Context, NotApplied  # noqa: E402
from saturate.records.inference import ModelFacts  # noqa: E402

INSTALLED = {"onnx": "1.23", "onnxruntime": "1.30", "onnxscript": "0.7", "openvino": "2026.1"}


def context_of(model, inputs, folder, varying_shapes=True) -> Context:
    facts = ModelFacts(torch=torch.__version__, dtypes=("float32",), installed=INSTALLED, cores=2, batch_size=inputs[0][0].shape[0],
                       varying_shapes=varying_shapes)
    return Context(torch, model.eval(), "cpu", inputs, inputs, facts, folder, 1)


class Resized(nn.Module):
    """To the sizes of its second input, as a decoder does with what an encoder has left on its way."""

    def __init__(self, mode="nearest"):
        super().__init__()
        self.mode = mode

    def forward(self, x, like):
        return F.interpolate(x, size=like.shape[2:], mode=self.mode) + like[:, :1]


def sizes_of_two(folder, mode="nearest") -> Context:
    return context_of(Resized(mode), [(torch.randn(1, 2, 10, 12), torch.randn(1, 2, 20, 31)), (torch.randn(2, 2, 9, 17), torch.randn(2, 2, 25, 28))], folder)


def test_the_nearest_pixels_are_those_of_the_model_at_every_size(tmp_path):
    """Where the true place of a pixel is a whole number, rounding decides: at sizes of (28, 64) and (16, 94) a runtime that divides took others."""
    context = sizes_of_two(tmp_path)
    onnx_runtime.apply(context, onnx_runtime.Options())
    for there, wanted in [(28, 64), (28, 114), (16, 94), (16, 164), (22, 94), (4, 194), (40, 13), (13, 25), (12, 24), (7, 7)]:
        inputs = torch.randn(3, 2, there, there + 1), torch.randn(3, 2, wanted, wanted - 1)
        assert torch.equal(context.call(*inputs), context.model(*inputs)), (there, wanted)


def test_pixels_that_are_nearest_by_another_sum_are_refused(tmp_path):
    with pytest.raises(NotApplied, match="sizes vary.*nearest-exact"):
        onnx_runtime.apply(sizes_of_two(tmp_path, "nearest-exact"), onnx_runtime.Options())


@pytest.mark.parametrize("technique", [openvino_bf16, openvino_int8_static, openvino_runtime])
def test_a_runtime_whose_division_is_not_torchs_is_not_used_for_them(technique, tmp_path):
    """OpenVINO divides 22 by 94 by way of 1/94."""
    context = sizes_of_two(tmp_path)
    with pytest.raises(NotApplied, match="sizes vary, and OpenVINO.*no multiple"):
        technique.apply(context, technique.Options())


@pytest.mark.parametrize(("mode", "factor", "refused"), [
    ("nearest", 2.0, False), ("nearest", 3.0, False), ("nearest", 0.5, False), ("nearest", 1.5, False), ("bilinear", 2.0, False),
    ("nearest", 1.7, False), ("bilinear", 0.6, False),
    ("nearest", 0.6, True), ("nearest", 0.7, True), ("bilinear", 0.7, True), ("bilinear", 1.1, True)])
def test_a_factor_by_which_a_runtime_comes_to_something_else_is_refused(mode, factor, refused, tmp_path):
    """By 0.7 an image of 90 has 62 pixels in torch and 63 in ONNX; by 0.6 some have another pixel; and 9 by 1.1
    are the same 9 in torch."""
    class Scaled(nn.Module):
        def forward(self, x):
            return F.interpolate(x, scale_factor=factor, mode=mode)

    context = context_of(Scaled(), [(torch.randn(2, 3, 19, 31),), (torch.randn(2, 3, 22, 18),)], tmp_path)
    if refused:
        with pytest.raises(NotApplied, match=f"sizes vary.*interpolates by {factor:g}"):
            onnx_runtime.apply(context, onnx_runtime.Options())
        return
    onnx_runtime.apply(context, onnx_runtime.Options())
    for size in range(9, 100, 3):
        x = torch.randn(1, 3, size, size + 3)
        torch.testing.assert_close(context.call(x), context.model(x), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(("resized", "sizes"), [
    (True, lambda height, width: (2 * height, 3 * width)), (True, lambda height, width: (2 * height - 1, 2 * width + 1)),
    (False, lambda height, width: (height + 18, 2 * width))])
def test_what_is_right_at_all_sizes_is_resized_and_anything_else_gathered(resized, sizes, tmp_path):
    """Resizing is the faster one, and the only one that OpenVINO has. 42 to 60 is 7 to 10, where the places of some pixels are whole numbers."""
    class Larger(nn.Module):
        def forward(self, x):
            return F.interpolate(x, size=sizes(*x.shape[2:]), mode="nearest")

    context = context_of(Larger(), [(torch.randn(2, 3, 19, 31),), (torch.randn(2, 3, 22, 18),)], tmp_path)
    onnx_runtime.apply(context, onnx_runtime.Options())
    operators = {node.op_type for node in onnx.load(context.folder / "model.onnx").graph.node}
    assert ("Resize" in operators, "Gather" in operators) == (resized, not resized)
    for size in (26, 42, 75):
        x = torch.randn(1, 3, size, 15)
        assert torch.equal(context.call(x), context.model(x))


class Pyramid(nn.Module):
    """Features at half and at a quarter of the size of an image, the latter brought to the former's, as FPN does it."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Conv2d(3, 4, 3, 2, 1), nn.Conv2d(4, 4, 3, 2, 1)

    def forward(self, x):
        half = self.first(x)
        return half + F.interpolate(self.second(half), size=half.shape[2:], mode="nearest")


def test_a_pyramid_of_features_keeps_openvino(tmp_path):
    context = context_of(Pyramid(), [(torch.randn(2, 3, 19, 31),), (torch.randn(2, 3, 22, 18),)], tmp_path)
    openvino_runtime.apply(context, openvino_runtime.Options())
    for size in range(33, 70, 3):
        x = torch.randn(2, 3, size, size + 8)
        torch.testing.assert_close(context.call(x), context.model(x), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(("shape", "refused"), [((2, 3, 12, 8), True), ((5, 3, 9, 11), False)])
def test_pixels_that_a_runtime_would_choose_otherwise_at_other_sizes_are_refused(shape, refused, tmp_path):
    """By 1.1 ONNX Runtime took others at 25 of 38 sizes, and the sizes of the inputs may be none of those."""
    class Larger(nn.Module):
        def forward(self, x):
            return F.interpolate(x, scale_factor=1.1, mode="nearest-exact")

    context = context_of(Larger(), [(torch.randn(2, 3, 9, 11),), (torch.randn(*shape),)], tmp_path, varying_shapes=refused)
    if refused:
        with pytest.raises(NotApplied, match="sizes vary.*other pixels"):
            onnx_runtime.apply(context, onnx_runtime.Options())
    else:
        onnx_runtime.apply(context, onnx_runtime.Options())
        torch.testing.assert_close(context.call(*context.inputs[0]), context.model(*context.inputs[0]))


class Averaged(nn.Module):
    def __init__(self, **how):
        super().__init__()
        self.pool = nn.AvgPool2d(3, 2, **how)

    def forward(self, x):
        return self.pool(x)


def test_windows_that_reach_beyond_counted_padding_are_not_openvinos_where_sizes_vary(tmp_path):
    """It answered 8 right and 10 wrongly: the last window there lies partly behind the padding."""
    several = [(torch.randn(1, 2, 9, 9),), (torch.randn(1, 2, 11, 15),)]
    with pytest.raises(NotApplied, match="sizes vary, and .*count_include_pad"):
        openvino_runtime.apply(context_of(Averaged(padding=1, ceil_mode=True), several, tmp_path), openvino_runtime.Options())
    ten = torch.randn(3, 2, 10, 10)
    for number, how in enumerate(({"padding": 1, "ceil_mode": True, "count_include_pad": False}, {"ceil_mode": True}, {"padding": 1})):
        (folder := tmp_path / str(number)).mkdir()
        context = context_of(Averaged(**how), several, folder)
        openvino_runtime.apply(context, openvino_runtime.Options())
        torch.testing.assert_close(context.call(ten), context.model(ten))


def test_openvino_still_divides_such_windows_by_another_count(tmp_path):
    """Of one size, which its answers are compared at. When this fails, the refusal above has become needless."""
    x = torch.randn(1, 2, 10, 10)
    context = context_of(Averaged(padding=1, ceil_mode=True), [(x,)], tmp_path, varying_shapes=False)
    openvino_runtime.apply(context, openvino_runtime.Options())
    assert not torch.allclose(context.call(x), context.model(x), atol=1e-3)
