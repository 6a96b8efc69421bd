"""The noise of a machine: how long it is looked at, what is said of it, and how long the last race goes on because of it."""

from __future__ import annotations

import math
from types import SimpleNamespace

import pytest

from saturate.errors import TooNoisy, WorkloadFailed
from saturate.measure import race
from saturate.records.facts import Facts
from saturate.study import baseline, confirming, deadline, tune
from saturate.study.race_pair import KernelWork
from saturate.trial.outcome import Outcome
from saturate.trial.process import TrialEnded

WILD = [0.9, -0.5, 1.9, -0.4, 0.4, -1.2]


class Racer:
    """Each pair takes as long as it is told to."""

    def __init__(self, clock: list[float], pair_s: float, pair: list[float] = WILD):
        self.clock, self.pair_s, self.pair = clock, pair_s, pair
        self.pairs: list[list[float]] = []
        self.ci = (-0.1, 0.3)
        self.noise = self

    def run(self, question, a, b, limits, deadline, share_base=False, min_pairs=1):
        while len(self.pairs) < min_pairs:
            self.clock[0] += self.pair_s
            self.pairs.append(self.pair)
        return SimpleNamespace(pairs=self.pairs, pair_s=self.pair_s, work=[], gain=0.0, gain_ci=self.ci, decision=SimpleNamespace(estimate=race.estimate(self.pairs)))

    def learn(self, pairs, work=()):
        self.learned = pairs


@pytest.mark.parametrize(("pair_s", "pairs"), [(40.0, 1), (14.0, 4)])
def test_no_further_pair_is_begun_that_would_outlast_the_budget(monkeypatch, pair_s, pairs):
    clock = [0.0]
    monkeypatch.setattr(tune.time, "monotonic", lambda: clock[0])
    study = SimpleNamespace(request=SimpleNamespace(budget_s=120.0), aa=None, said=[], say=lambda line: None, refusal="")
    racer = Racer(clock, pair_s)
    with pytest.raises(TooNoisy) as error:
        tune._noise(study, racer, (), end=60.0)
    assert len(racer.pairs) == pairs and clock[0] <= 60.0
    assert "--budget" in error.value.remedy and f"{pairs} pair" in error.value.evidence
    assert math.isfinite(tune._floor(study.aa))


def test_what_two_runs_of_the_same_program_differ_by_is_known_to_all_later_races():
    racer = Racer([0.0], 1.0, [0.01, -0.01, 0.0, 0.01])
    study = SimpleNamespace(request=SimpleNamespace(budget_s=1e6), aa=None, say=lambda line: None)
    assert tune._noise(study, racer, (), end=math.inf) and racer.learned == racer.pairs == [racer.pair]


@pytest.mark.parametrize(("used_s", "left_s"), [
    (0.0, 100.0),
    (60.0, 40.0),
    (95.0, 30.0),       # what is found then must still be confirmed
    (500.0, 30.0),
])
def test_a_study_that_is_gone_on_with_has_what_is_left_of_its_budget_and_time_to_end(used_s, left_s, monkeypatch):
    monkeypatch.setattr(baseline, "establish", lambda *arguments: False)
    store = SimpleNamespace(phases=lambda: [("baseline", 12.0), ("total", used_s)], add_seconds=lambda phase, seconds: None)
    bench, told = SimpleNamespace(), []
    tune._measure(SimpleNamespace(request=SimpleNamespace(budget_s=100.0), store=store, started=1000.0, on_end=told.append), bench)
    assert told == [bench.ends] == [1000.0 + left_s]


@pytest.mark.parametrize(("used_s", "step_ms", "known", "asked", "needs"), [
    (14.0, 500.0, None, False, "4m"),       # 26 s of updates do not end in the 16 s that are left
    (14.0, 500.0, [None], True, ""),        # a resumed study has that run
    (14.0, 300.0, None, True, ""),
    (3.0, 500.0, None, True, ""),
    (35.0, 1.0, None, False, "3m"),         # starting once has used up the budget: four times both starts
    (14.0, 700.0, None, False, "5m"),       # longer than the whole budget
])
def test_a_verification_run_that_cannot_end_in_time_is_not_begun(monkeypatch, used_s, step_ms, known, asked, needs):
    monkeypatch.setattr(tune.time, "monotonic", lambda: 100.0 + used_s)
    monkeypatch.setattr(tune, "_noise", lambda *arguments: True)
    runs = []
    store = SimpleNamespace(answer={"informative": known}.get, add_seconds=lambda phase, seconds: None)
    study = SimpleNamespace(request=SimpleNamespace(budget_s=30.0), store=store, started=100.0, say=lambda line: None, needs_budget="",
                            out_of_time=False, refusal=None, baseline={"step_ms": step_ms, "startup_s": 3.0})
    found = tune._is_measurable(study, SimpleNamespace(check_baseline=lambda: runs.append("run"), note=None), None, (), end=130.0)
    assert found is asked is bool(runs) and study.needs_budget == needs
    assert study.out_of_time is (not asked and 52 * step_ms < 30e3), "steps that no such budget holds are another refusal"
    assert asked or f"give it --budget {needs}" in study.refusal


