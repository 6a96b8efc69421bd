"""Train a small transformer that tells from which module of Python's standard library a line of source code comes, and
use it.

    python examples/text_transformer.py
    python examples/text_transformer.py --epochs 2 --seed 1

Other programs import what they need: `build()` is the trained transformer, `loader()` are batches of lines that it has
not seen, and `score(run)` says for each validation line whether `run` tells its module.
"""

import argparse
import collections
import functools
import re
import sysconfig
import time
from pathlib import Path

import torch
from torch import nn
from torch.nn import functional as F

MODULES = ("_pydecimal", "argparse", "doctest", "inspect", "ipaddress", "subprocess", "tarfile", "typing")
CALIBRATION, VALIDATION = 512, 2048               # of some 16000 lines; the others are for training
WORDS, LENGTH, BATCH = 4096, 32, 32
PADDING, UNKNOWN = 0, 1


def lines() -> list[tuple[tuple[str, ...], int]]:
    """Lines of at least three words, as their first words, each once, with the number of their module; those of several
    modules are left out."""
    found = collections.defaultdict(set)
    for number, module in enumerate(MODULES):
        text = (Path(sysconfig.get_paths()["stdlib"]) / f"{module}.py").read_text(encoding="utf-8")
        for line in text.splitlines():
            words = re.findall(r"[a-z]+|\d|[^\sa-z\d]", line.lower())
            if len(words) >= 3:
                found[tuple(words[:LENGTH])].add(number)
    return sorted((words, owners.pop()) for words, owners in found.items() if len(owners) == 1)


@functools.cache
def data() -> dict[str, tuple[torch.Tensor, torch.Tensor]]:
    """Word numbers, padded to the same length, and modules; the same parts each time."""
    everything = lines()
    order = torch.randperm(len(everything), generator=torch.Generator().manual_seed(0)).tolist()
    chosen = [everything[index] for index in order]
    train = chosen[CALIBRATION + VALIDATION:]
    counts = collections.Counter(word for words, _ in train for word in words)
    ranked = sorted(counts, key=lambda word: (-counts[word], word))[:WORDS - 2]
    number = {word: index + 2 for index, word in enumerate(ranked)}

    def encode(part):
        tokens = torch.full((len(part), LENGTH), PADDING)
        for row, (words, _) in enumerate(part):
            tokens[row, :len(words)] = torch.tensor([number.get(word, UNKNOWN) for word in words])
        return tokens, torch.tensor([module for _, module in part])

    return {"train": encode(train), "calibration": encode(chosen[:CALIBRATION]),
            "validation": encode(chosen[CALIBRATION:CALIBRATION + VALIDATION])}


class Block(nn.Module):
    def __init__(self, width: int, heads: int, dropout: float):
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))
        self.dropout = nn.Dropout(dropout)

    def forward(self, x, mask):
        batch, time, width = x.shape
        q, k, v = self.qkv(self.norm1(x)).view(batch, time, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(q, k, v, attn_mask=mask)
        x = x + self.dropout(self.out(y.transpose(1, 2).reshape(batch, time, width)))
        return x + self.dropout(self.mlp(self.norm2(x)))


class Classifier(nn.Module):
    def __init__(self, width: int, layers: int, heads: int, dropout: float):
        super().__init__()
        self.word, self.position = nn.Embedding(WORDS, width), nn.Embedding(LENGTH, width)
        self.dropout = nn.Dropout(dropout)
        self.blocks = nn.ModuleList(Block(width, heads, dropout) for _ in range(layers))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, len(MODULES))

    def forward(self, tokens):
        real = tokens != PADDING
        x = self.dropout(self.word(tokens) + self.position(torch.arange(tokens.shape[1], device=tokens.device)))
        for block in self.blocks:
            x = block(x, real[:, None, None, :])
        weights = real.unsqueeze(-1).to(x.dtype)
        return self.head((self.norm(x) * weights).sum(dim=1) / weights.sum(dim=1))


def build(path: str | Path = "runs/text_transformer/model.pt") -> nn.Module:
    """The trained transformer."""
    saved = torch.load(path, weights_only=True)
    model = Classifier(**saved["shape"])
    model.load_state_dict(saved["model"])
    return model.eval()


def loader() -> list[tuple[torch.Tensor]]:
    """Batches of lines from the calibration part."""
    return [(tokens,) for tokens in data()["calibration"][0].split(BATCH)]


def score(run) -> list[bool]:
    """For each validation line, whether its module is told."""
    tokens, modules = data()["validation"]
    answers = torch.cat([run(batch).argmax(dim=1) for batch in tokens.split(BATCH)])
    return (answers == modules).tolist()


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--epochs", type=int, default=4)
    parser.add_argument("--steps", type=int, default=None, help="at most so many in each epoch")
    parser.add_argument("--batch", type=int, default=BATCH)
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--width", type=int, default=128)
    parser.add_argument("--heads", type=int, default=4)
    parser.add_argument("--dropout", type=float, default=0.2)
    parser.add_argument("--lr", type=float, default=1e-3)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--output", type=Path, default=Path("runs/text_transformer"))
    args = parser.parse_args()

    torch.manual_seed(args.seed)
    tokens, modules = data()["train"]
    shape = {"width": args.width, "layers": args.layers, "heads": args.heads, "dropout": args.dropout}
    model = Classifier(**shape)
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr, weight_decay=0.1)
    steps = min(len(tokens) // args.batch, args.steps or len(tokens))
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, args.lr, total_steps=args.epochs * steps)
    start = time.perf_counter()
    for epoch in range(args.epochs):
        model.train()
        for step, batch in enumerate(torch.randperm(len(tokens)).split(args.batch)[:steps]):
            loss = F.cross_entropy(model(tokens[batch]), modules[batch])
            optimizer.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            schedule.step()
            if step % 100 == 0:
                print(f"epoch {epoch:3d}  step {step:4d}  loss {loss.item():.4f}  {time.perf_counter() - start:.1f} s", flush=True)
        model.eval()
        with torch.no_grad():
            right = score(model)
        print(f"epoch {epoch:3d}  validation accuracy {sum(right) / len(right):.3f}", flush=True)

    args.output.mkdir(parents=True, exist_ok=True)
    torch.save({"model": model.state_dict(), "shape": shape}, args.output / "model.pt")


if __name__ == "__main__":
    main()
