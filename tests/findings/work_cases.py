"""Cases of the rules about the work itself: operators, optimizer, ranks, memory, machine."""

from __future__ import annotations

from host_cases import SHORT
from rule_cases import Case, base, on_cpu

from saturate.records.observations import KernelsSeen, MemorySeen, OperatorSeen

ODD = OperatorSeen(
    "aten::bmm",
    "[16, 5185, 64] [16, 64, 5185]",
    "bfloat16",
    ("cutlass_75_tensorop_bf16_s1688gemm_align1",),
    share=0.12,
    limit="compute",
    efficiency=0.06,
    recoverable=0.10,
    dims=((16, 5185, 64), (16, 64, 5185)),
)
NAMELESS = OperatorSeen(**{**vars(ODD), "kernels": ("kernel_1",)})
ALIGNED = OperatorSeen(**{**vars(ODD), "kernels": ("sm80_tensorop_align8",)})
SIMT = OperatorSeen(**{**vars(ODD), "kernels": ("cutlass_80_simt_sgemm_128x64_nn_align1",), "dtypes": "float"})
SAMPLES = OperatorSeen(**{**vars(NAMELESS), "name": "aten::mm", "dims": ((4097, 1024), (1024, 1024))})
FAST = OperatorSeen(**{**vars(NAMELESS), "efficiency": 0.4})
UNMODELLED = OperatorSeen(**{**vars(NAMELESS), "efficiency": None, "recoverable": None})
SMALL = OperatorSeen(**{**vars(UNMODELLED), "dims": ((16, 63, 64), (16, 64, 63))})
SOFTMAX = OperatorSeen("aten::_softmax", "[16, 5185, 5185]", "bfloat16", share=0.2)
LATENCY = OperatorSeen("aten::mm", "[8, 64] [64, 64]", "float", share=0.3, limit="latency")

#: Nothing else explains the time, and half of the memory is free.
SMALL_BATCH = base(
    input_wait=0.0,
    sync_idle=0.0,
    device_wait=0.05,
    communication__world_size=1,
    memory__used=0.2,
    batch_size=8,
    kernels=SHORT,
)

#: Most of the memory is taken by what is kept for the backward pass.
FULL = MemorySeen(
    used=0.92,
    fragmentation=0.02,
    allocator_retries=0,
    parameters=0.11,
    gradients=0.11,
    optimizer_state=0.17,
    activations=0.61,
    line="train.py:41 forward",
    line_share=0.33,
)

