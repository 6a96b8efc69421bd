"""A training small enough for a test: images through a convolution, attention and repeated blocks, AdamW, a DataLoader.

It is driven the way the agent drives a user's training: techniques of stage "import" are applied before the loader is
built, those of stage "model" after two steps.
"""

from __future__ import annotations

import inspect
import random
from dataclasses import dataclass, field
from types import ModuleType
from typing import Any

import torch
from torch.nn import functional

from saturate.agent.context import Context
from saturate.records.facts import Evidence, LoaderFacts, OptimizerFacts

WIDTH = 16
STEPS_BEFORE = 2
STEPS_AFTER = 4


class Block(torch.nn.Module):
    """Pre-norm attention and a linear layer; repeats often enough to be compiled alone."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = torch.nn.LayerNorm(WIDTH)
        self.qkv = torch.nn.Linear(WIDTH, 3 * WIDTH)
        self.out = torch.nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        query, key, value = self.qkv(self.norm(x)).unsqueeze(1).chunk(3, dim=-1)
        return x + self.out(functional.scaled_dot_product_attention(query, key, value).squeeze(1))


class Model(torch.nn.Module):
    """Returns a dictionary, as many public models do. Deterministic: no dropout."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = torch.nn.Conv2d(3, WIDTH, 3, stride=2)
        self.blocks = torch.nn.ModuleList(Block() for _ in range(4))
        self.head = torch.nn.Linear(WIDTH, 4)

    def forward(self, images: torch.Tensor) -> dict[str, torch.Tensor]:
        x = self.stem(images).flatten(2).transpose(1, 2)
        for block in self.blocks:
            x = block(x)
        return {"logits": self.head(x.mean(1)), "features": x}


def remade(attributes: dict[str, Any]) -> Model:
    """A model from the `__dict__` of another, as classes do that reduce themselves."""
    model = Model()
    vars(model).update(attributes)
    return model


class Images(torch.utils.data.Dataset):
    """Thirty-two small random images with their class, the same in every process."""

    def __init__(self) -> None:
        generator = torch.Generator().manual_seed(1)
        self.images = torch.rand(32, 3, 8, 8, generator=generator)
        self.classes = torch.randint(4, (32,), generator=generator)

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        return self.images[index], self.classes[index]


@dataclass
class Workload:
    """One toy training, before or after some steps."""

    context: Context
    model: Model
    optimizer: torch.optim.Optimizer
    loader: Any
    losses: list[float] = field(default_factory=list)
    grads_were_none: bool | None = None
    live_workers: int = 0

    def train(self, steps: int) -> None:
        """Some steps; clears gradients the old way, which `zero-grad-none` is about."""
        done = 0
        while done < steps:
            iterator = iter(self.loader)
            for images, classes in iterator:
                self.optimizer.zero_grad(set_to_none=False)
                self.grads_were_none = all(p.grad is None for p in self.model.parameters())
                loss = functional.cross_entropy(self.model(images)["logits"], classes)
                loss.backward()
                self.optimizer.step()
                self.losses.append(loss.item())
                done += 1
                if done == steps:
                    break
            self.live_workers = sum(worker.is_alive() for worker in getattr(iterator, "_workers", ()))

    def evidence(self) -> Evidence:
        """What the agent would report."""
        group = self.optimizer.param_groups[0]
        loader = LoaderFacts(
            num_workers=self.loader.num_workers, pin_memory=self.loader.pin_memory,
            persistent_workers=self.loader.persistent_workers, prefetch_factor=self.loader.prefetch_factor,
        )
        import gc

        return Evidence(
            dynamo_frames=_dynamo_frames(),
            loaders=(loader,),
            live_workers=self.live_workers,
            optimizers=(OptimizerFacts(kind=type(self.optimizer).__name__, fused=group.get("fused")),),
            threads=torch.get_num_threads(),
            allow_tf32=torch.backends.cuda.matmul.allow_tf32,
            cudnn_benchmark=torch.backends.cudnn.benchmark,
            grads_none_after_zero=self.grads_were_none,
            gc_frozen=gc.get_freeze_count(),
            channels_last=sum(
                p.dim() == 4 and p.is_contiguous(memory_format=torch.channels_last) for p in self.model.parameters()
            ),
            notes=dict(self.context.notes),
        )


def _dynamo_frames() -> int:
    import sys

    utils = sys.modules.get("torch._dynamo.utils")      # not imported: nothing was compiled
    return int(utils.counters["frames"]["ok"]) if utils else 0


def start(technique: ModuleType | None = None, options: Any = None) -> Workload:
    """A toy training after `STEPS_BEFORE` steps, where stage "model" begins; stage "import" has been applied, and what one of stage
    "model" prepares before there is a model."""
    random.seed(0)
    torch.manual_seed(0)
    context = Context(torch)
    if technique is not None and technique.TECHNIQUE.stage == "import":
        technique.apply(context, options)
    if technique is not None and technique.TECHNIQUE.stage == "model" and hasattr(technique, "prepare"):
        technique.prepare(context, options)
    model = Model().train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    workload = Workload(context, model, optimizer, make_loader(context))
    workload.train(STEPS_BEFORE)
    context.modules, context.optimizers, context.device = (model,), (optimizer,), "cpu"
    return workload


def make_loader(context: Context) -> Any:
    """Build a DataLoader as the agent does: techniques see its arguments first."""
    dataset = Images()
    signature = inspect.signature(torch.utils.data.DataLoader.__init__)
    arguments = {name: parameter.default for name, parameter in list(signature.parameters.items())[2:]}
    given = {"batch_size": 8, "shuffle": True}
    arguments.update(given)
    changes: dict[str, Any] = {}
    for rewrite in context.loader_rewrites:
        changes.update(rewrite(dataset, {"dataset": dataset, **arguments, **changes}, frozenset(given)))
    return torch.utils.data.DataLoader(dataset, **{**given, **changes})
