"""The workload's Python, its torch and torch's libraries."""

from __future__ import annotations

import sys

import pytest
from test_doctor import by_name, fake_python

from saturate.machine import doctor, doctor_python, releases

ANSWER = {"torch": "2.12.1+cu130", "cuda_build": "13.0", "rocm_build": None, "cuda_available": True, "errors": {}, "cudnn": 92000,
          "nccl": "2.29.7", "installed": {"wanted": {"nvidia-cudnn-cu13": "==9.20.0.48", "triton": "==3.7.1"},
                                          "found": {"nvidia-cudnn-cu13": "9.20.0.48", "triton": "3.7.1"}}}


@pytest.mark.parametrize(("body", "name", "status", "words"), [
    ('echo \'{"version": "3.9.2", "executable": "/p"}\'', "python", "problem", "3.11 or later"),
    ('[ "$3" = torch ] && { echo "ModuleNotFoundError: No module named \'torch\'" >&2; exit 1; }\n'
     'echo \'{"version": "3.12.0", "executable": "/p"}\'', "torch", "problem", "pip install torch"),
    ('[ "$3" = torch ] && { echo "ImportError: libcudart.so.12: cannot open" >&2; exit 1; }\n'
     'echo \'{"version": "3.12.0", "executable": "/p"}\'', "torch", "problem", "--force-reinstall"),
    ('[ "$3" = torch ] && kill -9 $$\necho \'{"version": "3.12.0", "executable": "/p"}\'', "torch", "problem", "exit code -9"),
    ("echo hello", "python", "problem", "is it a Python?"),
    ("echo 17", "python", "problem", "is it a Python?"),
    ("exit 0", "python", "problem", "it printed nothing"),
    ('echo \'{"version": "3.12.0", "executable": "/p"}\'; exit 5', "python", "problem", "exit code 5"),
])
def test_problems_of_the_workloads_python(tmp_path, body, name, status, words):
    check = by_name(doctor.examine(fake_python(tmp_path, body), tmp_path))[name]
    assert check.status == status
    assert words in check.found + check.fix


def test_a_python_that_is_not_there(tmp_path):
    found = by_name(doctor.examine(str(tmp_path / "absent"), tmp_path))
    assert "No such file" in found["python"].found and found["torch"].status == "unknown"
    assert found["libraries"].status == "unknown" and found["headers"].status == "unknown"


def test_the_real_answer_holds_what_the_checks_read():
    answer = doctor_python.ask(sys.executable, "torch")
    assert {"version", "executable", "errors", "torch", "cuda_build", "rocm_build", "cuda_available", "headers", "installed"} <= set(answer)
    assert set(answer["installed"]) == {"wanted", "found"} and set(answer["errors"]) <= {"cuda_init"}, "a build for CUDA on a machine without a driver"


@pytest.mark.parametrize(("number", "words"), [(8902, "8.9.2"), (91002, "9.10.2"), (92000, "9.20.0"), (None, None), (0, None)])
def test_cudnn_versions(number, words):
    assert doctor_python.cudnn_version(number) == words


@pytest.mark.parametrize(("version", "wish", "fits"), [
    ("9.20.0.48", "==9.20.0.48", True), ("9.20.0.4", "==9.20.0.48", False), ("3.9.4", "~=3.9.0", True), ("3.10.0", "~=3.9.0", False),
    ("3.9.0", "~=3.9.1", False), ("3.9.0.post1", "~=3.9.0", True),
])
def test_versions_against_what_torch_wants(version, wish, fits):
    assert doctor_python.fits(version, wish) is fits


def test_libraries_that_match():
    check = doctor_python.libraries("python", ANSWER)
    newest = releases.table().torch[0]
    assert check.status == "ok" and check.fix == ""
    assert check.found.startswith("cuDNN 9.20.0, NCCL 2.29.7, Triton 3.7.1")
    assert f"torch {newest.version} brings cuDNN {newest.cudnn}" in check.found
    assert check.values == {"cudnn": "9.20.0", "nccl": "2.29.7", "triton": "3.7.1"}


def test_libraries_that_do_not_match_name_the_command():
    installed = {"wanted": ANSWER["installed"]["wanted"], "found": {"nvidia-cudnn-cu13": "9.1.0.70", "triton": "3.7.1"}}
    check = doctor_python.libraries("python", ANSWER | {"installed": installed, "cudnn": 90100})
    assert check.status == "note" and "nvidia-cudnn-cu13==9.1.0.70 where torch wants ==9.20.0.48" in check.found
    assert check.fix == "python -m pip install nvidia-cudnn-cu13==9.20.0.48"


def test_a_system_cudnn_that_shadows_torchs_own():
    check = doctor_python.libraries("python", ANSWER | {"cudnn": 90100})
    assert check.status == "note" and "torch loads cuDNN 9.1.0 although 9.20.0 was installed" in check.found
    assert "LD_LIBRARY_PATH" in check.fix
    broken = doctor_python.libraries("python", ANSWER | {"errors": {"cudnn": "cuDNN version incompatibility"}})
    assert broken.status == "problem" and "incompatibility" in broken.found and broken.fix


def test_a_cpu_build_needs_no_libraries():
    check = doctor_python.libraries("python", {"torch": "2.13.0+cpu", "cuda_build": None, "errors": {}, "cudnn": None})
    assert (check.status, check.found) == ("ok", "a CPU build needs none")


def test_an_old_torch_is_upgraded_to_one_that_the_driver_runs(monkeypatch):
    monkeypatch.setattr(doctor_python, "ask", lambda *_: {"torch": "2.6.0+cu124", "cuda_build": "12.4", "rocm_build": None})
    new, old = ({"version": "3.12.0"} for _ in range(2))
    assert doctor_python.torch("python", new, (13, 0)).fix == "python -m pip install --upgrade torch"
    check = doctor_python.torch("python", old, (12, 4))
    assert check.status == "note" and "releases (21 months) behind 2.15" in check.found
    assert check.fix.startswith("install NVIDIA driver 580 or later") and "the CUDA 12.6 build of torch 2.14" in check.fix
    assert check.values["releases_behind"] == 9 and check.values["as_of"] == str(releases.table().as_of)


def test_headers():
    assert doctor_python.headers({"torch": "2", "headers": True}, "x").status == "ok"
    missing = doctor_python.headers({"torch": "2", "headers": False}, "apt-get install -y python3-dev")
    assert missing.status == "note" and missing.fix == "apt-get install -y python3-dev"
    assert doctor_python.headers({"torch": "2", "errors": {"headers": "odd"}}, "x").found == "odd"


def test_only_what_would_change_is_said_to_come_with_a_newer_torch():
    newest = releases.table().torch[0]
    found = doctor_python.libraries("python", ANSWER | {"nccl": newest.nccl}).found
    assert f"torch {newest.version} brings cuDNN {newest.cudnn}, Triton {newest.triton})" in found
    same = ANSWER | {"torch": f"{newest.version}.0", "nccl": "2.1.0"}
    assert "brings" not in doctor_python.libraries("python", same).found
