"""Divergence of a run under a recipe: every loss is looked at, numbered by the true step, the last ones at exit."""

from __future__ import annotations

import os
import subprocess
import sys
import types
import weakref

import pytest
import torch

from saturate.agent import motif
from saturate.agent.watchdog import LEAST_HISTORY, MOST, Watchdog, divergence
from saturate.trial import launch


class Training:
    """A session as the watchdog sees it: `step` trains one step with these losses of its micro-steps."""

    def __init__(self, found_after: int = 3, micro_steps: int = 1, action: str = "warn"):
        self.session = types.SimpleNamespace(
            torch=torch, backwards=0, tokens=[], boundaries=0, parts=0, step=None, scaler=None, plan={}, asleep=False)
        self.watchdog = Watchdog(action)
        self.found_after, self.steps = found_after, 0
        self.tokens = ["B"] * micro_steps + ["S0"]

    def step(self, *losses: float) -> None:
        session = self.session
        self.steps += 1
        for loss in losses:
            session.backwards += 1
            self.watchdog.saw(session, torch.tensor(loss))
            session.tokens += ["B"] if session.step is None else []
        session.tokens += ["S0"] if session.step is None else []
        if self.steps == self.found_after:
            session.step = motif.Step("S0", 1, tuple(self.tokens))
        if session.step is not None:
            session.boundaries += 1
            self.watchdog.boundary(session)

    def train(self, steps: int, bad: int, value: float, lasts: bool = True) -> Training:
        for number in range(1, steps + 1):
            self.step(value if number == bad or (lasts and number > bad) else 1.0 + 0.01 * (number % 7))
        self.watchdog.finish(self.session)
        return self


@pytest.mark.parametrize("steps, bad", [(60, 41), (60, 33), (60, 52), (45, 40), (15, 3), (9, 3), (60, 60)])
def test_nan_is_found_wherever_it_begins(steps, bad, capsys):
    Training().train(steps, bad, float("nan"))
    assert f"the loss became nan at step {bad}\n" in capsys.readouterr().err


@pytest.mark.parametrize("bad", [16, 99, 105, 110, 119, 120])
@pytest.mark.parametrize("value, lasts", [(1e6, False), (1e6, True), (2.5, True)])
def test_spikes_of_one_step_and_jumps_that_last(bad, value, lasts, capsys):
    Training().train(140, bad, value, lasts)
    said = capsys.readouterr().err
    assert f"the loss jumped to {value:.4g} (usual: 1.0" in said and f" at step {bad}\n" in said


def test_an_outlier_is_no_divergence(capsys):
    """Batches differ: one loss somewhat above the others was always there, and now every one is looked at."""
    Training().train(140, 105, 2.5, lasts=False)
    assert capsys.readouterr().err == ""


def test_tasks_that_take_turns_have_losses_of_their_own_sizes(capsys):
    """A training of two tasks was ended at its eleventh step, for a loss that it had had in each fifth."""
    training = Training()
    for number in range(200):
        training.step(2400.0 + 40 * (number % 3) if number % 5 == 0 and number < 190 else 1.0 + 0.01 * (number % 7))
    assert capsys.readouterr().err == ""
    for number in range(20):
        training.step(1e6 if number == 4 else 1.0)
    training.watchdog.finish(training.session)
    assert "the loss jumped to 1e+06" in capsys.readouterr().err


#: Each fold begins where the one before has long left: at losses a hundred times as large.
FOLDS = """
import torch
torch.manual_seed(0)
x = torch.randn(64, 4); y = x @ torch.ones(4, 1)
for fold in range(4):
    model = torch.nn.Linear(4, 1); optimizer = torch.optim.SGD(model.parameters(), lr=0.02)
    for step in range(200):
        optimizer.zero_grad(); loss = (model(x) - y).pow(2).mean() + 0.01; loss = loss * 1e9 if fold == DIVERGES and step >= 100 else loss
        loss.backward(); optimizer.step()
print("done")
"""


