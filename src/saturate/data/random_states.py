"""The random generators of this process, as a dataset may use them: saved, set again, and whether somebody has drawn from them."""

from __future__ import annotations

import ctypes
import random
import sys
from typing import Any


def states() -> tuple[Any, ...]:
    """Of the generators that scripts draw from without saying so."""
    torch, numpy = sys.modules.get("torch"), sys.modules.get("numpy")
    return (torch.get_rng_state() if torch else None, random.getstate(), numpy.random.get_state() if numpy else None)


def restore(saved: tuple[Any, ...]) -> None:
    if saved[0] is not None:
        sys.modules["torch"].set_rng_state(saved[0])
    random.setstate(saved[1])
    if saved[2] is not None:
        sys.modules["numpy"].random.set_state(saved[2])


def seed(number: int) -> None:
    torch, numpy = sys.modules.get("torch"), sys.modules.get("numpy")
    if torch is not None:
        torch.random.default_generator.manual_seed(number)      # of the CPU only: no device is woken here
    random.seed(number)
    if numpy is not None:
        numpy.random.seed(number)


def drawn_since(before: tuple[Any, ...]) -> bool:
    """Whether random numbers were drawn since these were the states."""
    return comparable(states()) != comparable(before)


def comparable(saved: tuple[Any, ...]) -> tuple[Any, ...]:
    torch, python, numpy = saved
    return (None if torch is None else ctypes.string_at(torch.data_ptr(), torch.numel()), python,
            None if numpy is None else (numpy[0], numpy[1].tobytes(), *numpy[2:]))
