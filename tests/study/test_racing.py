"""Races between made-up processes: how many rounds a pair gets, and what happens when a script runs out of steps."""

from __future__ import annotations

import math
import random
import time
from dataclasses import replace
from types import SimpleNamespace

import pytest

from saturate.measure import race
from saturate.measure.race import Limits
from saturate.study import race_pair, racing
from saturate.study import store as stores
from saturate.study.fates import FATES, Fate
from saturate.study.race_blocks import block_size, means_ms
from saturate.study.race_pair import MOST_ROUNDS, KernelWork, Pair
from saturate.study.racing import Racer
from saturate.study.search import Search
from saturate.trial import clocks, meter
from saturate.trial.outcome import Outcome
from saturate.trial.process import Block, Trial, TrialEnded, joined

SHORT = TrialEnded(Outcome("too_short", "the script ended after 3000 training steps"))


CLOCK = [0.0]


@pytest.fixture(autouse=True)
def clock(monkeypatch):
    """What races read instead of the machine's time, of which much may pass between two lines."""
    def now():
        CLOCK[0] += 1e-6
        return CLOCK[0]

    monkeypatch.setattr(time, "monotonic", now)


class Store:
    def __init__(self):
        self.answers, self.kept = {}, {}

    def rounds(self, question):
        return []

    def answer(self, question):
        return self.answers.get(question)

    def set_answer(self, question, value):
        self.answers[question] = value

    def add_round(self, question, pair, number, a_ms, b_ms, ratio):
        self.kept[pair, number] = ratio

    def drop_rounds(self, question, pair):
        self.kept = {key: ratio for key, ratio in self.kept.items() if key[0] != pair}


class Process:
    """Answers blocks of scattering length for as long as it has steps; freezing costs nothing."""

    def __init__(self, blocks, scatter, draw):
        self.left, self.scatter, self.draw, self.ended = blocks, scatter, draw, None
        self.steps, self.unmade_batches, self.cpus, self.least, self.losses = 0, None, [None], (0, 0), []

    def thaw(self): ...

    def freeze(self): ...

    def run_block(self, skip, steps, cpus=()):
        if self.left == 0:
            self.ended = SHORT.outcome
            raise TrialEnded(SHORT.outcome)
        self.left, self.steps = self.left - 1, self.steps + skip + steps
        self.least = min(skip, self.least[0]) if steps == self.least[1] else skip, steps       # of its latest blocks of one length
        return Block([round(1e6 * self.draw.lognormvariate(0.0, self.scatter))] * steps, {}, {}, steps)


class Unhurried(Process):
    """A block takes a while."""

    def run_block(self, skip, steps, cpus=()):
        CLOCK[0] += 2e-3
        return super().run_block(skip, steps, cpus)


class Bench:
    def __init__(self, start_s=0.0, scatter=0.2, blocks=(10_000,), process=Process):
        self.start_s, self.scatter, self.blocks, self.process = start_s, scatter, list(blocks), process
        self.store, self.started, self.draw = Store(), [], random.Random(7)

    def live(self, purpose, techniques):
        CLOCK[0] += self.start_s
        self.started.append(purpose)
        blocks = self.blocks.pop(0) if len(self.blocks) > 1 else self.blocks[0]
        return SimpleNamespace(trial=self.process(blocks, self.scatter, self.draw), techniques=techniques, step_ms=100.0,
                               evidence=SimpleNamespace(loaders=[]), hello={"pid": 0})

    def live_pair(self, purpose_a, a, purpose_b, b):
        return self.live(purpose_a, a), self.live(purpose_b, b)

    def finish_live(self, live): ...

    def prove_still(self, live): ...


ONE_PAIR = Limits(max_pairs=1, min_rounds=4, max_rounds=10)


def in_whole_blocks(bench, mode="concurrent"):
    """A racer whose rounds are one block of each process, so that blocks can be counted."""
    racer = Racer(bench, 0.02, mode)
    racer.in_turns = False
    return racer


def run(bench, limits=ONE_PAIR, seconds=60.0, **options):
    racer = in_whole_blocks(bench)
    return racer.run("q", (), (), limits, time.monotonic() + seconds, **options)


def test_scattering_rounds_are_repeated_while_they_cost_less_than_a_start():
    assert run(Bench(start_s=0.2)).record.rounds == MOST_ROUNDS     # rounds cost nothing here
    assert run(Bench(start_s=0.0, process=Unhurried)).record.rounds < MOST_ROUNDS
    assert run(Bench(start_s=0.2, scatter=0.001)).record.rounds == 4    # nothing scatters: no more are needed


class Killed(Process):
    """The study is killed in the seventh block of this process."""

    def run_block(self, skip, steps, cpus=()):
        if self.left == 10_000 - 6:
            raise KeyboardInterrupt
        return super().run_block(skip, steps, cpus)


