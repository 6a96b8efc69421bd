"""Options that several verbs take: how they are written, and those of every verb that studies a training command."""

from __future__ import annotations

import argparse
import os
import re
import shlex
import shutil
from pathlib import Path

from saturate.errors import UsageError

#: Some thirty years; what waits for much longer overflows.
LONGEST_S = 1e9


def add_study_options(parser: argparse.ArgumentParser) -> None:
    """--step, --timeout, --dir and --json."""
    add_trial_options(parser)
    parser.add_argument("--json", action="store_true", help="print the result as one JSON object on standard output")


def add_trial_options(parser: argparse.ArgumentParser) -> None:
    """--step, --timeout and --dir."""
    parser.add_argument("--step", type=step, metavar="WHAT", help="what ends a step, if saturate finds the wrong one: backward:4, optimizer:1")
    parser.add_argument("--timeout", type=duration, default=300.0, metavar="TIME",
                        help="how long the command may be silent before it counts as hung (default: 5m)")
    parser.add_argument("--dir", type=Path, default=Path(".saturate"), metavar="PATH", help="the study folder (default: .saturate)")


def must_exist(command: list[str]) -> None:
    """Raises UsageError where the first word is no program, or the command is one of ours: the process that trains is told what one
    saturate wants of it, and the inner one would be that one."""
    if shutil.which(command[0]) is None:
        if os.sep in command[0] and os.path.isfile(command[0]):
            raise UsageError(f"{command[0]!r} is not executable", remedy=f"chmod +x {shlex.quote(command[0])}, or name the program that runs it")
        raise UsageError(f"there is no command {command[0]!r}", remedy=_instead_of(command))
    if _is_ours(command):
        raise UsageError("the command is saturate itself", cause="one saturate in another takes its place in the training, and nothing is seen of it",
                         remedy="give the command that trains; techniques of several recipes can stand in one file")


def _is_ours(command: list[str]) -> bool:
    """
    >>> _is_ours(["saturate", "run", "recipe.toml", "--", "python", "train.py"]), _is_ours(["python3", "-m", "saturate", "run"])
    (True, True)
    >>> _is_ours(["python", "-m", "train", "saturate"])
    False
    """
    words = [os.path.basename(word) for word in command[:4]]
    return words[0] == "saturate" or (words[0].startswith("python") and words[1:3] == ["-m", "saturate"])


def _instead_of(command: list[str]) -> str:
    """What was meant, where there is no such command: to a shell, a variable may stand in front of one.

    >>> _instead_of(["A=1", "python3", "train.py"]), _instead_of(["python3 train.py --lr 1"])
    ('put env in front: env A=1 python3 train.py', 'drop the quotes: python3 train.py --lr 1')
    """
    variable = re.match(r"[A-Za-z_]\w*=", command[0], re.ASCII)
    if variable and len(command) > 1:
        return f"put env in front: env {shlex.join(command)}"
    words = command[0].split()
    if len(words) > 1 and (variable or shutil.which(words[0])):
        meant = " ".join(["env"] * bool(variable) + words + [shlex.join(command[1:])]).rstrip()
        return f"drop the quotes{', and put env in front' if variable else ''}: {meant}"
    return "check its spelling, or give its path"


def duration(text: str) -> float:
    """Seconds in "90", "90s", "10m", "1.5h".

    >>> duration("1.5h")
    5400.0
    """
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*(s|m|h|min|)", text.strip())
    seconds = float(match[1]) * {"s": 1, "": 1, "m": 60, "min": 60, "h": 3600}[match[2]] if match else 0.0
    if not 0 < seconds < LONGEST_S:
        raise argparse.ArgumentTypeError(f"{text!r} is not a time such as 90s, 10m or 2h")
    return seconds


def percent(text: str) -> float:
    """A share in "2%" or "0.02"."""
    try:
        value = float(text.removesuffix("%")) / (100 if text.endswith("%") else 1)
    except ValueError:
        value = -1.0
    if not 0 < value < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a share such as 2% or 0.02")
    return value


def memory(text: str) -> int:
    """Bytes in "20GiB"."""
    from saturate.records import sizes

    try:
        return sizes.parse(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def words(text: str) -> list[str]:
    try:
        return shlex.split(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"{text!r} cannot be split into words: {error}") from error


def ids(text: str) -> frozenset[str]:
    found = frozenset(word.strip() for word in text.split(",") if word.strip())
    if not found:       # "$IDS" that is empty would search nothing, or skip nothing, unasked
        raise argparse.ArgumentTypeError(f"{text!r} names no technique; saturate techniques lists them")
    return found


def step(text: str) -> str:
    if not re.fullmatch(r"backward:0*[1-9]\d{0,5}|optimizer:\d{1,6}", text, re.ASCII):
        raise argparse.ArgumentTypeError(f"{text!r} is neither backward:N (N backward passes a step) nor optimizer:N (the N-th, from 0)")
    return text
