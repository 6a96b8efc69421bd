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
    options = _options(source)
    found = [(rank, option, flag) for option, flag in [*(options or ()), *_fields(source)]
             for rank, name in enumerate(_NAMES) if name.match(option) and not _OTHERS.search(option)]
    if options is not None and not found:
        return []
    _, option, flag = min(found, default=(0, "--resume", False), key=lambda each: each[0])
    if flag:
        return [option]
    always = [path for path in (saved[0] if saved else ())
              if all(path in files for files in saved) and not _PASSING.search(Path(path).name)]
    return [option, always[0] if len(always) == 1 else PATH]


def _options(source: str) -> list[tuple[str, bool]] | None:
    """The options that a source declares by argparse, click or typer, in order: name, and whether it is a flag. None where it
    may take others: it declares none and does take arguments, or makes their names, or is no Python."""
    try:
        tree = ast.parse(source)
    except (SyntaxError, ValueError, RecursionError):       # a shell script, another Python's
        return None
    calls = sorted((node for node in ast.walk(tree) if isinstance(node, ast.Call) and _declares(node)), key=lambda node: node.lineno)
    found = [(text, _is_flag(call)) for call in calls if (text := _option(call)) is not None]
    made = any(not isinstance(word, ast.Constant) for call in calls for word in call.args)
    return found if found or not (made or not source.strip() or _TAKES.search(source)) else None


def _fields(source: str) -> list[tuple[str, bool]]:
    """The options that a library makes of the fields of the script's own dataclasses: name, and whether it is a flag."""
    if not _BY_FIELDS.search(source):
        return []
    try:
        tree = ast.parse(source)
    except (SyntaxError, ValueError, RecursionError):
        return []
    kinds = [node for node in ast.walk(tree) if isinstance(node, ast.ClassDef) and any("dataclass" in ast.unparse(d) for d in node.decorator_list)]
    return [(f"--{field.target.id}", ast.unparse(field.annotation) == "bool") for kind in kinds for field in kind.body
            if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name)]


def _declares(call: ast.Call) -> bool:
    called = call.func.attr if isinstance(call.func, ast.Attribute) else getattr(call.func, "id", "")
    return called in ("add_argument", "option", "Option")


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
