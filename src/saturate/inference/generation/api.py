"""`saturate.generation`: generate from a causal language model, and find the fastest way to."""

from __future__ import annotations

import os
import time as clock
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from saturate.errors import EnvironmentProblem, UsageError
from saturate.inference import folders, leftovers, source
from saturate.inference.accuracy import Budget, refuse_other
from saturate.inference.api import memory_limit, running_model, seconds_of
from saturate.inference.generation import artifact, conclusion, remembered
from saturate.inference.generation import prompts as shapes
from saturate.inference.generation.build import LOOKUP, Way, build, eos_of, not_done, padding_in, undone_sampling
from saturate.inference.generation.decode import Loop, Request, Run
from saturate.inference.generation.host import Served, Yard
from saturate.inference.generation.models import Adapter
from saturate.inference.generation.recipe import PLAIN, Given, Recipe
from saturate.inference.generation.sampling import GREEDY, Sampling
from saturate.inference.generation.search import KINDS, Search
from saturate.inference.journal import Journal, rests
from saturate.inference.modes import evaluating
from saturate.inference.phases import Phases
from saturate.inference.wrapped import unwrapped
from saturate.records.generation import GenerationRecord
from saturate.trial.lock import FolderLock

#: Time to prove an artifact: to load it, to generate a few times, and to do the same without it.
_SAVING_S = 600.0


@dataclass(frozen=True)
class Generation:
    """New tokens of each prompt, in the prompts' order, and what making them took: one `Run` per batch."""

    tokens: list[list[int]]
    runs: tuple[Run, ...]

    @property
    def acceptance_rate(self) -> float | None:
        """Chance that a token of the draft stays, given that those before it did. None: nothing was drafted."""
        judged = sum(run.judged for run in self.runs)
        return sum(run.stayed for run in self.runs) / judged if judged else None

    @property
    def quoted_acceptance_rate(self) -> float | None:
        """The same, of tokens that were quoted from the text in the place of a draft model's. None: there were none."""
        judged = sum(run.quoted_judged for run in self.runs)
        return sum(run.quoted_stayed for run in self.runs) / judged if judged else None

    @property
    def steps(self) -> int:
        """Forwards of the model after the prefills."""
        return sum(run.steps for run in self.runs)


def generate(
    model: Any,
    prompts: Any,
    *,
    max_new_tokens: int,
    draft: Any = None,
    sampling: Sampling | None = None,
    eos: int | Sequence[int] | None = None,
    batch_size: int | None = None,
    adapter: Adapter = None,
    draft_adapter: Adapter = None,
    tokenizers: tuple[Any, Any] | None = None,
    lengths: Sequence[int] | None = None,
) -> Generation:
    """Generate with a static cache, and speculatively with a draft: another model, or "prompt-lookup".

    prompts: token numbers of one prompt, a list of prompts of any lengths, a tensor [rows, tokens], or what a
    tokenizer returns. sampling: None is greedy. eos: tokens that end a row; None: what the model's configuration
    says. batch_size: prompts decoded together; None: all. adapter: how the model is called, see `generation.models`.
    lengths: of drafts, to choose from; one alone is always taken, more are chosen from by measured acceptance and
    cost. With a draft greedy tokens are those of the same call without it, and sampled ones have the same
    distribution (not the same tokens: other random numbers are drawn).

    Before the first token the model is tried on the prompts: that its cache can be rolled back, how much its logits
    round, and what drafts cost. For many calls use `optimize`, whose result does that once. Raises UsageError, by
    name, for what cannot be done.
    """
    torch = _torch()
    model, draft = unwrapped(torch, model), unwrapped(torch, draft)
    _warn_of(model, sampling)
    rows = shapes.as_lists(prompts, model)
    request = Request(max_new_tokens, sampling or GREEDY, eos_of(model, eos))
    _warn_of_padding(model, rows, request)
    way = Way(draft, adapter, draft_adapter, tokenizers, lengths=None if lengths is None else tuple(lengths),
              may_stop=lengths is None or len(lengths) > 1)
    with evaluating(torch, *_models(model, draft)):
        batches = shapes.batches(rows, len(rows) if batch_size is None else batch_size)
        loop = build(torch, model, way, batches[0], request)
        return _generation(loop.generate_all(batches, request))


