"""Matrix products, convolutions and attention: closed-form FLOPs from shapes, two for each multiplication and
addition.

A product of [M, K] with [K, N] is 2 M N K, of complex numbers four times as much; a bias is free (as in
`torch.utils.flop_counter`). A convolution is 2 x
its outputs x the weights behind each of them; each gradient costs as much as the forward pass. Attention is its two
products, 2 B H Lq Lk (D + Dv), half of it with a causal mask; its backward pass is five such products (2.5 times as
much when D = Dv), because the scores are computed again (Dao et al., 2022, arXiv:2205.14135).
"""

from __future__ import annotations

from collections.abc import Callable
from math import prod

from saturate.trace._arguments import SPARSE, Arguments, Cost, Kind, Tensor, Unknown, broadcast

Formula = Callable[[Arguments], Cost]


def _cost(kind: Kind, flops: int, dtype: str, *moved: Tensor | None) -> Cost:
    real = 4 if dtype.startswith("complex") else 1
    return Cost(real * flops, sum(tensor.bytes for tensor in moved if tensor is not None), kind, dtype)


def _rank(tensor: Tensor, rank: int) -> tuple[int, ...]:
    if len(tensor.dims) != rank:
        raise Unknown(f"{len(tensor.dims)} dimensions where {rank} belong")
    return tensor.dims


def _check(fits: bool) -> None:
    if not fits:
        raise Unknown("sizes do not fit each other")


def _product(a: Tensor, b: Tensor, added: Tensor | None = None, dtype: str = "") -> Cost:
    """[M, K] x [K, N], or a batch of them. `added`: bias."""
    if not (a.strided and b.strided):
        raise Unknown(SPARSE)
    if len(a.dims) == 3:
        batch, m, k = a.dims
        other, inner, n = _rank(b, 3)
        _check(other == batch)
        out = a.like((batch, m, n), dtype)
    else:
        m, k = _rank(a, 2)
        inner, n = _rank(b, 2)
        out = a.like((m, n), dtype)
    _check(inner == k)
    return _cost("matrix", 2 * out.numel * k, a.dtype, a, b, added, out)


def _mm(args: Arguments) -> Cost:
    return _product(args.tensor(0), args.tensor(1))


def _addmm(args: Arguments) -> Cost:
    return _product(args.tensor(1), args.tensor(2), added=args.tensor(0))


def _int_mm(args: Arguments) -> Cost:
    return _product(args.tensor(0), args.tensor(1), dtype="int32")


def _scaled_mm(args: Arguments) -> Cost:
    """fp8: (a, b, scale_a, scale_b, bias, scale_result, out_dtype)."""
    return _product(args.tensor(0), args.tensor(1), dtype=args.dtype(6, "bfloat16"))


def _addbmm(args: Arguments) -> Cost:
    one = _product(args.tensor(1), args.tensor(2))
    added = args.tensor(0)
    return Cost(one.flops, sum(tensor.bytes for tensor in (args.tensor(1), args.tensor(2), added, added)), "matrix", one.dtype)


def _addr(args: Arguments) -> Cost:
    """(added, vector [M], vector [N]): their outer product."""
    a, b = args.tensor(1), args.tensor(2)
    return _product(a.like((*_rank(a, 1), 1)), b.like((1, *_rank(b, 1))), added=args.tensor(0))


def _euclidean_dist(args: Arguments) -> Cost:
    """`torch.cdist` of many points, [B, P, M] and [B, R, M]: what costs is their product. It has M + 2 columns, |a - b|^2
    being [-2 a, |a|^2, 1] times [b, 1, |b|^2]; a trace of the operators shows it so too."""
    a, b = args.tensor(0), args.tensor(1)
    _check(len(a.dims) >= 2 and len(b.dims) >= 2)
    columns, others = a.dims[-1] + 2, b.dims[-1] + 2
    return _product(a.like((*a.dims[:-1], columns)), b.like((*b.dims[:-2], others, b.dims[-2])))


