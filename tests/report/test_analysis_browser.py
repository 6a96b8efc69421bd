"""The page of an analysis in a real browser: it fits a phone, and its bars are as long as they should be."""

from __future__ import annotations

import html
import os
import re
import subprocess

import analyses
import pytest
from test_report_browser import BROWSER, draw

from saturate.report.analysis_html import render

pytestmark = pytest.mark.skipif(BROWSER is None, reason="no chromium on PATH")


@pytest.mark.parametrize("width", [1000, 500])
def test_the_parts_of_the_bar_are_as_long_as_they_are_told(tmp_path, width):
    rows = draw(tmp_path, render(analyses.input_bound()), width, 900)
    work, idle = (0x1F, 0x2A, 0x8F), (0xB4, 0xB8, 0xC4)
    both = [(row.count(work), row.count(idle)) for row in rows if row.count(work) > 60 and row.count(idle) > 60]
    assert both
    computed, idled = max(both, key=sum)
    assert abs(computed / (computed + idled) - 560 / (560 + 644.35)) < 0.02


@pytest.mark.parametrize("name", ["input_bound", "profile", "ranks", "hostile"])
def test_nothing_is_wider_than_a_phone(tmp_path, name):
    # A frame, because a headless window is never narrower than 500 pixels.
    frame = f'<iframe id="f" width="390" height="800" srcdoc="{html.escape(render(analyses.ALL[name]()))}"></iframe>'
    script = (
        "<script>onload = () => { const root = document.getElementById('f').contentDocument.documentElement;"
        "document.body.dataset.width = root.scrollWidth + '/' + root.clientWidth }</script>"
    )
    page = tmp_path / "page.html"
    page.write_text(f"<!doctype html><meta charset=utf-8><body>{frame}{script}</body>", encoding="utf-8")
    done = subprocess.run(
        [
            BROWSER,
            "--headless",
            "--no-sandbox",
            "--disable-gpu",
            "--disable-background-networking",
            f"--user-data-dir={tmp_path / 'profile'}",
            "--dump-dom",
            page.as_uri(),
        ],
        capture_output=True,
        text=True,
        timeout=120,
        env={**os.environ, "HOME": str(tmp_path)},
        check=False,
    )
    found = re.search(r'data-width="(\d+)/(\d+)"', done.stdout)
    assert found, done.stderr[-2000:]
    assert int(found[1]) <= int(found[2]), f"{found[1]} pixels in {found[2]}"
