"""Finding a set that keeps a memory limit, with made-up techniques whose time and memory are known."""

from __future__ import annotations

import math
import time
import types
from dataclasses import dataclass, field
from typing import Any

import pytest

from saturate.records.facts import Facts
from saturate.records.result import RaceRecord
from saturate.study.bench import Bench
from saturate.study.candidates import key
from saturate.study.memory_limit import Fitting, let_go
from saturate.study.peaks import Peaks
from saturate.study.race_noise import Noise
from saturate.study.racing import Result
from saturate.study.search import Search
from saturate.study.standing import CannotVerify, LimitPassed
from saturate.study.verification import Verified
from saturate.techniques._api import Eligible, Ineligible, Technique, Touch
from saturate.trial.outcome import Outcome
from saturate.trial.process import TrialEnded

GIB = 2**30


@dataclass(frozen=True)
class Options:
    level: int = 1


def technique(name: str, saves: bool = False, resource: str = "", levels: tuple[int, ...] = (1,)) -> types.ModuleType:
    module: Any = types.ModuleType(name)
    module.__file__ = f"/nowhere/{name}.py"
    module.TECHNIQUE = Technique(id=name, title=name, numerics="exact", stage="model", touches=(Touch(resource or name),))
    module.Options = Options
    module.eligible = lambda facts: (Ineligible("needs a limit") if saves and facts.memory_limit_bytes is None else Eligible("yes"))
    module.variants = lambda facts: [Options(level) for level in levels]
    module.bound = lambda facts: None
    return module


class Store:
    def __init__(self) -> None:
        self.known: dict[str, Any] = {}

    def answer(self, question: str) -> Any:
        return self.known.get(question)

    def set_answer(self, question: str, value: Any) -> None:
        self.known[question] = value


@dataclass
class World:
    """A workload of 8 GiB and 100 ms. `effects`: by label, a factor on time and GiB less (or more). `fails`: by id, how."""

    effects: dict[str, tuple[float, float]]
    limit: float | None
    fails: dict[str, str] = field(default_factory=dict)
    wrong: frozenset[str] = frozenset()
    runs_out: float = math.inf          # GiB of the machine
    started: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.store = Store()
        self.peaks = Peaks(self.store, int(self.limit * GIB) if self.limit else None)     # type: ignore[arg-type]
        self.starved = self.runs_out < 8.0
        self.probed: list[str] = []
        if not self.starved:
            self.peaks.note((), 8 * GIB)       # it ran when the study began
        self.bench = self
        self.threshold = 0.02
        self.ends = math.inf
        self.refusal: str | None = None     # as a verifier
        self.pair_s = 10.0
        self.noise = Noise(self.threshold)

    def numbers(self, techniques: Any) -> tuple[float, float]:
        need, step = 8.0, 100.0
        for member in techniques:
            factor, less = self.effects[member.label()]
            need, step = need - less, step * factor
        return need, step

    # as a bench
    def live(self, purpose: str, techniques: Any) -> Any:
        self.started.append(" + ".join(sorted(c.label() for c in techniques)))
        self.probed += [purpose] if purpose.startswith("fit ") and " or " not in purpose else []
        for member in techniques:
            if member.label() in self.fails:
                raise TrialEnded(Outcome(self.fails[member.id], "for a test"))
        need, step = self.numbers(techniques)
        if need > self.runs_out:
            raise TrialEnded(Outcome("out_of_memory_device", "CUDA out of memory"))
        self.peaks.note(techniques, int(need * GIB))
        too_much = self.peaks.too_much(techniques)
        if techniques and too_much:
            raise TrialEnded(Outcome("over_limit", too_much))
        return types.SimpleNamespace(step_ms=step)

    def finish_live(self, live: Any) -> None:
        pass

    why_not_fit = Bench.why_not_fit

    # as a racer
    def drop_base(self) -> None:
        pass

    def run(self, question: str, a: Any, b: Any, limits: Any, deadline: float, share_base: bool = False, min_pairs: int = 1) -> Result:
        times = []
        for side, techniques in (("a", a), ("b", b)):
            try:
                times.append(self.live(question, techniques).step_ms)
            except TrialEnded as ended:
                ended.side = side
                raise
        ratio = math.log(times[0] / times[1])
        verdict = "faster" if ratio > 0.02 else "slower" if ratio < -0.02 else "no_difference"
        estimate = types.SimpleNamespace(log_ratio=ratio, low=ratio, high=ratio, speedup=math.exp(ratio), speedup_ci=(1.0, 1.0))
        record = RaceRecord(question=question, a=[], b=[], pairs=1, rounds=2, speedup=math.exp(ratio), speedup_ci=(1.0, 1.0),
                            verdict=verdict)    # type: ignore[arg-type]
        return Result(types.SimpleNamespace(verdict=verdict, estimate=estimate), [[ratio]], *times, record)    # type: ignore[arg-type]

    # as a verifier
    def verify(self, techniques: Any) -> Verified:
        bad = [c.id for c in techniques if c.id in self.wrong]
        return Verified(not bad, f"{bad[0]} deviates" if bad else "identical")


