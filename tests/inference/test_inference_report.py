"""What an optimization says: at most twelve lines in any terminal, a table, and a page that stands alone."""

from __future__ import annotations

import json
import re

import msgspec
import optimizations
import pytest
from pages import Page, stands_alone

from saturate.inference.result import Result
from saturate.records.inference import (
    LEFT_OUT,
    SEARCH_ENDED,
    TIME_ENDED,
    CandidateRecord,
    Fate,
    OptimizeRecord,
    ThroughputRow,
)
from saturate.records.result import Phase
from saturate.report import inference as report
from saturate.report import inference_charts as charts
from saturate.report import inference_html as page
from saturate.report import inference_words as say
from saturate.report.cells import cells
from saturate.report.page import MAX_BYTES


@pytest.fixture(params=list(optimizations.ALL))
def record(request):
    return optimizations.ALL[request.param]()


# -- summary -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("width", [20, 40, 60, 80, 120])
def test_the_summary_fits_the_terminal(record, width):
    lines = report.summary(record, width=width, color=False).splitlines()
    assert len(lines) <= report.MAX_LINES
    assert lines[-1].startswith("next") and "saturate " in lines[-1]
    for line in lines:
        assert not re.search("[\x00-\x08\x1b\u202e\ud800]", line)
        if not line.startswith(("artifact", "report", "next")):
            assert cells(line) <= max(width, report.MIN_WIDTH), line


def test_a_win_says_what_was_gained_and_what_it_costs():
    lines = report.summary(optimizations.win(), width=110, color=False).splitlines()
    assert lines[0] == "6.82x faster [6.71, 6.93], within a drop of 0.01"
    text = "\n".join(lines)
    assert "with      onnx-int8-static method=percentile" in text
    assert "p50 77.5 -> 11.4, p99 100.8 -> 14.8 ms per call of 8 samples" in text
    assert "accuracy  score 0.968, drop 0.002 [-0.001, 0.0052] of 0.01 allowed, pass" in text
    assert "3.19x [3.10, 3.28] over the best lossless: onnx-runtime 2.14x" in text
    assert "peak 180 MiB instead of 512 MiB, 26.0 MiB stored" in text
    assert "5 dominated, 1 slower, 1 accuracy undecided, 2 rejected (accuracy), 1 rejected (behaviour)" in text
    assert "onnx-int8-static 6.97x, rejected (accuracy): it loses 0.057 or more" in text
    assert lines[-3:] == ["artifact  /home/u/runs/r18/artifact", "report    /home/u/runs/r18/report.html",
                          "next      saturate bench /home/u/runs/r18/artifact --batch 1,8,32"]


def test_what_the_best_is_beside_the_best_lossless_is_said_or_why_nobody_knows():
    alone = optimizations.win(best_lossless=optimizations.BASELINE)
    assert say.lossless_words(alone) == "no lossless candidate beats the model itself"
    assert page.render(alone).count("best lossless</span>") == 0
    record = optimizations.win()
    record = msgspec.structs.replace(record, best=msgspec.structs.replace(record.best, speedup_over_lossless=None,
                                                                          speedup_over_lossless_reason="the time ended after 2 rounds"))
    assert say.lossless_words(record) == ("onnx-runtime 2.14x; how much faster the best is than that is not known: "
                                          "the time ended after 2 rounds")


def test_without_a_check_nothing_is_said_of_accuracy():
    text = report.summary(optimizations.lossless(), width=110, color=False)
    assert text.startswith("2.14x faster [2.10, 2.18], lossless\n")
    assert "no check was given: lossless candidates only; outputs agree to 128 dB" in text


def test_what_is_not_shown_to_be_within_the_budget_is_no_win():
    record = optimizations.undecided()
    assert not say.won(record) and say.won(optimizations.win())
    text = report.summary(record, width=110, color=False)
    assert "accuracy undecided" in text.splitlines()[0] and "about 1,240 samples needed in all" in text
    assert "\033[1;32m" not in report.summary(record, width=80, color=True)
    assert "\033[1;32m" in report.summary(optimizations.win(), width=80, color=True)


