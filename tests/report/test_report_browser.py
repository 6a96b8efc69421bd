"""The report in a real browser: what the bars look like once they are drawn."""

from __future__ import annotations

import os
import shutil
import subprocess
import zlib

import pytest
import studies

from saturate.report.html import render

BROWSER = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)

pytestmark = pytest.mark.skipif(BROWSER is None, reason="no chromium on PATH")


def screenshot(tmp_path, name, record, width):
    return draw(tmp_path, render(record), width, 500)


def browse(tmp_path, text, *options):
    """What the browser did with a page of this text."""
    page = tmp_path / "page.html"
    page.write_text(text, encoding="utf-8")
    return subprocess.run(
        [
            BROWSER,
            "--headless",
            "--no-sandbox",
            "--disable-gpu",
            "--disable-background-networking",
            f"--user-data-dir={tmp_path / 'profile'}",
            *options,
            page.as_uri(),
        ],
        capture_output=True,
        text=True,
        timeout=120,
        env={**os.environ, "HOME": str(tmp_path)},
        check=False,
    )


def draw(tmp_path, text, width, height):
    """The pixels of a page in a window of this size."""
    picture = tmp_path / "page.png"
    # On a busy machine a picture may else be taken before every tile of the page is painted.
    painted = ("--run-all-compositor-stages-before-draw", "--virtual-time-budget=2000")
    size = ("--hide-scrollbars", f"--window-size={width},{height}")
    result = browse(tmp_path, text, *painted, *size, f"--screenshot={picture}")
    assert picture.exists(), result.stderr[-2000:]
    return pixels(picture.read_bytes())


def pixels(png):
    """Rows of (r, g, b) of an 8-bit RGB or RGBA PNG that is not interlaced (PNG specification, section 9)."""
    width, height, depth, kind = int.from_bytes(png[16:20]), int.from_bytes(png[20:24]), png[24], png[25]
    assert depth == 8 and kind in (2, 6)
    size, data, at = (3 if kind == 2 else 4), b"", 8
    while at < len(png):
        length = int.from_bytes(png[at : at + 4])
        if png[at + 4 : at + 8] == b"IDAT":
            data += png[at + 8 : at + 8 + length]
        at += 12 + length
    raw, stride = zlib.decompress(data), width * size
    rows, above = [], bytearray(stride)
    for y in range(height):
        method, line = raw[y * (stride + 1)], bytearray(raw[y * (stride + 1) + 1 : (y + 1) * (stride + 1)])
        for i in range(stride if method else 0):
            a, b, c = (line[i - size] if i >= size else 0), above[i], (above[i - size] if i >= size else 0)
            guess = a + b - c
            paeth = min((a, b, c), key=lambda v: abs(guess - v))
            line[i] = (line[i] + (0, a, b, (a + b) // 2, paeth)[method]) & 255
        above = line
        rows.append([tuple(line[x : x + 3]) for x in range(0, stride, size)])
    return rows


@pytest.mark.parametrize("width", [800, 500])
def test_it_draws_bars_of_the_right_length(tmp_path, width):
    accent = (0x33, 0x40, 0xC4)
    rows = screenshot(tmp_path, "win", studies.big_win(), width)
    base = (0x7D, 0x82, 0x94)
    longest = max(row.count(base) for row in rows)
    tuned = [row.count(accent) for row in rows if row.count(accent) > 100 and row.count(base) == 0]
    assert longest > 100
    # The bar of the tuned step beside that of the baseline: 118.9 of 212.4 ms.
    assert any(abs(count / longest - 118.9 / 212.4) < 0.02 for count in tuned)
