"""What candidates change for their whole process is put back after each test: in the product, each has a process of its own."""

from __future__ import annotations

import sys
from collections.abc import Iterator

import pytest


@pytest.fixture(autouse=True)
def fused_encoder_layers() -> Iterator[None]:
    """On again: torchao's candidates switch them off, and a TransformerEncoder then answers as a captured one does."""
    yield
    if "torch" in sys.modules:      # not every test imports it, and this one need not
        sys.modules["torch"].backends.mha.set_fastpath_enabled(True)
