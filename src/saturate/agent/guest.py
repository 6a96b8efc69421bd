"""How code of ours runs on a path that the user's code is on: nothing that it does ends the user's run."""

from __future__ import annotations

from typing import Any

from saturate.techniques._interrupts import from_signal_handler


class Guest:
    """Fails open: after a failure of ours, everything is taken back, and it is `dead`."""

    def __init__(self, undo: Any) -> None:
        """`undo`: takes back what techniques have done, before all else that is on `self.undo`."""
        self.undo: list[Any] = []
        self.dead = False
        self.half_done = False                  # see `whole`
        self._undo_first = undo

    def guard(self, function: Any, *args: Any) -> Any:
        """Run our own code on a path that the user's code is on. If we fail, take everything back and go silent. What a signal
        handler of the script raises meanwhile is the script's: it passes, and we stay, unless something is half done."""
        if self.dead:
            return None
        try:
            return function(*args)
        except Exception as error:  # the user's training must go on whatever is wrong with us
            interrupted = from_signal_handler(error)
            if not interrupted or self.half_done:
                self._fail(error, "was interrupted by a signal handler of the script" if interrupted else "failed")
            if interrupted:
                raise
            return None

    def whole(self, function: Any, *args: Any) -> Any:
        """Run what must not stay half done."""
        self.half_done = True
        result = function(*args)
        self.half_done = False
        return result

    def tell_failure(self, text: str, how: str) -> None:
        """Say that it is dead. `text`: the traceback; `how`: what became of it, as a verb."""
        raise NotImplementedError

    def _fail(self, error: Exception, how: str) -> None:
        import traceback

        self.dead = True
        text = "".join(traceback.format_exception(error))
        for undo in [self._undo_first, *reversed(self.undo)]:
            try:
                undo()
            except Exception as nested:  # noqa: BLE001 - go on taking back the rest
                text += f"\nand while undoing: {nested!r}"
        try:
            self.tell_failure(text, how)
        except Exception:  # noqa: BLE001, S110 - the controller is gone, or what failed fails here as well: nobody is left to tell
            pass
