"""The archive is torch's own, byte for byte, but for its identity; and plain tools read it."""

from __future__ import annotations

import io
import zipfile

import pytest
import torch
from saving_kit import applied

from saturate.checkpoints import archive


def parts(content: bytes) -> tuple[str, list[tuple[str, bytes]]]:
    with zipfile.ZipFile(io.BytesIO(content)) as file:
        names = [info.filename for info in file.infolist()]
        return names[0].partition("/")[0], [(name.partition("/")[2], file.read(name)) for name in names]


def rebuilt(content: bytes, alignment: int = 64) -> bytes:
    folder, records = parts(content)
    assert records[-1][0] == archive.IDENTITY
    entries = archive.plan(folder, [(name, len(data)) for name, data in records[:-1]], alignment)
    made = b"".join(bytes(piece) for piece in archive.pieces(entries, [data for _, data in records[:-1]]))
    assert len(made) == archive.total_bytes(entries)
    return made


def without_identity(content: bytes) -> bytes:
    """With the identity and its checksum (in the descriptor and in the directory) blanked."""
    folder, records = parts(content)
    identity = records[-1][1]
    at = content.rindex(identity)
    entry = content.rindex(b"PK\1\2")
    return content[:at] + b"?" * len(identity) + content[at + len(identity):at + len(identity) + 4] + b"????" \
        + content[at + len(identity) + 8:entry + 16] + b"????" + content[entry + 20:]


STATES = {
    "empty": {},
    "scalars": {"epoch": 3, "name": "ü"},
    "tensors": {"a": torch.arange(1000.0), "b": torch.zeros(0), "c": torch.ones(3, dtype=torch.bool)},
    "views": (lambda base: [base, base[10:], base.view(10, 10).t()])(torch.arange(100)),
    "module": torch.nn.Linear(33, 7),
    "many": [torch.full((index % 7,), index) for index in range(300)],
}


@pytest.mark.parametrize("name", STATES)
@pytest.mark.parametrize("file", ["model.pt", "model", "a.b.ckpt"])
def test_the_same_bytes_as_torch(tmp_path, name, file):
    path = tmp_path / file
    torch.save(STATES[name], path)
    content = path.read_bytes()
    assert without_identity(rebuilt(content)) == without_identity(content)
    assert archive.archive_name(str(path)) == parts(content)[0]


@pytest.mark.parametrize("name", STATES)
def test_the_same_file_as_a_plain_save(tmp_path, name):
    """Through the whole technique, thread and process."""
    path = tmp_path / "model.pt"
    torch.save(STATES[name], path)
    plain = path.read_bytes()
    for mode in ("thread", "process", "sync"):
        with applied(mode):
            torch.save(STATES[name], path)
            assert without_identity(path.read_bytes()) == without_identity(plain), mode
        with zipfile.ZipFile(path) as file:
            assert file.testzip() is None


def test_alignment_is_kept(tmp_path):
    config = pytest.importorskip("torch.utils.serialization.config")
    if not hasattr(config.save, "storage_alignment"):
        pytest.skip("this torch has no choice of alignment")
    before = config.save.storage_alignment
    config.save.storage_alignment = 4096
    try:
        path = tmp_path / "model.pt"
        torch.save(STATES["tensors"], path)
        plain = path.read_bytes()
        with applied("thread"):
            torch.save(STATES["tensors"], path)
            assert without_identity(path.read_bytes()) == without_identity(plain)
    finally:
        config.save.storage_alignment = before


def test_wide_places():
    """Beyond 4 GiB: Python's own reader finds records by the directory, and offsets agree with torch's arithmetic."""
    size = 5 << 30
    entries = archive.plan("a", [("x", 3), ("data/0", size), ("data/1", 10), ("version", 2)])
    assert entries[1].data % 64 == 0 and entries[2].header == entries[1].data + size + 24
    assert entries[3].header == entries[2].data + 10 + 24      # the header lies beyond 32 bits
    wide = archive._wide_field(entries[2])
    assert len(wide) == 12 and len(archive._wide_field(entries[1])) == 20


def test_a_wrong_checksum_is_seen(tmp_path):
    """The check that reads files back can fail."""
    path = tmp_path / "model.pt"
    torch.save(STATES["tensors"], path)
    content = bytearray(path.read_bytes())
    content[entries_of(bytes(content))["data/0"] + 5] ^= 1
    with zipfile.ZipFile(io.BytesIO(bytes(content))) as file:
        assert file.testzip() == "model/data/0"


def entries_of(content: bytes) -> dict[str, int]:
    folder, records = parts(content)
    return {entry.name.partition("/")[2]: entry.data
            for entry in archive.plan(folder, [(name, len(data)) for name, data in records[:-1]])}


def test_readers_of_torch(tmp_path):
    """weights_only, memory-mapped, and with offsets by arithmetic where this torch knows how."""
    path = tmp_path / "model.pt"
    wanted = {"a": torch.arange(5000.0), "b": torch.ones(7)}
    with applied("thread"):
        torch.save(wanted, path)
        for options in ({"weights_only": True}, {"weights_only": True, "mmap": True}):
            found = torch.load(path, **options)
            assert all(torch.equal(found[name], wanted[name]) for name in wanted)
    config = pytest.importorskip("torch.utils.serialization.config")
    if not hasattr(config.load, "calculate_storage_offsets"):
        pytest.skip("this torch reads every offset")
    config.load.calculate_storage_offsets = True
    try:
        found = torch.load(path, mmap=True)
        assert all(torch.equal(found[name], wanted[name]) for name in wanted)
    finally:
        config.load.calculate_storage_offsets = False
