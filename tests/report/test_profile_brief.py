"""A profile on one screen: what it must say, in how many lines, at every width."""

from __future__ import annotations

import re

import analyses
import msgspec
import pytest

from saturate.records.analysis import Integrity, LoaderCost, Problem, Profile
from saturate.report import analysis_words as say
from saturate.report.cells import cells
from saturate.report.profile_brief import brief

COPIED = ("report ", "next ")
ANSI = re.compile(r"\x1b\[[0-9;]*m")


def plain(profile, width=80, **options):
    return brief(profile, width=width, color=False, **options)


def test_it_says_what_a_reader_looks_for_on_one_screen():
    text = plain(analyses.profile())
    for part in (
        "Input-bound: 51.1 % of the steps",
        "236.1 ms on NVIDIA H100 80GB HBM3; 242.2 ms while",
        "B backward 33 %",
        "MFU 31.0 %, HFU 38.0 %, 39.0 % of the measured ceiling",
        "peak 41.2 GB, activations 31 GB",
        "train.py:41 Tensor.item, 12.4 ms per step, +1 line",
        "data.py:17 __getitem__, 60.2 ms per step",
        "blocks.3.mlp (MLP), 9.10 ms per step",
        "1 graph break: train.py:52 print",
        "criterion.weight",
        "1. at most 2.04x: The loader computes too slowly",
        "3. no bound: Graph breaks",
    ):
        assert part in text, part
    lines = text.split("\n")
    assert lines[0].startswith("Input-bound: ") and lines[-1] == "next       " + analyses.profile().next_command
    assert len(lines) <= 17  # with rows for what few profiles have: FLOPs, graph breaks, tensors left behind
    assert "communication" not in text  # 0 % of the step


def test_what_the_loader_costs_is_said_where_it_was_asked_for():
    cost = LoaderCost(step_ms=60.0, replayed_step_ms=20.0, cost_ms=40.0, share=0.667, share_ci=(0.6, 0.7), rounds=8)
    text = " ".join(plain(msgspec.structs.replace(analyses.profile(), loader_cost=cost)).split())
    assert "loader 60.0 ms with the loader" in text and "20.0 ms with one batch replayed" in text and "66.7 % of the step" in text


def test_operators_that_count_as_nothing_are_named():
    one = msgspec.structs.replace(analyses.profile(), hfu=None, mfu_achievable=None, flops_left_out=["aten::_fft_r2c"])
    assert "not counted: aten::_fft_r2c" in " ".join(plain(one).split())
    two = msgspec.structs.replace(one, flops_left_out=["aten::_fft_r2c", "me::scan"])
    assert "aten::_fft_r2c and 1 other" in " ".join(plain(two, 120).split())


def test_steps_that_held_something_else_are_told_as_the_findings_are_of_them():
    def noted(identity: str) -> str:
        problem = Problem(id=identity, blocks=[], message="1 of the 14 recorded steps took 97% of their time")
        return " ".join(plain(msgspec.structs.replace(analyses.profile(), integrity=Integrity(ok=True, problems=[problem]))).split())

    assert "note 1 of the 14 recorded steps" in noted("long-steps") and "recorded steps took" not in noted("other-steps")


def test_most_profiles_take_a_dozen_lines():
    usual = msgspec.structs.replace(analyses.profile(), graph_breaks=[], off_device=[], mfu=None, hfu=None, mfu_achievable=None)
    assert len(plain(usual).split("\n")) <= 14
    assert len(plain(analyses.cpu_profile()).split("\n")) <= 8


@pytest.mark.parametrize("width", (60, 80, 120))
@pytest.mark.parametrize("name", [name for name, made in analyses.ALL.items() if isinstance(made(), Profile)])
def test_lines_fit_and_colour_changes_nothing_but_colour(name, width):
    profile = analyses.ALL[name]()
    text = plain(profile, width)
    for line in text.split("\n"):
        assert cells(line) <= width or line.startswith(COPIED), line
    assert ANSI.sub("", brief(profile, width=width, color=True)) == text
    assert plain(profile, width, blocks=False).isascii()


def test_what_was_left_out_is_counted():
    many = msgspec.structs.replace(analyses.profile(), findings=[analyses.INPUT, analyses.ODD, analyses.VAGUE, analyses.VAGUE])
    assert "3. no bound: Graph breaks (+1 more: --verbose)" in plain(many)


def test_what_carries_no_conclusion_is_named():
    problem = Problem(id="graph-replay", message="all kernels were replayed", blocks=["roofline"])
    note = Problem(id="work-outside-steps", message="5% lies outside", blocks=[])
    found = msgspec.structs.replace(analyses.profile(), integrity=Integrity(ok=False, problems=[note, problem]))
    assert re.search(r"^problem +all kernels were replayed$", plain(found), re.M) and "5% lies" not in plain(found)


def test_any_number_may_be_unknown():
    for field in msgspec.structs.fields(Profile):
        if field.default is None:
            assert plain(msgspec.structs.replace(analyses.profile(), **{field.name: None}))
    bare = msgspec.structs.replace(analyses.profile(), step_ms=None, step_ms_profiled=None, split={}, devices=[], findings=[])
    assert "step       not measured" in plain(bare) and "split" not in plain(bare)


def test_a_cpu_that_waits_for_its_loader_says_one_number():
    """The verdict's number is the split's, not that of the few steps that were recorded."""
    found = analyses.cpu_profile()
    wait = msgspec.structs.replace(found.devices[0].data_wait, raw=0.55, exposed=0.55)
    found = msgspec.structs.replace(found, devices=[msgspec.structs.replace(found.devices[0], data_wait=wait)])
    assert plain(found).startswith("Input-bound: 60.0 % of the steps: ")


def test_on_a_cpu_nothing_is_launched_late():
    found = msgspec.structs.replace(analyses.cpu_profile(), verdict="host-bound")
    assert "launches" not in say.because(found) and "interpreter" in say.because(found)


def test_a_mere_note_is_no_reason_for_no_verdict():
    found = analyses.input_bound()
    note = Problem(id="work-outside-steps", message="19% of the busy time lies outside the recorded steps", blocks=[])
    device = msgspec.structs.replace(found.devices[0], verdict="unknown", unknown={"verdict": "shapes were not recorded"})
    found = msgspec.structs.replace(found, verdict="unknown", devices=[device], integrity=Integrity(ok=True, problems=[note]))
    assert say.because(found) == "shapes were not recorded"


def test_a_line_is_named_with_its_folder_so_that_a_librarys_train_py_is_not_taken_for_the_users():
    syncs = [msgspec.structs.replace(analyses.profile().syncs[0], file="/opt/site-packages/library/train.py", line=319)]
    assert "library/train.py:319 " in plain(msgspec.structs.replace(analyses.profile(), syncs=syncs))
