"""Runtimes of torch, number formats, layouts and switches, applied to models of many kinds."""

from __future__ import annotations

import copy
import dataclasses
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from saturate.inference import runtimes, session, structure  # noqa: E402 - after the check for torch
from saturate.inference.formats import NotDeployable, aoti, exported  # noqa: E402
from saturate.inference.techniques import (  # noqa: E402
    _wrap,
    aot_inductor,
    bf16,
    compile_inference,
    cuda_graphs,
    fp16,
    nhwc_layout,
    sdpa_kernel,
    tf32_products,
    threads,
)
from saturate.inference.techniques._api import Context, NotApplied  # noqa: E402
from saturate.records.inference import ModelFacts  # noqa: E402
from saturate.testing import inference_toys as toys  # noqa: E402
from saturate.testing.inference_conformance import agreement_db, undone  # noqa: E402

BATCH = torch.randn(4, 3, 16, 16, generator=torch.Generator().manual_seed(0))
IDS = torch.randint(toys.WORDS, (4, toys.LENGTH), generator=torch.Generator().manual_seed(0))
MASK = torch.ones(4, toys.LENGTH, dtype=torch.bool)


@pytest.fixture(autouse=True)
def switches_as_before() -> Any:
    with undone():
        yield


def context_of(model: Any, inputs: list[tuple[Any, ...]], folder: Path, keep: tuple[str, ...] = (), **facts: Any) -> Context:
    facts.setdefault("batch_size", len(inputs[0][0]))
    return Context(torch=torch, model=model.eval().requires_grad_(False), device="cpu", inputs=inputs, calibration=[],
                   facts=ModelFacts(torch=torch.__version__, **facts), folder=folder, threads=2, keep=frozenset(keep))


def images(folder: Path, **more: Any) -> Context:
    return context_of(toys.toys()[0].make(), [(BATCH,)], folder, **more)


def tokens(folder: Path, **more: Any) -> Context:
    return context_of(toys.toys()[1].make(), [(IDS, MASK)], folder, **more)


# -- bf16 and fp16 -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("autocast", [False, True])
def test_bf16_computes_in_bfloat16_and_answers_in_float32(autocast: bool, tmp_path: Path) -> None:
    context = tokens(tmp_path)
    expected = context.model(IDS, MASK)
    bf16.apply(context, bf16.Options(autocast=autocast))
    got = context.model(IDS, MASK)
    assert isinstance(got, toys.Answer) and got.logits.dtype is got.pooled.dtype is torch.float32
    assert 25 < agreement_db(torch, expected.logits, got.logits) < 80      # neither wrong nor float32 after all
    assert bf16.active(context, bf16.Options()).active


@pytest.mark.parametrize("autocast", [False, True])
def test_kept_modules_compute_in_float32(autocast: bool, tmp_path: Path) -> None:
    context = tokens(tmp_path, keep=("wide", "narrow"))
    bf16.apply(context, bf16.Options(autocast=autocast))
    got = context.model(IDS, MASK)
    assert got.logits.dtype is torch.float32
    # Three projections, attention and the head; not the two layers that are kept.
    assert bf16.active(context, bf16.Options()).evidence == "5 of 7 products are computed in bfloat16"
    assert context.model.wide.weight.dtype is torch.float32
    assert context.model.query.weight.dtype is (torch.float32 if autocast else torch.bfloat16)


def test_a_kept_module_that_does_not_exist_is_named(tmp_path: Path) -> None:
    with pytest.raises(NotApplied, match="no module 'head.x'"):
        bf16.apply(images(tmp_path, keep=("head.x",)), bf16.Options())


def test_keeping_everything_is_not_applied(tmp_path: Path) -> None:
    context = images(tmp_path, keep=("stem", "body", "hidden", "head"))
    with pytest.raises(NotApplied, match="none of the model's 4 products"):
        bf16.apply(context, bf16.Options())


def test_tied_weights_stay_tied(tmp_path: Path) -> None:
    context = tokens(tmp_path)
    bf16.apply(context, bf16.Options())
    assert context.model.head.weight is context.model.embedding.weight
    assert context.model.head.weight.dtype is torch.bfloat16


