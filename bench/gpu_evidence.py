"""Evidence from a real GPU, in several calls of some minutes each: `evidence/DEVICE.json`.

    python bench/gpu_evidence.py                            # in an environment with torch, saturate and pytest
    python bench/gpu_evidence.py --wheels .whl --out FOLDER # what is missing there is carried as wheels
    python bench/gpu_evidence.py --rest                     # goes on where the last call ended: four cover everything
    python bench/gpu_evidence.py --only tune_char_gpt,tests # some parts; others in the file stay while their sources do
    python bench/gpu_evidence.py --public FOLDER            # with `tune` on public scripts that were copied there, see docs/public-scripts.md
    python bench/gpu_evidence.py --rehearse --minutes 3     # without a GPU, small: does every part come to its end?

Nothing is fetched from a network, nothing is installed but the wheels, and those into a folder that is removed again.
saturate itself is used from src/. Parts run in the order below, each in a process group of its own that is killed at
its limit; what a part found is on disk before the next one begins, so whoever ends the call early keeps the rest. A part
that would have much less time than its limit is left to the next call, and a shorter one has its turn.
Each part ends as `done`, `failed` (with the end of its output), `timed out` or `not run`. The exit code is 0 when all
are done, 1 when one is not, 3 where nothing could be run.

Each part holds the hash of the sources that it speaks of. tests/bench/test_gpu_evidence.py fails when a page of the
documentation cites a file whose sources have changed since.
"""

from __future__ import annotations

import argparse
import hashlib
import importlib.util
import json
import os
import platform
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
KEPT = ROOT / "evidence"
OUTPUT_KEPT = 6000                  # characters of the end of a part that failed, and of pytest's summary
SATURATE = ("-m", "saturate")
NEEDED = ("msgspec", "tomlkit", "rich", "pynvml", "numpy", "cloudpickle", "torch", "pytest")

TRAINING = ("src/saturate/agent", "src/saturate/measure", "src/saturate/study", "src/saturate/techniques",
            "src/saturate/trial", "src/saturate/verify")
GPT = ("--layers", "8", "--width", "512", "--heads", "8", "--context", "256", "--batch", "64", "--steps", "1000000")


@dataclass(frozen=True)
class Part:
    """One question. `command(seconds, folder)`: what Python is called with, to end within `seconds`, in an empty `folder`;
    `read(stdout, exit code)`: what was found (ValueError: nothing). `speaks_of`: sources, files or folders. `where`: the folder of a
    public script, which it runs in, below what --public names."""

    name: str
    seconds: float
    speaks_of: tuple[str, ...]
    command: Callable[[float, Path], Sequence[str]]
    read: Callable[[str, int], Any]
    where: str = ""


def _object(stdout: str, code: int) -> Any:
    """What a verb printed with --json, without paths of this machine."""
    found = json.loads(stdout)
    if not isinstance(found, dict):
        raise ValueError("no JSON object was printed")
    for name in ("recipe", "report", "command", "run", "artifact", "workdir", "python", "dir"):
        found.pop(name, None)
    return {"exit_code": code, **found}


def _tests(stdout: str, code: int) -> Any:
    """Each test's outcome, of those that ended, and an error for each file that could not be read. pytest that collects nothing, or
    breaks, is no answer."""
    outcomes = dict(re.findall(r"^(?:\S*/)?(test_\S+::.+?) (PASSED|FAILED|SKIPPED|ERROR|XFAIL)\b", stdout, re.MULTILINE))
    side_by_side = re.findall(r"^\[gw\d+\] \[ *\d+%\] ([A-Z]+) (?:\S*/)?(test_\S+::.+?) *$", stdout, re.MULTILINE)
    outcomes |= {name: word for word, name in side_by_side}
    outcomes |= dict.fromkeys(re.findall(r"^ERROR (?:\S*/)?(test_[^\s:]+\.py)(?= - |$)", stdout, re.MULTILINE), "ERROR")
    if code not in (0, 1, 2) or not outcomes:       # 2: interrupted
        raise ValueError(f"pytest ended with {code} after {len(outcomes)} tests")
    counts = {word: list(outcomes.values()).count(word) for word in sorted(set(outcomes.values()))}
    return {"exit_code": code, "counts": counts, "outcomes": outcomes,
            "failures": stdout[-OUTPUT_KEPT:] if code else ""}


