"""What the board said during a window, from a planted NVML."""

from __future__ import annotations

import sys
import threading
import time
from types import SimpleNamespace

import pytest
from planted import FakeNvml, h100
from waiting import until

from saturate.machine import gpus, nvml, telemetry
from saturate.machine.telemetry import Sample, Sampler, summary
from saturate.records.observations import MachineSeen

NOTHING = {"throttle": None, "clock_share": None, "temperature_c": None, "power_share": None}


def one(device=0, reasons=0, clock=1980, most=1980, temperature=50, power=350_000, limit=700_000):
    return Sample(device, reasons, clock, most, temperature, power, limit)


def test_a_window_is_sampled():
    fake = FakeNvml(h100())
    with Sampler({}, interval_s=0.005, module=fake) as sampler:
        during = until(lambda: sampler._samples and sampler.seen())
    assert during == sampler.seen() == {"throttle": (), "clock_share": 1.0, "temperature_c": 45.0, "power_share": 0.5}
    assert MachineSeen(**sampler.seen()).throttle == ()
    assert fake.initialized == 0 and not [thread for thread in threading.enumerate() if thread.name == "telemetry"]


def test_how_busy_the_least_busy_device_in_use_is():
    """Others are visible as well, and idle."""
    rates = [h100(UtilizationRates=SimpleNamespace(gpu=percent, memory=5)) for percent in (0, 93, 71, 0)]
    with Sampler({}, interval_s=0.005, module=FakeNvml(*rates)) as sampler:
        until(lambda: len(sampler._samples) >= 2 * len(rates))
    assert (sampler.busy_share(), sampler.busy_share(2), sampler.busy_share(3)) == (0.93, 0.71, 0.0)
    with Sampler({}, interval_s=60, module=FakeNvml(h100())) as sampler:
        pass
    assert sampler.busy_share() is None


def test_a_device_that_somebody_else_uses_is_not_the_workloads():
    """It is visible, hot, and at its power limit; torch tells the number of the one that trains."""
    ours, theirs = h100(UUID="GPU-5f2c0001-aaaa"), h100(UUID="GPU-77770002-bbbb", CurrentClocksEventReasons=0x4, Temperature=88)
    with Sampler({}, interval_s=60, module=FakeNvml(ours, theirs)) as sampler:
        pass
    assert sampler.seen("5f2c0001-aaaa") == {"throttle": (), "clock_share": 1.0, "temperature_c": 45.0, "power_share": 0.5}
    assert sampler.seen("77770002-bbbb")["throttle"] == sampler.seen("not-here")["throttle"] == sampler.seen()["throttle"] == ("sw_power_cap",)


def test_a_short_window_still_has_one_sample():
    with Sampler({}, interval_s=60, module=FakeNvml(h100())) as sampler:
        pass
    assert sampler.seen()["temperature_c"] == 45.0


def test_without_nvml_everything_is_unknown(monkeypatch):
    with Sampler({}, module=FakeNvml(broken="NVML Shared Library Not Found")) as sampler:
        pass
    assert sampler.seen() == NOTHING
    monkeypatch.setitem(sys.modules, "pynvml", None)
    assert nvml.start() == (None, "nvidia-ml-py is not installed")
    with Sampler({}) as sampler:
        pass
    assert MachineSeen(**sampler.seen()) == MachineSeen()


def test_what_a_device_does_not_tell_is_unknown():
    fake = FakeNvml({"Name": "GB10", "Temperature": 61})
    with Sampler({}, interval_s=60, module=fake) as sampler:
        pass
    assert sampler.seen() == NOTHING | {"temperature_c": 61.0}


def test_the_old_name_of_the_reasons():
    fake = FakeNvml(h100(CurrentClocksEventReasons=None, CurrentClocksThrottleReasons=0x40))
    with Sampler({}, interval_s=60, module=fake) as sampler:
        pass
    assert sampler.seen()["throttle"] == ("hw_thermal_slowdown",)


def test_idle_samples_do_not_count():
    """An idle device clocks down by itself: that is no throttling, and says nothing about its clock at work."""
    idle = one(reasons=0x1, clock=345, temperature=30, power=70_000)
    assert summary([idle] * 9) == NOTHING
    assert summary([*[idle] * 9, one()])["clock_share"] == 1.0


@pytest.mark.parametrize(("throttled", "of", "expected"), [(1, 20, ()), (2, 20, ("sw_thermal_slowdown",)), (20, 20, ("sw_thermal_slowdown",))])
def test_a_short_dip_is_no_throttling(throttled, of, expected):
    assert summary([one(reasons=0x20)] * throttled + [one()] * (of - throttled))["throttle"] == expected


def test_the_device_that_is_worst_off_counts():
    seen = summary([one(0), one(1, reasons=0x44, clock=990, temperature=88, power=690_000), one(2, clock=None, temperature=None, power=None)])
    assert seen == {"throttle": ("sw_power_cap", "hw_thermal_slowdown"), "clock_share": 0.5, "temperature_c": 88.0, "power_share": 690 / 700}


def test_medians_are_not_moved_by_one_sample():
    assert summary([one(clock=1980)] * 5 + [one(clock=100)])["clock_share"] == 1.0


def test_nothing_was_sampled():
    assert summary([]) == NOTHING


@pytest.mark.parametrize(("setting", "expected"), [
    (None, [0, 1, 2]), ("", []), ("1", [1]), ("2,0", [2, 0]), ("0,9,1", [0]), ("-1", []), ("GPU-bbbb", [1]), ("GPU-", []), ("1, GPU-cccc", [1, 2]),
    ("MIG-1", []),
])
def test_visible_devices(setting, expected):
    fake = FakeNvml(h100(UUID="GPU-aaaa-1"), h100(UUID="GPU-bbbb-2"), h100(UUID="GPU-cccc-3"))
    opened, _ = nvml.start(fake)
    assert list(telemetry.visible(opened, setting)) == expected


