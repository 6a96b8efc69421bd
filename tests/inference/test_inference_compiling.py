"""The time of compilers: torch.compile tells its own, a clock stands around all others."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")

from saturate.inference import compiling  # noqa: E402 - after the check for torch
from saturate.inference.formats import _vetting, aoti  # noqa: E402
from saturate.inference.techniques import _registry  # noqa: E402
from saturate.inference.techniques._api import Context  # noqa: E402
from saturate.records.inference import ModelFacts  # noqa: E402


def test_torch_compile_and_the_clock_add_up() -> None:
    before = compiling.seconds()
    with pytest.raises(RuntimeError), compiling.clock():
        time.sleep(0.02)
        raise RuntimeError("a compiler that fails took its time")
    after_clock = compiling.seconds()
    assert 0.02 <= after_clock - before < 10.0
    x, began = torch.ones(3), time.monotonic()
    compiled = torch.compile(lambda x: torch.relu(x) + 1, backend="eager")
    compiled(x)
    after_compile = compiling.seconds()
    assert 0 < after_compile - after_clock <= time.monotonic() - began
    compiled(x)
    assert compiling.seconds() == after_compile, "a call of what is compiled"


@pytest.mark.parametrize(("package", "technique"), [("onnxruntime", "onnx-runtime"), ("openvino", "openvino-runtime")])
def test_runtimes_are_clocked(package: str, technique: str, tmp_path: Path) -> None:
    for needed in (package, "onnxscript"):
        pytest.importorskip(needed, reason="the extra saturate[inference]")
    inputs = [(torch.randn(4, 8),)]
    context = Context(torch, torch.nn.Linear(8, 8).eval().requires_grad_(False), "cpu", inputs, [], ModelFacts(batch_size=4), tmp_path, 1)
    module, before = _registry.load()[technique], compiling._others_s
    module.apply(context, module.Options())
    assert compiling._others_s > before


def test_aot_inductor_is_clocked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With a stand-in for the compiler, which takes half a minute."""
    monkeypatch.setattr(torch._inductor, "aoti_compile_and_package", lambda *_, **__: time.sleep(0.02))
    monkeypatch.setattr(_vetting, "compiled", lambda *_: None)
    before = compiling._others_s
    aoti._compile(torch, None, tmp_path / "model.pt2", {})
    assert compiling._others_s >= before + 0.02
