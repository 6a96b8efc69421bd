"""No rule found lost time, and the device is busy: this is about as fast as it gets.

What it means
-------------
The device works almost all of the time, and what its operators need is near what it can give. It is a result, not a
failure: what remains is the ceiling.

Evidence
--------
Time in which the device computes (on a CPU: time in operators), of the step: not what copies and communication take
alone. Where the roofline covers 60 % of that, the time of its operators above the roof, and all time of the others.

Threshold
---------
Computing for at least 85 % of the step, copies alone and communication alone less than 10 % each, and less than 25 %
of the step above the operators' roofs. It is printed only when no other rule found anything. Where the roof of 10 % of
the step is not known, the confidence is lower.

Not to be confused with
-----------------------
A device that is busy with slow kernels: then their time above the roof is large. Nothing observed: an idle device,
or one whose idle time is not known, is not at its ceiling.

What helps
----------
A faster device, smaller number formats, or less work. The bound is what the time without computation and all time
above the roof could give together; where the roof of most of it is not known there is none, and the confidence is lower.

References
----------
Williams, Waterman and Patterson, "Roofline: An Insightful Visual Performance Model for Multicore Architectures",
2009. Definition of the compute- and memory-bound verdicts (85 % computation): docs/analysis.md.
"""

from __future__ import annotations

from saturate.findings._api import Rule
from saturate.findings._common import at_most, below, concludes, finding, of_step, percent, reaches, without
from saturate.records.analysis import Finding
from saturate.records.observations import Observations

RULE = Rule(id="nothing-to-gain", title="nothing to gain", needs=frozenset({"steps", "busy", "communication"}))

#: Computing, of the step.
COMPUTING = 0.85
#: Copies alone, or communication alone, of the step: from there on the time is lost to them.
EXPOSED = 0.10
#: Time above the roof, of the step.
RECOVERABLE = 0.25
#: Operators whose roof is known, of what computes: with less, nothing is said of it.
COVERAGE = 0.60
#: And without a known roof, of the step: with more, the conclusion is less certain.
UNKNOWN = 0.10


def detect(seen: Observations) -> Finding | None:
    computing = _computing(seen)
    if not concludes(seen, RULE) or computing is None or not reaches(computing, COMPUTING):
        return None
    if reaches(seen.copies.exposed, EXPOSED) or reaches(seen.communication.exposed, EXPOSED):
        return None
    known = [one for one in seen.operators if one.recoverable is not None]
    covered = sum(one.share for one in known)
    above, others = None, 0.0
    if known and covered >= COVERAGE * computing:
        above, others = at_most(*(one.recoverable for one in known)), max(0.0, computing - covered)     # of the others, all may be lost
    if above is not None and above >= RECOVERABLE:
        return None
    roof = f", and its operators are {percent(above)} of the step above their roof" if above is not None else ""
    evidence = [of_step("computing", computing, COMPUTING)]
    if above is not None:
        evidence.append(of_step("above the roof", above, RECOVERABLE))
    return finding(
        RULE,
        seen,
        f"No lost time was found: {seen.device_name or 'the device'} computes for {percent(computing)} of the step{roof}.",
        evidence,
        None if above is None else at_most(1.0 - computing, above, others),     # busy operators may be slow ones
        direct=above is not None and others < UNKNOWN,
        advice="a faster device, smaller number formats or less work would be needed",
    )


def _computing(seen: Observations) -> float | None:
    """Busy, but not with copies or communication alone; on a CPU without a busy share what is left of the step after
    input and the time outside operators. Unknown where the parts make no sense."""
    busy = seen.busy
    if busy is None and seen.device == "cpu" and seen.input_wait is not None and seen.overhead is not None:
        busy = without(1.0, seen.input_wait, seen.overhead)
    return without(busy, seen.copies.exposed, seen.communication.exposed) if below(busy, 1.0 + 1e-9) else None
