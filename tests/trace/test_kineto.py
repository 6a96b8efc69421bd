"""The Kineto reader: every flavour, exactly, and in bounded memory."""

from __future__ import annotations

import gzip
import json
import resource
import subprocess
import sys
from decimal import Decimal
from pathlib import Path

import kineto_text as made
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from kineto_text import Number, document, event, kernel, operator, training, write

from saturate.errors import TraceError
from saturate.report import analysis_words
from saturate.trace import _json_stream, _kineto_columns, kineto
from saturate.trace.analyze import analyze_one
from saturate.trace.columns import MEMCPY, MEMSET, DeviceInfo, Signature
from saturate.trace.read import read


@pytest.fixture
def reading(tmp_path):
    """Read a text as a file."""
    def reading(text: bytes, name: str = "trace.json"):
        return read(write(tmp_path / name, text))
    return reading


def problems(trace) -> list[str]:
    return [identity for identity, _ in trace.problems]


# what becomes of an event


def test_a_kernel(reading):
    trace = reading(document([kernel(
        "gemm", 10, 5, 99, 3, grid=[4, 2, 3], block=[128, 2, 1], stream=20, device=1,
        **{"blocks per SM": 0.25, "est. achieved occupancy %": 62, "registers per thread": 40, "shared memory": 2048,
           "graph node id": 12})]))
    (row,) = made.rows(trace, "gpu")
    assert row == (0, 5000, 0, "gemm", 1, 20, 99, 3, -1, 24, 256, 0.25, pytest.approx(0.62), 40, 2048, 1, -1)
    assert trace.devices[1] == DeviceInfo(id=1)


@pytest.mark.parametrize("top", [{"distributedInfo": {"rank": 10**30, "world_size": 2}}, {"distributedInfo": {"rank": 0, "world_size": 2**64}},
                                 {"deviceProperties": [{"id": 2**31}]}, {"deviceProperties": [{"id": 0, "totalGlobalMem": 10**30}]}])
def test_facts_beyond_64_bits_are_not_used(reading, top):
    trace = reading(document([kernel("k", 5, 1, 1)], **top))
    assert (trace.rank, trace.devices) == (None, {0: DeviceInfo(id=0)}) and [id for id, _ in trace.problems] == ["malformed-facts"]


def test_durations_that_a_float_does_not_hold(reading):
    """One that is a negative number, wrapped, is left out; one that is possible is exact."""
    trace = reading(document([kernel("k", 1, 1, 1), kernel("wrapped", 2, Number("18446744073709551.615"), 2),
                              kernel("long", 3, Number("9007199254740.993"), 3)]))
    assert (trace.gpu.end - trace.gpu.start).tolist() == [1000, 9_007_199_254_740_993] and trace.left_out == {"malformed": 1}


def test_what_a_kernel_does_not_say_is_unknown(reading):
    trace = reading(document([event("kernel", "k", 1, 1, {}, pid=3, tid=9), event("gpu_memset", "Memset", 2, 1, {}, pid="GPU", tid=1)]))
    gpu = trace.gpu
    assert [gpu.device.tolist(), gpu.stream.tolist()] == [[3, 0], [9, 1]]      # the viewer's row says as much
    assert (trace.problems[0][0], trace.problems[0][1][:20]) == ("unknown-device", "1 of 2 device events")
    for column in (gpu.correlation, gpu.external, gpu.bytes, gpu.blocks, gpu.threads, gpu.registers, gpu.shared_bytes):
        assert column.tolist() == [-1, -1]
    assert np.isnan(gpu.occupancy).all() and np.isnan(gpu.blocks_per_sm).all() and not gpu.graph.any()


@pytest.mark.parametrize("said", [{"est. achieved occupancy %": 250}, {"grid": [0, 0, 0]}, {"grid": [2**31, 2**31, 2**31]},
                                  {"blocks per SM": -5}, {"blocks per SM": 1e300}])
def test_impossible_launch_shapes_are_unknown(reading, said):
    gpu = reading(document([kernel("k", 1, 1, 1, **said)])).gpu
    assert np.isnan(gpu.occupancy).all() and np.isnan(gpu.blocks_per_sm).all() and gpu.blocks.tolist() == [-1]


def test_copies(reading):
    trace = reading(document([
        event("gpu_memcpy", "Memcpy HtoD (Pageable -> Device)", 1, 2, {"device": 0, "stream": 7, "correlation": 4, "bytes": 4096}),
        event("gpu_memset", "Memset (Device)", 5, 2, {"device": 0, "stream": 7, "correlation": 5, "bytes": 64})]))
    assert trace.gpu.kind.tolist() == [MEMCPY, MEMSET] and trace.gpu.bytes.tolist() == [4096, 64]


