"""What a recipe was made for, and what has changed since.

Where the command line shows no script file (`commands.script_of`), the script is not compared.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Sequence
from pathlib import Path

import saturate
from saturate.machine.commands import script_of
from saturate.records.facts import Facts
from saturate.records.recipe import MadeFor, clip

_READ_LIMIT_BYTES = 1 << 26

#: What a change of each field puts in doubt. Names of techniques: only those; None: all of them. A technique that this
#: table does not know (a third party's) counts as affected.
_AFFECTS: dict[str, tuple[str, frozenset[str] | None]] = {
    "device": ("every gain was measured there", None),
    "device_name": ("every gain was measured there", None),
    "cpu": ("gains of host-side work may differ", frozenset({"tf32", "cudnn-benchmark", "sdpa-backend", "zero-grad-none"})),
    "torch": ("what torch does by itself may differ", frozenset({"gc-freeze", "cpu-threads"})),
    "python": ("interpreter overhead may differ", frozenset({
        "bf16-autocast", "fp16-autocast", "tf32", "channels-last", "cudnn-benchmark", "sdpa-backend", "allocator", "ddp-options",
    })),
    "saturate": ("the techniques themselves may have changed", None),
    "script": ("the training is another one: nothing was measured or verified for it", None),
}

#: Why a field that the recipe names is not known here. torch and Python are known where torch is imported, and compared there.
_UNKNOWN = {
    "device": "what the command trains on shows only once it runs",
    "device_name": "what the command trains on shows only once it runs",
    "cpu": "this machine does not tell the name of its processor",
    "script": "the command line shows no file that holds the training",
}


def of(facts: Facts, script: str) -> MadeFor:
    """The fingerprint of a command on the machine that `facts` were observed on; `script`: what `digest_of` said of it."""
    return MadeFor(
        device=facts.device,
        device_name=facts.device_name,
        cpu=facts.machine.cpu_name,
        torch=facts.torch,
        python=facts.python,
        saturate=saturate.__version__,
        script=script,
    )


def digest_of(command: Sequence[str], cwd: str | os.PathLike[str]) -> str:
    """SHA-256 of the file that holds the training, hexadecimal; empty when none is known."""
    script = script_of(command, cwd)
    return digest(script) if script is not None else ""


def digest(path: Path) -> str:
    """SHA-256 of a file, hexadecimal; empty when it cannot be read or is no file of a script's size."""
    try:
        if not path.is_file() or path.stat().st_size > _READ_LIMIT_BYTES:
            return ""
        return hashlib.sha256(path.read_bytes()).hexdigest()
    except OSError:
        return ""


def compare(made_for: MadeFor, now: MadeFor, techniques: Sequence[str] = ()) -> list[str]:
    """What has changed since the recipe was made, one sentence each, with the entries (`techniques`: their ids, in the
    recipe) that it puts in doubt. Fields that one side does not know are not compared, see `uncompared`."""
    sentences = []
    for field, (old, consequence) in doubts(made_for, techniques).items():
        new = known_as(field, getattr(now, field))
        if new and old != new:
            sentences.append(f"{_name(field)} changed from {_short(field, old)} to {_short(field, new)}: {consequence}")
    return sentences


def uncompared(made_for: MadeFor, now: MadeFor, techniques: Sequence[str] = ()) -> list[str]:
    """What the recipe was made for and `now` does not know, though it should show before the command runs, one sentence each. The
    name of a device says nothing where the device is another one."""
    elsewhere = bool(now.device) and now.device != made_for.device
    return [f"{_name(field)} could not be compared with {_short(field, old)}: {_UNKNOWN[field]}"
            for field, (old, _) in doubts(made_for, techniques).items()
            if field in _UNKNOWN and not getattr(now, field) and not (field == "device_name" and elsewhere)]


def _name(field: str) -> str:
    return field.replace("_", " ")


def _short(field: str, value: str) -> str:
    return value[:12] if field == "script" else value


def doubts(made_for: MadeFor, techniques: Sequence[str] = ()) -> dict[str, tuple[str, str]]:
    """By field of the fingerprint: its value, and what a change of it puts in doubt. Fields that are not known, and those that
    no entry of the recipe depends on, are left out."""
    found = {}
    for field, (why, untouched) in _AFFECTS.items():
        old = known_as(field, getattr(made_for, field))
        affected = [name for name in techniques if untouched is None or name not in untouched]
        if old and (affected or not techniques):
            whom = "all entries" if len(affected) == len(techniques) else ", ".join(affected)
            found[field] = old, f"{why} (affects {whom})"
    return found


def known_as(field: str, value: str) -> str:
    """The part of a field's value that is compared, as it may be shown: of Python's version the first two numbers. A recipe may come
    from anywhere, and must not drive the terminal."""
    return clip(".".join(value.split(".")[:2]) if field == "python" else value)
