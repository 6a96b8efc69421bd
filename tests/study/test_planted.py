"""What verification and racing do with planted faults, and workloads that cannot be measured or verified."""

from __future__ import annotations

import math
import random
import tomllib
from dataclasses import dataclass, replace
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest
from parties import WORKLOAD, tune

from saturate.study.candidates import Candidate
from saturate.study.fates import of_end
from saturate.study.live import timed_losses
from saturate.study.race_blocks import begin_alike, believe, other_work
from saturate.study.verification import UPDATES, Run, Verified, Verifier, _name, first_difference
from saturate.trial import clocks
from saturate.trial.outcome import Outcome
from saturate.trial.process import Block, TrialEnded
from saturate.verify.series import Series

# -- timed blocks must be the same work --------------------------------------------------------------------------------


def block(backwards: int = 20, steps: int = 10, moved: bool = True, sample: tuple[float, ...] = (1.0,)) -> Block:
    return Block([1000] * steps, {}, {"B": backwards, "S0": steps}, steps, list(sample), moved)


def test_the_same_work_is_believed() -> None:
    assert other_work([block()] * 4, [block()] * 4) is None
    assert other_work([block()] * 4, [block(40, 20)] * 4) is None, "longer blocks in alternate mode"
    assert other_work([block()] * 4, [block(), block(19), block(21), block()]) is None, "the end of an epoch"


def test_fewer_backward_passes_are_not_believed() -> None:
    assert "backward ran 1.00 times" in str(other_work([block()] * 4, [block(10)] * 4))


def test_parameters_that_break_or_stand_still_are_not_believed() -> None:
    broken = block(sample=(math.nan,))
    assert "not finite" in str(other_work([block()] * 2, [block(), broken]))
    assert other_work([broken] * 2, [broken] * 2) is None, "it diverges by itself"
    still = block(moved=False)
    assert "did not move" in str(other_work([block()] * 4, [block(), still, still, block()]))
    assert other_work([block(), still], [still, still]) is None, "small updates of the baseline also vanish"


def evaluating(*evaluated: int, steps: int = 10) -> Block:
    return Block([1000] * steps, {}, {}, steps, [1.0], evaluated=frozenset(evaluated))


@pytest.mark.parametrize(("losses", "kind", "fate"), [
    (([[0.5]], [[0.5], [0.25]]), "trains_otherwise", "rejected_numerics"),
    (([], [[0.5]]), "trains_otherwise", "rejected_numerics"),
    (([[0.5]], [[0.75]]), "diverged", "inconclusive"),
])
def test_a_script_that_draws_its_own_seed_may_diverge_by_chance(losses, kind: str, fate: str) -> None:
    """An unseeded MAML became NaN in four of seven runs without any technique, and three techniques were "rejected" for it."""
    broken = replace(block(), sample=[math.nan])
    lives = [SimpleNamespace(trial=SimpleNamespace(losses=one)) for one in losses]
    with pytest.raises(TrialEnded) as ended:
        believe({"a": [block()] * 2, "b": [block(), broken]}, [], alike=begin_alike(*lives))
    assert ended.value.outcome.kind == kind and "not finite" in ended.value.outcome.reason
    assert of_end(ended.value, ())[0] == fate


def test_a_script_that_draws_its_own_seed_is_held_to_all_else() -> None:
    with pytest.raises(TrialEnded, match="trains_otherwise: backward ran 1.00 times"):
        believe({"a": [block()] * 4, "b": [block(10)] * 4}, [], alike=False)


def test_steps_that_claim_an_evaluation_more_often_are_not_believed() -> None:
    """They are not counted: who calls its slow steps so is faster without them."""
    assert "50% of its steps held an evaluation" in str(other_work([evaluating()] * 4, [evaluating(0, 2, 4, 6, 8)] * 4))
    assert other_work([evaluating(0, 2, 4, 6, 8)] * 4, [evaluating()] * 4) is None
    teacher = evaluating(*range(10))
    assert other_work([teacher] * 4, [teacher] * 4) is None and other_work([evaluating()] * 2, [evaluating(), evaluating(3)]) is None


