"""A candidate that misses the accuracy budget is rescued by the layers that go back to float32, in a whole search with real
processes: a trained network in which one layer does not stand 8 bits."""

from __future__ import annotations

from typing import Any

import pytest

import saturate
from saturate.inference import artifact

torch = pytest.importorskip("torch", reason="torch")
for _name in ("cloudpickle", "onnx", "onnxruntime", "onnxscript"):
    pytest.importorskip(_name, reason="the extra saturate[inference]")

from torch import nn  # noqa: E402
from torch.nn import functional as F  # noqa: E402

CLASSES, SIDE, WIDTH = 10, 12, 32
TEMPLATES = torch.randn(CLASSES, 1, SIDE, SIDE, generator=torch.Generator().manual_seed(0))


def samples(count: int, seed: int) -> tuple[Any, Any]:
    """Noisy templates, and which ones they are."""
    labels = torch.arange(count) % CLASSES
    return TEMPLATES[labels] + 0.9 * torch.randn(count, 1, SIDE, SIDE, generator=torch.Generator().manual_seed(seed)), labels


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(1, WIDTH, 3, padding=1)
        self.body = nn.ModuleList(nn.Conv2d(WIDTH, WIDTH, 3, padding=1) for _ in range(5))
        self.head = nn.Linear(9 * WIDTH, CLASSES)

    def forward(self, x: Any) -> Any:
        for layer in (self.stem, *self.body):
            x = F.relu(layer(x))
        return self.head(F.avg_pool2d(x, 4).flatten(1))


def trained() -> Any:
    """Some seconds of training; then one channel before body.2 is made a thousand times larger, and its weights there as
    much smaller: the same function, whose 8-bit range leaves nothing for the other channels."""
    torch.manual_seed(0)
    model = Net()
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    x, y = samples(3200, 1)
    for _ in range(60):
        some = torch.randint(len(x), (64,))
        F.cross_entropy(model(x[some]), y[some]).backward()
        optimizer.step()
        optimizer.zero_grad()
    before, breaks = model.body[1], model.body[2]
    with torch.no_grad():
        before.weight[3] *= 3000
        before.bias[3] *= 3000
        breaks.weight[:, 3] /= 3000
    return model.eval()


@pytest.mark.slow
def test_one_layer_back_in_float32_rescues_int8(tmp_path: Any) -> None:
    images, labels = samples(1600, 5)

    def check(run: Any) -> Any:
        return torch.cat([run(batch).argmax(1) == right for batch, right in zip(images.split(64), labels.split(64))])

    result = saturate.optimize(trained(), inputs=[(samples(64, seed)[0],) for seed in range(10, 14)], check=check, time="15m", threads=1,
                               budget=saturate.Budget(max_drop=0.02), workdir=tmp_path, only=["onnx-int8-static"], progress=lambda text: None)
    rows = {one.id: one for one in result.record.candidates}
    broken = next(one for id, one in rows.items() if id.startswith("onnx-int8-static") and not one.kept_layers)
    assert broken.fate == "rejected_accuracy", result.table()
    rescued = [one for one in rows.values() if one.kept_layers and one.verdict == "pass"]
    assert any(one.kept_layers == ["body.2"] for one in rescued), result.table()
    best = result.record.best
    assert best is not None and best.verdict == "pass" and best.speedup_ci[0] > 1.0, result.table()
    assert artifact.read(result.record.artifact).kept_layers == ["body.2"]
