"""What a record says, in words and numbers: shared by the terminal summary and the HTML report."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

from saturate.errors import clean as clean
from saturate.records import sizes
from saturate.records.command_line import quoted
from saturate.records.result import StepTime, StudyRecord, TechniqueOutcome

Kind = Literal["win", "fits", "fits_unverified", "too_big", "nothing", "slower", "unverified", "cannot_verify", "noisy", "inconclusive"]

#: Fate -> the word a reader sees, in the order in which a reader asks about them.
FATES = {
    "kept": "kept",
    "rejected_numerics": "rejected",
    "failed": "failed",
    "not_applied": "not applied",
    "slower": "slower",
    "inconclusive": "inconclusive",
    "no_difference": "no difference",
    "not_tried": "not tried",
    "not_applicable": "not applicable",
}

_WRONG = ("rejected_numerics", "failed", "not_applied")

UNMEASURED = "not measured"


def one_line(text: str) -> str:
    """`text` cleaned, with every run of white space as one space."""
    return " ".join(clean(text).split())


def capital(text: str) -> str:
    """The text with a capital first; what follows stays as it is, as in names."""
    return text[:1].upper() + text[1:]


def ms(value: float | None) -> str:
    """Milliseconds to four significant digits or so, without the unit."""
    if value is None:
        return UNMEASURED
    if not math.isfinite(value):
        return "not finite"
    if value == 0:
        return "0"
    size = abs(value)
    digits = 0 if size >= 10_000 else 1 if size >= 10 else 2 if size >= 1 else 3 if size >= 0.1 else 4
    return f"{value:,.{digits}f}" if size >= 0.001 else f"{value:.1e}"


def seconds(value: float | None) -> str:
    """A duration with its unit, as short as a reader needs: "0.8 s", "12 s", "4 min 05 s", "2 h 10 min"."""
    if value is None:
        return UNMEASURED
    if not math.isfinite(value):
        return "not finite"
    if value < 10:
        return f"{value:.1f} s"
    whole = round(value)
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60:02d} s"
    return f"{whole // 3600} h {whole % 3600 // 60:02d} min"


def count(number: int, noun: str) -> str:
    """ "1 trial", "1,240 trials"."""
    return f"{number:,} {noun}" if number == 1 else f"{number:,} {noun}s"


#: Above this ratio, a bound says that it concerns nearly the whole step, and nothing about what can be reached.
TELLING_BOUND = 20.0


def bound(most: float, times: str = "x") -> str:
    """The most that mending a cause could give, as a ratio of speeds: "at most 1.51x"."""
    return f"at most {ratio(most, times=times)}" if most <= TELLING_BOUND else "nearly the whole step"


def ratio(value: float | None, interval: tuple[float, float] | None = None, times: str = "x") -> str:
    """A speed-up with its interval: "1.79x [1.77, 1.80]". Three decimals where two would hide the difference."""
    if value is None:
        return UNMEASURED
    digits = 3 if abs(value - 1) < 0.1 else 2
    text = f"{value:.{digits}f}{times}"
    return text if interval is None else f"{text} [{interval[0]:.{digits}f}, {interval[1]:.{digits}f}]"


def gain(value: float | None) -> str:
    """A gain (0.21) as "+21.0 %"."""
    return UNMEASURED if value is None else f"{100 * value:+.1f} %"


def gain_interval(interval: tuple[float, float] | None) -> str:
    """The interval of a gain, in per cent: "[+20.1, +21.8]"; empty when there is none."""
    return "" if interval is None else f"[{100 * interval[0]:+.1f}, {100 * interval[1]:+.1f}]"


def memory(peak_bytes: int | None, before_bytes: int | None = None) -> str:
    """A peak, and how it differs from the baseline's: "3.21 GiB (-37 %)"; "" when it was not measured."""
    if peak_bytes is None:
        return ""
    more = round(100 * (peak_bytes / before_bytes - 1)) if before_bytes else 0
    return sizes.show(peak_bytes) + (f" ({more:+} %)" if more else "")


def percent(value: float | None) -> str:
    """A share (0.012) as "1.2 %"."""
    return UNMEASURED if value is None else f"{100 * value:.1f} %"


def options(outcome: TechniqueOutcome) -> str:
    """Options of a technique on one line: "dtype=bfloat16, dynamic=false"."""
    shown = {True: "true", False: "false"}
    return ", ".join(
        f"{key}={shown[value] if isinstance(value, bool) else value}" for key, value in outcome.options.items()
    )


