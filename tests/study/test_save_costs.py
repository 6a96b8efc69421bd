"""`saturate checkpoint advise -- COMMAND` on trainings that save, resume, do neither, or fail."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from drill_kit import changed
from tune_kit import Folder, untouched

from saturate.cli import _advice
from saturate.errors import UsageError
from saturate.records.checkpoint import SaveCosts, SaveWay

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
    assert not here.wait_until_nothing_lives(10.0)
    return {"stderr": done.stderr, **(json.loads(done.stdout) if done.stdout else {})}


@pytest.mark.slow
def test_what_a_checkpoint_costs_and_how_soon_it_recovers(tmp_path: Path) -> None:
    said = advise(tmp_path, changed(LARGE), "--mtbf", "1d", "--budget", "60s")
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
    costs = advise(tmp_path, changed(LARGE + "\nload = lambda: 0"), "--budget", "40s")["costs"]
    assert costs["resumed"] is False and costs["recovery_s"] > 0


def test_one_that_saves_nothing_is_refused(tmp_path: Path) -> None:
    said = advise(tmp_path, changed("save = lambda step: None"), "--budget", "8s", code=2)
    assert "no checkpoint was saved in" in said["stderr"] and "--save-cost" in said["stderr"]


def test_one_that_saves_into_files_that_it_opened_is_told_so(tmp_path: Path) -> None:
    into = ("def save(step):\n    with open('checkpoint.pt', 'wb') as file: torch.save({'step': step}, file)\n"
            "load = lambda: 0")
    said = advise(tmp_path, changed(into), "--budget", "20s", code=2)
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
    assert "412 MB in 1 file;" in text and "trains again within 12 s (it read what was saved)" in text and 'id = "async-checkpoint"' in text
    assert 'id = "async-checkpoint"' not in _advice._costs_text(costs(before_s=0.05))
    unknown = _advice._costs_text(costs(recovery_s=None, resumed=None, before_s=None, unknown={"recovery_s": "why", "before_s": "because"}))
    assert "not known: why" in unknown and "because" in unknown
    assert "began anew" in _advice._costs_text(costs(resumed=False))


def test_without_any_cost_there_is_no_interval() -> None:
    class Given:
        save_cost = None

    with pytest.raises(UsageError, match="what a save costs is not known"):
        _advice._save_cost(Given(), costs(before_s=None, after_s=None, best_way=None, unknown={"after_s": "too small"}))  # type: ignore[arg-type]
    assert _advice._save_cost(Given(), costs(before_s=None))[0] == 0.1  # type: ignore[arg-type]
