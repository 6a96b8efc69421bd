"""What searches leave that were killed, and what of it goes."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

from saturate.checkpoints import durable
from saturate.errors import ArtifactDamaged
from saturate.inference import leftovers
from saturate.inference import source as sources
from saturate.trial.lock import FolderLock

torch = pytest.importorskip("torch")


def search(folder: Path, *files: str, result: dict[str, object] | None = None) -> Path:
    for name in ("lock", "source/model.pt", "processes/process-0123abcd/output.log", "processes/process-0123abcd/scratch/weights", *files):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).touch()
    if result is not None:
        (folder / "result.json").write_text(json.dumps(result))
    return folder


def test_copies_of_the_model_and_artifacts_that_are_no_result_go(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A search that was killed while it wrote left half a model, one while it confirmed an artifact for each contender, for good."""
    def read(path: Path) -> SimpleNamespace:
        if path.name == "5":
            raise ArtifactDamaged("of another version")
        return SimpleNamespace(scores=object() if path.name == "3" else None)

    monkeypatch.setattr(leftovers.artifact, "read", read)
    result = {"artifact": None, "unconfirmed": {"artifact": "/where/it/was/artifacts/2"}, "candidates": []}
    programs = [f"artifacts/{number}/model.onnx" for number in range(1, 6)]
    folder = search(tmp_path, "program/model.onnx", "sources/baseline-8/model.pt", "artifacts/mine/model.onnx", "candidates.jsonl", *programs,
                    f"source/{durable.TEMPORARY}0123", f"{durable.TEMPORARY}4567", result=result)
    leftovers.clear_away(folder)
    kept = {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()}
    assert kept == {"lock", "source/model.pt", "processes/process-0123abcd/output.log", "candidates.jsonl", "result.json", "artifacts/2/model.onnx",
                    "artifacts/3/model.onnx", "artifacts/5/model.onnx", "artifacts/mine/model.onnx"}


@pytest.mark.parametrize("text", ["", "[1]", '{"unconfirmed": 1}'])
def test_where_the_result_cannot_be_read_no_artifact_goes(tmp_path: Path, text: str) -> None:
    search(tmp_path, "artifacts/1/model.onnx")
    (tmp_path / "result.json").write_text(text)
    leftovers.clear_away(tmp_path)
    assert (tmp_path / "artifacts" / "1").exists()


def test_a_folder_of_a_search_without_a_workdir_goes_unless_it_holds_a_result_or_works(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    later = time.time() + leftovers.QUIET_S + 60
    for number in range(3):
        search(tmp_path / f"optimize-0123456{number}")
    search(tmp_path / "optimize-01234563", result={})
    (tmp_path / "optimize-01234564").mkdir()        # about to begin
    with FolderLock(tmp_path / "optimize-01234566"):
        pass                                        # its inputs were refused
    search(tmp_path / "optimize")
    search(tmp_path / "optimize-of-mine")
    (tmp_path / "optimize-01234565").symlink_to(tmp_path / "optimize")
    monkeypatch.setattr(leftovers, "time", SimpleNamespace(time=lambda: later))
    with FolderLock(tmp_path / "optimize-01234561"):
        leftovers.clear_forsaken(tmp_path, "optimize-")
        assert sorted(path.name for path in tmp_path.iterdir()) == ["optimize", "optimize-01234561", "optimize-01234563", "optimize-01234564",
                                                                    "optimize-01234565", "optimize-of-mine"]
    assert (tmp_path / "optimize" / "source" / "model.pt").exists()


@pytest.mark.parametrize("last", ["", "candidates.jsonl", "processes", "processes/process-0123abcd/output.log"])
def test_within_a_day_somebody_may_go_on_in_it(tmp_path: Path, last: str) -> None:
    """A repeat without the workdir removed the journal of an hour's search that a full disk had ended. And a search of another machine
    may work in it, whose lock is not seen on some network file systems."""
    folder = search(tmp_path / "optimize-01234560", "candidates.jsonl")
    for path in (folder, *folder.rglob("*")):
        os.utime(path, (0, 0))
    os.utime(folder / last)
    leftovers.clear_forsaken(tmp_path, "optimize-")
    assert folder.exists()
    os.utime(folder / last, (0, 0))
    leftovers.clear_forsaken(tmp_path, "optimize-")
    assert not folder.exists()


def test_a_search_that_is_killed_as_it_begins_leaves_a_folder_to_go_on_in(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Between the making of its first folder and its chmod: "no search has worked in it"."""
    from saturate.inference import folders

    def killed(path: Path, mode: int) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patched, FolderLock(tmp_path / "run"):
        patched.setattr(Path, "chmod", killed)
        with pytest.raises(KeyboardInterrupt):
            sources._make_private(tmp_path / "run" / "source")
    assert folders.workplace(tmp_path / "run") == tmp_path / "run"
