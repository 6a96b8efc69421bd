"""Optimizations as a search would record them, for the tests of report and verbs. Every number is made up but plausible."""

from __future__ import annotations

import math

import msgspec

from saturate.records.inference import Best, CandidateRecord, OptimizeRecord, Timing, Unconfirmed

MIB = 2**20


def timing(p50: float) -> Timing:
    return Timing(p50=p50, p90=1.08 * p50, p99=1.3 * p50, calls=400)


BASE_MS = 77.5


def candidate(name: str, fate: str, speedup: float | None = None, drop: float | None = None, *, numerics: str = "precision", half: float = 0.004,
              reason: str = "", memory: int | None = 300, **more: object) -> CandidateRecord:
    values = {
        "id": name, "techniques": [{"id": part.split(" ")[0], "options": {}} for part in name.split(" + ")], "numerics": numerics, "fate": fate,
        "reason": reason or f"{speedup}x in a screening", "speedup": speedup, "prepare_s": 3.2, "first_call_s": 0.041,
        "latency_ms": timing(BASE_MS / speedup) if speedup else None, "speedup_ci": (0.97 * speedup, 1.03 * speedup) if speedup else None,
        "accuracy": None if drop is None else 0.97 - drop, "accuracy_drop": drop,
        "accuracy_drop_ci": None if drop is None else (drop - half, drop + half),
        "peak_memory_bytes": None if memory is None else memory * MIB, "code": f"# {name}\nmodel = convert(model)",
    }
    return CandidateRecord(**{**values, **more})


BASELINE = candidate("baseline", "dominated", 1.0, 0.0, numerics="exact", reason="the model as it came", memory=512, accuracy_drop=None,
                     accuracy_drop_ci=None)
LOSSLESS = candidate("onnx-runtime", "dominated", 2.14, None, numerics="reordering", agreement=128.0, memory=290)
WINNER = candidate("onnx-int8-static method=percentile", "kept", 6.82, 0.002, reason="fastest within the budget", memory=180)

CANDIDATES = [
    candidate("channels-last", "dominated", 1.06, None, numerics="exact"),
    candidate("compile freezing=True", "dominated", 1.96, None, numerics="reordering", memory=600),
    LOSSLESS,
    candidate("bf16-weights + compile", "dominated", 3.55, 0.0005),
    WINNER,
    candidate("onnx-int8-static", "rejected_accuracy", 6.97, 0.061, reason="it loses 0.057 or more, and 0.01 is allowed", memory=175),
    candidate("onnx-int8-static (but 3 layers)", "dominated", 5.1, 0.004, kept_layers=["conv1", "fc", "layer4.2"]),
    candidate("pt2e-static-int8", "undecided", 6.0, 0.008, half=0.012, reason="the interval reaches beyond the budget; about 900 samples in all would do"),
    candidate("onnx-int8-dynamic", "slower", 0.40, None, reason="slower than the model as it is"),
    candidate("prune-channels share=0.5", "rejected_accuracy", 2.4, 0.44, numerics="convergence", reason="recovery ended after 3 epochs"),
    candidate("fp16-weights", "rejected_behaviour", 1.4, None, reason="NaN in output 0"),
    candidate("aot-inductor", "not_deployable", 2.0, None, numerics="reordering", reason="stored, it does not load"),
    candidate("sdpa-kernel", "not_applied", None, None, numerics="reordering", reason="no call of scaled_dot_product_attention"),
    candidate("torchao-dynamic-int8", "failed", None, None, reason="timeout: 120 s without an answer"),
    candidate("tensorrt", "not_applicable", None, None, reason="it needs CUDA"),
    candidate("distill", "not_tried", None, None, numerics="convergence", reason="the time ended"),
]


