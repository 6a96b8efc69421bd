"""What `saturate fit` calls proved: searches over scripts whose memory grows, breaks late or has no time, without a process."""

from __future__ import annotations

import time
from pathlib import Path
from types import SimpleNamespace

import pytest

from saturate.records.fit import Fit
from saturate.report import fit as words
from saturate.study import fit_search
from saturate.study.fit import Asked, _record
from saturate.study.fit_process import Asking, Window
from saturate.study.fit_search import Search
from saturate.study.state import Request
from saturate.trial.outcome import Outcome
from saturate.trial.process import TrialEnded

MIB = 2**20
LIMIT = 600 * MIB


class Script:
    """A process whose memory is known: 300 MiB, `sample` for each sample (`bend`: not a line), `leak` more for each with every step; and `late` at
    once for each after 20 steps of a proof. It is killed above the limit, as the meter does it."""

    sample, leak, late, sizes_told, queue = 0.2 * MIB, 0.0, 0.0, 16, 0
    bend = 1.0
    stops_after: int | None = None      # the budget ends after so many steps of a proof
    on_device = False
    reads, pass_of = 1, 1 << 30         # batches of a step; samples of a pass over an iterable dataset
    breaks_after: int | None = None     # it does not bear a pass that is held open for so many steps
    sample_s = 0.0                      # what a step takes for each sample; 1 ms at least

    def __init__(self, bench, purpose, size=None):
        self.bench, self.proof = bench, purpose.startswith("prove")
        self.held, self.steps_so_far, self.world_size, self.peak, self.steps = 0.0, 1, 1, 0.0, 0
        bench.meter = self.meter = SimpleNamespace(exact=True, exceeded_bytes=None, late=False, limit_bytes=LIMIT)
        self.trial, self.skip = SimpleNamespace(output=lambda: "", ask=self._ask), 2 + self.queue

    def _ask(self, question):
        return {"facts": {"device": "cpu", "micro_steps": 1}, "extents": {"largest": [], "varies": False},
                "fit": {"kinds": {}, "loaders": [{"description": "d", "dataset": "Rows", "collates": True, "batch_size": 16, "length": 20000,
                                                  "queue": self.queue, "sizes": [16]}]}}[question]

    def run(self, size, steps, *, first=False, end=False, fresh=True, settle=False, skip=None):
        if fresh:
            self.peak = 0.0
        for _ in range(steps + (self.skip if skip is None else skip)):
            self.steps += 1
            if self.breaks_after is not None and self.bench.asking.hold and self.steps > self.breaks_after:
                raise TrialEnded(Outcome("crashed", "IndexError: list assignment index out of range"))
            self.held += self.leak * size
            if self.proof and self.stops_after is not None and self.steps > self.stops_after:
                self.meter.late = True
                raise TrialEnded(Outcome("out_of_memory_kernel", "killed with SIGKILL"))
            self.peak = max(self.peak, 300 * MIB + self.held + size ** self.bend * (self.sample + (self.late if self.proof and self.steps > 20 else 0.0)))
            if self.peak > LIMIT:
                self.meter.exceeded_bytes = round(self.peak)
                raise TrialEnded(Outcome("crashed", "killed with SIGKILL"))
        return Window(peak_bytes=round(self.peak), idle_bytes=round(300 * MIB + self.held), retries=0, steps=steps, timed=steps,
                      seconds=steps * max(0.001, size * self.sample_s), samples=steps * size * self.reads, delivered=min(size, self.pass_of), evaluations=1, saves=1, cpu_share=1.0, heap_bytes=1)

    @property
    def turn_steps(self):
        return self.skip

    def turn(self, size, steps):
        return self.run(size, steps, fresh=False, settle=True)

    def went_on(self):
        return True

    def finish(self):
        pass


def told(loader=(), **facts):
    """What a script says of itself, with these changes."""
    def ask(self, question):
        found = Script._ask(self, question)
        if question == "fit":
            found["loaders"][0].update(loader)
        return found | (facts if question == "facts" else {})
    return ask


def search(monkeypatch, target="memory", **changes) -> tuple[Search, Fit]:
    monkeypatch.setattr(fit_search, "Process", type("Changed", (Script,), changes))
    bench = SimpleNamespace(asking=Asking(), meter=None, isolation="", workload=SimpleNamespace(environment={}))
    found = Search(bench=bench, memory_bytes=LIMIT, target=target, asked_most=None, accelerated=False, budget_s=60.0,
                   deadline=time.monotonic() + 60.0, say=lambda text: None)
    found.run()
    asked = Asked(Request(argv=["python", "t.py"], cwd=Path.cwd(), environment={}, directory=Path.cwd() / ".saturate", budget_s=60.0), LIMIT, target)
    return found, _record(asked, SimpleNamespace(started=time.monotonic(), report_path="", needs_budget=""), found, "", "", False)


def holds(script, size, steps=50):
    return 300 * MIB + size * (script.get("sample", Script.sample) + script.get("late", 0.0) + steps * script.get("leak", 0.0)) <= LIMIT