def _mv(args: Arguments) -> Cost:
    matrix, vector = args.tensor(0), args.tensor(1)
    m, k = _rank(matrix, 2)
    _check(_rank(vector, 1) == (k,))
    return _cost("matrix", 2 * m * k, matrix.dtype, matrix, vector, matrix.like((m,)))


def _addmv(args: Arguments) -> Cost:
    matrix, vector = args.tensor(1), args.tensor(2)
    m, k = _rank(matrix, 2)
    return _cost("matrix", 2 * m * k, matrix.dtype, matrix, vector, args.tensor(0), matrix.like((m,)))


def _dot(args: Arguments) -> Cost:
    a, b = args.tensor(0), args.tensor(1)
    return _cost("matrix", 2 * a.numel, a.dtype, a, b)


def _matmul(args: Arguments) -> Cost:
    """torch.matmul: vectors, matrices and batches that are broadcast against each other."""
    a, b = args.tensor(0), args.tensor(1)
    _check(bool(a.dims) and bool(b.dims))
    left = a.dims if len(a.dims) > 1 else (1, *a.dims)
    right = b.dims if len(b.dims) > 1 else (*b.dims, 1)
    _check(left[-1] == right[-2])
    batch = broadcast([a.like(left[:-2]), b.like(right[:-2])])
    out = a.like((*batch, left[-2], right[-1]))
    return _cost("matrix", 2 * out.numel * left[-1], a.dtype, a, b, out)


def _linear(weight: int = 1, bias: int = 2) -> Formula:
    """Inputs [..., K], weights [N, K], bias; the parameters are positions of arguments."""

    def formula(args: Arguments) -> Cost:
        inputs, weights = args.tensor(0), args.tensor(weight)
        n, k = _rank(weights, 2)
        _check(bool(inputs.dims) and inputs.dims[-1] == k)
        out = inputs.like((*inputs.dims[:-1], n))
        return _cost("matrix", 2 * inputs.numel * n, inputs.dtype, inputs, weights, args.optional(bias), out)

    return formula


def _rnn(factor: int) -> Formula:
    """cuDNN's recurrent nets, inputs [T, B, K] and the list of weights: each matrix multiplies every step of every
    sequence."""

    def formula(args: Arguments) -> Cost:
        inputs = args.tensor(0)
        return _recurrent(factor, inputs, [Tensor(tensor.dims, inputs.dtype) for tensor in args.list(1)])

    return formula


def _mkldnn_rnn(factor: int) -> Formula:
    """oneDNN's, one layer and direction: (inputs [T, B, K], w_ih, w_hh, b_ih, b_hh, ...)."""
    return lambda args: _recurrent(factor, args.tensor(0), args.tensors(5)[1:])


def _recurrent(factor: int, inputs: Tensor, weights: list[Tensor]) -> Cost:
    """`factor`: 1 forward; 2 backward, where libraries always compute the gradients of inputs and of weights. Sequences of
    several lengths come packed, [all their elements, K]."""
    _check(len(inputs.dims) in (2, 3))
    matrices = sum(weight.numel for weight in weights if len(weight.dims) == 2)
    return _cost("matrix", factor * 2 * prod(inputs.dims[:-1]) * matrices, inputs.dtype, inputs, *weights)


