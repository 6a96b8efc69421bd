"""Inference techniques that only a GPU can run: each answers like the model, for other inputs and other sizes too."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import aoti_control
import pytest

torch = pytest.importorskip("torch")

from saturate.inference.techniques import aot_inductor, compile_inference, cuda_graphs, sdpa_kernel  # noqa: E402 - after the check for torch
from saturate.inference.techniques._api import Context, NotApplied  # noqa: E402
from saturate.records.inference import ModelFacts  # noqa: E402
from saturate.testing.inference_conformance import undone  # noqa: E402

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")]

WIDTH, BATCH = 256, 4


@pytest.fixture(autouse=True)
def switches_as_before() -> Iterator[None]:
    with undone():
        yield


class Attention(torch.nn.Module):
    """(rows, 64, 256) float16 -> the same."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out = torch.nn.Linear(WIDTH, 3 * WIDTH), torch.nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Any) -> Any:
        q, k, v = self.qkv(x).view(*x.shape[:2], 3, 4, -1).permute(2, 0, 3, 1, 4)
        return self.out(torch.nn.functional.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))


def context_of(model: Any, inputs: Any, folder: Path) -> Context:
    facts = ModelFacts(torch=torch.__version__, device="cuda", batch_size=len(inputs[0][0]), capability=torch.cuda.get_device_capability())
    return Context(torch=torch, model=model.cuda().eval().requires_grad_(False), device="cuda", inputs=inputs, calibration=[], facts=facts,
                   folder=folder, threads=2)


def images(rows: int, seed: int) -> Any:
    return torch.randn(rows, 3, 32, 32, generator=torch.Generator().manual_seed(seed)).cuda()


def applied(technique: Any, options: Any, folder: Path) -> tuple[Context, Callable[..., Any]]:
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Conv2d(3, 32, 3, padding=1), torch.nn.BatchNorm2d(32), torch.nn.ReLU(),
                                torch.nn.AdaptiveAvgPool2d(4), torch.nn.Flatten(), torch.nn.Linear(512, WIDTH))
    context = context_of(model, [(images(BATCH, 0),)], folder)
    technique.apply(context, options)
    return context, context.call or context.model


TECHNIQUES: dict[str, tuple[Any, Any]] = {
    "cuda-graphs": (cuda_graphs, cuda_graphs.Options()), "compile": (compile_inference, compile_inference.Options(freezing=False)),
    "compile-graphs": (compile_inference, compile_inference.Options(mode="reduce-overhead", freezing=False)),
    "aot-inductor": (aot_inductor, aot_inductor.Options(freezing=False))}

#: Exit code of a process in which a technique does not apply; its reason is the last line that it printed.
REFUSED = 3


@pytest.mark.parametrize("name", TECHNIQUES)
def test_each_input_has_its_own_answer(name: str, tmp_path: Path) -> None:
    """In a process of its own, as a candidate has it: machine code that ends its process would take the other tests with it."""
    path = os.pathsep.join([str(Path(__file__).parent), *filter(None, sys.path)])
    code = f"import sys; from pathlib import Path; import {Path(__file__).stem} as tests; tests.answer_each(sys.argv[1], Path(sys.argv[2]))"
    done = subprocess.run([sys.executable, "-c", code, name, str(tmp_path)], capture_output=True, text=True, timeout=600, check=False,
                          env={**os.environ, "PYTHONPATH": path, "PYTHONFAULTHANDLER": "1"})
    if done.returncode == REFUSED:
        pytest.skip(f"not here: {done.stdout.strip().splitlines()[-1]}")
    if name == "aot-inductor" and done.returncode < 0 and (reason := aoti_control.problem()):
        pytest.skip(reason)
    assert done.returncode == 0, f"exit code {done.returncode}\n{done.stderr[-8000:]}"


def answer_each(name: str, folder: Path) -> None:
    """What the test above asks for, in this process."""
    technique, options = TECHNIQUES[name]
    try:
        context, call = applied(technique, options, folder)
    except NotApplied as error:
        print(error)
        sys.exit(REFUSED)
    with torch.inference_mode():
        first, other, larger = images(BATCH, 1), images(BATCH, 2), images(2 * BATCH, 3)
        answer = call(first)
        kept = answer.clone()
        for given in (other, larger, first):        # a second input, a second shape, and the first again
            torch.testing.assert_close(call(given), context.model(given), rtol=1e-2, atol=1e-2)
        assert torch.equal(answer, kept), "no later call writes over what was returned"
        assert not torch.equal(call(first), call(other))
    assert technique.active(context, options).active


@pytest.mark.parametrize("backend", ["flash", "efficient", "cudnn"])
def test_the_attention_kernel_that_was_chosen_runs(backend: str, tmp_path: Path) -> None:
    torch.manual_seed(0)
    x = torch.randn(2, 64, WIDTH, device="cuda", dtype=torch.float16)
    context = context_of(Attention().half(), [(x,)], tmp_path)
    with torch.inference_mode():
        usual, options = context.model(x), sdpa_kernel.Options(backend)
        if backend == "cudnn" and not hasattr(torch._C, "_set_sdp_priority_order"):
            pytest.skip("this torch prefers the plain one to cuDNN's")
        sdpa_kernel.apply(context, options)
        torch.testing.assert_close(context.model(x), usual, rtol=1e-2, atol=1e-2)
    assert sdpa_kernel.active(context, options).active
