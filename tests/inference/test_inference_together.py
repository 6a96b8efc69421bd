"""The lines of several techniques stand one behind the other: each changes `model`, and none undoes or loses another."""

from __future__ import annotations

import ast
import dataclasses
import platform
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="needs torch")
from torch.utils._pytree import tree_leaves  # noqa: E402 - after the check for torch

from saturate.inference import session, tried  # noqa: E402
from saturate.inference.candidates import Candidate, Part  # noqa: E402
from saturate.inference.techniques import _registry  # noqa: E402
from saturate.inference.techniques._api import Context, variants_of  # noqa: E402
from saturate.records.inference import ModelFacts  # noqa: E402

TECHNIQUES = _registry.load()

#: Facts that every technique makes variants for.
FACTS = ModelFacts(torch=torch.__version__, dtypes=("float32",), linears=3, convolutions=2, attentions=2, embeddings=1, cores=2, threads=2, batch_size=4,
                   exportable=True, installed={"onnxruntime": "1.30"}, cpu_flags=frozenset({"avx512_vnni"}))

#: Needs of those that are not torch alone.
EXTRAS = {"onnx": ("onnx", "onnxruntime", "onnxscript"), "openvino": ("onnx", "onnxscript", "openvino"), "pt2e": ("torchao",), "torchao": ("torchao",)}


class Mixed(torch.nn.Module):
    """Something of everything: convolutions, attention, linear layers of which the last is small, an embedding."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.conv = torch.nn.Conv2d(3, 16, 3), torch.nn.Conv2d(16, 32, 3)
        self.mix, self.head, self.last = torch.nn.Linear(32, 64), torch.nn.Linear(64, 64), torch.nn.Linear(64, 2)
        self.places = torch.nn.Embedding(64, 32)
        self.attention = torch.nn.MultiheadAttention(64, 2, batch_first=True)

    def forward(self, x: Any) -> dict[str, Any]:
        x = self.conv(self.stem(x).relu()).relu().flatten(2).transpose(1, 2) + self.places.weight
        q = self.mix(x).unflatten(-1, (2, 32)).transpose(1, 2)
        x = torch.nn.functional.scaled_dot_product_attention(q, q.flip(2), q).transpose(1, 2).flatten(2)
        x = x + self.attention(x, x, x, need_weights=False)[0]
        return {"hidden": x, "out": self.last(self.head(x.mean(1)).relu())}


def mixed() -> tuple[Any, tuple[Any, ...]]:
    torch.manual_seed(0)
    return Mixed().eval().requires_grad_(False), (torch.randn(4, 3, 12, 12),)


@pytest.fixture
def as_before(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Lines switch what holds for the whole process, and write files."""
    import torch._inductor.config as inductor

    monkeypatch.chdir(tmp_path)
    freezing, threads, fast = inductor.freezing, torch.get_num_threads(), torch.backends.mha.get_fastpath_enabled()
    switches, order = session.of_process(torch), torch._C._get_sdp_priority_order()
    yield
    inductor.freezing = freezing
    torch.set_num_threads(threads)
    torch.backends.mha.set_fastpath_enabled(fast)
    session.restore(torch, switches)
    torch._C._set_sdp_priority_order(order)


def part(id: str, **options: Any) -> Part:
    return Part(TECHNIQUES[id], TECHNIQUES[id].Options(**options))


def applied(parts: list[Part], folder: Path) -> list[Any]:
    """What the candidate answers."""
    model, inputs = mixed()
    context = Context(torch=torch, model=model, device="cpu", inputs=[inputs], calibration=[inputs] * 3, facts=FACTS, folder=folder, threads=1)
    for one in Candidate.of(parts).parts:
        one.module.apply(context, one.options)
    with torch.no_grad():
        return tree_leaves((context.call or context.model)(*inputs))


def printed(parts: list[Part]) -> dict[str, Any]:
    """The names that there are after the candidate's lines."""
    model, inputs = mixed()
    names = {"torch": torch, "model": model, "inputs": inputs}
    exec(tried.code(Candidate.of(parts)), names)
    return names


def distance(found: list[Any], wanted: list[Any]) -> float:
    return max(float((one - other).norm() / other.norm()) for one, other in zip(found, wanted, strict=True))


