"""Chrome traces as a stream: JSON, plain or gzip, of any size, in bounded memory.

A trace is one long array of events beside a few small values. The text is inflated block by block, and each block
is cut behind the last event that is complete in it: at `} , { "a`. Within a JSON string that cannot be found,
because the quote would end the string and a letter cannot follow. It can be found inside an event, between the
objects of a nested list: then the piece has unbalanced brackets, does not decode, and is taken apart event by
event, by brackets and quotes. So a cut is fast where events are plain, and right everywhere.
"""

from __future__ import annotations

import re
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO, Protocol

from saturate.errors import TraceError

#: Bytes of text that are decoded at once; large enough that numpy's cost per call vanishes.
BLOCK = 1 << 20
#: Longer events, and longer values of the fields that are asked for, are not what profilers write.
EVENT_LIMIT = 4 << 20
FIELD_LIMIT = 16 << 20
#: Events that are no JSON; beyond this many the file is not a damaged trace, but something else.
DAMAGE_LIMIT = 100

_BOUNDARY = re.compile(rb'\}\s*,\s*\{\s*"[A-Za-z_]')
_TAIL = 1 << 16                 # where a boundary is looked for first
_TOKEN = re.compile(rb'"(?:[^"\\]++|\\.)*+"|["{}\[\]]', re.DOTALL)
_SEPARATOR = re.compile(rb"[\s,\]}]")
_NOT_SPACE = re.compile(rb"[^\s\0]")
_STRING_OR_BARE = re.compile(rb'"(?:[^"\\]++|\\.)*+"|[-+]?\b(?:nan|inf(?:inity)?)\b', re.DOTALL | re.IGNORECASE)
_ESCAPE = re.compile(rb'\\(?:["\\/bfnrt]|u[0-9a-fA-F]{4})|\\')
_NO_CONTROL = bytes(max(byte, 0x20) for byte in range(256))

_QUOTE, _COMMA, _COLON, _LIST, _LIST_END, _OBJECT, _OBJECT_END = b'",:[]{}'
_END = -1


class Consumer(Protocol):
    """What `walk` hands the events to. Both answer False where the text is not JSON, and then have taken nothing."""

    def block(self, array: bytes, offset: int) -> bool:
        """A JSON array of events; `offset` of its first event in the text."""
        ...

    def event(self, text: bytes, offset: int) -> bool:
        """One element of the array of events."""
        ...


@dataclass
class Document:
    """What surrounds the events."""

    fields: dict[str, bytes] = field(default_factory=dict)      # top-level values that were asked for, as JSON text
    problems: list[tuple[str, str]] = field(default_factory=list)
    truncated: bool = False
    damaged: int = 0                # events that are no JSON
    read_bytes: int = 0


def walk(path: Path, consumer: Consumer, wanted: frozenset[str] = frozenset(),
         progress: Callable[[float], None] | None = None) -> Document:
    """Read `path` once, front to back. Raises TraceError where it is no Chrome trace or cannot be opened."""
    with opened(path) as file:
        return _Walk(path, Text(path, file, progress), consumer, wanted).document()


def opened(path: Path) -> BinaryIO:
    try:
        if path.exists() and not path.is_file():    # opening a pipe would wait for its other end
            raise TraceError(f"{path} is not a regular file", remedy="name a trace file: .json, .json.gz or .sqlite")
        return open(path, "rb")
    except OSError as error:
        raise TraceError(f"{path} cannot be read", cause=error.strerror or str(error)) from error


def repaired(text: bytes) -> bytes:
    """The text with what profilers write against the rules of JSON mended: bare `nan` and `inf` become null; in
    strings, a backslash that escapes nothing (a path) is doubled, and control characters become spaces; bytes that
    are no UTF-8 become replacement characters."""
    return _STRING_OR_BARE.sub(_mended, text).decode("utf-8", "replace").encode()


def _mended(found: re.Match[bytes]) -> bytes:
    text: bytes = found[0]
    if text[0] != _QUOTE:
        return b"null"
    if b"\\" in text:
        text = _ESCAPE.sub(lambda escape: escape[0] if len(escape[0]) > 1 else b"\\\\", text)
    return text.translate(_NO_CONTROL)


