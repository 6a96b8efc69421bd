"""Run several micro-steps of gradient accumulation as one, where transformers' Trainer owns the loop.

What it does
------------
`factor` consecutive batches of an update are put together and run in one forward and one backward: 4 samples in 8 micro-steps
become 32 in 1, or 16 in 2. An update consists of the same samples in the same order, with the same loss and one step of the optimizer.

When it helps
-------------
Small batches leave the device idle between kernels, or its matrix products too small to be fast, and memory holds larger ones.

When it hurts
-------------
Activations take `factor` times the memory. Samples are padded to the longest of more of them.

Numerics
--------
`stream`: sums are taken in another order, and dropout draws other numbers for one large batch than for several small ones; what is
drawn once for all samples of a batch is drawn once for more of them. Without any of that it is `reordering`. What depends on the
batch besides is refused, with the reason: BatchNorm in training mode, models that change state in their forward, losses within a batch
(contrastive ones, a mixture of experts that balances its load), means that do not weigh samples alike (a cross entropy with weights of
its classes). Losses that are divided by what counts in the whole update (`num_items_in_batch`) may be of batches of any size; means of
each batch are merged where batches hold as many samples, and as many labels that count. Some models take `num_items_in_batch` and do
not divide by it (BERT's classifiers, T5): the
Trainer adds their means up, and a merged one counts as many times.

How it is applied
-----------------
To the Trainer in whose loop the optimizer steps, once a step is known: what its `get_batch_samples` returns stays as it is, and its
`training_step` is called once for each group of them. So arguments, loaders, samplers, collators, logs, `training_args.bin`,
checkpoints and how a run resumes from them stay the script's own; iterable datasets, lengths in groups, `max_steps` and an update at
the end of an epoch that has fewer batches are as ever. The loss that is logged is that of the update. A `compute_loss`, or a model,
that counts its calls counts fewer, and `on_substep_end` comes before what it stands for has run. Lengths that differ between batches
are padded as collators of transformers do; with another collator such batches run as the script wrote it.

Before the first group is merged it is run both ways, with random numbers set aside, through the Trainer's own code: the losses that
come to the backward pass must add up to that of the whole, and so must the gradients of every parameter. The same is done again after
1, 2, 4, 8... groups, and where padding first differs. What does not agree runs as the script wrote it from there on, and a line on
stderr says so. Meanwhile two sets of gradients are held, and a `compute_loss` that keeps statistics counts these calls, too.

Refused are: another framework, or a loop of the script's own (`micro-batch` says why); a Trainer with a `training_step` or
`get_batch_samples` of the script's or of a library's own; callbacks of theirs that act on each micro-step; DeepSpeed, FSDP,
DataParallel and parallelism within a batch; optimizers that update in the backward pass; reentrant activation checkpointing, which
cannot be compared so; versions of transformers before `current_gradient_accumulation_steps`.

References
----------
Goyal et al., "Accurate, Large Minibatch SGD: Training ImageNet in 1 Hour", 2017 (a sum of gradients over micro-batches).
Hugging Face, "Fixing Gradient Accumulation", 2024 (why losses are divided by what counts in the whole update).
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from saturate import notices
from saturate.records.facts import Evidence, Facts
from saturate.techniques import _hf_trainer, _merge_proof
from saturate.techniques._api import Eligible, Ineligible, NotApplied, Proof, Technique, Touch
from saturate.techniques._interrupts import from_signal_handler
from saturate.techniques._merged_batch import NotMergeable, merge, weights

TECHNIQUE = Technique(
    id="merged-micro-batches",
    title="micro-steps merged into larger ones",
    numerics="stream",
    stage="model",
    touches=(Touch("micro-batches"),),
    merges="factor",
)

#: The note of why nothing is merged any more, and that of why a group was not.
_LEFT, _OWN = f"{TECHNIQUE.id}: left", f"{TECHNIQUE.id}: own"

#: Groups that are run both ways before it is known whether losses are divided, where their batches do not weigh the same.
MOST_UNSETTLED = 3


@dataclass(frozen=True)
class Options:
    """`factor`: how many micro-steps become one; a divisor of the script's accumulation."""

    factor: int = 2

    def __post_init__(self) -> None:
        if self.factor < 2:
            raise ValueError(f"factor is {self.factor}; 2 or more micro-steps become one")


