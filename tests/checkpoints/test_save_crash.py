"""Whatever ends the process, a checkpoint that loads is there: the new one where Python still could act, else the one before."""

from __future__ import annotations

import errno
import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from saving_kit import applied, on_disk, same, state

from saturate.checkpoints import durable, persist, seams

PROGRAM = Path(__file__).with_name("crashing.py")


def run(*arguments: object, timeout: float = 300.0) -> dict:
    done = subprocess.run([sys.executable, str(PROGRAM), *map(str, arguments)], capture_output=True, text=True, timeout=timeout)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_a_link_that_leads_to_itself_is_refused_as_open_refuses_it(tmp_path):
    (tmp_path / "last.pt").symlink_to("last.pt")
    with pytest.raises(OSError, match="Too many levels of symbolic links"):
        durable.replace(tmp_path / "last.pt", lambda stream: stream.write(b"new"))
    assert [path.name for path in tmp_path.iterdir()] == ["last.pt"] and (tmp_path / "last.pt").is_symlink()


@pytest.mark.parametrize("mode", ["thread", "sync"])
def test_a_checkpoint_is_on_the_disk_before_it_has_its_name(tmp_path, mode, monkeypatch):
    """Else a power failure leaves an empty file where a whole one was, and neither the old nor the new one loads."""
    done = on_disk(monkeypatch)
    with applied(mode):
        torch.save(state(1), tmp_path / "model.pt")
        torch.load(tmp_path / "model.pt")           # waits
        done.clear()
        torch.save(state(2), tmp_path / "model.pt")
        torch.load(tmp_path / "model.pt")
    assert done == [("sync", "new"), ("name", "model.pt"), ("sync", tmp_path.name)]


def test_the_shards_of_a_distributed_checkpoint_are_on_the_disk_before_the_old_ones_go(tmp_path, monkeypatch):
    folder, done = tmp_path / "model", on_disk(monkeypatch)
    with applied("thread"):
        dcp.save(state(1), checkpoint_id=folder)
        os.listdir(folder)                          # waits
        (old,) = (path.name for path in folder.glob("*.distcp"))
        done.clear()
        dcp.save(state(2), checkpoint_id=folder)
        os.listdir(folder)
    (new,) = (path.name for path in folder.glob("*.distcp"))
    named, gone = done.index(("name", ".metadata")), done.index(("remove", old))
    assert new != old and {("sync", new), ("sync", folder.name), ("sync", ".metadata.tmp")} <= set(done[:named]), done
    assert ("sync", folder.name) in done[named:gone], done


@pytest.mark.parametrize("mode", ["thread", "process"])
def test_twenty_kills(tmp_path, mode):
    found = run("kills", mode, 20, 1, tmp_path)
    assert found["lost"] == found["backwards"] == 0 and found["advanced"] == 20, found
    assert found["files"] <= 4, "litter piles up"


def test_kills_while_a_distributed_checkpoint_replaces_another(tmp_path):
    found = run("shards", "thread", 20, 1, tmp_path)
    assert found["lost"] == found["backwards"] == 0 and found["advanced"] == 20, found
    assert found["files"] <= 4, "shards of killed saves pile up"


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["thread", "sync"])
def test_two_hundred_kills_of_distributed_checkpoints(tmp_path, mode):
    found = run("shards", mode, 200, 2, tmp_path, timeout=1200)
    assert found["lost"] == found["backwards"] == 0 and found["advanced"] == 200, found


@pytest.mark.slow
def test_lost_distributed_checkpoints_would_be_seen(tmp_path):
    """torch alone writes into the old shards."""
    assert run("shards", "plain", 20, 1, tmp_path)["lost"] > 0


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["thread", "process", "sync", "auto"])
def test_two_hundred_kills(tmp_path, mode):
    found = run("kills", mode, 200, 2, tmp_path, timeout=1200)
    assert found["lost"] == found["backwards"] == 0 and found["advanced"] == 200, found


@pytest.mark.slow
def test_kills_would_be_seen(tmp_path):
    """torch alone truncates the file first."""
    assert run("kills", "plain", 20, 1, tmp_path)["lost"] > 0


def test_every_end_flushes(tmp_path):
    found = run("ends", tmp_path)
    codes = {name: status for name, (status, _) in found.items()}
    assert codes == {
        "return": 0, "sys.exit": 3, "exception": 1, "os._exit": 4, "SIGTERM": -signal.SIGTERM, "SIGHUP": -signal.SIGHUP,
        "SIGINT": -signal.SIGINT, "SIGTERM from outside": -signal.SIGTERM, "exec": 0, "abort": -signal.SIGABRT,
        "SIGTERM, handled": 7}
    assert {name: step for name, (_, step) in found.items()} == dict.fromkeys(found, 5)


