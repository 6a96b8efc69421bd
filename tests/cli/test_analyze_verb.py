"""`saturate analyze` from the command line: files in, text, JSON and pages out."""

from __future__ import annotations

import gzip
import io
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest

pytest.importorskip("numpy")

from saturate.cli import _analysis, analyze, main
from saturate.errors import EnvironmentProblem, TraceError
from saturate.records.analysis import Analysis, Device, Evidence, Finding, Straggler, overall
from saturate.records.comparison import Comparison
from saturate.records.observations import Observations
from saturate.report.page import MAX_BYTES


def event(name, cat, start, end, **args):
    """A complete event; times in microseconds."""
    device = cat in ("kernel", "gpu_memcpy")
    return {
        "ph": "X",
        "name": name,
        "cat": cat,
        "ts": start,
        "dur": end - start,
        "pid": 0 if device else 9,
        "tid": 7 if device else 1,
        "args": args,
    }


def kineto(steps=4, wait=500, kernel="gemm", rank=None, collective=0, offset=0, world_size=2):
    """Steps of 1000 us each: first the loader, then a launch, then 300 us of kernel, then a collective."""
    events = []
    for step in range(steps):
        t = step * 1000
        events += [
            event(f"ProfilerStep#{step}", "user_annotation", t, t + 1000),
            event("enumerate(DataLoader)#_SingleProcessDataLoaderIter.__next__", "user_annotation", t, t + wait),
            event(
                "aten::mm",
                "cpu_op",
                t + wait,
                t + wait + 20,
                **{"External id": step + 1, "Input Dims": [[64, 64], [64, 64]], "Input type": ["float", "float"]},
            ),
            event(
                "cudaLaunchKernel",
                "cuda_runtime",
                t + wait + 5,
                t + wait + 10,
                correlation=10 * step + 1,
                **{"External id": step + 1},
            ),
            event(
                kernel,
                "kernel",
                t + wait + 12,
                t + wait + 312,
                correlation=10 * step + 1,
                device=0,
                stream=7,
                **{"External id": step + 1, "grid": [80, 1, 1], "block": [256, 1, 1]},
            ),
        ]
        if collective:
            start = t + wait + 320 + offset
            events += [
                event("cudaLaunchKernel", "cuda_runtime", t + wait + 313, t + wait + 314, correlation=10 * step + 2),
                event(
                    "ncclDevKernel_AllReduce",
                    "kernel",
                    start,
                    start + collective - offset,
                    correlation=10 * step + 2,
                    device=0,
                    stream=8,
                    **{"Collective name": "allreduce", "In msg nelems": 1024, "dtype": "Float"},
                ),
            ]
    record = {
        "schemaVersion": 1,
        "deviceProperties": [
            {"id": 0, "name": "Tesla V100-SXM2-32GB", "numSms": 80, "maxThreadsPerMultiprocessor": 2048}
        ],
        "traceEvents": events,
    }
    if rank is not None:
        record["distributedInfo"] = {"rank": rank, "world_size": world_size, "backend": "nccl"}
    return record


@pytest.fixture
def trace(tmp_path):
    """Writes a trace and returns its path."""

    def write(name="trace.json", **options):
        path = tmp_path / name
        data = json.dumps(kineto(**options)).encode()
        path.write_bytes(gzip.compress(data) if name.endswith(".gz") else data)
        return path

    return write


