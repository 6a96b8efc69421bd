"""The documentation says what the code says."""

from __future__ import annotations

import json
import os
import re
import runpy
import subprocess
import sys
import textwrap
from pathlib import Path

import msgspec
import pytest

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "tests" / "report"))
sys.path.insert(0, str(ROOT / "tests" / "inference" / "generation"))


def indented(page, before):
    """The lines of the first indented block behind a text, without their indentation."""
    text = (ROOT / page).read_text(encoding="utf-8").partition(before)[2]
    return textwrap.dedent(re.search(r"^\n((?: {4}.*\n|\n)+)", text.partition("\n")[2], re.MULTILINE)[1]).strip("\n").split("\n")


def test_pages_of_techniques_and_findings_are_up_to_date(capsys):
    generate = runpy.run_path(str(ROOT / "docs" / "generate.py"))
    assert generate["main"](True) == 0, capsys.readouterr().out


def test_a_stale_page_is_noticed(monkeypatch, capsys):
    generate = runpy.run_path(str(ROOT / "docs" / "generate.py"))
    pages = generate["pages"]()
    assert pages.keys() >= {"techniques/tf32.md", "techniques/README.md", "findings/launch-bound.md", "findings/README.md", "files/README.md"}
    for wrong in (pages | {"findings/launch-bound.md": "old"}, {k: v for k, v in pages.items() if "launch-bound" not in k}):
        monkeypatch.setitem(generate["main"].__globals__, "pages", lambda found=wrong: found)
        assert generate["main"](True) == 1
        assert capsys.readouterr().out == "stale: findings/launch-bound.md\n"


@pytest.mark.parametrize("page", [p.relative_to(ROOT).as_posix() for p in sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/*.md"), *ROOT.glob("*/README.md"), *ROOT.glob("docs/*/*.md")])])
def test_links_lead_somewhere(page):
    text = (ROOT / page).read_text(encoding="utf-8")
    for target in re.findall(r"\]\(([^)#]+)\)", text):
        if not target.startswith(("http:", "https:")):
            assert ((ROOT / page).parent / target).exists(), f"{page} links to {target}"


def test_every_page_is_reached_from_the_readme():
    reached, pending = set(), [ROOT / "README.md"]
    while pending:
        page = pending.pop()
        if page.suffix != ".md" or page in reached or not page.exists():
            continue
        reached.add(page)
        targets = re.findall(r"\]\(([^)#:]+)\)", page.read_text(encoding="utf-8"))
        pending += [(page.parent / target / ("README.md" if target.endswith("/") else "")).resolve() for target in targets]
    assert {*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md"), *ROOT.glob("*/README.md")} <= reached


def test_verbs_in_the_readme_exist():
    from saturate.cli.main import VERBS

    verbs = {name for name, _, _ in VERBS}
    used = set(re.findall(r"^\s*(?:\$ )?saturate ([a-z]+)", (ROOT / "README.md").read_text(encoding="utf-8"), re.MULTILINE))
    assert used and used <= verbs, used - verbs


def test_make_targets_in_the_readme_exist():
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE))
    used = set(re.findall(r"`?make ([a-z-]+)", (ROOT / "README.md").read_text(encoding="utf-8")))
    assert used and used <= targets, used - targets


def test_make_bench_runs_every_benchmark_whether_or_not_others_miss(tmp_path):
    """One that misses its targets ends with 1."""
    python, log = tmp_path / "bin" / "python", tmp_path / "log"
    python.parent.mkdir()
    python.write_text(f'#!/bin/sh\necho "$*" >> {log}\n[ "$1" != bench/flops.py ]\n', encoding="utf-8")
    python.chmod(0o755)
    (tmp_path / ".installed").touch()
    (tmp_path / ".tested").touch()
    done = subprocess.run(["make", "bench", f"VENV={tmp_path}"], cwd=ROOT, capture_output=True, text=True, check=False,
                          env={**os.environ, "MAKEFLAGS": ""})      # those of `make test`, which may run this
    assert done.returncode != 0 and "failed: flops.py\n" in done.stdout
    ran = set(log.read_text(encoding="utf-8").splitlines())
    table = re.findall(r"^\| `(?:\w+=\w+ )?python (bench/[^`]+)`", (ROOT / "bench" / "README.md").read_text(encoding="utf-8"), re.MULTILINE)
    assert set(table) == ran


# -- examples --------------------------------------------------------------------------------------------------------


def test_the_summary_in_the_readme_has_the_lines_of_a_summary():
    import studies

    from saturate.report.terminal import LABEL, summary
    from saturate.techniques import _registry

    sample = indented("README.md", "`make demo` ends with a summary")
    record = studies.big_win()
    real = [line[:LABEL].strip() for line in summary(record, width=120, color=False).split("\n")[1:]]
    labels = [line[:LABEL].strip() for line in sample[1:]]
    optional = {"", "note", "memory"}       # where a kept technique folds, something is noted, memory changed
    assert labels == [label for label in real if label not in optional]
    (kept,) = [line[LABEL:].split()[0] for line in sample if line.startswith("kept ")]
    (dropped,) = [line[LABEL:] for line in sample if line.startswith("not kept")]
    techniques = _registry.load()
    assert kept in techniques
    assert dropped == "..." or 1 + sum(map(int, re.findall(r"\d+", dropped))) == len(techniques)


