"""FLOPs counted from inside a step, against closed form; what cannot be counted is said."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")

from torch import nn  # noqa: E402
from torch.nn import functional as F  # noqa: E402

from saturate.agent import flopcount  # noqa: E402
from saturate.agent.flopcount import flop_counter, is_product  # noqa: E402

SRC = Path(__file__).resolve().parents[2] / "src"


def counted(run):
    with flop_counter(torch) as counter:
        run()
    return counter


def tensor(*sizes):
    return torch.randn(*sizes, requires_grad=True)


@pytest.mark.parametrize(("module", "macs"), [
    (nn.Conv2d(8, 12, 3, padding=1), 2 * 12 * 100 * 8 * 9),
    (nn.Conv2d(8, 12, 3, padding=1, groups=4), 2 * 12 * 100 * 2 * 9),
    (nn.Conv2d(8, 8, 3, padding=1, groups=8, bias=False), 2 * 8 * 100 * 9),
    (nn.Conv2d(8, 12, 1), 2 * 12 * 100 * 8),
    (nn.Conv2d(8, 12, 3, stride=2, dilation=2, groups=2), 2 * 12 * 9 * 4 * 9),
    (nn.ConvTranspose2d(8, 12, 4, stride=2, padding=1), 2 * 8 * 100 * 12 * 16),
    (nn.ConvTranspose2d(8, 12, 4, stride=2, padding=1, groups=4), 2 * 8 * 100 * 3 * 16),
])
def test_a_convolution_and_its_gradients(module, macs):
    x = tensor(2, 8, 10, 10)
    assert counted(lambda: module(x).sum().backward()).flops == 3 * 2 * macs


@pytest.mark.parametrize(("options", "parts"), [({}, 7), ({"is_causal": True}, 3.5)])
def test_attention_on_a_cpu(options, parts):
    """Two products forward, five backward; half of them behind a causal mask."""
    q, k, v = tensor(2, 4, 16, 8), tensor(2, 4, 24, 8), tensor(2, 4, 24, 8)
    seen = counted(lambda: F.scaled_dot_product_attention(q, k, v, **options).sum().backward())
    assert seen.flops == parts * 2 * 2 * 4 * 16 * 24 * 8 and not seen.left_out


def test_attention_in_parts():
    q = tensor(2, 4, 16, 8)
    seen = counted(lambda: F.scaled_dot_product_attention(q, q, q, dropout_p=0.1).sum().backward())
    assert seen.flops == 6 * 2 * 2 * 4 * 16 * 16 * 8


@pytest.mark.parametrize(("kind", "gates"), [(nn.LSTM, 4), (nn.GRU, 3), (nn.RNN, 1)])
def test_recurrent_nets(kind, gates):
    module, x, state = kind(6, 8), tensor(5, 3, 6), tensor(1, 3, 8)
    states = (state, tensor(1, 3, 8)) if kind is nn.LSTM else state
    once = 2 * 5 * 3 * gates * 8 * (6 + 8)
    assert counted(lambda: module(x, states)).flops == once
    assert counted(lambda: module(x, states)[0].sum().backward()).flops == 3 * once
    with torch.inference_mode():
        seen = counted(lambda: module(x))
    assert seen.flops == once and not seen.unknown


def test_operators_that_come_whole_in_inference_mode_are_taken_apart():
    x, weight = torch.randn(2, 4, 8, 8), torch.randn(4, 4, 3, 3)
    with torch.inference_mode():
        seen = counted(lambda: (F.conv2d(x, weight, padding="same"), torch.einsum("bchw,cd->bdhw", x, weight[0, :, :, 0])))
    assert seen.flops == 2 * 2 * 4 * 64 * 36 + 2 * 2 * 64 * 4 * 3 and not seen.left_out


def test_a_product_without_a_formula_makes_the_sum_unknown():
    one, two = torch.randn(3, 4), torch.randn(3, 5)
    seen = counted(lambda: nn.Bilinear(4, 5, 2)(one, two))
    assert "aten::_trilinear could not be counted" in seen.unknown and seen.missed == 1
    sparse = counted(lambda: torch.sparse.mm(torch.eye(3).to_sparse(), one))
    assert "_sparse_addmm" in sparse.unknown


@pytest.mark.parametrize(("run", "flops"), [
    (lambda: torch.cdist(torch.randn(40, 8), torch.randn(50, 8)), 2 * 40 * 50 * (8 + 2)),
    (lambda: torch.cdist(torch.randn(3, 40, 8), torch.randn(1, 50, 8)), 3 * 2 * 40 * 50 * (8 + 2)),
    (lambda: torch.cdist(tensor(40, 8), tensor(50, 8)).sum().backward(), 2 * 40 * 50 * (8 + 2 + 8 + 8)),
    (lambda: torch.addr(torch.zeros(8, 16), torch.randn(8), torch.randn(16)), 2 * 8 * 16),
    (lambda: torch.zeros(8, 16).addr_(torch.randn(8), torch.randn(16)), 2 * 8 * 16),
    (lambda: torch.randn(8, 4, dtype=torch.complex64) @ torch.randn(4, 16, dtype=torch.complex64), 4 * 2 * 8 * 4 * 16),
    (lambda: torch.addbmm(*(torch.ones(sizes, dtype=torch.complex128) for sizes in ((8, 16), (3, 8, 4), (3, 4, 16)))), 4 * 3 * 2 * 8 * 4 * 16),
    (lambda: torch.randn(8, 4, dtype=torch.complex64) @ torch.randn(4, dtype=torch.complex64), 4 * 2 * 8 * 4),
])
def test_products_under_other_names_and_of_complex_numbers(run, flops):
    seen = counted(run)
    assert seen.flops == flops and not seen.left_out


def test_other_arithmetic_is_named_and_counts_nothing():
    x = torch.randn(4, 4)
    seen = counted(lambda: (x @ x, torch.linalg.inv(x), torch.fft.fft(x), torch.cdist(x, x), x + x, x.norm(), x.softmax(0)))
    assert seen.flops == 2 * 4**3 and not seen.unknown
    assert set(seen.left_out) == {"aten::linalg_inv_ex", "aten::_fft_r2c", "aten::_cdist_forward"}


def test_nobody_knows_what_anothers_operator_does():
    library = torch.library.Library("flopcount_test", "DEF")
    library.define("twice(Tensor x) -> Tensor")
    library.impl("twice", lambda x: x + x, "CPU")
    seen = counted(lambda: torch.ops.flopcount_test.twice(torch.ones(2)))
    assert list(seen.left_out) == ["flopcount_test::twice"] and not seen.unknown


def test_nested_tensors_run_as_they_would_and_are_not_guessed():
    with torch.inference_mode():
        parts = torch.nested.nested_tensor([torch.ones(2, 4), torch.ones(3, 4)], layout=torch.jagged)
        seen = counted(lambda: F.linear(parts, torch.ones(5, 4)))
    assert "nested" in seen.unknown


@pytest.mark.parametrize("name", [
    "aten::mm", "aten::_grouped_mm", "aten::_weight_int8pack_mm", "aten::_convolution_double_backward", "flash_attn::_flash_attn_varlen_forward",
    "aten::miopen_rnn", "aten::mkldnn_linear_backward", "aten::einsum", "higher_order::flex_attention"])
def test_products_by_name(name):
    assert is_product(name)


@pytest.mark.parametrize("name", [
    "aten::add", "aten::upsample_bilinear2d", "aten::_thnn_fused_lstm_cell", "symm_mem::nccl_put", "aten::_fused_sdp_choice",
    "aten::_convert_indices_from_coo_to_csr", "aten::native_layer_norm", "aten::_cudnn_rnn_flatten_weight", "aten::gelu"])
def test_no_products_by_name(name):
    assert not is_product(name)


def test_counting_needs_neither_numpy_nor_msgspec():
    code = ("import sys\nfor name in ('numpy', 'msgspec', 'torch'): sys.modules[name] = None\n"
            f"sys.path.insert(0, {str(SRC)!r})\nimport saturate.agent.flopcount")
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False).stderr == ""


def test_facts_say_which_product_was_not_counted(script, start):
    source = """
    import torch, torch.nn as nn
    model = nn.Bilinear(8, 8, 4)
    opt = torch.optim.SGD(model.parameters(), lr=1e-3)
    x = torch.randn(16, 8)
    while True:
        opt.zero_grad(); model(x, x).pow(2).mean().backward(); opt.step()
    """
    trial = start(str(script(source)))
    trial.wait_ready()
    facts = trial.ask("facts")
    assert facts["flops_per_step"] is None and "aten::_trilinear" in facts["flops_unknown"]


def test_a_formula_that_fails_does_not_end_the_step(monkeypatch):
    def broken(arguments):
        raise IndexError("of ours")

    monkeypatch.setitem(flopcount.FORMULAS, "aten::mm", broken)
    with flopcount.flop_counter(torch) as counter:
        assert (torch.ones(2, 3) @ torch.ones(3, 4)).sum() == 24.0
    assert counter.flops == 0 and "of ours" in counter.unknown
