"""A trial changes nothing outside its run folder, in both modes."""

from __future__ import annotations

import errno
import json
import os
import sqlite3
import subprocess
import sys
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest
from isolation_kit import run_caged, script, snapshot
from kernel import landlock_abi, overlays_refused

from saturate.trial import landlock, mounts, planning
from saturate.trial.cage import CagePlan
from saturate.trial.layers import collect_caches, discard, scratch_folder

needs_overlays = pytest.mark.skipif(bool(overlays_refused()), reason=f"no overlays here: {overlays_refused()}")
needs_landlock = pytest.mark.skipif(not landlock_abi(), reason="this kernel has no Landlock")
BOTH = [pytest.param("overlay", marks=needs_overlays), "intercept"]

WRITES = """
    import json, mmap, os, pathlib, shutil, sqlite3, sys, tempfile
    home, data = pathlib.Path(os.environ["HOME"]), pathlib.Path(sys.argv[1])
    assert not os.path.exists("new.txt"), "the trial before left something"
    open("new.txt", "w").write("relative")
    (home / "abs.txt").write_text("absolute")
    (data / "deep" / "er").mkdir(parents=True)
    (data / "deep" / "er" / "f.bin").write_bytes(b"x" * 1000)
    name = "IN_TMP"
    open(name, "w").write("tmp"); assert os.path.exists(name)
    with open("big.bin", "ab") as f: f.write(b"tail")
    assert os.path.getsize("big.bin") == 3_000_004
    with open("big.bin", "r+b") as f, mmap.mmap(f.fileno(), 0) as m: m[0:1] = b"Z"
    os.remove("old.txt"); assert not os.path.exists("old.txt") and "old.txt" not in os.listdir(".")
    os.rename("a.txt", "b.txt"); assert open("b.txt").read() == "a" and not os.path.exists("a.txt")
    open("t.tmp", "w").write("fresh"); os.replace("t.tmp", "keep.txt"); assert open("keep.txt").read() == "fresh"
    shutil.rmtree("folder"); assert not os.path.isdir("folder")
    os.makedirs("folder/sub"); assert os.listdir("folder") == ["sub"]
    os.symlink("b.txt", "link"); assert open("link").read() == "a"
    os.chmod("mode.txt", 0o600); os.utime("mode.txt", (1, 1)); assert os.stat("mode.txt").st_mtime == 1
    base = sqlite3.connect("runs.db"); base.execute("pragma journal_mode=wal")
    base.execute("insert into t values (2)"); base.commit()
    assert base.execute("select count(*) from t").fetchone() == (2,); base.close()
    print(json.dumps(sorted(p.name for p in pathlib.Path(".").glob("*") if p.name != ".saturate")))
"""


@pytest.fixture
def world(tmp_path: Path) -> Iterator[dict[str, Path]]:
    """A home, a project and a data folder of the user. Afterwards every trial is discarded, and nothing may be left."""
    made = {name: tmp_path / name for name in ("home", "work", "data")}
    for folder in made.values():
        folder.mkdir()
    work = made["work"]
    for name in ("old", "a", "keep", "mode"):
        (work / f"{name}.txt").write_text(name)
    (work / "big.bin").write_bytes(os.urandom(3_000_000))
    (work / "folder" / "inner").mkdir(parents=True)
    (work / "folder" / "inner" / "x").write_text("x")
    with sqlite3.connect(work / "runs.db") as base:
        base.execute("create table t (x)")
        base.execute("insert into t values (1)")
    yield made
    for run_dir in (work / ".saturate" / "runs").resolve().glob("*"):
        discard(run_dir)
        assert not scratch_folder(run_dir).exists()


def make_plan(world: dict[str, Path], mode: str, name: str, argv: list[str], lower: Path | None = None) -> CagePlan:
    environ = {"HOME": str(world["home"]), "PATH": os.environ["PATH"], planning.OVERRIDE: mode}
    plan = planning.plan(world["work"], world["work"] / ".saturate" / "runs" / name, argv, environ, lower)
    assert plan.mode == mode, plan.reason
    assert CagePlan.from_json(plan.to_json()) == plan
    return plan


def run(world: dict[str, Path], mode: str, name: str, code: Path, lower: Path | None = None):
    argv = [sys.executable, str(code), str(world["data"])]
    plan = make_plan(world, mode, name, argv, lower)
    environ = {"HOME": str(world["home"]), "PATH": os.environ["PATH"]}
    return plan, run_caged(plan, argv, environ)


