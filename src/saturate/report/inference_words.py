"""What is said of an optimization in the summary, in the table and on the page: titles, reasons, fates, intervals."""

from __future__ import annotations

import math
from collections.abc import Sequence

from saturate.records.inference import (
    ANSWERS,
    OF_THE_USER,
    SEARCH_ENDED,
    CandidateRecord,
    OptimizeRecord,
    Timing,
)
from saturate.records.result import Phase
from saturate.records.sizes import show
from saturate.report import words

#: In the order in which tables list them: the winner, what works, what was refused, what did not run.
FATES = {
    "kept": "kept",
    "dominated": "dominated",
    "no_difference": "no difference",
    "slower": "slower",
    "inconclusive": "inconclusive",
    "undecided": "accuracy undecided",
    "over_limit": "over a limit",
    "rejected_accuracy": "rejected (accuracy)",
    "rejected_behaviour": "rejected (behaviour)",
    "not_deployable": "not deployable",
    "not_applied": "not applied",
    "failed": "failed",
    "not_applicable": "not applicable",
    "not_tried": "not tried",
}

#: What each fate but `kept` means, for somebody who reads it for the first time.
MEANINGS = {
    "dominated": "It is within the budget and the limits; the one that was kept is better by the objective.",
    "no_difference": "It gains too little over the model as it is, in what the objective asks for, to matter, or it loses.",
    "slower": "Slower than the model as it is, or than a better one that was known already: then it was not scored.",
    "inconclusive": "The race could not decide: the machine was too noisy, or the time ended.",
    "undecided": "The samples of the check are too few to say whether it is within the budget.",
    "over_limit": "It needs more memory, or its slow calls are slower, than the limits allow.",
    "rejected_accuracy": "With the confidence asked for it loses more than the budget.",
    "rejected_behaviour": "Its answers are not usable as the model's are, whatever the score says.",
    "not_deployable": "It could not be stored and loaded again with the same answers.",
    "not_applied": "It was set, but the proof that it took effect is missing. Its time says nothing.",
    "failed": "Its process ended with an error, or broke a limit of time or memory.",
    "not_applicable": "This model or machine gives it nothing to do.",
    "not_tried": "The time ended first, it was left out, or there was no check to judge it by, or no data to train it with.",
}

#: What each verdict of a search means.
VERDICTS = {
    "faster": "The best candidate is shown to be better than the model by the objective: faster, or with less memory, or with more samples per "
              "second. Loaded from its artifact it is within the budget and the limits.",
    "keeps_limits": "Nothing that keeps the limits is better than the model, but the model does not keep them: the best candidate that does is the "
                    "answer, even if it is slower. It is within the budget.",
    "nothing_helps": "Everything had its turn, and no candidate within the budget and the limits is better than the model. The table says what "
                     "became of each; another budget or limit may let one through.",
    "inconclusive": "Nobody knows yet: the time ended, samples are missing, or the machine was too noisy. The reason says which; the same command "
                    "with more time goes on where it was.",
}

#: Fates whose reasons a reader wants first: it would have been worth having.
_LOST = ("rejected_accuracy", "undecided", "rejected_behaviour", "over_limit", "not_deployable", "failed")


#: A phase that took less than this share of a search is no reason why it took so long.
_SMALL = 0.05

#: A time in which something can be tried and confirmed: so many times what starting and the check on the model took. As `tune` has it.
_NEEDED = 4


def won(record: OptimizeRecord) -> bool:
    return record.best is not None and record.verdict in ANSWERS and record.best.verdict in ("pass", None)


