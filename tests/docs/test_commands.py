"""The commands of the documentation are ones that exist, and the lines of `--as-code` do what they say."""

from __future__ import annotations

import dataclasses
import gc
import importlib
import itertools
import re
import shlex
import subprocess
import sys
import typing
from pathlib import Path

import pytest

from saturate.cli import main, recipe
from saturate.errors import UsageError
from saturate.records import recipe as recipes
from saturate.records.recipe import Entry, Recipe
from saturate.techniques import _registry

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


# --- the lines of --as-code -------------------------------------------------------------------------------------------

SHELL = "# in the shell"


def every_choice(module) -> list[dict[str, object]]:
    """The defaults, and every combination of what is to be chosen from a list or switched."""
    hints = typing.get_type_hints(module.Options)
    axes = [[(field.name, value) for value in ((False, True) if hints[field.name] is bool else typing.get_args(hints[field.name]))]
            for field in dataclasses.fields(module.Options)
            if hints[field.name] is bool or typing.get_origin(hints[field.name]) is typing.Literal]
    return [dict(chosen) for chosen in itertools.product(*axes)]


def code_of(identity: str, **options: object) -> str:
    return recipe.as_code(Recipe(techniques=[Entry(id=identity, options=options)]), "recipe.toml")


@pytest.mark.parametrize("identity", _registry.load())
def test_the_lines_are_python_or_shell(identity):
    module = _registry.load()[identity]
    for chosen in every_choice(module):
        code = module.as_code(module.Options(**chosen))
        if code.startswith(SHELL):
            assert subprocess.run(["bash", "-n"], input=code, text=True, check=False).returncode == 0, code
        else:
            compile(code, identity, "exec")


def trained(identity: str, given: str = "", **options: object) -> dict[str, typing.Any]:
    """The variables of a script with the lines of a technique in it. `given`: what stands for the dots in them."""
    code = code_of(identity, **options).replace("...", given)
    assert "..." not in code
    script = f"""
import torch
from torch.utils.data import DataLoader, TensorDataset

device = torch.device("cpu")
model = torch.nn.Linear(4, 2)
criterion = torch.nn.functional.mse_loss
dataset = TensorDataset(torch.randn(16, 4), torch.randn(16, 2))
loader = DataLoader(dataset, batch_size=8)
optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
inputs, targets = dataset[:8]
criterion(model(inputs), targets).backward()
before = [parameter.detach().clone() for parameter in model.parameters()]
{code}
"""
    found: dict[str, typing.Any] = {"__name__": "script"}
    exec(script, found)
    return found


def test_autocast_computes_in_bfloat16():
    import torch

    found = trained("bf16-autocast")
    assert found["output"].dtype == torch.bfloat16 and found["loss"].dtype == torch.float32
    found["loss"].backward()


def test_compile_gives_a_compiled_model():
    import torch

    found = trained("compile", mode="default")
    assert isinstance(found["model"], torch._dynamo.eval_frame.OptimizedModule)


def test_the_fused_optimizer_steps():
    found = trained("fused-optimizer", given="lr=0.1")
    found["optimizer"].step()
    assert all(group["fused"] for group in found["optimizer"].param_groups)
    assert any((old != new).any() for old, new in zip(found["before"], found["model"].parameters(), strict=True))


def test_the_loader_has_workers():
    loader = trained("loader-workers", given="batch_size=8", workers=2, prefetch=3)["loader"]
    assert (loader.num_workers, loader.prefetch_factor, loader.persistent_workers) == (2, 3, True)
    assert len(list(loader)) == 2


def test_gradients_are_set_to_none():
    assert all(parameter.grad is None for parameter in trained("zero-grad-none")["model"].parameters())


def test_the_collector_is_frozen():
    threshold = gc.get_threshold()
    try:
        gc.unfreeze()
        trained("gc-freeze", threshold=70_000)
        assert gc.get_freeze_count() > 0 and gc.get_threshold()[0] == 70_000
    finally:
        gc.unfreeze()
        gc.set_threshold(*threshold)


def test_threads_are_those_that_were_asked_for():
    code = code_of("cpu-threads", threads=1) + f"\n{shlex.quote(sys.executable)} -c 'import torch; print(torch.get_num_threads())'"
    assert subprocess.run(["bash", "-c", code], capture_output=True, text=True, check=True).stdout == "1\n"
