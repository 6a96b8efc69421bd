"""The terminal summary of an analysis: order, width, colour, encodings, and that nothing is made up."""

from __future__ import annotations

import re
from pathlib import Path

import analyses
import msgspec
import pytest

from saturate.records.analysis import DataWait, Device, Memory, Profile
from saturate.report import analysis_words as say
from saturate.report.analysis import can_draw, columns, drawn, flow, summary
from saturate.report.analysis_html import render
from saturate.report.cells import cells
from saturate.study.profile import nothing
from saturate.study.state import Request

WIDTHS = (60, 80, 120)
ANSI = re.compile(r"\x1b\[[0-9;]*m")
# Lines that may be longer than the terminal, so that they can be copied whole.
COPIED = ("trace ", "report ", "next ")


def plain(analysis, width=80, **options):
    return summary(analysis, width=width, color=False, **options)


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("name", analyses.ALL)
def test_lines_fit_the_terminal(name, width):
    for line in plain(analyses.ALL[name](), width).split("\n"):
        assert cells(line) <= width or line.startswith(COPIED), line


@pytest.mark.parametrize("name", analyses.ALL)
def test_the_verdict_comes_first_and_the_command_last(name):
    analysis = analyses.ALL[name]()
    lines = plain(analysis).split("\n")
    assert lines[0].startswith(f"{say.LIMITS[analysis.verdict][0]}: ")
    assert lines[-1].startswith("next       saturate ")


def test_what_an_input_bound_trace_says():
    text = plain(analyses.input_bound(), 120)
    assert text.startswith("Input-bound: 51.1 % of the steps: the device waits for the next batch\n")
    for part in (
        "computation 46.2 %",
        "exposed copies 0.55 %",
        "idle 53.2 %",
        "of the steps, 1,211.0 ms",
        "46.8 % of the steps, 52.6 % of the span, 1,078.3 ms from the first to the last event",
        "waited 51.1 % of the steps, 51.1 % with an idle device (exposed)",
        "input 96.0 %, host late 3.0 %",
        "1. at most 2.04x: The loader computes too slowly (high confidence)",
        "-> tune tries loader-workers",
        "3. no bound: Graph breaks (low confidence)",
        "aten::bmm [16, 5185, 64] [16, 64, 5185] bfloat16",
        "modelled: 82.0 % of kernel time; roof: specification of NVIDIA H100 SXM x 0.80, 0.90",
    ):
        assert part in text, part
    assert text.endswith("next       saturate tune --only loader-workers -- python train.py")


def test_operators_come_by_recoverable_time():
    lines = plain(analyses.input_bound(), 120).split("\n")
    start = next(index for index, line in enumerate(lines) if line.startswith("operators"))
    names = [re.search(r"(aten|custom)::\w+", line)[0] for line in lines[start + 1 : start + 6]]
    assert names == ["aten::_softmax", "aten::bmm", "aten::addmm", "aten::copy_", "aten::add"]


def test_unknown_is_never_zero():
    text = plain(analyses.no_steps(), 120)
    assert "no steps" in text and "of the span, 473.7 ms" in text
    assert "of the steps," not in text
    assert re.search(r"^input +not known: ", text, re.M)
    assert "all 555 kernels were replayed from graphs (no conclusion on: occupancy)" in text
    assert "occupancy: grid and block of replayed kernels are not recorded" in text
    wait = analyses.input_bound()
    wait = msgspec.structs.replace(wait, devices=[analyses.device(data_wait=DataWait(raw=0.0, exposed=0.0))])
    assert "waited 0.0 % of the steps" in plain(wait, 120)


def test_reasons_that_stand_elsewhere_are_not_repeated():
    why = {"data_wait": "no loader", "roofline": "no ceilings", "span_ns": "lost", "step_ns": "lost"}
    text = plain(msgspec.structs.replace(analyses.input_bound(), devices=[analyses.device(unknown=why)]), 120)
    assert re.search(r"^not known  span, step: lost$", text, re.M)
    assert "no ceilings" not in text and text.count("not known") == 1
    on_cpu = analyses.cpu_profile()
    seen = msgspec.structs.replace(
        on_cpu.devices[0], unknown={"occupancy": "a CPU has none", "gaps": "a CPU has no queue"}
    )
    assert "a CPU has" not in plain(msgspec.structs.replace(on_cpu, devices=[seen]))


def test_without_a_device_it_says_so():
    text = plain(analyses.nothing())
    assert text.startswith("No verdict: no accelerator events\n")
    assert "%" not in text and "findings   none" in text


