"""Quantized graphs: what is rounded, what is left alone, and whether the numbers still are the model's."""

from __future__ import annotations

import dataclasses
import math
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="needs torch")
pytest.importorskip("torchao", reason="needs the extra saturate[inference]")

from quantize_kit import FACTS, VNNI, context, decibels, residual, tokens, transformer  # noqa: E402 - after the check for torch

from saturate.inference.facts import cpu_flags  # noqa: E402
from saturate.inference.formats import _program  # noqa: E402
from saturate.inference.techniques import (  # noqa: E402
    _onnx,
    _pt2e,
    _qat,
    pt2e_dynamic_int8,
    pt2e_static_int8,
    qat_dynamic_int8,
    qat_int8,
)
from saturate.inference.techniques._api import Context, NotApplied, Train  # noqa: E402

nn = torch.nn


def graph_of(where: Context, recipe: _pt2e.Recipe = pt2e_static_int8.RECIPE) -> tuple[Any, Any]:
    """The converted graph as a module like the model, and the graph. Not compiled: the same numbers, slowly."""
    program = _pt2e.captured(where)
    graph = _pt2e.prepared(where, program, recipe)
    _pt2e.calibrate(where, graph, where.calibration)
    graph = _pt2e.converted(torch, graph)
    return _pt2e.served(torch, graph, program), graph


# -- the graph ---------------------------------------------------------------------------------------------------------


def test_a_block_with_one_relu_for_all_is_quantized_whole(tmp_path: Path) -> None:
    where = context(tmp_path, residual(), torch.randn(2, 3, 12, 12))
    expected = where.model(*where.inputs[0])["logits"]
    served, graph = graph_of(where)
    assert _pt2e.quantized(graph) == 6
    assert 25 < decibels(expected, served(*where.inputs[0])["logits"]) < 60


