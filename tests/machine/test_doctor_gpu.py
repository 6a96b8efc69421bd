"""Accelerators, on planted machines: NVML with one thing wrong at a time, and /sys where there is no NVML."""

from __future__ import annotations

import datetime
from pathlib import Path

import pytest
from planted import FakeNvml, card, h100, plant

from saturate.machine import doctor_gpu, gpus, nvml, releases
from saturate.machine.doctor_gpu import Machine
from saturate.machine.gpus import Gpu

NOWHERE = Path("/nonexistent")
DAY = datetime.date(2026, 11, 20)
TORCH = {"torch": "2.13.0", "cuda_build": "13.0", "rocm_build": None, "cuda_available": True, "capabilities": [[9, 0]],
         "architectures": ["sm_80", "sm_90", "compute_120"], "errors": {}}


def machine(*devices: dict, root: Path = NOWHERE, **of_nvml) -> Machine:
    opened, error = nvml.start(FakeNvml(*devices, **of_nvml))
    assert opened is not None, error
    with opened:
        return doctor_gpu.observe(opened, "", root)


def without_nvml(root: Path, error: str = "nvidia-ml-py is not installed") -> Machine:
    return doctor_gpu.observe(None, error, root)


def all_checks(seen: Machine, asked: dict | None = None) -> dict:
    asked = TORCH if asked is None else asked
    found = [doctor_gpu.device(seen, asked), doctor_gpu.driver(seen, asked, DAY), doctor_gpu.formats(seen, asked, True),
             doctor_gpu.links(seen), doctor_gpu.placement(seen, frozenset({0, 1}), 1), doctor_gpu.clocks(seen), doctor_gpu.health(seen)]
    return {check.name: check for check in found}


def test_a_healthy_server_needs_no_fix():
    found = all_checks(machine(*(h100(f"00000000:{n:02x}:00.0") for n in range(8))))
    assert {check.status for check in found.values()} == {"ok"} and not any(check.fix for check in found.values())
    assert found["gpu"].found == "8 x NVIDIA H100 80GB HBM3 80.0 GiB"
    assert found["links"].found == "PCIe 5.0 x16, NVLink 18 of 18 active"
    assert found["clocks"].found == "1980 of 1980 MHz, 45 C"
    assert found["driver"].found == "580.65.06, CUDA up to 13.0; long-term support branch, maintenance until 2028-06"
    assert found["gpu"].values["gpus"][7] == {"name": "NVIDIA H100 80GB HBM3", "memory_bytes": 80 << 30, "capability": (9, 0)}


def test_a_device_that_tells_nothing_is_not_called_healthy_numbers():
    found = all_checks(machine({"Name": "NVIDIA GB10"}))
    assert found["gpu"].status == "ok" and found["gpu"].found == "NVIDIA GB10"
    assert found["links"].status == "unknown" and found["clocks"].status == "unknown"
    assert found["links"].values["gpus"][0]["width"] is None


@pytest.mark.parametrize(("check", "status", "words", "fix", "device"), [
    ("links", "note", "x8 of x16", "seat GPU 0", {"CurrPcieLinkWidth": 8}),
    ("links", "note", "PCIe 3.0 x16 of 5.0", "full PCIe generation", {"CurrPcieLinkGeneration": 3}),
    ("links", "ok", "(5.0 when it works)", "", {"CurrPcieLinkGeneration": 1, "CurrentClocksEventReasons": 1}),
    ("links", "note", "the card could do 5.0", "full PCIe generation", {"CurrPcieLinkGeneration": 4, "MaxPcieLinkGeneration": 4}),
    ("links", "note", "NVLink 17 of 18", "nvidia-smi nvlink --status", {"NvLinks": (1,) * 17 + (0,)}),
    ("clocks", "note", "sw_thermal_slowdown", "cool it", {"CurrentClocksEventReasons": 0x20}),
    ("clocks", "note", "hw_power_brake_slowdown", "power supply", {"CurrentClocksEventReasons": 0x80}),
    ("clocks", "note", "applications_clocks_setting", "nvidia-smi -rac", {"CurrentClocksEventReasons": 0x02}),
    ("clocks", "ok", "held down by sw_power_cap", "", {"CurrentClocksEventReasons": 0x04}),
    ("clocks", "note", "power limit 300 W of 700 W", "nvidia-smi -i 0 -pl 700", {"EnforcedPowerLimit": 300_000}),
    ("clocks", "ok", "reason_0x800", "", {"CurrentClocksEventReasons": 0x800}),
    ("gpu health", "note", "memory errors", "reboot", {"TotalEccErrors": 3}),
    ("gpu health", "note", "memory errors", "reboot", {"RemappedRows": (0, 0, 1, 0)}),
    ("gpu health", "ok", "no memory errors", "", {"RemappedRows": (5, 1, 0, 0)}),
    ("gpu health", "note", "memory errors", "reboot", {"RemappedRows": None, "RetiredPagesPendingStatus": 1}),
    ("gpu health", "note", "exclusive process mode", "-c DEFAULT", {"ComputeMode": 3}),
    ("gpu health", "problem", "no process may compute", "-c DEFAULT", {"ComputeMode": 2}),
    ("gpu health", "note", "12.0 GiB of 80.0 GiB", "CUDA_VISIBLE_DEVICES",
     {"MemoryInfo": type("Memory", (), {"total": 80 << 30, "used": 12 << 30})}),
    ("gpu health", "ok", "MIG on", "", {"MigMode": [1, 1]}),
])
def test_one_thing_wrong(check, status, words, fix, device):
    found = all_checks(machine(h100(**device)))
    assert found[check].status == status, found[check]
    assert words in found[check].found and fix in found[check].fix
    assert bool(found[check].fix) == (status != "ok")
    assert [name for name, other in found.items() if name != check and other.status != "ok"] == [], "the others stay quiet"


