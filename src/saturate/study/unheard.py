"""A device that trained, and of which the trace holds no event: what a live run knows and the trace cannot.

torch records such a trace without an error. It looks like one of a CPU, whose operators here only launched the device's work.
"""

from __future__ import annotations

import dataclasses

from saturate.trace import windows
from saturate.trace.columns import Trace

#: Why events are missing where the rest of torch's profiler works, by the kind of device.
_CAUSES = {"cuda": (
    ". Another tool that profiles this GPU (nsys, ncu, DCGM) may keep CUPTI, or a virtual GPU, the driver's settings or WSL do not let it "
    "record: end that tool, allow profiling, or profile with --with nsys")}


def told(trace: Trace, device: str) -> Trace:
    """The trace, with the problem that it lacks every event of `device`, where training ran; as it is where it lacks none."""
    if device == "cpu" or windows.devices(trace) != [windows.CPU]:
        return trace
    return dataclasses.replace(trace, problems=[*trace.problems, ("unknown-accelerator", _message(device))])


def _message(device: str) -> str:
    return (f"training ran on {device}, and the profiler delivered no event of it: what the device did is not known, and the times of "
            f"operators are those of the host that launched them{_CAUSES.get(device, '')}")