class Functional(torch.nn.Module):
    """No layer: a parameter and calls of functions; a float64 input that is no number format of the model's."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.randn(8, 8))
        self.register_buffer("steps", torch.arange(8))

    def forward(self, x: torch.Tensor, times: torch.Tensor | None = None) -> tuple[torch.Tensor, torch.Tensor]:
        return torch.nn.functional.linear(x, self.weight), self.steps


def test_functional_layers_and_integer_buffers(tmp_path: Path) -> None:
    context = context_of(Functional(), [(torch.randn(4, 8), None)], tmp_path)
    bf16.apply(context, bf16.Options())
    product, steps = context.model(torch.randn(4, 8))
    assert product.dtype is torch.float32 and steps.dtype is torch.int64
    assert "1 of 1" in bf16.active(context, bf16.Options()).evidence


def test_a_deep_copy_runs_its_own_weights(tmp_path: Path) -> None:
    context = images(tmp_path)
    nhwc_layout.apply(context, nhwc_layout.Options())
    bf16.apply(context, bf16.Options())
    twin = copy.deepcopy(context.model)
    expected = twin(BATCH)["logits"].clone()
    for parameter in context.model.parameters():
        parameter.data.zero_()
    assert torch.equal(twin(BATCH)["logits"], expected)


def test_fp16_overflow_is_not_hidden(tmp_path: Path) -> None:
    """float16 ends at 65504: that it became infinite must show in the outputs."""
    context = context_of(torch.nn.Linear(8, 8), [(torch.full((4, 8), 1e6),)], tmp_path)
    fp16.apply(context, fp16.Options())
    assert not torch.isfinite(context.model(torch.full((4, 8), 1e6))).all()


@pytest.mark.parametrize(("flags", "answer"), [(frozenset(), False), (frozenset({"avx512_bf16"}), True), (frozenset({"amx_bf16"}), True)])
def test_bf16_needs_the_arithmetic(flags: frozenset[str], answer: bool) -> None:
    facts = ModelFacts(dtypes=("float32",), linears=1, cpu_flags=flags)
    assert bool(bf16.eligible(facts)) is answer
    assert not fp16.eligible(facts)
    assert not bf16.eligible(dataclasses.replace(facts, dtypes=("bfloat16",)))


# -- layout --------------------------------------------------------------------------------------------------------------


def test_the_lines_of_nhwc_take_any_inputs_and_convolutions_of_both_kinds() -> None:
    model = torch.nn.ModuleList([torch.nn.Conv2d(3, 4, 3), torch.nn.ConvTranspose3d(3, 4, 3), torch.nn.Linear(2, 2)])
    image, clip, counts = torch.rand(2, 3, 8, 8), torch.rand(2, 3, 4, 8, 8), torch.ones(2, 3, 4, 4, dtype=torch.long)
    given = {"torch": torch, "model": model, "inputs": (image, None, True, 3, {"clip": [clip]}, counts)}
    exec(nhwc_layout.as_code(nhwc_layout.Options()), given)
    formats = {4: torch.channels_last, 5: torch.channels_last_3d}
    first, nothing, flag, number, nested, other = given["mapped"](given["inward"], given["inputs"])     # type: ignore[operator]
    assert (nothing, flag, number) == (None, True, 3) and other is counts
    for found, wanted in ((first, image), (nested["clip"][0], clip), *((layer.weight, layer.weight) for layer in model[:2])):
        assert torch.equal(found, wanted) and found.is_contiguous(memory_format=formats[found.dim()]) and not found.is_contiguous()


def test_nhwc_changes_strides_and_nothing_else(tmp_path: Path) -> None:
    context = images(tmp_path)
    weight = context.model.body.weight
    expected = context.model(BATCH)
    nhwc_layout.apply(context, nhwc_layout.Options())
    got = context.model(BATCH)
    assert context.model.body.weight is weight and weight.is_contiguous(memory_format=torch.channels_last)
    assert agreement_db(torch, expected["logits"], got["logits"]) > 100
    assert "2 of 2" in nhwc_layout.active(context, nhwc_layout.Options()).evidence


def test_outputs_keep_the_usual_layout(tmp_path: Path) -> None:
    context = context_of(torch.nn.Conv2d(3, 8, 3), [(BATCH,)], tmp_path)
    nhwc_layout.apply(context, nhwc_layout.Options())
    assert context.model(BATCH).is_contiguous()


def test_a_model_that_undoes_the_layout_is_not_applied(tmp_path: Path) -> None:
    class Undoes(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = torch.nn.Conv2d(3, 1, 1)       # one channel: there is nothing to lay out

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.layer(x)

    with pytest.raises(NotApplied, match="none of 1"):
        nhwc_layout.apply(context_of(Undoes(), [(BATCH,)], tmp_path), nhwc_layout.Options())


# -- switches of the process ---------------------------------------------------------------------------------------------


def test_threads_are_set_and_limited(tmp_path: Path) -> None:
    context = images(tmp_path)
    threads.apply(context, threads.Options(2))
    assert torch.get_num_threads() == context.threads == 2
    assert threads.active(context, threads.Options(2)).active and not threads.active(context, threads.Options(1)).active
    torch.set_num_threads(1)                            # as a model that sets it itself
    assert not threads.active(context, threads.Options(2)).active
    with pytest.raises(NotApplied, match="may use 2"):
        threads.apply(context, threads.Options(3))


def test_threads_offer_what_is_not_used_already() -> None:
    facts = ModelFacts(cores=64, threads=1)
    assert 1 not in [options.count for options in threads.variants(facts)]
    assert 64 in [options.count for options in threads.variants(facts)]
    assert not threads.eligible(ModelFacts(cores=1, threads=1))


def test_attention_runs_by_the_plain_kernel(tmp_path: Path) -> None:
    context = tokens(tmp_path)
    expected = context.model(IDS, MASK)
    sdpa_kernel.apply(context, sdpa_kernel.Options("math"))
    assert agreement_db(torch, expected.logits, context.model(IDS, MASK).logits) > 100
    assert sdpa_kernel.active(context, sdpa_kernel.Options("math")).active


def test_an_attention_kernel_that_this_device_lacks_is_not_applied(tmp_path: Path) -> None:
    with pytest.raises(NotApplied, match="cudnn does not support"):
        sdpa_kernel.apply(tokens(tmp_path), sdpa_kernel.Options("cudnn"))
    with pytest.raises(NotApplied, match="does not call"):
        sdpa_kernel.apply(images(tmp_path), sdpa_kernel.Options("math"))


def test_switches_are_restored_where_the_artifact_is_loaded(tmp_path: Path) -> None:
    context = tokens(tmp_path)
    threads.apply(context, threads.Options(2))
    sdpa_kernel.apply(context, sdpa_kernel.Options("math"))
    entry = exported.save(context, tmp_path)
    torch.set_num_threads(1)
    torch.backends.cuda.enable_flash_sdp(True)
    exported.load(torch, tmp_path, entry)
    assert torch.get_num_threads() == 2 and not torch.backends.cuda.flash_sdp_enabled()


def test_an_unknown_switch_is_refused() -> None:
    with pytest.raises(ValueError, match="no switch"):
        session.restore(torch, {"environment": "x"})


def test_tf32_and_cuda_graphs_need_a_gpu(tmp_path: Path) -> None:
    facts = ModelFacts(dtypes=("float32",), linears=1)
    assert not tf32_products.eligible(facts) and not cuda_graphs.eligible(facts)
    for module in (tf32_products, cuda_graphs):
        with pytest.raises(NotApplied):
            module.apply(images(tmp_path), module.Options())


def test_outputs_of_recorded_graphs_are_the_callers_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """A stand-in for a GPU: its tensors say that they are on one, and the next call overwrites what was returned."""
    class OnGpu(torch.Tensor):
        is_cuda = True

    held, began = torch.zeros(2).as_subclass(OnGpu), []
    monkeypatch.setattr(torch, "compile", lambda function, **_: lambda x: (held.copy_(function(x)), "x"))
    monkeypatch.setattr(torch.compiler, "cudagraph_mark_step_begin", lambda: began.append(1))
    for mode, own in (("reduce-overhead", True), ("max-autotune", True), ("default", False)):
        call = runtimes.compiled(torch, torch.nn.Identity(), mode=mode, dynamic=False, freezing=False)
        (first, word), _ = call(torch.ones(2)), call(torch.full((2,), 7.0))
        assert bool((first == 1).all()) is own and word == "x"
    assert len(began) == 4


def test_weights_are_frozen_in_programs_of_its_own_only(monkeypatch: pytest.MonkeyPatch) -> None:
    """Inductor's switch is one for the process: what the user compiles would answer with weights of yesterday."""
    import torch._inductor.config as inductor

    seen: list[bool] = []
    monkeypatch.setattr(torch, "compile", lambda function, **_: lambda x: (seen.append(inductor.freezing), function(x)))
    for before in (False, True):
        with inductor.patch(freezing=before):           # pytest's own would delete the setting in the end
            for freezing in (True, False):
                call = runtimes.compiled(torch, torch.nn.Identity(), mode="default", dynamic=False, freezing=freezing)
                assert inductor.freezing is before
                for rows in (1, 2):             # another shape is another compilation, which freezes as well
                    call(torch.ones(rows))
                    assert seen.pop() is freezing and inductor.freezing is before
            failing = runtimes.compiled(torch, torch.nn.Linear(1, 1), mode="default", dynamic=False, freezing=not before)
            with pytest.raises(RuntimeError):
                failing(torch.ones(3, 7))
            assert inductor.freezing is before


