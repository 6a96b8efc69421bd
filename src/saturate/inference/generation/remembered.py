"""What searches in one folder know of each other: ways that were tried, confirmations that failed, and whose turn it was.

Each way that is confirmed meets the same samples, at a confidence by its place among them (`accuracy.level`). So a place is kept
from one search to the next: a search that began anew with the first would spend more than the promised chance of error.
"""

from __future__ import annotations

import hashlib
import secrets
from collections.abc import Callable
from typing import Any

import msgspec

from saturate import __version__
from saturate.errors import EnvironmentProblem
from saturate.inference import hardware, identity
from saturate.inference.generation.models import device_of
from saturate.inference.journal import Journal
from saturate.machine import facts as machine
from saturate.records.generation import GenerationCandidate

#: What names in the journal begin with: a place among those that met the samples of the confirmation, and what came of one.
_TURN, _REFUSED = "turn: ", "refused: "


class Memory:
    """`journal` None: of this search alone. `notes`: what the user is told."""

    def __init__(self, journal: Journal | None = None, notes: list[str] | None = None):
        self._journal, self._notes = journal, [] if notes is None else notes
        self._known = journal.known if journal else {}      # also when the disk has taken no more
        self._turns = [name for name in self._known if name.startswith(_TURN)]

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
        name = _TURN + record.id
        if name not in self._turns:
            self._turns.append(name)
            self._add(name, record.numerics, {})
        return self._turns.index(name)

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
    device = str(device_of(given.model))
    here = (__version__, torch.__version__, torch.get_num_threads(), yard.isolated, machine.cpu_name(), device,
            hardware.gpu_name(torch, device))
    return hashlib.blake2b(repr((models, here, more)).encode(), digest_size=12).hexdigest()


def rests(torch: Any, check: Callable[..., Any] | None) -> dict[str, str]:
    """What some of a search's results depend on. A check whose code nobody can see may be another one each time."""
    return {"check": "" if check is None else identity.of_callable(torch, check) or secrets.token_hex(8)}
