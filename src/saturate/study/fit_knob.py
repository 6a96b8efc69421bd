"""The search of `saturate fit --knob=--batch-size`: the script's own argument is driven, one process per size."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass, replace

from saturate.errors import UsageError
from saturate.machine.fingerprint import arguments_of
from saturate.study.fit_process import Process, Window
from saturate.study.fit_search import Search
from saturate.study.fit_state import Refused
from saturate.trial.process import Workload


def knob_value(argv: list[str], knob: str, cwd: str | os.PathLike[str] = ".") -> int | None:
    """The number that `argv` gives the script's argument; None when it does not hold it. The last one counts, as for argparse.
    Raises UsageError when it is no positive number.

    >>> knob_value(["python", "train.py", "--batch-size=32"], "--batch-size")
    32
    >>> knob_value(["python", "train.py", "-b32"], "-b")
    32
    """
    place = _place(argv, knob, cwd)
    if place is None:
        return None
    index, before = place
    found = argv[index].removeprefix(before) if index < len(argv) else ""
    if not re.fullmatch(r"[1-9]\d*", found):
        raise UsageError(f"saturate fit: {knob} is {found!r} in the command, which is no size", remedy="name the argument that holds the batch size")
    return int(found)


def with_knob(argv: list[str], knob: str, value: int, cwd: str | os.PathLike[str] = ".") -> list[str]:
    """`argv` with the script's argument set, in the form that it has there; where it is absent, at the end, or in front of a `--`.

    >>> with_knob(["python", "train.py", "--batch-size", "32", "--lr", "1"], "--batch-size", 64)
    ['python', 'train.py', '--batch-size', '64', '--lr', '1']
    >>> with_knob(["mpirun", "-n", "2", "python", "train.py", "--", "data"], "-n", 64)
    ['mpirun', '-n', '2', 'python', 'train.py', '-n', '64', '--', 'data']
    """
    place = _place(argv, knob, cwd)
    if place is None:
        end = _options_end(argv, cwd)
        return [*argv[:end], knob, str(value), *argv[end:]]
    index, before = place
    return [*argv[:index], f"{before}{value}", *argv[index + 1:]]


def _place(argv: list[str], knob: str, cwd: str | os.PathLike[str]) -> tuple[int, str] | None:
    """The word of `argv` that holds the number, and what stands in front of the number in it. Words of what starts the script
    (`taskset -c 0,1`) are not looked at; those behind a `--` only where the script's options do not hold it."""
    found = None
    end = _options_end(argv, cwd)
    for index in range(len(argv) - len(arguments_of(argv, cwd)), len(argv)):
        word = argv[index]
        if index == end and found is not None:
            break
        if word == knob:
            found = index + 1, ""
        elif word.startswith(knob + "="):
            found = index, knob + "="
        elif _joined(word, knob):
            found = index, knob
    return found


def _options_end(argv: list[str], cwd: str | os.PathLike[str]) -> int:
    """Where options of the script must stand at last: in front of its `--`."""
    own = arguments_of(argv, cwd)
    return len(argv) - len(own) + (own.index("--") if "--" in own else len(own))


def _joined(word: str, knob: str) -> bool:
    """Whether it is an argument of one letter with its number behind it. Other letters would be another argument's."""
    return len(knob) == 2 and re.fullmatch(re.escape(knob) + r"\d+", word) is not None


@dataclass
class KnobSearch(Search):
    """Every process has one size, from its first step on; throughput is that of the proofs, one after the other."""

    proof_blocks: int = 8
    knob: str = ""
    workload: Workload | None = None
    size: int | None = None             # of the process that runs

    def _start(self, purpose: str, size: int | None) -> Process:
        assert self.workload is not None
        self._count(purpose)
        self.size = size
        argv = self.workload.argv if size is None else with_knob(self.workload.argv, self.knob, size, self.workload.cwd)
        self.bench.workload = replace(self.workload, argv=argv)
        self.bench.asking.loaders = None        # described by its batch size, too: another one in every process
        process = Process(self.bench, purpose)
        if self.facts and size is not None:
            self._learn(process, size)
        return process

    def _asked_of(self, size: int) -> int | None:
        return None

    def _look(self, process: Process, start: int | None) -> int:
        assert self.workload is not None
        if not self.facts:
            self.facts = process.trial.ask("facts")
            self._set_limit(process)
        self.own = knob_value(self.workload.argv, self.knob, self.workload.cwd)
        self._learn(process, start or self.own)
        if self.own is None and start is None:
            self.own = self.loader.get("batch_size")
        self._know_own()
        size = start or self.own
        if size is None:
            raise Refused(f"the size that the script uses by itself is not known: the command does not hold {self.knob}, and no "
                          f"DataLoader shows it; add {self.knob} N to the command")
        if self.asked_most:
            self.most = self.asked_most
        if self.loader.get("length"):
            self.most = min(self.most, self.loader["length"])
        return size

    def _learn(self, process: Process, size: int | None) -> None:
        seen = process.trial.ask("fit")
        self.kinds, self.world_size = seen["kinds"], process.world_size
        if seen["loaders"] and seen["loaders"][0]["batch_size"]:
            self._take_loaders(seen["loaders"])
            made = self.loader["batch_size"]
            if self.own is not None and size is not None and size != self.own and made == self.own:
                raise Refused(f"{self.knob} {size} changed nothing: its DataLoader still makes batches of {made}")

    def _smaller(self) -> int:
        """One process tells one size: not too far below what did not start."""
        assert self.workload is not None
        return max(2, (knob_value(self.workload.argv, self.knob, self.workload.cwd) or 16) // 8)

    def _check_delivered(self, window: Window, size: int) -> None:
        """What is read need not come from a DataLoader."""

    def _next_probe(self) -> int | None:
        return None

    def _in_place(self) -> bool:
        return False

    def _saw_block(self, size: int, window: Window) -> None:
        samples = window.samples or window.timed * size * self.facts["micro_steps"] * self.world_size
        self.throughput.add(size, window, samples)

    def _throughput(self, process: Process) -> None:
        self.throughput.note = "measured in one process after the other, not interleaved; a batch is taken for what the argument says"
