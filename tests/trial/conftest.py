"""What every test of trials has in common."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from saturate.trial import planning


@pytest.fixture(autouse=True)
def no_scratch_stays(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A plan alone makes its TMPDIR, below /tmp where the test's own folder has a long name, and only who ends a trial removes it."""
    made: list[Path] = []
    make = planning.make_scratch

    def noted(run_dir: Path) -> Path:
        made.append(make(run_dir))
        return made[-1]

    monkeypatch.setattr(planning, "make_scratch", noted)
    yield
    for folder in made:
        shutil.rmtree(folder, ignore_errors=True)
