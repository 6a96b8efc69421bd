"""What came from the C library's heaps, as `fit` asks for it."""

from __future__ import annotations

import os
import platform
import subprocess
import sys
from types import SimpleNamespace

import pytest

from saturate.agent import memory

MIB = 2**20

#: Fills 64 MiB in blocks of 1 MiB, gives them back, and prints the heaps' peaks before and after.
FILLING = """
import ctypes
from types import SimpleNamespace
from saturate.agent import memory
session = SimpleNamespace(context=SimpleNamespace(device="cpu"))
held = [b"x" * 1000 for _ in range(4000)]
before = memory.heap_peak_bytes(session)
ctypes.CDLL(None).mallopt(-3, int({threshold}))     # M_MMAP_THRESHOLD
blocks = [bytearray(2**20) for _ in range(64)]
del blocks
print(before, memory.heap_peak_bytes(session))
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="only glibc tells what its heaps hold")
@pytest.mark.parametrize(("threshold", "from_heaps"), [(8 * MIB, True), (MIB // 8, False)])
def test_blocks_mapped_by_themselves_are_not_of_the_heap(threshold, from_heaps):
    source = FILLING.format(threshold=threshold)
    done = subprocess.run([sys.executable, "-c", source], env=os.environ, capture_output=True, text=True, check=True)
    before, after = map(int, done.stdout.split())
    assert (after - before > 60 * MIB) == from_heaps and (after - before < 4 * MIB) != from_heaps


def test_a_device_has_no_heap():
    assert memory.heap_peak_bytes(SimpleNamespace(context=SimpleNamespace(device="cuda"))) is None


def test_another_allocator_is_not_taken_for_a_small_heap(monkeypatch):
    monkeypatch.setattr(memory, "LEAST_HEAP_BYTES", 1 << 60)
    assert memory.heap_peak_bytes(SimpleNamespace(context=SimpleNamespace(device="cpu"))) is None
