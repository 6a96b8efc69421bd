"""Switches of a process that a candidate was measured with, kept beside its program so that loading sets them again.

They are torch's own and hold for the whole process; a user who does not want that loads the artifact in a process of its
own. `switch` sets one and remembers it, `switches` is what goes into `Entry.settings["session"]`, `restore` sets them
again. Values are JSON.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from saturate.inference.techniques._api import Context, NotApplied

_NOTE = "session: "

#: Keys of torch.backends.cuda by attention implementation; the names hold for the CPU's implementations as well.
ATTENTION = {"flash": "enable_flash_sdp", "efficient": "enable_mem_efficient_sdp", "cudnn": "enable_cudnn_sdp",
             "math": "enable_math_sdp"}


def _threads(torch: Any, value: Any) -> None:
    torch.set_num_threads(int(value))


def _attention(torch: Any, value: Any) -> None:
    """One implementation, and the plain one for the calls that it does not support."""
    if value not in ATTENTION:
        raise ValueError(f"there is no attention {value!r}")
    for name, setter in ATTENTION.items():
        if hasattr(torch.backends.cuda, setter):        # cuDNN's came with torch 2.5
            getattr(torch.backends.cuda, setter)(name in (value, "math"))


def _products(torch: Any, value: Any) -> None:
    torch.set_float32_matmul_precision(str(value))
    torch.backends.cudnn.allow_tf32 = value != "highest"


_SETTERS: dict[str, Callable[[Any, Any], None]] = {
    "threads": _threads, "attention": _attention, "float32_products": _products,
}


def switch(context: Context, name: str, value: Any) -> None:
    """Set one now, and remember it for the artifact. Raises NotApplied where torch refuses the value."""
    try:
        _SETTERS[name](context.torch, value)
    except (RuntimeError, ValueError) as error:
        raise NotApplied(f"torch refuses {name} = {value}: {error}") from error
    context.notes[_NOTE + name] = str(value)


def switches(context: Context) -> dict[str, str]:
    """What was switched, for `Entry.settings`."""
    return {key.removeprefix(_NOTE): value for key, value in context.notes.items() if key.startswith(_NOTE)}


def lines(found: Mapping[str, Any], threads: int) -> str:
    """What `restore` does, and the number of threads, as one line of Python."""
    statements = [f"torch.set_num_threads({int(found.get('threads', threads))})"]
    if "float32_products" in found:
        precision = str(found["float32_products"])
        statements += [f"torch.set_float32_matmul_precision({precision!r})", f"torch.backends.cudnn.allow_tf32 = {precision != 'highest'}"]
    if "attention" in found:
        statements += [f"torch.backends.cuda.{setter}({name in (found['attention'], 'math')})" for name, setter in ATTENTION.items()]
    return "; ".join(statements)


def restore(torch: Any, found: Mapping[str, Any]) -> None:
    """Set what `switches` returned, in another process. Raises ValueError for a switch that does not exist."""
    for name, value in found.items():
        if name not in _SETTERS:
            raise ValueError(f"there is no switch {name!r}")
        _SETTERS[name](torch, value)
