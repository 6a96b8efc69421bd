"""Options of a technique from a recipe's table."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from types import SimpleNamespace
from typing import Literal

import pytest

from saturate.errors import RecipeError
from saturate.records.options import options_from, problems


@dataclass(frozen=True)
class Options:
    count: int = field(default=2, metadata={"minimum": 1, "maximum": 64})
    mode: Literal["default", "reduce-overhead"] = "default"
    persistent: bool = True
    share: float = 0.5
    name: str = ""

    def __post_init__(self):
        if self.name == "forbidden":
            raise ValueError("that name is taken")


MODULE = SimpleNamespace(Options=Options, TECHNIQUE=SimpleNamespace(id="toy"))


def test_defaults_fill_in_what_is_left_out():
    assert options_from(MODULE, {}) == Options()
    assert options_from(MODULE, {"count": 4, "mode": "reduce-overhead"}) == Options(count=4, mode="reduce-overhead")


def test_round_trip():
    options = Options(count=7, persistent=False, share=0.25, name="x")
    assert options_from(MODULE, asdict(options)) == options


def test_a_whole_number_is_a_number_but_nothing_else_is_converted():
    share = options_from(MODULE, {"share": 1}).share
    assert share == 1.0 and isinstance(share, float)


@pytest.mark.parametrize(("table", "message"), [
    ({"count": True}, "a whole number"),
    ({"count": 4.0}, "a whole number"),
    ({"count": "4"}, "a whole number"),
    ({"persistent": 1}, "true or false"),
    ({"share": float("nan")}, "finite"),
    ({"share": 10**400}, "huge number"),
    ({"mode": "fast"}, "'reduce-overhead'"),
    ({"mode": []}, "expected one of"),
    ({"count": 0}, "below the least allowed value, 1"),
    ({"count": 65}, "above the largest allowed value, 64"),
    ({"name": "forbidden"}, "that name is taken"),
    ({"name": None}, "expected text"),
])
def test_what_does_not_fit_is_named(table, message):
    with pytest.raises(RecipeError, match=message) as caught:
        options_from(MODULE, table)
    assert "toy" in caught.value.message


def test_an_unknown_option_suggests_the_nearest():
    with pytest.raises(RecipeError) as caught:
        options_from(MODULE, {"conut": 3})
    assert caught.value.remedy == "did you mean 'count'?"


def test_all_problems_are_listed():
    assert [problem.name for problem in problems(Options, {"x": 1, "count": 0, "mode": "z"})] == ["x", "count", "mode"]
