"""Results from a real GPU, in one call of less than ten minutes: runs the GPU tests, tunes two examples, writes JSON.

    python bench/gpu_evidence.py --out evidence [--budget 3m]

The file is named after the device and holds the hash of `src/`, versions, the tests' summary and the objects that
`tune --json` printed. A number in the docs that cites it is stale when that hash is another one.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import platform
import re
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
EXAMPLES = {
    "char_gpt": ["examples/char_gpt.py"],
    "photo_resnet": ["examples/photo_resnet.py"],
}


def source_hash() -> str:
    """SHA-256 over the package's source files, in path order."""
    digest = hashlib.sha256()
    for path in sorted((ROOT / "src").rglob("*.py")):
        digest.update(path.relative_to(ROOT).as_posix().encode() + b"\0" + path.read_bytes())
    return digest.hexdigest()


def device_name() -> str:
    code = "import torch; print(torch.cuda.get_device_name() if torch.cuda.is_available() else ''); print(torch.__version__)"
    name, version = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.splitlines()
    return f"{name}\n{version}"


def tests() -> str:
    run = subprocess.run([sys.executable, "-m", "pytest", "-m", "gpu", "-q", str(ROOT / "tests" / "gpu")],
                         capture_output=True, text=True, cwd=ROOT)
    return "\n".join(run.stdout.splitlines()[-25:])


def tuned(script: list[str], budget: str) -> object:
    """The object that tune printed, without paths of this machine."""
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, str(ROOT / script[0]), *script[1:], "--output", f"{folder}/out"]
        run = subprocess.run(
            [sys.executable, "-m", "saturate.cli.main", "tune", "--json", "--budget", budget, "--", *command],
            capture_output=True, text=True, cwd=folder,
        )
    try:
        found = json.loads(run.stdout)
    except ValueError:
        return {"exit_code": run.returncode, "stderr": run.stderr[-2000:]}
    for path in ("recipe", "report"):
        found.pop(path, None)
    found["command"] = ["python", *script]
    return {"exit_code": run.returncode, **found}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=ROOT / "evidence", help="the folder to write to")
    parser.add_argument("--budget", default="3m", help="per example")
    arguments = parser.parse_args()
    name, torch = device_name().split("\n")
    if not name:
        print("no CUDA device here: nothing to write", file=sys.stderr)
        return 3
    evidence = {"source": source_hash(), "device": name, "torch": torch, "python": platform.python_version(), "tests": tests(),
                "tune": {label: tuned(script, arguments.budget) for label, script in EXAMPLES.items()}}
    arguments.out.mkdir(parents=True, exist_ok=True)
    path = arguments.out / f"{re.sub(r'[^a-z0-9]+', '-', name.lower()).strip('-')}.json"
    path.write_text(json.dumps(evidence, indent=1) + "\n", encoding="utf-8")
    print(path)
    return 0


if __name__ == "__main__":
    sys.exit(main())
