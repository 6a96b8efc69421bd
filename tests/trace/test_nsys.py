"""What the reader of Nsight Systems exports makes of small ones, of early ones, and of what is none."""

from __future__ import annotations

import os
import sqlite3
from pathlib import Path

import numpy as np
import pytest
from nsys_exports import EARLY, Export, thread, training

from saturate.errors import TraceError
from saturate.trace import nsys
from saturate.trace._sqlite import Database
from saturate.trace.analyze import analyze_one
from saturate.trace.columns import KERNEL, MEMCPY, MEMSET, Trace
from saturate.trace.launches import launching_calls


def names(trace: Trace, column: np.ndarray) -> list[str]:
    return [trace.names[index] for index in column.tolist()]


def test_every_kind_of_event(tmp_path: Path) -> None:
    trace = nsys.read(training(tmp_path / "a.sqlite").write())
    gpu = trace.gpu
    assert names(trace, gpu.name[:4]) == [
        "Memcpy HtoD (Pageable -> Device)", "void gemm<float>(float*)",
        "ncclDevKernel_AllReduce_Sum_f32(ncclDevComm*)", "Memset (Device)"]
    assert gpu.kind[:4].tolist() == [MEMCPY, KERNEL, KERNEL, MEMSET]
    assert gpu.start[:4].tolist() == [1_400, 2_000, 4_000, 8_000]
    assert gpu.end[:4].tolist() == [1_900, 4_000, 7_001, 8_100]
    assert gpu.bytes[:4].tolist() == [4096, -1, -1, 64]
    assert (gpu.blocks[1], gpu.threads[1], gpu.registers[1], gpu.shared_bytes[1]) == (80, 256, 32, 1040)
    assert gpu.blocks[0] == -1 and np.isnan(gpu.occupancy).all()
    assert gpu.stream[:4].tolist() == [7, 7, 9, 7]
    assert gpu.pid.tolist() == [100] * 8 and gpu.graph.tolist() == [0] * 8
    assert set(names(trace, trace.calls.name)) == {"cudaLaunchKernel", "cudaMemcpyAsync", "cudaMemsetAsync",
                                                  "cudaStreamSynchronize"}
    launches = launching_calls(trace)
    assert names(trace, trace.calls.name[launches])[:4] == [
        "cudaMemcpyAsync", "cudaLaunchKernel", "cudaLaunchKernel", "cudaMemsetAsync"]
    assert names(trace, trace.annotations.name) == ["ProfilerStep#4", "my block", "ProfilerStep#5", "my block"]
    assert names(trace, trace.operators.name) == ["aten::mm", "aten::mm"]
    assert trace.signatures[trace.operators.shapes[0]].dims == ((4, 8), (8, 2))
    assert trace.threads == ["100/101"]
    assert trace.origin_ns == 1_790_000_000_000_000_001
    info = trace.devices[0]
    assert (info.name, info.sms, info.threads_per_sm, info.capability, info.memory_bytes) == (
        "NVIDIA H100 80GB HBM3", 132, 2048, (9, 0), 80 << 30)
    assert (trace.kind, trace.problems, trace.left_out) == ("nsys", [], {})


def test_times_of_the_epoch_are_exact(tmp_path: Path) -> None:
    """Neighbouring nanoseconds of 2026 are one number in float64."""
    made = Export(tmp_path / "a.sqlite")
    epoch = 1_790_000_000_000_000_001
    made.add("TARGET_INFO_SESSION_START_TIME", utcEpochNs=epoch)    # --time-normalize has added it to all times
    made.kernel("k", epoch, epoch + 1)
    trace = nsys.read(made.write())
    assert (trace.gpu.start[0], trace.gpu.end[0] - trace.gpu.start[0], trace.origin_ns) == (epoch, 1, 0)


def test_unsorted_rows_and_chunks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("saturate.trace._sqlite.CHUNK_ROWS", 7)
    made = Export(tmp_path / "a.sqlite")
    for start in reversed(range(1000, 1000 + 50 * 10, 10)):
        made.kernel(f"k{start}", start, start + 3)
    trace = nsys.read(made.write())
    assert names(trace, trace.gpu.name) == [f"k{start}" for start in range(1000, 1500, 10)]
    assert (np.diff(trace.gpu.start) == 10).all() and (np.diff(trace.calls.start) == 10).all()


