"""What vendors state about accelerators, and which of them a device's name means.

The figures, their units and their sources are in `accelerators.toml`, next to this file.
"""

from __future__ import annotations

import re
import tomllib
from dataclasses import dataclass
from functools import cache
from importlib import resources
from typing import Any

#: The table's columns of rates, by the name that torch gives the format. "tfloat32": fp32 rounded to TF32 by the
#: matrix units.
_RATES = {"fp32": "float32", "tf32": "tfloat32", "fp16": "float16", "bf16": "bfloat16", "fp8": "float8",
          "int8": "int8"}
_ABSENT = "-"
_VENDORS = re.compile(r"^(NVIDIA|AMD|Tesla|GeForce|Instinct|Radeon|Graphics)\s+", re.IGNORECASE)


@dataclass(frozen=True)
class Spec:
    """One accelerator as its vendor states it. Rates are dense; None: no such thing, or not stated."""

    name: str
    vendor: str
    architecture: str
    rates: dict[str, float]                 # format -> operations per second; no fast path for those that are missing
    bandwidth: float                        # of its memory, bytes per second
    memory_bytes: int
    units: int                              # streaming multiprocessors, compute units
    link: float | None                      # NVLink or Infinity Fabric, both directions, bytes per second
    pcie_generation: int | None
    pcie_lanes: int | None
    watts: int
    sources: tuple[str, ...]
    pattern: re.Pattern[str]


def find(name: str) -> Spec | None:
    """The accelerator that a driver, torch or a trace calls `name`; None: not in the table.

    Laptop versions, slices of a device (MIG, vGPU) and devices of similar name are not the device itself, and are not
    found.

    >>> find("NVIDIA H100 80GB HBM3").name
    'NVIDIA H100 SXM'
    >>> find("NVIDIA GeForce RTX 4090 Laptop GPU") is None
    True
    """
    plain = " ".join(name.split())
    while (shorter := _VENDORS.sub("", plain)) != plain:
        plain = shorter
    return next((spec for spec in table() if spec.pattern.fullmatch(plain)), None)


@cache
def table() -> tuple[Spec, ...]:
    """Every accelerator of the table, in its order."""
    text = resources.files(__package__).joinpath("accelerators.toml").read_text(encoding="utf-8")
    content = tomllib.loads(text)
    return tuple(_spec(name, dict(zip(content["columns"], row, strict=True)), family)
                 for family in content["family"] for name, row in family["devices"].items())


def _spec(name: str, row: dict[str, Any], family: dict[str, Any]) -> Spec:
    known = {column: value for column, value in row.items() if value != _ABSENT}
    generation, lanes = map(int, known["pcie"].split("x")) if "pcie" in known else (None, None)
    return Spec(
        name=name,
        vendor=family["vendor"],
        architecture=family["architecture"],
        rates={label: known[column] * 1e12 for column, label in _RATES.items() if column in known},
        bandwidth=known["band"] * 1e9,
        memory_bytes=known["mem"] * 10**9,
        units=known["units"],
        link=known["link"] * 1e9 if "link" in known else None,
        pcie_generation=generation,
        pcie_lanes=lanes,
        watts=known["watt"],
        sources=tuple(family["sources"]),
        pattern=re.compile(known["match"], re.IGNORECASE),
    )
