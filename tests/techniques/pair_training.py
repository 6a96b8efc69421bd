"""A training that does what scripts do in the middle of one: saves, resumes, copies, freezes, rolls back, converts, begins anew.

`whole` writes down what came of it; `resumed` goes on from a checkpoint of it; `loaded` reads what it saved where nobody has heard of
saturate. Run by `pair_matrix`, each in a process of its own.
"""

from __future__ import annotations

import copy
import io
import json
import pickle
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn import functional

BATCH, SAMPLES = 8, 96


class Net(nn.Module):
    """`first`: the part that is frozen for a while. `extra` is given to the optimizer late."""

    def __init__(self, outputs: int):
        super().__init__()
        self.extra, self.use_extra = nn.Parameter(torch.zeros(outputs)), False
        self.register_buffer("table", torch.linspace(0, 1, 300_000))    # a checkpoint that is worth a store

    def last(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.extra if self.use_extra else x


class Conv(Net):
    def __init__(self) -> None:
        super().__init__(4)
        self.first = nn.Conv2d(3, 16, 3, padding=1, bias=False)
        self.body = nn.Sequential(nn.BatchNorm2d(16), nn.ReLU(), nn.Conv2d(16, 32, 3, stride=2, bias=False), nn.BatchNorm2d(32), nn.ReLU())
        self.head = nn.Linear(32, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(self.head(self.body(self.first(x)).mean((2, 3)) + self.table[:32]))


class Block(nn.Module):
    def __init__(self, width: int):
        super().__init__()
        self.norm, self.qkv, self.out = nn.LayerNorm(width), nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        query, key, value = self.qkv(self.norm(x)).unflatten(-1, (3, 2, -1)).permute(2, 0, 3, 1, 4)
        x = x + self.out(functional.scaled_dot_product_attention(query, key, value, is_causal=True).transpose(1, 2).flatten(2))
        return x + self.mlp(x)


class Text(Net):
    """The embedding is the head's weight as well."""

    def __init__(self) -> None:
        super().__init__(64)
        self.embedding, self.head = nn.Embedding(64, 32), nn.Linear(32, 64, bias=False)
        self.head.weight = self.embedding.weight
        self.blocks = nn.ModuleList(Block(32) for _ in range(3))
        self.first = self.blocks[0]

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x)
        return self.last(self.head(x))


class Encoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv, self.linear = nn.Conv2d(3, 8, 3, padding=1), nn.Linear(8 * 64, 64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(self.linear(torch.relu(self.conv(x)).flatten(1)))


class Head(Net):
    """Frozen in part from the beginning: without momentum where others have it, once it is trained."""

    def __init__(self) -> None:
        super().__init__(4)
        self.first, self.out = nn.Linear(64, 64).requires_grad_(False), nn.Linear(64, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(self.out(torch.relu(self.first(x)) + self.table[:64]))


class Images(torch.utils.data.Dataset):
    """Items that take long enough to be made that a cache keeps them."""

    def __init__(self) -> None:
        generator = torch.Generator().manual_seed(1)
        self.images = torch.rand(SAMPLES, 3, 8, 8, generator=generator)
        self.classes = torch.randint(4, (SAMPLES,), generator=generator)

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        sum(range(12_000))
        return self.images[index] * 2 - 1, self.classes[index]


def rows(text: bool) -> torch.utils.data.Dataset:
    generator = torch.Generator().manual_seed(1)
    if text:
        return torch.utils.data.TensorDataset(*(torch.randint(64, (SAMPLES, 8), generator=generator) for _ in range(2)))
    return torch.utils.data.TensorDataset(torch.rand(SAMPLES, 3, 8, 8, generator=generator), torch.randint(4, (SAMPLES,), generator=generator))


KINDS = {"conv": (Conv,), "text": (Text,), "two": (Encoder, Head)}


class Training:
    """`clips`: it reads gradients, clips them, and leaves a step out. `seen`: what came of it, as JSON."""

    def __init__(self, kind: str, clips: bool):
        torch.manual_seed(0)
        self.kind, self.clips = kind, clips
        self.models: list[Any] = [made() for made in KINDS[kind]]
        self.build_optimizers(lambda name: name != "extra")
        data = Images() if kind == "conv" else rows(kind == "text")
        self.loader = torch.utils.data.DataLoader(data, batch_size=BATCH, shuffle=True)
        self.fixed = next(iter(torch.utils.data.DataLoader(data, batch_size=BATCH)))
        self.seen: dict[str, Any] = {"losses": [], "gradients": [], "outputs": [], "rates": [], "facts": {}, "problems": []}

    def build_optimizers(self, wanted: Any) -> None:
        trained = [[p for name, p in model.named_parameters() if wanted(name)] for model in self.models]
        self.optimizers: list[torch.optim.Optimizer] = [torch.optim.AdamW(trained[0], lr=1e-3)]
        self.optimizers += [torch.optim.SGD(more, lr=0.02, momentum=0.9) for more in trained[1:]]
        self.schedulers = [torch.optim.lr_scheduler.StepLR(optimizer, 5, 0.8) for optimizer in self.optimizers]

    def output(self, models: list[Any], x: torch.Tensor) -> torch.Tensor:
        x = x.to(next(models[0].parameters()).dtype) if x.is_floating_point() else x
        for model in models:
            x = model(x)
        return x

    def update(self, x: torch.Tensor, y: torch.Tensor, models: list[Any], optimizers: list[Any], skipped: bool = False) -> float:
        for optimizer in optimizers:
            optimizer.zero_grad(set_to_none=False)
        loss = functional.cross_entropy(self.output(models, x).flatten(0, -2), y.flatten())
        loss.backward()
        if self.clips:
            for model in models:
                nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            self.seen["gradients"] += [p.grad.double().norm().item() for model in models for p in model.parameters() if p.grad is not None]
        for optimizer in optimizers:
            optimizer.zero_grad() if skipped else optimizer.step()
        return loss.item()

    def train(self, steps: int, before: dict[int, Any] | None = None, skips: int = 0) -> None:
        """So many steps, from a new epoch on. `before`: what the script does before some of them."""
        done = 0
        while done < steps:
            for x, y in self.loader:
                done += 1
                (before or {}).get(done, lambda: None)()
                self.seen["losses"].append(self.update(x, y, self.models, self.optimizers, skipped=self.clips and done == skips))
                for scheduler in self.schedulers:
                    scheduler.step()
                if done == steps:
                    break
        self.seen["rates"].append([scheduler.get_last_lr() for scheduler in self.schedulers])

    def evaluate(self, models: list[Any] | None = None) -> None:
        models = models or self.models
        for model in models:
            model.eval()
        with torch.no_grad():
            self.seen["outputs"].append(self.output(models, self.fixed[0]).flatten()[:16].tolist())
        for model in models:
            model.train()

    def state(self) -> dict[str, Any]:
        return {"rng": torch.get_rng_state(), **{name: [one.state_dict() for one in getattr(self, name)] for name in ("models", "optimizers", "schedulers")}}

    def restore(self, state: dict[str, Any]) -> None:
        for name in ("models", "optimizers", "schedulers"):
            for one, saved in zip(getattr(self, name), state[name]):
                one.load_state_dict(saved)

    # -- what is looked at -------------------------------------------------------------------------------------------

    def look(self, where: str) -> None:
        """At types, state dicts, copies that train beside, and pickles."""
        if [type(model) for model in self.models] != list(KINDS[self.kind]):
            self.problem(where, f"models are of types {[type(model) for model in self.models]}")
        self.seen["facts"][f"{where}: models"] = [described(model.state_dict()) for model in self.models]
        self.seen["facts"][f"{where}: optimizers"] = [described(optimizer.state_dict()) for optimizer in self.optimizers]
        drawn, before = torch.get_rng_state(), [p.detach().clone() for model in self.models for p in model.parameters()]
        models, optimizers = copy.deepcopy((self.models, self.optimizers))
        self.seen["losses"] += [self.update(*self.fixed, models, optimizers) for _ in range(3)]
        if not all(torch.equal(p, old) for p, old in zip((p for model in self.models for p in model.parameters()), before)):
            self.problem(where, "training a deep copy changed the original")
        for name in ("models", "optimizers"):
            for one in getattr(self, name):
                self.look_at_pickles(f"{where}: {name}", one)
        if not torch.equal(drawn, torch.get_rng_state()):
            self.problem(where, "saving and copying drew random numbers")

    def look_at_pickles(self, where: str, one: Any) -> None:
        buffer = io.BytesIO()
        torch.save(one, buffer)
        for text, load in ((pickle.dumps(one), pickle.loads), (buffer.getvalue(), lambda text: torch.load(io.BytesIO(text), weights_only=False))):
            if b"saturate" in text:
                self.problem(where, "a pickle names saturate")
            if not same(load(text).state_dict(), one.state_dict()):
                self.problem(where, "a pickle holds another state")

    def problem(self, where: str, text: str) -> None:
        self.seen["problems"].append(f"{where}: {text}")

    def write(self, path: Path) -> None:
        path.write_text(json.dumps(self.seen), encoding="utf-8")


def described(value: Any) -> Any:
    """A state dict without its numbers."""
    if isinstance(value, torch.Tensor):
        return [type(value).__name__, str(value.dtype), str(value.device), list(value.shape), list(value.stride())]
    if isinstance(value, dict):
        return {str(name): described(one) for name, one in value.items()}
    return [described(one) for one in value] if isinstance(value, (list, tuple)) else value


def same(a: Any, b: Any) -> bool:
    if isinstance(a, torch.Tensor):
        return a.dtype == b.dtype and torch.equal(a, b)
    if isinstance(a, dict):
        return list(a) == list(b) and all(same(a[name], b[name]) for name in a)
    return len(a) == len(b) and all(map(same, a, b)) if isinstance(a, (list, tuple)) else bool(a == b)


# -- what is run -------------------------------------------------------------------------------------------------------

EPOCH = SAMPLES // BATCH


def whole(kind: str, clips: bool, folder: Path) -> None:
    training = Training(kind, clips)
    for number, steps in enumerate((EPOCH - 2, 1, 1)):      # an epoch: the loader begins anew, as it does for who resumes
        training.train(steps)
        if number == 2:
            training.look("first")
            training.evaluate()
        torch.save(training.state(), folder / f"state_{number}.pt")
    for number, (model, optimizer) in enumerate(zip(training.models, training.optimizers)):
        torch.save(model, folder / f"model_{number}.pt")
        torch.save(optimizer, folder / f"optimizer_{number}.pt")
    remembered, average = copy.deepcopy(training.state()), copy.deepcopy(training.models)
    began = len(training.seen["losses"])
    training.train(EPOCH)
    training.seen["resumed"] = training.seen["losses"][began:]
    last, kept = training.models[-1], []

    def use_extra() -> None:
        last.use_extra = True
        training.optimizers[-1].add_param_group({"params": [last.extra], "lr": 0.01})

    def train_first(on: bool) -> None:
        last.first.requires_grad_(on)
        for parameter in last.first.parameters():
            parameter.grad = None

    def follow() -> None:
        with torch.no_grad():
            for one, model in zip(average, training.models):
                for a, b in zip(one.state_dict().values(), model.state_dict().values()):
                    a.lerp_(b, 0.1) if a.is_floating_point() else a.copy_(b)

    training.train(14, skips=7, before={
        1: lambda: kept.extend(model.state_dict() for model in training.models),        # they share memory
        2: lambda: train_first(kind == "two"), 5: lambda: train_first(True), 6: lambda: (kept.clear(), training.evaluate()),
        8: follow, 9: lambda: training.restore(remembered), 10: follow, 11: use_extra, 12: follow,
    })
    training.look("later")
    training.evaluate()
    training.evaluate(average)
    for model in training.models:
        model.double()
    for optimizer in training.optimizers:
        optimizer.load_state_dict(optimizer.state_dict())
    training.train(3)
    for model in training.models:
        model.float()
    training.build_optimizers(lambda name: True)
    training.train(8)
    training.look("anew")
    training.evaluate()
    training.write(folder / "whole.json")


def resumed(kind: str, clips: bool, folder: Path, checkpoint: Path) -> None:
    training = Training(kind, clips)
    state = torch.load(checkpoint, weights_only=True)
    training.restore(state)
    torch.set_rng_state(state["rng"])
    training.train(EPOCH)
    training.write(folder / f"{folder.name}.json")


def loaded(kind: str, clips: bool, folder: Path, saved: Path) -> None:
    training = Training(kind, clips)
    for number in range(len(training.models)):
        training.models[number] = torch.load(saved / f"model_{number}.pt", weights_only=False)
        optimizer = torch.load(saved / f"optimizer_{number}.pt", weights_only=False)
        training.seen["facts"][f"optimizer {number}"] = described(optimizer.state_dict())
        if getattr(vars(training.models[number]).get("forward"), "__func__", KINDS[kind][number].forward) is not KINDS[kind][number].forward:
            training.problem("loaded", "a model carries a forward of its own")
    training.evaluate()
    training.write(folder / f"{folder.name}.json")
