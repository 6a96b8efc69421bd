"""How much memory is left, by files of the kernel that are made up."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from saturate.checkpoints import host_memory
from saturate.techniques import _memory_forecast

GIB = 1 << 30
pytestmark = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")


def plant(root: Path, files: dict[str, str]) -> str:
    for name, text in {"proc/meminfo": f"MemTotal: {64 << 20} kB\nMemAvailable: {40 << 20} kB\n", **files}.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    return f"{root}/"


def group(folder: str, limit: str, used: int, cached: int) -> dict[str, str]:
    return {f"{folder}/memory.max": limit + "\n", f"{folder}/memory.current": f"{used}\n",
            f"{folder}/memory.stat": f"anon {used - cached}\nfile {cached}\ninactive_file {cached}\n"}


def test_cached_files_are_no_want_of_memory(tmp_path: Path) -> None:
    """A container of 16 GiB whose training reads its data: 6 GiB are its own, and the cache has filled the rest."""
    root = plant(tmp_path, {"proc/self/cgroup": "0::/\n", **group("sys/fs/cgroup", str(16 * GIB), 16 * GIB, 10 * GIB)})
    assert host_memory.available_bytes(root) == 10 * GIB


def test_the_tightest_of_the_groups_around_it_counts(tmp_path: Path) -> None:
    files = {**group("sys/fs/cgroup/pod/job", "max", 2 * GIB, 0), **group("sys/fs/cgroup/pod", str(8 * GIB), 3 * GIB, GIB)}
    assert host_memory.available_bytes(plant(tmp_path, {"proc/self/cgroup": "0::/pod/job\n", **files})) == 6 * GIB


def test_a_path_of_the_host_leaves_the_topmost_folder(tmp_path: Path) -> None:
    files = group("sys/fs/cgroup", str(8 * GIB), 3 * GIB, 0)
    assert host_memory.available_bytes(plant(tmp_path, {"proc/self/cgroup": "0::/kubepods/pod1/box\n", **files})) == 5 * GIB


def test_the_limit_of_the_topmost_folder_counts_where_the_group_is_not_told(tmp_path: Path) -> None:
    assert host_memory.available_bytes(plant(tmp_path, group("sys/fs/cgroup", str(8 * GIB), 3 * GIB, 0))) == 5 * GIB


def test_a_path_of_several_slashes_ends(tmp_path: Path) -> None:
    files = {**group("sys/fs/cgroup/job", "max", 2 * GIB, 0), **group("sys/fs/cgroup", str(8 * GIB), 3 * GIB, 0)}
    for line in ("0:://", "0:://job", "0::"):
        assert host_memory.available_bytes(plant(tmp_path, {"proc/self/cgroup": line + "\n", **files})) == 5 * GIB


def test_groups_of_the_first_version(tmp_path: Path) -> None:
    folder = "sys/fs/cgroup/memory/job"
    files = {f"{folder}/memory.limit_in_bytes": str(4 * GIB), f"{folder}/memory.usage_in_bytes": str(3 * GIB),
             f"{folder}/memory.stat": f"inactive_file 1\ntotal_inactive_file {GIB}\n",
             "sys/fs/cgroup/memory/memory.limit_in_bytes": "9223372036854771712", "sys/fs/cgroup/memory/memory.usage_in_bytes": "1"}
    assert host_memory.available_bytes(plant(tmp_path, {"proc/self/cgroup": "5:cpu:/other\n4:memory:/job\n", **files})) == 2 * GIB


def test_without_groups_and_without_proc(tmp_path: Path) -> None:
    assert host_memory.available_bytes(plant(tmp_path, {})) == 40 * GIB
    assert host_memory.available_bytes(f"{tmp_path}/nowhere/") is None


def test_a_batch_is_not_cut_for_a_cache_of_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    torch = pytest.importorskip("torch")
    root = plant(tmp_path, {"proc/self/cgroup": "0::/\n", **group("sys/fs/cgroup", str(16 * GIB), 13 * GIB, 10 * GIB)})
    monkeypatch.setattr(_memory_forecast, "available_bytes", lambda: host_memory.available_bytes(root))
    forecast = _memory_forecast.Forecast([(1000, GIB, 2 * GIB)])         # a GiB for a thousand entries
    assert forecast.chunks(4000, _memory_forecast.memory(torch, torch.device("cpu"))) == 1
