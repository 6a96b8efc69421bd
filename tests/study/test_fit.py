"""`saturate fit` as a user runs it: what it answers, that the answer runs, and that nothing else changes."""

from __future__ import annotations

import json
import os
import platform
import re
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import msgspec
import pytest
from fit_kit import TRAINING, FitFolder
from tune_kit import no_traceback_of_ours, untouched

from saturate.measure import memory_model
from saturate.measure.memory_model import Point
from saturate.records.fit import SizeTried
from saturate.study.fit import (
    Asked,
    _advice,
    _advice_on_dataset,
    _advice_on_failures,
    _advice_on_loaders,
    _loaders,
    _note_on_loaders,
    _write,
    nothing,
)
from saturate.study.fit_knob import Shown, differs, knob_value, with_knob
from saturate.study.fit_process import verdict_of
from saturate.study.fit_search import Search
from saturate.study.fit_state import Proof, State
from saturate.study.state import Request
from saturate.trial import meter
from saturate.trial.outcome import Outcome, classify
from saturate.trial.process import TrialEnded

MIB = 2**20

PLAIN = TRAINING + """
SIZE = int(sys.argv[1]) if len(sys.argv) > 1 else 8
train, test = DataLoader(Rows(), SIZE, shuffle=True), DataLoader(Rows(), 8)
for epoch in range(int(sys.argv[2]) if len(sys.argv) > 2 else 10**6):
    model.train()
    for count, rows in enumerate(train):
        step(rows)
        if len(sys.argv) > 2 and count > 20: break
    model.eval()
    with torch.no_grad():
        for rows, _ in zip(test, range(3)): model(rows)
    torch.save(model.state_dict(), "model.pt")
"""


@pytest.fixture
def home(tmp_path):
    folder = FitFolder(tmp_path)
    yield folder
    left = folder.wait_until_nothing_lives()
    assert not left, left


def peak_of(argv, home):
    """The peak of a command, bytes, and its exit code."""
    process = subprocess.Popen([sys.executable, "-c", "import subprocess, sys; sys.exit(subprocess.call(sys.argv[1:]))", *argv],
                               cwd=home.path, env=home.environment())
    watch = meter.Meter(process.pid, float("inf"))
    code = process.wait()
    watch.close()
    return watch.peak_bytes(), code


def test_the_answer_fits_and_really_runs(home):
    home.write("train.py", PLAIN)
    with untouched(home.path):
        ended = home.fit("--memory", "640MiB")
    assert ended.code == 0, ended.stderr
    found = ended.found
    assert found.verdict == "fits" and found.script_batch == 8 and found.counted and found.schema == 1
    assert found.trial_count <= 4 and found.trial_count == max(one.trial for one in found.trials)
    assert found.peak_bytes <= found.limit_bytes - found.margin_bytes and found.limit_bytes == 640 * MIB
    assert found.proved_steps >= 8 and found.proved_with == ["an evaluation", "a checkpoint"] and found.not_seen == []
    assert any(one.micro_batch == found.micro_batch and one.purpose == "prove" and one.outcome == "fits" for one in found.trials)
    assert found.largest_tried == max(one.micro_batch for one in found.trials)
    room = 640 * MIB - found.fixed_bytes
    assert found.sample_bytes * found.micro_batch > 0.9 * room, "too little of the memory is used"
    assert 2 * MIB < found.sample_bytes < 16 * MIB, "the input, eight results of 256 KiB, and what is in work or kept by the C library"
    assert [one.micro_batch for one in found.throughput] == sorted({one.micro_batch for one in found.throughput})
    assert found.knee in [one.micro_batch for one in found.throughput]
    assert all(one.ci[0] <= one.samples_per_s <= one.ci[1] for one in found.throughput)
    assert 0 < found.utilisation <= 1
    assert "convergence" in found.advice[0] and f"{found.micro_batch}" in found.advice[0]
    report = Path(found.report).read_text(encoding="utf-8")
    assert "<script src" not in report and "http" not in re.sub(r"http-equiv|http://www\.w3\.org", "", report)
    lines = ended.stderr.strip().splitlines()
    summary = lines[next(i for i, line in enumerate(lines) if line.startswith("a batch of")):]
    assert len(summary) <= 12 and summary[-1].startswith("next") and "saturate tune" in summary[-1]
    peak, code = peak_of([sys.executable, "train.py", str(found.micro_batch), "1"], home)
    assert code == 0 and peak < 640 * MIB, "the unmodified script with this size does not fit"


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="only glibc tells what its heaps hold")
def test_what_heaps_take_is_answered_with_care(home):
    home.heaps = True
    home.write("train.py", PLAIN)
    found = home.fit("--memory", "640MiB").found
    assert found.verdict == "fits" and found.peak_bytes <= found.limit_bytes - found.margin_bytes
    assert found.micro_batch >= 16, "half of what fits where every block is mapped by itself"
    assert found.margin_bytes > 0.04 * found.limit_bytes, "most of the batch comes from heaps"
    assert "MALLOC_MMAP_THRESHOLD_" in found.advice[-1]


