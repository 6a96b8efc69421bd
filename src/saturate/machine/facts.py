"""What this machine gives to the workload: cores, memory, shared memory, instruction sets, compiler, allocators.

Standard library only, no shell and no root. Linux is read through /proc, /sys and /etc; elsewhere what cannot be known
is None or False. `root` stands for `/` so that tests can plant a machine.

Sources: cgroups(7), proc(5), kernel Documentation/admin-guide/cgroup-v2.rst and cgroup-v1/memory.rst.
"""

from __future__ import annotations

import math
import os
import platform
import re
import shutil
import sys
from collections.abc import Mapping
from pathlib import Path

from saturate.records.facts import MachineFacts

_ROOT = Path("/")
#: x86 names, then the names that Linux gives the same on Arm.
_BF16_FLAGS = {"avx512_bf16", "amx_bf16", "bf16"}
_FP16_FLAGS = {"avx512_fp16", "amx_fp16", "asimdhp"}
#: Fields of /proc/cpuinfo that tell processors of one name apart, on x86 and on Arm, and what they are called in a name.
_GENERATION = {"cpu family": "family", "model": "model", "CPU implementer": "implementer", "CPU part": "part"}
_ALLOCATORS = {"jemalloc": r"libjemalloc\.so[.\d]*", "tcmalloc": r"libtcmalloc(?:_minimal)?\.so[.\d]*"}
#: cgroup v1 has no word for "no limit": it stores the largest page-aligned number instead.
_NO_LIMIT_BYTES = 1 << 60


def observe(python: str | None = None, *, root: Path = _ROOT) -> MachineFacts:
    """The machine as this process, and so a workload started by it, may use it.

    `python` is the workload's interpreter; its environment's own `bin` and `lib` are searched too (conda keeps compilers
    and allocators there).
    """
    information = cpu_information(root)
    flags = information.get("flags", "").split() or information.get("Features", "").split()
    prefix = prefix_of(python)
    return MachineFacts(
        cpu_name=cpu_name(root),
        cpu_count=cpu_count(root),
        physical_cores=physical_cores(root),
        cpu_bf16_native=not _BF16_FLAGS.isdisjoint(flags),
        cpu_fp16_native=not _FP16_FLAGS.isdisjoint(flags),
        memory_bytes=memory_bytes(root),
        shm_bytes=free_bytes(root / "dev/shm"),
        compiler=compiler(os.environ, prefix),
        glibc=platform.libc_ver()[0] == "glibc",
        preload_allocators=allocators(root, prefix),
    )


def prefix_of(program: str | None) -> Path | None:
    """The environment that a program such as `python` is installed in: the folder above its `bin`."""
    located = shutil.which(program) if program else None
    return Path(located).absolute().parent.parent if located else None


def cpu_count(root: Path = _ROOT) -> float:
    """Cores this process may use: affinity or cgroup quota, whichever is less. At least a small positive number."""
    allowed = affinity_count()
    quota = cpu_quota(root)
    return float(allowed) if quota is None else min(float(allowed), quota)


