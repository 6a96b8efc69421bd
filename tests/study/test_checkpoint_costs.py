"""`saturate checkpoint advise -- COMMAND` on trainings that save, resume, do neither, or fail."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from drill_kit import changed
from tune_kit import Folder, untouched

from saturate.cli import _advice
from saturate.records.checkpoint import SaveCosts, SaveWay
from saturate.records.facts import Facts
from saturate.study import save_costs
from saturate.study.save_costs import Recovery, Watched, record_of
from saturate.study.state import Request
from saturate.trial.outcome import Outcome
from saturate.verify.resume_log import Save, Step

#: Checkpoints of 4 MB, since smaller ones say nothing of the ways to save.
LARGE = "parts['ballast'] = nn.Linear(1000, 1000)"


def advise(folder: Path, source: str, *options: str, code: int = 0) -> dict[str, Any]:
    here = Folder(folder)
    here.write("train.py", source)
    words = [sys.executable, "-m", "saturate", "checkpoint", "advise", "--json", *options, "--", sys.executable, "train.py"]
    with untouched(folder):
        done = subprocess.run(words, cwd=folder, env=here.environment(), capture_output=True, text=True, timeout=240, check=False,
                              stdin=subprocess.DEVNULL)
    assert done.returncode == code, done.stderr[-4000:]
    assert not here.wait_until_nothing_lives()
    return {"stderr": done.stderr, **(json.loads(done.stdout) if done.stdout else {})}


@pytest.mark.slow
def test_what_a_checkpoint_costs_and_how_soon_it_recovers(tmp_path: Path) -> None:
    said = advise(tmp_path, changed(LARGE), "--mtbf", "1d", "--budget", "150s")
    costs = said["costs"]
    assert costs["checkpoint_bytes"] == pytest.approx(4e6, rel=0.05) and costs["checkpoint_files"] == 1
    assert [way["way"] for way in costs["ways"]] == ["sync", "thread", "process"]
    assert all(way["measured"] >= 2 and way["lost_s"] >= 0 for way in costs["ways"])
    assert costs["before_s"] > 0 and costs["after_s"] == min(way["lost_s"] for way in costs["ways"])
    assert 0.004 < costs["step_s"] < 0.5
    assert costs["resumed"] is True and 0 < costs["recovery_s"] < 60 and costs["unknown"] == {}
    interval = said["interval"]
    assert interval["save_cost_s"] == costs["before_s"] and interval["restart_cost_s"] == costs["recovery_s"]
    later = said["interval_async"]
    assert (later is not None) == (costs["after_s"] < costs["before_s"])
    assert later is None or later["lost_share"] < interval["lost_share"]


@pytest.mark.slow
def test_one_that_begins_anew_is_told(tmp_path: Path) -> None:
    costs = advise(tmp_path, changed(LARGE + "\nload = lambda: 0"), "--budget", "90s")["costs"]
    assert costs["resumed"] is False and costs["recovery_s"] > 0


@pytest.mark.slow
@pytest.mark.parametrize(("module", "save", "name"), [
    ("safetensors.torch", "safetensors.torch.save_file(state, 'model.safetensors')", "safetensors"),
    ("torch.distributed.checkpoint", "torch.distributed.checkpoint.save(state, checkpoint_id='shards')", "torch.distributed.checkpoint")])
def test_what_other_functions_save_is_not_taken_for_torch_save(tmp_path: Path, module: str, save: str, name: str) -> None:
    """Files of the same size, so that nothing but who writes them tells them apart."""
    pytest.importorskip(module)
    also = f"import {module}\nright = save\ndef save(step):\n    state = parts['ballast'].state_dict()\n    {save}\n    right(step)"
    costs = advise(tmp_path, changed(f"{LARGE}\n{also}"), "--budget", "90s")["costs"]
    assert costs["before_s"] is None and f"saved by {name} as well" in costs["unknown"]["before_s"]


def test_one_that_saves_nothing_is_refused(tmp_path: Path) -> None:
    said = advise(tmp_path, changed("save = lambda step: None"), "--budget", "8s", code=2)
    assert "no checkpoint was saved in" in said["stderr"] and "--save-cost" in said["stderr"]


def test_one_that_saves_into_files_that_it_opened_is_told_so(tmp_path: Path) -> None:
    into = ("def save(step):\n    with open('checkpoint.pt', 'wb') as file: torch.save({'step': step}, file)\n"
            "load = lambda: 0")
    said = advise(tmp_path, changed(into), "--budget", "40s", code=2)        # imports alone take a quarter of it where a machine is busy
    assert "the script opened itself" in said["stderr"]


def test_one_that_fails_is_told_with_its_last_words(tmp_path: Path) -> None:
    said = advise(tmp_path, changed("raise RuntimeError('no data')"), code=4)
    assert "no data" in said["stderr"] and "fails by itself" in said["stderr"]


def costs(**other: Any) -> SaveCosts:
    ways = [SaveWay(way="sync", lost_s=0.9, measured=2), SaveWay(way="thread", lost_s=None, measured=0),
            SaveWay(way="process", lost_s=0.1, measured=3)]
    given = {"command": ["python", "train.py"], "checkpoint_bytes": 412_000_000, "checkpoint_files": 1.0, "before_s": 0.8, "after_s": 0.1,
             "best_way": "process", "ways": ways, "step_s": 0.05, "recovery_s": 12.0, "resume_command": ["python", "train.py"],
             "resumed": True, "run": "a"}
    return SaveCosts(**{**given, **other})


def test_the_words() -> None:
    text = _advice._costs_text(costs())
    assert "costs 800 ms of training as the script saves, 100 ms as async-checkpoint by a process" in text
    assert "412 MB in 1 file;" in text and "trains again within 12 s; it read what was saved" in text and 'id = "async-checkpoint"' in text
    assert 'id = "async-checkpoint"' not in _advice._costs_text(costs(before_s=0.05))
    unknown = _advice._costs_text(costs(recovery_s=None, resumed=None, before_s=None, after_s=None, best_way=None, checkpoint_bytes=None,
                                        checkpoint_files=None, unknown={"recovery_s": "why", "before_s": "because", "after_s": "too small"}))
    assert all(word in unknown for word in ("not known: why", "because", "not known: too small"))
    assert "from the beginning" in _advice._costs_text(costs(resumed=False))


class Given:
    save_cost = restart_cost = step_time = None
    mtbf, nodes = 86400.0, 1


def test_the_interval_uses_what_was_measured_where_it_means_what_it_says() -> None:
    assert _advice._save_cost(Given(), costs()) == (0.8, "measured, as the script saves")  # type: ignore[arg-type]
    assert _advice._save_cost(Given(), costs(before_s=None))[0] == 0.1  # type: ignore[arg-type]
    unknown = costs(before_s=None, after_s=None, best_way=None, unknown={"after_s": "too small"})
    assert _advice._save_cost(Given(), unknown) == (None, "too small")  # type: ignore[arg-type]
    assert _advice._interval(Given(), 0.8, "", costs()).restart_cost_s == 12.0  # type: ignore[arg-type]
    assert _advice._interval(Given(), 0.8, "", costs(resumed=False)).restart_cost_s is None  # type: ignore[arg-type]


SUMMARY = {"checkpoints": 4, "files": 8, "bytes": 8 << 20, "ways": {
    "sync": {"measured": 2, "lost_s": 0.5}, "thread": {"measured": 2, "lost_s": 0.1}, "process": {"measured": 0, "lost_s": None}}}
SEEN = Facts(saves=4, save_bytes=4 << 20, save_s=1.0)
RECOVERED = Recovery(3.0, ["--resume"], True)


def record(facts: Facts = SEEN, summary: dict[str, Any] = SUMMARY, recovery: Recovery = RECOVERED, ended: Outcome | None = None) -> SaveCosts:
    return record_of(["python", "train.py"], facts, Watched({}, [0.1, 0.2, 0.3]), Watched({}, [], ended), summary, recovery, "a")


def test_costs_are_those_of_a_whole_checkpoint() -> None:
    found = record()
    assert (found.checkpoint_bytes, found.checkpoint_files, found.step_s) == (2 << 20, 2.0, 0.2)
    assert found.before_s == pytest.approx(0.5), "two files of 1 MiB, each a quarter of a second"
    assert (found.after_s, found.best_way, found.unknown) == (0.1, "thread", {}) and found.resume_command[-1] == "--resume"


NOTHING = {"checkpoints": 0, "files": 0, "bytes": 0, "ways": {}}


@pytest.mark.parametrize(("given", "field", "why"), [
    ({"facts": Facts(saves=4, save_bytes=4 << 20, save_s=1.0, saves_into_memory=4)}, "before_s", "into memory"),
    ({"facts": Facts(saves_into_files=3)}, "before_s", "opened itself"),
    ({"facts": Facts(saves=4, save_bytes=400, save_s=1.0)}, "before_s", "other ways"),
    ({"recovery": Recovery(3.0, [], True, others="safetensors")}, "before_s", "saved by safetensors as well"),
    ({"summary": NOTHING, "facts": Facts()}, "checkpoint_bytes", "no file"),
    ({"summary": NOTHING}, "after_s", "1 MiB"),
    ({"summary": NOTHING, "ended": Outcome("crashed", "it broke")}, "after_s", "it broke"),
    ({"summary": NOTHING, "ended": Outcome("too_short", "over")}, "after_s", "before the script ended"),
    ({"recovery": Recovery(None, [], None, "no time")}, "recovery_s", "no time"),
])
def test_what_is_not_known_has_a_reason(given: dict[str, Any], field: str, why: str) -> None:
    found = record(**given)
    assert getattr(found, field) is None and why in found.unknown[field]
    assert {name for name in found.__struct_fields__ if getattr(found, name) is None} == set(found.unknown)


def test_who_else_saved_is_seen_by_the_names_of_files() -> None:
    assert save_costs._others({"/a/checkpoint.pt", "/a/events.out"}) == ""
    assert save_costs._others({"/a/model.safetensors", "/a/b/__0_0.distcp"}) == "safetensors and torch.distributed.checkpoint"


def test_where_async_checkpoint_fails_what_the_script_does_by_itself_is_told() -> None:
    assert save_costs.costs_of({}) == save_costs.costs_of({"notes": {}}) == NOTHING
    found = record(summary=save_costs.costs_of({}), ended=Outcome("not_applied", "no posix"))
    assert (found.before_s, found.checkpoint_bytes, found.checkpoint_files) == (0.25, 1 << 20, 1.0)
    assert _advice._save_cost(Given(), found)[0] == 0.25 and "no posix" in _advice._costs_text(found)  # type: ignore[arg-type]


def test_the_restart_takes_the_newest_file_that_is_whole(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text("parser.add_argument('--resume')", encoding="utf-8")
    work = object.__new__(save_costs._Work)
    work.request = Request(["python", "train.py"], tmp_path, {}, tmp_path)
    saves = [Save(2, (f"{tmp_path}/ckpt_2.pt",)), Save(4, (f"{tmp_path}/ckpt_4.pt",)), Save(5, (f"{tmp_path}/ckpt_5.pt",))]
    killed = SimpleNamespace(step=Step("S0"), updates=lambda step: [None] * 5, saves=lambda step: saves)
    assert work._words(killed) == ["--resume", "ckpt_4.pt"]  # type: ignore[arg-type]
    several = {"out/checkpoint-4": ["--resume", "out/checkpoint-4"], "out/last": []}      # which of the files of `last` is meant?
    for folder, words in several.items():
        saves[:] = [Save(4, (f"{tmp_path}/{folder}/model.safetensors", f"{tmp_path}/{folder}/optimizer.pt")), Save(5, (f"{tmp_path}/x.pt",))]
        assert work._words(killed) == words  # type: ignore[arg-type]


def test_a_training_that_ends_before_it_saves_is_told_so(tmp_path: Path) -> None:
    said = advise(tmp_path, changed("LAST = 40\nright = save\ndef save(step): step < 40 or right(step)"), "--budget", "30s", code=2)
    assert "it ended by itself, and what it saves at its end is not seen" in said["stderr"]
