"""The command line: picks the verb, reads its options, shows errors, returns the exit code.

A verb is a module with `configure(parser)` and `execute(arguments) -> exit code`. It is imported only when it is used,
so that `saturate --help` costs no more than argparse. With `TAKES_COMMAND = True`, everything behind the first `--` is the
workload's command and arrives as `arguments.command`, untouched.

Exit codes: 0 done, 2 usage, 3 environment, also a bug of our own, 4 the workload itself failed, 5 no final set verifies (tune
keeps none that does not, so that is rare: see `errors.VerificationFailed`), 6 too noisy, 130 interrupted.
"""

from __future__ import annotations

import argparse
import importlib
import io
import os
import shutil
import sys
from collections.abc import Sequence
from types import ModuleType
from typing import Any, NoReturn, TextIO

import saturate
from saturate.errors import EnvironmentProblem, SaturateError, SaturateFailed, UsageError, clean

#: name, module, one line for `saturate --help`
VERBS = (
    ("tune", "saturate.cli.tune", "find what makes a training command faster, prove it, write a recipe"),
    ("run", "saturate.cli.run", "run a training command with a recipe"),
    ("fit", "saturate.cli.fit", "find the largest batch that really trains within a limit of memory"),
    ("optimize", "saturate.cli.optimize", "find the fastest way to run a model within an accuracy budget, and prove it"),
    ("bench", "saturate.cli.bench", "measure what optimize stored: latency, throughput and memory at several batch sizes"),
    ("profile", "saturate.cli.profile", "say where the time of a training command goes, and what would help"),
    ("analyze", "saturate.cli.analyze", "say the same of recorded traces: Kineto JSON or Nsight Systems SQLite"),
    ("pack", "saturate.cli.pack", "pack a dataset of many small files, text or tables into a few that load fast"),
    ("checkpoint", "saturate.cli.checkpoint", "check, export, thin out and plan checkpoints"),
    ("drill", "saturate.cli.drill", "kill a training, start it again, and say whether it goes on where it was"),
    ("recipe", "saturate.cli.recipe", "show, compare and validate recipes"),
    ("explain", "saturate.cli.explain", "what a technique, a finding, a verdict or an error code means"),
    ("techniques", "saturate.cli.techniques", "list what can be tried"),
    ("doctor", "saturate.cli.doctor", "look for what keeps this machine from tuning, with the fix"),
    ("report", "saturate.cli.report", "print the path of the last report"),
)

#: Verbs that import the user's code into this process, which finds modules in the user's order.
_IMPORT_THE_USERS = (["optimize"], ["bench"])

_INTERRUPTED = 130                              # 128 + SIGINT, as shells report it
_BROKEN_PIPE = 141                              # 128 + SIGPIPE: what `saturate techniques | head` would give in C


class Parser(argparse.ArgumentParser):
    """argparse that raises UsageError instead of exiting, takes no abbreviations, and names the nearest option."""

    def __init__(self, *arguments: Any, **options: Any):
        super().__init__(*arguments, **{"allow_abbrev": False, **options})
        self.color = False      # Python 3.14 paints usage lines on a terminal, of which `parser_of` makes other ones

    def error(self, message: str) -> NoReturn:
        raise UsageError(f"{self.prog}: {message}", remedy=f"{self.prog} --help")

    def _check_value(self, action: argparse.Action, value: Any) -> None:
        if action.choices is not None and value not in action.choices:
            from saturate.records.spelling import suggestion

            choices = [str(choice) for choice in action.choices]
            raise UsageError(f"{self.prog}: '{value}' is not one of {', '.join(choices)}",
                             remedy=suggestion(str(value), choices) or f"{self.prog} --help")


class _Help(argparse.HelpFormatter):
    """Fills the paragraphs of a description to the terminal's width, and leaves those alone that are indented: lines to copy."""

    def _fill_text(self, text: str, width: int, indent: str) -> str:
        paragraphs = text.strip("\n").split("\n\n")
        return "\n\n".join(one if one.startswith(" ") else super(_Help, self)._fill_text(one, width, indent) for one in paragraphs)


def parser_of(verb: str, module: ModuleType) -> Parser:
    """The option parser of one verb."""
    parser = Parser(prog=f"saturate {verb}", description=module.__doc__, formatter_class=_Help)
    module.configure(parser)
    if takes_command(module):
        usage, tail = parser.format_usage().rstrip(), "-- COMMAND [ARGUMENT ...]"
        fits = len(usage.rpartition("\n")[2]) + 1 + len(tail) <= shutil.get_terminal_size().columns
        parser.usage = usage.removeprefix("usage: ") + (" " if fits else "\n" + " " * len(f"usage: {parser.prog} ")) + tail
    return parser


