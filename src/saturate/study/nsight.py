"""Drives Nsight Systems for `profile --with nsys`: where it is, the command that records, and the export to SQLite.

    nsys = find()
    command = record(nsys, workload, stem)      # start it in place of the workload
    database = export(nsys, report(stem, log), stem.with_suffix(".sqlite"))
    trace.nsys.read(database)

nsys records from the workload's cudaProfilerStart() to its cudaProfilerStop(), which the agent calls around the
window; there it names the steps by NVTX ranges `ProfilerStep#n`. Outside the window nsys only waits.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path

from saturate.errors import EnvironmentProblem

#: Where installers put it without putting it on PATH. The newest version of the first place that has one is taken.
PLACES = (
    "/opt/nvidia/nsight-systems/*/bin/nsys", "/opt/nvidia/nsight-systems-cli/*/bin/nsys", "/usr/local/cuda*/bin/nsys",
    "/opt/nvidia/hpc_sdk/*/*/profilers/Nsight_Systems/bin/nsys",
)

INSTALL = ("install Nsight Systems (the package nsight-systems-cli of NVIDIA's CUDA repository, the conda package "
           "nsight-systems, or with the CUDA toolkit), or profile without --with nsys")

#: A report of some gigabytes takes minutes to export.
EXPORT_TIMEOUT_S = 1800.0

REPORT_ENDINGS = (".nsys-rep", ".qdrep")        # the latter before 2021.4


def find() -> Path:
    """The program nsys: on PATH, else where its installers put it. Raises EnvironmentProblem with how to get it."""
    on_path = shutil.which("nsys")
    if on_path:
        return Path(on_path)
    for place in PLACES:
        found = [path for path in Path("/").glob(place.lstrip("/")) if os.access(path, os.X_OK)]
        if found:
            return max(found, key=_version)
    raise EnvironmentProblem("Nsight Systems is not installed", remedy=INSTALL,
                             cause=f"nsys is not on PATH, nor at {', '.join(PLACES)}")


def _version(path: Path) -> tuple[int, ...]:
    return tuple(map(int, re.findall(r"\d+", str(path))))


def record(nsys: Path, workload: Sequence[str], stem: Path) -> list[str]:
    """The command that runs the workload under nsys and leaves `stem`.nsys-rep.

    CPU samples and context switches stay off: they need rights that containers lack, slow the window down, and
    nothing here reads them. Kernels inside CUDA graphs are recorded each: a graph that is one record shows none.
    """
    return [
        str(nsys), "profile", "--trace=cuda,nvtx,osrt", "--sample=none", "--cpuctxsw=none", "--cuda-graph-trace=node",
        "--capture-range=cudaProfilerApi", "--capture-range-end=stop", "--kill=none", "--force-overwrite=true",
        f"--output={str(stem.absolute()).replace('%', '%%')}",      # nsys expands %p, %h and more
        *workload,
    ]


def report(stem: Path, log: str = "") -> Path:
    """The report that a recording left. `log`: what the run printed, to say why where there is none."""
    for ending in REPORT_ENDINGS:
        path = stem.with_name(stem.name + ending)
        if path.is_file() and path.stat().st_size:
            return path
    raise EnvironmentProblem(
        "nsys left no report", evidence=_tail(log), remedy="profile without --with nsys, or more steps",
        cause="the recorded window never began or never ended: the workload was over before its first steady step, "
        "or uses no CUDA device")


def export(nsys: Path, recorded: Path, database: Path, timeout_s: float = EXPORT_TIMEOUT_S) -> Path:
    """Export a report to SQLite: `database` appears whole, or EnvironmentProblem says what nsys said."""
    partial = database.with_name(f".{database.name}.partial")
    command = [str(nsys), "export", "--type=sqlite", "--force-overwrite=true", f"--output={partial}", str(recorded)]
    try:
        done = subprocess.run(command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
                              text=True, errors="replace", timeout=timeout_s)
        if done.returncode or not partial.is_file() or not partial.stat().st_size:
            raise _not_exported(recorded, f"nsys export ended with {done.returncode}", done.stdout)
        os.replace(partial, database)
    except subprocess.TimeoutExpired as error:
        raise _not_exported(recorded, f"nsys export took longer than {timeout_s:.0f} s", "") from error
    except OSError as error:
        raise _not_exported(recorded, error.strerror or str(error), "") from error
    finally:
        partial.unlink(missing_ok=True)
    return database


def _not_exported(recorded: Path, cause: str, said: str) -> EnvironmentProblem:
    return EnvironmentProblem(f"{recorded} could not be exported to SQLite", cause=cause, evidence=_tail(said),
                              remedy="free disk space where the report lies, and try: nsys export --type sqlite "
                              f"{recorded.name}")


def _tail(text: str) -> str:
    """The last lines of what a program said, on one line."""
    return " / ".join(line.strip() for line in text.strip().splitlines()[-3:])[:300]
