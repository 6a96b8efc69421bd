"""What looks at a pending file waits for it; what could announce or outlive it waits; everything else passes."""

from __future__ import annotations

import errno
import glob
import io
import multiprocessing
import os
import pathlib
import pickle
import shutil
import signal
import subprocess
import sys
import threading
import time

import pytest
import torch
from saving_kit import Disk, applied, as_another, same, state
from waiting import until

from saturate.checkpoints import host_memory, seams, writer
from saturate.checkpoints.writer import MOST_PENDING

BROKEN = OSError(errno.EIO, "Input/output error")


@pytest.fixture
def disk(monkeypatch):
    return Disk(monkeypatch)


@pytest.fixture
def pending(tmp_path, disk):
    """A checkpoint run/step2/model.pt on its way, over an older one; the disk is held."""
    folder = tmp_path / "run" / "step2"
    folder.mkdir(parents=True)
    (tmp_path / "run" / "step1").mkdir()
    (tmp_path / "run" / "step1" / "model.pt").write_bytes(b"the last good one")
    (tmp_path / "elsewhere").mkdir()
    with applied("thread"):
        torch.save(state(1), folder / "model.pt")
        assert same(torch.load(folder / "model.pt"), state(1))
        disk.hold()
        torch.save(state(2), folder / "model.pt")
        yield folder / "model.pt"
        disk.go()


LOOKS = {
    "torch.load": lambda path: torch.load(path)["step"] == 2,
    "torch.load, mapped": lambda path: torch.load(path, mmap=True)["step"] == 2,
    "open": lambda path: open(path, "rb").close() is None,
    "io.open": lambda path: io.open(str(path), "rb").close() is None,       # noqa: UP020 - it is another seam
    "os.open": lambda path: os.close(os.open(path, os.O_RDONLY)) is None,
    "bytes": lambda path: os.stat(os.fsencode(path)).st_size > 0,
    "exists": lambda path: os.path.exists(path),
    "getsize": lambda path: os.path.getsize(path) > 1000,
    "isfile": lambda path: os.path.isfile(path),
    "access": lambda path: os.access(path, os.R_OK),
    "Path.stat": lambda path: path.stat().st_size > 1000,
    "Path.read_bytes": lambda path: path.read_bytes()[:2] == b"PK",
    "listdir": lambda path: os.listdir(path.parent) == ["model.pt"],
    "scandir": lambda path: [entry.name for entry in os.scandir(path.parent)] == ["model.pt"],
    "glob": lambda path: glob.glob(str(path.parent / "*")) == [str(path)],
    "Path.glob": lambda path: list(path.parent.glob("*.pt")) == [path],
    "walk": lambda path: list(os.walk(path.parent))[0][2] == ["model.pt"],
    "copy": lambda path: same(torch.load(shutil.copy(path, path.parent.parent.parent / "elsewhere" / "b.pt")), state(2)),
    "copytree": lambda path: len(os.listdir(shutil.copytree(path.parent, path.parent.parent.parent / "elsewhere" / "c"))) == 1,
    "move": lambda path: same(torch.load(shutil.move(path, path.with_name("moved.pt"))), state(2)),
    "replace": lambda path: os.replace(path, path.with_name("n.pt")) is None
    and same(torch.load(path.with_name("n.pt")), state(2)),
    "rename the folder": lambda path: os.rename(path.parent, path.parent.parent / "x") is None
    and same(torch.load(path.parent.parent / "x" / "model.pt"), state(2)),
    "remove": lambda path: os.remove(path) is None and not path.exists(),
    "unlink": lambda path: path.unlink() is None and not path.exists(),
    "rmtree": lambda path: shutil.rmtree(path.parent) is None and not path.parent.exists(),
    "chmod": lambda path: os.chmod(path, 0o600) is None and path.stat().st_mode & 0o777 == 0o600,
    "through a link": lambda path: (path.parent.parent.parent / "elsewhere" / "link").symlink_to(path) is None
    and same(torch.load(path.parent.parent.parent / "elsewhere" / "link"), state(2)),
    "relative": lambda path: os.stat(os.path.relpath(path)).st_size > 1000,
    "dir_fd": lambda path: os.stat("model.pt", dir_fd=os.open(path.parent, os.O_RDONLY)).st_size > 1000,
}