def test_the_margin_is_wide_only_where_the_c_librarys_heaps_hold_the_batch():
    state = State(bench=None, memory_bytes=None, target="throughput", asked_most=None, accelerated=False, budget_s=1.0, deadline=1.0, say=print)
    state.limit_bytes, state.facts = 1000 * MIB, {"device": "cpu"}
    state.idle_bytes = 300 * MIB
    assert state.margin_bytes == 105 * MIB, "what came from heaps is not known yet: 15 % of what the batch may take"
    state.heaps = [(Point(8, 400 * MIB), 100 * MIB), (Point(64, 800 * MIB), 180 * MIB)]
    assert state.margin_bytes == 21 * MIB, "a fifth of what more samples took"
    state.heaps = state.heaps[1:]
    assert state.margin_bytes == round(0.15 * 180 / 800 * 700 * MIB), "one size: what the heaps held at all"
    state.heaps = [(Point(8, 400 * MIB), 100 * MIB), (Point(64, 800 * MIB), 100 * MIB)]
    assert state.margin_bytes == 5 * MIB, "half a percent of the limit, at least"
    state.facts["device"] = "cuda"
    assert state.margin_bytes == 5 * MIB


def test_words_that_are_not_utf8_are_saved(tmp_path):
    study = SimpleNamespace(folder=tmp_path, report_path=tmp_path / "report.html", say=print)
    request = Request(["python", os.fsdecode(b"tr\xff.py")], tmp_path, {}, tmp_path / ".saturate")
    _write(study, nothing(Asked(request), "too short"))
    assert json.loads((tmp_path / "fit.json").read_text(encoding="utf-8"))["command"] == ["python", "tr?.py"]
    assert "tr\ufffd.py" in study.report_path.read_text(encoding="utf-8")


def test_an_answer_as_large_as_the_dataset_says_so():
    """Half of the memory may be free: nothing larger can be asked of the loader."""
    state = SimpleNamespace(loader={"length": 64}, reads=1, most=64)
    (advice,) = _advice_on_dataset(state, 64)
    assert "64 samples" in advice and "no larger batch was tried" in advice
    assert _advice_on_dataset(state, 48) == _advice_on_dataset(state, None) == []
    for loader in ({"length": None}, {}):
        assert _advice_on_dataset(SimpleNamespace(loader=loader, reads=1, most=1 << 20), 64) == []


def test_what_ended_the_search_is_what_the_advice_is_about():
    state = Search(bench=SimpleNamespace(workload=SimpleNamespace(environment={})), memory_bytes=None, target="memory", asked_most=None,
                   accelerated=False, budget_s=1.0, deadline=1.0, say=print)
    state.limit_bytes, state.idle_bytes, state.facts = 1000 * MIB, 300 * MIB, {"device": "cpu"}
    state.own, state.proofs = 64, {64: Proof(50, 850 * MIB, [], [])}
    assert "MALLOC_MMAP_THRESHOLD_" in _advice(state, 64)[-1], "10 % of the limit are kept for the heaps"
    state.idle_bytes = 800 * MIB
    assert state.margin_bytes > memory_model.margin_bytes(1000 * MIB) and _advice(state, 64) == [], "what they cost is not worth a search"
    state.idle_bytes, state.proofs, state.measured = 300 * MIB, {}, {64: Proof(4, 400 * MIB, [], [])}
    state.tried = [SizeTried(micro_batch=90, outcome="out_of_time", peak_bytes=None, seconds=1.0, trial=2, purpose="prove")]
    assert _advice(state, 64) == ["a longer --budget may prove a batch of 90: its proof had no time"]


