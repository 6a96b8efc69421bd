"""The benchmark on trained models runs, prints its ratios and writes its numbers; and it sees an answer that loses too much."""

from __future__ import annotations

import json
import subprocess
from types import SimpleNamespace

import pytest

import saturate

pytest.importorskip("torch", reason="it trains a model")


@pytest.mark.slow
def test_smoke(smoke):
    pytest.importorskip("onnxruntime", reason="its candidates and peers")
    ratio = r"\d+\.\d{3} \[\d+\.\d{3}, \d+\.\d{3}\]"
    written = smoke("inference_trained", rf"^  model +{ratio} of the model  accuracy", rf"^  by hand: onnx-int8-static +{ratio} of the model")
    assert written["rows"][0]["samples"] > 100


@pytest.mark.parametrize(("right", "verdict", "met"), [(100, "pass", True), (98, "pass", False), (100, "undecided", False)])
def test_what_loses_more_here_than_it_may_misses_the_target(bench, tmp_path, monkeypatch, right, verdict, met):
    """Also where the search had called it within the budget."""
    module = bench("inference_trained")
    example = SimpleNamespace(loader=lambda: [(1,)], build=lambda: lambda x: 100, score=lambda run: [index < run(0) for index in range(100)])
    monkeypatch.setattr(saturate, "load", lambda artifact: lambda x: right)
    monkeypatch.setattr(module.importlib, "import_module", lambda name: example)
    monkeypatch.setattr(module, "BY_HAND", ())
    monkeypatch.setattr(module.os, "chdir", lambda path: None)
    answer = json.dumps({"artifact": "there", "best": {"verdict": verdict, "recipe": []}})
    monkeypatch.setattr(module.subprocess, "run", lambda *_, **__: subprocess.CompletedProcess([], 0, stdout=answer))
    row = module.judged("digits_cnn", tmp_path / "digits_cnn", "1s", 3, smoke=True)
    assert row["met"] is met and [entry["accuracy"] for entry in row["ways"]] == [1.0, right / 100]
