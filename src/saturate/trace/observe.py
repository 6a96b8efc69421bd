"""What the rules may look at, as far as a trace can tell it; what it cannot tell stays None."""

from __future__ import annotations

import re

import numpy as np

from saturate.machine import accelerators
from saturate.records.analysis import Device, Operator
from saturate.records.observations import (
    CommunicationSeen,
    CompilerSeen,
    CopySeen,
    KernelsSeen,
    LoaderSeen,
    MemorySeen,
    Observations,
    OperatorSeen,
    SyncSeen,
)
from saturate.trace import breakdown, gaps, integrity, patterns, phases
from saturate.trace.columns import KERNEL, MEMCPY, Column, DeviceInfo, HostEvents, Trace, row_type
from saturate.trace.copies import FROM_HOST, FROM_PAGEABLE, FROM_PINNED
from saturate.trace.intervals import EMPTY, contains, intersect, join, length, overlap, subtract, union
from saturate.trace.launches import by_thread, leaves, named, spans
from saturate.trace.nesting import innermost, nest
from saturate.trace.together import Together
from saturate.trace.view import SHORT_NS, View, facts, joined, view
from saturate.trace.windows import CPU

#: Marks a wait for the batch to be copied, which is not the reading of a value.
UPLOAD = " (HtoD)"

_SINGLE_PROCESS = re.compile(r"^enumerate\(DataLoader\)#_SingleProcessDataLoaderIter")
_OPTIMIZER_STEP = re.compile(r"^Optimizer\.step#(\w+)\.step")
_BACKWARD = re.compile(r"^saturate\.backward$|^autograd::engine::evaluate_function")
_FUSED = re.compile(r"^aten::_fused_(adam|adamw|sgd|adagrad)")
_LISTS = re.compile(r"^aten::_(foreach|fused)_")
_COMPILED = re.compile(r"Torch-Compiled Region|CompiledFxGraph|CompiledFunction|^triton_")
_COMPILING = re.compile(r"compile_inner|entire_frame_compile")
_AMD_BF16 = re.compile(r"MI[23]\d\d")
_READS_VALUE = re.compile(r"^aten::item$")
#: What scaled_dot_product_attention calls where it has no fused kernel for its arguments.
_ATTENTION_IN_PARTS = re.compile(r"^aten::_scaled_dot_product_attention_math")


def observations(trace: Trace, device: Device, labelled: bool = True) -> Observations:
    """Of one device, as `analyze` described it. `labelled`: False leaves out the waits that the recorder labelled, for whoever has
    its own record of these."""
    seen = view(joined(trace), device.id)
    whole = seen.parts.window_ns
    info = facts(trace, device.id)
    idle = {cause: _share(ns, whole) for cause, ns in seen.idle_ns.items()}
    blocked = integrity.blocked(seen.problems).keys()
    if blocked & {"busy", "gaps"}:
        idle = {}
    operators = device.roofline.operators
    split = {} if "busy" in blocked else _phases(seen)      # of what ran, and that is not known
    kind = _optimizer_kind(seen)
    together = Together(seen)

    def share(found: list[Operator] | None) -> float | None:
        return None if found is None else _share(together.ns(found), whole)

    return Observations(
        device="cpu" if device.id == CPU else "cuda", device_name=device.name,
        capability=info.capability if info and not device.name.startswith("AMD") else None,
        bf16_native=_bf16(info, device.name), steps=device.steps, step_ms=_per_step(device.step_ns, device),
        busy=device.busy_of_step, input_wait=device.data_wait.exposed, input_wait_raw=device.data_wait.raw,
        sync_idle=idle.get("sync"), device_wait=idle.get("already_launched"), unattributed=idle.get("unattributed"),
        forward=split.get("forward"), backward=split.get("backward"), optimizer=split.get("optimizer"), update=split.get("update"),
        optimizer_kind=kind, optimizer_fused=_optimizer_fused(seen, kind), optimizer_tensors=_optimizer_tensors(seen),
        fp32_matmul=share(patterns.fp32_matmuls(operators) if operators else None),
        attention_eager=share(patterns.eager_attention(operators)), attention_fell_back=_any(trace, _ATTENTION_IN_PARTS, trace.operators),
        elementwise=share(patterns.elementwise(operators)),
        overhead=None if "busy" in blocked else _overhead(seen), limit=device.verdict, integrity_blocks=frozenset(blocked),
        loader=LoaderSeen(num_workers=_workers(seen)), copies=_copies(seen, device), syncs=_syncs(seen, labelled),
        kernels=_cpu_kernels(seen) if device.id == CPU else _kernels(seen, device, idle.get("host_late")),
        operators=_operators(device, whole, together), memory=_memory(trace, device, info), compiler=_compiler(seen),
        communication=CommunicationSeen(
            world_size=trace.world_size, exposed=_share_or_none(device.exposed_communication_ns, whole),
            overlap=device.communication_overlap),
    )