# -- wrappers ------------------------------------------------------------------------------------------------------------


def test_wrappers_go_around_each_other_and_leave_names_alone() -> None:
    model, order = torch.nn.Sequential(torch.nn.Linear(2, 2)), []
    names = [name for name, _ in model.named_modules()]

    def note(word: str) -> Any:
        def wrapper(inner: Any, args: Any, kwargs: Any) -> Any:
            order.append(word)
            return inner(*args, **kwargs)

        return wrapper

    _wrap.around(model, note("inner"))
    _wrap.around(model, note("outer"))
    x = torch.ones(1, 2)
    assert torch.equal(model(x), model[0](x))
    assert order == ["outer", "inner"] and [name for name, _ in model.named_modules()] == names


def test_a_forward_that_is_no_method_is_wrapped() -> None:
    """Libraries replace `forward` by functions of their own."""
    model = torch.nn.Linear(2, 2)
    model.forward = lambda x: x + 1
    _wrap.around(model, lambda inner, args, kwargs: 2 * inner(*args, **kwargs))
    assert torch.equal(model(torch.ones(1)), torch.full((1,), 4.0))


# -- compiled ------------------------------------------------------------------------------------------------------------


def test_an_unknown_runtime_is_refused() -> None:
    with pytest.raises(ValueError, match="no runtime"):
        runtimes.executed(torch, torch.nn.Identity(), {"kind": "shell"})
    with pytest.raises(ValueError, match="mode is 'fast'"):
        compile_inference.Options(mode="fast")


