"""The store: checkpoints come back bit by bit, damage is named, two writers do no harm."""

from __future__ import annotations

import io
import json
import os
import random
import shutil
import struct
import threading

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from saturate.checkpoints import chunks, collect, deltas, manifests
from saturate.checkpoints.chunks import PackWriter, Store
from saturate.checkpoints.recorder import Recorder
from saturate.errors import CheckpointDamaged, EnvironmentProblem

KIB = 1 << 10


def floats(seed: int, count: int = 64 * KIB) -> bytearray:
    """Normal numbers as float32."""
    noise = random.Random(seed)
    return bytearray(struct.pack(f"<{count}f", *(noise.gauss(0, 1) for _ in range(count))))


def nudged(data: bytearray, seed: int) -> bytearray:
    """The same numbers after a small step: low bytes of the mantissa change."""
    low = random.Random(seed).randbytes(len(data) // 4)
    new = bytearray(data)
    new[0::4] = low
    return new


def record(store: Store, parts: list[bytes], previous=None, chain: int = 8, path: str = "/runs/ckpt_1.pt", number: int = 1):
    with store.locked(alone=False):
        store.refresh()
        recorder = Recorder(store, previous, chain)
        for part in parts:
            recorder.write(part)
        return recorder.finish(path, number)


def content(store: Store, manifest) -> bytes:
    with manifests.opened(store, manifest) as stream:
        return stream.read()


@pytest.fixture
def store(tmp_path):
    with Store.create(tmp_path / "store") as store:
        yield store


def fresh(store: Store) -> Store:
    """The same store as another process sees it."""
    return Store.open(store.folder)


def test_a_checkpoint_comes_back_byte_by_byte(store):
    parts = [b"head", bytes(floats(1)), b"mid" * 9, bytes(70 * KIB), b"", b"tail"]
    manifest = record(store, parts)
    assert content(fresh(store), manifests.read(fresh(store), manifest.id)) == b"".join(parts)
    assert manifest.file_bytes == sum(map(len, parts))


def test_a_chain_of_twenty_comes_back_and_each_link_loads_alone(store):
    data, previous, saved = floats(1), None, []
    for step in range(21):
        data = nudged(data, step)
        previous = record(store, [b"h", bytes(data), str(step).encode()], previous, chain=20, number=step + 1)
        saved.append((previous, b"h" + bytes(data) + str(step).encode()))
    deepest = max(entry.depth for entry in store.index.values())
    assert deepest == 20
    for manifest, expected in reversed(saved):
        assert content(fresh(store), manifest) == expected
    assert saved[-1][0].new_bytes < 0.4 * saved[0][0].file_bytes      # a quarter of the bytes changed


def test_chains_end(store):
    data, previous = floats(1), None
    for step in range(8):
        data = nudged(data, step)
        previous = record(store, [bytes(data)], previous, chain=3)
    assert max(entry.depth for entry in store.index.values()) == 3
    assert sum(entry.depth == 0 and entry.raw_bytes == 64 * KIB for entry in store.index.values()) == 2 * 4


def test_what_did_not_change_is_not_written_again(store):
    data = bytes(floats(1))
    first = record(store, [data, b"1"])
    second = record(store, [data, b"2"], first)
    assert second.new_bytes < 2 * KIB < 64 * KIB < first.new_bytes
    assert second.segments == first.segments


def test_a_tensor_that_moved_is_found_by_its_content(store):
    a, b = bytes(floats(1)), bytes(floats(2, 32 * KIB))
    first = record(store, [a, b])
    assert record(store, [b, b"new", a], first).new_bytes < 4 * KIB


@settings(max_examples=30, deadline=None, suppress_health_check=list(HealthCheck))
@given(st.lists(st.tuples(st.integers(0, 3), st.integers(0, 200 * KIB)), max_size=6), st.data())
def test_any_file_comes_back_read_in_any_way(tmp_path, parts, data):
    with Store.create(tmp_path / "any") as store:
        written = [random.Random(seed).randbytes(size) for seed, size in parts]
        manifest = record(store, written)
        whole = b"".join(written)
        stream = manifests.opened(store, manifest)
        for _ in range(5):
            place = data.draw(st.integers(0, len(whole) + 5))
            count = data.draw(st.integers(0, 100 * KIB))
            assert stream.seek(place) == place
            assert stream.read(count) == whole[place : place + count]
        assert stream.seek(-min(3, len(whole)), io.SEEK_END) == len(whole) - min(3, len(whole))


def test_two_writers_at_once(store):
    """Ranks that save at the same time, the same bytes among others."""
    common = bytes(floats(0))
    done, problems = [], []

    def save(rank: int) -> None:
        try:
            with Store.open(store.folder) as mine:
                previous = None
                for step in range(4):
                    parts = [common, bytes(floats(100 * rank + step, 20 * KIB))]
                    previous = record(mine, parts, previous, path=f"/runs/rank{rank}_{step}.pt")
                    done.append((previous, b"".join(parts)))
        except Exception as error:  # noqa: BLE001 - shown by the assertion below
            problems.append(error)

    threads = [threading.Thread(target=save, args=(rank,)) for rank in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not problems
    for manifest, expected in done:
        assert content(fresh(store), manifest) == expected


def test_two_that_lean_on_each_other_do_not_lock_each_other_up(store):
    """Writers that met the same two chunks in opposite order: of each there is one that stands by itself and one that leans
    on the other."""
    x, y = bytes(floats(1, 16 * KIB)), bytes(floats(2, 16 * KIB))
    dx, dy = chunks.digest_of(x), chunks.digest_of(y)
    both = deltas.xor(x, y)
    for name, digest, payload, base in (("0", dy, y, None), ("1", dx, x, None), ("2", dx, both, dy), ("3", dy, both, dx)):
        writer = PackWriter(store)
        writer.name = f"{name}.pack"        # in the order in which they are read
        writer.add(digest, payload, deltas.AS_IS, len(payload), base, int(base is not None))
        writer.commit()
    assert fresh(store).read(dx) == x and fresh(store).read(dy) == y


# -- damage ----------------------------------------------------------------------------------------------------------


def test_every_flipped_byte_of_a_pack_is_noticed(store):
    manifest = record(store, [bytes(floats(1, 20 * KIB))])
    [pack] = store.packs.iterdir()
    good = pack.read_bytes()
    expected = content(fresh(store), manifest)
    for place in random.Random(0).sample(range(len(good)), 40) + [0, len(good) - 1]:
        damaged = bytearray(good)
        damaged[place] ^= 1 << place % 8
        pack.write_bytes(damaged)
        try:
            assert content(fresh(store), manifest) == expected      # a byte that nothing needs, if anything
            raise AssertionError(f"byte {place} of {len(good)} was flipped and nobody noticed")
        except CheckpointDamaged:
            pass        # what is wanted
    pack.write_bytes(good[: len(good) // 2])
    with pytest.raises(CheckpointDamaged):
        content(fresh(store), manifest)


def test_a_missing_pack_is_noticed_and_its_chunks_are_stored_again(store):
    data = bytes(floats(1))
    first = record(store, [data])
    leaning = record(store, [bytes(nudged(floats(1), 5))], first)
    packs = {entry.pack for entry in store.index.values()}
    assert len(packs) == 2
    [old] = packs - {store.index[manifests.chunks_of(store, leaning.segments[0])[0]].pack}
    (store.packs / old).unlink()
    with pytest.raises(CheckpointDamaged, match="missing"):
        content(fresh(store), leaning)
    with fresh(store) as again:
        assert content(again, record(again, [bytes(nudged(floats(1), 5))], leaning)) == bytes(nudged(floats(1), 5))


@pytest.mark.parametrize("change, said", [
    (lambda m: m.update(schema=2), "format 1"),
    (lambda m: m["segments"][0].__setitem__(2, "../../../etc/passwd"), "address"),
    (lambda m: m["segments"][0].__setitem__(1, 10**30), "segment"),
    (lambda m: m.update(file_bytes=1), "add up"),
    (lambda m: m.pop("glue"), "missing"),
    (lambda m: m.update(more=1), "kind"),
    (lambda m: m.update(segments=7), "kind"),
    (lambda m: m.update(path=None), "kind"),
    (lambda m: m.update(number=-1), "kind"),
])
def test_a_manifest_that_is_not_one_is_refused(store, change, said):
    """Even with a right digest: anybody can write that."""
    manifest = record(store, [bytes(floats(1))])
    fields = json.loads(manifests.encoded(manifest).partition(b"\n")[0])
    change(fields)
    line = json.dumps(fields).encode()
    (store.manifests / f"{manifest.id}.json").write_bytes(line + b"\n" + chunks.digest_of(line).hex().encode() + b"\n")
    with pytest.raises(CheckpointDamaged) as caught:
        manifests.read(store, manifest.id)
    assert said in caught.value.cause


@pytest.mark.parametrize("name", ["../../etc/passwd", "", "20260101T000000.000000-0123456g", "a" * 5000, "x/../y"])
def test_an_id_is_no_path(store, name):
    with pytest.raises(CheckpointDamaged, match="not the id"):
        manifests.read(store, name)


@settings(max_examples=200, deadline=None, suppress_health_check=list(HealthCheck))
@given(st.binary(max_size=400))
def test_fuzzed_manifests_raise_value_error_only(text):
    with pytest.raises(ValueError):
        manifests.decoded(text)


JSON = st.recursive(st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
                    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=5), inner, max_size=4), max_leaves=8)
FIELDS = ["id", "saved", "path", "series", "number", "file_bytes", "new_bytes", "save_s", "segments", "glue"]


@settings(max_examples=300, deadline=None, suppress_health_check=list(HealthCheck))
@given(st.fixed_dictionaries({name: JSON for name in FIELDS}), st.sampled_from([1, 1, 1, "1", None]))
def test_fuzzed_fields_raise_value_error_only(fields, schema):
    line = json.dumps({"schema": schema, **fields}).encode()
    with pytest.raises(ValueError):
        manifests.decoded(line + b"\n" + chunks.digest_of(line).hex().encode())


@settings(max_examples=200, deadline=None, suppress_health_check=list(HealthCheck))
@given(st.binary(max_size=300), st.integers(0, 400), st.booleans())
def test_fuzzed_packs_raise_value_error_only(tmp_path, body, count, signed):
    """Also those whose index has a right digest and holds anything."""
    path = tmp_path / "x.pack"
    index = body[: len(body) // chunks.ENTRY.size * chunks.ENTRY.size]
    footer = chunks.FOOTER.pack(count if not signed else len(index) // chunks.ENTRY.size,
                                chunks.digest_of(index), chunks.MAGIC)
    path.write_bytes(chunks.MAGIC + index + footer)
    try:
        for entry in chunks.read_index(path).values():
            assert entry.offset + entry.stored_bytes <= path.stat().st_size
    except ValueError:
        pass        # the only way out


def test_a_chain_that_bites_its_tail_ends(store):
    x = bytes(floats(1, 16 * KIB))
    digest = chunks.digest_of(x)
    writer = PackWriter(store)
    writer.add(digest, bytes(len(x)), deltas.AS_IS, len(x), digest, 1)
    writer.commit()
    with pytest.raises(CheckpointDamaged, match="damaged"):
        fresh(store).read(digest)


def test_a_store_of_another_version_is_refused(store):
    (store.folder / "store.json").write_text('{"schema": 99, "kind": "saturate-checkpoints"}')
    with pytest.raises(CheckpointDamaged, match="format 99"):
        Store.open(store.folder)
    for text in ("", "[]", "{}", "\x00", '{"kind": 1}'):
        (store.folder / "store.json").write_text(text)
        with pytest.raises(CheckpointDamaged, match="not that of"):
            Store.open(store.folder)


def test_where_there_is_no_store(tmp_path):
    with pytest.raises(EnvironmentProblem, match="no checkpoint store"):
        Store.open(tmp_path)


def test_a_store_without_its_packs_or_with_a_folder_for_a_file(store):
    shutil.rmtree(store.packs)
    with pytest.raises(EnvironmentProblem, match="cannot be read"):
        Store.open(store.folder)
    (store.folder / "store.json").unlink()
    (store.folder / "store.json").mkdir()
    with pytest.raises(EnvironmentProblem, match="cannot be read"):
        Store.open(store.folder)


def test_a_store_that_cannot_be_changed_can_be_read(store):
    manifest = record(store, [b"x" * 100])
    (store.folder / "lock").unlink()
    with fresh(store) as again:
        with again.locked(alone=False):
            assert content(again, manifest) == b"x" * 100
        with pytest.raises(EnvironmentProblem, match="cannot be changed"), again.locked(alone=True):
            pass


def test_removal_waits_for_a_writer(store):
    with fresh(store) as other, store.locked(alone=False), pytest.raises(EnvironmentProblem, match="in use"):
        other.locked(alone=True, wait_s=0.05).__enter__()
    with store.locked(alone=True, wait_s=0.05):
        pass


def test_what_a_pack_writer_gave_up_leaves_nothing(store):
    writer = PackWriter(store)
    writer.add(bytes(32), b"x", deltas.AS_IS, 1, None, 0)
    writer.abandon()
    assert os.listdir(store.packs) == []
    assert PackWriter(store).commit() == 0
    assert os.listdir(store.packs) == []


def test_memory_is_bounded(tmp_path):
    with Store.create(tmp_path / "store", remember_bytes=100_000) as store:
        for seed in range(5):
            store.remember(bytes([seed]) * 32, bytes(40_000))
        assert store._memory_bytes == 80_000 and len(store._memory) == 2


def test_the_newest_of_a_series_is_what_was_saved_last_whatever_the_clock_says(store, monkeypatch):
    """gc keeps the newest: after a clock was set back, a checkpoint that had just been saved was the first to go."""
    now = 1_800_000_000 * 10**9
    monkeypatch.setattr(manifests.time, "time_ns", lambda: now)
    first = record(store, [b"a" * 70_000])
    now -= 3600 * 10**9
    second = record(store, [b"b" * 70_000], previous=first, number=2)
    third = record(store, [b"c" * 70_000], previous=second, number=3)
    assert all(manifests.is_id(one.id) for one in (first, second, third)) and first.id < second.id < third.id
    found = collect.plan(store, 1, None, [store.folder.parent])
    assert [one.id for one, _ in found.kept] == [third.id] and {one.id for one in found.removed} == {first.id, second.id}
    assert manifests.new_id(after="no id at all") > "2027" and manifests.new_id(after="99999999T999999.000000-00000000") > "2026"