ANNOUNCES = {
    "a pointer beside it": lambda path: (path.parent / "latest").write_text("model.pt"),
    "a pointer above it": lambda path: (path.parent.parent / "latest").write_text("step2"),
    "an appended list": lambda path: open(path.parent.parent / "list", "a").close() is None,
    "a link": lambda path: os.symlink("step2", path.parent.parent / "latest") is None,
    "a link from elsewhere": lambda path: os.symlink(path.parent, path.parent.parent.parent / "elsewhere" / "latest") is None,
    "a relative link from elsewhere": lambda path: os.symlink(b"../run", os.fsencode(path.parents[2] / "elsewhere" / "latest")) is None,
    "a hard link": lambda path: os.link(path, path.parent.parent / "best.pt") is None,
    "a pointer by rename": lambda path: os.rename(path.parent.parent.parent / "elsewhere", path.parent.parent / "done") is None,
    "rotation": lambda path: os.unlink(path.parent.parent / "step1" / "model.pt") is None,
    "rotation of a folder": lambda path: shutil.rmtree(path.parent.parent / "step1") is None,
    "a program": lambda path: subprocess.run(
        [sys.executable, "-S", "-c", f"assert open({str(path)!r}, 'rb').read(2) == b'PK'"], check=True).returncode == 0,
    "a shell": lambda path: os.system("true") == 0,
}

PASSES = {
    "another file": lambda path: (path.parent.parent.parent / "elsewhere" / "log").write_text("x"),
    "reading a neighbour": lambda path: (path.parent.parent / "step1" / "model.pt").read_bytes(),
    "listing another folder": lambda path: os.listdir(path.parent.parent.parent),
    "a stat of its folder": lambda path: os.stat(path.parent),
    "a new folder": lambda path: os.makedirs(path.parent.parent / "step3"),
    "the folder again": lambda path: os.makedirs(path.parent, exist_ok=True),
    "a descriptor": lambda path: os.fstat(0),
    "a link to another folder": lambda path: os.symlink("../run/step1", path.parent.parent.parent / "elsewhere" / "link"),
    "another save": lambda path: torch.save(state(3), path.with_name("other.pt")),
}


@pytest.mark.parametrize("name", LOOKS)
def test_looking_waits(name, pending, disk):
    assert disk.waits(lambda: LOOKS[name](pending))


@pytest.mark.parametrize("name", ANNOUNCES)
def test_announcing_waits(name, pending, disk):
    disk.waits(lambda: ANNOUNCES[name](pending))


@pytest.mark.parametrize("name", PASSES)
def test_the_rest_passes(name, pending, disk):
    began = time.perf_counter()
    PASSES[name](pending)
    assert time.perf_counter() - began < 50 and not disk._free.is_set(), "the disk waits for 60"


def test_the_previous_file_stands_until_then(pending, disk):
    """Seen past the guards, as another process sees it."""
    with as_another():
        assert same(torch.load(pending), state(1))
        assert len(os.listdir(pending.parent)) == 2
    disk.go()
    assert same(torch.load(pending), state(2)) and os.listdir(pending.parent) == ["model.pt"]


def test_two_saves_to_one_path_stay_ordered(pending, disk):
    torch.save(state(3), pending)
    torch.save(state(4), pending.with_name("b.pt"))
    assert disk.waits(lambda: same(torch.load(pending), state(3)))
    assert same(torch.load(pending.with_name("b.pt")), state(4))


def test_many_small_files_wait_for_the_oldest(tmp_path, disk):
    """Each that is on its way holds descriptors, of which a process has few."""
    def save(number):
        torch.save(state(number), tmp_path / f"{number}.pt")

    with applied("thread"):
        disk.hold()
        for number in range(MOST_PENDING):
            save(number)
        disk.waits(lambda: save(MOST_PENDING))
        assert all(same(torch.load(tmp_path / f"{number}.pt"), state(number)) for number in range(MOST_PENDING + 1))


