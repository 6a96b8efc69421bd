"""Every built-in inference technique keeps the contract, and the kit catches those that do not."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType

import pytest

torch = pytest.importorskip("torch")

from saturate.inference.techniques import _registry  # noqa: E402 - after the check for torch
from saturate.testing import inference_conformance as kit  # noqa: E402

OWN = {id: module for id, module in _registry.load().items() if module.__name__.startswith("saturate.")}

#: Applied in seconds; the others compile, train or import large packages.
QUICK = ("bf16", "fp16", "nhwc-layout", "sdpa-kernel", "tf32-products", "threads", "cuda-graphs")


@pytest.mark.parametrize("id", OWN)
def test_decisions_of_a_built_in_conform(id: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kit.conformance, "import_effects", lambda *_: [])      # one process for all: below
    assert kit.decisions(OWN[id]) == []


def test_importing_the_built_ins_imports_nothing_large() -> None:
    code = "import sys; from saturate.inference.techniques import _registry; _registry.load(); print({'torch', 'torchao', 'onnx', 'numpy'} & set(sys.modules))"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "set()\n"


def test_quick_built_ins_conform(tmp_path: Path) -> None:
    """Applied here, stored, and loaded by one fresh process for all."""
    stored: list[kit.Stored] = []
    assert [line for id in QUICK for line in kit.applied(OWN[id], None, tmp_path, stored)] == []
    assert {one.label for one in stored} >= {"nhwc-layout on images", "sdpa-kernel on tokens"}
    assert kit.reloaded(stored) == []


@pytest.mark.slow
@pytest.mark.parametrize("id", [id for id in OWN if id not in QUICK])
@pytest.mark.filterwarnings("ignore")       # of torch's compilers and quantizers
def test_built_in_conforms(id: str) -> None:
    kit.require(OWN[id])


# -- liars --------------------------------------------------------------------------------------------------------------

HONEST = '''"""Doubles nothing.

What it does
------------
Puts a function around the forward.

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
As a bound method.

References
----------
None.
"""
from dataclasses import dataclass
from saturate.inference.techniques import _wrap
from saturate.inference.techniques._api import Eligible, Proof, Technique, Touch

TECHNIQUE = Technique(id="liar", title="a liar", numerics="exact", stage="number", touches=(Touch("nothing"),))

@dataclass(frozen=True)
class Options:
    strength: int = 1

def eligible(facts):
    return Eligible("always")

def variants(facts):
    return [Options()]

def bound(facts):
    return None

def apply(context, options):
    _wrap.around(context.model, lambda inner, args, kwargs: inner(*args, **kwargs))
    context.notes["liar"] = "wrapped"
    return "wrapped"

def active(context, options):
    return Proof("liar" in context.notes, context.notes.get("liar", "not wrapped"))

def as_code(options):
    return "pass"
'''

WRAPPED = "_wrap.around(context.model, lambda inner, args, kwargs: inner(*args, **kwargs))"
AROUND = """
    def wrapper(inner, args, kwargs):
        output = inner(*args, **kwargs)
        fields = output if isinstance(output, dict) else vars(output)
        {body}
        return output
    _wrap.around(context.model, wrapper)
"""

LIARS = {
    "applies nothing": (WRAPPED, "pass", "changed nothing that could be seen"),
    "always active": ('Proof("liar" in context.notes,', "Proof(True,", "holds although nothing was applied"),
    "never active": ('context.notes["liar"] = "wrapped"', "pass", "it was applied, but active says"),
    "rounds": (WRAPPED, AROUND.format(body='fields["logits"] = fields["logits"].bfloat16().float()'), "its class is exact"),
    "NaN": (WRAPPED, AROUND.format(body='fields["logits"] = fields["logits"] * float("nan")'), "-inf dB"),
    "another type": (WRAPPED, AROUND.format(body='fields["logits"] = fields["logits"].double()'), "answers torch.float64"),
    "another structure": (WRAPPED, AROUND.format(body="return tuple(fields.values())"), "its output is arranged as"),
    "one batch size": (WRAPPED, AROUND.format(body="assert len(args[0]) == 4, 'four'"), "a batch of 1 raised AssertionError"),
    "stores nothing": ('context.notes["liar"] = "wrapped"\n',
                       'context.notes["liar"] = "wrapped"\n    from saturate.inference.techniques._api import Entry\n'
                       '    context.save = lambda folder: Entry("exported", ["model.pt2"])\n', "save names files that are not there: ['model.pt2']"),
    "imports torch": ("from dataclasses", "import torch\nfrom dataclasses", "importing it imports torch"),
    "prints": ("TECHNIQUE =", "print('hello')\nTECHNIQUE =", "prints to stdout"),
    "raises while deciding": ('return Eligible("always")', "return Eligible(1 / facts.cores and facts.capability[0] and 'yes')", "deciding raised TypeError"),
    "no reason": ('Eligible("always")', 'Eligible(" ")', "not Eligible or Ineligible with a reason"),
    "bound": ("return None", "return -1.0", "neither None nor a speed-up"),
    "no variants": ("return [Options()]", "return []", "variants is empty"),
    "silent": ('return "wrapped"', "return None", "apply does not return a sentence"),
}


@pytest.fixture
def planted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[str], ModuleType]]:
    monkeypatch.syspath_prepend(str(tmp_path))

    def plant(text: str) -> ModuleType:
        (tmp_path / "liar.py").write_text(text, encoding="utf-8")
        return _registry.load_one("liar")

    yield plant
    sys.modules.pop("liar", None)


@pytest.mark.slow
def test_an_honest_technique_passes(planted: Callable[[str], ModuleType]) -> None:
    kit.require(planted(HONEST))


@pytest.mark.slow
def test_a_program_that_is_not_the_one_that_was_measured_is_caught(planted: Callable[[str], ModuleType]) -> None:
    """Only the process that loads it can tell."""
    other = """
    from saturate.inference.formats import exported
    other = __import__('copy').deepcopy(context.model)
    [p.data.mul_(2) for p in other.parameters()]
    context.save = lambda folder: exported.save(context, folder, model=other)
"""
    module = planted(HONEST.replace('["liar"] = "wrapped"\n', '["liar"] = "wrapped"\n' + other))
    found = kit.check(module)
    assert found and all("it answers otherwise" in line for line in found)


@pytest.mark.parametrize("lie", LIARS)
def test_a_liar_is_caught(lie: str, planted: Callable[[str], ModuleType], monkeypatch: pytest.MonkeyPatch) -> None:
    old, new, message = LIARS[lie]
    assert old in HONEST
    if not lie.startswith("stores"):        # seconds each, and not what this lie is about
        monkeypatch.setattr(kit, "_stored", lambda *_: [])
    if lie not in ("imports torch", "prints"):
        monkeypatch.setattr(kit.conformance, "import_effects", lambda *_: [])
    with pytest.raises(AssertionError, match="breaks the contract") as caught:
        kit.require(planted(HONEST.replace(old, new)))
    assert message in str(caught.value)
