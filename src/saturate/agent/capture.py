"""Recording what a training did, update by update, for verification runs only (never in a timed block).

The files are described in `saturate.verify.series`: losses of each micro-step, the gradient norm, a digest of the input
batches, and up to 64 strided entries of every trained tensor, and of every buffer of the modules that hold them, after each
update.
"""

from __future__ import annotations

import json
import math
import os
import threading
import weakref
import zlib
from array import array
from typing import Any

from saturate.agent import formats, leaves, observe, ordering, randomness, sample, settings, succession
from saturate.techniques import _autograd, _common

ENTRIES = 64        # per tensor; a cosine over such samples was within 0.0001 of one over all entries
_DIGEST_ENTRIES = 4096


class Capture:
    """`plan` keys: `folder`, `updates`, `seed`, `aligned`, `deterministic`, `perturb` ({"relative": 2**-9, "seed": 1} or null).
    `times_algorithms`: a technique has cuDNN choose its algorithms by a measurement."""

    def __init__(self, plan: dict[str, Any], times_algorithms: bool = False):
        self.plan = plan
        self.times_algorithms = times_algorithms
        self.rank = 0       # known when the first update ends: a process group may be made later than a loader
        self.updates = 0
        self.on_done: Any = None
        self._parameters: list[Any] = []
        self._buffers: list[tuple[Any, str, int]] = []  # module (weakly), name (some assign a new tensor in each forward), entries
        self._arithmetic: set[str] = set()  # formats of 16 bits that the backward passes of this update compute in
        self._kinds: set[str] = set()       # of operators of cuDNN that they are of
        self._used: dict[int, Any] = {}     # what the backward passes of this update trained, in the order of their graphs
        self._roles = 0
        self._batches: list[str] = []
        self._fetching: set[int] = set()    # threads that took batches out of loaders
        self._log: Any = None
        self._samples: Any = None
        self._code = "f"                    # of the samples' number format, as arrays name it

    def hold_algorithms(self, torch: Any) -> None:
        """Scripts may ask for `cudnn.benchmark` at any time, some in every epoch."""
        if not self.times_algorithms:
            randomness.choose_no_algorithm_by_time(torch)

    def saw_batch(self, tensors: Any, iterator: Any) -> None:
        """A batch left a loader: remember a digest of its shapes and of values spread over it."""
        import torch

        self.hold_algorithms(torch)
        self._fetching.add(threading.get_ident())
        value = 0
        for tensor in tensors:
            seen = sample.entries_of(torch, tensor, _DIGEST_ENTRIES)
            value = zlib.crc32(repr((tuple(tensor.shape), seen)).encode(), value)
        self._batches.append(f"{value:08x}")

    def sees_graph(self, torch: Any, tensors: Any) -> None:
        """A backward pass begins: afterwards the tensors that compiled code has saved are freed, which tell what it computes in."""
        if self.updates == 0:
            self._arithmetic |= {name for name in formats.COARSE if _autograd.computed_in(tensors, getattr(torch, name), torch)}
            self._kinds |= formats.kinds_of(map(_autograd.node_name, _autograd.graph_nodes(tensors, torch)))

    def saw_backward(self, torch: Any, tensors: Any) -> None:
        """Before techniques act, and so in the same order in every run."""
        self.hold_algorithms(torch)
        if self.updates == 0:
            for reference in leaves.reached(tensors):
                if (leaf := reference()) is not None:
                    self._used.setdefault(id(leaf), reference)

    def token(self, session: Any, token: str) -> None:
        """A backward pass or an optimizer's step: recorded are whole updates."""

    def record(self, session: Any) -> None:
        """One update has ended; gradients are still those it used."""
        self.hold_algorithms(session.torch)
        if self.updates == 0:
            self.rank = observe.rank()
            self._begin(session)
        elif session.succeeded != self._roles:
            self._follow(session)
        self._roles = session.succeeded
        if self.rank == 0 and self.updates < self.plan["updates"]:
            self._write(session)
        if self.updates == 1 and self.plan.get("perturb"):      # on every rank: gradients are averaged over all of them
            _perturb(session.torch, self._parameters, **self.plan["perturb"])
        session.losses.clear()
        self._batches.clear()
        self.updates += 1
        if self.updates >= self.plan["updates"] and self.on_done is not None:
            self.on_done()

    def _begin(self, session: Any) -> None:
        self._parameters = self._ordered(session, observe.trained_parameters(session))
        self._buffers = self._statistics(session)
        session.context.gradient_norms.clear()
        if self.rank != 0:
            return
        segments = [len(sample.strided(p, ENTRIES)) for p in self._parameters]
        self._log = open(os.path.join(self.plan["folder"], "capture.jsonl"), "w", encoding="utf-8")  # noqa: SIM115 - open until the process ends
        self._samples = open(os.path.join(self.plan["folder"], "samples.bin"), "wb")  # noqa: SIM115
        doubles = [sample.double(p) for p in self._parameters]
        self._code = "d" if any(doubles) else "f"
        precise = all(doubles) and all(map(sample.double, session.losses))
        header = {"schema": 3, "motif": session.step.describe(), "dims": sum(segments), "segments": segments,
                  "dimensions": [sample.local(p).dim() for p in self._parameters],
                  "statistics": [entries for _, _, entries in self._buffers],
                  "samples": "float64" if any(doubles) else "float32", "precision": "float64" if precise else "float32",
                  **formats.of_training(session.torch, self._parameters, observe.device_kind(self._parameters), session.losses,
                                        self._arithmetic, self._kinds | formats.kinds_in(session.torch, observe.all_modules(session.torch)))}
        self._log.write(json.dumps(header) + "\n")

    def _follow(self, session: Any) -> None:
        """Go on with the parameters of the next fold: those recorded so far stand still. Only with as many entries of each
        tensor, which a series cannot change."""
        parameters, known = self._ordered(session, succession.heirs(session)), {id(p) for p in self._parameters}
        if all(id(p) in known for p in parameters):
            return      # the same ones, by another optimizer
        if [len(sample.strided(p, ENTRIES)) for p in parameters] == [len(sample.strided(p, ENTRIES)) for p in self._parameters]:
            self._parameters = parameters
            buffers = self._statistics(session)
            if [entries for *_, entries in buffers] == [entries for *_, entries in self._buffers]:
                self._buffers = buffers

    def _ordered(self, session: Any, parameters: list[Any]) -> list[Any]:
        return ordering.of_training(session.torch, parameters, self._places())

    def _places(self) -> dict[int, int]:
        used = [identity for identity, reference in self._used.items() if reference() is not None]
        return {identity: place for place, identity in enumerate(used)}

    def _statistics(self, session: Any) -> list[tuple[Any, str, int]]:
        """The buffers of real numbers, of 32 bits or more, of the modules that hold what is trained. In 16 bits whether a running
        statistic moves at all depends on rounding."""
        roots = ordering.holders(session.torch, self._parameters, self._places())
        modules = {id(module): module for root in roots for module in root.modules()}
        return [(weakref.ref(module), name, len(sample.strided(buffer, ENTRIES))) for module in modules.values()
                for name, buffer in module._buffers.items() if _of_numbers(session.torch, buffer)]

    def _write(self, session: Any) -> None:
        freed = session.context.gradient_norms
        norms = [_norm(session.torch, p.grad) if p.grad is not None else freed.pop(id(p), None) for p in self._parameters]
        held = [_buffer(reference(), name) for reference, name, _ in self._buffers]
        known = [buffer for buffer in held if _of_numbers(session.torch, buffer)]
        rows = sample.all_strided([*self._parameters, *known], ENTRIES)
        values = [value for row in rows[:len(self._parameters)] for value in row]
        now = {id(buffer): row for buffer, row in zip(known, rows[len(self._parameters):])}
        for buffer, (_, _, entries) in zip(held, self._buffers):
            row = now.get(id(buffer), [])
            values += row if len(row) == entries else [math.nan] * entries      # a cache that grew, or was dropped
        # How far a thread of the script's own is ahead of the update that ends here is another thing each time.
        ahead = bool(self._fetching - {threading.get_ident()})
        record = {"update": self.updates, "losses": sample.totals(session.losses),
                  "grad_norm": _total(session.torch, norms), "digest": "" if ahead else "".join(self._batches),
                  "settings": settings.of_parameters(succession.players(session), self._parameters)}
        array(self._code, values).tofile(self._samples)
        self._samples.flush()
        self._log.write(json.dumps(record) + "\n")
        self._log.flush()


