"""Does speculative decoding pay where drafts are right, without changing a token, and is it refused elsewhere?

    python bench/speculative.py
    python bench/speculative.py --pair runs/speculative_toy/pair.pt

A pair of language models trained by examples/speculative_toy.py (trained first, some minutes, unless the file that is
given is there already; one that is not is left there for the next time) continues source text that was not in its
training data. Peer: the same loop, with the same static cache, on the same model, without drafts. Both run in one
process and on one thread, in turns on the same prompt; the ratio is the median over rounds of the time per token,
prefill included, with its interval. The clock is the CPU time of that thread, which other load changes little. Rows:
greedy, alone and as a batch of four; sampling; a text that quotes itself (prompt lookup); and a draft that was not
trained and has half of its target's layers, which `optimize` has to refuse by what it measured (that one under
sampling, because greedy text repeats itself and is quoted, and by the wall clock, as users have it).
"""

from __future__ import annotations

import argparse
import importlib
import shutil
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from _output import as_text, close, write_json

from saturate.inference.generation import build, measure, optimize
from saturate.inference.generation.compare import agreement
from saturate.inference.generation.decode import Request
from saturate.inference.generation.sampling import GREEDY, Sampling

TARGET = 1.8
EXAMPLE = Path(__file__).resolve().parent.parent / "examples" / "speculative_toy.py"
SMOKE = [
    "--steps",
    "30",
    "--layers",
    "2",
    "--width",
    "64",
    "--draft-width",
    "32",
    "--context",
    "96",
    "--crop",
    "48",
    "--batch",
    "8",
    "--rehearsals",
    "2",
]
TARGETS = f"token-identical; greedy with a trained draft at least {TARGET}x over no draft; a bad draft refused"


@dataclass(frozen=True)
class Pair:
    example: ModuleType
    target: Any
    draft: Any
    text: Any                   # token numbers that training did not see

    def prompts(self, count: int, length: int) -> list[list[int]]:
        """Evenly spread over the unseen text."""
        stride = (len(self.text) - length) // count
        return [self.text[index * stride:index * stride + length].tolist() for index in range(count)]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pair", type=Path, help="pair.pt of examples/speculative_toy.py, made where it is missing")
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--smoke", action="store_true", help="a pair that hardly learned, few tokens; judges nothing")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="saturate-bench-") as folder:
        path = args.pair or Path(folder) / "pair.pt"
        if not path.exists():
            train(path, args.smoke)
        pair = load(path)
    torch.set_num_threads(1)
    prompt, new, rounds = (32, 24, 3) if args.smoke else (64, 160, args.rounds)
    rows = [
        greedy_row(pair, "greedy", rounds, prompt, new, 1, None),
        greedy_row(pair, "greedy, batch of 4", rounds, prompt, new, 4, None),
        greedy_row(pair, "sampling", rounds, prompt, new, 1, Sampling(temperature=0.8, top_p=0.95)),
        lookup_row(pair, rounds, new),
        refusal_row(pair, prompt, new, args.smoke),
    ]
    met = (
        rows[0]["identical"]
        and rows[0]["speedup"][0] >= TARGET
        and all(row.get("identical", True) for row in rows)
        and rows[-1]["refused"]
    )
    write_json(args.json, "speculative", rows, None if args.smoke else met)
    return close(met, args.smoke, TARGETS)


def train(path: Path, smoke: bool) -> None:
    print("training a pair", file=sys.stderr, flush=True)
    with tempfile.TemporaryDirectory(prefix="saturate-bench-") as folder:
        subprocess.run(
            [sys.executable, str(EXAMPLE), "--output", folder, *(SMOKE if smoke else [])],
            check=True,
            stdout=sys.stderr,
        )
        path.parent.mkdir(parents=True, exist_ok=True)
        shutil.move(Path(folder) / "pair.pt", path)


def load(path: Path) -> Pair:
    sys.path.insert(0, str(EXAMPLE.parent))         # where the processes of `optimize` look for it, too
    example = importlib.import_module(EXAMPLE.stem)
    saved = torch.load(path, weights_only=True)
    target, draft = example.pair(len(saved["characters"]), **saved["shape"])
    target.load_state_dict(saved["target"])
    draft.load_state_dict(saved["draft"])
    data, characters = example.encode(example.read_text())
    if characters != saved["characters"]:
        raise SystemExit(f"{path} was trained on the text of another Python")
    return Pair(example, target.eval(), draft.eval(), data[int(0.9 * len(data)):])


