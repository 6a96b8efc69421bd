"""The last moments of a study: when it counts as finished, and what its record says of what was not measured."""

from __future__ import annotations

import errno
import math
import os
from pathlib import Path
from types import SimpleNamespace

import pytest

from saturate.errors import EnvironmentProblem, SaturateError, StudyDamaged, WorkloadFailed
from saturate.report import words
from saturate.study import confirming, starts, summary, tune
from saturate.study.ending import Interrupted
from saturate.study.fates import Fate
from saturate.study.search import Search
from saturate.trial.outcome import Outcome
from saturate.trial.process import TrialEnded


@pytest.fixture
def study(monkeypatch):
    """A study that was measured; `kept` is what its store was told."""
    kept = {}
    store = SimpleNamespace(add_seconds=lambda phase, seconds: None, set_meta=kept.__setitem__)
    request = SimpleNamespace(argv=["true"], cwd=Path(), environment={}, timeout_s=1.0, directory=Path(), budget_s=60.0, limit_bytes=None)
    bench = SimpleNamespace(close=lambda: None, book=lambda: None, isolation="")
    monkeypatch.setattr(tune, "Bench", lambda *arguments: bench)
    monkeypatch.setattr(tune, "_measure", lambda study, bench: None)
    monkeypatch.setattr(summary, "record_of", lambda study: "record")
    monkeypatch.setattr(summary, "write", lambda study, record: None)
    return SimpleNamespace(request=request, store=store, folder=Path(), say=lambda line: None, error=None, started=0.0, isolation="", kept=kept,
                           bench=bench)


def raises(error):
    def fails(*arguments):
        raise error

    return fails


def test_a_study_is_finished_when_all_of_it_is_written(study, monkeypatch):
    monkeypatch.setattr(summary, "write", lambda study, record: study.kept.update(written="finished" not in study.kept))
    assert tune._work(study) == ("record", None)
    assert study.kept == {"written": True, "finished": True}


@pytest.mark.parametrize(("error", "finished"), [
    (WorkloadFailed("the command failed when it was run again"), True),
    (StudyDamaged("the study holds an answer that is none"), True),         # it would say so for ever
    (EnvironmentProblem("the disk is full"), False),
])
def test_a_study_that_the_machine_ended_goes_on_and_any_other_is_tried_again_from_the_start(error, finished, study, monkeypatch):
    monkeypatch.setattr(tune, "_measure", raises(error))
    assert tune._work(study) == ("record", error) and ("finished" in study.kept) is finished


@pytest.mark.parametrize("later", ["book", "record_of", "write"])
def test_what_ended_a_study_is_told_though_writing_it_down_fails_too(later, study, monkeypatch):
    first = WorkloadFailed("the command failed when it was run again")
    monkeypatch.setattr(tune, "_measure", raises(first))
    monkeypatch.setattr(study.bench if later == "book" else summary, later, raises(EnvironmentProblem("the disk is full")))
    try:
        _, told = tune._work(study)
    except SaturateError as raised:     # there is not even a record
        told = raised
    assert told is first


def test_samples_that_trials_have_decoded_go_with_the_study(study, tmp_path, monkeypatch):
    """Up to half of the disk, in a folder that nobody looks into. A study that is gone on with finds them."""
    samples, other = tmp_path / "cache" / "data" / "abc.samples", tmp_path / "cache" / "other"
    samples.parent.mkdir(parents=True)
    samples.touch()
    other.touch()
    study.request.directory = tmp_path
    tune._conclude(study, interrupted=True)
    assert samples.exists()
    tune._conclude(study, interrupted=False)
    assert not samples.exists() and other.exists()


@pytest.mark.parametrize("moment", ["record_of", "write"])
def test_an_interrupt_while_the_record_is_made_loses_nothing(moment, study, monkeypatch):
    """The record was lost, and the same command began another study, for this one was called finished."""
    calls = []

    def late(*arguments):
        calls.append(moment)
        if len(calls) == 1:
            raise KeyboardInterrupt
        return "record"

    monkeypatch.setattr(summary, moment, late)
    with pytest.raises(Interrupted) as ended:
        tune._work(study)
    assert ended.value.record == "record" and len(calls) == 2 and "finished" not in study.kept


