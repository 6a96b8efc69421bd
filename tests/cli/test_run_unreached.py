"""A run whose Python the recipe does not reach is told so, where that can be read before it starts."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from saturate.records import recipe as recipes
from saturate.records.recipe import Entry, Recipe


@pytest.fixture
def said(tmp_path: Path, clean_environment: dict[str, str]):
    """What saturate says of a command; programs that need not be here do nothing."""
    recipes.write(tmp_path / "recipe.toml", Recipe(techniques=[Entry(id="zero-grad-none")]))
    for name in ("sudo", "ssh", "docker"):
        (tmp_path / name).write_text("#!/bin/sh\n", encoding="utf-8")
        (tmp_path / name).chmod(0o755)
    clean_environment["PATH"] = f"{tmp_path}:{clean_environment['PATH']}"

    def run(*command: str) -> str:
        words = [sys.executable, "-m", "saturate", "run", "recipe.toml", "--", *command]
        done = subprocess.run(words, cwd=tmp_path, env=clean_environment, capture_output=True, text=True, timeout=60)
        assert done.returncode == 0, done.stderr
        return done.stderr

    return run


@pytest.mark.parametrize(("command", "expected"), [
    (("bash", "-c", "python3 -I -c 1"), "line 1 of the command given to bash starts `python -I`"),
    (("bash", "-ec", "true\npython3 -E -c 1"), "line 2 of the command given to bash starts `python -E`"),
    (("nohup", "bash", "-o", "pipefail", "-c", "PYTHONPATH=. python3 -c 1"), "sets PYTHONPATH"),
    (("bash", "-c", "PYTHONPATH=.:$PYTHONPATH python3 -c 1"), ""),
    (("env", "-uPYTHONPATH", "python3", "-c", "1"), ""),        # what it takes out is put in again
    (("nice", "env", "-i", "python3", "-c", "1"), ""),
    (("bash", "-c", "nice env -i python3 -c 1"), "line 1 of the command given to bash starts Python by env"),
    (("env", "-S", "python3 -c 1"), "the options of env are not all known here"),
    (("sudo", "python3", "-c", "1"), "sudo clears the environment"),
    (("sudo", "-E", "python3", "-c", "1"), "sudo takes PYTHONPATH out of the environment"),         # it is in the list of what -E does not keep
    (("sudo", "--preserve-env", "python3", "-c", "1"), "sudo takes PYTHONPATH out of the environment"),
    (("sudo", "--preserve-env=HOME", "python3", "-c", "1"), "sudo clears the environment"),
    (("sudo", "--preserve-env=PYTHONPATH,SATURATE_PLAN", "python3", "-c", "1"), ""),
    (("docker", "run", "image", "python3", "t.py"), "docker run does not hand on the environment"),
    (("ssh", "host", "python3 t.py"), "ssh does not hand on the environment"),
])
def test_what_stands_on_the_command_line(command, expected, said):
    found = said(*command)
    assert (expected in found and "the recipe cannot take effect" in found) if expected else "take effect" not in found, found


@pytest.mark.parametrize(("line", "told"), [
    ("export PYTHONPATH=$PWD/src", True), ("PYTHONPATH=. python3 -c 1", True), ("export PYTHONPATH=$(pwd)", True), ("unset PYTHONPATH", True),
    ("env A=1 PYTHONPATH=src python3 -c 1", True), ("export PYTHONPATH=$PWD/src:$PYTHONPATH", False), ("export PYTHONPATH=$(pwd):${PYTHONPATH:-}", False),
    ("PYTHONPATH=src${PYTHONPATH:+:$PYTHONPATH} python3 -c 1", False), ("echo PYTHONPATH=.", False), ("MY_PYTHONPATH=. true", False),
    ("sudo python3 -c 1", True), ("sudo -E python3 -c 1", True),
    ("env -u PYTHONPATH python3 -c 1", True), ("exec env -i A=1 python3 -c 1", True), ("env -i PYTHONPATH=$PYTHONPATH python3 -c 1", True),
    ("env -u WANDB_MODE python3 -c 1", False), ("env -i true", False), ('env -i PYTHONPATH=$PYTHONPATH SATURATE_PLAN="$SATURATE_PLAN" python3 -c 1', False),
])
@pytest.mark.parametrize("options", [(), ("-e",)])
def test_a_script_that_takes_the_recipe_off_the_path(line, told, options, tmp_path, said):
    (tmp_path / "train.sh").write_text(f"true\n{line}\n", encoding="utf-8")
    assert ("line 2 of " in said("bash", *options, "train.sh", "-c", "config")) == told


@pytest.mark.parametrize(("command", "told"), [(("./train",), True), (("nohup", "./train"), True), ((sys.executable, "train"), False)])
def test_a_first_line_that_keeps_the_recipe_out(command, told, tmp_path, said):
    (tmp_path / "train").write_text(f"#!{sys.executable} -Es\nprint('trains')\n", encoding="utf-8")
    (tmp_path / "train").chmod(0o755)
    assert ("the first line of " in said(*command)) == told
