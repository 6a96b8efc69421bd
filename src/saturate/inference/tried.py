"""One candidate and what is known of it: its row for the record, its entry for the journal, and what that rests on."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from saturate.inference import lines
from saturate.inference.accuracy import Judgement
from saturate.inference.candidates import Candidate
from saturate.inference.failures import WorkerFailed
from saturate.inference.scores import Scores
from saturate.records.inference import CandidateRecord, Fate, Timing

#: Fates of candidates that work and may be the best.
WORKING: tuple[Fate, ...] = ("kept", "dominated")


@dataclass
class Tried:
    """One candidate and what is known of it. `speedup` is over the user's own baseline, from a screening."""

    candidate: Candidate
    fate: Fate
    reason: str
    speedup: float | None = None
    timing: Timing | None = None
    scores: Any = None
    judgement: Any = None
    agreement: float | None = None
    flip_rate: float | None = None          # of its outputs on the inputs
    peak_memory_bytes: int | None = None
    size_bytes: int | None = None           # of the program, where it was stored
    compressed_bytes: int | None = None     # of the weights, where a technique exists for that
    done: tuple[str, ...] = ()              # what each technique said that it did
    prepare_s: float | None = None
    first_call_s: float | None = None
    compile_s: float | None = None
    seconds: float = 0.0
    for_all_s: float = 0.0                  # of them, what was done for all: not of an earlier search, which has left nothing
    out_of_limits: bool = False             # its process was ended for the time or the memory that it took
    late: bool = False                      # its process, or one that served what it stored, was ended for the time that it took
    outside: bool = False                   # what ended it was no fault of its own: a full disk, a signal from elsewhere

    @property
    def working(self) -> bool:
        return self.fate in WORKING

    @property
    def again_s(self) -> float:
        """That trying it would take once more."""
        return self.seconds - self.for_all_s

    @property
    def unscored(self) -> bool:
        """It runs, and was not scored because a better one was known."""
        return self.fate == "slower" and self.scores is None and not self.candidate.lossless

    @property
    def lasting(self) -> bool:
        """Whether the same would come of it another time."""
        return not self.out_of_limits and not self.outside and self.fate not in ("not_applicable", "not_tried")

    def again(self, speedup: float) -> None:
        """It was screened once more."""
        self.speedup = speedup
        if self.judgement is not None:
            self.judge(self.judgement)
        else:
            self.reason = f"{speedup:.2f}x in two screenings"

    def fail(self, error: WorkerFailed, said: str) -> None:
        """A process of it failed, or was ended, as `said`."""
        self.fate, self.reason = "failed", f"{error.kind.replace('_', ' ')}: {said}"
        self.late, self.outside = error.kind == "timeout", error.kind == "disk_full" or error.outside

    def judge(self, judgement: Judgement) -> None:
        """Its fate by the samples of the selection. `undecided` may still be confirmed by the others, if its drop is small enough."""
        fates: dict[str, Fate] = {"pass": "dominated", "fail": "rejected_accuracy", "undecided": "undecided"}
        self.judgement, self.fate = judgement, fates[judgement.verdict]
        self.reason = f"{self.speedup:.2f}x; {judgement.reason}"

    def misses(self, max_drop: float) -> bool:
        """It loses more than that, certainly or as far as was seen. A single number (no interval) never becomes certain."""
        judgement = self.judgement
        seen = judgement is not None and judgement.drop_ci is not None and judgement.drop > max_drop
        return self.fate == "rejected_accuracy" or (self.fate == "undecided" and seen)

    def record(self, threads: int | None = None) -> CandidateRecord:
        """`threads`: what it was measured with, for its lines."""
        candidate, judgement = self.candidate, self.judgement
        drop, drop_ci = judgement.numbers() if judgement is not None else (None, None)
        return CandidateRecord(
            id=candidate.label(), techniques=candidate.techniques(), kept_layers=sorted(candidate.keep),
            numerics=candidate.numerics, fate=self.fate, reason=self.reason, latency_ms=self.timing, speedup=self.speedup,
            accuracy=self.scores.mean if self.scores is not None else None,
            accuracy_drop=drop, accuracy_drop_ci=drop_ci,
            verdict=judgement.verdict if judgement is not None else None,
            samples_needed=judgement.samples_needed if judgement is not None else None,
            flip_rate=self.flip_rate if judgement is None or judgement.flip_rate is None else judgement.flip_rate,
            agreement=self.agreement, peak_memory_bytes=self.peak_memory_bytes, size_bytes=self.size_bytes,
            compressed_bytes=self.compressed_bytes, done=list(self.done), prepare_s=self.prepare_s,
            first_call_s=self.first_call_s, compile_s=self.compile_s, seconds=round(self.seconds, 3), code=code(candidate, threads))


def code(candidate: Candidate, threads: int | None = None) -> str:
    """The same without saturate; nothing for the model as it is."""
    if not candidate.parts:
        return ""
    kept = [f"# These modules stay in their own precision: leave them out of what is quantized: {', '.join(sorted(candidate.keep))}"]
    made = lines.whole([part.module.as_code(part.options) for part in candidate.parts], threads)
    return "\n".join([*(kept if candidate.keep else ()), made])


# -- on disk -----------------------------------------------------------------------------------------------------------


def rests_on(found: Tried) -> tuple[str, ...]:
    """What an entry holds for, beside what all of a search depends on: scores are those of one check, and who was not scored
    was slower than one that was within the budget."""
    if found.unscored:
        return "check", "budget"
    scored = found.scores is not None or found.fate == "rejected_behaviour"     # that may have been the check's doing
    return ("check",) if scored else ()


def entry_of(found: Tried) -> dict[str, Any]:
    """For the journal: JSON values."""
    timing = found.timing
    scores = found.scores
    return {
        "fate": found.fate, "reason": found.reason, "speedup": found.speedup, "agreement": found.agreement, "flip_rate": found.flip_rate,
        "timing": None if timing is None else [timing.p50, timing.p90, timing.p99, timing.calls],
        "scores": None if scores is None else {"mean": scores.mean, "values": scores.values, "metric": scores.metric,
                                               "others": [list(other) for other in scores.others], "identical": scores.identical},
        "peak_memory_bytes": found.peak_memory_bytes, "size_bytes": found.size_bytes, "compressed_bytes": found.compressed_bytes,
        "done": list(found.done), "prepare_s": found.prepare_s, "first_call_s": found.first_call_s,
        "compile_s": found.compile_s, "seconds": found.seconds,
    }


def tried_of(candidate: Candidate, entry: dict[str, Any]) -> Tried:
    """The reverse of `entry_of`; scores are not judged yet."""
    timing, scores = entry["timing"], entry["scores"]
    same = {name: entry[name] for name in ("speedup", "agreement", "flip_rate", "peak_memory_bytes", "size_bytes", "compressed_bytes",
                                           "prepare_s", "first_call_s", "seconds")}
    return Tried(
        candidate, entry["fate"], entry["reason"], done=tuple(entry["done"]),
        timing=None if timing is None else Timing(p50=timing[0], p90=timing[1], p99=timing[2], calls=timing[3]),
        scores=None if scores is None else Scores(
            scores["mean"], None if scores["values"] is None else tuple(scores["values"]), scores["metric"],
            tuple((name, mean) for name, mean in scores["others"]), scores["identical"]),
        compile_s=entry.get("compile_s"), **same)     # unknown to older journals