def test_it_takes_the_labels_to_get_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without them torchao gives up on the shared ReLU: the trap is still there."""
    monkeypatch.setattr(_pt2e, "_label", lambda *args: 1)
    where = context(tmp_path, residual(), torch.randn(2, 3, 12, 12))
    with pytest.raises(ValueError, match="more than one output node"):
        graph_of(where)


@pytest.mark.parametrize("batch", [1, 2, 5])
def test_the_graph_takes_other_batch_sizes(tmp_path: Path, batch: int) -> None:
    where = context(tmp_path, residual(), torch.randn(1, 3, 12, 12))
    served, _ = graph_of(where)
    x = torch.randn(batch, 3, 12, 12)
    assert decibels(where.model(x)["logits"], served(x)["logits"]) > 20


class Shared(nn.Module):
    """One convolution with a BatchNorm for each scale, whose own output is used too."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(4, 4, 3, padding=1)
        self.small, self.large = nn.BatchNorm2d(4), nn.BatchNorm2d(4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        first, second = self.conv(x), self.conv(x[..., :6, :6])
        return torch.cat([value.flatten(1) for value in (self.small(second), self.large(first) + first)], 1)


def test_batch_norms_on_a_shared_convolution_are_folded_apart(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    model = Shared().eval()
    for norm, size in ((model.small, 0.3), (model.large, 3.0)):
        nn.init.constant_(norm.weight, size)
        nn.init.constant_(norm.bias, size)
    where = context(tmp_path, model, torch.randn(2, 4, 12, 12))
    expected = model(*where.inputs[0])
    served, graph = graph_of(where)
    assert not [node for node in graph.graph.nodes if "batch_norm" in str(node.target)]
    assert decibels(expected, served(*where.inputs[0])) > 25
    monkeypatch.setattr(_pt2e, "_separate", lambda *args: None)
    assert decibels(expected, graph_of(where)[0](*where.inputs[0])) < 15, "torchao does it right by itself now"


@pytest.mark.parametrize("keep, products", [
    ((), 6), (("stem",), 5), (("blocks.0",), 4), (("blocks.0.conv1", "fc"), 4), (("blocks", "stem", "fc"), 0), (("",), 0)])
def test_kept_layers_are_not_rounded(tmp_path: Path, keep: tuple[str, ...], products: int) -> None:
    where = context(tmp_path, residual(), torch.randn(2, 3, 12, 12), keep=frozenset(keep))
    if not products:
        with pytest.raises(NotApplied, match="no convolution or linear layer is left"):
            graph_of(where)
        return
    served, graph = graph_of(where)
    assert _pt2e.quantized(graph) == products
    assert decibels(where.model(*where.inputs[0])["logits"], served(*where.inputs[0])["logits"]) > 25


def test_attention_is_quantized_and_can_be_kept_by_its_name(tmp_path: Path) -> None:
    where = context(tmp_path, transformer(), tokens())
    _, graph = graph_of(where)
    everything = _pt2e.quantized(graph)
    assert everything >= 8      # in and out of attention, two of its MLP, three of the gated one, the head
    where = context(tmp_path, transformer(), tokens(), keep=frozenset({"layer.self_attn"}))
    assert _pt2e.quantized(graph_of(where)[1]) == everything - 2


def test_linear_layers_read_contiguous_inputs(tmp_path: Path) -> None:
    """Where sizes are open, a product of another layout becomes no integer kernel."""
    graph = _pt2e.captured(context(tmp_path, transformer(), tokens())).exported.module()

    def straight() -> list[bool]:
        return [node.args[0].meta["val"].is_contiguous() for node in graph.graph.nodes if str(node.target) == "aten.linear.default"]

    assert not all(straight())
    _pt2e._straighten(torch, graph)
    assert all(straight())


def test_gates_stay_in_float(tmp_path: Path) -> None:
    where = context(tmp_path, transformer(), tokens())
    _, graph = graph_of(where)
    gates = [node for node in graph.graph.nodes if "aten.mul" in str(node.target)]
    assert gates and not any("dequantize" in str(getattr(value, "target", "")) for node in gates for value in node.args)


def test_dynamic_ranges_are_for_linear_layers_only(tmp_path: Path) -> None:
    where = context(tmp_path, residual(), torch.randn(2, 3, 12, 12))
    where.calibration = where.calibration[:1]
    served, graph = graph_of(where, pt2e_dynamic_int8.RECIPE)
    assert _pt2e.quantized(graph) == 1
    assert any("choose_qparams" in str(node.target) for node in graph.graph.nodes)
    assert decibels(where.model(*where.inputs[0])["logits"], served(*where.inputs[0])["logits"]) > 30


@pytest.mark.parametrize("recipe", [pt2e_static_int8.RECIPE, pt2e_dynamic_int8.RECIPE], ids=["static", "dynamic"])
@pytest.mark.parametrize("inputs, weights", [(1.0, 1.0), (1e-4, 1.0), (1.0, 1e-4)])
def test_small_numbers_are_rounded_as_finely_as_others(tmp_path: Path, recipe: Any, inputs: float, weights: float) -> None:
    """torchao's steps ended at 2**-12: of inputs of a ten thousandth nothing was left."""
    torch.manual_seed(0)
    layer = nn.Linear(64, 16, bias=False)
    with torch.no_grad():
        layer.weight.mul_(weights)
    where = context(tmp_path, nn.Sequential(layer), torch.randn(16, 64))
    where.calibration = [tuple(x * inputs for x in batch) for batch in where.calibration]
    served, _ = graph_of(where, recipe)
    x = where.calibration[0][0]
    assert decibels(where.model(x), served(x)) > 30


@pytest.mark.parametrize("sign", [1, -1])
def test_ranges_of_one_sign_include_zero_when_compiled(tmp_path: Path, sign: int) -> None:
    """torch includes it, and its compiler does not: of inputs between 0.8 and 1 nothing was left, and of a batch or a text of that kind in a
    thousand nobody had heard."""
    from torch._inductor.decomposition import decompositions

    torch.manual_seed(0)
    where = context(tmp_path, nn.Sequential(nn.Linear(8, 4)), torch.randn(16, 8))
    served, graph = graph_of(where, pt2e_dynamic_int8.RECIPE)
    chosen = [node for node in graph.graph.nodes if "choose_qparams" in str(node.target)]
    x = sign * (0.8 + 0.2 * torch.rand(16, 8))
    expected = torch.ops.quantized_decomposed.choose_qparams.tensor(x, *chosen[0].args[1:])
    compiled = decompositions[torch.ops.quantized_decomposed.choose_qparams.tensor]
    assert [tensor.item() for tensor in compiled(x, *chosen[0].args[1:])] != pytest.approx([tensor.item() for tensor in expected]), "mended in torch"
    for node in chosen:
        ends = node.args[0].target(x)
        assert [tensor.item() for tensor in compiled(ends, *node.args[1:])] == pytest.approx([tensor.item() for tensor in expected])
    assert chosen and decibels(where.model(x), served(x)) > 30


def test_without_vnni_inputs_take_seven_bits(tmp_path: Path) -> None:
    def most(flags: frozenset[str]) -> set[int]:
        where = context(tmp_path, residual(), torch.randn(2, 3, 12, 12), facts={"cpu_flags": flags})
        graph = graph_of(where, pt2e_static_int8._recipe(*pt2e_static_int8.variants(where.facts)))[1]
        return {node.args[4] for node in graph.graph.nodes if "quantize_per_tensor" in str(node.target)}

    assert most(VNNI) == {255}
    assert most(frozenset({"avx2"})) == {127}


class Plain(nn.Module):
    """Functions instead of layers, a sum with a number, a sum with itself."""

    def __init__(self) -> None:
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.randn(6, 3, 3, 3) / 5), nn.Parameter(torch.randn(6))
        self.out = nn.Linear(6, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = nn.functional.conv2d(x, self.weight, self.bias, padding=1) + 1.0
        x = nn.functional.hardswish(nn.functional.conv2d(x, self.weight.flip(0)[:, :3].repeat(1, 2, 1, 1), padding=1))
        x = x + x
        return nn.functional.gelu(self.out(x.mean((2, 3))))


def test_functions_and_sums_with_numbers_are_no_obstacle(tmp_path: Path) -> None:
    torch.manual_seed(0)
    where = context(tmp_path, Plain(), torch.randn(2, 3, 8, 8))
    served, graph = graph_of(where)
    assert _pt2e.quantized(graph) >= 2
    assert decibels(where.model(*where.inputs[0]), served(*where.inputs[0])) > 20


class Precise(nn.Module):
    """A table of float64 beside layers of float32, and a product and a sum in float64."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.exact = nn.Linear(8, 16), nn.Linear(16, 4), nn.Linear(4, 4).double()
        self.register_buffer("table", torch.linspace(0.5, 2, 8, dtype=torch.float64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.second(nn.functional.relu(self.first((x * self.table).float()))).double()
        return x + self.exact(x)


def test_only_what_is_float32_is_rounded(tmp_path: Path) -> None:
    """A model with one number of another format was refused as a whole."""
    torch.manual_seed(0)
    where = context(tmp_path, Precise(), torch.randn(2, 8), facts={"dtypes": ("float32", "float64")})
    assert _pt2e.refusal(where.facts) is None or "compiler" in _pt2e.refusal(where.facts).reason
    served, graph = graph_of(where)
    assert _pt2e.quantized(graph) == 2
    answer = served(*where.inputs[0])
    assert answer.dtype == torch.float64 and decibels(where.model(*where.inputs[0]), answer) > 15
    assert "float16" in _pt2e.refusal(dataclasses.replace(where.facts, dtypes=("float16",))).reason


class Overwriting(nn.Module):
    """Activations in place, whose result nobody takes: the tensor that was given has changed."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm, self.relu, self.out = nn.Conv2d(3, 6, 3), nn.BatchNorm2d(6), nn.ReLU(inplace=True), nn.Linear(6, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.norm(self.conv(x))
        self.relu(x)
        y = x.mean((2, 3))
        y += 1
        return self.out(y)


def test_operators_that_overwrite_their_inputs_are_seen(tmp_path: Path) -> None:
    torch.manual_seed(0)
    where = context(tmp_path, Overwriting(), torch.randn(2, 3, 8, 8))
    served, graph = graph_of(where)
    assert _pt2e.quantized(graph) == 2
    assert decibels(where.model(*where.inputs[0]), served(*where.inputs[0])) > 25


def test_calibration_must_be_there(tmp_path: Path) -> None:
    where = context(tmp_path, residual(), torch.randn(2, 3, 12, 12))
    where.calibration = []
    with pytest.raises(NotApplied, match="there are no calibration inputs"):
        graph_of(where)
    assert not pt2e_static_int8.eligible(dataclasses.replace(FACTS, calibration_samples=0))


def test_batch_norm_without_statistics_of_its_own_is_not_folded(tmp_path: Path) -> None:
    """torchao looked for what it would fold, and found None."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8, track_running_stats=False), nn.ReLU(), nn.Flatten(), nn.Linear(128, 4))
    where = context(tmp_path, model, torch.randn(4, 3, 6, 6))
    served, graph = graph_of(where)
    assert _pt2e.quantized(graph) == 2
    assert decibels(where.model(*where.inputs[0]), served(*where.inputs[0])) > 25


class OtherwiseAlone(nn.Module):
    """One row goes another way."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.many, self.one = nn.Linear(16, 16), nn.Linear(16, 8), nn.Linear(16, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x).relu()
        return self.many(x) if x.shape[0] > 1 else self.one(x)


def test_sizes_that_the_model_was_not_captured_for_stay_refused(tmp_path: Path) -> None:
    """The rounded graph, captured once more, was compared with itself: one row was taken, and answered as several are."""
    where = context(tmp_path, OtherwiseAlone(), torch.randn(4, 16))
    program = _pt2e.captured(where)
    assert list(program.signature["ranges"].values()) == [[2, None]]
    where.model, _ = graph_of(where)
    again = _program.capture(where)
    assert list(again.signature["ranges"].values()) == [[1, None]], "which is what has to be narrowed"
    _pt2e._no_wider(again.signature, program.signature)
    assert list(again.signature["ranges"].values()) == [[2, None]]


def test_the_proof_wants_integer_kernels(tmp_path: Path) -> None:
    where = context(tmp_path, residual(), torch.randn(2, 3, 12, 12))
    assert not pt2e_static_int8.active(where, pt2e_static_int8.Options()).active
    where.notes |= {"pt2e-static-int8 products": "6", "pt2e-static-int8 lowered": "0"}
    assert not pt2e_static_int8.active(where, pt2e_static_int8.Options()).active


# -- all else in bfloat16 -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("module", [pt2e_static_int8, pt2e_dynamic_int8])
def test_with_amx_all_else_is_tried_in_bfloat16_first(module: Any) -> None:
    with_amx = dataclasses.replace(FACTS, cpu_flags=FACTS.cpu_flags | {"avx512_bf16", "amx_bf16"})
    assert [options.bfloat16 for options in module.variants(with_amx)] == [True, False]
    assert module.bound(with_amx) > module.bound(FACTS)
    without = dataclasses.replace(FACTS, cpu_flags=FACTS.cpu_flags | {"avx512_bf16"})
    assert [options.bfloat16 for options in module.variants(without)] == [False], "instructions alone are hardly faster than float32"


@pytest.mark.parametrize("bfloat16", [True, False])
def test_it_compiles_with_all_else_in_bfloat16(tmp_path: Path, bfloat16: bool) -> None:
    """Integer kernels as without it, answers in float32; what lies between products is rounded, which its answers show."""
    where = context(tmp_path, transformer(), tokens(), facts={"cpu_flags": cpu_flags()})
    model, options = where.model, pt2e_static_int8.Options(reduce_range=not _onnx.vnni(where.facts), bfloat16=bfloat16)
    assert ("bfloat16" in pt2e_static_int8.apply(where, options)) is bfloat16
    assert pt2e_static_int8.active(where, options).active
    assert where.notes["pt2e-static-int8 lowered"] == where.notes["pt2e-static-int8 products"]
    got = where.call(*where.inputs[0])
    assert got.dtype == torch.float32
    assert decibels(model(*where.inputs[0]), got) > 15
    assert bool((got.bfloat16().float() == got).all()) is bfloat16, "the last product's answers"


# -- compiled ----------------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("technique, make, inputs, least", [
    (pt2e_static_int8, residual, lambda: torch.randn(2, 3, 12, 12), 25),
    (pt2e_static_int8, transformer, tokens, 15),
    (pt2e_dynamic_int8, transformer, tokens, 25),
    (pt2e_dynamic_int8, lambda: nn.Sequential(nn.Sigmoid(), nn.Linear(64, 8)), lambda: torch.randn(16, 64), 25),
])
def test_compiled_programs_agree_are_lowered_and_can_be_stored(tmp_path: Path, technique: Any, make: Any, inputs: Any, least: float) -> None:
    from saturate.inference.formats import aoti

    where = context(tmp_path, make(), inputs(), facts={"cpu_flags": cpu_flags()})      # of this CPU: without VNNI full ranges saturate
    model, options = where.model, technique.variants(where.facts)[0]
    words = technique.apply(where, options)
    proof = technique.active(where, options)
    assert proof.active, proof.evidence
    (tmp_path / "artifact").mkdir()
    entry = where.save(tmp_path / "artifact")
    for call in (where.call, aoti.load(torch, tmp_path / "artifact", entry)):
        for batch in where.inputs:
            expected, got = model(*batch), call(*batch)
            assert type(got) is type(expected)
            left, right = (value["logits"] if isinstance(value, dict) else value for value in (expected, got))
            assert decibels(left, right) > least, words


