"""Names of what is trained."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

torch = pytest.importorskip("torch")

from saturate.agent import kinds  # noqa: E402


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
