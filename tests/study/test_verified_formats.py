"""Real verification runs of scripts that train in bf16: by autocast, or with parameters held in it."""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from parties import WORKLOAD, publish

from saturate.study.bench import Bench
from saturate.study.candidates import Candidate
from saturate.study.store import Store
from saturate.study.verification import Verifier
from saturate.techniques import _registry
from saturate.trial.process import Workload

pytestmark = pytest.mark.slow

GATED = WORKLOAD.replace("torch.tanh(self.a(x))", "nn.functional.silu(self.a(x)) * torch.sin(self.a(x))").replace("zero_grad()", "zero_grad(set_to_none=False)")
SCRIPTS = {
    "autocast": GATED.replace("return self.b", "with torch.autocast('cpu', torch.bfloat16): return self.b").replace("model(inputs)", "model(inputs).float()"),
    "held": GATED.replace("model = Net()", "model = Net().to(torch.bfloat16)").replace("model(inputs)", "model(inputs.bfloat16()).float()"),
}
LIARS = ("one_over_n", "nan_at_40", "skips_updates", "other_seed")
RIGHT = ("compile", "fused-optimizer", "zero-grad-none")


@pytest.fixture(scope="module", params=SCRIPTS)
def verifier(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Verifier]:
    top = tmp_path_factory.mktemp(request.param)
    (top / "work").mkdir()
    (top / "work" / "train.py").write_text(SCRIPTS[request.param], encoding="utf-8")
    environment = {k: v for k, v in os.environ.items() if not k.startswith(("SATURATE", "PYTHON", "PYTEST"))}
    store = Store(top / "work" / ".saturate" / "run")
    bench = Bench(Workload([sys.executable, "train.py"], top / "work", environment, 240.0), top / "work" / ".saturate" / "run",
                  top / "work" / ".saturate", store, 600.0, print)
    bench.step = {"token": "S0", "count": 1, "tokens": ["B", "B", "S0"]}
    try:
        yield Verifier(bench)
    finally:
        bench.close()
        store.close()


@pytest.mark.parametrize("identity", RIGHT)
def test_what_is_right_is_verified(verifier: Verifier, identity: str) -> None:
    if identity == "compile" and shutil.which("g++") is None:
        pytest.skip("compiling for a CPU needs g++")
    module = _registry.load()[identity]
    assert verifier.check_baseline() is None
    found = verifier.verify((Candidate(module, module.Options()),))
    assert found.passed, found.reason


@pytest.mark.parametrize("name", LIARS)
def test_what_is_wrong_is_rejected(verifier: Verifier, name: str, tmp_path: Path) -> None:
    module = _registry.load_one(name, str(publish(tmp_path, [name]) / f"{name}.py"))
    try:
        found = verifier.verify((Candidate(module, module.Options()),))
    finally:
        sys.modules.pop(name, None)
    assert found.passed is False, found.reason
