"""Looking closely at a few steps, in windows between two gates. Nothing that is timed in one decides anything.

    sample    no profiler: input, its lines and what it waits for, pauses of the collector, memory, CPU time
    record    torch.profiler, with labels for input, forward, backward, optimizer and host syncs; exported as a trace
    modules   time by module; in the last step floating-point operations and memory by module instead
    replay    one batch given out again and again, so that steps run without their loader (`agent.synthetic`)

A window lets `skip` steps pass, looks at `steps`, and takes back everything that it set. The controller orders one step
more than that, because a window ends behind the last label of its last step, not inside it. Where a window cannot be
opened (the script profiles itself), `result["problem"]` says why, and the run goes on.
"""

from __future__ import annotations

import contextlib
import gc
import gzip
import os
import re
import shutil
import sys
import threading
import time
from typing import Any

from saturate.agent import kinds, motif, observe, threadbound
from saturate.agent.hostsyncs import HostSyncs
from saturate.agent.places import readable
from saturate.agent.window import Window

#: What the labels in a trace begin with; `trace.phases` knows them.
LABEL = "saturate."

#: Cost of one label under the profiler, with the hooks that set it: decides how many modules get one.
_LABEL_MS = 0.02
_LABEL_SHARE = 0.005

_TAKEN = "the script runs torch.profiler itself at this moment: switch that off, then profile"

_THREADS = "the steps run in more than one thread, and torch.profiler has to be stopped where it was started"

_HOST_NAME = re.compile(rb'("host_name"\s*:\s*)"[^"]*"')
_HEAD_BYTES = 1 << 16       # what stands before the events


def open_window(session: Any, order: dict[str, Any]) -> None:
    """Open the window of an order (`skip` at least 1). It ends by itself, and leaves what it saw in `session.seen`."""
    from saturate.agent import modulecosts, sampling, synthetic

    makers = {"sample": sampling.Sampling, "record": Recording, "modules": modulecosts.ModuleCosts, "replay": synthetic.Replay}
    window: Window = makers[order["kind"]](session, order)
    session.undo.append(window.withdraw)
    session.window, session.seen = window, None
    window.advance()


