"""An LSTM on text, by back-propagation through time over contiguous columns; no DataLoader. An ordinary training script.

    python bench/workloads/lstm_text.py --steps 100
"""

import argparse
import sysconfig
from pathlib import Path

import torch
from torch import nn
from torch.nn import functional as F


class Language(nn.Module):
    def __init__(self, width: int, layers: int, vocabulary: int = 128):
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, width)
        self.lstm = nn.LSTM(width, width, layers)
        self.head = nn.Linear(width, vocabulary)

    def forward(self, tokens, state):
        hidden, state = self.lstm(self.embedding(tokens), state)
        return self.head(hidden), state


def columns(batch: int) -> torch.Tensor:
    """Text as character codes, shape (time, batch)."""
    files = sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py"))[:20]
    codes = torch.tensor([code for file in files for code in file.read_bytes() if code < 128])
    return codes[: len(codes) // batch * batch].view(batch, -1).t().contiguous()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=1_000_000)
    parser.add_argument("--width", type=int, default=128)
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--span", type=int, default=32, help="characters of one step")
    parser.add_argument("--batch", type=int, default=16)
    args = parser.parse_args()
    torch.manual_seed(0)
    data = columns(args.batch)
    model = Language(args.width, args.layers)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    state, position = None, 0
    for step in range(args.steps):
        if position + args.span >= len(data):
            state, position = None, 0
        inputs, targets = data[position: position + args.span], data[position + 1: position + args.span + 1]
        logits, state = model(inputs, state)
        state = tuple(part.detach() for part in state)
        loss = F.cross_entropy(logits.flatten(0, 1), targets.flatten())
        model.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        position += args.span
        if step % 100 == 0:
            print(f"step {step}  loss {loss.item():.3f}", flush=True)


if __name__ == "__main__":
    main()
