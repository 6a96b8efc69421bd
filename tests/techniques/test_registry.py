"""Discovery: built-ins and entry points, and loud failures."""

from __future__ import annotations

import contextlib
import dataclasses
import importlib.metadata
import subprocess
import sys
from types import ModuleType

import pytest

from saturate.errors import RecipeError, TechniqueError
from saturate.records.options import options_from
from saturate.techniques import _registry
from saturate.techniques._api import HEADINGS, Technique, Touch, bound_of, variants_of

BUILT_IN = [
    "activation-checkpointing", "allocator", "async-checkpoint", "batch-assembly", "bf16-autocast", "channels-last", "compile",
    "cpu-offload", "cpu-threads", "cudnn-benchmark", "dataset-cache", "ddp-options", "device-prefetch", "dynamic-batch",
    "fp16-autocast", "fp8-linear", "fused-optimizer", "gc-freeze", "global-batch", "incremental-checkpoint", "loader-workers",
    "merged-micro-batches", "micro-batch", "optimizer-8bit", "optimizer-in-backward", "pin-memory", "sdpa-backend", "tf32", "zero-grad-none",
]

#: Every two that cannot stand in one recipe, and what both want for themselves.
CONFLICTS = [
    ("activation-checkpointing", "compile", "compiler"),
    ("activation-checkpointing", "cpu-offload", "saved-tensors"),
    ("async-checkpoint", "incremental-checkpoint", "checkpoint-writer"),
    ("batch-assembly", "dataset-cache", "dataset"),
    ("bf16-autocast", "fp16-autocast", "autocast"),
    ("cpu-offload", "optimizer-8bit", "optimizer-state"),
    ("cpu-offload", "optimizer-in-backward", "gradients"),
    ("device-prefetch", "pin-memory", "pinned-memory"),
    ("device-prefetch", "pin-memory", "tensor-copy"),
    ("dynamic-batch", "merged-micro-batches", "micro-batches"),
    ("dynamic-batch", "micro-batch", "micro-batches"),
    ("fp16-autocast", "optimizer-in-backward", "backward"),
    ("merged-micro-batches", "micro-batch", "micro-batches"),
    ("optimizer-8bit", "optimizer-in-backward", "gradients"),
    ("optimizer-in-backward", "zero-grad-none", "zero-grad"),
]

GOOD = '"""T\n\n' + "\n\n".join(f"{heading}\n{'-' * len(heading)}\nText of {heading}." for heading in HEADINGS) + '''
"""
from dataclasses import dataclass
from saturate.techniques._api import Eligible, Proof, Technique, Touch
TECHNIQUE = Technique(id="third-party", title="t", numerics="exact", stage="model", touches=(Touch("x"),))
@dataclass(frozen=True)
class Options:
    amount: int = 1
def eligible(facts): return Eligible("yes")
def variants(facts): return [Options()]
def bound(facts): return None
def apply(context, options): return "done"
def active(evidence, options): return Proof(False, "no")
def as_code(options): return "pass"
'''

