"""The Hugging Face Hub stays as it is during a trial: what a script would create, upload or delete there is answered, and not done.

Downloads, and every other question, go through. Whoever pushes (a `Trainer`, a mixin, a card, a file system) does so by the methods
of `HfApi`, so these are replaced, right after their module was imported and before anybody could take one of them by name.
"""

from __future__ import annotations

import functools
import importlib
import sys
from collections.abc import Callable
from typing import Any

#: How the names of the methods that change something begin. The rest asks, or downloads.
CHANGES = (
    "accept_", "add_", "batch_", "cancel_", "change_", "comment_", "copy_", "create_", "delete_", "disable_", "duplicate_", "edit_",
    "enable_", "grant_", "hide_", "like", "merge_", "move_", "pause_", "permanently_", "preupload_", "reject_", "rename_", "request_",
    "rerun_", "restart_", "resume_", "run_job", "run_uv_job", "scale_", "set_", "super_squash_", "suspend_", "sync_job_", "trigger_",
    "unlike", "update_", "upload_",
)

#: Whose a repository is that a script names by its last name alone. Who it would be, the Hub knows, and limits how often it is asked.
OWNER = "trial-of-saturate"

#: The commit that was not made.
COMMIT = "0" * 40


def callbacks() -> dict[str, Callable[[Any], None]]:
    """Name of a module -> what to call with it right after it was imported. Some push by `HfApi` and look at what they have created
    in between, which is not there: for them, all of it is answered."""
    return {
        "huggingface_hub.hf_api": _hub,
        "transformers.utils.hub": functools.partial(_pushes, repo_type="model", names=("PushToHubMixin",)),
        "datasets.arrow_dataset": functools.partial(_pushes, repo_type="dataset", names=("Dataset",)),
        "datasets.dataset_dict": functools.partial(_pushes, repo_type="dataset", names=("DatasetDict", "IterableDatasetDict")),
        "datasets.iterable_dataset": functools.partial(_pushes, repo_type="dataset", names=("IterableDataset",)),
    }


def _hub(module: Any) -> None:
    owner = getattr(module, "HfApi", None)
    for name in dir(owner):
        if name.startswith(CHANGES):
            setattr(owner, name, _answered(module, getattr(owner, name), _ANSWERS.get(name, _nothing)))
            if name in vars(module):        # a method of an instance of the module's own, bound before
                setattr(module, name, getattr(module.api, name))


def _answered(module: Any, original: Callable[..., Any], answer: Callable[..., Any]) -> Callable[..., Any]:
    import inspect

    signature = inspect.signature(original)
    _, *names = signature.parameters
    if answer is _nothing and signature.return_annotation not in (None, "None", inspect.Signature.empty):
        answer = _made

    @functools.wraps(original)
    def instead(api: Any, *arguments: Any, **keywords: Any) -> Any:
        found = answer(module, api, **dict(zip(names, arguments)), **keywords)
        return _finished(found) if keywords.get("run_as_future") else found

    return instead


def _finished(result: Any) -> Any:
    from concurrent.futures import Future

    future: Future[Any] = Future()
    future.set_result(result)
    return future


def _nothing(module: Any, api: Any, **asked: Any) -> None:
    """What most of them return."""


class Made:
    """What was not made: its number is 1, and whatever else is asked of it an empty text."""

    num = 1

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return ""

    def __str__(self) -> str:
        return ""


def _made(module: Any, api: Any, **asked: Any) -> Made:
    return Made()


def _address(api: Any, repo_id: Any, repo_type: Any = None) -> str:
    prefix = "" if repo_type in (None, "model") else f"{repo_type}s/"
    return f"{api.endpoint}/{prefix}{repo_id if '/' in str(repo_id) else f'{OWNER}/{repo_id}'}"


def _repository(module: Any, api: Any, repo_id: Any = None, repo_type: Any = None, **asked: Any) -> Any:
    """A copy is named after the original, unless it is given a name."""
    repo_id = repo_id or asked.get("to_id") or str(asked.get("from_id")).rpartition("/")[2]
    return module.RepoUrl(_address(api, repo_id, repo_type), endpoint=api.endpoint)


def _commit(module: Any, api: Any, repo_id: Any = None, repo_type: Any = None, **asked: Any) -> Any:
    address = _address(api, repo_id, repo_type)
    # Newer versions read the address of a repository by that of the Hub.
    more = {"_endpoint": api.endpoint} if "_endpoint" in module.CommitInfo.__dataclass_fields__ else {}
    return module.CommitInfo(
        commit_url=f"{address}/commit/{COMMIT}", commit_message=asked.get("commit_message") or "not made in a trial",
        commit_description=asked.get("commit_description") or "", oid=COMMIT,
        pr_url=f"{address}/discussions/1" if asked.get("create_pr") else None, **more,
    )


def _bucket(module: Any, api: Any, bucket_id: Any = None, **asked: Any) -> Any:
    buckets = importlib.import_module("._buckets", module.__package__)      # hf_api knows the class to type checkers only
    return buckets.BucketUrl(_address(api, bucket_id, "bucket"), endpoint=api.endpoint)


_ANSWERS: dict[str, Callable[..., Any]] = {
    **dict.fromkeys(("create_repo", "duplicate_repo"), _repository),
    "duplicate_space": lambda module, api, **asked: _repository(module, api, **{**asked, "repo_type": "space"}),
    **dict.fromkeys(("create_commit", "upload_file", "upload_folder", "delete_file", "delete_files", "delete_folder"), _commit),
    "create_bucket": _bucket,
}


def _pushes(module: Any, repo_type: str, names: tuple[str, ...]) -> None:
    for owner in (getattr(module, name, None) for name in names):
        if hasattr(owner, "push_to_hub"):
            owner.push_to_hub = _pushed(owner.push_to_hub, repo_type)


def _pushed(original: Callable[..., Any], repo_type: str) -> Callable[..., Any]:
    @functools.wraps(original)
    def push_to_hub(self: Any, repo_id: Any, *arguments: Any, **keywords: Any) -> Any:
        if str(repo_id).startswith("buckets/"):
            return None
        asked = {name: keywords.get(name) for name in ("commit_message", "create_pr")}
        hub = sys.modules["huggingface_hub.hf_api"]     # whoever pushes has it
        return hub.HfApi().create_commit(repo_id, [], repo_type=repo_type, **asked)

    return push_to_hub
