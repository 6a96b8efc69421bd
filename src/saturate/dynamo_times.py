"""What torch.compile says of its own time, for the training process and for that of an inference candidate. Nothing is imported for it."""

from __future__ import annotations

from typing import Any


def compile_s(dynamo: Any) -> float:
    """Total wall time of frame compilation so far; dynamo keeps it per phase. `dynamo`: torch._dynamo, None where it is not loaded."""
    if dynamo is None:
        return 0.0
    return float(sum(dynamo.utils.compilation_time_metrics.get("_compile.compile_inner", [])))