def test_a_thread_that_cannot_be_started_is_started_by_the_next_save(tmp_path, disk, monkeypatch, capsys):
    """Seen: everything that was saved later waited for a thread that was not there."""
    start, failures = threading.Thread.start, [RuntimeError("can't start new thread")]

    def failing(thread):
        if thread.name == "saturate-checkpoints" and failures:
            raise failures.pop()
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", failing)
    with applied("thread"):
        for number in (1, 2):
            torch.save(state(number), tmp_path / f"{number}.pt")
        assert "1.pt is saved plainly: RuntimeError: can't start new thread" in capsys.readouterr().err
        assert all(same(torch.load(tmp_path / f"{number}.pt"), state(number)) for number in (1, 2))


def test_without_a_descriptor_nobody_knows_how_much_memory_is_left(monkeypatch):
    def refused(*arguments, **keywords):
        raise OSError(errno.EMFILE, "Too many open files")

    monkeypatch.setattr("builtins.open", refused)
    assert host_memory.available_bytes() is None


def test_every_step_to_one_path(tmp_path):
    with applied("thread"):
        for seed in range(60):
            torch.save(state(seed), tmp_path / "a.pt")
            if seed % 20 == 0:
                assert same(torch.load(tmp_path / "a.pt"), state(seed))
        os.replace(tmp_path / "a.pt", tmp_path / "b.pt")
        assert same(torch.load(tmp_path / "b.pt"), state(59)) and os.listdir(tmp_path) == ["b.pt"]


# -- failures --------------------------------------------------------------------------------------------------------


def test_a_failed_save_is_raised_by_the_next(pending, disk, capsys):
    disk.error = BROKEN
    disk.go()
    os.listdir(pending.parent)      # waits; a look never raises
    assert f"the checkpoint {pending} was not written: [Errno 5]" in capsys.readouterr().err
    with pytest.raises(OSError) as found:
        torch.save(state(3), pending)
    assert found.value.errno == errno.EIO and found.value.filename == str(pending)
    assert same(torch.load(pending), state(1)) and os.listdir(pending.parent) == ["model.pt"]
    torch.save(state(3), pending)
    assert same(torch.load(pending), state(3))


@pytest.mark.parametrize("announce", [
    lambda path: (path.parent.parent / "latest").write_text("step2"), lambda path: os.replace(path, path.with_name("b.pt")),
    lambda path: torch.load(path), lambda path: os.symlink("step2", path.parent.parent / "latest")])
def test_a_failed_save_is_not_announced(pending, disk, announce):
    disk.error = BROKEN
    disk.go()
    with pytest.raises(OSError, match="Input/output error"):
        announce(pending)
    assert os.listdir(pending.parent.parent) in (["step1", "step2"], ["step2", "step1"])


@pytest.mark.parametrize("where", ["the saving thread", "another thread"])
def test_after_a_failed_save_nobody_removes_the_last_good_one(pending, disk, where):
    """`rmtree(..., ignore_errors=True)` swallowed the error with the first file, and removed the others: neither checkpoint was left."""
    old = pending.parent.parent / "step1"
    for number in range(3):
        with as_another():
            (old / f"shard{number}").write_bytes(b"good")
    disk.error = BROKEN
    disk.go()
    purge = lambda: shutil.rmtree(old, ignore_errors=True)      # noqa: E731
    if where == "another thread":
        thread = threading.Thread(target=purge)
        thread.start()
        thread.join()
    else:
        purge()
        for name in os.listdir(old):
            try:
                os.remove(old / name)
            except OSError:
                pass
    assert sorted(os.listdir(old)) == ["model.pt", "shard0", "shard1", "shard2"]
    with pytest.raises(OSError, match="Input/output error"):
        torch.save(state(3), pending)
    torch.save(state(3), pending)
    shutil.rmtree(old)
    assert same(torch.load(pending), state(3))


def test_a_failed_save_is_no_error_of_what_is_written_elsewhere(pending, disk, tmp_path):
    disk.error = BROKEN
    disk.go()
    os.listdir(pending.parent)
    (tmp_path / "elsewhere" / "log").write_text("x")
    assert (pending.parent.parent / "step1" / "model.pt").read_bytes() == b"the last good one"
    with pytest.raises(OSError, match="Input/output error"):
        torch.save(1, pending)


