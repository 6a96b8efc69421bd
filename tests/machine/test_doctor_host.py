"""The host, on planted machines: one thing wrong at a time, and its exact fix."""

from __future__ import annotations

import resource
import sys

import pytest
from planted import plant

from saturate.machine import doctor_host, facts

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="reads /proc and /sys")

V2 = "30 1 0:26 / /sys/fs/cgroup rw - cgroup2 cgroup2 rw\n"
V1 = ("31 1 0:27 / /sys/fs/cgroup/pids rw - cgroup cgroup rw,pids\n"
      "32 1 0:28 / /sys/fs/cgroup/memory rw - cgroup cgroup rw,memory\n")
MEMINFO = "MemTotal: 67108864 kB\nMemFree: 1000 kB\nMemAvailable: 33554432 kB\n"


def test_containers_and_virtual_machines(tmp_path):
    assert not doctor_host.container(tmp_path) and not doctor_host.virtual(tmp_path)
    assert doctor_host.container(plant(tmp_path / "docker", {".dockerenv": ""}))
    assert doctor_host.container(plant(tmp_path / "podman", {"run/.containerenv": ""}))
    assert doctor_host.container(plant(tmp_path / "k8s", {"proc/self/cgroup": "0::/kubepods/pod1\n"}))
    assert not doctor_host.container(plant(tmp_path / "host", {"proc/self/cgroup": "0::/user.slice\n"}))
    root = plant(tmp_path / "vm", {"proc/cpuinfo": "processor : 0\nflags : fpu hypervisor\n"})
    assert doctor_host.system(root).found.endswith("in a virtual machine")


def test_a_cpu_quota_below_the_processors(tmp_path, monkeypatch):
    monkeypatch.setattr(facts, "affinity_count", lambda: 16)
    root = plant(tmp_path, {"proc/self/cgroup": "0::/\n", "proc/self/mountinfo": V2, "sys/fs/cgroup/cpu.max": "250000 100000\n"})
    check = doctor_host.cpu(root)
    assert check.status == "note" and "a quota of 2.5 cores" in check.found and "docker --cpus" in check.fix
    assert check.values["usable"] == 2.5
    assert doctor_host.cpu(tmp_path / "nowhere").status == "ok"


@pytest.mark.parametrize(("files", "status"), [
    ({"scaling_governor": "powersave", "scaling_driver": "acpi-cpufreq"}, "note"),
    ({"scaling_governor": "powersave", "scaling_driver": "intel_pstate", "energy_performance_preference": "performance"}, "ok"),
    ({"scaling_governor": "powersave", "scaling_driver": "amd-pstate-epp", "energy_performance_preference": "balance_power"}, "note"),
    ({"scaling_governor": "schedutil", "scaling_driver": "acpi-cpufreq"}, "ok"),
    ({"scaling_governor": "performance", "scaling_driver": "intel_pstate"}, "ok"),
    ({}, "ok"),
])
@pytest.mark.parametrize("folder", ["cpufreq/policy0", "cpu0/cpufreq"])
def test_governors(tmp_path, files, status, folder):
    check = doctor_host.governor(plant(tmp_path, {f"sys/devices/system/cpu/{folder}/{name}": text + "\n" for name, text in files.items()}))
    assert check.status == status, check
    assert ("cpupower frequency-set -g performance" in check.fix) == (status == "note")


@pytest.mark.parametrize(("setting", "status"), [("always madvise [never]", "note"), ("always [madvise] never", "ok"), (None, "ok"), ("odd", "ok")])
def test_huge_pages(tmp_path, setting, status):
    root = plant(tmp_path, {} if setting is None else {"sys/kernel/mm/transparent_hugepage/enabled": setting})
    assert doctor_host.huge_pages(root).status == status


