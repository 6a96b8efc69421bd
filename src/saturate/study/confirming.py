"""The last race of a study: the set that was kept against the baseline, in fresh pairs, and what becomes of it where that race says otherwise."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from statistics import median

from saturate.measure.race import Limits
from saturate.report import words
from saturate.study import baseline, deadline, memory_limit
from saturate.study.candidates import Candidate, Set, names, ordered
from saturate.study.ending import failed_again
from saturate.study.fates import of_end
from saturate.study.racing import Racer, Result
from saturate.study.standing import passed_limit
from saturate.study.state import Study
from saturate.trial.process import TrialEnded

FINAL = Limits(max_pairs=3, min_rounds=6, max_rounds=16)

#: A gain of less needs three fresh pairs, whatever time it is: two processes of one program can differ by as much.
SMALL_GAIN = 0.05

#: An interval wider than this to either side says little: the final race goes on with more pairs, while there is time.
WIDE = 0.05
MOST_FINAL_PAIRS = 8

#: A step that is so many times as long in the last race as in those before it ran beside something else: what gains then, as fewer threads
#: do, need not when the machine is quiet.
OTHER_LOAD = 3.0


def final_race(racer: Racer, before: Set, kept: Set, end: float, say: Callable[[str], None]) -> Result:
    """In three fresh pairs, the third of a large gain only if it ends in time; and in more as long as the interval is wide and
    time lasts. Its width is no ratio, so going on because of it favours neither side."""
    result = racer.run(words.FINAL_RACE, before, kept, replace(FINAL, max_pairs=2), end, min_pairs=2)
    for most in range(3, MOST_FINAL_PAIRS + 1):
        low, high = result.gain_ci or (-1.0, math.inf)
        found = result.decision.estimate
        wide = found is None or found.high - found.low > 2 * WIDE
        usual, small = most <= FINAL.max_pairs, low < SMALL_GAIN
        if len(result.pairs) < most - 1 or not (usual or wide):
            break
        if not (usual and small) and not deadline.time_for_another(result, end):
            break
        if not usual:
            say(f"  [{low:+.1%}, {high:+.1%}] is wide: another pair")
        result = racer.run(words.FINAL_RACE, before, kept, replace(FINAL, max_pairs=most), end, min_pairs=most)
    return result


def _promised_pairs(low: float) -> int:
    """Fresh pairs that a gain of at least `low` should rest on."""
    return min(FINAL.max_pairs, 2) if low >= SMALL_GAIN else FINAL.max_pairs


def confirm(study: Study, racer: Racer, end: float) -> None:
    """The final set against the baseline. Where the baseline does not run, against the set that was needed to fit."""
    assert study.search is not None
    kept = study.search.kept
    before = study.search.base if study.starved else ()
    study.say("confirm: " + " + ".join(c.label() for c in kept))
    found = has_won(study.search.stairs, before, kept)
    won = found if time.monotonic() >= end else None
    racer.on_pair = partial(baseline.observe_raced, study)
    try:
        study.final = won or final_race(racer, before, kept, end, study.say)
    except TrialEnded as ended:
        if ended.outcome.kind != "not_in_time" or found is None:
            _not_confirmed(study, before, kept, ended)
            return
        study.final = won = found
    finally:
        racer.on_pair = None
    low, high = study.final.gain_ci or (0.0, 0.0)
    study.say(f"  {_gain(study.final)}")
    instead = _instead(study, before, study.final, found) if won is None else None
    if instead is not None:
        study.search.results.append(study.final)        # it is told of like any other race
        study.final = instead
    elif won is None and _back_to_the_first(study, before, study.final):
        confirm(study, racer, end)
        return
    if study.final.decision.verdict in ("no_difference", "slower") and not study.search.base:
        _drop(study, kept, study.final.decision.verdict, "the final race did not confirm the gain", study.final)
        return
    if len(kept) == 1:      # its gain in the final set is what the final race measured
        fate = study.search.fates[kept[0].id]
        fate.gain, fate.gain_ci = study.final.gain, study.final.gain_ci
    if won is not None:
        pairs = words.count(len(won.pairs), "pair")
        study.notes.append(f"the budget had ended: the gain is that of the race in which it was found, {pairs} of processes")
    elif instead is None and len(study.final.pairs) < (promised := _promised_pairs(low)):
        pairs = words.count(len(study.final.pairs), "pair")
        study.notes.append(f"{pairs} of processes only: the budget ended before the final race had the {promised} that it should have")
    study.tuned = (study.store.answer(baseline.tuned_question(kept)) or {}) if won is not None else baseline.observe_tuned(study, racer.bench, kept)
    remarks = [(candidate.id, getattr(candidate.module, "REMARK", "")) for candidate in kept]
    study.notes.extend(f"{identity}: {remark}" for identity, remark in remarks if remark)


def _gain(result: Result) -> str:
    low, high = result.gain_ci or (0.0, 0.0)
    return f"{result.gain:+.1%} [{low:+.1%}, {high:+.1%}]"


def _instead(study: Study, before: Set, final: Result, found: Result | None) -> Result | None:
    """The race in which the set was `found`, where the last one ran beside something else and says more than that had allowed for; a
    note says that it did."""
    assert study.search is not None
    labels = [c.label() for c in before]
    seen = [result.a_ms for result in study.search.results if result.record.a == labels and result.a_ms]
    if not seen or final.a_ms <= OTHER_LOAD * median(seen):
        return None
    contradicted = found is not None and (final.gain_ci or (0.0,))[0] > (found.gain_ci or (0.0, math.inf))[1]
    study.notes.append(f"other programs kept the machine busy in the last race: a step took {words.ms(final.a_ms)} ms there before tuning, "
                       f"{words.ms(median(seen))} ms in the races before it; "
                       + ("the gain is that of the race in which it was found" if contradicted else "measure again when it is quiet"))
    study.say(f"  {study.notes[-1]}")
    return found if contradicted else None


def _back_to_the_first(study: Study, before: Set, final: Result) -> bool:
    """Whether the set that joined first takes the place of all that is kept: alone it was faster than the last race says of them all, beyond
    what both leave open. Something that joined on top of it was called faster for the process that it was raced in, and does harm."""
    search = study.search
    assert search is not None
    if len(search.stairs) < 2:
        return False
    first = search.stairs[0][0]
    alone = ordered((*before, *first))
    found = has_won(search.stairs[:1], before, alone)
    later = tuple(one for one in search.kept if one not in alone)
    verified = all(one.id in search.verified and one in search.kept for one in first)
    if found is None or not later or not verified or final.gain_ci is None or found.gain_ci is None or final.gain_ci[1] >= found.gain_ci[0]:
        return False
    less = f"{_gain(final)} in the last race, {names(alone)} alone {_gain(found)}"
    study.say(f"  {names(alone)} alone gave {_gain(found)}: back to that")
    study.notes.append(f"left again: {names(later)}; the whole set gave {less}")
    search.results.append(final)        # it is told of like any other race
    for candidate in later:
        search.settle(candidate, "inconclusive", f"with it {less}")
        search.fates[candidate.id].gain = search.fates[candidate.id].gain_ci = None
    search.kept, search.stairs = alone, search.stairs[:1]
    return True


def _not_confirmed(study: Study, before: Set, kept: Set, ended: TrialEnded) -> None:
    """Keep nothing but what was needed to fit, because the last race did not come to its end. Raises where what was there before does
    not run any more."""
    kind, reason = ended.outcome.kind, ended.outcome.reason
    if kind == "too_short":
        study.notes.append(f"the last race has too few rounds: {reason}; {ended.outcome.remedy}")
        fate = "inconclusive"
    elif ended.side == "a" and passed_limit(ended, before):
        study.refusal = memory_limit.let_go(study.search, reason)
        study.say(study.refusal)
        return
    elif ended.side == "a" and kind != "not_in_time":
        raise failed_again(ended) from ended
    else:
        fate, why = of_end(ended, before)
        study.deviated = why if fate == "rejected_numerics" else ""
        how = {"rejected_numerics": "trained otherwise", "inconclusive": "was not confirmed"}.get(fate, "failed")
        study.notes.append(f"the final set {how} in its last race: {reason}")
    study.say(f"  {study.notes[-1]}")
    base = study.search.base
    added = tuple(one for one in kept if one not in base)
    _drop(study, kept, fate, reason)
    if base and (added or fate == "inconclusive"):      # this says nothing of what verified by itself before
        study.deviated = ""
        study.search.kept = base
        for member in base:
            study.search.settle(member, "kept", "needed to keep the memory limit")


def has_won(stairs: list[tuple[Set, Result]], before: Set, kept: Set) -> Result | None:
    """The race that the kept set has won against `before`, if there was just that one: another would tell no more than it did."""
    if len(stairs) != 1 or len(kept) != len(before) + len(stairs[0][0]):
        return None
    result = stairs[0][1]
    raced = result.record.a == [c.label() for c in before] and result.record.b == [c.label() for c in kept]
    return result if raced and result.decision.verdict == "faster" else None


def _drop(study: Study, kept: tuple[Candidate, ...], fate: str, reason: str, final: Result | None = None) -> None:
    """Nothing is kept. A final race that says so is what is known of its one technique; of several it says nothing of any of them, and
    what they gained before it was not confirmed."""
    assert study.search is not None
    for candidate in kept:
        study.search.settle(candidate, fate, reason)
        if final is not None:
            found = study.search.fates[candidate.id]
            found.gain, found.gain_ci = (final.gain, final.gain_ci) if len(kept) == 1 else (None, None)
    study.search.kept = ()
