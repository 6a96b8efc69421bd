"""Explain a technique, finding, verdict, outcome, limit, fate, problem of a trace, numerics class or error code; without an id, list
them all."""

from __future__ import annotations

import argparse
import inspect
from types import ModuleType

from saturate import errors, plugins
from saturate.cli import _meanings
from saturate.cli._output import paint, table

VERDICTS = {
    "faster": "The whole confidence interval of the speed-up lies above the threshold (2 % unless you chose another).",
    "no_difference": "The whole interval lies below the threshold, so there is no gain that counts. It may even be slower: the verdict is `slower` "
                     "only if that is certain. More rounds would hardly change this.",
    "slower": "The whole confidence interval lies on the slow side of the threshold.",
    "inconclusive": "The interval is too wide to tell: a quieter machine, a larger --budget or a longer run would decide. Or nothing could "
                    "be timed or verified; then the reason in the summary says what would help.",
}

FATES = {
    "kept": "In the recipe. It was faster, or the memory limit needs it, and the training with it verified. As long as the budget lasted, the final "
            "set was also raced without it, and was not shown to be as fast; the reason beside it holds that race, or says that it was "
            "not checked. The technique that was added last needs no such race, because its own one was the same.",
    "no_difference": "Tried and measured: it gains less than the threshold, or loses. The interval beside it says how much.",
    "slower": "Tried and measured: the step takes longer with it.",
    "inconclusive": "Tried, but the measurement could not decide within the budget, or its result could not be verified. The reason beside it says which.",
    "rejected_numerics": "Tried, but the training is no longer the same within its numerics class. The report shows which metric "
                         "left its tolerance, and in which update.",
    "not_applied": "Switched on, but nothing shows that it took effect, so its time says nothing.",
    "not_applicable": "Not tried, because it has nothing to do for this training or on this machine. The reason is beside it.",
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
    "convergence": "Changes the training itself (global batch, learning rate, algorithm). tune tries such techniques only with --allow convergence; those "
                   "that it cannot judge, such as global-batch, are put into a recipe by hand.",
}

LIMITS = {
    "input-bound": "The largest loss is waiting for the next batch while the device has nothing to do. Which part of "
                   "the input is slow is a finding of its own.",
    "host-bound": "The largest loss is idle time because the host launched the next work too late (on a CPU: time "
                  "outside operators).",
    "sync-bound": "The largest loss is idle time while the host waited for the device, to read a value or to copy.",
    "communication-bound": "The largest loss is communication between ranks that no computation hides.",
    "memory-bound": "The device works at least 85 % of the step, and most of that time is limited by moving bytes.",
    "compute-bound": "The device works at least 85 % of the step, and most of that time is limited by arithmetic.",
    "device-wait-bound": "The largest loss is idle time although the next work was already launched: it waited for "
                         "another stream, an event or a peer.",
    "unknown": "There is not enough evidence for a verdict. The reason is beside it: no steps, lost records, or no roofline.",
}

_GROUPS = (
    ("verdict", VERDICTS), ("fate", FATES), ("numerics class", NUMERICS), ("limit", LIMITS), ("verdict of fit", _meanings.FIT_VERDICTS),
    ("size in fit", _meanings.FIT_SIZES), ("outcome of a drill", _meanings.DRILL_OUTCOMES),
    ("outcome of a trial", _meanings.TRIAL_OUTCOMES), ("problem of a trace", _meanings.TRACE_PROBLEMS),
)

#: In the place of a text that is a docstring.
_STRIPPED = "Its text was dropped by python -OO or PYTHONOPTIMIZE=2; start saturate without them to read it."

_PLURALS = {
    "numerics class": "numerics classes", "fate of an inference candidate": "fates of inference candidates", "verdict of fit": "verdicts of fit",
    "verdict of optimize": "verdicts of optimize",
    "size in fit": "sizes in fit", "outcome of a drill": "outcomes of a drill", "outcome of a trial": "outcomes of a trial",
    "problem of a trace": "problems of a trace",
}