def test_where_nothing_was_measured_the_first_that_ran_says_why():
    stopped = [CandidateRecord(id=id, techniques=[], fate=fate, reason=f"{id} says why")
               for id, fate in (("cuda-graphs", "not_applicable"), ("onnx-runtime", "not_applied"))]
    record = msgspec.structs.replace(optimizations.nothing(), candidates=stopped)
    assert say.why_nothing(record) == "no candidate could be measured: onnx-runtime, onnx-runtime says why"
    waiting = msgspec.structs.replace(record, candidates=[msgspec.structs.replace(one, fate="not_tried") for one in stopped])
    assert say.why_nothing(waiting) == "the time ended before the first candidate's turn: give it more"
    interrupted = [msgspec.structs.replace(one, reason=SEARCH_ENDED) for one in waiting.candidates]
    assert say.why_nothing(msgspec.structs.replace(waiting, candidates=interrupted)) == "the search was ended before the first candidate's turn"


def test_what_the_user_left_out_did_not_wait_for_its_turn():
    left_out = CandidateRecord(id="compile", techniques=[], fate="not_tried", reason=LEFT_OUT)
    assert say.why_nothing(msgspec.structs.replace(optimizations.nothing(), candidates=[left_out])) == "no candidate could be measured"


def test_the_page_numbers_what_was_measured_and_nothing_else():
    record = optimizations.win()
    text = page.render(record)
    measured = [one.id for one in record.candidates if one.latency_ms is not None]
    assert all(re.search(rf"<b>\d+\. {re.escape(id)}</b>", text) for id in measured) and f"<b>{len(measured)}. " in text
    assert all(f"<b>{one.id}</b>" in text for one in record.candidates if one.latency_ms is None)


def test_the_one_whose_final_race_did_not_decide_comes_first_and_no_ratio_twice():
    last = CandidateRecord(id="bf16", techniques=[], fate="inconclusive", reason="in the final race the time ended", speedup=1.5)
    record = msgspec.structs.replace(optimizations.nothing(), verdict="inconclusive",
                                     candidates=[*optimizations.nothing().candidates, last])
    assert "why       bf16: in the final race the time ended" in report.summary(record, width=110, color=False)
    said = "2.47x; a drop of 0.03"
    one = CandidateRecord(id="int8", techniques=[], fate="undecided", reason=said, speedup=2.47)
    record = msgspec.structs.replace(optimizations.nothing(), candidates=[one])
    assert f"why       int8, accuracy undecided: {said}" in report.summary(record, width=110, color=False)


def test_nothing_that_needs_less_memory_is_not_called_slow():
    tried = [msgspec.structs.replace(optimizations.candidate(id, "dominated", 4.0, 0.0), peak_memory_bytes=size * 2**20)
             for id, size in (("large", 900), ("small", 600))]
    record = msgspec.structs.replace(optimizations.nothing(), objective="memory", limits={}, max_drop=None, candidates=tried)
    text = report.summary(record, width=110, color=False)
    assert text.startswith("Nothing needs less memory\n")
    assert "why       closest: small, dominated: 600 MiB, and the model 512 MiB" in text


def test_what_it_took_is_said_beside_what_was_given():
    record = msgspec.structs.replace(optimizations.win(), seconds=74.2, given_s=40.0)
    lines = report.summary(record, width=80, color=False).splitlines()
    assert lines[-2].startswith("took      1 min 14 s, more than the 40 s given: ") and len(lines) <= report.MAX_LINES
    assert "1 min 14 s, more than the 40 s given" in page.render(record)
    record = msgspec.structs.replace(record, phases=[Phase(name=name, seconds=seconds) for name, seconds in (("start", 20.0), ("search", 1.0), ("winner", 53.2))])
    said = "1 min 14 s, more than the 40 s given: winner 53 s, start 20 s"
    assert f"took      {said}" in report.summary(record, width=80, color=False) and said in page.render(record)


def test_a_time_that_ended_before_the_first_turn_is_told_where_it_went_and_what_would_do():
    rows = [msgspec.structs.replace(optimizations.candidate("int8", "not_tried"), reason=TIME_ENDED, speedup=None)]
    record = msgspec.structs.replace(optimizations.nothing(), verdict="inconclusive", candidates=rows, given_s=60.0, seconds=359.0,
                                     phases=[Phase(name="start", seconds=45.0), Phase(name="check", seconds=301.0)])
    assert ("why       the time ended before the first candidate's turn, give it 24m: start 45 s, check 5 min 01 s"
            in report.summary(record, width=110, color=False))


