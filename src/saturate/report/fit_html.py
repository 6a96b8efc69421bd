"""A fit as one self-contained HTML file: no script, nothing loaded, everything escaped."""

from __future__ import annotations

import msgspec

from saturate.records.fit import Fit, SizeTried
from saturate.records.sizes import show
from saturate.report import analysis_html, svg, words
from saturate.report import fit as say
from saturate.report.markup import Markup, table, tag
from saturate.report.page import Drawn, embedded, fitted
from saturate.report.sections import facts, section
from saturate.report.trim import LADDER, Limits, within, without_values

OUTCOMES = {
    "fits": "fits", "too_close": "runs, within the margin", "out_of_memory": "out of memory", "failed": "failed",
    "allocator_retries": "runs, the allocator had to free its cache", "out_of_time": "the budget ended",
}


def render(found: Fit) -> str:
    """The page, less than `page.MAX_BYTES` in UTF-8. Long texts and lists are cut only as far as the size demands, and the page says
    so. The command stands in it without the values of its arguments."""
    whole = msgspec.to_builtins(without_values(found))

    def draw(limits: Limits) -> Drawn:
        flat, cuts = within(whole, limits, frozenset({"kinds"}))
        shown = msgspec.convert(flat, Fit)
        return embedded(shown), lambda data: _page(shown, data, cuts)

    return fitted(LADDER, draw)


def _page(shown: Fit, data: Markup, cuts: list[str]) -> str:
    sections = [("memory", "Memory", _memory(shown)), ("throughput", "Throughput", _throughput(shown)),
                ("sizes", "Sizes", _sizes(shown)), ("method", "Method", _method(shown, cuts))]
    body = [(anchor, name, part) for anchor, name, part in sections if part is not None]
    return analysis_html.shell(say.title(shown), _header(shown), body, data)


def _header(found: Fit) -> Markup:
    pairs: list[tuple[str, object]] = [
        ("Script's own batch", f"{found.script_batch:,}" if found.script_batch else "unknown"),
        ("Largest that fits", f"{found.largest_fitting:,}" if found.largest_fitting else "none"),
        *([("Measured, not proved", f"{found.measured_batch:,}")] if found.measured_batch else []),
        # The section on throughput says what a knee is; without one, nothing does.
        ("Knee", f"{found.knee:,}" if found.knee else "unknown") if found.throughput else ("Throughput", "not measured"),
        ("Processes", str(found.trial_count)),
        ("Time", f"{found.seconds:.0f} s")]
    lede = found.reason or (say.peak_words(found) if found.micro_batch is not None else "")
    return tag(
        "header",
        tag("p", tag("b", "saturate"), " fit: ", tag("code", words.one_line(" ".join(found.command))), class_="brand"),
        tag("h1", words.capital(say.title(found))),
        tag("p", words.capital(lede), class_="lede"),
        facts(pairs),
        tag("ul", *(tag("li", words.capital(text) + ".") for text in found.advice), class_="notes") if found.advice else "",
        class_="win" if found.verdict == "fits" else None,
    )


def _memory(found: Fit) -> Markup | None:
    tried = [one for one in found.trials if one.peak_bytes and one.micro_batch is not None]
    if not tried or not found.limit_bytes:
        return None
    highest: dict[int, SizeTried] = {}
    for one in tried:
        before = highest.get(one.micro_batch or 0)
        if before is None or (one.peak_bytes or 0) > (before.peak_bytes or 0):
            highest[one.micro_batch or 0] = one
    full = 1.02 * max(found.limit_bytes, *(one.peak_bytes or 0 for one in highest.values()))
    rows = [tag("li", tag("span", f"{size:,} samples"),
                svg.bar(one.peak_bytes or 0, full, label=f"{size:,} samples: {show(one.peak_bytes or 0)}",
                        css="tuned" if one.outcome == "fits" else "base", reference=found.limit_bytes),
                tag("span", f"{show(one.peak_bytes or 0)}, {OUTCOMES[one.outcome]}", class_="value small"))
            for size, one in sorted(highest.items())]
    kinds = [[name, show(found.kinds[key])] for key, name in say.KINDS.items() if key in found.kinds]
    if found.sample_bytes is not None:
        kinds.append(["each sample of the batch", show(found.sample_bytes)])
    if found.fixed_bytes is not None:
        kinds.append(["everything that does not grow with the batch, including all of the above but the samples", show(found.fixed_bytes)])
    return section(
        "memory", "Memory",
        f"The peak of each size; the dashed line is the limit of {show(found.limit_bytes)}. Counted is {found.counted}.",
        tag("ul", *rows, class_="rows short"),
        table(["Held between steps", "Bytes"], [list(row) for row in kinds], label="Memory by kind", numeric=(1,)) if kinds else "",
    )


def _throughput(found: Fit) -> Markup | None:
    if not found.throughput:
        return None
    full = 1.05 * max(one.ci[1] for one in found.throughput)
    rows = [tag("li", tag("span", f"{one.micro_batch:,} samples" + (" (knee)" if one.micro_batch == found.knee else "")),
                svg.bar(one.samples_per_s, full, label=f"{one.micro_batch:,} samples: {say.rate(one.samples_per_s)} per second",
                        css="tuned" if one.micro_batch == found.knee else "base", interval=one.ci),
                tag("span", f"{say.rate(one.samples_per_s)} per second", class_="value"))
            for one in found.throughput]
    how = found.throughput_note or "Rounds of one short block of each size, in one process; the whisker is the 95 % interval over rounds"
    told = " ".join(f"{words.capital(text)}." for text in (how, say.knee_words(found)) if text)      # one size alone has no knee
    return section("throughput", "Throughput", told, tag("ul", *rows, class_="rows short"))


def _sizes(found: Fit) -> Markup | None:
    if not found.trials:
        return None
    rows: list[list[object]] = [
        [f"{one.micro_batch:,}" if one.micro_batch is not None else "as it is", OUTCOMES[one.outcome] + (f": {one.reason}" if one.reason not in ("", OUTCOMES[one.outcome]) else ""),
         show(one.peak_bytes) if one.peak_bytes else "unknown", str(one.steps), str(one.trial), f"{one.seconds:.1f} s"]
        for one in found.trials]
    return section("sizes", "Sizes that ran", "In the order in which they ran.",
                   table(["Batch", "Outcome", "Peak", "Steps", "Process", "Time"], rows, label="Sizes", numeric=(2, 3, 4, 5)))


def _method(found: Fit, cuts: list[str]) -> Markup:
    proof = [say.proof_words(found)] if found.micro_batch is not None else []
    lines = [*(f"Proved for {text}" for text in proof), *(f"Not seen: {text}" for text in found.not_seen), *found.notes]
    if (grows := say.growth_words(found)):
        lines.append(grows)
    if found.throughput_note and not found.throughput:
        lines.append(words.capital(found.throughput_note))
    lines += [f"Left out of this page for its size: {cut}" for cut in cuts]
    if found.margin_bytes:
        lines.insert(0, f"An answer's peak stays below the limit by {show(found.margin_bytes)} or more")
    return section(
        "method", "Method",
        "A few sizes are measured in one process, the largest that should fit is predicted from the line through them, and "
        "exactly that size is proved in a fresh process, from its first step on.",
        tag("ul", *(tag("li", words.capital(line) + ".") for line in lines)), tag("h3", "Next"), tag("pre", words.typed(found.next_command)))