@dataclass(repr=False)
class GenerationResult:
    """What `optimize` found. `record` holds every number; `generate` generates in the best way."""

    record: GenerationRecord
    recipe: Recipe
    _given: Given
    _request: Request
    _batch_size: int
    _prompts: list[list[list[int]]]         # of the confirmation, in batches
    _loop: Loop | None = None

    @property
    def best(self) -> str:
        """The winner's name; "plain" where nothing helps."""
        return self.record.best.id

    def generate(self, prompts: Any, max_new_tokens: int | None = None, seed: int | None = None) -> Generation:
        """New tokens for other prompts, in this process, in batches of the size that was optimized for. The first
        call prepares the loop. seed: of sampling; None: that of the search, so that the same call samples the same."""
        rows = shapes.as_lists(prompts, self._given.model)
        request = self._request.like(max_new_tokens, seed)
        batches = shapes.batches(rows, self._batch_size)
        with evaluating(_torch(), *_models(self._given.model, self._given.draft)):
            loop = self._local(batches[0], request)
            return _generation(loop.generate_all(batches, request))

    def save(self, folder: str | os.PathLike[str]) -> Path:
        """Store the best way as an artifact, which `saturate.load` opens. Before it takes its place it is loaded in a
        fresh process, and must give the tokens there that it gives here; its time is measured against that of the
        plain loop.

        Raises UsageError for what cannot be stored, ArtifactDamaged where it does not prove itself, and EnvironmentProblem where
        there is no room for it, or for what is made on the way.
        """
        torch, greedy = _torch(), replace(self._request, sampling=GREEDY)
        with folders.scratch("saturate-generation-") as scratch, evaluating(torch, *_models(self._given.model, self._given.draft)):
            wanted = [self._local(batch, greedy).generate(batch, greedy).tokens for batch in self._prompts]
            pairs = [pair for batch, tokens in zip(self._prompts, wanted) for pair in zip(batch, tokens)]
            examples = pairs if self._request.sampling.greedy and self._batch_size == 1 else []
            with folders.in_scratch():
                stored = artifact.store(torch, scratch / "artifact", self._given, self.recipe, self._request, self._batch_size,
                                        self.record.best, examples)
                yard = Yard(torch, self._given, scratch / "processes", clock.monotonic() + _SAVING_S)
                found = artifact.proved(yard, stored, self._prompts, wanted, self._request)
            return artifact.take_place(stored, Path(folder), found)

    def _local(self, batch: list[list[int]], request: Request) -> Loop:
        """The loop in this process, prepared at the first call."""
        if self._loop is None:
            self._loop = Served.found(_torch(), self._given, self.recipe, batch, request).loop
        return self._loop

    def __repr__(self) -> str:
        return self.table()

    def table(self) -> str:
        """Every way that was tried, with its fate and the reason; and what that took of the time that was given."""
        from saturate.report.inference_words import FATES, took_words

        lines = [("way", "speed-up", "tokens/s", "prefill ms", "fate", "reason")]
        winner = [self.record.best] if self.best != "plain" else []
        for row in (self.record.baseline, *winner, *(row for row in self.record.candidates if row.fate != "kept")):
            interval = "" if row.speedup_ci is None else f" [{row.speedup_ci[0]:.2f}, {row.speedup_ci[1]:.2f}]"
            lines.append(
                (
                    row.id,
                    "" if row.speedup is None else f"{row.speedup:.2f}x{interval}",
                    ""
                    if row.timing is None or row.timing.decode_tokens_per_s is None
                    else f"{row.timing.decode_tokens_per_s:.0f}",
                    "" if row.timing is None else f"{row.timing.prefill_ms:.1f}",
                    FATES[row.fate],
                    row.reason,
                )
            )
        widths = [max(map(len, column)) for column in list(zip(*lines))[:-1]]
        rows = [
            "  ".join([*(cell.ljust(width) for cell, width in zip(line, widths)), line[-1]]).rstrip()
            for line in lines
        ]
        return "\n".join([*rows, f"took {took_words(self.record.seconds, self.record.given_s, self.record.phases)}"])


