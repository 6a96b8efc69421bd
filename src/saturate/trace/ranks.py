"""Who waited for whom: the same collectives, seen by several ranks.

A collective cannot finish before its last rank arrives, so the kernel of an early rank mostly waits. Of collective i
with duration d(r, i) on rank r (as TraceLens separates skew from transfer):

    latency(i)  = min over ranks of d(r, i)         what the transfer itself costs, at most
    wait(r, i)  = d(r, i) - latency(i)              what rank r waited for later ones
    late(r, i)  = how much later than the first rank r arrived: from the starts where the ranks' clocks agree, else
                  max over ranks of d(., i) - d(r, i), which needs no clock where ranks finish together

Starts are compared after the clocks are set by the median of the ends: clocks that are apart by less than a transfer
takes would else look like a rank that is late. Only ends of collectives that ranks finish together (all-reduce,
all-gather, reduce-scatter, all-to-all, barrier) tell about clocks and durations so: from a broadcast, reduce, scatter or
gather one rank may return long before another.

Collectives are matched by process group, kind, size and sequence number where those were recorded; else by position,
as the n-th of their kind in step k (in the whole trace where steps have no numbers). Positions must hold: once the
clocks' offset is taken away, the intervals of one collective share an instant. Where they do
not (a sampled trace), collectives are matched by the moment they end, if the clocks allow it. What cannot be matched
is left out and counted, never guessed at.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from saturate.records.analysis import Straggler
from saturate.trace.collectives import Key, Seen
from saturate.trace.columns import Column
from saturate.trace.one_run import Member, not_one_run

#: Collectives that no rank can leave before all have come, and so finish together; a kernel that sends and receives is
#: an all-to-all where it is still one of the collectives.
FINISHED_TOGETHER = re.compile(
    r"all_?(reduce|gather|to_?all)|reduce_?scatter|barrier|cross_device_reduce|SendRecv", re.IGNORECASE)

#: Share of the matched collectives that must have been in progress on all ranks at one instant, for positions to be
#: believed (clock offsets taken away) and for clocks to agree (as they are).
HOLDS = 0.9

#: Ends of one collective differ by no more than this share of its shortest duration, or by this many ns.
END_TOLERANCE, END_TOLERANCE_NS = 0.05, 20_000


@dataclass(frozen=True)
class Ranks:
    """`stragglers`: the latest first. `unknown` says why there are none, or what they do not tell; `notes` what was
    left out or assumed. `mixed`: what was given cannot be compared as the ranks of one run, so nothing that compares them
    follows."""

    stragglers: list[Straggler]
    unknown: str = ""
    notes: list[str] = field(default_factory=list)
    mixed: bool = False
    numbers: tuple[int, ...] = ()       # under which ranks were compared, one for each `Seen` that was given
    world_size: int | None = None       # of the run, as far as was recorded


@dataclass(frozen=True)
class Matched:
    """The same collectives on several ranks: row i of `start` and `end` belongs to `ranks[i]`. `ended_together`: for each
    collective, whether it is one that ranks finish together."""

    ranks: tuple[int, ...]
    start: Column
    end: Column
    ended_together: Column

    @property
    def together(self) -> Column:
        """Whether all ranks were in the collective at one instant, by their clocks as they are."""
        return self.start.max(axis=0) <= self.end.min(axis=0)

    @property
    def ahead(self) -> Column:
        """By how much each rank's clock is ahead of the first one's: the median of the ends that should be one; 0 where
        there are none."""
        ended = self.end[:, self.ended_together]
        return _median(ended - ended[0]) if ended.shape[1] else np.zeros(len(self.ranks), np.int64)

    @property
    def set_right(self) -> Matched:
        """By one clock: the first rank's."""
        return self.earlier(self.ahead)

    def earlier(self, by: Column) -> Matched:
        by = by[:, np.newaxis]
        return Matched(self.ranks, self.start - by, self.end - by, self.ended_together)

    def of(self, mask: Column) -> Matched:
        return Matched(self.ranks, self.start[:, mask], self.end[:, mask], self.ended_together[mask])


