"""Does activation checkpointing by budget keep its budget, and is it as fast as policies written by hand?

    python bench/activation_memory.py

Three models (a GPT, a residual network of convolutions with BatchNorm whose blocks differ in size, a residual perceptron)
are trained under several budgets, each a share of what their activations take without checkpointing. For each: the peak of
what is alive, counted apart from the product (`_alive.py`), beside the budget and the largest block; and the time of a step
beside each policy that one would write by hand (none, every block, every second, every fourth, all but matrix products)
and whose own counted peak meets the same budget. The steps of all of them alternate in one process; the ratio is the median
over rounds, with its interval. The clock is the CPU time of the one training thread, which other load does not change.
A second column is the peak of resident memory, of a fresh process each, above that of the same process before training.
"""

from __future__ import annotations

import argparse
import functools
import importlib.util
import json
import math
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import torch
from _alive import Alive
from _output import as_text, close, write_json
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from saturate.agent.context import Context
from saturate.measure.stats import median_se, t_quantile
from saturate.techniques import activation_checkpointing as technique

TARGET = 1.05
EXAMPLE = Path(__file__).resolve().parent.parent / "examples" / "char_gpt.py"


# -- models ------------------------------------------------------------------------------------------------------------


class ConvolutionBlock(nn.Module):
    def __init__(self, width: int, out: int, stride: int):
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(width, out, 3, stride, 1, bias=False), nn.BatchNorm2d(out), nn.ReLU(),
            nn.Conv2d(out, out, 3, 1, 1, bias=False), nn.BatchNorm2d(out))
        self.skip = nn.Identity() if stride == 1 and width == out else nn.Conv2d(width, out, 1, stride)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.relu(self.body(x) + self.skip(x))


class PerceptronBlock(nn.Module):
    def __init__(self, width: int):
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(F.silu(self.up(self.norm(x))))


class Net(nn.Module):
    def __init__(self, blocks: list[nn.Module], width: int, images: bool):
        super().__init__()
        self.stem = nn.Conv2d(3, 16, 3, 1, 1) if images else nn.Linear(64, width)
        self.blocks = nn.ModuleList(blocks)
        self.head = nn.Linear(width, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.stem(x)
        for block in self.blocks:
            x = block(x)
        return self.head(x.mean((2, 3)) if x.dim() == 4 else x)


@dataclass(frozen=True)
class Workload:
    model: Callable[[], nn.Module]
    batch: Callable[[], tuple[torch.Tensor, torch.Tensor]]


def gpt(layers: int, width: int, batch: int) -> Workload:
    specification = importlib.util.spec_from_file_location("char_gpt", EXAMPLE)
    module = importlib.util.module_from_spec(specification)
    specification.loader.exec_module(module)
    return Workload(lambda: module.GPT(96, 64, layers, width, 4, 0.1),
                    lambda: tuple(torch.randint(96, (2, batch, 64)).unbind()))


def convolutions(depth: int, batch: int) -> Workload:
    def model() -> nn.Module:
        blocks, width = [], 16
        for stage in range(3):
            for number in range(depth):
                blocks.append(ConvolutionBlock(width, 16 << stage, 2 if stage and not number else 1))
                width = 16 << stage
        return Net(blocks, width, images=True)

    return Workload(model, lambda: (torch.randn(batch, 3, 32, 32), torch.randint(10, (batch,))))


def perceptron(depth: int, width: int, batch: int) -> Workload:
    return Workload(lambda: Net([PerceptronBlock(width) for _ in range(depth)], width, images=False),
                    lambda: (torch.randn(batch, 64), torch.randint(10, (batch,))))


def workloads(smoke: bool) -> dict[str, Workload]:
    if smoke:
        return {"gpt": gpt(4, 64, 4)}
    return {"gpt": gpt(8, 192, 16), "convolutions": convolutions(4, 32), "perceptron": perceptron(12, 256, 1024)}


# -- contestants -------------------------------------------------------------------------------------------------------

PRODUCTS = [torch.ops.aten.mm.default, torch.ops.aten.addmm.default, torch.ops.aten.bmm.default,
            torch.ops.aten.convolution.default]


class Training:
    """A model and its steps. `policy` is written by hand; `budget_bytes` is for the technique."""

    def __init__(self, workload: Workload, policy: str = "none", budget_bytes: int = 0):
        torch.manual_seed(0)
        self.workload, self.model = workload, workload.model().train()
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=1e-3)
        self.context = Context(torch)
        blocks = list(self.model.blocks)
        every = {"every block": 1, "every 2nd": 2, "every 4th": 4, "all but products": 1}.get(policy)
        for block in blocks[::every] if every else ():
            more = {}
            if policy == "all but products":
                from torch.utils.checkpoint import create_selective_checkpoint_contexts

                more["context_fn"] = functools.partial(create_selective_checkpoint_contexts, PRODUCTS)
            block.forward = functools.partial(checkpoint, block.forward, use_reentrant=False, **more)
        if budget_bytes:
            self.context.modules, self.context.optimizers = (self.model,), (self.optimizer,)
            self.context.device = "cpu"
            technique.apply(self.context, technique.Options(mode="budget", budget_bytes=budget_bytes))

    def step(self) -> float:
        """One step; seconds of this thread."""
        inputs, targets = self.workload.batch()
        began = time.thread_time()
        output = self.model(inputs, targets)[1] if self.model.__class__.__name__ == "GPT" else \
            F.cross_entropy(self.model(inputs), targets)
        self.optimizer.zero_grad()
        output.backward()
        self.optimizer.step()
        return time.thread_time() - began

    def peak(self, steps: int = 3) -> int:
        """Most bytes alive in any step, once the technique has measured."""
        for _ in range(2):
            self.step()
        with Alive(self.model) as alive:
            for _ in range(steps):
                self.step()
        return alive.peak

    def largest_block(self) -> int:
        """Bytes that the largest block alone keeps."""
        inputs, _ = self.workload.batch()
        sizes = []

        def measured(block: nn.Module, forward: Any, x: torch.Tensor) -> torch.Tensor:
            with Alive(self.model) as alive:
                output = forward(x)
            sizes.append(alive.peak)
            return output

        for block in self.model.blocks:
            block.forward = functools.partial(measured, block, block.forward)
        self.model(inputs)
        return max(sizes)


