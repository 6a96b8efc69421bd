"""Every built-in keeps the contract, and the kit catches those that do not."""

from __future__ import annotations

import sys
from types import ModuleType

import pytest

from saturate.techniques import _registry
from saturate.testing import conformance

torch = pytest.importorskip("torch")

COMPILING = {"compile"}     # the C++ compiler takes half a minute
BUILT_IN = [
    pytest.param(module, id=name, marks=[pytest.mark.slow] if name in COMPILING else [])
    for name, module in _registry.load().items()
    if module.__name__.startswith("saturate.")
]


@pytest.mark.filterwarnings("ignore:.*pin_memory.*no accelerator")
@pytest.mark.parametrize("module", BUILT_IN)
def test_built_in_conforms(module):
    conformance.require(module)


# -- liars -----------------------------------------------------------------------------------------------------------

HONEST = '''"""A technique that changes nothing.

What it does
------------
Nothing.

When it helps
-------------
Never.

When it hurts
-------------
Never.

Numerics
--------
`exact`.

How it is applied
-----------------
Not at all.

References
----------
None.
"""

from dataclasses import dataclass, field

from saturate.techniques._api import Eligible, Ineligible, Proof, Technique, Touch

TECHNIQUE = Technique(id="liar", title="a liar", numerics="exact", stage="model", touches=(Touch("nothing"),))


@dataclass(frozen=True)
class Options:
    """Nothing to choose."""

    strength: int = 1


def eligible(facts):
    return Eligible("always")


def variants(facts):
    return [Options()]


def bound(facts):
    return None


def apply(context, options):
    context.note("liar", "applied")
    return "nothing"


def active(evidence, options):
    return Proof("liar" in evidence.notes, "its note")


def as_code(options):
    return "pass"
'''

APPLY = '    context.note("liar", "applied")\n'

LIARS = {
    "wrong_gradients": (APPLY, """
    for parameter in context.modules[0].parameters():
        context.on_undo(parameter.register_hook(lambda grad: grad / 4).remove)
""", "its class is exact"),
    "closure_over_the_model": (APPLY, """
    model = context.modules[0]
    model.forward = type(model).forward.__get__(model)
    original = model.forward
    context.set_attribute(model, "forward", lambda *args: original(*args))
""", "deep copy of the model follows"),
    "leaves_an_attribute": (APPLY, "    context.modules[0].left = 1\n", "model.left is left behind"),
    "leaves_a_hook": (APPLY, "    context.optimizers[0].register_step_post_hook(lambda *a: None)\n", "_hooks changed"),
    "leaves_a_flag": (APPLY, "    context.torch.set_default_dtype(context.torch.float64)\n    context.on_undo(lambda: None)\n",
                      "default dtype changed"),
    "leaves_what_it_prepared": ("def apply(", """def prepare(context, options):
    context.torch.set_default_dtype(context.torch.float64)


def apply(""", "default dtype changed"),
    "leaves_a_patch": (APPLY, "    context.torch.Tensor.to = lambda self, *a, **k: context.torch._C.TensorBase.to(self, *a, **k)\n",
                       "Tensor.to is left behind"),
    "leaves_an_environment": (APPLY, "    import os\n    os.environ['LIAR'] = '1'\n", "environment variable LIAR is left"),
    "changes_saved_groups": (APPLY, "    context.set_item(context.optimizers[0].param_groups[0], 'lr', 0.5)\n", "saved groups differ"),
    "changes_weights": (APPLY, """
    with context.torch.no_grad():
        context.modules[0].head.bias.add_(1e-6)
""", "value of head.bias changed"),
    "changes_strides": (APPLY, """
    weight = context.modules[0].stem.weight
    weight.data = weight.data.contiguous(memory_format=context.torch.channels_last)
""", "strides of stem.weight changed"),
    "no_manifest_line": ('return "nothing"', "return None", "a line for the manifest"),
    "always_active": ('Proof("liar" in evidence.notes, "its note")', 'Proof(True, "trust me")', "although nothing was applied"),
    "imports_torch": ("from dataclasses", "import torch\nfrom dataclasses", "imports torch"),
    "prints": ("from dataclasses", "print('hello')\nfrom dataclasses", "prints to stdout"),
    "no_variants": ("return [Options()]", "return []", "variants is empty"),
    "twice_the_same": ("return [Options()]", "return [Options(), Options()]", "the same options twice"),
    "bound_out_of_range": ("def bound(facts):\n    return None", "def bound(facts):\n    return facts.step_ms", "bound returned"),
    "divides_by_zero": ("def bound(facts):\n    return None", "def bound(facts):\n    return 0 / facts.step_ms", "ZeroDivisionError"),
    "no_reason": ('Eligible("always")', 'Ineligible(" ")', "with a reason"),
    "no_code": ('return "pass"', 'return ""', "as_code"),
    "out_of_its_own_range": ("    strength: int = 1\n", "    strength: int = field(default=1, metadata={'minimum': 2})\n",
                             "strength 1 is below the least allowed value, 2"),
    "takes_any_option": ("    strength: int = 1\n", """    strength: int = 1

    def __init__(self, strength=1, **others):
        object.__setattr__(self, "strength", strength)
""", "unknown keys"),
}


def load_text(folder, name, text):
    (folder / f"{name}.py").write_text(text)
    return _registry.load_one(name, str(folder / f"{name}.py"))


@pytest.fixture
def forget():
    """Modules loaded from a temporary folder must not outlive the test."""
    before = set(sys.modules)
    yield
    for name in set(sys.modules) - before:
        if not name.startswith(("torch", "saturate", "numpy", "sympy")):
            del sys.modules[name]
    torch.set_default_dtype(torch.float32)
    if "to" in vars(torch.Tensor):
        del torch.Tensor.to


@pytest.fixture
def quiet_environment(monkeypatch):
    """Restored after a liar changed it."""
    monkeypatch.setenv("LIAR", "")
    monkeypatch.delenv("LIAR")


def test_an_honest_one_passes(tmp_path, forget):
    assert conformance.check(load_text(tmp_path, "liar", HONEST)) == []


@pytest.mark.parametrize("name", LIARS)
def test_liars_are_caught(name, tmp_path, forget, quiet_environment):
    old, new, expected = LIARS[name]
    assert HONEST.count(old) == 1
    module: ModuleType = load_text(tmp_path, "liar", HONEST.replace(old, new))
    found = conformance.check(module)
    assert any(expected in line for line in found), found


def test_require_raises_what_check_finds(tmp_path, forget):
    module = load_text(tmp_path, "liar", HONEST.replace("return [Options()]", "return []"))
    with pytest.raises(AssertionError, match="variants is empty"):
        conformance.require(module)
