"""Analyses and profiles for the tests of how they look. Every number is made up but plausible."""

from __future__ import annotations

from typing import Any

from saturate.records.analysis import (
    Analysis,
    DataWait,
    Device,
    Evidence,
    Finding,
    Gaps,
    Integrity,
    Memory,
    MemoryLine,
    ModuleCost,
    Occupancy,
    Operator,
    Problem,
    Profile,
    Roofline,
    StepParts,
    Straggler,
    Sync,
)

MS = 1_000_000
SOUND = Integrity(ok=True, problems=[])
HOSTILE = "</script><img src=x onerror=alert(1)>\x1b[31m\u202e\u200f\x00\ud800\r\nnext"
COMMAND = ["python", "train.py", "--config", "small.yaml", "--api-token", "s3cret-value"]


def operator(name: str, shapes: str, time_ms: float, **given: Any) -> Operator:
    return Operator(
        **{
            "name": name,
            "shapes": shapes,
            "dtypes": "bfloat16",
            "calls": 12,
            "kernels": [f"{name}_kernel"],
            "time_ns": round(time_ms * MS),
            "flops": None,
            "bytes": None,
            **given,
        }
    )


OPERATORS = [
    operator(
        "aten::bmm",
        "[16, 5185, 64] [16, 64, 5185]",
        120.5,
        flops=6_600_000_000_000,
        bytes=65_000_000_000,
        limit="memory",
        inefficient=True,
        efficiency=0.061,
        recoverable_ns=113 * MS,
        kernels=["cutlass_75_wmma_tensorop_bf16_s161616gemm_bf16_16x16_128x2_tn_align1", "another"],
    ),
    operator(
        "aten::_softmax",
        "[16, 5185, 5185]",
        262.0,
        flops=10_300_000_000,
        bytes=206_000_000_000,
        limit="memory",
        inefficient=True,
        efficiency=0.23,
        recoverable_ns=201 * MS,
    ),
    operator(
        "aten::addmm",
        "[3072] [9216, 768] [768, 3072]",
        61.2,
        flops=45_000_000_000_000,
        bytes=9_000_000_000,
        limit="compute",
        inefficient=False,
        efficiency=0.77,
        recoverable_ns=14 * MS,
    ),
    operator(
        "aten::add",
        "[8]",
        0.4,
        flops=96,
        bytes=192,
        limit="latency",
        inefficient=True,
        efficiency=0.001,
        recoverable_ns=300_000,
    ),
    operator(
        "aten::copy_",
        "[16, 3, 960, 960]",
        2.2,
        flops=0,
        bytes=88_000_000,
        limit="memory",
        inefficient=False,
        efficiency=0.8,
        recoverable_ns=400_000,
    ),
    operator("custom::op", "", 9.0, unknown={"flops": "the operator is not modelled"}),
]
CEILINGS = {"bfloat16": 791e12, "float32": 53e12, "copy": 3.0e12, "pinned": 55e9}


def device(**given: Any) -> Device:
    """One of the H100's kind: 5 steps of 242.2 ms, input-bound."""
    step = {
        "compute_ns": 560 * MS + 7,
        "exposed_communication_ns": 0,
        "exposed_copy_ns": 6_650_000,
        "idle_ns": 644_349_993,
    }
    fields = {
        "id": 0,
        "name": "NVIDIA H100 80GB HBM3",
        "source": "owlv2_h100.json.gz",
        "kernels": 4330,
        "steps": 5,
        "span_ns": 1_078_300_000,
        "step_ns": 1_211_000_000,
        "busy_of_span": 0.5256,
        "busy_of_step": 0.4679,
        **step,
        "data_wait": DataWait(raw=0.511, exposed=0.511),
        "gaps": Gaps(input=0.96, host_late=0.03, sync=0.0, already_launched=0.008, unattributed=0.002),
        "gap_ns": {
            "input": 491 * MS,
            "host_late": 15 * MS,
            "sync": 0,
            "already_launched": 4 * MS,
            "unattributed": MS,
        },
        "edge_ns": {"input": 128 * MS, "host_late": 4 * MS},
        "short_kernels": 0.48,
        "median_kernel_ns": 12_900,
        "median_launch_delay_ns": 70_000_000,
        "roofline": Roofline(
            coverage=0.82,
            operators=OPERATORS,
            ceilings=CEILINGS,
            source="specification of NVIDIA H100 SXM x 0.80, 0.90",
        ),
        "occupancy": Occupancy(sm_fill=0.93, sm_fill_of_step=0.43, tail=0.88, occupancy=0.5787),
        "verdict": "input-bound",
        "each_step": [
            StepParts(
                start_ns=i * 242 * MS,
                compute_ns=112 * MS,
                exposed_communication_ns=0,
                exposed_copy_ns=1_330_000,
                idle_ns=(110 + 9 * i) * MS,
            )
            for i in range(5)
        ],
    }
    return Device(**{**fields, **given})