def test_the_best_so_far_of_a_search_that_ended_early_is_no_win():
    record = optimizations.stopped()
    lines = report.summary(record, width=120, color=False).splitlines()
    assert lines[0] == "No answer yet"
    assert lines[1].split(maxsplit=2)[2] == f"6.90x in a screening, not confirmed: {optimizations.WINNER.id}"
    assert any(line.split() == ["stored", record.unconfirmed.artifact] for line in lines)
    assert not any(line.startswith(("artifact", "why")) for line in lines) and any("interrupted" in line for line in lines)


def test_nothing_helps_is_an_answer():
    text = report.summary(optimizations.nothing(), width=110, color=False)
    assert text.startswith("Nothing within the budget and the limits is faster\n")
    assert "why       onnx-int8-static 6.97x, rejected (accuracy)" in text
    assert text.splitlines()[-1] == "next      saturate explain nothing_helps"
    assert "build() failed: RuntimeError: no GPU" in report.summary(optimizations.failed(), width=110, color=False)


def test_colour_is_only_added(record):
    plain = report.summary(record, width=80, color=False)
    assert re.sub(r"\033\[[\d;]*m", "", report.summary(record, width=80, color=True)) == plain


def test_every_fate_has_its_words():
    fates = set(Fate.__args__)
    assert set(say.FATES) == set(page._SIGNS) == fates == {*say.MEANINGS, "kept"}


# -- table -------------------------------------------------------------------------------------------------------------


def test_the_table_has_a_line_for_everything(record):
    lines = report.table(record).splitlines()
    assert len(lines) == 2 + len(record.candidates) + (1 + len(record.notes) if record.notes else 0)
    for width in (40, 100):
        assert all(cells(line) <= width for line in report.table(record, width=width).splitlines())


def test_the_table_begins_with_the_winner():
    lines = report.table(msgspec.structs.replace(optimizations.win(), notes=[])).splitlines()
    assert lines[0].split() == ["candidate", "fate", "p50", "ms", "p99", "ms", "speed-up", "drop", "memory", "stored", "reason"]
    assert lines[1].startswith("baseline") and lines[2].startswith("onnx-int8-static method=percentile")
    assert "6.82x [6.71, 6.93]" in lines[2] and "0.002 [-0.001, 0.0052]" in lines[2] and "180 MiB" in lines[2], "as confirmed"
    at = lines[0].index("p50")
    assert all(line[at - 2:at] == "  " for line in lines)


def test_notes_stand_below_the_table():
    noted = msgspec.structs.replace(optimizations.win(), notes=["one\nline", "two"])
    assert report.table(noted).splitlines()[-3:] == ["", "note: one line", "note: two"]


def test_sizes_are_said_and_what_techniques_did():
    stored = optimizations.candidate("onnx", "dominated", 2.0, 0.0, size_bytes=45 * 2**20)
    zeros = optimizations.candidate("zeros", "dominated", 1.0, 0.0, compressed_bytes=3 * 2**19, done=["20.0% of 9 weights are zero <b>"])
    record = optimizations.win(candidates=[stored, zeros])
    assert "45.0 MiB" in report.table(record) and "1.5 MiB compressed" in report.table(record)
    text = page.render(record)
    assert "45.0 MiB" in text and "1.5 MiB compressed" in text and "20.0% of 9 weights are zero &lt;b&gt;." in text


def test_what_comes_before_the_steady_state_is_said():
    text = page.render(optimizations.win(candidates=[optimizations.candidate("onnx", "dominated", 2.0, 0.0),
                                                     optimizations.candidate("compile", "dominated", 2.0, 0.0, first_call_s=75.0, compile_s=74.0)]))
    assert "Prepared in 3.2 s, first call in 41 ms." in text
    assert "Prepared in 3.2 s, first call in 1 min 15 s; compilers took 1 min 14 s of this." in text


def test_what_misses_samples_is_named_where_there_is_no_answer():
    near = optimizations.candidate("near", "undecided", 3.0, 0.008, reason="3.00x; 60 samples cannot tell; about 900 samples would do")
    far = optimizations.candidate("far", "rejected_behaviour", 9.0, None, reason="NaN")
    open_ = optimizations.win(verdict="inconclusive", best=None, best_lossless=None, artifact=None, candidates=[far, near])
    text = report.summary(open_, width=120, color=False)
    assert text.startswith("No answer yet") and "near 3.00x" not in text and "near, accuracy undecided: 3.00x; 60 samples cannot tell" in text
    assert "about 900 samples would do" in text
