"""What the verbs share while they run: progress, one signal that ends them in order, a workload's last words."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any, TextIO

from saturate.cli._output import tell
from saturate.cli._problems import of_surroundings
from saturate.errors import SaturateError, UsageError, clean


class Progress:
    """One line per thing that was found out, on standard error, with the time since the start. On a terminal, within `with`, a bar
    below them: how much of the budget is used up. What still follows at its end (a last pair, a report) may take a little longer."""

    def __init__(self, stream: TextIO, budget_s: float | None = None):
        self.stream = stream
        self.budget_s = budget_s
        self.began = time.monotonic()
        self.gone = False
        self._bar: Any = None

    def __enter__(self) -> Progress:
        if self.budget_s is not None and drawable(self.stream):
            self._bar = _bar(self.stream, self.budget_s)
            self._unless_gone(self._bar.start)
        return self

    def __exit__(self, *exception: object) -> None:
        bar, self._bar = self._bar, None
        if bar is not None:
            with suppress(OSError):         # the terminal is closed; one that only stumbled has its cursor back
                bar.stop()

    def ends(self, at_s: float) -> None:
        """The budget ends then (time.monotonic)."""
        if self._bar is not None:
            self._bar.update(self._bar.task_ids[0], total=max(1.0, round(at_s - self.began, 3)))   # 99.999… is 100

    def __call__(self, line: str) -> None:
        seconds = int(time.monotonic() - self.began)
        text = clean(f"[{seconds // 60:2d}:{seconds % 60:02d}] {line}")     # it may quote the command, or a file
        if self._bar is not None:
            self._unless_gone(lambda: self._bar.console.print(text, markup=False, highlight=False, emoji=False, soft_wrap=True))
        else:
            self._unless_gone(lambda: print(text, file=self.stream, flush=True))

    def _unless_gone(self, write: Callable[[], None]) -> None:
        """The terminal may be closed: nobody reads then, but the study goes on."""
        if self.gone:
            return
        try:
            write()
        except OSError:
            self.gone = True


def drawable(stream: TextIO) -> bool:
    """Whether a line may be drawn again and again: a terminal that can go back in it."""
    return stream.isatty() and os.environ.get("TERM") != "dumb"


def _bar(stream: TextIO, budget_s: float) -> Any:
    """Drawn once a second, so that it takes nothing from what is measured meanwhile."""
    from rich.console import Console
    from rich.progress import BarColumn, ProgressColumn, Task, TextColumn
    from rich.progress import Progress as Bar
    from rich.progress_bar import ProgressBar
    from rich.text import Text

    class Used(BarColumn):
        def render(self, task: Task) -> ProgressBar:
            task.completed = min(task.elapsed or 0.0, task.total or 0.0)
            return super().render(task)

    class Clock(ProgressColumn):
        def render(self, task: Task) -> Text:
            return Text(f"{clock(task.elapsed or 0.0)} of {clock(task.total or 0.0)}")

    bar = Bar(TextColumn("budget"), Used(bar_width=30), Clock(), console=Console(file=stream), transient=True,
              refresh_per_second=1, redirect_stdout=False, redirect_stderr=False)
    bar.add_task("", total=budget_s)
    return bar


def clock(value_s: float) -> str:
    """Minutes and seconds, with hours where there are some.

    >>> clock(75), clock(3675)
    ('1:15', '1:01:15')
    """
    seconds = int(value_s)
    hours, minutes = divmod(seconds // 60, 60)
    return f"{hours}:{minutes:02d}:{seconds % 60:02d}" if hours else f"{minutes}:{seconds % 60:02d}"


class one_signal_interrupts:
    """The first Ctrl-C, SIGTERM or SIGHUP ends a study: trials are killed and the best so far is written. Later ones
    change nothing, so that they cannot end the cleaning up; but for the user's own code, which may swallow the first. A signal
    that was ignored stays ignored (nohup)."""

    def __enter__(self) -> one_signal_interrupts:
        import signal

        self._pending = True

        def interrupt(number: int, frame: object) -> None:
            users = sys.modules.get("saturate.inference.users_code")  # not there: none of it runs
            if (users is not None and users.interrupted()) or self._pending:
                self._pending = False
                raise KeyboardInterrupt

        numbers = [n for n in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP) if signal.getsignal(n) is not signal.SIG_IGN]
        self.before = {number: signal.signal(number, interrupt) for number in numbers}
        return self

    def enough(self) -> None:
        """From now on no signal changes anything: there is an answer, and it is told."""
        self._pending = False

    def __exit__(self, *exception: object) -> None:
        import signal

        for number, handler in self.before.items():
            signal.signal(number, handler)


@contextmanager
def answered(nothing: Callable[[str], None], so_far: Callable[[KeyboardInterrupt], bool] = lambda interruption: False) -> Iterator[None]:
    """However the body ends, `--json` has an answer: before an error goes on, `nothing(reason)` gives one without a result.
    `so_far(interruption)` gives that of an interrupted study; false where it has found nothing yet."""
    try:
        yield
    except UsageError:
        raise
    except SaturateError as problem:
        nothing(f"{problem.message}: {problem.cause}" if problem.cause else problem.message)
        show_log(problem)
        raise
    except KeyboardInterrupt as interruption:
        if not so_far(interruption):
            nothing("interrupted")
        raise
    except Exception as bug:
        known = of_surroundings(bug)
        nothing(known.message if known else f"saturate itself failed: {type(bug).__name__}: {bug}")
        raise


def show_log(error: SaturateError) -> None:
    """The workload's own last words, before our error: they are what the user needs to see."""
    if not error.evidence.endswith("output.log") or not os.path.exists(error.evidence):
        return
    with open(error.evidence, encoding="utf-8", errors="replace") as file:
        lines = file.read().splitlines()
    tell(clean("\n".join(["", *lines[-30:], "", ""])))
