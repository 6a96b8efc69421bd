"""What measures times, or takes all of a CUDA device: run with nothing beside it. By `pytest -m gpu`, and by bench/gpu_evidence.py."""

from __future__ import annotations

import pytest
from test_cuda import LOOP

torch = pytest.importorskip("torch")
pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")]


def test_blocks_are_drained_and_facts_know_the_device(script, start):
    """A block must last as long as its kernels, not as long as it takes to launch them."""
    trial = start(str(script(LOOP)), timeout_s=120.0)
    trial.wait_ready()
    trial.run_block(5, 5)
    few, many = trial.run_block(1, 2), trial.run_block(1, 40)
    assert 0.3 < few.mean_ns / many.mean_ns < 3.0
    facts = trial.ask("facts")
    assert facts["device"] == "cuda" and facts["device_reserved_bytes"] > 0
    assert facts["host_to_device_bytes"] == 256 * 3 * 32 * 32 * 4 + 256 * 8
    assert 0 < facts["device_reserved_bytes"] < facts["device_room_bytes"] < facts["device_memory_bytes"]
    rates = trial.ask("ceilings")
    assert rates["bfloat16"] > rates["float32"] > 1e12 and rates["unknown"] == {}


def test_a_nearly_full_device_is_measured_with_what_is_free(script, start):
    """And the training goes on."""
    fill = "for n in range(10**9):\n    if n == 3: hold = torch.empty(torch.cuda.mem_get_info()[0] - (256 << 20), dtype=torch.uint8, device='cuda')"
    trial = start(str(script(LOOP.replace("while True:", fill))), timeout_s=120.0)
    trial.wait_ready()
    rates = trial.ask("ceilings")
    assert {*rates, *rates["unknown"]} == {"float32", "bfloat16", "copy", "unknown"}
    assert len(trial.run_block(1, 5).step_ns) == 5


def test_what_the_device_hides_is_no_part_of_a_step(script, start):
    """Each batch takes 20 ms on the host, and the device's work several times that. The host queues the work in no time, and a
    short block says what a long one says."""
    trial = start(str(script("""
        import time, torch, torch.nn as nn
        class Slow(torch.utils.data.Dataset):
            def __len__(self): return 1 << 20
            def __getitem__(self, i):
                time.sleep(0.02)
                return torch.zeros(1)
        model = nn.Linear(8192, 8192, bias=False).cuda()
        opt = torch.optim.SGD(model.parameters(), lr=1e-9)
        x = torch.randn(8192, 8192, device="cuda")
        for _ in torch.utils.data.DataLoader(Slow(), batch_size=1):
            y = x
            for _ in range(8):
                y = model(y) / 8192
            opt.zero_grad(); y.sum().backward(); opt.step()
    """)), timeout_s=120.0)
    trial.wait_ready()
    trial.run_block(5, 5)
    short, long = trial.run_block(1, 2), trial.run_block(3, 20)
    assert short.mean_ns == pytest.approx(long.mean_ns, rel=0.05) and long.mean_ns > 60e6
    assert max(long.timed_ns) < 1.2 * min(long.timed_ns), "and each step says it"
    parts = trial.run_block(3, 10, split=True).parts
    assert parts["input"] < 0.01 * 10 * long.mean_ns and parts["backward"] > 0.5 * 10 * long.mean_ns