BROKEN = {
    "heading": ("Numerics\n--------\n", "Numbers\n-------\n", "no heading 'Numerics'"),
    "empty_heading": ("Text of References.", "", "no heading 'References'"),
    "id": ('id="third-party"', 'id="other"', "the file says 'third-party'"),
    "numerics": ('numerics="exact"', 'numerics="fine"', "TECHNIQUE.numerics is 'fine'"),
    "stage": ('stage="model"', 'stage="late"', "TECHNIQUE.stage is 'late'"),
    "acts_on": ('stage="model"', 'stage="model", acts_on="all"', "TECHNIQUE.acts_on is 'all'"),
    "merges": ('stage="model"', 'stage="model", merges="factor"', "TECHNIQUE.merges is 'factor', and Options has no number"),
    "title": ('title="t"', 'title=" "', "title is empty"),
    "touches": ('(Touch("x"),)', "()", "at least one Touch"),
    "thawed": ("@dataclass(frozen=True)", "@dataclass", "not frozen"),
    "plain_options": ("@dataclass(frozen=True)\n", "", "not a dataclass"),
    "no_default": ("amount: int = 1", "amount: int", "has no default"),
    "none_default": ("amount: int = 1", "amount: int = None", "TOML needs"),
    "arity": ("def apply(context, options)", "def apply(context)", "apply must take 2"),
    "optional_arity": ("def bound(facts)", "def bound()", "bound must take 1"),
    "misspelt": ("def variants(facts)", "def variant(facts)", "the function variant is not part of the contract: is variants meant?"),
    "misspelt_bound": ("def bound(facts)", "def bounds(facts)", "is bound meant?"),
    "missing": ('def as_code(options): return "pass"\n', "", "the function as_code is missing"),
    "environment": ('stage="model"', 'stage="environment"', "the function environment is missing"),
    "metadata": ("TECHNIQUE = Technique(", "SOMETHING = Technique(", "TECHNIQUE is missing"),
    "syntax": ("@dataclass(frozen=True)", "@@", "SyntaxError"),
    "import": ("from dataclasses", "import no_such_module_\nfrom dataclasses", "no_such_module_"),
}


@pytest.fixture
def third_party(tmp_path, monkeypatch):
    """Write `third_party.py`, importable and registered as an entry point."""
    monkeypatch.syspath_prepend(str(tmp_path))
    real = importlib.metadata.entry_points

    def entry_points(**selection):
        found = list(real(**selection))
        if selection.get("group") == _registry.GROUP:
            found.append(importlib.metadata.EntryPoint("anything", "third_party", _registry.GROUP))
        return found

    monkeypatch.setattr(importlib.metadata, "entry_points", entry_points)

    def write(text):
        (tmp_path / "third_party.py").write_text(text)
        return tmp_path / "third_party.py"

    yield write
    sys.modules.pop("third_party", None)


def test_built_ins_load_in_order():
    loaded = _registry.load()
    assert [name for name, module in loaded.items() if module.__name__.startswith("saturate.techniques.")] == BUILT_IN


#: What recipes may give an option at worst, by the type of its default.
ODD = {int: (-3, 0, 1e300), float: (-3.0, 0.0, 1e300), str: ("nonsense",), bool: ()}
#: Those of them that mean something.
MEANT = {
    ("activation-checkpointing", "budget_bytes", 0), ("dataset-cache", "max_gb", 0.0), ("ddp-options", "bucket_mib", 0),
    ("dynamic-batch", "limit_bytes", 0), ("fp8-linear", "least", 0), ("incremental-checkpoint", "chain", 0),
    ("incremental-checkpoint", "memory_mib", 0), ("incremental-checkpoint", "store", "nonsense"),
}


def test_options_out_of_range_are_refused():
    taken = set()
    for identity, module in _registry.load().items():
        for field in dataclasses.fields(module.Options):
            for value in ODD[type(field.default)]:
                with contextlib.suppress(RecipeError):
                    options_from(module, {field.name: value})
                    taken.add((identity, field.name, value))
    assert taken == MEANT


@pytest.mark.parametrize(("identity", "table"), [
    ("gc-freeze", {"threshold": 2**31}), ("loader-workers", {"prefetch": 10**18}), ("ddp-options", {"bucket_mib": 2**62}),
    ("incremental-checkpoint", {"chain": 256}),
])
def test_numbers_that_python_or_torch_cannot_hold_are_refused(identity, table):
    with pytest.raises(RecipeError, match="above the largest allowed value"):
        options_from(_registry.load()[identity], table)


def test_third_party_is_found(third_party):
    path = third_party(GOOD)
    module = _registry.load()["third-party"]
    assert _registry.origin(module) == ("third_party", str(path))
    assert _registry.documentation(module) == {heading: f"Text of {heading}." for heading in HEADINGS}


