"""Packed data is what the source holds, also after any interruption; everything else is a named refusal."""

from __future__ import annotations

import bz2
import datetime
import decimal
import errno
import gzip
import json
import os
import random
import resource
import signal
import stat
import subprocess
import sys
import time
from pathlib import Path

import pytest

pa = pytest.importorskip("pyarrow", reason="pyarrow is not installed here (the extra saturate[pack])")

from pyarrow import csv, parquet  # noqa: E402

from saturate.checkpoints import durable  # noqa: E402
from saturate.data import pack as packing  # noqa: E402
from saturate.data import pack_sources  # noqa: E402
from saturate.data.pack_rows import ROWS  # noqa: E402
from saturate.data.pack_sources import open_source  # noqa: E402
from saturate.errors import EnvironmentProblem, UsageError  # noqa: E402


def read_back(folder: Path) -> list[dict]:
    """All rows, by pyarrow alone, in the order that the state names."""
    state = json.loads((folder / "state.json").read_text())
    return [row for entry in state["_data_files"]
            for row in pa.ipc.open_stream(pa.memory_map(str(folder / entry["filename"]))).read_all().to_pylist()]


@pytest.fixture
def images(tmp_path: Path) -> Path:
    draw = random.Random(0)
    for label in ("cat", "dog", "ant"):
        (tmp_path / "images" / label).mkdir(parents=True)
        for number in range(7):
            (tmp_path / "images" / label / f"{number}.jpg").write_bytes(b"\xff\xd8" + draw.randbytes(500 + number))
    return tmp_path / "images"


@pytest.fixture
def text(tmp_path: Path) -> Path:
    (tmp_path / "text").mkdir()
    for name in ("b", "a"):
        (tmp_path / "text" / f"{name}.txt").write_text("".join(f"{name} ä line {n}\n" for n in range(2500)), encoding="utf-8")
    return tmp_path / "text"


def expected_lines() -> list[dict]:
    return [{"text": f"{name} ä line {n}"} for name in ("a", "b") for n in range(2500)]


def test_images_keep_their_bytes_and_classes(images: Path, tmp_path: Path) -> None:
    done = packing.pack(open_source(images), tmp_path / "out", shard_bytes=3000)
    rows = read_back(tmp_path / "out")
    assert done.rows == len(rows) == 21
    expected = [(path.read_bytes(), f"{label}/{path.name}", number)
                for number, label in enumerate(("ant", "cat", "dog")) for path in sorted((images / label).iterdir())]
    assert [(row["image"]["bytes"], row["image"]["path"], row["label"]) for row in rows] == expected


def test_shards_are_cut_by_size(text: Path, tmp_path: Path) -> None:
    done = packing.pack(open_source(text), tmp_path / "out", shard_bytes=30_000)
    assert len(done.shards) > 2 and all(shard.bytes == (tmp_path / "out" / shard.name).stat().st_size for shard in done.shards)
    assert read_back(tmp_path / "out") == expected_lines()


def test_csv_and_parquet_keep_types_and_order(tmp_path: Path) -> None:
    table = pa.table({"x": list(range(5000)), "y": [n / 3 for n in range(5000)], "z": [f"w{n}" for n in range(5000)]})
    (tmp_path / "p").mkdir()
    parquet.write_table(table.slice(0, 3000), tmp_path / "p" / "0.parquet", row_group_size=700)
    parquet.write_table(table.slice(3000), tmp_path / "p" / "1.parquet")
    packing.pack(open_source(tmp_path / "p"), tmp_path / "from_parquet", shard_bytes=20_000)
    assert read_back(tmp_path / "from_parquet") == table.to_pylist()

    (tmp_path / "c.tsv").write_text("x\tz\n" + "".join(f"{n}\tw{n}\n" for n in range(5000)))
    packing.pack(open_source(tmp_path / "c.tsv"), tmp_path / "from_csv", shard_bytes=20_000)
    assert read_back(tmp_path / "from_csv") == [{"x": n, "z": f"w{n}"} for n in range(5000)]


def test_datasets_reads_it(images: Path, text: Path, tmp_path: Path) -> None:
    datasets = pytest.importorskip("datasets", reason="Hugging Face datasets is not installed here")
    packing.pack(open_source(images), tmp_path / "i", shard_bytes=3000)
    loaded = datasets.load_from_disk(str(tmp_path / "i"))
    assert loaded.features["label"].names == ["ant", "cat", "dog"] and len(loaded) == 21
    assert loaded.cast_column("image", datasets.Image(decode=False))[8]["image"]["bytes"] == (images / "cat" / "1.jpg").read_bytes()
    packing.pack(open_source(text), tmp_path / "t")
    assert datasets.load_from_disk(str(tmp_path / "t"))[2500]["text"] == "b ä line 0"


# -- interruptions -------------------------------------------------------------------------------------------------------

_SLOWLY = """
import sys, time
from pathlib import Path
from saturate.data import pack
from saturate.data.pack_sources import open_source
pack.pack(open_source(Path(sys.argv[1])), Path(sys.argv[2]), 8000, lambda read: time.sleep(0.004))
"""


