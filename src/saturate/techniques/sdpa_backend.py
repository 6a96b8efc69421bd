"""Choose the attention kernel instead of leaving the choice to PyTorch.

What it does
------------
Runs the forward of the outermost trained modules with one implementation of `scaled_dot_product_attention` allowed
(flash, cuDNN, memory-efficient or the plain one), and the plain one as the fallback for calls that it does not support.
PyTorch's own order has the plain one before cuDNN's, so the order is set as well (PyTorch 2.6 and later).

When it helps
-------------
Attention in half precision on CUDA, where the default order of preference is not always the fastest for a given head
size and length; short sequences, for which the plain one can win.

When it hurts
-------------
A kernel that does not support the call's mask, dtype or head size is not used, and the fallback is slow.

Numerics
--------
`stream`: another kernel adds in another order, and draws other random numbers when attention has dropout.

How it is applied
-----------------
`torch.nn.attention.sdpa_kernel` is entered around the forward in training mode, and around that of the modules that repeat in
it (else its children) where they are recomputed in the backward pass. A script that recomputes other pieces of code gets an
error from `torch.utils.checkpoint`, which finds another kernel there. The proof is the name of the attention
node in the autograd graph; where a compiler hides it, the compiler saw the forward with no fallback allowed.

References
----------
PyTorch documentation, "torch.nn.attention.sdpa_kernel" and "torch.nn.functional.scaled_dot_product_attention".
PyTorch tutorials, "(Beta) Implementing High-Performance Transformers with Scaled Dot Product Attention (SDPA)".
"""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from saturate.records.facts import Evidence, Facts
from saturate.techniques import _autograd, _blocks, _common
from saturate.techniques._api import Eligible, Ineligible, NotApplied, Proof, Technique, Touch

ORDER = 20

TECHNIQUE = Technique(
    id="sdpa-backend",
    title="attention kernel choice",
    numerics="stream",
    stage="model",
    acts_on="modules",
    touches=(Touch("forward", ORDER), Touch("attention-kernel")),
)

#: Name in `torch.nn.attention.SDPBackend`, and how its node in an autograd graph is called ("" leaves no single node).
BACKENDS = {
    "flash": ("FLASH_ATTENTION", "ScaledDotProductFlashAttention"),
    "cudnn": ("CUDNN_ATTENTION", "ScaledDotProductCudnnAttention"),
    "efficient": ("EFFICIENT_ATTENTION", "ScaledDotProductEfficientAttention"),
    "math": ("MATH", ""),
}


@dataclass(frozen=True)
class Options:
    """`backend` is a key of `BACKENDS`."""

    backend: str = "flash"

    def __post_init__(self) -> None:
        if self.backend not in BACKENDS:
            raise ValueError(f"backend is {self.backend!r}, not one of {', '.join(BACKENDS)}")


def eligible(facts: Facts) -> Eligible | Ineligible:
    if facts.device != "cuda":
        return Ineligible("only CUDA devices have several attention kernels to choose from")
    if facts.compiles and not facts.sdpa_calls:
        return Ineligible(_common.NOT_WATCHED)
    if facts.sdpa_calls < 1:
        return Ineligible("scaled_dot_product_attention was not called")
    if not _common.wrappable(facts):
        return Ineligible("no trained module was seen whose forward is its class's own")
    return Eligible(f"{facts.sdpa_calls} attention calls in one step")


def variants(facts: Facts) -> list[Options]:
    if facts.rocm:
        return [Options("flash"), Options("efficient")]         # it has no cuDNN
    names = ["flash", "cudnn", "efficient"]
    if facts.capability and tuple(facts.capability) >= (9, 0):
        names = ["cudnn", "flash", "efficient"]
    return [Options(name) for name in names]


def bound(facts: Facts) -> float | None:
    return _common.computing(facts)


