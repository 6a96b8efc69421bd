"""Two analyses side by side, in a terminal and as a page."""

from __future__ import annotations

import re

import analyses
import msgspec
import pytest
from pages import Page

from saturate.records.comparison import Change, Comparison, DeviceComparison, OperatorChange
from saturate.report import analysis_compare as compare
from saturate.report.analysis_html import render_comparison
from saturate.report.cells import cells
from saturate.report.page import MAX_BYTES

MS = 1e6


def change(name, old, new, unit="ns per step", unknown=""):
    return Change(
        name=name,
        unit=unit,
        old=old,
        new=new,
        unknown=unknown,
        ratio=old / new if old and new and "ns" in unit else None,
    )


def device(old=200.0 * MS, new=100.0 * MS, **given):
    parts = [change("compute", 90 * MS, 90 * MS), change("idle", 110 * MS, 10 * MS), change("exposed_copy", 0.0, 0.0)]
    fields = {
        "id": 0,
        "rank": None,
        "old_name": "V100",
        "new_name": "V100",
        "old_steps": 4,
        "new_steps": 4,
        "step": change("step", old, new),
        "span": change("span", 5.0, 6.0, "ns"),
        "parts": parts,
        "shares": [
            change("busy_of_step", 0.45, 0.9, "of the step"),
            change("compute", 0.45, 0.9, "of the step"),
            change("data_wait_exposed", None, 0.1, "of the step", "the old trace: no loader events"),
        ],
        "gaps": [change("input", 100 * MS, 2700.0), change("sync", 0.0, 0.0)],
        "operators": [
            OperatorChange(
                name="aten::mm",
                shapes="[4, 4]",
                dtypes="float32",
                fate="vanished",
                old_ns=8 * MS,
                new_ns=0.0,
                calls_old=3,
                calls_new=0,
                kernels_old=["sgemm"],
            )
        ],
        "operators_left_out": 7,
        "old_verdict": "input-bound",
        "new_verdict": "host-bound",
    }
    return DeviceComparison(**{**fields, **given})


def comparison(*devices, **given):
    fields = {
        "old": ["a.json"],
        "new": ["b.json"],
        "devices": list(devices) or [device()],
        "old_verdict": "input-bound",
        "new_verdict": "host-bound",
        "findings_gone": [analyses.INPUT],
        "findings_new": [],
        "findings_kept": [analyses.ODD],
        "notes": ["6 steps against 4: lengths are per step"],
    }
    return Comparison(**{**fields, **given})


def plain(record, width=100):
    return compare.summary(record, width=width, color=False)


def test_what_a_comparison_says():
    text = plain(comparison())
    assert text.startswith(
        "The recorded step is 2.00x shorter: 200.0 ms -> 100.0 ms per step\nverdict    input-bound -> host-bound"
    )
    for line in (
        r"^step +step +200\.0 ms  ->  100\.0 ms +2\.00x  per step$",
        r"^ +idle +110\.0 ms  -> +10\.0 ms +11\.00x  per step$",
        r"^shares +busy +45\.0 %  ->  90\.0 % +of the step$",
        r"^ +input wait, exposed +not known  ->  10\.0 % +of the step$",
        r"^idle +input +100\.0 ms  ->  2\.7 us  37,037x  per step$",
        r"^operators +vanished  8\.00 ms  ->  0 ns +aten::mm \[4, 4\] float32$",
        r"^ +\+7 that changed less$",
        r"^gone +at most 2\.04x: The loader computes too slowly$",
        r"^still +at most 1\.17x: Matrix sizes",
        r"^note +6 steps against 4",
    ):
        assert re.search(line, text, re.M), line
    assert "exposed copies" not in text and "sync" not in text  # 0 before and after
    assert text.endswith("next       saturate tune -- python train.py")


