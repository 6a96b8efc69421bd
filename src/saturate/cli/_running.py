"""What the verbs share while they run: progress, one signal that ends them in order, a workload's last words."""

from __future__ import annotations

import os
import sys
import time
from typing import TextIO

from saturate.cli._output import tell
from saturate.errors import SaturateError


class Progress:
    """One line per thing that was found out, on standard error, with the time since the start."""

    def __init__(self, stream: TextIO):
        self.stream = stream
        self.began = time.monotonic()
        self.gone = False

    def __call__(self, line: str) -> None:
        seconds = int(time.monotonic() - self.began)
        if self.gone:
            return
        try:
            print(f"[{seconds // 60:2d}:{seconds % 60:02d}] {line}", file=self.stream, flush=True)
        except OSError:
            self.gone = True        # the terminal was closed: nobody reads, but the study goes on


class one_signal_interrupts:
    """The first Ctrl-C, SIGTERM or SIGHUP ends a study: trials are killed and the best so far is written. Later ones
    change nothing, so that they cannot end the cleaning up; but for the user's own code, which may swallow the first. A signal
    that was ignored stays ignored (nohup)."""

    def __enter__(self) -> None:
        import signal

        pending = True

        def interrupt(number: int, frame: object) -> None:
            nonlocal pending
            users = sys.modules.get("saturate.inference.users_code")  # not there: none of it runs
            if (users is not None and users.interrupted()) or pending:
                pending = False
                raise KeyboardInterrupt

        numbers = [n for n in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP) if signal.getsignal(n) is not signal.SIG_IGN]
        self.before = {number: signal.signal(number, interrupt) for number in numbers}

    def __exit__(self, *exception: object) -> None:
        import signal

        for number, handler in self.before.items():
            signal.signal(number, handler)


def show_log(error: SaturateError) -> None:
    """The workload's own last words, before our error: they are what the user needs to see."""
    if not error.evidence.endswith("output.log") or not os.path.exists(error.evidence):
        return
    with open(error.evidence, encoding="utf-8", errors="replace") as file:
        lines = file.read().splitlines()
    tell("\n".join(["", *lines[-30:], "", ""]))
