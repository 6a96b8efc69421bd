"""Is the one command's answer as fast as what an expert sets by hand?

`saturate.optimize` gets ResNet-50, BERT-base and ViT-B/16 (batch 1, one CPU thread) with a check and a time budget. Its
artifact then races, in processes of the same kind: eager float32; the fastest lossless runtime by hand; and the fastest
of all that is set by hand and meets the same check: Inductor, ONNX Runtime (float32, int8 dynamic, int8 static), OpenVINO (float32,
bfloat16, int8 static), torchao and PT2E, each as its documentation says (`_inference_peers.py`).

The weights are random, so the check is agreement with the float32 model's own top-1 on held-out inputs, with a generous
budget: this measures speed under one and the same condition for all, and says nothing of task accuracy.

How much 8 bits can give depends on the processor, and on how well its eager float32 does: beside each answer stands what
would be within reach if all products of the model ran at the rate at which this CPU multiplies large matrices of bytes, and
nothing else took time. It is measured in the same run, where the CPU has an instruction for that (VNNI); elsewhere torch multiplies bytes
far slower than float32, and neither that nor the targets mean anything.

    python bench/inference.py [--smoke] [--json FILE] [--models resnet50,...] [--budget 20m]
    python bench/inference.py --reach           only what is within reach, in ten minutes
"""

from __future__ import annotations

import argparse
import math
import signal
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from _inference_peers import BFLOAT16, LOSSLESS, PEERS, PRODUCT, Failed, Peer
from _output import as_text, close, write_json

from saturate.inference import racing
from saturate.measure.race import Limits

#: Times eager float32, times the best lossless, on one thread of a CPU with VNNI.
TARGETS = {"resnet50": (6.5, 3.2), "bert-base": (6.5, 3.2), "vit-b16": (5.5, 2.9)}

#: How many of the held-out inputs may get another top-1. Generous: the logits of random weights lie close together, so that 8 bits
#: change some 20 % of the answers, and the half of the inputs that confirms must be able to tell that this is within the budget.
MAX_DROP = 0.4

#: A smoke run's peers, and the techniques of its search: what needs no compiler.
SMOKE_PEERS = ("eager", "onnx-runtime")
SMOKE_TECHNIQUES = ("onnx-runtime", "onnx-int8-static")

Ratio = tuple[float, float, float]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--smoke", action="store_true", help="tiny shapes of one model, nothing is judged")
    parser.add_argument("--json", type=Path, metavar="FILE")
    parser.add_argument("--models", help=f"of {','.join(TARGETS)}")
    parser.add_argument("--reach", action="store_true", help="only what is within reach of 8 bits on this CPU; judges nothing")
    parser.add_argument("--budget", help="time for each search (default: 20m; 60s with --smoke)")
    arguments = parser.parse_args()
    signal.signal(signal.SIGTERM, signal.default_int_handler)       # as Ctrl-C: a peer that stands still outlives a process that is killed
    names = (arguments.models or ("resnet50" if arguments.smoke else ",".join(TARGETS))).split(",")
    unknown = sorted(set(names) - set(TARGETS))
    if unknown:
        parser.error(f"no such model: {', '.join(unknown)}")
    rows = []
    with tempfile.TemporaryDirectory(prefix="saturate-bench-") as folder:
        contests = [Contest(name, arguments.smoke, Path(folder)) for name in names]
        if arguments.reach:
            return only_what_is_within_reach(contests, arguments.json)
        for contest in contests:
            rows.append(contest.run(arguments.budget or ("60s" if arguments.smoke else "20m")))
            show(rows[-1])
    met = None if arguments.smoke or not has_vnni() else all(row["met"] for row in rows)
    write_json(arguments.json, "inference", rows, met)
    targets = "; ".join(f"{name} {eager:g}x eager, {lossless:g}x lossless" for name, (eager, lossless) in TARGETS.items())
    if met is None and not arguments.smoke:
        print("this CPU has no VNNI: targets are not judged")
        return 0
    return close(bool(met), arguments.smoke, f"{targets}; never slower than by hand")


def only_what_is_within_reach(contests: list[Contest], file: Path | None) -> int:
    rows = [{"model": contest.name, "within_reach": contest.within_reach()} for contest in contests]
    for row in rows:
        print(f"{row['model']}: {reach(row)} (target {TARGETS[row['model']][0]})")
    write_json(file, "inference", rows, None)
    return 0


