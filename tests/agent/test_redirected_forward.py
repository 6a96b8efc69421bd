"""A framework may put a function in place of a module's forward for one call: what that calls is what techniques act on."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest

REDIRECTED = """
import sys, torch, torch.nn as nn, torch.distributed as dist
class Net(nn.Module):
    def __init__(self):
        super().__init__(); self.body = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 1))
    def forward(self, x): return self.body(x)
class Frame(nn.Module):
    def __init__(self):
        super().__init__(); self.net = Net()
    def forward(self, x): return self.net(x)
    def training_step(self, x): return (self if "whole" in sys.argv else self.net)(x).pow(2).mean()
frame = outer = Frame()
if "distributed" in sys.argv:
    dist.init_process_group("gloo", init_method=f"file://{sys.argv[0]}.store", rank=0, world_size=1)
    outer = nn.parallel.DistributedDataParallel(frame)
optimizer = torch.optim.SGD(frame.parameters(), lr=1e-3)
def redirected(x):          # as Lightning and Fabric do
    own = frame.forward
    def forward(x):
        frame.forward = own
        return frame.training_step(x)
    frame.forward = forward
    return outer(x)
for _ in range(STEPS):
    optimizer.zero_grad(); redirected(torch.randn(4, 8)).backward(); optimizer.step()
"""


@pytest.mark.parametrize("called", ["whole", "net"])
@pytest.mark.parametrize("outer", ["distributed", "plain"])
def test_what_is_called_inside_counts(outer: str, called: str, start: Any, script: Any, tmp_path: Any) -> None:
    facts = tmp_path / "early.json"
    trial = start(str(script(REDIRECTED.replace("STEPS", "10 ** 9"))), outer, called, plan={"early_facts": str(facts)})
    assert trial.wait_ready()["motif"] == "forward x1, backward x1, SGD.step"
    kind = {"whole": "Frame", "net": "Net"}[called]
    assert [module["kind"] for module in trial.ask("facts")["modules"]] == [kind]
    assert f'"kind": "{kind}"' in facts.read_text(encoding="utf-8")


def test_a_forward_that_is_never_called_is_told(script: Any, tmp_path: Any, clean_environment: Any) -> None:
    """Here the class's forward is not what is called in any step."""
    source = """
    import torch, torch.nn as nn
    class Frame(nn.Module):
        def __init__(self):
            super().__init__(); self.weight = nn.Parameter(torch.ones(8))
        def forward(self, x): raise NotImplementedError
    frame = Frame()
    optimizer = torch.optim.SGD(frame.parameters(), lr=1e-3)
    for _ in range(30):
        optimizer.zero_grad(); (frame.weight * torch.randn(4, 8)).pow(2).mean().backward(); optimizer.step()
    """
    recipe = tmp_path / "recipe.toml"
    recipe.write_text('schema = 1\n[[technique]]\nid = "micro-batch"\n[technique.options]\nchunks = 2\n', encoding="utf-8")
    done = subprocess.run([sys.executable, "-m", "saturate", "run", str(recipe), "--", sys.executable, str(script(source))],
                          capture_output=True, text=True, cwd=tmp_path, env=clean_environment, timeout=200, check=False)
    assert done.returncode == 0, done.stderr
    told = "saturate: micro-batch did not take effect: the script trains without calling the forward of Frame, which it acts on\n"
    assert done.stderr.count(told) == 1, done.stderr
