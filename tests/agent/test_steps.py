"""The step is found in the loops that people really write."""

from __future__ import annotations

import importlib.util
import itertools
import sys
import types

import pytest

from saturate.agent import inspection, motif, observe
from saturate.agent.optimizers import Optimizers
from saturate.agent.session import Session
from saturate.study import baseline
from saturate.trial.process import TrialEnded
from saturate.verify import series

HEAD = """
import torch, torch.nn as nn
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 1))
x, y = torch.randn(4, 8), torch.randn(4, 1)
def loss_of(m=None): return (((m or model)(x) - y) ** 2).mean()
"""

#: name -> (source, tokens of one step, forwards of the outermost modules in one step)
LOOPS = {
    "a schedule that is drawn first": ("""
opt = torch.optim.SGD(model.parameters(), lr=1e-4)
drawn = torch.optim.Adam(torch.nn.Linear(1, 1).parameters())
scheduler = torch.optim.lr_scheduler.LambdaLR(drawn, lambda step: 1 / (1 + step))
for _ in range(2000):
    drawn.step(); scheduler.step()
while True:
    loss_of().backward(); opt.step(); opt.zero_grad()
""", ["B", "S0"], 1),
    "plain": ("""
opt = torch.optim.SGD(model.parameters(), lr=1e-3)
while True:
    opt.zero_grad(); loss_of().backward(); opt.step()
""", ["B", "S0"], 1),
    "a method parameters of its own": ("""
class Functional(nn.Module):
    def __init__(self):
        super().__init__()
        self.weights = nn.ParameterList([nn.Parameter(torch.randn(1, 8)), nn.Parameter(torch.zeros(1))])
    def parameters(self): return self.weights
    def forward(self, x): return nn.functional.linear(x, *self.weights)
model = Functional()
opt = torch.optim.SGD(model.parameters(), lr=1e-3)
while True:
    opt.zero_grad(); loss_of().backward(); opt.step()
""", ["B", "S0"], 1),
    "accumulation": ("""
opt = torch.optim.AdamW(model.parameters())
while True:
    for _ in range(4): (loss_of() / 4).backward()
    opt.step(); opt.zero_grad()
""", ["B", "B", "B", "B", "S0"], 4),
    "long accumulation": ("""
opt = torch.optim.AdamW(model.parameters())
while True:
    for _ in range(40): (loss_of() / 40).backward()
    opt.step(); opt.zero_grad()
""", ["B"] * 40 + ["S0"], 40),
    "gan": ("""
critic = nn.Linear(1, 1)
d = torch.optim.Adam(critic.parameters()); g = torch.optim.Adam(model.parameters())
while True:
    d.zero_grad(); critic(y).mean().backward(); (-critic(model(x).detach())).mean().backward(); d.step()
    g.zero_grad(); critic(model(x)).mean().backward(); g.step()
""", ["B", "B", "S0", "B", "S1"], None),
    "five critic steps": ("""
critic = nn.Linear(1, 1)
d = torch.optim.Adam(critic.parameters()); g = torch.optim.Adam(model.parameters())
while True:
    for _ in range(5):
        d.zero_grad(); critic(model(x).detach()).mean().backward(); d.step()
    g.zero_grad(); critic(model(x)).mean().backward(); g.step()
""", ["B", "S0"] * 5 + ["B", "S1"], None),
    "lbfgs closure": ("""
opt = torch.optim.LBFGS(model.parameters(), max_iter=3)
def closure():
    opt.zero_grad(); loss = loss_of(); loss.backward(); return loss
while True: opt.step(closure)
""", ["S0"], None),
    "all in one step": ("""
opt = torch.optim.LBFGS(model.parameters(), max_iter=10**9, max_eval=10**9, tolerance_grad=0, tolerance_change=-1)
def closure():          # on other samples each time: on the same ones its gradient may become zero, which ends it
    x.normal_(); opt.zero_grad(); loss = loss_of(); loss.backward(); return loss
opt.step(closure)
""", ["C"], 1),
    "no optimizer": ("""
while True:
    model.zero_grad(); loss_of().backward()
    for p in model.parameters(): p.data.add_(p.grad, alpha=-1e-3)
""", ["B"], 1),
    "no optimizer, accumulation": ("""
while True:
    model.zero_grad()
    for _ in range(3): loss_of().backward()
    with torch.no_grad():
        for p in model.parameters(): p -= 1e-3 * p.grad
""", ["B", "B", "B"], 3),
    "no module, no optimizer": ("""
w = torch.randn(8, 1, requires_grad=True); b = torch.zeros(1, requires_grad=True)
while True:
    ((x @ w + b - y) ** 2).mean().backward()
    with torch.no_grad():
        w -= 1e-3 * w.grad; b -= 1e-3 * b.grad
        w.grad = None; b.grad.zero_()
""", ["B"], None),
    "a generator of losses of plain tensors": ("""
w = torch.randn(8, 1, requires_grad=True); b = torch.zeros(1, requires_grad=True)
while True:
    torch.autograd.backward(((x @ w + b - y) ** 2).mean() for _ in range(2))
    with torch.no_grad():
        w -= 1e-3 * w.grad; b -= 1e-3 * b.grad
        w.grad = None; b.grad.zero_()
""", ["B"], None),
    "an edge of the graph of plain tensors": ("""
w = torch.randn(8, 1, requires_grad=True); b = torch.zeros(1, requires_grad=True)
while True:
    torch.autograd.backward(torch.autograd.graph.get_gradient_edge(((x @ w + b - y) ** 2).mean()), torch.ones(()))
    with torch.no_grad():
        w -= 1e-3 * w.grad; b -= 1e-3 * b.grad
        w.grad = None; b.grad.zero_()
""", ["B"], None),
    "evaluation phases": ("""
opt = torch.optim.SGD(model.parameters(), lr=1e-3)
while True:
    model.train()
    for _ in range(7):
        opt.zero_grad(); loss_of().backward(); opt.step()
    model.eval()
    with torch.no_grad():
        for _ in range(5): loss_of()
""", ["B", "S0"], 1),
    "probe batch before training": ("""
from torch.utils.data import DataLoader, TensorDataset
loader = DataLoader(TensorDataset(torch.randn(64, 8)), batch_size=4)
model(next(iter(loader))[0]).sum().backward(); model.zero_grad()
opt = torch.optim.SGD(model.parameters(), lr=1e-3)
while True:
    for (b,) in loader:
        opt.zero_grad(); model(b).pow(2).mean().backward(); opt.step()
""", ["B", "S0"], 1),
    "grad scaler that skips": ("""
opt = torch.optim.SGD(model.parameters(), lr=1e-3)
scaler = torch.amp.GradScaler("cpu", init_scale=2.0, growth_interval=10**9)
n = 0
while True:
    n += 1
    opt.zero_grad(); loss = loss_of() * (float("inf") if n % 5 == 0 else 1.0)
    scaler.scale(loss).backward(); scaler.step(opt); scaler.update()
""", ["B", "S0"], 1),
    "two optimizers that step together": ("""
a = torch.optim.SGD(model[0].parameters(), lr=1e-3); b = torch.optim.SGD(model[2].parameters(), lr=1e-3)
while True:
    a.zero_grad(); b.zero_grad(); loss_of().backward(); a.step(); b.step()
""", ["B", "S0", "S1"], 1),
}


