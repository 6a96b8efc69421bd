"""What one `saturate fit` found: the object behind `--json`, the terminal summary and the HTML file."""

from __future__ import annotations

from typing import Literal

import msgspec

SCHEMA = 1

#: fits: `micro_batch` was proved. nothing_fits: not even a batch of 1. refused: there is nothing to search, `reason` says why.
#: inconclusive: no size was proved, because the budget ended, the workload did, or all sizes that were to be proved failed;
#: `measured_batch` is then no answer.
FitVerdict = Literal["fits", "nothing_fits", "refused", "inconclusive"]

#: fits: below the limit by the margin. too_close: it ran, but not below the limit by the margin. allocator_retries: the device
#: ran, but its allocator had to free its cache to go on. failed: it ended for another reason than memory.
SizeOutcome = Literal["fits", "too_close", "out_of_memory", "allocator_retries", "failed", "out_of_time"]


class SizeTried(msgspec.Struct, frozen=True, kw_only=True):
    """One size that ran. Sizes with the same `trial` ran in one process, in this order."""

    micro_batch: int | None                     # None: the script's own size, which could not be observed
    outcome: SizeOutcome
    peak_bytes: int | None
    seconds: float
    trial: int                                  # number of the process, from 1
    purpose: Literal["measure", "prove", "throughput"]
    steps: int = 0
    reason: str = ""


class SizeThroughput(msgspec.Struct, frozen=True, kw_only=True):
    """Samples per second of all ranks together, with its 95 % interval over rounds."""

    micro_batch: int
    samples_per_s: float
    ci: tuple[float, float]


class LoaderBatch(msgspec.Struct, frozen=True, kw_only=True):
    """One of several loaders that a step reads: its batch in the script, and what it becomes with the answer."""

    dataset: str
    length: int | None                          # samples; None: not known
    script_batch: int
    micro_batch: int | None                     # None: there is no answer


class Fit(msgspec.Struct, frozen=True, kw_only=True):
    """The object that `saturate fit --json` prints. Batches are per process: of one rank, in one micro-step."""

    schema: int = SCHEMA
    command: list[str]
    verdict: FitVerdict
    reason: str = ""
    target: Literal["memory", "throughput"] = "memory"
    knob: str | None = None                     # the script's own argument that was searched, instead of the DataLoader
    micro_batch: int | None = None              # the answer, which was proved; None: there is none
    measured_batch: int | None = None           # where nothing was proved: the largest that ran, for `measured_steps`
    measured_steps: int = 0
    script_batch: int | None = None             # what the script uses by itself
    loaders: list[LoaderBatch] = []             # where a step reads several: `micro_batch` is the first one's, the others keep their proportion
    world_size: int = 1
    largest_tried: int | None = None
    largest_fitting: int | None = None          # equals micro_batch, unless the target is throughput
    growth_bytes_per_step: float | None = None  # memory grows from step to step: with this batch (without an answer, the measured one)
    lasts_steps: int | None = None              # ... and passes the limit after about so many steps
    proved_steps: int = 0
    proved_with: list[str] = []                 # what the proof saw besides steps
    not_seen: list[str] = []                    # what it did not, and why
    peak_bytes: int | None = None               # of the proof
    limit_bytes: int | None = None
    margin_bytes: int | None = None             # the answer's peak is below the limit by at least this
    predicted_peak_bytes: int | None = None     # of the answer, before it ran
    counted: str = ""                           # what the peak counts
    kinds: dict[str, int] = {}                  # held between steps, bytes: parameters, gradients, optimizer_state
    sample_bytes: float | None = None           # what one more sample adds to the peak
    fixed_bytes: float | None = None            # what a batch of no samples would take
    trials: list[SizeTried] = []
    trial_count: int = 0                        # processes that were started
    throughput: list[SizeThroughput] = []
    throughput_note: str = ""
    knee: int | None = None                     # the smallest size within the noise of the best throughput
    utilisation: float | None = None            # at the knee, 0 to 1
    utilisation_of: str = ""                    # what it is a share of
    advice: list[str] = []
    notes: list[str] = []
    seconds: float = 0.0
    report: str = ""                            # path
    next_command: str = ""
