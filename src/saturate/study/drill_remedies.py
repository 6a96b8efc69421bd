"""What to do about the verdict of a resume drill."""

from __future__ import annotations

import shlex

from saturate.verify import resume

REMEDIES = {
    "resumes_exactly": "",
    "resumes_reordered": "save and restore the random states (torch, numpy, random) or seed the sampler by epoch: set_epoch(epoch); "
                         "sort what comes from a set of strings (another order in each process, unless PYTHONHASHSEED is set)",
    "inconclusive": "see the reasons; a longer run may tell: --steps N, --budget TIME",
    "no_checkpoint": "save earlier or more often, or drill longer: --steps N, --budget TIME",
    "ends_early": "count what is left to do from the checkpoint's own step, not from that of the process",
    "state_not_restored": "save and load optimizer, scheduler, scaler and random states beside the model",
    "skips_data": "save the loader's position with the update that it belongs to: StatefulDataLoader (torchdata)",
    "repeats_data": "save and restore the loader's state: StatefulDataLoader (torchdata), or a sampler seeded by epoch that "
                    "skips what was used",
    "starts_over": "make the script load its newest checkpoint when it starts, or name its argument: --resume-args=...",
    "cannot_load": "make the script load what it saved: the traceback is in the record",
}

#: Where no DataLoader gave the data, whose state could be saved: the script counts by itself.
WITHOUT_LOADER = {
    "skips_data": "save the number of the step that is to be made next, and the random states that data are drawn from, and go on from there",
    "repeats_data": "save the number of the next step (after step i: i + 1), and the random states that data are drawn from, and go on "
                    "from there",
}

#: Where the data of a process that is started again are none that the uninterrupted run had.
DRAWN_ANEW = ("save and restore the random states (torch, numpy, random), and sort what comes from a set of strings: it has another "
              "order in each process, unless PYTHONHASHSEED is set")

#: Where only a kill in the middle of a save is fatal.
UNFINISHED = "write each checkpoint to a temporary file and rename it when it is on disk; keep the one before"


def remedy_of(verdict: str, reason: str, unfinished: bool, loads: bool, resume_args: list[str]) -> str:
    """unfinished: the worst kill fell into a save. loads: a DataLoader gave the data."""
    if unfinished and verdict in ("cannot_load", "starts_over"):
        return UNFINISHED
    if reason.startswith(resume.OTHER_DATA):
        return DRAWN_ANEW
    if verdict == "starts_over" and resume_args:
        return f"make the script load its newest checkpoint when it is given {shlex.join(resume_args)}"
    return REMEDIES[verdict] if loads else WITHOUT_LOADER.get(verdict, REMEDIES[verdict])
