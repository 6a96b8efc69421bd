"""What a verification run records does not depend on what differs between two processes of one training."""

from __future__ import annotations

import math
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from saturate.agent import settings
from saturate.verify import series

MODULES = """
import sys, torch, torch.nn as nn
torch.manual_seed(0)
class Pair(nn.Module):
    def __init__(self):
        super().__init__()
        self.one, self.two = nn.Linear(4, 4), nn.Linear(4, 4)
    def forward(self, x): return self.two(self.one(x))
first, second = Pair(), Pair()      # of one kind: only their places in the graph tell them apart
held = [*first.parameters(), *second.parameters()]
optimizers = [torch.optim.Adam(held[::-1] if sys.argv[1] == "reversed" else held)]
x = torch.randn(8, 4)
def loss(): return second(torch.tanh(first(x))).square().mean()
"""
#: As Pyro does: tensors that no module holds, and an optimizer for each of them, built when it is first needed.
PLAIN = """
import sys, torch
torch.manual_seed(0)
held = [torch.randn(4, requires_grad=True), torch.randn(4, requires_grad=True), torch.randn(3, requires_grad=True)]
optimizers = []
def loss():
    a, b, c = held
    value = (a * b.exp()).sum().square() + c.square().sum() * a.sum()
    if not optimizers:
        optimizers.extend(torch.optim.Adam([p]) for p in (held[::-1] if sys.argv[1] == "reversed" else held))
    return value
"""
LOOP = """
while True:
    loss().backward()
    for optimizer in optimizers: optimizer.step(); optimizer.zero_grad()
"""


@pytest.mark.parametrize(("source", "optimizers"), [(MODULES, 1), (PLAIN, 3)], ids=["modules", "plain tensors"])
def test_optimizers_that_hold_the_same_tensors_in_another_order_are_the_same_training(source, optimizers, script, start, tmp_path: Path) -> None:
    """A set of tensors is ordered by addresses. Recorded in that order, a script was said not to repeat itself."""
    path = str(script(source + LOOP))
    names = [f"S{number}" for number in range(optimizers)]

    def recorded(order: str) -> series.Series:
        folder = tmp_path / order
        folder.mkdir()
        capture = {"folder": str(folder), "updates": 8, "seed": 20, "aligned": False, "perturb": {"relative": 2.0**-9, "seed": 1}}
        start(path, order, capture=capture, step={"token": names[-1], "count": 1, "tokens": ["B", *names]}).wait_ready()
        return series.read(folder)

    plain, other = recorded("plain"), recorded("reversed")
    assert plain.segments == other.segments and plain.samples == other.samples and plain.losses == other.losses


#: An encoder and a decoder with an optimizer each, and an embedding that both hold.
SHARED = """
import torch, torch.nn as nn
torch.manual_seed(0)
shared, one, two = nn.Embedding(8, 4), nn.Linear(4, 4), nn.Linear(4, 4)
optimizers = [torch.optim.Adam([*shared.parameters(), *part.parameters()]) for part in (one, two)]
words = torch.arange(8)
def loss(): return two(torch.tanh(one(shared(words)))).square().mean()
"""


def test_the_second_optimizer_of_a_step_is_no_successor_of_the_first_for_what_both_hold(script, start, tmp_path: Path) -> None:
    """Where the step was known from another process, it was: the step that it ends never came, and the training went on for ever."""
    capture = {"folder": str(tmp_path), "updates": 8, "seed": 20, "aligned": False, "perturb": None}
    step = {"token": "S1", "count": 1, "tokens": ["B", "S0", "S1"]}
    start(str(script(SHARED + LOOP)), capture=capture, step=step).wait_ready()
    assert len(series.read(tmp_path)) == 8


def test_a_default_device_and_number_format_of_the_script_do_not_change_what_is_perturbed() -> None:
    import torch

    from saturate.agent import capture

    def perturbed() -> torch.Tensor:
        parameter = torch.ones(64, device="cpu", dtype=torch.float32)
        capture._perturb(torch, [parameter], relative=2.0**-9, seed=1)
        return parameter

    plain = perturbed()
    try:
        torch.set_default_device("meta")        # as a GPU would be: other than where the generator draws
        torch.set_default_dtype(torch.float64)
        found = perturbed()
    finally:
        torch.set_default_device(None)
        torch.set_default_dtype(torch.float32)
    assert torch.equal(found, plain) and set(plain.tolist()) == {1 - 2.0**-9, 1 + 2.0**-9}


