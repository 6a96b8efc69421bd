"""The read rate: what was read, whether a cache answered, and that nothing stays behind."""

from __future__ import annotations

import errno
import os
import sys
import time

import pytest
from planted import plant

from saturate.machine import disk, doctor_disk, facts
from saturate.machine.disk import ReadRate

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="O_DIRECT and mountinfo are Linux's")

MOUNTS = ("20 1 8:1 / / rw - ext4 /dev/sda rw\n21 20 0:5 / /data rw - nfs4 server:/x rw\n22 21 0:6 / /data/my\\040set rw - xfs /dev/sdb rw\n"
          "23 20 0:7 / /mnt/9p rw - 9p host rw\nbroken line\n")
FAST = ReadRate(2.5e9, 1 << 30, 0.4, False, True, 1)


def filled(path, size):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(os.urandom(1 << 20) * (size >> 20))
    return path


def test_an_existing_file_is_read_and_left_alone(tmp_path):
    path = filled(tmp_path / "a/b/data.bin", 40 << 20)
    before = path.stat()
    rate = disk.read_rate(tmp_path, seconds=0.2)
    assert rate.files == 1 and 0 < rate.bytes <= 40 << 20 and rate.seconds < 5
    assert rate.bytes_per_s == pytest.approx(rate.bytes / rate.seconds)
    after = path.stat()
    assert (before.st_mtime_ns, before.st_size) == (after.st_mtime_ns, after.st_size)
    assert [str(p.relative_to(tmp_path)) for p in sorted(tmp_path.rglob("*")) if p.is_file()] == ["a/b/data.bin"]


def test_a_temporary_file_where_there_is_none(tmp_path):
    rate = disk.read_rate(tmp_path, seconds=0.2)
    assert rate.files == 0 and 0 < rate.bytes <= 68 << 20
    assert list(tmp_path.iterdir()) == []


def test_no_temporary_file_on_a_full_disk(tmp_path, monkeypatch):
    monkeypatch.setattr(facts, "free_bytes", lambda _: 100 << 20)
    with pytest.raises(OSError, match="too little space"):
        disk.read_rate(tmp_path)
    check = doctor_disk.read_rate(tmp_path, False, tmp_path)
    assert check.status == "unknown" and "--data" in check.fix


def test_places_that_cannot_be_read(tmp_path):
    assert "No such file" in doctor_disk.read_rate(tmp_path / "absent", False, tmp_path).found
    (tmp_path / "empty").touch()
    assert "nothing in it" in doctor_disk.read_rate(tmp_path / "empty", False, tmp_path).found


def test_it_ends_in_time(tmp_path, monkeypatch):
    """A device of 1 block per 50 ms: the reading stops at the time limit, not at the end of the file."""
    path = filled(tmp_path / "x", 160 << 20)
    real = os.preadv
    monkeypatch.setattr(os, "preadv", lambda *arguments: (time.sleep(0.05), real(*arguments))[1])
    rate = disk.read_rate(path, seconds=0.2)
    assert rate.bytes < 160 << 20


def test_a_file_system_without_direct_reads(tmp_path, monkeypatch):
    """Refused at the open, or at the first read: the page cache is dropped instead, and what stayed in it is noticed."""
    path = filled(tmp_path / "x", 40 << 20)
    opened = os.open

    def refuse(name, flags, *rest, **named):
        if flags & os.O_DIRECT:
            raise OSError(errno.EINVAL, "Invalid argument")
        return opened(name, flags, *rest, **named)

    monkeypatch.setattr(os, "open", refuse)
    rate = disk.read_rate(path, seconds=0.2)
    assert not rate.direct and rate.cached in (False, True, None)
    monkeypatch.setattr(os, "posix_fadvise", lambda *_: path.read_bytes())      # a kernel that declines
    assert disk.read_rate(path, seconds=0.2).cached in (True, None)
    monkeypatch.undo()

    real, calls = os.preadv, []

    def late(descriptor, buffers, offset, *flags):
        calls.append(offset)
        if len(calls) == 1:
            raise OSError(errno.EINVAL, "Invalid argument")
        return real(descriptor, buffers, offset, *flags)

    monkeypatch.setattr(os, "preadv", late)
    assert not disk.read_rate(path, seconds=0.2).direct


def test_other_errors_of_the_device_are_reported(tmp_path, monkeypatch):
    path = filled(tmp_path / "x", 40 << 20)

    def broken(*_):
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(os, "preadv", broken)
    assert "Input/output error" in doctor_disk.read_rate(path, False, tmp_path).found


def test_memory_is_called_memory(tmp_path, monkeypatch):
    path = filled(tmp_path / "x", 40 << 20)
    monkeypatch.setattr(disk, "kind_of", lambda *_: "tmpfs")
    assert disk.read_rate(path, seconds=0.1).cached is True
    check = doctor_disk.read_rate(path, False, tmp_path)
    assert check.status == "ok" and "cached: from memory" in check.found and check.values["cached"] is True


