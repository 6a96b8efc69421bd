"""Recording what a training did, update by update, for verification runs only (never in a timed block).

Writes `capture.jsonl` (one object per update: micro-step losses, gradient norm) and `samples.f32` (little-endian
float32: up to 64 strided entries of every trained tensor after each update).
"""

from __future__ import annotations

import json
import os
from array import array
from typing import Any

ENTRIES = 64        # per tensor; a cosine over such samples was within 0.0001 of the full one (see docs/method.md)


class Capture:
    """`plan` keys: `folder`, `updates`, `seed`, `aligned`, `perturb` ({"relative": 2**-9, "seed": 1} or null)."""

    def __init__(self, plan: dict[str, Any], rank: int):
        self.plan = plan
        self.writes = rank == 0
        self.updates = 0
        self.on_done: Any = None
        self._parameters: list[Any] | None = None
        if self.writes:
            self._log = open(os.path.join(plan["folder"], "capture.jsonl"), "w", encoding="utf-8")  # noqa: SIM115 - lives as long as the process
            self._samples = open(os.path.join(plan["folder"], "samples.f32"), "wb")  # noqa: SIM115

    def record(self, session: Any) -> None:
        """One update has ended; gradients are still those it used."""
        from saturate.agent import observe

        if self._parameters is None:
            self._parameters = observe.trained_parameters(session)
        parameters = self._parameters
        if self.updates == 0 and self.plan.get("perturb"):
            _perturb(session.torch, parameters, **self.plan["perturb"])
        if self.writes and self.updates < self.plan["updates"]:
            losses = [float(loss.detach().double().sum()) for loss in session.losses]
            sample = [value for p in parameters for value in _strided(p)]
            record = {"update": self.updates, "losses": losses,
                      "grad_norm": _norm(session.torch, [p.grad for p in parameters if p.grad is not None]),
                      "dims": len(sample), "motif": session.step.describe()}
            self._log.write(json.dumps(record) + "\n")
            self._log.flush()
            array("f", sample).tofile(self._samples)
            self._samples.flush()
        session.losses.clear()
        self.updates += 1
        if self.updates >= self.plan["updates"] and self.on_done is not None:
            self.on_done()


def _strided(parameter: Any) -> list[float]:
    flat = parameter.detach().reshape(-1)
    return flat[:: max(1, flat.numel() // ENTRIES)][:ENTRIES].float().tolist()


def _norm(torch: Any, gradients: list[Any]) -> float:
    dense = [g.coalesce().values() if g.is_sparse else g for g in gradients]
    if not dense:
        return 0.0
    return float(torch.linalg.vector_norm(torch.stack([torch.linalg.vector_norm(g.detach().float()) for g in dense])))


def _perturb(torch: Any, parameters: list[Any], relative: float, seed: int) -> None:
    """Multiply every entry by 1 +- relative: what one rounding to the candidate's number format may do."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for p in parameters:
            signs = torch.randint(0, 2, p.shape, generator=generator, dtype=torch.int8).to(p.device) * 2 - 1
            p.mul_(1 + relative * signs.to(p.dtype))
