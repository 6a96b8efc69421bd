"""Which way to generate is the fastest for this model, these prompts and this machine, and is it still the same text?

Each way is raced against the plain loop: one token per forward, in eager PyTorch, with the same static cache.
Lossless ways must give the same greedy tokens. Ways that change numbers need a check. The winner is raced and
compared once more on prompts that took no part in choosing it. Everything happens in this process, one way after the
other: a draft and its target share memory.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from saturate.errors import SaturateError, UsageError
from saturate.inference.accuracy import Budget, UnusableScores, compare
from saturate.inference.checking import scored
from saturate.inference.generation import measure, weights
from saturate.inference.generation.build import LOOKUP, Way, build
from saturate.inference.generation.compare import LENGTHS, Agreement, agreement
from saturate.inference.generation.decode import Loop, Request
from saturate.inference.generation.models import plain_forward
from saturate.inference.generation.prompts import as_lists
from saturate.inference.generation.sampling import GREEDY
from saturate.inference.techniques._api import NotApplied
from saturate.measure.race import verdict
from saturate.records.generation import GenerationCandidate, GenerationRecord

Batches = list[list[list[int]]]

_THRESHOLD = 0.02       # the gain that counts

#: Fates of ways that give the right tokens; `dominated`, until one is kept: faster than the plain loop beyond doubt.
_WORKED = ("dominated", "no_difference", "inconclusive", "slower")

#: Kinds of ways to generate, that a search may be limited to.
KINDS = ("draft", "lookup", "compile", "weights")


@dataclass
class Ready:
    """A way to generate that works: what it is made of, and its latest record."""

    label: str
    way: Way
    model: Any
    loop: Loop
    record: GenerationCandidate
    like: Ready | None = None           # whose greedy tokens it has to give; None: of no other


@dataclass
class Search:
    """One search. `selection` and `confirmation` are batches of prompts, disjoint where there are two."""

    torch: Any
    model: Any
    way: Way                            # adapters and tokenizers; its draft is the user's
    selection: Batches
    confirmation: Batches
    request: Request
    deadline: float                     # time.monotonic()
    check: Callable[..., Any] | None = None
    budget: Budget | None = None
    say: Callable[[str], None] = lambda line: None
    kinds: frozenset[str] = frozenset(KINDS)

    def run(self) -> tuple[Ready, GenerationCandidate, list[GenerationCandidate], list[str]]:
        """The best way, the plain loop's record, all candidates', and notes."""
        self.notes: list[str] = []
        self.found: list[GenerationCandidate] = []
        started = time.monotonic()
        self._plain = build(self.torch, self.model, replace(self.way, draft=None), self.selection[0], self.request)
        for batch in (*self.selection, *self.confirmation):
            self._plain.check(batch, self.request)      # before anything was measured
        runs = [self._plain.generate(batch, self.request) for batch in self.selection]
        base = GenerationCandidate(
            id="plain",
            numerics="exact",
            fate="dominated",
            reason="one token per forward, in eager PyTorch",
            speedup=1.0,
            timing=measure.timing(runs),
            identical=1.0,
            prepare_s=time.monotonic() - started,
            length_ratio=1.0,
            code="token = model(ids)[:, -1].argmax(-1)",
        )
        self._scores = None if self.check is None or self.budget is None else self._score(self._plain)
        plain = Ready("plain", replace(self.way, draft=None), self.model, self._plain, base)
        tried = [
            ready
            for label, way in self._single()
            if (ready := self._try(label, "reordering", way, self.model, plain)) is not None
        ]
        drafting = [ready for ready in tried if ready.way.draft is not None and ready.record.fate in _WORKED]
        runtime = self._better(plain, *(ready for ready in tried if ready.way.draft is None))
        runtime = self._better(runtime, *self._weight_only(runtime, plain))
        best = self._better(runtime, *drafting)
        if runtime is not plain and drafting:
            draft = max(drafting, key=lambda ready: ready.record.speedup or 0.0)
            label, way = f"{runtime.label} + {draft.label}", replace(draft.way, compile_mode=runtime.way.compile_mode)
            best = self._better(best, self._try(label, runtime.record.numerics, way, runtime.model, runtime))
        return self._confirmed(best, plain), base, self.found, self.notes

    # -- candidates ------------------------------------------------------------------------------------------------

    def _single(self) -> list[tuple[str, Way]]:
        mode = "reduce-overhead" if str(self._plain.target.device).startswith("cuda") else "default"   # CUDA graphs
        given = self.way.draft is not None and self.way.draft != LOOKUP
        ways = [
            ("draft", given, "speculative, draft model", replace(self.way, may_stop=False)),
            ("lookup", True, "speculative, prompt lookup", replace(self.way, draft=LOOKUP, may_stop=False)),
            ("compile", True, "compile", replace(self.way, draft=None, compile_mode=mode)),
        ]
        return [(label, way) for kind, possible, label, way in ways if possible and kind in self.kinds]

    def _weight_only(self, runtime: Ready, plain: Ready) -> list[Ready | None]:
        ready: list[Ready | None] = []
        if "weights" not in self.kinds:
            return ready
        for name, (technique, refusal) in weights.techniques(self.torch, self.model).items():
            if refusal:
                self._lost(name, "precision", "not_applicable", refusal)
            elif self.check is None or self.budget is None:
                self._lost(
                    name, "precision", "not_tried", "changes numbers: pass check= and budget= to have it judged"
                )
            else:
                ready.append(self._quantized(name, technique, runtime, plain))
        return ready

    def _quantized(self, name: str, technique: Any, runtime: Ready, plain: Ready) -> Ready | None:
        label = name if runtime.way.compile_mode is None else f"{name} + compile"
        try:
            with tempfile.TemporaryDirectory(prefix="saturate-generation-") as folder:
                model = weights.quantized(self.torch, self.model, technique, Path(folder))
        except NotApplied as reason:
            return self._lost(label, "precision", "not_applied", str(reason))
        except Exception as error:  # noqa: BLE001 - a technique may raise anything; it costs a row
            return self._lost(label, "precision", "failed", _line(error))
        return self._try(
            label, "precision", replace(self.way, draft=None, compile_mode=runtime.way.compile_mode), model, plain
        )

    def _try(self, label: str, numerics: str, way: Way, model: Any, like: Ready) -> Ready | None:
        """Build, compare, race. None where it does not work, is wrong, or there is no time."""
        if time.monotonic() > self.deadline:
            return self._lost(label, numerics, "not_tried", "the time was over")
        self.say(label)
        started = time.monotonic()
        try:
            loop = build(self.torch, model, way, self.selection[0], self.request)
            if way.draft is not None and loop.costs is None:
                return self._lost(label, numerics, "not_applicable", "the context has no room for drafts")
            prepared = time.monotonic() - started
            ready = Ready(label, way, model, loop, _untimed(label, numerics, prepared), like)
            ready.record = self._raced(ready, self.selection)
        except (UsageError, NotApplied) as error:
            return self._lost(label, numerics, "not_applicable", str(error))
        except Exception as error:  # noqa: BLE001 - compilers may raise anything; it costs a row
            return self._lost(label, numerics, "failed", _line(error))
        self.found.append(ready.record)
        return ready

    def _lost(self, label: str, numerics: str, fate: Any, reason: str) -> None:
        self.found.append(GenerationCandidate(id=label, numerics=numerics, fate=fate, reason=reason))

    # -- judging ---------------------------------------------------------------------------------------------------

    def _same_text(self, ready: Ready, batches: Batches) -> Agreement:
        """Greedy, whatever was asked: under sampling each run is another text."""
        assert ready.like is not None
        greedy = replace(self.request, sampling=GREEDY)
        prompts, plain, other = [], [], []
        for batch in batches:
            prompts += batch
            plain += ready.like.loop.generate(batch, greedy).tokens
            other += ready.loop.generate(batch, greedy).tokens
        forward = plain_forward(self.torch, ready.like.model, self.way.adapter)
        tolerance = max(ready.like.loop.tolerance, ready.loop.tolerance)
        return agreement(self.torch, forward, prompts, plain, other, tolerance, self._plain.target.device)

    def _raced(self, ready: Ready, batches: Batches) -> GenerationCandidate:
        """Compared and raced on `batches`: its record."""
        loop, same = ready.loop, self._same_text(ready, batches)
        left = max(0.0, self.deadline - time.monotonic())
        found, before, runs = measure.race(lambda batch: self._plain.generate(batch, self.request),
                                           lambda batch: loop.generate(batch, self.request), batches, left / 4)
        drafts = None if loop.drafter is None else measure.speculation(_drafter(loop), runs, loop.costs, loop.choices)
        lengths = sum(run.new_tokens for run in runs) / sum(run.new_tokens for run in before)
        record = _with(
            ready.record,
            speedup=found.speedup,
            speedup_ci=found.speedup_ci,
            timing=measure.timing(runs),
            speculation=drafts,
            identical=same.share,
            length_ratio=lengths,
        )
        outcome = verdict(found, _THRESHOLD)
        fate, reason = ("dominated", same.words()) if outcome == "faster" else (outcome, "")
        if drafts is not None:
            reason = "; ".join(filter(None, (speculation_words(record), reason)))
        if same.different and (record.numerics != "precision" or loop.drafter is not None):
            return _with(record, fate="rejected_behaviour", reason=same.words())
        if record.numerics == "precision":
            return self._checked(record, loop, fate, reason)
        if not LENGTHS[0] <= same.length_ratio <= LENGTHS[1]:
            fate, reason = "rejected_behaviour", f"{same.length_ratio:.0%} of the plain loop's tokens"
        return _with(record, fate=fate, reason=reason)

    def _checked(self, record: GenerationCandidate, loop: Loop, fate: Any, reason: str) -> GenerationCandidate:
        """A way that changes numbers: by the user's check, and by the length of what it answers."""
        assert self.budget is not None
        if record.length_ratio is not None and not LENGTHS[0] <= record.length_ratio <= LENGTHS[1]:
            return _with(
                record,
                fate="rejected_behaviour",
                reason=f"answers are {record.length_ratio:.0%} as long as the plain loop's",
            )
        scores = self._score(loop)
        if self._scores is None or scores is None:
            return _with(record, fate="undecided", reason="the check gave no scores; see the notes")
        try:
            judged = compare(self._scores, scores, self.budget)
        except UnusableScores as error:
            return _with(record, fate="undecided", reason=str(error))
        record = _with(
            record,
            accuracy=scores.mean,
            accuracy_drop=judged.drop,
            accuracy_drop_ci=judged.drop_ci,
            verdict=judged.verdict,
        )
        if judged.verdict != "pass":
            fate = "undecided" if judged.verdict == "undecided" else "rejected_accuracy"
        return _with(record, fate=fate, reason="; ".join(filter(None, (judged.reason, reason))))

    def _score(self, loop: Loop) -> Any:
        assert self.check is not None and self.budget is not None
        found = scored(
            self.check, lambda prompts: loop.generate(as_lists(prompts), self.request).tokens, self.budget.metric
        )
        if found.problem is not None:
            self.notes.append(f"the check: {found.problem.what}")
        return found.scores

    def _better(self, best: Ready, *others: Ready | None) -> Ready:
        """The fastest of those that are faster than the plain loop beyond doubt and right."""
        right = [ready for ready in others if ready is not None and ready.record.fate == "dominated"]
        return max([best, *right], key=lambda ready: ready.record.speedup or 0.0)

    def _confirmed(self, best: Ready, plain: Ready) -> Ready:
        """The winner as it will run, on prompts that did not choose it. Where it does not hold there, the plain
        loop."""
        if best is plain:
            return plain
        best.way = replace(best.way, may_stop=True)
        best.loop = replace(best.loop, may_stop=True)
        record = self._raced(best, self.confirmation)
        kept = record.fate == "dominated"
        changes = {"fate": "kept"} if kept else {"fate": record.fate, "reason": f"on other prompts: {record.reason}"}
        self.found = [_with(row, **changes) if row.id == best.label else row for row in self.found]
        if kept:
            best.record = _with(record, fate="kept")
            return best
        self.notes.append(f"{best.label} was faster on the prompts that chose it, and not on others")
        return plain


