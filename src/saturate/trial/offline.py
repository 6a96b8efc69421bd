"""Variables that keep experiment trackers and model hubs from the network during a trial."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from saturate.records.addresses import remote_store


def environment_offline(run_dir: Path, environ: Mapping[str, str]) -> dict[str, str]:
    """Set for every trial. What a tracker still writes goes to `run_dir/trackers`. Values that a script passes as
    arguments are dealt with by `agent/trackers.py`, and what would change the Hugging Face Hub by `agent/hubs.py`.

    A tracker that the user switched off in `environ` stays off, and one that keeps its runs on this machine goes on there: the isolation covers
    that, and a script may look for what it wrote before. Hugging Face downloads stay possible: a first trial may have to fetch what the user's
    own run would fetch.
    """
    folder = run_dir / "trackers"
    folder.mkdir(parents=True, exist_ok=True)
    variables = {
        "SATURATE_TRACKERS": str(folder),
        "WANDB_MODE": "offline",
        "WANDB_DIR": str(folder),
        "WANDB_SILENT": "true",
        "COMET_OFFLINE_DIRECTORY": str(folder),
        "COMET_START_ONLINE": "0",
        "NEPTUNE_MODE": "offline",
        "CLEARML_OFFLINE_MODE": "1",
        "SWANLAB_MODE": "local",
        "SWANLAB_LOG_DIR": str(folder),
        "AIM_REPO": str(folder),
        "TRACKIO_DIR": str(folder / "trackio"),
        "DVC_STUDIO_OFFLINE": "true",
        "DVC_EXP_AUTO_PUSH": "false",
        "DVC_NO_ANALYTICS": "true",
        "DISABLE_KUBEFLOW_INTEGRATION": "TRUE",
        "HF_DAGSHUB_LOG_ARTIFACTS": "FALSE",
        "CODECARBON_SAVE_TO_API": "False",
        "HF_HUB_DISABLE_TELEMETRY": "1",
        "ORT_DISABLE_TELEMETRY": "1",
        "DO_NOT_TRACK": "1",
    }
    for name in ("MLFLOW_TRACKING_URI", "MLFLOW_REGISTRY_URI"):
        if remote_store(environ.get(name, "")):
            variables |= {name: folder.as_uri() + "/mlruns", "MLFLOW_ALLOW_FILE_STORE": "true"}
    return {name: value for name, value in variables.items() if environ.get(name, "").lower() not in ("disabled", "dryrun")}
