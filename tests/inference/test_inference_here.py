"""Whether the user's model answers in this process as in one of its own."""

from __future__ import annotations

import random
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import saturate
from saturate.errors import WorkloadFailed
from saturate.inference import here
from saturate.records.inference import ModelFacts

torch = pytest.importorskip("torch")

BATCH = torch.randn(8, 6, generator=torch.Generator().manual_seed(3))


class Scaled(torch.nn.Module):
    """Follows a global of this module, and counts its calls."""

    scale, calls = 1.0, 0

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer, self.drop = torch.nn.Linear(6, 4), torch.nn.Dropout(0.5)
        self.register_buffer("seen", torch.zeros(()))
        self.register_buffer("last", torch.zeros(()))

    def forward(self, x: Any) -> Any:
        type(self).calls += 1
        self.seen += 1
        self.last = x.sum()
        x.add_(0)                   # what it writes to is no tensor of the user's
        return self.drop(self.layer(x)) * type(self).scale


def lab(model: Any, **more: Any) -> Any:
    """What a process of its own answered: `scale` is 1 there."""
    with torch.no_grad():
        reference = [[model.layer(BATCH)]]
    source = SimpleNamespace(inputs=lambda torch: [(BATCH.clone(),)], device="cpu", training=model.training, switches={})
    return SimpleNamespace(facts=ModelFacts(**{"dtypes": ("float32",), "mode": "inference_mode", **more}), reference=reference, again=reference, twin=None, source=source)


def test_the_same_answers_are_no_news_and_leave_everything_as_it_was() -> None:
    model = Scaled()
    model.drop.eval()               # a part in another mode, on purpose
    states = torch.get_rng_state(), random.getstate()
    assert here.compare(torch, model, lab(model)) == []
    assert model.training and model.layer.training and not model.drop.training
    assert model.seen == 0 and model.last == 0
    assert torch.equal(torch.get_rng_state(), states[0]) and random.getstate() == states[1]


def test_a_model_that_follows_what_is_set_for_the_process_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    model = Scaled().eval()
    monkeypatch.setattr(Scaled, "scale", 0.5)
    with pytest.raises(WorkloadFailed, match="answers otherwise in a process of its own") as caught:
        here.compare(torch, model, lab(model))
    assert "6 dB" in caught.value.evidence and "global" in caught.value.cause and "attribute" in caught.value.remedy


def test_another_kind_of_numbers_is_another_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    model = Scaled().eval()
    monkeypatch.setattr(Scaled, "scale", torch.ones((1,), dtype=torch.float64))       # as by torch.set_default_dtype
    with pytest.raises(WorkloadFailed) as caught:
        here.compare(torch, model, lab(model))
    assert caught.value.evidence == "its output is float64 here, float32 there"


def test_a_model_with_randomness_is_not_called(monkeypatch: pytest.MonkeyPatch) -> None:
    model = Scaled().eval()
    monkeypatch.setattr(Scaled, "scale", 0.5)
    known, calls = lab(model, random=True), Scaled.calls
    assert here.compare(torch, model, known) == [] and Scaled.calls == calls


def test_a_model_that_has_no_room_here_is_a_note() -> None:
    model = Scaled().eval()
    known = lab(model)
    model.layer = torch.nn.Linear(5, 4)
    assert "nobody knows whether it answers here" in here.compare(torch, model, known)[0]


def test_a_search_does_not_begin_with_another_function_than_the_user_s(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import process_kit

    model = process_kit.Pair().eval()
    monkeypatch.setattr(process_kit.Pair, "forward", lambda self, x: (2 * self.layer(x), self.layer(x)))
    with pytest.raises(WorkloadFailed, match="answers otherwise"):
        saturate.optimize(model, [(torch.randn(4, 6),)], workdir=tmp_path / "run", time="20s", only=["tf32-products"], threads=1)


def test_an_encoder_that_answers_otherwise_in_programs_is_named() -> None:
    """Places that a mask hides are 0 where torch takes its nested tensors, and hold numbers elsewhere."""
    for nested in (True, False):
        layer = torch.nn.TransformerEncoderLayer(16, 2, 32, batch_first=True)
        model = torch.nn.ModuleDict({"text": torch.nn.TransformerEncoder(layer, 2, enable_nested_tensor=nested)}).eval()
        notes = here.known_differences(torch, model)
        assert len(notes) == nested and all(note.startswith("text is a torch.nn.TransformerEncoder") for note in notes)
    x, padded = torch.randn(2, 5, 16), torch.arange(5).expand(2, 5) >= 3
    nested, plain = (torch.nn.TransformerEncoder(layer, 2, enable_nested_tensor=one).eval() for one in (True, False))
    plain.load_state_dict(nested.state_dict())
    with torch.inference_mode():
        assert (nested(x, src_key_padding_mask=padded)[:, 3:] == 0).all(), "torch has changed: the note may go"
        assert not (plain(x, src_key_padding_mask=padded)[:, 3:] == 0).any()
