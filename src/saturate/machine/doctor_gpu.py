"""The accelerators: do driver and torch match, are they linked and placed well, does anything hold their clocks down?

Every function takes the devices that `gpus.observe` found; one check speaks for all devices of the machine.

Sources: NVIDIA CUDA compatibility guide (minor version compatibility), CUDA C++ programming guide (binary and PTX
compatibility; tensor core formats by compute capability), AMD CDNA 2, 3 and 4 instruction set references.
"""

from __future__ import annotations

import dataclasses
import datetime
import re
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from saturate.machine import facts, gpus, releases
from saturate.machine.checks import Check
from saturate.machine.gpus import Gpu
from saturate.machine.nvml import Nvml

NO_ACCELERATOR = "no accelerator"
_OTHERS_BYTES = 1 << 30
_START_WITH_GPUS = "start the container with its GPUs (docker run --gpus all), or load the driver (sudo modprobe nvidia)"
#: Tensor core formats by compute capability, the newest first; a device has those of the first entry at or below its own.
_TENSOR_CORES = (
    ((12, 0), "tf32, bf16, fp16, int8, fp8, fp6, fp4"),
    ((10, 0), "tf32, bf16, fp16, int8, fp8, fp6, fp4, fp64"),
    ((9, 0), "tf32, bf16, fp16, int8, fp8, fp64"),
    ((8, 9), "tf32, bf16, fp16, int8, int4, fp8"),
    ((8, 6), "tf32, bf16, fp16, int8, int4"),
    ((8, 0), "tf32, bf16, fp16, int8, int4, fp64"),
    ((7, 2), "fp16, int8, int4"),
    ((7, 0), "fp16"),
)
_MATRIX_CORES = {
    "gfx90a": "fp32, bf16, fp16, int8, fp64",
    "gfx942": "fp32, tf32, bf16, fp16, int8, fp8, fp64",
    "gfx950": "fp32, bf16, fp16, int8, fp8, fp6, fp4, fp64",
}
_THROTTLE_FIXES = {
    "hw_thermal_slowdown": "cool it: check fans and air flow, then nvidia-smi -q -d TEMPERATURE",
    "sw_thermal_slowdown": "cool it: check fans and air flow, then nvidia-smi -q -d TEMPERATURE",
    "hw_power_brake_slowdown": "check the power supply and its cables: the board itself asks for less power",
    "hw_slowdown": "check cooling and power supply: nvidia-smi -q -d PERFORMANCE,TEMPERATURE,POWER",
    "applications_clocks_setting": "sudo nvidia-smi -rac; sudo nvidia-smi -rgc",
    "sync_boost": "take the device out of its sync boost group (dcgmi group)",
    "display_clock_setting": "sudo nvidia-smi -rgc",
}


@dataclasses.dataclass(frozen=True)
class Machine:
    """All that is known of the accelerators. `error`: why NVML says nothing."""

    gpus: tuple[Gpu, ...] = ()
    driver: str = ""                            # NVIDIA's
    driver_cuda: tuple[int, int] | None = None  # the newest CUDA that this driver knows
    lost: tuple[int, ...] = ()                  # numbers of devices that NVML counts and cannot open
    reachable: bool = True                      # NVIDIA devices are there for this process, not only on the bus
    error: str = ""
    absent: bool = False                        # no driver, and a bus that was read has no card on it


