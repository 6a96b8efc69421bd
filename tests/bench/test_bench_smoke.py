"""Every benchmark runs, prints its ratio line and writes its numbers."""

from __future__ import annotations

import json
import math
import os
import types

import msgspec
import pytest

from saturate.records.facts import Facts, MachineFacts

#: benchmark -> the line that holds its answer
LINES = {
    "overhead": r"^agent / profiler: -?\d+\.\d{3} \[-?\d+\.\d{3}, -?\d+\.\d{3}\]$",
    "aa": r"^real quiet, true \+5%: \w+ 1\n    false verdicts [\d.]+% \[[\d.]+%, [\d.]+%\]; by one pair's median ",
    "regret": r"^slow_rows    tuned / best \d+\.\d{3} \[\d+\.\d{3}, \d+\.\d{3}\]  tune took \d+% of the time",
    "expert": r"^tuned / the best by hand \d+\.\d{3} \[\d+\.\d{3}, \d+\.\d{3}\] \(\w+, by hand: bf16\)$",
    "trace_readers": r"^saturate, [\d,]+ events of a made-up training, \d+ MB: [\d.]+ s \([\d,]+ MB/s\), \d+ MB at most$",
    "step_split": r"^split - by hand: at most \d+\.\d+ points$",
    "diagnosis": r"^slow_decode\s+input-bound-cpu\s",
    "turns": r"^lstm_text +whole blocks / turns \d+\.\d{3} \[\d+\.\d{3}, \d+\.\d{3}\]",
    "fit": r"^saturate +\d+ correct +\d trials",
    "cache_lines": r"^bert-base, float32: on cache lines / as torch links it \d+\.\d{3} \[\d+\.\d{3}, (\d+\.\d{3}|inf)\]$",
    "verify": r"^  bf16 autocast +\d of \d \[[\d.]+%, [\d.]+%\] +\d of \d \[",
}


@pytest.mark.parametrize("name", [
    "overhead", "trace_readers", "verify", *(pytest.param(name, marks=pytest.mark.slow) for name in ("aa", "cache_lines", "regret", "expert", "step_split", "diagnosis", "fit", "turns"))])
def test_smoke(name, smoke):
    smoke(name, LINES[name])


def test_a_peer_that_is_not_there_is_not_judged(bench, tmp_path, monkeypatch, capsys):
    readers = bench("trace_readers")
    monkeypatch.setattr("sys.argv", ["trace_readers.py", "--events", "2000", "--repeats", "1", "--json", str(tmp_path / "out.json")])
    assert readers.main() == 0
    assert capsys.readouterr().out.count("not judged") == 3
    assert json.loads((tmp_path / "out.json").read_text())["targets_met"] is None
    assert readers.judged([{}, {"met": None}, {"met": True}]) is True and readers.judged([{"met": False}, {"met": None}]) is False


def outcome(identity, fate, **options):
    return types.SimpleNamespace(id=identity, fate=fate, options=options)


def test_candidates_are_the_usable_ones(bench):
    regret = bench("regret")
    record = types.SimpleNamespace(result=types.SimpleNamespace(techniques=[
        outcome("pin-memory", "not_tried"), outcome("gc-freeze", "no_difference"), outcome("fused-optimizer", "kept"),
        outcome("tf32", "not_applicable"), outcome("bf16-autocast", "rejected_numerics"), outcome("compile", "failed")]))
    assert [c.id for c in regret.candidates(record, None)] == ["pin-memory", "gc-freeze", "fused-optimizer"]
    assert [c.id for c in regret.candidates(record, frozenset({"pin-memory"}))] == ["pin-memory"]


def test_the_most_effective_are_chosen_by_what_they_give_alone(bench, monkeypatch):
    """By tune's screening races only, or by one of our own where tune had no time for one."""
    regret = bench("regret")
    raced = [("screen gc-freeze", [], ["gc-freeze"], 0.99, 1.05), ("screen fused-optimizer", [], ["fused-optimizer"], 1.2, 1.3),
             ("screen cpu-threads", [], ["cpu-threads"], 0.8, 0.9),
             ("screen pin-memory", ["gc-freeze"], ["pin-memory"], 9.0, 9.5), ("A/A", [], [], 1.0, 1.1)]
    record = types.SimpleNamespace(races=[types.SimpleNamespace(question=q, a=a, b=b, speedup=s, speedup_ci=(0.0, high))
                                          for q, a, b, s, high in raced])
    alone = regret.speedups_alone(record)
    assert alone == {"gc-freeze": (0.99, 1.05), "fused-optimizer": (1.2, 1.3), "cpu-threads": (0.8, 0.9)}
    registry = regret._registry.load()
    pool = [regret.Candidate(registry[i], registry[i].Options()) for i in ("pin-memory", "gc-freeze", "fused-optimizer", "tf32", "cpu-threads")]
    late = {"pin-memory": types.SimpleNamespace(record=types.SimpleNamespace(speedup=1.1, speedup_ci=(1.0, 1.2))), "tf32": None}
    peer = regret.Exhaustive(types.SimpleNamespace(store=None), regret.SMOKE)
    monkeypatch.setattr(peer, "_race", lambda question, subset, limits: late[subset[0].id])
    # What is slower beyond doubt is no candidate; what merely measured slower is one.
    assert [c.id for c in peer._most_effective(pool, alone)] == ["fused-optimizer", "pin-memory", "gc-freeze"]
    monkeypatch.setattr(regret, "MOST", 2)
    assert [c.id for c in peer._most_effective(pool, alone)] == ["fused-optimizer", "pin-memory"]


