"""Models that a candidate's process imports by name."""

from __future__ import annotations

import faulthandler
import os
import random
import resource
import signal
import sys
import tempfile
from dataclasses import dataclass

import numpy
import torch


@dataclass
class Answer:
    logits: torch.Tensor
    extra: dict[str, torch.Tensor]
    name: str = "answer"


@dataclass
class OnlyIn:
    """Can be unpickled in one process only."""

    process: int

    def __setstate__(self, state: dict[str, int]) -> None:
        if state["process"] != os.getpid():
            raise RuntimeError("only here")


def only_in_this(context: object) -> OnlyIn:
    return OnlyIn(os.getpid())


def temporary_file(context: object) -> str:
    """One that stays, as a compiler's does when it is killed."""
    descriptor, path = tempfile.mkstemp()
    os.close(descriptor)
    return path


def page_faults(context: object) -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt


def surroundings(context: object) -> dict[str, object]:
    """What a process finds when it begins."""
    names = ("SIGINT", "SIGTERM", "SIGPIPE", "SIGXFSZ", "SIGCHLD")
    with open("/proc/self/environ", "rb") as file:
        begun = file.read().split(b"\0")
    return {"environment": dict(os.environ), "mark": [word.decode() for word in begun if word.startswith(b"SATURATE_WORKER=")],
            "path": list(sys.path), "folder": os.getcwd(), "temporary": tempfile.gettempdir(),
            "signals": [str(signal.getsignal(getattr(signal, name))) for name in names], "descriptors": len(os.listdir("/proc/self/fd")),
            "session": os.getsid(0) == os.getpid(), "faults": faulthandler.is_enabled(), "threads": torch.get_num_threads()}


def shared_bytes(context: object) -> int:
    """Of its own memory, what another process has as well."""
    with open("/proc/self/smaps_rollup", encoding="ascii") as file:
        sizes = {line.split(":")[0]: int(line.split()[1]) * 1024 for line in file if line.endswith("kB\n")}
    return sizes["Anonymous"] - sizes["Pss_Anon"]


def product(context: object) -> float:
    """By the threads of both libraries, which a fork has to start anew."""
    ones = numpy.ones((1024, 64), numpy.float32)
    return min(float((ones @ ones.T).max()), float((torch.from_numpy(ones) @ torch.from_numpy(ones).T).max()))


def chance(context: object) -> tuple[float, float]:
    return random.random(), float(numpy.random.rand())


class Pair(torch.nn.Module):
    """Returns a tuple; refuses inputs with another number of features by itself."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(7)
        self.layer = torch.nn.Linear(6, 3)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        y = self.layer(x)
        return y, y.softmax(-1)


class Structured(torch.nn.Module):
    """A dataclass with a dictionary inside, two inputs, an integer one among them, and a tied weight."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(7)
        self.embedding = torch.nn.Embedding(11, 4)
        self.head = torch.nn.Linear(4, 11, bias=False)
        self.head.weight = self.embedding.weight
        self.act = torch.nn.ReLU()
        self.norm = torch.nn.LayerNorm(4)

    def forward(self, ids: torch.Tensor, scale: torch.Tensor) -> Answer:
        hidden = self.act(self.norm(self.act(self.embedding(ids))))
        hidden = torch.nn.functional.scaled_dot_product_attention(hidden, hidden, hidden) * scale
        return Answer(self.head(hidden), {"hidden": hidden, "again": hidden})


class Branches(torch.nn.Module):
    """Control flow that depends on the values of its input."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + 1 if x.sum() > 0 else x * 2


class Noisy(torch.nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.dropout(x, 0.5, training=True)


class Doubles(torch.nn.Module):
    """Writes to its input."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.mul_(2)


class Force(torch.nn.Module):
    """Minus the gradient of an energy, which it needs in its forward. `alone`: it sees to gradients by itself."""

    def __init__(self, alone: bool = True) -> None:
        super().__init__()
        self.alone = alone

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.set_grad_enabled(self.alone or torch.is_grad_enabled()):
            x = x.detach().requires_grad_()
            return -torch.autograd.grad(x.square().sum(), x)[0]


class Slow(torch.nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        import time

        time.sleep(30)
        return x


class Encoder(torch.nn.Module):
    """Served through a method."""

    def encode(self, x: torch.Tensor, shift: float = 0.0) -> torch.Tensor:
        return x.flatten(1) + shift

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x
