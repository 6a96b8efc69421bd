"""What single rules say beside their cause: names, counts, techniques, and the second half of a condition."""

from __future__ import annotations

import pytest
from rule_cases import Case, base, but, on_cpu
from test_rules import CASES, RULES
from work_cases import LATENCY, NAMELESS, ODD, SOFTMAX

from saturate.findings import _host
from saturate.records.analysis import Finding
from saturate.records.observations import CompilerSeen, KernelsSeen, OperatorSeen, SyncSeen


def case(rule: str, device: str = "cuda") -> Case:
    return next(one for one in CASES if one.rule == rule and one.fires.device == device)


def found(rule: str, seen) -> Finding:
    answer = RULES[rule].detect(seen)
    assert answer is not None
    return answer


def lost(finding: Finding) -> float:
    assert finding.bound is not None
    return 1.0 - 1.0 / finding.bound


@pytest.mark.parametrize(
    ("rule", "changes", "said"),
    [
        ("device-waits", {"communication__world_size": 1}, "it waits for events or other streams."),
        ("device-waits", {"communication__world_size": 2}, "it waits for peers, events or other streams."),
        ("exposed-communication", {}, ", and computation hides 0.0 % of it."),
        ("exposed-communication", {"communication__overlap": None}, "one rank was observed)."),
        ("exposed-communication", {"communication__peer_wait": 0.1}, "18.0 % of the step, and computation"),
        (
            "exposed-communication",
            {"communication__peer_wait": 0.1, "communication__compared": 2, "communication__world_size": 2},
            "18.0 % of the step, and computation",
        ),
        (
            "exposed-communication",
            {"communication__peer_wait": 0.1, "communication__compared": 3, "communication__world_size": 4000},
            "18.0 % of the step (which includes waiting for peers: 3 of 4,000 ranks were observed), and",
        ),
        ("stragglers", {"communication__compared": 2}, "late, and the others wait for it."),
        (
            "stragglers",
            {"communication__compared": 3, "communication__world_size": 4},
            "late, as the last of 3 ranks that were compared; the run has 4.",
        ),
        ("fragmentation", {"memory__fragmentation": 0.5, "memory__held": 0.95}, "retry 3 times and 50.0 % of the reserved"),
        ("graph-breaks", {"compiler__graph_breaks": 1, "compiler__graph_break_reasons": ()}, "has 1 graph break."),
        ("recompilation", {"compiler__compile_share": None}, "in 20 steps: size of x changed."),
        ("recompilation", {"compiler__recompile_reasons": ("a\n  b" + 200 * "c",)}, "c..."),
        ("off-device", {"off_device": ("Net.mask",)}, "Net.mask stayed on the CPU, and"),
        ("off-device", {"busy": None}, "Net.position and 1 more stayed on the CPU."),
        ("slow-optimizer", {"optimizer_tensors": None, "optimizer_kind": ""}, "The update of the optimizer takes"),
        ("slow-optimizer", {"optimizer_kind": "", "updated_by_hand": True}, "The update by hand takes"),
        ("small-batch", {"batch_size": None}, "A batch leaves the device"),
        ("input-bound-workers", {"loader__num_workers": 3, "loader__cpu_count": 8.0}, "3 workers compute for"),
        ("unaligned-shapes", {"operators": (NAMELESS,)}, "take 12.0 % of the step."),
        ("nothing-to-gain", {"operators": ()}, "computes for 95.0 % of the step."),
    ],
)
def test_the_sentence_follows_what_is_known(rule, changes, said):
    first = next(one for one in CASES if one.rule == rule)
    assert said in found(rule, but(first.fires, **changes)).reason


