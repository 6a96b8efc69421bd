"""What counts as a command's own code, and as a change of it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import types
from pathlib import Path

from saturate.agent.sources import own
from saturate.study import sources


def test_the_files_of_the_users_own_modules(tmp_path: Path) -> None:
    """Neither the standard library's nor those of installed packages, of saturate, of modules without a file of their own."""
    (tmp_path / "package").mkdir()
    for name in ("package/__init__.py", "package/model.py", "train.py"):
        (tmp_path / name).write_text("")
    (tmp_path / "train.py").write_text(
        "import json, sys, msgspec, package.model, types\n"
        "sys.modules['nothing'] = None; sys.modules['number'] = 5; sys.modules['made'] = types.ModuleType('made')\n"
        "from saturate.agent.sources import own\nprint(json.dumps(own()))\n")
    done = subprocess.run([sys.executable, "train.py"], cwd=tmp_path, capture_output=True, text=True, check=True, timeout=60)
    expected = [str(tmp_path / name) for name in ("package/__init__.py", "package/model.py", "train.py")]
    assert done.stdout == str(expected).replace("'", '"') + "\n"


def test_which_torch_it_is_counts(tmp_path: Path) -> None:
    """It may be upgraded before a killed study is taken up again."""
    version = tmp_path / "site-packages" / "torch" / "version.py"
    version.parent.mkdir(parents=True)
    version.write_text("__version__ = '2.7.0'")
    (version.parent / "__init__.py").write_text("from . import version, nn")
    (version.parent / "nn.py").write_text("")
    code = "import json, torch; from saturate.agent.sources import own; print(json.dumps(own()))"
    done = subprocess.run([sys.executable, "-c", code], env={**os.environ, "PYTHONPATH": str(version.parents[1])},
                          capture_output=True, text=True, check=True, timeout=60)
    assert json.loads(done.stdout) == [str(version)]


def test_a_lazy_module_is_not_asked(monkeypatch) -> None:
    class Lazy(types.ModuleType):
        def __getattr__(self, name: str) -> str:
            raise RuntimeError("it was loaded")

    monkeypatch.setitem(sys.modules, "lazy", Lazy("lazy"))
    assert __file__ in own()


def test_a_change(tmp_path: Path) -> None:
    for name in ("train.py", "model.py", "c.yaml", "d.json", "log.csv"):
        (tmp_path / name).write_text(name)
    loaded = [str(tmp_path / "train.py"), str(tmp_path / "model.py"), "/nowhere/made_in_a_trial.py"]
    files = sources.digests(loaded, ["python", "train.py", "c.yaml", "--more=d.json", "log.csv", "none.yaml"], tmp_path)
    assert sorted(Path(path).name for path in files) == ["c.yaml", "d.json", "model.py", "train.py"]
    assert sources.problem(files) is None and sources.problem({}) is None
    (tmp_path / "log.csv").write_text("another line")
    (tmp_path / "model.py").write_text("model.py")
    assert sources.problem(files) is None, "the same content"
    (tmp_path / "model.py").write_text("another")
    (tmp_path / "d.json").unlink()
    problem = sources.problem(files)
    assert problem is not None and problem.cause == f"{tmp_path / 'model.py'}, {tmp_path / 'd.json'}"
