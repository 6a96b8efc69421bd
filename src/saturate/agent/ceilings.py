"""How fast this device multiplies matrices and moves memory, measured in the workload's own process and threads.

A share of a measured rate says how much is left to gain; a share of a data sheet says little.

`measure` is short and runs at the gate of a trial. `survey` measures everything a roofline needs; this file is then
run as a script by the workload's Python (`python ceilings.py DEVICE THREADS MOST_BYTES INDEX NAME`; of several devices
the one with this index and name), which need not have saturate. So it uses the standard library and torch only, and the syntax of old Pythons.
"""

from __future__ import annotations

import contextlib
import glob
import json
import sys
import time
from collections.abc import Callable
from typing import Any

_SIZE = {"cpu": 1024, "cuda": 8192}
_COPY_BYTES = {"cpu": 1 << 28, "cuda": 1 << 30}     # well beyond any cache
#: A smaller product or array of a CUDA device would tell of launches, or of a cache.
_LEAST_PRODUCT, _LEAST_COPY_BYTES = 4096, 1 << 28
_SECONDS = 0.25

#: A survey's products grow until one takes so long: a slow device need not multiply what a fast one must.
_ENOUGH_SECONDS = 0.02
_SURVEY_SECONDS = 0.12
_LEAST_SIZE, _MOST_SIZE = {"cpu": 256, "cuda": 1024}, {"cpu": 2048, "cuda": 8192}
#: Bytes of each array, from what caches hold to what none does.
_ARRAY_BYTES = {"cpu": [1 << 17, 1 << 20, 1 << 23, 1 << 26, 1 << 28],
                "cuda": [1 << 22, 1 << 24, 1 << 26, 1 << 28, 1 << 30]}
_HOST_BYTES = 1 << 28
_LAUNCHES = 2000
#: Between it and the end of the line stands what a survey found; a program's other output is ignored.
MARK = "saturate-ceilings "


def measure(torch: Any, device: str, where: Any = None) -> dict[str, Any]:
    """"float32" and "bfloat16": floating-point operations per second of a square matrix product (2 n^3 each); "copy":
    bytes read and written per second; "unknown": why one of them is missing. `where`: of several CUDA devices, the one to
    measure. Leaves the random generators and gradients alone, and of a CUDA device's memory half of what is free: the
    training that stands at the gate goes on afterwards."""
    cuda = device == "cuda"
    found: dict[str, Any] = {"unknown": {}}
    with torch.no_grad(), torch.cuda.device(where) if cuda else contextlib.nullcontext():
        for name in ("float32", "bfloat16", "copy"):
            try:
                room = _room(torch) if cuda else None
                found[name] = _copied(torch, device, room) if name == "copy" else _multiplied(torch, device, name, room)
            except RuntimeError as error:       # another program took the memory, or cuBLAS does not know the format here
                found["unknown"][name] = _first_line(error)
        if cuda:
            torch.cuda.empty_cache()
    return found


def _room(torch: Any) -> int:
    """Half of what is free on the current device; what only torch's cache holds is free."""
    torch.cuda.empty_cache()
    return torch.cuda.mem_get_info()[0] // 2


def _multiplied(torch: Any, device: str, name: str, room: int | None) -> float:
    size = largest(_SIZE.get(device, 1024), _LEAST_PRODUCT, lambda size: 2 * 4 * size * size, room)
    a = torch.ones(size, size, device=device, dtype=getattr(torch, name))
    return 2 * size**3 / _seconds(torch, device, lambda: a @ a)