@pytest.mark.parametrize(
    ("rule", "changes", "techniques"),
    [
        ("device-waits", {"kernels__short_share": 0.4}, []),
        ("eager-attention", {"compiler__compiled": True}, []),
        ("slow-optimizer", {"optimizer_kind": "", "updated_by_hand": True}, []),
        ("unaligned-shapes", {"compiler__compiled": True}, []),
        ("fp32-matmul", {"capability": (7, 5), "bf16_native": False}, ["fp16-autocast"]),
        ("fp32-matmul", {"capability": None}, ["bf16-autocast"]),
    ],
)
def test_techniques_are_those_that_fit(rule, changes, techniques):
    answer = found(rule, but(case(rule).fires, **changes))
    assert answer.techniques == techniques and answer.advice


@pytest.mark.parametrize(
    ("rule", "rows", "techniques"),
    [
        ("input-bound", True, ["batch-assembly", "loader-workers", "dataset-cache"]),
        ("input-bound", None, ["loader-workers", "dataset-cache"]),
        ("input-bound-cpu", True, ["batch-assembly", "loader-workers", "dataset-cache"]),
        ("input-bound-cpu", False, ["loader-workers", "dataset-cache"]),
        ("input-bound-io", True, ["loader-workers", "dataset-cache"]),
        ("input-bound-workers", True, ["batch-assembly", "loader-workers"]),
    ],
)
def test_only_rows_that_are_stacked_one_by_one_may_be_taken_at_once(rule, rows, techniques):
    first = next(one for one in CASES if one.rule == rule)
    assert found(rule, but(first.fires, loader__tensor_rows=rows)).techniques == techniques


def test_the_advice_of_fp32_products_names_what_there_is():
    first = case("fp32-matmul").fires
    assert "set_float32_matmul_precision" in found("fp32-matmul", first).advice
    assert found("fp32-matmul", but(first, capability=(7, 0))).advice == "torch.autocast"


def test_attention_names_its_slowest_softmax():
    other = OperatorSeen("aten::_softmax", "[8, 10]", share=0.01)
    product = OperatorSeen("aten::bmm", share=0.5)
    evidence = found("eager-attention", base(attention_eager=0.4, operators=(other, SOFTMAX, product))).evidence
    assert [one.where for one in evidence] == ["", "aten::_softmax [16, 5185, 5185]"]
    assert len(found("eager-attention", base(attention_eager=0.4, operators=(product,))).evidence) == 1


def test_whoever_calls_fused_attention_is_not_told_to_call_it():
    seen = base(attention_eager=0.4, operators=(SOFTMAX,))
    assert found("eager-attention", seen).advice.startswith("call torch.nn.functional.scaled_dot_product_attention")
    for device, told in (("cuda", "sdpa_kernel"), ("cpu", "dropout")):
        answer = found("eager-attention", but(seen, device=device, attention_fell_back=True))
        assert answer.reason.endswith("takes 40.0 % of the step, although scaled_dot_product_attention is called.")
        assert told in answer.advice and not answer.advice.startswith("call ")


def test_collections_that_the_script_asks_for_have_another_remedy():
    seen = case("gc-pauses", "cpu").fires
    assert found("gc-pauses", seen).advice.startswith("gc.freeze()")
    for share, by_call in ((0.15, True), (0.149, False), (None, False)):
        answer = found("gc-pauses", but(seen, gc_called="train.py:41", gc_called_share=share))
        assert answer.reason.endswith("step, most of it called by gc.collect() at train.py:41." if by_call else "of the step.")
        assert answer.advice.startswith("leave gc.collect() out" if by_call else "gc.freeze()"), share
        assert [one.where for one in answer.evidence][2:] == ["train.py:41"] * (share is not None)


def test_elementwise_chains_give_way_only_to_launches_that_really_cost():
    tiny = KernelsSeen(short_share=0.5, median_us=9.9, median_launch_delay_us=8.0, host_late=0.15)
    for change, silent in (
        ({}, True),
        ({"short_share": 0.49}, False),
        ({"median_us": 10.0}, False),
        ({"median_us": None}, False),
        ({"host_late": 0.14}, False),
    ):
        seen = base(elementwise=0.45, optimizer=0.1, kernels=but(tiny, **change))
        assert (RULES["elementwise-chains"].detect(seen) is None) == silent, change
    levels = [
        found("elementwise-chains", base(elementwise=0.45, optimizer=share)).confidence for share in (0.1, None)
    ]
    assert levels == ["high", "medium"]


