"""The machine as the search and the confirmation see it: starts processes, asks guards and the user's check.

One lab per search. Its baseline outputs and scores are what every candidate is compared with.
"""

from __future__ import annotations

import dataclasses
import inspect
import math
import shutil
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from saturate.errors import ArtifactDamaged, EnvironmentProblem, SaturateError
from saturate.inference import artifact, batches, checking, confirm, guards, samples, session, variations
from saturate.inference.accuracy import Budget, Judgement
from saturate.inference.candidates import Candidate
from saturate.inference.confirm import NotStored
from saturate.inference.failures import WorkerFailed, no_model
from saturate.inference.forkserver import ForkServer
from saturate.inference.journal import Journal, key_of, turn, turns_of
from saturate.inference.jury import Jury
from saturate.inference.process import Worker
from saturate.inference.repair import inner
from saturate.inference.scores import Scores
from saturate.inference.search import LEAST_PREPARE_S
from saturate.inference.source import Source
from saturate.inference.tried import Tried
from saturate.records.inference import ModelFacts

#: A candidate may take so long to prepare, as a share of the time that is left, and `search.LEAST_PREPARE_S` at least; compilers hang...
PREPARE_SHARE = 0.3

#: ... and on a machine that is slow or busy so many times as long as a process of the model itself took at most, which imports torch (the first
#: exports the model, too): that shows how slow it is. But no more than half of the time that is left: a compiler that hangs must not take
#: the time that confirming what was found needs.
OF_BASELINE = 6.0
_MOST_SHARE = 0.5

#: What was prepared once may take so many times as long when it is prepared again, to be stored.
AGAIN = 4.0

#: The model itself may take all the time that is left, and so long beside it: a process starts, and torch with it.
BASELINE_GRACE_S = 60.0

#: An artifact may take so long to load; one that is compiled when it is loaded takes most of a minute.
LOAD_S = 180.0

#: ... and so long to be stored, where there is time.
STORE_S = 1800.0

#: Layers are ranked for so long, where there is time.
RANKING_S = 300.0

#: Calls after which a process has the memory that serving takes.
_SERVED_CALLS = 8

#: Batches of examples that an artifact keeps.
EXAMPLES = 2


@dataclass(frozen=True)
class Other:
    """A batch of another size than the measured ones, and what the baseline answered; `again`, `twin`: as in `Lab`."""

    batch: tuple[Any, ...]
    answer: list[Any]
    again: list[Any] | None
    twin: list[Any] | None
    given: bool                                                 # by the user


