"""Tables of an Nsight Systems export, and the SQL that reads their rows as integers, whichever columns they have."""

from __future__ import annotations

from saturate.trace._sqlite import MISSING, quoted
from saturate.trace.columns import KERNEL, MEMCPY, MEMSET

GRAPH = "CUPTI_ACTIVITY_KIND_GRAPH_TRACE"
GPU_TABLES = {
    "CUPTI_ACTIVITY_KIND_KERNEL": KERNEL,
    "CUPTI_ACTIVITY_KIND_MEMCPY": MEMCPY,
    "CUPTI_ACTIVITY_KIND_MEMSET": MEMSET,
    GRAPH: KERNEL,
}
CALL_TABLES = ("CUPTI_ACTIVITY_KIND_RUNTIME", "CUPTI_ACTIVITY_KIND_DRIVER")

#: Tables that every version writes, whatever was recorded.
OWN_TABLES = frozenset({"META_DATA_EXPORT", "META_DATA_CAPTURE", "TARGET_INFO_SESSION_START_TIME", "ANALYSIS_DETAILS",
                        "StringIds"})

#: Values of NVTX_EVENTS.eventType that are finished ranges: push/pop and start/end, and both from imported NVTX text.
RANGES = (59, 60, 70, 71)


def time(name: str) -> str:
    """A time where the cell holds an integer, else MISSING: a REAL would be truncated without a word."""
    return f"CASE typeof({quoted(name)}) WHEN 'integer' THEN {quoted(name)} ELSE {MISSING} END"


def number(columns: frozenset[str], *names: str) -> str:
    """The first of these columns that is there and not NULL, else -1."""
    present = [quoted(name) for name in names if name in columns]
    return f"coalesce({', '.join([*present, '-1'])})" if present else "-1"


def gpu(kind: int, columns: frozenset[str]) -> dict[str, str]:
    """Column -> expression. Those with an underscore are the parts of the name, in order."""
    return {
        "device": number(columns, "deviceId"), "stream": number(columns, "streamId"),
        "correlation": number(columns, "correlationId"), "process": number(columns, "globalPid"),
        "graph": f"{number(columns, 'graphNodeId')} > 0",
    } | _OF_KIND[kind](columns)


def _kernel(columns: frozenset[str]) -> dict[str, str]:
    shared = [f"ifnull({quoted(name)}, 0)" for name in ("staticSharedMemory", "dynamicSharedMemory")
              if name in columns]
    return {
        "blocks": _product(columns, gridX=2**31 - 1, gridY=65535, gridZ=65535),
        "threads": _product(columns, blockX=1024, blockY=1024, blockZ=64),
        "registers": number(columns, "registersPerThread"), "shared_bytes": " + ".join(shared) or "-1",
        "_name": number(columns, "demangledName", "shortName", "mangledName"),
    }


def _memcpy(columns: frozenset[str]) -> dict[str, str]:
    return {"bytes": number(columns, "bytes"), "_operation": number(columns, "copyKind"),
            "_source": number(columns, "srcKind"), "_target": number(columns, "dstKind")}


def _memset(columns: frozenset[str]) -> dict[str, str]:
    return {"bytes": number(columns, "bytes"), "_kind": number(columns, "memKind")}


_OF_KIND = {KERNEL: _kernel, MEMCPY: _memcpy, MEMSET: _memset}


def _product(columns: frozenset[str], **most: int) -> str:
    """The product of columns, each from 1 to CUDA's own limit (so that it fits int64), else -1."""
    if not most.keys() <= columns:
        return "-1"
    limits = " AND ".join(f"{quoted(name)} BETWEEN 1 AND {limit}" for name, limit in most.items())
    return f"CASE WHEN {limits} THEN {' * '.join(map(quoted, most))} ELSE -1 END"
