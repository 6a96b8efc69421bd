"""Show, compare and validate recipes."""

from __future__ import annotations

import argparse
import json
from typing import Any

from saturate.cli._output import answer, paint, percent, safe_line, show_json, table
from saturate.errors import clean

#: Above the lines of several techniques: each stands for itself, and two may make the same loader, or call the same model.
_TOGETHER = ("# Together: arguments of one call, DataLoader(...) for one, belong into one call; contexts around one call nest; and what is\n"
             "# compiled is called in place of the model.")


def configure(parser: argparse.ArgumentParser) -> None:
    actions = parser.add_subparsers(dest="action", required=True, metavar="show | diff | validate")
    show = actions.add_parser("show", help="what a recipe does and what was measured", description="Show one recipe.")
    show.add_argument("file")
    form = show.add_mutually_exclusive_group()
    form.add_argument("--as-code", action="store_true", help="print the lines to write to have the same without saturate")
    form.add_argument("--json", action="store_true", help="print one JSON object")
    diff = actions.add_parser("diff", help="what differs between two recipes", description="Compare two recipes.")
    diff.add_argument("a")
    diff.add_argument("b")
    validate = actions.add_parser("validate", help="everything that is wrong with a recipe",
                                  description="List everything that is wrong with a recipe; exit code 2 when something is.")
    validate.add_argument("file")
    validate.add_argument("--json", action="store_true", help="print one JSON object")


def execute(arguments: argparse.Namespace) -> int:
    if arguments.action == "diff":
        return _diff(arguments.a, arguments.b)
    if arguments.action == "validate":
        return _validate(arguments.file, arguments.json)
    return _show(arguments)


def _show(arguments: argparse.Namespace) -> int:
    from saturate.records import recipe as recipes

    recipe = recipes.read(arguments.file)
    if arguments.json:
        show_json(recipe)
    elif arguments.as_code:
        print(clean(as_code(recipe, arguments.file)))
    else:
        print(summary(recipe))
    return 0


def as_code(recipe: Any, name: str) -> str:
    """The lines a user would write instead of the recipe. Raises RecipeError when this installation cannot apply it."""
    from saturate.errors import RecipeError
    from saturate.records import recipe as recipes
    from saturate.records.options import options_from
    from saturate.techniques import _registry

    registry = _registry.load()
    problems = recipes.validate(recipe, registry)
    if problems:
        raise RecipeError(f"{name} does not validate: {problems[0].message}", remedy=problems[0].remedy)
    parts = []
    for entry in recipe.techniques:
        module = registry[entry.id]
        code = module.as_code(options_from(module, entry.options)).strip("\n")
        parts.append(f"# {entry.id}: {module.TECHNIQUE.title}\n{code}")
    return "\n\n".join([_TOGETHER] * (len(parts) > 1) + parts) or "# This recipe changes nothing."


def summary(recipe: Any) -> str:
    """The recipe for a person: the whole first, then each technique."""
    lines = [paint(_headline(recipe), "bold")]
    made_for = recipe.made_for
    places = [made_for.device_name or made_for.cpu or made_for.device, made_for.torch and f"torch {made_for.torch}",
              made_for.python and f"Python {made_for.python}", made_for.script and f"script {made_for.script[:12]}"]
    if any(places):
        lines.append("made for: " + safe_line(", ".join(filter(None, places))))
    for entry in recipe.techniques:
        options = ", ".join(f"{name}={_value(value)}" for name, value in entry.options.items())
        lines += ["", f"{paint(safe_line(entry.id), 'bold')}{f' ({safe_line(options)})' if options else ''}"]
        facts = [_interval(entry.gain, entry.gain_ci, percent), entry.numerics and f"numerics: {safe_line(entry.numerics)}"]
        lines += [f"  {fact}" for fact in filter(None, facts)]
        if entry.why:
            lines.append(f"  {safe_line(entry.why)}")
    return "\n".join(lines)


def _headline(recipe: Any) -> str:
    if not recipe.techniques:
        return "This recipe changes nothing."
    count = len(recipe.techniques)
    evidence = recipe.evidence
    verified = {True: "verified", False: "NOT verified", None: "verification unknown"}[evidence.verified]
    speed = _interval(evidence.speedup, evidence.speedup_ci, lambda value: f"{value:.2f}x")
    times = f"{evidence.baseline_ms:.4g} -> {evidence.tuned_ms:.4g} ms per step" if evidence.baseline_ms and evidence.tuned_ms else ""
    return ", ".join(filter(None, (f"{count} technique{'s' * (count > 1)}", speed, times, verified)))


def _interval(value: float | None, interval: Any, form: Any) -> str:
    if value is None:
        return ""
    return form(value) + (f" [{form(interval[0])}, {form(interval[1])}]" if interval else "")


def _value(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)


def _diff(a: str, b: str) -> int:
    from saturate.records import recipe as recipes

    lines = recipes.diff(recipes.read(a), recipes.read(b))
    print(clean("\n".join(lines)) or "no differences")
    return 0


def _validate(path: str, as_json: bool) -> int:
    from saturate.records import recipe as recipes
    from saturate.techniques import _registry

    problems = recipes.check(path, _registry.load())
    if as_json:
        shown = [{"message": p.message, "where": p.where(), "line": p.line, "column": p.column, "remedy": p.remedy} for p in problems]
        answer({"schema": recipes.SCHEMA, "path": path, "valid": not problems, "problems": shown})
    elif problems:
        rows = [(":".join(str(part) for part in (path, p.line, p.column) if part is not None),
                 ": ".join(filter(None, (safe_line(p.where()), p.message))) + (f"  ({p.remedy})" if p.remedy else "")) for p in problems]
        print(clean(table(rows)))
    else:
        print(clean(f"{path} is a valid recipe"))
    return 2 if problems else 0
