"""torch's switches of the user's process, on their way to the processes of candidates; TensorFloat-32 in what is demanded of them.
No test here needs a GPU."""

from __future__ import annotations

import dataclasses
import gc
import json
import math
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("cloudpickle", reason="the extra inference")

from saturate.inference import examples, guards, here, lab, session, variations, worker  # noqa: E402 - after the check for torch
from saturate.inference.serving import Serving, Setting  # noqa: E402
from saturate.inference.source import Source  # noqa: E402
from saturate.inference.techniques import tf32_products  # noqa: E402
from saturate.inference.techniques._api import Context, NotApplied  # noqa: E402
from saturate.records.inference import ModelFacts  # noqa: E402

BATCHES = [(torch.ones(4, 3),), (torch.zeros(4, 3),)]
AMPERE = ModelFacts(device="cuda", capability=(8, 0), dtypes=("float32",), linears=1, torch="2.13.0")

#: torch's own settings, by the names of `session.of_process`.
USUAL = {"products": "highest", "cudnn_tf32": "conv rnn", "cudnn_benchmark": "False", "cudnn_deterministic": "False", "flash_attention": "True",
         "efficient_attention": "True", "cudnn_attention": "True", "math_attention": "True"}


@pytest.fixture(autouse=True)
def as_before() -> Iterator[None]:
    """torch's switches hold for the process: they are taken back, as what is frozen for the garbage collector is."""
    threads, order = torch.get_num_threads(), torch._C._get_sdp_priority_order()
    yield
    torch._C._set_sdp_priority_order(order)
    gc.unfreeze()
    torch.set_num_threads(threads)
    torch.set_float32_matmul_precision("highest")
    torch.backends.cudnn.allow_tf32 = True
    torch.backends.cudnn.benchmark = torch.backends.cudnn.deterministic = False
    for setter in session.ATTENTION.values():
        getattr(torch.backends.cuda, setter)(True)


# -- batch sizes -------------------------------------------------------------------------------------------------------


def test_samples_are_chosen_on_the_device_where_they_are() -> None:
    class Watch(torch.overrides.TorchFunctionMode):
        def __torch_function__(self, function: Any, types: Any, arguments: Any = (), named: Any = None) -> Any:
            if function is torch.Tensor.index_select:
                assert arguments[2].device == arguments[0].device
            return function(*arguments, **(named or {}))

    with Watch():       # torch takes indices on the CPU for this device, but for none that computes
        found = examples.of_size(torch, (torch.empty(3, 2, device="meta"), torch.ones(3)), 4)
    assert found is not None and found[0].shape == (4, 2) and found[0].device.type == "meta"


def test_the_model_serves_other_batch_sizes_on_its_own_device(tmp_path: Path) -> None:
    source = Source.write(tmp_path / "source", torch.nn.Linear(3, 2), BATCHES, device="cuda:1", switches={"products": "high"})
    started: list[Source] = []
    known = SimpleNamespace(source=source, facts=None, threads=1, folder=tmp_path, serve=lambda source, *more: started.append(source))
    fleet = Serving(known, torch).fleet(None, Setting(2))       # type: ignore[arg-type]
    assert fleet.source.device == "cuda:1" and fleet.source.switches == {"products": "high"} and started == [fleet.source]
    assert Source.open(fleet.source.folder) == fleet.source


# -- switches of the user's process ------------------------------------------------------------------------------------


def test_a_process_says_how_it_computes() -> None:
    assert session.of_process(torch) == USUAL
    torch.set_float32_matmul_precision("medium")
    torch.backends.cudnn.allow_tf32, torch.backends.cudnn.benchmark = False, True
    torch.backends.cuda.enable_flash_sdp(False)
    assert session.of_process(torch) == {**USUAL, "products": "medium", "cudnn_tf32": "", "cudnn_benchmark": "True", "flash_attention": "False"}


def test_the_newer_switches_are_read_where_torch_refuses_to_say_what_the_older_are() -> None:
    torch.backends.cuda.matmul.fp32_precision = "tf32"
    torch.backends.cudnn.conv.fp32_precision = "ieee"
    with pytest.raises(RuntimeError):
        torch.get_float32_matmul_precision()
    assert session.of_process(torch) == {**USUAL, "products": "high", "cudnn_tf32": "rnn"}
    session.restore(torch, {"products": "high", "cudnn_tf32": "rnn"})       # what is so already is left alone
    assert torch.backends.cuda.matmul.fp32_precision == "tf32" and session.of_process(torch)["cudnn_tf32"] == "rnn"


