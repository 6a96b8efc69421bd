"""Can the user's check tell good from bad at all? Asked before any candidate is judged: it runs twice on the baseline, and once on answers
that are noise.

A check that scores noise as well as the model, or gives one model two scores, would pass anything.
"""

from __future__ import annotations

import copy
import dataclasses
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from saturate.inference import samples
from saturate.inference.accuracy import Budget, compare
from saturate.inference.checking import Check, Problem, Scored, scored
from saturate.inference.scores import Scores, UnusableScores

#: So many values of each tensor of the answers make up the noise, and at most so many of one answer.
_POOL, _FROM_ONE = 65536, 4096

#: Answers of the model are kept up to so many bytes, to be filled with noise: of a large model they take most of the time of a check.
_KEPT_BYTES = 2**28

#: What an answer may say beside its tensors. Other objects have no values that are known.
_PLAIN = (bool, int, float, str, bytes)

#: Noise is drawn anew before something is said against the check: one draw may be a coincidence.
_SEEDS = (1, 2)

#: What is known of a check that shuffles: no sample has a place of its own.
SHUFFLED = ("the check gives the same values in another order each time, so candidates cannot be compared sample by sample, nor can samples "
            "be kept to confirm a choice")

_LEAVE_OUT = f"{SHUFFLED}: leave out what shuffles them"

#: What is known of a check that draws a part of its data, or changes it at random. Which sample is which nobody can tell then.
REDRAWN = ("the check gives the model other inputs each time, so candidates cannot be compared sample by sample, nor can samples be kept to "
           "confirm a choice")

_FIX_SEED = f"{REDRAWN}: fix the seed of what is random"


@dataclass(frozen=True)
class Controls:
    """What is known about the check before it judges anything. `problem`: why it cannot judge."""

    baseline: Scored
    spread: float | None = None         # between two runs on the baseline, in units of the score; 0: the same
    shuffled: bool = False              # two runs of it go through the same samples in another order
    redrawn: bool = False               # ... or through other samples
    noise: float | None = None          # the score of noise in place of the answers; None: not known, see notes
    problem: Problem | None = None
    notes: tuple[str, ...] = ()
    late: bool = False                  # the time ended before all of this was known
    seconds: float = 0.0                # that a run on the model takes: the first may have read its data


def controls(check: Check, run: Callable[..., Any], budget: Budget, until_s: float = math.inf) -> Controls:
    """Whether the check can judge candidates within this budget; `run` is the baseline. Two runs of the check on it, and
    mostly one on noise, none of which begins behind `until_s` (`time.monotonic()`) but the first."""
    pool = _Pool(run)
    first = scored(check, pool, budget.metric)
    if first.scores is None:
        return Controls(first, problem=first.problem)
    mismatch = budget.problem(first.scores)
    if mismatch is not None:
        return Controls(first, problem=Problem("budget", mismatch, Budget.REMEDY))
    if time.monotonic() > until_s:
        return Controls(first, late=True, seconds=first.seconds)
    again = scored(check, run, budget.metric)
    if again.scores is None:
        return Controls(first, problem=_only_once(again.problem))
    spread = abs(first.scores.mean - again.scores.mean)
    problem, notes = _repeatable(first, first.scores, again, again.scores, budget)
    if problem is not None:
        return Controls(first, spread, problem=problem)
    if time.monotonic() > until_s:
        return Controls(first, spread, late=True, seconds=min(first.seconds, again.seconds))
    shuffled = (first.samples == again.samples and first.scores.values != again.scores.values
                and (first.asked != again.asked or _same_in_another_order(first.scores, again.scores)))
    if first.samples == again.samples and first.asked != again.asked and len(set(first.scores.values or ())) == 1:
        shuffled, notes = True, (*notes, _LEAVE_OUT)       # scores that are all alike, as those of agreement with the model are, do not show it
    before, after = first.scores.values or (), again.scores.values or ()
    redrawn = first.samples != again.samples and bool(before) and (not _close(before, after) or len(set(before)) == 1)
    if redrawn:                 # inputs that are computed may differ in their last bits: then each score is what it was
        notes = (*notes, _FIX_SEED)
    return _against_noise(check, pool, budget, Controls(first, spread, shuffled, redrawn, notes=notes, seconds=min(first.seconds, again.seconds)),
                          first.scores)


