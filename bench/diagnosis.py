"""Does `saturate profile` name the bottleneck? One workload with one planted cause each, and one with none.

    python bench/diagnosis.py            # all of them
    python bench/diagnosis.py slow_disk clean

Every workload is an ordinary script; it is profiled as a user would do it, and right is only the finding that comes
first, with the cause's own name. The clean one must not find anything that could be mended. The slow disk is emulated: its
reads sleep, because a program cannot slow a disk down.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

from _output import close, write_json

from saturate.machine import ceilings, facts

FOLDER = Path(__file__).resolve().parent / "workloads" / "diagnosis"
TIMEOUT_S = 300


@dataclass(frozen=True)
class Case:
    """`first`: ids of the finding that must come first, any of them; empty: none but "nothing to gain" may come."""

    first: tuple[str, ...]
    ranks: int = 1
    needs_bf16: bool = False


CASES = {
    "slow_disk": Case(("input-bound-io",)),
    "slow_decode": Case(("input-bound-cpu",)),
    "one_worker": Case(("input-bound-workers",)),
    "item_per_step": Case(("host-syncs",)),
    "tiny_operators": Case(("launch-bound",)),
    "fp32_matmul": Case(("fp32-matmul",), needs_bf16=True),
    "eager_attention": Case(("eager-attention",)),
    "sleeping_rank": Case(("stragglers",), ranks=2),
    "collector_pauses": Case(("gc-pauses",)),
    "recompilation": Case(("recompilation",)),
    "graph_breaks": Case(("graph-breaks",)),
    "clean": Case(()),
}
HARMLESS = "nothing-to-gain"


def command(name: str, case: Case) -> list[str]:
    script = str(FOLDER / f"{name}.py")
    if case.ranks == 1:
        return [sys.executable, script]
    return [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={case.ranks}", script]


def profiled(name: str, case: Case, threads: int) -> dict[str, Any]:
    """The object that `saturate profile --json` prints."""
    environment = {key: value for key, value in os.environ.items() if not key.startswith(("SATURATE", "PYTHON"))}
    environment["OMP_NUM_THREADS"] = str(threads)
    with tempfile.TemporaryDirectory(prefix="saturate-bench-") as folder:
        done = subprocess.run(
            [sys.executable, "-m", "saturate", "profile", "--json", "--budget", "60s", "--", *command(name, case)],
            cwd=folder, env=environment, capture_output=True, text=True, timeout=TIMEOUT_S, check=False)
    if done.returncode:
        raise RuntimeError(f"{name}: exit code {done.returncode}\n{done.stderr[-3000:]}")
    return json.loads(done.stdout)


def bf16_pays(threads: int) -> bool:
    """Some CPUs have the instructions, and half the rate of fp32."""
    if not facts.observe().cpu_bf16_native:
        return False
    rates = ceilings.obtain(sys.executable, "cpu", torch=version("torch"), threads=threads).rates
    return rates.get("bfloat16", math.inf) > rates.get("float32", 0.0)     # as the finding does, which needs both to say otherwise


def right(case: Case, found: list[str]) -> bool:
    if not case.first:
        return not set(found) - {HARMLESS}
    return bool(found) and found[0] in case.first


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("cases", nargs="*", metavar="CASE", help=f"of {', '.join(CASES)} (default: all)")
    parser.add_argument("--threads", type=int, default=1, help="threads of torch in each process")
    parser.add_argument("--smoke", action="store_true", help="two cases only: does it work?")
    parser.add_argument("--json", type=Path, metavar="FILE")
    args = parser.parse_args()
    unknown = set(args.cases) - set(CASES)
    if unknown:
        parser.error(f"no such case: {', '.join(sorted(unknown))}")
    names = args.cases or (["slow_decode", "clean"] if args.smoke else list(CASES))
    rows = []
    print(f"{'planted':18s}{'found first':22s}{'bound':>7s}  {'verdict':20s}{'seconds':>8s}  others")
    for name in names:
        case = CASES[name]
        if case.needs_bf16 and not bf16_pays(args.threads):
            print(f"{name:18s}left out: this CPU multiplies bf16 no faster than fp32")
            continue
        began = time.monotonic()
        profile = profiled(name, case, args.threads)
        took = time.monotonic() - began
        found = [finding["id"] for finding in profile["findings"]]
        first = profile["findings"][0] if found else {"id": "none", "bound": None}
        good = right(case, found)
        rows.append({"case": name, "expected": list(case.first), "found": found, "right": good, "verdict": profile["verdict"],
                     "bound": first["bound"], "step_ms": profile["step_ms"], "seconds": took,
                     "reasons": [finding["reason"] for finding in profile["findings"]]})
        bound = f"{first['bound']:.2f}x" if first["bound"] else "-"
        print(f"{name:18s}{first['id']:22s}{bound:>7s}  {profile['verdict']:20s}{took:8.1f}  {', '.join(found[1:])}"
              f"{'' if good else '   WRONG'}", flush=True)
    correct = sum(row["right"] for row in rows)
    print(f"named correctly: {correct} of {len(rows)}")
    met = correct == len(rows)
    write_json(args.json, "diagnosis", rows, None if args.smoke else met)
    return close(met, args.smoke, "every cause named first, no false alarm on the clean workload")


if __name__ == "__main__":
    raise SystemExit(main())
