"""Run a training command with a recipe.

saturate replaces itself with the command: arguments, standard output, exit code and signals are the command's own. With an
empty recipe nothing else happens at all.

A recipe cannot act in a Python that is started with -I, or with a PYTHONPATH of its own. saturate warns before it starts, where it
can read that in the command line or in a shell script. It sees no other case, also with --strict: the command then trains as it is.
"""

from __future__ import annotations

import argparse
import os
import signal
from pathlib import Path

from saturate import notices
from saturate.cli._options import must_exist
from saturate.errors import InjectionDefeated, RecipeError, UsageError
from saturate.records import recipe as recipes
from saturate.records.options import options_from
from saturate.records.recipe import MadeFor, Recipe
from saturate.trial import defeats, launch

TAKES_COMMAND = True

#: Values of CUDA_VISIBLE_DEVICES by which there is no device.
_HIDDEN = ("", "-1")


def configure(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("recipe", type=Path, metavar="RECIPE", help="a recipe that tune wrote; an empty file changes nothing")
    parser.add_argument("--strict", action="store_true", help="refuse when anything the recipe was measured with has changed")
    parser.add_argument("--on-divergence", choices=["warn", "stop"], default="warn",
                        help="on NaN or a loss spike: say so, or end the run with exit code 5 (default: warn). With an empty recipe nothing "
                             "is watched. Launchers (torchrun, accelerate launch, mp.spawn) end with 1 instead of 5, and with --max-restarts above 0 "
                             "train again")


def execute(arguments: argparse.Namespace) -> int:
    recipe = recipes.read(arguments.recipe)
    command = arguments.command
    must_exist(command)
    if not recipe.techniques:
        if arguments.on_divergence == "stop":
            notices.tell("saturate: the recipe is empty, so the command runs as it is: nothing watches its loss\n")
        _replace(command, _environment())
    chosen = _chosen(recipe)
    _refuse_foreign_code(chosen, command)
    doubts = _compare(recipe, command, arguments.strict)
    option = launch.defeated_by(command)
    if option is not None:
        problem = InjectionDefeated(
            f"the recipe cannot take effect: `python {option}` ignores PYTHONPATH", remedy=f"run the command without {option}")
        if arguments.strict:
            raise problem
        notices.tell(problem.card() + "\n")
        _replace(command, _environment())
    _say_what_is_not_reached(command)
    if arguments.on_divergence == "stop" and (times := _restarts(command)):
        notices.tell(f"saturate: with --max-restarts {times}, a training that is stopped when it diverges is started again: give --max-restarts 0\n")
    plan = launch.plan_text("run", chosen, on_divergence=arguments.on_divergence, strict=arguments.strict, doubts=doubts)
    environment = launch.injected(_environment(), plan, chosen)
    _replace(launch.carried(command, environment, chosen), environment)
    return 0


def _restarts(command: list[str]) -> int:
    """How often the launcher in front of the script starts all ranks again when one fails, as far as the command line says."""
    from saturate.machine import commands

    in_front = command[:len(command) - len(commands.arguments_of(command))]
    for place, word in enumerate(in_front):
        name, _, value = word.partition("=")
        if name.replace("_", "-") == "--max-restarts":
            value = value or "".join(in_front[place + 1:place + 2])
            return int(value) if value.isdecimal() else 0
    return 0


def _say_what_is_not_reached(command: list[str]) -> None:
    """Where it can be read in the command line, or in the script that it names: one may start several programs, so this is no reason
    to refuse."""
    what = defeats.not_handed_on(command)
    if what is not None:
        notices.tell(f"saturate: {what}: then the recipe cannot take effect; put that in front of saturate\n")
    for found in defeats.in_script(command):
        notices.tell(f"saturate: {found}: the recipe cannot take effect there\n")


def _environment() -> dict[str, str]:
    """The environment that we were given. In the C locale Python sets LC_CTYPE for itself (PEP 538) before we run."""
    environment = os.environ.copy()
    try:
        given = Path("/proc/self/environ").read_bytes().split(b"\0")
    except OSError:
        return environment              # no /proc here: nothing to compare with
    language = next((entry.partition(b"=")[2] for entry in given if entry.startswith(b"LC_CTYPE=")), None)
    if language is None:
        environment.pop("LC_CTYPE", None)
    else:
        environment["LC_CTYPE"] = os.fsdecode(language)
    return environment


def _replace(command: list[str], environment: dict[str, str]) -> None:
    """Become the command. Only returns by an exception."""
    notices.flush()
    for number in (signal.SIGPIPE, signal.SIGXFSZ):
        signal.signal(number, signal.SIG_DFL)       # Python ignores them at its start, and an ignored signal stays so
    try:
        os.execvpe(command[0], command, environment)
    except OSError as error:
        raise UsageError(f"cannot start {command[0]}", cause=str(error), remedy="a program, or a file that may be executed and says by its "
                         "first line what with (#!/bin/sh)") from error


def _chosen(recipe: Recipe) -> list[launch.Chosen]:
    from saturate.study.candidates import Candidate, ordered
    from saturate.techniques import _registry

    registry = _registry.load()
    problems = recipes.validate(recipe, registry)
    if problems:
        first = problems[0]
        raise RecipeError(first.message, cause=first.where(), remedy=first.remedy or "saturate recipe validate FILE lists all problems")
    candidates = (Candidate(registry[entry.id], options_from(registry[entry.id], entry.options)) for entry in recipe.techniques)
    return [candidate.chosen() for candidate in ordered(tuple(candidates))]     # as in trials, whoever wrote the recipe


def _refuse_foreign_code(chosen: list[launch.Chosen], command: list[str]) -> None:
    """Raise RecipeError for a library that is to be loaded into the command and that nobody has installed here: a recipe may come from
    anywhere, and a file beside it, too."""
    from saturate.machine import facts

    own = os.environ.get("LD_PRELOAD", "").split(":")
    preloads = [(one, library) for one in chosen for library in one.environment.get("LD_PRELOAD", "").split(":") if library and library not in own]
    for one, library in preloads:
        if not facts.is_installed(library, prefix=facts.prefix_of(command[0])):
            raise RecipeError(f"{one.id}: {library} is not installed on this machine",
                              cause="it lies in no folder of libraries of the system, of the command's Python, or of LD_LIBRARY_PATH",
                              remedy="saturate tune -- COMMAND finds what is installed here; or name its folder in LD_LIBRARY_PATH if you trust it")


def _compare(recipe: Recipe, command: list[str], strict: bool) -> dict[str, tuple[str, str]]:
    """Say what has changed as far as it shows from here, and what does not show. Returns what the agent is to compare: which torch and
    which Python the command ends in is known where it has imported torch."""
    from saturate.machine import fingerprint

    ids = [entry.id for entry in recipe.techniques]
    now = _now(recipe.made_for, command)
    changes, unknown = (look(recipe.made_for, now, ids) for look in (fingerprint.compare, fingerprint.uncompared))
    if changes and strict:
        raise RecipeError.outdated([*changes, *unknown])
    if unknown and strict:
        raise RecipeError("the recipe may have been made for something else", evidence="; ".join(unknown),
                          remedy="tune again with this command, or run without --strict")
    for change in [*changes, *(["; ".join(unknown)] if unknown else [])]:
        notices.tell(f"saturate: {change}\n")
    doubts = fingerprint.doubts(recipe.made_for, ids)
    return {field: doubts[field] for field in ("torch", "python") if field in doubts}


def _now(made_for: MadeFor, command: list[str]) -> MadeFor:
    """The fingerprint of this machine and command, as far as it shows without starting anything; the rest is left empty."""
    import saturate
    from saturate.machine import facts, fingerprint

    device, device_name = _device(made_for)
    return MadeFor(
        device=device,
        device_name=device_name,
        cpu=facts.observe(command[0]).cpu_name,
        saturate=saturate.__version__,
        script=fingerprint.digest_of(command, "."),
    )


def _device(made_for: MadeFor) -> tuple[str, str]:
    """Its kind and its name, each only as far as it is certain: without NVML (ROCm, many containers) there may still be a device, and
    its name is torch's alone to tell. Where there is one, a script may yet train on the CPU."""
    from saturate.machine import gpus, nvml, telemetry

    if made_for.device not in ("cpu", "cuda"):
        return "", ""
    if os.environ.get("CUDA_VISIBLE_DEVICES") in _HIDDEN or not gpus.possible():
        return "cpu", ""
    if made_for.device == "cpu":
        return "", ""
    opened, _ = nvml.start()
    if opened is None:
        return "", ""
    with opened:
        name = telemetry.visible_name(opened, os.environ)
    return made_for.device if name else "", name
