"""The agent's end of the gate: one line of JSON out, one line of JSON back, over an abstract Unix socket.

At the gate a rank has drained its device and waits; the controller may freeze the whole process tree then, and only
then. Between gates a step costs one mark on the timeline (a clock reading, or an event in the queue of each device that trains)
and two integer operations. Nothing is drained between two gates where devices can be asked when they came to a mark: a device that
waits for the host at the beginning of what is timed would take longer for it than it usually does.

    agent -> {"at": "hello", ...}         of each rank; again when what it says has changed
    agent -> {"at": "gate", "stamps": [...], ...}      and waits for one of
    <- {"do": "go", "skip": 1, "steps": 10, "split": false}   run, time the last 10, come back
       with "cpus": [...]   begin on that CPU, by rank (see `measure.placement`); each gate says where it came to
       with "watch": {...} look closely at some of them (see `agent.profiling`)
    <- {"do": "facts"} | "evidence" | "ceilings" | "seen"     answer with {"at": "answer", ...}, stay at the gate
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import socket
from pathlib import Path
from posix import getpid
from typing import Any, NoReturn

from saturate.agent.timeline import Mark, Timeline
from saturate.measure import placement


class Cut(OSError):
    """The script has closed the connection, among descriptors that it has not opened (os.closerange)."""


class Gate:
    """`stamps` are nanoseconds of the agent's clock, as the timeline tells them: the start of the block, then the end of each step."""

    def __init__(self, plan: dict[str, Any], hello: dict[str, Any], timeline: Timeline, clock: Any, drain: Any, answer: Any,
                 standing: Any = dict):
        self._timeline = timeline
        self._drain = drain
        self._answer = answer
        self._standing = standing
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            self._socket.connect("\0" + plan["socket"])
        except OSError:         # from another machine or another network, or too late: to train on would be to write for real
            self._leave(plan.get("ended"))
        self._file = self._socket.makefile("rwb")
        self._rank = hello["rank"]
        self._ended = plan.get("ended")
        self.remaining = 0
        self._timed = 0
        self.split = False
        self.watch: dict[str, Any] | None = None    # a window to be opened, until the session takes it
        self.order: dict[str, Any] = {}         # the latest "go"
        self._marks: list[Mark] = []
        self._spans: list[tuple[str, Mark, Mark]] = []      # parts of steps, not read yet
        self.evaluations: list[int] = []        # indices of steps that contained an evaluation
        self.parts: dict[str, int] = {}
        self._name = {"at": "hello", "token": plan["token"], "pid": getpid(), "t_ns": clock()}
        self.greet(hello)

    def greet(self, hello: dict[str, Any]) -> None:
        """Say who this is and what was found; the latest greeting counts. Its time is that of the first."""
        self._send({**self._name, **hello})

    def boundary(self, evaluated: bool) -> None:
        """One step has ended."""
        if not self.remaining:
            self._wait({})
            return
        self.remaining -= 1
        if evaluated:
            self.evaluations.append(len(self._marks) - 1)
        self._marks.append(self._timeline.mark())
        if not self.remaining:
            spans, self._spans = self._spans, []    # before it is drained: another thread may still add some
            self._drain()
            self._read(spans)
            self._wait({"stamps": self._timeline.read(self._marks), "evaluations": self.evaluations, "parts": self.parts})

    def add_part(self, part: str, began: Mark) -> None:
        """What has run since the mark `began` belongs to `part`."""
        if not self._filling():
            self._spans.append((part, began, self._timeline.mark()))

    def add_time(self, part: str, ns: int) -> None:
        """So much of the host's time belongs to `part`."""
        if not self._filling():
            self.parts[part] = self.parts.get(part, 0) + ns

    def _filling(self) -> bool:
        """Whether this is a step that is skipped: no part of it is one of what is timed."""
        return self.remaining > self._timed

    def _read(self, spans: list[tuple[str, Mark, Mark]]) -> None:
        for part, *marks in spans:
            if None not in marks:
                began, ended = self._timeline.read(marks)
                self.add_time(part, ended - began)

    def _wait(self, message: dict[str, Any]) -> None:
        self._drain()
        self._send({"at": "gate", "cpu": placement.current(), **message, **self._standing()})
        while True:
            try:
                line = self._file.readline()
            except ConnectionError:
                line = b""
            except OSError as error:
                self._tell_cut(error)
                raise
            if not line:
                self._leave()
            order = json.loads(line)
            if order["do"] == "go":
                self.order = order
                break
            self._send({"at": "answer", "value": self._answer(order)})
        if "cpus" in order:
            placement.move(order["cpus"][self._rank])
        self._timed = order["steps"]
        self.remaining = order["skip"] + order["steps"]
        self.split = bool(order.get("split"))
        self.watch = order.get("watch")
        self.evaluations = []
        self.parts = {}
        self._spans = []
        self._marks = [self._timeline.begin()]

    def tell(self, message: dict[str, Any]) -> None:
        """Report something without waiting."""
        self._send(message)

    def _send(self, message: dict[str, Any]) -> None:
        try:
            self._file.write(json.dumps(message).encode() + b"\n")
            self._file.flush()
        except ConnectionError:
            self._leave()
        except OSError as error:
            self._tell_cut(error)
            raise

    def _tell_cut(self, error: OSError) -> None:
        """Raises Cut if there is no connection under its number any more: a signal handler of the script may raise an OSError, too. The number
        may be another file's by now, and is not ours to close; the controller sees the end of a connection, and finds the reason in its folder."""
        if error.errno not in (errno.EBADF, errno.ENOTSOCK):
            return
        self._socket.detach()
        if self._ended is not None:
            with contextlib.suppress(OSError):
                Path(f"{self._ended}-cut-{getpid()}").touch()
        raise Cut("the script has closed the connection with the controller (os.closerange)") from error

    @staticmethod
    def _leave(word: str | None = None) -> NoReturn:
        """The controller is gone, or has nothing to do with this process: nothing sensible is left to do here. Its supervisor ends
        this process where it can. `word`: the beginning of a path, where it is to be told that it was not reached."""
        if word is not None:
            with contextlib.suppress(OSError):
                Path(f"{word}-stayed-out-{getpid()}.json").write_text('{"elsewhere": true}', encoding="utf-8")
        os._exit(0)
