"""The agent wakes when torch is imported, whatever happened to the import system before."""

from __future__ import annotations

import importlib
import importlib.util
import sys

import pytest

from saturate.importwatch import ImportWatch


@pytest.fixture
def watched(tmp_path, monkeypatch):
    """A watch on the module `watched_toy`, and the modules that it reported."""
    (tmp_path / "watched_toy.py").write_text("value = 7\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    seen = []
    watch = ImportWatch({"watched_toy": seen.append})
    sys.meta_path.insert(0, watch)
    yield watch, seen
    if watch in sys.meta_path:
        sys.meta_path.remove(watch)
    sys.modules.pop("watched_toy", None)


def test_the_callback_runs_once_after_the_import(watched):
    watch, seen = watched
    toy = importlib.import_module("watched_toy")
    assert seen == [toy] and toy.value == 7
    assert watch not in sys.meta_path
    assert "exec_module" not in vars(toy.__spec__.loader)
    importlib.reload(toy)
    assert seen == [toy]


def test_a_library_that_asks_whether_the_module_exists_does_not_use_up_the_callback(watched):
    """`datasets` and others call find_spec("torch") before anything imports it."""
    _, seen = watched
    assert importlib.util.find_spec("watched_toy") is not None
    assert importlib.util.find_spec("watched_toy") is not None
    assert seen == []
    toy = importlib.import_module("watched_toy")
    assert seen == [toy]


def test_a_failed_import_can_be_tried_again(watched, tmp_path):
    _, seen = watched
    (tmp_path / "watched_toy.py").write_text("raise RuntimeError('not yet')\n")
    with pytest.raises(RuntimeError):
        importlib.import_module("watched_toy")
    assert seen == []
    (tmp_path / "watched_toy.py").write_text("value = 1234567\n")
    toy = importlib.import_module("watched_toy")
    assert seen == [toy]


def test_two_finders_that_ask_each_other_do_not_loop(watched, monkeypatch):
    class Curious:
        def find_spec(self, name, path=None, target=None):
            for finder in sys.meta_path:
                if finder is not self and (spec := finder.find_spec(name, path, target)):
                    return spec
            return None

    monkeypatch.setattr(sys, "meta_path", [*sys.meta_path, Curious()])
    watch = ImportWatch({"watched_missing": print})
    sys.meta_path.insert(0, watch)
    assert importlib.util.find_spec("watched_missing") is None