def test_a_lossless_winner_that_the_check_leaves_undecided_is_said_to_be_both():
    record = optimizations.undecided()
    same = msgspec.structs.replace(optimizations.WINNER, numerics="reordering")
    title = say.title(msgspec.structs.replace(record, candidates=[same]))
    assert title.endswith(", lossless, accuracy undecided") and "lossless" not in say.title(record)


@pytest.mark.parametrize(("rate", "percent"), [(0.0312, "3.1"), (0.5, "50"), (1.0, "100"), (0.0004, "0.04")])
def test_changed_answers_are_shown_with_the_reason(rate, percent):
    changed = optimizations.candidate("int8", "dominated", 2.0, 0.001, reason="2.00x; within", flip_rate=rate)
    same = optimizations.candidate("bf16", "dominated", 1.5, 0.0, reason="1.50x; within", flip_rate=0.0)
    record = optimizations.win(candidates=[optimizations.WINNER, changed, same])
    said = f"2.00x; within; {percent} % of its answers are others"
    assert report.table(record).splitlines()[3].endswith(said) and report.table(record).splitlines()[4].endswith("1.50x; within")
    assert f"{said}." in page.render(record)


# -- the front and the picture -------------------------------------------------------------------------------------------


def test_the_front_holds_what_nothing_beats():
    found = [one.id for one in report.front(optimizations.CANDIDATES)]
    assert found == ["onnx-int8-static", "onnx-int8-static method=percentile", "bf16-weights + compile", "onnx-runtime"]
    broken = optimizations.candidate("broken", "rejected_behaviour", 50.0, 0.0)
    assert report.front([broken, optimizations.WINNER]) == [optimizations.WINNER]
    slow_calls = optimizations.candidate("slow calls", "over_limit", 50.0, None, numerics="reordering")
    assert report.front([slow_calls, optimizations.WINNER]) == [optimizations.WINNER], "nobody may use it"


def test_the_axes_hold_budget_and_everything_near_it():
    placed = charts.points(optimizations.win())
    down = charts._drops(placed, 0.01)
    assert down.low <= 0 and down.holds(0.01) and down.high == pytest.approx(0.04), "four budgets"
    assert down.share(0.44) == down.share(0.04), "what loses more sits at the edge"
    assert [point.record.id for point in placed][:2] == ["compile freezing=True", "baseline"], "large dots first"


@pytest.mark.parametrize("low, high", [(-0.004, 0.04), (0.0, 1e-3), (-0.013, 0.127), (-0.5, 600.0), (0.0, 0.99), (-1e9, 1e9)])
def test_ticks_are_few_and_round(low, high):
    values = charts.round_values(low, high)
    assert 2 <= len(values) <= 7 and 0.0 in values and all(low <= value <= high for value in values)
    assert all(len(f"{value:.12g}".strip("-").replace(".", "").strip("0").split("e")[0]) <= 2 for value in values)


def test_whiskers_are_the_intervals():
    record = optimizations.win()
    point = next(point for point in charts.points(record) if point.record.fate == "kept")
    assert point.x_ends == pytest.approx((77.5 / (1.03 * 6.82), 77.5 / (0.97 * 6.82)))
    assert point.y_ends == pytest.approx((-0.002, 0.006))
    across, down = charts._logarithmic(charts.points(record)), charts._drops(charts.points(record), 0.01)
    whiskers = charts._whiskers(point, across, down)
    ends = [[float(value) for value in re.findall(r'(?:x|y)[12]="([\d.]+)%"', one)] for one in whiskers]
    x, y = (float(value.rstrip("%")) for value in charts._at(point, across, down))
    assert ends[0][0] < x < ends[0][1] and ends[0][2:] == [y, y] and ends[1][:2] == [x, x] and ends[1][2] < y < ends[1][3]


def test_the_area_of_a_dot_is_memory():
    point = next(point for point in charts.points(optimizations.win()) if point.record.fate == "kept")
    whole = charts._radius(point, point.memory_bytes)
    assert charts._radius(point, 4 * point.memory_bytes) == pytest.approx(whole / 2)


def test_without_scores_there_are_bars():
    assert charts.pareto(optimizations.lossless()) is None
    drawn = charts.bars(optimizations.lossless())
    assert drawn.count("<li>") == 4 and "baseline" in drawn
    assert charts.bars(optimizations.bare()) is None is charts.pareto(optimizations.bare())