def test_without_variants_and_bound_there_are_the_default_options_and_no_bound(third_party):
    third_party(GOOD.replace("def variants(facts): return [Options()]\ndef bound(facts): return None\n", ""))
    module = _registry.load()["third-party"]
    assert not hasattr(module, "variants") and variants_of(module, None) == [module.Options()] and bound_of(module, None) is None


@pytest.mark.parametrize("name", BROKEN)
def test_a_broken_module_is_loud(third_party, name):
    old, new, expected = BROKEN[name]
    assert GOOD.count(old) == 1
    third_party(GOOD.replace(old, new))
    with pytest.raises(TechniqueError) as caught:
        _registry.load()
    assert "third_party" in caught.value.message
    assert expected in caught.value.cause


def test_two_of_the_same_id_are_refused(third_party, tmp_path):
    third_party(GOOD.replace("third-party", "tf32"))
    (tmp_path / "third_party.py").rename(tmp_path / "tf32.py")
    real = importlib.metadata.entry_points
    importlib.metadata.entry_points = lambda **selection: [importlib.metadata.EntryPoint("t", "tf32", _registry.GROUP)]
    try:
        with pytest.raises(TechniqueError, match="two techniques are called 'tf32'"):
            _registry.load()
    finally:
        importlib.metadata.entry_points = real
        sys.modules.pop("tf32", None)


def test_load_one_from_a_file_where_the_package_is_missing(tmp_path):
    (tmp_path / "third_party.py").write_text(GOOD)
    try:
        module = _registry.load_one("absent_package.third_party", str(tmp_path / "third_party.py"))
        assert module.Options() == module.Options(1)
    finally:
        sys.modules.pop("absent_package.third_party", None)
    with pytest.raises(TechniqueError, match="absent_package.third_party does not load"):
        _registry.load_one("absent_package.third_party")


def test_a_failed_file_leaves_no_half_module(tmp_path):
    (tmp_path / "half.py").write_text("x = 1\nraise ValueError('broken')\n")
    with pytest.raises(TechniqueError, match="half does not load"):
        _registry.load_one("half", str(tmp_path / "half.py"))
    assert "half" not in sys.modules


def fake(identity, stage, *touches):
    module = ModuleType(identity)
    module.TECHNIQUE = Technique(id=identity, title="t", numerics="exact", stage=stage, touches=touches)
    return module


def test_conflicts_need_an_exclusive_claim():
    stacked = fake("a", "model", Touch("forward", 10))
    higher = fake("b", "model", Touch("forward", 20))
    alone = fake("c", "model", Touch("forward"))
    other = fake("d", "model", Touch("loader"))
    assert _registry.conflicts([stacked, higher, other]) == []
    assert _registry.conflicts([stacked, higher, alone]) == [("a", "c", "forward"), ("b", "c", "forward")]
    assert _registry.conflicts([other, other]) == [("d", "d", "loader")]


def test_the_built_ins_conflict_where_they_should_and_nowhere_else():
    loaded = _registry.load()
    assert _registry.conflicts([loaded[name] for name in BUILT_IN]) == CONFLICTS


def test_order_is_by_stage_then_by_place_in_the_stack():
    modules = [
        fake("z", "model", Touch("forward", 10)), fake("y", "model", Touch("forward", 90)), fake("x", "import", Touch("l")),
        fake("w", "environment", Touch("e")),
    ]
    for arrangement in (modules, modules[::-1]):
        assert [module.TECHNIQUE.id for module in _registry.ordered(arrangement)] == ["w", "x", "z", "y"]


def test_loading_imports_no_torch_and_nothing_but_the_standard_library():
    probe = """
import sys
from saturate.techniques import _registry
for name, module in _registry.load().items():
    assert name
foreign = {name.partition(".")[0] for name in sys.modules} - sys.stdlib_module_names - {"__main__", "saturate"}
print(sorted(name for name in foreign if not name.startswith(("_", "sitecustomize"))))
"""
    done = subprocess.run([sys.executable, "-c", probe], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
