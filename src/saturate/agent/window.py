"""A window: some steps between two gates that are looked at closely. What is looked at is its kinds' business."""

from __future__ import annotations

import contextlib
from typing import Any

from saturate.agent import attributes


class Window:
    """Counts step boundaries. `begin`, `turn` (between two observed steps) and `finish` are for the kinds."""

    drained = True      # whether it begins and ends with devices that have nothing left to do

    def __init__(self, session: Any, order: dict[str, Any]):
        self.session = session
        self.torch = session.torch
        self.order = order
        self.device = session.context.device
        self.left = order["skip"]           # steps before the window; negative: steps since it began
        self.steps = order["steps"]
        self.result: dict[str, Any] = {"kind": order["kind"], "steps": self.steps}
        self._undo: list[Any] = []
        self._after: Any = None             # what waits for the end of the optimizer's own label

    # -- for the kinds ---------------------------------------------------------------------------------------------

    def prepare(self) -> None:
        """One step before the window."""

    def begin(self) -> None: ...

    def turn(self) -> None: ...

    def finish(self) -> None: ...

    def draining(self) -> Any:
        """A context manager around every wait of ours for the devices while the window is open."""
        return contextlib.nullcontext()

    def replace(self, owner: Any, name: str, wrapper: Any) -> None:
        """Set an attribute for the length of the window."""
        self._undo.append(attributes.replace(owner, name, wrapper))

    def on_undo(self, undo: Any) -> None:
        self._undo.append(undo)

    # -- from the session ------------------------------------------------------------------------------------------

    def boundary(self) -> None:
        """One step has ended."""
        self.left -= 1
        self.advance()

    def advance(self) -> None:
        if self.left == 1:
            self.prepare()
        elif self.left == 0:
            self._drain()
            self.begin()
        elif self.left < 0:
            last = self.left == -self.steps
            self._behind_labels(self._close if last else self.turn)

    def _behind_labels(self, action: Any) -> None:
        """Run `action` as soon as no label of the step that has just ended is open: a step ends inside torch's
        `Optimizer.step#...`, and labels that cross each other confuse every reader of traces."""
        if self.crosses_label():
            self._after = action
        else:
            action()

    def crosses_label(self) -> bool:
        return False

    def settle(self) -> None:
        """The label that was in the way has ended."""
        action, self._after = self._after, None
        if action is not None:
            self.session.guard(action)

    def _close(self) -> None:
        self._drain()               # what the last step queued belongs to it
        self.finish()
        self.withdraw()
        self.session.seen = self.result

    def _drain(self) -> None:
        if self.drained:
            self.session.drain()

    def withdraw(self) -> None:
        """Take everything back. Called twice where the agent fails in between."""
        if self.withdraw in self.session.undo:
            self.session.undo.remove(self.withdraw)
        if self.session.window is self:
            self.session.window = None
        while self._undo:
            self._undo.pop()()
