"""Tables as rows in a fixed order: CSV and Parquet, read with pyarrow."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

from saturate.data.pack_rows import ROWS, Batch, File, Source
from saturate.errors import UsageError

#: What is read of a CSV file at a time, in bytes: more of it where a row needs it.
CSV_BLOCKS = (1 << 20, 1 << 24, 1 << 28)


def csv_source(path: Path, files: list[File]) -> Source:
    """Types are those of the first megabyte of the first file (of more where a row is longer), but text for a column that is empty
    there, that holds whole numbers beyond 64 bits there, or anywhere a number that begins with 0 (a postal code, an id, 0x00ff). A
    later value that does not fit is an error with its file and row."""
    import pyarrow as pa

    try:
        found = _opened_csv(files[0]).schema
    except pa.ArrowInvalid as error:
        raise UsageError(f"cannot read {files[0].path} as CSV", cause=str(error),
                         remedy="mend it (text with a delimiter or an end of line in it needs double quotes), or pack its lines with --kind text") from error
    _each_once(files[0], found.names)
    raw = [one.name for one in found if pa.types.is_binary(one.type)]
    if raw:
        raise UsageError(f"column {raw[0]!r} of {files[0].name} is not UTF-8 text", remedy="convert it: iconv -f latin1 -t utf-8")
    as_text = _columns_of_text(files, found)
    schema = pa.schema([pa.field(one.name, pa.string() if one.name in as_text else one.type) for one in found])
    return Source("csv", tuple(files), schema, _table_batches("csv", schema, partial(_csv_batches, files), pa.ArrowInvalid))


def _columns_of_text(files: list[File], found: Any) -> set[str]:
    """Those of the schema that was found whose values a number would not hold."""
    import pyarrow as pa
    import pyarrow.compute as pc

    as_text = {one.name for one in found if pa.types.is_null(one.type)}
    numbers = {one.name: pa.string() for one in found if pa.types.is_floating(one.type)}
    if numbers:         # pyarrow rounds whole numbers that are too long: two ids would become one
        first = _opened_csv(files[0], numbers).read_next_batch()
        as_text |= {name for name in numbers if pc.all(pc.match_substring_regex(first[name], r"^-?\d+$")).as_py()}
    return as_text | _that_begin_with_0(files, {one.name for one in found if pa.types.is_integer(one.type)} | numbers.keys() - as_text)


def _that_begin_with_0(files: list[File], names: set[str]) -> set[str]:
    """Columns of numbers, read as text. What cannot be read is told of when it is packed."""
    import pyarrow as pa
    import pyarrow.compute as pc

    seen: set[str] = set()
    for file in files if names else ():
        with contextlib.suppress(pa.ArrowInvalid):
            for batch in _rows_of_csv(file, dict.fromkeys(names, pa.string())):
                seen |= {name for name in names - seen
                         if pc.any(pc.match_substring_regex(batch[name], r"^\s*[+-]?0[\dxX]")).as_py()}
    return seen


def _csv_batches(files: list[File], schema: Any) -> Iterator[tuple[File, Any]]:
    import pyarrow as pa

    for file in files:
        try:
            names = _opened_csv(file, schema).schema.names
            if names != schema.names:
                raise UsageError(f"{file.name} has other columns than {files[0].name}",
                                 cause=f"{', '.join(names)} instead of {', '.join(schema.names)}", remedy="pack them apart")
            yield from ((file, batch) for batch in _rows_of_csv(file, schema))
        except pa.ArrowInvalid as error:
            raise pa.ArrowInvalid(f"{file.name}: {error}") from error


def _csv_reader(file: File, types: Any, block_bytes: int) -> Any:
    """`types`: of all columns (a schema), or of those that are to be read (a dict by name)."""
    from pyarrow import csv

    parse = csv.ParseOptions(delimiter=_delimiter(file), newlines_in_values=True)     # quoted text may hold ends of lines
    some = isinstance(types, dict)
    convert = csv.ConvertOptions(column_types=types, strings_can_be_null=some, include_columns=list(types) if some else None,
                                 include_missing_columns=some) if types else None
    read = csv.ReadOptions(block_size=block_bytes)
    return csv.open_csv(file.path, read_options=read, parse_options=parse, convert_options=convert)


def _opened_csv(file: File, types: Any = None) -> Any:
    """A reader for the schema and the first rows."""
    import pyarrow as pa

    for block_bytes in CSV_BLOCKS:
        try:
            return _csv_reader(file, types, block_bytes)
        except pa.ArrowInvalid as error:
            if not _row_is_longer(error, block_bytes):
                raise
    raise AssertionError("the largest blocks raise")


def _rows_of_csv(file: File, types: Any) -> Iterator[Any]:
    """All batches of a file. From a row on that is longer than a block, in larger ones."""
    import pyarrow as pa

    given = 0
    for block_bytes in CSV_BLOCKS:
        read = 0
        try:
            for batch in _csv_reader(file, types, block_bytes):
                read += batch.num_rows
                if read > given:
                    yield batch.slice(max(0, batch.num_rows - (read - given)))
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
