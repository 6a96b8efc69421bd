"""Is one merged micro-step what several of the script's own are? Both are run on the live batch, by the Trainer's own code, and the
losses that come to the backward pass and every gradient are compared, with all randomness set aside."""

from __future__ import annotations

import contextlib
import copy
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from saturate.techniques import _autograd
from saturate.techniques._chunk_census import Watch
from saturate.techniques._chunk_modes import Randomness, devices_of, hooks_set_aside, reductions, steady
from saturate.techniques._chunk_plan import NotSplittable
from saturate.techniques._chunk_proof import _NOISE, _TOLERANCE, _TOLERANCE_TF32
from saturate.techniques._interrupts import from_signal_handler
from saturate.techniques._merged_batch import NotMergeable
from saturate.techniques._out_of_memory import free, out_of_memory

#: `run(batch, members)`: the Trainer's own micro-step of a batch that stands for so many.
Run = Callable[[Any, int], Any]


def compare(trainer: Any, run: Run, batches: Sequence[Any], merged: Any, weighs: Sequence[int], torch: Any) -> int:
    """How many times the loss of the merged batch is what those of the script's own add up to: one of `weighs`. Raises NotMergeable with
    the reason where it is none of them, where gradients do not agree, or where that cannot be seen."""
    model = trainer.model
    state, buffers = Randomness(torch, devices_of(model)), [(buffer, buffer.detach().clone()) for buffer in model.buffers()]
    try:
        with torch.enable_grad(), steady(torch):
            return _agree(trainer, run, batches, merged, weighs, torch)
    except NotSplittable as reason:
        raise NotMergeable(str(reason)) from None
    except Exception as error:  # the user's model and loss may raise anything
        if isinstance(error, NotMergeable) or from_signal_handler(error):
            raise
        if out_of_memory(error, torch):
            raise NotMergeable("a merged batch does not fit into memory beside two gradients, to be compared") from None
        text = str(error).splitlines()
        raise NotMergeable(f"when it is compared, it raises {type(error).__name__}: {text[0] if text else ''}") from None
    finally:
        state.restore()
        with torch.no_grad():
            for buffer, before in buffers:
                if not torch.equal(buffer, before):
                    buffer.copy_(before)
        free(torch)


def _agree(trainer: Any, run: Run, batches: Sequence[Any], merged: Any, weighs: Sequence[int], torch: Any) -> int:
    parameters = [p for p in trainer.model.parameters() if p.requires_grad]
    _in_training_mode(trainer)
    watch = Watch(trainer.model, (), [], torch)
    try:
        total, sums, formats = 0.0, [None] * len(parameters), set()
        for batch in batches:
            loss, gradients, seen = _micro_step(trainer, run, batch, 1, parameters, torch)
            total, formats = total + loss, formats | seen
            sums = [ours if theirs is None else theirs if ours is None else ours + theirs for ours, theirs in zip(sums, gradients)]
        if problem := watch.problem():
            raise NotMergeable(problem)
        loss, gradients, _ = _micro_step(trainer, run, merged, len(batches), parameters, torch)
    finally:
        watch.around.restore()
    allowed = _allowed(parameters[:1], formats, torch)
    times = next((times for times in weighs if abs(times * loss - total) <= allowed * max(abs(times * loss), abs(total))), None)
    if times is None:
        raise NotMergeable(f"the loss of {len(batches)} micro-steps is {total:.6g} and that of all their samples at once {loss:.6g}: "
                           "samples depend on each other, or do not weigh the same")
    largest = max((float(g.abs().max()) for g in gradients if g is not None and g.numel()), default=0.0)
    for ours, theirs in zip(sums, gradients):
        if (ours is None) != (theirs is None):
            raise NotMergeable("which parameters have gradients depends on the batch")
        if ours is not None and not _close(ours, theirs * times, formats, _NOISE * largest * times, torch):
            raise NotMergeable("the gradients of micro-steps do not add up to that of all their samples at once: samples depend on each other, "
                               "or do not weigh the same")
    return times


def _in_training_mode(trainer: Any) -> None:
    """As each micro-step of a Trainer begins. Behind an evaluation it would seem that a forward changes the modes of the model, and
    its weights where the optimizer holds others for that (schedule-free ones)."""
    trainer.model.train()
    if callable(train := getattr(trainer.optimizer, "train", None)):
        train()


def _micro_step(trainer: Any, run: Run, batch: Any, members: int, parameters: list[Any], torch: Any) -> tuple[float, list[Any], set[str]]:
    """The loss, the gradients, and the formats narrower than float32 that it was computed in. The backward pass is none that anything
    counts or synchronizes."""
    with _taken(trainer.accelerator) as losses, reductions(torch, hooks=True) as seen:
        run(copy.copy(batch), members)
    # Where one class is rare, most batches have the same sum of them, and a comparison of those shows nothing.
    if any(one.by is not None and one.by.unique().numel() > 1 for one in seen.found):
        raise NotMergeable("a mean is divided by the weights of its samples or of their classes: batches do not weigh the same")
    if len(losses) != 1:
        raise NotMergeable(f"a micro-step has {len(losses)} backward passes")
    loss = losses[0]
    formats = {name for name in ("bfloat16", "float16") if _autograd.computed_in(loss, getattr(torch, name), torch)}
    scaler = getattr(trainer.accelerator, "scaler", None)
    with hooks_set_aside(parameters):
        gradients = torch.autograd.grad(loss if scaler is None else scaler.scale(loss), parameters, allow_unused=True)
    return float(loss.detach()), [None if g is None else g.detach() for g in gradients], formats


@contextlib.contextmanager
def _taken(accelerator: Any) -> Iterator[list[Any]]:
    """The losses whose backward pass the Trainer asks for in the meantime; they get none."""
    losses: list[Any] = []
    own = vars(accelerator).get("backward")
    accelerator.backward = lambda loss, **_: losses.append(loss)
    try:
        yield losses
    finally:
        del accelerator.backward
        if own is not None:
            accelerator.backward = own


def _close(ours: Any, theirs: Any, formats: set[str], noise: float, torch: Any) -> bool:
    if ours.is_sparse or theirs.is_sparse:
        ours, theirs = ours.to_dense(), theirs.to_dense()
    if not ours.numel():
        return True
    worst, scale = float((ours - theirs).abs().max()), float(theirs.abs().max())
    return math.isfinite(worst) and worst <= _allowed([ours], formats, torch) * (scale + noise)


def _allowed(tensors: Sequence[Any], formats: set[str], torch: Any) -> float:
    """Relative, for what was computed in these formats."""
    names = formats | {str(tensor.dtype).removeprefix("torch.") for tensor in tensors}
    found = [_TOLERANCE.get(name, _TOLERANCE["float32"]) for name in names]
    if any(tensor.device.type == "cuda" and tensor.dtype != torch.float64 for tensor in tensors):
        found.append(_TOLERANCE_TF32)
    return max(found, default=_TOLERANCE["float32"])
