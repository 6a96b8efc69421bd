"""CUDA graphs that the script captures itself.

Meanwhile nothing runs that is queued, and whatever waits for the device, or reads from it, ends the capture with an error in the
script's own code. So of a backward pass or an optimizer's step that is captured nothing is looked at. Where it is the whole update,
as torch's documentation shows it, the training goes on in replays, which call no Python: no step of it is seen any more. Where it is
the optimizer's step alone, backward passes are still seen, and end the steps unless optimizers have done so before.
"""

from __future__ import annotations

from typing import Any


def ends_what_is_seen(session: Any) -> bool:
    """Whether no step is seen any more once the optimizer's step that ends now was captured: the backward pass is in a graph as well,
    or a step is what an optimizer ends, as it did until now."""
    ended_by_optimizers = session.step.token != "B" if session.step is not None else bool(session.optimizers.by_name)
    return bool(session.backward_captured or ended_by_optimizers)


def captured_update(session: Any) -> None:
    """The update of the parameters is in a graph: report that no step will be seen, and leave this process alone."""
    from saturate.agent import application

    if session.phase == "inspect":
        session.inspection.finish()         # what it watches by is in the way of each step
    application.report_no_step(session, replayed=True)
    session.dead = True
