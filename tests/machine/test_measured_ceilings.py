"""Measured ceilings: measured in another process, kept whole or not at all, and never waited for without end."""

from __future__ import annotations

import json
import os
import pwd
import shlex
import subprocess
import sys
import textwrap
import time
from pathlib import Path
from types import SimpleNamespace

import msgspec
import pytest
from waiting import until

from saturate.errors import EnvironmentProblem
from saturate.machine import ceilings
from saturate.records.ceilings import BUSY, Ceilings
from saturate.techniques import dataset_cache
from saturate.trial import planning, tree

RECORD = Ceilings(
    device="cpu", device_name="Toy 9000", torch="2.9", threads=2, measured_at="2026-01-01T00:00:00+00:00",
    rates={"float32": 1e11}, bandwidth={"copy": [(1000, 4e9), (10_000, 1e9)], "read": [(500, 8e9), (5000, 2e9)]})
ANSWER = {"device": "cpu", "device_name": "", "torch": "2.9", "threads": 1, "rates": {"float32": 1e11},
          "bandwidth": {"copy": [[1000, 1e9]]}, "host_to_device": {}, "launch_ns": 900.0, "unknown": {}}


@pytest.fixture
def python(tmp_path):
    """A Python that runs these lines instead of the survey; `arguments` are what it was called with."""

    def write(body: str) -> str:
        path = tmp_path / "python"
        lines = f"#!{sys.executable}\nimport json, os, sys, time\narguments = sys.argv[1:]\n"
        path.write_text(lines + textwrap.dedent(body), encoding="utf-8")
        path.chmod(0o755)
        return str(path)

    return write


def answering(answer=ANSWER) -> str:
    return f"print('noise'); print({ceilings._MARK + json.dumps(answer)!r}); print('more noise')"


def test_the_survey_itself(monkeypatch):
    """For real, on this CPU, with small arrays and little time."""
    torch = pytest.importorskip("torch")
    from saturate.agent import ceilings as survey

    monkeypatch.setattr(survey, "_SURVEY_SECONDS", 0.01)
    monkeypatch.setattr(survey, "_MOST_SIZE", {"cpu": 256})
    state, threads = torch.get_rng_state(), torch.get_num_threads()
    found = survey.survey(torch, "cpu", most_bytes=1 << 20)
    assert torch.equal(state, torch.get_rng_state()) and torch.get_num_threads() == threads
    record = msgspec.convert(found | {"device_name": "this"}, Ceilings)
    assert set(record.rates) | set(record.unknown) >= {"float32", "bfloat16", "float16"}
    assert record.rates["float32"] > 1e8 and record.threads == threads
    assert {name: [size for size, _ in series] for name, series in record.bandwidth.items()} == {
        name: [arrays << 17, arrays << 20] for name, arrays in (("read", 1), ("write", 1), ("copy", 2), ("triad", 3))}
    assert all(rate > 1e8 for series in record.bandwidth.values() for _, rate in series)
    assert 50 < record.launch_ns < 1e6 and not record.host_to_device
    assert "bandwidth of 8 MiB" in record.unknown


class PretendCuda:
    """torch as a program on a GPU sees it, with the CPU in the GPU's place: the same calls in the same order."""

    def __init__(self, torch, capability, hip=None):
        self._torch = torch
        self.version = SimpleNamespace(hip=hip)
        self.waits = 0
        self.cuda = SimpleNamespace(get_device_capability=lambda: capability, synchronize=self._wait,
                                    get_device_name=lambda: "Pretended 9000")

    def _wait(self):
        self.waits += 1

    def __getattr__(self, name):
        function = getattr(self._torch, name)
        if name not in ("ones", "empty", "randn", "randint", "Generator"):
            return function

        def on_the_cpu(*sizes, **options):
            return function(*sizes, **options | ({"device": "cpu"} if "device" in options else {}))

        return on_the_cpu


