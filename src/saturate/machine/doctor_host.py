"""The host: processors, quotas, memory, limits and settings that cost a training time.

Linux is read through /proc and /sys; `root` stands for `/` so that tests can plant a machine. Values of environment
variables are compared, never shown.

Sources: cgroups(7), proc(5), kernel Documentation/admin-guide/{cgroup-v2,pm/cpufreq,mm/transhuge}.rst, getrlimit(2),
PyTorch documentation (CUDA environment variables, torch.multiprocessing sharing strategies).
"""

from __future__ import annotations

import importlib.util
import os
import re
import shutil
import sys
from collections.abc import Callable, Mapping
from pathlib import Path

import saturate
from saturate.machine import facts, gpus
from saturate.machine.checks import Check

_SMALL_SHM_BYTES = 1 << 30
_LITTLE_MEMORY_BYTES = 2 << 30
_FEW_FILES, _MANY_FILES = 4096, 65536
_FEW_TASKS = 2048


def system(root: Path) -> Check:
    """The operating system, and whether it is a container or a virtual machine."""
    if sys.platform != "linux":
        return Check("system", "problem", f"{sys.platform}: races freeze and thaw processes through Linux's /proc",
                     "run saturate on Linux (a container or WSL 2 will do)")
    inside = [words for words, here in (("in a container", container(root)), ("in a virtual machine", virtual(root))) if here]
    return Check("system", "ok", ", ".join([f"Linux {os.uname().release}, {os.uname().machine}", *inside]),
                 values={"container": container(root), "virtual_machine": virtual(root)})


def container(root: Path) -> bool:
    """Whether this process runs in a container: by the files that runtimes leave, and by the name of its cgroup."""
    if (root / ".dockerenv").exists() or (root / "run/.containerenv").exists():
        return True
    return re.search(r"docker|kubepods|containerd|libpod|lxc", _text(root / "proc/self/cgroup")) is not None


def virtual(root: Path) -> bool:
    """Whether the processor says that a hypervisor is below (x86 only)."""
    return "hypervisor" in facts.cpu_information(root).get("flags", "").split()


def dependencies() -> Check:
    needed = {"msgspec": "msgspec", "tomlkit": "tomlkit", "rich": "rich", "pynvml": "nvidia-ml-py"}
    missing = [package for module, package in needed.items() if importlib.util.find_spec(module) is None]
    if missing:
        return Check("saturate", "problem", f"{', '.join(missing)} not installed next to saturate",
                     f"{sys.executable} -m pip install {' '.join(missing)}")
    found = f"{saturate.__version__} under Python {sys.version.split()[0]}, all dependencies found"
    return Check("saturate", "ok", found, values={"version": saturate.__version__})


def cpu(root: Path) -> Check:
    """Processors, and whether a quota takes them away again."""
    allowed, usable, cores = facts.affinity_count(), facts.cpu_count(root), facts.physical_cores(root)
    found = f"{facts.cpu_name(root)}: {allowed} logical processors" + (f", {cores} physical cores" if cores else "")
    values = {"logical": allowed, "physical": cores, "usable": usable}
    if usable < allowed:
        return Check("cpu", "note", f"{found}, but a quota of {usable:g} cores",
                     f"torch starts {allowed} threads for {usable:g} cores: raise the quota (docker --cpus), or let tune try "
                     "cpu-threads", values)
    return Check("cpu", "ok", found, values=values)


def governor(root: Path) -> Check:
    """Whether the processors are allowed to run at their full clock."""
    folder = root / "sys/devices/system/cpu"
    policies = sorted(facts.listed(folder / "cpufreq")) or sorted(folder.glob("cpu[0-9]*/cpufreq"))
    governors = {_text(policy / "scaling_governor").strip() for policy in policies} - {""}
    if not governors:
        return Check("cpu clock", "ok", "not Linux's to set here (a virtual machine, or the firmware decides)")
    driver = _text(policies[0] / "scaling_driver").strip()
    preferences = {_text(policy / "energy_performance_preference").strip() for policy in policies} - {""}
    found = f"governor {', '.join(sorted(governors))}"
    if preferences:
        found += f", preference {', '.join(sorted(preferences))}"
    # In the active mode of these drivers "powersave" is the normal governor and the preference decides (kernel
    # pm/intel_pstate.rst, pm/amd-pstate.rst).
    active = driver in ("intel_pstate", "amd-pstate-epp", "amd_pstate_epp")
    slow = preferences & {"power", "balance_power"} if active else governors & {"powersave", "conservative", "ondemand"}
    if not slow:
        return Check("cpu clock", "ok", found)
    return Check("cpu clock", "note", f"{found}: cores answer late, kernels are launched late",
                 "sudo cpupower frequency-set -g performance")


