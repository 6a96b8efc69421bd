"""Pack a dataset of many small files, text or tables into a few memory-mapped Arrow files.

SRC: a folder of images (one folder per class), text files (a row per line), CSV or Parquet. DST: a new folder, or one that
an interrupted pack left: the same command goes on. Hugging Face `datasets` reads the result without saturate.
"""

from __future__ import annotations

import argparse
import collections
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path

from saturate.cli._options import memory
from saturate.cli._output import show_json, tell
from saturate.errors import EnvironmentProblem, UsageError

#: Endings of files that are left out which are told, the most frequent first; JSON has them all.
MOST_ENDINGS = 8


def configure(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("source", type=Path, metavar="SRC", help="a folder or a file")
    parser.add_argument("destination", type=Path, metavar="DST", help="the folder to write")
    parser.add_argument("--kind", choices=["images", "text", "csv", "parquet"], help="what SRC holds (default: by file names)")
    parser.add_argument("--shard-size", type=memory, default=256 * 2**20, metavar="SIZE", help="of one file (default: 256MiB)")
    parser.add_argument("--json", action="store_true", help="print the result as one JSON object on standard output")


def execute(arguments: argparse.Namespace) -> int:
    if find_spec("pyarrow") is None:
        raise EnvironmentProblem("packing needs pyarrow", remedy="pip install 'saturate[pack]'")
    from saturate.data import dali, pack
    from saturate.data.pack_sources import open_source
    from saturate.records.pack import Packed
    from saturate.report import words

    source_path, destination = arguments.source.absolute(), arguments.destination.absolute()
    real_source, real_destination = (Path(os.path.realpath(path)) for path in (source_path, destination))      # links lead into each other, too
    if real_destination == real_source or real_destination in real_source.parents or real_source in real_destination.parents:
        raise UsageError("SRC and DST lie in each other", remedy="pack into a folder outside of the source")
    source = open_source(source_path, arguments.kind)
    left_out = collections.Counter(Path(name).suffix.lower() or "without an ending" for name in source.left_out)
    if left_out:        # what is missing would be missed by nobody
        tell(f"left out, as no {source.kind}: " + ", ".join(f"{count:,} {ending}" for ending, count in left_out.most_common(MOST_ENDINGS)) + "\n")
    began = time.monotonic()
    try:
        with bar(source.total_bytes) as progress:
            done = pack.pack(source, destination, arguments.shard_size, progress)
    except KeyboardInterrupt:
        tell("stopped; what is packed is kept, and the same command goes on from here\n")
        raise
    seconds = time.monotonic() - began
    loader = pack.loader(source.schema, str(arguments.destination))
    on_gpu = [line.format(path=str(arguments.destination)) for line in pack.DALI_LOADER] if source.kind == "images" and dali.installed() else []
    record = Packed(source=str(arguments.source), destination=str(arguments.destination), kind=source.kind, rows=done.rows,
                    bytes=done.bytes, shards=len(done.shards), resumed_rows=done.resumed_rows, seconds=round(seconds, 3), loader=loader,
                    left_out=dict(left_out), dali_loader=on_gpu)
    if arguments.json:
        show_json(record)
    else:
        again = f" ({done.resumed_rows:,} of them were there already)" if done.resumed_rows else ""
        rows, files = words.count(done.rows, "row"), words.count(len(done.shards), "file")
        print(f"{rows} of {source.kind} in {files}, {done.bytes / 1e6:,.1f} MB, {seconds:.1f} s{again}\n")
        print("to read them:\n" + "\n".join(f"    {line}" for line in loader))
        if on_gpu:
            print("or, decoded by DALI on the GPU:\n" + "\n".join(f"    {line}" for line in on_gpu))
    return 0


@contextmanager
def bar(total_bytes: int) -> Iterator[Callable[[int], None]]:
    """A progress bar on standard error; nothing where that is no terminal."""
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TimeRemainingColumn, TransferSpeedColumn

    console = Console(stderr=True)
    columns = (BarColumn(bar_width=None), DownloadColumn(), TransferSpeedColumn(), TimeRemainingColumn(compact=True))
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as shown:
        task = shown.add_task("packing", total=total_bytes)
        yield lambda read_bytes: shown.update(task, completed=min(read_bytes, total_bytes))
