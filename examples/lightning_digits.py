"""Train a small vision transformer on scikit-learn's handwritten digits with Lightning.

    python examples/lightning_digits.py
    python examples/lightning_digits.py --epochs 5 --seed 1
"""

import argparse
from pathlib import Path

import lightning as L
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger
from sklearn.datasets import load_digits
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset, random_split


class Digits(L.LightningDataModule):
    """1797 grey images of 8 x 8 pixels with values 0 to 16."""

    def __init__(self, batch: int):
        super().__init__()
        self.batch = batch

    def setup(self, stage: str):
        digits = load_digits()
        images = torch.tensor(digits.images, dtype=torch.float32).unsqueeze(1) / 8 - 1
        everything = TensorDataset(images, torch.tensor(digits.target))
        always_alike = torch.Generator().manual_seed(0)
        self.train, self.validation = random_split(everything, [0.8, 0.2], always_alike)

    def train_dataloader(self):
        return DataLoader(self.train, self.batch, shuffle=True, drop_last=True)

    def val_dataloader(self):
        return DataLoader(self.validation, self.batch)


class VisionTransformer(L.LightningModule):
    def __init__(self, width: int = 128, layers: int = 4, heads: int = 4, dropout: float = 0.1, lr: float = 1e-3):
        super().__init__()
        self.save_hyperparameters()
        self.patches = nn.Conv2d(1, width, kernel_size=2, stride=2)         # 16 tokens
        self.position = nn.Parameter(0.02 * torch.randn(16, width))
        layer = nn.TransformerEncoderLayer(
            width, heads, 4 * width, dropout, activation="gelu", batch_first=True, norm_first=True)
        self.encoder = nn.TransformerEncoder(layer, layers, norm=nn.LayerNorm(width), enable_nested_tensor=False)
        self.head = nn.Linear(width, 10)

    def forward(self, images):
        tokens = self.patches(images).flatten(2).transpose(1, 2) + self.position
        return self.head(self.encoder(tokens).mean(dim=1))

    def training_step(self, batch, index):
        images, labels = batch
        loss = F.cross_entropy(self(images), labels)
        self.log("train_loss", loss, prog_bar=True)
        return loss

    def validation_step(self, batch, index):
        images, labels = batch
        logits = self(images)
        self.log("val_loss", F.cross_entropy(logits, labels), prog_bar=True)
        self.log("val_accuracy", (logits.argmax(dim=1) == labels).float().mean(), prog_bar=True)

    def configure_optimizers(self):
        optimizer = torch.optim.AdamW(self.parameters(), lr=self.hparams.lr, weight_decay=0.01)
        steps = self.trainer.estimated_stepping_batches
        schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=self.hparams.lr, total_steps=steps)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--epochs", type=int, default=40)
    parser.add_argument("--steps", type=int, default=-1, help="optimizer steps, at most (default: no limit)")
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--lr", type=float, default=1e-3)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--output", type=Path, default=Path("runs/lightning_digits"))
    args = parser.parse_args()

    L.seed_everything(args.seed, workers=True)
    trainer = L.Trainer(
        max_epochs=args.epochs, max_steps=args.steps, default_root_dir=args.output, log_every_n_steps=10,
        logger=CSVLogger(args.output, name="log"),
        callbacks=[ModelCheckpoint(args.output / "checkpoints", save_last=True)],
    )
    model, digits = VisionTransformer(lr=args.lr), Digits(args.batch)
    trainer.fit(model, digits)
    print(f"loss {trainer.callback_metrics['train_loss'].item():.4f}")
    trainer.validate(model, digits)


if __name__ == "__main__":
    main()
