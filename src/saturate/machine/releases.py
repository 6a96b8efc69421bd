"""How old the installed versions are, by the dated table in releases.toml. No network.

Everything is said as of the date of that table: what is newer than the table is called so, not "up to date".
"""

from __future__ import annotations

import datetime
import functools
import re
import tomllib
from dataclasses import dataclass
from pathlib import Path

_TABLE = Path(__file__).with_name("releases.toml")


@dataclass(frozen=True)
class TorchRelease:
    """A minor release of PyTorch; `cudnn` and so on are what the last of its CUDA builds brings. Empty: not known here."""

    version: str                    # "2.13"
    released: datetime.date
    cuda: tuple[str, ...] = ()
    cudnn: str = ""
    nccl: str = ""
    triton: str = ""


@dataclass(frozen=True)
class DriverBranch:
    branch: int
    kind: str
    until: datetime.date            # maintained so long


@dataclass(frozen=True)
class Table:
    """The releases known here, the newest PyTorch first."""

    as_of: datetime.date
    torch: tuple[TorchRelease, ...]
    driver: tuple[DriverBranch, ...]
    oldest_driver: dict[int, int]   # CUDA major version -> driver branch


@dataclass(frozen=True)
class Age:
    """How far a PyTorch is behind the newest one in the table."""

    release: TorchRelease | None    # its own row; None: not in the table
    newest: TorchRelease
    behind: int | None              # minor releases; 0: it is the newest, or newer; None: older than the whole table
    months: int | None              # between the two releases

    def words(self) -> str:
        if self.behind == 0:
            return "the newest release" if self.release else f"newer than {self.newest.version}"
        if self.behind is None:
            return f"older than every release listed here; the newest is {self.newest.version}"
        return f"{self.behind} release{_s(self.behind)} ({self.months} month{_s(self.months)}) behind {self.newest.version}"


@functools.cache
def table(path: Path = _TABLE) -> Table:
    """The table. Raises OSError, ValueError or TypeError where the package is damaged."""
    with open(path, "rb") as file:
        rows = tomllib.load(file)
    return Table(
        as_of=rows["as_of"],
        torch=tuple(TorchRelease(**{**row, "cuda": tuple(row.get("cuda", ()))}) for row in rows["torch"]),
        driver=tuple(DriverBranch(**row) for row in rows["driver"]),
        oldest_driver={int(major): branch for major, branch in rows["oldest_driver"].items()},
    )


def age_of_torch(version: str, known: Table) -> Age | None:
    """How far "2.11.0+cu130" is behind; None when the version cannot be read."""
    minor = _minor(version)
    if minor is None:
        return None
    newest = known.torch[0]
    row = next((row for row in known.torch if _minor(row.version) == minor), None)
    newer = [other for other in known.torch if (_minor(other.version) or minor) > minor]
    if row is None and len(newer) == len(known.torch):
        return Age(None, newest, None, None)
    months = None if row is None else _months(row.released, newest.released)
    return Age(row, newest, len(newer), months)


def driver_branch(version: str) -> int | None:
    """The branch of a driver: 580 of "580.65.06"."""
    match = re.match(r"\d{3,}(?=\.|$)", version)
    return int(match[0]) if match else None


def driver_support(branch: int, known: Table, today: datetime.date) -> tuple[bool | None, str]:
    """Whether a driver branch is still maintained, and that in words; None: newer than the table."""
    row = next((row for row in known.driver if row.branch == branch), None)
    if row is not None:
        word = "until" if today <= row.until else "ended"
        return today <= row.until, f"{row.kind} branch, maintenance {word} {row.until:%Y-%m}"
    if branch > max(row.branch for row in known.driver):
        return None, f"newer than the list of {known.as_of}"
    return False, "branch is no longer maintained"


def recommended_driver(known: Table, today: datetime.date) -> DriverBranch:
    """The branch that is maintained longest."""
    return max(known.driver, key=lambda row: (row.until >= today, row.until))


def newest_torch_for(cuda_major: int, known: Table) -> tuple[str, str] | None:
    """The newest (torch, CUDA build) of a CUDA major version, for drivers that run no later one."""
    for row in known.torch:
        builds = [build for build in row.cuda if int(build.split(".")[0]) == cuda_major]
        if builds:
            return row.version, builds[-1]
    return None


def _s(count: int | None) -> str:
    return "" if count == 1 else "s"


def _minor(version: str) -> tuple[int, int] | None:
    match = re.match(r"(\d+)\.(\d+)", version)
    return (int(match[1]), int(match[2])) if match else None


def _months(earlier: datetime.date, later: datetime.date) -> int:
    return (later.year - earlier.year) * 12 + later.month - earlier.month
