"""A callback right after an import.

`agent/inject/sitecustomize.py` runs this in every Python process below saturate, before the user's code. So it imports nothing
that the interpreter has not loaded by itself: a script may lie beside a `json.py` or a `types.py` of its own, and what is
loaded before it would be taken instead.
"""

import sys
from _frozen_importlib_external import PathFinder


def once_imported(name, callback):
    """`callback(module)`: now, where the module is loaded; else right after its import, which may take seconds, and never come. What
    the callback raises, whoever imports the module is raised."""
    if name in sys.modules:
        callback(sys.modules[name])
    else:
        sys.meta_path.insert(0, ImportWatch({name: callback}))


class ImportWatch:
    """A meta-path finder that runs a callback right after a named module was imported, once, and imports nothing."""

    def __init__(self, callbacks):
        self.callbacks = callbacks          # name of a module -> what to call with it
        self._looking = set()               # another finder of this kind may ask everybody, us included

    def find_spec(self, name, path=None, target=None):
        # Being looked for is not being imported: libraries ask `importlib.util.find_spec("torch")` whether it is there.
        if name not in self.callbacks or name in self._looking:
            return None
        self._looking.add(name)
        try:
            spec = self._find(name, path, target)
        finally:
            self._looking.discard(name)
        if spec is None or not hasattr(spec.loader, "exec_module"):
            return spec
        run = spec.loader.exec_module

        def exec_module(module):
            vars(spec.loader).pop("exec_module", None)      # the class's method shows again
            run(module)
            self._imported(name, module)

        spec.loader.exec_module = exec_module
        return spec

    def _imported(self, name, module):
        callback = self.callbacks.pop(name, None)
        if not self.callbacks and self in sys.meta_path:
            sys.meta_path.remove(self)
        if callback is not None:
            callback(module)

    def _find(self, name, path, target):
        spec = PathFinder.find_spec(name, path, target)
        if spec is not None:
            return spec
        for finder in sys.meta_path:        # zip files, editable installs
            if finder is not self and hasattr(finder, "find_spec"):
                spec = finder.find_spec(name, path, target)
                if spec is not None:
                    return spec
        return None
