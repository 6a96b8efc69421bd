"""Is this machine, this folder and this Python ready for `saturate tune`, and if not, what exactly fixes it?

Each probe runs by itself: one that breaks reports that it broke, and the others still answer. Standard library only
(NVML if it is installed), because a doctor must not need what it is looking for; torch is asked in a process of its own.
"""

from __future__ import annotations

import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from saturate.machine import facts

#: ok; note: works, could be better; problem: `tune` cannot work; unknown: could not be found out.
STATUSES = ("ok", "note", "problem", "unknown")

_TORCH_TIMEOUT_S = 120
_LEAST_FREE_BYTES = 1 << 28
_GOOD_FREE_BYTES = 4 << 30
_SMALL_SHM_BYTES = 1 << 30

#: Runs in the workload's Python. Written for old ones too: it must say its version before anything can fail.
_ASK_PYTHON = """
import json, sys
answer = {"version": sys.version.split()[0], "executable": sys.executable}
if sys.argv[1:] == ["torch"]:
    import torch
    answer["torch"] = torch.__version__
    answer["cuda_build"] = torch.version.cuda
    answer["rocm_build"] = getattr(torch.version, "hip", None)
    answer["cuda_available"] = torch.cuda.is_available()
    if answer["cuda_available"]:
        answer["cuda_bf16"] = torch.cuda.get_device_capability(0) >= (8, 0)
    elif torch.version.cuda:
        try:
            torch.cuda.init()
        except Exception as error:
            answer["cuda_error"] = str(error).splitlines()[0][:200]
sys.__stdout__.write("\\n" + json.dumps(answer) + "\\n")
"""


@dataclass(frozen=True)
class Check:
    """What one probe found. `fix` is a command or a step, empty when there is nothing to do."""

    name: str
    status: str
    found: str
    fix: str = ""


Probe = Callable[[], Check]


def examine(python: str | None, folder: Path, extra: Iterable[tuple[str, Probe]] = ()) -> list[Check]:
    """Every check, in the order to show them. `python` is the workload's interpreter (None: the one on PATH), `folder`
    where `tune` would run, `extra` are probes of rooms that this one may not import. Never raises."""
    interpreter = python or shutil.which("python") or shutil.which("python3") or sys.executable
    asked: dict[str, Any] = {}
    probes: list[tuple[str, Probe]] = [
        ("system", _system),
        ("saturate", _dependencies),
        ("python", lambda: _python(interpreter, asked)),
        ("torch", lambda: _torch(interpreter, asked)),
        ("gpu", lambda: _gpu(_Gpu(), asked)),
        ("cpu", _cpu),
        ("bf16", lambda: _bf16(asked)),
        ("memory", _memory),
        ("shared memory", _shared_memory),
        ("compiler", lambda: _compiler(interpreter)),
        ("allocator", lambda: _allocator(interpreter)),
        *extra,
        ("folder", lambda: _folder(folder)),
        ("disk", lambda: _disk(folder)),
    ]
    return [_isolated(name, probe) for name, probe in probes]


def _isolated(name: str, probe: Probe) -> Check:
    try:
        return probe()
    except Exception as error:  # noqa: BLE001 - whatever is broken here is what the doctor reports, and it goes on
        return Check(name, "unknown", f"this check itself failed: {type(error).__name__}: {error}")


def _system() -> Check:
    if sys.platform == "linux":
        return Check("system", "ok", f"Linux {os.uname().release}, {os.uname().machine}")
    return Check("system", "problem", f"{sys.platform}: races freeze and thaw processes through Linux's /proc",
                 "run saturate on Linux (a container or WSL 2 will do)")


def _dependencies() -> Check:
    needed = {"msgspec": "msgspec", "tomlkit": "tomlkit", "rich": "rich", "pynvml": "nvidia-ml-py"}
    missing = [package for module, package in needed.items() if importlib.util.find_spec(module) is None]
    if missing:
        return Check("saturate", "problem", f"{', '.join(missing)} not installed next to saturate",
                     f"{sys.executable} -m pip install {' '.join(missing)}")
    return Check("saturate", "ok", f"Python {sys.version.split()[0]}, all dependencies found")


def _ask(python: str, *arguments: str) -> dict[str, Any]:
    """The answer of the workload's Python. Raises ValueError with the reason when there is none."""
    try:
        done = subprocess.run([python, "-c", _ASK_PYTHON, *arguments], capture_output=True, text=True, errors="replace",
                              timeout=_TORCH_TIMEOUT_S, stdin=subprocess.DEVNULL)
    except subprocess.TimeoutExpired:
        raise ValueError(f"no answer within {_TORCH_TIMEOUT_S} s") from None
    except OSError as error:
        raise ValueError(error.strerror or str(error)) from None
    lines = done.stdout.strip().splitlines()
    if done.returncode == 0 and lines:
        try:
            return json.loads(lines[-1])
        except json.JSONDecodeError:
            raise ValueError(f"it answers {lines[-1][:100]!r}: is it a Python?") from None
    last = done.stderr.strip().splitlines()[-1:] or ["it printed nothing"]
    raise ValueError(f"exit code {done.returncode}: {last[0][:300]}")