def test_the_page_on_recipes_says_what_recipes_and_results_hold():
    from saturate.records import recipe as recipes
    from saturate.records.result import TechniqueOutcome, TuneResult
    from saturate.techniques import _registry

    page = (ROOT / "docs" / "recipe.md").read_text(encoding="utf-8")
    recipe, techniques = recipes.loads(re.search(r"```toml\n(.*?)```", page, re.DOTALL)[1]), _registry.load()
    assert recipe.techniques and not recipes.validate(recipe, techniques)
    table = page.partition("## What `tune --json` holds")[2].partition("\n## ")[0]
    named = re.findall(r"`(\w+)`", " ".join(re.findall(r"^\| (`.*?) \|", table, re.MULTILINE)))
    assert set(named) == {field.name for field in msgspec.structs.fields(TuneResult)}
    assert {field.name for field in msgspec.structs.fields(TechniqueOutcome)} <= set(re.findall(r"`(\w+)`", table))
    sources = "".join(path.read_text(encoding="utf-8") for path in (ROOT / "src").rglob("*.py"))
    for name in re.findall(r"^\| `([A-Z_]+)`", page, re.MULTILINE):
        assert f'"{name}"' in sources, name


@pytest.fixture
def toys():
    """What the lines of docs/generation.md take for granted."""
    torch = pytest.importorskip("torch")
    from generation_models import Cached

    return {"model": Cached(context=128), "small": Cached(seed=1, context=128, layers=1), "prompts": [[1, 2, 3], [4, 5, 6, 7]],
            "other_prompts": [[3, 2, 1]], "torch": torch}


def test_the_calls_of_generation_run(toys):
    lines = indented("docs/generation.md", "For causal language models")
    calls = [line for line in lines if line.startswith(("from ", "generate("))]
    assert len(calls) == 4
    exec("\n".join(calls), toys)


@pytest.mark.slow
def test_the_search_among_ways_to_generate_runs(toys, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    block = "\n".join(indented("docs/generation.md", "For causal language models"))
    assert "draft=small)        # which" in block
    exec(block.replace("draft=small)        # which", "draft=small, time='30s', isolate=False)        # which"), toys)
    assert (tmp_path / "artifact" / "manifest.json").exists() and capsys.readouterr().out.strip()


@pytest.mark.slow
def test_the_lines_on_inference_in_the_readme_run(tmp_path, monkeypatch, capsys):
    """On a net of many small layers, where a runtime without Python between them is surely faster."""
    torch = pytest.importorskip("torch")
    for needed in ("onnx", "onnxscript", "onnxruntime"):
        pytest.importorskip(needed)
    import functools

    import saturate

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(saturate, "optimize", functools.partial(saturate.optimize, time="180s", only=["onnx-runtime"], threads=1))
    torch.manual_seed(0)
    layers = [part for _ in range(100) for part in (torch.nn.Linear(8, 8), torch.nn.LeakyReLU(0.9))]
    model, x = torch.nn.Sequential(*layers, torch.nn.Linear(8, 3)).eval(), torch.randn(64, 8)
    validation = torch.randn(256, 8)
    wanted = model(validation).argmax(-1)
    exec("\n".join(indented("README.md", "## Faster inference")), {
        "model": model, "loader": [(part,) for part in x.split(16)], "x": x[:16], "validation": validation,
        "correct_per_sample": lambda run, validation: (run(validation).argmax(-1) == wanted).float().tolist()})
    assert (tmp_path / "artifact" / "manifest.json").exists() and capsys.readouterr().out.strip()


TRAIN = """
import argparse
import torch

parser = argparse.ArgumentParser()
parser.add_argument("--config", required=True)
steps = int(open(parser.parse_args().config).read())
torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(32, 64), torch.nn.Tanh(), torch.nn.Linear(64, 1))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
for _ in range(steps):
    x = torch.randn(64, 32)
    optimizer.zero_grad()
    loss = torch.nn.functional.mse_loss(model(x), x.sum(1, keepdim=True))
    loss.backward()
    optimizer.step()
print("trained", loss.item() < 100)
"""


@pytest.mark.slow
def test_the_first_two_commands_of_the_readme_run(tmp_path, clean_environment):
    """`tune`, with a short budget, and `run` with what it wrote."""
    pytest.importorskip("torch")
    tune, run = (line.split("#")[0].split() for line in indented("README.md", "proves that"))
    assert (tune[:2], run[:3]) == (["saturate", "tune"], ["saturate", "run", "recipe.toml"]) and tune[3:] == run[4:]
    (tmp_path / "train.py").write_text(TRAIN, encoding="utf-8")
    (tmp_path / "small.yaml").write_text("1000000", encoding="utf-8")
    saturate, command = [sys.executable, "-m", "saturate"], [sys.executable, *tune[4:]]

    def ran(*words):
        return subprocess.run([*saturate, *words, "--", *command], cwd=tmp_path, env=clean_environment, capture_output=True, text=True,
                              timeout=300, check=False)

    tuned = ran("tune", "--budget", "30s", "--only", "zero-grad-none,fused-optimizer", "--json")
    assert tuned.returncode in (0, 6), tuned.stderr
    (tmp_path / "small.yaml").write_text("30", encoding="utf-8")
    again = ran("run", json.loads(tuned.stdout)["recipe"])
    assert (again.returncode, again.stdout) == (0, "trained True\n"), again.stderr
