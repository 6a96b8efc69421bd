"""What every benchmark says at its end: its rows as JSON, and one line on its targets."""

from __future__ import annotations

import json
import os
import platform
from pathlib import Path
from typing import Any

from saturate.machine import facts


def as_text(ratio: tuple[float, float, float]) -> str:
    """A ratio with its interval."""
    return "{:.3f} [{:.3f}, {:.3f}]".format(*ratio)


def write_json(path: Path | None, benchmark: str, rows: list[dict[str, Any]], met: bool | None) -> None:
    """Results with the machine they were measured on. `met`: whether the targets were; None: not judged."""
    if path is None:
        return
    machine = {"cores": os.cpu_count(), "processor": facts.cpu_name(), "python": platform.python_version(),
               "load": os.getloadavg()[0]}
    path.write_text(json.dumps({"schema": 1, "benchmark": benchmark, "machine": machine, "targets_met": met, "rows": rows},
                               indent=1) + "\n", encoding="utf-8")


def close(met: bool | None, smoke: bool, targets: str) -> int:
    """Print the last line; the exit code. A smoke run measures too little to be judged. `met` as in `write_json`."""
    said = "smoke run, targets are not judged" if smoke else "targets are not judged" if met is None else "targets met" if met else "TARGETS MISSED"
    print(f"{said} ({targets})")
    return 0 if smoke or met is None or met else 1
