"""Which argument makes a script resume, read from its source: what `saturate drill` suggests where nothing was resumed."""

from __future__ import annotations

import ast
import re
from collections.abc import Sequence
from pathlib import Path

#: What such an option is called, the surest first.
_NAMES = tuple(re.compile(pattern) for pattern in (
    r"--resume", r"--(restore|restart|continue)", r"--(load|init|from)[-_](from[-_])?(ckpt|checkpoint|state)",
    r"--(ckpt|checkpoint)([-_](path|file|name))?$",
))
#: Options of such names that say something else: when to save, where to, or what not to do.
_OTHERS = re.compile(r"every|freq|interval|steps|epoch|num|count|save|no[-_]")

#: Written first and renamed then: gone when the script starts again.
_PASSING = re.compile(r"te?mp|partial|^\.")

#: Signs that a script takes arguments, wherever they may be declared.
_TAKES = re.compile(r"argv|pars|click|typer|fire|hydra|tyro|docopt|absl|cli\b", re.IGNORECASE)

#: Libraries that make an option of each field of a dataclass, their own classes' fields included.
_BY_FIELDS = re.compile(r"\b(HfArgumentParser|TrlParser|simple_parsing|tyro|draccus)\b")

#: Libraries that make an option of each parameter of a function that they are given, and what takes it.
_BY_PARAMETERS = re.compile(r"\b(fire|typer|jsonargparse)\b")
_TAKES_FUNCTION = ("Fire", "run", "CLI", "auto_cli")

#: What stands for a file that the script names anew at each save.
PATH = "PATH"


def resume_words(source: str, saved: Sequence[Sequence[str]]) -> list[str]:
    """The words to start the script with again, so that it goes on from a checkpoint: none where the source has no such
    option, `--resume PATH` where it does not tell.

    source: of the script, "" where there is none. saved: the files of each save that was seen, in order. A file that
    every save wrote is named; others have a number in their name that the next run may not reach.

    >>> resume_words("parser.add_argument('--resume-from', default=None)", [["out/last.pt"], ["out/last.pt"]])
    ['--resume-from', 'out/last.pt']
    >>> resume_words("parser.add_argument('--resume', action='store_true')", [])
    ['--resume']
    >>> resume_words("import torch", [])
    []
    >>> resume_words("from transformers import HfArgumentParser\\n@dataclass\\nclass More:\\n    resume: bool = False", [])
    ['--resume']
    """
    tree = _tree(source)
    options = _options(source, tree)
    declared = [*(options or ()), *_fields(source, tree), *_parameters(source, tree), *_of_a_library(source, tree)]
    found = [(rank, option, flag) for option, flag in declared
             for rank, name in enumerate(_NAMES) if name.match(option) and not _OTHERS.search(option)]
    if not found and (by_value := _by_value(source, tree, [option for option, _ in declared])):
        return [by_value]
    if options is not None and not found:
        return []
    _, option, flag = min(found, default=(0, "--resume", False), key=lambda each: each[0])
    if flag:
        return [option]
    always = [path for path in (saved[0] if saved else ())
              if all(path in files for files in saved) and not _PASSING.search(Path(path).name)]
    return [option, always[0] if len(always) == 1 else PATH]


def _tree(source: str) -> ast.Module | None:
    try:
        return ast.parse(source)
    except (SyntaxError, ValueError, RecursionError):       # a shell script, another Python's
        return None


def _options(source: str, tree: ast.Module | None) -> list[tuple[str, bool]] | None:
    """The options that a source declares by argparse, click or typer, in order: name, and whether it is a flag. None where it
    may take others: it declares none and does take arguments, or makes their names, or is no Python."""
    if tree is None:
        return None
    calls = sorted((node for node in ast.walk(tree) if isinstance(node, ast.Call) and _declares(node)), key=lambda node: node.lineno)
    found = [(text, _is_flag(call)) for call in calls if (text := _option(call)) is not None]
    made = any(not isinstance(word, ast.Constant) for call in calls for word in call.args)
    return found if found or not (made or not source.strip() or _TAKES.search(source)) else None


