"""Where a way to generate lives: in a process of its own, with limits, frozen while another one runs; or here.

In a process of its own is the rule: what a compiler or a quantizer leaves behind, what hangs and what takes too much
memory ends with it. `isolate=False` is for a model of which the device does not hold two.
"""

from __future__ import annotations

import contextlib
import functools
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol

from saturate.errors import EnvironmentProblem, SaturateError, UsageError
from saturate.inference import compiling, folders
from saturate.inference.candidates import Candidate
from saturate.inference.failures import WorkerFailed, first_words
from saturate.inference.generation import weights
from saturate.inference.generation.build import build
from saturate.inference.generation.decode import Batch, Request, Run
from saturate.inference.generation.draft_length import Costs
from saturate.inference.generation.models import plain_forward, without_gradients
from saturate.inference.generation.recipe import Given, Recipe
from saturate.inference.process import LATE_PATIENCE, REQUEST_S, Worker, request_limit_s
from saturate.inference.source import Source
from saturate.inference.techniques._api import NotApplied
from saturate.records.inference import Fate, ModelFacts

_HERE, _STORED = "saturate.inference.generation.host", "saturate.inference.generation.artifact"

#: A way may take so long to start, as a share of the time that is left: compilers hang.
_PREPARE_SHARE, _LEAST_PREPARE_S = 0.5, 60.0

#: The first batch of the plain loop, before anything is known, may take all the time that is left, and not less than this.
_LEAST_BATCH_S = 60.0


_OTHER_WAY = "run optimize here: another way may be the best of this machine"


class Refused(Exception):
    """A search's word for a way that cannot be: its fate, and the reason as its message."""

    def __init__(self, fate: Fate, reason: str):
        super().__init__(reason)
        self.fate: Fate = fate


@dataclass(frozen=True)
class Prepared:
    """A loop that is ready. drafter: its name; None: it drafts nothing."""

    tolerance: float
    drafter: str | None
    costs: Costs | None
    choices: tuple[int, ...]


class Host(Protocol):
    """A way that is ready. What it is asked for raises WorkerFailed, and KeyboardInterrupt."""

    ready: Prepared
    first_call_s: float | None          # of the first batch that was prepared

    def prepare(self, batch: Batch, request: Request) -> Run:
        """As `generate`, not to be compared: a compiler may be at work, which sees shapes of the batch for the first time."""

    def generate(self, batch: Batch, request: Request) -> Run: ...

    def last_logits(self, text: Sequence[int]) -> Any:
        """[vocabulary], on the CPU: of the model as this way has it, by one plain forward."""

    def compile_s(self) -> float | None:
        """That compilers took for it so far; None: nothing was compiled."""

    def close(self) -> None: ...


class Served:
    """A way with its models."""

    def __init__(self, torch: Any, given: Given, recipe: Recipe, batch: Batch, request: Request):
        """Raises UsageError where this way cannot be, NotApplied where its technique takes no effect; whatever else a model or a
        compiler raises."""
        self._torch, self._given = torch, given
        self._model = given.model if recipe.weights is None else _quantized(torch, given.model, recipe.weights)
        self.loop = build(torch, self._model, given.way(recipe), batch, request)

    @classmethod
    def found(cls, torch: Any, given: Given, recipe: Recipe, batch: Batch, request: Request) -> Served:
        """A way that a search has found, for the user's own calls: where its technique takes no effect, that is EnvironmentProblem."""
        try:
            return cls(torch, given, recipe, batch, request)
        except NotApplied as error:
            raise EnvironmentProblem(f"{recipe.weights} takes no effect here", cause=str(error), remedy=_OTHER_WAY) from error

    @property
    def ready(self) -> Prepared:
        loop = self.loop
        name = None if loop.drafter is None else str(getattr(loop.drafter, "name", type(loop.drafter).__name__))
        return Prepared(loop.tolerance, name, loop.costs, loop.choices)

    def last_logits(self, text: Sequence[int]) -> Any:
        with without_gradients(self._torch, self._given.inference):
            ids = self._torch.tensor([list(text)], device=self.loop.target.device)
            return plain_forward(self._torch, self._model, self._given.adapter)(ids)[0, -1].float().cpu()