#: Both replicas, after each update: how far they are apart.
RANKS = """
import torch, torch.nn as nn, torch.distributed as dist
dist.init_process_group("gloo")
torch.manual_seed(0)
bare = nn.Linear(8, 1)
model = nn.parallel.DistributedDataParallel(bare)
optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
while True:
    both = [torch.zeros(1, 8) for _ in range(2)]
    dist.all_gather(both, bare.weight.detach())
    with open(f"apart{dist.get_rank()}", "a") as file:
        print(float((both[0] - both[1]).abs().max()), file=file)
    optimizer.zero_grad(); model(torch.ones(4, 8)).square().mean().backward(); optimizer.step()
"""


def test_every_rank_is_perturbed_alike(script, start, tmp_path: Path) -> None:
    """Of one replica alone, the averaged gradient showed a half: honest candidates, which round on all, were rejected."""
    folder = tmp_path / "recorded"
    folder.mkdir()
    capture = {"folder": str(folder), "updates": 8, "seed": 20, "aligned": False, "perturb": {"relative": 2.0**-5, "seed": 1}}
    start(sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", str(script(RANKS)), capture=capture,
          step={"token": "S0", "count": 1, "tokens": ["B", "S0"]}).wait_ready()
    first, second = series.read(folder).samples[:2]
    assert max(abs(a - b) / abs(a) for a, b in zip(first, second)) > 2.0**-7, "it was perturbed"
    apart = (tmp_path / "apart0").read_text().split()
    assert len(apart) >= 6 and set(apart) == {"0.0"}


#: As many repositories do: the loader runs in a thread, some batches ahead.
AHEAD = """
import queue, sys, threading, torch, torch.nn as nn
torch.manual_seed(0)
data = torch.utils.data.TensorDataset(torch.arange(4000.0).reshape(-1, 4))
def ahead(loader):
    batches = queue.Queue(4)
    threading.Thread(target=lambda: [batches.put(batch) for batch in loader], daemon=True).start()
    while True: yield batches.get()
net = nn.Linear(4, 1)
optimizer = torch.optim.SGD(net.parameters(), lr=1e-6)
loader = torch.utils.data.DataLoader(data, batch_size=4)
while True:
    for (x,) in ahead(loader) if "ahead" in sys.argv else loader:
        net(x).square().mean().backward(); optimizer.step(); optimizer.zero_grad()
"""


def test_batches_that_a_thread_takes_ahead_are_not_those_of_an_update(script, start, tmp_path: Path) -> None:
    """How many that are changes with the speed of a step: what made it faster was "computed from other data"."""
    def digests(*arguments: str) -> list[str]:
        folder = tmp_path / "-".join(["recorded", *arguments])
        folder.mkdir()
        capture = {"folder": str(folder), "updates": 8, "seed": 20, "aligned": False, "perturb": None}
        start(str(script(AHEAD)), *arguments, capture=capture, step={"token": "S0", "count": 1, "tokens": ["B", "S0"]}).wait_ready()
        return list(series.read(folder).digests)

    assert all(digests()) and set(digests("ahead")) == {""}


#: Adjustments of a ten-millionth in numbers of millions; with an argument, beside a tensor in float32.
FINE = """
import sys, torch
orbit = torch.full((4,), 7e6, dtype=torch.float64, requires_grad=True)
held = [orbit, *(torch.ones(2, requires_grad=True) for _ in sys.argv[1:])]
optimizer = torch.optim.SGD(held, lr=1e-7)
while True:
    sum(p.sum() for p in held).backward()
    optimizer.step(); optimizer.zero_grad()
"""


@pytest.mark.parametrize(("others", "precision"), [([], "float64"), (["float32"], "float32")], ids=["alone", "beside float32"])
def test_what_moves_by_less_than_float32_tells_is_seen_to_move(others, precision, script, start, tmp_path: Path) -> None:
    """Recorded in float32 it stood still, and the training could not be verified."""
    folder = tmp_path / "recorded"
    folder.mkdir()
    capture = {"folder": str(folder), "updates": 8, "seed": 20, "aligned": False, "perturb": None}
    start(str(script(FINE)), *others, capture=capture, step={"token": "S0", "count": 1, "tokens": ["B", "S0"]}).wait_ready()
    found = series.read(folder)
    assert len({tuple(sample) for sample in found.samples}) == 8
    assert found.precision == precision


#: A normalisation, a cache that grows, and a mask; with an argument, the statistics stand still.
BUFFERS = """
import sys, torch, torch.nn as nn
torch.manual_seed(0)
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.out = nn.BatchNorm1d(4, momentum=0.0 if "still" in sys.argv else 0.1), nn.Linear(4, 1)
        if "script" in sys.argv:
            self.norm = torch.jit.script(self.norm)
        self.register_buffer("mask", torch.full((3,), float("-inf")))
        self.register_buffer("cache", torch.zeros(1))
        self.register_buffer("nothing", None)
    def forward(self, x):
        self.cache = torch.cat([self.cache, self.cache.new_ones(1)])
        return self.out(self.norm(x))
net = Net()
optimizer = torch.optim.SGD(net.parameters(), lr=1e-3)
while True:
    net(3 + torch.randn(8, 4)).square().mean().backward()
    optimizer.step(); optimizer.zero_grad()
"""


