"""Every error that a user can see, in one tree.

    SaturateError                 what happened, cause, evidence, remedy, exit code
    ├── UsageError            2   the command line or a file that the user wrote is wrong
    │   ├── RecipeError           a recipe cannot be read or does not validate
    │   ├── TechniqueError        an unknown, damaged or conflicting technique
    │   ├── TraceError            a trace cannot be read
    │   └── RuleError             a rule that looks for bottlenecks does not load or does not work
    ├── EnvironmentProblem    3   this machine or folder does not allow what was asked
    │   ├── StudyLocked           another process works in the same folder
    │   ├── StudyDamaged          the study file is not one, or is of another version
    │   ├── InjectionDefeated     the agent never woke up in the workload (`python -I`, a wiped environment)
    │   ├── CheckpointDamaged     a checkpoint, or a piece that it needs, is damaged or missing
    │   ├── ArtifactDamaged       an artifact is damaged, foreign, or not one
    │   ├── NothingFaster         a search found nothing to hand out
    │   └── SaturateFailed        an error of saturate's own
    ├── WorkloadFailed        4   the user's own command fails without saturate's help
    │   └── CheckUnusable         the user's check fails, or cannot tell good answers from bad ones
    ├── VerificationFailed    5   no final set of techniques verifies
    └── TooNoisy              6   the machine is too noisy to decide

Codes (`E...`) are stable: `saturate explain CODE` prints the class's docstring.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Self

# Text of a workload, or from a file, ends up in a terminal and in a page. Control characters could drive the terminal, NUL is
# illegal in HTML, lone surrogates (from file names that are not UTF-8) cannot be encoded, and bidi overrides reorder a line.
_UNSAFE = {
    **{code: "\ufffd" for code in range(0x20)},
    **{code: "\ufffd" for code in range(0x7F, 0xA0)},
    **{code: "\ufffd" for code in range(0xD800, 0xE000)},
    **{code: "\ufffd" for code in (*range(0x202A, 0x202F), *range(0x2066, 0x206A), 0xFFFE, 0xFFFF)},
    **{code: "\ufffd" for code in (0x061C, 0x200E, 0x200F)},  # marks of direction
    ord("\t"): "\t",
    ord("\n"): "\n",
}


def clean(text: str) -> str:
    """`text` without characters that a terminal or a browser could act on."""
    return text.translate(_UNSAFE)


class SaturateError(Exception):
    """Something went wrong that the user can act on."""

    code = "E000"
    exit_code = 1

    def __init__(self, message: str, *, cause: str = "", evidence: str = "", remedy: str = ""):
        super().__init__(message)
        self.message = message
        self.cause = cause
        self.evidence = evidence
        self.remedy = remedy

    def card(self) -> str:
        """The error as the terminal shows it, plain text, one labelled line each. Its texts may come from files."""
        lines = [f"error[{self.code}] {self.message}"]
        for label, text in (("cause", self.cause), ("evidence", self.evidence), ("help", self.remedy)):
            if text:
                lines.append(f"{label}: {text}")
        lines.append(f"more: saturate explain {self.code}")
        return clean("\n".join(lines))


class UsageError(SaturateError):
    """The command line is not one that saturate understands."""

    code = "E200"
    exit_code = 2


class RecipeError(UsageError):
    """A recipe file cannot be read, or something in it does not validate.

    A recipe is a TOML file that `saturate tune` writes. An empty file is a valid recipe that changes nothing.
    `saturate recipe validate FILE` lists everything that is wrong with one.
    """

    code = "E210"

    @classmethod
    def outdated(cls, changes: Sequence[str]) -> Self:
        """What `run --strict` refuses with, in front of the command and within it."""
        return cls("the recipe was made for something else", evidence="; ".join(changes),
                   remedy="tune again here, or run without --strict")


class TechniqueError(UsageError):
    """A technique is unknown, does not load, breaks the contract of a technique, or conflicts with another one.

    `saturate techniques` lists the ids. Two techniques conflict when both own the same exclusive resource.
    """

    code = "E220"


class TraceError(UsageError):
    """A trace file is not one, ends too early to say anything, or holds what no trace can hold.

    Readable are Kineto JSON (`.json`, `.json.gz`, what `torch.profiler` exports) and Nsight Systems SQLite
    (`nsys export --type sqlite report.nsys-rep`). The message names the file and, where one is known, the byte offset.
    """

    code = "E230"


class RuleError(UsageError):
    """A rule that looks for a bottleneck does not load, breaks the contract of a rule, or failed while it looked.

    Rules are the files of `saturate.findings`, and modules that other packages register under the entry-point group of that
    name. `saturate explain` lists them.
    """

    code = "E240"


class EnvironmentProblem(SaturateError):
    """This machine, or this folder, does not allow what was asked. `saturate doctor` looks for the cause."""

    code = "E300"
    exit_code = 3


class StudyLocked(EnvironmentProblem):
    """Another saturate is at work in the same folder. Wait for it, stop it, or choose another with `--dir` or `--workdir`."""

    code = "E310"


class StudyDamaged(EnvironmentProblem):
    """The study file is not a study, is damaged, or was written by another version of saturate.

    Nothing in it is deleted: move it away, or choose another folder with `--dir`, and run the command again.
    """

    code = "E320"


class InjectionDefeated(EnvironmentProblem):
    """The agent never woke up inside the workload, so nothing could be measured or changed.

    saturate reaches a Python process through `PYTHONPATH` and `sitecustomize`. `python -I`, `-E` and `-S` ignore them,
    and so does a child started with an environment of its own.
    """

    code = "E330"


class CheckpointDamaged(EnvironmentProblem):
    """A checkpoint, or a piece of the store that it needs, is damaged, missing, or of another version of saturate.

    Nothing is deleted or guessed. `saturate checkpoint verify` names every checkpoint that is still whole.
    """

    code = "E340"


class WorkloadFailed(SaturateError):
    """The command fails by itself, before any optimization. Its own last output is shown; nothing was changed."""

    code = "E400"
    exit_code = 4


class ArtifactDamaged(EnvironmentProblem):
    """An artifact of `saturate optimize` is damaged, incomplete, of another version, or holds what no artifact may hold.

    Every file of an artifact is named in its manifest with its size and SHA-256; nothing is loaded that does not match.
    """

    code = "E350"


class NothingFaster(EnvironmentProblem):
    """A search found nothing that is better within the budget and the limits, so there is no artifact. That is an answer, too.

    Where the model itself passes a limit, nothing was shown to keep them all.
    """

    code = "E360"


class SaturateFailed(EnvironmentProblem):
    """An error of saturate's own, not of the command. Its traceback is shown above it; please report it with that.

    A study goes on from where it was when the same command is given again; its recipe is empty, or holds what was kept.
    """

    code = "E370"

    @classmethod
    def of(cls, bug: Exception) -> SaturateFailed:
        """The error to raise `from bug`."""
        return cls(f"saturate itself failed: {type(bug).__name__}: {bug}", remedy="report it with the traceback above")


class CheckUnusable(WorkloadFailed):
    """The check raises, returns what is no score, saw calibration data, or does not tell the model's answers from noise.

    A check takes `run`, which has the model's signature, and returns a float, a dict of them, or (best) one value per
    sample. Higher is better unless the budget says otherwise.
    """

    code = "E410"


class VerificationFailed(SaturateError):
    """The final set of techniques does not train like the baseline.

    `tune` keeps a set only once it has verified: what does not is `rejected_numerics`, and the exit code is 0. Only a set that
    verified and then trained otherwise in its last race ends so. `saturate run --on-divergence stop` ends with the same code.
    """

    code = "E500"
    exit_code = 5


class TooNoisy(SaturateError):
    """Other load on this machine hides differences of the size asked about. Quiet it, or raise `--budget`."""

    code = "E600"
    exit_code = 6


def catalogue() -> dict[str, type[SaturateError]]:
    """Every error class by its code."""
    found: dict[str, type[SaturateError]] = {}
    pending = [SaturateError]
    while pending:
        cls = pending.pop()
        found[cls.code] = cls
        pending.extend(cls.__subclasses__())
    return dict(sorted(found.items()))