@pytest.mark.parametrize(("capability", "hip"), [((7, 0), None), ((9, 0), None), ((9, 4), "7.0")])
def test_the_survey_of_a_gpu_asks_for_what_only_gpus_have(monkeypatch, capability, hip):
    torch = pytest.importorskip("torch")
    from saturate.agent import ceilings as survey

    monkeypatch.setattr(survey, "_SURVEY_SECONDS", 0.001)
    monkeypatch.setattr(survey, "_LEAST_SIZE", {"cuda": 32})
    monkeypatch.setattr(survey, "_MOST_SIZE", {"cuda": 32})
    monkeypatch.setattr(survey, "_LAUNCHES", 10)
    monkeypatch.setattr(survey, "_HOST_BYTES", 1 << 16)
    before = torch.backends.cuda.matmul.allow_tf32
    pretended = PretendCuda(torch, capability, hip)
    found = survey.survey(pretended, "cuda", most_bytes=1 << 22)
    assert torch.backends.cuda.matmul.allow_tf32 == before and pretended.waits > 10
    record = msgspec.convert(found, Ceilings)
    assert (record.device, record.device_name, record.threads) == ("cuda", "Pretended 9000", None)
    assert ("tfloat32" in record.rates) == (capability >= (8, 0) and not hip) and "float32" in record.rates
    assert set(record.rates) | set(record.unknown) >= {"float8", "int8", "bfloat16", "tfloat32"}
    assert "pageable" in record.host_to_device
    assert "pinned" in record.host_to_device or "host to device, pinned" in record.unknown


@pytest.mark.slow
def test_measured_in_a_process_of_its_own_and_kept(tmp_path):
    began = time.monotonic()
    record = ceilings.measure(sys.executable, "cpu", threads=1, where=tmp_path)
    assert time.monotonic() - began < 60
    assert record.threads == 1 and record.device_name == ceilings.cpu_name() and record.memory_rate() > 1e8
    assert ceilings.kept(where=tmp_path).records == [record]


def test_what_the_process_says_becomes_a_record(python, tmp_path):
    seen = "json.dumps([arguments, os.environ.get('SATURATE_PLAN')])"
    asked = python(f"open({str(tmp_path / 'seen')!r}, 'w').write({seen})\n" + answering())
    os.environ["SATURATE_PLAN"] = "a plan"
    try:
        record = ceilings.measure(asked, "cpu", threads=3, where=tmp_path / "kept")
    finally:
        del os.environ["SATURATE_PLAN"]
    arguments, plan = json.loads((tmp_path / "seen").read_text())
    assert arguments[0].endswith("ceilings.py") and arguments[1:3] == ["cpu", "3"] and int(arguments[3]) > 0
    assert plan is None, "a survey is no workload: the agent must not wake up in it"
    assert record.rates == {"float32": 1e11} and record.device_name == ceilings.cpu_name() and record.measured_at
    assert ceilings.kept(where=tmp_path / "kept").records == [record]


def test_a_kept_record_is_not_measured_again(python, tmp_path):
    asked = python(f"open({str(tmp_path / 'count')!r}, 'a').write('x')\n" + answering())
    said: list[str] = []
    first = ceilings.obtain(asked, "cpu", torch="2.9", threads=1, where=tmp_path / "kept", say=said.append)
    again = ceilings.obtain(asked, "cpu", torch="2.9", threads=1, where=tmp_path / "kept", say=said.append)
    assert len(said) == 1 and "measuring" in said[0]
    assert again == first and (tmp_path / "count").read_text() == "x"
    ceilings.obtain(asked, "cpu", torch="3.0", threads=1, where=tmp_path / "kept")
    ceilings.obtain(asked, "cpu", torch="2.9", threads=8, where=tmp_path / "kept")
    assert (tmp_path / "count").read_text() == "xxx", "another torch, or other threads, are another record"


def test_what_a_busy_machine_reached_is_measured_again(python, tmp_path):
    """...and the less busy of both is kept and used; one from before this was counted is believed."""
    counts = str(tmp_path / "counts")
    shares = [0.5, 0.7, 0.02]
    asked = python(f"open({counts!r}, 'a').write('x')\nshare = {shares}[os.path.getsize({counts!r}) - 1]\n"
                   f"print({ceilings._MARK!r} + json.dumps({{**json.loads({json.dumps(ANSWER)!r}), 'queued_share': share}}))")
    said: list[str] = []
    found = [ceilings.obtain(asked, "cpu", torch="2.9", threads=1, where=tmp_path / "kept", say=said.append).queued_share for _ in range(4)]
    assert found == [0.5, 0.5, 0.02, 0.02] and len(said) == 3 and "again" not in said[0] and "again" in said[1]
    (kept,) = ceilings.kept(where=tmp_path / "kept").records
    assert kept.queued_share == 0.02 and not RECORD.busy


