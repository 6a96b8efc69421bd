"""Amounts of memory as people write them."""

from __future__ import annotations

import pytest

from saturate.records import sizes


@pytest.mark.parametrize(("text", "expected"), [
    ("20GiB", 20 * 2**30), ("512 MiB", 512 * 2**20), ("24GB", 24 * 10**9), ("1.5g", 3 * 2**29), ("4096", 4096), (" 7 KiB ", 7168),
    ("2TiB", 2**41), ("10b", 10),
])
def test_what_people_write(text: str, expected: int) -> None:
    assert sizes.parse(text) == expected


@pytest.mark.parametrize("text", ["", "GiB", "-1GiB", "0", "0.1B", "1e9", "20 Gi B", "20Gib/s", "nan", "1,5GiB", "20XiB", "9" * 400 + "G", "9" * 19, "8388608TiB"])
def test_what_is_no_amount(text: str) -> None:
    with pytest.raises(ValueError, match="not an amount of memory such as 20GiB"):
        sizes.parse(text)


@pytest.mark.parametrize(("size", "expected"), [
    (5 * 2**30, "5.00 GiB"), (400 * 2**30, "400.0 GiB"), (412.4 * 2**20, "412 MiB"), (2**20, "1.0 MiB"), (2048, "2 KiB"), (0, "0 KiB"),
])
def test_what_is_shown(size: float, expected: str) -> None:
    assert sizes.show(size) == expected