def test_several_things_wrong_on_different_devices():
    seen = machine(h100(), h100(CurrPcieLinkWidth=4), h100(NvLinks=(1,) * 17 + (0,)), h100(CurrPcieLinkWidth=4))
    check = doctor_gpu.links(seen)
    assert check.found == ("0: PCIe 5.0 x16, NVLink 18 of 18 active; 1,3: PCIe 5.0 x4 of x16: 25% of its host bandwidth, "
                           "NVLink 18 of 18 active; 2: PCIe 5.0 x16, NVLink 17 of 18 active")
    assert check.fix.startswith("seat GPU 1,3 anew") and "; GPU 2: nvidia-smi nvlink" in check.fix


def test_a_device_that_fell_off_the_bus():
    check = all_checks(machine(h100(), {"lost": True}, h100()))["gpu"]
    assert check.status == "problem" and check.found.startswith("GPU 1 does not answer") and "Xid" in check.fix


@pytest.mark.parametrize(("asked", "status", "words"), [
    ({"cuda_available": False, "cuda_build": "13.2"}, "problem", "but torch cannot use it: no reason given"),
    ({"cuda_available": False, "errors": {"cuda_init": "CUDA unknown error"}}, "problem", "CUDA unknown error"),
    ({"cuda_available": False, "cuda_build": None}, "note", "this torch is a CPU build"),
    ({"cuda_available": False, "cuda_build": None, "rocm_build": "7.2"}, "note", "this torch is a ROCm build"),
    ({"capabilities": [[12, 0], [9, 0]]}, "ok", "H100"),
    ({"capabilities": [[7, 0], [9, 0]]}, "problem", "no code for compute capability 7.0"),
    ({"architectures": ["sm_90a"], "capabilities": [[9, 0]]}, "ok", "H100"),
    ({"architectures": ["sm_90a"], "capabilities": [[10, 0]]}, "problem", "10.0"),
    ({"architectures": ["sm_80"], "capabilities": [[8, 6]]}, "ok", "H100"),
    ({"architectures": ["sm_80"], "capabilities": [[9, 0]]}, "problem", "9.0"),
    ({"architectures": ["sm_86"], "capabilities": [[8, 0]]}, "problem", "8.0"),
    ({"architectures": []}, "ok", "H100"),
])
def test_torch_against_the_devices(asked, status, words):
    check = doctor_gpu.device(machine(h100()), TORCH | asked)
    assert check.status == status and words in check.found
    assert bool(check.fix) == (status != "ok")


def test_torch_that_does_not_import_says_nothing_about_devices():
    assert doctor_gpu.device(machine(h100()), {}).status == "ok"


def test_a_driver_too_old_for_torch_names_both_ways_out():
    seen = machine(h100(), driver="470.57.02", cuda=11040)
    asked = TORCH | {"cuda_available": False, "cuda_build": "12.6"}
    assert doctor_gpu.device(seen, asked).fix == ("install NVIDIA driver 525 or later, or the CUDA 11.8 build of torch 2.7: "
                                                  "pytorch.org/get-started/previous-versions")


@pytest.mark.parametrize(("version", "status", "words"), [
    ("580.65.06", "ok", "maintenance until 2028-06"), ("535.1", "note", "maintenance ended 2026-06"), ("550.54.15", "note", "no longer maintained"),
    ("999.1", "ok", "newer than the list"), ("odd", "ok", "odd"),
])
def test_driver_branches(version, status, words):
    check = doctor_gpu.driver(Machine(driver=version), {}, DAY)
    assert check.status == status and words in check.found
    if status == "note":
        assert check.fix == "install the 580 driver (long-term support, until 2028-06)"