def test_a_survey_knows_when_others_have_the_cores(tmp_path):
    from saturate.agent import ceilings as survey

    code = f"import sys, time; sys.path.insert(0, {str(Path(survey.__file__).parent)!r}); import ceilings\nwhile time.process_time() < 0.3: pass\nprint(ceilings.queued_share())"
    one = sorted(os.sched_getaffinity(0))[0]
    busy = [subprocess.Popen(["taskset", "-c", str(one), sys.executable, "-c", code], stdout=subprocess.PIPE, text=True) for _ in range(3)]
    shares = [process.communicate(timeout=60)[0].strip() for process in busy]
    if survey.queued_share() is None:
        pytest.skip("this kernel does not count how long threads wait for a core")
    assert max(map(float, shares)) > BUSY, "three on one core"


def of_gpu(name: str) -> str:
    return answering({**ANSWER, "device": "cuda", "device_name": name, "threads": None})


def test_the_device_that_is_trained_on_is_measured_in_the_workload_s_environment(python, tmp_path):
    seen = "json.dumps([arguments, os.environ.get('CUDA_VISIBLE_DEVICES'), os.environ.get('SATURATE_PLAN')])"
    asked = python(f"open({str(tmp_path / 'seen')!r}, 'w').write({seen})\n" + of_gpu("Card B"))
    environment = {"PATH": os.environ["PATH"], "CUDA_VISIBLE_DEVICES": "2,3", "SATURATE_PLAN": "a plan"}
    ceilings.obtain(asked, "cuda", device_name="Card B", torch="2.9", environment=environment, index=1, where=tmp_path / "kept")
    arguments, visible, plan = json.loads((tmp_path / "seen").read_text())
    assert (arguments[1], arguments[4:], visible, plan) == ("cuda", ["1", "Card B"], "2,3", None)


def test_the_ceilings_of_another_device_are_refused_by_name(python, tmp_path):
    with pytest.raises(EnvironmentProblem, match="the ceilings of Card B could not be measured") as caught:
        ceilings.obtain(python(of_gpu("Card A")), "cuda", device_name="Card B", torch="2.9", where=tmp_path / "kept")
    assert caught.value.cause == "Card A was found in its place"
    assert [record.device_name for record in ceilings.kept(where=tmp_path / "kept").records] == ["Card A"]


@pytest.mark.parametrize(("body", "says"), [
    ("print('nothing')", "ended with 0"), ("raise ImportError('No module named torch')", "No module named torch"),
    ("os.kill(os.getpid(), 9)", "ended with -9"), (f"print('{ceilings._MARK}{{')", "no JSON"),
    (f"print('{ceilings._MARK}[1]')", "no record"), (answering({**ANSWER, "rates": {}}), "no rates"),
    (answering({**ANSWER, "rates": {"float32": -1.0}}), "positive"), (answering({"device": "cpu"}), "required"),
])
def test_no_answer_is_an_error_with_its_cause(python, tmp_path, body, says):
    with pytest.raises(EnvironmentProblem) as caught:
        ceilings.measure(python(body), "cpu", where=tmp_path / "kept")
    assert says in f"{caught.value.cause} {caught.value.evidence}"
    assert not (tmp_path / "kept").exists()


def test_other_kinds_of_devices_are_refused_by_name(tmp_path):
    with pytest.raises(EnvironmentProblem, match="'mps' cannot be measured"):
        ceilings.measure(sys.executable, "mps", where=tmp_path)


def test_no_such_python(tmp_path):
    with pytest.raises(EnvironmentProblem):
        ceilings.measure(str(tmp_path / "absent"), "cpu", where=tmp_path)


def test_one_that_hangs_is_killed_with_what_it_started(tmp_path):
    asked = tmp_path / "python"         # a shell, which has begun long before the time is over
    asked.write_text(f"#!/bin/sh\nsleep 600 &\necho $$ $! > {shlex.quote(str(tmp_path / 'pids'))}\nwait\n", encoding="utf-8")
    asked.chmod(0o755)
    began = time.monotonic()
    with pytest.raises(EnvironmentProblem, match="could not be measured") as caught:
        ceilings.measure(str(asked), "cpu", timeout_s=2.0, where=tmp_path / "kept")
    assert time.monotonic() - began < 120 and "within 2 s" in caught.value.cause
    pids = (tmp_path / "pids").read_text().split()
    assert len(pids) == 2
    until(lambda: all(tree.state(int(pid)) in ("", "Z", "X") for pid in pids))