class Text:
    """A sliding window on the uncompressed bytes of a file: `data[pos:]` is what comes next."""

    def __init__(self, path: Path, file: BinaryIO, progress: Callable[[float], None] | None = None):
        self.path = path
        self.data = b""
        self.pos = 0
        self.base = 0           # offset of data[0]
        self.ended = False
        self.broken = ""        # why the compressed stream ended before its end
        self._file, self._progress = file, progress
        self._size = max(path.stat().st_size, 1)
        zipped = file.read(2) == b"\x1f\x8b"
        file.seek(0)
        self._blocks = _inflate(file) if zipped else iter(lambda: file.read(BLOCK), b"")
        self.more()
        if self.data.startswith(b"\xef\xbb\xbf"):
            self.pos = 3

    @property
    def offset(self) -> int:
        return self.base + self.pos

    def more(self) -> bool:
        """Drop what lies before `pos` and append a block. False at the end."""
        if self.ended:
            return False
        try:
            block = next(self._blocks, b"")
        except (EOFError, zlib.error) as error:     # a damaged stream is read up to the damage
            self.broken, block = str(error), b""
        except OSError as error:
            raise TraceError(f"{self.path} cannot be read", cause=error.strerror or str(error),
                             evidence=f"byte {self.base + len(self.data):,}") from error
        if self._progress is not None:
            self._progress(min(1.0, self._file.tell() / self._size) if block else 1.0)
        if not block:
            self.ended = True
            return False
        self.base += self.pos
        self.data = self.data[self.pos:] + block
        self.pos = 0
        return True

    def peek(self) -> int:
        """Move to the next byte that is not white space, and tell it; _END at the end."""
        while True:
            found = _NOT_SPACE.search(self.data, self.pos)
            if found:
                self.pos = found.start()
                return self.data[self.pos]
            self.pos = len(self.data)
            if not self.more():
                return _END

    def value(self, limit: int) -> bytes | None:
        """The value that begins at `pos`, by brackets and quotes alone; does not move. None: longer, or it does not
        end."""
        scanned, depth = 0, 0
        while True:
            end, on, depth = _follow(self.data, self.pos + scanned, depth)
            if end >= 0:
                return self.data[self.pos:end]
            scanned = on - self.pos
            if len(self.data) - self.pos > limit or not self.more():
                return None

    def skip(self) -> bool:
        """Move behind the value that begins at `pos`, however long it is. False: the text ends first."""
        depth = 0
        while True:
            end, self.pos, depth = _follow(self.data, self.pos, depth)
            if end >= 0:
                self.pos = end
                return True
            if len(self.data) - self.pos > FIELD_LIMIT:
                raise TraceError(f"{self.path}: the string at byte {self.offset:,} does not end",
                                 evidence=f"more than {FIELD_LIMIT:,} bytes without a closing quote")
            if not self.more():
                return False


def _follow(data: bytes, pos: int, depth: int) -> tuple[int, int, int]:
    """Follow brackets and strings from `pos`, at `depth`: (index behind the value or -1, where to go on, depth
    there)."""
    if depth == 0 and data[pos] not in b'"{[':
        found = _SEPARATOR.search(data, pos)        # a number or a word
        return (found.start() if found else -1), pos, 0
    for token in _TOKEN.finditer(data, pos):
        first, end = data[token.start()], token.end()
        if first == _QUOTE:
            if end - token.start() == 1:            # a string that goes on behind the buffer
                return -1, token.start(), depth
        else:
            depth += 1 if first in b"{[" else -1
        if depth <= 0:
            return end, end, 0
    return -1, len(data), depth


def _inflate(file: BinaryIO) -> Iterator[bytes]:
    """Blocks of a gzip file, of one member or several. zlib.error, EOFError: it is damaged, or ends too early."""
    engine = zlib.decompressobj(wbits=31)
    while chunk := file.read(1 << 18):
        while True:
            if engine.eof:
                chunk = chunk.lstrip(b"\0")         # padding between members, as of tapes
                if not chunk:
                    break
                engine = zlib.decompressobj(wbits=31)
            before = engine.copy()
            try:
                block = engine.decompress(chunk, BLOCK)
            except zlib.error:
                yield from _up_to_damage(before, chunk)
                raise
            if block:
                yield block
            chunk = engine.unused_data if engine.eof else engine.unconsumed_tail
            if not chunk:
                break
    if not engine.eof:
        raise EOFError("the gzip stream ends too early")