@pytest.fixture(autouse=True)
def no_ceilings(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def run(capsys, *words):
    code = main.main(["analyze", *map(str, words)])
    captured = capsys.readouterr()
    return code, captured.out, captured.err


def test_text_for_people(capsys, trace):
    code, out, err = run(capsys, trace("t.json.gz"))
    assert code == 0 and err == ""
    lines = out.splitlines()
    assert lines[0].startswith("Input-bound: 50.0 % of the steps: ")
    assert lines[-1].startswith("next       saturate ")
    assert "Tesla V100-SXM2-32GB, 4 kernels, 4 steps of 1.00 ms" in out
    assert "30.0 % of the steps" in out and "\x1b" not in out
    assert re.search(r"^findings +1\. at most 2\.\d+x: ", out, re.M)


def test_json_is_one_object_and_text_goes_elsewhere(capsys, trace):
    code, out, err = run(capsys, trace(), "--json")
    assert code == 0 and out.count("\n") == 1
    found = msgspec.json.decode(out, type=Analysis)
    device = found.devices[0]
    assert (
        device.compute_ns + device.exposed_communication_ns + device.exposed_copy_ns + device.idle_ns
        == device.step_ns
    )
    assert (device.step_ns, device.compute_ns) == (4_000_000, 1_200_000)
    assert len(device.each_step) == 4 and device.each_step[1].start_ns == 1_000_000
    assert found.verdict == "input-bound"
    assert [finding.id for finding in found.findings] and found.findings[0].id.startswith("input-bound")
    assert err.startswith("Input-bound: ")


def test_findings_name_only_techniques_that_exist(capsys, trace, monkeypatch):
    from saturate.techniques import _registry

    _, out, _ = run(capsys, trace(), "--json")
    named = {name for finding in json.loads(out)["findings"] for name in finding["techniques"]}
    assert named and named <= set(_registry.load())
    monkeypatch.setattr(_registry, "load", dict)
    _, out, _ = run(capsys, trace(), "--json")
    assert not any(finding["techniques"] for finding in json.loads(out)["findings"])


def test_a_page_and_its_place(capsys, trace, tmp_path):
    page = tmp_path / "page.html"
    code, _, err = run(capsys, trace(kernel="</script><b>gemm\u202e"), "--html", page)
    assert code == 0 and err == f"wrote {page}\n"
    text = page.read_text(encoding="utf-8")
    assert len(text) < MAX_BYTES and "Input-bound" in text
    assert text.count("</script>") == 1 and "<b>gemm" not in text and "\u202e" not in text
    assert oct(page.stat().st_mode & 0o777) == oct(0o666 & ~_umask())
    page.chmod(0o600)
    assert run(capsys, trace(), "--html", page)[0] == 0 and page.stat().st_mode & 0o777 == 0o600, "nobody else could read the one before"
    assert sorted(path.name for path in tmp_path.iterdir() if path.is_file()) == ["page.html", "trace.json"]


def _umask():
    mask = os.umask(0)
    os.umask(mask)
    return mask


@pytest.mark.parametrize("option", ["--html", "--trim"])
def test_a_link_stays_one_and_what_it_leads_to_is_written(capsys, trace, tmp_path, option):
    (tmp_path / "far").mkdir()
    (tmp_path / "link").symlink_to("far/file")
    for _ in ("that is not there yet", "that is"):
        assert run(capsys, trace(), option, tmp_path / "link")[0] == 0
        assert (tmp_path / "link").is_symlink() and (tmp_path / "far" / "file").stat().st_size
        assert [path.name for path in (tmp_path / "far").iterdir()] == ["file"]


def test_a_page_that_cannot_be_written_leaves_nothing(trace, tmp_path, monkeypatch):
    target = tmp_path / "page.html"
    target.write_text("before")
    monkeypatch.setattr(os, "replace", lambda *_: (_ for _ in ()).throw(OSError(28, "no space left")))
    with pytest.raises(EnvironmentProblem, match="page.html cannot be written") as caught:
        analyze._write(target, "after")
    assert caught.value.cause == "no space left"
    assert target.read_text() == "before"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["page.html"]


def test_trim_writes_a_smaller_trace_of_the_same_kind(capsys, trace, tmp_path):
    out_path = tmp_path / "small.json.gz"
    code, _, err = run(capsys, trace(steps=9), "--trim", out_path, "--steps", "2")
    assert code == 0 and f"wrote {out_path} (2 of 9 steps, 10 of 45 events; " in err
    _, out, _ = run(capsys, out_path, "--json")
    assert json.loads(out)["devices"][0]["steps"] == 2


@pytest.mark.parametrize("small,said", [(1 << 20, "4.0 of 4.0"), (0, "3.3 of 4.0")])
def test_trim_says_what_it_cut(capsys, trace, tmp_path, monkeypatch, small, said):
    from saturate.trace import trim

    monkeypatch.setattr(trim, "SMALL_BYTES", small)
    source = trace(wait=200)
    source.write_text(source.read_text().replace("ProfilerStep#", "my step "))
    _, _, err = run(capsys, source, "--trim", tmp_path / "out.json")
    whole = "its whole length" if small else f"{said} ms"
    assert f"(no steps are marked: {whole}, " in err and " of 20 events; " in err


def test_two_ranks_tell_waiting_from_transfer(capsys, trace):
    # Rank 1 comes 80 us late, so rank 0's collective takes 100 us, of which 80 are waiting.
    files = [
        trace("rank0.json", rank=0, wait=200, collective=100),
        trace("rank1.json", rank=1, wait=200, collective=100, offset=80),
    ]
    code, out, _ = run(capsys, *files, "--json")
    found = msgspec.json.decode(out, type=Analysis)
    assert code == 0 and [(device.rank, device.source) for device in found.devices] == list(
        enumerate(map(str, files))
    )
    first, second = sorted(found.stragglers, key=lambda each: each.rank)
    assert (first.wait_ns, first.transfer_ns, first.late_ns) == (4 * 80_000, 4 * 20_000, 0)
    assert (second.wait_ns, second.late_ns) == (0, 4 * 80_000)
    _, text, _ = run(capsys, *files)
    assert "1 of 2 devices in 2 traces" in text and re.search(r"^peers +rank 1 +late 0\.320 ms", text, re.M)


def test_ranks_that_are_missing_are_counted_and_may_be_what_the_others_wait_for(capsys, trace):
    def seen(world_size):
        files = [
            trace(f"rank{rank}.json", rank=rank, wait=200, collective=300, world_size=world_size) for rank in (0, 1)
        ]
        found = msgspec.json.decode(run(capsys, *files, "--json")[1], type=Analysis)
        return {each.id: each for each in found.findings}["exposed-communication"], found, run(capsys, *files)[1]

    finding, found, text = seen(2)
    assert finding.confidence == "medium" and "includes waiting" not in finding.reason + text and found.unknown == {}
    finding, found, text = seen(3)
    assert finding.confidence == "low" and "(which includes waiting for peers: 2 of 3 ranks were" in finding.reason
    assert found.integrity.ok and found.unknown["stragglers"].startswith("2 of 3 ranks were compared")
    assert re.search(r"^network .*includes waiting for peers", text, re.M) and text.count("2 of 3 ranks were comp") == 1


def test_ranks_without_a_recorded_number_have_the_findings_of_those_with_one(capsys, trace):
    def findings(*ranks):
        files = [
            trace(f"{rank}_{offset}.json", rank=rank, wait=200, collective=300, offset=offset)
            for rank, offset in zip(ranks, (0, 200))
        ]
        found = msgspec.json.decode(run(capsys, *files, "--json")[1], type=Analysis)
        assert [device.rank for device in found.devices] == [0, 1]
        return {each.id: (each.reason, each.bound, each.confidence) for each in found.findings}

    assert findings(None, None) == findings(0, 1)
    assert "Rank 1 arrives 20.0 % of the step late" in findings(None, None)["stragglers"][0]


def test_one_rank_given_twice_is_a_problem_that_blocks_what_compares_ranks(capsys, trace):
    files = [trace(name, rank=0, wait=200, collective=100) for name in ("a.json", "b.json")]
    _, out, _ = run(capsys, *files, "--json")
    found = msgspec.json.decode(out, type=Analysis)
    assert not found.integrity.ok and not found.stragglers and "two files are of rank 0" in found.unknown["stragglers"]
    assert [problem.blocks for problem in found.integrity.problems if problem.id == "not-one-run"] == [["ranks"]]
    _, text, _ = run(capsys, *files)
    assert re.search(r"^problem +two files are of rank 0", text, re.M)


def test_ranks_on_hosts_are_told_from_their_own_spans(capsys, tmp_path):
    files = []
    for rank, late in enumerate((0, 300)):
        events = []
        for t in range(0, 4000, 1000):
            events += [
                event(f"ProfilerStep#{t // 1000}", "user_annotation", t, t + 1000),
                event("aten::mm", "cpu_op", t, t + 200 + late),
                event("gloo:all_reduce", "cpu_op", t + 200 + late, t + 600),
            ]
        files.append(tmp_path / f"rank{rank}.json")
        files[-1].write_text(json.dumps({"traceEvents": events, "distributedInfo": {"rank": rank, "world_size": 2}}))
    _, out, _ = run(capsys, *files, "--json")
    late = {each.rank: each.late_ns for each in msgspec.json.decode(out, type=Analysis).stragglers}
    assert late == {0: 0, 1: 4 * 300_000}


def test_one_step_gives_findings_of_low_confidence_and_none_gives_none(capsys, trace):
    source = trace(steps=1)
    _, out, _ = run(capsys, source, "--json")
    found = msgspec.json.decode(out, type=Analysis).findings
    assert found and {finding.confidence for finding in found} == {"low"}
    source.write_text(source.read_text().replace("ProfilerStep#", "my step "))
    _, out, _ = run(capsys, source, "--json")
    assert not msgspec.json.decode(out, type=Analysis).findings


def test_one_rank_says_that_waiting_is_included(capsys, trace):
    _, out, _ = run(capsys, trace(rank=0, wait=200, collective=100))
    assert "includes waiting for peers" in out


def test_before_and_after(capsys, trace, tmp_path):
    old, new, page = trace("old.json"), trace("new.json", wait=20), tmp_path / "both.html"
    code, out, err = run(capsys, "--against", old, new, "--json", "--html", page)
    assert code == 0
    found = msgspec.json.decode(out, type=Comparison)
    assert (found.old, found.new) == ([str(old)], [str(new)])
    assert found.old_verdict == "input-bound" and [each.id for each in found.findings_gone]
    assert "decides" in err and "input wait, exposed" in err
    assert "input wait, exposed" in page.read_text(encoding="utf-8")


def test_a_finding_is_not_gone_where_the_new_trace_cannot_tell(capsys, trace, tmp_path):
    old, lost, silent = trace("old.json"), trace("lost.json"), trace("silent.json")
    lost.write_text(lost.read_text().replace('"dur": 300', '"dur": "300"'))
    silent.write_text(silent.read_text().replace("enumerate(DataLoader)#", "my own loader "))  # no loader events
    unmarked = tmp_path / "unmarked.json"
    unmarked.write_text(old.read_text().replace("ProfilerStep#", "my step "))
    for new in (lost, silent, unmarked):
        _, out, _ = run(capsys, "--against", old, new, "--json")
        found = msgspec.json.decode(out, type=Comparison)
        assert not found.findings_gone and "input-bound" in {each.id for each in found.not_judged_by_new}, new
        _, out, _ = run(capsys, "--against", new, old, "--json")
        assert "input-bound" in {each.id for each in msgspec.json.decode(out, type=Comparison).not_judged_by_old}, new


@pytest.mark.parametrize("change", ["no shapes", "a replayed graph"])
def test_a_finding_is_not_gone_where_what_it_rests_on_was_not_recorded(capsys, tmp_path, change):
    """The same recording, without the shapes of its operators, or as if its kernels had been replayed from a graph."""
    whole = json.loads(gzip.decompress((Path(__file__).parents[1] / "trace/h200/eager.json.gz").read_bytes()))
    old, new = tmp_path / "old.json", tmp_path / "new.json"
    old.write_text(json.dumps(whole))
    for one in whole["traceEvents"]:
        if change == "no shapes" and one.get("cat") == "cpu_op":
            one["args"] = {name: value for name, value in one["args"].items() if not name.startswith(("Input", "Concrete"))}
        elif change != "no shapes" and one.get("cat") == "kernel":
            one["args"]["graph node id"] = 7
    new.write_text(json.dumps(whole))
    page = tmp_path / "page.html"
    code, out, err = run(capsys, "--against", old, new, "--json", "--html", page)
    told = json.loads(out)
    assert code == 0 and told["findings_gone"] == []
    assert "eager-attention" in [each["id"] for each in told["not_judged_by_new"]]
    why = told["devices"][0]["unknown"]["operators"]
    assert not told["devices"][0]["operators"] and f"Not known: {why}." in page.read_text(encoding="utf-8")
    assert "operators  not known: " in err


@pytest.mark.parametrize("width", ["60", "120"])
def test_a_comparison_fits_the_terminal(capsys, trace, monkeypatch, width):
    monkeypatch.setenv("COLUMNS", width)
    _, out, _ = run(capsys, "--against", trace("old.json"), trace("new.json", wait=20))
    assert max(len(line) for line in out.splitlines()[:-1]) <= int(width)
    assert out.splitlines()[-1].startswith("next       saturate tune ")


def closed(monkeypatch, folder):
    """A folder `closed` that may not be searched, also where the tests run as root."""
    def stat(path, *arguments, **options):
        if Path(path).parent.name == "closed":
            raise PermissionError(13, "Permission denied", str(path))
        return original(path, *arguments, **options)

    original = os.stat
    (folder / "closed").mkdir()
    monkeypatch.setattr(os, "stat", stat)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ([], "needs a trace"),
        (["none.json"], "there is no file none.json"),
        (["t.json", "none.json", "nor.json"], "there is no file none.json, nor 1 more"),
        (["t.json", "--against", "t.json", "t.json"], "--against takes its two traces itself"),
        (["t.json", "u.json", "--trim", "o.json"], "--trim takes one trace"),
        (["t.sqlite", "--trim", "o.json"], "--trim takes a Kineto trace"),
        (["t.json", "--html", "t.json"], "--html would overwrite the trace t.json"),
        (["t.json", "--html", "no/such.html"], "its folder is missing"),
        (["t.json", "--html", "."], "it is a folder"),
        (["t.json", "--html", "pipe"], "it is no regular file"),
        (["t.json", "--html", "to_pipe"], "it is no regular file"),
        (["t.json", "--trim", "pipe"], "it is no regular file"),
        (["t.json", "--html", "x", "--trim", "./x"], "would write to the same file"),
        (["t.json", "--html", "closed/x"], "Permission denied"),
        (["t.json", "--trim", "closed/x"], "Permission denied"),
        (["t.json", "--html", "a" * 300], "name too long"),
        (["t.json", "--steps", "0"], "not a whole number from 1"),
        (["t.json", "--jsn"], "did you mean '--json'?"),
    ],
)
def test_mistakes(capsys, trace, tmp_path, monkeypatch, words, said):
    trace("t.json"), trace("u.json")
    monkeypatch.chdir(tmp_path)
    Path("t.sqlite").write_bytes(b"SQLite format 3\0" + bytes(100))
    os.mkfifo("pipe")
    os.symlink("pipe", "to_pipe")
    closed(monkeypatch, tmp_path)
    code, out, err = run(capsys, *words)
    assert (tmp_path / "pipe").is_fifo() and (tmp_path / "to_pipe").is_symlink()
    assert code == 2 and out == "" and said in err and err.startswith("error[E200]")
    assert json.loads((tmp_path / "t.json").read_text())["traceEvents"]