PAIRS = [
    [part("bf16"), part("nhwc-layout")], [part("bf16", autocast=True), part("nhwc-layout")], [part("bf16"), part("sdpa-kernel", backend="math")],
    [part("threads"), part("bf16", autocast=True)], [part("nhwc-layout"), part("sdpa-kernel", backend="math")],
    [part("torchao-weight-only", bfloat16=True)], [part("torchao-dynamic-int8", bfloat16=True)],
    [part("torchao-dynamic-int8", asymmetric=True), part("nhwc-layout")], [part("torchao-weight-only"), part("sdpa-kernel", backend="math")],
]
COMPILED = [
    [part("bf16"), part("compile-inference")], [part("bf16", autocast=True), part("compile-inference")],
    [part("nhwc-layout"), part("compile-inference", freezing=False)], [part("sdpa-kernel", backend="math"), part("compile-inference")],
    [part("torchao-dynamic-int8"), part("compile-inference", freezing=False)], [part("torchao-weight-only", bfloat16=True), part("compile-inference", freezing=False)],
    [part("bf16"), part("aot-inductor")], [part("bf16", autocast=True), part("aot-inductor")], [part("nhwc-layout"), part("aot-inductor")],
    [part("sdpa-kernel", backend="math"), part("onnx-runtime")], [part("sdpa-kernel", backend="math"), part("openvino-runtime")],
    [part("sdpa-kernel", backend="math"), part("pt2e-dynamic-int8")],
]


@pytest.mark.parametrize("parts", [*PAIRS, *(pytest.param(pair, marks=pytest.mark.slow) for pair in COMPILED)],
                         ids=lambda parts: Candidate.of(parts).label())
def test_lines_of_several_techniques_do_what_each_of_them_does(parts: list[Part], tmp_path: Path, as_before: None) -> None:
    for one in parts:
        for package in next((packages for start, packages in EXTRAS.items() if one.id.startswith(start)), ()):
            pytest.importorskip(package, reason="the extra saturate[inference]")
    assert Candidate.of(parts).conflict() is None
    model, inputs = mixed()
    plain, wanted = tree_leaves(model(*inputs)), applied(parts, tmp_path)
    found = [torch.as_tensor(one) for one in tree_leaves(printed(parts)["answers"])]
    assert [one.dtype for one in found] == [one.dtype for one in wanted]
    # Nearer to the candidate than the candidate is to the model: a format that was lost would be as far from the one as from the other.
    # PT2E's lines label no operators, so they round in other places.
    share = 1.0 if any(one.id.startswith("pt2e") for one in parts) else 0.25
    assert distance(found, wanted) <= max(share * distance(wanted, plain), 1e-5)
    assert all(distance([one], [other]) > 0 for one, other in zip(found, plain)) or Candidate.of(parts).lossless, "nothing was rounded"


@pytest.mark.parametrize("options", [{"autocast": True}, {}])
def test_a_number_format_and_a_layout_hold_together(options: dict[str, Any], as_before: None) -> None:
    model, inputs = mixed()
    seen = []
    model.conv.register_forward_hook(lambda module, given, output: seen.append(output))
    names = {"torch": torch, "model": model, "inputs": inputs}
    exec(tried.code(Candidate.of([part("bf16", **options), part("nhwc-layout")])), names)
    assert seen[-1].dtype == torch.bfloat16 and seen[-1].is_contiguous(memory_format=torch.channels_last)
    assert [one.dtype for one in tree_leaves(names["answers"])] == [torch.float32] * 2
    assert names["inputs"] is inputs, "inputs are the user's"


def test_a_cast_model_answers_in_its_own_format_and_keeps_what_is_no_float(as_before: None) -> None:
    model, (x,) = mixed()
    model.double().register_buffer("turns", torch.ones(2, dtype=torch.complex64))
    names = {"torch": torch, "model": model, "inputs": (x.double(),)}
    exec(tried.code(Candidate.of([part("bf16")])), names)
    assert {one.dtype for one in tree_leaves(names["answers"])} == {torch.float64}
    assert model.conv.weight.dtype == torch.bfloat16 and model.turns.dtype == torch.complex64


@pytest.mark.parametrize("others", [[], ["bf16"]])
def test_the_choice_of_attention_holds_beyond_the_lines(others: list[str], as_before: None) -> None:
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        printed([part("sdpa-kernel", backend="math"), *map(part, others)])
    ran = {event.key for event in profile.key_averages() if "_scaled_dot_product" in event.key}
    assert any("attention_math" in key for key in ran) and not any("flash" in key for key in ran)
    assert torch.backends.cuda.math_sdp_enabled() and not torch.backends.cuda.flash_sdp_enabled()


