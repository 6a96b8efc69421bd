"""What training and pruning leave as it came: parts in training mode on purpose, inputs that a model writes to, hooks of layers."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="techniques work on torch modules")

from quantize_kit import FACTS  # noqa: E402 - after the check for torch
from torch import nn  # noqa: E402
from torch.nn import functional  # noqa: E402

from saturate.inference.generation import weights  # noqa: E402
from saturate.inference.pruning import shrink  # noqa: E402
from saturate.inference.source import Source  # noqa: E402
from saturate.inference.techniques import _training, magnitude_pruning, qat_dynamic_int8, structured_pruning  # noqa: E402
from saturate.inference.techniques._api import Context, Train  # noqa: E402
from saturate.inference.worker import Order, Server  # noqa: E402


def drawing() -> nn.Module:
    """Dropout that draws at inference (Monte Carlo), and statistics of the batch."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 64), nn.BatchNorm1d(64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Dropout(0.3), nn.Linear(64, 4)).eval()
    for place in (1, 5):
        model[place].train()
    return model


def in_training(model: Any) -> list[str]:
    return [name for name, part in model.named_modules() if part.training]


@pytest.mark.parametrize(("technique", "options"), [(magnitude_pruning, {"sparsity": 0.2}), (structured_pruning, {"ratio": 0.25})])
def test_parts_in_training_mode_on_purpose_stay_so(technique: Any, options: dict[str, Any], tmp_path: Path) -> None:
    """Every candidate that was pruned answered without the randomness that the model answers with."""
    Source.write(tmp_path / "source", drawing(), [(torch.randn(32, 16),) for _ in range(4)])
    server = Server()
    server.do_prepare(Order(source=str(tmp_path / "source"), artifact=None, techniques=[(technique.__name__, str(technique.__file__), options)],
                            keep=frozenset(), folder=str(tmp_path), threads=torch.get_num_threads(), limit_s=60.0, memory_bytes=None, facts=None))
    assert in_training(server.context.model) == ["1", "5"]


def test_a_training_leaves_modes_as_they_came(tmp_path: Path) -> None:
    batches = [(torch.randn(16, 16),) for _ in range(4)]
    train = Train([(x, torch.randint(4, (16,))) for x, in batches], functional.cross_entropy, epochs=1)
    context = Context(torch, drawing(), "cpu", batches, batches, FACTS, tmp_path, 1, train=train)
    student = drawing()
    _training.recover(context, student, context.model)
    assert in_training(student) == ["1", "5"]
    assert _training.recalibrate(context, student) == 64 and in_training(student) == ["1", "5"]


class Normalizing(nn.Module):
    """Normalizes its input where it lies."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.out = nn.Linear(8, 32), nn.Linear(32, 32), nn.Linear(32, 4)

    def forward(self, x: Any) -> Any:
        x -= 0.5
        x *= 4.0
        return self.out(functional.relu(self.second(functional.relu(self.first(x)))))


def test_a_model_that_writes_to_its_inputs_is_cut_like_another(tmp_path: Path) -> None:
    """Each look at it saw another input, so that no cut seemed right; and what calibrates was normalized again and again."""
    torch.manual_seed(0)
    x, calibration = torch.rand(4, 8), torch.rand(4, 8)
    before = x.clone(), calibration.clone()
    smaller, _ = shrink.shrink(torch, Normalizing().eval(), [(x,)], [(calibration,)], ratio=0.5, multiple=8)
    assert smaller.first.weight.shape == (16, 8) and smaller.second.weight.shape == (16, 16)
    assert torch.equal(x, before[0]) and torch.equal(calibration, before[1])


class Features(nn.Module):
    """Answers with what a hook saw of a layer inside, too."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second, self.out = nn.Linear(16, 32), nn.Linear(32, 32), nn.Linear(32, 4)
        self.seen: list[Any] = []
        self.second.register_forward_hook(self.see)

    def see(self, layer: Any, given: Any, answer: Any) -> None:
        self.seen[:] = [answer]

    def forward(self, x: Any) -> Any:
        return self.out(functional.relu(self.second(functional.relu(self.first(x))))), self.seen[0]


def test_training_with_rounding_keeps_the_hooks_of_layers(tmp_path: Path) -> None:
    """torchao puts new layers in the place of those that it trains: the features were those of the last call before it."""
    pytest.importorskip("torchao", reason="the extra saturate[inference]")
    batches = [(torch.randn(8, 16),) for _ in range(4)]
    train = Train([(x, torch.randint(4, (8,))) for x, in batches], lambda answer, target: functional.cross_entropy(answer[0], target), epochs=1)
    context = Context(torch, Features().eval().requires_grad_(False), "cpu", batches, batches, dataclasses.replace(FACTS, batch_size=8), tmp_path, 1,
                      train=train)
    qat_dynamic_int8.apply(context, qat_dynamic_int8.Options())
    assert qat_dynamic_int8.active(context, qat_dynamic_int8.Options()).active
    with torch.no_grad():
        one, other = (context.model(torch.randn(8, 16))[1] for _ in range(2))
    assert not torch.equal(one, other)


def test_weights_in_fewer_bits_leave_the_process_as_it_was(tmp_path: Path) -> None:
    """They are made in the user's own process, where a result generates: its fused encoder layers stayed switched off."""
    pytest.importorskip("torchao", reason="the extra saturate[inference]")
    model, fused = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64)).eval(), torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(True)
    try:
        weights.quantized(torch, model, weights.techniques(torch, model)["torchao-weight-only"][0], tmp_path)
        assert torch.backends.mha.get_fastpath_enabled()
    finally:
        torch.backends.mha.set_fastpath_enabled(fused)
