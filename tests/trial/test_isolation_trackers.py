"""Trackers stay offline although the script asks for the network by an argument; tested with fakes."""

from __future__ import annotations

import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
from isolation_kit import SOURCE, script

from saturate.agent import trackers
from saturate.trial import launch
from saturate.trial.offline import environment_offline

FAKES = {
    "wandb": "def init(project=None, mode='online', dir=None): print('wandb', mode, dir)\ndef login(**k): print('LOGIN')\n",
    "mlflow": "def set_tracking_uri(uri): print('mlflow', uri)\n",
    "neptune": "def init_run(mode='async', **k): print('neptune', mode)\n",
    "comet_ml": "class Experiment:\n    def __init__(self, **k): print('CONTACT')\n"
                "class OfflineExperiment:\n    def __init__(self, project_name=None, offline_directory=None, **k): print('comet', offline_directory, project_name, k)\n"
                "def start(api_key=None, workspace=None, project=None, project_name=None, experiment_key=None, mode=None, online=None, source=None,\n"
                "          experiment_config=None): print('comet', 'CONTACT' if online in (None, True) else 'alone', project, source, experiment_config)\n",
    "clearml": "class Task:\n    off = False\n    @classmethod\n    def set_offline(cls, offline_mode=False): cls.off = offline_mode\n"
               "    @classmethod\n    def init(cls): print('clearml', cls.off)\n",
    "swanlab": "def init(mode='cloud', logdir=None): print('swanlab', mode, logdir)\n",
    "litlogger": "class Experiment:\n    url = 'lightning.ai'; metrics = {}\n    def __init__(self, name=None): print('LITLOGGER')\n"
                 "    def __getitem__(self, key): return self\n    def __setitem__(self, key, value): pass\n    def append(self, value, step): pass\n"
                 "init = Experiment\n",
    "azureml/core/run": "class Run:\n    @classmethod\n    def get_context(cls): return cls()\n    def log(self, name, value): print('AZURE')\n",
    "trackio": "import os\ndef init(project, name=None, space_id=None, server_url=None, resume='never', webhook_url=None):\n"
               "    print('trackio', project, space_id or os.environ.get('TRACKIO_SPACE_ID'), server_url, resume, webhook_url)\n"
               "def sync(project, space_id=None, sdk='gradio'): print('SPACE'); return 'me/space'\n"
               "def freeze(space_id, project, new_space_id=None): print('SPACE'); return 'me/frozen'\n",
}
SCRIPT = """
    import wandb; wandb.login(key="k"); wandb.init("p", mode="online", dir="/elsewhere"); wandb.init(mode="disabled")
    import mlflow; mlflow.set_tracking_uri("https://example.org")
    import neptune; neptune.init_run(mode="async")
    import comet_ml; comet_ml.Experiment(api_key="k", project_name="p", previous_experiment="e")
    comet_ml.start("k", project="p", source="s", experiment_config="c"); comet_ml.start(online=True)
    import clearml; clearml.Task.set_offline(False); clearml.Task.init()
    import litlogger; run = litlogger.Experiment(name="n"); run["loss"].append(0.5, step=1); run["lr"] = "1"
    from azureml.core.run import Run; Run.get_context().log("loss", 0.5)
    print("litlogger", run.url, list(litlogger.init("m").metrics), hasattr(run, "__deepcopy__"))
    import swanlab; swanlab.init(mode="cloud", logdir="/elsewhere")
    import trackio; trackio.init("p", None, "me/space", resume="allow", webhook_url="https://example.org")
    trackio.init(project="p", server_url="https://example.org")
    print(trackio.sync(project="p", sdk="static", space_id="me/static"), trackio.freeze(space_id=None, project="p", new_space_id="me/frozen"))
"""


@pytest.fixture
def fakes(tmp_path: Path) -> Path:
    for name, text in FAKES.items():
        file = tmp_path / f"{name}.py"
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
    return tmp_path


def _run(fakes: Path, prelude: str) -> list[str]:
    code = script(fakes, "t.py", prelude + SCRIPT)
    environ = environment_offline(fakes / "run", {}) | {"PYTHONPATH": f"{fakes}:{SOURCE}", "TRACKIO_SPACE_ID": "me/other"}
    done = subprocess.run([sys.executable, str(code)], env=environ, capture_output=True, text=True, timeout=30, check=True)
    return done.stdout.splitlines()


WATCH = """
    import sys
    from saturate.agent import trackers
    from saturate.importwatch import ImportWatch
    sys.meta_path.insert(0, ImportWatch(trackers.callbacks()))
"""


def test_arguments_do_not_reach_the_network(fakes):
    folder = fakes / "run" / "trackers"
    assert _run(fakes, WATCH) == [
        f"wandb offline {folder}", f"wandb disabled {folder}", f"mlflow file://{folder}/mlruns", "neptune offline",
        f"comet {folder} p {{}}", "comet alone p s c", "comet alone None None None", "clearml True", "litlogger offline [] False", f"swanlab local {folder}",
        "trackio p None None allow None", "trackio p None None never None", "me/static me/frozen",
    ]


def test_what_the_agent_wraps_is_watched_in_every_process_of_a_trial():
    """Before the agent is loaded, names are all that is known of it."""
    assert set(launch._TRACKERS) == set(trackers.callbacks())


