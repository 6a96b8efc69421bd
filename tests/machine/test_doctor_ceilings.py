"""Measured ceilings in the doctor: kept ones, new ones, and those that are far below what they should be."""

from __future__ import annotations

import sys

import msgspec
import pytest

from saturate.errors import EnvironmentProblem
from saturate.machine import ceilings, doctor_ceilings
from saturate.machine.gpus import Link
from saturate.records.ceilings import Ceilings

H100 = Ceilings(device="cuda", device_name="NVIDIA H100 80GB HBM3", driver="580.1", torch="2.13.0", measured_at="2026-11-01T10:00:00+00:00",
                rates={"float32": 52e12, "bfloat16": 790e12}, bandwidth={"copy": [(1 << 22, 6e12), (1 << 30, 2.9e12)], "triad": [(1 << 30, 2.8e12)]},
                host_to_device={"pinned": 55e9, "pageable": 9e9}, launch_ns=2100.0)
CPU = Ceilings(device="cpu", device_name="Toy 9000", torch="2.13.0", threads=2, measured_at="2026-11-01", rates={"float32": 1e11}, bandwidth={"copy": [(1000, 4e9)]})
LINK = Link(5, 16, 5, 16)
ASKED = {"torch": "2.13.0", "cuda_available": True, "devices": ["NVIDIA H100 80GB HBM3"]}


def test_a_healthy_device():
    check = doctor_ceilings.judged(H100, LINK)
    assert (check.status, check.fix) == ("ok", "")
    assert check.found == ("NVIDIA H100 80GB HBM3, measured 2026-11-01: fp32 52 TFLOP/s (78% of stated), bf16 790 TFLOP/s (80% of stated), "
                           "copy 2.90 TB/s (87% of stated), host to device pinned 55.0 GB/s (87% of stated), "
                           "host to device pageable 9.0 GB/s, a kernel launch 2.1 us")
    assert check.values["rates"]["bfloat16"] == 790e12


@pytest.mark.parametrize(("change", "link", "named"), [
    ({"rates": {"bfloat16": 300e12}}, LINK, "bf16 300 TFLOP/s"), ({"bandwidth": {"copy": [(1, 1.5e12)]}}, LINK, "copy 1.50 TB/s"),
    ({"host_to_device": {"pinned": 12e9}}, LINK, "pinned 12.0 GB/s"),
])
def test_what_is_far_too_slow(change, link, named):
    fields = {name: getattr(H100, name) for name in H100.__struct_fields__}
    check = doctor_ceilings.judged(Ceilings(**fields | change), link)
    assert check.status == "note" and check.found.endswith(f"far below what it should reach: {change_words(named, check)}") and check.fix


def change_words(named, check):
    """The last words of the check, which must be those of the one rate that was planted."""
    last = check.found.rpartition(": ")[2]
    assert last.endswith(named)
    return last


def test_unknown_devices_and_links_are_not_judged():
    fields = {name: getattr(H100, name) for name in H100.__struct_fields__} | {"device_name": "Toy 9000", "host_to_device": {"pinned": 1e9}}
    for link in (None, Link()):
        check = doctor_ceilings.judged(Ceilings(**fields), link)
        assert check.status == "ok" and "of stated" not in check.found


def test_kept_and_new_measurements(monkeypatch):
    asked_for = {}

    def kept(name, **wanted):
        asked_for.update(wanted, name=name)
        return ceilings.Kept([H100], [])

    monkeypatch.setattr(ceilings, "kept", kept)
    monkeypatch.setattr(ceilings, "driver", lambda _: "580.1")
    assert doctor_ceilings.ceilings("python", ASKED, LINK, False).found.startswith("NVIDIA H100")
    assert asked_for == {"name": "NVIDIA H100 80GB HBM3", "device": "cuda", "torch": "2.13.0", "driver": "580.1"}
    monkeypatch.setattr(ceilings, "kept", lambda *_, **__: ceilings.Kept([], []))
    assert "--measure" in doctor_ceilings.ceilings("python", ASKED, LINK, False).found
    monkeypatch.setattr(ceilings, "measure", lambda python, device: H100)
    assert doctor_ceilings.ceilings("python", ASKED, LINK, True).status == "ok"

    def failing(*_):
        raise EnvironmentProblem("could not be measured", cause="no answer within 180 s")

    monkeypatch.setattr(ceilings, "measure", failing)
    check = doctor_ceilings.ceilings("python", ASKED, LINK, True)
    assert check.status == "note" and check.found == "could not be measured; no answer within 180 s" and check.fix


def test_without_torch_or_msgspec(monkeypatch):
    assert doctor_ceilings.ceilings("python", {}, None, True).status == "unknown"
    monkeypatch.setitem(sys.modules, "saturate.machine.ceilings", None)
    monkeypatch.delattr("saturate.machine.ceilings")
    assert doctor_ceilings.ceilings("python", ASKED, None, False).status == "unknown"


def test_a_cpu_is_measured_in_its_own_units():
    """2.5 TFLOP/s of fp32 and 103 GFLOP/s of bf16; a processor launches no kernels."""
    cpu = Ceilings(device="cpu", device_name="Toy CPU", measured_at="2026-11-01T10:00:00+00:00", threads=2, launch_ns=4000.0,
                   rates={"float32": 2.5e12, "bfloat16": 103e9}, bandwidth={"read": [(1 << 28, 24.4e9)]})
    assert doctor_ceilings.judged(cpu, None).found == \
        "Toy CPU, measured 2026-11-01 with 2 threads: fp32 2.5 TFLOP/s, bf16 103 GFLOP/s, read 24.4 GB/s"


@pytest.mark.parametrize(("rate", "threads", "status"), [(0.7e9, 2, "note"), (50e9, 2, "ok"), (50e9, 64, "note"), (9e9, None, "ok")])
def test_a_cpu_that_was_measured_beside_other_work(rate, threads, status):
    cpu = Ceilings(device="cpu", device_name="Toy CPU", threads=threads, rates={"bfloat16": 1e9, "float32": rate}, bandwidth={})
    check = doctor_ceilings.judged(cpu, None)
    assert check.status == status and ("far below what it should reach: fp32" in check.found) == (status == "note")


def test_a_busy_machine_is_told():
    quiet, busy = msgspec.structs.replace(CPU, queued_share=0.02), msgspec.structs.replace(CPU, queued_share=0.31)
    assert doctor_ceilings.judged(quiet, None).status == "ok"
    check = doctor_ceilings.judged(busy, None)
    assert check.status == "note" and check.found.endswith("other processes had the cores for 31% of the time")
    assert check.fix == "end them, then measure again: saturate doctor --measure"
