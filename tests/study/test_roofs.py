"""What tune's look at the baseline compares its operators with."""

from __future__ import annotations

import pytest

from saturate.records.facts import Facts
from saturate.study import profile

REACHED = {"float32": 2e11, "bfloat16": 9e11, "copy": 4e10, "unknown": {}}


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
