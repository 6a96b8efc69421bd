"""Which saves go to the store, and that whatever goes wrong the script gets its plain save."""

from __future__ import annotations

import io
import os
import pickle
import shutil
import subprocess
import threading
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")

from saturate.checkpoints import keeper, manifests, pointer  # noqa: E402
from saturate.checkpoints.chunks import Store  # noqa: E402
from saturate.errors import CheckpointDamaged  # noqa: E402

load = pointer.loading(torch.load)


class Job:
    """Something to save: a large part that stays and a small one that changes."""

    def __init__(self, folder: Path, moving: int = 20_000, still: int = 400_000):
        self.folder, self.lines = folder, []
        self.frozen, self.adapter = torch.randn(still), torch.randn(moving)
        self.keeper = keeper.Keeper(folder / "store", 8, 1 << 24, self.lines.append)

    def state(self) -> dict:
        return {"frozen": self.frozen, "adapter": self.adapter.clone(), "step": 7}

    def save(self, name: str) -> dict:
        self.adapter.add_(0.01)
        state = self.state()
        self.keeper.save(str(self.folder / name), lambda target: torch.save(state, target))
        return state

    def named(self, name: str) -> bool:
        return pointer.read(self.folder / name) is not None


def equal(a: dict, b: dict) -> bool:
    return a.keys() == b.keys() and all(torch.equal(v, b[k]) if isinstance(v, torch.Tensor) else v == b[k] for k, v in a.items())


@pytest.fixture
def job(tmp_path):
    torch.manual_seed(0)
    return Job(tmp_path)


def test_two_plain_saves_then_the_store_and_everything_loads(job):
    states = {f"ckpt_{step}.pt": job.save(f"ckpt_{step}.pt") for step in range(6)}
    assert [job.named(name) for name in states] == [False, False, True, True, True, True]
    assert "incremental saving would write" in job.lines[0] and len(job.lines) == 1
    for name, state in states.items():
        for weights_only in (True, False):
            assert equal(load(job.folder / name, weights_only=weights_only), state)
    assert sum(m.new_bytes for m in job.keeper.own[1:]) < 0.1 * sum(m.file_bytes for m in job.keeper.own[1:])


def test_each_loads_when_all_others_are_gone(job):
    states = {f"ckpt_{step}.pt": job.save(f"ckpt_{step}.pt") for step in range(5)}
    for step in (0, 1, 2, 3):
        os.unlink(job.folder / f"ckpt_{step}.pt")
    assert equal(load(job.folder / "ckpt_4.pt"), states["ckpt_4.pt"])


def test_where_everything_changes_it_says_so_and_stays_away(tmp_path):
    job = Job(tmp_path)
    for step in range(4):
        job.frozen, job.adapter = torch.randn(400_000), torch.randn(20_000)
        job.save(f"ckpt_{step}.pt")
    assert not any(job.named(f"ckpt_{step}.pt") for step in range(4))
    assert ["will not help this job" in line for line in job.lines] == [True]
    assert not (tmp_path / "store").exists()


def test_small_files_and_single_ones_stay_plain(tmp_path):
    job = Job(tmp_path, moving=100, still=1000)
    for step in range(4):
        job.save(f"rng_{step}.pth")
    assert not any(job.named(f"rng_{step}.pth") for step in range(4)) and job.lines == []
    large = Job(tmp_path)
    large.save("final.pt")
    large.keeper.close()
    assert equal(torch.load(tmp_path / "final.pt"), large.state()) and large.lines == []


def test_at_the_end_the_newest_of_each_series_is_plain(job):
    states = {f"{word}_{step}.pt": job.save(f"{word}_{step}.pt") for step in range(4) for word in ("model", "optimizer")}
    job.keeper.close()
    assert [name for name in states if job.named(name)] == ["model_2.pt", "optimizer_2.pt"]
    for name in ("model_3.pt", "optimizer_3.pt"):
        assert equal(torch.load(job.folder / name), states[name])
    assert "saves wrote" in job.lines[-1]


def test_a_script_that_replaces_getpid_has_plain_files_at_the_end_as_well(job, monkeypatch):
    for step in range(5):
        job.save(f"ckpt_{step}.pt")
    assert job.named("ckpt_4.pt")
    monkeypatch.setattr(os, "getpid", lambda: 42)
    job.keeper.close()
    assert not job.named("ckpt_4.pt")