def search(world: World, *modules: types.ModuleType) -> Search:
    facts = Facts(memory_limit_bytes=world.peaks.limit_bytes)
    return Search({m.__name__: m for m in modules}, facts, world, world, time.monotonic() + 60, lambda line: None)    # type: ignore[arg-type]


def ids(techniques: Any) -> list[str]:
    return sorted(c.label() for c in techniques)


CHECKPOINTING, EIGHT, OFFLOAD, FAST = (technique("checkpointing", saves=True), technique("eight", saves=True, resource="state"),
                                       technique("offload", saves=True, resource="state"), technique("fast"))
EFFECTS = {"checkpointing": (1.3, 3.0), "eight": (1.05, 2.0), "offload": (1.6, 2.5), "fast": (0.8, 0.0)}


def test_the_fastest_that_fits_alone_is_taken_and_made_faster() -> None:
    world = World(EFFECTS, limit=6.0)
    found = search(world, CHECKPOINTING, EIGHT, OFFLOAD, FAST)
    assert Fitting(found).find() is None
    assert ids(found.base) == ["eight"] and found.fates["eight"].fate == "kept"
    assert "needed: without it the training needs 8.00 GiB, the limit is 6.00 GiB" in found.fates["eight"].reason
    assert found.fitted is not None and found.fitted.gain == pytest.approx(1 / 1.05 - 1)
    found.run()
    assert ids(found.kept) == ["eight", "fast"]
    assert found.fates["offload"].fate == "not_applicable" and "conflicts" in found.fates["offload"].reason
    assert found.fates["checkpointing"].fate == "slower"


def test_what_is_needed_to_fit_is_not_asked_about_once_more() -> None:
    found = search(World(EFFECTS, limit=6.0), EIGHT)
    assert Fitting(found).find() is None
    found.run()
    assert ids(found.kept) == ["eight"] and found.fates["eight"].fate == "kept"


def test_what_none_does_alone_several_do_together() -> None:
    world = World(EFFECTS, limit=3.5)
    found = search(world, CHECKPOINTING, EIGHT, OFFLOAD, FAST)
    assert Fitting(found).find() is None
    assert ids(found.base) == ["checkpointing", "offload"], "those that save most, and of two in conflict one"
    assert world.peaks.of(found.base) == int(2.5 * GIB)


def test_a_faster_technique_that_also_saves_makes_another_one_superfluous() -> None:
    half = technique("half")
    world = World({**EFFECTS, "half": (0.6, 4.0)}, limit=6.0)
    found = search(world, EIGHT, half, FAST)
    Fitting(found).find()
    assert ids(found.base) == ["eight"]
    found.run()
    assert ids(found.kept) == ["fast", "half"], "eight is dropped: without it the set fits, and is faster"
    assert found.fates["eight"].fate == "slower"


def test_a_member_that_is_needed_is_not_dropped_however_slow() -> None:
    world = World(EFFECTS, limit=3.5)
    found = search(world, CHECKPOINTING, OFFLOAD, FAST)
    Fitting(found).find()
    found.run()
    assert ids(found.kept) == ["checkpointing", "fast", "offload"]
    assert "without it the training needs 5.00 GiB" in found.fates["offload"].reason