@pytest.mark.parametrize(("shown", "code"), [(True, 1), (False, 120)])
def test_an_error_that_ended_the_script_is_not_told_once_more(tmp_path, shown, code):
    """Who was told, and went on, has the exit code."""
    script = tmp_path / "train.py"
    script.write_text(
        "import atexit, errno, os, torch\n"
        "from saturate.agent.context import Context\n"
        "from saturate.checkpoints import persist\n"
        "from saturate.techniques import async_checkpoint\n"
        "context = Context(torch)\n"
        "async_checkpoint.apply(context, async_checkpoint.Options('thread'))\n"
        "def full(descriptor, buffers): raise OSError(errno.ENOSPC, 'No space left on device')\n"
        "persist.write = full\n"
        "open('old', 'w').close()\n"
        "torch.save({'step': 1}, 'model.pt')\n"
        + ("os.unlink('old')\n" if shown else "try: os.unlink('old')\nexcept OSError: pass\n"))
    done = subprocess.run([sys.executable, str(script)], cwd=tmp_path, capture_output=True, text=True, timeout=120)
    assert done.returncode == code and (tmp_path / "old").exists(), done.stderr
    assert done.stderr.count("OSError: [Errno 28]") == 1 and ("Exception ignored" in done.stderr) is not shown, done.stderr


def test_a_file_that_is_made_in_memory_waits_for_room(tmp_path, disk, monkeypatch):
    """Sixteen shards of safetensors were held at once, however large."""
    safetensors = pytest.importorskip("safetensors.torch", reason="needs safetensors")
    monkeypatch.setattr(writer, "MOST_STAGED_BYTES", 0)
    with applied("thread"):
        disk.hold()
        for number in range(3):
            safetensors.save_file({"x": torch.full((1000,), float(number))}, tmp_path / f"{number}.safetensors")
        disk.waits(lambda: safetensors.save_file({"x": torch.ones(1000)}, tmp_path / "3.safetensors"))
        monkeypatch.setattr(seams, "available_bytes", lambda: 5000)
        safetensors.save_file({"x": torch.ones(1000)}, tmp_path / "short.safetensors")      # written from the tensors
        assert sorted(safetensors.load_file(tmp_path / "short.safetensors")["x"].tolist()) == [1.0] * 1000


def test_what_was_saved_after_it_is_not_written_either(pending, disk, capsys):
    """A pointer that is itself a checkpoint must not speak of one that is missing."""
    torch.save({"latest": "model.pt"}, pending.with_name("latest.pt"))
    disk.error = BROKEN
    disk.go()
    assert os.listdir(pending.parent) == ["model.pt"]
    assert "nor was" in capsys.readouterr().err
    with pytest.raises(OSError, match="Input/output error"):
        torch.save(1, pending)
    torch.save(state(3), pending)
    assert same(torch.load(pending), state(3))


def test_a_save_at_once_does_not_point_to_what_failed_meanwhile(pending, disk):
    [one] = [found for found in list(writer._alive) if found.pending]
    one.costs.fixed = "sync"
    disk.error = BROKEN
    threading.Timer(0.2, disk.go).start()
    with pytest.raises(OSError, match="Input/output error"):
        torch.save(state(3), pending.with_name("latest.pt"))
    assert not pending.with_name("latest.pt").exists()


def test_a_standard_error_that_raises(pending, disk, monkeypatch):
    """The thread says its line and lives on."""
    monkeypatch.setattr(sys, "stderr", None)
    disk.error = BROKEN
    disk.go()
    os.listdir(pending.parent)
    with pytest.raises(OSError, match="Input/output error"):
        torch.save(state(3), pending)
    torch.save(state(4), pending)
    assert same(torch.load(pending), state(4))


def test_another_thread_is_not_told(pending, disk):
    """A library's own thread would swallow it."""
    disk.error = BROKEN
    disk.go()
    thread = threading.Thread(target=lambda: (pending.parent / "log").write_text("x"))
    thread.start()
    thread.join()
    assert (pending.parent / "log").exists()
    with pytest.raises(OSError, match="Input/output error"):
        torch.save(1, pending)


def test_a_failing_rename_is_a_failure(pending, disk):
    with as_another():
        shutil.rmtree(pending.parent)       # as somebody else would
    disk.go()
    os.path.exists(pending)
    with pytest.raises(FileNotFoundError):
        (pending.parent.parent / "latest").write_text("x")


