"""FLOPs of a step against closed form; measured ceilings are positive and change nothing."""

from __future__ import annotations


def test_flops_of_a_step_match_closed_form(script, start):
    source = """
    import torch, torch.nn as nn
    model = nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 8))
    opt = torch.optim.SGD(model.parameters(), lr=1e-3)
    x = torch.randn(16, 32)
    while True:
        opt.zero_grad(); model(x).pow(2).mean().backward(); opt.step()
    """
    trial = start(str(script(source)))
    trial.wait_ready()
    first, second = 2 * 16 * 32 * 64, 2 * 16 * 64 * 8
    # Forward, gradient of the weights, and gradient of the input of the second layer only.
    assert trial.ask("facts")["flops_per_step"] == 2 * first + 3 * second


def test_ceilings_are_measured_and_leave_the_random_numbers_alone(script, start):
    import torch

    from saturate.agent import ceilings

    state = torch.get_rng_state()
    rates = ceilings.measure(torch, "cpu")
    assert torch.equal(state, torch.get_rng_state())
    assert set(rates) == {"float32", "bfloat16", "copy"}
    assert all(rate > 1e8 for rate in rates.values())