def test_names_of_2021(reading):
    """The categories, ids and quoted thread numbers of the first Kineto say the same as today's."""
    shape = {"Input Dims": [[4]], "Input type": ["float"]}
    old = reading(document([
        event("Operator", "aten::add", 10, 9, {"Device": 7, "External id": 2, "Trace name": "PyTorch Profiler", **shape}, tid="7"),
        event("Runtime", "cudaLaunchKernel", 12, 2, {"cbid": 211, "correlation": 5, "external id": 2}, tid=7),
        event("Kernel", "add", 20, 3, {"device": 0, "stream": 7, "correlation": 5, "external id": 2, "theoretical occupancy %": 50}),
        event("Memcpy", "Memcpy", 30, 3, {"device": 0, "stream": 7, "correlation": 6, "external id": 2, "bytes": 8}),
        event("Memset", "Memset", 40, 3, {"device": 0, "stream": 7, "correlation": 7, "external id": 2, "bytes": 8})]), "old.json")
    new = reading(document([
        operator("aten::add", 10, 9, 2, **shape), made.call("cudaLaunchKernel", 12, 2, 5, 2),
        kernel("add", 20, 3, 5, 2, **{"est. achieved occupancy %": 50}),
        event("gpu_memcpy", "Memcpy", 30, 3, {"device": 0, "stream": 7, "correlation": 6, "External id": 2, "bytes": 8}),
        event("gpu_memset", "Memset", 40, 3, {"device": 0, "stream": 7, "correlation": 7, "External id": 2, "bytes": 8})]))
    assert made.contents(old) == made.contents(new)
    assert old.threads == ["7/7"] and len(old.gpu.start) == 3


def test_inputs_of_operators(reading):
    inputs = {"Input Dims": [[16, 4], [[2], [3]], []], "Input type": ["c10::BFloat16", "TensorList", "Scalar"],
              "Input Strides": [[4, 1], [[1], [1]], []], "Concrete Inputs": ["", "", "0.5"]}
    trace = reading(document([operator("a", 1, 1, 1, **inputs), operator("b", 2, 1, 2), operator("c", 3, 1, 3, **inputs)]))
    assert [trace.signatures[i] if i >= 0 else None for i in trace.operators.shapes] == [
        Signature(dims=((16, 4), ((2,), (3,)), ()), types=("c10::BFloat16", "TensorList", "Scalar"),
                  strides=((4, 1), ((1,), (1,)), ()), concrete=("", "", "0.5")), None, *[trace.signatures[0]]]
    assert len(trace.signatures) == 1


def test_labels_are_annotations_whatever_their_category(reading):
    labels = ["ProfilerStep#3", "enumerate(DataLoader)#_SingleProcessDataLoaderIter.__next__",
              "enumerate(DataPipe)#MapperIterDataPipe", "Optimizer.step#SGD.step"]
    trace = reading(document([
        *(event(category, name, at, 1) for at, (name, category) in enumerate((n, c) for n in labels for c in ("Operator", "user_annotation"))),
        operator("aten::ProfilerStep#3", 50, 1, 1), operator("enumerate", 51, 1, 2)]))
    assert sorted({trace.names[i] for i in trace.annotations.name}) == sorted(labels) and len(trace.annotations.name) == 8
    assert [trace.names[i] for i in trace.operators.name] == ["aten::ProfilerStep#3", "enumerate"]


def test_memory(reading):
    def allocation(ts, size, device_type, device):
        return event("cpu_instant_event", "[memory]", ts, None, {
            "Total Reserved": 900, "Total Allocated": 500, "Bytes": size, "Addr": 1, "Device Id": device, "Device Type": device_type},
            ph="i", s="t")
    trace = reading(document([allocation(2, -64, 1, 0), allocation(1, 64, 0, 0), allocation(3, 8, 1, 2)]))
    memory = trace.memory
    assert (memory.time.tolist(), memory.bytes.tolist(), memory.device.tolist()) == ([0, 1000, 2000], [64, -64, 8], [-1, 0, 2])
    assert memory.allocated.tolist() == [500] * 3 and memory.reserved.tolist() == [900] * 3


def test_collectives_stay_with_their_kernels(reading):
    """Rows are sorted after reading, so the arguments must move with them."""
    said = {"Collective name": "allreduce", "In msg nelems": 5, "Group size": 8, "dtype": "Float", "Seq": 3}
    later = {"Collective name": "allgather"}
    trace = reading(document([kernel("later", 50, 1, 3, **later), kernel("ncclKernel", 30, 1, 1, **said), kernel("gemm", 10, 1, 2)]))
    assert trace.collectives == {1: said, 2: later}
    assert trace.names[trace.gpu.name[1]] == "ncclKernel"


