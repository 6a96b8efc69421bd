"""What a trace can tell the rules, and what stays None."""

from __future__ import annotations

from dataclasses import fields, replace
from typing import Any

import msgspec
import pytest
from traces import V100, Recording, training

from saturate.records.analysis import Operator
from saturate.records.observations import CompilerSeen, CopySeen, KernelsSeen, MemorySeen, Observations
from saturate.trace import _matrix_costs, patterns
from saturate.trace.analyze import analyze_one
from saturate.trace.columns import Trace
from saturate.trace.observe import observations


def seen(trace: Trace) -> Observations:
    return observations(trace, analyze_one(trace).devices[0])


def steps(made: Recording, count: int = 2, length: int = 1_000_000) -> Recording:
    for number in range(count):
        made.step(number * length, (number + 1) * length)
    return made


def test_an_ordinary_training() -> None:
    found = seen(training(3, step_ns=1_000_000, rank=1))
    assert (found.device, found.device_name, found.capability, found.bf16_native) \
        == ("cuda", "Tesla V100-SXM2-32GB", (7, 0), False)
    assert (found.steps, found.step_ms, found.busy) == (3, 1.0, 0.78)
    assert (found.input_wait, found.input_wait_raw) == (0.1, 0.1)
    assert (found.sync_idle, found.device_wait) == (0.0, 0.0)
    assert found.kernels == KernelsSeen(
        count_per_step=4.0, short_share=0.0, median_us=200.0, median_launch_delay_us=30.0, queue_shallow=1.0,
        host_late=pytest.approx(0.18), graph_replay=False)
    assert found.copies == CopySeen(pageable_bytes=1 << 20, pageable_ms=0.04, pinned_bytes=0, exposed=0.04,
                                    exposed_from_host=0.04)
    assert (found.communication.world_size, found.communication.exposed, found.communication.overlap) == (2, 0.2, 0.2)
    assert (found.loader.num_workers, found.limit, found.integrity_blocks) == (0, "communication-bound", frozenset())


def test_what_was_not_recorded_is_none() -> None:
    made = steps(Recording(V100))
    made.kernel("k", 10, 500_000, launched=5)
    found = seen(made.trace())
    for name in ("input_wait", "forward", "backward", "optimizer", "overhead", "attention_eager", "gc_pause"):
        assert getattr(found, name) is None, name
    assert found.loader.num_workers is None and found.memory == MemorySeen() and found.compiler == CompilerSeen()
    assert found.communication.overlap is None and found.communication.exposed == 0.0, "none is 0, not unknown"


def test_what_the_trace_cannot_carry_is_none_and_named() -> None:
    trace = training()
    trace.problems.append(("lost-records", "lost"))
    found = seen(trace)
    assert {"busy", "gaps", "kernels"} <= found.integrity_blocks
    assert (found.busy, found.input_wait, found.sync_idle) == (None, None, None)
    assert found.kernels.host_late is None is found.kernels.median_us


def test_what_a_lost_device_did_is_not_told_from_the_hosts_operators() -> None:
    """The optimizer's share of operators is not its share of the step, where a device ran what it launched."""
    made = steps(Recording())
    for at in (0, 1_000_000):
        made.annotation("Optimizer.step#SGD.step", at + 500_000, at + 800_000)
        made.operator("aten::add_", at + 510_000, at + 790_000)
    whole, lost = made.trace(), made.trace(problems=[("lost-records", "9,096 events could not be read")])
    assert seen(whole).optimizer and seen(whole).overhead is not None
    assert seen(lost).optimizer is None is seen(lost).overhead
    device = analyze_one(lost).devices[0]
    assert (device.verdict, device.name, device.kernels) == ("unknown", "", None) and device.unknown["verdict"]
    assert analyze_one(whole).devices[0].name == "cpu"


