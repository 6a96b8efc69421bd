"""Contexts of one thread: dispatch modes and hooks of saved tensors lie on a stack of the thread that enters them."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any


class Entered:
    """Such a context, entered. No other thread can leave it, and a training may run its steps in several (`asyncio.to_thread`, an
    executor). `on_top`: whether it is what leaving would take from the stack of this thread."""

    def __init__(self, context: Any, on_top: Callable[[], bool]):
        self._context, self._on_top = context, on_top
        self._thread = threading.current_thread()
        context.__enter__()

    def leave(self) -> bool:
        """Whether it is gone by now: left, or with its thread."""
        if threading.current_thread() is self._thread and self._on_top():
            self._context.__exit__(None, None, None)
            return True
        return not self._thread.is_alive()


def enter_mode(mode: Any) -> Entered:
    """Enter a `TorchDispatchMode`."""
    from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

    return Entered(mode, lambda: _get_current_dispatch_mode_stack()[-1:] == [mode])
