"""The examples in docstrings show what the code really answers."""

from __future__ import annotations

import doctest
import importlib
from pathlib import Path

import pytest

SOURCE = Path(__file__).resolve().parent.parent / "src"
WITH_EXAMPLES = sorted(path for path in SOURCE.rglob("*.py") if ">>> " in path.read_text(encoding="utf-8"))


def test_there_are_examples() -> None:
    assert len(WITH_EXAMPLES) > 10


@pytest.mark.parametrize("path", WITH_EXAMPLES, ids=lambda path: path.relative_to(SOURCE / "saturate").with_suffix("").as_posix())
def test_the_examples_of(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    module = importlib.import_module(".".join(path.relative_to(SOURCE).with_suffix("").parts).removesuffix(".__init__"))
    found = doctest.testmod(module)
    assert found.attempted, "its examples stand where doctest does not find them"
    assert not found.failed, capsys.readouterr().out