CASES = [
    Case(
        "fp32-matmul",
        base(fp32_matmul=0.5, device_name="NVIDIA A100"),
        lost=0.5 * 15 / 16,
        edges=(("fp32_matmul", 0.10, 0.0999),),
        missing=("fp32_matmul",),
        quiet={
            "TF32 is on already": {"fp32_matmul": 0.0, "tf32_allowed": True},
            "no faster format": {"capability": (6, 1), "bf16_native": False},
            "what the device can do is not known": {"capability": None, "bf16_native": None},
        },
        still={"Volta has float16 only": {"capability": (7, 0), "bf16_native": False}},
        reason="fp32 take 50.0 % of the step, and NVIDIA A100 has",
        techniques=("tf32", "bf16-autocast", "fp16-autocast"),
    ),
    Case(
        "fp32-matmul",
        on_cpu(fp32_matmul=0.8, bf16_native=True),
        lost=0.8 * 15 / 16,
        edges=(("fp32_matmul", 0.20, 0.1999),),
        missing=("fp32_matmul", "bf16_native"),
        quiet={
            "no bfloat16 in hardware": {"bf16_native": False},
            "it was measured, and is no faster (AVX512-BF16 without AMX)": {"bf16_rate": 0.52},
        },
        still={"it was measured, and is faster": {"bf16_rate": 1.8}},
        techniques=("bf16-autocast",),
    ),
    Case(
        "unaligned-shapes",
        base(operators=(ODD, SOFTMAX)),
        lost=0.10,
        quiet={
            "aligned kernels": {"operators": (ALIGNED,)},
            "plain fp32 kernels are always of alignment 1": {"operators": (SIMT,)},
            "odd number of samples": {"operators": (SAMPLES,)},
            "odd, but fast": {"operators": (FAST,)},
            "small matrices": {"operators": (SMALL,)},
            "little time": {"operators": (OperatorSeen(**{**vars(ODD), "share": 0.0499}),)},
            "no operators": {"operators": ()},
            "a CPU": {"device": "cpu"},
        },
        still={
            "at the threshold": {"operators": (OperatorSeen(**{**vars(ODD), "share": 0.05}),)},
            "the names do not tell, the shape does": {"operators": (NAMELESS,)},
            "efficiency unknown": {"operators": (UNMODELLED,)},
            "two of them together": {"operators": (OperatorSeen(**{**vars(ODD), "share": 0.03}),) * 2},
        },
        reason="aten::bmm [16, 5185, 64] [16, 64, 5185] and the like take 12.0 % of the step on kernels that load",
        techniques=("compile",),
    ),
    Case(
        "eager-attention",
        base(attention_eager=0.4, operators=(SOFTMAX,)),
        lost=0.4,
        edges=(("attention_eager", 0.10, 0.0999),),
        missing=("attention_eager",),
        quiet={"a softmax over classes": {"attention_eager": 0.0}},
        still={"on a CPU": {"device": "cpu"}},
        reason="takes 40.0 % of the step",
        techniques=("compile",),
    ),
    Case(
        "elementwise-chains",
        base(elementwise=0.45, optimizer=0.1),
        lost=0.35,
        edges=(("elementwise", 0.3001, 0.2999),),
        missing=("elementwise",),
        quiet={
            "it is the optimizer": {"optimizer": 0.3},
            "it is launches": {"kernels": SHORT},
            "it is compiled": {"compiler__compiled": True},
        },
        still={
            "a softmax beside them": {"operators": (SOFTMAX,)},
            "short kernels on time": {"kernels": SHORT, "kernels__host_late": 0.01},
            "optimizer unknown": {"optimizer": None},
        },
        reason="take 35.0 % of the step",
        techniques=("compile",),
    ),
    Case(
        "slow-optimizer",
        base(optimizer=0.25, optimizer_kind="AdamW", optimizer_fused=False, optimizer_tensors=300),
        lost=0.25,
        edges=(("optimizer", 0.10, 0.0999),),
        missing=("optimizer",),
        quiet={
            "fused: limited by memory": {"optimizer_fused": True},
            "LBFGS runs forward and backward again": {"optimizer_kind": "LBFGS"},
            "what takes the time clips gradients, or averages weights": {"update": 0.0999},
        },
        still={"fused or not is unknown": {"optimizer_fused": None}, "the update itself is long": {"update": 0.25}},
        reason="AdamW over 300 tensors takes 25.0 % of the step",
        techniques=("fused-optimizer",),
    ),
    Case(
        "exposed-communication",
        base(communication__exposed=0.2, communication__overlap=0.0, communication__world_size=2),
        lost=0.2,
        edges=(("communication__exposed", 0.10, 0.0999),),
        missing=("communication__exposed",),
        quiet={
            "hidden by computation": {"communication__exposed": 0.02, "communication__overlap": 0.9},
            "one process": {"communication__world_size": 1},
            "it is waiting for a slow rank": {"communication__peer_wait": 0.9},
        },
        still={"most is transfer": {"communication__peer_wait": 0.4}},
        reason="20.0 % of the step (which includes waiting for peers: one rank was observed)",
        techniques=("ddp-options",),
    ),
    Case(
        "stragglers",
        base(
            communication__world_size=2,
            communication__peer_wait=0.9,
            communication__slowest_rank=1,
            communication__late_ms_per_step=40.0,
            communication__exposed=0.45,
        ),
        lost=0.4,
        edges=(("communication__late_ms_per_step", 10.0, 9.99),),
        missing=(
            "communication__late_ms_per_step",
            "communication__slowest_rank",
            "communication__peer_wait",
            "step_ms",
        ),
        quiet={"one rank": {"communication__world_size": 1}},
        reason="Rank 1 arrives 40.0 % of the step late",
    ),
    Case(
        "fragmentation",
        base(memory__allocator_retries=3, memory__fragmentation=0.1, memory__used=0.95),
        lost=None,
        edges=(("memory__allocator_retries", 1, 0),),
        missing=("memory__allocator_retries",),
        quiet={"a CPU": {"device": "cpu"}},
        reason="had to free and retry 3 times",
        techniques=("allocator",),
    ),
    Case(
        "fragmentation",
        base(memory__allocator_retries=0, memory__fragmentation=0.4, memory__held=0.95, memory__used=0.57),
        lost=None,
        edges=(("memory__fragmentation", 0.30, 0.2999), ("memory__held", 0.90, 0.8999)),
        missing=("memory__fragmentation", "memory__held"),
        quiet={"the model needs the memory": {"memory__fragmentation": 0.02, "memory__used": 0.93}},
        reason="At the peak 40.0 % of the reserved memory is unused",
        techniques=("allocator",),
    ),
    Case(
        "memory-pressure",
        base(memory=FULL),
        lost=None,
        edges=(("memory__used", 0.85, 0.8499),),
        missing=("memory__used",),
        quiet={
            "no kind is known: what to do would be a guess": {
                "memory__parameters": None,
                "memory__gradients": None,
                "memory__optimizer_state": None,
                "memory__activations": None,
            },
        },
        still={"lines unknown": {"memory__line": "", "memory__line_share": None}, "a full machine": {"device": "cpu"}},
        reason="92.0 % of the memory of the device is in use, most of it activations (61.0 % of what is known); "
        "train.py:41 forward allocates most (33.0 %)",
        techniques=("activation-checkpointing", "micro-batch", "cpu-offload"),
    ),
    Case(
        "throttling",
        base(machine__throttle=("sw_thermal_slowdown",), machine__clock_share=0.7, machine__temperature_c=88.0),
        lost=0.3,
        edges=(("machine__clock_share", 0.85, 0.8501),),
        missing=("machine__throttle",),
        quiet={
            "low clocks of an idle device": {"machine__throttle": ("gpu_idle",)},
            "somebody set the clocks": {"machine__throttle": ("applications_clocks_setting",)},
            "no reason": {"machine__throttle": ()},
            "a GPU that somebody else uses, beside a training on the CPU": {"device": "cpu"},
            "a power cap, clocks unknown": {"machine__throttle": ("sw_power_cap",), "machine__clock_share": None},
        },
        still={
            "a power cap that is felt": {"machine__throttle": ("sw_power_cap",)},
            "clocks unknown": {"machine__clock_share": None},
        },
        reason="30.0 % below its maximum, because of: sw_thermal_slowdown",
    ),
    Case(
        "off-device",
        base(off_device=("Net.position", "Net.mask"), busy=0.5, input_wait=0.2),
        lost=0.3,
        edges=(("busy", 0.7799, 0.7801),),
        missing=("off_device",),
        quiet={
            "nothing was left": {"off_device": ()},
            "training on a CPU": {"device": "cpu"},
            "the idle time is input's": {"input_wait": 0.49},
        },
        still={"idle time unknown": {"busy": None}},
        reason="Net.position and 1 more stayed on the CPU, and the device idles in 30.0 %",
    ),
    Case(
        "small-batch",
        SMALL_BATCH,
        lost=0.26,
        edges=(
            ("kernels__host_late", 0.15, 0.1499),
            ("kernels__short_share", 0.5, 0.4999),
            ("memory__used", 0.5, 0.5001),
            ("input_wait", 0.0499, 0.05),
            ("sync_idle", 0.0499, 0.05),
            ("device_wait", 0.1499, 0.15),
            ("communication__exposed", 0.0499, 0.05),
            ("gc_pause", 0.0499, 0.05),
            ("compiler__compile_share", 0.0499, 0.05),
        ),
        missing=("input_wait", "sync_idle", "device_wait", "memory__used", "kernels__host_late"),
        quiet={
            "input explains the idle time": {"input_wait": 0.4},
            "several ranks, communication unknown": {"communication__world_size": 8},
            "parts on the CPU": {"off_device": ("Net.position",)},
            "the host is ahead": {"kernels__median_launch_delay_us": 5e4},
            "a CPU": {"device": "cpu"},
        },
        still={"operators limited by latency": {"kernels": KernelsSeen(host_late=0.0), "operators": (LATENCY,)}},
        reason="A batch of 8 leaves the device waiting for launches or latency in 26.0 %",
    ),
    Case(
        "nothing-to-gain",
        base(busy=0.95, operators=(OperatorSeen("aten::mm", share=0.9, recoverable=0.1),)),
        lost=0.2,
        edges=(("busy", 0.85, 0.8499),),
        missing=("busy",),
        quiet={
            "busy with slow kernels": {"operators": (OperatorSeen("aten::mm", share=0.9, recoverable=0.25),)},
            "more than all of the step": {"busy": 1.01},
            "half of it is copies": {"copies__exposed": 0.5},
            "half of it is communication": {"communication__exposed": 0.5},
            "copies take a part that could be hidden": {"busy": 1.0, "copies__exposed": 0.1},
        },
        still={"no roofline": {"operators": ()}, "few copies": {"copies__exposed": 0.05}},
        reason="computes for 95.0 % of the step, and its operators are 10.0 % of the step above their roof",
    ),
    Case(
        "nothing-to-gain",
        on_cpu(input_wait=0.02, overhead=0.05),
        lost=None,
        edges=(("overhead", 0.13, 0.1301),),
        missing=("input_wait", "overhead"),
    ),
]
