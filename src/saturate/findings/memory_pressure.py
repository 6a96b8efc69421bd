"""The memory is nearly full, so nothing that takes more of it can be tried: a larger batch, a larger model, compilation.

What it means
-------------
A step needs nearly all the memory there is. That costs no time by itself, but the next longer batch ends the run, and what
would use the device better does not fit. What to do follows from what takes the memory.

Evidence
--------
The peak of the memory in use, of the device's (on a CPU: the resident memory of all processes, what they share counted
once, of the machine's); what of it are parameters, gradients, optimizer state and activations; and the line of code that
allocates most.

Threshold
---------
85 % of the memory in use, and the kinds known. A kind that takes less than 20 % is not addressed.

Not to be confused with
-----------------------
Memory that the allocator holds and does not use: see `fragmentation`. Memory of other processes on the same device, which
is not counted here. A cache of files, and files that are mapped, which the system gives back.

What helps
----------
Against activations: recomputing them (`activation-checkpointing`), smaller micro-batches (`micro-batch`) or moving them to
the host (`cpu-offload`). Against optimizer state: eight bits (`optimizer-8bit`) or the host (`cpu-offload`). Against
gradients: updating each parameter in the backward pass (`optimizer-in-backward`). `saturate tune --fit 20GiB` tries them.

References
----------
PyTorch documentation, "Understanding CUDA Memory Usage" (history and snapshots of the allocator). Rajbhandari et al.,
"ZeRO: Memory Optimizations Toward Training Trillion Parameter Models", section 3, on what takes the memory.
"""

from __future__ import annotations

from saturate.findings._api import Rule
from saturate.findings._common import concludes, finding, number, percent, reaches
from saturate.records.analysis import Finding
from saturate.records.observations import MemorySeen, Observations

RULE = Rule(
    id="memory-pressure", title="memory nearly full",
    techniques=("activation-checkpointing", "micro-batch", "cpu-offload", "optimizer-8bit", "optimizer-in-backward"),
)

#: In use, of all there is.
FULL = 0.85

#: A kind that takes less than this of the known memory is not worth a technique.
WORTH = 0.20

_HELPS = {
    "activations": ("activation-checkpointing", "micro-batch", "cpu-offload"),
    "optimizer_state": ("optimizer-8bit", "cpu-offload"),
    "gradients": ("optimizer-in-backward",),
    "parameters": (),
}


def detect(seen: Observations) -> Finding | None:
    memory = seen.memory
    if not concludes(seen, RULE) or not reaches(memory.used, FULL):
        return None
    kinds = {kind: share for kind in _HELPS if reaches(share := getattr(memory, kind), 0.0)}
    if not kinds:
        return None
    ordered = sorted(kinds, key=lambda kind: -kinds[kind])
    helps = dict.fromkeys(name for kind in ordered if kinds[kind] >= WORTH for name in _HELPS[kind])
    most = ordered[0]
    whose = "the machine" if seen.device == "cpu" else "the device"
    return finding(
        RULE,
        seen,
        f"{percent(memory.used or 0.0)} of the memory of {whose} is in use, most of it {most.replace('_', ' ')} "
        f"({percent(kinds[most])} of what is known){_line(memory)}.",
        [
            *number("in use", memory.used, f"of {whose}'s memory", FULL),
            *(one for kind in ordered for one in number(kind.replace("_", " "), kinds[kind], "of what is known")),
            *number("allocated by one line", memory.line_share, "of what is known", where=memory.line),
        ],
        None,
        techniques=tuple(name for name in RULE.techniques if name in helps),
        advice="a smaller batch" if most == "activations" else "a smaller model, or its parameters spread over several devices",
    )


def _line(memory: MemorySeen) -> str:
    if not memory.line or not reaches(memory.line_share, 0.0):
        return ""
    return f"; {' '.join(memory.line.split())} allocates most ({percent(memory.line_share or 0.0)})"
