"""The summary that a `saturate fit` ends with: at most twelve lines, the verdict first, the next command last."""

from __future__ import annotations

from saturate.records.fit import Fit, SizeThroughput
from saturate.records.sizes import show
from saturate.report import words
from saturate.report.cells import cells, cut, fit
from saturate.report.paint import BOLD, GREEN, MIN_WIDTH, YELLOW, labelled_line, paints

MAX_LINES = 12
LABEL = 12  # width of the label column
LEAST_BAR, MOST_BAR = 6, 60      # cells: a finer bar says no more

KINDS = {"parameters": "parameters", "gradients": "gradients", "optimizer_state": "optimizer state"}


def summary(found: Fit, *, width: int, color: bool, blocks: bool = True) -> str:
    """The record as plain lines without a trailing newline; `width` in terminal cells, which only paths and commands may
    exceed. `color` adds ANSI codes, `blocks` draws with block characters."""
    width = max(width, MIN_WIDTH)
    paint = paints(color)
    room = width - LABEL
    head = paint(fit(title(found), width), BOLD, GREEN if found.verdict == "fits" else YELLOW)
    tail = []
    if found.report:
        tail.append(labelled_line("report", words.clean(found.report), LABEL, paint))
    tail.append(labelled_line("next", words.typed(found.next_command), LABEL, paint, BOLD))
    lines = [(label, fit(text, room)) for label, text in _facts(found)]
    advice = [("then", fit(found.advice[0], room))] if found.advice else []
    knee = [("knee", fit(text, room)) for text in [knee_words(found)] if text]
    free = MAX_LINES - 1 - len(tail) - len(lines) - len(advice) - len(knee)
    chart = [("samples/s" if index == 0 else "", line) for index, line in enumerate(bars(found.throughput, found.knee, room, free, blocks))]
    body = [labelled_line(label, text, LABEL, paint) for label, text in [*lines, *chart, *knee, *advice]]
    return "\n".join([head, *body, *tail])


# -- words, shared with the page ---------------------------------------------------------------------------------------


def title(found: Fit) -> str:
    """The verdict in a few words."""
    limit = f" {show(found.limit_bytes)}" if found.limit_bytes else " the limit"
    if found.verdict == "fits":
        others = "".join(f" (beside it {one.micro_batch:,})" for one in found.loaders[1:])
        ranks = f" on each of {found.world_size} ranks" if found.world_size > 1 else ""
        if found.target == "throughput" and found.micro_batch != found.largest_fitting:
            return f"a batch of {found.micro_batch:,}{others}{ranks} is as fast as any that fits{limit}"
        return f"a batch of {found.micro_batch:,}{others}{ranks} fits{limit}" + lasting(found)
    if found.measured_batch is not None:
        return f"no batch was proved: {found.measured_batch:,} only ran for {found.measured_steps} steps"
    return {"nothing_fits": f"nothing fits{limit}", "refused": "cannot search its batch", "inconclusive": "no answer"}[found.verdict]


def lasting(found: Fit) -> str:
    return f" for about {found.lasts_steps:,} steps: memory grows" if found.lasts_steps is not None else ""


def growth_words(found: Fit) -> str:
    """Empty where memory does not grow from step to step."""
    if found.growth_bytes_per_step is None or found.lasts_steps is None or not found.limit_bytes:
        return ""
    return f"memory grows by {show(round(found.growth_bytes_per_step))} with every step: {show(found.limit_bytes)} last about {found.lasts_steps:,} steps"


def _facts(found: Fit) -> list[tuple[str, str]]:
    lines = []
    if found.reason:
        lines.append(("why", found.reason))
    if (words_of_growth := growth_words(found)):
        lines.append(("grows", words_of_growth))
    if found.micro_batch is None:
        return lines
    if found.script_batch is not None:
        own = " and ".join(f"{one.script_batch:,}" for one in found.loaders) or f"{found.script_batch:,}"
        lines.append(("by itself", f"the script uses {own}; largest tried {found.largest_tried:,}, "
                                   f"in {processes(found)} and {found.seconds:.0f} s"))
    lines += [("peak", peak_words(found)), ("of it", kinds_words(found)), ("proved", proof_words(found))]
    if found.not_seen:
        lines.append(("not seen", "; ".join(found.not_seen)))
    if found.target == "throughput" and not found.throughput and found.throughput_note:
        lines.append(("knee", f"not known: {found.throughput_note}"))
    return lines


def processes(found: Fit) -> str:
    return f"{found.trial_count} process{'es' if found.trial_count != 1 else ''}"


def peak_words(found: Fit) -> str:
    assert found.peak_bytes is not None and found.limit_bytes is not None and found.margin_bytes is not None
    predicted = f", predicted {show(found.predicted_peak_bytes)}" if found.predicted_peak_bytes is not None else ""
    return f"{show(found.peak_bytes)} of {show(found.limit_bytes)}{predicted}; margin {show(found.margin_bytes)}"


def kinds_words(found: Fit) -> str:
    parts = [f"{name} {show(found.kinds[key])}" for key, name in KINDS.items() if found.kinds.get(key)]
    if found.sample_bytes:
        parts.append(f"each sample {show(found.sample_bytes)}")
    return ", ".join(parts)


def proof_words(found: Fit) -> str:
    return f"{found.proved_steps} steps" + (f", with {', '.join(found.proved_with)}" if found.proved_with else "")


def knee_words(found: Fit) -> str:
    if found.knee is None:
        return ""
    busy = f"; {found.utilisation:.0%} of {found.utilisation_of} busy there" if found.utilisation is not None else ""
    best = max(found.throughput, key=lambda one: one.samples_per_s).micro_batch
    return f"from {found.knee:,} on, larger batches are no faster{busy}" if found.knee != best else \
        f"{found.knee:,} is the fastest{busy}"


def spread(one: SizeThroughput) -> float:
    """Half of the interval, as a share of the rate."""
    return (one.ci[1] - one.ci[0]) / 2 / one.samples_per_s


def rate(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def _shown(curve: list[SizeThroughput], knee: int | None, room: int) -> list[SizeThroughput]:
    """At most `room` of them: the large ones, and the knee."""
    if room <= 0:
        return []
    shown = curve[-room:]
    missing = [one for one in curve if one.micro_batch == knee and one not in shown]
    return [*missing, *shown[len(missing):]]


def bars(curve: list[SizeThroughput], knee: int | None, width: int, room: int, blocks: bool) -> list[str]:
    """One line per size, at most `room`: size, bar, rate with its interval."""
    shown = _shown(curve, knee, room)
    if not shown:
        return []
    left = max(len(f"{one.micro_batch:,}") for one in shown)
    numbers = [f"{rate(one.samples_per_s)} +-{spread(one):.0%}" for one in shown]
    right = max(map(cells, numbers))
    length = min(MOST_BAR, width - left - right - 4)
    most = max(one.samples_per_s for one in shown)
    lines = []
    for one, number in zip(shown, numbers):
        bar = ""
        if length >= LEAST_BAR:
            filled = max(1, round(length * one.samples_per_s / most))
            bar = ("\u2588" if blocks else "#") * filled + " " * (length - filled) + "  "
        lines.append(cut(f"{one.micro_batch:>{left},}  {bar}{number:>{right}}", width))
    return lines
