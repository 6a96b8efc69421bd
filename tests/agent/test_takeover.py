"""A training that goes on with another model or optimizer keeps its techniques, or it is said that it does not."""

from __future__ import annotations

import pytest

from saturate.agent.session import Session
from saturate.techniques import _registry
from saturate.trial.launch import Chosen

HEAD = """
import torch, torch.nn as nn
torch.manual_seed(0)
class Net(nn.Module):
    def __init__(self): super().__init__(); self.a = nn.Linear(8, 8); self.b = nn.Linear(8, 1)
    def forward(self, x): return self.b(torch.relu(self.a(x)))
class Other(Net): pass
x, y = torch.randn(16, 8), torch.randn(16, 1)
def train(model, optimizer, steps):
    for _ in range(steps):
        optimizer.zero_grad(); ((model(x) - y) ** 2).mean().backward(); optimizer.step()
def adam(model): return torch.optim.AdamW(model.parameters(), lr=1e-3)
def told(model, optimizer): print("forward" in vars(model), optimizer.param_groups[0].get("fused"), flush=True)
"""
IDS = ("bf16-autocast", "fused-optimizer")

#: name -> (source, what is printed of each model and optimizer: whether its forward is wrapped, whether it is fused)
TRAININGS = {
    "folds": ("""
model = None
for _ in range(3):
    before, model = model, Net(); optimizer = adam(model); train(model, optimizer, 30); told(model, optimizer)
told(before, optimizer)
""", ["True True"] * 3 + ["False True"]),
    "an optimizer for every epoch": ("""
model = Net()
for _ in range(3):
    optimizer = adam(model); train(model, optimizer, 12); told(model, optimizer)
""", ["True True"] * 3),
    "a deep copy": ("""
import copy
model = Net(); optimizer = adam(model); train(model, optimizer, 20)
model = copy.deepcopy(model); optimizer = adam(model); train(model, optimizer, 20); told(model, optimizer)
""", ["True True"]),
    "two that take turns": ("""
models = [Net(), Net()]; optimizers = [adam(m) for m in models]
for turn in range(3):
    model, optimizer = models[turn % 2], optimizers[turn % 2]; train(model, optimizer, 40); told(model, optimizer)
""", ["True True"] * 3),
    "one that the script froze": ("""
import gc
model = Net(); optimizer = adam(model); train(model, optimizer, 3)
gc.collect(); gc.freeze(); gc.disable(); train(model, optimizer, 30); told(model, optimizer)
""", ["True True"]),
    "one that the script compiled": ("""
model = torch.compile(Net(), backend="eager"); optimizer = adam(model); train(model, optimizer, 30)
print(hasattr(vars(model)["forward"], "instances_own"), optimizer.param_groups[0].get("fused"), flush=True)
""", ["True True"]),
    "a model of another class": ("""
model = Net(); train(model, adam(model), 30)
model = Other(); optimizer = adam(model); train(model, optimizer, 30); told(model, optimizer)
""", ["False True"]),
}


def chosen(*identities: str) -> list[Chosen]:
    found = []
    for identity in identities or IDS:
        name, path = _registry.origin(_registry.load()[identity])
        found.append(Chosen(id=identity, module=name, path=path, options={}))
    return found


@pytest.mark.parametrize("name", TRAININGS)
def test_techniques_act_on_what_is_trained_now(name, script, start):
    source, expected = TRAININGS[name]
    step = {"token": "S0", "count": 1, "tokens": ["B", "S0"]}
    trial = start(str(script(HEAD + source + "train(model, optimizer, 10**6)")), techniques=chosen(), step=step)
    trial.wait_ready()
    trial.run_block(1, 150)
    assert trial.output().split("\n")[:-1] == expected
    problems = [applied["problem"] for applied in trial.greeting()["applied"]]
    notes = trial.ask("evidence")["notes"]
    if "another class" in name:
        assert ["the training goes on with another model" in problem for problem in problems] == [True, False]
        assert list(notes) == ["fused-optimizer"]
    else:
        assert problems == ["", ""] and set(notes) == set(IDS)


@pytest.mark.parametrize("scheduler", ["None", "torch.optim.lr_scheduler.StepLR(optimizer, 10)"], ids=["alone", "with a scheduler"])
def test_an_optimizer_that_the_script_has_left_does_not_stand_in_the_way_of_the_next_one(scheduler, script, start):
    """Nothing of a technique keeps it, nor does a cycle with its scheduler, however late garbage is collected."""
    source = f"""
import gc
gc.disable(); model = Net()
for _ in range(3):
    optimizer = adam(model); scheduler = {scheduler}; train(model, optimizer, 30)
"""
    step = {"token": "S0", "count": 1, "tokens": ["B", "S0"]}
    trial = start(str(script(HEAD + source + "train(model, optimizer, 10**6)")), techniques=chosen("optimizer-in-backward"), step=step)
    trial.wait_ready()
    trial.run_block(1, 150)
    assert [applied["problem"] for applied in trial.greeting()["applied"]] == [""]


@pytest.mark.parametrize("penalty, refused", [
    ("grad(model(inputs).sum(), inputs, create_graph=True)[0].square().mean()", True),
    ("grad(model(inputs).sum(), inputs)[0].square().mean()", False),
])
def test_a_training_with_a_gradient_penalty_is_not_compiled(penalty, refused, script, start):
    """Compiled code has no second derivative: torch raises in the backward pass, and the training ends."""
    name, path = _registry.origin(_registry.load()["compile"])
    training = f"""
from torch.autograd import grad
model = Net(); optimizer = adam(model); inputs = x.clone().requires_grad_()
while True:
    penalty = {penalty}
    optimizer.zero_grad(); (((model(x) - y) ** 2).mean() + penalty).backward(); optimizer.step()
"""
    trial = start(str(script(HEAD + training)), techniques=[Chosen(id="compile", module=name, path=path, options={})])
    trial.wait_ready()
    problem = trial.greeting()["applied"][0]["problem"]
    assert ("create_graph" in problem) is refused and bool(problem) is refused
    assert trial.ask("facts")["differentiates_gradients"] is refused


def test_what_is_known_of_optimizers_that_are_gone_does_not_grow():
    """One for every step, as in inner loops and test-time adaptation: each is named, takes the first one's part, and is forgotten."""
    torch = pytest.importorskip("torch")
    session = Session(torch, {"mode": "run", "techniques": [], "step": {"token": "S0", "count": 1, "tokens": ["B", "S0"]}})
    session.phase, session.backwards = "active", 1
    model = torch.nn.Linear(2, 1)
    for number in range(300):
        models = [model] if number < 200 else [torch.nn.Linear(2, 1)]       # then a model for every step, too
        optimizer = torch.optim.SGD(models[0].parameters(), lr=0.1)
        session.constructs(optimizer)
        session.step_ends(optimizer)
        if number < 200:
            assert session._name(optimizer) == "S0" and session.optimizers.living() == [optimizer]
            assert session.boundaries == number + 1
        del optimizer
    assert not session.dead and session.counts["S0"] == 200
    known = session.optimizers
    for table in (known.by_name, known._names, known.held, known.roles, known.stepped, known.moved_to, known.counts):
        assert len(table) <= 3, table
    assert len(known.built) <= 130
