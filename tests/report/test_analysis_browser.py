"""The page of an analysis in a real browser: it fits a phone, and its bars are as long as they should be."""

from __future__ import annotations

import html
import re

import analyses
import pytest
import studies
from test_report_browser import BROWSER, browse, draw

from saturate.report import html as report_html
from saturate.report.analysis_html import render

pytestmark = pytest.mark.skipif(BROWSER is None, reason="no chromium on PATH")


@pytest.mark.parametrize("width", [1000, 500])
def test_the_parts_of_the_bar_are_as_long_as_they_are_told(tmp_path, width):
    rows = draw(tmp_path, render(analyses.input_bound()), width, 1500)
    work, idle = (0x1F, 0x2A, 0x8F), (0xB4, 0xB8, 0xC4)
    both = [(row.count(work), row.count(idle)) for row in rows if row.count(work) > 60 and row.count(idle) > 60]
    assert both, f"no row has both; of {len({p for row in rows for p in row})} colours in {len(rows)} rows"
    computed, idled = max(both, key=sum)
    assert abs(computed / (computed + idled) - 560 / (560 + 644.35)) < 0.02


def probed(tmp_path, text, width, script):
    """What `script` finds in a page of this width: it sees the page as `page`, and calls `tell` with a text."""
    # A frame, because a headless window is never narrower than 500 pixels.
    frame = f'<iframe id="f" width="{width}" height="800" srcdoc="{html.escape(text)}"></iframe>'
    code = (
        "<script>onload = () => { const page = document.getElementById('f').contentDocument;"
        f"const tell = text => document.body.dataset.found = text; {script} }}</script>"
    )
    done = browse(tmp_path, f"<!doctype html><meta charset=utf-8><body>{frame}{code}</body>", "--dump-dom")
    found = re.search(r'data-found="([^"]*)"', done.stdout)
    assert found, done.stderr[-2000:]
    return html.unescape(found[1])


@pytest.mark.parametrize("name", ["input_bound", "profile", "ranks", "hostile"])
def test_nothing_is_wider_than_a_phone(tmp_path, name):
    inner = "const root = page.documentElement; tell(root.scrollWidth + '/' + root.clientWidth)"
    shown, room = probed(tmp_path, render(analyses.ALL[name]()), 390, inner).split("/")
    assert int(shown) <= int(room), f"{shown} pixels in {room}"


#: The texts of a compact table's cells, and of the axes of plots, of which a single word stands on more than one line.
BROKEN = """
const broken = [];
for (const box of page.querySelectorAll(".compact th, .compact td, td.num, .axis span")) {
  const texts = page.createTreeWalker(box, NodeFilter.SHOW_TEXT);
  for (let text = texts.nextNode(); text; text = texts.nextNode())
    for (const word of text.data.matchAll(/[^ ]+/g)) {
      const range = page.createRange();
      range.setStart(text, word.index); range.setEnd(text, word.index + word[0].length);
      if (new Set([...range.getClientRects()].map(r => Math.round(r.top))).size > 1) broken.push(word[0]);
    }
}
tell(page.querySelectorAll("td.num").length + " numbers: " + broken.join(" "))
"""


@pytest.mark.parametrize("page", ["a win", "a profile"])
def test_no_number_and_no_name_is_cut_on_a_phone(tmp_path, page):
    text = report_html.render(studies.big_win()) if page == "a win" else render(analyses.profile())
    number, broken = probed(tmp_path, text, 360, BROKEN).split(" numbers: ")
    assert int(number) > 5 and broken == ""