def _share(part: int, whole: int) -> float | None:
    return part / whole if whole else None


def _share_or_none(part: int | None, whole: int) -> float | None:
    return None if part is None else _share(part, whole)


def _per_step(ns: int | None, device: Device) -> float | None:
    """Milliseconds per step."""
    return None if ns is None or not device.steps else ns / device.steps / 1e6


def _bf16(info: DeviceInfo | None, name: str) -> bool | None:
    """By the trace's own facts of the device, else by its vendor's."""
    if info is not None and info.name.startswith("AMD"):
        return _AMD_BF16.search(info.name) is not None
    if info is not None and info.capability is not None:
        return info.capability >= (8, 0)
    stated = accelerators.find(name)
    return None if stated is None else "bfloat16" in stated.rates


def _any(trace: Trace, pattern: re.Pattern[str], *tables: HostEvents) -> bool:
    return any(bool(named(trace, table.name, pattern).any()) for table in tables)


def _phases(seen: View) -> dict[str, float]:
    """Shares of the step by phase, of those that the trace marks."""
    trace = seen.joined.trace
    whole = seen.parts.window_ns
    marks = {"backward": _BACKWARD, "optimizer": _OPTIMIZER_STEP}
    marked = {phase for phase, pattern in marks.items() if _any(trace, pattern, trace.annotations, trace.operators)}
    if not marked or not whole:
        return {}
    split = phases.split(trace, seen.device, seen.joined.launches, seen.joined.communicating, seen.work)
    shares = {phase: split[phase] / whole for phase in marked | ({"forward"} if "backward" in marked else set())}
    if "optimizer" in marked:
        shares["update"] = phases.updating(trace, seen.device, seen.joined.launches, seen.joined.communicating) / whole
    return shares


def _optimizer_kind(seen: View) -> str:
    trace = seen.joined.trace
    for name in trace.names:
        if found := _OPTIMIZER_STEP.match(name):
            return found.group(1)
    return ""


def _optimizer_fused(seen: View, kind: str) -> bool | None:
    trace = seen.joined.trace
    if not kind or not len(trace.operators.start):
        return None
    return kind.startswith("Fused") or _any(trace, _FUSED, trace.operators)


def _optimizer_tensors(seen: View) -> int | None:
    """The longest list of tensors that one operator updates."""
    trace = seen.joined.trace
    shapes = np.unique(trace.operators.shapes[named(trace, trace.operators.name, _LISTS)])
    lists = [signature.dims[0] for number in shapes.tolist() if number >= 0
             and (signature := trace.signatures[number]).dims]
    return max((len(dims) for dims in lists if isinstance(dims, (tuple, list)) and dims
                and isinstance(dims[0], (tuple, list))), default=None)


def _overhead(seen: View) -> float | None:
    """Of the step: in no operator of any thread and not in the loader."""
    trace = seen.joined.trace
    if not len(trace.operators.start):
        return None
    running = seen.work if seen.device == CPU else breakdown.host_work(trace, seen.window)
    steps, waiting = seen.window.steps, subtract(seen.waiting or EMPTY, running.compute)
    return _share(length(steps) - overlap(running.compute, steps) - overlap(waiting, steps), seen.parts.window_ns)


def _workers(seen: View) -> int | None:
    """0 where the loader fetches in the training process; how many it has otherwise a trace does not tell."""
    trace = seen.joined.trace
    single = named(trace, trace.annotations.name, _SINGLE_PROCESS)
    return 0 if seen.waiting is not None and single.any() else None


def _copies(seen: View, device: Device) -> CopySeen:
    gpu, trace = seen.joined.trace.gpu, seen.joined.trace
    if seen.device == CPU or not device.steps:
        return CopySeen()
    rows = seen.work.rows[gpu.kind[seen.work.rows] == MEMCPY]
    rows = rows[named(trace, gpu.name[rows], FROM_HOST)]
    hidden = join(seen.work.compute, seen.work.communication)
    alone = subtract(intersect(union(gpu.start[rows], gpu.end[rows]), seen.window.steps), hidden)
    rows = rows[contains(seen.window.steps, gpu.start[rows])]
    pageable = rows[named(trace, gpu.name[rows], FROM_PAGEABLE)]
    pinned = rows[named(trace, gpu.name[rows], FROM_PINNED)]
    known = len(pageable) + len(pinned) == len(rows)        # HIP does not say which memory the host's is
    sized = bool((gpu.bytes[rows] >= 0).all())
    return CopySeen(
        pageable_bytes=int(gpu.bytes[pageable].sum()) // device.steps if known and sized else None,
        pageable_ms=_per_step(int((gpu.end[pageable] - gpu.start[pageable]).sum()), device) if known else None,
        pinned_bytes=int(gpu.bytes[pinned].sum()) // device.steps if known and sized else None,
        exposed=_share_or_none(device.exposed_copy_ns, seen.parts.window_ns),
        exposed_from_host=None if device.exposed_copy_ns is None else _share(length(alone), seen.parts.window_ns))


