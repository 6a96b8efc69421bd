"""`saturate fit` beside the batch finders of Lightning and Accelerate, under one limit of memory.

    python bench/fit.py

All look for the batch of the same model on a CPU. saturate watches the process tree from outside; the others get, from
`workloads/fit_train.py`, the out-of-memory error of torch's CPU allocator as soon as their process is above the same limit.
Each finder runs with its own defaults (Accelerate's begins at 1,024, because it only goes down). Every answer is then judged
alike: the plain script is run with it for 50 steps, an evaluation and a checkpoint, and must stay below the limit, in each of
a few fresh processes. Needs lightning and accelerate for their lines. Some 20 minutes on two cores.

A trial is a process of ours, and a size that a peer tried; how many sizes ours ran is printed beside it.

Targets: our answer passes, it is at least as large as every answer that passes, and it takes at most half as many trials as
any other finder.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from _output import close, write_json

from saturate.records import sizes
from saturate.trial.meter import Meter

SCRIPT = Path(__file__).resolve().parent / "workloads" / "fit_train.py"
PEERS = {"lightning, power": ("lightning", "power"), "lightning, binsearch": ("lightning", "binsearch"), "accelerate": ("accelerate", "accelerate")}
SATURATE = "import sys; from saturate.cli.main import main; sys.exit(main(sys.argv[1:]))"


def environment() -> dict[str, str]:
    clean = {name: value for name, value in os.environ.items() if not name.startswith("SATURATE")}
    # The C library maps every large block anew: one size has one peak, and the limit means the same to all finders.
    return {**clean, "OMP_NUM_THREADS": clean.get("OMP_NUM_THREADS", "1"), "MALLOC_MMAP_THRESHOLD_": "131072"}


def ours(limit: int, budget: str, home: Path) -> dict[str, Any]:
    command = [sys.executable, "-c", SATURATE, "fit", "--json", "--memory", str(limit), "--budget", budget, "--", sys.executable, str(SCRIPT)]
    began = time.monotonic()
    done = subprocess.run(command, cwd=home, env=environment(), stdout=subprocess.PIPE, text=True, check=True)
    found = json.loads(done.stdout)
    return {"finder": "saturate", "found": found["micro_batch"], "trials": found["trial_count"], "seconds": time.monotonic() - began,
            "proved_steps": found["proved_steps"], "predicted_peak_bytes": found["predicted_peak_bytes"], "peak_bytes": found["peak_bytes"],
            "sizes": [[one["micro_batch"], one["outcome"], one["trial"]] for one in found["trials"]]}


def peer(name: str, limit: int, home: Path) -> dict[str, Any] | None:
    package, finder = PEERS[name]
    if importlib.util.find_spec(package) is None:
        print(f"{name}: {package} is not installed", flush=True)
        return None
    began = time.monotonic()
    done = subprocess.run([sys.executable, str(SCRIPT), "--finder", finder, "--limit", str(limit)], cwd=home, env=environment(),
                          capture_output=True, text=True)
    if done.returncode:
        print(f"{name}: failed: {done.stderr.strip().splitlines()[-1]}", flush=True)
        return {"finder": name, "found": None, "trials": None, "seconds": time.monotonic() - began}
    return {"finder": name, **json.loads(done.stdout.splitlines()[-1]), "seconds": time.monotonic() - began}


def proof(size: int, limit: int, steps: int, home: Path) -> dict[str, Any]:
    """The plain script with this size, in a process of its own that is killed above the limit."""
    script = [sys.executable, str(SCRIPT), "--batch-size", str(size), "--steps", str(steps)]
    shell = [sys.executable, "-I", "-c", "import subprocess, sys; sys.exit(subprocess.call(sys.argv[1:]))", *script]
    process = subprocess.Popen(shell, cwd=home, env=environment())      # the meter looks at what descends from it
    watch = Meter(process.pid, limit)
    try:
        code = process.wait()
    finally:
        watch.close()
    return {"passed": code == 0 and watch.exceeded_bytes is None, "peak_bytes": watch.peak_bytes()}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--memory", type=sizes.parse, default=sizes.parse("1200MiB"))
    parser.add_argument("--proofs", type=int, default=3, help="fresh processes that judge each answer")
    parser.add_argument("--smoke", action="store_true", help="as little as runs: does it work?")
    parser.add_argument("--json", type=Path, metavar="FILE")
    arguments = parser.parse_args()
    limit = sizes.parse("700MiB") if arguments.smoke else arguments.memory
    proofs, steps = (1, 3) if arguments.smoke else (arguments.proofs, 50)
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory(prefix="saturate-bench-") as name:
        home = Path(name)
        finders = [ours(limit, "60s" if arguments.smoke else "10m", home)]
        finders += [row for peer_name in ([] if arguments.smoke else PEERS) if (row := peer(peer_name, limit, home)) is not None]
        for row in finders:
            row["proofs"] = [proof(row["found"], limit, steps, home) for _ in range(proofs)] if row["found"] else []
            row["correct"] = bool(row["proofs"]) and all(one["passed"] for one in row["proofs"])
            rows.append(row)
            peaks = ", ".join(sizes.show(one["peak_bytes"]) for one in row["proofs"])
            print(f"{row['finder']:22s} {row['found'] or '-':>6} {'correct' if row['correct'] else 'WRONG':8s} {row['trials'] or '-':>3} trials "
                  f"{row['seconds']:6.0f} s   peaks of its proofs: {peaks} of {sizes.show(limit)}", flush=True)
    mine, others = rows[0], rows[1:]
    right = [row["found"] for row in others if row["correct"]]
    fewest = min((row["trials"] for row in others if row["trials"]), default=None)
    print(f"size / the largest correct one of the others: {mine['found'] / max(right):.3f}" if right and mine["found"] else
          "no other finder gave a correct answer to compare with")
    print(f"trials / the fewest of the others: {mine['trials'] / fewest:.2f}" if fewest else "no trials to compare with")
    print(f"sizes that ran in our trials: {len({size for size, _, _ in mine['sizes']})}")
    met = bool(mine["correct"] and mine["found"] >= max(right, default=0) and (fewest is None or mine["trials"] <= fewest / 2))
    judged = None if arguments.smoke or not others else met
    write_json(arguments.json, "fit", rows, judged)
    return close(met, arguments.smoke or not others, "correct, at least as large, at most half the trials")


if __name__ == "__main__":
    raise SystemExit(main())
