"""The contract of a technique. A technique is one module of this package, or one that a third party registers.

It runs in two places: in the saturate process (`eligible`, `variants`, `bound`, `active`, `as_code`) and inside the
user's process (`apply`). So a technique imports nothing but the standard library at its top; torch comes from
`context.torch`.

A technique module holds, in this order: a docstring with the headings of `HEADINGS`; `TECHNIQUE`; a frozen dataclass
`Options` whose fields all have defaults; the functions of `FUNCTIONS`; and of `OPTIONAL` those whose default does not do.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from types import ModuleType
from typing import Any, Protocol

from saturate.records.facts import Evidence, Facts

HEADINGS = ("What it does", "When it helps", "When it hurts", "Numerics", "How it is applied", "References")

#: Numerics classes, weakest promise last. A class allows everything that the classes before it allow.
NUMERICS = ("exact", "reordering", "stream", "precision", "convergence")

#: When `apply` runs: before the process exists, right after torch was imported, or once the trained modules are known.
STAGES = ("environment", "import", "model")


#: What `apply` of a technique of stage "model" acts on. A training may go on with other optimizers of the same modules, or with
#: other modules: then what was done is undone, and applied to those. With "modules" it stays when only optimizers are others,
#: with "process" always. Other modules always have other optimizers.
ACTS_ON = ("optimizers", "modules", "process")


@dataclass(frozen=True)
class Touch:
    """A resource that a technique changes. `order=None` claims it alone; a number is the place in a shared stack
    (lower is closer to the user's code)."""

    resource: str
    order: int | None = None


@dataclass(frozen=True)
class Technique:
    """Metadata. `id` is the file name with dashes.

    `merges` names an option that holds how many micro-steps of an update may run as one. A step may then have fewer backward passes
    than the baseline's, down to that part of them, and verification compares the sum of the losses of each update as they come to the
    backward pass. All else is compared as ever: the data, the gradients, which way each update goes, how often optimizers step.
    """

    id: str
    title: str
    numerics: str
    stage: str
    touches: tuple[Touch, ...]
    since: str = "0.1"
    status: str = "stable"              # or "experimental"
    slow_start: bool = False            # its first steps take long (a compiler runs): tried late unless the diagnosis names it
    acts_on: str = "optimizers"         # stage "model": applied anew when these are others, see `ACTS_ON`
    starts_alone: bool = False          # times something while the script starts: no other trial may start beside it
    merges: str = ""                    # the option that says how many backward passes of an update may be one
    fallbacks: bool = False             # variants behind the first are for where that one fails: otherwise they get no trial


@dataclass(frozen=True)
class Eligible:
    """Worth a trial; `reason` says why. `steadies`: processes of the very same command differ by what this ends in some of them. It
    has its turn first then, because all else is compared more sharply on top of it. `note`: what this machine changes about it, so that
    it stands in the result."""

    reason: str
    steadies: bool = False
    note: str = ""

    def __bool__(self) -> bool:
        return True


@dataclass(frozen=True)
class Ineligible:
    """Not worth a trial; `reason` says why, in words for the user."""

    reason: str

    def __bool__(self) -> bool:
        return False


@dataclass(frozen=True)
class Proof:
    """Whether a technique that was set really took effect, and what shows it."""

    active: bool
    evidence: str


class NotApplied(Exception):
    """Raised by `apply` when the technique cannot take effect in this process; the message is the reason."""


class Context(Protocol):
    """What `apply` may use. Every change goes through it, so that it can be listed and undone."""

    torch: Any
    modules: tuple[Any, ...]            # stage "model": outermost trained modules, DistributedDataParallel unwrapped
    optimizers: tuple[Any, ...]         # stage "model"
    device: str                         # "cpu", "cuda": where the trained parameters live ("" before stage "model")
    early: bool                         # stage "model": applied before the first training forward (`EARLY`)
    differentiates_gradients: bool      # stage "model": a backward pass of the step that was watched had `create_graph=True`
    built_optimizers: Callable[[], list[Any]]   # all that the script has built and holds, whether they step or not
    autocast: str | None                # stage "model": dtype that the script itself autocasts to in the step that was watched
    steps_in_forward: bool              # stage "model": an optimizer's step ran inside the forward in the step that was watched
    gradient_norms: dict[int, Any] | None   # in verification runs: by id(parameter), of gradients that a technique frees

    def wrap_forward(self, module: Any, order: int, wrap: Any, around: bool = False) -> None:
        """Put `wrap(inner) -> function(self, *args, **kwargs)` around the module's forward in training mode.
        Wrappers with a higher order are further out. The result survives deepcopy, pickle and `torch.save`. `around`: also
        where the instance has a forward of its own, from the script, a library or `torch.compile`; without, that raises
        NotApplied, for what such a forward makes of its inputs nobody knows."""

    def set_attribute(self, owner: Any, name: str, value: Any) -> None:
        """`setattr` that is listed and undone."""

    def set_item(self, mapping: Any, key: Any, value: Any) -> None:
        """`mapping[key] = value` that is listed and undone."""

    def on_undo(self, callback: Any) -> None:
        """Register how to take back a change made by other means."""

    def on_loader(self, rewrite: Any) -> None:
        """Stage "import": `rewrite(dataset, arguments: dict, given: frozenset[str]) -> dict` sees the keyword arguments of
        each DataLoader (defaults filled in; `given` are those that the script passed) and returns those to change."""

    def note(self, key: str, value: str) -> None:
        """Record something for `Evidence.notes`."""


class TechniqueModule(Protocol):
    """The functions of a technique module."""

    TECHNIQUE: Technique
    Options: type

    def eligible(self, facts: Facts) -> Eligible | Ineligible: ...

    def apply(self, context: Context, options: Any) -> str:
        """Apply, and return one line for the manifest. Stage "environment" gets a context with only `note`."""

    def active(self, evidence: Evidence, options: Any) -> Proof: ...

    def as_code(self, options: Any) -> str:
        """The lines that a user would write to have the same without saturate."""

    def variants(self, facts: Facts) -> list[Any]:
        """Optional. Options to try, the most promising first; at least one when eligible. Default: `[Options()]`."""

    def bound(self, facts: Facts) -> float | None:
        """Optional. The largest share of the step that this can remove (0 to 1), or None when nothing bounds it, which is the default."""


#: A technique may have `REMARK`, a sentence that a study notes when it keeps it: under which conditions its gain holds.
#: A technique of stage "environment" also has `environment(options) -> dict[str, str]`: variables of the new process.
#: One of stage "model" that must act before memory is taken has `EARLY = True`: outside of verification runs it is applied
#: before the first training forward. Optimizers have no state then, unless one was loaded; of the modules it is only known
#: that they own trained parameters, not which of them are called.
#: One of stage "model" may have `prepare(context, options)`, which is called at the first sign of training, for what must be done
#: where the script constructs something, or before its first forward. It says nothing; `apply` finds what it left.
FUNCTIONS = ("eligible", "apply", "active", "as_code")
OPTIONAL = ("variants", "bound")


def variants_of(module: ModuleType, facts: Any) -> list[Any]:
    """The options of a technique to try, the most promising first."""
    return list(module.variants(facts)) if hasattr(module, "variants") else [module.Options()]


def bound_of(module: ModuleType, facts: Any) -> float | None:
    """The most that a technique says it could give; None where it does not say."""
    return module.bound(facts) if hasattr(module, "bound") else None