INPUT = Finding(
    id="input-bound-cpu",
    title="The loader computes too slowly",
    reason="The training thread waited 51.1 % of the step for "
    "the next batch while the device was idle; worker processes were busy computing it.",
    evidence=[
        Evidence(metric="exposed input wait", value=0.511, unit="of the step", threshold=0.1),
        Evidence(metric="workers", value=0, unit="processes", where="train.py:41"),
    ],
    bound=2.045,
    confidence="high",
    techniques=["loader-workers"],
    advice="Decode once and store the result.",
)
ODD = Finding(
    id="unaligned-shapes",
    title="Matrix sizes that tensor cores take slowly",
    reason="5185 is odd: bmm runs on align1 kernels.",
    evidence=[
        Evidence(
            metric="time in align1 kernels",
            value=0.189,
            unit="of the step",
            threshold=0.05,
            where="aten::bmm [16, 5185, 64]",
        )
    ],
    bound=1.17,
    confidence="medium",
    advice="Pad the sequence to a multiple of 8.",
)
VAGUE = Finding(
    id="graph-breaks",
    title="Graph breaks",
    reason="Four graph breaks per step.",
    evidence=[Evidence(metric="graph breaks", value=4, unit="per step")],
    bound=None,
    confidence="low",
)


def input_bound() -> Analysis:
    return Analysis(
        sources=["owlv2_h100.json.gz"],
        devices=[device()],
        integrity=SOUND,
        verdict="input-bound",
        findings=[INPUT, ODD, VAGUE],
        annotations=[
            {"name": "ProfilerStep#1", "count": 1, "total_ns": 242 * MS, "device_ns": 112 * MS},
            {"name": "evaluate", "count": 5, "total_ns": 21 * MS, "device_ns": None},
        ],
    )


def ranks(count: int = 16) -> Analysis:
    devices = [
        device(
            rank=rank,
            source=f"rank{rank}.json.gz",
            exposed_communication_ns=200 * MS + rank,
            idle_ns=444_349_993 - rank,
            communication_ns=260 * MS,
            communication_overlap=0.23,
            data_wait=DataWait(raw=None, exposed=None),
            verdict="communication-bound" if rank else "host-bound",
        )
        for rank in range(count)
    ]
    late = [
        Straggler(rank=rank, wait_ns=(count - rank) * MS, transfer_ns=60 * MS, late_ns=rank * MS, collectives=240)
        for rank in range(count)
    ]
    return Analysis(
        sources=[each.source for each in devices],
        devices=devices,
        integrity=SOUND,
        verdict="communication-bound",
        findings=[VAGUE],
        stragglers=late,
    )