#: Five steps of the critic look like steps until the generator's optimizer steps for the first time.
CRITIC = """
import torch
critic, maker = torch.nn.Linear(8, 1), torch.nn.Linear(4, 8)
d = torch.optim.SGD(critic.parameters(), lr=1e-4); g = torch.optim.SGD(maker.parameters(), lr=1e-4)
for step in range(1, 41):
    for _ in range(5):
        d.zero_grad(); critic(maker(torch.ones(2, 4)).detach()).mean().backward(); d.step()
    g.zero_grad(); loss = critic(maker(torch.ones(2, 4))).mean(); (loss * float("nan") if step >= 20 else loss).backward(); g.step()
"""


def test_parts_of_a_step_are_not_counted_as_steps(tmp_path):
    """It was at step 23."""
    (tmp_path / "train.py").write_text(CRITIC)
    environment = launch.injected(os.environ, launch.plan_text("run", [], on_divergence="stop"), [])
    done = subprocess.run([sys.executable, "train.py"], cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=120)
    assert done.returncode == 5 and "the loss became nan at step 20\n" in done.stderr, done.stderr


@pytest.mark.parametrize("diverges", [-1, 0, 1, 2])
def test_the_next_fold_is_no_divergence(diverges, tmp_path):
    """`--on-divergence stop` ended every cross-validation in its second fold."""
    (tmp_path / "train.py").write_text(FOLDS.replace("DIVERGES", str(diverges)))
    environment = launch.injected(os.environ, launch.plan_text("run", [], on_divergence="stop"), [])
    done = subprocess.run([sys.executable, "train.py"], cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=120)
    assert done.returncode == (0 if diverges < 0 else 5), done.stderr
    assert ("saturate: the loss " in done.stderr) is (diverges >= 0)


#: A gain that a script makes larger, as the critics of Wasserstein GANs do with what they say of real samples.
MAXIMISED = """
import torch
p = torch.nn.Parameter(torch.full((3,), 1e-3)); optimizer = torch.optim.SGD([p], lr=0.1)
for step in range(60):
    optimizer.zero_grad(); gain = p.square()
    gain = gain if WHOLE else gain.sum()
    gain.backward(torch.full_like(gain, SIGN)); optimizer.step()
print("done")
"""


@pytest.mark.parametrize("whole", [False, True])
def test_what_a_script_makes_larger_may_grow(whole, tmp_path):
    (tmp_path / "train.py").write_text(MAXIMISED.replace("WHOLE", str(whole)).replace("SIGN", "-1.0"))
    environment = launch.injected(os.environ, launch.plan_text("run", [], on_divergence="stop"), [])
    done = subprocess.run([sys.executable, "train.py"], cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stdout, done.stderr) == (0, "done\n", "")


#: A critic that is trained for a while before the generator, whose losses are larger, has its first step.
WARMED = """
import torch
torch.manual_seed(0)
critic, maker = torch.nn.Linear(8, 1), torch.nn.Linear(4, 8)
d = torch.optim.SGD(critic.parameters(), lr=1e-4); g = torch.optim.SGD(maker.parameters(), lr=1e-4)
for step in range(100):
    d.zero_grad(); critic(maker(torch.ones(2, 4)).detach()).mean().square().add(0.01).backward(); d.step()
    if step >= 40:
        g.zero_grad(); loss = critic(maker(torch.ones(2, 4))).mean().square().add(5)
        (loss + 1e4 if step >= DIVERGES else loss).backward(); g.step()
print("done")
"""


#: The same in other orders: some micro-steps, and all gradients before the first update.
WARMED_IN_PARTS = WARMED.replace("(loss + 1e4", "(loss / 2).backward(retain_graph=True); (loss / 2 + 1e4")
WARMED_TOGETHER = """
import torch
torch.manual_seed(0)
critic, maker = torch.nn.Linear(8, 1), torch.nn.Linear(4, 8)
d = torch.optim.SGD(critic.parameters(), lr=1e-4); g = torch.optim.SGD(maker.parameters(), lr=1e-4)
for step in range(100):
    d.zero_grad(); g.zero_grad()
    if step >= 40:
        critic(maker(torch.ones(2, 4))).mean().square().add(5).backward()
    critic(maker(torch.ones(2, 4)).detach()).mean().square().add(0.01).backward()
    d.step()
    if step >= 40:
        g.step()
print("done")
"""


