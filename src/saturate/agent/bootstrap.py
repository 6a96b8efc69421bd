"""From interpreter start to the first sign of training: import hooks, and the seams in torch."""

from __future__ import annotations

import atexit
import sys
from importlib.machinery import PathFinder
from typing import Any


class ImportWatch:
    """A meta-path finder that runs a callback right after a named module was imported, once, and imports nothing."""

    def __init__(self, callbacks: dict[str, Any]):
        self.callbacks = callbacks
        self._looking: set[str] = set()     # another finder of this kind may ask everybody, us included

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
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

        def exec_module(module: Any) -> None:
            vars(spec.loader).pop("exec_module", None)      # the class's method shows again
            run(module)
            self._imported(name, module)

        spec.loader.exec_module = exec_module
        return spec

    def _imported(self, name: str, module: Any) -> None:
        callback = self.callbacks.pop(name, None)
        if not self.callbacks and self in sys.meta_path:
            sys.meta_path.remove(self)
        if callback is not None:
            callback(module)

    def _find(self, name: str, path: Any, target: Any) -> Any:
        spec = PathFinder.find_spec(name, path, target)
        if spec is not None:
            return spec
        for finder in sys.meta_path:        # zip files, editable installs
            if finder is not self and hasattr(finder, "find_spec"):
                spec = finder.find_spec(name, path, target)
                if spec is not None:
                    return spec
        return None


def start(plan: dict[str, Any]) -> None:
    """Called by `sitecustomize` with the plan that the launcher wrote.

    Plan keys: `package` (folder of this package), `mode` ("trial", "verify" or "run"), `techniques` (id, module, path,
    options), `step` (known motif or null), and per mode `socket` and `token`, `capture`, `drill`, `fit` (see
    `agent.batching`), `redirect`, `on_divergence`.
    `early` (true: techniques that must act before memory is taken do so in a verification run, too) and `early_facts` (a path:
    what is known before the first training forward is written there): see `agent.early`; `device_limit_bytes`; `ended` (the
    beginning of a path: what was seen by a process that trained and ended before the gate is written there).
    """
    if plan.get("on_divergence") == "stop":
        from saturate.agent import watchdog

        atexit.register(watchdog.leave, plan)       # the first to be registered is the last to be called
    callbacks: dict[str, Any] = {"torch": lambda torch: _on_torch(torch, plan)}
    if plan.get("redirect"):
        from saturate.agent import redirect

        redirect.install_from_plan(plan["redirect"])
        callbacks.update(redirect.callbacks())
    if plan["mode"] != "run":
        from saturate.agent import trackers

        callbacks.update(trackers.callbacks())
    capture = plan.get("capture")
    if capture:
        from saturate.agent import randomness

        seeds = capture["seed"], capture.get("seed_offset", 0)
        randomness.seed_standard_library(*seeds)
        callbacks["numpy"] = lambda numpy: randomness.seed_numpy(numpy, *seeds)
    watch = ImportWatch(callbacks)
    sys.meta_path.insert(0, watch)


def _on_torch(torch: Any, plan: dict[str, Any]) -> None:
    from saturate.agent import seams
    from saturate.agent.session import Session

    if plan.get("redirect"):
        from saturate.agent import redirect

        redirect.on_torch(torch)
    capture = plan.get("capture")
    if capture:
        from saturate.agent import randomness

        randomness.seed_torch(torch, capture["seed"], capture.get("seed_offset", 0))
        if capture.get("aligned"):
            randomness.align(torch, capture["seed"])
    session = Session(torch, plan)
    session.guard(seams.install, session)
    if plan.get("drill"):
        from saturate.agent.drill import Drill

        session.capture = session.guard(Drill, session, plan["drill"])
