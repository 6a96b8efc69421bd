"""What tests of the agent share."""

from __future__ import annotations

import pytest


class Ticks:
    """A clock that is set by hand."""

    now = 0

    def __call__(self) -> int:
        return self.now


@pytest.fixture
def ticks():
    return Ticks()
