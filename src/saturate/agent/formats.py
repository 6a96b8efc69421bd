"""The number formats that a training computes in: how far two honest runs of it may be apart is a matter of the coarsest."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

#: Formats of 16 bits that a script may compute in.
COARSE = ("bfloat16", "float16")

#: Devices of this capability have TensorFloat-32.
TF32_SINCE = (8, 0)


#: Autograd nodes of operators of cuDNN begin with this; their kinds are named as in torch's settings.
NODES = {"ConvolutionBackward": "conv", "CudnnRnnBackward": "rnn"}


def of_training(torch: Any, parameters: list[Any], device: str, losses: list[Any], seen: set[str], kinds: set[str]) -> dict[str, Any]:
    """What the header of a capture says of them. `device`: its kind, which some of the parameters may not be on. `seen`: those of 16 bits
    that backward passes were computed in. `kinds`: of operators of cuDNN that the training has."""
    held = [of_tensor(p) for p in parameters]
    there = next((p.device for p in parameters if p.device.type == device), None)
    tf32 = "float32" in held and device == "cuda" and may_use_tf32(torch, there, kinds)
    return {"arithmetic": coarsest(seen | {*held, "tfloat32" if tf32 else ""}), "formats": held, "device": device,
            "loss_format": coarsest(set(map(of_tensor, losses)))}


def of_tensor(tensor: Any) -> str:
    """The format of its numbers, of complex ones that of their parts."""
    name = str(tensor.dtype).removeprefix("torch.")
    return {"complex32": "float16", "complex64": "float32", "complex128": "float64"}.get(name, name)


def coarsest(formats: set[str]) -> str:
    """Of those that are coarser than float32; "" where none is."""
    return next((name for name in ("bfloat16", "tfloat32", "float16") if name in formats), "")


def kinds_in(torch: Any, modules: list[Any]) -> set[str]:
    """The kinds of operators of cuDNN that these modules have."""
    return {name for name, kind in (("conv", torch.nn.modules.conv._ConvNd), ("rnn", torch.nn.RNNBase))
            if any(issubclass(type(module), kind) for module in modules)}


def kinds_of(nodes: Iterable[str]) -> set[str]:
    """Those of autograd nodes with these names: a script may call the functions with parameters of its own."""
    return {kind for name in nodes for beginning, kind in NODES.items() if name.startswith(beginning)}


def may_use_tf32(torch: Any, device: Any, kinds: set[str]) -> bool:
    """Whether float32 may be multiplied in TensorFloat-32 there: matrices where the script says so, and, unless it says no, what
    cuDNN does. Another algorithm or memory layout may change which kernel it is."""
    if torch.version.hip is not None or torch.cuda.get_device_capability(device) < TF32_SINCE:      # AMD numbers its devices otherwise
        return False
    return matmul_allows_tf32(torch) or cudnn_allows_tf32(torch, kinds)


def matmul_allows_tf32(torch: Any) -> bool:
    """Whether matrix products may use TensorFloat-32, under either of torch's two ways to say so (mixing them raises)."""
    try:
        return bool(torch.backends.cuda.matmul.allow_tf32)
    except RuntimeError:
        return getattr(torch.backends.cuda.matmul, "fp32_precision", "") == "tf32"


def cudnn_allows_tf32(torch: Any, kinds: set[str]) -> bool:
    """Whether operators of cuDNN of any of these kinds ("conv", "rnn") may use it. Where torch has the newer setting, that one also
    tells what the older one was set to."""
    cudnn = torch.backends.cudnn
    if hasattr(cudnn, "conv"):
        return any(getattr(cudnn, kind).fp32_precision == "tf32" for kind in kinds)
    return bool(kinds and cudnn.allow_tf32)
