"""The commands of the documentation are ones that exist."""

from __future__ import annotations

import importlib
import itertools
import re
import shlex
from pathlib import Path

import pytest

from saturate.cli import main
from saturate.errors import UsageError
from saturate.records import recipe as recipes
from saturate.records.recipe import Entry, Recipe

ROOT = Path(__file__).resolve().parents[2]
PAGES = [ROOT / "README.md", *sorted(ROOT.glob("docs/**/*.md")), *sorted(ROOT.glob("examples/*.md"))]
MODULES = {name: module for name, module, _ in main.VERBS}


def command_lines(text: str) -> list[list[str]]:
    """The words of the lines that begin with `saturate` in indented or fenced blocks, without their comments."""
    whole = re.sub(r"\\\n\s*", " ", text)
    lines = re.findall(r"^(?: {4,}|\t|\$ )?(?:next +)?(saturate [a-z]+ ?.*)$", whole, re.MULTILINE)
    return [shlex.split(line, comments=True) for line in lines]


def quoted_commands(text: str) -> list[list[str]]:
    """The words of commands inside a sentence, as in `saturate tune --budget 4m`."""
    return [found.split() for found in re.findall(r"`(saturate [a-z]+[^`\n|\\]*)`", text)]


def parsed(words: list[str]) -> tuple[object, list[str]]:
    """What the verb's own parser makes of a line, and the command behind `--`. Raises UsageError where it is none."""
    _, verb, *rest = words
    module = importlib.import_module(MODULES[verb])
    cut = rest.index("--") if main.takes_command(module) and "--" in rest else len(rest)
    arguments, extra = main.parser_of(verb, module).parse_known_args(rest[:cut])
    assert not extra, f"{shlex.join(words)}: {extra} are no arguments of it"
    assert bool(rest[cut + 1:]) == main.takes_command(module), f"{shlex.join(words)}: a command belongs behind --"
    return arguments, rest[cut + 1:]


ALL_LINES = {shlex.join(words): words for page in PAGES for words in command_lines(page.read_text(encoding="utf-8"))}


@pytest.mark.parametrize("line", ALL_LINES)
def test_every_command_line_is_understood(line):
    parsed(ALL_LINES[line])


def test_the_lines_are_found():
    assert {words[1] for words in ALL_LINES.values()} >= {"tune", "run", "fit", "drill", "doctor", "analyze", "optimize", "checkpoint"}
    assert command_lines("    saturate tune --only a,b \\\n      -- python x.py    # why\nsaturate is a word") == [
        ["saturate", "tune", "--only", "a,b", "--", "python", "x.py"], ["saturate", "is", "a", "word"]]


@pytest.mark.parametrize("line", ["tune --bugdet 4m -- python x.py", "tune --race sideways -- python x.py", "fit --memory 4GiB", "bench"])
def test_a_line_that_is_not_understood_is_noticed(line):
    with pytest.raises((AssertionError, UsageError)):
        parsed(["saturate", *line.split()])


def test_every_option_in_a_sentence_exists():
    for page in PAGES:
        for _, verb, *words in quoted_commands(page.read_text(encoding="utf-8")):
            known = main.options_of(main.parser_of(verb, importlib.import_module(MODULES[verb])))
            given = itertools.takewhile(lambda word: word != "--", words)
            unknown = {word.partition("=")[0] for word in given if word.startswith("--")} - set(known)
            assert not unknown, f"{page.name}: saturate {verb} has no {unknown}"


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A folder with two recipes, as the commands of the documentation name them."""
    monkeypatch.chdir(tmp_path)
    recipes.write(tmp_path / "recipe.toml", Recipe(techniques=[Entry(id="bf16-autocast"), Entry(id="fused-optimizer")]))
    recipes.write(tmp_path / "other.toml", Recipe())
    return tmp_path


@pytest.mark.parametrize("line", [
    "techniques", "techniques --inference", "explain", "explain compile", "explain inconclusive", "recipe show recipe.toml",
    "recipe show recipe.toml --as-code", "recipe validate recipe.toml", "recipe diff recipe.toml other.toml",
    *(line.removeprefix("saturate ") for line in ALL_LINES
      if line.startswith("saturate checkpoint advise") and " -- " not in line and "--forecast" not in line),
])
def test_what_needs_no_training_runs(folder, capsys, line):
    code = main.main(shlex.split(line))
    out, err = capsys.readouterr()
    assert (code, err) == (0, "") and out.strip()


def test_the_doctor_answers(folder, capsys):
    assert main.main(["doctor"]) in (0, 3) and "saturate" in capsys.readouterr().out