# -- training with rounding --------------------------------------------------------------------------------------------


def trainable(model: Any, count: int = 24, rate: float = 3e-4, size: tuple[int, ...] = (3, 12, 12)) -> Train:
    """The model's own answers, to be learned again."""
    torch.manual_seed(3)
    inputs = [torch.randn(8, *size) for _ in range(count)]
    with torch.no_grad():
        targets = [(value["logits"] if isinstance(value, dict) else value).clone() for value in map(model, inputs)]

    def loss(output: Any, target: Any) -> Any:
        return nn.functional.mse_loss(output["logits"] if isinstance(output, dict) else output, target)

    return Train(list(zip(inputs, targets)), loss, learning_rate=rate, epochs=6)


def test_training_with_rounding_brings_the_rounded_graph_closer(tmp_path: Path) -> None:
    """One channel is so large that few steps are left for the others; what reads it makes it small again."""
    model = residual()
    with torch.no_grad():
        for parameter in (model.stem.weight, model.stem.bias):
            parameter[0] *= 60
        for layer in (*(block.conv1 for block in model.blocks), model.fc):
            layer.weight[:, 0] /= 60
    where = context(tmp_path, model, torch.randn(2, 3, 12, 12), train=trainable(model))
    x = torch.randn(32, 3, 12, 12)
    expected = model(x)["logits"].clone()
    rounded = decibels(expected, graph_of(where)[0](x)["logits"])
    teacher, program = _qat.original(where), _pt2e.captured(where)
    graph = _pt2e.prepared(where, program, qat_int8.RECIPE)
    words = _qat.recover(where, _pt2e.served(torch, graph, program), teacher, lambda progress: qat_int8._fix_ranges(graph, progress))
    graph = _pt2e.converted(torch, graph)
    assert _pt2e.quantized(graph) == 6
    trained = decibels(expected, _pt2e.served(torch, graph, program)(x)["logits"])
    assert trained > rounded + 1.5, words


