"""Record step times of a small training in fresh A/A pairs: the noise that `bench/aa.py --simulated` replays.

    python bench/record_step_times.py --condition quiet  --output bench/data/step_times_quiet.json
    python bench/record_step_times.py --condition loaded --output bench/data/step_times_loaded.json

Two fresh processes of the same program run blocks of steps in turn (A B, B A, ...), each waiting on a pipe while the
other one works, as in a race. "loaded" keeps as many busy loops running beside them as there are cores. The file
holds every step's duration in milliseconds: pairs -> {"a", "b"} -> rounds -> steps; the first step after a wait is
included, so that a reader can discard it as the race does. Needs torch; a few minutes.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sys
import time
from contextlib import ExitStack
from pathlib import Path

ONE_THREAD = {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
WARMUP_STEPS = 30


def train() -> None:
    """The recorded program: reads a number of steps per line, answers with their durations in milliseconds."""
    import torch
    from torch import nn

    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(128, 4, 256, batch_first=True)
    model = nn.Sequential(nn.Embedding(256, 128), nn.TransformerEncoder(layer, 2), nn.Linear(128, 256))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    tokens = torch.randint(0, 256, (64, 8, 65))
    k = 0
    for line in sys.stdin:
        times = []
        for _ in range(int(line)):
            start = time.perf_counter_ns()
            batch = tokens[k % len(tokens)]
            loss = nn.functional.cross_entropy(model(batch[:, :-1]).flatten(0, 1), batch[:, 1:].flatten())
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            times.append(round((time.perf_counter_ns() - start) / 1e6, 3))
            k += 1
        print(json.dumps(times), flush=True)


class Trainer:
    """One fresh process of `train`."""

    def __init__(self, stack: ExitStack):
        command = [sys.executable, __file__, "--train"]
        self.process = stack.enter_context(subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=os.environ | ONE_THREAD))
        stack.callback(self.process.stdin.close)

    def steps(self, count: int) -> list[float]:
        self.process.stdin.write(f"{count}\n")
        self.process.stdin.flush()
        return json.loads(self.process.stdout.readline())


def record_pair(rounds: int, steps: int) -> dict[str, list[list[float]]]:
    """Blocks of one fresh pair, the order turned over every round."""
    with ExitStack() as stack:
        pair = {"a": Trainer(stack), "b": Trainer(stack)}
        for trainer in pair.values():
            trainer.steps(WARMUP_STEPS)
        blocks: dict[str, list[list[float]]] = {"a": [], "b": []}
        for r in range(rounds):
            for name in ("ab", "ba")[r % 2]:
                blocks[name].append(pair[name].steps(steps))
        return blocks


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--train", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--condition", choices=("quiet", "loaded"), default="quiet")
    parser.add_argument("--pairs", type=int, default=12)
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--steps", type=int, default=20, help="steps in a block, the first one included")
    parser.add_argument("--output", type=Path)
    args = parser.parse_args()
    if args.train:
        train()
        return
    if args.output is None:
        parser.error("--output is required")
    loops = os.cpu_count() or 1 if args.condition == "loaded" else 0
    load_before = os.getloadavg()[0]
    busy = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(loops)]
    try:
        pairs = []
        for p in range(args.pairs):
            pairs.append(record_pair(args.rounds, args.steps))
            print(f"pair {p + 1}/{args.pairs}", file=sys.stderr)
    finally:
        for process in busy:
            process.kill()
            process.wait()
    header = {"condition": args.condition, "busy_loops": loops, "cores": os.cpu_count(), "load_before": load_before,
              "load_after": os.getloadavg()[0], "python": platform.python_version(), "unit": "ms"}
    args.output.write_text(json.dumps(header | {"pairs": pairs}, separators=(",", ":")) + "\n")


if __name__ == "__main__":
    main()
