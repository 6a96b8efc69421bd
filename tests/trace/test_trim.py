"""A trimmed trace is small, valid, private, and says the same about its steps."""

from __future__ import annotations

import errno
import gzip
import json
import os
from pathlib import Path

import kineto_text as made
import numpy as np
import pytest
from kineto_text import Number, document, event, flow, kernel, operator, training, write

from saturate.errors import EnvironmentProblem, SaturateError, TraceError, UsageError
from saturate.trace import _json_stream
from saturate.trace import trim as trimming
from saturate.trace.analyze import analyze
from saturate.trace.read import read
from saturate.trace.trim import trim


@pytest.fixture
def trimmed(tmp_path):
    """Trim a text; what the standard library reads of the result."""
    def trimmed(text: bytes, steps: int = 3):
        trim(write(tmp_path / "in.json", text), tmp_path / "out.json", steps)
        return json.loads((tmp_path / "out.json").read_bytes())
    return trimmed


def names(content) -> list[str]:
    return sorted(e["name"] for e in content["traceEvents"])


@pytest.mark.parametrize("steps,kept", [(1, [4]), (3, [3, 4, 5]), (4, [3, 4, 5, 6]), (100, list(range(10)))])
def test_steps_from_the_middle(trimmed, steps, kept):
    content = trimmed(document(training(10)), steps)
    assert [n for n in names(content) if n.startswith("Profiler")] == [f"ProfilerStep#{n}" for n in kept]


def test_what_is_kept(trimmed):
    """All that overlaps the step, whatever began before or ends after it; the call that launched a kernel of it; flows
    with two ends; names of processes and threads."""
    content = trimmed(document([
        *training(3), operator("whole run", 0, 3000, 50), operator("before", 0, 1000, 51), operator("after", 2000, 5, 52),
        operator("at its start", 1000, 0, 53), operator("just inside", 0, Number("1000.001"), 54), flow("s", 999, 1500, "fwdbwd"),
        flow("s", 998, 1500, "fwdbwd"), flow("f", 998, 1501, "fwdbwd"), flow("s", 997, 1500, "fwdbwd"), flow("f", 997, 2500, "fwdbwd"),
        {"ph": "M", "name": "secret", "pid": 1, "args": {"name": "token"}}, {"ph": "i", "name": "mark", "ts": 1200, "s": "g"}]), 1)
    assert names(content) == sorted([
        "ProfilerStep#1", "aten::mm", "gemm", "gemm", "cudaLaunchKernel", "cudaLaunchKernel", "train.py(3): <module>", "ac2g", "ac2g",
        "ac2g", "ac2g", "fwdbwd", "fwdbwd", "process_name", "thread_name", "whole run", "at its start", "just inside", "mark"])
    launched = {e["args"]["correlation"] for e in content["traceEvents"] if e.get("cat") == "kernel"}
    assert launched == {100, 101} == {e["args"]["correlation"] for e in content["traceEvents"] if e.get("cat") == "cuda_runtime"}
    assert {e["id"] for e in content["traceEvents"] if e["ph"] in "sf"} == {100, 101, 998}


def test_it_says_the_same_about_its_steps(tmp_path):
    """Every kernel, operator and call of the window, digit for digit, at the same time."""
    source = write(tmp_path / "in.json.gz", document(training(9, start=777), baseTimeNanoseconds=10**18 + 7, last=True))
    done = trim(source, tmp_path / "out.json.gz", 2)
    assert (done.steps, done.window_ns) == (["ProfilerStep#3", "ProfilerStep#4"], 2_000_000)
    whole, part = read(source), read(tmp_path / "out.json.gz")
    assert not part.problems

    def of_window(trace, table):
        columns = getattr(trace, table)
        start, end = (column + trace.origin_ns - 10**18 - 7 for column in (columns.start, columns.end))
        inside = (start < 5_777_000) & (end > 3_777_000)
        return [(trace.names[n], s, e) for n, s, e in zip(columns.name[inside], start[inside].tolist(), end[inside].tolist())
                if not trace.names[n].startswith("Profiler")]

    for table in ("gpu", "operators", "calls", "annotations"):
        assert of_window(part, table) == of_window(whole, table) and (table == "annotations" or of_window(part, table))
    assert np.isin(part.gpu.correlation, part.calls.correlation).all()