def memory(root: Path) -> Check:
    """Host memory that this process may use, and how much of it is free."""
    size = facts.memory_bytes(root)
    free = facts.available_bytes(root)
    values = {"bytes": size, "available_bytes": free}
    if size is None:
        return Check("memory", "unknown", "unknown", values=values)
    limited = size < (facts.installed_bytes(root) or 0)
    found = facts.gibibytes(size) + (" (container limit)" if limited else "")
    if free is not None:
        found += f", {facts.gibibytes(free)} available"
    if free is not None and free < _LITTLE_MEMORY_BYTES:
        return Check("memory", "note", f"{found}: loader workers may be killed",
                     "raise the container's limit (docker --memory), or end other processes", values)
    return Check("memory", "ok", found, values=values)


def huge_pages(root: Path) -> Check:
    """Transparent huge pages: without them, large host tensors cost a page fault every 4 KiB."""
    setting = re.search(r"\[(\w+)\]", _text(root / "sys/kernel/mm/transparent_hugepage/enabled"))
    if setting is None:
        return Check("huge pages", "ok", "this kernel does not tell")
    if setting[1] == "never":
        return Check("huge pages", "note", "transparent huge pages are off: large host tensors are slower to touch",
                     "echo madvise | sudo tee /sys/kernel/mm/transparent_hugepage/enabled")
    return Check("huge pages", "ok", f"transparent, {setting[1]}")


def shared_memory(root: Path) -> Check:
    free = facts.free_bytes(root / "dev/shm")
    values = {"free_bytes": free}
    if free is None:
        return Check("shared memory", "note", "no /dev/shm", "loader workers need it: mount a tmpfs at /dev/shm", values)
    if free < _SMALL_SHM_BYTES:
        return Check("shared memory", "note",
                     f"{facts.gibibytes(free)} free in /dev/shm: loader workers may die with 'Bus error'",
                     "docker run --shm-size=8g (or --ipc=host); elsewhere: mount -o remount,size=8g /dev/shm", values)
    return Check("shared memory", "ok", f"{facts.gibibytes(free)} free in /dev/shm", values=values)


def limits(root: Path) -> Check:
    """Open files, processes and locked memory that this process is allowed."""
    import resource

    files, most_files = resource.getrlimit(resource.RLIMIT_NOFILE)
    locked, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    processes, _ = resource.getrlimit(resource.RLIMIT_NPROC)
    tasks = facts.tasks_limit(root)
    fabric = bool(facts.listed(root / "sys/class/infiniband"))
    none = resource.RLIM_INFINITY
    found, fixes = [], []
    if files != none and files < _FEW_FILES:
        found.append(f"{files} open files: loader workers that share many tensors may fail with 'Too many open files'")
        within_reach = _MANY_FILES if most_files == none else min(most_files, _MANY_FILES)
        fixes.append(f"ulimit -n {within_reach}" if within_reach >= _FEW_FILES else
                     f"docker run --ulimit nofile={_MANY_FILES}; elsewhere raise nofile in /etc/security/limits.conf")
    if tasks is not None and tasks < _FEW_TASKS:
        found.append(f"{tasks} processes and threads in this container: each loader worker starts several")
        fixes.append("docker run --pids-limit=-1 (Kubernetes: podPidsLimit of the kubelet)")
    if processes not in (none, -1) and processes < _FEW_TASKS:
        found.append(f"{processes} processes for this user")
        fixes.append("ulimit -u unlimited, or raise nproc in /etc/security/limits.conf")
    if fabric and locked != none:
        found.append("locked memory is limited although there is an InfiniBand or RoCE device: NCCL cannot register buffers")
        fixes.append("docker run --ulimit memlock=-1; elsewhere: memlock unlimited in /etc/security/limits.conf")
    values = {"open_files": None if files == none else files, "tasks": tasks,
              "locked_bytes": None if locked == none else locked}
    if not found:
        return Check("limits", "ok", f"{'unlimited' if files == none else files} open files"
                     + (f", {tasks} processes and threads" if tasks is not None else ""), values=values)
    return Check("limits", "note", "; ".join(found), "; ".join(fixes), values)


_Setting = tuple[str, Callable[[str, float], bool], str]


def _set(value: str, _: float) -> bool:
    return value.strip().lower() not in ("", "0", "false", "off", "no")


def _zero(value: str, _: float) -> bool:
    return value.strip() == "0"


def _fewer(value: str, cores: float) -> bool:
    return value.strip().isdecimal() and int(value) < cores / 2


def _more(value: str, cores: float) -> bool:
    return value.strip().isdecimal() and int(value) > cores + 1


def _is(*words: str) -> Callable[[str, float], bool]:
    return lambda value, _: value.strip().lower() in words


_SPIN = "idle threads spin, and take the cores of loader workers"
_BOUND = "threads are bound to cores; loader workers inherit the binding of the thread that starts them"
_FEW_THREADS = "fewer threads than half of the usable cores (right with one rank or worker per core)"

