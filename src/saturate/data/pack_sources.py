"""What can be packed, as rows in a fixed order: folders of images, text, CSV and Parquet.

A source is read again from the start, or from any row, with the same rows in the same order: that is what lets an
interrupted pack go on where it was.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import re
import stat
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import unquote

from saturate.errors import UsageError

IMAGES = frozenset({".jpg", ".jpeg", ".png", ".webp", ".bmp", ".gif", ".tif", ".tiff", ".ppm", ".pgm"})
#: How files of these formats begin. Downloads that failed are pages of HTML under the name of an image.
BEGINNINGS = (b"\xff\xd8", b"\x89PNG\r\n", b"RIFF", b"BM", b"GIF8", b"II*\0", b"MM\0*", b"II+\0", b"MM\0+",
              *(b"P%d" % kind for kind in range(1, 7)))
TEXT = frozenset({".txt", ".md", ".rst", ".py", ".json", ".jsonl"})
TABLES = {".csv": "csv", ".tsv": "csv", ".parquet": "parquet"}
KINDS = ("images", "text", "csv", "parquet")

#: Rows of one record batch at most: what a reader decodes at once when it asks for a single row of text or table.
ROWS = {"images": 100, "text": 1000, "csv": 1000, "parquet": 1000}
#: Bytes of one record batch at most, whatever its rows.
BATCH_BYTES = 32 * 2**20
#: What is read of a CSV file at a time, in bytes: more of it where a row needs it.
CSV_BLOCKS = (1 << 20, 1 << 24, 1 << 28)
#: Image files that are read at a time: disks answer many questions faster than one after another.
READERS = 8


@dataclass(frozen=True)
class File:
    path: Path
    name: str               # below the source, with forward slashes
    bytes: int
    changed_ns: int


@dataclass(frozen=True)
class Batch:
    """A record batch, and how many bytes of the source it was made from."""

    rows: Any
    read_bytes: int


@dataclass(frozen=True)
class Source:
    """`batches(skip)` yields everything behind the first `skip` rows."""

    kind: str
    files: tuple[File, ...]
    schema: Any                                         # pyarrow.Schema
    batches: Callable[[int], Iterator[Batch]]
    features: dict[str, Any] = field(default_factory=dict)     # as Hugging Face datasets write them; {}: from the schema

    @property
    def total_bytes(self) -> int:
        return sum(file.bytes for file in self.files)

    def fingerprint(self) -> str:
        """Changes when a file of the source changes, comes or goes."""
        seen = [self.kind, [[file.name, file.bytes, file.changed_ns] for file in self.files]]
        return hashlib.blake2b(json.dumps(seen).encode("utf-8", "surrogateescape"), digest_size=16).hexdigest()


def open_source(path: Path, kind: str | None = None) -> Source:
    """The source at `path`. Raises UsageError where nothing there can be packed or read, or more than one kind of thing."""
    if not path.exists():
        raise UsageError(f"there is nothing at {path}", remedy="check its spelling")
    try:
        return _opened(path, kind)
    except OSError as error:
        raise UsageError(f"cannot read {error.filename or path}", cause=error.strerror or str(error),
                         remedy="mend it or remove it, or pack another folder") from error


def _opened(path: Path, kind: str | None) -> Source:
    found = _files(path)
    kind = kind or _kind(path, found)
    endings = {"images": IMAGES, "text": TEXT}.get(kind) or {e for e, k in TABLES.items() if k == kind}
    files = [file for file in found if file.path.suffix.lower() in endings or (path.is_file() and len(found) == 1)]
    if not files:
        raise UsageError(f"no {kind} files in {path}", cause=f"looked for {', '.join(sorted(endings))}",
                         remedy="name another folder, or another --kind")
    source = {"images": _images, "text": _text, "csv": _csv, "parquet": _parquet}[kind](path, files)
    if kind in TABLES.values():
        _refuse_partitions(files, source.schema.names)
    return source


def _refuse_partitions(files: list[File], columns: list[str]) -> None:
    """Spark, Hive and pyarrow leave a column out of the files and put it into the names of their folders: day=3/part-0.parquet. Packed,
    its values would be gone. A folder that is named after a column of the files, as of an experiment, takes nothing from them."""
    for file in files:
        lost = next((folder for folder in Path(file.name).parts[:-1] if re.fullmatch(r"[^=]+=.*", folder)
                     and unquote(folder.partition("=")[0]) not in columns), None)
        if lost is not None:
            raise UsageError(f"a column stands in the names of folders, not in the files: {lost}", evidence=file.name,
                             cause="files are packed with the columns that they hold, so its values would be lost",
                             remedy="write it into the files: pyarrow.dataset.dataset(SRC, partitioning='hive') reads both; or pack each folder apart")


def _files(path: Path) -> list[File]:
    """All regular files, hidden ones and all in hidden folders left out, in order of their names. Raises OSError where a folder or
    a file cannot be looked at: left out, it would be missed by nobody."""
    found = []
    for one in sorted([path] if path.is_file() else _visible(path)):
        facts = one.stat()
        if stat.S_ISREG(facts.st_mode):         # opening a pipe would wait for a writer
            found.append(File(one, one.relative_to(path).as_posix() if one != path else one.name, facts.st_size, facts.st_mtime_ns))
    return found


def _visible(folder: Path, above: frozenset[str] = frozenset()) -> Iterator[Path]:
    """What is no folder, at any depth. Links to folders are followed, as torchvision's ImageFolder does; but not back to one of the
    folders `above`."""
    here = os.path.realpath(folder)
    if here in above:
        return
    for entry in os.scandir(folder):
        if not entry.name.startswith("."):
            if entry.is_dir():
                yield from _visible(Path(entry.path), above | {here})
            else:
                yield Path(entry.path)


def _kind(path: Path, files: list[File]) -> str:
    counts: dict[str, int] = {}
    for file in files:
        ending = file.path.suffix.lower()
        kind = "images" if ending in IMAGES else TABLES.get(ending) or ("text" if ending in TEXT else None)
        if kind:
            counts[kind] = counts.get(kind, 0) + 1
    if not counts:
        raise UsageError(f"nothing in {path} can be packed", cause="no images, text, CSV or Parquet files were found",
                         remedy=f"name what it is with --kind: {', '.join(KINDS)}")
    if len(counts) > 1:
        seen = ", ".join(f"{count} {kind}" for kind, count in sorted(counts.items()))
        raise UsageError(f"{path} holds more than one kind of data", cause=f"files by kind: {seen}",
                         remedy="say which to pack with --kind")
    return next(iter(counts))


# -- images --------------------------------------------------------------------------------------------------------------


def _images(path: Path, files: list[File]) -> Source:
    """An ImageFolder: the first folder below the source is the class, classes in order of their names. Files are kept as
    they are, undecoded."""
    import pyarrow as pa

    empty = [file.name for file in files if not file.bytes]
    if empty:
        raise UsageError(f"{len(empty)} image files are empty", evidence=", ".join(empty[:3]), remedy="remove them, or fetch them again")
    with ThreadPoolExecutor(READERS) as readers:
        broken = [file.name for file, begins in zip(files, readers.map(_begins_as_image, files)) if not begins]
    if broken:
        raise UsageError(f"{len(broken)} image files are no images", cause="they begin like none of the formats that are packed",
                         evidence=", ".join(broken[:3]), remedy="remove them, or fetch them again")
    unreadable = [ascii(file.name) for file in files if not _is_text(file.name)]
    if unreadable:
        raise UsageError(f"{len(unreadable)} image files have names that are not UTF-8, and could not be written down",
                         evidence=", ".join(unreadable[:3]), remedy="rename them: convmv -f latin1 -t utf-8 -r --notest SRC")
    stray = [file.name for file in files if "/" not in file.name]
    if 0 < len(stray) < len(files):
        raise UsageError(f"{len(stray)} of {len(files)} images lie beside the class folders", evidence=", ".join(stray[:3]),
                         cause="the folder that an image lies in is its label, and these would have none",
                         remedy="move them into the folders of their classes, or out of the source")
    labelled = not stray
    classes = sorted({file.name.partition("/")[0] for file in files}) if labelled else []
    if labelled and (bare := _folders(path) - set(classes)):
        raise UsageError(f"{len(bare)} class folders hold no images", evidence=", ".join(sorted(bare)[:3]),
                         cause="labels count the class folders, so leaving one out would shift those after it",
                         remedy="remove those that are no classes, or put their images back")
    number = {name: index for index, name in enumerate(classes)}
    image = pa.struct([("bytes", pa.binary()), ("path", pa.string())])
    schema = pa.schema([("image", image), *([("label", pa.int64())] if labelled else [])])
    features: dict[str, Any] = {"image": {"_type": "Image"}}
    if labelled:
        features["label"] = {"names": classes, "_type": "ClassLabel"}

    def batches(skip: int) -> Iterator[Batch]:
        with ThreadPoolExecutor(READERS) as readers:
            for chunk in _chunks(files[skip:], ROWS["images"]):
                content = [{"bytes": data, "path": file.name}
                           for file, data in zip(chunk, readers.map(lambda file: file.path.read_bytes(), chunk))]
                columns = [pa.array(content, image)]
                if labelled:
                    columns.append(pa.array([number[file.name.partition("/")[0]] for file in chunk], pa.int64()))
                yield Batch(pa.record_batch(columns, schema=schema), sum(file.bytes for file in chunk))

    return Source("images", tuple(files), schema, batches, features)


def _is_text(name: str) -> bool:
    """Whether a name of the file system is UTF-8: where it is not, Python keeps its bytes as lone surrogates."""
    return not any("\ud800" <= character <= "\udfff" for character in name)


def _begins_as_image(file: File) -> bool:
    with open(file.path, "rb") as opened:
        begins = opened.read(8)
    return begins.startswith(BEGINNINGS) or begins[4:] == b"ftyp"       # AVIF, under whatever name


def _folders(path: Path) -> set[str]:
    """Of classes: visible ones right below the source."""
    return {entry.name for entry in os.scandir(path) if entry.is_dir() and not entry.name.startswith(".")}


def _chunks(files: list[File], rows: int) -> Iterator[list[File]]:
    """Files in order, some at a time: at most `rows`, and no more than BATCH_BYTES unless one file alone is larger."""
    chunk: list[File] = []
    for file in files:
        if chunk and (len(chunk) == rows or sum(one.bytes for one in chunk) + file.bytes > BATCH_BYTES):
            yield chunk
            chunk = []
        chunk.append(file)
    if chunk:
        yield chunk


# -- text ----------------------------------------------------------------------------------------------------------------


def _text(path: Path, files: list[File]) -> Source:
    """One row per line, without its end, files one behind the other."""
    import pyarrow as pa

    schema = pa.schema([("text", pa.string())])

    def lines() -> Iterator[tuple[str, int]]:
        for file in files:
            with open(file.path, "rb") as opened:
                for number, line in enumerate(opened, 1):
                    try:        # a mark of the byte order may stand before the first line
                        yield line.rstrip(b"\r\n").decode("utf-8-sig" if number == 1 else "utf-8"), len(line)
                    except UnicodeDecodeError as error:
                        raise UsageError(f"{file.path} is not UTF-8 text", cause=f"line {number}: {error.reason}",
                                         remedy="convert it: iconv -f latin1 -t utf-8") from error

    def batches(skip: int) -> Iterator[Batch]:
        rows: list[str] = []
        size = 0
        for row, (line, read) in enumerate(lines()):
            if row < skip:
                continue
            rows.append(line)
            size += read
            if len(rows) == ROWS["text"] or size >= BATCH_BYTES:
                yield Batch(pa.record_batch([pa.array(rows, pa.string())], schema=schema), size)
                rows, size = [], 0
        if rows:
            yield Batch(pa.record_batch([pa.array(rows, pa.string())], schema=schema), size)

    return Source("text", tuple(files), schema, batches, {"text": {"dtype": "string", "_type": "Value"}})


# -- tables --------------------------------------------------------------------------------------------------------------


def _csv(path: Path, files: list[File]) -> Source:
    """Types are those of the first megabyte of the first file (of more where a row is longer), but text for a column that is empty
    there, that holds whole numbers beyond 64 bits there, or anywhere a number that begins with 0 (a postal code, an id, 0x00ff). A
    later value that does not fit is an error with its file and row."""
    import pyarrow as pa
    import pyarrow.compute as pc
    from pyarrow import csv

    def reader(file: File, types: Any, block_bytes: int) -> Any:
        """`types`: of all columns, or of those that are to be read."""
        parse = csv.ParseOptions(delimiter=_delimiter(file), newlines_in_values=True)     # quoted text may hold ends of lines
        some = isinstance(types, dict)
        convert = csv.ConvertOptions(column_types=types, strings_can_be_null=some, include_columns=list(types) if some else None,
                                     include_missing_columns=some) if types else None
        read = csv.ReadOptions(block_size=block_bytes)
        return csv.open_csv(file.path, read_options=read, parse_options=parse, convert_options=convert)

    def opened(file: File, types: Any = None) -> Any:
        """A reader for the schema and the first rows."""
        for block_bytes in CSV_BLOCKS:
            try:
                return reader(file, types, block_bytes)
            except pa.ArrowInvalid as error:
                if not _row_is_longer(error, block_bytes):
                    raise
        raise AssertionError("the largest blocks raise")

    def rows(file: File, types: Any) -> Iterator[Any]:
        """All batches of a file. From a row on that is longer than a block, in larger ones."""
        given = 0
        for block_bytes in CSV_BLOCKS:
            read = 0
            try:
                for batch in reader(file, types, block_bytes):
                    read += batch.num_rows
                    if read > given:
                        yield batch.slice(max(0, batch.num_rows - (read - given)))
                        given = read
                return
            except pa.ArrowInvalid as error:
                if not _row_is_longer(error, block_bytes):
                    raise

    def tables(schema: Any) -> Iterator[tuple[File, Any]]:
        for file in files:
            try:
                yield from ((file, batch) for batch in table(file, schema))
            except pa.ArrowInvalid as error:
                raise pa.ArrowInvalid(f"{file.name}: {error}") from error

    def table(file: File, schema: Any) -> Iterator[Any]:
        names = opened(file, schema).schema.names
        if names != schema.names:
            raise UsageError(f"{file.name} has other columns than {files[0].name}",
                             cause=f"{', '.join(names)} instead of {', '.join(schema.names)}", remedy="pack them apart")
        return rows(file, schema)

    def begin_with_0(names: set[str]) -> set[str]:
        """Columns of numbers, read as text. What cannot be read is told of when it is packed."""
        seen: set[str] = set()
        for file in files if names else ():
            with contextlib.suppress(pa.ArrowInvalid):
                for batch in rows(file, dict.fromkeys(names, pa.string())):
                    seen |= {name for name in names - seen
                             if pc.any(pc.match_substring_regex(batch[name], r"^\s*[+-]?0[\dxX]")).as_py()}
        return seen

    try:
        found = opened(files[0]).schema
    except pa.ArrowInvalid as error:
        raise UsageError(f"cannot read {files[0].path} as CSV", cause=str(error),
                         remedy="mend it (text with a delimiter or an end of line in it needs double quotes), or pack its lines with --kind text") from error
    _each_once(files[0], found.names)
    raw = [one.name for one in found if pa.types.is_binary(one.type)]
    if raw:
        raise UsageError(f"column {raw[0]!r} of {files[0].name} is not UTF-8 text", remedy="convert it: iconv -f latin1 -t utf-8")
    as_text = {one.name for one in found if pa.types.is_null(one.type)}
    numbers = {one.name: pa.string() for one in found if pa.types.is_floating(one.type)}
    if numbers:         # pyarrow rounds whole numbers that are too long: two ids would become one
        first = opened(files[0], numbers).read_next_batch()
        as_text |= {name for name in numbers if pc.all(pc.match_substring_regex(first[name], r"^-?\d+$")).as_py()}
    as_text |= begin_with_0({one.name for one in found if pa.types.is_integer(one.type)} | numbers.keys() - as_text)
    schema = pa.schema([pa.field(one.name, pa.string() if one.name in as_text else one.type) for one in found])
    return Source("csv", tuple(files), schema, _table_batches("csv", schema, tables, pa.ArrowInvalid))


def _row_is_longer(error: Exception, block_bytes: int) -> bool:
    """Whether larger blocks may do."""
    return "straddling" in str(error) and block_bytes < CSV_BLOCKS[-1]


def _each_once(file: File, names: list[str]) -> None:
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice:
        raise UsageError(f"{file.name} has more than one column called {twice[0]!r}", remedy="give each column a name of its own")


def _delimiter(file: File) -> str:
    """A comma, but where the header has none, and has one of the others that are in use, or where one of those divides the rows into
    as many fields as the header has, and the comma does not."""
    import csv

    if file.path.suffix.lower() == ".tsv":
        return "\t"
    if file.path.suffix.lower() != ".csv":
        return ","              # compressed, perhaps
    with open(file.path, encoding="utf-8-sig", errors="replace", newline="") as opened:
        beginning = opened.read(1 << 16).splitlines(keepends=True)
    header = beginning[0] if beginning else ""

    def divides(character: str) -> bool:
        rows = [row for row in csv.reader(beginning, delimiter=character) if row]
        whole = rows[:-1] if len(rows) > 2 else rows        # the last one may be cut
        return len({len(row) for row in whole}) == 1 < len(whole[0])

    others = [other for other in "\t;|" if other in header]
    if "," not in header:
        return others[0] if others else ","
    return "," if divides(",") else next(filter(divides, others), ",")


def _parquet(path: Path, files: list[File]) -> Source:
    import pyarrow as pa
    from pyarrow import parquet

    def opened(file: File) -> Any:
        try:
            return parquet.ParquetFile(file.path, memory_map=True)
        except (pa.ArrowInvalid, OSError) as error:
            raise UsageError(f"cannot read {file.path} as Parquet", cause=str(error), remedy="write it again, or leave it out") from error

    def tables(schema: Any) -> Iterator[tuple[File, Any]]:
        for file in files:
            whole = opened(file)
            if whole.schema_arrow.remove_metadata() != schema or (features and _features(whole.schema_arrow) not in ({}, features)):
                raise UsageError(f"{file.name} has other columns or types than {files[0].name}", remedy="pack them apart")
            for batch in whole.iter_batches(batch_size=ROWS["parquet"]):
                yield file, batch

    found = opened(files[0]).schema_arrow
    schema, features = found.remove_metadata(), _features(found)
    _each_once(files[0], schema.names)
    unloadable = [one for one in schema if not features and not _loads(one.type)]
    if unloadable:
        raise UsageError(f"column {unloadable[0].name!r} of {files[0].name} cannot be packed",
                         cause=f"Hugging Face datasets load no {unloadable[0].type}", remedy="turn it into lists or text")
    return Source("parquet", tuple(files), schema, _table_batches("parquet", schema, tables, (pa.ArrowInvalid, OSError)), features)


def _loads(kind: Any) -> bool:
    """Whether Hugging Face datasets know that type of column."""
    from pyarrow import types

    if getattr(kind, "extension_name", "arrow.json") != "arrow.json":
        return False
    inner = [kind.field(number).type for number in range(kind.num_fields)]
    unknown = ("map", "union", "run_end_encoded", "interval", "list_view", "large_list_view", "decimal32", "decimal64")
    tests = [getattr(types, f"is_{name}", None) for name in unknown]       # older versions do not have them all
    return all(map(_loads, inner)) and not any(is_it(kind) for is_it in tests if is_it is not None)


def _features(schema: Any) -> dict[str, Any]:
    """What datasets wrote beside the columns, such as the names of classes; {} where they did not."""
    try:
        features = json.loads((schema.metadata or {})[b"huggingface"])["info"]["features"]
        return features if features.keys() == set(schema.names) else {}
    except (KeyError, TypeError, AttributeError, ValueError):
        return {}


def _table_batches(kind: str, schema: Any, tables: Callable[[Any], Iterator[tuple[File, Any]]],
                   damaged: Any) -> Callable[[int], Iterator[Batch]]:
    def batches(skip: int) -> Iterator[Batch]:
        import pyarrow as pa

        row = 0
        try:
            for _file, batch in tables(schema):
                for first in range(0, batch.num_rows, ROWS[kind]):
                    part = batch.slice(first, ROWS[kind])
                    row += part.num_rows
                    if row > skip:
                        kept = part.slice(max(0, part.num_rows - (row - skip)))
                        # A slice still holds all of what it was cut from: written, it is cut for good.
                        yield Batch(pa.record_batch(kept.columns, schema=schema), kept.nbytes)
        except damaged as error:
            raise UsageError(f"the {kind} data cannot be read behind row {row}", cause=str(error),
                             remedy="mend the row, or give the column one type throughout") from error

    return batches
