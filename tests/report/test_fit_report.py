"""What a fit says: at most twelve lines in any terminal, and a page that stands alone."""

from __future__ import annotations

import json
import re

import msgspec
import pytest

from saturate.records.fit import Fit, LoaderBatch, SizeThroughput, SizeTried
from saturate.report import fit, fit_html
from saturate.report.cells import cells
from saturate.report.page import MAX_BYTES

GIB = 2**30


def found(**changes) -> Fit:
    values = {
        "command": ["python", "train.py", "--token", "s3cret"], "verdict": "fits", "micro_batch": 412, "script_batch": 32, "largest_tried": 431,
        "largest_fitting": 412, "proved_steps": 50, "proved_with": ["a batch of the largest samples", "an evaluation", "a checkpoint"],
        "peak_bytes": int(3.8 * GIB), "limit_bytes": 4 * GIB, "margin_bytes": GIB // 8, "predicted_peak_bytes": int(3.78 * GIB),
        "counted": "all", "kinds": {"parameters": 10**7, "gradients": 10**7, "optimizer_state": 2 * 10**7}, "sample_bytes": 8e6, "fixed_bytes": 4e8,
        "trials": [SizeTried(micro_batch=32, outcome="fits", peak_bytes=GIB, seconds=1.0, trial=1, purpose="measure"),
                   SizeTried(micro_batch=431, outcome="out_of_memory", peak_bytes=4 * GIB + 5, seconds=9.0, trial=2, purpose="prove"),
                   SizeTried(micro_batch=412, outcome="fits", peak_bytes=int(3.8 * GIB), seconds=9.0, trial=3, purpose="prove")],
        "trial_count": 3, "throughput": [SizeThroughput(micro_batch=size, samples_per_s=rate, ci=(rate * 0.97, rate * 1.03))
                                         for size, rate in ((32, 300.0), (103, 800.0), (206, 990.0), (412, 1000.0))],
        "knee": 206, "utilisation": 0.93, "utilisation_of": "2 cores", "advice": ["a batch of 412 is another training"],
        "seconds": 63.0, "report": "/home/u/.saturate/x/report.html", "next_command": "saturate tune -- python train.py --token s3cret",
    }
    return Fit(**{**values, **changes})


CASES = {
    "fits": found(),
    "for throughput": found(target="throughput", micro_batch=206, proved_steps=50),
    "ranks": found(world_size=2, not_seen=["an evaluation: the script made none within the steps that were run"]),
    "nothing fits": found(verdict="nothing_fits", micro_batch=None, reason="a batch of 1 does not fit 4.00 GiB", throughput=[], knee=None, advice=[]),
    "refused": found(verdict="refused", micro_batch=None, reason="its training does not read from a DataLoader", trials=[], throughput=[], knee=None,
                     advice=[]),
    "inconclusive": Fit(command=["python", "t.py"], verdict="inconclusive", reason="interrupted"),
    "unproved": found(verdict="inconclusive", reason="the budget ended before a size was proved", micro_batch=None, measured_batch=406, measured_steps=5,
                      proved_steps=0, proved_with=[], predicted_peak_bytes=None, throughput=[], knee=None, utilisation=None, advice=[]),
    "for throughput, which nobody measured": found(target="throughput", throughput=[], knee=None, utilisation=None,
                                                   throughput_note="the budget was too short to measure throughput"),
    "grows": found(growth_bytes_per_step=3.0 * 2**20, lasts_steps=1087, throughput=[], knee=None),
}


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("width", [20, 40, 60, 80, 120])
def test_the_summary_fits_the_terminal(name, width):
    record = CASES[name]
    for blocks in (True, False):
        lines = fit.summary(record, width=width, color=False, blocks=blocks).splitlines()
        assert len(lines) <= fit.MAX_LINES
        assert lines[-1].startswith("next")
        for line in lines:
            if not line.startswith(("report", "next")):
                assert cells(line) <= max(width, fit.MIN_WIDTH), line
        assert blocks or all(ord(char) < 128 for char in "".join(lines))


def test_the_verdict_comes_first_and_numbers_follow():
    text = fit.summary(CASES["fits"], width=100, color=False)
    assert text.startswith("a batch of 412 fits 4.00 GiB\n")
    assert "3.80 GiB of 4.00 GiB, predicted 3.78 GiB; margin 128 MiB" in text
    assert "50 steps, with a batch of the largest samples, an evaluation, a checkpoint" in text
    assert "from 206 on, larger batches are no faster; 93% of 2 cores busy there" in text
    assert re.search(r"412  \u2588+ +1,000 \+-3%", text)


def test_a_few_steps_are_not_called_a_proof():
    text = fit.summary(CASES["unproved"], width=100, color=False)
    assert text.startswith("no batch was proved: 406 only ran for 5 steps\n") and "\nproved" not in text and "fits" not in text
    page = fit_html.render(CASES["unproved"])
    assert "Measured, not proved" in page and "Proved for" not in page and "No batch was proved" in page


