"""The Hugging Face Hub during a trial: nothing is created, uploaded or deleted there, and everything else is asked as ever."""

from __future__ import annotations

import http.server
import json
import subprocess
import sys
import textwrap
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from saturate.agent import hubs

pytest.importorskip("huggingface_hub")
SOURCE = str(Path(__file__).resolve().parents[2] / "src")
WATCH = """
import sys
from saturate.agent import trackers
from saturate.importwatch import ImportWatch
sys.meta_path.insert(0, ImportWatch(trackers.callbacks()))
"""


@pytest.fixture
def hub() -> Iterator[tuple[str, list[str]]]:
    """A hub on this machine: its address, and what it was asked."""
    asked: list[str] = []

    class Handler(http.server.BaseHTTPRequestHandler):
        def answer(self) -> None:
            asked.append(f"{self.command} {self.path}")
            body = json.dumps({"id": "me/model", "name": "me"}).encode()
            self.rfile.read(int(self.headers.get("Content-Length") or 0))
            known = "/new" not in self.path
            self.send_response(200 if known and self.command == "GET" or self.path.endswith("validate-yaml") else 403 if known else 404)
            if not known:
                self.send_header("X-Error-Code", "RepoNotFound")
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        do_GET = do_POST = do_PUT = do_DELETE = do_PATCH = answer

        def log_message(self, *_: object) -> None: ...

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}", asked
    server.shutdown()
    thread.join()
    server.server_close()


