"""Communication between ranks that no computation hides.

What it means
-------------
While gradients or activations travel, the device computes nothing else. Communication under computation costs
nothing.

Evidence
--------
Time in which only communication runs, as a share of the step; the share of communication that computation hides;
how much of it waits for later ranks, where several ranks were observed.

Threshold
---------
10 % of the step, less what was spent waiting for later ranks, where that is known.

Not to be confused with
-----------------------
Waiting for a slow rank: a collective that starts early runs until the last rank arrives (`stragglers`). From one
rank alone, or where ranks of the run are missing, the two cannot be told apart, which is said, and lowers the
confidence. Waiting for input on another rank, which looks the same from here.

What helps
----------
Overlap with the backward pass, larger or differently cut buckets, no unused-parameter search, fewer synchronised
steps.

References
----------
PyTorch documentation, "torch.nn.parallel.DistributedDataParallel". TensorBoard's PyTorch profiler plugin warned
from 10 % of communication; HolisticTraceAnalysis and TraceLens define overlap and exposed communication.
"""

from __future__ import annotations

from saturate.findings._api import Rule
from saturate.findings._common import concludes, finding, number, of_step, percent, reaches
from saturate.records.analysis import Finding
from saturate.records.observations import CommunicationSeen, Observations

RULE = Rule(
    id="exposed-communication",
    title="communication that is not hidden",
    techniques=("ddp-options",),
    needs=frozenset({"steps", "busy", "communication"}),
)

#: Exposed communication, of the step.
LEAST = 0.10


def detect(seen: Observations) -> Finding | None:
    peers = seen.communication
    if not concludes(seen, RULE) or peers.exposed is None or peers.world_size == 1:
        return None
    share = _transfer(peers, peers.exposed)
    if not reaches(share, LEAST):
        return None
    hidden = f", and computation hides {percent(peers.overlap)} of it" if peers.overlap is not None else ""
    whole = peers.peer_wait is not None and not peers.partly
    observed = f"{peers.compared:,} of {peers.world_size:,} ranks were" if peers.partly else "one rank was"
    includes = "" if whole else f" (which includes waiting for peers: {observed} observed)"
    return finding(
        RULE,
        seen,
        f"Communication alone takes up to {percent(share)} of the step{includes}{hidden}.",
        [
            of_step("exposed communication", share, LEAST),
            *number("hidden by computation", peers.overlap, "of communication"),
            *number("waiting for later ranks", peers.peer_wait, "of communication"),
            *number("ranks", peers.world_size, "processes"),
        ],
        share,
        direct=whole,
    )


def _transfer(peers: CommunicationSeen, exposed: float) -> float:
    """The most of the exposed part that can be transfer and not waiting for a later rank."""
    if peers.peer_wait is None or not 0.0 <= peers.peer_wait <= 1.0:
        return exposed
    if peers.overlap is None or not 0.0 <= peers.overlap < 1.0:
        return exposed if peers.peer_wait < 1.0 else 0.0
    whole = exposed / (1.0 - peers.overlap)
    return min(exposed, whole * (1.0 - peers.peer_wait))