class Recording(Window):
    """One step of warm-up, then `steps` recorded ones, every one with a `ProfilerStep#n` label."""

    def __init__(self, session: Any, order: dict[str, Any]):
        super().__init__(session, order)
        self.profile: Any = None
        self._running = False
        self._entered: Any = None
        self._ours = False          # while this window itself calls the profiler
        self.began_ns = 0
        self.syncs: Any = None
        self.loading = 0
        self.in_backward = 0
        self._stack: list[tuple[int, Any]] = []
        self._thread = threading.get_ident()

    def prepare(self) -> None:
        torch = self.torch
        activities = [torch.profiler.ProfilerActivity.CPU]
        other = {"cuda": "CUDA", "xpu": "XPU"}.get(self.device)
        if other is not None and hasattr(torch.profiler.ProfilerActivity, other):
            activities.append(getattr(torch.profiler.ProfilerActivity, other))
        profile = torch.profiler.profile(
            activities=activities, record_shapes=True, with_stack=False, profile_memory=False,
            schedule=torch.profiler.schedule(wait=0, warmup=1, active=self.steps, repeat=1),
        )
        if self.order.get("recorder") == "nsys":
            profile = Marks(torch)
        if self._taken() or self._prepared() or self._elsewhere():
            return
        self.profile = profile
        self._watch_profilers()
        try:
            self._call(self._start)
        except RuntimeError as error:       # other tools on the same device (Nsight, CUPTI) can be in the way
            self.result["problem"] = f"torch.profiler could not be started: {error}"
            return
        self._running = True
        self.on_undo(self._stop)

    def _start(self) -> None:
        self._entered = threadbound.Entered(self.profile, lambda: True)

    def _taken(self) -> bool:
        """Whether the script profiles itself just now: there is one profiler per process, and it is the script's."""
        if self.torch.autograd._profiler_enabled():
            self.result["problem"] = _TAKEN
        return "problem" in self.result

    def _prepared(self) -> bool:
        """Whether one of the script's profilers warms up: it is not enabled yet, and a second one would end the process."""
        kind = self.torch.autograd.profiler.profile
        if any(each.entered and each.kineto_results is None for each in gc.get_objects() if issubclass(type(each), kind)):
            self.result["problem"] = _TAKEN
        return "problem" in self.result

    def _elsewhere(self) -> bool:
        """Whether the steps run in several threads. A profiler that is stopped in another one ends the process."""
        if self.session.several_threads:
            self.result["problem"] = _THREADS
        return bool(self.session.several_threads)

    def _watch_profilers(self) -> None:
        """End the recording before a profiler of the script's starts (its schedule may reach its turn at any step)."""
        profiler = self.torch.autograd.profiler

        def first_end_ours(original: Any) -> Any:
            def start(*args: Any, **kwargs: Any) -> Any:
                if self._running and not self._ours:
                    self.result["problem"] = _TAKEN
                    self._stop()
                return original(*args, **kwargs)

            return start

        for name in ("_prepare_profiler", "_enable_profiler"):      # what every way to start one calls
            if hasattr(profiler, name):
                self.replace(profiler, name, first_end_ours(getattr(profiler, name)))

    def _call(self, action: Any) -> None:
        self._ours = True
        try:
            action()
        finally:
            self._ours = False

    def begin(self) -> None:
        if not self._running or self._taken() or self._elsewhere():
            return
        torch = self.torch
        label = torch.autograd.profiler.record_function
        self._keep_from_compiler()
        self._watch_labels(label)
        self._watch_loader()
        self._watch_backward(label)
        if not self.session.inspection.compiled:    # dynamo guards on hooks: one more would compile everything again
            self._watch_forward(label)
        self.syncs = HostSyncs(torch, self.device, self.session.clock, lambda text: label(f"{LABEL}{text}"),
                               lambda: self.loading)
        self.on_undo(self.syncs.off)
        self.syncs.on()
        gc_label: list[Any] = []

        def collector(phase: str, info: dict[str, int]) -> None:
            if threading.get_ident() != self._thread:
                return
            if phase == "start":
                gc_label.append(label(f"{LABEL}gc"))
                gc_label[-1].__enter__()
            elif gc_label:
                gc_label.pop().__exit__(None, None, None)

        gc.callbacks.append(collector)
        self.on_undo(lambda: gc.callbacks.remove(collector))
        self.began_ns = time.time_ns()
        self._call(self.profile.step)

    def turn(self) -> None:
        if self.began_ns and self._running and not self._elsewhere():
            self._call(self.profile.step)

    def finish(self) -> None:
        if not self.began_ns or not self._running or self._elsewhere():
            return
        self._stop()
        ended_ns = time.time_ns()
        self.result["syncs"] = [[*key, *value] for key, value in self.syncs.found.items()]
        self.result["compiler"] = kinds.compiler(self.session, self.began_ns, ended_ns)
        self.result["off_device"] = kinds.off_device(self.session)
        if isinstance(self.profile, Marks):
            return
        try:
            self.result["trace"] = _compressed(_exported(self.profile, self.order["folder"], f"trace-rank{observe.rank()}.json"))
        except OSError as error:        # torch keeps to itself that it could not write: then there is no file
            why = "torch.profiler wrote none" if isinstance(error, FileNotFoundError) else error.strerror
            self.result["problem"] = f"the trace could not be written ({why}): free space in the study folder, or name another one with --dir"

    def draining(self) -> Any:
        """A label: a wait of the recorder's must not be taken for one of the script's."""
        return self.torch.autograd.profiler.record_function(f"{LABEL}drain") if self._running else super().draining()

    def _stop(self) -> None:
        if self._running:
            self._running = False
            self._call(lambda: self.session.leave(self._entered))

    def _keep_from_compiler(self) -> None:
        """What compiled code calls in Python is compiled as well: our own functions would look like recompilations."""
        rules = sys.modules.get("torch._dynamo.trace_rules")
        if rules is None:
            return
        before = list(rules.SKIP_DIRS)

        def undo() -> None:
            rules.SKIP_DIRS[:] = before
            rules._recompile_re()

        rules.add("saturate.agent")
        self.on_undo(undo)

    # -- labels ----------------------------------------------------------------------------------------------------

    def crosses_label(self) -> bool:
        """Whether the step ended inside torch's label around `Optimizer.step`, or inside ours around a backward pass. Where one call of
        the optimizer is the whole training, torch's label is around all steps, and began before any was recorded."""
        if not self.began_ns:
            return False
        if self.in_backward or self.session.step.token == motif.CLOSURE:
            return bool(self.in_backward)
        file = self.torch.optim.Optimizer.profile_hook_step.__code__.co_filename
        frame = sys._getframe(1)
        while frame is not None:
            if frame.f_code.co_filename == file and frame.f_code.co_name == "wrapper":
                return True
            frame = frame.f_back
        return False

    def _watch_labels(self, label: Any) -> None:
        original = label.__exit__

        def leave(this: Any, *exception: Any) -> Any:
            result = original(this, *exception)
            if self._after is not None and this.name.startswith("Optimizer.step#"):
                self.settle()
            return result

        self.replace(label, "__exit__", leave)

    def _watch_loader(self) -> None:
        """torch labels every `__next__` itself; here only what happens inside is told apart from the rest of the step."""
        from torch.utils.data.dataloader import _BaseDataLoaderIter

        original = _BaseDataLoaderIter.__next__

        def next_batch(this: Any) -> Any:
            self.loading += 1
            try:
                return original(this)
            finally:
                self.loading -= 1

        self.replace(_BaseDataLoaderIter, "__next__", next_batch)

    def _watch_backward(self, label: Any) -> None:
        torch = self.torch

        def labelled(original: Any) -> Any:
            def backward(*args: Any, **kwargs: Any) -> Any:
                self.in_backward += 1
                try:
                    with label(f"{LABEL}backward"):
                        return original(*args, **kwargs)
                finally:
                    self.in_backward -= 1
                    if not self.in_backward and self._after is not None and not self.crosses_label():
                        self.settle()

            return torch._disable_dynamo(backward)

        for name in ("backward", "grad"):
            self.replace(torch.autograd, name, labelled(getattr(torch.autograd, name)))

    def _watch_forward(self, label: Any) -> None:
        """A label around the forward of the trained modules and, as far as that stays cheap, of those inside them."""
        from torch.nn.modules import module as hooks

        most = max(1, int(self.order.get("step_ms", 0.0) * _LABEL_SHARE / _LABEL_MS))
        names = {identity: readable(f"{LABEL}module {name} ({kind})")
                 for identity, (name, kind) in kinds.named_modules(self.session, most).items()}

        def before(module: Any, inputs: Any) -> None:
            text = names.get(id(module))
            if text is not None and threading.get_ident() == self._thread:
                self._stack.append((id(module), label(text)))
                self._stack[-1][1].__enter__()

        def after(module: Any, inputs: Any, output: Any) -> None:
            if id(module) not in names or threading.get_ident() != self._thread:
                return
            while self._stack:          # an exception inside a forward leaves labels above ours
                identity, opened = self._stack.pop()
                opened.__exit__(None, None, None)
                if identity == id(module):
                    return

        self.on_undo(hooks.register_module_forward_pre_hook(before).remove)
        self.on_undo(hooks.register_module_forward_hook(after, always_call=True).remove)