def raced(a_ms: float = 10.0, b_ms: float = 8.0, pairs: int = 3, low: float = 0.2) -> SimpleNamespace:
    return SimpleNamespace(a_ms=a_ms, b_ms=b_ms, pairs=[[0.1, 0.1]] * pairs, gain=low + 0.1, gain_ci=(low, low + 0.2),
                           decision=SimpleNamespace(verdict="faster", estimate=None))


@pytest.mark.parametrize(("final", "kept", "starved", "reason"), [
    (None, (), "", "nothing is kept"),
    (None, ("one",), "", "the study ended before the final race"),
    (raced(8.0, 9.0), ("one",), "", words.NEVER),
    (raced(), ("one",), "", "no start"),
    (raced(), ("one",), "out of memory", "the baseline does not run"),
])
def test_a_recipe_never_pays_back_only_where_a_final_race_shows_it(final, kept, starved, reason):
    kept = tuple(SimpleNamespace(label=lambda one=one: one) for one in kept)
    study = SimpleNamespace(final=final, search=SimpleNamespace(kept=kept), starved=starved, store=SimpleNamespace(trials=list))
    assert starts.why_no_break_even(study, None).startswith(reason)
    assert starts.why_no_break_even(study, 40) == ""


@pytest.mark.parametrize(("nothing_fits", "peaks", "kept", "fits"), [
    (False, {(): 8}, (), None),                 # the baseline needs more, and the budget ended before anything was tried
    (True, {(): 8}, (), False),
    (False, {(): 3}, (), True),
    (False, {(): 8, ("one",): 3}, ("one",), True),
])
def test_nothing_fits_only_where_sets_were_tried(nothing_fits, peaks, kept, fits):
    study = SimpleNamespace(nothing_fits=nothing_fits, error=None)
    room = SimpleNamespace(limit_bytes=4, of=peaks.get, too_much=lambda techniques: None if peaks[techniques] <= 4 else "too much")
    assert summary._fits(study, room, kept) is fits


@pytest.mark.parametrize(("pairs", "low", "note"), [
    (1, 0.2, "1 pair of processes only: the budget ended before the final race had the 2 that it should have"),
    (2, 0.2, ""),
    (2, 0.01, "2 pairs of processes only: the budget ended before the final race had the 3 that it should have"),
    (3, 0.01, ""),
])
def test_a_number_that_rests_on_few_pairs_says_so(pairs, low, note, monkeypatch):
    monkeypatch.setattr(confirming, "final_race", lambda *arguments: raced(pairs=pairs, low=low))
    monkeypatch.setattr(tune.baseline, "observe_tuned", lambda *arguments: {})
    kept = tuple(SimpleNamespace(id=name, label=lambda: "one", module=None) for name in ("one", "two"))
    study = SimpleNamespace(search=SimpleNamespace(kept=kept, base=(), stairs=[], results=[]), starved="", notes=[], say=lambda line: None,
                            store=SimpleNamespace(answer=lambda question: None))
    confirming.confirm(study, SimpleNamespace(bench=None), math.inf)
    assert study.notes == [note] * bool(note)


@pytest.mark.parametrize("verdict", ["no_difference", "slower"])
@pytest.mark.parametrize(("names", "gain", "interval"), [(("one",), 0.004, (-0.003, 0.011)), (("one", "two"), None, None)])
def test_a_gain_that_the_final_race_did_not_confirm_is_no_gain(names, gain, interval, verdict, monkeypatch):
    """Its fate was "no_difference", with the +12 % [+8 %, +16 %] of an earlier race, which was called the closest."""
    final = SimpleNamespace(decision=SimpleNamespace(verdict=verdict), gain=0.004, gain_ci=(-0.003, 0.011))
    monkeypatch.setattr(confirming, "final_race", lambda *arguments: final)
    kept = tuple(SimpleNamespace(id=name, label=str) for name in names)
    search = Search({}, None, None, None, 0.0, print, kept=kept, fates={one.id: Fate("kept", "", one, 0.12, (0.08, 0.16)) for one in kept})
    confirming.confirm(SimpleNamespace(search=search, starved="", say=lambda line: None), SimpleNamespace(), math.inf)
    assert search.kept == () and all((f.fate, f.gain, f.gain_ci) == (verdict, gain, interval) for f in search.fates.values())


