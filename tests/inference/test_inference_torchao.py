"""Linear layers quantized by torchao: which ones, and what shows it."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="needs torch")
pytest.importorskip("torchao", reason="needs the extra saturate[inference]")

from quantize_kit import FACTS, context, decibels, tokens, transformer  # noqa: E402 - after the check for torch

from saturate.inference.techniques import (  # noqa: E402
    _torchao,
    pt2e_dynamic_int8,
    pt2e_static_int8,
    qat_dynamic_int8,
    qat_int8,
    torchao_dynamic_int8,
    torchao_fp8,
    torchao_int4,
    torchao_weight_only,
)
from saturate.inference.techniques._api import NotApplied  # noqa: E402

nn = torch.nn


def test_int8_products_are_close_and_proved(tmp_path: Path) -> None:
    where = context(tmp_path, transformer(), tokens())
    expected = where.model(*where.inputs[0])
    assert not torchao_dynamic_int8.active(where, torchao_dynamic_int8.Options()).active
    torchao_dynamic_int8.apply(where, torchao_dynamic_int8.Options())
    assert 25 < decibels(expected, where.model(*where.inputs[0])) < 80
    proof = torchao_dynamic_int8.active(where, torchao_dynamic_int8.Options())
    assert proof.active and "Int8Tensor" in proof.evidence


def test_int8_weights_are_closer_still(tmp_path: Path) -> None:
    where = context(tmp_path, transformer(), tokens())
    expected = where.model(*where.inputs[0])
    torchao_weight_only.apply(where, torchao_weight_only.Options())
    assert 35 < decibels(expected, where.model(*where.inputs[0])) < 90
    assert torchao_weight_only.active(where, torchao_weight_only.Options()).active


def test_a_tied_embedding_stays_in_float(tmp_path: Path) -> None:
    where = context(tmp_path, transformer(), tokens())
    torchao_weight_only.apply(where, torchao_weight_only.Options())
    assert type(where.model.embed.weight) is nn.Parameter
    assert type(where.model.head.weight) is not nn.Parameter


@pytest.mark.parametrize("keep, absent", [(("gate",), ("gate",)), (("layer",), ("layer.linear1", "layer.linear2"))])
def test_layers_to_keep_are_kept(tmp_path: Path, keep: tuple[str, ...], absent: tuple[str, ...]) -> None:
    model = transformer()
    everything = set(_torchao.layers(context(tmp_path, model, tokens())))
    assert {"layer.linear1", "layer.linear2", "gate", "up", "down", "head"} == everything
    assert everything - set(_torchao.layers(context(tmp_path, model, tokens(), keep=frozenset(keep)))) == set(absent)


def test_layers_that_use_their_weight_in_their_own_way_are_left_alone(tmp_path: Path) -> None:
    class Own(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x @ (self.weight + 1).T

    model = nn.Sequential(Own(8, 8), nn.Linear(8, 8), nn.MultiheadAttention(8, 2))
    assert set(_torchao.layers(context(tmp_path, model, torch.randn(2, 8)))) == {"1"}


def test_a_small_last_layer_is_left_alone(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64), nn.Linear(64, 2))
    assert set(_torchao.layers(context(tmp_path, model, torch.randn(2, 64)))) == {"0", "1"}
    model = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64))
    assert set(_torchao.layers(context(tmp_path, model, torch.randn(2, 64)))) == {"0", "1"}


def test_nothing_to_quantize_is_said(tmp_path: Path) -> None:
    with pytest.raises(NotApplied, match="no linear layer"):
        torchao_dynamic_int8.apply(context(tmp_path, nn.Sequential(nn.Conv2d(1, 1, 1)), torch.randn(1, 1, 2, 2)), torchao_dynamic_int8.Options())


def test_a_stored_program_is_torchs_own(tmp_path: Path) -> None:
    """Whoever loads it need not have torchao."""
    from saturate.inference.formats import exported

    where = context(tmp_path, nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 16)), torch.randn(2, 8))
    torchao_dynamic_int8.apply(where, torchao_dynamic_int8.Options())
    entry = exported.save(where, tmp_path)
    program = torch.export.load(tmp_path / entry.files[0])
    assert not [node for node in program.graph.nodes if "torchao" in str(node.target)]


def test_four_bits_on_the_cpu(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(128, 64), nn.ReLU(), nn.Linear(64, 64), nn.Linear(64, 7))
    where = context(tmp_path, model, torch.randn(2, 128))
    expected = model(*where.inputs[0])
    words = torchao_int4.apply(where, torchao_int4.Options(group=32))
    assert "2 of 3" in words
    assert 8 < decibels(expected, where.model(*where.inputs[0])) < 40
    assert torchao_int4.active(where, torchao_int4.Options()).active
    with pytest.raises(NotApplied, match="32, 64 or 128"):
        torchao_int4.apply(where, torchao_int4.Options(group=48))


def test_who_is_eligible() -> None:
    def reason(module: Any, **changes: Any) -> str:
        answer = module.eligible(dataclasses.replace(FACTS, **changes))
        assert answer.reason
        return ("" if answer else "not: ") + answer.reason

    torchaos = (torchao_dynamic_int8, torchao_weight_only, torchao_int4, torchao_fp8, qat_dynamic_int8)
    for module in torchaos:
        assert "torchao is not installed" in reason(module, installed={})
        assert "the model has none" in reason(module, linears=0)
    assert not reason(torchao_dynamic_int8).startswith("not")
    assert "no VNNI" in reason(torchao_dynamic_int8, cpu_flags=frozenset())
    assert "float8" in reason(torchao_fp8) and reason(torchao_fp8).startswith("not")
    assert "has 8.0" in reason(torchao_fp8, device="cuda", capability=(8, 0))
    assert not reason(torchao_fp8, device="cuda", capability=(9, 0)).startswith("not")
    for module in (pt2e_static_int8, pt2e_dynamic_int8, qat_int8):
        assert not reason(module).startswith("not")
        assert "no VNNI" in reason(module, cpu_flags=frozenset())
        assert "x86 CPUs" in reason(module, device="cuda")
        assert "because" in reason(module, exportable=False, export_problem="because")
        assert "bfloat16" in reason(module, dtypes=("bfloat16",))
        assert reason(module, linears=0, convolutions=0).startswith("not")
    for module in (qat_int8, qat_dynamic_int8):
        assert "training data" in reason(module, trainable=False)


@pytest.mark.parametrize("module", [pt2e_static_int8, pt2e_dynamic_int8, qat_int8, qat_dynamic_int8, torchao_dynamic_int8, torchao_weight_only,
                                    torchao_int4, torchao_fp8], ids=lambda module: module.TECHNIQUE.id)
def test_code_for_users_is_python(module: Any) -> None:
    for options in module.variants(FACTS):
        compile(module.as_code(options), "code", "exec")