@dataclass
class Lab:
    """`deadline_s`: time.monotonic() of the whole search. `folder`: scratch and artifacts. `stored`: where they are. All answers that
    are compared lie on the CPU: here those of a GPU would be out of reach of each other, and fill the candidates' memory."""

    source: Source
    folder: Path
    threads: int
    deadline_s: float
    memory_bytes: int | None = None
    check: Callable[..., Any] | None = None
    facts: ModelFacts | None = None
    reference: list[list[Any]] = field(default_factory=list)    # the baseline's outputs
    counted: frozenset[int] = frozenset()                       # which of them are as long as there is something to tell
    again: list[list[Any]] | None = None                        # the same, a second time
    own_bytes: int | None = None                                # the memory of serving the model itself; None: not known
    twin: list[list[Any]] | None = None                         # on inputs that are one rounding away
    others: list[Other] = field(default_factory=list)           # batches of other sizes, with its outputs
    signature: inspect.Signature | None = None                  # of the model, for a check that calls it with keywords
    jury: Jury | None = None                                    # of the check, once it is known that it can judge
    turns: list[str] = field(default_factory=list)              # who met the confirmation's samples, in that order
    journal: Journal | None = None                              # remembers the turns
    stored: dict[Candidate, Path] = field(default_factory=dict)
    made: list[Path] = field(default_factory=list)              # artifacts of candidates; see `discard`
    asked: Budget | None = None                                 # what the user wants of the check, whether or not it came to a jury
    forks: ForkServer | None = None                             # that candidates start from; None: each starts afresh
    _prepared_s: float = 0.0
    _ranking: tuple[list[str], tuple[str, ...]] | None = None

    @property
    def budget(self) -> Budget | None:
        return self.asked if self.jury is None else self.jury.budget

    def within(self, max_drop: float, deadline_s: float) -> Lab:
        """The same for another budget, and with another end."""
        assert self.jury is not None
        jury = dataclasses.replace(self.jury, budget=dataclasses.replace(self.jury.budget, max_drop=max_drop))
        return dataclasses.replace(self, jury=jury, deadline_s=deadline_s)

    # -- processes -------------------------------------------------------------------------------------------------

    def baseline(self) -> Worker:
        """It may take all the time that is left: without it there is nothing. Once it has been prepared it is known what that
        takes."""
        worker = self._worker(Candidate(), self._left_s() + BASELINE_GRACE_S + AGAIN * self._prepared_s)
        self._prepared_s = max(self._prepared_s, worker.ready.prepare_s + worker.ready.first_call_s)
        return worker

    def start(self, candidate: Candidate) -> Worker:
        return self._worker(candidate, forks=self.forks)

    def load(self, folder: Path) -> Worker:
        with of_the_machine(f"{folder} cannot be loaded"):
            return self._worker(folder, LOAD_S)

    def serve(self, source: Source, artifact: Path | None, threads: int) -> Worker:
        """An artifact (None: the model itself) on the inputs of another source. It may take as long to prepare as it may elsewhere."""
        least_s = LOAD_S if artifact is not None else BASELINE_GRACE_S + AGAIN * self._prepared_s
        return Worker(source, artifact or Candidate(), folder=self.folder / "processes", threads=threads, memory_bytes=self.memory_bytes,
                      prepare_s=max(least_s, self._left_s()), deadline_s=self.deadline_s, facts=self.facts)

    def _worker(self, what: Candidate | Path, least_s: float = 0.0, most_s: float = math.inf, forks: ForkServer | None = None) -> Worker:
        """`least_s`: it may take so long to prepare, whatever time is left: what was found must not be lost at the end. `most_s`: no longer,
        whatever time is left. What is measured to be claimed, or for its memory, starts afresh: without `forks`."""
        return Worker(self.source, what, folder=self.folder / "processes", threads=self.threads, memory_bytes=self.memory_bytes,
                      prepare_s=max(least_s, min(most_s, self._prepare_s())), deadline_s=self.deadline_s, facts=self.facts, forks=forks)

    def _prepare_s(self) -> float:
        """What preparing a candidate may take. Only the least that all have leads beyond the end of the time."""
        left_s = self._left_s()
        return max(LEAST_PREPARE_S, PREPARE_SHARE * left_s, min(_MOST_SHARE * left_s, OF_BASELINE * self._prepared_s))

    def _left_s(self) -> float:
        return max(0.0, self.deadline_s - time.monotonic())

    def deploy(self, found: Tried) -> Path:
        """Store a candidate from a fresh process of its own. Raises NotStored, and EnvironmentProblem where the machine
        does not allow it: that says nothing about the candidate."""
        before_s = AGAIN * ((found.prepare_s or 0.0) + (found.first_call_s or 0.0))
        with storing(found):
            worker = self._worker(found.candidate, before_s, forks=self.forks)
        try:
            self.stored[found.candidate] = self._stored(worker, found, min(STORE_S, self._left_s() + LOAD_S + before_s))
            return self.stored[found.candidate]
        finally:
            worker.close()

    def baseline_bytes(self, processes: int) -> int | None:
        """The least that so many processes of the model itself take to serve; None: not known. The first is the one that was observed,
        as it was before probes and the check made it larger. Raises WorkerFailed."""
        found = [self.own_bytes, *(confirm.once_more(lambda: _serving_bytes(self.baseline())) for _ in range(processes - 1))]
        return None if None in found else min(found)        # type: ignore[type-var]

    def artifact_bytes(self, folder: Path) -> int | None:
        """The memory of a fresh process that serves an artifact; None: not known."""
        return _serving_bytes(self.load(folder))

    def served_bytes(self, worker: Worker, found: Tried) -> int | None:
        """The memory of a fresh process that serves what this one stores; None where that fails. What exporting and
        quantizing leave behind in a process is no part of what will be deployed. Both together may take what preparing it may."""
        folder, limit_s = None, self._prepare_s()
        until_s = time.monotonic() + limit_s
        try:
            folder = self._stored(worker, found, limit_s)
            return _serving_bytes(self._worker(folder, most_s=max(LEAST_PREPARE_S, until_s - time.monotonic())))
        except (NotStored, WorkerFailed):
            return None
        finally:
            if folder is not None:
                shutil.rmtree(folder, ignore_errors=True)

    def _stored(self, worker: Worker, found: Tried, limit_s: float) -> Path:
        """The artifact of a living candidate. Raises as `deploy`."""
        target = artifact.next_folder(self.folder / "artifacts")
        program = self.folder / "program"
        shutil.rmtree(program, ignore_errors=True)
        self.made.append(target)
        try:
            with storing(found):
                program.mkdir(parents=True)
                target.parent.mkdir(exist_ok=True)
                entry = worker.store(program, limit_s)
                examples = self.source.inputs(self._torch())[:EXAMPLES]
                answers = [worker.run(*batch) for batch in examples]
                assert self.facts is not None
                stored = artifact.store(target, entry, program=program, record=found.record(self.threads), facts=self.facts,
                                        threads=self.threads, inputs=examples, outputs=answers, device=self.source.device)
                found.size_bytes = artifact.size_bytes(stored)
                return stored
        finally:
            shutil.rmtree(program, ignore_errors=True)

    def discard(self, kept: Path | None) -> None:
        """Remove the artifacts of those that lost, a copy of the model each, and what candidates shared: `Result.pick` makes what it needs again."""
        self.source.without_shared()
        for path in self.made:
            if path != kept:
                shutil.rmtree(path, ignore_errors=True)
        self.made.clear()
        self.stored = {candidate: path for candidate, path in self.stored.items() if path == kept}

    # -- guards ----------------------------------------------------------------------------------------------------

    def examine(self, worker: Worker, candidate: Candidate) -> guards.Behaviour:
        """How its outputs compare with the baseline's, and with each other where the model is not random."""
        torch, facts = self._torch(), self.facts
        found = guards.examine(torch, self.reference, worker.outputs(), numerics=candidate.numerics, precision=self.precision(),
                               again=self.again, twin=self.twin, generates=bool(facts and facts.generates), counted=self.counted)
        if found.problem is not None or facts is None or facts.random:
            return found
        return dataclasses.replace(found, findings=(*found.findings, guards.repeats(torch, worker.outputs(), worker.outputs())))

    def observe(self, worker: Worker) -> None:
        """What candidates are compared with: the outputs of the baseline, twice, and the memory that it takes until then."""
        self.reference, self.again = worker.outputs(), worker.outputs()
        self.counted = guards.counted(self.source.inputs(self._torch()), self.reference)
        self.own_bytes = worker.memory_bytes()

    def probe(self, worker: Worker) -> tuple[Worker, list[str]]:
        """Its outputs on inputs one rounding away, and on batches of other sizes (where it takes them). The process to go on
        with, another one where these inputs ended it: they are not the user's; and what is therefore not known."""
        inputs = self.source.inputs(self._torch())
        try:
            moved = [self._taken(worker, batch) for batch in variations.perturbed(self._torch(), inputs) or ()]
            whole = [answer for answer in moved if answer is not None]
            self.twin = whole if moved and len(whole) == len(moved) else None
        except WorkerFailed as error:
            worker.close()
            return self.baseline(), [f"inputs one rounding away, and other batch sizes, were not tried: there {_ended(error)}"]
        given = self.source.others(self._torch())
        for batch in (*given, *variations.other_batches(inputs)):
            moved = variations.perturbed(self._torch(), [batch])
            try:
                answer, again, *twin = (self._taken(worker, one) for one in (batch, batch, *(moved or ())))
            except WorkerFailed as error:
                worker.close()
                return self.baseline(), [f"other batch sizes were not tried: with {variations.shown(batch)} {_ended(error)}"]
            if answer is not None:
                mine = any(batch is one for one in given)
                self.others.append(Other(batch, answer, again, twin[0] if twin else None, mine))
        return worker, []

    def _taken(self, worker: Worker, batch: tuple[Any, ...]) -> list[Any] | None:
        """The answer to a batch that is not the user's own; None where the model refuses it. Raises WorkerFailed where it
        ends the process."""
        try:
            return _on_cpu(worker.probe(*batch))
        except WorkerFailed as error:
            if not error.alive:
                raise
            return None

    def other_sizes(self, worker: Worker, candidate: Candidate) -> str | None:
        """What is wrong on batches of other sizes, the user's first, that the model takes. A compiler may compile again for each."""
        for other in self.others:
            shown = variations.shown(other.batch)
            try:
                got = _on_cpu(worker.run(*other.batch))
            except WorkerFailed as error:
                if not error.alive:
                    raise
                if not other.given and error.kind == "other_sizes":
                    continue        # it says that it was made for the sizes of the inputs; nobody asked for others
                return f"{shown}, which the model takes, fails: {error.reason}"
            problem = guards.examine(self._torch(), [other.answer], [got], numerics=candidate.numerics, spare=1,
                                     precision=self.precision(), again=other.again and [other.again],
                                     twin=other.twin and [other.twin], counted=self.counted).problem
            if problem is not None:
                return f"with {shown}: {problem}"
        return None

    def precision(self) -> str:
        """The coarsest format that the baseline computes in, as `guards.examine` takes it."""
        return computed_in(self.facts, self.source.switches) if self.facts is not None else "float32"

    def _torch(self) -> Any:
        import torch

        return torch

    # -- the check -------------------------------------------------------------------------------------------------

    def run_of(self, worker: Worker) -> Callable[..., Any]:
        """What a check gets: it is called as the model is."""
        return lambda *inputs, **named: worker.run(*batches.by_place(self.signature, inputs, named))

    def score(self, worker: Worker) -> Scores | None:
        """The check on a worker; None where there is no check. Raises CheckFailed where that has no scores for it, and CheckUnusable where
        it has none for the model either, any more."""
        if self.check is None or self.jury is None:
            return None
        found = checking.of_candidate(self.check, self.run_of(worker), self._model_again, self.jury.budget.metric)
        scores = found.required()
        # Whole numbers, such as classes, are often the same although the model is another one.
        return dataclasses.replace(scores, identical=found.fractions and found.answers == self.jury.answers)

    @contextmanager
    def _model_again(self) -> Iterator[Callable[..., Any]]:
        """The model itself, in a fresh process. Raises EnvironmentProblem where none lives."""
        try:
            worker = self.baseline()
        except WorkerFailed as error:
            raise no_model(error, self.folder) from error
        with worker:
            yield self.run_of(worker)

    def judge(self, scores: Scores) -> Judgement:
        """By the samples of the selection."""
        assert self.jury is not None
        return self.jury.judge(scores)

    def certifies(self) -> bool:
        """Whether the check has samples enough to confirm a candidate that scores as the model does."""
        return self.jury is None or self.jury.certifies

    def confirmed(self, scores: Scores, candidate: Candidate) -> Judgement:
        """By samples that the selection did not see, at the candidate's own level."""
        assert self.jury is not None
        return self.jury.judge(scores, turn(candidate.key(), self.turns, self._keep_turn))

    def _keep_turn(self, name: str) -> None:
        if self.journal is not None:
            self.journal.add(name, {})

    def remember(self, journal: Journal) -> None:
        """Go on after the turns of a search that was here before."""
        self.journal = journal
        self.turns += turns_of(journal.known)

    def key(self, objective: str, limits: Mapping[str, float]) -> str:
        """What all of a search's results depend on, for its journal."""
        source, facts = self.source, self.facts
        assert facts is not None
        given = source.model_hash, source.inputs_hash, source.train_hash, self.threads, *sorted(source.switches.items())
        aim = objective, sorted(limits.items())                 # what is over a limit, and how memory is measured
        seen = facts.torch, sorted(facts.installed.items()), sorted(facts.cpu_flags), facts.capability
        return key_of(self._torch(), source.device, given, aim, seen)

    # -- repair ----------------------------------------------------------------------------------------------------

    def ranking(self) -> tuple[list[str], tuple[str, ...]]:
        """Layers by sensitivity, measured once, on a baseline process of its own."""
        if self._ranking is None:
            worker = self.baseline()
            try:
                names = inner([name for name, _ in worker.sensitivity(min(RANKING_S, max(LEAST_PREPARE_S, self._left_s())))])
                placed = [name for name in worker.ask(f"{__name__}:module_names") if name in set(names)]
                self._ranking = names, (placed[0], placed[-1]) if placed else ()
            finally:
                worker.close()
        return self._ranking