def _syncs(seen: View, labelled: bool) -> tuple[SyncSeen, ...]:
    """Waits by call and by the operator around it, the longest first. On a CPU: values read from tensors."""
    trace, steps = seen.joined.trace, seen.window.count
    if not steps:
        return ()
    if seen.device == CPU:
        rows = np.flatnonzero(named(trace, trace.operators.name, _READS_VALUE))
        rows = rows[(trace.operators.tid[rows] == seen.window.thread)
                    & contains(seen.window.steps, trace.operators.start[rows])
                    & ~contains(seen.waiting or EMPTY, trace.operators.start[rows])]
        return _grouped(seen, trace.operators, rows, np.full(len(rows), -1, "i8"), np.zeros(len(rows), bool))
    launches = seen.joined.launches[seen.work.rows]
    threads = np.unique(trace.calls.tid[launches[launches >= 0]])       # not the one that pins batches
    rows = gaps.waiting_calls(trace, seen.joined.launches)
    rows = rows[(np.isin(trace.calls.tid[rows], threads) | (trace.calls.tid[rows] == seen.window.thread))
                & contains(seen.window.steps, trace.calls.start[rows])]
    rows = rows[~_in_label(trace, rows, phases.DRAIN)]
    rows = rows if labelled else rows[~_in_label(trace, rows, phases.LABELLED_SYNC)]
    around = _around(trace, rows)
    uploads = trace.gpu.kind == MEMCPY
    uploads &= named(trace, trace.gpu.name, FROM_HOST) & (seen.joined.launches >= 0)
    uploading = _around(trace, np.unique(seen.joined.launches[uploads]))
    return _grouped(seen, trace.calls, rows, around, np.isin(around, uploading[uploading >= 0]), _labels(trace, rows, phases.LABELLED_UPLOAD))


def _labels(trace: Trace, calls: Column, pattern: re.Pattern[str]) -> Column:
    """The innermost label that matches the pattern around each call, -1 where none is."""
    rows = np.flatnonzero(named(trace, trace.annotations.name, pattern)).astype(row_type(trace.annotations.start))
    return innermost(trace.annotations, rows, trace.calls.tid[calls], trace.calls.start[calls])


def _in_label(trace: Trace, calls: Column, pattern: re.Pattern[str]) -> Column:
    """Whether each call began within a label that matches the pattern, on the label's own thread."""
    found = np.zeros(len(calls), bool)
    labels = np.flatnonzero(named(trace, trace.annotations.name, pattern))
    for thread, own in by_thread(trace.annotations, labels):
        found |= (trace.calls.tid[calls] == thread) & contains(spans(trace.annotations, own), trace.calls.start[calls])
    return found


def _around(trace: Trace, calls: Column) -> Column:
    """The innermost operator around each call, -1 where none is."""
    return innermost(trace.operators, np.arange(len(trace.operators.start), dtype=row_type(trace.operators.start)),
                     trace.calls.tid[calls], trace.calls.start[calls])


def _grouped(seen: View, events: HostEvents, rows: Column, around: Column, uploading: Column,
             labels: Column | None = None) -> tuple[SyncSeen, ...]:
    """`around`: the operator of each; `labels`: the label of each, which tells the line, where it has one."""
    trace, steps = seen.joined.trace, seen.window.count
    where = _named_by(trace.operators, around)
    if labels is not None:
        where = np.where(labels >= 0, _named_by(trace.annotations, labels), where)
    found = []
    for name, place, upload in {*zip(events.name[rows].tolist(), where.tolist(), uploading.tolist())}:
        own = rows[(events.name[rows] == name) & (where == place) & (uploading == upload)]
        text, what = trace.names[place] if place >= 0 else "", trace.names[name]
        if labelled := phases.LABELLED_UPLOAD.match(text):
            text, what = labelled.groups()
        found.append(SyncSeen(
            where=text, what=what + (UPLOAD if upload else ""),
            calls_per_step=len(own) / steps,
            ms_per_step=int((events.end[own] - events.start[own]).sum()) / steps / 1e6))
    return tuple(sorted(found, key=lambda sync: (-sync.ms_per_step, sync.what, sync.where)))


