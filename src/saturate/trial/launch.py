"""How saturate puts itself in front of a command: the plan file, the environment, and what defeats both."""

from __future__ import annotations

import contextlib
import json
import os
import re
import shlex
import subprocess
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any

PACKAGE = Path(__file__).resolve().parent.parent
INJECT = PACKAGE / "agent" / "inject"

HASH_SEED = "PYTHONHASHSEED"

#: Commands of a shell that print what follows them.
_PRINTERS = (["echo"], ["printf"])
_NOTHING: Mapping[str, str] = MappingProxyType({})


@dataclass(frozen=True)
class Chosen:
    """One technique with its options, and where the agent finds it: a module name, a file for another environment."""

    id: str
    module: str
    path: str | None = None
    options: dict[str, Any] = field(default_factory=dict)
    environment: dict[str, str] = field(default_factory=dict)


#: The name of an interpreter, as `machine.fingerprint` knows it.
_PYTHON = re.compile(r"(python|pypy)(\d+(\.\d+)*)?t?(\.exe)?")

#: Modules that may go online, see `agent.trackers`.
_TRACKERS = ("wandb", "comet_ml", "neptune", "clearml", "swanlab", "trackio", "mlflow", "mlflow.tracking._tracking_service.utils",
             "mlflow.tracking._model_registry.utils", "mlflow.store.artifact.artifact_repository_registry", "huggingface_hub.hf_api",
             "transformers.utils.hub", "datasets.arrow_dataset", "datasets.dataset_dict", "datasets.iterable_dataset")


def plan_text(mode: str, techniques: list[Chosen], **more: Any) -> str:
    """What the agent reads at its start, as JSON. `more`: see `agent.bootstrap.start`."""
    return json.dumps({
        "wakes": " ".join(_wakes(mode, more)),      # stays the first: it is read without a parser
        "package": str(PACKAGE),
        "mode": mode,
        "techniques": [asdict(chosen) for chosen in techniques],
        "environment": sorted({name for chosen in techniques for name in chosen.environment}),
        **more,
    })


def _wakes(mode: str, more: Mapping[str, Any]) -> tuple[str, ...]:
    """The modules whose import the agent acts on: a process that imports none of them is left alone. None: it acts on
    files, from the start of every process."""
    if more.get("redirect"):
        return ()
    random = ("random", "numpy") if more.get("capture") else ()
    return ("torch", *random, *(_TRACKERS if mode != "run" else ()))


def hashing(environment: Mapping[str, str], capture: Mapping[str, Any] | None) -> dict[str, str]:
    """The seed of the interpreter's string hashes, for a run that is recorded: a set of strings has another order in each process,
    and scripts make their vocabulary or their list of files of one. It counts from the start of the interpreter only, so the agent
    cannot set it. What the user chose stays.

    >>> hashing({}, {"seed": 20, "seed_offset": 1}), hashing({"PYTHONHASHSEED": "7"}, {"seed": 20}), hashing({}, None)
    ({'PYTHONHASHSEED': '21'}, {'PYTHONHASHSEED': '7'}, {})
    """
    if capture is None:
        return {}
    chosen = environment.get(HASH_SEED, "")
    drawn = chosen in ("", "random")            # what both mean to the interpreter: anew in each process
    return {HASH_SEED: str((capture["seed"] + capture.get("seed_offset", 0)) % 2**32) if drawn else chosen}


def injected(base: Mapping[str, str], plan: str, techniques: list[Chosen], more: Mapping[str, str] = _NOTHING) -> dict[str, str]:
    """The environment of a workload that carries the agent. `plan` is a file's path, or the plan itself: a run that
    replaces saturate has no folder to leave a file in. `more`: variables of this run alone."""
    environment = {**base, **more}
    given = environment.get("PYTHONPATH")           # an empty entry is the working directory; an empty list is none
    rest = [entry for entry in given.split(os.pathsep) if entry != str(INJECT)] if given else []
    environment["PYTHONPATH"] = os.pathsep.join([str(INJECT), *rest])
    environment["SATURATE_PLAN"] = plan
    for chosen in techniques:
        environment.update(chosen.environment)
    return environment


def inherited(environment: Mapping[str, str]) -> dict[str, str]:
    """What a launcher sets for its ranks, or somebody else for another purpose, before a trial has started anything."""
    return {name: environment[name] for name in ("RANK", "WORLD_SIZE") if name in environment}