@pytest.mark.parametrize(("startup_s", "waits_ms", "at_once"), [(60.0, 5.0, 2), (0.1, 0.0, 1)])
def test_the_exhaustive_search_begins_as_tune_does(bench, monkeypatch, startup_s, waits_ms, at_once):
    """It set attributes that had other names since: it verified one run at a time, and took a step of other events for its own."""
    regret = bench("regret")
    facts = Facts(device="cpu", step_ms=10.0, input_wait_ms=waits_ms, threads=2, machine=MachineFacts(cpu_count=2))
    stored = {"facts": msgspec.to_builtins(facts), "findings": [], "step": {"token": "S0"}, "events": {"B": 1.0}, "startup_s": startup_s,
              "step_ms": 10.0, "stationary": True, "memory_bytes": 1}
    with bench("_race").Arena() as arena:
        workbench = arena.bench(["true"])
        workbench.store.set_answer("baseline", stored)
        known = set(vars(workbench))
        peer = regret.Exhaustive(workbench, regret.SMOKE)
        peer.begin()
        assert (workbench.step, workbench.reference_events) == ({"token": "S0"}, {"B": 1.0}) and set(vars(workbench)) == known
        assert (peer.verifier.at_once, peer.racer.waits, peer.racer.mode) == (at_once, waits_ms > 0, "concurrent")
        assert vars(peer.verifier).keys() == vars(type(peer.verifier)(workbench)).keys()


def test_subsets_leave_conflicts_out(bench):
    regret = bench("regret")
    registry = regret._registry.load()
    members = [regret.Candidate(registry[i], registry[i].Options()) for i in ("compile", "bf16-autocast", "fp16-autocast")]
    found = {frozenset(c.id for c in subset) for subset in regret.subsets(members)}
    assert found == {frozenset(s.split()) for s in (
        "compile", "bf16-autocast", "fp16-autocast", "compile bf16-autocast", "compile fp16-autocast")}


def test_time_ratio_is_the_inverse_of_the_speed_up(bench):
    found = types.SimpleNamespace(decision=types.SimpleNamespace(
        estimate=types.SimpleNamespace(log_ratio=math.log(2), low=math.log(1.5), high=math.log(4))))
    assert bench("_race").time_ratio(found) == pytest.approx((0.5, 0.25, 1 / 1.5))


def test_outcome_of_a_race(bench):
    """The peer looks at the first pair alone; the interval is held against the true gain."""
    aa = bench("aa")
    decision = aa.race.Decision("stop", "no_difference", aa.race.Estimate(0.0, -0.01, 0.06, 2, 4), "")
    found = aa.outcome(decision, [[0.03, 0.05], [-0.04, -0.04]], 0.05, 1.0)
    assert (found.peer, found.covered, found.rounds) == ("faster", True, 4)
    assert not aa.outcome(decision, [[0.0, 0.0]], 0.08, 1.0).covered


def test_a_known_cost_is_found(bench):
    """`cost_us` must see work that an observer adds, and none where none is."""
    overhead = bench("overhead")
    extra = {"rounds": 0}

    class Costly(overhead.Observer):
        def on(self):
            extra["rounds"] = 3000

        def off(self):
            extra["rounds"] = 0

    def work(count):
        for _ in range(count):
            sum(range(extra["rounds"]))

    added, low, high = overhead.cost_us(Costly(), work, 9, 200)
    nothing, _, _ = overhead.cost_us(overhead.Observer(), work, 9, 200)
    assert low > 0 and high >= added > 5 * abs(nothing)


def test_a_command_that_is_slower_loses(bench, monkeypatch, clean_environment):
    """Two different commands race, each in its own processes."""
    for name in set(os.environ) - set(clean_environment):
        monkeypatch.delenv(name)
    race = bench("_race")
    with race.Arena() as arena:
        slow = arena.contestant("slow", race.script("difference", "--slower", "1.0"))
        fast = arena.contestant("fast", race.script("difference"))
        found = arena.race("which?", slow, fast, race.Limits(max_pairs=1, min_rounds=4, max_rounds=4))
    assert 0.3 < race.time_ratio(found)[0] < 0.8
    assert (found.record.a, found.record.b) == (["slow"], ["fast"])
    assert not arena.folder.exists()


def test_only_the_first_finding_counts(bench):
    """And on the clean workload any but the one that says that nothing is wrong is a false alarm."""
    diagnosis = bench("diagnosis")
    planted, clean = diagnosis.Case(("gc-pauses",)), diagnosis.Case(())
    assert diagnosis.right(planted, ["gc-pauses", "slow-optimizer"])
    assert not diagnosis.right(planted, ["slow-optimizer", "gc-pauses"]) and not diagnosis.right(planted, [])
    assert diagnosis.right(clean, []) and diagnosis.right(clean, ["nothing-to-gain"])
    assert not diagnosis.right(clean, ["nothing-to-gain", "gc-pauses"])
    assert len(diagnosis.CASES) >= 12 and all((diagnosis.FOLDER / f"{name}.py").is_file() for name in diagnosis.CASES)


def test_shares_by_hand(bench):
    assert bench("step_split").by_hand([[10, 20, 30, 40, 100], [30, 20, 10, 40, 100]]) == \
        {"input": 20.0, "forward": 20.0, "backward": 20.0, "optimizer": 40.0}
