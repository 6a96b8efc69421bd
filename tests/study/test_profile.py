"""What a profile says from what its windows saw, and the whole of it on small workloads."""

from __future__ import annotations

import dataclasses
import json
import os
import shlex
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
from nulls import unreasoned
from tune_kit import TRAINING, Folder

from saturate.errors import EnvironmentProblem
from saturate.records.analysis import Analysis, Operator, Profile, Roofline
from saturate.records.ceilings import Ceilings
from saturate.records.facts import Facts, LoaderFacts, MachineFacts, ModuleFacts
from saturate.records.observations import CommunicationSeen, Observations, OperatorSeen
from saturate.study import memory, unprofiled, waits
from saturate.study import profile as study_profile
from saturate.study.profile import _queue, _timed_steps, nothing, recorded_steps
from saturate.study.seen import Seen
from saturate.study.state import Request, Study
from saturate.trial.outcome import Outcome

pytest.importorskip("numpy")

from saturate.study import diagnose

CWD = Path("/home/user/project")
SAMPLE = {
    "kind": "sample", "steps": 10, "wall_ns": 1_000_000_000, "parts": {"input": 200_000_000, "rest": 300_000_000}, "clocked_steps": 5, "uneven_input": False, "process_cpu_ns": 700_000_000, "workers": 0, "num_workers": 0,
    "worker_cpu_ns": 0, "worker_queued_ns": 0, "worker_ns": 0, "idle_ns": {}, "fetch_ns": 400_000_000, "fetch_cpu_ns": 300_000_000,
    "fetch_queued_ns": 0, "longest_fetch_ns": 50_000_000, "read_bytes": 1_000_000, "gc_ns": 20_000_000, "gc_pauses": 5,
    "kernel_ns": 140_000_000, "page_faults": 50_000,
    "fetch_samples": 80, "fetch_waiting": 8, "worker_samples": 0, "worker_waiting": 0,
    "lines": [[f"{CWD}/data.py", 17, "__getitem__", 60], [f"{CWD}/data.py", 20, "collate", 20]],
    "dataset": {"kind": "Rows", "file": f"{CWD}/data.py", "line": 15, "function": "__getitem__", "collate": None},
    "memory": {"parameters": 100, "gradients": 90, "optimizer_state": 200}, "python": sys.executable,
}
CEILINGS = Ceilings(device="cpu", device_name="a CPU", rates={"float32": 1e12, "bfloat16": 4e12}, bandwidth={})


def request(**changes: object) -> Request:
    return Request(argv=["python", "train.py"], cwd=CWD, environment={}, directory=CWD / ".saturate", **changes)


def facts(**changes: object) -> Facts:
    return dataclasses.replace(Facts(flops_per_step=10**9, loaders=(LoaderFacts(num_workers=0, batch_size=32),),
                                     modules=(ModuleFacts(dtypes=("float32",)),)), **changes)


def record(**changes: object) -> object:
    values = {"facts": facts(), "step_ns": [10_000_000] * 9, "sample": SAMPLE, "ceilings": CEILINGS, **changes}
    return diagnose.Record(Seen(**values), diagnose._shortener(CWD))


# -- how many steps ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("wanted", "step_ms", "steps"), [
    (None, 1.0, 40), (None, 20.0, 20), (None, 200.0, 5), (None, 1000.0, 3), (None, 60_000.0, 2), (7, 200.0, 7), (100, 200.0, 15),
])
def test_recorded_steps(wanted, step_ms, steps):
    """Enough to see, never one, and no longer than three seconds unless two steps take that."""
    assert recorded_steps(wanted, step_ms) == steps


@pytest.mark.parametrize(("step_ms", "steps"), [(1.0, 200), (100.0, 15), (500.0, 6), (5000.0, 6), (5001.0, 3), (90_000.0, 3)])
def test_windows_without_a_profiler_are_short_where_steps_are_long(step_ms, steps):
    assert _timed_steps(step_ms, briefly=False) == steps and _timed_steps(step_ms, briefly=True) == min(steps, 6)


def test_batches_that_workers_made_ahead_are_let_pass():
    assert _queue(facts(), 10.0, False) == (1, 1)
    skip, period = _queue(facts(loaders=(LoaderFacts(num_workers=4, prefetch_factor=3),)), 10.0, False)
    assert skip == 12 and period == 4


# -- rates -------------------------------------------------------------------------------------------------------------


