"""What an analysis says about where the time went: the objects behind `analyze --json` and `profile --json`.

Every length is in integer nanoseconds and every share is 0 to 1, with its denominator in its name. What cannot be known
is None, and `unknown` (field -> reason) beside it says why. Definitions: docs/analysis.md.
"""

from __future__ import annotations

from collections import Counter
from typing import Any, Literal

import msgspec

SCHEMA = 1

Limit = Literal[
    "input-bound", "host-bound", "sync-bound", "communication-bound", "memory-bound", "compute-bound",
    "device-wait-bound",        # idle although the work was already queued: dependencies, peers, events
    "unknown",
]

Confidence = Literal["high", "medium", "low"]


class Evidence(msgspec.Struct, frozen=True, kw_only=True):
    """One number that a finding rests on."""

    metric: str                     # "exposed data wait"
    value: float
    unit: str = ""                  # "of the step", "ms per step", "kernels", "" for a plain number
    threshold: float | None = None  # what it was compared with; None: with nothing
    where: str = ""                 # "train.py:41", "aten::bmm [16, 5185, 5185]", ""


class Finding(msgspec.Struct, frozen=True, kw_only=True):
    """One diagnosed cause of lost time."""

    id: str
    title: str
    reason: str                     # one sentence with the numbers, for a person
    evidence: list[Evidence]
    bound: float | None             # the most that mending it could give: step now / step then (1.51), an upper bound
    confidence: Confidence
    techniques: list[str] = []      # ids of techniques that address it
    advice: str = ""                # what to do where no technique does it


class DataWait(msgspec.Struct, frozen=True, kw_only=True):
    """Shares of the window in DataLoader.__next__ of the training thread; None: no loader events, so unknown."""

    raw: float | None
    exposed: float | None           # of it, while the device had nothing to do


class Gaps(msgspec.Struct, frozen=True, kw_only=True):
    """Shares of the device's idle time inside its span [first start, last end], by cause; they sum to 1. None: no gap; `input`
    alone: the loader was not recorded, and what it took counts under the other causes."""

    input: float | None
    host_late: float | None
    sync: float | None
    already_launched: float | None
    unattributed: float | None


class Operator(msgspec.Struct, frozen=True, kw_only=True):
    """The kernels that one operator with one set of shapes launched."""

    name: str                       # "aten::bmm"
    shapes: str                     # "[16, 5185, 64] [16, 64, 5185]"
    dtypes: str                     # "bfloat16"
    calls: int
    kernels: list[str]              # distinct kernel names, the longest-running first
    time_ns: int                    # summed over kernels
    flops: int | None               # of all calls; None: not modelled
    bytes: int | None               # compulsory traffic of all calls
    limit: Literal["latency", "memory", "compute"] | None = None
    inefficient: bool | None = None # below 0.4 of the roof
    efficiency: float | None = None # roof time / measured time; None: not modelled or an anomaly
    recoverable_ns: int | None = None   # time above the roof
    unknown: dict[str, str] = {}


class Roofline(msgspec.Struct, frozen=True, kw_only=True):
    """Operators by recoverable time, against `ceilings`."""

    coverage: float | None          # modelled kernel time / kernel time
    operators: list[Operator]
    ceilings: dict[str, float] = {} # "float32", "bfloat16", ...: FLOP/s; "copy": bytes/s
    source: str = ""                # "measured on this device" or "specification of NVIDIA H100 SXM x 0.80, 0.90"


class Occupancy(msgspec.Struct, frozen=True, kw_only=True):
    """Proxies from launch shapes, weighted by kernel time; upper bounds. None where grid and block are not known."""

    sm_fill: float | None           # min(1, blocks / SMs), over busy time
    sm_fill_of_step: float | None   # the same with gaps counted as 0
    tail: float | None              # waves / ceil(waves)
    occupancy: float | None         # resident threads / the SM's most


class StepParts(msgspec.Struct, frozen=True, kw_only=True):
    """One step: when it began, counted from the first one, and its exclusive parts, which sum to its length."""

    start_ns: int
    compute_ns: int
    exposed_communication_ns: int
    exposed_copy_ns: int
    idle_ns: int


