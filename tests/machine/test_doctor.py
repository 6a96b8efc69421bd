"""The doctor: each probe alone, each problem with its fix, nothing personal in a paste."""

from __future__ import annotations

import getpass
import os
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from saturate.machine import doctor, facts
from saturate.machine.doctor import Check


def fake_python(folder: Path, body: str) -> str:
    path = folder / "python"
    path.write_text(f"#!/bin/sh\n{body}\n")
    path.chmod(0o755)
    return str(path)


def by_name(checks):
    return {check.name: check for check in checks}


def test_every_check_answers_even_when_all_break(tmp_path, monkeypatch):
    def broken(*_, **__):
        raise RuntimeError("broken")

    for name in ("cpu_count", "memory_bytes", "free_bytes", "compiler", "allocators", "observe"):
        monkeypatch.setattr(facts, name, broken)
    checks = doctor.examine(fake_python(tmp_path, "exit 3"), tmp_path, extra=[("isolation", broken)])
    assert {check.status for check in checks} <= set(doctor.STATUSES)
    found = by_name(checks)
    assert found["isolation"] == Check("isolation", "unknown", "this check itself failed: RuntimeError: broken")
    assert found["python"].status == "problem" and "--python" in found["python"].fix
    assert found["folder"].status == "ok"


@pytest.mark.parametrize(("body", "name", "status", "words"), [
    ('echo \'{"version": "3.9.2", "executable": "/p"}\'', "python", "problem", "3.11 or later"),
    ('[ "$3" = torch ] && { echo "ModuleNotFoundError: No module named \'torch\'" >&2; exit 1; }\n'
     'echo \'{"version": "3.12.0", "executable": "/p"}\'', "torch", "problem", "pip install torch"),
    ('[ "$3" = torch ] && { echo "ImportError: libcudart.so.12: cannot open" >&2; exit 1; }\n'
     'echo \'{"version": "3.12.0", "executable": "/p"}\'', "torch", "problem", "--force-reinstall"),
    ('[ "$3" = torch ] && kill -9 $$\necho \'{"version": "3.12.0", "executable": "/p"}\'', "torch", "problem", "exit code -9"),
    ("echo hello", "python", "problem", "is it a Python?"),
])
def test_problems_of_the_workloads_python(tmp_path, body, name, status, words):
    check = by_name(doctor.examine(fake_python(tmp_path, body), tmp_path))[name]
    assert check.status == status
    assert words in check.found + check.fix


def test_a_python_that_is_not_there(tmp_path):
    found = by_name(doctor.examine(str(tmp_path / "absent"), tmp_path))
    assert "No such file" in found["python"].found and found["torch"].status == "unknown"


GPU = SimpleNamespace(names=["H200 139.8 GiB"], driver="550.1", cuda=(12, 4), error="")
NO_GPU = SimpleNamespace(names=[], driver="", cuda=None, error="no NVIDIA driver")


@pytest.mark.parametrize(("gpu", "asked", "status", "words"), [
    (GPU, {"torch": "2", "cuda_build": "12.8", "cuda_available": True}, "ok", "CUDA up to 12.4"),
    (GPU, {"torch": "2", "cuda_build": "13.0", "cuda_available": False}, "problem", "built for CUDA 12"),
    (GPU, {"torch": "2", "cuda_build": "12.1", "cuda_available": False, "cuda_error": "no device"}, "problem", "no device"),
    (GPU, {"torch": "2", "cuda_build": None, "cuda_available": False, "rocm_build": None}, "note", "CPU build"),
    (GPU, {}, "ok", "H200"),
    (NO_GPU, {"torch": "2", "cuda_build": "12.8", "cuda_available": False}, "note", "--gpus all"),
    (NO_GPU, {"torch": "2", "cuda_build": None}, "ok", "none"),
])
def test_gpu_against_torch(gpu, asked, status, words):
    check = doctor._gpu(gpu, asked)
    assert check.status == status and words in check.found + check.fix
    assert bool(check.fix) == (status != "ok")


def test_shared_memory_compiler_and_quota_name_their_fix(monkeypatch):
    monkeypatch.setattr(facts, "free_bytes", lambda _: 64 << 20)
    assert "--shm-size" in doctor._shared_memory().fix
    assert doctor._disk(Path()).status == "problem"
    monkeypatch.setattr(facts, "free_bytes", lambda _: None)
    assert doctor._shared_memory().status == "note" and doctor._disk(Path()).status == "unknown"
    monkeypatch.setattr(facts, "compiler", lambda *_: None)
    monkeypatch.setattr(doctor.shutil, "which", lambda name, **_: f"/bin/{name}" if name in ("clang++", "dnf") else None)
    assert doctor._compiler("python").fix == "export CXX=/bin/clang++"
    monkeypatch.setattr(doctor.shutil, "which", lambda name, **_: f"/bin/{name}" if name == "dnf" else None)
    assert doctor._compiler("python").fix.endswith("dnf install -y gcc-c++")
    monkeypatch.setattr(facts, "cpu_count", lambda: 0.5)
    assert doctor._cpu().status == "note" and "0.5" in doctor._cpu().found


def test_a_folder_that_cannot_be_written(tmp_path):
    absent = doctor._folder(tmp_path / "absent")
    assert absent.status == "problem" and "--dir" in absent.fix
    assert doctor._folder(tmp_path).status == "ok"
    assert list(tmp_path.iterdir()) == [], "the doctor leaves nothing behind"


def test_redaction(monkeypatch):
    monkeypatch.setattr(getpass, "getuser", lambda: "ann")
    monkeypatch.setenv("HOME", "/data/people/ann")
    monkeypatch.setattr(os, "uname", lambda: SimpleNamespace(nodename="gpu7.example.org"))
    text = "/data/people/ann/x /home/bob/y /scratch/ann/z ann@gpu7 gpu7.example.org annotation joann /data/people/anna gpu77"
    assert doctor.redact(text) == "~/x /home/USER/y /scratch/USER/z USER@HOST HOST annotation joann /data/people/anna gpu77"


def test_this_machine():
    found = by_name(doctor.examine(sys.executable, Path.cwd()))
    assert found["python"].status == "ok"
    assert found["torch"].status == "ok", found["torch"]