def title(record: OptimizeRecord, times: str = "x", *, interval: bool = True) -> str:
    """The verdict in a few words."""
    best = record.best
    if best is not None and record.verdict in ANSWERS:
        same = ", lossless" if lossless(kept(record)) else ""
        kinds = {"fail": ", but not within the budget", "undecided": f"{same}, accuracy undecided", None: ", lossless"}
        kind = kinds.get(best.verdict, f", within a drop of {drop(record.max_drop, record.relative)}")
        speed = words.ratio(best.speedup, best.speedup_ci if interval else None, times)
        if record.verdict == "keeps_limits":
            if record.throughput_ratio is None:
                return f"Keeps the limits at {speed} the speed{kind}"
            more = words.ratio(record.throughput_ratio, record.throughput_ratio_ci if interval else None, times)
            return f"Keeps the limits at {more} the samples per second{kind}"
        before, after = record.baseline.peak_memory_bytes, best.peak_memory_bytes
        if record.objective == "memory" and before and after:
            return f"{before / after:.2f}{times} less memory, {speed} the speed{kind}"
        if record.throughput_ratio is not None:
            more = words.ratio(record.throughput_ratio, record.throughput_ratio_ci if interval else None, times)
            return f"{more.replace(times, f'{times} samples per second', 1)}{kind}"
        return f"{speed.replace(times, f'{times} faster', 1)}{kind}"
    if record.verdict == "inconclusive":
        return "No answer yet"
    bounds = [
        name
        for name, given in (("the budget", record.max_drop is not None), ("the limits", bool(record.limits)))
        if given
    ]
    if record.baseline.fate == "over_limit":        # the model does not keep them either: being faster is not what is missing
        return f"Nothing usable{' within the budget' * (record.max_drop is not None)} is shown to keep the limits"
    return f"Nothing{' within ' * bool(bounds)}{' and '.join(bounds)} {better(record.objective, over=False)}"


def better(objective: str, over: bool) -> str:
    """What is looked for, as the rest of a sentence about a candidate. `over`: the model itself passes a limit."""
    if over:
        return "keeps the limits"
    return {"memory": "needs less memory", "throughput": "serves more samples per second"}.get(objective, "is faster")


def so_far(record: OptimizeRecord) -> str:
    """Of a search that ended early."""
    found = record.unconfirmed
    if found is None:
        return ""
    return f"{words.ratio(found.speedup)} in a screening, not confirmed: {found.id}"


def unfinished(record: OptimizeRecord) -> str:
    """What came as far as the final race, where that did not decide, else the fastest that misses samples: it comes before
    what was refused."""
    if record.verdict != "inconclusive":
        return ""
    raced = next((one for one in record.candidates if one.fate == "inconclusive"), None)
    if raced is not None:
        return f"{raced.id}: {words.one_line(raced.reason)}"
    missing = [one for one in record.candidates if one.fate == "undecided"]
    return became(max(missing, key=lambda one: one.speedup or 0.0)) if missing else ""


def why_nothing(record: OptimizeRecord) -> str:
    """Why there is no winner, as the rest of a sentence."""
    if record.baseline.fate == "failed":
        return record.baseline.reason
    if record.unconfirmed is not None:
        return f"the search ended early: {so_far(record)}"
    tried = [one for one in record.candidates if one.speedup is not None]
    if not tried:
        ran = next((one for one in record.candidates if one.fate in ("failed", "not_applied", "rejected_behaviour")), None)
        waiting = next((one for one in record.candidates if one.fate == "not_tried" and one.reason not in OF_THE_USER), None)
        if ran is None and waiting is not None:
            cut = waiting.reason == SEARCH_ENDED
            return "the search was ended before the first candidate's turn" if cut else _before_the_first(record)
        return "no candidate could be measured" + (f": {ran.id}, {ran.reason}" if ran else "")
    before = record.baseline.peak_memory_bytes
    if record.objective == "memory" and before and (least := min((one for one in tried if one.peak_memory_bytes),
                                                                 key=lambda one: one.peak_memory_bytes or 0, default=None)):
        return f"closest: {least.id}, {FATES[least.fate]}: {show(least.peak_memory_bytes or 0)}, and the model {show(before)}"
    best = max(tried, key=lambda one: one.speedup or 0.0)
    return f"closest: {became(best)}"


def _before_the_first(record: OptimizeRecord) -> str:
    """The time was over before anything was tried: what it went into, and which would do."""
    why, before = "the time ended before the first candidate's turn", [one for one in record.phases if one.name in ("start", "check")]
    if not before:
        return f"{why}: give it more"
    minutes = math.ceil(_NEEDED * sum(one.seconds for one in before) / 60)
    return f"{why}, give it {minutes}m: {_phases(before)}"


