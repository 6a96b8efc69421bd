"""How fast is a trace read and analysed, and in how much memory, beside the tools that read the same files?

    python bench/trace_readers.py --hta-python PATH --tracelens-python PATH --traces FOLDER
    python bench/trace_readers.py --big

The largest trace of `--traces` is repeated until it has 2 million events: times, correlations and ids of each copy
are shifted, so that the whole is a valid trace. saturate reads and analyses it; HolisticTraceAnalysis loads it
(`TraceAnalysis(...)`, before any question is asked). TraceLens loads `owlv2_h100` (`TreePerfAnalyzer.from_file`, and
its GPU timeline). Without such traces a made-up training stands in for both. A peer that is not there is not judged.

Each run is a fresh process; the sides alternate, and each ratio is the median of the pairs with their least and
greatest. Time: of the calls, without imports, which would count against the peers. Memory: the peak of the whole
process, imports included. `--big`: 4 GB of text, saturate alone.
"""

from __future__ import annotations

import argparse
import gzip
import json
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Any

from _output import as_text, close, write_json

OF_TRACELENS = "owlv2_h100.json.gz"
BIG_BYTES, BIG_MEMORY = 4_000_000_000, 1_000_000_000

#: Ends every child: seconds of the calls, and the peak of the process or of what it started.
REPORT = """
import resource
peak = next(int(line.split()[1]) for line in open("/proc/self/status") if line.startswith("VmHWM"))
peak = max(peak, resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss)
print("\\nmeasured", seconds, peak * 1024)
"""

OURS = """
import sys, time
from pathlib import Path
from saturate.trace.analyze import analyze
from saturate.trace.read import read
began = time.perf_counter()
found = analyze([read(Path(sys.argv[1]))])
seconds = time.perf_counter() - began
assert found.devices and all(device.busy_of_span for device in found.devices), found
"""

HTA = """
import logging, sys, time
logging.disable(logging.CRITICAL)
from hta.trace_analysis import TraceAnalysis
began = time.perf_counter()
found = TraceAnalysis(trace_files={0: sys.argv[1]}, trace_dir="")
seconds = time.perf_counter() - began
assert len(found.t.get_trace(0))
"""

TRACELENS = """
import sys, time
from TraceLens import TreePerfAnalyzer
began = time.perf_counter()
found = TreePerfAnalyzer.from_file(sys.argv[1]).get_df_gpu_timeline()
seconds = time.perf_counter() - began
assert len(found)
"""


@dataclass(frozen=True)
class Run:
    seconds: float
    peak_bytes: int


@dataclass(frozen=True)
class Peer:
    name: str
    option: str
    code: str
    module: str
    time_target: float  # theirs / ours, at least
    memory_target: float


PEERS = {
    "hta": Peer("HolisticTraceAnalysis", "--hta-python", HTA, "hta", 5.0, 10.0),
    "tracelens": Peer("TraceLens", "--tracelens-python", TRACELENS, "TraceLens", 2.0, 2.0),
}


def run(python: str, code: str, path: Path) -> Run:
    done = subprocess.run([python, "-c", code + REPORT, str(path)], capture_output=True, text=True)
    found = re.search(r"^measured ([\d.]+) (\d+)$", done.stdout, re.MULTILINE)
    if done.returncode or not found:
        raise SystemExit(f"{python} failed on {path.name}:\n{done.stderr[-2000:]}")
    return Run(float(found[1]), int(found[2]))


def installed(python: str | None, peer: Peer) -> bool:
    if python is None:
        return False
    try:
        return subprocess.run([python, "-c", f"import {peer.module}"], capture_output=True).returncode == 0
    except OSError:
        return False


def beside(peer: Peer, python: str, path: Path, label: str, repeats: int) -> dict[str, Any]:
    """Alternate the two; print and return their ratios."""
    pairs = []
    for turn in range(repeats):
        sides = [("ours", sys.executable, OURS), ("theirs", python, peer.code)]
        pairs.append(
            {
                side: run(executable, code, path)
                for side, executable, code in (sides if turn % 2 == 0 else sides[::-1])
            }
        )
    time = ratios([pair["theirs"].seconds / pair["ours"].seconds for pair in pairs])
    memory = ratios([pair["theirs"].peak_bytes / pair["ours"].peak_bytes for pair in pairs])
    print(f"{peer.name} / saturate, {label}: time {as_text(time)}  memory {as_text(memory)}")
    return {
        "case": label,
        "peer": peer.name,
        "time": time,
        "memory": memory,
        "repeats": repeats,
        "runs": [{side: asdict(one) for side, one in pair.items()} for pair in pairs],
        "met": time[0] >= peer.time_target and memory[0] >= peer.memory_target,
    }


def ratios(of_pairs: list[float]) -> tuple[float, float, float]:
    return median(of_pairs), min(of_pairs), max(of_pairs)


