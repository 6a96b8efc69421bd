"""An optimization as one self-contained HTML file: no script, nothing loaded, everything escaped."""

from __future__ import annotations

import itertools

import msgspec

from saturate.records.inference import CandidateRecord, OptimizeRecord
from saturate.records.sizes import show
from saturate.report import analysis_html, svg, words
from saturate.report import inference as tables
from saturate.report import inference_charts as charts
from saturate.report import inference_words as say
from saturate.report.markup import Markup, join, table, tag, with_interval
from saturate.report.page import Drawn, embedded, fitted
from saturate.report.sections import facts, section
from saturate.report.trim import Limits, within

#: Fields whose keys are data.
_MAPPINGS = frozenset({"limits", "options"})

_CODE_LIMIT = 20_000  # characters of the lines that reproduce the winner
TIMES = "\u00d7"

#: The signs of `svg`, told apart by shape.
_SIGNS = {
    "kept": "kept",
    "dominated": "no_difference",
    "no_difference": "no_difference",
    "slower": "slower",
    "inconclusive": "inconclusive",
    "undecided": "inconclusive",
    "over_limit": "rejected_numerics",
    "rejected_accuracy": "rejected_numerics",
    "rejected_behaviour": "rejected_numerics",
    "not_deployable": "not_applied",
    "not_applied": "not_applied",
    "failed": "failed",
    "not_applicable": "not_applicable",
    "not_tried": "not_tried",
}


def render(record: OptimizeRecord) -> str:
    """The page, less than `page.MAX_BYTES` in UTF-8. Long texts and lists are cut only as far as the size
    demands, and the page says so."""
    # The winner first: what is cut is cut from the end.
    record = msgspec.structs.replace(record, candidates=tables.rows(record))
    winner = say.kept(record)
    serve, code = (words.clean(text)[:_CODE_LIMIT] for text in (record.serve, winner.code if winner is not None else ""))
    whole = msgspec.to_builtins(record)

    def draw(limits: Limits) -> Drawn:
        flat, cuts = within(whole, limits, _MAPPINGS)
        shown = msgspec.convert(flat, OptimizeRecord)
        return embedded(shown), lambda data: _page(shown, data, cuts, serve, code)

    return fitted(analysis_html.LADDER, draw)


def _page(shown: OptimizeRecord, data: Markup, cuts: list[str], serve: str, code: str) -> str:
    sections = [
        ("pareto", "Latency", _picture(shown)),
        ("throughput", "Throughput", _throughput(shown)),
        ("decisions", "Candidates", _decisions(shown)),
        ("lost", "Why the others lost", _lost(shown)),
        ("reproduce", "Reproduce", _reproduce(shown, serve, code)),
        ("method", "Method", _method(shown, cuts)),
    ]
    body = [(anchor, name, part) for anchor, name, part in sections if part is not None]
    return analysis_html.shell(say.title(shown), _header(shown), body, data, rules=charts.RULES)


def _header(record: OptimizeRecord) -> Markup:
    best = record.best
    over = (
        [("Over the best lossless", words.ratio(best.speedup_over_lossless, best.speedup_over_lossless_ci, TIMES))]
        if best is not None and say.lossless_words(record) and best.speedup_over_lossless is not None
        else []
    )
    pairs: list[tuple[str, object]] = [
        *over,
        ("Device", record.device),
        ("Objective", record.objective),
        ("Batch", str(record.batch_size) if record.batch_size else "varies"),
        *_budget(record),
        *(_limit(name, value) for name, value in record.limits.items()),
        ("Candidates", str(len(record.candidates))),
        ("Search", say.took_words(record.seconds, record.given_s, record.phases)),
        ("Machine", record.machine),
        ("torch", record.torch),
    ]
    notes = (
        tag("ul", *(tag("li", note) for note in record.notes), class_="notes small", aria_label="Notes")
        if record.notes
        else ""
    )
    brand = tag("p", tag("b", "saturate"), f" optimize: {record.model}, run {record.run}", class_="brand")
    lede = say.accuracy_words(record) if record.best is not None else say.why_nothing(record)
    return tag(
        "header",
        brand,
        tag("h1", say.title(record, TIMES, interval=False)),
        tag("p", words.capital(lede), class_="lede"),
        _change(record) or "",
        facts(pairs),
        notes,
        class_="win" if say.won(record) else None,
    )


def _budget(record: OptimizeRecord) -> list[tuple[str, str]]:
    if record.max_drop is None:
        return [("Accuracy budget", "lossless only")]
    sure = "point estimates" if record.confidence is None else f"{100 * record.confidence:.4g}%"
    return [("Accuracy budget", say.drop(record.max_drop, record.relative)), ("Confidence", sure)]


