"""Chunked batches on a real device: its allocator runs out, and the training goes on. Needs a CUDA GPU."""

from __future__ import annotations

import copy
import gc

import pytest

torch = pytest.importorskip("torch")

from saturate.agent.context import Context  # noqa: E402 - after the import that decides whether to run at all
from saturate.techniques import dynamic_batch, micro_batch  # noqa: E402

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")]


class Deep(torch.nn.Module):
    def __init__(self, dropout=0.0):
        super().__init__()
        self.layers = torch.nn.ModuleList(torch.nn.Linear(512, 512) for _ in range(24))
        self.dropout = dropout

    def forward(self, x):
        for layer in self.layers:
            x = x + torch.nn.functional.dropout(torch.tanh(layer(x)), self.dropout, self.training)
        return x


def train(model, technique=None, options=None, sizes=(2000, 2000, 2000, 24000, 4000, 24000)):
    model.cuda().double().train()
    optimizer = torch.optim.SGD(model.parameters(), 1e-2)
    context = Context(torch)
    context.modules, context.device = (model,), "cuda"
    if technique is not None:
        technique.apply(context, options or technique.Options())
    losses = []
    for step, samples in enumerate(sizes):
        x = torch.randn(samples, 512, generator=torch.Generator().manual_seed(step), dtype=torch.float64).cuda()
        optimizer.zero_grad()
        loss = model(x).square().mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
        del loss
    return losses, context


@pytest.fixture
def small_device():
    """Room for the model and small batches; the large ones need about 5 GiB of activations."""
    total = torch.cuda.get_device_properties().total_memory
    torch.cuda.empty_cache()
    torch.cuda.set_per_process_memory_fraction(min(1.0, 2.5 * 2**30 / total))
    yield
    torch.cuda.set_per_process_memory_fraction(1.0)
    torch.cuda.empty_cache()


def test_the_allocator_runs_out_and_the_training_goes_on(request, capfd):
    torch.manual_seed(0)
    plain = Deep()
    tuned = copy.deepcopy(plain)
    expected, _ = train(plain)
    del plain
    request.getfixturevalue("small_device")
    with pytest.raises(torch.cuda.OutOfMemoryError):
        train(copy.deepcopy(tuned))
    torch.cuda.empty_cache()
    losses, _ = train(tuned, dynamic_batch)
    assert losses == pytest.approx(expected, rel=1e-10)
    assert "ran out of memory" in capfd.readouterr().err


def test_activations_wait_in_host_memory_where_random_numbers_forbid_a_cut(small_device, monkeypatch):
    """With dropout, a backward that runs out is run again with what it needs kept on the host."""
    model = Deep(dropout=0.1)
    losses, context = train(model, dynamic_batch, sizes=(500, 500, 6500, 500))
    assert all(loss == loss for loss in losses) and "dynamic-batch" in context.notes


@pytest.mark.parametrize("autocast", [False, True])
def test_micro_batches_hold_less(autocast):
    peaks, gradients = [], []
    for technique in (None, micro_batch):
        gc.collect()
        torch.manual_seed(0)
        model = Deep().cuda().train()
        context = Context(torch)
        context.modules, context.device = (model,), "cuda"
        if technique is not None:
            technique.apply(context, technique.Options(chunks=8))
        x = torch.randn(16000, 512, generator=torch.Generator().manual_seed(1)).cuda()
        steps = []
        for _ in range(6):          # the first is watched, and those after 0, 1, 2 and 4 others are run whole as well, to be compared
            torch.cuda.reset_peak_memory_stats()
            model.zero_grad()
            with torch.autocast("cuda", torch.bfloat16, enabled=autocast):
                loss = model(x).float().square().mean()
            loss.backward()
            steps.append(torch.cuda.max_memory_allocated())
        peaks.append(min(steps[1:]))
        gradients.append(torch.cat([p.grad.flatten() for p in model.parameters()]))
        assert technique is None or "micro-batch" in context.notes
    assert peaks[1] < 0.5 * peaks[0]
    assert float((gradients[0] - gradients[1]).norm() / gradients[0].norm()) < (5e-2 if autocast else 5e-3)


@pytest.mark.parametrize("technique", [micro_batch, dynamic_batch])
def test_a_step_that_the_script_captures_is_captured(technique, capfd):
    """In a capture no generator's state can be read: the call runs as it was written."""
    model = Deep().cuda().train()
    context = Context(torch)
    context.modules, context.device = (model,), "cuda"
    technique.apply(context, technique.Options())
    x, aside, graph = torch.randn(64, 512, device="cuda"), torch.cuda.Stream(), torch.cuda.CUDAGraph()
    aside.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(aside):
        for _ in range(3):
            model.zero_grad()
            model(x).square().mean().backward()
    torch.cuda.current_stream().wait_stream(aside)
    wanted = [p.grad.clone() for p in model.parameters()]
    model.zero_grad()
    with torch.cuda.graph(graph):
        model(x).square().mean().backward()
    graph.replay()
    assert all(torch.allclose(p.grad, gradient, rtol=1e-3, atol=1e-6) for p, gradient in zip(model.parameters(), wanted))
    assert capfd.readouterr().err.count("while the script captures a CUDA graph") == 1
    context.undo()