@pytest.mark.parametrize("queue", [0, 8])
@pytest.mark.parametrize("leak", [0.002 * MIB, 0.012 * MIB, 0.05 * MIB])
def test_a_size_that_memory_outgrows_is_no_answer(monkeypatch, leak, queue):
    """Each step keeps features: what ran for a few steps fails when it is proved. The answer is what lasts for a proof."""
    found, record = search(monkeypatch, leak=leak, queue=queue)
    assert record.verdict == "fits" and record.proved_steps >= 50 and record.trial_count <= 4, record
    assert any(one.micro_batch == record.micro_batch and one.purpose == "prove" and one.outcome == "fits" for one in record.trials)
    assert holds({"leak": leak}, record.micro_batch) and not holds({"leak": leak}, 5 * record.micro_batch)
    assert record.growth_bytes_per_step == pytest.approx(leak * record.micro_batch, rel=0.05)
    assert holds({"leak": leak}, record.micro_batch, 0.9 * record.lasts_steps) and not holds({"leak": leak}, record.micro_batch, 1.2 * record.lasts_steps)
    assert f"last about {record.lasts_steps:,} steps" in record.advice[0] and "no batch fits for ever" in record.advice[0]
    text = words.summary(record, width=120, color=False)
    assert f"steps: memory grows\ngrows       memory grows by {words.show(round(record.growth_bytes_per_step))} with every step" in text
    assert found.throughput.note == fit_search.GROWS and record.sample_bytes is None


def test_the_last_process_proves_a_safe_size(monkeypatch):
    """No growth to be seen, but all that is near the measured sizes breaks late in a proof: the last trial does not."""
    _, record = search(monkeypatch, late=0.3 * MIB)
    assert record.verdict == "fits" and record.proved_steps >= 50 and record.trial_count == 4 and holds({"late": 0.3 * MIB}, record.micro_batch)
    assert record.growth_bytes_per_step is None and record.lasts_steps is None


@pytest.mark.parametrize(("sample", "bend", "least"), [(10 * MIB, 0.5, 844), (1 * MIB, 1.2, 114)])
def test_what_is_proposed_after_the_third_proof_of_a_process_is_tried(monkeypatch, sample, bend, least):
    """Memory that is no line takes several proposals. The search was over with the third, two processes to spare: 803 instead of 844, and 93
    instead of 114."""
    found, record = search(monkeypatch, sample=sample, bend=bend)
    assert record.verdict == "fits" and record.micro_batch >= least and record.proved_steps >= 50 and found.throughput.rates[record.micro_batch]


def test_throughput_that_no_process_was_left_for_is_told(monkeypatch):
    """The last process runs out of memory while it proves a larger size. Nothing said why there was no throughput."""
    found, record = search(monkeypatch, sample=0.47 * MIB, bend=1.4, late=0.14 * MIB)
    assert record.verdict == "fits" and record.trial_count == 4 and record.trials[-1].outcome == "out_of_memory", record.trials
    assert not record.throughput and record.throughput_note == fit_search.NONE_LEFT


def test_a_measured_size_that_is_proved_is_a_base_to_go_on_from(monkeypatch):
    """A line that promises a little too much costs one process, and no more than the gap to what failed."""
    _, record = search(monkeypatch, late=0.02 * MIB)
    assert record.verdict == "fits" and record.trial_count <= 4 and holds({"late": 0.02 * MIB}, record.micro_batch)
    assert not holds({"late": 0.02 * MIB}, round(1.15 * record.micro_batch)), record.trials


def test_without_a_proof_there_is_no_answer(monkeypatch):
    found, record = search(monkeypatch, late=20 * MIB)
    assert record.verdict == "inconclusive" and record.micro_batch is None and record.proved_steps == 0 and record.trial_count == 4
    failed = [one.micro_batch for one in record.trials if one.purpose == "prove"]
    assert len(failed) == 3 and record.measured_batch < min(failed) and record.measured_steps == 12
    assert f"{', '.join(map(str, failed))} did not stay below the limit for a proof" in record.reason and "only measured" in record.reason
    text = words.summary(record, width=120, color=False)
    assert text.startswith(f"no batch was proved: {record.measured_batch} only ran for 12 steps") and "\nproved" not in text


def test_a_proof_that_the_budget_ended_after_a_few_steps_is_none(monkeypatch):
    monkeypatch.setattr(fit_search, "MOST_TRIALS", 2)
    _, record = search(monkeypatch, stops_after=9)
    assert record.verdict == "inconclusive" and record.micro_batch is None and "a longer --budget may prove it" in record.reason
    assert record.measured_batch and record.trials[-1].outcome == "out_of_time" and record.trials[-1].steps == 8
    assert "saturate fit" in record.next_command and "--budget" in record.next_command, record.next_command


def test_a_proof_whose_epoch_did_not_end_in_time_counts_and_says_so(monkeypatch):
    _, record = search(monkeypatch, stops_after=53)
    assert record.verdict == "fits" and record.proved_steps >= 50
    assert any("the budget ended before the epoch of the proof did" in note for note in record.notes)