@pytest.mark.parametrize(
    "content", [b"", b"<!doctype html><p>not found", b"[1, 2", b"SQLite format 3\0" + bytes(100)]
)
def test_what_is_no_trace_is_named(capsys, tmp_path, content):
    path = tmp_path / "bad.json"
    path.write_bytes(content)
    code, out, err = run(capsys, path, "--json")
    assert code == 2 and out == "" and err.startswith("error[E230]") and "bad.json" in err


def test_a_million_ranks_are_refused_at_once(capsys):
    code, _, err = run(capsys, "--json", *(f"rank{i}.json.gz" for i in range(1_000_001)))
    assert code == 2 and "1,000,001 traces at once: at most 4,096 are read" in err
    code, _, err = run(capsys, "a", "--json", *(f"rank{i}" for i in range(100_000)))
    assert code == 2 and "unexpected argument 'rank0'" in err


def test_one_bad_file_of_several_is_left_out_and_said(capsys, trace, tmp_path):
    bad = tmp_path / "bad.json"
    bad.write_text("<html>")
    code, out, _ = run(capsys, trace("good.json"), bad, "--json")
    found = msgspec.json.decode(out, type=Analysis)
    assert code == 0 and len(found.devices) == 1 and not found.integrity.ok
    assert found.integrity.problems[0].id == "unreadable" and "bad.json" in found.integrity.problems[0].message
    other = tmp_path / "other.json"
    other.write_text("")
    code, _, err = run(capsys, bad, other)
    assert code == 2 and "bad.json" in err  # the first of them, as none could be read


