"""Technique modules as small as they can be, and a recipe that uses them."""

from __future__ import annotations

from dataclasses import dataclass
from types import SimpleNamespace
from typing import Literal

from saturate.records.recipe import Entry, MadeFor, MeasuredEvidence, Recipe
from saturate.techniques._api import Touch


@dataclass(frozen=True)
class CompileOptions:
    mode: Literal["default", "reduce-overhead"] = "default"
    dynamic: bool = False


@dataclass(frozen=True)
class LoaderOptions:
    count: int = 2


@dataclass(frozen=True)
class Nothing:
    pass


def module(identity, numerics, options, *touches):
    return SimpleNamespace(TECHNIQUE=SimpleNamespace(id=identity, numerics=numerics, touches=touches, title=identity), Options=options)


REGISTRY = {
    "compile": module("compile", "stream", CompileOptions, Touch("forward", 90)),
    "bf16-autocast": module("bf16-autocast", "precision", Nothing, Touch("autocast"), Touch("forward", 30)),
    "fp16-autocast": module("fp16-autocast", "precision", Nothing, Touch("autocast"), Touch("forward", 30)),
    "loader-workers": module("loader-workers", "stream", LoaderOptions, Touch("loader.workers")),
}

RECIPE = Recipe(
    made_for=MadeFor(device="cpu", device_name="", cpu="Some CPU", torch="2.13.0+cpu", python="3.11.7", saturate="0.1.0", script="ab" * 32),
    evidence=MeasuredEvidence(baseline_ms=212.4, tuned_ms=118.9, speedup=1.786, speedup_ci=(1.77, 1.80), verified=True,
                              noise_floor=0.006, break_even_steps=120, command=["python", "train.py"]),
    techniques=[
        Entry(id="bf16-autocast", gain=0.41, gain_ci=(0.38, 0.44), numerics="precision", why="84 % of the step is matrix products"),
        Entry(id="compile", options={"mode": "default", "dynamic": False}, gain=0.2, gain_ci=(0.18, 0.22), numerics="stream",
              why="many small operations\nbetween \"big\" ones"),
        Entry(id="loader-workers", options={"count": 4}, gain=0.1, gain_ci=(0.08, 0.12), numerics="stream", why="31 % input wait"),
    ],
)
