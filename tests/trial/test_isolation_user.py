"""The layout for users without rights: started by root in tests, as an id that has no name. Root hides half of the bugs."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from isolation_kit import NOBODY, SOURCE, script, snapshot
from kernel import mounts_refused, overlays_refused

pytestmark = pytest.mark.skipif(os.geteuid() != 0 or bool(mounts_refused()), reason="needs a root that may mount, to become another user")

_AS_USER = """
import os, sys
sys.path.insert(0, sys.argv[1])
from saturate.trial import mounts
mounts.unshare(mounts.NEWNS)
mounts.mount("none", "/", None, mounts.MS_REC | mounts.MS_PRIVATE)
for source, at in zip(sys.argv[3::2], sys.argv[4::2]):
    os.makedirs(at, exist_ok=True)
    mounts.bind(source, at)
os.setgroups([])
os.setgid(int(sys.argv[2])); os.setuid(int(sys.argv[2]))
os.execve(os.environ["TEST_PYTHON"], [os.environ["TEST_PYTHON"], "-B", os.environ["TEST_CODE"]], dict(os.environ))
"""

_DRIVER = """
import json, os, sys
sys.path.insert(0, os.environ["TEST_SOURCE"])
from pathlib import Path
from saturate.trial import planning
from saturate.trial.cage import CageRefused
from saturate.trial.layers import discard
from isolation_kit import run_caged
work = Path.cwd()
outputs = []
for name in ("one", "two"):
    argv = [sys.executable, "train.py", "--out=" + os.environ["TEST_DATA"] + "/made/by/run"]
    plan = planning.plan(work, work / ".saturate" / "runs" / name, argv, os.environ)
    print(plan.mode, plan.layout, plan.reason, plan.overlays, file=sys.stderr)
    done = run_caged(plan, argv, dict(os.environ))
    print(done.stderr, file=sys.stderr)
    outputs.append([plan.mode, done.returncode, done.stdout])
    discard(Path(plan.run_dir))
print(json.dumps(outputs))
"""

_TRAIN = """
    import os, pathlib, sys
    out = pathlib.Path(sys.argv[1].partition("=")[2])
    assert os.getuid() == 4242
    assert not out.exists()
    out.mkdir(parents=True); (out / "ckpt").write_text("x")
    pathlib.Path.home().joinpath("h.txt").write_text("h")
    open(os.environ["TEST_IN_TMP"], "w").write("t")
    with open("big.bin", "ab") as f: f.write(b"tail")
    os.remove("old.txt"); os.mkdir("d"); os.rename("a.txt", "d/a.txt")
    try:
        open("/etc/saturate-test", "w")
    except OSError:
        print("refused")
    place = str(out.parents[2])
    open(place.replace("-data", "-other") + "/leak", "w").write("x")    # writable, and nobody named it
    try:
        open(place.replace("-data", "-deep/inside") + "/leak", "w")     # deeper than is looked for such folders
    except OSError as error:
        print(error.errno)
    caps = [line.split()[1] for line in open("/proc/self/status") if line.startswith("CapEff")]
    print(int(caps[0], 16), sorted(os.listdir("d")))
    try:
        open(os.environ["TEST_SOURCE"] + "/saturate/__init__.py", "a")
    except OSError:
        print("refused")
"""


@pytest.fixture
def theirs(tmp_path: Path) -> dict[str, Path]:
    made = {name: Path("/opt") / f"saturate-{os.getpid()}-{name}" for name in ("home", "data", "other", "deep")}
    made["work"] = made["home"] / "work"
    made["inside"] = made["deep"] / "inside"
    for folder in made.values():
        folder.mkdir(parents=True)
    script(made["work"], "train.py", _TRAIN)
    script(made["work"], "drive.py", _DRIVER)
    (made["work"] / "isolation_kit.py").write_text((Path(__file__).parent / "isolation_kit.py").read_text().replace(
        'str(Path(__file__).resolve().parents[2] / "src")', 'os.environ["TEST_SOURCE"]'))
    for name in ("old.txt", "a.txt", "big.bin"):
        (made["work"] / name).write_bytes(b"1234" * 100)
    for top in (made["home"], made["data"], made["other"], made["inside"]):
        os.chown(top, NOBODY, NOBODY)
        for folder, below, files in os.walk(top):
            for name in [*below, *files]:
                os.chown(os.path.join(folder, name), NOBODY, NOBODY)
    yield made
    for name in ("home", "data", "other", "deep"):
        subprocess.run(["rm", "-rf", str(made[name])], check=True)


def drive(theirs: dict[str, Path], mode: str) -> subprocess.CompletedProcess:
    """Run the driver as the user, with this interpreter and this source, wherever they lie (root's home is closed)."""
    place = f"/media/saturate-test-{os.getpid()}"
    environ = {
        "HOME": str(theirs["home"]), "PATH": os.environ["PATH"], "TEST_PYTHON": f"{place}/python/bin/python{sys.version_info[0]}.{sys.version_info[1]}",
        "TEST_SOURCE": f"{place}/src", "TEST_CODE": str(theirs["work"] / "drive.py"), "TEST_DATA": str(theirs["data"]),
        "TEST_IN_TMP": f"/tmp/saturate-user-test-{os.getpid()}", "SATURATE_ISOLATION": mode,
    }
    try:
        return subprocess.run(
            [sys.executable, "-I", "-S", "-c", _AS_USER, SOURCE, str(NOBODY),
             sys.base_prefix, f"{place}/python", SOURCE, f"{place}/src"],
            cwd=theirs["work"], env=environ, capture_output=True, text=True, timeout=120, check=False,
        )
    finally:
        for folder in (f"{place}/python", f"{place}/src", place):
            if os.path.isdir(folder):
                os.rmdir(folder)


@pytest.mark.parametrize("mode", ["overlay", "intercept"])
def test_a_user_without_rights(theirs, mode):
    if mode == "overlay" and overlays_refused(NOBODY):
        pytest.skip(f"no overlays for users: {overlays_refused(NOBODY)}")
    before = snapshot(theirs["home"], theirs["data"])
    done = drive(theirs, mode if mode == "intercept" else "")
    assert done.returncode == 0, done.stderr
    outputs = json.loads(done.stdout)
    unnamed = "30\n" if mode == "overlay" else ""  # EROFS: loud; interception knows every path
    assert outputs == [[mode, 0, f"refused\n{unnamed}0 ['a.txt']\nrefused\n"]] * 2, done.stderr
    assert list(theirs["other"].iterdir()) == list(theirs["inside"].iterdir()) == []
    assert not os.path.exists(f"/tmp/saturate-user-test-{os.getpid()}")
    assert snapshot(theirs["home"], theirs["data"], skip=(".saturate", "__pycache__")) == before


def test_a_folder_shared_with_a_group_is_intercepted(theirs):
    """An overlay in a user namespace cannot change files of a group that is not mapped (EOVERFLOW)."""
    shared = theirs["work"] / "shared"
    shared.mkdir()
    os.chown(shared, 0, 0)
    shared.chmod(0o777)     # and not sticky
    done = drive(theirs, "")
    assert "belongs to another user or group" in done.stderr, done.stderr
    assert '["intercept", 0' in done.stdout, done.stderr