def test_the_same_problem_of_many_files_is_told_once(capsys, tmp_path):
    files = []
    for name in ("a", "b", "c"):
        files.append(tmp_path / f"{name}.json")
        files[-1].write_text(json.dumps({"traceEvents": [event("aten::mm", "cpu_op", 0, 5)]}))
    _, out, _ = run(capsys, *files, "--json")
    messages = [each["message"] for each in json.loads(out)["integrity"]["problems"] if each["id"] == "no-steps"]
    assert len(messages) == 1 and messages[0].startswith(f"{files[0]} and 2 others: ")
    _, out, _ = run(capsys, files[0], "--json")
    assert all(str(files[0]) not in each["message"] for each in json.loads(out)["integrity"]["problems"])


@pytest.mark.parametrize("broken", ['"300"', "NaN", "1e400"])
def test_a_trace_whose_kernels_were_lost_has_no_verdict(capsys, trace, broken):
    """It looks like one of a CPU that waits; nothing of it says that no device was at work."""
    path = trace(wait=200)
    path.write_text(path.read_text().replace('"dur": 300', f'"dur": {broken}'))
    _, out, _ = run(capsys, path, "--json")
    found = msgspec.json.decode(out, type=Analysis)
    (device,) = found.devices
    assert (found.verdict, device.verdict, device.kernels, found.findings) == ("unknown", "unknown", None, [])
    assert "could not be read" in device.unknown["verdict"] and not found.integrity.ok
    _, text, _ = run(capsys, path)
    assert text.startswith("No verdict: ") and "no accelerator" not in text and "CPU" not in text