def test_compiling_is_refused_for_models_that_it_would_change() -> None:
    assert not compile_inference.eligible(ModelFacts(random=True))
    refusal = aot_inductor.eligible(ModelFacts(torch="2.13.0", exportable=False, export_problem="it branches on data"))
    assert not refusal and "it branches on data" in refusal.reason
    assert not aot_inductor.eligible(ModelFacts(torch="2.5.1"))


def test_a_compiler_that_captured_nothing_is_not_active(tmp_path: Path) -> None:
    context = images(tmp_path)
    compile_inference.apply(context, compile_inference.Options())
    with torch.compiler.set_stance("force_eager"):      # as TORCH_COMPILE_DISABLE=1 does
        context.call(BATCH)
    proof = compile_inference.active(context, compile_inference.Options())
    assert not proof.active and "captured nothing" in proof.evidence


def equal_structure(one: Any, other: Any) -> bool:
    return structure.flatten(torch, one)[0] == structure.flatten(torch, other)[0]


@pytest.mark.slow
@pytest.mark.parametrize("make", [images, tokens], ids=["images", "tokens"])
def test_compiled_with_casts_and_layout_inside(make: Any, tmp_path: Path) -> None:
    """bfloat16 and channels-last are traced into the compiled program; it is stored, and loads again."""
    context = make(tmp_path)
    inputs = context.inputs[0]
    if make is images:
        nhwc_layout.apply(context, nhwc_layout.Options())
    bf16.apply(context, bf16.Options())
    expected = context.model(*inputs)
    compile_inference.apply(context, compile_inference.Options())
    with torch.inference_mode():
        got = context.call(*inputs)
        proof = compile_inference.active(context, compile_inference.Options())
        assert proof.active and "1 graph(s), 0 graph break(s)" in proof.evidence
        assert equal_structure(expected, got)
        again = exported.load(torch, tmp_path, context.save(tmp_path))(*inputs)
    for one, two, three in zip(*(structure.flatten(torch, value)[1] for value in (expected, got, again))):
        assert agreement_db(torch, one, two) > 25 and agreement_db(torch, two, three) > 25