def apply(context: Any, options: Options) -> str:
    torch = context.torch
    from torch.nn.attention import SDPBackend, sdpa_kernel

    name, node = BACKENDS[options.backend]
    chosen = getattr(SDPBackend, name, None)
    if chosen is None:
        raise NotApplied(f"this torch has no attention kernel {options.backend}")
    allowed = list(dict.fromkeys([chosen, SDPBackend.MATH]))
    first = {"set_priority": True} if "set_priority" in inspect.signature(sdpa_kernel).parameters else {}
    if not first and options.backend == "cudnn":
        raise NotApplied("this torch prefers every other attention kernel to cudnn, and takes no other order (2.6 does)")

    @contextlib.contextmanager
    def only() -> Iterator[None]:
        with _order_kept(torch), sdpa_kernel(allowed, **first):
            yield

    if context.device == "cuda":
        _let_torch_choose(torch, _common.device_of(context))

    # Called for real while a compiler traces, and never again: the graph keeps only the constant.
    @torch.compiler.assume_constant_result
    def note_traced() -> bool:
        context.note(TECHNIQUE.id, f"traced with only {options.backend} attention allowed")
        return True

    def wrap(inner: Any) -> Any:
        def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
            if torch.compiler.is_compiling():
                note_traced()
                with sdpa_kernel([chosen]):
                    return inner(self, *args, **kwargs)
            with only():
                return inner(self, *args, **kwargs)

        return forward

    # A block that is recomputed runs in the backward pass, outside of the module's forward.
    def wrap_block(inner: Any) -> Any:
        def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
            if torch.compiler.is_compiling() or torch._C._current_graph_task_id() == -1:
                return inner(self, *args, **kwargs)
            with only():
                return inner(self, *args, **kwargs)

        return forward

    def look(output: Any) -> None:
        used = [name for name in map(_autograd.node_name, _autograd.graph_nodes(output, torch)) if "ScaledDotProduct" in name]
        if used and node and used[0].startswith(node):
            context.note(TECHNIQUE.id, f"the autograd graph holds {used[0]}")
        elif not node and not used:
            context.note(TECHNIQUE.id, "the autograd graph holds no fused attention")

    def wrap_one(module: Any) -> None:
        context.wrap_forward(module, ORDER, wrap)
        for block in _blocks.blocks(module):
            if block is not module:
                with contextlib.suppress(NotApplied):       # its forward is not its class's own
                    context.wrap_forward(block, ORDER, wrap_block)
        _common.observe_first_call(context, module, look)

    count = _common.wrap_all(context, wrap_one)
    return f"forward of {count} module(s) with {options.backend} attention"


def _let_torch_choose(torch: Any, device: Any) -> None:
    """Newer versions set the order for the process's device once, inside of its first attention. Were that one of ours, the order from
    before would be put back behind it, and hold for the script's other attentions from then on."""
    if hasattr(torch._C, "_set_sdp_priority_order"):
        query = torch.empty(1, 1, 16, 64, dtype=torch.float16, device=device)
        torch._fused_sdp_choice(query, query, query)        # chooses, and runs nothing


@contextlib.contextmanager
def _order_kept(torch: Any) -> Iterator[None]:
    """`sdpa_kernel` puts back the order of what is allowed around it; what the script forbids would come last from then on."""
    order = torch._C._get_sdp_priority_order() if hasattr(torch._C, "_set_sdp_priority_order") else None
    try:
        yield
    finally:
        if order is not None:
            torch._C._set_sdp_priority_order(order)


def active(evidence: Evidence, options: Options) -> Proof:
    seen = evidence.notes.get(TECHNIQUE.id, "")
    return Proof(bool(seen), seen or f"no {options.backend} attention was seen")


def as_code(options: Options) -> str:
    allowed = ", ".join(f"SDPBackend.{name}" for name in dict.fromkeys((BACKENDS[options.backend][0], "MATH")))
    return (
        "from torch.nn.attention import SDPBackend, sdpa_kernel\n"
        f"with sdpa_kernel([{allowed}], set_priority=True):      # torch 2.6 and later\n"
        "    output = model(inputs)      # and loss.backward(), where the model recomputes activations"
    )