def last_race(monkeypatch, race, kept=("needed", "fast"), base=(), starved="", stairs=(), end=math.inf):
    """`confirm`, where the last race is `race`; the study, and what it raced against."""
    asked = []
    monkeypatch.setattr(confirming, "final_race", lambda racer, before, *rest: (asked.append([one.id for one in before]), race())[1])
    monkeypatch.setattr(tune.baseline, "observe_tuned", lambda *arguments: {})
    of = {name: SimpleNamespace(id=name, label=lambda name=name: name, module=None, options_dict=dict) for name in (*kept, *base)}
    search = Search({}, None, None, None, 0.0, print, kept=tuple(of[name] for name in kept), base=tuple(of[name] for name in base),
                    stairs=[(tuple(of[name] for name in added), result) for added, result in stairs],
                    fates={name: Fate("kept", "", one, 0.1, (0.05, 0.2)) for name, one in of.items()})
    study = SimpleNamespace(search=search, starved=starved, notes=[], deviated="", refusal=None, say=lambda line: None,
                            store=SimpleNamespace(answer=lambda question: None))
    confirming.confirm(study, SimpleNamespace(bench=None), end)
    return study, asked


def ending(side, kind):
    def race():
        ended = TrialEnded(Outcome(kind, "for a test"))
        ended.side = side
        raise ended

    return race


@pytest.mark.parametrize(("starved", "before"), [("", []), ("out of memory", ["needed"])])
def test_the_last_race_is_against_the_baseline_where_that_runs(starved, before, monkeypatch):
    """With a memory limit, what it takes to keep that may cost more than all else gives."""
    study, asked = last_race(monkeypatch, raced, base=("needed",), starved=starved)
    assert asked == [before] and [one.id for one in study.search.kept] == ["needed", "fast"]


@pytest.mark.parametrize("verdict", ["no_difference", "slower"])
def test_what_keeps_a_memory_limit_need_not_be_faster(verdict, monkeypatch):
    final = raced()
    final.decision = SimpleNamespace(verdict=verdict, estimate=None)
    study, _ = last_race(monkeypatch, lambda: final, kept=("needed",), base=("needed",))
    assert [one.id for one in study.search.kept] == ["needed"] and study.search.fates["needed"].fate == "kept"


def test_a_baseline_that_fails_in_the_last_race_is_told_as_that(monkeypatch):
    with pytest.raises(WorkloadFailed, match="failed when it was run again"):
        last_race(monkeypatch, ending("a", "crashed"))


def test_a_set_that_passes_the_limit_in_its_last_race_takes_nothing_else_with_it(monkeypatch):
    study, _ = last_race(monkeypatch, ending("b", "over_limit"), base=("needed",), starved="out of memory")
    assert study.refusal is None and [one.id for one in study.search.kept] == ["needed"] and study.search.fates["fast"].fate == "failed"


def test_behind_the_end_of_the_budget_no_last_race_is_begun(monkeypatch):
    found = raced(pairs=1)
    found.record = SimpleNamespace(a=[], b=["fast"])
    study, asked = last_race(monkeypatch, raced, kept=("fast",), stairs=[(("fast",), found)], end=-math.inf)
    assert study.final is found and asked == [] and "the budget had ended" in study.notes[0]


@pytest.mark.parametrize(("a_ms", "low", "note", "gain"), [
    (244.0, 3.7, "the gain is that of the race in which it was found", 0.118),      # 9.8 times as fast, where +12 % had been found
    (244.0, 0.1, "measure again when it is quiet", 0.2),                            # as before, within what that had said
    (20.0, 3.7, "", 3.8),
])
def test_a_last_race_beside_other_programs_says_so(a_ms, low, note, gain, monkeypatch):
    monkeypatch.setattr(confirming, "final_race", lambda *arguments: raced(a_ms=a_ms, low=low))
    monkeypatch.setattr(tune.baseline, "observe_tuned", lambda *arguments: {})
    one = SimpleNamespace(id="one", label=lambda: "one", module=None)
    found = raced(a_ms=17.0, pairs=1)
    found.record, found.gain, found.gain_ci = SimpleNamespace(a=[], b=["one"]), 0.118, (0.029, 0.215)
    search = SimpleNamespace(kept=(one,), base=(), stairs=[((one,), found)], results=[found], fates={"one": Fate("kept", "", one)})
    study = SimpleNamespace(search=search, starved="", notes=[], say=lambda line: None, store=SimpleNamespace(answer=lambda question: None))
    confirming.confirm(study, SimpleNamespace(bench=None), math.inf)
    assert study.final.gain == pytest.approx(gain) and search.fates["one"].gain == pytest.approx(gain)
    told = [result.a_ms for result in (*search.results, study.final)]
    assert a_ms in told, "a race that was not believed is on record all the same"
    assert [one.endswith(note) and "took 244.0 ms there" in one and "17.0 ms" in one for one in study.notes] == [True] * bool(note)


