"""Which candidates there are at each stage. Pure functions of what is known so far: nothing here starts a process. Within a
stage `order` says which one is next.

The space is small and made by hand, and it is walked in stages: lossless runtimes and switches, number formats on the
runtimes that they go with, training, and last the neighbours of the best. A stage tries what the stages before it showed
to be worth combining, not all combinations.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from types import ModuleType
from typing import Any

from saturate.inference.candidates import Candidate, Part
from saturate.inference.techniques._api import LOSSLESS, Eligible, Ineligible, bound_of, variants_of
from saturate.records.inference import LEFT_OUT, NO_CHECK, ModelFacts

#: A switch that gains less alone is not worth combining; screening sees no less either.
HELPS = 1.02

#: Runtimes that a number format is tried with, the fastest lossless ones first.
RUNTIMES = 2


@dataclass
class Pool:
    """What may be in a candidate, by stage and promise. `refused`: ids with the reason. `noted`: what this machine changes, with the ids of
    those that it does it to."""

    switches: list[Part] = field(default_factory=list)      # lossless, stages session and number
    runtimes: list[Part] = field(default_factory=list)      # lossless, stage runtime
    numbers: list[Part] = field(default_factory=list)       # precision, whatever stage
    trained: list[Part] = field(default_factory=list)       # convergence
    refused: dict[str, str] = field(default_factory=dict)
    noted: dict[str, list[str]] = field(default_factory=dict)
    facts: ModelFacts = field(default_factory=ModelFacts)   # of the model

    def lossless(self) -> set[str]:
        """Ids of those that compute the same."""
        return {part.id for part in (*self.switches, *self.runtimes)}

    def notes(self) -> list[str]:
        """`noted`, as sentences for the user."""
        return [f"{', '.join(sorted(ids))}: {what}" for what, ids in self.noted.items()]


def pool(registry: Mapping[str, ModuleType], facts: ModelFacts, *, check: bool, only: Collection[str] = (),
         skip: Collection[str] = ()) -> Pool:
    """Eligible techniques with their variants, the most promising first."""
    found = Pool(facts=facts)
    for id, module in sorted(registry.items(), key=lambda entry: -(bound_of(entry[1], facts) or 1.0)):
        technique = module.TECHNIQUE
        if (only and id not in only) or id in skip:
            found.refused[id] = LEFT_OUT
            continue
        answer: Eligible | Ineligible = module.eligible(facts)
        if not answer:
            found.refused[id] = answer.reason
        elif technique.numerics not in LOSSLESS and not check:
            found.refused[id] = NO_CHECK
        else:
            _list_of(found, technique).extend(Part(module, options) for options in variants_of(module, facts))
            if answer.note:
                found.noted.setdefault(answer.note, []).append(id)
    return found


def _list_of(found: Pool, technique: object) -> list[Part]:
    if technique.numerics == "convergence" or technique.stage == "train":
        return found.trained
    if technique.numerics not in LOSSLESS:
        return found.numbers
    return found.runtimes if technique.stage == "runtime" else found.switches


def alone(found: Pool, tried: Mapping[Candidate, Any]) -> Iterator[Candidate]:
    """Every lossless part by itself, and the number formats; later ones follow from what was tried."""
    for part in (*found.runtimes, *found.switches):
        yield Candidate.of([part])
    yield from numbers(found, tried)


def lossless_together(found: Pool, alone: Mapping[Candidate, float]) -> Iterator[Candidate]:
    """The best runtimes with the switches that help. `alone`: speed-ups of working candidates."""
    runtimes = best_variants(found.runtimes, alone)[:RUNTIMES]
    switches = [part for part in best_variants(found.switches, alone) if alone[Candidate.of([part])] >= HELPS]
    for base in ([], *([runtime] for runtime in runtimes)):
        together = [*base, *switches]
        for chosen in ([*base, *switches[:1]], together):
            if len(chosen) > 1:
                candidate = widest(chosen)
                if len(candidate.parts) > 1:
                    yield candidate


def numbers(found: Pool, tried: Mapping[Candidate, Any]) -> Iterator[Candidate]:
    """Each number format with the fastest lossless runtimes that it goes with, once these are known; alone where it brings
    its own, or none works, or those that do pass a limit: it may be the one that keeps it. `tried` has attributes `speedup` and `fate`."""
    runtimes = best_variants(found.runtimes, {candidate: known.speedup for candidate, known in tried.items() if known.speedup is not None})
    for part in found.numbers:
        pairs = [Candidate.of([part, runtime]) for runtime in runtimes]
        pairs = [candidate for candidate in pairs if candidate.conflict() is None][:RUNTIMES]
        waits = any(Candidate.of([runtime]) not in tried and Candidate.of([part, runtime]).conflict() is None for runtime in found.runtimes)
        yield from pairs
        over = all(tried[Candidate.of([other for other in pair.parts if other != part])].fate == "over_limit" for pair in pairs)
        if over and not waits:
            yield Candidate.of([part])


def trained(found: Pool, best: Sequence[Candidate]) -> Iterator[Candidate]:
    """Each technique that trains, with the best set that it goes with, and alone. `best`: fastest first."""
    for part in found.trained:
        for base in best:
            candidate = Candidate.of([part, *base.parts], base.keep)
            if candidate.conflict() is None and part.id not in {other.id for other in base.parts}:
                yield candidate
                break
        else:
            yield Candidate.of([part])


def neighbours(found: Pool, best: Candidate) -> Iterator[Candidate]:
    """The best set with another variant of one part, with one more switch, or with one switch less."""
    every = [*found.switches, *found.runtimes, *found.numbers, *found.trained]
    own = {part.id: part for part in best.parts}
    for part in every:
        if part in best.parts:
            continue
        others = [other for other in best.parts if other.id != part.id]
        if part.id in own or part in found.switches:
            candidate = Candidate.of([*others, part], best.keep)
            if candidate.conflict() is None:
                yield candidate
    for part in best.parts:
        if len(best.parts) > 1 and part.module.TECHNIQUE.numerics in LOSSLESS:
            yield Candidate.of([other for other in best.parts if other is not part], best.keep)


def best_variants(parts: Sequence[Part], alone: Mapping[Candidate, float]) -> list[Part]:
    """Of each technique the variant that was fastest alone, fastest technique first; what did not work is left out."""
    fastest: dict[str, tuple[float, Part]] = {}
    for part in parts:
        speed = alone.get(Candidate.of([part]))
        if speed is not None and speed > fastest.get(part.id, (0.0, part))[0]:
            fastest[part.id] = (speed, part)
    return [part for _, part in sorted(fastest.values(), key=lambda entry: -entry[0])]


def widest(parts: Sequence[Part]) -> Candidate:
    """As many of the parts as go together, earlier ones first."""
    chosen: list[Part] = []
    for part in parts:
        if Candidate.of([*chosen, part]).conflict() is None:
            chosen.append(part)
    return Candidate.of(chosen)