def test_rates_on_a_cpu():
    """1e9 operations in 10 ms are a tenth of 1e12 per second."""
    made = record()
    assert made.rates() == {"mfu": None, "hfu": None, "mfu_achievable": pytest.approx(0.1)}
    assert "CPU" in made.unknown["mfu"] and "CPU" in made.unknown["hfu"]


def test_rates_on_an_accelerator():
    """HFU counts what is computed again, MFU does not; both are of the specification's dense peak."""
    made = record(facts=facts(device="cuda", device_name="NVIDIA H100 80GB HBM3", autocast="bfloat16"),
                  modules={"flops": 4 * 10**12, "recomputed_flops": 10**12})
    found = made.rates()
    peak = diagnose.accelerators.find("NVIDIA H100 80GB HBM3").rates["bfloat16"]
    assert found["mfu"] == pytest.approx(3e12 / 0.01 / peak) and found["hfu"] == pytest.approx(4e12 / 0.01 / peak)
    assert made.flops == 3 * 10**12


def test_more_than_the_device_can_do_is_an_error():
    made = record(facts=facts(flops_per_step=10**11))
    assert made.rates()["mfu_achievable"] is None and "wrong" in made.unknown["mfu_achievable"]


def test_unknown_operations_give_no_rates():
    made = record(facts=facts(flops_per_step=None))
    assert set(made.rates().values()) == {None} and "compiled" in made.unknown["flops_per_step"]


def test_operations_that_no_formula_counts_are_unknown_and_never_zero():
    why = "aten::_trilinear could not be counted: no formula is known"
    for made in (record(modules={"flops": 0, "flops_unknown": why}),
                 record(facts=facts(flops_per_step=None, flops_unknown=why))):
        assert set(made.rates().values()) == {None} and made.unknown["flops_per_step"] == why
        assert made.coverage(ANALYSIS) is None and made.unknown["flops_coverage"]


def operator(name: str, time_ns: int, **changes: object) -> Operator:
    return Operator(name=name, shapes="", dtypes="", calls=1, kernels=[], time_ns=time_ns, flops=None, bytes=None, **changes)


ANALYSIS = SimpleNamespace(devices=[SimpleNamespace(roofline=Roofline(coverage=None, operators=[
    operator("aten::mm", 60), operator("aten::linalg_inv_ex", 30),
    operator("kernel", 10, unknown={"flops": "no operator was recorded around its launch"})]))])


def test_coverage_is_that_of_the_count():
    """Not of the roofline, which knows other operators."""
    made = record(modules={"flops": 10**9, "flops_unknown": "", "flops_left_out": ["aten::linalg_inv_ex"]})
    assert made.coverage(ANALYSIS) == pytest.approx(0.6) and made.left_out == ["aten::linalg_inv_ex"]
    assert record(modules={"flops": 10**9}).coverage(ANALYSIS) == pytest.approx(0.9)
    assert record(modules={"flops": 10**9}).coverage(SimpleNamespace(devices=[])) is None


@pytest.mark.parametrize(("changes", "name"), [
    ({}, "float32"), ({"autocast": "bfloat16"}, "bfloat16"), ({"device": "cuda", "tf32_matmul": True}, "tfloat32"),
    ({"tf32_matmul": True}, "float32"), ({"modules": (ModuleFacts(dtypes=("float16",)),)}, "float16"), ({"modules": ()}, "float32"),
])
def test_number_format(changes, name):
    assert diagnose.number_format(facts(**changes)) == name


def test_how_much_of_its_communication_was_waiting_is_asked_of_the_rank_whose_communication_it_is():
    """The mean over all ranks hid that rank 0, which others waited for, did not wait."""
    stragglers = [SimpleNamespace(rank=0, wait_ns=0, transfer_ns=12_000_000, late_ns=30_000_000),
                  SimpleNamespace(rank=1, wait_ns=30_000_000, transfer_ns=12_000_000, late_ns=0)]
    for rank, share in ((0, 0.0), (1, 30 / 42), (2, None)):
        analysis = SimpleNamespace(stragglers=stragglers, devices=[SimpleNamespace(rank=rank, steps=1)])
        seen = diagnose._communication(CommunicationSeen(), facts(world_size=2), analysis, {"communication": 12}, 100)
        assert seen.peer_wait == (None if share is None else pytest.approx(share)) and seen.compared == 2 and seen.slowest_rank == 0


