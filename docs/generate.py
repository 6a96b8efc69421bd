"""Write docs/techniques/*.md, docs/inference/*.md and docs/findings/*.md, with a table in each README.md, from the modules'
docstrings; and docs/files/README.md, which has the first sentence of every file in src.

    python docs/generate.py            write
    python docs/generate.py --check    exit 1 when a page is not what the docstrings say
"""

from __future__ import annotations

import ast
import inspect
import re
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path
from types import ModuleType

from saturate.findings import _registry as rules
from saturate.inference.techniques import _registry as inference
from saturate.techniques import _registry as techniques
from saturate.techniques._api import HEADINGS

FOLDER = Path(__file__).resolve().parent
SOURCE = FOLDER.parent / "src" / "saturate"
NOTE = "<!-- Made by docs/generate.py from the {}'s docstring. -->\n"


def pages() -> dict[str, str]:
    """Path below docs/ -> text, for every built-in technique and rule, the overviews, and the list of all files."""
    return {**_of_techniques("techniques", "Techniques", techniques.load()),
            **_of_techniques("inference", "Inference techniques", inference.load()), **_of_rules(), **_of_files()}


def _of_techniques(folder: str, title: str, modules: Mapping[str, ModuleType]) -> dict[str, str]:
    found = {}
    rows = ["| technique | what it does | numerics | applied at |", "|---|---|---|---|"]
    note = NOTE.format("technique")
    for identity, module in modules.items():
        if not module.__name__.startswith("saturate."):
            continue
        technique = module.TECHNIQUE
        sections = techniques.documentation(module)
        body = "\n\n".join(f"## {heading}\n\n{sections[heading]}" for heading in HEADINGS)
        facts = f"Numerics class `{technique.numerics}`, stage `{technique.stage}`, since {technique.since}, {technique.status}."
        found[f"{folder}/{identity}.md"] = f"{note}# {identity}\n\n{technique.title}. {facts}\n\n{body}\n"
        rows.append(f"| [{identity}]({identity}.md) | {technique.title} | `{technique.numerics}` | {technique.stage} |")
    found[f"{folder}/README.md"] = f"{note}# {title}\n\n" + "\n".join(rows) + "\n"
    return found


def _of_rules() -> dict[str, str]:
    found = {}
    rows = ["| finding | what it means | techniques |", "|---|---|---|"]
    note, existing = NOTE.format("rule"), techniques.load()
    for identity, module in rules.load().items():
        if not module.__name__.startswith("saturate.findings."):
            continue
        first = " ".join(inspect.cleandoc(module.__doc__ or "").partition("\n\n")[0].split())
        helped_by = _links((name for name in module.RULE.techniques if name in existing), "../techniques/")
        body = "\n\n".join(f"## {heading}\n\n{text}" for heading, text in rules.documentation(module).items())
        facts = f"Since {module.RULE.since}. Techniques that address it: {helped_by or 'none'}."
        found[f"findings/{identity}.md"] = f"{note}# {identity}\n\n{first}\n\n{facts}\n\n{body}\n"
        rows.append(f"| [{identity}]({identity}.md) | {first} | {helped_by} |")
    found["findings/README.md"] = f"{note}# Findings\n\n" + "\n".join(rows) + "\n"
    return found


def _of_files() -> dict[str, str]:
    """What each file says of itself. Techniques and rules have pages of their own."""
    rooms: dict[str, list[str]] = {}
    for path in sorted(SOURCE.rglob("*.py")):
        room = path.parent.relative_to(SOURCE).as_posix()
        text = ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) or ""
        if text and (path.name.startswith("_") or room.partition("/")[2] != "techniques" and room not in ("techniques", "findings")):
            rooms.setdefault(room, []).append(f"- `{path.name}`: {_first_sentence(text)}")
    sections = [f"## {'beside the rooms' if room == '.' else f'{room}/'}\n\n" + "\n".join(lines) for room, lines in sorted(rooms.items())]
    note = NOTE.replace("the {}'s docstring", "the docstrings of all files")
    return {"files/README.md": f"{note}# Every file, in its own words\n\n" + "\n\n".join(sections) + "\n"}


def _first_sentence(text: str) -> str:
    first = " ".join(text.partition("\n\n")[0].split())
    end = re.search(r"[.?!](?= [A-Z`])", first)
    return first[: end.end()] if end else first


def _links(names: Iterable[str], folder: str) -> str:
    return ", ".join(f"[{name}]({folder}{name}.md)" for name in names)


def main(check: bool) -> int:
    expected = pages()
    folders = {FOLDER / name.partition("/")[0] for name in expected}
    surplus = [path.relative_to(FOLDER).as_posix() for folder in sorted(folders) for path in folder.glob("*.md")
               if path.relative_to(FOLDER).as_posix() not in expected]
    if check:
        stale = [name for name, text in expected.items()
                 if not (FOLDER / name).exists() or (FOLDER / name).read_text(encoding="utf-8") != text]
        print("stale: " + ", ".join(stale + surplus) if stale or surplus else "up to date")
        return 1 if stale or surplus else 0
    for folder in folders:
        folder.mkdir(exist_ok=True)
    for name, text in expected.items():
        (FOLDER / name).write_text(text, encoding="utf-8")
    for name in surplus:
        (FOLDER / name).unlink()
    return 0


if __name__ == "__main__":
    sys.exit(main("--check" in sys.argv[1:]))
