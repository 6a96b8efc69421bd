"""Artifacts of programs on a GPU. Run by `pytest -m gpu`."""

from __future__ import annotations

import pytest
import torch

from saturate.inference import artifact, runtimes
from saturate.inference.formats import exported
from saturate.inference.techniques._api import Context
from saturate.records.inference import CandidateRecord, ModelFacts

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")]


def stored(tmp_path, device, runtime=None):
    """An artifact, its model, and a batch."""
    model, inputs = torch.nn.Linear(64, 8).to(device).eval().requires_grad_(False), (torch.randn(4, 64, device=device),)
    facts = ModelFacts(kind="Linear", device="cuda", torch=torch.__version__, batch_size=4)
    (tmp_path / "program").mkdir()
    entry = exported.save(Context(torch=torch, model=model, device="cuda", inputs=[inputs], calibration=[], facts=facts,
                                  folder=tmp_path, threads=1), tmp_path / "program", runtime)
    record = CandidateRecord(id="as it is", techniques=[], fate="kept", reason="", numerics="reordering")
    artifact.store(tmp_path / "artifact", entry, program=tmp_path / "program", record=record, facts=facts, threads=1,
                   inputs=[inputs], outputs=[model(*inputs)], device=device)
    return tmp_path / "artifact", model, inputs


def test_an_artifact_of_a_gpu_loads_and_verifies_there(tmp_path):
    folder, model, inputs = stored(tmp_path, "cuda:0")
    loaded = artifact.load(folder, verify=True)
    assert loaded.differences == () and loaded.info.made_on.device_name == torch.cuda.get_device_name(0)
    assert torch.allclose(loaded(*inputs), model(*inputs), atol=1e-4)


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_an_artifact_of_the_second_gpu_is_recorded_and_answers_there(tmp_path):
    folder, model, inputs = stored(tmp_path, "cuda:1", {"kind": "cuda-graphs"})
    loaded = artifact.load(folder, verify=True)
    for batch in (inputs[0], inputs[0] + 1):
        assert torch.allclose(loaded(batch), model(batch), atol=1e-4) and torch.cuda.current_device() == 0
    with pytest.raises(TypeError, match="on cuda:0"):
        loaded(inputs[0].to("cuda:0"))


def test_a_graph_recorded_in_inference_mode_is_replayed_outside_of_it():
    call = runtimes.CudaGraphs(torch, lambda x: 2 * x)
    with torch.inference_mode():
        call(torch.ones(3, device="cuda"))
    with torch.no_grad():
        assert call(torch.full((3,), 5.0, device="cuda")).tolist() == [10.0] * 3