def run(tmp_path: Path, address: str, source: str, watch: str = WATCH) -> list[str]:
    code = tmp_path / "t.py"
    code.write_text(watch + textwrap.dedent(source), encoding="utf-8")
    environ = {"PYTHONPATH": SOURCE, "HF_ENDPOINT": address, "HF_HOME": str(tmp_path / "cache"), "HF_TOKEN": "hf_none", "OMP_NUM_THREADS": "1"}
    done = subprocess.run([sys.executable, str(code)], env=environ, cwd=tmp_path, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout.splitlines()


PUSH = """
    from pathlib import Path
    from huggingface_hub import HfApi, ModelCard, create_repo, hf_api, upload_folder
    from huggingface_hub.hf_api import upload_file
    Path("out").mkdir(); Path("out/weights").write_text("w")
    made = create_repo("out", exist_ok=True)
    print(type(made).__name__, made.repo_id, made.repo_type)
    print(HfApi().create_repo("me/data", repo_type="dataset", private=True).repo_id)
    job = upload_folder(repo_id="me/model", folder_path="out", commit_message="step 1", run_as_future=True)
    print(job.done(), job.result().oid == "0" * 40, job.result().commit_message, job.result().repo_url.repo_id)
    print(upload_file(path_or_fileobj=b"x", path_in_repo="x", repo_id="me/model", create_pr=True).pr_num)
    ModelCard("---\\nlicense: mit\\n---\\n").push_to_hub("me/model")
    api = HfApi()
    api.delete_file("x", "me/model"); api.delete_repo("me/model"); hf_api.create_branch("me/model", branch="b")
    print(api.run_as_future(api.create_tag, "me/model", tag="t").result())
    print(api.model_info("me/model").id)
"""


def test_what_a_script_would_change_on_the_hub_is_answered_and_not_done(tmp_path, hub) -> None:
    address, asked = hub
    assert run(tmp_path, address, PUSH) == [
        f"RepoUrl {hubs.OWNER}/out model", "me/data", "True True step 1 me/model", "1", "None", "me/model"]
    assert {one for one in asked if not one.startswith("GET")} == {"POST /api/validate-yaml"}
    assert "GET /api/models/me/model" in asked, "what only asks does ask"


def test_without_it_the_hub_would_be_changed(tmp_path, hub) -> None:
    """The hub of these tests would show it."""
    address, asked = hub
    source = 'from huggingface_hub import create_repo\ntry: create_repo("me/out")\nexcept Exception as error: print(type(error).__name__)\n'
    assert run(tmp_path, address, source, watch="") == ["HfHubHTTPError"] and "POST /api/repos/create" in asked


def test_every_method_of_the_hub_that_changes_something_is_known() -> None:
    """A new version has new ones: each name is one or the other, and what asks is not answered by us."""
    from huggingface_hub import HfApi

    methods = {name for name in dir(HfApi) if not name.startswith("_")}
    asks = ("get_", "list_", "fetch_", "inspect_", "search_", "wait_", "read_", "parse_", "download_", "hf_hub_download", "snapshot_download",
            "verify_", "resolve_", "auth_check", "whoami", "run_as_future", "sync_bucket")
    left = {name for name in methods if not name.startswith((*hubs.CHANGES, *asks)) and not name.endswith(("_info", "_exists"))}
    assert not left
    assert not {name for name in methods if name.startswith(asks) and name.startswith(hubs.CHANGES)}


EVERY = """
    import inspect
    from huggingface_hub import HfApi
    from saturate.agent import hubs
    api = HfApi()
    for name in sorted(name for name in dir(HfApi) if name.startswith(hubs.CHANGES)):
        needed = [one for one in inspect.signature(getattr(HfApi, name)).parameters.values() if one.default is one.empty and one.name != "self"
                  and one.kind not in (one.VAR_POSITIONAL, one.VAR_KEYWORD)]
        found = getattr(api, name)(**{one.name: "me/x" for one in needed})
        wanted = inspect.signature(getattr(HfApi, name)).return_annotation
        assert (found is None) == (wanted in (None, "None", inspect.Signature.empty)), (name, wanted, found)
    print(api.create_pull_request("me/x", title="t").num, repr(str(api.upload_attachment("me/x", "a")) if hasattr(api, "upload_attachment") else ""))
"""


def test_whatever_is_answered_has_what_a_script_would_look_at(tmp_path, hub) -> None:
    address, asked = hub
    assert run(tmp_path, address, EVERY) == ["1 ''"] and not asked


TRAINER = """
    import torch
    from transformers import PretrainedConfig, PreTrainedModel, Trainer, TrainingArguments

    class Tiny(PreTrainedModel):
        config_class = PretrainedConfig
        def __init__(self, config):
            super().__init__(config)
            self.layer = torch.nn.Linear(2, 1)
            self.post_init()
        def forward(self, x, labels=None):
            return {"loss": (self.layer(x).squeeze(-1) - labels).square().mean()}

    data = [{"x": torch.randn(2), "labels": torch.zeros(())} for _ in range(16)]
    arguments = TrainingArguments("out", push_to_hub=True, save_strategy="steps", save_steps=2, max_steps=4, report_to=[], use_cpu=True,
                                  hub_strategy="all_checkpoints")
    trainer = Trainer(Tiny(PretrainedConfig()), arguments, train_dataset=data)
    trainer.train()
    print(trainer.hub_model_id, trainer.push_in_progress.is_done(), type(trainer.push_to_hub()).__name__)
    print(type(trainer.model.push_to_hub("me/new")).__name__)
"""


def test_a_trainer_that_pushes_trains_and_pushes_nothing(tmp_path, hub) -> None:
    """Every trial created the user's repository, and each of its checkpoints was a commit of throw-away weights."""
    pytest.importorskip("transformers")
    pytest.importorskip("accelerate")
    address, asked = hub
    assert run(tmp_path, address, TRAINER)[-2:] == [f"{hubs.OWNER}/out True CommitInfo", "CommitInfo"]
    assert not [one for one in asked if not one.startswith("GET")]


def test_datasets_are_pushed_nowhere(tmp_path, hub) -> None:
    pytest.importorskip("datasets")
    address, asked = hub
    source = 'from datasets import Dataset, DatasetDict\none = Dataset.from_dict({"x": [1]})\n' \
             'print(one.push_to_hub("me/new").repo_url.repo_type, DatasetDict(train=one).push_to_hub("me/new", private=True).repo_url.repo_id)\n'
    assert run(tmp_path, address, source)[-1] == "dataset me/new"
    assert not [one for one in asked if not one.startswith("GET")]


COMMAND = """
from huggingface_hub import create_repo
try: print(create_repo("out").repo_id, flush=True)
except Exception as error: print(type(error).__name__, flush=True)
import torch
model = torch.nn.Linear(4, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
for _ in range(40):
    model(torch.ones(8, 4)).square().mean().backward()
    optimizer.step(); optimizer.zero_grad()
"""


def test_trials_do_not_reach_the_hub_and_saturate_run_does(script, start, tmp_path, hub, clean_environment) -> None:
    address, asked = hub
    clean_environment.update(HF_ENDPOINT=address, HF_TOKEN="hf_none", HF_HOME=str(tmp_path / "cache"))
    path = str(script(COMMAND))
    trial = start(path)
    trial.wait_ready()
    assert trial.output().splitlines()[0] == f"{hubs.OWNER}/out" and not [one for one in asked if not one.startswith("GET")]
    (tmp_path / "recipe.toml").write_text("schema = 1\n")
    done = subprocess.run([sys.executable, "-m", "saturate", "run", "recipe.toml", "--", sys.executable, path], cwd=tmp_path,
                          env={**clean_environment, "PYTHONPATH": SOURCE}, capture_output=True, text=True, timeout=120, check=False)
    assert done.stdout == "HfHubHTTPError\n" and "POST /api/repos/create" in asked, done.stderr