@pytest.mark.parametrize(("body", "reason"), [
    ("while True: step(torch.ones(8, KIB * 256))", "its training does not read from a DataLoader"),
    pytest.param("""
class Batches(IterableDataset):
    def __iter__(self):
        while True: yield torch.ones(8, KIB * 256)
for rows in DataLoader(Batches(), batch_size=None): step(rows)
""", "its DataLoader does no batching: the dataset Batches makes the batches itself", marks=pytest.mark.slow),
    pytest.param("""
class Odd:
    def __iter__(self): return iter([[i] * (1 + i % 7) for i in range(4096)])
    def __len__(self): return 4096
for rows in DataLoader(Rows(), batch_sampler=Odd()): step(rows)
""", r"its batch sampler has no batch size \(it made batches of 1, ", marks=pytest.mark.slow),
    pytest.param("for rows in DataLoader(Rows(), 8): step(rows.view(8, KIB * 256))",
                 "it does not work with a batch of .* instead of 8: .*invalid for input of size", marks=pytest.mark.slow),
    pytest.param("rows = next(iter(DataLoader(Rows(), 8)))\nwhile True: step(rows)",
                 "its training does not read a batch for every step", marks=pytest.mark.slow),
])
def test_what_cannot_be_searched_is_refused_by_name(home, body, reason):
    home.write("train.py", TRAINING + body)
    ended = home.fit("--memory", "700MiB")
    found = ended.found
    assert ended.code == 0 and found.verdict == "refused" and re.match(reason, found.reason), found.reason
    assert found.micro_batch is None and "--knob=--batch-size" in found.next_command
    assert "cannot search its batch" in ended.stderr


@pytest.mark.slow
def test_for_throughput_the_smallest_size_that_is_as_fast_is_the_answer(home):
    home.write("train.py", TRAINING.replace("KIB = 256", "KIB = 1") + """
import time
while True:
    for rows in DataLoader(Rows(), 8):
        step(rows)
        time.sleep(0.004 * len(rows))
""")
    ended = home.fit("--memory", "900MiB", "--max", "64", "--target", "throughput")
    found = ended.found
    assert found.verdict == "fits" and found.micro_batch == found.knee < found.largest_fitting == 64, ended.stderr
    assert any((one.micro_batch, one.purpose, one.outcome) == (found.knee, "prove", "fits") for one in found.trials)
    assert "is as fast as any that fits" in ended.stderr


@pytest.mark.slow
def test_a_batch_of_one_that_does_not_fit(home):
    home.write("train.py", TRAINING.replace("KIB = 256", "KIB = 131072") + "for rows in DataLoader(Rows(), 8): step(rows)")
    ended = home.fit("--memory", "700MiB")
    found = ended.found
    assert ended.code == 0 and found.verdict == "nothing_fits" and "a batch of 1 does not fit 700 MiB" in found.reason
    assert found.micro_batch is None and found.trial_count <= 4
    assert {one.outcome for one in found.trials} == {"out_of_memory"} and found.trials[-1].micro_batch == 1
    assert "nothing fits 700 MiB" in ended.stderr


@pytest.mark.slow
def test_the_scripts_own_batch_that_does_not_fit(home):
    home.write("train.py", TRAINING + "while True:\n    for rows in DataLoader(Rows(), 400): step(rows)")
    found = home.fit("--memory", "640MiB").found
    assert found.verdict == "fits" and found.script_batch == 400 and found.micro_batch < 200
    assert found.trials[0].micro_batch == 400 and found.trials[0].outcome == "out_of_memory"
    assert "more micro-steps" in found.advice[0]


