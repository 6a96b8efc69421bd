"""Names of what is trained."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

torch = pytest.importorskip("torch")

from saturate import dynamo_times  # noqa: E402 - after the check for torch
from saturate.agent import facts, kinds  # noqa: E402


class Generator(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.body = torch.nn.Linear(2, 2)


def named(*roots):
    session = SimpleNamespace(context=SimpleNamespace(modules=list(roots)))
    return [name for name, _ in kinds.named_modules(session, 100).values()]


def test_several_models_of_one_class_have_names_of_their_own():
    """As in a CycleGAN: what each costs must not lie under one name."""
    assert named(Generator()) == ["Generator", "body"]
    assert named(Generator(), torch.nn.Linear(2, 2)) == ["Generator", "Linear", "Generator.body"]
    assert named(Generator(), Generator()) == ["Generator#1", "Generator#2", "Generator#1.body", "Generator#2.body"]


def test_recompilations_so_far_and_their_time():
    """Dynamo counts a graph and a frame for each of them, so the difference between the two is none."""
    import torch._dynamo as dynamo

    dynamo.reset()
    dynamo.utils.clear_compilation_metrics()
    compiled = torch.compile(lambda x: x.sin() + 1, backend="eager", dynamic=False)
    compiled(torch.ones(2)), compiled(torch.zeros(2))
    seconds = dynamo_times.compile_s(dynamo)
    assert facts._recompiles(dynamo) == 0 and seconds > 0
    compiled(torch.ones(3)), compiled(torch.ones(4))
    assert facts._recompiles(dynamo) == 2 and dynamo_times.compile_s(dynamo) > seconds
    assert facts._recompiles(None) == 0 == dynamo_times.compile_s(None)
