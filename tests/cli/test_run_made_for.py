"""`saturate run` says which torch and which Python the recipe was not made for, whatever command they are behind."""

from __future__ import annotations

import contextlib
import subprocess
import sys

import pytest

from saturate.cli import run as run_verb
from saturate.errors import RecipeError
from saturate.machine import fingerprint, gpus, nvml, telemetry
from saturate.records import recipe as recipes
from saturate.records.recipe import MadeFor

SATURATE = [sys.executable, "-m", "saturate", "run"]
#: Which torch it is is known before anything else of it is used.
TORCH = '__version__ = "9.9"\nprint("imported", __version__)\n'


@pytest.fixture
def run(tmp_path, clean_environment):
    """Run a command under a recipe made for these versions, in a folder with a script and a small thing called torch."""
    (tmp_path / "train.py").write_text("import torch\nprint('trained')\n")
    (tmp_path / "train.sh").write_text(f"{sys.executable} train.py\n")
    (tmp_path / "torch.py").write_text(TORCH)

    def run(command, *options, torch="9.9", python="3.11.0"):
        (tmp_path / "recipe.toml").write_text(
            f'schema = 1\n[made_for]\ntorch = "{torch}"\npython = "{python}"\n[[technique]]\nid = "zero-grad-none"\n')
        return subprocess.run([*SATURATE, *options, "recipe.toml", "--", *command], cwd=tmp_path, env=clean_environment,
                              capture_output=True, text=True, timeout=120)

    return run


@pytest.mark.parametrize("command", [
    [sys.executable, "train.py"], ["bash", "train.sh"], ["env", "A=1", sys.executable, "train.py"], ["nice", sys.executable, "train.py"],
    ["sh", "-c", f"{sys.executable} train.py"],
])
def test_strict_refuses_behind_any_command(command, run):
    done = run(command, "--strict", torch="2.0.0", python="3.9.1")
    assert (done.returncode, done.stdout) == (2, "imported 9.9\n"), done.stderr
    here = ".".join(map(str, sys.version_info[:2]))
    assert done.stderr.startswith("error[E210] the recipe was made for something else\nevidence: torch changed from 2.0.0 to 9.9: ")
    assert f"; python changed from 3.9 to {here}: " in done.stderr and "help: tune again here" in done.stderr
    assert done.stderr.count("error[") == 1


def test_refusal_cannot_be_caught(run, tmp_path):
    (tmp_path / "train.py").write_text("try:\n    import torch\nexcept BaseException:\n    pass\nprint('trained')\n")
    assert run([sys.executable, "train.py"], "--strict", torch="2.0.0").returncode == 2


def test_the_versions_are_those_of_the_process_that_imports_torch(run, tmp_path):
    """Not what another Python, or what a customisation prints, says."""
    (tmp_path / "sitecustomize.py").write_text("import sys\nprint('hello', file=sys.stderr)\n")
    same = ".".join(map(str, sys.version_info[:3]))
    done = run(["env", "PYTHONPATH=.", sys.executable, "train.py"], "--strict", torch="9.9", python=same)
    assert "error[" not in done.stderr and "trained" in done.stdout


WARNS = """
import subprocess, sys
import torch
subprocess.run([sys.executable, "-c", "import torch"], check=True)
"""


def test_a_warning_is_said_once(tmp_path, clean_environment):
    """Not again by loader workers, or by the ranks of a launcher."""
    (tmp_path / "train.py").write_text(WARNS)
    (tmp_path / "recipe.toml").write_text('schema = 1\n[made_for]\ntorch = "2.0.0"\n[[technique]]\nid = "zero-grad-none"\n')
    done = subprocess.run([*SATURATE, "recipe.toml", "--", sys.executable, "train.py"], cwd=tmp_path, env=clean_environment,
                          capture_output=True, text=True, timeout=240)
    assert done.returncode == 0
    assert done.stderr.startswith("saturate: torch changed from 2.0.0 to ") and done.stderr.count("\n") == 1, done.stderr


def test_strict_refuses_in_front_of_the_ranks(tmp_path, clean_environment):
    """One message, the exit code of a refusal, and no ranks that wait for each other."""
    (tmp_path / "train.py").write_text("import torch\nprint('trained')\n")
    (tmp_path / "recipe.toml").write_text('schema = 1\n[made_for]\ntorch = "2.0.0"\n[[technique]]\nid = "zero-grad-none"\n')
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", "train.py"]
    done = subprocess.run([*SATURATE, "--strict", "recipe.toml", "--", *launcher], cwd=tmp_path, env=clean_environment,
                          capture_output=True, text=True, timeout=240)
    assert (done.returncode, done.stdout) == (2, "") and done.stderr.count("error[E210]") == 1, done.stderr


