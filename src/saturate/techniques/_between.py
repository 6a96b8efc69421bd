"""What a script does with weights and settings between a backward pass and its step.

It saves weights or runs modules (`Uses`), writes to weights (`mark`, `written`), or changes settings of an optimizer (`settings`).
`_updates` asks: it may have updated the weights by then.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Iterable
from typing import Any


class Uses:
    """`used` is told when the script saves or runs a module: how it uses weights, and which."""

    def __init__(self, context: Any, used: Callable[[str, Iterable[Any]], None]):
        self.context, self.torch, self.used = context, context.torch, used
        self._forwards: Any = None          # the handle of a hook
        self._lock = threading.Lock()

    def look_at_saves(self) -> None:
        kind = self.torch.nn.Module
        original = kind.state_dict

        @functools.wraps(original)
        def state_dict(module: Any, *args: Any, **kwargs: Any) -> Any:
            if not args and kwargs.get("destination") is None:      # otherwise it is a part of one that was looked at
                self.used("saved", module.parameters())
            return original(module, *args, **kwargs)

        self.context.set_attribute(kind, "state_dict", state_dict)

    def look_at_forwards(self) -> None:
        """From the first gradient to the step: of every module, in evaluation too. In between there is none, usually, and forwards
        elsewhere do not pay for it."""
        if self._forwards is not None:
            return
        compiling = self.torch.compiler.is_compiling
        task = getattr(self.torch._C, "_current_graph_task_id", lambda: -1)     # of the backward pass that runs: it may recompute

        def before(module: Any, args: Any) -> None:
            if not compiling() and task() == -1:
                self.used("used in a forward", module.parameters())

        with self._lock:        # gradients of several devices arrive in several threads
            if self._forwards is None:
                self._forwards = self.torch.nn.modules.module.register_module_forward_pre_hook(before)

    def look_away(self) -> None:
        """From forwards; saves are looked at until the technique is undone."""
        if self._forwards is not None:
            self._forwards.remove()
            self._forwards = None


def mark(parameter: Any, torch: Any, with_bits: bool) -> tuple[int, int, Any]:
    """What tells later whether somebody has written to the parameter: its version, its address, and its bits or None."""
    return parameter._version, parameter.data_ptr(), _bits(parameter, torch) if with_bits else None


def written(parameter: Any, torch: Any, marked: tuple[int, int, Any]) -> bool:
    """Whether somebody has written to the parameter since it was marked."""
    version, address, bits = marked
    return ((parameter._version, parameter.data_ptr()) != (version, address)
            or bits is not None and not bool(bits == _bits(parameter, torch)))


def _bits(parameter: Any, torch: Any) -> Any:
    """The sum of a parameter's bits, without a copy of it: versions do not tell what is written through `.data`."""
    values = torch.view_as_real(parameter.detach()) if parameter.is_complex() else parameter.detach()
    kind = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[values.element_size()]
    return values.view(kind).sum(dtype=kind)


#: Of a group, what is no setting: which parameters it holds, and which kernels compute the update that the others say.
_NO_SETTINGS = ("params", "param_names", "fused", "foreach")


def settings(group: dict[str, Any]) -> list[Any]:
    """A group's settings, in a form that can be compared later."""
    return [(name, (id(value), value._version) if hasattr(value, "_version") else value)
            for name, value in group.items() if name not in _NO_SETTINGS]
