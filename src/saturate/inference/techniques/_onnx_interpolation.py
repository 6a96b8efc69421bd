"""Interpolation in ONNX where sizes vary: what its runtimes get right, and a translation of what they do not.

ONNX holds a factor in 32 bits and finds the size of the result with it, where torch takes 64; and its runtimes divide by the factor, or by
the ratio of two sizes, where torch multiplies by its inverse. Where the true place of a pixel is a whole number, rounding decides which
is the nearest one, and each decides for itself (how often: LOG.md).
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from saturate.inference.techniques._api import NotApplied

#: Sizes up to here are compared.
_LARGEST = 4096


def refuse_wrong(torch: Any, nodes: Iterable[Any]) -> None:
    """Raise NotApplied where a size is open, and a runtime finds other sizes or pixels than the model, which are not translated below."""
    for node in nodes:
        name, factors = str(node.target), _factors(node)
        if "_upsample_nearest_exact" in name and (factors and _open_inside(node) or by_open_sizes(torch, node)):
            raise NotApplied("sizes vary, and the runtimes of ONNX take other pixels at some of them than the model (nearest-exact)")
        wrong = next((factor for factor in factors if not _as_in_torch(torch, factor, pixels="nearest" in name)), None)
        if wrong is not None and _open_inside(node):
            raise NotApplied(f"sizes vary, and the runtimes of ONNX come to another size, or other pixels, at some of them where the model interpolates by {wrong:g}")


def by_open_sizes(torch: Any, node: Any) -> bool:
    """Whether a node takes the nearest pixels by sizes of which one is open, and at some of them a runtime could come to others."""
    if "upsample_nearest" not in str(node.target) or _factors(node) or not _open_inside(node):
        return False
    there, wanted = node.args[0].meta["val"].shape[2:], node.meta["val"].shape[2:]
    return not all(_right_at_all_sizes(torch, *pair) for pair in zip(there, wanted, strict=True))


def translations(torch: Any) -> dict[Any, Any]:
    """For the exporter, by operator: the nearest pixels as torch chooses them, gathered instead of resized."""
    from onnxscript import FLOAT, INT64, opset18

    def nearest(x: Any, output_size: Any = None, scale_factors: Any = None) -> Any:
        if scale_factors is not None:
            scales = opset18.Constant(value_floats=[1.0, 1.0, *scale_factors])
            return opset18.Resize(x, None, scales, None, mode="nearest", coordinate_transformation_mode="asymmetric", nearest_mode="floor")
        for place in range(len(x.shape) - 2):
            size = opset18.Shape(x, start=2 + place, end=3 + place)
            wanted = _element(opset18, output_size, place)
            ratio = opset18.Div(opset18.Cast(size, to=FLOAT.dtype), opset18.Cast(wanted, to=FLOAT.dtype))
            count = opset18.Range(opset18.Constant(value_int=0), opset18.Squeeze(wanted), opset18.Constant(value_int=1))
            pixel = opset18.Cast(opset18.Floor(opset18.Mul(opset18.Cast(count, to=FLOAT.dtype), ratio)), to=INT64.dtype)
            last = opset18.Sub(size, opset18.Constant(value_ints=[1]))
            x = opset18.Gather(x, opset18.Min(pixel, last), axis=2 + place)
        return x

    return {getattr(torch.ops.aten, f"upsample_nearest{count}d").vec: nearest for count in (1, 2, 3)}


def _element(opset: Any, sizes: Any, place: int) -> Any:
    """One of the sizes that the exporter hands over, as a list of numbers and values of the graph, in one dimension."""
    size = sizes[place]
    if isinstance(size, int):
        return opset.Constant(value_ints=[size])
    return opset.Reshape(size, opset.Constant(value_ints=[1]))


def _factors(node: Any) -> list[float]:
    """By which a node interpolates; none where it is given sizes, or does something else."""
    if "upsample" not in str(node.target):
        return []
    given = next((one for one in node.args[1:] if isinstance(one, (list, tuple)) and one and all(isinstance(each, float) for each in one)), [])
    return list(given)


def _open_inside(node: Any) -> bool:
    """Whether what a node answers has open sizes beyond those of the batch and its channels."""
    return any(not isinstance(size, int) for size in node.meta["val"].shape[2:])


def _as_in_torch(torch: Any, factor: float, pixels: bool) -> bool:
    """Whether 32 bits, or a division, come to the same sizes and (`pixels`) the same nearest pixels as torch does. Where a size
    stays what it was by a factor above 1 (9 by 1.1), torch leaves that dimension alone; some runtimes interpolate."""
    if 1 < factor < 1.5:
        return False
    narrow = torch.tensor(factor, dtype=torch.float32)
    sizes = torch.arange(1, _LARGEST + 1)
    if not torch.equal((sizes.double() * factor).floor(), (sizes.float() * narrow).floor().double()):
        return False
    places = torch.arange(int(_LARGEST * factor))
    chosen = (places.float() * torch.tensor(1.0 / factor, dtype=torch.float32)).floor()
    return not pixels or torch.equal(chosen, (places.float() / narrow).floor())


def _right_at_all_sizes(torch: Any, there: Any, wanted: Any) -> bool:
    """Whether dividing by the ratio finds the same nearest pixels as multiplying with its inverse does, whatever the size on which both
    depend: where one is always a multiple of the other, or double less one, as in a pyramid of features. Not known for two sizes of their own."""
    symbols = {symbol for size in (there, wanted) if not isinstance(size, int) for symbol in size.node.expr.free_symbols}
    if len(symbols) != 1:
        return not symbols          # none: compared on the user's own inputs
    (symbol,) = symbols

    def at(size: Any, value: int) -> int:
        number = 0 * symbol + value         # one of sympy's own, which is put in without being looked at: much faster than `subs`
        return size if isinstance(size, int) else int(size.node.expr.xreplace({symbol: number}))

    pairs = {(at(there, value), at(wanted, value)) for value in range(1, _LARGEST + 1)}
    return all(_same_pixels(torch, *pair) for pair in pairs if min(pair) > 0 and max(pair) <= _LARGEST)


def _same_pixels(torch: Any, there: int, wanted: int) -> bool:
    places = torch.arange(wanted, dtype=torch.float32)
    sizes = torch.tensor([there, wanted], dtype=torch.float32)
    return torch.equal((places * (sizes[0] / sizes[1])).floor(), (places / (sizes[1] / sizes[0])).floor())