@pytest.mark.parametrize(("budget_s", "used_s", "start_s", "step_ms", "run_s", "needs"), [
    (180.0, 132.0, 18.6, 1051.0, 82.6, "9m"),       # Seen: a pair was begun with 48 s left, and took 127 s
    (180.0, 156.0, 17.0, 1948.0, 101.0, "11m"),     # ... with 24 s left, and took 91 s
    (180.0, 60.0, 6.3, 685.0, 42.0, ""),            # it tried one technique
    (180.0, 90.0, 80.0, 50.0, 9.0, ""),             # only the first start was slow
    (180.0, 150.0, 14.0, 141.0, 15.0, ""),          # it may end a little late
    (30.0, 20.0, 9.0, 1.0, 9.5, ""),                # as it may with a short budget
    (180.0, 181.0, 4.0, 1.0, 170.0, "13m"),         # that is over
    (180.0, 170.0, 80.0, 5000.0, None, ""),         # a resumed study may know its noise
])
def test_no_pair_is_begun_behind_which_nothing_can_be_tried_in_time(monkeypatch, budget_s, used_s, start_s, step_ms, run_s, needs):
    monkeypatch.setattr(deadline.time, "monotonic", lambda: 100.0 + used_s)
    study = SimpleNamespace(request=SimpleNamespace(budget_s=budget_s), started=100.0, needs_budget="", out_of_time=False,
                            baseline={"step_ms": step_ms, "startup_s": start_s})
    refusal = deadline.out_of_time(study, 100.0 + budget_s, run_s)
    assert study.needs_budget == needs and bool(refusal) is study.out_of_time is bool(needs)
    assert not needs or f"give it --budget {needs}" in refusal and ("ends before anything can be tried" in refusal) is (used_s < budget_s)


@pytest.mark.parametrize(("known", "looks"), [(None, False), ([None], True)])
def test_a_study_that_cannot_try_anything_does_not_look_at_the_noise(monkeypatch, known, looks):
    clock = [50.0]
    monkeypatch.setattr(tune.time, "monotonic", lambda: clock[0])
    monkeypatch.setattr(tune, "_noise", lambda *arguments: True)
    store = SimpleNamespace(answer={"informative": known}.get, add_seconds=lambda phase, seconds: None)
    study = SimpleNamespace(request=SimpleNamespace(budget_s=180.0), store=store, started=0.0, say=lambda line: None, needs_budget="",
                            refusal=None, baseline={"step_ms": 1051.0, "startup_s": 18.6})
    verifier = SimpleNamespace(check_baseline=lambda: clock.__setitem__(0, 132.0), note=None)
    assert tune._is_measurable(study, verifier, None, (), end=180.0) is looks
    assert bool(study.refusal) is not looks and study.needs_budget == ("" if looks else "9m")


def test_of_a_baseline_that_does_not_run_in_the_memory_no_time_is_known():
    study = SimpleNamespace(request=SimpleNamespace(budget_s=180.0), baseline={"starved": "out of memory"})
    assert deadline.out_of_time(study, deadline.time.monotonic() + 1.0, 20.0) is None


TAKEN = "OSError: [Errno 98] Address already in use"


