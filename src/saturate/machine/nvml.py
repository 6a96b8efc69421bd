"""NVML as questions that may go unanswered: devices, drivers, containers and versions differ in what they tell.

Every function here takes the NVML module as an argument where tests put a fake: an object with the functions
`nvml...` of nvidia-ml-py that it knows, and an exception class `NVMLError`.

Source: NVIDIA NVML API reference guide (nvmlClocksEventReasons, nvmlDeviceGetPciInfo).
"""

from __future__ import annotations

from typing import Any

#: Bits of nvmlDeviceGetCurrentClocksEventReasons by the names of `nvidia-smi --query-gpu=clocks_event_reasons...`.
#: The idle bit is not among them: a device that has nothing to do is not throttled.
THROTTLE_REASONS = {
    0x02: "applications_clocks_setting",
    0x04: "sw_power_cap",
    0x08: "hw_slowdown",
    0x10: "sync_boost",
    0x20: "sw_thermal_slowdown",
    0x40: "hw_thermal_slowdown",
    0x80: "hw_power_brake_slowdown",
    0x100: "display_clock_setting",
}
_IDLE = 0x01
_CLOCK_SM = 1
_SENSOR_GPU = 0


class Nvml:
    """An initialized NVML. Close it, or use it in a `with` statement."""

    def __init__(self, module: Any):
        self._module = module

    def __enter__(self) -> Nvml:
        return self

    def __exit__(self, *_: object) -> None:
        try:
            self._module.nvmlShutdown()
        except self._module.NVMLError:  # the driver went away meanwhile: there is nothing left to close
            pass

    def ask(self, question: str, *arguments: Any) -> Any:
        """The answer of `nvml<question>`; None where this device, driver, permission or version gives none."""
        function = getattr(self._module, f"nvml{question}", None)
        if function is None:
            return None
        try:
            answer = function(*arguments)
        except self._module.NVMLError:  # "not supported", "no permission": the answer of many devices to many questions
            return None
        return answer.decode(errors="replace") if isinstance(answer, bytes) else answer

    def handles(self) -> dict[int, Any]:
        """The devices by NVML's number (the order of PCI addresses), without those that do not answer."""
        found = {index: self.ask("DeviceGetHandleByIndex", index) for index in range(self.ask("DeviceGetCount") or 0)}
        return {index: handle for index, handle in found.items() if handle is not None}

    def lost(self) -> tuple[int, ...]:
        """Numbers of devices that are counted and do not answer."""
        answering = self.handles()
        return tuple(index for index in range(self.ask("DeviceGetCount") or 0) if index not in answering)

    def reasons(self, handle: Any) -> int | None:
        """The bit mask of what holds the clocks down at this moment."""
        mask = self.ask("DeviceGetCurrentClocksEventReasons", handle)
        # Drivers before 535 know it by its old name only.
        return mask if mask is not None else self.ask("DeviceGetCurrentClocksThrottleReasons", handle)

    def sm_clock_mhz(self, handle: Any) -> int | None:
        return self.ask("DeviceGetClockInfo", handle, _CLOCK_SM)

    def most_sm_clock_mhz(self, handle: Any) -> int | None:
        return self.ask("DeviceGetMaxClockInfo", handle, _CLOCK_SM)

    def temperature_c(self, handle: Any) -> int | None:
        return self.ask("DeviceGetTemperature", handle, _SENSOR_GPU)


def start(module: Any = None) -> tuple[Nvml | None, str]:
    """NVML, or None and the reason why there is none. `module`: a stand-in for nvidia-ml-py."""
    if module is None:
        try:
            import pynvml as module
        except ImportError:
            return None, "nvidia-ml-py is not installed"
    try:
        module.nvmlInit()
    except module.NVMLError as error:
        return None, f"no NVIDIA driver ({error})"
    return Nvml(module), ""


def is_idle(mask: int) -> bool:
    """Whether the clocks are low only because there is nothing to do."""
    return bool(mask & _IDLE)


def named(mask: int) -> tuple[str, ...]:
    """The throttle reasons in a bit mask; bits that later drivers added are named by their value."""
    rest = mask & ~_IDLE
    known = tuple(name for bit, name in THROTTLE_REASONS.items() if rest & bit)
    for bit in THROTTLE_REASONS:
        rest &= ~bit
    return known + ((f"reason_{rest:#x}",) if rest else ())
