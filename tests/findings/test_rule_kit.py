"""The conformance kit passes an honest rule and catches the others; random observations break no built-in."""

from __future__ import annotations

import random
import sys

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from saturate.errors import RuleError
from saturate.findings import _registry
from saturate.findings._api import HEADINGS
from saturate.records.analysis import Limit
from saturate.records.observations import Observations
from saturate.testing import rules

HONEST = (
    '"""Too much of it.\n\n'
    + "\n\n".join(f"{h}\n{'-' * len(h)}\nText of {h}." for h in HEADINGS)
    + '''
"""
from saturate.findings._api import STEPS_TO_CONCLUDE, Rule, bound
from saturate.records.analysis import Evidence, Finding

RULE = Rule(id="liar", title="a liar", techniques=("compile",), needs=frozenset({"busy"}))
LEAST = 0.1


def detect(seen):
    share = seen.gc_pause
    if seen.steps < STEPS_TO_CONCLUDE or RULE.needs & seen.integrity_blocks:
        return None
    if share is None or not LEAST <= share <= 1.0:
        return None
    evidence = [Evidence(metric="it", value=share, threshold=LEAST)]
    return Finding(id="liar", title="a liar", reason=f"It takes {share:.0%}.", evidence=evidence, bound=bound(share),
                   confidence="medium", techniques=["compile"])
'''
)

LIARS = {
    "raises": ("    share = seen.gc_pause", "    share = 1 / seen.gc_pause", "detect raised"),
    "random": ('reason=f"It takes {share:.0%}."', 'reason=f"It takes {object()}."', "differently"),
    "changes_its_input": (
        "    share = seen.gc_pause\n",
        "    share = seen.gc_pause\n    object.__setattr__(seen, 'steps', 9)\n",
        "changes what it looks at",
    ),
    "other_id": ('Finding(id="liar"', 'Finding(id="other"', "not as RULE says"),
    "other_type": ("    return Finding(", "    return dict(", "not a Finding or None"),
    "no_reason": ('reason=f"It takes {share:.0%}."', 'reason=" "', "not one line"),
    "two_lines": ('reason=f"It takes {share:.0%}."', 'reason="It\\ntakes"', "not one line"),
    "bound_is_a_share": ("bound=bound(share)", "bound=share", "neither None nor at least 1"),
    "bound_is_infinite": ("bound=bound(share)", "bound=float('inf')", "neither None nor at least 1"),
    "confidence": ('confidence="medium"', 'confidence="sure"', "confidence is 'sure'"),
    "other_techniques": ('techniques=["compile"]', 'techniques=["tf32"]', "RULE does not: tf32"),
    "no_help": ('techniques=["compile"]', "techniques=[]", "neither a technique nor advice"),
    "no_evidence": ("evidence=evidence", "evidence=[]", "holds no threshold"),
    "no_threshold": (", threshold=LEAST", "", "holds no threshold"),
    "no_metric": ('metric="it"', 'metric=""', "has no name"),
    "evidence_not_finite": ("value=share", "value=share - float('inf')", "'it' is -inf"),
    "no_step": ("seen.steps < STEPS_TO_CONCLUDE", "seen.steps < 0", "fewer than 1 steps"),
    "reads_a_damaged_trace": (" or RULE.needs & seen.integrity_blocks", "", "cannot carry 'busy'"),
    "missing_is_zero": (
        "    if share is None or not LEAST",
        "    share = 1 - (share or 0)\n    if not LEAST",
        "where nothing was observed",
    ),
    "never": ("    share = seen.gc_pause", "    share = None", "finds nothing in"),
}

BROKEN = {
    "heading": ("Evidence\n--------\n", "Numbers\n-------\n", "no heading 'Evidence'"),
    "empty_heading": ("Text of References.", "", "no heading 'References'"),
    "first_line": ('"""Too much of it.', '"""', "no first line"),
    "id": ('Rule(id="liar"', 'Rule(id="other"', "the file says 'liar'"),
    "title": ('title="a liar", techniques', 'title=" ", techniques', "title is empty"),
    "techniques": ('techniques=("compile",)', 'techniques=["compile"]', "must be a tuple"),
    "needs": ('frozenset({"busy"})', 'frozenset({"bussy"})', "'bussy', not of busy"),
    "metadata": ("RULE = Rule(", "RULE2 = Rule(", "RULE is missing"),
    "no_detect": ("def detect(", "def find(", "the function detect is missing"),
    "arity": ("def detect(seen)", "def detect(seen, more)", "must take 1 positional"),
    "syntax": ("LEAST = 0.1", "LEAST = = 0.1", "SyntaxError"),
    "import": ("LEAST = 0.1", "import no_such_module_", "no_such_module_"),
}

FIRES = [Observations(steps=5, gc_pause=0.5)]


@pytest.fixture
def write(tmp_path, monkeypatch):
    """Import the text as the module `liar`."""
    monkeypatch.syspath_prepend(str(tmp_path))

    def load(text: str):
        (tmp_path / "liar.py").write_text(text)
        return _registry.load_one("liar")

    yield load
    sys.modules.pop("liar", None)


def changed(entry: tuple[str, str, str]) -> str:
    old, new, _ = entry
    assert HONEST.count(old) == 1
    return HONEST.replace(old, new)


def test_an_honest_rule_passes(write):
    assert rules.check(write(HONEST), FIRES) == []


@pytest.mark.parametrize("name", LIARS)
def test_liars_are_caught(name, write):
    module = write(changed(LIARS[name]))
    found = rules.check(module, FIRES)
    assert any(LIARS[name][2] in line for line in found), found
    with pytest.raises(AssertionError, match="liar breaks the contract"):
        rules.require(module, FIRES)


@pytest.mark.parametrize("name", BROKEN)
def test_a_broken_module_is_loud(name, write):
    with pytest.raises(RuleError) as caught:
        write(changed(BROKEN[name]))
    assert "liar" in caught.value.message
    assert BROKEN[name][2] in caught.value.cause


@settings(deadline=None, max_examples=150)
@given(st.randoms(use_true_random=False))
def test_random_observations_break_no_rule(draw):
    seen = rules.arbitrary(draw)
    for module in _registry.load().values():
        assert list(rules.of_answer(module, seen)) == []
    bounds = [finding.bound for finding in _registry.detect(seen, frozenset())]
    ranked = [_registry.SMALL_BOUND if bound is None else bound for bound in bounds]
    assert ranked == sorted(ranked, reverse=True)
    assert _registry.verdict(seen) in Limit.__args__


def test_random_observations_reach_every_value():
    """The kit's draws hold missing, hostile and ordinary values; one that drew only None would catch nothing."""
    drawn = [rules.arbitrary(random.Random(seed)) for seed in range(200)]
    busy = [seen.busy for seen in drawn]
    assert None in busy and any(value is not None and value != value for value in busy)
    assert sum(value is not None and 0 < value < 1 for value in busy) > 50
    assert any(seen.operators and seen.operators[0].dims for seen in drawn)
    assert any(seen.integrity_blocks for seen in drawn)
