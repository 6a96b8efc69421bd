"""How fast this device multiplies matrices and copies memory, measured in the workload's own process and threads.

A share of a measured rate says how much is left to gain; a share of a data sheet says little.
"""

from __future__ import annotations

import time
from typing import Any

_SIZE = {"cpu": 1024, "cuda": 8192}
_COPY_BYTES = {"cpu": 1 << 28, "cuda": 1 << 30}     # well beyond any cache
_SECONDS = 0.25


def measure(torch: Any, device: str) -> dict[str, float]:
    """"float32" and "bfloat16": floating-point operations per second of a square matrix product (2 n^3 each); "copy":
    bytes read and written per second. Leaves the random generators and gradients alone."""
    size = _SIZE.get(device, 1024)
    rates = {}
    with torch.no_grad():
        for name in ("float32", "bfloat16"):
            a = torch.ones(size, size, device=device, dtype=getattr(torch, name))
            rates[name] = 2 * size**3 / _seconds(torch, device, lambda a=a: a @ a)
        source = torch.ones(_COPY_BYTES.get(device, 1 << 28) // 4, device=device)
        target = torch.empty_like(source)
        rates["copy"] = 2 * source.numel() * 4 / _seconds(torch, device, lambda: target.copy_(source))
    return rates


def _seconds(torch: Any, device: str, action: Any) -> float:
    """The shortest of several runs: a rate to compare with is the best that the device does."""
    best = float("inf")
    end = time.perf_counter() + _SECONDS
    runs = 0
    while runs < 3 or time.perf_counter() < end:
        began = time.perf_counter()
        action()
        if device == "cuda":
            torch.cuda.synchronize()
        best = min(best, time.perf_counter() - began)
        runs += 1
    return best


def flop_counter(torch: Any) -> Any:
    """A dispatch mode that adds up the floating-point operations of matrix products, convolutions and attention
    (`torch.utils.flop_counter`'s formulas), forward and backward. Other operators count nothing."""
    from torch.utils._python_dispatch import TorchDispatchMode
    from torch.utils.flop_counter import flop_registry

    class Counter(TorchDispatchMode):
        flops = 0

        def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            kwargs = kwargs or {}
            out = function(*args, **kwargs)
            formula = flop_registry.get(function._overloadpacket)
            if formula is not None:
                self.flops += int(formula(*args, **kwargs, out_val=out))
            return out

    return Counter()
