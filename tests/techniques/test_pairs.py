"""Two techniques at once keep what each keeps alone: state dicts, copies, pickles, checkpoints that go on, and the training itself."""

from __future__ import annotations

import itertools
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from saturate.techniques import _registry

torch = pytest.importorskip("torch")

from pair_matrix import OPTIONS  # noqa: E402 - after the import that decides whether to run at all
from torch import nn  # noqa: E402

from saturate.agent.context import Context  # noqa: E402
from saturate.techniques import dynamic_batch, fp16_autocast  # noqa: E402

TECHNIQUES = _registry.load()

#: Those for which a training is not made here, and why.
LEFT_OUT = {
    "allocator": "it sets variables before the process starts", "cpu-threads": "it sets variables before the process starts",
    "cpu-offload": "it needs a GPU", "fp8-linear": "it needs a GPU", "ddp-options": "it needs several ranks",
    "merged-micro-batches": "it needs a Trainer of transformers",
}

#: Pairs that reach for the same: an optimizer's step and state, the backward pass, what is saved, a loader.
QUICK = ("fused-optimizer+optimizer-in-backward", "fused-optimizer+optimizer-8bit", "fused-optimizer+channels-last", "zero-grad-none+fp16-autocast",
         "async-checkpoint+loader-workers")


def matrix(folder: Path, kind: str, *pairs: str) -> dict[str, list[str]]:
    """What is wrong with each."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("SATURATE")}
    source = Path(_registry.__file__).parents[2]
    environment["PYTHONPATH"] = os.pathsep.join([str(source), environment.get("PYTHONPATH", "")])
    done = subprocess.run([sys.executable, str(Path(__file__).with_name("pair_matrix.py")), str(folder), kind, *pairs],
                          capture_output=True, text=True, env=environment, check=False)
    assert done.returncode == 0, done.stderr
    return dict(json.loads(line) for line in done.stdout.splitlines())


def joined(one: str, other: str) -> str:
    """In the order in which they are applied."""
    return "+".join(module.TECHNIQUE.id for module in _registry.ordered([TECHNIQUES[one], TECHNIQUES[other]]))


def test_pairs_that_reach_for_the_same(tmp_path):
    pairs = [joined(*pair.split("+")) for pair in QUICK]
    assert matrix(tmp_path, "two", *pairs) == {pair: [] for pair in pairs}


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["conv", "text", "two", "text clips"])
@pytest.mark.parametrize("one", OPTIONS)
def test_every_pair(one, kind, tmp_path):
    claimed = {frozenset(found[:2]) for found in _registry.conflicts(list(TECHNIQUES.values()))}
    pairs = [joined(*pair) for pair in itertools.combinations(OPTIONS, 2) if pair[0] == one and frozenset(pair) not in claimed]
    if pairs:
        assert matrix(tmp_path, *kind.split(), *pairs) == {pair: [] for pair in pairs}


def test_every_technique_is_paired_or_left_out_with_a_reason():
    own = {name for name, module in TECHNIQUES.items() if module.__name__.startswith("saturate.")}
    assert own == OPTIONS.keys() | LEFT_OUT.keys() and not OPTIONS.keys() & LEFT_OUT.keys()


# -- what the matrix does not reach ------------------------------------------------------------------------------------


class RunsOut(torch.autograd.Function):
    armed = False

    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        if RunsOut.armed:
            RunsOut.armed = False
            raise torch.OutOfMemoryError("CUDA out of memory (planted)")
        return gradient


class Scarce(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(16, 32), nn.Linear(32, 4)

    def forward(self, x):
        return self.b(RunsOut.apply(torch.relu(self.a(x))))


def test_what_runs_again_for_want_of_memory_is_not_scaled_twice():
    """The gradients that a failed backward pass had come to by then are scaled where a loss is. Both are applied at once where the training
    goes on with another optimizer."""
    found = []
    for techniques in ([fp16_autocast], [fp16_autocast, dynamic_batch]):
        torch.manual_seed(0)
        model = Scarce()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        context = Context(torch)
        context.modules, context.optimizers, context.device = (model,), (optimizer,), "cpu"
        for technique in _registry.ordered(techniques):
            technique.apply(context.of(technique.TECHNIQUE.id), technique.Options())
        try:
            for number in range(4):
                optimizer.zero_grad()
                RunsOut.armed = number == 3 and len(techniques) == 2
                model(torch.randn(8, 16)).square().mean().backward()
                optimizer.step()
            assert not RunsOut.armed
            found.append([p.grad.norm().item() for p in model.parameters()])
        finally:
            context.undo()
    assert found[1] == pytest.approx(found[0], rel=1e-2)
