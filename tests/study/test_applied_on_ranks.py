"""A technique counts as applied where every rank has applied it."""

from __future__ import annotations

import inspect
from pathlib import Path

import pytest

from saturate.study.bench import Bench
from saturate.techniques import gc_freeze
from saturate.trial.launch import Chosen
from saturate.trial.process import TrialEnded

RANKS = """
import os, subprocess, sys
if "RANK" not in os.environ:
    ranks = [subprocess.Popen([sys.executable, *sys.argv], env={**os.environ, "RANK": str(rank), "WORLD_SIZE": "2"}) for rank in range(2)]
    sys.exit(max(rank.wait() for rank in ranks))
import torch
model = torch.nn.Linear(4, 1)
opt = torch.optim.SGD(model.parameters(), lr=1e-3)
while True: opt.zero_grad(); model(torch.randn(8, 4)).mean().backward(); opt.step()
"""
REFUSES = """
    import os
    from saturate.techniques._api import NotApplied

    if os.environ["RANK"] in {ranks!r}:
        raise NotApplied("not here")
"""


@pytest.mark.parametrize(("ranks", "reason"), [("0", "picky: not here"), ("1", "picky on rank 1: not here"), ("", "")])
def test_one_rank_that_refuses_is_enough(ranks: str, reason: str, script, start, tmp_path: Path) -> None:
    """Rank 0 alone was asked: what it had applied was timed, and kept, though the others trained without it."""
    source = inspect.getsource(gc_freeze).replace('id="gc-freeze"', 'id="picky"')
    head, begin, rest = source.partition("def apply(context: Any, options: Options) -> str:\n")
    technique = tmp_path / "picky.py"
    technique.write_text(head + begin + REFUSES.format(ranks=ranks) + rest, encoding="utf-8")
    trial = start(str(script(RANKS)), techniques=[Chosen("picky", "picky", str(technique))])
    hello = trial.wait_ready()
    if not reason:
        Bench.check_applied(None, trial, hello)     # type: ignore[arg-type]
        return
    with pytest.raises(TrialEnded) as ended:
        Bench.check_applied(None, trial, hello)     # type: ignore[arg-type]
    assert (ended.value.outcome.kind, ended.value.outcome.reason) == ("not_applied", reason)
