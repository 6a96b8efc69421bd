"""ONNX Runtime on a GPU, with stand-ins for it: no test here needs one."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from saturate.errors import EnvironmentProblem  # noqa: E402 - after the check for torch
from saturate.inference import facts  # noqa: E402
from saturate.inference.formats import onnx  # noqa: E402
from saturate.inference.techniques import _onnx, onnx_runtime  # noqa: E402
from saturate.inference.techniques._api import NotApplied  # noqa: E402
from saturate.records.inference import ModelFacts  # noqa: E402

AMPERE = ModelFacts(device="cuda", capability=(8, 0), dtypes=("float32",), linears=1, torch="2.13.0")


def test_onnx_runtime_for_a_gpu_is_a_package_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    versions = {"onnxruntime-gpu": "1.30", "onnx": "1", "onnxscript": "1"}

    def version(name: str) -> str:
        if name not in versions:
            raise facts.metadata.PackageNotFoundError
        return versions[name]

    monkeypatch.setattr(facts.metadata, "version", version)
    assert facts.installed() == {**versions, "onnxruntime": "1.30"}
    known = dataclasses.replace(AMPERE, installed=facts.installed())
    assert onnx_runtime.eligible(known)
    del versions["onnxruntime-gpu"]
    assert "onnxruntime-gpu not installed" in onnx_runtime.eligible(dataclasses.replace(known, installed=facts.installed())).reason


def test_onnx_runtime_computes_float32_as_it_is_on_the_gpu_that_was_named() -> None:
    assert onnx.providers("cuda", 1) == [("CUDAExecutionProvider", {"device_id": "1", "use_tf32": "0"})]
    assert onnx.providers("cpu") == ["CPUExecutionProvider"]


def test_onnx_runtime_that_cannot_use_the_gpu_is_not_measured_on_the_cpu(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    class Options:
        def add_session_config_entry(self, name: str, value: str) -> None:
            pass

    library = SimpleNamespace(disable_telemetry_events=lambda: None, SessionOptions=Options, GraphOptimizationLevel=SimpleNamespace(ORT_ENABLE_ALL=99),
                              InferenceSession=lambda *given, **more: SimpleNamespace(get_providers=lambda: ["CPUExecutionProvider"]))
    monkeypatch.setattr(onnx, "require", lambda name: library)
    with pytest.raises(EnvironmentProblem, match="cannot use the GPU"):
        onnx.open_session(tmp_path, threads=1, device="cuda")
    context: Any = SimpleNamespace(folder=tmp_path, threads=1, device="cuda", torch=SimpleNamespace(cuda=SimpleNamespace(current_device=lambda: 0)))
    with pytest.raises(NotApplied, match="cannot use the GPU: its CUDA libraries are missing"):       # for a search that goes on
        _onnx.serve(context, _onnx.Exported(tmp_path, {}, {}, {}), tmp_path, "key")


def test_truth_values_of_onnx_runtime_are_truth_values() -> None:
    ort, numpy = pytest.importorskip("onnxruntime"), pytest.importorskip("numpy")
    for value, dtype in ((numpy.array([True, False]), torch.bool), (numpy.array([1, 0], numpy.uint8), torch.uint8)):
        found = onnx._on_gpu(torch, ort.OrtValue.ortvalue_from_numpy(value))
        assert found.dtype is dtype and found.tolist() == value.tolist()
