"""What the accelerator's board said while a window was recorded: throttling, clock, temperature, power.

    with Sampler() as sampler:
        ...                             # the window
    MachineSeen(**sampler.seen())

One thread asks NVML ten times a second, less often where asking is slow: it never takes more than 5 % of one core.
Without NVML every value is None.
"""

from __future__ import annotations

import os
import statistics
import threading
import time
from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from saturate.machine import nvml as _nvml
from saturate.machine.nvml import Nvml

_INTERVAL_S = 0.1
_MOST_SHARE = 0.05              # of one core, spent asking
_MOST_SAMPLES = 10_000          # the newest are kept: a quarter of an hour of one device
_THROTTLED_SHARE = 0.1          # of the busy samples; a shorter dip at the power limit is how boards work
_NOTHING: dict[str, Any] = {"throttle": None, "clock_share": None, "temperature_c": None, "power_share": None}


@dataclass(frozen=True)
class Sample:
    """One device at one moment; None: it does not tell."""

    device: int
    reasons: int | None             # bit mask, nvml.THROTTLE_REASONS
    clock_mhz: int | None           # of the SMs
    most_clock_mhz: int | None
    temperature_c: int | None
    power_mw: int | None
    power_limit_mw: int | None
    busy_percent: int | None = None     # of its time with a kernel running, over a period of at most a second before


def sample(nvml: Nvml, handle: Any, device: int = 0) -> Sample:
    """What one device says now."""
    rates = nvml.ask("DeviceGetUtilizationRates", handle)
    return Sample(
        device=device,
        reasons=nvml.reasons(handle),
        clock_mhz=nvml.sm_clock_mhz(handle),
        most_clock_mhz=nvml.most_sm_clock_mhz(handle),
        temperature_c=nvml.temperature_c(handle),
        power_mw=nvml.ask("DeviceGetPowerUsage", handle),
        power_limit_mw=nvml.ask("DeviceGetEnforcedPowerLimit", handle),
        busy_percent=rates.gpu if rates is not None else None,
    )


def summary(samples: Iterable[Sample]) -> dict[str, Any]:
    """The fields of `records.observations.MachineSeen`, of the device that is worst off.

    Samples of an idle device say nothing about how it works and do not count. `throttle` names what held the clocks in
    at least a tenth of a device's samples; clock and power are medians over the window, the temperature is the highest.
    """
    devices: dict[int, list[Sample]] = {}
    for one in samples:
        if one.reasons is None or not _nvml.is_idle(one.reasons):
            devices.setdefault(one.device, []).append(one)
    if not devices:
        return dict(_NOTHING)
    masks = [[one.reasons for one in seen if one.reasons is not None] for seen in devices.values()]
    temperatures = [one.temperature_c for seen in devices.values() for one in seen if one.temperature_c is not None]
    return {
        "throttle": tuple(dict.fromkeys(name for mask in masks for name in _held(mask))) if any(masks) else None,
        "clock_share": min(_medians(devices, "clock_mhz", "most_clock_mhz"), default=None),
        "temperature_c": float(max(temperatures)) if temperatures else None,
        "power_share": max(_medians(devices, "power_mw", "power_limit_mw"), default=None),
    }


def _held(masks: list[int]) -> list[str]:
    counts: dict[str, int] = {}
    for mask in masks:
        for name in _nvml.named(mask):
            counts[name] = counts.get(name, 0) + 1
    return [name for name, count in counts.items() if count >= _THROTTLED_SHARE * len(masks)]


def _medians(devices: Mapping[int, list[Sample]], value: str, most: str) -> list[float]:
    """The median of value / most of each device that tells both."""
    shares = ([getattr(one, value) / getattr(one, most) for one in seen
               if getattr(one, value) is not None and getattr(one, most)] for seen in devices.values())
    return [statistics.median(of_one) for of_one in shares if of_one]


def visible(nvml: Nvml, setting: str | None) -> dict[int, Any]:
    """The devices that a value of CUDA_VISIBLE_DEVICES admits: numbers, or UUIDs that may be cut short; None: all.

    CUDA numbers devices by speed unless CUDA_DEVICE_ORDER says PCI_BUS_ID, NVML by PCI address: where unlike devices are
    mixed and picked by number, another one may be meant.
    """
    handles = nvml.handles()
    if setting is None:
        return handles
    chosen: dict[int, Any] = {}
    for word in filter(None, (part.strip() for part in setting.split(","))):
        named = [index for index, handle in handles.items()
                 if word == str(index) or (nvml.ask("DeviceGetUUID", handle) or "").startswith(word)]
        if len(named) != 1:
            break                   # as CUDA does: what stands behind an invalid entry is not visible
        chosen[named[0]] = handles[named[0]]
    return chosen