def test_a_forked_child_may_train_what_its_parent_built(script, start):
    """As pytorch-a3c: the optimizer and a loader are made in the parent, which does not train."""
    trial = start(str(script(HEAD + """
import torch.multiprocessing as mp
def train(opt, loader):
    while True:
        for (b,) in loader:
            opt.zero_grad(); model(b).pow(2).mean().backward(); opt.step()
if __name__ == "__main__":
    opt = torch.optim.Adam(model.parameters())
    loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(x), 2)
    child = mp.get_context("fork").Process(target=train, args=(opt, loader)); child.start(); child.join()
""")))
    assert trial.wait_ready()["step"]["tokens"] == ["B", "S0"]
    assert trial.run_block(0, 20).moved


def test_a_forked_child_may_build_its_optimizers_itself(script, start):
    """As Lightning's ddp_fork: only the loader is made in the parent. What the child built was not seen, and five steps of the critic were steps."""
    trial = start(str(script(HEAD + """
import torch.multiprocessing as mp
def train(loader):
    critic, generator = (torch.optim.SGD(part.parameters(), lr=1e-3) for part in (model[0], model[2]))
    while True:
        for optimizer in [critic] * 5 + [generator]:
            optimizer.zero_grad(); model(next(iter(loader))[0]).pow(2).mean().backward(); optimizer.step()
if __name__ == "__main__":
    loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(x), 2)
    child = mp.get_context("fork").Process(target=train, args=(loader,)); child.start(); child.join()
""")))
    assert trial.wait_ready()["step"]["tokens"] == ["B", "S0"] * 5 + ["B", "S1"]


def test_children_of_a_training_are_left_alone(script, start):
    """One that runs a backward of its own, forked in the middle of it."""
    trial = start(str(script(HEAD + """
import os
opt = torch.optim.Adam(model.parameters()); n = 0
while True:
    opt.zero_grad(); loss_of().backward(); opt.step(); n += 1
    if n % 10 == 0:
        child = os.fork()
        if child == 0: loss_of().backward(); os._exit(0)
        os.waitpid(child, 0)
""")))
    assert trial.wait_ready()["step"]["tokens"] == ["B", "S0"]
    assert trial.run_block(0, 40).moved