@pytest.mark.parametrize("text", [
    b"", b"{", b"\xff\xfe", b"[]", msgspec.json.encode(RECORD)[:-20],
    msgspec.json.encode(msgspec.structs.replace(RECORD, schema=99)),
    msgspec.json.encode(RECORD).replace(b"1000", b"[[[[1]]]]"),
    msgspec.json.encode(RECORD).replace(b"100000000000.0", b"-5.0"), b"[" * 100_000,
    b'{"x":' + b"[" * 200_000 + b"]" * 200_000 + b"}",
])
def test_a_damaged_file_is_passed_over_with_a_note(tmp_path, text):
    ceilings._keep(RECORD, tmp_path)
    (tmp_path / "damaged.json").write_bytes(text)
    found = ceilings.kept(where=tmp_path)
    assert found.records == [RECORD]
    assert len(found.notes) == 1 and found.notes[0].startswith("damaged.json cannot be read")


def test_kept_records_are_found_by_what_is_given_the_newest_first(tmp_path):
    newer = msgspec.structs.replace(RECORD, torch="3.0", measured_at="2026-02-01T00:00:00+00:00")
    gpu = msgspec.structs.replace(RECORD, device="cuda", device_name="NVIDIA H200", threads=None, driver="570.1")
    for record in (RECORD, newer, gpu):
        ceilings._keep(record, tmp_path)
    assert ceilings.kept("Toy 9000", where=tmp_path).records == [newer, RECORD]
    assert ceilings.kept(device="cuda", where=tmp_path).records == [gpu]
    assert ceilings.kept("Toy 9000", torch="2.9", threads=2, where=tmp_path).records == [RECORD]
    assert ceilings.kept(driver="580", where=tmp_path).records == []
    ceilings._keep(msgspec.structs.replace(RECORD, launch_ns=5.0), tmp_path)
    assert len(ceilings.kept(where=tmp_path).records) == 3, "the same device again replaces the old record"
    assert not [path for path in tmp_path.iterdir() if path.name.startswith(".")], "nothing half-written is left"


def test_no_cache_is_no_error(tmp_path, monkeypatch):
    assert ceilings.kept(where=tmp_path / "absent") == ceilings.Kept([], [])
    (tmp_path / "file").write_text("")
    ceilings._keep(RECORD, tmp_path / "file" / "folder")
    monkeypatch.setattr(os, "replace", lambda *_: (_ for _ in ()).throw(OSError(28, "No space left on device")))
    ceilings._keep(RECORD, tmp_path / "full")
    assert list((tmp_path / "full").iterdir()) == []


def test_where_it_is_kept(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert ceilings.folder() == tmp_path / "saturate" / "ceilings"
    monkeypatch.setenv("XDG_CACHE_HOME", "relative")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert ceilings.folder() == tmp_path / ".cache" / "saturate" / "ceilings"


def test_a_user_without_a_home_keeps_none(monkeypatch):
    """As in containers that run with any user id: `doctor` and `profile` ended with a RuntimeError."""
    monkeypatch.delenv("HOME", raising=False)
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setattr(pwd, "getpwuid", lambda uid: {}[uid])
    assert ceilings.folder() is None and ceilings.kept() == ceilings.Kept([], [])
    assert dataset_cache._folder() is None
    assert not any("~" in cache for cache in planning._caches({}, Path("/study")))


def test_the_drivers_version(tmp_path):
    assert ceilings.driver("cpu", tmp_path) == ceilings.driver("cuda", tmp_path) == ""
    path = tmp_path / "proc/driver/nvidia/version"
    path.parent.mkdir(parents=True)
    path.write_text("NVRM version: NVIDIA UNIX x86_64 Kernel Module  570.86.15  Wed Jan  1 00:00:00 UTC 2025\n")
    assert ceilings.driver("cuda", tmp_path) == "570.86.15"


def test_the_roof_of_memory_never_rises_with_size():
    rates = [RECORD.memory_rate(size) for size in (1, 500, 501, 1000, 1001, 5000, 5001, 10_000, 10**9)]
    assert rates == [8e9, 8e9, 4e9, 4e9, 2e9, 2e9, 2e9, 2e9, 2e9] and RECORD.memory_rate() == 2e9
    assert msgspec.structs.replace(RECORD, bandwidth={"copy": []}).memory_rate() is None
