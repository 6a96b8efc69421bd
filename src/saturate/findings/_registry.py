"""Finding the rules, asking all of them, and putting their answers in order.

    [project.entry-points."saturate.findings"]
    my-rule = "my_package.my_rule"

Each entry point names a module. A rule that does not load, breaks the contract of `_api` or raises is a `RuleError`
that names it: a finding that silently vanished would be worse than one that fails.
"""

from __future__ import annotations

import importlib
import inspect
from types import ModuleType

from saturate import plugins
from saturate.errors import RuleError
from saturate.findings import _verdict
from saturate.findings._api import HEADINGS, STEPS_TO_CONCLUDE, Rule
from saturate.findings._common import concludes
from saturate.records.analysis import Analysis, Finding
from saturate.records.observations import Observations

GROUP = "saturate.findings"

#: Conclusions that a trace may not carry: the vocabulary of `Rule.needs` and of `records.analysis.Problem.blocks`.
CONCLUSIONS = frozenset({"steps", "busy", "gaps", "occupancy", "kernels", "communication", "roofline"})

#: Reported only when no rule found anything else.
ALONE = "nothing-to-gain"

#: A cause whose worth nobody knows stands in front of those that are worth less than this, as a ratio: a few percent are lost
#: beside almost any cause, and it would hide behind them.
SMALL_BOUND = 1.1

verdict = _verdict.verdict


def detect(seen: Observations, known_techniques: frozenset[str]) -> list[Finding]:
    """What all rules find, the largest bound first, among equals the surest. Those without a bound come before what is worth next to
    nothing (`SMALL_BOUND`).

    Techniques that are not in `known_techniques` are left out. Raises RuleError for a rule that does not work.
    """
    found = [finding for module in load().values() if (finding := _ask(module, seen)) is not None]
    found = [finding for finding in found if finding.id != ALONE] or found
    return [_with_techniques(finding, known_techniques) for finding in sorted(found, key=rank)]


def judges(id: str, analysis: Analysis) -> bool:
    """Whether a rule could have found something on every device of an analysis, so that its silence is an answer.

    A rule that is not installed here is taken to need everything. What a rule's `answers` says stands in the devices' `unknown`.
    """
    module = load().get(id)
    needs, fields = (module.RULE.needs, module.RULE.fields) if module else (CONCLUSIONS, frozenset())
    blocked = {conclusion for problem in analysis.integrity.problems for conclusion in problem.blocks}
    known = all(
        device.steps >= STEPS_TO_CONCLUDE and not (fields | {unanswered_field(id)}) & device.unknown.keys()
        for device in analysis.devices
    )
    return bool(analysis.devices) and known and not needs & blocked


def unanswered(seen: Observations) -> list[str]:
    """Ids of the rules whose silence is no answer, as what they look at was not observed. Of what steps or the trace do not carry
    at all, nothing is said: that has a reason elsewhere."""
    return [module.RULE.id for module in load().values() if concludes(seen, module.RULE)
            and (answers := getattr(module, "answers", None)) is not None and not answers(seen)]  # fmt: skip


def unanswered_field(id: str) -> str:
    """Under which name a device's `unknown` says so."""
    return f"findings.{id}"


def _ask(module: ModuleType, seen: Observations) -> Finding | None:
    try:
        answer = module.detect(seen)
    except Exception as error:  # third-party code may raise anything; it is named and raised again
        raise RuleError(
            f"the rule {module.RULE.id} fails",
            cause=f"{type(error).__name__}: {error}",
            evidence=plugins.origin(module)[1],
            remedy="repair or uninstall the package that registers it",
        ) from error
    if answer is None or (isinstance(answer, Finding) and answer.id == module.RULE.id):
        return answer
    raise RuleError(
        f"the rule {module.RULE.id} answered something else than a finding of its own id",
        evidence=plugins.origin(module)[1],
        remedy="saturate.testing.rules checks a rule while you write it",
    )


def rank(finding: Finding) -> tuple[float, int, str]:
    """Its place: see `detect`."""
    sureness = ("high", "medium", "low").index(finding.confidence)
    return -(SMALL_BOUND if finding.bound is None else finding.bound), sureness, finding.id


def _with_techniques(finding: Finding, known: frozenset[str]) -> Finding:
    fields = {name: getattr(finding, name) for name in finding.__struct_fields__}
    return Finding(**{**fields, "techniques": [name for name in finding.techniques if name in known]})


def load() -> dict[str, ModuleType]:
    """Every rule by id, in id order. Raises RuleError for the first one that is damaged."""
    return plugins.load("saturate.findings", GROUP, "rule", load_one, lambda module: module.RULE.id, RuleError)


def load_one(name: str) -> ModuleType:
    """Import one rule by module name and check its shape."""
    try:
        module = importlib.import_module(name)
    except Exception as error:  # third-party code may raise anything; it is named and raised again
        raise RuleError(
            f"the rule {name} does not load",
            cause=f"{type(error).__name__}: {error}",
            remedy="repair or uninstall the package that registers it",
        ) from error
    problems = check(module)
    if problems:
        raise RuleError(
            f"the rule {name} breaks the contract",
            cause="; ".join(problems),
            evidence=plugins.origin(module)[1],
            remedy="saturate.testing.rules checks a rule while you write it",
        )
    return module


def documentation(module: ModuleType) -> dict[str, str]:
    """The rule's docstring by heading."""
    return plugins.documentation(module, HEADINGS)


def check(module: ModuleType) -> list[str]:
    """Everything about the module's shape that breaks the contract; empty when it is well formed."""
    problems = [f"its docstring has no heading {name!r}" for name in plugins.undocumented(module, HEADINGS)]
    if not plugins.stripped() and inspect.cleandoc(module.__doc__ or "").partition("\n")[0] in ("", *HEADINGS):
        problems.append("its docstring has no first line")
    return problems + _metadata_problems(module) + _function_problems(module)


def _metadata_problems(module: ModuleType) -> list[str]:
    rule = getattr(module, "RULE", None)
    if not isinstance(rule, Rule):
        return ["RULE is missing or is not a Rule"]
    problems = []
    expected = plugins.expected_id(module)
    if rule.id != expected:
        problems.append(f"RULE.id is {rule.id!r}, the file says {expected!r}")
    if not isinstance(rule.title, str) or not rule.title.strip():
        problems.append("RULE.title is empty")
    if not isinstance(rule.techniques, tuple) or not all(isinstance(name, str) for name in rule.techniques):
        problems.append("RULE.techniques must be a tuple of ids")
    unknown = sorted(set(rule.needs) - CONCLUSIONS)
    if unknown:
        problems.append(f"RULE.needs holds {', '.join(map(repr, unknown))}, not of {', '.join(sorted(CONCLUSIONS))}")
    return problems


def _function_problems(module: ModuleType) -> list[str]:
    detect = getattr(module, "detect", None)
    if not callable(detect):
        return ["the function detect is missing"]
    try:
        inspect.signature(detect).bind(None)
    except TypeError:
        return ["detect must take 1 positional argument"]
    return []