#: Variables that slow a training down: (name, does this value, given the usable cores; what it does).
SLOW_SETTINGS: tuple[_Setting, ...] = (
    ("CUDA_LAUNCH_BLOCKING", _set, "every kernel launch waits for its kernel"),
    ("PYTORCH_NO_CUDA_MEMORY_CACHING", _set, "every tensor is a cudaMalloc"),
    ("NVIDIA_TF32_OVERRIDE", _zero, "TF32 is forbidden"),
    ("TORCHDYNAMO_DISABLE", _set, "torch.compile does nothing"),
    ("TORCH_COMPILE_DISABLE", _set, "torch.compile does nothing"),
    ("TORCH_DISTRIBUTED_DEBUG", _is("detail"), "every collective is checked"),
    ("NCCL_P2P_DISABLE", _set, "GPUs exchange data through the host"),
    ("NCCL_SHM_DISABLE", _set, "ranks exchange data through the network stack"),
    ("NCCL_IB_DISABLE", _set, "InfiniBand is not used"),
    ("OMP_NUM_THREADS", _fewer, _FEW_THREADS),
    ("OMP_NUM_THREADS", _more, "more threads than usable cores"),
    ("MKL_NUM_THREADS", _fewer, _FEW_THREADS),
    ("MKL_NUM_THREADS", _more, "more threads than usable cores"),
    ("OMP_WAIT_POLICY", _is("active"), _SPIN),
    ("KMP_BLOCKTIME", _is("infinite"), _SPIN),
    ("GOMP_SPINCOUNT", _is("infinite", "infinity"), _SPIN),
    ("OMP_PROC_BIND", _is("true", "close", "spread", "master", "primary"), _BOUND),
    ("GOMP_CPU_AFFINITY", _set, _BOUND),
    ("MALLOC_PERTURB_", _set, "freed memory is overwritten"),
    ("PYTHONMALLOC", lambda value, _: "debug" in value or value.strip() == "malloc", "Python's fast allocator is off"),
    ("PYTHONDEVMODE", _set, "Python checks itself"),
)


def settings(environment: Mapping[str, str], root: Path) -> Check:
    """Environment variables that slow a training down. Their names are shown, their values are not."""
    cores = facts.cpu_count(root)
    slow = [(name, effect) for name, hurts, effect in SLOW_SETTINGS
            if name in environment and hurts(environment[name], cores)]
    if not slow:
        return Check("settings", "ok", "no environment variable that slows a training down")
    names = [name for name, _ in slow]
    return Check("settings", "note", "; ".join(f"{name}: {effect}" for name, effect in slow),
                 f"unset {' '.join(names)}, unless it is meant", {"variables": names})


def compiler(python: str) -> Check:
    found = facts.compiler(os.environ, facts.prefix_of(python))
    if found:
        return Check("compiler", "ok", found)
    other = shutil.which("clang++")
    if other:
        return Check("compiler", "note", f"only {other}, which torch does not look for", f"export CXX={other}")
    return Check("compiler", "note", "no C++ compiler: torch.compile cannot work on the CPU, nor Triton without a C compiler",
                 install("g++"))


def allocator(python: str) -> Check:
    found = facts.allocators(prefix=facts.prefix_of(python))
    if found:
        return Check("allocator", "ok", ", ".join(f"{name} ({path})" for name, path in found))
    return Check("allocator", "note", "neither jemalloc nor tcmalloc: one technique fewer on the CPU", install("libjemalloc2"))


def profilers() -> Check:
    nsys = shutil.which("nsys")
    return Check("profilers", "ok", f"torch's own, nsys ({nsys})" if nsys else "torch's own; no nsys, so no `profile --with nsys`")


#: How each package manager installs, and what it calls a package that Debian calls otherwise.
_MANAGERS = {
    "apt-get": ("install -y", {}),
    "dnf": ("install -y", {"g++": "gcc-c++", "libjemalloc2": "jemalloc", "python3-dev": "python3-devel"}),
    "yum": ("install -y", {"g++": "gcc-c++", "libjemalloc2": "jemalloc", "python3-dev": "python3-devel"}),
    "zypper": ("install -y", {"g++": "gcc-c++", "libjemalloc2": "jemalloc", "python3-dev": "python3-devel"}),
    "pacman": ("-S", {"g++": "gcc", "libjemalloc2": "jemalloc", "python3-dev": "python"}),
    "apk": ("add", {"libjemalloc2": "jemalloc"}),
}


def install(package: str) -> str:
    """The command of the package manager that is here, for a package by its Debian name."""
    for manager, (verb, names) in _MANAGERS.items():
        if shutil.which(manager):
            root = "" if os.geteuid() == 0 else "sudo "
            return f"{root}{manager} {verb} {names.get(package, package)}"
    return f"install {package} with your system's package manager"


def numa_nodes(root: Path) -> int:
    """NUMA nodes of the machine; 0: not told."""
    return len(gpus.processors(_text(root / "sys/devices/system/node/online")))


def allowed_processors(root: Path) -> frozenset[int]:
    """The processors that the scheduler may put this process on; empty: not told."""
    listed = re.search(r"^Cpus_allowed_list:\s*(\S+)$", _text(root / "proc/self/status"), re.MULTILINE)
    return gpus.processors(listed[1]) if listed else frozenset()


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError:                     # missing or forbidden here: not told
        return ""