CUDA = MadeFor(device="cuda", device_name="NVIDIA H100 80GB HBM3")


@pytest.mark.parametrize(("files", "reachable", "name", "now"), [
    (True, True, "NVIDIA H100 80GB HBM3", ("cuda", "NVIDIA H100 80GB HBM3")), (True, True, "Tesla T4", ("cuda", "Tesla T4")),
    (True, True, "", ("", "")), (True, False, "", ("", "")), (False, False, "", ("cpu", "")),
])
def test_a_device_is_another_one_only_where_that_is_certain(files, reachable, name, now, monkeypatch):
    """ROCm has no NVML, many containers have none, and it does not always know what torch calls the device."""
    monkeypatch.setattr(gpus, "possible", lambda: files)
    monkeypatch.setattr(nvml, "start", lambda: (contextlib.nullcontext(), "") if reachable else (None, "no NVIDIA driver"))
    monkeypatch.setattr(telemetry, "visible_name", lambda opened, environment: name)
    assert run_verb._device(CUDA) == now
    assert run_verb._device(MadeFor(device="cpu")) == ("" if files else "cpu", ""), "a script may do without the device"
    assert run_verb._device(MadeFor()) == ("", "") == run_verb._device(MadeFor(device="mps"))
    changed = fingerprint.compare(CUDA, MadeFor(device=now[0], device_name=now[1]), ["compile"])
    assert len(changed) == (name == "Tesla T4" or not files)


def test_no_device_where_all_are_hidden(monkeypatch):
    monkeypatch.setattr(gpus, "possible", lambda: True)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert run_verb._device(CUDA) == ("cpu", "") == run_verb._device(MadeFor(device="cpu"))


RECIPE = 'schema = 1\n[made_for]\n{}\n[[technique]]\nid = "zero-grad-none"\n'


@pytest.mark.parametrize(("command", "named"), [
    (("bash", "-c", f"{sys.executable} train.py"), True), ((sys.executable, "-c", "import runpy; runpy.run_path('train.py')"), True),
    ((sys.executable, "train.py"), False), (("env", "A=1", sys.executable, "train.py"), False),
])
def test_a_script_that_does_not_show_is_named_and_refused(command, named, tmp_path, clean_environment):
    script = tmp_path / "train.py"
    script.write_text("print('trained')\n")
    (tmp_path / "recipe.toml").write_text(RECIPE.format(f'script = "{fingerprint.digest(script)}"'))

    def run(*options):
        return subprocess.run([*SATURATE, *options, "recipe.toml", "--", *command], cwd=tmp_path, env=clean_environment,
                              capture_output=True, text=True, timeout=60)

    usual = run()
    assert (usual.returncode, usual.stdout) == (0, "trained\n")
    assert usual.stderr.count("script could not be compared with ") == named and (usual.stderr == "") == (not named), usual.stderr
    strict = run("--strict")
    assert (strict.returncode, strict.stdout) == ((2, "") if named else (0, "trained\n")), strict.stderr
    if named:
        assert "error[E210]" in strict.stderr and "script could not be compared with " in strict.stderr and "without --strict" in strict.stderr


@pytest.mark.parametrize("recipe", ["", "schema = 1\n", f'schema = 1\n[made_for]\nscript = "{"a" * 64}"\ndevice = "mps"\n'])
def test_an_empty_recipe_says_nothing(recipe, tmp_path, clean_environment):
    (tmp_path / "recipe.toml").write_text(recipe)
    done = subprocess.run([*SATURATE, "--strict", "recipe.toml", "--", "true"], cwd=tmp_path, env=clean_environment, capture_output=True, text=True,
                          timeout=60)
    assert (done.returncode, done.stderr) == (0, "")


def test_what_the_command_trains_on_is_named_where_it_does_not_show(tmp_path, monkeypatch, capfd):
    """A recipe of a machine without a GPU, on one that has some."""
    monkeypatch.setattr(gpus, "possible", lambda: True)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    recipe = recipes.Recipe(made_for=MadeFor(device="cpu"), techniques=[recipes.Entry(id="zero-grad-none")])
    assert run_verb._compare(recipe, ["true"], False) == {}
    with pytest.raises(RecipeError, match="made for something else") as caught:
        run_verb._compare(recipe, ["true"], True)
    assert "device could not be compared with cpu" in caught.value.evidence
    assert capfd.readouterr().err.count("device could not be compared with cpu") == 1
