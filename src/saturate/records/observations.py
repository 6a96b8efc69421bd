"""What the rules of `findings/` look at: one workload's evidence, from a trace, from a live profile, or from both.

None always means "not observed here", never zero: a rule that needs a missing number abstains. Shares are 0 to 1 of the
step unless the name says otherwise. The standard library only, because `tune` fills it in without a trace.
"""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True)
class LoaderSeen:
    """The input pipeline behind the training loop."""

    num_workers: int | None = None
    batch_size: int | None = None
    pin_memory: bool | None = None
    persistent_workers: bool | None = None
    cpu_count: float | None = None          # cores that the process may use
    busy_cores: float | None = None         # of those, busy during the step, by whatever program
    fetch_cpu: float | None = None          # CPU time of a fetch (of workers) / time in which a core was free; <1: it waits
    read_bytes_per_s: float | None = None   # from storage, during the step
    io_wait: float | None = None            # share of the fetch that waited for storage
    slowest: str = ""                       # "train.py:17 __getitem__"; two joined by "or" where it is one of them
    tensor_rows: bool | None = None         # rows of a TensorDataset, stacked one by one by the default collate function


@dataclass(frozen=True)
class CopySeen:
    """Copies between host and device, per step."""

    pageable_bytes: int | None = None
    pageable_ms: float | None = None        # time of pageable host-to-device copies
    pinned_bytes: int | None = None
    exposed: float | None = None            # copy time, of the step, not hidden by computation
    exposed_from_host: float | None = None  # of that the copies to the device


@dataclass(frozen=True)
class SyncSeen:
    """One place where the host waits for the device."""

    where: str                              # "train.py:41"
    what: str                               # "Tensor.item"
    calls_per_step: float
    ms_per_step: float


@dataclass(frozen=True)
class KernelsSeen:
    """The device's kernels (on a CPU: operators without operators inside them)."""

    count_per_step: float | None = None
    short_share: float | None = None        # share of kernels below 10 us
    short_time: float | None = None         # on a CPU: time of operators that take less than 10 us themselves, of the step
    median_us: float | None = None
    median_launch_delay_us: float | None = None
    queue_shallow: float | None = None      # share of kernels launched while at most one was queued
    host_late: float | None = None          # idle because the launch came too late
    graph_replay: bool | None = None


@dataclass(frozen=True)
class OperatorSeen:
    """One operator and shape, as in `records.analysis.Operator`."""

    name: str
    shapes: str = ""
    dtypes: str = ""
    kernels: tuple[str, ...] = ()
    calls_per_step: float = 0.0
    share: float = 0.0                      # of the step
    limit: str | None = None                # "latency", "memory", "compute"
    efficiency: float | None = None
    recoverable: float | None = None        # of the step
    dims: tuple[tuple[int, ...], ...] = ()  # input dimensions


@dataclass(frozen=True)
class CommunicationSeen:
    """Collectives between ranks. `exposed` is a share of the step."""

    world_size: int | None = None
    compared: int | None = None             # ranks whose collectives were compared; None: one was observed
    exposed: float | None = None            # communication not hidden by computation
    overlap: float | None = None            # share of communication that is hidden
    peer_wait: float | None = None          # share of communication that waits for later ranks; needs several ranks
    slowest_rank: int | None = None
    late_ms_per_step: float | None = None   # of that rank
    late_rank_waits_ms_per_step: float | None = None    # how long that rank itself waits for later ones

    @property
    def partly(self) -> bool:
        """Whether ranks of the run are missing among those compared: these may all have waited for one of them."""
        return self.compared is not None and self.world_size is not None and self.compared < self.world_size


@dataclass(frozen=True)
class MemorySeen:
    """At the peak. What has no unit is a share."""

    used: float | None = None               # peak / the device's memory; on a CPU, what all processes have in use / the machine's
    held: float | None = None               # what the allocator has reserved / the device's memory
    fragmentation: float | None = None      # of that, what is not in use
    allocator_retries: int | None = None
    parameters: float | None = None         # shares of what is known of the peak, by kind
    gradients: float | None = None
    optimizer_state: float | None = None
    activations: float | None = None
    line: str = ""                          # "train.py:41 forward": allocates most of it
    line_share: float | None = None


