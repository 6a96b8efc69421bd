"""What must act before memory is taken is applied before the first training forward; peaks are seen from there on."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from saturate.agent.early import front
from saturate.trial.launch import Chosen
from saturate.trial.process import TrialEnded

torch = pytest.importorskip("torch")

TECHNIQUE = '''"""Notes when it was applied.

What it does
------------
Notes.

When it helps
-------------
In tests.

When it hurts
-------------
Elsewhere.

Numerics
--------
`exact`.

How it is applied
-----------------
See the source.

References
----------
None.
"""

from dataclasses import dataclass

from saturate.techniques._api import Eligible, NotApplied, Proof, Technique, Touch

TECHNIQUE = Technique(id="noter", title="a noter", numerics="exact", stage="model", touches=(Touch("notes"),))
EARLY = True


@dataclass(frozen=True)
class Options:
    waits: bool = False


def eligible(facts):
    return Eligible("in tests")


def variants(facts):
    return [Options()]


def bound(facts):
    return None


def apply(context, options):
    if options.waits and context.early:
        raise NotApplied("too early")
    context.note("noter", f"early={context.early} modules={[type(m).__name__ for m in context.modules]} "
                          f"optimizers={len(context.optimizers)} device={context.device} state={len(context.optimizers[0].state)}")
    context.set_attribute(context.modules[0], "lean", True)
    return "noted"


def active(evidence, options):
    return Proof("noter" in evidence.notes, "its note")


def as_code(options):
    return "pass"
'''

LOOP = """
import sys, torch, torch.nn as nn
torch.manual_seed(0)

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Linear(8, 8)

    def forward(self, x):
        if not getattr(self, "lean", False):
            Net.ballast = bytearray(64 << 20)
        return self.body(x)

class Frame(nn.Module):     # as a LightningModule: it owns everything, and its forward is never called
    def __init__(self):
        super().__init__()
        self.net, self.loss = Net(), nn.MSELoss()

frame = Frame()
other = nn.Linear(2, 2)     # not trained
optimizer = torch.optim.AdamW(frame.parameters())
frame.eval(); frame.net(torch.randn(1, 8)) if "evaluates" in sys.argv else None; frame.train()
while True:
    other(torch.randn(1, 2))
    optimizer.zero_grad()
    frame.loss(frame.net(torch.randn(4, 8)), torch.zeros(4, 8)).backward()
    optimizer.step()