class Mlp(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 16))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers(x)


def test_linear_layers_are_trained_with_rounding_and_then_rounded(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = Mlp()
    where = context(tmp_path, model, torch.randn(4, 8), train=trainable(model, size=(8,)))
    before = model.layers[0].weight.clone()
    x = torch.randn(64, 8)
    expected = model(x)
    words = qat_dynamic_int8.apply(where, qat_dynamic_int8.Options())
    assert " steps in " in words and "3 of 3 linear layers" in words
    assert qat_dynamic_int8.active(where, qat_dynamic_int8.Options()).active
    assert not torch.equal(before, where.model.layers[0].weight.dequantize())
    assert decibels(expected, where.model(x)) > 25
    assert not any(parameter.requires_grad for parameter in where.model.parameters())


def test_what_cannot_be_trained_is_not_applied(tmp_path: Path) -> None:
    model = Mlp()
    good = trainable(model, size=(8,))
    cases = {
        "diverged": dataclasses.replace(good, loss=lambda output, target: output.sum() * math.nan),
        "cannot be trained": dataclasses.replace(good, loader=[(torch.randn(2, 9), torch.randn(2, 16))]),
        "needs training data": None,
    }
    for words, data in cases.items():
        where = context(tmp_path, model, torch.randn(4, 8), train=data)
        with pytest.raises(NotApplied, match=words):
            _qat.recover(where, model, _qat.original(where))
