"""Techniques of third parties, honest and lying, and a small training for them to act on.

The workload waits in each forward, as one that waits for a slow disk does, so a technique that shortens the wait is
really faster: also on a busy machine, where what is computed takes several times as long and the wait does not. Every
liar below is: without its lie it would be kept.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

WORKLOAD = '''
import sys, time
import torch, torch.nn as nn
from torch.utils.data import DataLoader, TensorDataset

torch.manual_seed(7)

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(12, 24), nn.Linear(24, 1)

    def forward(self, x):
        time.sleep(0.01)
        return self.b(torch.tanh(self.a(x)))

model = Net()
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
x = torch.randn(512, 12)
data = TensorDataset(x, x[:, :3].sum(1, keepdim=True) + 0.1 * torch.randn(512, 1))
loader = DataLoader(data, batch_size=32, shuffle=True)
updates = int(sys.argv[1]) if len(sys.argv) > 1 else 10**9
while updates > 0:
    for micro, (inputs, targets) in enumerate(loader):
        loss = nn.functional.mse_loss(model(inputs), targets) / 2
        loss.backward()
        if micro % 2:
            optimizer.step()
            optimizer.zero_grad()
            updates -= 1
            if not updates:
                break
'''

_TEMPLATE = '''"""{title}.

What it does
------------
{title}.

When it helps
-------------
In tests.

When it hurts
-------------
Elsewhere.

Numerics
--------
`{numerics}`, it says.

How it is applied
-----------------
See the source.