@needs_overlays
def test_overlays_that_the_kernel_allows_are_permitted():
    assert planning.probe() == (True, f"overlays in a mount namespace ({'user' if os.geteuid() else 'root'} layout)")


def test_landlock_is_found_where_the_kernel_has_it():
    assert landlock.abi() == landlock_abi()


@pytest.mark.parametrize("mode", BOTH)
def test_every_way_of_writing_leaves_the_tree_alone(world, mode):
    in_tmp = f"/tmp/saturate-test-{uuid.uuid4().hex[:8]}"
    code = script(world["work"], "train.py", WRITES.replace("IN_TMP", in_tmp))
    before = snapshot(*world.values())
    outputs = []
    for name in ("first", "second"):    # the second one must find what the first one found
        plan, done = run(world, mode, name, code)
        assert done.returncode == 0, done.stderr
        outputs.append(done.stdout)
        assert snapshot(*world.values()) == before
    assert outputs[0] == outputs[1]
    assert not os.path.exists(in_tmp)
    assert not [mount.at for mount in mounts.all_mounts() if mount.at.startswith(str(world["work"].parent))]
    discard(Path(plan.run_dir))
    assert sorted(path.name for path in Path(plan.run_dir).iterdir()) == ["plan.json", "site", "trackers"]


@pytest.mark.parametrize("mode", BOTH)
def test_the_run_folder_is_real_and_other_trials_are_hidden(world, mode):
    (world["work"] / ".saturate" / "runs" / "other").mkdir(parents=True)
    (world["work"] / ".saturate" / "runs" / "other" / "ckpt.pt").write_text("other")
    target = world["work"] / ".saturate" / "runs" / "one" / "result"
    code = script(world["work"], "train.py", f"""
        import glob, os, shutil, sys
        open({str(target)!r}, "w").write("real")
        open("mine.pt", "w").write("mine")
        assert [f for _, _, fs in os.walk(".") for f in fs if f.endswith(".pt")] == ["mine.pt"]
        assert not os.path.exists({str(target.parents[1] / "other")!r}) and sorted(os.listdir(".saturate/runs")) == ["one"]
        shutil.copytree(".", "../copy", ignore=lambda folder, names: ["..."] if len(folder) < 500 else sys.exit("its own copies are copied"))
        assert glob.glob("../copy/**/*.pt", recursive=True, include_hidden=True) == ["../copy/mine.pt"]
    """)
    _, done = run(world, mode, "one", code)
    assert done.returncode == 0, done.stderr
    assert target.read_text() == "real"


@pytest.mark.parametrize("mode", BOTH)
def test_a_script_that_resumes_starts_from_the_same_state(world, mode):
    (world["work"] / "state.txt").write_text("5")
    code = script(world["work"], "train.py", """
        step = int(open("state.txt").read())
        print("resumed at", step)
        for k in range(3):
            open("state.txt.tmp", "w").write(str(step + k + 1))
            import os; os.replace("state.txt.tmp", "state.txt")
        assert open("state.txt").read() == str(step + 3)
    """)
    assert [run(world, mode, name, code)[1].stdout for name in "ab"] == ["resumed at 5\n"] * 2


@needs_overlays
def test_a_cache_whose_link_leads_to_itself_is_not_followed(world):
    (world["home"] / ".triton").symlink_to(".triton")
    _, done = run(world, "overlay", "one", script(world["work"], "train.py", "print('done')"))
    assert (done.returncode, done.stdout) == (0, "done\n"), done.stderr


def test_nor_does_it_keep_a_user_without_rights_from_a_trial(tmp_path):
    """Whose folders are looked at one by one: "Too many levels of symbolic links" ended every study."""
    (tmp_path / ".triton").symlink_to(".triton")
    plan = CagePlan("overlay", "", "user", str(tmp_path), str(tmp_path), "/", "/", caches=(str(tmp_path / ".triton"),))
    assert planning._foreign(plan) == ""


