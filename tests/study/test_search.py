"""What the search makes of races that noise spoiled."""

from __future__ import annotations

import math
import types
from dataclasses import dataclass, field
from typing import Any

from test_fitting import World, search, technique

from saturate.study.racing import Result
from saturate.study.search import SCREEN, leads


@dataclass
class Noisy(World):
    """A world in which screening sees `misread`, with an interval that holds everything; longer races see what is."""

    misread: dict[str, float] = field(default_factory=dict)

    def run(self, question: str, a: Any, b: Any, limits: Any, *rest: Any, **more: Any) -> Result:
        result = super().run(question, a, b, limits, *rest, **more)
        gain = self.misread.get(b[-1].id) if b and limits is SCREEN else None
        if gain is None:
            return result
        seen = types.SimpleNamespace(log_ratio=math.log1p(gain), low=-0.3, high=0.3, speedup=1 + gain, speedup_ci=(0.74, 1.35))
        return Result(types.SimpleNamespace(verdict="inconclusive", estimate=seen), result.pairs, result.a_ms, result.b_ms, result.record)    # type: ignore[arg-type]


FAST, SLOW = technique("fast"), technique("slow")


def test_what_screening_misread_is_looked_at_again() -> None:
    world = Noisy({"fast": (0.8, 0.0), "slow": (1.2, 0.0)}, None, misread={"fast": -0.03, "slow": -0.01})
    walk = search(world, FAST, SLOW)
    walk.run()
    assert [c.id for c in walk.kept] == ["fast"]
    assert (walk.fates["fast"].fate, walk.fates["slow"].fate) == ("kept", "slower")


def test_without_time_it_stays_undecided() -> None:
    world = Noisy({"fast": (0.8, 0.0)}, None, misread={"fast": -0.03})
    walk = search(world, FAST)
    walk._screen(walk.eligible())
    walk.deadline = 0.0
    walk._look_again()
    assert (walk.kept, walk.fates["fast"].fate) == ((), "inconclusive")


def test_what_does_not_verify_is_not_tried_twice() -> None:
    world = Noisy({"fast": (0.8, 0.0)}, None, misread={"fast": -0.03}, wrong=frozenset({"fast"}))
    walk = search(world, FAST)
    walk.run()
    assert walk.kept == () and walk.fates["fast"].fate == "rejected_numerics"
    assert sum("fast" in started for started in world.started) == 2      # screened, and looked at once more


def test_what_is_certain_joins_at_once_and_the_rest_is_screened_on_top_of_it() -> None:
    world = World({"fast": (0.6, 0.0), "slow": (0.9, 0.0)}, None)
    walk = search(world, FAST, SLOW)
    walk.run()
    assert [c.id for c in walk.kept] == ["fast", "slow"]
    assert world.started.index("fast + slow") < world.started.index("slow"), "only the ablation runs it alone"


def test_a_certain_one_that_does_not_verify_is_not_stood_on() -> None:
    world = World({"fast": (0.6, 0.0), "slow": (0.8, 0.0)}, None, wrong=frozenset({"fast"}))
    walk = search(world, FAST, SLOW)
    walk.run()
    assert [c.id for c in walk.kept] == ["slow"] and walk.fates["fast"].fate == "rejected_numerics"


def read(gain: float, low: float, high: float) -> Any:
    return types.SimpleNamespace(gain=gain, gain_ci=(low, high))


def test_a_later_variant_must_lead_beyond_what_readings_scatter() -> None:
    two_workers, one = read(0.093, 0.030, 0.160), read(0.117, 0.020, 0.223)
    assert not leads(one, two_workers), "a tie goes to the one that was thought better"
    assert leads(read(0.25, 0.2, 0.3), two_workers) and not leads(read(0.05, 0.0, 0.1), two_workers)
    assert leads(types.SimpleNamespace(gain=0.1, gain_ci=None), types.SimpleNamespace(gain=0.09, gain_ci=None))


def test_the_first_of_two_equal_variants_is_kept() -> None:
    for faster, kept in ((1.0, 1), (0.8, 2)):
        several = technique("several", levels=(1, 2))
        world = World({"several": (0.7, 0.0), "several level=2": (0.7 * faster, 0.0)}, None)
        walk = search(world, several)
        walk.run()
        assert [candidate.options.level for candidate in walk.kept] == [kept], world.started
