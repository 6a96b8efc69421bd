"""Rules of operations that treat channels one by one, sum over them, or mix them. See `rules`."""

from __future__ import annotations

import re
from typing import Any

from saturate.inference.pruning.labels import Label
from saturate.inference.pruning.rules import Dims, Labels, Rules, where
from saturate.inference.pruning.tracing import Call

RULES = Rules()


@RULES.of("clone", "_to_copy", "copy", "detach", "alias", "lift_fresh", "fill", "zero", "masked_fill", "where", "_prelu_kernel",
      "add", "sub", "rsub", "mul", "div", "relu", "hardtanh", "hardswish", "hardsigmoid", "silu", "mish", "elu", "leaky_relu", "gelu",
      "softplus", "sigmoid", "tanh", "threshold", "zeros_like", "ones_like", "full_like", "empty_like", "rand_like", "randn_like")
def pointwise(labels: Labels, call: Call) -> list[Dims]:
    """Dimensions of equal size are the same, counted from the last; one of size 1 goes with anything."""
    made: Dims = []
    operands = call.inputs(labels.torch)
    shape = call.outputs[0].shape
    for back in range(len(shape), 0, -1):
        concerned = [labels.of(tensor)[-back] for tensor in operands if tensor.ndim >= back and tensor.shape[-back] > 1]
        label = concerned[0] if concerned and shape[-back] > 1 else None
        for other in concerned[1:]:
            label = labels.atoms.match(label, other)
        made.append(label)
    return [made] * len(call.outputs)


@RULES.of("new_zeros", "new_ones", "new_empty", "new_full", "scalar_tensor")
def constant(labels: Labels, call: Call) -> list[Dims]:
    return [[None] * call.outputs[0].ndim]


# -- sums over channels

_FACTORS = {"mm": ("self", "mat2"), "bmm": ("self", "mat2"), "addmm": ("mat1", "mat2"), "baddbmm": ("batch1", "batch2")}


@RULES.of(*_FACTORS)
def product(labels: Labels, call: Call) -> list[Dims]:
    first, second = (call.arguments[name] for name in _FACTORS[call.name])
    one, other = labels.of(first), labels.of(second)
    labels.atoms.match(one[-1], other[-2])
    labels.sums(first, -1)
    labels.sums(second, -2)
    made: Dims = [one[-2], other[-1]]
    if call.name.endswith("bmm"):
        batch = labels.atoms.match(one[0], other[0])
        labels.heads.update(batch or ())
        made = [batch, *made]
    if call.name in ("addmm", "baddbmm"):
        _added(labels, call.arguments["self"], made)
    return [made]


def _added(labels: Labels, bias: Any, made: Dims) -> None:
    """A bias, broadcast onto what was made."""
    for back in range(1, bias.ndim + 1):
        if bias.shape[-back] > 1:
            made[-back] = labels.atoms.match(made[-back], labels.of(bias)[-back])


@RULES.of("linear")
def linear(labels: Labels, call: Call) -> list[Dims]:
    *rest, channels = labels.of(call.arguments["input"])
    out, into = labels.of(call.arguments["weight"])
    labels.atoms.match(channels, into)
    labels.sums(call.arguments["weight"], 1)
    labels.tie(call.arguments["bias"], out)
    return [[*rest, out]]


@RULES.of("convolution", "_convolution")
def convolution(labels: Labels, call: Call) -> list[Dims]:
    source, weight, groups = (call.arguments[name] for name in ("input", "weight", "groups"))
    spatial = weight.ndim - 2
    labels.fix(weight, *range(2, weight.ndim))
    place = source.ndim - spatial - 1
    channels = labels.of(source)[place]
    out, into = labels.of(weight)[:2]
    if call.arguments["transposed"]:
        out, into = into, out
    if groups == 1:
        labels.atoms.match(channels, into)
        labels.sums(weight, 0 if call.arguments["transposed"] else 1)
    else:
        out = _grouped(labels, call, channels, groups)
    labels.tie(call.arguments["bias"], out)
    return [[*labels.of(source)[:place], out, *[None] * spatial]]


