"""What can be packed: which files a folder holds, of which kind; images and lines of text as rows. CSV and Parquet: `pack_tables`."""

from __future__ import annotations

import os
import re
import stat
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any
from urllib.parse import unquote

from saturate.data.pack_rows import ROWS, Batch, File, Source
from saturate.data.pack_tables import csv_source, parquet_source
from saturate.errors import UsageError

IMAGES = frozenset({".jpg", ".jpeg", ".png", ".webp", ".bmp", ".gif", ".tif", ".tiff", ".ppm", ".pgm"})
#: How files of these formats begin. Downloads that failed are pages of HTML under the name of an image.
BEGINNINGS = (b"\xff\xd8", b"\x89PNG\r\n", b"RIFF", b"BM", b"GIF8", b"II*\0", b"MM\0*", b"II+\0", b"MM\0+",
              *(b"P%d" % kind for kind in range(1, 7)))
TEXT = frozenset({".txt", ".md", ".rst", ".py", ".json", ".jsonl"})
TABLES = {".csv": "csv", ".tsv": "csv", ".parquet": "parquet"}
#: What folders are called that hold a part of a dataset each.
SPLITS = frozenset({"train", "training", "val", "valid", "validation", "dev", "test", "testing", "eval"})
KINDS = ("images", "text", "csv", "parquet")

#: Bytes of one record batch at most, whatever its rows.
BATCH_BYTES = 32 * 2**20
#: Image files that are read at a time: disks answer many questions faster than one after another.
READERS = 8


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

    def of_kind(found: list[File]) -> list[File]:
        return [file for file in found if file.path.suffix.lower() in endings or (path.is_file() and len(found) == 1)]

    files = of_kind(found)
    if not files:
        raise UsageError(f"no {kind} files in {path}", cause=f"looked for {', '.join(sorted(endings))}",
                         remedy="name another folder, or another --kind")
    if kind != "images":
        _refuse_parts(files, kind)
    source = {"images": _images, "text": _text, "csv": csv_source, "parquet": parquet_source}[kind](path, files)
    if kind in TABLES.values():
        _refuse_partitions(files, source.schema.names)
    taken = set(files)
    return replace(source, left_out=tuple(one.name for one in found if one not in taken), again=lambda: of_kind(_files(path)))


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


def _refuse_parts(files: list[File], kind: str) -> None:
    """train.csv and test.csv, or data/train-00000-of-00002.parquet beside data/test-00000-of-00001.parquet: behind one another, the rows
    of the test would be trained on, and nothing would tell them from the others. Of a corpus of texts, some may be called so."""
    for ending in sorted({file.path.suffix for file in files}):
        names = [file.name for file in files if file.path.suffix == ending]
        parts = {part: name for name in reversed(names) if (part := _part(name))}
        if len(parts) > 1 and (kind in TABLES.values() or all(map(_part, names))):
            raise UsageError(f"its files are parts of a dataset, not one: {', '.join(sorted(parts))}", evidence=", ".join(sorted(parts.values())),
                             cause="all rows would lie behind one another, those for testing among those for training",
                             remedy=f"pack each by itself: SRC/{min(parts.values())}, or a folder that holds one part")


def _part(name: str) -> str:
    """Of which part of a dataset a file is, by the folders that it lies in and by the words of its own name; "": it does not say."""
    path = Path(name.lower())
    return next((word for word in (*path.parts[:-1], *re.split(r"[-_.\s]+", path.stem)) if word in SPLITS), "")


def _refuse_splits(files: list[File], classes: list[str]) -> None:
    """The folder above those of ImageFolder: its folders would be the classes, and the classes be gone. Without folders in them, they
    may be classes after all."""
    if classes and all(name.lower() in SPLITS for name in classes) and all(file.name.count("/") > 1 for file in files):
        raise UsageError(f"its folders are parts of a dataset, not classes: {', '.join(classes)}", evidence=files[0].name,
                         cause="the first folder that an image lies in is its label", remedy=f"pack each by itself: SRC/{classes[0]}")


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
    _refuse_splits(files, classes)
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
