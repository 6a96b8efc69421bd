"""A window that asks what each module costs: time in the quickest of all steps but the last, operations and memory in the last one.

Time is the host's on a CPU and the device's (between two events on its current stream) elsewhere. There are few steps, and a
process that has to wait for another program in one of their forwards would have its wait in the mean. A forward that runs
inside the backward pass is recomputation: its operations are counted apart, because a model's own need leaves them out.
A step with an evaluation in it says nothing about a training step: it is not timed where there is another, and where the
counted one was such a step, the result is `evaluated` and has no operations.
"""

from __future__ import annotations

import contextlib
import sys
import threading
from collections.abc import Iterator
from typing import Any

from saturate.agent import flopcount, kinds, memorylines, threadbound
from saturate.agent.inspection import running_backward
from saturate.agent.timeline import elapsed_ms, recorded
from saturate.agent.window import Window

MOST_MODULES = 256

_EVALUATED = "each step that was counted held an evaluation (a call of eval()), whose operations are not the training's"


class ModuleCosts(Window):
    """The window "modules". `steps` is at least 2."""

    def __init__(self, session: Any, order: dict[str, Any]):
        super().__init__(session, order)
        self.names: dict[int, tuple[str, str]] = {}
        self.total: dict[int, float] = {}           # milliseconds, all calls
        self.inside: dict[int, float] = {}          # of them, in named modules below
        self.flops: dict[int, int] = {}
        self.uncounted: set[int] = set()            # modules with a product that no formula counts, or in another thread
        self.elsewhere = False
        self.bytes: dict[int, int] = {}
        self.saved: dict[Any, int] = {}             # storages kept for the backward pass
        self.devices = session.inspection.devices       # of the trained parameters: the current one may be another
        self.lines: Any = memorylines.KeptLines(session.torch)
        if self.device == "cuda":
            self.lines = memorylines.CudaLines(session.torch, self.devices)
        self.in_backward = running_backward(session.torch)
        self._create_graph: list[bool] = []         # of the backward passes that run, the innermost one last
        self._timed: list[tuple[list[int], Any, Any]] = []      # in this step: chain of open modules, start, end
        self._before: list[tuple[bool, list[tuple[list[int], Any, Any]]]] = []   # timed before: with an evaluation? what
        self._open: list[list[Any]] = []
        self._counter: Any = None
        self._held: list[threadbound.Entered] = []
        self._hooks: list[Any] = []
        self._thread = threading.get_ident()

    def begin(self) -> None:
        self.names = kinds.named_modules(self.session, MOST_MODULES)
        self._watch_backward()
        self._hook(self._timing_begins, self._timing_ends)
        self.on_undo(self._unhook)
        if self.steps == 1:
            self.turn()

    def turn(self) -> None:
        self._before.append((self.session.evaluated, self._timed))
        self._timed = []
        if self.left != 1 - self.steps:
            return
        self._unhook()
        from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

        self._modes = _get_current_dispatch_mode_stack
        self._parts = {id(part) for module in self.session.context.modules for part in module.modules()}
        self._counter = flopcount.flop_counter(self.torch, self._recomputing)
        self._held.append(threadbound.enter_mode(self._counter))
        self.on_undo(self._stop_counting)
        self._hook(self._counting_begins, self._counting_ends)
        self._watch_saved()
        if self.device == "cuda":
            self.on_undo(self.lines.stop)
            self.lines.start()

    def finish(self) -> None:
        self._add_up()
        evaluated = self.session.evaluated
        unknown = self._counter.unknown or flopcount.ELSEWHERE * self.elsewhere or _EVALUATED * evaluated
        known = kinds.bytes_of([p for m in self.session.context.modules for p in m.parameters()])
        self.result.update(
            modules=[{"name": name, "kind": kind, "forward_ms": self.total[identity],
                      "self_ms": self.total[identity] - self.inside.get(identity, 0.0),
                      "flops": None if evaluated or identity in self.uncounted else self.flops.get(identity),
                      "memory_bytes": self.bytes.get(identity)}
                     for identity, (name, kind) in self.names.items() if identity in self.total],
            flops=self._counter.flops, flops_unknown=unknown, evaluated=evaluated,
            flops_left_out=sorted(self._counter.left_out), recomputed_flops=self._counter.recomputed, parameter_bytes=known,
            saved_bytes=sum(self.saved.values()), memory_lines=self.lines.largest(), memory_lines_unknown=self.lines.unknown,
        )

    # -- hooks -----------------------------------------------------------------------------------------------------

    def _hook(self, before: Any, after: Any) -> None:
        from torch.nn.modules import module as hooks

        self._open.clear()
        self._hooks = [hooks.register_module_forward_pre_hook(before),
                       hooks.register_module_forward_hook(after, always_call=True)]

    def _unhook(self) -> None:
        while self._hooks:
            self._hooks.pop().remove()

    def _stop_counting(self) -> None:
        self._counter.off = True
        while self._held:
            self.session.leave(self._held.pop())

    def _watch_backward(self) -> None:
        """What `backward` and `grad` of torch.autograd look up, whoever imported them how."""
        torch = self.torch
        original = getattr(torch.autograd, "_engine_run_backward", None)
        if original is None:
            return

        def run(outputs: Any, gradients: Any, retain_graph: Any, create_graph: Any, *args: Any, **kwargs: Any) -> Any:
            self._create_graph.append(bool(create_graph))
            try:
                return original(outputs, gradients, retain_graph, create_graph, *args, **kwargs)
            finally:
                self._create_graph.pop()

        self.replace(torch.autograd, "_engine_run_backward", torch._disable_dynamo(run))

    def _recomputing(self) -> bool:
        """Whether an operator that runs now belongs to a forward inside a backward pass. autograd's own formulas, and the
        backward of a custom Function, run without gradients; not so where a graph of the gradients is made (a penalty on
        them): there only the forward of a module tells."""
        if not self.in_backward():
            return False
        own = self.torch.is_grad_enabled() and not (self._create_graph and self._create_graph[-1])
        return own or any(again for _, _, _, again, _ in self._open)

    # -- time ------------------------------------------------------------------------------------------------------

    def _timing_begins(self, module: Any, inputs: Any) -> None:
        if id(module) in self.names and not self.in_backward() and threading.get_ident() == self._thread:
            self._open.append([id(module), self._now()])

    def _timing_ends(self, module: Any, inputs: Any, output: Any) -> None:
        if id(module) not in self.names or self.in_backward() or threading.get_ident() != self._thread:
            return
        now = self._now()
        while self._open:               # an exception inside a forward leaves entries above ours
            chain = [identity for identity, _ in self._open]
            identity, began = self._open.pop()
            self._timed.append((chain, began, now))
            if identity == id(module):
                return

    def _now(self) -> Any:
        return recorded(self.torch, self.devices) if self.device == "cuda" else self.session.clock()

    def _add_up(self) -> None:
        """The device has been drained: every event has its time."""
        plain = [timed for evaluated, timed in self._before if not evaluated] or [timed for _, timed in self._before]
        for chain, took in min(map(self._took, plain), key=_of_outermost, default=[]):
            self.total[chain[-1]] = self.total.get(chain[-1], 0.0) + took
            if len(chain) > 1:
                self.inside[chain[-2]] = self.inside.get(chain[-2], 0.0) + took

    def _took(self, timed: list[tuple[list[int], Any, Any]]) -> list[tuple[list[int], float]]:
        """The milliseconds of what was timed in one step."""
        cuda = self.device == "cuda"
        times = [(chain, elapsed_ms(began, ended) if cuda else (ended - began) / 1e6) for chain, began, ended in timed]
        return [(chain, took) for chain, took in times if took is not None]

    # -- operations and memory -------------------------------------------------------------------------------------

    def _counting_begins(self, module: Any, inputs: Any) -> None:
        if self._unseen():
            if id(module) in self._parts or getattr(module, "_is_replica", False):      # DataParallel's copies
                self.elsewhere = True
                self._counter.missed += 1           # so that modules around it have no count either
                self.uncounted.add(id(module))
        elif id(module) in self.names:
            self._open.append([id(module), self._counter.flops, self._allocated(), self.in_backward(), self._counter.missed])

    def _counting_ends(self, module: Any, inputs: Any, output: Any) -> None:
        if id(module) not in self.names or self._unseen():
            return
        while self._open:
            identity, flops, allocated, again, missed = self._open.pop()
            added = self._counter.flops - flops
            if self._counter.missed > missed:
                self.uncounted.add(identity)
            if not again:
                self.flops[identity] = self.flops.get(identity, 0) + added
                self.bytes[identity] = self.bytes.get(identity, 0) + self._allocated() - allocated
            if identity == id(module):
                return

    def _unseen(self) -> bool:
        """Whether this is a thread that the counter does not see: a mode belongs to one. autograd hands it on to its own."""
        return self._counter not in self._modes()

    def _allocated(self) -> int:
        """Bytes that live tensors take, or on a CPU, whose allocator keeps no count, what is kept for the backward pass."""
        if self.device == "cuda":
            return sum(self.torch.cuda.memory_allocated(device) for device in self.devices)
        return sum(self.saved.values())

    def _watch_saved(self) -> None:
        """Count what autograd keeps. The hooks hand every tensor on as it is, detached: a node that keeps its own output
        would keep itself alive."""
        parameters = {kinds.storage_of(p)[0] for m in self.session.context.modules for p in m.parameters()}

        def pack(tensor: Any) -> Any:
            key, size = kinds.storage_of(tensor)
            if key not in parameters and keeping in self._held:
                if key not in self.saved and self.device != "cuda":
                    self.lines.add(size, sys._getframe(1))
                self.saved[key] = size
            return tensor.detach()

        def on_top() -> bool:
            top = self.torch._C._autograd._top_saved_tensors_default_hooks(True)
            return top is not None and top[0] is pack

        graph = self.torch.autograd.graph
        hooks = graph.saved_tensors_hooks(pack, lambda tensor: tensor)
        keeping = threadbound.Entered(hooks, on_top)
        self._held.append(keeping)
        original = graph.disable_saved_tensors_hooks

        @contextlib.contextmanager
        def disabled(message: str) -> Iterator[None]:
            """torch.func asks for a while without such hooks, and refuses where there are some: ours step aside."""
            aside = keeping in self._held and on_top()
            if aside:
                hooks.__exit__(None, None, None)
            try:
                with original(message):
                    yield
            finally:
                if aside:
                    hooks.__enter__()

        self.replace(graph, "disable_saved_tensors_hooks", disabled)


def _of_outermost(times: list[tuple[list[int], float]]) -> float:
    """The milliseconds of all forwards of a step together: those inside of others are in theirs."""
    return sum(took for chain, took in times if len(chain) == 1)
