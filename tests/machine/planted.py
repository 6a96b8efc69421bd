"""Machines to plant: folders that stand for `/`, and an NVML that knows the devices it is told of."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any


def plant(root: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


class FakeNvml:
    """The functions of nvidia-ml-py that saturate calls. A device is a dict: "Name": what nvmlDeviceGetName answers; what it
    does not hold is not supported, and a value that is an exception is raised."""

    class NVMLError(Exception):
        pass

    def __init__(self, *devices: dict[str, Any], driver: str = "580.65.06", cuda: int = 13000, broken: str = ""):
        self.devices = devices
        self.driver = driver
        self.cuda = cuda
        self.broken = broken
        self.initialized = 0
        self.asked = 0

    def nvmlInit(self) -> None:
        if self.broken:
            raise self.NVMLError(self.broken)
        self.initialized += 1

    def nvmlShutdown(self) -> None:
        self.initialized -= 1

    def nvmlSystemGetDriverVersion(self) -> str:
        return self.driver

    def nvmlSystemGetCudaDriverVersion_v2(self) -> int:
        return self.cuda

    def nvmlDeviceGetCount(self) -> int:
        return len(self.devices)

    def nvmlDeviceGetHandleByIndex(self, index: int) -> dict[str, Any]:
        if self.devices[index].get("lost"):
            raise self.NVMLError("GPU is lost")
        return self.devices[index]

    def nvmlDeviceGetNvLinkState(self, handle: dict[str, Any], link: int) -> int:
        links = handle.get("NvLinks", ())
        if link >= len(links):
            raise self.NVMLError("Invalid Argument")
        return links[link]

    def __getattr__(self, name: str) -> Any:
        if not name.startswith("nvmlDeviceGet"):
            raise AttributeError(name)

        def answer(handle: dict[str, Any], *_: Any) -> Any:
            assert self.initialized, "asked after it was shut down"
            self.asked += 1
            value = handle.get(name.removeprefix("nvmlDeviceGet"))
            if value is None:
                raise self.NVMLError("Not Supported")
            if isinstance(value, Exception):
                raise value
            return value() if callable(value) else value

        return answer


def h100(bus: str = "00000000:17:00.0", **others: Any) -> dict[str, Any]:
    """A healthy H100 SXM that works at full clock; `others` replace what it answers."""
    return {
        "Name": "NVIDIA H100 80GB HBM3",
        "UUID": "GPU-0a1b2c3d-1111-2222-3333-444455556666",
        "PciInfo": SimpleNamespace(busId=bus.encode()),
        "MemoryInfo": SimpleNamespace(total=80 << 30, used=100 << 20),
        "CudaComputeCapability": (9, 0),
        "CurrPcieLinkGeneration": 5, "MaxPcieLinkGeneration": 5, "GpuMaxPcieLinkGeneration": 5,
        "CurrPcieLinkWidth": 16, "MaxPcieLinkWidth": 16,
        "NvLinks": (1,) * 18,
        "CurrentClocksEventReasons": 0,
        "ClockInfo": 1980, "MaxClockInfo": 1980, "Temperature": 45,
        "PowerUsage": 350_000, "EnforcedPowerLimit": 700_000, "PowerManagementDefaultLimit": 700_000,
        "TotalEccErrors": 0, "RemappedRows": (0, 0, 0, 0), "ComputeMode": 0, "MigMode": [0, 0],
        **others,
    }


def card(root: Path, bus: str = "0000:17:00.0", vendor: str = "0x10de", node: int = 0, cpus: str = "0-7", **files: str) -> Path:
    """A PCI display controller in a planted /sys."""
    folder = f"sys/bus/pci/devices/{bus}/"
    return plant(root, {folder + name: text + "\n" for name, text in {
        "vendor": vendor, "class": "0x030200", "numa_node": str(node), "local_cpulist": cpus,
        "current_link_speed": "32.0 GT/s PCIe", "max_link_speed": "32.0 GT/s PCIe",
        "current_link_width": "16", "max_link_width": "16", **files}.items()})
