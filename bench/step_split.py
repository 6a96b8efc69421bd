"""Is the step split of `saturate profile` true? The recorded split beside a clock that a person put into the same loop.

    python bench/step_split.py

Each workload runs in one process under the agent. First some steps run as they are, then some are clocked, then some are
recorded, as in `saturate profile`. The loop times its own parts all along. Printed are shares of the step in percent, by hand in
each of these, and the split. It is judged against the loop's own clock in the steps that it speaks of, the clocked ones, so
that what else runs on the machine does not count; what the profiler changes shows between the first two rows.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
from pathlib import Path

from _output import close, write_json

from saturate.study.profile import recorded_steps
from saturate.trace import phases
from saturate.trace.read import read
from saturate.trial.process import Trial, TrialSpec, Workload

SCRIPT = Path(__file__).resolve().parent / "workloads" / "diagnosis" / "by_hand.py"
PARTS = ("input", "forward", "backward", "optimizer")
TARGET = 2.0


def by_hand(lines: list[list[int]]) -> dict[str, float]:
    """Percent of the steps by part; "other" is what lies between the clocks of two steps."""
    whole = sum(line[-1] for line in lines)
    return {name: 100 * sum(line[index] for line in lines) / whole for index, name in enumerate(PARTS)}


def recorded(path: Path, clocked: dict[str, int]) -> dict[str, float]:
    """The split as `saturate profile` prints it on a CPU."""
    split = phases.calibrated(read(path), clocked)
    return {name: 100 * split[name] / sum(split.values()) for name in PARTS}


def measure(model: str, timed: int, threads: int) -> list[dict[str, float]]:
    """Shares by hand as it is, in the clocked steps and in the recorded ones, and the split."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("SATURATE", "PYTHON"))}
    environment["OMP_NUM_THREADS"] = str(threads)
    with tempfile.TemporaryDirectory(prefix="saturate-bench-") as name:
        folder = Path(name)
        workload = Workload([sys.executable, str(SCRIPT), "--model", model, "--out", str(folder / "steps.txt")], folder, environment)
        with Trial(workload, TrialSpec(id="split", purpose="bench", folder=folder / "trial")) as trial:
            trial.wait_ready()
            block = trial.run_block(1, 8)
            before = len(_lines(folder))
            trial.run_block(1, timed)
            # The step at the gate is printed once the gate opens, and its clock ran while it was closed.
            plain = _lines(folder)[before + 1:]
            before = len(_lines(folder))
            clocked = trial.look("sample", 1, 2 * timed)["parts"]
            same = _lines(folder)[before + 2: before + 2 + timed]        # the second half is not clocked
            steps = recorded_steps(None, block.mean_ns / 1e6)
            before = len(_lines(folder))
            seen = trial.look("record", 1, steps, folder=str(folder), step_ms=block.mean_ns / 1e6)
            # Exporting the trace is on the clock of the last one.
            during = _lines(folder)[before + 2: before + 1 + steps]
            return [by_hand(plain), by_hand(same), by_hand(during), recorded(Path(seen["trace"]), clocked)]


def _lines(folder: Path) -> list[list[int]]:
    """What the loop wrote so far: to a file, because a pipe would wake its reader in every step."""
    whole = (folder / "steps.txt").read_text(encoding="utf-8").splitlines()
    return [[int(word) for word in line.split()[1:]] for line in whole]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--timed", type=int, default=60, help="steps without a profiler")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--smoke", action="store_true", help="as little as runs: does it work?")
    parser.add_argument("--json", type=Path, metavar="FILE")
    args = parser.parse_args()
    models = ["rows"] if args.smoke else ["gpt", "conv", "rows"]
    repeats = 1 if args.smoke else args.repeats
    rows, worst = [], 0.0
    for model in models:
        found = [measure(model, args.timed, args.threads) for _ in range(repeats)]
        plain, same, during, split = ({name: sum(one[kind][name] for one in found) / repeats for name in PARTS} for kind in range(4))
        difference = max(abs(split[name] - same[name]) for name in PARTS)
        worst = max(worst, difference)
        rows.append({"workload": model, "by_hand": plain, "by_hand_clocked": same, "by_hand_recorded": during, "split": split,
                     "points": difference, "runs": found})
        print(f"{model:6s}          " + "".join(f"{name:>11s}" for name in PARTS))
        for label, shares in (("as it is", plain), ("while recorded", during), ("while clocked", same), ("the split", split)):
            print(f"  {label:15s}" + "".join(f"{shares[name]:10.1f}%" for name in PARTS))
    print(f"split - by hand: at most {worst:.2f} points")
    met = worst <= TARGET
    write_json(args.json, "step_split", rows, None if args.smoke else met)
    return close(met, args.smoke, f"within {TARGET:g} points of the loop's own clock")


if __name__ == "__main__":
    raise SystemExit(main())