def test_a_verdict_and_a_reason_for_none_exclude_each_other():
    device = Device(id=-1, name="cpu", unknown={"verdict": "cannot be told apart", "gaps": "none"})
    assert _analysis.judged(device, "unknown").unknown["verdict"]
    assert _analysis.judged(device, "host-bound").unknown == {"gaps": "none"}


def test_a_file_named_twice_is_read_once(capsys, trace):
    path = trace()
    _, out, err = run(capsys, path, path, "--json")
    assert len(json.loads(out)["devices"]) == 1 and "1 of the 2 traces were named before, and are read once" in err


def test_many_files_keep_little_of_each(capsys, trace, monkeypatch):
    monkeypatch.setattr(_analysis, "MANY", 1)
    monkeypatch.setattr(_analysis, "OPERATORS", 0)
    files = [trace(f"rank{rank}.json", rank=rank) for rank in range(2)]
    _, out, _ = run(capsys, *files, "--json")
    for device in json.loads(out)["devices"]:
        assert device["each_step"] == [] and device["roofline"]["operators"] == []
        assert "more than 1 traces at once" in device["unknown"]["each_step"]
        assert "1 of less recoverable time left out" in device["unknown"]["roofline.operators"]


def test_no_conclusion_is_an_answer(capsys, tmp_path):
    path = tmp_path / "t.json"
    path.write_text(json.dumps({"traceEvents": [event("aten::mm", "cpu_op", 0, 5)]}))
    code, out, _ = run(capsys, path)
    assert code == 0 and "no accelerator events" in out


