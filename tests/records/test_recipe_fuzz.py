"""Whatever the bytes: a Recipe or a RecipeError, and a recipe that was read is written and read back the same."""

from __future__ import annotations

import math

import msgspec
from hypothesis import given, settings
from hypothesis import strategies as st
from recipe_toys import RECIPE, REGISTRY

from saturate.errors import RecipeError
from saturate.records import recipe as recipes
from saturate.records.recipe import Entry, MadeFor, MeasuredEvidence, Recipe

VALID = recipes.dumps(RECIPE).encode()
FRAGMENTS = [b"[", b"]", b"[[technique]]\n", b"{", b"}", b'"', b'"""', b"'''", b"\\", b"\0", b"\xff", b"=", b"nan", b"inf", b"\r", b"\n",
             b".", b"1e999", b"9" * 5000, b"0x", b"1979-05-27", b"[technique.options]\n", b"id = 'x'\n", b"schema = 1\n", b"\xef\xbb\xbf"]

scalars = st.booleans() | st.integers(-(2**63) + 1, 2**63 - 1) | st.floats(allow_nan=False, allow_infinity=False) | st.text(max_size=20)
values = st.recursive(scalars, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3), max_leaves=6)
gains = st.none() | st.floats(-0.99, 1e6)
entries = st.builds(Entry, id=st.text(min_size=1, max_size=20), options=st.dictionaries(st.text(max_size=8), values, max_size=3),
                    gain=gains, numerics=st.text(max_size=8), why=st.text(max_size=40))
written = st.builds(Recipe, made_for=st.builds(MadeFor, device=st.text(max_size=9), script=st.text(max_size=9)),
                    evidence=st.builds(MeasuredEvidence, speedup=st.none() | st.floats(1e-6, 1e6), verified=st.none() | st.booleans(),
                                       command=st.lists(st.text(max_size=9), max_size=3)),
                    techniques=st.lists(entries, max_size=3))


def exact(recipe: Recipe) -> bytes:
    """For comparing: unlike for Python, true is not 1."""
    return msgspec.json.encode(recipe, order="deterministic")


def outcome(data: bytes, path) -> None:
    path.write_bytes(data)
    problems = recipes.check(path, REGISTRY)
    try:
        recipe = recipes.read(path)
    except RecipeError as error:
        assert error.card() and error.remedy
        assert problems
        return
    again = recipes.dumps(recipe, data.decode("utf-8-sig"))
    assert exact(recipes.loads(again)) == exact(recipe)


@settings(max_examples=200, deadline=None)
@given(data=st.binary(max_size=200))
def test_random_bytes(data, tmp_path_factory):
    outcome(data, tmp_path_factory.getbasetemp() / "random.toml")


@settings(max_examples=300, deadline=None)
@given(cuts=st.lists(st.tuples(st.integers(0, len(VALID)), st.integers(0, 30), st.sampled_from(FRAGMENTS) | st.binary(max_size=4)), max_size=4))
def test_mutated_recipes(cuts, tmp_path_factory):
    data = VALID
    for start, length, fragment in cuts:
        data = data[:start] + fragment + data[start + length:]
    outcome(data, tmp_path_factory.getbasetemp() / "mutated.toml")


@settings(max_examples=150, deadline=None)
@given(recipe=written, previous=st.none() | written)
def test_round_trip(recipe, previous):
    text = recipes.dumps(recipe, None if previous is None else recipes.dumps(previous))
    back = recipes.loads(text)
    assert exact(back) == exact(recipe)
    for entry in back.techniques:
        assert entry.gain is None or math.isfinite(entry.gain)
