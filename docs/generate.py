"""Write docs/techniques/*.md and the table in docs/techniques/README.md from the techniques' own docstrings.

    python docs/generate.py            write
    python docs/generate.py --check    exit 1 when a page is not what the docstrings say
"""

from __future__ import annotations

import sys
from pathlib import Path

from saturate.techniques import _registry
from saturate.techniques._api import HEADINGS

FOLDER = Path(__file__).resolve().parent / "techniques"
NOTE = "<!-- Made by docs/generate.py from the technique's docstring. -->\n"


def pages() -> dict[str, str]:
    """File name -> text, for every built-in technique and the overview."""
    found = {}
    rows = ["| technique | what it does | numerics | applied at |", "|---|---|---|---|"]
    for identity, module in _registry.load().items():
        if not module.__name__.startswith("saturate.techniques."):
            continue
        technique = module.TECHNIQUE
        sections = _registry.documentation(module)
        body = "\n\n".join(f"## {heading}\n\n{sections[heading]}" for heading in HEADINGS)
        facts = f"Numerics class `{technique.numerics}`, stage `{technique.stage}`, since {technique.since}, {technique.status}."
        found[f"{identity}.md"] = f"{NOTE}# {identity}\n\n{technique.title}. {facts}\n\n{body}\n"
        rows.append(f"| [{identity}]({identity}.md) | {technique.title} | `{technique.numerics}` | {technique.stage} |")
    found["README.md"] = f"{NOTE}# Techniques\n\n" + "\n".join(rows) + "\n"
    return found


def main(check: bool) -> int:
    expected = pages()
    if check:
        stale = [name for name, text in expected.items()
                 if not (FOLDER / name).exists() or (FOLDER / name).read_text(encoding="utf-8") != text]
        print("stale: " + ", ".join(stale) if stale else "up to date")
        return 1 if stale else 0
    FOLDER.mkdir(exist_ok=True)
    for name, text in expected.items():
        (FOLDER / name).write_text(text, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main("--check" in sys.argv[1:]))