def _median(rows: Column) -> Column:
    """Of each row, in whole numbers: times since the epoch are too large for floating point."""
    ordered = np.sort(rows, axis=1)
    low, high = ordered[:, (ordered.shape[1] - 1) // 2], ordered[:, ordered.shape[1] // 2]
    return low + (high - low) // 2


def _ended_together(keys: list[Key], counts: list[int]) -> Column:
    return np.repeat([bool(FINISHED_TOGETHER.search(key.kind.name)) for key in keys], counts)


def compared(files: Sequence[Member], seen: list[Seen]) -> Ranks:
    """`across`, if the files can be the ranks of one run."""
    mixed = not_one_run(files)
    if mixed:
        return Ranks([], f"{mixed}: they are not the ranks of one run", mixed=True)
    if len(seen) == 1 < len(files):
        return Ranks([], f"of {len(files):,} traces only {seen[0].source} holds collectives", mixed=True)
    return across(seen)


def across(seen: list[Seen]) -> Ranks:
    """Match the collectives of all ranks and say who was late."""
    ranks, unknown, notes = _numbered(seen)
    if unknown:
        return Ranks([], unknown, notes, mixed=len(seen) > 1)
    point_to_point = sum(rank.point_to_point for rank in seen)
    if point_to_point:
        notes.append(f"{point_to_point:,} sends and receives are not collectives and were left out")
    total = sum(len(starts) for rank in seen for starts in rank.starts.values())
    if not total:       # a pipeline, say: nothing speaks against one run
        return Ranks([], "no collective could be matched: all that was recorded are sends and receives", notes)
    counted, certain = _by_position(ranks)
    held = [_held(matched) for matched in counted]
    if counted and sum(each.start.shape[1] for each in held) < HOLDS * sum(each.start.shape[1] for each in counted):
        held = _by_time(ranks)
        notes.append("the n-th collectives of the ranks are not the same ones, so they were matched by the moment "
                     "they end")
    matched = certain + [each for each in held if each.start.shape[1]]
    if not matched:
        return Ranks([], f"no collective could be matched across the {len(seen)} ranks: they ran different kinds, "
                     "not equally often, or parts of the traces are missing", notes, mixed=True)
    left_out = total - sum(each.start.size for each in matched)
    if left_out:
        notes.append(f"{left_out:,} of {total:,} recorded collectives have no counterpart on all ranks of their "
                     "group and were left out")
    together = np.concatenate([each.together for each in matched])
    agree = bool(together.sum() >= HOLDS * len(together))
    apart = max(int(np.ptp(each.ahead)) for each in matched)
    if not agree:
        told, count = (sum(int(part) for part in parts) for parts in zip(
            *((each.ended_together.sum(), len(each.ended_together)) for each in matched)))
        notes.append("the ranks' clocks do not agree, so lateness is from durations" + (
            f", and only of the {told:,} of {count:,} collectives that ranks finish together" if told < count else ""))
    elif apart > END_TOLERANCE_NS:
        notes.append(f"the ranks' clocks are up to {apart / 1e6:,.2f} ms apart; they were set by the ends of the "
                     "collectives, which ranks finish together")
    found, size = _sum([each.set_right for each in matched], agree), _world_size(seen)
    missing = ""
    if size is not None and size > len(found):
        missing = (f"{len(found):,} of {size:,} ranks were compared: what they waited for the others cannot be told "
                   "from their transfers")
        notes.append(missing)
    return Ranks(found, missing, notes, numbers=tuple(ranks), world_size=size)


def _world_size(seen: list[Seen]) -> int | None:
    """Ranks of the run: as many as a file says, and no fewer than its process groups name."""
    named = frozenset[int]().union(*(members for rank in seen for members in rank.members.values()))
    return max(len(named), *(rank.world_size or 0 for rank in seen)) or None


def _numbered(seen: list[Seen]) -> tuple[dict[int, Seen], str, list[str]]:
    """Ranks by number, in the order given, or why they have none."""
    if len(seen) < 2:
        return {}, ("no collectives were recorded" if not seen else
                    "only one rank was given: how long it waited for its peers cannot be told from its transfers"), []
    if all(rank.rank is None for rank in seen):
        several = ", and of the devices in each" if any(rank.devices is not None for rank in seen) else ""
        return dict(enumerate(seen)), "", [
            f"the files do not say their rank; ranks are numbered in the order of the files{several}"]
    by_rank: dict[int, Seen] = {}
    for rank in seen:
        if rank.rank is None:
            whose = "its rank" if rank.devices is None else "the ranks of its processes"
            return {}, f"{rank.source} does not say {whose}", []
        if rank.rank in by_rank:
            return {}, f"{by_rank[rank.rank].source} and {rank.source} are both of rank {rank.rank}", []
        by_rank[rank.rank] = rank
    return by_rank, "", []


def _parties(ranks: dict[int, Seen], group: str, holders: list[int]) -> list[int]:
    """The ranks that must have run a collective: of its group; of one known by name only, those that did."""
    members = next((rank.members[group] for rank in ranks.values() if rank.members.get(group)), frozenset())
    return [rank for rank in ranks if rank in members] if members else holders if group else list(ranks)


def _by_position(ranks: dict[int, Seen]) -> tuple[list[Matched], list[Matched]]:
    """What stands at the same place on all ranks: counted within steps, and numbered by the recording itself."""
    found: dict[tuple[str, tuple[int, ...]], list[Key]] = defaultdict(list)
    for key in sorted({key for rank in ranks.values() for key in rank.starts}):
        holders = [number for number, rank in ranks.items() if key in rank.starts]
        counts = {len(ranks[number].starts[key]) for number in holders}
        if len(holders) > 1 and len(counts) == 1 and holders == _parties(ranks, key.kind.group, holders):
            found[key.counted, tuple(holders)].append(key)
    stacked = {(counted, holders): Matched(
        holders, np.stack([np.concatenate([ranks[number].starts[key] for key in keys]) for number in holders]),
        np.stack([np.concatenate([ranks[number].ends[key] for key in keys]) for number in holders]),
        _ended_together(keys, [len(ranks[holders[0]].starts[key]) for key in keys]))
        for (counted, holders), keys in found.items()}
    return ([matched for (counted, _), matched in stacked.items() if counted == "step"],
            [matched for (counted, _), matched in stacked.items() if counted == "sequence"])


def _held(matched: Matched) -> Matched:
    """Those that can be one collective: with each clock set by the median of the ends, all ranks share an instant. To tell
    that, any ends do where no collective is one that ranks finish together."""
    ahead = matched.ahead if matched.ended_together.any() else _median(matched.end - matched.end[0])
    return matched.of(matched.earlier(ahead).together)


def _by_time(ranks: dict[int, Seen]) -> list[Matched]:
    """Collectives of one kind that end at one moment on all ranks of their group, by clocks that agree."""
    found = []
    for kind in sorted({key.kind for rank in ranks.values() for key in rank.starts}):
        of_kind = {number: [np.concatenate([table[key] for key in keys]) for table in (rank.starts, rank.ends)]
                   for number, rank in ranks.items() if (keys := [key for key in rank.starts if key.kind == kind])}
        parties = _parties(ranks, kind.group, list(of_kind))
        if len(parties) < 2 or not set(parties) <= of_kind.keys():
            continue
        first, *others = parties
        start, end = of_kind[first]
        rows = [np.arange(len(end))] + [_nearest(of_kind[number][1], end) for number in others]
        matched = Matched(tuple(parties), np.stack([of_kind[number][0][own] for number, own in zip(parties, rows)]),
                          np.stack([of_kind[number][1][own] for number, own in zip(parties, rows)]),
                          np.full(len(end), bool(FINISHED_TOGETHER.search(kind.name))))
        shortest = (matched.end - matched.start).min(axis=0)
        spread = matched.end.max(axis=0) - matched.end.min(axis=0)
        mutual = np.ones(len(end), bool)
        for number, own in zip(others, rows[1:]):
            mutual &= _nearest(end, of_kind[number][1])[own] == rows[0]
        close = spread <= np.maximum(END_TOLERANCE * shortest, END_TOLERANCE_NS)
        found.append(matched.of(mutual & close & matched.together))
    return found


def _nearest(times: Column, wanted: Column) -> Column:
    """For each wanted time the row of the nearest of `times`."""
    order = np.argsort(times)
    place = np.searchsorted(times[order], wanted)
    before, after = order[np.maximum(place - 1, 0)], order[np.minimum(place, len(times) - 1)]
    return np.where(np.abs(times[before] - wanted) <= np.abs(times[after] - wanted), before, after)


def _sum(matched: list[Matched], clocks_agree: bool) -> list[Straggler]:
    sums: dict[int, list[int]] = defaultdict(lambda: [0, 0, 0, 0])
    for each in matched:
        duration = each.end - each.start
        latency = duration.min(axis=0)
        late = (each.start - each.start.min(axis=0) if clocks_agree else
                (duration.max(axis=0) - duration) * each.ended_together)
        for row, rank in enumerate(each.ranks):
            for place, value in enumerate((duration[row] - latency, latency, late[row])):
                sums[rank][place] += int(value.sum())
            sums[rank][3] += duration.shape[1]
    found = [Straggler(rank=rank, wait_ns=wait, transfer_ns=transfer, late_ns=late, collectives=count,
                       late_from="starts" if clocks_agree else "durations")
             for rank, (wait, transfer, late, count) in sums.items()]
    return sorted(found, key=lambda straggler: (-straggler.late_ns, straggler.rank))
