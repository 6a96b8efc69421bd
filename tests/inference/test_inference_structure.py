"""Nested inputs and outputs as data: they come back, and a description neither imports nor calls anything."""

from __future__ import annotations

import collections
import dataclasses
import json
import math
import pickle
import sys

import pytest

torch = pytest.importorskip("torch", reason="torch")

from saturate.inference import structure  # noqa: E402


@dataclasses.dataclass
class Answer:
    logits: torch.Tensor
    hidden: tuple = ()
    loss: torch.Tensor | None = None


Pair = collections.namedtuple("Pair", "first second")


def roundtrip(value):
    description, tensors = structure.flatten(torch, value)
    return json.loads(json.dumps(description)), tensors


def test_structures_come_back():
    a, b = torch.rand(2), torch.rand(3)
    value = [Answer(a, (b, None)), Pair(a, {"x": b, 3: True}), (1.5, "text", None)]
    description, tensors = roundtrip(value)
    assert len(tensors) == 2
    found = structure.rebuild(description, tensors)
    assert type(found[0]) is Answer and found[0].hidden[0] is b and found[0].loss is None
    assert type(found[1]) is Pair and found[1].second == {"x": b, 3: True} and found[1].first is a
    assert found[2] == (1.5, "text", None)


def test_a_class_that_is_not_there_has_a_stand_in_that_can_travel():
    a, b = torch.rand(2), torch.rand(3)
    description, tensors = roundtrip([Answer(a, (b,)), Pair(a, b)])
    text = json.dumps(description).replace(":Answer", ":Nobody").replace(":Pair", ":Nobody")
    answer, pair = pickle.loads(pickle.dumps(structure.rebuild(json.loads(text), tensors)))
    assert torch.equal(answer.logits, a) and torch.equal(answer["logits"], a) and torch.equal(answer[0], a) and answer.loss is None
    first, second = pair
    assert torch.equal(first, a) and torch.equal(pair.second, b)
    with pytest.raises(AttributeError):
        _ = answer.nothing
    with pytest.raises(AttributeError):
        _ = pair.nothing


def test_a_description_imports_and_calls_nothing():
    """A file may name any class: only dataclasses and named tuples with these fields, and only of imported modules."""
    assert "antigravity" not in sys.modules
    for name in ("antigravity:geohash", "os:system", "subprocess:Popen", "builtins:print", "no:such", ""):
        for kind in ("fields of", "tuple of"):
            found = structure.rebuild({kind: name, "fields": [["args", {"value": "true"}]]}, [])
            assert type(found) in (structure.Fields, structure.NamedFields) and found.args == "true"
    assert "antigravity" not in sys.modules


@pytest.mark.parametrize("description", [{}, {"list": 3}, [5], {"fields of": "x"}, 3, None, {"dict": [[1]]}])
def test_what_is_no_description_is_named(description):
    with pytest.raises(ValueError, match="not a description"):
        structure.rebuild(description, [torch.rand(1)])


def test_numbers_that_json_has_no_form_for_come_back():
    description, _ = structure.flatten(torch, [math.inf, {"low": -math.inf}, math.nan, 1.5])
    description = json.loads(json.dumps(description, allow_nan=False))
    found = structure.rebuild(description, [])
    assert found[0] == math.inf and found[1] == {"low": -math.inf} and math.isnan(found[2]) and found[3] == 1.5
    assert structure.places(description) == [] and structure.accessors(description, "x") == {}
    for wrong in ({"number": "3"}, {"number": 3}, {"number": []}):
        with pytest.raises(ValueError, match="not a description"):
            structure.rebuild(wrong, [])
        with pytest.raises(ValueError, match="not a description"):
            structure.places(wrong)


def test_values_of_other_types_make_another_description():
    said = [structure.flatten(torch, [value])[0] for value in (1, 1.0, True, "1", 0.0, -0.0, math.inf, math.nan, None)]
    assert [[structure.same(one, json.loads(json.dumps(other))) for other in said] for one in said] == torch.eye(len(said)).bool().tolist()


@pytest.mark.parametrize("value", ["\ud800", {"\udfff": 1}, {math.inf: 1}])
def test_what_json_cannot_hold_is_not_describable(value):
    with pytest.raises(structure.NotDescribable, match=r"\[0\] (holds the text '\\ud|has the key inf)"):
        structure.flatten(torch, [value])


def test_what_cannot_be_described_is_named():
    with pytest.raises(structure.NotDescribable, match=r"\[1\]\['a'\] is a builtins.object"):
        structure.flatten(torch, [1, {"a": object()}])
