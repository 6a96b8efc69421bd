"""Finding the training script in a command, and saying what changed since a recipe was made."""

from __future__ import annotations

import hashlib

import pytest

from saturate.machine import commands, fingerprint
from saturate.records.facts import Facts, MachineFacts
from saturate.records.recipe import MadeFor


@pytest.fixture
def project(tmp_path, monkeypatch):
    for name in ("train.py", "other.py", "x.sh", "pkg/__init__.py", "pkg/train.py", "pkg/__main__.py", "app/__main__.py", "cfg.yaml", "noext", "-c.py"):
        path = tmp_path / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(name)
    tool = tmp_path / "bin" / "my-trainer"
    tool.parent.mkdir()
    tool.write_text("#!/usr/bin/python3\n")
    tool.chmod(0o755)
    binary = tmp_path / "bin" / "compiled"
    binary.write_bytes(b"\x7fELF")
    binary.chmod(0o755)
    monkeypatch.setenv("PATH", str(tool.parent))
    monkeypatch.delenv("PYTHONPATH", raising=False)
    return tmp_path


@pytest.mark.parametrize(("command", "expected"), [
    ("python train.py --data other.py", "train.py"),
    ("python3.11 -u train.py", "train.py"),
    ("/usr/bin/python -X dev -W ignore -Xutf8 -OO train.py", "train.py"),
    ("python --check-hash-based-pycs never train.py", "train.py"),
    ("python -- train.py", "train.py"),
    ("python -- -c.py --data other.py", "-c.py"),
    ("python noext", "noext"),
    ("python app", "app/__main__.py"),
    ("python -m pkg", "pkg/__main__.py"),
    ("python -m pkg.train --x other.py", "pkg/train.py"),
    ("python -um pkg.train", "pkg/train.py"),
    ("python -mpkg", "pkg/__main__.py"),
    ("python -m absent", None),
    ("python -m ../pkg", None),
    ("python -c pass train.py", None),
    ("python -", None),
    ("python", None),
    ("python absent.py", None),
    ("torchrun --nproc_per_node 2 --standalone train.py --lr 1", "train.py"),
    ("torchrun --nproc_per_node 2 -m pkg.train", "pkg/train.py"),
    ("python -m torch.distributed.run --nproc-per-node=2 train.py", "train.py"),
    ("accelerate launch --config_file cfg.yaml train.py other.py", "train.py"),
    ("accelerate launch --module pkg.train", "pkg/train.py"),
    ("mpirun -np 2 python -u train.py", "train.py"),
    ("srun -m block python train.py", "train.py"),
    ("bash x.sh", "x.sh"),
    ("bash -e x.sh train.py", "x.sh"),
    ("bash -c train.py", None),
    ("uv run train.py", "train.py"),
    ("uv run --with rich python -m pkg", "pkg/__main__.py"),
    ("uv run torchrun --nproc_per_node=2 train.py", "train.py"),
    ("uv run my-trainer", "bin/my-trainer"),
    ("env -u X A=1 nice -n 5 python train.py", "train.py"),
    ("my-trainer fit", "bin/my-trainer"),
    ("bin/my-trainer fit", "bin/my-trainer"),
    ("compiled", None),
    ("absent", None),
    ("python " + "x" * 5000, None),
    ("python a\0b", None),
])
def test_the_script_of_a_command(project, command, expected):
    found = commands.script_of(command.split(" "), project)
    assert found == (project / expected if expected else None)


@pytest.mark.parametrize(("command", "own"), [
    ("python -u train.py -c 3", 2), ("python -um pkg.train -m 3", 2), ("python -m absent -m 3", 2), ("python -c pass -c 3", 2), ("python -X dev", 0),
    ("taskset -c 0,1 python train.py -c 32", 2), ("uv run -- train.py -- data", 2), ("uv run my-trainer fit", 1), ("nice -n 5 compiled -n 3", 5),
    ("mpirun -n 2 python -m pkg.train -n 32", 2), ("torchrun --nproc_per_node 2 -m pkg.train -m 3", 2), ("torchrun -n 2 train.py -n 3", 2),
    ("python -m torch.distributed.run --nproc-per-node=2 train.py other.py", 1), ("bash -e x.sh -e", 1), ("bash -c x.sh", 2), ("compiled -b 3", 2),
])
def test_the_words_behind_the_script(project, command, own):
    words = command.split(" ")
    assert commands.arguments_of(words, project) == words[len(words) - own:]