def test_a_save_after_the_end_is_plain(job):
    """A handler of the script's own may run at exit after ours."""
    for step in range(4):
        job.save(f"ckpt_{step}.pt")
    job.keeper.close()
    said = len(job.lines)
    state = job.save("ckpt_4.pt")
    overwritten = job.save("ckpt_2.pt")         # a pointer stood there
    assert equal(torch.load(job.folder / "ckpt_4.pt"), state) and equal(torch.load(job.folder / "ckpt_2.pt"), overwritten)
    assert len(job.lines) == said and job.keeper.store is None


def test_at_the_end_the_newest_is_plain_under_every_name_that_it_was_given(job, monkeypatch):
    for move in ("rename", "replace", "link"):
        monkeypatch.setattr(os, move, job.keeper.following(getattr(os, move), keeps=move == "link"))
    (job.folder / "run").mkdir()
    monkeypatch.chdir(job.folder)
    for step in range(8):
        state = job.save("run/ck.tmp")
        os.replace("run/ck.tmp", os.fsencode(f"run/ck_{step}.pt"))
    assert job.keeper.problem == "" and job.named("run/ck_7.pt"), "what was renamed is not gone"
    os.link("run/ck_7.pt", "run/twin.pt")
    (job.folder / "run" / "ck_7.pt").rename(job.folder / "run" / "last.pt")
    shutil.move("run", "done")
    job.keeper.close()
    assert [path.name for path in sorted((job.folder / "done").iterdir()) if pointer.read(path)] == [f"ck_{n}.pt" for n in range(2, 7)]
    for name in ("last.pt", "twin.pt"):
        assert equal(torch.load(job.folder / "done" / name), state)


def test_the_next_run_goes_on_where_this_one_ended(job):
    for step in range(4):
        job.save(f"ckpt_{step}.pt")
    job.keeper.close()
    again = Job(job.folder)
    again.frozen, again.adapter = job.frozen, job.adapter
    state = again.save("ckpt_4.pt")
    assert again.named("ckpt_4.pt") and again.keeper.own[0].new_bytes < 0.2 * again.keeper.own[0].file_bytes
    assert again.keeper.own[0].number == 3
    assert equal(load(job.folder / "ckpt_4.pt"), state)


def test_a_file_that_is_overwritten_does_not_fill_the_disk(tmp_path):
    """Deltas lean on what was overwritten, so the store grows; it must stop while it is small."""
    job = Job(tmp_path, moving=300_000)
    for _ in range(12):
        state = job.save("last.pt")
    assert "more room" in job.lines[-1]
    assert not job.named("last.pt") and equal(torch.load(tmp_path / "last.pt"), state)
    size = sum(path.stat().st_size for path in (tmp_path / "store").rglob("*") if path.is_file())
    assert size < 4 * (tmp_path / "last.pt").stat().st_size


@pytest.mark.parametrize("renames", [False, True])
def test_processes_that_share_a_store_do_not_answer_for_each_other(tmp_path, renames):
    """As ranks do that save a part each. One took what all had stored for its own, and blamed the script."""
    torch.manual_seed(0)
    jobs = [Job(tmp_path, moving=200_000, still=200_000) for _ in range(6)]
    for step in range(8):
        for job, letter in zip(jobs, "abcdef"):
            job.adapter = torch.randn(200_000)
            name = f"part_{letter}_{step}.pt"
            state = job.save(f"{name}.tmp" if renames else name)
            if renames:
                job.keeper.following(os.replace, keeps=False)(tmp_path / f"{name}.tmp", tmp_path / name)
            assert equal(load(tmp_path / name), state)
    assert [job.keeper.problem for job in jobs] == [""] * 6, jobs[0].lines
    assert all(job.named(f"part_{letter}_7.pt") for job, letter in zip(jobs, "abcdef"))


def test_of_processes_that_share_a_store_the_one_that_overwrites_stops(tmp_path):
    keeps, overwrites = (Job(tmp_path, moving=300_000) for _ in range(2))
    for step in range(12):
        keeps.save(f"ckpt_{step}.pt")
        overwrites.save("last.pt")
    assert keeps.keeper.problem == "" and "more room" in overwrites.lines[-1]


def test_without_saturate_the_error_says_what_to_do(job):
    for step in range(3):
        job.save(f"ckpt_{step}.pt")
    for weights_only in (True, False):
        with pytest.raises((ModuleNotFoundError, pickle.UnpicklingError), match="saturate checkpoint export FILE"):
            torch.load(job.folder / "ckpt_2.pt", weights_only=weights_only)