def test_minor_version_compatibility_is_named():
    seen = Machine(driver="580.65.06", driver_cuda=(13, 0))
    assert "runs CUDA 13.2 by minor version compatibility" in doctor_gpu.driver(seen, {"cuda_build": "13.2"}, DAY).found
    assert "compatibility" not in doctor_gpu.driver(seen, {"cuda_build": "12.6"}, DAY).found


@pytest.mark.parametrize(("capability", "has", "has_not"), [
    ((12, 0), "fp4", "fp64"), ((10, 3), "fp4", "int4"), ((9, 0), "fp8", "fp4"), ((8, 9), "fp8", "fp64"), ((8, 0), "bf16", "fp8"),
    ((7, 5), "int8", "bf16"), ((7, 0), "fp16", "int8"),
])
def test_tensor_core_formats(capability, has, has_not):
    formats = doctor_gpu.tensor_cores(capability).split(", ")
    assert has in formats and has_not not in formats


def test_formats_of_other_devices():
    assert doctor_gpu.tensor_cores((6, 1)) == ""
    assert "tensor cores: none" in doctor_gpu.formats(machine(h100(CudaComputeCapability=(6, 1))), TORCH, False).found
    amd = doctor_gpu.formats(Machine(), {"rocm_build": "7.2", "gcn": "gfx942:sramecc+:xnack-"}, True).found
    assert amd == "matrix cores: fp32, tf32, bf16, fp16, int8, fp8, fp64; CPU: bf16 native"
    assert doctor_gpu.formats(Machine(), {}, False).found == "CPU: bf16 not native"


def test_without_nvml_the_bus_tells(tmp_path):
    root = card(tmp_path, current_link_width="8", node=1)
    card(root, bus="0000:03:00.0", vendor="0x1234")                             # an emulated display is no accelerator
    plant(root, {
        "proc/driver/nvidia/version": "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  580.65.06  Release Build\n",
        "proc/driver/nvidia/gpus/0000:17:00.0/information": "Model: \t\t NVIDIA H100 PCIe\nIRQ: 5\n", "dev/nvidiactl": "",
    })
    seen = without_nvml(root)
    found = all_checks(seen)
    assert [gpu.name for gpu in seen.gpus] == ["NVIDIA H100 PCIe"] and found["gpu"].status == "ok"
    assert found["driver"].found.startswith("580.65.06")
    assert found["links"].status == "note" and "x8 of x16" in found["links"].found
    assert found["placement"].found == "1 NUMA node; on node 1"
    assert found["clocks"].status == "unknown" and "nvidia-ml-py is not installed" in found["clocks"].found


def test_a_container_that_was_started_without_its_devices(tmp_path):
    seen = without_nvml(card(tmp_path), "no NVIDIA driver (NVML Shared Library Not Found)")
    check = doctor_gpu.device(seen, TORCH | {"cuda_available": False})
    assert check.status == "note" and "on the bus, but not for this process" in check.found and "--gpus all" in check.fix


def test_no_device_at_all():
    seen = without_nvml(NOWHERE)
    assert {check.status for check in all_checks(seen, {"torch": "2", "cuda_build": None}).values()} == {"ok"}
    assert "--gpus all" in doctor_gpu.device(seen, {"torch": "2", "cuda_build": "12.8", "cuda_available": False}).fix
    mismatch = without_nvml(NOWHERE, "no NVIDIA driver (Driver/library version mismatch)")
    assert doctor_gpu.device(mismatch, {}).status == "problem" and doctor_gpu.device(mismatch, {}).fix == "reboot"
    assert doctor_gpu.device(seen, TORCH | {"devices": ["Tegra"]}).found.startswith("Tegra (only torch sees it")


def test_a_pc_without_a_card_has_nothing_to_mend(tmp_path):
    """pip's torch is a CUDA build everywhere."""
    asked = {"torch": "2", "cuda_build": "12.8", "cuda_available": False}
    pc = card(tmp_path / "pc", vendor="0x8086")
    check = doctor_gpu.device(without_nvml(pc), asked)
    assert (check.status, check.fix) == ("ok", "") and "will use the CPU" in check.found
    windows = plant(card(tmp_path / "wsl", vendor="0x8086"), {"dev/dxg": "", "usr/lib/wsl/lib/libcuda.so.1": ""})
    assert "--gpus all" in doctor_gpu.device(without_nvml(windows), asked).fix, "its devices are not on the bus"


