"""FLOPs and bytes against closed form. Arguments are placed by torch's own schemas, so a wrong position is a wrong
answer."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from saturate.trace import _matrix_costs, _memory_costs, flops
from saturate.trace._arguments import SPARSE
from saturate.trace.columns import Signature

torch = pytest.importorskip("torch")

F32, BF16, I64 = "float", "c10::BFloat16", "long int"


def schema_of(name: str, given_: set[str]):
    """The overload of `name` whose arguments include all that are given."""
    for schema in torch._C._jit_get_schemas_for_operator(name):
        if given_ <= {argument.name for argument in schema.arguments} and not schema.overload_name.endswith("out"):
            return schema
    raise AssertionError(f"{name} has no overload with {given_}")


def recorded(name: str, form: str = F32, **given_) -> Signature:
    """What the profiler records of a call. A tuple: a tensor's sizes, or (sizes, format, strides); a list of tuples:
    a list of tensors; text: a value, as it is written."""
    dims, types, strides, concrete = [], [], [], []
    for argument in schema_of(name, set(given_)).arguments:
        value = given_.get(argument.name, "")
        if isinstance(value, str):
            entry = ((), "ScalarList" if value.startswith("[") else "Scalar" if value else "", (), value)
        elif isinstance(value, list):
            entry = (tuple(value), "TensorList", (), "")
        elif value and isinstance(value[0], tuple):
            entry = (value[0], value[1], value[2] if len(value) > 2 else (), "")
        else:
            entry = (value, form, (), "")
        for column, part in zip((dims, types, strides, concrete), entry):
            column.append(part)
    return Signature(tuple(dims), tuple(types), tuple(strides), tuple(concrete))


def cost(name: str, form: str = F32, hint: str = "", **given_) -> tuple[int, int]:
    """(FLOPs, bytes); `form`: the format of tensors that state none."""
    found = flops.cost(name, recorded(name, form, **given_), hint)
    assert found is not None, flops.explained(name, recorded(name, form, **given_), hint)[1]
    return found.flops, found.bytes


def test_matrix_products():
    m, k, n, b = 128, 96, 56, 8
    one = 2 * m * k * n
    assert cost("aten::mm", self=(m, k), mat2=(k, n)) == (one, 4 * (m * k + k * n + m * n))
    assert cost("aten::bmm", BF16, self=(b, m, k), mat2=(b, k, n)) == (b * one, 2 * b * (m * k + k * n + m * n))
    assert cost("aten::addmm", self=(n,), mat1=(m, k), mat2=(k, n)) == (one, 4 * (n + m * k + k * n + m * n))
    assert cost("aten::baddbmm", self=(b, m, n), batch1=(b, m, k), batch2=(b, k, n)) == \
        (b * one, 4 * b * (2 * m * n + m * k + k * n))
    assert cost("aten::addbmm", self=(m, n), batch1=(b, m, k), batch2=(b, k, n))[0] == b * one
    assert cost("aten::linear", input=(b, m, k), weight=(n, k), bias=(n,)) == \
        (b * one, 4 * (b * m * k + n * k + n + b * m * n))
    assert cost("mkldnn::_linear_pointwise", X=(b, m, k), W=(n, k), B=(n,)) == \
        cost("mkl::_mkl_linear", X=(b, m, k), ORI_W=(n, k), B=(n,)) == \
        cost("aten::linear", input=(b, m, k), weight=(n, k), bias=(n,))
    assert cost("aten::mv", self=(m, k), vec=(k,)) == (2 * m * k, 4 * (m * k + k + m))
    assert cost("aten::addmv", self=(m,), mat=(m, k), vec=(k,))[0] == 2 * m * k
    assert cost("aten::dot", self=(k,), tensor=(k,)) == (2 * k, 8 * k)
    assert cost("aten::_int_mm", "signed char", self=(m, k), mat2=(k, n)) == (one, m * k + k * n + 4 * m * n)
    fp8 = "c10::Float8_e4m3fn"
    scales = {"scale_a": ((), F32), "scale_b": ((), F32)}
    scaled = cost("aten::_scaled_mm", fp8, self=(m, k), mat2=(k, n), **scales, out_dtype="15")
    assert scaled == (one, m * k + k * n + 2 * m * n)


@pytest.mark.parametrize(("a", "b", "macs"), [
    ((5,), (5,), 5), ((3, 5), (5,), 15), ((5,), (5, 7), 35), ((3, 5), (5, 7), 105), ((2, 3, 5), (5, 7), 210),
    ((4, 1, 3, 5), (2, 5, 7), 840), ((2, 3, 5), (5,), 30),
])
def test_matmul_broadcasts_as_torch_does(a, b, macs):
    left, right = torch.empty(a), torch.empty(b)
    elements = left.numel() + right.numel() + torch.matmul(left, right).numel()
    assert cost("aten::matmul", self=a, other=b) == (2 * macs, 4 * elements)


def test_a_product_with_a_sparse_matrix_has_no_cost():
    """The profiler records its sizes, as of any other, but no strides. Where it recorded none of any tensor, that says nothing."""
    sparse, dense = ((64, 128), F32, ()), ((128, 16), F32, (16, 1))
    for one in (recorded("aten::mm", self=sparse, mat2=dense),
                recorded("aten::addmm", self=((64, 16), F32, (16, 1)), mat1=sparse, mat2=dense)):
        assert flops.explained("aten::addmm" if len(one.dims) > 2 else "aten::mm", one) == (None, SPARSE)
    assert cost("aten::mm", self=sparse, mat2=((128, 16), F32, ()))[0] == 2 * 64 * 128 * 16


def convolution(shape, channels, kernel, stride, padding, dilation, groups, transposed):
    """(closed form of the FLOPs, numbers of elements of input, weights and output), by running it."""
    dims = len(shape) - 2
    functions = {(1, False): torch.conv1d, (2, False): torch.conv2d, (3, False): torch.conv3d,
                 (1, True): torch.conv_transpose1d, (2, True): torch.conv_transpose2d}
    size = (kernel,) * dims
    weights = (shape[1], channels // groups, *size) if transposed else (channels, shape[1] // groups, *size)
    out = functions[dims, transposed](torch.empty(shape), torch.empty(weights), stride=stride, padding=padding,
                                      dilation=dilation, groups=groups)
    per_output = torch.empty(shape).numel() if transposed else out.numel()
    return 2 * per_output * weights[1] * kernel**dims, weights, tuple(out.shape)


PLAIN = {"stride": 1, "padding": 0, "dilation": 1, "groups": 1, "transposed": False}
CASES = {
    "plain": {"shape": (2, 8, 14, 14), "channels": 16, "kernel": 3},
    "strided": {"shape": (2, 8, 15, 13), "channels": 16, "kernel": 3, "stride": 2, "padding": 1},
    "dilated": {"shape": (2, 8, 20, 20), "channels": 4, "kernel": 3, "padding": 2, "dilation": 2},
    "grouped": {"shape": (2, 8, 14, 14), "channels": 16, "kernel": 3, "padding": 1, "groups": 4},
    "depthwise": {"shape": (2, 8, 14, 14), "channels": 8, "kernel": 5, "padding": 2, "groups": 8},
    "1d": {"shape": (2, 8, 50), "channels": 16, "kernel": 5, "stride": 2, "padding": 2},
    "3d": {"shape": (1, 4, 6, 7, 8), "channels": 8, "kernel": 3, "padding": 1},
    "transposed": {"shape": (2, 8, 7, 7), "channels": 16, "kernel": 4, "stride": 2, "padding": 1, "transposed": True},
    "transposed 1d, grouped": {"shape": (2, 8, 9), "channels": 16, "kernel": 4, "stride": 2, "padding": 1,
                               "groups": 2, "transposed": True},
}


@pytest.mark.parametrize("name", CASES)
def test_convolutions_and_their_gradients(name):
    case = PLAIN | CASES[name]
    shape, transposed = case["shape"], case["transposed"]
    want, weights, out = convolution(**case)
    dims = len(shape) - 2

    def listed(value):
        return str([value] * dims)

    numbers = {name: listed(case[name]) for name in ("stride", "padding", "dilation")}
    numbers["groups"] = str(case["groups"])
    extra = {"output_padding": listed(0)} if transposed else {}
    moved = sum(torch.empty(size).numel() for size in (shape, weights, out)) * 4
    forward = cost("aten::convolution", input=shape, weight=weights, **numbers, transposed=str(transposed),
                   output_padding=listed(0))
    assert forward == (want, moved)
    names = ["aten::cudnn_convolution_transpose", "aten::miopen_convolution_transpose"] if transposed else \
        ["aten::cudnn_convolution", "aten::mkldnn_convolution", "aten::miopen_convolution"]
    for backend in names:
        assert cost(backend, self=shape, weight=weights, **numbers, **extra) == (want, moved), backend
    plain = f"aten::conv{'_transpose' if transposed else ''}{dims}d"
    assert cost(plain, input=shape, weight=weights, **numbers, **extra) == (want, moved)
    given_ = {"grad_output": out, "input": shape, "weight": weights, **numbers, "transposed": str(transposed)}
    both = cost("aten::convolution_backward", **given_, output_mask="[True, True, False]")
    one = cost("aten::convolution_backward", **given_, output_mask="[False, True, True]")
    assert both[0] == 2 * want and one[0] == want
    n_in, n_weights, n_out = (torch.empty(size).numel() for size in (shape, weights, out))
    assert both[1] == 4 * (n_out + 2 * n_in + 2 * n_weights)
    assert one[1] == 4 * (n_out + n_in + n_weights + out[1])


def test_what_a_cpu_calls_for_small_convolutions():
    """`aten::_convolution` hands 1x1 convolutions of one thread to these."""
    case = PLAIN | {"shape": (8, 64, 32, 32), "channels": 32, "kernel": 1}
    want, weights, out = convolution(**case)
    numbers = {"kernel_size": "[1, 1]", "stride": "[1, 1]", "padding": "[0, 0]"}
    for name in ("_slow_conv2d_forward", "thnn_conv2d"):
        assert cost(f"aten::{name}", self=case["shape"], weight=weights, bias=(32,), **numbers)[0] == want
    given_ = {"grad_output": out, "self": case["shape"], "weight": weights, **numbers}
    assert cost("aten::_slow_conv2d_backward", **given_, output_mask="[True, True, False]")[0] == 2 * want
    assert cost("aten::_slow_conv2d_backward", **given_, output_mask="[False, True, True]")[0] == want


def test_other_convolutions_without_a_library():
    want, weights, _ = convolution(**(PLAIN | CASES["3d"]))
    numbers = {"kernel_size": "[3, 3, 3]", "stride": "[1, 1, 1]", "padding": "[1, 1, 1]"}
    assert cost("aten::slow_conv3d_forward", self=CASES["3d"]["shape"], weight=weights, **numbers)[0] == want
    want, weights, _ = convolution(**(PLAIN | CASES["transposed"]))
    numbers = {"kernel_size": "[4, 4]", "stride": "[2, 2]", "padding": "[1, 1]", "output_padding": "[0, 0]", "dilation": "[1, 1]"}
    assert cost("aten::slow_conv_transpose2d", self=CASES["transposed"]["shape"], weight=weights, **numbers)[0] == want


def test_convolutions_of_2021_without_recorded_numbers():
    """Strides were not recorded then: the forward pass is not modelled, the gradient of the input is."""
    old = Signature(((), (32, 256, 14, 14), (256, 1024, 1, 1)), ("GenericList", F32, F32))
    found = flops.cost("aten::cudnn_convolution_backward_input", old)
    assert found is not None and found.flops == 2 * 32 * 256 * 14 * 14 * 1024
    forward = Signature(((32, 1024, 14, 14), (256, 1024, 1, 1)), (F32, F32))
    assert flops.cost("aten::cudnn_convolution", forward) is None
    assert "no recorded" in flops.explained("aten::cudnn_convolution", forward)[1]


B, H, L, S, D = 2, 8, 96, 64, 32
FORWARD = 4 * B * H * L * S * D


@pytest.mark.parametrize(("name", "flag"), [
    ("scaled_dot_product_attention", {"is_causal": "{}"}),
    ("_scaled_dot_product_flash_attention", {"is_causal": "{}"}),
    ("_scaled_dot_product_flash_attention_for_cpu", {"is_causal": "{}"}),
    ("_scaled_dot_product_efficient_attention", {"is_causal": "{}"}),
    ("_scaled_dot_product_cudnn_attention", {"is_causal": "{}"}),
    ("_flash_attention_forward", {"is_causal": "{}"}),
    ("_efficient_attention_forward", {"custom_mask_type": "{:d}"}),
    ("_cudnn_attention_forward", {"is_causal": "{}"}),
    ("_scaled_dot_product_flash_attention_backward", {"is_causal": "{}"}),
    ("_scaled_dot_product_flash_attention_for_cpu_backward", {"is_causal": "{}"}),
    ("_scaled_dot_product_efficient_attention_backward", {"is_causal": "{}"}),
    ("_scaled_dot_product_cudnn_attention_backward", {"is_causal": "{}"}),
    ("_flash_attention_backward", {"is_causal": "{}"}),
    ("_efficient_attention_backward", {"custom_mask_type": "{:d}"}),
])
@pytest.mark.parametrize("causal", [False, True])
def test_attention(name, flag, causal):
    heads_last = name.startswith(("_flash", "_efficient"))
    q, kv = ((B, L, H, D), (B, S, H, D)) if heads_last else ((B, H, L, D), (B, H, S, D))
    given_ = {"query": q, "key": kv, "value": kv, **{key: text.format(causal) for key, text in flag.items()}}
    if name.endswith("backward"):
        grad = "grad_out_" if "efficient" in name else "grad_out"
        given_ |= {grad: q, "out": q, "logsumexp": (B, H, L)}
    found, moved = cost(f"aten::{name}", BF16, **given_)
    want = FORWARD * 5 // 2 if name.endswith("backward") else FORWARD
    assert found == want // 2 if causal else found == want
    tensors = 2 * (2 * B * H * L * D + 2 * B * H * S * D)
    sums = 0 if name == "scaled_dot_product_attention" else 4 * B * H * L
    assert moved == (2 * tensors + sums if name.endswith("backward") else tensors + sums)


def test_attention_with_fewer_keys_than_queries_counts_queries():
    found, moved = cost("aten::_scaled_dot_product_flash_attention", BF16, query=(B, 8, L, D), key=(B, 2, L, D),
                        value=(B, 2, L, D), is_causal="False")
    assert found == 4 * B * 8 * L * L * D
    assert moved == 2 * (2 * B * 8 * L * D + 2 * B * 2 * L * D) + 4 * B * 8 * L


def test_attention_over_sequences_of_unknown_lengths_is_not_guessed():
    name = "aten::_flash_attention_forward"
    varying = recorded(name, BF16, query=(100, H, D), key=(100, H, D), value=(100, H, D), is_causal="True")
    assert flops.cost(name, varying) is None


@pytest.mark.parametrize(("name", "flag", "offsets"), [
    ("_efficient_attention_forward", {"custom_mask_type": "0"}, "cu_seqlens_q"),
    ("_efficient_attention_backward", {"custom_mask_type": "0"}, "cu_seqlens_q"),
    ("_cudnn_attention_forward", {"is_causal": "False"}, "cum_seq_q"),
    ("_scaled_dot_product_cudnn_attention_backward", {"is_causal": "False"}, "cum_seq_q"),
])
def test_sequences_that_lie_end_to_end_in_one_row_do_not_attend_to_each_other(name, flag, offsets):
    """[1, tokens, H, D] with offsets: counted as one sequence, its cost would be quadratic in all tokens."""
    given_ = dict.fromkeys(("query", "key", "value"), (1, 400, H, D)) | flag
    assert cost(f"aten::{name}", BF16, **given_, **{offsets: (2,)})[0] > 0
    found, reason = flops.explained(f"aten::{name}", recorded(f"aten::{name}", BF16, **given_, **{offsets: (5,)}))
    assert found is None and reason == "the lengths of its sequences were not recorded"


def test_recurrent_nets():
    layer = recorded("aten::mkldnn_rnn_layer", input=(7, 3, 16), weight0=(128, 16), weight1=(128, 32), weight2=(128,),
                     weight3=(128,))
    found = flops.cost("aten::mkldnn_rnn_layer", layer)
    assert found is not None and found.flops == 2 * 7 * 3 * (128 * 16 + 128 * 32)
    layer = {"input": (7, 3, 16), "weight1": (128, 16), "weight2": (128, 32), "weight3": (128,), "weight4": (128,)}
    assert cost("aten::mkldnn_rnn_layer_backward", **layer)[0] == 2 * found.flops
    weights = [(128, 16), (128, 32), (128,), (128,)]
    assert cost("aten::_cudnn_rnn", hint="float32", input=(21, 16), weight=weights)[0] == found.flops, "packed"
    assert cost("aten::_cudnn_rnn", hint="float32", input=(7, 3, 16), weight=weights)[0] == found.flops
    assert cost("aten::_cudnn_rnn_backward", hint="float32", input=(7, 3, 16), weight=weights)[0] == 2 * found.flops


@pytest.mark.parametrize(("name", "given_", "form", "moved", "arithmetic"), [
    ("add", {"self": (4, 100), "other": (4, 100)}, F32, 4 * 1200, 400),
    ("add", {"self": (4, 100), "other": ((), F32)}, F32, 4 * 801, 400),
    ("add_", {"self": (4, 100), "other": (100,)}, F32, 4 * 900, 400),
    ("mul", {"self": (4, 1), "other": (1, 100)}, BF16, 2 * 504, 400),
    ("mul", {"self": (400,), "other": ((400,), F32)}, BF16, 2 * 400 + 4 * 800, 400),
    ("gt", {"self": (400,), "other": (400,)}, F32, 8 * 400 + 400, 400),
    ("where", {"condition": ((400,), "bool"), "self": (400,), "other": (400,)}, F32, 400 + 12 * 400, 400),
    ("copy_", {"self": (400,), "src": ((400,), F32)}, BF16, 6 * 400, 0),
    ("fill_", {"self": (400,)}, BF16, 800, 0),
    ("sum", {"self": (4, 100), "dim": "[1]"}, F32, 4 * 404, 400),
    ("sum", {"self": (4, 100), "dim": "[-2]"}, F32, 4 * 500, 400),
    ("mean", {"self": (4, 100)}, F32, 4 * 401, 400),
    ("argmax", {"self": (4, 100), "dim": "0"}, F32, 4 * 500, 400),
    ("_softmax", {"self": (4, 100), "dim": "1", "half_to_float": "False"}, BF16, 1600, 2000),
    ("_softmax", {"self": (4, 100), "dim": "1", "half_to_float": "True"}, BF16, 2400, 2000),
    ("_softmax_backward_data", {"grad_output": (4, 100), "output": (4, 100), "input_dtype": "6"}, F32, 4800, 1600),
    ("native_layer_norm", {"input": (4, 100), "weight": (100,), "bias": (100,)}, F32, 4 * 1000, 3200),
    ("native_layer_norm_backward", {"grad_out": (4, 100), "input": (4, 100), "mean": (4, 1), "rstd": (4, 1),
                                    "weight": (100,), "bias": (100,)}, F32, 4 * (1200 + 8 + 300), 5600),
    ("cudnn_batch_norm_backward", {"input": (4, 10, 5, 2), "grad_output": (4, 10, 5, 2), "weight": (10,)}, F32,
     4 * (1200 + 30), 5600),
    ("native_batch_norm_backward", {"grad_out": (4, 10, 5, 2), "input": (4, 10, 5, 2), "weight": (10,)}, F32,
     4 * (1200 + 30), 5600),
    ("native_dropout", {"input": (400,)}, F32, 4 * 800 + 400, 800),
    ("embedding", {"weight": (50, 16), "indices": ((4, 100), I64)}, F32, 4 * (50 * 16 + 400 * 16) + 8 * 400, 0),
    ("embedding_dense_backward", {"grad_output": (4, 100, 16), "indices": ((4, 100), I64), "num_weights": "50"}, F32,
     4 * (400 * 16 + 50 * 16) + 3200, 6400),
    ("index_select", {"self": (50, 16), "dim": "0", "index": ((400,), I64)}, F32, 4 * (50 * 16 + 400 * 16) + 3200, 0),
    ("gather", {"self": (4, 100), "dim": "1", "index": ((4, 10), I64)}, F32, 4 * 80 + 320, 0),
    ("nll_loss_forward", {"self": (4, 100), "target": ((4,), I64)}, F32, 32, 4),
    ("nll_loss_backward", {"grad_output": ((), F32), "self": (4, 100), "target": ((4,), I64)}, F32, 1632, 0),
    ("max_pool2d_with_indices", {"self": (2, 3, 8, 8), "kernel_size": "[2, 2]", "stride": "[]", "padding": "[0, 0]",
                                 "dilation": "[1, 1]", "ceil_mode": "False"}, F32, 4 * (384 + 96) + 8 * 96, 384),
    ("avg_pool2d", {"self": (2, 3, 9, 9), "kernel_size": "[2]", "stride": "[2]", "padding": "[0]",
                    "ceil_mode": "True"}, F32, 4 * (486 + 150), 600),
    ("upsample_nearest2d", {"self": (2, 3, 4, 4), "output_size": "[8, 8]"}, F32, 4 * (96 + 384), 384),
    ("_to_copy", {"self": (400,), "dtype": "15"}, F32, 6 * 400, 0),
])
def test_memory_bound_operators(name, given_, form, moved, arithmetic):
    assert cost(f"aten::{name}", form, **given_) == (arithmetic, moved)


def test_what_is_repeated_is_read_once():
    expanded = {"self": ((64, 100), F32, (100, 1)), "other": ((64, 100), F32, (0, 1))}
    assert cost("aten::add", **expanded)[1] == 4 * (6400 + 100 + 6400)
    windows = {"self": ((50, 10), F32, (1, 1))}     # unfolded: 59 values behind 500
    assert cost("aten::relu", **windows)[1] == 4 * (59 + 500)


@pytest.mark.parametrize(("name", "given_", "moved", "arithmetic"), [
    ("_foreach_add_", {"self": [(10, 10), (50,)], "other": [(10, 10), (50,)]}, 3 * 150, 150),
    ("_foreach_mul_", {"self": [(10, 10), (50,)], "scalar": "0.9"}, 2 * 150, 150),
    ("_foreach_addcdiv_", {"self": [(150,)], "tensor1": [(150,)], "tensor2": [(150,)]}, 4 * 150, 450),
    ("_foreach_sqrt", {"self": [(150,)]}, 300, 150), ("_foreach_norm", {"self": [(150,)]}, 150, 150),
    ("_foreach_copy_", {"self": [(150,)], "src": [(150,)]}, 300, 0), ("_foreach_zero_", {"self": [(150,)]}, 150, 0),
    ("_fused_adamw_", {"self": [(150,)], "grads": [(150,)], "exp_avgs": [(150,)], "exp_avg_sqs": [(150,)],
                       "max_exp_avg_sqs": [], "state_steps": [()]}, 7 * 150, 13 * 150),
    ("_fused_sgd_", {"self": [(150,)], "grads": [(150,)], "momentum_buffer_list": []}, 3 * 150, 5 * 150),
    ("cat", {"tensors": [(10, 10), (50,)]}, 300, 0),
])
def test_lists_of_tensors_take_the_format_of_the_hint(name, given_, moved, arithmetic):
    assert cost(f"aten::{name}", hint="float32", **given_) == (arithmetic, 4 * moved)
    assert cost(f"aten::{name}", hint="bfloat16", **given_) == (arithmetic, 2 * moved)
    assert flops.cost(f"aten::{name}", recorded(f"aten::{name}", **given_)) is None, "the format is not recorded"


@pytest.mark.parametrize(("kernel", "found"), [
    ("void multi_tensor_apply_kernel<TensorListMetadata<4>, AddcdivFunctor<float, 3>, std::plus<float>>", "float32"),
    ("void multi_tensor_apply_kernel<TensorListMetadata<2>, Binary<c10::BFloat16, 2>, std::plus<float>>", "bfloat16"),
    ("void CatArrayBatchedCopy_aligned16_contig<at::native::OpaqueType<4u>, unsigned int, 3, 64, 64>", "bits32"),
    ("void vectorized_elementwise_kernel<4, CUDAFunctor_add<c10::Half>>", "float16"), ("ampere_sgemm_128x64_tn", ""),
    ("void something_double_buffered<int>", ""), (f"void k<OpaqueType<{'9' * 5000}u>>", ""),
])
def test_formats_in_kernel_names(kernel, found):
    assert flops.format_in(kernel) == found


def test_kernels_that_inductor_wrote_move_their_arguments():
    """As recorded from torch.compile: tensors, then sizes."""
    fused = Signature(((8, 64, 32), (512, 32), (32,), ()), (BF16, BF16, F32, "Scalar"), (), ("", "", "", "16384"))
    found = flops.cost("triton_poi_fused__unsafe_view_mul_silu_2", fused)
    assert (found.bytes, found.flops, found.kind) == (2 * 2 * 512 * 32 + 4 * 32, 512 * 32, "memory")
    assert flops.cost("triton_tem_fused_mm_3", fused) is None, "a template multiplies matrices"
    assert flops.cost("triton_red_fused_sum_1", Signature()) is None


def test_arithmetic_only_counts_what_matrix_units_do():
    matrix = flops.cost("aten::mm", recorded("aten::mm", BF16, self=(8, 8), mat2=(8, 8)))
    plain = flops.cost("aten::add", recorded("aten::add", BF16, self=(8, 8), other=(8, 8)))
    assert matrix.multiplies and matrix.dtype == "bfloat16"
    assert not plain.multiplies and plain.kind == "memory"


@pytest.mark.parametrize(("name", "signature"), [
    ("aten::mm", Signature(((4, 8), (9, 2)), (F32, F32))), ("aten::mm", Signature(((4, 8),), (F32,))),
    ("aten::mm", Signature(((4, 8), (8, 2)), ("", ""))), ("aten::mm", Signature(((4, -8), (-8, 2)), (F32, F32))),
    ("aten::mm", Signature(((4, 8), (8, 2)), ("weird::Type", F32))),
    ("aten::add", Signature(((3,), (4,)), (F32, F32))),
    ("nothing::known", Signature(((4,),), (F32,))), ("aten::unheard_of", Signature(((4,),), (F32,))),
    ("aten::sum", Signature()), ("aten::cat", Signature(((),), ("TensorList",), concrete=("",))),
    ("aten::_foreach_add_", Signature(((), ()), ("TensorList", "Scalar"))),
    ("aten::conv2d", recorded("aten::conv2d", input=(1, 1, 4, 4), weight=(1, 1, 3, 3), stride="[0, 0]",
                              padding="[0, 0]", dilation="[1, 1]", groups="1")),
    ("aten::conv2d", recorded("aten::conv2d", input=(1, 1, 2, 2), weight=(1, 1, 9, 9), stride="[1, 1]",
                              padding="[0, 0]", dilation="[1, 1]", groups="1")),
])
def test_what_cannot_be_known_is_none_with_a_reason(name, signature):
    found, reason = flops.explained(name, signature, "float32")
    assert found is None and reason


ANYTHING = st.recursive(st.integers(-2, 1 << 70) | st.text(max_size=3) | st.none() | st.floats() | st.booleans(),
                        lambda inner: st.lists(inner, max_size=4).map(tuple), max_leaves=6)
NAMES = ["triton_per_fused_0", *_matrix_costs.FORMULAS]
NAMES += [f"aten::_foreach_{name}_" for name in (*_memory_costs.FOREACH, "copy", "zero")]
NAMES += [f"aten::{name}" for table in ("ELEMENTWISE", "SHAPED", "REDUCTIONS", "FUSED", "SPECIAL")
          for name in getattr(_memory_costs, table)]


@given(st.sampled_from(NAMES), st.lists(ANYTHING, max_size=12), st.lists(st.sampled_from(
    [F32, BF16, I64, "bool", "Scalar", "ScalarList", "TensorList", "GenericList", "", "junk"]), max_size=12),
    st.lists(ANYTHING, max_size=12), st.lists(st.sampled_from(
        ["", "1", "0", "[1, 1]", "[]", "[0]", "True", "[True, False, True]", "-3", f"[{9**30}]", "\0"]), max_size=12),
    st.sampled_from(["", "float32", "junk"]))
def test_no_trace_makes_it_raise(name, dims, types, strides, concrete, hint):
    found = flops.cost(name, Signature(tuple(dims), tuple(types), tuple(strides), tuple(concrete)), hint)
    assert found is None or (found.flops >= 0 and found.bytes >= 0)


SIZES = st.lists(st.integers(0, 6), max_size=4).map(tuple)


@given(st.sampled_from(NAMES), st.lists(SIZES, min_size=12, max_size=12), st.lists(st.sampled_from(
    ["1", "0", "[1, 1]", "[2, 2]", "[0]", "True", "False", "[True, True, False]", "6"]), min_size=16, max_size=16))
def test_nor_do_sizes_that_look_right(name, dims, concrete):
    found = flops.cost(name, Signature(tuple(dims), (F32,) * 12, (), tuple(concrete)), "float32")
    assert found is None or (found.flops >= 0 and found.bytes >= 0)


def test_distances_are_the_product_that_computes_them() -> None:
    """The same FLOPs whether the operator is counted, as inside a step, or what it calls, as in a trace."""
    with torch.profiler.profile(record_shapes=True, activities=[torch.profiler.ProfilerActivity.CPU]) as recorded_:
        torch.cdist(torch.ones(40, 8), torch.ones(50, 8))
    inner = next(event for event in recorded_.events() if event.name in ("aten::mm", "aten::bmm"))
    called = flops.cost(inner.name, recorded(inner.name, self=(40, 10), mat2=(10, 50)))
    assert [tuple(sizes) for sizes in inner.input_shapes] == [(40, 10), (10, 50)]
    whole = flops.cost("aten::_euclidean_dist", recorded("aten::_euclidean_dist", x1=(40, 8), x2=(50, 8)))
    assert called is not None and whole is not None and called.flops == whole.flops == 40_000