def no_steps() -> Analysis:
    """Graph replay, no steps, hardly anything known."""
    why = {"occupancy": "grid and block of replayed kernels are not recorded", "step_ns": "the trace has no steps"}
    found = device(
        steps=0,
        step_ns=None,
        busy_of_step=None,
        busy_of_span=0.0206,
        span_ns=473_700_000,
        compute_ns=9_700_000,
        exposed_copy_ns=58_220,
        idle_ns=463_941_780,
        data_wait=DataWait(raw=None, exposed=None),
        each_step=[],
        roofline=Roofline(coverage=None, operators=[]),
        unknown=why,
        verdict="unknown",
        occupancy=Occupancy(sm_fill=None, sm_fill_of_step=None, tail=None, occupancy=None),
        edge_ns={},
        name="AMD Instinct MI300X",
        source="sglang_decode_hipgraph.json.gz",
    )
    problems = [
        Problem(id="graph-replay", message="all 555 kernels were replayed from graphs", blocks=["occupancy"]),
        Problem(id="no-steps", message="the trace has no steps; the window is the span", blocks=["steps"]),
    ]
    return Analysis(
        sources=[found.source],
        devices=[found],
        integrity=Integrity(ok=False, problems=problems),
        verdict="unknown",
        findings=[],
    )


def nothing() -> Analysis:
    """No device at all."""
    problem = Problem(id="no-accelerator", message="the trace holds no accelerator events", blocks=["busy", "gaps"])
    return Analysis(
        sources=["cpu_only.json.gz"],
        devices=[],
        integrity=Integrity(ok=False, problems=[problem]),
        verdict="unknown",
        findings=[],
        unknown={"verdict": "no accelerator events"},
    )


def clean() -> Analysis:
    busy = {"compute_ns": 1_150 * MS, "exposed_copy_ns": MS, "idle_ns": 60 * MS}
    return Analysis(
        sources=["good.json"],
        devices=[device(**busy, busy_of_step=0.95, verdict="compute-bound")],
        integrity=SOUND,
        verdict="compute-bound",
        findings=[],
    )


def profile() -> Profile:
    split = {
        "input": 310 * MS,
        "host_to_device": 20 * MS,
        "forward": 300 * MS,
        "backward": 400 * MS,
        "optimizer": 80 * MS,
        "communication": 0,
        "sync": 60 * MS,
        "idle": 41_000_001,
    }
    return Profile(
        sources=["trace.json.gz"],
        devices=[device(source="trace.json.gz")],
        integrity=SOUND,
        verdict="input-bound",
        findings=[INPUT, ODD, VAGUE],
        command=COMMAND,
        step_ms=236.1,
        step_ms_profiled=242.2,
        split=split,
        split_steps=5,
        mfu=0.31,
        hfu=0.38,
        mfu_achievable=0.39,
        flops_per_step=74_000_000_000_000,
        flops_coverage=0.93,
        memory=Memory(
            parameters=2_400_000_000,
            gradients=2_400_000_000,
            optimizer_state=4_800_000_000,
            activations=31_000_000_000,
            peak=41_200_000_000,
            reserved=48_000_000_000,
            fragmentation=0.14,
            allocator_retries=3,
            limit=85_000_000_000,
            lines=[
                MemoryLine(file="model.py", line=88, function="forward", bytes=12_500_000_000),
                MemoryLine(file="train.py", line=60, function="main", inside="modeling.py:310 forward", bytes=9_000_000_000),
            ],
            unknown={"other": "not told apart from activations"},
        ),
        syncs=[
            Sync(file="train.py", line=41, what="Tensor.item", calls_per_step=1, ms_per_step=12.4),
            Sync(
                file="/home/someone/project/metrics/running_average.py",
                line=1203,
                what="Tensor.cpu",
                calls_per_step=0.2,
                ms_per_step=0.31,
            ),
        ],
        input_lines=[Sync(file="data.py", line=17, what="__getitem__", calls_per_step=None, ms_per_step=60.2)],
        modules=[
            ModuleCost(
                name="",
                kind="Net",
                forward_ms=60.0,
                self_ms=0.4,
                flops=24_000_000_000_000,
                memory_bytes=31_000_000_000,
            ),
            ModuleCost(name="blocks.3.mlp", kind="MLP", forward_ms=9.1, self_ms=9.1, flops=3_000_000_000_000),
        ],
        graph_breaks=["train.py:52 print"],
        recompiles=[],
        off_device=["criterion.weight"],
        trace=".saturate/p/trace.json.gz",
        report=".saturate/p/profile.html",
        next_command="saturate tune --only loader-workers -- " + " ".join(COMMAND),
    )


