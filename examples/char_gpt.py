"""Train a small GPT, one character at a time, on the source text of Python's standard library.

    python examples/char_gpt.py
    python examples/char_gpt.py --steps 200 --seed 1
"""

import argparse
import math
import sysconfig
import time
from pathlib import Path

import torch
from torch import nn
from torch.nn import functional as F


class Attention(nn.Module):
    def __init__(self, width: int, heads: int, dropout: float):
        super().__init__()
        self.heads, self.dropout = heads, dropout
        self.qkv = nn.Linear(width, 3 * width, bias=False)
        self.out = nn.Linear(width, width, bias=False)

    def forward(self, x):
        batch, time, width = x.shape
        q, k, v = self.qkv(x).view(batch, time, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(q, k, v, dropout_p=self.dropout if self.training else 0.0, is_causal=True)
        return self.out(y.transpose(1, 2).reshape(batch, time, width))


class Block(nn.Module):
    def __init__(self, width: int, heads: int, dropout: float):
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attention = Attention(width, heads, dropout)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))
        self.dropout = nn.Dropout(dropout)

    def forward(self, x):
        x = x + self.dropout(self.attention(self.norm1(x)))
        return x + self.dropout(self.mlp(self.norm2(x)))


class GPT(nn.Module):
    def __init__(self, vocabulary: int, context: int, layers: int, width: int, heads: int, dropout: float):
        super().__init__()
        self.context = context
        self.token = nn.Embedding(vocabulary, width)
        self.position = nn.Embedding(context, width)
        self.dropout = nn.Dropout(dropout)
        self.blocks = nn.ModuleList(Block(width, heads, dropout) for _ in range(layers))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, vocabulary, bias=False)
        self.apply(self._initialise)
        for block in self.blocks:                 # GPT-2: the residual stream's variance must not grow with depth
            for last in (block.attention.out, block.mlp[-1]):
                nn.init.normal_(last.weight, std=0.02 / math.sqrt(2 * layers))
        self.head.weight = self.token.weight

    @staticmethod
    def _initialise(module):
        if isinstance(module, nn.Linear | nn.Embedding):
            nn.init.normal_(module.weight, std=0.02)
        if isinstance(module, nn.Linear) and module.bias is not None:
            nn.init.zeros_(module.bias)

    def forward(self, tokens, targets=None):
        x = self.token(tokens) + self.position(torch.arange(tokens.shape[1], device=tokens.device))
        x = self.dropout(x)
        for block in self.blocks:
            x = block(x)
        logits = self.head(self.norm(x))
        loss = None if targets is None else F.cross_entropy(logits.flatten(0, 1), targets.flatten())
        return logits, loss

    @torch.no_grad()
    def generate(self, tokens, count: int):
        for _ in range(count):
            logits, _ = self(tokens[:, -self.context:])
            tokens = torch.cat([tokens, torch.multinomial(logits[:, -1].softmax(-1), 1)], dim=1)
        return tokens


def read_text() -> str:
    files = sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py"))
    return "\n".join(file.read_bytes().decode("ascii", "ignore") for file in files)


def random_crops(data, batch: int, context: int, device):
    starts = torch.randint(len(data) - context, (batch, 1))
    crops = data[starts + torch.arange(context + 1)].to(device)
    return crops[:, :-1], crops[:, 1:]


@torch.no_grad()
def evaluate(model, data, args, device, batches: int = 8) -> float:
    model.eval()
    losses = [model(*random_crops(data, args.batch, args.context, device))[1].item() for _ in range(batches)]
    model.train()
    return sum(losses) / len(losses)


def learning_rate(step: int, args) -> float:
    """Linear warm-up, then a cosine down to a tenth."""
    warmup = min(100, args.steps // 10)
    if step < warmup:
        return args.lr * (step + 1) / warmup
    progress = (step - warmup) / max(1, args.steps - warmup)
    return args.lr * (0.55 + 0.45 * math.cos(math.pi * progress))


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=2000)
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--context", type=int, default=64)
    parser.add_argument("--layers", type=int, default=6)
    parser.add_argument("--width", type=int, default=256)
    parser.add_argument("--heads", type=int, default=4)
    parser.add_argument("--dropout", type=float, default=0.1)
    parser.add_argument("--lr", type=float, default=1e-3)
    parser.add_argument("--log-every", type=int, default=20, help="steps")
    parser.add_argument("--eval-every", type=int, default=250, help="steps")
    parser.add_argument("--seed", type=int, default=1337)
    parser.add_argument("--output", type=Path, default=Path("runs/char_gpt"))
    args = parser.parse_args()

    torch.manual_seed(args.seed)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    text = read_text()
    characters = sorted(set(text))
    number = {character: index for index, character in enumerate(characters)}
    data = torch.tensor([number[character] for character in text], dtype=torch.long)
    cut = int(0.9 * len(data))
    train, validation = data[:cut], data[cut:]

    model = GPT(len(characters), args.context, args.layers, args.width, args.heads, args.dropout).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr, betas=(0.9, 0.99), weight_decay=0.1)
    parameters = sum(p.numel() for p in model.parameters())
    print(f"{len(data):,} characters, {len(characters)} different, {parameters:,} parameters, {device}")

    start = time.perf_counter()
    for step in range(args.steps):
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(step, args)
        tokens, targets = random_crops(train, args.batch, args.context, device)
        _, loss = model(tokens, targets)
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        if step % args.log_every == 0 or step == args.steps - 1:
            print(f"step {step:5d}  loss {loss.item():.4f}  {time.perf_counter() - start:.1f} s", flush=True)
        if (step + 1) % args.eval_every == 0:
            print(f"step {step:5d}  validation loss {evaluate(model, validation, args, device):.4f}", flush=True)

    args.output.mkdir(parents=True, exist_ok=True)
    torch.save({"model": model.state_dict(), "characters": characters}, args.output / "model.pt")
    model.eval()
    prompt = torch.tensor([[number[character] for character in "def "]], device=device)
    print("".join(characters[index] for index in model.generate(prompt, 200)[0].tolist()))


if __name__ == "__main__":
    main()
