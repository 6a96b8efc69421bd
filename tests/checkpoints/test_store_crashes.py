"""kill -9 anywhere, a full disk, a file size limit, a folder that cannot be written: what was saved stays loadable."""

from __future__ import annotations

import contextlib
import itertools
import os
import random
import resource
import select
import shutil
import signal
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from saving_kit import on_disk

torch = pytest.importorskip("torch")

from saturate.checkpoints import checks, collect, durable, keeper, manifests, pointer  # noqa: E402
from saturate.checkpoints.chunks import Store  # noqa: E402

load = pointer.loading(torch.load)


class Job:
    """Saves `last.pt` again and again, and every third time a checkpoint of its own name."""

    def __init__(self, folder: Path):
        self.folder = folder
        self.frozen, self.moving = torch.zeros(60_000), torch.zeros(260_000)
        self.keeper = keeper.Keeper(folder / "store", 4, 1 << 22, lambda line: None)

    def save(self, step: int) -> None:
        self.moving.uniform_().add_(step)
        state = {"frozen": self.frozen, "moving": self.moving, "step": step}
        names = ["last.pt", *([f"ckpt_{step}.pt"] if step % 3 == 0 else [])]
        for name in names:
            self.keeper.save(str(self.folder / name), lambda target: torch.save(state, target))


def test_what_a_killed_save_leaves_goes_with_the_next_one_and_with_gc(tmp_path):
    """In the store, and beside the checkpoint, where a save that is plain again writes; what another process writes now stays."""
    job = Job(tmp_path)
    for step in range(3):
        job.save(step)
    assert pointer.read(tmp_path / "last.pt") is not None
    store = tmp_path / "store"
    for collected in (False, True):
        left = [folder / f"{durable.TEMPORARY}{number}" for number, folder in enumerate((tmp_path, store, store / "packs", store / "manifests"))]
        for path in left:
            path.write_bytes(bytes(1000))
        name, descriptor = durable.open_locked(str(tmp_path))
        if collected:
            with Store.open(store) as opened, opened.locked(alone=True):
                plan = collect.plan(opened, 1, None, [])
                assert sorted(plan.leftovers) == sorted(left) and plan.freed_bytes >= 4000
                collect.carry_out(opened, plan)
        else:
            Job(tmp_path).save(3)
        assert not any(path.exists() for path in left) and os.path.exists(name)
        os.close(descriptor)
        os.unlink(name)


def test_what_a_checkpoint_needs_is_on_the_disk_before_anything_names_it(tmp_path, monkeypatch):
    """Its chunks, then its manifest, then the file at its path; and gc forgets a checkpoint before it removes what that needs. What a kill
    leaves does not show it: the system keeps whatever was written."""
    job, store = Job(tmp_path), tmp_path / "store"
    for step in range(4):
        job.save(step)
    before = {path.name for path in store.rglob("*.*")}
    done = on_disk(monkeypatch)
    job.save(4)
    pack, manifest = ({path.name for path in (store / folder).iterdir()} - before for folder in ("packs", "manifests"))
    assert done == [("sync", "new"), ("name", *pack), ("sync", "packs"), ("sync", "new"), ("name", *manifest), ("sync", "manifests"),
                    ("sync", "new"), ("name", "last.pt"), ("sync", tmp_path.name)]
    (tmp_path / "last.pt").unlink()
    done.clear()
    with Store.open(store) as opened, opened.locked(alone=True):
        collect.carry_out(opened, collect.plan(opened, 0, None, [tmp_path]))
    removed = [name for what, name in done if what == "remove"]
    forgotten = done.index(("sync", "manifests"))
    assert any(name.endswith(".pack") for name in removed) and done[-1] == ("sync", "packs")
    assert all(name.endswith(".json") == (done.index(("remove", name)) < forgotten) for name in removed), done


def step_in(path: Path) -> int:
    """The step that a checkpoint holds; it must be of one piece."""
    state = load(path, weights_only=True)
    step = state["step"]
    assert state["moving"].min() >= step and state["moving"].max() <= step + 1
    return step


def in_child(work: Callable[[int], None]) -> tuple[int, int]:
    """Fork; the child runs `work(descriptor to report to)`. Its pid, and where to read its reports."""
    reader, writer = os.pipe()
    pid = os.fork()
    if pid == 0:
        code = 1
        with contextlib.suppress(BaseException):        # whatever it is, this child must not go on as a second pytest
            os.close(reader)
            work(writer)
            code = 0
        os._exit(code)
    os.close(writer)
    return pid, reader


