"""Whatever ends the process, a checkpoint that loads is there: the new one where Python still could act, else the one before."""

from __future__ import annotations

import errno
import json
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from saving_kit import applied, same, state

from saturate.checkpoints import durable

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