@pytest.mark.parametrize(("device", "kernels", "name"), [
    ("cuda", ["sm80_xmma_fprop_implicit_gemm_tf32f32"], "tfloat32"), ("cuda", ["ampere_sgemm_128x64_nn"], "float32"),
    ("cpu", ["sm80_xmma_fprop_implicit_gemm_tf32f32"], "float32")])
def test_convolutions_take_tf32_though_it_is_not_allowed_for_products(device, kernels, name):
    """Their rate was held against that of float32, an eighth of it."""
    operators = [SimpleNamespace(flops=80, kernels=kernels), SimpleNamespace(flops=20, kernels=["sgemm"]), SimpleNamespace(flops=None, kernels=["tf32"])]
    analysis = SimpleNamespace(devices=[SimpleNamespace(roofline=SimpleNamespace(operators=operators))])
    assert diagnose.number_format(facts(device=device), analysis) == name


# -- memory, lines -----------------------------------------------------------------------------------------------------


def test_memory_on_a_cpu_says_what_it_does_not_know():
    memory = record(modules={"saved_bytes": 50}).memory()
    assert (memory.parameters, memory.gradients, memory.optimizer_state, memory.activations) == (100, 90, 200, 50)
    assert memory.peak is None and memory.unknown["peak"]


def test_memory_on_a_device():
    device = {"peak": 1000, "active_peak": 1200, "reserved": 1600, "retries": 3, "total": 10_000}
    memory = record(sample={**SAMPLE, "device_memory": device}).memory()
    assert (memory.activations, memory.peak, memory.reserved, memory.allocator_retries) == (1000 - 390, 1000, 1600, 3)
    assert memory.fragmentation == pytest.approx(0.25)


def test_input_lines_share_the_time_of_the_fetch():
    first, second = record().input_lines()
    assert (first.file, first.line, first.what) == ("data.py", 17, "__getitem__")
    assert first.ms_per_step == pytest.approx(30.0) and second.ms_per_step == pytest.approx(10.0)


def test_lines_of_workers_are_the_datasets():
    (line,) = record(sample={**SAMPLE, "workers": 2, "lines": []}).input_lines()
    assert line.line == 15 and "in 2 workers" in line.what


def test_in_workers_either_the_dataset_or_the_function_that_collates_is_slow():
    """A dataset that only returns a number was said to take 52 ms per step."""
    collated = {**SAMPLE["dataset"], "collate": {"file": f"{CWD}/train.py", "line": 7, "function": "pad"}}
    (line,) = record(sample={**SAMPLE, "workers": 2, "lines": [], "dataset": collated}).input_lines()
    assert line.what == "Rows.__getitem__ and pad of train.py:7 (in 2 workers)"
    assert loader(workers=2, lines=[], dataset=collated).slowest == "data.py:15 __getitem__ or train.py:7 pad"
    assert loader(dataset=collated).slowest == "data.py:17 __getitem__"


def test_few_looks_name_no_line():
    (line,) = record(sample={**SAMPLE, "fetch_samples": 3}).input_lines()
    assert (line.line, line.what) == (15, "Rows.__getitem__")


def test_no_loader_no_lines():
    assert record(sample={**SAMPLE, "dataset": None}).input_lines() == []


def test_syncs_are_per_step_and_relative():
    (sync,) = record(record={"steps": 4, "syncs": [[f"{CWD}/train.py", 3, "Tensor.item", 8, 2_000_000]]}).syncs()
    assert (sync.file, sync.line, sync.calls_per_step, sync.ms_per_step) == ("train.py", 3, 2.0, 0.5)


def test_a_profiler_makes_waits_longer_as_it_does_steps():
    """A step of 1.3 ms was said to wait 2.7 ms in one of its lines."""
    seen = Seen(facts=facts(), step_ns=[10_000_000] * 9, sample=SAMPLE,
                record={"steps": 4, "syncs": [[f"{CWD}/train.py", 3, "Tensor.item", 8, 80_000_000]]})
    shorten = diagnose._shortener(CWD)
    faster = unprofiled.factor(seen, 25.0, 0.4)
    (sync,) = diagnose.Record(seen, shorten, faster).syncs()
    (observed,) = waits.timed(seen.record, shorten, faster)
    assert sync.ms_per_step == observed.ms_per_step == 8.0      # 20 of 25 ms, as 8 of 10
    assert unprofiled.factor(seen, 9.0, 0.4) == unprofiled.factor(seen, None, None) == 1.0
    assert unprofiled.factor(Seen(facts=facts()), 9.0, None) == 1.0


