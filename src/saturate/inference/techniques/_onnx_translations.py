"""Where the ONNX exporter, or a runtime behind it, answers otherwise than torch at some inputs: operators, translated here, and what its
optimizer leaves out.

Each is right at ordinary inputs, so that no comparison on a few batches shows it.
"""

from __future__ import annotations

import importlib
import math
import operator
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

from saturate.inference.techniques._api import NotApplied

#: Where the exporter's optimizer has its rules for operations that do nothing.
_IDLE_RULES = "onnxscript.rewriter.rules.common._no_op"


@contextmanager
def exactly() -> Iterator[None]:
    """Around the exporter's optimizer, which takes x + 1e-8 for x, and x * 1.00001: a division by a norm that is 0 was then one by 0. Runtimes
    leave out by themselves what does nothing. Raises NotApplied where its rules are not found."""
    rewriter = importlib.import_module("onnxscript.rewriter")
    try:
        rules = rewriter._DEFAULT_REWRITE_RULES         # type: ignore[attr-defined]
        dropped = {id(rule) for rule in importlib.import_module(_IDLE_RULES).rules}
    except (ImportError, AttributeError) as error:
        raise NotApplied("this onnxscript leaves out small constants (x + 1e-8), and the rules that do so are not where they are known to be") from error
    rewriter._DEFAULT_REWRITE_RULES = tuple(rule for rule in rules if id(rule) not in dropped)      # type: ignore[attr-defined]
    try:
        yield
    finally:
        rewriter._DEFAULT_REWRITE_RULES = rules         # type: ignore[attr-defined]


def translations(torch: Any, nodes: Iterable[Any]) -> dict[Any, Any]:
    """For the exporter, by operator. nodes: of the program."""
    operators = torch.ops.aten
    sizes = {operator.floordiv: _size_divided} if any(map(_may_be_negative, nodes)) else {}
    return {
        **sizes,
        operators.__rshift__.Scalar: _shifted,
        operators.atan2.default: _atan2,
        operators.bitwise_right_shift.Tensor_Scalar: _shifted,
        operators.clamp.default: _clamp,
        operators.clamp_max.default: lambda self, max: _clamp(self, None, max),
        operators.clamp_min.default: lambda self, min: _clamp(self, min),
        operators.div.Tensor_mode: _div,
        operators.floor_divide.default: _floor_divide,
        operators.fmod.Scalar: _fmod,
        operators.fmod.Tensor: _fmod,
        operators.log_sigmoid.default: _log_sigmoid,
        operators.logaddexp.default: _logaddexp,
        operators.maximum.default: _maximum,
        operators.minimum.default: _minimum,
        operators.remainder.Scalar: _remainder,
        operators.remainder.Tensor: _remainder,
        operators.scaled_dot_product_attention.default: _attention,
        operators.sign.default: _sign,
    }


def _may_be_negative(node: Any) -> bool:
    """Whether a node divides a size, or what is computed of sizes, that may be below zero: -(-n // 3) is the usual ceiling."""
    if node.target is not operator.floordiv:
        return False
    above = node.args[0].meta.get("val") if hasattr(node.args[0], "meta") else node.args[0]
    expression = getattr(getattr(above, "node", None), "expr", above)
    return not (getattr(expression, "is_nonnegative", None) or (isinstance(expression, int) and expression >= 0))


def _size_divided(self: Any, other: Any) -> Any:
    """The exporter rounds towards zero."""
    from onnxscript import opset18

    if isinstance(self, int):
        self = opset18.CastLike(self, other)
    return _divided(self, other)["floor"]


def _shifted(self: Any, other: Any) -> Any:
    """OpenVINO takes the sign of a negative number for one of its digits, as the exporter casts it."""
    return _divided(self, 2**other)["floor"]


# ONNX Runtime 1.30 compares the low halves of whole numbers of 64 bits with a sign in Max, Min, Clip and Sign, and is right in Less.


def _clamp(self: Any, min: Any = None, max: Any = None) -> Any:
    """Clip without one of its bounds takes the largest finite number for it, so that infinities become finite."""
    from onnxscript import opset18
    from onnxscript.function_libs.torch_lib.ops.core import aten_clamp

    if not _whole(self):
        if not _fraction(self) or (min is not None and max is not None):
            return aten_clamp(self, min, max)
        if max is None:
            return opset18.Relu(self) if isinstance(min, int | float) and min == 0 else opset18.Max(self, opset18.CastLike(min, self))
        return opset18.Min(self, opset18.CastLike(max, self))
    found = self if min is None else _larger(self, opset18.CastLike(min, self))
    return found if max is None else _smaller(found, opset18.CastLike(max, self))


def _maximum(self: Any, other: Any) -> Any:
    from onnxscript.function_libs.torch_lib.ops.core import aten_maximum

    return _larger(self, other) if _whole(self) else aten_maximum(self, other)


def _minimum(self: Any, other: Any) -> Any:
    from onnxscript.function_libs.torch_lib.ops.core import aten_minimum

    return _smaller(self, other) if _whole(self) else aten_minimum(self, other)


def _sign(self: Any) -> Any:
    from onnxscript import opset18

    return _sign_of_whole(self) if _whole(self) else opset18.Sign(self)


def _larger(one: Any, other: Any) -> Any:
    from onnxscript import opset18

    return opset18.Where(opset18.Less(one, other), other, one)


def _smaller(one: Any, other: Any) -> Any:
    from onnxscript import opset18

    return opset18.Where(opset18.Less(other, one), other, one)


def _sign_of_whole(value: Any) -> Any:
    from onnxscript import opset18

    zero = opset18.CastLike(0, value)
    return opset18.Sub(opset18.CastLike(opset18.Less(zero, value), value), opset18.CastLike(opset18.Less(value, zero), value))


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
    """Whether it is known to hold whole numbers that float32 may not; of what was computed here nothing is known."""
    from onnxscript import INT32, INT64

    return value.dtype in (INT32.dtype, INT64.dtype)


def _fraction(value: Any) -> bool:
    from onnxscript import DOUBLE, FLOAT, FLOAT16

    return value.dtype in (FLOAT.dtype, DOUBLE.dtype, FLOAT16.dtype)


def _divided(self: Any, other: Any) -> dict[str, Any]:
    """The quotient of whole numbers by its rounding mode, in whole numbers: float32, in which the exporter divides them, and OpenVINO also where
    it is not told to, holds them up to 2^24. What such a division leaves is divided once more, and may then be off by one. Nothing but
    comparisons with zero: others go through float32 as well."""
    from onnxscript import opset18

    other = opset18.CastLike(other, self)
    zero, sign = opset18.CastLike(0, self), _sign_of_whole(other)
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
