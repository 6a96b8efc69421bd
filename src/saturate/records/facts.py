"""What was observed about one workload on one machine, before anything was changed.

The agent fills these in inside the user's process, so this file may import nothing but the standard library. `None`
always means "not measurable here", never zero.
"""

from __future__ import annotations

from dataclasses import dataclass, field

#: How a motif ends where no optimizer steps.
BY_HAND = "update by hand"


@dataclass(frozen=True)
class LoaderFacts:
    """One DataLoader that the training loop drew batches from (constructor arguments as the user gave them)."""

    num_workers: int = 0
    batch_size: int | None = None
    pin_memory: bool = False
    persistent_workers: bool = False
    prefetch_factor: int | None = None
    iterable: bool = False              # an IterableDataset: worker count changes what is read
    dataset_length: int | None = None
    batch_bytes: int | None = None      # host bytes of one collated batch
    holds_device_tensors: bool = False  # the dataset yields tensors that already live on an accelerator
    tensor_rows: bool = False           # rows of a TensorDataset, stacked by the default collate function


@dataclass(frozen=True)
class OptimizerFacts:
    """One torch optimizer that stepped."""

    kind: str = ""                      # class name, "AdamW"
    module: str = ""                    # where the class was defined, "torch.optim.adamw"
    fused: bool | None = None           # the flag of its first group; None: the class has no such flag
    capturable: bool | None = None
    parameters: int = 0                 # number of tensors
    dtypes: tuple[str, ...] = ()
    sparse: bool = False
    differentiable: bool = False


@dataclass(frozen=True)
class ModuleFacts:
    """One module that techniques may act on: outermost in training mode, with trainable parameters, and called."""

    kind: str = ""
    parameters: int = 0                 # scalar count, trainable
    parameter_bytes: int = 0
    dtypes: tuple[str, ...] = ()
    convolutions: int = 0               # Conv2d / ConvTranspose2d layers
    grouped_convolutions: int = 0       # of these
    other_convolutions: int = 0         # layers in one or three dimensions
    linears: int = 0
    recurrents: int = 0
    recurrent_nets: int = 0             # of these, those that are no cells: nn.RNN, nn.LSTM, nn.GRU
    batch_norms: int = 0
    attentions: int = 0                 # modules that look like attention
    repeats: int = 0                    # how often its most repeated composite child comes, when that is at least four times
    forward_overridden: bool = False    # `forward` is already an attribute of the instance: not ours to replace
    compiled: bool | None = False       # the script compiles its forward, or a function around it; None: it compiles something
    distributed: bool = False           # wrapped in DistributedDataParallel


@dataclass(frozen=True)
class TrainerFacts:
    """What of a framework runs the loop of a training, where it is known."""

    kind: str = ""                      # class name, of transformers' Trainer or of one that is derived from it
    accumulation: int = 1               # micro-steps of an update, as it was asked for
    never_merged: str = ""              # why several of them cannot be one; "": nothing is known against it


@dataclass(frozen=True)
class MachineFacts:
    """The part of the machine that the workload may use."""

    cpu_name: str = ""
    cpu_count: float = 1.0              # cores this process may use: affinity and cgroup quota, whichever is less
    physical_cores: int | None = None
    cpu_bf16_native: bool = False       # AVX512-BF16, AMX or an equivalent
    cpu_fp16_native: bool = False
    memory_bytes: int | None = None     # host limit: cgroup or RAM
    shm_bytes: int | None = None        # free bytes of /dev/shm
    compiler: str | None = None         # C++ compiler on PATH, needed by torch.compile on a CPU
    glibc: bool = False                 # the C library is glibc, whose allocator can be told to keep memory
    preload_allocators: tuple[tuple[str, str], ...] = ()  # ("jemalloc", "/usr/lib/.../libjemalloc.so.2")


