"""A technique for tests: what it does is an option.

What it does
------------
Doubles the model's output, or fails in one of the ways in which candidates fail.

When it helps
-------------
Never.

When it hurts
-------------
Always.

Numerics
--------
`precision`, by its word.

How it is applied
-----------------
By `Options.how`.

References
----------
tests/inference/test_inference_process.py.
"""

from __future__ import annotations

import contextlib
import errno
import gc
import os
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from typing import Any

from saturate.inference.techniques._api import Eligible, Ineligible, NotApplied, Proof, Technique, Touch

TECHNIQUE = Technique(id="misbehaves", title="Misbehaves", numerics="precision", stage="number", touches=(Touch("misbehaviour"),))


@dataclass(frozen=True)
class Options:
    how: str = "double"


def eligible(facts: Any) -> Eligible | Ineligible:
    return Eligible("it is a test")


def variants(facts: Any) -> list[Options]:
    return [Options()]


def bound(facts: Any) -> float | None:
    return None


def apply(context: Any, options: Options) -> str:
    misbehave(context, options.how)
    model, torch, notes = context.model, context.torch, context.notes

    def call(*inputs: Any) -> Any:
        notes["calls"] = notes.get("calls", "") + f"{len(inputs[0])} "
        notes["state"] = f"inference {torch.is_inference_mode_enabled()}, collects {gc.isenabled()}, threads {torch.get_num_threads()}"
        return tuple(2 * tensor for tensor in model(*inputs))

    context.call = call
    return f"did {options.how}"


def note(context: Any, key: str) -> str:
    return context.notes[key]


def drawn(context: Any) -> float:
    return float(context.torch.rand(()))


def misbehave(context: Any, how: str) -> Any:
    """Also asked for by `Worker.ask`."""
    if how == "refuse":
        raise NotApplied("it does not want to")
    if how == "raise":
        raise RuntimeError("no such luck\nmore lines")
    if how == "memory error":
        raise RuntimeError("[enforce fail at alloc_cpu.cpp:75] DefaultCPUAllocator: can't allocate memory: you tried to allocate 8 bytes")
    if how == "fill the disk":      # as libraries do that name no cause
        with contextlib.suppress(OSError), open(os.path.join(context.folder, "large"), "wb", buffering=0) as file:
            while file.write(bytes(2**16)):
                pass
        raise NotApplied("the library could not do it")
    if how == "disk full":
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    if how == "file too large":
        raise OSError(errno.EFBIG, os.strerror(errno.EFBIG))
    if how == "hang":
        time.sleep(600)
    if how == "hog":
        context.notes["hog"] = bytearray(b"x") * (600 * 2**20)
        time.sleep(600)
    if how == "allocate":
        return len(bytearray(b"x") * (200 * 2**20))
    if how == "die":
        os.kill(os.getpid(), signal.SIGSEGV)
    if how == "exit":
        os._exit(0)
    if how == "print":
        print("words of the model")
        os.write(1, b"words of its library\n")
    if how == "child":
        return subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"], start_new_session=True).pid
    if how == "unsendable":
        return (line for line in "a generator")
    return os.getpid()


def active(context: Any, options: Options) -> Proof:
    return Proof(options.how != "idle", f"it did {options.how}")


def as_code(options: Options) -> str:
    return "model = twice(model)"
