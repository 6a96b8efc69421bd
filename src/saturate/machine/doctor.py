"""Is this machine, this folder and this Python ready for `saturate tune`, and if not, what exactly fixes it?

Each probe runs by itself: one that breaks reports that it broke, and the others still answer. Standard library only
(NVML if it is installed), because a doctor must not need what it is looking for; torch is asked in a process of its own.
"""

from __future__ import annotations

import datetime
import os
import shutil
import sys
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

from saturate.machine import (
    doctor_ceilings,
    doctor_disk,
    doctor_gpu,
    doctor_host,
    doctor_python,
    facts,
    gpus,
    nvml,
    redaction,
)
from saturate.machine.checks import STATUSES, Check, Probe, isolated, within

__all__ = ["STATUSES", "Check", "Probe", "examine", "interpreter", "redacted"]

_EXTRA_SECONDS = 30.0
_FILE_SYSTEM_SECONDS = 5.0          # for what may block on a dead network file system


def interpreter(python: str | None) -> str:
    """The workload's Python: the one that was named, else the one on PATH, else ours."""
    return python or shutil.which("python") or shutil.which("python3") or sys.executable


def examine(python: str | None, folder: Path, extra: Iterable[tuple[str, Probe]] = (), *, data: Path | None = None,
            measure: bool = False, root: Path = Path("/"), nvml_module: Any = None,
            today: datetime.date | None = None) -> list[Check]:
    """Every check, in the order to show them; those of a device's links, clocks and health only where there is a device.
    Never raises.

    `python` is the workload's interpreter (None: the one on PATH), `folder` where `tune` would run, `data` where the data
    lies (None: in `folder`), `extra` are probes of rooms that this one may not import. `measure`: measure the ceilings
    now, instead of showing those that were measured before. `root` stands for `/` and
    `nvml_module` for nvidia-ml-py, for tests.
    """
    program = interpreter(python)
    day = datetime.date.today() if today is None else today
    asked: dict[str, Any] = {}
    devices = _Devices(nvml_module, root)

    probes: list[tuple[str, Probe]] = [
        ("system", lambda: doctor_host.system(root)),
        ("saturate", doctor_host.dependencies),
        ("python", lambda: doctor_python.python(program, asked)),
        ("torch", lambda: doctor_python.torch(program, asked, devices.machine().driver_cuda)),
        ("libraries", lambda: doctor_python.libraries(program, asked)),
        ("gpu", lambda: doctor_gpu.device(devices.machine(), asked)),
        ("driver", lambda: doctor_gpu.driver(devices.machine(), asked, day)),
        ("formats", lambda: doctor_gpu.formats(devices.machine(), asked, facts.observe(root=root).cpu_bf16_native)),
        ("links", lambda: doctor_gpu.links(devices.machine())),
        ("placement", lambda: doctor_gpu.placement(devices.machine(), doctor_host.allowed_processors(root),
                                                   doctor_host.numa_nodes(root))),
        ("clocks", lambda: doctor_gpu.clocks(devices.machine())),
        ("gpu health", lambda: doctor_gpu.health(devices.machine())),
        ("ceilings", lambda: doctor_ceilings.ceilings(program, asked, devices.link(), measure)),
        ("cpu", lambda: doctor_host.cpu(root)),
        ("cpu clock", lambda: doctor_host.governor(root)),
        ("memory", lambda: doctor_host.memory(root)),
        ("huge pages", lambda: doctor_host.huge_pages(root)),
        ("shared memory", lambda: doctor_host.shared_memory(root)),
        ("limits", lambda: doctor_host.limits(root)),
        ("settings", lambda: doctor_host.settings(os.environ, root)),
        ("compiler", lambda: doctor_host.compiler(program)),
        ("headers", lambda: doctor_python.headers(asked, doctor_host.install("python3-dev"))),
        ("allocator", lambda: doctor_host.allocator(program)),
        ("profilers", doctor_host.profilers),
    ]
    checks = [isolated(name, probe) for name, probe in probes]
    checks = [check for check in checks if check.found != doctor_gpu.NO_ACCELERATOR]
    checks += [within(_EXTRA_SECONDS, name, probe) for name, probe in extra]
    where = folder if data is None else data
    checks += [within(_FILE_SYSTEM_SECONDS, name, probe) for name, probe in (
        ("folder", lambda: doctor_disk.folder(folder)),
        ("disk", lambda: doctor_disk.space(folder)),
        ("read rate", lambda: doctor_disk.read_rate(where, doctor_host.virtual(root), root)),
    )]
    return checks


class _Devices:
    """The accelerators, looked at once, inside the first probe that needs them: what breaks is then reported."""

    def __init__(self, module: Any, root: Path):
        self._module = module
        self._root = root
        self._machine: doctor_gpu.Machine | None = None

    def machine(self) -> doctor_gpu.Machine:
        if self._machine is None:
            opened, error = nvml.start(self._module)
            if opened is None:
                self._machine = doctor_gpu.observe(None, error, self._root)
            else:
                with opened:
                    self._machine = doctor_gpu.observe(opened, "", self._root)
        return self._machine

    def link(self) -> gpus.Link | None:
        """Of the first device."""
        found = self.machine().gpus
        return found[0].link if found else None


def redacted(check: Check, *, names: bool) -> Check:
    """The check as it may be shown: without secrets and control characters, with `names` also without what identifies
    the user and the machine."""

    def change(text: str) -> str:
        text = redaction.printable(redaction.without_secrets(text))
        return redaction.without_names(text) if names else text

    return replace(check, found=change(check.found), fix=change(check.fix), values=redaction.each_text(check.values, change))
