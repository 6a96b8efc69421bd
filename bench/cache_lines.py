"""What do compiled libraries gain by weights that lie on cache lines?

AOTInductor's library of BERT-base (batch 1, one CPU thread), as torch links it, races the same library as saturate links it
(`saturate.inference.formats._cache_lines`): in float32, and in 8 bits by PT2E. Both are compiled anew, in processes of their own.

    python bench/cache_lines.py [--smoke] [--json FILE] [--kinds float32,int8]
"""

from __future__ import annotations

import argparse
import math
import sys
import tempfile
from pathlib import Path
from typing import Any

from _inference_peers import Peer
from _output import as_text, close, write_json

from saturate.inference import racing
from saturate.measure.race import Limits

MODEL = "bert-base"
KINDS = ("float32", "int8")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--smoke", action="store_true", help="a tiny shape, in float32 only")
    parser.add_argument("--json", type=Path, metavar="FILE")
    parser.add_argument("--kinds", help=f"of {','.join(KINDS)}")
    arguments = parser.parse_args()
    kinds = (arguments.kinds or ("float32" if arguments.smoke else ",".join(KINDS))).split(",")
    if unknown := sorted(set(kinds) - set(KINDS)):
        parser.error(f"no such kind: {', '.join(unknown)}")
    with tempfile.TemporaryDirectory(prefix="saturate-bench-") as folder:
        rows = [row(kind, arguments.smoke, Path(folder)) for kind in kinds]
    met = None if arguments.smoke else all(row["ratio"][2] >= 1.0 for row in rows)
    write_json(arguments.json, "cache_lines", rows, met)
    return close(met, arguments.smoke, "not slower than as torch links it")


def row(kind: str, smoke: bool, folder: Path) -> dict[str, Any]:
    """One race, printed: how many times as fast the library is on cache lines."""
    def peer(place: str) -> Peer:
        return Peer(f"aoti-{kind}-{place}", MODEL, smoke, 1, folder / f"{kind}-{place}.log")

    limits = Limits(max_pairs=1, min_rounds=3, max_rounds=4) if smoke else Limits(max_pairs=4, max_rounds=20)
    found = racing.race(lambda: peer("as-torch"), lambda: peer("on-lines"), limits=limits)
    ratio = (math.nan, 0.0, math.inf) if found.estimate is None else (found.estimate.speedup, *found.estimate.speedup_ci)
    print(f"{MODEL}, {kind}: on cache lines / as torch links it {as_text(ratio)}", flush=True)
    return {"model": MODEL, "kind": kind, "ratio": ratio}


if __name__ == "__main__":
    sys.exit(main())
