"""How long does a candidate of `saturate.optimize` take to start, and is one that was forked the same as one that was not?

A fresh interpreter imports torch, its exporter and the model's libraries; a fork has them (`inference.forkserver`). Both start the model
itself, one after the other (who is first takes turns), from the call until it has answered: a perceptron, of torch alone, and a small BERT of
the transformers library, where that is installed. Then the two live side by side and are timed in turns: forked ones must be neither
faster nor slower. Each pair of processes counts once, for two of one kind differ, too. Then candidates start in turns that make what others
find, and that find it, both forked: for ONNX Runtime the export of the model (`inference.techniques._onnx_exports`), for Inductor's kernels, which are compiled
already, precompiled headers (`inference.launching`). Last, the same search once with forks and once without (`--search SECONDS`): how many candidates
it measured in the same time.

    python bench/candidate_start.py [--smoke] [--json FILE] [--pairs 10] [--search 150]
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import os
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from math import exp, log
from pathlib import Path
from statistics import median
from types import ModuleType
from typing import Any
from unittest import mock

import torch
from _output import as_text, close, write_json

from saturate.inference import api, forkserver
from saturate.inference.accuracy import Budget
from saturate.inference.candidates import Candidate, Part
from saturate.inference.forkserver import ForkServer
from saturate.inference.process import Worker
from saturate.inference.source import Source
from saturate.inference.techniques import compile_inference, onnx_runtime
from saturate.measure.stats import median_se, t_quantile

#: A fork starts at least so many times as fast; how far its speed may be from a fresh one's, with all of its interval; and so many times as
#: fast starts who finds what another one has made.
LEAST, MOST_APART, LEAST_SHARED = 2.0, 0.03, 2.0

#: Rounds of a pair that lives side by side, and calls in each.
ROUNDS, CALLS = 12, 16

Ratio = tuple[float, float, float]


def perceptron() -> tuple[Any, list[tuple[Any, ...]]]:
    layers = [layer for _ in range(4) for layer in (torch.nn.Linear(256, 256), torch.nn.ReLU())]
    return torch.nn.Sequential(*layers, torch.nn.Linear(256, 10)).eval(), [(torch.randn(16, 256),) for _ in range(8)]


def bert() -> tuple[Any, list[tuple[Any, ...]]]:
    from transformers import BertConfig, BertForSequenceClassification

    config = BertConfig(hidden_size=128, num_hidden_layers=2, num_attention_heads=2, intermediate_size=512)
    return BertForSequenceClassification(config).eval(), [(torch.randint(0, 1000, (2, 32)),) for _ in range(8)]


MODELS: dict[str, Callable[[], tuple[Any, list[tuple[Any, ...]]]]] = {"perceptron": perceptron, "bert": bert}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--smoke", action="store_true", help="two pairs of one model, no search, nothing is judged")
    parser.add_argument("--json", type=Path, metavar="FILE")
    parser.add_argument("--pairs", type=int, default=10, help="of starts of each model (default: 10)")
    parser.add_argument("--search", type=float, default=150.0, metavar="SECONDS", help="given to each search; 0: none (default: 150)")
    arguments = parser.parse_args()
    torch.manual_seed(0)
    names = [name for name in MODELS if name == "perceptron" or (not arguments.smoke and importlib.util.find_spec("transformers"))]
    rows = []
    for name in names:
        model, inputs = MODELS[name]()
        with tempfile.TemporaryDirectory(prefix="saturate-") as folder:
            rows.append(compared(name, model, inputs, Path(folder), 2 if arguments.smoke else arguments.pairs,
                            0.0 if arguments.smoke else arguments.search))
    met = None if arguments.smoke else all(one["start"][1] > LEAST and one["speed"][1] > 1 - MOST_APART and one["speed"][2] < 1 + MOST_APART
                                           and min(one["export"][1], one["headers"][1]) > LEAST_SHARED for one in rows)
    write_json(arguments.json, "candidate_start", rows, met)
    return close(met, arguments.smoke, f"forks start {LEAST:g} times as fast, and run within {100 * MOST_APART:g} % of a fresh process; who finds an "
                                       f"export or headers starts {LEAST_SHARED:g} times as fast")


def compared(name: str, model: Any, inputs: list[tuple[Any, ...]], folder: Path, pairs: int, search_s: float) -> dict[str, Any]:
    source = Source.write(folder / "source", model, inputs)
    with forkserver.running(source, folder, torch.get_num_threads()) as forks:
        if forks is None:
            sys.exit("candidates are not forked on this system: there is nothing to compare")
        first, _ = began(source, folder, None)
        facts = first.ready.facts               # the first one observes the model
        first.close()
        forks.wait()
        found = [pair(source, folder, (None, forks) if number % 2 else (forks, None), facts) for number in range(pairs)]
        row: dict[str, Any] = {"model": name, "pairs": found}
        start, speed = row["start"], row["speed"] = [ratio([one[what][0] / one[what][1] for one in found]) for what in ("start_s", "call_ns")]
        typical = {what: [median(one[what][place] for one in found) for place in (0, 1)] for what in ("start_s", "memory_bytes")}
        print(f"{name:10}  fresh / forked start {as_text(start)}  ({typical['start_s'][0]:.2f} s, {typical['start_s'][1]:.2f} s)")
        print(f"{'':10}  fresh / forked call  {as_text(speed)}  ({typical['memory_bytes'][0] / 1e6:.0f} MB, {typical['memory_bytes'][1] / 1e6:.0f} MB resident)",
              flush=True)
        for what, technique in (("export", onnx_runtime), ("headers", compile_inference)):
            row[what], row[f"{what}_s"] = shared(what, source, folder, forks, facts, technique, pairs)
        if forks.closed:
            sys.exit(f"it did not fork: {(forks.folder / 'output.log').read_text()}")
    if search_s:
        row["measured"] = [searched(model, inputs, folder / how, search_s, how == "forked") for how in ("fresh", "forked")]
        print(f"{'':10}  candidates measured in {search_s:.0f} s: {row['measured'][0]} fresh, {row['measured'][1]} forked", flush=True)
    return row


def began(source: Source, folder: Path, forks: ForkServer | None, facts: Any = None, candidate: Candidate | None = None) -> tuple[Worker, float]:
    """A process of the model, or of a candidate, and how long it took until it had answered, seconds. To be closed."""
    begins = time.perf_counter()
    worker = Worker(source, candidate or Candidate(), folder=folder, threads=torch.get_num_threads(), prepare_s=300.0, facts=facts, forks=forks)
    return worker, time.perf_counter() - begins


def pair(source: Source, folder: Path, order: Sequence[ForkServer | None], facts: Any) -> dict[str, list[Any]]:
    """Of a fresh process and a forked one, in that order whoever started first: seconds to start, the median call, and resident memory."""
    with contextlib.ExitStack() as ends:
        started = {}
        for how in order:
            started[how is not None] = began(source, folder, how, facts)
            ends.callback(started[how is not None][0].close)
            started[how is not None][0].freeze()
        workers, times = [started[forked][0] for forked in (False, True)], ([], [])
        for number in range(ROUNDS):
            for place in ((0, 1), (1, 0))[number % 2]:
                workers[place].thaw()
                times[place].extend(workers[place].block(CALLS))
                workers[place].freeze()
        return {"start_s": [started[forked][1] for forked in (False, True)], "call_ns": [median(some[CALLS:]) for some in times],
                "memory_bytes": [worker.memory_bytes() for worker in workers]}


def shared(what: str, source: Source, folder: Path, forks: ForkServer, facts: Any, technique: ModuleType, pairs: int) -> tuple[Ratio, list[tuple[float, float]]]:
    """How many times as long a candidate takes that makes what the next one finds, until both have answered, and the seconds of all pairs. What
    others keep is there: kernels that Inductor has compiled."""
    candidate = Candidate.of([Part(technique, technique.Options())])

    def start() -> float:
        worker, seconds = began(source, folder, forks, facts, candidate)
        worker.close()
        return seconds

    start()
    took = []
    for _ in range(pairs):
        source.without_shared()
        took.append((start(), start()))
    found = ratio([own / other for own, other in took])
    print(f"{'':10}  own / shared {what:8} {as_text(found)}  ({median(own for own, _ in took):.2f} s, {median(other for _, other in took):.2f} s)", flush=True)
    return found, took


def ratio(values: Sequence[float]) -> Ratio:
    """The median, with its 95 % interval."""
    logs = [log(value) for value in values]
    half = t_quantile(0.975, len(logs) - 1) * median_se(logs)
    return exp(median(logs)), exp(median(logs) - half), exp(median(logs) + half)


def searched(model: Any, inputs: list[tuple[Any, ...]], folder: Path, seconds: float, forked: bool) -> int:
    """How many candidates a search measured."""
    held = contextlib.nullcontext() if forked else mock.patch.object(api, "running", afresh)
    with held, open(os.devnull, "w") as nowhere:
        found = api.optimize(model, inputs, check=agreement(model, inputs), budget=Budget(max_drop=0.1), time=seconds, workdir=folder,
                             progress=lambda text: print(text, file=nowhere))
    return sum(one.speedup is not None for one in found.record.candidates)


def agreement(model: Any, inputs: list[tuple[Any, ...]]) -> Callable[..., list[float]]:
    """A check by the model's own top-1 on other inputs: its weights are random."""
    made = [tuple(torch.flip(tensor, (-1,)) for tensor in batch) for batch in inputs for _ in range(16)]
    with torch.no_grad():
        own = [top(model(*batch)) for batch in made]
    return lambda run: [float(a == b) for batch, known in zip(made, own, strict=True) for a, b in zip(top(run(*batch)), known, strict=True)]


def top(answer: Any) -> list[int]:
    return getattr(answer, "logits", answer).argmax(-1).tolist()


@contextlib.contextmanager
def afresh(*given: Any) -> Iterator[None]:
    """No fork server."""
    yield None


if __name__ == "__main__":
    sys.exit(main())
