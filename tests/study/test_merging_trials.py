"""Merged micro-steps in real trials: what trains alike is verified, and what only says that it merges is found out."""

from __future__ import annotations

import os
import sys
import textwrap
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

pytest.importorskip("transformers")

from saturate.study.bench import Bench
from saturate.study.candidates import Candidate
from saturate.study.store import Store
from saturate.study.verification import Verified, Verifier
from saturate.techniques import _registry, merged_micro_batches
from saturate.trial.process import TrialEnded, Workload

pytestmark = pytest.mark.slow

#: A Trainer with four micro-steps per update; the last update of an epoch has two, and the last batch of it one sample.
SCRIPT = """
import torch
from torch.utils.data import Dataset
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments, set_seed

class Texts(Dataset):
    rows = torch.randint(0, 50, (43, 12), generator=torch.Generator().manual_seed(0))

    def __len__(self):
        return len(self.rows)

    def __getitem__(self, index):
        return {"input_ids": self.rows[index], "labels": self.rows[index]}

set_seed(0)
config = GPT2Config(vocab_size=50, n_positions=16, n_embd=32, n_layer=1, n_head=2, bos_token_id=0, eos_token_id=0,
                    resid_pdrop=DROPOUT, embd_pdrop=DROPOUT, attn_pdrop=DROPOUT)
arguments = TrainingArguments("out", max_steps=10**6, per_device_train_batch_size=2, gradient_accumulation_steps=4, learning_rate=1e-3,
                              report_to="none", save_strategy="no", logging_strategy="no", disable_tqdm=True, use_cpu=True, seed=0)
trainer = Trainer(model=GPT2LMHeadModel(config), train_dataset=Texts(), args=arguments)
trainer.train()
"""

#: A technique of a third party that says it merges two micro-steps.
_CLAIMS = '''"""Merges.

What it does
------------
It says that it merges.

When it helps
-------------
In tests.

When it hurts
-------------
Elsewhere.

Numerics
--------
`stream`, it says.

How it is applied
-----------------
See the source.

References
----------
None.
"""

from dataclasses import dataclass

from saturate.techniques import _hf_trainer, _merge_proof, merged_micro_batches
from saturate.techniques._api import Eligible, Proof, Technique, Touch

TECHNIQUE = Technique(id="claims", title="claims", numerics="stream", stage="model", touches=(Touch("x"),), merges="factor")


@dataclass(frozen=True)
class Options:
    factor: int = 2


def eligible(facts):
    return Eligible("in tests")


def variants(facts):
    return [Options()]


def bound(facts):
    return None


def apply(context, options):
    trainer = _hf_trainer.running()
    own = trainer.training_step
{body}
    return "applied"


def active(evidence, options):
    return Proof(True, "it says so")


def as_code(options):
    return "# none"
'''

#: Of each two micro-steps the first is dropped, and the second weighs as much as both.
_DROPS_HALF = """
    count = [0]
    def step(model, inputs, items):
        count[0] += 1
        return context.torch.zeros(()) if count[0] % 2 else own(model, inputs, items / 2)
    context.set_attribute(trainer, "training_step", step)
"""

#: Seven of eight are dropped, where two are said to be one: of three of four, the few steps of a warm-up cannot tell (the last update of an
#: epoch has fewer micro-steps), and verification must.
_DROPS_MORE = _DROPS_HALF.replace("count[0] % 2", "count[0] % 8")
_DROPS_SOME_MORE = _DROPS_HALF.replace("count[0] % 2", "count[0] % 4")

#: As ours, without its own proof.
_PROVES_NOTHING = """
    context.set_attribute(_merge_proof, "compare", lambda *given: None)
    merged_micro_batches.apply(context, merged_micro_batches.Options(options.factor))
"""

#: The mean over the tokens of each micro-batch that are no padding, of which there are several numbers: a micro-batch of few weighs as much
#: as one of many, and not where they are one. It hides that from all but the gradients: it is divided by the Trainer as any mean.
_MEANS = """
class Means(Trainer):
    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        rows = inputs["input_ids"]
        losses = torch.nn.functional.cross_entropy(model(rows).logits[:, :-1].transpose(1, 2), rows[:, 1:], reduction="none")
        counts = (rows[:, 1:] < 25).float()
        return (losses * counts).sum() / counts.sum()
    loss_is_scaled_for_ga = False
"""