def test_copies_whose_memory_is_not_named_are_not_counted_as_pinned() -> None:
    """HIP writes "Host -> Device"."""
    made = steps(Recording(V100))
    made.kernel("k", 10, 500_000, launched=5)
    made.copy("Memcpy HtoD (Host -> Device)", 600_000, 700_000, bytes=10, launched=5)
    found = seen(made.trace()).copies
    assert (found.pageable_bytes, found.pageable_ms, found.pinned_bytes, found.exposed) == (None, None, None, 0.05)


def test_syncs_by_call_and_operator() -> None:
    made = steps(Recording(V100))
    made.kernel("k", 10, 500_000, launched=5)
    for at in (100_000, 200_000, 1_100_000):
        made.operator("aten::item", at, at + 50_000)
        made.call("cudaStreamSynchronize", at + 10_000, at + 40_000)
    made.operator("aten::copy_", 700_000, 800_000)
    made.copy("Memcpy HtoD (Pageable -> Device)", 710_000, 720_000, launched=705_000)
    made.call("cudaStreamSynchronize", 730_000, 790_000)
    made.call("cudaStreamSynchronize", 2_100_000, 2_200_000)                    # after the last step
    made.call("cudaEventSynchronize", 100_000, 900_000, thread="1/9")           # a pinning thread
    found = seen(made.trace()).syncs
    assert [(one.where, one.what, one.calls_per_step, one.ms_per_step) for one in found] == [
        ("aten::item", "cudaStreamSynchronize", 1.5, 0.045),
        ("aten::copy_", "cudaStreamSynchronize (HtoD)", 0.5, 0.03)]


def test_a_copy_to_the_device_is_named_by_the_line_that_its_label_tells() -> None:
    """As `agent.hostsyncs` writes it; the same operator elsewhere stays what it was."""
    made = steps(Recording(V100))
    for at, label in ((100_000, "saturate.upload /home/u/train.py:12 Tensor.to"), (300_000, "")):
        if label:
            made.annotation(label, at - 1_000, at + 99_000)
        made.operator("aten::copy_", at, at + 90_000)
        made.copy("Memcpy HtoD (Pageable -> Device)", at + 10_000, at + 20_000, launched=at + 5_000)
        made.call("cudaStreamSynchronize", at + 30_000, at + 80_000)
    found = {(one.where, one.what): one.ms_per_step for one in seen(made.trace()).syncs}
    assert found == {("/home/u/train.py:12", "Tensor.to (HtoD)"): 0.025, ("aten::copy_", "cudaStreamSynchronize (HtoD)"): 0.025}


def test_the_queue_is_shallow_where_nothing_is_launched_ahead() -> None:
    def queued(*launches: int) -> float | None:
        made = steps(Recording(V100))
        for number, launched in enumerate(launches):
            made.kernel("k", 10_000 * (number + 1), 10_000 * (number + 1) + 9_000, launched=launched)
        return seen(made.trace()).kernels.queue_shallow

    assert queued(9_000, 19_000, 29_000, 39_000) == 1.0
    assert queued(1, 2, 3, 4) == 0.5, "the third and the fourth find two and three waiting"


def test_a_replayed_graph_has_no_launches_of_its_own() -> None:
    made = steps(Recording(V100))
    graph = made.call("cudaGraphLaunch", 10, 20)
    for number in range(9):
        made.kernel("k", 100 + 20_000 * number, 10_100 + 20_000 * number, correlation=graph)
    found = seen(made.trace())
    assert found.kernels.graph_replay and found.kernels.queue_shallow is None is found.kernels.median_launch_delay_us
    assert "roofline" in found.integrity_blocks


