"""The life of activation checkpointing in a process: one step is measured while every block recomputes, a plan is made of
what was seen, and the plan is followed.

A block is recomputed only after a rehearsal showed that running its forward twice is running it once: the same bits, no
argument, attribute or hook touched. The others run as they always did.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import math
import time
from collections.abc import Callable, Sequence
from typing import Any

from saturate.techniques import _activations, _autograd, _common
from saturate.techniques._api import NotApplied
from saturate.techniques._budget import KEEP, OPERATORS, WHOLE, Cost, Profile, Visit, headline
from saturate.techniques._inputs import growth, marked, shapes, without_cache
from saturate.techniques._interrupts import from_signal_handler
from saturate.techniques._replay import buffers, checkpointed, hooked, why_not_arguments
from saturate.techniques._surroundings import Surroundings
from saturate.techniques._weakly import weakly

#: Outside of what compiles or casts a forward.
ORDER = 95

#: Training forwards after which nothing is measured any more, whether or not there was a backward pass and a step of every
#: optimizer.
MOST_FORWARDS = 64

Plan = Callable[[Profile, float], Sequence[str]]


class Block:
    """One block: what was learnt about it, or why it is left alone."""

    def __init__(self, module: Any, index: int, name: str):
        self.module, self.index, self.name = module, index, name
        self.refusal = ""
        self.outlived = False           # whether the refusal is that its surroundings changed between its forward and the backward
        self.traces: dict[Any, _activations.Trace] = {}     # by the shapes of its arguments
        self.buffers: set[tuple[str, str]] = set()
        self.flags: set[tuple[bool, ...]] = set()       # of its parts, in forwards of which it is known what they change
        self.operators_why_not = ""
        self.forward_ns: list[float] = []

    def changes(self, module: Any) -> tuple[tuple[str, str], ...]:
        """The buffers that a forward may change: all of them with other parts in training mode than were seen, as running statistics
        that rested at first."""
        return tuple(self.buffers) if _flags(module) in self.flags else buffers(module)


class Checkpointing:
    """`plan(profile, growth)` chooses the mode of each block, for inputs that are `growth` times those measured, or raises
    NotApplied; `report` is told once, when the first block was recomputed as planned, and `refuse` why nothing will be."""

    def __init__(self, context: Any, plan: Plan, report: Callable[[str], None], refuse: Callable[[str], None]):
        self.torch, self.device = context.torch, _common.device_of(context)
        self.context, self.plan, self.report, self.refuse = context, plan, report, refuse
        self.phase = "measuring"
        self.blocks: list[Block] = []
        self.profile: Profile | None = None
        self.modes: Sequence[str] = ()
        self.recomputed = 0
        self._plans: dict[float, Sequence[str]] = {}
        self._roots: set[int] = set()
        self._shapes: dict[int, tuple[Any, ...]] = {}
        self._trained: set[tuple[Any, ...]] = set()     # by root, which parameters were in the measured step
        self._storages = _activations.Storages(self.torch)
        self._parameters: set[int] = set()
        self._passes: list[tuple[Visit, ...]] = []
        self._visits: list[Visit] = []
        self._outside: set[int] = set()
        self._kept: set[int] = set()
        self._unread: list[tuple[Block, Any, int]] = []     # arguments with their versions, that only a second run reads
        self._arounds: list[tuple[Block, Surroundings]] = []
        self._forwards = self._depth = 0
        self._in_backward = False
        self._last_node = -1
        self._unstepped: set[int] = set()
        self._cleanup: list[Callable[[], None]] = []
        self._headline = ""
        self._repeats = False       # whether a graph is gone through more than once: products are kept for one time only
        self._own = False           # whether a call of torch's checkpoint is ours
        self._foreign = False       # whether there was one of the script's
        self._measured_anew = False

    # -- setting up --------------------------------------------------------------------------------------------------

    def install(self, roots: Sequence[Any], blocks: Sequence[tuple[str, Any]]) -> int:
        """Wrap the trained modules and their blocks; the number of blocks, but for those whose forward was replaced."""
        refusals = []
        for name, module in blocks:
            block = Block(module, len(self.blocks), name)
            try:
                self.context.wrap_forward(module, ORDER, functools.partial(self._wrap_block, block))
            except NotApplied as refusal:
                refusals.append(refusal)
                continue
            self.blocks.append(block)
        if not self.blocks:
            raise refusals[0] if refusals else NotApplied("the trained modules have no blocks that could be recomputed")
        for root in roots:
            self.context.wrap_forward(root, ORDER, self._wrap_root, around=True)     # the blocks inside are what is recomputed
            self._roots.add(id(root))
            tensors = (*root.parameters(), *root.buffers())
            self._parameters.update(self._storages.key(tensor) for tensor in tensors)
        self.modes = [WHOLE] * len(self.blocks)
        self._listen()
        return len(self.blocks)

    def _listen(self) -> None:
        """Until the plan is made: backward passes end a pass, and every optimizer's step ends the step."""
        autograd = self.torch.autograd
        original = autograd.backward

        @functools.wraps(original)
        def backward(tensors: Any, *args: Any, **kwargs: Any) -> Any:
            if self.phase != "measuring":
                return original(tensors, *args, **kwargs)
            tensors = _autograd.roots(tensors, self.torch)
            self._guarded(self._ends_pass, tensors)
            self._in_backward = True
            try:
                return original(tensors, *args, **kwargs)
            finally:
                self._in_backward = False

        listener = self.torch._disable_dynamo(backward)

        def restore() -> None:
            if vars(autograd)["backward"] is listener:      # else somebody wrapped it again, and it passes through
                autograd.backward = original

        autograd.backward = listener
        self._cleanup.append(restore)
        self._unstepped = set(map(id, self.context.optimizers))
        for optimizer in self.context.optimizers:
            self._cleanup.append(optimizer.register_step_post_hook(
                lambda stepped, args, kwargs: self._unstepped.discard(id(stepped))).remove)
        self.context.on_undo(weakly(self._deaf))

    def _guarded(self, work: Callable[..., None], *arguments: Any) -> None:
        """What is only for us must not stop the script's training."""
        try:
            work(*arguments)
        except Exception as error:  # the script's own graph is walked; nothing is applied
            if from_signal_handler(error):
                raise
            self._stop(f"it could not be measured: {type(error).__name__}: {error}")

    def _deaf(self) -> None:
        while self._cleanup:
            self._cleanup.pop()()

    # -- the wrappers ------------------------------------------------------------------------------------------------

    def _wrap_root(self, inner: Any) -> Any:
        def forward(module: Any, *args: Any, **kwargs: Any) -> Any:
            if self.phase == "off" or _must_run_plainly(self.torch):
                return inner(module, *args, **kwargs)
            changed = without_cache(module, args, kwargs)
            output = self._run_root(inner, module, args, changed)
            return output if changed is kwargs else marked(output)

        return forward

    def _run_root(self, inner: Any, module: Any, args: Any, kwargs: Any) -> Any:
        if self.phase == "measuring" and id(module) in self._roots and not self._in_backward and not self._depth:
            if self._passes and (not self._unstepped or self._forwards >= MOST_FORWARDS):
                if self._begins_anew():
                    return self._measured_root(inner, module, args, kwargs)
                self._guarded(self._decide)
            elif self._forwards >= MOST_FORWARDS and not self._passes:
                self._stop("no backward pass was seen")
            else:
                return self._measured_root(inner, module, args, kwargs)
        if self.phase == "following":
            known = _trained(module) in self._trained or id(module) not in self._roots
            more = growth(self._shapes.get(id(module)), shapes((args, kwargs), self.torch)) if known else math.inf
            self.modes = self._modes_for(more)
        return inner(module, *args, **kwargs)

    def _wrap_block(self, block: Block, inner: Any) -> Any:
        def forward(module: Any, *args: Any, **kwargs: Any) -> Any:
            torch = self.torch
            if self.phase == "off" or block.refusal or _must_run_plainly(torch):
                return inner(module, *args, **kwargs)
            if torch.nn.utils.parametrize._cache_enabled:
                block.refusal = "its weights are computed once for several forwards (parametrize.cached), and not in each of two runs"
                return inner(module, *args, **kwargs)
            if self.phase == "measuring":
                if module is not block.module or not self._depth or self._in_backward or self._foreign:
                    return inner(module, *args, **kwargs)
                return self._measured_block(block, inner, module, args, kwargs)
            mode = self.modes[block.index]
            if mode == KEEP or why_not_arguments((*args, *kwargs.values()), torch) or hooked(module):
                return inner(module, *args, **kwargs)
            contexts = self._keep_products if mode == OPERATORS else None
            return checkpointed(torch, inner, module, args, kwargs, block.changes(module), contexts, self._replayed)

        return forward

    def _keep_products(self) -> tuple[Any, Any]:
        from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts

        def policy(_: Any, func: Any, *args: Any, **kwargs: Any) -> Any:
            product = _activations.is_product(func, args, kwargs)
            return CheckpointPolicy.MUST_SAVE if product else CheckpointPolicy.PREFER_RECOMPUTE

        return create_selective_checkpoint_contexts(policy)

    def _replayed(self, number: int) -> None:
        self.recomputed += 1
        self._repeats = self._repeats or number > 1
        if self._headline and self.phase == "following":
            self.report(self._headline)
            self._headline = ""

    # -- measuring ---------------------------------------------------------------------------------------------------

    def _measured_root(self, inner: Any, module: Any, args: Any, kwargs: Any) -> Any:
        from torch.utils import checkpoint

        self._forwards += 1
        self._shapes[id(module)] = shapes((args, kwargs), self.torch)
        self._trained.add(_trained(module))
        self._depth += 1
        infer = checkpoint._infer_device_type

        def noticed(*values: Any) -> Any:       # looked up by every kind of checkpoint, whoever imported it how
            if not self._own:
                self._foreign = True
            return infer(*values)

        checkpoint._infer_device_type = noticed
        try:
            with self.torch.autograd.graph.saved_tensors_hooks(self._saved_outside, lambda tensor: tensor):
                output = inner(module, *args, **kwargs)
        except BaseException:
            self._visits, self._outside = [], set()     # of a forward that has no backward
            raise
        finally:
            checkpoint._infer_device_type = infer
            self._depth -= 1
        self._flush()
        self._kept.update(self._storages.keys((args, kwargs, output)))
        nodes = [t.grad_fn._sequence_nr() for t in _common.tensors(output, self.torch) if t.grad_fn is not None]
        self._last_node = max(nodes, default=-1)
        return output

    def _saved_outside(self, tensor: Any) -> Any:
        self._outside.add(self._storages.key(tensor))
        return tensor

    def _flush(self) -> None:
        found = frozenset(self._outside - self._parameters)
        self._outside = set()
        if found:
            self._visits.append(Visit(read=found))

    def _measured_block(self, block: Block, inner: Any, module: Any, args: Any, kwargs: Any) -> Any:
        torch = self.torch
        signature = shapes((args, kwargs), torch)
        rehearsed = signature in block.traces
        device = next((p.device for p in module.parameters() if p.device.type == self.device.type), self.device)     # of several
        try:
            trace = block.traces[signature] if rehearsed else _activations.rehearse(
                torch, device, inner, module, args, kwargs, self._parameters, self._storages)
        except _activations.NotRepeatable as reason:
            block.refusal = str(reason)
            return inner(module, *args, **kwargs)
        self._flush()
        watch = _activations.Stopwatch(torch, device)
        shielded, more = self._shielded(block, trace, args, kwargs)
        before = None if rehearsed else _activations.Before(module, args, kwargs, torch)
        self._own = True
        around = Surroundings(module, torch)
        self._arounds.append((block, around))
        try:
            output = watch.time(checkpointed, torch, inner, module, shielded, more, trace.buffers, None, self._replayed, around)
        finally:
            self._own = False
            self._outside.clear()       # the arguments, which the checkpoint saves
        if not rehearsed:
            if not _activations.same_output(trace.output, output, torch):
                block.refusal = "a second run of its forward gives other values"
                return before.again(inner, module, args, kwargs)
            trace.output = None
            block.traces[signature] = trace
        block.forward_ns.append(watch.ns())
        block.buffers.update(trace.buffers)
        block.flags.add(_flags(module))
        block.operators_why_not = block.operators_why_not or trace.operators_why_not
        given = self._storages.keys((args, kwargs))
        results = self._storages.keys(output)
        self._visits.append(Visit(
            block=block.index, inner_bytes=trace.inner_bytes, arguments=frozenset(given) - self._parameters,
            read=frozenset(given[i] for i in trace.read_arguments) - self._parameters,
            results=frozenset(results[i] for i in trace.read_results),
            product_bytes=trace.product_bytes, needed_bytes=trace.needed_bytes, buffer_bytes=trace.buffer_bytes))
        return output

    def _shielded(self, block: Block, trace: _activations.Trace, args: Any, kwargs: Any) -> tuple[Any, Any]:
        """The arguments, with copies of those that the backward would not read without us: the script may change them in
        place after the forward. Where it does, the block is left alone from then on."""
        count = itertools.count()

        def shield(tensor: Any) -> Any:
            if next(count) in trace.read_arguments:
                return tensor
            self._unread.append((block, tensor, tensor._version))
            return tensor.clone()

        return _common.map_tensors((args, kwargs), shield, self.torch)

    def _ends_pass(self, outputs: tuple[Any, ...]) -> None:
        for block, tensor, version in self._unread:
            if tensor._version != version:
                block.refusal = "an argument is modified in place after its forward"
        self._unread.clear()
        for block, around in self._arounds:
            if changed := around.changed():
                block.refusal, block.outlived = f"{changed}, which it may read, is changed after its forward", True
        self._arounds.clear()
        if not self._visits:
            return
        after, leaves = _activations.saved_after(outputs, self._last_node, self._storages, self.torch)
        self._kept |= leaves
        if after - self._parameters:
            self._visits.append(Visit(read=frozenset(after - self._parameters)))
        self._passes.append(tuple(self._visits))
        self._visits = []

    def _begins_anew(self) -> bool:
        """Measure the next step instead, once, where surroundings of a block changed behind its forward: a first step sets what
        stays from then on (Hugging Face's classification losses note the kind of problem in the model's configuration)."""
        outlived = [block for block in self.blocks if block.outlived]
        if not outlived or self._measured_anew or self._foreign:
            return False
        self._measured_anew = True
        for block in outlived:
            block.refusal, block.outlived = "", False
        for block in self.blocks:
            block.forward_ns.clear()
        self._passes, self._visits, self._kept, self._forwards = [], [], set(), 0
        self._unstepped = set(map(id, self.context.optimizers))
        return True

    # -- the plan ----------------------------------------------------------------------------------------------------

    def _decide(self) -> None:
        self._deaf()
        if self._foreign:
            return self._stop("the script recomputes activations itself")
        looking_ns = None if self._repeats else self._looking_ns()
        costs = tuple(_cost(block, self.blocks, looking_ns) for block in self.blocks)
        self.profile = profile = Profile(
            tuple(self._passes), dict(self._storages.sizes), costs, frozenset(self._kept), self._why_no_products(looking_ns))
        if not profile.usable(WHOLE):
            return self._stop(self._why_nothing())
        try:
            modes = self.plan(profile, 1.0)
        except NotApplied as refusal:
            return self._stop(str(refusal))
        self._plans[1.0] = modes
        self.phase = "following"
        self._headline = headline(profile, modes)
        self._storages = _activations.Storages(self.torch)      # let go of what was measured
        for block in self.blocks:
            block.traces.clear()

    def _why_no_products(self, looking_ns: float | None) -> str:
        if self._repeats:
            return "a graph is gone through more than once, and products are kept for one time"
        if looking_ns is None:
            return "torch can do so since 2.4"
        return next((block.operators_why_not for block in self.blocks if block.operators_why_not), "")

    def _looking_ns(self) -> float | None:
        """What keeping products costs for each operator that runs, in the forward and once more in the recomputation: both
        are looked at by Python. None before torch 2.4, which cannot keep them."""
        from torch.utils import checkpoint

        if not hasattr(checkpoint, "create_selective_checkpoint_contexts"):
            return None
        value, count = self.torch.zeros(1, device=self.device), 200
        forward, again = self._keep_products()
        spans = []
        for manager in (contextlib.nullcontext(), forward, again):
            with self.torch.no_grad(), manager:
                began = time.thread_time_ns()
                for _ in range(count):
                    value.add(1)
                spans.append((time.thread_time_ns() - began) / count)
        return max(0.0, spans[1] + spans[2] - 2 * spans[0])

    def _why_nothing(self) -> str:
        for block in self.blocks:
            if block.refusal:
                return f"{block.name} is not recomputed: {block.refusal}"
        return "no block ran in the measured step"

    def _stop(self, reason: str) -> None:
        self._deaf()
        self.phase = "off"
        self.refuse(reason)

    def _modes_for(self, growth: float) -> Sequence[str]:
        if growth < math.inf:       # that is of layers that did not train when this was measured: nobody knows what they save
            growth = max(1.0, -(-growth * 8 // 1) / 8)      # few different plans, each for at least its size
        if growth not in self._plans:
            try:
                self._plans[growth] = self.plan(self.profile, growth)
            except NotApplied:
                self._plans[growth] = self.profile.uniform(WHOLE)       # the least there is
        return self._plans[growth]


# -- parts -------------------------------------------------------------------------------------------------------------


def _must_run_plainly(torch: Any) -> bool:
    """Whether a forward is of no backward, or nothing can be kept back for it: a compiler traces, `torch.func` differentiates (its
    transforms allow no hooks on what is saved), or tangents go forward with the values: computed again they would be missing. In
    a CUDA graph that the script captures no operator can be timed, and no generator's state be read."""
    return (not torch.is_grad_enabled() or torch.compiler.is_compiling() or torch._C._functorch.peek_interpreter_stack() is not None
            or _common.in_forward_mode(torch)
            or torch._C._autograd._saved_tensors_hooks_get_disabled_error_message() is not None
            or _common.capturing(torch))


def _flags(module: Any) -> tuple[bool, ...]:
    return tuple(part.training for part in module.modules())


def _trained(module: Any) -> tuple[Any, ...]:
    """Which of a module's parameters are: what their layers save hangs on it."""
    return id(module), tuple(parameter.requires_grad for parameter in module.parameters())


def _cost(block: Block, blocks: Sequence[Block], looking_ns: float | None) -> Cost:
    """Blocks alike are given the same time, their median: one measurement of one call is noisy."""
    if block.refusal or not block.forward_ns:
        return Cost()
    alike = [other for other in blocks if type(other.module) is type(block.module) and not other.refusal
             and list(other.traces) == list(block.traces) and len(other.forward_ns) == len(block.forward_ns)]
    whole = _median([ns for other in alike for ns in other.forward_ns])
    calls = len(block.forward_ns)
    if looking_ns is None or block.operators_why_not:
        return Cost(whole * calls)
    traces = [trace for other in alike for trace in other.traces.values()]
    rest, operators = _median([trace.rest_share for trace in traces]), _median([trace.operators for trace in traces])
    return Cost(whole * calls, (whole * rest + looking_ns * operators) * calls)


def _median(values: Sequence[float]) -> float:
    ordered = sorted(values)
    return ordered[len(ordered) // 2]