def _convolution(bias: int | None = 2, stride: int = 3, padding: int = 4, dilation: int | None = 5,
                 transposed: int | bool = False, output_padding: int | None = None, groups: int | None = 6) -> Formula:
    """A forward convolution. The parameters are positions of arguments, behind the input and the weight: each implementation
    has an order of its own. None: it has no such argument."""

    def formula(args: Arguments) -> Cost:
        inputs, weights = args.tensor(0), args.tensor(1)
        spatial = len(weights.dims) - 2
        _check(spatial > 0 and len(inputs.dims) in (spatial + 1, spatial + 2))
        kernel = weights.dims[2:]
        strides, pads = args.integers(stride, spatial), args.integers(padding, spatial)
        dilations = args.integers(dilation, spatial) if dilation is not None else (1,) * spatial
        backwards = transposed if isinstance(transposed, bool) else args.boolean(transposed)
        _check(min(strides) > 0)
        if backwards:
            extra = args.integers(output_padding, spatial) if output_padding is not None else (0,) * spatial
            sizes = tuple((i - 1) * s - 2 * p + d * (k - 1) + e + 1 for i, s, p, d, k, e in
                          zip(inputs.dims[-spatial:], strides, pads, dilations, kernel, extra))
            channels = weights.dims[1] * (args.integer(groups) if groups is not None else 1)
            macs = inputs.numel * prod(weights.dims[1:])
        else:
            sizes = tuple((i + 2 * p - d * (k - 1) - 1) // s + 1 for i, s, p, d, k in
                          zip(inputs.dims[-spatial:], strides, pads, dilations, kernel))
            channels = weights.dims[0]
            macs = prod(inputs.dims[:-spatial - 1]) * channels * prod(sizes) * prod(weights.dims[1:])
        _check(min(sizes) > 0)
        out = inputs.like((*inputs.dims[:-spatial - 1], channels, *sizes))
        added = args.optional(bias) if bias is not None else None
        return _cost("convolution", 2 * macs, inputs.dtype, inputs, weights, added, out)

    return formula


def _convolution_backward(args: Arguments) -> Cost:
    """(grad_output, input, weight, bias_sizes, stride, padding, dilation, transposed, output_padding, groups,
    output_mask): the gradients that the mask asks for."""
    return _gradients(args, mask=10, transposed=args.boolean(7))


def _slow_convolution_backward(args: Arguments) -> Cost:
    """(grad_output, input, weight, kernel_size, stride, padding, output_mask)."""
    return _gradients(args, mask=6)


def _gradients(args: Arguments, mask: int, transposed: bool = False) -> Cost:
    """`mask`: position of the list that tells which gradients are wanted."""
    grad, inputs, weights = args.tensor(0), args.tensor(1), args.tensor(2)
    to_inputs, to_weights, to_bias = (args.booleans(mask) + [False] * 3)[:3]
    one = 2 * (inputs.numel if transposed else grad.numel) * prod(weights.dims[1:])
    moved = [grad]
    moved += [weights, inputs] if to_inputs else []
    moved += [inputs, weights] if to_weights else []
    moved += [grad.like(grad.dims[1:2])] if to_bias else []
    return _cost("convolution", one * (to_inputs + to_weights), grad.dtype, *moved)


def _convolution_backward_input(args: Arguments) -> Cost:
    """The 2021 form: (size, grad_output, weight, ...). The size was often not recorded; then what is written is left
    out, so that the bytes remain a lower bound."""
    grad, weights = args.tensor(1), args.tensor(2)
    try:
        written: Tensor | None = grad.like(args.integers(0))
    except Unknown:
        written = None
    return _cost("convolution", 2 * grad.numel * prod(weights.dims[1:]), grad.dtype, grad, weights, written)


def _convolution_backward_weight(args: Arguments) -> Cost:
    """The 2021 form: (size of the weights, grad_output, input, ...)."""
    grad, inputs = args.tensor(1), args.tensor(2)
    weights = grad.like(args.integers(0))
    return _cost("convolution", 2 * grad.numel * prod(weights.dims[1:]), grad.dtype, grad, inputs, weights)


