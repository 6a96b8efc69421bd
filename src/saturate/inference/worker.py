"""A candidate's process: loads the user's model and inputs, applies the techniques, serves calls, times itself.

`process.Worker` starts it as a fresh interpreter with the user's `sys.path`, and is the other end of its socket. One request at a time, answered
in order: ("ok", value), ("raised", kind, reason, traceback), or the same with "ended": then the process takes no more requests. What the model
prints goes to the log. Calls run in inference mode, unless the model differentiates by itself; the module is in evaluation mode, unless it came
in evaluation mode with parts of it in training mode: that was done on purpose.
"""

from __future__ import annotations

import contextlib
import copy
import ctypes
import dataclasses
import errno
import gc
import importlib
import os
import socket
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

from saturate.errors import SaturateError, WorkloadFailed
from saturate.inference import batches as trees
from saturate.inference import compiling, gpu_failures, modes, session, users_code, wire
from saturate.inference import facts as observing
from saturate.inference.device_memory import DeviceMemory
from saturate.inference.failures import first_words
from saturate.inference.formats import OtherSizes
from saturate.inference.source import NotMade, Source
from saturate.inference.techniques import _wrap
from saturate.inference.techniques._api import FOR_ALL_S, Context, Entry, NotApplied, OutOfTime, Proof
from saturate.measure import placement
from saturate.records.inference import ModelFacts
from saturate.techniques._trees import copied

#: torch.export is given no longer: what needs an export would take as long again for each candidate.
EXPORT_S = 120.0

#: Of the time for preparation, a training stage may use so much: converting, compiling and the first call come after
#: it.
_TRAINING_SHARE = 0.6

#: A disk that does not take so much more is full. The page cache takes less without asking.
_LITTLE_BYTES = 1 << 18

#: glibc's limits grow up to 32 MiB.
_LARGEST_KEPT_BYTES = 31 * 2**20

#: What a technique that sets switches may touch and leave the model's export as every candidate would make it.
_BESIDE_THE_MODEL = {"threads"}

#: Calibration batches that layers are ranked with.
_RANKING_BATCHES = 8


def main(descriptor: int) -> None:
    """Answer requests until the other end is closed."""
    stream = socket.socket(fileno=descriptor)
    os.set_inheritable(descriptor, False)
    server = Server()
    while True:
        try:
            request, arguments = wire.receive(stream, device=server.device)
            answer = _answer(server, request, arguments)
        except wire.Closed:
            return
        except wire.Unreadable as error:
            text = traceback.format_exc()
            answer = "raised", "failed", f"the inputs cannot be used in another process: {error}", text
        try:
            wire.send(stream, answer, home=server.home)
        except wire.Unsendable as error:
            wire.send(stream, ("raised", "failed", f"the output cannot be sent to another process: {error}", ""))
        if answer[0] == "ended":
            return


def _answer(server: Server, request: str, arguments: tuple[Any, ...]) -> tuple[Any, ...]:
    try:
        return "ok", getattr(server, f"do_{request}")(*arguments)
    except users_code.RAISED as error:  # a model or technique raises anything; it is a fate
        text = traceback.format_exc()
        print(text, flush=True)
        kinds = {OutOfTime: "timeout", NotApplied: "not_applied", NotMade: "not_made", OtherSizes: "other_sizes", MemoryError: "out_of_memory"}
        kind = next((kind for cls, kind in kinds.items() if isinstance(_raised(error), cls)), "failed")
        fate = "ended" if server.device == "cuda" and gpu_failures.broken(server.torch) else "raised"
        if kind != "out_of_memory" and server.folder and _is_full(server.folder):      # libraries say anything, or nothing
            return fate, "disk_full", f"no space is left in {server.folder}; {server.reason(error)}", text
        return fate, kind, server.reason(error), text


def _raised(error: BaseException) -> BaseException:
    """What the user's own code raised, where `users_code.running` has named it."""
    return error.__cause__ if isinstance(error, WorkloadFailed) and error.__cause__ is not None else error


def _is_full(folder: Path) -> bool:
    """Whether a little more cannot be written there, or where temporary files go."""
    for place in (folder, tempfile.gettempdir()):
        try:
            with tempfile.TemporaryFile(dir=place) as file:
                file.write(bytes(_LITTLE_BYTES))
                file.flush()
        except OSError as error:
            if error.errno in (errno.ENOSPC, errno.EDQUOT):
                return True
    return False