def test_facts(reading):
    trace = reading(document(
        [kernel("k", 5, 1, 1)], baseTimeNanoseconds=1775078550000000000, distributedInfo={"rank": 3, "world_size": 16},
        deviceProperties=[{"id": 0, "name": "H100", "totalGlobalMem": 8, "computeMajor": 9, "computeMinor": 0, "numSms": 132,
                           "maxThreadsPerMultiprocessor": 2048, "regsPerMultiprocessor": 65536, "sharedMemPerMultiprocessor": 7},
                          {"id": 1, "name": "MI300X", "maxSharedMemoryPerMultiProcessor": 9}]))
    assert (trace.rank, trace.world_size, trace.origin_ns) == (3, 16, 1775078550000000000 + 5000)
    assert trace.devices == {0: DeviceInfo(0, "H100", 132, 2048, 8, (9, 0), 7, 65536),
                             1: DeviceInfo(id=1, name="MI300X", shared_bytes_per_sm=9)}


def test_wrong_facts_are_left_out_and_said(reading):
    trace = reading(document([kernel("k", 5, 1, 1)], baseTimeNanoseconds="soon", deviceProperties={"id": 0}, distributedInfo=[1]))
    assert (trace.rank, trace.origin_ns, trace.devices) == (None, 5000, {0: DeviceInfo(id=0)})
    assert problems(trace) == ["malformed-facts"] * 3


@pytest.mark.parametrize("big", [2**31, 2**40, 2**63 - 1])
def test_large_ids(reading, monkeypatch, big):
    """Ids are kept in 32 bits until one of them does not fit; blocks are small, so earlier ones are there already."""
    monkeypatch.setattr(_json_stream, "BLOCK", 500)
    trace = reading(document([*training(3), made.call("launch", 8000, 1, big, 7), kernel("k", 9000, 1, big, big, stream=big)]))
    assert trace.gpu.correlation.tolist() == [100, 101, 102, big] == trace.calls.correlation.tolist()
    assert trace.gpu.stream.tolist() == [7, 7, 7, big] and trace.gpu.external[-1] == big


def test_the_launching_process(reading):
    """Two processes of one file may use the same correlation only where one of them launched nothing."""
    two = [event("cuda_runtime", "cudaLaunchKernel", 1, 1, {"correlation": 5}, pid=10),
           event("cuda_runtime", "cudaLaunchKernel", 1, 1, {"correlation": 6}, pid=11)]
    trace = reading(document([*two, kernel("a", 5, 1, 6), kernel("b", 6, 1, 5), kernel("c", 7, 1, 77)]))
    assert trace.gpu.pid.tolist() == [11, 10, -1]
    assert reading(document([two[0], kernel("c", 7, 1, 77)])).gpu.pid.tolist() == [10]


def test_order(reading):
    """By start; of events that start together, the enclosing one first."""
    trace = reading(document([operator("late", 9, 1, 1), operator("inner", 5, 1, 2), operator("outer", 5, 3, 3)]))
    assert [trace.names[i] for i in trace.operators.name] == ["outer", "inner", "late"]


def test_what_is_left_out_is_counted(reading):
    trace = reading(document([*training(3), event("cuda_sync", "Stream Synchronize", 1, 1), event("gpu_user_annotation", "x", 1, 1),
                              event("mtia_something", "x", 1, 1), {"ph": "i", "name": "Record Window End", "ts": 5}]))
    assert trace.left_out == {"python_function": 3, "ac2g": 6, "metadata": 2, "cuda_sync": 1, "gpu_user_annotation": 1,
                              "mtia_something": 1, "no category": 1}
    assert not trace.problems


# times


@pytest.mark.parametrize("text,nanoseconds", [
    ("1419116104994.671", 1419116104994671), ("4497802107107.307", 4497802107107307), ("4909914216204.635", 4909914216204635), ("8796093022207.999", 8796093022207999),
    ("8796093022208.001", 8796093022208001), ("1669783687464181.123", 1669783687464181123), ("1669783687464181", 1669783687464181000),
    ("5.740", 5740), ("5.7", 5700), ("0.001", 1), ("-1.5", -1500), ("12e3", 12000000), ("68.0", 68000)])
def test_times_are_exact(reading, text, nanoseconds):
    assert reading(document([kernel("k", Number(text), 1, 1)])).origin_ns == nanoseconds