def _only_once(problem: Problem | None) -> Problem | None:
    """What the second run of a check failed of, where the first did not: most likely, data that can be read once."""
    if problem is None or problem.kind == "run":
        return problem
    return Problem(problem.kind, f"it worked once, and failed when it was called a second time: {problem.what}",
                   "a check is called for every candidate: where its data can be read only once (an iterator, a generator), make that "
                   "inside of the check; else, fix what changes from call to call")


def _repeatable(first: Scored, before: Scores, again: Scored, after: Scores,
                budget: Budget) -> tuple[Problem | None, tuple[str, ...]]:
    """Whether two runs of the check on one model say the same, and whose doing it is where they do not."""
    random = first.asked == again.asked and first.answers != again.answers
    if (before.mean, before.values) == (after.mean, after.values):      # its other entries may be anything, the time that it took for one
        return None, ("the model gives other answers each time; the scores are the same",) if random else ()
    if not random and first.samples == again.samples and _same_in_another_order(before, after):
        return None, (_LEAVE_OUT,)
    if first.asked != again.asked:
        cause = "it asks for other samples each time"
    elif first.answers != again.answers:
        cause = "the model gives other answers each time"
    else:
        cause = "it scores the same answers differently"
    what = f"two runs of the check on the same model differ by {abs(before.mean - after.mean):.3g}: {cause}"
    try:
        unpaired = REDRAWN if first.samples != again.samples else ""
        verdicts = {compare(one, other, budget, unpaired=unpaired).verdict for one, other in ((before, after), (after, before))}
    except UnusableScores as error:
        return Problem("unstable", f"two runs of the check on the same model do not compare: {error}", error.remedy), ()
    allowed = budget.max_drop * (abs(before.mean) if budget.relative else 1)
    beyond = abs(before.mean - after.mean) > allowed if before.values is None else "fail" in verdicts
    if beyond:
        return Problem("unstable", f"{what}; the budget is {allowed:.3g}", "fix the seed of what is random"), ()
    return None, (what,)


def _same_in_another_order(before: Scores, after: Scores) -> bool:
    """Up to rounding: a kernel may add up otherwise where a sample has another place in its batch."""
    return _close(sorted(before.values or ()), sorted(after.values or ()))


def _close(one: Sequence[float], other: Sequence[float]) -> bool:
    return len(one) == len(other) > 0 and all(math.isclose(a, b, rel_tol=1e-4, abs_tol=1e-6) for a, b in zip(one, other))


def _against_noise(check: Check, pool: _Pool, budget: Budget, known: Controls, baseline: Scores) -> Controls:
    """`known`, with what the check says to noise in place of the answers: it must score worse."""

    def result(note: str = "", noise: float | None = None, problem: Problem | None = None) -> Controls:
        notes = (*known.notes, note) if note else known.notes
        return dataclasses.replace(known, noise=noise, problem=problem, notes=notes)

    if not pool.kept:
        return result("the answers are no tensors, so no noise can be made of them: whether the check looks at them is not known")
    if not pool.varies():
        return result("the answers of the model hold one number only, so noise made of them tells nothing about the check")
    verdicts = []
    for seed in _SEEDS:
        found = scored(check, pool.noise(seed), budget.metric)
        if found.problem is not None and found.problem.kind == "run":
            return result(problem=found.problem)
        if found.scores is None:
            return result("the check does not take noise for an answer, so it does look at the answers")
        noise = found.scores.mean
        verdicts.append(_against(baseline, found.scores, budget, known.spread or 0.0))
        if verdicts[-1] == "worse":
            return result(noise=noise)
    scores = f"noise scores {noise:.4g}, the model {baseline.mean:.4g}"
    if set(verdicts) == {"same"} and pool.says_more():
        return result("the check does not depend on the tensors of the answers; whether it does on what else they hold (numbers, texts, how "
                      "many entries there are), which no noise was made of, is not known", noise)
    if set(verdicts) == {"same"}:
        return result(noise=noise, problem=Problem("blind", f"the check does not depend on the answers: {scores}",
                                                   "score what run(*inputs) returns, not the model itself"))
    if set(verdicts) == {"better"}:
        other = not budget.higher_is_better
        remedy = f"is {'higher' if other else 'lower'} better? Budget(higher_is_better={other})"
        return result(noise=noise, problem=Problem("direction", f"the score is better for noise: {scores}", remedy))
    return result(f"the check hardly tells the model from noise ({scores}), so it will hardly see damage", noise)