#: Trainings that go on with other optimizers: 30 steps each.
SUCCESSIONS = {
    "folds that were built at once": """
models = [nn.Linear(8, 1) for _ in range(50)]
optimizers = [torch.optim.SGD(m.parameters(), lr=1e-3) for m in models]
for m, opt in zip(models, optimizers):
    for _ in range(30):
        opt.zero_grad(); loss_of(m).backward(); opt.step()
""",
    "an optimizer for every epoch": """
while True:
    opt = torch.optim.Adam(model.parameters())
    for _ in range(30):
        opt.zero_grad(); loss_of().backward(); opt.step()
""",
    "gans one after the other": """
while True:
    critic, maker = nn.Linear(1, 1), nn.Linear(8, 1)
    d = torch.optim.SGD(critic.parameters(), lr=1e-3); g = torch.optim.SGD(maker.parameters(), lr=1e-3)
    for _ in range(30):
        d.zero_grad(); critic(maker(x).detach()).mean().backward(); d.step()
        g.zero_grad(); critic(maker(x)).mean().backward(); g.step()
""",
}


def test_an_optimizer_that_another_thread_takes_away_ends_no_step():
    """Two threads with an optimizer each: what was there at a look is gone at the next."""
    class Taken(list):
        def __contains__(self, item):
            return True

    session = types.SimpleNamespace(stepping=Taken())
    Session._not_stepping(session, object())
    session.stepping[:] = [1, id(session), 2]
    Session._not_stepping(session, session)
    assert session.stepping == [1]


def test_nobody_waits_for_an_optimizer_that_only_drew_a_schedule():
    """A script may keep it: each of its trials would wait 200 steps for it, or 20 s."""
    class Optimizer:
        """Of any kind."""

    drawn, other = Optimizer(), Optimizer()
    optimizers = Optimizers()
    for built in (drawn, other):
        optimizers.add_built(built)
    optimizers.drew(drawn)
    assert optimizers.waiting()
    optimizers.name(other)
    assert not optimizers.waiting()


def test_weights_that_are_computed_are_not_asked_for_gradients(recwarn):
    """A module may hold some in place of its parameters, as in meta-learning: torch warns of each that is asked."""
    torch = pytest.importorskip("torch")
    trained, fast = torch.nn.Linear(2, 2), torch.nn.Linear(2, 2)
    fast._parameters["weight"] = trained.weight * 2
    (fast(torch.ones(1, 2)).sum() + trained(torch.ones(1, 2)).sum()).backward()
    session = types.SimpleNamespace(torch=torch, optimizers=Optimizers(), leaves=[])
    found = {id(parameter) for parameter in observe.trained_parameters(session)}
    assert {id(trained.weight), id(trained.bias), id(fast.bias)} <= found and id(fast._parameters["weight"]) not in found
    assert not [warning for warning in recwarn if "non-leaf" in str(warning.message)]


@pytest.mark.parametrize("name, told", [
    ("folds that were built at once", True), ("folds that were built at once", False),
    ("an optimizer for every epoch", True), ("gans one after the other", False),
])
def test_a_step_goes_on_with_other_optimizers(name, told, script, start):
    """As the same step, whether it was found in this process or in the baseline, and with as many events."""
    period = ["B", "S0", "B", "S1"] if "gan" in name else ["B", "S0"]
    step = {"token": period[-1], "count": 1, "tokens": period} if told else None
    trial = start(str(script(HEAD + SUCCESSIONS[name])), step=step)
    assert trial.wait_ready()["step"]["tokens"] == period
    counted = {token: 0 for token in period}
    for _ in range(5):
        block = trial.run_block(0, 20)
        assert block.moved
        for token in counted:
            counted[token] += block.events[token]
    expected = {token: 100 * period.count(token) for token in counted}
    assert all(abs(counted[token] - expected[token]) <= 2 for token in counted), (counted, expected)


@pytest.mark.parametrize(("name", "follows", "told"), [
    ("folds", True, False), ("folds", True, True), ("an optimizer for every epoch", True, False), ("another model", False, False),
])
def test_what_is_recorded_goes_on_with_the_model_that_is_trained(name, follows, told, script, start, tmp_path):
    """Else the parameters of the first fold would stand still for the rest of a verification run."""
    other = {"folds": "range(8)", "another model": "(8, 9)"}
    source = SUCCESSIONS.get(name) or f"""
for width in {other[name]}:
    m = nn.Sequential(nn.Linear(8, {"16" if name == "folds" else "width"}), nn.Linear({"16" if name == "folds" else "width"}, 1))
    opt = torch.optim.SGD(m.parameters(), lr=1e-3)
    for _ in range(30 if width < 9 else 1000):
        opt.zero_grad(); loss_of(m).backward(); opt.step()
"""
    capture = {"folder": str(tmp_path), "updates": 52, "seed": 1, "aligned": False, "perturb": None}
    trial = start(str(script(HEAD + source)), capture=capture, step={"token": "S0", "count": 1, "tokens": ["B", "S0"]} if told else None)
    trial.wait_ready()
    assert trial.first_gate_s > 0
    recorded = series.read(tmp_path)
    moving = sum(before != after for before, after in itertools.pairwise(recorded.samples))
    assert len(recorded) == 52 and (moving == 51) == follows, moving


