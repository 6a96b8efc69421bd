"""What `saturate optimize` observed, tried and found: facts about a model, candidates, and the result.

`ModelFacts` is filled in inside a candidate's process, so that part is standard-library dataclasses. `None` always means
"not measurable here", never zero. Times are milliseconds per call of one batch.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

import msgspec

from saturate.records.result import Phase

SCHEMA = 1

Verdict = Literal["pass", "fail", "undecided"]

#: What a search found. keeps_limits: nothing is faster, but this keeps the limits, and the model does not.
SearchVerdict = Literal["faster", "keeps_limits", "nothing_helps", "inconclusive"]

#: Verdicts of a search that has a best.
ANSWERS = ("faster", "keeps_limits")

#: kept: the best. dominated: works, another is better. slower: not faster than the baseline. over_limit: memory or p99
#: above what was asked. rejected_accuracy, rejected_behaviour (a guard), undecided (samples are missing).
Fate = Literal["kept", "dominated", "slower", "no_difference", "inconclusive", "over_limit", "rejected_accuracy", "rejected_behaviour",
               "undecided", "not_applied", "not_applicable", "not_deployable", "failed", "not_tried"]


#: Why a candidate is `not_tried`: the time that was given is over, or somebody or something ended the search before that.
TIME_ENDED, SEARCH_ENDED = "the time ended before its turn", "the search was ended before its turn"

#: ... or the user does not want it in any candidate, or gave nothing that could judge it or that it could be trained with.
LEFT_OUT = "left out by --only or --skip"
NO_CHECK = "it changes what the model computes, and there is no check to say whether that is acceptable"
NO_TRAIN = "it needs training data: give train=saturate.Train(loader, loss), on the command line --train NAME"
OF_THE_USER = (LEFT_OUT, NO_CHECK, NO_TRAIN)


@dataclass(frozen=True)
class ModelFacts:
    """One model with its inputs, before anything was changed."""

    kind: str = ""                          # class name
    device: str = "cpu"
    torch: str = ""                         # version
    parameters: int = 0                     # scalars
    parameter_bytes: int = 0
    dtypes: tuple[str, ...] = ()            # of floating-point parameters, "float32"
    linears: int = 0
    convolutions: int = 0
    embeddings: int = 0
    recurrents: int = 0
    norms: int = 0
    batch_norms: int = 0
    attentions: int = 0                     # modules that look like attention, or calls of scaled_dot_product_attention
    reused_modules: tuple[str, ...] = ()    # called more than once in a forward
    batch_size: int | None = None           # first dimension of the first input, where all inputs agree
    varying_shapes: bool = False            # the batches differ in a dimension (other than a smaller last batch)
    exportable: bool | None = None          # torch.export took it; None: not tried
    export_problem: str = ""                # why it did not: data-dependent control flow, for one
    random: bool = False                    # two calls on one input differ
    keeps_state: bool = False               # they differ although all random numbers were the same: a call leaves something behind
    writes_inputs: bool = False             # a call changes the tensors that it is given
    mode: str = "inference_mode"            # torch's, in which it is called; no_grad or enable_grad for one that differentiates
    training_mode: bool = False             # it came in training mode, and was switched to evaluation
    installed: dict[str, str] = field(default_factory=dict)     # onnxruntime, onnx, onnxscript, torchao, tensorrt ... -> version
    cpu_flags: frozenset[str] = frozenset() # those that matter: avx2, avx512f, avx512_vnni, avx_vnni, avx512_bf16, amx_int8, amx_bf16
    capability: tuple[int, int] | None = None       # CUDA compute capability
    cores: int = 1                          # that this process may use
    threads: int = 1                        # torch's, as the user has it
    calibration_samples: int = 0
    trainable: bool = False                 # `train` was given
    student: bool = False                   # with a student to distil into
    generates: bool = False                 # its answer is generated text: numbers of tokens, (samples, length)


class Timing(msgspec.Struct, frozen=True, kw_only=True):
    """Milliseconds per call, over all blocks of a race or a screening."""

    p50: float
    p90: float
    p99: float
    calls: int


class CandidateRecord(msgspec.Struct, frozen=True, kw_only=True):
    """One candidate and what became of it. Nothing vanishes: every one has a fate and a reason."""

    id: str                                 # "bf16 + aot-inductor", label of techniques and options
    techniques: list[dict[str, Any]]        # [{"id", "options"}], in the order of application
    kept_layers: list[str] = []             # modules that stayed in the original precision (repair)
    numerics: str = "exact"
    fate: Fate
    reason: str
    latency_ms: Timing | None = None
    throughput_per_s: float | None = None
    speedup: float | None = None            # over the user's own baseline
    speedup_ci: tuple[float, float] | None = None
    accuracy: float | None = None
    accuracy_drop: float | None = None
    accuracy_drop_ci: tuple[float, float] | None = None
    verdict: Verdict | None = None
    samples_needed: int | None = None       # of the check in all, so that it mostly passes if drops stay as they are
    flip_rate: float | None = None          # share of samples that became right or wrong; else of rows whose largest entry changed
    agreement: float | None = None          # signal-to-noise ratio of the outputs against the baseline, dB
    peak_memory_bytes: int | None = None
    size_bytes: int | None = None           # of the artifact, of those that were stored
    compressed_bytes: int | None = None     # that the weights take compressed, of a technique that is for size
    done: list[str] = []                    # what each technique said that it did, in the order of application
    prepare_s: float | None = None          # quantize, train, export, compile
    first_call_s: float | None = None
    compile_s: float | None = None          # of both, in compilers; None: nothing was compiled
    seconds: float = 0.0                    # that this candidate cost the search
    code: str = ""                          # the same without saturate


class ThroughputRow(msgspec.Struct, frozen=True, kw_only=True):
    """Samples per second of the user's model, of the winner, or of one that came close to it, at one batch size in some processes at
    once."""

    of: Literal["baseline", "best", "rival"]
    batch: int
    processes: int
    samples_per_s: float
    over_limit: str | None = None           # which of the limits it passes: it is shown, and is nobody's best
    id: str = ""                            # of the candidate's row


class Best(msgspec.Struct, frozen=True, kw_only=True):
    """The winner, re-loaded from its artifact in a fresh process, measured and scored again."""

    recipe: list[dict[str, Any]]
    latency_ms: Timing
    speedup: float
    speedup_ci: tuple[float, float]
    speedup_over_lossless: float | None = None
    speedup_over_lossless_ci: tuple[float, float] | None = None
    speedup_over_lossless_reason: str | None = None     # why it is not known
    accuracy: float | None = None
    accuracy_drop: float | None = None
    accuracy_drop_ci: tuple[float, float] | None = None
    verdict: Verdict | None = None          # of the check; what is lossless may be undecided. None: there was no check
    samples_needed: int | None = None       # of the check in all
    peak_memory_bytes: int | None = None
    size_bytes: int | None = None


class Unconfirmed(msgspec.Struct, frozen=True, kw_only=True):
    """The best so far of a search that ended early. A screening is no claim: loaded and raced it may be slower, or lose more."""

    id: str                                 # of its row among the candidates
    speedup: float
    artifact: str | None                    # where it is stored; None: it was not, yet


class OptimizeRecord(msgspec.Struct, frozen=True, kw_only=True):
    """What `saturate optimize --json` prints, and what the report is made from."""

    schema: int = SCHEMA
    run: str
    model: str
    device: str
    machine: str
    torch: str
    objective: str
    batch_size: int | None
    max_drop: float | None                  # of the budget; in units of the score, as are all drops, unless `relative`
    relative: bool = False                  # max_drop and all drops are shares of the baseline's score
    confidence: float | None
    limits: dict[str, float] = {}
    verdict: SearchVerdict
    baseline: CandidateRecord               # its fate is over_limit where it passes one of the limits itself
    best_lossless: CandidateRecord | None   # the baseline where no lossless candidate beats it; None: not known
    best: Best | None
    candidates: list[CandidateRecord]
    unconfirmed: Unconfirmed | None = None  # interrupted, or the machine gave out, before anything was confirmed
    throughput: list[ThroughputRow] = []    # objective throughput: what was measured, of both
    throughput_ratio: float | None = None   # samples per second of the winner over the model's own, each at its best setting
    throughput_ratio_ci: tuple[float, float] | None = None
    notes: list[str] = []                   # what the user must know: random at inference, a float cannot certify ...
    seconds: float = 0.0
    given_s: float | None = None            # what it was to take: a process that is being stored or confirmed is not cut off
    phases: list[Phase] = []                # what the seconds went into: start, check, search, winner, lossless, throughput
    artifact: str | None = None
    serve: str = ""                         # three lines, imports aside, that call the artifact without saturate
    report: str | None = None
