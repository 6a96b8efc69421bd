"""Commands that are to be copied: a shell makes of them the very words that they were made of."""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
import sys

import pytest

from saturate.errors import clean
from saturate.records.command_line import joined
from saturate.report import words

WORDS = [
    ["bash", "-c", "cd src\npython a.py   # it's here"], ["--prompt", "a  b"], ["a\tb", "\\", "$HOME", "`x`", "é"],
    ["\x1b[31m", "\r", "\u202e\u2028", "'\n'", "\\n\n"], [os.fsdecode(b"\xff\xfe.py")], [""],
]


@pytest.mark.parametrize("given", WORDS)
def test_a_shell_makes_the_same_words_of_it(given):
    bash = shutil.which("bash")
    if bash is None:
        pytest.skip("no bash")
    line = joined(given)
    code = "import os, sys; sys.stdout.buffer.write(b''.join(os.fsencode(w) + bytes(1) for w in sys.argv[1:]))"
    done = subprocess.run([bash, "-c", f"{shlex.quote(sys.executable)} -c {shlex.quote(code)} {line}"], capture_output=True, check=True)
    assert done.stdout.split(b"\0")[:-1] == [os.fsencode(word) for word in given]


@pytest.mark.parametrize("given", WORDS)
def test_it_is_one_line_that_is_shown_as_it_is(given):
    line = joined(given)
    assert clean(line) == line and len(line.splitlines()) <= 1
    assert words.typed(line) == line == words.shell(given)


def test_values_that_were_left_out_are_not_quoted():
    assert words.shell(["python", "a b.py", "--lr=\u2026", "\u2026"]) == "python 'a b.py' --lr=\u2026 \u2026"