def _serving_bytes(worker: Worker) -> int | None:
    """The memory of a fresh process that has served some calls. It is closed."""
    with worker:
        worker.outputs()
        worker.block(_SERVED_CALLS)
        return worker.memory_bytes()


@contextmanager
def storing(found: Tried) -> Iterator[None]:
    """What cannot be stored in here is NotStored; a machine that does not allow it is an EnvironmentProblem."""
    label = found.candidate.label()
    try:
        with of_the_machine(f"{label} cannot be stored"):
            yield
    except WorkerFailed as error:
        raise NotStored(error.reason) from error
    except EnvironmentProblem as problem:
        if isinstance(problem, ArtifactDamaged):
            raise NotStored(f"{problem.message}: {problem.cause}") from problem
        raise
    except SaturateError as error:
        raise NotStored(f"{error.message}: {error.cause}") from error


@contextmanager
def of_the_machine(message: str) -> Iterator[None]:
    """Raises EnvironmentProblem where the disk is full, here or in a candidate's process."""
    try:
        yield
    except (OSError, WorkerFailed) as error:
        if isinstance(error, WorkerFailed) and error.kind != "disk_full":
            raise
        raise EnvironmentProblem(message, cause=str(error), remedy="free some space, or choose another folder with workdir (--workdir "
                                 "DIR), and give the same command again: with its workdir it goes on from here") from error


def _on_cpu(answer: Any) -> list[Any]:
    """Its tensors, where answers are compared. Those to inputs on the CPU come there, but for kinds that torch pickles as a whole."""
    return [tensor.detach().cpu() for tensor in samples.tensors(answer)]


def _ended(error: WorkerFailed) -> str:
    return f"the model takes too long ({error.reason})" if error.kind == "timeout" else f"the model's process ends: {error.reason}"


def module_names(context: Any) -> list[str]:
    """In the model's order; called in a candidate's process."""
    return [name for name, _ in context.model.named_modules()]


def computed_in(facts: ModelFacts, switches: Mapping[str, str]) -> str:
    """The coarsest format that a model's products are computed in by a process with these switches of torch."""
    held = coarsest(facts.dtypes)
    return guards.TF32 if held == "float32" and session.rounds_to_tf32(switches, facts) else held


def coarsest(dtypes: tuple[str, ...]) -> str:
    """The coarsest of some floating-point formats."""
    order = ("bfloat16", "float16", "float32", "float64")
    return min((name for name in dtypes if name in order), key=order.index, default="float32")