def test_the_fakes_would_show_a_contact(fakes):
    assert {"LOGIN", "CONTACT", "wandb online /elsewhere", "neptune async", "comet CONTACT p s c", "SPACE", "LITLOGGER", "AZURE",
            "trackio p me/space None allow https://example.org"} <= set(_run(fakes, ""))


def test_mlflow_is_kept_from_other_machines_only(tmp_path):
    """A store on this machine is part of what a script finds: a run that it goes on with lies there."""
    assert not [name for name in environment_offline(tmp_path, {}) if name.startswith("MLFLOW")]
    for here in ("sqlite:///mlflow.db", "file:///data/mlruns", "mlruns"):
        assert "MLFLOW_TRACKING_URI" not in environment_offline(tmp_path, {"MLFLOW_TRACKING_URI": here})
    found = environment_offline(tmp_path, {"MLFLOW_TRACKING_URI": "https://example.org", "MLFLOW_REGISTRY_URI": "databricks-uc"})
    assert found["MLFLOW_TRACKING_URI"] == found["MLFLOW_REGISTRY_URI"] == f"file://{tmp_path}/trackers/mlruns"
    assert found["MLFLOW_ALLOW_FILE_STORE"] == "true", "newer versions refuse to keep files without it"


MLFLOW = {
    "mlflow/__init__.py": "from mlflow.tracking._tracking_service.utils import set_tracking_uri\n",
    "mlflow/tracking/__init__.py": "",
    "mlflow/tracking/_tracking_service/__init__.py": "",
    "mlflow/tracking/_tracking_service/utils.py": """
        import os
        def set_tracking_uri(uri): print("set", uri)
        def _resolve_tracking_uri(uri=None): return uri or os.environ.get("MLFLOW_TRACKING_URI") or "sqlite:///mlflow.db"
        def _get_store(store_uri=None, artifact_uri=None): print("store", _resolve_tracking_uri(store_uri), artifact_uri)
        """,
    "mlflow/client.py": """
        from mlflow.tracking._tracking_service import utils
        class MlflowClient:
            def __init__(self, tracking_uri=None):
                self.uri = utils._resolve_tracking_uri(tracking_uri)
                utils._get_store(self.uri)
        """,
    "mlflow/store/__init__.py": "",
    "mlflow/store/artifact/__init__.py": "",
    "mlflow/store/artifact/artifact_repository_registry.py": """
        class Repository:
            def log_artifact(self, path): print("SENT", path)
            def list_artifacts(self): return ["weights"]
        class ArtifactRepositoryRegistry:
            def get_artifact_repository(self, artifact_uri, tracking_uri=None): return Repository()
        """,
}
CLIENT = """
    import os
    from mlflow.client import MlflowClient
    from mlflow.tracking._tracking_service.utils import _get_store, set_tracking_uri
    from mlflow.store.artifact.artifact_repository_registry import ArtifactRepositoryRegistry
    MlflowClient(tracking_uri="http://tracker:5000"); MlflowClient("sqlite:///own.db"); set_tracking_uri("databricks")
    os.environ["MLFLOW_TRACKING_URI"] = "https://tracker"
    MlflowClient(); _get_store(artifact_uri="s3://bucket/1")
    for uri in ("s3://bucket/1", "file:///runs/1"):
        found = ArtifactRepositoryRegistry().get_artifact_repository(uri)
        print(found.list_artifacts(), found.log_artifact("weights.pt"))
"""


def test_an_mlflow_client_with_an_address_of_its_own_stays_here(tmp_path):
    """As Lightning's logger makes one: `mlflow.set_tracking_uri` is never called."""
    for name, text in MLFLOW.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(textwrap.dedent(text))
    code = script(tmp_path, "t.py", WATCH + CLIENT)
    environ = environment_offline(tmp_path / "run", {}) | {"PYTHONPATH": f"{tmp_path}:{SOURCE}"}
    done = subprocess.run([sys.executable, str(code)], env=environ, capture_output=True, text=True, timeout=30, check=True)
    here = f"file://{tmp_path}/run/trackers/mlruns"
    assert done.stdout.splitlines() == [f"store {here} None", "store sqlite:///own.db None", f"set {here}", f"store {here} None", f"store {here} {here}",
                                        "['weights'] True", "SENT weights.pt", "['weights'] None"]


def test_a_tracker_that_the_user_switched_off_stays_off(tmp_path):
    assert "WANDB_MODE" not in environment_offline(tmp_path, {"WANDB_MODE": "disabled"})
    assert environment_offline(tmp_path, {"WANDB_MODE": "online"})["WANDB_MODE"] == "offline"


def test_every_tracker_that_transformers_reports_to_is_known():
    """A new version may bring one more."""
    integrations = pytest.importorskip("transformers.integrations.integration_utils", reason="needs transformers").INTEGRATION_TO_CALLBACK
    wrapped = {name.partition(".")[0] for name in trackers.callbacks()}
    by_variable = {"dvclive", "kubeflow", "codecarbon"}
    on_this_machine = {"tensorboard", "flyte"}
    elsewhere = {"azure_ml": "azureml", "dagshub": "mlflow"}      # the name of the module that it reports by
    assert {elsewhere.get(name, name) for name in integrations} <= wrapped | by_variable | on_this_machine
