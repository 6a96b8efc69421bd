"""A verification run that ran out of memory beside another process is repeated alone: only what it needs by itself counts against
it. Of races, `study.racing` does the same."""

from __future__ import annotations

from typing import Any

from saturate.study.candidates import Set
from saturate.study.racing import ONCE_MORE, Racer
from saturate.trial.process import TrialEnded


def verify(verifier: Any, racer: Racer, techniques: Set) -> Any:
    """What `verifier.verify` says of a set, whatever else stands frozen beside its runs. Raises TrialEnded when it cannot run alone."""
    try:
        return verifier.verify(techniques)
    except TrialEnded as ended:
        if not racer.may_be_crowded(ended) or not (racer.has_base or verifier.at_once > 1):
            raise
        outcome = ended.outcome
    racer.bench.say(ONCE_MORE)
    racer.drop_base()
    at_once, verifier.at_once = verifier.at_once, 1
    try:
        found = verifier.verify(techniques)
    except TrialEnded:
        verifier.at_once = at_once        # it needs too much by itself: others may still run beside each other
        raise
    racer.tell_crowded(outcome)
    return found
