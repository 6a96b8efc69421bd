"""A command as the one line that is to be typed. Standard library only: used by the command line before anything heavy."""

from __future__ import annotations

import shlex
from collections.abc import Sequence

from saturate.errors import clean


def joined(words: Sequence[str]) -> str:
    """The words as a shell takes them, on one line that can be copied.

    >>> joined(["bash", "-c", "cd src\\npython a.py"])
    "bash -c $'cd src\\\\npython a.py'"
    """
    return " ".join(map(quoted, words))


def quoted(word: str) -> str:
    """One word in quotes, where it needs them. What a terminal does not show as it is (line ends, control characters, bytes that
    are not UTF-8) is written as `$'...'`, which bash, zsh and ksh know: `sh` has no spelling for it on one line."""
    if all(map(_shown, word)):
        return shlex.quote(word)
    return f"$'{''.join(map(_escaped, word))}'"


_NAMED = {"\n": "\\n", "\t": "\\t", "\\": "\\\\", "'": "\\'"}


def _shown(char: str) -> bool:
    return clean(char) == char and char not in "\n\t\u2028\u2029"


def _escaped(char: str) -> str:
    if char in _NAMED:
        return _NAMED[char]
    if _shown(char):
        return char
    foreign = "surrogateescape" if "\udc80" <= char <= "\udcff" else "surrogatepass"
    return "".join(f"\\x{byte:02x}" for byte in char.encode("utf-8", foreign))
