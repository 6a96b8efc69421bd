"""Techniques at their stage: what fails midway leaves nothing behind, and a `run` names what has nothing to show at its end."""

from __future__ import annotations

import subprocess
import sys
import types

import pytest

torch = pytest.importorskip("torch")

from saturate.agent import application  # noqa: E402 - after the import that decides whether to run at all
from saturate.agent.context import Context  # noqa: E402
from saturate.agent.forwards import is_ours  # noqa: E402
from saturate.techniques import _registry  # noqa: E402
from saturate.techniques._api import NotApplied  # noqa: E402


class Block(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(4, 4)

    def forward(self, x):
        return self.layer(x)


def session_of(model, *entries):
    context = Context(torch)
    context.modules, context.device = (model,), "cpu"
    return types.SimpleNamespace(context=context, plan={"techniques": list(entries)}, applied=[], placed=0)


def entry(identity, module, path=None, **options):
    return {"id": identity, "module": module, "path": path, "options": options}


def test_what_fails_for_one_block_is_on_none():
    """And nothing of it runs in a training that is said to be without."""
    model = torch.nn.Sequential(*(Block() for _ in range(6))).train()
    model[5].forward = lambda x: x
    session = session_of(model, entry("compile", "saturate.techniques.compile", scope="blocks"))
    application.apply_stage(session, "model")
    [(_, problem)] = session.applied
    assert problem.startswith("not_applied: Block.forward was already replaced")
    assert not any(map(is_ours, model)) and not session.context.changes


@pytest.mark.parametrize("before", [False, True])
@pytest.mark.parametrize("error", [NotApplied("not here"), RuntimeError("broken")])
def test_what_raises_midway_is_taken_back(error, before, monkeypatch):
    def apply(context, options):
        context.set_attribute(context.modules[0], "ours", True)
        context.note("half", "begun")
        raise error

    half = types.SimpleNamespace(TECHNIQUE=types.SimpleNamespace(stage="model"), Options=dict, apply=apply, EARLY=True)
    monkeypatch.setattr(_registry, "load_one", lambda module, path: half)
    model = torch.nn.Linear(1, 1)
    session = session_of(model, entry("half", "half"))
    application.apply_stage(session, "model", before_training=before)
    assert not hasattr(model, "ours") and not session.context.changes
    later = before and type(error) is NotApplied        # what cannot be applied yet has its turn then
    assert [str(error) in problem for _, problem in session.applied] == ([] if later else [True])
    assert later or not session.context.notes


def test_a_call_that_a_loader_refuses_is_left_to_it():
    """A script may expect the error: of an argument that only newer versions of torch know, say."""
    dataset = list(range(4))
    session = types.SimpleNamespace(context=types.SimpleNamespace(loader_rewrites=[lambda *_: {"num_workers": 1}]))
    init = torch.utils.data.DataLoader.__init__
    for args, kwargs in (((), {}), ((dataset,), {"no_such_argument": 1})):
        assert application.rewrite_loader(session, None, init, args, kwargs) == (args, kwargs)
    assert application.rewrite_loader(session, None, init, (dataset,), {})[1]["num_workers"] == 1


STOPS = """
import sys, torch
net = torch.nn.Conv2d(3, 4, 3)
opt = torch.optim.SGD(net.parameters(), lr=0.01)
for step in range(int(sys.argv[1])):
    if step == 30 and len(sys.argv) > 2:
        net.weight.data = net.weight.data.contiguous()
    opt.zero_grad(); net(torch.ones(2, 3, 8, 8)).sum().backward(); opt.step()
print("done")
"""


@pytest.mark.parametrize(("arguments", "told"), [((40, "stops"), True), ((40,), False), ((12, "stops"), False)])
def test_a_run_says_what_has_stopped_to_act(arguments, told, script, tmp_path, clean_environment):
    (tmp_path / "recipe.toml").write_text('schema = 1\n[[technique]]\nid = "channels-last"\n')
    command = [sys.executable, str(script(STOPS)), *map(str, arguments)]
    done = subprocess.run([sys.executable, "-m", "saturate", "run", "recipe.toml", "--", *command],
                          cwd=tmp_path, env=clean_environment, capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stdout) == (0, "done\n"), done.stderr
    line = "saturate: channels-last was not in effect when the script ended: no parameter is stored channels-last\n"
    assert done.stderr.count(line) == told, done.stderr


WORKERS = """
import torch
from torch.utils.data import DataLoader, TensorDataset
net = torch.nn.Linear(4, 1)
opt = torch.optim.SGD(net.parameters(), lr=0.01)
for epoch in range(3):
    for (x,) in DataLoader(TensorDataset(torch.ones(40, 4)), batch_size=2):
        opt.zero_grad(); net(x).sum().backward(); opt.step()
print("done")
"""


def test_workers_that_have_ended_with_their_pass_were_there(script, tmp_path, clean_environment):
    (tmp_path / "recipe.toml").write_text('schema = 1\n[[technique]]\nid = "loader-workers"\n')
    done = subprocess.run([sys.executable, "-m", "saturate", "run", "recipe.toml", "--", sys.executable, str(script(WORKERS))],
                          cwd=tmp_path, env=clean_environment, capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stdout) == (0, "done\n"), done.stderr
    assert "was not in effect" not in done.stderr, done.stderr