def test_several_ranks_name_the_shown_one_and_fold():
    text = plain(analyses.ranks(), 120)
    assert "1 of 16 devices in 16 traces" in text
    assert re.search(
        r"^device +NVIDIA H100 80GB HBM3, rank 1, device 0, ", text, re.M
    )  # the most idle with the verdict
    assert "+8 more, see --json or --html" in text
    assert re.search(r"^peers +rank 15 +late 15\.0 ms +waits", text, re.M)
    assert "includes waiting for peers" not in text  # it was told apart
    alone = msgspec.structs.replace(analyses.ranks(), stragglers=[])
    assert "includes waiting for peers" in plain(alone, 120)


def test_recordings_of_one_process_are_told_apart_by_their_files():
    found = msgspec.structs.replace(analyses.input_bound(), devices=[analyses.device(source=f"runs/cycle{n}.json") for n in (1, 2)])
    text = plain(found, 120)
    assert re.search(r"^devices +device 0 in cycle1\.json +idle", text, re.M) and "device 0 in cycle2.json" in text
    assert "rank 1, device 0" in plain(analyses.ranks(), 120) and " in rank1.json" not in plain(analyses.ranks(), 120)


def test_a_profile_is_short():
    text = plain(analyses.profile(), 100)
    for part in (
        "236.1 ms without a profiler, 242.2 ms while recorded (5 steps)",
        "B backward 33.0 %",
        "MFU 31.0 %",
        "peak 41.2 GB",
        "train.py:41",
        "data.py:17",
        "blocks.3.mlp",
        "1 graph break",
        "criterion.weight",
    ):
        assert part in text, part
    assert text.endswith("next       " + analyses.profile().next_command)
    assert len(plain(analyses.cpu_profile(), 100).split("\n")) <= 20


@pytest.mark.parametrize("verdict", ["input-bound", "host-bound", "sync-bound"])
def test_no_verdict_about_a_cpu_speaks_of_a_device(verdict):
    said = plain(msgspec.structs.replace(analyses.cpu_profile(), verdict=verdict)).split("\n")[0]
    assert "device" not in said and verdict.capitalize() in said


def test_a_cpu_profile_claims_nothing_of_a_device():
    text = plain(analyses.cpu_profile())
    assert not re.search(r"^(busy|gaps|time|network|operators) ", text, re.M)
    assert "I input wait 60.0 %" in text


@pytest.mark.parametrize("name", analyses.ALL)
def test_colour_changes_nothing_but_colour(name):
    analysis = analyses.ALL[name]()
    assert "\x1b" not in plain(analysis)
    assert ANSI.sub("", summary(analysis, width=80, color=True)) == plain(analysis)


@pytest.mark.parametrize("name", analyses.ALL)
def test_ascii_where_the_encoding_demands_it(name):
    text = plain(analyses.ALL[name](), blocks=False)
    assert text.isascii()
    for line in text.split("\n"):
        assert len(line) <= 80 or line.startswith(COPIED)


def test_the_letters_of_an_ascii_bar_are_explained():
    text = plain(analyses.input_bound(), blocks=False)
    bar = re.search(r"^time +([A-Z.]+)$", text, re.M)[1]
    for letter in set(bar):
        assert re.search(rf"(?:^| ){re.escape(letter)} [a-z]", text, re.M), letter


@pytest.mark.parametrize(
    ("encoding", "able"),
    [("utf-8", True), ("ascii", False), ("latin-1", False), (None, False), ("cp437", True), ("no such", False)],
)
def test_which_encodings_can_draw(encoding, able):
    assert can_draw(encoding) is able


def test_control_characters_of_a_trace_never_reach_the_terminal():
    text = plain(analyses.hostile())
    assert not re.search(
        "[\x00-\x09\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u202a-\u202e\u2066-\u2069\ud800-\udfff]", text
    )
    assert text.count("onerror") > 3  # it was there, as text
    text.encode()


def test_any_number_may_be_unknown():
    """Each field that may be None, alone and all together: no text and no page stumbles, and none says 0 for it."""
    full = analyses.profile()

    def shown(record):
        return summary(record, width=100, color=True) + render(record)

    names = {
        Device: [field.name for field in msgspec.structs.fields(Device) if field.default is None],
        Profile: [field.name for field in msgspec.structs.fields(Profile) if field.default is None],
    }
    assert "span_ns" in names[Device] and "mfu" in names[Profile]
    for name in names[Device]:
        assert shown(msgspec.structs.replace(full, devices=[analyses.device(**{name: None})]))
    for name in names[Profile]:
        assert shown(msgspec.structs.replace(full, **{name: None}))
    bare = msgspec.structs.replace(
        full, devices=[Device(id=0, name="", kernels=5)], split={}, **dict.fromkeys(names[Profile])
    )
    text = summary(bare, width=100, color=False)
    assert not re.search(r"\b0\.0+ ?%|\b0 ns", text), text
    assert shown(msgspec.structs.replace(bare, memory=Memory(), syncs=[], modules=[], findings=[]))


