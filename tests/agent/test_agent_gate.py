"""The agent's end of the gate, without a workload."""

from __future__ import annotations

import json
import secrets
import socket
import threading

from saturate.agent import gate
from saturate.agent.timeline import Timeline


def test_each_rank_begins_on_the_cpu_that_it_is_told(monkeypatch):
    name, moved, said = f"saturate-test-{secrets.token_hex(8)}", [], []
    monkeypatch.setattr(gate.placement, "move", moved.append)
    monkeypatch.setattr(gate.placement, "current", lambda: 7)

    def controller(listener):
        connection = listener.accept()[0]
        with connection, connection.makefile("rwb") as file:
            for order in ({"cpus": [3, 5]}, {}):        # the second: stay where you are
                while json.loads(line := file.readline())["at"] != "gate":
                    pass
                said.append(json.loads(line)["cpu"])
                file.write(json.dumps({"do": "go", "skip": 0, "steps": 1, **order}).encode() + b"\n")
                file.flush()

    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listener:
        listener.bind("\0" + name)
        listener.listen()
        thread = threading.Thread(target=controller, args=(listener,), daemon=True)
        thread.start()
        timeline = Timeline(None, lambda: 0, lambda: None, tuple)
        mine = gate.Gate({"socket": name, "token": ""}, {"rank": 1}, timeline, lambda: 0, lambda: None, lambda order: None)
        mine.boundary(False)            # nothing is left to run: it waits, and is told to begin on CPU 5
        mine.boundary(False)            # the one step: it waits again
        thread.join(10)
        mine._file.close()
        mine._socket.close()
    assert moved == [5] and said == [7, 7]