def _python(python: str, asked: dict[str, Any]) -> Check:
    try:
        asked.update(_ask(python))
    except ValueError as error:
        return Check("python", "problem", f"{python} does not run: {error}",
                     "name the Python of your training: saturate doctor --python PATH")
    found = f"{asked['version']} ({asked['executable']})"
    if tuple(int(part) for part in re.findall(r"\d+", asked["version"])[:2]) < (3, 11):
        return Check("python", "problem", found, "the agent needs Python 3.11 or later in the training's environment")
    return Check("python", "ok", found)


def _torch(python: str, asked: dict[str, Any]) -> Check:
    if not asked:
        return Check("torch", "unknown", "the workload's Python does not run")
    try:
        asked.update(_ask(python, "torch"))
    except ValueError as error:
        if "No module named 'torch'" in str(error):
            return Check("torch", "problem", f"not installed for {python}",
                         f"{python} -m pip install torch, or name another Python: saturate doctor --python PATH")
        return Check("torch", "problem", f"installed, but `import torch` fails: {error}",
                     f"{python} -m pip install --force-reinstall torch")
    build = f"CUDA {asked['cuda_build']}" if asked["cuda_build"] else \
        f"ROCm {asked['rocm_build']}" if asked["rocm_build"] else "CPU only"
    return Check("torch", "ok", f"{asked['torch']} ({build})")


