"""Train with a larger global batch, and a learning rate that goes with it.

What it does
------------
Multiplies the batch size of the training loaders by `factor`, and the learning rate of every optimizer step by the rule for
its kind: linear for SGD (the factor), square root for Adam and its relatives.

When it helps
-------------
The device is not full, the throughput in samples per second still grows with the batch (`saturate fit` shows where it stops),
and the training tolerates fewer, larger updates.

When it hurts
-------------
Beyond a critical batch size each sample teaches less. The rules hold up to a point, after a warm-up that this does not add;
for SGD the linear one broke down above 8 Ki images on ImageNet. They are for a loss that is a mean: one that is summed over its samples
grows with the batch by itself, and for SGD `rule="none"` is the linear rule then. It is another training: how good the result is must be
measured by the user's own metric.

Numerics
--------
`convergence`: other batches, other updates, half as many of them for a factor of two. Neither time per step nor loss per
update can be compared with the script's own, so it is not raced and not verified: put it into a recipe by hand.

How it is applied
-----------------
To DataLoaders that shuffle (or draw from a random or distributed sampler) and state a batch size, when they are built;
others, evaluation loaders among them, and datasets smaller than the new batch stay as they are. So does a loader that has the
dataset, sampler, `collate_fn` and new size of an earlier one, because a framework has then built that one again. The learning rate is
multiplied only during each `optimizer.step()`, and not during its closure. So schedules, however they set it, logs and checkpoints keep
the script's own values, and a resumed run is not scaled twice. With `rule="auto"` an optimizer of a kind without a rule
keeps its learning rate, and so does one whose groups hold no `lr`; a line on stderr says so. Momentum and Adam's betas stay.

References
----------
Krizhevsky, "One weird trick for parallelizing convolutional neural networks", 2014 (both rules).
Goyal et al., "Accurate, Large Minibatch SGD: Training ImageNet in 1 Hour", 2017 (linear, with warm-up).
Malladi et al., "On the SDEs and Scaling Rules for Adaptive Gradient Algorithms", NeurIPS 2022 (square root).
McCandlish et al., "An Empirical Model of Large-Batch Training", 2018 (critical batch size).
"""

from __future__ import annotations

import functools
import math
import weakref
from dataclasses import dataclass
from typing import Any

from saturate import notices
from saturate.records.facts import Evidence, Facts
from saturate.techniques import _closures, _given
from saturate.techniques._api import Eligible, Ineligible, Proof, Technique, Touch

TECHNIQUE = Technique(
    id="global-batch",
    title="larger global batch",
    numerics="convergence",
    stage="import",
    touches=(Touch("loader", 20), Touch("global-batch"), Touch("learning-rate")),
)

#: Loaders made that are remembered, the latest: a framework builds one again soon.
MOST_MADE = 64

#: Exponent of the factor, by the optimizer's class. Others have no published rule.
_EXPONENTS = {"SGD": 1.0, **dict.fromkeys(("Adam", "AdamW", "NAdam", "RAdam", "Adamax", "Adagrad", "RMSprop"), 0.5)}
_RULES = {"auto": None, "linear": 1.0, "sqrt": 0.5, "none": 0.0}


@dataclass(frozen=True)
class Options:
    """`factor`: how many times larger batches are; `rule`: "auto" (by optimizer), "linear", "sqrt" or "none"."""

    factor: int = 2
    rule: str = "auto"

    def __post_init__(self) -> None:
        if self.factor < 2:
            raise ValueError(f"factor is {self.factor}, not 2 or more")
        if self.rule not in _RULES:
            raise ValueError(f"rule is {self.rule!r}, not one of {', '.join(_RULES)}")


def eligible(facts: Facts) -> Eligible | Ineligible:
    return Ineligible("it is another training, which time per step and loss per update say nothing about: "
                      "see samples per second with `saturate fit`, and put it into a recipe by hand")


def apply(context: Any, options: Options) -> str:
    loaders = Loaders(context, options.factor)
    context.on_loader(loaders.rewrite)
    rates = Rates(options, loaders)
    from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

    context.on_undo(register_optimizer_step_pre_hook(rates.before_step).remove)
    context.on_undo(register_optimizer_step_post_hook(rates.restore).remove)
    optimizers = context.torch.optim.Optimizer
    save = optimizers.state_dict

    @functools.wraps(save)
    def state_dict(self: Any) -> Any:
        rates.restore(self)         # a step that is interrupted ends without its hooks, and the script may save then
        return save(self)

    context.set_attribute(optimizers, "state_dict", state_dict)
    return f"training batches {options.factor} times as large, learning rate by rule {options.rule}"