@dataclass(frozen=True)
class CompilerSeen:
    compiled: bool | None = None            # the workload compiles something
    recompiles: int | None = None           # in the observed window
    recompile_reasons: tuple[str, ...] = ()
    compile_share: float | None = None      # of the observed time
    graph_breaks: int | None = None
    graph_break_reasons: tuple[str, ...] = ()
    recompile_limit_hit: bool | None = None # dynamo gave up on a function, which has run eagerly since


@dataclass(frozen=True)
class MachineSeen:
    throttle: tuple[str, ...] | None = None # active clock throttle reasons; (): none
    clock_share: float | None = None        # SM clock / its maximum, median over the window
    temperature_c: float | None = None
    power_share: float | None = None        # of the board's limit


@dataclass(frozen=True)
class Observations:
    """All of it. `device` is "cpu", "cuda", ...; `capability` of a CUDA device."""

    device: str = "cpu"
    device_name: str = ""
    capability: tuple[int, int] | None = None
    bf16_native: bool | None = None         # the device multiplies bf16 matrices in hardware
    bf16_rate: float | None = None          # measured rate of bf16 matrix products over that of fp32 ones; None: not measured
    steps: int = 0                          # observed; 0: nothing is concluded; 1: with low confidence
    step_ms: float | None = None
    step_ms_recorded: float | None = None   # of the steps that waits were timed in, where a profiler made them longer
    busy: float | None = None               # of the step
    input_wait: float | None = None         # exposed
    input_wait_raw: float | None = None
    sync_idle: float | None = None          # idle while the host waited for the device
    device_wait: float | None = None        # idle although work was queued
    unattributed: float | None = None       # idle for a cause that is not known
    forward: float | None = None            # shares of the step by phase
    backward: float | None = None
    optimizer: float | None = None
    update: float | None = None             # of the step: the optimizer's own, without clipping, averages of weights and the like
    gc_pause: float | None = None           # garbage collector, of the step
    gc_collections_per_step: float | None = None
    gc_called: str = ""                     # "train.py:41": the call of `gc.collect()` that takes most
    gc_called_share: float | None = None    # of the step; None: the script calls none
    kernel_time: float | None = None        # of the training process's processor time: in the kernel
    page_faults: float | None = None        # of the training process per step: pages that the kernel had to give
    optimizer_kind: str = ""
    optimizer_fused: bool | None = None
    optimizer_tensors: int | None = None
    updated_by_hand: bool = False           # the script changes the parameters itself: it has no optimizer
    fp32_matmul: float | None = None        # matrix products and convolutions in fp32 (no TF32), of the step
    tf32_allowed: bool | None = None
    attention_eager: float | None = None    # softmax(QK)V written out: its matmuls and softmax, of the step
    attention_fell_back: bool = False       # scaled_dot_product_attention was called, and ran as these parts
    elementwise: float | None = None        # memory-bound elementwise and reduction operators but those of `attention_eager`, of the step
    overhead: float | None = None           # step time outside operators and loader (the interpreter), of the step
    limit: str = "unknown"                  # the verdict, `records.analysis.Limit`
    integrity_blocks: frozenset[str] = frozenset()  # names of conclusions that the trace cannot carry
    off_device: tuple[str, ...] | None = None  # modules or tensors on the CPU while training runs elsewhere; (): none
    batch_size: int | None = None
    loader: LoaderSeen = field(default_factory=LoaderSeen)
    copies: CopySeen = field(default_factory=CopySeen)
    syncs: tuple[SyncSeen, ...] = ()
    kernels: KernelsSeen = field(default_factory=KernelsSeen)
    operators: tuple[OperatorSeen, ...] = ()
    communication: CommunicationSeen = field(default_factory=CommunicationSeen)
    memory: MemorySeen = field(default_factory=MemorySeen)
    compiler: CompilerSeen = field(default_factory=CompilerSeen)
    machine: MachineSeen = field(default_factory=MachineSeen)
