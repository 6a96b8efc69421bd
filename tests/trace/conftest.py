"""Shared by the tests of trace/."""

from __future__ import annotations

from pathlib import Path

import pytest


@pytest.fixture(scope="session")
def shared_traces() -> Path:
    """Real traces, kept next to the project and not inside it; what they say is checked where they are."""
    folder = Path(__file__).resolve().parents[3] / "shared" / "traces"
    if not folder.is_dir():
        pytest.skip("the shared traces are not on this machine")
    return folder