"""


@pytest.fixture
def noter(tmp_path: Path) -> Path:
    path = tmp_path / "parties" / "noter.py"
    path.parent.mkdir()
    path.write_text(TECHNIQUE, encoding="utf-8")
    return path


def begin(start: Any, script: Any, noter: Path, *, waits: bool = False, **spec: Any) -> tuple[Any, str]:
    chosen = Chosen("noter", "noter", str(noter), {"waits": waits})
    trial = start(str(script(LOOP)), timeout_s=120.0, techniques=[chosen], **spec)
    assert trial.wait_ready()["applied"] == [{"id": "noter", "problem": ""}], trial.output()
    return trial, trial.ask("evidence")["notes"]["noter"]


def test_it_acts_before_the_first_forward(start, script, noter) -> None:
    trial, note = begin(start, script, noter)
    assert note == "early=True modules=['Net'] optimizers=1 device=cpu state=0"
    trial.run_block(1, 3)
    lean = trial.peak_bytes
    trial.stop()
    plain = start(str(script(LOOP)), timeout_s=120.0)
    plain.wait_ready()
    plain.run_block(1, 3)
    assert lean < plain.peak_bytes - (48 << 20), "had it come later, the first forward would have taken the memory"


def test_what_cannot_be_applied_yet_has_its_turn_with_the_others(start, script, noter) -> None:
    assert begin(start, script, noter, waits=True)[1].startswith("early=False modules=['Net'] optimizers=1")


def test_in_a_verification_run_it_waits_unless_told_otherwise(start, script, noter, tmp_path) -> None:
    capture = {"folder": str(tmp_path), "updates": 6, "seed": 1, "aligned": False, "perturb": None}
    assert begin(start, script, noter, capture=capture)[1].startswith("early=False")
    assert begin(start, script, noter, capture=capture, plan={"early": True})[1].startswith("early=True")


def test_what_is_known_before_the_first_forward(start, script, tmp_path) -> None:
    """All that is left of a training that runs out of memory in its first step."""
    left = tmp_path / "facts.json"
    source = LOOP.replace("Net.ballast = bytearray(64 << 20)", "raise MemoryError('for a test')")
    trial = start(str(script(source)), timeout_s=120.0, plan={"early_facts": str(left)})
    with pytest.raises(TrialEnded) as ended:
        trial.wait_ready()
    assert ended.value.outcome.kind == "out_of_memory_host"
    facts = json.loads(left.read_text())
    assert facts["device"] == "cpu" and None not in facts.values()
    assert [m["kind"] for m in facts["modules"]] == ["Net"] and facts["modules"][0]["parameters"] == 72
    assert [o["kind"] for o in facts["optimizers"]] == ["AdamW"]
    from msgspec import convert

    from saturate.records.facts import Facts

    assert convert(facts, Facts).modules[0].linears == 1


def test_a_trial_that_passes_its_limit_is_ended(start, script) -> None:
    trial = start(str(script(LOOP)), timeout_s=120.0, limit_bytes=64 << 20)
    with pytest.raises(TrialEnded) as ended:
        trial.wait_ready()
    assert ended.value.outcome.kind == "over_limit" and "the limit is 64.0 MiB" in ended.value.outcome.reason
    assert trial.peak_bytes > 64 << 20


def test_processes_that_share_memory_are_not_counted_twice(start, script) -> None:
    source = """
    import os, torch, numpy
    from torch.utils.data import DataLoader
    shared = numpy.ones(96 << 17)        # 96 MiB, in the parent and in both workers
    class Data(torch.utils.data.Dataset):
        def __len__(self): return 10**6
        def __getitem__(self, i): return torch.full((4,), float(shared[i]))
    model = torch.nn.Linear(4, 1); optimizer = torch.optim.SGD(model.parameters(), lr=1e-6)
    for x in DataLoader(Data(), batch_size=4, num_workers=WORKERS):
        optimizer.zero_grad(); model(x).sum().backward(); optimizer.step()
    """
    peaks = []
    for workers in (0, 2):
        trial = start(str(script(source.replace("WORKERS", str(workers)))), timeout_s=120.0)
        trial.wait_ready()
        trial.run_block(4, 8)
        peaks.append(trial.peak_bytes)
        trial.stop()
    assert peaks[0] > 96 << 20 and peaks[1] - peaks[0] < 160 << 20, "two workers of over 300 MiB, most of it shared"


def test_a_profile_does_not_count(start, script) -> None:
    trial = start(str(script(LOOP)), timeout_s=120.0)
    trial.wait_ready()
    trial.run_block(1, 3)
    before = trial.peak_bytes
    trial.ask("ceilings")       # multiplies large matrices
    trial.run_block(1, 3)
    assert trial.peak_bytes == before


@pytest.mark.parametrize("called", ["whole", "first", "inner"])
def test_the_modules_in_front(called: str) -> None:
    """The outermost whose own forward is called, as far as one call tells."""
    inner = torch.nn.Linear(2, 2)
    first = torch.nn.Sequential(inner, torch.nn.ReLU())
    second = torch.nn.Linear(2, 2)
    frozen = torch.nn.Linear(2, 2)
    whole = torch.nn.ModuleDict({"first": first, "second": second, "frozen": frozen})
    trained = {id(p) for m in (first, second) for p in m.parameters()}
    modules = [frozen, inner, first, second, whole, torch.nn.ReLU()]
    found = front(modules, trained, {"whole": whole, "first": first, "inner": inner}[called])
    expected = {"whole": [whole], "first": [second, first], "inner": [second, inner]}[called]
    assert {id(m) for m in found} == {id(m) for m in expected}