def affinity_count() -> int:
    """Logical processors that the scheduler may put this process on."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def cpu_quota(root: Path = _ROOT) -> float | None:
    """Cores that the tightest cgroup around this process allows; None without a quota."""
    found = []
    for folder in _cgroup_folders(root, "cpu"):
        words = _read(folder / "cpu.max").split()
        if len(words) == 2:
            found.append(_ratio(*words))
        found.append(_ratio(_read(folder / "cpu.cfs_quota_us"), _read(folder / "cpu.cfs_period_us")))
    return min((quota for quota in found if quota is not None), default=None)


def memory_bytes(root: Path = _ROOT) -> int | None:
    """Host memory that this process may use: RAM or the tightest cgroup limit, whichever is less."""
    found = [limit for folder in _cgroup_folders(root, "memory")
             for name in ("memory.max", "memory.limit_in_bytes")
             if (limit := _number(_read(folder / name))) is not None and limit < _NO_LIMIT_BYTES]
    found.append(installed_bytes(root) or 0)
    return min((limit for limit in found if limit > 0), default=None)


def installed_bytes(root: Path = _ROOT) -> int | None:
    """Memory of the machine, whatever a container allows of it."""
    total = _kibibytes(root, "MemTotal")
    if total is None and root == _ROOT and "SC_PHYS_PAGES" in getattr(os, "sysconf_names", {}):
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return total


def available_bytes(root: Path = _ROOT) -> int | None:
    """Host memory that this process can still take: what the machine has available, or what the tightest cgroup leaves,
    whichever is less. File caches that can be dropped count as available."""
    found = [_kibibytes(root, "MemAvailable")]
    for folder in _cgroup_folders(root, "memory"):
        for limit_name, usage_name, cache in (("memory.max", "memory.current", "inactive_file"),
                                              ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")):
            limit, usage = _number(_read(folder / limit_name)), _number(_read(folder / usage_name))
            if limit is not None and usage is not None and limit < _NO_LIMIT_BYTES:
                droppable = re.search(rf"^{cache} (\d+)$", _read(folder / "memory.stat"), re.MULTILINE)
                found.append(max(0, limit - usage + (int(droppable[1]) if droppable else 0)))
    return min((free for free in found if free is not None), default=None)


def tasks_limit(root: Path = _ROOT) -> int | None:
    """Processes and threads that the tightest cgroup allows; None without a limit."""
    found = (_number(_read(folder / "pids.max")) for folder in _cgroup_folders(root, "pids"))
    return min((limit for limit in found if limit is not None), default=None)


def physical_cores(root: Path = _ROOT) -> int | None:
    """Distinct cores behind the logical processors that affinity allows; None where /proc/cpuinfo does not tell."""
    allowed = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else None
    cores = set()
    for block in _read(root / "proc/cpuinfo").split("\n\n"):
        fields = _fields(block)
        if "core id" in fields and (allowed is None or _number(fields.get("processor", "")) in allowed):
            cores.add((fields.get("physical id"), fields["core id"]))
    return len(cores) or None


def cpu_name(root: Path = _ROOT) -> str:
    """The processor's name, or at least its architecture, and what the kernel tells beside it: a virtual machine may call every
    generation of a maker by one name ("AMD EPYC")."""
    information = cpu_information(root)
    name = information.get("model name") or information.get("Hardware") or platform.processor() or platform.machine()
    generation = ", ".join(f"{said} {information[field]}" for field, said in _GENERATION.items() if information.get(field))
    return f"{name} ({generation})" if generation else name


def cpu_information(root: Path = _ROOT) -> dict[str, str]:
    """The fields of the first processor in /proc/cpuinfo; empty on other systems."""
    return _fields(_read(root / "proc/cpuinfo").split("\n\n")[0])


def free_bytes(folder: Path) -> int | None:
    """Bytes that an unprivileged process can still write to the file system of `folder`; None where there is none."""
    try:
        status = os.statvfs(folder)
    except (OSError, AttributeError):  # no such folder; no statvfs on this system
        return None
    return status.f_bavail * status.f_frsize


def compiler(environment: Mapping[str, str], prefix: Path | None = None) -> str | None:
    """The C++ compiler that `torch.compile` would call: `$CXX`, or else g++ (clang++ on macOS). None: it finds none.

    torch looks no further (torch/_inductor/config.py, `cpp.cxx`): a clang++ on a Linux PATH does not help by itself.
    """
    wanted = environment.get("CXX") or ("clang++" if sys.platform == "darwin" else "g++")
    path = environment.get("PATH", os.defpath)
    if prefix is not None:
        path = os.pathsep.join((str(prefix / "bin"), path))
    return shutil.which(wanted.split()[0] if wanted.split() else wanted, path=path)


def allocators(root: Path = _ROOT, prefix: Path | None = None) -> tuple[tuple[str, str], ...]:
    """Preloadable memory allocators as (name, path), from the dynamic loader's cache and the interpreter's `lib`."""
    if sys.platform != "linux":
        return ()
    cache, folders = _loaders_cache(root), _library_folders(root, prefix)
    found = []
    for name, pattern in _ALLOCATORS.items():
        # The cache is a table of NUL-terminated strings: the paths can be read without knowing its versions.
        paths = re.findall(rf"(?<=\0)/[^\0]*/{pattern}(?=\0)", cache)
        paths += sorted(str(path) for folder in folders for path in listed(folder) if re.fullmatch(pattern, path.name))
        usable = next((path for path in paths if _same_machine(path)), None)
        if usable:
            found.append((name, usable))
    return tuple(found)


def is_installed(library: str, root: Path = _ROOT, prefix: Path | None = None) -> bool:
    """Whether `allocators` could name this path, or the user has named its folder to the dynamic loader."""
    folders = {*map(str, _library_folders(root, prefix)), *filter(None, os.environ.get("LD_LIBRARY_PATH", "").split(":"))}
    return f"\0{library}\0" in _loaders_cache(root) or os.path.dirname(library) in folders


def _loaders_cache(root: Path) -> str:
    return _read_bytes(root / "etc/ld.so.cache").decode("utf-8", "replace")


def _library_folders(root: Path, prefix: Path | None) -> list[Path]:
    return [root / name for name in ("usr/lib", "usr/lib64", "usr/local/lib")] + ([prefix / "lib"] if prefix else [])


def _same_machine(library: str) -> bool:
    """Whether a shared library is for this interpreter's word size and processor (ELF header, elf(5))."""
    ours, theirs = (_read_bytes(Path(path), 20) for path in (os.path.realpath(sys.executable), library))
    return len(theirs) == 20 and theirs[:6] == ours[:6] and theirs[18:20] == ours[18:20]


