"""Without overlays: mode, owner, times and extended attributes of the user's files, and the user's files in /dev/shm."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest
from isolation_kit import SOURCE, script, snapshot
from kernel import landlock_abi, listener_refused

from saturate.trial import planning, supervise
from saturate.trial.layers import discard

GUARDED = bool(landlock_abi()) and not listener_refused()
needs_guard = pytest.mark.skipif(not GUARDED, reason="no Landlock here, or no seccomp filter that asks")

_SITE = """
import json, os, sys
if os.environ.get("TEST_REDIRECT"):
    sys.path.insert(0, os.environ["TEST_SOURCE"])
    from saturate.agent import redirect
    redirect.install_from_plan(json.loads(os.environ["TEST_REDIRECT"]))
"""


class World:
    def __init__(self, top: Path):
        self.home, self.work = top / "home", top / "work"
        for folder in (self.home, self.work):
            folder.mkdir()
        (self.home / "key").write_text("secret")
        (self.home / "key").chmod(0o600)
        (self.home / "read-only").write_text("r")
        (self.home / "read-only").chmod(0o444)
        os.symlink("key", self.home / "link")
        self.runs: list[Path] = []

    def run(self, *argv: str, agent: bool = True) -> str:
        """What `argv` prints under a real supervisor, in mode "intercept"."""
        run_dir = self.work / ".saturate" / "runs" / f"run{len(self.runs)}"
        self.runs.append(run_dir)
        environ = {"HOME": str(self.home), "PATH": os.environ["PATH"], "OMP_NUM_THREADS": "1", "RUN": str(run_dir),
                   "PYTHONDONTWRITEBYTECODE": "1"}
        plan = planning.plan(self.work, run_dir, list(argv), environ | {planning.OVERRIDE: "intercept"})
        assert plan.attributes == GUARDED, plan.reason
        if agent:
            site = script(run_dir, "sitecustomize.py", _SITE).parent
            environ |= {"PYTHONPATH": str(site), "TEST_REDIRECT": json.dumps(plan.redirect), "TEST_SOURCE": SOURCE}
        spec = run_dir / "spec.json"
        spec.write_text(json.dumps({"argv": argv, "cwd": str(self.work), "environment": environ | plan.environment, "import_root": SOURCE,
                                    "log": str(run_dir / "log"), "cage": plan.to_json()}))
        done = _supervised(spec)
        assert done["ended"] == "exit", done
        return (run_dir / "log").read_text()


def _supervised(spec: Path) -> dict[str, object]:
    with subprocess.Popen([sys.executable, "-I", "-S", supervise.__file__, str(spec)], stdin=subprocess.PIPE,
                          stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as process:
        assert process.stdout and process.stdin
        said = process.stdout.read()        # standard input stays open: its end would end the trial
        return json.loads(said)


@pytest.fixture
def world(tmp_path: Path) -> Iterator[World]:
    made = World(tmp_path)
    yield made
    for run_dir in made.runs:
        discard(run_dir)


@needs_guard
def test_other_programs_cannot_change_attributes_of_the_users_files(world: World) -> None:
    before = snapshot(world.home)
    said = world.run("sh", "-c", """
        chmod 777 "$HOME/key"; touch -d 2001-01-01 "$HOME/key"; chown 1:1 "$HOME/key"; chown -h 1:1 "$HOME/link"
        cd "$HOME"; chmod 777 key; chmod 777 ./link; chmod 700 .; cd /; chmod 777 "${HOME#/}/../home/key"
        echo ended
    """, agent=False)
    assert snapshot(world.home) == before, said
    assert said.count("Operation not permitted") >= 7 and said.endswith("ended\n"), said


@needs_guard
def test_every_call_is_known(world: World) -> None:
    code = script(world.work, "calls.py", """
        import ctypes, os, sys
        libc = ctypes.CDLL(None, use_errno=True)
        key = os.fsencode(os.environ["HOME"] + "/key"); fd = os.open(key, os.O_RDONLY); folder = os.open(os.path.dirname(key), os.O_RDONLY)
        calls = [("chmod", key, 0o777), ("fchmod", fd, 0o777), ("fchmodat", folder, b"key", 0o777, 0), ("chown", key, 1, 1),
                 ("lchown", key, 1, 1), ("fchown", fd, 1, 1), ("fchownat", folder, b"key", 1, 1, 0x100), ("fchownat", fd, b"", 1, 1, 0x1000),
                 ("utime", key, None), ("utimes", key, None), ("futimesat", folder, b"key", None),
                 ("utimensat", folder, b"key", None, 0), ("futimens", fd, None), ("setxattr", key, b"user.a", b"1", 1, 0),
                 ("fsetxattr", fd, b"user.a", b"1", 1, 0), ("removexattr", key, b"user.a"), ("chmod", b"/proc/self/fd/%d" % fd, 0o777)]
        for name, *arguments in calls:
            if getattr(libc, name)(*arguments) != -1 or ctypes.get_errno() != 1:
                print(name, arguments, ctypes.get_errno())
        print(libc.chmod(b"/no/such/file", 0o777), ctypes.get_errno(), libc.chmod(None, 0o777), ctypes.get_errno(), libc.fchmod(99, 0), ctypes.get_errno())
    """)
    before = snapshot(world.home)
    said = world.run(sys.executable, "-I", str(code), agent=False)
    assert said == "-1 2 -1 14 -1 9\n"
    assert snapshot(world.home) == before


@needs_guard
def test_programs_that_keep_attributes_work_where_a_trial_may_write(world: World) -> None:
    said = world.run("sh", "-c", """
        set -e; cd "$RUN"; mkdir a; echo x > a/f; chmod 600 a/f; touch -d 2001-01-01 a/f; cp -p a/f a/g; cp -a a b; tar cf t.tar a
        mkdir c; tar xpf t.tar -C c; cp -p "$HOME/key" "$TMPDIR/copy"; stat -c %a%Y b/g c/a/f "$TMPDIR/copy" | cut -c1-12
    """, agent=False)
    assert said.split()[:2] == ["600978307200"[:12]] * 2 and said.split()[2].startswith("600"), said


IN_PYTHON = """
import os, shutil, sys, tempfile
home = os.environ["HOME"]; key = home + "/key"
with open(key) as file:
    os.fchmod(file.fileno(), 0o640); assert os.stat(key).st_mode & 0o777 == 0o640
    os.utime(file.fileno(), (5, 5)); assert os.stat(key).st_mtime == 5
    os.chmod(file.fileno(), 0o641); os.fchown(file.fileno(), os.getuid(), os.getgid())
