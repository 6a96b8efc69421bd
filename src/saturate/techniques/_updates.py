"""Running an optimizer parameter by parameter while the backward pass goes on, and watching that nobody misses them.

Here are the hooks, the steps, and what happens when somebody looks at a gradient (`_read`, `_write`). `_updatable` says which optimizers
and parameters can be served, `_between` what the script does with weights and settings before its step.
"""

from __future__ import annotations

import atexit
import functools
import sys
import weakref
from collections.abc import Callable, Iterable
from typing import Any

from saturate import notices
from saturate.techniques import _between, _closures, _common, _updatable
from saturate.techniques._layouts import Layouts
from saturate.techniques._weakly import weakly

#: To read all weights once more would take time: another one is looked at in each step; on a GPU, which must be waited for, in each
#: of so many.
DEVICE_LOOKS = 64

#: Steps of every optimizer that are watched before anything changes: one interval between two steps must be whole.
WATCHED_STEPS = 2

#: After so many steps of one optimizer, others that never stepped are taken for unused.
MOST_STEPS = 8

#: How a report begins that nothing is updated in backward any more.
ENDED = "left to step() again"

_FREED, _ZEROED = "freed", "zeroed"
_ADDED = ("a gradient arrived that would be added to the one of the last step, which was used and freed (zero_grad() was not called "
          "between them)")


class _Owned:
    """A parameter: its optimizer, its number among all, and what has happened to its gradient since the optimizer's last step."""

    def __init__(self, parameter: Any, optimizer: Any, number: int):
        self.parameter, self.optimizer, self.number = parameter, optimizer, number
        self.fired = self.updated = False
        self.status = ""                # "": whatever `.grad` says is true
        self.arriving: Any = None       # the gradient before it is added to what was there
        self.watched: Any = None        # (gradient, version) when it was complete
        self.weights: Any = None        # `_between.mark` then, or after it was updated