@pytest.mark.parametrize("certain", [True, False])
def test_a_kill_costs_the_running_round_only(tmp_path, certain, monkeypatch):
    """The rounds until then count, on top of the pairs that there may be; unless they could have been no measurement."""
    monkeypatch.setattr(race_pair, "MOST_ROUNDS", 8)        # a start costs nothing here, and a round next to nothing: chance would decide
    monkeypatch.setattr(racing, "have_workers", lambda first, second: not certain)
    monkeypatch.setattr(racing, "falls_behind", lambda first, second: False)
    bench = Bench(process=Killed)
    bench.store = stores.Store(tmp_path)
    technique = (SimpleNamespace(id="t", merges=1, options_dict=dict, label=lambda: "t"),)
    limits = Limits(max_pairs=2, min_rounds=8, max_rounds=8)

    def raced():
        return in_whole_blocks(bench).run("q", (), technique, limits, time.monotonic() + 60)

    with pytest.raises(KeyboardInterrupt):
        raced()
    question = next(question for question, in bench.store._execute("select distinct question from rounds"))
    known = bench.store.rounds(question)
    assert [len(pair) for pair in known] == [6]
    bench.process = Process
    found = raced()
    assert found.decision.verdict == "inconclusive" and [len(pair) for pair in found.pairs] == ([6, 8, 8] if certain else [8, 8])
    if certain:
        assert found.pairs[0] == [ratio for _, _, ratio in known[0]] and len(found.work) == 3
    again = raced()
    assert again.pairs == found.pairs and again.pair_s == found.pair_s > 0.0, "an answered question is not asked again"


def test_what_the_kernel_did_for_a_pair_that_was_cut_short_is_not_known_to_be_alike():
    slow, fast, unknown = KernelWork(1000.0, 1.0), KernelWork(0.0, 0.0), KernelWork(math.nan, math.nan)
    pairs = [[0.2, 0.21], [0.2, 0.22], [0.01, 0.02]]
    racer = Racer(Bench(), 0.02)
    assert racer.noise.by_state(pairs, [(slow, fast), (slow, fast), (fast, fast)], ONE_PAIR) is not None
    assert racer.noise.by_state(pairs, [(slow, fast), (slow, fast), (unknown, unknown)], ONE_PAIR) is None
    racer.noise.learn(pairs, [(slow, fast), (unknown, unknown), (fast, fast)])
    assert racer.noise.even_pairs == pairs[2:] and racer.noise.aa_pairs == pairs
    alternating = Racer(Bench(), 0.02, "alternate")
    alternating.noise.learn(pairs, [(unknown, unknown)] * 3)
    assert alternating.noise.steady_sd == alternating.noise.between_sd > 0.05, "of processes that run one after the other it is never known"


def test_the_processes_of_a_pair_can_be_looked_at_while_they_live():
    class Ending(Bench):
        def finish_live(self, live):
            live.trial.ended = SHORT.outcome

    racer, seen = in_whole_blocks(Ending()), []
    racer.on_pair = lambda first, second: seen.append([one.trial.ended for one in (first, second)])
    racer.run("q", (), (), Limits(max_pairs=2, min_rounds=2, max_rounds=2), time.monotonic() + 60, min_pairs=2)
    assert seen == [[None, None]] * 2


def test_rounds_of_a_pair_that_failed_are_dropped(tmp_path):
    class Fails(Process):
        def run_block(self, skip, steps, cpus=()):
            if self.left == 10_000 - 6:
                raise TrialEnded(Outcome("crashed", "it ended"))
            return super().run_block(skip, steps, cpus)

    bench = Bench(process=Fails)
    bench.store = stores.Store(tmp_path)
    with pytest.raises(TrialEnded):
        run(bench, Limits(max_pairs=1, min_rounds=8, max_rounds=8))
    assert bench.store._execute("select * from rounds") == []


def test_rounds_that_were_no_measurement_leave_no_times_behind():
    store, times = Store(), [(3.0, 3.0)]        # of an earlier pair
    pair = Pair(store, "q", 1, times, ONE_PAIR, math.inf, lambda limits: False)
    for a_ms, b_ms in ((1.0, 1.0), (1.0, 2.0)):
        pair.keep(a_ms, b_ms)
    pair.forget()
    pair.keep(2.0, 2.0)
    assert times == [(3.0, 3.0), (2.0, 2.0)] and pair.ratios == [0.0] and store.kept == {(1, 1): 0.0}


@pytest.mark.parametrize("mode", ["concurrent", "alternate"])
def test_what_is_no_longer_in_effect_at_the_end_was_not_applied(mode):
    """Seen: a model that was built anew after the warm-up was raced without its technique, and called undecided."""
    class Lapsed(Bench):
        def prove_still(self, live):
            if live.techniques:
                raise TrialEnded(Outcome("not_active", "nothing in the autograd graph was computed in bfloat16"))

    with pytest.raises(TrialEnded, match="not_active") as ended:
        Racer(Lapsed(), 0.02, mode).run("q", (), CANDIDATE, ONE_PAIR, time.monotonic() + 60)
    assert ended.value.side == "b"


def test_a_race_that_time_ended_is_judged_by_the_level_of_a_whole_pair():
    pair = [[0.30, 0.10, 0.22, 0.15, 0.35, 0.18]]
    limits = Limits(max_pairs=3, min_rounds=6, max_rounds=16)
    running, ended = race.next_action(pair, limits=limits), race.next_action(pair, limits=limits, over=True)
    assert running.estimate.confidence == 1 - race.EARLY_LEVEL and running.action == "more_rounds"
    assert ended.estimate.confidence == race.look_confidence(3) and ended.action == "stop"
    result = run(Bench(), Limits(max_pairs=1, min_rounds=6, max_rounds=10_000), seconds=0.0)
    assert result.record.rounds == race.FEW_ROUNDS and result.decision.estimate.confidence == race.look_confidence(1)