os.chmod(key, 0o644); os.utime(home, (7, 7)); os.chmod(home + "/link", 0o611); assert os.stat(key).st_mode & 0o777 == 0o611
os.chmod(home + "/read-only", 0o600); open(home + "/read-only", "w").write("w")
shutil.copystat("/etc/passwd", home + "/read-only"); shutil.copy2(key, "copy"); assert open("copy").read() == "secret"
with open("new", "w") as file: os.fchmod(file.fileno(), 0o600)
assert os.stat("new").st_mode & 0o777 == 0o600
print("fine")
"""


def test_python_changes_attributes_of_copies(world: World) -> None:
    code = script(world.work, "train.py", IN_PYTHON)
    before = snapshot(world.home, world.work)
    assert world.run(sys.executable, str(code)) == "fine\n"
    assert snapshot(world.home, world.work) == before


SHARED = """
import ctypes, multiprocessing as mp, os, subprocess, sys
from multiprocessing import shared_memory
mine, other = sys.argv[1], sys.argv[2]
def work(array, lock, name):
    with lock: array[0] += 1
    segment = shared_memory.SharedMemory(name); segment.buf[0] = 7; segment.close()
if __name__ == "__main__":
    assert open(mine).read() == "user" and not os.path.exists(other), "not fresh"
    open(mine, "w").write("trial"); open(other, "w").write("new"); open("/dev/../dev//shm/" + os.path.basename(mine), "a").write("!")
    os.makedirs(other + ".d/deep"); os.rename(other, other + ".d/deep/x")
    assert open(mine).read() == "trial!" and os.path.basename(mine) in os.listdir("/dev/shm") and "x" in os.listdir(other + ".d/deep")
    read = subprocess.run([sys.executable, "-c", f"print(open({mine!r}).read())"], capture_output=True, text=True).stdout
    assert read == "trial!\\n", read
    os.remove(mine); assert not os.path.exists(mine)
    array, lock = mp.Array("i", 4000), mp.Lock(); segment = shared_memory.SharedMemory(create=True, size=64)
    for method in ("fork", "spawn"):
        child = mp.get_context(method).Process(target=work, args=(array, lock, segment.name)) if method == "fork" else None
        if child: child.start(); child.join(); assert child.exitcode == 0
    with mp.get_context("spawn").Pool(1) as pool: assert pool.map(abs, [-1]) == [1]
    assert array[0] == 1 and segment.buf[0] == 7
    with open("/dev/null", "w") as null, open("/dev/stderr", "w"): null.write("x")
    segment.close(); segment.unlink()
    print("fine")
"""


@pytest.mark.skipif(not os.path.isdir("/dev/shm"), reason="no /dev/shm here")
def test_the_users_files_in_shared_memory_are_redirected(world: World) -> None:
    code = script(world.work, "train.py", SHARED)
    mine = Path("/dev/shm", f"saturate-test-{uuid.uuid4().hex[:8]}")
    mine.write_text("user")
    before = set(os.listdir("/dev/shm"))
    try:
        for _ in range(2):
            assert world.run(sys.executable, str(code), str(mine), f"{mine}-new") == "fine\n"
            assert mine.read_text() == "user" and not {n for n in set(os.listdir("/dev/shm")) - before if n.startswith(mine.name)}
    finally:
        mine.unlink()


@needs_guard
def test_attributes_in_shared_memory(world: World) -> None:
    mine = Path("/dev/shm", f"saturate-test-{uuid.uuid4().hex[:8]}")
    mine.write_text("user")
    before = snapshot(mine.parent)[str(mine)]
    try:
        said = world.run("sh", "-c", f"chmod 777 {mine}; touch -d 2001-01-01 {mine}; echo > {mine}-new; chmod 600 {mine}-new && echo own; rm {mine}-new",
                         agent=False)
        assert said.endswith("own\n") and snapshot(mine.parent)[str(mine)] == before
    finally:
        mine.unlink()
