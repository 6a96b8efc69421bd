"""device-prefetch, with a device made up on the CPU: what is copied when, what a script sees, and when a copy is refused."""

from __future__ import annotations

import contextlib
import dataclasses
import time
import types

import pytest

torch = pytest.importorskip("torch")

from torch.utils.data import DataLoader  # noqa: E402

from saturate.agent.context import Context  # noqa: E402
from saturate.data import device_copies  # noqa: E402
from saturate.records.facts import Evidence, Facts, LoaderFacts  # noqa: E402
from saturate.techniques import device_prefetch  # noqa: E402


class Device:
    """Copies by cloning, under the name of the device "cpu"; tells what happened."""

    def __init__(self):
        self.log = []
        self.capturing = False

    def begin(self, tensor, device):
        self.log.append(("begin", float(tensor.flatten()[0])))
        return tensor.clone(), len(self.log)

    def hand_over(self, copy, token):
        self.log.append(("wait", float(copy.flatten()[0])))

    def busy(self):
        return self.capturing


class Rows(torch.utils.data.Dataset):
    def __len__(self):
        return 8

    def __getitem__(self, index):
        return {"x": torch.full((3,), float(index)), "y": index}


@pytest.fixture
def prefetching(monkeypatch):
    """The technique on, with the made-up device; pinned memory is made up as well."""
    monkeypatch.setattr(torch.Tensor, "is_pinned", lambda self: True)
    context, device = Context(torch), Device()
    copies = device_copies.Copies(torch, device)
    device_prefetch.install(context, copies, kind="cpu")
    yield context, device, copies
    context.undo()
    assert "to" not in vars(torch.Tensor) and "cuda" not in vars(torch.Tensor)


def ready(iterator, monkeypatch_queue=None):
    """Wait until the next batch lies in the queue, as the thread that pins would leave it."""
    class Queue:
        def __init__(self, inner):
            self.inner = inner
            self.queue = []

        def get(self, timeout=None):
            return self.queue.pop(0) if self.queue else self.inner.get(timeout=timeout)

    if not hasattr(iterator._data_queue, "queue"):
        iterator._data_queue = Queue(iterator._data_queue)
    queue = iterator._data_queue
    deadline = time.monotonic() + 20
    while len(queue.queue) < min(2, iterator._tasks_outstanding) and time.monotonic() < deadline:
        queue.queue.append(queue.inner.get(timeout=20))


def epoch(iterator, step):
    out = []
    for _ in range(8):
        ready(iterator)
        out.append(step(next(iterator)))
    return out


def test_the_next_batch_is_begun_before_the_current_one_is_used(prefetching):
    _, device, copies = prefetching
    iterator = iter(DataLoader(Rows(), batch_size=1, num_workers=1))

    def step(batch):
        moved = batch["x"].to("cpu")
        device.log.append(("compute", float(moved[0, 0])))
        return float(moved[0, 0]), batch["x"].numpy()[0, 0], moved is batch["x"]

    seen = epoch(iterator, step)
    assert [value for value, _, _ in seen] == [host for _, host, _ in seen] == list(map(float, range(8)))
    assert [same for _, _, same in seen] == [True, True] + [False] * 6      # the first is moved, the second was fetched before that
    for number in range(2, 8):
        order = [device.log.index((what, float(number))) for what in ("begin", "wait", "compute")]
        assert order == sorted(order) and device.log.index(("begin", float(number))) < device.log.index(("compute", number - 1.0))
    assert copies.ahead == 6 and copies.moved == 8
    assert not any(begun for begun in device.log if begun[0] == "begin" and begun[1] != int(begun[1]))


def test_only_what_the_script_moves_is_copied(prefetching):
    _, device, copies = prefetching
    epoch(iter(DataLoader(Rows(), batch_size=1, num_workers=1)), lambda batch: batch["x"].to(torch.device("cpu")))
    assert {place for place in copies._moved} == {0}
    device.log.clear()
    epoch(iter(DataLoader(Rows(), batch_size=1, num_workers=1)), lambda batch: None)
    assert all(what == "begin" for what, _ in device.log)       # begun on a guess, never handed over
    assert len(copies._begun) <= 1                              # and not kept


