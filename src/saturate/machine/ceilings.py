"""Measured ceilings of this machine's device: measured once in a process of its own, then kept.

One file per device, driver, torch and number of threads lies in `$XDG_CACHE_HOME/saturate/ceilings/` (else
`~/.cache/...`). It is written whole or not at all; one that cannot be read is passed over, with a note, and measured
again.
"""

from __future__ import annotations

import dataclasses
import datetime
import hashlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from saturate.errors import EnvironmentProblem
from saturate.machine import facts
from saturate.records.ceilings import SCHEMA, Ceilings, convert, decode, encode

#: Run by path in the workload's Python: it needs torch there, and nothing of saturate.
_SCRIPT = Path(__file__).resolve().parent.parent / "agent" / "ceilings.py"
_MARK = "saturate-ceilings "
#: What the survey knows how to wait for.
DEVICES = ("cpu", "cuda")
_TIMEOUT_S = 180.0              # importing torch from a cold network disk, then some seconds of measuring
_KILL_S = 5.0
_DRIVER_FILES = ("proc/driver/nvidia/version", "sys/module/amdgpu/version")
#: Three arrays are held at a time, so that a survey takes at most three eighths of the host's memory.
_MEMORY_PART = 8
_LARGEST_FILE = 1 << 20


@dataclasses.dataclass(frozen=True)
class Kept:
    """What the cache holds: the newest first. `notes`: files that were passed over, and why."""

    records: list[Ceilings]
    notes: list[str]


def folder() -> Path | None:
    """Where records are kept. The cache folder of the XDG specification; relative values of it are to be ignored. None for a user
    who has no home, as in containers."""
    home = os.environ.get("XDG_CACHE_HOME", "")
    base = home if os.path.isabs(home) else os.path.expanduser("~/.cache")
    return Path(base) / "saturate" / "ceilings" if os.path.isabs(base) else None


def kept(device_name: str | None = None, *, device: str | None = None, torch: str | None = None,
         driver: str | None = None, threads: int | None = None, where: Path | None = None) -> Kept:
    """Records of earlier measurements that agree with everything that is given. Never raises; measures nothing."""
    records, notes = [], []
    place = where or folder()
    try:
        paths = sorted(place.glob("*.json")) if place else []
    except OSError as error:        # a home of somebody else's, as of root in a container
        return Kept([], [f"{place} cannot be searched ({error.strerror or error})"])
    for path in paths:
        try:
            record = _read(path)
        except (OSError, ValueError) as error:
            notes.append(f"{path.name} cannot be read and is ignored ({error})")
            continue
        wanted = {"device_name": device_name, "device": device, "torch": torch, "driver": driver, "threads": threads}
        if all(value is None or getattr(record, field) == value for field, value in wanted.items()):
            records.append(record)
    return Kept(sorted(records, key=lambda record: record.measured_at, reverse=True), notes)


def obtain(python: str | None, device: str, *, device_name: str | None = None, torch: str | None = None,
           threads: int | None = None, environment: Mapping[str, str] | None = None, index: int = 0,
           where: Path | None = None, say: Callable[[str], None] = lambda line: None) -> Ceilings:
    """The kept record of this device, driver, torch and number of threads, or else a new one, which takes a while: `say` is
    told. One that was measured on a busy machine is kept until a better one is. Raises as `measure`, and where another device was
    measured than the one that is called `device_name`."""
    name = cpu_name() if device == "cpu" else device_name
    found = kept(name, device=device, torch=torch, driver=driver(device), threads=threads, where=where) \
        if name and torch else Kept([], [])
    before = found.records[0] if found.records else None
    if before is not None and not before.busy:
        return before
    say("measuring what this device reaches (kept for the next time)" if before is None else
        "measuring what this device reaches again: other processes had the cores the last time")
    record = measure(python, device, threads=threads, environment=environment, index=index, name=name or "", where=where)
    if name and record.device_name != name:
        raise EnvironmentProblem(f"the ceilings of {name} could not be measured", cause=f"{record.device_name} was found in its place")
    if before is not None and (before.queued_share or 0.0) < (record.queued_share or 0.0):
        if place := where or folder():
            _keep(before, place)
        return before
    return record