def configure(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("id", nargs="?", metavar="ID", help="for example: compile, input-bound, inconclusive, stream, E210")


def execute(arguments: argparse.Namespace) -> int:
    print(explanation(arguments.id) if arguments.id else contents())
    return 0


def explanation(word: str) -> str:
    """What `word` means; a word with two meanings gets both. Raises UsageError for an unknown one."""
    from saturate.records.spelling import key_of, suggestion

    key = key_of(word)
    parts = [
        f"{paint(name, 'bold')} ({kind})\n{text}"
        for kind, group in _groups() for name, text in group.items() if key_of(name) == key
    ]
    parts += [_of_error(code, cls) for code, cls in errors.catalogue().items() if key in (key_of(code), cls.__name__.lower())]
    documented: list[str] = []
    for kind, registry in (("technique", _techniques), ("inference technique", _inference), ("finding", _rules)):
        try:
            modules = registry()
        except errors.UsageError:
            if parts:
                continue        # a broken technique or rule must not hide what a word or an error code means
            raise
        documented += modules
        if key in modules:
            parts.append(_of_module(kind, modules[key]))
    if parts:
        return "\n\n".join(parts)
    known = [*(name for _, group in _groups() for name in group), *errors.catalogue(), *documented]
    raise errors.UsageError(f"nothing here is called '{word[:60]}'", remedy=suggestion(word, known) or "saturate explain lists everything")


def contents() -> str:
    """Everything that can be explained."""
    sections = [
        ("techniques", [(name, module.TECHNIQUE.title) for name, module in _techniques().items()]),
        ("inference techniques", [(name, module.TECHNIQUE.title) for name, module in _inference().items()]),
        ("findings", [(name, module.RULE.title) for name, module in _rules().items()]),
    ]
    sections += [(_PLURALS.get(kind, f"{kind}s"), [(name, text.partition(". ")[0].rstrip(".")) for name, text in group.items()])
                 for kind, group in _groups()]
    sections.append(("errors", [(code, _first_line(cls)) for code, cls in errors.catalogue().items()]))
    return "\n\n".join(f"{paint(title, 'bold')}\n{table(rows, indent='  ')}" for title, rows in sections)


def _techniques() -> dict[str, ModuleType]:
    from saturate.techniques import _registry as registry

    return registry.load()


def _inference() -> dict[str, ModuleType]:
    from saturate.inference.techniques import _registry as registry

    return registry.load()


def _groups() -> tuple[tuple[str, dict[str, str]], ...]:
    from saturate.report.inference_words import MEANINGS, VERDICTS

    return *_GROUPS, ("verdict of optimize", VERDICTS), ("fate of an inference candidate", MEANINGS)


def _rules() -> dict[str, ModuleType]:
    from saturate.findings import _registry as registry

    return registry.load()


def _of_error(code: str, cls: type[errors.SaturateError]) -> str:
    return f"{paint(code, 'bold')} {cls.__name__}, exit code {cls.exit_code}\n{_text(cls) or _STRIPPED}"


def _of_module(kind: str, module: ModuleType) -> str:
    """A technique's or a rule's own documentation."""
    if kind != "finding":
        from saturate.techniques import _registry as registry

        about = module.TECHNIQUE
        facts = f"{about.numerics}, stage {about.stage}, since {about.since}, {about.status}"
    else:
        from saturate.findings import _registry as registry

        about = module.RULE
        facts = f"finding, since {about.since}; {_addressed_by(about.techniques)}\n{_first_paragraph(module)}"
    parts = [f"{paint(about.id, 'bold')}: {about.title}\n{facts}"]
    parts += [f"{paint(heading, 'bold')}\n{text}" for heading, text in registry.documentation(module).items()]
    return "\n\n".join([*parts, _STRIPPED] if plugins.stripped() else parts)


def _addressed_by(techniques: tuple[str, ...]) -> str:
    """Those that exist: a rule may name some that are yet to come."""
    try:
        known = [name for name in techniques if name in _techniques()]
    except errors.UsageError:       # a broken technique must not hide what a finding means
        known = list(techniques)
    return f"tune tries {', '.join(known)}" if known else "no technique addresses it"


def _first_paragraph(module: ModuleType) -> str:
    return _text(module).partition("\n\n")[0]


def _first_line(cls: type) -> str:
    return _text(cls).partition("\n")[0].partition(". ")[0].rstrip(".") or cls.__name__


def _text(documented: type | ModuleType) -> str:
    """Its own docstring: `inspect.getdoc` would take that of a base class instead."""
    return inspect.cleandoc(documented.__doc__ or "")
