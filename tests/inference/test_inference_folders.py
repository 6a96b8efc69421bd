"""Names in a manifest that no file, and no package, can have: they are damage of the artifact, whatever the system says of them."""

from __future__ import annotations

import errno
import json
import os
import tempfile

import pytest

torch = pytest.importorskip("torch", reason="an artifact needs torch to be loaded")

import saturate  # noqa: E402
from saturate.errors import ArtifactDamaged, EnvironmentProblem  # noqa: E402
from saturate.inference import artifact, folders  # noqa: E402
from saturate.inference.techniques._api import Entry  # noqa: E402
from saturate.records.inference import CandidateRecord, ModelFacts  # noqa: E402


def stored(folder, **changes):
    """An artifact of one file, whose manifest says something else."""
    program = folder / "program"
    program.mkdir()
    (program / "weights").write_bytes(b"0" * 8)
    facts = ModelFacts(kind="Linear", device="cpu", torch=torch.__version__, parameters=1, parameter_bytes=4, dtypes=("float32",))
    row = CandidateRecord(id="a way", techniques=[], numerics="exact", fate="kept", reason="", code="# a way")
    made = artifact.store(folder / "a", Entry("generation", ["weights"], {"architectures": {"model": {"class": "Linear"}}}), program=program, record=row, facts=facts, threads=1)
    manifest = json.loads((made / "manifest.json").read_text())
    for name, change in changes.items():
        change(manifest[name])
    (made / "manifest.json").write_text(json.dumps({**manifest, "digest": artifact.digest(manifest)}))
    return made


def test_a_file_of_another_size_is_damage_without_being_read(tmp_path, monkeypatch):
    """A terabyte of nothing takes no room on a disk, and reading it takes half an hour."""
    damaged, digest_of = stored(tmp_path), folders.hashlib.file_digest
    os.truncate(damaged / "weights", 2**40)

    def small_only(file, kind):
        assert os.fstat(file.fileno()).st_size < 2**20
        return digest_of(file, kind)

    monkeypatch.setattr(folders.hashlib, "file_digest", small_only)
    with pytest.raises(ArtifactDamaged) as raised:
        saturate.load(damaged)
    assert raised.value.cause == f"weights has {2**40:,} bytes, and 8 were stored"


@pytest.mark.parametrize("name", ["a" * 5000, "a" * 300 + "/b"])
def test_a_name_that_is_too_long_is_damage(tmp_path, name):
    damaged = stored(tmp_path, files=lambda files: files.append({"path": name, "size_bytes": 1, "sha256": "0" * 64}))
    with pytest.raises(ArtifactDamaged, match="is not whole") as raised:
        saturate.load(damaged)
    assert len(raised.value.cause) < 300


def test_a_folder_that_nobody_may_look_into_is_damage(tmp_path, monkeypatch):
    def denied(path):
        raise PermissionError(errno.EACCES, "Permission denied")

    monkeypatch.setattr(folders.Path, "is_symlink", denied)
    with pytest.raises(ArtifactDamaged) as raised:
        folders.inside(tmp_path, "weights")
    assert "Permission denied" in raised.value.cause


def test_a_package_without_a_name_is_damage(tmp_path):
    with pytest.raises(ArtifactDamaged, match="which is no name of one"):
        saturate.load(stored(tmp_path, made_on=lambda made: made["versions"].update({"": "1.0"})))


def test_only_what_a_folder_lacks_is_laid_to_the_place_of_temporary_files(monkeypatch):
    for error in (ValueError("planted"), ArtifactDamaged("planted"), EnvironmentProblem("planted")):
        with pytest.raises(type(error), match="planted") as raised, folders.in_scratch():
            raise error
        assert raised.value is error
    with pytest.raises(EnvironmentProblem, match="no process") as raised, folders.in_scratch():
        raise EnvironmentProblem("no process can be started") from OSError(errno.EAGAIN, "planted")
    with pytest.raises(EnvironmentProblem) as raised, folders.in_scratch():
        raise EnvironmentProblem("the model cannot be written to /tmp/x", cause="no room", remedy="workdir") from OSError(errno.ENOSPC, "planted")
    assert "TMPDIR" in raised.value.remedy and raised.value.cause == "no room"

    def nowhere():
        raise FileNotFoundError(errno.ENOENT, "no usable temporary directory")

    monkeypatch.setattr(tempfile, "gettempdir", nowhere)
    with pytest.raises(EnvironmentProblem) as raised, folders.scratch("saturate-"):
        pass
    assert "TMPDIR" in raised.value.remedy
