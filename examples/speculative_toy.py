"""Train two small GPTs at once, one character at a time, on the source text of Python's standard library: a target,
and a draft that learns to guess what the target would say. A draft that guesses well makes speculative decoding fast.

At the end the draft rehearses on what the target itself writes. Real text does not prepare it for that: greedy
decoding repeats itself in ways that no file does, and a draft that never saw them is wrong at every character.

    python examples/speculative_toy.py
    python examples/speculative_toy.py --steps 200 --seed 1

Generation keeps keys and values: `forward(ids, cache)` takes positions and mask from the cache, and each attention
layer calls `cache.update(keys, values, layer)`. Without a cache the models compute from the first token on, as in
training.
"""

import argparse
import math
import sysconfig
import time
from pathlib import Path

import torch
from torch import nn
from torch.nn import functional as F


class Block(nn.Module):
    def __init__(self, width: int, heads: int, index: int):
        super().__init__()
        self.heads, self.index = heads, index
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width, bias=False)
        self.out = nn.Linear(width, width, bias=False)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def attend(self, x, cache):
        rows, count, width = x.shape
        q, k, v = self.qkv(x).view(rows, count, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        if cache is None:
            y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        else:
            k, v = cache.update(k, v, self.index)
            y = F.scaled_dot_product_attention(q, k, v, attn_mask=cache.mask)
        return self.out(y.transpose(1, 2).reshape(rows, count, width))

    def forward(self, x, cache):
        x = x + self.attend(self.norm1(x), cache)
        return x + self.mlp(self.norm2(x))


class GPT(nn.Module):
    def __init__(self, vocabulary: int, context: int, layers: int, width: int, heads: int):
        super().__init__()
        self.context = context
        self.token = nn.Embedding(vocabulary, width)
        self.position = nn.Embedding(context, width)
        self.blocks = nn.ModuleList(Block(width, heads, index) for index in range(layers))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, vocabulary, bias=False)
        for name, parameter in self.named_parameters():
            if parameter.dim() == 2:
                last = name.endswith(
                    ("out.weight", "mlp.2.weight")
                )  # the residual stream's variance must not grow with depth
                nn.init.normal_(parameter, std=0.02 / math.sqrt(2 * layers) if last else 0.02)

    def forward(self, ids, cache=None):
        positions = torch.arange(ids.shape[1], device=ids.device) if cache is None else cache.positions
        x = self.token(ids) + self.position(positions)
        for block in self.blocks:
            x = block(x, cache)
        return self.head(self.norm(x))


def read_text() -> str:
    files = sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py"))
    return "\n".join(file.read_bytes().decode("ascii", "ignore") for file in files)


def encode(text: str) -> tuple[torch.Tensor, list[str]]:
    """Numbers of the characters, and the characters by number."""
    characters = sorted(set(text))
    number = {character: index for index, character in enumerate(characters)}
    return torch.tensor([number[character] for character in text], dtype=torch.long), characters