class Contest:
    """One model: the search, the peers, and the races between them."""

    def __init__(self, name: str, smoke: bool, folder: Path):
        self.name, self.smoke, self.folder = name, smoke, folder / name
        self.folder.mkdir()
        self.limits = Limits(max_pairs=1, min_rounds=3, max_rounds=4) if smoke else Limits(max_pairs=4, max_rounds=20)

    def run(self, budget: str) -> dict[str, Any]:
        record = self.optimize(budget)
        peers, failed = self.by_hand()
        met_check = [name for name, peer in peers.items() if peer["agreement"] >= 1 - MAX_DROP]
        best = max(met_check, key=lambda name: peers[name]["speedup"])
        lossless = max((name for name in peers if name in LOSSLESS), key=lambda name: peers[name]["speedup"])
        answer = "eager" if record.artifact is None else f"saturate:{record.artifact}"
        ratios = {}
        for question, peer in (("eager", "eager"), ("lossless", lossless), ("by hand", best)):
            say(f"{self.name}: racing against {peer}")
            ratios[question] = (1.0, 1.0, 1.0) if answer == peer else self.race(peer, answer)
        return {"model": self.name, "answer": [part["id"] for part in record.best.recipe] if record.best else [],
                "search_s": record.seconds, "verdict": record.verdict, "lossless": lossless, "best_by_hand": best,
                "ratios": ratios, "within_reach": self.within_reach(), "by_hand": peers, "failed": failed, "met": self.met(ratios)}

    def met(self, ratios: dict[str, Ratio]) -> bool:
        """Targets count by the estimate; against the best by hand only a loss beyond noise counts."""
        eager, lossless = TARGETS[self.name]
        return ratios["eager"][0] >= eager and ratios["lossless"][0] >= lossless and ratios["by hand"][2] >= 1.0

    def optimize(self, budget: str) -> Any:
        """The record of one search, as a user starts it."""
        from _inference_models import build

        import saturate

        subject = build(self.name, self.smoke)
        expected = [subject.model(*batch).argmax(1) for batch in subject.held_out]

        def check(run: Callable[..., Any]) -> list[float]:
            return [float((run(*batch).argmax(1) == right).all()) for batch, right in zip(subject.held_out, expected)]

        result = saturate.optimize(subject.model, inputs=subject.inputs, check=check, budget=saturate.Budget(max_drop=MAX_DROP),
                                   time=budget, threads=1, workdir=self.folder / "study", only=SMOKE_TECHNIQUES if self.smoke else (),
                                   progress=lambda text: say(f"    {text}"))
        return result.record

    def within_reach(self) -> Ratio | None:
        """Times eager float32, for a program that does nothing but the model's products, each at this CPU's rate for bytes. None: it has no
        instruction for them."""
        if not has_vnni():
            return None
        say(f"{self.name}: what is within reach")
        one_product = PRODUCT / products_of(self.name, self.smoke)
        return tuple(ratio * one_product for ratio in self.race("eager", "int8-products"))

    def peer(self, name: str) -> Peer:
        return Peer(name, self.name, self.smoke, 1, self.folder / f"{name.partition(':')[0]}.log")

    def by_hand(self) -> tuple[dict[str, dict[str, float]], dict[str, str]]:
        """Every peer screened against eager: speed-up, agreement and preparation; and those that fail, with the reason."""
        found, failed = {}, {}
        with racing.lane(lambda: self.peer("eager")) as eager:
            for name in SMOKE_PEERS if self.smoke else PEERS:
                say(f"{self.name}: by hand: {name}")
                if name in BFLOAT16 and not has("avx512_bf16", "amx_bf16"):
                    failed[name] = "left out: this CPU has no instructions for bfloat16, and takes many times as long"
                    continue
                try:
                    with racing.lane(lambda name=name: self.peer(name)) as lane:
                        found[name] = {"speedup": racing.screen(eager, lane), "agreement": lane.worker.agreement,
                                       "prepare_s": lane.worker.prepare_s}
                except Failed as error:
                    failed[name] = f"failed: {error}"
        return found, failed

    def race(self, a: str, b: str) -> Ratio:
        """Speed of B over A."""
        found = racing.race(lambda: self.peer(a), lambda: self.peer(b), limits=self.limits)
        return (math.nan, 0.0, math.inf) if found.estimate is None else (found.estimate.speedup, *found.estimate.speedup_ci)


def products_of(name: str, small: bool) -> int:
    """Operations of the model's matrix products and convolutions for one input; a multiplication and its addition are two."""
    import torch
    from _inference_models import build

    from saturate.agent.flopcount import flop_counter

    subject = build(name, small)
    with torch.no_grad(), flop_counter(torch) as counted:
        subject.model(*subject.held_out[0])
    if counted.unknown:
        raise RuntimeError(f"the operations of {name} cannot be counted: {counted.unknown}")
    return counted.flops


def reach(row: dict[str, Any]) -> str:
    if row["within_reach"] is None:
        return "within reach of 8 bits here: not known, this CPU has no VNNI"
    return f"within reach of 8 bits here: {as_text(row['within_reach'])} of eager, if nothing took time but its products, at this CPU's rate for bytes"


def show(row: dict[str, Any]) -> None:
    eager, lossless = TARGETS[row["model"]]
    print(f"{row['model']}: {' + '.join(row['answer']) or 'nothing helps'}, found in {row['search_s']:.0f} s")
    print(f"    over eager float32 {as_text(row['ratios']['eager'])} (target {eager})")
    print(f"    {reach(row)}")
    print(f"    over the best lossless by hand ({row['lossless']}) {as_text(row['ratios']['lossless'])} (target {lossless})")
    print(f"    over the best by hand ({row['best_by_hand']}) {as_text(row['ratios']['by hand'])} (target: not slower)")
    for name, peer in sorted(row["by_hand"].items(), key=lambda entry: -entry[1]["speedup"]):
        print(f"        {name:22} {peer['speedup']:6.2f}x  top-1 as float32 {peer['agreement']:4.0%}  ready in {peer['prepare_s']:.0f} s")
    for name, reason in row["failed"].items():
        print(f"        {name:22} {reason}")
    sys.stdout.flush()


def has_vnni() -> bool:
    """Whether this CPU adds products of bytes in 32 bits."""
    return has("_vnni")


def has(*instructions: str) -> bool:
    """Whether /proc/cpuinfo names one of them."""
    try:
        known = Path("/proc/cpuinfo").read_text(encoding="utf-8")
    except OSError:         # not Linux
        return False
    return any(one in known for one in instructions)


def say(line: str) -> None:
    """Progress goes to standard error; standard output holds results only."""
    print(line, file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main())