@dataclass(frozen=True)
class Headline:
    """The answer of a study: `title`, the numbers behind it (`detail`), and `why`; the last two may be empty."""

    kind: Kind
    title: str
    detail: str
    why: str


def kept(record: StudyRecord) -> list[TechniqueOutcome]:
    """The kept techniques, the largest marginal gain first."""
    found = [outcome for outcome in record.result.techniques if outcome.fate == "kept"]
    return sorted(found, key=lambda outcome: -(outcome.gain or 0.0))


#: Without a final race, a study is undecided for want of time rather than for noise, unless the noise is this many times
#: the gain that counts.
NOISY_WITHOUT_A_FINAL_RACE = 5.0

#: Noise that is not resolved must be as large to have been measured: what two processes of any program may differ by makes 2.8 % of
#: a single pair of the baseline on the quietest machine, and of the two pairs of a final race as much. More pairs help against that.
NOISE = 0.04

FINAL_RACE = "final"

#: Of a `tune` without --budget.
USUAL_BUDGET_S = 600.0

#: Where only the least is known.
NOT_BEFORE = "not before "

#: Where a final race found no gain.
NEVER = "never: its steps are no faster than those of the baseline"


def _kind(record: StudyRecord) -> Kind:
    result = record.result
    if result.fits is False:
        return "too_big"
    if result.verified is False:
        return "unverified"
    if result.fits and kept(record) and not _fits_by_itself(record) and result.verdict != "faster":
        return "fits" if result.verified else "fits_unverified"
    if result.verdict == "faster":
        return "win" if result.verified else "cannot_verify"
    if result.verdict == "no_difference":
        return "nothing"
    if result.verdict == "slower":
        return "slower"
    finished = result.speedup_ci is not None
    if record.out_of_time:
        return "inconclusive"
    # Where nothing was raced, or the final race had one pair, time was short, however much the baseline differs from itself.
    noisy = not _one_pair(record) and (finished or _anything_raced(record)) and result.noise_floor is not None and result.noise_floor >= record.threshold * (
        1.0 if finished else NOISY_WITHOUT_A_FINAL_RACE) and max(result.noise_floor, _half_width(record)) >= NOISE
    # A clear race that nobody could verify is a question of numerics, however noisy the machine.
    undecided = finished and result.speedup_ci[0] <= 1 + record.threshold       # type: ignore[index]
    if result.verified is None and result.verified_reason and not (noisy and undecided):
        return "cannot_verify"
    return "noisy" if noisy else "inconclusive"


def _half_width(record: StudyRecord) -> float:
    """Of the interval of the final race, as a share; 0 without one."""
    low, high = record.result.speedup_ci or (1.0, 1.0)
    return math.sqrt(high / low) - 1 if low > 0 else math.inf


def _one_pair(record: StudyRecord) -> bool:
    """Whether the budget ended before the final race had a second pair."""
    return any(race.question == FINAL_RACE and race.pairs < 2 for race in record.races)


def _anything_raced(record: StudyRecord) -> bool:
    return any(outcome.gain is not None for outcome in record.result.techniques)


def _fits_by_itself(record: StudyRecord) -> bool:
    """Whether the baseline keeps the limit; one that ran out of memory has left no peak, or one that is too low."""
    before, limit = record.result.baseline_peak_bytes, record.result.limit_bytes
    return record.result.baseline.step_ms is not None and before is not None and limit is not None and before <= limit


def memory_change(record: StudyRecord) -> str:
    """ "peak 3.21 GiB instead of 5.13 GiB, limit 4.00 GiB"; "" without a limit."""
    result = record.result
    if result.limit_bytes is None or result.peak_bytes is None:
        return ""
    before = result.baseline_peak_bytes if result.baseline.step_ms is not None else None
    instead = f" instead of {sizes.show(before)}" if before and kept(record) else ""
    return f"peak {sizes.show(result.peak_bytes)}{instead}, limit {sizes.show(result.limit_bytes)}"