class _Gpu:
    """What NVML says. `error` is why it says nothing."""

    def __init__(self) -> None:
        self.names: list[str] = []
        self.driver = ""
        self.cuda: tuple[int, int] | None = None
        self.error = ""
        try:
            import pynvml
        except ImportError:
            self.error = "nvidia-ml-py is not installed"
            return
        try:
            pynvml.nvmlInit()
        except pynvml.NVMLError as error:
            self.error = f"no NVIDIA driver ({error})"
            return
        try:
            self._query(pynvml)
        except pynvml.NVMLError as error:
            self.error = f"NVML: {error}"
        finally:
            pynvml.nvmlShutdown()

    def _query(self, nvml: Any) -> None:
        self.driver = _decoded(nvml.nvmlSystemGetDriverVersion())
        version = nvml.nvmlSystemGetCudaDriverVersion_v2()
        self.cuda = (version // 1000, version % 1000 // 10)
        for index in range(nvml.nvmlDeviceGetCount()):
            handle = nvml.nvmlDeviceGetHandleByIndex(index)
            name = _decoded(nvml.nvmlDeviceGetName(handle))
            try:
                name += f" {facts.gibibytes(nvml.nvmlDeviceGetMemoryInfo(handle).total)}"
            except nvml.NVMLError:  # devices with unified memory do not tell
                pass
            self.names.append(name)


def _gpu(gpu: _Gpu, asked: dict[str, Any]) -> Check:
    build = asked.get("cuda_build")
    if not gpu.names:
        if build:
            return Check("gpu", "note", f"{gpu.error or 'no device'}; this torch is a CUDA build and will use the CPU",
                         "start the container with its GPUs (docker run --gpus all), or load the driver")
        return Check("gpu", "ok", f"none: {gpu.error or 'no device'}")
    found = f"{', '.join(gpu.names)}; driver {gpu.driver}, CUDA up to {'.'.join(map(str, gpu.cuda or ()))}"
    if "torch" not in asked:
        return Check("gpu", "ok", found)
    if asked.get("cuda_available") or asked.get("rocm_build"):
        return Check("gpu", "ok", found)
    if not build:
        return Check("gpu", "note", f"{found}; but this torch is a CPU build",
                     f"install a torch that is built for CUDA {gpu.cuda[0] if gpu.cuda else ''}".rstrip())
    if gpu.cuda and int(build.split(".")[0]) > gpu.cuda[0]:
        return Check("gpu", "problem", f"{found}; but this torch is built for CUDA {build}",
                     f"update the NVIDIA driver, or install a torch that is built for CUDA {gpu.cuda[0]}")
    return Check("gpu", "problem", f"{found}; but torch cannot use it: {asked.get('cuda_error', 'no reason given')}",
                 "look at CUDA_VISIBLE_DEVICES and at nvidia-smi")


def _decoded(text: str | bytes) -> str:
    return text.decode() if isinstance(text, bytes) else text


def _cpu() -> Check:
    allowed, usable, cores = facts.affinity_count(), facts.cpu_count(), facts.physical_cores()
    found = f"{facts.cpu_name()}: {allowed} logical processors" + (f", {cores} physical cores" if cores else "")
    if usable < allowed:
        return Check("cpu", "note", f"{found}, but a quota of {usable:g} cores",
                     f"torch starts {allowed} threads for {usable:g} cores: raise the quota (docker --cpus), or let tune try cpu-threads")
    return Check("cpu", "ok", found)


def _bf16(asked: dict[str, Any]) -> Check:
    if "cuda_bf16" in asked:
        native, where = asked["cuda_bf16"], "on the GPU"
    else:
        native, where = facts.observe().cpu_bf16_native, "on the CPU"
    return Check("bf16", "ok", f"{'native' if native else 'not native'} {where}")


def _memory() -> Check:
    size = facts.memory_bytes()
    return Check("memory", "ok" if size else "unknown", facts.gibibytes(size))


def _shared_memory() -> Check:
    free = facts.free_bytes(Path("/dev/shm"))
    if free is None:
        return Check("shared memory", "note", "no /dev/shm", "loader workers need it: mount a tmpfs at /dev/shm")
    if free < _SMALL_SHM_BYTES:
        return Check("shared memory", "note", f"{facts.gibibytes(free)} free in /dev/shm: loader workers may die with 'Bus error'",
                     "docker run --shm-size=8g (or --ipc=host); elsewhere: mount -o remount,size=8g /dev/shm")
    return Check("shared memory", "ok", f"{facts.gibibytes(free)} free in /dev/shm")


def _compiler(python: str) -> Check:
    found = facts.compiler(os.environ, facts.prefix_of(python))
    if found:
        return Check("compiler", "ok", found)
    other = shutil.which("clang++")
    if other:
        return Check("compiler", "note", f"only {other}, which torch does not look for", f"export CXX={other}")
    return Check("compiler", "note", "no C++ compiler: torch.compile cannot work on the CPU", _install("g++", {
        "dnf": "gcc-c++", "yum": "gcc-c++", "zypper": "gcc-c++", "pacman": "gcc"}))


def _allocator(python: str) -> Check:
    found = facts.allocators(prefix=facts.prefix_of(python))
    if found:
        return Check("allocator", "ok", ", ".join(f"{name} ({path})" for name, path in found))
    return Check("allocator", "note", "neither jemalloc nor tcmalloc: one technique fewer on the CPU", _install("libjemalloc2", {
        "dnf": "jemalloc", "yum": "jemalloc", "pacman": "jemalloc", "apk": "jemalloc", "zypper": "jemalloc"}))


def _install(package: str, other_names: dict[str, str]) -> str:
    """The command of the package manager that is here."""
    verbs = {"apt-get": "install -y", "dnf": "install -y", "yum": "install -y", "zypper": "install -y", "pacman": "-S", "apk": "add"}
    for manager, verb in verbs.items():
        if shutil.which(manager):
            root = "" if os.geteuid() == 0 else "sudo "
            return f"{root}{manager} {verb} {other_names.get(manager, package)}"
    return f"install {package} with your system's package manager"


def _folder(folder: Path) -> Check:
    """Whether the study can be written, without leaving anything behind."""
    study = folder / ".saturate"
    target = study if study.exists() else folder
    try:
        with tempfile.NamedTemporaryFile(dir=target, prefix=".saturate-doctor-") as file:
            file.write(b"x")
            file.flush()
    except OSError as error:
        return Check("folder", "problem", f"cannot write to {target}: {error.strerror}",
                     "work in a folder of your own, or choose another for the study: saturate tune --dir PATH")
    return Check("folder", "ok", f"{target} is writable")


def _disk(folder: Path) -> Check:
    free = facts.free_bytes(folder)
    if free is None:
        return Check("disk", "unknown", f"cannot ask the file system of {folder}")
    found = f"{facts.gibibytes(free)} free"
    if free < _LEAST_FREE_BYTES:
        return Check("disk", "problem", found, "free some space: trials keep what they write until they end")
    if free < _GOOD_FREE_BYTES:
        return Check("disk", "note", found, "checkpoints that trials write take space until the trial ends")
    return Check("disk", "ok", found)


def redact(text: str) -> str:
    """The text without the user's name, home folder and this host's name, fit for a public issue."""
    home, user, hosts = os.path.expanduser("~"), _user(), {os.uname().nodename, os.uname().nodename.split(".")[0]}
    if len(home) > 1:
        text = re.sub(re.escape(home) + r"(?![\w-])", "~", text)
    text = re.sub(r"(/home/|/Users/)[^/\s\"']+", r"\1USER", text)
    for secret, shown in [(user, "USER")] * (user not in ("", "root")) + [(host, "HOST") for host in sorted(hosts, key=len, reverse=True)]:
        if secret and secret != "localhost":
            text = re.sub(rf"(?<![\w-]){re.escape(secret)}(?![\w-])", shown, text)
    return text


def _user() -> str:
    import getpass

    try:
        return getpass.getuser()
    except (KeyError, OSError):  # a uid without an entry, as in many containers
        return ""