@pytest.mark.parametrize("move", [
    lambda x: x.to("cpu", torch.float64), lambda x: x.to("cpu", copy=True), lambda x: x.to(torch.float16),
    lambda x: x.to("cpu", memory_format=torch.preserve_format), lambda x: x.to("meta"), lambda x: x.clone().to("cpu"),
])
def test_more_than_a_move_is_left_to_torch(prefetching, move):
    _, device, _ = prefetching
    iterator = iter(DataLoader(Rows(), batch_size=1, num_workers=1))
    expected = [move(torch.full((1, 3), float(index))) for index in range(8)]
    for wanted, got in zip(expected, epoch(iterator, lambda batch: move(batch["x"]))):
        assert got.dtype == wanted.dtype and got.device == wanted.device
    assert not device.log


@pytest.mark.parametrize("move", [
    lambda x: x.to("cpu", non_blocking=True), lambda x: x.to(device="cpu"), lambda x: x.to(torch.zeros(1)), lambda x: x.to(tensor=torch.zeros(1)),
    lambda x: x.to("cpu", torch.float32), lambda x: x.to(torch.device("cpu"), x.dtype, True),
])
def test_every_way_to_say_it(prefetching, move):
    _, device, copies = prefetching
    epoch(iter(DataLoader(Rows(), batch_size=1, num_workers=1)), lambda batch: move(batch["x"]))
    assert copies.ahead == 6


def test_a_batch_that_is_written_to_is_copied_anew(prefetching):
    _, _, copies = prefetching

    def step(batch):
        batch["x"].add_(100)
        return float(batch["x"].to("cpu")[0, 0])

    assert epoch(iter(DataLoader(Rows(), batch_size=1, num_workers=1)), step) == [100.0 + index for index in range(8)]
    assert copies.ahead == 0


def test_moved_twice_are_two_copies(prefetching):
    def step(batch):
        first, second = batch["x"].to("cpu"), batch["x"].to("cpu")
        return first is second

    assert epoch(iter(DataLoader(Rows(), batch_size=1, num_workers=1)), step)[2:] == [False] * 6


def test_nothing_is_handed_over_to_a_graph(prefetching):
    _, device, copies = prefetching
    device.capturing = True
    epoch(iter(DataLoader(Rows(), batch_size=1, num_workers=1)), lambda batch: batch["x"].to("cpu"))
    assert copies.ahead == 0


def test_nothing_waits_where_the_loader_is_late(prefetching):
    """And nothing is asked for that would not have been asked for."""
    _, device, _ = prefetching
    iterator = iter(DataLoader(Rows(), batch_size=1, num_workers=1))
    for batch in iterator:
        batch["x"].to("cpu")
    assert not device.log


def test_a_batch_that_is_asked_for_in_inference_mode_can_be_trained_on():
    """A validation that ends early may fetch the batch that the training goes on with."""
    stream = types.SimpleNamespace(record_event=lambda: None)
    cuda = types.SimpleNamespace(Stream=lambda device: stream, stream=lambda stream: contextlib.nullcontext(),
                                 device=lambda device: contextlib.nullcontext())
    device = device_copies.Cuda(types.SimpleNamespace(cuda=cuda, inference_mode=torch.inference_mode),
                                lambda tensor, device, non_blocking: tensor.clone())
    with torch.inference_mode():
        copy, _ = device.begin(torch.ones(2), "cuda")
    assert not copy.is_inference()
    (copy * torch.ones(2, requires_grad=True)).sum().backward()


class Engine:
    """torch.cuda whose copies are made when somebody waits for them, on a second device that is not the current one."""

    def __init__(self):
        self.pending, self.current, self.contexts, self.recorded = [], 0, set(), []

    @contextlib.contextmanager
    def device(self, number):
        before, self.current = self.current, number
        yield
        self.current = before           # torch only does so where that one has a context

    @contextlib.contextmanager
    def stream(self, stream):
        before = self.current
        self.contexts |= {1} if before != 1 else set()
        self.current = 1
        yield
        self.contexts |= {before} if before != 1 else set()     # torch makes it the current one again, whether it has a context or not
        self.current = before

    def Stream(self, device):
        return self

    current_stream = Stream

    def record_event(self):
        return self

    def wait_event(self, event):
        """Of a stream: the host goes on."""

    def synchronize(self):
        self.contexts.add(self.current)
        while self.pending:
            copy, source = self.pending.pop()
            torch.Tensor.copy_(copy, source)

    def move(self, tensor, device, non_blocking):
        copy = Copied(torch.empty_like(tensor))
        copy.recorded = self.recorded
        self.pending.append((copy, tensor))
        return copy


