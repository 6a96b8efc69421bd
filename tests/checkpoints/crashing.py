"""Programs for `test_save_crash.py`. Each case runs in a forked child, because importing torch takes longer than the case.

    python crashing.py kills MODE COUNT SEED FOLDER      SIGKILL at random times; MODE "plain" is torch alone
    python crashing.py shards MODE COUNT SEED FOLDER     the same of distributed checkpoints, each over the one before
    python crashing.py ends FOLDER                       every way for a process to end, with a slow disk
    python crashing.py full MODE FOLDER                  a small disk that the third checkpoint does not fit on, neither beside the old one
                                                         nor in its place
    python crashing.py beside MODE FOLDER                the same, but in the place of the old one it does
"""

from __future__ import annotations

import json
import os
import random
import resource
import signal
import sys
import threading
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp

from saturate.agent.context import Context
from saturate.checkpoints import persist
from saturate.techniques import async_checkpoint

SIZE = 1 << 19


def apply(mode: str) -> None:
    if mode != "plain":
        async_checkpoint.apply(Context(torch), async_checkpoint.Options(mode))


def state(step: int, size: int = SIZE) -> dict[str, Any]:
    return {"step": step, "a": torch.full((size,), float(step)), "b": torch.full((size // 2,), step)}


def step_of(path: Path) -> int | None:
    """The step of the checkpoint, None when it does not load or is of two steps."""
    try:
        found = torch.load(path)
    except Exception:  # noqa: BLE001 - whatever is raised, it is not loadable
        return None
    whole = bool((found["a"] == found["step"]).all() and (found["b"] == found["step"]).all())
    return found["step"] if whole else None


def save_shards(value: dict[str, Any], path: Path) -> None:
    dcp.save(value, checkpoint_id=path)


def step_of_shards(path: Path) -> int | None:
    """As `step_of`, of a distributed checkpoint."""
    found = {"step": -1, "a": torch.zeros(SIZE), "b": torch.zeros(SIZE // 2, dtype=torch.int64)}
    try:
        dcp.load(found, checkpoint_id=path)
    except (Exception, dcp.CheckpointException):  # noqa: BLE001 - as above; torch's is no Exception
        return None
    whole = bool((found["a"] == found["step"]).all() and (found["b"] == found["step"]).all())
    return found["step"] if whole else None


def kills(mode: str, count: int, seed: int, path: Path, save: Callable[..., None] | None = None,
          step_of: Callable[[Path], int | None] = step_of) -> dict[str, Any]:
    """`save` is looked up when it is needed: the technique may replace torch's."""
    save = save or (lambda value, path: torch.save(value, path))
    save(state(0), path)
    draw = random.Random(seed)
    lost = backwards = advanced = 0
    last = 0
    for _ in range(count):
        ready, begun = os.pipe()
        child = os.fork()
        if not child:
            apply(mode)
            for step in range(last + 1, last + 100_000):
                save(state(step), path)
                if step == last + 1:
                    os.stat(path)               # waits: from here on there is something to lose
                    os.write(begun, b".")
        os.close(begun)
        os.read(ready, 1)
        os.close(ready)
        time.sleep(draw.random() * 0.05)
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        found = step_of(path)
        if found is None:
            lost += 1
            save(state(last), path)
        else:
            backwards += found < last
            advanced += found > last
            last = found
    return {"lost": lost, "backwards": backwards, "advanced": advanced, "files": len(os.listdir(path if path.is_dir() else path.parent))}


def slow_disk() -> None:
    write = persist.write

    def slowly(descriptor: int, buffers: Any) -> int:
        time.sleep(0.3)
        return write(descriptor, buffers)

    persist.write = slowly


def _fail() -> None:
    raise ValueError("the script's own")


ENDS = {
    "return": lambda: None,
    "sys.exit": lambda: sys.exit(3),
    "exception": _fail,
    "os._exit": lambda: os._exit(4),
    "SIGTERM": lambda: os.kill(os.getpid(), signal.SIGTERM),
    "SIGHUP": lambda: signal.raise_signal(signal.SIGHUP),
    "SIGINT": lambda: os.kill(os.getpid(), signal.SIGINT) or time.sleep(5),
    "SIGTERM from outside": lambda: time.sleep(60),
    "exec": lambda: os.execvp("true", ["true"]),
    "abort": lambda: os.abort(),        # looked up after the technique was applied
    "SIGTERM, handled": lambda: (signal.signal(signal.SIGTERM, lambda *_: sys.exit(7)),
                                 os.kill(os.getpid(), signal.SIGTERM)),
}


def ends(folder: Path) -> dict[str, Any]:
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    found = {}
    for name, end in ENDS.items():
        path = folder / f"{name}.pt"
        ready, begun = os.pipe()
        child = os.fork()
        if not child:
            slow_disk()
            os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
            apply("thread")
            torch.save(state(5), path)
            os.write(begun, b".")
            end()
            return {}
        os.read(ready, 1)
        if name == "SIGTERM from outside":
            time.sleep(0.1)
            os.kill(child, signal.SIGTERM)
        status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        found[name] = [status, step_of(path)]
    return found


def hold_disk() -> threading.Event:
    """Nothing is written in the background, by the thread or by the helper, while the event is cleared."""
    free = threading.Event()
    free.set()

    def held(original: Callable[..., Any]) -> Callable[..., Any]:
        def write(*arguments: Any) -> Any:
            free.wait(60)
            return original(*arguments)
        return write

    persist.write, persist.Helper.write = held(persist.write), held(persist.Helper.write)
    return free


def full(mode: str, folder: Path, mebibytes: tuple[float, float, float] = (1, 3, 3.5)) -> dict[str, Any]:
    """`folder` has room for six mebibytes. The third checkpoint looks as if it fitted, while the second is not written."""
    first, second, third = (int(size * 2**17) for size in mebibytes)        # a state takes eight bytes an element
    path, other = folder / "model.pt", folder / "other.pt"
    found = {}
    for name in ("next save", "end", "handled"):
        child = os.fork()
        if not child:
            free = hold_disk()
            apply(mode)
            torch.save(state(1, first), path)
            os.stat(path)
            free.clear()
            torch.save(state(2, second), other)
            torch.save(state(2, third), path)
            free.set()
            if name != "end":
                os.stat(path)
                try:
                    torch.save(state(3, 100), path)
                except OSError as error:
                    if name != "handled":
                        os._exit(error.errno)
            return {}
        status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        found[name] = [status, step_of(path), step_of(other), sorted(os.listdir(folder))]
        other.unlink()
    return found


def beside(mode: str, folder: Path) -> dict[str, Any]:
    return full(mode, folder, (2, 2, 2))


def main(what: str, *arguments: str) -> None:
    torch.set_num_threads(1)
    parent = os.getpid()
    if what == "kills":
        found = kills(arguments[0], int(arguments[1]), int(arguments[2]), Path(arguments[3]) / "model.pt")
    elif what == "shards":
        warnings.simplefilter("ignore")     # torch says of each save that there are no ranks, and a checkpoint
        found = kills(arguments[0], int(arguments[1]), int(arguments[2]), Path(arguments[3]) / "model", save_shards, step_of_shards)
    elif what == "ends":
        found = ends(Path(arguments[0]))
    else:
        found = (full if what == "full" else beside)(arguments[0], Path(arguments[1]))
    if os.getpid() == parent:
        print(json.dumps(found))


if __name__ == "__main__":
    main(*sys.argv[1:])