def _phases(found: Sequence[Phase]) -> str:
    return ", ".join(f"{one.name} {words.seconds(one.seconds)}" for one in found)


def became(one: CandidateRecord) -> str:
    """ "bf16 1.20x, slower: why"; most reasons of what was measured begin with the ratio, and then it is not said twice."""
    ratio = "" if one.reason.startswith(f"{one.speedup or 0.0:.2f}x") else f" {words.ratio(one.speedup)}"
    return f"{one.id}{ratio}, {FATES[one.fate]}: {one.reason}"


def reason(one: CandidateRecord) -> str:
    """Why it has its fate, and how many answers it changed: a score may hide that."""
    percent = 100 * (one.flip_rate or 0.0)
    changed = f"; {percent:{'.2g' if percent < 10 else '.0f'}} % of its answers are others" if percent else ""
    return one.reason.rstrip(".") + changed if changed else one.reason


def kept(record: OptimizeRecord) -> CandidateRecord | None:
    """The winner among the candidates."""
    return next((one for one in record.candidates if one.fate == "kept"), None)


def lossless(one: CandidateRecord | None) -> bool:
    """Whether it computes the same up to the order of sums; such a winner needs no samples to certify it."""
    return one is not None and one.numerics in ("exact", "reordering")


def kept_words(record: OptimizeRecord) -> str:
    """What the winner is made of."""
    winner = kept(record)
    if winner is not None:
        return winner.id
    return " + ".join(str(part.get("id")) for part in record.best.recipe) if record.best else ""


def latency_words(found: Timing | None) -> str:
    if found is None:
        return ""
    return f"p50 {words.ms(found.p50)}, p90 {words.ms(found.p90)}, p99 {words.ms(found.p99)} ms per call"


def change_words(record: OptimizeRecord) -> str:
    """ "p50 77.5 -> 11.1, p99 80.1 -> 12.4 ms per call"."""
    before, best = record.baseline.latency_ms, record.best
    if best is None or before is None:
        return latency_words(best.latency_ms if best else before)
    parts = [
        f"{name} {words.ms(getattr(before, name))} -> {words.ms(getattr(best.latency_ms, name))}"
        for name in ("p50", "p99")
    ]
    batch = f" of {words.count(record.batch_size, 'sample')}" if record.batch_size else ""
    return f"{', '.join(parts)} ms per call{batch}"


def accuracy_words(record: OptimizeRecord) -> str:
    """What the winner scores and loses, beside what it may; "" without a winner."""
    best = record.best
    if best is None:
        return ""
    if best.verdict is None and best.accuracy is None:
        winner = kept(record)
        agreed = f"; outputs agree to {winner.agreement:.0f} dB" if winner and winner.agreement is not None else ""
        return f"no check was given: lossless candidates only{agreed}"
    parts = [] if best.accuracy is None else [f"score {best.accuracy:.4g}"]
    if best.accuracy_drop is not None:
        parts.append(
            f"drop {drop(best.accuracy_drop, record.relative)}{drop_interval(best.accuracy_drop_ci, record.relative)}"
            + (f" of {drop(record.max_drop, record.relative)} allowed" if record.max_drop is not None else "")
        )
    if best.verdict == "undecided" and best.samples_needed is not None:
        parts.append(f"about {best.samples_needed:,} samples needed in all")
    return ", ".join([*parts, *([best.verdict] if best.verdict else [])])


def lossless_words(record: OptimizeRecord) -> str:
    best, other = record.best, record.best_lossless
    if other is None or best is None or other.id == kept_words(record):
        return ""
    if other.id == record.baseline.id:
        return "no lossless candidate beats the model itself"
    over, why = "", ""
    if best.speedup_over_lossless is not None:
        over = f"{words.ratio(best.speedup_over_lossless, best.speedup_over_lossless_ci)} over the best lossless: "
    elif best.speedup_over_lossless_reason:
        why = f"; how much faster the best is than that is not known: {words.one_line(best.speedup_over_lossless_reason)}"
    return f"{over}{other.id}" + (f" {words.ratio(other.speedup)}" if other.speedup is not None else "") + why


