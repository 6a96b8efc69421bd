"""Machine facts, read from planted machines: a folder that stands for `/`."""

from __future__ import annotations

import os
import shutil
import struct
import sys
from pathlib import Path

import pytest

from saturate.machine import facts

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="reads /proc and /sys")

V2 = "30 1 0:26 / /sys/fs/cgroup rw - cgroup2 cgroup2 rw\n"
V1 = ("31 1 0:27 {root} /sys/fs/cgroup/cpu,cpuacct rw - cgroup cgroup rw,cpu,cpuacct\n"
      "32 1 0:28 {root} /sys/fs/cgroup/memory rw - cgroup cgroup rw,memory\n")
CPUINFO = "\n\n".join(
    f"processor\t: {n}\nmodel name\t: Toy 9000\nphysical id\t: 0\ncore id\t: {n // 2}\nflags\t\t: fpu avx512f {{flags}}" for n in range(256)
) + "\n"


def plant(root, files):
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(text) if isinstance(text, bytes) else path.write_text(text)
    return root


def test_cgroup_v2_takes_the_tightest_limit_on_the_way_up(tmp_path):
    root = plant(tmp_path, {
        "proc/self/cgroup": "0::/box/inner\n", "proc/self/mountinfo": V2, "proc/meminfo": "MemTotal: 8388608 kB\n",
        "sys/fs/cgroup/cpu.max": "max 100000\n", "sys/fs/cgroup/box/cpu.max": "150000 100000\n",
        "sys/fs/cgroup/box/inner/cpu.max": "400000 100000\n",
        "sys/fs/cgroup/box/memory.max": "2147483648\n", "sys/fs/cgroup/box/inner/memory.max": "max\n",
    })
    assert facts.cpu_quota(root) == 1.5
    assert facts.memory_bytes(root) == 2 << 30
    assert facts.cpu_count(root) == min(1.5, len(os.sched_getaffinity(0)))


@pytest.mark.parametrize(("mounted", "path"), [("/", "/docker/abc"), ("/docker/abc", "/docker/abc"), ("/docker/ab", "/docker/abc")])
def test_cgroup_v1_also_where_only_a_part_is_mounted(tmp_path, mounted, path):
    inside = "docker/abc/" if mounted == "/" else ""
    root = plant(tmp_path, {
        "proc/self/cgroup": f"4:memory:{path}\n1:cpu,cpuacct:{path}\n0::/\n", "proc/self/mountinfo": V1.format(root=mounted),
        f"sys/fs/cgroup/cpu,cpuacct/{inside}cpu.cfs_quota_us": "250000\n", f"sys/fs/cgroup/cpu,cpuacct/{inside}cpu.cfs_period_us": "100000\n",
        f"sys/fs/cgroup/memory/{inside}memory.limit_in_bytes": "1073741824\n",
        "sys/fs/cgroup/memory/memory.limit_in_bytes" if inside else "x": "9223372036854771712\n",
        "sys/fs/cgroup/memory/c/memory.limit_in_bytes": "4096\n",  # another group's: not below a mount of /docker/ab
    })
    assert facts.cpu_quota(root) == 2.5
    assert facts.memory_bytes(root) == 1 << 30


def test_no_limits_and_no_files_are_not_zero(tmp_path):
    assert facts.cpu_quota(tmp_path) is None
    assert facts.memory_bytes(tmp_path) is None
    assert facts.physical_cores(tmp_path) is None
    assert facts.free_bytes(tmp_path / "absent") is None
    root = plant(tmp_path, {"proc/self/cgroup": "1:cpu:/\n", "proc/self/mountinfo": V1.format(root="/"),
                            "sys/fs/cgroup/cpu,cpuacct/cpu.cfs_quota_us": "-1\n", "sys/fs/cgroup/cpu,cpuacct/cpu.cfs_period_us": "100000\n"})
    plant(root, {"sys/fs/cgroup/memory/memory.limit_in_bytes": "9223372036854771712\n"})
    assert facts.memory_bytes(root) is None, "cgroup v1 writes a huge number where there is no limit"
    assert facts.cpu_quota(root) is None
    assert facts.cpu_count(root) == len(os.sched_getaffinity(0))


@pytest.mark.parametrize("text", ["", "x", ":::\n", "0::\n", "\0\xff\n", "1:cpu\n"])
def test_odd_proc_files_do_not_raise(tmp_path, text):
    root = plant(tmp_path, {"proc/self/cgroup": text, "proc/self/mountinfo": text + V2, "proc/cpuinfo": text, "proc/meminfo": text,
                            "sys/fs/cgroup/cpu.max": text})
    assert facts.observe(root=root).cpu_count >= 1