class Local:
    """In this process."""

    def __init__(self, torch: Any, given: Given, recipe: Recipe, batch: Batch, request: Request):
        self._compiled_before_s, self.first_call_s = compiling.seconds(), None
        with _named():
            self._served = _candidate(torch, given, recipe, batch, request)
        self.loop, self.ready = self._served.loop, self._served.ready

    def prepare(self, batch: Batch, request: Request) -> Run:
        began = time.monotonic()
        run = self.generate(batch, request)
        if self.first_call_s is None:
            self.first_call_s = time.monotonic() - began
        return run

    def generate(self, batch: Batch, request: Request) -> Run:
        with _named():
            return self.loop.generate(batch, request)

    def last_logits(self, text: Sequence[int]) -> Any:
        return self._served.last_logits(text)

    def compile_s(self) -> float | None:
        return compiling.seconds() - self._compiled_before_s or None

    def close(self) -> None:
        """Nothing of it lives on by itself."""


class Remote:
    """In a process of its own, which stands still between requests."""

    def __init__(self, worker: Worker, what: Recipe | Path, batch: Batch, request: Request, prepare_s: Callable[[], float],
                 batch_s: Callable[[], float], took: Callable[[float], None] = lambda seconds: None):
        """what: a recipe, or the folder of an artifact. prepare_s, batch_s: how long what may compile, and a batch, may take from
        now on. took: told how long something that may compile took."""
        self._worker, self._prepare_s, self._batch_s, self._took = worker, prepare_s, batch_s, took
        self.first_call_s: float | None = None
        where, said = (_STORED, str(what)) if isinstance(what, Path) else (_HERE, what)
        try:
            found = worker.ask(f"{where}:start", said, [list(row) for row in batch], request, limit_s=prepare_s())
            if isinstance(found, tuple):
                raise Refused(*found)
            self.ready: Prepared = found
            worker.freeze()
        except BaseException:       # also Ctrl-C: nobody else knows this process
            worker.close()
            raise

    def prepare(self, batch: Batch, request: Request) -> Run:
        began = time.monotonic()
        run = self._generate(batch, request, max(self._prepare_s(), self._batch_s()))
        seconds = time.monotonic() - began
        self._took(seconds)
        if self.first_call_s is None:
            self.first_call_s = seconds
        return run

    def generate(self, batch: Batch, request: Request) -> Run:
        return self._generate(batch, request, self._batch_s())

    def _generate(self, batch: Batch, request: Request, limit_s: float) -> Run:
        return self._worker.ask(f"{_HERE}:generate", [list(row) for row in batch], request, limit_s=limit_s)

    def last_logits(self, text: Sequence[int]) -> Any:
        return self._worker.ask(f"{_HERE}:last_logits", list(text), limit_s=self._batch_s())

    def compile_s(self) -> float | None:
        return self._worker.ask(f"{_HERE}:compile_s", limit_s=self._batch_s())

    def close(self) -> None:
        self._worker.close()


