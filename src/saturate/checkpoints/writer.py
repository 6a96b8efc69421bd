"""Checkpoints on their way to the disk: one after the other, by a thread of this process or by its helper process.

    save        returns once the snapshot is staged (ways "thread", "process") or durable ("sync")
    wait_for    what is about to look at a file waits here until it is durable
    flush       before the process ends

Files become durable in the order in which they were saved, so nothing that was saved later (a pointer, for one) is on
disk before what it points to. A save that fails in the background is said on stderr at once. Its OSError is raised in
the thread that saved, by the next save; until then whatever would announce the checkpoint, or remove what may be the last
good one, raises it each time (who cleans up passes over an error). At the latest it is the exit code.
"""

from __future__ import annotations

import errno
import functools
import mmap
import os
import struct
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from posix import getpid
from typing import Any

from saturate import notices
from saturate.checkpoints import persist, staging
from saturate.checkpoints.arena import Pool
from saturate.checkpoints.costs import Costs
from saturate.checkpoints.own_calls import own_thread, quiet
from saturate.checkpoints.target import NO_ROOM, Target, fill, new, remove_litter
from saturate.records import sizes

#: Staged bytes beyond this, and beyond three times the newest file, make a save wait for earlier ones.
MOST_STAGED_BYTES = 1 << 30
#: So do more files than this: each holds a file and a buffer open, and a process may have a thousand.
MOST_PENDING = 16
_POLL_S = 0.002
_DISK_MARGIN_BYTES = 1 << 20


@dataclass
class Job:
    """One file, or folder of files (then `folder` is the same), on its way. Paths are canonical.

    `perform` makes it durable. `target` is given up where it is not to be; None where other ranks wait for it.
    """

    number: int
    path: str
    folder: str
    perform: Callable[[], None]
    target: Target | None
    staged: staging.Staged | None
    size: int
    thread: int


@dataclass
class Failure:
    """`told`: somebody got the error as an exception."""

    path: str
    folder: str
    error: OSError
    thread: int
    told: bool = False