def optimize(
    model: Any,
    prompts: Any,
    *,
    max_new_tokens: int,
    draft: Any = None,
    sampling: Sampling | None = None,
    time: float | str = "5m",
    check: Callable[..., Any] | None = None,
    budget: Budget | None = None,
    eos: int | Sequence[int] | None = None,
    batch_size: int = 1,
    adapter: Adapter = None,
    draft_adapter: Adapter = None,
    tokenizers: tuple[Any, Any] | None = None,
    ways: Sequence[str] = KINDS,
    isolate: bool = True,
    workdir: str | os.PathLike[str] | None = None,
    say: Callable[[str], None] = lambda line: None,
) -> GenerationResult:
    """The fastest way to generate from `model`: each is raced against the plain loop, in a process of its own, on one
    half of the prompts, and the winner once more on the other.

    draft: a smaller model with the same tokens; prompt lookup is tried without one. time: seconds, or "90s", "5m",
    "1h"; ways that it leaves no time for are `not_tried`. check, budget: as for `saturate.optimize`, for ways that
    change numbers; check(run) gets run(prompts) -> lists of new tokens. Without them only lossless ways are tried.
    ways: which kinds are tried, "draft", "lookup", "compile" (half a minute and more on a CPU), "weights". isolate:
    False keeps all in this process, for a model of which the device does not hold two: then nothing limits the time
    and memory of a way. workdir: a folder in which the same call goes on after an interruption; one call at a time works in it. say: gets a line as
    each way begins. The other arguments are those of `generate`. Ctrl-C ends the search and returns the best so far;
    before the plain loop has been measured there is none, and it goes on as KeyboardInterrupt.

    Raises UsageError, by name, where the model cannot be called rightly, WorkloadFailed where it fails, and
    CheckUnusable; a way that fails costs its row in the table.
    """
    refuse_other(budget)
    if (check is None) != (budget is None):
        raise UsageError(
            "a check needs a budget, and a budget a check", remedy="pass both, or neither for lossless ways alone"
        )
    ways = (ways,) if isinstance(ways, str) else ways
    unknown = sorted(set(ways) - set(KINDS))
    if unknown:
        raise UsageError(
            f"no such ways to generate: {', '.join(unknown)}", remedy=f"choose from {', '.join(KINDS)}"
        )
    torch = _torch()
    model, draft = unwrapped(torch, model), unwrapped(torch, draft)
    _warn_of(model, sampling)
    rows = shapes.as_lists(prompts, model)
    selection, confirmation = shapes.halves(rows, batch_size)
    request = Request(max_new_tokens, sampling or GREEDY, eos_of(model, eos))
    _warn_of_padding(model, rows, request)
    started = clock.monotonic()
    given_s = seconds_of(time)
    deadline = started + given_s
    given = Given(model, None if isinstance(draft, str) else draft, adapter, draft_adapter, tokenizers)
    if isinstance(draft, str) and draft != LOOKUP:
        raise UsageError(f"no such draft: {draft!r}", remedy=f"a model, or {LOOKUP!r}")
    with evaluating(torch, *_models(model, given.draft)), _folder(workdir, isolate) as folder:
        plain = build(torch, model, given.way(PLAIN), selection[0], request)
        yard = Yard(torch, given, folder if isolate else None, deadline, memory_limit(str(plain.target.device)))
        notes: list[str] = []

        def recall(heard: tuple[Any, ...]) -> remembered.Memory:
            if workdir is None or folder is None:
                return remembered.Memory(None, notes)
            key = remembered.key_of(torch, given, yard, (selection, confirmation, request, budget))
            return remembered.Memory(Journal(folder, key, more=rests(torch, check, heard=heard)), notes)

        search = Search(torch, given, yard, selection, confirmation, request, deadline, plain, check, budget,
                        say, frozenset(ways), recall, notes, phases=Phases(started))
        with running_model():
            best, base = search.run()
    record = conclusion.record_of(search, best, base, clock.monotonic() - started, given_s)
    return GenerationResult(record, best.recipe, given, request, batch_size, confirmation)


@contextmanager
def _folder(workdir: str | os.PathLike[str] | None, isolate: bool) -> Iterator[Path | None]:
    """Where processes and what was found live, for this call alone; None: nowhere. Raises EnvironmentProblem where another
    search works there."""
    if workdir is not None:
        folder = folders.workplace(Path(workdir))
        with FolderLock(folder, "workdir"):
            leftovers.clear_away(folder)
            try:
                yield folder
            finally:
                source.without_model(folder / "source")     # the same call writes it anew
    elif isolate:
        with folders.scratch("saturate-generation-") as folder:
            yield folder
    else:
        yield None


def _warn_of(model: Any, sampling: Sampling | None) -> None:
    undone, sampled = not_done(model), undone_sampling(model)
    if sampled and sampling is None:
        warnings.warn(f"the model's generation_config samples, and this decodes greedily: sampling={sampled} is what it asks for", stacklevel=3)
    if undone:
        warnings.warn(f"the model's generation_config asks for {', '.join(undone)}, which is not done here: the model's own generate "
                      "may say something else", stacklevel=3)


def _warn_of_padding(model: Any, rows: list[list[int]], request: Request) -> None:
    pad = padding_in(model, rows, request.eos)
    if pad is not None:
        warnings.warn(f"some prompts begin or end with token {pad}, which is padding by the model's configuration, and is taken for text here: "
                      "pass what the tokenizer returns, with its attention_mask", stacklevel=3)


def _generation(runs: list[Run]) -> Generation:
    return Generation([row for run in runs for row in run.tokens], tuple(runs))


def _models(model: Any, draft: Any) -> tuple[Any, ...]:
    return (model,) if draft is None or isinstance(draft, str) else (model, draft)


def _torch() -> Any:
    try:
        import torch
    except ImportError as error:
        raise EnvironmentProblem(
            "generation needs PyTorch, which is not installed here", remedy="install torch"
        ) from error
    return torch


__all__ = ["LOOKUP", "Budget", "Generation", "GenerationResult", "Sampling", "generate", "optimize"]