@pytest.mark.parametrize("script", [WARMED_IN_PARTS, WARMED_TOGETHER])
def test_the_newcomers_losses_are_its_own_in_whichever_order(script, tmp_path):
    (tmp_path / "train.py").write_text(script.replace("DIVERGES", "1000"))
    environment = launch.injected(os.environ, launch.plan_text("run", [], on_divergence="stop"), [])
    done = subprocess.run([sys.executable, "train.py"], cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stdout, done.stderr) == (0, "done\n", "")


#: A part of the loss whose weight is zero for the first steps.
WEIGHED_LATER = """
import torch
p = torch.nn.Parameter(torch.ones(3)); optimizer = torch.optim.SGD([p], lr=0.0)
for step in range(60):
    optimizer.zero_grad(); loss = p.square().sum()
    loss.backward(torch.tensor(0.0 if step < 30 else 1.0)); optimizer.step()
print("done")
"""


def test_a_loss_without_weight_is_the_loss_that_it_is(tmp_path):
    """It counted as 0, and the first one with a weight was "a jump"."""
    (tmp_path / "train.py").write_text(WEIGHED_LATER)
    environment = launch.injected(os.environ, launch.plan_text("run", [], on_divergence="stop"), [])
    done = subprocess.run([sys.executable, "train.py"], cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stdout, done.stderr) == (0, "done\n", "")


@pytest.mark.parametrize("diverges", [90, 1000])
def test_a_part_of_a_step_that_turns_up_later_has_losses_of_its_own(diverges, tmp_path):
    """The generator's first loss was "a jump", from what had been usual for the critic."""
    (tmp_path / "train.py").write_text(WARMED.replace("DIVERGES", str(diverges)))
    environment = launch.injected(os.environ, launch.plan_text("run", [], on_divergence="stop"), [])
    done = subprocess.run([sys.executable, "train.py"], cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=120)
    if diverges > 100:
        assert (done.returncode, done.stdout, done.stderr) == (0, "done\n", "")
    else:
        assert done.returncode == 5 and "the loss jumped to 1.0" in done.stderr and " at step 51\n" in done.stderr, done.stderr


def test_nan_in_a_step_of_several_micro_steps(capsys):
    training = Training(micro_steps=3)
    for number in range(1, 40):
        training.step(1.0, float("nan") if number == 27 else 2.0, 3.0)
    training.watchdog.finish(training.session)
    assert "the loss became nan at step 27\n" in capsys.readouterr().err


def test_what_waits_stays_bounded_where_no_step_is_found(capsys):
    training = Training(found_after=10**9)
    for number in range(3 * MOST):
        training.step(float("inf") if number == 2 * MOST + 4 else 1.0)
        assert len(training.watchdog._fresh) <= MOST
    assert f"the loss became inf at backward pass {2 * MOST + 5}\n" in capsys.readouterr().err


@pytest.mark.parametrize("skipped", ["inf", "nan"])
def test_a_scaler_s_growth_and_skipped_steps_are_no_divergence(skipped, capsys):
    """Where outputs overflow, the loss may be nan as well as infinite."""
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    scaler.scale(torch.tensor(1.0))         # it makes its scale when it is used first
    training = Training()
    training.session.scaler = weakref.ref(scaler)
    for number in range(1, 81):
        if number == 40:
            scaler._scale *= 4096
        training.step(float(skipped) if number % 9 == 5 else float(scaler._scale) * (1 + 0.01 * (number % 7)))
    training.watchdog.finish(training.session)
    assert capsys.readouterr().err == ""
    for _ in range(20):
        training.step(float(skipped))
    assert f"the loss became {skipped} at step 8" in capsys.readouterr().err