def alone(path: Path, label: str, repeats: int) -> dict[str, Any]:
    found = [run(sys.executable, OURS, path) for _ in range(repeats)]
    seconds, peak = median(one.seconds for one in found), max(one.peak_bytes for one in found)
    size = path.stat().st_size
    print(
        f"saturate, {label}, {size / 1e6:,.0f} MB: {seconds:.2f} s ({size / 1e6 / seconds:,.0f} MB/s), "
        f"{peak / 1e6:,.0f} MB at most"
    )
    return {"case": label, "peer": None, "bytes": size, "seconds": seconds, "peak_bytes": peak, "repeats": repeats}


# a large trace from a small one


SHIFTED = re.compile(
    rb'"(ts|correlation|External id|external id|id|Ev Idx)": ?(\d+)(\.\d+)?(?=[,}\s])|(ProfilerStep#)(\d+)'
)


def repeated(base: bytes, out: Path, events: int = 0, size: int = 0) -> int:
    """Write copies of a trace, one behind the other in time, until there are `events` events or `size` bytes."""
    content = json.loads(base)
    times = [
        float(event["ts"])
        for event in content["traceEvents"]
        if event.get("ph") == "X" and event.get("cat") not in (None, "Trace")
    ]
    period = int(max(times) - min(times)) + 1_000_000
    head = {key: value for key, value in content.items() if key != "traceEvents"}
    templates = [template(json.dumps(event, separators=(",", ":")).encode()) for event in content["traceEvents"]]
    steps = sum(str(event.get("name", "")).startswith("ProfilerStep#") for event in content["traceEvents"])
    apart = 1 + max(
        number for parts in templates for _, kind, number in parts if kind not in (b"", b"ts", b"ProfilerStep#")
    )
    del content
    written = copies = 0
    with open(out, "wb") as file:
        file.write(json.dumps(head).encode()[:-1] + (b"," if head else b"") + b'"traceEvents":[\n')
        while written < events or file.tell() < size:
            kinds = {b"ts": copies * period, b"ProfilerStep#": copies * steps}
            file.write(
                (b",\n" if copies else b"") + b",\n".join(filled(parts, kinds, copies * apart) for parts in templates)
            )
            copies, written = copies + 1, written + len(templates)
        file.write(b"\n]}\n")
    return written


def template(event: bytes) -> list[tuple[bytes, bytes, int]]:
    """An event as pieces: (text, what kind of number follows, that number); the last one is followed by nothing."""
    pieces, at = [], 0
    for found in SHIFTED.finditer(event):
        group = 2 if found[1] else 5
        pieces.append((event[at : found.start(group)], found[1] or found[4], int(found[group])))
        at = found.end(group)
    return [*pieces, (event[at:], b"", 0)]


def filled(parts: list[tuple[bytes, bytes, int]], kinds: dict[bytes, int], ids: int) -> bytes:
    return b"".join(text + (b"%d" % (number + kinds.get(kind, ids)) if kind else b"") for text, kind, number in parts)


def made_up(steps: int) -> bytes:
    """A training as Kineto writes it today: per step 40 layers of an operator with shapes, its call, kernel and flow,
    Python frames beside them."""

    def events() -> Iterator[dict[str, Any]]:
        identity = 0
        for step in range(steps):
            at = 1_419_116_104_994.125 + step * 10_000
            yield {
                "ph": "X",
                "cat": "user_annotation",
                "name": f"ProfilerStep#{step}",
                "pid": 9,
                "tid": 9,
                "ts": at,
                "dur": 10_000.0,
                "args": {"External id": 0, "Ev Idx": 0},
            }
            for layer in range(40):
                identity += 1
                start = at + layer * 200
                host = {"ph": "X", "pid": 9, "tid": 9}
                yield {
                    **host,
                    "cat": "python_function",
                    "name": "torch/nn/modules/linear.py(116): forward",
                    "ts": start,
                    "dur": 90.5,
                    "args": {"Python id": identity, "Python parent id": 1, "Ev Idx": identity},
                }
                yield {
                    **host,
                    "cat": "cpu_op",
                    "name": "aten::addmm",
                    "ts": start + 5,
                    "dur": 60.25,
                    "args": {
                        "External id": identity,
                        "Record function id": 0,
                        "Concrete Inputs": ["", "", "", "1", "1"],
                        "Ev Idx": identity,
                        "Input type": ["float", "float", "float", "Scalar", "Scalar"],
                        "Input Strides": [[1], [512, 1], [1, 512], [], []],
                        "Input Dims": [[512], [64 + layer, 512], [512, 512], [], []],
                    },
                }
                yield {
                    **host,
                    "cat": "cuda_runtime",
                    "name": "cudaLaunchKernel",
                    "ts": start + 20,
                    "dur": 8.75,
                    "args": {"External id": identity, "cbid": 211, "correlation": identity},
                }
                yield {
                    "ph": "X",
                    "cat": "kernel",
                    "name": "ampere_sgemm_128x64_tn",
                    "pid": 0,
                    "tid": 7,
                    "ts": start + 120,
                    "dur": 75.5,
                    "args": {
                        "External id": identity,
                        "queued": 0,
                        "device": 0,
                        "context": 1,
                        "stream": 7,
                        "correlation": identity,
                        "registers per thread": 122,
                        "shared memory": 12544,
                        "blocks per SM": 0.5,
                        "warps per SM": 2.0,
                        "grid": [8, 4, 1],
                        "block": [128, 1, 1],
                        "est. achieved occupancy %": 6,
                    },
                }
                flow = {"id": identity, "cat": "ac2g", "name": "ac2g"}
                yield {"ph": "s", **flow, "pid": 9, "tid": 9, "ts": start + 20}
                yield {"ph": "f", **flow, "pid": 0, "tid": 7, "ts": start + 120, "bp": "e"}

    return json.dumps(
        {
            "schemaVersion": 1,
            "distributedInfo": {"backend": "nccl", "rank": 0, "world_size": 1},
            "deviceProperties": [
                {
                    "id": 0,
                    "name": "NVIDIA A100-SXM4-80GB",
                    "totalGlobalMem": 84990623744,
                    "computeMajor": 8,
                    "computeMinor": 0,
                    "maxThreadsPerMultiprocessor": 2048,
                    "regsPerMultiprocessor": 65536,
                    "sharedMemPerMultiprocessor": 167936,
                    "numSms": 108,
                }
            ],
            "traceEvents": list(events()),
        }
    ).encode()


