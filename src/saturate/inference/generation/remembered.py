"""What searches in one folder know of each other: ways that were tried, confirmations that failed, and whose turn it was."""

from __future__ import annotations

from typing import Any

import msgspec

from saturate.errors import EnvironmentProblem
from saturate.inference import identity
from saturate.inference import journal as journals
from saturate.inference.facts import installed
from saturate.inference.generation.models import device_of
from saturate.inference.journal import Journal, turn, turns_of
from saturate.records.generation import GenerationCandidate

#: What the names of confirmations that failed begin with.
_REFUSED = "refused: "


class Memory:
    """`journal` None: of this search alone. `notes`: what the user is told."""

    def __init__(self, journal: Journal | None = None, notes: list[str] | None = None):
        self._journal, self._notes = journal, [] if notes is None else notes
        self._known = journal.known if journal else {}      # also when the disk has taken no more
        self._turns = turns_of(self._known)

    def tried(self, label: str) -> GenerationCandidate | None:
        return self._record(label)

    def refused(self, label: str) -> GenerationCandidate | None:
        """Of a way that did not hold on the prompts and samples of the confirmation, and would not now."""
        return self._record(_REFUSED + label)

    def keep_tried(self, record: GenerationCandidate) -> None:
        self._add(record.id, record.numerics, {"record": msgspec.to_builtins(record)})

    def keep_refused(self, record: GenerationCandidate) -> None:
        self._add(_REFUSED + record.id, record.numerics, {"record": msgspec.to_builtins(record)})

    def turn(self, record: GenerationCandidate) -> int:
        """Its place among those that met the samples of the confirmation, from 0: the same each time."""
        return turn(record.id, self._turns, lambda name: self._add(name, record.numerics, {}))

    def _record(self, name: str) -> GenerationCandidate | None:
        known = self._known.get(name)
        return None if known is None else msgspec.convert(known["record"], GenerationCandidate)

    def _add(self, name: str, numerics: str, entry: dict[str, Any]) -> None:
        """A disk that takes no more ends no search: what is found is still told."""
        if self._journal is None:
            return
        try:
            self._journal.add(name, entry, rests=("check",) if numerics == "precision" else ())
        except EnvironmentProblem as error:
            self._notes.append(f"{error.message} ({error.cause}): another search in this folder begins anew")
            self._journal = None


def key_of(torch: Any, given: Any, yard: Any, more: Any) -> str:
    """What all of a search's results depend on, for the journal. given: a `recipe.Given`; yard: a `host.Yard`."""
    models = yard.source.model_hash if yard.source else identity.of_model(torch, given.module(torch))
    return journals.key_of(torch, str(device_of(given.model)), models, torch.get_num_threads(), yard.isolated, more, sorted(installed().items()))
