"""Artifacts of programs on a GPU. Run by `pytest -m gpu`."""

from __future__ import annotations

import pytest
import torch

from saturate.inference import artifact
from saturate.inference.formats import exported
from saturate.inference.techniques._api import Context
from saturate.records.inference import CandidateRecord, ModelFacts

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")]


def test_an_artifact_of_a_gpu_loads_and_verifies_there(tmp_path):
    model, inputs = torch.nn.Linear(64, 8).cuda().eval().requires_grad_(False), (torch.randn(4, 64, device="cuda"),)
    facts = ModelFacts(kind="Linear", device="cuda", torch=torch.__version__, batch_size=4)
    (tmp_path / "program").mkdir()
    entry = exported.save(Context(torch=torch, model=model, device="cuda", inputs=[inputs], calibration=[], facts=facts,
                                  folder=tmp_path, threads=1), tmp_path / "program")
    record = CandidateRecord(id="as it is", techniques=[], fate="kept", reason="", numerics="reordering")
    artifact.store(tmp_path / "artifact", entry, program=tmp_path / "program", record=record, facts=facts, threads=1,
                   inputs=[inputs], outputs=[model(*inputs)])
    loaded = artifact.load(tmp_path / "artifact", verify=True)
    assert loaded.differences == () and loaded.info.made_on.device_name == torch.cuda.get_device_name()
    assert torch.allclose(loaded(*inputs), model(*inputs), atol=1e-4)
