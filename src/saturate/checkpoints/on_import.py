"""Something to do with a module right after the script has imported it, which may be at its first save, or never."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable
from typing import Any


def once_imported(name: str, act: Callable[[Any], None]) -> None:
    """Call `act(module)`: now, where the module is loaded, else right after its import. Nothing is imported for it. What `act` raises,
    whoever imports the module is raised."""
    if name in sys.modules:
        act(sys.modules[name])
    else:
        sys.meta_path.insert(0, _Watch(name, act))


class _Watch:
    """Has the other finders look, and takes itself away when the module was run. To be looked for is not to be imported."""

    def __init__(self, name: str, act: Callable[[Any], None]):
        self._name, self._act = name, act
        self._looking = False               # by itself: then all finders are asked, this one included

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
        if name != self._name or self._looking:
            return None
        self._looking = True
        try:
            spec = importlib.util.find_spec(name)
        finally:
            self._looking = False
        if spec is not None and hasattr(spec.loader, "exec_module"):
            self._follow(spec.loader)
        return spec

    def _follow(self, loader: Any) -> None:
        run = loader.exec_module

        def exec_module(module: Any) -> None:
            vars(loader).pop("exec_module", None)       # that of its class shows again
            run(module)
            if self in sys.meta_path:
                sys.meta_path.remove(self)
                self._act(module)

        loader.exec_module = exec_module
