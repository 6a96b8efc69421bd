"""The shadow view against the real file system: the same random operations on both must agree, errors included."""

from __future__ import annotations

import glob
import json
import os
import random
import shutil
from pathlib import Path

import pytest
from isolation_kit import snapshot

from saturate.agent import redirect, redirect_libraries, shadow

OPERATIONS = ("write", "append", "read", "mkdir", "rmdir", "unlink", "rename", "link", "symlink", "listdir", "stat",
              "rmtree", "makedirs", "exclusive", "update", "truncate", "copytree", "move")
NAMES = [f"{x}{y}{z}" for x in ("", "a/", "b/") for y in ("", "d/") for z in "abdf"]


def _tree(root: Path) -> dict[str, object]:
    found: dict[str, object] = {}
    for top, folders, files in os.walk(root):
        for name in [*folders, *files]:
            path = os.path.join(top, name)
            key = os.path.relpath(path, root)
            if os.path.islink(path):
                found[key] = os.readlink(path)
            else:
                found[key] = None if os.path.isdir(path) else Path(path).read_bytes()
    return found


def _step(root: Path, seed: int) -> object:
    """One random operation; its result or its error number."""
    rng = random.Random(seed)
    name, one, two = rng.choice(OPERATIONS), root / rng.choice(NAMES), root / rng.choice(NAMES)
    data = rng.randbytes(3)
    modes = {"write": "wb", "append": "ab", "exclusive": "xb", "update": "r+b"}
    try:
        if name in modes:
            with open(one, modes[name]) as file:
                file.write(data)
        elif name == "read":
            return one.read_bytes()
        elif name == "listdir":
            return sorted(os.listdir(one)), sorted(entry.name for entry in os.scandir(one))
        elif name == "stat":
            return one.stat().st_mode
        elif name in ("mkdir", "rmdir", "unlink", "makedirs"):
            getattr(os, name)(one)
        elif name in ("rename", "link"):
            getattr(os, name)(one, two)
        elif name == "symlink":
            os.symlink(os.path.relpath(one, two.parent), two)
        elif name == "rmtree":
            shutil.rmtree(one)
        elif name == "truncate":
            os.truncate(one, 1)
        elif name == "move":
            shutil.move(one, two)
        elif not os.path.realpath(two).startswith(os.path.realpath(one)):
            shutil.copytree(one, two, symlinks=True)
    except shutil.Error:
        return "shutil.Error"
    except OSError as error:
        return name, error.errno
    return name


def _fill(root: Path, rng: random.Random) -> None:
    for _ in range(8):
        path = root / rng.choice(NAMES)
        if not any(parent.is_file() for parent in path.parents) and not path.exists():
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(rng.randbytes(4))


@pytest.mark.parametrize("seed", range(20))
def test_shadow_behaves_like_a_file_system(tmp_path, seed):
    real, user = tmp_path / "real" / "x", tmp_path / "user" / "x"
    for root in (real, user):
        root.mkdir(parents=True)
        _fill(root, random.Random(seed))
    before = snapshot(user)
    undo = redirect.install(tmp_path / "shadow", [tmp_path / "real"])
    try:
        for number in range(40):
            expected, found = _step(real, seed * 1000 + number), _step(user, seed * 1000 + number)
            assert found == expected, f"step {number}"
            assert _tree(user) == _tree(real), f"step {number}: {expected}"
    finally:
        undo()
    assert snapshot(user) == before


class _Globber:
    """As the class behind `Path.glob` of Python 3.13, where something has loaded that before the script."""

    scandir = staticmethod(os.scandir)


_Globber.__module__ = "glob"


def test_a_class_of_python_s_own_sees_the_shadow(tmp_path, monkeypatch):
    """`Path.glob` did not find what a trial had written."""
    monkeypatch.setattr(glob, "_Globber", _Globber, raising=False)
    (tmp_path / "user").mkdir()
    undo = redirect.install(tmp_path / "shadow", [])
    try:
        (tmp_path / "user" / "a.pt").write_text("x")
        assert [entry.name for entry in _Globber.scandir(tmp_path / "user")] == ["a.pt"]
    finally:
        undo()
    assert _Globber.scandir is os.scandir and not os.listdir(tmp_path / "user")


@pytest.fixture
def installed(tmp_path, monkeypatch):
    (tmp_path / "user").mkdir()
    monkeypatch.chdir(tmp_path / "user")
    (tmp_path / "user" / "x.txt").write_text("x")
    undo = redirect.install(tmp_path / "shadow", [tmp_path / "allowed"])
    yield tmp_path
    undo()


def test_a_folder_made_in_the_trial_can_be_entered(installed):
    os.makedirs("outputs/run")
    os.chdir("outputs/run")
    assert os.getcwd() == str(installed / "user" / "outputs" / "run")
    Path("log.txt").write_text("here")
    os.chdir(installed)
    assert (installed / "user" / "outputs" / "run" / "log.txt").read_text() == "here"