def test_one_place_for_all_is_drawn():
    """All at the same latency and without loss: the axes must not collapse."""
    same = [optimizations.candidate(f"c{i}", "dominated", 1.0, 0.0, half=0.0) for i in range(3)]
    drawn = charts.pareto(optimizations.win(candidates=same, max_drop=0.0))
    assert drawn is not None and "nan" not in drawn


# -- the page ----------------------------------------------------------------------------------------------------------


def test_the_page_stands_alone(record):
    text = page.render(record)
    assert text.startswith("<!doctype html>")
    stands_alone(Page(text))
    assert "://" not in text or "://" in json.dumps(msgspec.to_builtins(record))
    assert not re.search(r'"(?:nan|inf)%?"', text)


def test_the_page_says_everything():
    found = Page(page.render(optimizations.win())).text
    for words in ("6.82\u00d7 faster, within a drop of 0.01", "best lossless", "onnx-int8-static method=percentile", "budget 0.01",
                  "it loses 0.057 or more, and 0.01 is allowed", "timeout: 120 s without an answer", "3 layers kept in the original precision",
                  "2 rejected (accuracy)", "# onnx-int8-static method=percentile model = convert(model)", "AMD EPYC", "p99 ms at most 40",
                  "saturate bench /home/u/runs/r18/artifact", "kept for calibration", "3.19"):
        assert words in found, words
    for one in optimizations.CANDIDATES:
        assert one.id in found and one.reason.lower() in found.lower()


def test_the_record_is_in_the_page():
    found = Page(page.render(optimizations.win()))
    again = msgspec.json.decode(found.data.encode(), type=OptimizeRecord)
    assert again.best.speedup_ci == (6.71, 6.93) and len(again.candidates) == len(optimizations.CANDIDATES)
    assert again.candidates[0].fate == "kept"


def test_hostile_text_stays_text():
    text = page.render(optimizations.hostile())
    found = Page(text)
    assert "<img src=x onerror=alert(1)>" in found.text
    assert text.count("</script>") == 1 and not re.search("[\x00\x1b\u202e\ud800]", text)
    for char in "<>&\u2028\u2029":
        assert char not in found.data
    vocabulary = {(tag, name) for tag, attributes in Page(page.render(optimizations.win())).elements for name in ("", *attributes)}
    assert {(tag, name) for tag, attributes in found.elements for name in ("", *attributes)} <= vocabulary


def test_a_huge_record_is_cut_and_says_so():
    text = page.render(optimizations.huge())
    assert len(text.encode()) < MAX_BYTES and "entries are shown" in text
    assert optimizations.WINNER.id in Page(text).text, "the winner is never cut"
    assert "convert(model)" in text


def test_typical_pages_are_small(record):
    assert len(page.render(record).encode()) < 150_000


def test_a_limit_of_memory_is_told_in_the_unit_of_the_tables():
    text = Page(page.render(optimizations.win(limits={"peak_memory_gb": 2.0, "p99_ms": 5.0}))).text
    assert "at most 2 GB (1.86 GiB)" in text and "at most 5" in text


def test_a_drop_is_short():
    assert [say.drop(value, False) for value in (0.01, 0.00123, -2.5, 0.0, None)] == ["0.01", "0.00123", "-2.5", "0", "not measured"]


def test_a_relative_drop_is_a_share_everywhere():
    record = msgspec.structs.replace(optimizations.win(), relative=True)
    text = report.summary(record, width=120, color=False)
    assert "within a drop of 1%" in text and "drop 0.2% [-0.1%, 0.52%] of 1% allowed, pass" in text
    assert "0.2% [-0.1%, 0.52%]" in report.table(record)
    shown = page.render(record)
    assert "budget 1%" in shown and "per cent of the score of the model as it is" in shown and "points of the score" not in shown


