"""TCP ports that a second run of the same command would ask for again."""

from __future__ import annotations

import os
import random
import socket
import subprocess
import sys

import pytest
from waiting import until

from saturate.trial import ports


def free_port() -> int:
    """A port that the kernel would not choose by itself."""
    low, _ = ports.chosen_from()
    for _ in range(100):
        port = random.randrange(10_000, min(low, 32_000))
        with socket.socket() as probe:
            if probe.connect_ex(("127.0.0.1", port)) != 0:
                return port
    raise AssertionError("no free port")


LISTENS = """
import socket, sys, time
asked = socket.create_server(("", int(sys.argv[1])), family=getattr(socket, sys.argv[2]))
chosen = socket.create_server(("127.0.0.1", 0))
connected = socket.create_connection(chosen.getsockname())      # has a port as well, and listens on none
print(chosen.getsockname()[1], connected.getsockname()[1], flush=True)
time.sleep(60)
"""


@pytest.mark.parametrize("family", ["AF_INET", "AF_INET6"])
def test_only_what_was_asked_for_by_number(family: str) -> None:
    if family == "AF_INET6" and not socket.has_dualstack_ipv6():
        pytest.skip("this machine has no IPv6")
    port = free_port()
    shell = subprocess.Popen(["sh", "-c", '"$@"; true', "sh", sys.executable, "-c", LISTENS, str(port), family],
                             stdout=subprocess.PIPE, text=True, start_new_session=True)
    try:
        assert shell.stdout
        chosen, connected = map(int, shell.stdout.readline().split())
        child = ports.tree.descendants(shell.pid)
        assert ports.listening(child) == {port, chosen} and connected != chosen
        assert ports.asked_for(shell.pid) == [port]
        assert port in ports.asked_for(os.getpid())         # of the whole tree below us
    finally:
        os.killpg(shell.pid, 9)
        shell.wait()
        shell.stdout.close()
    until(lambda: not ports.listening(child))       # killed, and on its way
    assert ports.listening([shell.pid]) == set()


def test_a_range_that_cannot_be_read_is_the_usual_one(monkeypatch: pytest.MonkeyPatch, tmp_path) -> None:
    for text in ("", "garbage", "1 2 3"):
        (tmp_path / "range").write_text(text)
        monkeypatch.setattr(ports, "_RANGE", str(tmp_path / "range"))
        assert ports.chosen_from() == (32768, 60999)
    monkeypatch.setattr(ports, "_RANGE", str(tmp_path / "gone"))
    assert ports.chosen_from() == (32768, 60999)
