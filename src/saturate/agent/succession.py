"""A training that goes on with another optimizer: the next fold, the next phase, an optimizer built anew for every epoch.

To the step it is the one before it under another name. Two signs tell a successor from a second optimizer of the same step
(the generator's, which steps for the first time after five steps of the critic's): it holds parameters that its predecessor
held, or it has gone through several whole periods in which no optimizer of the known step stepped.
"""

from __future__ import annotations

import weakref
from collections import Counter, deque
from typing import Any

from saturate.agent.motif import CLOSURE, Step

#: Whole periods of newcomers alone, before they are taken as successors.
PERIODS = 8


def meet(session: Any, name: str, optimizer: Any) -> bool:
    """An optimizer steps for the first time. True where it is not clear what it is to the step that was known before."""
    step = session.step
    known = step is not None and step.token != CLOSURE
    # One that the step names is a part of it, though it may hold what another part holds as well (an embedding that both share).
    newcomer = known and name not in step.tokens and any(token != "B" for token in step.tokens)
    if newcomer and not session.plan.get("drill"):
        part, role = _predecessor(session, optimizer)
        if role is not None:
            session.optimizers.roles[name] = role
            session.succeeded += 1
            _hold(session, part, optimizer)
            return False
        # Of a step that was known before it began, and of one that the user named and nobody saw yet, nobody is a successor.
        if session.succession is None and not session.awaited:
            session.succession = Succession(step, session.phase, len(session.tokens), session.backwards, session.parts)
    _hold(session, name, optimizer)
    return known


def _hold(session: Any, part: str, optimizer: Any) -> None:
    """Remember parameters, as long as they live, by the name of the first optimizer that held some of them."""
    held = session.optimizers.held.setdefault(part, weakref.WeakValueDictionary())
    held.update({id(p): p for group in optimizer.param_groups for p in group["params"]})


def _predecessor(session: Any, optimizer: Any) -> tuple[str, str | None]:
    """Of the known step's optimizers the one whose parameters this one holds as well: its name in `held`, and its role."""
    mine = [p for group in optimizer.param_groups for p in group["params"]]
    for name, held in session.optimizers.held.items():
        role = session.optimizers.roles.get(name, name)
        if role in session.step.tokens and any(held.get(id(p)) is p for p in mine):
            return name, role
    return "", None


def follow(session: Any, token: str) -> str:
    """The token by the name of the one whose part it plays, once newcomers have taken over. The step is known again then; the
    long one that ends here is not timed."""
    watch = session.succession
    roles = watch.roles(token)
    if roles is None:
        return token
    watch.recount(session.counts)
    session.optimizers.roles.update(roles)
    session.succeeded += 1
    session.step, session.phase, session.parts = watch.step, watch.phase, watch.parts
    if session.watchdog is not None:
        session.watchdog.goes_on_with_another(session, watch.since)
    session.occurrences = watch.step.count - 1
    del session.tokens[watch.recorded:]
    session.succession, session.evaluated = None, True
    return roles[token]


def at_work(session: Any) -> list[Any]:
    """Parameters of the optimizers that stepped since the last call: the others' stand still until their turn."""
    optimizers = session.optimizers
    before, optimizers.counts_before = optimizers.counts_before, dict(optimizers.counts)
    stepped = [o for o in optimizers.living() if optimizers.steps_of(o) != before.get(id(o), 0)]
    return [p for o in stepped for group in o.param_groups for p in group["params"]]


def players(session: Any) -> list[Any]:
    """The optimizers that play the step's parts now: of each part, the one that stepped last."""
    last = {session.optimizers.roles.get(name, name): reference for name, reference in session.optimizers.stepped.items()}
    return [optimizer for reference in last.values() if (optimizer := reference()) is not None]


def heirs(session: Any) -> list[Any]:
    """The parameters of the players."""
    return [p for optimizer in players(session) for group in optimizer.param_groups for p in group["params"]]


class Succession:
    """Watches what happens after an optimizer that the known step does not hold has stepped."""

    def __init__(self, step: Step, phase: str, recorded: int, backwards: int, parts: int):
        self.step = step
        self.phase = phase                      # of the session, to go on in
        self.recorded = recorded                # events that the search for the step held by then
        leading = next(index for index, token in enumerate(step.tokens) if token != "B")
        self.parts = parts                      # of the session, to go on with
        self.since = backwards + 1 - max(1, leading)        # the newcomers' first backward pass
        self._recent: deque[str] = deque(step.tokens[:leading], maxlen=PERIODS * len(step.tokens))
        self._since = Counter(self._recent)     # all of them, to be counted as one step in the end

    def roles(self, token: str) -> dict[str, str] | None:
        """Once the newcomers have taken over: whose part each of them plays."""
        self._since[token] += 1
        if token in self.step.tokens and token != "B":
            self._recent.clear()
            self._since.clear()
            return None
        if token != "B" or "B" in self.step.tokens:     # in an irregular step backward passes come as they like
            self._recent.append(token)
        if token == "B" or len(self._recent) < PERIODS * len(self.step.tokens):
            return None
        found: dict[str, str] = {}
        for seen, role in zip(self._recent, self.step.tokens * PERIODS):
            if (seen == "B") != (role == "B") or found.setdefault(seen, role) != role:
                return None
        found.pop("B", None)
        return found if len(set(found.values())) == len(found) else None

    def recount(self, counts: dict[str, int]) -> None:
        """All that has happened since the newcomers came is one long step: one period of events."""
        period = Counter(self.step.tokens)
        for token, count in self._since.items():
            counts[token] -= count
        for token in self._since | period:
            counts[token] = counts.get(token, 0) + (period[token] or self._since[token] // PERIODS if token == "B" else period[token])
