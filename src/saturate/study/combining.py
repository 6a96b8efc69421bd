"""Several techniques in one race: pairs that were promised a gain, and groups where the time does not do for each.

A set that fails, or does not verify, blames none of its members.
"""

from __future__ import annotations

import time

from saturate.study.candidates import Candidate, Set, conflict, key, names, ordered
from saturate.study.fates import in_words
from saturate.study.guidance import promised_gain
from saturate.study.racing import ADD, SCREEN
from saturate.study.standing import Standing
from saturate.techniques._api import bound_of

#: Alone slower than this, a technique is not tried in combination.
HOPELESS = -0.10

#: A technique that gains this much beyond doubt joins at once.
LARGE = 0.10

#: What is raced at once where time is short: a set that fails says nothing of its members, so those that change numbers are left out.
SAFE = ("exact", "reordering")

#: A technique that a finding lets give this much, and that gave no large gain, is tried in pairs; with so many others, the
#: fastest first.
PROMISING, MOST_PARTNERS = 0.40, 2


def pair_up(search: Standing) -> None:
    """Try what disappointed together with what changes where it runs, in pairs; the first large gain joins."""
    for promised in disappointing(search):
        for partner in _partners(search, promised):
            if time.monotonic() > search.deadline or try_pair(search, promised, partner):
                return


def disappointing(search: Standing) -> list[Candidate]:
    """What gave far less than the findings that name it promise, the most promising first."""
    found = []
    for identity, result in search.screened.items():
        candidate = search.fates[identity].candidate
        if candidate is None or candidate.id in search.verified or result.gain <= HOPELESS:
            continue
        promised = promised_gain(identity, bound_of(candidate.module, search.facts), search.findings)
        if promised >= PROMISING and result.gain < LARGE:
            found.append((promised, candidate))
    return [candidate for _, candidate in sorted(found, key=lambda entry: -entry[0])]


def _partners(search: Standing, promised: Candidate) -> list[Candidate]:
    found = []
    for identity, result in search.screened.items():
        other = search.fates[identity].candidate
        if other is None or other.module.TECHNIQUE.stage != "environment" or conflict((*search.kept, promised), other):
            continue
        if identity not in search.verified and result.gain > HOPELESS:
            found.append((result.gain, other))
    return [other for _, other in sorted(found, key=lambda entry: -entry[0])[:MOST_PARTNERS]]


def try_pair(search: Standing, promised: Candidate, partner: Candidate) -> bool:
    """Keep both if they gain much together, and `promised` much of that on top of `partner`."""
    if conflict(search.kept, promised):
        return False
    before, together = ordered((*search.kept, partner)), ordered((*search.kept, partner, promised))
    pair, known = f"{promised.id} and {partner.label()}", search.fates[promised.id]
    both = search.race(f"screen {pair} with {search.kept_names()}", search.kept, together, SCREEN, (promised,), share_base=True)
    if both is not None and both.gain < LARGE:
        return False
    alone = both and search.race(f"add {promised.label()} to {partner.id}", before, together, ADD, (promised,))
    if alone is None:       # a process ended: that says nothing of what it gives without the other
        search.fates[promised.id] = known.with_word(f"with {partner.id}: {search.fates[promised.id].reason}")
        return False
    if alone.decision.verdict != "faster" or alone.gain < LARGE:
        return False
    if not search.keep((promised,), together, alone, f"{alone.gain:+.1%} with {partner.id}"):
        return False
    search.stairs.insert(-1, ((partner,), search.screened[partner.id]))
    search.settle(partner, "kept", f"{promised.id} gives {alone.gain:+.1%} on top of it")
    return True


def race_rest(search: Standing, left: list[Candidate]) -> None:
    """Race at once what is undecided and, of what had no turn, what is likely to gain; keep all of it or nothing. Gains of a few per cent,
    each too small to be told from the difference between two processes, are seen when they come together."""
    undecided = [fate.candidate for fate in search.fates.values()
                 if fate.candidate is not None and fate.is_open(search.racer.threshold) and (fate.gain or 0.0) > 0]
    group: Set = ()
    for candidate in (*undecided, *filter(search.is_likely, left)):
        if candidate.numerics in SAFE and candidate.id not in search.verified and conflict((*search.kept, *group), candidate) is None:
            group = (*group, candidate)
    if len(group) >= 2:
        _race_group(search, group)
    elif group and search.against.get(group[0].id, search.kept) != search.kept:       # else its own turn says as much
        search.try_to_add(group[0])


def add_at_once(search: Standing, candidates: list[Candidate]) -> None:
    """Add what was faster beyond doubt, the best of `candidates` first, and with it what was faster but perhaps by less than counts, in
    one race and one verification, where the time does not do for a turn and a verification of each. What fails blames nobody: then the
    best has its own."""
    group: Set = ()
    for candidate in candidates:
        joins = search.certain(candidate) or (group and candidate.numerics in SAFE and search.leaning(candidate))
        if joins and candidate.id not in search.verified and conflict((*search.kept, *group), candidate) is None:
            group = (*group, candidate)
    now = time.monotonic()
    short = search.deadline - now < (2 * len(group) - 1) * search.turn_s and now <= search.last()
    if len(group) >= 2 and search.as_before(f"short of time for {names(group)} | {key(search.kept)}", short):
        _race_group(search, group, above=search.screened[group[0].id].gain)


def _race_group(search: Standing, group: Set, above: float = 0.0) -> None:
    """Keep all of it, or nothing. `above`: what it must gain, besides being faster."""
    together = ordered((*search.kept, *group))
    result = search.race(f"add {names(group)} to {search.kept_names()}", search.kept, together, SCREEN, group, share_base=True, until=search.until())
    if result is None:
        return
    fate, reason = in_words(result)
    reason = f"{reason} for {names(group)} together"
    if fate != "kept" or result.gain <= above:
        search.of_group(group, reason)
    else:
        search.keep(group, together, result, reason)
