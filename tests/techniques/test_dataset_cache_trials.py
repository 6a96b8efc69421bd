"""dataset-cache in real trainings under the agent: the same losses, a proof, and a cache that later trials find."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import msgspec
import pytest

pytest.importorskip("torch")
pytest.importorskip("numpy")

CASES = Path(__file__).resolve().parents[1] / "data"
sys.path.insert(0, str(CASES))
import cache_cases as cases  # noqa: E402

from saturate.records.facts import Evidence  # noqa: E402
from saturate.techniques import dataset_cache  # noqa: E402
from saturate.trial.launch import Chosen  # noqa: E402

SCRIPT = """
import random, sys, numpy, torch
sys.path.insert(0, {cases!r})
import cache_cases as cases
torch.manual_seed(0); random.seed(0); numpy.random.seed(0)
transform = cases.Compose([cases.Scale(), cases.RandomFlip(), cases.RandomShift(), torch.nn.Flatten(0)])
dataset = cases.Folder({root!r}, transform)
loader = torch.utils.data.DataLoader(dataset, batch_size=4, shuffle=True, num_workers={workers})
model = torch.nn.Sequential(torch.nn.Linear(60, 3), torch.nn.Dropout(0.1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
for epoch in range({epochs}):
    for images, labels in loader:
        optimizer.zero_grad()
        loss = torch.nn.functional.cross_entropy(model(images), labels)
        loss.backward()
        optimizer.step()
if {epochs} < 100: print(loss.item(), torch.rand(1).item(), random.random(), numpy.random.rand())
"""
STEP = {"token": "S0", "count": 1, "tokens": ["B", "S0"]}
CHOSEN = [Chosen("dataset-cache", "saturate.techniques.dataset_cache")]


def read_of(proof):
    return int(proof.evidence.split(" read")[0].split()[-1])


@pytest.mark.slow
@pytest.mark.parametrize("workers", [0, 2])
def test_trials_train_alike_and_share_the_cache(script, start, tmp_path, workers):
    root = cases.write(tmp_path / "files")
    path = str(script(SCRIPT.format(cases=str(CASES), root=str(root), workers=workers, epochs=10**6)))
    variables = {"SATURATE_DATA_CACHE": str(tmp_path / "cache"), "SATURATE_DATA_AHEAD_S": "20"}

    def trial(**more):
        one = start(path, step=STEP, environment=variables, **more)
        hello = one.wait_ready()
        assert not any(applied["problem"] for applied in hello["applied"])
        one.run_block(0, 20)
        evidence = msgspec.convert(one.ask("evidence"), Evidence)
        one.stop()
        return one.losses, evidence

    plain, _ = trial()
    for _ in range(2):
        cached, evidence = trial(techniques=CHOSEN)
        assert cached == plain and len(plain) >= 20
        proof = dataset_cache.active(evidence, dataset_cache.Options())
        assert proof.active and read_of(proof) >= 60
    assert len(list((tmp_path / "cache").iterdir())) == 1


@pytest.mark.slow
def test_run_with_a_recipe_ends_where_the_plain_run_ends(script, tmp_path, clean_environment):
    root = cases.write(tmp_path / "files")
    path = str(script(SCRIPT.format(cases=str(CASES), root=str(root), workers=2, epochs=3)))
    recipe = tmp_path / "recipe.toml"
    recipe.write_text('schema = 1\n\n[[technique]]\nid = "dataset-cache"\n')
    environment = {**clean_environment, "SATURATE_DATA_CACHE": str(tmp_path / "cache"), "OMP_NUM_THREADS": "1"}
    plain = subprocess.run([sys.executable, path], capture_output=True, text=True, check=True, env=environment)
    for _ in range(2):
        tuned = subprocess.run([sys.executable, "-m", "saturate", "run", str(recipe), "--", sys.executable, path],
                               capture_output=True, text=True, env=environment)
        assert (tuned.returncode, tuned.stdout) == (0, plain.stdout), tuned.stderr
    assert len(list((tmp_path / "cache").iterdir())) == 1


def test_trials_store_samples_in_the_study_and_ahead(tmp_path):
    from saturate.trial import planning

    (tmp_path / "work").mkdir()
    plan = planning.plan(tmp_path / "work", tmp_path / "study" / "t001", ["python"], {"SATURATE_DATA_CACHE": "/somewhere", "HOME": str(tmp_path)},
                         study_dir=tmp_path / "study")
    assert plan.environment["SATURATE_DATA_CACHE"] == str(tmp_path / "study" / "cache" / "data")
    assert plan.environment["SATURATE_DATA_AHEAD_S"] == "20" and plan.shared_cache == str(tmp_path / "study" / "cache")