def test_columns_of_one_value_take_no_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Until they have a second one: here the last chunk brings another stream and device."""
    monkeypatch.setattr("saturate.trace._sqlite.CHUNK_ROWS", 4)
    made = Export(tmp_path / "a.sqlite")
    for number in range(10):
        made.kernel("k", 100 * number + 10, 100 * number + 20, device=number // 9, streamId=7 + number // 9)
    gpu = nsys.read(made.write()).gpu
    assert gpu.stream.tolist() == [7] * 9 + [8] and gpu.device.tolist() == [0] * 9 + [1]
    for column in (gpu.occupancy, gpu.blocks_per_sm, gpu.external, gpu.graph, gpu.blocks):
        assert column.strides == (0,)


def test_correlations_of_several_processes(tmp_path: Path) -> None:
    """Both processes call their launches 1 and 2, as CUPTI does."""
    made = Export(tmp_path / "a.sqlite")
    for pid, device in ((100, 0), (200, 1)):
        for number in (1, 2):
            made.call(f"launch{number} of {pid}", 10 * number, 10 * number + 1, pid, correlation=number)
            made.kernel(f"kernel{number} of {pid}", 100 * number, 100 * number + 9, pid, device, correlationId=number)
    trace = nsys.read(made.write())
    assert len(set(trace.gpu.correlation.tolist())) == 4
    for row, call in enumerate(launching_calls(trace).tolist()):
        assert trace.names[trace.calls.name[call]].replace("launch", "kernel") == trace.names[trace.gpu.name[row]]
    assert set(trace.gpu.pid.tolist()) == set(trace.calls.pid.tolist()) == {100, 200}


def test_devices_are_those_of_the_machine(tmp_path: Path) -> None:
    """Each of two processes sees one GPU and calls it 0."""
    made = Export(tmp_path / "a.sqlite")
    for pid, physical in ((100, 3), (200, 5)):
        made.add("TARGET_INFO_CUDA_DEVICE", gpuId=physical, cudaId=0, pid=pid)
        made.add("TARGET_INFO_GPU", id=physical, name=f"GPU {physical}", smCount=physical)
        made.kernel("k", 100, 200, pid)
    trace = nsys.read(made.write())
    assert sorted(zip(trace.gpu.pid.tolist(), trace.gpu.device.tolist())) == [(100, 3), (200, 5)]
    assert {number: info.name for number, info in trace.devices.items()} == {3: "GPU 3", 5: "GPU 5"}


def test_devices_that_cannot_be_told_apart_are_mentioned(tmp_path: Path) -> None:
    made = Export(tmp_path / "a.sqlite")
    for pid in (100, 200):
        made.kernel("k", 100, 200, pid)
    assert [id for id, _ in nsys.read(made.write()).problems] == ["devices-not-told-apart"]


def test_kernels_of_an_unknown_device_are_not_the_cpus(tmp_path: Path) -> None:
    """Neither those of a machine whose GPU 0 is described: they have a number of their own."""
    made = Export(tmp_path / "a.sqlite")
    made.add("TARGET_INFO_GPU", id=0, name="GPU 0")
    for pid in (100, 200):
        made.kernel("k", 100, 200, pid, deviceId=None)
    made.kernel("k", 300, 400, 100, deviceId=1)
    trace = nsys.read(made.write())
    assert trace.gpu.device.tolist() == [2, 2, 1] and trace.devices[2].name == ""
    assert [(id, text[:20]) for id, text in trace.problems] == [("unknown-device", "2 of 3 device events")]


def test_a_gpu_number_that_no_machine_has_is_not_used(tmp_path: Path) -> None:
    made = Export(tmp_path / "a.sqlite")
    made.add("TARGET_INFO_CUDA_DEVICE", gpuId=2**40, cudaId=0, pid=100)
    made.kernel("k", 100, 200, 100)
    assert nsys.read(made.write()).gpu.device.tolist() == [0]


def test_an_early_schema(tmp_path: Path) -> None:
    made = Export(tmp_path / "a.sqlite", EARLY)
    made.kernel("gemm<float>", 100, 200)
    made.range("ProfilerStep#1", 50, 300)
    trace = nsys.read(made.write())
    assert names(trace, trace.gpu.name) == ["gemm"]
    assert (trace.gpu.pid[0], trace.gpu.blocks[0], trace.gpu.shared_bytes[0]) == (100, -1, -1)
    assert launching_calls(trace).tolist() == [0]
    assert names(trace, trace.annotations.name) == ["ProfilerStep#1"]
    assert trace.devices[0].sms is None and trace.origin_ns == 0


@pytest.mark.parametrize(("kind", "source", "target", "name"), [
    (1, 0, 2, "Memcpy HtoD (Pageable -> Device)"),
    (1, 1, 2, "Memcpy HtoD (Pinned -> Device)"),
    (2, 2, 0, "Memcpy DtoH (Device -> Pageable)"),
    (8, 2, 2, "Memcpy DtoD (Device -> Device)"),
    (10, 2, 2, "Memcpy PtoP (Device -> Device)"),
    (11, None, None, "Memcpy HtoD (Managed -> Managed)"),
    (1, None, None, "Memcpy HtoD (Unknown -> Unknown)"),
    (77, 99, 2, "Memcpy (kind not recorded) (Unknown -> Device)"),
])
def test_names_of_copies(tmp_path: Path, kind: int, source: int | None, target: int | None, name: str) -> None:
    made = Export(tmp_path / "a.sqlite")
    made.copy(100, 200, kind, source, target)
    trace = nsys.read(made.write())
    assert names(trace, trace.gpu.name) == [name]


def test_memory_kinds_are_those_of_the_file(tmp_path: Path) -> None:
    made = Export(tmp_path / "a.sqlite")
    made.add("ENUM_CUDA_MEM_KIND", id=0, label="Pinned")
    made.add("ENUM_CUDA_MEM_KIND", id=1, label="Pageable")
    made.copy(100, 200, 1, 1, 2)
    assert nsys.read(made.write()).names[0] == "Memcpy HtoD (Pageable -> Device)"


@pytest.mark.parametrize(("text", "name", "table", "dims"), [
    ("aten::mm, seq = 4, op_id = 9, sizes = [[2, 3], [3, 4]]", "aten::mm", "operators", ((2, 3), (3, 4))),
    ("aten::cat, op_id = 9, sizes = [[[2], [3]], []]", "aten::cat", "operators", (((2,), (3,)), ())),
    ("aten::mm, op_id = 9", "aten::mm", "operators", None),
    ("MulBackward0, seq = 12, op_id = 4, sizes = [[2]], input_op_ids = [(1,0)]", "MulBackward0", "operators",
     ((2,),)),
    ("aten::cat, op_id = 9, sizes = [[2], ...]", "aten::cat", "operators", None),
    ("aten::cat, op_id = 9, sizes = [[2]], sizes = [[3]]", "aten::cat", "operators", None),
    ("aten::cat" + ", sizes = [ " * 100_000, "aten::cat", "operators", None),
    ("autograd::engine::evaluate_function: MeanBackward0, op_id = 7",
     "autograd::engine::evaluate_function: MeanBackward0", "operators", None),
    ("enumerate(DataLoader)#_SingleProcessDataLoaderIter.__next__, op_id = 3",
     "enumerate(DataLoader)#_SingleProcessDataLoaderIter.__next__", "annotations", None),
    ("Optimizer.step#SGD.step, op_id = 8", "Optimizer.step#SGD.step", "annotations", None),
    ("epoch 3, batch 4", "epoch 3, batch 4", "annotations", None),
    ("</script>\x1b[31m", "</script>\x1b[31m", "annotations", None),
])
def test_labels(tmp_path: Path, text: str, name: str, table: str, dims: object) -> None:
    made = Export(tmp_path / "a.sqlite")
    made.kernel("k", 100, 200)
    made.range(text, 1, 2)
    made.range(None, 3, 4, textId=made.text(text))      # registered strings come by number
    trace = nsys.read(made.write())
    events = getattr(trace, table)
    assert names(trace, events.name) == [name] * 2
    assert len(trace.operators.start) + len(trace.annotations.start) == 2
    assert [trace.signatures[row].dims if row >= 0 else None for row in events.shapes.tolist()] == [dims] * 2


def test_what_is_left_out_is_counted(tmp_path: Path) -> None:
    made = Export(tmp_path / "a.sqlite")
    made.kernel("k", 100, 200)
    made.range("open", 10, None)
    made.range(None, 10, 20)
    made.range("reversed", 20, 10)
    made.range("a mark", 20, None, eventType=34)
    made.call("reversed", 30, 20)
    for start in (5, 6, 7):
        made.add("OSRT_API", start=start, end=start + 1, globalTid=thread(100, 101), nameId=made.text("read"))
    trace = nsys.read(made.write())
    assert trace.left_out == {"NVTX ranges without a name": 1, "NVTX ranges without an end": 1, "OSRT_API": 3,
                              "host events that end before they start": 2, "NVTX events that are no ranges": 1}
    assert len(trace.annotations.start) == 0 and names(trace, trace.calls.name) == ["cudaLaunchKernel"]


def test_a_whole_graph_is_busy_time_and_said_to_hide_its_kernels(tmp_path: Path) -> None:
    made = Export(tmp_path / "a.sqlite")
    made.kernel("k", 100, 200, graphNodeId=4)
    made.kernel("k", 200, 300, graphNodeId=0)
    made.add("CUPTI_ACTIVITY_KIND_GRAPH_TRACE", start=400, end=1400, deviceId=0, graphId=3, streamId=7,
             correlationId=99, globalPid=thread(100, 0))
    trace = nsys.read(made.write())
    assert trace.gpu.graph.tolist() == [1, 0, 1]
    assert (names(trace, trace.gpu.name)[2], trace.gpu.end[2] - trace.gpu.start[2]) == ("CUDA graph", 1000)
    assert [id for id, _ in trace.problems] == ["whole-graphs"]
    assert "--cuda-graph-trace=node" in trace.problems[0][1]
    found = analyze_one(trace)
    assert {"kernels", "communication"} <= set(next(one for one in found.integrity.problems if one.id == "whole-graphs").blocks)
    device = found.devices[0]
    assert (device.kernels, device.median_kernel_ns, device.communication_ns) == (None, None, None), "one of 1000 ns is no kernel"
    assert device.busy_of_span == 1200 / 1300 and "without their kernels" in device.unknown["kernels"]


def test_a_few_whole_graphs_beside_kernels_forbid_nothing(tmp_path: Path) -> None:
    made = Export(tmp_path / "a.sqlite")
    for number in range(20):
        made.kernel("k", 1000 * number, 1000 * number + 950, graphNodeId=0)
    made.add("CUPTI_ACTIVITY_KIND_GRAPH_TRACE", start=20_000, end=21_000, deviceId=0, graphId=3, streamId=7,
             correlationId=99, globalPid=thread(100, 0))
    found = analyze_one(nsys.read(made.write()))
    assert not next(one for one in found.integrity.problems if one.id == "whole-graphs").blocks and found.devices[0].kernels == 21


@pytest.mark.parametrize(("text", "problem"), [
    ("CUPTI dropped 312 activity records.", "lost-records"),
    ("Not all CUDA events might have been collected.", "maybe-lost-records"),
    ("Number of CUDA events collected: 12", None),
    ("Some CPU IP samples were lost.", None),
    ("12 records were lost\nby CUPTI", "lost-records"),
    ("x " * 300_000, None),
])
def test_losses_that_nsys_reports(tmp_path: Path, text: str, problem: str | None) -> None:
    made = training(tmp_path / "a.sqlite")
    made.add("DIAGNOSTIC_EVENT", timestamp=1, severity=2, text=text)
    assert [id for id, _ in nsys.read(made.write()).problems] == ([problem] if problem else [])


@pytest.mark.parametrize("value", [None, "soon", b"\xff", 1.5, 2**63 - 1, -(2**63)])
def test_impossible_times_are_left_out(tmp_path: Path, value: object) -> None:
    made = Export(tmp_path / "a.sqlite", EARLY)     # no NOT NULL there
    made.kernel("k", 100, 200)
    made.kernel("bad", value, 200, correlationId=7)
    made.kernel("bad", 100, value, correlationId=8)
    trace = nsys.read(made.write())
    assert names(trace, trace.gpu.name) == ["k"]
    assert trace.left_out == {"CUPTI_ACTIVITY_KIND_KERNEL: no time, or an impossible one": 2}


@pytest.mark.parametrize(("table", "wrong", "problem"), [
    ("CUPTI_ACTIVITY_KIND_KERNEL", 1, "malformed-events"), ("CUPTI_ACTIVITY_KIND_KERNEL", 2, "lost-records"),
    ("CUPTI_ACTIVITY_KIND_RUNTIME", 1, "malformed-events"), ("CUPTI_ACTIVITY_KIND_RUNTIME", 2, "lost-calls")])
def test_rows_without_a_time_are_said_to_be_lost(tmp_path: Path, table: str, wrong: int, problem: str) -> None:
    """Above one in a hundred, busy time, or who launched what, is a guess."""
    export = Export(tmp_path / "a.sqlite")
    for number in range(100):
        export.kernel("k", 1000 + 100 * number, 1050 + 100 * number)
    for row in export.tables[table][:wrong]:
        row["start"] = "abc"
    trace = nsys.read(export.write())
    assert [id for id, _ in trace.problems] == [problem]
    assert trace.problems[0][1].startswith(f"{wrong} of 100 ")


def test_a_kernel_that_ends_before_it_starts_is_kept_for_the_integrity_check(tmp_path: Path) -> None:
    made = Export(tmp_path / "a.sqlite")
    made.kernel("k", 200, 100)
    assert nsys.read(made.write()).gpu.end[0] == 100


def test_cells_of_other_types(tmp_path: Path) -> None:
    made = Export(tmp_path / "a.sqlite")
    made.kernel("k", 100, 200, gridX="many", blockX=2**40, registersPerThread=None, deviceId=2**40, streamId=b"\x00",
                staticSharedMemory=None)
    trace = nsys.read(made.write())
    gpu = trace.gpu
    assert (gpu.blocks[0], gpu.threads[0], gpu.registers[0], gpu.device[0], gpu.stream[0]) == (-1, -1, -1, 0, -1)
    assert "unknown-device" in [id for id, _ in trace.problems]


def test_the_largest_grid_does_not_overflow(tmp_path: Path) -> None:
    made = Export(tmp_path / "a.sqlite")
    made.kernel("k", 100, 200, gridX=2**31 - 1, gridY=65535, gridZ=65535)
    assert nsys.read(made.write()).gpu.blocks[0] == (2**31 - 1) * 65535**2


def test_texts_that_are_no_utf8(tmp_path: Path) -> None:
    path = training(tmp_path / "a.sqlite").write()
    with sqlite3.connect(path) as connection:
        connection.execute("UPDATE StringIds SET value = CAST(x'ff6b' AS TEXT) WHERE value LIKE 'void gemm%'")
    connection.close()
    assert "\ufffdk" in nsys.read(path).names


def test_strings_without_a_key_are_found(tmp_path: Path) -> None:
    made = Export(tmp_path / "a.sqlite", EARLY | {"StringIds": "id INTEGER, value TEXT"})
    made.kernel("gemm<float>", 100, 200)
    trace = nsys.read(made.write())
    assert names(trace, trace.gpu.name) == ["gemm"]
    with Database(made.path) as database:
        assert database.string(1) == "cudaLaunchKernel_v7000"
        made.path.unlink()      # all were read at once: one by one, each would read the whole table
        assert database._texts is not None and len(database._texts) == 3


def test_a_name_that_is_missing(tmp_path: Path) -> None:
    made = training(tmp_path / "a.sqlite")
    made.kernel("k", 1, 2, demangledName=10**6)
    trace = nsys.read(made.write())
    assert trace.names[trace.gpu.name[0]] == "(name not recorded)"


def test_kernel_names_are_spelled_as_kineto_does(tmp_path: Path) -> None:
    made = Export(tmp_path / "a.sqlite")
    made.kernel("void at::<unnamed>::fill<(int)4, (bool)1, (unsigned long)2, float>(float*)", 1, 2)
    trace = nsys.read(made.write())
    assert trace.names[trace.gpu.name[0]] == "void at::(anonymous namespace)::fill<4, true, 2ul, float>(float*)"


def test_progress_rises_to_1(tmp_path: Path) -> None:
    seen: list[float] = []
    nsys.read(training(tmp_path / "a.sqlite").write(), seen.append)
    assert seen == sorted(seen) and seen[-1] == 1.0 and len(seen) > 2


def test_nothing_is_written_beside_the_file(tmp_path: Path) -> None:
    """Also where the database is in write-ahead mode, where an ordinary reader makes -wal and -shm."""
    folder = tmp_path / "a b?c#d%20"
    folder.mkdir()
    path = training(folder / "a.sqlite").write()
    connection = sqlite3.connect(path)
    connection.execute("PRAGMA journal_mode = wal")
    connection.close()
    before = (sorted(os.listdir(folder)), path.read_bytes())
    os.chmod(path, 0o400)
    assert len(nsys.read(path).gpu.start) == 8
    assert (sorted(os.listdir(folder)), path.read_bytes()) == before


def test_a_view_of_that_name_is_not_run(tmp_path: Path) -> None:
    """A view is a program of the file's author, and may never end."""
    path = training(tmp_path / "a.sqlite").write()
    with sqlite3.connect(path) as connection:
        connection.execute("DROP TABLE NVTX_EVENTS")
        connection.execute("CREATE VIEW NVTX_EVENTS AS WITH RECURSIVE n(start) AS "
                           "(SELECT 1 UNION ALL SELECT start + 1 FROM n LIMIT 100) "
                           "SELECT start, start AS end, 'x' AS text, 59 AS eventType FROM n")
    connection.close()
    assert len(nsys.read(path).annotations.start) == 0


