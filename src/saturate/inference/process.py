"""One candidate in a process of its own, as the search sees it: limits of time and memory, and an end that leaves
nothing.

The process is a fresh interpreter (`worker`), or as one (`forkserver`), below a small supervisor (`trial.supervise`), which adopts whatever it
starts, such as compile workers, and kills all of it when this process is gone, by whatever signal. A thread watches
the memory of the tree. While it is frozen nothing of the tree runs.
"""

from __future__ import annotations

import contextlib
import math
import os
import secrets
import socket
import sys
import threading
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from saturate import plugins
from saturate.errors import EnvironmentProblem
from saturate.inference import batches as trees
from saturate.inference import crashes, launching, pickles, wire
from saturate.inference.candidates import Candidate
from saturate.inference.failures import Kind, WorkerFailed
from saturate.inference.forkserver import ForkServer
from saturate.inference.source import Source
from saturate.inference.techniques._api import Entry, Proof
from saturate.inference.worker import Order
from saturate.records import sizes
from saturate.records.inference import ModelFacts
from saturate.trial import meter, supervised, tree
from saturate.trial.outcome import FAULTS, NO_ROOM, OUT_OF_MEMORY, classify

#: A call, a block of calls or all outputs: longer is a hang.
REQUEST_S = 600.0

#: ... and so is what takes so many times as long as its first calls did, and some seconds.
PATIENCE, LEAST_REQUEST_S = 20.0, 60.0

#: When the search's time is over, a request may still take so many times as long as its first calls did, and some seconds:
#: what was found is confirmed then.
LATE_PATIENCE, GRACE_S = 4.0, 30.0

#: A call with inputs that saturate made up, beside a multiple of its usual time.
PROBE_S = 10.0

#: Characters of the log that come with a failure.
_TAIL = 4000

#: Bytes of the log in which faulthandler's lines on all threads are looked for.
_DUMP = 1 << 17


def request_limit_s(expected_s: float, left_s: float = math.inf) -> float:
    """Seconds after which a request counts as hanging: one that takes `expected_s` by what is known, while `left_s` of the
    search's time are left. Generous, for a crowded machine; but a hang must not take the time of everything else.

    >>> [request_limit_s(*given) for given in ((0.01,), (0.01, 10), (20, -5), (100,))]
    [60.2, 40.04, 110.0, 600.0]
    """
    return min(REQUEST_S, LEAST_REQUEST_S + PATIENCE * expected_s, max(0.0, left_s) + GRACE_S + LATE_PATIENCE * expected_s)


@dataclass(frozen=True)
class Ready:
    """A process that has answered its first call. `prepare_s` is all before it but the first call itself: start of
    the interpreter, loading, applying, and a call with every other shape."""

    prepare_s: float
    first_call_s: float
    compile_s: float | None             # of both, in compilers; None: nothing was compiled
    longest_call_s: float               # of the first calls with every shape
    batch_bytes: int                    # of the largest batch
    done: list[str]                     # what each technique said that it did, in the order of application
    proofs: list[Proof]                 # whether it took effect, in the same order
    peak_memory_bytes: int | None       # until now: see `Worker.memory_bytes`
    whole_device: bool                  # ... in which is what other processes take of the GPU meanwhile
    facts: ModelFacts
    notes: dict[str, str] = field(default_factory=dict)