References
----------
None.
"""

import json, os, time
from dataclasses import dataclass

from saturate.techniques._api import Eligible, Proof, Technique, Touch

TECHNIQUE = Technique(id="{identity}", title="{title}", numerics="{numerics}", stage="{stage}",
                      touches=(Touch("{identity}"),))


@dataclass(frozen=True)
class Options:
    share: float = 0.25


def eligible(facts):
    return Eligible("in tests")


def variants(facts):
    return [Options()]


def bound(facts):
    return None


def waits_less(context, options):
    wait = time.sleep
    context.set_attribute(time, "sleep", lambda seconds: wait(seconds * options.share))


def apply(context, options):
    torch = context.torch
{body}
    return "applied"


def active(evidence, options):
    return Proof(True, "it says so")


def as_code(options):
    return "# none"
{more}
'''

_MODE = '''
    with open(os.environ["SATURATE_PLAN"]) as file:
        timed = json.load(file)["mode"] == "trial"
'''
_FASTER = "\n    waits_less(context, options)\n"

#: module name -> (numerics class, stage, body of `apply`, more source)
TECHNIQUES: dict[str, tuple[str, str, str, str]] = {
    "waits_less": ("exact", "model", _FASTER, ""),
    "perturbs": ("exact", "model", _FASTER + '''
    context.wrap_forward(context.modules[0], 10, lambda inner: lambda self, x: inner(self, x) * (1 + 1e-4))
''', ""),
    "hidden_bf16": ("reordering", "model", _FASTER + '''
    def wrap(inner):
        def forward(self, x):
            with torch.autocast("cpu", dtype=torch.bfloat16):
                return inner(self, x).float()
        return forward
    context.wrap_forward(context.modules[0], 10, wrap)
''', ""),
    "one_over_n": ("precision", "model", _FASTER + '''
    def divide(optimizer, args, kwargs):
        for group in optimizer.param_groups:
            for p in group["params"]:
                p.grad /= 2
    context.on_undo(context.optimizers[0].register_step_pre_hook(divide).remove)
''', "ROUNDING = 1.0\n"),
    "nan_at_40": ("exact", "model", _FASTER + '''
    done = [0]
    def spoil(optimizer, args, kwargs):
        done[0] += 1
        if done[0] == 40:
            with torch.no_grad():
                optimizer.param_groups[0]["params"][0].mul_(float("nan"))
    context.on_undo(context.optimizers[0].register_step_post_hook(spoil).remove)
''', ""),
    "skips_updates": ("precision", "model", _FASTER + '''
    done = [0]
    def forget(optimizer, args, kwargs):
        done[0] += 1
        if done[0] % 5 == 0:
            for p in optimizer.param_groups[0]["params"]:
                p.grad = None
    context.on_undo(context.optimizers[0].register_step_pre_hook(forget).remove)
''', ""),
    "other_seed": ("stream", "model", _FASTER + "    torch.manual_seed(1234)\n", ""),
    "half_batch": ("precision", "import", _FASTER + '''
    context.on_loader(lambda dataset, arguments, given: {"batch_size": arguments["batch_size"] // 2})
''', ""),
    "half_forward": ("precision", "model", _FASTER + '''
    def wrap(inner):
        def forward(self, x):
            out = inner(self, x[: len(x) // 2])
            return torch.cat([out, out])
        return forward
    context.wrap_forward(context.modules[0], 10, wrap)
''', ""),
    "skips_pairs": ("precision", "model", _FASTER + '''
    done = [0]
    backward, step = torch.autograd.backward, context.optimizers[0].step
    def sometimes(tensors, *args, **kwargs):
        done[0] += 1
        if done[0] % 4 < 2:
            backward(tensors, *args, **kwargs)
    def seldom(*args, **kwargs):
        return step(*args, **kwargs) if done[0] % 4 < 2 else None
    context.set_attribute(torch.autograd, "backward", sometimes)
    context.set_attribute(context.optimizers[0], "step", seldom)
''', ""),
    "counts_twice": ("exact", "model", '''
    from torch.optim import optimizer as module
    def again(optimizer, args, kwargs):
        for hook in list(module._global_optimizer_post_hooks.values()):
            hook(optimizer, args, kwargs)
    context.on_undo(context.optimizers[0].register_step_post_hook(again).remove)
''', ""),
    "slow_clocks": ("exact", "model", '''
    for name, unit in (("perf_counter", 1), ("monotonic", 1), ("perf_counter_ns", 1), ("monotonic_ns", 1)):
        real = getattr(time, name)
        context.set_attribute(time, name, lambda real=real: type(real())(real() * 0.5))
''', ""),
    "slow_agent_clock": ("exact", "model", '''
    from saturate.agent.session import Session
    from saturate.agent.timeline import Timeline
    read, begin = Timeline.read, Session.clock()
    context.set_attribute(Timeline, "read", lambda self, marks: [int(begin + (ns - begin) * 0.93) for ns in read(self, marks)])
''', ""),
    "steps_aside": ("reordering", "model", _MODE + '''
    if timed:
        waits_less(context, options)
        context.note("steps-aside", "it waits less")
''', '''
def active(evidence, options):
    return Proof("steps-aside" in evidence.notes, "it has stepped aside")
'''),
    "two_faced": ("exact", "model", _MODE + _FASTER + '''
    def wrap(inner):
        def forward(self, x):
            if not timed:
                return inner(self, x)
            out = inner(self, x[: len(x) // 2])
            return torch.cat([out, out])
        return forward
    context.wrap_forward(context.modules[0], 10, wrap)
''', ""),
    "stands_still": ("exact", "model", _MODE + _FASTER + '''
    done = [0]
    def forget(optimizer, args, kwargs):
        done[0] += 1
        if timed and done[0] > 60:
            for p in optimizer.param_groups[0]["params"]:
                p.grad = None
    context.on_undo(context.optimizers[0].register_step_pre_hook(forget).remove)
''', ""),
    "inactive": ("exact", "model", "", ""),
    "admits_it": ("exact", "model", "", '''
def active(evidence, options):
    return Proof(False, "nothing shows it")
'''),
    "raises": ("exact", "model", "", '''
def eligible(facts):
    raise RuntimeError("broken technique")
'''),
    "active_raises": ("exact", "model", "", '''
def active(evidence, options):
    raise RuntimeError("broken proof")
'''),
    "crashes": ("exact", "model", '''
    os.abort()
''', ""),
    "never_starts": ("exact", "model", '''
    while True:
        print("compiling", flush=True)
        time.sleep(0.1)
''', ""),
    "stops_later": ("exact", "model", '''
    done = [0]
    def wait(optimizer, args, kwargs):
        done[0] += 1
        time.sleep(600 if done[0] == 8 else 0)
    context.on_undo(context.optimizers[0].register_step_post_hook(wait).remove)
''', ""),
    "crawls": ("exact", "model", '''
    def wait(optimizer, args, kwargs):
        time.sleep(0.5)
    context.on_undo(context.optimizers[0].register_step_post_hook(wait).remove)
''', ""),
}


def identity(name: str) -> str:
    return name.replace("_", "-")


def publish(folder: Path, names: list[str]) -> Path:
    """Write a distribution that registers these techniques; a folder for PYTHONPATH."""
    info = folder / "parties-1.0.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: parties\nVersion: 1.0\n", encoding="utf-8")
    lines = [f"{identity(name)} = {name}" for name in names]
    (info / "entry_points.txt").write_text("\n".join(["[saturate.techniques]", *lines, ""]), encoding="utf-8")
    for name in names:
        numerics, stage, body, more = TECHNIQUES[name]
        (folder / f"{name}.py").write_text(_TEMPLATE.format(
            title=identity(name).replace("-", " "), identity=identity(name), numerics=numerics, stage=stage, body=body,
            more=more), encoding="utf-8")
    return folder


def tune(folder: Path, source: str, *options: str, names: tuple[str, ...] = (), arguments: tuple[str, ...] = (),
         environment: dict[str, str] | None = None, budget: str = "60s", code: int = 0) -> dict[str, Any]:
    """Run `saturate tune --json` on a script in `folder`; the object that it prints.

    `names` are the third-party techniques that are registered, and by default the only ones tried.
    """
    work = folder / "work"
    work.mkdir(exist_ok=True)
    (work / "train.py").write_text(textwrap.dedent(source), encoding="utf-8")
    base = {k: v for k, v in os.environ.items() if not k.startswith(("SATURATE", "PYTHON", "PYTEST"))}
    if names:
        base["PYTHONPATH"] = str(publish(folder / "site", list(names)))
    only = ("--only", ",".join(map(identity, names))) if names else ()
    command = [sys.executable, "-m", "saturate", "tune", "--json", "--budget", budget, *only, *options,
               "--", sys.executable, "train.py", *arguments]
    done = subprocess.run(command, cwd=work, env={**base, **(environment or {})}, capture_output=True, text=True, timeout=900)
    expected = (0, 6) if code == 0 else (code,)      # on a noisy machine, what stays undecided ends with 6
    assert done.returncode in expected, done.stderr[-4000:]
    result = json.loads(done.stdout)
    result["stderr"] = done.stderr
    result["by_id"] = {entry["id"]: entry for entry in result["techniques"]}
    return result
