"""The doctor as a whole: each probe alone, each problem with its fix, nothing secret in what is shown."""

from __future__ import annotations

import datetime
import sys
import threading
import time
from pathlib import Path

from planted import FakeNvml, card, h100, plant

from saturate.machine import checks, disk, doctor, doctor_disk, doctor_host, facts
from saturate.machine.doctor import Check

DAY = datetime.date(2026, 11, 20)


def fake_python(folder: Path, body: str) -> str:
    path = folder / "python"
    path.write_text(f"#!/bin/sh\n{body}\n")
    path.chmod(0o755)
    return str(path)


def by_name(found):
    return {check.name: check for check in found}


def test_every_check_answers_even_when_all_break(tmp_path, monkeypatch):
    def broken(*_, **__):
        raise RuntimeError("broken")

    for name in ("cpu_count", "memory_bytes", "free_bytes", "compiler", "allocators", "observe", "tasks_limit", "cpu_information"):
        monkeypatch.setattr(facts, name, broken)
    monkeypatch.setattr(doctor.doctor_gpu, "observe", broken)
    monkeypatch.setattr(disk, "read_rate", broken)
    found = by_name(doctor.examine(fake_python(tmp_path, "exit 3"), tmp_path, extra=[("isolation", broken)]))
    assert {check.status for check in found.values()} <= set(doctor.STATUSES)
    assert found["isolation"] == Check("isolation", "unknown", "this check itself failed: RuntimeError: broken")
    assert found["python"].status == "problem" and "--python" in found["python"].fix
    for name in ("gpu", "links", "cpu", "memory", "limits", "compiler", "disk", "read rate"):
        assert found[name].status == "unknown" and "RuntimeError: broken" in found[name].found, name
    assert found["folder"].status == "ok"


def test_an_empty_machine_answers_everything(tmp_path):
    """No /proc, no /sys, no NVML, no torch: nothing is known, nothing is zero, nothing breaks."""
    found = by_name(doctor.examine(str(tmp_path / "absent"), tmp_path, root=tmp_path / "nowhere", nvml_module=FakeNvml(broken="no library")))
    assert not [check for check in found.values() if "check itself failed" in check.found]
    assert found["gpu"].found == "none: no NVIDIA driver (no library)"
    assert found["memory"].status == "unknown" and found["memory"].values["bytes"] is None
    assert found["shared memory"].values["free_bytes"] is None


def test_a_planted_server_from_end_to_end(tmp_path):
    """One H100 on half its lanes, far from the process, throttled, under a driver that is too old for torch."""
    root = card(tmp_path / "root", node=1, cpus="100000-100007")
    plant(root, {"sys/devices/system/node/online": "0-1\n", "proc/self/status": "Name:\tx\nCpus_allowed_list:\t0-1\n"})
    nvml = FakeNvml(h100(CurrPcieLinkWidth=8, CurrentClocksEventReasons=0x40, Temperature=91), driver="550.54.15", cuda=12040)
    python = fake_python(tmp_path, """[ "$3" = torch ] && echo '{"version": "3.12.0", "executable": "/p", "errors": {"cuda_init": "too old"},
        "torch": "2.14.1+cu130", "cuda_build": "13.0", "rocm_build": null, "cuda_available": false}' | tr -d '\\n' && echo && exit
        echo '{"version": "3.12.0", "executable": "/p", "errors": {}}'""")
    found = by_name(doctor.examine(python, tmp_path, root=root, nvml_module=nvml, today=DAY))
    assert found["gpu"].status == "problem" and "knows CUDA 12.4, this torch is built for CUDA 13.0" in found["gpu"].found
    assert found["gpu"].fix == ("install NVIDIA driver 580 or later, or the CUDA 12.6 build of torch 2.14: "
                                "pytorch.org/get-started/previous-versions")
    assert found["driver"].status == "note" and "no longer maintained" in found["driver"].found and "580" in found["driver"].fix
    assert "x8 of x16: 50% of its host bandwidth" in found["links"].found and found["links"].fix.startswith("seat GPU 0 anew")
    assert "hw_thermal_slowdown" in found["clocks"].found and "91 C" in found["clocks"].found and found["clocks"].fix.startswith("GPU 0: cool it")
    assert "numactl --cpunodebind=1" in found["placement"].fix
    assert found["formats"].found.startswith("tensor cores: tf32, bf16, fp16, int8, fp8, fp64")
    assert nvml.initialized == 0, "NVML was shut down again"


def test_nothing_is_left_behind(tmp_path):
    doctor.examine("absent", tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_a_probe_that_hangs_is_left_behind(monkeypatch):
    ended = threading.Event()
    began = time.perf_counter()
    check = checks.within(0.05, "disk", lambda: ended.wait(120) and Check("disk", "ok", ""))
    assert time.perf_counter() - began < 60
    ended.set()
    assert check.status == "unknown" and "no answer within 0.05 s" in check.found and check.fix
    assert checks.within(60, "disk", lambda: Check("disk", "ok", "x")) == Check("disk", "ok", "x")
    assert "ZeroDivisionError" in checks.within(60, "disk", lambda: 1 // 0).found


def test_secrets_and_control_characters_are_never_shown(monkeypatch):
    monkeypatch.setenv("WANDB_API_KEY", "correct horse battery")
    check = Check("torch", "problem", "failed with correct horse battery\x1b[2J and hf_abcdefghijklmnop", "token=123456789 x",
                  {"deep": [{"words": "correct horse battery"}], "number": 3, "nothing": None})
    shown = doctor.redacted(check, names=False)
    assert shown.found == "failed with [hidden] [2J and [hidden]" and shown.fix == "token=[hidden] x"
    assert shown.values == {"deep": [{"words": "[hidden]"}], "number": 3, "nothing": None}


def test_data_and_measure_reach_their_checks(tmp_path, monkeypatch):
    asked = {}
    monkeypatch.setattr(doctor.doctor_disk, "read_rate", lambda place, *_: asked.setdefault("place", place) and Check("read rate", "ok", ""))
    monkeypatch.setattr(doctor.doctor_ceilings, "ceilings", lambda *words: asked.setdefault("measure", words[-1]) and Check("ceilings", "ok", ""))
    doctor.examine("absent", tmp_path, data=tmp_path / "set", measure=True)
    assert asked == {"place": tmp_path / "set", "measure": True}


def test_a_folder_that_cannot_be_written(tmp_path):
    absent = doctor_disk.folder(tmp_path / "absent")
    assert absent.status == "problem" and "--dir" in absent.fix
    assert doctor_disk.folder(tmp_path).status == "ok"
    assert list(tmp_path.iterdir()) == [], "the doctor leaves nothing behind"


def test_this_machine(tmp_path):
    found = by_name(doctor.examine(sys.executable, tmp_path))
    assert list(tmp_path.iterdir()) == []
    assert found["python"].status == "ok"
    assert found["torch"].status in ("ok", "note"), found["torch"]
    assert found["libraries"].status in ("ok", "note") and found["headers"].status in ("ok", "note")
    assert not [check for check in found.values() if "check itself failed" in check.found]
    assert doctor_host.container(Path("/")) in (True, False)