class Marks:
    """Stands in for torch.profiler where Nsight Systems records: it opens nsys's capture range, and emits operators and
    labels as NVTX ranges."""

    def __init__(self, torch: Any):
        self._torch = torch
        self._steps = 0
        self._label: Any = None
        self._emit: Any = None

    def start(self) -> None:
        """Nothing has to warm up."""

    def __enter__(self) -> Marks:
        self.start()
        return self

    def __exit__(self, *exception: Any) -> None:
        self.stop()

    def step(self) -> None:
        profiler = self._torch.autograd.profiler
        if self._emit is None:
            self._torch.cuda.cudart().cudaProfilerStart()
            self._emit = profiler.emit_nvtx(record_shapes=True)
            self._emit.__enter__()
        self._end()
        self._steps += 1
        self._label = profiler.record_function(f"ProfilerStep#{self._steps}")
        self._label.__enter__()

    def stop(self) -> None:
        self._end()
        if self._emit is not None:
            self._emit.__exit__(None, None, None)
            self._torch.cuda.cudart().cudaProfilerStop()

    def _end(self) -> None:
        label, self._label = self._label, None
        if label is not None:
            label.__exit__(None, None, None)


def _exported(profile: Any, folder: str, name: str) -> str:
    """Export the trace to `folder`; its path. torch gets a path through a descriptor: it takes no folder that is not UTF-8, and
    drops line feeds from what it takes."""
    handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        profile.export_chrome_trace(f"/proc/self/fd/{handle}/{name}")
    finally:
        os.close(handle)
    return os.path.join(folder, name)


def _compressed(path: str) -> str:
    """Replace an exported trace by its gzip, without the name of this machine; its path. Where that fails, nothing of the trace is left:
    half of one could be taken for a trace, and fills the disk."""
    try:
        with open(path, "rb") as source, gzip.open(f"{path}.gz", "wb", compresslevel=3) as target:
            target.write(_HOST_NAME.sub(rb'\1""', source.read(_HEAD_BYTES)))
            shutil.copyfileobj(source, target, 1 << 20)
    except OSError:
        for part in (path, f"{path}.gz"):
            with contextlib.suppress(OSError):
                os.unlink(part)
        raise
    os.unlink(path)
    return f"{path}.gz"
