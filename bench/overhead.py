"""What the agent costs in the steady state, per step and per backward pass.

    python bench/overhead.py

One process trains a tiny model. Blocks of steps with and without the agent's seams alternate, in an order that turns
over every round; the cost is the median over rounds of the difference, with its interval. Fresh processes cannot judge
here: they differ by some percent, the agent by microseconds. The clock is the CPU time of the training thread (the
model is too small for a second one), so that what else runs on the machine does not count.

Two modes of the agent are measured: `trial` (both sides of every race) and `run` (training with a recipe). Beside them
two peers: `empty hooks`, a function that does nothing at each of the agent's three seams of a step (the least that any
observer of steps costs), and `profiler`, torch's own with CPU activities.
A technique that stays switched on for the day when it is needed is measured in the same way: `dynamic-batch`, while memory
never runs out (what it costs when it does is another matter). It is reported beside the agent's cost and not judged.
The share of a step is that of `examples/char_gpt.py` with its default sizes, timed in the same process.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from contextlib import ExitStack, redirect_stdout
from math import sqrt
from pathlib import Path
from statistics import median
from typing import Any

import torch
from _output import as_text, close, write_json
from torch import nn
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from saturate.agent import seams
from saturate.agent.context import Context
from saturate.agent.session import Session
from saturate.measure.stats import median_se, t_quantile
from saturate.techniques import dynamic_batch
from saturate.trial import launch
from saturate.trial.gate import GateServer

TARGET_US, TARGET_SHARE = 50.0, 0.005
EXAMPLE = Path(__file__).resolve().parent.parent / "examples" / "char_gpt.py"


class Toy:
    """A training whose step takes some tens of microseconds, so that a microsecond can be seen."""

    def __init__(self) -> None:
        self.model = nn.Linear(4, 4)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=1e-4)
        self.inputs = torch.randn(2, 4)

    def steps(self, count: int) -> None:
        for _ in range(count):
            self.model(self.inputs).mean().backward()
            self.optimizer.step()
            self.optimizer.zero_grad()

    def backwards(self, count: int) -> None:
        """Micro-steps of an accumulation that never ends."""
        for _ in range(count):
            self.model(self.inputs).mean().backward()


class Observer:
    """Something that can be switched on and off around a block."""

    def on(self) -> None: ...

    def off(self) -> None: ...


class Agent(Observer):
    """A session in its steady state, its seams in torch switched on and off with its own install and undo."""

    def __init__(self, mode: str, toy: Toy, stack: ExitStack):
        plan: dict[str, Any] = json.loads(launch.plan_text(mode, []))
        if mode == "trial":
            plan.update(socket=f"saturate-overhead-{id(self)}", token="overhead", step=None)
            server = GateServer(plan["socket"], plan["token"])
            stack.callback(server.close)
            threading.Thread(target=_open_gate, args=(server,), daemon=True).start()
        self.session = Session(torch, plan)
        self.on()
        toy.steps(20)
        assert self.session.phase == "active" and not self.session.dead
        self.off()

    def on(self) -> None:
        seams.install(self.session)

    def off(self) -> None:
        while self.session.undo:
            self.session.undo.pop()()


def _open_gate(server: GateServer) -> None:
    """Let the session through its first gate, for more steps than are ever taken."""
    server.wait_gates(60.0, lambda: True)
    server.go({"do": "go", "skip": 0, "steps": 10**12})


class DynamicBatch(Observer):
    """The insurance against running out of memory, which it never does here. The steps before the timed ones hold its
    proof and the first guarded batches; among the timed ones are those that it guards from time to time."""

    def __init__(self, toy: Toy):
        self.toy = toy

    def on(self) -> None:
        self.context = Context(torch)
        self.context.modules, self.context.device = (self.toy.model,), "cpu"
        self.context.owner = dynamic_batch.TECHNIQUE.id
        dynamic_batch.apply(self.context, dynamic_batch.Options())

    def off(self) -> None:
        assert dynamic_batch.TECHNIQUE.id in self.context.notes, "no batch was guarded"
        self.context.undo()


class EmptyHooks(Observer):
    """The floor: Python calls at the same three places, with nothing in them."""

    def on(self) -> None:
        def nothing(*args: Any) -> None: ...

        original = torch.autograd.backward

        def backward(tensors: Any, *args: Any, **kwargs: Any) -> Any:
            return original(tensors, *args, **kwargs)

        torch.autograd.backward = backward
        self.original = original
        self.hooks = [register_optimizer_step_pre_hook(nothing), register_optimizer_step_post_hook(nothing)]

    def off(self) -> None:
        torch.autograd.backward = self.original
        for hook in self.hooks:
            hook.remove()


class Profiler(Observer):
    def on(self) -> None:
        self.profile = torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU])
        self.profile.__enter__()

    def off(self) -> None:
        self.profile.__exit__(None, None, None)


def cost_us(observer: Observer, work: Callable[[int], None], rounds: int, block: int) -> tuple[float, float, float]:
    """CPU microseconds that `observer` adds to each unit of `work`: median over rounds, and its 95 % interval."""
    differences = []
    for turn in range(rounds):
        took = {}
        for watched in ((True, False) if turn % 2 else (False, True)):
            if watched:
                observer.on()
            work(block // 10)
            began = time.thread_time_ns()
            work(block)
            took[watched] = time.thread_time_ns() - began
            if watched:
                observer.off()
        differences.append((took[True] - took[False]) / block / 1000)
    half = t_quantile(0.975, rounds - 1) * median_se(differences)
    return median(differences), median(differences) - half, median(differences) + half


def example_step_ms(steps: int, sizes: list[str]) -> float:
    """Median step of the character GPT example, without the agent."""
    specification = importlib.util.spec_from_file_location("char_gpt_example", EXAMPLE)
    assert specification and specification.loader
    example = importlib.util.module_from_spec(specification)
    specification.loader.exec_module(example)
    stamps: list[float] = []
    handle = register_optimizer_step_post_hook(lambda *_: stamps.append(time.perf_counter()))
    given = sys.argv
    with tempfile.TemporaryDirectory() as folder:
        sys.argv = ["char_gpt.py", "--steps", str(steps), "--eval-every", "1000000", "--log-every", "1000000",
                    "--output", folder, *sizes]
        try:
            with redirect_stdout(sys.stderr):
                example.main()
        finally:
            sys.argv = given
            handle.remove()
    return 1000 * median([b - a for a, b in zip(stamps, stamps[1:])][2:])


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=60)
    parser.add_argument("--block", type=int, default=1000, help="steps in a block")
    parser.add_argument("--smoke", action="store_true", help="as little as runs: does it work?")
    parser.add_argument("--json", type=Path, metavar="FILE")
    args = parser.parse_args()
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    if args.smoke:
        args.rounds, args.block = 6, 100
    toy = Toy()
    toy.steps(200)
    rows = []
    with ExitStack() as stack:
        observers = {"run": Agent("run", toy, stack), "trial": Agent("trial", toy, stack),
                     "dynamic-batch": DynamicBatch(toy), "empty hooks": EmptyHooks(), "profiler": Profiler()}
        for name, observer in observers.items():
            slow = name == "profiler"        # keeps every event of a block in memory
            rounds, block = (min(6, args.rounds), min(100, args.block)) if slow else (args.rounds, args.block)
            step = cost_us(observer, toy.steps, rounds, block)
            backward = cost_us(observer, toy.backwards, rounds, block)
            rows.append({"observer": name, "step_us": step, "backward_us": backward})
            print(f"{name:13s} {as_us(step)} per step, {as_us(backward)} per backward alone", flush=True)
    torch.set_num_threads(threads)
    step_ms = example_step_ms(*((8, ["--layers", "1", "--width", "32"]) if args.smoke else (15, [])))
    worst = max(rows[:2], key=lambda row: row["step_us"][0])
    micros, peer = worst["step_us"], rows[-1]["step_us"]
    share = micros[0] / 1000 / step_ms
    print(f"a step of examples/char_gpt.py takes {step_ms:.1f} ms here: the agent is {share:.3%} "
          f"[{micros[1] / 1000 / step_ms:.3%}, {micros[2] / 1000 / step_ms:.3%}] of it")
    ratio = as_ratio(micros, peer)
    print(f"agent / profiler: {as_text(ratio)}")
    met = micros[0] <= TARGET_US or share <= TARGET_SHARE
    rows.append({"example_step_ms": step_ms, "share": share, "agent_over_profiler": ratio})
    write_json(args.json, "overhead", rows, None if args.smoke else met)
    return close(met, args.smoke, "<= 50 us or <= 0.5 % of a step")


def as_us(cost: tuple[float, float, float]) -> str:
    return "{:6.2f} us [{:.2f}, {:.2f}]".format(*cost)


def as_ratio(a: tuple[float, float, float], b: tuple[float, float, float]) -> tuple[float, float, float]:
    """a / b with an interval from both intervals' relative half-widths."""
    ratio = a[0] / b[0]
    half = abs(ratio) * sqrt(sum(((high - low) / 2 / value) ** 2 for value, low, high in (a, b)))
    return ratio, ratio - half, ratio + half


if __name__ == "__main__":
    raise SystemExit(main())