def test_the_optimizer() -> None:
    def optimizer(name: str, inside: str) -> Observations:
        made = steps(Recording(V100))
        for at in (0, 1_000_000):
            made.annotation(f"Optimizer.step#{name}.step", at + 500_000, at + 800_000)
            made.operator(inside, at + 510_000, at + 520_000, dims=(((4, 4), (8,), (2, 2)), ()),
                          types=("TensorList", ""))
            made.kernel("k", at + 600_000, at + 800_000, launched=at + 515_000)
        return seen(made.trace())

    plain, fused = optimizer("AdamW", "aten::_foreach_add_"), optimizer("AdamW", "aten::_fused_adamw_")
    assert (plain.optimizer_kind, plain.optimizer_fused, plain.optimizer_tensors) == ("AdamW", False, 3)
    assert plain.optimizer == 0.2
    assert fused.optimizer_fused is True and plain.forward is None is plain.backward, "no backward pass was marked"
    assert optimizer("FusedAdam", "aten::add").optimizer_fused is True


def test_memory_at_its_peak() -> None:
    made = steps(Recording(V100))
    made.kernel("k", 10, 500_000, launched=5)
    for time, allocated, reserved in ((0, 1 << 30, 2 << 30), (5, 16 << 30, 20 << 30), (9, 2 << 30, 24 << 30)):
        made.allocation(time, allocated, reserved)
    made.allocation(7, 31 << 30, 31 << 30, device=-1)
    assert seen(made.trace()).memory == MemorySeen(used=0.5, held=0.625, fragmentation=0.2)


def test_compilation() -> None:
    made = steps(Recording(V100))
    made.kernel("triton_poi_fused_add_0", 10, 500_000, launched=5)
    made.operator("aten::add", 0, 10)
    made.annotation("entire_frame_compile (dynamo_timed)", 100_000, 500_000)
    made.annotation("compile_inner (dynamo_timed)", 200_000, 300_000)
    found = seen(made.trace()).compiler
    assert (found.compiled, found.compile_share) == (True, 0.2)


def test_a_cpu_trace() -> None:
    """Two steps of 1 ms: 0.2 ms loader with an operator in it, linear 0.3-0.5 around addmm, two reads of values."""
    made = Recording()
    steps(made)
    for at in (0, 1_000_000):
        made.loader(at, at + 200_000)
        made.operator("aten::stack", at + 10_000, at + 100_000)
        made.operator("aten::linear", at + 300_000, at + 500_000)
        made.operator("aten::addmm", at + 300_000, at + 490_000, dims=((4,), (8, 8), (8, 4)), types=("float",) * 3)
        for read in (600_000, 700_000):
            made.operator("aten::item", at + read, at + read + 5_000)
            made.operator("aten::_local_scalar_dense", at + read + 1_000, at + read + 4_000)
    found = seen(made.trace())
    assert (found.device, found.steps, found.input_wait, found.input_wait_raw) == ("cpu", 2, 0.2, 0.2)
    assert (found.busy, found.overhead) == (0.21, 0.59) and found.sync_idle is None is found.kernels.host_late
    # Of the linear 10 us are its own; of each read 2 us, and 3 us those of the operator inside it.
    assert found.kernels == KernelsSeen(count_per_step=3.0, short_share=pytest.approx(2 / 3), short_time=0.01, median_us=3.0)
    assert [(one.what, one.calls_per_step, one.ms_per_step) for one in found.syncs] == [("aten::item", 2.0, 0.01)]
    assert found.fp32_matmul == pytest.approx(0.19) and "aten::addmm" in [one.name for one in found.operators]
    assert found.copies == CopySeen()


@pytest.mark.parametrize("streams", [1, 2, 3])
def test_streams_at_once_take_the_step_once(streams: int) -> None:
    made = steps(Recording(V100))
    for at in (0, 1_000_000):
        for stream in range(streams):
            begun = at + 10 * stream
            made.operator("aten::mm", begun, begun + 5, dims=((1024, 1024), (1024, 1024)), types=("float",) * 2)
            made.kernel("volta_sgemm_128x64_nn", at + 100_000, at + 1_000_000, launched=begun + 2, stream=7 + stream)
    found = seen(made.trace())
    product = found.operators[0]
    assert found.fp32_matmul == product.share == pytest.approx(0.9)
    assert 0.0 < product.recoverable <= 0.9


