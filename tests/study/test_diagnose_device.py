"""A profile of training on a device, from small traces made by hand and what the windows saw beside them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from saturate.findings import _registry as rules
from saturate.records.analysis import Profile
from saturate.records.facts import Facts, LoaderFacts, MachineFacts
from saturate.records.observations import Observations
from saturate.report.analysis import summary
from saturate.report.analysis_html import render
from saturate.report.profile_brief import brief
from saturate.study.seen import Seen
from saturate.study.state import Request

pytest.importorskip("numpy")

from saturate.study import diagnose

STEPS = 4
SAMPLE = {
    "steps": 10, "wall_ns": 10_000_000, "parts": {"input": 1_000_000, "rest": 9_000_000}, "clocked_steps": 10, "uneven_input": False,
    "process_cpu_ns": 7_000_000, "kernel_ns": 1_000_000, "page_faults": 0, "gc_ns": 0, "gc_pauses": 0, "workers": 0, "worker_cpu_ns": 0,
    "fetch_samples": 0, "worker_samples": 0, "lines": [], "dataset": None, "memory": {}, "python": "python",
}
DEVICE = {"id": 0, "name": "NVIDIA H100 80GB HBM3", "totalGlobalMem": 80 << 30, "computeMajor": 9, "computeMinor": 0,
          "maxThreadsPerMultiprocessor": 2048, "numSms": 132}


class Events:
    """Events of a torch trace; times in microseconds."""

    def __init__(self) -> None:
        self.made: list[dict[str, Any]] = []
        self.correlation = 100

    def host(self, category: str, name: str, start: float, end: float, tid: int = 7, **args: Any) -> None:
        self.made.append({"ph": "X", "cat": category, "name": name, "pid": 7, "tid": tid, "ts": start, "dur": end - start, "args": args})

    def device(self, category: str, name: str, start: float, end: float, launched: float, by: str) -> None:
        self.correlation += 1
        self.host("cuda_runtime", by, launched, launched + 2, correlation=self.correlation)
        self.made.append({"ph": "X", "cat": category, "name": name, "pid": 0, "tid": 7, "ts": start, "dur": end - start, "args": {
            "device": 0, "context": 1, "stream": 7, "correlation": self.correlation, "bytes": 1 << 20}})

    def kernel(self, name: str, start: float, end: float, launched: float) -> None:
        self.device("kernel", name, start, end, launched, "cudaLaunchKernel")


def profiled(folder: Path, events: Events, facts: Facts, **seen: Any) -> Profile:
    path = folder / "trace.json"
    path.write_text(json.dumps({"deviceProperties": [DEVICE], "traceEvents": events.made}))
    request = Request(argv=["python", "train.py"], cwd=folder, environment={}, directory=folder / ".saturate")
    return diagnose.diagnose(request, Seen(facts=facts, step_ns=[1_000_000] * 9, sample=SAMPLE, traces=[path], **seen), frozenset())


def facts(device: str = "cuda") -> Facts:
    return Facts(device=device, device_name=DEVICE["name"] if device == "cuda" else "", flops_per_step=10**9,
                 loaders=(LoaderFacts(num_workers=0, batch_size=8),))


def reading() -> Events:
    """Steps of 1 ms: a cheap `.item()`, `nonzero` that waits for a product, and a batch from pageable memory; then the host is late."""
    made = Events()
    for number in range(STEPS):
        at = 1000.0 * number
        made.host("user_annotation", f"ProfilerStep#{number}", at, at + 1000)
        made.host("cpu_op", "aten::mm", at + 5, at + 20)
        made.kernel("ampere_sgemm_128x64_tn", at + 20, at + 300, at + 10)
        made.host("user_annotation", "saturate.sync train.py:5 Tensor.item", at + 25, at + 35)
        made.host("cpu_op", "aten::item", at + 26, at + 34)
        made.host("cuda_runtime", "cudaStreamSynchronize", at + 28, at + 33, correlation=10 * number + 1)
        made.host("cpu_op", "aten::nonzero", at + 40, at + 310)
        made.host("cuda_runtime", "cudaStreamSynchronize", at + 50, at + 302, correlation=10 * number + 2)
        made.host("cpu_op", "aten::copy_", at + 320, at + 420)
        made.device("gpu_memcpy", "Memcpy HtoD (Pageable -> Device)", at + 330, at + 400, at + 325, "cudaMemcpyAsync")
        made.host("cuda_runtime", "cudaStreamSynchronize", at + 335, at + 402, correlation=10 * number + 3)
        made.host("cpu_op", "aten::mm", at + 590, at + 610)
        made.kernel("ampere_sgemm_128x64_tn", at + 605, at + 950, at + 600)
    return made


ITEM = {"steps": STEPS, "syncs": [["train.py", 5, "Tensor.item", STEPS, 10_000 * STEPS]]}


def test_waits_inside_operators_are_told_beside_those_with_a_line(tmp_path: Path) -> None:
    profile = profiled(tmp_path, reading(), facts(), record=ITEM)
    waits = [(one.file, one.line, one.what, one.calls_per_step) for one in profile.syncs]
    assert waits == [("", 0, "cudaStreamSynchronize in aten::nonzero", 1.0), ("", 0, "cudaStreamSynchronize (HtoD) in aten::copy_", 1.0),
                     ("train.py", 5, "Tensor.item", 1.0)]
    assert "unknown line" in summary(profile, width=100, color=False) and "unknown line" in render(profile)
    assert "cudaStreamSynchronize in aten::nonzero, 0.25" in brief(profile, width=100, color=False)
    found = {one.id: one for one in profile.findings}
    places = [(one.where, one.metric, one.value) for one in found["host-syncs"].evidence if one.unit == "ms per step"]
    assert places == [("aten::nonzero", "cudaStreamSynchronize", pytest.approx(0.252)), ("train.py:5", "Tensor.item", pytest.approx(0.01))]
    assert found["host-syncs"].bound == pytest.approx(1 / (1 - 0.205), rel=0.1)     # the idle time behind them
    share = 0.07            # of the copies alone; with the idle time that waiting for them can cause it is twice that
    assert found["pageable-copies"].bound > 1 / (1 - 1.5 * share)


def test_a_wait_of_another_thread_at_the_time_of_a_label_is_kept(tmp_path: Path) -> None:
    made = reading()
    for number in range(STEPS):
        made.host("cpu_op", "aten::mm", 1000.0 * number + 24, 1000.0 * number + 26, tid=9)
        made.kernel("k", 1000.0 * number + 951, 1000.0 * number + 952, 1000.0 * number + 25)
        made.made[-2]["tid"] = 9            # launches work, so it is one of those that count
        made.host("cuda_runtime", "cudaEventSynchronize", 1000.0 * number + 27, 1000.0 * number + 34, tid=9, correlation=10 * number + 4)
    places = [one.metric for one in next(one for one in profiled(tmp_path, made, facts(), record=ITEM).findings
                                         if one.id == "host-syncs").evidence if one.unit == "ms per step"]
    assert sorted(places) == ["Tensor.item", "cudaEventSynchronize", "cudaStreamSynchronize"]


def test_what_the_recorder_waits_for_is_no_wait_of_the_script(tmp_path: Path) -> None:
    """It drains the device while the last step is still open."""
    made, at = launching(), 1000.0 * (STEPS - 1)
    made.host("user_annotation", "saturate.drain", at + 982, at + 999)
    made.host("cuda_runtime", "cudaDeviceSynchronize", at + 983, at + 998, correlation=1)
    found = profiled(tmp_path, made, facts(), record={"steps": STEPS, "syncs": []})
    assert found.syncs == [] and "host-syncs" not in {one.id for one in found.findings}


def launching(kernels: bool = True, node: str = "", kernel: str = "") -> Events:
    """Steps of 1 ms on the host, most of it in two operators; without `kernels`, as where CUPTI delivers nothing. `node`: a function
    of autograd that launches a kernel by itself."""
    made = Events()
    for number in range(STEPS):
        at = 1000.0 * number
        made.host("user_annotation", f"ProfilerStep#{number}", at, at + 1000)
        for name, start, end in (("aten::addmm", 10, 500), ("aten::native_layer_norm", 510, 980)):
            made.host("cpu_op", name, at + start, at + end)
            if kernels:
                made.kernel("ampere_sgemm_128x64_tn" if name == "aten::addmm" else "layer_norm", at + start + 5, at + end, at + start + 1)
        if node:
            made.host("cpu_op", node, at + 981, at + 990)
            made.kernel(kernel, at + 985, at + 995, at + 982)
    return made


def test_a_device_without_events_is_not_judged_by_what_the_host_did(tmp_path: Path) -> None:
    found = profiled(tmp_path, launching(kernels=False), facts(), record={"steps": STEPS, "syncs": []})
    (problem,) = [one for one in found.integrity.problems if one.blocks]
    assert problem.id == "unknown-accelerator" and {"busy", "gaps", "roofline"} <= set(problem.blocks) and "CUPTI" in problem.message
    assert (found.verdict, found.split, found.split_steps, found.devices[0].name) == ("unknown", {}, 0, "")
    assert found.unknown["split"] == problem.message and found.step_ms == 1.0
    assert not {one.id for one in found.findings} & {"fp32-matmul", "nothing-to-gain", "launch-bound", "host-syncs", "elementwise-chains"}


def test_a_device_with_events_and_a_cpu_without_are_judged(tmp_path: Path) -> None:
    for events, device in ((launching(), "cuda"), (launching(kernels=False), "cpu")):
        found = profiled(tmp_path, events, facts(device), record={"steps": STEPS, "syncs": []})
        assert found.integrity.ok and found.split and found.split_steps and "split" not in found.unknown


def test_what_the_parts_of_a_step_cannot_be_told_from_gives_no_split(tmp_path: Path) -> None:
    """Device times a millisecond before the calls that launch the kernels."""
    made = launching()
    for event in made.made:
        event["ts"] -= 900.0 if event["cat"] == "kernel" else 0.0
    found = profiled(tmp_path, made, facts(), record={"steps": STEPS, "syncs": []})
    assert "kernels-before-launch" in {one.id for one in found.integrity.problems} and not found.split and "clock" in found.unknown["split"]


MODULES = {"flops": 10**9, "flops_unknown": "", "flops_left_out": [], "recomputed_flops": 0,
           "modules": [{"name": "block", "kind": "Block", "forward_ms": 1.0, "self_ms": 1.0, "flops": 10**9, "memory_bytes": 1}]}


def test_kernels_that_no_operator_of_torch_launched_leave_no_rate(tmp_path: Path) -> None:
    whole = profiled(tmp_path, launching(), facts(), modules=MODULES)
    assert whole.mfu is not None and whole.flops_coverage == 1.0 and whole.modules[0].flops == 10**9
    found = profiled(tmp_path, launching(node="FlashAttnFunc", kernel="void flash_fwd_kernel<128, 128>"), facts(), modules=MODULES)
    assert (found.flops_per_step, found.mfu, found.hfu, found.flops_coverage, found.modules[0].flops) == (None,) * 5
    assert "FlashAttnFunc" in found.unknown["flops_per_step"] and "FlashAttnFunc" in found.unknown["flops_coverage"]
    norm = profiled(tmp_path, launching(node="FusedRMSNorm", kernel="rms_norm_kernel"), facts(), modules=MODULES)
    assert norm.mfu == whole.mfu and norm.flops_coverage == pytest.approx(950 / 960, abs=0.01)


@pytest.mark.parametrize("rows", [True, False])
def test_a_training_that_waits_for_rows_of_tensors_is_told_of_batch_assembly(rows):
    """A TensorDataset starved a small model, and neither the finding nor the next command named what is made for it."""
    loaded = Facts(loaders=(LoaderFacts(num_workers=0, batch_size=64, tensor_rows=rows),), machine=MachineFacts(cpu_count=2.0))
    sample = {**SAMPLE, "num_workers": 0, "dataset": {"kind": "TensorDataset", "file": "dataset.py", "line": 1, "function": "__getitem__",
              "collate": None}, "read_bytes": 0, "worker_ns": 0, "idle_ns": {}, "fetch_ns": 8_000_000, "fetch_cpu_ns": 7_900_000,
              "fetch_queued_ns": 0, "fetch_waiting": 0}
    loader = diagnose._loader(Seen(loaded, sample=sample), str)
    seen = Observations(device="cpu", steps=20, step_ms=1.0, input_wait=0.8, input_wait_raw=0.8, loader=loader)
    (found,) = (one for one in rules.detect(seen, frozenset({"batch-assembly", "loader-workers"})) if one.id == "input-bound-cpu")
    assert found.techniques == ["batch-assembly", "loader-workers"][not rows:]