# -- signals ---------------------------------------------------------------------------------------------------------


def test_deadly_signals_are_held_while_something_is_pending(pending, disk, tmp_path):
    import faulthandler
    import signal

    assert signal.getsignal(signal.SIGTERM) != signal.SIG_DFL
    disk.go()
    os.stat(pending)
    parameter = torch.nn.Parameter(torch.ones(1))
    torch.optim.SGD([parameter], lr=0.1).step()     # the next step gives them back
    assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL
    with open(tmp_path / "trace", "w") as trace:    # a handler that Python does not know of
        faulthandler.register(signal.SIGUSR1, file=trace)
        try:
            disk.hold()
            torch.save(state(3), pending)
            assert signal.getsignal(signal.SIGTERM) != signal.SIG_DFL
            assert signal.getsignal(signal.SIGUSR1) == signal.SIG_DFL
            signal.raise_signal(signal.SIGUSR1)     # would end the tests
        finally:
            disk.go()
            faulthandler.unregister(signal.SIGUSR1)
    assert "Current thread" in (tmp_path / "trace").read_text()


def test_a_handler_that_saves_and_renames_while_the_training_waits(pending, disk, tmp_path):
    import signal

    def handler(number, frame):
        torch.save(state(3), tmp_path / "new")
        threading.Timer(0.1, disk.go).start()
        os.replace(tmp_path / "new", tmp_path / "preempted.pt")

    before = signal.signal(signal.SIGALRM, handler)
    signal.setitimer(signal.ITIMER_REAL, 0.1)
    try:
        os.replace(pending, pending.with_name("last.pt"))
    finally:
        signal.signal(signal.SIGALRM, before)
    assert same(torch.load(tmp_path / "preempted.pt"), state(3)) and same(torch.load(pending.with_name("last.pt")), state(2))


@pytest.mark.parametrize("at", ["before the thread is told", "while it is written", "when it is written"])
def test_a_save_that_is_interrupted_on_its_way_goes_on(pending, disk, tmp_path, monkeypatch, at):
    """By the handler of a signal. Its descriptor stays its own, its memory is not given back twice, and nobody waits for ever."""
    disk.go()
    os.stat(pending)
    [one] = [found for found in list(writer._alive) if not found.closed]
    enqueue, condition = one._enqueue, one._condition

    def interrupted(*job: object) -> None:
        if at == "before the thread is told":
            with condition:         # which wakes nobody
                monkeypatch.setattr(condition, "_waiters", type(condition._waiters)())
                enqueue(*job)
        else:
            number = enqueue(*job)
            while at == "when it is written" and number in one.pending:
                time.sleep(0.01)
        raise KeyboardInterrupt

    if at != "when it is written":
        disk.hold()
    waiters = condition._waiters
    with monkeypatch.context() as patched:
        patched.setattr(one, "_enqueue", interrupted)
        with pytest.raises(KeyboardInterrupt):
            torch.save(state(3), pending)
    condition._waiters = waiters
    with as_another():
        file = open(tmp_path / "another", "wb")         # noqa: SIM115 - it takes the first number that is free
    with file:
        file.write(b"mine")
        file.flush()
        disk.go()
        looking = threading.Thread(target=os.stat, args=(pending,), daemon=True)
        looking.start()
        looking.join(60.0)
        stuck = looking.is_alive()
        with condition:
            condition.notify_all()
    assert not stuck and (tmp_path / "another").read_bytes() == b"mine"
    disk.hold()
    for number in (4, 5):
        torch.save(state(number), tmp_path / f"{number}.pt")
    disk.go()
    assert same(torch.load(pending), state(3))
    assert all(same(torch.load(tmp_path / f"{number}.pt"), state(number)) for number in (4, 5))


def test_our_own_code_does_not_wait_for_what_others_wrapped_in_turn(pending, monkeypatch):
    looks = os.lstat
    monkeypatch.setattr(os, "lstat", lambda *args, **kwargs: looks(*args, **kwargs))
    assert os.listdir(pending.parents[2] / "elsewhere") == []       # its path is made canonical by `os.lstat`


