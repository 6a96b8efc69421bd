"""Captures of verification runs, as the agent writes them, from what they hold."""

from __future__ import annotations

import json
import sys
from array import array
from pathlib import Path

from saturate.verify.series import CAPTURE, SAMPLES, SCHEMA, Series

CODES = {"float32": "f", "float64": "d"}


def write(series: Series, folder: Path) -> None:
    """Write a capture that `verify.series.read` returns equal (samples in the training's own precision)."""
    dims = len(series.samples[0]) if series.samples else 0
    records: list[dict] = [{"schema": SCHEMA, "motif": series.motif, "dims": dims, "segments": series.segments,
                            "samples": series.precision, "precision": series.precision, "arithmetic": series.arithmetic,
                            "formats": series.formats, "loss_format": series.loss_format, "device": series.device,
                            "statistics": series.statistics_segments, "dimensions": series.dimensions}]
    for k, (losses, norm) in enumerate(zip(series.losses, series.grad_norms)):
        digest = series.digests[k] if series.digests else ""
        own = series.settings[k] if series.settings else []
        sets = list(dict.fromkeys(one for one in own if one is not None))
        records.append({"update": k, "losses": losses, "grad_norm": norm, "digest": digest,
                        "settings": {"sets": [dict(one) for one in sets], "of": [-1 if one is None else sets.index(one) for one in own]}})
    (folder / CAPTURE).write_text("".join(json.dumps(record) + "\n" for record in records))
    with (folder / SAMPLES).open("wb") as file:
        for k, sample in enumerate(series.samples):
            row = array(CODES[series.precision], [*sample, *(series.statistics[k] if series.statistics else ())])
            if sys.byteorder == "big":
                row.byteswap()
            row.tofile(file)
