"""Studies that are not resumed but made again each time: all but those of `tune`."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import saturate
from saturate.study.ending import in_our_words
from saturate.study.store import Store, StudyLock, new_run


@contextmanager
def run_folder(directory: Path, *asked: object) -> Iterator[Path]:
    """A fresh folder in the study folder `directory`, named by what was `asked`. Meanwhile nobody else works there, and what ends the
    study from outside is raised in words for the user."""
    with StudyLock(directory), in_our_words(directory):
        yield new_run(directory, hashlib.sha256(json.dumps([*asked, saturate.__version__]).encode()).hexdigest())


@contextmanager
def study_file(folder: Path) -> Iterator[Store]:
    """The study file of such a folder."""
    store = Store(folder)
    try:
        store.set_meta("finished", True)        # no later study goes on with it
        yield store
    finally:
        store.close()
