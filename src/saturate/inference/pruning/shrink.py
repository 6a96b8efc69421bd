"""A copy of a model with smaller layers of the same classes, every cut proved on the way."""

from __future__ import annotations

import copy
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from saturate.inference.batches import tensors
from saturate.inference.pruning import importance
from saturate.inference.pruning.groups import Group, Slot, groups
from saturate.inference.pruning.labels import TooLarge
from saturate.inference.pruning.propagation import Labels
from saturate.inference.pruning.surgery import (
    Change,
    Refused,
    Surgery,
    Undo,
    attempts,
    attributes,
    described,
    without_nested_tensors,
)
from saturate.inference.pruning.tracing import Leaf, leaves_of, plain_attention, record
from saturate.inference.pruning.values import answered, first_samples, samples, seeded
from saturate.techniques._api import NotApplied

#: What a forward raises where shapes do not fit.
MISFITS = (RuntimeError, ValueError, TypeError, AssertionError, LookupError, AttributeError, ArithmeticError)

#: Relative error of outputs that only the order of sums may cause, by device and bytes of a number (float32 products may
#: use shorter formats on a GPU; untested there).
TOLERANCE = {("cpu", 8): 1e-9, ("cpu", 4): 1e-4, ("cuda", 8): 1e-9, ("cuda", 4): 3e-3}
TOLERANCE_OF_HALVES = 3e-2

#: The tensors that a model answers with, and those that layers do, by the id of each.
Outputs = tuple[list[Any], dict[int, list[Any]]]


@dataclass
class Shrunk:
    """What was cut. `cut` are layers by name with their widths; `left_alone` counts groups by the reason."""

    cut: list[str] = field(default_factory=list)
    left_alone: Counter[str] = field(default_factory=Counter)
    scored_by: str = ""
    parameters: tuple[int, int] = (0, 0)        # before, after
    flops: tuple[int, int] = (0, 0)             # of one forward, products and convolutions

    def sentence(self) -> str:
        share = [after / max(before, 1) for before, after in (self.parameters, self.flops)]
        left = "; left alone: " + ", ".join(f"{count} ({reason})" for reason, count in self.left_alone.most_common(3))
        return (f"{len(self.cut)} group{'s' * (len(self.cut) > 1)} of layers cut by {self.scored_by} ({', '.join(self.cut[:4])}{', ...' * (len(self.cut) > 4)}): "
                f"{share[0]:.2f} of the parameters, {share[1]:.2f} of the FLOPs{left if self.left_alone else ''}")


def shrink(
    torch: Any,
    original: Any,
    inputs: Sequence[tuple[Any, ...]],
    batches: Sequence[tuple[Any, ...]],
    *,
    ratio: float,
    multiple: int,
    by: str = "taylor",
    heads: bool = True,
    seed: int = 0,
    deadline_s: float | None = None,
) -> tuple[Any, Shrunk]:
    """A smaller copy of `original` and what was done; the original stays as it is.

    `ratio`: the share of each width that goes. `multiple`: widths stay multiples of it. `inputs`: batches that the model
    is run on (the first is recorded). `batches`: those that the importance of channels is estimated on. `by`: "taylor" or
    "magnitude". `heads`: whether attention may lose some.
    Raises NotApplied where nothing can be cut, with the reason; `deadline_s` is in time.monotonic().
    """
    model = _copied(original)
    batch = _few_samples(torch, model, inputs[0])
    report = Shrunk(parameters=(_count(model), 0), flops=(_flops(torch, model, inputs[0]), 0))
    leaves, found, labels = _analysed(torch, model, batch)
    scores, report.scored_by = _scores(torch, model, leaves, found, labels, batches or inputs, by, seed)
    plans: list[_Plan] = []
    too_narrow: list[Group] = []
    for group, score in zip(found, scores):
        if group.heads and not heads:
            report.left_alone["heads have to stay"] += 1
        elif group.width(ratio, multiple) == len(group.classes):
            too_narrow.append(group)
        else:
            plans.append(_Plan.of(group, score, group.width(ratio, multiple)))
    table = _Table(torch, model, Surgery(torch, leaves), labels, batch, seed, deadline_s)
    done = table.cut_all(plans, report.left_alone)
    for group in too_narrow:
        report.left_alone["cut along its other axis already" if group.rivals & table.removed
                          else f"too narrow for a smaller multiple of {multiple}"] += 1
    report.cut = [f"{_name(plan.group, leaves)} {len(plan.group.classes) * plan.group.unit} to {plan.width * plan.group.unit}"
                  for plan in done]
    if not report.cut:
        raise NotApplied(_nothing(report, labels))
    _runs_as_before(torch, original, model, inputs[0])
    report.parameters = (report.parameters[0], _count(model))
    report.flops = (report.flops[0], _flops(torch, model, inputs[0]))
    return model, report


