"""Studies as a `tune` would record them, for the tests of the report. Every number is made up but plausible."""

from __future__ import annotations

import math

import msgspec
from study_parts import COMMAND, TITLES, curves, outcome, race, trial

from saturate.records.result import (
    NumericsCurve,
    Phase,
    StairStep,
    StepTime,
    StudyRecord,
    TuneResult,
)


def big_win() -> StudyRecord:
    """Sixteen techniques, five kept, one rejected for its numerics, one failed."""
    techniques = [
        outcome(
            "loader-workers",
            "kept",
            "input wait fell from 66.0 to 2.1 ms",
            "exact",
            0.241,
            num_workers=2,
            persistent_workers=True,
            prefetch_factor=4,
        ),
        outcome("bf16-autocast", "kept", "matrix products take bfloat16 here", "precision", 0.312, dtype="bfloat16"),
        outcome("compile", "kept", "9 graphs, no break", "reordering", 0.124, mode="default", dynamic=False),
        outcome("fused-optimizer", "kept", "214 tensors in one kernel", "reordering", 0.031),
        outcome("gc-freeze", "kept", "collector pauses of 1.9 ms per step are gone", "exact", 0.024, half=0.004),
        outcome(
            "fp16-autocast",
            "rejected_numerics",
            "loss outside the allowed band at update 41 (0.52 > 0.027)",
            "precision",
            0.295,
            dtype="float16",
        ),
        outcome(
            "allocator",
            "failed",
            "PreloadFailed: the workload ended with signal 11 before its first step; log in trials/t014/output.log",
        ),
        outcome("cpu-threads", "slower", "two threads on one core", "reordering", -0.118, threads=4),
        outcome("sdpa-backend", "not_applied", "no attention kernel of that name was seen", "reordering"),
        outcome("channels-last", "no_difference", "the interval excludes a gain of 2 %", "reordering", 0.003),
        outcome("zero-grad-none", "inconclusive", "the budget ended first", "exact", 0.017, half=0.02),
        outcome("pin-memory", "not_applicable", "batches stay on the host"),
        outcome("tf32", "not_applicable", "needs a CUDA device", "precision"),
        outcome("cudnn-benchmark", "not_applicable", "needs a CUDA device", "reordering"),
        outcome("ddp-options", "not_applicable", "one rank"),
        outcome("local-sgd", "not_tried", "changes the training: needs --allow convergence", "convergence"),
    ]
    result = TuneResult(
        run="7f3a",
        command=COMMAND,
        baseline=StepTime(212.4, startup_s=3.1, warmup_s=2.0),
        tuned=StepTime(118.9, startup_s=3.4, warmup_s=14.0, compile_s=11.2, recompiles=2),
        speedup=1.786,
        speedup_ci=(1.768, 1.803),
        verdict="faster",
        verified=True,
        verified_reason="60 updates inside the tolerance in loss, gradient norm and update direction",
        noise_floor=0.006,
        break_even_steps=1240,
        techniques=techniques,
        recipe=".saturate/recipe.toml",
        report=".saturate/report.html",
    )
    names = ["bf16-autocast", "loader-workers", "compile", "fused-optimizer", "gc-freeze"]
    times = [212.4, 161.2, 133.0, 124.9, 121.6, 118.9]
    stairs = [StairStep(label="baseline", step_ms=212.4, speedup=1.0)]
    stairs += [
        StairStep(label=f"+ {name}", step_ms=t, speedup=212.4 / t, speedup_ci=(212.4 / t - 0.03, 212.4 / t + 0.03))
        for name, t in zip(names, times[1:])
    ]
    races = [
        race("screen bf16-autocast", ["bf16-autocast"], 1.318, "faster"),
        race("A/A", [], 1.001, "no_difference"),
        race("screen compile", ["compile"], 1.131, "faster", noise=0.02),
        race("screen channels-last", ["channels-last"], 1.003, "no_difference"),
        race("screen cpu-threads", ["cpu-threads"], 0.882, "slower", pairs=1),
        race("final", names, 1.786, "faster", pairs=4),
    ]
    trials = [
        trial(1, "baseline", []),
        trial(2, "A/A", []),
        trial(3, "screen compile", ["compile"]),
        trial(14, "screen allocator", ["allocator"], "Crashed", "signal 11 before the first step"),
        trial(20, "final", names),
    ]
    return StudyRecord(
        result=result,
        created="2026-11-20T10:22:00Z",
        saturate="0.1.0",
        machine={
            "Device": "AMD EPYC 9B14, 2 of 192 cores",
            "Memory": "15.6 GiB",
            "Python": "3.11.9",
            "torch": "2.13.0+cpu",
            "System": "Linux 6.6",
        },
        workload={
            "Step": "F B S",
            "Device": "cpu",
            "Optimizer": "AdamW, 214 tensors",
            "Loader": "32 per batch, 0 workers",
        },
        staircase=stairs,
        split_before={"input wait": 66.0, "forward": 41.3, "backward": 86.1, "optimizer": 14.8, "other": 4.2},
        split_after={"input wait": 2.1, "forward": 33.0, "backward": 71.4, "optimizer": 9.1, "other": 3.3},
        numerics=[*curves("fp16-autocast", 7, wild_from=41), *curves("bf16-autocast", 11), *curves("final set", 3)],
        races=races,
        trials=trials,
        phases=[
            Phase(name=name, seconds=s)
            for name, s in (
                ("observe", 14.2),
                ("baseline and A/A", 88.0),
                ("screen", 241.5),
                ("add and ablate", 130.3),
                ("verify", 70.8),
                ("final race", 41.0),
            )
        ],
        notes=["Another process used 0.4 cores during the races."],
        threshold=0.02,
        budget_s=600.0,
        seed=0,
        titles=TITLES,
    )


