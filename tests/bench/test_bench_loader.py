"""bench/loader.py runs, prints its ratio lines and writes its numbers."""

from __future__ import annotations

import importlib.util

import pytest


@pytest.mark.slow
@pytest.mark.skipif(any(importlib.util.find_spec(name) is None for name in ("PIL", "skimage", "sklearn")),
                    reason="needs the photographs of scikit-image and scikit-learn")
def test_smoke_of_the_loader_bench(smoke):
    smoke("loader", r"^warm, tuned / one batch replayed  \d+\.\d{3} \[", r"^warm, tuned / best by hand        \d",
          r"^cold, first epoch / decode rate   \d", timeout_s=1200.0)