def test_memory_of_the_machine_and_of_the_container(tmp_path):
    whole = doctor_host.memory(plant(tmp_path / "a", {"proc/meminfo": MEMINFO}))
    assert whole.found == "64.0 GiB, 32.0 GiB available" and whole.status == "ok"
    root = plant(tmp_path / "b", {
        "proc/meminfo": MEMINFO, "proc/self/cgroup": "0::/\n", "proc/self/mountinfo": V2,
        "sys/fs/cgroup/memory.max": str(8 << 30), "sys/fs/cgroup/memory.current": str(7 << 30),
        "sys/fs/cgroup/memory.stat": f"anon 5\ninactive_file {512 << 20}\n",
    })
    tight = doctor_host.memory(root)
    assert tight.status == "note" and tight.found.startswith("8.0 GiB (container limit), 1.5 GiB available") and "docker --memory" in tight.fix
    assert tight.values == {"bytes": 8 << 30, "available_bytes": 3 << 29}
    nothing = doctor_host.memory(tmp_path / "nowhere")
    assert nothing.status == "unknown" and nothing.values == {"bytes": None, "available_bytes": None}


def test_cgroup_v1_memory_and_tasks(tmp_path):
    root = plant(tmp_path, {
        "proc/self/cgroup": "4:memory:/\n3:pids:/box\n", "proc/self/mountinfo": V1, "proc/meminfo": MEMINFO,
        "sys/fs/cgroup/memory/memory.limit_in_bytes": str(4 << 30), "sys/fs/cgroup/memory/memory.usage_in_bytes": str(1 << 30),
        "sys/fs/cgroup/memory/memory.stat": "inactive_file 1\ntotal_inactive_file 4096\n",
        "sys/fs/cgroup/pids/pids.max": "max\n", "sys/fs/cgroup/pids/box/pids.max": "100\n",
    })
    assert facts.available_bytes(root) == (3 << 30) + 4096
    assert facts.tasks_limit(root) == 100
    assert facts.tasks_limit(tmp_path / "nowhere") is None and facts.available_bytes(tmp_path / "nowhere") is None


def limited(monkeypatch, files=(1 << 20, 1 << 20), locked=resource.RLIM_INFINITY, processes=resource.RLIM_INFINITY):
    values = {resource.RLIMIT_NOFILE: files, resource.RLIMIT_MEMLOCK: (locked, locked), resource.RLIMIT_NPROC: (processes, processes)}
    monkeypatch.setattr(resource, "getrlimit", lambda which: values[which])


def test_no_limits(tmp_path, monkeypatch):
    limited(monkeypatch, files=(resource.RLIM_INFINITY,) * 2)
    check = doctor_host.limits(tmp_path)
    assert (check.status, check.found, check.fix) == ("ok", "unlimited open files", "")
    assert check.values["open_files"] is None


@pytest.mark.parametrize(("most", "fix"), [(1 << 20, "ulimit -n 65536"), (8192, "ulimit -n 8192"), (1024, "--ulimit nofile=65536")])
def test_few_open_files(tmp_path, monkeypatch, most, fix):
    limited(monkeypatch, files=(1024, most))
    check = doctor_host.limits(tmp_path)
    assert check.status == "note" and check.found.startswith("1024 open files") and fix in check.fix


def test_other_limits(tmp_path, monkeypatch):
    root = plant(tmp_path, {"proc/self/cgroup": "0::/\n", "proc/self/mountinfo": V2, "sys/fs/cgroup/pids.max": "512\n",
                            "sys/class/infiniband/mlx5_0/x": ""})
    limited(monkeypatch, locked=65536, processes=500)
    check = doctor_host.limits(root)
    for words in ("512 processes and threads", "500 processes for this user", "locked memory is limited"):
        assert words in check.found
    for words in ("--pids-limit", "nproc", "memlock=-1"):
        assert words in check.fix
    limited(monkeypatch, locked=65536)
    assert doctor_host.limits(tmp_path / "no-fabric").status == "ok", "without InfiniBand nobody locks much"


