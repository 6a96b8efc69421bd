"""What is found out about a model before anything is changed."""

from __future__ import annotations

import statistics
import time
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from process_kit import Branches, Force, Noisy, Pair, Slow, Structured  # noqa: E402 - after the check for torch

from saturate.inference import facts  # noqa: E402
from saturate.inference.techniques._api import no_program  # noqa: E402


@torch.library.custom_op("saturate_test_facts::doubled", mutates_args=())
def doubled(x: torch.Tensor) -> torch.Tensor:
    return 2 * x


doubled.register_fake(torch.empty_like)


class RMSNorm(torch.nn.Module):
    def forward(self, x: Any) -> Any:
        return x / x.pow(2).mean(-1, keepdim=True).sqrt()


class SelfAttention(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.query = torch.nn.Linear(4, 4)

    def forward(self, x: Any) -> Any:
        return torch.nn.functional.scaled_dot_product_attention(self.query(x), x, x)


class Attention(torch.nn.Module):
    """As libraries nest them."""

    def __init__(self) -> None:
        super().__init__()
        self.self_attention = SelfAttention()

    def forward(self, x: Any) -> Any:
        return self.self_attention(x)


def observe(model: Any, *batches: tuple[Any, ...], **known: Any) -> Any:
    return facts.observe(torch, model.eval(), list(batches), "cpu", **known)


def test_a_small_network_of_everything() -> None:
    model = torch.nn.Sequential(
        torch.nn.Conv1d(4, 4, 1), torch.nn.BatchNorm1d(4), torch.nn.Flatten(1), torch.nn.Linear(20, 4), RMSNorm(), torch.nn.GroupNorm(1, 4),
        torch.nn.LayerNorm(4)).half().float()
    found = observe(model, (torch.rand(2, 4, 5),), threads=3, calibration_samples=7, training_mode=True, trainable=True)
    assert (found.kind, found.device, found.dtypes) == ("Sequential", "cpu", ("float32",))
    assert (found.linears, found.convolutions, found.batch_norms, found.norms, found.embeddings, found.attentions) == (1, 1, 1, 3, 0, 0)
    assert found.parameters == sum(p.numel() for p in model.parameters()) and found.parameter_bytes == 4 * found.parameters
    assert (found.threads, found.calibration_samples, found.training_mode, found.trainable, found.student) == (3, 7, True, True, False)
    assert not found.random and found.exportable is None and found.batch_size == 2 and found.cores >= 1
    assert found.torch == torch.__version__


def test_tied_weights_count_once_and_reuse_is_seen() -> None:
    found = observe(Structured(), (torch.zeros(3, 5, dtype=torch.long), torch.ones(3, 5, 1)))
    assert found.parameters == 11 * 4 + 2 * 4
    assert found.reused_modules == ("act",)
    assert found.embeddings == found.linears == found.attentions == 1 and found.batch_size == 3


def test_attention_counts_by_modules_and_by_calls() -> None:
    assert observe(torch.nn.Sequential(Attention(), Attention()), (torch.rand(1, 3, 4),)).attentions == 2
    layer = torch.nn.TransformerEncoderLayer(8, 2, 8, batch_first=True)
    assert observe(layer, (torch.rand(2, 3, 8),)).attentions == 1


@pytest.mark.parametrize(("sizes", "batch_size", "varying"), [
    ([(4, 3), (4, 3), (1, 3)], None, True), ([(4, 3), (4, 5)], 4, True), ([(4, 3), (2, 3), (4, 3)], None, True), ([(2, 3)], 2, False)])
def test_shapes(sizes: list[tuple[int, ...]], batch_size: int | None, varying: bool) -> None:
    found = observe(torch.nn.ReLU(), *[(torch.rand(size),) for size in sizes])
    assert (found.batch_size, found.varying_shapes) == (batch_size, varying)


def test_sizes_that_are_not_measured_vary_too() -> None:
    model, measured, other = torch.nn.ReLU(), (torch.rand(4, 3),), (torch.rand(4, 5),)
    found = facts.observe(torch, model, [measured], "cpu", others=[other])
    assert (found.batch_size, found.varying_shapes) == (4, True)


def test_inputs_that_do_not_agree_have_no_batch_size() -> None:
    assert observe(torch.nn.Bilinear(3, 3, 2), (torch.rand(3), torch.rand(3))).batch_size == 3
    assert observe(Structured(), (torch.zeros(2, 5, dtype=torch.long), torch.ones(1))).batch_size is None


def test_randomness_is_seen_and_rounding_is_not() -> None:
    assert observe(Noisy(), (torch.rand(50),)).random
    one = torch.rand(1000)
    assert not facts._differ(torch, [one], [one * (1 + 1e-7)])
    assert facts._differ(torch, [one], [one * (1 + 1e-3)])
    assert facts._differ(torch, [torch.tensor([1, 2])], [torch.tensor([1, 3])])
    assert not facts._differ(torch, [torch.tensor([float("nan"), 1.0])], [torch.tensor([float("nan"), 1.0])])
    assert facts._differ(torch, [torch.tensor([float("nan"), 1.0])], [torch.tensor([0.0, 1.0])])
    assert facts._differ(torch, [one], []) and facts._differ(torch, [one], [one[:3]])


def test_a_model_that_writes_to_its_inputs_is_not_random() -> None:
    class Writes(torch.nn.Module):
        def forward(self, x: Any) -> Any:
            return x.add_(1)

    given = torch.zeros(3)
    found = observe(Writes(), (given,))
    assert found.writes_inputs and not found.random and given.sum() == 0
    assert not observe(Pair(), (torch.zeros(2, 6),)).writes_inputs


@pytest.mark.parametrize("change", [lambda given: given.pop("mask"), lambda given: given.update(half=given["x"] / 2)], ids=["out", "in"])
def test_a_model_that_takes_something_out_of_its_inputs_writes_to_them(change: Any) -> None:
    class Changes(torch.nn.Module):
        def forward(self, given: Any) -> Any:
            change(given)
            return given["x"] + 1

    batch = ({"x": torch.ones(3), "mask": torch.ones(3)},)
    assert observe(Changes(), batch).writes_inputs and sorted(batch[0]) == ["mask", "x"]


def test_answers_that_are_sparse_are_compared() -> None:
    class Sparse(torch.nn.Module):
        def forward(self, x: Any) -> Any:
            return x.to_sparse()

    assert not observe(Sparse(), (torch.eye(3),)).random


def test_a_single_number_in_another_format_is_not_the_model_s() -> None:
    model = torch.nn.Linear(2, 2)
    model.register_buffer("scale", torch.tensor(2.0, dtype=torch.float64))
    assert facts.formats(model) == {"float32"}
    model.register_buffer("table", torch.ones(2, dtype=torch.float64))
    assert facts.formats(model) == {"float32", "float64"}


@pytest.mark.parametrize("alone", [True, False])
def test_a_model_that_differentiates_is_called_where_it_can(alone: bool) -> None:
    found = observe(Force(alone), (torch.ones(3),))
    assert found.mode == ("no_grad" if alone else "enable_grad") and not found.random
    assert observe(Pair(), (torch.zeros(2, 6),)).mode == "inference_mode"
    with pytest.raises(RuntimeError, match="mat1 and mat2"):
        observe(Pair(), (torch.zeros(2, 5),))


def test_a_state_that_is_kept_is_told_from_random_numbers() -> None:
    class Remembers(torch.nn.Module):
        seen = 0.0

        def forward(self, x: Any) -> Any:
            self.seen = self.seen + x
            return self.seen

    class DrawsFromNumpy(torch.nn.Module):
        def forward(self, x: Any) -> Any:
            return x + float(numpy.random.rand())

    numpy = pytest.importorskip("numpy")
    for model, keeps_state in ((Remembers(), True), (Noisy(), False), (DrawsFromNumpy(), False)):
        found = observe(model, (torch.ones(50),))
        assert found.random and found.keeps_state is keeps_state
        assert ("call to call" if keeps_state else "random numbers") in (no_program(found) or "")
    assert no_program(observe(Pair(), (torch.zeros(2, 6),))) is None
    assert "differentiates" in (no_program(observe(Force(alone=False), (torch.ones(2, 3),))) or "")


class Writer(torch.nn.Module):
    """As a model of transformers that can generate."""

    generation_config: Any = object()

    def forward(self, ids: Any) -> Any:
        return torch.nn.functional.one_hot(ids, 7).float()

    def generate(self, ids: Any) -> Any:
        for _ in range(2):
            ids = torch.cat([ids, self(ids).argmax(-1)[:, -1:]], 1)
        return ids


class Around(torch.nn.Module):
    def __init__(self, answer: Any) -> None:
        super().__init__()
        self.model, self.answer = Writer(), answer

    def forward(self, ids: Any) -> Any:
        return self.answer(self.model, ids)


@pytest.mark.parametrize("answer, generates", [
    (lambda model, ids: model.generate(ids), True), (lambda model, ids: {"sequences": model.generate(ids), "more": None}, True),
    (lambda model, ids: model(ids).argmax(-1), False), (lambda model, ids: model(ids)[:, -1].topk(5).indices, False),
    (lambda model, ids: model(ids), False), (lambda model, ids: model.generate(ids).float(), False)])
def test_generated_text_is_told_from_classes_of_tokens(answer: Any, generates: bool) -> None:
    ids, model = (torch.tensor([[1, 2, 3], [4, 5, 6]]),), Around(answer)
    assert observe(model, ids).generates is generates
    model.model.generation_config = None
    assert not observe(model, ids).generates, "nobody knows"


def test_what_a_method_of_that_name_answers_is_text_where_it_is_whole_numbers() -> None:
    ids = (torch.tensor([[1, 2, 3], [4, 5, 6]]),)
    assert observe(Around(lambda model, ids: ids + 1), ids, generates=True).generates, "as long as the input, perhaps"
    assert not observe(Around(lambda model, ids: model(ids)), ids, generates=True).generates, "images"


def test_a_model_of_transformers_that_generates_is_known() -> None:
    transformers = pytest.importorskip("transformers", reason="the model under test is its")
    model = transformers.GPT2LMHeadModel(transformers.GPT2Config(vocab_size=20, n_embd=8, n_layer=1, n_head=2, n_positions=16, bos_token_id=0,
                                                                 eos_token_id=0))
    around, ids = Around(lambda _, ids: model.generate(ids, max_new_tokens=4, do_sample=False)), (torch.randint(1, 20, (2, 5)),)
    around.model = model
    assert observe(around, ids).generates
    around.answer = lambda _, ids: model(ids).logits.argmax(-1)
    assert not observe(around, ids).generates


def test_nothing_is_left_on_the_model() -> None:
    model = Structured()
    before = [dict(vars(module)) for module in model.modules()]
    observe(model, (torch.zeros(3, 5, dtype=torch.long), torch.ones(3, 5, 1)))
    model.train()
    assert [dict(vars(module)) for module in model.modules()] == before
    assert not any(module._forward_pre_hooks for module in model.modules())


def test_what_the_model_raises_is_raised() -> None:
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
        observe(Pair(), (torch.zeros(1, 5),))


def test_packages_and_flags_are_those_of_this_machine() -> None:
    from importlib.metadata import version
    from pathlib import Path

    cloudpickle = pytest.importorskip("cloudpickle")
    assert facts.installed()["cloudpickle"] == cloudpickle.__version__
    assert "torchao" not in facts.installed() or facts.installed()["torchao"] == version("torchao")
    lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    flags = next(line.partition(":")[2].split() for line in lines if line.startswith(("flags", "Features")))
    assert facts.cpu_flags() == {flag for flag in facts._FLAGS if flag in flags}


def test_export_is_tried_and_its_problem_told() -> None:
    x = torch.ones(2, 6)
    assert facts._export(torch, Pair().eval(), (x,)) == (True, "")      # imports what the forks need
    assert facts.try_export(torch, Pair().eval(), (x,), 100) == (True, "")
    able, problem = facts.try_export(torch, Branches(), (x,), 100)
    assert not able and problem.startswith("data-dependent control flow")


def test_an_operator_that_a_module_registers_is_known_before_a_candidate_meets_it() -> None:
    """Of a Qwen2-MoE six candidates were prepared one after the other, two minutes of three, and each could not be exported for the same reason."""
    class Calls(torch.nn.Module):
        def forward(self, x: Any) -> Any:
            return doubled(x) + 1

    able, problem = facts.try_export(torch, Calls().eval(), (torch.ones(2, 6),), 100)
    assert not able and problem.startswith("a program would call the operator saturate_test_facts::doubled, which ")


def test_why_a_model_cannot_be_exported_is_said_of_the_model() -> None:
    class Packs(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.rnn = torch.nn.GRU(4, 4, batch_first=True)

        def forward(self, x: Any, lengths: Any) -> Any:
            packed = torch.nn.utils.rnn.pack_padded_sequence(x, lengths, batch_first=True, enforce_sorted=False)
            return torch.nn.utils.rnn.pad_packed_sequence(self.rnn(packed)[0], batch_first=True)[0]

    class Breaks(torch.nn.Module):
        def forward(self, x: Any) -> Any:
            return {}["absent"]

    class Distributed(torch.nn.Module):
        def __init__(self, **how: Any):
            super().__init__()
            self.how = how

        def forward(self, x: Any) -> Any:
            return torch.distributions.Normal(x, x.exp(), **self.how).log_prob(x)

    class Broken(torch.nn.Module):
        def forward(self, x: Any) -> Any:
            return statistics.mean([])

    _, problem = facts._export(torch, Packs().eval(), (torch.ones(3, 5, 4), torch.tensor([5, 2, 3])))
    assert problem.startswith("packed sequences (line ") and "of test_inference_facts.py" in problem
    assert "sequences of one length" in problem and "FakeTensor" not in problem
    _, problem = facts._export(torch, Branches(), (torch.ones(2, 6),))
    assert problem.startswith("data-dependent control flow (line ") and "torch.where" in problem
    _, problem = facts._export(torch, Distributed(validate_args=True), (torch.ones(2, 3),))     # the default is the process's
    assert problem.startswith("a distribution checks its arguments (line ") and "validate_args=False" in problem
    assert facts._export(torch, Distributed(validate_args=False), (torch.ones(2, 3),)) == (True, "")
    _, problem = facts._export(torch, Breaks(), (torch.ones(2),))
    assert problem.startswith("KeyError: 'absent' (line ")
    _, problem = facts._export(torch, Broken(), (torch.ones(2),))
    assert problem.startswith("StatisticsError: ") and "of test_inference_facts.py)" in problem
    _, problem = facts._export(torch, Force(alone=False), (torch.ones(2, 3),))
    assert problem.startswith("it differentiates (line ") and problem.endswith("and a program records no gradients")


def test_export_that_takes_too_long_is_ended() -> None:
    began = time.monotonic()
    assert facts.try_export(torch, Slow(), (torch.ones(1),), 0.3) == (False, "torch.export took longer than 0 s")
    assert time.monotonic() - began < 25


def test_export_that_ends_its_process_ends_only_the_fork() -> None:
    class Dies(torch.nn.Module):
        def forward(self, x: Any) -> Any:
            import os

            os._exit(3)

    assert facts.try_export(torch, Dies(), (torch.ones(1),), 100) == (False, "torch.export ended its process")


def test_precision_is_that_of_all_numbers_a_model_holds() -> None:
    class Table(torch.nn.Module):
        def __init__(self, *kinds: Any) -> None:
            super().__init__()
            for place, kind in enumerate(kinds):
                self.register_buffer(f"table{place}", torch.ones(3, dtype=kind))

        def forward(self, x: Any) -> Any:
            return x * sum(self.buffers())

    x = (torch.rand(2, 3, dtype=torch.float64),)
    assert observe(Table(torch.float64), x).dtypes == ("float64",)
    assert observe(Table(), x).dtypes == ("float64",), "what goes in and comes out, where nothing is held"
    weights = torch.nn.Linear(3, 3)
    for kind, known in ((torch.float64, {"float32", "float64"}), (torch.bfloat16, {"float32"}), (torch.int64, {"float32"})):
        assert facts.formats(torch.nn.Sequential(weights, Table(kind))) == known


def test_a_branch_that_is_captured_when_the_model_runs_is_no_obstacle() -> None:
    """torch.cond refuses branches that write to anything, and what counted the calls of layers did: "the model does not run on its inputs"."""
    class Branches(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.layer = torch.nn.Linear(4, 4), torch.nn.Linear(4, 4)

        def forward(self, x: Any) -> Any:
            return torch.cond(x.sum() > 0, lambda x: self.layer(x), lambda x: x.clone(), (self.first(x),))

    with torch.no_grad():
        calls, _, written, answers = facts._watch_calls(torch, Branches().eval(), (torch.ones(2, 4),))
    assert calls["first"] == 1 and not written and answers[0].shape == (2, 4)