@pytest.mark.parametrize(("mode", "half_time"), [("concurrent", 4), ("alternate", 3)])
def test_beyond_the_deadline_two_long_rounds_must_do(mode, half_time, monkeypatch):
    """Blocks of 24 steps of 0.7 s: a budget of 4 minutes was used up twice over; one process at a time, eight times over."""
    clock = [0.0]
    monkeypatch.setattr(racing.time, "monotonic", lambda: clock[0])

    class Slow(Process):
        def run_block(self, skip, steps, cpus=()):
            clock[0] += round_s / 2
            return super().run_block(skip, steps, cpus)

    for round_s, deadline, rounds in ((32.0, 40.0, 2), (32.0, 100.0, half_time), (1.0, 2.5, race.FEW_ROUNDS), (32.0, 0.0, 2)):
        bench = Bench(process=Slow)
        result = in_whole_blocks(bench, mode).run("q", (), (), Limits(max_pairs=1, min_rounds=6, max_rounds=6), clock[0] + deadline)
        assert result.record.rounds == rounds, (round_s, deadline)


def test_a_shared_process_that_runs_out_is_replaced_and_its_single_round_forgotten():
    bench = Bench(scatter=0.001, blocks=[1, 10_000])        # the shared one has a single block left
    result = run(bench, share_base=True)
    assert bench.started == ["reference", "race B", "reference", "race B"]
    assert result.record.rounds == 4 and len(result.pairs) == 1


def test_a_process_that_nobody_shared_and_that_runs_out_is_too_short():
    """A young one would have as many steps."""
    bench = Bench(scatter=0.001, blocks=[1, 10_000])
    with pytest.raises(TrialEnded, match="too_short"):
        run(bench)
    assert bench.started == ["race A", "race B"]


BROKEN = Outcome("crashed", "ConnectionResetError: [Errno 104] Connection reset by peer")


class Broken(Process):
    """Its connections are closed while it stands still, before the block behind its last one."""

    def run_block(self, skip, steps, cpus=()):
        if self.left == 0:
            self.ended = BROKEN
            raise TrialEnded(BROKEN)
        return super().run_block(skip, steps, cpus)


def test_a_shared_process_that_did_not_live_through_standing_still_is_replaced():
    """It stood still while another technique was verified or compiled, and its end was told as a command that fails when it is run again."""
    bench = Bench(scatter=0.001, blocks=[5, 10_000], process=Broken)
    racer = in_whole_blocks(bench)
    racer.run("A/A", (), (), ONE_PAIR, time.monotonic() + 60, share_base=True)
    result = racer.run("screen t", (), CANDIDATE, ONE_PAIR, time.monotonic() + 60, share_base=True)
    assert bench.started == ["reference", "race B", "race B", "reference", "race B"]
    assert result.record.rounds == 4 and len(result.pairs) == 1 and racer.mode == "concurrent"


@pytest.mark.parametrize("share", [True, False])
@pytest.mark.parametrize("alone", [True, False])
def test_what_fails_beside_a_slow_one_runs_alone_from_then_on(share, alone):
    """A young one stands still as well, while the other one starts."""
    bench, why, said = Bench(scatter=0.001, blocks=[1, 10_000, 10_000 if alone else 1, 10_000], process=Broken), [], []
    bench.say = said.append
    racer = in_whole_blocks(bench)
    racer.on_crowded = lambda reason: (why.append(reason), racer.alternate())
    if alone:
        result = racer.run("q", (), CANDIDATE, ONE_PAIR, time.monotonic() + 60, share_base=share)
        assert result.record.pairs == 1 and result.record.rounds == 10 and racer.mode == "alternate"
        assert why == [f"it failed beside another of its kind ({BROKEN.reason})"] and "baseline failed beside" in said[0]
    else:
        with pytest.raises(TrialEnded) as ended:
            racer.run("q", (), CANDIDATE, ONE_PAIR, time.monotonic() + 60, share_base=share)
        assert ended.value.side == "a" and ended.value.outcome == BROKEN and why == [] and racer.mode == "concurrent"
    assert bench.started[2] == "race A alone"


def test_who_wants_two_at_once_and_a_technique_that_fails_are_told_so():
    for side, broken in (("a", [1, 10_000]), ("b", [10_000, 1])):
        racer = in_whole_blocks(Bench(scatter=0.001, blocks=broken, process=Broken))
        racer.on_crowded = None if side == "a" else lambda reason: pytest.fail(reason)
        with pytest.raises(TrialEnded) as ended:
            racer.run("q", (), CANDIDATE, ONE_PAIR, time.monotonic() + 60)
        assert (ended.value.side, ended.value.outcome) == (side, BROKEN)


@pytest.mark.parametrize("mode", ["concurrent", "alternate"])
def test_rounds_of_a_script_that_ended_count(mode):
    assert in_whole_blocks(Bench(blocks=[3]), mode).run("q", (), (), ONE_PAIR, time.monotonic() + 60).record.rounds == 3


@pytest.mark.parametrize("mode", ["concurrent", "alternate"])
@pytest.mark.parametrize(("losses", "kind"), [([0.7, 0.5], "diverged"), ([0.5, 0.5], "trains_otherwise")])
def test_what_diverges_with_a_seed_of_its_own_may_do_so_by_chance(mode, losses, kind):
    class Diverging(Process):
        def run_block(self, skip, steps, cpus=()):
            return replace(super().run_block(skip, steps, cpus), sample=[math.nan if self.techniques else 1.0])

    class Unseeded(Bench):
        def live(self, purpose, techniques):
            found = super().live(purpose, techniques)
            found.trial.techniques, found.trial.losses = techniques, [[losses[bool(techniques)]]]
            return found

    with pytest.raises(TrialEnded) as ended:
        in_whole_blocks(Unseeded(process=Diverging), mode).run("q", (), CANDIDATE, ONE_PAIR, time.monotonic() + 60)
    assert (ended.value.outcome.kind, ended.value.side) == (kind, "b")