def _tune(script: str, *arguments: str) -> Callable[[float, Path], Sequence[str]]:
    return lambda seconds, folder: [*_tuning(seconds, folder), str(ROOT / script), *arguments, "--output", str(folder / "out")]


def _tuning(seconds: float, folder: Path) -> list[str]:
    budget = max(20, int(seconds * 0.75))           # the last race and its verification may go over
    return [*SATURATE, "tune", "--json", "--budget", f"{budget}s", "--dir", str(folder / "study"), "--", sys.executable]


def _public(name: str, where: str, *words: str, seconds: float = 90) -> Part:
    """`tune` on a script that nobody here wrote."""
    return Part(f"public_{name}", seconds, TRAINING, lambda seconds, folder: [*_tuning(seconds, folder), *words], _object, where)


def _optimize(*only: str, of: str = "") -> Callable[[float, Path], Sequence[str]]:
    """With these techniques alone; `of`: how the names of the model's functions begin. A check without a budget for the drop would refuse each
    format that rounds more than float32."""
    workload = ROOT / "bench" / "workloads" / "gpu_inference.py"

    def command(seconds: float, folder: Path) -> Sequence[str]:
        # Half of the limit: the best is stored, loaded, scored and raced behind the end of a short budget.
        return [*SATURATE, "optimize", f"{workload}:{of}model", "--inputs", f"{workload}:{of}inputs", "--check", f"{workload}:{of}check",
                "--max-drop", "0.4", "--only", ",".join(only), "--json", "--budget", f"{max(20, int(seconds / 2))}s",
                "--workdir", str(folder / "work")]

    return command


def _pytest(*files: str, alone: bool = False) -> Callable[[float, Path], Sequence[str]]:
    """Side by side where pytest-xdist is there: most of a test is the start of processes. `alone`: those that measure times or fill it."""
    together = PARALLEL and not alone
    return lambda seconds, folder: ["-m", "pytest", "-o", "addopts=", "-p", "no:cacheprovider", "-m", "gpu", "-v", "-rfE",
                                    "--continue-on-collection-errors", "--tb=short", "--color=no", f"--basetemp={folder / 'tests'}",
                                    *(("-n", "6", "--dist", "worksteal") if together else ()),
                                    *(str(ROOT / "tests" / "gpu" / file) for file in files)]


PARALLEL = importlib.util.find_spec("xdist") is not None
INFERENCE = ("src/saturate/inference", "src/saturate/measure", "bench/workloads/gpu_inference.py", "bench/_inference_models.py")
TESTS = ("src/saturate", "tests/gpu")

#: The most valuable first: an answer to the product's question, what breaks, and then the rest.
PARTS = (
    Part("device", 60, ("src/saturate/machine", "src/saturate/agent/ceilings.py"),
         lambda seconds, folder: [*SATURATE, "doctor", "--json", "--paste", "--measure", "--python", sys.executable, "--dir", str(folder)], _object),
    Part("tune_char_gpt", 160, (*TRAINING, "examples/char_gpt.py"), _tune("examples/char_gpt.py", *GPT), _object),
    Part("timed_tests", 60, TESTS, _pytest("test_cuda_alone.py", "test_cuda_roofline.py", alone=True), _tests),
    Part("tests", 120 if PARALLEL else 420, TESTS, _pytest("test_cuda.py", "test_cuda_doctor.py", "test_cuda_prefetch.py", "test_cuda_checkpoint.py",
                                                           "test_cuda_memory.py", "test_cuda_memory_techniques.py", "test_cuda_chunks.py",
                                                           "test_cuda_loaders.py", "test_cuda_profile.py"), _tests),
    Part("inference_tests", 120 if PARALLEL else 420, TESTS, _pytest(
        "test_cuda_inference_process.py", "test_cuda_artifact.py", "test_cuda_inference_techniques.py", "test_cuda_generation.py",
        "test_cuda_objectives.py"), _tests),
    Part("optimize_resnet50", 150, INFERENCE, _optimize("cuda-graphs", "nhwc-layout", "compile-inference"), _object),
    Part("optimize_resnet50_formats", 130, INFERENCE, _optimize("tf32-products", "fp16", "bf16", "cuda-graphs"), _object),
    Part("optimize_vit_formats", 130, INFERENCE, _optimize("bf16", "torchao-fp8", "torchao-dynamic-int8", "compile-inference", of="transformer_"), _object),
    Part("decode", 180, ("src/saturate/inference", "src/saturate/agent/ceilings.py", "bench/workloads/gpu_decode.py", "examples/speculative_toy.py"),
         lambda seconds, folder: [str(ROOT / "bench" / "workloads" / "gpu_decode.py"), "--budget", str(int(0.6 * seconds))], _object),
    Part("tune_photo_resnet", 140, (*TRAINING, "src/saturate/data", "examples/photo_resnet.py"),
         _tune("examples/photo_resnet.py", "--epochs", "1000", "--batch", "64"), _object),
)

