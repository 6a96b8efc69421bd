"""How close do dataset-cache and the loader search come to a loader that costs nothing? On JPEG photographs.

    python bench/loader.py          # needs Pillow, scikit-image and scikit-learn (for their photographs)

`tune` finds a recipe for a script with a plain DataLoader. Raced against it, with the cache warm: the same script
with one batch replayed (what no loader can beat), and the script with the best number of workers set by hand. With
the cache cold, the first epoch's pictures per second stand beside what all cores decode when they do nothing else, in
turns.

Without a GPU the script waits in each step instead of computing, so that cores are free to decode as they are beside
one.
"""

from __future__ import annotations

import argparse
import math
import os
import statistics
import subprocess
import sys
from pathlib import Path

import _race
from _output import as_text, close, write_json

from saturate.data.cache_helpers import usable_cpus
from saturate.measure import stats
from saturate.measure.race import Limits

WARM_TARGET, COLD_TARGET = 0.95, 0.95
ONLY = frozenset({"dataset-cache", "loader-workers"})
RACE = Limits(max_pairs=3, min_rounds=6, max_rounds=16)
SMOKE = Limits(max_pairs=1, min_rounds=2, max_rounds=2)


def environment() -> dict[str, str]:
    """The user's, with one thread: the decoding is what is measured."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith("SATURATE")}
    return {**kept, "OMP_NUM_THREADS": "1"}


def decode_rate(data: Path, seconds: float) -> float:
    """Pictures per second, with all cores making items of the dataset and nothing else."""
    code = ("import sys, time; sys.path.insert(0, sys.argv[1])\n"
            "import torch, jpeg_photos as j; from pathlib import Path\n"
            "data = j.Photographs(Path(sys.argv[2]), j.Compose([j.resize, j.crop_and_flip, j.to_tensor]))\n"
            "data[0]; print(flush=True); input()\n"
            "begin, count = time.perf_counter(), 0\n"
            "while time.perf_counter() < begin + float(sys.argv[3]):\n"
            "    data[(count * 7919 + int(sys.argv[4])) % len(data)]; count += 1\n"
            "print(count / (time.perf_counter() - begin))")
    arguments = [sys.executable, "-c", code, str(_race.WORKLOADS), str(data), str(seconds)]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    running = [subprocess.Popen([*arguments, str(core)], env=environment(), text=True, **pipes) for core in range(usable_cpus())]
    for process in running:
        process.stdout.readline()       # it has imported everything
    for process in running:
        process.stdin.write("\n")
        process.stdin.flush()
    return sum(float(process.communicate()[0]) for process in running)


def epoch_rates(command: list[str], folder: Path, epochs: int, **variables: str) -> list[float]:
    """Pictures per second of each epoch of one run of the script."""
    rates = folder / "rates"
    rates.unlink(missing_ok=True)
    subprocess.run([*command, "--epochs", str(epochs), "--rates", str(rates)], check=True, cwd=folder,
                   env={**environment(), **variables}, stdout=subprocess.DEVNULL)
    return [float(line) for line in rates.read_text().split()]


def best_by_hand(script: list[str], folder: Path, repeats: int) -> tuple[int, dict[int, float]]:
    """The number of workers with which the plain script is fastest, and the rate of each."""
    counts = sorted({0, 1, usable_cpus(), 2 * usable_cpus()})
    found: dict[int, list[float]] = {count: [] for count in counts}
    for turn in range(repeats):
        for count in counts if turn % 2 else reversed(counts):
            found[count] += epoch_rates([*script, "--workers", str(count)], folder, 1)
    rates = {count: statistics.median(values) for count, values in found.items()}
    for count, rate in rates.items():
        _race.say(f"  {count} workers by hand: {rate:.0f} pictures/s")
    return max(rates, key=rates.__getitem__), rates


def cold(recipe: Path, script: list[str], data: Path, folder: Path, repeats: int,
         seconds: float) -> tuple[tuple[float, float, float], list[list[float]]]:
    """Rate of a first epoch under the recipe over the decode rate, with its interval, and the pairs."""
    pairs = []
    for turn in range(repeats):
        command = [sys.executable, "-m", "saturate", "run", str(recipe), "--", *script]
        (rate,) = epoch_rates(command, folder, 1, SATURATE_DATA_CACHE=str(folder / f"cold{turn}"))
        pairs.append([rate, decode_rate(data, seconds)])
        _race.say(f"  first epoch {rate:.0f} pictures/s, all cores decode {pairs[-1][1]:.0f}")
    logs = [math.log(first / second) for first, second in pairs]
    middle = statistics.median(logs)
    reach = stats.median_se(logs) * stats.t_quantile(0.975, len(logs) - 1)
    return (math.exp(middle), math.exp(middle - reach), math.exp(middle + reach)), pairs


def rate_ratio(result: _race.Result) -> tuple[float, float, float]:
    """Rate of B over rate of A."""
    ratio, low, high = _race.time_ratio(result)
    return 1 / ratio, 1 / high if high else math.inf, 1 / low if low else math.inf


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pictures", type=int, default=2400)
    parser.add_argument("--budget", type=float, default=420.0, help="of tune, seconds")
    parser.add_argument("--repeats", type=int, default=8, help="pairs of a cold epoch and the decode rate")
    parser.add_argument("--smoke", action="store_true", help="as little as runs: does it work?")
    parser.add_argument("--json", type=Path, metavar="FILE")
    args = parser.parse_args()
    pictures, repeats, limits = (192, 2, SMOKE) if args.smoke else (args.pictures, args.repeats, RACE)
    os.environ["OMP_NUM_THREADS"] = "1"
    with _race.Arena() as arena:
        data = arena.folder / "photographs"
        subprocess.run([*_race.script("jpeg_photos", "--data", str(data)), "--make", str(pictures)], check=True)
        script = _race.script("jpeg_photos", "--data", str(data))
        _race.say("by hand")
        workers, by_hand = best_by_hand(script, arena.folder, 1 if args.smoke else 3)
        _race.say("tune")
        record, chosen = arena.tune(script, 60.0 if args.smoke else args.budget, ONLY, args.smoke)
        kept = " + ".join(c.label() for c in chosen) or "nothing"
        tuned = arena.contestant("tuned", script, chosen)
        replayed = arena.contestant("replayed", [*script, "--replay"])
        plain = arena.contestant(f"{workers} workers", [*script, "--workers", str(workers)])
        _race.say("warm")
        warm = rate_ratio(arena.race("against one batch replayed", replayed, tuned, limits, min_pairs=1 if args.smoke else 3))
        gain = rate_ratio(arena.race("against the best by hand", plain, tuned, limits, min_pairs=1 if args.smoke else 3))
        _race.say("cold")
        first, pairs = cold(Path(record.result.recipe), script, data, arena.folder, repeats, 2.0 if args.smoke else 8.0)
    print(f"tuned: {kept}")
    print(f"warm, tuned / one batch replayed  {as_text(warm)}")
    print(f"warm, tuned / best by hand        {as_text(gain)} ({workers} workers)")
    print(f"cold, first epoch / decode rate   {as_text(first)}")
    met = warm[0] >= WARM_TARGET and first[0] >= COLD_TARGET
    rows = [{"tuned": kept, "warm_of_replayed": warm, "warm_of_best_by_hand": gain, "workers_by_hand": workers,
             "rates_by_hand": by_hand, "cold_of_decode_rate": first, "cold_pairs": pairs, "pictures": pictures,
             "cores": usable_cpus()}]
    write_json(args.json, "loader", rows, None if args.smoke else met)
    return close(met, args.smoke, f"rates: warm at least {WARM_TARGET:.0%} of one batch replayed, "
                                  f"cold {COLD_TARGET:.0%} of the decode rate")


if __name__ == "__main__":
    raise SystemExit(_race.guarded(main))