@pytest.mark.parametrize("allowed", ["conv rnn", "", "conv"])
def test_what_one_process_says_another_one_sets(allowed: str) -> None:
    wanted = {**USUAL, "products": "high", "cudnn_tf32": allowed, "cudnn_benchmark": "True", "math_attention": "False"}
    session.restore(torch, wanted)
    assert session.of_process(torch) == wanted and torch.get_float32_matmul_precision() == "high"
    if allowed != "conv":
        assert torch.backends.cudnn.allow_tf32 is bool(allowed), "the older switch can still be read"


def test_the_printed_line_sets_the_same() -> None:
    wanted = {**USUAL, "products": "high", "cudnn_tf32": "conv", "cudnn_benchmark": "True", "math_attention": "False"}
    line = session.lines(wanted, 1)
    exec(line, {"torch": torch})
    assert "\n" not in line and session.of_process(torch) == wanted
    assert session.lines({}, 1) == "torch.set_num_threads(1)"


def test_what_a_technique_switched_holds_whatever_the_process_began_with() -> None:
    session.restore(torch, {"attention": "flash", "float32_products": "high", **USUAL})
    assert session.of_process(torch) == {**USUAL, "products": "high", "efficient_attention": "False", "cudnn_attention": "False"}


@pytest.mark.parametrize("backend", list(session.ATTENTION))
def test_the_chosen_attention_comes_first(backend: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """By torch's own order the plain one, which stays allowed, comes before cuDNN's."""
    kinds = torch.nn.attention.SDPBackend
    chosen = {"flash": kinds.FLASH_ATTENTION, "efficient": kinds.EFFICIENT_ATTENTION, "cudnn": kinds.CUDNN_ATTENTION, "math": kinds.MATH}[backend]
    usual = torch._C._get_sdp_priority_order()
    allowed = {chosen, kinds.MATH}
    line = session.lines({"attention": backend}, 1)
    for set_ in (lambda: session.restore(torch, {"attention": backend}), lambda: exec(line, {"torch": torch})):
        torch._C._set_sdp_priority_order(usual)
        set_()
        order = torch._C._get_sdp_priority_order()
        assert sorted(order) == sorted(usual) and next(one for one in order if one in map(int, allowed)) == int(chosen)
    monkeypatch.delattr(torch._C, "_set_sdp_priority_order")
    session.restore(torch, {"attention": backend})      # of before 2.6: without an order
    monkeypatch.undo()


@pytest.mark.parametrize("found", [{"cudnn_benchmark": "yes"}, {"cudnn_tf32": "conv matmul"}, {"flash_attention": "1"}])
def test_a_value_that_no_switch_has_is_refused(found: dict[str, str]) -> None:
    with pytest.raises(ValueError, match="switch|cuDNN"):
        session.restore(torch, found)


def test_processes_of_a_search_start_with_the_switches_of_the_user(tmp_path: Path) -> None:
    model = torch.nn.Linear(3, 2)
    torch.set_float32_matmul_precision("high")
    assert Source.write(tmp_path / "cpu", model, BATCHES).switches == {}
    assert Source.write(tmp_path / "gpu", model, BATCHES, device="cuda").switches == {**USUAL, "products": "high"}
    torch.set_float32_matmul_precision("highest")
    source = Source.write(tmp_path / "source", model, BATCHES, switches={"products": "high", "cudnn_benchmark": "True"})
    assert json.loads((source.folder / "source.json").read_text())["switches"] == source.switches
    server = worker.Server()
    server.do_prepare(worker.Order(source=str(source.folder), artifact=None, techniques=[], keep=frozenset(), folder=str(tmp_path), threads=1,
                                   limit_s=100.0, memory_bytes=None, facts=ModelFacts()))
    assert torch.get_float32_matmul_precision() == "high" and torch.backends.cudnn.benchmark
    assert server.context and session.switches(server.context) == source.switches, "the artifact sets them again"


def test_tf32_products_are_no_candidate_where_the_model_has_them(tmp_path: Path) -> None:
    def context() -> Context:
        return Context(torch=torch, model=torch.nn.Linear(3, 2), device="cuda", inputs=BATCHES, calibration=[], facts=AMPERE, folder=tmp_path, threads=1)

    torch.backends.cuda.matmul.fp32_precision = "tf32"
    with pytest.raises(NotApplied, match="already"):
        tf32_products.apply(context(), tf32_products.Options())
    torch.set_float32_matmul_precision("highest")
    given = context()
    session.remember(given, USUAL)
    tf32_products.apply(given, tf32_products.Options())
    assert tf32_products.active(given, tf32_products.Options()).active
    torch.backends.cuda.matmul.fp32_precision = "ieee"      # a model that sets it itself
    assert not tf32_products.active(given, tf32_products.Options()).active


def test_the_newer_switch_does_not_end_the_comparison_with_the_users_process() -> None:
    model, torch.backends.cuda.matmul.fp32_precision = torch.nn.Linear(3, 2), "tf32"
    with torch.no_grad():
        reference = [[model(*BATCHES[0])]]
    source = SimpleNamespace(inputs=lambda torch: BATCHES, device="cpu", training=False, switches={})
    known: Any = SimpleNamespace(facts=ModelFacts(dtypes=("float32",)), reference=reference, again=reference, twin=None, source=source)
    assert here.compare(torch, model, known) == []


# -- TensorFloat-32 in the guards --------------------------------------------------------------------------------------


@pytest.mark.parametrize(("switches", "more", "precision"), [
    (USUAL, {}, "float32"), (USUAL, {"convolutions": 1}, "tf32"), (USUAL, {"recurrents": 1}, "tf32"), ({}, {"convolutions": 1}, "float32"),
    ({**USUAL, "products": "high"}, {}, "tf32"), ({**USUAL, "cudnn_tf32": "rnn"}, {"convolutions": 1}, "float32"),
    ({**USUAL, "products": "high"}, {"capability": (7, 5)}, "float32"), ({**USUAL, "products": "high"}, {"dtypes": ("float16", "float32")}, "float16"),
    ({**USUAL, "products": "high"}, {"dtypes": ("float64",)}, "float64"), ({**USUAL, "products": "high"}, {"device": "cpu"}, "float32")])
def test_what_a_baseline_computes_in(switches: dict[str, str], more: dict[str, Any], precision: str) -> None:
    assert lab.computed_in(dataclasses.replace(AMPERE, **more), switches) == precision


def rounded(bits: int) -> Any:
    """To so many explicit bits of a float32's significand."""
    drop = 23 - bits
    return lambda x: ((x.view(torch.int32) + (1 << drop - 1)) & ~((1 << drop) - 1)).view(torch.float32)


def network(x: Any, depth: int, short: Any, swapped: bool = False) -> Any:
    """Linear layers whose products round their inputs, as tensor cores do; `swapped`: with sums in another order."""
    width, generator = x.shape[1], torch.Generator().manual_seed(1)
    order = torch.randperm(width, generator=torch.Generator().manual_seed(5))
    for _ in range(depth):
        weight = short(torch.randn(width, width, generator=generator) * math.sqrt(2 / width))
        x = short(x)
        if swapped:
            first, second = order.chunk(2)
            x = x[:, first] @ weight[:, first].T + x[:, second] @ weight[:, second].T
        else:
            x = x @ weight.T
        x = x.relu()
    return x


@pytest.mark.parametrize("depth", [1, 4, 16, 32])
def test_bfloat16_is_no_other_order_of_sums_in_tensorfloat32(depth: int) -> None:
    x = torch.randn(32, 128, generator=torch.Generator().manual_seed(0))
    (moved,), = variations.perturbed(torch, [(x,)]) or ()
    baseline = network(x, depth, rounded(10))

    def problem(answer: Any, twin: bool = True) -> str | None:
        return guards.examine(torch, [[baseline]], [[answer]], numerics="reordering", precision=guards.TF32, again=[[baseline]],
                              twin=[[network(moved, depth, rounded(10))]] if twin else None).problem

    for twin in (True, False):
        assert problem(network(x, depth, rounded(10), swapped=True), twin) is None
        assert problem(network(x, depth, lambda y: y), twin) is None, "float32 as it is"
    assert "demanded" in (problem(network(x, depth, rounded(7))) or "")