def test_all_ways_to_name_the_file_and_to_load_it(job):
    states = [job.save(f"ckpt_{step}.pt") for step in range(3)]
    path = job.folder / "ckpt_2.pt"
    assert equal(load(str(path), mmap=True), states[2])
    assert equal(load(path, map_location="cpu", weights_only=True), states[2])
    with open(path, "rb") as stream:
        assert equal(load(stream), states[2])
    buffer = io.BytesIO()
    torch.save(states[0], buffer)
    buffer.seek(0)
    assert equal(load(buffer), states[0])
    assert equal(load(io.BytesIO(path.read_bytes())), states[2])        # a script may read the file by itself
    with pytest.raises(FileNotFoundError):
        load(job.folder / "nothing.pt")


def test_an_open_file_whose_name_leads_to_another_is_loaded_itself(job, monkeypatch):
    states = [job.save(f"ckpt_{step}.pt") for step in range(3)]
    (job.folder / "other").mkdir()
    os.rename(job.folder / "ckpt_1.pt", job.folder / "other" / "ckpt_2.pt")
    monkeypatch.chdir(job.folder / "other")
    with open("ckpt_2.pt", "rb") as stream:
        monkeypatch.chdir(job.folder)
        assert equal(load(stream), states[1])


def test_a_copy_by_shutil_is_plain(job, monkeypatch, capsys):
    states = [job.save(f"ckpt_{step}.pt") for step in range(3)]
    monkeypatch.setattr(shutil, "copyfile", pointer.copying(shutil.copyfile))
    shutil.copy2(job.folder / "ckpt_2.pt", job.folder / "best.pt")
    assert equal(torch.load(job.folder / "best.pt"), states[2]) and job.named("ckpt_2.pt")
    shutil.copy(job.folder / "ckpt_0.pt", job.folder / "other.pt")
    assert equal(torch.load(job.folder / "other.pt"), states[0])
    with pytest.raises(shutil.SameFileError):
        shutil.copyfile(job.folder / "ckpt_2.pt", job.folder / "ckpt_2.pt")
    shutil.rmtree(job.folder / "store")
    capsys.readouterr()
    shutil.copyfile(job.folder / "ckpt_2.pt", job.folder / "dangling.pt")
    assert (job.folder / "dangling.pt").read_bytes() == (job.folder / "ckpt_2.pt").read_bytes()
    assert not capsys.readouterr().err


def test_a_tree_that_was_moved_is_found(job):
    states = [job.save(f"ckpt_{step}.pt") for step in range(3)]
    moved = job.folder.with_name("moved")
    os.rename(job.folder, moved)
    assert equal(load(moved / "ckpt_2.pt"), states[2])


# -- what goes wrong -------------------------------------------------------------------------------------------------


def test_what_the_script_cannot_save_raises_as_ever_and_stops_nothing(job):
    for step in range(3):
        job.save(f"ckpt_{step}.pt")
    with pytest.raises((AttributeError, pickle.PicklingError)):
        job.keeper.save(str(job.folder / "ckpt_3.pt"), lambda target: torch.save({"f": lambda: 1}, target))
    job.save("ckpt_4.pt")
    assert job.named("ckpt_4.pt") and not job.keeper.problem


@pytest.mark.parametrize("harm", ["gone", "garbage", "other version", "a file"])
def test_a_store_that_is_spoiled_means_plain_saves(job, harm):
    for step in range(3):
        job.save(f"ckpt_{step}.pt")
    job.keeper.close()
    shutil.rmtree(job.folder / "store" / "packs")
    if harm == "garbage":
        (job.folder / "store" / "store.json").write_bytes(b"\xff\x00")
    elif harm == "other version":
        (job.folder / "store" / "store.json").write_text('{"schema": 2, "kind": "saturate-checkpoints"}')
    elif harm == "a file":
        shutil.rmtree(job.folder / "store")
        (job.folder / "store").touch()
    again = Job(job.folder)
    states = [again.save(f"ckpt_{step}.pt") for step in range(3, 7)]
    for step, state in enumerate(states, 3):
        assert equal(torch.load(job.folder / f"ckpt_{step}.pt"), state)
    assert sum("plain from now on" in line for line in again.lines) == 1


def test_a_store_that_fails_during_a_save_leaves_the_old_checkpoint_until_the_new_one_is_there(job, monkeypatch):
    for _ in range(3):
        before = job.save("last.pt")
    assert job.named("last.pt")
    from saturate.checkpoints.recorder import Recorder

    def full(self, *arguments):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Recorder, "finish", full)
    real = torch.save

    def failing(state, target):
        if isinstance(target, Recorder):
            return real(state, target)
        if isinstance(target, str):
            Path(target).write_bytes(b"half of it")
        raise OSError(28, "No space left on device")

    with pytest.raises(OSError):
        job.keeper.save(str(job.folder / "last.pt"), lambda target: failing(job.state(), target))
    assert equal(load(job.folder / "last.pt"), before)
    state = job.save("last.pt")          # there is room again
    assert equal(load(job.folder / "last.pt"), state)
    assert [path.name for path in job.folder.glob(".saturate*")] == []