# -- other processes -------------------------------------------------------------------------------------------------


def _child(path: str, results) -> None:
    results.put((os.path.getsize(path), torch.load(path)["step"]))


def test_a_forked_child_waits_by_itself(pending, disk):
    context = multiprocessing.get_context("fork")
    results = context.Queue()
    child = context.Process(target=_child, args=(str(pending), results))
    child.start()                   # the parent does not wait
    time.sleep(0.2)
    assert results.empty()
    disk.go()
    assert results.get(timeout=60)[1] == 2
    child.join()


def _saves_itself(path: str) -> None:
    torch.save(state(9), path)
    os._exit(0)


def test_a_forked_child_does_not_hear_of_what_its_parent_could_not_save(pending, disk, tmp_path):
    disk.error = BROKEN
    disk.go()
    while not [one for one in list(writer._alive) if one.failures]:
        time.sleep(0.01)
    child = os.fork()
    if child == 0:
        code = 1
        try:
            torch.save(state(3), pending.with_name("of_the_child.pt"))
            code = 0
        finally:
            os._exit(code)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    with pytest.raises(OSError, match="Input/output error"):
        torch.save(state(4), pending)


def test_a_forked_child_saves_by_itself(tmp_path, disk):
    with applied("thread"):
        disk.hold()
        torch.save(state(1), tmp_path / "a.pt")
        child = multiprocessing.get_context("fork").Process(target=_saves_itself, args=(str(tmp_path / "b.pt"),))
        child.start()
        child.join(60)
        assert child.exitcode == 0
        with as_another():
            assert same(torch.load(tmp_path / "b.pt"), state(9)) and not os.path.exists(tmp_path / "a.pt")
        disk.go()
    assert same(torch.load(tmp_path / "a.pt"), state(1))


def test_loader_workers_delay_nobody(tmp_path, disk):
    with applied("thread"):
        disk.hold()
        torch.save(state(1), tmp_path / "a.pt")
        loader = torch.utils.data.DataLoader(list(range(8)), batch_size=2, num_workers=2, multiprocessing_context="fork")
        assert sum(batch.sum().item() for batch in loader) == 28
        assert not disk._free.is_set()
        disk.go()


def _program_of_child(path: str) -> None:
    subprocess.run(["cp", path, path + ".run"], check=True)
    os.spawnlp(os.P_WAIT, "cp", "cp", path, path + ".spawned")
    os.replace(path, path + ".renamed")


def test_a_program_of_a_forked_child_waits(pending, disk):
    """Also where the child forks again to start it; and what it renames is the new file."""
    child = multiprocessing.get_context("fork").Process(target=_program_of_child, args=(str(pending),))
    child.start()
    time.sleep(0.2)
    disk.go()
    child.join(60)
    assert child.exitcode == 0
    assert all(same(torch.load(f"{pending}.{name}"), state(2)) for name in ("run", "spawned", "renamed"))


def test_who_waits_for_a_training_that_was_killed_goes_on(tmp_path):
    """Also the child of its child."""
    script = tmp_path / "script.py"
    script.write_text(
        "import os, signal, sys, threading\n"
        "from saving_kit import Disk, applied, pytest, state, torch\n"
        "with applied('thread'):\n"
        "    disk = Disk(pytest.MonkeyPatch())\n"
        "    disk.hold()\n"
        "    torch.save(state(1), 'a.pt')\n"
        "    training = os.getpid()\n"
        "    if not os.fork():\n"
        "        if os.fork():\n"
        "            os.wait(), os._exit(0)\n"
        "        threading.Timer(0.3, os.kill, (training, signal.SIGKILL)).start()\n"
        "        open('seen', 'w').write(str(os.path.exists('a.pt')))\n"
        "        os._exit(0)\n"
        "    signal.pause()\n")
    environment = {**os.environ, "PYTHONPATH": str(pathlib.Path(__file__).parent)}
    assert subprocess.run([sys.executable, str(script)], cwd=tmp_path, env=environment, timeout=60).returncode == -9
    seen = tmp_path / "seen"
    assert until(lambda: seen.exists() and seen.read_text()) == "False"