def test_the_buffers_of_what_is_trained_are_recorded(script, start, tmp_path: Path) -> None:
    def recorded(*arguments: str) -> series.Series:
        folder = tmp_path / "-".join(["recorded", *arguments])
        folder.mkdir()
        capture = {"folder": str(folder), "updates": 8, "seed": 20, "aligned": False, "perturb": None}
        start(str(script(BUFFERS)), *arguments, capture=capture, step={"token": "S0", "count": 1, "tokens": ["B", "S0"]}).wait_ready()
        return series.read(folder)

    moving, still = recorded(), recorded("still")
    assert moving.segments == still.segments == [4, 4, 4, 1] and moving.losses == still.losses and moving.samples == still.samples
    assert moving.statistics_segments == [3, 2, 4, 4]           # mask, cache (as it was after the first update), mean, variance
    assert len({tuple(row[5:]) for row in moving.statistics}) == 8 and len({tuple(row[5:]) for row in still.statistics}) == 1
    assert all(map(math.isnan, moving.statistics[-1][3:5]))     # another size: not compared
    scripted = recorded("script")                               # TorchScript
    assert scripted.losses == moving.losses and [row[-8:] for row in scripted.statistics] == [row[-8:] for row in moving.statistics]


SCHEDULED = """
import torch
torch.manual_seed(0)
net = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 1))
groups = [{"params": [p for p in net.parameters() if p.dim() > 1]}, {"params": [p for p in net.parameters() if p.dim() < 2], "weight_decay": 0.0}]
optimizer = torch.optim.AdamW(groups, lr=torch.tensor(0.5), weight_decay=0.25)
scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
while True:
    net(torch.randn(8, 4)).square().mean().backward()
    optimizer.step(); optimizer.zero_grad(); scheduler.step()
"""


def test_what_optimizers_are_set_to_is_recorded_by_tensor(script, start, tmp_path: Path) -> None:
    capture = {"folder": str(tmp_path), "updates": 4, "seed": 20, "aligned": False, "perturb": None}
    start(str(script(SCHEDULED)), capture=capture, step={"token": "S0", "count": 1, "tokens": ["B", "S0"]}).wait_ready()
    found = series.read(tmp_path)
    matrices, biases = ([dict(dict(zip(found.dimensions, row))[dims]) for row in found.settings] for dims in (2, 1))
    assert [(one["lr"], one["weight_decay"]) for one in matrices] == [(0.5 * 0.5**k, 0.25) for k in range(4)]
    assert {(one["weight_decay"], one["betas"]) for one in biases} == {(0.0, (0.9, 0.999))} and "momentum" not in biases[0]
    assert sorted(found.dimensions) == [1, 1, 2, 2]


#: As a technique does that steps an optimizer of its own: the user's goes on holding the same tensors, and is what the script schedules.
SWAPPED = """
import torch
torch.manual_seed(0)
net = torch.nn.Linear(4, 1)
optimizer = torch.optim.AdamW(net.parameters(), lr=0.5)
scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
steps = optimizer
while True:
    net(torch.randn(8, 4)).square().mean().backward()
    steps.step(); steps.zero_grad(); scheduler.step()
    if scheduler.last_epoch == 2:
        steps = torch.optim.AdamW([{**group} for group in optimizer.param_groups])
"""


def test_what_is_recorded_is_what_the_optimizer_is_set_to_that_steps(script, start, tmp_path: Path) -> None:
    """Each tensor had two holders, so that nothing was recorded: a technique that had lost the schedule in this way verified."""
    capture = {"folder": str(tmp_path), "updates": 5, "seed": 20, "aligned": False, "perturb": None}
    start(str(script(SWAPPED)), capture=capture, step={"token": "S0", "count": 1, "tokens": ["B", "S0"]}).wait_ready()
    rates = [[dict(one)["lr"] if one else None for one in row] for row in series.read(tmp_path).settings]
    assert rates == [[rate, rate] for rate in (0.5, 0.25, 0.125, 0.125, 0.125)]


def test_groups_that_a_wrapper_shares_with_its_optimizer_are_one() -> None:
    """Sharpness-aware minimisation, and looking ahead: both step."""
    weight, other = object(), object()
    one, two = {"params": [weight], "lr": 0.1}, {"params": [weight, other], "lr": 0.2}
    held = [SimpleNamespace(param_groups=groups) for groups in ([one], [one], [two])]
    assert settings.of_parameters(held[:2], [weight]) == {"sets": [{"lr": 0.1}], "of": [0]}
    assert settings.of_parameters(held, [weight, other])["of"] == [-1, 1]
