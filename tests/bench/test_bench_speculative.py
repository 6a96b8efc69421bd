"""The benchmark of speculative decoding runs, prints its ratios and writes its numbers."""

from __future__ import annotations

import pytest

pytest.importorskip("torch", reason="it trains a pair of models")


@pytest.mark.slow
def test_smoke(smoke):
    ratio = r"\d+\.\d{3} \[\d+\.\d{3}, \d+\.\d{3}\]"
    written = smoke("speculative", rf"^greedy +{ratio}  acceptance (none|[\d.]+), \d+ -> \d+ tokens/s  token-identical$",
                    r"^a bad draft +\w+: acceptance")
    assert [row["identical"] for row in written["rows"] if "identical" in row] == [True] * 3
