"""Between the script and a module's forward: decides for every batch whether it runs whole or in chunks.

A structure of arguments is looked at once: the script's own forward is watched (`_chunk_census`), and a few of its samples prove that
chunks give the same (`_chunk_proof`). Before a batch is cut, and now and then from there on, the same is shown at its own size
(`_chunk_compare`). What cannot be proved runs as the script wrote it.
"""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

from saturate import notices
from saturate.techniques import _common, _trees
from saturate.techniques._api import NotApplied
from saturate.techniques._chunk_census import Watch, census, has_hooks
from saturate.techniques._chunk_compare import compare
from saturate.techniques._chunk_modes import Randomness, devices_of
from saturate.techniques._chunk_plan import NoRoom, NotSplittable, Plan
from saturate.techniques._chunk_proof import SAMPLES, prove
from saturate.techniques._chunk_rescue import Batch, Rescue
from saturate.techniques._chunks import DRAWS, Call, Listener
from saturate.techniques._interrupts import from_signal_handler
from saturate.techniques._out_of_memory import free, out_of_memory, without_frames

#: Outside of everything that changes how a module computes, a compiler and what recomputes blocks included.
ORDER = 96

#: How often the script's own forward is watched, from its very first call on: what is built lazily changes the module once.
EARLY_LOOKS = 3

#: Structures of arguments that are looked at; a script with more of them is left alone from there on.
MOST_STRUCTURES = 16


class Policy(Protocol):
    """Decides how many chunks a batch gets. Sizes are entries of all input tensors. `whole_runs`: batches that are cut would
    run whole as well, so that they can be compared."""

    whole_runs: bool

    def runs_whole(self, shapes: tuple[Any, ...]) -> bool:
        """Whether a batch of input tensors of these shapes needs no care. Asked in every step."""

    def chunks(self, size: int, samples: int) -> int: ...

    def smaller(self, size: int, chunks: int, why: str) -> None:
        """A batch of `size` did not fit; `chunks` are tried next, and for later batches."""

    def began(self, size: int, chunks: int, shapes: tuple[Any, ...]) -> Callable[[], None]:
        """A batch begins; what is returned is called when its backward has succeeded."""


@dataclass(frozen=True)
class Asked:
    """The script's call of a module: its forward `inner`, and the arguments."""

    inner: Any
    module: Any
    args: Any
    kwargs: Any

    def run(self) -> Any:
        """As the script wrote it."""
        return self.inner(self.module, *self.args, **self.kwargs)

    def taken_apart(self, torch: Any) -> Parts:
        skeleton, inputs = _trees.taken_apart((self.args, self.kwargs), torch)
        return Parts(self, skeleton, inputs, _structure(self.module, skeleton, inputs),
                     _trees.numel((*self.args, *self.kwargs.values()), torch.Tensor))


@dataclass(frozen=True)
class Parts:
    """Such a call, taken apart. `key`: the structure of the arguments, which a plan is for; `size`: entries of all tensors."""

    asked: Asked
    skeleton: Any
    inputs: list[Any]
    key: Any
    size: int


