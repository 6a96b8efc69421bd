"""How saturate puts itself in front of a command: the plan file, the environment, and what defeats both."""

from __future__ import annotations

import itertools
import json
import os
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any

from saturate.machine.commands import is_python

PACKAGE = Path(__file__).resolve().parent.parent
INJECT = PACKAGE / "agent" / "inject"

HASH_SEED = "PYTHONHASHSEED"

#: The variables that bring the agent into a process.
CARRIERS = ("PYTHONPATH", "SATURATE_PLAN")

_NOTHING: Mapping[str, str] = MappingProxyType({})


@dataclass(frozen=True)
class Chosen:
    """One technique with its options, and where the agent finds it: a module name, a file for another environment."""

    id: str
    module: str
    path: str | None = None
    options: dict[str, Any] = field(default_factory=dict)
    environment: dict[str, str] = field(default_factory=dict)


#: Those whose -m names the module to start.
_LAUNCHERS = ("torchrun", "accelerate", "deepspeed")

#: Modules that may go online, see `agent.trackers`.
_TRACKERS = ("wandb", "comet_ml", "neptune", "clearml", "swanlab", "trackio", "aim", "litlogger", "azureml.core.run", "mlflow",
             "mlflow.tracking._tracking_service.utils",
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


def of_env(argv: list[str]) -> tuple[int, bool, set[str], dict[str, str]] | None:
    """Of a leading `env`: where its command begins, whether it clears everything, what it takes out, and what it sets. None: it is none,
    or has an option that is not known here, as -S, which has a language of its own.

    >>> of_env(["env", "-iu", "A", "-uB", "--unset=C", "D=1", "python"]) == (6, True, {"A", "B", "C"}, {"D": "1"})
    True
    """
    if not argv or Path(argv[0]).name != "env":
        return None
    cleared, taken, given = False, set(), {}
    words = iter(enumerate(argv[1:], 1))
    for position, word in words:
        option, _, value = word.partition("=")
        if word == "-" or option == "--ignore-environment":
            cleared = True
        elif option == "--unset":
            taken.add(value if "=" in word else next(words, (0, ""))[1])
        elif option == "--chdir":
            _ = "=" in word or next(words, None)
        elif word.startswith("--"):
            if word != "--" and option not in ("--null", "--debug", "--block-signal", "--default-signal", "--ignore-signal"):
                return None
        elif word.startswith("-"):
            letters = word[1:].lstrip("i0v")
            cleared = cleared or "i" in word[1: len(word) - len(letters)]
            if letters[:1] not in ("", "u", "C"):
                return None
            value = letters[1:] or (next(words, (0, ""))[1] if letters else "")
            taken |= {value} if letters[:1] == "u" else set()
        elif "=" in word:
            given[option] = value
        else:
            return position, cleared, taken, given
    return len(argv), cleared, taken, given


def taken_by_env(argv: list[str], names: Iterable[str]) -> tuple[int, list[str], dict[str, str]] | None:
    """Of an `env` in front of the training: where its command begins, which of these variables do not get through, and what it sets.
    None: there is none whose options are all known here.

    >>> taken_by_env(["nice", "env", "-u", "A", "B=1", "python", "t.py"], ["A", "B", "C"])
    (5, ['A'], {'B': '1'})
    >>> taken_by_env(["python", "t.py", "env", "-u", "A"], ["A"]) is None
    True
    """
    in_front = itertools.takewhile(lambda place: not (is_python(argv[place]) or begins_script(argv, place)), range(len(argv)))
    start = next((place for place in in_front if Path(argv[place]).name == "env"), len(argv))
    parts = of_env(argv[start:])
    if parts is None:
        return None
    position, cleared, taken, given = parts
    return start + position, [name for name in names if (cleared or name in taken) and name not in given], given


def carried(argv: list[str], environment: Mapping[str, str], techniques: list[Chosen], more: Mapping[str, str] = _NOTHING) -> list[str]:
    """The command to start, given an environment from `injected`: what any `env` in front of the training would take out of it is put
    in again.

    >>> plain = {"PYTHONPATH": "/inject", "SATURATE_PLAN": "/plan.json"}
    >>> carried(["env", "-u", "PYTHONPATH", "A=1", "python", "t.py"], plain, [])
    ['env', '-u', 'PYTHONPATH', 'A=1', 'PYTHONPATH=/inject', 'python', 't.py']
    >>> carried(["env", "A=1", "nice", "env", "-i", "python", "t.py"], plain, [])
    ['env', 'A=1', 'nice', 'env', '-i', 'PYTHONPATH=/inject', 'SATURATE_PLAN=/plan.json', 'python', 't.py']
    """
    ours = [*CARRIERS, *sorted({name for chosen in techniques for name in chosen.environment} | set(more))]
    found = taken_by_env(argv, ours)
    if found is None:
        return argv
    position, taken, given = found
    again = {name: environment[name] for name in taken}
    if "PYTHONPATH" in given:
        again["PYTHONPATH"] = injected(given, "", [])["PYTHONPATH"]
    elif "PYTHONPATH" in again:
        again["PYTHONPATH"] = str(again["PYTHONPATH"]).split(os.pathsep)[0]      # ours; the user asked to be rid of the rest
    behind = carried(argv[position:], environment, techniques, more)        # there may be another one
    return [*argv[:position], *(f"{name}={value}" for name, value in again.items()), *behind]


def begins_script(argv: list[str], place: int) -> bool:
    """Whether what a launcher is to start stands there: what follows it is the program's own."""
    word = argv[place]
    if word in ("-m", "--module"):
        return any(Path(before).name in _LAUNCHERS for before in argv[:place])
    return word.endswith(".py") and not word.startswith("-") and "=" not in word


def defeated_by(argv: list[str]) -> str | None:
    """The interpreter option in `argv` that keeps `sitecustomize` from running, or None when none is in sight.

    >>> defeated_by(["python", "-I", "train.py"])
    '-I'
    >>> defeated_by(["python", "train.py", "--data", "corpora/python", "-I"]) is None
    True
    >>> defeated_by(["python", "--", "-IES.py"]) is None
    True
    >>> defeated_by(["torchrun", "train.py", "--language", "python", "-BS", "16"]) is None
    True
    """
    position = next((place for place, word in enumerate(argv) if is_python(word) or begins_script(argv, place)), len(argv))
    if not is_python(*argv[position: position + 1]):
        return None
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