@needs_overlays
def test_caches_are_handed_on_and_nothing_else(world):
    (world["home"] / ".cache" / "old").mkdir(parents=True)
    code = script(world["work"], "train.py", """
        import os, pathlib
        cache = pathlib.Path.home() / ".cache"
        print(sorted(str(p.relative_to(cache)) for p in cache.rglob("*")), os.path.exists("ckpt.pt"))
        (cache / "tokens").mkdir(exist_ok=True); (cache / "tokens" / "t.bin").write_text("tokens")
        open("ckpt.pt", "w").write("x")
    """)
    before = snapshot(*world.values())
    plan, first = run(world, "overlay", "base", code)
    assert first.stdout == "['old'] False\n", first.stderr
    lower = collect_caches(Path(plan.run_dir), world["work"] / ".saturate", plan)
    for name in ("later", "last"):
        _, later = run(world, "overlay", name, code, lower)
        assert later.stdout == "['old', 'tokens', 'tokens/t.bin'] False\n", later.stderr
    assert snapshot(*world.values()) == before


@needs_overlays
def test_shared_memory_dies_with_the_trial(world):
    code = script(world["work"], "train.py", """
        import os
        open("/dev/shm/saturate-left", "wb").write(b"x")
        print(os.statvfs("/dev/shm").f_blocks * os.statvfs("/dev/shm").f_frsize)
    """)
    _, done = run(world, "overlay", "one", code)
    assert done.returncode == 0, done.stderr
    assert not os.path.exists("/dev/shm/saturate-left")
    size = os.statvfs("/dev/shm")
    assert int(done.stdout) == size.f_blocks * size.f_frsize


@needs_landlock
def test_a_write_that_python_does_not_see_fails_and_harms_nothing(world):
    code = script(world["work"], "train.py", """
        import ctypes, subprocess
        libc = ctypes.CDLL(None, use_errno=True)
        print(libc.open(b"c.bin", 0o101, 0o644), ctypes.get_errno(), libc.unlink(b"old.txt"), libc.rename(b"a.txt", b"z"))
        print(subprocess.run(["rm", "-f", "keep.txt"], stderr=subprocess.DEVNULL).returncode != 0)
    """)
    before = snapshot(*world.values())
    _, done = run(world, "intercept", "one", code)
    assert done.stdout == "-1 13 -1 -1\nTrue\n", done.stderr
    assert snapshot(*world.values()) == before


TORCH = """
    import os, sys, numpy, torch
    from torch.utils.data import DataLoader, Dataset
    class Items(Dataset):
        def __len__(self): return 8
        def __getitem__(self, i):
            open(f"item{i}.txt", "w").write(str(i))
            return torch.full((2,), float(i))
    if __name__ == "__main__":
        torch.save({"w": torch.ones(3)}, "ckpt.pt")
        assert torch.load("ckpt.pt")["w"].sum() == 3
        assert torch.load("ckpt.pt", mmap=True)["w"].sum() == 3
        torch.save({"w": torch.zeros(3)}, "user.pt"); assert torch.load("user.pt")["w"].sum() == 0
        torch.jit.save(torch.jit.script(torch.nn.Linear(2, 2)), "m.ts"); torch.jit.load("m.ts")
        numpy.save("x.npy", numpy.arange(3)); assert numpy.load("x.npy", mmap_mode="r")[2] == 2
        numpy.arange(4).tofile("y.bin"); assert numpy.fromfile("y.bin", dtype=int)[3] == 3
        for context in ("fork", "spawn"):
            total = sum(b.sum().item() for b in DataLoader(Items(), num_workers=2, multiprocessing_context=context))
            assert total == 56, total
        assert open("item7.txt").read() == "7"
        with torch.multiprocessing.get_context("spawn").Pool(1) as pool: assert pool.map(abs, [-1]) == [1]
        print("fine")
"""


@pytest.mark.parametrize("mode", BOTH)
def test_torch_numpy_and_loader_workers(world, mode):
    torch = pytest.importorskip("torch")
    torch.save({"w": torch.ones(3)}, world["work"] / "user.pt")
    before = snapshot(*world.values())
    code = script(world["work"], "train.py", TORCH)
    before |= snapshot(*world.values())
    _, done = run(world, mode, "one", code)
    assert done.stdout == "fine\n", done.stderr
    assert snapshot(*world.values()) == before