class Guard:
    """One per trained module."""

    def __init__(self, context: Any, module: Any, policy: Policy, say: Callable[[str], None], rescue: Rescue | None = None):
        self.torch = context.torch
        self.policy = policy
        self.say = say
        self.rescue = rescue                            # None: no batch runs whole
        self.plans: dict[Any, Plan | None] = {}
        self.cut: Counter[Any] = Counter()              # batches that ran in chunks, by structure
        self.refused: set[str] = set()                  # reasons that were said
        self.compared: set[Any] = set()                 # structures, with the numbers of chunks that were shown to be exact
        self.ran: dict[Any, int] = {}                   # most samples that have run at once, by structure
        self.off = False
        self.parameters = [(part._parameters, name, p) for part in module.modules() for name, p in part._parameters.items()]
        self.told: set[str] = set()                     # why calls are never cut, as far as it was said
        self.looks = EARLY_LOOKS if context.early else 1
        problem = _refusal(module, self.torch)
        if problem:
            raise NotApplied(problem)
        context.wrap_forward(module, ORDER, self.wrap)

    def wrap(self, inner: Any) -> Any:
        torch, tensor, parametrize = self.torch, self.torch.Tensor, self.torch.nn.utils.parametrize

        def forward(module: Any, *args: Any, **kwargs: Any) -> Any:
            if self.off or torch.compiler.is_compiling() or not torch.is_grad_enabled():
                return inner(module, *args, **kwargs)
            asked = Asked(inner, module, args, kwargs)
            if not all(held.get(name) is p for held, name, p in self.parameters):
                return self._as_it_is(asked, "with other parameters than its own")      # they are gone in the backward
            if parametrize._cache_enabled:      # a chunk would compute weights for those after it, without a graph
                return self._as_it_is(asked, "within torch.nn.utils.parametrize.cached()")
            if _common.capturing(torch):        # no generator's state can be read there, and nothing that fails can be made up for
                return self._as_it_is(asked, "while the script captures a CUDA graph")
            inputs = _trees.tensors((*args, *kwargs.values()), tensor)
            if self.policy.runs_whole(tuple(one.shape for one in inputs)):
                return self._as_written(asked, inputs)
            return self._forward(asked)

        return forward

    # -- what a batch runs as --------------------------------------------------------------------------------------

    def _as_it_is(self, asked: Asked, how: str) -> Any:
        """A call that is never cut: with other parameters than the module's own, as `torch.func.functional_call` lends it, for one."""
        if how not in self.told:
            self.told.add(how)
            self.say(f"runs as the script wrote it wherever it is called {how}")
        return asked.run()

    def _as_written(self, asked: Asked, inputs: list[Any]) -> Any:
        """The script's own forward and backward, made up for where memory runs out in either."""
        try:
            output = asked.run()
        except Exception as error:
            if not out_of_memory(error, self.torch):
                raise
            failure = without_frames(error)
        else:
            if self.rescue is None:
                return output
            again, foreseen = functools.partial(self._after_failure, asked), functools.partial(self._foreseen, asked)
            return self.rescue.follow(output, Batch(self.rescue, asked.module, inputs, again, foreseen, self.say))
        return self._after_failure(asked, failure)

    def _forward(self, asked: Asked) -> Any:
        try:
            batch = asked.taken_apart(self.torch)
            plan = self.plans.get(batch.key)
            chunks = self.policy.chunks(batch.size, plan.samples(batch.inputs)) if plan is not None else 1
            watch = Watch(asked.module, (asked.args, asked.kwargs), batch.inputs, self.torch) if batch.key not in self.plans else None
        except Exception as error:  # whatever is wrong with us, the script's own forward runs
            if from_signal_handler(error):
                raise
            self._give_up(_in_words(error))
            return asked.run()
        if watch is not None:
            return self._first_look(batch, watch)
        if plan is None or not self._exact(batch, plan, chunks):
            return asked.run()
        return self._run(batch, plan, chunks)

    def _run(self, batch: Parts, plan: Plan, chunks: int, told: bool = True) -> Any:
        """In as many chunks as it takes. `told`: its policy is to learn what it took."""
        torch, asked = self.torch, batch.asked
        self.cut[batch.key] += chunks > 1
        samples = plan.samples(batch.inputs)
        state = Randomness(torch, devices_of(asked.module))
        while True:
            try:
                began = self.policy.began(batch.size, chunks, _trees.shapes(batch.inputs, torch.Tensor)) if told else lambda: None
                listener = Listener(lambda failed, now, why: self._smaller(batch, plan, -(-samples // now), why),
                                    self._done(batch.key, samples, chunks, began), self._twice, self.say)
                call = Call(torch, asked.module, asked.inner, batch.skeleton, plan, samples, chunks, listener)
                output = call.run(batch.inputs)
                if self.rescue is not None and call.graph is not None:
                    self.rescue.guarded.add(call)
                return output
            except Exception as error:
                fits_not = out_of_memory(error, torch)
                if (fits_not and chunks >= samples) or from_signal_handler(error):
                    raise
                why = str(error) if isinstance(error, NotSplittable) else _in_words(error)
                failure = without_frames(error)
            state.restore()
            if not fits_not:            # the script's own error is raised again by its own forward
                self._give_up(why)
                return asked.run()
            free(torch)
            chunks = min(samples, 2 * chunks)
            self._smaller(batch, plan, chunks, failure)

    def _after_failure(self, asked: Asked, failure: Exception) -> Any:
        """Memory ran out in a forward that the script ran whole, or in its backward: the outputs once more, in chunks."""
        free(self.torch)
        batch, plan = self._planned(asked)
        if plan is None or not self._exact(batch, plan, 2):
            raise failure
        self.policy.smaller(batch.size, 2, str(failure))
        return self._run(batch, plan, 2)

    # -- whether it can be cut -------------------------------------------------------------------------------------

    def _planned(self, asked: Asked) -> tuple[Parts, Plan | None]:
        """How a call is cut in two; None where it cannot be."""
        batch = asked.taken_apart(self.torch)
        if batch.key not in self.plans:
            self._examine(batch)
        plan = self.plans[batch.key]
        return batch, plan if plan is not None and _agree_on_two(plan, batch.inputs) else None

    def _foreseen(self, asked: Asked) -> str:
        """Why a call that ran whole cannot be run again in chunks; empty when nothing is known that is against it."""
        plan = self._planned(asked)[1]
        return "it cannot be cut" if plan is None else DRAWS if plan.draws else ""

    def _first_look(self, batch: Parts, watch: Watch) -> Any:
        """The script's own forward, watched; then the proof. Where that shows how to cut it, the same once more, guarded: a batch that
        is too large in every step is so in the first."""
        state = Randomness(self.torch, devices_of(batch.asked.module)) if self.rescue is not None else None
        output, kept = self._as_written(batch.asked, batch.inputs), True
        if batch.key in self.plans:
            return output               # memory ran out, and it was examined for that
        try:
            problem = census(batch.asked.module, self.torch) or watch.problem()
            self.looks -= 1
            if problem and self.looks > 0:
                return output
            if problem:
                self._refuse(batch.key, problem)
            elif not self._examine(batch, beside=state is not None):
                output, kept = None, False
                self._examine(batch)
        except Exception as error:
            if from_signal_handler(error):
                raise
            self._give_up(_in_words(error))
        plan = self.plans.get(batch.key)
        if state is None or (plan is None and kept):
            return output
        output = None
        state.restore()
        # Of a first step, the optimizer's memory is yet to come: nothing is learnt from it.
        return batch.asked.run() if plan is None else self._run(batch, plan, 1, told=False)

    def _examine(self, batch: Parts, beside: bool = False) -> bool:
        """False where there was no room for it `beside` what the script's own forward holds, and nothing is decided."""
        key, module = batch.key, batch.asked.module
        if len(self.plans) >= MOST_STRUCTURES:
            self.plans[key] = None
            self._give_up(f"its arguments have more than {MOST_STRUCTURES} structures")
            return True
        if problem := census(module, self.torch):
            self._refuse(key, problem)
            return True
        try:
            self.plans[key] = prove(module, batch.asked.inner, batch.skeleton, batch.inputs, self.torch)
        except NotSplittable as reason:
            if not (beside and isinstance(reason, NoRoom)):
                self._refuse(key, str(reason))
        free(self.torch)
        return key in self.plans

    def _exact(self, batch: Parts, plan: Plan, chunks: int) -> bool:
        """Whether so many chunks of this batch give what it gives whole. Looked at for each number of chunks, and after 1, 2,
        4, 8... batches that were cut: one batch may agree by chance. What has not run whole is compared as far as batches have."""
        key, asked = batch.key, batch.asked
        cut = self.cut[key]
        if chunks < 2 or ((key, chunks) in self.compared and (cut & (cut - 1) or cut < 1)):
            return True
        samples = plan.samples(batch.inputs)
        known = max(self.ran.get(key, 0), min(SAMPLES[0], samples))
        most = samples if self.policy.whole_runs else min(samples, known)
        try:
            seen = compare(asked.module, asked.inner, batch.skeleton, batch.inputs, plan, most, chunks, self.torch)
        except NotSplittable as reason:
            self._refuse(key, f"{reason}" + (f"; {cut} batch(es) ran in chunks before that showed" if cut else ""))
            return False
        finally:
            free(self.torch)
        if seen < most and self.policy.whole_runs and (key, chunks) not in self.compared:
            self.say(f"in {chunks} chunks was compared with {seen} samples at once: {samples} do not fit twice")
        self.compared.add((key, chunks))
        return True

    def _smaller(self, batch: Parts, plan: Plan, chunks: int, failure: Exception) -> None:
        """A batch did not fit on the way. Raises the failure where chunks are not exact."""
        if not self._exact(batch, plan, chunks):
            raise failure
        self.policy.smaller(batch.size, chunks, str(failure))

    def _done(self, key: Any, samples: int, chunks: int, then: Callable[[], None]) -> Callable[[], None]:
        def done() -> None:
            self.ran[key] = max(self.ran.get(key, 0), -(-samples // chunks))
            then()

        return done

    def _refuse(self, key: Any, reason: str) -> None:
        self.plans[key] = None
        if reason not in self.refused:          # arguments that hold lists of all lengths have as many structures
            self.refused.add(reason)
            self.say(f"left as it is: {reason}")

    def _give_up(self, reason: str) -> None:
        self.off = True
        self.say(f"left as it is from here on: {reason}")

    def _twice(self) -> None:
        if not self.off:
            self._give_up("the script differentiates gradients (create_graph=True)")


def _refusal(module: Any, torch: Any) -> str:
    if _common.is_compiled(module):
        return "the script compiles its model, and a compiled forward is not cut"
    if isinstance(module, torch.jit.ScriptModule):
        return "the model is a TorchScript module"
    return census(module, torch)


def _in_words(error: Exception) -> str:
    lines = str(error).splitlines()
    return f"{type(error).__name__}: {lines[0] if lines else 'no text'}"


def _agree_on_two(plan: Plan, inputs: list[Any]) -> bool:
    try:
        return plan.samples(inputs) >= 2
    except NotSplittable:
        return False            # of no use where an error is on its way already


def _structure(module: Any, skeleton: Any, inputs: list[Any]) -> Any:
    """What a plan is for: names, switches and lists of numbers among the arguments, and the kind of each tensor, but not their sizes;
    which parts of the module are trained, in training mode, and have hooks, which a script may set at any time."""
    mode = (tuple(p.requires_grad for p in module.parameters()), tuple((child.training, has_hooks(child)) for child in module.modules()))
    leaves = tuple((path, _kind(path, leaf)) for path, leaf in _trees.leaves(skeleton))
    return hash(mode), leaves, tuple((tensor.dim(), tensor.dtype, tensor.requires_grad) for tensor in inputs)


def _kind(path: str, leaf: Any) -> Any:
    """Of a number by itself, its type: it may be another one in every step. A list or an array of them may have one for each sample
    (lengths, say), which no chunk gets its part of: where these are all alike, that shows in no comparison."""
    listed = path.count(".") > 1 and path.rpartition(".")[2].isdigit() and isinstance(leaf, (int, float))
    if listed or isinstance(leaf, (bool, str, type(None), _trees.Slot)):
        return leaf
    if type(leaf).__module__ == "numpy" and getattr(leaf, "shape", ()):
        return leaf.shape, leaf.dtype.str, hash(leaf.tobytes())
    return type(leaf)


def speaker(context: Any, identity: str, module: Any) -> Callable[[str], None]:
    """Says what happens to one module: a line on stderr for the user, and a note for the proof of activation."""

    def say(text: str) -> None:
        distributed = context.torch.distributed
        grouped = distributed.is_available() and distributed.is_initialized()
        who = f" (rank {distributed.get_rank()})" if grouped else ""
        notices.tell(f"saturate: {identity}{who}: {type(module).__name__} {text}\n")

    return say
