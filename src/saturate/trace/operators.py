"""Which operator each kernel belongs to: kernel -> the call that launched it -> the innermost operator around it.

The operator is found by the external id that kernel or call carry, and otherwise by time on the launching thread; one
whose shapes were recorded is preferred to one inside it without. Kernels replayed from a graph belong to no operator.
On a CPU there are no kernels: there the operators' own time, without the operators that they call, plays their part.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from saturate.records.analysis import Operator
from saturate.trace import breakdown, intervals
from saturate.trace._arguments import DTYPES
from saturate.trace.columns import Column, Signature, Trace, row_type, rows_where
from saturate.trace.flops import MOST, NO_SIZES, Cost, cost, explained, format_in
from saturate.trace.integrity import replayed
from saturate.trace.intervals import contains
from saturate.trace.launches import by_thread, launching_calls
from saturate.trace.nesting import innermost, nest
from saturate.trace.windows import CPU, Window, kernels_of
from saturate.trace.windows import window as whole_window

_MOST_KERNEL_NAMES = 8
#: An operator whose callees do at least this part of its work only passes it on.
_DELEGATES = 0.5
_FLOATS = {"float64", "float32", "float16", "bfloat16"}

NO_OPERATOR = "no operator was recorded around its launch"
REPLAYED = "replayed from a captured graph, which records no operators"
NO_SHAPES = "its shapes were not recorded"
DELEGATED = "the operators that it calls do its work"


@dataclass
class Group:
    """The kernels of one operator with one set of shapes and formats, and what its calls must do."""

    name: str
    shapes: str = ""
    dtypes: str = ""
    time_ns: int = 0
    calls: int = 0
    launches: int = 0                                   # kernels; on a CPU the calls
    flops: int = 0
    bytes: int = 0
    cost: Cost | None = None                            # of one call; None: not modelled
    reason: str = ""                                    # why not
    kernels: Counter[str] = field(default_factory=Counter)  # name -> ns
    rows: list[Column] = field(default_factory=list)    # of `gpu`, or of `operators`

    def record(self) -> Operator:
        known = self.cost is not None
        return Operator(
            name=self.name, shapes=self.shapes, dtypes=self.dtypes, calls=self.calls,
            kernels=[name for name, _ in self.kernels.most_common(_MOST_KERNEL_NAMES)], time_ns=self.time_ns,
            flops=self.flops if known else None, bytes=self.bytes if known else None,
            unknown={} if known else {"flops": self.reason})


def operators(trace: Trace, device: int, window: Window | None = None) -> list[Operator]:
    """By time, the longest first. Their times add up to that of all kernels that do not communicate and start in the
    window's steps (without one: ever)."""
    return [group.record() for group in groups(trace, device, window)]


def groups(trace: Trace, device: int, window: Window | None = None, launches: Column | None = None,
           communicating: Column | None = None) -> list[Group]:
    """`launches`, `communicating`: of `launches.launching_calls` and `breakdown.communication`, where they are at hand."""
    if device == CPU:
        parts = _on_cpu(trace, window)
    else:
        launches = launching_calls(trace) if launches is None else launches
        if communicating is None:
            communicating = breakdown.communication(trace, launches)
        parts = _on_device(trace, device, window, launches, communicating)
    found: dict[tuple[str, str, str, str], Group] = {}
    for part in parts:
        key = (part.name, part.shapes, part.dtypes, part.reason)
        group = found.setdefault(key, part)
        if group is not part:
            _merge(group, part)
    for group in found.values():
        if group.cost is not None and max(group.flops, group.bytes) >= MOST:
            group.cost, group.reason = None, NO_SIZES
    return sorted(found.values(), key=lambda group: (-group.time_ns, group.name))


def _merge(group: Group, part: Group) -> None:
    """Signatures may differ in strides and numbers and read the same."""
    for name in ("time_ns", "calls", "launches", "flops", "bytes"):
        setattr(group, name, getattr(group, name) + getattr(part, name))
    group.kernels += part.kernels
    group.rows += part.rows


