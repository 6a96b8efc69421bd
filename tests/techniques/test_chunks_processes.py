"""Chunked batches in processes of their own: memory that really runs out under `saturate run`, and two ranks."""

from __future__ import annotations

import ast
import re
import socket
import subprocess
import sys

import pytest

from saturate.records import recipe as recipes

pytest.importorskip("torch")

SATURATE = [sys.executable, "-m", "saturate"]

#: Every other batch from the sixth on is twelve times as large; the process's data is then limited to `sys.argv[1]` MiB more.
GREEDY = """
import resource, sys, torch
torch.manual_seed(0)

class Deep(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = torch.nn.ModuleList(torch.nn.Linear(64, 64) for _ in range(24))

    def forward(self, x):
        for layer in self.layers:
            x = x + torch.tanh(layer(x))
        return x

def data_bytes():
    with open("/proc/self/status") as file:
        return next(int(line.split()[1]) * 1024 for line in file if line.startswith("VmData"))

model = Deep()
optimizer = torch.optim.SGD(model.parameters(), 1e-2)
losses = []
for step in range(10):
    if step == 5:
        resource.setrlimit(resource.RLIMIT_DATA, (data_bytes() + int(sys.argv[1]) * 2**20,) * 2)
    samples = 12000 if step > 5 and step % 2 == 0 else 1000
    x = torch.randn(samples, 64, generator=torch.Generator().manual_seed(step))
    optimizer.zero_grad()
    loss = model(x).square().mean()
    loss.backward()
    optimizer.step()
    losses.append(loss.item())
    del loss
print(losses)
"""


@pytest.fixture
def run(tmp_path, script, clean_environment):
    """Run a script, under `saturate run` with these techniques or plainly."""

    def start(source, *arguments, techniques=()):
        command = [sys.executable, str(script(source)), *map(str, arguments)]
        if techniques:
            path = tmp_path / "recipe.toml"
            recipes.write(path, recipes.Recipe(techniques=[
                recipes.Entry(id=identity, options=options) for identity, options in techniques]))
            command = [*SATURATE, "run", str(path), "--", *command]
        return subprocess.run(command, capture_output=True, text=True, timeout=240, env=clean_environment, cwd=tmp_path)

    return start


def test_a_run_survives_memory_that_really_runs_out(run):
    """The limit is the kernel's, and the error that of torch's own allocator."""
    roomy = run(GREEDY, 100_000)
    assert roomy.returncode == 0, roomy.stderr
    died = run(GREEDY, 120)
    assert died.returncode == 1 and "DefaultCPUAllocator: can't allocate memory" in died.stderr
    survived = run(GREEDY, 120, techniques=[("dynamic-batch", {})])
    assert survived.returncode == 0, survived.stderr
    assert numbers(survived.stdout) == pytest.approx(numbers(roomy.stdout), rel=1e-5)
    lines = [line for line in survived.stderr.splitlines() if line.startswith("saturate: dynamic-batch: Deep ran out of memory")]
    chunks = [int(re.search(r"in (\d+) chunks", line)[1]) for line in lines]
    assert chunks and chunks == sorted(set(chunks)), "one line for each change"


#: The batch is too large from the first step on: beside the activations there is no room for a loss over thousands of words.
WORDS = """
import resource, sys, torch, torch._dynamo, sympy, mpmath      # the modules that a look at a model needs are there before the limit
torch.manual_seed(0)

class Words(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = torch.nn.Embedding(8000, 64)
        self.layers = torch.nn.ModuleList(torch.nn.Sequential(
            torch.nn.Linear(64, 512), torch.nn.GELU(), torch.nn.Linear(512, 64)) for _ in range(24))
        self.head = torch.nn.Linear(64, 8000)

    def forward(self, x):
        x = self.embed(x)
        for layer in self.layers:
            x = x + layer(x)
        return self.head(x)

def data_bytes():
    with open("/proc/self/status") as file:
        return next(int(line.split()[1]) * 1024 for line in file if line.startswith("VmData"))

model = Words()
optimizer = torch.optim.SGD(model.parameters(), 1e-2)
resource.setrlimit(resource.RLIMIT_DATA, (data_bytes() + int(sys.argv[1]) * 2**20,) * 2)
losses = []
for step in range(3):
    x, y = torch.randint(8000, (2, 64, 32), generator=torch.Generator().manual_seed(step))
    optimizer.zero_grad()
    loss = torch.nn.functional.cross_entropy(model(x).view(-1, 8000), y.view(-1))
    loss.backward()
    optimizer.step()
    losses.append(loss.item())
print(losses)
"""