class Device(msgspec.Struct, frozen=True, kw_only=True):
    """One device of one rank. The four exclusive parts sum to `step_ns`, or to `span_ns` where there are no steps."""

    id: int
    name: str
    rank: int | None = None         # as the file says it, else the number under which ranks were compared
    source: str = ""                # path of the file it came from
    kernels: int | None = 0         # None: some were lost, so that their number is not known
    steps: int = 0
    span_ns: int | None = None
    step_ns: int | None = None      # union of the steps
    busy_of_span: float | None = None
    busy_of_step: float | None = None
    compute_ns: int | None = None
    exposed_communication_ns: int | None = None
    exposed_copy_ns: int | None = None
    idle_ns: int | None = None
    communication_ns: int | None = None
    communication_overlap: float | None = None  # share of communication that computation hides
    data_wait: DataWait = DataWait(raw=None, exposed=None)
    gaps: Gaps = Gaps(input=None, host_late=None, sync=None, already_launched=None, unattributed=None)
    gap_ns: dict[str, int] = {}     # the same classes in ns, inside the span; those that are known
    edge_ns: dict[str, int] = {}    # the same classes, of the parts of the steps outside the span
    window_gap_ns: dict[str, int] = {}  # the same classes, of the steps (of the span, where there are none): what shares of the step are of
    short_kernels: float | None = None          # share of kernels below 10 us
    median_kernel_ns: int | None = None
    median_launch_delay_ns: int | None = None   # from the start of the launching call to the kernel's start, at least 0
    roofline: Roofline = Roofline(coverage=None, operators=[])
    occupancy: Occupancy = Occupancy(sm_fill=None, sm_fill_of_step=None, tail=None, occupancy=None)
    each_step: list[StepParts] = []             # in order; empty where there are none
    verdict: Limit = "unknown"
    unknown: dict[str, str] = {}


#: Of the busy time of the busiest device of a file: below it a device took no part in the work.
TOOK_PART = 0.01


def at_work(devices: list[Device]) -> list[Device]:
    """The devices without those that hardly worked beside another one of their file: one of which a stray copy or a context was
    recorded waits for nothing, and says nothing of a program that computes on another. All, where that is not known."""
    busy = [_busy_ns(device) for device in devices]
    most: dict[str, int] = {}
    for device, ns in zip(devices, busy):
        most[device.source] = max(most.get(device.source, 0), ns or 0)
    return [device for device, ns in zip(devices, busy) if ns is None or ns >= TOOK_PART * most[device.source]]


def overall(devices: list[Device]) -> Limit:
    """The verdict that bears most of the devices' time."""
    time_ns: Counter[Limit] = Counter()
    for device in at_work(devices):
        time_ns[device.verdict] += 1 + (device.step_ns or device.span_ns or 0)
    return max(time_ns, key=lambda limit: time_ns[limit], default="unknown")


def _busy_ns(device: Device) -> int | None:
    window = device.span_ns if device.step_ns is None else device.step_ns
    return None if window is None or device.idle_ns is None else window - device.idle_ns


class Problem(msgspec.Struct, frozen=True, kw_only=True):
    """One thing wrong with a trace, and which conclusions it forbids."""

    id: str                         # "lost-records", "zero-durations", "graph-replay", "no-steps", "truncated", ...
    message: str
    blocks: list[str]               # fields of Device that are None because of it


class Integrity(msgspec.Struct, frozen=True, kw_only=True):
    ok: bool
    problems: list[Problem]


class Straggler(msgspec.Struct, frozen=True, kw_only=True):
    """One rank across the collectives that all ranks took part in."""

    rank: int
    wait_ns: int                    # time spent waiting for later peers
    transfer_ns: int                # the least duration over ranks, summed: what communication itself costs
    late_ns: int                    # how much later than the first rank it arrived, summed
    collectives: int
    late_from: Literal["starts", "durations"] = "starts"    # durations: the ranks' clocks do not agree


class Analysis(msgspec.Struct, frozen=True, kw_only=True):
    """The object that `saturate analyze --json` prints."""

    schema: int = SCHEMA
    sources: list[str] = []
    devices: list[Device]
    integrity: Integrity
    verdict: Limit
    findings: list[Finding]
    stragglers: list[Straggler] = []
    annotations: list[dict[str, Any]] = []      # labels (record_function, NVTX): name, count, total_ns, device_ns
    unknown: dict[str, str] = {}


