"""The second half of the report: numerics, noise and method, where the tune's own time went, how to reproduce."""

from __future__ import annotations

from saturate.records.result import NumericsCurve, RaceRecord, StudyRecord, TrialRecord
from saturate.report import svg, words
from saturate.report.markup import Markup, join, table, tag
from saturate.report.sections import facts, rows, section

FINAL = "final set"
_LINE = "M0 5H28"
_VALUES_LEFT_OUT = (
    "The values of the script\u2019s arguments stand as \u2026 here, because pages are passed on and a value may be a token: put "
    "those of your own command in their place."
)


def numerics(record: StudyRecord, curves: list[NumericsCurve], points: int) -> Markup:
    """One plot per compared series: the final set open, the others folded by subject. `curves` are not thinned."""
    title = "Is it the same training?"
    if not curves:
        reason = record.result.verified_reason or "no verification was run"
        return section("numerics", title, f"No series were compared: {reason}.")
    subjects = list(dict.fromkeys(curve.subject for curve in curves))
    subjects.sort(key=lambda subject: subject != FINAL)
    key = tag(
        "p",
        _key("base", "baseline"),
        _key("cand", "candidate"),
        tag("span", tag("svg", tag("rect", width="28", height="10", class_="band"), aria_hidden="true"), "allowed"),
        class_="key",
    )
    body: list[object] = [key]
    for subject in subjects:
        mine = [curve for curve in curves if curve.subject == subject]
        plots = tag("div", *(_plot(curve, points) for curve in mine), class_="plots")
        passed = all(curve.passed for curve in mine)
        sign = svg.sign("kept" if passed else "rejected_numerics")
        name = join([sign, f"{subject}: {'inside' if passed else 'outside'} the tolerance"])
        if subject == subjects[0]:
            body += [tag("h3", name), plots]
        else:
            body.append(tag("details", tag("summary", name), plots))
    return section(
        "numerics",
        title,
        "The same data and seed, per update. The allowed band comes from this workload itself: repeated "
        "baseline runs, and rounding of the candidate\u2019s number format.",
        *body,
    )


def _key(css: str, name: str) -> Markup:
    return tag("span", tag("svg", tag("path", d=_LINE, class_=css), aria_hidden="true"), name)


def _plot(curve: NumericsCurve, points: int) -> Markup:
    verdict = "inside the tolerance" if curve.passed else "outside the tolerance"
    caption = tag(
        "figcaption",
        tag("b", curve.metric),
        f": {verdict}",
        tag("span", f". {curve.reason}", class_="soft") if curve.reason else "",
    )
    views = [(curve, "plot", "")] + (
        [(svg.difference(curve), "plot strip", "difference")] if "cosine" not in curve.metric else []
    )
    label = f"{curve.subject}, {curve.metric}: {verdict}"
    canvases = [_canvas(view, points, css, name, f"{label}; {name}" if name else label) for view, css, name in views]
    return tag("figure", caption, *canvases)


def _canvas(curve: NumericsCurve, points: int, css: str, name: str, label: str) -> Markup:
    drawn = svg.plot(curve, points, css=css, label=label)
    if drawn is None:
        return tag("p", "No finite values to draw.", class_="soft small")
    chart, low, high = drawn
    last = min(len(curve.baseline), len(curve.candidate)) - 1
    return tag(
        "div",
        tag("div", tag("span", f"{high:.3g}"), tag("span", f"{low:.3g}"), class_="axis"),
        chart,
        tag("div", tag("span", "update 0"), tag("span", name), tag("span", f"{last:,}"), class_="below"),
        class_="canvas",
    )


def method(record: StudyRecord) -> Markup:
    """How it was measured: every race with its interval and rounds; A/A first, because all others stand on it."""
    title = "Noise and method"
    if not record.races:
        return section("method", title, "No race was finished, so there is no interval to show.")
    shown = [race for race in record.races if race.question == "A/A"]
    shown += [race for race in record.races if race.question != "A/A"]
    extent = svg.extent_of(race.log_ratios for race in shown)
    lines = [
        [
            _question(race),
            _pairs(race),
            join(
                [
                    tag("b", words.ratio(race.speedup, times="\u00d7")),
                    tag("span", words.ratio(race.speedup, race.speedup_ci).partition(" ")[2], class_="sub"),
                ]
            ),
            words.FATES.get(race.verdict, race.verdict),
            _dots(race, extent, record.threshold),
        ]
        for race in shown
    ]
    floor = record.result.noise_floor
    lede = (
        "Candidates are raced: two fresh processes take turns in short blocks, one frozen while the other runs, so "
        "that a disturbance hits both. The A/A race is the baseline against itself"
        + (f"; it cannot resolve differences below {words.percent(floor)}" if floor is not None else "")
        + "."
    )
    legend = tag(
        "p",
        "Rounds: one dot per round, one line per pair of processes; right of the middle means that B is "
        "faster. All are on one scale, stretched around zero. Thin lines: 10 % either way. Inside the band a difference "
        "is too small to count. Open dots lie beyond the edge.",
        class_="soft small",
    )
    return section(
        "method",
        title,
        lede,
        table(
            ["Race", "Pairs and rounds", "Speed-up", "Verdict", "Rounds"],
            lines,
            label="Races",
            numeric=[2],
            short=[1, 3],
        ),
        legend,
    )


