"""Whose code a frame belongs to: what a profile names by file and line is the user's, not the library's it calls."""

from __future__ import annotations

import inspect
import os
from typing import Any

from saturate.techniques._standard import standard

sysconfig = standard("sysconfig")

#: Code that has no file of its own: the import system, and what compilers generate.
_NO_FILE = ("<frozen ", "<eval_with_key>", "<__array_function__")


class Places:
    """Sorts frames by their file name. Answers are remembered, because a hot loop asks for the same files."""

    def __init__(self, torch: Any):
        paths = sysconfig.get_paths()
        folder = os.path.dirname(torch.__file__)
        self._frameworks = (_folder(folder), _folder(os.path.dirname(os.path.dirname(__file__))))
        beside = {paths[name] for name in ("stdlib", "platstdlib", "purelib", "platlib")} | {os.path.dirname(folder)}
        self._libraries = tuple(map(_folder, beside))
        self._known: dict[str, int] = {}

    def kind(self, file: str) -> int:
        """0: torch or saturate; 1: another library; 2: the user's own."""
        if file not in self._known:
            if file.startswith((*self._frameworks, *_NO_FILE)):
                self._known[file] = 0
            else:
                self._known[file] = 1 if file.startswith(self._libraries) else 2
        return self._known[file]

    def nearest(self, frame: Any) -> tuple[str, int, str] | None:
        """File (as `readable` text), line and function of the innermost frame outside torch and saturate."""
        return self._first(frame, 1)

    def users(self, frame: Any) -> tuple[str, int, str] | None:
        """The same outside every library; where there is none, the nearest."""
        return self._first(frame, 2) or self._first(frame, 1)

    def fetched(self, frame: Any, fetch: Any) -> tuple[str, int, str] | None:
        """What a batch waits for, in the code `fetch` that fetches it: the user's innermost line inside of it, else the line of the
        user's loop that asks for the batch. Where a library has the loop, the user's next line outwards starts the whole training:
        then the library's line inside of it that is nearest to the loader, which is the dataset's method or the function that
        collates. None where there is none, and outside of `fetch`."""
        inside: dict[int, Any] = {}     # by kind: the user's innermost, a library's outermost
        while frame is not None and frame.f_code is not fetch:
            kind = self.kind(frame.f_code.co_filename)
            if kind == 1 or kind not in inside:
                inside[kind] = frame
            frame = frame.f_back
        if frame is None:
            return None
        return _place(inside.get(2) or self._loop(frame) or inside.get(1))

    def _loop(self, frame: Any) -> Any:
        """The user's frame that asks for what `frame` fetches; None where another function does. A library's generator only hands
        on what it is asked for, as tqdm's."""
        while frame is not None:
            kind = self.kind(frame.f_code.co_filename)
            if kind == 2:
                return frame
            if kind == 1 and not frame.f_code.co_flags & inspect.CO_GENERATOR:
                return None
            frame = frame.f_back
        return None

    def _first(self, frame: Any, least: int) -> tuple[str, int, str] | None:
        while frame is not None and self.kind(frame.f_code.co_filename) < least:
            frame = frame.f_back
        return _place(frame)


def _place(frame: Any) -> tuple[str, int, str] | None:
    """File (as `readable` text), line and function."""
    if frame is None:
        return None
    code = frame.f_code
    return readable(code.co_filename), frame.f_lineno or code.co_firstlineno, code.co_name


def readable(name: str) -> str:
    """`name` as text that can be encoded. A file name that is no text in this process's locale holds lone surrogates, which
    torch's labels and UTF-8 refuse: its bytes are read as UTF-8, and those that are none are written as escapes."""
    if name.isascii():
        return name
    try:
        raw = os.fsencode(name)
    except UnicodeEncodeError:      # no name from the file system: what a module is called, or generated code
        raw = name.encode("utf-8", "backslashreplace")
    return raw.decode("utf-8", "backslashreplace")


def _folder(path: str) -> str:
    return os.path.join(path, "")