def win(**changes: object) -> OptimizeRecord:
    values = {
        "run": "20261120-201500", "model": "ResNet", "device": "cpu", "machine": "AMD EPYC 9355, 1 of 64 cores", "torch": "2.13.0",
        "objective": "latency", "batch_size": 8, "max_drop": 0.01, "confidence": 0.95, "limits": {"p99_ms": 40.0}, "verdict": "faster",
        "baseline": BASELINE, "best_lossless": LOSSLESS,
        "best": Best(recipe=WINNER.techniques, latency_ms=timing(11.36), speedup=6.82, speedup_ci=(6.71, 6.93), speedup_over_lossless=3.19,
                     speedup_over_lossless_ci=(3.1, 3.28), accuracy=0.968, accuracy_drop=0.002, accuracy_drop_ci=(-0.001, 0.0052), verdict="pass",
                     peak_memory_bytes=180 * MIB, size_bytes=26 * MIB),
        "candidates": CANDIDATES, "notes": ["inputs is a single batch: 4 of its 8 samples are kept for calibration"], "seconds": 812.0,
        "artifact": "/home/u/runs/r18/artifact", "report": "/home/u/runs/r18/report.html",
    }
    return OptimizeRecord(**{**values, **changes})


def lossless() -> OptimizeRecord:
    kept = msgspec.structs.replace(LOSSLESS, fate="kept")
    refused = [msgspec.structs.replace(one, fate="not_applicable", speedup=None, speedup_ci=None, latency_ms=None, accuracy_drop=None,
                                       accuracy_drop_ci=None, accuracy=None, reason="there is no check") for one in CANDIDATES if one.numerics == "precision"]
    return win(max_drop=None, limits={}, best_lossless=kept, candidates=[*CANDIDATES[:2], kept, *refused],
               best=Best(recipe=kept.techniques, latency_ms=timing(36.2), speedup=2.14, speedup_ci=(2.1, 2.18), speedup_over_lossless=1.0,
                         verdict=None, peak_memory_bytes=290 * MIB, size_bytes=98 * MIB))


def nothing() -> OptimizeRecord:
    return win(verdict="nothing_helps", best=None, best_lossless=None, artifact=None, notes=[],
               candidates=[msgspec.structs.replace(one, fate="no_difference") if one.fate in ("kept", "dominated") else one for one in CANDIDATES])


def stopped() -> OptimizeRecord:
    """Interrupted in the confirmation."""
    return win(verdict="inconclusive", best=None, best_lossless=None, artifact=None, notes=["interrupted: the same call goes on from here"],
               candidates=[msgspec.structs.replace(one, fate="dominated") if one.fate == "kept" else one for one in CANDIDATES],
               unconfirmed=Unconfirmed(id=WINNER.id, speedup=6.9, artifact="/home/u/runs/r18/artifacts/2"))


def undecided() -> OptimizeRecord:
    one = win()
    return win(best=msgspec.structs.replace(one.best, verdict="undecided", samples_needed=1240, accuracy_drop_ci=(-0.01, 0.02)))


def failed() -> OptimizeRecord:
    return win(verdict="inconclusive", best=None, best_lossless=None, candidates=[], artifact=None, report=None, batch_size=None, max_drop=None,
               baseline=CandidateRecord(id="baseline", techniques=[], fate="failed", reason="build() failed: RuntimeError: no GPU"))


def bare() -> OptimizeRecord:
    """As little as a record may hold."""
    return OptimizeRecord(run="", model="", device="", machine="", torch="", objective="latency", batch_size=None, max_drop=None, confidence=None,
                          verdict="inconclusive", baseline=CandidateRecord(id="baseline", techniques=[], fate="inconclusive", reason=""),
                          best_lossless=None, best=None, candidates=[])


def hostile() -> OptimizeRecord:
    evil = "</script><img src=x onerror=alert(1)>\x1b[2J\u202e\ud800 & \"'"
    return win(model=evil, machine=evil, notes=[evil] * 3, artifact=evil, run=evil, limits={evil: 1.0},
               candidates=[msgspec.structs.replace(WINNER, id=evil, reason=evil, code=evil, accuracy_drop=math.nan, accuracy_drop_ci=(-math.inf, math.inf)),
                           candidate(evil, "failed", None, reason=evil), candidate(evil, "dominated", 1e-9, 1e9, half=1e9)])


def huge() -> OptimizeRecord:
    many = [candidate(f"{'very-' * 30}long-technique number={index}", "dominated", 1.5 + index / 1e4, 0.001 * (index % 50), reason="why " * 300,
                      kept_layers=[f"layer{i}" for i in range(500)]) for index in range(1500)]
    return win(candidates=[*many, WINNER])


ALL = {"win": win, "lossless": lossless, "nothing": nothing, "undecided": undecided, "failed": failed, "bare": bare, "hostile": hostile}
