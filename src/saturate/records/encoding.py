"""A record as JSON, whatever words of the user it holds."""

from __future__ import annotations

from typing import Any


def encoded(record: Any) -> str:
    """A msgspec record as one line of JSON. What JSON cannot hold (in file names that are not UTF-8) is replaced."""
    import msgspec

    try:
        return msgspec.json.encode(record).decode()
    except UnicodeEncodeError:
        return msgspec.json.encode(printable(msgspec.to_builtins(record))).decode()


def printable(value: Any) -> Any:
    """The same, with what JSON cannot hold replaced."""
    if isinstance(value, str):
        return value.encode("utf-8", "replace").decode()
    if isinstance(value, dict):
        return {printable(key): printable(item) for key, item in value.items()}
    return [printable(item) for item in value] if isinstance(value, list | tuple) else value