@pytest.mark.parametrize(("high", "judged", "kept"), [
    (0.049, True, ("one",)),
    (0.10, True, ("one", "two")),           # both leave open that the second gives nothing
    (0.049, False, ("one", "two")),         # the first was never verified without the second
])
@pytest.mark.parametrize("over", [True, False])
def test_a_set_that_gains_less_than_what_joined_first_goes_back_to_that(high, judged, kept, over, monkeypatch):
    """A technique that was raced in one pair, whose other process was slow, joined with +23 %; the set gained 3 % in the last race, where
    the first technique alone had given 18 %, and was kept."""
    def race(racer, before, kept, end, say):
        asked.append([one.id for one in kept])
        whole = len(kept) == 2
        return SimpleNamespace(a_ms=10.0, b_ms=9.0, pairs=[[0.1, 0.1]] * 3, gain=0.02 if whole else 0.15, gain_ci=(0.003, high) if whole else (0.1, 0.2),
                               decision=SimpleNamespace(verdict="faster"), record=SimpleNamespace(a=[], b=asked[-1]))

    asked = []
    monkeypatch.setattr(confirming, "final_race", race)
    monkeypatch.setattr(confirming, "ordered", tuple)
    monkeypatch.setattr(tune.baseline, "observe_tuned", lambda *arguments: {})
    one, two = (SimpleNamespace(id=name, label=lambda name=name: name, module=None, options_dict=dict) for name in ("one", "two"))
    first, second = raced(pairs=1), raced(pairs=1)
    first.gain, first.gain_ci, first.record = 0.18, (0.06, 0.315), SimpleNamespace(a=[], b=["one"])
    second.record = SimpleNamespace(a=["one"], b=["one", "two"])
    search = Search({}, None, None, None, 0.0, print, kept=(one, two), stairs=[((one,), first), ((two,), second)],
                    verified={"one", "two"} if judged else {"two"}, fates={c.id: Fate("kept", "", c, 0.2, (0.1, 0.3)) for c in (one, two)})
    study = SimpleNamespace(search=search, starved="", notes=[], say=lambda line: None, store=SimpleNamespace(answer=lambda question: None))
    ends = iter([math.inf, 0.0 if over else math.inf])
    confirm = confirming.confirm
    monkeypatch.setattr(confirming, "confirm", lambda study, racer, end: confirm(study, racer, next(ends)))
    confirming.confirm(study, SimpleNamespace(bench=None), math.inf)
    assert tuple(c.id for c in search.kept) == kept
    back = kept == ("one",)
    assert (search.fates["two"].fate, search.fates["two"].gain) == (("inconclusive", None) if back else ("kept", 0.2))
    assert asked == [["one", "two"]] + [["one"]] * (back and not over)
    assert study.final.gain == (0.02 if not back else 0.18 if over else 0.15) and any("left again: two" in note for note in study.notes) is back
    assert [len(stair[0]) for stair in search.stairs] == [1] * len(kept)
    assert not back or any(result.gain == 0.02 for result in search.results), "the race that was contradicted is told of"