def _on_device(trace: Trace, device: int, window: Window | None, launches: Column, communicating: Column) -> Iterator[Group]:
    gpu = trace.gpu
    rows = kernels_of(trace, device)
    rows = rows[~communicating[rows]]
    if window is not None:
        rows = rows[contains(window.steps, gpu.start[rows])]
    graph = replayed(trace, launches)[rows]
    owner = np.full(len(rows), -1, row_type(trace.operators.start))
    owner[~graph] = owners(trace, rows[~graph], launches)

    owned = owner >= 0
    ops = trace.operators
    # Without an operator a kernel stands for itself: its name, and no signature.
    name = np.where(owned, ops.name[np.maximum(owner, 0)] if len(ops.name) else 0, gpu.name[rows])
    shapes = np.where(owned, ops.shapes[np.maximum(owner, 0)] if len(ops.name) else -1, -1)
    kind = np.where(owned, 0, np.where(graph, 2, 1)).astype("i1")
    duration = gpu.end[rows] - gpu.start[rows]
    guess = _only_float(trace)
    for members in _equal(kind, name, shapes):
        first = members[0]
        kernels: Counter[str] = Counter()
        names, place = np.unique(gpu.name[rows[members]], return_inverse=True)
        time = np.zeros(len(names), "i8")
        np.add.at(time, place, duration[members])
        for kernel, total in zip(names.tolist(), time.tolist()):
            kernels[trace.names[kernel]] += total
        group = Group(trace.names[int(name[first])], kernels=kernels, rows=[rows[members]],
                      time_ns=int(duration[members].sum()), launches=len(members))
        if owned[first]:
            group.calls = len(np.unique(owner[members]))
            hint = next((found for kernel, _ in kernels.most_common() if (found := format_in(kernel))), "") or guess
            _describe(group, _signature(trace, int(shapes[first])), hint)
        else:
            group.calls = len(members)
            group.reason = REPLAYED if graph[first] else NO_OPERATOR
        yield group


def owners(trace: Trace, rows: Column, launches: Column) -> Column:
    """For each of the rows of `gpu` the row of `operators` that launched it, -1 where there is none."""
    ops, calls = trace.operators, trace.calls
    found = np.full(len(rows), -1, row_type(ops.start))
    if not len(ops.start):
        return found
    thread, time = np.full(len(rows), -1, "i4"), np.zeros(len(rows), "i8")     # of the launch
    external = trace.gpu.external[rows].astype(np.promote_types(trace.gpu.external.dtype, calls.external.dtype))
    if len(calls.start):
        launched = rows_where(launches[rows] >= 0)
        call = launches[rows[launched]]
        thread[launched], time[launched] = calls.tid[call], calls.start[call]
        unnamed = external[launched] <= 0
        external[launched[unnamed]] = calls.external[call[unnamed]]
        del launched, call, unnamed
    named = _by_external(trace, external)
    del external
    # Ids are used again in other processes and sessions: an operator that was not running has launched nothing.
    for first in range(0, len(rows), intervals.AT_ONCE):
        some = slice(first, first + intervals.AT_ONCE)
        meant, when = named[some], time[some]
        running = (ops.tid[meant] == thread[some]) & (ops.start[meant] <= when) & (when <= ops.end[meant])
        meant[(thread[some] >= 0) & ~running] = -1

    def search(candidates: Column) -> None:
        left = rows_where((found < 0) & (thread >= 0))
        found[left] = innermost(ops, candidates, thread[left], time[left])

    has_shapes = ops.shapes >= 0
    direct = (named >= 0) & has_shapes[named]
    found[direct] = named[direct]
    search(rows_where(has_shapes))
    found[found < 0] = named[found < 0]
    search(np.arange(len(ops.start), dtype=row_type(ops.start)))
    return found


def _by_external(trace: Trace, external: Column) -> Column:
    """The first row of `operators` with each id, -1 where there is none. The ids that are asked for are sorted, not those
    of the operators: there are many more of these."""
    wanted = np.unique(external[external > 0])
    if not len(wanted):
        return np.full(len(external), -1, row_type(trace.operators.start))
    row = np.full(len(wanted) + 1, -1, row_type(trace.operators.start))     # the last stands for ids that nobody asked for
    ids = trace.operators.external
    for first in reversed(range(0, len(ids), intervals.AT_ONCE)):      # backwards: of equal ids the first row stays
        some = ids[first:first + intervals.AT_ONCE][::-1]
        place = np.searchsorted(wanted, some)
        place[wanted[np.minimum(place, len(wanted) - 1)] != some] = len(wanted)
        row[place] = np.arange(first + len(some) - 1, first - 1, -1)
    row[-1] = -1
    return np.where(external > 0, row[np.searchsorted(wanted, external)], -1)


def _on_cpu(trace: Trace, window: Window | None) -> Iterator[Group]:
    ops = trace.operators
    here = window or whole_window(trace, CPU)
    counted = np.zeros(len(ops.start), bool)
    counted[breakdown.work(trace, CPU, here, np.zeros(len(trace.gpu.start), bool)).rows] = True
    if window is not None:
        counted &= contains(window.steps, ops.start)
    own = np.zeros(len(ops.start), "i8")
    delegates = np.zeros(len(ops.start), bool)
    costs = _costs(trace)
    for _, rows in by_thread(ops):
        tree = nest(ops, rows)
        own[tree.rows] = tree.own()
        delegates[tree.rows] = _delegating(tree.levels, tree.parents(), *costs[:, tree.rows])
    rows = np.flatnonzero(counted & (own > 0))
    guess = _only_float(trace)
    for members in _equal(ops.name[rows], ops.shapes[rows], delegates[rows]):
        first = rows[members[0]]
        group = Group(trace.names[int(ops.name[first])], time_ns=int(own[rows[members]].sum()), calls=len(members),
                      launches=len(members), rows=[rows[members]])
        _describe(group, _signature(trace, int(ops.shapes[first])), guess, delegates=bool(delegates[first]))
        yield group


