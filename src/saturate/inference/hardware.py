"""The machine that an artifact was made on, and how this one differs from it."""

from __future__ import annotations

import platform
from collections.abc import Sequence
from importlib import metadata
from typing import Any

import saturate
from saturate.errors import ArtifactDamaged
from saturate.machine import facts as machine
from saturate.records.artifact import MadeOn

#: Instruction sets that decide how fast a program of low precision is, what it answers, or whether it runs at all.
#: Without VNNI, products of 8-bit integers may saturate (onnxruntime's documentation on quantization): the same file
#: answers otherwise.
FLAGS = (
    "avx2",
    "fma",
    "f16c",
    "avx512f",
    "avx512bw",
    "avx512_vnni",
    "avx_vnni",
    "avx512_bf16",
    "avx512_fp16",
    "amx_tile",
    "amx_int8",
    "amx_bf16",
    "asimd",
    "asimddp",
    "i8mm",
    "bf16",
    "sve",
)


def here(torch: Any, device: str, threads: int, packages: Sequence[str]) -> MadeOn:
    """This machine and the installed versions of `packages`. device: "cpu", "cuda" (the current one) or "cuda:1". Raises
    ArtifactDamaged for what no package can be called."""
    information = machine.cpu_information()
    flags = set((information.get("flags", "") or information.get("Features", "")).split())
    kind = device.partition(":")[0]
    index = _index(device)
    gpu = kind == "cuda" and torch.cuda.is_available()
    return MadeOn(
        device=kind,
        device_index=index,
        device_name=gpu_name(torch, device),
        capability=torch.cuda.get_device_capability(index) if gpu else None,
        architecture=platform.machine(),
        cpu=machine.cpu_name(),
        cpu_flags=[flag for flag in FLAGS if flag in flags],
        threads=threads,
        system=platform.system(),
        python=platform.python_version(),
        saturate=saturate.__version__,
        versions={name: version for name in packages if (version := _version(torch, name))},
    )


def gpu_name(torch: Any, device: str) -> str:
    """Of a device as in `here`; "" for the CPU."""
    gpu = device.partition(":")[0] == "cuda" and torch.cuda.is_available()
    return str(torch.cuda.get_device_name(_index(device))) if gpu else ""


def _index(device: str) -> int | None:
    number = device.partition(":")[2]
    return int(number) if number.isdecimal() else None


def _version(torch: Any, package: str) -> str:
    if package == "torch":
        return str(torch.__version__)
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return ""
    except ValueError as error:             # of an artifact's manifest: we name none so
        raise ArtifactDamaged(f"the artifact was made with a package {package!r:.100}, which is no name of one", cause=str(error),
                              remedy="copy it again from where it was made, or make it again") from error


def other_hardware(made: MadeOn, now: MadeOn) -> list[str]:
    """What may change the answers, or keep the program from running: one sentence each."""
    found = []
    if (made.system, made.architecture) != (now.system, now.architecture):
        found.append(f"it was made on {made.system} {made.architecture}, and this is {now.system} {now.architecture}")
    if made.device == "cuda" and (made.device_name, made.capability) != (now.device_name, now.capability):
        found.append(f"it was made on {made.device_name or 'another GPU'}, and this is {now.device_name}")
    lacking = [flag for flag in made.cpu_flags if flag not in now.cpu_flags]
    if lacking:
        found.append(f"this processor lacks {', '.join(lacking)}, which the one it was made on has")
    more = [flag for flag in now.cpu_flags if flag not in made.cpu_flags]
    if more and not lacking:
        found.append(f"this processor has {', '.join(more)}, which the one it was made on lacks")
    return found


def other_software(made: MadeOn, now: MadeOn) -> list[str]:
    """Other versions than it was made with, to the second number."""
    found = []
    for name, version in made.versions.items():
        if name not in now.versions:
            found.append(f"{name} {version} is not installed here")
        elif _minor(version) != _minor(now.versions[name]):
            found.append(f"it was made with {name} {version}, and {now.versions[name]} is installed")
    return found


def _minor(version: str) -> str:
    return ".".join(version.split("+")[0].split(".")[:2])