def part(ns, letter="x", waits=False):
    return say.Part("k", "n", ns, letter, letter, 0, waits)


@pytest.mark.parametrize(
    ("lengths", "bar"),
    [
        ((1, 1), "aaaaabbbbb"),
        ((999, 1), "aaaaaaaaaa"),
        ((1, 0, 9), "accccccccc"),
        ((0, 0), ""),
        ((-1, 5), ""),
        ((1, 1, 1), "aaabbbbccc"),
        ((10**18, 1), "aaaaaaaaaa"),
    ],
)
def test_a_bar_is_as_long_as_it_is_told(lengths, bar):
    assert drawn([part(ns, letter) for ns, letter in zip(lengths, "abc")], 10, lambda text, *_: text, True) == bar


def test_flow_breaks_between_parts_only():
    assert flow(["aaaa", "bbbb", "", "cccc"], 11) == ["aaaa, bbbb,", "cccc"]
    assert flow(["a", "b" * 30], 10) == ["a,", "bbbbbbbbb", "bbbbbb..."]  # only what is too long breaks inside
    assert flow([], 10) == []


def test_columns_cut_the_elastic_one_first():
    table = [["1 ms", "x" * 50], ["10 ms", "y"]]
    assert columns(table, 20, numeric={0}, elastic=1) == [" 1 ms  " + "x" * 10 + "...", "10 ms  y"]
    assert columns([["a", "b", "c" * 30]], 20, numeric=set()) == ["a  b"]


@pytest.mark.parametrize(
    ("ns", "text"),
    [
        (None, "not known"),
        (0, "0 ns"),
        (999, "999 ns"),
        (12_900, "12.9 us"),
        (1_211_000_000, "1,211.0 ms"),
        (300_000_000_000, "5 min 00 s"),
        (-5, "-5 ns"),
    ],
)
def test_times(ns, text):
    assert say.time(ns) == text


@pytest.mark.parametrize(
    ("count", "text"),
    [
        (None, "not known"),
        (0, "0 B"),
        (999, "999 B"),
        (1000, "1 kB"),
        (41_200_000_000, "41.2 GB"),
        (999_999, "1 MB"),
        (10**21, "1000 EB"),
    ],
)
def test_sizes(count, text):
    assert say.size(count) == text


@pytest.mark.parametrize(
    ("value", "text"), [(None, "not known"), (0.0, "0.0 %"), (0.0085, "0.85 %"), (0.511, "51.1 %")]
)
def test_shares(value, text):
    assert say.share(value) == text


def test_the_next_command():
    def after(**changes):
        return say.next_command(msgspec.structs.replace(analyses.input_bound(), **changes))

    assert after(findings=[analyses.ODD]) == "saturate explain unaligned-shapes"
    assert after(findings=[]) == "saturate profile -- python train.py"
    assert after(findings=[analyses.ODD, analyses.INPUT]) == "saturate tune --only loader-workers -- python train.py"


def test_a_profile_of_nothing_says_why_and_what_to_type() -> None:
    request = Request(argv=["python", "train.py", "--fast"], cwd=Path("/home/u"), environment={}, directory=Path("/home/u/.saturate"))
    record = nothing(request, "the script ended after 3 training steps")
    text = summary(record, width=100, color=False)
    assert text.splitlines()[0] == "No verdict: the script ended after 3 training steps"
    assert text.splitlines()[-1].endswith("saturate profile -- python train.py --fast")


def test_it_says_why_there_are_no_findings() -> None:
    whole = analyses.nothing()
    assert say.no_findings(msgspec.structs.replace(whole, devices=[Device(id=0, name="gpu")])).endswith("none were recorded")
    stepped = msgspec.structs.replace(whole, devices=[Device(id=0, name="gpu", steps=3)])
    assert "does not carry" in say.no_findings(stepped)
    sound = msgspec.structs.replace(stepped, integrity=msgspec.structs.replace(whole.integrity, problems=[]))
    assert say.no_findings(sound) == "none"


def test_files_of_one_name_are_told_apart_by_their_folders():
    devices = [Device(id=0, name="", source=source) for source in ("a/two.sqlite", "b/two.sqlite")]
    assert say.places(devices) == ["device 0 in a/two.sqlite", "device 0 in b/two.sqlite"]
    other = msgspec.structs.replace(devices[1], source="b/three.sqlite")
    assert say.places([devices[0], other]) == ["device 0 in two.sqlite", "device 0 in three.sqlite"]