def test_recorded_steps_without_a_long_wait_are_compared_with_others_without_theirs():
    """Every eighth step waits for a file: 40 recorded ones of 20 ms were taken for slower than clocked ones of 100 ms."""
    uneven = {**SAMPLE, "parts": {"input": 450_000_000, "rest": 50_000_000}, "uneven_input": True}
    seen = Seen(facts=facts(), step_ns=[10_000_000] * 9, sample=uneven)
    assert seen.step_ms == 100.0 and seen.input_share == 0.9        # not the median, 10 ms
    assert unprofiled.factor(seen, 20.0, 0.0) == pytest.approx(0.5)
    assert unprofiled.factor(seen, 200.0, 0.9) == pytest.approx(0.5)


def test_the_host_s_clock_is_not_what_a_step_of_a_device_takes():
    uneven = {**SAMPLE, "parts": {"input": 10_000_000, "rest": 5_000_000}, "uneven_input": True}
    seen = Seen(facts=facts(device="cuda"), step_ns=[10_000_000] * 8 + [20_000_000], sample=uneven)
    assert seen.step_ms == pytest.approx(100 / 9)
    assert _queue(facts(device="cuda"), 10.0, True) == (15, 1) and _queue(facts(), 10.0, False) == (1, 1)


@pytest.mark.parametrize(("device", "briefly", "lead"), [("cuda", False, 150), ("cuda", True, 6), ("cpu", False, 1)])
def test_only_steps_that_begin_without_a_drain_have_a_lead(device, briefly, lead, tmp_path):
    """Windows drain the device when they begin, and a script that ends soon has no steps to spare."""
    blocks, looks = [], []

    def look(kind, skip, steps, **options):
        looks.append(skip)
        return {"problem": "nothing here", "evaluated": False}

    def run_block(skip, steps):
        blocks.append(skip)
        return SimpleNamespace(step_ns=[1_000_000] * steps)

    trial = SimpleNamespace(look=look, run_block=run_block, spec=SimpleNamespace(folder=tmp_path))
    study = SimpleNamespace(say=lambda line: None, request=SimpleNamespace(environment={}), folder=tmp_path)
    study_profile._windows(study, SimpleNamespace(trial=trial, step_ms=1.0), Seen(facts=facts(device=device)), None, "torch", False, briefly)
    assert blocks == [lead] and looks == [1, 1, 1]


def test_shares_of_work_are_beside_the_input_of_the_clocked_steps():
    seen = Observations(device="cpu", busy=0.8, overhead=0.2, input_wait=0.0, input_wait_raw=0.0, step_ms=10.0,
                        operators=(OperatorSeen("aten::mm", share=0.6, recoverable=0.1),))
    beside = unprofiled.beside_input(seen, 0.9)
    assert (beside.busy, beside.overhead) == (pytest.approx(0.08), pytest.approx(0.02))
    assert beside.operators[0].share == pytest.approx(0.06) and beside.operators[0].recoverable == pytest.approx(0.01)
    assert beside.step_ms == pytest.approx(100.0)
    assert unprofiled.beside_input(seen, 0.05) is seen
    assert unprofiled.beside_input(dataclasses.replace(seen, input_wait_raw=None), 0.9).busy == 0.8


def test_input_of_other_steps_than_the_recorded_ones_is_told():
    seen = Seen(facts=facts(), sample={**SAMPLE, "uneven_input": True})     # 40 of 100 ms
    (note,) = unprofiled.uneven(seen, 65.0, 0.0)
    assert note.id == "uneven-input" and not note.blocks and "0.0 ms" in note.message and "40.0 ms" in note.message
    assert unprofiled.uneven(seen, 160.0, 0.25) == []                        # stretched by the profiler, with as long a wait
    assert unprofiled.uneven(seen, 200.0, 0.42) == []                        # all of it on a slower machine
    assert unprofiled.uneven(seen, 65.0, None) == []


def test_a_split_of_steps_that_were_others_says_so():
    split = {"forward": 60_000_000, "backward": 100_000_000, "idle": 40_000_000}
    (note,) = unprofiled.other_steps(10.0, split, 10)
    assert note.id == "other-steps" and not note.blocks and "20.0 ms each, those that were timed 10.0 ms" in note.message
    assert [note.id for note in unprofiled.other_steps(40.0, split, 10)] == ["other-steps"]
    assert unprofiled.other_steps(14.0, split, 10) == unprofiled.other_steps(29.0, split, 10) == []
    assert unprofiled.other_steps(None, split, 10) == unprofiled.other_steps(10.0, {}, 0) == []


