"""How long compilers worked in this process: torch.compile, which says so itself, and all others by a clock around them."""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Iterator

from saturate import dynamo_times

_others_s = 0.0


@contextlib.contextmanager
def clock() -> Iterator[None]:
    """Around a call that makes a program for this machine, other than by torch.compile: AOTInductor, ONNX Runtime, OpenVINO, TensorRT."""
    global _others_s
    began = time.monotonic()
    try:
        yield
    finally:
        _others_s += time.monotonic() - began


def seconds() -> float:
    """Of all of them so far."""
    return _others_s + dynamo_times.compile_s(sys.modules.get("torch._dynamo"))
