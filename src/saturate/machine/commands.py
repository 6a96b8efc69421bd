"""What the words of a command mean: which file holds the training, and which words are its own.

Found from the command line alone, without running anything. It is a best guess: None where there is no script file to speak of
(`python -c`, a compiled program). Nothing but the standard library: trials are prepared, and the doctor looks, where nothing is installed.
"""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Sequence
from pathlib import Path

_PYTHON = re.compile(r"(python|pypy)(\d+(\.\d+)*)?t?(\.exe)?")
SHELLS = {"sh", "bash", "dash", "zsh", "ksh"}
LAUNCHERS = {"torchrun", "accelerate", "deepspeed", "lightning", "composer", "colossalai", "mpirun", "mpiexec", "srun"}
_LAUNCHER_MODULES = {"torch.distributed.run", "torch.distributed.launch", "accelerate.commands.launch", "deepspeed.launcher.runner"}
_WRAPPERS = {
    "uv", "poetry", "pdm", "hatch", "pixi", "conda", "mamba", "micromamba", "env", "nice", "ionice", "taskset", "numactl",
    "time", "timeout", "nohup", "stdbuf", "setsid", "xvfb-run", "sudo", "chrt",
}


def is_python(word: str = "") -> bool:
    """Whether it names an interpreter, with or without a path."""
    return _PYTHON.fullmatch(os.path.basename(word)) is not None


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
    if is_python(name):
        return _of_python(rest, folder)
    if name in LAUNCHERS:
        return _of_launcher(rest, folder)
    if name in SHELLS:
        return _of_shell(rest, folder)
    if name in _WRAPPERS:
        return _of_wrapper(rest, folder)
    return _of_program(argv[0], folder), rest


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
    return is_python(word) or os.path.basename(word) in LAUNCHERS | SHELLS | _WRAPPERS


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
