"""On trained models with real data: is the answer of one command within its budget on data that did not choose it?

    python bench/inference_trained.py [--smoke] [--json FILE] [--models digits_cnn,text_transformer] [--budget 7m]

`examples/digits_cnn.py` (a network for handwritten digits) and `examples/text_transformer.py` (lines of source code) are trained
first, a minute or two each. `saturate optimize` then gets each with its calibration batches, its score on held-out samples and 1 %
that may be lost, on one thread. Peers, in the same run: 8 bits by ONNX Runtime and OpenVINO set by hand and checked by nobody.
All are scored on all held-out samples, once more and outside of saturate, and timed in turns in one process.

The winner must have passed its confirmation, which uses samples that the selection did not see, and lose no more than the budget
when it is scored here.
"""

from __future__ import annotations

import argparse
import importlib
import json
import math
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from _inference_peers import PEERS
from _output import as_text, close, write_json

EXAMPLES = Path(__file__).resolve().parent.parent / "examples"
MODELS = ("digits_cnn", "text_transformer")
BY_HAND = ("onnx-int8-dynamic", "onnx-int8-static", "openvino-int8-static")
MAX_DROP = 0.01
SHORT = {"digits_cnn": ["--epochs", "1", "--width", "8"], "text_transformer": ["--epochs", "1", "--steps", "2", "--layers", "1", "--width", "16"]}

Run = Callable[..., Any]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--smoke", action="store_true", help="a model that hardly learned and two candidates; judges nothing")
    parser.add_argument("--json", type=Path, metavar="FILE")
    parser.add_argument("--models", default=",".join(MODELS), help=f"of {','.join(MODELS)}")
    parser.add_argument("--budget", default=None, help="time for each search (default: 7m; 40s with --smoke)")
    parser.add_argument("--rounds", type=int, default=60)
    args = parser.parse_args()
    names = args.models.split(",")[:1] if args.smoke else args.models.split(",")
    unknown = sorted(set(names) - set(MODELS))
    if unknown:
        parser.error(f"no such model: {', '.join(unknown)}")
    os.environ |= {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
    sys.path.insert(0, str(EXAMPLES))
    rows = []
    with tempfile.TemporaryDirectory(prefix="saturate-bench-") as folder:
        for name in names:
            rows.append(judged(name, Path(folder) / name, args.budget or ("40s" if args.smoke else "7m"), 3 if args.smoke else args.rounds, args.smoke))
            show(rows[-1])
    met = None if args.smoke else all(row["met"] for row in rows)
    write_json(args.json, "inference_trained", rows, met)
    return close(met, args.smoke, f"confirmed on held-out data, and at most {MAX_DROP:.0%} lost when scored again")


def judged(name: str, folder: Path, budget: str, rounds: int, smoke: bool) -> dict[str, Any]:
    """Train, search, and compare what was found with the model and with what is set by hand."""
    import torch

    import saturate

    folder.mkdir()
    file = EXAMPLES / f"{name}.py"
    subprocess.run([sys.executable, str(file), *(SHORT[name] if smoke else [])], cwd=folder, check=True, stdout=sys.stderr)
    found = subprocess.run(
        [sys.executable, "-m", "saturate", "optimize", f"{file}:build", "--inputs", f"{file}:loader", "--check", f"{file}:score",
         "--max-drop", str(MAX_DROP), "--budget", budget, "--threads", "1", "--json",
         *(["--only", "onnx-runtime,onnx-int8-static"] if smoke else [])],
        cwd=folder, stdout=subprocess.PIPE, text=True, check=True)
    record = json.loads(found.stdout)
    torch.set_num_threads(1)
    os.chdir(folder)                # the examples look for what they trained below the working directory
    example = importlib.import_module(name)
    batches, model = example.loader(), example.build()
    ways: dict[str, Run] = {"model": model}
    if record["artifact"]:
        ways["saturate"] = saturate.load(record["artifact"])
    failed = {}
    for peer in BY_HAND:
        try:
            ways[f"by hand: {peer}"] = PEERS[peer](example.build(), batches, 1)
        except Exception as error:  # noqa: BLE001 - a peer that does not work for a model is reported as such
            failed[peer] = f"{type(error).__name__}: {error}".partition("\n")[0][:200]
    with torch.inference_mode():
        scored = {way: example.score(run) for way, run in ways.items()}
        times = in_turns({way: lambda run=run: run(*batches[0]) for way, run in ways.items()}, rounds)
    accuracy = {way: sum(right) / len(right) for way, right in scored.items()}
    best = record["best"] or {}
    entries = [{"way": way, "accuracy": accuracy[way], "drop": accuracy["model"] - accuracy[way],
                "speedup": over(times["model"], times[way])} for way in ways]
    lost = next((entry["drop"] for entry in entries if entry["way"] == "saturate"), math.inf)      # no artifact, no answer
    return {"model": name, "samples": len(scored["model"]), "recipe": best.get("recipe"), "verdict": best.get("verdict"),
            "speedup": best.get("speedup"), "speedup_over_lossless": best.get("speedup_over_lossless"),
            "confirmed_drop_ci": best.get("accuracy_drop_ci"), "ways": entries, "failed": failed,
            "met": best.get("verdict") == "pass" and lost <= MAX_DROP}


def in_turns(calls: dict[str, Callable[[], Any]], rounds: int) -> dict[str, list[float]]:
    """Seconds of each, one call of every one of them per round, forwards and backwards."""
    times: dict[str, list[float]] = {name: [] for name in calls}
    for index in range(-3, rounds):             # the first few warm up
        for name in list(calls)[:: 1 if index % 2 else -1]:
            began = time.perf_counter()
            calls[name]()
            if index >= 0:
                times[name].append(time.perf_counter() - began)
    return times


def over(before: list[float], after: list[float]) -> tuple[float, float, float]:
    """How many times as fast, with its interval, from the logs of the rounds."""
    from saturate.measure import race

    found = race.estimate([[math.log(b / a) for b, a in zip(before, after)]], between_sd=0.0)
    return (found.speedup, *found.speedup_ci)


def show(row: dict[str, Any]) -> None:
    found = " + ".join(entry["id"] for entry in row["recipe"] or ())
    print(f"{row['model']}: {found or 'nothing kept'}, {row['verdict'] or 'no verdict'}; {row['samples']} held-out samples", flush=True)
    for entry in row["ways"]:
        kept = "within the budget" if entry["drop"] <= MAX_DROP else "OUT OF THE BUDGET"
        print(f"  {entry['way']:32s} {as_text(entry['speedup'])} of the model  accuracy {entry['accuracy']:.4f}, drop {entry['drop']:+.4f}  {kept}")
    for peer, reason in row["failed"].items():
        print(f"  by hand: {peer:23s} does not run: {reason}")


if __name__ == "__main__":
    raise SystemExit(main())