def test_names_stay_as_the_script_gave_them(installed):
    with open("x.txt", "a") as file:
        assert file.name == "x.txt"
    with pytest.raises(FileNotFoundError) as caught:
        Path("missing/y.txt").write_text("y")
    assert "shadow" not in str(caught.value)


def test_a_link_to_a_folder_made_in_the_trial(installed):
    os.mkdir("ckpt-10")
    os.symlink(os.path.abspath("ckpt-10"), "latest")
    Path("latest/w.pt").write_text("w")
    assert os.listdir("ckpt-10") == ["w.pt"]
    assert os.path.realpath("latest") == str(installed / "user" / "ckpt-10")


@pytest.mark.parametrize("name, locked", [("base.db", True), ("file:base.db?mode=ro", True), ("file:base.db?immutable=1", False)])
def test_a_database_that_can_only_be_read(name, locked, installed, monkeypatch):
    """On a file system that is mounted so, or of somebody else."""
    import sqlite3

    connect = sqlite3.connect
    with connect(str(installed / "user" / "base.db")) as base:
        base.execute("create table t (x)")
    base.close()
    os.chdir(installed / "user")
    if locked:
        refuses = lambda path, mode, **_: not mode & os.W_OK or not str(path).endswith("base.db")      # noqa: E731 - root may write anywhere
        monkeypatch.setitem(redirect.ORIGINAL, "access", refuses)
        monkeypatch.setattr(shadow, "_access", refuses)
    redirect_libraries.on_sqlite3(sqlite3)
    try:
        assert sqlite3.connect(name, uri=name.startswith("file:")).execute("select count(*) from t").fetchone() == (0,)
    finally:
        sqlite3.connect = sqlite3.dbapi2.connect = connect
    assert redirect.for_reading("base.db") == str(installed / "user" / "base.db")       # there is no copy


def test_sqlite_uri_and_safetensors(installed):
    import sqlite3
    import types

    connect = sqlite3.connect
    redirect_libraries.on_sqlite3(sqlite3)
    try:
        sqlite3.connect("file:a.db?mode=rwc", uri=True).execute("create table t (x)").connection.commit()
        assert sqlite3.connect(":memory:").execute("select 1").fetchone() == (1,)
        assert os.path.exists("a.db")
    finally:
        sqlite3.connect = sqlite3.dbapi2.connect = connect
    written = []
    fake = types.SimpleNamespace(serialize_file=lambda tensors, path: written.append(path), safe_open=lambda path: path)
    redirect_libraries.on_safetensors(fake)
    fake.serialize_file({}, "m.safetensors")
    assert written == [str(installed / "shadow") + str(installed / "user" / "m.safetensors")]
    assert fake.safe_open("x.txt") == str(installed / "user" / "x.txt")
    Path("tokenizer.json").write_text("{}")
    there = str(installed / "shadow") + str(installed / "user" / "tokenizer.json")
    fake = types.SimpleNamespace(memory_map=lambda path, mode: (path, mode))
    redirect_libraries.on_pyarrow(fake)
    assert fake.memory_map("tokenizer.json") == (there, "r")


def test_a_tokenizer_is_trained_saved_and_loaded_in_a_folder_of_the_trial(installed):
    """By Rust, which finds no such folder: a Trainer that saves its tokenizer with a checkpoint ended as a command that fails by itself."""
    tokenizers = pytest.importorskip("tokenizers")
    kinds = tokenizers.Tokenizer, tokenizers.models.Model
    before = [{name: vars(kind)[name] for name in ("from_file", "train", "save") if name in vars(kind)} for kind in kinds]
    redirect_libraries.on_tokenizers(tokenizers)
    try:
        os.makedirs("checkpoint")
        Path("corpus.txt").write_text("so it goes on and on\n" * 20)
        made = tokenizers.Tokenizer(tokenizers.models.BPE(unk_token="?"))
        made.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
        made.train(["corpus.txt"], tokenizers.trainers.BpeTrainer(special_tokens=["?"], show_progress=False))
        made.save("checkpoint/tokenizer.json", pretty=False)
        assert tokenizers.Tokenizer.from_file("checkpoint/tokenizer.json").get_vocab() == made.get_vocab()
        assert made.model.save("checkpoint", "old") == ["checkpoint/old-vocab.json", "checkpoint/old-merges.txt"]
        os.remove("checkpoint/old-vocab.json")
        assert made.model.save("checkpoint", prefix="old") and json.loads(Path("checkpoint/old-vocab.json").read_text()) == made.get_vocab()
    finally:
        for kind, names in zip(kinds, before):
            for name, value in names.items():
                setattr(kind, name, value)
    assert sorted(os.listdir("checkpoint")) == ["old-merges.txt", "old-vocab.json", "tokenizer.json"]
    assert "checkpoint" not in redirect.ORIGINAL["listdir"](installed / "user")