def _up_to_damage(engine: Any, chunk: bytes) -> Iterator[bytes]:
    """What a chunk that cannot be inflated as a whole still holds."""
    for byte in range(len(chunk)):
        try:
            block = engine.decompress(chunk[byte:byte + 1])
        except zlib.error:              # reported by the caller
            return
        if block:
            yield block


class _Walk:
    def __init__(self, path: Path, text: Text, consumer: Consumer, wanted: frozenset[str]):
        self.path, self.text, self.consumer, self.wanted = path, text, consumer, wanted
        self.found = Document()
        self.arrays = 0
        self.bare = False           # the file is the array itself; its "]" may be missing
        self.damaged: list[int] = []

    def document(self) -> Document:
        text, found = self.text, self.found
        first = text.peek()
        if first == _END:
            raise TraceError(f"{self.path} is empty" if not text.broken else f"{self.path} is a damaged gzip file",
                             cause=text.broken or "it has no content")
        if first not in b"[{":
            raise _not_json(self.path, text.data[text.pos:text.pos + 256], text.offset)
        text.pos += 1
        self.bare = first == _LIST
        whole = self._array() if self.bare else self._object()
        if not self.arrays:
            raise TraceError(f"{self.path} is not a trace", remedy="traces are what torch.profiler exports",
                             cause="it ends too early" if found.truncated else 'there is no "traceEvents" in it',
                             evidence=f"read up to byte {text.offset:,}")
        if whole and text.peek() != _END:
            self._say("concatenated", f"more follows behind the end of the trace at byte {text.offset:,}: not read; "
                                      "split files that were joined")
        elif whole and text.broken:
            self._say("damaged-gzip", f"all of the trace was read, but its gzip stream is not whole: {text.broken}")
        found.damaged = len(self.damaged)
        if self.damaged:
            self._say("damaged-events", f"{found.damaged} events are no JSON and were left out, the first at byte "
                                        f"{self.damaged[0]:,}")
        found.read_bytes = text.offset
        return found

    def _object(self) -> bool:
        """The top level, from behind its "{". False: the text ends first."""
        text = self.text
        while True:
            next_byte = text.peek()
            if next_byte == _COMMA:
                text.pos += 1
                continue
            if next_byte == _OBJECT_END:
                text.pos += 1
                return True
            if next_byte == _END:
                return self._truncated()
            key = text.value(FIELD_LIMIT) if next_byte == _QUOTE else b""
            if key is None:
                return self._truncated()
            text.pos += len(key)
            if not key or text.peek() not in (_COLON, _END):
                raise TraceError(f"{self.path} is not JSON", cause="a name and a colon were expected",
                                 evidence=f"byte {text.offset:,}: {_shown(text.data[text.pos:])}")
            text.pos += 1
            next_byte = text.peek()
            if next_byte == _END or not self._field(key[1:-1].decode("utf-8", "replace"), next_byte):
                return self._truncated()

    def _field(self, name: str, first: int) -> bool:
        text = self.text
        if name == "traceEvents":
            if first != _LIST:
                raise TraceError(f'{self.path} is not a trace', cause='"traceEvents" is not a list',
                                 evidence=f"byte {text.offset:,}: {_shown(text.data[text.pos:])}")
            text.pos += 1
            return self._array()
        if name in self.wanted:
            value = text.value(FIELD_LIMIT)
            if value is not None:
                self.found.fields[name] = value
                text.pos += len(value)
                return True
        return text.skip()

    def _array(self) -> bool:
        """The events, from behind "[". False: the text ends before "]"."""
        self.arrays += 1
        text = self.text
        while True:
            if len(text.data) - text.pos < BLOCK:
                text.more()
            cut = _last_boundary(text.data, text.pos)
            block = b"".join((b"[", memoryview(text.data)[text.pos:max(cut, 0)], b"]"))
            if cut >= 0 and self.consumer.block(block, text.offset):
                text.pos = cut
                text.peek()
                text.pos += 1       # the comma of the boundary
                continue
            done = self._one_by_one(text.base + (cut if cut >= 0 else len(text.data)))
            if done is not None:
                return done

    def _one_by_one(self, until: int) -> bool | None:
        """Events up to offset `until`. True: the array has ended; False: the text has; None: neither."""
        text = self.text
        while text.offset < until or text.pos >= len(text.data):
            next_byte = text.peek()
            if next_byte == _COMMA:
                text.pos += 1
                continue
            if next_byte == _LIST_END:
                text.pos += 1
                return True
            if next_byte == _END:
                return (self.bare and not text.broken) or self._truncated()
            event = text.value(EVENT_LIMIT)
            if event and self.consumer.event(event, text.offset):
                text.pos += len(event)
            elif not self._behind_damage(event):
                return self._truncated()
        return None

    def _behind_damage(self, event: bytes | None) -> bool:
        """Move behind something that is no event: to its end by brackets, or to the next boundary where that comes
        first, because a lost quote or bracket makes everything up to the next one look like one value. False:
        neither is left."""
        text = self.text
        start, here = text.pos + 1, text.offset
        boundary = _BOUNDARY.search(text.data, start, text.pos + len(event) if event else len(text.data))
        while boundary is None and event is None:
            text.pos = max(text.pos, len(text.data) - 4096)     # a boundary may straddle two blocks
            if not text.more():
                return False
            boundary = _BOUNDARY.search(text.data, text.pos)
        text.pos = boundary.start() + 1 if boundary else text.pos + max(len(event or b""), 1)
        self.damaged.append(here)
        if len(self.damaged) > DAMAGE_LIMIT:
            raise TraceError(f"{self.path} is damaged", cause=f"more than {DAMAGE_LIMIT} of its events are no JSON",
                             evidence=f"the first at byte {self.damaged[0]:,}, the last at byte {here:,}")
        return True

    def _truncated(self) -> bool:
        if self.found.truncated:
            return False
        self.found.truncated = True
        why = f" ({self.text.broken})" if self.text.broken else ""
        self._say("truncated", f"the file ends too early{why}: read up to byte {self.text.offset:,}")
        return False

    def _say(self, problem: str, message: str) -> None:
        self.found.problems.append((problem, message))