@pytest.mark.parametrize("name", LOOPS)
def test_step_is_found(name, script, start):
    source, tokens, forwards = LOOPS[name]
    trial = start(str(script(HEAD + source)))
    hello = trial.wait_ready()
    assert hello["step"]["tokens"] == tokens
    if forwards is not None:
        assert hello["motif"].startswith(f"forward x{forwards}, ")
    block = trial.run_block(1, 6)
    # An evaluation is no training step; everything else is timed.
    assert 1 <= len(block.step_ns) <= 6
    assert all(ns > 0 for ns in block.step_ns)


def test_an_irregular_loop_steps_with_its_optimizer(script, start):
    source = HEAD + """
import random
random.seed(0)
opt = torch.optim.SGD(model.parameters(), lr=1e-4)
while True:
    for _ in range(random.randint(1, 4)): loss_of().backward()
    opt.step(); opt.zero_grad()
"""
    trial = start(str(script(source)))
    hello = trial.wait_ready()
    assert hello["step"]["tokens"][-1] == "S0"
    assert len(trial.run_block(1, 5).step_ns) == 5


TWO_OPTIMIZERS = HEAD + """
first, second = (torch.optim.SGD(layer.parameters(), lr=1e-3) for layer in (model[0], model[2]))
for _ in range(STEPS):
    model.zero_grad(); loss_of().backward(); first.step(); second.step()
"""


@pytest.mark.parametrize(("steps", "named", "complaint"), [
    (10**9, "optimizer:7", "--step optimizer:7: only optimizers 0 and 1 step here"),
    (40, "optimizer:7", "--step optimizer:7: only optimizers 0 and 1 step here"),       # the script ends before that is sure
])
def test_a_step_that_the_user_named_and_that_never_comes_is_reported(steps, named, complaint, script, start):
    trial = start(str(script(TWO_OPTIMIZERS.replace("STEPS", str(steps)))), step=baseline.step_override(named))
    with pytest.raises(TrialEnded) as ended:
        trial.wait_ready()
    assert ended.value.outcome.kind == "no_step"
    assert ended.value.outcome.reason.startswith(complaint)


def test_no_optimizer_plays_the_part_of_one_that_never_steps(script, start):
    trial = start(str(script(HEAD + LOOPS["plain"][0])), step=baseline.step_override("optimizer:5"))
    with pytest.raises(TrialEnded) as ended:
        trial.wait_ready()
    assert ended.value.outcome.reason.startswith("--step optimizer:5: only optimizer 0 steps here")


def test_a_named_step_may_begin_late(script, start):
    """The critic steps a hundred times before the generator's first step."""
    source = LOOPS["five critic steps"][0].replace("while True:", "for warm in (True, *[False] * 10**6):").replace("range(5)", "range(100 if warm else 5)")
    trial = start(str(script(HEAD + source)), step=baseline.step_override("optimizer:1"))
    assert trial.wait_ready()["step"]["token"] == "S1"
    assert trial.run_block(0, 4).events["S0"] == 20


@pytest.mark.parametrize(("loop", "named", "words"), [
    ("plain", "backward:4", "backward x4, SGD.step x4"),
    ("no optimizer", "backward:4", "backward x4, update by hand"),
])
def test_the_optimizer_of_a_named_step_is_no_update_by_hand(loop, named, words, script, start):
    trial = start(str(script(HEAD + LOOPS[loop][0])), step=baseline.step_override(named))
    trial.wait_ready()
    assert trial.ask("facts")["motif"].endswith(words)


def test_backward_without_any_update_is_no_step(script, start):
    trial = start(str(script(HEAD + "while True: model.zero_grad(); loss_of().backward()")))
    with pytest.raises(TrialEnded) as ended:
        trial.wait_ready()
    assert ended.value.outcome.kind == "no_step"
    assert "--step" in ended.value.outcome.remedy