def test_what_a_chosen_attention_does_not_support_has_the_plain_one(as_before: None) -> None:
    names: dict[str, Any] = {"torch": torch}
    exec(part("sdpa-kernel", backend="cudnn").module.as_code(part("sdpa-kernel", backend="cudnn").options), names)
    q = torch.randn(1, 2, 8, 16)
    assert torch.nn.functional.scaled_dot_product_attention(q, q, q).shape == q.shape


def test_lines_leave_the_call_to_the_end() -> None:
    """What follows of other techniques would act on no answer."""
    for module in TECHNIQUES.values():
        for options in variants_of(module, FACTS):
            stored = {node.id for node in ast.walk(ast.parse(module.as_code(options))) if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)}
            assert not stored & {"answers", "inputs"}, module.TECHNIQUE.id


# -- what a technique leaves alone -------------------------------------------------------------------------------------


@pytest.mark.parametrize("id", ["torchao-weight-only", "torchao-dynamic-int8", "torchao-int4"])
def test_layers_that_are_left_alone_are_left_alone_by_the_lines(id: str, as_before: None) -> None:
    pytest.importorskip("torchao", reason="the extra saturate[inference]")
    model, inputs = mixed()
    options = {"group": 32} if id == "torchao-int4" else {}
    exec(tried.code(Candidate.of([part(id, **options)])), {"torch": torch, "model": model, "inputs": inputs})
    quantized = {name for name, layer in model.named_modules()
                 if isinstance(layer, torch.nn.Linear) and type(layer.weight) is not torch.nn.Parameter}
    assert quantized == {"mix", "head"}, "not the small last one, nor the output layer of attention"


@pytest.mark.slow
def test_layers_that_are_left_alone_are_not_trained_with_rounding(as_before: None) -> None:
    pytest.importorskip("torchao", reason="the extra saturate[inference]")
    model, inputs = mixed()
    model.requires_grad_(True)
    names = {"torch": torch, "model": model, "inputs": inputs, "loader": [(*inputs, torch.arange(4) % 2)] * 2,
             "loss": lambda output, target: torch.nn.functional.cross_entropy(output["out"], target)}
    exec(tried.code(Candidate.of([part("qat-dynamic-int8")])), names)
    assert {name for name, layer in model.named_modules() if "Int8" in type(getattr(layer, "weight", None)).__name__} == {"mix", "head"}


def test_embeddings_are_not_pruned_and_the_share_is_reached(as_before: None) -> None:
    model, inputs = mixed()
    model.requires_grad_(True)
    names = {"torch": torch, "model": model, "inputs": inputs, "loader": [(*inputs, torch.arange(4) % 2)] * 2,
             "loss": lambda output, target: torch.nn.functional.cross_entropy(output["out"], target)}
    exec(tried.code(Candidate.of([part("magnitude-pruning", sparsity=0.5)])), names)
    assert bool((model.places.weight != 0).all())
    for weight in (model.conv.weight, model.head.weight, model.attention.in_proj_weight):
        assert float((weight == 0).float().mean()) == pytest.approx(0.5, abs=0.01)


def test_a_student_answers_in_evaluation_mode(as_before: None) -> None:
    _, inputs = mixed()

    def network() -> Any:
        return torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(432, 2), torch.nn.Dropout(0.9))

    names = {"torch": torch, "model": network().eval(), "inputs": inputs, "make_student": network, "loader": [(*inputs, torch.arange(4) % 2)] * 2,
             "loss": torch.nn.functional.cross_entropy}
    exec(tried.code(Candidate.of([part("distillation")])), names)
    assert not names["model"].training and torch.equal(names["answers"], names["model"](*inputs))


@pytest.mark.parametrize("id", ["torchao-dynamic-int8", "qat-dynamic-int8", "pt2e-static-int8", "pt2e-dynamic-int8", "qat-int8", "onnx-int8-static",
                                "onnx-int8-dynamic", "openvino-int8-static"])
def test_the_narrower_range_of_a_cpu_without_vnni_is_printed(id: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(platform, "machine", lambda: "x86_64")

    def prints(facts: ModelFacts) -> set[bool]:
        return {"reduce_range=True" in TECHNIQUES[id].as_code(options) for options in TECHNIQUES[id].variants(facts)}

    assert True in prints(dataclasses.replace(FACTS, cpu_flags=frozenset({"avx2"})))
    assert prints(FACTS) == {False}
