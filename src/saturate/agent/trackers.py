"""Experiment trackers stay offline during a trial even where the script asks for the network by an argument.

Variables do most of it (`trial/offline.py`); an explicit argument beats a variable, so the entry points are wrapped
right after the tracker was imported. Nothing is imported here, and a tracker without the expected entry point is left
alone.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable
from typing import Any

from saturate.agent import hubs
from saturate.records.addresses import remote_store

#: Where trackio sends what it logs, and who is told of it.
_TRACKIO = ("space_id", "server_url", "bucket_id", "dataset_id", "webhook_url")


def folder() -> str:
    """Where a tracker may write: in the trial's run folder."""
    return os.environ.get("SATURATE_TRACKERS") or os.getcwd()


def callbacks() -> dict[str, Callable[[Any], None]]:
    """Name of a module -> what to call with it right after it was imported."""
    return {"wandb": _wandb, "comet_ml": _comet, "neptune": _neptune, "clearml": _clearml, "swanlab": _swanlab,
            "trackio": _trackio, "aim": _aim, "litlogger": _litlogger, "azureml.core.run": _azureml,
            "mlflow": _mlflow, "mlflow.tracking._tracking_service.utils": _mlflow,
            "mlflow.tracking._model_registry.utils": _mlflow,
            "mlflow.store.artifact.artifact_repository_registry": _mlflow_artifacts, **hubs.callbacks()}


def _wrap(owner: Any, name: str, change: Callable[[tuple[Any, ...], dict[str, Any]], tuple[Any, ...]]) -> None:
    """`owner.name` gets the positional arguments that `change` returns and the keywords that it edited."""
    original = getattr(owner, name, None)
    if original is None:
        return

    @functools.wraps(original)
    def wrapped(*arguments: Any, **keywords: Any) -> Any:
        return original(*change(arguments, keywords), **keywords)

    setattr(owner, name, wrapped)


def _parameters(function: Any) -> list[str]:
    import inspect

    return list(inspect.signature(function).parameters)


def _nothing(owner: Any, name: str) -> None:
    if hasattr(owner, name):
        setattr(owner, name, lambda *_, **__: True)


def _wandb(module: Any) -> None:
    def offline(arguments: tuple[Any, ...], keywords: dict[str, Any]) -> tuple[Any, ...]:
        if keywords.get("mode") != "disabled":
            keywords["mode"] = os.environ.get("WANDB_MODE") if os.environ.get("WANDB_MODE") == "disabled" else "offline"
        keywords["dir"] = folder()
        return arguments

    _wrap(module, "init", offline)
    _nothing(module, "login")       # asks for a key, or sends it


def _kept_here(uri: Any) -> Any:
    """The address to use in the place of `uri`: a store on this machine stays as it is."""
    if not isinstance(uri, (str, os.PathLike)) or not remote_store(os.fspath(uri)):
        return uri
    os.environ["MLFLOW_ALLOW_FILE_STORE"] = "true"      # newer versions refuse to keep files otherwise
    return "file://" + os.path.join(folder(), "mlruns")


def _mlflow(module: Any) -> None:
    """The top module, or one of those through which every address of a store goes, whoever names it: a client's argument, a
    variable, a setting."""
    def asked(arguments: tuple[Any, ...], keywords: dict[str, Any]) -> tuple[Any, ...]:
        keywords.update((name, _kept_here(value)) for name, value in keywords.items() if name.endswith("uri"))
        return tuple(map(_kept_here, arguments))

    def resolved(original: Callable[..., Any]) -> Callable[..., Any]:
        return functools.wraps(original)(lambda *arguments, **keywords: _kept_here(original(*arguments, **keywords)))

    for name in ("set_tracking_uri", "set_registry_uri", "_get_store"):
        _wrap(module, name, asked)
    for name in ("get_tracking_uri", "get_registry_uri", "_resolve_tracking_uri", "_resolve_registry_uri"):
        if hasattr(module, name):
            setattr(module, name, resolved(getattr(module, name)))


def _mlflow_artifacts(module: Any) -> None:
    """A store on this machine may keep its artifacts elsewhere: they can be read there, and nothing is sent."""
    registry = getattr(module, "ArtifactRepositoryRegistry", None)
    if registry is None:
        return
    original = registry.get_artifact_repository

    @functools.wraps(original)
    def read_only(self: Any, artifact_uri: str, *arguments: Any, **keywords: Any) -> Any:
        repository = original(self, artifact_uri, *arguments, **keywords)
        if remote_store(str(artifact_uri)):
            for name in ("log_artifact", "log_artifacts", "delete_artifacts"):
                _nothing(repository, name)
        return repository

    registry.get_artifact_repository = read_only


