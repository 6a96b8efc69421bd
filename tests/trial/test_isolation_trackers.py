"""Trackers stay offline although the script asks for the network by an argument; tested with fakes."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from isolation_kit import SOURCE, script

from saturate.trial.offline import environment_offline

FAKES = {
    "wandb": "def init(project=None, mode='online', dir=None): print('wandb', mode, dir)\ndef login(**k): print('LOGIN')\n",
    "mlflow": "def set_tracking_uri(uri): print('mlflow', uri)\n",
    "neptune": "def init_run(mode='async', **k): print('neptune', mode)\n",
    "comet_ml": "class Experiment:\n    def __init__(self, **k): print('CONTACT')\n"
                "class OfflineExperiment:\n    def __init__(self, offline_directory, **k): print('comet', offline_directory)\n",
    "clearml": "class Task:\n    off = False\n    @classmethod\n    def set_offline(cls, offline_mode=False): cls.off = offline_mode\n"
               "    @classmethod\n    def init(cls): print('clearml', cls.off)\n",
    "swanlab": "def init(mode='cloud', logdir=None): print('swanlab', mode, logdir)\n",
}
SCRIPT = """
    import wandb; wandb.login(key="k"); wandb.init("p", mode="online", dir="/elsewhere"); wandb.init(mode="disabled")
    import mlflow; mlflow.set_tracking_uri("https://example.org")
    import neptune; neptune.init_run(mode="async")
    import comet_ml; comet_ml.Experiment(api_key="k")
    import clearml; clearml.Task.set_offline(False); clearml.Task.init()
    import swanlab; swanlab.init(mode="cloud", logdir="/elsewhere")
"""


@pytest.fixture
def fakes(tmp_path: Path) -> Path:
    for name, text in FAKES.items():
        (tmp_path / f"{name}.py").write_text(text)
    return tmp_path


def _run(fakes: Path, prelude: str) -> list[str]:
    code = script(fakes, "t.py", prelude + SCRIPT)
    environ = environment_offline(fakes / "run", {}) | {"PYTHONPATH": f"{fakes}:{SOURCE}"}
    done = subprocess.run([sys.executable, str(code)], env=environ, capture_output=True, text=True, timeout=30, check=True)
    return done.stdout.splitlines()


WATCH = """
    import sys
    from saturate.agent import trackers
    from saturate.agent.importwatch import ImportWatch
    sys.meta_path.insert(0, ImportWatch(trackers.callbacks()))
"""


def test_arguments_do_not_reach_the_network(fakes):
    folder = fakes / "run" / "trackers"
    assert _run(fakes, WATCH) == [
        f"wandb offline {folder}", f"wandb disabled {folder}", f"mlflow file://{folder}/mlruns", "neptune offline",
        f"comet {folder}", "clearml True", f"swanlab local {folder}",
    ]


def test_the_fakes_would_show_a_contact(fakes):
    assert {"LOGIN", "CONTACT", "wandb online /elsewhere", "neptune async"} <= set(_run(fakes, ""))


def test_a_tracker_that_the_user_switched_off_stays_off(tmp_path):
    assert "WANDB_MODE" not in environment_offline(tmp_path, {"WANDB_MODE": "disabled"})
    assert environment_offline(tmp_path, {"WANDB_MODE": "online"})["WANDB_MODE"] == "offline"
