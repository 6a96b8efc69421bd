"""Operators for which the ONNX exporter's own translation answers otherwise than torch at some inputs, translated here.

Each is right at ordinary inputs, so that no comparison on a few batches shows it.
"""

from __future__ import annotations

import math
from typing import Any


def translations(torch: Any) -> dict[Any, Any]:
    """For the exporter, by operator."""
    operators = torch.ops.aten
    return {
        operators.atan2.default: _atan2,
        operators.div.Tensor_mode: _div,
        operators.floor_divide.default: _floor_divide,
        operators.fmod.Scalar: _fmod,
        operators.fmod.Tensor: _fmod,
        operators.log_sigmoid.default: _log_sigmoid,
        operators.logaddexp.default: _logaddexp,
        operators.remainder.Scalar: _remainder,
        operators.remainder.Tensor: _remainder,
        operators.scaled_dot_product_attention.default: _attention,
    }


def _atan2(y: Any, x: Any) -> Any:
    """The exporter has the wrong sign where y is 0 and x negative."""
    from onnxscript import opset18

    zero, one = opset18.CastLike(0.0, x), opset18.CastLike(1.0, x)
    half = opset18.Mul(opset18.Atan(one), opset18.CastLike(2.0, x))         # pi/2, in the type of x
    nothing, upright = opset18.Equal(y, zero), opset18.Equal(x, zero)
    below = opset18.Less(opset18.Where(nothing, opset18.Div(one, y), y), zero)      # one over -0 is negative, too
    quarter = opset18.Where(below, opset18.Neg(half), half)
    slope = opset18.Atan(opset18.Div(y, opset18.Where(upright, one, x)))
    west = opset18.Add(slope, opset18.Add(quarter, quarter))
    return opset18.Where(upright, opset18.Where(nothing, y, quarter), opset18.Where(opset18.Less(x, zero), west, slope))


def _div(self: Any, other: Any, rounding_mode: str | None = None) -> Any:
    from onnxscript.function_libs.torch_lib.ops.core import aten_div_mode

    if rounding_mode is None or not _whole(self):
        return aten_div_mode(self, other, rounding_mode)
    return _divided(self, other)[rounding_mode]


def _floor_divide(self: Any, other: Any) -> Any:
    from onnxscript.function_libs.torch_lib.ops.core import aten_floor_divide

    return _divided(self, other)["floor"] if _whole(self) else aten_floor_divide(self, other)


def _fmod(self: Any, other: Any) -> Any:
    from onnxscript import opset18
    from onnxscript.function_libs.torch_lib.ops.core import aten_fmod

    if not _whole(self):
        return aten_fmod(self, other)
    return opset18.Sub(self, opset18.Mul(_divided(self, other)["trunc"], opset18.CastLike(other, self)))


def _remainder(self: Any, other: Any) -> Any:
    from onnxscript import opset18
    from onnxscript.function_libs.torch_lib.ops.core import aten_remainder

    if not _whole(self):
        return aten_remainder(self, other)
    return opset18.Sub(self, opset18.Mul(_divided(self, other)["floor"], opset18.CastLike(other, self)))


def _whole(value: Any) -> bool:
    """Whether it holds whole numbers that float32 may not."""
    from onnxscript import INT32, INT64

    return value.dtype in (INT32.dtype, INT64.dtype)


def _divided(self: Any, other: Any) -> dict[str, Any]:
    """The quotient of whole numbers by its rounding mode, in whole numbers: float32, in which the exporter divides them, and OpenVINO also where
    it is not told to, holds them up to 2^24. What such a division leaves is divided once more, and may then be off by one. Nothing but
    comparisons with zero: others go through float32 as well."""
    from onnxscript import opset18

    other = opset18.CastLike(other, self)
    zero, sign = opset18.CastLike(0, self), opset18.Sign(other)
    above, below = opset18.Mul(self, sign), opset18.Abs(other)
    quotient = opset18.Div(above, below)
    quotient = opset18.Add(quotient, opset18.Div(opset18.Sub(above, opset18.Mul(quotient, below)), below))
    rest = opset18.Sub(above, opset18.Mul(quotient, below))
    more, less = opset18.Not(opset18.Less(opset18.Sub(rest, below), zero)), opset18.Less(rest, zero)
    floor = opset18.Sub(opset18.Add(quotient, opset18.CastLike(more, self)), opset18.CastLike(less, self))
    broken = opset18.Less(zero, opset18.Sub(above, opset18.Mul(floor, below)))
    trunc = opset18.Add(floor, opset18.CastLike(opset18.And(broken, opset18.Less(above, zero)), self))
    return {"floor": floor, "trunc": trunc}


def _log_sigmoid(x: Any) -> Any:
    """The logarithm of a sigmoid that has become 0 is infinite, where the model answers with about the number itself; a sigmoid of what is
    not negative never does."""
    from onnxscript import opset18

    return opset18.Sub(opset18.Log(opset18.Sigmoid(opset18.Abs(x))), opset18.Relu(opset18.Neg(x)))


def _logaddexp(x: Any, y: Any) -> Any:
    """So is that of a sum of two powers of e that have become 0, or infinite."""
    from onnxscript import opset18

    smaller, larger = opset18.Min(x, y), opset18.Max(x, y)
    apart = opset18.Where(opset18.Equal(x, y), opset18.CastLike(0.0, x), opset18.Sub(smaller, larger))   # infinity less itself is no number
    return opset18.Add(larger, opset18.Log(opset18.Add(opset18.Exp(apart), opset18.CastLike(1.0, x))))


def _attention(query: Any, key: Any, value: Any, attn_mask: Any = None, dropout_p: float = 0.0, is_causal: bool = False, scale: float | None = None,
               enable_gqa: bool = False) -> Any:
    """A row that a mask hides entirely is 0 in torch; the exporter's is the mean of what is hidden, or no number. And it takes four
    dimensions only."""
    from onnxscript import BOOL, INT32, opset18
    from onnxscript.function_libs.torch_lib.ops.nn import aten_scaled_dot_product_attention

    missing = list(range(max(0, 4 - len(query.shape))))
    if missing:
        query, key, value = (_with_ones(one, missing) for one in (query, key, value))
    found = aten_scaled_dot_product_attention(query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa)
    if attn_mask is not None:
        # Not by the largest entry of the mask: OpenVINO's largest of minus infinities is a number.
        shown = attn_mask if attn_mask.dtype == BOOL.dtype else opset18.Not(opset18.Equal(attn_mask, opset18.CastLike(-math.inf, attn_mask)))
        seen = opset18.Cast(opset18.ReduceMax(opset18.Cast(shown, to=INT32.dtype), [-1], keepdims=1), to=BOOL.dtype)
        found = opset18.Where(seen, found, opset18.CastLike(0.0, found))
    return opset18.Squeeze(found, missing) if missing else found


def _with_ones(value: Any, places: list[int]) -> Any:
    """With dimensions of size 1 in front, which the exporter's functions want to know of."""
    from onnxscript import ir, opset18

    found = opset18.Unsqueeze(value, places)
    found.shape, found.type = ir.Shape([*(1 for _ in places), *value.shape]), value.type
    return found