def test_the_search_prefers_large_whole_files(tmp_path):
    assert disk.sample_files(tmp_path) == [] == disk.sample_files(tmp_path / "absent")
    filled(tmp_path / "small", 1 << 20)
    with open(tmp_path / "sparse", "wb") as file:
        file.truncate(1 << 30)
    os.symlink(tmp_path / "sparse", tmp_path / "link")
    assert disk.sample_files(tmp_path) == [], "a hole holds nothing to read, and a link is not followed"
    filled(tmp_path / "a/x", 33 << 20)
    large = filled(tmp_path / "b/y", 34 << 20)
    assert disk.sample_files(tmp_path) == [large]


def test_many_small_files_are_read_as_they_lie(tmp_path):
    for number in range(33):
        filled(tmp_path / f"{number % 4}/{number}", 1 << 20)
    (tmp_path / "empty").touch()
    assert len(disk.sample_files(tmp_path)) == 33
    rate = disk.read_rate(tmp_path, seconds=120)
    assert rate.files == 33 and rate.bytes == 33 << 20


@pytest.mark.parametrize(("each", "cached"), [([False, False], False), ([False, True], True), ([None, True], True), ([False, None], None), ([None], None)])
def test_one_cached_file_is_enough_to_distrust_the_rate(tmp_path, monkeypatch, each, cached):
    answers = iter(each)
    monkeypatch.setattr(disk, "_read_one", lambda *_: (1 << 20, 0.01, False, next(answers)))
    paths = [filled(tmp_path / str(number), 1 << 20) for number in range(len(each))]
    monkeypatch.setattr(disk, "sample_files", lambda _: paths)
    monkeypatch.setattr(disk, "kind_of", lambda *_: "ext4")
    assert disk.read_rate(tmp_path).cached is cached


def test_the_search_is_bounded(tmp_path):
    for number in range(50):
        (tmp_path / f"{number:02}").touch()
    filled(tmp_path / "z/x", 33 << 20)
    assert disk.sample_files(tmp_path, entries=20) == []
    assert disk.sample_files(tmp_path, seconds=-1) == []


@pytest.mark.parametrize(("path", "kind"), [
    ("/home/x", "ext4"), ("/data/x", "nfs4"), ("/database", "ext4"), ("/data/my set/y", "xfs"), ("/mnt/9p/z", "9p"), ("/", "ext4"),
])
def test_file_systems(tmp_path, path, kind):
    root = plant(tmp_path, {"proc/self/mountinfo": MOUNTS})
    assert disk.kind_of(path, root) == kind
    assert disk.kind_of(path, tmp_path / "nowhere") == ""


@pytest.mark.parametrize(("kind", "remote"), [("nfs4", True), ("fuse.sshfs", True), ("virtiofs", True), ("ext4", False), ("", False), ("xfs", False)])
def test_remote_file_systems(kind, remote):
    assert disk.is_remote(kind) is remote


@pytest.mark.parametrize(("rate", "kind", "virtual", "status", "words", "fix"), [
    (FAST, "ext4", False, "ok", "2.5 GB/s: 1,074 MB of one file (ext4), around the page cache", ""),
    (FAST, "ext4", True, "ok", "the host's cache may have answered", ""),
    (FAST, "nfs4", False, "ok", "the server's cache may have answered", ""),
    (ReadRate(90e6, 1 << 26, 0.7, False, True, 0), "ext4", False, "note", "90 MB/s: 67 MB of a temporary file", "SSD"),
    (ReadRate(90e6, 1 << 26, 0.7, None, True, 1), "nfs4", False, "note", "90 MB/s", "copy the data to a local disk"),
    (ReadRate(90e6, 1 << 26, 0.7, True, False, 1), "ext4", False, "ok", "cached: from memory", ""),
    (ReadRate(3e9, 1 << 26, 0.7, None, False, 300), "", False, "ok", "300 small files, one after the other, may be cached", ""),
])
def test_what_is_said(tmp_path, monkeypatch, rate, kind, virtual, status, words, fix):
    monkeypatch.setattr(disk, "read_rate", lambda *_, **__: rate)
    monkeypatch.setattr(disk, "kind_of", lambda *_: kind)
    check = doctor_disk.read_rate(tmp_path, virtual, tmp_path)
    assert check.status == status and words in check.found and fix in check.fix and bool(check.fix) == (status == "note")


def test_free_space(tmp_path, monkeypatch):
    for free, status in ((64 << 20, "problem"), (1 << 30, "note"), (1 << 40, "ok"), (None, "unknown")):
        monkeypatch.setattr(facts, "free_bytes", lambda _, free=free: free)
        check = doctor_disk.space(tmp_path)
        assert check.status == status and bool(check.fix) == (status in ("problem", "note"))
