"""The controller's end of the gate: one listening socket per trial, one connection per rank.

The protocol is described in `saturate.agent.gate`. Nothing that arrives is trusted: lines are bounded, the first one
must carry the trial's token, and anything that does not parse ends the connection.
"""

from __future__ import annotations

import json
import math
import select
import socket
import struct
import time
from typing import Any

from saturate.trial import tree
from saturate.trial.deadline import Deadline
from saturate.trial.log_text import exception_line

_LIMIT_BYTES = 16 * 1024 * 1024
#: How long messages are read that were there when the time was over: more may come as fast as they are read.
_LATE_S = 2.0


class GateClosed(Exception):
    """A rank closed its connection: its process ended."""


class GateTimeout(Exception):
    """Nothing arrived in time."""


class RanksApart(GateTimeout):
    """Nothing arrived in time, while some ranks (`standing`) wait at the gate for others (`missing`). Numbers, in order."""

    def __init__(self, standing: list[int], missing: list[int]):
        super().__init__(f"{standing} wait for {missing}")
        self.standing = standing
        self.missing = missing


class AgentFailed(Exception):
    """The agent had an error of its own and withdrew; nothing will come to the gate any more."""


class NoStep(Exception):
    """The agent saw a lot happen (`events`, the latest), but nothing that repeats and changes parameters, or not the step that the
    user named (`wrong_step` says why), or a capture of whole steps, of whose replays nothing is seen (`replayed`)."""

    def __init__(self, events: str, wrong_step: str, replayed: bool):
        super().__init__(wrong_step or events)
        self.events = events
        self.wrong_step = wrong_step
        self.replayed = replayed


class SeveralTrainings(Exception):
    """Two processes greeted as the same rank: each trains on its own, and there is no one step to measure."""


class StartedElsewhere(Exception):
    """A rank greeted that is no process of the trial's: a daemon started it, outside of the isolation, and it would survive the trial."""


class _Rank:
    def __init__(self, connection: socket.socket):
        self.connection = connection
        credentials = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
        self.pid: int = struct.unpack("3i", credentials)[0]     # who connected; 0: of a namespace that we do not see into
        self.buffer = b""
        self.hello: dict[str, Any] | None = None

    def lines(self) -> list[dict[str, Any]]:
        """Messages that have arrived. Raises GateClosed at end of file or garbage."""
        try:
            data = self.connection.recv(1 << 20)
        except ConnectionError as error:
            raise GateClosed(str(error)) from error
        if not data:
            raise GateClosed("connection closed")
        self.buffer += data
        if len(self.buffer) > _LIMIT_BYTES:
            raise GateClosed("message too long")
        *complete, self.buffer = self.buffer.split(b"\n")
        try:
            return [json.loads(line) for line in complete]
        except ValueError as error:
            raise GateClosed(f"not a message: {error}") from error


