"""`saturate drill` on trainings that resume rightly, and on ones with a single fault each."""

from __future__ import annotations

import errno
import importlib.util
import json
import os
import random
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
from drill_kit import SCRIPT, changed, drill
from tune_kit import Folder, no_traceback_of_ours

from saturate.cli.main import main
from saturate.records.drill import DrillResult
from saturate.study import drill as study_drill
from saturate.study import drill_process
from saturate.study.drill_kills import Kills
from saturate.study.drill_reference import Reference, fewest_files, updates_needed
from saturate.study.drill_remedies import UNFINISHED, remedy_of
from saturate.verify.resume_log import Log, Save, Step, Update

_RESTARTS = "def order(step): return Order(step // 8, 0)"
_FORGETS = """
class Forgets:
    def __init__(self, then=lambda: None): self.then = then
    def state_dict(self): return {}
    def load_state_dict(self, state): self.then()
"""
_NEW_RATE = "lambda: [group.update(lr=0.05) for group in optimizer.param_groups]"
_IN_PLACE = """
def save(step, path="checkpoint.pt"):
    import io
    buffer = io.BytesIO()
    torch.save({name: part.state_dict() for name, part in parts.items()} | {"step": step, "random": torch.get_rng_state()}, buffer)
    with open(path, "wb") as file:
        for k in range(0, buffer.tell(), 500):
            file.write(buffer.getvalue()[k:k + 500]); file.flush(); time.sleep(0.005)
"""
_BY_EPOCH = """
def order(step): return torch.randperm(64).reshape(8, 8).tolist()
atomic, torch.set_rng_state = save, lambda state: None
def save(step): step % 24 or atomic(step)
"""

#: name -> (changes to the script, outcome of the first kill, of the last one, words of a reason)
FAULTS = {
    "does not resume": ("load = lambda: 0", "starts_over", "starts_over", "opened no file"),
    "loader restarts": (_RESTARTS, "repeats_data", "repeats_data", "the loader began anew"),
    "loader with workers restarts": (_RESTARTS + "\nmake = DataLoader\nDataLoader = lambda *a, **k: make(*a, num_workers=1, **k)",
                                     "repeats_data", "repeats_data", "the loader began anew"),
    "skips a batch": ("def order(step): return Order((step + (begun > 0)) // 8, (step + (begun > 0)) % 8)",
                      "skips_data", "resumes_exactly", "data of 1 updates"),
    "momentum": (_FORGETS + "parts['optimizer'] = Forgets(); parts['scheduler'] = Forgets("
                 "lambda: [group.update(lr=0.05 * 0.95 ** torch.load('checkpoint.pt')['step']) for group in optimizer.param_groups])",
                 "state_not_restored", "state_not_restored", "state of the optimizer"),
    "scheduler": (_FORGETS + f"parts['scheduler'] = Forgets({_NEW_RATE})", "state_not_restored", "state_not_restored", "learning rate is 0.05"),
    "writes in place": (_IN_PLACE, "resumes_exactly", "cannot_load", "EOFError"),
    "second resume": ("right = save\ndef save(step): right(step - begun)", "resumes_exactly", "repeats_data", "came again"),
    "seeds itself by epoch": (_BY_EPOCH, "resumes_reordered", "resumes_reordered", "seeds itself anew"),
    "rounds the parameters": ("right = load\ndef load():\n    done = right()\n    model.half().float()\n    return done",
                              "state_not_restored", "state_not_restored", "it loads a file"),
    "ends at once": ("LAST, right = 60, load\ndef load(): return LAST if right() else 0", "ends_early", "ends_early", "without an update"),
    "ends too early": ("LAST, right = 60, load\ndef load():\n    global LAST\n    done = right()\n    LAST = 12 if done else LAST\n    return done",
                       "ends_early", "ends_early", "the uninterrupted run did not"),
}


def tree(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in sorted(folder.rglob("*"))
            if path.is_file() and ".saturate" not in path.parts}


