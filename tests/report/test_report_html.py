"""The HTML report as text: size, escaping, self-containment, contents, contrast."""

from __future__ import annotations

import json
import re

import msgspec
import pytest
import studies
from pages import Page, contrast, stands_alone

from saturate.records.analysis import Finding
from saturate.records.result import StudyRecord
from saturate.report import style
from saturate.report.html import render
from saturate.report.page import MAX_BYTES
from saturate.report.trim import LADDER, redact, trim


@pytest.fixture(scope="module", params=list(studies.ALL))
def page(request):
    return Page(render(studies.ALL[request.param]()))


def test_the_page_stands_alone(page):
    stands_alone(page)


def test_own_text_names_no_address():
    text = render(studies.big_win())
    assert "://" not in text
    assert not re.search(r"url\(|@import", text)


def test_hostile_strings_stay_text():
    text = render(studies.hostile())
    page = Page(text)
    assert "<img src=x onerror=alert(1)>" in page.text
    assert text.count("</script>") == 1 and text.count("</style>") == 1
    assert not re.search("[\x00\x1b\u202e\ud800]", text)
    text.encode()
    assert json.loads(page.data)["result"]["run"].startswith("7f3a</script>")
    for char in "<>&\u2028\u2029":
        assert char not in page.data


def test_no_string_field_adds_an_element_or_an_attribute():
    def vocabulary(record):
        return {(tag, name) for tag, attributes in Page(render(record)).elements for name in ("", *attributes)}

    assert vocabulary(studies.hostile()) <= vocabulary(studies.big_win())


@pytest.mark.parametrize("name", studies.ALL)
def test_typical_pages_are_small(name):
    assert len(render(studies.ALL[name]()).encode()) < (250_000 if name == "hostile" else 150_000)


def test_a_page_stays_below_the_limit_whatever_the_record_holds():
    text = render(studies.giant())
    assert len(text.encode()) < MAX_BYTES
    page = Page(text)
    assert "techniques: " in page.text and " entries are shown" in page.text


def test_the_embedded_record_can_be_read_back():
    record = studies.big_win()
    again = msgspec.json.decode(Page(render(record)).data, type=StudyRecord)
    assert again.result.techniques == record.result.techniques
    assert again.races[0].log_ratios[0] == pytest.approx(record.races[0].log_ratios[0], rel=1e-5)
    assert again.notes == record.notes


def test_argument_values_are_left_out_of_the_whole_page():
    record = studies.big_win()
    text = render(record)
    assert "s3cret-value" not in text and "small.yaml" not in text
    section = text.partition('<section id="reproduce"')[2].partition("</section>")[0]
    assert "train.py --config \u2026 --api-token \u2026" in section and "stand as \u2026 here" in section
    bare = msgspec.structs.replace(record, result=msgspec.structs.replace(record.result, command=["python", "train.py"]))
    assert "stand as \u2026 here" not in render(bare)


def test_what_comes_before_the_steady_state_stands_beside_it():
    text = Page(render(studies.big_win())).text
    said = text.partition("Start of the baseline")[2]
    assert said.strip().startswith("start-up 3.1 s, warm-up 2.0 s")
    assert "start-up 3.4 s, warm-up 14 s, compiling (in these, with cold caches) 11 s, 2 recompilations" in said.partition("the tuned script")[2]
    assert "stands on that one" in text, "no bar between the first and the last is called measured against the baseline"


def test_measure_again_asks_the_same_question():
    record = msgspec.structs.replace(studies.big_win(), options=["--fit", "20", "--only", "compile"])
    assert "saturate tune --fit 20 --only compile -- " in Page(render(record)).text


def test_a_page_of_a_study_that_changed_nothing_agrees_with_itself():
    record = studies.big_win()
    refused = msgspec.structs.replace(
        record, staircase=record.staircase[:1], split_after={}, result=msgspec.structs.replace(
            record.result, tuned=record.result.baseline, speedup=1.0, speedup_ci=None, verdict="inconclusive", verified=None,
            techniques=[msgspec.structs.replace(o, fate="not_tried", reason="not named with --only", gain=None, gain_ci=None)
                        for o in record.result.techniques]))
    text = Page(render(refused)).text
    assert "none was tried" in text and " applicable" not in text.partition("Measured staircase")[0]
    assert "tried:" not in text and "No step time was measured" not in text and "Nothing was kept on top of it" in text


@pytest.mark.parametrize(
    ("command", "shown"),
    [
        (
            ["python", "-c", "import x", "--lr=1", "--flag", "-n4"],
            ["python", "-c", "\u2026", "--lr=\u2026", "--flag", "-n\u2026"],
        ),
        ([], []),
    ],
)
def test_redaction(command, shown):
    assert redact(command) == shown


def test_the_page_says_what_was_found():
    text = Page(render(studies.big_win())).text
    for part in (
        "1.79\u00d7 faster",
        "Verified",
        "Interval [1.77, 1.80]",
        "after 1,240 steps (about 2 min 27 s)",
        "AMD EPYC 9B14",
        "Gains do not add up",
        "Measured together",
        "loss outside the allowed band at update 41",
        "num_workers=2, persistent_workers=true",
        "A/A",
        "baseline against baseline",
        "3 pairs, 30 rounds",
        "The tune took 9 min 46 s of a budget of 10 min 00 s",
        "trials/t014/output.log",
        "recipe show",
        "Another process used 0.4 cores",
    ):
        assert part in text, part
    for outcome in studies.big_win().result.techniques:
        assert text.count(outcome.id) >= 1 and outcome.reason in text


