"""The contract of an inference technique: one module of this package, or one that a third party registers under the
entry-point group `saturate.inference_techniques`.

A candidate is a list of techniques. In the candidate's own process they are applied in the order of their stages; in the
process that searches, `eligible`, `variants` and `as_code` are called. A technique imports nothing but the standard
library and saturate at its top; torch comes from `context.torch`, everything else is imported where it is used.

A technique module holds, in this order: a docstring with the headings of `saturate.techniques._api.HEADINGS`; `TECHNIQUE`; where preparing takes
long, `PREPARE_S`: the seconds for a small model, a prior for the order of trials; of a runtime that compiles what other techniques put between
the operators, `COMPILES = True`; of a number format that takes the model as a whole, so that no layer can stay in its own precision
(`Context.keep`), `WHOLE = True`; a frozen dataclass `Options` whose fields all have defaults of type bool, int, float or str; and the functions
of `InferenceTechnique`. No technique names another: what cannot go together claims the same resource.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from saturate.records.inference import ModelFacts
from saturate.techniques._api import (
    HEADINGS,
    Eligible,
    Ineligible,
    NotApplied,
    Proof,
    Technique,
    Touch,
    bound_of,
    variants_of,
)

#: When `apply` runs. session: switches of the process, before the model is used. train: weights or structure, with
#: training data or recovery. number: number formats and layout of the module. runtime: makes the callable that serves
#: (at most one; without one the module itself serves).
STAGES = ("session", "train", "number", "runtime")

#: Numerics classes, weakest promise last (saturate.techniques._api.NUMERICS). exact and reordering are lossless: they
#: need no accuracy check, only agreement with the baseline's outputs. precision: number formats. convergence: another
#: function (pruned, distilled, trained again).
LOSSLESS = ("exact", "reordering")

#: The key of `Context.notes` under which a technique that is for size says what the weights take compressed, in bytes.
COMPRESSED_BYTES = "compressed_bytes"

#: ... and the one that says how many seconds of preparing went into what later processes of the search find: an export, facts about the model.
FOR_ALL_S = "for_all_s"

# Resources with a meaning that several techniques share. A Touch without order claims one alone.
# "number-format" (of weights and products), "runtime" (who executes), "module-classes" (runtimes that trace or export a
# module need plain torch layers; quantizers that replace layers by tensor subclasses claim it too), "network" (which
# layers there are), "weights-trained", "memory-format", "threads", "sdpa-backend".


def no_program(facts: ModelFacts) -> str | None:
    """Why a program of another kind cannot do what the model does, or cannot be compared with it: one input may have more than one right
    answer. None where it can."""
    if facts.mode == "enable_grad":
        return "the model differentiates, and programs record no gradients"
    if facts.keeps_state:
        return "the model keeps something from call to call, so no other program can be compared with it"
    return "the model draws random numbers, and no other program draws the same" if facts.random else None


class OutOfTime(NotApplied):
    """Raised by `apply` when the time of this candidate ended before it could take effect: with more, it may."""


@dataclass(frozen=True)
class Train:
    """How the user trains: what unlocks recovery after pruning, QAT and distillation.

    loader: an iterable (anew for each epoch) of tuples (*inputs, target). loss: (output, target) -> scalar tensor.
    optimizer: parameters -> torch optimizer; None: AdamW with `learning_rate`. student: () -> module, for distillation
    into a given student. epochs: at most so many passes in one candidate.

    Every weight is trained, those without gradients too: a model that is to serve mostly comes frozen as a whole. Where one of
    these functions raises, the candidate's row names it.
    """

    loader: Any
    loss: Callable[[Any, Any], Any]
    optimizer: Callable[[Any], Any] | None = None
    learning_rate: float = 1e-4
    epochs: int = 3
    student: Callable[[], Any] | None = None


@dataclass
class Entry:
    """How to load what was stored: the format's name, the files (relative to the artifact's folder), and whatever
    `load` of the format needs beside them (JSON values)."""

    format: str
    files: list[str]
    settings: dict[str, Any] = field(default_factory=dict)


@dataclass
class Context:
    """What `apply` works on, inside the candidate's process. A technique replaces `model` (stages train, number) or sets
    `call` and `save` (stage runtime). Raises `NotApplied(reason)` when it cannot take effect here."""

    torch: Any
    model: Any                              # nn.Module in eval mode, on `device`, gradients off
    device: str                             # "cpu" or "cuda"
    inputs: list[tuple[Any, ...]]           # real batches on `device`; they define shapes
    calibration: list[tuple[Any, ...]]      # batches for calibration only, on the CPU
    facts: ModelFacts
    folder: Path                            # private scratch of this process
    threads: int                            # CPU threads this candidate may use
    train: Train | None = None
    keep: frozenset[str] = frozenset()      # names of modules that stay in the original precision (repair)
    deadline_s: float | None = None         # time.monotonic() by which a training stage must stop
    call: Callable[..., Any] | None = None  # set by stage runtime: same signature and output structure as the model
    save: Callable[[Path], Entry] | None = None     # set with `call`: stores the program in a folder; None: by torch.export
    others: list[tuple[Any, ...]] = field(default_factory=list)     # inputs of other sizes than all of `inputs`, on `device`
    notes: dict[str, str] = field(default_factory=dict)     # facts for `active`, by technique id or a key of its own
    exports: Path | None = None             # where exports of the model lie for all candidates (see `_onnx_exports`); None: it is not theirs any more


class InferenceTechnique(Protocol):
    """The functions of a technique module."""

    TECHNIQUE: Technique
    Options: type

    def eligible(self, facts: ModelFacts) -> Eligible | Ineligible:
        """Whether it can work for this model, here, with the reason in words for the user."""

    def apply(self, context: Context, options: Any) -> str:
        """Change the context; one sentence on what was done. In the candidate's process."""

    def active(self, context: Context, options: Any) -> Proof:
        """After the first call: whether it took effect, and what shows it (dtype census, node counts, counters)."""

    def as_code(self, options: Any) -> str:
        """The lines that a user would write to have the same without saturate. They make of `model` what is called with the same
        inputs and gives the same answers, and call it themselves for no more than their own ends: others may stand behind them."""

    def variants(self, facts: ModelFacts) -> Sequence[Any]:
        """Optional. The Options worth a try, best guess first; few. Default: `[Options()]`."""

    def bound(self, facts: ModelFacts) -> float | None:
        """Optional. The most speed-up over float32 it has given anywhere, as a prior for the order of trials; None, the default: unknown."""


__all__ = [
    "COMPRESSED_BYTES", "FOR_ALL_S", "HEADINGS", "LOSSLESS", "STAGES", "Context", "Eligible", "Entry", "Ineligible", "InferenceTechnique", "NotApplied",
    "OutOfTime", "Proof", "Technique", "Touch", "Train", "bound_of", "no_program", "variants_of",
]