@pytest.mark.slow
@pytest.mark.parametrize("workers", [0, 2])
def test_the_largest_samples_are_part_of_the_proof(home, workers):
    """One text in a thousand is sixteen times as long as the others: a batch of those is what must fit."""
    home.write("train.py", TRAINING + f"""
class Texts(Rows):
    def __getitem__(self, index): return torch.ones(256 * (16 + 240 * (index % 1000 == 7)))
def collate(samples): return torch.nn.utils.rnn.pad_sequence(samples, batch_first=True)
while True:
    for rows in DataLoader(Texts(), 4, shuffle=True, collate_fn=collate, num_workers={workers}): step(rows)
""")
    found = home.fit("--memory", "900MiB").found
    assert found.verdict == "fits" and found.proved_with[0].startswith("a batch of the largest samples")
    assert found.sample_bytes > 1.5 * MIB, "the peak is that of short texts"


@pytest.mark.slow
def test_a_short_script_is_proved_to_its_end(home):
    home.write("train.py", TRAINING + """
for rows, _ in zip(DataLoader(Rows(), 8), range(70)): step(rows)
torch.save(model.state_dict(), "model.pt")
""")
    found = home.fit("--memory", "640MiB", "--max", "16").found
    assert found.verdict == "fits" and found.micro_batch <= 16


@pytest.mark.slow
def test_too_short_a_script_is_no_error(home):
    home.write("train.py", TRAINING + "for rows, _ in zip(DataLoader(Rows(), 8), range(3)): step(rows)")
    ended = home.fit("--memory", "640MiB")
    assert ended.code == 0 and ended.found.verdict == "inconclusive" and "give it more steps" in ended.found.reason


@pytest.mark.slow
def test_the_dataset_bounds_the_batch(home):
    home.write("train.py", TRAINING.replace("KIB = 256", "KIB = 1").replace("4096", "40") + """
while True:
    for rows in DataLoader(Rows(), 8): step(rows)
""")
    found = home.fit("--memory", "900MiB").found
    assert found.micro_batch == 40 and found.largest_tried == 40


@pytest.mark.slow
def test_a_loop_that_counts_its_batches(home):
    """`next` in a loop over `range(len(loader))` is not prepared for an epoch that ends early: the answer stands, and the
    report says what was not seen."""
    home.write("train.py", TRAINING + """
loader = DataLoader(Rows(), 8, shuffle=True)
while True:
    batches = iter(loader)
    for _ in range(len(loader)): step(next(batches))
    torch.save(model.state_dict(), "model.pt")
""")
    found = home.fit("--memory", "640MiB").found
    assert found.verdict == "fits" and found.proved_steps >= 8
    assert any("epoch that ends early" in note for note in found.notes) and any("a checkpoint" in one for one in found.not_seen)


@pytest.mark.slow
def test_a_list_as_long_as_a_pass(home):
    """Held open, a pass has more batches than the list has places: that was called a failure of the command."""
    home.write("train.py", TRAINING.replace("4096", "96") + """
loader = DataLoader(Rows(), 8, shuffle=True)
while True:
    losses = [0.0] * len(loader)
    for index, rows in enumerate(loader):
        step(rows)
        losses[index] = 1.0
""")
    ended = home.fit("--memory", "640MiB")
    assert ended.code == 0, ended.stderr
    assert ended.found.verdict == "fits" and ended.found.micro_batch > 40, ended.found
    assert any("does not bear a pass over its loader that goes on (IndexError" in note for note in ended.found.notes)


@pytest.mark.slow
def test_the_answer_bears_the_end_of_a_pass(home):
    """Of 91 samples, 45 leave one, on which BatchNorm cannot train."""
    home.write("train.py", TRAINING.replace("KIB = 256", "KIB = 1").replace("4096", "91") + """
model = torch.nn.Sequential(torch.nn.BatchNorm1d(KIB * 256), model)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
for epoch in range(10**9 if len(sys.argv) < 2 else 1):
    for rows in DataLoader(Rows(), int(sys.argv[1]) if len(sys.argv) > 1 else 7): step(rows)
""")
    found = home.fit("--memory", "900MiB", "--max", "45").found
    assert found.verdict == "fits" and found.micro_batch == 44
    for size, code in ((found.micro_batch, 0), (45, 1)):
        assert peak_of([sys.executable, "train.py", str(size)], home)[1] == code


