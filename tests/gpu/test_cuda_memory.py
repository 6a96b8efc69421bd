"""What of the memory techniques only a CUDA device can show. Run by `pytest -m gpu`; written without one."""

from __future__ import annotations

import subprocess
import sys

import pytest

from saturate.study.candidates import Candidate
from saturate.techniques import _registry
from saturate.trial.outcome import ran_out_of_memory
from saturate.trial.process import TrialEnded

pytestmark = pytest.mark.gpu

LOOP = """
import torch, torch.nn as nn
torch.manual_seed(0)
model = nn.Sequential(*(m for _ in range(16) for m in (nn.Linear(2048, 2048), nn.ReLU()))).cuda()     # 256 MiB
opt = torch.optim.AdamW(model.parameters(), lr=1e-4)
while True:
    x = torch.randn(256, 2048, device="cuda")
    opt.zero_grad(); (model(x) - x).square().mean().backward(); opt.step()
"""
STATE = 512 << 20


@pytest.fixture(scope="module", autouse=True)
def device():
    probe = subprocess.run([sys.executable, "-c", "import torch; print(torch.cuda.is_available())"], capture_output=True, text=True)
    if probe.stdout.strip() != "True":
        pytest.skip("no CUDA device")


def run(start, script, identity: str = "", **options):
    techniques = []
    if identity:
        module = _registry.load()[identity]
        techniques = [Candidate(module, module.Options(**options)).chosen()]
    trial = start(str(script(LOOP)), timeout_s=240.0, techniques=techniques)
    assert all(not entry["problem"] for entry in trial.wait_ready()["applied"])
    trial.run_block(2, 6)
    losses = trial.losses
    trial.stop()
    return trial.peak_bytes, losses


def test_state_at_rest_lowers_the_peak_from_the_first_step_on(start, script):
    plain, _ = run(start, script)
    eight, _ = run(start, script, "optimizer-8bit")
    offloaded, _ = run(start, script, "cpu-offload", what="optimizer")
    assert plain - eight > STATE // 2 and plain - offloaded > STATE // 2


def test_activations_in_host_memory(start, script):
    plain, _ = run(start, script)
    offloaded, _ = run(start, script, "cpu-offload", what="activations")
    assert offloaded < plain


def test_the_limit_holds_in_the_allocator(start, script):
    """A technique that does not fit runs out of memory as on a device of that size."""
    module = _registry.load()["gc-freeze"]
    trial = start(str(script(LOOP)), timeout_s=240.0, techniques=[Candidate(module, module.Options()).chosen()],
                  plan={"device_limit_bytes": 600 << 20})
    with pytest.raises(TrialEnded) as ended:
        trial.wait_ready()
    assert ran_out_of_memory(ended.value.outcome), ended.value.outcome     # be it where the agent looks at the step