@pytest.mark.parametrize(("environment", "named"), [
    ({"CUDA_LAUNCH_BLOCKING": "1"}, ["CUDA_LAUNCH_BLOCKING"]), ({"CUDA_LAUNCH_BLOCKING": "0"}, []),
    ({"OMP_NUM_THREADS": "1"}, ["OMP_NUM_THREADS"]), ({"OMP_NUM_THREADS": "8"}, []), ({"OMP_NUM_THREADS": "5"}, []), ({"OMP_NUM_THREADS": "64"}, ["OMP_NUM_THREADS"]),
    ({"OMP_NUM_THREADS": "many"}, []), ({"OMP_WAIT_POLICY": "ACTIVE"}, ["OMP_WAIT_POLICY"]), ({"NVIDIA_TF32_OVERRIDE": "0"}, ["NVIDIA_TF32_OVERRIDE"]),
    ({"NVIDIA_TF32_OVERRIDE": "1"}, []), ({"TORCH_DISTRIBUTED_DEBUG": "detail"}, ["TORCH_DISTRIBUTED_DEBUG"]), ({"PATH": "/bin"}, []),
])
def test_settings_that_slow_a_training_down(tmp_path, monkeypatch, environment, named):
    monkeypatch.setattr(facts, "cpu_count", lambda _: 8.0)
    check = doctor_host.settings(environment, tmp_path)
    assert check.values.get("variables", []) == named
    assert check.status == ("note" if named else "ok") and check.fix.startswith("unset " + named[0] if named else "")


def test_values_of_variables_are_not_shown(tmp_path):
    for name, _, _ in doctor_host.SLOW_SETTINGS:
        for value in ("1", "0", "active", "infinite", "detail", "debug", "true"):
            check = doctor_host.settings({name: f"{value}"}, tmp_path)
            assert f"={value}" not in check.found + check.fix
    assert "sesame" not in str(doctor_host.settings({"PYTHONMALLOC": "debug-sesame", "GOMP_CPU_AFFINITY": "sesame"}, tmp_path))


def test_shared_memory(tmp_path, monkeypatch):
    monkeypatch.setattr(facts, "free_bytes", lambda folder: 64 << 20 if folder == tmp_path / "dev/shm" else None)
    assert "--shm-size" in doctor_host.shared_memory(tmp_path).fix
    absent = doctor_host.shared_memory(tmp_path / "nowhere")
    assert absent.status == "note" and absent.found == "no /dev/shm" and absent.values == {"free_bytes": None}
    monkeypatch.setattr(facts, "free_bytes", lambda _: 8 << 30)
    assert doctor_host.shared_memory(tmp_path).status == "ok"


def test_compilers_name_the_package_of_this_system(monkeypatch):
    monkeypatch.setattr(facts, "compiler", lambda *_: None)
    monkeypatch.setattr(doctor_host.shutil, "which", lambda name, **_: f"/bin/{name}" if name in ("clang++", "dnf") else None)
    assert doctor_host.compiler("python").fix == "export CXX=/bin/clang++"
    monkeypatch.setattr(doctor_host.shutil, "which", lambda name, **_: f"/bin/{name}" if name == "dnf" else None)
    assert doctor_host.compiler("python").fix.endswith("dnf install -y gcc-c++")
    monkeypatch.setattr(doctor_host.shutil, "which", lambda name, **_: None)
    assert "package manager" in doctor_host.install("g++")


def test_processors_and_nodes(tmp_path):
    root = plant(tmp_path, {"sys/devices/system/node/online": "0-3\n", "proc/self/status": "Cpus_allowed:\tff\nCpus_allowed_list:\t0-2,7\n"})
    assert doctor_host.numa_nodes(root) == 4 and doctor_host.allowed_processors(root) == {0, 1, 2, 7}
    assert doctor_host.numa_nodes(tmp_path / "x") == 0 and doctor_host.allowed_processors(tmp_path / "x") == frozenset()
