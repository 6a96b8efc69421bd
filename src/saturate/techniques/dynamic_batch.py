"""Run a batch that does not fit in memory as smaller micro-batches, with the gradient of the whole batch.

What it does
------------
If an allocation fails in the forward or the backward of the model, the batch is run again in two, four, eight... chunks, and the
training goes on: the script's loss sees the outputs of the whole batch, and the gradients are those of the whole batch. If an
allocation fails in a loss of torch that the script computes outside of the model, the model's activations are freed, the loss runs again,
and the model's backward runs in chunks. A batch larger than all before it is cut in advance if the memory that earlier ones took says
that it will not fit.

When it helps
-------------
Batches of varying length, of which the longest one would end the run after hours; another program on the same device; a first try of
a larger model. It is insurance and not a speed-up, so `tune` does not race it: put it into a recipe by hand.

When it hurts
-------------
A chunked step costs one more forward, and so does the first batch. A batch larger than all before it is guarded: its gradients
are handed over at the end of the backward and not during it, so communication does not overlap there.

Shapes that have fit with 15 % of the memory to spare, and shapes that are smaller in every dimension, run as the script wrote them. If
the backward of such a batch still runs out of memory, the parameters that have their gradient keep it, and the others get theirs from
chunks. That is impossible, and a line on stderr says why, if the forward draws random numbers, one backward goes through several
forwards, the input is differentiated as well, the loss reaches parameters past the model's output that have no gradient yet, a hook
acts on gradients once they are there, the model lives on several devices, or the script retains the graph, differentiates twice or
calls `torch.autograd.grad`; or if the memory runs out in the backward of a loss outside of the model.

Not covered are the optimizer's own memory, what a script computes between model and loss or instead of one of torch's losses (a copy of
the logits, a softmax), and a backward on a CPU that runs out of memory after a forward with dropout, because random numbers of the
whole batch cannot be drawn again in parts (on a GPU, its activations then wait in host memory).

Numerics
--------
`stream`: without dropout, chunks only add up in another order (`reordering`). With dropout they draw other random numbers, and
what is drawn once for all samples of a batch (noise on a weight, whether a layer is left out) is drawn once for each chunk.
Nothing happens before memory runs short. Models whose samples depend on each other (BatchNorm in training mode,
contrastive losses inside the model), that change state in their forward or fill an argument, or that reduce a loss in a way that is not
recognised, are left alone, with the reason on stderr; negatives in a loss outside of the model are no obstacle.
Of several outputs, each has the gradient that comes from outside of the model: where one is computed from another, a hook on the
other, its `retain_grad` and `torch.autograd.grad` to it do not see what comes through the first, and nothing says so.

How it is applied
-----------------
Around the forward of the outermost trained modules, from the first training forward on where an optimizer was built by then
(otherwise from the step on that shows what a step is, about the fifth; a run that dies of memory before that says so). The
first call of each structure of arguments is watched, then eight of its samples are run whole and in two chunks, with random numbers
set aside; every output and gradient must agree. Then it runs once more, guarded, with the random numbers that it drew. Before a
batch is cut, and after 1, 2, 4, 8... that were, as many samples as have run at once are compared in the same way: a mixture
of experts with room for a share of the batch drops nothing of a small one. What only larger batches do, nobody sees. Python's,
NumPy's and torch's random numbers are drawn again where a chunk is run again, and modes, attributes and buffers are those of its
forward; where it gives something else all the same, because the script has changed what the model reads elsewhere, the backward
raises an error. Each change is one line on stderr. Wrapped in
DistributedDataParallel, each rank decides for itself, and its hooks see each gradient once. `limit_bytes` forecasts for
less memory than there is. Module hooks and `torch.compile` outside of the model see nothing of it; a model that the script
compiles is left alone, and so are calls that it captures in a CUDA graph.

References
----------
Huang et al., "GPipe: Efficient Training of Giant Neural Networks using Pipeline Parallelism", NeurIPS 2019 (micro-batches).
Chen et al., "Training Deep Nets with Sublinear Memory Cost", 2016 (running the forward again).
Gao et al., "Scaling Deep Contrastive Learning Batch Size under Memory Limited Setup", RepL4NLP 2021 (a loss over the whole
batch, gradients by chunks).
MosaicML Composer, "Auto Microbatching".
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from saturate.records.facts import Evidence, Facts
from saturate.techniques import _chunk_guard, _chunk_loss, _chunk_rescue, _common
from saturate.techniques._api import Eligible, Ineligible, Proof, Technique, Touch
from saturate.techniques._memory_forecast import TRUSTED, Forecast, Memory, memory

TECHNIQUE = Technique(
    id="dynamic-batch",
    title="micro-batches when memory runs out",
    numerics="stream",
    stage="model",
    # Inside of whatever scales the gradients of a backward pass: the part that is run again has them as they arrived.
    touches=(Touch("forward", _chunk_guard.ORDER), Touch("micro-batches"), Touch("backward-call", 5)),
)

#: The very first batch may be the one that does not fit.
EARLY = True

#: After so many batches of trusted sizes, one is guarded all the same: memory may have become scarce meanwhile.
RECHECK = 256


#: Shapes that are remembered as trusted; further ones are compared in each step.
MOST_SHAPES = 512


@dataclass(frozen=True)
class Options:
    """`limit_bytes`: forecast for this much memory; 0 takes what the device has."""

    limit_bytes: int = 0

    def __post_init__(self) -> None:
        if self.limit_bytes < 0:
            raise ValueError(f"limit_bytes is {self.limit_bytes}, not a number of bytes")


def eligible(facts: Facts) -> Eligible | Ineligible:
    if not facts.memory_limit_bytes:
        return Ineligible("insurance against running out of memory, not a speed-up: put it into a recipe by hand")
    refused = _common.why_no_chunks(facts)
    return Eligible("a memory limit was asked for") if refused is None else refused


def variants(facts: Facts) -> list[Options]:
    return [Options(limit_bytes=facts.memory_limit_bytes or 0)]


def apply(context: Any, options: Options) -> str:
    rescue = _chunk_rescue.Rescue(context)

    def wrap(module: Any) -> None:
        say = _chunk_guard.speaker(context, TECHNIQUE.id, module)
        _chunk_guard.Guard(context, module, Insurance(context, options, say), say, rescue)

    count = _common.wrap_all(context, wrap)
    rescue.install(context)
    _chunk_loss.install(context, rescue)
    return f"forward of {count} module(s) watched; a batch that does not fit is run in chunks"


class Insurance:
    """A `_chunk_guard.Policy`. Shapes up to those in `trusted` have run whole, backward included, and left memory
    to spare. Not their number of entries: what a model takes may grow faster along one dimension than along another."""

    whole_runs = False

    def __init__(self, context: Any, options: Options, say: Callable[[str], None]):
        self.context = context
        self.options = options
        self.say = say
        self.trusted: dict[tuple[Any, ...], int] = {}       # entries by shapes of the input tensors
        self.most = math.inf            # the largest size that may run at once
        self.forecast = Forecast()
        self.told = 1
        self.until_recheck = RECHECK

    def runs_whole(self, shapes: tuple[Any, ...]) -> bool:
        if shapes not in self.trusted and not self._within(shapes):
            return False
        self.until_recheck -= 1
        if self.until_recheck > 0:
            return True
        self.until_recheck = RECHECK
        return False

    def _within(self, shapes: tuple[Any, ...]) -> bool:
        """Whether each dimension is at most that of shapes which ran. What is found is remembered."""
        larger = next((known for known in self.trusted if _reaches(known, shapes)), None)
        if larger is not None and len(self.trusted) < MOST_SHAPES:
            self.trusted[shapes] = self.trusted[larger]
        return larger is not None

    def chunks(self, size: int, samples: int) -> int:
        wanted = max(math.ceil(size / self.most), self.forecast.chunks(size, self._memory()))
        chunks = min(samples, wanted)
        if chunks > self.told:
            self.told = chunks
            self.say(f"runs in {chunks} chunks: a batch of {samples} is larger than what fits at once")
        return chunks

    def smaller(self, size: int, chunks: int, why: str) -> None:
        if size / chunks >= self.most:
            return                      # known: the other chunks of the same backward fail alike
        self.most = size / chunks
        self.trusted = {shapes: entries for shapes, entries in self.trusted.items() if entries <= self.most}
        self.told = max(self.told, chunks)
        first_line = why.splitlines()[0][:120] if why else "no text"
        self.say(f"ran out of memory; batches of this size run in {chunks} chunks from here on ({first_line})")

    def began(self, size: int, chunks: int, shapes: tuple[Any, ...]) -> Callable[[], None]:
        before = self._memory()

        def done() -> None:
            after = self._memory()
            if chunks == 1:
                self.forecast.observe(size, before, after)
                self._trust(size, shapes, after)
            self.context.note(TECHNIQUE.id, f"batches of up to {size} entries guarded, the latest in {chunks} chunk(s)")

        return done

    def _trust(self, size: int, shapes: tuple[Any, ...], now: Memory) -> None:
        if now.capacity is None or now.peak <= TRUSTED * now.capacity:
            if size <= self.most:
                self.trusted = {known: entries for known, entries in self.trusted.items() if not _reaches(shapes, known)}
                self.trusted[shapes] = size
        else:
            self.trusted = {}           # scarce: every batch is guarded from here on

    def _memory(self) -> Memory:
        return memory(self.context.torch, _common.device_of(self.context), self.options.limit_bytes)


def _reaches(large: tuple[Any, ...], small: tuple[Any, ...]) -> bool:
    return len(large) == len(small) and all(
        len(a) == len(b) and all(x >= y for x, y in zip(a, b)) for a, b in zip(large, small))


def active(evidence: Evidence, options: Options) -> Proof:
    seen = evidence.notes.get(TECHNIQUE.id, "")
    return Proof(bool(seen), seen or "no batch was guarded: see the reason on stderr")


def as_code(options: Options) -> str:
    known = f", for a memory of {options.limit_bytes} bytes" if options.limit_bytes else ""
    return (
        "# A sketch, exact for a mean loss over equal samples that do not depend on each other, and for one backward per step.\n"
        f"# saturate also cuts beforehand what will not fit{known}, and keeps your own loss over the whole batch.\n"
        "parts, done = 1, False\n"
        "while not done:\n"
        "    try:\n"
        "        for some, wanted in zip(inputs.chunk(parts), targets.chunk(parts)):\n"
        "            (loss_fn(model(some), wanted) * len(some) / len(inputs)).backward()\n"
        "        done = True\n"
        "    except torch.cuda.OutOfMemoryError:\n"
        "        if parts >= len(inputs):\n"
        "            raise\n"
        "        parts *= 2\n"
        "        optimizer.zero_grad()\n"
        "optimizer.step()"
    )