# What is no export -------------------------------------------------------------------------------------------------

def card(path: Path) -> str:
    with pytest.raises(TraceError) as caught:
        nsys.read(path)
    assert str(path) in caught.value.message
    return caught.value.card()


def test_without_cuda_tables(tmp_path: Path) -> None:
    made = Export(tmp_path / "a.sqlite")
    made.add("META_DATA_EXPORT", name="EXPORT_SCHEMA_VERSION", value="3.16.1")
    made.add("OSRT_API", start=1, end=2)
    made.add("DIAGNOSTIC_EVENT", timestamp=1, text="No CUDA events collected. Does the process use CUDA?")
    text = card(made.write())
    for part in ("CUPTI_ACTIVITY_KIND_KERNEL", "OSRT_API", "Does the process use CUDA?",
                 "nsys profile -t cuda,nvtx,osrt"):
        assert part in text


def test_tables_without_rows(tmp_path: Path) -> None:
    made = training(tmp_path / "a.sqlite")
    for table in made.tables.keys() - {"StringIds", "META_DATA_EXPORT"}:
        made.tables[table] = []
    assert "no complete record" in card(made.write())


def test_a_database_of_something_else(tmp_path: Path) -> None:
    path = tmp_path / "cookies.sqlite"
    with sqlite3.connect(path) as connection:
        connection.execute("CREATE TABLE moz_cookies (id INTEGER, value TEXT)")
    connection.close()
    assert "moz_cookies" in card(path) and "no export of Nsight Systems" in card(path)