def _copied(original: Any) -> Any:
    try:
        return copy.deepcopy(original)
    except (RuntimeError, TypeError, ValueError, AttributeError) as error:
        raise NotApplied(f"the model cannot be copied: {type(error).__name__}: {error}") from error


def _count(model: Any) -> int:
    return sum(parameter.numel() for parameter in model.parameters())


def _flops(torch: Any, model: Any, batch: tuple[Any, ...]) -> int:
    from torch.utils.flop_counter import FlopCounterMode

    with torch.no_grad(), plain_attention(torch), FlopCounterMode(display=False) as counter:
        answered(model, batch)
    return counter.get_total_flops()


def _analysed(torch: Any, model: Any, batch: tuple[Any, ...]) -> tuple[list[Leaf], list[Group], Labels]:
    leaves = leaves_of(model)
    odd = next((leaf for leaf in leaves if type(leaf.tensor) not in (torch.Tensor, torch.nn.Parameter)), None)
    if odd is not None:
        raise NotApplied(f"{odd.name} is a {type(odd.tensor).__name__}, not a plain tensor")
    try:
        trace = record(torch, model, batch)
        labels = Labels(torch, trace)
    except TooLarge as error:
        raise NotApplied(f"the model is too large to analyse: {error}") from error
    except NotImplementedError as error:
        raise NotApplied(f"an operation of the model cannot be recorded: {error}") from error
    return trace.leaves, groups(trace, labels), labels


def _scores(torch: Any, model: Any, leaves: list[Leaf], found: list[Group], labels: Labels, batches: Sequence[tuple[Any, ...]], by: str,
            seed: int) -> tuple[list[Any], str]:
    if by not in ("taylor", "magnitude"):
        raise NotApplied(f"importance {by!r} is neither 'taylor' nor 'magnitude'")
    if by == "taylor" and found:
        with plain_attention(torch), seeded(torch, seed):
            scores = importance.taylor(torch, model, leaves, found, labels.summed, batches, seed)
        if scores is not None:
            return scores, "what they move in the outputs"
    return importance.magnitude(torch, leaves, found), "the magnitude of their weights" + (
        "" if by == "magnitude" else " (the outputs have no gradient)")


def _name(group: Group, leaves: list[Leaf]) -> str:
    return leaves[group.slots[0][0]].name.rpartition(".")[0] or leaves[group.slots[0][0]].name


def _nothing(report: Shrunk, labels: Labels) -> str:
    reasons = [f"{count} groups: {reason}" for reason, count in report.left_alone.most_common(3)]
    fixed = ", ".join(name for name, _ in labels.atoms.fixed_by.most_common(5))
    return "nothing can be cut: " + "; ".join([*reasons, f"other widths are fixed by {fixed}" if fixed else "no width is free"])


@dataclass(frozen=True)
class _Plan:
    """Which classes of a group go."""

    group: Group
    width: int
    removal: dict[Slot, set[int]]
    roots: frozenset[int]

    @staticmethod
    def of(group: Group, score: Any, width: int) -> _Plan:
        """The `width` best classes stay."""
        score = score.nan_to_num(nan=float("inf")).tolist()     # what cannot be judged stays
        going = sorted(range(len(score)), key=lambda place: (score[place], place))[: len(score) - width]
        return _Plan(group, width, _merged(group.classes[place] for place in going), frozenset(group.roots[place] for place in going))


def _merged(parts: Iterable[Mapping[Slot, Iterable[int]]]) -> dict[Slot, set[int]]:
    merged: dict[Slot, set[int]] = {}
    for part in parts:
        for slot, indices in part.items():
            merged.setdefault(slot, set()).update(indices)
    return merged


