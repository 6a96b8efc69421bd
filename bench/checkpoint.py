"""What does a training lose by a checkpoint, and is the checkpoint whole?

    python bench/checkpoint.py

One training saves its model and its AdamW state in turns by: `torch.save` and fsync (synchronous), the technique
`async-checkpoint` as it is by default, and `torch.distributed.checkpoint.async_save` by a thread, by a thread with
buffers that are kept, and by a process. Every save is durable before the next one starts; all write to a file of their
own.

Two numbers for each save. *Blocked*: how long the script stands in the call. *Total*: how much longer the save and the
steps after it take than the same number of steps without a save just before, in the same process; what is not durable
by then is waited for, and counts. Turns are interleaved, in an order that changes every round; a number is compared
with the peer's of the same round, and the median over rounds is given with its 95 % interval.

Then torn tensors, of saves by a thread and by a process: their tensors are changed at once by an optimizer, by `p.data`
and by a running statistic, and each file is read back and compared with a digest taken before the save. The same without
the copy shows that tears are seen.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import logging
import os
import shutil
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from _output import as_text, close, write_json
from torch import nn
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions
from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType

from saturate.agent.context import Context
from saturate.checkpoints import staging
from saturate.checkpoints.durable import sync_folder
from saturate.measure.stats import median_se, t_quantile
from saturate.techniques import async_checkpoint

TARGETS = "blocked no longer than DCP's async, total no more than the synchronous save's, 0 torn tensors"
#: Ways that write while training goes on.
OVERLAPPING = ("thread", "process")
DCP = ("dcp thread", "dcp thread, kept buffers", "dcp process")


class Training:
    """A perceptron whose model and optimizer state together take about `megabytes`."""

    def __init__(self, megabytes: int, width: int = 1024):
        layers = max(1, round(megabytes * 1e6 / (3 * 4 * width * width)))
        self.model = nn.Sequential(*(nn.Linear(width, width) for _ in range(layers)))
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-4)
        self.inputs = torch.randn(64, width)

    def steps(self, count: int) -> float:
        """Seconds for some steps."""
        began = time.perf_counter()
        for _ in range(count):
            self.optimizer.zero_grad()
            self.model(self.inputs).square().mean().backward()
            self.optimizer.step()
        return time.perf_counter() - began

    def state(self) -> dict[str, Any]:
        return {"model": self.model.state_dict(), "optimizer": self.optimizer.state_dict()}


#: Saves a state to a path, and returns how to wait until it is durable.
Save = Callable[[dict[str, Any], Path], Callable[[], object]]


class Way:
    """One way to save, and what it cost so far, in seconds."""

    def __init__(self, name: str, folder: Path, save: Save):
        self.name = name
        self.path = folder / (name.replace(", ", "-").replace(" ", "-") + ".pt")
        self.save = save
        self.blocked: list[float] = []
        self.total: list[float] = []

    def turn(self, training: Training, steps: int, keep: bool) -> None:
        """Some steps, then a save and as many steps more."""
        plain = training.steps(steps)
        state = training.state()
        began = time.perf_counter()
        durable = self.save(state, self.path)
        blocked = time.perf_counter() - began
        training.steps(steps)
        durable()
        took = time.perf_counter() - began
        if keep:
            self.blocked.append(blocked)
            self.total.append(took - plain)
        if self.path.is_dir():
            shutil.rmtree(self.path)        # DCP writes folders; ours and torch's replace the file of before
        os.sync()


def synchronously(state: dict[str, Any], path: Path) -> Callable[[], object]:
    with open(path, "wb") as file:
        torch.save(state, file)
        file.flush()
        os.fsync(file.fileno())
    sync_folder(path.parent)
    return lambda: None


def by_technique(state: dict[str, Any], path: Path) -> Callable[[], object]:
    """The technique is applied as by `saturate run`; saves into open files, as the peer's, it leaves alone."""
    torch.save(state, path)
    return lambda: os.path.exists(path)         # waits


