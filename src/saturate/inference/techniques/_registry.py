"""Finding inference techniques: the modules of this package, and those that third parties registered.

    [project.entry-points."saturate.inference_techniques"]
    my-technique = "my_package.my_technique"

The same rules as for training techniques (`saturate.techniques._registry`): a module that does not load or does not keep
the contract of `_api` is a `TechniqueError` that names it. Ids are shared with training techniques, because
`saturate explain ID` knows both; an id that is taken twice is an error too.
"""

from __future__ import annotations

from types import ModuleType

from saturate import plugins
from saturate.errors import TechniqueError
from saturate.inference.techniques._api import STAGES
from saturate.techniques import _registry as shared

PACKAGE = "saturate.inference.techniques"
GROUP = "saturate.inference_techniques"


def load() -> dict[str, ModuleType]:
    """Every technique by id, in id order. Raises `TechniqueError` for the first one that is damaged."""
    return plugins.load(PACKAGE, GROUP, "inference technique", load_one, lambda module: module.TECHNIQUE.id, TechniqueError)


def load_one(name: str, path: str | None = None) -> ModuleType:
    """Import one technique by module name and check it; where the name cannot be imported, the file at `path` is loaded
    under that name instead (a candidate's process may find less than the one that searches)."""
    return shared.load_checked(name, path, check, "saturate.testing.inference_conformance")


def check(module: ModuleType) -> list[str]:
    """Everything about the module's shape that breaks the contract; empty when it is well formed."""
    problems = shared.documentation_problems(module) + shared.metadata_problems(module, STAGES) + shared.options_problems(module)
    problems += shared.function_problems(module, {name: shared.PARAMETERS[name] for name in shared.functions(module)})
    technique = getattr(module, "TECHNIQUE", None)
    if getattr(technique, "stage", None) == "runtime" and "runtime" not in {touch.resource for touch in technique.touches}:
        problems.append('a technique of stage runtime must claim the resource "runtime": only one program can serve')
    return problems


documentation = shared.documentation

#: Module name and absolute file path: what another process needs for `load_one`.
origin = plugins.origin