def _copied(torch: Any, device: str, room: int | None) -> float:
    size = largest(_COPY_BYTES.get(device, 1 << 28), _LEAST_COPY_BYTES, lambda size: 2 * size, room)
    source = torch.ones(size // 4, device=device, dtype=torch.float32)
    target = torch.empty_like(source)
    return 2 * source.numel() * 4 / _seconds(torch, device, lambda: target.copy_(source))


def largest(wanted: int, least: int, needs: Callable[[int], int], room: int | None) -> int:
    """Of `wanted`, its half, and so on the first that `needs` no more bytes than `room` (None: it does). Raises RuntimeError
    where that is below `least`.

    >>> largest(8192, 4096, lambda size: 8 * size * size, 300 << 20)
    4096
    """
    size = wanted
    while room is not None and needs(size) > room:
        size //= 2
        if size < least:
            raise RuntimeError("it needs more memory than the training leaves free")
    return size


def survey(torch: Any, device: str, most_bytes: int = 1 << 30) -> dict[str, Any]:
    """Everything of `saturate.records.ceilings.Ceilings` that torch can tell. Some seconds, and three arrays of at
    most `most_bytes` each. What fails is left out, with the reason in "unknown". Leaves the random generators
    alone."""
    unknown: dict[str, str] = {}
    with torch.no_grad():
        found = {
            "rates": _products(torch, device, unknown),
            "bandwidth": _bandwidth(torch, device, unknown, most_bytes),
            "host_to_device": _host_to_device(torch, device, unknown) if device == "cuda" else {},
            "launch_ns": _launch_ns(torch, device),
        }
    cuda = device == "cuda"
    return {**found, "unknown": unknown, "device": device, "torch": str(torch.__version__),
            "device_name": torch.cuda.get_device_name() if cuda else "",
            "threads": None if cuda else torch.get_num_threads()}


def _products(torch: Any, device: str, unknown: dict[str, str]) -> dict[str, float]:
    """Operations per second of square matrix products, by format; the best of all sizes."""
    rates = {}
    formats = ["float32", "bfloat16", "float16"] + (["tfloat32", "float8", "int8"] if device == "cuda" else [])
    if device == "cuda" and (missing := _no_tf32(torch)):
        formats.remove("tfloat32")      # the setting would be ignored, and fp32 measured again
        unknown["tfloat32"] = missing
    for name in formats:
        try:
            rates[name] = _product(torch, device, name)
        except (RuntimeError, AttributeError, TypeError, ValueError, NotImplementedError) as error:
            # Neither every device nor every torch multiplies every format, and they say so in all these ways.
            unknown[name] = _first_line(error)
    return rates


def _no_tf32(torch: Any) -> str:
    """Why the current device does not multiply in TF32 when it is told to; "" where it does. AMD's capabilities are other numbers."""
    if torch.version.hip:
        return "ROCm multiplies in fp32, whatever torch is told"
    return "the device has no TF32" if torch.cuda.get_device_capability() < (8, 0) else ""


def _product(torch: Any, device: str, name: str) -> float:
    matmul = torch.backends.cuda.matmul
    before = matmul.allow_tf32 if device == "cuda" else None
    best, size = 0.0, _LEAST_SIZE[device]
    try:
        if before is not None:
            matmul.allow_tf32 = name == "tfloat32"
        while size <= _MOST_SIZE[device]:
            action = _operands(torch, device, name, size)
            action()                    # the first one of a format prepares (and may take long)
            took = _seconds(torch, device, action, _SURVEY_SECONDS)
            best = max(best, 2 * size**3 / took)
            if took > _ENOUGH_SECONDS:
                break
            size *= 2
    finally:
        if before is not None:
            matmul.allow_tf32 = before
    return best


def _operands(torch: Any, device: str, name: str, size: int) -> Any:
    """The product to time. Random numbers, of a generator of their own: a GPU that multiplies ones draws less power,
    and clocks higher, than one at work."""
    generator = torch.Generator(device=device)
    generator.manual_seed(0)
    if name == "int8":
        a = torch.randint(-128, 128, (size, size), generator=generator, device=device, dtype=torch.int8)
        return lambda: torch._int_mm(a, a.t())
    a = torch.randn(size, size, generator=generator, device=device)
    if name == "float8":
        a = a.to(torch.float8_e4m3fn)
        scale = torch.ones((), device=device)
        return lambda: torch._scaled_mm(a, a.t(), scale_a=scale, scale_b=scale, out_dtype=torch.bfloat16)
    a = a if name == "tfloat32" else a.to(getattr(torch, name))
    return lambda: a @ a


def _bandwidth(torch: Any, device: str, unknown: dict[str, str],
               most_bytes: int) -> dict[str, list[tuple[int, float]]]:
    """STREAM's kernels at several sizes: (bytes moved by one, bytes per second). McCalpin, 1995."""
    found: dict[str, list[tuple[int, float]]] = {"read": [], "write": [], "copy": [], "triad": []}
    for size in _ARRAY_BYTES[device]:
        if size > most_bytes:
            unknown[f"bandwidth of {size >> 20} MiB"] = "it would need too much of the memory"
            break
        try:
            a, b, c = (torch.ones(size // 4, device=device) for _ in range(3))
        except RuntimeError as error:   # out of memory: another program, or a small device
            unknown[f"bandwidth of {size >> 20} MiB"] = _first_line(error)
            break
        actions = {
            "read": (1, lambda a=a: a.sum()),
            "write": (1, lambda a=a: a.fill_(1.0)),
            "copy": (2, lambda a=a, b=b: b.copy_(a)),
            "triad": (3, lambda a=a, b=b, c=c: torch.add(a, b, alpha=3.0, out=c)),
        }
        for name, (arrays, action) in actions.items():
            found[name].append((arrays * size, arrays * size / _seconds(torch, device, action, _SURVEY_SECONDS / 4)))
        del a, b, c, actions, action
    return found


def _host_to_device(torch: Any, device: str, unknown: dict[str, str]) -> dict[str, float]:
    """Bytes per second of a large copy from pageable and from pinned memory."""
    rates = {}
    for name in ("pageable", "pinned"):
        try:
            source = torch.ones(_HOST_BYTES // 4)
            source = source.pin_memory() if name == "pinned" else source
            target = torch.empty(source.shape, device=device)
        except RuntimeError as error:   # a limit on locked memory, or none left
            unknown[f"host to device, {name}"] = _first_line(error)
            continue
        took = _seconds(torch, device, lambda s=source, t=target: t.copy_(s, non_blocking=True), _SURVEY_SECONDS)
        rates[name] = _HOST_BYTES / took
    return rates


def _launch_ns(torch: Any, device: str) -> float:
    """From one launch of a kernel on one number to the next, in a queue that never runs empty; on a CPU, of an
    operator."""
    one = torch.ones(1, device=device)
    best = float("inf")
    for _ in range(5):
        _wait(torch, device)
        began = _clock()
        for _ in range(_LAUNCHES):
            one.add_(1.0)
        _wait(torch, device)
        best = min(best, _clock() - began)
    return best / _LAUNCHES * 1e9


def _seconds(torch: Any, device: str, action: Any, budget: float = _SECONDS) -> float:
    """The shortest of several runs: a rate to compare with is the best that the device does.

    Runs too short for a clock, or for a launch, are timed several at a time.
    """
    best = float("inf")
    end = _clock() + budget
    runs = 0
    batch = 1
    while runs < 3 or _clock() < end:
        began = _clock()
        for _ in range(batch):
            action()
        _wait(torch, device)
        took = _clock() - began
        best = min(best, took / batch)
        runs += 1
        if took < 5e-4 and batch < 256:
            batch *= 4
    return best


def _clock() -> float:
    """Seconds by the kernel: a script may have put a clock of its own, even one that stands still, in the place of `time.perf_counter`."""
    return time.clock_gettime(time.CLOCK_MONOTONIC)


def _wait(torch: Any, device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()


def _first_line(error: BaseException) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0][:200]


def which(names: list[str], index: int, name: str) -> int:
    """The device to measure: the one with this index, or the first with this name where that one has another. A script may
    have chosen among the devices itself, and counts them differently then.

    >>> which(["A", "B", "B"], 2, "B"), which(["A", "B", "B"], 0, "B"), which(["A", "B"], 1, "")
    (2, 1, 1)
    """
    wrong = name in names and names[index:index + 1] != [name]
    return names.index(name) if wrong else index


def queued_share() -> float | None:
    """Of the time in which this process's threads could have run, the share in which others had the cores; None where the
    kernel keeps no count. Source: kernel Documentation/scheduler/sched-stats, /proc/PID/schedstat."""
    ran = queued = 0
    for path in glob.glob("/proc/self/task/*/schedstat"):
        try:
            with open(path) as file:
                on_core, waited = file.read().split()[:2]
        except (OSError, ValueError):       # a thread that ended meanwhile, or a kernel that does not count
            continue
        ran, queued = ran + int(on_core), queued + int(waited)
    return queued / (ran + queued) if ran else None


def _main(arguments: list[str]) -> None:
    # The folder of this file would come first in the search for modules, and its neighbours have plain names.
    sys.path.pop(0)
    import torch

    device, threads, most_bytes, index, name = arguments
    if int(threads):
        torch.set_num_threads(int(threads))
    if device == "cuda":
        names = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
        torch.cuda.set_device(which(names, int(index), name))
    found = survey(torch, device, int(most_bytes))
    found["queued_share"] = queued_share() if device == "cpu" else None
    sys.__stdout__.write("\n" + MARK + json.dumps(found) + "\n")        # type: ignore[union-attr]


if __name__ == "__main__":
    _main(sys.argv[1:])
