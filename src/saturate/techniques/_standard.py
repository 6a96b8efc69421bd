"""Modules of the standard library that torch does not load, whatever lies beside the user's script.

A script's folder comes first on `sys.path`: a `resource.py` there, which the script may never import itself, would be taken for the
standard one, and what it does at its import would be done by us.
"""

from __future__ import annotations

import functools
import importlib
import os
import sys
from importlib.machinery import BuiltinImporter, PathFinder
from importlib.util import module_from_spec
from typing import Any

_FOLDER = os.path.dirname(os.__file__)


@functools.cache
def standard(name: str) -> Any:
    """The standard library's own module. It does not go into `sys.modules`, where the script's may be looked for later.

    Raises ModuleNotFoundError where this Python has none.
    """
    loaded = sys.modules.get(name)
    spec = BuiltinImporter.find_spec(name) or PathFinder.find_spec(name, [_FOLDER, os.path.join(_FOLDER, "lib-dynload")])
    if spec is None or spec.loader is None:         # a Python whose library lies in more folders
        return importlib.import_module(name)
    if loaded is not None and getattr(getattr(loaded, "__spec__", None), "origin", None) == spec.origin:
        return loaded
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