def eligible(facts: Facts) -> Eligible | Ineligible:
    if facts.micro_steps < 2:
        return Ineligible("there is one micro-step per update")
    if facts.trainer is None:
        return Ineligible("no Trainer of transformers owns the loop, and in another one micro-steps cannot be merged from outside")
    if facts.trainer.accumulation < 2:
        return Ineligible("the Trainer does not accumulate gradients: its backward passes are no micro-steps")
    if facts.trainer.never_merged:
        return Ineligible(facts.trainer.never_merged)
    return Eligible(f"{facts.trainer.kind} accumulates {facts.trainer.accumulation} micro-steps per update")


def variants(facts: Facts) -> list[Options]:
    """All of them as one, then the fewest that divide them."""
    count = facts.trainer.accumulation if facts.trainer is not None else 2
    least = next(divisor for divisor in range(2, count + 1) if count % divisor == 0)
    return [Options(factor) for factor in dict.fromkeys((count, least))]


def apply(context: Any, options: Options) -> str:
    trainer = _hf_trainer.running()
    if trainer is None:
        raise NotApplied("no Trainer of transformers runs the training")
    count = trainer.args.gradient_accumulation_steps
    if count % options.factor:
        raise NotApplied(f"the Trainer accumulates {count} micro-steps per update, no multiple of {options.factor}")
    if problem := _hf_trainer.why_not(trainer, context.torch):
        raise NotApplied(problem)
    merger = Merger(context, trainer, options.factor)
    for name, stand_in in (("get_batch_samples", merger.taking), ("training_step", merger.stepping)):
        context.set_attribute(trainer, name, stand_in(getattr(trainer, name)))
    return f"{options.factor} of {count} micro-steps of {type(trainer).__name__} as one"


