"""The search of `saturate fit --knob=--batch-size`: the script's own argument is driven, one process per size."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass, field, replace

from saturate.errors import UsageError
from saturate.machine.commands import arguments_of
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


#: What arguments are called that hold the batch of a training; and those that hold another one.
_CALLED = re.compile(r"--?([\w.-]+[-_.])?batch[-_]?size")
_OTHERS = re.compile(r"eval|val[-_.]|test|infer|predict")


def likely_knob(argv: list[str], cwd: str | os.PathLike[str], source: str) -> str:
    """The argument that seems to hold the batch size, by the words of the command, then by the strings in the script's source.

    >>> likely_knob(["python", "train.py", "--eval_batch_size=4", "--batch_size=8"], ".", "")
    '--batch_size'
    >>> likely_knob(["python", "train.py"], ".", "parser.add_argument('-b', '--batch_size', type=int)")
    '--batch_size'
    """
    words = [word.partition("=")[0] for word in arguments_of(argv, cwd)] + re.findall(r"[\"'](--[\w.-]+)[\"']", source)
    return next((word for word in words if _CALLED.fullmatch(word) and not _OTHERS.search(word)), "--batch-size")


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


#: Proposals are multiples of no more than this.
MOST_UNIT = 64

#: How throughput comes about.
IN_TURN = "measured in one process after the other, not interleaved; a batch is taken for what the argument says"

#: A size that differs in nothing: by so much peaks and times of one size differ from process to process, at most. Where the shapes
#: of what the model is given are not known, a small batch may hide in them, up to this factor between two sizes.
SAME_PEAK, SAME_TIME, HIDDEN_FACTOR = 1.05, 1.25, 64


@dataclass(frozen=True)
class Shown:
    """What one size showed. `given`: what stands for the shapes of what the model was given; None: not known."""

    peak_bytes: int
    step_s: float
    given: str | None


def rounded(size: int, own: int | None) -> int:
    """`size` down to a multiple of the power of two in the script's own: scripts ask for multiples (of 8, of their micro-batches, of
    the devices), and a process that refuses its size tells nothing of memory.

    >>> rounded(5159, 16), rounded(700, 1024), rounded(5, 16), rounded(99, 25)
    (5152, 640, 4, 99)
    """
    unit = min(own & -own, MOST_UNIT) if own else 1
    while unit > size:
        unit //= 2
    return size - size % max(1, unit)


def differs(size: int, shown: Shown, other_size: int, other: Shown) -> bool:
    """Whether anything speaks for it that two values of the argument are two sizes."""
    if shown.peak_bytes > SAME_PEAK * other.peak_bytes or other.peak_bytes > SAME_PEAK * shown.peak_bytes:
        return True
    if shown.given is not None and other.given is not None:
        return shown.given != other.given
    return max(size, other_size) < HIDDEN_FACTOR * min(size, other_size) or \
        max(shown.step_s, other.step_s) > SAME_TIME * min(shown.step_s, other.step_s)


@dataclass
class KnobSearch(Search):
    """Every process has one size, from its first step on; throughput is that of the proofs, one after the other."""

    proof_blocks: int = 8
    knob: str = ""
    workload: Workload | None = None
    size: int | None = None             # of the process that runs
    given: str | None = None            # to the model in that process
    shown: dict[int, Shown] = field(default_factory=dict)
    blocks: list[Window] = field(default_factory=list)      # of the proof that runs
    first: tuple[int | None, int] | None = None     # the size of the first process, and what its DataLoader made

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
        self.kinds, self.world_size, self.given = seen["kinds"], process.world_size, seen["given"]
        if seen["loaders"] and seen["loaders"][0]["batch_size"]:
            self._take_loaders(seen["loaders"])
            made = self.loader["batch_size"]
            # Compared with what another size made: where it is that of all ranks, or of several micro-steps, that is less than the size.
            self.first = self.first or (size, made)
            before, as_before = self.first
            if size and before and max(size, before) >= 2 * min(size, before) and made == as_before:
                raise Refused(f"{self.knob} {size} changed nothing: its DataLoader still makes batches of {made}")

    def _smaller(self) -> int:
        """One process tells one size: not too far below what did not start, and one that the script takes."""
        assert self.workload is not None
        own = knob_value(self.workload.argv, self.knob, self.workload.cwd) or 16
        return max(2, rounded(own // 8, own))

    def _check_delivered(self, window: Window, size: int) -> None:
        """What is read need not come from a DataLoader."""

    @property
    def _is_the_batch(self) -> bool:
        """Whether the argument is the batch of the loader, not of all ranks or of several micro-steps."""
        return self.first is not None and self.first[0] == self.first[1]

    def _rounded(self, size: int) -> int:
        size = rounded(size, self.own)
        while self._is_the_batch and (spared := self._spared(size)) < size:
            size = rounded(spared, self.own)
        return size

    def _learn_reads(self, size: int, samples: int, steps: int) -> None:
        if self._is_the_batch:
            super()._learn_reads(size, samples, steps)

    def _really(self, size: int, delivered: int) -> int:
        return size

    def _keep_measured(self, size: int, window: Window, began: float) -> None:
        super()._keep_measured(size, window, began)
        self._compare(size, window)

    def _compare(self, size: int, window: Window) -> None:
        """Raises Refused where another value of the argument makes no other size."""
        self.shown[size] = shown = Shown(window.peak_bytes, window.step_s, self.given)
        same = next((other for other, seen in self.shown.items() if other != size and not differs(size, shown, other, seen)), None)
        if same is not None:
            what = "neither the memory nor the time of a step" if self.given is None else "neither what the model is given nor its memory"
            raise Refused(f"{self.knob} {size} changed nothing: {what} is another one than with {same}")

    def _next_probe(self) -> int | None:
        return None

    def _in_place(self) -> bool:
        return False

    def _prove(self, process: Process, size: int, fresh: bool, began: float) -> bool:
        self.blocks = []
        over = super()._prove(process, size, fresh, began)
        for window in self.blocks if size in self.proofs else ():       # of a size that does not fit, nobody needs to know how fast it is
            self.throughput.add(size, window, window.samples or window.timed * size * self.facts["micro_steps"] * self.world_size)
        if self.throughput.rates:
            self.throughput.note = IN_TURN
        return over

    def _saw_block(self, size: int, window: Window) -> None:
        self._compare(size, window)
        self.blocks.append(window)

    def _throughput(self, process: Process) -> None:
        """Measured while the sizes were proved."""