def observe(nvml: Nvml | None, error: str, root: Path) -> Machine:
    driver, cuda, lost = gpus.driver_version(root), None, ()
    if nvml is not None:
        lost = nvml.lost()
        driver = nvml.ask("SystemGetDriverVersion") or driver
        number = nvml.ask("SystemGetCudaDriverVersion_v2")
        cuda = (number // 1000, number % 1000 // 10) if number else None
    reachable = nvml is not None or (root / "dev/nvidiactl").exists()
    found = tuple(gpus.observe(nvml, root))
    # Without a bus (some sandboxes and virtual machines) a card may be there all the same.
    absent = not found and not gpus.possible(root) and any((root / "sys/bus/pci/devices").glob("*"))
    return Machine(found, driver, cuda, lost, reachable, error, absent)


def device(machine: Machine, asked: dict[str, Any]) -> Check:
    """Which accelerators there are, and whether torch can use them."""
    build = asked.get("cuda_build")
    nvidia = [gpu for gpu in machine.gpus if gpu.vendor == "NVIDIA"]
    values = _values(machine, "name", "memory_bytes", "capability")
    if "version mismatch" in machine.error.lower():
        return Check("gpu", "problem", f"{machine.error}: the driver was updated while its old module is still loaded",
                     "reboot", values)
    if machine.lost:
        return Check("gpu", "problem", f"GPU {_ranges(machine.lost)} does not answer: it fell off the bus",
                     "look for Xid in `dmesg`, then reboot", values)
    if not machine.gpus:
        if build and machine.absent and not asked.get("cuda_available"):
            return Check("gpu", "ok", "none; this torch is a CUDA build and will use the CPU", values=values)
        if build and not asked.get("cuda_available"):
            return Check("gpu", "note", f"{machine.error or 'no device'}; this torch is a CUDA build and will use the CPU",
                         _START_WITH_GPUS, values)
        if asked.get("cuda_available"):
            names = ", ".join(asked.get("devices", ["known to torch"]))
            return Check("gpu", "ok", f"{names} (only torch sees it: {machine.error})", values=values)
        return Check("gpu", "ok", f"none: {machine.error or 'no device'}", values=values)
    found = _counted([f"{gpu.name} {facts.gibibytes(gpu.memory_bytes)}" if gpu.memory_bytes else gpu.name
                      for gpu in machine.gpus])
    if nvidia and not machine.reachable and not asked.get("cuda_available"):
        return Check("gpu", "note", f"{found} on the bus, but not for this process: {machine.error}",
                     _START_WITH_GPUS, values)
    if "torch" not in asked:
        return Check("gpu", "ok", found, values=values)
    if asked.get("cuda_available"):
        missing = _unsupported(asked)
        if missing:
            return Check("gpu", "problem", f"{found}; but this torch has no code for {', '.join(missing)}",
                         "install a torch whose CUDA build covers it: pytorch.org/get-started", values)
        return Check("gpu", "ok", found, values=values)
    if nvidia and not build:
        wanted = f"CUDA {machine.driver_cuda[0]}" if machine.driver_cuda else "CUDA"
        return Check("gpu", "note", f"{found}; but this torch is a {'ROCm' if asked.get('rocm_build') else 'CPU'} build",
                     f"install a torch that is built for {wanted}: pytorch.org/get-started", values)
    if not nvidia and not asked.get("rocm_build"):
        return Check("gpu", "note", f"{found}; but this torch is not built for ROCm",
                     "install a torch that is built for ROCm: pytorch.org/get-started", values)
    if not nvidia:
        return Check("gpu", "problem", f"{found}; but torch cannot use it",
                     "sudo usermod -aG render,video $USER and log in anew; in docker: --device=/dev/kfd --device=/dev/dri",
                     values)
    if machine.driver_cuda and _parts(build)[0] > machine.driver_cuda[0]:
        return Check("gpu", "problem", f"{found}; its driver knows CUDA {_dotted(machine.driver_cuda)}, this torch is built "
                                       f"for CUDA {build}", _mend_driver(build, machine), values)
    reason = asked.get("errors", {}).get("cuda_init", "no reason given")
    return Check("gpu", "problem", f"{found}; but torch cannot use it: {reason}",
                 "look at CUDA_VISIBLE_DEVICES and at nvidia-smi", values)


def _mend_driver(build: str, machine: Machine) -> str:
    """Both ways out of a driver that is too old for torch's CUDA."""
    known = releases.table()
    oldest = known.oldest_driver.get(_parts(build)[0])
    driver = f"install NVIDIA driver {oldest} or later" if oldest else "update the NVIDIA driver"
    fitting = releases.newest_torch_for(machine.driver_cuda[0], known) if machine.driver_cuda else None
    if fitting is None:
        return driver
    return f"{driver}, or the CUDA {fitting[1]} build of torch {fitting[0]}: pytorch.org/get-started/previous-versions"


def _unsupported(asked: dict[str, Any]) -> list[str]:
    """Compute capabilities of this machine that torch has neither machine code nor PTX for."""
    architectures = asked.get("architectures") or []
    if not architectures:
        return []
    capabilities = dict.fromkeys((major, minor) for major, minor in asked.get("capabilities") or [])
    return [f"compute capability {_dotted(capability)}" for capability in capabilities
            if not any(_runs(architecture, capability) for architecture in architectures)]


def _runs(architecture: str, capability: tuple[int, int]) -> bool:
    """Whether code for "sm_86", "sm_90a" or "compute_120" runs on a device: machine code within one major version,
    PTX on all later ones, code with a letter (it uses what only that device has) on that device alone."""
    match = re.fullmatch(r"(sm|compute)_(\d+)(\d)([a-z]?)", architecture)
    if match is None:
        return False
    built = (int(match[2]), int(match[3]))
    if match[4] == "a":
        return built == capability
    if match[1] == "compute":
        return built <= capability
    return built[0] == capability[0] and built[1] <= capability[1]


def driver(machine: Machine, asked: dict[str, Any], today: datetime.date) -> Check:
    """The NVIDIA driver, which CUDA it knows, and whether it is still maintained."""
    if not machine.driver:
        return Check("driver", "ok", "no NVIDIA driver")
    known = releases.table()
    branch = releases.driver_branch(machine.driver)
    newest = _dotted(machine.driver_cuda) if machine.driver_cuda else None
    values: dict[str, Any] = {"version": machine.driver, "cuda": newest}
    found = machine.driver + (f", CUDA up to {newest}" if newest else "")
    build = asked.get("cuda_build")
    if build and machine.driver_cuda and _parts(build)[0] == machine.driver_cuda[0] and _parts(build) > machine.driver_cuda:
        found += f"; runs CUDA {build} by minor version compatibility"
    if branch is None:
        return Check("driver", "ok", found, values=values)
    maintained, words = releases.driver_support(branch, known, today)
    values["maintained"] = maintained
    if maintained is False:
        better = releases.recommended_driver(known, today)
        return Check("driver", "note", f"{found}; {words} (as of {known.as_of})",
                     f"install the {better.branch} driver ({better.kind}, until {better.until:%Y-%m})", values)
    return Check("driver", "ok", f"{found}; {words}", values=values)


def formats(machine: Machine, asked: dict[str, Any], cpu_bf16: bool) -> Check:
    """Which number formats the hardware multiplies matrices in."""
    cpu = f"CPU: bf16 {'' if cpu_bf16 else 'not '}native"
    words, values = [], {"cpu_bf16": cpu_bf16, "tensor_cores": None}
    capabilities = [gpu.capability for gpu in machine.gpus if gpu.capability] or \
        [(major, minor) for major, minor in asked.get("capabilities") or []]
    architecture = str(asked.get("gcn", "")).split(":")[0]
    if asked.get("rocm_build"):
        words = [f"matrix cores: {_MATRIX_CORES.get(architecture, f'not listed for {architecture}')}"] if architecture else []
    elif capabilities:
        each = [tensor_cores(capability) for capability in dict.fromkeys(capabilities)]
        values["tensor_cores"] = each
        words = [f"tensor cores: {formats or 'none'}" for formats in each]
    return Check("formats", "ok", "; ".join([*words, cpu]), values=values)


def tensor_cores(capability: tuple[int, int]) -> str:
    """The formats of a device's tensor cores; empty: it has none."""
    return next((formats for oldest, formats in _TENSOR_CORES if tuple(capability) >= oldest), "")


def links(machine: Machine) -> Check:
    """Width and generation of each device's way to the host, and its NVLinks."""
    if not machine.gpus:
        return Check("links", "ok", NO_ACCELERATOR)
    values = {"gpus": [{**dataclasses.asdict(gpu.link), "nvlinks": gpu.nvlinks} for gpu in machine.gpus]}
    found = _spread((gpu.index, _link_words(gpu)) for gpu in machine.gpus)
    narrow = [gpu for gpu in machine.gpus if (gpu.link.width or 99) < (gpu.link.most_width or 0)]
    slow = [gpu for gpu in machine.gpus if _slow_now(gpu)]
    down = [gpu for gpu in machine.gpus if gpu.nvlinks and gpu.nvlinks[0] < gpu.nvlinks[1]]
    fixes = []
    if narrow:
        fixes.append(f"seat {_which(narrow)} anew, in a slot with all its lanes connected; check the slot's bifurcation in "
                     "the firmware and any riser cable")
    if slow:
        fixes.append(f"set the slot of {_which(slow)} to its full PCIe generation in the firmware; check any riser cable")
    if down:
        fixes.append(f"{_which(down)}: nvidia-smi nvlink --status, then systemctl restart nvidia-fabricmanager")
    if fixes:
        return Check("links", "note", found, "; ".join(fixes), values)
    if all(value is None for gpu in machine.gpus for value in (gpu.link.width, gpu.link.generation)):
        return Check("links", "unknown", found, values=values)
    return Check("links", "ok", found, values=values)


def _slow_now(gpu: Gpu) -> bool:
    """The generation is low although the device works, or the slot is slower than the card."""
    link = gpu.link
    if link.card_generation and link.most_generation and link.most_generation < link.card_generation:
        return True
    return gpu.idle is False and bool(link.generation and link.most_generation) and link.generation < link.most_generation


def _link_words(gpu: Gpu) -> str:
    link = gpu.link
    if link.width is None and link.generation is None:
        words = "PCIe not told"
    else:
        words = f"PCIe {link.generation or '?'}.0 x{link.width or '?'}"
        if link.most_width and link.width and link.width < link.most_width:
            words += f" of x{link.most_width}: {link.width / link.most_width:.0%} of its host bandwidth"
        if link.generation and link.most_generation and link.generation < link.most_generation:
            best = f"{link.most_generation}.0"
            words += f" of {best}" if gpu.idle is False else f" ({best} when it works)"
        if link.card_generation and link.most_generation and link.most_generation < link.card_generation:
            words += f", the card could do {link.card_generation}.0"
    if gpu.nvlinks:
        words += f", NVLink {gpu.nvlinks[0]} of {gpu.nvlinks[1]} active"
    return words


def placement(machine: Machine, allowed: frozenset[int], nodes: int) -> Check:
    """NUMA: whether this process may run on the processors next to each device. `nodes`: of the machine, 0: not told."""
    placed = [gpu for gpu in machine.gpus if gpu.numa_node is not None]
    words = f"{nodes} NUMA node{'s' * (nodes > 1)}" if nodes else "NUMA not told"
    if placed:
        words += "; " + _spread((gpu.index, f"on node {gpu.numa_node}") for gpu in placed)
    values = {"nodes": nodes or None, "gpus": [gpu.numa_node for gpu in machine.gpus]}
    far = [gpu for gpu in placed if gpu.near_processors and allowed and not gpu.near_processors & allowed]
    if far and nodes > 1:
        wanted = sorted({gpu.numa_node for gpu in far if gpu.numa_node is not None})
        return Check("placement", "note", f"{words}; but this process may only run on processors far from {_which(far)}",
                     f"numactl --cpunodebind={wanted[0]} --membind={wanted[0]} COMMAND, or widen the container's cpuset "
                     "(docker --cpuset-cpus)", values)
    return Check("placement", "ok", words, values=values)


def clocks(machine: Machine) -> Check:
    """Throttling, power limits, temperature, and who else uses the devices, at this moment."""
    if not machine.gpus:
        return Check("clocks", "ok", NO_ACCELERATOR)
    told = [gpu for gpu in machine.gpus if gpu.throttle is not None]
    if not told:
        return Check("clocks", "unknown", f"not told: {machine.error or 'the devices do not say'}")
    values = _values(machine, "throttle", "idle", "clock_mhz", "most_clock_mhz", "temperature_c", "power_limit_mw")
    found = _spread((gpu.index, _clock_words(gpu)) for gpu in told)
    fixes = {}
    for reason, fix in _THROTTLE_FIXES.items():
        held = [gpu for gpu in told if reason in (gpu.throttle or ())]
        if held:
            fixes.setdefault(fix, f"{_which(held)}: {fix}")
    for gpu in told:
        if gpu.power_limit_mw and gpu.default_power_limit_mw and gpu.power_limit_mw < gpu.default_power_limit_mw:
            fixes[f"{gpu.index}"] = f"sudo nvidia-smi -i {gpu.index} -pl {gpu.default_power_limit_mw // 1000}"
    return Check("clocks", "note" if fixes else "ok", found, "; ".join(fixes.values()), values)


def _clock_words(gpu: Gpu) -> str:
    words = [f"{gpu.clock_mhz} of {gpu.most_clock_mhz} MHz"] if gpu.clock_mhz and gpu.most_clock_mhz else []
    words += ["idle"] if gpu.idle else []
    words += [f"held down by {', '.join(gpu.throttle)}"] if gpu.throttle else []
    words += [f"{gpu.temperature_c} C"] if gpu.temperature_c is not None else []
    if gpu.power_limit_mw and gpu.default_power_limit_mw and gpu.power_limit_mw < gpu.default_power_limit_mw:
        words.append(f"power limit {gpu.power_limit_mw // 1000} W of {gpu.default_power_limit_mw // 1000} W")
    return ", ".join(words) or "nothing holds the clocks down"


def health(machine: Machine) -> Check:
    """Memory errors, exclusive modes, and memory that others hold."""
    if not machine.gpus:
        return Check("gpu health", "ok", NO_ACCELERATOR)
    closed = [gpu for gpu in machine.gpus if gpu.compute_mode == "prohibited"]
    if closed:
        return Check("gpu health", "problem", f"{_which(closed)}: no process may compute on it", _compute_mode(closed))
    found, fixes = [], []
    errors = [gpu for gpu in machine.gpus if gpu.uncorrected_errors or gpu.repair_pending]
    if errors:
        found.append(f"{_which(errors)}: memory errors that could not be corrected, or a repair that waits for a reset")
        fixes.append("reboot; have a card replaced whose errors come back (nvidia-smi -q -d ECC,ROW_REMAPPER)")
    exclusive = [gpu for gpu in machine.gpus if gpu.compute_mode in ("exclusive process", "exclusive thread")]
    if exclusive:
        found.append(f"{_which(exclusive)} in {exclusive[0].compute_mode} mode: trials cannot share it")
        fixes.append(_compute_mode(exclusive))
    taken = [gpu for gpu in machine.gpus if (gpu.used_bytes or 0) > _OTHERS_BYTES]
    if taken:
        used = _spread((gpu.index, f"{facts.gibibytes(gpu.used_bytes)} of {facts.gibibytes(gpu.memory_bytes)}")
                       for gpu in taken)
        found.append(f"memory in use by others: {used}; they will disturb timings")
        fixes.append("end the other processes (nvidia-smi shows them), or pick a free device with CUDA_VISIBLE_DEVICES")
    if not found:
        found.append("no memory errors, nobody else on it" + (", MIG on" if any(gpu.mig for gpu in machine.gpus) else ""))
    return Check("gpu health", "note" if fixes else "ok", "; ".join(found), "; ".join(fixes))


def _values(machine: Machine, *names: str) -> dict[str, Any]:
    """Fields of every device, for programs."""
    return {"gpus": [{name: getattr(gpu, name) for name in names} for gpu in machine.gpus]}


def _compute_mode(those: Sequence[Gpu]) -> str:
    return f"sudo nvidia-smi -i {','.join(str(gpu.index) for gpu in those)} -c DEFAULT"


def _which(those: Sequence[Gpu]) -> str:
    return "GPU " + _ranges([gpu.index for gpu in those])


def _spread(entries: Iterable[tuple[int, str]]) -> str:
    """One text for devices that are alike: "0-6: x16; 7: x8", or only "x16" where all are."""
    groups: dict[str, list[int]] = {}
    for index, words in entries:
        groups.setdefault(words, []).append(index)
    if len(groups) == 1:
        return next(iter(groups))
    return "; ".join(f"{_ranges(indices)}: {words}" for words, indices in groups.items())


def _ranges(numbers: Sequence[int]) -> str:
    """[0, 1, 2, 5] as "0-2,5"."""
    runs: list[list[int]] = []
    for number in sorted(numbers):
        if runs and number == runs[-1][1] + 1:
            runs[-1][1] = number
        else:
            runs.append([number, number])
    return ",".join(str(first) if first == last else f"{first}-{last}" for first, last in runs)


def _counted(names: Sequence[str]) -> str:
    counts = {name: names.count(name) for name in names}
    return ", ".join(name if count == 1 else f"{count} x {name}" for name, count in counts.items())


def _dotted(version: tuple[int, int]) -> str:
    return f"{version[0]}.{version[1]}"


def _parts(version: str) -> tuple[int, int]:
    major, _, minor = version.partition(".")
    return int(major), int(minor.split(".")[0] or 0)