def by_dcp(kind: AsyncCheckpointerType, stager: DefaultStager | None = None) -> Save:
    group = dist.new_group(backend="gloo")      # without one of its own it hangs in other trainings

    def save(state: dict[str, Any], path: Path) -> Callable[[], object]:
        found = dcp.async_save(state, checkpoint_id=path, process_group=group, async_checkpointer_type=kind,
                               async_stager=stager)
        return getattr(found, "upload_completion", found).result

    return save


def interval(values: list[float]) -> tuple[float, float, float]:
    """Median with its 95 % interval."""
    half = t_quantile(0.975, len(values) - 1) * median_se(values)
    return median(values), median(values) - half, median(values) + half


def against(ours: list[float], theirs: list[float]) -> tuple[float, float, float]:
    """Ours over theirs: the median of the differences within a round, in units of their median. Totals may be negative
    on a noisy machine, and have no logarithm then."""
    unit = median(theirs)
    middle, low, high = interval([(a - b) / unit for a, b in zip(ours, theirs)])
    return 1 + middle, 1 + low, 1 + high


# -- torn tensors ----------------------------------------------------------------------------------------------------


def digests(state: dict[str, Any]) -> dict[str, str]:
    return {name: hashlib.blake2b(tensor.numpy().tobytes()).hexdigest() for name, tensor in state.items()}


def torn(folder: Path, saves: int) -> int:
    """Tensors, over all saves, that were read back with other bytes than they had when `torch.save` was called."""
    model = nn.Sequential(nn.Linear(256, 256), nn.BatchNorm1d(256), nn.Linear(256, 256))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    inputs = torch.randn(8, 256)
    count = 0
    for index in range(saves):
        moments = optimizer.state_dict()["state"].items()
        state = {**model.state_dict(), **{f"{i}.{key}": value for i, one in moments for key, value in one.items()}}
        wanted = digests(state)
        path = folder / f"torn{index % 3}.pt"
        torch.save(state, path)
        for parameter in model.parameters():
            parameter.data.mul_(0.9)            # an update by hand, that no hook sees
        model(inputs).square().mean().backward()
        optimizer.step()
        found = digests(torch.load(path))
        count += sum(found.get(name) != digest for name, digest in wanted.items())
    return count


@contextlib.contextmanager
def without_the_copy() -> Iterator[None]:
    """Stage references to the live tensors instead of copies: the bug that the digests must see."""
    original = staging.Staged.contents

    def live(self: Any) -> Iterator[Any]:
        time.sleep(0.002)       # as long as a disk takes at least
        return staging.raw_contents(torch, self.keep)

    stage = staging.stage

    def no_copy(torch_: Any, records: Any, arena: Any, alignment: int) -> Any:
        staged = stage(torch_, records, arena, alignment)
        staged.keep = list(records)
        return staged

    staging.Staged.contents, staging.stage = live, no_copy
    wait, staging.Staged.wait = staging.Staged.wait, lambda self: None
    try:
        yield
    finally:
        staging.Staged.contents, staging.stage, staging.Staged.wait = original, stage, wait


# -- all of it -------------------------------------------------------------------------------------------------------


