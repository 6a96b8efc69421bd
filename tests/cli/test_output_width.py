"""How wide a summary may be: as the terminal, and where there is none nothing is cut."""

from __future__ import annotations

import io
import os

from saturate.cli import _output, optimize
from saturate.records.inference import CandidateRecord


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