def test_a_trace_of_nothing_has_no_profile(monkeypatch):
    from saturate.trace.columns import Trace

    empty = Trace(source="trace.json", kind="kineto", names=[], threads=[], signatures=[], devices={})
    monkeypatch.setattr(diagnose, "read", lambda path: empty)
    request = Request(argv=["python"], cwd=Path.cwd(), environment={}, directory=Path.cwd())
    assert diagnose.diagnose(request, Seen(facts=facts(), traces=[Path("trace.json")], sample=SAMPLE), frozenset()) is None


def test_recorded_time_that_is_mostly_of_a_few_long_steps_is_told():
    numpy = pytest.importorskip("numpy")
    from saturate.trace import intervals, windows

    def recorded(*lengths: int):
        last = numpy.cumsum(lengths)
        return windows.Window("steps", intervals.union(last - lengths, last), intervals.EMPTY, 0, last - lengths, last)

    ms = 1_000_000
    (note,) = unprofiled.long_steps(recorded(*[30 * ms] * 13, 12_000 * ms), None, windows.CPU)
    assert note.id == "long-steps" and not note.blocks and "1 of the 14 recorded steps took 97% of their time (up to 12,000 ms" in note.message
    assert unprofiled.long_steps(recorded(*[30 * ms] * 13, 200 * ms), None, windows.CPU) == unprofiled.long_steps(recorded(), None, windows.CPU) == []
    waiting = intervals.union([13 * 30 * ms], [13 * 30 * ms + 11_980 * ms])
    assert unprofiled.long_steps(recorded(*[30 * ms] * 13, 12_000 * ms), waiting, windows.CPU) == []         # a burst of input
    assert unprofiled.long_steps(recorded(*[15 * ms] * 4, 440 * ms), None, 0) == [], "the last step waits for what was queued in all"


def test_more_steps_are_sampled_where_a_few_are_long():
    assert study_profile.uneven([10] * 7 + [1200]) and not study_profile.uneven([10, 11, 10, 12])


# -- observations ------------------------------------------------------------------------------------------------------


def loader(**changes: object):
    return diagnose._loader(Seen(facts=facts(), sample={**SAMPLE, **changes}), diagnose._shortener(CWD))


def test_what_the_rules_see_of_the_loader():
    seen = loader()
    assert (seen.num_workers, seen.batch_size, seen.slowest) == (0, 32, "data.py:17 __getitem__")
    assert seen.fetch_cpu == pytest.approx(0.75) and seen.io_wait == pytest.approx(0.1)
    assert seen.busy_cores == pytest.approx(0.7) and seen.read_bytes_per_s == pytest.approx(1e6)


def test_waiting_for_a_core_is_not_waiting_for_storage():
    assert loader(fetch_cpu_ns=100_000_000, fetch_queued_ns=290_000_000).fetch_cpu == pytest.approx(100 / 110)


def test_workers_are_measured_in_the_time_that_they_were_there():
    """Two that began in the middle of the window, when an epoch did."""
    seen = loader(workers=2, num_workers=2, worker_cpu_ns=900_000_000, worker_queued_ns=0, worker_ns=1_000_000_000)
    assert seen.fetch_cpu == pytest.approx(0.9) and seen.busy_cores == pytest.approx(0.7 + 2 * 0.9)


def test_a_core_that_another_program_has_is_not_free(monkeypatch):
    """"2.4 of 3 cores are free: raise num_workers" was said beside two other trainings."""
    monkeypatch.setattr(diagnose.os, "sched_getaffinity", lambda process: {0, 1, 2})
    machine = MachineFacts(cpu_count=3.0)
    quiet, crowded, slept = {"0": 10**9, "1": 10**9, "2": 10**8}, {"0": 10**8, "1": 10**8, "2": 10**8}, {"0": 10**9, "1": 10**9}
    busy = [diagnose._loader(Seen(facts=facts(machine=machine), sample={**SAMPLE, "idle_ns": idle}), str).busy_cores for idle in (quiet, crowded, slept)]
    assert busy == [pytest.approx(0.9), pytest.approx(2.7), pytest.approx(0.7)], "of the last one nobody knows"
    quota = diagnose._loader(Seen(facts=facts(machine=MachineFacts(cpu_count=0.8)), sample={**SAMPLE, "idle_ns": quiet}), str)
    assert quota.busy_cores == pytest.approx(0.7), "what else is idle is not for this process"


