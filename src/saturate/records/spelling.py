"""The known word that was probably meant. Standard library only: used by the command line before anything heavy."""

from __future__ import annotations

from collections.abc import Iterable


def nearest(word: str, known: Iterable[str]) -> str | None:
    """The closest of `known` to a mistyped `word`, or None when nothing is close. Case, `-` and `_` do not count."""
    from difflib import get_close_matches  # costs milliseconds, needed only after a mistake

    by_key = {key_of(name): name for name in known}
    found = get_close_matches(key_of(word[:100]), by_key, n=1, cutoff=0.6)
    return by_key[found[0]] if found else None


def suggestion(word: str, known: Iterable[str]) -> str:
    """`did you mean 'x'?`, or the empty string."""
    found = nearest(word, known)
    return f"did you mean '{found}'?" if found else ""


def key_of(word: str) -> str:
    """What a word is looked up by: capitals and the kind of dash make no other word of it."""
    return word.lower().replace("_", "-")