def _with(record: StudyRecord, result: dict, **fields) -> StudyRecord:
    return msgspec.structs.replace(record, result=msgspec.structs.replace(record.result, **result), **fields)


def nothing_helps() -> StudyRecord:
    """A quiet machine, an already good workload: no difference anywhere."""
    base = big_win()
    techniques = [
        outcome(o.id, "no_difference", "the interval excludes a gain of 2 %", o.numerics, 0.001 * k)
        if k < 9
        else outcome(o.id, "not_applicable", "needs a CUDA device", o.numerics)
        for k, o in enumerate(base.result.techniques)
    ]
    return _with(
        base,
        {
            "techniques": techniques,
            "tuned": StepTime(),
            "speedup": None,
            "speedup_ci": None,
            "verdict": "no_difference",
            "verified": None,
            "verified_reason": "",
            "break_even_steps": None,
        },
        staircase=base.staircase[:1],
        split_after={},
        numerics=[],
        notes=[],
        races=base.races[1:2],
    )


def cannot_verify() -> StudyRecord:
    """Faster, but the loss carries no information."""
    base = big_win()
    techniques = [
        msgspec.structs.replace(o, fate="inconclusive", reason="cannot be verified") if o.fate == "kept" else o
        for o in base.result.techniques
    ]
    return _with(
        base,
        {
            "verdict": "inconclusive",
            "verified": None,
            "techniques": techniques,
            "break_even_steps": None,
            "verified_reason": "the loss is constant (0.6931 in 60 of 60 updates), so it cannot show a difference",
        },
        numerics=[],
    )


def unverified() -> StudyRecord:
    """A final set that turns to NaN."""
    base = big_win()
    return _with(
        base,
        {
            "verified": False,
            "verdict": "faster",
            "break_even_steps": None,
            "verified_reason": "loss is not finite from update 40",
            "techniques": [
                msgspec.structs.replace(o, fate="rejected_numerics") if o.fate == "kept" else o
                for o in base.result.techniques
            ],
        },
        numerics=curves("final set", 5, wild_from=40, not_finite=True),
    )


def too_noisy() -> StudyRecord:
    """Other load hides differences of the size asked about."""
    base = nothing_helps()
    return _with(
        base,
        {"verdict": "inconclusive", "noise_floor": 0.084, "speedup": 1.03, "speedup_ci": (0.94, 1.13)},
        races=[race("A/A", [], 1.02, "inconclusive", noise=0.08)],
    )


def slower() -> StudyRecord:
    return _with(nothing_helps(), {"verdict": "slower", "speedup": 0.93, "speedup_ci": (0.91, 0.95)})


def failed_baseline() -> StudyRecord:
    """The workload ended in its third step: nothing was measured, and what exists is empty or None."""
    result = TuneResult(
        run="0",
        command=["python", "train.py"],
        baseline=StepTime(),
        tuned=StepTime(),
        speedup=None,
        speedup_ci=None,
        verdict="inconclusive",
        verified=None,
        verified_reason="the workload trains for 3 steps; a measurement needs 60",
        noise_floor=None,
        break_even_steps=None,
        techniques=[],
        recipe=".saturate/recipe.toml",
        report=".saturate/report.html",
    )
    return empty(result)


def empty(result: TuneResult | None = None) -> StudyRecord:
    """Empty lists and None everywhere."""
    result = result or TuneResult(
        run="",
        command=[],
        baseline=StepTime(),
        tuned=StepTime(),
        speedup=None,
        speedup_ci=None,
        verdict="inconclusive",
        verified=None,
        noise_floor=None,
        break_even_steps=None,
        techniques=[],
        recipe="",
        report="",
    )
    return StudyRecord(
        result=result,
        created="",
        saturate="",
        machine={},
        workload={},
        staircase=[],
        split_before={},
        split_after={},
        numerics=[],
        races=[],
        trials=[],
        phases=[],
        notes=[],
        threshold=0.02,
        budget_s=600,
    )


