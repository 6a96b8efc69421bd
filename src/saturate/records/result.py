"""What one `saturate tune` found: the object behind `--json`, the terminal summary and the HTML report."""

from __future__ import annotations

from typing import Any, Literal

import msgspec

from saturate.records.analysis import Finding

SCHEMA = 1

Verdict = Literal["faster", "no_difference", "slower", "inconclusive"]
Fate = Literal[
    "kept", "no_difference", "slower", "inconclusive", "rejected_numerics",
    "not_applied", "not_applicable", "failed", "not_tried",
]


class StepTime(msgspec.Struct, frozen=True):
    """Median time of one step in the steady state, milliseconds, and what came before it. None: never measured."""

    step_ms: float | None = None
    startup_s: float | None = None      # until the first step that could be timed
    warmup_s: float | None = None       # from there until steps were steady
    compile_s: float | None = None      # the longest, as with cold caches; part of the two above. None: nothing was compiled
    recompiles: int | None = None       # the most that one of its runs needed


class TechniqueOutcome(msgspec.Struct, frozen=True, kw_only=True):
    """One technique's fate. `gain` is speed-up minus one (0.21: 21 % faster), measured alone against the baseline for
    techniques that were only screened, and as the marginal gain in the final set for those kept (where `reason` says that this was
    not checked: when it was added)."""

    id: str
    fate: Fate
    reason: str
    numerics: str
    options: dict[str, Any] = {}
    gain: float | None = None
    gain_ci: tuple[float, float] | None = None
    peak_bytes: int | None = None               # of a trial with this technique (under a limit: with what was needed to fit)


class TuneResult(msgspec.Struct, frozen=True, kw_only=True):
    """The object that `saturate tune --json` prints."""

    schema: int = SCHEMA
    run: str                                    # short id of the study
    command: list[str]
    baseline: StepTime
    tuned: StepTime
    speedup: float | None                       # baseline / tuned, of the final race; None: not measured
    speedup_ci: tuple[float, float] | None
    verdict: Verdict
    verified: bool | None                       # None: cannot verify; see verified_reason
    verified_reason: str = ""
    noise_floor: float | None                   # half-width that an A/A race of this workload cannot resolve (0.012: 1.2 %)
    break_even_steps: int | None                # None: never, nothing kept, or not known; see break_even_reason
    break_even_reason: str = ""
    techniques: list[TechniqueOutcome]
    recipe: str                                 # path; where no study could begin, that of an empty file (/dev/null)
    report: str                                 # path; "" where no study could begin
    peak_bytes: int | None = None               # the most that the final set needed; None: not measured
    baseline_peak_bytes: int | None = None
    limit_bytes: int | None = None              # of `tune --fit`
    fits: bool | None = None                    # whether the final set keeps the limit; None: no limit, or not known


class StairStep(msgspec.Struct, frozen=True, kw_only=True):
    """The step time after one more technique was added (the first one is the baseline). The last is measured against the baseline;
    what lies between is a chain of ratios, each raced against the step below it."""

    label: str
    step_ms: float
    speedup: float                              # over the baseline, cumulative
    speedup_ci: tuple[float, float] | None = None   # of its own race: between, what the steps below it may be off by is not in it


class NumericsCurve(msgspec.Struct, frozen=True, kw_only=True):
    """One compared series of a verification: the same metric per update, for baseline and candidate."""

    subject: str                                # "final set", or a technique id
    metric: str                                 # "loss", "gradient norm", "update cosine"
    baseline: list[float]
    candidate: list[float]
    tolerance: list[float]                      # allowed absolute deviation per update (for cosine: the least allowed value)
    passed: bool
    reason: str = ""


class RaceRecord(msgspec.Struct, frozen=True, kw_only=True):
    """One finished race, for the method section: A against B."""

    question: str                               # "A/A", "screen compile", "final"
    a: list[str]
    b: list[str]
    pairs: int
    rounds: int
    speedup: float                              # time of A / time of B
    speedup_ci: tuple[float, float]
    verdict: Verdict
    log_ratios: list[list[float]] = []          # per pair, per round


class TrialRecord(msgspec.Struct, frozen=True, kw_only=True):
    """One started process group and how it ended."""

    id: str
    purpose: str                                # "baseline", "screen compile", "verify ..."
    techniques: list[str]
    outcome: str                                # "ok" or a named failure class
    reason: str = ""
    log: str = ""                               # path, relative to the study folder
    startup_s: float | None = None              # process start until the step was found, a few steps in
    warmup_s: float | None = None               # first step to stationary
    settling_s: float | None = None             # what of that a stationary step would not have taken; None: it never was
    compile_s: float | None = None
    recompiles: int | None = None
    beside: bool = False                        # another one, which wanted the same cores, started at the same time: that may take many times as long
    steps: int = 0
    peak_bytes: int | None = None               # of the device's allocator, on a CPU resident; None: not measured


class Phase(msgspec.Struct, frozen=True, kw_only=True):
    """Where the time of the tune itself went."""

    name: str
    seconds: float


class StudyRecord(msgspec.Struct, frozen=True, kw_only=True):
    """Everything a renderer may show."""

    schema: int = SCHEMA
    result: TuneResult
    created: str                                # ISO 8601, UTC
    saturate: str                               # version
    machine: dict[str, str]                     # label -> text
    workload: dict[str, str]                    # label -> text: step motif, device, loader, optimizer
    staircase: list[StairStep]
    split_before: dict[str, float]              # part of the step -> ms; parts sum to the step
    split_after: dict[str, float]
    numerics: list[NumericsCurve]
    races: list[RaceRecord]
    trials: list[TrialRecord]
    phases: list[Phase]
    notes: list[str]                            # warnings for the reader, one sentence each
    threshold: float                            # the gain that counts
    budget_s: float
    seed: int | None = None
    findings: list[Finding] = []                # what a brief profile of the baseline diagnosed; it steered the search
    titles: dict[str, str] = {}                 # technique id -> title
    out_of_time: bool = False                   # the budget ended before anything was tried: nobody knows whether that could be verified
    options: list[str] = []                     # of the command line, those that ask the same question again; a --budget that would do