def test_a_knee_is_spoken_of_only_where_throughput_was_measured():
    page = fit_html.render(CASES["grows"])
    assert "Knee" not in page and "<dt>Throughput</dt><dd>not measured</dd>" in page
    assert "<dt>Knee</dt><dd>206</dd>" in fit_html.render(CASES["fits"])


def test_memory_that_grows_is_named():
    text = fit.summary(CASES["grows"], width=100, color=False)
    assert text.startswith("a batch of 412 fits 4.00 GiB for about 1,087 steps: memory grows\n")
    assert "by 3.0 MiB with every step: 4.00 GiB last about 1,087 steps" in text
    assert "emory grows by 3.0 MiB with every step" in fit_html.render(CASES["grows"])


def test_the_title_names_the_batch_of_every_loader():
    loaders = [LoaderBatch(dataset="A", length=9, script_batch=32, micro_batch=412), LoaderBatch(dataset="B", length=None, script_batch=64, micro_batch=824)]
    text = fit.summary(found(loaders=loaders), width=100, color=False)
    assert text.startswith("a batch of 412 (beside it 824) fits 4.00 GiB\n") and "the script uses 32 and 64" in text


def test_the_knee_is_shown_where_sizes_must_go():
    curve = CASES["fits"].throughput
    shown = fit.bars(curve, 32, 60, 2, True)
    assert [line.split()[0] for line in shown] == ["32", "412"]
    assert fit.bars(curve, 32, 60, 0, True) == [] == fit.bars([], None, 60, 4, True)
    assert all("\u2588" not in line for line in fit.bars(curve, 32, 20, 4, True)), "no room for a bar: numbers only"


def test_colour_is_only_added():
    plain = fit.summary(CASES["fits"], width=80, color=False)
    assert re.sub(r"\033\[[\d;]*m", "", fit.summary(CASES["fits"], width=80, color=True)) == plain


@pytest.mark.parametrize("name", CASES)
def test_the_page_stands_alone_and_keeps_secrets(name):
    page = fit_html.render(CASES[name])
    assert page.startswith("<!doctype html>") and "default-src &#x27;none&#x27;" in page
    assert not re.search(r'(?:src|href)="(?!#)', page), "something would be loaded"
    assert "s3cret" not in page
    embedded = re.search(r'<script type="application/json" id="record">(.*?)</script>', page, re.S)
    assert embedded and msgspec.json.decode(embedded[1].encode(), type=Fit).verdict == CASES[name].verdict


def test_the_page_escapes_what_the_workload_says():
    page = fit_html.render(found(reason="<script>alert(1)</script>", notes=["<b>"]))
    assert "<script>alert" not in page and "&lt;script&gt;alert(1)" in page


def test_a_page_stays_below_the_limit_whatever_the_record_holds():
    tried = SizeTried(micro_batch=1, outcome="failed", peak_bytes=GIB, seconds=1.0, trial=1, purpose="measure", reason="CUDA error & <more> " * 50)
    giant = found(trials=[msgspec.structs.replace(tried, micro_batch=1 + number) for number in range(5_000)], notes=["a note " * 1000] * 500)
    page = fit_html.render(giant)
    assert len(page.encode()) < MAX_BYTES
    assert "Left out of this page for its size: trials: " in page and "of 5,000 entries are shown" in page


@pytest.mark.parametrize("note", ["", "from the one size that was timed"])
def test_one_size_alone_has_no_knee_and_no_empty_sentence(note):
    one = SizeThroughput(micro_batch=32, samples_per_s=300.0, ci=(290.0, 310.0))
    page = fit_html.render(found(throughput=[one], throughput_note=note, knee=None, utilisation=None))
    assert ". ." not in page and ".." not in re.sub(r"<style>.*?</style>|<script.*?</script>", "", page, flags=re.S)


def test_a_throughput_that_was_asked_for_and_not_measured_is_told():
    """The answer is then the largest size that was proved, and was shown as if that were the fastest."""
    record = CASES["for throughput, which nobody measured"]
    assert "\nknee        not known: the budget was too short to measure throughput\n" in fit.summary(record, width=120, color=False)
    assert "The budget was too short to measure throughput" in fit_html.render(record)


def test_the_json_has_the_promised_names():
    text = json.loads(msgspec.json.encode(CASES["fits"]))
    assert {"micro_batch", "largest_tried", "proved_steps", "peak_bytes", "limit_bytes", "predicted_peak_bytes", "trials", "throughput", "knee"} <= set(text)
    assert {"micro_batch", "outcome", "peak_bytes", "seconds"} <= set(text["trials"][0])
    assert set(text["throughput"][0]) == {"micro_batch", "samples_per_s", "ci"}
