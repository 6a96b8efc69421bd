"""Whole workloads with one planted cause each: it is named first, and a healthy one is left alone.

The observations are what a profile of such a workload gives, with everything known that is known there.
"""

from __future__ import annotations

import pytest
from host_cases import DEEP, SHORT
from input_cases import DECODE, DISK, ONE_WORKER
from rule_cases import base, but, on_cpu
from work_cases import LATENCY, ODD, SOFTMAX

from saturate.findings._registry import detect, verdict
from saturate.records.observations import KernelsSeen, LoaderSeen, OperatorSeen, SyncSeen

#: A CPU training of large bf16 products with its data in memory.
WELL = on_cpu(
    bf16_native=True,
    busy=0.94,
    input_wait=0.01,
    input_wait_raw=0.01,
    overhead=0.05,
    forward=0.35,
    backward=0.55,
    optimizer=0.06,
    optimizer_kind="AdamW",
    optimizer_fused=False,
    optimizer_tensors=12,
    gc_pause=0.002,
    fp32_matmul=0.03,
    attention_eager=0.0,
    elementwise=0.12,
    steps=5,
    kernels=KernelsSeen(count_per_step=400.0, short_share=0.7, median_us=4.0),
    loader=LoaderSeen(num_workers=0, cpu_count=2.0, busy_cores=1.0, fetch_cpu=0.9, io_wait=0.0),
)
#: A rank on an A100 that keeps its device busy.
FAST = base(
    busy=0.93,
    input_wait=0.0,
    input_wait_raw=0.2,
    sync_idle=0.01,
    device_wait=0.02,
    optimizer=0.04,
    optimizer_fused=True,
    fp32_matmul=0.0,
    tf32_allowed=True,
    attention_eager=0.0,
    elementwise=0.15,
    gc_pause=0.0,
    off_device=(),
    steps=5,
    kernels=but(DEEP, host_late=0.03),
    memory__used=0.8,
    communication__world_size=1,
    communication__exposed=0.0,
    operators=(OperatorSeen("aten::mm", share=0.7, limit="compute", efficiency=0.8, recoverable=0.14),),
    syncs=(SyncSeen("train.py:50", "Tensor.item", 1.0, 90.0),),
    copies__pageable_ms=0.0,
)