def test_numpy_is_named_when_it_is_missing(tmp_path):
    path = tmp_path / "t.json"
    path.write_text("{}")
    program = (
        "import sys; sys.modules['numpy'] = None\n"
        "from saturate.cli.main import main\nsys.exit(main(['analyze', sys.argv[1]]))"
    )
    done = subprocess.run([sys.executable, "-c", program, str(path)], capture_output=True, text=True)
    assert done.returncode == 3
    assert "error[E300]" in done.stderr and "help: pip install 'saturate[trace]'" in done.stderr


def test_another_missing_module_is_not_called_numpy(capsys, trace, monkeypatch):
    """It is a bug of our own, and shown as one."""
    path = trace()
    monkeypatch.delitem(sys.modules, "saturate.cli._analysis")
    monkeypatch.setitem(sys.modules, "saturate.trace.ranks", None)
    monkeypatch.delattr("saturate.trace.ranks", raising=False)
    monkeypatch.delattr("saturate.cli._analysis")
    assert main.main(["analyze", str(path)]) == 3
    shown = capsys.readouterr().err
    assert "Traceback" in shown and "saturate.trace.ranks" in shown and "numpy" not in shown


def test_a_closed_pipe_and_an_ascii_terminal(trace):
    path = trace(kernel="g\u00e9mm")
    done = subprocess.run(
        [sys.executable, "-m", "saturate", "analyze", str(path)],
        capture_output=True,
        env={**os.environ, "PYTHONIOENCODING": "ascii", "XDG_CACHE_HOME": str(path.parent)},
    )
    assert done.returncode == 0 and done.stdout.isascii() and re.search(rb"\nnext       \S+ -m saturate tune ", done.stdout)
    reader, writer = os.pipe()
    os.close(reader)
    try:
        done = subprocess.run(
            [sys.executable, "-m", "saturate", "analyze", str(path), "--json"],
            stdout=writer,
            stderr=subprocess.PIPE,
            text=True,
        )
    finally:
        os.close(writer)
    assert done.returncode == 141 and "Traceback" not in done.stderr


def test_nobody_reads_what_is_said_beside_json(trace, tmp_path):
    """`saturate analyze --json TRACE --html PAGE 2>&1 >found.json | head -1`: 141, and no page."""
    path, page = trace(), tmp_path / "page.html"
    reader, writer = os.pipe()
    os.close(reader)
    done = subprocess.run(
        [sys.executable, "-m", "saturate", "analyze", str(path), str(path), "--json", "--html", str(page)],
        stdout=subprocess.PIPE,
        stderr=writer,
    )
    os.close(writer)
    assert done.returncode == 0 and page.exists() and json.loads(done.stdout)["verdict"] == "input-bound"