def test_when_nothing_fits_the_nearest_is_named() -> None:
    world = World(EFFECTS, limit=1.0)
    found = search(world, CHECKPOINTING, EIGHT, OFFLOAD, FAST)
    why = Fitting(found).find()
    assert why == ("nothing keeps the limit of 1.00 GiB: the baseline needs 8.00 GiB, the least was 2.50 GiB with "
                   "checkpointing + offload")
    assert found.kept == () and found.fates["eight"].fate == "failed"
    halfway = World({**EFFECTS, "fast": (0.8, 0.0)}, limit=1.0)
    stopped = search(halfway, EIGHT, FAST)
    stopped.deadline = time.monotonic() - 1
    fitter = Fitting(stopped)
    assert "the budget ended first" in str(fitter.find()) and fitter.out_of_time
    assert stopped.fates["fast"].reason.startswith("nothing keeps") and stopped.fates["fast"].candidate is None
    assert "over limit: needs 6.00 GiB" in found.fates["eight"].reason


def test_without_a_technique_that_saves_the_others_are_asked() -> None:
    half = technique("half")
    world = World({"half": (0.6, 4.0), "fast": (0.8, 0.0)}, limit=5.0)
    found = search(world, half, FAST)
    assert Fitting(found).find() is None and ids(found.base) == ["half"]
    world = World({"fast": (0.8, 0.0)}, limit=5.0)
    assert "nothing keeps the limit" in str(Fitting(search(world, FAST)).find())


def test_what_does_not_train_alike_is_replaced() -> None:
    world = World(EFFECTS, limit=6.0, wrong=frozenset({"eight"}))
    found = search(world, CHECKPOINTING, EIGHT, FAST)
    assert Fitting(found).find() is None
    assert ids(found.base) == ["checkpointing"]
    assert found.fates["eight"].fate == "rejected_numerics"


def test_of_a_pair_the_one_to_blame_is_rejected() -> None:
    world = World(EFFECTS, limit=3.5, wrong=frozenset({"offload"}))
    found = search(world, CHECKPOINTING, EIGHT, OFFLOAD, FAST)
    assert Fitting(found).find() is None
    assert ids(found.base) == ["checkpointing", "eight"]
    assert found.fates["offload"].fate == "rejected_numerics" and found.fates["checkpointing"].fate == "kept"


def test_what_keeps_the_limit_and_cannot_be_taken_is_told_apart_from_what_does_not_keep_it() -> None:
    """ "Nothing keeps the limit, the least was 8.00 GiB with fast", where another one had kept it."""
    world = World(EFFECTS, limit=6.0, wrong=frozenset({"eight"}))
    fitter = Fitting(search(world, EIGHT, FAST))
    assert fitter.find() == ("nothing that can be taken keeps the limit of 6.00 GiB: the baseline needs 8.00 GiB; "
                             "eight kept it with 6.00 GiB, but eight: eight deviates")
    assert fitter.unfit and not fitter.out_of_time


def test_where_nothing_can_be_compared_nobody_says_that_nothing_fits() -> None:
    world = World(EFFECTS, limit=6.0)

    def verify(techniques: Any) -> Verified:
        world.refusal = "the baseline does not repeat itself"
        return Verified(None, world.refusal)

    world.verify = verify       # type: ignore[method-assign]
    with pytest.raises(CannotVerify, match="does not repeat itself"):
        Fitting(search(world, EIGHT, CHECKPOINTING, FAST)).find()


@dataclass
class Growing(World):
    """Needs 0.1 GiB more from this start on."""

    grows_at: float = math.inf

    def numbers(self, techniques: Any) -> tuple[float, float]:
        need, step = super().numbers(techniques)
        return need + (0.1 if [c.id for c in techniques] == ["eight"] and len(self.started) >= self.grows_at else 0.0), step


@pytest.mark.parametrize("others", [(CHECKPOINTING,), ()])
def test_what_passes_the_limit_in_its_race_is_replaced(others: tuple[types.ModuleType, ...]) -> None:
    """Its peak was within the limit by the margin in the first trial, and beyond it in the next: "the command failed"."""
    world = Growing(EFFECTS, limit=6.0, grows_at=3 + len(others))
    found = search(world, EIGHT, *others)
    fitter = Fitting(found)
    why = fitter.find()
    assert ids(found.base) == [module.__name__ for module in others]
    assert found.fates["eight"].fate == "failed" and "in a later run" in found.fates["eight"].reason
    assert why is None if others else "eight kept it with 6.10 GiB, but eight: it needs 6.10 GiB, the limit is 6.00 GiB in a later run" in str(why)


