"""The agent's state in one process: from the first sign of training, through step finding, to the gate.

    asleep -> discover -> inspect -> active
              (motif)     (one step: which modules are called?)   (techniques on; gate or capture)

Loader workers and helpers never get past `asleep`: only a process that trains produces backward passes.
"""

from __future__ import annotations

import contextlib
import gc
import os
import sys
import threading
import time
import weakref
from posix import getpid  # a script may put a function of its own in the place of `os.getpid`
from typing import Any

from saturate.agent import (
    ending,
    facts,
    graphs,
    leaves,
    motif,
    observe,
    override,
    succession,
    takeover,
    threadbound,
    timeline,
)
from saturate.agent.guest import Guest
from saturate.agent.optimizers import Optimizers, changes_nothing
from saturate.data import batches
from saturate.techniques import _common

_CLOCK = time.perf_counter_ns       # bound before any user code can replace it

#: Events after which a step that does not repeat exactly is taken as one optimizer's step.
MOST_TOKENS = 2048

#: How long an optimizer that was built may keep the step from being settled.
MOST_WAITING_STEPS, MOST_WAITING_STEPS_OF_RANKS = 200, 50
MOST_WAITING_NS = 20_000_000_000

#: A step of an optimizer that evaluates its closure this often, or a few times and for this long, is no step to wait for.
MOST_EVALUATIONS = 256
SOME_EVALUATIONS, MOST_EVALUATING_NS = 8, 20_000_000_000

#: Updates of a timed trial whose losses are kept, all of them in its warm-up or shortly after: the controller compares
#: them with those of the verification run.
EARLY_UPDATES = 52