@pytest.mark.parametrize("limit", [pytest.param(342, id="in its forward", marks=pytest.mark.slow), pytest.param(390, id="in its backward")])
def test_a_run_survives_a_loss_that_really_runs_out(run, clean_environment, limit):
    clean_environment["MALLOC_MMAP_THRESHOLD_"] = "65536"       # what is given back is the kernel's again
    roomy = run(WORDS, 100_000)
    assert roomy.returncode == 0, roomy.stderr
    died = run(WORDS, limit)
    assert died.returncode == 1 and "DefaultCPUAllocator: can't allocate memory" in died.stderr
    survived = run(WORDS, limit, techniques=[("dynamic-batch", {})])
    assert survived.returncode == 0, survived.stderr
    assert numbers(survived.stdout) == pytest.approx(numbers(roomy.stdout), rel=1e-5)
    assert "Words ran out of memory; batches of this size run in 2 chunks" in survived.stderr


def numbers(text):
    return [float(number) for number in re.findall(r"\d+\.\d+", text)]


#: Two ranks with data and quotas of their own; rank 1 runs out of memory where rank 0 does not, and first in the backward of its loss.
RANKS = """
import sys, torch
import torch.distributed as dist
from chunk_models import Net, Quota
from saturate.agent.context import Context
from saturate.techniques import dynamic_batch, micro_batch

dist.init_process_group("gloo")
rank = dist.get_rank()

class Fails(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        if failing:
            failing.clear()
            raise torch.OutOfMemoryError("CUDA out of memory")
        return gradient

failing = set()
mean_squares = torch._C._nn.mse_loss
torch._C._nn.mse_loss = lambda *given: Fails.apply(mean_squares(*given))

def train(technique, options):
    torch.manual_seed(0)
    inner = Net(quota=Quota(seed=1)).double()
    del inner.unused
    model = torch.nn.parallel.DistributedDataParallel(inner, **options)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    generator = torch.Generator().manual_seed(rank)
    heard = []
    inner.head.weight.register_post_accumulate_grad_hook(lambda p: heard.append(1))
    context = Context(torch)
    context.modules, context.device = (inner,), "cpu"
    for update in range(12):
        if technique is not None and update == 2:
            technique.apply(context, technique.Options())
            failing.update(["loss"] if technique is dynamic_batch and rank == 1 else [])
        if technique is dynamic_batch and rank == 1 and update >= 3:
            inner.quota[0].limit = 3
        x = torch.randn(9 + (update >= 3), 6, generator=generator, dtype=torch.float64)
        optimizer.zero_grad()
        torch.nn.functional.mse_loss(model(x), torch.zeros(len(x), 3, dtype=torch.float64)).backward()
        optimizer.step()
    assert not failing
    sums = [float(p.detach().double().sum()) for p in inner.parameters()]
    return [*sums, len(heard), bool(inner.quota[0].failures), bool(context.notes)]

for options in ({}, {"static_graph": True}, {"find_unused_parameters": True}, {"gradient_as_bucket_view": True}):
    for technique in (None, dynamic_batch, micro_batch):
        print("RESULT", [rank, str(options), technique.TECHNIQUE.id if technique else "", train(technique, options)], flush=True)
import time; time.sleep(0.5)      # gloo's threads let go of their last work a moment later; a process that ends before them is aborted (PyTorch #179291)
dist.destroy_process_group()
"""


def test_ranks_cut_their_batches_differently_and_agree(script, clean_environment, request):
    path = script(RANKS)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    environment = {**clean_environment, "PYTHONPATH": str(request.path.parent), "OMP_NUM_THREADS": "1",
                   "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": "2"}
    ranks = [subprocess.Popen([sys.executable, str(path)], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
                              env={**environment, "RANK": str(rank)}) for rank in range(2)]
    ended = [process.communicate(timeout=240) for process in ranks]
    assert [process.returncode for process in ranks] == [0, 0], "\n".join(
        f"rank {rank}: {out.count('RESULT')} results; {err[-3000:]}" for rank, (out, err) in enumerate(ended))
    found = {}
    for out, _ in ended:
        for line in out.splitlines():
            if line.startswith("RESULT "):
                rank, options, technique, values = ast.literal_eval(line.removeprefix("RESULT "))
                found[rank, options, technique] = values
    assert len(found) == 24
    for (rank, options, technique), values in found.items():
        *sums, heard, failed, noted = values
        assert sums == found[0, options, technique][:-3], "the ranks drifted apart"
        assert sums == pytest.approx(found[0, options, ""][:-3], rel=1e-12), (options, technique)
        assert heard == 12, "a hook saw a gradient more or less than once a step"
        assert failed == (rank == 1 and technique == "dynamic-batch")
        assert noted == bool(technique), ended
    assert "dynamic-batch (rank 1): Net ran out of memory" in ended[1][1]
    assert "ran out" not in ended[0][1]