@pytest.fixture
def small_disk(tmp_path):
    """6 MB of tmpfs."""
    folder = tmp_path / "disk"
    folder.mkdir()
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=6m", "none", folder], capture_output=True).returncode:
        pytest.skip("mounting is not permitted here")
    yield folder
    subprocess.run(["umount", "--lazy", folder], check=True)


@pytest.mark.parametrize("mode", ["thread", "process"])
def test_a_full_disk(small_disk, mode):
    files = [1, 2, ["model.pt", "other.pt"]]
    found = run("full", mode, small_disk)
    assert found == {"next save": [errno.ENOSPC, *files], "end": [120, *files], "handled": [0, *files]}


@pytest.mark.parametrize("mode", ["thread", "process"])
def test_a_disk_that_another_file_has_filled_meanwhile(small_disk, mode):
    """The save is on its way when room is missing beside the old file: it is written over that, as the script alone would."""
    files = [2, ["model.pt", "other.pt"]]
    assert run("beside", mode, small_disk) == {"next save": [0, 3, *files], "end": [0, 2, *files], "handled": [0, 3, *files]}


def test_a_disk_without_room_for_the_new_file_beside_the_old_one(small_disk, capfd):
    """A plain save would go on, so this one does; what it needs, and that it is not atomic, is said."""
    path = small_disk / "model.pt"
    with applied("thread"):
        torch.save(state(1, 3 << 18), path)
        path.chmod(0o640)
        torch.save(state(2, 7 << 17), path)
        assert same(torch.load(path), state(2, 7 << 17)) and list(small_disk.iterdir()) == [path]
        assert path.stat().st_mode & 0o777 == 0o640
        said = capfd.readouterr().err
        assert f"no room for the new {path} beside the old one" in said and "NOT atomic" in said and "are missing" in said
        inode = path.stat().st_ino
        torch.save(state(3, 1 << 18), path)         # fits
        assert same(torch.load(path), state(3, 1 << 18)) and path.stat().st_ino != inode
        assert "NOT atomic" not in capfd.readouterr().err


def test_who_puts_a_new_file_in_the_place_of_the_old_one_never_writes_over_it(small_disk):
    """As Lightning does: where that fails, the old one is whole."""
    path = small_disk / "model.pt"
    with applied("thread"):
        torch.save(state(1, 3 << 18), path)
        torch.load(path)
        save = seams.Saves(torch, None, None).atomic_save(None)
        with pytest.raises(OSError, match="No space left"):
            save(state(2, 7 << 17), path)
        assert same(torch.load(path), state(1, 3 << 18)) and list(small_disk.iterdir()) == [path]


def test_a_quota_leaves_room_for_what_is_no_larger(tmp_path, monkeypatch):
    """How much is left of one nobody tells: the old file's room is all that is sure."""
    write, refused = persist.write, []

    def limited(descriptor, buffers):
        if not refused:
            refused.append(descriptor)
            raise OSError(errno.EDQUOT, "Disk quota exceeded")
        return write(descriptor, buffers)

    path = tmp_path / "model.pt"
    with applied("thread"):
        torch.save(state(1), path)
        torch.load(path)
        monkeypatch.setattr(persist, "write", limited)
        torch.save(state(2), path)
        assert same(torch.load(path), state(2))
        refused.clear()
        torch.save(state(3, 1 << 17), path)
        os.listdir(tmp_path)            # waits
        with pytest.raises(OSError, match="Disk quota exceeded"):
            torch.save(state(4), path)
        assert same(torch.load(path), state(2))


def test_a_disk_that_is_full_already(small_disk, capfd):
    """The save itself says so; and where a plain one would have written over what is there, that this one needs room beside it."""
    path = small_disk / "model.pt"
    with applied("thread"):
        torch.save(state(1, 1 << 18), path)
        assert same(torch.load(path), state(1, 1 << 18))
        with pytest.raises(OSError, match="No space left"):
            torch.save(state(2, 3 << 19), path)
        assert same(torch.load(path), state(1, 1 << 18)) and len(list(small_disk.iterdir())) == 1
    assert f"no room for the new {path} beside the old one" in capfd.readouterr().err


def test_a_distributed_checkpoint_on_a_full_disk(small_disk):
    """What was there stays, and of what failed nothing does."""
    path = small_disk / "model"
    with applied("thread"):
        dcp.save(state(1, 1 << 18), checkpoint_id=path)
        first = sorted(path.iterdir())
        dcp.save(state(2, 3 << 19), checkpoint_id=path)
        with pytest.raises(OSError, match="No space left"):     # by the first of them that comes when it is known
            torch.save(state(3, 8), small_disk / "pointer.pt")
            assert list(small_disk.iterdir()) == [path]
            torch.save(state(3, 8), small_disk / "other.pt")
        assert sorted(path.iterdir()) == first and not (small_disk / "pointer.pt").exists()
        found = state(0, 1 << 18)
        dcp.load(found, checkpoint_id=path)
        assert same(found, state(1, 1 << 18))