@dataclasses.dataclass(frozen=True)
class Order:
    """What a process is to become. `techniques`: (module name, its file, options) in the order of application."""

    source: str
    artifact: str | None                # a folder; None: the source's model with the techniques
    techniques: list[tuple[str, str, dict[str, Any]]]
    keep: frozenset[str]
    folder: str
    threads: int
    limit_s: float
    memory_bytes: int | None
    facts: ModelFacts | None            # None: found in the source, or observed
    identity: str | None = None         # of what the source must hold: see `Source.open`
    home: frozenset[tuple[str, str]] = frozenset()      # classes that came by value: see `wire.send`


class Server:
    """What a process knows; `do_...` are the requests."""

    def __init__(self) -> None:
        self.device = "cpu"
        self.folder: Path | None = None
        self.torch: Any = None
        self.context: Context | None = None         # None in a process that serves an artifact
        self._source: Source | None = None          # the same
        self.call: Callable[..., Any] | None = None
        self.inputs: list[tuple[Any, ...]] = []
        self.facts = ModelFacts()
        self.home: frozenset[tuple[str, str]] = frozenset()
        self._parts: list[tuple[Any, Any]] = []     # modules of techniques with their options
        self._doing = ""                            # the technique at work, for the reason of a failure
        self._next = 0                              # input of the next timed call
        self._memory: DeviceMemory | None = None    # None on a CPU

    # -- preparation -----------------------------------------------------------------------------------------------

    def do_prepare(self, order: Order) -> dict[str, Any]:
        """Load, apply, and call once with every shape."""
        began = time.monotonic()
        import torch

        self.torch, self.home, self.folder = torch, order.home, Path(order.folder)
        torch.set_num_threads(order.threads)
        _grow_allocator(torch)
        source = Source.open(Path(order.source), order.identity)
        session.restore(torch, source.switches)
        if order.artifact is None:
            done = self._become_candidate(order, source, began)
        else:
            done = self._become_artifact(order, source)
        prepared = time.monotonic()
        self._call(_wrap.own(self.facts, self.inputs[0]))
        called = time.monotonic()
        longest = max(called - prepared, self._meet_other_shapes())
        proofs = [self._proof(module, options) for module, options in self._parts]
        peak = self.do_memory()
        self._settle()
        return {"prepare_s": time.monotonic() - began - (called - prepared), "first_call_s": called - prepared,
                "compile_s": compiling.seconds() or None, "longest_call_s": longest,
                "batch_bytes": max(trees.size_bytes(self.torch, batch) for batch in self.inputs),
                "done": done, "proofs": proofs, "device_peak_bytes": peak, "facts": self.facts,
                "whole_device": self._memory is not None and self._memory.whole_device,
                "notes": dict(self.context.notes) if self.context else {}}

    def _become_candidate(self, order: Order, source: Source, began: float) -> list[str]:
        torch, observed_s = self.torch, 0.0
        facts = order.facts or source.facts(torch)
        on_cpu = source.device == "cpu"
        model = _evaluated(source.model(torch), source) if on_cpu or facts is None else None
        if facts is None:       # the export comes first: see `try_export`
            starts = time.monotonic()
            able, problem = observing.try_export(torch, model, source.inputs(torch)[0], min(EXPORT_S, order.limit_s / 2))
            observed_s = time.monotonic() - starts
        self._take_device(source, order.memory_bytes)
        if not on_cpu:
            model = _evaluated(source.model(torch, in_place=True), source)
        model.to(self.device)
        others = source.others(torch, self.device)
        data = bool(order.techniques)       # the model itself looks at none: its memory is that of serving, as an artifact's is
        if facts is None:
            starts = time.monotonic()
            facts = observing.observe(
                torch, model, self.inputs, self.device, others=others, kind=source.kind, exportable=able, export_problem=problem,
                threads=source.threads, calibration_samples=source.calibration_samples,
                training_mode=source.training, trainable=source.trainable, student=source.student,
                generates=source.generates)
            source.keep_facts(torch, facts)
            observed_s += time.monotonic() - starts
        self.facts = facts
        self.context = Context(
            torch=torch, model=model, device=self.device, inputs=[_wrap.own(self.facts, batch) for batch in self.inputs],
            calibration=source.calibration(torch) if data else [], others=others if data else [],
            facts=facts, folder=Path(order.folder), threads=order.threads,
            train=source.train(torch) if data and source.trainable else None, keep=order.keep,
            deadline_s=began + _TRAINING_SHARE * order.limit_s, exports=source.exports,
            notes={FOR_ALL_S: str(observed_s)} if observed_s else {})
        self._source = source
        session.remember(self.context, source.switches)
        done = [self._apply(*technique) for technique in order.techniques]
        self.call = self.context.call or self.context.model
        return done

    def _become_artifact(self, order: Order, source: Source) -> list[str]:
        from saturate.inference import artifact

        self._take_device(source, order.memory_bytes)
        self.facts = order.facts or source.facts(self.torch) or ModelFacts(device=self.device)
        self.call = artifact.load(Path(str(order.artifact)), threads=order.threads)
        return []

    def _take_device(self, source: Source, memory_bytes: int | None) -> None:
        """Make the source's device this process's own, and put the inputs there. The memory limit of a GPU is the
        allocator's."""
        cuda = self.torch.cuda
        self.device = source.device.partition(":")[0]
        if self.device == "cuda":
            cuda.set_device(source.device if ":" in source.device else "cuda:0")
            if memory_bytes is not None:
                total_bytes = cuda.get_device_properties(cuda.current_device()).total_memory
                cuda.set_per_process_memory_fraction(min(1.0, memory_bytes / total_bytes))
            self._memory = DeviceMemory(self.torch)
        self.inputs = source.inputs(self.torch, self.device)

    def _apply(self, name: str, path: str, fields: dict[str, Any]) -> str:
        from saturate.inference.techniques import _registry

        assert self.context is not None
        module = _registry.load_one(name, path)
        options = module.Options(**fields)
        self._doing = module.TECHNIQUE.id
        trains = module.TECHNIQUE.stage == "train"
        on_purpose = modes.training_parts(self.context.model)
        with self.torch.enable_grad() if trains else self.torch.no_grad():
            said = module.apply(self.context, options)
        if trains:
            modes.evaluate(self.context.model, on_purpose & modes.training_parts(self.context.model))
        if module.TECHNIQUE.stage != "session" or {touch.resource for touch in module.TECHNIQUE.touches} - _BESIDE_THE_MODEL:
            self.context.exports = None
        self._doing = ""
        self._parts.append((module, options))
        return said

    def _proof(self, module: Any, options: Any) -> Proof:
        self._doing = module.TECHNIQUE.id
        proof = module.active(self.context, options)
        self._doing = ""
        return proof

    def _meet_other_shapes(self) -> float:
        """A shape that is new inside a timed block would compile there. The longest call's seconds."""
        met, longest = {trees.signature(self.torch, self.inputs[0])}, 0.0
        for batch in self.inputs[1:]:
            if (shapes := trees.signature(self.torch, batch)) not in met:
                met.add(shapes)
                began = time.monotonic()
                self._call(_wrap.own(self.facts, batch))
                longest = max(longest, time.monotonic() - began)
        return longest

    def _settle(self) -> None:
        """Give back what preparation left, so that the memory of serving is that of serving."""
        compiling = sys.modules.get("torch._inductor.async_compile")
        if compiling is not None:
            compiling.shutdown_compile_workers()        # inductor starts new ones should it need any
        gc.collect()
        gc.freeze()                     # what lives now lives as long as the process
        with contextlib.suppress(OSError, AttributeError):      # another C library has no malloc_trim
            ctypes.CDLL(None).malloc_trim(0)
        if self.device == "cuda":
            self.torch.cuda.empty_cache()
            self.torch.cuda.reset_peak_memory_stats()

    # -- requests --------------------------------------------------------------------------------------------------

    def do_run(self, inputs: tuple[Any, ...]) -> Any:
        """The output for these inputs, which the wire has put on the device."""
        return self._call(inputs)

    def do_outputs(self) -> list[list[Any]]:
        """For each input batch the tensors of the output, on the CPU."""
        # Copies: of inputs, because a model may write to them; of outputs, because a runtime may use them again.
        answers = (trees.tensors(self.torch, self._call(copy.deepcopy(batch))) for batch in self.inputs)
        return [[tensor.detach().to("cpu", copy=True) for tensor in answer] for answer in answers]

    def do_block(self, count: int, start: int | None, cpu: int | None = None, among: int | None = None) -> tuple[list[int], int | None]:
        """Nanoseconds of each of `count` calls, begun on `cpu`, and on which CPU they ended. The device is idle before and after
        each of them. `among`: so many inputs take turns."""
        call, inputs, clock = self.call, self.inputs, time.perf_counter_ns
        wait = self.torch.cuda.synchronize if self.device == "cuda" else _nothing
        prepare = self._seed if self.facts.random else _nothing
        first = self._next if start is None else start
        times: list[int] = []
        placement.move(cpu)
        collects = gc.isenabled()
        gc.disable()
        try:
            with self._mode():
                for number in range(count):
                    batch = _wrap.own(self.facts, inputs[(first + number % (among or count)) % len(inputs)])
                    prepare()
                    wait()
                    began = clock()
                    output = call(*batch)
                    wait()
                    times.append(clock() - began)
                    del output
        finally:
            self._next = first + count
            if collects:
                gc.enable()
        return times, placement.current()

    def do_memory(self) -> int | None:
        """The most that was taken of the device since the preparation, see `device_memory`; None on a CPU, and where nothing tells."""
        return None if self._memory is None else self._memory.peak_bytes()

    def do_store(self, folder: str) -> Entry:
        """Store the program in an empty folder. NotApplied where it cannot be stored."""
        if self.context is None:
            raise NotApplied("an artifact is stored already: copy it")
        with self.torch.no_grad():
            if self.context.save is not None:
                return self.context.save(Path(folder))
            from saturate.inference.formats import exported

            return exported.save(self.context, Path(folder))

    def do_sensitivity(self, limit_s: float) -> list[tuple[str, float]]:
        """Layers with their scores, see `sensitivity.rank`."""
        from saturate.inference import sensitivity

        if self.context is None:
            raise NotApplied("an artifact has no layers to rank")
        deadline_s = time.monotonic() + 0.8 * limit_s
        assert self._source is not None
        batches = [copied(batch, self._moved) for batch in self._source.calibration(self.torch)[:_RANKING_BATCHES]]
        return sensitivity.rank(self.torch, self.context.model, batches, deadline_s=deadline_s)

    def do_ask(self, function: str, arguments: tuple[Any, ...]) -> Any:
        """`function` ("module:name") with the context, or the callable of an artifact, as its first argument."""
        module, _, name = function.partition(":")
        return getattr(importlib.import_module(module), name)(self.context or self.call, *arguments)

    # -- calls -----------------------------------------------------------------------------------------------------

    def _call(self, inputs: tuple[Any, ...]) -> Any:
        assert self.call is not None
        if self.facts.random:
            self._seed()
        with self._mode():
            output = self.call(*inputs)
        if self.device == "cuda":
            self.torch.cuda.synchronize()
        return output

    def _mode(self) -> Any:
        """Without gradients, as far as the model can do without."""
        return getattr(self.torch, self.facts.mode)()

    def _moved(self, path: tuple[Any, ...], leaf: Any) -> Any:
        return leaf.to(self.device) if isinstance(leaf, self.torch.Tensor) else leaf

    def _seed(self) -> None:
        observing.seed(self.torch)

    def reason(self, error: BaseException) -> str:
        """One sentence on what happened, with the technique that it happened in."""
        text = str(error)
        if isinstance(error, SaturateError) and error.cause:
            text = f"{error.message}: {error.cause}"
        line = first_words(text)[:300]
        words = line if isinstance(error, (NotApplied, NotMade, OtherSizes, SaturateError)) else f"{type(error).__name__}: {line}"
        if self.device == "cuda":
            words += gpu_failures.who_holds(self.torch, _raised(error))
        return f"{self._doing}: {words}" if self._doing else words


def _evaluated(model: Any, source: Source) -> Any:
    """A part that is in training mode in a model that is not was put there on purpose."""
    return model.eval() if source.training else model


def _grow_allocator(torch: Any) -> None:
    """glibc keeps freed memory for the next call up to limits that grow with what was freed before, and gives the rest back
    to the system, which has to clear it anew at each call. So a process's speed hung on its past: a baseline that had
    exported the model once ran five times as fast as one that had not. All processes start where a long-lived one ends up."""
    torch.empty(_LARGEST_KEPT_BYTES, dtype=torch.uint8)     # freed at once, and never touched


def _nothing() -> None:
    """A CPU has nothing to wait for."""
