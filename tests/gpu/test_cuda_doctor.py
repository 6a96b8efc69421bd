"""The doctor and the telemetry on a real NVIDIA device: NVML really answers what the planted ones answer elsewhere."""

from __future__ import annotations

import subprocess
import sys
import time

import pytest

from saturate.machine import doctor, nvml, telemetry

pytestmark = pytest.mark.gpu

WORK = """
import time, torch
a = torch.ones(4096, 4096, device="cuda")
print("ready", flush=True)
end = time.time() + 4
while time.time() < end:
    for _ in range(20): a @ a
    torch.cuda.synchronize()
"""


@pytest.fixture(scope="module", autouse=True)
def device():
    opened, reason = nvml.start()
    if opened is None:
        pytest.skip(reason)
    with opened:
        if not opened.handles():
            pytest.skip("no NVIDIA device")


def test_the_doctor_knows_the_device(tmp_path):
    found = {check.name: check for check in doctor.examine(sys.executable, tmp_path)}
    assert [check for check in found.values() if "check itself failed" in check.found] == []
    assert found["gpu"].status in ("ok", "note") and found["gpu"].values["gpus"][0]["memory_bytes"] > 1 << 30
    assert found["driver"].values["version"] and found["driver"].values["cuda"]
    assert "tensor cores: " in found["formats"].found
    assert found["clocks"].values["gpus"][0]["throttle"] is not None and found["clocks"].values["gpus"][0]["most_clock_mhz"] > 100
    assert set(found) >= {"links", "placement", "gpu health", "ceilings"}


def test_a_working_device_is_seen_working():
    with subprocess.Popen([sys.executable, "-c", WORK], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None and process.stdout.readline() == "ready\n"
        began = time.thread_time(), time.perf_counter()
        with telemetry.Sampler() as sampler:
            time.sleep(2)
        process.kill()
    seen = sampler.seen()
    assert 0.2 < seen["clock_share"] <= 1.05 and 20 < seen["temperature_c"] < 110 and 0.05 < seen["power_share"] < 1.5
    assert isinstance(seen["throttle"], tuple)
    assert time.thread_time() - began[0] < 0.1 * (time.perf_counter() - began[1]), "the window is not disturbed"
