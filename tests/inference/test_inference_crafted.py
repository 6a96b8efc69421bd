"""Artifacts that somebody has written by hand: a named error, in little time and memory."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import pytest

from saturate.inference import examples
from saturate.inference.generation import safetensors
from saturate.records.artifact import Example, Leaf

torch = pytest.importorskip("torch", reason="tensors")


def test_tensors_on_top_of_each_other_take_no_more_memory_than_their_file(tmp_path: Path) -> None:
    size = 2**20
    header = {f"tensor {index}": {"dtype": "U8", "shape": [size], "data_offsets": [0, size]} for index in range(1000)}
    text = json.dumps(header).encode()
    path = tmp_path / "model.safetensors"
    path.write_bytes(len(text).to_bytes(8, "little") + text + bytes(size))
    with pytest.raises(ValueError, match="on top of each other"):
        safetensors.read(torch, path)
    leaves = [Leaf(shape=[size], dtype="uint8", offset=0) for _ in range(1000)]
    with pytest.raises(ValueError, match="on top of each other"):
        examples.read(torch, bytes(size), [Example(inputs={"tuple": []}, input_leaves=leaves, outputs={"tuple": []}, output_leaves=[])])


@pytest.mark.parametrize("said", [5, None, "tensor", [0, 1], {"list": 5}, {"tuple": [3]}, [-1], [7]])
@pytest.mark.parametrize("which", ["inputs", "outputs"])
def test_a_description_of_an_example_that_is_none_is_named(said: Any, which: str) -> None:
    described = {"inputs": {"tuple": [[0]]}, "outputs": [0], which: said}
    leaf = Leaf(shape=[2], dtype="uint8", offset=0)
    with pytest.raises(ValueError, match="description|tuple"):
        examples.read(torch, bytes(4), [Example(input_leaves=[leaf], output_leaves=[leaf], **described)])


def crafted(changes: dict[str, Any], kind: str = "MixtralForCausalLM") -> tuple[Any, dict[str, Any]]:
    """A model of transformers, and how an artifact knows it once `changes` are made to its configuration."""
    transformers = pytest.importorskip("transformers")
    from saturate.inference.generation.artifact import architecture

    sizes = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 1, "vocab_size": 32,
             "max_position_embeddings": 32}
    model = getattr(transformers, kind)(getattr(transformers, kind.replace("ForCausalLM", "Config"))(**sizes))
    known = architecture(model)
    known["configuration"].update(changes)
    return model, known


@pytest.mark.parametrize(("kind", "changes", "says"), [
    ("MixtralForCausalLM", {"num_local_experts": 10**9}, "by its configuration|asks for more than"),
    ("Qwen3ForCausalLM", {"num_hidden_layers": 10**9, "layer_types": None}, "1000000000 layers")])
def test_a_configuration_that_asks_for_any_number_of_parts_is_refused(kind: str, changes: dict[str, Any], says: str) -> None:
    from saturate.inference.generation.artifact import _built

    model, known = crafted(changes, kind)
    began = time.monotonic()
    with pytest.raises(ValueError, match=says):
        _built(torch, known, model.state_dict())
    assert time.monotonic() - began < 30


def test_what_makes_parts_without_end_is_stopped_and_leaves_no_hook() -> None:
    from saturate.inference.generation.artifact import _no_more_parts

    class Experts(torch.nn.Module):
        def __init__(self, count: int) -> None:
            super().__init__()
            self.experts = torch.nn.ModuleList(torch.nn.Linear(1, 1) for _ in range(count))

    with torch.device("meta"), _no_more_parts(torch, 1000), pytest.raises(ValueError, match="asks for more than 1000 modules and tensors"):
        Experts(10**9)
    Experts(1000)