def _limit(name: str, value: float) -> tuple[str, str]:
    """Of memory in the unit of the tables, too."""
    if name == "peak_memory_gb":
        return "peak memory", f"at most {value:g} GB ({show(1e9 * value)})"
    return name.replace("_", " "), f"at most {value:g}"


def _change(record: OptimizeRecord) -> Markup | None:
    """The model as it is, the best lossless candidate, and the best: bars, and the numbers of all three."""
    base = record.baseline.latency_ms
    if base is None:
        return None
    found = [("as it is", record.baseline, "base")]
    if record.best_lossless is not None and record.best_lossless.id not in (record.baseline.id, say.kept_words(record)):
        found.append(("best lossless", record.best_lossless, "base"))
    if record.best is not None:
        found.append(("best", record.best, "tuned"))
    timed = [(name, one, one.latency_ms, css) for name, one, css in found if one.latency_ms is not None]
    full = 1.05 * max(times.p50 for _, _, times, _ in timed)
    rows, numbers = [], []
    for name, one, times, css in timed:
        ci = one.speedup_ci if one is not record.baseline else None
        ends = (base.p50 / ci[1], base.p50 / ci[0]) if ci is not None and min(ci) > 0 else None
        rows.append(
            tag(
                "li",
                tag("span", name),
                svg.bar(times.p50, full, label=f"{name}: {words.ms(times.p50)} ms", css=css, interval=ends),
                tag("span", join([tag("b", words.ms(times.p50)), " ms"]), class_="value"),
            )
        )
        speed = words.ratio(one.speedup, ci, TIMES) if one.speedup is not None and one is not record.baseline else ""
        numbers.append(
            [
                name,
                words.ms(times.p50),
                words.ms(times.p90),
                words.ms(times.p99),
                speed,
                _bytes(one.peak_memory_bytes),
                _bytes(one.size_bytes),
            ]
        )
    return tag(
        "div",
        tag("ol", *rows, class_="rows short"),
        table(
            ["", "p50 ms", "p90 ms", "p99 ms", "Speed-up", "Peak memory", "Stored"],
            numbers,
            label="Baselines and best",
            numeric=(1, 2, 3, 4, 5, 6),
        ),
    )


def _picture(record: OptimizeRecord) -> Markup | None:
    drawn = charts.pareto(record)
    if drawn is not None:
        return section(
            "pareto", "Latency and accuracy", "Up and left is better. What loses more than the picture shows sits at its lower edge.",
            charts.key(), drawn)
    drawn = charts.bars(record)
    if drawn is None:
        return None
    return section("pareto", "Latency", "The fastest candidates; nothing was scored. Whiskers are intervals.", drawn)


def _throughput(record: OptimizeRecord) -> Markup | None:
    """Samples per second at every batch size, in one process and in several."""
    if not record.throughput:
        return None
    ratio = record.throughput_ratio
    raced = (
        f"At their best settings the winner gives {words.ratio(ratio, record.throughput_ratio_ci, TIMES)} the samples "
        "per second, raced in fresh processes."
        if ratio is not None
        else "There was no race of the two best settings."
    )
    within = " and stays within the limits" if record.limits else ""
    return section(
        "throughput", "Throughput",
        f"The batch doubles while that pays{within}, then processes that share the threads are added. {raced}",
        table(
            ["Of", "Batch", "Processes", "Samples per second", ""],
            tables.throughput_rows(record),
            label="Throughput by batch size and processes",
            numeric=(1, 2, 3),
        ),
    )


def _decisions(record: OptimizeRecord) -> Markup | None:
    if not record.candidates:
        return None
    places = itertools.count(1)
    rows = [_decision(next(places) if one.latency_ms is not None else None, one, record.relative) for one in record.candidates]
    return section(
        "decisions", "Candidates",
        "Everything that was considered, and what became of it. Latency in milliseconds per call; speed-up over the model as it is.",
        table(
            ["Candidate", "Fate", "p50 / p90 / p99", "Speed-up", "Drop", "Memory", "Stored"],
            rows,
            label="Every candidate",
            numeric=(2, 3, 4, 5, 6),
            short=(1,),
            class_="stacked many decisions small",
        ),
    )