def test_truncated(tmp_path: Path) -> None:
    path = training(tmp_path / "a.sqlite").write()
    whole = path.read_bytes()
    for size in (1, 50, 99, 4096, len(whole) // 2, len(whole) - 1):
        path.write_bytes(whole[:size])
        assert f"ends at byte {size:,}" in card(path)


@pytest.mark.parametrize(("content", "said"), [
    (b"", "0 bytes"), (b"<html></html>" * 20, "not a SQLite database"),
    (b"SQLite format 3\x00" + b"\x00" * 200, "damaged"),
])
def test_no_database(tmp_path: Path, content: bytes, said: str) -> None:
    path = tmp_path / "report.nsys-rep"
    path.write_bytes(content)
    assert said in card(path)


def test_a_report_that_was_not_exported_names_the_command(tmp_path: Path) -> None:
    path = tmp_path / "report.nsys-rep"
    path.write_bytes(b"some container of NVIDIA's" * 100)
    assert f"nsys export --type sqlite {path}" in card(path)


def test_a_folder_and_a_missing_file(tmp_path: Path) -> None:
    assert "directory" in card(tmp_path)
    assert "No such file" in card(tmp_path / "none.sqlite")


def test_half_written(tmp_path: Path) -> None:
    path = training(tmp_path / "a.sqlite").write()
    (tmp_path / "a.sqlite-journal").write_bytes(b"x" * 600)
    assert "half written" in card(path)
    (tmp_path / "a.sqlite-journal").unlink()
    (tmp_path / "a.sqlite-wal").write_bytes(b"x" * 600)
    assert [id for id, _ in nsys.read(path).problems] == ["unfinished-write"]


def test_row_ids_beyond_the_file(tmp_path: Path) -> None:
    """They say nothing about how many rows there are, and must not decide how much memory is asked for."""
    made = training(tmp_path / "a.sqlite")
    made.add("OSRT_API", start=1, end=2)
    with sqlite3.connect(made.write()) as connection:
        for table in ("CUPTI_ACTIVITY_KIND_KERNEL", "CUPTI_ACTIVITY_KIND_RUNTIME", "NVTX_EVENTS", "OSRT_API"):
            connection.execute(f"UPDATE {table} SET rowid = 1 << 61 WHERE rowid = (SELECT max(rowid) FROM {table})")
    connection.close()
    trace = nsys.read(made.path)
    assert (len(trace.gpu.start), len(trace.calls.start), len(trace.annotations.start)) == (8, 10, 4)
    assert trace.left_out == {"OSRT_API": 1}


def test_more_rows_than_row_ids(tmp_path: Path) -> None:
    path = training(tmp_path / "a.sqlite").write()
    with sqlite3.connect(path) as connection:
        connection.execute("UPDATE CUPTI_ACTIVITY_KIND_RUNTIME SET rowid = rowid - 9")
    connection.close()
    assert "more rows than it has row ids" in card(path)


def test_correlations_that_no_recording_has(tmp_path: Path) -> None:
    made = training(tmp_path / "a.sqlite")
    made.kernel("k", 1, 2, pid=200, correlationId=2**62)
    assert "correlation ids" in card(made.write())


# Real ones ---------------------------------------------------------------------------------------------------------

def test_two_h100(shared_traces: Path) -> None:
    """44.8 ms: the sum of all kernels, of both devices; 960 ms: from the first one's start to the last one's end."""
    trace = nsys.read(shared_traces / "nsys_h100_2gpu.sqlite")
    gpu = trace.gpu
    kernels = gpu.kind == KERNEL
    assert int(kernels.sum()) == 3_442
    assert int((gpu.end - gpu.start)[kernels].sum()) == 44_829_522
    assert int(gpu.end[kernels].max() - gpu.start[kernels].min()) == 960_485_009
    assert {device: int((gpu.end - gpu.start)[kernels & (gpu.device == device)].sum()) for device in (0, 1)} == {
        0: 22_385_163, 1: 22_444_359}
    assert int((launching_calls(trace)[kernels] >= 0).sum()) == 1_632   # the others were launched before it began
    assert {trace.names[index] for index in np.unique(gpu.name[gpu.kind == MEMCPY])} == {
        "Memcpy HtoD (Pageable -> Device)", "Memcpy HtoD (Pinned -> Device)", "Memcpy DtoH (Device -> Pinned)",
        "Memcpy DtoD (Device -> Device)"}
    assert len(trace.operators.start) == 16_778 and "aten::mm" in trace.names


def test_an_export_of_a_program_that_failed_to_record(shared_traces: Path) -> None:
    assert "No CUDA events collected" in card(shared_traces / "nsys_no_cuda_tables.sqlite")


@pytest.mark.parametrize(("column", "value"), [("rowid TEXT", "abc"), ("rowid REAL", 1.5), ("rowid", b"x")])
def test_a_column_named_like_the_row_id_is_no_count(tmp_path: Path, column: str, value: object) -> None:
    path = tmp_path / "a.sqlite"
    with sqlite3.connect(path) as connection:
        connection.execute(f"CREATE TABLE T (start INTEGER, {column})")
        connection.executemany("INSERT INTO T VALUES (?, ?)", [(1, value), (2, value), (3, value)])
    connection.close()
    with Database(path) as database:
        assert database.rows("T") == 3


def test_a_version_of_thousands_of_digits_is_none(tmp_path: Path) -> None:
    path = tmp_path / "a.sqlite"
    with sqlite3.connect(path) as connection:
        for name in ("NVTX_EVENTS_V2", "NVTX_EVENTS_V10", f"NVTX_EVENTS_V{'9' * 5000}"):
            connection.execute(f"CREATE TABLE {name} (start)")
    connection.close()
    with Database(path) as database:
        assert database.find("NVTX_EVENTS") == "NVTX_EVENTS_V10"