def test_it_is_pure() -> None:
    trace = training()
    device = analyze_one(trace).devices[0]
    first, second = observations(trace, device), observations(trace, device)
    assert all(getattr(first, field.name) == getattr(second, field.name) for field in fields(Observations))


def operator(name: str, shapes: str = "", dtypes: str = "float32", time_ns: int = 10, **columns: Any) -> Operator:
    return Operator(**{"name": name, "shapes": shapes, "dtypes": dtypes, "calls": 1, "kernels": [],
                       "time_ns": time_ns, "flops": None, "bytes": None, **columns})


def ns(found: list[Operator] | None) -> int | None:
    return None if found is None else sum(one.time_ns for one in found)


def test_sizes_from_the_text_of_a_record() -> None:
    assert patterns.dims(operator("aten::bmm", "[16, 5185, 64] [16, 64, 5185]")) == ((16, 5185, 64), (16, 64, 5185))
    assert patterns.dims(operator("aten::cat", "4 tensors of 1,024 elements [3]")) == ((3,),)
    assert patterns.dims(operator("aten::add")) == ()


@pytest.mark.parametrize("product, expected", [
    ("[16, 128, 64] [16, 64, 128]", 22),        # Q K^T, and the mask that is added
    ("[16, 128, 128] [16, 128, 64]", 22),       # A V, and dA K
    ("[16, 64, 128] [16, 128, 128]", 22),       # the transposed: K's and V's gradients
    ("[16, 128, 64] [16, 64, 96]", 0),          # another length
    ("[8, 128, 64] [8, 64, 128]", 0),           # another batch
])
def test_attention_written_out(product: str, expected: int) -> None:
    found = [operator("aten::_softmax", "[2, 8, 128, 128] []", time_ns=5), operator("aten::bmm", product, time_ns=7),
             operator("aten::_softmax", "[2, 8, 256, 256] []", time_ns=100), operator("aten::add", "[8, 2, 256, 128]"),
             operator("aten::add", "[2, 8, 128, 128]"), operator("aten::mm", "[2, 8, 128, 128]"), operator("aten::gelu", "[128, 128]")]
    assert ns(patterns.eager_attention(found)) == expected
    modelled = [msgspec.structs.replace(one, limit="memory") for one in found]
    assert ns(patterns.elementwise(modelled)) == (120 if expected else 135), "what is attention's is no chain beside it"


def test_a_classifiers_softmax_is_no_attention() -> None:
    products = operator("aten::bmm", "[1, 128, 64] [1, 64, 128]")
    assert ns(patterns.eager_attention([operator("aten::_softmax", "[128, 128]"), products])) == 0
    assert ns(patterns.eager_attention([operator("aten::_softmax"), operator("aten::bmm")])) is None, "no shapes"


@pytest.mark.parametrize("columns, expected", [
    ({"dtypes": "float32"}, 10),
    ({"dtypes": "bfloat16"}, 0),
    ({"dtypes": "float32", "kernels": ["sm80_xmma_gemm_f32f32_tf32f32_f32_tn_n_tilesize128x128x32"]}, 0),
    ({"dtypes": "float32", "kernels": ["ampere_sgemm_128x64_tn"]}, 10),
    ({"dtypes": "", "kernels": ["volta_sgemm_128x32_nt"]}, 10),
    ({"dtypes": "", "kernels": ["cutlass_80_tensorop_s1688gemm_128x128"]}, 0),
    ({"dtypes": "", "kernels": ["a_kernel_of_unknown_kind"]}, None),
    ({"name": "aten::add"}, 0),
    ({"dtypes": "float32", "limit": "latency"}, 0),
    ({"dtypes": "float32", "kernels": ["nchwToNhwcKernel", "sm80_xmma_fprop_implicit_gemm_tf32f32_tf32f32_f32_nhwckrsc_nchw"]}, 0),
    ({"dtypes": "bfloat16", "kernels": ["void implicit_convolve_sgemm<__nv_bfloat16, __nv_bfloat16, 1024>"]}, 0),
])
def test_products_in_fp32(columns: dict[str, Any], expected: int | None) -> None:
    assert ns(patterns.fp32_matmuls([operator(**{"name": "aten::mm", **columns})])) == expected