def measure(python: str | None, device: str, *, threads: int | None = None, environment: Mapping[str, str] | None = None,
            index: int = 0, name: str = "", timeout_s: float = _TIMEOUT_S, where: Path | None = None) -> Ceilings:
    """Measure now, some seconds, and keep the result. `python` and `environment` are the workload's (None: the one on PATH,
    and ours). `index` and `name`: of the device, among several (see `agent.ceilings.which`).

    Raises `EnvironmentProblem` where torch or the device does not work there, or does not answer in time.
    """
    if device not in DEVICES:
        raise EnvironmentProblem(f"the ceilings of {device!r} cannot be measured",
                                 cause=f"only {' and '.join(DEVICES)} (CUDA or ROCm) are known to be measured well")
    interpreter = python or shutil.which("python") or shutil.which("python3") or sys.executable
    memory = facts.memory_bytes() or 1 << 33
    most = memory // _MEMORY_PART if device == "cpu" else 1 << 30
    command = [interpreter, str(_SCRIPT), device, str(threads or 0), str(most), str(index), name]
    found = _asked(command, os.environ if environment is None else environment, device, timeout_s)
    now = datetime.datetime.now(datetime.UTC).isoformat("T", "seconds")
    found |= {"schema": SCHEMA, "driver": driver(device), "measured_at": now}
    if device == "cpu":
        found["device_name"] = cpu_name()
    try:
        record = convert(found)
    except ValueError as error:
        problem = f"measuring the ceilings of {device} gave no usable answer"
        raise EnvironmentProblem(problem, cause=str(error)) from error
    if place := where or folder():
        _keep(record, place)
    return record


def cpu_name() -> str:
    return facts.cpu_name()


def driver(device: str, root: Path = Path("/")) -> str:
    """The version of the device's driver; "" on a CPU and where the system does not tell. NVML is not asked: it may
    be absent, and the kernel's module is what decides."""
    if device == "cpu":
        return ""
    for name in _DRIVER_FILES:
        try:
            text = (root / name).read_text(encoding="utf-8", errors="replace")
        except OSError:  # no such module
            continue
        version = re.search(r"\b\d+(?:\.\d+)+\b", text)
        if version:
            return version[0]
    return ""


def _asked(command: list[str], given: Mapping[str, str], device: str, timeout_s: float) -> dict[str, Any]:
    """Run the survey and read its one line. A process that does not end is killed, with all that it started."""
    environment = {key: value for key, value in given.items() if not key.startswith("SATURATE")}
    problem = f"the ceilings of {device} could not be measured"
    remedy = "saturate doctor looks for the cause; analyses then compare with the data sheet, where there is one"
    with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as err:
        try:
            process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=out, stderr=err, env=environment,
                                       cwd=tempfile.gettempdir(), start_new_session=True)
        except OSError as error:
            raise EnvironmentProblem(problem, cause=str(error), remedy=remedy) from error
        try:
            code = process.wait(timeout_s)
        except subprocess.TimeoutExpired as error:
            raise EnvironmentProblem(problem, cause=f"no answer within {timeout_s:.0f} s", remedy=remedy) from error
        finally:
            _end(process)
        lines = [line for line in _text(out).splitlines() if line.startswith(_MARK)]
        if code or not lines:
            last = (_text(err).strip().splitlines() or ["it said nothing"])[-1][:300]
            cause = f"{Path(command[0]).name} ended with {code}"
            raise EnvironmentProblem(problem, cause=cause, evidence=last, remedy=remedy)
    try:
        answer = json.loads(lines[-1].removeprefix(_MARK))
    except ValueError as error:
        raise EnvironmentProblem(problem, cause="its answer is no JSON", remedy=remedy) from error
    if not isinstance(answer, dict):
        raise EnvironmentProblem(problem, cause="its answer is no record", remedy=remedy)
    return answer


def _end(process: subprocess.Popen[bytes]) -> None:
    """A process that hangs in a driver does not even die of SIGKILL: it is left behind rather than waited for."""
    if process.poll() is not None:
        return
    try:
        os.killpg(process.pid, signal.SIGKILL)
    except ProcessLookupError:  # it ended just now
        pass
    try:
        process.wait(_KILL_S)
    except subprocess.TimeoutExpired:  # stuck in the kernel
        pass


def _text(file: Any) -> str:
    file.seek(0, os.SEEK_END)
    file.seek(max(0, file.tell() - _LARGEST_FILE))
    return file.read().decode("utf-8", "replace")


def _read(path: Path) -> Ceilings:
    if path.stat().st_size > _LARGEST_FILE:
        raise ValueError("it is too large")
    return decode(path.read_bytes())


def _keep(record: Ceilings, where: Path) -> None:
    """Write atomically. A cache that cannot be written costs the next run some seconds, and nothing else."""
    key = [record.device, record.device_name, record.driver, record.torch, record.threads]
    slug = re.sub(r"[^A-Za-z0-9]+", "-", record.device_name).strip("-")[:60] or record.device
    path = where / f"{slug}-{hashlib.sha256(json.dumps(key).encode()).hexdigest()[:12]}.json"
    try:
        where.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=where, prefix=".", suffix=".part", delete=False) as file:
            try:
                file.write(encode(record))
                file.flush()
                os.replace(file.name, path)
            except OSError:
                os.unlink(file.name)
                raise
    except OSError:  # no home, read-only, full
        return
