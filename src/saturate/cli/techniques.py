"""List the techniques of `tune`, or with --inference those of `optimize`: built-in ones and those that other packages
registered."""

from __future__ import annotations

import argparse
import importlib
import importlib.metadata
import pkgutil
from types import ModuleType
from typing import NamedTuple

from saturate.cli._output import answer, paint, table
from saturate.errors import TechniqueError
from saturate.techniques import _registry


class Found(NamedTuple):
    """One technique that is installed; `module` is None when it is broken, and `error` then says how."""

    name: str                                   # module name
    source: str                                 # "saturate", or the package that registered it
    module: ModuleType | None
    error: TechniqueError | None


def configure(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--inference", action="store_true", help="those of `saturate optimize`")
    parser.add_argument("--json", action="store_true", help="print one JSON object")


def execute(arguments: argparse.Namespace) -> int:
    """Exit code 2 when one is broken: `tune` would refuse to start for the same reason."""
    everything = installed(arguments.inference)
    working = sorted((item for item in everything if item.module is not None), key=lambda item: item.module.TECHNIQUE.id)
    broken = [item for item in everything if item.error is not None]
    if arguments.json:
        answer({"schema": 1, "techniques": [_row(item) for item in working], "broken": [
            {"module": item.name, "source": item.source, "error": item.error.message, "cause": item.error.cause} for item in broken]})
    else:
        rows = [("id", "numerics", "stage", "title")]
        for item in working:
            row = _row(item)
            origin = "" if item.source == "saturate" else f"  [from {item.source}]"
            rows.append((row["id"], row["numerics"], row["stage"], row["title"] + origin))
        head, *body = table(rows).split("\n")
        print("\n".join([paint(head, "bold"), *body]))
        for item in broken:
            print(f"\n{paint('broken', 'bold', 'red')}: {item.name}, from {item.source}\n  {item.error.message}: {item.error.cause}")
    return TechniqueError.exit_code if broken else 0


def installed(inference: bool = False) -> list[Found]:
    """Every technique that is installed, one broken one not hiding the others."""
    registry = importlib.import_module("saturate.inference.techniques._registry") if inference else _registry
    package = importlib.import_module(registry.__name__.rpartition(".")[0])
    names = [(f"{package.__name__}.{info.name}", "saturate") for info in pkgutil.iter_modules(package.__path__)
             if not info.name.startswith("_")]
    for entry in importlib.metadata.entry_points(group=registry.GROUP):
        origin = f"{entry.dist.name} {entry.dist.version}" if entry.dist is not None else "an unknown package"
        names.append((entry.value, origin))
    return [_load(registry, name, source) for name, source in names]


def _load(registry: ModuleType, name: str, source: str) -> Found:
    try:
        return Found(name, source, registry.load_one(name), None)
    except TechniqueError as error:
        return Found(name, source, None, error)


def _row(item: Found) -> dict[str, str]:
    technique = item.module.TECHNIQUE
    return {"id": technique.id, "numerics": technique.numerics, "stage": technique.stage, "title": technique.title,
            "status": technique.status, "source": item.source}
