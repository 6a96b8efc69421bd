"""The order of the search follows the diagnosis."""

from __future__ import annotations

from pathlib import Path

import pytest
from tune_kit import Folder

from saturate.records.analysis import Finding
from saturate.study.guidance import promise, promised_gain


def finding(bound: float | None, *techniques: str) -> Finding:
    return Finding(id="x", title="", reason="", evidence=[], bound=bound, confidence="high", techniques=list(techniques))


FOUND = [finding(1.5, "loader-workers", "pin-memory"), finding(1.1, "fused-optimizer"), finding(None, "compile"),
         finding(2.0, "pin-memory")]


def test_what_a_finding_names_comes_first_and_by_its_worth() -> None:
    bounds = {"allocator": None, "compile": 0.9, "fused-optimizer": 0.3, "loader-workers": 0.4, "pin-memory": 0.05}
    order = sorted(bounds, key=lambda identity: promise(identity, bounds[identity], FOUND))
    assert order == ["loader-workers", "fused-optimizer", "pin-memory", "compile", "allocator"]


@pytest.mark.parametrize(("bound", "share"), [(None, 0.5), (0.05, 0.05), (0.9, 0.5)])
def test_a_technique_gives_no_more_than_the_finding_or_itself_says(bound: float | None, share: float) -> None:
    assert promise("pin-memory", bound, FOUND) == (0, -share)


def test_without_findings_a_technique_that_nothing_bounds_waits() -> None:
    assert promise("compile", 0.2, []) < promise("allocator", None, [])


def test_what_can_give_but_little_comes_last_unless_it_is_named() -> None:
    """On a public script dataset-cache, which could remove 3 % of a step, took the time in which compile and cpu-threads had no turn."""
    assert promise("dataset-cache", 0.03, []) > promise("compile", 0.9, [], slow_start=True) > promise("cpu-threads", None, [])
    assert promise("dataset-cache", 0.04, []) < promise("dataset-cache", 0.03, [])
    assert promise("dataset-cache", 0.03, [finding(1.5, "dataset-cache")]) < promise("cpu-threads", None, [])


def test_what_takes_long_to_find_out_waits_unless_the_diagnosis_names_it() -> None:
    """compile took 70 of 180 s on a public script, and four that take ten each had no turn."""
    assert promise("compile", 0.9, [], slow_start=True) > promise("allocator", None, [])
    assert promise("compile", 0.9, [finding(2.0, "pin-memory")], slow_start=True) > promise("fused-optimizer", 0.1, [])
    for named in (finding(1.2, "compile"), finding(None, "compile")):
        assert promise("compile", 0.9, [named], slow_start=True) == promise("compile", 0.9, [named])


@pytest.mark.parametrize(("identity", "bound", "gain"), [("pin-memory", None, 1.0), ("pin-memory", 0.2, 0.25), ("loader-workers", 0.9, 0.5),
                                                           ("pin-memory", 1.0, 1.0), ("compile", 0.5, 0.0), ("allocator", None, 0.0)])
def test_what_findings_promise(identity: str, bound: float | None, gain: float) -> None:
    assert promised_gain(identity, bound, FOUND) == pytest.approx(gain)


SLOW_ROWS = """
import time, torch
class Rows(torch.utils.data.Dataset):
    def __len__(self): return 100_000
    def __getitem__(self, index):
        end = time.process_time() + 0.004
        while time.process_time() < end: pass
        return torch.ones(8)
model = torch.nn.Linear(8, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)
for rows in torch.utils.data.DataLoader(Rows(), batch_size=4):
    optimizer.zero_grad()
    model(rows).pow(2).mean().backward()
    optimizer.step()
"""


def test_a_tune_says_what_limits_its_baseline(tmp_path: Path) -> None:
    folder = Folder(tmp_path)
    folder.write("train.py", SLOW_ROWS)
    ended = folder.tune("--only", "zero-grad-none")
    assert "diagnosis: making a batch takes too much CPU" in ended.stderr
    assert "What limits the baseline" in Path(ended.result.report).read_text(encoding="utf-8")
    assert not list(tmp_path.rglob("trace*.json.gz"))