def visible_name(nvml: Nvml, environment: Mapping[str, str]) -> str:
    """What torch calls the device that a command with this environment trains on; "" where that cannot be told from here: none
    is visible, they have different names, or a device is divided (MIG), whose parts have names of their own.

    A number means the same device to CUDA and to NVML only where CUDA counts by PCI address, or all devices are alike.
    """
    setting = environment.get("CUDA_VISIBLE_DEVICES")
    handles = visible(nvml, setting)
    numbered = setting is not None and any(part.strip().isdecimal() for part in setting.split(","))
    if handles and numbered and environment.get("CUDA_DEVICE_ORDER") != "PCI_BUS_ID":
        handles = nvml.handles()
    names = {"" if _divided(nvml, handle) else nvml.ask("DeviceGetName", handle) or "" for handle in handles.values()}
    return names.pop() if len(names) == 1 else ""


def _divided(nvml: Nvml, handle: Any) -> bool:
    mode = nvml.ask("DeviceGetMigMode", handle)         # now, and after the next reset; None: it cannot be divided
    return bool(mode and mode[0])


class Sampler:
    """Samples the workload's devices from `__enter__` to `__exit__`. `environment` is the workload's (default: ours),
    `module` a stand-in for nvidia-ml-py."""

    def __init__(self, environment: Mapping[str, str] | None = None, *, interval_s: float = _INTERVAL_S, module: Any = None):
        self._environment = os.environ if environment is None else environment
        self._interval_s = interval_s
        self._module = module
        self._samples: deque[Sample] = deque(maxlen=_MOST_SAMPLES)
        self._lock = threading.Lock()
        self._ended = threading.Event()
        self._thread: threading.Thread | None = None
        self._nvml: Nvml | None = None
        self._uuids: dict[int, str] = {}

    def __enter__(self) -> Sampler:
        self._nvml, _ = _nvml.start(self._module)
        if self._nvml is not None:
            handles = visible(self._nvml, self._environment.get("CUDA_VISIBLE_DEVICES"))
            self._uuids = {device: self._nvml.ask("DeviceGetUUID", handle) or "" for device, handle in handles.items()}
            if handles:
                self._thread = threading.Thread(target=self._run, args=(self._nvml, handles), name="telemetry", daemon=True)
                self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        if self._thread is not None:
            self._thread.join(timeout=2.0)      # a driver that hangs must not take us with it
        if self._nvml is not None and (self._thread is None or not self._thread.is_alive()):
            self._nvml.__exit__()

    def seen(self, uuid: str = "") -> dict[str, Any]:
        """What was seen so far, as the fields of `records.observations.MachineSeen`. `uuid`: of the one device that the workload uses, as
        torch spells it; of all that it may use where that is "" or none of theirs. Others may be at work for somebody else."""
        with self._lock:
            samples = tuple(self._samples)
        own = [one for one in samples if uuid and self._uuids.get(one.device, "").endswith(uuid)]
        return summary(own or samples)

    def busy_share(self, used: int = 1) -> float | None:
        """The share of its time in which the least busy of the devices in use ran kernels (NVML's utilisation, a median). Which of those
        that are visible the workload uses is not known here, so it is taken to be the `used` busiest. None: none tells."""
        devices: dict[int, list[int]] = {}
        with self._lock:
            for one in self._samples:
                if one.busy_percent is not None:
                    devices.setdefault(one.device, []).append(one.busy_percent)
        shares = sorted((statistics.median(seen) / 100 for seen in devices.values()), reverse=True)
        return min(shares[:used], default=None)

    def _run(self, nvml: Nvml, handles: Mapping[int, Any]) -> None:
        while True:
            began = time.perf_counter()
            for device, handle in handles.items():
                one = sample(nvml, handle, device)
                with self._lock:
                    self._samples.append(one)
            took = time.perf_counter() - began
            if self._ended.wait(max(self._interval_s - took, took / _MOST_SHARE - took)):
                return
