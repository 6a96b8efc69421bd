"""What a recipe was made for, and what has changed since.

The script, and its own arguments, are found from the command line alone, without running anything. It is a best guess: None
when there is no script file to speak of (`python -c`, a compiled program), and then the script is not compared.
"""

from __future__ import annotations

import hashlib
import os
import re
import shutil
from collections.abc import Sequence
from pathlib import Path

import saturate
from saturate.records.facts import Facts
from saturate.records.recipe import MadeFor, clip

_PYTHON = re.compile(r"(python|pypy)(\d+(\.\d+)*)?t?(\.exe)?")
SHELLS = {"sh", "bash", "dash", "zsh", "ksh"}
LAUNCHERS = {"torchrun", "accelerate", "deepspeed", "lightning", "composer", "colossalai", "mpirun", "mpiexec", "srun"}
_LAUNCHER_MODULES = {"torch.distributed.run", "torch.distributed.launch", "accelerate.commands.launch", "deepspeed.launcher.runner"}
_WRAPPERS = {
    "uv", "poetry", "pdm", "hatch", "pixi", "conda", "mamba", "micromamba", "env", "nice", "ionice", "taskset", "numactl",
    "time", "timeout", "nohup", "stdbuf", "setsid", "xvfb-run", "sudo", "chrt",
}
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


def script_of(argv: Sequence[str], cwd: str | os.PathLike[str] = ".") -> Path | None:
    """The file that holds the training, as an existing path, or None.

    Knows `python script.py`, `python -m package`, torchrun, `accelerate launch`, shell scripts, `uv run` and other
    wrappers in front of these, and console scripts that are text.
    """
    return _parted(argv, Path(cwd))[0]


def arguments_of(argv: Sequence[str], cwd: str | os.PathLike[str] = ".") -> list[str]:
    """The words behind the script, the module or the program that holds the training: what a launcher or a wrapper in front of
    it takes is not among them. Where none of these is known, all behind the first word."""
    return _parted(argv, Path(cwd))[1]


#: The file that holds the training, or None, and the words behind it.
_Parted = tuple[Path | None, list[str]]


def _parted(argv: Sequence[str], folder: Path) -> _Parted:
    if not argv:
        return None, []
    name = os.path.basename(argv[0])
    rest = list(argv[1:])
    if _PYTHON.fullmatch(name):
        return _of_python(rest, folder)
    if name in LAUNCHERS:
        return _of_launcher(rest, folder)
    if name in SHELLS:
        return _of_shell(rest, folder)
    if name in _WRAPPERS:
        return _of_wrapper(rest, folder)
    return _of_program(argv[0], folder), rest


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


def _of_python(arguments: list[str], folder: Path) -> _Parted:
    """The script of `python ARGUMENTS`: the options of the interpreter itself are few and fixed (`python --help`)."""
    while arguments:
        word = arguments.pop(0)
        if word == "--check-hash-based-pycs":
            del arguments[:1]
        elif word == "--":          # what follows is no option, whatever it begins with
            return (_file(arguments[0], folder) if arguments else None), arguments[1:]
        elif word == "-":
            return None, arguments
        elif not word.startswith("-"):
            return _file(word, folder), arguments
        elif not word.startswith("--"):
            # Options may be joined (-um package); c, m, W and X take the rest of the word, or the next one.
            letters = re.match(r"-([^cmWX]*)([cmWX])(.*)", word)
            if letters is None:
                continue
            value = letters[3] or (arguments.pop(0) if arguments else "")
            if letters[2] == "c":
                return None, arguments
            if letters[2] == "m":
                return _of_launcher(arguments, folder) if value in _LAUNCHER_MODULES else (_of_module(value, folder), arguments)
    return None, []


def _of_shell(arguments: list[str], folder: Path) -> _Parted:
    is_command, operands = shell_operands(arguments)
    found = _file(operands[0], folder) if operands and not is_command else None
    return found, operands[1:] if found else arguments


def shell_operands(arguments: Sequence[str]) -> tuple[bool, list[str]]:
    """Of `sh ARGUMENTS`: whether the first word behind its options is a command, as with -c or -lc, and those words.

    >>> shell_operands(["-eo", "pipefail", "x.sh", "-c"]), shell_operands(["-lc", "python x.py"])
    ((False, ['x.sh', '-c']), (True, ['python x.py']))
    """
    is_command, words = False, list(arguments)
    while words and words[0][:1] in ("-", "+"):
        word = words.pop(0)
        if word in ("-", "--"):
            break
        is_command = is_command or (word[0] == "-" and word[1] != "-" and "c" in word)
        if word in ("--rcfile", "--init-file") or (word[:2] != "--" and word[-1] in "oO"):      # with a value
            del words[:1]
    return is_command, words


def _of_launcher(arguments: list[str], folder: Path) -> _Parted:
    """A launcher's own options are many and take values: the script is the first argument that is a Python file."""
    for position, word in enumerate(arguments):
        if word in ("-m", "--module"):
            named = next((at for at, later in enumerate(arguments) if at > position and not later.startswith("-")), None)
            if named is not None and (found := _of_module(arguments[named], folder)):
                return found, arguments[named + 1:]
        if word.endswith(".py") and (found := _file(word, folder)):
            return found, arguments[position + 1:]
        if _starts_program(word):
            return _parted(arguments[position:], folder)
    return None, arguments


def _of_wrapper(arguments: list[str], folder: Path) -> _Parted:
    for position, word in enumerate(arguments):
        if word.endswith(".py") and (found := _file(word, folder)):
            return found, arguments[position + 1:]
        if _starts_program(word):
            return _parted(arguments[position:], folder)
    for position, word in enumerate(arguments):
        if not word.startswith("-") and "=" not in word and word not in ("run", "exec") and (found := _of_program(word, folder)):
            return found, arguments[position + 1:]
    return None, arguments


def _starts_program(word: str) -> bool:
    name = os.path.basename(word)
    return bool(_PYTHON.fullmatch(name)) or name in LAUNCHERS | SHELLS | _WRAPPERS


def _of_module(name: str, folder: Path) -> Path | None:
    """`python -m NAME`, looked up in the working directory and PYTHONPATH only: nothing is imported to find it."""
    if not re.fullmatch(r"\w+(\.\w+)*", name):
        return None
    places = [folder, *(folder / part for part in os.environ.get("PYTHONPATH", "").split(os.pathsep) if part)]
    relative = name.replace(".", "/")
    candidates = (place / tail for place in places for tail in (f"{relative}/__main__.py", f"{relative}.py"))
    return next((path for path in candidates if path.is_file()), None)


def _of_program(word: str, folder: Path) -> Path | None:
    """A program on PATH or by path, when it is a script with a `#!` line."""
    found = _file(word, folder) if os.sep in word else None
    if found is None:
        located = shutil.which(word)
        found = Path(located) if located else None
    try:
        if found is not None:
            with open(found, "rb") as file:
                return found if file.read(2) == b"#!" else None
    except OSError:  # it can be run but not read: nothing to hash
        return None
    return None


def _file(word: str, folder: Path) -> Path | None:
    try:
        path = folder / word
        if path.is_dir():
            path = path / "__main__.py"
        return path if path.is_file() else None
    except (OSError, ValueError):  # a name that is too long, or holds a NUL, is no file
        return None