@pytest.mark.slow
def test_a_pass_of_the_answer_comes_to_an_update(home):
    home.write("train.py", TRAINING.replace("KIB = 256", "KIB = 1").replace("4096", "64") + """
while True:
    for index, rows in enumerate(DataLoader(Rows(), 4)):
        (model(rows) / 4).backward()
        if (index + 1) % 4 == 0:
            optimizer.step()
            optimizer.zero_grad()
""")
    found = home.fit("--memory", "900MiB").found
    assert found.verdict == "fits" and found.micro_batch == 16


@pytest.mark.slow
@pytest.mark.parametrize(("workers", "largest"), [(0, 40), (2, 20)])
def test_an_iterable_dataset_bounds_the_batch(home, workers, largest):
    home.write("train.py", TRAINING.replace("KIB = 256", "KIB = 1") + f"""
class Lines(IterableDataset):
    def __iter__(self):
        part = torch.utils.data.get_worker_info()
        return iter([torch.full((KIB * 256,), index / 40) for index in range(40)][part.id if part else 0::part.num_workers if part else 1])
while True:
    for rows in DataLoader(Lines(), 8, num_workers={workers}): step(rows)
""")
    found = home.fit("--memory", "900MiB").found
    assert found.verdict == "fits" and found.micro_batch == largest == found.largest_tried, found


@pytest.mark.slow
def test_a_script_that_ends_within_the_second_size(home):
    home.write("train.py", TRAINING + "for rows, _ in zip(DataLoader(Rows(), 8), range(24)): step(rows)")
    found = home.fit("--memory", "640MiB").found
    assert found.verdict == "fits" and "the script's own end" in found.proved_with, found


@pytest.mark.slow
def test_the_scripts_own_argument(home):
    home.write("train.py", TRAINING + """
import argparse
parser = argparse.ArgumentParser()
parser.add_argument("--batch-size", type=int, default=8)
size = parser.parse_args().batch_size
from torch import save
while True:
    step(torch.ones(size, KIB * 256))
    model.eval(); model.train()
    save(model.state_dict(), "model.pt")
""")
    ended = home.fit("--memory", "640MiB", "--knob=--batch-size", argv=(sys.executable, "train.py", "--batch-size", "8"))
    found = ended.found
    assert found.verdict == "fits" and found.knob == "--batch-size" and 16 < found.micro_batch < 130, ended.stderr
    assert found.peak_bytes <= 640 << 20
    assert found.trial_count <= 4 and found.next_command.endswith(f"train.py --batch-size {found.micro_batch}")
    assert len({one.trial for one in found.trials}) == len(found.trials), "one process per size"
    assert found.not_seen == ["the largest samples: they were not looked for"], "its evaluations and saves are seen without a loader, and by whatever name"
    nameless = home.fit("--memory", "640MiB", "--knob=--batch-size").found
    assert nameless.verdict == "refused" and "add --batch-size N to the command" in nameless.reason


@pytest.mark.slow
def test_an_argument_that_changes_nothing_without_a_loader(home):
    home.write("train.py", TRAINING + "while True: step(torch.ones(8, KIB * 256))")
    found = home.fit("--memory", "900MiB", "--knob=--batch-size", argv=(sys.executable, "train.py", "--batch-size", "8")).found
    assert found.verdict == "refused" and "changed nothing" in found.reason and found.micro_batch is None


def test_two_values_of_an_argument_that_differ_in_nothing_are_no_two_sizes():
    small = Shown(300 << 20, 0.01, "8")
    assert differs(16, small, 8, replace(small, given="16")) and differs(16, small, 8, replace(small, peak_bytes=400 << 20))
    assert not differs(16, small, 8, replace(small, step_s=0.1)), "the model is given the same"
    unknown = replace(small, given=None)
    assert differs(128, unknown, 16, unknown), "a small batch is not seen in the memory of a whole process"
    assert not differs(1024, unknown, 16, unknown) and differs(1024, unknown, 16, replace(unknown, step_s=0.02))