def test_elementwise_chains_promise_what_their_evidence_says():
    """The optimizer is in neither. What is in no chain is not taken off once more: attention's softmax, an optimizer over lists of tensors."""
    answer = found("elementwise-chains", base(elementwise=0.3, optimizer=0.05, attention_eager=0.5, operators=(SOFTMAX,)))
    assert lost(answer) == pytest.approx(answer.evidence[0].value) == pytest.approx(0.3 - 0.05)
    for name, part, left in (("aten::_foreach_addcdiv_", 0.15, 0.0), ("aten::_fused_adamw_", 0.10, 0.05), ("aten::addcdiv_", 0.15, 0.15)):
        answer = found("elementwise-chains", base(elementwise=0.4, optimizer=0.15, operators=(OperatorSeen(name=name, share=part),)))
        assert lost(answer) == pytest.approx(answer.evidence[0].value) == pytest.approx(0.4 - left), name
        assert answer.evidence[1].value == pytest.approx(left)


def test_all_communication_is_waiting_where_peers_say_so():
    seen = case("exposed-communication").fires
    for wait, overlap, share in ((1.0, None, None), (0.99, None, 0.2), (0.4, 0.5, 0.2), (0.7, 0.5, 0.12)):
        answer = RULES["exposed-communication"].detect(
            but(seen, communication__peer_wait=wait, communication__overlap=overlap)
        )
        assert answer is None if share is None else lost(answer) == pytest.approx(share), (wait, overlap)


def test_missing_ranks_lower_the_confidence():
    for rule in ("exposed-communication", "stragglers"):
        seen = but(case(rule).fires, communication__peer_wait=0.3, communication__world_size=4)
        levels = [found(rule, but(seen, communication__compared=compared)).confidence for compared in (4, 3)]
        assert levels == ["high", "medium"], rule


def test_a_waiting_rank_gains_no_more_than_it_waits():
    seen = case("stragglers").fires
    for late_ms, exposed, wait, share in (
        (40.0, 0.3, 0.9, 0.3),
        (40.0, 0.3, 0.4, 0.4),
        (40.0, 0.05, 0.9, 0.4),
        (40.0, None, 0.9, 0.4),
        (200.0, 0.8, 0.9, 0.8),
    ):
        changes = {"communication__late_ms_per_step": late_ms, "communication__exposed": exposed}
        answer = found("stragglers", but(seen, communication__peer_wait=wait, **changes))
        assert lost(answer) == pytest.approx(share), (late_ms, exposed, wait)
    assert lost(found("stragglers", but(seen, step_ms_recorded=160.0))) == pytest.approx(0.25)


def test_ranks_that_are_late_in_turns_are_not_one_late_rank():
    seen = case("stragglers").fires
    for waits_ms, in_turns, share in ((None, False, 0.4), (19.9, False, 0.4), (20.0, True, 0.6), (39.0, True, 0.79), (90.0, True, 0.99)):
        answer = found("stragglers", but(seen, communication__late_rank_waits_ms_per_step=waits_ms))
        assert answer.reason.startswith("Ranks are late in turns" if in_turns else "Rank 1 arrives 40.0 %"), waits_ms
        assert lost(answer) == pytest.approx(share) and answer.confidence == ("medium" if in_turns else "high")
        assert ("every rank" if in_turns else "rank 1") in answer.advice


