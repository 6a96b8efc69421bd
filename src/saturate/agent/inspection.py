"""One step under observation: which modules are trained and called, and what else can only be seen from inside."""

from __future__ import annotations

import collections
import inspect
import itertools
import sys
import threading
import types
import weakref
from typing import Any

from saturate.agent import flopcount, motif, threadbound, usercompiled
from saturate.agent.attributes import replace
from saturate.agent.context import living
from saturate.agent.forwards import own_forward
from saturate.agent.observe import all_modules, device_kind, devices, trained_parameters
from saturate.records.facts import BY_HAND
from saturate.techniques import _closures
from saturate.techniques._autograd import computed_in
from saturate.techniques._updatable import READ_GRADIENTS

#: So much of the work must run in one dtype of autocast for the script to count as running in it.
MOST_OF_THE_WORK = 0.9


class Inspection:
    """One step under observation: which modules with trained parameters are called, outermost and in training mode.

    Roots alone do not do: a LightningModule owns everything, yet its `training_step` may call its children only. Under DistributedDataParallel,
    Lightning and Fabric put a function in place of its forward for the call, which runs `training_step`: what is called inside of those two
    counts. Where the user compiled anything, no hook may be set (dynamo guards on hooks), and the roots are taken as they are.
    """

    def __init__(self, session: Any):
        torch = session.torch
        self.session = session
        self.calls = 0
        self.sdpa_calls = 0
        self.backwards = 0                  # passes that ended
        self.backwards_in_steps = 0         # of them, those inside of optimizers' steps
        self.backwards_of_closures = 0      # in one call of the closure that a step is given, of all steps together
        self._work: collections.Counter[str | None] = collections.Counter()     # elements of parameters by the dtype of autocast
        self._around: str | None = None         # the dtype of autocast that the outermost module was called under
        self._computed: str | None = None       # where no module is watched: the dtype that a backward pass shows
        self.shapes: set[Any] = set()
        self.set_to_none: bool | None = None
        self.host_to_device_bytes = 0
        self.checkpointed = False
        self.differentiates_gradients = False
        self.distributed = False
        self.steps_in_forward = False       # an optimizer's step ran inside of the outermost module's forward
        self.gradients_read: bool | None = None
        self._counter: Any = None
        self._thread = threading.current_thread()       # not its number, which another thread gets once it has ended
        self._elsewhere = False         # whether modules ran in another thread
        self._called: dict[int, Any] = {}
        self._stack: list[int] = []
        self._outermost: Any = None
        self._undo: list[Any] = []
        parameters = trained_parameters(session)
        self.device = device_kind(parameters)
        self.devices = devices(parameters, self.device)
        self.device_name = torch.cuda.get_device_name(self.devices[0]) if self.device == "cuda" else ""
        wanted = {id(p) for p in parameters}
        everything = [m for m in all_modules(torch) if any(id(p) in wanted for p in m.parameters())]
        self.compiled = usercompiled.anything(everything)
        self._graph = usercompiled.Graph()
        children = {id(child) for m in everything for child in m._modules.values() if child is not None}
        self._roots = [m for m in everything if id(m) not in children]
        self._modules: tuple[weakref.ref[Any], ...] = ()
        if not self.compiled:
            self._watch_calls(everything)
            self._count_attention(torch)
            self._count_flops(torch)
            self._watch_gradients(torch)
        self._watch_backward(torch)
        self._watch_closures()
        self._watch_checkpoints()
        self._watch_zero_grad(torch)
        if self.device == "cuda":
            self._watch_copies(torch)

    def _watch_calls(self, modules: list[Any]) -> None:
        """By hooks of all modules: those of a module are pickled with it, and stay in its copies."""
        in_backward = running_backward(self.session.torch)
        watched = {id(m): own_forward(m) for m in modules}
        distributed = self.session.torch.nn.parallel.DistributedDataParallel

        def passes_on(m: Any) -> bool:
            return isinstance(m, distributed) or own_forward(m) is not watched[id(m)]

        def before(m: Any, args: Any) -> None:
            if id(m) in watched:
                self._elsewhere |= threading.current_thread() is not self._thread and not in_backward()
                if not self._stack and passes_on(m):
                    self.distributed |= isinstance(m, distributed)
                    return
                if not self._stack and m.training and self.session.torch.is_grad_enabled() and not in_backward():
                    self._called[id(m)] = m
                    self.calls += 1
                    self._outermost = m
                    self._around = self._autocast_now()
                if self._outermost is not None and not in_backward():
                    self._work[self._around or self._autocast_now()] += weight(m, self.session.torch)
                self._stack.append(id(m))

        def after(m: Any, args: Any, *keywords_and_output: Any) -> None:
            if id(m) in self._stack:        # an exception inside a forward leaves entries above ours
                del self._stack[self._stack.index(id(m)):]
                if m is self._outermost and not self._stack:
                    self._outermost = None
                    self._note_call(args, *keywords_and_output[:-1])

        hooks = self.session.torch.nn.modules.module
        known = inspect.signature(hooks.register_module_forward_hook).parameters
        keywords = {"with_kwargs": True} if "with_kwargs" in known else {}      # older versions keep them from global hooks
        guard = self.session.guard      # the script's forward calls these: what fails in them must not end it
        self._undo.append(hooks.register_module_forward_pre_hook(lambda *given: guard(before, *given)).remove)
        self._undo.append(hooks.register_module_forward_hook(lambda *given: guard(after, *given), always_call=True, **keywords).remove)

    def _autocast_now(self) -> str | None:
        torch = self.session.torch
        if not torch.is_autocast_enabled(self.device):
            return None
        dtype = torch.get_autocast_dtype(self.device)       # scripts whose format is an option enter autocast in float32 as well
        return None if dtype == torch.float32 else str(dtype).removeprefix("torch.")

    @property
    def autocast(self) -> str | None:
        """The dtype of autocast that most of the forward runs in. Modules inside are asked as well: Accelerate, the Trainer and some
        models enter autocast within the forward, where no hook of the outermost module runs. What the script excepts from autocast
        around the whole counts as inside of it: it would stay excepted whoever entered it. Of compiled code only the graph tells."""
        if self.compiled:
            return self._computed
        dtype, work = max(self._work.items(), key=lambda item: item[1], default=(None, 0))
        return dtype if work >= MOST_OF_THE_WORK * self._work.total() else None

    def _note_call(self, args: Any, kwargs: Any = types.MappingProxyType({})) -> None:
        torch = self.session.torch
        tensors = [value for value in (*args, *kwargs.values()) if isinstance(value, torch.Tensor)]
        self.shapes.add(tuple(tuple(tensor.shape) for tensor in tensors))

    def _count_attention(self, torch: Any) -> None:
        functional = torch.nn.functional
        original = functional.scaled_dot_product_attention

        def counted(*args: Any, **kwargs: Any) -> Any:
            self.sdpa_calls += 1
            return original(*args, **kwargs)

        functional.scaled_dot_product_attention = counted
        self._undo.append(lambda: setattr(functional, "scaled_dot_product_attention", original))

    def _count_flops(self, torch: Any) -> None:
        if self.session.plan["mode"] != "trial" or self.session.plan["techniques"]:
            return          # only the baseline is asked, and never where numerics are compared
        self._counter = flopcount.flop_counter(torch)
        counting = threadbound.enter_mode(self._counter)

        def stop() -> None:
            self._counter.off = True
            self._elsewhere |= threading.current_thread() is not self._thread
            self.session.leave(counting)

        self._undo.append(stop)

    @property
    def flops(self) -> int | None:
        return None if self._counter is None or self.flops_unknown else self._counter.flops

    @property
    def flops_unknown(self) -> str:
        """Why `flops` is None, where they were counted."""
        if self._counter is None:
            return ""
        return self._counter.unknown or flopcount.ELSEWHERE * self._elsewhere

    @property
    def flops_left_out(self) -> tuple[str, ...]:
        return tuple(sorted(self._counter.left_out)) if self._counter is not None else ()

    def _watch_zero_grad(self, torch: Any) -> None:
        for owner in (torch.optim.Optimizer, torch.nn.Module):
            self._watch_one_zero_grad(owner, owner.zero_grad)

    def _watch_one_zero_grad(self, owner: Any, original: Any) -> None:
        def zero_grad(this: Any, set_to_none: bool = True) -> None:
            self.set_to_none = bool(set_to_none)
            return original(this, set_to_none)

        owner.zero_grad = zero_grad
        self._undo.append(lambda: setattr(owner, "zero_grad", original))

    def _watch_gradients(self, torch: Any) -> None:
        """Does anything but torch's own optimizers and `zero_grad` read gradients? Techniques that free them must know."""
        if self.session.plan["techniques"]:
            return          # only the baseline is asked; a technique may watch by the same means
        self.gradients_read = False
        original = torch.nn.Parameter.grad

        def read(tensor: Any) -> Any:
            reader = sys._getframe(1).f_globals.get("__name__", "")
            if not reader.startswith(READ_GRADIENTS):
                self.gradients_read = True
            return original.__get__(tensor)

        self._undo.append(replace(torch.nn.Parameter, "grad", property(read, original.__set__, original.__delete__)))

    def _watch_backward(self, torch: Any) -> None:
        """What `backward` and `grad` of torch.autograd look up, whoever imported them how."""
        original = getattr(torch.autograd, "_engine_run_backward", None)
        if original is None:
            return

        def run(outputs: Any, gradients: Any, retain_graph: Any, create_graph: Any, *args: Any, **kwargs: Any) -> Any:
            self.differentiates_gradients |= bool(create_graph)
            if self.compiled and self._computed is None and not torch.compiler.is_compiling():
                self.session.guard(self._look_at_formats, outputs)
            return original(outputs, gradients, retain_graph, create_graph, *args, **kwargs)

        torch.autograd._engine_run_backward = run
        self._undo.append(lambda: setattr(torch.autograd, "_engine_run_backward", original))

    def _watch_closures(self) -> None:
        """What comes before a step may end in its closure, as the last micro-step does under Lightning. LBFGS calls it several times, and
        each of those makes all gradients anew: one call counts."""
        from torch.optim.optimizer import register_optimizer_step_pre_hook

        def before_step(optimizer: Any, args: Any, kwargs: Any) -> Any:
            began: list[int] = []       # passes before each call

            def called() -> None:
                if len(began) == 1:
                    self.backwards_of_closures += self.backwards - began[0]

            return _closures.around(args, kwargs, after=called, before=lambda: began.append(self.backwards))

        guard, disable = self.session.guard, self.session.torch._disable_dynamo
        self._undo.append(register_optimizer_step_pre_hook(disable(lambda *given: guard(before_step, *given))).remove)

    def _look_at_formats(self, outputs: Any) -> None:
        """While the graph still has what it saved. Nodes of a model whose weights are of such a format themselves say nothing."""
        torch = self.session.torch
        own = {p.dtype for module in self._roots for p in module.parameters()}
        for dtype in {torch.bfloat16, torch.float16} - own:
            if computed_in(outputs, dtype, torch):
                self._computed = str(dtype).removeprefix("torch.")

    def _watch_checkpoints(self) -> None:
        """Every kind of `torch.utils.checkpoint` looks this function up, whoever imported it how."""
        from torch.utils import checkpoint

        original = checkpoint._infer_device_type

        def noticed(*args: Any) -> Any:
            self.checkpointed = True
            return original(*args)

        checkpoint._infer_device_type = noticed
        self._undo.append(lambda: setattr(checkpoint, "_infer_device_type", original))

    def _watch_copies(self, torch: Any) -> None:
        for name in ("to", "cuda"):
            self._watch_one_copy(torch.Tensor, name, getattr(torch.Tensor, name))

    def _watch_one_copy(self, owner: Any, name: str, original: Any) -> None:
        def copied(this: Any, *args: Any, **kwargs: Any) -> Any:
            result = original(this, *args, **kwargs)
            if this.device.type == "cpu" and result.device.type == "cuda":
                self.host_to_device_bytes += this.numel() * this.element_size()
            return result

        self._undo.append(replace(owner, name, copied))

    @property
    def modules(self) -> tuple[Any, ...]:
        """What techniques act on, as far as the script still has it."""
        return living(self._modules)

    def saw_backward(self, tensors: Any) -> None:
        """A backward pass that began at `tensors` has ended."""
        self.backwards += 1
        self.backwards_in_steps += bool(self.session.stepping)
        if self.compiled:
            self._graph.saw(tensors)

    def saw_step(self) -> None:
        """An optimizer's step begins."""
        self.steps_in_forward |= self._outermost is not None

    def compiles(self, module: Any) -> bool | None:
        """Whether the script compiles this module's forward; None: it compiles something, and what is not known."""
        return self._graph.compiles(module) if self.compiled else False

    def finish(self) -> None:
        """Remove everything that was set, and decide which modules techniques act on."""
        for undo in reversed(self._undo):
            undo()
        self._undo.clear()
        modules = list(self._called.values()) or [m for m in self._roots if m.training]
        distributed = self.session.torch.nn.parallel.DistributedDataParallel
        inner = [m.module if isinstance(m, distributed) else m for m in modules]
        self._modules = tuple(weakref.ref(m) for m in inner if any(True for _ in m.parameters()))
        self.distributed |= any(isinstance(getattr(m, "_orig_mod", m), distributed) for m in modules)
        self._called.clear()
        self._roots, self._outermost = [], None     # no longer: the script may drop them

    @property
    def micro_steps(self) -> int:
        """Backward passes in one step (at least one); of a closure that is called several times for an update, those of one call."""
        return max(1, self.session.step.tokens.count("B") + self.backwards_of_closures)

    def describe(self) -> str:
        """The step in words: "forward x1, backward x4, AdamW.step". Neighbours of a kind are one entry, "Adam.step x36": some scripts
        have an optimizer for each parameter."""
        step = self.session.step
        names = [type(o).__name__ for o in self.session.optimizers.living()]
        words = [f"forward x{self.calls}"] if self.calls else []
        backwards = step.tokens.count("B") + (self.backwards_in_steps if step.token != motif.CLOSURE else 0)
        if backwards:
            words.append(f"backward x{backwards}")
        stepping = [name for index, name in enumerate(names) for _ in range(step.tokens.count(f"S{index}"))]
        for name, run in itertools.groupby(stepping):
            count = len(list(run))
            words.append(f"{name}.step" + (f" x{count}" if count > 1 else ""))
        if step.token == motif.CLOSURE:
            words.append(f"backward x1, within one {' '.join(names)}.step")
        if step.token == "B":
            words.extend(self._steps_between() or [BY_HAND])
        return ", ".join(words)


    def _steps_between(self) -> list[str]:
        """What optimizers do in a step of so many backward passes: the user said what ends it, not what is in it."""
        session = self.session
        backwards = max(1, session.counts.get("B", 0))
        found = []
        for optimizer in session.optimizers.living():
            times = round(session.optimizers.steps_of(optimizer) * session.step.count / backwards)
            found.append(f"{type(optimizer).__name__}.step" + (f" x{times}" if times > 1 else "" if times else " now and then"))
        return found


def running_backward(torch: Any) -> Any:
    """Tells whether a backward pass is running: what is called there is a forward that runs again."""
    task = getattr(torch._C, "_current_graph_task_id", None)
    return (lambda: task() != -1) if task is not None else (lambda: False)


def weight(module: Any, torch: Any) -> int:
    """How much one call of this module, without those inside, does: the elements of its parameters, but for tables that are looked up in,
    and at least 1, for parameters that a module inside holds and that are used without calling it. A script's module may have a method
    `parameters` of its own, which takes no arguments."""
    if isinstance(module, (torch.nn.Embedding, torch.nn.EmbeddingBag)):
        return 1
    lazy = torch.nn.parameter.is_lazy
    return max(1, sum(int(p.numel()) for p in module._parameters.values() if p is not None and not lazy(p)))
