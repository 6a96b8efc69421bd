"""Decoding against the bandwidth of memory, what bench/gpu_evidence.py runs: a GPT with random weights in bfloat16, one text at a time.

Each new token reads all weights but the tables of tokens and positions, and the keys and values so far. So no loop is faster than the device
copies, and the share of that rate that one reaches says what is left to gain.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "examples"))
from speculative_toy import GPT  # examples/ is no package

from saturate.agent import ceilings
from saturate.generation import Budget, optimize

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
LAYERS, WIDTH, NEW = (24, 2048, 64) if DEVICE == "cuda" else (2, 64, 8)
VOCABULARY, PROMPT, PROMPTS = 512, 64, 8

#: Bytes that a weight of a linear layer takes, by the technique that is in the name of a way.
BYTES = {"torchao-weight-only": 1.0, "torchao-int4": 0.5}


def token_bytes(model: torch.nn.Module, way: str) -> float:
    """What one new token in the middle of the text reads. The scales of narrow weights are not counted."""
    width = next((size for name, size in BYTES.items() if name in way), 2.0)
    linear = sum(layer.weight.numel() for layer in model.modules() if isinstance(layer, torch.nn.Linear))
    return width * linear + 2.0 * 2 * LAYERS * WIDTH * (PROMPT + NEW / 2)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--budget", type=float, default=60.0, help="seconds")
    budget_s = parser.parse_args().budget
    torch.manual_seed(0)
    model = GPT(VOCABULARY, PROMPT + NEW, LAYERS, WIDTH, WIDTH // 32).eval().to(DEVICE, torch.bfloat16)
    prompts = torch.randint(VOCABULARY, (PROMPTS, PROMPT)).tolist()
    own: list[Any] = []

    def agreement(run: Callable[..., Any]) -> list[float]:
        """Of each text the share of tokens that are the model's own: the weights are random, and so it is no accuracy."""
        said = run(prompts)
        own.extend(said if not own else ())         # the first that is asked is the model itself
        return [sum(map(int.__eq__, one, other)) / len(other) for one, other in zip(said, own)]

    record = optimize(model, prompts, max_new_tokens=NEW, time=budget_s, check=agreement, budget=Budget(0.5), ways=("compile", "weights")).record
    copied = ceilings.measure(torch, DEVICE).get("copy")
    rows = []
    for row in (record.baseline, *record.candidates):
        rate = row.timing.decode_tokens_per_s if row.timing is not None else None
        read = None if rate is None else rate * token_bytes(model, row.id)
        rows.append({"id": row.id, "fate": row.fate, "reason": row.reason, "decode_tokens_per_s": rate, "read_bytes_per_s": read,
                     "share_of_copy": read / copied if read and copied else None})
    print(json.dumps({"parameters": sum(one.numel() for one in model.parameters()), "copy_bytes_per_s": copied, "verdict": record.verdict, "ways": rows}))


if __name__ == "__main__":
    main()