def _attention(causal: int, q: int = 0, heads_last: bool = False, backward: bool = False, mask: int | None = None,
               logsumexp: bool = True, mask_type: bool = False, offsets: int | None = None) -> Formula:
    """Fused attention. `q`: position of the queries, before keys and values. `causal`: position of the flag (of the
    kind of mask, where `mask_type`: 1 and 2 are causal). `offsets`: position of those of sequences that lie end to end in one
    row. Layout [B, H, L, D], or [B, L, H, D] where `heads_last`."""

    def formula(args: Arguments) -> Cost:
        queries, keys, values = (args.tensor(q + place) for place in range(3))
        rank = len(queries.dims)
        # [tokens, H, D] or [1, tokens, H, D], sequences of several lengths end to end: their lengths are not recorded.
        bounds = args.optional(offsets) if offsets is not None else None
        if (rank == 3 and heads_last) or (bounds is not None and bounds.numel > 2):
            raise Unknown("the lengths of its sequences were not recorded")
        _check(rank in (3, 4))
        _check(len(keys.dims) == len(values.dims) == rank and keys.dims[-1] == queries.dims[-1])
        batch, width = (queries.dims[0] if rank == 4 else 1), queries.dims[-1]
        if heads_last:
            rows, heads, columns = queries.dims[1], queries.dims[2], keys.dims[1]
        else:
            heads, rows, columns = queries.dims[-3], queries.dims[-2], keys.dims[-2]
        pairs = batch * heads * rows * columns
        per_pair = 2 * (3 * width + 2 * values.dims[-1]) if backward else 2 * (width + values.dims[-1])
        flops = pairs * per_pair
        if args.integer(causal) in (1, 2) if mask_type else args.boolean(causal):
            flops //= 2
        out = queries.like((*queries.dims[:-1], values.dims[-1]))
        sums = Tensor((batch * heads * rows,), "float32") if logsumexp else None
        moved = [queries, keys, values, out, sums, args.optional(mask) if mask is not None else None]
        if backward:
            moved += [out, queries, keys, values]       # gradient of the output read, gradients of the inputs written
        return _cost("attention", flops, queries.dtype, *moved)

    return formula


#: By the order of their arguments: s, p and d stand for stride, padding and dilation.
_PLAIN = _convolution()                                                     # (input, weight, bias, s, p, d, groups)
_PADDING_FIRST = _convolution(bias=None, padding=2, stride=3, dilation=4, groups=5)     # cuDNN's
_WITH_BIAS = _convolution(padding=3, stride=4, dilation=5, groups=6)                    # oneDNN's and MIOpen's
_ANY = _convolution(transposed=6, output_padding=7, groups=8)
_FUSED = _convolution(bias=2, stride=3, padding=4, dilation=5, groups=6)
_DEPTHWISE = _convolution(bias=3, stride=4, padding=5, dilation=6)          # (input, weight, size, bias, s, p, d)
_SLOW = _convolution(bias=3, stride=4, padding=5, dilation=None)            # (input, weight, size, bias, s, p)
_SLOW_TRANSPOSED = _convolution(bias=3, stride=4, padding=5, output_padding=6, dilation=7, groups=None, transposed=True)

#: Namespaces of torch itself. Nobody knows what another's operator does.
NAMESPACES = {"aten", "prim", "prims", "rngprims", "profiler", "c10d", "_c10d_functional", "_c10d_functional_autograd", "_dtensor",
              "symm_mem"}

