"""Driving nsys, against a program of that name that records how it was called and writes a small export."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from saturate.errors import EnvironmentProblem
from saturate.study import nsight

FAKE = """#!{python}
import json, pathlib, sqlite3, subprocess, sys
folder = pathlib.Path(__file__).parent
with open(folder / "calls", "a") as file: file.write(json.dumps(sys.argv[1:]) + "\\n")
first = next(place for place, word in enumerate(sys.argv[2:], 2) if not word.startswith("-"))
options = dict(word[2:].split("=", 1) for word in sys.argv[2:first] if "=" in word)
behaviour = (folder / "behaviour").read_text() if (folder / "behaviour").exists() else ""
if sys.argv[1] == "profile":
    code = subprocess.run(sys.argv[first:]).returncode
    if behaviour != "no window":
        pathlib.Path(options["output"].replace("%%", "%") + ".nsys-rep").write_bytes(b"recorded")
    sys.exit(code)
if sys.argv[1] == "export":
    if behaviour == "full disk":
        pathlib.Path(options["output"]).write_bytes(b"half")
        print("Exporting...", "ERROR: No space left on device", sep="\\n"); sys.exit(1)
    if behaviour == "nothing": sys.exit(0)
    if behaviour == "slow": import time; time.sleep(30)
    with sqlite3.connect(options["output"]) as database:
        database.execute("CREATE TABLE CUPTI_ACTIVITY_KIND_KERNEL (start INTEGER, end INTEGER, deviceId INTEGER)")
        database.execute("INSERT INTO CUPTI_ACTIVITY_KIND_KERNEL VALUES (10, 20, 0)")
