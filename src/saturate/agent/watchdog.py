"""A watch over training under a recipe: NaN, infinity and loss spikes, with the step number.

Every loss is kept as a copy on its device; all of an interval are copied to the host together, without waiting, and read
when they are there: an interval later or at the end of the script, so that watching never synchronises. Steps are counted from 1, since the
start of the process.
"""

from __future__ import annotations

import gc
import io
import itertools
import math
import os
import stat
from collections.abc import Sequence
from typing import Any

from saturate import notices
from saturate.agent import observe

EVERY = 10              # steps between looks
MOST = 512              # losses that wait for a look: before a step is recognised there are no steps to count
HISTORY = 50            # steps that "usual" is judged by
LEAST_HISTORY = 10
SPIKE = 10.0            # times the spread of the history above its median, where most losses of a look are
LONE_SPIKE = 100.0      # the same for one loss, which must be the largest so far: batches differ, and every loss is looked at
MOST_SIGNED = 1 << 16   # numbers in a loss that are looked at with the sign of the gradient that its backward pass begins with
EXIT_CODE = 5           # with --on-divergence stop: same meaning as "no final set verifies"; launchers of several ranks end with 1 then

_BUFFERED = (io.TextIOWrapper, io.BufferedWriter, io.BufferedRandom)

#: When a loss was seen: backward passes so far, tokens of the discovery so far, steps that ended since the motif was found.
Moment = tuple[int, int, int]


class Watchdog:
    """Of one process. `action`: "warn", or "stop" to end the script once the training has diverged. `adds_up`: the losses of a step are
    judged by their sum, because a technique makes several micro-steps one."""

    def __init__(self, action: str, adds_up: bool = False):
        self.action = action
        self.adds_up = adds_up
        self.history: list[tuple[int, float]] = []      # (step, its last loss)
        self.largest = -math.inf                        # loss so far
        self.over = False                               # it was said, or there is nobody to say it to
        self._fresh: list[tuple[Moment, Any]] = []      # losses on their devices
        self._copied: list[tuple[list[Moment], Any, Any]] = []      # moments, losses on the host, event after the copy

    def saw(self, session: Any, loss: Any, gradient: Any = None) -> None:
        """A backward pass of `loss` has ended, which began with `gradient` (None: ones)."""
        if self.over:
            return
        moment = session.backwards, len(session.tokens), session.boundaries
        self._fresh.append((moment, _scalar(session, _made_smaller(session.torch, loss, gradient))))
        if len(self._fresh) >= MOST:
            self._look(session)

    def boundary(self, session: Any) -> None:
        """A step has ended."""
        if session.boundaries % EVERY == 0:
            self._look(session)

    def goes_on_with_another(self, session: Any, since: int) -> None:
        """What is trained has been something else since this backward pass, the next fold, say. What is usual for it is not known yet; what
        was before is judged by what was usual then."""
        others = [entry for entry in self._fresh if entry[0][0] >= since]
        self._fresh = [entry for entry in self._fresh if entry[0][0] < since]
        self._look(session, whole=True)
        self.history, self.largest, self._fresh = [], -math.inf, others

    def finish(self, session: Any) -> None:
        """The script has ended: judge what was not judged yet. Its exit code is changed last of all: see `leave`."""
        if session.asleep:
            return
        self._look(session, whole=True, at_end=True)

    def _look(self, session: Any, whole: bool = False, at_end: bool = False) -> None:
        """`whole`: also at what has to be waited for."""
        ready, self._copied = self._copied, []
        fresh, self._fresh = self._fresh, []
        if fresh:
            moments, losses = zip(*fresh)
            host, event = _to_host(session.torch, losses)
            (ready if event is None or whole else self._copied).append((list(moments), host, event))
        for moments, host, event in ready:
            if event is not None:
                event.synchronize()     # an interval old: over, unless the device is that far behind
            if not self.over:
                self._judge(session, list(zip(moments, host.tolist())), at_end)

    def _judge(self, session: Any, losses: list[tuple[Moment, float]], at_end: bool) -> None:
        numbered = [(_step_of(session, moment), loss) for moment, loss in losses]
        # A scaler skips the update of a loss that overflows (infinite outputs may make it nan), and takes a smaller scale. What stays so
        # fills a look.
        forgiven = session.scaler is not None and any(math.isfinite(loss) for _, loss in numbered)
        if forgiven:
            numbered = [(step, loss) for step, loss in numbered if math.isfinite(loss)]
        if self.adds_up:
            numbered = _sums(numbered)
        problem = divergence(self.history, numbered, self.largest)
        if problem is None:
            self.largest = max([self.largest, *(loss for _, loss in numbered)])
            self.history = [*self.history, *dict(numbered).items()][-HISTORY:]
            return
        self.over = True
        step, text = problem
        rank = observe.rank() if observe.world_size() > 1 else None
        where = f"at step {step}" if session.step else f"at backward pass {step}"
        notices.tell(
            f"saturate: {text} {where}{'' if rank is None else f' (rank {rank})'}\n"
            "help: run the command without the recipe from the last checkpoint; if it is stable there, tune again\n"
        )
        if self.action != "stop":
            return
        session.plan["diverged"] = True
        if not at_end:
            leave()         # other ranks and workers must not be waited for