def test_a_worker_that_the_kernel_ends_did_not_fit():
    """Not one that somebody else ends: the kernel counts what it ends for want of memory."""
    watch = SimpleNamespace(exceeded_bytes=None, late=False)
    log = "Traceback (most recent call last):\nRuntimeError: DataLoader worker (pid 7) is killed by signal: Killed. \n"
    for count, verdict in ((1, "out_of_memory"), (0, "failed"), (None, "out_of_memory")):
        ended = TrialEnded(classify({"ended": "exit", "code": 1, "out_of_memory": count}, log, 9, True, None))
        assert verdict_of(ended, watch)[0] == verdict


def test_a_size_that_failed_for_something_else_than_memory_is_named():
    tried = [SizeTried(micro_batch=size, outcome=outcome, peak_bytes=None, seconds=1.0, trial=1, purpose="prove", reason="no multiple of 8")
             for size, outcome in ((100, "failed"), (50, "failed"), (300, "out_of_memory"))]
    (advice,) = _advice_on_failures(SimpleNamespace(tried=tried), 64)
    assert "100" in advice and "no multiple of 8" in advice


@pytest.mark.slow
def test_an_argument_that_changes_nothing(home):
    home.write("train.py", TRAINING + "while True:\n    for rows in DataLoader(Rows(), 8): step(rows)")
    found = home.fit("--memory", "640MiB", "--knob=--batch-size", argv=(sys.executable, "train.py", "--batch-size", "8")).found
    assert found.verdict == "refused" and "changed nothing" in found.reason


@pytest.mark.slow
def test_all_ranks_get_the_same_batch(home):
    home.write("train.py", TRAINING + """
import torch.distributed as dist
from torch.utils.data import DistributedSampler
dist.init_process_group("gloo")
model = torch.nn.parallel.DistributedDataParallel(model)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
sampler = DistributedSampler(Rows())
loader = DataLoader(Rows(), 4, sampler=sampler)
for epoch in range(10**6):
    sampler.set_epoch(epoch)
    for rows in loader:
        sizes = [None, None]
        dist.all_gather_object(sizes, len(rows))
        assert sizes[0] == sizes[1], sizes
        step(rows)
""")
    argv = (sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "train.py")
    ended = home.fit("--memory", "1000MiB", argv=argv)
    found = ended.found
    assert found.verdict == "fits" and found.world_size == 2 and found.micro_batch > 8, ended.stderr
    assert "on each of 2 ranks" in ended.stderr
    assert "failed" not in {one.outcome for one in found.trials}, "ranks that get unequal batches fail"


@pytest.mark.slow
def test_lightning_is_not_resized_twice(home):
    pytest.importorskip("lightning", reason="Lightning is not installed")
    home.write("train.py", TRAINING + """
import lightning as L
class Module(L.LightningModule):
    def __init__(self):
        super().__init__()
        self.net = Net()
    def training_step(self, batch, index): return self.net(batch)
    def validation_step(self, batch, index): self.net(batch)
    def configure_optimizers(self): return torch.optim.SGD(self.parameters(), lr=0.01)
trainer = L.Trainer(max_epochs=1000, accelerator="cpu", logger=False, enable_progress_bar=False, limit_val_batches=2)
trainer.fit(Module(), DataLoader(Rows(), 8, shuffle=True), DataLoader(Rows(), 8))
""")
    ended = home.fit("--memory", "900MiB")
    found = ended.found
    assert found.verdict == "fits" and found.micro_batch > 8, ended.stderr
    assert {"an evaluation", "a checkpoint"} <= set(found.proved_with), found


@pytest.mark.slow
def test_the_trainer_is_not_resized_twice(home):
    pytest.importorskip("transformers", reason="transformers is not installed")
    pytest.importorskip("accelerate", reason="accelerate is not installed")
    home.write("train.py", TRAINING + """
from transformers import Trainer, TrainingArguments
class Dicts(Rows):
    def __getitem__(self, index): return {"rows": super().__getitem__(index), "labels": 0}
class WithLoss(Net):
    def forward(self, rows, labels=None): return {"loss": super().forward(rows)}
arguments = TrainingArguments("out", per_device_train_batch_size=8, num_train_epochs=1000, use_cpu=True, report_to="none",
                              eval_strategy="epoch", save_strategy="epoch", disable_tqdm=True)
Trainer(WithLoss(), arguments, train_dataset=Dicts(), eval_dataset=torch.utils.data.Subset(Dicts(), range(16))).train()
""")
    ended = home.fit("--memory", "1100MiB")
    found = ended.found
    assert found.verdict == "fits" and found.micro_batch > 8, ended.stderr
    assert {"an evaluation", "a checkpoint"} <= set(found.proved_with), found


