"""The lines of a study on standard error, and the bar of its budget below them on a terminal."""

from __future__ import annotations

import os
import pty
import re
import subprocess
import sys

import pytest

from saturate.cli._running import clock

_SAID = """
import sys, time
from saturate.cli._running import Progress
with Progress(sys.stderr, 100.0) as say:
    say("[bold]not markup[/bold] :key: " + "x" * 150)
    say.ends(say.began + 3675.0)
    time.sleep(1.3)
    say("second")
say("after")
print("went on")
"""


def on_terminal(code: str, **environment: str) -> str:
    """What a terminal of 80 columns is sent."""
    master, slave = pty.openpty()
    clean = {name: value for name, value in os.environ.items() if name not in ("NO_COLOR", "TERM", "COLUMNS")}
    with subprocess.Popen([sys.executable, "-c", code], stdin=slave, stdout=subprocess.PIPE, stderr=slave,
                          env={**clean, "TERM": "xterm-256color", "COLUMNS": "80", **environment}) as process:
        os.close(slave)
        seen = b""
        while True:
            try:
                part = os.read(master, 65536)
            except OSError:         # how a pseudo-terminal says that nobody writes any more
                break
            if not part:
                break
            seen += part
        os.close(master)
        assert process.stdout is not None and process.stdout.read() == b"went on\n" and process.wait(30) == 0
    return seen.decode()


def test_lines_stay_as_they_are_and_the_bar_goes_at_the_end():
    seen = on_terminal(_SAID)
    assert "] [bold]not markup[/bold] :key: " + "x" * 150 in seen and "second" in seen
    drawn = [(int(second), total) for second, total in re.findall(r"0:(\d\d) of ([\d:]+)", seen)]
    assert (0, "1:40") in drawn and (max(drawn)[0] >= 1), "a bar that moves"
    assert {total for _, total in drawn} == {"1:40", "1:01:15"}
    assert seen.rindex("\x1b[?25h") > seen.rindex("1:01:15"), "the cursor is back"
    last = seen[seen.rindex("\x1b[2K"):]
    assert "after" in last and "budget" not in last, "the bar is gone"


def test_what_it_quotes_does_not_drive_the_terminal():
    said = _SAID.replace('say("second")', 'say("RuntimeError: \\x1b]0;mine\\x07\\x1b[2J")')
    seen = on_terminal(said)
    assert "RuntimeError: \ufffd]0;mine\ufffd\ufffd[2J" in seen and "\x1b]0" not in seen


def test_without_colours_or_a_terminal_that_draws():
    assert not re.search(r"\x1b\[[0-9;]*m", on_terminal(_SAID, NO_COLOR="1"))
    dumb = on_terminal(_SAID, TERM="dumb")
    assert "second" in dumb and "budget" not in dumb and "\x1b" not in dumb
    done = subprocess.run([sys.executable, "-c", _SAID], capture_output=True, text=True, timeout=60)
    assert done.stderr.count("\n") == 3 and "budget" not in done.stderr and "\x1b" not in done.stderr


def test_a_terminal_that_is_closed_ends_nothing():
    master, slave = pty.openpty()
    with subprocess.Popen([sys.executable, "-c", _SAID], stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=slave,
                          env={**os.environ, "TERM": "xterm"}, start_new_session=True) as process:
        os.close(slave)
        os.read(master, 100)
        os.close(master)
        assert process.stdout is not None and process.stdout.read() == b"went on\n" and process.wait(30) == 0


@pytest.mark.parametrize(("seconds", "text"), [(0, "0:00"), (59.9, "0:59"), (600, "10:00"), (7200, "2:00:00")])
def test_the_clock(seconds, text):
    assert clock(seconds) == text
