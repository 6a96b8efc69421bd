"""Replace or reconfigure the memory allocator of the process.

What it does
------------
On CUDA, lets PyTorch's allocator grow its segments (`expandable_segments`) instead of caching blocks of many sizes. On a
CPU, lets glibc keep what the process frees (`glibc`), or preloads jemalloc or tcmalloc, if one is installed, in its place.

When it helps
-------------
On CUDA: shapes that change, which fragment memory and force the allocator to release and ask again. On a CPU: large
temporary tensors. glibc maps each block above 32 MiB by itself and returns it when it is freed, and returns the end of its
heap; at the next step the kernel clears the same pages again, one fault per 4 KiB. The end of the heap is free in some processes and
not in others of the same command, which then take different times for the same work.

When it hurts
-------------
Expandable segments may clash with libraries that register or share CUDA memory. The other two hold on to more memory: the
process keeps its peak.

Numerics
--------
`exact`: values do not depend on addresses; PyTorch aligns tensors in every case.

How it is applied
-----------------
Through environment variables of the new process, joined with what the user already set there. That the preloaded
library really is mapped, and that glibc serves a large block from its heap, is checked inside the process.

References
----------
The GNU C Library manual, "Malloc Tunable Parameters"; mallopt(3) for the variables, mallinfo(3) for the check.
PyTorch documentation, "CUDA semantics", section "Optimizing memory usage with PYTORCH_CUDA_ALLOC_CONF".
PyTorch recipes, "Performance Tuning Guide", section on CPU memory allocators.
"""

from __future__ import annotations

import ctypes
import os
import re
from dataclasses import dataclass
from typing import Any

from saturate.records.facts import Evidence, Facts
from saturate.techniques import _common
from saturate.techniques._api import Eligible, Ineligible, NotApplied, Proof, Technique, Touch
from saturate.techniques._standard import standard

TECHNIQUE = Technique(
    id="allocator",
    title="memory allocator",
    numerics="exact",
    stage="environment",
    touches=(Touch("allocator"),),
)

EXPANDABLE = "expandable_segments"
#: PyTorch renamed the variable; some versions read the first one only, some both, and which of them wins differs.
CUDA_VARIABLES = ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF")
#: Keep freed memory for a minute before it goes back to the system: longer than any step.
JEMALLOC = "background_thread:true,dirty_decay_ms:60000,muzzy_decay_ms:60000"
#: glibc maps no block by itself, returns nothing, and grows its heap by 64 MiB at a time.
GLIBC = {"MALLOC_MMAP_MAX_": "0", "MALLOC_TRIM_THRESHOLD_": str(1 << 40), "MALLOC_TOP_PAD_": str(64 << 20)}

#: Page faults per step below which nothing large goes back and forth: 4 MiB.
LEAST_FAULTS = 1024
#: Of a step, what the kernel takes of it at most, from which it tells on which of two processes are fast. A single pair resolves no
#: less (`race.SMALL_CLAIM`), so nothing is seen better without it; and a first turn in fresh pairs takes the time of several others.
TELLING = 0.05
#: Above the largest block that glibc takes from its heap unless it is told to.
LARGE_BYTES = 64 << 20


@dataclass(frozen=True)
class Options:
    """`kind` is "expandable_segments", "glibc", "jemalloc" or "tcmalloc"; the last two need the path of the `library`."""

    kind: str = EXPANDABLE
    library: str = ""

    def __post_init__(self) -> None:
        if self.kind not in (EXPANDABLE, "glibc", "jemalloc", "tcmalloc"):
            raise ValueError(f"kind is {self.kind!r}, not {EXPANDABLE}, glibc, jemalloc or tcmalloc")
        if (self.kind in (EXPANDABLE, "glibc")) == bool(self.library):
            raise ValueError("a preloaded allocator needs the path of its library, and only that one does")
        # A recipe may come from anywhere, and the loader takes whatever it is told: several libraries, or one of the working directory.
        if self.library and not preloadable(self.kind, self.library):
            raise ValueError(f"library must be the absolute path of a lib{self.kind}*.so, without spaces or colons")