#: A matrix by a vector, or less, moves as many numbers as it multiplies; of 8 bits; and what calls others.
NO_PRODUCTS = {"aten::mv", "aten::addmv", "aten::addmv_", "aten::addr", "aten::addr_", "aten::dot", "aten::vdot", "aten::_int_mm",
               "aten::_scaled_mm", "aten::_euclidean_dist"}


@pytest.mark.parametrize("name", sorted(_matrix_costs.FORMULAS))
def test_what_multiplies_matrices_is_a_product(name: str) -> None:
    """Recurrent layers and fused attention too: a smaller format makes them faster, and so belongs to what mending it gives at most."""
    found = operator(name, dtypes="float32", limit="memory")
    assert ns(patterns.fp32_matmuls([found])) == (0 if name in NO_PRODUCTS else 10)
    assert name in NO_PRODUCTS or ns(patterns.elementwise([found])) == 0


def test_a_conversion_is_no_convolution() -> None:
    assert ns(patterns.fp32_matmuls([operator("aten::_convert_indices_from_coo_to_csr", dtypes="float32")])) == 0


#: Of cuBLAS, CUTLASS and cuDNN on devices from Volta to Blackwell, as profilers recorded them.
FP32_KERNELS = [
    "sm80_xmma_gemm_f32f32_f32f32_f32_tn_n_tilesize64x256x8_stage3_warpsize1x4x1_ffma_aligna4_alignc4_execute_kernel__5x_cublas",
    "sm80_xmma_fprop_implicit_gemm_indexed_f32f32_f32f32_f32_nchwkcrs_nchw_tilesize64x64x8_stage3_warpsize1x4x1_g1_ffma_aligna4",
    "ampere_sgemm_32x128_tn", "volta_sgemm_32x32_sliced1x4_nt", "sgemm_32x32x32_NT_vec", "ampere_scudnn_128x64_relu_xregs_large_nn_v1",
    "void cutlass::Kernel2<cutlass_80_simt_sgemm_64x64_8x5_tn_align1>(cutlass_80_simt_sgemm_64x64_8x5_tn_align1::Params)",
    "void magma_sgemmEx_kernel<float, float, float, true, false, 6, 4, 6, 3, 4>(int, int, int, Tensor, int, Tensor)",
    "cudnn_infer_volta_scudnn_winograd_128x128_ldg1_ldg4_relu_tile148t_nt_v1",
]
OTHER_KERNELS = [
    "sm80_xmma_gemm_tf32tf32_tf32f32_f32_nt_n_tilesize128x128x16_stage4_warpsize2x2x1_tensor16x8x8_kernel",
    "sm90_xmma_gemm_f32f32_tf32f32_f32_tn_n_tilesize128x128x32_warpgroupsize1x1x1_execute_segment_k_off_kernel__5x_cublas",
    "sm90_xmma_dgrad_implicit_gemm_f32f32_tf32f32_f32_nhwckrsc_nhwc_tilesize128x64x32_warpgroupsize1x1x1_g1_execute_kernel__5x_cudnn",
    "sm90_xmma_gemm_bf16bf16_bf16f32_f32_tn_n_tilesize128x128x64_warpgroupsize1x1x1_execute_segment_k_off_kernel__5x_cublas",
    "sm80_xmma_gemm_f16f16_f16f32_f32_nt_n_tilesize128x128x32_stage4_warpsize2x2x1_tensor16x8x16",
    "void cutlass__5x_cudnn::Kernel<cutlass_tensorop_s1688fprop_optimized_tf32_64x64_16x10_nhwc_align4>(Params)",
    "cutlass3x_sm90_tensorop_s64x128x16gemm_f16_f16_f32_f16_f16_128x128x64_2x1x1_0_ttt_align8_warpspecialized_pingpong_epi_tma",
    "cutlass_75_wmma_tensorop_bf16_s161616gemm_bf16_32x32_32x1_tn_align1", "ampere_bf16_s16816gemm_bf16_128x128_ldg8_f2f_tn",
    "volta_fp16_s884gemm_fp16_128x64_ldg8_f2f_nn", "volta_h884gemm_256x64_ldg8_nn", "turing_h1688gemm_128x128_ldg8_stages_32x1_nn",
    "nvjet_tst_128x128_64x4_1x2_h_bz_coopA_TNT", "nvjet_hsh_256x128_64x4_2x1_v_bz_TNN", "nvjet_sss_tf32_128x256_TNT",
    "nvjet_sm100_tst_64x32_64x16_2x1_2cta_v_bz_TNN", "cutlass_80_tensorop_s1688gemm_256x128_32x3_nt_align1",
]