def test_a_careless_conversion_would_not_pass():
    """Some values above are such that float64 times 1000 is off."""
    assert round(float("4497802107107.307") * 1000) != 4497802107107307
    assert round(float("1669783687464181.123") * 1000) != 1669783687464181123


@settings(max_examples=60, deadline=None)
@given(data=st.data(), digits=st.integers(1, 19))
def test_any_time_is_exact(tmp_path_factory, data, digits):
    """Epoch or offset, integer or with decimals, also side by side in one block."""
    numbers = st.integers(0, min(10**digits, 2**61) - 1)
    times = data.draw(st.lists(st.tuples(numbers, st.integers(0, 10**9), st.booleans()), min_size=1, max_size=5))

    def text(nanoseconds: int, short: bool) -> Number:
        found = f"{nanoseconds // 1000}.{nanoseconds % 1000:03}"
        return Number(found.rstrip("0").rstrip(".") if short else found)

    path = write(tmp_path_factory.mktemp("times") / "t.json", document(
        [kernel("k", text(start, short), text(length, not short), n) for n, (start, length, short) in enumerate(times)]))
    trace = read(path)
    found = sorted(zip((trace.gpu.start + trace.origin_ns).tolist(), (trace.gpu.end - trace.gpu.start).tolist()))
    assert found == sorted((start, length) for start, length, _ in times)
    assert not trace.problems


def test_decimals_below_a_nanosecond_are_said(reading):
    trace = reading(document([kernel("k", 1, Number("2.0004"), 1), kernel("k", 5, Number("2.001"), 2)]))
    assert problems(trace) == ["below-nanoseconds"] and "1 times" in trace.problems[0][1]
    assert (trace.gpu.end - trace.gpu.start).tolist() == [2000, 2001]


# the file


@pytest.mark.parametrize("top", [{}, {"schemaVersion": 1, "deviceProperties": [{"id": 0, "name": "A"}, {"id": 1, "name": "B"}],
                                      "metadata": {"x": [{"a": "]}"}, {"b": "\\\""}]}, "number": 5, "text": "}], {"}])
@pytest.mark.parametrize("last", [False, True])
@pytest.mark.parametrize("indent", ["", "\n    "])
@pytest.mark.parametrize("name", ["t.json", "t.json.gz", "no_suffix"])
def test_layout_does_not_matter(reading, top, last, indent, name):
    plain = reading(document(training()), "plain.json")
    trace = reading(document(training(), last=last, indent=indent, **top), name)
    found = made.contents(trace)
    assert found | {"devices": 0} == made.contents(plain) | {"devices": 0}
    assert [device.name for device in trace.devices.values()] == (["A", "B"] if top else [""])
    assert not trace.problems and trace.read_bytes == len(document(training(), last=last, indent=indent, **top))


@pytest.mark.parametrize("text", [
    made.dumps(training()).encode(), made.dumps(training()).encode()[:-1], b"\xef\xbb\xbf" + document(training()),
    document(training()) + b"\n\0\0", b"\n " + document(training()), document(training())[:-2] + b" , ] }"],
    ids=["bare list", "bare list without its end", "byte order mark", "padding", "space", "comma at the end"])
def test_other_wrappings(reading, text):
    trace = reading(text)
    assert made.contents(trace) == made.contents(reading(document(training()), "plain.json")) and not trace.problems


@pytest.mark.parametrize("block", [1, 7, 64, 200, 1000, 5000])
@pytest.mark.parametrize("name", ["t.json", "t.json.gz"])
def test_blocks_of_any_size_say_the_same(reading, monkeypatch, block, name):
    text = document([
        *training(5),
        operator('},{"ph":"X"', 7000, 1, 50), operator("a\\", 7001, 1, 51), operator('b"}, {"', 7002, 1, 52), operator("]}", 7003, 1, 53),
        event("user_annotation", "nested", 7004, 1, {"parts": [{"ph": 1}, {"ph": [{"ph": 2}, {"x": "}"}]}, {"ph": 3}]}),
        event("user_annotation", "empty", 7005, 1, {"a": [], "b": {}, "c": [{}, {}]})], deviceProperties=[{"id": 0}, {"id": 1}])
    whole = reading(text, "whole.json")
    monkeypatch.setattr(_json_stream, "BLOCK", block)
    monkeypatch.setattr(_kineto_columns, "_PAGE", 3)
    trace = reading(text, name)
    assert made.contents(trace) == made.contents(whole) and not trace.problems
    assert {"nested", "empty", '},{"ph":"X"', "a\\", 'b"}, {"', "]}"} <= set(trace.names)