def cpu_profile() -> Profile:
    """What a machine without an accelerator can tell."""
    seen = Device(
        id=-1,
        name="CPU",
        steps=5,
        step_ns=500 * MS,
        verdict="input-bound",
        unknown={"busy_of_step": "there is no accelerator"},
    )
    return Profile(
        sources=["trace.json.gz"],
        devices=[seen],
        integrity=SOUND,
        verdict="input-bound",
        findings=[INPUT],
        command=COMMAND,
        step_ms=99.8,
        step_ms_profiled=100.0,
        split={"input": 300 * MS, "forward": 200 * MS},
        split_steps=5,
        unknown={"mfu": "no specification of this CPU's peak"},
        next_command="saturate tune -- python t.py",
    )


def hostile() -> Profile:
    """Everything that comes from a file is an attack."""
    bad = HOSTILE
    dev = device(
        name=bad,
        source=bad,
        unknown={bad: bad},
        gap_ns={bad: 5},
        edge_ns={bad: 7},
        roofline=Roofline(
            coverage=0.5,
            operators=[
                operator(bad, bad, 5.0, dtypes=bad, kernels=[bad], flops=10, bytes=10, unknown={"x": bad}),
                *OPERATORS,
            ],
            ceilings={bad: 1e12, "copy": 1e12},
            source=bad,
        ),
    )
    finding = Finding(
        id=bad,
        title=bad,
        reason=bad,
        evidence=[Evidence(metric=bad, value=float("nan"), unit=bad, where=bad)],
        bound=None,
        confidence="low",
        techniques=[bad],
        advice=bad,
    )
    place = Sync(file=bad, line=1, what=bad, calls_per_step=1, ms_per_step=1)
    return Profile(
        sources=[bad],
        devices=[dev, dev],
        verdict="host-bound",
        findings=[finding],
        unknown={bad: bad},
        integrity=Integrity(ok=False, problems=[Problem(id=bad, message=bad, blocks=[bad])]),
        annotations=[{"name": bad, "count": 1, "total_ns": 5, "device_ns": None, bad: bad}],
        command=[bad, f"--x={bad}"],
        stragglers=[Straggler(rank=1, wait_ns=1, transfer_ns=1, late_ns=1, collectives=1)],
        split={bad: 5, "idle": 5},
        syncs=[place],
        input_lines=[place],
        graph_breaks=[bad],
        recompiles=[bad],
        off_device=[bad],
        modules=[ModuleCost(name=bad, kind=bad, forward_ms=1, self_ms=1)],
        memory=Memory(peak=1, lines=[MemoryLine(file=bad, line=1, function=bad, inside=bad, bytes=1)], unknown={bad: bad}),
        trace=bad,
        report=bad,
        next_command=f"saturate tune -- {bad}",
    )


def giant() -> Analysis:
    """A thousand ranks with hundreds of operators of long names."""
    many = [
        operator(
            f"op{i}" + "x" * 900,
            "[8, 8] " * 60,
            900 - i,
            flops=10**9 + i,
            bytes=10**8,
            limit="memory",
            efficiency=0.5,
            recoverable_ns=(900 - i) * 1000,
        )
        for i in range(300)
    ]
    roof = Roofline(coverage=0.9, operators=many, ceilings=CEILINGS, source="measured on this device")
    devices = [device(id=i, rank=i, roofline=roof, each_step=device().each_step * 40) for i in range(200)]
    return Analysis(
        sources=[f"rank{i}.json.gz" for i in range(1000)],
        devices=devices,
        integrity=SOUND,
        verdict="input-bound",
        findings=[INPUT] * 100,
        annotations=[{"name": f"n{i}", "count": 1, "total_ns": i} for i in range(5000)],
    )


ALL = {
    build.__name__: build for build in (input_bound, ranks, no_steps, nothing, clean, profile, cpu_profile, hostile)
}
