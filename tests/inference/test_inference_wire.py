"""Messages between processes: what is sent arrives as it is, or is named."""

from __future__ import annotations

import collections
import contextlib
import socket
import threading
import time
from dataclasses import dataclass
from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("cloudpickle", reason="the extra inference")

from process_kit import Answer  # noqa: E402 - after the check for torch

from saturate.inference import pickles, wire  # noqa: E402

Named = collections.namedtuple("Named", "first second")


@dataclass
class Holder:
    value: Any


def sent(message: Any, **options: Any) -> Any:
    here, there = socket.socketpair()
    with here, there:
        thread = threading.Thread(target=wire.send, args=(here, message), kwargs=options)
        thread.start()
        try:
            return wire.receive(there, time.monotonic() + 60)
        finally:
            thread.join()


def test_structures_arrive_as_they_are() -> None:
    x = torch.arange(6.0).reshape(2, 3)
    got = sent({"named": Named(x, 1), "answer": Answer(x, {"deep": [x, (x,)]}), "object": Holder(x), "none": None})
    assert got["named"].first.equal(x) and type(got["named"]) is Named and type(got["answer"]) is Answer
    assert got["object"].value is got["named"].first is got["answer"].extra["deep"][1][0]


def test_an_input_that_asks_for_gradients_does_so_where_it_arrives() -> None:
    """Models may differentiate by it."""
    x = torch.randn(2, 3, requires_grad=True)
    got = sent(x)
    assert got.requires_grad and got.is_leaf and torch.equal(got, x)


@pytest.mark.parametrize("tensor", [
    torch.randn(3, 4).to(torch.bfloat16), torch.randn(5).to(torch.float8_e4m3fn), torch.tensor(3), torch.zeros(0, 4), torch.zeros(2, 0, dtype=torch.bool),
    torch.randn(4, 6)[:, ::2], torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last), torch.randn(2, 3).t(), torch.randn(3).expand(2, 3),
    torch.randn(3, dtype=torch.complex64).conj(), torch.randn(2, 2, requires_grad=True) * 1, torch.nn.Parameter(torch.ones(2)),
    torch.eye(3).to_sparse(), torch.tensor([True, False])], ids=lambda tensor: f"{tensor.dtype} {tuple(tensor.shape)}")
def test_tensors_arrive_as_they_are(tensor: Any) -> None:
    got = sent(tensor)
    assert got.dtype == tensor.dtype and got.shape == tensor.shape and not got.requires_grad
    expected, found = (one.detach().to_dense() if one.layout != torch.strided else one.detach() for one in (tensor, got))
    assert torch.equal(expected.view(torch.uint8) if expected.dtype == torch.float8_e4m3fn else expected,
                       found.view(torch.uint8) if found.dtype == torch.float8_e4m3fn else found)
    if tensor.dim() == 4:
        assert got.is_contiguous(memory_format=torch.channels_last)


def test_a_large_message_arrives_whole() -> None:
    tensor = torch.arange(3_000_000)
    assert torch.equal(sent([tensor, tensor + 1])[1], tensor + 1)


def test_what_cannot_be_sent_is_not_sent_in_part() -> None:
    here, there = socket.socketpair()
    with here, there:
        with pytest.raises(wire.Unsendable, match="generator"):
            wire.send(here, [torch.zeros(3), (x for x in "ab")])
        there.setblocking(False)
        with pytest.raises(BlockingIOError):
            there.recv(1)


def test_a_closed_end_and_a_silent_end_are_told_apart() -> None:
    here, there = socket.socketpair()
    with here, there:
        with pytest.raises(TimeoutError):
            wire.receive(here, time.monotonic() + 0.05)
        with pytest.raises(TimeoutError):
            wire.send(here, torch.zeros(10_000_000), time.monotonic() + 0.05)
        there.close()
        with pytest.raises(wire.Closed):                # with bytes on their way
            wire.receive(here)
    here, there = socket.socketpair()
    with here:
        there.close()
        with pytest.raises(wire.Closed):
            wire.receive(here)
        with pytest.raises(wire.Closed):
            wire.send(here, 1)


def test_what_came_while_this_process_was_stopped_has_come() -> None:
    """Ctrl-Z for longer than the candidate may take, which has answered long ago."""
    here, there = socket.socketpair()
    with here, there:
        wire.send(there, "an answer")
        assert wire.receive(here, time.monotonic() - 60) == "an answer"
        with pytest.raises(TimeoutError):
            wire.receive(here, time.monotonic() - 60)


def test_instances_of_a_class_that_went_by_value_come_home_as_its_instances() -> None:
    @dataclass
    class Local:
        x: int

        def twice(self) -> int:
            return 2 * self.x

    here, there = socket.socketpair()
    with here, there:
        wire.send(here, Local(3))
        assert ("test_inference_wire", Local.__qualname__) in pickles.sent_classes()
        wire.send(here, [Local(4), Local(5)], home=pickles.sent_classes())
        wire.receive(there)
        members = dict(vars(Local))
        got = wire.receive(there)
    assert dict(vars(Local)) == members         # not rewritten with what another process made of it
    assert [type(one) is Local and one.twice() for one in got] == [8, 10]


def test_two_classes_of_one_name_are_not_confused() -> None:
    def made() -> Any:
        @dataclass
        class Local:
            x: int

        return Local(1)

    one = made()
    sent(one)
    name = type(one).__module__, type(one).__qualname__
    assert name in pickles.sent_classes()
    sent([one, made()])
    assert name not in pickles.sent_classes()
    with pytest.raises(wire.Unreadable, match="no class"):
        sent(one, home=frozenset({name}))


def test_an_answer_that_drips_is_cut(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every byte comes in time, and the last one never."""
    monkeypatch.setattr(wire, "_LATE_S", 0.2)
    here, there = socket.socketpair()

    def drip() -> None:
        with contextlib.suppress(OSError):
            there.sendall(wire._HEADER.pack(1 << 20, 0))
            while True:
                there.sendall(b"x")
                time.sleep(0.001)

    dripping = threading.Thread(target=drip)
    dripping.start()
    with here, there:
        with pytest.raises(TimeoutError):
            wire.receive(here, time.monotonic() + 0.1)
        here.close()
        dripping.join()


def test_a_large_answer_that_is_coming_when_the_time_is_over_arrives(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(wire, "_MOMENT_S", 10.0)        # another thread sends, and may have to wait for a core
    here, there = socket.socketpair()
    with here, there:
        tensor = torch.arange(3_000_000)
        sending = threading.Thread(target=wire.send, args=(there, tensor))
        sending.start()
        assert torch.equal(wire.receive(here, time.monotonic() - 60), tensor)
        sending.join()