def headline(record: StudyRecord, times: str = "x") -> Headline:
    """The answer of the study: title, numbers, reason. `times` is the sign after a speed-up."""
    result, kind = record.result, _kind(record)
    speed = ratio(result.speedup, result.speedup_ci, times)
    before, after = result.baseline.step_ms, result.tuned.step_ms
    change = f"{ms(before)} -> {ms(after)} ms/step" if before is not None and after is not None else ""
    stays = f"the baseline stays at {ms(before)} ms/step" if before is not None else "the step was not measured"
    raced = f"final race {speed}" if result.speedup_ci is not None else stays
    reason = result.verified_reason
    if kind == "win":
        return Headline(kind, f"{speed.replace(times, f'{times} faster', 1)}, verified", change, moved(record))
    if kind in ("fits", "fits_unverified"):
        title = "Fits, verified" if kind == "fits" else "Fits, not compared with the baseline"
        detail = ", ".join(filter(None, (memory_change(record), change and f"{speed}, {change}")))
        return Headline(kind, title, detail, moved(record) if kind == "fits" else reason)
    if kind == "too_big":
        return Headline(kind, "Does not fit", raced, reason or memory_change(record))
    if kind == "unverified":
        return Headline(kind, "Not verified, no set trains like the baseline", raced, reason)
    if kind == "cannot_verify":
        measured = f"measured {speed}, {change or stays}" if result.speedup is not None else stays
        return Headline(kind, "Cannot verify, so nothing is claimed", measured, reason)
    if kind == "nothing":
        title = "No difference" if kept(record) else "Nothing safe helps" if _anything_tried(record) else "Nothing could be tried"
        return Headline(kind, title, stays if not kept(record) else raced, best_tried(record) or reason)
    if kind == "slower":
        return Headline(kind, "Nothing helps, the best set is slower", raced, best_tried(record) or reason)
    if kind == "noisy":
        floor = f"differences below {percent(result.noise_floor)} cannot be seen here; {best_tried(record, ('inconclusive',)) or _counts_from(record)}"
        return Headline(kind, "Too noisy to decide", raced, floor)
    if result.speedup_ci is None:       # nothing came as far as a final race
        why = _NONE_HELPS if _anything_tried(record) else _NO_TURN
        if record.out_of_time or not any(outcome.fate == "not_tried" for outcome in result.techniques):
            why = reason
        unmeasured = next((f"{o.id}: {o.reason}" for o in result.techniques if o.fate == "inconclusive" and o.reason), "")
        return Headline(kind, "Undecided within the budget", raced, best_tried(record, ("inconclusive",)) or unmeasured or why)
    if _one_pair(record):
        return Headline(kind, "Undecided within the budget", raced, "the budget ended before the final race had a second pair of processes")
    return Headline(kind, "Inconclusive", raced, "the interval neither reaches nor excludes a gain that counts; a longer --budget has time for more pairs")


def _anything_tried(record: StudyRecord) -> bool:
    """Also several at once, which says nothing of any of them."""
    return (any(outcome.fate not in ("not_applicable", "not_tried") for outcome in record.result.techniques)
            or any(race.a != race.b for race in record.races))


def _counts_from(record: StudyRecord) -> str:
    return f"a gain counts from {percent(record.threshold)}"


def moved(record: StudyRecord, parts: int = 2) -> str:
    """Where the time went: the parts of a step that changed most, "input wait 66.0 -> 2.1 ms, ..."."""
    before, after = record.split_before, record.split_after
    if not before or not after or unexplained(record):
        return ""
    names = list(dict.fromkeys([*before, *after]))
    by_change = sorted(names, key=lambda name: -abs(before.get(name, 0.0) - after.get(name, 0.0)))
    return ", ".join(
        f"{name} {ms(before.get(name, 0.0))} -> {ms(after.get(name, 0.0))} ms" for name in by_change[:parts]
    )


def unexplained(record: StudyRecord) -> bool:
    """Whether the two looks at a step's parts show less than half of what the races found (as logarithms). They are of a few steps
    of one process each: where processes of one program differ, "backward 19 -> 23 ms" would stand beside "faster"."""
    before, after = sum(record.split_before.values()), sum(record.split_after.values())
    speedup = record.result.speedup or 1.0
    return bool(before and after and speedup > 1.0) and before / after < math.sqrt(speedup)


#: Why a study is undecided in which nothing that was raced is.
_NONE_HELPS = "what was tried shows no gain that counts, and the budget ended before the rest had a turn"
_NO_TURN = "the budget ended before anything could be tried"


def best_tried(record: StudyRecord, fates: tuple[str, ...] = ("no_difference", "inconclusive")) -> str:
    """The technique that came closest without being kept, of those with one of these fates, or ""."""
    tried = [o for o in record.result.techniques if o.gain is not None and o.fate in fates]
    if not tried:
        return ""
    best = max(tried, key=lambda outcome: outcome.gain or 0.0)
    numbers = f"{gain(best.gain)} {gain_interval(best.gain_ci)}".strip()
    return f"closest: {best.id} {numbers}; {_counts_from(record)}"