@pytest.mark.parametrize("period", [2, 3, 5, 7, 20])
@pytest.mark.parametrize("each", [1, 4, 19])
def test_evaluations_at_regular_intervals_are_believed_from_the_first_block_on(period: int, each: int) -> None:
    """Which of its steps a process is timed in is chance."""
    draw = random.Random(period)
    for _ in range(200):
        places, blocks = [draw.randrange(period), draw.randrange(period)], ([], [])
        for _ in range(10):
            for _ in range(1 + 3 // each):          # the turns of a block
                skipped = 1 + draw.randrange(2 + min(each, 8) // 2)
                for side, found in enumerate(blocks):
                    begin = places[side] + skipped
                    found.append(evaluating(*(n for n in range(each) if (begin + n) % period == 0), steps=each))
                    places[side] = begin + each
            assert other_work(*blocks) is None


def test_clocks_are_compared_with_ours() -> None:
    ms = 1_000_000
    assert clocks.problem(0, [1 * ms, 100 * ms, 200 * ms], 202 * ms) is None
    assert "lie outside" in str(clocks.problem(10 * ms, [9 * ms, 200 * ms], 202 * ms))
    assert "lie outside" in str(clocks.problem(0, [1 * ms, 203 * ms], 202 * ms))
    assert "lie outside" in str(clocks.problem(0, [1 * ms, 150 * ms, 140 * ms], 202 * ms))
    slow = (300 * ms, 260 * ms)
    assert "by the clock inside" in str(clocks.drift([slow] * 4))
    assert clocks.drift([slow] * 3) is None, "too few to tell"
    assert clocks.drift([(300 * ms, 299 * ms)] * 4 + [slow] * 3) is None, "a busy machine"
    assert clocks.drift([(300 * ms, 299 * ms)] * 2 + [slow] * 4) is None, "a very busy machine: most reports are late"
    assert "by the clock inside" in str(clocks.drift([(300 * ms, 299 * ms)] + [slow] * 4))
    assert clocks.drift([(40 * ms, 10 * ms)] * 9) is None, "blocks so short that one late wake-up counts"
    assert clocks.drift([(90 * ms, 85 * ms)] * 20) is None, "short turns, each a little late"
    assert "by the clock inside" in str(clocks.drift([(90 * ms, 70 * ms)] * 8)), "short turns are taken together"
    crowded = [(428 * ms, 357 * ms), (371 * ms, 328 * ms), (184 * ms, 160 * ms), (428 * ms, 357 * ms)]
    assert "by the clock inside" in str(clocks.drift(crowded)) and clocks.drift(crowded, clocks.LATE_ON_DEVICES_NS) is None
    assert "by the clock inside" in str(clocks.drift([(2000 * ms, 1600 * ms)] * 4, clocks.LATE_ON_DEVICES_NS)), "a device's clock is slow"


# -- a member of a set keeps its own promise; a timed run trains as a verification run does ----------------------------


class Answers:
    """The part of a study's store that verification uses."""

    def __init__(self) -> None:
        self.known: dict[str, object] = {}

    def answer(self, question: str) -> object:
        return self.known.get(question)

    def set_answer(self, question: str, value: object) -> None:
        self.known[question] = value


@dataclass(frozen=True)
class Options:
    level: int = 1


def candidate(identity: str, numerics: str, **more: object) -> Candidate:
    module = ModuleType(identity)
    vars(module).update(TECHNIQUE=SimpleNamespace(id=identity, numerics=numerics, stage="model", touches=(), merges=""), **more)
    return Candidate(module, Options())


def training(error: float = 0.0, updates: int = UPDATES) -> Series:
    """A loss that falls and parameters that move; from update 2 on off by `error`, relative."""
    losses, norms, samples = [], [], []
    for k in range(updates):
        off = 1 + error * (k >= 2)
        losses.append([off * (1 / (1 + k / 10)), off * (1.1 / (1 + k / 10))])
        norms.append(off / (1 + k / 10))
        samples.append([1 + 0.01 * k * off, -1 + 0.02 * k * off, 0.5 - 0.01 * math.sin(k) * off])
    return Series(losses, norms, samples, "B x2 S0", [], [3])


class Recorded(Verifier):
    """Verification over made-up runs: `found` says what a set of techniques does, by the ids in it."""

    def __init__(self, found: dict[frozenset[str], Series]) -> None:
        super().__init__(SimpleNamespace(store=Answers()))  # type: ignore[arg-type]
        self.found = found

    def series(self, run: Run) -> Series:
        base = self.found.get(frozenset(c.id for c in run.techniques), training())
        return training(error=run.perturb) if run.perturb else base


def test_a_precise_promise_is_kept_in_loose_company() -> None:
    """Next to a technique that may round to bf16, one that promised to be exact must still be exact."""
    liar, rough = candidate("liar", "exact"), candidate("rough", "precision")
    found = {frozenset({"rough"}): training(1e-4), frozenset({"liar", "rough"}): training(1e-4)}
    assert Recorded(found).verify((rough, liar)).passed
    verified = Recorded({**found, frozenset({"liar"}): training(1e-4)}).verify((rough, liar))
    assert not verified.passed and "liar alone: declared exact" in verified.reason


class Twins(Recorded):
    """Twins whose deviation is their own; `asked`: which were run."""

    def __init__(self, off: list[float], found: dict[frozenset[str], Series]) -> None:
        super().__init__(found)
        self.off, self.asked = off, []

    def series(self, run: Run) -> Series:
        if not run.perturb:
            return super().series(run)
        self.asked.append(run.repetition)
        return training(self.off[run.repetition])


def test_more_twins_are_asked_before_anything_is_rejected_that_nearly_passed() -> None:
    """The first twin of a convolutional net began to amplify rounding in update 39, compile in update 24: it was rejected."""
    set_ = (candidate("fused", "reordering"),)
    found = {frozenset({"fused"}): training(5e-5)}
    late = Twins([1e-7, 1e-7, 5e-5], found)
    assert late.verify(set_).passed and sorted(set(late.asked)) == [0, 1, 2]
    calm = Twins([1e-7, 1e-7, 1e-7], found)
    assert not calm.verify(set_).passed and sorted(set(calm.asked)) == [0, 1, 2]
    early = Twins([5e-5, 0.0, 0.0], found)
    assert early.verify(set_).passed and set(early.asked) == {0}, "what passes costs no more"
    broken = training(0.0)
    broken.losses[40][0] = math.nan
    outright = Twins([1.0, 1.0, 1.0], {frozenset({"fused"}): broken})
    assert not outright.verify(set_).passed and set(outright.asked) == {0}, "no tolerance covers that"
    far = Twins([1e-7, 1.0, 1.0], {frozenset({"fused"}): training(0.1)})
    assert not far.verify(set_).passed and set(far.asked) == {0}, "a hundred times outside is no rounding"


def test_no_technique_widens_its_own_tolerance() -> None:
    wide = candidate("wide", "reordering", ROUNDING=1.0)
    assert not Recorded({frozenset({"wide"}): training(0.01)}).verify((wide,)).passed


def test_of_a_training_in_float64_only_its_own_rounding_is_another_order_of_sums() -> None:
    """A forward in float32 passed for a reordering."""
    class Double(Recorded):
        def series(self, run: Run) -> Series:
            return replace(super().series(run), precision="float64")

    for numerics, passes in (("reordering", False), ("stream", False), ("precision", True)):
        set_ = (candidate("single", numerics),)
        found = {frozenset({"single"}): training(2.0**-24)}
        assert Recorded(found).verify(set_).passed
        assert Double(found)._trains_alike(set_, numerics).passed is passes
    assert Double({frozenset({"sums"}): training(2.0**-52)}).verify((candidate("sums", "reordering"),)).passed


class In(Recorded):
    """Runs of a training with these properties; `repetitions`: what unchanged ones of it did, by number."""

    def __init__(self, found: dict[frozenset[str], Series], repetitions: dict[int, Series] | None = None, **properties: str) -> None:
        super().__init__(found)
        self.repetitions, self.properties, self.asked, self.prepared = repetitions or {}, properties, set(), []

    def _prepare(self, *runs: Run) -> None:
        self.prepared.append(runs)

    def series(self, run: Run) -> Series:
        self.asked.add(run.repetition)
        found = self.repetitions.get(run.repetition) if not (run.perturb or run.techniques) else None
        self._series[_name(run)] = replace(found or super().series(run), **self.properties)
        return self._series[_name(run)]


def test_what_a_script_computes_in_16_bits_may_be_rounded_to_16_bits_elsewhere() -> None:
    """Compiled code drops the roundings between the operators that it fuses: it was rejected."""
    set_ = (candidate("fused", "reordering"),)
    for arithmetic, error, passes in (("", 2.0**-9, False), ("bfloat16", 2.0**-9, True), ("tfloat32", 2.0**-11, True), ("float16", 2.0**-12, True),
                                      ("bfloat16", 0.05, False), ("tfloat32", 0.02, False)):
        assert In({frozenset({"fused"}): training(error)}, arithmetic=arithmetic).verify(set_).passed is passes, (arithmetic, error)


def test_what_the_reference_rounds_to_is_no_other_training() -> None:
    """What fits in memory only in bf16 is compared with itself in bf16."""
    rough, fused = candidate("rough", "precision"), candidate("fused", "reordering")
    found = {frozenset({"rough"}): training(), frozenset({"rough", "fused"}): training(2.0**-9)}
    verifier = Recorded(found)
    assert verifier._rounding("reordering") == 2.0**-24
    verifier.reference = (rough,)
    assert verifier._rounding("reordering") == 2.0**-9 and verifier.verify((rough, fused)).passed


def test_on_an_accelerator_two_runs_that_agree_may_do_so_by_chance() -> None:
    """The fastest algorithm is found by a measurement in each process: the third repetition is the first to take another."""
    set_ = (candidate("pinned", "exact"),)
    found = {frozenset({"pinned"}): training(1e-6)}
    other = In(found, {3: training(1e-6)}, device="cuda")
    assert other.verify(set_).passed and {1, 2, 3} <= other.asked
    same = In(found, device="cuda")
    assert "declared exact" in same.verify(set_).reason and {1, 2, 3} <= same.asked
    assert [run.repetition for run in same.prepared[0]] == [2, 3], "these two at once, when the first has agreed"
    early = In(found, {1: training(1e-6)}, device="cuda")
    assert early.verify(set_).passed and not {2, 3} & early.asked
    on_cpu = In(found, {3: training(1e-6)}, device="cpu")
    assert "declared exact" in on_cpu.verify(set_).reason and on_cpu.asked == {0, 1}


def timed(device: str, baseline: float, faced: float) -> Verified:
    """What is found of a technique whose timed losses are off by `faced`, and the baseline's by `baseline`."""
    set_ = (candidate("faced", "exact"),)
    verifier = In({}, device=device)
    verifier.bench.store.set_answer(timed_losses(()), training(baseline).losses)
    verifier.bench.store.set_answer(timed_losses(set_), training(faced).losses[:20])
    return verifier.verify(set_)


def test_what_deterministic_algorithms_change_in_the_baseline_does_not_hide_another_training() -> None:
    """On an accelerator timed runs have other algorithms than verification runs. That of the baseline alone was enough to ask no more."""
    assert timed("cuda", 1e-3, 1e-3).passed
    assert timed("cuda", 1e-3, 3e-3).passed, "so far off is the baseline itself, now and then"
    assert timed("cuda", 1e-5, 2e-5).passed, "at the border"
    assert "when it is timed" in timed("cuda", 1e-3, 0.05).reason
    assert timed("cpu", 1e-3, 0.05).passed, "there, only a script that draws its own seed has other losses"


def test_a_script_that_draws_its_own_seed_tells_nothing_when_it_is_timed() -> None:
    """Its losses differ from the first update on, where algorithms have not made anything of a rounding yet."""
    set_ = (candidate("faced", "exact"),)
    for device in ("cpu", "cuda"):
        verifier = In({}, device=device)
        for chosen, factor in (((), 1.02), (set_, 0.9)):
            losses = [[factor * loss for loss in update] for update in training().losses]
            verifier.bench.store.set_answer(timed_losses(chosen), losses)
        assert verifier.verify(set_).passed, device


class Crowded(Recorded):
    """A baseline that runs out of this kind of memory where its algorithms must be deterministic, or always."""

    def __init__(self, kind: str, always: bool = False) -> None:
        super().__init__({})
        self.kind, self.always, self.tried = kind, always, []

    def series(self, run: Run) -> Series:
        self.tried.append(self._capture(run)["deterministic"])
        if self.tried[-1] or self.always:
            raise TrialEnded(Outcome(self.kind, "no memory"))
        return super().series(run)


def test_a_script_that_has_no_memory_for_deterministic_algorithms_is_verified_without_them() -> None:
    full = Crowded("out_of_memory_device")
    assert full.check_baseline() is None and full.tried == [True, False]
    assert "without torch's deterministic algorithms" in str(full.note)
    resumed = Crowded("out_of_memory_device")
    resumed.bench = full.bench
    assert resumed.check_baseline() is None and resumed.note == full.note and not resumed._capture(Run())["deterministic"]
    for kind, always, tried in (("out_of_memory_device", True, [True, False]), ("out_of_memory_host", False, [True])):
        other = Crowded(kind, always)
        with pytest.raises(TrialEnded):
            other.check_baseline()
        assert other.tried == tried and not other.bench.store.known, "a resumed study tries both again"
    plain = Recorded({})
    assert plain.check_baseline() is None and plain.note is None and plain._capture(Run())["deterministic"]


def test_losses_of_timed_trials_are_compared() -> None:
    faced = (candidate("faced", "exact"),)
    plain = training().losses
    verifier = Recorded({})
    verifier.bench.store.set_answer(timed_losses(()), plain)
    verifier.bench.store.set_answer(timed_losses(faced), plain[:20])
    assert verifier.verify(faced).passed
    other = Recorded({})
    other.bench.store.set_answer(timed_losses(()), plain)
    other.bench.store.set_answer(timed_losses(faced), training(0.05).losses[:20])
    verified = other.verify(faced)
    assert not verified.passed and "when it is timed" in verified.reason and "update 2" in verified.reason
    unseeded = Recorded({})
    unseeded.bench.store.set_answer(timed_losses(()), training(0.3).losses)
    unseeded.bench.store.set_answer(timed_losses(faced), training(0.05).losses)
    assert unseeded.verify(faced).passed, "a script that draws its own seed cannot be compared in this way"


def test_first_difference() -> None:
    assert first_difference([[1.0], [2.0]], [[1.0], [2.1]], [0.2, 0.2]) is None
    assert first_difference([[1.0], [2.0]], [[1.0], [2.1]], [0.2, 0.05]) == 1
    assert first_difference([[1.0, 1.0]], [[1.0]], [9.0]) == 0, "another number of micro-steps"
    assert first_difference([[1.0]], [[math.nan]], [9.0]) == 0


def test_a_training_can_be_told_from_itself() -> None:
    """The made-up trainings above are informative, so the tests above can fail."""
    assert Recorded({}).check_baseline() is None
    flat = replace(training(), losses=[[1.0]] * UPDATES)
    assert Recorded({frozenset(): flat}).check_baseline() is not None


# -- workloads that show nothing ---------------------------------------------------------------------------------------

_LOOP = """
import torch, torch.nn as nn
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 1))
x, y = torch.randn(64, 8), torch.randn(64, 1)
optimizer = torch.optim.SGD(model.parameters(), lr={lr})
{before}
for update in range({updates}):
    optimizer.zero_grad()
    loss = {loss}
    loss.backward()
    optimizer.step()
"""
_DEFAULT = {"lr": 1e-2, "before": "", "updates": 10**9, "loss": "nn.functional.mse_loss(model(x), y)"}

#: name -> (changes, words of the reason)
TRAPS = {
    "constant loss": ({"loss": "(model(x) - model(x).detach()).mean() + 3.0"}, "same in every update"),
    "zero loss": ({"loss": "nn.functional.mse_loss(model(x), y) * 0.0"}, "zero in every update"),
    "learning rate 0": ({"lr": 0.0, "loss": "nn.functional.mse_loss(model(x + 0.1 * torch.randn_like(x)), y)"}, "learning rate 0"),
    "all frozen": ({"before": "model.requires_grad_(False); x.requires_grad_(True)",
                    "loss": "nn.functional.mse_loss(model(x + 0.1 * torch.randn_like(x)), y)"}, ""),
    "too short": ({"updates": 30}, "after 30 training steps"),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", TRAPS)
def test_a_workload_that_shows_nothing_is_refused(name: str, tmp_path: Path) -> None:
    changes, words = TRAPS[name]
    result = tune(tmp_path, _LOOP.format(**{**_DEFAULT, **changes}), names=("waits_less",), budget="40s")
    assert result["verified"] is None and result["verdict"] == "inconclusive"
    assert words in result["verified_reason"]
    assert result["by_id"]["waits-less"]["fate"] == "not_tried"
    assert "technique" not in tomllib.loads(Path(result["recipe"]).read_text(encoding="utf-8"))


_RESUMES = WORKLOAD.replace("updates = int", """
import os
if os.path.exists("state.pt"):
    open("resumed", "a").write("again")
    model.load_state_dict(torch.load("state.pt"))
torch.save(model.state_dict(), "state.pt")
updates = int""")


@pytest.mark.slow
@pytest.mark.parametrize("name", ["dropout", "unseeded", "resumes"])
def test_an_honest_technique_is_kept(name: str, tmp_path: Path) -> None:
    """With dropout, without a seed, and from a checkpoint in the working directory, which every trial finds as it was."""
    source = {"dropout": WORKLOAD.replace("torch.tanh(self.a(x))", "nn.functional.dropout(torch.tanh(self.a(x)), 0.2, self.training)"),
              "unseeded": WORKLOAD.replace("torch.manual_seed(7)\n", ""), "resumes": _RESUMES}[name]
    result = tune(tmp_path, source, names=("waits_less",), budget="120s")
    entry = result["by_id"]["waits-less"]
    assert entry["fate"] == "kept", (entry, result["stderr"])
    assert result["verified"] is True and result["speedup"] > 1.2
    assert sorted(path.name for path in (tmp_path / "work").iterdir()) == [".saturate", "train.py"]


def test_a_liar_among_the_entry_points_is_in_no_recipe(tmp_path: Path) -> None:
    """The whole way, as its users have it: an installed distribution, `tune`, the recipe. It is four times as fast, on half of the batch."""
    result = tune(tmp_path, WORKLOAD, names=("half_forward",), budget="90s")
    found = result["by_id"]["half-forward"]
    assert found["fate"] == "rejected_numerics" and "deviates" in found["reason"], found
    assert result["speedup"] in (1.0, None) and not tomllib.loads(Path(result["recipe"]).read_text(encoding="utf-8")).get("technique")