#: With --public, after the others.
WORD_LM = ("main.py", "--accel", "--data", "data/wikitext-2", "--model", "Transformer", "--emsize", "512", "--nhid", "512", "--nhead", "8",
           "--nlayers", "4", "--epochs", "100")
PUBLIC = (
    _public("nanogpt", "nanoGPT", "train.py", "config/train_shakespeare_char.py", "--dtype=float32", "--compile=False", "--max_iters=100000",
            "--eval_interval=1000", "--eval_iters=20", seconds=130),
    _public("imagenet_resnet50", "examples/imagenet", "main.py", "--dummy", "-a", "resnet50", "-b", "64", "-j", "4"),
    _public("word_language_model", "examples/word_language_model", *WORD_LM, "--lr", "5"),
    _public("word_language_model_optimizer", "examples/word_language_model", *WORD_LM, "--lr", "0.0005", "--use-optimizer"),
    _public("lightning_transformer", "lightning", "transformer.py"),
    _public("makemore", "makemore", "makemore.py", "-i", "names.txt", "-o", "/tmp/makemore", "--max-steps", "100000", "--device", "cuda"),
    _public("dcgan", "examples/dcgan", "main.py", "--dataset", "fake", "--accel", "--niter", "1000", "--outf", "/tmp"),
)
CALL_S = 9.3 * 60                   # of a call, unless --minutes says otherwise
ENDING_S = 16.0                     # what ending a part can take
BEGUN_WITH = 0.7                    # of its limit: with less, a part is left to the next call
LEAST_S = 20.0                      # what a rehearsal begins a part with


def source_hash(speaks_of: Sequence[str], root: Path = ROOT) -> str:
    """SHA-256 over the Python files below these paths, in the order of their names. A path that is not there counts too."""
    digest = hashlib.sha256()
    for name in sorted(speaks_of):
        path = root / name
        files = sorted(path.rglob("*.py")) if path.is_dir() else [path] if path.is_file() else []
        for file in files:
            digest.update(file.relative_to(root).as_posix().encode() + b"\0" + file.read_bytes() + b"\0")
        digest.update(f"{name}: {len(files)}\n".encode())
    return digest.hexdigest()


def stale(evidence: Mapping[str, Any], root: Path = ROOT) -> list[str]:
    """Names of the parts that found something, and whose sources are others by now."""
    return [name for name, part in evidence["parts"].items() if part["status"] == "done" and not _current(part, root)]


def _current(part: Mapping[str, Any], root: Path = ROOT) -> bool:
    """Whether a part was run, on the sources as they are."""
    return "sources" in part and source_hash(part["speaks_of"], root) == part["sources"]


def only_skipped(part: Mapping[str, Any]) -> bool:
    """Whether all that it found are tests that did not run."""
    found = part.get("found")
    return isinstance(found, dict) and set(found.get("counts", ())) == {"SKIPPED"}


def enough(part: Part, left: float, rehearsed: bool) -> bool:
    """Whether a part may begin with the seconds that are left."""
    return left >= min(part.seconds, LEAST_S if rehearsed else BEGUN_WITH * part.seconds)


def files_hash(folder: Path) -> str:
    """SHA-256 over all files of a folder, but for what Python compiles."""
    digest = hashlib.sha256()
    for file in sorted(file for file in folder.rglob("*") if file.is_file() and "__pycache__" not in file.parts):
        digest.update(file.relative_to(folder).as_posix().encode() + b"\0" + hashlib.sha256(file.read_bytes()).digest())
    return digest.hexdigest()


