"""The few places in torch where the agent listens. Each is stable API or has been in place for years.

    torch.autograd.backward                  every backward pass: Tensor.backward, Accelerator.backward, Lightning, closures
    register_optimizer_step_{pre,post}_hook  every optimizer, custom and compiled ones too
    GradScaler.step                          attempts that the scaler skipped
    DataLoader.__init__, iterator.__next__   arguments; time spent waiting for input
    Module.eval                              a step that contains an evaluation is not a training step
    Optimizer.__init__, init_process_group   first signs that this process trains; `import` techniques apply then
    torch.load                               files that only name a checkpoint in a store
    torch.jit.script, torch.export.export    a module is shown as the script wrote it
    gc.freeze                                what it freezes is not among `gc.get_objects` any more
"""

from __future__ import annotations

import functools
import gc
import sys
import weakref
from typing import Any

from saturate.agent import attributes, observe
from saturate.agent.forwards import exporting


def install(session: Any) -> None:
    """Patch torch for this session. Originals are kept in `session.undo`."""
    torch = session.torch
    _backward(session, torch)
    _optimizers(session, torch)
    _scaler(session, torch)
    _loaders(session, torch)
    _evaluation(session, torch)
    _signs(session, torch)
    _loading(session, torch)
    _freezing(session, torch)
    _exports(session, torch)
    if not session.plan["techniques"]:       # facts are asked of the unchanged workload
        _saves(session, torch)


def replace(session: Any, owner: Any, name: str, wrapper: Any) -> None:
    """Set `owner.name`, and remember how to restore it unless somebody wraps it again after us."""
    session.undo.append(attributes.replace(owner, name, wrapper))


def _backward(session: Any, torch: Any) -> None:
    original = torch.autograd.backward
    inside = getattr(torch._C, "_current_graph_task_id", lambda: -1)        # of torch 2.1 on

    @functools.wraps(original)
    def backward(tensors: Any, *args: Any, **kwargs: Any) -> Any:
        if not isinstance(tensors, tuple) and not torch.overrides.is_tensor_like(tensors):
            tensors = tuple(tensors)        # as torch does, and a generator gives them only once; a GradientEdge is a tuple
        if inside() != -1:                  # a part of another one, as reentrant checkpointing makes them: what it begins with is no loss
            return original(tensors, *args, **kwargs)
        session.backward_begins(tensors)
        result = original(tensors, *args, **kwargs)
        session.backward_ends(tensors, args[0] if args else kwargs.get("grad_tensors"))
        return result

    # Without this a user-compiled step traces through the wrapper and no loss is ever seen.
    replace(session, torch.autograd, "backward", torch._disable_dynamo(backward))


def _optimizers(session: Any, torch: Any) -> None:
    from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

    def before(optimizer: Any, args: Any, kwargs: Any) -> None:
        session.step_begins(optimizer)

    def after(optimizer: Any, args: Any, kwargs: Any) -> None:
        session.step_ends(optimizer)

    # Without this a compiled `opt.step` traces through the session: its frames break, and what they ask of CUDA is compiled with them.
    # The first call imports dynamo; building an optimizer has done so.
    session.undo.append(register_optimizer_step_pre_hook(torch._disable_dynamo(before)).remove)
    session.undo.append(register_optimizer_step_post_hook(torch._disable_dynamo(after)).remove)


def _freezing(session: Any, torch: Any) -> None:
    original = gc.freeze

    @functools.wraps(original)
    def freeze() -> None:
        session.guard(observe.remember_modules, torch)
        original()

    replace(session, gc, "freeze", freeze)


def _scaler(session: Any, torch: Any) -> None:
    from torch.amp.grad_scaler import GradScaler

    original = GradScaler.step

    @functools.wraps(original)
    def step(self: Any, optimizer: Any, *args: Any, **kwargs: Any) -> Any:
        before = session.optimizers.steps_of(optimizer)
        result = original(self, optimizer, *args, **kwargs)
        if session.optimizers.steps_of(optimizer) == before and self.is_enabled():
            session.step_ends(optimizer)    # skipped for an overflow: still an attempt, and the end of a step
        if self.is_enabled():
            session.grad_scaler, session.scaler = True, weakref.ref(self)
        return result

    replace(session, GradScaler, "step", step)


def _loaders(session: Any, torch: Any) -> None:
    from torch.utils.data import DataLoader
    from torch.utils.data.dataloader import _BaseDataLoaderIter

    original_init = DataLoader.__init__

    @functools.wraps(original_init)
    def init(self: Any, *args: Any, **kwargs: Any) -> None:
        session.signs_of_training()
        args, kwargs = session.loader_arguments(self, original_init, args, kwargs)
        original_init(self, *args, **kwargs)

    original_next = _BaseDataLoaderIter.__next__

    @functools.wraps(original_next)
    def next_batch(self: Any) -> Any:
        if session.gate is not None:
            session.iterators.add(self)
        if not session.splitting and session.loaders_known:
            return original_next(self)
        began, began_ns = session.mark(), session.clock()       # a mark may drain the device: that is no wait for input
        batch = original_next(self)
        session.loader_waited(self, batch, began, session.clock() - began_ns)
        return batch

    replace(session, DataLoader, "__init__", init)
    replace(session, _BaseDataLoaderIter, "__next__", next_batch)


def _saves(session: Any, torch: Any) -> None:
    original = torch.save

    @functools.wraps(original)
    def save(obj: Any, f: Any, *args: Any, **kwargs: Any) -> None:
        began = session.clock()
        original(obj, f, *args, **kwargs)
        session.saved(f, session.clock() - began)

    for owner in (torch, torch.serialization) if torch.serialization.save is original else (torch,):
        replace(session, owner, "save", save)


def _exports(session: Any, torch: Any) -> None:
    """`torch.jit.script` looks at its caller's frame; what it calls for a module does not."""
    for owner, name in ((sys.modules.get("torch.jit._recursive"), "create_script_module"), (sys.modules.get("torch.export"), "export")):
        if hasattr(owner, name):
            replace(session, owner, name, exporting(getattr(owner, name)))


def _evaluation(session: Any, torch: Any) -> None:
    original = torch.nn.Module.eval

    @functools.wraps(original)
    def evaluate(self: Any) -> Any:
        session.evaluated = True
        return original(self)

    replace(session, torch.nn.Module, "eval", evaluate)


def _signs(session: Any, torch: Any) -> None:
    _sign(session, torch.optim.Optimizer)
    if torch.distributed.is_available():
        _sign_of_group(session, torch)


def _sign(session: Any, owner: Any) -> None:
    original = owner.__init__

    @functools.wraps(original)
    def init(self: Any, *args: Any, **kwargs: Any) -> None:
        session.signs_of_training()
        session.constructs(self)
        original(self, *args, **kwargs)         # what it imports first takes as long as torch itself
        session.take_turn()

    replace(session, owner, "__init__", init)


def _sign_of_group(session: Any, torch: Any) -> None:
    """Techniques may patch DistributedDataParallel's constructor: too late when its first call is the first sign."""
    original = torch.distributed.init_process_group

    @functools.wraps(original)
    def init_process_group(*args: Any, **kwargs: Any) -> Any:
        session.signs_of_training()
        return original(*args, **kwargs)

    replace(session, torch.distributed, "init_process_group", init_process_group)


def _loading(session: Any, torch: Any) -> None:
    """Here and not by a technique: a script that resumes often loads before anything shows that it trains, and a checkpoint
    must load with whatever recipe."""
    from saturate.checkpoints import pointer

    load = pointer.loading(torch.load)
    for owner in (torch, torch.serialization):
        replace(session, owner, "load", load)