class _Table:
    """The model on the table. Groups are cut together where nothing but torch's own layers has to change, since each try
    costs a forward; where that fails, in halves, down to single ones."""

    def __init__(self, torch: Any, model: Any, surgeon: Surgery, labels: Labels, batch: tuple[Any, ...], seed: int,
                 deadline_s: float | None) -> None:
        self.torch, self.model, self.surgeon, self.labels = torch, model, surgeon, labels
        self.batch, self.seed, self.deadline_s = batch, seed, deadline_s
        self.removed: set[int] = set()

    def cut_all(self, plans: Sequence[_Plan], left_alone: Counter[str]) -> list[_Plan]:
        """Those that could be cut; the others are counted by reason. Of rivals, the earlier one is tried first."""
        done: list[_Plan] = []
        simple: list[_Plan] = []
        for plan in plans:
            if not (plan.group.rivals or any(self._attributes([plan]))):
                simple.append(plan)
                continue
            reason = "cut along its other axis already" if plan.group.rivals & self.removed else self._cut([plan])
            if reason:
                left_alone[reason] += 1
            else:
                done.append(plan)
        return done + self._in_halves(simple, left_alone)

    def _in_halves(self, plans: list[_Plan], left_alone: Counter[str]) -> list[_Plan]:
        if not plans:
            return []
        reason = self._cut(plans)
        if not reason:
            return plans
        if len(plans) == 1:
            left_alone[reason] += 1
            return []
        middle = len(plans) // 2
        return self._in_halves(plans[:middle], left_alone) + self._in_halves(plans[middle:], left_alone)

    def _cut(self, plans: Sequence[_Plan]) -> str:
        """Why that was not possible, empty where it was; then nothing has changed."""
        if self.deadline_s is not None and time.monotonic() >= self.deadline_s:
            raise NotApplied("the time ended while layers were being cut")
        removal = _merged(plan.removal for plan in plans)
        owners = self.surgeon.owners(removal)
        try:
            with self.surgeon.zeroed(removal):
                expected = self._outputs(owners)
        except MISFITS as error:
            return self._unless_memory(error, "it does not run with zeros in their place")
        certain, possible = self._attributes(plans)
        reason = ""
        for changes in attempts(certain, possible):
            undo = Undo()
            before = [(module, name, getattr(module, name)) for module, name, _ in changes]
            try:
                self.surgeon.cut(removal, undo)
                without_nested_tensors(self.torch, self.model, undo)
                for module, name, value in changes:
                    undo.set(module, name, value)
                if self._same(expected, self._outputs(owners)):
                    self._put_back(before, expected, owners)
                    self.removed.update(*(plan.roots for plan in plans))
                    return ""
                reason = "without them it computes something else than with zeros in their place"
            except Refused as refusal:
                undo.back()
                return str(refusal)
            except MISFITS as error:
                reason = self._unless_memory(error, "its code counts on the width")
            except BaseException:
                undo.back()
                raise
            undo.back()
        return reason

    def _put_back(self, before: Sequence[Change], expected: Outputs, owners: list[Any]) -> None:
        """Attributes that the answer does not need changed are as they were: another number may happen to be the old width (the longest
        text that is looked at), and this batch need not show what it is for."""
        for module, name, value in before:
            changed = getattr(module, name)
            setattr(module, name, value)
            try:
                needed = not self._same(expected, self._outputs(owners))
            except MISFITS as error:
                self._unless_memory(error, "")
                needed = True
            if needed:
                setattr(module, name, changed)

    def _unless_memory(self, error: Exception, reason: str) -> str:
        if isinstance(error, self.torch.cuda.OutOfMemoryError):
            raise error
        return reason

    def _outputs(self, owners: list[Any]) -> Outputs:
        """The model's outputs, and by layer that is cut its first output in each call: what a later layer hides shows there."""
        seen: dict[int, list[Any]] = {}

        def look(module: Any, args: Any, result: Any) -> None:
            seen.setdefault(id(module), []).extend(tensor.detach().clone() for tensor in tensors(self.torch, result)[:1])

        handles = [module.register_forward_hook(look) for module in owners]
        try:
            with self.torch.no_grad(), plain_attention(self.torch), seeded(self.torch, self.seed):
                outputs = tensors(self.torch, answered(self.model, self.batch))
        finally:
            for handle in handles:
                handle.remove()
        return outputs, seen

    def _same(self, expected: Outputs, found: Outputs) -> bool:
        """Of layers in between, those outputs can be compared that were not cut themselves; and a pruned attention calls its
        last layer, which torch's own does not."""
        if [tensor.shape for tensor in expected[0]] != [tensor.shape for tensor in found[0]]:
            return False
        pairs = list(zip(expected[0], found[0]))
        for module in expected[1].keys() & found[1].keys():
            if len(expected[1][module]) != len(found[1][module]):
                return False
            pairs += [(one, other) for one, other in zip(expected[1][module], found[1][module]) if one.shape == other.shape]
        return all(_close(self.torch, one, other) for one, other in pairs)

    def _attributes(self, plans: Sequence[_Plan]) -> tuple[list[Change], list[Change]]:
        """Whole numbers in modules that say a width: certain where a layer says the width of its own parameter, possible
        where code that reshapes the dimension runs in the module, or where another dimension has the same width."""
        removal = _merged(plan.removal for plan in plans)
        certain: list[Change] = []
        possible: list[Change] = []
        for module in self.surgeon.owners(removal):
            if not described(self.torch, module):
                sizes, other = self.surgeon.sizes(module, removal)
                for change in attributes(module, sizes):
                    (possible if getattr(change[0], change[1]) in other else certain).append(change)
        known = {(id(module), name) for module, name, _ in certain + possible}
        for module, sizes in self._sites(frozenset().union(*(plan.roots for plan in plans))):
            possible += [change for change in attributes(module, sizes) if (id(change[0]), change[1]) not in known]
        return certain, possible

    def _sites(self, roots: frozenset[int]) -> Iterator[tuple[Any, dict[int, int]]]:
        found: dict[int, tuple[Any, dict[int, set[int]]]] = {}
        gone = self.removed | roots
        for module, parts in self.labels.sites_of(roots):
            before = sum(self.removed.isdisjoint(part) for part in parts)
            after = sum(gone.isdisjoint(part) for part in parts)
            if after != before and not described(self.torch, module):
                found.setdefault(id(module), (module, {}))[1].setdefault(before, set()).add(after)
        for module, sizes in found.values():
            yield module, {before: next(iter(after)) for before, after in sizes.items() if len(after) == 1}