def test_losses_of_any_kind_become_numbers(capsys):
    training = Training()
    for loss in (torch.ones(3, dtype=torch.float16), torch.ones(1, 1, dtype=torch.float64), torch.ones((), dtype=torch.complex64)):
        training.session.backwards += 1
        training.watchdog.saw(training.session, loss)
    base = torch.zeros(1_000_000)
    training.watchdog.saw(training.session, base[0])
    base.fill_(float("nan"))                # written over, as a replayed graph does
    assert {kept.untyped_storage().nbytes() <= 8 for _, kept in training.watchdog._fresh} == {True}
    training.watchdog.finish(training.session)
    assert training.watchdog.history and capsys.readouterr().err == ""


def test_few_losses_judge_nothing_but_nan():
    assert divergence([], [(step, 1e9 if step == 5 else 1.0) for step in range(1, LEAST_HISTORY + 1)]) is None
    assert divergence([], [(1, 1.0), (2, float("inf"))]) == (2, "the loss became inf")


@pytest.mark.parametrize("given", ["[loss, loss * 2]", "{'a': loss}.values()", "(one for one in (loss,))", "get_gradient_edge(loss), torch.ones(())"])
def test_whatever_torch_differentiates_is_differentiated_under_a_watch(given, tmp_path):
    (tmp_path / "train.py").write_text(SCRIPT.replace("(loss * float(\"nan\") if step >= int(sys.argv[2]) else loss).backward()",
                                                      f"torch.autograd.backward({given})")
                                       .replace("import sys, torch", "import sys, torch\nfrom torch.autograd.graph import get_gradient_edge"))
    environment = launch.injected(os.environ, launch.plan_text("run", [], on_divergence="stop"), [])
    done = subprocess.run([sys.executable, "train.py", "30", "0"], cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stdout, done.stderr) == (0, "done\n", "")


SCRIPT = """
import sys, torch
kept = open("kept.txt", "w"); kept.write("not flushed yet")
model = torch.nn.Linear(8, 1); optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
for step in range(1, int(sys.argv[1]) + 1):
    optimizer.zero_grad(); loss = model(torch.ones(4, 8)).pow(2).mean()
    (loss * float("nan") if step >= int(sys.argv[2]) else loss).backward(); optimizer.step()
print("done")
"""


#: Blocks that are computed again in the backward pass, which begins a pass of its own for each, from what they gave: a hundred in a step.
RECOMPUTED = """
import torch
from torch.utils.checkpoint import checkpoint
torch.manual_seed(0)
blocks = torch.nn.ModuleList(torch.nn.Linear(8, 8, bias=False) for _ in range(12)); head = torch.nn.Linear(8, 1)
for block in blocks: torch.nn.init.orthogonal_(block.weight)
optimizer = torch.optim.SGD([*blocks.parameters(), *head.parameters()], lr=1e-4)
for step in range(60):
    for micro in range(8):
        hidden = torch.full((4, 8), 1e6).requires_grad_()
        for block in blocks: hidden = checkpoint(block, hidden, use_reentrant=True)
        head(hidden / hidden.detach().abs().mean()).square().mean().backward()
    optimizer.step(); optimizer.zero_grad()
print("done")
"""


def test_what_is_computed_again_in_a_backward_pass_is_no_loss(tmp_path):
    """The sums of hidden values were taken for losses, and a healthy run ended."""
    (tmp_path / "train.py").write_text(RECOMPUTED)
    environment = launch.injected(os.environ, launch.plan_text("run", [], on_divergence="stop"), [])
    done = subprocess.run([sys.executable, "-W", "ignore", "train.py"], cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stdout) == (0, "done\n"), done.stderr