class Session(Guest):
    """One training process. Every entry point that user code reaches is cheap and, through `guard`, cannot raise."""

    clock = staticmethod(_CLOCK)

    def __init__(self, torch: Any, plan: dict[str, Any]):
        from saturate.agent.context import Context

        self.torch = torch
        self.plan = plan
        self.pid = getpid()
        self.context = Context(torch)
        super().__init__(self.context.undo)
        self.ending = ending.Ending(self._leave_as_diverged)
        self.timeline = timeline.Timeline(torch, _CLOCK, self.drain, lambda: self.accelerators)
        self.phase = "asleep"
        step = plan.get("step")
        self.step = motif.Step(step["token"], step["count"], tuple(step["tokens"])) if step else None
        self.awaited = bool(step and step.get("told") and not plan.get("drill"))     # what the user said ends a step, and has not come yet
        self.tokens: list[str] = []
        self.counts: dict[str, int] = {}
        self.changes: list[bool] = []
        self.watch = observe.ChangeWatch()
        self.occurrences = 0
        self.boundaries = 0
        self.parts = 0                          # of `boundaries`, those of what turned out to be a part of a step
        self.backwards = 0
        self.updates = 0, 0                     # `backwards` at the last two steps of optimizers
        self.optimizers = Optimizers()
        self.context.built_optimizers = self.optimizers.constructed
        self.succeeded = 0                      # how often roles were given
        self.succession: succession.Succession | None = None
        self.lagging = 0                        # steps of optimizers that techniques do not act on
        self.placed = 0                         # how often techniques were applied to what is trained
        self.placed_at = sys.maxsize            # boundaries before the latest time
        self.next_look = sys.maxsize            # boundaries before the next look at what techniques of a `run` have to show
        self.shown: Any = None                  # at the latest: the script may have dropped its model when it ends
        self.leaves: list[weakref.ref[Any]] = []    # what is trained where no optimizer was built: see agent.leaves
        self.stepping: list[int] = []           # optimizers whose steps are under way, by id
        self._stepper: weakref.ref[Any] | None = None   # whose step is under way
        self._evaluations = 0                           # of its closure, in this step
        self._stepping_since = 0
        self.evaluated = False
        self.backward_captured = False                  # the latest one, into a CUDA graph of the script's own
        self.grad_scaler = False
        self.splitting = False
        self.loaders_known = False
        self.loaders: dict[Any, Any] = {}          # by kind of loader: see observe.remember_loader
        self.iterators: weakref.WeakSet[Any] = weakref.WeakSet()       # of loaders that batches were taken from since the first gate
        self.saves: list[tuple[int, int]] = []     # bytes and nanoseconds of each torch.save
        self.saves_into_files = 0                  # those into files that the script opened itself
        self.saves_into_memory = 0                 # of `saves`
        self.losses: list[Any] = []
        self.recording = plan["mode"] == "trial" and step is not None
        self.early: list[list[Any]] = []        # losses of the first updates, by update, until they are reported
        self.gate: Any = None
        self.capture: Any = None
        self.watchdog: Any = None
        self.scaler: weakref.ref[Any] | None = None     # what scales the script's losses
        self.inspection: Any = None
        self.behind: list[Any] = []             # see `leave`
        self.thread: Any = None                 # where the latest step ended
        self.several_threads = False            # whether steps end in more than one
        self.batching: Any = None               # batches of other sizes than the script's: see agent.batching
        self.window: Any = None                 # a close look at a few steps: see agent.profiling
        self.seen: dict[str, Any] | None = None # what the last one saw
        self.watched: list[Any] | None = None   # parameters that are looked at whenever the gate is reached
        self.applied: list[tuple[dict[str, Any], str]] = []
        self.told: set[str] = set()             # what the user of a `run` was told
        self._woke = 0
        self._turn = plan.get("turn")           # see `agent.turn`; None: it is this process's, or was
        self.held_ns = 0                        # how long it was waited for
        self._began: timeline.Mark = None       # of the part of the step that is under way
        self._collecting = 0

    def tell_failure(self, text: str, how: str) -> None:
        if self.gate is not None:
            self.gate.tell({"at": "agent_failed", "error": text})
        else:
            from saturate.agent import application

            application.report_failure(self, text, how)

    def leave(self, entered: threadbound.Entered) -> None:
        """Leave it now, or at an event in its own thread."""
        if not entered.leave():
            self.behind.append(entered)

    @property
    def asleep(self) -> bool:
        """True in every process that must be left alone: forked children of a rank, loader workers."""
        return self.dead or getpid() != self.pid

    # -- events from the seams -----------------------------------------------------------------------------------

    def signs_of_training(self) -> None:
        """Something that only a training process does: construct a loader, an optimizer or DDP, run backward."""
        if self.phase == "asleep" and not self.dead:
            self.guard(self.whole, self._wake)
        elif self.phase == "discover" and self.asleep:
            self.guard(self._take_over)

    def _wake(self) -> None:
        from torch.utils.data import get_worker_info

        if get_worker_info() is not None:
            return
        self.pid = getpid()      # a forkserver child inherits the session of its parent
        self.phase = "discover"
        self._woke = _CLOCK()
        from saturate.agent import application

        application.on_wake(self)

    def _take_over(self) -> None:
        """A forked child builds what is trained, or trains what its parent built, which woke there: it holds all that the parent's session
        set up. Not where the parent has trained itself: what its children run then is something else."""
        from torch.utils.data import get_worker_info

        if not self.counts and get_worker_info() is None:
            self.pid = getpid()
            self._woke = _CLOCK()
            self.ending.listen()

    def _leave_as_diverged(self) -> None:
        if self.plan.get("diverged"):
            from saturate.agent import watchdog

            watchdog.leave()

    def take_turn(self) -> None:
        """Just before this process begins to train: it has built an optimizer, or runs its first backward pass."""
        if self._turn is None or self.asleep or self.phase == "asleep":
            return
        from saturate.agent import turn

        path, self._turn, began = self._turn, None, _CLOCK()
        self.guard(turn.wait, path)
        self.held_ns = _CLOCK() - began
        self._woke += self.held_ns

    def loader_arguments(self, loader: Any, init: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The arguments to build a DataLoader with, after techniques rewrote them."""
        if self.asleep or not self.context.loader_rewrites:
            return args, kwargs
        from saturate.agent import application

        rewritten = self.guard(application.rewrite_loader, self, loader, init, args, kwargs)
        return rewritten or (args, kwargs)

    def loader_waited(self, iterator: Any, batch: Any, began: timeline.Mark, waited_ns: int) -> None:
        """One batch was fetched, since this mark. Remembers the loader for the facts, and the wait while a split is measured: what
        a device had to do meanwhile does not lie between its two marks, so the host's wait is kept beside it."""
        if self.splitting:
            self._add_part("input", began)
            if self.timeline.queued and self.gate is not None:
                self.gate.add_time("fetch", waited_ns)
        if self.asleep:
            return
        if self.batching is not None:
            self.guard(self.batching.fetched, iterator, batch)
        if self.capture is not None:
            self.guard(self.capture.saw_batch, batches.tensors_of(self.torch, batch), iterator)
        if not self.loaders_known:
            self.guard(observe.remember_loader, self, iterator, batch)

    def saved(self, target: Any, took_ns: int) -> None:
        """`torch.save` was called, outside of any technique."""
        if self.asleep:
            return
        size = observe.saved_bytes(target)
        if size is not None:
            self.saves.append((size, took_ns))
            self.saves_into_memory += not isinstance(target, (str, os.PathLike))
        elif not isinstance(target, (str, os.PathLike)):
            self.saves_into_files += 1

    def backward_begins(self, tensors: Any = ()) -> None:
        if self.phase in ("asleep", "discover"):
            self.signs_of_training()
        self.take_turn()
        if self.capture is not None and not self.asleep:
            self.guard(self.capture.sees_graph, self.torch, tensors)
        self._began = self.mark()

    def backward_ends(self, tensors: Any, gradients: Any = None) -> None:
        """`gradients`: what was given to begin with, of each of `tensors`; None: ones."""
        if self.asleep:
            return
        self.backward_captured = bool(self.guard(_common.capturing, self.torch))
        if self.backward_captured:
            if not self.optimizers.built:       # there is nothing else that a step could end with
                self.guard(graphs.captured_update, self)
            return
        self.backwards += 1
        if self.batching is not None:
            self.guard(self.batching.fed)
        if self.splitting:
            self._add_part("backward", self._began)
            self._began = self.mark()   # within step(closure), what follows is the optimizer's own work
        if self.capture is not None or self.recording or self.watchdog is not None:
            self.guard(self._saw_loss, tensors, gradients)
        if self.capture is not None:
            self.guard(self.capture.saw_backward, self.torch, tensors)
        if self.phase == "inspect":
            self.guard(self.inspection.saw_backward, tensors)
        if not self.optimizers.built and not self.leaves:
            self.leaves = self.guard(leaves.reached, tensors) or []
        if not self.stepping:
            self.guard(self._token, "B")
        elif self.step is None or self.step.token == motif.CLOSURE:
            self.guard(self._evaluation)

    def _saw_loss(self, tensors: Any, gradients: Any) -> None:
        """The first tensor of a backward pass. One from edges of the graph alone has none."""
        roots = tensors if isinstance(tensors, tuple) else (tensors,)
        place = next((place for place, root in enumerate(roots) if isinstance(root, self.torch.Tensor)), None)
        if place is None:
            return
        loss = roots[place]
        if self.watchdog is not None:
            self.watchdog.saw(self, loss, gradients[place] if isinstance(gradients, (tuple, list)) else gradients)
        if self.capture is not None or self.recording:
            # A copy, for it is read later, at the update's end at the earliest: a replayed graph writes there again in the next
            # micro-step, and so may scripts.
            self.losses.append(loss.detach().clone())

    def _evaluation(self) -> None:
        """A closure was evaluated. Where one step of the optimizer is all of the training, evaluations are the steps."""
        optimizer = self._stepper() if self._stepper is not None else None
        if optimizer is None or self.plan.get("drill"):
            return
        if self.step is None:
            self._evaluations += 1
            long = self._evaluations >= SOME_EVALUATIONS and _CLOCK() - self._stepping_since > MOST_EVALUATING_NS
            if self._evaluations < MOST_EVALUATIONS and not long:
                return
        self._name(optimizer)       # it holds what is trained
        self.step = self.step or motif.Step(motif.CLOSURE, 1, (motif.CLOSURE,))
        self._token(motif.CLOSURE)

    def step_begins(self, optimizer: Any) -> None:
        self._not_stepping(optimizer)       # a step that an exception ended has not come to `step_ends`
        self.stepping.append(id(optimizer))
        if self.step is None or self.step.token == motif.CLOSURE:
            self._stepper, self._evaluations, self._stepping_since = weakref.ref(optimizer), 0, _CLOCK()
        if self.phase == "inspect":
            self.guard(self.inspection.saw_step)
        self._began = self.mark()

    def step_ends(self, optimizer: Any) -> None:
        self._not_stepping(optimizer)
        if self.asleep:
            return
        if self.guard(_common.capturing, self.torch):
            if graphs.ends_what_is_seen(self):
                self.guard(graphs.captured_update, self)
            return
        if not (self.backwards or self.backward_captured) and self.guard(changes_nothing, optimizer):
            self.optimizers.drew(optimizer)     # a script that draws its schedule of learning rates before it trains
            return
        if self.splitting:
            self._add_part("optimizer", self._began)
        self.optimizers.count(optimizer)
        self.guard(self._stepped, optimizer)

    def _not_stepping(self, optimizer: Any) -> None:
        try:
            place = self.stepping.index(id(optimizer))      # first: another thread may step as well, and take it away behind a look
        except ValueError:
            return
        del self.stepping[place:]

    def _stepped(self, optimizer: Any) -> None:
        self._token(self._name(optimizer))

    def mark(self) -> timeline.Mark:
        """Where the training is now, while it is measured where the time of a step goes; None at other times, and in forked children,
        where asking a device is an error."""
        return self.guard(self.timeline.mark) if self.splitting and not self.asleep else None

    def _add_part(self, part: str, began: timeline.Mark) -> None:
        if self.gate is not None and began is not None:
            self.guard(self.gate.add_part, part, began)

    def constructs(self, optimizer: Any) -> None:
        """An optimizer is being built: a step is not known before it has stepped as well."""
        if not self.asleep:
            self.optimizers.add_built(optimizer)

    def unsettled(self) -> bool:
        """Whether an optimizer still waits for its first step: five critic steps look like steps until the generator's.
        Not for ever: some optimizers are built and never used. Ranks count, for all must come to the gate at one step."""
        if self.plan.get("step") or self.boundaries > MOST_WAITING_STEPS:
            return False
        if observe.world_size() > 1:
            return self.boundaries <= MOST_WAITING_STEPS_OF_RANKS and self.optimizers.waiting()
        return _CLOCK() - self._woke <= MOST_WAITING_NS and self.optimizers.waiting()

    def _await(self) -> None:
        """Look out for the step that the user named; one that does not exist here is reported."""
        self.awaited = not override.seen(self.step, self.counts)
        if self.awaited and override.hopeless(self.counts, self.optimizers.waiting):
            self._give_up()

    def _name(self, optimizer: Any) -> str:
        """The part that this optimizer plays, whose step has ended or is under way."""
        name, new = self.optimizers.name(optimizer)
        if new and succession.meet(self, name, optimizer) and not self.plan.get("step"):
            self._rediscover()
        return self.optimizers.roles.get(name, name)

    @property
    def steps_seen(self) -> int:
        """Steps since the start, those before the motif was found included."""
        early = self.tokens.count(self.step.token) // self.step.count if self.step else 0
        return max(0, early - 1) + self.boundaries - self.parts

    # -- the step ------------------------------------------------------------------------------------------------

    def _token(self, token: str) -> None:
        if self.behind:
            self.behind = [entered for entered in self.behind if not entered.leave()]
        self.counts[token] = self.counts.get(token, 0) + 1
        if token != "B":
            self.updates = self.updates[1], self.backwards
        if self.awaited:
            self._await()
        if self.capture is not None:
            self.capture.token(self, token)
        if self.succession is not None:
            token = succession.follow(self, token)
        if self.step is None:
            self._discover(token)
            if self.step is None:
                return
            self.succession = None
            if self.step.token != "B":
                self.occurrences = self.step.count     # found at the very token that ends it
        elif token != self.step.token:
            return
        else:
            self.occurrences += 1
        if self.occurrences >= self.step.count:
            self.occurrences = 0
            self._boundary()

    def _discover(self, token: str) -> None:
        self.tokens.append(token)
        if token == "B" and not self.optimizers.by_name:
            self.changes.append(self.watch.changed(self))
            found = motif.find_manual(self.changes)
            if found is not None:
                self.step = found
                # The newest backward is the first of a step: with n > 1 the step ends n - 1 backwards later.
                self.occurrences = 1
        else:
            self.step = motif.find(self.tokens, observe.world_size())
        if self.step is None and len(self.tokens) >= MOST_TOKENS:
            self.step = motif.irregular(self.tokens)
            if self.step is None:
                self._give_up()

    def _give_up(self) -> None:
        """Nothing that repeats, and no optimizer, or not the step that the user named: leave this process alone, and say so."""
        from saturate.agent import application

        application.report_no_step(self)
        self.dead = True

    def _rediscover(self) -> None:
        """An optimizer turned up that the motif does not hold: what looked like a step was a part of one."""
        if self.watchdog is not None and self.step is not None:     # a generator's losses are not as the critic's were
            # Its first losses came behind the last step of another, or before that, where all gradients are computed first.
            self.watchdog.goes_on_with_another(self, self.updates[0] + 1)
        self.step, self.parts = None, self.boundaries
        self.phase = "discover"
        self.occurrences = 0

    def _boundary(self) -> None:
        self.boundaries += 1
        before, self.thread = self.thread, threading.current_thread()
        self.several_threads |= before not in (None, self.thread)
        if self.batching is not None:
            self.batching.stepped(self.evaluated)
        if self.window is not None:
            self.window.boundary()
        if self.capture is not None:
            self.capture.record(self)
        elif self.recording:
            self.early.append(self.losses)
            self.losses = []
            self.recording = self.boundaries < EARLY_UPDATES
        if self.watchdog is not None:
            self.watchdog.boundary(self)
        if self.phase == "active":
            if self.boundaries >= self.next_look:
                self.shown, self.next_look = facts.shown(self), 2 * self.boundaries - self.placed_at     # seldom, the longer it goes on
            if self.succeeded and self.plan["techniques"] and takeover.due(self):
                self.whole(takeover.move, self)
            if self.gate is not None and self.capture is None:
                self.whole(self.gate.boundary, self.evaluated)
                self.released()
        else:
            from saturate.agent import application

            self.whole(application.advance, self)
        self.evaluated = False

    def released(self) -> None:
        """The gate is open: do what the order asks for besides running."""
        if self.batching is not None and "fit" in self.gate.order:
            self.batching.ordered(self.gate.order.pop("fit"))
        self.split(self.gate.split)
        if self.gate.watch is not None:
            from saturate.agent import profiling

            order, self.gate.watch = self.gate.watch, None
            profiling.open_window(self, order)

    def split(self, on: bool) -> None:
        """Start or stop measuring where a step's time goes. Never on in a timed block that decides anything."""
        if on and not self.splitting:
            gc.callbacks.append(self._collector)
        elif not on and self.splitting:
            gc.callbacks.remove(self._collector)
        self.splitting = on

    def _collector(self, phase: str, info: dict[str, int]) -> None:
        if phase == "start":
            self._collecting = _CLOCK()
        elif self.gate is not None:
            self.gate.add_time("gc", _CLOCK() - self._collecting)

    def drain(self) -> None:
        """Wait until the devices have finished everything that was queued. Those of the trained parameters: a rank may
        never have made its own the current one, and asking another would create a context there."""
        devices = self.accelerators
        with self.window.draining() if devices and self.window is not None else contextlib.nullcontext():
            for device in devices:
                timeline.wait_for(self.torch, device)

    @property
    def accelerators(self) -> tuple[Any, ...]:
        """Devices of the trained parameters, where those queue what they are given."""
        return self.inspection.devices if self.context.device not in ("", "cpu", "meta") else ()
