"""What a resume drill found: the object behind `saturate drill --json`, and its terminal summary."""

from __future__ import annotations

from typing import Literal

import msgspec

SCHEMA = 1

#: From best to worst; the verdict is the worst outcome of all drills.
Outcome = Literal[
    "resumes_exactly",      # the same batches and losses as without the kill
    "resumes_reordered",    # every sample of the epoch once, but in another order than without the kill
    "inconclusive",         # `reason` says why
    "no_checkpoint",        # nothing was written before the kill
    "ends_early",           # it ends by itself before the uninterrupted run would
    "state_not_restored",   # the right place, but the parameters, the optimizer, the scheduler or random states are others
    "skips_data",           # data that were never used are left out
    "repeats_data",         # data of the epoch that were used before the checkpoint come again
    "starts_over",          # nothing is resumed
    "cannot_load",          # it fails when it is started again
]


class Drill(msgspec.Struct, frozen=True, kw_only=True):
    """One kill, and the process that was started after it. Updates are counted from the beginning of the training."""

    moment: Literal["update", "save"]           # while it trained, or while it wrote a checkpoint
    killed_at_update: int
    resumed_at_update: int | None               # the update that its parameters came with; None: unknown
    lost_updates: int | None                    # trained for nothing
    recovery_s: float | None                    # from the kill to the end of the first update after it; None: there was none
    outcome: Outcome
    reason: str
    compared_updates: int = 0
    interrupted_files: list[str] = []           # that were being written when it was killed, moment "save"
    log: str = ""                               # what the process that was started again printed
    traceback: str = ""                         # its last lines, for `cannot_load`


class Saved(msgspec.Struct, frozen=True, kw_only=True):
    """A checkpoint of the uninterrupted run."""

    update: int
    files: list[str]


class DrillResult(msgspec.Struct, frozen=True, kw_only=True):
    """The object that `saturate drill --json` prints."""

    schema: int = SCHEMA
    run: str                                    # short id
    command: list[str]
    resume_command: list[str]                   # what was started after each kill
    verdict: Outcome
    reason: str
    remedy: str = ""
    drills: list[Drill] = []
    reference_updates: int = 0                  # length of the uninterrupted run
    step_s: float | None = None                 # median time of an update in it, while it was watched
    saves_seen: list[Saved] = []                # in the uninterrupted run
    first_save_at_update: int | None = None     # None: none was seen
    repeatable: bool | None = None              # whether two uninterrupted runs have the same data; None: not compared
    isolation: str = ""
    notes: list[str] = []
    record: str = ""                            # path of this object on disk
    next_command: str = ""