def test_what_is_above_the_roof_counts_for_the_ceiling_only_where_it_is_known():
    rule = "nothing-to-gain"
    answer = found(rule, base(busy=0.95))
    assert answer.bound is None and answer.confidence == "medium", "operators that are busy may be slow: 1.05x was called the most, 6x was there"
    answer = found(rule, base(busy=0.95, operators=(OperatorSeen("x", share=0.3, recoverable=0.02), OperatorSeen("scan", share=0.65))))
    assert answer.bound is None and answer.confidence == "medium", "nothing is known of most of the time"
    answer = found(rule, base(busy=0.95, operators=(OperatorSeen("x", share=0.7, recoverable=0.05), OperatorSeen("scan", share=0.25))))
    assert lost(answer) == pytest.approx(0.35) and answer.confidence == "medium", "a quarter of it may be slow"
    answer = found(rule, base(busy=0.95, operators=(OperatorSeen("x", share=0.9, recoverable=0.1), OperatorSeen("y", share=0.05))))
    assert lost(answer) == pytest.approx(0.2) and answer.confidence == "high" and len(answer.evidence) == 2
    assert RULES[rule].detect(on_cpu(busy=0.5, input_wait=0.0, overhead=0.0)) is None, "what was seen goes first"
    assert RULES[rule].detect(base(input_wait=0.0, overhead=0.0)) is None, "of a device, only its own busy time"


def test_a_small_batch_may_show_as_latency_alone():
    seen = but(case("small-batch").fires, kernels=KernelsSeen(host_late=0.01), operators=(LATENCY,))
    assert lost(found("small-batch", seen)) == pytest.approx(0.31)
    for share, silent in ((0.25, False), (0.2499, True)):
        seen = but(seen, operators=(but(LATENCY, share=share),))
        assert (RULES["small-batch"].detect(seen) is None) == silent


@pytest.mark.parametrize(
    ("change", "fires"),
    [
        ({"name": "aten::mul"}, False),
        ({"dtypes": "float16"}, True),
        ({"dtypes": "c10::Half"}, True),
        ({"dtypes": "BFloat16"}, True),
        ({"dtypes": "float8_e4m3fn"}, True),
        ({"dtypes": "float64"}, False),
        ({"dtypes": "long"}, False),
        ({"kernels": ("tensorop_align2",)}, True),
        ({"kernels": ("tensorop_align4",)}, False),
        ({"kernels": ("tensorop_align" + "9" * 5000,)}, False),
        ({"dims": ((16, 100, 64), (16, 64, 65))}, True),
        ({"dims": ((16, 100, 64), (16, 64, 64))}, False),
        ({"dims": ((16, 100, 66), (16, 66, 64))}, True),
        ({"dims": ((5185,), (5185,))}, False),
    ],
)
def test_which_products_are_unaligned(change, fires):
    seen = base(operators=(but(NAMELESS, **change),), tf32_allowed=True)
    assert (RULES["unaligned-shapes"].detect(seen) is not None) == fires


def test_the_bound_of_unaligned_products_is_their_time_above_the_roof_where_all_of_it_is_known():
    known, unknown = ODD, but(ODD, recoverable=None)
    assert lost(found("unaligned-shapes", base(operators=(known, known)))) == pytest.approx(0.20)
    assert lost(found("unaligned-shapes", base(operators=(known, unknown)))) == pytest.approx(0.24)


def test_operators_that_are_little_more_than_their_call_are_many_short_ones():
    """Also where a profiler or a loaded machine makes each of them longer than 10 us."""
    def seen(share: float, **changes):
        small = OperatorSeen("aten::add", share=share, limit="latency")
        return but(case("launch-bound", "cpu").fires, kernels__median_us=25.0, overhead=0.05, operators=(small,), **changes)

    one = found("launch-bound", seen(0.5))
    assert one is not None and "50.0 % of the step passes in operators" in one.reason
    assert lost(one) == pytest.approx(0.55) and one.confidence != "high"
    reads = (SyncSeen("train.py:9", "Tensor.item", 1000.0, 5.0),)
    for other in (seen(0.4999), seen(0.5, syncs=reads), but(seen(0.5), device="cuda")):
        assert RULES["launch-bound"].detect(other) is None


