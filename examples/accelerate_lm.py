"""Train an LSTM language model on words and signs of Python's standard library, with an Accelerate loop.

    python examples/accelerate_lm.py
    accelerate launch examples/accelerate_lm.py --steps 100
"""

import argparse
import collections
import math
import re
import sysconfig
import time
from pathlib import Path

import torch
from accelerate import Accelerator
from accelerate.utils import set_seed
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset


def read_words(count: int) -> list[str]:
    words = []
    for file in sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py")):
        words += re.findall(r"\w+|[^\w\s]|\n", file.read_text(encoding="utf-8"))
        if len(words) >= count:
            break
    return words[:count]


def encode(words: list[str], size: int) -> torch.Tensor:
    """Word numbers, the most frequent first; all words that are too rare share the last number."""
    frequent = collections.Counter(words).most_common(size - 1)
    number = {word: index for index, (word, _) in enumerate(frequent)}
    return torch.tensor([number.get(word, size - 1) for word in words])


class WordModel(nn.Module):
    def __init__(self, vocabulary: int, width: int, layers: int, dropout: float):
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, width)
        self.dropout = nn.Dropout(dropout)
        self.lstm = nn.LSTM(width, width, layers, dropout=dropout, batch_first=True)
        self.head = nn.Linear(width, vocabulary)
        nn.init.normal_(self.embedding.weight, std=0.05)
        self.head.weight = self.embedding.weight

    def forward(self, words):
        hidden, _ = self.lstm(self.dropout(self.embedding(words)))
        return self.head(self.dropout(hidden))


def loss_of(model, words):
    return F.cross_entropy(model(words[:, :-1]).flatten(0, 1), words[:, 1:].flatten())


@torch.no_grad()
def evaluate(model, loader, accelerator) -> float:
    model.eval()
    losses = [accelerator.gather_for_metrics(loss_of(model, words)) for (words,) in loader]
    model.train()
    return torch.stack(losses).mean().item()


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=1000, help="optimizer steps")
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--accumulate", type=int, default=4, help="batches of an optimizer step")
    parser.add_argument("--context", type=int, default=40)
    parser.add_argument("--words", type=int, default=400_000, help="how much of the text is used")
    parser.add_argument("--vocabulary", type=int, default=4000)
    parser.add_argument("--width", type=int, default=192)
    parser.add_argument("--lr", type=float, default=3e-3)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--output", type=Path, default=Path("runs/accelerate_lm"))
    args = parser.parse_args()

    set_seed(args.seed)
    accelerator = Accelerator(gradient_accumulation_steps=args.accumulate)
    words = encode(read_words(args.words), args.vocabulary)
    rows = words[: len(words) // (args.context + 1) * (args.context + 1)].view(-1, args.context + 1)
    cut = int(0.95 * len(rows))
    train = DataLoader(TensorDataset(rows[:cut]), args.batch, shuffle=True, drop_last=True)
    validation = DataLoader(TensorDataset(rows[cut:]), args.batch, drop_last=True)

    model = WordModel(args.vocabulary, args.width, layers=2, dropout=0.2)
    optimizer = torch.optim.Adam(model.parameters(), lr=args.lr)
    model, optimizer, train, validation = accelerator.prepare(model, optimizer, train, validation)

    start, step, epoch = time.perf_counter(), 0, 0
    while step < args.steps:
        for (batch,) in train:
            with accelerator.accumulate(model):
                loss = loss_of(model, batch)
                accelerator.backward(loss)
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                optimizer.zero_grad()
            if not accelerator.sync_gradients:
                continue
            if step % 10 == 0 or step == args.steps - 1:
                accelerator.print(f"step {step:5d}  loss {loss.item():.4f}  {time.perf_counter() - start:.1f} s",
                                  flush=True)
            step += 1
            if step == args.steps:
                break
        epoch += 1
        held_out = evaluate(model, validation, accelerator)
        accelerator.print(f"epoch {epoch}  validation perplexity {math.exp(held_out):.1f}", flush=True)

    accelerator.save_state(str(args.output / "state"))


if __name__ == "__main__":
    main()
