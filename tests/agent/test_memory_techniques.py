"""Techniques that save memory, in a process of their own: what decides about them, and that they act from the first step."""

from __future__ import annotations

import dataclasses
import io
import os
import subprocess
import sys

import msgspec
import pytest

from saturate.records import recipe as recipes
from saturate.records.facts import Evidence, Facts
from saturate.study.candidates import Candidate
from saturate.techniques import _registry

MODEL = """
import torch, torch.nn as nn
torch.manual_seed(0)
class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.LayerNorm(32), nn.Linear(32, 128), nn.GELU(), nn.Linear(128, 32), nn.Dropout(0.1))
    def forward(self, x): return x + self.body(x)
model = nn.Sequential(*(Block() for _ in range(6)))
"""

LOOP = MODEL + """
opt = torch.optim.AdamW(model.parameters())
def step():
    opt.zero_grad()
    loss = model(torch.randn(64, 32)).square().mean()
    loss.backward()
    {before_step}
    opt.step()
    return loss.item()
"""
ENDLESS = "\nwhile True: step()\n"


def candidate(identity, **options):
    module = _registry.load()[identity]
    return Candidate(module, module.Options(**options))


@pytest.mark.parametrize("before_step, changes, expected", [
    ("pass", "", (False, False)),
    ("nn.utils.clip_grad_norm_(model.parameters(), 1.0)", "", (True, False)),
    ("pass", """
from torch.utils.checkpoint import checkpoint
for block in model: block.forward = __import__("functools").partial(checkpoint, block.forward, use_reentrant=False)
""", (False, True)),
])
def test_what_a_script_does_with_gradients_and_activations_is_seen(before_step, changes, expected, script, start):
    trial = start(str(script(LOOP.replace("{before_step}", before_step) + changes + ENDLESS)))
    trial.wait_ready()
    facts = msgspec.convert(trial.ask("facts"), Facts)
    assert (facts.gradients_read, facts.checkpointed) == expected
    limited = dataclasses.replace(facts, memory_limit_bytes=1 << 30)
    registry = _registry.load()
    assert bool(registry["optimizer-in-backward"].eligible(limited)) is not expected[0]
    assert bool(registry["activation-checkpointing"].eligible(limited)) is not expected[1]


def test_both_act_in_one_process_from_the_first_step(script, start):
    chosen = [candidate("activation-checkpointing", share=0.5), candidate("optimizer-in-backward")]
    trial = start(str(script(LOOP.replace("{before_step}", "pass") + ENDLESS)), techniques=[c.chosen() for c in chosen])
    hello = trial.wait_ready()
    assert [entry["problem"] for entry in hello["applied"]] == ["", ""]
    evidence = msgspec.convert(trial.ask("evidence"), Evidence)     # at the first gate: no further step is needed
    for one in chosen:
        proof = one.module.active(evidence, one.options)
        assert proof.active, (one.id, proof.evidence)


RUNS = LOOP.replace("{before_step}", "pass") + """
for _ in range(8): print(step())
torch.save([model.state_dict(), opt.state_dict()], "out.pt")
"""

DDP = MODEL + """
import torch.distributed as dist
dist.init_process_group("gloo")
ddp = nn.parallel.DistributedDataParallel(model)
opt = torch.optim.AdamW(ddp.parameters())
torch.manual_seed(dist.get_rank())
for _ in range(8):
    opt.zero_grad(); loss = ddp(torch.randn(16, 32)).square().mean(); loss.backward(); opt.step()
    if dist.get_rank() == 0: print(loss.item())
if dist.get_rank() == 0: torch.save([model.state_dict(), opt.state_dict()], "out.pt")
import time; time.sleep(0.5)      # gloo's threads let go of their last work a moment later; a process that ends before them is aborted (PyTorch #179291)
dist.destroy_process_group()
"""


def run(folder, environment, command, *entries):
    """Standard output, and the checkpoint that was saved, of a command under `saturate run`; without entries, alone."""
    recipes.write(folder / "recipe.toml", recipes.Recipe(techniques=list(entries)))
    prefix = [sys.executable, "-m", "saturate", "run", str(folder / "recipe.toml"), "--"] if entries else []
    done = subprocess.run([*prefix, *command], cwd=folder, env=environment, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr
    saved = (folder / "out.pt").read_bytes()
    os.unlink(folder / "out.pt")
    return done.stdout, saved, done.stderr


def same_checkpoint(a, b):
    torch = pytest.importorskip("torch")
    (model, optimizer), (other, other_optimizer) = (torch.load(io.BytesIO(saved), weights_only=True) for saved in (a, b))
    states = [(optimizer["state"][i][key], other_optimizer["state"][i][key]) for i in optimizer["state"] for key in optimizer["state"][i]]
    return (optimizer["param_groups"] == other_optimizer["param_groups"]
            and all(torch.equal(value, other[name]) for name, value in model.items()) and all(torch.equal(x, y) for x, y in states))


BOTH = (recipes.Entry(id="activation-checkpointing", options={"mode": "budget", "share": 0.5}),
        recipes.Entry(id="optimizer-in-backward"))


def test_a_run_with_a_recipe_is_the_run_without(script, tmp_path, clean_environment):
    command = [sys.executable, str(script(RUNS))]
    plain, saved, _ = run(tmp_path, clean_environment, command)
    ours, other, errors = run(tmp_path, clean_environment, command, *BOTH)
    assert ours == plain and same_checkpoint(saved, other) and not errors


def test_verification_runs_see_the_same_numbers(script, start):
    """Losses, norms of gradients that are gone by then, and parameters: every record of the runs that `tune` compares."""
    found = []
    for techniques in ([], [candidate(entry.id, **entry.options).chosen() for entry in BOTH]):
        path = script(LOOP.replace("{before_step}", "pass") + ENDLESS)
        capture = {"updates": 8, "seed": 1, "aligned": False, "perturb": None, "folder": str(path.parent)}
        trial = start(str(path), techniques=techniques, capture=capture)
        trial.wait_ready()
        found.append([(path.parent / name).read_bytes() for name in ("capture.jsonl", "samples.bin")])
        proofs = msgspec.convert(trial.ask("evidence"), Evidence).notes
        trial.stop()
    assert len(found[0][0].splitlines()) == 9 and b'"grad_norm": null' not in found[0][0]
    assert found[0] == found[1]
    assert {entry.id for entry in BOTH} <= set(proofs)


@pytest.mark.slow
def test_two_ranks(script, tmp_path, clean_environment):
    """Recomputing is exact beside DDP's buckets; updating in backward refuses, and says so once."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", str(script(DDP))]
    plain, saved, _ = run(tmp_path, clean_environment, command)
    ours, other, errors = run(tmp_path, clean_environment, command, *BOTH)
    assert ours == plain and same_checkpoint(saved, other)
    assert errors.count("optimizer-in-backward did not take effect: not_applied: gradients are averaged") == 1
    assert "activation-checkpointing did not" not in errors
