"""Aligned verification runs have no dropout, and draw the same random numbers compiled or not."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys

import pytest

SOURCE = """
import sys, torch
if sys.argv[1] == "aligned":
    from saturate.agent import randomness
    randomness.align(torch, 20)
torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.Dropout(0.5), torch.nn.Linear(16, 1))
x = torch.randn(4, 8)
expected = model.eval()(x)
model.train()
step = torch.compile(model) if sys.argv[2] == "compiled" else model
output = step(x)
output.sum().backward()     # the compiler files a graph when its backward pass is known
print(torch.allclose(output, expected, atol=1e-6))
"""


def without_dropout(script, cache, alignment: str, how: str) -> str:
    environment = {**os.environ, "TORCHINDUCTOR_CACHE_DIR": str(cache)}
    command = [sys.executable, str(script(SOURCE)), alignment, how]
    return subprocess.run(command, env=environment, check=True, capture_output=True, text=True, timeout=300).stdout.strip()


def test_aligned_runs_have_no_dropout(script, tmp_path):
    assert without_dropout(script, tmp_path / "cache", "ordinary", "eager") == "False"
    assert without_dropout(script, tmp_path / "cache", "aligned", "eager") == "True"


SCRIPTED = """
import torch, torch.nn.functional as F
from saturate.agent import randomness
randomness.align(torch, 20)

@torch.jit.script
def bias_dropout_add(x: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
    return F.dropout(x + bias, p=0.9, training=True)

@torch.jit.script
def attention(q: torch.Tensor) -> torch.Tensor:
    return F.scaled_dot_product_attention(q, q, q, is_causal=True)

x, y = torch.randn(4, 4), torch.randn(2, 3, 8)
layer = torch.jit.script(torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Dropout(0.9)))
heads = torch.jit.script(torch.nn.MultiheadAttention(8, 2, dropout=0.9, batch_first=True))
print(torch.equal(bias_dropout_add(x, x), x + x), torch.equal(layer(x), layer(x)), torch.equal(heads(y, y, y)[0], heads(y, y, y)[0]),
      attention(y.unsqueeze(0)).isfinite().all().item(), torch.equal(F.dropout(x, 0.9), x))
"""


@pytest.mark.filterwarnings("ignore")
def test_what_torchscript_compiles_has_no_dropout_either(script):
    """It reads the source of what is called: aligned runs of scripts with fused kernels of their own ended there."""
    done = subprocess.run([sys.executable, "-W", "ignore", str(script(SCRIPTED))], capture_output=True, text=True, timeout=120)
    assert done.stdout.split() == ["True"] * 5, done.stderr


@pytest.mark.skipif(shutil.which("g++") is None, reason="compiling for a CPU needs g++")
def test_an_aligned_run_gets_no_compiled_dropout_from_the_cache_of_an_ordinary_one(script, tmp_path):
    """Seen on a public REINFORCE script: torch.compile was rejected because its aligned run had dropout."""
    assert without_dropout(script, tmp_path / "cache", "ordinary", "compiled") == "False"
    assert without_dropout(script, tmp_path / "cache", "aligned", "compiled") == "True"


DRAWING = """
import sys, threading, torch
from saturate.agent import randomness
randomness.align(torch, 20)
assert "torch._inductor.config" not in sys.modules       # nobody has compiled yet
torch.manual_seed(0)
linear = torch.nn.Linear(16, 16)
x = torch.randn(32, 16)

def stochastic_depth(x):
    return x + linear(x) * torch.rand(len(x), 1).add(0.8).floor()

def noise(x):
    return linear(x) + 0.1 * torch.randn_like(x) + torch.zeros_like(x).uniform_(-1, 1)

def same(function):
    results = []
    for step in (function, torch.compile(function)):
        torch.manual_seed(1)
        results.append(step(x))
    return torch.allclose(*results, atol=1e-5)

seen = [same(stochastic_depth), same(noise)]
torch._dynamo.reset()
thread = threading.Thread(target=lambda: seen.append(same(noise)))
thread.start()
thread.join()
print(seen)
"""


@pytest.mark.skipif(shutil.which("g++") is None, reason="compiling for a CPU needs g++")
def test_compiled_code_draws_what_eager_code_draws_in_aligned_runs(script):
    """Stochastic depth and noise are no dropout: a model with them was taken for another training once it was compiled."""
    seen = subprocess.run([sys.executable, str(script(DRAWING))], check=True, capture_output=True, text=True, timeout=300).stdout
    assert seen.strip() == "[True, True, True]"


FETCHING = """
import sys, torch
from saturate.agent import randomness
randomness.align(torch, 20)
devices = []
torch.cuda.manual_seed_all = devices.append     # where noise is drawn on a device, between two batches

class Noisy(torch.utils.data.Dataset):
    def __len__(self): return 8
    def __getitem__(self, index): return index + torch.rand(())

torch.manual_seed(0)
seeded = len(devices)
loader = torch.utils.data.DataLoader(Noisy(), batch_size=4, num_workers=int(sys.argv[1]))
samples = [batch.tolist() for batch in loader]
print(len(devices) - seeded, samples)
"""


def test_seeding_a_batch_leaves_the_generators_of_devices_alone(script):
    """Without workers noise on the device was drawn anew from the same seed after each batch, and with workers not."""
    path = str(script(FETCHING))
    alone, with_workers = (subprocess.run([sys.executable, path, workers], check=True, capture_output=True, text=True, timeout=120).stdout
                           for workers in "02")
    assert alone == with_workers and alone.startswith("0 ")


GENERATORS = """
import sys, numpy, torch
from saturate.agent import randomness
offset = int(sys.argv[1])
randomness.seed_numpy(numpy, 20, offset)
randomness.seed_torch(torch, 20, offset)
made = [numpy.random.default_rng().random() for _ in range(2)]
given = numpy.random.default_rng(7).random(), numpy.random.default_rng(numpy.random.default_rng(7)).random()
torch.random.manual_seed(0)
print(made, *given, torch.rand(()).item(), torch.manual_seed(0).initial_seed())
"""


def test_generators_without_a_seed_are_seeded_and_those_with_one_moved(script):
    """`numpy.random.default_rng()` made the batches: the script "does not repeat itself". And `torch.random.manual_seed` kept its
    seed whatever seed was asked for, so that five runs had one."""
    path = str(script(GENERATORS))
    run = lambda offset: subprocess.run([sys.executable, path, offset], check=True, capture_output=True, text=True, timeout=120).stdout  # noqa: E731
    plain, other = run("0"), run("1")
    assert plain == run("0")
    assert all(a != b for a, b in zip(plain.replace(",", "").split(), other.replace(",", "").split()))
    assert other.split()[-1] == "1" and plain.split()[0].strip("[,") != plain.split()[1].strip("],")
