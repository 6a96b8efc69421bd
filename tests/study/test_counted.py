"""What a count of operations has not seen, by the kernels of a device's trace."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("numpy")

from saturate.records.analysis import Operator, Problem, Roofline
from saturate.study.counted import missed, unseen
from saturate.trace.operators import NO_OPERATOR, NO_SHAPES, REPLAYED


def operator(name: str, time_ns: int, *kernels: str, reason: str = "no formula for this operator", **changes: Any) -> Operator:
    columns: dict[str, Any] = {"flops": None, "bytes": None, "unknown": {"flops": reason}, **changes}
    return Operator(name=name, shapes="", dtypes="", calls=1, kernels=list(kernels), time_ns=time_ns, **columns)


def analysis(*operators: Operator, problems: tuple[Problem, ...] = ()) -> Any:
    return SimpleNamespace(devices=[SimpleNamespace(roofline=Roofline(coverage=None, operators=list(operators)))],
                           integrity=SimpleNamespace(problems=list(problems)))


MATMUL = operator("aten::mm", 900, "ampere_sgemm_128x64_tn", flops=10**9, unknown={})
#: As autograd names them: kernels that an extension launches in such a function are its own.
FLASH = operator("FlashAttnFunc", 3, "void flash_fwd_kernel<Flash_fwd_kernel_traits<64, 128, 128, 4>>(Flash_fwd_params)")
LINEAR = operator("_LayerNormLinear", 3, "transformer_engine::rmsnorm_fwd_tuned_kernel", "nvjet_tst_128x128_64x4_1x2_h_bz_coopA_TNT")
SCAN = operator("ChunkScanFunction", 100, "_chunk_scan_fwd_kernel")
NORM = operator("LigerRMSNormFunction", 100, "_rms_norm_forward_kernel")
APEX = operator("FusedLayerNormAffineFunctionBackward", 100, "void cuComputeGradGammaBeta<float, float>(float const*)")
ROI = operator("torchvision::roi_align", 100, "void roi_align_forward_kernel_impl<float>(int, float const*)")


@pytest.mark.parametrize("outside, said", [
    (FLASH, "FlashAttnFunc"), (LINEAR, "nvjet_tst_128x128"), (SCAN, "ChunkScanFunction"),
    (operator("ampere_sgemm_128x64_tn", 3, "ampere_sgemm_128x64_tn", reason=REPLAYED), "a replayed graph"),
    (operator("mylib::block", 3, "cutlass_80_tensorop_bf16_s16816gemm_relu"), "mylib::block"), (ROI, "roi_align")])
def test_products_past_the_dispatcher_make_the_count_say_nothing(outside: Operator, said: str) -> None:
    assert said in missed(analysis(MATMUL, outside), []) and not missed(analysis(MATMUL), [])
    assert unseen([MATMUL, outside], [], "cuda") == [outside]


@pytest.mark.parametrize("harmless, left_out", [
    (NORM, []), (APEX, []), (ROI, ["torchvision::roi_align"]), (operator("ChunkScanFunction", 40, "_chunk_scan_fwd_kernel"), []),
    (operator("aten::_fused_adamw_", 100, "multi_tensor_apply_kernel"), []),
    (operator("CompiledFunction", 100, "triton_poi_fused_add_0"), []), (operator("triton_red_fused_sum_1", 100, "triton_red_fused_sum_1"), []),
    (operator("CompiledFunction", 100, "triton_for_fused_0"), []), (operator("triton_for_fused_1", 100, "triton_for_fused_1"), []),
    (operator("aten::mm", 100, "ampere_sgemm_128x64_tn", reason=NO_SHAPES), []),
    (operator("flash_attn::_flash_attn_forward", 100, "void flash_fwd_kernel<64>", flops=10**6, unknown={}), []),
    (operator("fbgemm::permute_2D_sparse_data", 10, "void fbgemm_gpu::permute_2D_data_kernel<true>"), []),
    (operator("ampere_sgemm_128x64_tn", 100, "ampere_sgemm_128x64_tn", reason=NO_OPERATOR), [])])
def test_what_is_no_product_or_known_leaves_it(harmless: Operator, left_out: list[str]) -> None:
    assert missed(analysis(MATMUL, harmless), left_out) == ""


def test_replays_call_no_operator() -> None:
    """The trace then lists no operators at all."""
    problem = Problem(id="graph-replay", message="60% of the kernels were replayed", blocks=["roofline"])
    assert "60% of the kernels" in missed(analysis(problems=(problem,)), [])


def test_on_a_cpu_functions_of_ones_own_are_the_time_between_operators() -> None:
    assert unseen([MATMUL, FLASH, operator("AddmmBackward0", 5)], [], "cpu") == []
    assert unseen([MATMUL, ROI], ["torchvision::roi_align"], "cpu") == [ROI]
