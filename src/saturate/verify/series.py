"""What one verification run recorded, and its files.

A folder holds `capture.jsonl` and `samples.bin`. The first line of the former is a header

    {"schema": 3, "motif": "F B S", "dims": 1536, "segments": [64, 64, ...], "dimensions": [2, 1, ...], "statistics": [64, ...],
     "samples": "float32", "precision": "float32"}

and each following line one update: {"update": 0, "losses": [2.3], "grad_norm": 1.7, "digest": "...", "settings": {"sets":
[{"lr": 0.1, ...}], "of": [0, 0, ...]}}, the last of which are those of the optimizers, by tensor (`agent.settings`). The latter
holds, after each update, `dims` numbers of the format `samples`, little-endian: the same strided sample of all trained
parameters, tensor after tensor; `segments` says how many of them belong to each tensor. After them come the entries of the
modules' buffers, as many of each as `statistics` says. `samples` is float64 where any of
these tensors is, else float32; `precision` is float64 only where all of them, and the losses, are: then nothing in the
training need round to less. `arithmetic`, `formats`, `loss_format` and `device` are those of `Series`. `grad_norm` may be null;
`digest` and what follows `segments` may be absent. A run may be killed at any moment, so a last record that is cut short is dropped.
"""

from __future__ import annotations

import json
import math
import sys
from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from pathlib import Path
from typing import Any

SCHEMA = 3
CAPTURE = "capture.jsonl"
SAMPLES = "samples.bin"

#: One rounding, relative, to the formats that a training may be computed in; tfloat32 is that of operands of matrix products and
#: convolutions only. Two honest trainings differ by roundings to the coarsest of them: compilers drop those between operators that
#: they fuse, another attention kernel rounds its probabilities elsewhere, a fused optimizer rounds a parameter once per update where
#: others do so after every operation, and another algorithm of a convolution may use TensorFloat-32 or not.
ROUNDING = {"float32": 2.0**-24, "float64": 2.0**-53, "bfloat16": 2.0**-9, "tfloat32": 2.0**-11, "float16": 2.0**-12}

#: The formats that are coarser than float32 and can hold parameters and losses.
COARSE = ("bfloat16", "float16")

#: The type codes of arrays of these formats.
_CODES = {"float32": "f", "float64": "d"}


class CaptureDamaged(ValueError):
    """A capture cannot be read; the message says where and why."""


@dataclass(frozen=True)
class Series:
    """One training, update by update. All lists have one entry per update.

    losses: the loss of each micro-step, in order, as the script computed it. grad_norms: 2-norm of all gradients at
    the update; nan where it could not be read. samples: the strided parameter sample *after* the update.
    digests: a hash of the update's input data, or "" where none was seen. precision: that of the parameters and the
    losses, float32 unless all are float64. arithmetic: the coarsest format that the training computes in where that is coarser
    than float32, else "". formats: that of each segment's tensor. loss_format: that of the losses. device: the type of device that
    the parameters are on. Each of these is empty where it is not known. statistics: the strided sample of the trained modules'
    buffers after the update (the running statistics of a normalisation), and statistics_segments how many entries are of each.
    dimensions: of each segment's tensor. settings: what the optimizer is set to for each of them, as pairs of a name and a value, None where
    it is not known; empty where none is.
    """

    losses: list[list[float]]
    grad_norms: list[float]
    samples: list[Sequence[float]]
    motif: str = ""
    digests: list[str] = field(default_factory=list)
    segments: list[int] = field(default_factory=list)
    precision: str = "float32"
    arithmetic: str = ""
    formats: list[str] = field(default_factory=list)
    loss_format: str = ""
    device: str = ""
    statistics: list[Sequence[float]] = field(default_factory=list)
    statistics_segments: list[int] = field(default_factory=list)
    dimensions: list[int] = field(default_factory=list)
    settings: list[list[tuple[Any, ...] | None]] = field(default_factory=list)

    @property
    def rounding(self) -> float:
        """One rounding of the numbers that parameters and losses are recorded in, relative."""
        return ROUNDING[self.precision]

    @property
    def coarsest_rounding(self) -> float:
        """One rounding of the coarsest format that the training itself computes in, relative."""
        return max(self.rounding, ROUNDING.get(self.arithmetic, 0.0))

    def coarse(self, part: int) -> bool:
        """Whether the tensor of this part is held in a format coarser than float32."""
        return part < len(self.formats) and self.formats[part] in COARSE

    def matrix(self, part: int) -> bool:
        """Whether the tensor of this part has two dimensions or more, as far as is known: what is trained, but for biases and scales."""
        return part < len(self.dimensions) and self.dimensions[part] > 1

    def __len__(self) -> int:
        return len(self.losses)

    def loss(self, update: int) -> float:
        """Mean loss of the update's micro-steps; nan when there was none."""
        losses = self.losses[update]
        return math.fsum(losses) / len(losses) if losses and all(map(math.isfinite, losses)) else math.nan

    @property
    def searches(self) -> bool:
        """Whether an optimizer chooses how often it evaluates its closure in one step, as LBFGS does: it stops at a
        tolerance, so the last bits of a loss decide. All backward passes are inside such a step."""
        inside = bool(self.motif) and "B" not in self.motif.split()
        return inside and any(len(losses) > 1 for losses in self.losses)

    def parts(self) -> list[tuple[int, int]]:
        """(begin, end) of each tensor inside a sample; one part when the capture does not say."""
        bounds = _bounds(self.segments)
        dims = len(self.samples[0]) if self.samples else 0
        return bounds if bounds and bounds[-1][1] == dims else [(0, dims)]

    def statistics_parts(self) -> list[tuple[int, int]]:
        """(begin, end) of each buffer inside a row of `statistics`."""
        return _bounds(self.statistics_segments)


