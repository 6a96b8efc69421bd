"""Generation on a real device: CUDA graphs, drafts and plain steps give the same greedy tokens."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "inference" / "generation"))

import generation_models as toys  # noqa: E402

from saturate.inference.generation import build  # noqa: E402
from saturate.inference.generation.decode import Request  # noqa: E402

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]

PROMPTS = [[1, 2, 3, 4, 5, 6, 7], [3], [9, 8, 9, 8, 9, 8, 9, 8, 9]]


@pytest.mark.parametrize("compile_mode", [None, "reduce-overhead"])
@pytest.mark.parametrize("draft", [None, "model", build.LOOKUP])
def test_tokens_are_those_of_the_plain_loop(compile_mode, draft):
    torch._dynamo.utils.counters.clear()
    model, request = toys.Cached().cuda(), Request(24)
    wanted = build.build(torch, model, build.Way(), PROMPTS, request).generate(PROMPTS, request).tokens
    given = toys.Cached(seed=3).cuda() if draft == "model" else draft
    lengths = None if compile_mode is None else (4,)        # each length is another compilation
    loop = build.build(torch, model, build.Way(given, compile_mode=compile_mode, lengths=lengths), PROMPTS, request)
    assert loop.generate(PROMPTS, request).tokens == wanted
    assert loop.generate(PROMPTS[:1], request).tokens == wanted[:1], "another batch, other graphs"
    assert torch._dynamo.utils.counters["inductor"]["cudagraph_skips"] == 0
