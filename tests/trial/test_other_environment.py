"""saturate in one environment, the workload in another one that has torch and nothing of saturate's."""

from __future__ import annotations

import importlib.metadata
import re
import subprocess
import sys
import venv
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "study"))
from tune_kit import TRAINING, Folder, no_traceback_of_ours, untouched

from saturate.records import recipe as recipes

OURS = ("saturate", "msgspec", "rich", "tomlkit", "pynvml")

def _needs(name: str, known: set[str]) -> set[str]:
    """The distribution and all that it needs, as far as it is installed."""
    try:
        required = importlib.metadata.requires(name) or []
    except importlib.metadata.PackageNotFoundError:
        return known
    known.add(name)
    for line in required:
        other = re.split(r"[^\w.-]", line, maxsplit=1)[0]
        if "extra ==" not in line and other not in known:
            _needs(other, known)
    return known

@pytest.fixture
def elsewhere(tmp_path: Path) -> str:
    """The interpreter of an environment with torch, NumPy and what they need."""
    pytest.importorskip("torch")
    root = tmp_path / "elsewhere"
    venv.create(root, with_pip=False)
    site = root / "lib" / f"python{sys.version_info.major}.{sys.version_info.minor}" / "site-packages"
    for name in _needs("numpy", _needs("torch", set())):
        for path in importlib.metadata.files(name) or ():
            entry = path.parts[0]
            target = Path(str(path.locate())).parents[len(path.parts) - 2] if len(path.parts) > 1 else Path(str(path.locate()))
            if entry not in ("..", "__pycache__") and not (site / entry).exists():
                (site / entry).symlink_to(target)
    python = str(root / "bin" / "python")
    look = f"import importlib.util, torch; print([n for n in {OURS} if importlib.util.find_spec(n)])"
    done = subprocess.run([python, "-c", look], cwd=tmp_path, env=Folder(tmp_path).environment(), capture_output=True, text=True)
    assert done.stdout == "[]\n", "nothing of saturate's is there: " + done.stderr
    return python

def test_a_workload_of_another_environment(elsewhere: str, tmp_path: Path) -> None:
    """It is measured there, and a recipe acts there."""
    work = tmp_path / "work"
    work.mkdir()
    folder = Folder(work)
    folder.write("train.py", TRAINING + "steps = int(sys.argv[1])\nwhile steps: step(); steps -= 1\nprint(optimizer.param_groups[0]['fused'], sys.prefix)\n")
    with untouched(work):
        tuned = folder.tune(argv=(elsewhere, "train.py", "1000000000"))
        assert not folder.alive()
    assert tuned.code in (0, 6) and no_traceback_of_ours(tuned.stderr), tuned.stderr        # 6: the machine is noisy

    assert tuned.result.baseline.step_ms and tuned.result.noise_floor is not None, tuned.stderr

    recipe = tmp_path / "recipe.toml"
    recipes.write(recipe, recipes.Recipe(techniques=[recipes.Entry(id="fused-optimizer")]))
    ran = subprocess.run([sys.executable, "-m", "saturate", "run", str(recipe), "--", elsewhere, "train.py", "12"],
                         cwd=work, env=folder.environment(), capture_output=True, text=True)
    assert (ran.returncode, ran.stdout) == (0, f"True {Path(elsewhere).parents[1]}\n") and "saturate:" not in ran.stderr, ran.stderr
