"""Tables as rows in a fixed order: CSV and Parquet, read with pyarrow."""

from __future__ import annotations

import codecs
import contextlib
import io
import json
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from saturate.data.pack_rows import ROWS, Batch, File, Source
from saturate.errors import UsageError

#: What is read of a CSV file at a time, in bytes: more of it where a row needs it.
CSV_BLOCKS = (1 << 20, 1 << 24, 1 << 28)

#: By the endings of names, as pyarrow tells it.
COMPRESSED = {".bz2": "bz2", ".gz": "gzip", ".lz4": "lz4", ".zst": "zstd"}

#: Of a file of another encoding than UTF-8, as remedy; and the marks that a file of UTF-16 begins with.
CONVERT, UTF_16 = "convert it: iconv -f {} -t utf-8", (codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)


@dataclass(frozen=True)
class Csv:
    """A file of text, and how it is cut. `quoted`: quotation marks enclose fields; otherwise they are characters like any other."""

    file: File
    delimiter: str
    quoted: bool


def csv_source(path: Path, files: list[File]) -> Source:
    """Types are those of the first megabyte of the first file (of more where a row is longer), but text for a column that is empty
    there, that holds whole numbers beyond 64 bits there, or anywhere a number that begins with 0 (a postal code, an id, 0x00ff). A
    later value that does not fit is an error with its file and row."""
    import pyarrow as pa

    tables = _dialects(files)
    try:
        found = _opened_csv(tables[0]).schema
    except pa.ArrowInvalid as error:
        raise UsageError(f"cannot read {files[0].path} as CSV", cause=str(error),
                         remedy="mend it (text with a delimiter or an end of line in it needs double quotes), or pack its lines with --kind text") from error
    _each_once(files[0], _names(files[0], found))
    raw = [one.name for one in found if pa.types.is_binary(one.type)]
    if raw:
        raise UsageError(f"column {raw[0]!r} of {files[0].name} is not UTF-8 text", remedy=CONVERT.format("latin1"))
    as_text = _columns_of_text(tables, found)
    schema = pa.schema([pa.field(one.name, pa.string() if one.name in as_text else one.type) for one in found])
    return Source("csv", tuple(files), schema, _table_batches("csv", schema, partial(_csv_batches, tables), pa.ArrowInvalid))


def _columns_of_text(tables: list[Csv], found: Any) -> set[str]:
    """Those of the schema that was found whose values a number would not hold."""
    import pyarrow as pa
    import pyarrow.compute as pc

    as_text = {one.name for one in found if pa.types.is_null(one.type)}
    numbers = {one.name: pa.string() for one in found if pa.types.is_floating(one.type)}
    if numbers:         # pyarrow rounds whole numbers that are too long: two ids would become one
        first = _opened_csv(tables[0], numbers).read_next_batch()
        as_text |= {name for name in numbers if pc.all(pc.match_substring_regex(first[name], r"^-?\d+$")).as_py()}
    return as_text | _that_begin_with_0(tables, {one.name for one in found if pa.types.is_integer(one.type)} | numbers.keys() - as_text)


def _that_begin_with_0(tables: list[Csv], names: set[str]) -> set[str]:
    """Columns of numbers, read as text. What cannot be read is told of when it is packed."""
    import pyarrow as pa
    import pyarrow.compute as pc

    seen: set[str] = set()
    for table in tables if names else ():
        with contextlib.suppress(pa.ArrowInvalid):
            for _, batch in _rows_of_csv(table, dict.fromkeys(names, pa.string())):
                seen |= {name for name in names - seen
                         if pc.any(pc.match_substring_regex(batch[name], r"^\s*[+-]?0[\dxX]")).as_py()}
    return seen


def _csv_batches(tables: list[Csv], schema: Any) -> Iterator[tuple[int, Any]]:
    import pyarrow as pa

    before = 0
    for table in tables:
        file = table.file
        try:
            names = _names(file, _opened_csv(table, schema).schema)
            if names != schema.names:
                raise UsageError(f"{file.name} has other columns than {tables[0].file.name}",
                                 cause=f"{', '.join(names)} instead of {', '.join(schema.names)}", remedy="pack them apart")
            yield from ((before + read, batch) for read, batch in _rows_of_csv(table, schema))
            before += file.bytes
        except pa.ArrowInvalid as error:
            raise pa.ArrowInvalid(f"{file.name}: {error}") from error


