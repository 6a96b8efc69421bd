"""Asking all rules: discovery, order, techniques that exist, and rules that do not work."""

from __future__ import annotations

import importlib.metadata
import subprocess
import sys

import msgspec
import pytest
from rule_cases import base, on_cpu
from test_rule_kit import HONEST

from saturate.errors import RuleError
from saturate.findings import _registry
from saturate.records.analysis import Analysis, Device, Integrity, Problem
from saturate.records.observations import CompilerSeen, Observations

BUILT_IN = [
    "device-waits",
    "eager-attention",
    "elementwise-chains",
    "exposed-communication",
    "exposed-copies",
    "fp32-matmul",
    "fragmentation",
    "gc-pauses",
    "graph-breaks",
    "host-syncs",
    "input-bound",
    "input-bound-cpu",
    "input-bound-io",
    "input-bound-workers",
    "launch-bound",
    "memory-pressure",
    "nothing-to-gain",
    "off-device",
    "page-faults",
    "pageable-copies",
    "recompilation",
    "slow-host-code",
    "slow-optimizer",
    "small-batch",
    "stragglers",
    "throttling",
    "unaligned-shapes",
]
ALL = frozenset(
    {"gc-freeze", "fused-optimizer", "loader-workers", "compile", "tf32", "bf16-autocast", "fp16-autocast"}
)


@pytest.fixture
def third_party(tmp_path, monkeypatch):
    """Write a module, importable and registered as an entry point."""
    monkeypatch.syspath_prepend(str(tmp_path))
    real = importlib.metadata.entry_points
    entries = []

    def entry_points(**selection):
        return [*real(**selection), *(entries if selection.get("group") == "saturate.findings" else [])]

    monkeypatch.setattr(importlib.metadata, "entry_points", entry_points)

    def write(name: str, text: str) -> None:
        (tmp_path / f"{name}.py").write_text(text)
        entries.append(importlib.metadata.EntryPoint("anything", name, "saturate.findings"))

    yield write
    for entry in entries:
        sys.modules.pop(entry.value, None)


def ids(seen: Observations, known: frozenset[str] = ALL) -> list[str]:
    return [finding.id for finding in _registry.detect(seen, known)]


def test_built_ins_load_in_order():
    assert [name for name in _registry.load() if name in BUILT_IN] == BUILT_IN


def test_findings_are_ranked_by_bound_and_those_without_one_come_last():
    seen = base(gc_pause=0.1, optimizer=0.3, input_wait=0.2, compiler__compiled=True, compiler__graph_breaks=1)
    assert ids(seen) == ["slow-optimizer", "input-bound", "gc-pauses", "graph-breaks"]


def test_of_equal_bounds_the_surest_comes_first_then_the_id():
    seen = base(gc_pause=0.2, optimizer=0.2, input_wait=0.2)
    assert ids(seen) == ["gc-pauses", "input-bound", "slow-optimizer"]  # the optimizer: fused or not is unknown
    assert ids(base(gc_pause=0.2, optimizer=0.2, optimizer_fused=False, input_wait=0.2)) == [
        "gc-pauses",
        "input-bound",
        "slow-optimizer",
    ]


def test_a_cause_whose_worth_is_not_known_does_not_hide_behind_a_few_percent():
    def beside(pause):
        return ids(base(gc_pause=pause, compiler=CompilerSeen(compiled=True, graph_breaks=3)))

    assert beside(0.04) == ["graph-breaks", "gc-pauses"] and beside(0.2) == ["gc-pauses", "graph-breaks"]


def test_nothing_to_gain_speaks_only_alone():
    assert ids(base(busy=0.95)) == ["nothing-to-gain"]
    assert ids(base(busy=0.95, gc_pause=0.03)) == ["gc-pauses"]