def dropped(record: StudyRecord) -> tuple[list[str], str]:
    """How many techniques had each fate but `kept` (["1 rejected", "2 failed"]), and the reason that matters most
    ("id rejected: why"); "" when nothing went wrong, it was only not worth it."""
    outcomes = [outcome for outcome in record.result.techniques if outcome.fate != "kept"]
    numbers = {fate: sum(outcome.fate == fate for outcome in outcomes) for fate in FATES}
    wrong = [outcome for outcome in outcomes if outcome.fate in _WRONG and outcome.reason]
    # Among equals the one that would have given most: that is the loss a reader wants explained.
    first = min(wrong, key=lambda outcome: (_WRONG.index(outcome.fate), -(outcome.gain or 0.0)), default=None)
    return (
        [f"{number} {FATES[fate]}" for fate, number in numbers.items() if number],
        f"{first.id} {FATES[first.fate]}: {first.reason}" if first else "",
    )


def break_even(record: StudyRecord) -> str:
    """After how many steps the recipe has paid for its longer start; "" when nothing is kept, or nobody knows why nobody knows."""
    steps, step_ms, reason = record.result.break_even_steps, record.result.tuned.step_ms, record.result.break_even_reason
    if not kept(record):
        return ""
    if steps is None:
        return reason if reason in ("", NEVER) or reason.startswith(NOT_BEFORE) else f"not known: {reason}"
    if steps == 0:
        return "at once: it starts no slower than the baseline"
    return f"after {_training(steps, step_ms)}"


def start(time: StepTime) -> str:
    """What comes before the steady state; "" where nothing of it was timed."""
    spans = (("start-up", time.startup_s), ("warm-up", time.warmup_s), ("compiling (in these, with cold caches)", time.compile_s))
    parts = [f"{name} {seconds(value)}" for name, value in spans if value is not None]
    if parts and time.recompiles:
        parts.append(count(time.recompiles, "recompilation"))
    return ", ".join(parts)


def not_before(steps: int, step_ms: float) -> str:
    """Why nobody knows after how many steps a recipe has paid for its start, where so many are too few."""
    return f"{NOT_BEFORE}{_training(steps, step_ms)}: no start of the final set was timed until its steps were steady"


def _training(steps: int, step_ms: float | None) -> str:
    return count(steps, "step") + ("" if step_ms is None else f" (about {seconds(steps * step_ms / 1000)})")


def shell(command: list[str]) -> str:
    """A command as a shell takes it, without characters that a terminal could act on. Values that were left out (\u2026) are
    not quoted: they are to be replaced."""
    return " ".join(word if "\u2026" in word and quoted(word.replace("\u2026", "x")) == word.replace("\u2026", "x") else quoted(word)
                    for word in command)


def typed(command: str) -> str:
    """A command of a record as it is shown: on one line whatever the record holds, with every space of its quoted words."""
    return " ".join(clean(command).splitlines())


def run_command(record: StudyRecord) -> str:
    """The command that trains with the recipe."""
    return shell(["saturate", "run", record.result.recipe, "--", *record.result.command])


def again_command(record: StudyRecord) -> str:
    """The command that asks the same question again: it resumes the study, or repeats it where it is finished. What it was given more time
    for than it takes by itself was not decided in that, and would be less so in less."""
    longer = record.budget_s > USUAL_BUDGET_S and "--budget" not in record.options
    budget = ["--budget", f"{math.ceil(record.budget_s / 60)}m"] if longer else []
    return shell(["saturate", "tune", *record.options, *budget, "--", *record.result.command])


def next_command(record: StudyRecord) -> str:
    """What to type next."""
    kind = _kind(record)
    if kind in ("win", "fits", "fits_unverified"):
        return run_command(record)
    if kind == "too_big" and "--budget" not in record.options:
        return shell(["saturate", "fit", *_options_of_fit(record), "--", *record.result.command])
    if kind in ("noisy", "inconclusive") or "--budget" in record.options:
        # The same command resumes the study: rounds that were measured are not measured again.
        return again_command(record)
    topic = {"unverified": "rejected_numerics", "nothing": "no_difference", "slower": "slower"}.get(
        kind, "inconclusive"
    )
    return f"saturate explain {topic}"


def _options_of_fit(record: StudyRecord) -> list[str]:
    """The same limit, to the byte, and what both verbs are told in the same words."""
    limit = record.result.limit_bytes
    given = dict(zip(record.options[::2], record.options[1::2]))
    same = [word for name in ("--step", "--timeout", "--dir") if name in given for word in (name, given[name])]
    return [*(["--memory", sizes.exact(limit)] if limit is not None else []), *same]
