"""The peak of a process tree, and a limit that it does not survive."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
import types

import pytest

from saturate.trial import meter, tree

MIB = 2**20


@pytest.fixture
def child():
    """Start Python code below this process; ended with everything below it."""
    started = []

    def begin(code: str) -> subprocess.Popen[str]:
        process = subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        started.append(process)
        return process

    yield begin
    for process in started:
        for pid in [*tree.descendants(process.pid), process.pid]:
            try:
                os.kill(pid, 9)
            except ProcessLookupError:
                pass
        process.wait()
        process.stdin.close()
        process.stdout.close()


def ask(process: subprocess.Popen[str], line: str = "") -> str:
    process.stdin.write(line + "\n")
    process.stdin.flush()
    return process.stdout.readline().strip()


SPIKES = """
import sys
keep = []
for line in sys.stdin:
    size = int(line)
    block = bytearray(abs(size) << 20)
    if size > 0: keep.append(block)
    del block
    print("done", flush=True)
"""


def below(pid: int) -> meter.Meter:
    """A meter for what descends from this process: only the one child, as far as memory goes."""
    return meter.Meter(pid, float("inf"))


def test_a_short_spike_is_not_missed(child):
    process = child(SPIKES)
    ask(process, "1")
    watch = below(os.getpid())
    try:
        watch.begin()
        before = watch.idle_bytes()
        ask(process, "-200")            # taken and given back between two looks
        assert 195 * MIB < watch.peak_bytes() - before < 215 * MIB
        watch.begin()
        ask(process, "-50")
        assert watch.peak_bytes() - before < 70 * MIB, "the peak began anew"
    finally:
        watch.close()


def test_what_forked_processes_share_counts_once(child):
    """A parent with 100 MiB and three children that touch nothing of their own."""
    process = child("""
import os, sys
block = bytearray(100 << 20)
for _ in range(3):
    if os.fork() == 0:
        sys.stdin.readline()
        os._exit(0)
print("done", flush=True)
sys.stdin.readline()
""")
    assert process.stdout.readline() == "done\n"
    found = meter.resident(os.getpid())
    assert found.exact
    assert 100 * MIB < found.total_bytes < 190 * MIB
    assert found.overlap_bytes > 280 * MIB, "three times the parent"


MAPS = """
import mmap, os, sys
keep = bytearray(120 << 20)
held = mmap.mmap(os.open({path!r}, os.O_RDONLY), 0, access=mmap.ACCESS_READ)
sum(held[at] for at in range(0, len(held), 4096))
for _ in range({children}):
    if os.fork() == 0:
        import time
        sum(held[at] for at in range(0, len(held), 4096))
        time.sleep(60)
print("done", flush=True)
sys.stdin.read()
"""


@pytest.mark.parametrize("children", [0, 3])
def test_what_the_system_can_take_back_is_not_in_use(child, tmp_path, children):
    """Of three loader workers that were forked, and of a dataset that all of them have mapped: 120 MiB, not 4 x 320."""
    (tmp_path / "data").write_bytes(bytes(200 * MIB))
    process = child(MAPS.format(path=str(tmp_path / "data"), children=children))
    assert process.stdout.readline() == "done\n"
    deadline = time.monotonic() + 30
    while tree.resident_bytes(os.getpid()) < (1 + children) * 320 * MIB and time.monotonic() < deadline:
        time.sleep(0.05)
    found = meter.in_use(os.getpid())
    assert found is not None and 120 * MIB <= found < 200 * MIB


class Looks(threading.Event):
    """How long a meter means to wait before its next look."""

    pause_s = None

    def wait(self, timeout=None):
        self.pause_s = timeout
        return super().wait(timeout)


def test_a_tree_above_the_limit_is_killed_at_once(child, monkeypatch):
    """By the first look that finds it there, whatever it has taken until then: that look may be late."""
    process = child("""
import time
blocks = []
while True:
    blocks.append(bytearray(8 << 20))
    time.sleep(0.002)
""")
    monkeypatch.setattr(meter, "threading", types.SimpleNamespace(Event=Looks, Lock=threading.Lock, Thread=threading.Thread))
    seen, pages = [], meter._pages
    monkeypatch.setattr(meter, "_pages", lambda pid: seen.append(pages(pid)) or seen[-1])
    watch = meter.Meter(os.getpid(), 300 * MIB)
    try:
        process.wait(timeout=60)
        assert process.returncode == -9
        watch._thread.join()
        *before, last = (count * meter._PAGE for count in seen)
        assert max(before, default=0) <= 300 * MIB < last <= watch.exceeded_bytes and watch._ended.pause_s < 0.04
        assert watch.peak_bytes() >= watch.exceeded_bytes and not watch.late
    finally:
        watch.close()


def test_a_limit_can_be_lowered(child):
    process = child(SPIKES)
    watch = below(os.getpid())
    try:
        ask(process, "200")
        assert process.poll() is None
        watch.limit_bytes = 100 * MIB
        process.wait(timeout=60)
        assert watch.exceeded_bytes is not None
    finally:
        watch.close()


def test_nothing_outlives_its_deadline(child):
    process = child("import time; time.sleep(600)")
    watch = meter.Meter(os.getpid(), float("inf"), time.monotonic() + 0.3)
    try:
        process.wait(timeout=60)
        assert watch.late and watch.exceeded_bytes is None
    finally:
        watch.close()


def test_processor_time_of_a_tree(child):
    process = child("print('go', flush=True)\nwhile True: pass")
    process.stdout.readline()
    before = meter.cpu_seconds(os.getpid())
    deadline = time.monotonic() + 20
    while meter.cpu_seconds(os.getpid()) - before < 0.2 and time.monotonic() < deadline:
        time.sleep(0.05)
    assert meter.cpu_seconds(os.getpid()) - before >= 0.2


def test_waiting_for_a_core_is_counted_by_the_kernel_or_not_at_all(monkeypatch):
    before = meter.queued_ns()
    assert 0 <= before <= meter.queued_ns()

    def missing(*args, **kwargs):
        raise FileNotFoundError("/proc/thread-self/schedstat")

    monkeypatch.setattr("builtins.open", missing)
    assert meter.queued_ns() == 0
