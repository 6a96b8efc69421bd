"""The two processes of a race start side by side, and neither outlives the other's failure."""

from __future__ import annotations

import math
import os
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from parties import WORKLOAD, identity, publish

from saturate.study import baseline
from saturate.study import bench as benches
from saturate.study.bench import Bench
from saturate.study.candidates import Candidate
from saturate.study.store import Store
from saturate.techniques import _registry
from saturate.trial.outcome import Outcome
from saturate.trial.process import Trial, TrialEnded, Workload


@pytest.fixture
def bench(tmp_path: Path) -> Iterator[Bench]:
    work = tmp_path / "work"
    work.mkdir()
    (work / "train.py").write_text(WORKLOAD, encoding="utf-8")
    environment = {k: v for k, v in os.environ.items() if not k.startswith(("SATURATE", "PYTHON", "PYTEST"))}
    store = Store(tmp_path / "run")
    bench = Bench(Workload([sys.executable, "train.py"], work, environment, 120.0), tmp_path / "run", tmp_path, store, 60.0, print)
    yield bench
    bench.close()
    store.close()


def candidate(folder: Path, name: str) -> Candidate:
    site = publish(folder / "site", [name])
    try:
        module = _registry.load_one(name, str(site / f"{name}.py"))
    finally:
        sys.modules.pop(name, None)
    assert module.TECHNIQUE.id == identity(name)
    return Candidate(module, module.Options())


def watched(bench: Bench) -> list[str]:
    """What is done to which trial, in order."""
    done: list[str] = []

    def watch(name: str) -> None:
        inner = getattr(bench, name)

        def noted(first, *arguments, **named):
            done.append(f"{name} {first.purpose if name == 'warm' else first}")
            return inner(first, *arguments, **named)

        setattr(bench, name, noted)

    for name in ("start", "cold", "warm"):
        watch(name)
    return done


def test_both_start_before_either_is_waited_for(bench: Bench) -> None:
    done = watched(bench)
    first, second = bench.live_pair("a", (), "b", ())
    assert done == ["start a", "start b", "cold a", "cold b", "warm a", "warm b"]
    assert first.trial.frozen and second.trial.frozen and len(bench.living) == 2
    for live in (first, second):
        assert 0 < live.startup_s < 60 and live.step_ms > 0
        bench.finish_live(live)
    # The second came to its gate while the first was waited for, not after the first was warm.
    came = [live.trial.started + live.startup_s for live in (first, second)]
    assert came[1] < came[0] + first.warmup_s + 5.0
    assert [trial["outcome"] for trial in bench.store.trials()] == ["ok", "ok"]


def test_what_times_its_own_start_starts_alone(bench: Bench) -> None:
    done = watched(bench)
    alone = SimpleNamespace(module=SimpleNamespace(TECHNIQUE=SimpleNamespace(starts_alone=True)))
    bench.check_memory = lambda techniques: None                # type: ignore[method-assign]
    plain = bench.live
    bench.live = lambda purpose, techniques: plain(purpose, ())     # type: ignore[method-assign]
    for live in bench.live_pair("a", (), "b", (alone,)):            # type: ignore[arg-type]
        bench.finish_live(live)
    assert done == ["cold a", "start a", "warm a", "cold b", "start b", "warm b"]


@pytest.mark.parametrize(("a", "b", "side"), [("crashes", "", "a"), ("", "crashes", "b"), ("", "active_raises", "b")])
def test_the_other_is_ended_when_one_fails(a: str, b: str, side: str, bench: Bench, tmp_path: Path) -> None:
    sets = [(candidate(tmp_path, name),) if name else () for name in (a, b)]
    with pytest.raises(TrialEnded) as ended:
        bench.live_pair("a", sets[0], "b", sets[1])
    failed = "killed_by_signal" if "crashes" in (a, b) else "failed_to_apply"
    assert (ended.value.side, ended.value.outcome.kind) == (side, failed)
    assert not bench.living and {trial["outcome"] for trial in bench.store.trials()} == {failed, "ok"}


def test_both_are_started_again_where_the_first_isolation_is_refused(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[str] = []
    bench.say = said.append
    plain = Trial.wait_ready

    def refused(trial: Trial, patience_s: float) -> dict[str, Any]:
        hello = plain(trial, patience_s)
        if trial.spec.redirect is None:
            raise trial.end(Outcome("cage_refused", "no namespaces here"))
        return hello

    monkeypatch.setattr(Trial, "wait_ready", refused)
    for live in bench.live_pair("a", (), "b", ()):
        bench.finish_live(live)
    assert len(said) == 1 and "no namespaces here" in said[0]
    assert [trial["outcome"] for trial in bench.store.trials()] == ["cage_refused", "cage_refused", "ok", "ok"]
    assert not bench.living


@pytest.mark.parametrize("prints", [False, True])
def test_a_first_step_is_waited_for_no_longer_than_the_budget(prints: bool, bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    """A script that evaluates for twenty minutes before it trains kept `--budget 3m` waiting for ten."""
    source = "import time\nwhile True:\n    time.sleep(0.05)\n" + "    print('evaluating', flush=True)\n" * prints
    (bench.workload.cwd / "train.py").write_text(source, encoding="utf-8")
    monkeypatch.setattr(benches, "LEAST_PATIENCE_S", 1.0)
    bench.budget_s = 1.5
    began = time.monotonic()
    with pytest.raises(TrialEnded) as ended:
        bench.live("baseline", ())
    assert ended.value.outcome.kind == "not_in_time" and "--budget" in ended.value.outcome.remedy
    assert 1.5 <= time.monotonic() - began < 15.0 and not bench.living
    study = SimpleNamespace(folder=bench.folder, store=bench.store, request=SimpleNamespace(budget_s=90.0), say=lambda line: None,
                            refusal="", needs_budget="")
    assert baseline.failed(study, ended.value.outcome) is False         # type: ignore[arg-type]
    assert study.needs_budget == "3m" and "no training step" in study.refusal


def test_who_has_trained_once_is_waited_for_as_long_as_it_shows_life(bench: Bench) -> None:
    asked: list[float] = []
    plain = Trial.wait_ready
    bench.budget_s = 120.0
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Trial, "wait_ready", lambda trial, patience_s: (asked.append(patience_s), plain(trial, patience_s))[1])
        for live in bench.live_pair("a", (), "b", ()):
            bench.finish_live(live)
    assert asked == [120.0, math.inf]