def test_a_script_too_short_for_a_race_leaves_it_open_and_ends_nothing():
    bench = Bench(blocks=[1])
    with pytest.raises(TrialEnded) as ended:
        run(bench, share_base=True)
    assert ended.value.side in "ab" and FATES[ended.value.outcome.kind] == "inconclusive"
    candidate = SimpleNamespace(id="t", label=lambda: "t")
    search = Search({}, None, Racer(bench, 0.02), None, time.monotonic() + 60.0, lambda text: None)
    search.fates["t"] = Fate("not_tried", "")
    assert search.race("screen t", (), (), Limits(max_pairs=1), (candidate,), share_base=True) is None
    assert search.fates["t"].fate == "inconclusive" and "ended after 3000" in search.fates["t"].reason


@pytest.mark.parametrize(("whole", "rounds"), [(0, 1), (0, 4), (1, 1)])
@pytest.mark.parametrize("end", [KeyboardInterrupt(), TrialEnded(Outcome("crashed", "a file is gone"))])
def test_a_pair_that_was_not_counted_to_its_end_is_measured_again(tmp_path, whole, rounds, end):
    """Seen: a kill after one round of screening, which has one pair, and the technique stayed undecided for good. And what had
    crashed in a race counted with the rounds it had until then. Rounds before a kill count beside those of the whole pairs."""
    class Cut(Process):
        def run_block(self, skip, steps, cpus=()):
            if self.left == 0:
                raise end
            return super().run_block(skip, steps, cpus)

    limits, question = Limits(max_pairs=2, min_rounds=6, max_rounds=6), f"q | {racing.key(())} | {racing.key(())}"
    cut, again = (Bench(scatter=0.001, blocks=blocks, process=Cut) for blocks in ([10_000] * (2 * whole + 1) + [rounds], [10_000]))
    cut.store = again.store = stores.Store(tmp_path)
    with pytest.raises(type(end)):
        run(cut, limits, min_pairs=2)
    before = again.store.rounds(question)
    killed = isinstance(end, KeyboardInterrupt)
    assert [len(pair) for pair in before] == [6] * whole + [rounds] * killed
    stays = [rounds] if killed and rounds > 1 else []
    for _ in range(2):          # what is finished is not measured again
        assert [len(pair) for pair in run(again, limits, min_pairs=2).pairs] == [*stays, 6, 6]
        assert len(again.started) == 2 * (2 - whole)
    assert again.store.rounds(question)[:whole] == before[:whole], "a whole pair stays"


@pytest.mark.parametrize("whole", [0, 1])
def test_a_pair_that_the_budget_ends_leaves_what_the_others_say(tmp_path, whole):
    class Late(Process):
        def run_block(self, skip, steps, cpus=()):
            if self.left == 0:
                raise TrialEnded(Outcome("not_in_time", "the budget was over"))
            return super().run_block(skip, steps, cpus)

    limits, question = Limits(max_pairs=3, min_rounds=6, max_rounds=6), f"q | {racing.key(())} | {racing.key(())}"
    bench = Bench(scatter=0.001, blocks=[10_000] * (2 * whole + 1) + [3], process=Late)
    bench.store = stores.Store(tmp_path)
    if whole:
        assert [len(pair) for pair in run(bench, limits, min_pairs=3).pairs] == [6]
    else:
        with pytest.raises(TrialEnded):
            run(bench, limits, min_pairs=3)
    assert [len(pair) for pair in bench.store.rounds(question)] == [6] * whole, "what was cut short is no measurement"


def live(step_ms, workers=0, device="cpu"):
    loaders = [SimpleNamespace(num_workers=workers, prefetch_factor=2)] if workers else []
    return SimpleNamespace(step_ms=step_ms, evidence=SimpleNamespace(loaders=loaders), hello={"device": device})


def test_blocks_are_as_long_as_the_faster_step_needs_unless_the_second_is_far_behind_or_ahead():
    """bf16 made the steps of an adaptive solver thirty times as long, and each of its blocks thirty times as long as ours. And a
    cache made steps 45 times as short: two rounds took half a minute, nearly all of it the baseline's."""
    assert block_size(live(16.0), live(20.0)) == block_size(live(20.0), live(16.0)) == (1, 19)
    assert block_size(live(20.0, device="cuda"), live(20.0, device="cuda")) == (8, 15)
    assert block_size(live(16.0), live(480.0)) == (1, 2)
    assert block_size(live(41.0), live(0.9)) == (1, 22)         # 0.9 s of the baseline, 20 ms of the other
    assert block_size(live(60.0), live(20.0)) == (1, 15)        # no more than three times as fast: as many as it needs