def _decision(place: int | None, one: CandidateRecord, relative: bool) -> list[object]:
    """`place`: among those that were measured; what was not has none."""
    times = one.latency_ms
    latency = " / ".join(words.ms(value) for value in (times.p50, times.p90, times.p99)) if times else ""
    prepared = _prepared(one)
    done = "".join(f" {words.capital(said.rstrip('.'))}." for said in one.done if said)
    layers = (
        f" {words.count(len(one.kept_layers), 'layer')} kept in the original precision." if one.kept_layers else ""
    )
    return [
        join(
            [
                tag("b", one.id if place is None else f"{place}. {one.id}"),
                tag("span", f"{words.capital(say.reason(one).rstrip('.'))}.{layers}{done}{prepared}", class_="sub"),
            ]
        ),
        tag("span", svg.sign(_SIGNS[one.fate]), say.FATES[one.fate], class_="fate"),
        latency,
        with_interval(words.ratio(one.speedup, one.speedup_ci, TIMES)) if one.speedup is not None else "",
        with_interval(f"{say.drop(one.accuracy_drop, relative)}{say.drop_interval(one.accuracy_drop_ci, relative)}")
        if one.accuracy_drop is not None
        else "",
        _bytes(one.peak_memory_bytes),
        say.stored_words(one),
    ]


def _prepared(one: CandidateRecord) -> str:
    """What comes before the steady state: quantizing, compiling and the like, and the first call, which may compile as well."""
    if one.prepare_s is None:
        return ""
    first = "" if one.first_call_s is None else f", first call in {_brief(one.first_call_s)}"
    compiling = "" if one.compile_s is None else f"; compilers took {_brief(one.compile_s)} of this"
    return f" Prepared in {words.seconds(one.prepare_s)}{first}{compiling}."


def _brief(value_s: float) -> str:
    return words.seconds(value_s) if value_s >= 1 else f"{1e3 * value_s:.3g} ms"


def _bytes(size: int | None) -> str:
    return show(size) if size is not None else ""


def _lost(record: OptimizeRecord) -> Markup | None:
    """Per fate: how many, what it means, and the fastest of them with its reason."""
    rows: list[list[object]] = []
    for fate, meaning in say.MEANINGS.items():
        those = [one for one in record.candidates if one.fate == fate]
        if not those:
            continue
        first = max(those, key=lambda one: one.speedup or 0.0)
        told = first.speedup is None or first.reason.startswith(f"{first.speedup:.2f}x")
        speed = "" if told else f" {words.ratio(first.speedup, first.speedup_ci, TIMES)}"
        example = "" if first.fate == "dominated" and not first.reason else f"{first.id}{speed}: {first.reason}"
        rows.append(
            [
                join([tag("span", svg.sign(_SIGNS[fate]), f"{len(those)} {say.FATES[fate]}", class_="fate")]),
                meaning,
                example,
            ]
        )
    if not rows:
        return None
    return section("lost", "Why the others lost", None,
                   table(["Fate", "What it means", "The fastest of them"], rows, label="Fates", short=(0,)))


def _reproduce(record: OptimizeRecord, serve: str, code: str) -> Markup:
    parts: list[object] = []
    if serve:
        parts += [tag("li", tag("p", "The stored program, without saturate:"), tag("pre", serve))]
    if code:
        parts += [tag("li", tag("p", "The same made again of your model, without saturate:"), tag("pre", code))]
    if record.artifact:
        parts += [
            tag(
                "li",
                tag("p", "The stored program, with saturate:"),
                tag("pre", f"import saturate\nbest = saturate.load({record.artifact!r})\nanswer = best(*inputs)"),
            ),
            tag(
                "li",
                tag(
                    "p",
                    "The artifact's manifest.json names the format, its reproduce.py holds all the lines without saturate, "
                    "and docs/optimize.md shows how ONNX Runtime, plain PyTorch and a serving engine load it.",
                ),
            ),
        ]
    parts.append(tag("li", tag("p", "Next:"), tag("pre", say.next_command(record))))
    return section("reproduce", "Reproduce", None, tag("ul", *parts, class_="steps"))


def _method(record: OptimizeRecord, cuts: list[str]) -> Markup:
    lines = [
        "Each candidate runs in a process of its own. Latency is raced: blocks of calls of two programs take turns "
        "while the other is frozen, in fresh pairs of processes; the interval is of the ratio.",
        "The best was stored, loaded again in a fresh process, and measured and scored there, on samples that the "
        "selection had not used.",
        f"A drop counts in {'per cent of the score of the model as it is' if record.relative else 'points of the score'}, "
        "in the direction that is worse; its interval comes from the same samples answered by both.",
        *(f"Left out of this page for its size: {cut}" for cut in cuts),
    ]
    if record.best is None:
        del lines[1]
    return section("method", "Method", None, tag("ul", *(tag("li", line.rstrip(".") + ".") for line in lines)))