"""


class Nsys:
    def __init__(self, folder: Path):
        self.path = folder / "nsys"
        self.path.write_text(FAKE.format(python=sys.executable), encoding="utf-8")
        self.path.chmod(0o755)

    def behave(self, how: str) -> None:
        self.path.with_name("behaviour").write_text(how, encoding="utf-8")

    @property
    def calls(self) -> list[list[str]]:
        return [json.loads(line) for line in self.path.with_name("calls").read_text(encoding="utf-8").splitlines()]


@pytest.fixture
def nsys(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Nsys:
    folder = tmp_path / "bin"
    folder.mkdir()
    monkeypatch.setenv("PATH", str(folder), prepend=os.pathsep)
    return Nsys(folder)


def test_from_command_to_trace(nsys: Nsys, tmp_path: Path) -> None:
    from saturate.trace import nsys as reader

    stem = tmp_path / "100%p" / "window"
    stem.parent.mkdir()
    workload = [sys.executable, "-c", "import sys; print(sys.argv[1:])", "--output=mine", "-x"]
    done = subprocess.run(nsight.record(nsight.find(), workload, stem), capture_output=True, text=True)
    assert done.stdout == "['--output=mine', '-x']\n"
    database = nsight.export(nsight.find(), nsight.report(stem, done.stdout), stem.with_suffix(".sqlite"))
    assert len(reader.read(database).gpu.start) == 1
    profile, export = nsys.calls
    assert profile[-len(workload):] == workload
    for option in ("--trace=cuda,nvtx,osrt", "--capture-range=cudaProfilerApi", "--capture-range-end=stop",
                   "--sample=none"):
        assert option in profile[:-len(workload)]
    assert f"--output={tmp_path}/100%%p/window" in profile
    assert export[0] == "export" and "--type=sqlite" in export and export[-1] == str(stem) + ".nsys-rep"
    assert sorted(os.listdir(stem.parent)) == ["window.nsys-rep", "window.sqlite"]


def test_the_workloads_exit_code_passes(nsys: Nsys, tmp_path: Path) -> None:
    command = nsight.record(nsight.find(), [sys.executable, "-c", "raise SystemExit(7)"], tmp_path / "window")
    assert subprocess.run(command).returncode == 7


def test_not_installed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(nsight, "PLACES", (f"{tmp_path}/none/*/nsys",))
    with pytest.raises(EnvironmentProblem) as caught:
        nsight.find()
    assert "not installed" in caught.value.message and "nsight-systems-cli" in caught.value.remedy
    assert caught.value.exit_code == 3


def test_the_newest_of_the_usual_places(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(nsight, "PLACES", (f"{tmp_path}/*/bin/nsys", "/nowhere/nsys"))
    for version in ("2024.2.1", "2024.10.1", "2023.4.4", "2025.1.1"):
        path = tmp_path / version / "bin" / "nsys"
        path.parent.mkdir(parents=True)
        path.write_text("", encoding="utf-8")
        path.chmod(0o755 if version != "2025.1.1" else 0o644)       # not a program
    assert nsight.find().parent.parent.name == "2024.10.1"


def test_a_window_that_never_began(nsys: Nsys, tmp_path: Path) -> None:
    nsys.behave("no window")
    subprocess.run(nsight.record(nsight.find(), ["true"], tmp_path / "window"), check=True)
    with pytest.raises(EnvironmentProblem) as caught:
        nsight.report(tmp_path / "window", "first\nRuntimeError: no CUDA device\n")
    assert "never began" in caught.value.cause and "no CUDA device" in caught.value.evidence


def test_reports_of_early_versions(tmp_path: Path) -> None:
    (tmp_path / "window.qdrep").write_bytes(b"recorded")
    assert nsight.report(tmp_path / "window") == tmp_path / "window.qdrep"


@pytest.mark.parametrize(("how", "said"), [
    ("full disk", "No space left on device"), ("nothing", "ended with 0"), ("slow", "longer than 1 s")])
def test_an_export_that_fails_leaves_nothing(nsys: Nsys, tmp_path: Path, how: str, said: str) -> None:
    nsys.behave(how)
    database = tmp_path / "window.sqlite"
    (tmp_path / "window.nsys-rep").write_bytes(b"recorded")
    with pytest.raises(EnvironmentProblem) as caught:
        nsight.export(nsys.path, tmp_path / "window.nsys-rep", database, timeout_s=1.0)
    assert said in caught.value.card() and "nsys export --type sqlite window.nsys-rep" in caught.value.remedy
    assert sorted(os.listdir(tmp_path)) == ["bin", "window.nsys-rep"]


def test_a_program_that_cannot_start(tmp_path: Path) -> None:
    with pytest.raises(EnvironmentProblem) as caught:
        nsight.export(tmp_path / "gone", tmp_path / "r.nsys-rep", tmp_path / "r.sqlite")
    assert "No such file" in caught.value.cause


@pytest.mark.parametrize("isolation", ["", "intercept"])
def test_it_may_write_where_it_always_does(isolation: str, tmp_path: Path, clean_environment: dict[str, str]) -> None:
    """The real one (2022.4) keeps files of its own right in /tmp, whatever TMPDIR says, and ended with "Cannot create CUDA config
    file": the path of its report in the command had made the cage refuse overlays, and nothing else may write to /tmp."""
    (tmp_path / "bin").mkdir()
    program = tmp_path / "bin" / "nsys"
    program.write_text(f"""#!{sys.executable}
import os, pathlib, subprocess, sys
own = f"/tmp/injection_config_{{os.getpid()}}"
first = next(place for place, word in enumerate(sys.argv[2:], 2) if not word.startswith("-"))
try:
    pathlib.Path(own).write_text("")
except OSError:
    sys.exit("Cannot create CUDA config file")
try:
    sys.exit(subprocess.run(sys.argv[first:]).returncode)
finally:
    os.unlink(own)
""", encoding="utf-8")
    program.chmod(0o755)
    work = tmp_path / "work"
    work.mkdir()
    (work / "train.py").write_text("""
import torch
model = torch.nn.Linear(8, 1); optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
while True:
    optimizer.zero_grad(); model(torch.randn(4, 8)).square().mean().backward(); optimizer.step()
""", encoding="utf-8")
    environment = {**clean_environment, "PATH": f"{program.parent}{os.pathsep}{os.environ['PATH']}", "SATURATE_ISOLATION": isolation}
    done = subprocess.run([sys.executable, "-m", "saturate", "profile", "--with", "nsys", "--", sys.executable, "train.py"],
                          cwd=work, env=environment, capture_output=True, text=True, timeout=120)
    assert done.returncode == 3 and "this workload trains on cpu" in done.stderr, done.stderr