def test_techniques_that_do_not_exist_are_left_out():
    seen = base(fp32_matmul=0.5)
    assert _registry.detect(seen, ALL)[0].techniques == ["tf32", "bf16-autocast", "fp16-autocast"]
    assert _registry.detect(seen, frozenset({"tf32", "other"}))[0].techniques == ["tf32"]
    assert _registry.detect(seen, frozenset())[0].techniques == []
    full = _registry.detect(seen, ALL)[0]
    bare = _registry.detect(seen, frozenset())[0]
    assert (full.id, full.bound, full.evidence, full.advice) == (bare.id, bare.bound, bare.evidence, bare.advice)


def test_every_technique_that_a_rule_names_exists():
    from saturate.techniques import _registry as techniques

    known = set(techniques.load())
    assert {name for module in _registry.load().values() for name in module.RULE.techniques} <= known


def test_a_third_party_rule_is_asked(third_party):
    third_party("liar", HONEST)
    assert "liar" in ids(on_cpu(gc_pause=0.5))
    assert _registry.documentation(_registry.load()["liar"])["Threshold"] == "Text of Threshold."


def test_a_third_party_rule_that_fails_is_named(third_party):
    third_party("liar", HONEST.replace("    share = seen.gc_pause", "    share = 1 / seen.gc_pause"))
    with pytest.raises(RuleError) as caught:
        _registry.detect(Observations(), ALL)
    assert caught.value.message == "the rule liar fails"
    assert caught.value.cause.startswith("TypeError") and caught.value.evidence.endswith("liar.py")


@pytest.mark.parametrize("answer", ["'finding'", "Finding(**{**vars_of(found), 'id': 'other'})"])
def test_an_answer_that_is_no_finding_of_the_rule_is_refused(third_party, answer):
    text = HONEST.replace("    return Finding(", "    found = Finding(") + f"    return {answer}\n"
    text += "\n\ndef vars_of(found):\n    return {name: getattr(found, name) for name in found.__struct_fields__}\n"
    third_party("liar", text)
    with pytest.raises(RuleError, match="something else than a finding"):
        _registry.detect(on_cpu(gc_pause=0.5), ALL)


def test_two_rules_of_one_id_are_refused(third_party):
    third_party("gc_pauses", HONEST.replace('Rule(id="liar"', 'Rule(id="gc-pauses"'))
    with pytest.raises(RuleError, match="two rules are called 'gc-pauses'"):
        _registry.load()


def test_loading_imports_nothing_but_the_records():
    probe = """
import sys
from saturate.findings import _registry
_registry.load()
foreign = {name.partition(".")[0] for name in sys.modules} - sys.stdlib_module_names - {"__main__", "saturate"}
print(*(name for name in foreign if not name.startswith(("_", "sitecustomize"))))
"""
    done = subprocess.run([sys.executable, "-c", probe], capture_output=True, text=True, check=True)
    assert set(done.stdout.split()) <= {"msgspec", "typing_extensions"}


def test_silence_is_an_answer_only_of_a_rule_that_could_speak():
    """On every device of the analysis; a rule that is not installed here is taken to need everything."""
    device = Device(id=0, name="", steps=2)

    def analysis(*devices, blocks=()):
        problems = [Problem(id="x", message="x", blocks=list(blocks))]
        return Analysis(devices=list(devices), integrity=Integrity(ok=not blocks, problems=problems), verdict="unknown", findings=[])

    judges = _registry.judges
    assert judges("input-bound", analysis(device)) and judges("elsewhere", analysis(device))
    for silent in (analysis(), analysis(device, Device(id=1, name="")), analysis(device, blocks=["busy"]),
                   analysis(msgspec.structs.replace(device, unknown={"data_wait": "no loader"}))):  # fmt: skip
        assert not judges("input-bound", silent)
    unanswered = msgspec.structs.replace(device, unknown={_registry.unanswered_field("eager-attention"): "no shapes"})
    assert judges("eager-attention", analysis(device)) and not judges("eager-attention", analysis(device, unanswered))
    assert judges("input-bound", analysis(device, blocks=["roofline"]))
    assert not judges("elsewhere", analysis(device, blocks=["roofline"]))
