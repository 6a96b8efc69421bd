"""Techniques follow a training that goes on with another model or optimizer (`agent.succession` says which).

What took over is moved to at once. One that comes back, as in phases that alternate, is moved to when it has stayed for some
steps: undoing and applying costs more than a step.
"""

from __future__ import annotations

import itertools
from collections.abc import Collection
from typing import Any

from saturate.agent import observe, succession
from saturate.techniques import _common


def due(session: Any) -> bool:
    """Asked at the end of a step: whether it is time to move."""
    parts = len(set(session.step.tokens) - {"B"})
    served = {id(optimizer) for optimizer in session.context.optimizers}
    missed = [name for name, reference in itertools.islice(reversed(session.optimizers.stepped.items()), parts) if id(reference()) not in served]
    session.lagging = session.lagging + 1 if missed else 0
    return not session.optimizers.moved_to.issuperset(missed) or session.lagging >= succession.PERIODS


def move(session: Any) -> None:
    """Take back what techniques did to what was trained before, and apply them to what is trained now."""
    from saturate.agent import application

    optimizers = succession.players(session)
    trained = {id(p) for optimizer in optimizers for group in optimizer.param_groups for p in group["params"]}
    session.lagging = 0
    session.optimizers.moved_to.update(session.optimizers.stepped)
    application.place(session, _modules(session, trained), tuple(optimizers))
    application.report_run(session)
    if session.gate is not None:
        session.gate.greet(application.hello_of(session))


def _modules(session: Any, trained: set[int]) -> tuple[Any, ...]:
    """Those known modules that own trained parameters, and for parameters that none of them owns, modules of the same classes."""
    context = session.context
    kept = [m for m in context.modules if any(id(p) in trained for p in m.parameters())]
    left = trained - {id(p) for m in kept for p in m.parameters()}
    return (*kept, *of_kinds(observe.all_modules(session.torch), context.kinds, left)) if left else tuple(kept)


def of_kinds(modules: list[Any], kinds: Collection[type], trained: set[int]) -> list[Any]:
    """The outermost modules of some classes that own any of the parameters."""
    owners = [m for m in modules if type(m) in kinds and any(id(p) in trained for p in m.parameters())]
    return _common.outermost(owners)