def _costs(trace: Trace) -> Column:
    """[FLOPs of matrix products, bytes] of every operator, 0 where unknown. Approximate: they are only weighed."""
    ops = trace.operators
    guess = _only_float(trace)
    table = np.zeros((2, len(ops.start)))
    for members in _equal(ops.name, ops.shapes):
        row = int(members[0])
        signature = _signature(trace, int(ops.shapes[row]))
        found = cost(trace.names[int(ops.name[row])], signature, guess) if signature is not None else None
        if found is not None:
            table[0, members] = float(found.flops) if found.multiplies else 0.0
            table[1, members] = float(found.bytes)
    return table


def _delegating(levels: list[Column], parent: Column, flops: Column, moved: Column) -> Column:
    """Whether what an operator calls does its work: `aten::linear` passes it to `aten::addmm`, `aten::addmm` does it
    itself although it may call a small copy. Measured in FLOPs where it multiplies matrices, else in bytes."""
    result = np.zeros(len(parent), bool)
    below = np.zeros((2, len(parent)))
    for level in reversed(levels):
        multiplies = flops[level] > 0
        result[level] = np.where(multiplies, below[0, level] >= _DELEGATES * flops[level],
                                 (moved[level] > 0) & (below[1, level] >= _DELEGATES * moved[level]))
        for kind, values in enumerate((flops, moved)):
            done = np.where(result[level] | (values[level] == 0), np.maximum(below[kind, level], 0), values[level])
            inner = parent[level] >= 0
            np.add.at(below[kind], parent[level][inner], done[inner])
    return result


def _describe(group: Group, signature: Signature | None, hint: str, delegates: bool = False) -> None:
    """Fill in shapes, formats and costs."""
    if signature is None:
        group.reason = NO_SHAPES
        return
    group.shapes, group.dtypes = shapes_text(signature), dtypes_text(signature, hint)
    found, group.reason = (None, DELEGATED) if delegates else explained(group.name, signature, hint)
    if found is not None:
        group.cost, group.flops, group.bytes = found, found.flops * group.calls, found.bytes * group.calls


def _signature(trace: Trace, number: int) -> Signature | None:
    return trace.signatures[number] if number >= 0 else None


def _only_float(trace: Trace) -> str:
    """The one floating format of all recorded tensors (numbers apart): then lists, whose format is not recorded, hold
    it too. "" where several occur."""
    found = {DTYPES[kind][0] for signature in trace.signatures
             for kind, dims in zip(signature.types, signature.dims) if dims and kind in DTYPES}
    floats = found & _FLOATS
    return floats.pop() if len(floats) == 1 else ""


def _equal(*columns: Column) -> Iterator[Column]:
    """Positions of rows that agree in all columns, each set in order."""
    if not len(columns[0]):
        return
    order = np.lexsort(columns[::-1]).astype(row_type(columns[0]))
    changes = np.zeros(len(order) - 1, bool)
    for column in columns:
        ordered = column[order]
        changes |= ordered[1:] != ordered[:-1]
    yield from np.split(order, np.flatnonzero(changes) + 1)


def shapes_text(signature: Signature) -> str:
    """Sizes of the tensors: "[16, 5185, 64] [16, 64, 5185]"; lists of tensors in short."""
    words = []
    for dims in signature.dims:
        if not isinstance(dims, (tuple, list)) or not dims:
            continue
        if isinstance(dims[0], (tuple, list)):
            count = _elements(dims)
            words.append(f"{len(dims)} tensors" + (f" of {count:,} elements" if abs(count) < MOST else ""))
        else:
            words.append(f"[{', '.join(map(str, dims))}]")
    return " ".join(words)


def _elements(members: Any) -> int:
    total = 0
    for member in members:
        count = 1
        for size in member if isinstance(member, (tuple, list)) else ():
            count *= size if isinstance(size, int) else 0
        total += count
    return total


def dtypes_text(signature: Signature, hint: str = "") -> str:
    """Formats of the tensors, each once: "bfloat16, float32". A number among the arguments has none."""
    pairs = list(zip(signature.types, signature.dims))
    sized = [DTYPES[kind][0] for kind, dims in pairs if kind in DTYPES and dims]
    lists = [hint] if hint and any(kind == "TensorList" for kind, _ in pairs) else []
    return ", ".join(dict.fromkeys(sized + lists or [DTYPES[kind][0] for kind, _ in pairs if kind in DTYPES]))