def _comet(module: Any) -> None:
    """`Experiment` becomes its offline counterpart, which knows fewer keywords, and `start` makes that itself."""
    offline = getattr(module, "OfflineExperiment", None)
    if offline is None:
        return
    known = set(_parameters(offline)) - {"api_key", "experiment_key", "offline_directory"}

    def experiment(*_: Any, **keywords: Any) -> Any:
        return offline(offline_directory=folder(), **{name: value for name, value in keywords.items() if name in known})

    def alone(arguments: tuple[Any, ...], keywords: dict[str, Any]) -> tuple[Any, ...]:
        keywords.update(zip(names, arguments))
        keywords["online"] = False
        return ()

    for name in ("Experiment", "ExistingExperiment"):
        if hasattr(module, name):
            setattr(module, name, experiment)
    if hasattr(module, "start"):
        names = _parameters(module.start)
        _wrap(module, "start", alone)
    for name in ("login", "init"):
        _nothing(module, name)


def _neptune(module: Any) -> None:
    def offline(arguments: tuple[Any, ...], keywords: dict[str, Any]) -> tuple[Any, ...]:
        keywords["mode"] = "debug" if keywords.get("mode") == "debug" else "offline"
        return arguments

    for name in ("init_run", "init_model", "init_project"):
        _wrap(module, name, offline)


def _clearml(module: Any) -> None:
    task = getattr(module, "Task", None)
    if task is None or not hasattr(task, "set_offline"):
        return
    set_offline = task.set_offline
    set_offline(offline_mode=True)
    task.set_offline = staticmethod(lambda *_, **__: set_offline(offline_mode=True))


def _swanlab(module: Any) -> None:
    def local(arguments: tuple[Any, ...], keywords: dict[str, Any]) -> tuple[Any, ...]:
        if keywords.get("mode") != "disabled":
            keywords["mode"] = "local"
        keywords["logdir"] = folder()
        return arguments

    _wrap(module, "init", local)
    _nothing(module, "login")


def _aim(module: Any) -> None:
    """A repository on a server becomes one in the folder, which is made where there is none."""
    def named(arguments: tuple[Any, ...], keywords: dict[str, Any]) -> tuple[Any, ...]:
        keywords.update((name, _aims_folder(value)) for name, value in keywords.items() if name in ("repo", "path"))
        return tuple(map(_aims_folder, arguments))

    def opened(arguments: tuple[Any, ...], keywords: dict[str, Any]) -> tuple[Any, ...]:
        given = (*arguments, keywords.get("path"))
        kept = named(arguments, keywords)
        if (*kept, keywords.get("path")) == given:
            return kept
        keywords.update(init=True)
        return kept[:kept.index(folder()) + 1 if folder() in kept else None]       # what follows the path says how to open the server's

    for name, change in (("Run", named), ("Repo", opened)):
        if hasattr(module, name):
            _wrap(getattr(module, name), "__init__", change)
    if hasattr(module, "Repo") and hasattr(module.Repo, "from_path"):
        _wrap(module.Repo, "from_path", opened)
        module.Repo.from_path = staticmethod(module.Repo.from_path)


def _aims_folder(repository: Any) -> Any:
    if not isinstance(repository, (str, os.PathLike)):
        return repository
    scheme, separator, _ = os.fspath(repository).partition("://")
    return folder() if separator and scheme != "file" else repository


def _trackio(module: Any) -> None:
    """What it logs stays in files: no Space is created, or written to."""
    for name in _TRACKIO:
        os.environ.pop(f"TRACKIO_{name.upper()}", None)     # an empty one would be taken for an address

    def local(arguments: tuple[Any, ...], keywords: dict[str, Any]) -> tuple[Any, ...]:
        keywords.update(zip(names, arguments))
        keywords.update((name, None) for name in _TRACKIO if name in names)
        return ()

    def sent(*_: Any, **keywords: Any) -> Any:
        return keywords.get("new_space_id") or keywords.get("space_id") or ""

    if hasattr(module, "init"):
        names = _parameters(module.init)
        _wrap(module, "init", local)
    for name in ("sync", "freeze"):
        if hasattr(module, name):
            setattr(module, name, sent)


class _Unheard:
    """Whatever is asked of it, it answers with itself, and keeps nothing: an experiment of a tracker that knows no offline mode."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):       # what Python looks for, to copy it or to write it down, it does not have
            raise AttributeError(name)
        return self

    def __call__(self, *_: Any, **__: Any) -> Any:
        return self

    def __getitem__(self, key: Any) -> Any:
        return self

    def __setitem__(self, key: Any, value: Any) -> None:
        pass

    def __iter__(self) -> Any:
        return iter(())

    def __str__(self) -> str:
        return "offline"


def _litlogger(module: Any) -> None:
    """It sends to lightning.ai as soon as an experiment is made, also by Lightning's own logger."""
    for name in ("Experiment", "init", "log", "log_metrics", "log_metadata", "log_file", "log_model", "get_file", "get_model", "finalize"):
        if hasattr(module, name):
            setattr(module, name, _Unheard())


def _azureml(module: Any) -> None:
    """In a job of Azure ML, the run that a script asks for is the job's own."""
    if hasattr(module, "Run"):
        module.Run.get_context = staticmethod(_Unheard())