def test_deadly_signals_are_held_for_what_a_thread_has_saved_from_the_next_step_on(pending, disk, tmp_path):
    """SIGTERM ended the program without the checkpoint, whose save had returned long before."""
    import signal

    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], lr=0.1)
    disk.go()
    os.stat(pending)
    optimizer.step()
    disk.hold()
    thread = threading.Thread(target=torch.save, args=(state(3), pending))
    thread.start()
    thread.join()
    assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL, "only the main thread may"
    optimizer.step()
    assert signal.getsignal(signal.SIGTERM) != signal.SIG_DFL
    disk.go()
    os.stat(pending)
    optimizer.step()
    assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL


def test_a_script_that_replaces_getpid_dies_of_its_own_signal(tmp_path):
    """Another process got the signal, and the training went on."""
    script = tmp_path / "script.py"
    script.write_text(
        "import os, signal, time\n"
        "from saving_kit import applied, state, torch\n"
        "own, other = os.getpid(), os.fork()\n"
        "if not other:\n"
        "    time.sleep(20)\n"
        "    os._exit(0)\n"
        "try:\n"
        "    with applied('thread'):\n"
        "        torch.save(state(1), 'a.pt')\n"
        "        os.getpid = lambda: other\n"
        "        os.kill(own, signal.SIGTERM)\n"
        "finally:\n"
        "    print('went on', os.waitpid(other, os.WNOHANG))\n")
    environment = {**os.environ, "PYTHONPATH": str(pathlib.Path(__file__).parent)}
    ended = subprocess.run([sys.executable, str(script)], cwd=tmp_path, env=environment, timeout=60, stdout=subprocess.DEVNULL)
    assert ended.returncode == -signal.SIGTERM and same(torch.load(tmp_path / "a.pt"), state(1))


def test_names_that_a_module_took_wait_too(tmp_path, disk, monkeypatch):
    """`from os import replace, _exit` before the technique came; undone with the rest."""
    import types

    taken = types.ModuleType("taken")
    exec("from os import replace, _exit; from io import open; import posix", vars(taken))
    before = dict(vars(taken))
    monkeypatch.setitem(sys.modules, "taken", taken)
    with applied("thread"):
        assert taken.replace is os.replace and taken._exit is os._exit and taken.open is open
        assert taken.posix.stat is not os.stat
        disk.hold()
        torch.save(state(1), tmp_path / "a.tmp")
        disk.waits(lambda: taken.replace(tmp_path / "a.tmp", tmp_path / "a.pt"))
        assert same(torch.load(tmp_path / "a.pt"), state(1))
    assert vars(taken) == before


@pytest.mark.parametrize(("module", "name"), [(os, "remove"), (os, "listdir"), (os, "_exit"), (io, "open")])
def test_another_process_can_be_sent_a_function(module, name):
    """By its name, as `Pool.map(os.remove, files)` does."""
    with applied("thread"):
        sent = pickle.dumps(getattr(module, name))
    assert pickle.loads(sent) is getattr(module, name)


def test_undo_leaves_nothing(tmp_path, monkeypatch):
    import builtins

    def seams():
        names = [name for name in dir(os) if callable(getattr(os, name))]
        return {**{name: getattr(os, name) for name in names}, "builtins": builtins.open, "io": io.open,
                "popen": subprocess.Popen._execute_child, "start": multiprocessing.process.BaseProcess.start,
                "cpu": "cpu" in vars(torch.UntypedStorage), "zip": torch.serialization._open_zipfile_writer,
                "barrier": torch.distributed.barrier,
                "sets": [set(getattr(os, name)) for name in dir(os) if isinstance(getattr(os, name), set)]}

    before, threads = seams(), threading.active_count()
    descriptors = len(os.listdir("/proc/self/fd"))
    with applied("process"):
        torch.save(state(1), tmp_path / "a.pt")
        assert seams() != before
    assert seams() == before and threading.active_count() == threads
    assert len(os.listdir("/proc/self/fd")) == descriptors
    assert same(torch.load(tmp_path / "a.pt"), state(1))


