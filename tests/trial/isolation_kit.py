"""Helpers of the isolation tests: start a script in a cage, as this user or as one without rights, and hash a tree."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
import textwrap
from pathlib import Path

from saturate.trial.cage import CagePlan

SOURCE = str(Path(__file__).resolve().parents[2] / "src")
NOBODY = 4242   # a user id without a name

_STARTER = """
import json, os, sys
sys.path.insert(0, sys.argv[1])
from saturate.trial.cage import CagePlan, enter
plan = CagePlan.from_json(open(sys.argv[2]).read())
enter(plan)
os.execvpe(sys.argv[3], sys.argv[3:], dict(os.environ) | plan.environment)
"""

_SITE = """
import json, os, sys
if os.environ.get("TEST_REDIRECT"):
    sys.path.insert(0, os.environ["TEST_SOURCE"])
    from saturate.agent import redirect, redirect_libraries
    from saturate.importwatch import ImportWatch
    redirect.install_from_plan(json.loads(os.environ["TEST_REDIRECT"]))
    sys.meta_path.insert(0, ImportWatch({"torch": redirect_libraries.on_torch, **redirect_libraries.callbacks()}))
"""


def snapshot(*folders: Path, skip: tuple[str, ...] = (".saturate",)) -> dict[str, str]:
    """Type, mode, owner, time and content of everything below `folders`."""
    found = {}
    for folder in folders:
        for top, below, files in os.walk(folder):
            below[:] = [name for name in below if name not in skip]
            for name in [*below, *files, "."]:
                path = os.path.join(top, name)
                seen = os.lstat(path)
                content = b""
                if os.path.islink(path):
                    content = os.readlink(path).encode()
                elif os.path.isfile(path):
                    content = Path(path).read_bytes()
                moment = seen.st_mtime_ns if os.path.isfile(path) else 0
                found[path] = f"{seen.st_mode} {seen.st_uid} {moment} {hashlib.sha256(content).hexdigest()}"
    return found


def run_caged(plan: CagePlan, argv: list[str], environ: dict[str, str], prefix: tuple[str, ...] = ()) -> subprocess.CompletedProcess:
    """Start `argv` in the cage of `plan`, the agent's interception included, and wait."""
    run_dir = Path(plan.run_dir)
    (run_dir / "plan.json").write_text(plan.to_json())
    site = run_dir / "site"
    site.mkdir(exist_ok=True)
    (site / "sitecustomize.py").write_text(_SITE)
    environ = environ | {"TEST_SOURCE": SOURCE, "PYTHONPATH": str(site), "OMP_NUM_THREADS": "1"}
    if plan.redirect:
        environ["TEST_REDIRECT"] = json.dumps(plan.redirect)
    return subprocess.run(
        [*prefix, sys.executable, "-I", "-S", "-c", _STARTER, SOURCE, str(run_dir / "plan.json"), *argv],
        cwd=plan.cwd, env=environ, capture_output=True, text=True, timeout=120, check=False,
    )


def script(folder: Path, name: str, text: str) -> Path:
    path = folder / name
    path.write_text(textwrap.dedent(text))
    return path