FORMULAS: dict[str, Formula] = {
    "aten::mm": _mm, "aten::bmm": _mm, "aten::_int_mm": _int_mm, "aten::_scaled_mm": _scaled_mm,
    "aten::addmm": _addmm, "aten::addmm_": _addmm, "aten::_addmm_activation": _addmm,
    "aten::baddbmm": _addmm, "aten::baddbmm_": _addmm, "aten::addbmm": _addbmm, "aten::addbmm_": _addbmm,
    "aten::addr": _addr, "aten::addr_": _addr, "aten::_euclidean_dist": _euclidean_dist,
    "aten::mv": _mv, "aten::addmv": _addmv, "aten::addmv_": _addmv, "aten::dot": _dot, "aten::vdot": _dot,
    "aten::matmul": _matmul, "aten::linear": _linear(), "aten::mkldnn_linear": _linear(),
    "mkldnn::_linear_pointwise": _linear(), "mkl::_mkl_linear": _linear(weight=2, bias=3),
    "aten::_cudnn_rnn": _rnn(1), "aten::_cudnn_rnn_backward": _rnn(2),
    "aten::mkldnn_rnn_layer": _mkldnn_rnn(1), "aten::mkldnn_rnn_layer_backward": _mkldnn_rnn(2),

    "aten::conv1d": _PLAIN, "aten::conv2d": _PLAIN, "aten::conv3d": _PLAIN,
    "aten::conv_transpose1d": _convolution(transposed=True, output_padding=5, groups=6, dilation=7),
    "aten::conv_transpose2d": _convolution(transposed=True, output_padding=5, groups=6, dilation=7),
    "aten::conv_transpose3d": _convolution(transposed=True, output_padding=5, groups=6, dilation=7),
    "aten::convolution": _ANY, "aten::_convolution": _ANY, "aten::convolution_overrideable": _ANY,
    "aten::cudnn_convolution": _PADDING_FIRST,
    "aten::cudnn_convolution_transpose": _convolution(bias=None, padding=2, output_padding=3, stride=4, dilation=5,
                                                      groups=6, transposed=True),
    "aten::cudnn_convolution_relu": _FUSED,
    "aten::mkldnn_convolution": _WITH_BIAS, "aten::miopen_convolution": _WITH_BIAS,
    "aten::miopen_depthwise_convolution": _WITH_BIAS,
    "aten::miopen_convolution_transpose": _convolution(padding=3, output_padding=4, stride=5, dilation=6, groups=7,
                                                       transposed=True),
    "mkldnn::_convolution_pointwise": _WITH_BIAS,
    "aten::_conv_depthwise2d": _DEPTHWISE, "aten::conv_depthwise3d": _DEPTHWISE,
    "aten::slow_conv_dilated2d": _DEPTHWISE, "aten::slow_conv_dilated3d": _DEPTHWISE,
    "aten::_slow_conv2d_forward": _SLOW, "aten::thnn_conv2d": _SLOW,
    "aten::slow_conv3d": _SLOW, "aten::slow_conv3d_forward": _SLOW,
    "aten::slow_conv_transpose2d": _SLOW_TRANSPOSED, "aten::slow_conv_transpose3d": _SLOW_TRANSPOSED,
    "aten::_slow_conv2d_backward": _slow_convolution_backward,
    "aten::convolution_backward": _convolution_backward,
    "aten::cudnn_convolution_backward_input": _convolution_backward_input,
    "aten::cudnn_convolution_backward_weight": _convolution_backward_weight,

    "aten::scaled_dot_product_attention": _attention(causal=5, mask=3, logsumexp=False),
    "aten::_scaled_dot_product_flash_attention": _attention(causal=4),
    "aten::_scaled_dot_product_flash_attention_for_cpu": _attention(causal=4, mask=5),
    "aten::_scaled_dot_product_efficient_attention": _attention(causal=6, mask=3),
    "aten::_scaled_dot_product_cudnn_attention": _attention(causal=6, mask=3),
    "aten::_scaled_dot_product_fused_attention_overrideable": _attention(causal=5, mask=3),
    "aten::_flash_attention_forward": _attention(causal=8, heads_last=True),
    "aten::_efficient_attention_forward": _attention(causal=9, heads_last=True, mask=3, mask_type=True, offsets=4),
    "aten::_cudnn_attention_forward": _attention(causal=10, mask=3, offsets=4),
    "flash_attn::_flash_attn_forward": _attention(causal=5, heads_last=True),
    "aten::_scaled_dot_product_flash_attention_backward": _attention(causal=11, q=1, backward=True),
    "aten::_scaled_dot_product_flash_attention_for_cpu_backward": _attention(causal=7, q=1, backward=True, mask=8),
    "aten::_scaled_dot_product_efficient_attention_backward": _attention(causal=11, q=1, backward=True, mask=4),
    "aten::_scaled_dot_product_cudnn_attention_backward": _attention(causal=14, q=1, backward=True, mask=8, offsets=9),
    "aten::_flash_attention_backward": _attention(causal=11, q=1, heads_last=True, backward=True),
    "aten::_efficient_attention_backward": _attention(causal=14, q=1, heads_last=True, backward=True, mask=4,
                                                      mask_type=True, offsets=6),
    "flash_attn::_flash_attn_backward": _attention(causal=11, q=1, heads_last=True, backward=True),
}
