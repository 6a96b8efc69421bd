"""A window without a profiler: what the input pipeline waits for, where its time goes, and pauses of the collector.

A thread looks at the training thread every few milliseconds while a batch is being fetched. Loader workers are other
processes, whose Python stacks cannot be seen from here: of them only CPU time and state are read from /proc.
"""

from __future__ import annotations

import functools
import gc
import os
import random
import sys
import threading
import time
from collections import Counter
from collections.abc import Collection
from posix import getpid
from typing import Any

from saturate.agent import kinds
from saturate.agent.clocked import Step, training_steps
from saturate.agent.fetched import described
from saturate.agent.partclock import REST, PartClock
from saturate.agent.places import Places
from saturate.agent.window import Window
from saturate.techniques._standard import standard

resource = standard("resource")

PERIOD_S = 0.005

#: An optimizer's step, until it is known whether a closure of the script's ran in it up to here.
_STEP = "step"

#: How long the training thread may keep the sampler waiting while it runs Python: what is seen is where it was then.
_SWITCH_S = 1e-5


class Sampling(Window):
    """The window "sample"."""

    def __init__(self, session: Any, order: dict[str, Any]):
        super().__init__(session, order)
        self.clock = session.clock
        self.parts = PartClock(session.clock)
        self.fetching = 0
        self.fetch: Any = None          # the code that fetches a batch
        self.fetch_ns = 0
        self.fetch_cpu_ns = 0
        self.fetch_queued_ns = 0        # ready to run, on a core that was busy with something else
        self.longest_ns = 0
        self.pauses: list[int] = []
        self.collected: Counter[tuple[str, int]] = Counter()    # nanoseconds in `gc.collect`, by the line that calls it
        self.workers: list[Any] = []
        self._feeding: dict[int, tuple[Any, int]] = {}      # by id: workers that batches came from, and since when they may have
        self.declared = 0               # workers that the loader asks for
        self.elsewhere = False          # whether another thread fetched a batch
        self.dataset: Any = None
        self.collate: Any = None
        self.clocked: list[Step] = []
        self._batches = 0               # fetched in this step, and whether a pass over a loader began in it
        self._begins = False
        self._sampler = Sampler(session.torch, self)
        self._began = 0
        self._paused = 0
        self._usage: dict[int, tuple[int, int]] = {}
        self._read: dict[int, int | None] = {}
        self._idle: dict[int, int] = {}

    def begin(self) -> None:
        self._watch_loader()
        self._watch_parts()
        gc.callbacks.append(self._collector)
        self.on_undo(lambda: gc.callbacks.remove(self._collector))
        self.replace(gc, "collect", self._collecting(gc.collect))
        if self.device == "cuda":
            device = self.session.inspection.devices[0]
            self.torch.cuda.reset_peak_memory_stats(device)
            self._retries = kinds.device_memory(self.torch, device)["retries"]
        self._usage = {pid: schedule(pid) for pid in self._processes()}
        self._read = {pid: read_bytes(pid) for pid in (getpid(), *self._usage)}
        self._idle = idle_ns()
        self._cpu = time.process_time_ns()
        self._kernel = resource.getrusage(resource.RUSAGE_SELF)
        self._began = self.clock()
        self.parts.start()

    def turn(self) -> None:
        """The clock has the first half of the steps for itself; in the other the sampler looks on."""
        self._lap()
        if self.left != -(self.steps // 2):
            return
        interval = sys.getswitchinterval()
        sys.setswitchinterval(_SWITCH_S)
        self.on_undo(lambda: sys.setswitchinterval(interval))
        self.on_undo(self._sampler.stop)
        self._sampler.start()

    def _lap(self) -> None:
        parts = self.parts.lap()
        _settle(parts, "optimizer")
        self.clocked.append(Step(self.session.evaluated, parts, self._batches, self._begins))
        self._batches, self._begins = 0, False

    def finish(self) -> None:
        self._lap()
        ended = self.clock()
        wall = ended - self._began
        own = time.process_time_ns() - self._cpu
        idle = idle_ns()
        kernel = resource.getrusage(resource.RUSAGE_SELF)
        self._sampler.stop()
        alive = {pid: since for pid, (worker, since) in self._feeding.items() if worker.is_alive()}
        below = [(schedule(pid), self._usage.get(pid, (0, 0))) for pid in alive]
        self.result.update(
            wall_ns=wall, **training_steps(self.clocked, self.steps // 2), process_cpu_ns=own, workers=len(below), num_workers=self.declared,
            worker_cpu_ns=sum(now[0] - then[0] for now, then in below),
            worker_queued_ns=sum(now[1] - then[1] for now, then in below), worker_ns=sum(ended - since for since in alive.values()),
            fetch_ns=self.fetch_ns, fetch_cpu_ns=self.fetch_cpu_ns,
            fetch_queued_ns=self.fetch_queued_ns, longest_fetch_ns=self.longest_ns,
            read_bytes=self._read_since(alive), idle_ns={str(cpu): idle[cpu] - before for cpu, before in self._idle.items() if cpu in idle},
            kernel_ns=round(1e9 * (kernel.ru_stime - self._kernel.ru_stime)), page_faults=kernel.ru_minflt - self._kernel.ru_minflt,
            gc_ns=sum(self.pauses), gc_pauses=len(self.pauses),
            gc_called=[[*place, ns] for place, ns in self.collected.most_common(1)], **self._sampler.result(),
            dataset=described(self.dataset, self.collate),
            fetched_elsewhere=self.elsewhere and self.dataset is None, python=sys.executable, memory=kinds.memory(self.session),
        )
        if self.device == "cuda":
            devices = self.session.inspection.devices
            memory = kinds.device_memory(self.torch, devices[0])
            memory["retries"] -= self._retries
            alone = kinds.uuid_of(self.torch, devices[0]) if len(devices) == 1 else ""
            self.result.update(device_memory=memory, device_index=devices[0].index, device_uuid=alone)

    def _watch_loader(self) -> None:
        from torch.utils.data.dataloader import _BaseDataLoaderIter

        original = _BaseDataLoaderIter.__next__
        clock, cpu, thread = self.clock, time.process_time_ns, threading.get_ident()
        own = f"/proc/self/task/{threading.get_native_id()}/schedstat"

        def queue() -> int:
            return _schedule(own)[1]

        def next_batch(this: Any) -> Any:
            if threading.get_ident() != thread or self.fetching:
                self.elsewhere |= not self.fetching
                return original(this)       # a prefetching thread of a library, or a loader inside a dataset
            self._meet(getattr(this, "_workers", []))
            self.declared = getattr(this, "_num_workers", 0)
            self.dataset, self.collate = this._dataset, this._collate_fn
            self.fetching += 1
            self.parts.enter("input")
            queued, began, used = queue(), clock(), cpu()
            self._begins |= getattr(this, "_num_yielded", None) == 0
            try:
                batch = original(this)
                self._batches += 1
                return batch
            finally:
                took = clock() - began
                self.fetch_cpu_ns += cpu() - used
                self.fetch_queued_ns += queue() - queued
                self.fetch_ns += took
                self.longest_ns = max(self.longest_ns, took)
                self.fetching -= 1
                self.parts.leave()

        self.fetch = next_batch.__code__
        self.replace(_BaseDataLoaderIter, "__next__", next_batch)

    def _watch_parts(self) -> None:
        torch = self.torch
        for name in ("backward", "grad"):
            timed = self.parts.around("backward", self._in_closure(getattr(torch.autograd, name)))
            self.replace(torch.autograd, name, torch._disable_dynamo(timed))
        self._watch_updates()
        if not self.session.inspection.compiled:        # dynamo guards on hooks
            self._watch_forward()

    def _watch_forward(self) -> None:
        from torch.nn.modules import module as hooks

        roots = {id(module) for module in self.session.context.modules}
        thread = threading.get_ident()

        def before(module: Any, inputs: Any) -> None:
            if id(module) in roots and threading.get_ident() == thread:
                self.parts.enter("forward")

        def after(module: Any, inputs: Any, output: Any) -> None:
            if id(module) in roots and threading.get_ident() == thread:
                self.parts.leave()

        self.on_undo(hooks.register_module_forward_pre_hook(before).remove)
        self.on_undo(hooks.register_module_forward_hook(after, always_call=True).remove)

    def _in_closure(self, original: Any) -> Any:
        """A backward pass. Inside of a step it is a closure's, and so was what the step did until now: only what follows the last
        one is the optimizer (as in `trace.phases`, where is said what that costs LBFGS)."""
        thread = threading.get_ident()

        @functools.wraps(original)
        def backward(*args: Any, **kwargs: Any) -> Any:
            if threading.get_ident() == thread:
                _settle(self.parts.ns, REST)
            return original(*args, **kwargs)

        return backward

    def _watch_updates(self) -> None:
        """The seam around `Optimizer.step`, and the `zero_grad` of each class: subclasses bring their own. Hooks cannot be
        added here, inside one."""
        session = self.session
        begins, ends = session.step_begins, session.step_ends

        def step_begins(optimizer: Any) -> None:
            begins(optimizer)
            self.parts.enter(_STEP)

        def step_ends(optimizer: Any) -> None:
            self.parts.leave()
            _settle(self.parts.ns, "optimizer")
            ends(optimizer)

        session.step_begins, session.step_ends = step_begins, step_ends
        self.on_undo(lambda: (vars(session).pop("step_begins"), vars(session).pop("step_ends")))
        owners = {next(cls for cls in type(o).__mro__ if "zero_grad" in vars(cls)) for o in session.optimizers.living()}
        for owner in owners:
            self.replace(owner, "zero_grad", self.parts.around("optimizer", owner.zero_grad))

    def _collector(self, phase: str, info: dict[str, int]) -> None:
        if phase == "start":
            self._paused = self.clock()
        elif self._paused:
            self.pauses.append(self.clock() - self._paused)

    def _collecting(self, original: Any) -> Any:
        """`gc.collect`: a collection that the script asks for has another remedy than those that Python begins by itself."""
        places = Places(self.torch)

        @functools.wraps(original)
        def collect(*args: Any, **kwargs: Any) -> Any:
            began = self.clock()
            try:
                return original(*args, **kwargs)
            finally:
                place = places.nearest(sys._getframe(1))
                if place is not None:
                    self.collected[place[:2]] += self.clock() - began

        return collect

    def _meet(self, workers: list[Any]) -> None:
        """The next batch comes from these. Others say nothing of it: those of an evaluation wait for their turn all the while. A loader
        may start new ones for each pass, so each has its own time here."""
        if workers is not self.workers:
            self.workers, now = workers, self.clock()
            for worker in workers:
                self._feeding.setdefault(worker.pid, (worker, self._began if worker.pid in self._usage else now))

    def _processes(self) -> list[int]:
        known = (worker for entry in self.session.loaders.values() for worker in entry["workers"])
        return sorted({worker.pid for worker in known if worker.is_alive()})

    def _read_since(self, workers: Collection[int]) -> int | None:
        """Fetched from storage in the window by this process and the workers that it has batches from; None: not told here, or some of
        these are gone."""
        if len(workers) < len(self._feeding):
            return None
        now = {pid: read_bytes(pid) for pid in (getpid(), *workers)}
        if None in now.values() or None in (self._read.get(pid, 0) for pid in now):
            return None
        return sum(count - (self._read.get(pid, 0) or 0) for pid, count in now.items() if count is not None)


def _settle(parts: dict[str, int], part: str) -> None:
    """What was clocked of an optimizer's step until now belongs to `part`."""
    if ns := parts.pop(_STEP, 0):
        parts[part] = parts.get(part, 0) + ns


class Sampler(threading.Thread):
    """Looks at the training thread and at the states of the workers.

    A thread can only look when the other one lets go of the interpreter, so after a long call of a C function that keeps
    hold of it the line behind that call is seen; the function is right in any case.
    """

    def __init__(self, torch: Any, window: Sampling):
        super().__init__(name="saturate-sampler", daemon=True)
        self._window = window
        self._places = Places(torch)
        self._thread = threading.get_ident()
        self._native = threading.get_native_id()
        self._done = threading.Event()
        self.lines: Counter[tuple[str, int, str]] = Counter()
        self.fetching = self.waiting = 0                # samples of the training thread
        self.workers = self.workers_waiting = 0         # of workers that are alive

    def run(self) -> None:
        draw = random.Random(0).uniform         # a fixed period could keep step with the training
        while not self._done.wait(draw(0.5 * PERIOD_S, 1.5 * PERIOD_S)):
            if self._window.fetching:
                self._look()
            for worker in self._window.workers:
                state = task_state(worker.pid, worker.pid)
                self.workers += state != ""
                self.workers_waiting += state == "D"

    def _look(self) -> None:
        frame = sys._current_frames().get(self._thread)
        if frame is None or not self._window.fetching:
            return
        place = self._places.fetched(frame, self._window.fetch)     # before anything lets the training thread go on
        self.fetching += 1
        self.waiting += task_state(getpid(), self._native) == "D"
        if place is not None:
            self.lines[place] += 1

    def stop(self) -> None:
        self._done.set()
        if self.is_alive():
            self.join()

    def result(self) -> dict[str, Any]:
        return {
            "fetch_samples": self.fetching, "fetch_waiting": self.waiting,
            "worker_samples": self.workers, "worker_waiting": self.workers_waiting,
            "lines": [[*place, count] for place, count in self.lines.most_common(10)],
        }


# -- /proc (proc(5)); None or "" where it does not tell ----------------------------------------------------------------


def schedule(pid: int) -> tuple[int, int]:
    """CPU time of all living threads of a process, and the time they waited for a core, nanoseconds; zeros: not told."""
    try:
        threads = [_schedule(f"/proc/{pid}/task/{thread}/schedstat") for thread in os.listdir(f"/proc/{pid}/task")]
    except OSError:         # gone meanwhile
        return 0, 0
    return sum(used for used, _ in threads), sum(waited for _, waited in threads)


def _schedule(path: str) -> tuple[int, int]:
    try:
        used, waited, *_ = _first_line(path).split()
        return int(used), int(waited)
    except (OSError, ValueError):       # gone meanwhile, or a kernel without schedstat
        return 0, 0


def idle_ns() -> dict[int, int]:
    """How long each processor has had nothing to do since the machine began, nanoseconds; {}: not told, as in sandboxes that show
    zeros. Source: proc_stat(5)."""
    try:
        with open("/proc/stat", encoding="ascii") as file:
            rows = [line.split() for line in file if line.startswith("cpu")]
        ticks = {int(row[0][3:]): sum(map(int, row[4:6])) for row in rows if row[0][3:].isdecimal()}
    except (OSError, ValueError):
        return {}
    return {cpu: count * 10**9 // os.sysconf("SC_CLK_TCK") for cpu, count in ticks.items()} if any(ticks.values()) else {}


def read_bytes(pid: int) -> int | None:
    """Bytes that a process has fetched from storage (not from the page cache)."""
    try:
        with open(f"/proc/{pid}/io", encoding="ascii") as file:
            return next(int(line.split()[1]) for line in file if line.startswith("read_bytes:"))
    except (OSError, ValueError, StopIteration):
        return None


def task_state(pid: int, thread: int) -> str:
    """The scheduler's letter: R running, S sleeping, D waiting for storage."""
    try:
        return _first_line(f"/proc/{pid}/task/{thread}/stat").rsplit(")", 1)[1].split()[0]
    except (OSError, IndexError):
        return ""


def _first_line(path: str) -> str:
    with open(path, encoding="utf-8", errors="replace") as file:
        return file.readline()
