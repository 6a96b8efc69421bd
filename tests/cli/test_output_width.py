"""How wide a summary may be: as the terminal, and where there is none nothing is cut."""

from __future__ import annotations

import io
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from saturate.cli import _output, optimize
from saturate.errors import clean
from saturate.records.analysis import Problem
from saturate.records.fit import SizeThroughput
from saturate.records.inference import CandidateRecord
from saturate.report import fit as fit_report


class Terminal(io.StringIO):
    def isatty(self):
        return True


def test_only_a_terminal_has_a_width(monkeypatch):
    monkeypatch.delenv("COLUMNS", raising=False)
    monkeypatch.setattr(os, "get_terminal_size", lambda *_: os.terminal_size((90, 24)))
    assert _output.width(Terminal()) == 90 and _output.width(io.StringIO()) > 1000
    monkeypatch.setenv("COLUMNS", "70")
    assert _output.width(io.StringIO()) == 70


def test_a_piped_summary_is_not_cut(monkeypatch):
    monkeypatch.delenv("COLUMNS", raising=False)
    import argparse

    import msgspec

    record = optimize.nothing(argparse.Namespace(model="m", objective="latency", max_drop=None, relative=False, confidence=None, limit={}), "nothing", "because")
    long = " ".join(f"word{number}" for number in range(60))
    record = msgspec.structs.replace(record, notes=[long], candidates=[CandidateRecord(id="a", techniques=[], fate="failed", reason=long)])
    stream = io.StringIO()
    optimize._show(record, stream)
    assert "word59" in stream.getvalue()


def test_no_verb_asks_for_a_width_by_itself():
    """What is piped is cut nowhere, because every verb that prints a summary asks `_output.width`."""
    folder = Path(_output.__file__).parent
    asking = {file.name for file in folder.glob("*.py") if "get_terminal_size" in file.read_text()}
    assert asking == {"_output.py", "doctor.py", "main.py"}      # doctor, and the usage of a verb, only wrap
    summaries = {file.name for file in folder.glob("*.py") if "width=" in file.read_text() or '"width":' in file.read_text()}
    assert {"tune.py", "fit.py", "profile.py", "drill.py", "analyze.py", "optimize.py"} <= summaries


def test_the_bars_of_a_piped_fit_stay_short():
    curve = [SizeThroughput(micro_batch=size, samples_per_s=10.0 * size, ci=(9.0 * size, 11.0 * size)) for size in (8, 16)]
    assert max(map(len, fit_report.bars(curve, None, _output.UNCUT, 10, True))) < 120


@pytest.mark.parametrize("encoding", ["ascii", "latin-1", "utf-8"])
def test_an_answer_is_json_whatever_the_terminal_can_show(tmp_path, encoding):
    """Where a stream takes ASCII only, Python would write a backslash and an x, which is no JSON."""
    path = tmp_path / "r\u00e9sum\u00e9 \U0001f600.toml"
    path.write_text('schema = 1\n[made_for]\ncpu = "caf\u00e9 \U0001f600 \u2026"\n', encoding="utf-8")
    shown = {}
    for action in ("show", "validate"):
        done = subprocess.run([sys.executable, "-m", "saturate", "recipe", action, str(path), "--json"], capture_output=True, check=True,
                              env={**os.environ, "PYTHONIOENCODING": encoding})
        shown[action] = json.loads(done.stdout)
        assert encoding == "utf-8" or done.stdout.isascii()
    assert shown["show"]["made_for"]["cpu"] == "caf\u00e9 \U0001f600 \u2026" and shown["validate"]["path"] == str(path)


def test_an_answer_in_json_does_not_drive_the_terminal():
    """Names in a trace, a path: U+009B begins a sequence as ESC [ does, U+202E turns the line around. The data are what they were."""
    name = "gemm\x9b2J\u202e caf\u00e9\x1b[31m\x7f"
    stream = io.TextIOWrapper(io.BytesIO(), encoding="utf-8")
    _output.show_json(Problem(id="any", message=name, blocks=[]), stream)
    text = stream.buffer.getvalue().decode()
    assert json.loads(text)["message"] == name and "caf\u00e9" in text and clean(text) == text