def test_steady_memory_is_proved_as_before(monkeypatch):
    found, record = search(monkeypatch)
    assert record.verdict == "fits" and record.trial_count == 2 and record.growth_bytes_per_step is None and record.measured_batch is None
    assert record.proved_steps == 50 and record.proved_with == ["an evaluation", "a checkpoint"] and found.throughput.rates


def test_no_pass_ends_with_a_single_sample_where_batchnorm_would_refuse_it(monkeypatch):
    """An epoch that is held open has no last batch: the script would have ended with an error at the end of its first one."""
    _, record = search(monkeypatch)
    best = record.micro_batch
    loader = {"length": 3 * best + 1, "drop_last": False}
    for changes, answer in ((told(loader, modules=[{"batch_norms": 2}]), best - 1), (told(loader, modules=[{"batch_norms": 0}]), best),
                            (told(loader | {"drop_last": True}, modules=[{"batch_norms": 2}]), best)):
        _, record = search(monkeypatch, _ask=changes)
        assert record.verdict == "fits" and record.micro_batch == answer, record.trials


def test_a_pass_holds_the_batches_of_an_update(monkeypatch):
    """A loop that steps behind every fourth batch of a pass never would, where a pass has three."""
    _, record = search(monkeypatch, reads=4, _ask=told({"length": 4000}))
    assert record.verdict == "fits" and record.micro_batch == 1000 == record.largest_tried
    assert any("an update reads 4 batches" in one for one in record.advice)
    _, record = search(monkeypatch, reads=4, _ask=told({"length": 40, "batch_size": 16}))
    assert record.micro_batch == 16, "the script's own size is as it is"


@pytest.mark.parametrize("steps", [3, 30])
def test_a_script_that_does_not_bear_a_pass_that_goes_on_has_passes_as_they_are(monkeypatch, steps):
    """`losses[i] = loss` in a list of len(loader): that was called a failure of the command, or ended the search at half of what fits."""
    _, whole = search(monkeypatch)
    found, record = search(monkeypatch, breaks_after=steps)
    assert record.verdict == "fits" and record.trial_count <= 4 and record.micro_batch > 0.9 * whole.micro_batch, record
    assert any("does not bear a pass over its loader that goes on (IndexError" in note for note in record.notes)
    assert not found.bench.asking.hold and all(one.outcome != "failed" for one in record.trials)


def test_a_size_that_an_iterable_dataset_never_gave_is_none(monkeypatch):
    _, record = search(monkeypatch, pass_of=300, _ask=told({"iterable": True, "length": None}))
    assert record.verdict == "fits" and record.micro_batch == 300 == record.largest_tried
    assert any("gave no batch of more than 300 samples" in one for one in record.advice)
    assert [one.micro_batch for one in record.throughput] == sorted({one.micro_batch for one in record.throughput}) and record.throughput[-1].micro_batch == 300


def test_a_script_that_ends_is_not_one_that_refuses_a_size(monkeypatch):
    def run(self, size, steps, **options):
        if not self.proof and self.steps > 12:
            raise TrialEnded(Outcome("too_short", "the script ended after 13 training steps"))
        return Script.run(self, size, steps, **options)

    _, record = search(monkeypatch, run=run)
    assert record.verdict == "fits" and record.micro_batch > 16, record


FAST_FROM = {"target": "throughput", "sample_s": 0.001 / 200}


def test_for_throughput_the_smallest_size_that_is_as_fast_is_proved(monkeypatch):
    found, record = search(monkeypatch, **FAST_FROM)
    assert record.verdict == "fits" and 200 <= record.micro_batch == record.knee < record.largest_fitting / 2 and record.proved_steps >= 50
    assert [one.micro_batch for one in record.trials if one.purpose == "prove"][-1] == record.knee and record.trial_count <= 4
    assert "is as fast as any that fits" in words.title(record) and not any("not proved" in one for one in record.advice)


@pytest.mark.parametrize("ends", ["between two blocks", "within a block"])
def test_a_knee_that_there_was_no_time_to_prove_is_told(monkeypatch, ends):
    """The answer was the largest size, and nothing said that another one was asked for; or that throughput was not measured, beside it."""
    real = Script.run

    def run(self, size, steps, **options):
        if found and found[0].throughput.settled() and size == found[0].throughput.knee:
            found[0].deadline = time.monotonic() + 1.0
            if ends == "within a block":
                self.meter.late = True
                raise TrialEnded(Outcome("out_of_memory_kernel", "killed with SIGKILL"))
        return real(self, size, steps, **options)

    found = []
    monkeypatch.setattr(Search, "_guard", lambda self, real=Search._guard: (found.append(self), real(self)))
    _, record = search(monkeypatch, run=run, **FAST_FROM)
    assert record.verdict == "fits" and record.micro_batch == record.largest_fitting > 2 * record.knee and record.throughput_note == ""
    assert record.advice[0] == f"a batch of {record.knee} is as fast, but it was not proved: a longer --budget may prove it; {record.micro_batch} was"
