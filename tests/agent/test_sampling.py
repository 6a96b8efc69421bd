"""What the window without a profiler clocks, and which lines it names."""

from __future__ import annotations

import os
import sysconfig
from types import SimpleNamespace

import pytest

torch = pytest.importorskip("torch")

from saturate.agent.sampling import Sampler, Sampling  # noqa: E402


@pytest.fixture
def watched(ticks):
    """A window whose clock runs, and a training whose forward pass takes 100 of its ticks and whose backward pass 200."""
    class Passes(torch.autograd.Function):
        @staticmethod
        def forward(ctx, value):
            ticks.now += 100
            return value * 2

        @staticmethod
        def backward(ctx, gradient):
            ticks.now += 200
            return gradient * 2

    class Net(torch.nn.Linear):
        def forward(self, value):
            return Passes.apply(super().forward(value))

    model = Net(2, 1)
    optimizer = torch.optim.SGD(model.parameters())
    session = SimpleNamespace(
        torch=torch, clock=ticks, context=SimpleNamespace(device="cpu", modules=(model,)), inspection=SimpleNamespace(compiled=False),
        optimizers=SimpleNamespace(living=lambda: [optimizer]), step_begins=lambda one: None, step_ends=lambda one: None, evaluated=False)
    window = Sampling(session, {"kind": "sample", "skip": 0, "steps": 4})
    window._watch_parts()
    window.parts.start()
    yield SimpleNamespace(window=window, session=session, model=model, optimizer=optimizer)
    while window._undo:
        window._undo.pop()()


def test_a_closure_inside_of_a_step_is_not_the_optimizer(ticks, watched):
    """As `trace.phases` says it of the recording. An update of LBFGS between two evaluations is lost to the loss."""
    def closure():
        ticks.now += 10                     # hooks
        watched.optimizer.zero_grad()
        loss = watched.model(torch.ones(2)).sum()
        ticks.now += 30                     # the loss
        loss.backward()
        ticks.now += 5                      # clipping

    for evaluations in (1, 2, 0):
        ticks.now += 1
        watched.session.step_begins(watched.optimizer)
        for _ in range(evaluations):
            closure()
        ticks.now += 40                     # the update
        watched.session.step_ends(watched.optimizer)
        watched.window._lap()
    once, twice, never = (step.parts for step in watched.window.clocked)
    assert {name: ns for name, ns in once.items() if ns} == {"rest": 41, "forward": 100, "backward": 200, "optimizer": 45}
    assert {name: ns for name, ns in twice.items() if ns} == {"rest": 1 + 80 + 5, "forward": 200, "backward": 400, "optimizer": 45}
    assert {name: ns for name, ns in never.items() if ns} == {"rest": 1, "optimizer": 40}


LIBRARY = """
class Images:
    def __len__(self):
        return 4
    def __getitem__(self, index):
        look()
        return index

def fit(loader):
    for batch in loader:
        pass
"""


def test_the_line_that_starts_a_librarys_loop_is_not_what_makes_batches(watched):
    library = {}
    exec(compile(LIBRARY, os.path.join(sysconfig.get_paths()["purelib"], "library.py"), "exec"), library)
    watched.window._watch_loader()
    sampler = Sampler(torch, watched.window)
    library["look"] = sampler._look
    library["fit"](torch.utils.data.DataLoader(library["Images"]()))
    (found,) = sampler.result()["lines"]
    assert (os.path.basename(found[0]), *found[1:]) == ("library.py", 6, "__getitem__", 4)