@pytest.mark.parametrize("seed", range(4))
def test_a_kill_at_any_moment_loses_nothing(text: Path, tmp_path: Path, seed: int) -> None:
    draw, out = random.Random(seed), tmp_path / "out"
    (tmp_path / "plain").mkdir()
    whole = packing.pack(open_source(text), tmp_path / "plain", shard_bytes=8000)
    for _ in range(4):
        child = subprocess.Popen([sys.executable, "-c", _SLOWLY, str(text), str(out)])
        time.sleep(draw.uniform(0.1, 0.6))
        child.send_signal(signal.SIGKILL)
        child.wait()
        if out.exists() and (out / packing.STATE).exists():
            break
        assert not (out / packing.STATE).exists()
    done = packing.pack(open_source(text), out, shard_bytes=8000)
    assert read_back(out) == expected_lines()
    assert not list(out.glob("*.part"))
    assert [shard.rows for shard in done.shards] == [shard.rows for shard in whole.shards]


@pytest.fixture(params=["images", "text", "csv", "parquet"])
def source(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """One of each kind, of several files, which takes some record batches."""
    if request.param in ("images", "text"):
        monkeypatch.setitem(ROWS, "images", 2)
        return request.getfixturevalue(request.param)
    (tmp_path / "tables").mkdir()
    for part in range(3):
        rows = pa.table({"x": list(range(5000 * part, 5000 * (part + 1))), "z": ["the same words"] * 5000})
        if request.param == "csv":
            csv.write_csv(rows, tmp_path / "tables" / f"{part}.csv")
        else:
            parquet.write_table(rows, tmp_path / "tables" / f"{part}.parquet", compression="zstd")
    return tmp_path / "tables"


def test_whatever_is_packed_goes_on_where_it_was_and_says_how_far_it_is(source: Path, tmp_path: Path) -> None:
    """In bytes of the source, of which a bar shows the share: those of a compressed table had been those of its rows in memory."""
    shard_bytes = 3000 if source.name == "images" else 30_000
    packing.pack(open_source(source), tmp_path / "whole", shard_bytes)
    told: list[int] = []

    def stop(read: int) -> None:
        told.append(read)
        if len(list((tmp_path / "out").glob("*.arrow"))) == 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        packing.pack(open_source(source), tmp_path / "out", shard_bytes, stop)
    opened, begun = open_source(source), len(told)
    assert 0 < told[1] < opened.total_bytes / 2 or opened.kind == "csv", "small tables are read ahead"
    done = packing.pack(opened, tmp_path / "out", shard_bytes, told.append)
    assert done.resumed_rows and read_back(tmp_path / "out") == read_back(tmp_path / "whole")
    assert told[begun:] == sorted(told[begun:]) and told[begun] > 0 and told[-1] == opened.total_bytes


def test_finished_shards_are_not_made_again(text: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"

    def stop(read: int) -> None:
        if read > 60_000:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        packing.pack(open_source(text), out, 8000, stop)
    kept = {path: path.stat().st_mtime_ns for path in out.glob("*.arrow")}
    assert kept
    done = packing.pack(open_source(text), out, 8000)
    assert done.resumed_rows and kept == {path: path.stat().st_mtime_ns for path in kept}
    again = packing.pack(open_source(text), out, 8000)
    assert again.resumed_rows == again.rows == 5000


def test_a_disk_that_takes_no_more_is_named_and_the_pack_goes_on(text: Path, tmp_path: Path) -> None:
    limit = resource.getrlimit(resource.RLIMIT_FSIZE)
    before = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, limit[1]))
        with pytest.raises(EnvironmentProblem, match="larger than files may be") as caught:
            packing.pack(open_source(text), tmp_path / "out", 50_000)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limit)
        signal.signal(signal.SIGXFSZ, before)
    assert "ulimit -f" in caught.value.remedy and "--shard-size" in caught.value.remedy
    with pytest.raises(EnvironmentProblem, match="no space") as caught, packing._problems(tmp_path):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    assert "same command" in caught.value.remedy
    packing.pack(open_source(text), tmp_path / "out", 50_000)
    assert read_back(tmp_path / "out") == expected_lines()


def test_killed_before_its_first_manifest(text: Path, tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    for name in (packing.LOCK, f"{durable.TEMPORARY}0123"):
        (tmp_path / "out" / name).touch()
    packing.pack(open_source(text), tmp_path / "out", 8000)
    assert read_back(tmp_path / "out") == expected_lines()


def test_a_link_in_the_place_of_the_lock_is_not_followed(text: Path, tmp_path: Path) -> None:
    (tmp_path / "thesis").write_text("the user's")
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / packing.LOCK).symlink_to(tmp_path / "thesis")
    with pytest.raises(EnvironmentProblem):
        packing.pack(open_source(text), tmp_path / "out", 8000)
    assert (tmp_path / "thesis").read_text() == "the user's"