def _names(file: File, schema: Any) -> list[str]:
    try:
        return schema.names
    except UnicodeDecodeError as error:
        raise UsageError(f"the header of {file.name} is not UTF-8 text", remedy=CONVERT.format("latin1")) from error


def _csv_reader(table: Csv, types: Any, block_bytes: int, opened: Any = None) -> Any:
    """`types`: of all columns (a schema), or of those that are to be read (a dict by name). `opened`: the file, where it is open."""
    from pyarrow import csv

    quotes: dict[str, Any] = {"newlines_in_values": True} if table.quoted else {"quote_char": False}    # quoted text may hold ends of lines
    parse = csv.ParseOptions(delimiter=table.delimiter, **quotes)
    some = isinstance(types, dict)
    convert = csv.ConvertOptions(column_types=types, strings_can_be_null=some, include_columns=list(types) if some else None,
                                 include_missing_columns=some) if types else None
    read = csv.ReadOptions(block_size=block_bytes)
    return csv.open_csv(table.file.path if opened is None else opened, read_options=read, parse_options=parse, convert_options=convert)


def _opened_csv(table: Csv, types: Any = None) -> Any:
    """A reader for the schema and the first rows."""
    import pyarrow as pa

    for block_bytes in CSV_BLOCKS:
        try:
            return _csv_reader(table, types, block_bytes)
        except pa.ArrowInvalid as error:
            if not _row_is_longer(error, block_bytes):
                raise
    raise AssertionError("the largest blocks raise")


def _rows_of_csv(table: Csv, types: Any) -> Iterator[tuple[int, Any]]:
    """All batches of a file, and how many of its bytes were read by then, which is some blocks ahead. From a row on that is longer than a
    block, in larger ones."""
    import pyarrow as pa

    given = 0
    for block_bytes in CSV_BLOCKS:
        read = 0
        file = pa.OSFile(str(table.file.path))      # closed with its last reader, which may be another thread's
        compression = COMPRESSED.get(table.file.path.suffix.lower())
        try:
            for batch in _csv_reader(table, types, block_bytes, pa.input_stream(file, compression=compression)):
                read += batch.num_rows
                if read > given:
                    yield file.tell(), batch.slice(max(0, batch.num_rows - (read - given)))
                    given = read
            return
        except pa.ArrowInvalid as error:
            if not _row_is_longer(error, block_bytes):
                raise


def _row_is_longer(error: Exception, block_bytes: int) -> bool:
    """Whether larger blocks may do."""
    return "straddling" in str(error) and block_bytes < CSV_BLOCKS[-1]


def _each_once(file: File, names: list[str]) -> None:
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice:
        raise UsageError(f"{file.name} has more than one column called {twice[0]!r}", remedy="give each column a name of its own")


def _dialects(files: list[File]) -> list[Csv]:
    """How each file is cut. Where quotation marks enclose nothing in one of those that tabs divide, they do not in the others either, but
    where they must."""
    delimiters = {file: _delimiter(file) for file in files}
    enclose = {file: _marks_enclose(file) for file in files if delimiters[file] == "\t"}
    literal = False in enclose.values()
    return [Csv(file, delimiter, quoted=not literal or bool(enclose.get(file, True))) for file, delimiter in delimiters.items()]


#: A field that quotation marks enclose, as a whole.
_ENCLOSED = re.compile(r'"(?:[^"]|"")*"')


