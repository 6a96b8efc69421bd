"""A script that names "cuda:1" and sets no device: what is asked of torch.cuda is asked of that one. A queue of launches is made up."""

from __future__ import annotations

import contextlib
import types

import pytest

torch = pytest.importorskip("torch")

from saturate.agent.context import Context  # noqa: E402 - after the check for torch
from saturate.techniques import _activations, _common, _memory_forecast  # noqa: E402

SECOND = torch.device("cuda", 1)


class Queue:
    """torch.cuda: the host launches one kernel in 10 units of time, and the device runs them one after the other. Events take no time."""

    LAUNCH = 10

    def __init__(self):
        self.host = self.device_free = 0
        self.asked = []

    def launch(self, took):
        self.host += self.LAUNCH
        self.device_free = max(self.device_free, self.host) + took

    def _sleep(self, cycles):
        self.asked.append("sleep")
        self.device_free = max(self.device_free, self.host) + cycles

    def device(self, device):
        self.asked.append(device)
        return contextlib.nullcontext()

    def current_stream(self, device):
        self.asked.append(device)
        return self

    def synchronize(self, device):
        self.asked.append(device)

    def Event(self, enable_timing):
        return Mark(self)

    def mem_get_info(self, device):
        self.asked.append(device)
        return 40, 100

    def memory_allocated(self, device):
        self.asked.append(device)
        return 10

    def memory_reserved(self, device):
        self.asked.append(device)
        return 30

    def max_memory_allocated(self, device):
        self.asked.append(device)
        return 20


class Mark:
    def __init__(self, queue):
        self.queue = queue

    def record(self, stream):
        assert stream is self.queue
        self.at = max(self.queue.host, self.queue.device_free)

    def elapsed_time(self, later):
        return (later.at - self.at) / 1e6


def torch_with(queue):
    return types.SimpleNamespace(**{**vars(torch), "cuda": queue})


def of_second(parameters):
    module = types.SimpleNamespace(parameters=lambda: parameters)
    return types.SimpleNamespace(modules=(module,), optimizers=(), device="cuda", torch=torch)


def test_the_device_of_a_training_has_a_number():
    host, device = types.SimpleNamespace(device=torch.device("cpu")), types.SimpleNamespace(device=SECOND)
    assert _common.device_of(of_second([host, device])) == SECOND
    by_optimizer = of_second([])
    by_optimizer.optimizers = (types.SimpleNamespace(param_groups=[{"params": [device]}]),)
    assert _common.device_of(by_optimizer) == SECOND
    assert _common.device_of(of_second([])) == torch.device("cuda")
    assert _common.device_of(Context(torch)) == torch.device("cpu")


def test_memory_and_time_are_those_of_the_device_of_the_training():
    queue = Queue()
    found = _memory_forecast.memory(torch_with(queue), SECOND)
    assert (found.used, found.peak, found.capacity) == (10, 20, 70)
    watch = _activations.Stopwatch(torch_with(queue), SECOND)
    watch.time(queue.launch, 7)
    assert watch.ns() == pytest.approx(17)
    assert set(queue.asked) == {SECOND}


def shares(busy):
    """Of a product that takes 20 on the device and twenty small operators that take 1 each: the time of the small ones."""
    queue = Queue()
    if busy:
        _activations.keep_busy(torch_with(queue), SECOND)
        assert queue.asked == [SECOND, "sleep"]
    products, others = (_activations.Stopwatch(torch_with(queue), SECOND) for _ in range(2))
    products.time(queue.launch, 20)
    for _ in range(20):
        others.time(queue.launch, 1)
    return others.ns() / (others.ns() + products.ns())


def test_operators_are_timed_by_their_kernels_and_not_by_their_launches():
    """Else small ones would cost so much that recomputing all of a block looks as cheap as keeping its products."""
    assert shares(busy=False) > 0.8
    assert shares(busy=True) == pytest.approx(0.5)


@pytest.mark.parametrize("device", [SECOND, torch.device("cpu")])
def test_a_forward_under_watch_keeps_a_cuda_device_busy(device):
    queue, trace = Queue(), _activations.Trace()
    _activations._watched_run(torch_with(queue), device, lambda: torch.ones(2) * 2, trace, _activations.Storages(torch))
    assert trace.operators > 0
    assert queue.asked[:2] == ([SECOND, "sleep"] if device is SECOND else [])
