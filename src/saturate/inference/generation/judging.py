"""Is a way to generate right? Its tokens against the plain loop's, and, where it changes numbers, the user's check on what it says.

Lossless ways must give the same greedy tokens. Ways that change numbers need a check, which is asked first whether it can judge.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import msgspec

from saturate.inference.accuracy import Budget
from saturate.inference.checking import of_candidate
from saturate.inference.controls import controls
from saturate.inference.failures import WorkerFailed
from saturate.inference.generation import measure
from saturate.inference.generation.compare import LENGTHS, Agreement, agreement
from saturate.inference.generation.conclusion import THRESHOLD, race_words, speculation_words
from saturate.inference.generation.decode import Batch, Loop, Request
from saturate.inference.generation.host import Host, Yard
from saturate.inference.generation.prompts import as_lists
from saturate.inference.generation.recipe import PLAIN, Given, Recipe
from saturate.inference.generation.sampling import GREEDY
from saturate.inference.jury import Jury
from saturate.measure.race import Estimate, Limits, verdict
from saturate.records.generation import GenerationCandidate
from saturate.records.inference import Fate

Batches = list[Batch]

_with = msgspec.structs.replace


@dataclass
class Judge:
    """Of one search, with what that was given: see `search.Search`. `turn`: the place of a way among those that met the samples of the
    confirmation."""

    given: Given
    yard: Yard
    selection: Batches
    confirmation: Batches
    request: Request
    plain: Loop
    check: Callable[..., Any] | None
    budget: Budget | None
    turn: Callable[[GenerationCandidate], int]
    jury: Jury | None = None
    check_s: float = 0.0                # that the check took of the plain loop
    texts: dict[tuple[Recipe, bool], list[list[int]]] = field(default_factory=dict)     # of loops without drafts: see `_text_of`

    def warmed(self, host: Host, batches: Batches) -> list[list[int]]:
        """What it says to each batch, untimed: what is compiled at the first sight of a shape belongs to the preparation. Greedy,
        whatever was asked: under sampling each run is another text."""
        greedy = replace(self.request, sampling=GREEDY)
        return [row for batch in batches for row in host.prepare(batch, greedy).tokens]

    def _text_of(self, like: Recipe, confirming: bool) -> list[list[int]]:
        """What the loop without drafts says, to the prompts of the selection or (`confirming`) of the confirmation."""
        if (like, confirming) not in self.texts:
            batches = self.confirmation if confirming else self.selection
            with self.yard.running(like, batches[0], self.request) as host:
                self.texts[like, confirming] = self.warmed(host, batches)
        return self.texts[like, confirming]

    def _same_text(self, host: Host, text: list[list[int]], like: Recipe, confirming: bool) -> Agreement:
        batches = self.confirmation if confirming else self.selection
        prompts = [prompt for batch in batches for prompt in batch]
        return agreement(prompts, self._text_of(like, confirming), text, max(self.plain.tolerance, host.ready.tolerance), host.last_logits)

    def judged(self, record: GenerationCandidate, host: Host, text: list[list[int]], like: Recipe, found: Estimate,
               before: list[Any], after: list[Any], confirming: bool) -> GenerationCandidate:
        """The record of a way that was raced, and says `text`: is it faster, and is it right?"""
        same, ready = self._same_text(host, text, like, confirming), host.ready
        drafts = None
        if ready.drafter is not None:
            drafts = measure.speculation(ready.drafter, after, ready.costs, ready.choices)
        lengths = _length(after) / _length(before)
        record = _with(
            record, speedup=found.speedup, speedup_ci=found.speedup_ci, timing=measure.timing(after),
            speculation=drafts, identical=same.share, length_ratio=lengths,
        )
        outcome = verdict(found, THRESHOLD)
        if outcome == "inconclusive" and found.rounds < Limits.min_rounds:
            record = _with(record, speedup_ci=None)         # of so few rounds it would say nothing
        fate, reason = ("dominated", same.words()) if outcome == "faster" else (outcome, race_words(outcome, found))
        if drafts is not None:
            reason = "; ".join(filter(None, (speculation_words(record), reason)))
        if same.different and (record.numerics != "precision" or drafts is not None):
            return _with(record, fate="rejected_behaviour", reason=same.words())
        if record.numerics == "precision":
            if not LENGTHS[0] <= lengths <= LENGTHS[1]:
                return _with(record, fate="rejected_behaviour",
                             reason=f"answers are {lengths:.0%} as long as the plain loop's")
            return self._scored(record, host, fate, reason, confirming)
        if not LENGTHS[0] <= same.length_ratio <= LENGTHS[1]:
            fate, reason = "rejected_behaviour", f"{same.length_ratio:.0%} of the plain loop's tokens"
        return _with(record, fate=fate, reason=reason)

    # -- the check -------------------------------------------------------------------------------------------------

    def control(self, base: Host, until_s: float) -> list[str]:
        """Whether the check can judge, by the plain loop's process, and what the user must know of it. The `jury` stays None where the time
        ends first (`until_s`: see `controls`). Raises CheckUnusable where the check cannot judge."""
        if self.check is None or self.budget is None:
            return []
        found = controls(self.check, lambda prompts: self._run(base, prompts), self.budget, until_s)
        self.check_s = found.seconds
        if found.late:
            return []
        self.jury, notes = Jury.of(found, self.budget)
        return notes

    def _run(self, host: Host, prompts: Any) -> list[list[int]]:
        rows = as_lists(prompts, self.given.model)
        size = max(map(len, self.selection))
        answers: list[list[int]] = []
        for number, at in enumerate(range(0, len(rows), size)):
            asked = replace(self.request, sampling=self.request.sampling.of_batch(number))      # as `Loop.generate_all` draws them
            answers += host.prepare(rows[at:at + size], asked).tokens       # untimed, and of other shapes
        return answers

    @contextmanager
    def _model_again(self) -> Iterator[Callable[..., Any]]:
        """The plain loop, in a fresh process."""
        with self.yard.running(PLAIN, self.selection[0], self.request) as host:
            yield lambda prompts: self._run(host, prompts)

    def _scored(self, record: GenerationCandidate, host: Host, fate: Fate, reason: str,
                confirming: bool) -> GenerationCandidate:
        """A way that changes numbers: by the user's check, on the samples of the selection or of the confirmation."""
        assert self.check is not None and self.budget is not None and self.jury is not None
        answer = of_candidate(self.check, lambda prompts: self._run(host, prompts), self._model_again, self.budget.metric)
        if isinstance(answer.failure, WorkerFailed):
            raise answer.failure
        if answer.scores is None:
            what = answer.problem.what if answer.problem else "the check gave no scores"
            return _with(record, fate="rejected_behaviour", reason=what)
        unknown: Fate = "undecided" if fate == "dominated" else fate        # one that is not known to be faster stays that
        judged = self.jury.judge(answer.scores, self.turn(record) if confirming else None)
        drop, drop_ci = judged.numbers()
        record = _with(record, accuracy=answer.scores.mean, accuracy_drop=drop, accuracy_drop_ci=drop_ci, verdict=judged.verdict)
        if judged.verdict != "pass":
            fate = unknown if judged.verdict == "undecided" else "rejected_accuracy"
        return _with(record, fate=fate, reason="; ".join(filter(None, (judged.reason, reason))))


def _length(runs: list[Any]) -> int:
    return sum(run.new_tokens for run in runs)