@pytest.mark.slow
def test_ctrl_c_leaves_nothing_and_tells_the_best_so_far(home):
    home.write("train.py", PLAIN)
    with untouched(home.path):
        process = home.begin("--memory", "640MiB")
        seen = ""
        while "prove a batch of" not in seen:
            line = process.stderr.readline()
            assert line, seen
            seen += line
        time.sleep(1.0)
        process.send_signal(signal.SIGINT)
        stdout, stderr = process.communicate(timeout=60)
    assert process.returncode == 130 and no_traceback_of_ours(stderr), stderr
    assert '"verdict":"inconclusive"' in stdout and "interrupted before a size was proved" in stdout and '"measured_batch":null' not in stdout
    assert "measured so far, not proved: a batch of" in stderr


@pytest.mark.slow
def test_a_budget_that_ends_early(home):
    home.write("train.py", PLAIN)
    began = time.monotonic()
    ended = home.fit("--memory", "640MiB", "--budget", "1s")
    assert ended.code == 0 and ended.found.verdict == "inconclusive" and "budget" in ended.found.reason
    assert time.monotonic() - began < 40


@pytest.mark.slow
def test_a_command_that_fails_by_itself(home):
    home.write("train.py", "raise SystemExit('no data')")
    ended = home.fit("--memory", "640MiB")
    assert ended.code == 4 and "no data" in ended.stderr and ended.found.verdict == "inconclusive"


def test_bad_requests_are_refused_before_anything_runs(home):
    home.write("train.py", "open('ran', 'w')")
    for options, words in [(("--memory", "lots"), "is not an amount of memory"), (("--max", "0"), "is not a batch size"),
                           (("--knob=size",), "is not an argument"), (("--target", "speed"), "not one of")]:
        ended = home.fit(*options)
        assert ended.code == 2 and words in ended.stderr, ended.stderr
    ended = home.fit("--memory", "1000TiB")
    if not os.path.exists("/dev/nvidiactl"):
        assert ended.code == 3 and "to give now" in ended.stderr
    ended = home.fit("--memory", "1GiB", "--knob=--batch", argv=(sys.executable, "train.py", "--batch", "many"))
    assert ended.code == 2 and "'many'" in ended.stderr
    assert not (home.path / "ran").exists()


@pytest.mark.slow
def test_on_a_cpu_the_limit_must_be_given(home):
    home.write("train.py", PLAIN)
    ended = home.fit()
    assert ended.code == 2 and "--memory 4GiB" in ended.stderr


@pytest.mark.parametrize(("argv", "value"), [
    (["t.py", "--batch-size", "8"], 8), (["t.py", "--batch-size=8", "-x"], 8), (["t.py"], None), (["t.py", "--batch-size-eval", "3"], None),
    (["t.py", "--batch-size", "8", "--batch-size", "9"], 9)])
def test_the_value_of_an_argument(argv, value):
    assert knob_value(argv, "--batch-size") == value
    changed = with_knob(argv, "--batch-size", 64)
    assert knob_value(changed, "--batch-size") == 64 and len(changed) - len(argv) in ((0,) if value else (2,))