def _question(race: RaceRecord) -> Markup:
    sides = " against ".join("baseline" if not side else " + ".join(side) for side in (race.a, race.b))
    return join([tag("b", race.question), tag("span", sides, class_="sub")])


def _pairs(race: RaceRecord) -> str:
    return f"{words.count(race.pairs, 'pair')}, {words.count(race.rounds, 'round')}"


def _dots(race: RaceRecord, extent: float, threshold: float) -> object:
    if not any(race.log_ratios):
        return tag("span", "rounds not recorded", class_="soft")
    return svg.dots(
        race.log_ratios,
        extent,
        threshold,
        label=f"Rounds of {race.question}: {words.ratio(race.speedup, race.speedup_ci)}",
    )


def own_time(record: StudyRecord) -> Markup:
    """Where the time of the tune itself went, and every process it started."""
    total = sum(phase.seconds for phase in record.phases)
    lede = (
        f"The tune took {words.seconds(total)} of a budget of {words.seconds(record.budget_s)}."
        if record.phases
        else f"Phases were not recorded. The budget was {words.seconds(record.budget_s)}."
    )
    body: list[object] = []
    if record.phases:
        longest = max(phase.seconds for phase in record.phases)
        body.append(
            rows(
                [
                    (
                        phase.name,
                        svg.bar(
                            phase.seconds, longest, css="time", label=f"{phase.name}: {words.seconds(phase.seconds)}"
                        ),
                        words.seconds(phase.seconds),
                    )
                    for phase in record.phases
                ],
                "rows short",
            )
        )
    if record.trials:
        failed = sum(trial.outcome != "ok" for trial in record.trials)
        text = words.count(len(record.trials), "trial") + (
            f", {failed} did not end well" if failed else ", all ended well"
        )
        lines = [
            [
                join(
                    [
                        tag("b", trial.purpose),
                        tag("span", ", ".join(trial.techniques) or "no techniques", class_="sub"),
                    ]
                ),
                join([trial.outcome, tag("span", trial.reason, class_="sub") if trial.reason else ""]),
                f"{trial.steps:,}",
                _start(trial),
                tag("code", trial.log) if trial.log else "",
            ]
            for trial in record.trials
        ]
        body.append(
            tag(
                "details",
                tag("summary", text),
                table(
                    ["Trial", "Outcome", "Steps", "Before steady state", "Log, in the study folder"],
                    lines,
                    label="Trials",
                    numeric=[2],
                ),
            )
        )
    return section("time", "The tune\u2019s own time", lede, *body)


def _start(trial: TrialRecord) -> str:
    """What a trial spent before its steps could be timed; what was not measured is left out, not zero."""
    spans = (("start-up", trial.startup_s), ("warm-up", trial.warmup_s), ("compile", trial.compile_s))
    parts = [f"{name} {words.seconds(value)}" for name, value in spans if value is not None]
    if trial.recompiles:
        parts.append(words.count(trial.recompiles, "recompile"))
    return ", ".join(parts) or words.UNMEASURED


def reproduce(record: StudyRecord) -> Markup:
    """Commands, the recipe's path, and what else decides the outcome."""
    result = record.result
    steps = [
        ("Train with the recipe", words.run_command(record)),
        (
            "See it as the code you would write yourself",
            words.shell(["saturate", "recipe", "show", result.recipe, "--as-code"]),
        ),
        ("Measure again", words.again_command(record)),
    ]
    hidden = any("\u2026" in word for word in result.command)
    settings: list[tuple[str, object]] = [
        ("Recipe", tag("code", result.recipe)),
        ("Seed", str(record.seed) if record.seed is not None else "the workload\u2019s own"),
        ("saturate", record.saturate),
        ("Measured", record.created),
        *record.workload.items(),
    ]
    return section(
        "reproduce",
        "Reproduce",
        _VALUES_LEFT_OUT if hidden else "",
        tag("ol", *(tag("li", text, tag("pre", tag("code", command))) for text, command in steps), class_="steps"),
        facts(settings, "facts plain small"),
    )