def test_two_at_once(text: Path, tmp_path: Path) -> None:
    inner: list[str] = []

    def meanwhile(read: int) -> None:
        if not inner:
            with pytest.raises(EnvironmentProblem, match="another process") as caught:
                packing.pack(open_source(text), tmp_path / "out", 8000)
            inner.append(str(caught.value))

    packing.pack(open_source(text), tmp_path / "out", 8000, meanwhile)
    assert inner and read_back(tmp_path / "out") == expected_lines()


# -- bad input -----------------------------------------------------------------------------------------------------------


def test_a_pack_without_a_row_is_not_in_the_way_of_another_one(text: Path, tmp_path: Path) -> None:
    (tmp_path / "empty.csv").write_text("a,b\n")
    with pytest.raises(UsageError, match="not a single row"):
        packing.pack(open_source(tmp_path / "empty.csv"), tmp_path / "out")
    packing.pack(open_source(text), tmp_path / "out", 8000)
    assert read_back(tmp_path / "out") == expected_lines()


def test_a_file_system_that_cannot_sync_folders_takes_packs(text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fsync = os.fsync
    answers = iter([errno.EINVAL, errno.EOPNOTSUPP, errno.ENOSYS, *[errno.EINVAL] * 99])

    def only_files(descriptor: int) -> None:
        if stat.S_ISDIR(os.fstat(descriptor).st_mode):
            raise OSError(next(answers), "Invalid argument")
        fsync(descriptor)

    monkeypatch.setattr(os, "fsync", only_files)
    packing.pack(open_source(text), tmp_path / "out", 8000)
    assert read_back(tmp_path / "out") == expected_lines()
    answers = iter([errno.EIO])
    with pytest.raises(OSError, match="Invalid argument"):
        durable.sync_folder(tmp_path)


def test_another_source_does_not_mix_in(text: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    with pytest.raises(KeyboardInterrupt):
        packing.pack(open_source(text), out, 8000, lambda read: (_ for _ in ()).throw(KeyboardInterrupt) if read > 60_000 else None)
    (text / "a.txt").write_text("changed\n")
    with pytest.raises(UsageError, match="something else"):
        packing.pack(open_source(text), out, 8000)


@pytest.mark.parametrize("change", ["write", "add", "remove"])
def test_a_source_that_changes_meanwhile_is_named(images: Path, tmp_path: Path, change: str) -> None:
    """A download that still goes on, say: nobody would have missed its other half."""
    late = images / "ant" / ("late.jpg" if change == "add" else "3.jpg")

    def meanwhile(read: int) -> None:
        if read:
            late.unlink() if change == "remove" else late.write_bytes(b"\xff\xd8 and more")

    with pytest.raises(UsageError, match=f"ant/{late.name} changed while it was packed"):
        packing.pack(open_source(images), tmp_path / "out", 2**20, meanwhile)
    assert not (tmp_path / "out/state.json").exists(), "nothing loads it by mistake"
    with pytest.raises(UsageError, match="something else"):
        packing.pack(open_source(images), tmp_path / "out", 2**20)


def test_foreign_folders_stay_as_they_are(text: Path, tmp_path: Path) -> None:
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.tex").write_text("do not lose")
    with pytest.raises(UsageError, match="not empty"):
        packing.pack(open_source(text), tmp_path / "mine")
    assert os.listdir(tmp_path / "mine") == ["thesis.tex"]
    with pytest.raises(UsageError, match="is a file"):
        packing.pack(open_source(text), tmp_path / "mine" / "thesis.tex")


def test_files_that_others_put_beside_a_pack_stay(text: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    packing.pack(open_source(text), out, 8000)
    (out / "film.mkv.part").write_text("half of it")
    (out / "data-00001.arrow.part").write_text("of a pack that was killed")
    packing.pack(open_source(text), out, 8000)
    assert (out / "film.mkv.part").read_text() == "half of it" and not (out / "data-00001.arrow.part").exists()


@pytest.mark.parametrize("damage", [
    lambda m: "{", lambda m: "[]", lambda m: json.dumps({**m, "version": 99}), lambda m: json.dumps({**m, "shards": [{}]}),
    lambda m: json.dumps({**m, "shards": [{**m["shards"][0], "name": "../../etc/passwd"}]}),
    lambda m: json.dumps({**m, "shards": [{**m["shards"][0], "bytes": 1}]}),
    lambda m: json.dumps({**m, "shards": [{**m["shards"][0], "rows": "many"}]}),
    lambda m: json.dumps({**m, "shards": [{**m["shards"][0], "name": 5}]}),
    lambda m: json.dumps({**m, "shards": [{**m["shards"][0], "read_bytes": -1}]}),
    lambda m: 100_000 * "[",
])
def test_a_damaged_manifest_is_refused(text: Path, tmp_path: Path, damage) -> None:
    packing.pack(open_source(text), tmp_path / "out", 8000)
    path = tmp_path / "out" / packing.MANIFEST
    path.write_text(damage(json.loads(path.read_text())))
    with pytest.raises(UsageError):
        packing.pack(open_source(text), tmp_path / "out", 8000)


def test_sources_that_cannot_be_packed(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="nothing at"):
        open_source(tmp_path / "none")
    (tmp_path / "x.bin").write_bytes(b"1")
    with pytest.raises(UsageError, match="can be packed"):
        open_source(tmp_path)
    (tmp_path / "a.txt").write_bytes(b"\xff\xfe\n")
    with pytest.raises(UsageError, match="UTF-8"):
        packing.pack(open_source(tmp_path), tmp_path / "o1")
    (tmp_path / "b.csv").write_text("x\n1\n")
    with pytest.raises(UsageError, match="more than one kind"):
        open_source(tmp_path)
    (tmp_path / "c.parquet").write_bytes(b"PAR1 no")
    with pytest.raises(UsageError, match="as Parquet"):
        open_source(tmp_path, "parquet")
    (tmp_path / "e").mkdir()
    (tmp_path / "e" / "e.jpg").touch()
    with pytest.raises(UsageError, match="empty"):
        open_source(tmp_path / "e")
    (tmp_path / "e" / "e.jpg").write_bytes(b"<html>404</html>")
    with pytest.raises(UsageError, match="1 image files are no images"):
        open_source(tmp_path / "e")


def test_a_class_without_images_does_not_shift_labels(images: Path, tmp_path: Path) -> None:
    (images / "bee").mkdir()
    (images / ".cache").mkdir()
    with pytest.raises(UsageError, match="1 class folders hold no images"):
        open_source(images)
    (images / "bee").rmdir()
    packing.pack(open_source(images), tmp_path / "out")


def test_hidden_folders_are_left_out_with_all_below(images: Path, tmp_path: Path) -> None:
    for folder in (images / ".thumbnails" / "normal", images / "cat" / ".Trash" / "files"):
        folder.mkdir(parents=True)
        (folder / "9.jpg").write_bytes(b"\xff\xd8")
    source = open_source(images)
    assert len(source.files) == 21 and source.features["label"]["names"] == ["ant", "cat", "dog"]


def test_links_to_folders_are_followed_but_not_in_circles(images: Path, text: Path, tmp_path: Path) -> None:
    (images / "dog").rename(tmp_path / "dogs")
    (images / "dog").symlink_to(tmp_path / "dogs")
    (tmp_path / "more").mkdir()
    (images / "cat" / "more").symlink_to(tmp_path / "more")
    (tmp_path / "more" / "9.jpg").write_bytes(b"\xff\xd8")
    (tmp_path / "more" / "back").symlink_to(images / "cat")
    names = [file.name for file in open_source(images).files]
    assert len(names) == 22 and "cat/more/9.jpg" in names and "dog/6.jpg" in names
    (text / "part").symlink_to(text)
    assert [file.name for file in open_source(text).files] == ["a.txt", "b.txt"]


def test_an_image_beside_the_class_folders_takes_no_labels_away(images: Path) -> None:
    (images / "preview.jpg").write_bytes(b"\xff\xd8")
    with pytest.raises(UsageError, match="1 of 22 images lie beside the class folders") as refused:
        open_source(images)
    assert refused.value.evidence == "preview.jpg"
    assert [field.name for field in open_source(images / "cat").schema] == ["image"]


def test_parts_of_a_dataset_are_not_taken_for_its_classes(images: Path, tmp_path: Path) -> None:
    """`saturate pack imagenet/` had labels 0 and 1, for train and val."""
    whole = tmp_path / "whole"
    whole.mkdir()
    images.rename(whole / "train")
    with pytest.raises(UsageError, match="parts of a dataset, not classes: train") as refused:
        open_source(whole)
    assert "SRC/train" in refused.value.remedy
    assert "label" in open_source(whole / "train").schema.names
    (whole / "train" / "cat").rename(whole / "cat")         # two classes, one of them called so
    assert "label" in open_source(whole).schema.names


@pytest.mark.parametrize(("names", "content"), [
    (("train.csv", "test.csv"), "a,b\n1,2\n"), (("data/train-00000-of-00002.csv", "data/train-00001-of-00002.csv", "data/test-00000-of-00001.csv"), "a\n1\n"),
    (("wiki.train.txt", "wiki.valid.txt", "README.md"), "a line\n"), (("train/a.txt", "test/a.txt"), "a line\n"), (("Train.tsv", "dev.tsv", "more.tsv"), "a\tb\n1\t2\n"),
])
def test_parts_of_a_dataset_are_not_packed_behind_one_another(tmp_path: Path, names: tuple[str, ...], content: str) -> None:
    """The rows of the test were among those for training, and nothing told them apart."""
    source = tmp_path / "source"
    for name in names:
        (source / name).parent.mkdir(parents=True, exist_ok=True)
        (source / name).write_text(content)
    with pytest.raises(UsageError, match="parts of a dataset, not one: ") as refused:
        open_source(source)
    assert "pack each by itself: SRC/" in refused.value.remedy
    assert packed(source / names[0], tmp_path / "out")


@pytest.mark.parametrize("names", [
    ("train-00000-of-00002.txt", "train-00001-of-00002.txt"), ("the_test.txt", "a_train_to_nowhere.txt", "emma.txt"), ("test_cache.py", "train.py", "model.py"),
])
def test_texts_that_are_called_so_are_no_parts(tmp_path: Path, names: tuple[str, ...]) -> None:
    (tmp_path / "source").mkdir()
    for name in names:
        (tmp_path / "source" / name).write_text("a line\n")
    assert len(packed(tmp_path / "source", tmp_path / "out")) == len(names)


def test_a_value_of_another_type_names_the_row(tmp_path: Path) -> None:
    (tmp_path / "n.csv").write_text("x\n" + "1\n" * 700_000 + "one\n")
    with pytest.raises(UsageError, match="behind row") as caught:
        packing.pack(open_source(tmp_path / "n.csv"), tmp_path / "out")
    assert "one" in caught.value.cause


def test_numbers_that_begin_with_0_are_text(tmp_path: Path) -> None:
    """In whatever file and row: `02139` and `2139` are two."""
    (tmp_path / "zips").mkdir()
    (tmp_path / "zips" / "a.csv").write_text("zip,n,share,price,note\n" + "10001,0,0.5,1.5,\n" * 100_000)
    (tmp_path / "zips" / "b.csv").write_text("zip,n,share,price,note\n" + "10001,0,0.5,1.5,\n" * 100_000
                                                   + "2139,-1,,2,late\n02139,0,1e3,02.5,\n")
    packing.pack(open_source(tmp_path / "zips"), tmp_path / "out")
    assert read_back(tmp_path / "out")[-2:] == [{"zip": "2139", "n": -1, "share": None, "price": "2", "note": "late"},
                                                {"zip": "02139", "n": 0, "share": 1000.0, "price": "02.5", "note": ""}]


def test_rows_that_are_longer_than_what_is_read_at_a_time(tmp_path: Path) -> None:
    """In the middle of the file, and in its first row."""
    long = {1: "a" * 3_000_000, 40_000: "b" * 20_000_000}
    for first, name in ((1, "begins"), (2, "later")):
        content = [long.get(number + 1 - first, "short") for number in range(60_000)]
        (tmp_path / f"{name}.csv").write_text("id,text\n" + "".join(f"{number},{text}\n" for number, text in enumerate(content)))
        packing.pack(open_source(tmp_path / f"{name}.csv"), tmp_path / name)
        found = read_back(tmp_path / name)
        assert [row["id"] for row in found] == list(range(60_000)) and [row["text"] for row in found] == content


def test_hexadecimal_ids_are_text(tmp_path: Path) -> None:
    (tmp_path / "ids.csv").write_text("id,n\n0x00ff,1\n0xff,2\n")
    packing.pack(open_source(tmp_path / "ids.csv"), tmp_path / "out")
    assert read_back(tmp_path / "out") == [{"id": "0x00ff", "n": 1}, {"id": "0xff", "n": 2}]


@pytest.mark.parametrize("folder", ["day=3", "day=3/hour=7", "region=__HIVE_DEFAULT_PARTITION__"])
def test_a_column_in_the_names_of_folders_is_not_lost(tmp_path: Path, folder: str) -> None:
    """As Spark writes tables: without the folders' names all days would have been one."""
    source = tmp_path / "table" / folder
    source.mkdir(parents=True)
    (source / "part-0.csv").write_text("a\n1\n", encoding="utf-8")
    with pytest.raises(UsageError, match="in the names of folders") as refused:
        open_source(tmp_path / "table")
    assert folder.split("/")[0] in str(refused.value) and "partitioning" in refused.value.remedy
    assert open_source(source).schema.names == ["a"], "a folder by itself has lost nothing that it had"


def test_folders_that_name_a_column_of_the_files_take_nothing_from_them(tmp_path: Path) -> None:
    """As a sweep writes its runs: each file holds its setting itself. A setting that it does not hold would be lost all the same."""
    for rate in ("0.1", "0.2"):
        (tmp_path / "sweep" / f"lr={rate}").mkdir(parents=True)
        (tmp_path / "sweep" / f"lr={rate}" / "metrics.csv").write_text(f"lr,loss\n{rate},3.5\n", encoding="utf-8")
    packing.pack(open_source(tmp_path / "sweep"), tmp_path / "out")
    assert read_back(tmp_path / "out") == [{"lr": 0.1, "loss": 3.5}, {"lr": 0.2, "loss": 3.5}]
    (tmp_path / "sweep" / "lr=0.2").rename(tmp_path / "sweep" / "seed=0")
    with pytest.raises(UsageError, match="in the names of folders, not in the files: seed=0"):
        open_source(tmp_path / "sweep")


@pytest.mark.parametrize("content", ["", "a,b\n1.5,x\n", "a,b\n1\n"])
def test_an_error_in_one_of_several_tables_names_it(tmp_path: Path, content: str) -> None:
    (tmp_path / "tables").mkdir()
    (tmp_path / "tables" / "a.csv").write_text("a,b\n1,x\n")
    (tmp_path / "tables" / "wrong.csv").write_text(content)
    with pytest.raises(UsageError, match="behind row 1") as caught:
        packing.pack(open_source(tmp_path / "tables"), tmp_path / "out")
    assert caught.value.cause.startswith("wrong.csv: ")


def test_quoted_text_may_hold_ends_of_lines(tmp_path: Path) -> None:
    """Longer than what pyarrow reads at a time, or the end of a line inside a quotation cannot be in the way."""
    (tmp_path / "quoted.csv").write_text("n,text\n" + "".join(f'{n},"one {n}\ntwo, {n}"\n' for n in range(80_000)))
    packing.pack(open_source(tmp_path / "quoted.csv"), tmp_path / "out")
    rows = read_back(tmp_path / "out")
    assert len(rows) == 80_000 and rows[-1] == {"n": 79_999, "text": "one 79999\ntwo, 79999"}


def test_a_column_that_begins_empty_is_text(tmp_path: Path) -> None:
    (tmp_path / "late.csv").write_text("n,remark\n" + "1,\n" * 700_000 + "2,at last\n")
    packing.pack(open_source(tmp_path / "late.csv"), tmp_path / "out")
    assert read_back(tmp_path / "out")[-1] == {"n": 2, "remark": "at last"}


@pytest.mark.parametrize(("name", "content", "rows"), [
    ("semicolons.csv", b"a;b\n1;2,5\n", [{"a": 1, "b": "2,5"}]),
    ("commas.csv", b'"name, first";age\nAda;36\n"May, or not";7\n', [{"name, first": "Ada", "age": 36}, {"name, first": "May, or not", "age": 7}]),
    ("bare.csv", b"name, first;age\nAda;36\nMay, or not;7\n", [{"name, first": "Ada", "age": 36}, {"name, first": "May, or not", "age": 7}]),
    ("both.csv", b"a,b;c\n1,x;y\n", [{"a": 1, "b;c": "x;y"}]),
    ("tabs.csv", b"a\tb\n1\t2\n", [{"a": 1, "b": 2}]),
    ("one.csv", b"a\n1\n", [{"a": 1}]),
    ("marked.csv", b"\xef\xbb\xbfa,b\n1,2\n", [{"a": 1, "b": 2}]),
    ("long.csv", b"id,v,w\n12345678901234567890,1,1.5\n,2,\n12345678901234567891,3,12345678901234567890\n", [
        {"id": "12345678901234567890", "v": 1, "w": 1.5}, {"id": "", "v": 2, "w": None},
        {"id": "12345678901234567891", "v": 3, "w": 12345678901234567890.0}]),
    ("marked.txt", b"\xef\xbb\xbfhello\nworld\n", [{"text": "hello"}, {"text": "world"}]),
])
def test_spellings_of_text_and_tables(tmp_path: Path, name: str, content: bytes, rows: list[dict]) -> None:
    (tmp_path / name).write_bytes(content)
    packing.pack(open_source(tmp_path / name), tmp_path / "out")
    assert read_back(tmp_path / "out") == rows


@pytest.mark.parametrize(("content", "reason"), [
    (b"a,a\n1,2\n", "more than one column called 'a'"),
    (b"a,b\n1,caf\xe9\n", "column 'b' of odd.csv is not UTF-8"),
    (b"a,caf\xe9\n1,2\n", "the header of odd.csv is not UTF-8"),
    ("a,b\n1,2\n".encode("utf-16"), "odd.csv is UTF-16"),
])
def test_tables_that_nothing_could_read_back(tmp_path: Path, content: bytes, reason: str) -> None:
    (tmp_path / "odd.csv").write_bytes(content)
    with pytest.raises(UsageError, match=reason) as refused:
        open_source(tmp_path / "odd.csv")
    assert "UTF" not in reason or "iconv" in refused.value.remedy


def test_a_header_of_a_later_table_that_is_not_utf_8_is_named(tmp_path: Path) -> None:
    (tmp_path / "tables").mkdir()
    (tmp_path / "tables" / "a.csv").write_bytes(b"a,b\n1,2\n")
    (tmp_path / "tables" / "b.csv").write_bytes(b"a,caf\xe9\n1,2\n")
    with pytest.raises(UsageError, match="the header of b.csv is not UTF-8"):
        packing.pack(open_source(tmp_path / "tables"), tmp_path / "out")


def packed(source: Path, out: Path) -> list[dict]:
    packing.pack(open_source(source), out)
    return read_back(out)


def test_quotation_marks_of_a_table_without_quoting_are_text(tmp_path: Path) -> None:
    """Read as enclosures, they would make one row of four, and be gone from the last one."""
    rows = [(1, '"It was late.'), (2, "He left."), (3, "She said: come."), (4, '" And then'), (5, '"No," she said'), (6, '"Well."')]
    (tmp_path / "t.tsv").write_text("id\ttext\n" + "".join(f"{number}\t{text}\n" for number, text in rows))
    assert packed(tmp_path / "t.tsv", tmp_path / "out") == [{"id": number, "text": text} for number, text in rows]


def test_a_table_without_quoting_is_read_alike_when_it_is_gone_on_with(tmp_path: Path) -> None:
    rows = [{"id": n, "text": f'"{n} she said' if n % 500 == 7 else f"line {n}"} for n in range(6000)]
    (tmp_path / "t.tsv").write_text("id\ttext\n" + "".join(f"{row['id']}\t{row['text']}\n" for row in rows))
    with pytest.raises(KeyboardInterrupt):
        packing.pack(open_source(tmp_path / "t.tsv"), tmp_path / "out", 30_000,
                     lambda read: (_ for _ in ()).throw(KeyboardInterrupt) if read > 60_000 else None)
    assert packing.pack(open_source(tmp_path / "t.tsv"), tmp_path / "out", 30_000).resumed_rows
    assert read_back(tmp_path / "out") == rows


@pytest.mark.parametrize(("content", "rows"), [
    ('n\ttext\n1\t"one\ntwo"\n2\t"a\tb"\n', [{"n": 1, "text": "one\ntwo"}, {"n": 2, "text": "a\tb"}]),
    ('n\ttext\n1\t"He said ""hi"""\n\n2\t"Well."\n', [{"n": 1, "text": 'He said "hi"'}, {"n": 2, "text": "Well."}]),
    ('"n"\t"text"\n1\t"half \\" open"\n', [{"n": 1, "text": 'half \\ open"'}]),
    ('\ufeff"n"\t"text"\n1\t"half \\" open"\n', [{"n": 1, "text": 'half \\ open"'}]),
    ('text\n"one\ntwo"\n', [{"text": "one\ntwo"}]),
    ('n\ttext\n1\t6" wide\n', [{"n": 1, "text": '6" wide'}]),
])
def test_quotation_marks_that_enclose_are_none_of_the_text(tmp_path: Path, content: str, rows: list[dict]) -> None:
    (tmp_path / "t.tsv").write_text(content, encoding="utf-8")
    assert packed(tmp_path / "t.tsv", tmp_path / "out") == rows


def test_tables_of_one_source_are_quoted_alike(tmp_path: Path) -> None:
    (tmp_path / "tables").mkdir()
    for name, text in (("a", '"No," she said'), ("b", '"Well."')):
        (tmp_path / "tables" / f"{name}.tsv").write_text(f"n\ttext\n1\t{text}\n")
    assert [row["text"] for row in packed(tmp_path / "tables", tmp_path / "out")] == ['"No," she said', '"Well."']


@pytest.mark.parametrize(("name", "content"), [
    ("a.txt", b"n;text\n1;x\n"), ("a.data", b"n\ttext\n1\tx\n"), ("a.csv.gz", b"n|text\n1|x\n"), ("a.tsv.bz2", b"n\ttext\n1\tx\n"),
    ("a.txt", b"n,text\n1,x\n")])
def test_the_delimiter_is_looked_for_whatever_the_name(tmp_path: Path, name: str, content: bytes) -> None:
    compress = {".gz": gzip.compress, ".bz2": bz2.compress}.get(Path(name).suffix, bytes)
    (tmp_path / name).write_bytes(compress(content))
    packing.pack(open_source(tmp_path / name, "csv"), tmp_path / "out")
    assert read_back(tmp_path / "out") == [{"n": 1, "text": "x"}]


@pytest.mark.parametrize("table", [
    {"day": [datetime.date(2024, 1, 2)], "n": [1]}, {"at": [datetime.datetime(2024, 1, 2, 3)]}, {"at": [datetime.time(3)]},
    {"price": [decimal.Decimal("1.25")]}, {"log": [[{"at": datetime.datetime(2024, 1, 2)}]]}, {"n": [1], "text": ["x"], "v": [[1.5, 2.0]]}])
def test_the_lines_that_are_told_read_it(tmp_path: Path, table: dict) -> None:
    """torch has no type for times and decimal numbers."""
    pytest.importorskip("datasets", reason="Hugging Face datasets is not installed here")
    parquet.write_table(pa.table(table), tmp_path / "t.parquet")
    source = open_source(tmp_path / "t.parquet")
    packing.pack(source, tmp_path / "out")
    lines = packing.loader(source.schema, str(tmp_path / "out"))
    known: dict = {}
    exec("\n".join(lines), known)
    assert set(known["data"][0]) == set(table)
    assert ("torch" in lines[-1]) is ("v" in table)


@pytest.mark.parametrize(("kind", "value"), [(pa.map_(pa.string(), pa.int64()), [("a", 1)]),
                                            (pa.struct([("m", pa.list_(pa.map_(pa.string(), pa.int64())))]), {"m": [[("a", 1)]]}),
                                            (pa.list_view(pa.int32()), [1]), (pa.decimal32(5, 2), decimal.Decimal("1.25"))])
def test_parquet_that_datasets_could_not_load(tmp_path: Path, kind, value) -> None:
    parquet.write_table(pa.table({"m": pa.array([value], kind)}), tmp_path / "map.parquet")
    with pytest.raises(UsageError, match="column 'm' of map.parquet cannot be packed"):
        open_source(tmp_path / "map.parquet")
    parquet.write_table(pa.Table.from_arrays([pa.array([1]), pa.array([2])], names=["a", "a"]), tmp_path / "twice.parquet")
    with pytest.raises(UsageError, match="more than one column called 'a'"):
        open_source(tmp_path / "twice.parquet")


def test_parquet_keeps_what_datasets_wrote_beside_the_columns(tmp_path: Path) -> None:
    def write(name: str, classes: list[str]) -> None:
        features = {"y": {"names": classes, "_type": "ClassLabel"}}
        table = pa.table({"y": [0, 1]}).replace_schema_metadata({"huggingface": json.dumps({"info": {"features": features}})})
        parquet.write_table(table, tmp_path / "p" / name)

    (tmp_path / "p").mkdir()
    write("0.parquet", ["no", "yes"])
    write("1.parquet", ["no", "yes"])
    source = open_source(tmp_path / "p")
    assert source.features["y"]["names"] == ["no", "yes"]
    packing.pack(source, tmp_path / "out")
    assert json.loads((tmp_path / "out" / packing.INFO).read_text())["features"] == source.features
    write("1.parquet", ["yes", "no"])       # the same numbers would mean something else
    with pytest.raises(UsageError, match="1.parquet has other columns or types"):
        packing.pack(open_source(tmp_path / "p"), tmp_path / "other")
    plain = pa.table({"x": [1]}).replace_schema_metadata({"huggingface": "[]"})
    parquet.write_table(plain, tmp_path / "plain.parquet")
    assert open_source(tmp_path / "plain.parquet").features == {}


def test_what_cannot_be_read_is_named(images: Path, tmp_path: Path) -> None:
    (images / "cat" / "link.jpg").symlink_to("nowhere")
    with pytest.raises(UsageError, match="cannot read .*link.jpg"):
        open_source(images)
    (images / "cat" / "link.jpg").unlink()
    os.mkfifo(images / "cat" / "pipe.jpg")
    assert len(open_source(images).files) == 21
    name = os.fsencode(images / "cat") + b"/\xff.jpg"
    with open(name, "wb") as file:
        file.write(b"\xff\xd8")
    with pytest.raises(UsageError, match="not UTF-8") as refused:
        open_source(images)
    refused.value.card().encode()      # can be printed


def test_batches_stay_small(images: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pack_sources, "BATCH_BYTES", 1200)
    assert max(batch.rows.num_rows for batch in open_source(images).batches(0)) == 2


# -- the verb ------------------------------------------------------------------------------------------------------------


def saturate(*words: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-m", "saturate", *words], cwd=cwd, capture_output=True, text=True)


def test_the_verb(text: Path, tmp_path: Path) -> None:
    done = saturate("pack", "text", "out", "--shard-size", "30kB", "--json", cwd=tmp_path)
    assert done.returncode == 0 and done.stderr == ""
    record = json.loads(done.stdout)
    assert (record["kind"], record["rows"], record["resumed_rows"]) == ("text", 5000, 0) and record["shards"] > 1
    again = saturate("pack", "text", "out", "--shard-size", "30kB", cwd=tmp_path)
    assert "load_from_disk('out')" in again.stdout and "5,000 of them were there already" in again.stdout
    wrong = saturate("pack", "text", "text/out", cwd=tmp_path)
    assert wrong.returncode == 2 and "lie in each other" in wrong.stderr
    assert saturate("pack", "text", "out", "--shard-size", "huge", cwd=tmp_path).returncode == 2
    (tmp_path / "link").symlink_to(tmp_path / "text")
    for source, destination in (("text", "link/out"), ("link", "text/out"), ("link", "text")):
        linked = saturate("pack", source, destination, cwd=tmp_path)
        assert linked.returncode == 2 and "lie in each other" in linked.stderr
    assert sorted(path.name for path in text.iterdir()) == ["a.txt", "b.txt"]
    (tmp_path / "days.csv").write_text("day\n2024-01-02\n")
    told = json.loads(saturate("pack", "days.csv", "days", "--json", cwd=tmp_path).stdout)["loader"]
    assert told == ["from datasets import load_from_disk", "data = load_from_disk('days')"]


def test_what_is_left_out_is_told(images: Path, tmp_path: Path) -> None:
    """A third of the photographs had another ending, and nobody missed them."""
    for number in range(3):
        (images / "cat" / f"{number}.HEIC").write_bytes(b"no format that is packed")
    (images / "notes.log").touch()
    done = saturate("pack", "images", "out", "--json", cwd=tmp_path)
    assert done.returncode == 0 and done.stderr == "left out, as no images: 3 .heic, 1 .log\n"
    record = json.loads(done.stdout)
    assert record["rows"] == 21 and record["left_out"] == {".heic": 3, ".log": 1}
