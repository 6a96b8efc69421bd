"""A preloaded library reaches the workload and what it starts, not the processes of saturate around it; glibc is told to keep."""

from __future__ import annotations

import dataclasses
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("torch")

from saturate.records.facts import Facts, MachineFacts
from saturate.study.candidates import Candidate
from saturate.techniques import allocator

TRAIN = """
import torch
model = torch.nn.Linear(2, 1); optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
for _ in range(STEPS):
    model(torch.ones(1, 2)).sum().backward(); optimizer.step(); optimizer.zero_grad()
print("LD_PRELOAD is", __import__("os").environ.get("LD_PRELOAD", "not set"))
"""


@pytest.fixture
def library(tmp_path) -> str:
    """Any library that every Python has loaded stands for an allocator: preloading it changes nothing."""
    maps = Path("/proc/self/maps").read_text(encoding="utf-8")
    (tmp_path / "libtcmalloc.so.4").symlink_to(next(line.split()[-1] for line in maps.splitlines() if "/libm" in line or "/libc" in line))
    return str(tmp_path / "libtcmalloc.so.4")


def environ(pid: int) -> list[bytes]:
    return [entry for entry in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0") if entry.startswith(b"LD_PRELOAD=")]


def test_a_trial_preloads_in_the_workload_only(library, script, start):
    chosen = Candidate(allocator, allocator.Options("tcmalloc", library)).chosen()
    trial = start(str(script(TRAIN.replace("STEPS", "10**9"))), techniques=[chosen])
    hello = trial.wait_ready()
    assert hello["applied"] == [{"id": "allocator", "problem": ""}]
    assert environ(hello["pid"]) == [b"LD_PRELOAD=" + library.encode()] and environ(trial.supervisor.pid) == []


def test_a_recipe_preloads_in_the_command_and_says_when_the_loader_refuses(library, script, tmp_path, clean_environment):
    recipe = tmp_path / "recipe.toml"
    command = [sys.executable, "-m", "saturate", "run", str(recipe), "--", sys.executable, str(script(TRAIN.replace("STEPS", "9")))]
    for path, said in ((library, ""), (str(tmp_path / "libtcmalloc-none.so"), "allocator did not take effect: not_applied")):
        recipe.write_text(f'schema = 1\n[[technique]]\nid = "allocator"\n[technique.options]\nkind = "tcmalloc"\nlibrary = "{path}"\n')
        trusted = {**clean_environment, "LD_LIBRARY_PATH": str(tmp_path)}
        done = subprocess.run(command, env=trusted, cwd=tmp_path, capture_output=True, text=True, timeout=120)
        assert (done.returncode, done.stdout) == (0, f"LD_PRELOAD is {path}\n"), done.stderr
        assert said in done.stderr and ("did not take effect" in done.stderr) == bool(said)
        done = subprocess.run(command, env=clean_environment, cwd=tmp_path, capture_output=True, text=True, timeout=120)
        assert done.stdout == "" and done.returncode == 2 and f"{path} is not installed on this machine" in done.stderr, "nobody put it there"


def test_glibc_keeps_memory_in_a_trial(script, start):
    """The proof is of what malloc does there: without the variables a block of 64 MiB is mapped by itself."""
    source = str(script(TRAIN.replace("STEPS", "10**9")))
    for variables, problem in ((allocator.GLIBC, ""), ({"MALLOC_MMAP_MAX_": "65536"}, "glibc does not serve a block of 64 MiB from its heap")):
        chosen = Candidate(allocator, allocator.Options("glibc")).chosen()
        chosen.environment.clear()
        chosen.environment.update(variables)
        applied = start(source, techniques=[chosen]).wait_ready()["applied"]
        assert [one["id"] for one in applied] == ["allocator"] and problem in applied[0]["problem"] and bool(problem) == bool(applied[0]["problem"])


def test_glibc_is_offered_where_memory_goes_back_and_forth(monkeypatch):
    busy = Facts(step_ms=10.0, page_faults=5000.0, kernel_ms=4.0, machine=MachineFacts(glibc=True))
    assert allocator.eligible(busy) and allocator.variants(busy) == [allocator.Options("glibc")] and allocator.bound(busy) == 0.4
    for other in (dataclasses.replace(busy, page_faults=100.0), dataclasses.replace(busy, machine=MachineFacts())):
        assert not allocator.eligible(other) and allocator.variants(other) == []
    both = dataclasses.replace(busy, machine=MachineFacts(glibc=True, preload_allocators=(("jemalloc", "/lib/libjemalloc.so.2"),)))
    assert [one.kind for one in allocator.variants(both)] == ["glibc", "jemalloc"]
    assert not allocator.eligible(dataclasses.replace(busy, least_page_faults=4900.0)).steadies
    by_chance = allocator.eligible(dataclasses.replace(busy, least_page_faults=2.0))
    trifle = allocator.eligible(dataclasses.replace(busy, least_page_faults=2.0, step_ms=200.0))
    assert trifle and not trifle.steadies, "2 % of a step: no pair of processes is told apart by that, and others wait for their turn"
    assert by_chance.steadies and by_chance.reason.startswith("up to 5,000 page faults per step: in some processes")
    monkeypatch.setenv("MALLOC_TOP_PAD_", "7")
    assert allocator.environment(allocator.Options("glibc")) == {**allocator.GLIBC, "MALLOC_TOP_PAD_": "7"}, "the user's own stays"


@pytest.mark.parametrize("library", ["/a" * 200 + "/libmimalloc.so", "/lib" * 200, "/" * 1000, "/usr/lib/libjemalloc.so" + ".so" * 200 + "x"])
def test_a_path_of_many_folders_is_refused_without_trying_every_way_to_divide_it(library):
    """A recipe is somebody's text: reading one may not take for ever."""
    with pytest.raises(ValueError, match="absolute path of a libjemalloc"):
        allocator.Options("jemalloc", library)
    assert allocator.preloadable("jemalloc", "/a" * 200 + "/libjemalloc.so.2")