PLANTED = {
    "slow disk": ("input-bound-io", "input-bound", but(WELL, busy=0.45, input_wait=0.5, loader=DISK.loader)),
    "slow disk, emulated by sleeping": (
        "input-bound-io",
        "input-bound",
        but(WELL, busy=0.45, input_wait=0.5, loader=but(DISK.loader, io_wait=0.0)),
    ),
    "slow decode": ("input-bound-cpu", "input-bound", but(WELL, busy=0.45, input_wait=0.5, loader=DECODE.loader)),
    "one worker": (
        "input-bound-workers",
        "input-bound",
        but(WELL, busy=0.45, input_wait=0.5, loader=ONE_WORKER.loader),
    ),
    "item() per element": (
        "host-syncs",
        "sync-bound",
        but(
            WELL,
            busy=0.75,
            overhead=0.24,
            syncs=(SyncSeen("train.py:9", "Tensor.item", 5000.0, 30.0),),
            kernels=KernelsSeen(count_per_step=15_400.0, short_share=0.98, median_us=1.5),
        ),
    ),
    "tiny operators": (
        "launch-bound",
        "host-bound",
        but(
            WELL,
            busy=0.5,
            overhead=0.45,
            elementwise=0.3,
            optimizer=0.04,
            kernels=KernelsSeen(count_per_step=8000.0, short_share=0.97, median_us=2.5),
        ),
    ),
    "fp32 matmuls": (
        "fp32-matmul",
        "compute-bound",
        but(WELL, fp32_matmul=0.8, operators=(OperatorSeen("aten::mm", share=0.8, limit="compute", efficiency=0.7),)),
    ),
    "eager attention": (
        "eager-attention",
        "memory-bound",
        but(
            WELL,
            attention_eager=0.7,
            fp32_matmul=0.3,
            operators=(
                OperatorSeen("aten::_softmax", share=0.45, limit="memory"),
                OperatorSeen("aten::bmm", share=0.3, limit="compute"),
            ),
        ),
    ),
    "a sleeping rank": (
        "stragglers",
        "communication-bound",
        but(
            WELL,
            busy=0.9,
            communication__exposed=0.5,
            communication__overlap=0.0,
            communication__world_size=2,
            communication__peer_wait=0.97,
            communication__slowest_rank=1,
            communication__late_ms_per_step=48.0,
        ),
    ),
    "the sleeping rank itself": (
        "stragglers",
        "host-bound",
        but(
            WELL,
            busy=0.5,
            overhead=0.49,
            communication__world_size=2,
            communication__exposed=0.01,
            communication__peer_wait=0.97,
            communication__slowest_rank=1,
            communication__late_ms_per_step=48.0,
        ),
    ),
    "collector pauses": ("gc-pauses", "host-bound", but(WELL, busy=0.5, gc_pause=0.4, overhead=0.48)),
    "recompilation": (
        "recompilation",
        "host-bound",
        but(
            WELL,
            busy=0.2,
            overhead=0.78,
            compiler__compiled=True,
            compiler__recompiles=5,
            compiler__compile_share=0.75,
        ),
    ),
    "graph breaks": ("graph-breaks", "unknown", but(WELL, compiler__compiled=True, compiler__graph_breaks=3)),
    "logging in the step": ("slow-host-code", "host-bound", but(WELL, busy=0.5, overhead=0.49)),
    "pageable copies": (
        "pageable-copies",
        "sync-bound",
        but(
            FAST,
            busy=0.7,
            sync_idle=0.2,
            copies__pageable_ms=18.0,
            copies__pageable_bytes=1 << 26,
            syncs=(SyncSeen("aten::copy_", "cudaStreamSynchronize (HtoD)", 1.0, 20.0),),
        ),
    ),
    "idle tensor cores": ("fp32-matmul", "compute-bound", but(FAST, fp32_matmul=0.8, tf32_allowed=False)),
    "odd shapes": (
        "unaligned-shapes",
        "compute-bound",
        but(FAST, operators=(*FAST.operators, ODD, but(ODD, name="aten::baddbmm"))),
    ),
    "odd shapes in eager attention": (
        "eager-attention",
        "compute-bound",
        but(FAST, attention_eager=0.42, operators=(*FAST.operators, ODD, SOFTMAX)),
    ),
    "launch-bound": (
        "launch-bound",
        "host-bound",
        but(
            FAST,
            busy=0.6,
            kernels=but(SHORT, host_late=0.35),
            syncs=(SyncSeen("train.py:50", "Tensor.item", 1.0, 0.3),),
        ),
    ),
    "already-launched gaps": (
        "device-waits",
        "device-wait-bound",
        but(FAST, busy=0.355, device_wait=0.56, kernels=but(SHORT, host_late=0.04), communication__world_size=16),
    ),
    "exposed communication": (
        "exposed-communication",
        "communication-bound",
        but(FAST, busy=0.95, communication__world_size=2, communication__exposed=0.25, communication__overlap=0.0),
    ),
    "a read per step": (
        "host-syncs",
        "sync-bound",
        but(
            FAST,
            busy=0.75,
            sync_idle=0.12,
            kernels__host_late=0.1,
            syncs=(SyncSeen("train.py:50", "Tensor.item", 4.0, 30.0),),
        ),
    ),
    "too small a batch": (
        "small-batch",
        "unknown",
        but(FAST, busy=0.9, memory__used=0.1, kernels=but(DEEP, host_late=0.08), operators=(LATENCY,)),
    ),
}


@pytest.mark.parametrize("name", PLANTED)
def test_the_planted_cause_is_named_first(name):
    expected, limit, seen = PLANTED[name]
    found = detect(seen, frozenset())
    assert found and found[0].id == expected, [(one.id, one.bound) for one in found]
    assert verdict(seen) == limit


@pytest.mark.parametrize("seen", [WELL, FAST], ids=["cpu", "cuda"])
def test_a_healthy_workload_is_left_alone(seen):
    assert [one.id for one in detect(seen, frozenset())] == ["nothing-to-gain"]


def test_idle_time_that_input_explains_never_asks_for_a_larger_batch():
    starved = but(FAST, busy=0.4, input_wait=0.5, memory__used=0.1, kernels=but(SHORT, host_late=0.3), syncs=())
    assert "small-batch" not in [one.id for one in detect(starved, frozenset())]
    fed = but(starved, input_wait=0.0)
    assert "small-batch" in [one.id for one in detect(fed, frozenset())], "the same, with input at hand, may"


def test_one_cause_is_reported_once():
    """A pageable copy is no sync, a softmax of attention no elementwise chain, a collector pause no host code."""
    for name, others in {
        "pageable copies": {"host-syncs"},
        "eager attention": {"elementwise-chains"},
        "collector pauses": {"slow-host-code", "launch-bound"},
        "recompilation": {"slow-host-code", "launch-bound"},
        "a sleeping rank": {"exposed-communication", "slow-host-code"},
        "already-launched gaps": {"launch-bound", "small-batch"},
        "item() per element": {"launch-bound"},
        "tiny operators": {"elementwise-chains", "slow-host-code"},
    }.items():
        found = {one.id for one in detect(PLANTED[name][2], frozenset())}
        assert not found & others, (name, found & others)
