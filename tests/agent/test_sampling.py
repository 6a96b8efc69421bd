"""What the window without a profiler clocks, and which lines it names."""

from __future__ import annotations

import io
import os
import sysconfig
from types import SimpleNamespace

import pytest

torch = pytest.importorskip("torch")

from saturate.agent import sampling  # noqa: E402
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


class Worker:
    """A process that computed for so long until now, waited for a core, and read so many bytes."""

    def __init__(self, pid, used_ns=0, queued_ns=0, read=0, alive=True):
        self.pid, self.schedule, self.read, self.alive = pid, (used_ns, queued_ns), read, alive

    def is_alive(self):
        return self.alive


@pytest.fixture
def workers(ticks, watched, monkeypatch):
    """Ends the window at 1000, with these workers known when it began."""
    known = {}
    monkeypatch.setattr(sampling, "schedule", lambda pid: known[pid].schedule)
    monkeypatch.setattr(sampling, "read_bytes", lambda pid: known[pid].read if pid in known else 7)
    monkeypatch.setattr(sampling.kinds, "memory", lambda session: {})
    monkeypatch.setattr(watched.window, "_watch_parts", lambda: None)      # they are watched already

    def run(before, meets):
        watched.session.loaders = {"any": {"workers": before}}
        known.update({worker.pid: worker for worker in before})
        ticks.now = 0
        watched.window.begin()
        for at, feeding in meets:
            ticks.now = at
            watched.window._meet(feeding)
            known.update({worker.pid: worker for worker in feeding})
            for worker in feeding:
                worker.schedule, worker.read = (worker.schedule[0] + 80, worker.schedule[1] + 10), worker.read + 5
        ticks.now = 1000
        watched.window.finish()
        return watched.window.result

    return run


def test_workers_of_an_evaluation_are_none_of_the_trainings(workers):
    """Seen: two that computed for 80 % of their time, beside two persistent ones of a validation: "waits for storage"."""
    training, validation = [Worker(1, 500), Worker(2, 500)], [Worker(3, 900), Worker(4, 900)]
    found = workers([*training, *validation], [(10, training)])
    assert (found["workers"], found["worker_cpu_ns"], found["worker_queued_ns"], found["worker_ns"]) == (2, 160, 20, 2000)
    assert found["read_bytes"] == 10


def test_workers_that_begin_with_an_epoch_have_their_own_time(workers):
    """Those of the epoch before are gone, and what they computed with them; nobody knows what they read."""
    old, new = Worker(1, 10**9, read=10**9), Worker(2)

    class Pass(list):
        def __iter__(self):         # the pass before has ended
            old.alive = False
            return super().__iter__()

    found = workers([old], [(0, [old]), (900, Pass([new]))])
    assert (found["workers"], found["worker_cpu_ns"], found["worker_queued_ns"], found["worker_ns"]) == (1, 80, 10, 100)
    assert found["read_bytes"] is None


@pytest.mark.parametrize(("text", "idle"), [
    ("cpu  9 9 9 130 20\ncpu0 1 0 2 100 20 0\ncpu2 1 0 2 30 0 0\nintr 5\n", {0: 1_200_000_000, 2: 300_000_000}),
    ("cpu 0 0 0 0 0\ncpu0 0 0 0 0 0 0\n", {}),
])
def test_processors_tell_how_long_they_were_idle(monkeypatch, text, idle):
    monkeypatch.setattr(sampling.os, "sysconf", lambda name: 100)
    monkeypatch.setattr("builtins.open", lambda *args, **kwargs: io.StringIO(text))
    assert sampling.idle_ns() == idle


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