def _cgroup_folders(root: Path, controller: str) -> list[Path]:
    """The folders of this process's cgroup for one controller, innermost first, up to the root that is mounted here."""
    paths = {}
    for line in _read(root / "proc/self/cgroup").splitlines():
        _, controllers, path = (line.split(":", 2) + ["", ""])[:3]
        paths.update({name: path for name in controllers.split(",")})
    folders = []
    for line in _read(root / "proc/self/mountinfo").splitlines():
        left, _, right = line.partition(" - ")
        mounted, kind = left.split(), right.split()
        if len(mounted) < 5 or len(kind) < 3 or kind[0] not in ("cgroup", "cgroup2"):
            continue
        if kind[0] == "cgroup" and controller not in kind[2].split(","):
            continue
        path = paths.get("" if kind[0] == "cgroup2" else controller, "/")
        # In a container the mount may show only a part of the hierarchy: field 4 says which.
        shown = mounted[3].rstrip("/") + "/"
        inside = path[len(shown):] if path.startswith(shown) else ""
        top = root / mounted[4].lstrip("/")
        folder = top / inside
        while True:
            folders.append(folder)
            if folder == top or top not in folder.parents:
                break
            folder = folder.parent
    return folders


def _ratio(quota: str, period: str) -> float | None:
    limit, window = _number(quota), _number(period)
    return limit / window if limit and window and limit > 0 and window > 0 else None


def _kibibytes(root: Path, name: str) -> int | None:
    """A size of /proc/meminfo, in bytes."""
    found = re.search(rf"^{name}:\s*(\d+) kB", _read(root / "proc/meminfo"), re.MULTILINE)
    return int(found[1]) * 1024 if found else None


def _number(text: str) -> int | None:
    text = text.strip()
    return int(text) if re.fullmatch(r"-?\d{1,20}", text) else None


def _fields(block: str) -> dict[str, str]:
    pairs = (line.partition(":") for line in block.splitlines())
    return {name.strip(): value.strip() for name, _, value in pairs if name.strip()}


def _read(path: Path) -> str:
    return _read_bytes(path).decode("utf-8", "replace")


def _read_bytes(path: Path, limit: int = 1 << 24) -> bytes:
    """The file's bytes, or none: a file that is missing or forbidden here says "not measurable"."""
    try:
        with open(path, "rb") as file:
            return file.read(limit)
    except OSError:
        return b""


def listed(folder: Path) -> list[Path]:
    """What lies in it; nothing where there is no such folder (not Linux), or it is not ours to look into."""
    try:
        return list(folder.iterdir())
    except OSError:
        return []


def gibibytes(size: float | None) -> str:
    """A size for people, in GiB."""
    if size is None or not math.isfinite(size):
        return "unknown"
    return f"{size / 2**30:.1f} GiB"