def _against(baseline: Scores, noise: Scores, budget: Budget, spread: float) -> Literal["worse", "same", "better", "unclear"]:
    if noise.mean == baseline.mean and noise.values == baseline.values:
        return "same"
    drop = budget.sign * (baseline.mean - noise.mean)
    try:
        ends = compare(baseline, noise, Budget(0.0, higher_is_better=budget.higher_is_better, score_range=budget.score_range)).drop_ci
    except UnusableScores:      # another number of scores: the check does look at the answers
        return "worse"
    low, high = ends or (drop - spread, drop + spread)
    return "worse" if low > 0 else "better" if high < 0 else "unclear"


class _Pool:
    """`run`, keeping some values of each tensor of its answers: what `noise` draws from. What else is in an answer noise leaves as it is;
    `rest` holds digests of that, by the shapes of the inputs. `answers`: to what was asked, by its digest, as far as there is room."""

    def __init__(self, run: Callable[..., Any]):
        self.run = run
        self.kept: dict[int, Any] = {}
        self.rest: dict[Any, set[str]] = {}
        self.answers: dict[str, Any] = {}
        self._room_bytes = _KEPT_BYTES

    def __call__(self, *inputs: Any, **named: Any) -> Any:
        asked = _name(inputs, named)        # before the model may write to them
        answer = self.run(*inputs, **named)
        size_bytes = sum(tensor.numel() * tensor.element_size() for tensor in samples.tensors(answer))
        if asked not in self.answers and size_bytes <= self._room_bytes:
            self._room_bytes -= size_bytes
            self.answers[asked] = copy.deepcopy(answer)         # the check may write to its own
        rest = samples.Digest()
        rest.feed([tuple(leaf.shape) if samples.is_tensor(leaf) else leaf if isinstance(leaf, _PLAIN) else type(leaf).__name__
                   for leaf in samples.leaves(answer)])
        self.rest.setdefault(tuple(tuple(one.shape) for one in samples.tensors((inputs, named))), set()).add(rest.hex())
        for place, tensor in enumerate(samples.tensors(answer)):
            values, before = samples.dense(tensor).flatten(), self.kept.get(place)
            if len(values) and (before is None or len(before) < _POOL):
                self.kept[place] = _joined(before, _drawn(values, min(len(values), _FROM_ONE), _generator(len(values))))
        return answer

    def says_more(self) -> bool:
        """Whether what noise leaves as it is differs between answers to inputs of the same shapes."""
        return any(len(found) > 1 for found in self.rest.values())

    def varies(self) -> bool:
        return any(bool((values != values[0]).any()) for values in self.kept.values())

    def noise(self, seed: int) -> Callable[..., Any]:
        """The same, but every number of an answer is one of those that were kept, at random: the values that the model
        answers with, without what they have to do with the inputs."""
        generator = _generator(seed)

        def run(*inputs: Any, **named: Any) -> Any:
            known = self.answers.get(_name(inputs, named))
            answer = copy.deepcopy(self.run(*inputs, **named) if known is None else known)
            for place, tensor in enumerate(samples.tensors(answer)):
                if place in self.kept and str(tensor.layout) == "torch.strided":
                    tensor.copy_(_drawn(self.kept[place], tensor.numel(), generator).reshape(tensor.shape))
            return answer

        return run


def _name(inputs: tuple[Any, ...], named: dict[str, Any]) -> str:
    digest = samples.Digest()
    digest.feed((inputs, sorted(named.items())))
    return digest.hex()


def _generator(seed: int) -> Any:
    """Of random numbers that leave the user's alone."""
    import torch

    return torch.Generator().manual_seed(seed)


def _drawn(values: Any, count: int, generator: Any) -> Any:
    import torch

    return values[torch.randint(len(values), (count,), generator=generator, device="cpu")]


def _joined(before: Any, values: Any) -> Any:
    import torch

    return values if before is None else torch.cat([before, values.to(before.dtype)])
