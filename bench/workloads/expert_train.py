"""The GPT of `char_gpt.py`, trained by a plain loop, with Accelerate or with Lightning, and set by hand.

    python bench/workloads/expert_train.py --loop accelerate --precision bf16 --compile

The three loops do the same work in each step: the same batches, loss, clipping and optimizer.
"""

import argparse

import torch
from char_gpt import GPT, crops, text
from torch import nn
from torch.nn import functional as F


class Crops(torch.utils.data.IterableDataset):
    """Whole batches of random crops."""

    def __init__(self, args: argparse.Namespace):
        self.args, self.data = args, text()

    def __iter__(self):
        for _ in range(self.args.steps):
            yield crops(self.data, self.args.batch, self.args.context)


def loss_of(model: nn.Module, tokens: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())


def plain(args: argparse.Namespace, model: nn.Module, loader: torch.utils.data.DataLoader) -> None:
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for tokens in loader:
        with torch.autocast("cpu", torch.bfloat16, enabled=args.precision == "bf16"):
            loss = loss_of(model, tokens)
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()


def with_accelerate(args: argparse.Namespace, model: nn.Module, loader: torch.utils.data.DataLoader) -> None:
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=True, mixed_precision="bf16" if args.precision == "bf16" else "no")
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    for tokens in loader:
        loss = loss_of(model, tokens)
        optimizer.zero_grad()
        accelerator.backward(loss)
        accelerator.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()


def with_lightning(args: argparse.Namespace, model: nn.Module, loader: torch.utils.data.DataLoader) -> None:
    import lightning

    class Module(lightning.LightningModule):
        def __init__(self):
            super().__init__()
            self.model = model

        def training_step(self, tokens, index):
            return loss_of(self.model, tokens)

        def configure_optimizers(self):
            return torch.optim.AdamW(self.parameters(), lr=1e-3)

    trainer = lightning.Trainer(
        accelerator="cpu", devices=1, max_epochs=1, precision="bf16-mixed" if args.precision == "bf16" else "32-true",
        gradient_clip_val=1.0, logger=False, enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False)
    trainer.fit(Module(), loader)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--loop", choices=["plain", "accelerate", "lightning"], default="plain")
    parser.add_argument("--precision", choices=["32", "bf16"], default="32")
    parser.add_argument("--compile", action="store_true")
    parser.add_argument("--steps", type=int, default=1_000_000)
    parser.add_argument("--width", type=int, default=128)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--context", type=int, default=64)
    parser.add_argument("--batch", type=int, default=8)
    args = parser.parse_args()
    torch.manual_seed(0)
    model = GPT(args.width, args.layers, args.context)
    if args.compile:
        model = torch.compile(model)
    loader = torch.utils.data.DataLoader(Crops(args), batch_size=None)
    {"plain": plain, "accelerate": with_accelerate, "lightning": with_lightning}[args.loop](args, model, loader)


if __name__ == "__main__":
    main()
