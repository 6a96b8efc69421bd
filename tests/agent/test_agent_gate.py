"""The agent's end of the gate, without a workload."""

from __future__ import annotations

import errno
import json
import secrets
import socket
import threading

import pytest

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


@pytest.mark.parametrize(("failed", "cut"), [(TimeoutError("of the script's own signal handler"), False), (OSError(errno.ENOSPC, ""), False),
                                             (OSError(errno.EBADF, ""), True), (OSError(errno.ENOTSOCK, ""), True)])
def test_only_a_connection_that_is_gone_is_called_cut(failed, cut, tmp_path):
    class File:
        def write(self, line):
            raise failed

        readline = flush = write

    mine = gate.Gate.__new__(gate.Gate)
    mine._file, mine._ended = File(), str(tmp_path / "ended")
    mine._socket, other = socket.socketpair()
    with other, mine._socket:
        for ask in (lambda: mine._send({}), lambda: mine.tell({})):
            with pytest.raises(gate.Cut if cut else type(failed)) as raised:
                ask()
            assert cut or raised.value is failed
        assert (mine._socket.fileno() == -1) is cut and bool(list(tmp_path.iterdir())) is cut
