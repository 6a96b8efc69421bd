"""Each rule finds what it is for, at its threshold and not below it, abstains where a number is missing, and is not
fooled by what looks like it."""

from __future__ import annotations

import math

import host_cases
import input_cases
import pytest
import work_cases
from rule_cases import Case, but

from saturate.findings import _common, _input, _registry
from saturate.records.analysis import Finding
from saturate.records.observations import Observations, SyncSeen
from saturate.testing import rules

CASES: list[Case] = [*input_cases.CASES, *host_cases.CASES, *work_cases.CASES]
RULES = {name: module for name, module in _registry.load().items() if module.__name__.startswith("saturate.")}


def ask(case: Case, **changes) -> Finding | None:
    return RULES[case.rule].detect(but(case.fires, **changes))


def each(what):
    """(case, entry) of every entry of one part of the cases."""
    return [
        pytest.param(case, entry, id=f"{case.rule}-{entry if isinstance(entry, str) else entry[0]}")
        for case in CASES
        for entry in getattr(case, what)
    ]


def named(case: Case) -> str:
    return case.rule


def test_every_rule_has_a_case():
    assert {case.rule for case in CASES} == set(RULES)


@pytest.mark.parametrize("case", CASES, ids=named)
def test_it_finds_its_cause(case):
    found = ask(case)
    assert found is not None
    assert case.reason in found.reason
    assert tuple(found.techniques) == case.techniques
    if case.lost is None:
        assert found.bound is None
    else:
        assert found.bound == pytest.approx(1.0 / (1.0 - case.lost))


@pytest.mark.parametrize("rule", RULES)
def test_it_keeps_the_contract(rule):
    rules.require(RULES[rule], fires=[case.fires for case in CASES if case.rule == rule])


@pytest.mark.parametrize(("case", "edge"), each("edges"))
def test_the_threshold_is_where_it_is(case, edge):
    field, inside, outside = edge
    assert ask(case, **{field: inside}) is not None
    assert outside is None or ask(case, **{field: outside}) is None


@pytest.mark.parametrize(("case", "field"), each("missing"))
def test_it_abstains_without(case, field):
    assert ask(case, **{field: None}) is None


@pytest.mark.parametrize(("rule", "changes"), [
    ("eager-attention", {"attention_eager": None}), ("elementwise-chains", {"elementwise": None}), ("fp32-matmul", {"fp32_matmul": None}),
    ("fp32-matmul", {"capability": None, "bf16_native": None}), ("unaligned-shapes", {"operators": ()}),
    ("slow-optimizer", {"optimizer": None, "update": None}), ("small-batch", {"memory__used": None}), ("small-batch", {"input_wait": None}),
    ("fragmentation", {"memory__fragmentation": None, "memory__allocator_retries": None}),
    ("pageable-copies", {"copies__pageable_ms": None}), ("stragglers", {"communication__late_ms_per_step": None}),
])  # fmt: skip
def test_its_silence_is_no_answer_without(rule, changes):
    for case in (case for case in CASES if case.rule == rule):
        assert rule not in _registry.unanswered(case.fires)
        assert rule in _registry.unanswered(but(case.fires, **changes)) and ask(case, **changes) is None


@pytest.mark.parametrize("rule", ["launch-bound", "slow-host-code"])
def test_a_replayed_graph_answers_for_no_late_host(rule):
    seen = but(next(case for case in CASES if case.rule == rule and case.fires.device != "cpu").fires, kernels__graph_replay=True)
    assert RULES[rule].detect(seen) is None and rule in _registry.unanswered(seen)
    assert rule not in _registry.unanswered(but(seen, kernels__host_late=0.01))
    assert rule not in _registry.unanswered(but(seen, kernels__host_late=0.01, integrity_blocks=frozenset({"steps"}), steps=0))


@pytest.mark.parametrize(("case", "why"), each("quiet"))
def test_it_is_not_confused(case, why):
    assert ask(case, **case.quiet[why]) is None


@pytest.mark.parametrize(("case", "why"), each("still"))
def test_it_still_finds(case, why):
    assert ask(case, **case.still[why]) is not None