def test_workers_that_were_gone_tell_nothing():
    for loaders in ((LoaderFacts(num_workers=2),), (LoaderFacts(num_workers=2), LoaderFacts(num_workers=0))):     # the latter of a validation
        seen = diagnose._loader(Seen(facts=facts(loaders=loaders), sample={**SAMPLE, "num_workers": 2}), str)
        assert seen.fetch_cpu is None and seen.num_workers == 2


def test_storage_that_does_not_tell_is_unknown():
    assert loader(read_bytes=None).read_bytes_per_s is None
    assert loader(fetch_samples=3).io_wait is None


def test_compiler():
    assert diagnose._compiler({}).compiled is None
    assert diagnose._compiler({"compiler": {"compiled": False}}).compiled is False
    seen = diagnose._compiler({"compiler": {
        "compiled": True, "recompiles": 2, "recompile_reasons": ["a"], "compile_s": 0.5, "window_s": 2.0, "graph_breaks": 1,
        "graph_break_reasons": ["b"], "limit_hit": False}})
    assert (seen.recompiles, seen.compile_share, seen.graph_breaks, seen.recompile_limit_hit) == (2, 0.25, 1, False)


# -- the end -----------------------------------------------------------------------------------------------------------


def test_the_next_command():
    assert diagnose.next_command(request(), []) == "saturate tune -- python train.py"
    said = diagnose.next_command(request(step="backward:4"), ["compile", "gc-freeze", "compile"])
    assert shlex.split(said) == ["saturate", "tune", "--only", "compile,gc-freeze", "--step", "backward:4", "--", "python", "train.py"]
    elsewhere = dataclasses.replace(request(), directory=Path("/data/a b"))
    assert shlex.split(diagnose.next_command(elsewhere, []))[2:4] == ["--dir", "/data/a b"]


def test_nothing_to_tell_is_a_whole_record():
    found = nothing(dataclasses.replace(request(step="backward:4"), directory=Path("/data/a b")), "too short")
    assert found.next_command == "saturate profile --step backward:4 --dir '/data/a b' -- python train.py"
    assert isinstance(found, Profile) and found.unknown["verdict"] == "too short"
    assert set(Analysis.__struct_fields__) < set(Profile.__struct_fields__)


@pytest.mark.parametrize(("kind", "said"), [
    ("several_trainings", "saturate explain several_trainings"), ("not_in_time", "saturate profile --budget 10m -- python train.py"),
    ("", "saturate profile -- python train.py")])
def test_what_asks_for_another_command_is_not_followed_by_the_same(kind, said, tmp_path):
    study = Study(request(budget_s=300.0), tmp_path, SimpleNamespace(trials=lambda: [{"log": "log"}]), {}, lambda line: None)    # type: ignore[arg-type]
    if kind:
        assert study_profile.baseline.failed(study, Outcome(kind, "two of its processes train", "give another one")) is False
    assert study_profile._finished(study, None).next_command == said


def test_words_that_are_not_utf8_are_saved(tmp_path, monkeypatch):
    asked = dataclasses.replace(request(), argv=["python", os.fsdecode(b"tr\xff.py")])
    monkeypatch.setattr(diagnose, "diagnose", lambda *_: nothing(asked, "for a test"))
    study = SimpleNamespace(request=asked, folder=tmp_path, report_path=tmp_path / "report.html", registry={}, say=print)
    study_profile._finished(study, Seen(facts=facts(), traces=[tmp_path / "trace.json"]))
    assert json.loads((tmp_path / "profile.json").read_text(encoding="utf-8"))["command"] == ["python", "tr?.py"]


def test_without_numpy_it_says_what_to_install(monkeypatch):
    monkeypatch.setattr(study_profile, "find_spec", lambda name: None)
    with pytest.raises(EnvironmentProblem) as caught:
        study_profile.profile(request(), None, print)
    assert "saturate[trace]" in caught.value.remedy


# -- whole runs --------------------------------------------------------------------------------------------------------