def carried(argv: list[str], environment: Mapping[str, str], techniques: list[Chosen], more: Mapping[str, str] = _NOTHING) -> list[str]:
    """The command to start, given an environment from `injected`: what a leading `env` would take out of it is put in again.

    >>> plain = {"PYTHONPATH": "/inject", "SATURATE_PLAN": "/plan.json"}
    >>> carried(["env", "-u", "PYTHONPATH", "A=1", "python", "t.py"], plain, [])
    ['env', '-u', 'PYTHONPATH', 'A=1', 'PYTHONPATH=/inject', 'python', 't.py']
    """
    if not argv or Path(argv[0]).name != "env":
        return argv
    cleared, taken, given = False, set(), {}
    position = 1
    while position < len(argv):
        word = argv[position]
        if word in ("-i", "-", "--ignore-environment"):
            cleared = True
        elif word in ("-u", "--unset", "-C", "--chdir"):
            position += 1
            if word in ("-u", "--unset"):
                taken.update(argv[position: position + 1])
        elif word.startswith("--unset="):
            taken.add(word.partition("=")[2])
        elif word.startswith("-"):
            if not word.startswith("--chdir="):
                return argv         # a rare option: -S has a language of its own
        elif "=" in word:
            name, _, given[name] = word.partition("=")
        else:
            break
        position += 1
    ours = ["PYTHONPATH", "SATURATE_PLAN", *sorted({name for chosen in techniques for name in chosen.environment} | set(more))]
    again = {name: environment[name] for name in ours if (cleared or name in taken) and name not in given}
    if "PYTHONPATH" in given:
        again["PYTHONPATH"] = injected(given, "", [])["PYTHONPATH"]
    elif "PYTHONPATH" in again:
        again["PYTHONPATH"] = str(again["PYTHONPATH"]).split(os.pathsep)[0]      # ours; the user asked to be rid of the rest
    return [*argv[:position], *(f"{name}={value}" for name, value in again.items()), *argv[position:]]


def end(supervisor: subprocess.Popen[bytes]) -> None:
    """Tell it to kill its tree, now. The byte is for where a fork of this process holds the pipe open, too."""
    pipe = supervisor.stdin
    assert pipe is not None
    if not pipe.closed:                 # it was told before
        with contextlib.suppress(BrokenPipeError):      # it is gone already
            os.write(pipe.fileno(), b".")
        pipe.close()


def defeated_in(script: str) -> tuple[int, str] | None:
    """The first line of a shell script that starts Python such that `sitecustomize` does not run: its number and the option. Read
    word by word: what a variable or a text over several lines holds is not seen.

    >>> defeated_in("cd data && OMP_NUM_THREADS=1 python -I train.py")
    (1, '-I')
    >>> defeated_in("# python -I train.py") is None and defeated_in("echo python -I train.py") is None
    True
    >>> defeated_in("cat <<END > run.sh\\npython -I x\\nEND\\npython -E y")
    (4, '-E')
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
                    option = defeated_by(command) if command[:1] not in _PRINTERS else None
                    if option is not None:
                        return number, option
                    command = []
                else:
                    command.append(word)
    return None


def defeated_by(argv: list[str]) -> str | None:
    """The interpreter option in `argv` that keeps `sitecustomize` from running, or None when none is in sight.

    >>> defeated_by(["python", "-I", "train.py"])
    '-I'
    >>> defeated_by(["python", "train.py", "--data", "corpora/python", "-I"]) is None
    True
    >>> defeated_by(["python", "--", "-IES.py"]) is None
    True
    """
    position = next((place for place, word in enumerate(argv) if _PYTHON.fullmatch(Path(word).name)), len(argv))
    options = iter(argv[position + 1:])
    for option in options:
        if not option.startswith("-") or option in ("-", "--"):
            return None         # what follows is the program's own
        if option in ("-W", "-X", "--check-hash-based-pycs"):
            next(options, None)
        elif not option.startswith("--"):
            letter = next((letter for letter in option[1:] if letter in "IEScmWX"), "")     # behind the others stands a value, or the program
            if letter in ("I", "E", "S"):
                return f"-{letter}"
            if letter in ("c", "m"):
                return None
    return None
