"""How techniques call a model that they look at or train: in the mode that it runs in, with inputs of its own, by its own keywords."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from process_kit import Force  # noqa: E402 - after the check for torch

from saturate.inference import batches, facts, sensitivity, variations  # noqa: E402
from saturate.inference.source import Source  # noqa: E402
from saturate.inference.techniques import _census, _precision, _training, _wrap  # noqa: E402
from saturate.inference.techniques._api import Context, Train  # noqa: E402
from saturate.records.inference import ModelFacts  # noqa: E402


class Normalizing(torch.nn.Module):
    """In place, as many do with images."""

    def __init__(self) -> None:
        super().__init__()
        self.out = torch.nn.Linear(4, 3)

    def forward(self, x: Any) -> Any:
        return self.out(x.sub_(0.5).div_(0.25))


class Scaled(torch.nn.Module):
    """One number in another format, which changes that of no answer."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.out = torch.nn.Linear(4, 4), torch.nn.Linear(4, 2)
        self.register_buffer("scale", torch.tensor(2.0, dtype=torch.float64))

    def forward(self, x: Any, scale: Any = None) -> Any:
        return self.out(self.inner(x)) * (self.scale if scale is None else scale)


def context(model: Any, inputs: Any, folder: Path, **more: Any) -> Context:
    facts = more.pop("facts", ModelFacts(dtypes=("float32",), linears=2))
    return Context(torch, model.eval(), "cpu", inputs, inputs, facts, folder, 1, **more)


@pytest.mark.parametrize(("alone", "mode"), [(True, "no_grad"), (False, "enable_grad")])
def test_a_model_that_differentiates_is_looked_at_in_its_own_mode(alone: bool, mode: str, tmp_path: Path) -> None:
    force = Force(alone)
    seen, among = _census.count(context(force, [(torch.ones(2, 3),)], tmp_path, facts=ModelFacts(mode=mode)), ("sum", "mul"), lambda one: True)
    assert seen == among > 0


class Slope(torch.nn.Module):
    """Of an energy, by inputs of which the caller says that gradients are asked for."""

    def __init__(self) -> None:
        super().__init__()
        self.energy = torch.nn.Linear(3, 1)

    def forward(self, at: Any) -> Any:
        return torch.autograd.grad(self.energy(at).tanh().sum(), at)[0]


def test_inputs_by_which_a_model_differentiates_still_ask_for_gradients(tmp_path: Path) -> None:
    """The model was said not to run on its inputs."""
    given = [(torch.randn(4, 3, requires_grad=True) * 1,) for _ in range(2)]
    source = Source.write(tmp_path / "source", Slope().eval(), given)
    found = facts.observe(torch, source.model(torch), source.inputs(torch), "cpu")
    assert found.mode == "enable_grad" and not found.random
    made = [*source.inputs(torch), *source.calibration(torch), *variations.other_batches(given), *variations.perturbed(torch, given)]
    single = Source.write(tmp_path / "single", Slope().eval(), given[:1])
    made += [*single.inputs(torch), *single.calibration(torch)]
    assert len(made) == 8 and all(at.requires_grad and at.is_leaf for (at,) in made)
    assert not any(at.requires_grad for (at,) in batches.take(torch, [(torch.zeros(2, 3),)]))


def test_a_model_that_writes_to_its_inputs_is_trained_on_what_was_given(tmp_path: Path) -> None:
    model = Normalizing()
    given = [(torch.rand(8, 4), torch.rand(8, 3))]
    before = copy.deepcopy(given)
    made = context(model, [given[0][:1]], tmp_path, facts=ModelFacts(writes_inputs=True), train=Train(given, torch.nn.functional.mse_loss, epochs=1, learning_rate=1e-9))
    found = _training.recover(made, copy.deepcopy(model), model)
    assert found.steps == 1 and found.before == found.after == 0.0      # the student begins as the teacher
    assert torch.equal(given[0][0], before[0][0]) and torch.equal(made.inputs[0][0], before[0][0])


def test_a_model_that_writes_to_its_inputs_is_ranked_on_what_was_given() -> None:
    inputs = [(torch.rand(8, 4),)]
    before = inputs[0][0].clone()
    ((name, decibels),) = sensitivity.rank(torch, Normalizing().eval(), inputs)
    assert name == "out" and decibels > 20 and torch.equal(inputs[0][0], before)


def test_a_wrapped_forward_keeps_its_keywords(tmp_path: Path) -> None:
    model = Scaled()
    made = context(model, [(torch.rand(2, 4),)], tmp_path)
    _precision.apply(made, torch.bfloat16, False, "bf16")
    _wrap.around(model, lambda inner, args, kwargs: inner(*args, **kwargs))
    assert list(batches.signature_of(batches.call_of(model)).parameters) == ["x", "scale"]
    places = batches.by_place(batches.signature_of(batches.call_of(model)), (), {"x": made.inputs[0][0]})
    assert len(places) == 1 and model(*places).shape == (2, 2)
    assert torch.equal(copy.deepcopy(model)(*places), model(*places))
    assert batches.tensors(torch, model(made.inputs[0][0], scale=1.0))[0].shape == (2, 2)


@pytest.mark.parametrize("kept", [frozenset(), frozenset({"inner"})])
def test_a_number_in_another_format_changes_no_answer_s(kept: frozenset[str], tmp_path: Path) -> None:
    model = Scaled()
    made = context(model, [(torch.rand(2, 4),)], tmp_path, keep=kept)
    _precision.apply(made, torch.bfloat16, False, "bf16")
    assert model(made.inputs[0][0]).dtype == torch.float32
