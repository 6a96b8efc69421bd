"""What the processes of a resume drill wrote down, read into updates. The lines are those of `saturate.agent.drill`."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

Events = Sequence[dict[str, Any]]


@dataclass(frozen=True)
class Step:
    """What ends an update: the `count`-th occurrence of `token` (see `agent.motif`)."""

    token: str
    count: int = 1


@dataclass(frozen=True)
class Update:
    """One update of a training. Empty and None: it could not be seen.

    losses: of each micro-step, in order. indices, rows: the samples that it was made from, by index and by content. given:
    digests of the tensors that the model was given. begins: whether its loader had begun anew. before, after: what stands for the
    trained parameters. rates: learning rates. counter: the optimizer's own count of its steps, this one included. t_ns:
    when it ended, CLOCK_MONOTONIC.
    """

    losses: tuple[float, ...]
    indices: tuple[int, ...] = ()
    rows: tuple[int, ...] = ()
    given: tuple[str, ...] = ()
    begins: bool = False
    before: str | None = None
    after: str | None = None
    rates: tuple[float, ...] = ()
    counter: int | None = None
    t_ns: int = 0


@dataclass(frozen=True)
class Save:
    """Files that were opened to be written after `update` updates."""

    update: int
    paths: tuple[str, ...]


@dataclass
class Log:
    """The file of one process while it grows. `counts`: how often each token occurred."""

    events: list[dict[str, Any]] = field(default_factory=list)
    counts: dict[str, int] = field(default_factory=dict)
    step: Step | None = None
    rank: int | None = None         # None: this process has not trained
    held: bool = False              # it stands where it was told to
    withdrawn: dict[str, Any] | None = None     # what the agent wrote when it gave up
    saves: list[int] = field(default_factory=list)      # numbers of updates after which checkpoints were written
    others: list[int] = field(default_factory=list)     # and after which other binary files were
    _rest: bytes = b""

    def feed(self, data: bytes, step: Step | None = None) -> None:
        """More bytes of the file; a line that a kill cut short never becomes an event. `step`: what ends an update, where
        that is known from another process."""
        *lines, self._rest = (self._rest + data).split(b"\n")
        for event in map(json.loads, lines):
            self.events.append(event)
            what = event["at"]
            if is_token(event):
                self.counts[what] = self.counts.get(what, 0) + 1
            elif what == "start":
                self.rank = event["rank"]
            elif what == "step":
                self.step = Step(event["token"], event["count"])
            elif what in ("save", "wrote"):
                done, places = self.updates(step or self.step), self.saves if what == "save" else self.others
                places += [done] if done not in places else []
            self.held = self.held or what == "held"
            if what == "withdrawn" and self.withdrawn is None:
                self.withdrawn = event

    def updates(self, step: Step | None) -> int:
        """How many updates there were; an unknown step is taken for that of the optimizer that stepped most often."""
        if step is None:
            return max((count for token, count in self.counts.items() if token != "B"), default=0)
        return self.counts.get(step.token, 0) // step.count


def is_token(event: dict[str, Any]) -> bool:
    return "losses" in event


def step_of(events: Events) -> Step | None:
    """What ends an update: what the agent found, or where it had no time to, the optimizer that stepped most often."""
    found = [Step(event["token"], event["count"]) for event in events if event["at"] == "step"]
    if found:
        return found[-1]
    tokens = [event["at"] for event in events if is_token(event)]
    optimizers = sorted(set(tokens) - {"B"})
    if not optimizers:
        return Step("B") if tokens else None
    return Step(max(optimizers, key=tokens.count))


def updates(events: Events, step: Step) -> list[Update]:
    """All whole updates of one process, in order."""
    found: list[Update] = []
    tokens: list[dict[str, Any]] = []
    pool: list[dict[str, Any]] = []         # batches, newest last, whose samples an update may be made from
    training: set[int] = set()              # loaders whose batches were given to the model
    began: set[int] = set()                 # loaders that have begun anew since an update was made from them
    weights = next((event["weights"] for event in events if event["at"] == "began"), None)      # now, as far as known
    for event in events:
        if not is_token(event):
            continue
        tokens.append(event)
        if event["at"] != step.token or sum(one["at"] == step.token for one in tokens) < step.count:
            continue
        if tokens[0]["at"] == "B":          # nothing has moved in this update yet; scripts also change parameters by hand
            weights = tokens[0]["weights"]
        batches = [batch for one in tokens for batch in one["batches"]]
        began |= {batch["loader"] for batch in batches if batch["first"]}
        pool = (pool + batches)[-_POOL:]
        given = [forward for one in tokens for forward in one["inputs"]]
        used = _used(given, pool, batches, training)
        training |= {batch["loader"] for batch in used}
        made_from = {batch["loader"] for batch in used}
        found.append(Update(
            losses=tuple(loss for one in tokens for loss in one["losses"]),
            indices=tuple(index for batch in used for index in batch["indices"]),
            rows=tuple(row for batch in used for row in batch["rows"]),
            given=tuple(digest for forward in given for digest in forward) or tuple(d for b in used for d in b["tensors"]),
            begins=bool(began & made_from),
            before=weights, after=None if step.token == "B" else event["weights"],
            rates=tuple(event.get("rates", ())), counter=event.get("counters"), t_ns=event["t_ns"],
        ))
        began -= made_from
        weights = event["weights"]
        tokens = []
    return found


#: Batches that a loader may be ahead of the training, as libraries that prefetch are.
_POOL = 64


def _used(given: list[list[str]], pool: list[dict[str, Any]], fetched: list[dict[str, Any]], training: set[int]) -> list[dict[str, Any]]:
    """The batches that an update was made from: those that the model was given, where that can be told by their tensors,
    else those that were fetched for it from a loader that is known to feed the model; else, as a script may build its dataset
    anew for every epoch, all that were fetched."""
    found = []
    for forward in given:
        tensors = set(forward)
        match = next((batch for batch in reversed(pool) if tensors & set(batch["tensors"])), None)
        if match is not None and not any(match is one for one in found):
            found.append(match)
    if found:
        return found
    return [batch for batch in fetched if batch["loader"] in training] or fetched


def merged(ranks: Sequence[Sequence[Update]]) -> list[Update]:
    """The updates of all ranks as one: as many as every rank has made."""
    if len(ranks) == 1:
        return list(ranks[0])
    return [Update(
        losses=tuple(loss for one in together for loss in one.losses),
        indices=tuple(index for one in together for index in one.indices), rows=tuple(row for one in together for row in one.rows),
        given=tuple(digest for one in together for digest in one.given),
        begins=together[0].begins, before=together[0].before, after=together[0].after, rates=together[0].rates,
        counter=together[0].counter, t_ns=max(one.t_ns for one in together),
    ) for together in zip(*ranks)]


def saves(events: Events, step: Step, kind: str = "save") -> list[Save]:
    """When checkpoints were written (`kind` "wrote": other binary files), and which files: all that were opened after the same
    update belong together."""
    done, ends = 0, 0
    found: dict[int, list[str]] = {}
    for event in events:
        if event["at"] == step.token:
            ends += 1
            done = ends // step.count
        elif event["at"] == kind:
            found.setdefault(done, []).append(event["path"])
    return [Save(update, tuple(paths)) for update, paths in found.items()]