def test_forbidden_namespaces_fall_back_with_the_reason(world, monkeypatch):
    monkeypatch.setattr(planning, "_rehearse", lambda plan, places: (False, "this machine forbids namespaces"))
    monkeypatch.setattr(planning, "_decisions", {})
    environ = {"HOME": str(world["home"])}
    plan = planning.plan(world["work"], world["work"] / ".saturate" / "runs" / "x", ["python", "t.py"], environ)
    assert plan.mode == "intercept"
    assert "this machine forbids namespaces" in plan.reason
    assert plan.redirect["root"].startswith(plan.run_dir)
    assert len(plan.environment["TMPDIR"]) < 72
    discard(Path(plan.run_dir))
    assert not os.path.exists(plan.scratch)


_WITH_A_MOUNT = """
import json, os, sys
sys.path[:0] = [sys.argv[1], sys.argv[2]]
from pathlib import Path
from saturate.trial import mounts, planning
from isolation_kit import run_caged
mounts.unshare(mounts.NEWNS)
mounts.mount("none", "/", None, mounts.MS_REC | mounts.MS_PRIVATE)
work, disk = Path(sys.argv[3]), Path(sys.argv[4])
mounts.mount("tmpfs", str(disk), "tmpfs", 0, "size=1m")
(disk / "user.txt").write_text("user")
argv = [sys.executable, str(work / "train.py"), str(disk)]
plan = planning.plan(work, work / ".saturate" / "runs" / "one", argv, os.environ)
done = run_caged(plan, argv, dict(os.environ))
print(plan.mode, done.stdout.strip(), done.stderr, sorted(os.listdir(disk)), (disk / "user.txt").read_text())
"""


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can mount a disk for the test")
@needs_overlays
def test_another_disk_is_covered_too(world):
    script(world["work"], "train.py", """
        import pathlib, sys
        disk = pathlib.Path(sys.argv[1])
        print((disk / "user.txt").read_text(), end=" ")
        (disk / "user.txt").write_text("changed"); (disk / "ckpt").write_text("x")
        print(sorted(p.name for p in disk.iterdir()))
    """)
    driver = script(world["work"], "driver.py", _WITH_A_MOUNT)
    source = str(Path(planning.__file__).parents[2])
    done = subprocess.run(
        [sys.executable, str(driver), source, str(Path(__file__).parent), str(world["work"]), str(world["data"])],
        capture_output=True, text=True, timeout=60, check=False,
    )
    assert done.stdout == "overlay user ['ckpt', 'user.txt']  ['user.txt'] user\n", done.stderr


_WITH_ANOTHER_PROC = """
import os, sys
sys.path[:0] = [sys.argv[1], sys.argv[2]]
from pathlib import Path
from saturate.trial import mounts, planning
from isolation_kit import run_caged
mounts.unshare(mounts.NEWNS)
mounts.mount("none", "/", None, mounts.MS_REC | mounts.MS_PRIVATE)
work = Path(sys.argv[3])
mounts.mount("proc", sys.argv[4], "proc", 0)
argv = [sys.executable, "train.py"]
plan = planning.plan(work, work / ".saturate" / "runs" / "one", argv, os.environ)
done = run_caged(plan, argv, dict(os.environ))
print(plan.mode, done.stdout.strip(), done.stderr, (work / "new.txt").exists())
"""


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can mount another /proc for the test")
@needs_overlays
@pytest.mark.parametrize(("at", "mode", "written"), [("elsewhere", "overlay", errno.EROFS), ("home/.cache", "intercept", 0)])
def test_a_file_system_that_takes_no_overlay_costs_the_others_none(world, at, mode, written):
    """/boot/efi of most machines is FAT: all trials of root were intercepted for it. A /proc takes none either."""
    place = world["work"].parent / at
    place.mkdir(parents=True)
    script(world["work"], "train.py", f"""
        import os
        open("new.txt", "w").write("relative")
        try:
            written = os.close(os.open({str(place / "self" / "comm")!r}, os.O_WRONLY)) or 0
        except OSError as error:
            written = error.errno
        print(written)
    """)
    driver = script(world["work"], "driver.py", _WITH_ANOTHER_PROC)
    source = str(Path(planning.__file__).parents[2])
    done = subprocess.run(
        [sys.executable, str(driver), source, str(Path(__file__).parent), str(world["work"]), str(place)],
        capture_output=True, text=True, timeout=60, check=False, env={"HOME": str(world["home"]), "PATH": os.environ["PATH"]},
    )
    assert done.stdout == f"{mode} {written}  False\n", done.stderr


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can lower the limit in a namespace of its own")
@needs_overlays
def test_a_kernel_without_free_namespaces_names_the_cause(tmp_path):
    """The limit is lowered for real, in a user namespace of a child."""
    code = script(tmp_path, "inner.py", f"""
        import os, sys
        sys.path.insert(0, {str(Path(planning.__file__).parents[2])!r})
        from saturate.trial import cage, mounts
        mounts.unshare(mounts.NEWUSER)
        mounts.map_own_ids(0, 0)
        open("/proc/sys/user/max_user_namespaces", "w").write("0")
        plan = cage.CagePlan("overlay", "", "user", "/", "/tmp", "/tmp", "/tmp")
        try:
            cage.enter(plan)
        except cage.CageRefused as refused:
            print(refused, refused.usable)
    """)
    done = subprocess.run([sys.executable, str(code)], capture_output=True, text=True, timeout=30, check=False)
    assert done.stdout == "namespaces are used up or switched off (user.max_user_namespaces) True\n", done.stderr