def _named_by(events: HostEvents, rows: Column) -> Column:
    """The name of each of these events, -1 for none (-1)."""
    return np.where(rows >= 0, events.name[np.maximum(rows, 0)] if len(events.name) else -1, -1)


def _kernels(seen: View, device: Device, host_late: float | None) -> KernelsSeen:
    trace, launches = seen.joined.trace, seen.joined.launches
    rows = seen.work.rows[trace.gpu.kind[seen.work.rows] == KERNEL]
    inside = contains(seen.window.steps, trace.gpu.start[rows])
    replayed = integrity.replayed(trace, launches)[rows]
    return KernelsSeen(
        count_per_step=int(inside.sum()) / device.steps if device.steps else None,
        short_share=device.short_kernels,
        median_us=None if device.median_kernel_ns is None else device.median_kernel_ns / 1e3,
        median_launch_delay_us=None if device.median_launch_delay_ns is None else device.median_launch_delay_ns / 1e3,
        queue_shallow=_queue_shallow(trace, launches, rows[~replayed]),
        host_late=host_late,
        graph_replay=float(replayed.mean()) > integrity.REPLAYED_AT_MOST if len(rows) else None)


def _queue_shallow(trace: Trace, launches: Column, rows: Column) -> float | None:
    """Share of the kernels at whose launch at most one other was queued: launched, and not yet started."""
    rows = rows[launches[rows] >= 0]
    if not len(rows):
        return None
    launched = np.sort(trace.calls.start[launches[rows]])
    started = np.sort(trace.gpu.start[rows])
    queued = np.arange(len(rows)) - np.searchsorted(started, launched, "right")
    return float((queued <= 1).mean())


def _cpu_kernels(seen: View) -> KernelsSeen:
    """Operators without operators inside them play the kernels' part."""
    trace, steps = seen.joined.trace, seen.window.count
    counted = np.zeros(len(trace.operators.start), bool)
    counted[seen.work.rows] = True
    counted &= contains(seen.window.steps, trace.operators.start)
    rows = np.flatnonzero(counted & leaves(trace.operators))
    if not len(rows):
        return KernelsSeen()
    time = trace.operators.end[rows] - trace.operators.start[rows]
    own = np.zeros(len(counted), "i8")
    for _, thread in by_thread(trace.operators):
        tree = nest(trace.operators, thread)
        own[tree.rows] = tree.own()
    short = int(own[counted & (own < SHORT_NS)].sum())
    return KernelsSeen(count_per_step=len(rows) / steps if steps else None, short_share=float((time < SHORT_NS).mean()),
                       short_time=_share_or_none(short, seen.parts.window_ns), median_us=float(np.median(time)) / 1e3)


def _operators(device: Device, whole: int, together: Together) -> tuple[OperatorSeen, ...]:
    return tuple(
        OperatorSeen(
            name=operator.name, shapes=operator.shapes, dtypes=operator.dtypes, kernels=tuple(operator.kernels),
            calls_per_step=operator.calls / max(1, device.steps), share=_share(together.ns([operator]), whole) or 0.0,
            limit=operator.limit, efficiency=operator.efficiency,
            recoverable=_share_or_none(together.recoverable_ns(operator), whole), dims=patterns.dims(operator))
        for operator in device.roofline.operators)


def _memory(trace: Trace, device: Device, info: DeviceInfo | None) -> MemorySeen:
    memory = trace.memory
    rows = np.flatnonzero((memory.device == device.id) & (memory.allocated >= 0))
    if device.id == CPU or not len(rows):
        return MemorySeen()
    peak = rows[np.argmax(memory.allocated[rows])]
    allocated, reserved = int(memory.allocated[peak]), int(memory.reserved[peak])
    whole = info.memory_bytes if info else None
    return MemorySeen(used=allocated / whole if whole else None, held=reserved / whole if whole else None,
                      fragmentation=(reserved - allocated) / reserved if reserved > 0 else None)


def _compiler(seen: View) -> CompilerSeen:
    trace = seen.joined.trace
    if not len(trace.operators.start):
        return CompilerSeen()
    kernels = bool(named(trace, trace.gpu.name, _COMPILED).any())
    compiled = kernels or _any(trace, _COMPILED, trace.operators, trace.annotations)
    compiling = [spans(table, np.flatnonzero(named(trace, table.name, _COMPILING)))
                 for table in (trace.operators, trace.annotations)]
    time = max(length(intersect(part, seen.window.steps)) for part in compiling)
    return CompilerSeen(compiled=compiled, compile_share=_share(time, seen.parts.window_ns) if time else None)
