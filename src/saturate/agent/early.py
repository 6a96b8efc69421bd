"""Applying techniques before the first training forward, for those that must act before memory is taken.

Others of stage "model" wait until the step is known and one step was inspected; what saves memory would come too late
then: the first steps would take what it saves. So a technique that declares `EARLY = True` is applied when a module
with parameters of an optimizer is called in training mode for the first time. In verification runs it waits like the
others, so that the first updates are the baseline's, unless the plan says otherwise. Where nothing of the kind is
seen, or it cannot be applied yet, it is applied with the others.
"""

from __future__ import annotations

import functools
import json
import types
from typing import Any

from saturate.agent import facts, memory, observe, usercompiled
from saturate.agent.forwards import own_forward

#: Calls of modules without trained parameters, after an optimizer was built, before we stop looking.
MOST_CALLS = 2000


def install(session: Any, apply_stage: Any) -> None:
    """Look out for the first training forward, if the plan has any use for it: a technique, what is known by then, or a limit
    for the device's allocator. `apply_stage`: of `agent.application`."""
    plan = session.plan
    wanted = any(_is_early(entry) for entry in plan["techniques"]) and (plan["mode"] != "verify" or plan.get("early"))
    if wanted or plan.get("early_facts") or plan.get("device_limit_bytes"):
        FirstForward(session, apply_stage if wanted else None)


def _is_early(entry: dict[str, Any]) -> bool:
    from saturate.errors import TechniqueError
    from saturate.techniques import _registry

    try:
        return getattr(_registry.load_one(entry["module"], entry.get("path")), "EARLY", False)
    except TechniqueError:
        return False        # reported when its stage comes


class FirstForward:
    """Listens to every call of a module until the first one that counts."""

    def __init__(self, session: Any, apply_stage: Any):
        from saturate.agent import seams

        self.session = session
        self.apply_stage = apply_stage
        self.calls = 0
        self._replaced: tuple[Any, Any] | None = None       # a module that was called, and what stood in place of its forward
        torch, owner = session.torch, session.torch.nn.Module
        original = vars(owner)["__call__"]

        @functools.wraps(original)
        def call(module: Any, *args: Any, **kwargs: Any) -> Any:
            if session.optimizers.built and not torch.compiler.is_compiling() and module.training and torch.is_grad_enabled():
                session.guard(self._called, module)
            return original(module, *args, **kwargs)

        seams.replace(session, owner, "__call__", call)
        self._restore = session.undo[-1]

    def _called(self, module: Any) -> None:
        session = self.session
        if session.asleep:
            return
        self.calls += 1
        optimizers = [o for o in session.optimizers.constructed() if "param_groups" in vars(o)]
        trained = {id(p): p for o in optimizers for group in o.param_groups for p in group["params"]}
        if session.phase == "active" or self.calls > MOST_CALLS:
            self._stop()
        elif any(id(p) in trained for p in module.parameters()):
            called = self._settled(module)
            if called is None:
                return
            self._stop()
            session.whole(self._begin, called, tuple(optimizers), list(trained.values()))

    def _stop(self) -> None:
        self._restore()
        self._replaced = None       # the session may keep this object, and the script may drop the module

    def _settled(self, module: Any) -> Any:
        """The module whose own forward is about to be called; None until that is known. Lightning and Fabric put a function in
        place of it that takes itself away and runs `training_step`: the next call shows whether it did."""
        distributed = self.session.torch.nn.parallel.DistributedDataParallel
        if isinstance(module, distributed) and _for_one_call(own_forward(module.module)):
            return None
        if self._replaced is not None:
            holder, replaced = self._replaced
            return holder if own_forward(holder) is replaced else module
        if _for_one_call(own_forward(module)):
            self._replaced = module, own_forward(module)
            return None
        return module

    def _begin(self, module: Any, optimizers: tuple[Any, ...], trained: list[Any]) -> None:
        session = self.session
        identities = {id(p) for p in trained}
        everything = observe.all_modules(session.torch)
        owners = front(everything, identities, module)
        distributed = session.torch.nn.parallel.DistributedDataParallel
        wrapped = any(isinstance(m, distributed) and any(id(p) in identities for p in m.parameters()) for m in everything)
        modules = tuple(m.module if isinstance(m, distributed) else m for m in owners)
        if session.plan.get("early_facts") and observe.rank() == 0:
            with open(session.plan["early_facts"], "w", encoding="utf-8") as file:
                json.dump(_facts(session, modules, optimizers, trained, wrapped), file)
        session.context.device = observe.device_kind(trained)
        if session.plan.get("device_limit_bytes"):
            memory.limit_allocator(session.torch.cuda, observe.devices(trained, "cuda"), session.plan["device_limit_bytes"])
        if self.apply_stage is not None:
            context = session.context
            context.modules, context.optimizers = modules, optimizers
            context.early = True
            self.apply_stage(session, "model", before_training=True)
            context.early = False


def _for_one_call(forward: Any) -> bool:
    """Whether this may be in place of a forward for one call only. What stays is a method, or says what it wraps."""
    return isinstance(forward, types.FunctionType) and not hasattr(forward, "__wrapped__")


def front(modules: list[Any], trained: set[int], called: Any) -> list[Any]:
    """The outermost modules that own trained parameters; one that only holds `called` gives way to its children, since its
    own forward is not what is called (a LightningModule)."""
    owners = [m for m in modules if any(id(p) in trained for p in m.parameters())]
    children = {id(child) for m in owners for child in m._modules.values() if child is not None}
    found = [m for m in owners if id(m) not in children]
    while called not in found:
        holder = next((m for m in found if any(below is called for below in m.modules())), None)
        if holder is None:
            return found
        inner = [c for c in holder.children() if any(id(p) in trained for p in c.parameters())]
        found = [m for m in found if m is not holder] + inner
    return found


class _NothingSeen:
    """What an inspection would know, before any step was inspected: the modules, and None for the rest."""

    def __init__(self, torch: Any, modules: tuple[Any, ...], trained: list[Any], distributed: bool):
        self.device, self.modules, self.distributed = observe.device_kind(trained), modules, distributed
        self.devices = observe.devices(trained, self.device)
        self.device_name = torch.cuda.get_device_name(self.devices[0]) if self.device == "cuda" else ""
        self.compiled, self.shapes, self.micro_steps = usercompiled.anything(modules), (), 1

    def compiles(self, module: Any) -> bool | None:
        return usercompiled.Graph().compiles(module) if self.compiled else False

    def describe(self) -> str:
        return ""

    def __getattr__(self, name: str) -> None:
        return None


class _Before:
    """A session before its first step."""

    def __init__(self, session: Any, inspection: _NothingSeen, optimizers: tuple[Any, ...]):
        self._session, self.inspection = session, inspection
        self.optimizers = types.SimpleNamespace(living=lambda: optimizers)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._session, name)


def _facts(session: Any, modules: tuple[Any, ...], optimizers: tuple[Any, ...], trained: list[Any], distributed: bool) -> dict[str, Any]:
    """What can be said before a step has run; what nobody has seen yet is left out."""
    seen = facts.facts(_Before(session, _NothingSeen(session.torch, modules, trained, distributed), optimizers))
    return {name: value for name, value in seen.items() if value is not None}