def run(part: Part, seconds: float, environment: Mapping[str, str], where: Path | None = None) -> dict[str, Any]:
    """What became of one part; it is killed, with all that it started, after `seconds`. `where`: a folder of files of others to run in;
    that they are as they were is a part of the answer."""
    sources = source_hash(part.speaks_of)           # before: an edit meanwhile must not look like what was measured
    files = files_hash(where) if where else None
    began = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="evidence-", ignore_cleanup_errors=True) as name:
        folder = Path(name)
        with open(folder / "stdout", "w+b") as out, open(folder / "stderr", "w+b") as err:
            process = subprocess.Popen([sys.executable, *part.command(seconds, folder)], cwd=where or folder, env=dict(environment),
                                       stdin=subprocess.DEVNULL, stdout=out, stderr=err, start_new_session=True)
            code = _wait(process, seconds)
            texts = [without_places(_text(stream), folder) for stream in (out, err)]
    found: dict[str, Any] = {"status": "done", "seconds": round(time.monotonic() - began, 1), "sources": sources,
                             "speaks_of": list(part.speaks_of)}
    try:
        found["found"] = part.read(texts[0], process.returncode)
    except ValueError as error:
        found |= {"status": "failed", "exit_code": process.returncode, "reason": str(error)[:300],
                  "output": "\n".join(text[-OUTPUT_KEPT:] for text in texts)}
    if where:
        found |= {"command": " ".join(part.command(seconds, Path())[len(_tuning(seconds, Path())):]), "files": files}
        if files_hash(where) != files:
            found |= {"status": "failed", "reason": "the script's files are not as they were"}
    if code is None:
        found |= {"status": "timed out", "limit_s": round(seconds), "output": "\n".join(text[-OUTPUT_KEPT:] for text in texts)}
    return found


def _wait(process: subprocess.Popen[bytes], seconds: float, patience: float = 8.0) -> int | None:
    """The exit code; None when the time was over. tune and optimize clean up after SIGINT, so that comes first."""
    for sent, allowed in ((None, seconds), (signal.SIGINT, patience), (signal.SIGKILL, patience)):
        if sent is not None:
            os.killpg(process.pid, sent)
        try:
            code = process.wait(allowed)
            return code if sent is None else None
        except subprocess.TimeoutExpired:
            continue
    return None                     # a process that not even SIGKILL ends waits for its driver


def without_places(text: str, folder: Path) -> str:
    """What a part printed, without where this checkout, its Python and its folder lie: the file is kept in the repository."""
    for place, shown in ((os.path.relpath(ROOT, folder), "."), (sys.prefix, "PYTHON"), (str(folder), "FOLDER"), (str(ROOT), ".")):
        text = re.sub(rf"{re.escape(place)}(?![\w-])", shown, text)
    return text


def _text(stream: Any) -> str:
    stream.seek(0)
    return str(stream.read().decode("utf-8", "replace"))


def installed(wheels: Path | None, into: Path) -> dict[str, str]:
    """The environment of the parts: src/ and bench/, and the packages of the wheels, before everything else."""
    paths = [str(ROOT / "src"), str(ROOT / "bench")]
    if wheels is not None:
        found = sorted(map(str, wheels.glob("*.whl")))
        if not found:
            raise SystemExit(f"{wheels} holds no wheels")
        subprocess.run([sys.executable, "-m", "pip", "install", "--quiet", "--no-index", "--no-deps", "--no-compile",
                        "--target", str(into), *found], check=True)
        paths.append(str(into))
    inherited = [path for path in os.environ.get("PYTHONPATH", "").split(os.pathsep) if path]
    return {**os.environ, "PYTHONPATH": os.pathsep.join([*paths, *inherited]), "PYTHONUNBUFFERED": "1"}


PROBE = f"""
import importlib.util, json, platform
missing = [name for name in {NEEDED!r} if importlib.util.find_spec(name) is None]
found = {{"missing": missing, "python": platform.python_version()}}
if "torch" not in missing:
    import torch
    cuda = torch.cuda.is_available()
    found |= {{"torch": torch.__version__, "cuda": torch.version.cuda, "device": torch.cuda.get_device_name() if cuda else "",
               "capability": list(torch.cuda.get_device_capability()) if cuda else None}}
print(json.dumps(found))
"""


def write(path: Path, evidence: Mapping[str, Any]) -> None:
    partial = path.with_name(f".{path.name}.partial")
    partial.write_text(json.dumps(evidence, indent=1) + "\n", encoding="utf-8")
    os.replace(partial, path)


