"""The store: shared by processes, whole after kill -9, and never worse than a miss when damaged or full."""

from __future__ import annotations

import errno
import os
import random
import resource
import signal
import struct
import time

import pytest

from saturate.data import cache_store
from saturate.data.cache_store import Dropped, Unusable, attach, create

KEY = b"k" * 32


def record(index):
    return random.Random(index).randbytes(index * 37 % 5000)


def made(folder, slots=200, limit=1 << 24, key=KEY, **more):
    return create(folder, "s", key, slots, limit, **more)


def whole(store):
    """How many samples are there; all of them must be right."""
    found = 0
    for index in range(store.slots):
        data = store.get(index)
        if data is not None:
            assert bytes(data) == record(index)
            found += 1
    return found


def forked(work):
    child = os.fork()
    if child == 0:
        try:
            work()
        finally:
            os._exit(0)
    return child


@pytest.mark.parametrize("memory", [False, True])
def test_what_one_process_stores_another_reads(tmp_path, memory):
    store = made(None if memory else tmp_path)
    for child in [forked(lambda part=part: [store.put(i, [record(i)]) for i in range(part, 200, 4)]) for part in range(4)]:
        os.waitpid(child, 0)
    assert whole(store) == 200
    other = attach(store.path, KEY, 200)        # what a spawned worker does
    assert whole(other) == 200


def test_two_creators_share_one_store(tmp_path):
    children = [forked(lambda part=part: made(tmp_path).put(part, [record(part)])) for part in range(8)]
    for child in children:
        os.waitpid(child, 0)
    assert whole(made(tmp_path)) == 8
    assert [path.name for path in tmp_path.iterdir()] == ["s.samples"]


def test_kill_at_any_byte_leaves_whole_samples(tmp_path):
    chance = random.Random(0)
    store = made(tmp_path)
    for turn in range(40):
        reader, writer = os.pipe()

        def write(turn=turn, writer=writer):
            order = random.Random(turn)
            while True:
                index = order.randrange(200)
                store.put(index, [record(index)])
                os.write(writer, b".")

        child = forked(write)
        os.close(writer)
        assert os.read(reader, 1)       # not killed before it had its turn, as on a busy machine
        time.sleep(chance.uniform(0.0, 0.004))
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        os.close(reader)
        whole(attach(store.path, KEY, 200))
    assert whole(attach(store.path, KEY, 200)) > 0
    assert attach(store.path, KEY, 200).put(0, [record(0)])     # no lock outlives who held it


def test_a_damaged_byte_is_a_miss_and_can_be_stored_again(tmp_path):
    store = made(tmp_path)
    for index in range(200):
        store.put(index, [record(index)])
    size = os.path.getsize(store.path)
    chance = random.Random(1)
    begin = cache_store._table_end(200)
    for _ in range(150):
        place = chance.choice([chance.randrange(begin, size), chance.randrange(4096, 4096 + 1600)])
        with open(store.path, "r+b") as file:
            file.seek(place)
            old = file.read(1)
            file.seek(place)
            file.write(bytes([old[0] ^ 1 << chance.randrange(8)]))
        whole(attach(store.path, KEY, 200))
    damaged = attach(store.path, KEY, 200)
    assert whole(damaged) < 200
    for index in range(200):
        assert damaged.put(index, [record(index)])
    assert whole(damaged) == 200


def test_a_checksum_that_is_not_looked_at_would_be_seen(tmp_path, monkeypatch):
    """The test above can fail."""
    monkeypatch.setattr(cache_store.Store, "_checksum", lambda *_: 0)
    store = made(tmp_path)
    store.put(3, [record(3)])
    with open(store.path, "r+b") as file:
        file.seek(cache_store._table_end(200) + 30)
        file.write(b"\xff\x00\xff")
    with pytest.raises(AssertionError):
        whole(attach(store.path, KEY, 200))


@pytest.mark.parametrize("cut_at", [0, 10, 71, 4000, 5000])
def test_a_file_cut_short_is_made_anew(tmp_path, cut_at):
    store = made(tmp_path)
    store.put(1, [record(1)])
    os.truncate(store.path, cut_at)
    with pytest.raises(Unusable):
        attach(store.path, KEY, 200)
    assert whole(made(tmp_path)) == 0


def test_a_store_cut_while_it_is_open_is_a_miss(tmp_path):
    store = made(tmp_path)
    for index in range(200):
        store.put(index, [record(index)])
    os.truncate(store.path, cache_store._table_end(200) + 10_000)
    assert 0 < whole(store) < 100