@pytest.fixture
def large(monkeypatch):
    """Every trace counts as a large one, of which a stretch is kept."""
    monkeypatch.setattr(trimming, "SMALL_BYTES", 0)


def test_without_steps_a_small_trace_is_kept_whole(tmp_path):
    events = [kernel("first", 5, 10, 1), kernel("late", 900_000, 10, 2), operator("last", 950_000, 5, 3)]
    done = trim(write(tmp_path / "in.json", document(events)), tmp_path / "out.json")
    assert (done.steps, done.of_steps, done.window_ns == done.of_ns, done.events, done.of_events) == ([], 0, True, 3, 3)


def test_without_steps_the_stretch_that_is_like_the_whole(tmp_path, large):
    """Not the first 100 ms, in which the program only starts, nor one without the calls that launched the work."""
    begin = [kernel("begin", 0, 10, 1), operator("begin", 0, 5, 1)]
    work = [event for at in range(400_000, 700_000, 1000) for event in (
        kernel("work", at + 100, 500, at), made.call("cudaLaunchKernel", at + 50, 5, at, at), operator("aten::mm", at + 40, 30, at))]
    done = trim(write(tmp_path / "in.json", document(begin + work)), tmp_path / "out.json")
    part = read(tmp_path / "out.json")
    assert (done.window_ns, done.of_ns) == (100_000_000, 699_600_001) and done.events < done.of_events == 902
    assert len(part.gpu.start) == len(part.calls.start) >= 49 and "begin" not in part.names


def test_steps_in_which_nothing_ran_are_not_the_ones(trimmed):
    """The middle one of these five is empty: the one before it has a kernel that began earlier."""
    empty = [e for e in training(5) if not 1800 < e.get("ts", 0) < 3000 or e["name"].startswith("Profiler")]
    content = trimmed(document(empty), 1)
    assert [n for n in names(content) if n.startswith("Profiler")] == ["ProfilerStep#1"]


def test_where_nothing_ran_in_any_step_the_nearest_of_it_is_kept(tmp_path):
    """Operators behind the only step: without one, the result would be a trace of nothing."""
    events = [made.step(0, 0, 1000), event("user_annotation", "gloo:all_reduce", 10, 900),
              operator("aten::empty", 5000, 5, 1), operator("aten::empty", 9000, 5, 2)]
    done = trim(write(tmp_path / "in.json", document(events)), tmp_path / "out.json")
    part = read(tmp_path / "out.json")
    assert done.steps == ["ProfilerStep#0"] and len(part.operators.start) == 1 and len(part.annotations.start) == 2


def test_without_steps(trimmed, large):
    far = [kernel("first", 500_000, 10, 1), kernel("inside", Number("599999.999"), 10, 2), kernel("behind", 600_000, 10, 3)]
    assert names(trimmed(document([*far, operator("early", 0, 5, 1)]))) == ["first", "inside"]


def test_without_a_device(trimmed, large):
    assert names(trimmed(document([operator("first", 0, 5, 1), operator("later", 100_000, 5, 2)]))) == ["first"]


def test_nothing_private_is_kept(trimmed):
    """Of the top level only known facts, of the group only what describes it."""
    content = trimmed(document(
        training(), metadata={"env": {"TOKEN": "hunter2"}}, traceName="/home/me/hunter2", hostname="hunter2", schemaVersion=1,
        distributedInfo={"rank": 0, "world_size": 2, "master": "hunter2", "backend": "nccl"}, deviceProperties=[{"id": 0, "name": "A"}],
        with_stack=1, baseTimeNanoseconds=5))
    assert "hunter2" not in json.dumps(content)
    assert content["distributedInfo"] == {"rank": 0, "world_size": 2, "backend": "nccl"}
    assert set(content) == {"schemaVersion", "distributedInfo", "deviceProperties", "with_stack", "baseTimeNanoseconds", "traceEvents"}