def record_of(
    search: Search,
    best: Ready,
    base: GenerationCandidate,
    found: list[GenerationCandidate],
    notes: list[str],
    seconds: float,
) -> GenerationRecord:
    """The whole search, for reports."""
    undecided = any(row.fate in ("inconclusive", "not_tried") and row.numerics != "precision" for row in found)
    sampling, faster = search.request.sampling, best.label != "plain"
    base = base if faster else _with(base, fate="kept")
    return GenerationRecord(
        model=type(search.model).__name__,
        device=str(search._plain.target.device),
        torch=str(search.torch.__version__),
        threads=search.torch.get_num_threads(),
        batch_size=max(map(len, search.selection)),
        prompts=sum(len(batch) for batch in (*search.selection, *search.confirmation)),
        max_new_tokens=search.request.max_new_tokens,
        sampling={
            "temperature": sampling.temperature,
            "top_k": sampling.top_k,
            "top_p": sampling.top_p,
            "seed": sampling.seed,
        },
        verdict="faster" if faster else "inconclusive" if undecided else "nothing_helps",
        baseline=base,
        best=best.record if faster else base,
        candidates=found,
        notes=notes,
        seconds=seconds,
    )


def speculation_words(record: GenerationCandidate) -> str:
    """"acceptance 0.83 at cost ratio 0.07: 2.10x (2.05x predicted)"."""
    drafts = record.speculation
    assert drafts is not None
    if drafts.acceptance_rate is None:
        return "nothing could be drafted"
    expected = "" if drafts.predicted_speedup is None else f" ({drafts.predicted_speedup:.2f}x predicted)"
    ratio = "" if drafts.cost_ratio is None else f" at cost ratio {drafts.cost_ratio:.2f}"
    return f"acceptance {drafts.acceptance_rate:.2f}{ratio}: {record.speedup:.2f}x{expected}"


def _untimed(label: str, numerics: str, prepared_s: float) -> GenerationCandidate:
    return GenerationCandidate(id=label, numerics=numerics, fate="not_tried", reason="", prepare_s=prepared_s)


def _drafter(loop: Loop) -> str:
    return str(getattr(loop.drafter, "name", type(loop.drafter).__name__))


def _with(record: GenerationCandidate, **changes: Any) -> GenerationCandidate:
    import msgspec

    return msgspec.structs.replace(record, **changes)


def _line(error: Exception) -> str:
    text = str(error).strip().splitlines()
    return (
        f"{type(error).__name__}: {text[0] if text else ''}"[:300]
        if not isinstance(error, SaturateError)
        else error.message
    )
