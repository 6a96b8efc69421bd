"""Amounts of memory and of work, as people write them."""

from __future__ import annotations

import re

_UNITS = {"": 1, "B": 1, "K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40,
          "KIB": 2**10, "MIB": 2**20, "GIB": 2**30, "TIB": 2**40, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}

#: What is kept as a number of bytes has 64 bits, one of them for the sign; no memory comes near.
MOST = 2**63


def parse(text: str) -> int:
    """Bytes in "20GiB", "512 MiB", "24GB" (decimal), "20G" (binary), "1073741824". Raises ValueError.

    >>> parse("1.5GiB")
    1610612736
    """
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([A-Za-z]*)\s*", text)
    size = float(match[1]) * _UNITS[match[2].upper()] if match and match[2].upper() in _UNITS else 0.0
    if not 1 <= size < MOST:
        shown = text if len(text) <= 40 else text[:40] + "..."
        raise ValueError(f"{shown!r} is not an amount of memory such as 20GiB, 512MiB or 24GB")
    return int(size)


def exact(size_bytes: int) -> str:
    """To the byte, as `parse` reads it: in the largest unit of which it is a whole number.

    >>> exact(2 * 2**30), exact(700 * 2**20), exact(700_000_001)
    ('2GiB', '700MiB', '700000001')
    """
    for unit in ("TiB", "GiB", "MiB", "KiB"):
        if size_bytes and size_bytes % _UNITS[unit.upper()] == 0:
            return f"{size_bytes // _UNITS[unit.upper()]}{unit}"
    return str(size_bytes)


def show(size_bytes: float) -> str:
    """To three digits or so.

    >>> show(5 * 2**30), show(412.4 * 2**20), show(2048)
    ('5.00 GiB', '412 MiB', '2 KiB')
    """
    if size_bytes >= 2**30:
        return f"{size_bytes / 2**30:,.{1 if size_bytes >= 100 * 2**30 else 2}f} GiB"
    if size_bytes >= 2**20:
        return f"{size_bytes / 2**20:.{0 if size_bytes >= 100 * 2**20 else 1}f} MiB"
    return f"{size_bytes / 2**10:.0f} KiB"


def decimal(count: float, unit: str = "B") -> str:
    """To three digits, with a decimal prefix: for files, and for work.

    >>> decimal(1.5e9), decimal(312e12, "FLOP"), decimal(999.6), decimal(12)
    ('1.5 GB', '312 TFLOP', '1 kB', '12 B')
    """
    value, prefixes = float(count), iter(("", "k", "M", "G", "T", "P", "E"))
    prefix = next(prefixes)
    while abs(value) >= 999.5 and (more := next(prefixes, None)) is not None:
        value, prefix = value / 1000, more
    text = f"{value:.0f}" if not prefix or abs(value) >= 99.5 else f"{value:.3g}"
    return f"{text} {prefix}{unit}"
