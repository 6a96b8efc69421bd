"""The page of an analysis as text: escaping, self-containment, size, contents, contrast."""

from __future__ import annotations

import json
import re

import analyses
import msgspec
import pytest
from pages import Page, contrast, stands_alone

from saturate.records.analysis import Analysis, Profile, Roofline
from saturate.report import analysis_charts as charts
from saturate.report import analysis_style, style, trim
from saturate.report import analysis_words as say
from saturate.report.analysis_html import render
from saturate.report.page import MAX_BYTES


@pytest.fixture(scope="module", params=list(analyses.ALL))
def page(request):
    return Page(render(analyses.ALL[request.param]()))


def test_the_page_stands_alone(page):
    stands_alone(page)


def test_the_top_says_what_was_looked_at():
    """Values of arguments may be tokens, and stay out."""
    looked = msgspec.structs.replace(analyses.profile(), command=["python", "train.py", "--token", "t0k3n"])
    text = Page(render(looked)).text
    assert "profile of python train.py --token \u2026" in text and "t0k3n" not in text
    assert "analysis of " in Page(render(analyses.input_bound())).text


def test_own_text_names_no_address():
    text = render(analyses.profile())
    assert "://" not in text
    assert not re.search(r"url\(|@import", text)


def test_hostile_strings_stay_text():
    text = render(analyses.hostile())
    page = Page(text)
    assert "<img src=x onerror=alert(1)>" in page.text
    assert text.count("</script>") == 1 and text.count("</style>") == 1
    assert not re.search("[\x00\x1b\u202e\u200f\ud800]", text)
    text.encode()
    assert json.loads(page.data)["findings"][0]["id"].startswith("</script>")
    for char in "<>&\u2028\u2029":
        assert char not in page.data


def test_no_string_field_adds_an_element_or_an_attribute():
    def vocabulary(*some):
        return {
            (tag, name)
            for each in some
            for tag, attributes in Page(render(each)).elements
            for name in ("", *attributes)
        }

    assert vocabulary(analyses.hostile()) <= vocabulary(analyses.profile(), analyses.no_steps(), analyses.ranks())


@pytest.mark.parametrize("name", analyses.ALL)
def test_typical_pages_are_small(name):
    assert len(render(analyses.ALL[name]()).encode()) < 200_000


def test_a_page_stays_below_the_limit_whatever_the_analysis_holds():
    text = render(analyses.giant())
    assert len(text.encode()) < MAX_BYTES
    page = Page(text)
    assert page.open == []
    assert "devices: " in page.text and " entries are shown" in page.text


@pytest.mark.parametrize(("name", "kind"), [("input_bound", Analysis), ("profile", Profile)])
def test_the_embedded_record_can_be_read_back(name, kind):
    analysis = analyses.ALL[name]()
    again = msgspec.json.decode(Page(render(analysis)).data, type=kind)
    assert again.findings == analysis.findings
    assert again.devices[0].idle_ns == analysis.devices[0].idle_ns
    assert again.devices[0].roofline.operators[0].kernels == analysis.devices[0].roofline.operators[0].kernels


def test_argument_values_stand_nowhere():
    text = render(analyses.profile())
    assert "s3cret-value" not in text and "small.yaml" not in text
    assert (
        "saturate tune --only loader-workers -- python train.py --config \u2026 --api-token \u2026" in Page(text).text
    )
    module = msgspec.structs.replace(analyses.profile(), command=["python", "-m", "train", "--x=secret.py", "secret"])
    assert "secret" not in render(module)


def test_what_an_input_bound_page_says():
    text = Page(render(analyses.input_bound())).text
    for part in (
        "Input-bound",
        "51.1 % of the steps: the device waits for the next batch.",
        "644,349,993",
        "1,211,000,000",
        "Busy, of the span 52.6 %",
        "Input wait, exposed, of the steps 51.1 %",
        "at most 2.04\u00d7",
        "The loader computes too slowly",
        "tune tries loader-workers",
        "train.py:41",
        "cutlass_75_wmma_tensorop_bf16",
        "82.0 % of kernel time is modelled",
        "specification of NVIDIA H100 SXM x 0.80, 0.90",
        "evaluate",
        "No problem was found in the trace",
        "saturate tune --only loader-workers -- python train.py",
    ):
        assert part in text, part