def _marks_enclose(file: File) -> bool | None:
    """Whether quotation marks enclose fields of a file that tabs divide. They do where lines have more or fewer fields than the header: only
    enclosed text holds tabs and ends of lines. They do not where all have as many, and a mark begins a field that none ends: such files
    are mostly written without quoting, and one mark would swallow the rows up to the next. None: nothing tells."""
    width, torn = None, False
    with _plain(file) as stream, io.TextIOWrapper(stream, "utf-8-sig", "replace") as lines:
        for line in lines:
            line = line.rstrip("\n")
            if not line:
                continue
            fields = line.split("\t")
            if width is None:
                width = len(fields)
                if width == 1 or any(map(_ENCLOSED.fullmatch, fields)):     # the names of columns are enclosed themselves
                    return True
            if len(fields) != width:
                return True
            torn = torn or '"' in line and any(field[:1] == '"' and not _ENCLOSED.fullmatch(field) for field in fields)
    return False if torn else None


def _plain(file: File) -> Any:
    """Its bytes, unpacked where the ending of its name says that they are compressed, as pyarrow reads tables."""
    import pyarrow as pa

    return pa.input_stream(str(file.path), buffer_size=1 << 20)


def _delimiter(file: File) -> str:
    """A comma, but where the header has none, and has one of the others that are in use, or where one of those divides the rows into
    as many fields as the header has, and the comma does not. Raises UsageError for UTF-16."""
    import csv

    with _plain(file) as opened:
        content = opened.read(1 << 16)
    if content.startswith(UTF_16):
        raise UsageError(f"{file.name} is UTF-16, not UTF-8 text", remedy=CONVERT.format("utf-16"))
    if file.path.suffix.lower() == ".tsv":
        return "\t"
    beginning = content.decode("utf-8-sig", errors="replace").splitlines(keepends=True)
    header = beginning[0] if beginning else ""

    def divides(character: str) -> bool:
        rows = [row for row in csv.reader(beginning, delimiter=character) if row]
        whole = rows[:-1] if len(rows) > 2 else rows        # the last one may be cut
        return len({len(row) for row in whole}) == 1 < len(whole[0])

    others = [other for other in "\t;|" if other in header]
    if "," not in header:
        return others[0] if others else ","
    return "," if divides(",") else next(filter(divides, others), ",")


def parquet_source(path: Path, files: list[File]) -> Source:
    """Columns and types are those of the first file, and the features that Hugging Face datasets wrote beside them. Raises UsageError
    for a file with others, and for types that datasets do not load."""
    import pyarrow as pa
    from pyarrow import parquet

    def opened(file: File) -> Any:
        try:
            return parquet.ParquetFile(file.path, memory_map=True)
        except (pa.ArrowInvalid, OSError) as error:
            raise UsageError(f"cannot read {file.path} as Parquet", cause=str(error), remedy="write it again, or leave it out") from error

    def tables(schema: Any) -> Iterator[tuple[int, Any]]:
        before = 0
        for file in files:
            whole = opened(file)
            if whole.schema_arrow.remove_metadata() != schema or (features and _features(whole.schema_arrow) not in ({}, features)):
                raise UsageError(f"{file.name} has other columns or types than {files[0].name}", remedy="pack them apart")
            rows = 0
            for batch in whole.iter_batches(batch_size=ROWS["parquet"]):
                rows += batch.num_rows
                yield before + file.bytes * rows // whole.metadata.num_rows, batch
            before += file.bytes

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


def _table_batches(kind: str, schema: Any, tables: Callable[[Any], Iterator[tuple[int, Any]]],
                   damaged: Any) -> Callable[[int], Iterator[Batch]]:
    """`tables` yields batches, each with the bytes of the source up to its end."""
    def batches(skip: int) -> Iterator[Batch]:
        import pyarrow as pa

        row = read = 0
        try:
            for end, batch in tables(schema):
                begin = read
                for first in range(0, batch.num_rows, ROWS[kind]):
                    part = batch.slice(first, ROWS[kind])
                    row += part.num_rows
                    before, read = read, max(read, begin + (end - begin) * (first + part.num_rows) // batch.num_rows)
                    if row > skip:
                        kept = part.slice(max(0, part.num_rows - (row - skip)))
                        # A slice still holds all of what it was cut from: written, it is cut for good.
                        yield Batch(pa.record_batch(kept.columns, schema=schema), read - before)
        except damaged as error:
            raise UsageError(f"the {kind} data cannot be read behind row {row}", cause=str(error),
                             remedy="mend the row, or give the column one type throughout") from error

    return batches