class Updates:
    """`report` is told once what is saved, and why if that ends; `refuse` why nothing is done. The optimizers hold this by their hooks, and
    nothing else does."""

    def __init__(self, context: Any, report: Callable[[str], None], refuse: Callable[[str], None]):
        self.context, self.torch = context, context.torch
        self.report, self.refuse = report, refuse
        self.phase = "watching"
        self.owned: dict[int, _Owned] = {}
        self.steps = {id(optimizer): 0 for optimizer in context.optimizers}
        self.watched_steps: dict[int, int] = {}
        self.stepping: set[int] = set()
        self.settings: dict[tuple[int, int], list[Any]] = {}    # by optimizer and group, when its first gradient arrived
        self.groups: dict[int, dict[int, int]] = {}             # by optimizer: the number of each parameter's group, until it steps
        self.problem = self.used = ""
        self.in_step: set[int] = set()      # ids of optimizers
        self.reported = self.warned = False
        self._grad = context.torch.Tensor.grad
        self._handles: list[Any] = []
        self._watchers: list[Any] = []
        self._after_steps: list[Any] = []
        self._keeps_zeros = self._in_closure = False
        self._uses = _between.Uses(context, weakly(self._used))
        self._at_exit = weakly(self._ends)

    def install(self) -> int:
        """Register hooks; the number of parameters. Those that are frozen now, like those that are added later, are the script's own
        step's whatever becomes of them: nobody has watched what the script does with their gradients."""
        from torch.optim.optimizer import register_optimizer_step_pre_hook

        for optimizer in self.context.optimizers:
            for parameter in _updatable.parameters(optimizer):
                if not parameter.requires_grad:
                    continue
                if id(parameter) in self.owned:
                    self.problem = "a parameter belongs to two optimizers"
                self.owned[id(parameter)] = _Owned(parameter, optimizer, len(self.owned))
            self._handles.append(optimizer.register_step_pre_hook(self._steps))
            self._after_steps.append(optimizer.register_step_post_hook(self._stepped))
            self._handles.append(optimizer.register_state_dict_pre_hook(lambda o: self._used("saved", _updatable.parameters(o))))
        for owned in self.owned.values():
            self._watchers.append(owned.parameter.register_hook(self._watcher(owned)))
            # Weakly: torch does not tell the garbage collector of these hooks.
            self._handles.append(owned.parameter.register_post_accumulate_grad_hook(weakly(self._arrived)))
        self._handles.append(register_optimizer_step_pre_hook(weakly(self._another_steps)))
        self.context.on_undo(self._handles[-1].remove)
        self.context.set_attribute(self.torch.nn.Parameter, "grad", self._guard())
        atexit.register(self._at_exit)
        self.context.on_undo(functools.partial(atexit.unregister, self._at_exit))
        self._uses.look_at_saves()
        self.context.on_undo(weakly(self._remove_all))
        return len(self.owned)

    def _guard(self) -> property:
        """In place of `.grad`. Of the class, which stays."""
        held, grad = weakref.ref(self), self._grad

        def read(parameter: Any) -> Any:
            here = held()
            return here._read(parameter) if here is not None else grad.__get__(parameter)

        def write(parameter: Any, gradient: Any) -> None:
            here = held()
            (here._write if here is not None else grad.__set__)(parameter, gradient)

        return property(read, write, lambda parameter: write(parameter, None))

    def _remove_all(self) -> None:
        self._remove()
        for handle in self._after_steps:
            handle.remove()

    def _remove(self) -> None:
        """All but the hooks after steps, which `_decide` is called from: torch goes over them meanwhile."""
        self._ends()
        atexit.unregister(self._at_exit)
        self._uses.look_away()
        for handle in (*self._watchers, *self._handles):
            handle.remove()
        self._watchers, self._handles = [], []
        self.owned = {}     # else whoever keeps this object keeps the optimizer, which would pass for one that the script holds

    # -- weights are used between a backward pass and its step -------------------------------------------------------

    def _used(self, how: str, parameters: Iterable[Any]) -> None:
        """What the script uses between backward and step is not what it expects if it has been updated."""
        if self.phase == "off" or not any(owned.fired for owned in self.owned.values()):
            return
        found = [self.owned[id(p)] for p in parameters if id(p) in self.owned]
        waiting = [owned for owned in found if owned.fired and id(owned.optimizer) not in self.in_step]
        if waiting and self.phase == "watching":
            self.used = f"parameters are {how} between backward and step"
        for owned in waiting:
            if owned.updated:
                self._warn(owned.optimizer, how)

    def _ends(self) -> None:
        for owned in self.owned.values():
            if owned.updated and id(owned.optimizer) not in self.in_step:
                self._warn(owned.optimizer, "left at the end")

    def _warn(self, optimizer: Any, how: str) -> None:
        if not self.warned:
            self.warned = True
            notices.tell(
                f"saturate: optimizer-in-backward: parameters are {how} after a backward pass without optimizer.step(), behind step "
                f"{self.steps[id(optimizer)]}. They were updated in that pass, as the script alone would not have done: these "
                "weights are not its own. Let it call step() after every backward, or take the technique out of the recipe\n")

    # -- gradients arrive --------------------------------------------------------------------------------------------

    def _watcher(self, owned: _Owned) -> Any:
        held = weakref.ref(owned)

        def arriving(gradient: Any) -> None:
            here = held()
            if here is not None:
                here.arriving = gradient

        return arriving

    def _arrived(self, parameter: Any) -> None:
        owned = self.owned[id(parameter)]
        mine = id(owned.optimizer) in self.stepping
        if self.phase == "watching" or self.phase == "updating" and mine:
            self._uses.look_at_forwards()
        if self.phase == "watching":
            self._watch(owned)
        elif self.phase == "updating" and mine:
            self._update(owned)
        elif owned.status == _FREED:
            self._object(_ADDED)

    def _watch(self, owned: _Owned) -> None:
        gradient, arriving, owned.arriving = self._grad.__get__(owned.parameter), owned.arriving, None
        if owned.fired:
            self._object("gradients are added up before they are used")
        elif gradient.layout is not self.torch.strided:
            self._object("it has sparse gradients")
        elif arriving is None or not bool(((gradient == arriving) | (gradient != gradient)).all()):
            self._object("gradients are added to those of earlier steps")
        owned.fired = True
        self._note_settings(owned, self._group(owned))
        owned.watched = gradient, gradient._version
        self._note_weights(owned, True)

    def _update(self, owned: _Owned) -> None:
        if owned.updated:
            raise RuntimeError(_message("a second gradient arrived before optimizer.step() was called, behind step "
                                        f"{self.steps[id(owned.optimizer)]}"))
        torch, parameter, optimizer = self.torch, owned.parameter, owned.optimizer
        group = self._group(owned)
        if group is None:
            return      # it has left the optimizer, whose step would not look at this gradient
        if owned.status == _FREED:
            self._object(_ADDED)
        first, owned.fired = not owned.fired, True
        self._note_settings(owned, group)
        # What autograd saved to get this gradient is released by now. If anything still holds the weight or its memory, the rest of
        # this backward pass may read it (`.detach()`, `.data`, a use while it was frozen): the script's own step takes the gradient.
        if not first or _updatable.holders(parameter, torch) != _updatable.alone(torch):
            return
        # An optimizer that shares everything with the script's but holds one parameter. One for each call: gradients
        # of several devices arrive in several threads.
        kind = type(optimizer)
        alone = kind.__new__(kind)
        vars(alone).update(vars(optimizer))
        alone.param_groups = [{**optimizer.param_groups[group], "params": [parameter]}]
        # Whoever chose fused kernels looks after what they read before the script's own step, which is too late here.
        if alone.param_groups[0].get("fused") and Layouts(torch, alone).align():
            return      # they do not serve it: that is for whoever chose them to notice, in that step
        if self.context.gradient_norms is not None:
            gradient = self._grad.__get__(parameter)
            self.context.gradient_norms[id(parameter)] = torch.linalg.vector_norm(_common.reals(gradient.detach(), torch))
        step = kind.step
        if getattr(step, "hooked", False):
            step = step.__wrapped__     # hooks and labels belong to the script's own call
        step(alone)
        self._grad.__set__(parameter, None)
        owned.status, owned.updated = _FREED, True
        turn, rest = divmod(self.steps[id(optimizer)], 1 if parameter.device.type == "cpu" else DEVICE_LOOKS)
        # In an optimizer's first step that updates, all: what is restored from a copy of its own was the same in the steps that were watched.
        first_update = self.steps[id(optimizer)] == self.watched_steps[id(optimizer)]
        self._note_weights(owned, first_update or rest == 0 and owned.number == turn % len(self.owned))

    def _note_weights(self, owned: _Owned, bits: bool) -> None:
        owned.weights = _between.mark(owned.parameter, self.torch, bits)

    def _written(self, owned: _Owned) -> bool:
        """Whether somebody has written to the parameter since its gradient arrived."""
        return owned.weights is not None and _between.written(owned.parameter, self.torch, owned.weights)

    def _group(self, owned: _Owned) -> int | None:
        """The number of the group that holds the parameter by now: scripts take groups away, and a checkpoint replaces them."""
        optimizer = owned.optimizer
        if id(optimizer) not in self.groups:
            self.groups[id(optimizer)] = {id(p): number for number, group in enumerate(optimizer.param_groups) for p in group["params"]}
        return self.groups[id(optimizer)].get(id(owned.parameter))

    def _note_settings(self, owned: _Owned, group: int | None) -> None:
        key = id(owned.optimizer), group
        if group is not None and key not in self.settings:
            self.settings[key] = _between.settings(owned.optimizer.param_groups[group])

    def _settings_changed(self, optimizer: Any) -> bool:
        """Whether a setting is not what it was when gradients arrived since the optimizer's last step."""
        mine = [key for key in self.settings if key[0] == id(optimizer)]
        now = dict(enumerate(optimizer.param_groups))
        return any([self.settings.pop(key) != _between.settings(now.get(key[1], {})) for key in mine])

    # -- the script steps --------------------------------------------------------------------------------------------

    def _steps(self, optimizer: Any, args: Any, kwargs: Any) -> Any:
        """Before the script's own step. What its closure does comes between backward and step as well."""
        if self.phase != "off" and _closures.surprising(args, kwargs):
            self._object("step() is given something to call that is no closure")
        with_closure = _closures.around(args, kwargs, before=lambda: self.in_step.discard(id(optimizer)),
                                        after=lambda: self._updates(optimizer))
        if with_closure is None:
            self._updates(optimizer)
        self._in_closure = self._in_closure or with_closure is not None
        return with_closure

    def _updates(self, optimizer: Any) -> None:
        """All gradients have arrived. With `zero_grad(set_to_none=False)` a parameter whose gradient did not is updated with zeros:
        its momentum goes on."""
        self.in_step.add(id(optimizer))
        if self.phase != "off" and any([self._written(owned) for owned in self.owned.values() if owned.optimizer is optimizer]):
            self._object("parameters are written between backward and step")
        if self.phase == "updating":
            for owned in self.owned.values():
                if owned.optimizer is optimizer and owned.status == _ZEROED:
                    self._fill(owned)

    def _stepped(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        self.in_step.discard(id(optimizer))
        self.groups.pop(id(optimizer), None)
        if self.phase == "off":
            return
        mine = [owned for owned in self.owned.values() if owned.optimizer is optimizer]
        fired = [owned for owned in mine if owned.fired]
        if self._settings_changed(optimizer):
            self._object("a setting of the optimizer (its learning rate, for one) changes between backward and step")
        if self.phase == "watching":
            for owned in fired:
                gradient, version = owned.watched
                if self._grad.__get__(owned.parameter) is not gradient or gradient._version != version:
                    self._object("gradients are changed between backward and step")
        if self.phase == "updating" and fired and not self.reported:
            self._tell([owned for owned in fired if owned.updated], [owned for owned in fired if not owned.updated])
        for owned in mine:
            owned.fired, owned.updated, owned.watched, owned.weights = False, False, None, None
        self.steps[id(optimizer)] += 1
        if not any(owned.fired for owned in self.owned.values()):
            self._uses.look_away()
        if self.phase == "watching":
            self._decide()

    def _tell(self, updated: list[_Owned], left: list[_Owned]) -> None:
        """After the first steps whose gradients were not only watched: what came of it."""
        if not updated:
            if not self.problem:
                self.problem = "other tensors share the memory of every parameter (a state_dict() that is kept, for one)"
                self.refuse(self.problem)
            return
        self.reported = True
        at_a_time = max(map(_size, updated)) + sum(map(_size, left))
        self.report(f"{len(updated)} parameters updated in backward: {_common.mebibytes(at_a_time)} of gradients at a time "
                    f"instead of {_common.mebibytes(sum(map(_size, self.owned.values())))}"
                    + (f"; {len(left)} left to step(), whose memory other tensors share" if left else ""))

    def _decide(self) -> None:
        if self._keeps_zeros and self._in_closure:
            self._object("gradients are zeroed and not dropped inside of step(closure)")
        self.problem = self.problem or self.used
        if self.problem:
            self.phase = "off"
            self._remove()
            self.refuse(self.problem)
        unused = 0 if max(self.steps.values()) >= MOST_STEPS else None
        if self.phase == "watching" and all(count >= WATCHED_STEPS or count == unused for count in self.steps.values()):
            self.phase, self.watched_steps = "updating", dict(self.steps)
            self.stepping = {identity for identity, count in self.steps.items() if count}
            for handle in self._watchers:
                handle.remove()
            self._watchers = []

    def _object(self, reason: str) -> None:
        if self.phase == "updating":
            raise RuntimeError(_message(reason))
        self.problem = self.problem or reason

    # -- another optimizer has the same parameters -------------------------------------------------------------------

    def _another_steps(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        """Before the step of any optimizer: a script may go on with another one (Adam, then LBFGS), which makes gradients of its
        own in a closure. Those that are there already must be there for it."""
        if id(optimizer) in self.steps or self.phase == "off":
            return
        shared = self._shared(optimizer)
        if not shared:
            return
        if self.phase == "watching":
            return self._object(_updatable.another(optimizer))
        in_closure = _closures.passed(args, kwargs) is not None
        if any(owned.updated or owned.status == _FREED and not in_closure for owned in shared):
            self._object(f"{type(optimizer).__name__} is to use gradients that {type(shared[0].optimizer).__name__} has used already, "
                         "while the backward pass ran")
        self._leave(shared, optimizer)

    def _shared(self, optimizer: Any) -> list[_Owned]:
        return [self.owned[id(p)] for p in _updatable.parameters(optimizer) if id(p) in self.owned]

    def _leave(self, shared: list[_Owned], other: Any) -> None:
        """From now on, gradients of whoever owns these parameters stay for the script's own steps: another optimizer uses them."""
        left = self.stepping - {id(owned.optimizer) for owned in shared}
        ended, self.stepping = bool(self.stepping) and not left, left
        if ended:
            self.reported = True
            self.report(f"{ENDED}: {_updatable.another(other)}")
        for owned in self.owned.values():
            if owned.status == _ZEROED and id(owned.optimizer) not in self.stepping:
                self._fill(owned)

    def _fill(self, owned: _Owned) -> None:
        """The zeros that the script has asked for in place of a gradient, where none has arrived."""
        owned.status = ""
        if self._grad.__get__(owned.parameter) is None:
            self._grad.__set__(owned.parameter, self.torch.zeros_like(owned.parameter, memory_format=self.torch.preserve_format))

    # -- somebody looks at a gradient --------------------------------------------------------------------------------

    def _read(self, parameter: Any) -> Any:
        gradient = self._grad.__get__(parameter)
        if self.phase == "off" or (gradient is not None and self.phase == "updating"):
            return gradient
        owned = self.owned.get(id(parameter))
        if owned is None:
            return gradient
        frame = sys._getframe(2)        # behind the guard
        harmless = frame.f_globals.get("__name__", "").startswith(_updatable.READ_GRADIENTS)
        if self.phase == "watching":
            if not harmless and gradient is not None:
                self._object("the script reads gradients (clips them, for one)")
            elif frame.f_code.co_name == "zero_grad" and not frame.f_locals.get("set_to_none", True):
                self._keeps_zeros = True
            return gradient
        if harmless:
            if frame.f_code.co_name == "zero_grad":
                self._zeroed(owned, frame.f_locals.get("self"), frame.f_locals.get("set_to_none", True))
            return self._grad.__get__(parameter)
        if owned.status == _FREED:
            raise RuntimeError(_message("the script reads a gradient that was used and freed"))
        if owned.status == _ZEROED:
            gradient = self.torch.zeros_like(parameter, memory_format=self.torch.preserve_format)
            self._grad.__set__(parameter, gradient)
        return gradient

    def _zeroed(self, owned: _Owned, caller: Any, to_none: bool) -> None:
        """Somebody zeroes a gradient that is not there. Another optimizer that does so is about to step; what wraps this one for the
        script, as Lightning and Fabric do, has its very groups."""
        foreign = (isinstance(caller, self.torch.optim.Optimizer) and id(caller) not in self.steps
                   and caller.param_groups is not owned.optimizer.param_groups)
        if foreign and not owned.updated and id(owned.optimizer) in self.stepping:
            self._leave([owned], caller)
        if owned.status:
            owned.status = "" if to_none else _ZEROED
        if owned.status == _ZEROED and id(owned.optimizer) not in self.stepping:
            self._fill(owned)

    def _write(self, parameter: Any, gradient: Any) -> None:
        owned = self.owned.get(id(parameter))
        if owned is not None and self.phase != "off":
            if gradient is not None and (self.phase == "watching" or owned.status == _FREED):
                self._object("the script sets gradients itself")
            owned.status = ""
        self._grad.__set__(parameter, gradient)


def _size(owned: _Owned) -> int:
    return int(owned.parameter.numel() * owned.parameter.element_size())


def _message(reason: str) -> str:
    return (f"saturate's optimizer-in-backward cannot go on, {reason}: this script did not do so in the steps that were "
            "watched. Parameters were updated while the backward pass ran; take the technique out of the recipe")