def test_the_diagnosis_stands_below_the_split():
    found = Finding(id="input-bound", title="waiting for <input>", reason="51 % of the step.", evidence=[], bound=2.05, confidence="high")
    text = Page(render(msgspec.structs.replace(studies.big_win(), findings=[found]))).text
    assert "What limits the baseline" in text and "waiting for <input>" in text and "2.05\u00d7" in text
    assert "What limits the baseline" not in Page(render(studies.big_win())).text


def test_kept_come_first_then_tried_then_folded():
    record = studies.big_win()
    mixed = msgspec.structs.replace(record.result, techniques=record.result.techniques[::-1])
    text = render(msgspec.structs.replace(record, result=mixed))
    places = [
        text.index(mark) for mark in ("<h3>Kept</h3>", "<h3>Tried, not kept</h3>", "1 not tried and 4 not applicable")
    ]
    assert places == sorted(places)
    assert text.index("<b>allocator</b>") < text.index("<b>channels-last</b>") < text.index("<details>")


def test_the_final_set_is_the_open_plot():
    text = render(studies.big_win())
    numerics = text[text.index('<section id="numerics"') : text.index('<section id="method"')]
    assert (
        numerics.index("final set: inside") < numerics.index("<details>") < numerics.index("fp16-autocast: outside")
    )


@pytest.mark.parametrize(
    ("name", "texts"),
    [
        (
            "nothing_helps",
            ["Nothing safe helps", "The baseline stays at 212.4 ms/step", "Closest: sdpa-backend +0.8 %"],
        ),
        (
            "cannot_verify",
            ["Cannot verify, so nothing is claimed", "the loss is constant", "No series were compared"],
        ),
        ("unverified", ["no set trains like the baseline", "loss is not finite from update 40"]),
        ("too_noisy", ["Too noisy to decide", "Differences below 8.4 % cannot be seen here"]),
        (
            "failed_baseline",
            ["the workload trains for 3 steps", "No technique was considered", "No race was finished"],
        ),
        ("empty", ["Undecided within the budget", "not measured"]),
    ],
)
def test_other_outcomes(name, texts):
    page = Page(render(studies.ALL[name]()))
    for text in texts:
        assert text in page.text, text
    assert ("faster" in page.text.partition("Measured staircase")[0]) is False
    assert "None" not in page.text and "nan" not in page.text.lower().replace("nano", "")


def test_the_same_record_gives_the_same_page():
    assert render(studies.big_win()) == render(studies.big_win())


def test_trim_keeps_what_fits():
    record = studies.big_win()
    same = trim(record, LADDER[0])
    assert same.result == record.result and same.notes == record.notes and same.trials == record.trials


def test_trim_says_what_it_cut():
    record = msgspec.structs.replace(studies.big_win(), notes=["n" * 5000], budget_s=600.0)
    cut = trim(record, LADDER[-1])
    assert len(cut.notes[0]) == LADDER[-1].text
    assert any("notes: texts longer than 40" in note for note in cut.notes)
    assert any("values of a series" in note for note in cut.notes)
    assert len(cut.numerics[0].baseline) == LADDER[-1].series


@pytest.mark.parametrize(("palette", "on"), [(style.LIGHT, style.ON_LIGHT), (style.DARK, style.ON_DARK)])
def test_contrast_reaches_aa(palette, on):
    for text in ("ink", "soft", "accent"):
        for ground in ("page", "panel"):
            assert contrast(palette[text], palette[ground]) >= 4.5, (text, ground)
    for mark in ("base", "accent", "whisker"):
        assert contrast(palette[mark], palette["page"]) >= 3, mark
    for shade, text in enumerate(on):
        assert contrast(palette[text], palette[f"shade{shade}"]) >= 4.5, shade
    assert contrast(palette["accent"], palette["band"]) >= 3


def test_memory_stands_beside_time():
    page = Page(render(studies.fits()))
    assert "Peak memory" in page.text and "3.17 GiB (\u221238 %)" in page.text
    assert "peak 3.21 GiB instead of 5.13 GiB, limit 4.00 GiB" in page.text
    assert "Peak memory" not in Page(render(studies.big_win())).text


def test_a_record_of_before_memory_was_measured_is_read():
    """An older study file lacks the fields, in the record and in what its store keeps of each trial."""
    from saturate.records.result import TrialRecord

    flat = msgspec.to_builtins(studies.big_win())
    for part in ("peak_bytes", "baseline_peak_bytes", "limit_bytes", "fits"):
        del flat["result"][part]
    for entry in (*flat["result"]["techniques"], *flat["trials"]):
        del entry["peak_bytes"]
    record = msgspec.convert(flat, StudyRecord)
    assert record.result.fits is None and record.trials[0].peak_bytes is None
    assert Page(render(record)).text
    assert msgspec.convert(flat["trials"][0], TrialRecord) == record.trials[0]


def test_the_total_has_its_interval_below_it_as_the_gains_have():
    """Beside it, it reached into the column of memory on a screen of middling width."""
    foot = render(studies.fits()).partition("Measured together")[2].partition("</tfoot>")[0]
    assert re.search(r'\d\.\d\d\u00d7<span class="sub">\[\d', foot)
