"""What tune's look at the baseline compares its operators with."""

from __future__ import annotations

import pytest

pytest.importorskip("numpy")

from saturate.records.analysis import Analysis, Integrity
from saturate.records.facts import Facts
from saturate.records.observations import Observations
from saturate.study import diagnose, profile
from saturate.study.seen import Seen

REACHED = {"float32": 2e11, "bfloat16": 9e11, "copy": 4e10, "unknown": {}}

#: Of a trace that nothing was found in.
NOTHING = Analysis(devices=[], integrity=Integrity(ok=True, problems=[]), verdict="unknown", findings=[])


def test_what_a_process_reached_is_its_roof():
    """There was none on a CPU: a chain of elementwise operators, 83 % of a step, was "nothing to gain, at most 1.067x"."""
    roofs = profile._roofs(Facts(device="cpu", torch="2.13.0"), REACHED)
    assert roofs is not None and roofs.rates == {"float32": 2e11, "bfloat16": 9e11}
    assert roofs.memory_rate() == roofs.memory_rate(8) == roofs.memory_rate(1 << 40) == 4e10


@pytest.mark.parametrize("missing", ["copy", "rates"])
def test_without_one_of_both_there_is_none(missing):
    left = {name: rate for name, rate in REACHED.items() if (name != "copy" if missing == "copy" else name == "copy")}
    assert profile._roofs(Facts(device="cuda"), {**left, "unknown": {"copy": "out of memory"}}) is None


def test_without_the_shorter_format_there_is_that_of_the_longer():
    assert profile._roofs(Facts(device="cuda"), {"float32": 2e11, "copy": 4e10}).rates == {"float32": 2e11}


@pytest.mark.parametrize(("rates", "ratio"), [(REACHED, 4.5), ({**REACHED, "bfloat16": 1e11}, 0.5), ({"float32": 2e11, "copy": 4e10}, None), ({}, None)])
def test_the_rules_are_told_what_bf16_reaches_here(rates, ratio):
    """A CPU's flags said that it multiplies bf16, and it did at half the rate of fp32: the finding had one turn wasted on it."""
    seen = Seen(Facts(device="cpu"), step_ns=[10_000_000], ceilings=profile._roofs(Facts(device="cpu"), rates))
    assert diagnose.observe(seen, NOTHING, Observations(), {}, str).bf16_rate == ratio