class Loaders:
    """Rewrites the arguments of training loaders."""

    def __init__(self, context: Any, factor: int):
        self.context = context
        self.factor = factor
        self.any_made = False
        self._made: list[tuple[Any, int, Any]] = []     # (a weak reference to its dataset, batch size that we gave it, what collates its items)

    def rewrite(self, dataset: Any, arguments: dict[str, Any], given: frozenset[str]) -> dict[str, Any]:
        size = arguments.get("batch_size")
        if not isinstance(size, int) or self._rebuilt(dataset, size, arguments):
            return {}
        if "batch_size" not in given or arguments.get("batch_sampler") is not None or not _draws_at_random(arguments):
            return {}
        sampler = arguments.get("sampler")
        if _fewer_than(dataset if sampler is None else sampler, self.factor * size):
            return {}
        collate = arguments.get("collate_fn") or self.context.torch.utils.data.default_collate
        self.any_made = True
        known = weakref.ref(dataset) if _given.referable(dataset) else lambda: dataset
        self._made = [*(entry for entry in self._made if entry[0]() is not None), (known, self.factor * size, collate)][-MOST_MADE:]
        self.context.note(TECHNIQUE.id, f"batches of {self.factor * size} instead of {size}")
        return {"batch_size": self.factor * size}

    def _rebuilt(self, dataset: Any, size: int, arguments: dict[str, Any]) -> bool:
        """Whether a framework builds a loader again from one that was built: what is large already stays so. It takes over what such
        a one has: a sampler instead of `shuffle`, and a `collate_fn` also where the script gave none."""
        return arguments.get("sampler") is not None and any(
            (known() is dataset, enlarged, collate) == (True, size, arguments.get("collate_fn")) for known, enlarged, collate in self._made)


def _draws_at_random(arguments: dict[str, Any]) -> bool:
    """Whether a loader is for training: it shuffles, or its sampler does."""
    sampler = arguments.get("sampler")
    if sampler is None:
        return bool(arguments.get("shuffle"))
    if hasattr(sampler, "shuffle"):
        return bool(sampler.shuffle)
    return "Random" in type(sampler).__name__


def _fewer_than(source: Any, samples: int) -> bool:
    """Of a dataset, or of the sampler that draws a part of it."""
    try:
        return len(source) < samples
    except (TypeError, NotImplementedError, AttributeError):
        return False                # iterable datasets have no length


class Rates:
    """Larger learning rates, for the length of one step."""

    def __init__(self, options: Options, loaders: Loaders):
        self.options = options
        self.loaders = loaders
        self._raised: list[tuple[Any, Any, Any]] = []       # (group, the script's own rate, ours)
        self._told: set[str] = set()

    def before_step(self, optimizer: Any, args: Any, kwargs: Any) -> Any:
        """What an earlier step left that raised, or a wrapper that shares the groups, is taken back first. A closure sees, and may
        set, the script's own rates. They are larger before it too: LBFGS reads its rate there."""
        self.restore(optimizer)
        scale = self._scale(type(optimizer).__name__) if self.loaders.any_made else 1.0
        if scale == 1.0:
            return None
        if not all("lr" in group for group in optimizer.param_groups):
            self._keeps(type(optimizer).__name__, "no lr in the groups of")
            return None
        self._raise(optimizer, scale)
        return _closures.around(args, kwargs, before=lambda: self.restore(optimizer), after=lambda: self._raise(optimizer, scale))

    def _raise(self, optimizer: Any, scale: float) -> None:
        self.restore(optimizer)
        for group in optimizer.param_groups:
            own, group["lr"] = group["lr"], group["lr"] * scale
            self._raised.append((group, own, group["lr"]))

    def restore(self, optimizer: Any, *_: Any) -> None:
        """After a step, and for its closure."""
        kept = []
        for entry in self._raised:
            group, own, ours = entry
            if not any(group is mine for mine in optimizer.param_groups):
                kept.append(entry)
            elif group["lr"] is ours:           # otherwise the script has set it meanwhile
                group["lr"] = own
        self._raised = kept

    def _scale(self, kind: str) -> float:
        exponent = _RULES[self.options.rule]
        if exponent is None:
            exponent = _EXPONENTS.get(kind)
        if exponent is None:
            self._keeps(kind, "no rule for")
            return 1.0
        return math.pow(self.options.factor, exponent)

    def _keeps(self, kind: str, lacking: str) -> None:
        if kind not in self._told:
            self._told.add(kind)
            notices.tell(f"saturate: global-batch: there is {lacking} {kind}; its learning rate stays as it is\n")


def active(evidence: Evidence, options: Options) -> Proof:
    seen = evidence.notes.get(TECHNIQUE.id, "")
    return Proof(bool(seen), seen or "no DataLoader that shuffles and states its batch size was built")


def as_code(options: Options) -> str:
    exponent = _RULES[options.rule]
    if exponent is None:
        scale = f"exponents = {_EXPONENTS}\nscale = {options.factor} ** exponents.get(type(optimizer).__name__, 0.0)"
    else:
        scale = f"scale = {math.pow(options.factor, exponent)!r}"
    rates = (
        f"\n{scale}\n"
        "for group in optimizer.param_groups:      # once: before a scheduler is made, and not again where a checkpoint is loaded\n"
        "    group['lr'] *= scale"
    )
    return f"loader = DataLoader(dataset, ..., batch_size={options.factor} * batch_size, shuffle=True){rates if exponent != 0 else ''}"