def leave() -> None:
    """End this process with the exit code that says so; a launcher ends the other ranks, or starts all again. Called by
    `inject/sitecustomize.py` after everything that the script wanted to be called at its end."""
    notices.flush()
    gc.unfreeze()               # what was frozen is not listed
    for kept in gc.get_objects():
        try:
            if type(kept) in _BUFFERED and stat.S_ISREG(os.fstat(kept.fileno()).st_mode):
                kept.flush()        # a file that the script keeps open loses nothing
        except (OSError, ValueError):
            continue                # closed, or the disk is full
    os._exit(EXIT_CODE)


def _made_smaller(torch: Any, loss: Any, gradient: Any) -> Any:
    """What a backward pass of `loss` that begins with `gradient` makes smaller: critics of Wasserstein GANs make what they say of one kind
    of samples larger, by -1. Only the sign counts, as scripts that scale their losses by hand may give the scale. Of many numbers, which may
fill half a device, and have signs each of its own, nothing is made."""
    if gradient is None:
        return loss
    plain = all(type(tensor) in (torch.Tensor, torch.nn.Parameter) and tensor.layout == torch.strided and not tensor.is_complex()
                for tensor in (loss, gradient))
    if not plain or loss.shape != gradient.shape or loss.numel() > MOST_SIGNED:
        return loss
    return torch.where(gradient.detach() < 0, -loss.detach(), loss.detach())


def _scalar(session: Any, loss: Any) -> Any:
    """A copy of `loss` as the script knows it, one number on its device. A copy: a replayed graph writes its outputs where
    they were, and a view would hold what it is a view of."""
    loss = loss.detach()
    if hasattr(loss, "to_local"):
        loss = loss.to_local()          # of a distributed tensor, the part that is here
    if loss.is_complex():
        loss = loss.abs()
    if loss.numel() != 1:
        loss = loss.sum(dtype=_precise(session.torch, [loss]))
    scaler = session.scaler() if session.scaler is not None else None
    scale = getattr(scaler, "_scale", None)
    if scale is not None and scale.device == loss.device:
        return (loss / scale).reshape(())       # it grows by jumps
    return loss.clone() if not loss.dim() else loss.reshape(()).clone()


def _to_host(torch: Any, losses: tuple[Any, ...]) -> tuple[Any, Any]:
    """All `losses` in one tensor on the host, and the event to wait for before it is read (None: it is there)."""
    dtype = _precise(torch, losses)
    device = next((loss.device for loss in losses if loss.dtype == dtype), losses[0].device)     # not every device knows float64
    stacked = torch.stack([loss.to(device, dtype) for loss in losses])
    if device.type != "cuda":
        return stacked.to("cpu"), None
    host = stacked.to("cpu", non_blocking=True)
    return host, torch.cuda.current_stream(device).record_event()


def _precise(torch: Any, losses: Sequence[Any]) -> Any:
    """The dtype that holds these losses: what is finite for the script must be for us."""
    return torch.float64 if any(loss.dtype == torch.float64 for loss in losses) else torch.float32


def _step_of(session: Any, moment: Moment) -> int:
    """The step in which a loss was seen, from 1; the backward pass, where no step is recognised."""
    backwards, tokens, boundaries = moment
    if session.step is None:
        return backwards
    # The boundary at which the motif was found counts among the tokens as well.
    return session.tokens[:tokens].count(session.step.token) // session.step.count + max(0, boundaries - session.parts - 1) + 1


def _sums(losses: list[tuple[int, float]]) -> list[tuple[int, float]]:
    """One for each step, in order.

    >>> _sums([(1, 0.5), (1, 0.25), (2, 1.0)])
    [(1, 0.75), (2, 1.0)]
    """
    found: dict[int, float] = {}
    for step, loss in losses:
        found[step] = found.get(step, 0.0) + loss
    return list(found.items())


def divergence(history: list[tuple[int, float]], losses: list[tuple[int, float]], largest: float = -math.inf) -> tuple[int, str] | None:
    """Where and how training diverged in `losses` after `history`, both (step, loss) in order; None: it did not. `largest`: the largest
    loss before; one alone that is no larger is none of a divergence: tasks that take turns have losses of their own sizes.

    >>> divergence([(step, 1.0) for step in range(1, 21)], [(21, 1.1), (22, 1e6), (23, 1.0)])
    (22, 'the loss jumped to 1e+06 (usual: 1)')
    """
    for step, loss in losses:
        if not math.isfinite(loss):
            return step, f"the loss became {loss}"
    steps = list(dict(losses).items())      # the last loss of each
    if len(history) < LEAST_HISTORY:
        known = [*history, *steps]
        history, steps = known[:LEAST_HISTORY], known[LEAST_HISTORY:]
    if not steps:
        return None
    ordered = sorted(loss for _, loss in history)
    median = ordered[len(ordered) // 2]
    spread = sorted(abs(loss - median) for loss in ordered)[len(ordered) // 2]
    unit = max(spread, 0.05 * abs(median))
    high = [(step, loss) for step, loss in steps if loss > median + SPIKE * unit]
    largest = max([largest, *(loss for _, loss in history)])
    lone = [(step, loss) for step, loss in high if loss > median + LONE_SPIKE * unit and loss > largest]
    lasting = high if 2 * len(high) > max(len(steps), LEAST_HISTORY // 2) else []
    if lasting and lasting[0] == steps[0]:
        before = itertools.takewhile(lambda entry: entry[1] > median + SPIKE * unit, reversed(history))
        lasting = [*reversed(list(before)), *lasting]       # it began at the end of the look before
    first = min([*lone[:1], *lasting[:1]], default=None)
    return first and (first[0], f"the loss jumped to {first[1]:.4g} (usual: {median:.4g})")