def raced(
    pair: Pair, name: str, draft: Any, batches: list[list[list[int]]], request: Request, rounds: int
) -> dict[str, Any]:
    """The loop with drafts against the loop without; a row of the answer."""
    plain = build.build(torch, pair.target, build.Way(clock=time.thread_time_ns), batches[0], request)
    loop = build.build(torch, pair.target, build.Way(draft, clock=time.thread_time_ns), batches[0], request)
    row: dict[str, Any] = {"name": name}
    if request.sampling.greedy:
        prompts = [prompt for batch in batches for prompt in batch]
        texts = [[text for batch in batches for text in way.generate(batch, request).tokens] for way in (plain, loop)]
        same = agreement(prompts, *texts, loop.tolerance, lambda text: last_logits(pair.target, text))
        row |= {"identical": same.identical == same.rows, "tokens": same.tokens}
    found, before, after = measure.race(
        lambda batch: plain.generate(batch, request),
        lambda batch: loop.generate(batch, request),
        batches,
        most=rounds,
    )
    drafts = measure.speculation(str(getattr(loop.drafter, "name", "")), after, loop.costs, loop.choices)
    row |= {
        "speedup": (found.speedup, *found.speedup_ci),
        "acceptance": drafts.acceptance_rate,
        "quoted": drafts.quoted_share,
        "quoted_acceptance": drafts.quoted_acceptance_rate,
        "cost_ratio": drafts.cost_ratio,
        "predicted": drafts.predicted_speedup,
        "tokens_per_round": drafts.tokens_per_round,
        "ties": drafts.ties,
        "plain_tokens_per_s": measure.timing(before).decode_tokens_per_s,
        "tokens_per_s": measure.timing(after).decode_tokens_per_s,
        "prefill_ms": measure.timing(before).prefill_ms,
    }
    say(row)
    return row


def last_logits(model: Any, text: list[int]) -> Any:
    with torch.inference_mode():
        return model(torch.tensor([text]))[0, -1]


def greedy_row(
    pair: Pair, name: str, rounds: int, prompt: int, new: int, batch: int, sampling: Sampling | None
) -> dict[str, Any]:
    prompts = pair.prompts(8 * batch, prompt)
    batches = [prompts[start:start + batch] for start in range(0, len(prompts), batch)]
    return raced(pair, name, pair.draft, batches, Request(new, sampling or GREEDY), rounds)


def lookup_row(pair: Pair, rounds: int, new: int) -> dict[str, Any]:
    """A piece of text, and its beginning once more: what an edit or a quoting answer looks like."""
    length = (pair.target.context - new) // 2
    prompts = [text + text[:length // 2] for text in pair.prompts(8, length)]
    return raced(pair, "prompt lookup", build.LOOKUP, [[prompt] for prompt in prompts], Request(new), rounds)


def refusal_row(pair: Pair, prompt: int, new: int, smoke: bool) -> dict[str, Any]:
    """A draft that costs half of its target and knows nothing."""
    layers = len(pair.target.blocks)
    width = pair.target.token.embedding_dim
    torch.manual_seed(0)
    bad = pair.example.GPT(
        pair.target.token.num_embeddings, pair.target.context, max(1, layers // 2), width, max(1, width // 32)
    ).eval()
    found = optimize(
        pair.target,
        pair.prompts(4, prompt),
        max_new_tokens=new,
        draft=bad,
        sampling=Sampling(temperature=1.0),     # greedy text repeats itself, and quoting would make up for the draft
        time=20 if smoke else 120,
        ways=("draft", "lookup"),
    )
    tried = next(row for row in found.record.candidates if row.id == "speculative, draft model")
    row = {
        "name": "a bad draft",
        "refused": tried.fate in ("slower", "no_difference") and "draft model" not in found.best,
        "fate": tried.fate,
        "reason": tried.reason,
        "best": found.best,
    }
    print(f"a bad draft         {tried.fate}: {tried.reason}")
    return row


def say(row: dict[str, Any]) -> None:
    same = {True: "  token-identical", False: "  TOKENS DIFFER", None: ""}[row.get("identical")]
    rate = "none" if row["acceptance"] is None else f"{row['acceptance']:.2f}"
    if row["quoted_acceptance"] is not None:
        rate += f" (and {row['quoted_acceptance']:.2f} of the {row['quoted']:.0%} quoted)"
    print(
        f"{row['name']:<18}  {as_text(row['speedup'])}  acceptance {rate}, "
        f"{row['plain_tokens_per_s']:.0f} -> {row['tokens_per_s']:.0f} tokens/s{same}",
        flush=True,
    )


if __name__ == "__main__":
    sys.exit(main())
