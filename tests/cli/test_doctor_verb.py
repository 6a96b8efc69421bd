"""`saturate doctor`: what is printed, at any width; the JSON object; what a paste leaves out; with nothing installed."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import saturate
from saturate.cli import doctor as verb
from saturate.cli import main
from saturate.machine import doctor
from saturate.machine.doctor import Check

CHECKS = [
    Check("torch", "problem", "not installed for /home/ann/p, and the rest of this sentence is long enough to need a second line at 60 columns",
          "pip install torch", {"path": "/home/ann/p", "version": None}),
    Check("shared memory", "note", "0.1 GiB free in /dev/shm", "docker run --shm-size=8g (or --ipc=host); elsewhere: mount -o remount,size=8g /dev/shm"),
    Check("disk", "ok", "5 GiB free"),
    Check("compiler", "ok", "/a/very/long/path/that/must/not/be/cut/because/somebody/will/copy/it/from/a/narrow/terminal/bin/c++"),
]


def call(capsys, *words):
    code = main.main(["doctor", *map(str, words)])
    return code, capsys.readouterr().out


@pytest.fixture
def examined(monkeypatch):
    """What the verb asked the doctor; its answer is CHECKS."""
    asked = {"checks": CHECKS}

    def examine(python, folder, extra, **others):
        asked.update(others, python=python, folder=folder, extra=[name for name, _ in extra])
        return asked["checks"]

    monkeypatch.setattr(doctor, "examine", examine)
    return asked


def test_problems_block_and_notes_do_not(capsys, examined):
    code, out = call(capsys)
    assert code == 3 and "fix: pip install torch" in out
    assert out.endswith("1 thing could be better\n1 problem to fix before tune can work\n")
    examined["checks"] = CHECKS[1:]
    code, out = call(capsys)
    assert code == 0 and out.endswith("1 thing could be better\nready to tune\n")
    examined["checks"] = CHECKS[2:]
    assert call(capsys)[1].endswith("\n\nready to tune\n")


def test_isolation_of_a_folder_that_is_missing_is_not_known(tmp_path):
    check = verb._isolation(tmp_path / "no" / "such")
    assert check.status == "unknown" and str(tmp_path / "no" / "such") in check.found and "--dir" in check.fix


def test_options_reach_the_doctor(capsys, examined, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    call(capsys, "--python", "py", "--dir", "work", "--data", "set", "--measure")
    expected = {"python": "py", "folder": tmp_path / "work", "data": tmp_path / "set", "measure": True, "extra": ["isolation"]}
    assert {name: examined[name] for name in expected} == expected
    call(capsys)
    assert examined["data"] is None and examined["measure"] is False and examined["folder"] == tmp_path


@pytest.mark.parametrize("width", [40, 60, 79, 80, 100, 120])
def test_text_fits_every_width(width):
    out = verb.rendered(CHECKS, width)
    assert [line for line in out.splitlines() if len(line) > width and len(line.split()) > 1 and "/very/long" not in line] == []
    flat = " ".join(out.split())
    for check in CHECKS:
        assert f"{check.name} {check.found}" in flat and check.fix in flat, "no word is lost, hyphenated or cut"
    assert "\x1b" not in out


def test_colour_only_where_it_is_wanted(monkeypatch):
    monkeypatch.setattr("saturate.cli._output.coloured", lambda _: True)
    assert "\x1b[1;31mproblem\x1b[0m" in verb.rendered(CHECKS)
    plain = verb.rendered(CHECKS, plain=True)
    assert "\x1b" not in plain and plain == re.sub(r"\x1b\[[\d;]*m", "", verb.rendered(CHECKS))


def test_json_and_paste(capsys, examined):
    code, out = call(capsys, "--json")
    found = json.loads(out)
    assert code == 3 and set(found) == {"schema", "ready", "checks"} and found["schema"] == 1 and found["ready"] is False
    assert found["checks"][0] == {"name": "torch", "status": "problem", "found": CHECKS[0].found, "fix": "pip install torch",
                                  "values": {"path": "/home/ann/p", "version": None}}
    pasted = json.loads(call(capsys, "--json", "--paste")[1])
    assert pasted["checks"][0]["values"] == {"path": "/home/USER/p", "version": None} and "ann" not in str(pasted)
    assert "ann" not in call(capsys, "--paste")[1]


def test_a_real_run_prints_no_value_of_the_environment_and_only_what_is_documented(tmp_path):
    """Each variable that a user might have set holds a word of its own; none of them appears. Every check and every value in
    the JSON object has its place in docs/doctor.md."""
    names = ["CUDA_VISIBLE_DEVICES", "LD_LIBRARY_PATH", "WANDB_API_KEY", "HF_TOKEN", "SECRET", "MY_OWN", "PYTHONMALLOC_", "OMP_PLACES", "NCCL_DEBUG_FILE"]
    environment = {"PATH": os.defpath, "HOME": str(tmp_path)} | {name: f"marked{number:03}word" for number, name in enumerate(names)}
    command = f"from saturate.cli.main import main; raise SystemExit(main(['doctor', '--json', '--python', {sys.executable!r}]))"
    done = subprocess.run([sys.executable, "-c", command], capture_output=True, text=True, cwd=tmp_path, env=environment)
    assert done.returncode in (0, 3), done.stderr
    assert re.findall(r"marked\d+word", done.stdout + done.stderr) == []
    text = (Path(__file__).parent.parent.parent / "docs/doctor.md").read_text(encoding="utf-8")
    for check in json.loads(done.stdout)["checks"]:
        assert f"| `{check['name']}` |" in text
        assert [value for value in check["values"] if f"`{value}`" not in text] == [], check["name"]


def test_doctor_works_with_nothing_installed(tmp_path):
    """`-S` hides site-packages: no msgspec, no rich, no tomlkit, no NVML, and a Python without torch."""
    source = Path(saturate.__file__).parent.parent
    code = f"import sys; sys.path.insert(0, {str(source)!r}); from saturate.cli.main import main; sys.exit(main(['doctor', '--json', '--python', 'false']))"
    done = subprocess.run([sys.executable, "-S", "-c", code], capture_output=True, text=True, cwd=tmp_path, env={"PATH": os.defpath})
    assert done.returncode == 3, done.stderr
    checks = {check["name"]: check for check in json.loads(done.stdout)["checks"]}
    assert "msgspec" in checks["saturate"]["found"] and "pip install msgspec" in checks["saturate"]["fix"]
    assert checks["python"]["status"] == "problem"
    assert not [check for check in checks.values() if "check itself failed" in check["found"]]
    assert list(tmp_path.iterdir()) == []