def test_one_by_one_says_the_same(reading, monkeypatch):
    text = document([*training(5), event("cpu_instant_event", "[memory]", 3, 0, {"Bytes": 5, "Device Type": 1, "Device Id": 0}, ph="i"),
                     kernel("ncclKernel", Number("30.25"), 1, 1, **{"Collective name": "allgather", "Seq": 1})])
    quick = reading(text)
    monkeypatch.setattr(kineto._Reader, "_quickly", lambda self, array: (_ for _ in ()).throw(ValueError))
    monkeypatch.setattr(kineto, "_PENDING", 2)
    careful = reading(text)
    assert made.contents(careful) == made.contents(quick) and careful.collectives == quick.collectives


def test_an_unexpected_event_costs_only_itself(reading):
    odd = kernel("odd", 5000, 1, 3, device="0", **{"shared memory": "a lot", "registers per thread": 2**70, "Input Dims": 5})
    trace = reading(document([*training(), odd]))
    assert len(trace.gpu.start) == 5 and not trace.problems
    row = {name: column[-1] for name, column in vars(trace.gpu).items()}
    assert (row["device"], row["shared_bytes"], row["registers"], row["correlation"]) == (0, -1, -1, 3)


def test_categories_that_are_not_known_are_learnt(reading, monkeypatch):
    """The first block that has one is read event by event, the following ones are not."""
    monkeypatch.setattr(_json_stream, "BLOCK", 2000)
    asked = []
    event_alone = kineto._Reader.event
    monkeypatch.setattr(kineto._Reader, "event", lambda self, text, offset: asked.append(offset) or event_alone(self, text, offset))
    trace = reading(document([event("brand_new", "x", at, 1) for at in range(500)]))
    assert trace.left_out == {"brand_new": 500} and len(asked) < 100


def test_progress(tmp_path, monkeypatch):
    monkeypatch.setattr(_json_stream, "BLOCK", 1000)
    seen = []
    read(write(tmp_path / "t.json", document(training(50))), seen.append)
    assert len(seen) > 10 and seen == sorted(seen) and seen[-1] == 1.0


# memory


READ = """
import resource, sys
from pathlib import Path
from saturate.trace.kineto import read
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
read(Path(sys.argv[1]))
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)
"""


def grown(path: Path) -> float:
    """MiB by which a fresh process grows while it reads."""
    done = subprocess.run([sys.executable, "-c", READ, str(path)], capture_output=True, text=True, check=True)
    return int(done.stdout) / 1024 * resource.getpagesize() / 4096