def _buffer(module: Any, name: str) -> Any:
    """None where it is gone. The buffers of a module of TorchScript are no dictionary, and have no `get`."""
    return module._buffers[name] if module is not None and name in module._buffers else None


def _of_numbers(torch: Any, buffer: Any) -> bool:
    """Whether it can be read as parameters are: of another class, as those of quantised tensors, nobody knows what it allows."""
    if not (type(buffer) in (torch.Tensor, torch.nn.Parameter) or hasattr(buffer, "to_local")):
        return False
    return (not buffer.is_nested and buffer.is_floating_point() and buffer.element_size() >= 4 and buffer.layout is torch.strided
            and buffer.device.type != "meta")


def _norm(torch: Any, gradient: Any) -> Any:
    """Of a sharded one, of this rank's shard: that of the whole is a collective, and the other ranks take no part in it."""
    gradient = sample.local(gradient)
    dense = gradient.coalesce().values() if gradient.is_sparse else gradient
    return torch.linalg.vector_norm(_common.reals(dense.detach(), torch))


def _total(torch: Any, norms: list[Any]) -> float | None:
    known = [norm for norm in norms if norm is not None]
    if not known:
        return None
    return float(torch.linalg.vector_norm(torch.stack([norm.to(known[0].device) for norm in known])))


def _perturb(torch: Any, parameters: list[Any], relative: float, seed: int) -> None:
    """What one rounding to the candidate's number format may do to every entry. The signs are drawn on the CPU, whatever device the
    script has made the default."""
    generator = torch.Generator(device="cpu").manual_seed(seed)
    with torch.no_grad():
        for p in map(sample.local, parameters):
            signs = torch.randint(0, 2, p.shape, generator=generator, dtype=torch.int8, device="cpu").to(p.device) * 2 - 1
            sample.perturb(torch, p, relative, signs)
