"""Trains under pairs of techniques, and says what is other than under none: `python pair_matrix.py FOLDER KIND [clips] PAIR...`, a pair as `id+id`.

torch is imported once, and each training is a fork of this process that starts the agent by itself, as `sitecustomize` does under
`saturate run`: some of them a second instead of some of them a minute. Nothing of saturate is loaded before.

Under a pair runs the whole training of `pair_training`. What it saved is then gone on with under the pair and under nothing, and a checkpoint
of a training under nothing under the pair. Numbers may be as far from those without techniques as the weaker of the two numerics
classes allows; where one of the two is `exact`, they are those under the other one alone, bit by bit but for `ROUNDED_OTHERWISE`.
"""

from __future__ import annotations

import json
import math
import os
import shutil
import signal
import sys
import threading
import time
import traceback
from pathlib import Path
from typing import Any

import pair_training
import torch
import torch._dynamo
import torch.utils.checkpoint

#: Options under which a technique acts on small models that run for some dozen steps.
OPTIONS: dict[str, dict[str, Any]] = {
    "activation-checkpointing": {"mode": "blocks"}, "async-checkpoint": {"mode": "thread"}, "batch-assembly": {}, "bf16-autocast": {},
    "channels-last": {}, "compile": {}, "cudnn-benchmark": {}, "dataset-cache": {"where": "memory"}, "device-prefetch": {}, "dynamic-batch": {},
    "fp16-autocast": {}, "fused-optimizer": {}, "gc-freeze": {"after_steps": 1}, "global-batch": {}, "incremental-checkpoint": {"store": "store"},
    "loader-workers": {}, "micro-batch": {}, "optimizer-8bit": {"smallest": 64}, "optimizer-in-backward": {}, "pin-memory": {},
    "sdpa-backend": {"backend": "math"}, "tf32": {}, "zero-grad-none": {},
}

#: Largest relative deviation of losses by numerics class.
TOLERANCE = {"exact": 0.0, "reordering": 1e-4, "stream": 1e-3, "precision": 5e-2, "convergence": math.inf}

#: A rate that is larger during the step is one that changes between backward and step.
IDLE_TOGETHER = ({"optimizer-in-backward", "global-batch"},)

#: Fused kernels leave a step to the script's own where some parameters have momentum and others beside them have none; a parameter that is
#: updated alone has no others beside it. What is computed is the same, rounded otherwise. Only "two" trains by SGD with momentum.
ROUNDED_OTHERWISE = ({"fused-optimizer", "optimizer-in-backward"}, "two")

LIMIT_S = 120.0