class Worker:
    """Starts and prepares at construction. Every method but `close` raises WorkerFailed."""

    shares = 1          # a block tells the times of whole calls: see `racing.Racer`

    def __init__(self, source: Source, what: Candidate | Path, *, folder: Path, threads: int,
                 memory_bytes: int | None = None, prepare_s: float, deadline_s: float = math.inf,
                 facts: ModelFacts | None = None, forks: ForkServer | None = None):
        """`what`: a candidate, or the folder of an artifact. `folder`: where the process gets a private folder of its
        own. `memory_bytes`: of all its processes on a CPU, of the allocator on a GPU. `deadline_s`: of the search, by
        `time.monotonic()`: `request_limit_s` says what that means for a request. `facts`: None: the first
        process of a source observes them and leaves them there. `forks`: of the same number of threads: what starts the process, where it
        can."""
        self.source = source
        self.folder = launching.private(Path(folder).absolute())
        self.log = self.folder / "output.log"
        self.frozen = False
        self.cpu: int | None = None         # on which it ended its latest block
        self._deadline_s = deadline_s
        self._killed: WorkerFailed | None = None        # why, where it was us
        self._round_s = 0.0             # that a call with each of the measured batches takes
        self._owner = os.getpid()
        self._lock = threading.Lock()
        self._token = secrets.token_hex(12)
        self._forks = forks
        self._on_cpu = source.device == "cpu"
        self._meter: meter.Meter | None = None
        self._report: dict[str, object] | None = None
        scratch = self.folder / "scratch"
        began = time.monotonic()
        try:
            scratch.mkdir()
            launching.make_temporary(source, self.folder)
            self._stream, there = socket.socketpair()
            with there:
                self._supervisor = self._start(there, threads)
        except OSError as error:
            raise EnvironmentProblem("no process can be started for a candidate", cause=str(error),
                                     remedy="free some space in the working folder, and allow this user more "
                                            "processes and open files") from error
        try:
            self._meter = meter.Meter(self._supervisor.pid,
                                      memory_bytes if memory_bytes and self._on_cpu else float("inf"))
            order = Order(
                source=str(source.folder.absolute()), identity=source.identity,
                artifact=str(what.absolute()) if isinstance(what, Path) else None,
                techniques=_techniques(what) if isinstance(what, Candidate) else [],
                keep=what.keep if isinstance(what, Candidate) else frozenset(), folder=str(scratch.absolute()),
                threads=threads,
                limit_s=prepare_s, memory_bytes=memory_bytes, facts=facts, home=pickles.sent_classes())
            found = self._ask("prepare", order, limit_s=prepare_s, what="preparation")
            peak = found.pop("device_peak_bytes")
            started_s = time.monotonic() - began - found["prepare_s"] - found["first_call_s"]
            found["prepare_s"] += max(0.0, started_s)
            self.ready = Ready(peak_memory_bytes=self._meter.peak_bytes() if self._on_cpu else peak, **found)
            self._round_s = self.ready.longest_call_s * source.batches
            self._meter.begin()
        except BaseException as error:          # also Ctrl-C: nobody else knows this process
            self.close()
            if isinstance(error, WorkerFailed):
                error.alive = False
            raise

    # -- requests --------------------------------------------------------------------------------------------------

    def run(self, *inputs: Any) -> Any:
        """The candidate's output for these inputs. Tensors of it are on the device of the first input tensor."""
        # Others than the measured ones may be many more samples, or longer ones: attention takes the square.
        larger = _bytes_of(inputs) / max(1, self.ready.batch_bytes)
        return self._ask("run", inputs, device=_device_of(inputs), limit_s=self._limit_s(max(1.0, larger) ** 2))

    def probe(self, *inputs: Any) -> Any:
        """The same for inputs that are not the user's own, as large as one of theirs: nobody must wait for them as long."""
        usual = PROBE_S + PATIENCE * self._round_s
        return self._ask("run", inputs, device=_device_of(inputs), limit_s=min(usual, self._limit_s(1.0)))

    @property
    def in_turn(self) -> int:
        """How many inputs a block calls in turn."""
        return self.source.batches

    def block(self, count: int, start: int | None = None, *, cpu: int | None = None, among: int | None = None) -> list[int]:
        """Nanoseconds of each of `count` calls. Inputs take turns in a fixed order: from number `start`, or from
        where the block before ended; all of them, or so many (`among`). `cpu`: where it begins, if not where it is (see
        `measure.placement`)."""
        limit_s = self._limit_s(max(1.0, count / max(1, among or self.in_turn)))
        times, self.cpu = self._ask("block", count, start, cpu, among, limit_s=limit_s)
        return times

    def outputs(self) -> list[list[Any]]:
        """For each measured batch the tensors of the output, on the CPU, in order."""
        began = time.monotonic()
        found = self._ask("outputs", limit_s=self._limit_s(1.0))
        self._round_s = time.monotonic() - began        # the first calls may have compiled
        return found

    def memory_bytes(self) -> int | None:
        """The most that was taken since the preparation: of a GPU's memory, without CUDA's own context (see `device_memory`), and
        on a CPU resident in all processes (where torch itself is part of it). None: not measurable."""
        return self._meter.peak_bytes() or None if self._on_cpu and self._meter else self._ask("memory")

    def file_bytes(self) -> int:
        """What of that are mapped files on a CPU, which other processes of the same program map, too."""
        return meter.file_bytes(self._supervisor.pid) if self._on_cpu else 0

    def store(self, folder: Path, limit_s: float = 1800.0) -> Entry:
        """Store the program in `folder`. WorkerFailed of kind not_applied where it cannot be stored."""
        folder.mkdir(parents=True, exist_ok=True)
        return self._ask("store", str(folder.absolute()), limit_s=limit_s, what="storing")

    def sensitivity(self, limit_s: float = 300.0) -> list[tuple[str, float]]:
        """(name of a module, score), the most sensitive first: see `sensitivity.rank`."""
        return self._ask("sensitivity", limit_s, limit_s=limit_s + 60.0, what="ranking of layers")

    def ask(self, function: str, *arguments: Any, limit_s: float | None = None) -> Any:
        """What `function` ("package.module:name", importable there) returns for the candidate's Context and
        `arguments`."""
        return self._ask("ask", function, arguments, limit_s=limit_s, what=function)

    def _limit_s(self, rounds: float) -> float:
        """Of a request that is as much as calling it so many times with each of the measured batches."""
        return request_limit_s(rounds * self._round_s, self._deadline_s - time.monotonic())

    # -- freezing --------------------------------------------------------------------------------------------------

    def freeze(self) -> None:
        """Stop the process and all that it started. Between requests only; a request thaws it for as long as it
        takes."""
        if not self.frozen:
            self._refuse_once_ended()
            if self._supervisor.poll() is not None:
                raise self._ended()
            if not tree.freeze(self._supervisor.pid):
                raise self._end("failed", "a process of the candidate could not be stopped")
            self.frozen = True

    def thaw(self) -> None:
        if self.frozen:
            tree.thaw(self._supervisor.pid)
            self.frozen = False

    # -- the end ---------------------------------------------------------------------------------------------------

    def close(self) -> None:
        """End the process and all that it started. Its log stays."""
        if os.getpid() != self._owner:
            return                      # a fork of the user's process: not its to end
        if self._meter is not None:
            self._meter.close()
        self._stop()
        self._stream.close()
        launching.discard(self.folder)

    def __enter__(self) -> Worker:
        return self

    def __exit__(self, *exception: Any) -> None:
        self.close()

    # -- inside ----------------------------------------------------------------------------------------------------

    def _start(self, there: socket.socket, threads: int) -> Any:
        argv = launching.python(f"from saturate.inference.worker import main; main({there.fileno()})")
        order = {"argv": argv, "path": launching.path(), "cwd": os.getcwd(), "log": str(self.log),
                 "environment": launching.environment(self.source, self.folder, threads, self._token)}
        forked = self._forks.start(self.folder, order, there.fileno()) if self._forks is not None else None
        return forked or supervised.start(self.folder, order, [there.fileno()])

    def _ask(self, request: str, *arguments: Any, limit_s: float | None = None, what: str = "a call",
             device: str = "cpu") -> Any:
        if os.getpid() != self._owner:
            raise WorkerFailed("failed",
                               "a candidate can be called from the process that started it, not from a fork of it")
        limit_s = REQUEST_S if limit_s is None else limit_s
        with self._lock:                # a check may call from several threads
            if self._stream.fileno() < 0:
                raise WorkerFailed("failed", "the candidate's process is closed")
            self._refuse_once_ended()
            frozen = self.frozen
            self.thaw()
            answer = self._exchange((request, arguments), time.monotonic() + limit_s,
                                    f"{what} took longer than {limit_s:.0f} s", device)
            if frozen and answer[0] != "ended":
                self.freeze()
        if answer[0] == "ok":
            return answer[1]
        fate, kind, reason, text = answer
        cause = classify({"ended": "exit", "code": 1}, text, 0, True, None).kind
        if kind in ("failed", "not_made", "other_sizes"):      # unless the machine is why
            kind = "out_of_memory" if cause in OUT_OF_MEMORY else "disk_full" if cause in NO_ROOM else kind
        failed = WorkerFailed(kind, reason, text[-_TAIL:], alive=fate == "raised", outside=kind == "disk_full" or cause in NO_ROOM)
        if not failed.alive:
            self._stop()
            self._killed = failed
        raise failed

    def _exchange(self, message: Any, deadline_s: float, late: str, device: str) -> Any:
        try:
            wire.send(self._stream, message, deadline_s)
            return wire.receive(self._stream, deadline_s, device=device)
        except wire.Unsendable as error:
            raise WorkerFailed("failed", f"the inputs cannot be sent to another process: {error}",
                               alive=True) from error
        except wire.Unreadable as error:
            raise WorkerFailed("failed", f"the output cannot be read: {error}", alive=True) from error
        except TimeoutError:
            raise self._end("timeout", late) from None
        except wire.Closed:
            raise self._ended() from None
        except BaseException:           # Ctrl-C inside of a message: its answer would be taken for the next one's
            self._stop()
            raise

    def _ended(self) -> WorkerFailed:
        """The process is gone by itself: find out how."""
        report = self._stop(grace_s=20.0)
        log = self.output()
        if self._meter is not None and self._meter.exceeded_bytes is not None:
            return WorkerFailed("out_of_memory", f"ended when it had {sizes.show(self._meter.exceeded_bytes)}, "
                                f"above the limit of {sizes.show(self._meter.limit_bytes)}", log)
        if report is None:
            return WorkerFailed("failed", "the process that watches it was killed", log, outside=True)
        if report["ended"] == "not_started":
            return WorkerFailed("failed", f"it could not be started: {report['why']}", log, outside=True)
        if report["ended"] == "killed":
            return WorkerFailed("failed", "its process closed the connection and ran on", log)
        if report.get("code") == 0:
            return WorkerFailed("failed", "its process ended itself in the middle of a request", log)
        outcome = classify(report, log, 0, True, None)
        fault = report.get("ended") == "signal" and report["signal"] in FAULTS
        outside = outcome.kind in NO_ROOM or report.get("ended") == "signal" and not fault
        reason = outcome.reason + (crashes.place(self.output(_DUMP)) if fault and outcome.kind == "killed_by_signal" else "")
        return WorkerFailed("out_of_memory" if outcome.kind in OUT_OF_MEMORY else "failed", reason, log, outside=outside)

    def _refuse_once_ended(self) -> None:
        """Raise what it ended of, once that is known: whoever asks it again, or freezes it in a `finally`, hides no reason behind another."""
        if self._killed is not None:
            raise WorkerFailed(self._killed.kind, self._killed.reason, self._killed.log, outside=self._killed.outside)

    def _end(self, kind: Kind, reason: str) -> WorkerFailed:
        """Kill it, and return the exception to raise."""
        self._stop()
        self._killed = WorkerFailed(kind, reason, self.output())
        return self._killed

    def _stop(self, grace_s: float = 0.0) -> dict[str, object] | None:
        """See `supervised.end`."""
        report = supervised.end(self._supervisor, self.folder, f"{launching.MARK}={self._token}", grace_s)
        self._report = report or self._report
        return self._report

    def output(self, most: int = _TAIL) -> str:
        """The end of what was printed, at most so many bytes."""
        return supervised.printed(self.log, most)


def clear_away(folder: Path) -> None:
    """Remove what the processes of a search that was killed have left in its folder: programs and weights, and what they were started
    with. Hold the folder's lock. Logs stay."""
    for own in folder.glob(f"process-{8 * '[0-9a-f]'}"):
        if not own.is_symlink():
            launching.discard(own)
            with contextlib.suppress(OSError):
                (own / supervised.ORDER).unlink()


def _techniques(candidate: Candidate) -> list[tuple[str, str, dict[str, Any]]]:
    return [(*plugins.origin(part.module), asdict(part.options)) for part in candidate.parts]


def _device_of(inputs: tuple[Any, ...]) -> str:
    """Where the first input tensor lives: a check that works on a GPU gets its answers there."""
    found = trees.tensors(sys.modules["torch"], inputs) if "torch" in sys.modules else []
    return str(found[0].device) if found else "cpu"


def _bytes_of(inputs: tuple[Any, ...]) -> int:
    return trees.size_bytes(sys.modules["torch"], inputs) if "torch" in sys.modules else 0