@pytest.mark.parametrize("frozen", [False, True])
@pytest.mark.parametrize("steps, bad, said", [(60, 41, ""), (9, 3, "done\n")])
def test_the_exit_code_of_a_run_that_is_to_stop(steps, bad, said, frozen, tmp_path):
    (tmp_path / "train.py").write_text(SCRIPT.replace("model = ", "import gc; gc.freeze(); model = ") if frozen else SCRIPT)
    environment = launch.injected(os.environ, launch.plan_text("run", [], on_divergence="stop"), [])
    done = subprocess.run([sys.executable, "train.py", str(steps), str(bad)], cwd=tmp_path, env=environment,
                          capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stdout) == (5, said), done.stderr
    assert f"the loss became nan at step {bad}\n" in done.stderr
    assert (tmp_path / "kept.txt").read_text() == "not flushed yet"


#: Goes on in a child, as Lightning's `ddp_fork` and notebook launchers do; the loader, or also the optimizer, may be made by the parent.
IN_A_CHILD = """
import multiprocessing, sys, torch
def train():
    kept = open("kept.txt", "w"); kept.write("not flushed yet")
    model = torch.nn.Linear(8, 1); optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    for step in range(1, 10):
        optimizer.zero_grad(); loss = model(torch.ones(4, 8)).pow(2).mean()
        (loss * float("nan") if step >= 3 else loss).backward(); optimizer.step()
    END
if __name__ == "__main__":
    BEFORE
    child = multiprocessing.get_context(sys.argv[1]).Process(target=train); child.start(); child.join()
    print("ended with", child.exitcode)
"""


@pytest.mark.parametrize("method", ["fork", "forkserver", "spawn"])
@pytest.mark.parametrize("before, end, code", [
    ("pass", "pass", 5), ("torch.utils.data.DataLoader([0])", "pass", 5), ("pass", "sys.exit(0)", 5), ("pass", "raise ValueError('its own')", 1)])
def test_the_end_of_a_child_is_heard_of(before, end, code, method, tmp_path):
    """A forked one calls nothing that was registered for the end: a NaN in its last steps was passed over, and it ended with 0."""
    (tmp_path / "train.py").write_text(IN_A_CHILD.replace("BEFORE", before).replace("END", end))
    environment = launch.injected(os.environ, launch.plan_text("run", [], on_divergence="stop"), [])
    done = subprocess.run([sys.executable, "train.py", method], cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=120)
    code = 5 if method == "spawn" else code         # as of a script that is not a child's
    assert (done.returncode, done.stdout) == (0, f"ended with {code}\n"), done.stderr
    assert done.stderr.count("the loss became nan at step 3\n") == 1 and ("ValueError: its own" in done.stderr) is ("its own" in end)
    assert (tmp_path / "kept.txt").read_text() == "not flushed yet"


@pytest.mark.parametrize("variables, said", [({"RANK": "16"}, ""), ({"RANK": "r"}, ""), ({"RANK": "1", "WORLD_SIZE": "4"}, " (rank 1)")])
def test_the_rank_of_what_diverges(variables, said, monkeypatch, capsys):
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    Training().train(60, 41, float("nan"))
    assert f"the loss became nan at step 41{said}\n" in capsys.readouterr().err


def test_a_failure_that_cannot_be_reported_is_the_users_as_little(monkeypatch):
    from saturate.agent import application
    from saturate.agent.session import Session

    def broken(session, text):
        raise RuntimeError(text)

    monkeypatch.setattr(application, "report_failure", broken)
    session = Session(torch, {"mode": "run", "techniques": []})
    assert session.guard(lambda: 1 / 0) is None and session.dead


@pytest.mark.parametrize("shape", [(), (3,)])
def test_what_only_float64_can_hold_is_no_divergence(shape, capsys):
    training = Training()
    for number in range(40):
        training.session.backwards += 1
        training.watchdog.saw(training.session, torch.full(shape, 1e50, dtype=torch.float64) if number % 2 else torch.tensor(1.0))
    training.watchdog.finish(training.session)
    assert "inf" not in capsys.readouterr().err
