"""Matrix products run in fp32 while the hardware for smaller formats waits.

What it means
-------------
The device multiplies matrices several times faster in TF32, bfloat16 or float16 than in fp32, and this workload
does not use that.

Evidence
--------
Time of matrix products, and of what consists of them (convolutions, fused attention, recurrent layers), whose inputs are
fp32 and whose kernels do not use TF32, as a share of the step; what the device can do.

Threshold
---------
10 % of the step on an accelerator with tensor cores (compute capability 7.0 or later, or native bfloat16); 20 % on
a CPU that multiplies bfloat16 in hardware, and faster than fp32 where both were measured; the gain there is about 2x and not 8x.

Not to be confused with
-----------------------
A device without such hardware, or whose hardware for it is no faster: Intel's processors with AVX512-BF16 but without AMX, as virtual
machines often show them, multiply bfloat16 at half the rate of fp32. Products that already run in TF32. Unaligned shapes, which keep 16-bit products off
the fast kernels. Products so small that calling them takes their time, which are left out. Memory-bound operators,
which a smaller format helps only by their bytes.

What helps
----------
TF32 (compute capability 8.0 or later), or autocast to bfloat16 or float16. Both change rounding, so `tune` verifies
them against the workload's own training. The bound takes the ratio of the device's rates for the formats; fp32
kernels that run far below their own rate could gain more.

References
----------
PyTorch documentation, "CUDA semantics", section "TensorFloat-32 (TF32) on Ampere (and later) devices", and
"Automatic Mixed Precision package". TensorBoard's PyTorch profiler plugin advised mixed precision where eligible
operators used no tensor core.
"""

from __future__ import annotations

from saturate.findings._api import Rule
from saturate.findings._common import concludes, finding, of_step, percent, reaches
from saturate.records.analysis import Finding
from saturate.records.observations import Observations

RULE = Rule(
    id="fp32-matmul",
    title="fp32 matrix products",
    techniques=("tf32", "bf16-autocast", "fp16-autocast"),
    needs=frozenset({"steps", "kernels"}),
)

#: fp32 products, of the step.
LEAST = 0.10
LEAST_ON_CPU = 0.20
#: Compute capabilities with float16 tensor cores, and with TF32.
TENSOR_CORES = (7, 0)
TF32_CORES = (8, 0)


#: Dense rate of the 16-bit formats over that of fp32, rounded up, by compute capability: what a product can gain.
#: Other devices: not known, and the bound takes the products' whole time. On a CPU: AMX; older extensions give 2.
RATIOS = {(7, 0): 8.0, (7, 5): 8.0, (8, 0): 16.0, (8, 6): 4.0, (8, 9): 4.0, (9, 0): 16.0, (10, 0): 32.0, (12, 0): 4.0}
RATIO_ON_CPU = 16.0


def answers(seen: Observations) -> bool:
    return seen.fp32_matmul is not None and (seen.capability is not None or seen.bf16_native is not None)


def detect(seen: Observations) -> Finding | None:
    share, helps = seen.fp32_matmul, _formats(seen)
    least = LEAST_ON_CPU if seen.device == "cpu" else LEAST
    if not concludes(seen, RULE) or share is None or not helps or not reaches(share, least):
        return None
    name = seen.device_name or "the device"
    ratio = RATIO_ON_CPU if seen.device == "cpu" else RATIOS.get(seen.capability or (0, 0))
    return finding(
        RULE,
        seen,
        f"Matrix products in fp32 take {percent(share)} of the step, and {name} has faster formats.",
        [of_step("fp32 matrix products and convolutions", share, least)],
        share if ratio is None else share * (1.0 - 1.0 / ratio),
        techniques=helps,
        advice="torch.set_float32_matmul_precision('high'), or torch.autocast"
        if "tf32" in helps
        else "torch.autocast",
    )


def _formats(seen: Observations) -> tuple[str, ...]:
    """Techniques whose format this device multiplies in hardware, and faster than fp32."""
    has = seen.capability or (0, 0)
    slower = seen.device == "cpu" and seen.bf16_rate is not None and seen.bf16_rate <= 1.0      # what the flags of a CPU do not tell
    found = {
        "tf32": seen.device == "cuda" and has >= TF32_CORES,
        "bf16-autocast": bool(seen.bf16_native) and not slower,
        "fp16-autocast": seen.device == "cuda" and has >= TENSOR_CORES,
    }
    return tuple(name for name in RULE.techniques if found[name])
