"""The documentation says what the code says."""

from __future__ import annotations

import os
import re
import runpy
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


def test_pages_of_techniques_and_findings_are_up_to_date(capsys):
    generate = runpy.run_path(str(ROOT / "docs" / "generate.py"))
    assert generate["main"](True) == 0, capsys.readouterr().out


def test_a_stale_page_is_noticed(monkeypatch, capsys):
    generate = runpy.run_path(str(ROOT / "docs" / "generate.py"))
    pages = generate["pages"]()
    assert pages.keys() >= {"techniques/tf32.md", "techniques/README.md", "findings/launch-bound.md", "findings/README.md"}
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