class Yard:
    """Starts ways. folder: for processes of their own, private; None: all of them live here."""

    def __init__(self, torch: Any, given: Given, folder: Path | None, deadline: float,
                 memory_bytes: int | None = None):
        self.deadline, self.slowest_s = deadline, 0.0
        self._took: dict[Recipe | Path, float] = {}         # seconds to start a way, or for a batch that it had not seen
        self._torch, self._given, self._memory_bytes = torch, given, memory_bytes
        self.source = None
        if folder is not None:
            blank = [(torch.zeros(1, dtype=torch.long, device="cpu"),)]
            self.source = Source.write(folder / "source", given.module(torch), blank, blank)
            self._folder = folder

    @property
    def isolated(self) -> bool:
        return self.source is not None

    def start(self, what: Recipe | Path, batch: Batch, request: Request) -> Host:
        """A recipe, or (in a process of its own) the folder of an artifact. Raises Refused, WorkerFailed."""
        if self.source is None:
            assert isinstance(what, Recipe)
            return Local(self._torch, self._given, what, batch, request)
        began, prepare_s, took = time.monotonic(), functools.partial(self._prepare_s, what), functools.partial(self.know, what)
        worker = Worker(self.source, Candidate(), folder=self._folder / "processes",
                        threads=self._torch.get_num_threads(), memory_bytes=self._memory_bytes, prepare_s=prepare_s(),
                        facts=ModelFacts(device=self.source.device.partition(":")[0]))
        host = Remote(worker, what, batch, request, prepare_s, self._batch_s, took)
        took(time.monotonic() - began)
        return host

    def know(self, what: Recipe | Path, seconds: float) -> None:
        """That it takes so long to start."""
        self._took[_kind(what)] = max(seconds, self._took.get(_kind(what), 0.0))

    def _prepare_s(self, what: Recipe | Path) -> float:
        """What was found is started again to be confirmed, when most of the time is over."""
        known = LATE_PATIENCE * self._took.get(_kind(what), 0.0)
        return max(_LEAST_PREPARE_S, known, _PREPARE_SHARE * (self.deadline - time.monotonic()))

    def _batch_s(self) -> float:
        """By what the plain loop took for its slowest batch: a hang must not take the time of everything else."""
        left = self.deadline - time.monotonic()
        return request_limit_s(self.slowest_s, left) if self.slowest_s else min(REQUEST_S, max(_LEAST_BATCH_S, left))

    @contextlib.contextmanager
    def running(self, what: Recipe | Path, batch: Batch, request: Request) -> Iterator[Host]:
        host = self.start(what, batch, request)
        try:
            yield host
        finally:
            host.close()


def _kind(what: Recipe | Path) -> Recipe | Path:
    """The same for a way as it is tried and as it is confirmed."""
    return what if isinstance(what, Path) else replace(what, may_stop=True)


# -- in the process of a way: the first argument is the worker's context ---------------------------------------------


def start(context: Any, recipe: Recipe, batch: list[list[int]], request: Request) -> Prepared | tuple[Fate, str]:
    """Make the loop and keep it for the requests that follow; or why it cannot be."""
    try:
        context.model.served = _candidate(context.torch, Given.of(context.model), recipe, batch, request)
    except Refused as refusal:
        return refusal.fate, str(refusal)
    return context.model.served.ready


def generate(context: Any, batch: list[list[int]], request: Request) -> Run:
    return context.model.served.loop.generate(batch, request)


def last_logits(context: Any, text: list[int]) -> Any:
    return context.model.served.last_logits(text)


def compile_s(context: Any) -> float | None:
    return compiling.seconds() or None


def _candidate(torch: Any, given: Given, recipe: Recipe, batch: Batch, request: Request) -> Served:
    """A way that a search tries. Raises Refused where it cannot be, or has nothing that could be measured: the user's own calls of a
    way that was found decode plainly where there is no room for drafts."""
    try:
        served = Served(torch, given, recipe, batch, request)
    except NotApplied as error:
        raise Refused("not_applied", str(error)) from error
    except UsageError as error:
        raise Refused("not_applicable", str(error)) from error
    if recipe.draft is not None and served.loop.costs is None and recipe.lengths is None:
        raise Refused("not_applicable", "the context has no room for drafts")
    return served


def _quantized(torch: Any, model: Any, name: str) -> Any:
    technique, refusal = weights.techniques(torch, model)[name]
    if refusal:
        raise UsageError(refusal, remedy=_OTHER_WAY)
    with folders.scratch("saturate-generation-") as folder:
        return weights.quantized(torch, model, technique, folder)


@contextlib.contextmanager
def _named() -> Iterator[None]:
    """What a model, a technique or a compiler raises here, as its process would report it."""
    try:
        yield
    except (Refused, WorkerFailed):
        raise
    except Exception as error:  # whatever it is, it costs a row
        raise WorkerFailed("failed", _line(error), alive=True) from error


def _line(error: Exception) -> str:
    if isinstance(error, SaturateError):
        return error.message
    return f"{type(error).__name__}: {first_words(str(error))}"[:300]
