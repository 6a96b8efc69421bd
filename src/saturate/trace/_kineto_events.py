"""The events of a Kineto trace as types: the decoder makes only what is named here, and skips all else natively.

The categories of 2021 (`Operator`, `Runtime`, `Kernel`, ...) and of today (`cpu_op`, `cuda_runtime`, `kernel`, ...)
are one type each. HIP and XPU write CUDA's.
"""

from __future__ import annotations

import math
import re
from decimal import Decimal, InvalidOperation
from functools import lru_cache, reduce
from operator import or_
from typing import Any, Literal

import msgspec

UNKNOWN = -1
INT64 = 2**63 - 1
#: Times beyond this are no times; below it, start + duration fits 64 bits.
LATEST_NS = 2**61

#: Labels that older versions record as operators.
ANNOTATION = re.compile(r"ProfilerStep#\d+$|enumerate\(Data(Loader|Pipe)\)#|Optimizer\.(step|zero_grad)#")

#: field of `GpuArgs` -> name of a collective's argument
COLLECTIVE = {
    "collective": "Collective name",
    "in_elements": "In msg nelems",
    "out_elements": "Out msg nelems",
    "group_size": "Group size",
    "dtype": "dtype",
    "group": "Process Group Name",
    "group_description": "Process Group Description",
    "ranks": "Process Group Ranks",
    "own_rank": "Rank",
    "source": "Src Rank",
    "destination": "Dst Rank",
    "sequence": "Seq",
}


class GpuArgs(msgspec.Struct, gc=False):
    """`args` of an event on a device. `grid` in blocks, `block` in threads; occupancies in percent. UNKNOWN, nan, None: not recorded;
    those that end in 2021 were written by profilers of that year.
    """
    device: int = UNKNOWN
    stream: int = UNKNOWN
    correlation: int = UNKNOWN
    external: int = msgspec.field(name="External id", default=UNKNOWN)
    external_2021: int = msgspec.field(name="external id", default=UNKNOWN)
    bytes: int = UNKNOWN
    grid: tuple[int, int, int] | None = None
    block: tuple[int, int, int] | None = None
    blocks_per_sm: float = msgspec.field(name="blocks per SM", default=math.nan)
    occupancy: float = msgspec.field(name="est. achieved occupancy %", default=math.nan)
    occupancy_2021: float = msgspec.field(name="theoretical occupancy %", default=math.nan)
    registers: int = msgspec.field(name="registers per thread", default=UNKNOWN)
    shared_bytes: int = msgspec.field(name="shared memory", default=UNKNOWN)
    graph: int = msgspec.field(name="graph id", default=0)
    graph_node: int = msgspec.field(name="graph node id", default=0)
    collective: Any = msgspec.field(name=COLLECTIVE["collective"], default=None)
    in_elements: Any = msgspec.field(name=COLLECTIVE["in_elements"], default=None)
    out_elements: Any = msgspec.field(name=COLLECTIVE["out_elements"], default=None)
    group_size: Any = msgspec.field(name=COLLECTIVE["group_size"], default=None)
    dtype: Any = None
    group: Any = msgspec.field(name=COLLECTIVE["group"], default=None)
    group_description: Any = msgspec.field(name=COLLECTIVE["group_description"], default=None)
    ranks: Any = msgspec.field(name=COLLECTIVE["ranks"], default=None)
    own_rank: Any = msgspec.field(name=COLLECTIVE["own_rank"], default=None)
    source: Any = msgspec.field(name=COLLECTIVE["source"], default=None)
    destination: Any = msgspec.field(name=COLLECTIVE["destination"], default=None)
    sequence: Any = msgspec.field(name=COLLECTIVE["sequence"], default=None)


class CallArgs(msgspec.Struct, gc=False):
    correlation: int = UNKNOWN
    external: int = msgspec.field(name="External id", default=UNKNOWN)
    external_2021: int = msgspec.field(name="external id", default=UNKNOWN)


class NoteArgs(msgspec.Struct, gc=False):
    external: int = msgspec.field(name="External id", default=UNKNOWN)
    external_2021: int = msgspec.field(name="external id", default=UNKNOWN)


_EMPTY = msgspec.Raw(b"")


class OperatorArgs(msgspec.Struct, gc=False):
    external: int = msgspec.field(name="External id", default=UNKNOWN)
    external_2021: int = msgspec.field(name="external id", default=UNKNOWN)
    dims: msgspec.Raw = msgspec.field(name="Input Dims", default=_EMPTY)
    types: msgspec.Raw = msgspec.field(name="Input type", default=_EMPTY)
    strides: msgspec.Raw = msgspec.field(name="Input Strides", default=_EMPTY)
    concrete: msgspec.Raw = msgspec.field(name="Concrete Inputs", default=_EMPTY)


class MemoryArgs(msgspec.Struct, gc=False):
    bytes: int = msgspec.field(name="Bytes", default=0)
    allocated: int = msgspec.field(name="Total Allocated", default=UNKNOWN)
    reserved: int = msgspec.field(name="Total Reserved", default=UNKNOWN)
    device: int = msgspec.field(name="Device Id", default=UNKNOWN)
    device_type: int = msgspec.field(name="Device Type", default=0)  # 0: the CPU