def test_throughput_is_on_the_page_in_the_table_and_in_the_summary():
    rows = [ThroughputRow(of="baseline", batch=8, processes=1, samples_per_s=103.0), ThroughputRow(of="baseline", batch=16, processes=1, samples_per_s=99.0),
            ThroughputRow(of="best", batch=8, processes=1, samples_per_s=702.0), ThroughputRow(of="best", batch=8, processes=2, samples_per_s=1130.4),
            ThroughputRow(of="best", batch=8, processes=4, samples_per_s=2000.0, over_limit="p99_ms is 30, at most 15 was asked for")]
    record = msgspec.structs.replace(optimizations.win(), objective="throughput", throughput=rows, throughput_ratio=10.9,
                                     throughput_ratio_ci=(10.1, 11.6))
    text = report.summary(record, width=110, color=False)
    assert text.startswith("10.90x samples per second [10.10, 11.60], within a drop of 0.01")
    assert "samples   1,130/s at batch 8 in 2 processes, 103/s as it is at batch 8" in text
    lines = report.table(msgspec.structs.replace(record, notes=[])).splitlines()
    assert lines[-6:] == ["throughput of  batch  processes  samples/s", "as it is           8          1        103  its best",
                          "as it is          16          1         99", "best               8          1        702",
                          "best               8          2      1,130  its best",
                          "best               8          4      2,000  p99_ms is 30, at most 15 was asked for"]
    shown = page.render(record)
    assert 'id="throughput"' in shown and "1,130" in shown and "raced in fresh processes" in shown
    assert 'id="throughput"' not in page.render(optimizations.win())


def test_a_lossless_candidate_has_lost_nothing():
    free = CandidateRecord(id="x", techniques=[], fate="dominated", reason="", numerics="reordering")
    assert report.place_of(free) == 0.0
    assert report.place_of(msgspec.structs.replace(free, numerics="precision")) is None
    assert report.place_of(msgspec.structs.replace(free, accuracy_drop=0.2)) == 0.2


def test_the_page_shows_how_to_call_the_winner_and_how_to_make_it_without_saturate():
    record = optimizations.win()
    winner = next(one for one in record.candidates if one.fate == "kept")
    made = [msgspec.structs.replace(one, code="make = it") if one is winner else one for one in record.candidates]
    text = page.render(msgspec.structs.replace(record, candidates=made, serve='first\nprogram = load("<x>")\nanswers = program()'))
    section = text.partition('<section id="reproduce"')[2].partition("</section>")[0]
    assert "program = load(&quot;&lt;x&gt;&quot;)\nanswers = program()" in section or "program = load(&#34;&lt;x&gt;&#34;)\nanswers = program()" in section
    assert section.index("answers = program()") < section.index("make = it")


def test_many_columns_are_stacked_before_they_do_not_fit():
    """Seven columns with intervals need some 900 pixels, whatever the words of their reasons."""
    text = page.render(optimizations.win())
    assert 'class="stacked many decisions small"' in text
    assert "@media(max-width:44rem){.stacked,.stacked :is(thead" in text and "@media(max-width:62rem){.stacked.many,.stacked.many :is(thead" in text
    assert "@media(min-width:62.01rem){.decisions th:first-child{width:36%}}" in text


def test_a_ratio_is_not_said_twice_where_the_fates_are_explained():
    record = optimizations.win()
    slow = CandidateRecord(id="bf16", techniques=[], fate="slower", reason="0.63x in a screening", speedup=0.632)
    text = page.render(msgspec.structs.replace(record, candidates=[*(one for one in record.candidates if one.fate != "slower"), slow]))
    assert "bf16: 0.63x in a screening" in text


def test_a_confidence_is_not_rounded_to_certainty():
    for confidence, said in ((0.95, "95%"), (0.995, "99.5%"), (0.9999, "99.99%")):
        assert f">{said}<" in page.render(optimizations.win(confidence=confidence))


def test_a_result_gives_the_front_of_its_record():
    record = optimizations.win()
    found = Result(record, None, None).pareto()
    assert found == report.front(report.rows(record)) and 0 < len(found) < len(record.candidates)


def test_the_front_of_a_result_is_that_of_its_picture():
    """What is slower than the model itself, and loses nothing, was on it; the winner was not where it was confirmed to be."""
    slow, winner = optimizations.candidate("threads", "slower", 0.9, None, numerics="exact"), optimizations.WINNER
    best = msgspec.structs.replace(optimizations.win().best, accuracy_drop=0.0033)
    found = Result(optimizations.win(candidates=[slow, winner], best=best), None, None).pareto()
    assert [(one.id, one.accuracy_drop) for one in found] == [(winner.id, 0.0033)]
    assert Result(optimizations.win(candidates=[slow], best=None), None, None).pareto() == []
    assert [one.speedup for one in Result(optimizations.nothing(), None, None).pareto()] == [6.97, 6.82, 3.55, 2.14]