def test_a_baseline_that_never_waits_is_raced_against_itself_in_short_blocks():
    """With steps of a second and four workers, one pair took longer than the whole budget."""
    assert block_size(live(900.0, 4), live(900.0, 4)) == (8, 16)
    assert block_size(live(900.0, 4), live(900.0, 4), loader_bound=False) == (1, 2)
    asked = []
    for waits, b in ((False, ()), (True, ()), (False, CANDIDATE)):
        bench = with_workers(Bench(), asked)
        racer = in_whole_blocks(bench)
        racer.waits = waits
        racer.run("x", (), b, ONE_PAIR, time.monotonic() + 60.0)
    assert [trial.least for trial in asked] == [(1, 3)] * 2 + [(8, 16)] * 4


@pytest.mark.parametrize(("step_ms", "each", "turns"), [(14.0, 4, 6), (100.0, 1, 3), (280.0, 1, 2), (2000.0, 2, 1)])
def test_two_processes_take_turns_within_a_round(monkeypatch, step_ms, each, turns):
    """What else the machine does changes many times a second: whole blocks of 0.3 s saw different machines."""
    asked = []

    class Noted(Process):
        def run_block(self, skip, steps, cpus=()):
            asked.append((self, skip, steps))
            return super().run_block(skip, steps, cpus)

    bench = Bench(process=Noted)
    started = bench.live

    def warm(purpose, techniques):
        found = started(purpose, techniques)
        found.step_ms = step_ms
        return found

    bench.live = warm
    result = Racer(bench, 0.02).run("x", (), CANDIDATE, Limits(max_pairs=1, min_rounds=6, max_rounds=6), time.monotonic() + 60.0)
    assert len(asked) == result.record.rounds * 2 * turns
    assert {steps for _, _, steps in asked} == {each}
    pairs = list(zip(asked[::2], asked[1::2]))
    assert all(one[0] is not other[0] and one[1] == other[1] for one, other in pairs), "both skip as many steps in every turn"
    first = [one[0] for one, _ in pairs]
    assert all(one is not after for one, after in zip(first, first[1:])), "A B, B A, A B"
    skips = {skip for _, skip, _ in asked}
    assert skips == set(range(1, 3 + each // 2)), "or a step that is slow at regular intervals would be timed always or never"


@pytest.mark.parametrize("mode", ["concurrent", "alternate"])
@pytest.mark.parametrize("step_ms", [5.0, 6.4, 14.0, 40.0])
def test_a_step_that_is_slow_at_regular_intervals_is_no_difference_between_two_processes(step_ms, mode, monkeypatch):
    """Seen: every tenth step logs and takes twice as long, turns of ten steps, warm-ups of 67 steps and 69: 12 % faster, with hardly
    any scatter, of the same program."""
    monkeypatch.setattr(racing, "ALTERNATE_ROUNDS", 200)

    class Logging(Process):
        period = 0

        def run_block(self, skip, steps, cpus=()):
            timed = range(self.steps + skip, self.steps + skip + steps)
            self.steps += skip + steps
            return Block([round(1e6 * step_ms * (1 + (n % self.period == 0))) for n in timed], {}, {}, steps)

    for period in range(2, 17):
        Logging.period = period
        found = []
        for phase in {1, period // 2, period - 1}:
            bench = Bench(process=Logging)
            started = bench.live

            def warm(purpose, techniques, started=started, phase=phase):
                live = started(purpose, techniques)
                live.step_ms, live.trial.steps = step_ms, 67 + phase * ("B" in purpose)
                return live

            bench.live = warm
            result = Racer(bench, 0.02, mode).run("q", (), (), Limits(max_pairs=1, min_rounds=200, max_rounds=200), time.monotonic() + 60.0)
            found.append(sum(result.pairs[0]) / len(result.pairs[0]))
        assert abs(sum(found) / len(found)) < 0.02, (period, found)


@pytest.mark.parametrize("late", [0, 6, 9])
@pytest.mark.parametrize("by_step", [1e-3, -2e-4, 0.0])
def test_an_older_baseline_makes_nothing_of_the_same_program_faster_or_slower(by_step, late):
    """A dataset that fills its own cache makes steps faster as a training goes on, and what grows makes them slower. Screening raced fresh
    processes against one that was thousands of steps older: all techniques were slower, or faster. `late`: rounds before it begins."""
    class Ageing(Process):
        def run_block(self, skip, steps, cpus=()):
            self.steps += skip + steps
            ms = 20.0 * max(0.2, 1 + by_step * max(0, self.steps - 60 - 30 * late))
            return Block([round(1e6 * ms * self.draw.lognormvariate(0.0, 0.002))] * steps, {}, {}, steps)

    bench = Bench(process=Ageing)
    started = bench.live

    def warm(purpose, techniques):
        live = started(purpose, techniques)
        live.trial.steps, live.step_ms = 60, 20.0
        return live

    bench.live = warm
    racer = Racer(bench, 0.02)
    racer.run("A/A", (), (), Limits(max_pairs=1, min_rounds=6, max_rounds=6), time.monotonic() + 60.0, share_base=True)
    for number in range(4):
        result = racer.run(f"screen {number}", (), CANDIDATE, ONE_PAIR, time.monotonic() + 60.0, share_base=True)
        assert abs(result.gain) < race.SMALL_CLAIM and result.decision.verdict in ("inconclusive", "no_difference"), (number, result.gain)
    assert by_step or bench.started.count("reference") == 1, "one that stays as it is is shared"


def test_a_queue_that_runs_empty_is_no_training_that_becomes_slower():
    """Blocks that the queue had hidden count no more, and the shared process is as fast as it was: no other one has to start."""
    class Emptying(Process):
        def run_block(self, skip, steps, cpus=()):
            found = super().run_block(skip, steps, cpus)
            self.unmade_batches = 40 if self.steps > 50 else 0
            found.timed_ns[:] = [round(t * (2.0 if steps > 3 else 1 + 0.01 * self.steps)) for t in found.timed_ns]
            return found

    bench = with_batches_in_store(with_workers(Bench(scatter=0.001, process=Emptying), []))
    racer = in_whole_blocks(bench)
    for question in ("A/A", "again"):
        racer.run(question, (), (), Limits(max_pairs=1, min_rounds=12, max_rounds=12), time.monotonic() + 60.0, share_base=True)
    assert bench.started == ["reference", "race B", "race B"]


def test_what_an_older_baseline_accumulates_is_not_asked_of_a_younger_process():
    """Micro-steps become more by a schedule. In a fresh pair both come to them together; what does other work there does other work."""
    class Scheduled(Process):
        times = 1

        def run_block(self, skip, steps, cpus=()):
            found = super().run_block(skip, steps, cpus)
            each = 1 if self.steps < 600 else 4
            return Block(found.timed_ns, {}, {"B": each * self.times * found.steps}, found.steps, [0.0])

    bench = Bench(scatter=0.001, process=Scheduled)
    racer = in_whole_blocks(bench)
    racer.run("A/A", (), (), Limits(max_pairs=1, min_rounds=10, max_rounds=10), time.monotonic() + 60.0, share_base=True)
    while racer.base(()).trial.steps < 600:
        racer.base(()).trial.run_block(1, 20)
    assert len(racer.run("screen", (), CANDIDATE, ONE_PAIR, time.monotonic() + 60.0, share_base=True).pairs) == 1
    assert bench.started == ["reference", "race B", "race B", "reference", "race B"]
    started = bench.live

    def cheating(purpose, techniques):
        live = started(purpose, techniques)
        live.trial.times = 2 if techniques else 1
        return live

    bench.live = cheating
    with pytest.raises(TrialEnded, match="trains_otherwise: backward ran 2.00 times a step"):
        racer.run("another", (), CANDIDATE, ONE_PAIR, time.monotonic() + 60.0, share_base=True)


@pytest.mark.parametrize("drifts", [True, False])
def test_behind_the_deadline_no_fresh_pair_is_begun_and_a_biased_one_is_no_result(tmp_path, drifts):
    """Seen: it was begun 46 s behind the end of the budget. What is younger than the shared process is faster, or slower, by that alone."""
    bench = Bench(scatter=0.001)
    bench.store = stores.Store(tmp_path)
    racer = in_whole_blocks(bench)
    racer.run("A/A", (), (), ONE_PAIR, time.monotonic() + 60.0, share_base=True)
    known = iter([False, drifts])       # before its rounds, and behind them
    racer._base_drifts = lambda: next(known)
    search = Search({}, None, racer, None, time.monotonic(), lambda text: None)
    search.fates["t"] = Fate("not_tried", "")
    result = search.race("screen t", (), CANDIDATE, ONE_PAIR, CANDIDATE, share_base=True)
    assert bench.started == ["reference", "race B", "race B"]
    rounds = bench.store.rounds(f"screen t | [] | {racing.key(CANDIDATE)}")
    if drifts:
        assert result is None and rounds == [] and not racer.has_base
        assert search.fates["t"].fate == "inconclusive" and "no time for a fresh pair" in search.fates["t"].reason
    else:
        assert len(result.pairs) == len(rounds) == 1


def test_a_young_process_that_runs_out_is_replaced_whatever_time_it_is():
    bench = Bench(scatter=0.001, blocks=[1, 10_000])
    assert run(bench, share_base=True, seconds=0.0).record.rounds == 4 and len(bench.started) == 4


@pytest.mark.parametrize("whole", [True, False])
def test_blocks_of_steps_that_became_slow_hold_fewer_of_them(whole):
    """Seen: steps of 24 ms in the warm-ups and of 1.8 s in the race: 25 of them on either side in each round, which took minutes."""
    class Loaded(Process):
        taken = ()

        def run_block(self, skip, steps, cpus=()):
            self.steps += skip + steps
            self.taken = (*self.taken, skip + steps)
            return Block([round(24e6 * (slower if self.steps > 20 else 1.0) * self.draw.lognormvariate(0.0, 0.002))] * steps, {}, {}, steps)

    for slower, small in ((1.0, False), (2.0, False), (20.0, True), (4.0, False)):      # 4: a round of 3 s is short
        lives, bench = [], Bench(process=Loaded)
        started = bench.live

        def warm(purpose, techniques, started=started, lives=lives):
            lives.append(started(purpose, techniques))
            lives[-1].step_ms = 24.0
            return lives[-1]

        bench.live = warm
        racer = Racer(bench, 0.02)
        racer.in_turns = not whole
        result = racer.run("x", (), CANDIDATE, Limits(max_pairs=1, min_rounds=6, max_rounds=6), time.monotonic() + 60.0)
        taken = [steps for live in lives for steps in live.trial.taken[-4:]]
        assert (max(taken) <= (5 if whole else 3)) if small else (min(taken) >= (14 if whole else 4)), (slower, taken)
        assert result.record.rounds == 6 and all(abs(ratio) < 0.02 for ratio in result.pairs[0]), "a round is a ratio of times per step"
        assert all(live.step_ms == 24.0 for live in lives)


@pytest.mark.parametrize("whole", [True, False])
def test_a_slow_cpu_is_no_difference_between_two_processes(whole):
    """Seen: what runs beside a virtual CPU made it a third slower for seconds, and the scheduler leaves a thread where it is."""
    class Placed(Process):
        waiting = [0, 1]

        def __init__(self, *args):
            super().__init__(*args)
            self.cpus = [self.waiting.pop(0)]

        def run_block(self, skip, steps, cpus=()):
            self.cpus = list(cpus or self.cpus)
            return Block([int(1e6 * (1 + self.cpus[0] / 3))] * steps, {}, {}, steps)

    racer = Racer(Bench(process=Placed), 0.02)
    racer.in_turns = not whole
    result = racer.run("q", (), (), ONE_PAIR, time.monotonic() + 60.0)
    assert result.pairs and all(ratio == 0.0 for ratio in result.pairs[0])


def test_times_are_as_far_apart_as_the_race_says():
    """The median round of A need not be that of B, and then they contradicted the speed-up."""
    result = run(Bench(scatter=0.2))
    assert result.a_ms / result.b_ms == pytest.approx(1 + result.gain) and 0.5 < result.a_ms < 2.0


def test_turns_of_a_block_count_as_one():
    one = Block([1, 50, 3], {"gc": 1}, {"B": 4}, 4, [0.0], False, frozenset({1}))
    both = joined([one, Block([50], {"gc": 2, "input": 1}, {"B": 2}, 2, [1.0], True, frozenset({0}))])
    assert both.step_ns == [1, 3] and both.timed_ns == [1, 50, 3, 50]
    assert both.parts == {"gc": 3, "input": 1} and both.events == {"B": 6} and both.steps == 6 and both.sample == [1.0] and both.moved
    assert Block([50], {}, {}, 1, evaluated=frozenset({0})).step_ns == [50], "all look like evaluations: they count"


def test_steps_with_an_evaluation_count_on_both_sides_or_on_neither():
    """Of one program that evaluates in every second step: two of these five held one, and three of those."""
    few, many = ({1, 3}, {0, 2, 4})
    a, b = (Block([2_000_000 if n in held else 1_000_000 for n in range(5)], {}, {}, 5, evaluated=frozenset(held)) for held in (few, many))
    assert means_ms(a, a) == (1.0, 1.0) and means_ms(a, b) == (1.4, 1.6) == means_ms(b, a)[::-1]


def test_an_evaluation_in_a_skipped_step_is_none_in_the_block_before(monkeypatch):
    """Where turns are joined, its place is in the turn before."""
    trial = object.__new__(Trial)
    gate = {"stamps": [0, 10**6, 2 * 10**6, 3 * 10**6], "parts": {}, "evaluations": [0, 2]}
    trial.__dict__.update(frozen=False, gates=[], server=SimpleNamespace(go=lambda order: None, notices=[], hello=dict), counts={}, sample=[],
                          steps=0, _step_s=0.0, _lags=[], _looked_at=False, _guarded=lambda action: action(), _note_peak=lambda gates: None,
                          _wait_gate=lambda patience_s, expected_s: [gate])
    monkeypatch.setattr(clocks, "problem", lambda began, stamps, ended: None)
    both = joined([trial.run_block(1, 2), trial.run_block(1, 2)])
    assert both.evaluated == {1, 3}


CANDIDATE = (SimpleNamespace(id="t", merges=1, label=lambda: "t", options_dict=dict),)


def with_workers(bench, trials):
    """Everything that `bench` starts reads from four loader workers, and stands in `trials`."""
    started = bench.live

    def live(purpose, techniques):
        found = started(purpose, techniques)
        found.evidence.loaders.append(SimpleNamespace(num_workers=4, prefetch_factor=2))
        trials.append(found.trial)
        return found

    bench.live = live
    return bench


def with_batches_in_store(bench):
    """Its processes have made ten steps, and their workers all batches that were taken."""
    started = bench.live

    def warm(purpose, techniques):
        found = started(purpose, techniques)
        found.trial.steps, found.trial.unmade_batches = 10, 0
        return found

    bench.live = warm
    return bench


@pytest.mark.parametrize("mode", ["concurrent", "alternate"])
@pytest.mark.parametrize(("drains", "blocks"), [(0.0, (1, 3)), (0.01, (1, 3)), (0.3, (8, 16))])
def test_blocks_are_short_while_the_loader_makes_what_is_taken_from_it(drains, blocks, mode):
    """A queue of eight batches hides for long that a faster step has to wait; a loader that keeps up hides nothing."""
    class Drained(Process):
        def run_block(self, skip, steps, cpus=()):
            found = super().run_block(skip, steps, cpus)
            self.unmade_batches = int(drains * self.steps)
            found.timed_ns[:] = [round(t * (1 if steps < 16 else 2)) for t in found.timed_ns]       # it waits, once that is seen
            return found

    trials = []
    bench = with_batches_in_store(with_workers(Bench(scatter=0.001, process=Drained), trials))
    racer = in_whole_blocks(bench, mode)
    result = racer.run("x", (), CANDIDATE, ONE_PAIR, time.monotonic() + 60.0)
    assert [trial.least for trial in trials] == [blocks] * 2
    assert len(bench.store.kept) == result.record.rounds >= 4
    assert result.a_ms == pytest.approx(2.0 if blocks == (8, 16) else 1.0, rel=0.05)     # what was forgotten does not count


def test_where_processes_run_one_after_the_other_the_first_one_changes():
    """What the machine becomes slower by meanwhile is no difference between the two."""
    bench = Bench(scatter=0.001)
    in_whole_blocks(bench, "alternate").run("x", (), CANDIDATE, Limits(max_pairs=2, min_rounds=4, max_rounds=4), time.monotonic() + 60.0, min_pairs=2)
    assert bench.started == ["race A alone", "race B alone", "race B alone", "race A alone"]


def test_where_processes_run_one_after_the_other_their_nth_blocks_skip_as_many_steps():
    """A step that is slow at regular intervals must not be timed more often on one side."""
    class Noted(Process):
        def run_block(self, skip, steps, cpus=()):
            skips.setdefault(self, []).append(skip)
            return super().run_block(skip, steps, cpus)

    skips = {}
    in_whole_blocks(Bench(process=Noted), "alternate").run("x", (), CANDIDATE, ONE_PAIR, time.monotonic() + 60.0)
    ours, theirs = skips.values()
    assert ours == theirs and len(set(ours)) > 1


def test_a_script_that_ends_behind_forgotten_rounds_is_too_short():
    """Its short blocks were no measurement, and there are no others."""
    class Behind(Process):
        def run_block(self, skip, steps, cpus=()):
            found = super().run_block(skip, steps, cpus)
            self.unmade_batches = 4 if self.left < 2 else 0
            return found

    def warm(purpose, techniques):
        found = started(purpose, techniques)
        found.trial.unmade_batches = 0
        return found

    bench = with_workers(Bench(blocks=[3], process=Behind), [])
    started, bench.live = bench.live, warm
    with pytest.raises(TrialEnded) as ended:
        in_whole_blocks(bench).run("x", (), CANDIDATE, ONE_PAIR, time.monotonic() + 60.0)
    assert ended.value.outcome.kind == "too_short" and len(bench.store.kept) < 2


def test_a_race_knows_what_the_kernel_did_for_either_process(monkeypatch):
    """Of the same program: one took pages from the system in every step, because of what lay at the end of its heap."""
    done, lives = {}, []

    def kernel_work(pid):
        done[pid] = done.get(pid, -1) + 1
        return (1000 + 50 * done[pid] * pid, 0.5 + 0.01 * done[pid] * pid)

    monkeypatch.setattr(meter, "kernel_work", kernel_work)
    bench = Bench()
    started = bench.live

    def live(purpose, techniques):
        found = started(purpose, techniques)
        found.hello = {"pid": len(bench.started) % 2}       # of each pair, the first is 1 and the second 0
        lives.append(found)
        return found

    bench.live = live
    racer = in_whole_blocks(bench)
    limits = Limits(max_pairs=2, min_rounds=4, max_rounds=4)
    result = racer.run("x", (), CANDIDATE, limits, time.monotonic() + 60.0, min_pairs=2)
    steps = lives[0].trial.steps        # of its rounds: it has done nothing else
    assert result.work[0] == (KernelWork(pytest.approx(50 / steps), pytest.approx(10 / steps)), KernelWork(0.0, 0.0))
    assert len(result.work) == 2
    bench.store.rounds = lambda question: [[(1.0, 1.0, 0.0)] * 4, [(1.0, 1.0, 0.0)] * 4]      # a resumed study measures nothing again
    assert racer.run("x", (), CANDIDATE, limits, time.monotonic() + 60.0).work == result.work


def test_pairs_are_judged_by_state_where_one_side_ends_a_difference_and_by_even_pairs_where_both_do():
    uneven, even = (KernelWork(1400.0, 3.0), KernelWork(0.0, 0.0)), (KernelWork(1.0, 0.0), KernelWork(0.0, 0.0))
    racer = in_whole_blocks(Bench(scatter=0.001))
    racer.noise.learn([[0.25, 0.25, 0.26], [0.001, 0.0, -0.001]], [uneven, even])
    assert racer.noise.between_sd > 5 * racer.noise.steady_sd and racer.noise.steady_sd < 0.013
    racer.noise.steadying.add("t")
    wide = racer.run("x", (), (), ONE_PAIR, time.monotonic() + 60.0).gain_ci
    narrow = racer.run("y", CANDIDATE, CANDIDATE, ONE_PAIR, time.monotonic() + 60.0).gain_ci
    assert wide[1] - wide[0] > 3 * (narrow[1] - narrow[0])
    mixed = racer.run("w", (), CANDIDATE, ONE_PAIR, time.monotonic() + 60.0).gain_ci
    assert mixed[1] - mixed[0] > 3 * (narrow[1] - narrow[0]), "processes of one side differ as ever"
    racer.bench.store.rounds = lambda question: [[(1.25, 1.0, 0.22)] * 6, [(1.0, 1.0, 0.0)] * 6, [(1.25, 1.0, 0.22)] * 6]
    for number, one in enumerate((uneven, even, uneven)):
        racer.bench.store.set_answer(f"z | [] | {racing.key(CANDIDATE)} | end of pair {number}", True)
        racer.bench.store.set_answer(f"z | [] | {racing.key(CANDIDATE)} | kernel work of pair {number}", [[w.page_faults, w.ms] for w in one])
    result = racer.run("z", (), CANDIDATE, Limits(max_pairs=3), time.monotonic() + 60.0)
    assert result.decision.verdict == "faster" and "2 of 3" in result.decision.reason
