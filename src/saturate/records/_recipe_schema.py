"""The structs of a recipe file. Public as `saturate.records.recipe`."""

from __future__ import annotations

import json
from typing import Annotated, Any

from msgspec import Meta, Struct, field

SCHEMA = 1

Positive = Annotated[float, Meta(gt=0)]
Interval = tuple[float, float]


class MadeFor(Struct, frozen=True, kw_only=True):
    """Where the recipe was measured. An empty field was not recorded and is not compared."""

    device: str = ""
    device_name: str = ""
    cpu: str = ""
    torch: str = ""
    python: str = ""
    saturate: str = ""
    script: str = ""                            # SHA-256 of the training script's file, hexadecimal


class MeasuredEvidence(Struct, frozen=True, kw_only=True):
    """What the final race measured. Times are medians of one step in milliseconds; None was not measured."""

    baseline_ms: Positive | None = None
    tuned_ms: Positive | None = None
    speedup: Positive | None = None             # baseline / tuned
    speedup_ci: Interval | None = None
    verified: bool | None = None
    noise_floor: Annotated[float, Meta(ge=0)] | None = None  # 0.012: differences below 1.2 % are not resolved
    break_even_steps: Annotated[int, Meta(ge=0)] | None = None
    peak_bytes: Annotated[int, Meta(ge=0)] | None = None
    baseline_peak_bytes: Annotated[int, Meta(ge=0)] | None = None
    limit_bytes: Annotated[int, Meta(ge=0)] | None = None
    command: list[str] = []


class Entry(Struct, frozen=True, kw_only=True):
    """One technique of the recipe."""

    id: Annotated[str, Meta(min_length=1)]
    options: dict[str, Any] = {}
    gain: Annotated[float, Meta(gt=-1)] | None = None  # marginal speed-up minus one in the final set
    gain_ci: Interval | None = None
    numerics: str = ""
    why: str = ""


class Recipe(Struct, frozen=True, kw_only=True):
    """A whole recipe."""

    schema: int = SCHEMA
    made_for: MadeFor = MadeFor()
    evidence: MeasuredEvidence = MeasuredEvidence()
    techniques: list[Entry] = field(default_factory=list, name="technique")


class Problem(Struct, frozen=True, kw_only=True):
    """One thing that is wrong with a recipe. `key` is the path to it: ("technique", 0, "options", "count")."""

    message: str
    key: tuple[str | int, ...] = ()
    line: int | None = None                     # 1 is the first
    column: int | None = None
    remedy: str = ""

    def where(self) -> str:
        """The key as a person would say it: `technique 1, options.count`."""
        if self.key[:1] == ("technique",) and len(self.key) > 1:
            return ", ".join(filter(None, (f"technique {int(self.key[1]) + 1}", ".".join(map(str, self.key[2:])))))
        return ".".join(map(str, self.key))


def clip(text: str, limit: int = 120) -> str:
    """One printable line: file content must not drive the terminal."""
    text = "".join(char if char.isprintable() else "?" for char in text[:limit + 1])
    return text if len(text) <= limit else text[:limit - 3] + "..."


def same(a: Any, b: Any) -> bool:
    """Equal in a TOML file: unlike for Python, true is not 1, and 1 is not 1.0."""
    return json.dumps(a, sort_keys=True) == json.dumps(b, sort_keys=True)
