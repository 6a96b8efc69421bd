"""What a verification run records does not depend on what differs between two processes of one training."""

from __future__ import annotations

from pathlib import Path

import pytest

from saturate.verify import series

MODULES = """
import sys, torch, torch.nn as nn
torch.manual_seed(0)
class Pair(nn.Module):
    def __init__(self):
        super().__init__()
        self.one, self.two = nn.Linear(4, 4), nn.Linear(4, 4)
    def forward(self, x): return self.two(self.one(x))
first, second = Pair(), Pair()      # of one kind: only their places in the graph tell them apart
held = [*first.parameters(), *second.parameters()]
optimizers = [torch.optim.Adam(held[::-1] if sys.argv[1] == "reversed" else held)]
x = torch.randn(8, 4)
def loss(): return second(torch.tanh(first(x))).square().mean()
"""
#: As Pyro does: tensors that no module holds, and an optimizer for each of them, built when it is first needed.
PLAIN = """
import sys, torch
torch.manual_seed(0)
held = [torch.randn(4, requires_grad=True), torch.randn(4, requires_grad=True), torch.randn(3, requires_grad=True)]
optimizers = []
def loss():
    a, b, c = held
    value = (a * b.exp()).sum().square() + c.square().sum() * a.sum()
    if not optimizers:
        optimizers.extend(torch.optim.Adam([p]) for p in (held[::-1] if sys.argv[1] == "reversed" else held))
    return value
"""
LOOP = """
while True:
    loss().backward()
    for optimizer in optimizers: optimizer.step(); optimizer.zero_grad()
"""


@pytest.mark.parametrize(("source", "optimizers"), [(MODULES, 1), (PLAIN, 3)], ids=["modules", "plain tensors"])
def test_optimizers_that_hold_the_same_tensors_in_another_order_are_the_same_training(source, optimizers, script, start, tmp_path: Path) -> None:
    """A set of tensors is ordered by addresses. Recorded in that order, a script was said not to repeat itself."""
    path = str(script(source + LOOP))
    names = [f"S{number}" for number in range(optimizers)]

    def recorded(order: str) -> series.Series:
        folder = tmp_path / order
        folder.mkdir()
        capture = {"folder": str(folder), "updates": 8, "seed": 20, "aligned": False, "perturb": {"relative": 2.0**-9, "seed": 1}}
        start(path, order, capture=capture, step={"token": names[-1], "count": 1, "tokens": ["B", *names]}).wait_capture()
        return series.read(folder)

    plain, other = recorded("plain"), recorded("reversed")
    assert plain.segments == other.segments and plain.samples == other.samples and plain.losses == other.losses


def test_a_default_device_and_number_format_of_the_script_do_not_change_what_is_perturbed() -> None:
    import torch

    from saturate.agent import capture

    def perturbed() -> torch.Tensor:
        parameter = torch.ones(64, device="cpu", dtype=torch.float32)
        capture._perturb(torch, [parameter], relative=2.0**-9, seed=1)
        return parameter

    plain = perturbed()
    try:
        torch.set_default_device("meta")        # as a GPU would be: other than where the generator draws
        torch.set_default_dtype(torch.float64)
        found = perturbed()
    finally:
        torch.set_default_device(None)
        torch.set_default_dtype(torch.float32)
    assert torch.equal(found, plain) and set(plain.tolist()) == {1 - 2.0**-9, 1 + 2.0**-9}
