"""`tune --fit`: the baseline keeps the limit, does not, or does not even run; a set that keeps it is found, or is not."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import parties
import pytest
from tune_kit import _SATURATE

from saturate.records import recipe as recipes

BALLAST = 96 << 20

#: What is tested is not the statistics, and must not depend on how quiet the machine is.
FEWER_ROUNDS = _SATURATE.replace("sys.exit(", """
from saturate.trial import clocks
tune.HOPELESS_NOISE = clocks.TOLERANCE = 99.0
sys.exit(""")

#: Needs 96 MiB more from its first forward on, unless a technique says otherwise in time.
HUNGRY = f'''
import sys, time
import torch, torch.nn as nn
torch.manual_seed(7)

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(12, 24), nn.Linear(24, 1)

    def forward(self, x):
        global ballast
        if not getattr(self, "lean", False) and "ballast" not in globals():
            starve
            ballast = bytearray({BALLAST})
        time.sleep(0.016 if getattr(self, "lean", False) else 0.010)
        return self.b(torch.tanh(self.a(x)))

model = Net()
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
for step in range(10**9):
    x = torch.randn(32, 12)
    loss = nn.functional.mse_loss(model(x), x[:, :3].sum(1, keepdim=True))
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
'''

_LIMITED = '''
EARLY = True


def eligible(facts):
    if facts.memory_limit_bytes is None:
        return __import__("saturate.techniques._api", fromlist=["Ineligible"]).Ineligible("only under a limit")
    return Eligible("memory is limited")
'''

PARTIES = {
    "eats_less": ("exact", "model", '''
    context.set_attribute(context.modules[0], "lean", True)
''', _LIMITED),
    "eats_half": ("exact", "model", '''
    import builtins
    # Sizes alone: an import that finds no compiled file makes a bytearray of bytes.
    context.set_attribute(builtins, "bytearray", lambda given, real=bytearray: real(given // 2 if isinstance(given, int) else given))
''', _LIMITED),
    "eats_wrongly": ("exact", "model", parties._FASTER + '''
    context.set_attribute(context.modules[0], "lean", True)
    context.wrap_forward(context.modules[0], 10, lambda inner: lambda self, x: inner(self, x) * (1 + 1e-3))
''', _LIMITED),
    "eats_more": ("exact", "model", parties._FASTER + f'''
    torch._ballast = bytearray({2 * BALLAST})
''', ""),
}


@pytest.fixture
def tune(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Runs `saturate tune --json` with third-party techniques and few rounds."""
    for name, party in PARTIES.items():
        monkeypatch.setitem(parties.TECHNIQUES, name, party)

    def run(names: list[str], *options: str, source: str = HUNGRY.replace("starve", "pass"), code: int = 0) -> dict[str, Any]:
        (tmp_path / "train.py").write_text(textwrap.dedent(source), encoding="utf-8")
        site = tmp_path / "site"
        if not site.exists():
            parties.publish(site, names)
        base = {k: v for k, v in os.environ.items() if not k.startswith(("SATURATE", "PYTHON", "PYTEST"))}
        command = [sys.executable, "-c", FEWER_ROUNDS, "tune", "--json", "--budget", "400s", "--only",
                   ",".join(map(parties.identity, names)), *options, "--", sys.executable, "train.py"]
        done = subprocess.run(command, cwd=tmp_path, env={**base, "PYTHONPATH": str(site), "OMP_NUM_THREADS": "1"},
                              capture_output=True, text=True, timeout=600)
        assert done.returncode == code, done.stderr[-4000:]
        result = json.loads(done.stdout)
        result["stderr"] = done.stderr
        result["by_id"] = {entry["id"]: entry for entry in result["techniques"]}
        return result

    return run


@pytest.fixture
def peak_bytes(script, start) -> int:
    """Of the baseline, on this machine."""
    trial = start(str(script(HUNGRY.replace("starve", "pass"))), timeout_s=120.0)
    trial.wait_ready()
    trial.run_block(2, 4)
    assert trial.peak_bytes > BALLAST
    return trial.peak_bytes


@pytest.mark.slow
def test_a_set_that_fits_is_found_and_made_faster(tune, peak_bytes: int) -> None:
    limit = peak_bytes - BALLAST // 2
    result = tune(["eats_less", "waits_less", "eats_more"], "--fit", str(limit))
    fates = result["by_id"]
    assert fates["eats-less"]["fate"] == "kept" and "needed: without it the training needs" in fates["eats-less"]["reason"]
    assert fates["waits-less"]["fate"] == "kept", (fates["waits-less"], result["stderr"])
    assert fates["eats-more"]["fate"] == "failed" and "over limit: needs" in fates["eats-more"]["reason"]
    assert result["fits"] is True and result["verified"] is True and result["limit_bytes"] == limit
    assert result["peak_bytes"] <= limit < result["baseline_peak_bytes"]
    assert fates["eats-less"]["peak_bytes"] <= limit < fates["eats-more"]["peak_bytes"]
    recipe = recipes.read(result["recipe"])
    assert {entry.id for entry in recipe.techniques} == {"eats-less", "waits-less"}
    assert recipe.evidence.limit_bytes == limit and recipe.evidence.peak_bytes == result["peak_bytes"]
    assert "Peak memory" in Path(result["report"]).read_text(encoding="utf-8")


@pytest.mark.slow
def test_a_set_that_trains_otherwise_gives_way(tune, peak_bytes: int) -> None:
    result = tune(["eats_wrongly", "eats_half"], "--fit", str(peak_bytes - BALLAST // 4))
    fates = result["by_id"]
    assert fates["eats-wrongly"]["fate"] == "rejected_numerics" and fates["eats-half"]["fate"] == "kept", result["stderr"]
    assert result["fits"] is True and result["verified"] is True


@pytest.mark.slow
def test_a_baseline_that_fits_stays_the_measure(tune, peak_bytes: int) -> None:
    result = tune(["eats_less", "waits_less", "eats_more"], "--fit", str(peak_bytes + BALLAST))
    fates = result["by_id"]
    assert fates["waits-less"]["fate"] == "kept" and fates["eats-less"]["fate"] == "slower", result["stderr"]
    assert fates["eats-more"]["fate"] == "failed" and "over limit" in fates["eats-more"]["reason"]
    assert result["fits"] is True and result["baseline_peak_bytes"] <= result["limit_bytes"]


def test_when_nothing_fits_that_is_the_answer(tune, peak_bytes: int) -> None:
    result = tune(["eats_half"], "--fit", str(peak_bytes - BALLAST))
    assert result["fits"] is False and result["verdict"] == "inconclusive" and result["speedup"] is None
    assert result["verified"] is None and "nothing keeps the limit" in result["verified_reason"]
    assert "with eats-half" in result["verified_reason"] and result["by_id"]["eats-half"]["fate"] == "failed"
    assert recipes.read(result["recipe"]).techniques == []
    assert "Does not fit" in Path(result["report"]).read_text(encoding="utf-8")


@pytest.mark.slow
def test_a_baseline_that_runs_out_of_memory_is_no_end(tune) -> None:
    starving = HUNGRY.replace("starve", "raise MemoryError('for a test')")
    result = tune(["eats_less", "waits_less"], "--fit", "64GiB", source=starving)
    fates = result["by_id"]
    assert fates["eats-less"]["fate"] == "kept" and "runs out of memory" in fates["eats-less"]["reason"], result["stderr"]
    assert fates["waits-less"]["fate"] == "kept", result["stderr"]
    assert result["fits"] is True and result["speedup"] is None and result["baseline"]["step_ms"] is None
    assert result["verified"] is None and "the baseline does not run in this memory" in result["verified_reason"]
    assert {entry.id for entry in recipes.read(result["recipe"]).techniques} == {"eats-less", "waits-less"}
    assert "Fits, not compared with the baseline" in Path(result["report"]).read_text(encoding="utf-8")
    assert tune(["eats_less"], source=starving, code=4)["fits"] is None, "without a limit it is the command's own failure"