class Merger:
    """Between the loop of one Trainer and its micro-steps. `batches`: those of the update under way."""

    def __init__(self, context: Any, trainer: Any, factor: int):
        self.context, self.trainer, self.factor = context, trainer, factor
        self.torch = context.torch
        self.batches: list[Any] = []
        self.place = 0                              # of the next micro-step in the update
        self.whole: Any = None                      # what the group under way was merged into; None: it runs as it is
        self.groups = {False: 0, True: 0}           # so many were merged, without more padding and with
        self.undivided: bool | None = None          # means of micro-batches are added up; None: not known yet
        self.unsettled = 0                          # groups that could not tell
        self.left = False

    def taking(self, original: Any) -> Any:
        @functools.wraps(original)
        def get_batch_samples(*args: Any, **kwargs: Any) -> Any:
            found = original(*args, **kwargs)
            self.batches, self.place, self.whole = list(found[0]), 0, None
            return found

        return get_batch_samples

    def stepping(self, original: Any) -> Any:
        @functools.wraps(original)
        def training_step(model: Any, inputs: Any, *rest: Any, **kwargs: Any) -> Any:
            if self.left or self.place >= len(self.batches) or inputs is not self.batches[self.place]:
                return original(model, inputs, *rest, **kwargs)
            first = self.place - self.place % self.factor
            members = self.batches[first:first + self.factor]
            self.place += 1
            if self.place - 1 == first:
                self.whole = self._tried(original, members, rest, kwargs)
            if self.whole is None:
                return original(model, inputs, *rest, **kwargs)
            if self.place < first + len(members):
                return self.torch.zeros((), device=self.trainer.args.device)        # what it adds to the loss comes with the last one
            whole, self.whole = self.whole, None
            with self._weighing(len(members)):
                return self._counting(len(members), original, model, whole, *rest, **kwargs)    # in the last, where ranks synchronize

        return training_step

    def _counting(self, members: int, run: Any, *args: Any, **kwargs: Any) -> Any:
        """A micro-step that stands for so many: the Trainer divides a mean by how many there are in the update."""
        trainer, count = self.trainer, self.trainer.current_gradient_accumulation_steps
        trainer.current_gradient_accumulation_steps = len(self.batches) / members
        try:
            return run(*args, **kwargs)
        finally:
            trainer.current_gradient_accumulation_steps = count

    @contextlib.contextmanager
    def _weighing(self, members: int) -> Iterator[None]:
        """Where nobody divides means, each micro-step adds a whole one to the update."""
        trainer, own = self.trainer, vars(self.trainer).get("compute_loss")
        compute = trainer.compute_loss
        if self.undivided:
            trainer.compute_loss = lambda *args, **kwargs: compute(*args, **kwargs) * members
        try:
            yield
        finally:
            if own is not None:
                trainer.compute_loss = own
            elif self.undivided:
                del trainer.compute_loss

    def _tried(self, original: Any, members: list[Any], rest: Any, kwargs: Any) -> Any:
        try:
            return self._merged(original, members, rest, kwargs)
        except Exception as error:  # whatever is wrong with us, the script's own micro-steps run
            if from_signal_handler(error):
                raise
            return self._leave(f"{type(error).__name__}: {error}")

    def _merged(self, original: Any, members: list[Any], rest: Any, kwargs: Any) -> Any:
        """What a group runs as; None where each of its micro-steps runs by itself."""
        if len(members) < 2:
            return None
        trainer, torch = self.trainer, self.torch
        try:
            names = tuple(dict.fromkeys(("labels", *trainer.label_names)))
            divides = not _hf_trainer.divided_by_items(trainer, rest[0] if rest else kwargs.get("num_items_in_batch"))
            sums = not divides and self.undivided is False      # then nobody asks, which may take the device's time
            alike = sums or len({weights(batch, names, torch) for batch in members}) == 1
            if (divides or self.undivided) and not alike:
                raise NotMergeable("batches of several sizes, or with several numbers of labels that count, do not weigh the same")
            whole, padded = merge(members, _hf_trainer.paddings(trainer), _hf_trainer.pads_left(trainer), torch)
        except NotMergeable as reason:
            return self._as_it_is(str(reason))
        if not self.groups[padded] & (self.groups[padded] - 1):      # after none, 1, 2, 4, 8...
            weighs = (1,) if divides or sums else (len(members),) if self.undivided else (1, len(members))
            try:
                times = _merge_proof.compare(
                    trainer, lambda batch, count: self._counting(count, original, trainer.model, batch, *rest, **kwargs),
                    members, whole, weighs, torch)
            except NotMergeable as reason:
                self.unsettled += 1
                if divides or alike or self.undivided is not None or self.unsettled >= MOST_UNSETTLED:
                    return self._leave(str(reason))
                return self._as_it_is(str(reason))      # means of batches that do not weigh the same, perhaps: others may
            if not divides:
                self.undivided = times > 1
        self.groups[padded] += 1
        self.context.note(TECHNIQUE.id, f"{sum(self.groups.values())} time(s) {self.factor} micro-steps as one")
        return whole

    def _as_it_is(self, reason: str) -> None:
        self.context.note(_OWN, reason)

    def _leave(self, reason: str) -> None:
        self.left = True
        merged = sum(self.groups.values())
        late = f"; {merged} group(s) were merged before that showed" if merged else ""
        self.context.note(_LEFT, reason + late)
        notices.tell(f"saturate: {TECHNIQUE.id}: micro-steps run as the script wrote them: {reason}{late}\n")


def active(evidence: Evidence, options: Options) -> Proof:
    if left := evidence.notes.get(_LEFT, ""):
        return Proof(False, left)
    seen = evidence.notes.get(TECHNIQUE.id, "")
    return Proof(bool(seen), seen or evidence.notes.get(_OWN, "") or "no micro-steps were merged")


def as_code(options: Options) -> str:
    return (f"def merged(arguments):      # of TrainingArguments, before the Trainer is made: logs and checkpoints hold these numbers then\n"
            f"    arguments.per_device_train_batch_size *= {options.factor}\n"
            f"    arguments.gradient_accumulation_steps //= {options.factor}\n"
            "    return arguments")