def test_what_was_read_before_is_not_read_from_a_store_that_was_cut(tmp_path):
    """Its checksum is not looked at again: what was missing came from the sample that was read before it."""
    store = made(tmp_path)
    for index in range(200):
        store.put(index, [bytes([index]) * 3000])
    assert [bytes(store.get(index)) for index in range(200)] == [bytes([index]) * 3000 for index in range(200)]
    os.truncate(store.path, cache_store._table_end(200) + 10_000)
    found = [store.get(index) and bytes(store.get(index)) for index in range(200)]
    assert found == [bytes([index]) * 3000 for index in range(3)] + [None] * 197


@pytest.mark.parametrize("cut_at", [0, 2048, 4200])
def test_a_store_whose_table_is_cut_ends_no_training(tmp_path, cut_at):
    """In a mapping it is a signal."""
    def use():
        os.truncate(store.path, cut_at)
        read = [store.get(index) for index in range(200)], store.dropped, store.holds(3), store.put(3, [record(3)]), store.counted()
        os.write(writer, repr(read[1:]).encode())

    store = made(tmp_path)
    for index in range(200):
        store.put(index, [record(index)])
    reader, writer = os.pipe()
    _, status = os.waitpid(forked(use), 0)
    assert status == 0 and os.read(reader, 100).startswith(b"(False, ")


def test_another_version_is_not_read(tmp_path):
    made(tmp_path).put(1, [record(1)])
    for key, slots in ((b"x" * 32, 200), (KEY, 201)):
        with pytest.raises(Unusable, match="another"):
            attach(str(tmp_path / "s.samples"), key, slots)
    assert whole(made(tmp_path, key=b"x" * 32)) == 0


def test_bounded(tmp_path):
    store = made(tmp_path, limit=100_000)
    stored = [store.put(index, [bytes(1000)]) for index in range(200)]
    assert 80 < sum(stored) < 100 and stored == sorted(stored, reverse=True)
    assert os.path.getsize(store.path) <= 100_000
    assert store.get(0) is not None
    with pytest.raises(Unusable, match="no room"):
        create(tmp_path, "small", KEY, 200, 4096)


def test_a_share_is_the_same_samples_for_everybody(tmp_path):
    store = made(tmp_path, share=cache_store.WHOLE // 4)
    wanted = [index for index in range(200) if store.wanted(index)]
    assert 40 <= len(wanted) <= 60 and wanted == [i for i in range(200) if attach(store.path, KEY, 200).wanted(i)]
    assert not store.wanted(-1) and not store.wanted(200)


def test_a_full_disk_ends_storing_and_nothing_else(tmp_path):
    """A limit on the size of files: the same errors, at a byte of our choice."""
    def fill():
        resource.setrlimit(resource.RLIMIT_FSIZE, (60_000, 60_000))
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        results = [store.put(index, [record(index)]) for index in range(200)]
        os.write(writer, struct.pack("<II", sum(results), store.full))

    store = made(tmp_path)
    reader, writer = os.pipe()
    os.waitpid(forked(fill), 0)
    stored, full = struct.unpack("<II", os.read(reader, 8))
    assert full == 1 and 5 < stored < 100
    assert whole(store) == stored


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT])
def test_a_full_disk_gets_half_of_it_back(tmp_path, monkeypatch, number):
    """What a quota leaves is not told beforehand: the cache took all of it, and checkpoints found no room in this run and in later ones."""
    def no_room(descriptor, parts, offset):
        if offset + sum(map(len, parts)) > 300_000:
            raise OSError(number, os.strerror(number))
        return write(descriptor, parts, offset)

    store, other, write = made(tmp_path), made(tmp_path), os.pwritev
    monkeypatch.setattr(os, "pwritev", no_room)
    stored = [store.put(index, [bytes([index]) * 3000]) for index in range(200)]
    assert 80 < sum(stored) < 100 and store.full
    there = [index for index in range(200) if store.get(index) is not None]
    assert there == list(range(len(there))) and 40 <= len(there) <= 60 and all(bytes(store.get(index)) == bytes([index]) * 3000 for index in there)
    assert os.path.getsize(store.path) < 160_000 and store.used_bytes == os.path.getsize(store.path)
    assert not other.put(199, [b"more"]) and other.full and not made(tmp_path).put(199, [b"more"]), "nobody stores any more"
    assert [store.holds(index) for index in range(200)] == [index in there for index in range(200)]