#: Each sample is to be nearer to itself than to the others of its batch.
_WITHIN_BATCH = """
class Within(Trainer):
    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        states = model(inputs["input_ids"]).logits
        left, right = (torch.nn.functional.normalize(part.mean(1), dim=1) for part in states.chunk(2, dim=1))
        return torch.nn.functional.cross_entropy(left @ right.T / 0.1, torch.arange(len(left)))
    loss_is_scaled_for_ga = False
"""


def with_class(source: str, name: str, text: str = SCRIPT) -> str:
    return text.replace("set_seed(0)\n", f"{source}\nset_seed(0)\n", 1).replace("trainer = Trainer(", f"trainer = {name}(")


def script(dropout: float = 0.0, rows: str = "(43, 12)", text: str = SCRIPT) -> str:
    return text.replace("DROPOUT", str(dropout)).replace("(43, 12)", rows)


@pytest.fixture
def workbench(tmp_path: Path) -> Iterator[Callable[[str], Bench]]:
    made: list[Bench] = []

    def make(text: str) -> Bench:
        work = tmp_path / "work"
        work.mkdir()
        (work / "train.py").write_text(text, encoding="utf-8")
        environment = {k: v for k, v in os.environ.items() if not k.startswith(("SATURATE", "PYTHON", "PYTEST"))}
        study = work / ".saturate"
        bench = Bench(Workload([sys.executable, "train.py"], work, environment, 120.0), study / "run", study, Store(study / "run"), 60.0, print)
        made.append(bench)
        live = bench.live("baseline", ())
        bench.step, bench.reference_events = live.hello["step"], live.events
        bench.finish_live(live)
        return bench

    yield make
    for bench in made:
        bench.close()
        bench.store.close()


def ours(factor: int) -> tuple[Candidate, ...]:
    return (Candidate(merged_micro_batches, merged_micro_batches.Options(factor)),)


def claims(folder: Path, body: str) -> tuple[Candidate, ...]:
    path = folder / "claims.py"
    path.write_text(_CLAIMS.format(body=textwrap.indent(textwrap.dedent(body), "    ")), encoding="utf-8")
    sys.modules.pop("claims", None)
    module = _registry.load_one("claims", str(path))
    return (Candidate(module, module.Options()),)


def verified(bench: Bench, techniques: tuple[Candidate, ...]) -> Verified:
    verifier = Verifier(bench)
    assert verifier.check_baseline() is None
    return verifier.verify(techniques)


@pytest.mark.parametrize("factor", [2, 4])
def test_it_trains_alike_and_takes_fewer_backward_passes(workbench, factor):
    bench = workbench(script())
    assert bench.reference_events["B"] > 3
    live = bench.live("merged", ours(factor))
    bench.finish_live(live)
    assert live.events["B"] < 4 / factor + 0.3 and live.events["S0"] == pytest.approx(1.0)
    found = verified(bench, ours(factor))
    assert found.passed, found.reason
    assert "within tolerance" in found.reason


def test_with_dropout_it_is_a_training_of_the_same_kind(workbench):
    found = verified(workbench(script(dropout=0.1)), ours(4))
    assert found.passed, found.reason


@pytest.mark.parametrize("body", [_DROPS_HALF, _DROPS_SOME_MORE], ids=["half", "more than it says"])
def test_what_drops_samples_is_found_out(workbench, tmp_path, body):
    found = verified(workbench(script()), claims(tmp_path, body))
    assert found.passed is False, found.reason


def test_fewer_backward_passes_than_it_says_are_seen_when_it_is_timed(workbench, tmp_path):
    bench = workbench(script())
    with pytest.raises(TrialEnded) as ended:
        bench.live("merged", claims(tmp_path, _DROPS_MORE))
    assert ended.value.outcome.kind == "motif_differs"


@pytest.mark.parametrize("name, source", [("Means", _MEANS), ("Within", _WITHIN_BATCH)])
def test_what_is_no_sum_over_samples_is_refused_and_would_be_rejected(workbench, tmp_path, name, source):
    bench = workbench(script(text=with_class(source, name)))
    with pytest.raises(TrialEnded) as ended:
        bench.live("merged", ours(4))
    assert ended.value.outcome.kind == "not_active" and "samples depend on each other" in ended.value.outcome.reason
    found = verified(bench, claims(tmp_path, _PROVES_NOTHING))
    assert found.passed is False, found.reason