def test_a_profile_page_has_the_lines_the_modules_and_the_memory():
    text = Page(render(analyses.profile())).text
    for part in (
        "train.py:41",
        "Tensor.item",
        "data.py:17",
        "blocks.3.mlp",
        "Memory at the peak of a step",
        "31 GB",
        "other: not told apart from activations",
        "Graph breaks",
        "criterion.weight",
        "236.1 ms",
        "HFU 38.0 %",
        "What the step does",
    ):
        assert part in text, part


def test_what_is_not_known_is_said_with_its_reason():
    text = Page(render(analyses.no_steps())).text
    assert "the window is the span" in text
    assert "grid and block of replayed kernels are not recorded" in text
    assert "Input wait not known" in text
    assert "Occupancy, at most" not in text and "Busy, of the steps" not in text
    text = Page(render(analyses.nothing())).text
    assert "The parts of the window are not known" in text and "0.0 %" not in text


def test_parts_sum_to_the_window_in_every_table():
    for name in ("input_bound", "ranks", "no_steps", "profile"):
        tables = re.findall(r'<table aria-label="Parts of.*?</table>', render(analyses.ALL[name]()))
        assert tables
        for table in tables:
            numbers = [
                int(each.replace(",", ""))
                for each in re.findall(r'data-label="Nanoseconds"[^>]*><div>([\d,]+)<', table)
            ]
            assert sum(numbers[:-1]) == numbers[-1] > 0


def operators():
    return say.operators(analyses.device())


def dots(text):
    """(x, y, radius, class) of each dot, percentages and pixels."""
    found = re.findall(r'<circle cx="([\d.]+)%" cy="([\d.]+)%" r="([\d.]+)" class="(\w+)"', text)
    return [(float(x), float(y), float(r), css) for x, y, r, css in found]