class Counted(torch.nn.Module):
    """Branches on its data: two graphs with a break between them."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.layer(x)
        return torch.relu(x) if x.sum() > 0 else torch.sigmoid(x)


@pytest.mark.slow
def test_data_dependent_control_flow_compiles_in_pieces_and_cannot_be_stored(tmp_path: Path) -> None:
    context = context_of(Counted(), [(torch.ones(4, 4),)], tmp_path)
    model = context.model
    compile_inference.apply(context, compile_inference.Options())
    for x in (torch.ones(4, 4) * 9, -torch.ones(4, 4) * 9):
        assert torch.allclose(context.call(x), model(x), atol=1e-5)
    proof = compile_inference.active(context, compile_inference.Options())
    assert proof.active and "1 graph break(s): " in proof.evidence
    with pytest.raises(NotDeployable, match="torch.export cannot capture"):
        context.save(tmp_path)
    with pytest.raises(NotApplied, match="torch.export cannot capture"):
        aot_inductor.apply(context, aot_inductor.Options())


@pytest.mark.slow
def test_varying_lengths_share_a_program(tmp_path: Path) -> None:
    context = tokens(tmp_path, varying_shapes=True)
    options = compile_inference.variants(dataclasses.replace(context.facts, varying_shapes=True))[0]
    assert options.dynamic
    compile_inference.apply(context, options)
    for length in (16, 12, 9, 7, 5, 14):
        ids, mask = IDS[:, :length].contiguous(), MASK[:, :length].contiguous()
        assert agreement_db(torch, context.model(ids, mask).logits, context.call(ids, mask).logits) > 90
    proof = compile_inference.active(context, options)
    assert proof.active and proof.evidence.startswith(("1 graph(s)", "2 graph(s)"))      # of six shapes


@pytest.mark.slow
def test_a_model_past_the_recompilation_limit_is_not_active(tmp_path: Path) -> None:
    context = context_of(torch.nn.Linear(4, 4), [(torch.ones(4, 4), )], tmp_path)
    with torch._dynamo.config.patch(recompile_limit=1, automatic_dynamic_shapes=False):
        compile_inference.apply(context, compile_inference.Options())
        for rows in (4, 5, 6):
            context.call(torch.ones(rows, 4))
    proof = compile_inference.active(context, compile_inference.Options())
    assert not proof.active and "limit" in proof.evidence


@pytest.mark.slow
@pytest.mark.parametrize("make", [images, tokens], ids=["images", "tokens"])
def test_ahead_of_time_for_any_batch_size(make: Any, tmp_path: Path) -> None:
    context = make(tmp_path)
    model, inputs = context.model, context.inputs[0]
    aot_inductor.apply(context, aot_inductor.Options())
    folder = tmp_path / "stored"
    folder.mkdir()
    loaded = aoti.load(torch, folder, context.save(folder))
    assert [path.name for path in sorted(folder.iterdir())] == ["model.pt2", "model_fixed.pt2"]
    strided = tuple(tensor.transpose(0, 1).contiguous().transpose(0, 1) for tensor in inputs)     # the library trusts strides
    for batch in (strided, *(tuple(tensor[:rows] for tensor in inputs) for rows in (4, 1, 3))):
        expected = model(*batch)
        for call in (context.call, loaded):
            with torch.inference_mode():
                got = call(*batch)
            assert equal_structure(expected, got)
            assert all(agreement_db(torch, *pair) > 90 for pair in zip(*(structure.flatten(torch, value)[1] for value in (expected, got))))
    with pytest.raises(TypeError, match="this program takes"):
        loaded(*(tensor.double() for tensor in inputs))
    with pytest.raises(ValueError, match="has shape"):
        loaded(*(tensor[:, :2] for tensor in inputs))
