"""Damaged exports: a TraceError or a Trace whose columns fit together, never anything else, never a hang."""

from __future__ import annotations

import random
import sqlite3
from dataclasses import fields
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from nsys_exports import EARLY, SCHEMA, Export, training

from saturate.errors import TraceError
from saturate.trace import nsys
from saturate.trace.columns import GpuEvents, HostEvents, Trace


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    made = training(tmp_path_factory.mktemp("whole") / "a.sqlite")
    made.add("DIAGNOSTIC_EVENT", timestamp=1, severity=2, text="CUPTI dropped 3 activity records.")
    made.add("TARGET_INFO_CUDA_DEVICE", gpuId=0, cudaId=0, pid=100)
    made.add("CUPTI_ACTIVITY_KIND_GRAPH_TRACE", start=400, end=1400, deviceId=0, correlationId=99)
    return made.write().read_bytes()


def survives(path: Path) -> Trace | None:
    """The trace, checked for what every later stage relies on; None for a named error."""
    try:
        trace = nsys.read(path)
    except TraceError as error:
        assert str(path) in error.message and error.remedy + error.cause
        return None
    host = [(table, HostEvents) for table in (trace.calls, trace.operators, trace.annotations)]
    for table, kind in [(trace.gpu, GpuEvents), *host]:
        columns = {field.name: getattr(table, field.name) for field in fields(kind)}
        assert {len(column) for column in columns.values()} == {len(table.start)}
        assert all(columns[name].dtype == getattr(kind(), name).dtype for name in columns)
        assert (np.diff(table.start) >= 0).all()
        assert (np.abs(table.start) < 2**62).all() and (np.abs(table.end) < 2**62).all()
        assert (table.name >= 0).all() and (table.name < len(trace.names)).all()
        if kind is HostEvents:
            assert (table.end >= table.start).all()
            assert (table.tid >= 0).all() and (table.tid < len(trace.threads)).all()
            assert (table.shapes < len(trace.signatures)).all()
    assert set(np.unique(trace.gpu.device).tolist()) == set(trace.devices)
    assert all(count > 0 for count in trace.left_out.values())
    assert all(isinstance(name, str) for name in trace.names)
    return trace


def test_flipped_bytes(whole: bytes, tmp_path: Path) -> None:
    """Seeded, and dense enough that both outcomes occur."""
    draw = random.Random(20)
    path = tmp_path / "a.sqlite"
    outcomes = {True: 0, False: 0}
    for _ in range(400):
        damaged = bytearray(whole)
        for _ in range(draw.choice([1, 1, 2, 8, 64])):
            damaged[draw.randrange(len(damaged))] = draw.randrange(256)
        path.write_bytes(damaged)
        outcomes[survives(path) is None] += 1
    assert min(outcomes.values()) >= 20, outcomes


def test_shuffled_and_repeated_pages(whole: bytes, tmp_path: Path) -> None:
    """Trees that point at themselves or at pages of other tables."""
    draw = random.Random(21)
    pages = [whole[at:at + 4096] for at in range(0, len(whole), 4096)]
    path = tmp_path / "a.sqlite"
    for _ in range(100):
        damaged = list(pages)
        for _ in range(draw.choice([1, 3])):
            damaged[draw.randrange(1, len(pages))] = draw.choice(pages[1:])
        path.write_bytes(b"".join(damaged))
        survives(path)


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(size=st.integers(0, 10**6))
def test_cut_anywhere(whole: bytes, tmp_path: Path, size: int) -> None:
    size %= len(whole)
    path = tmp_path / "a.sqlite"
    path.write_bytes(whole[:size])
    assert survives(path) is None


cells = st.one_of(st.none(), st.integers(-(2**63), 2**63 - 1), st.floats(), st.text(max_size=5),
                  st.binary(max_size=5), st.integers(0, 300))


@settings(max_examples=80, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_any_value_in_any_column(tmp_path: Path, data: st.DataObject) -> None:
    """SQLite keeps whatever is put into a cell; the schema only suggests."""
    untyped = {table: ", ".join(column.strip().partition(" ")[0] for column in columns.split(","))
               for table, columns in (EARLY if data.draw(st.booleans()) else SCHEMA).items()}
    path = tmp_path / "a.sqlite"
    path.unlink(missing_ok=True)
    made = Export(path, untyped)
    made.add("TARGET_INFO_SESSION_START_TIME", utcEpochNs=data.draw(cells))
    for table, columns in untyped.items():
        for _ in range(data.draw(st.integers(0, 2))):
            made.add(table, **{column: data.draw(cells) for column in columns.split(", ")})
    survives(made.write())


def test_tables_that_lack_columns(tmp_path: Path) -> None:
    """Each column away, one after the other."""
    for table, declared in SCHEMA.items():
        columns = declared.split(", ")
        for away in range(len(columns)):
            path = tmp_path / "a.sqlite"
            path.unlink(missing_ok=True)
            made = training(path)
            made.schema = SCHEMA | {table: ", ".join(columns[:away] + columns[away + 1:]) or "nothing INTEGER"}
            trace = survives(made.write())
            needed = table == "CUPTI_ACTIVITY_KIND_KERNEL" and columns[away].split()[0] in ("start", "end")
            assert trace is not None and (len(trace.gpu.start) == 4) is needed, (table, columns[away])


def test_a_schema_that_lies(whole: bytes, tmp_path: Path) -> None:
    """Tables without row ids, virtual tables, and a name that must be quoted."""
    path = tmp_path / "a.sqlite"
    path.write_bytes(whole)
    with sqlite3.connect(path) as connection:
        connection.execute("CREATE TABLE OSRT_API (start INTEGER PRIMARY KEY, end INTEGER) WITHOUT ROWID")
        connection.executemany("INSERT INTO OSRT_API VALUES (?, 1)", [(1,), (2,)])
        connection.execute('CREATE TABLE "a""; DROP TABLE x; --" (start INTEGER)')
        connection.execute("CREATE VIRTUAL TABLE CUPTI_ACTIVITY_KIND_DRIVER USING fts4(start, end)")
        connection.execute("INSERT INTO CUPTI_ACTIVITY_KIND_DRIVER VALUES (1, 2)")
        connection.execute("DROP TABLE NVTX_EVENTS")
        connection.execute("CREATE TABLE NVTX_EVENTS_V2 (start INTEGER, end INTEGER, text TEXT, globalTid INTEGER)")
        connection.execute("CREATE TABLE NVTX_EVENTS_V10 (start INTEGER, end INTEGER, text TEXT, globalTid INTEGER)")
        connection.execute("INSERT INTO NVTX_EVENTS_V10 VALUES (1, 2, 'the newest', 5)")
    connection.close()
    trace = survives(path)
    assert trace is not None and trace.left_out["OSRT_API"] == 2
    assert len(trace.calls.start) == 10 and "CUPTI_ACTIVITY_KIND_DRIVER" not in str(trace.left_out)
    assert [trace.names[index] for index in trace.annotations.name] == ["the newest"]
