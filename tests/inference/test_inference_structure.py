"""Nested inputs and outputs as data: they come back, and a description neither imports nor calls anything."""

from __future__ import annotations

import collections
import copy
import dataclasses
import json
import math
import pickle
import sys

import pytest

torch = pytest.importorskip("torch", reason="torch")

from saturate.inference import samples, structure  # noqa: E402
from saturate.techniques import _trees  # noqa: E402


@dataclasses.dataclass
class Answer:
    logits: torch.Tensor
    hidden: tuple = ()
    loss: torch.Tensor | None = None


Pair = collections.namedtuple("Pair", "first second")


class Attributes(dict):
    def __getattr__(self, name):
        return self[name]


class OneDictionary(dict):
    """Its attributes are its items. Filling it runs none of this."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.__dict__ = self


class Stateful(dict):
    def __init__(self, *args):
        super().__init__(*args)
        self.origin = "here"


@dataclasses.dataclass(frozen=True)
class Scaled:
    """Its constructor changes a field, and computes another."""

    logits: torch.Tensor
    probs: torch.Tensor = dataclasses.field(init=False)

    def __post_init__(self):
        object.__setattr__(self, "logits", self.logits * 2)
        object.__setattr__(self, "probs", self.logits.softmax(-1))


@dataclasses.dataclass
class Doubled:
    logits: torch.Tensor

    def __post_init__(self):
        self.logits = self.logits * 2


RAN = []


class Told(type):
    def __call__(cls, *given, **named):
        RAN.append(cls)
        return super().__call__(*given, **named)


@dataclasses.dataclass
class Imports(metaclass=Told):
    """torch has such classes: they import, or write to a file, what a field says."""

    module: str

    def __new__(cls, *given):
        RAN.append(cls)
        return super().__new__(cls)

    def __post_init__(self):
        RAN.append(self.module)

    def __setattr__(self, name, value):
        RAN.append(name)
        super().__setattr__(name, value)

    def __getattribute__(self, name):
        RAN.append(name)
        return super().__getattribute__(name)


@dataclasses.dataclass
class ImportsAsDict(collections.OrderedDict):
    module: str
    second: object = None

    def __post_init__(self):
        RAN.append(self.module)

    def __setitem__(self, name, value):
        RAN.append(name)


class ImportsAsTuple(Pair):
    def __new__(cls, first, second):
        RAN.append(first)
        return super().__new__(cls, first, second)


@dataclasses.dataclass(frozen=True, slots=True)
class InSlots:
    first: object
    second: object


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


def test_keys_that_are_tuples_come_back():
    """A depth network answers with {("disp", scale): ...}, and nothing of it could be stored."""
    a, b = torch.rand(2), torch.rand(3)
    description, tensors = roundtrip({("disp", 0): a, ("disp", 1): b, ((1, True), None): 2.5, (): "none", "(1,)": 3})
    found = structure.rebuild(description, tensors)
    assert list(found) == [("disp", 0), ("disp", 1), ((1, True), None), (), "(1,)"] and found["disp", 1] is b and found[()] == "none"
    assert structure.places(description) == [0, 1] and structure.accessors(description, "x") == {0: "x[('disp', 0)]", 1: "x[('disp', 1)]"}
    for wrong in ({"dict": [[[{}], [0]]]}, {"fields of": "x", "fields": [[["a"], [0]]]}):
        with pytest.raises(ValueError, match="not a description"):
            structure.places(wrong)
    with pytest.raises(structure.NotDescribable, match=r"\[0\] has a key that is a torch.device, neither plain data"):
        structure.flatten(torch, [{torch.device("cpu"): a}])


def test_what_torch_returns_keeps_its_names():
    for value in (torch.rand(2, 3).topk(2), torch.rand(2, 3).max(1), torch.rand(2, 3).sort()):
        description, tensors = roundtrip((value, value.values))
        found, again = structure.rebuild(description, tensors)
        assert type(found) is type(value) and found.values is again and torch.equal(found.indices, value.indices)
        assert structure.same(description, structure.flatten(torch, (tuple(value), value.values))[0])
        assert structure.accessors(description, "x") == {0: "x[1]", 1: "x[0].indices"}


@pytest.mark.parametrize("kind", [Attributes, OneDictionary, collections.OrderedDict])
def test_a_subclass_of_dict_comes_back(kind):
    a = torch.rand(2)
    value = [kind(a=a, items=a + 1)]
    description, tensors = roundtrip(value)
    found, = structure.rebuild(description, tensors)
    assert type(found) is kind and dict(found) == dict(zip(("a", "items"), tensors)) and structure.places(description) == [0, 1]
    assert kind is collections.OrderedDict or found.a is a
    assert structure.same(description, structure.flatten(torch, [dict(value[0])])[0])      # one is taken where the other was
    named = structure.rebuild(json.loads(json.dumps(description).replace(kind.__name__, "Nobody")), tensors, {})[0]
    assert type(named) is structure.Items and named.a is a and pickle.loads(pickle.dumps(named)).keys() == {"a", "items"}
    nobody = json.loads(json.dumps(description).replace(f"{kind.__module__}:{kind.__qualname__}", "nobody:Kind"))
    assert type(structure.rebuild(nobody, tensors, {"nobody:Kind": kind})[0]) is kind
    assert structure.classes_in(value) == {f"{kind.__module__}:{kind.__qualname__}": kind}


def test_a_dictionary_with_a_state_of_its_own_comes_back_as_a_plain_one():
    description, tensors = roundtrip(Stateful({"a": torch.rand(2)}))
    assert type(structure.rebuild(description, tensors)) is dict


def test_a_dataclass_comes_back_as_it_was_whatever_its_constructor_does():
    for value in (Scaled(torch.rand(2)), Doubled(torch.rand(2))):
        description, tensors = roundtrip(value)
        found = structure.rebuild(description, tensors)
        assert type(found) is type(value) and vars(found).keys() == vars(value).keys()
        assert all(torch.equal(vars(found)[name], held) for name, held in vars(value).items())


def test_fields_of_a_stand_in_hide_its_methods():
    fields = structure.Fields({"values": 1, "items": 2, "keys": 3, "__class__": 4})
    assert (fields.values, fields.items, fields.keys, type(fields), isinstance(fields, dict)) == (1, 2, 3, structure.Fields, True)
    again = pickle.loads(pickle.dumps(copy.deepcopy(fields)))
    assert (again.values, again["items"], again[0], list(again)) == (1, 2, 1, ["values", "items", "keys", "__class__"])
    named = structure.NamedFields(("count", "index", "names"), [1, 2, 3])
    assert (named.count, named.index, named.names, tuple(named)) == (1, 2, 3, (1, 2, 3))
    again = pickle.loads(pickle.dumps(copy.copy(named)))
    assert (again.count, again.index, again.names) == (1, 2, 3)
    assert structure.flatten(torch, fields)[0]["dict"][0] == ["values", {"value": 1}]
    assert _trees.copied(fields, lambda path, leaf: leaf + 1).items == 3


class Ranked(dict):
    """As people write them: items are attributes, and may hide methods."""

    def __init__(self, **items):
        super().__init__(**items)
        self.__dict__ = self


@pytest.mark.parametrize("names", [("values", "items", "keys"), ("logits",)])
def test_outputs_whose_items_hide_methods_are_read_everywhere(names):
    """Seen: a ranker that answers with `values` ended a whole search."""
    for made in (structure.Fields, lambda items: Ranked(**items)):
        held = [torch.full((2,), float(place)) for place in range(len(names))]
        output = made(dict(zip(names, held)))
        assert all(found is one for found, one in zip(samples.tensors((output,)), held, strict=True))
        assert all(found is one for found, one in zip(_trees.tensors((output,), torch.Tensor), held, strict=True))
        assert _trees.numel((output,), torch.Tensor) == 2 * len(names)
        skeleton, taken = _trees.taken_apart(output, torch)
        again = _trees.put_together(skeleton, [one + 1 for one in taken])
        assert type(again) is type(output) and torch.equal(getattr(again, names[0]), held[0] + 1) and getattr(output, names[0]) is held[0]


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
        assert type(structure.rebuild({"dict of": name, "dict": [["args", {"value": "true"}]]}, [])) is structure.Items
    made = structure.rebuild({"dict of": f"{Stateful.__module__}:Stateful", "dict": [["args", {"value": "true"}]]}, [])
    assert made == {"args": "true"} and vars(made) == {}        # none of its code has run
    assert "antigravity" not in sys.modules


@pytest.mark.parametrize("description", [{}, {"list": 3}, [5], {"fields of": "x"}, 3, None, {"dict": [[1]]},
                                         {"dict of": 3, "dict": []}])
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


def test_nothing_of_a_class_that_a_file_names_is_called():
    """An artifact had modules imported, its own files among them, by what it said of torch's own classes."""
    for kind, of in ((Imports, "fields of"), (ImportsAsDict, "fields of"), (ImportsAsTuple, "tuple of")):
        names = list(kind._fields) if of == "tuple of" else [field.name for field in dataclasses.fields(kind)]
        RAN.clear()
        found = structure.rebuild({of: f"{__name__}:{kind.__qualname__}", "fields": [[name, {"value": "evil"}] for name in names]}, [])
        assert type(found) is kind and RAN == [], kind
        assert (found.first if kind is ImportsAsTuple else found.module) == "evil"
    assert dict.items(structure.rebuild({"fields of": f"{__name__}:ImportsAsDict", "fields": [["module", {"value": "a"}], ["second", {"value": None}]]}, [])) \
        == {"module": "a"}.items()
    whole = structure.rebuild({"fields of": f"{__name__}:InSlots", "fields": [["first", {"value": 1}], ["second", {"value": 2}]]}, [])
    assert whole == InSlots(1, 2)