def test_a_file_name_that_is_no_text_does_not_break_json(capsys, trace, tmp_path):
    path = tmp_path / os.fsdecode(b"tr\xff\x1b[31m.json")
    trace("t.json").rename(path)
    code, out, err = run(capsys, path, "--json")
    assert code == 0 and json.loads(out)["devices"][0]["kernels"] == 4
    assert "\x1b" not in err
    code, out, _ = run(capsys, path)
    assert code == 0 and "\x1b" not in out


class Terminal(io.StringIO):
    def isatty(self):
        return True


def test_progress_is_one_line_that_goes_away(tmp_path, monkeypatch):
    clock = iter(range(100))
    monkeypatch.setattr(_analysis.time, "monotonic", lambda: next(clock))
    stream = Terminal()
    progress = _analysis.Progress(stream)
    show = progress.of(tmp_path / "big\x1b[2J.json", 3, 8)
    show(0.25)
    show(0.5)
    progress.clear()
    text = stream.getvalue()
    assert text.startswith("\rreading big\ufffd[2J.json (3 of 8)  25%\rreading ") and " 50%" in text
    assert text.endswith("\r") and "\x1b" not in text and "\n" not in text


def test_progress_of_quick_files_is_silent_and_logs_get_few_lines(tmp_path, monkeypatch):
    now = [0.0]
    monkeypatch.setattr(_analysis.time, "monotonic", lambda: now[0])
    stream = io.StringIO()
    show = _analysis.Progress(stream).of(tmp_path / "t.json", 1, 1)
    for second in range(25):
        now[0] = second / 1.0
        show(second / 25)
    assert stream.getvalue() == "reading t.json  40%\nreading t.json  80%\n"


def finding(id, bound, techniques=()):
    return Finding(
        id=id,
        title=id,
        reason="because.",
        evidence=[Evidence(metric="m", value=1.0)],
        bound=bound,
        confidence="high",
        techniques=list(techniques),
    )


def test_findings_of_several_devices_are_merged():
    one, two = Device(id=0, name="", rank=0), Device(id=0, name="", rank=1)
    found = _analysis.merged(
        [(one, [finding("a", 1.2), finding("c", None)]), (two, [finding("b", 1.3), finding("a", 1.5)])]
    )
    assert [(each.id, each.bound) for each in found] == [("a", 1.5), ("b", 1.3), ("c", None)]
    assert found[0].reason == "because. (Numbers of rank 1, device 0; 2 of 2 devices show it.)"
    alone = _analysis.merged([(one, [finding("a", 1.2)])])
    assert alone[0].reason == "because."
    assert [
        each.id for each in _analysis.merged([(one, [finding("nothing-to-gain", None)]), (two, [finding("b", 1.3)])])
    ] == ["b"]
    unknown = _analysis.merged([(one, [finding("a", 1.2), finding("b", 1.05), finding("c", None)])])
    assert [each.id for each in unknown] == ["a", "c", "b"], "what is worth next to nothing comes last, as the page says"
    both = [(one, [finding("nothing-to-gain", None)]), (two, [finding("nothing-to-gain", None)])]
    assert [each.id for each in _analysis.merged(both)] == ["nothing-to-gain"]


def test_the_verdict_is_that_of_most_time():
    def device(verdict, step_ns):
        return Device(id=0, name="", step_ns=step_ns, verdict=verdict)

    several = [device("host-bound", 5), device("input-bound", 3), device("input-bound", 4)]
    assert overall(several) == "input-bound"
    assert overall(several[:2]) == "host-bound"
    assert overall([]) == "unknown"


