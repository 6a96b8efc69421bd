"""The gate with several ranks: who has come, what each says at its end, and what all of them answer."""

from __future__ import annotations

import contextlib
import json
import os
import socket
import threading
from collections.abc import Iterator

import pytest

from saturate.trial import gate
from saturate.trial.outcome import apart


class Rank:
    def __init__(self, name: str, number: int, of: int):
        self.socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self.socket.connect("\0" + name)
        self.say(at="hello", token="token", rank=number, world_size=of)

    def say(self, **message: object) -> None:
        self.socket.sendall(json.dumps(message).encode() + b"\n")


@pytest.fixture
def pair() -> Iterator[tuple[gate.GateServer, Rank, Rank]]:
    name = f"saturate-test-ranks-{os.getpid()}"
    server = gate.GateServer(name, "token")
    ranks = Rank(name, 0, 2), Rank(name, 1, 2)
    yield server, *ranks
    for rank in ranks:
        rank.socket.close()
    server.close()


def test_who_waits_for_whom_is_told(pair) -> None:
    server, _, second = pair
    second.say(at="gate")
    with pytest.raises(gate.RanksApart) as late:
        server.wait_gates(0.5, lambda: True)
    assert (late.value.standing, late.value.missing) == ([1], [0])


def test_ranks_that_have_not_greeted_are_missing_and_none_at_the_gate_is_a_silence() -> None:
    name = f"saturate-test-missing-{os.getpid()}"
    server = gate.GateServer(name, "token")
    rank = Rank(name, 0, 4)
    try:
        with pytest.raises(gate.GateTimeout) as silent:
            server.wait_gates(0.3, lambda: True)
        assert not isinstance(silent.value, gate.RanksApart)
        rank.say(at="gate")
        with pytest.raises(gate.RanksApart) as late:
            server.wait_gates(0.3, lambda: True)
        assert (late.value.standing, late.value.missing) == ([0], [1, 2, 3])
    finally:
        rank.socket.close()
        server.close()


@pytest.mark.parametrize("line", [
    b'{"at": "hello", "token": "another", "rank": 0, "world_size": 1}\n{"at": "gate"}\n', b'{"at": "gate"}\n', b"no message\n", b"[" * (17 << 20)])
def test_who_is_not_of_the_trial_is_not_listened_to(line: bytes) -> None:
    """The address is one that any program on the machine can connect to."""
    name = f"saturate-test-stranger-{os.getpid()}"
    server = gate.GateServer(name, "token")
    stranger = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)

    def send() -> None:
        with contextlib.suppress(OSError):
            stranger.sendall(line)

    try:
        stranger.connect("\0" + name)
        threading.Thread(target=send, daemon=True).start()
        with pytest.raises(gate.GateClosed):
            server.wait_gates(20.0, lambda: True)
        assert not server.greetings()
    finally:
        server.close()
        stranger.close()


def test_all_ranks_are_missed_as_soon_as_one_has_said_how_many_there_are() -> None:
    name = f"saturate-test-early-{os.getpid()}"
    server = gate.GateServer(name, "token")
    early, late = Rank(name, 0, 1), Rank(name, 1, 3)        # the first greeted before its process group was there
    try:
        late.say(at="gate")
        with pytest.raises(gate.RanksApart) as waiting:
            server.wait_gates(0.5, lambda: True)
        assert (waiting.value.standing, waiting.value.missing) == ([1], [0, 2])
    finally:
        for rank in (early, late):
            rank.socket.close()
        server.close()


def test_the_outcome_names_them_and_says_what_is_not_supported() -> None:
    outcome = apart(300.0, [0, 2], [1])
    assert outcome.reason == "ranks 0 and 2 stand at the end of a step, and rank 1 did not come to it within 300 s"
    assert all(word in outcome.remedy for word in ("rank 1", "--nnodes 2", "Join", "--step optimizer:0", "--timeout"))


def test_what_a_rank_says_after_the_first_has_left_is_kept(pair) -> None:
    server, first, second = pair
    for rank in (first, second):
        rank.say(at="gate")
    server.wait_gates(5.0, lambda: True)
    first.say(at="ended", steps=3)
    first.socket.close()
    with pytest.raises(gate.GateClosed):
        server.wait_gates(5.0, lambda: True)

    def leave() -> None:
        second.say(at="ended", steps=5)
        second.socket.close()

    late = threading.Timer(0.3, leave)
    late.start()
    server.hear_out(10.0, lambda: True)
    late.join()
    assert [notice["steps"] for notice in server.notices] == [3, 5]


def test_who_never_leaves_is_not_waited_for_longer_than_that(pair) -> None:
    server, first, _ = pair
    with pytest.raises(gate.GateTimeout):
        server.wait_gates(0.2, lambda: True)
    first.socket.close()
    server.hear_out(0.2, lambda: True)
    server.hear_out(100.0, lambda: False)       # the command is over, and a process that it left holds the connection
    assert server.notices == []


def test_all_ranks_answer_in_their_order(pair) -> None:
    server, first, second = pair
    for rank in (first, second):
        rank.say(at="gate")
    server.wait_gates(5.0, lambda: True)
    second.say(at="answer", value="second")
    first.say(at="answer", value="first")
    assert server.ask_all({"do": "seen"}, 5.0, lambda: True) == ["first", "second"]
    first.say(at="answer", value="alone")
    assert server.ask({"do": "seen"}, 5.0, lambda: True) == "alone"
    assert [greeting["rank"] for greeting in server.greetings()] == [0, 1]