def memory_words(record: OptimizeRecord) -> str:
    """ "peak 212 MiB instead of 512 MiB, stored 45 MiB"."""
    best = record.best
    if best is None:
        return ""
    parts = []
    if best.peak_memory_bytes is not None:
        before = record.baseline.peak_memory_bytes
        parts.append(
            f"peak {show(best.peak_memory_bytes)}" + (f" instead of {show(before)}" if before is not None else "")
        )
    if best.size_bytes is not None:
        parts.append(f"{show(best.size_bytes)} stored")
    return ", ".join(parts)


def stored_words(one: CandidateRecord) -> str:
    """ "45.0 MiB", "0.61 MiB compressed": of what was stored, and of weights that are there to be compressed."""
    sizes = [show(one.size_bytes)] if one.size_bytes is not None else []
    return ", ".join([*sizes, *([f"{show(one.compressed_bytes)} compressed"] if one.compressed_bytes is not None else [])])


def took_words(seconds: float, given_s: float | None, phases: Sequence[Phase] = ()) -> str:
    """`phases`: what they went into, which is said where they were more than was given: the longest first.

    >>> took_words(74.0, 40.0), took_words(38.0, 40.0)
    ('1 min 14 s, more than the 40 s given: what is begun or best is not cut off', '38 s of the 40 s given')
    >>> took_words(74.0, 40.0, [Phase(name="start", seconds=12.0), Phase(name="search", seconds=1.0), Phase(name="winner", seconds=61.0)])
    '1 min 14 s, more than the 40 s given: winner 1 min 01 s, start 12 s'
    """
    took, given = words.seconds(seconds), words.seconds(given_s)
    if given_s is None:
        return took
    if seconds <= given_s:
        return f"{took} of the {given} given"
    longest = sorted((one for one in phases if one.seconds >= _SMALL * seconds), key=lambda one: -one.seconds)
    return f"{took}, more than the {given} given: {_phases(longest) or 'what is begun or best is not cut off'}"


def lost(record: OptimizeRecord) -> tuple[str, str]:
    """How many candidates had each fate but `kept`, and the fastest of those that were refused, with the reason."""
    counts = [
        f"{number} {FATES[fate]}"
        for fate in FATES
        if fate != "kept" and (number := sum(one.fate == fate for one in record.candidates))
    ]
    least = 0.0 if record.baseline.fate == "over_limit" else 1.0         # a model that passes a limit is no choice
    least = record.best.speedup if record.best else least
    refused = [one for one in record.candidates if one.fate in _LOST and (one.speedup or 0.0) > least]
    if not refused:
        return ", ".join(counts), ""
    first = max(refused, key=lambda one: one.speedup or 0.0)
    return ", ".join(counts), became(first)


def drop(value: float | None, relative: bool) -> str:
    """A drop of the score as short as its size allows: in the score's own points, or where it is `relative`, in per
    cent of the baseline's score.

    >>> drop(0.01, False), drop(0.00123, False), drop(-2.5, False), drop(0.0, False), drop(0.01, True)
    ('0.01', '0.00123', '-2.5', '0', '1%')
    """
    if value is None:
        return words.UNMEASURED
    return f"{100 * value:.3g}%" if relative else f"{value:.3g}"


def drop_interval(interval: tuple[float, float] | None, relative: bool) -> str:
    return "" if interval is None else f" [{drop(interval[0], relative)}, {drop(interval[1], relative)}]"


def next_command(record: OptimizeRecord) -> str:
    if record.artifact and record.best is not None:
        size = record.batch_size or 1
        sizes = ",".join(map(str, sorted({1, size, 4 * size})))
        return words.shell(["saturate", "bench", record.artifact, "--batch", sizes])
    if record.baseline.fate == "failed":
        return "saturate doctor"
    return f"saturate explain {record.verdict}"
