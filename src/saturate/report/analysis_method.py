"""What stands behind an analysis page: what the trace can carry, how numbers came about, what words mean."""

from __future__ import annotations

from saturate.records.analysis import Analysis, Profile
from saturate.report import analysis_words as say
from saturate.report import words
from saturate.report.markup import Markup, table, tag
from saturate.report.sections import facts, section

#: What the words on the page mean, in the order of the page. docs/analysis.md has them in full.
DEFINITIONS = (
    (
        "The steps",
        "The union of the recorded training steps (ProfilerStep#n), none left out. Where a trace has none, the span "
        "takes their place and the page says so.",
    ),
    ("The span", "From the start of the first to the end of the last event on the device."),
    ("Busy", "The union of kernels, memory sets and copies on any stream, never a sum of durations."),
    (
        "The four parts",
        "Computation; communication that no computation hides; copies that neither hides; idle. In integer "
        "nanoseconds they sum to the window exactly.",
    ),
    (
        "Input wait",
        "Time of the training thread in the loader\u2019s next. Exposed: the part in which the device was idle.",
    ),
    (
        "Gaps",
        "Each pause of the device inside the span, by the first cause that holds: the loader covers half of it "
        "(input); the next event was launched before the pause began (already launched: it waited for other work, a "
        "peer, an event); a synchronising call covers half of the time before the launch (sync); otherwise the "
        "launch came late (host late). "
        "Without its launch it stays unattributed.",
    ),
    (
        "At most",
        "What the step would gain if the cause were gone and nothing else took its place. Bounds do not add up.",
    ),
    (
        "Roof",
        "The least time that an operator\u2019s FLOPs and compulsory bytes can take at the ceilings named. "
        "Recoverable is the "
        "time above it.",
    ),
)


def integrity(analysis: Analysis) -> Markup:
    """Problems of the recording, and the conclusions that they forbid."""
    problems = analysis.integrity.problems
    title = "What the trace can carry"
    if not problems:
        return section(
            "integrity", title, "No problem was found in the trace; no conclusion was withheld for its sake."
        )
    shown = [
        tag(
            "li",
            tag("b", problem.id.replace("-", " ")),
            f": {problem.message}",
            tag("span", f" No conclusion on: {', '.join(problem.blocks)}.", class_="soft") if problem.blocks else "",
        )
        for problem in problems
    ]
    return section(
        "integrity",
        title,
        "A problem of the recording, and the conclusions that it forbids.",
        tag("ul", *shown, class_="problems"),
    )


def method(analysis: Analysis, cuts: list[str]) -> Markup:
    """How the numbers came about, what is not known and why, what the words mean, and what to do next."""
    body: list[object] = []
    if isinstance(analysis, Profile):
        lede = (
            "Step times are of steps without a profiler. The split and everything below a step are of a short "
            "window recorded "
            "with one, whose cost lies in them. What is worth doing is decided by a race, not by a profile."
        )
        pairs = [
            (name, f"{words.ms(value)}\u00a0ms")
            for name, value in (
                ("Step without a profiler", analysis.step_ms),
                ("Step while recorded", analysis.step_ms_profiled),
            )
            if value is not None
        ]
        pairs += (
            [("FLOPs per step", say.size(analysis.flops_per_step, "FLOP"))]
            if analysis.flops_per_step is not None
            else []
        )
        pairs += [
            (name, say.share(value))
            for name, value in (
                ("FLOPs known, of operator time", analysis.flops_coverage),
                ("MFU", analysis.mfu),
                ("HFU", analysis.hfu),
                ("Of the measured ceiling", analysis.mfu_achievable),
            )
            if value is not None
        ]
        body.append(facts([*pairs], "facts plain small"))
    else:
        lede = (
            "Everything on this page was computed from the trace alone. Recording one slows a program down, "
            "launches most of "
            "all; what is worth doing is decided by a race, not by a profile."
        )
    unknown = say.unknowns(analysis)
    if unknown:
        lines: list[list[object]] = [[name, reason] for name, reason in unknown]
        body += [tag("h3", "Not known, and why"), table(["What", "Why"], lines, label="Not known")]
    if cuts:
        body += [
            tag("h3", "Left out of this page for its size"),
            tag("ul", *(tag("li", cut) for cut in cuts), class_="small"),
        ]
    meaning = tag(
        "dl", *(part for word, text in DEFINITIONS for part in (tag("dt", word), tag("dd", text))), class_="defs"
    )
    body += [tag("details", tag("summary", "What the words mean"), meaning)]
    body += [tag("h3", "Next"), tag("pre", tag("code", say.next_command(analysis)))]
    return section("method", "How it was measured", lede, *body)