def test_a_disk_without_room_for_two_files_takes_the_new_one_in_the_place_of_the_old_one(tmp_path):
    """As the script alone does. Torch says of a stream that ends early that its archive is unfinished, not that the disk is full."""
    disk = tmp_path / "disk"
    disk.mkdir()
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=2560k", "none", disk], capture_output=True).returncode:
        pytest.skip("mounting is not permitted here")
    try:
        job = Job(disk)         # 1.7 MB in a file
        states = [job.save("last.pt") for _ in range(4)]
        assert "No space left" in job.lines[-1] or "unexpected pos" in job.lines[-1], job.lines
        assert equal(torch.load(disk / "last.pt"), states[-1])
        assert sorted(path.name for path in disk.iterdir()) == ["last.pt", "store"]
        job.keeper.close()
    finally:
        subprocess.run(["umount", "--lazy", disk], check=True)


def test_an_interrupted_save_leaves_nothing_behind(job):
    for _ in range(3):
        before = job.save("last.pt")

    def interrupted(target):
        target.write(bytes(100_000))
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        job.keeper.save(str(job.folder / "last.pt"), interrupted)
    assert equal(load(job.folder / "last.pt"), before)
    assert not list((job.folder / "store" / "packs").glob(".saturate*"))
    assert not job.keeper.problem


@pytest.mark.parametrize("saving_for_one", [False, True])
def test_ctrl_c_in_the_middle_of_torchs_own_writing_is_one(job, monkeypatch, saving_for_one):
    """torch then says that its archive is not whole, and the training went on as if nobody had pressed anything. What a script saves because
    it was interrupted is saved, though."""
    for _ in range(3):
        before = job.save("last.pt")
    write, calls, at = keeper.Recorder.write, [0], [0]

    def interrupted(recorder, data):
        calls[0] += 1
        if calls[0] == at[0]:
            raise KeyboardInterrupt
        return write(recorder, data)

    def stopped():
        try:
            if saving_for_one:
                raise KeyboardInterrupt("the first")
        except KeyboardInterrupt:
            job.save("last.pt")
        else:
            job.save("last.pt")

    monkeypatch.setattr(keeper.Recorder, "write", interrupted)
    stopped()
    last = calls[0]
    before = load(job.folder / "last.pt")
    assert last > 5 and not job.keeper.problem
    for place in range(1, last + 1):
        calls[0], at[0] = 0, place
        with pytest.raises(KeyboardInterrupt) as found:
            stopped()
        assert found.value.args == (), place
        assert equal(load(job.folder / "last.pt"), before) and not job.keeper.problem, place


def test_links_pipes_and_read_only_files_are_not_replaced(job):
    for step in range(3):
        job.save(f"ckpt_{step}.pt")
    (job.folder / "ckpt_9.pt").write_bytes(b"old")
    os.link(job.folder / "ckpt_9.pt", job.folder / "twin")
    state = job.save("ckpt_9.pt")
    assert equal(torch.load(job.folder / "twin"), state), "a plain save writes through every name of a file"
    (job.folder / "real").mkdir()
    os.symlink(job.folder / "real" / "x.pt", job.folder / "ckpt_10.pt")
    state = job.save("ckpt_10.pt")
    assert (job.folder / "ckpt_10.pt").is_symlink() and equal(load(job.folder / "ckpt_10.pt"), state)


def test_permissions_stay(job):
    for _ in range(2):
        job.save("last.pt")
    (job.folder / "last.pt").chmod(0o600)
    job.save("last.pt")
    assert job.named("last.pt") and (job.folder / "last.pt").stat().st_mode & 0o777 == 0o600


