"""A rank arrives late at the collectives, and all others wait for it.

What it means
-------------
Ranks that train together are as fast as the slowest of them. The time that the others spend inside a collective is
not transfer: they wait.

Evidence
--------
Over the collectives that all observed ranks took part in: how much later than the first the slowest rank arrives,
per step; how long that rank itself waits for later ones; the share of communication that is waiting for later ranks.

Threshold
---------
The slowest rank is late by 10 % of the step, and at least two ranks were observed.

Not to be confused with
-----------------------
Slow communication: a transfer takes as long on every rank. One rank alone shows only long collectives, and says
nothing about who is late. Where ranks of the run are missing, all that were observed may wait for one of those,
which is said, and lowers the confidence. Lateness that moves from rank to rank (collector pauses, input) has its
cause in every rank: where the slowest one itself waits for others at least half as long as it is late, that is said
instead, with less confidence.

What helps
----------
Finding what the late rank does more: its input, its share of the data, a slower or throttled device, a process
beside it. `saturate analyze` of that rank's trace, or `saturate doctor` on its machine. A rank that waits for 50 %
of its communication gains at most what of it is exposed; that is then the bound. Where ranks are late in turns, all of their
lateness can vanish, which is the slowest one's and what that waits for the others.

References
----------
Lin et al., "Understanding Stragglers in Large Model Training Using What-if Analysis", 2025 (arXiv 2505.05713).
TraceML warns from a lateness of 10 % of the step; gpuprof from a skew of 10 %.
"""

from __future__ import annotations

from saturate.findings._api import Rule
from saturate.findings._common import (
    at_most,
    concludes,
    finding,
    number,
    of_step,
    per_step,
    percent,
    reaches,
    recorded_ms,
)
from saturate.records.analysis import Finding
from saturate.records.observations import CommunicationSeen, Observations

RULE = Rule(id="stragglers", title="late ranks", needs=frozenset({"steps", "communication"}))

#: Lateness of the slowest rank, of the step.
LEAST = 0.10
#: Waiting, of communication, from which the observed rank is one of those that wait.
WAITS = 0.5
#: Waiting of the slowest rank for others, of its lateness, from which ranks are late in turns.
IN_TURNS = 0.5


def answers(seen: Observations) -> bool:
    return seen.communication.late_ms_per_step is not None


def detect(seen: Observations) -> Finding | None:
    peers = seen.communication
    share = per_step(peers.late_ms_per_step, recorded_ms(seen))
    if not concludes(seen, RULE) or share is None or peers.slowest_rank is None or not reaches(share, LEAST):
        return None
    if peers.peer_wait is None or peers.world_size == 1:
        return None  # one rank was observed: nothing to be late against
    waits = per_step(peers.late_rank_waits_ms_per_step, recorded_ms(seen))
    if waits is not None and waits >= IN_TURNS * share:
        return _in_turns(seen, share, waits)
    lost = share
    if peers.peer_wait >= WAITS and reaches(peers.exposed, LEAST):
        lost = min(share, peers.exposed or 0.0)  # lateness of several collectives may be the same lateness
    return finding(
        RULE,
        seen,
        f"Rank {peers.slowest_rank} arrives {percent(share)} of the step late, {_for_whom(peers)}.",
        [
            of_step("lateness of the slowest rank", share, LEAST),
            *number("waiting for later ranks", peers.peer_wait, "of communication"),
            *number("slowest rank", peers.slowest_rank, "rank"),
            *number("ranks", peers.world_size, "processes"),
        ],
        lost,
        direct=not peers.partly,
        advice=f"look at what rank {peers.slowest_rank} does more: input, device, other processes",
    )


def _in_turns(seen: Observations, late: float, waits: float) -> Finding:
    rank = seen.communication.slowest_rank
    return finding(
        RULE,
        seen,
        f"Ranks are late in turns: even the slowest, rank {rank}, which arrives {percent(late)} of the step late, waits for "
        f"others during {percent(waits)}.",
        [
            of_step("lateness of the slowest rank", late, LEAST),
            of_step("waiting of that rank for others", waits, IN_TURNS * late),
            *number("waiting for later ranks", seen.communication.peer_wait, "of communication"),
            *number("ranks", seen.communication.world_size, "processes"),
        ],
        at_most(late, waits),
        direct=False,
        advice="look for what strikes every rank at other times: collector pauses, input, batches of unequal size",
    )


def _for_whom(peers: CommunicationSeen) -> str:
    if peers.partly:
        return f"as the last of {peers.compared:,} ranks that were compared; the run has {peers.world_size:,}"
    return "and the others wait for it"