def _fields(source: str, tree: ast.Module | None) -> list[tuple[str, bool]]:
    """The options that a library makes of the fields of the script's own dataclasses: name, and whether it is a flag."""
    if tree is None or not _BY_FIELDS.search(source):
        return []
    kinds = [node for node in ast.walk(tree) if isinstance(node, ast.ClassDef) and any("dataclass" in ast.unparse(d) for d in node.decorator_list)]
    return [(f"--{field.target.id}", ast.unparse(field.annotation) == "bool") for kind in kinds for field in kind.body
            if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name)]


def _parameters(source: str, tree: ast.Module | None) -> list[tuple[str, bool]]:
    """The options that a library makes of the parameters of the functions that it is given: name, and whether it is a flag."""
    if tree is None or not _BY_PARAMETERS.search(source):
        return []
    given = {name.id for call in ast.walk(tree) if isinstance(call, ast.Call) and _called(call) in _TAKES_FUNCTION
             for name in ast.walk(call) if isinstance(name, ast.Name)}
    functions = [node for node in tree.body if isinstance(node, ast.FunctionDef)
                 and (node.name in given or any("command" in ast.unparse(d) for d in node.decorator_list))]
    dashes = not re.search(r"\b(fire|jsonargparse)\b", source)       # as typer writes them
    found = [(one.arg, one.annotation is not None and ast.unparse(one.annotation) == "bool")
             for node in functions for one in (*node.args.args, *node.args.kwonlyargs)]
    return [(f"--{name.replace('_', '-') if dashes else name}", flag) for name, flag in found]


def _of_a_library(source: str, tree: ast.Module | None) -> list[tuple[str, bool]]:
    """The option of a library that the script lets read its arguments. Hugging Face's Trainer goes on from nothing by itself: a script
    that resumes says so."""
    if re.search(r"\b(Hf|Trl)(Argument)?Parser\b", source) and "resume_from_checkpoint" in source:
        return [("--resume_from_checkpoint", False)]
    clis = [call for call in ast.walk(tree) if isinstance(call, ast.Call) and _called(call) == "LightningCLI"] if tree is not None else []
    if any(all(word.arg != "run" for word in call.keywords) for call in clis):      # otherwise the script itself calls the trainer
        return [("--ckpt_path", False)]
    return []


def _by_value(source: str, tree: ast.Module | None, declared: list[str]) -> str | None:
    """Where an argument that says how to begin is compared with "resume": `if init_from == "resume"`. Of nanoGPT and what came after
    it, every variable of the script is an argument, read by a configurator.py."""
    pairs = [(node.left, word) for node in ast.walk(tree or ast.Module([], [])) if isinstance(node, ast.Compare) for word in node.comparators]
    names = [getattr(left, "id", None) or getattr(left, "attr", "") for left, word in pairs if isinstance(word, ast.Constant) and word.value == "resume"]
    options = [f"--{name}" for name in names if name]
    return next((f"{option}=resume" for option in options if option in declared or "configurator.py" in source), None)


def _called(call: ast.Call) -> str:
    return call.func.attr if isinstance(call.func, ast.Attribute) else getattr(call.func, "id", "")


def _declares(call: ast.Call) -> bool:
    return _called(call) in ("add_argument", "option", "Option")


def _option(call: ast.Call) -> str | None:
    words = [word.value for word in call.args if isinstance(word, ast.Constant) and isinstance(word.value, str)]
    return next((word.split("/")[0] for word in words if word.startswith("--")), None)


def _is_flag(call: ast.Call) -> bool:
    given = {keyword.arg: keyword.value for keyword in call.keywords}
    action, flag = given.get("action"), given.get("is_flag")
    return (isinstance(action, ast.Constant) and str(action.value).startswith("store_")) or \
        (isinstance(action, ast.Attribute) and action.attr == "BooleanOptionalAction") or \
        (isinstance(flag, ast.Constant) and bool(flag.value))


def short(path: str, cwd: Path) -> str:
    """Below the working directory, where a resumed process stands as well, from there."""
    inside = Path(path)
    return str(inside.relative_to(cwd)) if inside.is_relative_to(cwd) else path


def source_of(script: Path | None, limit_bytes: int = 4 << 20) -> str:
    """The text of a script, "" where there is none to be read."""
    try:
        if script is None or script.stat().st_size > limit_bytes:
            return ""
        return script.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""