def test_threads_save_one_after_the_other(job):
    for step in range(2):
        job.save(f"ckpt_{step}.pt")
    state, failures = job.state(), []

    def save(number):
        try:
            job.keeper.save(str(job.folder / f"ckpt_{number}.pt"), lambda target: torch.save(state, target))
        except Exception as error:  # noqa: BLE001 - shown by the assertion below
            failures.append(error)

    threads = [threading.Thread(target=save, args=(number,)) for number in range(2, 8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures and not job.keeper.problem
    assert all(equal(load(job.folder / f"ckpt_{number}.pt"), state) for number in range(2, 8))


def test_a_forked_child_saves_plainly(job):
    for step in range(3):
        job.save(f"ckpt_{step}.pt")
    pid = os.fork()
    if pid == 0:
        job.save("ckpt_3.pt")
        job.keeper.close()
        os._exit(0)
    assert os.waitpid(pid, 0)[1] == 0
    assert not job.named("ckpt_3.pt") and job.named("ckpt_2.pt")


@pytest.mark.parametrize("content", [b"", b"PK", b"PK\x03\x04archive/saturate.json", b"\x80\x02", b"x" * 20_000])
def test_what_is_no_pointer_is_none(tmp_path, content):
    (tmp_path / "x").write_bytes(content)
    assert pointer.read(tmp_path / "x") is None
    assert pointer.read(tmp_path) is None


def test_a_pointer_that_names_something_else_opens_nothing(job):
    """It is data that anybody can write."""
    for step in range(3):
        job.save(f"ckpt_{step}.pt")
    good = (job.folder / "ckpt_2.pt").read_bytes()
    name = pointer.read(job.folder / "ckpt_2.pt").checkpoint
    (job.folder / "x.pt").write_bytes(good.replace(name.encode(), b"../" * 10 + b"x" * (len(name) - 30)))
    assert pointer.read(job.folder / "x.pt") is None        # the archive's own checksum
    for made in (pointer.Pointer("/etc", "..", name), pointer.Pointer(str(job.folder / "store"), ".", "../../x"),
                 pointer.Pointer("", "", ""), pointer.Pointer("/proc/self/root", ".", name)):
        with pytest.raises(CheckpointDamaged), pointer.resolved(made, job.folder / "x.pt"):
            pass


def _unreadable(store):
    (store / "store.json").unlink()
    (store / "store.json").mkdir()


def _of_another_version(store):
    (store / "store.json").write_text('{"schema": 99, "kind": "saturate-checkpoints"}')


def _flipped(store):
    for pack in (store / "packs").glob("*.pack"):
        content = bytearray(pack.read_bytes())
        content[len(content) // 4] ^= 1
        pack.write_bytes(content)


@pytest.mark.parametrize("harm, said, remedy", [
    (_unreadable, "Is a directory", "leave to read"),
    (_of_another_version, "format 99", "the version of saturate that wrote it"),
    (_flipped, "not those that were saved", "checkpoint verify"),
])
def test_a_store_that_cannot_be_used_is_not_called_gone(job, capsys, harm, said, remedy):
    """And a copy of a checkpoint that cannot be read does not silently become one of its pointer."""
    for step in range(3):
        job.save(f"ckpt_{step}.pt")
    job.keeper.store.close()
    harm(job.folder / "store")
    with pytest.raises(CheckpointDamaged) as raised:
        load(job.folder / "ckpt_2.pt")
    assert said in raised.value.cause and remedy in raised.value.remedy
    capsys.readouterr()
    pointer.copying(shutil.copyfile)(job.folder / "ckpt_2.pt", job.folder / "copy.pt")
    assert job.named("copy.pt")
    told = capsys.readouterr().err
    assert said in told and "not copied" in told and told.count("\n") == 1


def test_a_manifest_never_says_where_to_write(job):
    for step in range(3):
        job.save(f"ckpt_{step}.pt")
    with Store.open(job.folder / "store") as store:
        [manifest] = manifests.all_of(store)[0]
        assert manifest.path == str(job.folder / "ckpt_2.pt")
    (job.folder / "elsewhere").mkdir()
    os.rename(job.folder / "ckpt_2.pt", job.folder / "elsewhere" / "x.pt")
    pointer.plain(job.folder / "elsewhere" / "x.pt")
    assert not (job.folder / "ckpt_2.pt").exists() and not pointer.read(job.folder / "elsewhere" / "x.pt")


@pytest.mark.parametrize("name, value", [("name", "ckpt_2.pt"), ("tell", lambda: 0), ("tell", None)])
def test_things_that_are_no_files_go_to_torch(job, name, value):
    """Whatever was given: torch.load says what is wrong with it."""
    class Odd:
        pass

    setattr(Odd, name, staticmethod(value) if callable(value) else value)
    with pytest.raises((AttributeError, TypeError)):
        load(Odd())
    closed = open(__file__, "rb")       # noqa: SIM115 - closed in the next line
    closed.close()
    with pytest.raises(ValueError):
        load(closed)


def test_names_that_never_come_again_do_not_fill_the_memory(job):
    for letter in "abcdefghijkl":
        job.save(f"{letter}.pt")
    assert sum(series.first is not None for series in job.keeper.series.values()) == keeper.MOST_SAMPLES
    for letter in "klklkl":
        job.save(f"{letter}.pt")
    assert job.named("k.pt") and job.named("l.pt") and not job.named("a.pt")