def test_what_is_written_is_json(trimmed, monkeypatch):
    """Whatever the input got away with. Blocks are small, so that every way through is taken."""
    monkeypatch.setattr(_json_stream, "BLOCK", 900)
    monkeypatch.setattr(trimming.kineto, "_LOST_AT_MOST", 1.0)
    odd = [kernel("inf", 1500, 5, 1, x=Number("nan")), operator("@@", 1501, 5, 2), operator("C:@#", 1502, 5, 3),
           event("user_annotation", "deep", 1503, 5, {"x": Number("[" * 9000 + "]" * 9000)}), 5, None, operator("last", 1504, 5, 4)]
    content = trimmed(document([*training(1), *odd, *training(3)][:-1]).replace(b"@@", b"\xff").replace(b"@#", b"\\q"), 100)
    found = names(content)
    assert {"inf", "\ufffd", "C:\\q", "last"} <= set(found) and "deep" not in found and found.count("gemm") == 4


def test_bytes_that_are_no_text(trimmed):
    assert "\ufffd" in names(trimmed(document(training()).replace(b"aten::mm", b"\xff")))
    content = trimmed(document(training()).replace(b'"float"', b'"\xff"'))
    assert {e["args"]["Input type"][0] for e in content["traceEvents"] if e.get("cat") == "cpu_op"} == {"\ufffd"}


def test_gzip_tells_no_name_and_no_time(tmp_path):
    for name in ("a.json.gz", "b.json.gz"):
        trim(write(tmp_path / "in.json", document(training())), tmp_path / name)
    packed = (tmp_path / "a.json.gz").read_bytes()
    assert packed == (tmp_path / "b.json.gz").read_bytes() and packed[3] == 0 and packed[4:8] == b"\0\0\0\0"
    assert json.loads(gzip.decompress(packed))["traceEvents"]


@pytest.mark.parametrize("link", [None, os.symlink, os.link])
def test_the_input_is_never_overwritten(tmp_path, link):
    source = write(tmp_path / "in.json", document(training()))
    out = source
    if link is not None:
        out = tmp_path / "linked.json"
        link(source, out)
    with pytest.raises(UsageError, match="the trace itself"):
        trim(source, out)
    assert source.read_bytes() == document(training())


def test_an_older_result_is_replaced(tmp_path):
    (tmp_path / "out.json").write_text("old")
    (tmp_path / "out.json").chmod(0o600)
    assert trim(write(tmp_path / "in.json", document(training())), tmp_path / "out.json").events > 10
    assert len(read(tmp_path / "out.json").gpu.start) == 3 and len(list(tmp_path.iterdir())) == 2
    assert (tmp_path / "out.json").stat().st_mode & 0o777 == 0o600, "nobody else could read the one before"


class FullDisk:
    """A file that takes 500 bytes."""

    def __init__(self, file):
        self.file, self.left = file, 500

    def write(self, data: bytes) -> int:
        self.left -= len(data)
        if self.left < 0:
            raise OSError(errno.ENOSPC, "No space left on device")
        return self.file.write(data)

    def __getattr__(self, name):
        return getattr(self.file, name)


@pytest.mark.parametrize("name", ["out.json", "out.json.gz"])
def test_a_full_disk_leaves_what_was_there(tmp_path, monkeypatch, name):
    (tmp_path / name).write_text("old")
    source = write(tmp_path / "in.json", document(training(500)))
    compressed = trimming._compressed
    monkeypatch.setattr(trimming, "_compressed", lambda file, out: compressed(FullDisk(file), out))
    with pytest.raises(EnvironmentProblem, match="cannot be written") as found:
        trim(source, tmp_path / name, 400)
    assert "No space" in found.value.cause
    assert (tmp_path / name).read_text() == "old" and sorted(p.name for p in tmp_path.iterdir()) == sorted(["in.json", name])


@pytest.mark.parametrize("text,steps,error,said", [
    (b"", 3, TraceError, "empty"), (b'{"traceEvents": []}', 3, TraceError, "nothing to keep"), (document(training()), 0, UsageError, "0 steps")])
def test_refused(tmp_path, text, steps, error, said):
    with pytest.raises(error, match=said):
        trim(write(tmp_path / "in.json", text), tmp_path / "out.json", steps)
    assert not (tmp_path / "out.json").exists()