class Copied(torch.Tensor):
    device = 1

    def record_stream(self, stream):
        self.recorded.append(stream)


def test_what_the_script_writes_behind_its_move_comes_too_late():
    """`labels[~mask] = -100` behind `labels.cuda()`, which waits as torch does it: the copy may still be under way. And the first device gets
    no context where a script trains on the second."""
    engine = Engine()
    copies = device_copies.Copies(torch, device_copies.Cuda(types.SimpleNamespace(cuda=engine, inference_mode=torch.inference_mode), engine.move))
    copies._api.busy = lambda: False
    copies._moved[0], batch = 1, torch.arange(4.0)
    copies.next_batch([torch.ones(1)], [])
    batch.is_pinned = lambda: True
    copies.next_batch([torch.ones(1)], [batch])
    copies.next_batch([batch], None)
    taken = copies.take(batch, 1)
    assert engine.contexts <= {1} and engine.current == 0
    batch.fill_(-100)
    engine.synchronize()
    assert taken.tolist() == [0, 1, 2, 3] and engine.recorded == [engine]


def test_batches_made_in_inference_mode_are_not_copied_ahead(prefetching):
    _, device, copies = prefetching
    copies._moved[0] = torch.device("cpu")
    with torch.inference_mode():
        made = torch.ones(1)
    copies.next_batch([torch.ones(1)], [made])
    copies.next_batch([made], [torch.ones(1)])
    assert device.log == [("begin", 1.0)]


class Table:
    """As one of pandas: its `values` are an array."""

    values, keys = [[1, 2], [3, 4]], dict.keys

    def __init__(self, batch):
        pass


class Unreadable(dict):
    def values(self):
        raise KeyError("not from outside")


def with_(kind):
    return lambda items: [torch.utils.data.default_collate(items), kind({"x": 1})]


@pytest.mark.parametrize(("kind", "ahead"), [(Table, 6), (Unreadable, 0)])
def test_a_batch_that_holds_something_else_comes_through(prefetching, kind, ahead):
    _, _, copies = prefetching
    iterator = iter(DataLoader(Rows(), batch_size=1, num_workers=1, collate_fn=with_(kind)))
    seen = epoch(iterator, lambda batch: (float(batch[0]["x"].to("cpu")[0, 0]), type(batch[1])))
    assert seen == [(float(index), kind) for index in range(8)] and copies.ahead == ahead
    proof = device_prefetch.active(Evidence(notes={"device-prefetch": str(copies)}), device_prefetch.Options())
    assert proof.active is (ahead > 0) and ("not from outside" in proof.evidence) is (ahead == 0)


def test_loaders_with_workers_pin(prefetching):
    context, _, _ = prefetching
    rewrite = context.loader_rewrites[0]
    assert rewrite(None, {"num_workers": 2}, frozenset()) == {"pin_memory": True}
    assert rewrite(None, {"num_workers": 0}, frozenset()) == {} == rewrite(None, {"num_workers": 2, "pin_memory": True}, frozenset())


def test_eligibility_and_proof():
    usual = Facts(device="cuda", host_to_device_bytes=1 << 20, loaders=(LoaderFacts(num_workers=2),), step_ms=10.0)
    assert device_prefetch.eligible(usual)
    for change, reason in (({"device": "cpu"}, "no device to copy to"), ({"loaders": ()}, "DataLoader"),
                           ({"loaders": (LoaderFacts(),)}, "no workers"), ({"host_to_device_bytes": 0}, "no bytes"),
                           ({"loaders": (LoaderFacts(num_workers=1, holds_device_tensors=True),)}, "already")):
        answer = device_prefetch.eligible(dataclasses.replace(usual, **change))
        assert not answer and reason in answer.reason
    for text, active in (("", False), ("0 of 9 tensors that", False), ("7 of 9 tensors that", True)):
        assert device_prefetch.active(Evidence(notes={"device-prefetch": text}), device_prefetch.Options()).active is active
