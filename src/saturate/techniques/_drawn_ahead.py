"""Keeps the random draws of a sampler as they are without workers: what is drawn ahead for them shows only when the training asks for
those batches. Used by `loader-workers`.

RandomSampler draws once more from its generator behind its last index. Asked ahead, it would do so in a pass that is left before its
end, or before what the script draws from that generator: every later epoch would be in another order.
"""

from __future__ import annotations

import collections
import pickle
import random
import sys
from collections.abc import Callable, Iterator
from typing import Any

from saturate.data.contents import is_generator
from saturate.techniques import _loaders


class DrawnAhead:
    """Stands for the iterator over a sampler's batches of indices. `reached` is called when the training asks for its next batch.
    `told` is called when a batch was drawn from other numbers than it would have been: the script drew from the generator in between."""

    def __init__(self, batches: Iterator[Any], sampler: Any, told: Callable[[], None]):
        self._batches = batches
        self._told = told
        self._samplers = list(_loaders.samplers_in(sampler))
        self._generators = generators_of(self._samplers)
        self._drawn: collections.deque[list[tuple[Any, Any]]] = collections.deque()     # by batch and generator: before and after

    @property
    def draws(self) -> bool:
        """Whether there is anything to it."""
        return bool(self._generators)

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        now = self._states()
        before = self._from(now)
        self._set(now, before)
        try:
            return next(self._batches)
        finally:
            after = self._states()
            self._drawn.append(list(zip(before, after)))
            self._set(after, now)

    def reached(self) -> None:
        for place, (before, after) in enumerate(self._drawn.popleft() if self._drawn else []):
            if before == after:
                continue
            generator = self._generators[place]
            if state_of(generator) == before:
                set_state(generator, after)
            elif not self._draws_behind(generator):
                self._told()

    def settle(self) -> None:
        """From now on it draws when it is asked."""
        while self._drawn:
            self.reached()
        self._generators = []

    def _states(self) -> list[Any]:
        return [state_of(generator) for generator in self._generators]

    def _from(self, now: list[Any]) -> list[Any]:
        """What the next batch is drawn from: what the batches before it left, where they drew anything, else what is there."""
        found = list(now)
        for batch in self._drawn:
            for place, (before, after) in enumerate(batch):
                if before != after:
                    found[place] = after
        return found

    def _set(self, now: list[Any], wanted: list[Any]) -> None:
        for generator, is_there, state in zip(self._generators, now, wanted):
            if state != is_there:
                set_state(generator, state)

    def _draws_behind(self, generator: Any) -> bool:
        """Whether what a sampler drew is RandomSampler's permutation behind its last index, of which nothing is used: draw it anew."""
        for sampler in self._samplers:
            if type(sampler).__name__ == "RandomSampler" and sampler.generator is generator and not sampler.replacement:
                size = len(sampler.data_source)
                if sampler.num_samples == size:
                    sys.modules["torch"].randperm(size, generator=generator)
                    return True
        return False


def generators_of(samplers: list[Any]) -> list[Any]:
    """The random generators that samplers may draw from later than for their first index: those that they hold, and where one is not
    torch's, those that everything draws from."""
    held = [value for sampler in samplers for value in getattr(sampler, "__dict__", {}).values() if is_generator(value)]
    if not all(type(sampler).__module__.startswith("torch.utils.data.") for sampler in samplers):
        torch, numpy = sys.modules["torch"], sys.modules.get("numpy")
        held += [torch.default_generator, random._inst, *([numpy.random.mtrand._rand] if numpy is not None else [])]
    return [one for one in {id(one): one for one in held}.values() if hasattr(one, "get_state") or hasattr(one, "getstate")
            or hasattr(one, "bit_generator")]


def state_of(generator: Any) -> Any:
    """Something to compare with == and to set."""
    if isinstance(generator, random.Random):
        return generator.getstate()
    if isinstance(generator, sys.modules["torch"].Generator):
        return generator.get_state().numpy().tobytes()
    if hasattr(generator, "bit_generator"):
        return pickle.dumps(generator.bit_generator.state)
    return pickle.dumps(generator.get_state(legacy=False))


def set_state(generator: Any, state: Any) -> None:
    torch = sys.modules["torch"]
    if isinstance(generator, random.Random):
        generator.setstate(state)
    elif isinstance(generator, torch.Generator):
        generator.set_state(torch.frombuffer(bytearray(state), dtype=torch.uint8))
    elif hasattr(generator, "bit_generator"):
        generator.bit_generator.state = pickle.loads(state)
    else:
        generator.set_state(pickle.loads(state))