def _grouped(labels: Labels, call: Call, channels: Label, groups: int) -> Label:
    """Groups go as a whole: their input channels, their output channels, and the filters of both."""
    weight = call.arguments["weight"]
    filters = labels.of(weight)[0]      # by output channel; of a transposed convolution by input channel
    labels.fix(weight, 1)
    if channels is None or filters is None:
        labels.atoms.match(channels, filters)
        return None
    _tie_groups(labels, channels, groups)
    _tie_groups(labels, filters, groups)
    each = len(channels) // groups
    for index, atom in enumerate(filters):
        labels.atoms.unify(atom, channels[index * groups // len(filters) * each])
    if not call.arguments["transposed"]:
        return filters
    return [channels[group * each] for group in range(groups) for _ in range(weight.shape[1])]


def _tie_groups(labels: Labels, channels: list[int], groups: int) -> None:
    each = len(channels) // groups
    for index, atom in enumerate(channels):
        labels.atoms.unify(atom, channels[index // each * each])


@RULES.of("_scaled_dot_product_flash_attention_for_cpu", "_scaled_dot_product_flash_attention", "_scaled_dot_product_efficient_attention",
      "_scaled_dot_product_cudnn_attention", "_scaled_dot_product_fused_attention_overrideable")
def attention(labels: Labels, call: Call) -> list[Dims]:
    """(batch, heads, length, channels): heads are independent, and several of the query may share one of key and value.
    The scale depends on the number of channels, which is fixed."""
    query, key, value = (labels.of(call.arguments[name]) for name in ("query", "key", "value"))
    labels.fix(call.arguments["query"], 3)
    labels.fix(call.arguments["key"], 3)
    heads = query[1]
    for shared, tensor in ((key[1], call.arguments["key"]), (value[1], call.arguments["value"])):
        times = call.arguments["query"].shape[1] // tensor.shape[1]
        heads = labels.atoms.match(heads, shared if shared is None else [atom for atom in shared for _ in range(times)])
    mask = call.arguments.get("attn_mask", call.arguments.get("attn_bias"))
    if mask is not None and mask.ndim >= 3 and mask.shape[-3] > 1:
        heads = labels.atoms.match(heads, labels.of(mask)[-3])
    labels.heads.update(heads or ())
    return [[query[0], heads, query[2], value[3]]]


# -- channels one by one


@RULES.of("native_batch_norm", "_native_batch_norm_legit_no_training", "_native_batch_norm_legit", "_native_batch_norm_legit_functional",
      "cudnn_batch_norm", "miopen_batch_norm", "_batch_norm_no_update", "_batch_norm_with_update")
def batch_norm(labels: Labels, call: Call) -> list[Dims]:
    made = labels.of(call.arguments["input"])
    for name in ("weight", "bias", "running_mean", "running_var"):
        labels.tie(call.arguments.get(name), made[1])
    return [made]


@RULES.of("native_group_norm")
def group_norm(labels: Labels, call: Call) -> list[Dims]:
    made = labels.of(call.arguments["input"])
    for name in ("weight", "bias"):
        labels.tie(call.arguments[name], made[1])
    if made[1] is not None:
        _tie_groups(labels, made[1], call.arguments["group"])
    return [made]


@RULES.of("native_layer_norm", "_fused_rms_norm", "rms_norm")
def layer_norm(labels: Labels, call: Call) -> list[Dims]:
    source, count = call.arguments["input"], len(call.arguments["normalized_shape"])
    labels.fix(source, *range(source.ndim - count, source.ndim))
    for name in ("weight", "bias"):
        if call.arguments.get(name) is not None:
            labels.fix(call.arguments[name])
    return [labels.of(source)]


@RULES.of("_softmax", "_log_softmax", "_safe_softmax", "cumsum", "cumprod", "logcumsumexp", "sort", "topk", "argsort", "flip", "roll")
def along(labels: Labels, call: Call) -> list[Dims]:
    """Mixes what lies along some dimensions, and treats the others one by one."""
    source = call.inputs(labels.torch)[0]
    dims = where(call, source.ndim)
    labels.fix(source, *dims)
    return [[None if dim in dims else label for dim, label in enumerate(labels.of(source))]] * len(call.outputs)


@RULES.of("tril", "triu")
def triangle(labels: Labels, call: Call) -> list[Dims]:
    source = call.arguments["self"]
    labels.fix(source, source.ndim - 2, source.ndim - 1)
    return [[*labels.of(source)[:-2], None, None]]


@RULES.of("mean", "sum", "amax", "amin", "max", "min", "aminmax", "var", "std", "var_mean", "std_mean", "norm", "linalg_vector_norm",
      "logsumexp", "argmax", "argmin", "any", "all", "prod", "median", "nansum", "nanmean", "count_nonzero")
def reduction(labels: Labels, call: Call) -> list[Dims]:
    source = call.inputs(labels.torch)[0]
    dims = where(call, source.ndim)
    labels.fix(source, *dims)
    kept: Dims = [None if dim in dims else label for dim, label in enumerate(labels.of(source))]
    if call.outputs[0].ndim != source.ndim:
        kept = [label for dim, label in enumerate(kept) if dim not in dims]
    return [kept] * len(call.outputs)


@RULES.of("max_pool2d_with_indices", "max_pool3d_with_indices", "max_pool2d", "avg_pool1d", "avg_pool2d", "avg_pool3d",
      "adaptive_avg_pool1d", "_adaptive_avg_pool2d", "_adaptive_avg_pool3d", "adaptive_max_pool2d", "adaptive_max_pool3d",
      "upsample_nearest1d", "upsample_nearest2d", "upsample_nearest3d", "_upsample_nearest_exact1d", "_upsample_nearest_exact2d",
      "upsample_linear1d", "upsample_bilinear2d", "upsample_bicubic2d", "upsample_trilinear3d", "_upsample_bilinear2d_aa",
      "_upsample_bicubic2d_aa", "reflection_pad1d", "reflection_pad2d", "reflection_pad3d", "replication_pad1d", "replication_pad2d",
      "replication_pad3d")
def spatial(labels: Labels, call: Call) -> list[Dims]:
    """Moves within the last one, two or three dimensions."""
    source = call.inputs(labels.torch)[0]
    found = re.search(r"([123])d", call.name)
    assert found is not None
    first = source.ndim - int(found[1])
    labels.fix(source, *range(first, source.ndim))
    return [[*labels.of(source)[:first], *[None] * int(found[1])]] * len(call.outputs)


@RULES.of("glu")
def gated(labels: Labels, call: Call) -> list[Dims]:
    made = list(labels.of(call.arguments["self"]))
    dim = call.arguments["dim"] % len(made)
    label = made[dim]
    if label is not None:
        made[dim] = labels.atoms.match(label[:len(label) // 2], label[len(label) // 2:])
    return [made]