def quiet() -> None:
    """torch warns about what is its own business here, on standard error, once per save."""
    warnings.simplefilter("ignore")
    for name in ("torch.distributed.checkpoint", "torch.distributed"):
        logging.getLogger(name).setLevel(logging.ERROR)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--megabytes", type=int, default=300, help="of one checkpoint")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--steps", type=int, default=8, help="after each save")
    parser.add_argument("--saves", type=int, default=1000, help="that are looked at for torn tensors, by a thread and by a process each")
    parser.add_argument("--threads", type=int, default=1, help="of the training")
    parser.add_argument("--folder", type=Path, help="where to save (default: a folder of its own below TMPDIR)")
    parser.add_argument("--smoke", action="store_true", help="as little as runs: does it work?")
    parser.add_argument("--json", type=Path, metavar="FILE")
    args = parser.parse_args()
    if args.smoke:
        args.megabytes, args.rounds, args.steps, args.saves = 12, 3, 2, 20
    torch.set_num_threads(args.threads)
    quiet()
    folder = Path(tempfile.mkdtemp(prefix="saturate-checkpoint-", dir=args.folder))
    try:
        rows = measure(args, folder)
    finally:
        shutil.rmtree(folder)
    by_name = {row["name"]: row for row in rows}
    ours, tears = by_name["saturate"], by_name["torn tensors"]
    best = min((by_name[name] for name in DCP), key=lambda row: row["blocked_s"][0])
    print(f"blocked, saturate / {best['name']}: {as_text(tuple(best['blocked_ratio']))}")
    print(f"total, saturate / torch.save: {as_text(tuple(by_name['torch.save']['total_ratio']))}")
    print(f"torn tensors: {tears['torn']} in {tears['saves']} saves; "
          f"without the copy {tears['without_copy']} in {tears['saves_without_copy']}")
    print(f"saturate's own account: {ours['account']}")
    whole = not tears["torn"] and tears["without_copy"] > 0
    met = best["blocked_ratio"][2] <= 1 and by_name["torch.save"]["total_ratio"][2] <= 1 and whole
    write_json(args.json, "checkpoint", rows, None if args.smoke else met)
    return close(met, args.smoke, TARGETS)


def measure(args: argparse.Namespace, folder: Path) -> list[dict[str, Any]]:
    os.environ.setdefault("MASTER_ADDR", "127.0.0.1")
    os.environ.setdefault("MASTER_PORT", "0")
    dist.init_process_group("gloo", init_method=f"file://{folder}/rendezvous", rank=0, world_size=1)
    training = Training(args.megabytes)
    training.steps(2)
    ways = [
        Way("torch.save", folder, synchronously),
        Way("dcp thread", folder, by_dcp(AsyncCheckpointerType.THREAD)),
        Way("dcp thread, kept buffers", folder,
            by_dcp(AsyncCheckpointerType.THREAD, DefaultStager(StagingOptions(False, True, False, False)))),
        Way("dcp process", folder, by_dcp(AsyncCheckpointerType.PROCESS)),
    ]
    context = Context(torch)
    context.owner = async_checkpoint.TECHNIQUE.id
    async_checkpoint.apply(context, async_checkpoint.Options())
    ways.append(Way("saturate", folder, by_technique))
    for _ in range(2 if args.smoke else 8):         # until the technique has settled on a way, and the peers are warm
        ways[-1].turn(training, args.steps, keep=False)
    for way in ways:
        for _ in range(1 if args.smoke else 2):
            way.turn(training, args.steps, keep=False)
    for index in range(args.rounds):
        order = ways[index % len(ways):] + ways[:index % len(ways)]
        for way in order if index % 2 else reversed(order):
            way.turn(training, args.steps, keep=True)
        print(f"round {index + 1} of {args.rounds}", file=sys.stderr)
    account = context.notes[async_checkpoint.TECHNIQUE.id]
    context.undo()
    tears = 0
    for mode in OVERLAPPING:            # what "auto" had settled on may be the synchronous way, which cannot tear
        async_checkpoint.apply(context, async_checkpoint.Options(mode))
        tears += torn(folder, args.saves)
        context.undo()
    few = min(50, args.saves)
    async_checkpoint.apply(context, async_checkpoint.Options("thread"))
    with without_the_copy():
        planted = torn(folder, few)
    context.undo()
    dist.destroy_process_group()
    ours = ways[-1]
    rows: list[dict[str, Any]] = []
    for way in ways:
        row = {"name": way.name, "blocked_s": interval(way.blocked), "total_s": interval(way.total),
               "blocked_ratio": against(ours.blocked, way.blocked), "total_ratio": against(ours.total, way.total)}
        rows.append(row)
        print(f"{way.name:26s} blocked {as_text(row['blocked_s'])} s   total {as_text(row['total_s'])} s")
    rows[-1]["account"] = account
    rows.append({"name": "torn tensors", "saves": len(OVERLAPPING) * args.saves, "torn": tears, "saves_without_copy": few,
                 "without_copy": planted})
    return rows


if __name__ == "__main__":
    sys.exit(main())
