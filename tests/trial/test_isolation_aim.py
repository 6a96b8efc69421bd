"""Aim with a repository on a server stays on this machine although the script names the server; tested with a fake."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from isolation_kit import SOURCE, script

from saturate.trial.offline import environment_offline

FAKE = """
class Repo:
    def __init__(self, path, *, read_only=None, init=False): print("repo", path, read_only, init)
    @classmethod
    def from_path(cls, path, read_only=None, init=False): return cls(path, read_only=read_only, init=init)
class Run:
    def __init__(self, run_hash=None, *, repo=None, experiment=None): print("run", run_hash, repo, experiment)
"""
SCRIPT = """
    import pathlib, sys
    from saturate.agent import trackers
    from saturate.importwatch import ImportWatch
    sys.meta_path.insert(0, ImportWatch(trackers.callbacks()))
    import aim
    class Own(aim.Run): pass
    aim.Run(repo="aim://example.org:53800", experiment="e"); Own("hash", repo="ssh://me@example.org/runs")
    aim.Run(repo="runs"); aim.Run(repo=pathlib.Path("runs")); aim.Run(repo="file:///runs"); aim.Run()
    aim.Repo.from_path("aim://example.org:53800", None, False); aim.Repo.from_path(path="aim://example.org:53800")
    aim.Repo("aim://example.org:53800"); aim.Repo.from_path("runs", None, True); aim.Repo("runs")
"""


def test_a_repository_on_a_server_becomes_a_folder(tmp_path: Path) -> None:
    (tmp_path / "aim.py").write_text(FAKE)
    environ = environment_offline(tmp_path / "run", {}) | {"PYTHONPATH": f"{tmp_path}:{SOURCE}"}
    done = subprocess.run([sys.executable, str(script(tmp_path, "t.py", SCRIPT))], env=environ, capture_output=True, text=True, timeout=30)
    folder = tmp_path / "run" / "trackers"
    assert done.stdout.splitlines() == [
        f"run None {folder} e", f"run hash {folder} None", "run None runs None", "run None runs None", "run None file:///runs None",
        "run None None None", *[f"repo {folder} None True"] * 3, "repo runs None True", "repo runs None False",
    ], done.stderr