def test_a_helper_that_is_killed(tmp_path):
    """What it was writing is written by the thread, and the next helper is a new one."""
    import signal

    from saturate.checkpoints import writer

    with applied("process"):
        torch.save(state(1), tmp_path / "a.pt")
        assert same(torch.load(tmp_path / "a.pt"), state(1))
        [helper] = [one.helper for one in writer._alive if one.helper is not None]
        os.kill(helper.pid, signal.SIGKILL)
        torch.save(state(2), tmp_path / "a.pt")
        assert same(torch.load(tmp_path / "a.pt"), state(2))
        torch.save(state(3), tmp_path / "a.pt")
        assert same(torch.load(tmp_path / "a.pt"), state(3))


def test_what_a_helper_that_ended_has_written_is_written_again(tmp_path, monkeypatch):
    class Ended:
        def write(self, descriptor: int, *_: object) -> None:
            os.write(descriptor, b"x" * (1 << 22))
            raise writer.persist.HelperGone

        def close(self) -> None:
            pass

    monkeypatch.setattr(writer.persist, "Helper", Ended)
    with applied("process"):
        torch.save(state(1), tmp_path / "model.pt")
        assert same(torch.load(tmp_path / "model.pt"), state(1)) and os.path.getsize(tmp_path / "model.pt") < 1 << 22


def test_a_helper_ends_at_once_whoever_else_holds_its_socket(monkeypatch):
    """As a process does that a library in C forked, or that was forked while the thread used it."""
    from saturate.checkpoints import persist, writer

    monkeypatch.setattr(persist, "_END_S", 120.0)       # that long it is waited for where it does not hear of the end
    helper = persist.Helper()
    held = os.dup(helper._socket.fileno())
    began = time.monotonic()
    helper.close()
    os.close(held)
    assert time.monotonic() - began < 60, "nobody waits for it that long"
    until(lambda: not writer._began(helper.pid), "it goes on")


def test_a_script_that_waits_for_all_its_children_does_not_meet_a_helper(tmp_path):
    script = ("import os; from saturate.checkpoints import persist\n"
              "helper = persist.Helper()\n"
              "os.kill(helper.pid, 0)\n"
              "try:\n    os.wait()\nexcept ChildProcessError:\n    print('none')\n"
              "helper.close()\n")
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=20)
    assert done.stdout == "none\n", done.stderr


def test_a_helper_that_does_not_start(tmp_path, monkeypatch):
    def refuse(*_, **__):
        raise OSError(errno.EAGAIN, "Resource temporarily unavailable")

    with applied("process"):
        monkeypatch.setattr(subprocess, "Popen", refuse)
        torch.save(state(1), tmp_path / "a.pt")
        assert same(torch.load(tmp_path / "a.pt"), state(1))
        monkeypatch.undo()


def test_litter_of_the_killed_is_removed(tmp_path):
    from saturate.checkpoints.target import LITTER

    (tmp_path / f"{LITTER}0123").write_bytes(b"half")
    with applied("thread"):
        torch.save(state(1), tmp_path / "a.pt")
        assert os.listdir(tmp_path) == ["a.pt"]


def test_litter_in_use_is_nobody_elses(tmp_path, pending):
    """A second process that saves into the same folder leaves the first one's file alone."""
    from saturate.checkpoints import target

    code = f"from saturate.checkpoints import target; target.remove_litter({str(pending.parent)!r})"
    with as_another():
        (pending.parent / f"{target.LITTER}0").touch()
        subprocess.run([sys.executable, "-c", code], check=True)
        assert sorted(name[:6] for name in os.listdir(pending.parent)) == [".satur", "model."]


class _Globber:
    """As the class behind `Path.glob` of Python 3.13."""

    scandir = staticmethod(os.scandir)


_Globber.__module__ = "glob"


def test_a_class_of_python_s_own_that_holds_one_of_the_functions(tmp_path, disk, monkeypatch):
    """`sorted(folder.glob("*.pt"))[-1]` right after a save was the checkpoint before."""
    monkeypatch.setattr(glob, "_Globber", _Globber, raising=False)
    original = vars(_Globber)["scandir"]
    with applied("thread"):
        disk.hold()
        torch.save(state(1), tmp_path / "a.pt")
        found = disk.waits(lambda: [entry.name for entry in _Globber.scandir(tmp_path)])
        assert found == ["a.pt"]
    assert vars(_Globber)["scandir"] is original