POLICIES = ("none", "every block", "every 2nd", "every 4th", "all but products")


def race(contestants: dict[str, Training], rounds: int) -> dict[str, list[float]]:
    """Seconds of each contestant's step in each round; the order turns."""
    names = list(contestants)
    for name in names:
        contestants[name].step()
    found: dict[str, list[float]] = {name: [] for name in names}
    for number in range(rounds):
        turned = names[number % len(names):] + names[: number % len(names)]
        for name in turned if number % 2 else reversed(turned):
            found[name].append(contestants[name].step())
    return found


def ratio(ours: list[float], theirs: list[float]) -> tuple[float, float, float]:
    """Median over rounds of ours / theirs, with its 95 % interval."""
    logs = [math.log(a / b) for a, b in zip(ours, theirs)]
    middle, half = median(logs), t_quantile(0.975, max(1, len(logs) - 1)) * median_se(logs)
    return math.exp(middle), math.exp(middle - half), math.exp(middle + half)


def resident(name: str, smoke: bool, policy: str, budget_bytes: int) -> float:
    """MiB that a fresh process takes for training, at its peak."""
    command = [sys.executable, __file__, "--child", json.dumps([name, smoke, policy, budget_bytes])]
    return json.loads(subprocess.run(command, capture_output=True, text=True, check=True).stdout)


def child(name: str, smoke: bool, policy: str, budget_bytes: int) -> float:
    training = Training(workloads(smoke)[name], policy, budget_bytes)
    Path("/proc/self/clear_refs").write_text("5")       # importing torch took more than what is asked for here
    before = _status("VmRSS")
    for _ in range(3 if smoke else 6):
        training.step()
    return (_status("VmHWM") - before) / 1024


def _status(key: str) -> int:
    """KiB, from the kernel."""
    lines = Path("/proc/self/status").read_text(encoding="ascii").splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(key))


def measure(name: str, workload: Workload, shares: list[float], rounds: int, smoke: bool) -> Iterator[dict[str, Any]]:
    by_hand = {policy: Training(workload, policy) for policy in POLICIES}
    peaks = {policy: training.peak() for policy, training in by_hand.items()}
    plain, block = peaks["none"], Training(workload).largest_block()
    print(f"{name}: {plain / 2**20:.1f} MiB of activations, {block / 2**20:.1f} MiB in the largest block; by hand "
          + ", ".join(f"{policy} {peaks[policy] / 2**20:.1f}" for policy in POLICIES[1:])
          + f"; resident {resident(name, smoke, 'none', 0):.0f} MiB")
    for share in shares:
        budget = int(share * plain)
        ours = Training(workload, budget_bytes=budget)
        peak = ours.peak()
        fitting = [policy for policy in POLICIES if peaks[policy] <= budget]
        row: dict[str, Any] = {
            "workload": name, "share": share, "budget_bytes": budget, "peak_bytes": peak, "plain_bytes": plain,
            "largest_block_bytes": block, "within_budget": peak <= budget, "within_one_block": peak >= budget - block,
            "notes": dict(ours.context.notes), "resident_mib": resident(name, smoke, "budget", budget),
            "policy_peaks": peaks}
        line = (f"{name:13}{share:5.0%} of it: peak {peak / budget:6.1%} of the budget, {(budget - peak) / block:5.2f} blocks "
                f"below it, resident {row['resident_mib']:.0f} MiB")
        if fitting:
            seconds = race({"ours": ours, **{policy: by_hand[policy] for policy in fitting}}, rounds)
            best = min(fitting, key=lambda policy: median(seconds[policy]))
            row |= {"best_by_hand": best, "time_ratio": ratio(seconds["ours"], seconds[best])}
            line += f", time / {best} {as_text(row['time_ratio'])}"
        else:
            line += ", no policy by hand fits"
        print(line)
        yield row


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--smoke", action="store_true", help="one small model, nothing judged")
    parser.add_argument("--json", type=Path, metavar="FILE")
    parser.add_argument("--child", help=argparse.SUPPRESS)
    options = parser.parse_args()
    torch.set_num_threads(1)
    if options.child:
        print(child(*json.loads(options.child)))
        return 0
    shares = [0.5] if options.smoke else [0.9, 0.75, 0.6, 0.45, 0.3]
    rows = [row for name, workload in workloads(options.smoke).items()
            for row in measure(name, workload, shares, 6 if options.smoke else 40, options.smoke)]
    met = all(row["within_budget"] and row["within_one_block"] and row.get("time_ratio", (1.0,))[0] <= TARGET for row in rows)
    write_json(options.json, "activation_memory", rows, None if options.smoke else met)
    return close(met, options.smoke, f"never above the budget, within one block of it, at most {TARGET - 1:.0%} slower than the "
                                     "best policy by hand that fits")


if __name__ == "__main__":
    sys.exit(main())