@pytest.mark.skipif(os.geteuid() != 0, reason="needs a file system of its own")
def test_a_really_full_disk(tmp_path):
    import subprocess

    script = f"""
import sys; sys.path.insert(0, {str(os.path.dirname(os.path.dirname(os.path.dirname(cache_store.__file__))))!r})
from pathlib import Path
from saturate.data.cache_store import create
store = create(Path({str(tmp_path)!r}), "s", b"k" * 32, 200, 1 << 30)
stored = [store.put(index, [bytes([index]) * 20_000]) for index in range(200)]
assert 5 < sum(stored) < 60 and store.full, sum(stored)
there = [index for index in range(200) if store.get(index) is not None]
assert there == list(range(len(there))) and len(there) >= sum(stored) // 2 - 1
assert all(bytes(store.get(index)) == bytes([index]) * 20_000 for index in there)
import os; assert os.statvfs({str(tmp_path)!r}).f_bavail * 4096 > 400_000
try: create(Path({str(tmp_path)!r}), "big", b"k" * 32, 1 << 20, 1 << 30)
except Exception as error: assert "No space left" in str(error), error
else: raise AssertionError("a table that does not fit")
"""
    done = subprocess.run(["unshare", "-m", "sh", "-c", f"mount -t tmpfs -o size=1m none {tmp_path} && exec \"$0\" -c \"$1\"",
                           os.sys.executable, script], capture_output=True, text=True)
    if "unshare" in done.stderr or "mount" in done.stderr:
        pytest.skip(f"no mounts here: {done.stderr}")
    assert done.returncode == 0, done.stderr


def test_dropped_is_dropped_for_everybody_and_later(tmp_path):
    store, other = made(tmp_path), made(tmp_path)
    os.waitpid(forked(lambda: store.drop("item 3 is not what it was")), 0)
    assert store.dropped and other.dropped and other.reason == "item 3 is not what it was"
    with pytest.raises(Dropped, match="item 3"):
        made(tmp_path)


def test_counters_are_those_of_this_run(tmp_path):
    made(tmp_path).count(5, 6)
    later = made(tmp_path)
    assert later.counted() == (0, 0)
    os.waitpid(forked(lambda: later.count(3, 1)), 0)
    later.count(6, 1)
    later.count(4, 1)
    assert later.counted() == (13, 3)


@pytest.mark.parametrize("later", [1, cache_store._COUNTER_SLOTS, 3 * cache_store._COUNTER_SLOTS])
def test_each_process_counts_for_itself(tmp_path, monkeypatch, later):
    """Also those whose numbers fall together; seen: what helpers had stored was lost from the sum."""
    store, number = made(tmp_path), os.getpid()
    for process in range(cache_store._COUNTER_SLOTS):
        monkeypatch.setattr(os, "getpid", lambda process=process: number + later * process)
        store.count(2, 1)
        store.count(2, 1)
    assert store.counted() == (4 * cache_store._COUNTER_SLOTS, 2 * cache_store._COUNTER_SLOTS)
    monkeypatch.setattr(os, "getpid", lambda: number - 1)
    store.count(1, 0)                   # one more than there are pairs
    assert store.counted()[0] == 4 * cache_store._COUNTER_SLOTS + 1


def test_old_stores_make_room(tmp_path):
    for age in range(4):
        store = create(tmp_path, f"s{age}", KEY, 200, 1 << 24)
        store.put(0, [bytes(100_000)])
        os.utime(store.path, (1000 - age, 1000 - age))
    assert cache_store.make_room(tmp_path, 500_000) == 2
    assert sorted(path.name for path in tmp_path.iterdir()) == ["s0.samples", "s1.samples"]


def test_a_folder_that_cannot_be_written_is_a_reason(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(Unusable, match="file"):
        made(tmp_path / "file" / "below")


def test_nobody_s_record_is_written_over(tmp_path):
    """Many small records from processes that begin at once."""
    store = made(tmp_path, slots=6000)
    reader, writer = os.pipe()

    def write(part):
        os.read(reader, 1)
        for index in range(part, 6000, 4):
            store.put(index, [b"%d" % index])

    children = [forked(lambda part=part: write(part)) for part in range(4)]
    os.write(writer, b"....")
    for child in children:
        os.waitpid(child, 0)
    assert [index for index in range(6000) if store.get(index) != b"%d" % index] == []


def test_a_word_that_points_to_another_sample_is_a_miss(tmp_path):
    """Also where this one was read and found whole before."""
    store = made(tmp_path)
    for index in (3, 4):
        store.put(index, [b"%d" % index])
    assert store.get(3) == b"3"
    with open(store.path, "r+b") as file:
        file.seek(4096 + 8 * 4)
        word = file.read(8)
        file.seek(4096 + 8 * 3)
        file.write(word)
    assert store.get(3) is None and store.get(4) == b"4"


def test_a_store_of_another_user_stays(tmp_path, monkeypatch):
    """Of one who shares the folder: root, say, with the home of the user."""
    store = made(tmp_path)
    store.put(1, [record(1)])
    monkeypatch.setattr(os, "geteuid", lambda: os.stat(store.path).st_uid + 1)
    with pytest.raises(Unusable, match="belongs to another user"):
        made(tmp_path)
    monkeypatch.undo()
    assert whole(made(tmp_path)) == 1
