"""Aligned verification runs have no dropout, compiled or not."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys

import pytest

SOURCE = """
import sys, torch
if sys.argv[1] == "aligned":
    from saturate.agent import randomness
    randomness.align(torch, 20)
torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.Dropout(0.5), torch.nn.Linear(16, 1))
x = torch.randn(4, 8)
expected = model.eval()(x)
model.train()
step = torch.compile(model) if sys.argv[2] == "compiled" else model
output = step(x)
output.sum().backward()     # the compiler files a graph when its backward pass is known
print(torch.allclose(output, expected, atol=1e-6))
"""


def without_dropout(script, cache, alignment: str, how: str) -> str:
    environment = {**os.environ, "TORCHINDUCTOR_CACHE_DIR": str(cache)}
    command = [sys.executable, str(script(SOURCE)), alignment, how]
    return subprocess.run(command, env=environment, check=True, capture_output=True, text=True, timeout=300).stdout.strip()


def test_aligned_runs_have_no_dropout(script, tmp_path):
    assert without_dropout(script, tmp_path / "cache", "ordinary", "eager") == "False"
    assert without_dropout(script, tmp_path / "cache", "aligned", "eager") == "True"


@pytest.mark.skipif(shutil.which("g++") is None, reason="compiling for a CPU needs g++")
def test_an_aligned_run_gets_no_compiled_dropout_from_the_cache_of_an_ordinary_one(script, tmp_path):
    """Seen on a public REINFORCE script: torch.compile was rejected because its aligned run had dropout."""
    assert without_dropout(script, tmp_path / "cache", "ordinary", "compiled") == "False"
    assert without_dropout(script, tmp_path / "cache", "aligned", "compiled") == "True"
