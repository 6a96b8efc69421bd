"""What keeps the agent out of a training (python -I, a PYTHONPATH of its own), as far as command lines and shell scripts tell. Nothing is
started to find out."""

from __future__ import annotations

import contextlib
import itertools
import os
import re
import shlex
from collections.abc import Iterator
from pathlib import Path

from saturate.machine import commands
from saturate.machine.commands import is_python
from saturate.trial.launch import CARRIERS, defeated_by, of_env, taken_by_env

#: Characters of a shell script that are looked at.
_LONGEST_SCRIPT = 1 << 20

#: Commands of a shell that print what follows them.
_PRINTERS = (["echo"], ["printf"])

#: What stands in front of an assignment that holds for the Python behind it.
_ASSIGNING = ("export", "declare", "typeset", "readonly", "env", "exec", "command", "nohup", "time")
_KEEPS_PATH = re.compile(r"PYTHONPATH=.*\$\{?PYTHONPATH\b")

#: Programs that have a daemon start their command, by the words that make them do so (none: they always do), and whether it gets the
#: environment that they were started with.
_DAEMONS: dict[str, tuple[tuple[str, ...], bool]] = {
    "srun": ((), True), "sbatch": ((), True), "qsub": ((), False), "bsub": ((), True), "ssh": ((), False), "systemd-run": ((), False),
    **dict.fromkeys(("docker", "podman", "nerdctl", "docker-compose", "podman-compose"), (("run", "exec", "start", "up"), False)),
}
#: What may stand in front of those.
_WRAPPERS = ("env", "nice", "ionice", "nohup", "setsid", "stdbuf", "sudo", "taskset", "time", "timeout")


def starts_elsewhere(argv: list[str]) -> tuple[str, bool] | None:
    """The program in front of the training that has a daemon start it, and whether the environment goes with it. Such a training is
    no child of the command: it is neither isolated nor ended with it.

    >>> starts_elsewhere(["srun", "-n", "2", "python", "train.py"]), starts_elsewhere(["timeout", "9", "docker", "run", "image", "train"])
    (('srun', True), ('docker run', False))
    >>> starts_elsewhere(["docker", "ps"]) is starts_elsewhere(["systemd-run", "--scope", "x"]) is starts_elsewhere(["x", "srun"]) is None
    True
    """
    in_front = list(itertools.takewhile(lambda word: not is_python(word) and not word.endswith(".py"), argv))
    for place, word in enumerate(in_front):
        name = Path(word).name
        if name in _DAEMONS:
            by, inherits = _DAEMONS[name]
            verb = next((later for later in argv[place + 1:] if later in by), None)
            if (by and verb is None) or (name == "systemd-run" and "--scope" in argv):
                return None
            return f"{name} {verb}" if verb else name, inherits
        if place == 0 and name not in _WRAPPERS:
            return None
    return None


def not_handed_on(argv: list[str]) -> str | None:
    """What in front of the training may not hand on the environment that the agent is found by, and why; None: nothing in sight.

    >>> not_handed_on(["sudo", "-u", "me", "python", "t.py"])
    'sudo clears the environment'
    >>> not_handed_on(["sudo", "-E", "python", "t.py"])
    'sudo takes PYTHONPATH out of the environment, with -E as well'
    >>> not_handed_on(["sudo", "--preserve-env=PYTHONPATH,SATURATE_PLAN", "python", "t.py"]) is not_handed_on(["env", "-i", "python", "t.py"]) is None
    True
    """
    elsewhere = starts_elsewhere(argv)
    if elsewhere is not None and not elsewhere[1]:
        return f"{elsewhere[0]} does not hand on the environment"
    if argv and Path(argv[0]).name == "env" and of_env(argv) is None:
        return "the options of env are not all known here, and it may clear the environment"
    in_front = list(itertools.takewhile(lambda word: not is_python(word), argv))
    sudo = next((place for place, word in enumerate(in_front) if Path(word).name == "sudo"), None)
    if sudo is None or any(Path(word).name not in _WRAPPERS for word in in_front[:1]):
        return None
    asked = next((word.partition("=")[2] for word in in_front[sudo:] if word.startswith("--preserve-env=")), "")
    if set(CARRIERS) <= set(asked.split(",")):
        return None
    whole = any(word == "--preserve-env" or re.match(r"-[a-zA-Z]*E", word) for word in in_front[sudo:])
    return "sudo takes PYTHONPATH out of the environment, with -E as well" if whole else "sudo clears the environment"


