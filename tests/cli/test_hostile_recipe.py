"""A recipe may come from anywhere: what it holds is shown as text, and never acts on a terminal or a shell."""

from __future__ import annotations

import shlex

import pytest

from saturate.cli.main import main
from saturate.machine import fingerprint
from saturate.records.recipe import MadeFor

BELL = "\\u001b]0;yours\\u0007\\u009b2J\\u202e"
LIBRARY = "/opt/$(reboot)\\u001b[2J;id/libjemalloc.so.2"


@pytest.fixture
def recipe(tmp_path):
    path = tmp_path / "recipe.toml"
    path.write_text(f"""schema = 1
[made_for]
device = "cpu"
cpu = "x {BELL} y"
torch = "2.13 {BELL}"
[[technique]]
id = "allocator"
options = {{ kind = "jemalloc", library = "{LIBRARY}" }}
why = "{BELL}"
""", encoding="utf-8")
    return path


@pytest.mark.parametrize("words", [["show"], ["show", "--as-code"], ["validate"], ["diff"]])
def test_no_control_character_reaches_the_terminal(words, recipe, capsys):
    if words == ["validate"]:
        recipe.write_text(recipe.read_text() + f'"{BELL}" = 1\n')
    else:
        recipe.write_text(recipe.read_text().replace('kind = "jemalloc"', f'kind = "jemalloc", "{BELL}" = 1'))
    other = recipe.with_name("empty.toml")
    other.touch()
    main(["recipe", *words, str(recipe), *([str(other)] if words == ["diff"] else [])])
    shown = "".join(capsys.readouterr())
    assert shown and all(char.isprintable() or char == "\n" for char in shown)


def test_no_name_of_a_recipes_own_does_either(tmp_path, capsys):
    """Keys of options, ids that are there twice, and the file's own name were printed as they are."""
    path = tmp_path / "x\x1b[31m.toml"
    entry = f'[[technique]]\nid = "gc-freeze"\noptions = {{ "{BELL}" = 1 }}\n[[technique]]\nid = "a{BELL}"\n'
    for text in (f"schema = 1\n{entry}{entry}", ""):
        path.write_text(text, encoding="utf-8")
        main(["recipe", "validate", str(path)])
        shown = "".join(capsys.readouterr())
        assert shown and all(char.isprintable() or char == "\n" for char in shown)


def test_the_lines_to_write_by_hand_hold_no_command_of_a_recipes(recipe, capsys):
    main(["recipe", "show", "--as-code", str(recipe)])
    (line,) = (line for line in capsys.readouterr().out.splitlines() if "LD_PRELOAD" in line)
    assert len(shlex.split(line)) == 2 and "$(reboot)" in shlex.split(line)[1]
    assert "'" in line


def test_what_has_changed_is_one_line_of_text():
    (said,) = fingerprint.compare(MadeFor(cpu="a\n\x1b[2Jb"), MadeFor(cpu="c"), ["compile"])
    assert said.isprintable() and "changed from a??[2Jb to c" in said