def test_amd_devices(tmp_path):
    root = card(tmp_path, vendor="0x1002", product_name="AMD Instinct MI300X", mem_info_vram_total=str(192 << 30), **{"class": "0x120000"})
    seen = without_nvml(root)
    rocm = {"torch": "2", "cuda_build": None, "rocm_build": "7.2", "cuda_available": True}
    assert doctor_gpu.device(seen, rocm).found == "AMD Instinct MI300X 192.0 GiB"
    assert "render,video" in doctor_gpu.device(seen, rocm | {"cuda_available": False}).fix
    assert "not built for ROCm" in doctor_gpu.device(seen, {"torch": "2", "cuda_build": "13.0", "cuda_available": False}).found


def test_placement_needs_to_know(tmp_path):
    seen = without_nvml(card(tmp_path, node=1, cpus="8-15"))
    assert doctor_gpu.placement(seen, frozenset({0, 1}), 2).status == "note"
    assert doctor_gpu.placement(seen, frozenset({1, 9}), 2).status == "ok"
    assert doctor_gpu.placement(seen, frozenset(), 2).status == "ok", "not told is not far"
    assert doctor_gpu.placement(without_nvml(card(tmp_path / "b", node=-1)), frozenset({0}), 2).found == "2 NUMA nodes"


@pytest.mark.parametrize(("text", "expected"), [("0-3,8", {0, 1, 2, 3, 8}), ("5", {5}), ("", set()), ("0-", set()), ("x", set()), ("1,,2", set())])
def test_processor_lists(text, expected):
    assert gpus.processors(text) == expected


def test_odd_files_of_the_bus_do_not_raise(tmp_path):
    root = card(tmp_path, current_link_speed="Unknown", max_link_speed="", current_link_width="0", max_link_width="255x", cpus="\0", numa_node="")
    (gpu,) = without_nvml(root).gpus
    assert gpu.link == gpus.Link() and gpu.numa_node is None and gpu.near_processors == frozenset()


def test_nvml_and_the_bus_are_joined_by_address(tmp_path):
    root = card(tmp_path, bus="0000:17:00.0", node=1, cpus="8-9")
    (near, other) = machine(h100("00000000:17:00.0"), h100("00000000:99:00.0"), root=root).gpus
    assert (near.numa_node, near.near_processors) == (1, {8, 9}) and other.numa_node is None


def test_the_table_of_releases_is_whole():
    known = releases.table()
    dates = [row.released for row in known.torch]
    assert dates == sorted(dates, reverse=True) and dates[0] <= known.as_of
    versions = [tuple(map(int, row.version.split("."))) for row in known.torch]
    assert versions == sorted(versions, reverse=True) and len(set(versions)) == len(versions)
    assert known.torch[0].cuda and set(known.oldest_driver) >= {12, 13}


@pytest.mark.parametrize(("version", "behind", "months", "words"), [
    ("2.15.0+cu132", 0, 0, "the newest release"), ("2.16.0.dev20261101", 0, None, "newer than 2.15"), ("2.14.1", 1, 1, "1 release (1 month) behind 2.15"),
    ("2.11.0", 4, 7, "4 releases (7 months) behind 2.15"), ("1.13.1", None, None, "older than every release"),
])
def test_age_of_torch(version, behind, months, words):
    age = releases.age_of_torch(version, releases.table())
    assert (age.behind, age.months) == (behind, months) and words in age.words()


def test_an_unreadable_torch_version():
    assert releases.age_of_torch("main", releases.table()) is None


def test_gpus_that_are_alike_are_named_once():
    assert doctor_gpu._ranges([5, 0, 1, 2, 7, 6]) == "0-2,5-7"
    assert Gpu(0, "NVIDIA", "x", "").throttle is None


def test_where_no_driver_has_a_file_there_is_no_accelerator(tmp_path):
    assert not gpus.possible(tmp_path)
    plant(tmp_path, {"dev/kfd": ""})
    assert gpus.possible(tmp_path)


@pytest.mark.parametrize("library", ["usr/lib/wsl/lib/libcuda.so.1", "usr/lib/wsl/drivers/nv_dispi.inf_amd64/libcuda.so.1.1",
                                     "opt/rocm-6.4.2/lib/libhsa-runtime64.so.1"])
def test_under_windows_there_may_be_an_accelerator_only_with_a_library_for_it(tmp_path, library):
    plant(tmp_path, {"dev/dxg": "", "usr/lib/wsl/lib/libd3d12.so": "", "dev/nvmap": ""})
    assert not gpus.possible(tmp_path)
    plant(tmp_path, {library: ""})
    assert gpus.possible(tmp_path)
