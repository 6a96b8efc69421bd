"""The accelerators of this machine: from NVML where there is one, from /sys and /proc/driver where there is not.

`root` stands for `/` so that tests can plant a machine. A number that nobody tells is None.

Sources: kernel Documentation/ABI/testing/sysfs-bus-pci (link speed and width, NUMA node), NVML API reference guide,
kernel Documentation/gpu/amdgpu (product_name, mem_info_vram_total).
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from saturate.machine.facts import listed
from saturate.machine.nvml import Nvml, is_idle, named

_ROOT = Path("/")
_VENDORS = {"0x10de": "NVIDIA", "0x1002": "AMD"}
#: PCI classes: VGA and 3D controllers, other displays, processing accelerators.
_CLASSES = ("0x0300", "0x0302", "0x0380", "0x1200")
#: GT/s per lane of each PCI Express generation.
_GENERATIONS = {"2.5": 1, "5": 2, "5.0": 2, "8": 3, "8.0": 3, "16": 4, "16.0": 4, "32": 5, "32.0": 5, "64": 6, "64.0": 6}
_MOST_NVLINKS = 36
#: Of the drivers: NVIDIA's, AMD's, that of NVIDIA's integrated devices.
_DEVICE_FILES = ("dev/nvidiactl", "dev/kfd", "dev/nvhost-gpu")
#: Windows gives every Linux under it this file. It means an accelerator only where CUDA or ROCm has come with it: for CUDA one of
#: these in the system itself, or (second) in a container.
_WINDOWS_FILE = "dev/dxg"
_UNDER_WINDOWS = ("usr/lib/wsl/lib/libcuda.so*", "usr/lib/wsl/drivers/*/libcuda*", "opt/rocm*")
_COMPUTE_MODES = {0: "default", 1: "exclusive thread", 2: "prohibited", 3: "exclusive process"}
_ECC_UNCORRECTED, _ECC_SINCE_BOOT = 1, 0


@dataclass(frozen=True)
class Link:
    """A PCI Express link, now and at its best. The generation drops while a device is idle, the width does not."""

    generation: int | None = None
    width: int | None = None                # lanes
    most_generation: int | None = None      # of card and slot together
    most_width: int | None = None
    card_generation: int | None = None      # of the card alone


@dataclass(frozen=True)
class Gpu:
    """One accelerator."""

    index: int
    vendor: str                             # "NVIDIA", "AMD"
    name: str
    bus: str                                # "0000:17:00.0"
    link: Link = field(default_factory=Link)
    numa_node: int | None = None
    near_processors: frozenset[int] = frozenset()   # logical processors on its NUMA node; empty: not told
    memory_bytes: int | None = None
    used_bytes: int | None = None
    capability: tuple[int, int] | None = None       # NVIDIA's compute capability
    nvlinks: tuple[int, int] | None = None          # active, present
    throttle: tuple[str, ...] | None = None
    idle: bool | None = None
    clock_mhz: int | None = None
    most_clock_mhz: int | None = None
    temperature_c: int | None = None
    power_mw: int | None = None
    power_limit_mw: int | None = None
    default_power_limit_mw: int | None = None
    uncorrected_errors: int | None = None           # of its memory, since the driver was loaded
    repair_pending: bool | None = None              # rows are remapped, or pages retired, at the next reset
    compute_mode: str | None = None
    mig: bool | None = None


def observe(nvml: Nvml | None, root: Path = _ROOT) -> list[Gpu]:
    """NVIDIA devices in NVML's order, then AMD's; without NVML all of them by PCI address."""
    from_bus = _from_bus(root)
    if nvml is None:
        return from_bus
    found = [_from_nvml(nvml, handle, index, root) for index, handle in nvml.handles().items()]
    others = [gpu for gpu in from_bus if gpu.vendor != "NVIDIA"]
    return found + [replace(gpu, index=len(found) + index) for index, gpu in enumerate(others)]


def possible(root: Path = _ROOT) -> bool:
    """Whether torch may find an accelerator here: the file of a driver is there. Which it finds, only the process can tell."""
    under_windows = (root / _WINDOWS_FILE).exists() and any(any(root.glob(pattern)) for pattern in _UNDER_WINDOWS)
    return under_windows or any((root / name).exists() for name in _DEVICE_FILES)


def driver_version(root: Path = _ROOT) -> str:
    """The loaded NVIDIA kernel module, "580.65.06"; empty where there is none."""
    version = re.search(r"NVRM version:.*?\b(\d{3,}\.\d+(?:\.\d+)?)\b", _text(root / "proc/driver/nvidia/version"))
    return version[1] if version else ""


def processors(text: str) -> frozenset[int]:
    """A list of processors as Linux writes it, "0-3,8": {0, 1, 2, 3, 8}. Empty where it is no such list."""
    found: set[int] = set()
    for part in text.strip().split(","):
        span = re.fullmatch(r"(\d{1,6})(?:-(\d{1,6}))?", part)
        if span is None:
            return frozenset()
        found.update(range(int(span[1]), int(span[2] or span[1]) + 1))
    return frozenset(found)


def _from_nvml(nvml: Nvml, handle: Any, index: int, root: Path) -> Gpu:
    pci = nvml.ask("DeviceGetPciInfo", handle)
    bus = _bus(getattr(pci, "busId", b""))
    on_bus = _device(root / "sys/bus/pci/devices" / bus) if bus else None
    memory = nvml.ask("DeviceGetMemoryInfo", handle)
    mask = nvml.reasons(handle)
    mode = nvml.ask("DeviceGetComputeMode", handle)
    mig = nvml.ask("DeviceGetMigMode", handle)
    return Gpu(
        index=index,
        vendor="NVIDIA",
        name=nvml.ask("DeviceGetName", handle) or "NVIDIA device",
        bus=bus,
        link=Link(
            generation=nvml.ask("DeviceGetCurrPcieLinkGeneration", handle),
            width=nvml.ask("DeviceGetCurrPcieLinkWidth", handle),
            most_generation=nvml.ask("DeviceGetMaxPcieLinkGeneration", handle),
            most_width=nvml.ask("DeviceGetMaxPcieLinkWidth", handle),
            card_generation=nvml.ask("DeviceGetGpuMaxPcieLinkGeneration", handle),
        ),
        numa_node=on_bus.numa_node if on_bus else None,
        near_processors=on_bus.near_processors if on_bus else frozenset(),
        memory_bytes=getattr(memory, "total", None),
        used_bytes=getattr(memory, "used", None),
        capability=nvml.ask("DeviceGetCudaComputeCapability", handle),
        nvlinks=_nvlinks(nvml, handle),
        throttle=None if mask is None else named(mask),
        idle=None if mask is None else is_idle(mask),
        clock_mhz=nvml.sm_clock_mhz(handle),
        most_clock_mhz=nvml.most_sm_clock_mhz(handle),
        temperature_c=nvml.temperature_c(handle),
        power_mw=nvml.ask("DeviceGetPowerUsage", handle),
        power_limit_mw=nvml.ask("DeviceGetEnforcedPowerLimit", handle),
        default_power_limit_mw=nvml.ask("DeviceGetPowerManagementDefaultLimit", handle),
        uncorrected_errors=nvml.ask("DeviceGetTotalEccErrors", handle, _ECC_UNCORRECTED, _ECC_SINCE_BOOT),
        repair_pending=_repair_pending(nvml, handle),
        compute_mode=None if mode is None else _COMPUTE_MODES.get(mode, f"mode {mode}"),
        mig=None if mig is None else bool(mig[0]),
    )


def _nvlinks(nvml: Nvml, handle: Any) -> tuple[int, int] | None:
    """NVLinks as (active, present); None where the device has none or does not tell."""
    active = present = 0
    for link in range(_MOST_NVLINKS):
        state = nvml.ask("DeviceGetNvLinkState", handle, link)
        if state is None:               # behind the last link
            break
        present += 1
        active += bool(state)
    return (active, present) if present else None


def _repair_pending(nvml: Nvml, handle: Any) -> bool | None:
    rows = nvml.ask("DeviceGetRemappedRows", handle)            # Ampere and later: corrected, uncorrected, pending, failed
    if rows is not None:
        return bool(rows[2] or rows[3])
    pages = nvml.ask("DeviceGetRetiredPagesPendingStatus", handle)
    return None if pages is None else bool(pages)


def _from_bus(root: Path) -> list[Gpu]:
    folder = root / "sys/bus/pci/devices"
    found = [gpu for path in sorted(listed(folder)) if (gpu := _device(path)) is not None]
    return [replace(gpu, index=index, name=_model(gpu, root) or gpu.name) for index, gpu in enumerate(found)]


def _device(path: Path) -> Gpu | None:
    """What sysfs says of one PCI device, when it is an accelerator of a vendor that torch supports."""
    vendor = _VENDORS.get(_text(path / "vendor").strip())
    if vendor is None or not _text(path / "class").startswith(_CLASSES):
        return None
    node = _number(_text(path / "numa_node"))
    return Gpu(
        index=0,
        vendor=vendor,
        name=_text(path / "product_name").strip() or f"{vendor} device",
        bus=path.name,
        link=Link(
            generation=_generation(_text(path / "current_link_speed")),
            width=_number(_text(path / "current_link_width")) or None,
            most_generation=_generation(_text(path / "max_link_speed")),
            most_width=_number(_text(path / "max_link_width")) or None,
        ),
        numa_node=node if node is not None and node >= 0 else None,    # -1: the firmware does not say
        near_processors=processors(_text(path / "local_cpulist")),
        memory_bytes=_number(_text(path / "mem_info_vram_total")),
        used_bytes=_number(_text(path / "mem_info_vram_used")),
    )


def _model(gpu: Gpu, root: Path) -> str:
    """The name in the NVIDIA driver's own files, which are there without NVML; empty where they are not."""
    information = _text(root / "proc/driver/nvidia/gpus" / gpu.bus / "information")
    model = re.search(r"^Model:[ \t]*(\S.*?)\s*$", information, re.MULTILINE)
    return model[1] if model else ""


def _bus(text: bytes | str) -> str:
    """NVML's "00000000:17:00.0" as sysfs writes it: "0000:17:00.0"."""
    address = text.decode(errors="replace") if isinstance(text, bytes) else text
    match = re.fullmatch(r"([0-9a-fA-F]{4,8}):([0-9a-fA-F]{2}):([0-9a-fA-F]{2})\.([0-7])", address.strip("\0 "))
    return f"{match[1][-4:]}:{match[2]}:{match[3]}.{match[4]}".lower() if match else ""


def _generation(speed: str) -> int | None:
    """"16.0 GT/s PCIe" as 4; None for "Unknown" and what is yet to come."""
    return _GENERATIONS.get(speed.split(" ")[0].strip())


def _number(text: str) -> int | None:
    return int(text) if re.fullmatch(r"-?\d{1,19}", text.strip()) else None


def _text(path: Path) -> str:
    """A small file's text; empty where it is missing or forbidden, as many files of /sys are in containers."""
    try:
        with open(path, "rb") as file:
            return file.read(1 << 16).decode("utf-8", "replace")
    except OSError:
        return ""
