"""What a device did with its time: computation, communication, copies, nothing. Definitions: docs/analysis.md.

    COMP = U(kernels that do not communicate, memsets)    COMM = U(kernels that do)    MEM = U(copies)

U is the union over all streams. In any window W the four exclusive parts sum to |W| exactly:

    |COMP| + |COMM - COMP| + |MEM - COMP - COMM| + |W - (COMP U COMM U MEM)| = |W|

On a CPU, operators play the kernels' part, what runs inside the loader is input, not computation, and what a Function of the script's does
around its operators is neither.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, fields

import numpy as np

from saturate.trace import intervals
from saturate.trace.columns import KERNEL, MEMCPY, Column, Trace, row_type, rows_where
from saturate.trace.intervals import (
    EMPTY,
    Intervals,
    between,
    contains,
    cuts,
    intersect,
    join,
    length,
    subtract,
    union,
)
from saturate.trace.launches import named, spans, valid
from saturate.trace.nesting import innermost
from saturate.trace.windows import CPU, LOADER, STEP, Window, loader

#: Operators whose own kernels communicate. Looked at first: an operator says what a kernel is for, its name hints.
COMMUNICATION_OPERATORS = re.compile(
    r"^(c10d::|_c10d_functional::|symm_mem::|record_param_comms|(nccl|gloo|mpi|ucc|xccl):)")

#: Names of kernels that only libraries of collectives have, without template arguments: NCCL, RCCL, HCCL, MSCCL; multicast
#: collectives (`multimem_all_reduce_kernel`); the all-reduce of vLLM and SGLang; NVSHMEM and DeepEP.
LIBRARY_KERNELS = re.compile(r"nccl|rccl|hccl|msccl|multimem_|cross_device_reduce|nvshmem|deep_ep::", re.IGNORECASE)

#: Names that say what a kernel does, as those of PyTorch's symmetric memory and of one's own. A block or a warp of threads
#: does the same within one device (`block_all_reduce_sum`).
COLLECTIVE_WORDS = re.compile(
    r"sendrecv|(?<!block)(?<!block_)(?<!warp)(?<!warp_)(all_?reduce|all_?gather|reduce_?scatter|all_?to_?all)", re.IGNORECASE)

#: The kernels that torch.compile generates are named after the operators around them, a collective's too
#: (`triton_poi_fused_all_reduce_0` is what runs before it in place).
_GENERATED = re.compile(r"^triton_")

#: Operators that never communicate, whatever the names of their kernels.
_ORDINARY = re.compile(r"^(aten::|triton_)")

#: What the engine's call of a node is named after, and what is code of torch.compile's.
_ENGINE = "autograd::engine::evaluate_function: "
_COMPILED = re.compile(r"CompiledFunction|CompiledFxGraph|Torch-Compiled")

#: A template argument such as `WarpAllReduce` makes no kernel a collective, so names end at the first bracket.
_ARGUMENTS = re.compile(r"[<(].*$", re.DOTALL)


def communicates(name: str, words: re.Pattern[str] | None = None) -> bool:
    """Whether a kernel's own name is that of a collective: one of a library's, or by `words` alone.

    >>> communicates("ncclDevKernel_AllReduce_Sum_f32_RING_LL(ncclDevKernelArgsStorage<4096ul>)")
    True
    >>> communicates("void softmax_warp_forward<float, WarpAllReduce>(float*)")
    False
    >>> communicates("triton_poi_fused_add_all_reduce_0")
    False
    """
    own = _ARGUMENTS.sub("", name.replace("(anonymous namespace)::", ""))
    if _GENERATED.match(own):
        return False
    patterns = (LIBRARY_KERNELS, COLLECTIVE_WORDS) if words is None else (words,)
    return any(pattern.search(own) is not None for pattern in patterns)


def communication(trace: Trace, launches: Column) -> Column:
    """Whether each row of `gpu` is a kernel that communicates: recorded so, launched by a collective, or named so and not
    launched by an ordinary operator."""
    kernels = trace.gpu.kind == KERNEL
    found = _launched_by_collective(trace, launches)
    if trace.collectives:
        found[list(trace.collectives)] = True
    if len(trace.names):
        found |= _by_name(trace, LIBRARY_KERNELS)
        hinted = np.flatnonzero(kernels & ~found & _by_name(trace, COLLECTIVE_WORDS))
        found[hinted[~_ordinary(trace, launches[hinted])]] = True
    return found & kernels


def _by_name(trace: Trace, pattern: re.Pattern[str]) -> Column:
    return np.fromiter((communicates(name, pattern) for name in trace.names), bool, len(trace.names))[trace.gpu.name]


def _ordinary(trace: Trace, calls: Column) -> Column:
    """Whether the innermost operator around each call never communicates; not where the call (-1) is not known."""
    operators, found = trace.operators, np.zeros(len(calls), bool)
    known = np.flatnonzero(calls >= 0)
    if not len(known) or not len(operators.start):
        return found
    everything = np.arange(len(operators.start), dtype=row_type(operators.start))
    around = innermost(operators, everything, trace.calls.tid[calls[known]], trace.calls.start[calls[known]])
    found[known] = (around >= 0) & named(trace, operators.name, _ORDINARY)[np.maximum(around, 0)]
    return found


def _launched_by_collective(trace: Trace, launches: Column) -> Column:
    """Launched in a communication operator, and not by an ordinary one inside that (a copy into a bucket)."""
    operators = trace.operators
    result = np.zeros(len(launches), bool)
    collective = named(trace, operators.name, COMMUNICATION_OPERATORS)
    launched = rows_where(launches >= 0)
    calls = launches[launched]
    if not collective.any() or not len(calls):
        return result
    for thread in np.unique(operators.tid[collective]).tolist():
        own = operators.tid == thread
        outer = spans(operators, rows_where(collective & own))
        if not len(outer.start):
            continue
        inner = _begun_in(outer, operators.start, rows_where(own & ~collective))
        here = trace.calls.tid[calls] == thread
        time = trace.calls.start[calls[here]]
        result[launched[here]] = contains(outer, time) & ~contains(spans(operators, inner), time)
    return result


def _begun_in(outer: Intervals, start: Column, rows: Column) -> Column:
    """Those of the rows that start in the set. In parts: there are far more rows than such."""
    parts = [rows[first:first + intervals.AT_ONCE] for first in range(0, len(rows), intervals.AT_ONCE)]
    return np.concatenate([part[contains(outer, start[part])] for part in parts]) if parts else rows


@dataclass(frozen=True)
class Work:
    """What one device ran. `rows` are its rows of `gpu`; on a CPU, of `operators`."""

    rows: Column
    compute: Intervals
    communication: Intervals
    copies: Intervals
    busy: Intervals


def work(trace: Trace, device: int, window: Window, communicating: Column) -> Work:
    """`communicating`: the result of `communication`."""
    if device == CPU:
        return host_work(trace, window)
    gpu = trace.gpu
    own = valid(gpu) & (gpu.device == device)
    copies = own & (gpu.kind == MEMCPY)

    def covered(rows: Column) -> Intervals:
        return union(gpu.start[rows], gpu.end[rows])

    compute = covered(own & ~copies & ~communicating)
    collectives, moved = covered(own & communicating), covered(copies)
    return Work(rows=rows_where(own), compute=compute, communication=collectives, copies=moved,
                busy=join(compute, collectives, moved))


def host_work(trace: Trace, window: Window) -> Work:
    """Operators of all threads but what the loader runs; collectives from operators and from their annotations."""
    operators, annotations = trace.operators, trace.annotations
    collective = named(trace, operators.name, COMMUNICATION_OPERATORS)
    labelled = np.flatnonzero(named(trace, annotations.name, COMMUNICATION_OPERATORS))
    waiting = loader(trace, window) or EMPTY
    input_work = (operators.tid == window.thread) & contains(waiting, operators.start)
    apart = named(trace, operators.name, STEP) | named(trace, operators.name, LOADER) | scripts_functions(trace)
    rows = ~collective & ~input_work & ~apart
    compute = spans(operators, rows_where(rows))
    collectives = join(spans(operators, rows_where(collective)), spans(annotations, labelled))
    return Work(rows=rows_where(rows), compute=compute, communication=collectives, copies=EMPTY,
                busy=join(compute, collectives))


def scripts_functions(trace: Trace) -> Column:
    """Whether an operator is an `autograd.Function` that is written in Python, or the engine's call of its backward: around what runs
    inside the interpreter works, as it does outside of all operators. Told by the name that torch gives its backward; those of torch's own
    nodes end with a number. Compiled code is such a Function too, and its kernels need no operators."""
    known = set(trace.names)
    names = {name for name in known if f"{_ENGINE}{name}Backward" in known and not _COMPILED.search(name)}
    meant = {*names, *(f"{name}Backward" for name in names), *(f"{_ENGINE}{name}Backward" for name in names)}
    return np.fromiter((name in meant for name in trace.names), bool, len(trace.names))[trace.operators.name]


@dataclass(frozen=True)
class Parts:
    """Integer nanoseconds of one window. The four exclusive parts sum to `window_ns`."""

    window_ns: int
    compute_ns: int
    exposed_communication_ns: int
    exposed_copy_ns: int
    idle_ns: int
    communication_ns: int       # exposed or not
    overlapped_ns: int          # communication during computation

    @property
    def busy_ns(self) -> int:
        return self.window_ns - self.idle_ns


def parts(work: Work, within: Intervals) -> Parts:
    """Summed over stretches of time, so that a long trace needs no more memory than a short one."""
    slices = [_parts(*(between(one, low, high) for one in (work.compute, work.communication, work.copies, work.busy, within)))
              for low, high in cuts(within, work.busy)]
    return Parts(**{field.name: sum(getattr(one, field.name) for one in slices) for field in fields(Parts)})


def _parts(computing: Intervals, communicating: Intervals, copying: Intervals, busy: Intervals, within: Intervals) -> Parts:
    """Each part by its own set operations: the identity is a test's to check, not true by construction."""
    compute, collectives = intersect(computing, within), intersect(communicating, within)
    copies = intersect(copying, within)
    return Parts(
        window_ns=length(within),
        compute_ns=length(compute),
        exposed_communication_ns=length(subtract(collectives, compute)),
        exposed_copy_ns=length(subtract(copies, join(compute, collectives))),
        idle_ns=length(subtract(within, busy)),
        communication_ns=length(collectives),
        overlapped_ns=length(intersect(collectives, compute)),
    )


def idle(work: Work, within: Intervals) -> Intervals:
    """When the device had nothing to do."""
    return subtract(within, work.busy)