def in_script(argv: list[str], cwd: str | os.PathLike[str] = ".") -> Iterator[str]:
    """What keeps the agent out in the script that the command names, or in the text that it gives to a shell; nothing is in sight where
    this is empty."""
    names = [os.path.basename(word) for word in argv]
    shell = next((at for at, name in enumerate(names) if name in commands.SHELLS), None)
    if shell is not None and not any(map(is_python, names[:shell])):
        is_command, operands = commands.shell_operands(argv[shell + 1:])
        if is_command:
            yield from _told(operands[0] if operands else "", f"the command given to {names[shell]}")
            return
    script = commands.script_of(argv, cwd)
    if script is None:
        return
    try:
        with open(script, encoding="utf-8", errors="replace") as file:
            text = file.read(_LONGEST_SCRIPT)
    except OSError:
        return                  # the shell will say so
    in_front = set(names[:names.index(script.name)] if script.name in names else names)
    if in_front & commands.SHELLS or re.match(r"#!.*[/ ](ba|da|z|k)?sh\b", text):
        yield from _told(text, str(script))
    option = in_first_line(text)
    if option is not None and not in_front & commands.LAUNCHERS and not any(map(is_python, in_front)):
        yield f"the first line of {script} starts `python {option}`, which ignores PYTHONPATH"


def _told(text: str, where: str) -> Iterator[str]:
    found = in_shell(text)
    if found is not None:
        line, what = found
        yield f"line {line} of {where} {what}"


def in_first_line(script: str) -> str | None:
    """The option of the interpreter in a `#!` line that keeps the agent out.

    >>> in_first_line("#!/usr/bin/python3 -Es\\n"), in_first_line("#!/usr/bin/env python3\\n-I")
    ('-E', None)
    """
    line = script.partition("\n")[0]
    return defeated_by(line[2:].split()) if line.startswith("#!") else None


def in_shell(script: str) -> tuple[int, str] | None:
    """The first line of a shell script that starts Python such that `sitecustomize` does not run, or takes it out of PYTHONPATH: its
    number, and what it does. Read word by word: what a variable or a text over several lines holds is not seen.

    >>> in_shell("cd data && OMP_NUM_THREADS=1 python -I train.py")
    (1, 'starts `python -I`, which ignores PYTHONPATH')
    >>> in_shell("# python -I train.py") is None and in_shell("echo python -I train.py") is None
    True
    >>> in_shell("cat <<END > run.sh\\npython -I x\\nEND\\npython -E y")
    (4, 'starts `python -E`, which ignores PYTHONPATH')
    >>> in_shell("exec nice env -i HOME=$HOME python x.py")
    (1, 'starts Python by env, which takes PYTHONPATH out of the environment')
    >>> in_shell("export PYTHONPATH=$PWD:$PYTHONPATH\\nPYTHONPATH=. python x.py")
    (2, 'sets PYTHONPATH without what it holds (PYTHONPATH=.:$PYTHONPATH keeps that)')
    """
    inside = ""                 # what ends the text that is given to a command in place
    for number, line in enumerate(script.splitlines(), 1):
        if inside:
            inside = "" if line.strip() == inside else inside
            continue
        text = re.search(r"<<-?\s*[\"']?(\w+)", line)
        inside = text[1] if text else ""
        words = shlex.shlex(line, posix=True, punctuation_chars=True)
        words.whitespace_split = True
        command: list[str] = []
        with contextlib.suppress(ValueError):       # a quotation that ends on a later line
            for word in (*words, ";"):
                if set(word) <= set("();<>|&"):
                    what = _defeat(command, line) if command[:1] not in _PRINTERS else None
                    if what is not None:
                        return number, what
                    command = []
                else:
                    command.append(word)
    return None


def _defeat(command: list[str], line: str) -> str | None:
    option = defeated_by(command)
    if option is not None:
        return f"starts `python {option}`, which ignores PYTHONPATH"
    if command[:1] == ["unset"] and "PYTHONPATH" in command:
        return "unsets PYTHONPATH"
    in_front = itertools.takewhile(lambda word: word in _ASSIGNING or word.startswith("-") or "=" in word, command)
    # By the line: a value with $(...) in it is several words here.
    if any(word.startswith("PYTHONPATH=") for word in in_front) and not _KEEPS_PATH.search(line):
        return "sets PYTHONPATH without what it holds (PYTHONPATH=.:$PYTHONPATH keeps that)"
    if not any(map(is_python, command)):
        return None
    if command[:1] == ["sudo"]:
        return not_handed_on(command) and "starts Python by sudo, which takes PYTHONPATH out of the environment"
    _, taken, _ = taken_by_env(command, CARRIERS) or (0, [], {})
    return f"starts Python by env, which takes {taken[0]} out of the environment" if taken else None
