"""Keep the optimizer's state, or what backward needs, in the host's memory.

What it does
------------
`optimizer`: between steps the optimizer's state lies in page-locked host memory; in a step a few tensors at a time
are copied to the device and back. `activations`: what the forward saves for backward is copied to page-locked host
memory, and back when backward asks for it.

When it helps
-------------
Under a memory limit on a device with a fast link to its host. So it is tried under `saturate tune --fit` only. The
state of Adam is twice the parameters in size; activations grow with the batch.

When it hurts
-------------
Page-locked memory is lost to everything else on the host, so neither is tried that may take more than half of it. Every byte
crosses the link twice in a step. Activations cross it while nothing else runs (autograd waits for each
copy), so `activation-checkpointing` is mostly faster. While a checkpoint is made, the optimizer's state is on the device
again, all of it.

Numerics
--------
`exact`: bytes are copied; the same kernels run on the same values.

How it is applied
-----------------
`optimizer`: as in `optimizer-8bit`, a hook shows the step its groups piece by piece; what stands in the state in
between reads, copies and pickles as an ordinary tensor on the device. Copies and kernels run in the order of one
stream. Optimizers whose step looks at one tensor at a time: Adam, AdamW, NAdam, RAdam, Adamax, SGD, RMSprop, Adagrad,
Adadelta. `activations`: `torch.autograd.graph.save_on_cpu` around the forward of the trained modules, inside of
everything else. On a device tests saw the peak fall; what it costs there was not measured.

References
----------
PyTorch documentation, "torch.autograd.graph.save_on_cpu".
Ren et al., "ZeRO-Offload: Democratizing Billion-Scale Model Training", arXiv 2101.06840.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from saturate.records.facts import Evidence, Facts
from saturate.techniques import _at_rest, _common
from saturate.techniques._api import Eligible, Ineligible, NotApplied, Proof, Technique, Touch

ORDER = 5

TECHNIQUE = Technique(
    id="cpu-offload",
    title="optimizer state or activations in host memory",
    numerics="exact",
    stage="model",
    touches=(Touch("optimizer-state"), Touch("gradients", 10), Touch("saved-tensors"), Touch("forward", ORDER)),
    status="experimental",
)

EARLY = True

KINDS = ("Adam", "AdamW", "NAdam", "RAdam", "Adamax", "SGD", "RMSprop", "Adagrad", "Adadelta")

#: Share of the host's memory that may be asked for; and how many times its size a tensor may take there: torch's allocator of pinned memory
#: rounds each up to a power of two.
HOST_SHARE, ROUNDED = 0.5, 2


@dataclass(frozen=True)
class Options:
    """`what`: "optimizer" or "activations"."""

    what: Literal["optimizer", "activations"] = "optimizer"


def eligible(facts: Facts) -> Eligible | Ineligible:
    if facts.memory_limit_bytes is None:
        return Ineligible("it saves memory and costs time; tune --fit tries it")
    if facts.device != "cuda":
        return Ineligible(f"the training is on {facts.device or 'an unknown device'}: its memory is the host's already")
    if not facts.modules and not facts.optimizers:
        return Ineligible("neither a trained module nor an optimizer was seen")
    if not variants(facts):
        return Ineligible("the host's memory does not hold what would be moved there")
    return Eligible("the host has memory that the device lacks")


def variants(facts: Facts) -> list[Options]:
    state = any(optimizer.kind in KINDS and not optimizer.capturable for optimizer in facts.optimizers)
    # Two averages of every parameter have to find room in the host's memory; what a forward saves is a part of what the device holds.
    averages = ROUNDED * 2 * sum(module.parameter_bytes for module in facts.modules)
    saved = ROUNDED * facts.device_reserved_bytes
    return [*([Options("optimizer")] if state and _fits(averages, facts) else []),
            *([Options("activations")] if _fits(saved, facts) else [])]


def _fits(needed_bytes: int, facts: Facts) -> bool:
    """Whether every rank may ask for so much of the host's memory."""
    memory = facts.machine.memory_bytes
    return memory is None or needed_bytes * max(1, facts.world_size) <= HOST_SHARE * memory


def apply(context: Any, options: Options) -> str:
    if context.device != "cuda":
        raise NotApplied(f"the training is on {context.device or 'no known device'}, not on a CUDA device")
    if options.what == "optimizer":
        return offload_state(context, pinned=True)
    return offload_activations(context, pinned=True)