def test_where_it_cannot_be_written(tmp_path):
    source = write(tmp_path / "in.json", document(training()))
    with pytest.raises(UsageError, match="no file"):
        trim(source, tmp_path)
    with pytest.raises(EnvironmentProblem, match="cannot be written"):
        trim(source, tmp_path / "absent" / "out.json")


def test_what_a_trace_has_lost_is_not_hidden_by_a_part_of_it(tmp_path):
    text = document(training(9))
    source = write(tmp_path / "in.json", text[: text.rindex(b"ProfilerStep#8")])
    assert [problem for problem, _ in read(source).problems] == ["truncated"]
    with pytest.raises(TraceError, match="not whole") as found:
        trim(source, tmp_path / "out.json")
    assert "ends too early" in found.value.cause and not (tmp_path / "out.json").exists()
    nameless = [{**event, "dur": None} if event.get("cat") == "kernel" else event for event in training(9)]
    with pytest.raises(TraceError, match="not whole"):
        trim(write(source, document(nameless)), tmp_path / "out.json")


@pytest.mark.parametrize("odd", [
    {"ph": ["X"]}, {"ph": "s", "id": [1]}, {"ph": "M", "name": ["process_name"]}, {"ph": "X", "cat": ["a"]}])
def test_values_of_another_type_belong_to_nothing(trimmed, odd):
    content = trimmed(document([*training(1), {"ts": 10**7, **odd}]))
    assert names(content) == names(trimmed(document(training(1))))


def test_damaged_traces(tmp_path):
    """Cut anywhere in its events, a trace is refused, and behind them trims to JSON; nothing is left behind."""
    text = document(training(3), deviceProperties=[{"id": 0}])
    for cut in range(0, len(text), 97):
        try:
            trim(write(tmp_path / "in.json", text[:cut]), tmp_path / "out.json")
        except SaturateError:
            assert not (tmp_path / "out.json").exists()
        else:
            assert json.loads((tmp_path / "out.json").read_bytes())["traceEvents"]
            (tmp_path / "out.json").unlink()
        assert [p.name for p in tmp_path.iterdir()] == ["in.json"]


@pytest.mark.parametrize("name", ["resnet50_v100_workers0", "ws128_rank0", "sglang_decode_hipgraph"])
def test_real_traces(shared_traces, tmp_path, name):
    source, out = shared_traces / f"{name}.json.gz", tmp_path / "small.json.gz"
    done = trim(source, out)
    whole, part = read(source), read(out)
    assert json.loads(gzip.decompress(out.read_bytes()))["traceEvents"] and part.devices.keys() == whole.devices.keys()
    assert len(done.steps) == len([n for n in part.names if n.startswith("ProfilerStep#")]) == (0 if "sglang" in name else min(3, _steps(whole)))
    assert {made.dumps(p[0]) for p in part.problems} <= {made.dumps(p[0]) for p in whole.problems}
    assert np.isin(part.gpu.correlation, part.calls.correlation).mean() >= np.isin(whole.gpu.correlation, whole.calls.correlation).mean()


@pytest.mark.parametrize("name", ["cpu_only", "sglang_decode_hipgraph", "torch_compile_triton", "owlv2_h100"])
def test_what_is_kept_of_a_real_trace_has_its_verdict(shared_traces, tmp_path, name):
    source, out = shared_traces / f"{name}.json.gz", tmp_path / "small.json.gz"
    trim(source, out)
    whole, part = analyze([read(source)]), analyze([read(out)])
    assert whole.verdict == part.verdict and {p.id for p in part.integrity.problems} <= {p.id for p in whole.integrity.problems}


def _steps(trace) -> int:
    return sum(name.startswith("ProfilerStep#") for name in trace.names)


def test_a_part_of_a_host_that_was_far_ahead_says_so_too(tmp_path) -> None:
    """Without what the device did of the steps later, the part would hold the steps of the host, and other work in them."""
    trim(Path(__file__).parent / "h200" / "clean.json.gz", tmp_path / "part.json.gz", 2)
    analysis = analyze([read(tmp_path / "part.json.gz")])
    assert [problem.id for problem in analysis.integrity.problems if problem.blocks] == ["host-ahead"] and analysis.devices[0].steps == 0