def test_tiny_operators_take_what_was_recorded_of_them():
    """Ten microseconds for each were charged, which is more than the whole step where there are many of two."""
    seen = case("launch-bound", "cpu").fires
    assert lost(found("launch-bound", seen)) == pytest.approx(0.7)
    assert lost(found("launch-bound", but(seen, kernels__short_time=0.05))) == pytest.approx(0.45)
    assert lost(found("launch-bound", but(seen, kernels__short_time=None))) == pytest.approx(0.4)


def test_equal_waits_of_host_and_device_are_the_hosts():
    late = case("launch-bound").fires
    assert found("launch-bound", but(late, device_wait=late.kernels.host_late))
    late = case("slow-host-code").fires
    assert found("slow-host-code", but(late, device_wait=late.kernels.host_late))


def test_an_optimizer_that_is_known_not_to_be_fused_is_surer():
    seen = case("slow-optimizer").fires
    assert found("slow-optimizer", seen).confidence == "high"
    assert found("slow-optimizer", but(seen, optimizer_fused=None)).confidence == "medium"


@pytest.mark.parametrize(
    ("kinds", "techniques", "said"),
    [
        ({"optimizer_state": 0.6, "activations": 0.1}, ["cpu-offload", "optimizer-8bit"], "optimizer state (60.0 %"),
        ({"gradients": 0.5, "activations": 0.1}, ["optimizer-in-backward"], "most of it gradients (50.0 %"),
        ({"parameters": 0.9, "activations": 0.1}, [], "most of it parameters"),
    ],
)
def test_what_helps_against_full_memory_follows_from_what_takes_it(kinds, techniques, said):
    first = case("memory-pressure").fires
    none = {f"memory__{kind}": None for kind in ("parameters", "gradients", "optimizer_state", "activations")}
    answer = found("memory-pressure", but(first, **{**none, **{f"memory__{kind}": share for kind, share in kinds.items()}}))
    assert answer.techniques == techniques and said in answer.reason and answer.advice


def test_fragmentation_names_the_setting_that_mends_it():
    assert "PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True" in found("fragmentation", case("fragmentation").fires).advice


def test_reads_of_values_are_not_launches():
    """What the interpreter does around a print of a tensor was many short operators, 6.2x worth of them."""
    seen = case("launch-bound", "cpu").fires
    reads = (SyncSeen("train.py:20", "print", 1.0, 0.1 * seen.step_ms), SyncSeen("train.py:21", "Tensor.item", 1.0, 0.0))
    assert lost(found("launch-bound", but(seen, syncs=reads))) == pytest.approx(0.6)
    assert RULES["launch-bound"].detect(but(seen, syncs=(SyncSeen("train.py:20", "print", 1.0, 0.26 * seen.step_ms),))) is None


def test_a_compiler_that_gave_up_before_the_window_is_evidence_of_its_own():
    seen = base(compiler=CompilerSeen(compiled=True, recompiles=0, recompile_limit_hit=True, recompile_reasons=("train.py:7 f: size 8",)))
    one = found("recompilation", seen)
    assert "gave up" in one.reason and "train.py:7" in one.reason
    assert [(e.metric, e.value) for e in one.evidence] == [("limit of recompilations hit", 1.0)]


def test_reads_that_run_in_no_operator_count_once():
    """A `tolist` in a loop is both read and time outside operators; an `item` is an operator, with the interpreter around it."""
    lists = on_cpu(overhead=0.8, busy=0.1, kernels__count_per_step=20.0, syncs=(SyncSeen("train.py:7", "Tensor.tolist", 4.0, 60.0),))
    items = but(lists, syncs=(SyncSeen("train.py:7", "Tensor.item", 4.0, 10.0),))
    assert _host.reading(lists) == pytest.approx(0.9) and _host.reading(items) == pytest.approx(0.9)    # not all of it
    assert _host.late(lists) == pytest.approx(0.2) and _host.late(items) == pytest.approx(0.8)
    formats = but(lists, syncs=(SyncSeen("train.py:7", "format(Tensor)", 1.0, 40.0),))      # an `item` and little else
    assert _host.late(formats) == pytest.approx(0.8)