def _last_boundary(data: bytes, pos: int) -> int:
    """Index behind the last event of `data` that another one follows; -1: none does."""
    for start in (max(pos, len(data) - _TAIL), pos):
        cut = -1
        for found in _BOUNDARY.finditer(data, start):
            cut = found.start() + 1
        if cut >= 0:
            return cut
    return -1


def _shown(data: bytes) -> str:
    return repr(data[:32].decode("utf-8", "replace")) if data else "the end"


def _not_json(path: Path, head: bytes, offset: int) -> TraceError:
    """What the file is instead, as far as its first bytes tell."""
    text = head.lower()
    cause, remedy = "it is not JSON", "traces are what torch.profiler exports: .json or .json.gz"
    if text.startswith((b"<!doctype", b"<html", b"<?xml", b"<")):
        cause, remedy = "it is HTML or XML", "download the file itself, not the page that shows it"
    elif head.startswith(b"SQLite format 3"):
        cause, remedy = "it is an SQLite database inside gzip", "unpack it with gunzip first"
    elif head.startswith(b"\x28\xb5\x2f\xfd"):
        cause, remedy = "it is compressed with zstd", "unpack it with `zstd -d` first"
    elif head.startswith(b"PK\x03\x04"):
        cause, remedy = "it is a zip archive", "unpack it first"
    elif head.startswith((b"\xff\xfe", b"\xfe\xff")):
        cause, remedy = "it is UTF-16 text", "convert it to UTF-8"
    elif path.name.endswith((".nsys-rep", ".qdrep")):
        cause, remedy = "it is a report of Nsight Systems in its own format", f"nsys export --type sqlite {path.name}"
    evidence = f"byte {offset:,}: {_shown(head)}"
    return TraceError(f"{path} is not a trace", cause=cause, evidence=evidence, remedy=remedy)