def test_what_passes_the_limit_in_the_search_ends_it_by_name() -> None:
    world = Growing(EFFECTS, limit=6.0, grows_at=4)
    found = search(world, EIGHT, FAST)
    assert Fitting(found).find() is None and ids(found.base) == ["eight"]
    with pytest.raises(LimitPassed, match="needs 6.10 GiB") as passed:
        found.run()
    said = let_go(found, str(passed.value))
    assert said.startswith("eight kept the limit at first, and not in a later run: needs 6.10 GiB") and "--fit" in said
    assert found.kept == () and found.fates["eight"].fate == "failed"


def test_a_technique_that_fails_otherwise_is_left_out() -> None:
    world = World(EFFECTS, limit=6.0, fails={"eight": "not_applied"})
    found = search(world, CHECKPOINTING, EIGHT, FAST)
    Fitting(found).find()
    assert ids(found.base) == ["checkpointing"] and found.fates["eight"].fate == "not_applied"


def test_a_baseline_that_runs_out_of_memory_is_never_raced() -> None:
    world = World(EFFECTS, limit=6.0, runs_out=7.0)
    found = search(world, CHECKPOINTING, EIGHT, FAST)
    assert Fitting(found).find() is None
    assert ids(found.base) == ["eight"] and found.fitted is None
    assert "without it the training runs out of memory" in found.fates["eight"].reason
    found.run()
    assert ids(found.kept) == ["eight", "fast"] and "" not in world.started


def test_a_baseline_that_fits_is_searched_as_ever_and_savers_come_last() -> None:
    world = World({**EFFECTS, "fast": (0.8, -1.5)}, limit=9.0)
    found = search(world, EIGHT, FAST)
    found.run()
    assert world.started.index("fast") < world.started.index("eight")
    assert found.kept == () and found.fates["fast"].fate == "failed"
    assert found.fates["fast"].reason == "over limit: needs 9.50 GiB, the limit is 9.00 GiB"


def test_without_a_limit_nothing_of_this_happens() -> None:
    world = World(EFFECTS, limit=None)
    found = search(world, EIGHT, FAST)
    found.run()
    assert ids(found.kept) == ["fast"] and found.fates["eight"].fate == "not_applicable"


def test_variants_of_one_technique_are_alternatives() -> None:
    levels = technique("levels", saves=True, levels=(1, 2))
    world = World({"levels": (1.1, 1.0), "levels level=2": (1.4, 3.0), "fast": (0.8, 0.0)}, limit=6.0)
    found = search(world, levels, FAST)
    Fitting(found).find()
    assert ids(found.base) == ["levels level=2"]


def test_a_resumed_search_starts_no_probe_again() -> None:
    world = World(EFFECTS, limit=6.0)
    Fitting(search(world, CHECKPOINTING, EIGHT)).find()
    probed, world.probed = [purpose for purpose in world.probed if purpose != "fit eight"], []
    assert probed == ["fit checkpointing"]
    again = search(world, CHECKPOINTING, EIGHT)
    Fitting(again).find()
    assert "fit checkpointing" not in world.probed and ids(again.base) == ["eight"]


def test_the_highest_peak_of_a_set_counts() -> None:
    peaks = Peaks(Store(), 5 * GIB)       # type: ignore[arg-type]
    assert peaks.too_much(()) is None, "nothing is known"
    peaks.note((), 4 * GIB)
    peaks.note((), 6 * GIB)
    peaks.note((), 3 * GIB)
    assert peaks.of(()) == 6 * GIB and peaks.too_much(()) == "needs 6.00 GiB, the limit is 5.00 GiB"
    assert peaks.store.known[f"peak {key(())}"] == 6 * GIB      # type: ignore[attr-defined]


def test_a_set_leaves_some_room_the_first_time() -> None:
    """Peaks differ from run to run: what just fits once would not fit in the last race, or in the user's run."""
    candidate = search(World(EFFECTS, limit=5.0), EIGHT).eligible()[0][0]
    peaks = Peaks(Store(), 5 * GIB)         # type: ignore[arg-type]
    assert peaks.allowed((candidate,)) == int(4.95 * GIB) and peaks.allowed(()) is None
    peaks.note((candidate,), int(4.9 * GIB))
    assert peaks.allowed((candidate,)) == 5 * GIB
    assert Peaks(Store()).allowed((candidate,)) is None     # type: ignore[arg-type]