@pytest.mark.parametrize("alone", [True, False])
def test_a_final_race_that_the_budget_ends_takes_nothing_back(alone, monkeypatch):
    """Where the race in which the set was found says it all, that is what is known of it; else nothing was confirmed."""
    def race(racer, before, kept, end, say):
        ended = TrialEnded(Outcome("not_in_time", "the budget was over"))
        ended.side = "a"
        raise ended

    monkeypatch.setattr(confirming, "final_race", race)
    names = ("one",) if alone else ("one", "two")
    kept = tuple(SimpleNamespace(id=name, label=lambda name=name: name, module=None, options_dict=dict) for name in names)
    found = raced(pairs=1, low=0.2)
    found.decision, found.record = SimpleNamespace(verdict="faster"), SimpleNamespace(a=[], b=["one"])
    stairs = [((one,), found) for one in kept]
    search = Search({}, None, None, None, 0.0, print, kept=kept, stairs=stairs, fates={one.id: Fate("kept", "", one, 0.3, (0.2, 0.4)) for one in kept})
    study = SimpleNamespace(search=search, starved="", notes=[], deviated="", say=lambda line: None, store=SimpleNamespace(answer=lambda question: None))
    confirming.confirm(study, SimpleNamespace(bench=None), math.inf)
    if alone:
        assert study.final is found and search.kept == kept and "the budget had ended" in study.notes[0]
    else:
        assert search.kept == () and {fate.fate for fate in search.fates.values()} == {"inconclusive"} and "was not confirmed" in study.notes[0]


@pytest.mark.parametrize("added", [True, False])
@pytest.mark.parametrize(("kind", "says_nothing"), [("too_short", True), ("not_in_time", True), ("crashed", False), ("trains_otherwise", False)])
def test_what_was_needed_to_fit_stays_where_the_last_race_does_not_end(added, kind, says_nothing, monkeypatch):
    """The recipe was empty, for a training that does not fit without it; and what had verified was called rejected."""
    def race(racer, before, kept, end, say):
        ended = TrialEnded(Outcome(kind, "for a test"))
        ended.side = "b"
        raise ended

    monkeypatch.setattr(confirming, "final_race", race)
    needed, fast = (SimpleNamespace(id=name, label=lambda name=name: name, module=None, options_dict=dict) for name in ("needed", "fast"))
    kept = (needed, fast) if added else (needed,)
    search = Search({}, None, None, None, 0.0, print, kept=kept, base=(needed,), fates={one.id: Fate("kept", "", one, 0.1, (0.05, 0.2)) for one in kept})
    study = SimpleNamespace(search=search, starved="", notes=[], deviated="", say=lambda line: None, store=SimpleNamespace(answer=lambda question: None))
    confirming.confirm(study, SimpleNamespace(bench=None), math.inf)
    stays = added or says_nothing
    assert search.kept == ((needed,) if stays else ()) and (search.fates["needed"].fate == "kept") is stays
    assert study.deviated == ("" if stays or kind != "trains_otherwise" else "trains otherwise: for a test")
    assert not added or search.fates["fast"].fate != "kept"


def test_a_report_is_there_whole_or_not_at_all(tmp_path, monkeypatch):
    def full(descriptor):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(summary, "write_recipe", lambda study, result: None)
    monkeypatch.setattr(summary.html, "render", lambda record: "a page")
    monkeypatch.setattr(os, "fsync", full)
    study = SimpleNamespace(report_path=tmp_path / "report.html")
    with pytest.raises(OSError, match="No space left"):
        summary.write(study, SimpleNamespace(result=None))
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(("kind", "fate", "verified"), [
    ("trains_otherwise", "rejected_numerics", False), ("motif_differs", "rejected_numerics", False),
    ("crashed", "failed", True), ("not_active", "not_applied", True),
])
def test_a_set_that_trains_otherwise_in_its_last_race_has_not_verified(kind, fate, verified, monkeypatch):
    """It was called failed, and the exit code was 0, as if nothing had been wrong."""
    def race(racer, before, kept, end, say):
        ended = TrialEnded(Outcome(kind, "as it was not before"))
        ended.side = "b"
        raise ended

    settled = {}
    kept = (SimpleNamespace(id="one", label=lambda: "one"),)
    search = SimpleNamespace(kept=kept, base=(), stairs=[], settle=lambda candidate, fate, reason: settled.update({candidate.id: fate}))
    study = SimpleNamespace(search=search, starved="", say=lambda line: None, notes=[], deviated="", refusal=None, error=None, store=None)
    monkeypatch.setattr(confirming, "final_race", race)
    confirming.confirm(study, SimpleNamespace(), math.inf)
    assert settled == {"one": fate} and search.kept == ()
    assert summary._verified(study)[0] is verified
    assert study.notes and "last race" in study.notes[0]