@pytest.mark.parametrize(("mode", "asked", "fails", "kind", "ends"), [
    ("concurrent", "auto", 1, "crashed", "alternate"),      # alone it runs
    ("concurrent", "auto", 2, "crashed", WorkloadFailed),   # alone it fails as well
    ("alternate", "auto", 1, "crashed", WorkloadFailed),
    ("concurrent", "concurrent", 1, "crashed", WorkloadFailed),     # what the user asked for is not changed
    ("concurrent", "auto", 1, "too_short", "concurrent"),
])
def test_what_fails_beside_another_of_its_kind_is_run_alone(mode, asked, fails, kind, ends):
    class Fails(Racer):
        left, mode = fails, ""

        def run(self, *arguments, **options):
            if self.left:
                self.left -= 1
                raise TrialEnded(Outcome(kind, TAKEN))
            return super().run(*arguments, **options)

        def alternate(self):
            self.mode = "alternate"

    answers = {}
    study = SimpleNamespace(request=SimpleNamespace(budget_s=1e6, race_mode=asked), aa=None, notes=[], say=lambda line: None,
                            refusal="", store=SimpleNamespace(set_answer=answers.__setitem__))
    racer = Fails([0.0], 1.0, [0.01, -0.01, 0.0, 0.01])
    racer.mode = mode
    if ends is WorkloadFailed:
        with pytest.raises(WorkloadFailed) as error:
            tune._noise(study, racer, (), end=math.inf)
        assert error.value.cause == f"crashed: {TAKEN}"
    else:
        assert tune._noise(study, racer, (), end=math.inf) is (kind == "crashed")
        assert racer.mode == ends
        assert (TAKEN in "".join(study.notes) and TAKEN in answers[baseline.ALTERNATES]) or kind == "too_short"


@pytest.mark.parametrize(("pair", "end", "pairs"), [
    (WILD, 1000.0, confirming.MOST_FINAL_PAIRS),          # it never gets narrow
    (WILD, 55.0, 5),                                # a sixth pair would end too late
    ([0.3, 0.31, 0.29, 0.3, 0.3, 0.31], 1000.0, 3),
    ([0.3, 0.31, 0.29, 0.3, 0.3, 0.31], 25.0, 2),   # a third one of a large gain would end too late
    ([0.03, 0.031, 0.029, 0.03, 0.03, 0.031], 25.0, 3),     # a small gain needs it
])
def test_the_last_race_goes_on_while_its_interval_is_wide(monkeypatch, pair, end, pairs):
    clock = [0.0]
    monkeypatch.setattr(tune.time, "monotonic", lambda: clock[0])
    racer = Racer(clock, 10.0, pair)
    racer.ci = (-0.1, 0.3) if pair is WILD else (pair[0] - 0.01, pair[0] + 0.02)
    said = []
    assert len(confirming.final_race(racer, (), (), end, said.append).pairs) == pairs and clock[0] <= max(end, 30.0)
    assert len(said) == max(0, pairs - 3) and all("[-10.0%, +30.0%] is wide" in line for line in said)


def step(a=(), b=("fast",), verdict="faster"):
    record = SimpleNamespace(a=list(a), b=list(b))
    return (SimpleNamespace(label=lambda: b[-1]),), SimpleNamespace(record=record, decision=SimpleNamespace(verdict=verdict))


def candidate(identity):
    return SimpleNamespace(id=identity, options_dict=dict)


KEPT = (candidate("fast"),)
FAST, OTHER = SimpleNamespace(label=lambda: "fast"), SimpleNamespace(label=lambda: "other")


@pytest.mark.parametrize(("stairs", "before", "kept", "counts"), [
    ([step()], (), (FAST,), True),
    ([step(a=["other"], b=["other", "fast"])], (OTHER,), (OTHER, FAST), True),      # on top of what was needed to fit
    ([step(), step(a=["fast"], b=["fast", "other"])], (), (FAST, OTHER), False),    # nobody raced both against nothing
    ([step(a=["other"], b=["other", "fast"])], (), (FAST,), False),
    ([step(verdict="inconclusive")], (), (FAST,), False),
])
def test_behind_the_end_of_the_budget_the_race_that_was_won_is_the_last_one(stairs, before, kept, counts):
    """minGPT's chargpt had a minute more of the same pairs, after five minutes of four."""
    assert confirming.has_won(stairs, before, kept) is (stairs[0][1] if counts else None)


def test_what_the_kernel_did_for_each_process_of_the_first_race_is_known():
    """A process that was lucky was diagnosed, and the allocator never had a turn."""
    facts = Facts(page_faults=3.0, kernel_ms=0.1)
    pair = [(KernelWork(1400.0, 3.6), KernelWork(0.5, 0.05)), (KernelWork(math.nan, math.nan), KernelWork(2.0, 0.1))]
    found = tune.seen_by_all(facts, SimpleNamespace(work=pair))
    assert (found.page_faults, found.kernel_ms, found.least_page_faults) == (1400.0, 3.6, 0.5)
    assert tune.seen_by_all(facts, SimpleNamespace(work=[])) == facts
    unlucky = Facts(page_faults=1500.0, kernel_ms=4.0)
    found = tune.seen_by_all(unlucky, SimpleNamespace(work=pair[1:]))
    assert (found.page_faults, found.kernel_ms, found.least_page_faults) == (1500.0, 4.0, 2.0)


