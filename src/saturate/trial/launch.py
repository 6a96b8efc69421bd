"""How saturate puts itself in front of a command: the plan file, the environment, and what defeats both."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

PACKAGE = Path(__file__).resolve().parent.parent
INJECT = PACKAGE / "agent" / "inject"


@dataclass(frozen=True)
class Chosen:
    """One technique with its options, and where the agent finds it: a module name, a file for another environment."""

    id: str
    module: str
    path: str | None = None
    options: dict[str, Any] = field(default_factory=dict)
    environment: dict[str, str] = field(default_factory=dict)


def plan_text(mode: str, techniques: list[Chosen], **more: Any) -> str:
    """What the agent reads at its start, as JSON. `more`: see `agent.bootstrap.start`."""
    return json.dumps({
        "package": str(PACKAGE),
        "mode": mode,
        "techniques": [asdict(chosen) for chosen in techniques],
        "environment": sorted({name for chosen in techniques for name in chosen.environment}),
        **more,
    })


def injected(base: Mapping[str, str], plan: str, techniques: list[Chosen]) -> dict[str, str]:
    """The environment of a workload that carries the agent. `plan` is a file's path, or the plan itself: a run that
    replaces saturate has no folder to leave a file in."""
    environment = dict(base)
    rest = [entry for entry in environment.get("PYTHONPATH", "").split(os.pathsep) if entry and entry != str(INJECT)]
    environment["PYTHONPATH"] = os.pathsep.join([str(INJECT), *rest])
    environment["SATURATE_PLAN"] = plan
    for chosen in techniques:
        environment.update(chosen.environment)
    return environment


def defeated_by(argv: list[str]) -> str | None:
    """The interpreter option in `argv` that keeps `sitecustomize` from running, or None when none is in sight.

    >>> defeated_by(["python", "-I", "train.py"])
    '-I'
    >>> defeated_by(["python", "train.py", "-I"]) is None
    True
    """
    takes_value = {"-W", "-X", "--check-hash-based-pycs"}
    for position, word in enumerate(argv):
        if not Path(word).name.startswith("python"):
            continue
        rest = iter(argv[position + 1:])
        for option in rest:
            if not option.startswith("-") or option in ("-c", "-m", "-"):
                break
            if option in takes_value:
                next(rest, None)
            elif not option.startswith("--"):
                for letter in option[1:]:
                    if letter in "IES":
                        return f"-{letter}"
                    if letter in "cmWX":
                        break
    return None
