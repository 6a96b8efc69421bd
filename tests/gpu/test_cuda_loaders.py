"""Techniques that act on copies and on loaders, on a CUDA device: they last beyond the watched step, and a second loader that already
moves its batches to the device goes on. And the attention kernel that is asked for runs in eager mode."""

from __future__ import annotations

import subprocess
import sys

import msgspec
import pytest

from saturate.records.facts import Evidence
from saturate.study.candidates import Candidate
from saturate.techniques import _registry

pytestmark = pytest.mark.gpu

LOADERS = """
import torch, torch.nn as nn
from torch.utils.data import DataLoader, TensorDataset
def moved(rows):
    return [torch.stack(column).to("cuda") for column in zip(*rows)]
if __name__ == "__main__":
    torch.manual_seed(0)
    rows = TensorDataset(torch.randn(512, 3, 64, 64), torch.randint(10, (512,)))
    model = nn.Sequential(nn.Conv2d(3, 16, 3), nn.ReLU(), nn.Flatten(), nn.Linear(16 * 62 * 62, 10)).cuda()
    opt = torch.optim.SGD(model.parameters(), lr=1e-3)
    training, checking = DataLoader(rows, batch_size=64, num_workers={workers}), DataLoader(rows, batch_size=64, collate_fn=moved)
    while True:
        for x, y in training:
            opt.zero_grad(); nn.functional.cross_entropy(model(x.to("cuda")), y.to("cuda")).backward(); opt.step()
        with torch.no_grad():
            for x, y in checking:
                assert x.is_cuda and model(x).isfinite().all()
"""

ATTENTION = """
import torch, torch.nn as nn
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.qkv, self.out = nn.Linear(256, 768), nn.Linear(256, 256)
    def forward(self, x):
        q, k, v = self.qkv(x).unflatten(-1, (3, 4, 64)).permute(2, 0, 3, 1, 4)
        return self.out(nn.functional.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)).square().mean()
model = Net().to("cuda", torch.bfloat16)
opt = torch.optim.SGD(model.parameters(), lr=1e-3)
while True:
    opt.zero_grad(); model(torch.randn(8, 512, 256, device="cuda", dtype=torch.bfloat16)).backward(); opt.step()
"""


@pytest.fixture(scope="module", autouse=True)
def device():
    probe = subprocess.run([sys.executable, "-c", "import torch; print(torch.cuda.is_available())"], capture_output=True, text=True)
    if probe.stdout.strip() != "True":
        pytest.skip("no CUDA device")


def proof_of(start, path, identity, **options):
    module = _registry.load()[identity]
    trial = start(str(path), timeout_s=240.0, techniques=[Candidate(module, module.Options(**options)).chosen()])
    assert trial.wait_ready()["applied"] == [{"id": identity, "problem": ""}]
    trial.run_block(20, 10)
    return module.active(msgspec.convert(trial.ask("evidence"), Evidence), module.Options(**options))


@pytest.mark.parametrize("identity, workers", [("pin-memory", 0), ("pin-memory", 2), ("device-prefetch", 2), ("loader-workers", 0)])
def test_a_second_loader_on_the_device_goes_on(identity, workers, script, start):
    proof = proof_of(start, script(LOADERS.replace("{workers}", str(workers))), identity)
    assert proof.active, proof.evidence


@pytest.mark.parametrize("backend", ["flash", "cudnn", "efficient"])
def test_the_attention_kernel_that_is_asked_for_runs(backend, script, start):
    proof = proof_of(start, script(ATTENTION), "sdpa-backend", backend=backend)
    assert proof.active, proof.evidence


def test_a_script_that_copies_without_blocking_itself(script, start):
    """Its batches were not pinned, so its copies waited; with the technique they do not, which is what it is for."""
    asked = LOADERS.replace("{workers}", "2").replace('.to("cuda")', '.to("cuda", non_blocking=True)')
    proof = proof_of(start, script(asked), "pin-memory")
    assert proof.active, proof.evidence
