"""Models that Hugging Face libraries save in several files: `model-00001-of-00003.safetensors`, and an index that names them."""

from __future__ import annotations

import json
import os
import re
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

_PART = re.compile(r"(.+)-(\d+)-of-(\d+)\.(safetensors|bin)")

_INDICES = (".safetensors.index.json", ".bin.index.json")


def problems(folder: Path, present: list[str]) -> Iterator[tuple[str, str]]:
    """A file of each model in `folder` that lacks parts, and what it lacks. `present`: names of what is there. Where an index
    names the parts, it tells; elsewhere their numbers do, from 1 on, or from 0 where that is there.
    """
    indexed: set[str] = set()
    for index in sorted(name for name in present if name.endswith(_INDICES)):
        try:
            named = _named(folder / index)
        except FileNotFoundError:
            continue            # removed meanwhile
        except (OSError, ValueError) as error:
            yield index, f"it does not name the files of a model: {error}"
            continue
        indexed |= named
        missing = sorted(name for name in named.difference(present) if not os.path.exists(folder / name))
        if missing:
            yield index, f"{missing[0]} is missing" + (f" and {len(missing) - 1} more" if missing[1:] else "")
    yield from _gaps(sorted(name for name in present if name not in indexed))


def _named(index: Path) -> set[str]:
    """The files that an index names. Raises OSError, and ValueError where it is no index."""
    try:
        return {str(name) for name in json.loads(index.read_bytes())["weight_map"].values()}
    except (KeyError, TypeError, AttributeError, RecursionError) as error:
        raise ValueError("it has no map of weights") from error


def _gaps(names: list[str]) -> Iterator[tuple[str, str]]:
    """The first part that is missing of each model, and how many of its parts there are."""
    numbers: dict[tuple[str, str, str, int], set[int]] = defaultdict(set)
    for name in names:
        part = _PART.fullmatch(name)
        if part:
            numbers[part[1], part[3], part[4], len(part[2])].add(int(part[2]))
    for (model, total, ending, digits), there in numbers.items():
        first = min(1, *there)
        wanted = range(first, first + int(total))
        missing = next((number for number in wanted if number not in there), None)
        if missing is not None:
            count = sum(number in wanted for number in there)
            yield f"{model}-{missing:0{digits}d}-of-{total}.{ending}", f"it is missing: {count} of {int(total)} parts are there"
