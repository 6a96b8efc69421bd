"""Headers that Inductor precompiles: one folder for all processes of a search, and none in it that is not whole."""

from __future__ import annotations

import getpass
import shutil
import sys
from pathlib import Path

import pytest

torch = pytest.importorskip("torch", reason="torch")
pytest.importorskip("cloudpickle", reason="the extra inference")

from saturate.inference import forkserver, launching  # noqa: E402 - after the checks
from saturate.inference.candidates import Candidate, Part  # noqa: E402
from saturate.inference.process import Worker  # noqa: E402
from saturate.inference.source import Source  # noqa: E402
from saturate.inference.techniques import compile_inference  # noqa: E402
from saturate.trial import layers  # noqa: E402

pytestmark = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="elsewhere each process compiles its own")


@pytest.fixture
def source(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Source:
    monkeypatch.delenv("CXX", raising=False)
    model = torch.nn.Sequential(torch.nn.Linear(6, 8), torch.nn.ReLU(), torch.nn.Linear(8, 2))
    return Source.write(tmp_path / "source", model, [(torch.rand(2, 6),) for _ in range(4)])


def begin(source: Source, folder: Path) -> Path:
    """Where torch looks in the TMPDIR of a new process."""
    own = launching.private(folder)
    launching.make_temporary(source, own)
    return layers.scratch_folder(own) / layers.inductor_folder() / "precompiled_headers"


@pytest.mark.skipif(shutil.which("g++") is None, reason="Inductor needs a compiler")
def test_the_second_process_that_compiles_finds_them(source, tmp_path):
    """Made anew they took 13 of the 16 seconds in which what was compiled before was loaded again. One process starts afresh, the other is a fork,
    whose Inductor has looked for their place before it was forked."""
    seen = None
    with forkserver.running(source, tmp_path / "processes", 1) as server:
        for forks in (None, server):
            candidate = Candidate.of([Part(compile_inference, compile_inference.Options())])
            with Worker(source, candidate, folder=tmp_path / "processes", threads=1, prepare_s=300.0, forks=forks) as worker:
                assert worker.ready.proofs[0].active
                found = {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*.gch")}     # does not follow links
            assert found and all(path.parent == source.headers for path in found), "nobody has made one for himself"
            assert found == (seen or found)
            seen = found
        assert server is None or not server.closed
    assert all(path.exists() for path in seen), "they stay when a process's TMPDIR is removed"
    source.without_shared()
    assert not source.headers.exists() and (source.folder / "inductor").is_dir()


def test_what_a_killed_compiler_has_left_is_not_taken_for_whole(source, tmp_path):
    """A header whose end is missing is a fatal error of the compiler."""
    there = begin(source, tmp_path)
    assert there.is_symlink() and there.resolve() == source.headers.resolve()
    for name in ("half.h", "half.h.gch", "whole.h", "whole.h.gch"):
        (source.headers / name).write_text(name)
    (source.headers / "half.h_CxxBuild").mkdir()
    (source.headers / "never_written.h_CxxBuild").mkdir()
    (source.headers / "locks").mkdir()
    begin(source, tmp_path)
    assert {path.name for path in there.iterdir()} == {"half.h", "whole.h", "whole.h.gch", "locks"}


@pytest.mark.parametrize("compiler", ["clang++", "/usr/bin/clang++-19"])
def test_clang_has_its_own_in_each_process(source, tmp_path, monkeypatch, compiler):
    """It refuses one whose first place is gone."""
    monkeypatch.setenv("CXX", compiler)
    assert not begin(source, tmp_path).exists()


def test_torch_looks_there(source, tmp_path, monkeypatch):
    """Where it computes the place otherwise, each process makes its own again."""
    cache_dir_utils = pytest.importorskip("torch._inductor.runtime.cache_dir_utils", reason="an older torch")
    for name in (getpass.getuser(), "DOMAIN\\ann", None):
        def who(name: str | None = name) -> str:
            if name is None:
                raise KeyError("getpwuid(): uid not found: 4711")
            return name

        monkeypatch.setattr(getpass, "getuser", who)
        there = begin(source, tmp_path)
        monkeypatch.setattr("tempfile.tempdir", str(there.parent.parent))
        assert Path(cache_dir_utils.default_cache_dir()) / "precompiled_headers" == there and there.is_dir()


def test_a_folder_that_cannot_be_written_is_said(source, tmp_path):
    source.headers.parent.mkdir()
    source.headers.write_text("a file in its place")
    with pytest.raises(OSError):
        begin(source, tmp_path)