A100 = "NVIDIA A100-SXM4-80GB"
PCI = {"CUDA_DEVICE_ORDER": "PCI_BUS_ID"}


@pytest.mark.parametrize(("names", "environment", "expected"), [
    ((A100,), {}, A100), ((A100, A100), {"CUDA_VISIBLE_DEVICES": "1"}, A100), ((A100,), {"CUDA_VISIBLE_DEVICES": ""}, ""), ((), {}, ""),
    (("T4", A100), {}, ""), (("T4", A100), {"CUDA_VISIBLE_DEVICES": "1"}, ""), (("T4", A100), {"CUDA_VISIBLE_DEVICES": "1", **PCI}, A100),
    (("T4", A100), {"CUDA_VISIBLE_DEVICES": "GPU-1"}, A100), (("T4", A100), {"CUDA_VISIBLE_DEVICES": "0,1", **PCI}, ""), ((None,), {}, ""),
    (("T4", A100), {"CUDA_VISIBLE_DEVICES": "GPU-1,0"}, ""),
])
def test_the_name_of_the_device_that_is_trained_on(names, environment, expected):
    """By number, CUDA may mean another one than NVML."""
    opened, _ = nvml.start(FakeNvml(*(h100(Name=name, UUID=f"GPU-{index}") for index, name in enumerate(names))))
    assert telemetry.visible_name(opened, environment) == expected


def test_a_divided_device_has_no_name_here():
    """torch calls a part of it "NVIDIA A100-SXM4-80GB MIG 1g.10gb"."""
    opened, _ = nvml.start(FakeNvml(h100(MigMode=[1, 1])))
    assert telemetry.visible_name(opened, {}) == ""
    opened, _ = nvml.start(FakeNvml(h100(MigMode=None)))
    assert telemetry.visible_name(opened, {}) == "NVIDIA H100 80GB HBM3"


def test_only_the_workloads_devices_are_asked():
    with Sampler({"CUDA_VISIBLE_DEVICES": "1"}, interval_s=60, module=FakeNvml(h100(Temperature=99), h100(Temperature=44))) as sampler:
        pass
    assert sampler.seen()["temperature_c"] == 44.0
    with Sampler({"CUDA_VISIBLE_DEVICES": ""}, interval_s=60, module=FakeNvml(h100())) as sampler:
        pass
    assert sampler.seen() == NOTHING


def test_a_device_that_is_lost_meanwhile_is_passed_over():
    fake = FakeNvml({"lost": True}, h100())
    opened, _ = nvml.start(fake)
    assert list(opened.handles()) == [1] and opened.lost() == (0,)


def test_a_slow_driver_is_asked_less_often():
    """A sample takes 30 ms: at most 5 % of the time may go into them, so the next comes half a second later, not after 1 ms."""
    asked = []
    fake = FakeNvml(h100(Temperature=lambda: asked.append(time.monotonic()) or time.sleep(0.03) or 45))
    with Sampler({}, interval_s=0.001, module=fake):
        until(lambda: len(asked) >= 2)
    assert asked[1] - asked[0] > 0.5


def test_the_samples_are_bounded(monkeypatch):
    sampler = Sampler({}, module=FakeNvml(h100()))
    assert sampler._samples.maxlen == 10_000


@pytest.mark.parametrize(("mask", "names"), [
    (0x0, ()), (0x1, ()), (0x4, ("sw_power_cap",)), (0x60, ("sw_thermal_slowdown", "hw_thermal_slowdown")), (0x1001, ("reason_0x1000",)),
])
def test_names_of_reasons(mask, names):
    assert nvml.named(mask) == names


def test_our_numbers_are_nvmls():
    pynvml = pytest.importorskip("pynvml")
    assert (pynvml.NVML_CLOCK_SM, pynvml.NVML_TEMPERATURE_GPU, pynvml.nvmlClocksEventReasonGpuIdle) == (nvml._CLOCK_SM, nvml._SENSOR_GPU, nvml._IDLE)
    assert (gpus._ECC_UNCORRECTED, gpus._ECC_SINCE_BOOT) == (pynvml.NVML_MEMORY_ERROR_TYPE_UNCORRECTED, pynvml.NVML_VOLATILE_ECC)
    assert gpus._COMPUTE_MODES[2] == "prohibited" and pynvml.NVML_COMPUTEMODE_PROHIBITED == 2
    assert gpus._COMPUTE_MODES[3] == "exclusive process" and pynvml.NVML_COMPUTEMODE_EXCLUSIVE_PROCESS == 3
    known = {getattr(pynvml, name): name for name in dir(pynvml) if name.startswith("nvmlClocksThrottleReason")}
    for bit, name in nvml.THROTTLE_REASONS.items():
        assert known[bit].removeprefix("nvmlClocksThrottleReason").lower() in (name.replace("_", ""), "userdefinedclocks"), name


def test_every_question_exists_in_nvml():
    """A misspelt question would be answered None for ever, like one that a device does not support."""
    pynvml = pytest.importorskip("pynvml")
    import re
    from pathlib import Path

    sources = (Path(nvml.__file__).parent / name for name in ("nvml.py", "gpus.py", "telemetry.py", "doctor_gpu.py"))
    asked = {name for source in sources for name in re.findall(r'\.ask\("(\w+)"', source.read_text())}
    assert len(asked) > 20 and [name for name in asked if not hasattr(pynvml, f"nvml{name}")] == []
