"""Train a smaller network to answer as the model does.

What it does
------------
The model teaches a student: the network that `train.student` makes, or a copy of the model without most of its
channels, heads and hidden units. The student learns the model's outputs, and the user's loss where there are targets.

When it helps
-------------
Where a smaller network can do the task but was not trained for it: DistilBERT keeps 97 % of BERT's score with 40 %
fewer parameters and is 1.6x faster.

When it hurts
-------------
A student that starts from random numbers needs long training; a few minutes suffice for small tasks only. Without
`train` it sees nothing but the calibration inputs, and learns little beyond them.

Numerics
--------
`convergence`: it is another function.

How it is applied
-----------------
The student's outputs on the user's batches are pulled towards the model's: Kullback-Leibler divergence where
the targets are classes, otherwise the squared error as a share of the variance; plus the user's loss. The epoch that is
closest to the model on held-out calibration batches counts. Training stops at the user's number of epochs, at
the deadline of the candidate, or when two epochs brought nothing.

References
----------
Hinton et al., "Distilling the Knowledge in a Neural Network", 2015.
Sanh et al., "DistilBERT, a distilled version of BERT", 2019.
Muralidharan et al., "Compact Language Models via Pruning and Knowledge Distillation", NeurIPS 2024.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from saturate.inference import structure
from saturate.inference.techniques import _training, _wrap
from saturate.inference.techniques._api import Context, Eligible, Ineligible, NotApplied, Proof, Technique, Touch
from saturate.records.inference import ModelFacts

TECHNIQUE = Technique(
    id="distillation",
    title="a smaller network taught by the model",
    numerics="convergence",
    stage="train",
    touches=(Touch("network"), Touch("weights-trained", 20)),
)

PREPARE_S = 120.0

#: Calibration samples below which there is nothing to learn from without `train`.
LEAST_SAMPLES = 64


@dataclass(frozen=True)
class Options:
    """`ratio`: share of each width that the copy loses; 0: the student that `train` gives. `heads`: whether attention
    loses heads too."""

    ratio: float = 0.75
    heads: bool = True


def eligible(facts: ModelFacts) -> Eligible | Ineligible:
    if facts.student:
        return Eligible("a student and training data were given")
    if facts.linears + facts.convolutions < 2 or not facts.dtypes:
        return Ineligible("it takes two layers with floating-point weights to have a narrower copy")
    if facts.trainable:
        return Eligible("training data for a narrower copy")
    if facts.calibration_samples >= LEAST_SAMPLES:
        return Eligible(f"{facts.calibration_samples} calibration inputs for a slightly narrower copy")
    return Ineligible(f"no training data (train=, on the command line --train), and {facts.calibration_samples} calibration samples are too few "
                      f"(at least {LEAST_SAMPLES}: more inputs, or calibration=, --calibration)")


def variants(facts: ModelFacts) -> Sequence[Options]:
    if facts.student:
        return [Options(ratio=0.0)]
    return [Options(0.75 if facts.trainable else 0.25, heads=not facts.generates)]


def apply(context: Context, options: Options) -> str:
    if options.ratio:
        student, report = _training.smaller(context, options.ratio, "taylor", options.heads)
        said = report.sentence()
    else:
        student = _student(context)
        said = f"{type(student).__name__} with {_count(student)} parameters in place of {_count(context.model)}"
    recovery = _training.recover(context, student, context.model)
    context.model = student
    context.notes[TECHNIQUE.id] = f"{recovery.steps} steps brought the student from {recovery.before:.3f} to {recovery.after:.3f}"
    return f"{said}; {recovery.sentence()}"


def _count(model: Any) -> int:
    return sum(parameter.numel() for parameter in model.parameters())


def _student(context: Context) -> Any:
    """The user's student, if it answers in the same structure and shapes."""
    torch = context.torch
    if context.train is None or context.train.student is None:
        raise NotApplied("`train` has no student")
    with _training.seeded(torch, 0):
        student = _training.asked("train.student", context.train.student)
        if not isinstance(student, torch.nn.Module):
            raise NotApplied(f"train.student gave a {type(student).__name__}; it builds the module to be taught")
        student = student.to(context.device).eval()
    with torch.no_grad():
        answers = [model(*_wrap.own(context.facts, context.inputs[0])) for model in (context.model, student)]
    shapes = [[(tuple(tensor.shape), tensor.dtype) for tensor in _training.tensors(torch, answer)] for answer in answers]
    if shapes[0] != shapes[1]:
        raise NotApplied(f"the student's outputs are {shapes[1]}, the model's are {shapes[0]}")
    try:
        alike = structure.same(*(structure.flatten(torch, answer)[0] for answer in answers))
    except structure.NotDescribable:
        alike = type(answers[0]) is type(answers[1])
    if not alike:
        kinds = [type(answer).__name__ for answer in answers]
        raise NotApplied(f"the student answers with a {kinds[1]}, the model with a {kinds[0]}" if kinds[0] != kinds[1] else
                         f"the student's {kinds[1]} has other entries than the model's, or another order of them")
    return student


def active(context: Context, options: Options) -> Proof:
    said = context.notes.get(TECHNIQUE.id)
    return Proof(said is not None, said or "no student was trained")


def as_code(options: Options) -> str:
    narrow = f"      # saturate cut {options.ratio:.0%} of the widths, see structured pruning" if options.ratio else ""
    return (
        "from torch.nn import functional as F\n"
        f"student = make_student(){narrow}\n"
        "optimizer = torch.optim.AdamW(student.parameters(), lr=1e-4)\n"
        "for *batch, target in loader:\n"
        "    with torch.no_grad():\n"
        "        taught = model(*batch)\n"
        "    output = student(*batch)\n"
        "    divergence = F.kl_div(output.log_softmax(-1), taught.softmax(-1), reduction='batchmean')\n"
        "    (loss(output, target) + divergence).backward()\n"
        "    optimizer.step(); optimizer.zero_grad()\n"
        "model = student.eval()"
    )