def _close(torch: Any, one: Any, other: Any) -> bool:
    """Of one shape, up to the order of sums. What is not finite (a masked score) has to be so in both, and counts no further."""
    if not one.is_floating_point():
        return bool((one == other).float().mean() > 0.99)
    tolerance = TOLERANCE.get((one.device.type, one.element_size()), TOLERANCE_OF_HALVES)
    finite = one.isfinite()
    if not torch.equal(finite, other.isfinite()):
        return False
    one, other = one[finite].double(), other[finite].double()
    return bool((one - other).norm() <= tolerance * one.norm())


def _few_samples(torch: Any, model: Any, batch: tuple[Any, ...]) -> tuple[Any, ...]:
    """Two samples of a larger batch, if the model takes them: every cut is tried on them. (One could not show that
    samples are mixed up.)"""
    if (samples(torch, batch) or 0) <= 2:
        return batch
    few = first_samples(torch, batch, 2)
    try:
        with torch.no_grad():
            answered(model, few)
    except MISFITS:
        return batch
    return few


def _runs_as_before(torch: Any, original: Any, model: Any, batch: tuple[Any, ...]) -> None:
    """The copy takes the batch, and one sample of it where the original does, and answers in the same shapes; torch's fused
    forwards, which the proofs did without, are on."""
    def shapes(run: Callable[..., Any], given: tuple[Any, ...]) -> list[Any]:
        with torch.no_grad():
            return [tuple(tensor.shape) for tensor in tensors(torch, answered(run, given))]

    alone = first_samples(torch, batch, 1) if (samples(torch, batch) or 1) > 1 else batch
    for given, what in ((batch, "its own inputs"), (alone, "another batch size")):
        try:
            expected = shapes(original, given)
        except MISFITS:
            continue        # the original does not take it either
        try:
            found = shapes(model, given)
        except MISFITS as error:
            raise NotApplied(f"the smaller model does not run on {what}: {type(error).__name__}: {error}") from error
        if expected != found:
            raise NotApplied(f"on {what} the smaller model gives outputs of shapes {found}, not {expected}")
