"""Cases of the rules about the host: launches, waits, other code, the collector, the compiler."""

from __future__ import annotations

from rule_cases import Case, base, on_cpu

from saturate.records.observations import KernelsSeen, SyncSeen

ITEM = SyncSeen("train.py:41", "Tensor.item", 1.0, 12.0)
UPLOAD = SyncSeen("aten::copy_", "cudaStreamSynchronize (HtoD)", 2.0, 30.0)
SHORT = KernelsSeen(
    count_per_step=3000.0, short_share=0.62, median_us=2.0, median_launch_delay_us=8.0, host_late=0.26
)
#: The host is far ahead, except right after something made it wait.
DEEP = KernelsSeen(
    count_per_step=300.0, short_share=0.1, median_us=90.0, median_launch_delay_us=5e4, queue_shallow=0.1
)
TINY = KernelsSeen(count_per_step=10_000.0, short_share=0.9, short_time=0.3, median_us=2.0)

CASES = [
    Case(
        "host-syncs",
        base(sync_idle=0.10, syncs=(ITEM,), kernels=DEEP, kernels__host_late=0.08),
        lost=0.12,
        missing=("sync_idle",),
        quiet={
            "waiting while the device is busy": {"sync_idle": 0.01, "kernels__host_late": 0.0399},
            "only copies to the device wait: pageable-copies says so": {
                "syncs": (UPLOAD,),
                "sync_idle": 0.3,
                "copies__pageable_ms": 30.0,
            },
            "the copies' waits are longer than the read": {
                "syncs": (UPLOAD, SyncSeen("a.py:1", "Tensor.item", 0.5, 1.0)),
                "sync_idle": 0.3,
            },
            "no places, and pageable copies explain the idle time": {
                "syncs": (),
                "sync_idle": 0.3,
                "copies__pageable_ms": 28.0,
            },
            "the host is always late: it waits for nothing, so the read is not why": {
                "syncs": (SyncSeen("train.py:41", "Tensor.item", 1.0, 0.5),),
                "kernels__host_late": 0.4,
            },
        },
        still={
            "at the threshold": {"sync_idle": 0.05, "kernels__host_late": 0.0},
            "the queue runs dry after each read": {"sync_idle": 0.0, "kernels__host_late": 0.05},
            "late or not is unknown": {"kernels__host_late": None},
            "no places were recorded": {"syncs": ()},
            "a copy from the device": {"syncs": (SyncSeen("train.py:41", "Tensor.to", 1.0, 12.0),)},
            "steps were not timed": {"step_ms": None},
        },
        reason="costs up to 12.0 % of the step, most of it at train.py:41 (Tensor.item)",
    ),
    Case(
        "host-syncs",
        on_cpu(
            syncs=(SyncSeen("train.py:9", "Tensor.item", 500.0, 10.0), SyncSeen("train.py:12", "print", 1.0, 2.0)),
            overhead=0.2,
        ),
        lost=0.12,
        missing=("step_ms",),
        quiet={
            "a read every other step": {"syncs": (SyncSeen("train.py:9", "Tensor.item", 0.5, 10.0),)},
            "reads that cost nothing": {"syncs": (SyncSeen("train.py:9", "Tensor.item", 100.0, 1.999),)},
            "nothing was read": {"syncs": ()},
        },
        still={
            "one read, at the threshold": {"syncs": (SyncSeen("train.py:9", "Tensor.item", 1.0, 2.0),)},
            "overhead unknown": {"overhead": None},
        },
        reason="501 reads of values per step take 12.0 % of it, most of it at train.py:9 (Tensor.item)",
    ),
    Case(
        "launch-bound",
        base(kernels=SHORT, device_wait=0.02, sync_idle=0.0, input_wait=0.0),
        lost=0.26,
        edges=(("kernels__host_late", 0.15, 0.1499), ("kernels__short_share", 0.5, 0.4999)),
        missing=("kernels__host_late", "kernels__short_share", "kernels__median_launch_delay_us"),
        quiet={
            "the gaps were already launched": {"kernels__host_late": 0.16, "device_wait": 0.56},
            "the host waited for a value for as long": {"syncs": (ITEM,)},
            "the host waited for copies for as long": {"syncs": (UPLOAD,)},
            "a replayed graph has no launches": {"kernels__graph_replay": True},
            "the collector made the host late": {"gc_pause": 0.12},
            "the compiler made the host late": {"compiler__compile_share": 0.12},
            "input is waited for": {"kernels__host_late": 0.05, "input_wait": 0.4},
        },
        still={
            "the queue is shallow": {"kernels__median_launch_delay_us": None, "kernels__queue_shallow": 0.5},
            "the host is ahead elsewhere in the step": {
                "kernels__median_launch_delay_us": 7e4,
                "kernels__queue_shallow": 0.1,
            },
            "a read that hardly waits": {"syncs": (SyncSeen("train.py:41", "Tensor.item", 1.0, 0.5),)},
            "device waits unknown": {"device_wait": None},
        },
        reason="waits for launches in 26.0 % of the step; 62.0 % of the kernels are short",
        techniques=("compile", "merged-micro-batches", "fused-optimizer", "zero-grad-none"),
    ),
    Case(
        "launch-bound",
        on_cpu(kernels=TINY, overhead=0.4, busy=0.6),
        lost=0.7,
        edges=(
            ("overhead", 0.15, 0.1499),
            ("kernels__median_us", 9.99, 10.0),
            ("kernels__count_per_step", 800.0, 799.0),
        ),
        missing=("overhead", "kernels__median_us", "kernels__count_per_step", "step_ms"),
        quiet={
            "few operators: the time between them is other code": {"kernels__count_per_step": 100.0},
            "operators are those of reads": {"syncs": (SyncSeen("train.py:9", "Tensor.item", 1000.0, 5.0),)},
            "collector pauses": {"gc_pause": 0.3},
            "waiting for peers": {"communication__exposed": 0.3},
            "compilation": {"compiler__compile_share": 0.3},
        },
        still={
            "a few reads": {"syncs": (SyncSeen("train.py:9", "Tensor.item", 999.0, 5.0),)},
            "their time is unknown": {"kernels__short_time": None},
        },
        reason="40.0 % of the step passes around 10,000 operators of 2.0 us.",
        techniques=("compile", "merged-micro-batches", "fused-optimizer", "zero-grad-none"),
    ),
    Case(
        "slow-host-code",
        base(kernels=DEEP, kernels__host_late=0.3),
        lost=0.3,
        edges=(("kernels__host_late", 0.15, 0.1499), ("kernels__short_share", 0.4999, 0.5)),
        missing=("kernels__host_late", "kernels__short_share"),
        quiet={
            "short kernels: launch-bound": {"kernels": SHORT},
            "a read empties the queue: host-syncs": {"syncs": (SyncSeen("train.py:41", "Tensor.item", 1.0, 16.0),)},
            "the collector": {"gc_pause": 0.2},
            "parts on the CPU: off-device": {"off_device": ("Net.table",)},
            "the gaps were already launched": {"device_wait": 0.5},
            "a replayed graph": {"kernels__graph_replay": True},
        },
        still={"a read that hardly waits": {"syncs": (SyncSeen("train.py:41", "Tensor.item", 1.0, 10.0),)}},
        reason="waits for the host in 30.0 % of the step",
    ),
    Case(
        "slow-host-code",
        on_cpu(kernels__count_per_step=100.0, overhead=0.5),
        lost=0.5,
        edges=(("overhead", 0.15, 0.1499), ("kernels__count_per_step", 999.0, 1000.0)),
        missing=("overhead", "kernels__count_per_step", "step_ms"),
        quiet={
            "tiny operators": {"kernels": TINY},
            "collector pauses": {"gc_pause": 0.4},
            "recompilation": {"compiler__compile_share": 0.4},
            "a slow peer": {"communication__late_ms_per_step": 40.0},
            "communication": {"communication__exposed": 0.4},
            "reads of values, which run in no operator": {"syncs": (SyncSeen("train.py:7", "Tensor.tolist", 1.0, 40.0),)},
        },
        reason="50.0 % of the step passes outside operators, the loader and reads of values, 500 us for each",
    ),
    Case(
        "device-waits",
        base(device_wait=0.56, kernels__host_late=0.05, communication__world_size=16, kernels__short_share=0.88),
        lost=0.56,
        edges=(("device_wait", 0.15, 0.1499), ("kernels__host_late", 0.5599, 0.56)),
        missing=("device_wait", "kernels__host_late"),
        quiet={"launch-bound": {"kernels__host_late": 0.6}},
        reason="it waits for peers, events or other streams",
        techniques=("compile",),
    ),
    Case(
        "gc-pauses",
        on_cpu(gc_pause=0.3, gc_collections_per_step=2.0),
        lost=0.3,
        edges=(("gc_pause", 0.02, 0.0199),),
        missing=("gc_pause",),
        quiet={"other code between operators": {"gc_pause": 0.0, "overhead": 0.5}},
        reason="pauses the training for 30.0 % of the step",
        techniques=("gc-freeze",),
    ),
    Case(
        "page-faults",
        on_cpu(kernel_time=0.3, page_faults=90_000.0),
        lost=0.3,
        edges=(("kernel_time", 0.02, 0.0199), ("page_faults", 1024.0, 1023.0)),
        missing=("kernel_time", "page_faults"),
        quiet={
            "reading, not faults": {"page_faults": 12.0},
            "a device, whose allocator keeps its memory": {"device": "cuda"},
        },
        reason="90,000 page faults per step: 30.0 % of the training's processor time",
        techniques=("allocator",),
    ),
    Case(
        "recompilation",
        on_cpu(
            compiler__compiled=True,
            compiler__recompiles=4,
            compiler__compile_share=0.8,
            compiler__recompile_reasons=("size of x changed",),
        ),
        lost=0.8,
        edges=(("compiler__recompiles", 1, 0),),
        missing=("compiler__recompiles",),
        quiet={
            "the first compilation, before the window": {"compiler__recompiles": 0, "compiler__compile_share": 0.9},
            "graph breaks": {"compiler__recompiles": 0, "compiler__graph_breaks": 9},
        },
        reason="again 4 times in 20 steps, taking 80.0 % of the time: size of x changed",
    ),
    Case(
        "recompilation",
        on_cpu(compiler__compiled=True, compiler__recompiles=0, compiler__recompile_limit_hit=True),
        lost=None,
        missing=("compiler__recompile_limit_hit",),
        quiet={"no limit was hit": {"compiler__recompile_limit_hit": False}},
        reason="gave up",
    ),
    Case(
        "graph-breaks",
        on_cpu(compiler__compiled=True, compiler__graph_breaks=2, compiler__graph_break_reasons=("call to print",)),
        lost=None,
        edges=(("compiler__graph_breaks", 1, 0),),
        missing=("compiler__graph_breaks",),
        quiet={
            "recompilation": {"compiler__graph_breaks": 0, "compiler__recompiles": 5},
            "nothing is compiled": {"compiler__compiled": False},
        },
        reason="2 graph breaks, the first because of: call to print",
    ),
]