def preloadable(kind: str, library: str) -> bool:
    """Whether the dynamic loader, told this path, looks for one library of that name in one place.

    >>> preloadable("jemalloc", "/usr/lib/libjemalloc.so.2"), preloadable("jemalloc", "/usr/lib/libjemalloc.so.2:/tmp/other.so")
    (True, False)
    """
    # One way only to read each folder: a recipe is somebody's text, and nested repetition takes twice as long per folder.
    return re.fullmatch(rf"/([^\s:]*/)?lib{kind}[\w.-]*\.so[.\d]*", library) is not None


def eligible(facts: Facts) -> Eligible | Ineligible:
    if facts.device == "cuda":
        if facts.compiles:
            return Ineligible(_common.NOT_WATCHED)
        if facts.shapes <= 1:
            return Ineligible("shapes do not change, so the CUDA allocator's cache serves every request already")
        return Eligible(f"{facts.shapes} input shapes were seen, which fragments CUDA memory")
    if facts.device != "cpu":
        return Ineligible(f"not offered on {facts.device or 'unknown'} devices")
    if _returns_memory(facts):
        reason = "freed memory goes back to the system and is taken again"
        if _by_chance(facts):
            return Eligible(f"up to {facts.page_faults:,.0f} page faults per step: in some processes of this command {reason}",
                            steadies=(bound(facts) or 0.0) >= TELLING)
        return Eligible(f"{facts.page_faults:,.0f} page faults per step: {reason}")
    if not _preloadable(facts):
        return Ineligible("neither jemalloc nor tcmalloc is installed, and freed memory stays in the process as it is")
    return Eligible("another allocator is installed")


def _returns_memory(facts: Facts) -> bool:
    return facts.machine.glibc and facts.page_faults >= LEAST_FAULTS


def _by_chance(facts: Facts) -> bool:
    """Whether it depends on what happens to lie at the end of the heap, which glibc returns only if that is free."""
    return facts.least_page_faults is not None and facts.least_page_faults < facts.page_faults / 2


def _preloadable(facts: Facts) -> list[Options]:
    known = ("jemalloc", "tcmalloc")
    return [Options(kind, path) for kind, path in facts.machine.preload_allocators if kind in known and preloadable(kind, path)]


def variants(facts: Facts) -> list[Options]:
    if facts.device == "cuda":
        return [Options()]
    return [Options("glibc")] * _returns_memory(facts) + _preloadable(facts)


def bound(facts: Facts) -> float | None:
    """On a CPU: what the kernel takes of the step, faults and all else together."""
    return _common.share(facts.kernel_ms, facts.step_ms) if facts.device == "cpu" and facts.kernel_ms else None


def environment(options: Options) -> dict[str, str]:
    if options.kind == EXPANDABLE:
        set_already = [os.environ.get(name, "") for name in CUDA_VARIABLES]
        users = next(filter(None, set_already), "")     # of one only: it must hold in the other as well
        return {name: _joined(own or users, f"{EXPANDABLE}:True", ",") for name, own in zip(CUDA_VARIABLES, set_already)}
    if options.kind == "glibc":
        return {name: os.environ.get(name, value) for name, value in GLIBC.items()}      # the user's own stay
    variables = {"LD_PRELOAD": _joined(options.library, os.environ.get("LD_PRELOAD", ""), ":")}
    if options.kind == "jemalloc":
        variables["MALLOC_CONF"] = _joined(JEMALLOC, os.environ.get("MALLOC_CONF", ""), ",")   # the user's comes last
    return variables


def _joined(first: str, second: str, separator: str) -> str:
    return separator.join(part for part in (first, second) if part)