def test_a_device_that_hardly_worked_beside_another_says_nothing_of_the_program(capsys, tmp_path):
    """A stray copy on another GPU: that one idled for 99.9 % of the steps, and waited for nothing."""
    whole = json.loads(gzip.decompress((Path(__file__).parents[1] / "trace/h200/fp32.json.gz").read_bytes()))
    copies = [one for one in whole["traceEvents"] if one.get("cat") in ("gpu_memset", "gpu_memcpy", "kernel")]
    stray = json.loads(json.dumps(min(copies, key=lambda one: one["dur"])))
    used = stray["args"]["device"]
    for one in copies:
        one["args"]["device"] = used + 1      # the stray one comes first
    whole["traceEvents"].append(stray)
    whole["deviceProperties"] = [{**whole["deviceProperties"][0], "id": device} for device in (used, used + 1)]
    path = tmp_path / "two.json"
    path.write_text(json.dumps(whole))
    code, out, err = run(capsys, path, "--json")
    found = msgspec.json.decode(out, type=Analysis)
    assert code == 0 and [device.id for device in found.devices] == [used, used + 1]
    assert found.verdict == found.devices[1].verdict == "compute-bound" and found.devices[0].verdict != "compute-bound"
    assert {one.id: one.bound for one in found.findings}["fp32-matmul"] < 20
    assert not {"launch-bound", "slow-host-code", "device-waits"} & {one.id for one in found.findings}
    assert f"device {used + 1}" in err.splitlines()[1]


def test_peers_complete_what_one_rank_observed():
    stragglers = [
        Straggler(rank=0, wait_ns=30_000_000, transfer_ns=10_000_000, late_ns=0, collectives=4),
        Straggler(rank=1, wait_ns=0, transfer_ns=10_000_000, late_ns=30_000_000, collectives=4),
    ]
    device = Device(id=0, name="", rank=0, steps=10)
    seen = _analysis.with_peers(Observations(), device, stragglers).communication
    assert (seen.peer_wait, seen.slowest_rank, seen.late_ms_per_step) == (0.75, 1, 3.0)
    assert seen.late_rank_waits_ms_per_step == 0.0
    assert _analysis.with_peers(Observations(), Device(id=0, name="", rank=7), stragglers) == Observations()


def test_a_rank_that_cannot_be_seen_does_not_end_the_set(capsys, trace, tmp_path, monkeypatch):
    whole = trace(rank=0)
    closed(monkeypatch, tmp_path)
    code, out, err = run(capsys, whole, tmp_path / "closed" / "t.json", tmp_path / ("a" * 300))
    assert code == 0 and out.count("left out: ") == 2 and "Traceback" not in err
    code, _, err = run(capsys, tmp_path / "closed" / "t.json")
    assert code == 2 and "error[E230]" in err and "cause: Permission denied" in err


@pytest.mark.parametrize("digits", [20, 5000])
def test_a_step_number_that_is_none_does_not_end_the_set(capsys, tmp_path, digits):
    files = [tmp_path / "good.json", tmp_path / "odd.json"]
    for rank, path in enumerate(files):
        text = json.dumps(kineto(rank=rank, collective=100))
        path.write_text(text.replace("ProfilerStep#1", "ProfilerStep#" + "9" * digits) if rank else text)
    assert run(capsys, *files)[0] == 0


def test_the_first_error_is_raised_when_no_file_can_be_read(tmp_path):
    files = [tmp_path / name for name in ("first.json", "second.json")]
    for path in files:
        path.write_text("")
    with pytest.raises(TraceError, match="first.json"):
        _analysis.analysis_of(files, _analysis.Progress(io.StringIO()))


SHARED = Path(__file__).resolve().parents[3] / "shared" / "traces"
real = pytest.mark.skipif(not SHARED.is_dir(), reason="the shared traces are not on this machine")


@real
def test_the_readme_shows_what_is_printed(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "120")
    readme = (Path(__file__).resolve().parents[2] / "README.md").read_text(encoding="utf-8")
    _, out, _ = run(capsys, SHARED / "resnet50_v100_workers0.json.gz")
    shown = re.findall(r"^    ((?:Input-bound|device |busy |input |gaps ).*)$", readme, re.M)
    assert len(shown) == 5 and set(shown) <= set(out.splitlines())


@real
@pytest.mark.parametrize("name", sorted(path.name for path in SHARED.glob("*.json.gz")))
def test_real_traces_give_text_json_and_a_page(capsys, tmp_path, name):
    page = tmp_path / "page.html"
    code, out, err = run(capsys, SHARED / name, "--json", "--html", page)
    found = msgspec.json.decode(out, type=Analysis)
    assert code == 0 and err and page.stat().st_size < MAX_BYTES
    for device in found.devices:
        parts = (device.compute_ns, device.exposed_communication_ns, device.exposed_copy_ns, device.idle_ns)
        if None not in parts:
            assert sum(parts) == (device.step_ns if device.step_ns is not None else device.span_ns)
        for step in device.each_step:
            assert min(step.compute_ns, step.exposed_communication_ns, step.exposed_copy_ns, step.idle_ns) >= 0
