"""Parts of made-up studies: outcomes, compared series, races, trials."""

from __future__ import annotations

import math
import random

from saturate.records.result import NumericsCurve, RaceRecord, TechniqueOutcome, TrialRecord

TITLES = {
    "bf16-autocast": "Compute in bfloat16 where it is safe",
    "compile": "Compile the model with TorchInductor",
    "loader-workers": "Load batches in worker processes",
    "fused-optimizer": "One kernel for the whole optimizer step",
    "channels-last": "Store images channels-last",
    "sdpa-backend": "Choose the attention kernel",
    "cpu-threads": "Threads and their cores",
    "pin-memory": "Page-locked batches, copied while computing",
    "zero-grad-none": "Drop gradients instead of zeroing them",
    "gc-freeze": "Keep the garbage collector out of the step",
    "allocator": "A faster memory allocator",
    "fp16-autocast": "Compute in float16 with loss scaling",
    "tf32": "TensorFloat-32 matrix products",
    "cudnn-benchmark": "Let cuDNN time its algorithms",
    "ddp-options": "DistributedDataParallel options",
    "local-sgd": "Synchronize ranks less often",
}
COMMAND = ["python", "train.py", "--config", "small.yaml", "--api-token", "s3cret-value"]


def outcome(
    id: str,
    fate: str,
    reason: str,
    numerics: str = "exact",
    gain: float | None = None,
    half: float = 0.011,
    **options,
) -> TechniqueOutcome:
    interval = None if gain is None else (round(gain - half, 6), round(gain + half, 6))
    return TechniqueOutcome(
        id=id, fate=fate, reason=reason, numerics=numerics, options=options, gain=gain, gain_ci=interval
    )


def curve(
    subject: str,
    metric: str,
    *,
    updates: int = 60,
    seed: int = 0,
    wild_from: int | None = None,
    not_finite: bool = False,
) -> NumericsCurve:
    """A series whose candidate stays inside the band, or leaves it at `wild_from`."""
    noise = random.Random(seed)
    cosine = "cosine" in metric
    baseline, candidate, tolerance = [], [], []
    for i in range(updates):
        base = 1.0 if cosine else (4.2 * math.exp(-i / 30) + 1.4 if metric == "loss" else 2.0 / (1 + i / 15) + 0.5)
        base += 0 if cosine else noise.gauss(0, 0.05)
        spread = 0.006 * (1 + i / 12)
        drift = noise.gauss(0, spread / 3)
        if wild_from is not None and i >= wild_from:
            drift = math.nan if not_finite else 0.25 * (i - wild_from + 1)
        baseline.append(base)
        candidate.append(base - abs(drift) if cosine else base + drift)
        tolerance.append(1 - spread * 1.5 if cosine else spread)
    bad = wild_from is not None
    return NumericsCurve(
        subject=subject,
        metric=metric,
        baseline=baseline,
        candidate=candidate,
        tolerance=tolerance,
        passed=not bad,
        reason=f"update {wild_from}: deviation above the allowed {tolerance[wild_from]:.3g}" if bad else "",
    )


def curves(subject: str, seed: int, **bad) -> list[NumericsCurve]:
    return [
        curve(subject, metric, seed=seed + k, **bad)
        for k, metric in enumerate(("loss", "gradient norm", "update cosine"))
    ]


def race(
    question: str,
    b: list[str],
    speedup: float,
    verdict: str,
    *,
    pairs: int = 3,
    rounds: int = 10,
    noise: float = 0.012,
) -> RaceRecord:
    values = random.Random(question)
    half = noise * 1.2
    return RaceRecord(
        question=question,
        a=[],
        b=b,
        pairs=pairs,
        rounds=pairs * rounds,
        speedup=speedup,
        speedup_ci=(speedup - half, speedup + half),
        verdict=verdict,
        log_ratios=[[math.log(speedup) + values.gauss(0, noise) for _ in range(rounds)] for _ in range(pairs)],
    )


def trial(number: int, purpose: str, techniques: list[str], outcome: str = "ok", reason: str = "") -> TrialRecord:
    return TrialRecord(
        id=f"t{number:03}",
        purpose=purpose,
        techniques=techniques,
        outcome=outcome,
        reason=reason,
        log=f"trials/t{number:03}/output.log",
        startup_s=3.1,
        warmup_s=4.0 + number / 10,
        compile_s=21.4 if "compile" in techniques else None,
        recompiles=2 if "compile" in techniques else None,
        steps=180,
    )
