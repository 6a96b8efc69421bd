"""What a Kineto file says beside its times: devices, ranks, and the inputs of operators."""

from __future__ import annotations

from typing import Annotated, Any

import msgspec

from saturate.trace._json_stream import Document
from saturate.trace._kineto_events import NOT_JSON
from saturate.trace.columns import DeviceInfo, Signature

FIELDS = frozenset({"deviceProperties", "distributedInfo", "baseTimeNanoseconds"})



#: A number of a rank or a device, and any other one: beyond these it would fit no column and no record.
_Id = Annotated[int, msgspec.Meta(ge=-(2**31), lt=2**31)]
_Count = Annotated[int, msgspec.Meta(ge=-(2**63), le=2**63 - 1)]


class _Group(msgspec.Struct):
    """distributedInfo."""

    rank: _Id | None = None
    world_size: _Count | None = None


class _DeviceProperties(msgspec.Struct):
    id: _Id
    name: str = ""
    sms: _Count | None = msgspec.field(name="numSms", default=None)
    threads_per_sm: _Count | None = msgspec.field(name="maxThreadsPerMultiprocessor", default=None)
    memory_bytes: _Count | None = msgspec.field(name="totalGlobalMem", default=None)
    major: _Count | None = msgspec.field(name="computeMajor", default=None)
    minor: _Count | None = msgspec.field(name="computeMinor", default=None)
    shared_bytes_per_sm: _Count | None = msgspec.field(name="sharedMemPerMultiprocessor", default=None)
    shared_bytes_per_sm_hip: _Count | None = msgspec.field(name="maxSharedMemoryPerMultiProcessor", default=None)
    registers_per_sm: _Count | None = msgspec.field(name="regsPerMultiprocessor", default=None)


def signature(key: bytes) -> Signature:
    dims, types, strides, concrete = (_value(part) for part in key.split(b"\0"))
    return Signature(
        dims=_tuples(dims), types=tuple(map(str, types)), strides=_tuples(strides), concrete=tuple(map(str, concrete))
    )


def _value(text: bytes) -> list[Any]:
    try:
        found = msgspec.json.decode(text) if text else []
    except NOT_JSON:  # it was not decoded with its event
        return []
    return found if isinstance(found, list) else []


def _tuples(value: Any) -> Any:
    return tuple(_tuples(part) for part in value) if isinstance(value, list) else value


def base_ns(document: Document) -> int:
    """What the file's own times count from: nanoseconds since the epoch; 0 where it does not say."""
    return facts(document)[0]


def facts(document: Document) -> tuple[int, dict[int, DeviceInfo], int | None, int | None]:
    """(baseTimeNanoseconds, devices, rank, world size), as far as the file states them."""

    def field(name: str, kind: Any) -> Any:
        try:
            return msgspec.json.decode(document.fields.get(name, b"null"), type=kind)
        except NOT_JSON:
            document.problems.append(("malformed-facts", f"{name} is not what it should be: not used"))
            return None

    base = field("baseTimeNanoseconds", int | None) or 0
    if abs(base) >= 2**62:
        document.problems.append(("malformed-facts", f"baseTimeNanoseconds is {base}, which is no time: not used"))
        base = 0
    group = field("distributedInfo", _Group | None) or _Group()
    devices = {}
    for found in field("deviceProperties", list[_DeviceProperties] | None) or []:
        shared = found.shared_bytes_per_sm if found.shared_bytes_per_sm is not None else found.shared_bytes_per_sm_hip
        capability = None if found.major is None or found.minor is None else (found.major, found.minor)
        devices[found.id] = DeviceInfo(
            id=found.id,
            name=found.name,
            sms=found.sms,
            threads_per_sm=found.threads_per_sm,
            memory_bytes=found.memory_bytes,
            capability=capability,
            shared_bytes_per_sm=shared,
            registers_per_sm=found.registers_per_sm,
        )
    return base, devices, group.rank, group.world_size