def offload_state(context: Any, pinned: bool) -> str:
    """`pinned`: page-locked host memory, which needs a device."""
    classes = {getattr(context.torch.optim, kind) for kind in KINDS}
    suitable = [o for o in context.optimizers if type(o) in classes and _at_rest.large_enough(context.torch, o, 1)
                and not any(group.get("capturable") or group.get("differentiable") for group in o.param_groups)]
    if not suitable:
        raise NotApplied("no optimizer whose state can be moved")
    totals = [0, 0]

    def report(plain_bytes: int, resting_bytes: int, tensors: int) -> None:
        totals[:] = totals[0] + plain_bytes, totals[1] + tensors
        context.note(TECHNIQUE.id, f"{totals[1]} tensors of state, {_common.mebibytes(totals[0])}, rest in host memory")

    for optimizer in suitable:
        _at_rest.Keeper(context, optimizer, HostMemory(context.torch, pinned), 1, report)
    return f"the state of {len(suitable)} optimizer(s) rests in host memory"


def offload_activations(context: Any, pinned: bool) -> str:
    torch = context.torch

    def wrap(inner: Any) -> Any:
        def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
            with torch.autograd.graph.save_on_cpu(pin_memory=pinned):
                return inner(self, *args, **kwargs)

        return forward

    def look(output: Any) -> None:
        context.note(TECHNIQUE.id, "the forward ran and saved its tensors in host memory")

    def wrap_one(module: Any) -> None:
        context.wrap_forward(module, ORDER, wrap)
        _common.observe_first_call(context, module, look)

    return f"what the forward of {_common.wrap_all(context, wrap_one)} module(s) saves lies in host memory"


class HostMemory:
    """A `Form` (see `_at_rest`): everything of the parameter's shape, as it is, in host buffers that are used again."""

    names = None

    def __init__(self, torch: Any, pinned: bool):
        self.torch, self.pinned = torch, pinned

    def rest(self, awake: dict[str, Any], before: Any, turn: int) -> tuple[dict[str, Any], Any]:
        host = before[0] if before is not None and before[0].keys() == awake.keys() else {}
        for name, flat in awake.items():
            if name not in host:
                host[name] = self.torch.empty(flat.numel(), dtype=flat.dtype, device="cpu", pin_memory=self.pinned)
            # Freeing `flat` is safe: the allocator hands its memory to work that is later in this stream.
            host[name].copy_(flat, non_blocking=self.pinned)
        return host, next(iter(awake.values())).device

    def wake(self, kept: tuple[dict[str, Any], Any], start: int = 0, stop: int | None = None) -> dict[str, Any]:
        host, device = kept
        return {name: flat[start:stop].to(device, non_blocking=self.pinned, copy=True) for name, flat in host.items()}

    def size_bytes(self, kept: tuple[dict[str, Any], Any]) -> int:
        return 0        # on the device

    def tensors(self, kept: tuple[dict[str, Any], Any]) -> list[Any]:
        return list(kept[0].values())


def active(evidence: Evidence, options: Options) -> Proof:
    seen = evidence.notes.get(TECHNIQUE.id, "")
    return Proof(bool(seen), seen or "nothing was moved to host memory")


def as_code(options: Options) -> str:
    if options.what == "optimizer":
        return (
            "# One parameter after the other has its state on the device; saturate takes several at a time.\n"
            "def step(optimizer):\n"
            "    groups = optimizer.param_groups\n"
            "    for group in groups:\n"
            "        for p in group[\"params\"]:\n"
            "            if p.grad is not None:\n"
            "                optimizer.param_groups = [{**group, \"params\": [p]}]\n"
            "                move(optimizer.state[p], lambda tensor: tensor.to(p.device, non_blocking=True))\n"
            "                optimizer.step()\n"
            "                move(optimizer.state[p], lambda tensor: torch.empty_like(tensor, device=\"cpu\", pin_memory=True).copy_(tensor))\n"
            "    optimizer.param_groups = groups\n"
            "\n"
            "def move(state, to):\n"
            "    state.update({name: to(value) for name, value in state.items() if torch.is_tensor(value) and value.numel() > 1})\n"
            "\n"
            "step(optimizer)      # in place of optimizer.step()"
        )
    return "with torch.autograd.graph.save_on_cpu(pin_memory=True):\n    output = model(inputs)"