def test_ranks_made_by_spawn_know_their_rank(script, start):
    source = """
    import torch, torch.nn as nn, torch.distributed as dist, torch.multiprocessing as mp, os
    def main(rank, path):
        dist.init_process_group("gloo", init_method="file://" + path, rank=rank, world_size=2)
        model = nn.parallel.DistributedDataParallel(nn.Linear(8, 1)); opt = torch.optim.SGD(model.parameters(), lr=1e-3)
        while True:
            opt.zero_grad(); model(torch.randn(4, 8)).mean().backward(); opt.step()
    if __name__ == "__main__":
        mp.spawn(main, args=(os.path.abspath("rendezvous"),), nprocs=2)
    """
    trial = start(str(script(source)), timeout_s=120.0)
    hello = trial.wait_ready()
    assert hello["world_size"] == 2
    assert sorted(rank.hello["rank"] for rank in trial.server.ranks) == [0, 1]


def test_a_port_that_ranks_meet_at_is_known(script, start):
    """`saturate tune` must not run two of such a command at once."""
    source = """
    import torch, torch.nn as nn, torch.distributed as dist, torch.multiprocessing as mp, os, random, socket
    def main(rank, port):
        os.environ.update(MASTER_ADDR="localhost", MASTER_PORT=str(port))
        dist.init_process_group("gloo", rank=rank, world_size=2)
        model = nn.parallel.DistributedDataParallel(nn.Linear(8, 1)); opt = torch.optim.SGD(model.parameters(), lr=1e-3)
        while True:
            opt.zero_grad(); model(torch.randn(4, 8)).mean().backward(); opt.step()
    if __name__ == "__main__":
        port = next(port for port in random.sample(range(12000, 30000), 50)
                    if socket.socket().connect_ex(("127.0.0.1", port)) != 0)
        print("port", port, flush=True)
        mp.spawn(main, args=(port,), nprocs=2)
    """
    trial = start(str(script(source)), timeout_s=120.0)
    trial.wait_ready()
    assert trial.ports() == [int(trial.output().split()[1])]


def test_steps_that_contain_an_evaluation_are_left_out(script, start):
    trial = start(str(script(HEAD + LOOPS["evaluation phases"][0])))
    trial.wait_ready()
    assert len(trial.run_block(0, 14).step_ns) == 12      # one evaluation in seven steps


def test_nothing_of_ours_is_on_a_module_that_is_copied_or_pickled(script, start):
    """A hook of a module would be pickled with it, which fails, and run in its copies for good."""
    source = HEAD + """
import copy, io
opt = torch.optim.SGD(model.parameters(), lr=1e-3)
while True:
    opt.zero_grad(); loss_of().backward()
    twin = copy.deepcopy(model)
    torch.save((model, twin, opt), io.BytesIO())
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in (*model.modules(), *twin.modules()))
    opt.step()
"""
    trial = start(str(script(source)))
    trial.wait_ready()
    assert len(trial.run_block(0, 3).step_ns) == 3


def test_manual_accumulation_counts_from_the_right_backward(script, start):
    """The boundary must fall between update and next step, not inside a step."""
    source = HEAD + """
import time
while True:
    model.zero_grad()
    time.sleep(0.02)
    for _ in range(3): loss_of().backward()
    for p in model.parameters(): p.data.add_(p.grad, alpha=-1e-3)
"""
    trial = start(str(script(source)))
    trial.wait_ready()
    block = trial.run_block(1, 5)
    assert all(ns > 15e6 for ns in block.step_ns), block


@pytest.mark.parametrize(("optimizer", "before", "micro_steps", "words"), [
    ("SGD(model.parameters(), lr=1e-3)", 0, 1, "forward x1, backward x1, SGD.step"),
    ("SGD(model.parameters(), lr=1e-3)", 1, 2, "forward x2, backward x2, SGD.step"),
    ("SGD(model.parameters(), lr=1e-3)", 3, 4, "forward x4, backward x4, SGD.step"),
    ("LBFGS(model.parameters(), max_iter=3, max_eval=3, tolerance_grad=0, tolerance_change=-1)", 0, 1, "forward x3, backward x3, LBFGS.step"),
])
def test_the_last_micro_step_may_run_inside_of_the_step(optimizer, before, micro_steps, words, script, start):
    """As under Lightning, which calls the closure itself for the others. LBFGS calls it several times for one update."""
    trial = start(str(script(HEAD + f"""
opt = torch.optim.{optimizer}
def closure():
    loss = loss_of(); loss.backward(); return loss
while True:
    opt.zero_grad()
    for _ in range({before}): closure()
    opt.step(closure)
""")))
    assert trial.wait_ready()["motif"] == words
    assert trial.ask("facts")["micro_steps"] == micro_steps