@pytest.mark.parametrize("dtypes", ["float32", ""])
@pytest.mark.parametrize("kernel, fp32", [*((name, True) for name in FP32_KERNELS), *((name, False) for name in OTHER_KERNELS)])
def test_kernels_in_fp32_by_their_names(kernel: str, fp32: bool, dtypes: str) -> None:
    assert ns(patterns.fp32_matmuls([operator("aten::mm", dtypes=dtypes, kernels=[kernel])])) == (10 if fp32 else 0)


@pytest.mark.parametrize("kernel", [
    "void gemv2T_kernel_val<int, int, float, float, float, float, 128, 16, 2, 2, false, false, cublasGemvTensorStridedBatched<float>>",
    "void cudnn::cnn::im2col4d_kernel<float, long>(cudnn::cnn::im2col4d_params, cudnnConvolutionStruct, cudnnTensor4dStruct)",
    "void cublasLt::splitKreduce_kernel<32, 16, int, float, float, float>"])
def test_kernels_whose_names_do_not_tell(kernel: str) -> None:
    assert ns(patterns.fp32_matmuls([operator("aten::mm", kernels=[kernel])])) == 10
    assert patterns.fp32_matmuls([operator("aten::mm", dtypes="", kernels=[kernel])]) is None


def test_elementwise_chains() -> None:
    found = [operator("aten::mul", limit="memory", time_ns=10), operator("aten::sum", limit="latency", time_ns=5),
             operator("aten::mm", limit="memory", time_ns=3), operator("aten::embedding", limit="memory", time_ns=2),
             operator("aten::_foreach_add_", limit="memory", time_ns=1), operator("aten::gelu", time_ns=20)]
    assert ns(patterns.elementwise(found)) == 15
    assert ns(patterns.elementwise([*found, operator("custom::op", time_ns=2)])) is None, "most is not modelled"
    assert ns(patterns.elementwise([])) is None


def test_facts_of_the_device() -> None:
    def native(**changes: Any) -> bool | None:
        made = steps(Recording(replace(V100, **changes)))
        made.kernel("k", 10, 20, launched=5)
        return seen(made.trace()).bf16_native

    assert native(capability=(8, 0)) is True and native(capability=(7, 5)) is False
    assert native(capability=None, name="Some Accelerator") is None
    assert native(capability=None) is False and native(capability=None, name="NVIDIA H100 80GB HBM3") is True, "as the vendor states it"
    assert native(name="AMD Instinct MI300X", capability=(9, 4)) is True
    assert native(name="AMD Radeon VII", capability=(9, 0)) is False


def test_fused_attention_that_fell_back_to_its_parts_is_told_from_attention_written_out() -> None:
    for name, fell_back in (("aten::_scaled_dot_product_attention_math", True), ("aten::_softmax", False),
                            ("aten::_scaled_dot_product_flash_attention_for_cpu", False)):
        made = steps(Recording())
        made.operator("aten::scaled_dot_product_attention", 10, 500)
        made.operator(name, 20, 400)
        assert seen(made.trace()).attention_fell_back == fell_back, name