class GateServer:
    """Collects ranks as they say hello; rank 0's world size says how many to wait for."""

    def __init__(self, name: str, token: str):
        self.token = token
        self.supervisor: int | None = None          # once it runs: of its descendants only a greeting is taken
        self.listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self.listener.bind("\0" + name)
        self.listener.listen(64)
        self.ranks: list[_Rank] = []
        self.notices: list[dict[str, Any]] = []     # messages that are not answers: ended

    @property
    def world_size(self) -> int:
        sizes = [rank.hello["world_size"] for rank in self.ranks if rank.hello]
        return max(sizes, default=1)

    def hello(self) -> dict[str, Any] | None:
        """Rank 0's greeting, once it has arrived."""
        return next((r.hello for r in self.ranks if r.hello and r.hello["rank"] == 0), None)

    def greetings(self) -> list[dict[str, Any]]:
        """The latest of every rank that has greeted, by rank."""
        return [hello for _, hello in self._greeted()]

    def _greeted(self) -> list[tuple[_Rank, dict[str, Any]]]:
        return sorted(((r, r.hello) for r in self.ranks if r.hello), key=lambda pair: pair[1]["rank"])

    def wait_gates(self, timeout_s: float, alive: Any, sign_of_life: Any = lambda: None, longest_s: float = 0.0,
                   progress: Any = lambda: None, until: float = math.inf) -> list[dict[str, Any]]:
        """The `gate` message of every rank, rank 0 first, once all stand at the gate.

        `alive()` is asked now and then; when it is false and nothing is left to read, GateClosed is raised. GateTimeout is
        raised after `timeout_s` in which neither `sign_of_life()` nor `progress()` changed, or after `longest_s` in which the
        latter did not: who talks may do nothing else; at `until` (time.monotonic) in any case. It is RanksApart where some have come.
        """
        waiting: dict[int, dict[str, Any]] = {}
        began = time.monotonic()
        deadline, sign, reached = Deadline(min(began + timeout_s, until), _LATE_S), sign_of_life(), progress()
        while True:
            try:
                received = self._receive(deadline, alive)
            except GateTimeout:
                now, before, sign = time.monotonic(), sign, sign_of_life()
                if now < until and (seen := progress()) != reached:
                    began, reached = now, seen
                elif sign == before or now - began >= longest_s or now >= until:
                    raise self._apart(waiting) from None
                deadline = Deadline(min(now + timeout_s, until), _LATE_S)
                continue
            for rank, message in received:
                if message["at"] == "gate":
                    waiting[id(rank)] = message
            greeted = [rank for rank, _ in self._greeted()]
            if greeted and len(greeted) >= self.world_size and all(id(r) in waiting for r in greeted):
                return [waiting[id(r)] for r in greeted]

    def _apart(self, waiting: dict[int, dict[str, Any]]) -> GateTimeout:
        standing = [hello["rank"] for rank, hello in self._greeted() if id(rank) in waiting]
        missing = sorted(set(range(self.world_size)) - set(standing))
        return RanksApart(standing, missing) if standing else GateTimeout()

    def ask(self, order: dict[str, Any], timeout_s: float, alive: Any) -> Any:
        """Rank 0's answer to a question, while all ranks stand at the gate."""
        return self._answers([rank for rank, _ in self._greeted()][:1], order, timeout_s, alive)[0]

    def ask_all(self, order: dict[str, Any], timeout_s: float, alive: Any) -> list[Any]:
        """Every rank's answer, by rank, while all stand at the gate."""
        return self._answers([rank for rank, _ in self._greeted()], order, timeout_s, alive)

    def _answers(self, ranks: list[_Rank], order: dict[str, Any], timeout_s: float, alive: Any) -> list[Any]:
        for rank in ranks:
            self._send(rank, order)
        deadline = Deadline(time.monotonic() + timeout_s, _LATE_S)
        answers: dict[int, Any] = {}
        while len(answers) < len(ranks):
            for rank, message in self._receive(deadline, alive):
                if message["at"] == "answer":
                    answers[id(rank)] = message["value"]
        return [answers[id(rank)] for rank in ranks]

    def go(self, order: dict[str, Any]) -> None:
        """Let every rank run."""
        for rank in self.ranks:
            if rank.hello:
                self._send(rank, order)

    def hear_out(self, longest_s: float, alive: Any) -> None:
        """Keep what ranks say at their ends, until all have closed: where the first has, others may still be at it. No longer than
        `longest_s`, nor when `alive()` is false and nothing is left to read."""
        open_still = {rank.connection: rank for rank in self.ranks if rank.hello}
        ends = time.monotonic() + longest_s
        while open_still and (left := ends - time.monotonic()) > 0:
            ready, _, _ = select.select(list(open_still), [], [], min(left, 0.5))
            if not ready and not alive():
                return
            for connection in ready:
                try:
                    self.notices += [message for message in open_still[connection].lines() if message.get("at") == "ended"]
                except GateClosed:
                    del open_still[connection]

    def close(self) -> None:
        for rank in self.ranks:
            rank.connection.close()
        self.listener.close()

    def _send(self, rank: _Rank, order: dict[str, Any]) -> None:
        try:
            rank.connection.sendall(json.dumps(order).encode() + b"\n")
        except OSError as error:
            raise GateClosed(str(error)) from error

    def _receive(self, deadline: Deadline, alive: Any) -> list[tuple[_Rank, dict[str, Any]]]:
        """Wait for the next messages; greetings and notices are kept, the rest is returned."""
        sockets = {self.listener: None, **{rank.connection: rank for rank in self.ranks}}
        try:
            left = deadline.left()
        except TimeoutError:
            raise GateTimeout from None
        ready, _, _ = select.select(list(sockets), [], [], min(left, 0.5))
        if not ready and not alive():
            raise GateClosed("the process ended")
        if not ready and not left:
            raise GateTimeout
        found: list[tuple[_Rank, dict[str, Any]]] = []
        for sock in ready:
            rank = sockets[sock]
            if rank is None:
                self.ranks.append(_Rank(self.listener.accept()[0]))
                continue
            for message in rank.lines():
                self._sort(rank, message, found)
        return found

    def _sort(self, rank: _Rank, message: dict[str, Any], found: list[tuple[_Rank, dict[str, Any]]]) -> None:
        kind = message.get("at")
        if kind == "hello":
            if message.get("token") != self.token:
                raise GateClosed("a stranger connected")
            # A dead supervisor leaves its processes to another parent, and is reported as such.
            watched = self.supervisor is not None and tree.state(self.supervisor) not in ("Z", "")
            if watched and not tree.descends(rank.pid, self.supervisor):
                raise StartedElsewhere
            if any(r is not rank and r.hello and r.hello["rank"] == message["rank"] for r in self.ranks):
                raise SeveralTrainings(f"two of its processes train as rank {message['rank']}, without a process group in common")
            rank.hello = message
        elif rank.hello is None:
            raise GateClosed("no greeting")
        elif kind == "agent_failed":
            raise AgentFailed(exception_line(message["error"]))
        elif kind == "no_step":
            raise NoStep(str(message.get("events", "")), str(message.get("wrong_step", "")), bool(message.get("replayed")))
        elif kind in ("gate", "answer"):
            found.append((rank, message))
        else:
            self.notices.append(message)