def takes_command(module: ModuleType) -> bool:
    """Whether the verb is followed by `-- COMMAND`."""
    return getattr(module, "TAKES_COMMAND", False)


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command line and return its exit code."""
    _open_standard_streams()
    if isinstance(sys.stdout, io.TextIOWrapper):  # file names and recipes may hold what this terminal's encoding cannot show
        sys.stdout.reconfigure(errors="backslashreplace")
    words = list(sys.argv[1:] if argv is None else argv)
    if argv is None and words[:1] not in _IMPORT_THE_USERS:
        _own_libraries_first()
    try:
        code = _dispatch(words)
        if sys.stdout is not None:
            sys.stdout.flush()  # here, so that a reader who left is noticed while it can still be handled
        return code
    except SaturateError as error:
        return _fail(error)
    except (ImportError, AttributeError) as error:
        return _fail(_of_surroundings(error) or _bug(error))
    except KeyboardInterrupt:
        _tell("interrupted\n")
        return _INTERRUPTED
    except OSError as error:
        if isinstance(error.__context__, KeyboardInterrupt):    # what was found until then could not be shown: the terminal was closed
            _to_nowhere(sys.stdout)
            return _INTERRUPTED
        if isinstance(error, BrokenPipeError):
            _to_nowhere(sys.stdout)
            return _BROKEN_PIPE
        if (problem := _of_surroundings(error)) is not None:
            return _fail(problem)
        return _fail(_bug(error) if error.filename is not None or _stdout_works() else _no_output(error))
    except Exception as bug:  # noqa: BLE001 - the last resort: shown with its traceback
        return _fail(_bug(bug))


def _stdout_works() -> bool:
    """Whether standard output takes anything, an empty line: the error itself does not say what could not be written."""
    try:
        os.write(sys.stdout.fileno(), b"\n")
    except OSError:
        return False
    return True


def _no_output(error: OSError) -> EnvironmentProblem:
    _to_nowhere(sys.stdout)
    return EnvironmentProblem("standard output cannot be written", cause=error.strerror or str(error),
                              remedy="free some space where it leads to, or send it elsewhere")


def _of_surroundings(error: Exception) -> EnvironmentProblem | None:
    from saturate.cli._problems import of_surroundings

    return of_surroundings(error)


def _to_nowhere(stream: TextIO) -> None:
    from saturate.cli._output import to_nowhere

    to_nowhere(stream)


def _tell(text: str) -> None:
    from saturate.cli._output import tell

    tell(text)


def _bug(error: Exception) -> SaturateFailed:
    failed = SaturateFailed.of(error)
    failed.__cause__ = error
    return failed


def _own_libraries_first() -> None:
    """Look into PYTHONPATH last: it is meant for the command, and may hold other versions of what saturate needs."""
    if not os.environ.get("PYTHONPATH"):
        return
    given = os.environ["PYTHONPATH"].split(os.pathsep)
    try:
        given += [os.path.abspath(entry) for entry in given]        # as Python enters them
    except FileNotFoundError:
        pass            # the working directory was removed: then it cannot either
    sys.path.sort(key=lambda entry: entry in given)


def _open_standard_streams() -> None:
    """Where a standard stream is closed (`>&-`), write to nowhere: the next file that is opened would take its place.
    Not inherited, so that a command which saturate becomes finds it closed."""
    while (descriptor := os.open(os.devnull, os.O_RDWR)) <= 2:
        pass
    os.close(descriptor)
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, "w", encoding="utf-8"))  # noqa: SIM115 - as long as the process


def _dispatch(argv: list[str]) -> int:
    word = argv[0] if argv else "--help"
    modules = {name: module for name, module, _ in VERBS}
    if word == "help" and argv[1:2] and argv[1] in modules:
        word, argv = argv[1], [argv[1], "--help"]
    if word in ("-h", "--help", "help"):
        print(_help())
        return 0
    if word in ("-V", "--version"):
        print(f"saturate {saturate.__version__}")
        return 0
    if word not in modules:
        raise _unknown("option" if word.startswith("-") else "verb", word, [*modules, "--help", "--version"])
    return _execute(word, importlib.import_module(modules[word]), argv[1:])


def _execute(verb: str, module: ModuleType, words: list[str]) -> int:
    command: list[str] = []
    if takes_command(module) and "--" in words:
        cut = words.index("--")
        words, command = words[:cut], words[cut + 1:]
    parser = parser_of(verb, module)
    try:
        arguments, extra = parser.parse_known_args(words)
    except SystemExit as done:  # --help was printed
        return int(done.code or 0)
    except UsageError as error:
        raise _misspelt(error, verb, parser, words) or error from None
    if extra:
        raise _extra(verb, module, parser, words, extra)
    if takes_command(module):
        if not command:
            raise UsageError(f"saturate {verb} needs the command to work on",
                             remedy=_line([f"saturate {verb}", *words, "--", "python", "train.py"]))
        arguments.command = command
    from saturate.cli import _output

    with _output.of_a_verb():
        if not getattr(arguments, "json", False):
            return module.execute(arguments)
        try:
            return module.execute(arguments)
        except (UsageError, BrokenPipeError):
            raise
        except BaseException as error:
            _output.answer_of_failure(error)
            raise


def _misspelt(error: UsageError, verb: str, parser: Parser, words: list[str]) -> UsageError | None:
    """The error for an option that there is none of, where argparse says that a required one is missing: it has looked for those
    first, and may miss it for its spelling (`--imputs`)."""
    known = options_of(parser)
    names = (word.partition("=")[0] for word in words if word.startswith("--"))
    unknown = next((name for name in names if name not in known), None)
    if unknown is None or "arguments are required" not in error.message:
        return None
    return _unknown("option", unknown, known, f"saturate {verb}")


def _extra(verb: str, module: ModuleType, parser: Parser, words: list[str], extra: list[str]) -> UsageError:
    """The error for words that the parser could not place."""
    prog, unknown = f"saturate {verb}", set(extra)
    first = next(word for word in words if word in unknown)
    if first.startswith("-"):
        return _unknown("option", first.partition("=")[0], options_of(parser), prog)
    if takes_command(module):
        start = words.index(first)
        return UsageError(f"{prog} needs -- in front of the command", remedy=_line([prog, *words[:start], "--", *words[start:]]))
    return UsageError(f"{prog}: unexpected argument '{first}'", remedy=f"{prog} --help")


def _line(words: Sequence[str]) -> str:
    """Words as a line to copy; the first one holds spaces of its own."""
    from saturate.records.command_line import joined

    return f"{words[0]} {joined(words[1:])}"


def options_of(parser: argparse.ArgumentParser) -> list[str]:
    """Every option string of a parser and its sub-parsers, in order of definition, each once."""
    found: dict[str, None] = {}
    for action in parser._actions:
        found.update(dict.fromkeys(action.option_strings))
        if isinstance(action, argparse._SubParsersAction):
            for sub in action.choices.values():
                found.update(dict.fromkeys(options_of(sub)))
    return list(found)


def _unknown(kind: str, word: str, known: Sequence[str], prog: str = "saturate") -> UsageError:
    from saturate.records.spelling import suggestion

    return UsageError(f"{prog}: unknown {kind} '{word}'", remedy=suggestion(word, known) or f"{prog} --help")


def _fail(error: SaturateError) -> int:
    """Show an error, below its traceback where it is one of our own; returns the exit code."""
    if isinstance(error, SaturateFailed) and error.__cause__ is not None:
        import traceback

        _tell(clean("".join(traceback.format_exception(error.__cause__))))
    _tell(_card(error) + "\n")
    return error.exit_code


def _card(error: SaturateError) -> str:
    from saturate.cli._output import paint

    first, _, rest = error.card().partition("\n")
    label = f"error[{error.code}]"
    return paint(label, "bold", "red", stream=sys.stderr) + first.removeprefix(label) + "\n" + rest


def _help() -> str:
    width = max(len(name) for name, _, _ in VERBS)
    lines = [
        "saturate makes a training script use its hardware fully, and proves it.",
        "",
        "usage: saturate VERB [options]",
        "",
        *(f"  {name.ljust(width)}  {line}" for name, _, line in VERBS),
        "",
        "  saturate tune -- python train.py               measure, try, verify, write a recipe",
        "  saturate run recipe.toml -- python train.py    train with it",
        "  saturate VERB --help                           the options of a verb",
        "  saturate --version",
    ]
    return "\n".join(lines)
