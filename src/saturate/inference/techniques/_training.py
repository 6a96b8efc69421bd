"""A short training of a changed model that brings it back to the original: shared by the techniques of stage "train".

By default the original teaches: the loss is the user's own plus the distance between both outputs. Nothing but the
model's weights is different afterwards: random states, gradients and flags are put back.
"""

from __future__ import annotations

import copy
import math
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from saturate.inference import users_code
from saturate.inference.batches import tensors
from saturate.inference.modes import evaluate, training_parts
from saturate.inference.pruning.shrink import Shrunk, shrink
from saturate.inference.pruning.values import moved, samples, seeded
from saturate.inference.techniques import _wrap
from saturate.inference.techniques._api import Context, NotApplied, OutOfTime

#: Epochs without an improvement on held-out inputs after which training stops.
PATIENCE = 2

#: Batches that an epoch is judged on.
VALIDATION_BATCHES = 8

#: For calibration inputs, about which nobody said anything.
RATE_WITHOUT_TRAIN, EPOCHS_WITHOUT_TRAIN = 1e-4, 20

#: Of the learning rate: at the end of the decay, and how far a warm-up goes.
FLOOR, WARM_UP = 0.02, 0.05


#: What data sets of segmentation write where there is no class.
_NO_CLASS = 255


@dataclass(frozen=True)
class Recovery:
    """How it went. `before` and `after` are distances to the original on held-out inputs, as a share of its variance."""

    steps: int
    epochs: int
    seconds: float
    before: float
    after: float
    stopped: str        # why it ended

    def sentence(self) -> str:
        return (f"{self.steps} steps in {self.seconds:.0f} s brought its outputs from {self.before:.3f} to {self.after:.3f} of the "
                f"original's variance ({self.stopped})")


def smaller(context: Context, ratio: float, by: str, heads: bool, multiple: int = 0) -> tuple[Any, Shrunk]:
    """A copy of the model without `ratio` of its widths. `multiple`: 0 is what the device's products like. Raises NotApplied."""
    if not 0.0 < ratio < 1.0:
        raise NotApplied(f"a share of {ratio} of a width cannot be cut")
    return shrink(
        context.torch, context.model, context.inputs, moved(context.torch, context.calibration, context.device), ratio=ratio,
        multiple=multiple or (16 if context.device == "cuda" else 8), by=by, heads=heads, deadline_s=context.deadline_s)


@dataclass
class Data:
    """Batches to train on, anew for each epoch: (inputs, target), target None where there is none."""

    batches: Callable[[], Iterable[tuple[tuple[Any, ...], Any]]]
    loss: Callable[[Any, Any], Any] | None
    optimizer: Callable[[Any], Any] | None
    learning_rate: float
    epochs: int
    length: int | None


def data(context: Context) -> Data:
    """The user's training data, or the calibration inputs without targets. Raises NotApplied without either; what reads them raises
    WorkloadFailed where the user's loader does."""
    torch, train = context.torch, context.train
    if train is None:
        inputs = list(context.calibration)
        inputs = inputs[: max(len(inputs) - len(validation(context)), 0)]
        if not inputs:
            raise NotApplied("there is nothing to train on: neither `train` nor more than a few calibration batches were given")
        return Data(lambda: ((moved(torch, batch, context.device), None) for batch in inputs), None, None,
                    RATE_WITHOUT_TRAIN, EPOCHS_WITHOUT_TRAIN, len(inputs))

    def batches() -> Iterator[tuple[tuple[Any, ...], Any]]:
        for batch in users_code.items(train.loader, "train.loader"):
            if not isinstance(batch, (tuple, list)) or len(batch) < 2:
                raise NotApplied(f"train.loader gave a {type(batch).__name__}; tuples (*inputs, target) are needed")
            *inputs, target = moved(torch, batch, context.device)
            yield tuple(inputs), target

    try:
        length = len(train.loader)
    except TypeError:       # it has none, or is a DataLoader over something without one
        length = None
    return Data(batches, train.loss, train.optimizer, train.learning_rate, train.epochs, length)


def asked(what: str, function: Callable[..., Any], *given: Any) -> Any:
    """What the user's own function gives. Raises WorkloadFailed with its name where it fails."""
    with users_code.running(what):
        return function(*given)


