"""A user's modules in evaluation mode for a while."""

from __future__ import annotations

from typing import Any

import pytest

torch = pytest.importorskip("torch")

from saturate.inference import modes  # noqa: E402 - after the check for torch


class Adapter(torch.nn.Linear):
    """Adds two small matrices to its weights in evaluation mode, as loralib does."""

    def __init__(self, size: int):
        super().__init__(size, size)
        self.merged = False
        self.weight.requires_grad_(False)
        self.down, self.up = (torch.nn.Parameter(torch.randn(*shape)) for shape in ((2, size), (size, 2)))

    def train(self, mode: bool = True) -> Adapter:
        super().train(mode)
        if mode == self.merged:
            self.weight.data += (self.up.data @ self.down.data) * (-1 if mode else 1)
            self.merged = not mode
        return self

    def forward(self, x: Any) -> Any:
        y = torch.nn.functional.linear(x, self.weight, self.bias)
        return y if self.merged else y + x @ self.down.T @ self.up.T


def model() -> Any:
    torch.manual_seed(0)
    return torch.nn.Sequential(Adapter(32), torch.nn.ReLU(), torch.nn.Dropout(), torch.nn.Linear(32, 2))


def test_what_parts_do_when_their_mode_changes_is_taken_back_bit_by_bit() -> None:
    made = model().train()
    made[2].eval()                                  # on purpose, in another mode
    x = torch.randn(8, 32)
    made[:2](x).sum().backward()
    waiting = made(x).sum()
    gradients = [parameter.grad for parameter in made.parameters()]
    before = {name: value.clone() for name, value in made.state_dict().items()}
    with modes.evaluating(torch, made):
        assert made[0].merged and not any(part.training for part in made.modules())
        assert not torch.equal(made[0].weight, before["0.weight"])
    assert not made[0].merged and [part.training for part in made] == [True, True, False, True] and made.training
    assert all(modes.same_bits(torch, value, before[name]) for name, value in made.state_dict().items())
    assert [parameter.requires_grad for parameter in made.parameters()] == [False, True, True, True, True, True]
    assert all(one is other.grad for one, other in zip(gradients, made.parameters()))
    waiting.backward()


def test_a_part_that_was_in_evaluation_mode_stays_merged() -> None:
    made = model().train()
    made[0].eval()
    before = made[0].weight.detach().clone()
    with modes.evaluating(torch, made):
        assert made[0].merged
    assert made[0].merged and not made[0].training and made.training and torch.equal(made[0].weight, before)


def test_weights_that_were_replaced_come_back() -> None:
    class Replacing(torch.nn.Linear):
        def eval(self) -> Any:
            self.weight.data = self.weight.data * 2
            self.bias = torch.nn.Parameter(torch.zeros(3))
            return super().eval()

    made = Replacing(3, 3)
    weight, bias, address, before = made.weight, made.bias, made.weight.data_ptr(), made.weight.detach().clone()
    with modes.evaluating(torch, made):
        assert not torch.equal(made.weight, before)
    assert made.weight is weight and made.bias is bias and torch.equal(weight, before) and weight.data_ptr() == address and made.training


def test_bits_are_compared_not_values() -> None:
    assert modes.same_bits(torch, torch.tensor([float("nan")]), torch.tensor([float("nan")]))
    assert not modes.same_bits(torch, torch.tensor([0.0]), torch.tensor([-0.0]))
    assert modes.same_bits(torch, torch.ones(2, dtype=torch.complex128), torch.ones(2, dtype=torch.complex128))
    assert not modes.same_bits(torch, torch.ones(1), torch.ones(1, dtype=torch.float64))
    assert modes.same_bits(torch, torch.tensor([True]), torch.tensor([True]))


def test_what_did_not_change_is_not_written_to() -> None:
    """A buffer of one element that looks like many, and one that a waiting backward pass needs."""
    shared, saved, changed = torch.ones(1).expand(4), torch.ones(4), torch.zeros(3)
    kept = modes.Kept(torch, [shared, saved, changed, None, changed])
    waiting = (torch.ones(4, requires_grad=True) * saved).sum()
    version = saved._version
    changed += 1
    kept.restore()
    waiting.backward()
    assert saved._version == version and torch.equal(changed, torch.zeros(3))


class Counted(torch.nn.Linear):
    """Does something of its own, which nobody knows, when it is told a mode."""

    turns = 0

    def train(self, mode: bool = True) -> Counted:
        Counted.turns += 1
        return super().train(mode)


def test_of_a_model_that_serves_nothing_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    """All weights of each model of transformers were copied at every call."""
    kept: list[int] = []
    monkeypatch.setattr(modes, "Kept", lambda torch, tensors: type("None", (), {"restore": lambda self: kept.append(len(tensors))})())
    made = torch.nn.Sequential(Counted(4, 4), torch.nn.ReLU()).eval()
    Counted.turns = 0
    with modes.evaluating(torch, made):
        assert Counted.turns == 0
    assert kept == [0] and not made.training
    with modes.evaluating(torch, made.train()):
        assert not made[0].training
    assert kept == [0, 2] and made[0].training


def test_models_of_transformers_do_nothing_of_their_own_without_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    transformers = pytest.importorskip("transformers", reason="its models")
    config = transformers.LlamaConfig(vocab_size=16, hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=1)
    made = transformers.LlamaForCausalLM(config)
    assert not any(modes._acts(torch, part) for part in made.modules())
    monkeypatch.setattr(type(made), "use_kernels", True)
    assert modes._acts(torch, made)


def test_weights_of_a_class_of_its_own_are_left_alone() -> None:
    """They have no bits that could be looked at: a quantized model ended in torchao's error, and the answer was lost."""
    quantization = pytest.importorskip("torchao.quantization", reason="torchao")
    made = model().train()
    quantization.quantize_(made[3], quantization.Int8WeightOnlyConfig())
    x = torch.randn(2, 32)
    with modes.evaluating(torch, made):
        wanted = made(x)
    assert made.training and torch.equal(made.eval()(x), wanted)
