"""A script may have made a GPU the device on which torch makes new tensors: the search's own lie where what they belong to lies."""

from __future__ import annotations

import io
import json

import pytest

torch = pytest.importorskip("torch")

from saturate.inference import batches, controls, examples, variations, wire  # noqa: E402 - after the check for torch
from saturate.inference.generation import safetensors  # noqa: E402
from saturate.records.artifact import Leaf  # noqa: E402


@pytest.fixture(autouse=True)
def elsewhere():
    """As a GPU would be: other than where the inputs are."""
    with torch.device("meta"):
        yield


def rows(count: int) -> torch.Tensor:
    return torch.arange(2.0 * count, device="cpu").reshape(count, 2)


def test_a_single_batch_is_cut_in_two() -> None:
    (measured,), (calibration,), _ = batches.split(torch, [(rows(5),)])
    assert measured[0].tolist() == rows(5)[[0, 1, 2, 0, 1]].tolist() and calibration[0].tolist() == rows(5)[3:].tolist()


def test_inputs_are_perturbed() -> None:
    ((found,),) = variations.perturbed(torch, [(rows(4) + 1,)])
    assert found.device.type == "cpu" and not found.equal(rows(4) + 1) and found.allclose(rows(4) + 1)


def test_noise_is_drawn() -> None:
    values = rows(3).flatten()
    found = controls._drawn(values, 9, controls._generator(1))
    assert found.device.type == "cpu" and set(found.tolist()) <= set(values.tolist())


def test_tensors_without_elements_lie_beside_the_others(tmp_path) -> None:
    header = json.dumps({"a": {"dtype": "F32", "shape": [0, 2], "data_offsets": [0, 0]}}).encode()
    (tmp_path / "a").write_bytes(len(header).to_bytes(8, "little") + header)
    found = [safetensors.read(torch, tmp_path / "a")["a"], examples._tensor(torch, b"", Leaf(shape=[0, 2], dtype="float32", offset=0)),
             wire._Receiver(io.BytesIO(), [], "cpu")._tensor(bytearray(), "float32", (0, 2), [0, 1])]
    assert [(one.device.type, tuple(one.shape)) for one in found] == [("cpu", (0, 2))] * 3