class Matrix:
    def __init__(self, folder: Path, kind: str, clips: bool):
        self.folder, self.kind, self.clips = folder, kind, clips
        self.modules = self._told()
        self.known: dict[tuple[str, ...], dict[str, Any]] = {}      # what came of those that others are compared with

    def _told(self) -> dict[str, list[str]]:
        """Module and numerics class of each technique, by a child: this process never loads saturate."""
        path = self.folder / "techniques.json"

        def tell() -> None:
            from saturate.techniques import _registry

            path.write_text(json.dumps({name: [module.__name__, module.TECHNIQUE.numerics] for name, module in _registry.load().items()}))

        code, text = self._fork(tell, self.folder / "techniques.log")
        if code:
            raise RuntimeError(text)
        return json.loads(path.read_text())

    def _fork(self, act: Any, log: Path) -> tuple[int, str]:
        """The exit code of a child that acts and ends as a program does, and what it wrote."""
        child = os.fork()
        if not child:
            _become(act, log)
        end = time.monotonic() + LIMIT_S
        while not (found := os.waitpid(child, os.WNOHANG))[0]:
            if time.monotonic() > end:
                os.killpg(child, signal.SIGKILL)
            time.sleep(0.005)
        return os.waitstatus_to_exitcode(found[1]), log.read_text(errors="replace")

    def run(self, ids: tuple[str, ...], folder: Path, name: str, *more: Path) -> dict[str, Any]:
        """What came of a function of `pair_training` under these techniques; `failed` and `said` beside it."""
        folder.mkdir(parents=True, exist_ok=True)

        def act() -> None:
            os.chdir(folder)
            self._begin(ids)
            getattr(pair_training, name)(self.kind, self.clips, folder, *more)

        code, text = self._fork(act, folder / "log")
        path = folder / f"{'whole' if name == 'whole' else folder.name}.json"
        seen = json.loads(path.read_text()) if path.exists() else {}
        return {**seen, "failed": "" if not code else f"{folder.name} ended with {code}: {text.strip()[-600:]}", "said": text}

    def _begin(self, ids: tuple[str, ...]) -> None:
        if not ids:
            sys.modules["saturate"] = None      # type: ignore[assignment]  # whatever asks for it fails
            return
        from saturate.agent import bootstrap
        from saturate.techniques import _interrupts  # noqa: F401 - as `sitecustomize` does
        from saturate.trial.launch import Chosen, plan_text

        if "compile" in ids:                # a compiler of C++ takes half a minute; what is asked here is who wraps whom
            own = torch.compile
            torch.compile = lambda function, mode, dynamic: own(function, backend="aot_eager", dynamic=dynamic)
        chosen = [Chosen(id=name, module=self.modules[name][0], options=OPTIONS[name]) for name in ids]
        bootstrap.start(json.loads(plan_text("run", chosen, on_divergence="warn", strict=False, doubts={})))["torch"](torch)

    def alone(self, ids: tuple[str, ...]) -> tuple[dict[str, Any], Path]:
        folder = self.folder / ("+".join(ids) or "nothing")
        if ids not in self.known:
            self.known[ids] = self.run(ids, folder, "whole")
        return self.known[ids], folder

    def problems(self, ids: tuple[str, ...]) -> list[str]:
        classes = [self.modules[name][1] for name in ids]
        plain, plain_folder = self.alone(())
        rest = tuple(name for name, numerics in zip(ids, classes) if numerics != "exact")
        weakest = max(classes, key=list(TOLERANCE).index)
        like, allowed = (self.alone(rest)[0], 0.0) if len(rest) < len(ids) else (plain, TOLERANCE[weakest])
        if (set(ids), self.kind) == ROUNDED_OTHERWISE:
            allowed = TOLERANCE[weakest]
        if weakest == "convergence" and len(rest) == 2:
            like, allowed = self.alone(("global-batch",))[0], max(TOLERANCE[numerics] for numerics in classes if numerics != weakest)
        folder = self.folder / "+".join(ids)
        seen = self.run(ids, folder, "whole")
        if seen["failed"]:
            return [seen["failed"]]
        found = [*seen["problems"], *(f"saturate failed: {line}" for line in seen["said"].splitlines() if "Traceback" in line)]
        for name in ids if set(ids) not in IDLE_TOGETHER else ():
            if idle := _idle(seen["said"], name):
                found += [f"not so alone: {line}" for line in idle - _idle(self.alone((name,))[0]["said"], name)]
        for name, factor in (("losses", 1), ("gradients", 10), ("outputs", 10), ("rates", 0)):
            found += _apart(name, like[name], seen[name], factor * allowed if factor else 0.0)
        found += _other_facts(plain["facts"], seen["facts"], "channels-last" in ids)
        width = TOLERANCE[weakest]
        same = max((TOLERANCE[numerics] for numerics in classes if numerics != "convergence"), default=0.0)
        for name, by, source, expected in (("its_own", ids, folder, seen["resumed"]), ("its_own_under_nothing", (), folder, plain["resumed"]),
                                           ("of_nothing", ids, plain_folder, plain["resumed"])):
            again = self.run(by, folder / name, "resumed", source / "state_2.pt")
            # What goes on under another rule of learning is another training; under its own it is the same one.
            allowed = same if name == "its_own" else width
            found += [again["failed"]] if again["failed"] else _apart(f"resumed from {name}", expected, again["losses"], allowed)
        read = self.run((), folder / "read", "loaded", folder)
        expected_read = self.run((), self.folder / "read", "loaded", plain_folder)
        if read["failed"]:
            return [*found, read["failed"]]
        found += read["problems"] + _other_facts(expected_read["facts"], read["facts"], "channels-last" in ids)
        found += _apart("outputs of a model that was loaded", seen["outputs"][0], read["outputs"][0], 0.0 if weakest == "exact" else 1e-4)
        shutil.rmtree(folder)
        return found


def _idle(said: str, name: str) -> set[str]:
    """What a technique says of itself where it does nothing."""
    return {line for line in said.splitlines() if name in line and ("take effect" in line or "in effect" in line)}


def _become(act: Any, log: Path) -> None:
    os.setsid()
    stream = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(stream, 1)
    os.dup2(stream, 2)
    code = 0
    try:
        act()
    except BaseException as error:  # noqa: BLE001 - said, as by the interpreter
        sys.last_value = error
        traceback.print_exc()
        code = 1
    try:
        import atexit

        threading._shutdown()
        atexit._run_exitfuncs()
        sys.stdout.flush()
        sys.stderr.flush()
    finally:
        os._exit(code)


def _flat(value: Any) -> list[float]:
    return [number for one in value for number in _flat(one)] if isinstance(value, list) else [value]


def _apart(name: str, expected: Any, found: Any, allowed: float) -> list[str]:
    """Relative to each number, and of small ones to the largest."""
    a, b = _flat(expected), _flat(found)
    if len(a) != len(b):
        return [] if allowed == math.inf else [f"{len(b)} {name} instead of {len(a)}"]
    least = 0.1 * max(map(abs, a), default=0.0) or 1.0
    deviations = [abs(x - y) / max(abs(x), least) if x == x and y == y else math.inf for x, y in zip(a, b)]
    worst = max(deviations, default=0.0)
    return [f"{name} are off by {worst:.1e} ({allowed:.0e} is allowed), most at {deviations.index(worst)}"] if worst > allowed else []


def _other_facts(expected: dict[str, Any], found: dict[str, Any], in_any_order: bool) -> list[str]:
    """`in_any_order`: strides of weights may be others, as of what is pickled with them."""
    def usual(value: Any) -> Any:
        if isinstance(value, list) and len(value) == 5 and isinstance(value[0], str):
            return value[:4] if in_any_order else value
        if isinstance(value, dict):
            return {name: usual(one) for name, one in value.items()}
        return [usual(one) for one in value] if isinstance(value, list) else value

    return [f"{name} is {found.get(name)} instead of {value}" for name, value in expected.items() if usual(value) != usual(found.get(name))]


if __name__ == "__main__":
    torch.set_num_threads(1)
    place, kind_of_training, *pairs = sys.argv[1:]
    matrix = Matrix(Path(place), kind_of_training, pairs[0] == "clips")
    for pair in pairs[pairs[0] == "clips":]:
        print(json.dumps([pair, matrix.problems(tuple(pair.split("+")))]), flush=True)