@dataclass(frozen=True)
class Facts:
    """Everything eligibility is decided from."""

    torch: str = ""
    python: str = ""
    device: str = "cpu"                 # where the trained parameters live: "cpu", "cuda", ...
    device_name: str = ""
    capability: tuple[int, int] | None = None
    rocm: bool = False                  # torch is built for AMD's GPUs, which it calls "cuda"; their capability is no CUDA one
    device_memory_bytes: int | None = None
    device_reserved_bytes: int = 0      # peak that torch's allocator held on the device, so far
    device_room_bytes: int | None = None  # what it holds of the fullest device now, and what nobody does
    memory_limit_bytes: int | None = None  # what `tune --fit` asked for, set by the study; None: no limit was asked
    cuda_bf16_native: bool = False
    tf32_matmul: bool = False           # already allowed by the script
    cudnn_benchmark: bool = False
    world_size: int = 1
    motif: str = ""                     # what one step consists of, "F B S"
    micro_steps: int = 1                # backward passes per step
    autocast: str | None = None         # dtype the user's own script already autocasts to
    steps_in_forward: bool = False      # the trained module's forward calls the backward pass and the optimizer itself
    grad_scaler: bool = False           # the user's own script scales its loss
    compiles: bool = False              # the script compiles anything itself: no hook may be set, or that is compiled again
    checkpointed: bool = False          # the script recomputes activations itself (torch.utils.checkpoint)
    gradients_read: bool | None = None  # it reads gradients besides backward, step and zero_grad (clips them, for one)
    threads: int = 1                    # torch intra-op threads
    flops_per_step: int | None = None   # of matrix products, convolutions, attention and recurrent nets, forward and backward
    flops_unknown: str = ""             # which of them no formula counts; then the number is None
    flops_left_out: tuple[str, ...] = ()  # operators that may do other arithmetic: counted as 0
    sdpa_calls: int = 0                 # scaled_dot_product_attention calls in one step
    zero_grad_set_to_none: bool | None = None  # None: the script never called zero_grad
    gc_enabled: bool = True
    gc_objects: int = 0                 # objects tracked by the collector once training runs
    gc_ms_per_step: float = 0.0         # pauses of the collector
    host_to_device_bytes: int = 0       # bytes copied from host to device in one step (0 on a CPU)
    step_ms: float = 0.0                # median over the observed steps, not a measurement to decide by
    input_wait_ms: float = 0.0          # time in DataLoader.__next__ per step
    input_exposed_ms: float | None = None   # of it, what an accelerator had nothing to do; None: nothing hides it, all of it counts
    page_faults: float = 0.0            # per step, of rank 0: pages that the kernel had to give and clear; the most of several processes
    least_page_faults: float | None = None  # the least of several processes of the same command; None: one was looked at
    kernel_ms: float = 0.0              # processor time of rank 0 in the kernel per step, all threads
    backward_ms: float = 0.0            # on CUDA devices this and the next are the device's time
    optimizer_ms: float = 0.0
    shapes: int = 1                     # distinct input shapes seen at the outermost modules
    saves: int = 0                      # calls of torch.save in the observed steps, open files left out
    save_bytes: int = 0                 # what they wrote, all together
    saves_into_files: int = 0           # calls of torch.save with a file that the script had opened; no technique acts on them
    save_s: float = 0.0                 # how long the training stood in them, all together
    saves_into_memory: int = 0          # of `saves`, those into a buffer, which something else writes to the disk afterwards
    modules: tuple[ModuleFacts, ...] = ()
    optimizers: tuple[OptimizerFacts, ...] = ()
    loaders: tuple[LoaderFacts, ...] = ()
    trainer: TrainerFacts | None = None  # None: the loop is the script's own, or of a framework that is not known
    packages: tuple[str, ...] = ()      # importable in the workload's environment, of those that techniques can use
    machine: MachineFacts = field(default_factory=MachineFacts)


@dataclass(frozen=True)
class Evidence:
    """What the agent saw after techniques were applied and warm-up ended: the raw material of activation proofs."""

    dynamo_frames: int = 0              # frames that dynamo compiled successfully
    graph_breaks: int = 0
    recompiles: int = 0
    recompile_limit_hit: bool = False
    compile_s: float = 0.0
    cuda_graphs: bool | None = None     # whether inductor recorded any; None: not on a CUDA device, or this torch does not tell
    cuda_graph_skips: int = 0           # graphs that inductor was to record, and did not
    loaders: tuple[LoaderFacts, ...] = ()       # as really constructed
    live_workers: int = 0               # loader worker processes seen alive
    optimizers: tuple[OptimizerFacts, ...] = ()
    threads: int = 1
    allow_tf32: bool | None = None
    cudnn_benchmark: bool | None = None
    grads_none_after_zero: bool | None = None
    gc_frozen: int = 0                  # gc.get_freeze_count()
    channels_last: int = 0              # 4-d parameters stored channels-last
    environment: dict[str, str] = field(default_factory=dict)   # only the variables that techniques set
    notes: dict[str, str] = field(default_factory=dict)         # what techniques recorded with `context.note`