class Sync(msgspec.Struct, frozen=True, kw_only=True):
    """One place in the user's code where the host waits for the device (on a CPU: where a tensor becomes a number)."""

    file: str                       # "" where the line is not known: it waits inside an operator
    line: int
    what: str                       # "Tensor.item", "Tensor.cpu", "print", "cudaStreamSynchronize in aten::nonzero"
    calls_per_step: float | None    # None: not counted (of `input_lines`, which are seen by looking now and then)
    ms_per_step: float


class ModuleCost(msgspec.Struct, frozen=True, kw_only=True):
    """One module's forward, children included."""

    name: str                       # qualified: "blocks.3.mlp"
    kind: str
    forward_ms: float               # per step, in steps of its own without a profiler
    self_ms: float                  # without children
    flops: int | None = None        # forward, per step
    memory_bytes: int | None = None # allocated in it and still held when it returned, per step


class MemoryLine(msgspec.Struct, frozen=True, kw_only=True):
    """A line of code, and the bytes that it had allocated and that were in use at the peak of a step (on a CPU: that it had
    autograd keep for the backward pass)."""

    file: str
    line: int
    function: str
    inside: str = ""                # where in a library, if the line only calls one: "modeling.py:310 forward"
    bytes: int


class Memory(msgspec.Struct, frozen=True, kw_only=True):
    """Bytes by kind at the peak of a step; None: not measurable here."""

    parameters: int | None = None
    gradients: int | None = None
    optimizer_state: int | None = None
    activations: int | None = None
    other: int | None = None
    peak: int | None = None
    reserved: int | None = None     # what the allocator holds
    fragmentation: float | None = None          # reserved and not used, of reserved, at the peak
    allocator_retries: int | None = None
    limit: int | None = None        # the device's memory; on a CPU, what the machine gives this process
    lines: list[MemoryLine] = []    # that allocate most, most bytes first
    unknown: dict[str, str] = {}


class LoaderCost(msgspec.Struct, frozen=True, kw_only=True):
    """What the DataLoader costs a step: ordinary steps beside steps with one batch replayed, in turns in one process."""

    step_ms: float                  # with the loader, median over rounds
    replayed_step_ms: float         # with one batch replayed
    cost_ms: float                  # the difference: what a loader that takes no time would save
    share: float                    # of the step with the loader; below 0 where replaying was slower (noise)
    share_ci: tuple[float, float]   # 95 %
    rounds: int                     # pairs of blocks


class Profile(Analysis, frozen=True, kw_only=True):
    """The object that `saturate profile --json` prints. `step_ms` and `mfu` are from unprofiled steps. `split` is in integer
    ns per part and sums to `split_steps` steps: the recorded ones on an accelerator, {} where its events do not tell; on a CPU, where a profiler would
    stretch some parts more than others, steps that were clocked without one (`trace.phases.calibrated`)."""

    command: list[str] = []
    step_ms: float | None = None                # without a profiler: median, or mean where input is uneven
    step_ms_profiled: float | None = None
    loader_cost: LoaderCost | None = None       # with --synthetic-input
    split: dict[str, int] = {}                  # "input", "host_to_device", "forward", "backward", "optimizer",
                                                # "communication", "sync", "idle"
    split_steps: int = 0
    recorded_steps: int = 0                     # in the trace; the split is of other steps on a CPU
    mfu: float | None = None                    # model FLOPs / (step time x peak of the specification)
    hfu: float | None = None
    mfu_achievable: float | None = None         # the same against the measured ceiling
    flops_per_step: int | None = None
    flops_coverage: float | None = None         # share of operator time that the count covers: without that of `flops_left_out`
                                                # and of kernels that no operator of torch launched
    flops_left_out: list[str] = []              # operators that no formula is known for: counted as 0
    memory: Memory = Memory()
    syncs: list[Sync] = []
    input_lines: list[Sync] = []                # the slowest code below the dataset, same shape
    modules: list[ModuleCost] = []
    off_device: list[str] = []                  # modules or tensors left on the CPU while training runs elsewhere
    graph_breaks: list[str] = []
    recompiles: list[str] = []
    trace: str = ""                             # path of the recorded trace
    report: str = ""
    next_command: str = ""                      # the tune command to type
