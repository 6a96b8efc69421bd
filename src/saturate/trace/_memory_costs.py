"""Everything that multiplies no matrices: elementwise operators, softmax, norms, reductions, copies, optimizers.

Memory bounds these on every device, so what matters is the bytes: each distinct input once, each output once. Their
FLOPs are a convention: one for each arithmetic operation, and one for each function such as exp.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import prod
from typing import Any

from saturate.trace._arguments import Arguments, Cost, Tensor, Unknown, broadcast

Moved = tuple[int, ...]


def _each(names: str, value: Any) -> dict[str, Any]:
    return dict.fromkeys(names.split(), value)


#: Kernels of Inductor that multiply no matrices: pointwise, reductions, persistent reductions.
GENERATED = ("triton_poi_", "triton_red_", "triton_per_")
_MOST_ARGUMENTS = 256

_FLOATS = ("float64", "float32", "bfloat16", "float16")

#: Elementwise operators: how many arguments can be tensors, FLOPs per element. A trailing `_` works in place.
ELEMENTWISE: dict[str, tuple[int, int]] = {
    **_each("""abs neg relu sign floor ceil round trunc bitwise_not logical_not sqrt rsqrt reciprocal exp exp2 log
        log2 log1p expm1 sin cos erf square isnan isinf isfinite frac tril triu positive""", (1, 1)),
    **_each("clamp clamp_min clamp_max hardtanh relu6 threshold leaky_relu", (1, 2)),
    **_each("""mul div sub rsub minimum maximum fmod remainder floor_divide bitwise_and bitwise_or bitwise_xor
        logical_and logical_or logical_xor pow atan2 masked_fill _prelu_kernel""", (2, 1)),
    **_each("eq ne lt le gt ge", (2, 1)),
    "add": (2, 1), "where": (3, 1), "addcmul": (3, 3), "addcdiv": (3, 3), "lerp": (3, 3),
    **_each("sigmoid elu softplus hardsigmoid log_sigmoid_forward", (1, 3)), **_each("silu hardswish", (1, 4)),
    "tanh": (1, 1), "mish": (1, 5), "gelu": (1, 6),
    **_each("threshold_backward leaky_relu_backward hardtanh_backward hardsigmoid_backward", (2, 2)),
    **_each("tanh_backward sigmoid_backward native_dropout_backward", (2, 3)),
    "silu_backward": (2, 7), "gelu_backward": (2, 12), "softplus_backward": (2, 4), "hardswish_backward": (2, 4),
    "mish_backward": (2, 8),
}
_COMPARISONS = frozenset(_each("""eq ne lt le gt ge isnan isinf isfinite logical_not logical_and logical_or
    logical_xor""", True))


@dataclass(frozen=True)
class Rows:
    """An operator whose outputs have the sizes of inputs: FLOPs per element of the first output (or of the first
    input, where nothing of that size is written), positions of what it reads and of what its outputs look like."""

    flops: int
    reads: Moved
    writes: Moved = ()


_BATCH_NORM = Rows(8, (0, 1, 2), (0,))
SHAPED: dict[str, Rows] = {
    "native_layer_norm": Rows(8, (0, 2, 3), (0,)), "native_layer_norm_backward": Rows(14, (0, 1, 3, 4, 5), (1, 5, 6)),
    "_fused_rms_norm": Rows(5, (0, 2), (0,)), "_fused_rms_norm_backward": Rows(11, (0, 1, 3, 4), (1, 4)),
    "native_group_norm": Rows(8, (0, 1, 2), (0,)), "native_group_norm_backward": Rows(14, (0, 1, 2, 3, 4), (1, 4, 4)),
    **_each("""native_batch_norm cudnn_batch_norm miopen_batch_norm _native_batch_norm_legit _batch_norm_with_update
        _batch_norm_impl_index batch_norm""", _BATCH_NORM),
    **_each("native_batch_norm_backward batch_norm_backward", Rows(14, (0, 1, 2), (1, 2, 2))),
    **_each("cudnn_batch_norm_backward miopen_batch_norm_backward", Rows(14, (0, 1, 2), (0, 2, 2))),
    "batch_norm_stats": Rows(5, (0,)), "batch_norm_elemt": Rows(4, (0,), (0,)),
    "batch_norm_backward_reduce": Rows(6, (0, 1)), "batch_norm_backward_elemt": Rows(8, (0, 1), (1,)),
    "cumsum": Rows(1, (0,), (0,)), "flip": Rows(0, (0,), (0,)), "roll": Rows(0, (0,), (0,)),
    "clone": Rows(0, (0,), (0,)), "contiguous": Rows(0, (0,), (0,)), "copy_": Rows(0, (1,), (0,)),
    **_each("fill_ zero_ random_ bernoulli_ uniform_ normal_ exponential_", Rows(0, (), (0,))),
    "mse_loss": Rows(3, (0, 1)), "smooth_l1_loss": Rows(5, (0, 1)), "binary_cross_entropy": Rows(8, (0, 1)),
    **_each("mse_loss_backward smooth_l1_loss_backward huber_loss_backward binary_cross_entropy_backward",
            Rows(4, (1, 2), (1,))),
    "nll_loss_forward": Rows(1, (1,)), "nll_loss2d_forward": Rows(1, (1,)),
    "nll_loss_backward": Rows(0, (2,), (1,)), "nll_loss2d_backward": Rows(0, (2,), (1,)),
    "max_pool2d_with_indices_backward": Rows(1, (0, 7), (1,)), "avg_pool2d_backward": Rows(1, (0,), (1,)),
    "_adaptive_avg_pool2d_backward": Rows(1, (0,), (1,)), "glu_backward": Rows(6, (0, 1), (1,)),
}

#: Reductions: FLOPs per element read, position of the dimensions that vanish, whether that can be a single number.
REDUCTIONS: dict[str, tuple[int, int, bool]] = {
    **_each("sum nansum mean amax amin", (1, 1, False)),
    **_each("max min prod argmax argmin any all", (1, 1, True)),
    **_each("linalg_vector_norm norm", (2, 2, False)),
    **_each("var var_mean std", (3, 1, False)), "logsumexp": (4, 1, False),
}

#: Optimizers' operators on lists of tensors: FLOPs per element.
FOREACH: dict[str, int] = {
    **_each("""add sub mul div maximum minimum sqrt rsqrt neg abs exp log reciprocal pow sign clamp_max clamp_min
        norm""", 1),
    "addcmul": 3, "addcdiv": 3, "lerp": 3,
}
#: Fused optimizers: FLOPs per parameter, positions of lists that are read, and of those that are written back.
FUSED: dict[str, tuple[int, Moved, Moved]] = {
    "_fused_adam_": (12, (0, 1, 2, 3, 4), (0, 2, 3, 4)), "_fused_adamw_": (13, (0, 1, 2, 3, 4), (0, 2, 3, 4)),
    "_fused_sgd_": (5, (0, 1, 2), (0, 2)), "_fused_adagrad_": (6, (0, 1, 2), (0, 2)),
    "_amp_foreach_non_finite_check_and_unscale_": (2, (0,), (0,)),
}


def cost(name: str, args: Arguments) -> Cost | None:
    """The cost of `name` (without "aten::"). None: not in the tables. Raises `Unknown` where the trace does not
    tell."""
    if name in SPECIAL:
        return SPECIAL[name](args)
    if name in SHAPED:
        return _shaped(SHAPED[name], args)
    if name in REDUCTIONS:
        return _reduction(*REDUCTIONS[name], args)
    if name in FUSED:
        return _fused(*FUSED[name], args)
    if name.startswith("_foreach_"):
        return _foreach(name.removeprefix("_foreach_"), args)
    in_place = name.endswith("_")
    base = name[:-1] if in_place else name
    return _elementwise(base, in_place, args) if base in ELEMENTWISE else None


def generated(args: Arguments) -> Cost:
    """A kernel that Inductor wrote: its arguments are the tensors that it reads and those that it writes. Each counts
    once, also one that is both, so that the bytes remain a lower bound. Of its arithmetic, one FLOP per element."""
    moved = args.tensors(_MOST_ARGUMENTS)
    if not moved:
        raise Unknown("its tensors were not recorded")
    largest = max(moved, key=lambda tensor: tensor.numel)
    return _memory(largest.numel, largest.dtype, *moved)


def _memory(flops: int, dtype: str, *moved: Tensor) -> Cost:
    return Cost(flops, sum(tensor.bytes for tensor in moved), "memory", dtype)


def _elementwise(name: str, in_place: bool, args: Arguments) -> Cost:
    count, flops = ELEMENTWISE[name]
    read = args.tensors(count)
    if not read:
        raise Unknown("no tensors")
    if in_place:
        out = args.tensor(0)
        out = out.like(out.dims)
    else:
        out = Tensor(broadcast(read), "bool" if name in _COMPARISONS else _promoted(read))
    return _memory(flops * out.numel, _promoted(read), *read, out)


def _promoted(tensors: list[Tensor]) -> str:
    """The format of a result: that of the tensors with dimensions (numbers do not widen them); floats before
    integers, wide before narrow, and two halves of different kinds make a float32."""
    formats = {tensor.dtype for tensor in tensors if tensor.dims} or {tensor.dtype for tensor in tensors}
    if {"bfloat16", "float16"} <= formats:
        return "float32"
    return next((name for name in _FLOATS if name in formats), None) or \
        max(formats, key=lambda name: (name != "bool", Tensor((1,), name).bytes, name))


def _shaped(rows: Rows, args: Arguments) -> Cost:
    read = [args.tensor(rows.reads[0])] if rows.reads else []
    read += [found for place in rows.reads[1:] if (found := args.optional(place)) is not None]
    written = [args.tensor(rows.writes[0])] if rows.writes else []
    written += [found for place in rows.writes[1:] if (found := args.optional(place)) is not None]
    leading = written[0] if written else read[0]
    written = [tensor.like(tensor.dims) for tensor in written]
    return _memory(rows.flops * leading.numel, leading.dtype, *read, *written)


def _reduction(flops: int, place: int, single: bool, args: Arguments) -> Cost:
    source = args.tensor(0)
    # A list of dimensions, or a single one where no format can stand in its place; nothing, or an empty list: all of
    # them.
    listed = args.text(place).startswith("[") or (single and args.text(place).lstrip("-").isdecimal())
    gone = {dim % len(source.dims) for dim in args.integers(place)} if listed and source.dims else set()
    kept = prod(size for dim, size in enumerate(source.dims) if dim not in gone) if gone else 1
    return _memory(flops * source.numel, source.dtype, source, source.like((kept,)))


def _foreach(name: str, args: Arguments) -> Cost | None:
    in_place = name.endswith("_")
    base = name[:-1] if in_place else name
    own = args.list(0)
    if not own:
        raise Unknown("an empty list")
    if base == "zero":
        return _memory(0, own[0].dtype, *own)
    if base == "copy":
        return _memory(0, own[0].dtype, *args.list(1), *own)
    if base not in FOREACH:
        return None
    others = [tensor for place in (1, 2) if args.is_list(place) for tensor in args.list(place)]
    written = [] if base == "norm" else own
    return _memory(FOREACH[base] * sum(tensor.numel for tensor in own), own[0].dtype, *own, *others, *written)


def _fused(flops: int, reads: Moved, writes: Moved, args: Arguments) -> Cost:
    read = [tensor for place in reads for tensor in args.list(place)]
    written = [tensor for place in writes for tensor in args.list(place)]
    own = args.list(0)
    if not own:
        raise Unknown("an empty list")
    return _memory(flops * sum(tensor.numel for tensor in own), own[0].dtype, *read, *written)


def _softmax(args: Arguments) -> Cost:
    """(self, dim, half_to_float)"""
    source = args.tensor(0)
    widened = "float32" if "True" in args.text(2) else ""
    return _memory(5 * source.numel, source.dtype, source, source.like(source.dims, widened))


def _softmax_backward(args: Arguments) -> Cost:
    """(grad_output, output, dim, dtype of the input)"""
    grad, output = args.tensor(0), args.tensor(1)
    return _memory(4 * grad.numel, grad.dtype, grad, output, grad.like(grad.dims, args.dtype(3, grad.dtype)))


def _dropout(args: Arguments) -> Cost:
    source = args.tensor(0)
    return _memory(2 * source.numel, source.dtype, source, source.like(source.dims), source.like(source.dims, "bool"))


def _to_copy(args: Arguments) -> Cost:
    source = args.tensor(0)
    return _memory(0, source.dtype, source, source.like(source.dims, args.dtype(1, source.dtype)))


def _cat(args: Arguments) -> Cost:
    parts = args.list(0)
    if not parts:
        raise Unknown("an empty list")
    return _memory(0, parts[0].dtype, *parts, *parts)


def _embedding(args: Arguments) -> Cost:
    """(weight, indices): the rows that are read may repeat; no more of them than there are must be moved."""
    weight, indices = args.tensor(0), args.tensor(1)
    width = prod(weight.dims[1:])
    read = weight.like((min(indices.numel, weight.dims[0] if weight.dims else 0), width))
    return _memory(0, weight.dtype, read, indices, weight.like((indices.numel, width)))


def _embedding_backward(args: Arguments) -> Cost:
    """(grad_output, indices, num_weights): the whole gradient is written, zeros as well."""
    grad, indices = args.tensor(0), args.tensor(1)
    width = grad.dims[-1] if grad.dims else 0
    return _memory(grad.numel, grad.dtype, grad, indices, grad.like((args.integer(2), width)))


def _index_select(args: Arguments) -> Cost:
    source, index = args.tensor(0), args.tensor(2)
    if not source.dims:
        raise Unknown("a number has no rows")
    dim = args.integer(1) % len(source.dims)
    out = source.like((*source.dims[:dim], index.numel, *source.dims[dim + 1:]))
    read = source.like(tuple(min(a, b) for a, b in zip(source.dims, out.dims)))
    return _memory(0, source.dtype, read, index, out)


def _gather(args: Arguments) -> Cost:
    source, index = args.tensor(0), args.tensor(2)
    out = source.like(index.dims)
    return _memory(0, source.dtype, out, index, out)


def _scatter_add(args: Arguments) -> Cost:
    """In place: (self, dim, index, src); what is touched is read, added to and written."""
    index, source = args.tensor(2), args.tensor(3)
    touched = source.like(index.dims)
    return _memory(index.numel, source.dtype, index, touched, touched, touched)


def _max_pool(args: Arguments) -> Cost:
    """(self, kernel, stride, padding, dilation, ceil_mode): values, and their int64 indices."""
    source = args.tensor(0)
    out = _pooled(source, args, args.integers(4, 2), ceil_at=5)
    window = prod(args.integers(1, 2))
    return _memory(window * out.numel, source.dtype, source, out, out.like(out.dims, "int64"))


def _avg_pool(args: Arguments) -> Cost:
    """(self, kernel, stride, padding, ceil_mode, ...)"""
    source = args.tensor(0)
    out = _pooled(source, args, (1, 1), ceil_at=4)
    return _memory(prod(args.integers(1, 2)) * out.numel, source.dtype, source, out)


def _pooled(source: Tensor, args: Arguments, dilation: tuple[int, ...], ceil_at: int) -> Tensor:
    kernel = args.integers(1, 2)
    stride = args.integers(2, 2) if args.integers(2) else kernel
    padding = args.integers(3, 2)
    if len(source.dims) < 3 or min(stride) <= 0:
        raise Unknown("sizes make no sense")
    up = args.boolean(ceil_at)
    sizes = [(size + 2 * p - d * (k - 1) - 1 + (s - 1 if up else 0)) // s + 1
             for size, k, s, p, d in zip(source.dims[-2:], kernel, stride, padding, dilation)]
    if min(sizes) <= 0:
        raise Unknown("sizes do not fit each other")
    return source.like((*source.dims[:-2], *sizes))


def _resized(args: Arguments) -> Cost:
    """(self, output_size): adaptive pooling, up-sampling."""
    source = args.tensor(0)
    out = source.like((*source.dims[:-2], *args.integers(1, 2)))
    return _memory(max(source.numel, out.numel), source.dtype, source, out)


def _resized_backward(args: Arguments) -> Cost:
    """(grad_output, output_size, input_size)"""
    grad = args.tensor(0)
    return _memory(grad.numel, grad.dtype, grad, grad.like(args.integers(2)))


SPECIAL = {
    "_softmax": _softmax, "_log_softmax": _softmax,
    "_softmax_backward_data": _softmax_backward, "_log_softmax_backward_data": _softmax_backward,
    "native_dropout": _dropout, "_fused_dropout": _dropout,
    "_to_copy": _to_copy, "cat": _cat, "embedding": _embedding, "embedding_dense_backward": _embedding_backward,
    "index_select": _index_select, "gather": _gather, "scatter_add_": _scatter_add,
    "max_pool2d_with_indices": _max_pool, "avg_pool2d": _avg_pool, "_adaptive_avg_pool2d": _resized,
    **dict.fromkeys(("upsample_nearest2d", "upsample_bilinear2d", "upsample_bicubic2d"), _resized),
    **dict.fromkeys(("upsample_nearest2d_backward", "upsample_bilinear2d_backward"), _resized_backward),
}