HOSTILE = "</script></style><img src=x onerror=alert(1)>\"'&amp;\u2028\u2029\x00\x1b[31m\u202e\ud800 javascript:"


def hostile() -> StudyRecord:
    """Every string of the record, keys included, tries to break out of where it stands."""
    # Fields whose values are words of the schema; a hostile one is not a record.
    words = {"fate", "verdict"}

    def poison(value, name=""):
        if isinstance(value, str):
            return value if name in words else value + HOSTILE
        if isinstance(value, dict):
            free = name in ("machine", "workload", "split_before", "split_after", "titles", "options")
            return {(k + HOSTILE if free else k): poison(v, k) for k, v in value.items()}
        return [poison(item, name) for item in value] if isinstance(value, list | tuple) else value

    return msgspec.convert(poison(msgspec.to_builtins(big_win())), StudyRecord)


def giant() -> StudyRecord:
    """Far more of everything than a page can hold, in characters whose escapes are long."""
    base = big_win()
    text = "\"'<&\u2028" * 1000
    many = [
        outcome(f"technique-{k}", ("kept", "failed", "not_applicable")[k % 3], text, "exact", 0.01 * k, nested=[text])
        for k in range(900)
    ]
    long = [
        NumericsCurve(
            subject=f"s{k}",
            metric="loss",
            baseline=[math.pi * i for i in range(6_000)],
            candidate=[math.pi * i for i in range(6_000)],
            tolerance=[0.1] * 6_000,
            passed=True,
            reason=text,
        )
        for k in range(12)
    ]
    return _with(
        base,
        {"techniques": many, "command": [text] * 50},
        numerics=long,
        trials=[trial(k, text, [text] * 20) for k in range(600)],
        races=[race(text + str(k), ["x"], 1.1, "faster", rounds=100) for k in range(150)],
        notes=[text] * 500,
        machine={f"{text}{k}": text for k in range(500)},
    )


def fits() -> StudyRecord:
    """Under a memory limit that the baseline does not keep: slower, but it fits."""
    techniques = [
        outcome("activation-checkpointing", "kept", "needed: without it the training needs 5.13 GiB, the limit is 4.00 GiB", "reordering", -0.18),
        outcome("gc-freeze", "kept", "+2.4 %", "exact", 0.024),
        outcome("compile", "failed", "over limit: needs 4.40 GiB, the limit is 4.00 GiB", "reordering"),
        outcome("tf32", "not_applicable", "needs a CUDA device", "precision"),
    ]
    peaks = (3_400_000_000, 3_450_000_000, 4_724_464_026, None)
    techniques = [msgspec.structs.replace(o, peak_bytes=peak) for o, peak in zip(techniques, peaks)]
    result = {
        "techniques": techniques, "tuned": StepTime(step_ms=249.0), "speedup": 0.853, "speedup_ci": (0.84, 0.866), "verdict": "slower",
        "peak_bytes": 3_450_000_000, "baseline_peak_bytes": 5_508_295_557, "limit_bytes": 4 * 2**30, "fits": True,
    }
    base = big_win()
    return _with(base, result, trials=[msgspec.structs.replace(base.trials[0], peak_bytes=5_508_295_557), *base.trials[1:]])


def fits_unverified() -> StudyRecord:
    """A baseline that runs out of memory by itself."""
    return _with(fits(), {
        "baseline": StepTime(), "speedup": None, "speedup_ci": None, "verdict": "inconclusive", "baseline_peak_bytes": None, "verified": None,
        "verified_reason": "the baseline does not run in this memory, so there is nothing to compare with", "break_even_steps": None,
    }, staircase=[])


def too_big() -> StudyRecord:
    """No set of techniques keeps the limit."""
    techniques = [msgspec.structs.replace(o, fate="failed", reason="over limit: needs 4.40 GiB, the limit is 4.00 GiB", gain=None, gain_ci=None)
                  if o.fate == "kept" else o for o in fits().result.techniques]
    return _with(fits(), {
        "techniques": techniques, "tuned": StepTime(), "speedup": None, "speedup_ci": None, "verdict": "inconclusive", "verified": None,
        "verified_reason": "nothing keeps the limit of 4.00 GiB: the baseline needs 5.13 GiB, the least was 4.40 GiB with compile",
        "peak_bytes": 5_508_295_557, "fits": False, "break_even_steps": None,
    }, staircase=[])


ALL = {
    f.__name__: f
    for f in (fits, fits_unverified, too_big, big_win, nothing_helps, cannot_verify, unverified, too_noisy, slower, failed_baseline, empty, hostile)
}