TRAIN = """
import torch
from torch.utils.data import DataLoader, Dataset
torch.manual_seed(0)

class Slow(Dataset):
    def __len__(self):
        return 4096
    def __getitem__(self, index):
        total = 0
        for number in range(30_000): total += number          # the slow line
        return torch.full((16,), float(total % 7)), index % 4

model = torch.nn.Sequential(torch.nn.Linear(16, 32), torch.nn.ReLU(), torch.nn.Linear(32, 4))
optimizer = torch.optim.AdamW(model.parameters())
for epoch in range({epochs}):
    for inputs, labels in DataLoader(Slow(), batch_size=8):
        optimizer.zero_grad()
        loss = torch.nn.functional.cross_entropy(model(inputs), labels)
        loss.backward()
        optimizer.step()
    open("left-behind.txt", "w").write("x")
"""


def run(folder: Folder, *options: str, script: str = "train.py") -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-m", "saturate", "profile", *options, "--", sys.executable, script],
                          cwd=folder.path, env=folder.environment(), capture_output=True, text=True, timeout=300, check=False)


@pytest.mark.parametrize("step_ms", [10.0, 2000.0])
@pytest.mark.parametrize("every", [1, 2, 3, 4, 5, 8, 20])
def test_a_step_without_an_evaluation_is_counted_wherever_there_is_one(every, step_ms):
    for first in range(every):
        passed = [first]

        def look(kind, skip, steps, passed=passed):
            counted = passed[-1] + skip + steps
            passed.append(counted + 1)
            return {"evaluated": counted % every == 0}

        found = study_profile._modules(SimpleNamespace(look=look), step_ms)
        assert found["evaluated"] == (every == 1) and len(passed) <= 4