def apply(context: Any, options: Options) -> str:
    if options.library and not _mapped(options.library):
        raise NotApplied(f"{options.library} is not loaded in this process; the loader refused it")
    if options.kind == "glibc":
        if not _heap_serves(LARGE_BYTES):
            raise NotApplied("glibc does not serve a block of 64 MiB from its heap: its variables, or another allocator, are in the way")
        context.note(TECHNIQUE.id, "a block of 64 MiB came from glibc's heap")
    else:
        context.note(TECHNIQUE.id, f"{options.library} is mapped" if options.library else _Segments(context.torch))
    return f"allocator: {options.kind}"


class _Segments:
    """As text, whenever it is asked for: what the CUDA allocator made of the wish. torch 2.9 ignores one of the variables,
    and a platform that cannot grow segments says so in a warning only."""

    def __init__(self, torch: Any):
        self._torch = torch

    def __str__(self) -> str:
        if not self._torch.cuda.is_initialized():
            return ""
        segments = self._torch.cuda.memory_snapshot()
        grown = sum(bool(segment.get("is_expandable")) for segment in segments)
        return f"{grown} of {len(segments)} segments of device memory can grow" if grown else ""


def _heap_serves(size: int) -> bool:
    """Whether malloc takes a block of so many bytes from glibc's heap. The block is never touched."""
    libc = ctypes.CDLL(None)
    # Before 2.33 glibc counts in int.
    tell, number = (libc.mallinfo2, ctypes.c_size_t) if hasattr(libc, "mallinfo2") else (getattr(libc, "mallinfo", None), ctypes.c_int)
    if tell is None:        # not glibc
        return False
    names = ("arena", "ordblks", "smblks", "hblks", "hblkhd", "usmblks", "fsmblks", "uordblks", "fordblks", "keepcost")
    tell.restype = type("mallinfo", (ctypes.Structure,), {"_fields_": [(name, number) for name in names]})
    libc.malloc.restype, libc.malloc.argtypes, libc.free.argtypes = ctypes.c_void_p, [ctypes.c_size_t], [ctypes.c_void_p]
    before = tell()
    block = libc.malloc(size)
    after = tell()
    libc.free(block)
    return after.hblks == before.hblks and (after.uordblks - before.uordblks) % (1 << 32) >= size      # int may wrap


def _mapped(library: str) -> bool:
    try:
        with open("/proc/self/maps", encoding="utf-8", errors="replace") as maps:
            real = os.path.realpath(library)
            return any(line.rstrip().endswith(real) for line in maps)
    except OSError:     # no procfs: nothing can be shown, and LD_PRELOAD does not exist there either
        return False


def active(evidence: Evidence, options: Options) -> Proof:
    seen = evidence.notes.get(TECHNIQUE.id, "")
    if options.kind == "glibc":
        loaded = all(name in evidence.environment for name in GLIBC)
    elif options.library:
        loaded = options.library in evidence.environment.get("LD_PRELOAD", "")
    else:
        loaded = any(EXPANDABLE in evidence.environment.get(name, "") for name in CUDA_VARIABLES)
    if seen and loaded:
        return Proof(True, seen)
    return Proof(False, f"{options.kind} reached the process, and had no effect there" if loaded
                 else f"{options.kind} did not reach the process")


def as_code(options: Options) -> str:
    lines = ["# in the shell, before Python starts; what is set there already stays:"]
    if options.kind == EXPANDABLE:
        one, other = CUDA_VARIABLES
        lines.append(f"users=\"${{{one}:-${{{other}:-}}}}\"")
        lines += [f"export {name}=\"${{{name}:-$users}}${{users:+,}}{EXPANDABLE}:True\"" for name in CUDA_VARIABLES]
    elif options.kind == "glibc":
        lines += [f"export {name}=\"${{{name}-{value}}}\"" for name, value in GLIBC.items()]
    else:
        lines.append(f"export LD_PRELOAD={standard('shlex').quote(options.library)}\"${{LD_PRELOAD:+:$LD_PRELOAD}}\"")
        if options.kind == "jemalloc":
            lines.append(f"export MALLOC_CONF=\"{JEMALLOC}${{MALLOC_CONF:+,$MALLOC_CONF}}\"")
    return "\n".join(lines)