@pytest.mark.parametrize("case", CASES, ids=named)
def test_no_step_concludes_nothing_and_few_steps_are_not_sure(case):
    assert ask(case, steps=0) is None
    one = ask(case, steps=1)
    assert one is not None and one.confidence == "low"
    levels = ["low", "medium", "high"]
    many, few = ask(case), ask(case, steps=2)
    assert many is not None and few is not None
    assert levels.index(few.confidence) < levels.index(many.confidence) or few.confidence == "low"
    damaged = ask(case, integrity_blocks=frozenset({"occupancy"}))
    assert damaged is not None and damaged.confidence != "high"


@pytest.mark.parametrize("case", CASES, ids=named)
def test_a_trace_that_cannot_carry_it_is_not_read(case):
    for conclusion in RULES[case.rule].RULE.needs:
        assert ask(case, integrity_blocks=frozenset({conclusion})) is None


#: Thresholds that a rule uses through a helper.
SHARED = {
    "input-bound": {"INPUT_WAIT"},
    "input-bound-cpu": {"INPUT_WAIT", "FETCH_COMPUTES", "SPARE_CORES", "SPARE_SHARE"},
    "input-bound-io": {"INPUT_WAIT", "FETCH_COMPUTES", "FETCH_WAITS"},
    "input-bound-workers": {"INPUT_WAIT", "FETCH_COMPUTES", "SPARE_CORES", "SPARE_SHARE"},
}


def test_every_threshold_stands_in_the_documentation():
    for name, module in RULES.items():
        text = " ".join((module.__doc__ or "").split())
        numbers = {
            key: value for key, value in vars(module).items() if key.isupper() and isinstance(value, (int, float))
        }
        numbers |= {key: getattr(_input, key) for key in SHARED.get(name, ())}
        for key, value in numbers.items():
            words = [f"{100 * value:g} %", f"{value:g} "] if value < 1 else [f"{value:g} "]
            unsaid = key in ("PLACES", "RATIO_ON_CPU")
            assert unsaid or any(word in text for word in words), f"{name}: {key} = {value:g} is not said"


def test_unaligned_shapes_come_from_rows_not_from_samples():
    odd_rows = RULES["unaligned-shapes"].odd_rows
    operator = work_cases.NAMELESS
    assert odd_rows(operator, False) == [5185]
    assert odd_rows(but(operator, dtypes="float"), False) == []
    assert odd_rows(but(operator, dtypes="float"), True) == [5185]
    assert odd_rows(but(operator, dims=((16, 64, 5188), (16, 5188, 64))), False) == [5188]
    assert odd_rows(but(operator, dims=((16, 64, 5184), (16, 5184, 64))), False) == []
    assert odd_rows(but(operator, name="aten::addmm", dims=((77,), (100, 72), (72, 77))), False) == [77]
    assert odd_rows(but(operator, dtypes="float8_e4m3fn", dims=((8, 136), (136, 64))), False) == [136]


def test_confidence_is_lower_where_the_evidence_is_indirect():
    def confidence(case: Case, **changes):
        found = ask(case, **changes)
        assert found is not None
        return found.confidence

    by_rule = {case.rule: case for case in reversed(CASES)}
    assert confidence(by_rule["unaligned-shapes"]) == "high"
    assert confidence(by_rule["unaligned-shapes"], operators=(work_cases.UNMODELLED,)) == "medium"
    assert confidence(by_rule["exposed-communication"]) == "medium"
    assert confidence(by_rule["exposed-communication"], communication__peer_wait=0.1) == "high"
    assert confidence(by_rule["launch-bound"]) == "high"
    for delay, shallow, level in (
        (20.0, None, "high"),
        (20.01, None, "medium"),
        (None, 0.5, "high"),
        (None, 0.499, "medium"),
        (5e4, 0.5, "high"),
    ):
        changes = {"kernels__median_launch_delay_us": delay, "kernels__queue_shallow": shallow}
        assert confidence(by_rule["launch-bound"], **changes) == level
    assert confidence(by_rule["input-bound-io"]) == "high"
    assert confidence(by_rule["input-bound-io"], loader__io_wait=None) == "medium"
    assert confidence(by_rule["throttling"], machine__clock_share=None, steps=5) == "low"