def test_an_empty_command_has_no_script(project):
    assert commands.script_of([], project) is None and commands.arguments_of([], project) == []


def test_fingerprint(project):
    facts = Facts(torch="2.13.0", python="3.11.7", device="cuda", device_name="H", machine=MachineFacts(cpu_name="C"))
    made_for = fingerprint.of(facts, fingerprint.digest_of(["python", "train.py"], project))
    assert made_for.script == hashlib.sha256(b"train.py").hexdigest()
    assert (made_for.device, made_for.device_name, made_for.cpu, made_for.torch, made_for.python) == ("cuda", "H", "C", "2.13.0", "3.11.7")
    assert made_for.saturate
    assert fingerprint.digest_of(["python", "-c", ""], project) == ""


NOW = MadeFor(device="cuda", device_name="H", cpu="C", torch="2.13.0", python="3.11.7", saturate="1", script="a" * 64)


def test_nothing_changed():
    assert fingerprint.compare(NOW, NOW, ["compile"]) == []
    assert fingerprint.compare(MadeFor(), NOW) == [], "what was not recorded is not compared"
    assert fingerprint.compare(NOW, MadeFor(**{**_fields(NOW), "python": "3.11.9"})) == [], "a bug-fix release of Python is no change"


@pytest.mark.parametrize(("field", "value", "affected"), [
    ("device", "cpu", "all entries"), ("device_name", "A", "all entries"), ("script", "b" * 64, "all entries"), ("saturate", "2", "all entries"),
    ("cpu", "D", "compile, loader-workers, third-party"), ("torch", "2.14.0", "tf32, compile, loader-workers, third-party"),
    ("python", "3.12.1", "compile, loader-workers, gc-freeze, third-party"),
])
def test_each_change_names_what_it_affects(field, value, affected):
    entries = ["tf32", "compile", "loader-workers", "gc-freeze", "third-party"]
    if field == "cpu":
        entries.remove("gc-freeze")
    sentences = fingerprint.compare(NOW, MadeFor(**{**_fields(NOW), field: value}), entries)
    assert len(sentences) == 1
    assert sentences[0].startswith(f"{field.replace('_', ' ')} changed from ") and sentences[0].endswith(f"(affects {affected})")


def test_what_this_side_does_not_know_is_named():
    assert fingerprint.uncompared(NOW, NOW, ["compile"]) == [] == fingerprint.uncompared(MadeFor(), MadeFor(), ["compile"])
    found = fingerprint.uncompared(NOW, MadeFor(), ["compile"])
    assert [sentence.partition(" could not be compared with ")[0] for sentence in found] == ["device", "device name", "cpu", "script"], \
        "torch and Python are compared where torch is imported"
    assert found[3].startswith(f"script could not be compared with {'a' * 12}: ")
    assert [sentence.split()[0] for sentence in fingerprint.uncompared(NOW, MadeFor(device="cuda", device_name="H"), ["tf32"])] == ["script"], \
        "tf32 does not depend on the CPU"
    assert not any("device" in sentence for sentence in fingerprint.uncompared(NOW, MadeFor(device="cpu"), ["compile"])), "it is another one"


def test_a_change_that_affects_no_entry_is_not_reported():
    assert fingerprint.compare(NOW, MadeFor(**{**_fields(NOW), "cpu": "D"}), ["tf32"]) == []


def test_the_table_names_real_techniques():
    from saturate.techniques import _registry

    named = set().union(*(names for _, names in fingerprint._AFFECTS.values() if names))
    assert named <= set(_registry.load())


def _fields(made_for):
    return {name: getattr(made_for, name) for name in made_for.__struct_fields__}
