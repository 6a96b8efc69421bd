"""The two processes of a race, or two verification runs, start side by side, and neither outlives the other's failure."""

from __future__ import annotations

import math
import os
import re
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from parties import WORKLOAD, identity, publish
from waiting import is_waited_for, until

from saturate.records.facts import Facts, MachineFacts
from saturate.study import baseline
from saturate.study import bench as benches
from saturate.study.bench import Bench
from saturate.study.candidates import Candidate
from saturate.study.fates import of_end
from saturate.study.live import Pace, timed_losses
from saturate.study.store import Store
from saturate.study.verification import Run, Verifier
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
    bench.pace = Pace(0.001, 2.0, crowded=False)
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
    assert second.trial.started < first.trial.started + first.startup_s, "it had begun when the first one came to its gate"
    assert [trial["outcome"] for trial in bench.store.trials()] == ["ok", "ok"]


@pytest.mark.parametrize("crowded", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_it_is_noted_what_started_beside_one_that_wants_the_same_cores(bench: Bench, crowded: bool) -> None:
    bench.pace = Pace(0.001, 9.0, crowded)
    for live in bench.live_pair("a", (), "b", ()):
        bench.finish_live(live)
    bench.finish_live(bench.live("c", ()))
    assert [trial["beside"] for trial in bench.store.trials()] == [crowded, crowded, False]


def test_what_times_its_own_start_starts_alone(bench: Bench) -> None:
    done = watched(bench)
    alone = SimpleNamespace(module=SimpleNamespace(TECHNIQUE=SimpleNamespace(starts_alone=True)))
    bench.check_memory = lambda techniques: None                # type: ignore[method-assign]
    plain = bench.live
    bench.live = lambda purpose, techniques, started: plain(purpose, ())     # type: ignore[method-assign]
    for live in bench.live_pair("a", (), "b", (alone,)):            # type: ignore[arg-type]
        bench.finish_live(live)
    assert done == ["cold a", "start a", "warm a", "cold b", "start b", "warm b"]


def test_where_two_trainings_at_once_lose_they_start_together_and_train_in_turn(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two trainings on all of two cores took 64 s each to their first gate, side by side; alone it took 9 s."""
    bench.pace = Pace(0.7, 9.0, crowded=True)
    plain = bench.warm

    def slow(cold: Any) -> Any:
        if cold.purpose == "a":
            until(lambda: is_waited_for(bench.living[1].spec.folder / "turn"))
            time.sleep(0.3)
        return plain(cold)

    monkeypatch.setattr(bench, "warm", slow)
    done = watched(bench)
    began = time.monotonic()
    first, second = bench.live_pair("a", (), "b", ())
    took_s = time.monotonic() - began
    assert done == ["start a", "start b", "cold a", "warm a", "cold b", "warm b"]
    held_s = second.hello["held_ns"] / 1e9
    assert first.hello["held_ns"] == 0 and held_s > 0.3
    assert 0 < second.startup_s <= took_s - held_s, "what it was held for is no part of its start"
    for live in (first, second):
        bench.finish_live(live)
    assert [trial["beside"] for trial in bench.store.trials()] == [True, False], "the second has trained alone"


@pytest.mark.parametrize("pace", [None, Pace(9.0, 9.0, crowded=True)])
def test_where_the_steps_take_most_of_the_time_they_start_one_by_one(pace: Pace | None, bench: Bench) -> None:
    bench.pace = pace
    done = watched(bench)
    for live in bench.live_pair("a", (), "b", ()):
        bench.finish_live(live)
    assert done == ["cold a", "start a", "warm a", "cold b", "start b", "warm b"]


@pytest.mark.parametrize(("step_s", "startup_s", "crowded", "order"), [
    (0.7, 9.0, True, "in turn"), (0.7, 9.0, False, "side by side"), (0.0074, 2.6, True, "in turn"), (0.004, 2.5, True, "side by side"),
    (0.7, 400.0, True, "side by side"), (9.0, 9.0, True, "one by one"), (9.0, 9.0, False, "side by side"),
])
def test_what_two_at_once_lose_is_weighed_against_a_start(step_s: float, startup_s: float, crowded: bool, order: str) -> None:
    assert Pace(step_s, startup_s, crowded).order(benches.FIRST_STEPS) == order


@pytest.mark.parametrize(("device", "threads", "ranks", "cores", "crowded"), [
    ("cpu", 2, 1, 2, True), ("cpu", 1, 1, 2, False), ("cpu", 1, 2, 2, True), ("cpu", 8, 1, 16, False), ("cuda", 8, 1, 8, False),
])
def test_processes_are_crowded_where_their_threads_outnumber_the_cores(
    device: str, threads: int, ranks: int, cores: int, crowded: bool,
) -> None:
    facts = Facts(device=device, threads=threads, world_size=ranks, step_ms=10.0, machine=MachineFacts(cpu_count=cores))
    assert baseline.pace(facts, 2.0) == Pace(0.01, 2.0, crowded)


@pytest.mark.parametrize("in_turn", [False, True])
@pytest.mark.parametrize(("a", "b", "side"), [("crashes", "", "a"), ("", "crashes", "b"), ("", "active_raises", "b")])
def test_the_other_is_ended_when_one_fails(a: str, b: str, side: str, in_turn: bool, bench: Bench, tmp_path: Path) -> None:
    bench.pace = Pace(0.7, 9.0, crowded=in_turn)
    sets = [(candidate(tmp_path, name),) if name else () for name in (a, b)]
    with pytest.raises(TrialEnded) as ended:
        bench.live_pair("a", sets[0], "b", sets[1])
    failed = "killed_by_signal" if "crashes" in (a, b) else "failed_to_apply"
    assert (ended.value.side, ended.value.outcome.kind) == (side, failed)
    assert not bench.living and {trial["outcome"] for trial in bench.store.trials()} == {failed, "ok"}


@pytest.mark.parametrize("in_turn", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_both_are_started_again_where_the_first_isolation_is_refused(in_turn: bool, bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    bench.pace = Pace(0.7, 9.0, crowded=in_turn)
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
    assert 1.5 <= time.monotonic() - began < 60.0 and not bench.living
    study = SimpleNamespace(folder=bench.folder, store=bench.store, request=SimpleNamespace(budget_s=90.0), say=lambda line: None,
                            refusal="", needs_budget="")
    assert baseline.failed(study, ended.value.outcome) is False         # type: ignore[arg-type]
    assert study.needs_budget == "3m" and "no training step was seen to repeat in" in study.refusal, "one may have been made"


def test_what_waits_for_a_process_that_failed_is_told_its_exception(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    """An A3C whose workers had all raised waited for their results, and was told to take a longer budget."""
    source = ("import subprocess, sys, time\nsubprocess.run([sys.executable, '-c', 'raise TypeError(chr(97))'])\n"
              "while True:\n    time.sleep(0.05)\n")
    (bench.workload.cwd / "train.py").write_text(source, encoding="utf-8")
    monkeypatch.setattr(benches, "LEAST_PATIENCE_S", 1.0)
    bench.budget_s = 1.5
    plain = Trial.wait_ready

    def when_it_failed(trial: Trial, patience_s: float) -> dict[str, Any]:
        until(lambda: "TypeError" in trial.output())
        return plain(trial, patience_s)

    monkeypatch.setattr(Trial, "wait_ready", when_it_failed)
    with pytest.raises(TrialEnded) as ended:
        bench.live("baseline", ())
    assert ended.value.outcome.kind == "not_in_time"
    assert ended.value.outcome.reason.endswith("gives its start; the last exception in its output: TypeError: a")
    assert ended.value.outcome.remedy.startswith("see whether it waits for a process that failed so; otherwise give it")


def test_who_has_trained_once_is_waited_for_as_long_as_it_shows_life(bench: Bench) -> None:
    asked: list[float] = []
    plain = Trial.wait_ready
    bench.budget_s = 120.0
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Trial, "wait_ready", lambda trial, patience_s: (asked.append(patience_s), plain(trial, patience_s))[1])
        for live in bench.live_pair("a", (), "b", ()):
            bench.finish_live(live)
        assert asked == [120.0, math.inf]
        asked.clear()
        bench._trains = False           # a study that is resumed
        Verifier(bench).series(Run())
    assert asked == [math.inf]


@pytest.mark.parametrize(("name", "alone"), [("never_starts", True), ("stops_later", True), ("crawls", False)])
def test_a_candidate_is_waited_for_no_longer_than_the_budget(
    name: str, alone: bool, bench: Bench, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Seen: one that compiled for minutes, in a study of two; nothing but `--timeout` ended it. Neither what it prints nor the updates
    that it records make the budget longer."""
    monkeypatch.setattr(benches, "LEAST_WAIT_S", 1.0)
    techniques = (candidate(tmp_path, name),)
    bench.ends = time.monotonic() + 9.0
    bench.pace = Pace(0.001, 0.5, crowded=False)
    with pytest.raises(TrialEnded) as ended:
        bench.live("screen", techniques) if alone else Verifier(bench).series(Run(techniques))
    assert ended.value.outcome.kind == "not_in_time" and "no more time for it" in ended.value.outcome.reason
    assert bench.ends <= time.monotonic() < bench.ends + 60.0 and not bench.living
    assert of_end(ended.value, ())[0] == "inconclusive"


def test_what_takes_as_long_as_it_did_is_waited_for_though_the_budget_is_over(bench: Bench, tmp_path: Path) -> None:
    techniques = (candidate(tmp_path, "waits_less"),)
    bench.finish_live(bench.live("screen", techniques))
    bench.ends = time.monotonic() - 60.0
    bench.finish_live(bench.live("once more", techniques))
    Verifier(bench).series(Run(techniques))
    known = [trial["startup_s"] for trial in bench.store.trials() if trial.get("startup_s")]
    assert bench._patience(techniques, None) == {"until": bench.ends, "least_s": max(30.0, 4 * (max(2.0, *known) + 0.005))}


def test_the_reference_is_waited_for(bench: Bench, tmp_path: Path) -> None:
    bench.ends = time.monotonic() - 60.0
    bench.reference = (candidate(tmp_path, "waits_less"),)
    trial = bench.start("fits", bench.reference)
    assert trial.spec.until == math.inf
    bench.abandon(trial, bench.reference)


RUNS = (Run(), Run(repetition=1), Run(perturb=1e-3))


def in_order(verifier: Verifier, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What is done to which verification run."""
    done: list[str] = []
    for name in ("start", "finish"):
        inner = getattr(verifier.bench, name)

        def noted(first: Any, *arguments: Any, name: str = name, inner: Any = inner, **named: Any) -> Any:
            done.append(f"{name} {getattr(getattr(first, 'spec', None), 'purpose', first)}")
            return inner(first, *arguments, **named)

        monkeypatch.setattr(verifier.bench, name, noted)
    return done


@pytest.mark.parametrize("in_turn", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_verification_runs_are_recorded_two_at_a_time(in_turn: bool, bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    bench.pace = Pace(0.1, 9.0, crowded=in_turn)
    alone, together = Verifier(bench), Verifier(bench, at_once=2)
    done = in_order(alone, monkeypatch)
    alone._prepare(*RUNS)
    assert done == [], "each has its turn when it is asked for"
    ones = [alone.series(run) for run in RUNS]
    monkeypatch.setattr(bench.store, "answer", lambda question: None)       # as if none were stored
    done.clear()
    together._prepare(*RUNS)
    assert done == ["start verify baseline", "start verify baseline", "finish verify baseline", "finish verify baseline"]
    assert [together.series(run).losses for run in RUNS] == [series.losses for series in ones]
    assert ones[0].losses == ones[1].losses != ones[2].losses
    assert len(done) == 6 and not bench.living


@pytest.mark.parametrize(("line", "seed", "reason"), [
    ("torch.manual_seed(7)", "torch.seed()", "other data in update 0"),
    ("for micro, (inputs, targets) in enumerate(loader):", "for micro, inputs in enumerate([torch.randn(4, 12, generator=own) for _ in range(16)]):\n"
     "        targets = inputs[:, :3].sum(1, keepdim=True)", "its first updates are others"),
])
def test_a_script_that_does_not_repeat_itself_is_not_verified(bench: Bench, line: str, seed: str, reason: str) -> None:
    """Its seed comes from the clock, or here from the system: what it does in a second run says nothing of a technique."""
    script = bench.workload.cwd / "train.py"
    own = "own = torch.Generator(); own.seed()\n"
    script.write_text(script.read_text().replace("class Net", own + "class Net").replace(line, seed))
    verifier = Verifier(bench)
    assert verifier.check_baseline() is None
    module = _registry.load()["gc-freeze"]
    verified = verifier.verify((Candidate(module, module.Options()),))
    assert verified.passed is None and reason in verified.reason and "fixed seed" in verified.reason
    assert Verifier(bench).check_baseline() == verified.reason


def test_a_run_that_times_its_own_start_is_recorded_alone(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    recorded: list[tuple[Run, ...]] = []
    verifier = Verifier(bench, at_once=2)
    monkeypatch.setattr(verifier, "_record", lambda *runs: recorded.append(runs))
    own = SimpleNamespace(id="own", merges=1, options_dict=dict, module=SimpleNamespace(TECHNIQUE=SimpleNamespace(starts_alone=True)))
    verifier._prepare(Run((own,)), Run())       # type: ignore[arg-type]
    assert recorded == [], "each has its turn when it is asked for"


def test_a_failed_verification_run_ends_the_one_beside_it(bench: Bench, tmp_path: Path) -> None:
    crashing = Run((candidate(tmp_path, "crashes"),))
    for runs in ((crashing, Run()), (Run(repetition=1), crashing)):
        with pytest.raises(TrialEnded) as ended:
            Verifier(bench, at_once=2)._prepare(*runs)
        assert ended.value.outcome.kind == "killed_by_signal" and ended.value.side == "b" and not bench.living


def test_what_steps_aside_in_its_verification_run_has_not_verified(bench: Bench, tmp_path: Path) -> None:
    """It was bit-identical to the baseline there, as a compiler that gives up is; nothing of what is timed had been compared."""
    techniques = (candidate(tmp_path, "steps_aside"),)
    bench.finish_live(bench.live("screen", techniques))
    with pytest.raises(TrialEnded) as ended:
        Verifier(bench).verify(techniques)
    assert ended.value.outcome.kind == "not_active" and ended.value.side == "b" and not bench.living
    assert "it has stepped aside" in ended.value.outcome.reason


def test_a_verification_run_of_the_baseline_that_fails_is_told_from_the_candidates(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(trial: Trial, hello: Any) -> None:
        raise trial.end(Outcome("crashed", "for a test"))

    monkeypatch.setattr(bench, "check_applied", fails)
    with pytest.raises(TrialEnded) as ended:
        Verifier(bench).series(Run(perturb=1e-3))
    assert ended.value.side == "a" and not bench.living


def test_the_losses_of_a_process_that_races_share_are_known_while_it_lives(bench: Bench) -> None:
    """A technique that trains otherwise when it is timed is found by them, also in the first race of a search."""
    first = bench.live("baseline", ())
    bench.step = first.hello["step"]        # before it is known, nobody could say which losses belong to one
    bench.finish_live(first)
    live = bench.live("reference", ())
    assert bench.store.answer(timed_losses(())) == live.trial.losses and len(live.trial.losses) >= 4
    bench.finish_live(live)


@pytest.mark.parametrize(("mode", "limit", "host_gb", "device_gb", "holds"), [
    ("concurrent", None, 10, 10, 4), ("alternate", None, 10, 10, 1), ("concurrent", 2**30, 10, 10, 1), ("concurrent", None, 4, 10, 1),
    ("concurrent", None, 6, 10, 3), ("concurrent", None, 10, 4, 1), ("concurrent", None, 10, 7, 2), ("concurrent", None, None, None, 4),
])
def test_verification_runs_at_once_need_memory_for_them_and_the_frozen_baseline(
    mode: str, limit: int | None, host_gb: int | None, device_gb: int | None, holds: int,
) -> None:
    def runs(device: str, cores: int, pace: Pace | None) -> int:
        facts = SimpleNamespace(machine=SimpleNamespace(memory_bytes=host_gb, cpu_count=cores), device=device,
                                device_reserved_bytes=2**30, device_room_bytes=device_gb and device_gb * 2**30)
        study = SimpleNamespace(facts=facts, baseline={"memory_bytes": 1}, request=SimpleNamespace(limit_bytes=limit))
        return baseline.at_once(study, mode, pace)      # type: ignore[arg-type]

    free = Pace(0.01, 9.0, crowded=False)
    assert runs("cuda", 16, free) == holds
    assert runs("cuda", 4, free) == runs("cpu", 16, free) == min(2, holds), "starting takes cores, and so does training on a CPU"
    assert runs("cpu", 2, Pace(0.1, 9.0, crowded=True)) == min(3, holds), "they start together, and train in turn"
    for lost in (None, Pace(1.0, 9.0, crowded=True)):
        assert runs("cuda", 16, lost) == 1


def test_who_waits_for_a_first_step_is_told(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[str] = []
    monkeypatch.setattr(bench, "say", said.append)
    monkeypatch.setattr(benches, "FIRST_WORD_S", 0.05)
    monkeypatch.setattr(benches, "NEXT_WORD_S", 600.0)
    trial, _ = bench.ready("baseline", ())
    bench.finish(trial, ())
    assert len(said) == 1 and re.search(r"no training step was seen to repeat in \d+ s \(three", said[0])
    trial, _ = bench.ready("again", ())         # a command that has trained needs no such words
    bench.finish(trial, ())
    assert len(said) == 1
