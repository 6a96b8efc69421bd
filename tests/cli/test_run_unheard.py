"""A run whose standard error takes nothing: what saturate has to say is lost, and the training is what it is without it."""

from __future__ import annotations

import subprocess
import sys

import pytest

from saturate.records import recipe as recipes
from saturate.records.recipe import Entry, MadeFor, Recipe

#: `mine` takes the number of a standard error that is closed.
_TRAIN = """
mine = open("mine", "w")
import torch, torch.nn as nn
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
for update in range(60):
    loss = model(torch.randn(4, 8)).pow(2).mean() * (float("nan") if update == 40 else 1.0)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    torch.save(model.state_dict(), "model.pt")
mine.write("mine")
mine.close()
print("done", "forward" in vars(model), open("mine").read())
"""


@pytest.mark.parametrize(("stream", "options", "ends"), [
    ("2>&-", (), (0, "done True mine\n")), ("2>/dev/full", (), (0, "done True mine\n")),
    ("2>&-", ("--on-divergence", "stop"), (5, "")), ("2>/dev/full", ("--on-divergence", "stop"), (5, "")),
])
def test_what_cannot_be_said_changes_nothing(stream, options, ends, tmp_path, clean_environment):
    (tmp_path / "train.py").write_text(_TRAIN, encoding="utf-8")
    # Each has something to say: another torch and Python, a convolution that is not there, checkpoints, a loss that diverges.
    recipes.write(tmp_path / "recipe.toml", Recipe(
        made_for=MadeFor(torch="0.1", python="3.0", script="0" * 64),
        techniques=[Entry(id=identity) for identity in ("bf16-autocast", "channels-last", "async-checkpoint", "zero-grad-none")]))
    words = [sys.executable, "-m", "saturate", "run", *options, "recipe.toml", "--", sys.executable, "train.py"]
    done = subprocess.run(["bash", "-c", f'"$@" {stream}', "bash", *words], cwd=tmp_path, env=clean_environment, text=True,
                          stdout=subprocess.PIPE, timeout=120)
    assert (done.returncode, done.stdout) == ends


def test_a_standard_output_that_takes_nothing_does_not_hide_the_exit_code(tmp_path, clean_environment):
    (tmp_path / "train.py").write_text("print('begins')\n" + _TRAIN, encoding="utf-8")
    recipes.write(tmp_path / "recipe.toml", Recipe(techniques=[Entry(id="zero-grad-none")]))
    words = [sys.executable, "-m", "saturate", "run", "--on-divergence", "stop", "recipe.toml", "--", sys.executable, "train.py"]
    with open("/dev/full", "w") as full:
        done = subprocess.run(words, cwd=tmp_path, env=clean_environment, stdout=full, stderr=subprocess.PIPE, text=True, timeout=120)
    assert done.returncode == 5 and "the loss became nan at step 41" in done.stderr


@pytest.mark.parametrize(("line", "told"), [
    ("python3 -I -c 'print(1)'", True), ("true && X=1 python3 -I -c 1; true", True), ("python3 -c 1 | python3 -E -c 1", True),
    ("# python3 -I train.py", False), ("echo python3 -I x", False), ("python3 -c 'print(1)' -I", False), ("echo 'a\nb'", False),
])
@pytest.mark.parametrize("command", [("bash", "train.sh"), ("./train.sh",)])
def test_a_shell_script_whose_python_cannot_be_reached(line, told, command, tmp_path, clean_environment):
    (tmp_path / "train.sh").write_text(f"#!/usr/bin/env bash\n\n{line}\n", encoding="utf-8")
    (tmp_path / "train.sh").chmod(0o755)
    recipes.write(tmp_path / "recipe.toml", Recipe(techniques=[Entry(id="zero-grad-none")]))
    words = [sys.executable, "-m", "saturate", "run", "recipe.toml", "--", *command]
    done = subprocess.run(words, cwd=tmp_path, env=clean_environment, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0 and ("line 3 of " in done.stderr and "train.sh starts `python -" in done.stderr) == told, done.stderr


def test_a_program_in_python_is_not_read_as_a_shell_script(tmp_path, clean_environment):
    (tmp_path / "train").write_text(f'#!{sys.executable}\nprint("python -I")\n"""\npython -I x\n"""\n', encoding="utf-8")
    (tmp_path / "train").chmod(0o755)
    recipes.write(tmp_path / "recipe.toml", Recipe(techniques=[Entry(id="zero-grad-none")]))
    words = [sys.executable, "-m", "saturate", "run", "recipe.toml", "--", "./train"]
    done = subprocess.run(words, cwd=tmp_path, env=clean_environment, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout) == (0, "python -I\n") and "ignores PYTHONPATH" not in done.stderr