class Writer:
    """One per training process. `ways`: those that `costs` may choose from."""

    def __init__(self, torch: Any, costs: Costs, note: Callable[[str], None] = lambda text: None):
        self.costs = costs
        self.pending: dict[int, Job] = {}           # by number, oldest first
        self.failures: list[Failure] = []
        self.helper: persist.Helper | None = None
        self.closed = False                         # from then on, saves are synchronous
        self._torch = torch
        self._note = note
        self._pool = Pool(torch)
        self._held_bytes = 0
        self._condition = threading.Condition()
        self._queue: deque[Job] = deque()
        self._thread: threading.Thread | None = None
        self._number = 0
        self._clean: set[str] = set()
        self._pid = getpid()
        self._began = _began(self._pid)
        self._finished = mmap.mmap(-1, 8)           # all jobs up to this number are done; shared with forked children
        _alive.add(self)

    # -- saving ----------------------------------------------------------------------------------------------------

    @property
    def foreign(self) -> bool:
        """Whether this is a forked child: its saves are its own, and only what it looks at waits for the parent."""
        return getpid() != self._pid

    def save(self, path: str, folder: str, records: list[tuple[str, Any, int]], alignment: int, over: bool = False) -> None:
        """Store records (name, bytes or storage, bytes) as an archive, or a bare one where `folder` is empty. `over`: without us, the file
        at `path` would be written over, so that is done where the disk has no room for a new one beside it.

        Raises `Unsuitable` when the path wants a plain save, else OSError: of this save where it is synchronous or the
        file cannot be created, or of an earlier one.
        """
        self._finish_before()
        began = time.perf_counter()
        self.raise_failure()
        size = sum(size for _, _, size in records)
        request: dict[str, Any] = {"folder": folder, "alignment": alignment}
        request["records"] = [(name, length, 0) for name, _, length in records]
        way = "sync" if self.closed or self.foreign else self.costs.way()
        staged = None
        with quiet():
            self._tidy(os.path.dirname(os.path.realpath(path)))
            if way != "sync":
                self._leave_room()
            target = new(path, over)
            try:
                if target.free_bytes() < size + _DISK_MARGIN_BYTES:
                    way = "sync"                    # a disk that is full is better told by this save than by the next
                staged = self._stage(way, records, size, alignment)
                if staged is None:
                    way = "sync"
                    self._write_now(target, request, records, over)
                else:
                    request["records"] = staged.records
                    write = functools.partial(self._write_staged, target, way, request, staged, over)
                    self._enqueue(target.path, target.folder, write, target, staged, size)
            except BaseException as error:
                if target.queued:           # the interruption came when it was on its way already, and it goes on
                    raise
                target.discard()
                if isinstance(error, OSError) and error.errno in NO_ROOM and target.before is not None and not target.over:
                    notices.tell(f"saturate: there is no room for the new {path} beside the old one, which stays whole: async-checkpoint needs "
                                 f"{sizes.decimal(size)} more on that disk than saves without it\n")
                if staged is not None:
                    with self._condition:
                        self._give_back(staged)
                raise
        self.count(way, size, time.perf_counter() - began)

    def leave_alone(self) -> None:
        """Something was saved into a file that the script opened itself."""
        self.costs.left_alone += 1
        self._note(self.describe())

    def _finish_before(self) -> None:
        """One checkpoint at a time is on its way: a kill then costs the newest, and never a queue of them that a slow
        disk has not taken yet. Files of one checkpoint do not wait for each other."""
        if self.costs.over and not self.foreign:
            self.wait_for(list(self.pending))

    def count(self, way: str, size: int, blocked_s: float) -> None:
        """Something was saved, for which the script stood still so long."""
        self.costs.saved(way, size, blocked_s)
        self._note(self.describe())

    def _tidy(self, folder: str) -> None:
        if folder not in self._clean and os.path.isdir(folder):
            self._clean.add(folder)
            remove_litter(folder)

    def _leave_room(self) -> None:
        while True:
            with self._condition:
                if len(self.pending) < MOST_PENDING:
                    return
                oldest = min(self.pending)
            self._await([oldest])

    def _stage(self, way: str, records: list[tuple[str, Any, int]], size: int,
               alignment: int) -> staging.Staged | None:
        """A snapshot, once there is room for it; None when this save must be synchronous."""
        if way == "sync":
            return None
        made = records[0][1] if len(records) == 1 and isinstance(records[0][1], bytes) else None     # nothing changes it: no copy
        needed = staging.staged_bytes(records)
        while True:
            with self._condition:
                room = sum(job.size for job in self.pending.values()) + size <= max(3 * size, MOST_STAGED_BYTES)
                arena = self._pool.take(needed) if room and made is None else None
                oldest = next(iter(self.pending), None)
            if room and made is not None:
                return staging.Staged(None, [(records[0][0], size, 0)], alignment, content=made)
            if arena is not None:
                break
            if oldest is None:
                return None         # memory is short: the file is written from the live tensors
            self._await([oldest])
        try:
            staged = staging.stage(self._torch, records, arena, alignment)
        except BaseException:
            arena.close()           # a copy from a GPU may still be on its way: nobody else may get this one
            raise
        self._held_bytes = max(self._held_bytes, arena.size)
        return staged

    def _write_now(self, target: Target, request: dict[str, Any], records: list[tuple[str, Any, int]], over: bool) -> None:
        jobs = list(self.pending.values())
        self._await([job.number for job in jobs if not self.foreign or job.path == target.path])
        self.raise_failure()        # of what it may be a pointer to
        fill(target, persist.file_bytes(request), over, lambda: persist.write(
            target.descriptor, persist.layout(request, staging.raw_contents(self._torch, records))))

    def prepare(self) -> OSError | None:
        """Before ranks agree on a save: whatever can go wrong with `perform` goes wrong here. An earlier failure, which then counts as
        raised."""
        self._finish_before()
        with quiet():
            self._leave_room()
            with self._condition:
                self._start()
        return self.take_failure()

    def perform(self, folder: str, size: int, action: Callable[[], None]) -> int:
        """Have the thread do something that makes the files of `folder` durable; the number of the job. After `prepare`."""
        with quiet():
            folder = os.path.realpath(folder)
            return self._enqueue(folder, folder, action, None, None, size)

    def _start(self) -> None:
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="saturate-checkpoints", daemon=True)
            try:
                self._thread.start()
            except (RuntimeError, MemoryError):     # no room for its stack: the next save tries again
                self._thread = None
                raise

    def _enqueue(self, path: str, folder: str, perform: Callable[[], None], target: Target | None,
                 staged: staging.Staged | None, size: int) -> int:
        with self._condition:
            self._start()
            self._number += 1
            job = Job(self._number, path, folder, perform, target, staged, size, threading.get_ident())
            if target is not None:
                target.queued = True
            self.pending[job.number] = job
            self._queue.append(job)
            self._condition.notify_all()
            return job.number

    # -- the thread ------------------------------------------------------------------------------------------------

    def _run(self) -> None:
        own_thread()
        while True:
            with self._condition:
                while not self._queue:
                    if self.closed:
                        return
                    self._condition.wait()
                job = self._queue.popleft()
            failure = None
            try:
                job.perform()
            except BaseException as error:  # noqa: BLE001 - whatever it is (torch's CheckpointException is no Exception), the script must learn it
                failure = _plain(error, job.path)
            self._finish(job, failure)
            del job, failure        # what they hold would live until the next checkpoint

    def _write_staged(self, target: Target, way: str, request: dict[str, Any], staged: staging.Staged, over: bool) -> None:
        try:
            staged.wait()
            fill(target, persist.file_bytes(request), over, lambda: self._persist(target.descriptor, way, request, staged))
        except BaseException:
            target.discard()
            raise

    def _persist(self, descriptor: int, way: str, request: dict[str, Any], staged: staging.Staged) -> None:
        if way == "process" and staged.arena is not None:
            try:
                if self.helper is None:
                    self.helper = persist.Helper()
                self.helper.write(descriptor, staged.arena.descriptor, request)
                return
            except persist.HelperGone:
                self.helper = None
                os.ftruncate(descriptor, 0)
                os.lseek(descriptor, 0, os.SEEK_SET)
        persist.write(descriptor, persist.layout(request, staged.contents()))

    def _finish(self, job: Job, failure: OSError | None) -> None:
        if failure is not None:
            before = "is lost, as it is without async-checkpoint" if job.target is not None and job.target.over else "is untouched"
            notices.tell(f"saturate: the checkpoint {job.path} was not written: {failure}; what was there before {before}; "
                         "the error is raised at the next save or when the process ends\n")
        with self._condition:
            if failure is not None:
                self.failures.append(Failure(job.path, job.folder, failure, job.thread))
                self._give_up_after(job)
            self._remove(job)
            struct.pack_into("=q", self._finished, 0, min(self.pending, default=self._number + 1) - 1)
            self._condition.notify_all()

    def _give_up_after(self, failed: Job) -> None:
        """What the same thread saved after it, it would not have saved had it known; a pointer to it, for one."""
        for job in [job for job in self._queue if job.thread == failed.thread and job.target is not None]:
            self._queue.remove(job)
            if job.staged is not None:
                job.staged.wait()       # a copy from a GPU may still be on its way into memory that is given back
            try:
                job.target.discard()
            except OSError as error:
                notices.tell(f"saturate: a temporary file of {job.path} stays: {error}\n")
            self._remove(job)
            notices.tell(f"saturate: nor was {job.path}, which was saved after it\n")

    def _remove(self, job: Job) -> None:
        del self.pending[job.number]
        if job.staged is not None:
            self._give_back(job.staged)

    def _give_back(self, staged: staging.Staged) -> None:
        if staged.arena is not None and staged.event is None:
            self._pool.give(staged.arena)       # else a copy from a GPU may still be on its way into it: left alone

    # -- waiting ---------------------------------------------------------------------------------------------------

    def wait_for(self, numbers: Iterable[int]) -> None:
        """Until those jobs are durable, or have failed. The time counts as lost for the training."""
        wanted = [number for number in numbers if number in self.pending]
        if wanted:
            began = time.perf_counter()
            self._await(wanted)
            self.costs.waited(time.perf_counter() - began)

    def _await(self, wanted: list[int]) -> None:
        if self.foreign:
            self._await_parent(max(wanted, default=0))
            return
        with self._condition:
            self._condition.notify_all()        # an interruption may have come before the thread was told of a job
            self._condition.wait_for(lambda: not any(number in self.pending for number in wanted))

    def _await_parent(self, number: int) -> None:
        """In a forked child, or its own: a thread of the training does the work, and says in shared memory how far it is."""
        while struct.unpack_from("=q", self._finished, 0)[0] < number and self._training_lives():
            time.sleep(_POLL_S)
        for done in [known for known in self.pending if known <= number]:
            del self.pending[done]

    def _training_lives(self) -> bool:
        return _began(self._pid) == self._began if self._began else os.getppid() == self._pid

    def raise_failure(self) -> None:
        """Raise what went wrong with a save of this thread in the background, once."""
        error = self.take_failure()
        if error is not None:
            raise error

    def take_failure(self) -> OSError | None:
        """What `raise_failure` would raise, for who raises it."""
        if not self.failures:
            return None
        with self._condition:
            mine = next((one for one in self.failures if one.thread == threading.get_ident()), None)
            if mine is not None:
                self.failures.remove(mine)
        return mine.error if mine is not None else None

    def refuse(self, concerns: Callable[[Failure], bool]) -> None:
        """Raise the first failure that it concerns. It stays: a save has yet to raise it."""
        found = next((one for one in list(self.failures) if concerns(one)), None)
        if found is not None:
            found.told = True
            raise found.error

    def flush(self) -> None:
        """Until nothing is pending. A forked child ends without: it is the training that may not."""
        if not self.foreign:
            self.wait_for(list(self.pending))

    def close(self) -> None:
        """Flush, and end the thread and the helper. Later saves are synchronous."""
        self.flush()
        with self._condition:
            self.closed = True
            self._condition.notify_all()
        if self.foreign:
            return
        if self._thread is not None:
            self._thread.join()
        if self.helper is not None:
            self.helper.close()
            self.helper = None
        self._pool.close()
        self.costs.settle()

    def describe(self) -> str:
        return self.costs.describe(self._held_bytes)

    def after_fork(self) -> None:
        """In the child: no thread, and a lock that another thread may have held."""
        self._condition = threading.Condition()
        self._queue.clear()
        self._thread = None
        if self.helper is not None:
            self.helper.leave()
            self.helper = None
        self.failures.clear()
        self.closed = True


def _began(pid: int) -> str:
    """When that process began, in ticks of the clock: another one may get its number. "" when it has ended, or not Linux."""
    try:
        with quiet(), open(f"/proc/{pid}/stat", encoding="utf-8", errors="replace") as file:
            fields = file.read().rpartition(")")[2].split()
    except OSError:
        return ""
    return "" if fields[0] in "ZX" else fields[19]      # one that has ended stays listed until its parent asks for it


def _plain(error: BaseException, path: str) -> OSError:
    """The same error without its traceback, which would hold the snapshot in memory."""
    if isinstance(error, OSError) and error.errno:
        return OSError(error.errno, error.strerror, path)       # Python picks the same subclass
    return OSError(errno.EIO, f"{type(error).__name__}: {error}", path)


_alive: weakref.WeakSet[Writer] = weakref.WeakSet()


def _after_fork() -> None:
    for writer in list(_alive):
        writer.after_fork()


os.register_at_fork(after_in_child=_after_fork)