def test_a_profile_from_beginning_to_end(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    folder = Folder(tmp_path)
    source = folder.write("train.py", TRAIN.replace("{epochs}", "10**6"))
    line = 1 + source.read_text().splitlines().index(next(text for text in source.read_text().splitlines() if "the slow line" in text))
    done = run(folder, "--json", "--budget", "60s", "--steps", "4")
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["command"] == [sys.executable, "train.py"]
    assert found["recorded_steps"] == found["devices"][0]["steps"] == 4
    assert sum(found["split"].values()) > 0 and all(isinstance(ns, int) for ns in found["split"].values())
    assert found["verdict"] == "input-bound" and found["findings"][0]["id"] == "input-bound-cpu"
    assert found["input_lines"][0]["file"] == "train.py" and found["input_lines"][0]["line"] == line
    assert unreasoned(found) == set()
    assert found["step_ms"] > 0 and found["memory"]["parameters"] == 4 * (16 * 32 + 32 + 32 * 4 + 4)
    assert found["flops_per_step"] == 2 * 8 * 16 * 32 * 2 + 2 * 8 * 32 * 4 * 3
    assert {row["name"] for row in found["modules"]} == {"Sequential", "0", "1", "2"}
    assert "--only loader-workers" in found["next_command"] and found["mfu"] is None and found["unknown"]["mfu"]
    assert Path(found["trace"]).is_file() and Path(found["report"]).read_text(encoding="utf-8").startswith("<!")
    assert not (tmp_path / "left-behind.txt").exists()
    assert not folder.wait_until_nothing_lives()


@pytest.mark.slow
def test_a_command_that_ends_too_soon(tmp_path):
    folder = Folder(tmp_path)
    folder.write("train.py", "print('no training here')\n")
    done = run(folder, "--json", "--budget", "30s")
    assert done.returncode == 0 and "E400" not in done.stderr
    assert "does not train" in json.loads(done.stdout)["unknown"]["verdict"]


@pytest.mark.slow
def test_a_command_that_fails(tmp_path):
    folder = Folder(tmp_path)
    folder.write("train.py", "raise SystemExit('no data')\n")
    done = run(folder, "--json", "--budget", "30s")
    assert done.returncode == 4 and "no data" in done.stderr
    assert json.loads(done.stdout)["devices"] == []


@pytest.mark.slow
def test_an_interrupted_profile_leaves_nothing_running(tmp_path):
    import signal
    import time

    folder = Folder(tmp_path)
    folder.write("train.py", TRAIN.replace("{epochs}", "10**6"))
    process = subprocess.Popen([sys.executable, "-m", "saturate", "profile", "--", sys.executable, "train.py"],
                               cwd=folder.path, env=folder.environment(), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    deadline = time.monotonic() + 60
    while len(folder.alive()) < 3 and time.monotonic() < deadline:
        time.sleep(0.2)
    time.sleep(2)
    process.send_signal(signal.SIGINT)
    process.communicate(timeout=60)
    assert process.returncode == 130
    assert not folder.wait_until_nothing_lives()


@pytest.mark.parametrize(("words", "said"), [
    (["--steps", "1"], "2 to 1000"), (["--steps", "many"], "2 to 1000"), (["--with", "perf"], "perf"), (["--budget", "soon"], "soon"),
])
def test_options_that_cannot_be(capsys, words, said):
    from saturate.cli import main

    assert main.main(["profile", *words, "--", "python", "train.py"]) == 2
    assert said in capsys.readouterr().err


def test_nsys_that_is_not_there(tmp_path, monkeypatch, capsys):
    from saturate.cli import main
    from saturate.study import nsight

    monkeypatch.setenv("PATH", str(Path(sys.executable).parent))
    monkeypatch.setattr(nsight, "PLACES", ())
    monkeypatch.chdir(tmp_path)
    assert main.main(["profile", "--json", "--with", "nsys", "--", sys.executable, "-c", ""]) == 3
    shown = capsys.readouterr()
    assert "Nsight Systems is not installed" in shown.err and json.loads(shown.out)["devices"] == []


# -- memory by line, and for the rules ---------------------------------------------------------------------------------

LINES = {"saved_bytes": 400, "memory_lines": [[f"{CWD}/model.py", 88, "forward", "", 0, "", 300],
                                              [f"{CWD}/train.py", 60, "main", "/lib/modeling.py", 310, "forward", 90]]}


def test_memory_by_line():
    seen = Seen(facts(machine=MachineFacts(memory_bytes=1000)), sample=SAMPLE, modules=LINES, resident_bytes=900)
    found = memory.breakdown(seen, diagnose._shortener(CWD))
    assert [memory.place(line) for line in found.lines] == ["model.py:88 forward", "train.py:60 main (in /lib/modeling.py:310 forward)"]
    rules = memory.observed(found, seen)
    assert rules.used == 0.9 and rules.line == "model.py:88 forward" and rules.line_share == pytest.approx(300 / 790)
    assert rules.activations == pytest.approx(400 / 790) and rules.optimizer_state == pytest.approx(200 / 790)


def test_what_is_kept_for_the_backward_pass_is_told_apart_from_the_rest_on_a_device():
    device = {"peak": 1000, "active_peak": 1200, "reserved": 1600, "retries": 3, "total": 1100}
    seen = Seen(facts(device="cuda"), sample={**SAMPLE, "device_memory": device}, modules=LINES, resident_bytes=10**9)
    found = memory.breakdown(seen, diagnose._shortener(CWD))
    assert (found.activations, found.other, found.limit) == (400, 1000 - 390 - 400, 1100)
    rules = memory.observed(found, seen)
    assert rules.used == pytest.approx(1000 / 1100) and rules.activations == 0.4 and rules.line_share == 0.3
    unseen = memory.observed(memory.breakdown(Seen(facts(), sample=SAMPLE), diagnose._shortener(CWD)), Seen(facts()))
    assert unseen.used is None and unseen.activations is None and unseen.parameters is None and unseen.line == ""


@pytest.mark.slow
def test_a_script_that_ends_soon_is_looked_at_again_more_briefly(tmp_path):
    """With steps of about a millisecond, the usual windows take more of them than it has."""
    folder = Folder(tmp_path)
    folder.write("train.py", TRAINING + "\nfor _ in range(320): step()\n")
    ended = run(folder, "--json")
    found = json.loads(ended.stdout)
    assert "looking again" in ended.stderr, ended.stderr
    assert ended.returncode == 0 and found["step_ms"] is not None and found["split"], ended.stderr


def test_where_nothing_was_measured_every_missing_field_has_its_reason():
    found = nothing(request(), "the script ended after 3 training steps")
    for part in (found, found.memory):
        missing = {name for name in part.__struct_fields__ if getattr(part, name) is None}
        assert missing and missing <= part.unknown.keys()
    assert found.unknown["step_ms"] == found.unknown["verdict"] == "the script ended after 3 training steps"
    assert not found.integrity.ok and found.integrity.problems


def test_techniques_that_do_not_apply_are_not_named():
    def answers(answer):
        def eligible(seen):
            if isinstance(answer, Exception):
                raise answer
            return answer
        return SimpleNamespace(eligible=eligible)

    registry = {"yes": answers(True), "no": answers(False), "broken": answers(ValueError("of a third party"))}
    assert study_profile._applicable(SimpleNamespace(registry=registry), facts()) == {"yes", "broken"}