def test_the_roofline_places_dots_where_they_belong():
    roof = Roofline(coverage=1.0, operators=[], ceilings={"bfloat16": 5e14, "copy": 1e12})
    one = analyses.operator("mm", "", 1000.0, flops=10**14, bytes=10**12, limit="memory")  # 100 FLOPs/B, 1e14 FLOP/s
    low = analyses.operator("add", "", 250.0, flops=25 * 10**10, bytes=10**12 // 4, limit="latency")  # 1 FLOP/B, 1e12
    text = charts.roofline(roof, [one, low])
    # x: 1 to 1,000, as the ridge is at 500; y: 1e12 to 1e15.
    assert [(x, y, css) for x, y, _, css in dots(text)] == [(66.67, 33.33, "memory"), (0.0, 100.0, "latency")]
    assert dots(text)[1][2] == pytest.approx(3 + 14 / 2)  # a quarter of the time, half of the radius
    slant = re.search(r'<line x1="([\d.]+)%" y1="([\d.]+)%" x2="([\d.]+)%" y2="([\d.]+)%" class="roof slant"', text)
    assert [float(each) for each in slant.groups()] == [0.0, 100.0, 89.97, 10.03]


def test_operators_of_no_time_do_not_stretch_the_roofline():
    roof = Roofline(coverage=1.0, operators=[], ceilings={})
    one = analyses.operator("mm", "", 1000.0, flops=10**14, bytes=10**12, limit="compute")
    tiny = analyses.operator("tiny", "", 0.001, flops=1, bytes=10**6, limit="latency")
    (x, y, *_), (far_x, far_y, *_) = dots(charts.roofline(roof, [one, tiny]))
    assert (x, y) == dots(charts.roofline(roof, [one]))[0][:2]
    assert (far_x, far_y) == (0.0, 100.0)


def test_the_roofline_shows_only_what_has_a_place():
    assert [rank for rank, _ in charts.plottable(operators())] == [1, 2, 3, 5]  # 4: no FLOPs, 6: not modelled
    above = [
        analyses.operator("mm", "", 1.0, flops=10**9, bytes=10**6, unknown={"efficiency": "2.00 times as fast as..."})
    ]
    assert charts.plottable(above) == []
    assert charts.roofline(analyses.device().roofline, [operators()[5]]) is None
    found = charts.rates(analyses.device().roofline, operators())
    assert found == {"bfloat16": 791e12}


def test_only_the_ceilings_of_formats_in_use_are_drawn():
    roof = Roofline(
        coverage=1.0, operators=[], ceilings={"float32": 1e13, "tfloat32": 1e14, "int8": 1e15, "copy": 1e12}
    )

    def drawn(flops, dtypes="float32, uint8"):
        return list(charts.rates(roof, [analyses.operator("mm", "", 1000.0, flops=flops, bytes=1, dtypes=dtypes)]))

    assert drawn(10**12) == ["float32"]
    assert drawn(5 * 10**13) == ["float32", "tfloat32"]  # faster than fp32 can be
    assert drawn(1, "") == ["float32", "tfloat32", "int8"]


@pytest.mark.parametrize(
    "ceilings", [{}, {"copy": 3e12}, {"bfloat16": 1e14}, {"bfloat16": float("nan"), "copy": 0.0}]
)
def test_a_roofline_with_missing_ceilings_is_drawn_without_them(ceilings):
    assert "<circle" in charts.roofline(Roofline(coverage=1.0, operators=[], ceilings=ceilings), operators())


def test_steps_are_drawn_on_one_scale():
    device = analyses.device()
    text = charts.steps(device.each_step, say.parts(device))
    tops = [float(y) for y in re.findall(r'y="([\d.]+)%" height="[\d.]+%" class="shade5"', text)]
    assert len(tops) == 5
    lengths = [step.compute_ns + step.exposed_copy_ns + step.idle_ns for step in device.each_step]
    assert tops == pytest.approx([100 * (1 - each / max(lengths)) for each in lengths], abs=0.02)
    assert charts.steps([], say.parts(device)) is None
    many = charts.steps(device.each_step * 100, say.parts(device))
    assert many.count("<g>") == charts.STEPS and "of 500" in many


@pytest.mark.parametrize(
    ("own", "palette", "on"),
    [
        (analysis_style.LIGHT, style.LIGHT, analysis_style.ON_LIGHT),
        (analysis_style.DARK, style.DARK, analysis_style.ON_DARK),
    ],
)
def test_contrast_reaches_aa(own, palette, on):
    for (name, shade), text in zip(own.items(), on, strict=True):
        assert contrast(palette[text], shade) >= 4.5, name
    for text in ("ink", "soft", "accent"):
        assert contrast(palette[text], palette["panel"]) >= 4.5
    for dot in (palette["accent"], own["shade7"], palette["base"]):
        assert contrast(dot, palette["panel"]) >= 3


def test_what_is_saved_of_any_command_has_no_argument_values() -> None:
    """A profile, a fit and a drill are passed on; options keep their names, the script its own."""
    for command, shown in (
        (analyses.COMMAND, ["python", "train.py", "--config", "\u2026", "--api-token", "\u2026"]),
        (["env", "MY_TOKEN=zz9", "python", "-u", "a/train.py", "--lr=0.1"], ["env", "\u2026", "\u2026", "-u", "a/train.py", "--lr=\u2026"]),
        (["torchrun", "-m", "pkg"], ["torchrun", "-m", "\u2026"]),
        (["bash", "-lc", "MY_TOKEN=zz9 python train.py"], ["bash", "-l\u2026", "\u2026"]),
        (["./train.py", "-fc"], ["./train.py", "-f\u2026"]),
    ):
        found = msgspec.structs.replace(analyses.profile(), command=command, next_command=f"saturate tune --only compile -- {' '.join(command)}")
        saved = trim.without_values(found)
        assert saved.command == shown and saved.next_command == f"saturate tune --only compile -- {' '.join(shown)}"


def test_the_saved_command_can_be_typed() -> None:
    found = msgspec.structs.replace(analyses.profile(), command=["python", "my runs/a & b.py", "--lr", "1"],
                                    next_command="saturate tune -- python 'my runs/a & b.py' --lr 1")
    assert trim.without_values(found).next_command == "saturate tune -- python 'my runs/a & b.py' --lr \u2026"