#: kind -> its arguments
ARGS: dict[str, type] = {
    "operator": OperatorArgs,
    "annotation": NoteArgs,
    "call": CallArgs,
    "kernel": GpuArgs,
    "memcpy": GpuArgs,
    "memset": GpuArgs,
    "memory": MemoryArgs,
}

#: category -> kind
KINDS = {
    "cpu_op": "operator",
    "Operator": "operator",
    "user_annotation": "annotation",
    "overhead": "annotation",  # the profiler's own work, told apart by name
    "cuda_runtime": "call",
    "cuda_driver": "call",
    "Runtime": "call",
    "hip_runtime": "call",
    "hip_driver": "call",
    "xpu_runtime": "call",
    "xpu_driver": "call",
    "privateuse1_runtime": "call",
    "privateuse1_driver": "call",
    "kernel": "kernel",
    "Kernel": "kernel",
    "gpu_memcpy": "memcpy",
    "Memcpy": "memcpy",
    "gpu_memset": "memset",
    "Memset": "memset",
    "cpu_instant_event": "memory",
}

#: Categories that no column comes from. Others are met, counted, and learnt while reading.
SKIPPED = frozenset(
    {
        "python_function",
        "ac2g",
        "fwdbwd",
        "async",
        "async_gpu",
        "async_cpu_to_gpu",
        "forward_backward",
        "cuda_sync",
        "gpu_user_annotation",
        "cuda_event",
        "cuda_profiler_range",
        "Trace",
    }
)


class Loose(msgspec.Struct, gc=False):
    """Any event, whatever its values are."""

    ph: Any = ""
    cat: Any = ""
    name: Any = ""
    pid: Any = ""
    tid: Any = ""
    ts: msgspec.Raw = _EMPTY
    dur: msgspec.Raw = _EMPTY
    args: msgspec.Raw = _EMPTY


@lru_cache(maxsize=16)
def decoder(
    time: Any, skipped: frozenset[str]
) -> tuple[msgspec.json.Decoder[list[Any]], dict[type, tuple[str, str]]]:
    """For arrays of events, with one type per category -> (category, kind), kind "" for skipped ones. `time`: the
    type of `ts`; of durations, which are small, a float is always exact enough."""
    types: dict[type, tuple[str, str]] = {_event(category, []): (category, "") for category in skipped}
    for category, kind in KINDS.items():
        fields = [
            ("ts", time),
            ("name", str),
            ("pid", int | str),
            ("tid", int | str),
            ("args", ARGS[kind], msgspec.field(default_factory=ARGS[kind])),
        ]
        if kind != "memory":
            fields = [("ph", Literal["X"]), ("dur", int | float), *fields]
        types[_event(category, fields)] = (category, kind)
    return msgspec.json.Decoder(list[reduce(or_, types)]), types


def _event(category: str, fields: list[Any]) -> type:
    return msgspec.defstruct("Event", fields, tag=category, tag_field="cat", gc=False, kw_only=True)


def exact_ns(text: bytes) -> int | None:
    """A JSON number of microseconds as nanoseconds, from its digits; None where it is no number or no time.

    >>> exact_ns(b"1419116104994.671")
    1419116104994671
    """
    whole, _, part = text.partition(b".")
    if len(whole) <= 19 and len(part) <= 3 and whole.lstrip(b"-").isdigit() and (not part or part.isdigit()):
        found = int(whole + part.ljust(3, b"0"))
    else:
        try:
            exact = Decimal(text.decode("ascii"))
        except (InvalidOperation, UnicodeDecodeError):  # a string, null, a list
            return None
        if not exact.is_finite() or exact.adjusted() > 18:
            return None
        found = int(exact.scaleb(3).to_integral_value())  # beyond three decimals there is nothing to be exact about
    return found if abs(found) < LATEST_NS else None


def finer(text: bytes) -> bool:
    """Whether a number of microseconds has more decimals than nanoseconds need."""
    return len(text.partition(b".")[2].rstrip(b"0")) > 3


_DECODERS = {kind: msgspec.json.Decoder(kind) for kind in ARGS.values()}
_INTEGERS = {
    kind: [entry.name for entry in msgspec.structs.fields(kind) if entry.type is int] for kind in ARGS.values()
}
NOT_JSON = (msgspec.DecodeError, UnicodeDecodeError, RecursionError)


def fitted(kind: type, text: bytes) -> Any:
    """The arguments of an event; a value of another type than it should have, or beyond 64 bits, is left at
    "unknown"."""
    try:
        found = _DECODERS[kind].decode(text)
    except NOT_JSON:  # absent, no object, or with something unexpected in it
        found = _fitted_one_by_one(kind, text)
    for name in _INTEGERS[kind]:
        if abs(getattr(found, name)) > INT64:
            setattr(found, name, UNKNOWN)
    return found


def _fitted_one_by_one(kind: type, text: bytes) -> Any:
    found = kind()
    try:
        values = msgspec.json.decode(text, type=dict[str, msgspec.Raw])
    except NOT_JSON:
        return found
    for entry in msgspec.structs.fields(kind):
        if entry.encode_name in values:
            raw = values[entry.encode_name]
            try:
                setattr(
                    found,
                    entry.name,
                    raw if entry.type is msgspec.Raw else msgspec.json.decode(raw, type=entry.type, strict=False),
                )
            except NOT_JSON:  # of another type: as if it were absent
                continue
    return found
