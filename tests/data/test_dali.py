"""Batches that DALI decodes are the images of the pack, in the order asked for, epoch by epoch."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("pyarrow", reason="pyarrow is not installed here (the extra saturate[pack])")
Image = pytest.importorskip("PIL.Image", reason="Pillow is not installed here")

from saturate.data import dali  # noqa: E402
from saturate.data import pack as packing  # noqa: E402
from saturate.data.pack_rows import ROWS  # noqa: E402
from saturate.data.pack_sources import open_source  # noqa: E402
from saturate.errors import EnvironmentProblem, UsageError  # noqa: E402

needs_dali = pytest.mark.skipif(not dali.installed(), reason="DALI is not installed here (the extra saturate[dali]); its decoder also runs on a CPU")

#: One colour each, so that neither a JPEG nor scaling changes it; `COLOURS[row]` of the pack, whose labels are 0 0 0 0 1 1 1 2 2 2 2.
COUNTS = (4, 3, 4)         # of images with each label
COLOURS = [(40 * label + 10, 20 * number + 5, 200) for label, count in enumerate(COUNTS) for number in range(count)]
LABELS = [label for label, count in enumerate(COUNTS) for _ in range(count)]


@pytest.fixture
def packed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setitem(ROWS, "images", 3)
    colours = iter(COLOURS)
    for label, count in enumerate(COUNTS):
        (tmp_path / "images" / f"c{label}").mkdir(parents=True)
        for number in range(count):
            size = (50 + 7 * number, 40)
            Image.new("RGB", size, next(colours)).save(tmp_path / "images" / f"c{label}" / f"{number}.jpg", quality=100)
    packing.pack(open_source(tmp_path / "images"), tmp_path / "packed", shard_bytes=1500)
    assert len(list((tmp_path / "packed").glob("data-*.arrow"))) > 1, "rows of several shards are to be found"
    return tmp_path / "packed"


def test_rows_are_found_in_all_shards(packed: Path, tmp_path: Path) -> None:
    rows = dali.Rows(packed)
    files = [path.read_bytes() for path in sorted((tmp_path / "images").rglob("*.jpg"))]
    assert len(rows) == len(files) == len(LABELS)
    assert [(rows[row][0].tobytes(), rows[row][1]) for row in range(len(rows))] == list(zip(files, LABELS))


def test_what_is_no_pack_of_images_is_named(packed: Path, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="no packed dataset"):
        dali.Rows(tmp_path / "nowhere")
    (packed / "state.json").write_text("[]", encoding="utf-8")
    with pytest.raises(UsageError, match="no packed dataset"):
        dali.Rows(packed)
    (tmp_path / "lines.txt").write_text("one\ntwo\n", encoding="utf-8")
    packing.pack(open_source(tmp_path / "lines.txt"), tmp_path / "lines")
    with pytest.raises(UsageError, match="holds no images"):
        dali.Rows(tmp_path / "lines")


def test_without_dali_it_says_what_to_install(packed: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dali, "installed", lambda: False)
    with pytest.raises(EnvironmentProblem) as problem:
        dali.loader(packed, 4)
    assert "saturate[dali]" in problem.value.remedy


def test_ranks_share_an_epoch_evenly(packed: Path) -> None:
    def shares(epoch: int, shuffle: bool = True) -> list[list[int]]:
        return [dali.Share(4, shuffle, 7, False, rank, 3).order(len(LABELS), epoch).tolist() for rank in range(3)]

    first = shares(0)
    assert [len(share) for share in first] == [3, 3, 3] and len({row for share in first for row in share}) == 9
    assert shares(0) == first != shares(1) and shares(0, shuffle=False) == [[0, 3, 6], [1, 4, 7], [2, 5, 8]]
    assert {row for epoch in range(20) for share in shares(epoch) for row in share} == set(range(len(LABELS))), "nothing is left out for good"
    assert dali.Share(2, True, 7, False, 0, 3).batches(11) == 2 and dali.Share(2, True, 7, True, 0, 3).batches(11) == 1


def test_too_few_images_are_named(packed: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dali, "installed", lambda: True)
    for asked in ({"batch_size": 12, "drop_last": True}, {"batch_size": 1, "world_size": 12}, {"batch_size": 0}, {"batch_size": 1, "rank": 1}):
        with pytest.raises(UsageError):
            dali.loader(packed, **asked)


@needs_dali
def test_batches_hold_the_images_in_order(packed: Path) -> None:
    batches = dali.loader(packed, 4, 32, shuffle=False, device="cpu")
    for _ in range(2):
        seen = list(batches)
        assert [tuple(images.shape) for images, _ in seen] == [(4, 3, 32, 32), (4, 3, 32, 32), (3, 3, 32, 32)] and len(batches) == 3
        assert [label for _, labels in seen for label in labels.tolist()] == LABELS
        colours = [tuple(image[:, 16, 16].tolist()) for images, _ in seen for image in images]
        assert all(abs(a - b) <= 3 for got, wanted in zip(colours, COLOURS) for a, b in zip(got, wanted))


@needs_dali
def test_each_epoch_has_every_image_once_in_an_order_of_its_own(packed: Path) -> None:
    def epoch(batches):
        return [tuple(image[:2, 0, 0].tolist()) for images, _ in batches for image in images]

    batches = dali.loader(packed, 4, 16, seed=1, device="cpu")
    first, second = epoch(batches), epoch(batches)
    assert sorted(first) == sorted(second) and len(set(first)) == len(LABELS) and first != second
    assert epoch(dali.loader(packed, 4, 16, seed=1, device="cpu")) == first != epoch(dali.loader(packed, 4, 16, seed=2, device="cpu"))
    next(iter(batches))
    assert sorted(epoch(batches)) == sorted(first), "a pass that was left early does not shorten the next"
    assert len(list(dali.loader(packed, 4, 16, drop_last=True, device="cpu"))) == 2


@needs_dali
def test_augmentations_take_the_place_of_the_cut(packed: Path) -> None:
    from nvidia.dali import fn

    images, _ = next(iter(dali.loader(packed, 4, transform=lambda images: fn.resize(images, size=(8, 24)), device="cpu")))
    assert tuple(images.shape) == (4, 3, 8, 24)
