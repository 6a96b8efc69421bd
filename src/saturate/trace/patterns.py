"""Operators by what they are: matrix products, attention written out, chains. By name, shapes and formats."""

from __future__ import annotations

import re
from collections.abc import Iterable
from math import prod
from typing import Any

from saturate.records.analysis import Operator

Dims = tuple[tuple[int, ...], ...]

#: A layer of a recurrent net, or attention, in one kernel multiplies matrices as well.
_PRODUCT = re.compile(r"^aten::((mm|bmm|addmm|baddbmm|addbmm)_?|matmul|linear|_addmm_activation|mkldnn_linear|\w*conv(?!ert)\w*|"
                      r"(mkldnn_rnn_layer|_cudnn_rnn|miopen_rnn)(_backward)?|_?scaled_dot_product_\w+|_(flash|efficient|cudnn)_attention_\w+)$|"
                      r"^mkldnn::_(linear|convolution)_pointwise_?$|^mkl::_mkl_linear$|^flash_attn::")
_BATCHED = re.compile(r"^aten::(bmm|baddbmm|matmul)$")
_SOFTMAX = re.compile(r"^aten::(_?softmax|_safe_softmax|_softmax_backward_data)$")
#: Memory-bound, but not because tensors are written out between one operation and the next.
_NOT_A_CHAIN = re.compile(r"embedding|index|gather|scatter|sort|topk|unique|nonzero|cumsum|_foreach_|_fused_|pool|"
                          r"attention|^(?!aten::)")
#: Names of kernels that multiply in fp32. `sm80_xmma_gemm_f32f32_f32f32_f32_..._ffma_...` is one, whatever its family is called:
#: the formats are those of inputs, products and sums, and FFMA is the instruction; with TF32 it says `f32f32_tf32f32_f32`.
_FP32 = re.compile(r"sgemm|cgemm|scudnn|simt_s|ffma|(?<!t)f32f32_f32f32")
#: Names of the others, most of which use tensor cores (only fp32 ones matter here): by format, by instruction (`s1688`, `hgmma`),
#: by library. cuBLAS's nvjet kernels exist for tensor cores only, and its xmma kernels are these where they are not of fp32.
_TENSOR_CORES = re.compile(r"tf32|tensor(?:op|\d+x\d)|[sdhi](?:884|168|8816|161616)|(?<!ga)mma|nvjet", re.IGNORECASE)
#: As `operators.shapes_text` writes them. What else a damaged trace has in place of sizes are none.
_SIZES = re.compile(r"\[(\d{1,18}(?:, \d{1,18})*)\]")


def dims(operator: Operator) -> Dims:
    """Sizes of its tensors, from the text of the record; () where shapes were not recorded."""
    return tuple(tuple(int(size) for size in found.split(", ")) for found in _SIZES.findall(operator.shapes))


def fp32_matmuls(operators: Iterable[Operator]) -> list[Operator] | None:
    """Matrix products, convolutions and what consists of them in fp32 without TF32; None where the formats of most are not known. Without those
    that are so small that calling or launching them takes their time: no format makes that shorter."""
    fp32, known, total = [], 0, 0
    for operator in operators:
        if not _PRODUCT.match(operator.name) or operator.limit == "latency":
            continue
        total += operator.time_ns
        answer = _is_fp32(operator)
        if answer is not None:
            known += operator.time_ns
            fp32 += [operator] if answer else []
    return None if 2 * known < total else fp32


def _is_fp32(operator: Operator) -> bool | None:
    """By its formats, and the kernel of most time whose name tells: a convolution may spend more on transposing its tensors."""
    if operator.dtypes and "float32" not in operator.dtypes.split(", "):
        return False
    for kernel in operator.kernels:
        if _FP32.search(kernel):
            return True
        if _TENSOR_CORES.search(kernel):
            return False
    return True if operator.dtypes else None


def eager_attention(operators: Iterable[Operator]) -> list[Operator] | None:
    """softmax(Q K^T) V written out: softmaxes over [.., Lq, Lk] and the batched products that make or use
    matrices of that size, forward and backward, with what scales, masks, drops or casts such matrices in between. Needs the first
    two; None where no shapes were recorded."""
    operators = list(operators)
    if not any(operator.shapes for operator in operators):
        return None
    softmaxes = [(operator, scores[0]) for operator in operators
                 if _SOFTMAX.match(operator.name) and (scores := dims(operator)) and len(scores[0]) >= 3]
    products = [(operator, dims(operator)) for operator in operators if _BATCHED.match(operator.name)] if softmaxes else []
    between: dict[Any, list[Operator]] = {}
    for operator in operators if softmaxes else ():
        for key in {_matrices(sizes) for sizes in dims(operator) if len(sizes) >= 3} if _is_chained(operator) else ():
            between.setdefault(key, []).append(operator)
    found: dict[int, Operator] = {}
    for softmax, scores in softmaxes:
        partners = [operator for operator, sizes in products if _touches(sizes, scores)]
        if partners:
            found |= {id(operator): operator for operator in (softmax, *partners, *between.get(_matrices(scores), ()))}
    return list(found.values())


def _matrices(sizes: tuple[int, ...]) -> tuple[int, ...]:
    """The size of the last two dimensions, and of all: the same for scores of as many heads and samples, however these are laid out."""
    return (*sizes[-2:], prod(sizes))


def _touches(product: Dims, scores: tuple[int, ...]) -> bool:
    """Whether a batched product of tensors of these sizes makes or multiplies matrices of this batch and these sizes, transposed or not."""
    matrices = [sizes for sizes in product if len(sizes) >= 3][-2:]
    if len(matrices) < 2:
        return False
    left, right = matrices
    sizes = {scores[-2:], scores[-2:][::-1]}
    made, used = (left[-2], right[-1]), {left[-2:], right[-2:]}
    return prod(left[:-2]) == prod(scores[:-2]) and (made in sizes or bool(used & sizes))


def elementwise(operators: Iterable[Operator]) -> list[Operator] | None:
    """Elementwise operators and reductions that memory bounds, but those of attention that is written out; None where most time was
    not modelled."""
    operators = list(operators)
    attention = set(map(id, eager_attention(operators) or ()))
    total, modelled, chains = 0, 0, []
    for operator in operators:
        total += operator.time_ns
        if operator.limit is None:
            continue
        modelled += operator.time_ns
        chains += [operator] if operator.limit != "compute" and _is_chained(operator) and id(operator) not in attention else []
    return None if 2 * modelled < total or not total else chains


def _is_chained(operator: Operator) -> bool:
    return not (_PRODUCT.match(operator.name) or _NOT_A_CHAIN.search(operator.name))
