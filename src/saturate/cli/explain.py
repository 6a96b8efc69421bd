"""Explain one technique, verdict, fate, numerics class or error code; without an id, list them all."""

from __future__ import annotations

import argparse
import inspect

from saturate import errors
from saturate.cli._output import paint, table

VERDICTS = {
    "faster": "The whole confidence interval of the speed-up lies above the threshold (2 % unless you chose another).",
    "no_difference": "The interval lies between slower and faster by less than the threshold: if there is a difference, it is "
                     "too small to matter. More rounds would not change that.",
    "slower": "The whole confidence interval lies on the slow side of the threshold.",
    "inconclusive": "The interval is too wide to tell. A quieter machine, a larger --budget or a longer run would decide it.",
}

FATES = {
    "kept": "In the recipe. It was faster, it verified, and taking it out of the final set makes that set slower.",
    "no_difference": "Tried and measured: it changes the step time by less than the threshold.",
    "slower": "Tried and measured: the step takes longer with it.",
    "inconclusive": "Tried, but the measurement could not decide within the budget.",
    "rejected_numerics": "Tried, but the training is no longer the same within its numerics class. The report shows which metric "
                         "left its tolerance, and in which update.",
    "not_applied": "Set, but it did not take effect: the proof of activation is missing. Its time says nothing.",
    "not_applicable": "Not tried, because this workload or machine gives it nothing to do. The reason is beside it.",
    "failed": "The trial ended with an error. The reason names the class of failure, and the log is kept.",
    "not_tried": "The budget ended first, or you skipped it. A larger --budget or --only ID tries it.",
}

NUMERICS = {
    "exact": "Bit-identical results under a fixed seed and deterministic algorithms.",
    "reordering": "The same mathematics in another order: floating-point sums are associated differently, so last bits differ.",
    "stream": "Other random numbers from the same distributions, such as worker seeds or compiled dropout. Verified with randomness "
              "aligned, and again inside an envelope of several baseline seeds.",
    "precision": "Other number formats, so results differ by rounding. Verified against a twin of the baseline whose parameters "
                 "are disturbed by one such rounding.",
    "convergence": "Changes the training itself (global batch, learning rate, algorithm). Tried only with --allow convergence.",
}

_GROUPS = (("verdict", VERDICTS), ("fate", FATES), ("numerics class", NUMERICS))


def configure(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("id", nargs="?", help="for example: compile, inconclusive, stream, E210")


def execute(arguments: argparse.Namespace) -> int:
    print(explanation(arguments.id) if arguments.id else contents())
    return 0


def explanation(word: str) -> str:
    """What `word` means; a word with two meanings gets both. Raises UsageError for an unknown one."""
    key = _key(word)
    parts = [
        f"{paint(name, 'bold')} ({kind})\n{text}"
        for kind, group in _GROUPS for name, text in group.items() if _key(name) == key
    ]
    parts += [_of_error(code, cls) for code, cls in errors.catalogue().items() if key in (_key(code), cls.__name__.lower())]
    if parts:  # a broken technique must not hide what an error code means
        return "\n\n".join(parts)
    registry = _registry()
    if key in registry:
        return _of_technique(registry[key])
    from saturate.records.spelling import suggestion

    known = [*(name for _, group in _GROUPS for name in group), *errors.catalogue(), *registry]
    raise errors.UsageError(f"nothing here is called '{word[:60]}'", remedy=suggestion(word, known) or "saturate explain lists everything")


def contents() -> str:
    """Everything that can be explained."""
    sections = [("techniques", [(name, module.TECHNIQUE.title) for name, module in _registry().items()])]
    sections += [(f"{kind}s" if kind != "numerics class" else "numerics classes",
                  [(name, text.partition(". ")[0].rstrip(".")) for name, text in group.items()]) for kind, group in _GROUPS]
    sections.append(("errors", [(code, _first_line(cls)) for code, cls in errors.catalogue().items()]))
    return "\n\n".join(f"{paint(title, 'bold')}\n{table(rows, indent='  ')}" for title, rows in sections)


def _registry() -> dict:
    from saturate.techniques import _registry as registry

    return registry.load()


def _of_error(code: str, cls: type[errors.SaturateError]) -> str:
    return f"{paint(code, 'bold')} {cls.__name__}, exit code {cls.exit_code}\n{inspect.getdoc(cls)}"


def _of_technique(module) -> str:
    from saturate.techniques import _registry as registry

    technique = module.TECHNIQUE
    parts = [f"{paint(technique.id, 'bold')}: {technique.title}\n{technique.numerics}, stage {technique.stage}, "
             f"since {technique.since}, {technique.status}"]
    parts += [f"{paint(heading, 'bold')}\n{text}" for heading, text in registry.documentation(module).items()]
    return "\n\n".join(parts)


def _first_line(cls: type) -> str:
    return (inspect.getdoc(cls) or "").partition("\n")[0].partition(". ")[0].rstrip(".")


def _key(word: str) -> str:
    return word.lower().replace("_", "-")