def pair(vocabulary: int, context: int, layers: int, width: int, draft_width: int) -> tuple[GPT, GPT]:
    """Target and draft. Heads are 32 wide."""
    return GPT(vocabulary, context, layers, width, max(1, width // 32)), GPT(
        vocabulary, context, 1, draft_width, max(1, draft_width // 32)
    )


def losses(target: GPT, draft: GPT, tokens: torch.Tensor, targets: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Cross entropy of the target with the text, and of the draft with the target's distribution."""
    logits = target(tokens).float()
    imitated = F.cross_entropy(draft(tokens).float().flatten(0, 1), logits.detach().softmax(-1).flatten(0, 1))
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten()), imitated


class Kept:
    """Keys and values of every layer, growing."""

    def __init__(self):
        self.layers = {}

    def update(self, keys, values, layer):
        if layer in self.layers:
            keys, values = (torch.cat(pair, 2) for pair in zip(self.layers[layer], (keys, values)))
        self.layers[layer] = keys, values
        return keys, values


@torch.no_grad()
def continued(target: GPT, prompts: torch.Tensor, length: int) -> torch.Tensor:
    """The prompts, [rows, tokens], as the target goes on with them up to `length` tokens: half of the rows greedily,
    the others at random with a temperature of 0.8."""
    ids, cache = prompts, Kept()
    greedy = torch.arange(len(prompts), device=prompts.device) % 2 == 0
    new = prompts
    while ids.shape[1] < length:
        places = torch.arange(ids.shape[1], device=ids.device)
        cache.positions = places[-new.shape[1]:]
        cache.mask = places <= cache.positions.unsqueeze(1)
        logits = target(new, cache)[:, -1].float()
        drawn = torch.multinomial((logits / 0.8).softmax(-1), 1).squeeze(1)
        new = torch.where(greedy, logits.argmax(-1), drawn).unsqueeze(1)
        ids = torch.cat([ids, new], 1)
    return ids


def rehearse(target: GPT, draft: GPT, prompts: torch.Tensor, optimizer, passes: int = 4) -> float:
    """Teach the draft what the target says to its own text; the share of it that the draft guessed right before."""
    ids = continued(target, prompts, target.context)
    with torch.no_grad():
        said = target(ids).float()
    right = (draft(ids).argmax(-1) == said.argmax(-1))[:, prompts.shape[1]:].float().mean().item()
    for _ in range(passes):
        optimizer.zero_grad()
        F.cross_entropy(draft(ids).flatten(0, 1), said.softmax(-1).flatten(0, 1)).backward()
        nn.utils.clip_grad_norm_(draft.parameters(), 1.0)
        optimizer.step()
    return right


def learning_rate(step: int, args) -> float:
    """Linear warm-up, then a cosine down to a twentieth."""
    warmup = min(100, max(1, args.steps // 10))
    if step < warmup:
        return args.lr * (step + 1) / warmup
    return args.lr * (0.525 + 0.475 * math.cos(math.pi * (step - warmup) / max(1, args.steps - warmup)))


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--context", type=int, default=256)
    parser.add_argument(
        "--crop", type=int, default=128, help="tokens of a training sample; positions behind it are trained too"
    )
    parser.add_argument("--layers", type=int, default=8, help="of the target; the draft has one")
    parser.add_argument("--width", type=int, default=256)
    parser.add_argument("--draft-width", type=int, default=128)
    parser.add_argument("--lr", type=float, default=1e-3)
    parser.add_argument("--rehearsals", type=int, default=16, help="batches of the target's own text for the draft")
    parser.add_argument("--log-every", type=int, default=20, help="steps")
    parser.add_argument("--seed", type=int, default=1337)
    parser.add_argument("--output", type=Path, default=Path("runs/speculative_toy"))
    args = parser.parse_args()

    torch.manual_seed(args.seed)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    data, characters = encode(read_text())
    train, validation = data[:int(0.9 * len(data))], data[int(0.9 * len(data)):]
    target, draft = (
        model.to(device) for model in pair(len(characters), args.context, args.layers, args.width, args.draft_width)
    )
    parameters = [*target.parameters(), *draft.parameters()]
    optimizer = torch.optim.AdamW(parameters, lr=args.lr, betas=(0.9, 0.99), weight_decay=0.1)
    sizes = [sum(p.numel() for p in model.parameters()) for model in (target, draft)]
    print(
        f"{len(data):,} characters, {len(characters)} different, {sizes[0]:,} and {sizes[1]:,} parameters, {device}"
    )

    def crops(text, crop):
        starts = torch.randint(len(text) - crop - 1, (args.batch, 1))
        found = text[starts + torch.arange(crop + 1)].to(device)
        return found[:, :-1], found[:, 1:]

    # Without instructions for it a CPU takes more than ten times as long in bfloat16 as in float32.
    narrow = device.type != "cpu" or "AVX512" in torch.backends.cpu.get_cpu_capability()
    start = time.perf_counter()
    for step in range(args.steps):
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(step, args)
        crop = args.context if step % 8 == 7 else min(args.crop, args.context)
        with torch.autocast(device.type, dtype=torch.bfloat16, enabled=narrow):
            loss, imitated = losses(target, draft, *crops(train, crop))
        optimizer.zero_grad()
        (loss + imitated).backward()
        for model in (target, draft):
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        if step % args.log_every == 0 or step == args.steps - 1:
            print(
                f"step {step:5d}  loss {loss.item():.4f}  draft {imitated.item():.4f}  "
                f"{time.perf_counter() - start:.1f} s",
                flush=True,
            )

    optimizer = torch.optim.AdamW(draft.parameters(), lr=args.lr, betas=(0.9, 0.99), weight_decay=0.1)
    for rehearsal in range(args.rehearsals):
        optimizer.param_groups[0]["lr"] = args.lr * (1 - rehearsal / args.rehearsals)
        prompts = torch.cat([crops(train, args.context // 4)[0] for _ in range(4)])
        right = rehearse(target, draft, prompts, optimizer)
        print(f"rehearsal {rehearsal:3d}  guessed {right:.1%}  {time.perf_counter() - start:.1f} s", flush=True)

    target.eval(), draft.eval()
    with torch.no_grad():
        tokens, targets = crops(validation, args.context)
        guess, said = draft(tokens).argmax(-1), target(tokens)
        loss = F.cross_entropy(said.flatten(0, 1), targets.flatten())
    print(
        f"validation loss {loss.item():.4f}, the draft guesses "
        f"{(guess == said.argmax(-1)).float().mean().item():.1%} of the target's choices"
    )
    args.output.mkdir(parents=True, exist_ok=True)
    shape = {"context": args.context, "layers": args.layers, "width": args.width, "draft_width": args.draft_width}
    weights = {"target": target.state_dict(), "draft": draft.state_dict()}
    torch.save({**weights, "characters": characters, "shape": shape}, args.output / "pair.pt")


if __name__ == "__main__":
    main()