@pytest.mark.parametrize(("command", "knob", "changed"), [
    ("taskset -c 0,1 python t.py -c 32", "-c", "taskset -c 0,1 python t.py -c 64"),
    ("mpirun -n 2 python t.py -n 32", "-n", "mpirun -n 2 python t.py -n 64"), ("mpirun -n 2 python t.py", "-n", "mpirun -n 2 python t.py -n 64"),
    ("python -m pkg -m 32", "-m", "python -m pkg -m 64"), ("python -m pkg", "-m", "python -m pkg -m 64"),
    ("python t.py -b 8 -b 9", "-b", "python t.py -b 8 -b 64"),
    ("python t.py -- data", "-b", "python t.py -b 64 -- data"), ("python t.py -b=8 -- -b 9", "-b", "python t.py -b=64 -- -b 9"),
    ("./run.sh -- python t.py -b 8", "-b", "./run.sh -- python t.py -b 64"),
])
def test_only_the_scripts_own_argument_is_set(command, knob, changed):
    assert with_knob(command.split(), knob, 64) == changed.split()
    assert knob_value(changed.split(), knob) == 64


def two_loaders():
    search = Search(bench=SimpleNamespace(asking=SimpleNamespace()), memory_bytes=None, target="memory", asked_most=None, accelerated=False,
                    budget_s=1.0, deadline=1.0, say=print)
    search._take_loaders([{"description": text, "dataset": text, "length": 2000, "batch_size": size, "queue": 0}
                          for text, size in (("Labelled", 32), ("Unlabelled", 224))])
    return search


def test_the_batch_of_each_loader_is_named():
    """A step that reads two loaders has two batches: an answer for one of them says what becomes of the other."""
    loaders = _loaders(SimpleNamespace(knob=None), two_loaders(), 64)
    assert [(one.dataset, one.script_batch, one.micro_batch) for one in loaders] == [("Labelled", 32, 64), ("Unlabelled", 224, 448)]
    assert _advice_on_loaders(loaders) == ["set all its loaders: the loader of Labelled (2,000 samples) 64 instead of 32, "
                                           "the loader of Unlabelled (2,000 samples) 448 instead of 224"]
    note = _note_on_loaders(loaders)
    assert "keep their proportion: sizes are those of the loader of Labelled" in note and "the loader of Unlabelled (2,000 samples) 224" in note
    nothing = _loaders(SimpleNamespace(knob=None), two_loaders(), None)
    assert [one.micro_batch for one in nothing] == [None, None] and _advice_on_loaders(nothing) == []
    assert _loaders(SimpleNamespace(knob="--batch-size"), two_loaders(), 64) == [], "the script's own argument is its own business"


@pytest.mark.parametrize(("late", "note"), [
    (True, "the budget was too short to measure throughput"),
    (False, "the script ended while throughput was measured (crashed: killed with SIGSEGV)")])
def test_why_throughput_was_not_measured_is_told_as_it_was(late, note):
    """At the deadline we kill it ourselves, which looks like the kernel's kill for memory."""
    watch = SimpleNamespace(exceeded_bytes=None, late=late)
    search = Search(bench=SimpleNamespace(meter=watch), memory_bytes=None, target="memory", asked_most=None, accelerated=False, budget_s=1.0,
                    deadline=1.0, say=print)
    search.throughput.running = 64
    ended = TrialEnded(Outcome("out_of_memory_kernel", "killed with SIGKILL") if late else Outcome("crashed", "killed with SIGSEGV"))
    assert search._lost_measuring(ended) is None and search.throughput.note == note


@pytest.mark.parametrize(("word", "value"), [("-b16", 16), ("-b=16", 16), ("-bias", None), ("-b16x", None), ("--b16", None)])
def test_a_letter_with_its_number_behind_it(word, value):
    argv = ["t.py", word, "--lr", "1"]
    assert knob_value(argv, "-b") == value
    assert with_knob(argv, "-b", 64) == ([argv[0], word.replace("16", "64"), *argv[2:]] if value else [*argv, "-b", "64"])
    assert knob_value(["t.py", "-bs16"], "-bs") is None, "argparse joins after one letter only"


def test_a_report_that_could_not_be_written_is_not_named(tmp_path, capsys):
    study = SimpleNamespace(folder=tmp_path, report_path=tmp_path / "gone" / "report.html", say=print)
    request = Request(["python", "train.py"], tmp_path, {}, tmp_path / ".saturate")
    found = msgspec.structs.replace(nothing(Asked(request), "too short"), report=str(study.report_path))
    assert _write(study, found).report == "" and "could not be written" in capsys.readouterr().out