@pytest.mark.parametrize(("flags", "bf16", "fp16"), [
    ("avx512_bf16", True, False), ("amx_bf16 amx_tile", True, False), ("avx512_fp16", False, True), ("avx2", False, False),
])
def test_number_formats_from_cpu_flags(tmp_path, flags, bf16, fp16):
    found = facts.observe(root=plant(tmp_path, {"proc/cpuinfo": CPUINFO.format(flags=flags)}))
    assert (found.cpu_name, found.cpu_bf16_native, found.cpu_fp16_native) == ("Toy 9000", bf16, fp16)


@pytest.mark.parametrize(("told", "name"), [
    ("model name : AMD EPYC\ncpu family : 25\nmodel : 17\n", "AMD EPYC (family 25, model 17)"),
    ("model name : AMD EPYC\ncpu family : 26\nmodel : 2\n", "AMD EPYC (family 26, model 2)"),
    ("Hardware : Board\nCPU implementer : 0x41\nCPU part : 0xd40\n", "Board (implementer 0x41, part 0xd40)"),
])
def test_processors_that_a_virtual_machine_calls_alike_are_told_apart(tmp_path, told, name):
    assert facts.observe(root=plant(tmp_path, {"proc/cpuinfo": f"processor : 0\n{told}"})).cpu_name == name


def test_arm_flags(tmp_path):
    found = facts.observe(root=plant(tmp_path, {"proc/cpuinfo": "processor : 0\nFeatures : fp asimd bf16 asimdhp\n"}))
    assert found.cpu_bf16_native and found.cpu_fp16_native


def test_physical_cores_count_siblings_once(tmp_path, monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 1, 2, 5})
    assert facts.physical_cores(plant(tmp_path, {"proc/cpuinfo": CPUINFO.format(flags="")})) == 3


def test_compiler_is_the_one_torch_would_call(tmp_path):
    for name in ("g++", "clang++", "my-c++"):
        path = tmp_path / "bin" / name
        path.parent.mkdir(exist_ok=True)
        path.write_text("#!/bin/sh\n")
        path.chmod(0o755)
    folder = str(tmp_path / "bin")
    assert facts.compiler({"PATH": folder}) == f"{folder}/g++"
    assert facts.compiler({"PATH": folder, "CXX": "my-c++ -O2"}) == f"{folder}/my-c++"
    assert facts.compiler({"PATH": "/nowhere"}, tmp_path) == f"{folder}/g++"
    (tmp_path / "bin/g++").unlink()
    assert facts.compiler({"PATH": folder}) is None, "torch does not look for clang++ on Linux"


def test_allocators_from_the_loader_cache_of_this_architecture(tmp_path):
    ours = Path(sys.executable).read_bytes()[:64]
    theirs = ours[:18] + struct.pack("<H", 0x1234) + ours[20:]
    root = plant(tmp_path, {"lib/libjemalloc.so.2": ours, "lib/foreign/libtcmalloc.so.4": theirs, "usr/lib/libtcmalloc_minimal.so.4": ours})
    strings = [b"glibc-ld.so.cache1.1\x01\x02", b"libjemalloc.so.2", f"{root}/lib/libjemalloc.so.2".encode(),
               f"{root}/lib/foreign/libtcmalloc.so.4".encode(), b"/lib/libc.so.6", b""]
    plant(root, {"etc/ld.so.cache": b"\0".join(strings)})
    assert facts.allocators(root) == (("jemalloc", f"{root}/lib/libjemalloc.so.2"), ("tcmalloc", f"{root}/usr/lib/libtcmalloc_minimal.so.4"))
    shutil.rmtree(root / "lib")
    assert facts.allocators(root) == (("tcmalloc", f"{root}/usr/lib/libtcmalloc_minimal.so.4"),), "a stale cache entry is not offered"


def test_the_environment_of_an_interpreter(tmp_path, monkeypatch):
    python = tmp_path / "env/bin/python"
    python.parent.mkdir(parents=True)
    python.symlink_to("/bin/sh")
    assert facts.prefix_of(str(python)) == tmp_path / "env"
    monkeypatch.setenv("PATH", str(python.parent))
    assert facts.prefix_of("python") == tmp_path / "env"
    assert facts.prefix_of("absent") is None and facts.prefix_of(None) is None


def test_this_machine():
    found = facts.observe(sys.executable)
    assert 0 < found.cpu_count <= os.cpu_count()
    assert found.memory_bytes > 1 << 20