def test_the_split_counts_a_closure_backward_once(script, start):
    """Lightning runs forward and backward inside `optimizer.step(closure)`: they are not the optimizer's time."""
    source = HEAD + """
import time
class Slow(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x): return x.clone()
    @staticmethod
    def backward(ctx, g): time.sleep(0.1); return g
opt = torch.optim.SGD(model.parameters(), lr=1e-3)
def closure():
    opt.zero_grad(); loss = Slow.apply(loss_of()); loss.backward(); return loss
while True: opt.step(closure)
"""
    trial = start(str(script(source)))
    trial.wait_ready()
    parts = trial.run_block(1, 10, split=True).parts
    assert parts["backward"] > 1000e6
    assert parts["optimizer"] < 0.5 * parts["backward"], parts


def test_ddp_ranks_are_gated_together(script, start):
    source = """
    import torch, torch.nn as nn, torch.distributed as dist
    dist.init_process_group("gloo")
    model = nn.parallel.DistributedDataParallel(nn.Linear(8, 1))
    opt = torch.optim.SGD(model.parameters(), lr=1e-3)
    while True:
        opt.zero_grad(); model(torch.randn(4, 8)).mean().backward(); opt.step()
    """
    trial = start(sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", str(script(source)))
    hello = trial.wait_ready()
    assert hello["world_size"] == 2
    assert hello["motif"] == "forward x1, backward x1, SGD.step"
    trial.freeze()
    trial.thaw()
    assert len(trial.run_block(1, 4).step_ns) == 4
    assert trial.ask("facts")["modules"][0]["kind"] == "Linear"     # DDP is unwrapped


def test_loader_workers_are_left_alone(script, start):
    """Spawned workers import torch and the agent; they must never show up at the gate or change their DataLoader."""
    source = """
    import torch, torch.nn as nn
    from torch.utils.data import DataLoader, Dataset
    class Data(Dataset):
        def __len__(self): return 64
        def __getitem__(self, i): return torch.randn(8)
    if __name__ == "__main__":
        model = nn.Linear(8, 1); opt = torch.optim.SGD(model.parameters(), lr=1e-3)
        while True:
            for b in DataLoader(Data(), batch_size=4, num_workers=1, multiprocessing_context="spawn", persistent_workers=False):
                opt.zero_grad(); model(b).mean().backward(); opt.step()
    """
    trial = start(str(script(source)), timeout_s=120.0)
    trial.wait_ready()
    assert trial.run_block(0, 20).step_ns
    facts = trial.ask("facts")
    assert [loader["num_workers"] for loader in facts["loaders"]] == [1]
    assert len(trial.server.ranks) == 1


@pytest.mark.parametrize("package, source", [
    ("lightning", """
import torch, lightning as L
class M(L.LightningModule):
    def __init__(self):
        super().__init__(); self.net = torch.nn.Linear(8, 1)
    def training_step(self, batch, i): return self.net(batch[0]).pow(2).mean()
    def configure_optimizers(self): return torch.optim.SGD(self.parameters(), lr=1e-3)
data = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(torch.randn(400, 8)), batch_size=4)
L.Trainer(max_epochs=10**6, accelerator="cpu", logger=False, enable_checkpointing=False, enable_progress_bar=False).fit(M(), data)
"""),
    ("accelerate", """
import torch; from accelerate import Accelerator
acc = Accelerator(gradient_accumulation_steps=2, cpu=True)
model = torch.nn.Linear(8, 1); opt = torch.optim.SGD(model.parameters(), lr=1e-3)
data = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(torch.randn(400, 8)), batch_size=4)
model, opt, data = acc.prepare(model, opt, data)
while True:
    for (b,) in data:
        with acc.accumulate(model):
            acc.backward(model(b).pow(2).mean()); opt.step(); opt.zero_grad()
"""),
    ("transformers", """
import torch; from transformers import Trainer, TrainingArguments, GPT2Config, GPT2LMHeadModel
model = GPT2LMHeadModel(GPT2Config(n_layer=1, n_head=2, n_embd=16, vocab_size=32, n_positions=16))
data = [{"input_ids": list(range(16)), "labels": list(range(16))} for _ in range(64)]
Trainer(model, TrainingArguments("out", max_steps=10**6, report_to=[], save_strategy="no", use_cpu=True,
        per_device_train_batch_size=4, disable_tqdm=True, logging_strategy="no"), train_dataset=data).train()
"""),
])
def test_step_is_found_in_frameworks(package, source, script, start):
    if importlib.util.find_spec(package) is None:
        pytest.skip(f"{package} is not installed")
    trial = start(str(script(source)), timeout_s=180.0)
    hello = trial.wait_ready()
    # Lightning runs forward and backward in a closure of its optimizer step.
    expected = {"lightning": ["S0"], "accelerate": ["B", "B", "S0"], "transformers": ["B", "S0"]}
    assert hello["step"]["tokens"] == expected[package]
    facts = trial.ask("facts")
    assert facts["modules"], "no module to act on was found"
    assert trial.run_block(1, 5).step_ns


@pytest.mark.parametrize("pinned", [False, True])
@pytest.mark.parametrize("behind", [False, True])
def test_the_gate_says_how_far_the_loader_is_behind(script, start, behind, pinned):
    """Before the queue is empty, no step takes longer for it. The workers make one batch for each that is taken, or all that they are asked for."""
    source = f"""
    import multiprocessing, time, torch, torch.nn as nn
    from torch.utils.data import DataLoader, Dataset
    allowed, made = (multiprocessing.Value("l", most) for most in ({2 if behind else 4096}, 0))
    class Data(Dataset):
        def __len__(self): return 4096
        def __getitem__(self, i):
            while i >= allowed.value: time.sleep(0.001)
            with made: made.value += 1
            return torch.randn(8)
    model = nn.Linear(8, 1); opt = torch.optim.SGD(model.parameters(), lr=1e-3)
    loader = DataLoader(Data(), batch_size=1, num_workers=2, prefetch_factor=4, pin_memory={pinned})
    for n, b in enumerate(loader, 1):
        while loader.num_workers and not {behind} and made.value < n + 8: time.sleep(0.001)
        opt.zero_grad(); model(b).mean().backward(); opt.step()
        allowed.value += 1
    """
    trial = start(str(script(source)))
    trial.wait_ready()
    found = []
    for _ in range(4):
        trial.run_block(0, 4)
        found.append(trial.unmade_batches)
    assert (min(found) >= 4) if behind else (max(found) <= 2), found
    # Without workers, nothing is ever owed.
    plain = start(str(script(source.replace("num_workers=2, prefetch_factor=4", "num_workers=0"))))
    plain.wait_ready()
    plain.run_block(0, 4)
    assert plain.unmade_batches == 0


def test_optimizers_of_a_kind_are_one_entry_of_the_motif() -> None:
    """Pyro has one for each parameter."""
    optimizers = [type("Adam", (), {})() for _ in range(3)] + [type("SGD", (), {})()]
    step = motif.Step("S3", 2, ("B", "S0", "S1", "S2", "S3", "B", "S3"))
    session = types.SimpleNamespace(step=step, optimizers=types.SimpleNamespace(living=lambda: optimizers))
    seen = types.SimpleNamespace(session=session, calls=1, backwards_in_steps=0)
    assert inspection.Inspection.describe(seen) == "forward x1, backward x2, Adam.step x3, SGD.step x2"


#: How a script autocasts -> (source, what the facts say)
#: No hook may be set there. The model is made after this.
COMPILED = """class Of(nn.Sequential): pass
@functools.cache
def compiled(): return torch.compile(model, backend="aot_eager")
def fast(x): return compiled()(x)
"""

AUTOCASTS = {
    "around the call": ("class Of(nn.Sequential): pass", "with low(): output = model(x)", "bfloat16"),
    "within the forward": ("""
class Of(nn.Sequential):
    def forward(self, x):
        with low(): return super().forward(x)
""", "output = model(x)", "bfloat16"),
    "not at all": ("class Of(nn.Sequential): pass", "output = model(x)", None),
    "switched off inside": ("""
class Of(nn.Sequential):
    def forward(self, x):
        with low(enabled=False): return super().forward(x)
""", "output = model(x)", None),
    "in a small part": ("""
class Of(nn.Sequential):
    def forward(self, x):
        x = self[1](self[0](x))
        with low(): return self[2](x)
""", "output = model(x)", None),
    "in all but a small part": ("""
class Of(nn.Sequential):
    def __init__(self, *parts): super().__init__(nn.Embedding(1000, 8), nn.Linear(8, 1, bias=False), *parts)
    def forward(self, x):
        x = x * self[1](x) + self[0].weight[0] + self[0](torch.zeros(1, dtype=torch.long))
        with low(): return self[4](self[3](self[2](x)))
""", "output = model(x)", "bfloat16"),
    "around the call of what switches it off in part": ("""
class Of(nn.Sequential):
    def forward(self, x):
        with low(enabled=False): x = self[0](x)
        return self[2](self[1](x))
""", "with low(): output = model(x)", "bfloat16"),
    "in an evaluation": ("class Of(nn.Sequential): pass", """
    with low(), torch.no_grad(): model.eval()(x)
    output = model.train()(x)
""", None),
    "in float32": ("class Of(nn.Sequential): pass", """
    torch.set_autocast_enabled("cpu", True); torch.set_autocast_dtype("cpu", torch.float32); output = model(x); torch.set_autocast_enabled("cpu", False)
""", None),     # nanoGPT on a GPU with --dtype=float32; for a CPU torch.autocast does not take it
    "around what the script compiles": (COMPILED, "with low(): output = fast(x)", "bfloat16"),
    "within what the script compiles": ("""
class Of(nn.Sequential):
    def forward(self, x):
        with low(): return super().forward(x)
""" + COMPILED.partition("\n")[2], "output = fast(x)", "bfloat16"),
    "not around what the script compiles": (COMPILED, "output = fast(x)", None),
    "of weights that are in bfloat16 themselves, compiled": (COMPILED, "model.bfloat16(); output = fast(x.bfloat16())", None),
    "around what is not compiled, beside something that is": (
        COMPILED.replace("torch.compile(model", "torch.compile(lambda x: x + 1"), "with low(): output = model(fast(x))", "bfloat16"),
}


@pytest.mark.parametrize("name", AUTOCASTS)
def test_the_scripts_own_autocast_is_seen_wherever_it_enters_it(name, script, start):
    model, call, dtype = AUTOCASTS[name]
    trial = start(str(script(f"""
import functools, torch, torch.nn as nn
low = functools.partial(torch.autocast, "cpu", dtype=torch.bfloat16)
{model}
model, x = Of(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 1)), torch.randn(4, 8)
opt = torch.optim.SGD(model.parameters(), lr=1e-3)
while True:
    {call.strip()}
    opt.zero_grad(); output.float().mean().backward(); opt.step()
""")))
    trial.wait_ready()
    assert trial.ask("facts")["autocast"] == dtype


@pytest.mark.parametrize("inside", [True, False])
def test_a_forward_that_trains_is_told_from_one_that_differentiates(script, start, inside):
    """The former as in MAML; the latter takes a gradient of its output, as force fields do."""
    trains = "inner.backward(); opt.step(); return inner.detach()" if inside else "return sum(g.mean() for g in torch.autograd.grad(inner, (self.a.weight,), create_graph=True))"
    trial = start(str(script(f"""
import torch, torch.nn as nn
class Meta(nn.Module):
    def __init__(self):
        super().__init__()
        self.a = nn.Linear(8, 1)
    def forward(self, x):
        opt.zero_grad()
        inner = (self.a(x) ** 2).mean()
        {trains}
model, x = Meta(), torch.randn(4, 8)
opt = torch.optim.SGD(model.parameters(), lr=1e-3)
while True:
    loss = model(x)
    if {not inside}: loss.backward(); opt.step()
""")))
    trial.wait_ready()
    assert trial.ask("facts")["steps_in_forward"] is inside


@pytest.mark.skipif(importlib.util.find_spec("accelerate") is None, reason="needs accelerate")
def test_the_autocast_of_accelerate_is_seen(script, start):
    trial = start(str(script("""
import torch, torch.nn as nn
from accelerate import Accelerator
accelerator = Accelerator(cpu=True, mixed_precision="bf16")
model, x = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 1)), torch.randn(4, 8)
model, opt = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=1e-3))
while True:
    opt.zero_grad(); accelerator.backward(model(x).mean()); opt.step()
""")))
    trial.wait_ready()
    assert trial.ask("facts")["autocast"] == "bfloat16"


@pytest.mark.parametrize(("evaluations", "seconds", "found"), [(255, 1.0, False), (256, 1.0, True), (7, 21.0, False), (8, 21.0, True), (8, 19.0, False)])
def test_evaluations_are_steps_where_one_step_of_the_optimizer_takes_very_many_or_very_long(evaluations, seconds, found, monkeypatch):
    """Of a closure, as in `LBFGS(max_iter=50_000)`, which steps once."""
    from saturate.agent import session as sessions

    monkeypatch.setattr(sessions, "_CLOCK", lambda: int(1e9 * seconds))
    tokens = []
    session = types.SimpleNamespace(plan={}, step=None, _stepper=object, _evaluations=0, _stepping_since=0, _name=lambda optimizer: "S0", _token=tokens.append)
    for _ in range(evaluations):
        Session._evaluation(session)
    assert tokens == ["C"] * found and session.step == (motif.Step("C", 1, ("C",)) if found else None)


@pytest.mark.parametrize(("world", "steps", "seconds", "waits"), [(1, 10, 19.0, True), (1, 10, 21.0, False), (1, 201, 1.0, False),
                                                                   (2, 10, 300.0, True), (2, 51, 1.0, False)])
def test_ranks_count_how_long_they_wait_for_an_optimizer_that_never_steps(world, steps, seconds, waits, monkeypatch):
    """By their clocks, one came to the gate a step before the other, which waited for it in the next all-reduce."""
    from types import SimpleNamespace

    from saturate.agent import observe
    from saturate.agent import session as sessions

    monkeypatch.setattr(observe, "world_size", lambda: world)
    monkeypatch.setattr(sessions, "_CLOCK", lambda: int(1e9 * seconds))
    session = SimpleNamespace(plan={}, boundaries=steps, _woke=0, optimizers=SimpleNamespace(waiting=lambda: True))
    assert sessions.Session.unsettled(session) is waits
