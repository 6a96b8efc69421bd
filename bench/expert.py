"""Tune's recipe against what a careful user sets by hand with Accelerate and Lightning.

    python bench/expert.py

`workloads/expert_train.py` trains one model in three loops that do the same work in each step. The plain one is tuned;
it then races, with the recipe, against each loop with each setting by hand: bf16, torch.compile, and both. The races
are the product's own, between fresh processes of different commands; all carry the agent, so its cost cancels.

The number that counts is the worst of the races: tuned over the best of the settings by hand. Nobody checks what those
do to the training; the recipe is verified. `--same-loop` tunes each framework's own loop instead, so that only the
settings differ and not the loop. Needs accelerate and lightning. Some 20 minutes on two cores.
"""

from __future__ import annotations

import argparse
import importlib.util
import sys
from pathlib import Path
from typing import Any

from _output import as_text, close, write_json
from _race import Arena, Contestant, guarded, say, script, time_ratio

from saturate.measure.race import Limits
from saturate.study.confirming import FINAL
from saturate.study.racing import Result
from saturate.study.tune import AA
from saturate.trial.process import TrialEnded

LOOPS = ("accelerate", "lightning")
SETTINGS = {"bf16": ("--precision", "bf16"), "compile": ("--compile",), "bf16 + compile": ("--precision", "bf16", "--compile")}
SMOKE_SIZES = ("--width", "16", "--layers", "1", "--context", "8", "--batch", "2")
SMOKE_LIMITS = Limits(max_pairs=1, min_rounds=2, max_rounds=2)


def tuned(arena: Arena, loop: str, sizes: tuple[str, ...], budget_s: float, smoke: bool) -> Contestant:
    """The loop as it is, with the recipe that tune writes for it."""
    argv = script("expert_train", "--loop", loop, *sizes)
    only = frozenset({"zero-grad-none"}) if smoke else None
    say(f"tuning the {loop} loop")
    _, chosen = arena.tune(argv, budget_s, only, smoke)
    return arena.contestant(f"{loop}, tuned: " + (" + ".join(c.label() for c in chosen) or "nothing kept"), argv, chosen)


def against(arena: Arena, ours: Contestant, loop: str, setting: str, sizes: tuple[str, ...], limits: Limits) -> dict[str, Any]:
    """One race. A setting that does not run here is reported as such, and beaten."""
    expert = arena.contestant(f"{loop}, by hand: {setting}", script("expert_train", "--loop", loop, *SETTINGS[setting], *sizes))
    try:
        result: Result = arena.race("by hand against tuned", expert, ours, limits, min_pairs=limits.max_pairs)
    except TrialEnded as ended:
        if ended.side != "a":
            raise
        print(f"{expert.id:34s} does not run: {ended}", flush=True)
        return {"by_hand": expert.id, "tuned": ours.id, "ratio": None, "error": str(ended)}
    ratio = time_ratio(result)
    print(f"{expert.id:34s} tuned / by hand {as_text(ratio)}  {result.decision.verdict} "
          f"({result.b_ms:.2f} ms, {result.a_ms:.2f} ms)", flush=True)
    return {"by_hand": expert.id, "tuned": ours.id, "ratio": ratio, "verdict": result.decision.verdict,
            "by_hand_ms": result.a_ms, "tuned_ms": result.b_ms}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--budget", type=float, default=600.0, metavar="SECONDS", help="tune's (default: 600, as tune's own)")
    parser.add_argument("--same-loop", action="store_true", help="tune each framework's own loop")
    parser.add_argument("--smoke", action="store_true", help="as little as runs: does it work?")
    parser.add_argument("--json", type=Path, metavar="FILE")
    args = parser.parse_args()
    loops = [loop for loop in LOOPS if importlib.util.find_spec(loop)]
    if len(loops) < len(LOOPS):
        missing = ", ".join(sorted(set(LOOPS) - set(loops)))
        print(f"missing here: {missing} (pip install {missing.replace(',', '')})", file=sys.stderr)
        if not args.smoke:
            return 3
        loops = loops or ["plain"]              # a smoke run shows that the benchmark works, with any loop
    sizes = SMOKE_SIZES if args.smoke else ()
    limits = SMOKE_LIMITS if args.smoke else FINAL
    settings = ["bf16"] if args.smoke else list(SETTINGS)
    rows = []
    with Arena() as arena:
        ours: dict[str, Contestant] = {}
        for loop in loops[:1] if args.smoke else loops:
            base = loop if args.same_loop else "plain"
            if base not in ours:
                ours[base] = tuned(arena, base, sizes, 5.0 if args.smoke else args.budget, args.smoke)
                arena.learn_noise(ours[base], limits if args.smoke else AA)
            rows += [against(arena, ours[base], loop, setting, sizes, limits) for setting in settings]
    ran = [row for row in rows if row["ratio"]]
    worst = max(ran, key=lambda row: row["ratio"][0])
    print(f"tuned / the best by hand {as_text(worst['ratio'])} ({worst['by_hand']})")
    met = all(row["verdict"] != "slower" for row in ran)
    write_json(args.json, "expert", rows, None if args.smoke else met)
    return close(met, args.smoke, "never slower than the better of the two beyond noise")


if __name__ == "__main__":
    raise SystemExit(guarded(main))