@pytest.mark.parametrize("mode", ["", pytest.param("intercept", marks=pytest.mark.slow)])
def test_a_right_training_resumes_exactly_and_nothing_is_left(mode: str, tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("mine", encoding="utf-8")
    before = {**tree(tmp_path), "train.py": SCRIPT.encode()}
    found = drill(tmp_path, SCRIPT, "--kills", "1", environment={"SATURATE_ISOLATION": mode})
    assert found["verdict"] == "resumes_exactly", found
    assert [(one["moment"], one["outcome"]) for one in found["drills"]] == [("update", "resumes_exactly"), ("save", "resumes_exactly")]
    first, last = found["drills"]
    assert first["resumed_at_update"] == 6 < first["killed_at_update"] and first["lost_updates"] == first["killed_at_update"] - 6
    assert first["compared_updates"] >= 6 and 0.0 < first["recovery_s"] < 120.0
    assert last["interrupted_files"] == [str(tmp_path / "checkpoint.pt.new")] and last["killed_at_update"] == 12
    assert found["first_save_at_update"] == 6 and found["saves_seen"][0]["files"] == [str(tmp_path / "checkpoint.pt.new")]
    assert found["repeatable"] is True and found["step_s"] > 0.004 and found["schema"] == 1
    assert found["next_command"].startswith("saturate tune --") and found["command"] == found["resume_command"]
    assert Path(found["record"]).is_file() and Path(first["log"]).is_file()
    if mode:
        assert found["isolation"].startswith("intercept")
    assert tree(tmp_path) == before
    run = Path(found["record"]).parent
    assert not [path for name in ("layers", "shadow", "tmp") for path in run.rglob(name)], "what the processes wrote"


def test_ctrl_c_leaves_nothing(tmp_path: Path) -> None:
    here = Folder(tmp_path)
    here.write("train.py", SCRIPT)
    words = [sys.executable, "-m", "saturate", "drill", "--json", "--", sys.executable, "train.py"]
    with subprocess.Popen(words, cwd=tmp_path, env=here.environment(), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr is not None
        said = ""
        while "first process runs" not in said:
            line = process.stderr.readline()
            assert line, said
            said += line
        time.sleep(0.3)
        process.send_signal(signal.SIGINT)
        stdout, stderr = process.communicate(timeout=60)
    assert process.returncode == 130 and '"verdict":"inconclusive","reason":"interrupted"' in stdout
    assert no_traceback_of_ours(stderr), stderr
    assert not here.wait_until_nothing_lives()
    assert list(tree(tmp_path)) == ["train.py"] and not list((tmp_path / ".saturate").rglob("layers"))


@pytest.mark.slow
@pytest.mark.parametrize("name", FAULTS)
def test_a_single_fault_is_named(name: str, tmp_path: Path) -> None:
    changes, first, last, words = FAULTS[name]
    found = drill(tmp_path, changed(changes))
    outcomes = [one["outcome"] for one in found["drills"]]
    assert (outcomes[0], outcomes[-1]) == (first, last), found
    assert any(words in one["reason"] for one in found["drills"]), found["drills"]
    assert found["verdict"] in (first, last) and found["remedy"] and found["next_command"].startswith("saturate drill")
    if last == "cannot_load":
        assert "EOFError" in found["drills"][-1]["traceback"]


@pytest.mark.slow
def test_a_script_that_resumes_by_an_argument(tmp_path: Path) -> None:
    source = changed("right, load = load, lambda: right() if '--resume' in sys.argv else 0")
    found = drill(tmp_path, source, "--kills", "1")
    assert found["verdict"] == "starts_over" and "--resume-args" in found["remedy"] and "--resume-args" in found["next_command"]
    found = drill(tmp_path, source, "--kills", "1", "--resume-args=--resume")
    assert found["verdict"] == "resumes_exactly" and found["resume_command"][-1] == "--resume"
    found = drill(tmp_path, source, "--kills", "1", "--resume-args=--continue")
    assert found["verdict"] == "starts_over" and "when it is given --continue" in found["remedy"]


@pytest.mark.slow
def test_no_checkpoint_in_time(tmp_path: Path) -> None:
    found = drill(tmp_path, changed("save = lambda step: None"), "--steps", "30")
    assert found["verdict"] == "no_checkpoint" and "nothing was saved" in found["reason"]
    assert found["first_save_at_update"] is None and found["reference_updates"] >= 30
    at_the_end = changed("LAST, right = 30, save\nsave = lambda step: None") + "\nright(step)\n"
    found = drill(tmp_path, at_the_end)
    assert found["verdict"] == "no_checkpoint" and found["saves_seen"] == []


_HISTORY = """
import pickle
kept = save
def save(step):
    CHECKPOINTS and kept(step)
def update(batch, train=update):
    train(batch)
    with open("history.pkl", "wb") as file:
        pickle.dump([0.0], file)
"""


@pytest.mark.slow
@pytest.mark.parametrize(("checkpoints", "verdict"), [(True, "resumes_exactly"), (False, "no_checkpoint")])
def test_a_history_that_is_written_at_each_update_is_no_checkpoint(checkpoints: bool, verdict: str, tmp_path: Path) -> None:
    found = drill(tmp_path, changed(_HISTORY.replace("CHECKPOINTS", str(checkpoints))), "--kills", "1", "--budget", "100s")
    assert found["verdict"] == verdict, found["drills"]
    if checkpoints:
        assert found["first_save_at_update"] == 6
    else:
        assert "history.pkl" in found["reason"] and found["saves_seen"] == [] and "--resume-args" not in found["next_command"]


def test_a_remedy_speaks_of_a_loader_only_where_there_is_one() -> None:
    for verdict in ("skips_data", "repeats_data"):
        assert "StatefulDataLoader" in remedy_of(verdict, "", False, True, [])
        assert "oader" not in remedy_of(verdict, "", False, False, [])
    assert remedy_of("starts_over", "", True, False, []) == UNFINISHED
    assert remedy_of("starts_over", "", False, False, ["--go"]).endswith("given --go")


@pytest.mark.parametrize(("places", "needed"), [([], None), ([5, 10], None), ([5, 10, 15], 23), ([1, 2, 3], 11), ([90, 180, 270], 310)])
def test_how_long_the_uninterrupted_run_is(places: list[int], needed: int | None) -> None:
    assert updates_needed(places, kills=2) == needed


def test_a_kill_that_the_budget_cut_short_hides_none_of_the_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It had said that nothing can be told."""
    whole = drill_process.Chain.run

    def run(chain: drill_process.Chain, *arguments: Any) -> drill_process.Ran:
        if chain.folder.name == "chain" and chain.started == 2:         # the last resume: nothing comes before the budget ends
            return drill_process.Ran([], None, chain.folder / "none.log", late=True)
        return whole(chain, *arguments)

    monkeypatch.setattr(drill_process.Chain, "run", run)
    (tmp_path / "train.py").write_text(changed(""))
    request = study_drill.Request(
        argv=[sys.executable, "train.py"], cwd=tmp_path, environment=Folder(tmp_path).environment(), directory=tmp_path / ".saturate",
        kills=1, budget_s=300)
    found = study_drill.drill(request, lambda line: None)
    assert [one.outcome for one in found.drills] == ["resumes_exactly", "inconclusive"]
    assert found.verdict == "resumes_exactly" and "the budget ended before it could be told of kill 2, in a save" in found.reason
    assert "--budget 10m" in found.next_command and found.next_command.startswith("saturate drill")


def test_it_is_told_that_no_save_was_seen(tmp_path: Path) -> None:
    """Of a script that saves in a process of its own: it had resumed exactly after the one kill that there was, and nothing said so."""
    found = drill(tmp_path, changed("right, save = save, lambda step: os.wait() if os.fork() else (right(step), os._exit(0))"), "--steps", "20")
    assert found["verdict"] == "resumes_exactly" and len(found["drills"]) == 1 and "no save was seen" in found["notes"][-1]


def test_a_budget_without_an_update_is_told_with_the_share_that_it_had(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of 40 s it had waited 12, and `next` was the same command again."""
    monkeypatch.setattr(drill_process.Chain, "run", lambda chain, *arguments: drill_process.Ran([], None, chain.folder / "none.log", late=True))
    request = study_drill.Request(
        argv=[sys.executable, "-c", ""], cwd=tmp_path, environment=Folder(tmp_path).environment(), directory=tmp_path / ".saturate", budget_s=40)
    found = study_drill.drill(request, lambda line: None)
    assert found.verdict == "inconclusive" and "no update was seen in 12 s, the 30% of the budget" in found.reason
    assert "--budget 2m" in found.next_command


def test_where_no_checkpoint_came_in_time_the_next_drill_has_more_of_it(tmp_path: Path) -> None:
    """The remedy was to drill longer, and `next` was the same command again."""
    request = study_drill.Request(
        argv=[sys.executable, "-c", ""], cwd=tmp_path, environment={}, directory=tmp_path / ".saturate", budget_s=100)
    work = study_drill.Work(request, tmp_path, lambda line: None)
    for cut_short in (True, False):         # otherwise it had ended by itself
        reference = Reference([Update((0.0,))] * 3, [], Step("S0"), 1.0, cut_short=cut_short)
        found = work._result(reference, "no_checkpoint", "nothing was saved within 2 updates")
        assert ("--budget 4m" in found.next_command) == cut_short


def test_words_that_are_not_utf8_are_saved(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    argv = ["python", os.fsdecode(b"tr\xff.py")]
    found = DrillResult(run="x", command=argv, resume_command=argv, verdict="inconclusive", reason="for a test")
    monkeypatch.setattr(study_drill.Work, "done", lambda self: found)
    study_drill.drill(study_drill.Request(argv, tmp_path, {}, tmp_path / ".saturate"), print)
    (saved,) = (tmp_path / ".saturate").glob("*/drill.json")
    assert json.loads(saved.read_text(encoding="utf-8"))["command"] == ["python", "tr?.py"]


@pytest.mark.slow
def test_what_two_runs_do_not_share_is_compared_by_its_structure(tmp_path: Path) -> None:
    """Seeded by the clock: no two runs are the same, but samples that come again are seen."""
    source = changed("torch.manual_seed(time.time_ns() % 2**31)\ntorch.set_rng_state = lambda state: None\n"
                     "def order(step): return torch.randperm(64).reshape(8, 8).tolist()")
    found = drill(tmp_path, source)
    assert found["repeatable"] is False and found["verdict"] == "repeats_data" and "other data" in found["notes"][0]


_RANKS = """
import os, time, torch, torch.distributed as dist
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset
dist.init_process_group("gloo")
torch.manual_seed(0)
x = torch.randn(128, 8)
data = TensorDataset(x, x.sum(1, keepdim=True))
inner = torch.nn.Linear(8, 1)
model = torch.nn.parallel.DistributedDataParallel(inner)
optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
step = 0
if os.path.exists("c.pt"):
    state = torch.load("c.pt")
    inner.load_state_dict(state["model"]); optimizer.load_state_dict(state["optimizer"]); step = state["step"]
begun = step
while True:
    sampler = DistributedSampler(data)
    sampler.set_epoch(step // 8)
    for number, (inputs, targets) in enumerate(DataLoader(data, batch_size=8, sampler=sampler)):
        if SKIPS and number < begun % 8 and step // 8 == begun // 8:
            continue
        optimizer.zero_grad(); ((model(inputs) - targets) ** 2).mean().backward(); optimizer.step()
        step += 1
        time.sleep(0.01)
        if step % 6 == 0:
            if dist.get_rank() == 0:
                torch.save({"model": inner.state_dict(), "optimizer": optimizer.state_dict(), "step": step}, "c.new")
                os.replace("c.new", "c.pt")
            dist.barrier()
"""


@pytest.mark.slow
@pytest.mark.parametrize(("skips", "verdict"), [(True, "resumes_exactly"), (False, "repeats_data")])
def test_two_ranks(skips: bool, verdict: str, tmp_path: Path) -> None:
    command = (sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2", "train.py")
    found = drill(tmp_path, _RANKS.replace("SKIPS", str(skips)), "--kills", "1", command=command)
    assert found["verdict"] == verdict, found["drills"]
    assert [one["resumed_at_update"] for one in found["drills"]] == [6, 6]


def test_a_file_that_no_rank_would_come_to_is_not_drawn() -> None:
    """Of a checkpoint of two parts the second was drawn, where each rank writes one: no rank stood still, and the drill said that
    none had saved."""
    token = {"at": "S0", "losses": []}
    saved = [{"at": "save", "path": name} for name in "abc"]

    def fewest(*ranks: list[dict[str, object]], kind: str = "save") -> int:
        return fewest_files([Log(events=list(events)) for events in ranks], kind)

    assert fewest([token, *saved[:1], token], [token, *saved[1:2], token]) == 1
    assert fewest([token, *saved, token, *saved[:2], token], [token, token]) == 2       # the other rank saves nothing
    assert fewest([token, *saved, token, *saved[:1]]) == 3                              # killed while it saved again
    assert fewest([token, *saved[:2]]) == 2
    assert fewest([token, *saved[:1], token], kind="wrote") == fewest() == 1

    class Held(Exception):
        """With where the process was to stand still."""

    def run(argv: list[str], seed: int, hold: dict[str, int], *rest: object) -> None:
        raise Held(hold)

    updates = [Update((0.0,))] * 20
    reference = Reference(updates, [Save(6, ("a.pt", "b.pt")), Save(12, ("a.pt", "b.pt"))], Step("S0"), 0.01, files=1)
    for seed in range(8):
        work = SimpleNamespace(request=SimpleNamespace(argv=["train"], resume_args=[]), random=random.Random(seed), say=lambda line: None, deadline=0.0)
        with pytest.raises(Held) as held:
            Kills(work, SimpleNamespace(run=run), reference)._again(1, saving=True, final=False)      # type: ignore[arg-type]
        assert held.value.args[0] == {"save": 1, "file": 0}


@pytest.mark.slow
def test_ranks_that_save_a_part_each_are_killed_while_they_save(tmp_path: Path) -> None:
    parts = _RANKS.replace("if dist.get_rank() == 0:", "if True:").replace('"c.new"', 'f"c.new{dist.get_rank()}"').replace(
        '"c.pt"', 'f"c{dist.get_rank()}.pt"').replace("SKIPS", "True")
    command = (sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2", "train.py")
    found = drill(tmp_path, parts, "--kills", "1", command=command)
    assert found["verdict"] == "resumes_exactly", found["drills"]
    assert [one["moment"] for one in found["drills"]] == ["update", "save"] and not found["notes"]


_BY_HAND = """
import os, time, torch
torch.manual_seed(0)
x = torch.randn(512, 8)
net = torch.nn.Linear(8, 1)
step = 0
if os.path.exists("m.pt"):
    state = torch.load("m.pt")
    net.load_state_dict(state["model"]); step = state["step"]
    RESTORES and torch.set_rng_state(state["random"])
while True:
    chosen = torch.randint(0, 512, (16,))
    net.zero_grad(); ((net(x[chosen]) - x[chosen].sum(1, keepdim=True)) ** 2).mean().backward()
    for p in net.parameters():
        p.data.add_(p.grad, alpha=-0.05)
    step += 1
    time.sleep(0.01)
    if step % 7 == 0:
        torch.save({"model": net.state_dict(), "step": step, "random": torch.get_rng_state()}, "m.new"); os.replace("m.new", "m.pt")
"""


@pytest.mark.slow
@pytest.mark.parametrize(("restores", "verdict"), [(True, "resumes_exactly"), (False, "repeats_data")])
def test_without_a_loader_and_without_an_optimizer(restores: bool, verdict: str, tmp_path: Path) -> None:
    """Data are seen where the model is given them. Seeded anew, it draws the batches of the first updates again."""
    found = drill(tmp_path, _BY_HAND.replace("RESTORES", str(restores)), "--kills", "1")
    assert found["verdict"] == verdict, found["drills"]
    assert restores or "the number of the next step" in found["remedy"]


_LBFGS = """
import os, time, torch
torch.manual_seed(0)
x = torch.randn(64, 8)
net = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.Tanh(), torch.nn.Linear(16, 1))
optimizer = torch.optim.LBFGS(net.parameters(), lr=0.3, max_iter=3)
if os.path.exists("m.pt"):
    state = torch.load("m.pt")
    net.load_state_dict(state["model"])
    RESTORES and optimizer.load_state_dict(state["optimizer"])
def closure():
    optimizer.zero_grad()
    loss = ((net(x) - torch.sin(x.sum(1, keepdim=True))) ** 2).mean()
    loss.backward()
    return loss
for step in range(1, 10**9):
    optimizer.step(closure)
    time.sleep(0.01)
    if step % 7 == 0:
        torch.save({"model": net.state_dict(), "optimizer": optimizer.state_dict()}, "m.new"); os.replace("m.new", "m.pt")
"""


@pytest.mark.slow
@pytest.mark.parametrize(("restores", "verdict"), [(True, "resumes_exactly"), (False, "state_not_restored")])
def test_a_closure_on_the_same_data_in_each_update(restores: bool, verdict: str, tmp_path: Path) -> None:
    found = drill(tmp_path, _LBFGS.replace("RESTORES", str(restores)), "--kills", "1")
    assert found["verdict"] == verdict, found["drills"]


@pytest.mark.slow
@pytest.mark.parametrize("how", ["compiled = torch.compile(model, backend='aot_eager')\nmodel = compiled", "model.compile(backend='aot_eager')"])
def test_a_compiled_model(how: str, tmp_path: Path) -> None:
    found = drill(tmp_path, changed(how), "--kills", "1")
    assert found["verdict"] == "resumes_exactly", found["drills"]


_TRAINER = """
import os, sys, torch
from torch.utils.data import TensorDataset
from transformers import Trainer, TrainingArguments, GPT2Config, GPT2LMHeadModel, set_seed
from transformers.trainer_utils import get_last_checkpoint
set_seed(0)
model = GPT2LMHeadModel(GPT2Config(vocab_size=64, n_positions=16, n_embd=16, n_layer=1, n_head=2))
tokens = torch.randint(0, 64, (96, 16), generator=torch.Generator().manual_seed(0))
data = [{"input_ids": row, "labels": row} for row in tokens]
arguments = TrainingArguments("out", max_steps=400, per_device_train_batch_size=4, save_steps=6, save_total_limit=3, report_to=[],
                              logging_steps=1000, use_cpu=True, disable_tqdm=True, EXTRA)
last = get_last_checkpoint("out") if os.path.isdir("out") else None
Trainer(model, arguments, train_dataset=data).train(resume_from_checkpoint=last)
"""


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("transformers") is None or importlib.util.find_spec("accelerate") is None,
                    reason="transformers and accelerate are not installed")
@pytest.mark.parametrize(("extra", "first"), [("ignore_data_skip=False", "resumes_exactly"), ("ignore_data_skip=True", "repeats_data")])
def test_a_trainer_of_transformers(extra: str, first: str, tmp_path: Path) -> None:
    found = drill(tmp_path, _TRAINER.replace("EXTRA", extra), "--kills", "1")
    assert found["drills"][0]["outcome"] == first, found["drills"]
    assert {Path(file).name for file in found["saves_seen"][0]["files"]} >= {"model.safetensors", "optimizer.pt"}


# -- bad input ---------------------------------------------------------------------------------------------------------


def test_the_saved_record_has_no_values_of_arguments() -> None:
    added = ["--resume", "the file", "--key=k3y"]
    result = DrillResult(run="r", command=["python", "train.py", "--token", "t0k3n"], verdict="starts_over", reason="",
                         resume_command=["python", "train.py", "--token", "t0k3n", *added], remedy=f"when it is given {shlex.join(added)}",
                         next_command=shlex.join(["saturate", "drill", f"--resume-args={shlex.join(added)}", "--kills", "3", "--", "python", "train.py"]))
    saved = study_drill.as_saved(result, added)
    assert saved.resume_command == ["python", "train.py", "--token", "\u2026", "--resume", "\u2026", "--key=\u2026"]
    assert saved.next_command == 'saturate drill --resume-args="--resume \u2026 --key=\u2026" --kills 3 -- python train.py --token \u2026'
    assert saved.remedy == "when it is given --resume \u2026 --key=\u2026"


def test_usage(capsys: pytest.CaptureFixture[str]) -> None:
    for words, said in ((["--kills", "0", "--", "x"], "not a number of kills"), (["--steps", "1", "--", "x"], "not a number of updates"),
                        (["--resume-args", "'", "--", "x"], "cannot be split"), (["--", "no-such-command"], "no command"),
                        ([], "needs the command")):
        assert main(["drill", *words]) == 2
        assert said in capsys.readouterr().err


@pytest.mark.slow
def test_a_command_that_fails_by_itself(tmp_path: Path) -> None:
    found = drill(tmp_path, "raise SystemExit('no data here')", code=4)
    assert found["verdict"] == "inconclusive" and "no data here" in found["stderr"]
    found = drill(tmp_path, "print('nothing to train')")
    assert found["verdict"] == "inconclusive" and "does not train" in found["reason"]


@pytest.mark.slow
def test_a_study_that_is_in_use_and_a_folder_that_cannot_be_written(tmp_path: Path) -> None:
    from saturate.study.store import StudyLock

    lock = StudyLock(tmp_path / ".saturate")
    try:
        found = drill(tmp_path, SCRIPT, code=3)
    finally:
        lock.release()
    assert "another saturate" in found["reason"]
    assert "cannot write" in drill(tmp_path, SCRIPT, "--dir", "/proc/nowhere", code=3)["reason"]


@pytest.mark.slow
def test_a_kill_of_saturate_itself_leaves_nothing(tmp_path: Path) -> None:
    here = Folder(tmp_path)
    here.write("train.py", SCRIPT)
    words = [sys.executable, "-m", "saturate", "drill", "--", sys.executable, "train.py"]
    with subprocess.Popen(words, cwd=tmp_path, env=here.environment(), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as process:
        deadline = time.monotonic() + 60
        while not list(tmp_path.glob(".saturate/*/reference/p1/events/*.jsonl")) and time.monotonic() < deadline:
            time.sleep(0.05)
        os.kill(process.pid, signal.SIGKILL)
    assert not here.wait_until_nothing_lives()
    assert drill(tmp_path, SCRIPT, "--kills", "1")["verdict"] == "resumes_exactly", "and the next one works"


def test_a_drill_whose_record_cannot_be_written_is_told_all_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ten minutes of it were lost for want of some kilobytes."""
    found = DrillResult(run="x", command=["python"], resume_command=["python"], verdict="inconclusive", reason="for a test", record="drill.json")
    monkeypatch.setattr(study_drill.Work, "done", lambda self: found)
    monkeypatch.setattr(os, "fsync", _full)
    said: list[str] = []
    result = study_drill.drill(study_drill.Request(["python"], tmp_path, {}, tmp_path / ".saturate"), said.append)
    assert result == msgspec.structs.replace(found, record="") and "No space left" in said[-1]
    assert not list(tmp_path.rglob("drill.json")), "nor is half of it left"


def _full(descriptor: int) -> None:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