def test_communication_that_waits_for_peers_is_taken_off():
    case = next(case for case in CASES if case.rule == "exposed-communication")
    # A third of communication is hidden; a half of it is waiting. At most 0.3 of the exposed 0.4 can be transfer.
    found = ask(case, communication__exposed=0.4, communication__overlap=1 / 3, communication__peer_wait=0.5)
    assert found is not None and found.bound == pytest.approx(1 / (1 - 0.3))


def test_what_copies_make_the_host_miss_is_at_most_what_it_waited():
    case = next(case for case in CASES if case.rule == "pageable-copies")
    upload = SyncSeen("", "cudaStreamSynchronize (HtoD)", 2.0, 6.0)
    read = SyncSeen("", "cudaStreamSynchronize", 2.0, 50.0)
    for late, syncs, lost in ((0.2, (upload,), 0.14), (0.04, (upload,), 0.12), (0.2, (read,), 0.08), (0.2, (), 0.08)):
        found = ask(case, kernels__host_late=late, syncs=syncs)
        assert found is not None and found.bound == pytest.approx(1 / (1 - lost)), (late, syncs)


def test_a_device_without_a_known_ratio_has_the_whole_time_as_bound():
    case = next(case for case in CASES if case.rule == "fp32-matmul")
    found = ask(case, capability=None)
    assert found is not None and found.bound == 2.0 and found.techniques == ["bf16-autocast"]


def test_a_kernel_without_an_operator_is_called_by_the_part_that_tells():
    case = next(case for case in CASES if case.rule == "unaligned-shapes")
    name = "void cutlass::Kernel<cutlass_80_tensorop_s1688gemm_tn_align1>(cutlass_80_x::Params)"
    found = ask(case, operators=(but(work_cases.ODD, name=name, shapes="", kernels=(name,)),))
    assert found is not None and found.reason.startswith("cutlass_80_tensorop_s1688gemm_tn_align1 and the like")


def test_a_loop_over_elements_takes_the_interpreter_around_it_along():
    case = next(case for case in CASES if case.rule == "host-syncs" and case.fires.device == "cpu")
    for count, lost in ((None, 0.12), (5020.0, 0.12), (5010.0, 0.32)):
        found = ask(case, kernels__count_per_step=count)
        assert found is not None and found.bound == pytest.approx(1 / (1 - lost)), count


def test_a_core_that_is_just_free_is_free():
    case = next(case for case in CASES if case.rule == "input-bound-workers")
    assert ask(case, loader__cpu_count=4.0, loader__busy_cores=3.5) is not None
    assert ask(case, loader__cpu_count=10.0, loader__busy_cores=9.0) is not None
    assert ask(case, loader__cpu_count=10.0, loader__busy_cores=9.001) is None


@pytest.mark.parametrize(("steps", "level"), [(1, "low"), (2, "medium"), (19, "medium"), (20, "high")])
def test_confidence_grows_with_the_steps(steps, level):
    assert RULES["gc-pauses"].detect(Observations(steps=steps, gc_pause=0.3)).confidence == level


def test_shares_that_make_no_sense_are_unknown():
    assert _common.per_step(5.0, 10.0) == 0.5 and _common.per_step(11.0, 10.0) == 1.0
    for ms, step_ms in ((None, 10.0), (5.0, None), (-1.0, 10.0), (5.0, 0.0), (math.nan, 10.0), (5.0, math.nan)):
        assert _common.per_step(ms, step_ms) is None
    assert not any(_common.reaches(share, 0.1) for share in (None, math.nan, 0.0999, 1.0001, math.inf))
    assert _common.number("x", math.nan) == [] == _common.number("x", None)
    assert _common.one_line("a\n  b") == "a b"
    assert len(_common.one_line(160 * "x")) == len(_common.one_line(161 * "x")) == 160
    assert _common.one_line(161 * "x").endswith("x...") and not _common.one_line(160 * "x").endswith(".")


def test_nothing_observed_nothing_found():
    assert _registry.detect(Observations(), frozenset()) == []
    assert _registry.detect(Observations(steps=100, step_ms=10.0, device="cuda"), frozenset()) == []
