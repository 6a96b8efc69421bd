"""What `saturate checkpoint verify|export|gc|advise --json` print. Bytes are integers, times seconds, shares 0 to
1.
"""

from __future__ import annotations

from typing import Literal

import msgspec

SCHEMA = 1


class Check(msgspec.Struct, frozen=True, kw_only=True):
    """One file, pack or checkpoint that was looked at."""

    path: str
    kind: Literal["checkpoint", "pointer", "torch", "safetensors", "pack", "leftover", "other"]
    outcome: Literal["whole", "damaged", "unknown"]     # unknown: the format holds nothing to check against
    size_bytes: int | None
    problem: str = ""


class Verified(msgspec.Struct, frozen=True, kw_only=True):
    """`verify --json`."""

    schema: int = SCHEMA
    whole: int
    damaged: int
    unknown: int
    checks: list[Check]


class Exported(msgspec.Struct, frozen=True, kw_only=True):
    """`export --json`. `checkpoint` is null where the file was plain already."""

    schema: int = SCHEMA
    path: str
    checkpoint: str | None
    size_bytes: int


class Kept(msgspec.Struct, frozen=True, kw_only=True):
    checkpoint: str
    path: str
    reason: str


class Removed(msgspec.Struct, frozen=True, kw_only=True):
    checkpoint: str
    path: str


class Collected(msgspec.Struct, frozen=True, kw_only=True):
    """`gc --json`. With `deleted` false nothing was changed."""

    schema: int = SCHEMA
    store: str
    deleted: bool
    kept: list[Kept]
    removed: list[Removed]
    damaged: dict[str, str]         # manifests that cannot be read -> why; while there are any, no chunk is freed
    store_bytes: int
    freed_bytes: int


class IntervalLoss(msgspec.Struct, frozen=True, kw_only=True):
    """What saving every so often loses."""

    interval_s: float
    interval_steps: int | None
    lost_share: float               # of wall-clock time: saves, lost work and restarts


class Interval(msgspec.Struct, frozen=True, kw_only=True):
    """The interval that loses least, under a Poisson process of failures."""

    interval_s: float               # training time between saves: Daly 2006
    interval_steps: int | None      # None: no step time was given
    young_interval_s: float         # the first-order formula, Young 1974
    save_cost_s: float
    save_cost_from: str             # where it was measured, or "given"
    restart_cost_s: float | None    # None: not given, and so not in lost_share
    mtbf_s: float                   # of one node
    nodes: int
    job_mtbf_s: float               # mtbf_s / nodes
    step_time_s: float | None
    lost_share: float
    around: list[IntervalLoss]      # half of it, and twice


class Forecast(msgspec.Struct, frozen=True, kw_only=True):
    """What incremental saving would write, as shares of the whole file. See `saturate.checkpoints.forecast`."""

    old: str
    new: str
    file_bytes: int
    whole_tensor_share: float
    block_share: float
    delta_share: float
    compressed_share: float
    sampled_share: float
    coding_s: float
    helps: bool
    reason: str


class SaveWay(msgspec.Struct, frozen=True, kw_only=True):
    """One way of `async-checkpoint` to write a checkpoint. All of them wait for the disk (fsync) before a file takes its place."""

    way: Literal["sync", "thread", "process"]
    lost_s: float | None            # of training, by one checkpoint: blocked time and slowdown of steps; None: not measured
    measured: int                   # checkpoints that it was measured in


class SaveCosts(msgspec.Struct, frozen=True, kw_only=True):
    """What a checkpoint costs a training, and how soon it trains again after a kill. Of several ranks, rank 0's own part."""

    command: list[str]
    checkpoint_bytes: int | None    # of one checkpoint; None: not known how many files belong to one
    checkpoint_files: float | None
    before_s: float | None          # training time that the script's own torch.save takes, which does not wait for the disk
    after_s: float | None           # that the cheapest way of async-checkpoint takes
    best_way: Literal["sync", "thread", "process"] | None
    ways: list[SaveWay]
    step_s: float                   # median, as the script is
    recovery_s: float | None        # from a kill to the end of the first update of the process started after it
    resume_command: list[str]
    resumed: bool | None            # whether that process read what the killed one had saved; None: not known
    unknown: dict[str, str] = {}    # field that is null -> why
    run: str                        # short id of its folder


class Advice(msgspec.Struct, frozen=True, kw_only=True):
    """`advise --json`: each part may have been asked for."""

    schema: int = SCHEMA
    interval: Interval | None = None
    interval_async: Interval | None = None      # with the cheapest way of async-checkpoint; None: nothing was measured, or it does not help
    costs: SaveCosts | None = None
    forecast: Forecast | None = None