@pytest.mark.parametrize(("split_ms", "raced_ms", "again"), [(60.0, 24.0, True), (10.0, 24.0, True), (26.0, 24.0, False), (0.0, 24.0, False)])
def test_a_split_of_a_baseline_that_ran_at_another_speed_is_made_again(monkeypatch, split_ms, raced_ms, again):
    """Seen on a Keras script: the first process took 62 ms for a step, all others 23, and the gain was explained by the first."""
    asked = []

    class Bench:
        def live(self, purpose, techniques):
            asked.append((purpose, techniques))
            return purpose

        def finish_live(self, live):
            asked.append((live, "ended"))

    monkeypatch.setattr(baseline, "observe", lambda study, live: {"split": {"forward": 20.0 if live != "tuned" else 12.0}})
    kept = {}
    store = SimpleNamespace(answer=kept.get, set_answer=kept.__setitem__)
    study = SimpleNamespace(store=store, starved="", notes=[], baseline={"split": {"forward": split_ms} if split_ms else {}},
                            final=SimpleNamespace(a_ms=raced_ms))
    found = baseline.observe_tuned(study, Bench(), KEPT)
    assert found["split"] == {"forward": 12.0} and found.get("before") == ({"forward": 20.0} if again else None)
    assert list(kept.values()) == [found] and len([one for one in asked if one[1] == "ended"]) == 1 + again


def test_a_result_stands_where_its_step_cannot_be_split():
    class Bench:
        def live(self, purpose, techniques):
            raise TrialEnded(Outcome("crashed", "the port is taken"))

    kept = {}
    study = SimpleNamespace(store=SimpleNamespace(answer=kept.get, set_answer=kept.__setitem__), starved="", notes=[],
                            baseline={"split": {}}, final=SimpleNamespace(a_ms=1.0))
    assert baseline.observe_tuned(study, Bench(), KEPT) == {} and "the port is taken" in study.notes[0]


@pytest.mark.parametrize(("split_ms", "again"), [(60.0, True), (21.0, False)])
def test_the_processes_of_the_last_race_tell_where_its_time_goes(monkeypatch, split_ms, again):
    """Another one was started for that, which takes a minute where a script takes a minute to start."""
    untuned, tuned = SimpleNamespace(techniques=()), SimpleNamespace(techniques=KEPT)
    seen = []

    def observe(study, live):
        seen.append(live)
        return {"split": {"forward": 20.0 if live is untuned else 12.0}}

    monkeypatch.setattr(baseline, "observe", observe)
    kept = {}
    study = SimpleNamespace(store=SimpleNamespace(answer=kept.get, set_answer=kept.__setitem__), starved="", notes=[],
                            baseline={"split": {"forward": split_ms}}, final=SimpleNamespace(a_ms=20.0))
    for _ in range(2):      # of two pairs, the first
        baseline.observe_raced(study, untuned, tuned)
    assert seen == [tuned, untuned], "each is frozen while the other one is looked at"
    (found,) = kept.values()
    assert found == {"split": {"forward": 12.0}} | ({"before": {"forward": 20.0}} if again else {})
    assert baseline.observe_tuned(study, None, KEPT) == found, "nothing is started"
    with pytest.raises(AttributeError):     # the search went on after an interruption, and ended with another set: that is looked at
        baseline.observe_tuned(study, None, (*KEPT, candidate("other")))


def test_a_process_that_ends_while_it_is_looked_at_takes_no_race_with_it(monkeypatch):
    def observe(study, live):
        raise TrialEnded(Outcome("too_short", "its steps are over"))

    monkeypatch.setattr(baseline, "observe", observe)
    kept = {}
    study = SimpleNamespace(store=SimpleNamespace(answer=kept.get, set_answer=kept.__setitem__), starved="", baseline={"split": {}})
    baseline.observe_raced(study, SimpleNamespace(techniques=()), SimpleNamespace(techniques=KEPT))
    assert kept == {}