def judged(rows: list[dict[str, Any]]) -> bool | None:
    """Whether every target that was looked at is met; None: none was."""
    found = [row["met"] for row in rows if row.get("met") is not None]
    return all(found) if found else None


def bases(traces: Path | None, scratch: Path) -> tuple[bytes, Path, str]:
    """(text of the trace to repeat, file for TraceLens, what they are)."""
    found = sorted(traces.glob("*.json.gz"), key=lambda path: path.stat().st_size) if traces else []
    if traces and found and (traces / OF_TRACELENS).exists():
        return gzip.decompress(found[-1].read_bytes()), traces / OF_TRACELENS, found[-1].name.removesuffix(".json.gz")
    text = made_up(100)
    (scratch / "made_up.json").write_bytes(text)
    return text, scratch / "made_up.json", "a made-up training"


def in_a_process_of_its_own(arguments: argparse.Namespace, scratch: Path, **until: int) -> tuple[Path, int]:
    """`repeated` takes memory, and what a process holds when it starts another one counts as that one's peak."""
    out = scratch / "repeated.json"
    traces = ["--traces", str(arguments.traces)] if arguments.traces else []
    done = subprocess.run(
        [sys.executable, __file__, *traces, "--make", json.dumps(until), str(out)],
        capture_output=True,
        text=True,
        check=True,
    )
    return out, int(done.stdout)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--hta-python", metavar="PATH", help="a Python that has HolisticTraceAnalysis")
    parser.add_argument("--tracelens-python", metavar="PATH", help="a Python that has TraceLens")
    parser.add_argument(
        "--traces", type=Path, metavar="FOLDER", help=f"real traces to start from (*.json.gz), {OF_TRACELENS} among them"
    )
    parser.add_argument("--events", type=int, default=2_000_000)
    parser.add_argument("--repeats", type=int, default=3, help="pairs of runs")
    parser.add_argument("--big", action="store_true", help="4 GB instead, without peers")
    parser.add_argument("--smoke", action="store_true", help="as little as runs: does it work?")
    parser.add_argument("--json", type=Path, metavar="FILE")
    parser.add_argument("--make", nargs=2, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.smoke:
        args.events, args.repeats, args.traces = 20_000, 1, None
    with tempfile.TemporaryDirectory(prefix="saturate-readers-") as folder:
        scratch = Path(folder)
        if args.make:
            print(repeated(bases(args.traces, scratch)[0], Path(args.make[1]), **json.loads(args.make[0])))
            return 0
        _, for_tracelens, name = bases(args.traces, scratch)
        if args.big:
            size = 20_000_000 if args.smoke else BIG_BYTES
            if shutil.disk_usage(scratch).free < 1.2 * size:
                raise SystemExit(f"{scratch} has no room for {size / 1e9:.1f} GB")
            path, events = in_a_process_of_its_own(args, scratch, size=size)
            row = alone(path, f"{events:,} events of {name}", 1)
            row["met"] = row["peak_bytes"] < BIG_MEMORY
            rows, targets = [row], "4 GB in less than 1 GB"
        else:
            path, events = in_a_process_of_its_own(args, scratch, events=args.events)
            rows = [alone(path, f"{events:,} events of {name}", args.repeats)]
            for peer, python, file, label in (
                (PEERS["hta"], args.hta_python, path, f"{events:,} events of {name}"),
                (PEERS["tracelens"], args.tracelens_python, for_tracelens, for_tracelens.name),
            ):
                if installed(python, peer):
                    rows.append(beside(peer, python, file, label, args.repeats))
                else:
                    print(f"{peer.name}: not judged, {peer.option} names no Python that has it")
                    rows.append({"case": label, "peer": peer.name, "met": None})
            targets = "HolisticTraceAnalysis: 5 times the time, 10 times the memory; TraceLens: twice both"
        met = judged(rows)
        write_json(args.json, "trace_readers", rows, None if args.smoke else met)
        return close(met, args.smoke, targets)


if __name__ == "__main__":
    raise SystemExit(main())