@pytest.mark.parametrize("name", ["t.json", "t.json.gz"])
def test_memory_is_bounded(tmp_path, name):
    """30 MB of events that are skipped, a 10 MB field that is not asked for."""
    one = made.dumps(event("python_function", "train.py(1): <module>" * 10, 1, 1)).encode()
    text = b'{"metadata": {"x": [' + b'{"y": "zzzzzzzz"},' * 600_000 + b'0]}, "traceEvents": [' + b",\n".join(
        [one] * (30_000_000 // len(one)) + [made.dumps(kernel("k", 1, 1, 1)).encode()]) + b"]}"
    path = write(tmp_path / name, text)
    assert len(text) > 40_000_000 and grown(path) < 16


# files that are not as they should be


@pytest.mark.parametrize("text,said", [
    (b"", "is empty"), (b"  \n", "is empty"), (b"<!DOCTYPE html><html>", "HTML"), (b"\x1f\x8b", "damaged gzip"),
    (gzip.compress(b"", mtime=0), "is empty"), (gzip.compress(b"<html>", mtime=0), "HTML"), (gzip.compress(b"SQLite format 3\0...", mtime=0), "gunzip"),
    (b"\x28\xb5\x2f\xfd....", "zstd"), (b"PK\x03\x04", "unpack"), (b"\xff\xfe{\0", "UTF-16"), (b"hello", "not JSON"),
    (b"{}", "traceEvents"), (b'{"a": [1, 2, {"b": 3}], "c": "d"}', "traceEvents"), (b'{"traceEvents": {}}', "not a list"),
    (b'{"traceEvents": 5}', "not a list"), (b"{1: 2}", "byte 1"), (b'{"a" 5}', "byte 5"), (b'{"traceEv', "too early"),
    (b'{"traceEvents": [', "before its first event"), (b'{"traceEvents": [{"ph": "X", "ca', "before its first event"),
    (b'{"a": ' + b"[" * 200_000, "too early"), (b'{"traceEvents": [' + b"[" * 200_000, "before its first event"),
    (b'{"metadata": "' + b"x" * 3_000_000, "does not end")],
    ids=lambda value: repr(value[:24]) if isinstance(value, bytes) else "")
def test_no_trace(monkeypatch, tmp_path, text, said):
    monkeypatch.setattr(_json_stream, "FIELD_LIMIT", 1 << 20)
    with pytest.raises(TraceError) as found:
        path = tmp_path / "t.json"
        path.write_bytes(text)
        read(path)
    assert said in found.value.card() and "t.json" in found.value.message


def test_folders_pipes_and_absent_files(tmp_path):
    import os

    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "closed").write_bytes(b"{}")
    (tmp_path / "closed").chmod(0)
    for name, said in (("", "regular file"), ("pipe", "regular file"), ("absent", "No such file"), ("closed", "denied")):
        if name == "closed" and os.geteuid() == 0:
            continue
        with pytest.raises(TraceError) as found:
            read(tmp_path / name)
        assert said in found.value.card()


@pytest.mark.parametrize("name", ["t.json", "t.json.gz"])
def test_a_file_that_ends_too_early_is_read_as_far_as_it_goes(tmp_path, name):
    text = document(training(500))
    path = write(tmp_path / name, text)
    path.write_bytes(path.read_bytes()[:path.stat().st_size // 2])
    trace = read(path)
    assert problems(trace) == ["truncated"] and "byte" in trace.problems[0][1]
    assert ("gzip" in trace.problems[0][1]) == name.endswith(".gz")
    assert 225 < len(trace.annotations.start) < 275


def test_cut_anywhere(reading):
    """Every event that is whole is read, wherever the file ends."""
    text = document(training(2))
    ends = [at for at in range(len(text)) if text[at:at + 1] == b"}" and _is_event(text, at)]
    for cut in range(text.index(b"}") + 2, len(text) - 2, 13):
        trace = reading(text[:cut])
        whole = sum(at < cut for at in ends)
        read_now = sum(trace.left_out.values()) + sum(len(getattr(trace, t).start) for t in ("gpu", "operators", "calls", "annotations"))
        assert (read_now, problems(trace)[0]) == (whole, "truncated"), cut


def _is_event(text: bytes, at: int) -> bool:
    """Whether the bracket at `at` closes an event: there, the text so far is a whole list."""
    try:
        json.loads(text[len(b'{"traceEvents": '):at + 1] + b"]")
    except ValueError:
        return False
    return True


def test_joined_files(reading):
    text = document(training())
    trace = reading(text + b"\n" + text)
    assert problems(trace) == ["concatenated"] and f"{len(text) + 1:,}" in trace.problems[0][1]
    assert len(trace.gpu.start) == 4


def test_a_joined_gzip_is_one_stream(tmp_path):
    """gzip files may have several members; split within an event, they still are one text."""
    text = document(training())
    path = tmp_path / "t.json.gz"
    path.write_bytes(gzip.compress(text[:700]) + gzip.compress(text[700:]) + b"\0" * 512)
    assert made.contents(read(path))["gpu"] == made.contents(read(write(tmp_path / "t.json", text)))["gpu"]


def test_a_wrong_checksum_is_said(tmp_path):
    packed = bytearray(gzip.compress(document(training())))
    packed[-5] ^= 1
    (tmp_path / "t.json.gz").write_bytes(packed)
    trace = read(tmp_path / "t.json.gz")
    assert problems(trace) == ["damaged-gzip"] and len(trace.gpu.start) == 4


@pytest.mark.parametrize("change,problem,reason", [
    ({"dur": -5}, "negative-durations", "negative duration"), ({"ts": "noon"}, "malformed-events", "malformed"),
    ({"ts": None}, "malformed-events", "malformed"), ({"ts": True}, "malformed-events", "malformed"),
    ({"dur": Number("NaN")}, "malformed-events", "malformed"), ({"dur": [1]}, "malformed-events", "malformed"),
    ({"ts": 10**30}, "malformed-events", "malformed"), ({"ts": -2**63}, "malformed-events", "malformed"), ({"ts": Number("1e400")}, "malformed-events", "malformed"),
    ({"ts": Number("1e999999999")}, "malformed-events", "malformed"), ({"dur": 2**63}, "malformed-events", "malformed"),
    ({"name": 5}, "malformed-events", "malformed"), ({"ph": "B"}, "malformed-events", "malformed")])
def test_wrong_events_are_left_out_and_said(reading, change, problem, reason):
    bad = {**kernel("bad", 5, 5, 1), **change}
    usual = training()[2:]                          # without what has no category: the quick way
    text = document([*usual, bad, *usual])
    trace = reading(text)
    assert trace.left_out[reason] == 1 and len(trace.gpu.start) == 8
    assert problem in problems(trace)
    where = next(message for identity, message in trace.problems if identity == problem)
    if "NaN" not in str(change):
        assert f"byte {text.index(made.dumps(bad).encode()):,}" in where


@pytest.mark.parametrize("wrong,lost", [(2, False), (3, True)])
def test_many_wrong_events_mean_lost_records(reading, wrong, lost):
    """Above one in a hundred, nothing follows from the rest."""
    bad = [{**operator("bad", 5, 5, 1), "dur": -1}] * wrong
    assert ("lost-records" in problems(reading(document([*training(28), *bad])))) == lost


@pytest.mark.parametrize("wrong,lost", [(1, False), (2, True)])
def test_device_events_are_counted_against_their_like(reading, wrong, lost):
    """Few among all events may be many of the device's, and busy time is made of those."""
    many = [operator("aten::relu", 10 * at, 5, 1000 + at) for at in range(5000)]
    bad = [{**kernel("bad", 5, 5, 1), "dur": "5"}] * wrong
    trace = reading(document([*training(100), *many, *bad]))
    assert ("lost-records" in problems(trace)) == lost
    if lost:
        assert f"{wrong} device events could not be read, {len(trace.gpu.start)} could" in dict(trace.problems)["lost-records"]


def test_only_labels(reading):
    trace = reading(document([event("Operator", "ProfilerStep#1", 5, 5)]))
    assert len(trace.annotations.start) == 1 and not len(trace.operators.start) and not trace.problems


def test_nothing_in_it(reading):
    for text in (document([]), b"[]", document([event("ac2g", "x", 1, 1)])):
        trace = reading(text)
        assert problems(trace) == ["no-events"] and trace.origin_ns == 0 and not trace.devices


def test_another_programs_trace_is_not_told_to_record_an_accelerator(reading):
    """JAX, TensorFlow and others write the same format, without the categories of torch.profiler."""
    trace = reading(document([{"ph": "X", "pid": 1, "tid": 1, "ts": 10 * n, "dur": 5, "name": f"fusion.{n}"} for n in range(9)]))
    assert "9 events are another program's" in trace.problems[0][1]
    found = analyze_one(trace)
    assert [(one.id, "busy" in one.blocks) for one in found.integrity.problems] == [("no-events", True)]
    assert "another program's" in analysis_words.because(found)


def test_elements_that_are_no_events(reading):
    trace = reading(document([1, None, "x", [], *training(), {}]))
    assert len(trace.gpu.start) == 4 and trace.left_out["malformed"] == 4 and trace.left_out["no category"] == 1


def test_bare_nan_and_inf(reading):
    """As C++ streams print them; in names they stay what they are."""
    text = document([*training(), kernel("nan, inf", 9000, 1, 1, **{"blocks per SM": Number("nan"), "warps per SM": Number("-inf")})])
    trace = reading(text)
    assert len(trace.gpu.start) == 5 and problems(trace) == ["not-quite-json"] and "nan, inf" in trace.names
    assert np.isnan(trace.gpu.blocks_per_sm[-1])


def test_offsets_are_those_of_the_whole_text(reading, monkeypatch):
    monkeypatch.setattr(_json_stream, "BLOCK", 500)
    bad = {**kernel("bad", 5, 5, 1), "dur": -1}
    text = document([*training(20), bad, *training(20)])
    assert f"byte {text.index(made.dumps(bad).encode()):,}" in dict(reading(text).problems)["negative-durations"]


def test_a_damaged_last_event_does_not_hide_the_end(reading):
    """What follows the list is not taken for events, and the devices are read."""
    text = document(training(3), deviceProperties=[{"id": 0, "name": "A"}, {"id": 1, "name": "B"}], x=[{"y": 1}, {"y": 2}])
    at = text.rindex(b'"ac2g"')
    trace = reading(text[:at] + b"5 5" + text[at + 6:])
    assert problems(trace) == ["damaged-events", "lost-records"]
    assert trace.devices[1].name == "B" and "no category" not in trace.left_out


def test_a_long_event_is_refused_and_the_rest_read(reading, monkeypatch):
    """The brackets of what does not end are not followed for ever."""
    monkeypatch.setattr(_json_stream, "EVENT_LIMIT", 5000)
    monkeypatch.setattr(_json_stream, "BLOCK", 1000)
    trace = reading(document([*training(3), event("kernel", "long", 1, 1, {"x": "y" * 9000}), *training(3)]))
    assert "damaged-events" in problems(trace) and len(trace.gpu.start) == 6


def test_a_gzip_of_padded_members_in_small_pieces(tmp_path, monkeypatch):
    """Members that end where a block does, and padding between them."""
    monkeypatch.setattr(_json_stream, "BLOCK", 64)
    text = document(training(20))
    packed = b"".join(gzip.compress(text[at:at + 640]) + b"\0" * 100 for at in range(0, len(text), 640))
    (tmp_path / "t.json.gz").write_bytes(packed)
    trace = read(tmp_path / "t.json.gz")
    assert len(trace.gpu.start) == 20 and "truncated" not in problems(trace) and "damaged-gzip" not in problems(trace)


@pytest.mark.parametrize("name,found", [
    (b"caf\xe9", "caf\ufffd"), (b"C:\\Users\\me", "C:\\Users\\me"), (b"a\tb", "a b"), (b"</script><b>", "</script><b>"),
    ("\u65e5\u672c".encode(), "\u65e5\u672c"), (b"\\u00e9", "\u00e9")])
def test_names(reading, name, found):
    text = document([*training(), kernel("@@", 9000, 1, 1)]).replace(b"@@", name)
    trace = reading(text)
    assert trace.names[trace.gpu.name[-1]] == found and len(trace.gpu.start) == 5


def test_duplicate_ids_are_said(reading):
    """Those of one process; two processes count from one each."""
    trace = reading(document([*training(), *training(3)]))
    assert [message.split(" with ")[0] for identity, message in trace.problems if identity == "duplicate-ids"] == [
        "3 calls share a correlation id", "3 operators share an id"]
    other = [{**one, "pid": 8} if one.get("cat") in ("cpu_op", "cuda_runtime") else one for one in training()]
    assert not reading(document([*training(), *other])).problems
    assert problems(reading(document([*training(), *other, *other]))) == ["duplicate-ids"] * 2


def test_deep_nesting(reading):
    deep = kernel("deep", 5, 5, 1, x=Number("[" * 50_000 + "]" * 50_000))
    trace = reading(document([*training(), deep]))
    assert len(trace.gpu.start) == 4 and trace.left_out["nested too deeply"] == 1


def test_damage_costs_what_is_damaged(reading):
    """A lost quote makes the rest of the file one string, until the next event."""
    text = document(training(50))
    at = text.index(b'"gemm"', len(text) // 2)
    trace = reading(text[:at] + text[at + 1:])
    assert problems(trace) == ["damaged-events"] and len(trace.gpu.start) == 49 and len(trace.annotations.start) == 50


def test_a_file_of_damage_is_refused(reading):
    broken = made.dumps(training(300)).encode().replace(b'"name"', b'"name')
    with pytest.raises(TraceError, match="damaged"):
        reading(b'{"traceEvents": ' + broken + b"}")


# the real ones


@pytest.mark.parametrize("name,kernels", [
    ("resnet50_v100_workers0", 8772), ("resnet50_v100_workers4", 8868), ("owlv2_h100", 4330), ("ddp2_v100", 19370), ("a100_ws16", 6080)])
def test_kernels_of_real_traces(shared_traces, name, kernels):
    trace = read(shared_traces / f"{name}.json.gz")
    assert np.count_nonzero(trace.gpu.kind == 0) == kernels and not trace.problems


@pytest.mark.parametrize("name", ["ws128_rank0", "sglang_decode_hipgraph", "torch_compile_triton", "cpu_only"])
def test_real_traces_agree_with_the_standard_library(shared_traces, name):
    path = shared_traces / f"{name}.json.gz"
    with gzip.open(path) as file:
        raw = json.load(file, parse_float=Decimal)["traceEvents"]
    trace = read(path)

    def nanoseconds(value):
        exact = Decimal(value) * 1000
        assert exact == int(exact)
        return int(exact)

    tables = {"gpu": {"kernel", "gpu_memcpy", "gpu_memset"}, "operators": {"cpu_op"}, "calls": {"cuda_runtime", "cuda_driver"},
              "annotations": {"user_annotation"}}
    base = _base(path)
    for table, categories in tables.items():
        columns = getattr(trace, table)
        expected = sorted((e["name"], base + nanoseconds(e["ts"]), nanoseconds(e["dur"])) for e in raw if e.get("cat") in categories)
        found = sorted(zip((trace.names[i] for i in columns.name), (columns.start + trace.origin_ns).tolist(),
                           (columns.end - columns.start).tolist()))
        assert found == expected
    operators = sorted((e for e in raw if e.get("cat") == "cpu_op"), key=lambda e: (e["ts"], -e["dur"]))
    assert [trace.signatures[i].types if i >= 0 else () for i in trace.operators.shapes] == [
        tuple(e["args"].get("Input type", ())) for e in operators]


def _base(path: Path) -> int:
    with gzip.open(path) as file:
        return json.load(file).get("baseTimeNanoseconds", 0)