def test_mountinfo_names_are_decoded():
    line = "28 27 0:25 / /mnt/a\\040b\\134c rw,relatime shared:1 - ext4 /dev/x ro"
    (found,) = mounts.parse(line)
    assert (found.number, found.at, found.kind, found.read_only) == (28, "/mnt/a b\\c", "ext4", True)


def test_discard_opens_closed_folders(tmp_path):
    closed = tmp_path / "layers" / "0" / "work" / "work"
    closed.mkdir(parents=True)
    closed.chmod(0)
    discard(tmp_path)
    assert not (tmp_path / "layers").exists()


def test_the_cage_loads_quickly():
    """It is imported by every trial's supervisor: nothing but the standard library, and little of it."""
    done = subprocess.run(
        [sys.executable, "-I", "-S", "-c",
         f"import sys; sys.path.insert(0, {str(Path(planning.__file__).parents[2])!r}); import saturate.trial.cage; "
         "print(' '.join(sorted(m for m in sys.modules if m in ('pathlib', 'subprocess', 'dataclasses', 'inspect', 'tempfile'))))"],
        capture_output=True, text=True, timeout=30, check=True,
    )
    assert done.stdout.strip() == ""




@pytest.mark.parametrize("mode", BOTH)
def test_one_process_after_another_in_the_same_cage(mode: str, world: dict[str, Path]) -> None:
    """A plan that is entered again shows what the process before wrote, renamed and removed; a discarded one does not."""
    first = script(world["work"], "first.py", """
        import os
        os.mkdir("made"); open("made/state", "w").write("one"); os.rename("a.txt", "b.txt"); os.remove("old.txt")
        open(os.environ["HOME"] + "/deep", "w").write("home"); os.kill(os.getpid(), 9)
    """)
    second = script(world["work"], "second.py", """
        import os
        print(open("made/state").read(), open("b.txt").read(), os.path.exists("a.txt"), os.path.exists("old.txt"), open(os.environ["HOME"] + "/deep").read())
        open("made/state", "w").write("two")
    """)
    environ = {"HOME": str(world["home"]), "PATH": os.environ["PATH"]}
    plan = make_plan(world, mode, "again", [sys.executable, str(first)])
    assert run_caged(plan, [sys.executable, str(first)], environ).returncode == -9
    index = Path(plan.run_dir) / "layers.json"
    for expected in ("one", "two"):
        if index.exists():      # something was mounted when the first one ran, and is gone
            index.write_text(json.dumps([{"at": "/gone", "upper": "layers/99/upper"}, *json.loads(index.read_text())]))
        done = run_caged(plan, [sys.executable, str(second)], environ)
        assert done.stdout.split() == [expected, "a", "False", "False", "home"], done.stderr
    assert (world["work"] / "a.txt").exists() and not (world["work"] / "made").exists()
    discard(Path(plan.run_dir), plan)
    assert "FileNotFoundError" in run_caged(plan, [sys.executable, str(second)], environ).stderr


@pytest.mark.parametrize("name, shared", [("plain", True), ("with a space", False)])
def test_compiled_kernels_are_kept_in_the_study_where_a_compiler_can_read_them(tmp_path, name, shared):
    """Seen: in a folder with a space in its name, every C++ kernel of inductor failed to compile."""
    work = tmp_path / name
    work.mkdir()
    made = planning.plan(work, work / ".saturate" / "runs" / "x", ["python", "t.py"], {})
    assert ("TORCHINDUCTOR_CACHE_DIR" in made.environment) is shared