def test_findings_that_the_other_trace_cannot_judge():
    record = comparison(findings_gone=[], not_judged_by_new=[analyses.INPUT], not_judged_by_old=[analyses.ODD, analyses.INPUT])
    text = plain(record)
    assert re.search(r"^old alone  at most 2\.04x: The loader computes too slowly$", text, re.M) and "gone  " not in text
    assert "1 finding of the old trace alone: whether it is gone cannot be told" in text
    assert "2 findings of the new trace alone: whether they are new cannot be told" in text
    page = render_comparison(record)
    assert "0 gone, 0 new, 1 still there, 1 of the old trace alone, 2 of the new trace alone" in page
    assert "Of the old trace alone" in page and "whether it is gone" in page


@pytest.mark.parametrize(
    ("old", "new", "title"),
    [
        (200 * MS, 100 * MS, "The recorded step is 2.00x shorter"),
        (100 * MS, 200 * MS, "The recorded step is 2.00x longer"),
        (100 * MS, 100 * MS, "The recorded step is as long as before: "),
        (100 * MS, 100 * MS + 1, "The recorded step is as long as before: "),
        (1000 * MS, 1001 * MS, "The recorded step is 1.001x longer"),
        (None, 100 * MS, "Lengths cannot be compared"),
    ],
)
def test_the_direction_is_named(old, new, title):
    assert plain(comparison(device(old, new))).startswith(title)


def test_what_cannot_be_compared_says_why():
    record = comparison(device(None, None), notes=["neither trace marks its steps"])
    assert plain(record).startswith("Lengths cannot be compared: neither trace marks its steps\n")
    assert plain(comparison(devices=[], notes=[])).startswith(
        "Lengths cannot be compared: the traces have no device in common\n"
    )


def test_several_devices_are_named_and_folded():
    text = plain(comparison(*(device(rank=rank) for rank in range(5))))
    assert "rank 0, device 0" in text and "+3 more devices, see --json" in text


def test_the_next_command_names_what_is_left():
    record = comparison(findings_gone=[], findings_kept=[analyses.INPUT])
    assert compare.next_command(record) == "saturate tune --only loader-workers -- python train.py"


@pytest.mark.parametrize("width", [60, 120])
def test_lines_fit_the_terminal(width):
    for line in plain(comparison(device(), device(rank=3)), width).split("\n")[:-1]:
        assert cells(line) <= width, line


def hostile():
    bad = analyses.HOSTILE
    one = device(
        old_name=bad,
        new_name=bad,
        step=change(bad, None, None, bad, bad),
        operators=[msgspec.structs.replace(device().operators[0], name=bad, shapes=bad, kernels_new=[bad])],
    )
    finding = msgspec.structs.replace(analyses.INPUT, title=bad, reason=bad)
    return comparison(one, old=[bad], new=[bad], findings_new=[finding], notes=[bad])


def test_names_of_a_trace_are_text():
    text = plain(hostile())
    assert not re.search("[\x00-\x09\x0b-\x1f\x7f-\x9f\u200f\u202a-\u202e\ud800-\udfff]", text)
    page = render_comparison(hostile())
    assert page.count("</script>") == 1 and not re.search("[\x00\x1b\u202e\ud800]", page)
    assert Page(page).open == [] and "<img src=x onerror=alert(1)>" in Page(page).text


def test_the_page():
    text = render_comparison(comparison())
    page = Page(text)
    assert page.open == [] and len(page.ids) == len(set(page.ids)) and len(text) < 100_000
    for part in (
        "The recorded step is 2.00\u00d7 shorter",
        "200.0 ms \u2192 100.0 ms per step.",
        "37,037\u00d7",
        "the old trace: no loader events",
        "7 operators changed less.",
        "old: sgemm",
        "6 steps against 4: lengths are per step",
        "1 gone, 0 new, 1 still there",
    ):
        assert part in page.text, part
    assert 'class="compact' not in text, "on a narrow screen each row becomes a block: no column is out of view"
    again = msgspec.json.decode(page.data, type=Comparison)
    assert again.devices[0].step == comparison().devices[0].step


def test_a_giant_comparison_stays_below_the_limit():
    many = [device(rank=rank, operators=device().operators * 30) for rank in range(300)]
    text = render_comparison(comparison(*many, notes=["x" * 5000] * 500))
    assert len(text.encode()) < MAX_BYTES and "Left out of this page for its size" in text
