"""The time of compilers: torch.compile tells its own, a clock stands around all others."""

from __future__ import annotations

import time

import pytest

from saturate.inference import compiling

torch = pytest.importorskip("torch")


def test_torch_compile_and_the_clock_add_up() -> None:
    before = compiling.seconds()
    with pytest.raises(RuntimeError), compiling.clock():
        time.sleep(0.02)
        raise RuntimeError("a compiler that fails took its time")
    after_clock = compiling.seconds()
    assert 0.02 <= after_clock - before < 10.0
    x, began = torch.ones(3), time.monotonic()
    compiled = torch.compile(lambda x: torch.relu(x) + 1, backend="eager")
    compiled(x)
    after_compile = compiling.seconds()
    assert 0 < after_compile - after_clock <= time.monotonic() - began
    compiled(x)
    assert compiling.seconds() == after_compile, "a call of what is compiled"