def validation(context: Context) -> list[tuple[Any, ...]]:
    """Batches that decide when to stop: the last calibration batches, or the inputs."""
    held = list(context.calibration)
    if context.train is None:
        held = held[-max(len(held) // 4, 1):]
    return (held or list(context.inputs))[-VALIDATION_BATCHES:]


def recover(
    context: Context,
    student: Any,
    teacher: Any,
    seed: int = 0,
    after_step: Callable[[float], None] | None = None,
    ready: Callable[[], bool] = lambda: True,
) -> Recovery:
    """Train `student` towards `teacher` and the user's loss, until the epochs, `context.deadline_s` or the patience end.
    The weights of the best epoch stay (of those at whose end `ready`); parts are left in the modes in which they came.

    `after_step(progress)` runs after each update, progress from 0 to 1. Raises NotApplied where a loss is not finite and where
    nothing can be trained, OutOfTime where the time ended before the first step.
    """
    torch = context.torch
    parameters = [parameter for parameter in student.parameters() if parameter.is_floating_point()]
    flags = [parameter.requires_grad for parameter in parameters]
    on_purpose = training_parts(student)
    with seeded(torch, seed), torch.inference_mode(False), torch.enable_grad():
        try:
            for parameter in parameters:
                parameter.requires_grad_(True)
            return _Loop(context, student, teacher, parameters, after_step, ready).run()
        finally:
            for parameter, flag in zip(parameters, flags):
                parameter.grad = None
                parameter.requires_grad_(flag)
            evaluate(student, on_purpose)


class _Loop:
    def __init__(self, context: Context, student: Any, teacher: Any, parameters: list[Any],
                 after_step: Callable[[float], None] | None, ready: Callable[[], bool]) -> None:
        self.torch, self.context = context.torch, context
        self.student, self.teacher, self.on_purpose = student, teacher, training_parts(student)
        self.after_step, self.ready = after_step, ready
        self.data = data(context)
        self.optimizer = self._optimizer(parameters)
        self.rates = [group["lr"] for group in self.optimizer.param_groups]
        self.held = moved(self.torch, validation(context), context.device)
        self.spreads = self._spreads()
        self.length, self.steps, self.begun = self.data.length, 0, time.monotonic()

    def _optimizer(self, parameters: list[Any]) -> Any:
        if self.data.optimizer is None:
            return self.torch.optim.AdamW(parameters, lr=self.data.learning_rate)
        found = asked("train.optimizer", self.data.optimizer, parameters)
        if not all(hasattr(found, name) for name in ("param_groups", "step", "zero_grad")):
            raise NotApplied(f"train.optimizer gave a {type(found).__name__}; it makes a torch optimizer of the parameters that it is given")
        return found

    def _spreads(self) -> list[Any]:
        """The variance of each of the original's outputs, over the held-out batches: that of one batch may be nothing, where it holds one sample
        or the same answer for all. Of an output that is always the same, its square."""
        found: list[list[Any]] = []
        with self.torch.no_grad():
            for inputs in self.held:
                for place, tensor in enumerate(main(self.torch, self.teacher(*_wrap.own(self.context.facts, inputs)))):
                    found += [[]] if place == len(found) else []
                    found[place].append(tensor.float()[tensor.isfinite()].flatten())
        return [_spread(self.torch.cat(one)) for one in found]

    def run(self) -> Recovery:
        before = best = self._distance()
        kept = copy.deepcopy(self.student.state_dict()) if self.ready() else None
        waited, epochs, stopped = 0, 0, f"{self.data.epochs} epochs"
        for epoch in range(self.data.epochs):
            in_time = self._epoch(epoch)
            epochs = epoch + 1
            if self.ready():
                distance = self._distance()
                if kept is None or distance < best:
                    best, kept, waited = distance, copy.deepcopy(self.student.state_dict()), 0
                else:
                    waited += 1
            if not in_time:
                stopped = "the time ended"
                break
            if waited >= PATIENCE:
                stopped = "no further progress"
                break
        if not self.steps:
            if self._late():
                raise OutOfTime("its time ended before the first training step")
            raise NotApplied("train.epochs allows no training")
        if kept is not None:
            self.student.load_state_dict(kept)
        return Recovery(self.steps, epochs, time.monotonic() - self.begun, before, best if kept is not None else self._distance(), stopped)

    def _late(self) -> bool:
        return self.context.deadline_s is not None and time.monotonic() >= self.context.deadline_s

    def progress(self, epoch: int) -> float:
        """0 to 1, by steps where their number is known, and by time where that ends earlier."""
        done = self.steps / (self.length * self.data.epochs) if self.length else epoch / self.data.epochs
        if self.context.deadline_s is not None:
            done = max(done, (time.monotonic() - self.begun) / max(self.context.deadline_s - self.begun, 1e-9))
        return min(done, 1.0)

    def _epoch(self, epoch: int) -> bool:
        """Whether the time sufficed."""
        self.student.train()
        norms = [module for module in self.student.modules() if isinstance(module, self.torch.nn.modules.batchnorm._BatchNorm)]
        seen = 0
        for inputs, target in self.data.batches():
            if self._late():
                return False
            single = samples(self.torch, inputs) == 1
            for module in norms:
                module.train(not single)        # one sample has no variance: its statistics are those that were collected
            self._step(inputs, target, self.progress(epoch))
            seen += 1
        if not seen:
            raise NotApplied("train.loader gave no batch" + (" in its second epoch: it can be iterated only once" if epoch else ""))
        self.length = seen
        return not self._late()

    def _step(self, inputs: tuple[Any, ...], target: Any, progress: float) -> None:
        factor = 0.5 * (1.0 + math.cos(math.pi * progress))
        if self.length:     # otherwise the first epoch would be all warm-up
            factor = min(factor, progress / WARM_UP)
        for group, rate in zip(self.optimizer.param_groups, self.rates):
            group["lr"] = rate * max(factor, FLOOR)
        with self.torch.no_grad():
            taught = self.teacher(*_wrap.own(self.context.facts, inputs))
        output = self._trained_output(inputs)
        loss = distance(self.torch, output, taught, target, self.spreads)
        if self.data.loss is not None:
            own = asked("train.loss", self.data.loss, output, target)
            if not isinstance(own, self.torch.Tensor) or own.numel() != 1:
                raise NotApplied("train.loss did not return a tensor of one number")
            loss = own.reshape(()) + (0.0 if loss is None else loss)
        if loss is None or not loss.requires_grad:
            raise NotApplied("no loss reaches the model's weights: its outputs in training have other shapes, or no gradient")
        if not self.torch.isfinite(loss):
            raise NotApplied(f"training diverged: the loss is {loss.item()} at step {self.steps}")
        self.optimizer.zero_grad(set_to_none=True)
        loss.backward()
        asked("a step of the optimizer", self.optimizer.step)
        self.steps += 1
        if self.after_step is not None:
            self.after_step(progress)

    def _trained_output(self, inputs: tuple[Any, ...]) -> Any:
        """The student's, in training mode. Raises NotApplied where it does not run there: what was cut, or replaced, was looked at in evaluation
        mode, in which some models leave out parts of theirs (auxiliary heads)."""
        try:
            return self.student(*_wrap.own(self.context.facts, inputs))
        except RuntimeError as error:
            if self.steps or isinstance(error, self.torch.OutOfMemoryError):
                raise
            raise NotApplied(f"the changed model does not run in training mode, which may have parts that evaluation leaves out: {error}") from error

    def _distance(self) -> float:
        """Of the outputs as it serves, as a share of the original's variance; mean over the held-out batches."""
        evaluate(self.student, self.on_purpose)
        found = []
        with self.torch.no_grad():
            for inputs in self.held:
                one, other = (model(*_wrap.own(self.context.facts, inputs)) for model in (self.student, self.teacher))
                pairs = zip(main(self.torch, one), main(self.torch, other), self.spreads)
                errors = [_relative(one, other, spread) for one, other, spread in pairs if one.shape == other.shape]
                found += [float(error) for error in errors if error is not None]
        if not found or not all(math.isfinite(value) for value in found):
            raise NotApplied("its outputs cannot be compared with the original's" if not found else "its outputs are not finite")
        return sum(found) / len(found)


def main(torch: Any, output: Any) -> list[Any]:
    """The tensors that distillation is about: `logits` where there are some, otherwise all of floating point."""
    logits = output.get("logits") if isinstance(output, Mapping) else getattr(output, "logits", None)
    return [tensor for tensor in tensors(torch, output if logits is None else logits) if tensor.is_floating_point()]


def distance(torch: Any, output: Any, taught: Any, target: Any, spreads: Sequence[Any] = ()) -> Any:
    """What a student is punished for beside the user's loss: the divergence of class scores from the teacher's where the
    target names classes (of several outputs, for the first that may hold them), otherwise the squared error as a share of the teacher's
    variance (`spreads`, by output; of this batch where that is not known). None where no output has the shape of the teacher's."""
    terms, scored = [], False
    for place, (one, other) in enumerate(zip(main(torch, output), main(torch, taught))):
        if one.shape != other.shape:
            continue
        dim = None if scored else _class_dimension(torch, one, target)
        scored = scored or dim is not None
        terms.append(_relative(one, other, spreads[place] if place < len(spreads) else None) if dim is None else _divergence(torch, one, other, dim))
    terms = [term for term in terms if term is not None]
    return sum(terms) if terms else None


def _class_dimension(torch: Any, scores: Any, target: Any) -> int | None:
    """Where one score per class lies: in dimension 1, as torch's cross entropy has it, or in the last. None where the target names more
    classes than there are scores, and where there is one score alone, as of two classes: softmax makes a certainty of it, whatever it is."""
    if not isinstance(target, torch.Tensor) or target.is_floating_point() or target.dtype == torch.bool or scores.ndim < 2:
        return None
    dim = scores.ndim - 1 if scores.shape[:-1].numel() == target.numel() else None
    if tuple(scores.shape[:1] + scores.shape[2:]) == tuple(target.shape):
        dim = 1
    named = target[target != _NO_CLASS]
    return dim if dim is not None and scores.shape[dim] > max(1, int(named.max()) if named.numel() else 1) else None


def _divergence(torch: Any, one: Any, other: Any, dim: int) -> Any:
    """Kullback-Leibler, of the teacher's distribution from the student's, mean over samples. Not softened (temperature 1):
    in trainings as short as these, 2 and 4 brought less back."""
    one, other = one.float(), other.float()
    if bool((other >= 0).all()) and torch.allclose(other.sum(dim), torch.ones_like(other.sum(dim)), atol=1e-3):
        one, other = one.clamp_min(1e-9).log(), other.clamp_min(1e-9).log()     # probabilities already
    student, teacher = one.log_softmax(dim), other.log_softmax(dim)
    excluded = other.isneginf()         # a class that a mask rules out: its share of the sum is 0, and would be computed as NaN
    return (teacher.exp() * (teacher - student)).masked_fill(excluded, 0.0).sum(dim).mean()


def _relative(one: Any, other: Any, spread: Any = None) -> Any:
    """The squared error as a share of `spread` (None: of the variance of `other`). Where the original's answer is no finite number, as a mask
    makes it, there is no distance to it; None where it is so everywhere."""
    one, other = one.float(), other.float()
    finite = other.isfinite()
    one, other = one[finite], other[finite]
    return (one - other).square().mean() / (_spread(other) if spread is None else spread) if len(other) else None


def _spread(values: Any) -> Any:
    """The variance of some numbers; their square where they are all the same, and 1 where they are 0, or there are none."""
    values = values.double()
    for found in (values.var(correction=0), values.square().mean()) if len(values) else ():
        if found > 1e-12 * values.square().mean():
            return found.float()
    return values.new_ones(()).float()


def recalibrate(context: Context, model: Any) -> int:
    """New statistics of batch normalization from the calibration inputs; how many samples they saw, 0 where it was not done.

    The channels before a norm have other means once some of their inputs are gone. Needs 32 samples: fewer estimate worse
    than what is there."""
    torch = context.torch
    norms = [module for module in model.modules()
             if isinstance(module, torch.nn.modules.batchnorm._BatchNorm) and module.running_mean is not None]
    batches = [batch for batch in context.calibration if (samples(torch, batch) or 0) > 1]
    count = sum(samples(torch, batch) or 0 for batch in batches)
    if not norms or count < 32:
        return 0
    momenta, on_purpose = [module.momentum for module in norms], training_parts(model)
    try:
        for module in norms:
            module.reset_running_stats()
            module.momentum = None      # the mean over all batches
            module.train()
        with torch.no_grad():
            for batch in batches:
                model(*_wrap.own(context.facts, moved(torch, batch, context.device)))
    finally:
        for module, momentum in zip(norms, momenta):
            module.momentum = momentum
        evaluate(model, on_purpose)
    return count