def kill_after(pid: int, reader: int, delay_s: float) -> int:
    """Kill after the first report and a delay; the last step that was reported, -1 for none. The child must be at work until then."""
    select.select([reader], [], [], 60)
    time.sleep(delay_s)
    os.kill(pid, signal.SIGKILL)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == -signal.SIGKILL, "it had ended by itself: nothing was killed"
    reports = b""
    while part := os.read(reader, 1 << 16):
        reports += part
    os.close(reader)
    return int.from_bytes(reports[len(reports) // 4 * 4 - 4 : len(reports) // 4 * 4], "little") if len(reports) >= 4 else -1


def saving(folder: Path, first: int) -> Callable[[int], None]:
    def work(descriptor: int) -> None:
        job = Job(folder)
        job.keeper.save("/dev/null", lambda target: None)
        for step in itertools.count(first):     # until it is killed, however late that comes
            job.save(step)
            os.write(descriptor, step.to_bytes(4, "little"))

    return work


def collecting(folder: Path) -> Callable[[int], None]:
    def work(descriptor: int) -> None:
        while True:
            with Store.open(folder / "store") as store, store.locked(alone=True):
                collect.carry_out(store, collect.plan(store, 1, None, [folder]))
            os.write(descriptor, bytes(4))

    return work


def whole(folder: Path) -> None:
    """Nothing in the store is damaged, and every file that names a checkpoint loads."""
    with Store.open(folder / "store") as store, store.locked(alone=False):
        assert [check for check in checks.check_store(store) if check.outcome == "damaged"] == []
    for path in folder.glob("*.pt"):
        step_in(path)


def survive_kills(folder: Path, kills: int, seed: int) -> None:
    keeper.MOST_ROOM = 1e9          # a child's: the file is overwritten for ever here, and the store shall go on growing
    draw = random.Random(seed)
    job = Job(folder)
    confirmed = 6       # the third of `ckpt_*`, the first that goes to the store: plain saves, which kill -9 may tear, are over
    for step in range(confirmed + 1):
        job.save(step)
    job.keeper.store.close()
    assert not job.keeper.problem and pointer.read(folder / f"ckpt_{confirmed}.pt") is not None
    for turn in range(kills):
        if turn % 4 == 3:
            assert kill_after(*in_child(collecting(folder)), draw.random() * 0.05) == 0, "nothing was collected before the kill"
        else:
            before = step_in(folder / "last.pt")
            assert before >= confirmed
            last = kill_after(*in_child(saving(folder, before + 1)), draw.random() * 0.15)
            assert last > before, "nothing was saved before the kill"
            confirmed = last
            assert step_in(folder / "last.pt") in (confirmed, confirmed + 1)
            assert pointer.read(folder / "last.pt") is not None, "saves are plain: no store is being killed"
            for path in sorted(folder.glob("ckpt_*.pt"))[:-3]:
                path.unlink()
        whole(folder)
    with Store.open(folder / "store") as store, store.locked(alone=True):
        collect.carry_out(store, collect.plan(store, 1, None, [folder]))
        assert not list((folder / "store").rglob(".saturate*"))
    whole(folder)


@pytest.fixture
def unbounded():
    room = keeper.MOST_ROOM
    yield
    keeper.MOST_ROOM = room


def test_twenty_kills_during_saves_and_gc(tmp_path, unbounded):
    survive_kills(tmp_path, 20, seed=1)


@pytest.mark.slow
def test_two_hundred_kills_during_saves_and_gc(tmp_path, unbounded):
    survive_kills(tmp_path, 200, seed=2)


def test_the_kills_would_find_a_manifest_that_comes_too_early(tmp_path, unbounded, monkeypatch):
    """The test above can fail: here the manifest and the pointer are written before the chunks."""
    from saturate.checkpoints.recorder import Recorder

    real = Recorder.finish

    def early(self, path, number):
        commit, self.pack.commit = self.pack.commit, lambda: 0
        manifest = real(self, path, number)
        pointer.write(Path(path), self.store, manifest)
        time.sleep(0.02)
        commit()
        return manifest

    monkeypatch.setattr(Recorder, "finish", early)
    with pytest.raises((AssertionError, Exception)) as caught:
        survive_kills(tmp_path, 40, seed=3)
    assert "missing" in str(caught.value) or "damaged" in str(caught.value)


@pytest.mark.parametrize("limit_kib", [300, 1100, 1300])
def test_a_file_size_limit_leaves_what_was_there(tmp_path, limit_kib):
    """The limit strikes in the store, in the plain save, or in neither."""
    job = Job(tmp_path)
    for step in range(4):
        job.save(step)
    job.keeper.store.close()

    def work(descriptor: int) -> None:
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit_kib << 10, limit_kib << 10))
        mine = Job(tmp_path)
        try:
            mine.save(4)
        except (OSError, RuntimeError):
            os.write(descriptor, b"no")
        else:
            os.write(descriptor, b"yes")

    pid, reader = in_child(work)
    assert os.waitpid(pid, 0)[1] == 0
    assert step_in(tmp_path / "last.pt") == (4 if os.read(reader, 9) == b"yes" else 3)
    os.close(reader)
    assert not list(tmp_path.glob(".saturate*"))
    whole(tmp_path)


@pytest.mark.skipif(os.geteuid() != 0, reason="mounts a small disk")
def test_a_full_disk(tmp_path):
    """Saves go on until the disk is full, and raise as torch.save does; everything that was saved loads."""
    disk = tmp_path / "disk"
    disk.mkdir()
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=6m", "none", str(disk)], capture_output=True).returncode:
        pytest.skip("mounting is not permitted here")
    try:
        job, saved = Job(disk), -1
        with pytest.raises((OSError, RuntimeError)):
            for step in range(0, 100):
                job.save(step)
                saved = step
        job.keeper.store.close()
        assert saved >= 2
        assert step_in(disk / "last.pt") in (saved, saved + 1)
        with Store.open(disk / "store") as store, store.locked(alone=False):
            assert [check for check in checks.check_store(store) if check.outcome == "damaged"] == []
            assert manifests.all_of(store)[0]
    finally:
        subprocess.run(["umount", str(disk)], check=True)
        shutil.rmtree(disk)


def test_two_processes_save_to_one_store(tmp_path):
    folders = [tmp_path / "a", tmp_path / "b"]
    children = []
    for folder in folders:
        folder.mkdir()

        def work(descriptor: int, folder: Path = folder) -> None:
            job = Job(folder)
            job.keeper.folder = tmp_path / "store"
            for step in range(8):
                job.save(step)

        children.append(in_child(work))
    for pid, reader in children:
        assert os.waitpid(pid, 0)[1] == 0
        os.close(reader)
    for folder in folders:
        assert step_in(folder / "last.pt") == 7 and step_in(folder / "ckpt_6.pt") == 6
    with Store.open(tmp_path / "store") as store, store.locked(alone=False):
        assert [check for check in checks.check_store(store) if check.outcome == "damaged"] == []