def main(arguments: Sequence[str] | None = None, parts: Sequence[Part] = (*PARTS, *PUBLIC)) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=KEPT, help="the folder to write to")
    parser.add_argument("--minutes", type=float, default=CALL_S / 60, help="for everything (default: %(default)s)")
    parser.add_argument("--wheels", type=Path, help="a folder of wheels to use, where there is no network")
    parser.add_argument("--public", type=Path, help="a folder with public scripts")
    parser.add_argument("--only", default="", help="names of parts, comma-separated")
    parser.add_argument("--rest", action="store_true", help="only what no earlier call ran; its file is looked for in --out and in evidence/")
    parser.add_argument("--rehearse", action="store_true", help="also without a GPU; the file is called rehearsal.json")
    given = parser.parse_args(arguments)
    wanted = {name for name in given.only.split(",") if name} or {part.name for part in parts if given.public or not part.where}
    if unknown := wanted - {part.name for part in parts}:
        parser.error(f"no such part: {', '.join(sorted(unknown))}")
    folders = {part.name: given.public / part.where for part in parts if given.public and part.where}
    if absent := [name for name in sorted(wanted) if name.startswith("public_") and not folders.get(name, Path("-")).is_dir()]:
        parser.error(f"--public holds no script for {', '.join(absent)}")
    ends = time.monotonic() + 60 * given.minutes
    with tempfile.TemporaryDirectory(prefix="evidence-site-") as site:
        environment = installed(given.wheels, Path(site))
        probe = subprocess.run([sys.executable, "-c", PROBE], env=environment, capture_output=True, text=True)
        if probe.returncode:
            print(f"torch does not start here: {probe.stderr[-2000:]}", file=sys.stderr)
            return 3
        machine = json.loads(probe.stdout.splitlines()[-1])
        if missing := machine.pop("missing"):
            print(f"missing here: {', '.join(missing)}; carry them with --wheels", file=sys.stderr)
            return 3
        if not machine["device"] and not given.rehearse:
            print("no CUDA device here: nothing to write", file=sys.stderr)
            return 3
        name = "rehearsal" if given.rehearse else re.sub(r"[^a-z0-9]+", "-", machine["device"].lower()).strip("-")
        given.out.mkdir(parents=True, exist_ok=True)
        path = given.out / f"{name}.json"
        evidence = _begun(path, machine, parts)
        if given.rest:
            wanted = {name for name in wanted if evidence["parts"][name]["status"] == "not run"}
        for part in parts:
            if part.name not in wanted:
                continue
            left = ends - time.monotonic() - ENDING_S
            if not enough(part, left, given.rehearse):
                evidence["parts"][part.name] = {"status": "not run", "reason": "the time was over"}
            else:
                print(f"{part.name}: at most {min(part.seconds, left):.0f} s", file=sys.stderr, flush=True)
                evidence["parts"][part.name] = run(part, min(part.seconds, left), environment, folders.get(part.name))
            if only_skipped(evidence["parts"][part.name]) and not given.rehearse:
                evidence["parts"][part.name] |= {"status": "failed", "reason": "every test was skipped"}
            write(path, evidence)
            print(f"{part.name}: {evidence['parts'][part.name]['status']}", file=sys.stderr, flush=True)
    print(path)
    return 0 if all(evidence["parts"][name]["status"] == "done" for name in wanted) else 1


def _begun(path: Path, machine: Mapping[str, Any], parts: Sequence[Part]) -> dict[str, Any]:
    """Evidence of nothing yet. What an earlier call found on the same device and versions, and is still true, stays in it, failures
    too. Its file is at `path`, or the one that is kept."""
    evidence: dict[str, Any] = {"schema": 1, "machine": {**machine, "cores": os.cpu_count(), "architecture": platform.machine()},
                                "parts": {part.name: {"status": "not run", "reason": "it was not asked for"} for part in parts}}
    before = next((json.loads(file.read_text(encoding="utf-8")) for file in (path, KEPT / path.name) if file.is_file()), {})
    if before.get("machine") == evidence["machine"]:
        evidence["parts"] |= {name: part for name, part in before["parts"].items() if name in evidence["parts"] and _current(part)}
    return evidence


if __name__ == "__main__":
    sys.exit(main())