def _bounds(lengths: Sequence[int]) -> list[tuple[int, int]]:
    ends = list(accumulate(lengths))
    return list(zip([0, *ends], ends))


def _header(line: bytes, path: Path) -> dict:
    try:
        header = json.loads(line)
    except ValueError as error:
        raise CaptureDamaged(f"{path}: the header is not JSON: {error}") from error
    if not isinstance(header, dict) or header.get("schema", SCHEMA) != SCHEMA:
        raise CaptureDamaged(f"{path}: not a capture of schema {SCHEMA}")
    if not isinstance(header.get("dims"), int) or header["dims"] < 0:
        raise CaptureDamaged(f"{path}: the header has no valid dims")
    for key in ("samples", "precision"):
        if header.setdefault(key, "float32") not in _CODES:
            raise CaptureDamaged(f"{path}: the header's {key} is no known number format")
    return header


def _number(value: object) -> float:
    return math.nan if value is None else float(value)  # type: ignore[arg-type]


def _settings(told: Any) -> list[tuple[Any, ...] | None]:
    """By tensor."""
    sets = [tuple((name, tuple(one) if isinstance(one, list) else one) for name, one in values.items()) for values in (told or {}).get("sets", [])]
    return [sets[place] if 0 <= place < len(sets) else None for place in (told or {}).get("of", [])]


def _updates(lines: list[bytes], path: Path) -> list[tuple[list[float], float, str, list[tuple[Any, ...] | None]]]:
    found = []
    for position, line in enumerate(lines):
        try:
            record = json.loads(line)
            update = record["update"]
            found.append(([_number(v) for v in record["losses"]], _number(record.get("grad_norm")),
                          str(record.get("digest") or ""), _settings(record.get("settings"))))
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            if position == len(lines) - 1:
                break               # the process was killed inside its last write
            raise CaptureDamaged(f"{path}: line {position + 2} is not an update: {error!r}") from error
        if update != position:
            raise CaptureDamaged(f"{path}: update {position} is missing, line {position + 2} is update {update}")
    return found


def read(folder: Path) -> Series:
    """Read a capture; updates without their samples (or the reverse) at the end are dropped.

    Raises FileNotFoundError when there is no capture, CaptureDamaged when it is not one.
    """
    path = folder / CAPTURE
    lines = path.read_bytes().splitlines()
    if not lines:
        raise CaptureDamaged(f"{path}: empty")
    header = _header(lines[0], path)
    updates = _updates(lines[1:], path)
    dims = header["dims"]
    code = _CODES[header["samples"]]
    statistics = list(header.get("statistics") or [])
    rows = [array(code) for _ in updates]
    if width := dims + sum(statistics):
        raw = (folder / SAMPLES).read_bytes()
        row = array(code).itemsize * width
        rows = [array(code, raw[k : k + row]) for k in range(0, len(raw) - row + 1, row)]
        if sys.byteorder == "big":
            for sample in rows:
                sample.byteswap()
    n = min(len(updates), len(rows))
    losses, norms, digests, settings = [list(column) for column in zip(*updates[:n])] or ([], [], [], [])
    segments = list(header.get("segments") or [])
    told = {key: str(header.get(key) or "") for key in ("arithmetic", "loss_format", "device")}
    return Series(losses, norms, [row[:dims] for row in rows[:n]], str(header.get("motif", "")), digests, segments, header["precision"],
                  formats=list(header.get("formats") or []), **told,
                  statistics=[row[dims:] for row in rows[:n]] if statistics else [], statistics_segments=statistics,
                  dimensions=list(header.get("dimensions") or []), settings=settings if any(settings) else [])


def as_often(expected: Sequence[list[float]], found: Sequence[list[float]], fewer: float) -> list[list[float]]:
    """The losses that were `found`, by update and micro-step, with as many micro-steps as `expected` where up to `fewer` of those ran as
    one: their sum in equal parts. An update with fewer backward passes than that, or with more than expected, stays as it is: it is
    another training.

    >>> as_often([[1.0, 2.0, 3.0, 4.0]] * 3, [[10.0], [3.0, 7.0], [5.0] * 5], 2)
    [[10.0], [2.5, 2.5, 2.5, 2.5], [5.0, 5.0, 5.0, 5.0, 5.0]]
    """
    return [_in_parts(theirs, len(ours)) if len(theirs) < len(ours) <= fewer * len(theirs) else theirs
            for ours, theirs in zip(expected, found)] + list(found[len(expected):])


def _in_parts(losses: list[float], count: int) -> list[float]:
    total = math.fsum(losses) if all(map(math.isfinite, losses)) else math.nan
    return [total / count] * count
