"""The command line as a whole: cheap to start, exact about mistakes, quiet about broken pipes."""

from __future__ import annotations

import importlib.util
import os
import re
import resource
import signal
import subprocess
import sys
import types

import pytest

from saturate.cli import _output, main
from saturate.errors import EnvironmentProblem

SATURATE = [sys.executable, "-m", "saturate"]


def run(*words, **options):
    return subprocess.run([*SATURATE, *words], capture_output=True, text=True, timeout=60, **options)


@pytest.fixture
def toy(monkeypatch):
    """Two verbs: `toy` with options and a sub-option, `cmd` in front of a command. `seen` is what they were given."""
    seen = []
    module = types.ModuleType("toy_verb", "A toy.")
    module.configure = lambda parser: (parser.add_argument("--budget", type=int), parser.add_argument("--json", action="store_true"))
    module.execute = lambda arguments: seen.append(arguments) or 0
    command = types.ModuleType("cmd_verb", "A toy in front of a command.")
    command.configure, command.execute, command.TAKES_COMMAND = module.configure, module.execute, True
    monkeypatch.setitem(sys.modules, "toy_verb", module)
    monkeypatch.setitem(sys.modules, "cmd_verb", command)
    monkeypatch.setattr(main, "VERBS", (("toy", "toy_verb", "a toy"), ("cmd", "cmd_verb", "with a command")))
    return types.SimpleNamespace(seen=seen, module=module)


@pytest.mark.parametrize("verb", ["tune", "profile", "fit", "drill"])
def test_a_working_directory_that_was_removed(verb, tmp_path, monkeypatch, capsys):
    (tmp_path / "gone").mkdir()
    monkeypatch.chdir(tmp_path / "gone")
    (tmp_path / "gone").rmdir()
    code = main.main([verb, "--", sys.executable, "train.py"])
    monkeypatch.chdir(tmp_path)
    said = capsys.readouterr().err
    assert code == 3 and "the working directory was removed" in said and "Traceback" not in said


@pytest.mark.parametrize("step", ["backward:0", "backward:00", "backward:\u0663"])
def test_a_step_that_none_can_be(step, capsys):
    assert main.main(["tune", "--step", step, "--", sys.executable, "train.py"]) == 2
    assert "neither backward:N" in capsys.readouterr().err


def test_help_is_cheap():
    def cpu_seconds():
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        assert run("--help").returncode == 0
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime

    assert any(cpu_seconds() < 0.150 for _ in range(20)), "what else runs on a core makes it slower, and not each time"


@pytest.mark.parametrize("words", [("--help",), ("--version",), ("tehcniques",)])
def test_no_heavy_import(words):
    done = subprocess.run([sys.executable, "-X", "importtime", "-m", "saturate", *words], capture_output=True, text=True)
    imported = set(re.findall(r"\|\s+(\w+)(?:\.\S+)?$", done.stderr, re.MULTILINE))
    assert "argparse" in imported, "the pattern no longer reads -X importtime"
    assert imported.isdisjoint({"torch", "rich", "msgspec", "tomlkit", "numpy", "pynvml", "sqlite3"})


def test_every_verb_is_in_the_help_and_has_a_module():
    text = run("--help").stdout
    for name, module, line in main.VERBS:
        assert re.search(rf"^  {name}\s+{re.escape(line)}$", text, re.MULTILINE)
        assert importlib.util.find_spec(module) is not None, module
    assert run().stdout == text


def test_version():
    assert re.fullmatch(r"saturate \d+\.\d+\.\d+\n", run("--version").stdout)


@pytest.mark.parametrize(("words", "expected"), [
    (["tyo"], ["unknown verb 'tyo'", "did you mean 'toy'?"]),
    (["--vesion"], ["unknown option '--vesion'", "did you mean '--version'?"]),
    (["toy", "--budgt", "3"], ["saturate toy: unknown option '--budgt'", "did you mean '--budget'?"]),
    (["toy", "--bud", "3"], ["unknown option '--bud'"]),
    (["toy", "--budget", "x"], ["--budget", "invalid int value"]),
    (["toy", "--budget"], ["--budget", "expected one argument"]),
    (["toy", "stray"], ["unexpected argument 'stray'"]),
    (["cmd"], ["needs the command", "saturate cmd -- python train.py"]),
    (["cmd", "--budget", "3"], ["saturate cmd --budget 3 -- python train.py"]),
    (["cmd", "--budget", "3", "python", "t.py", "--lr", "1"], ["needs --", "saturate cmd --budget 3 -- python t.py --lr 1"]),
    (["cmd", "--bugdet", "3", "--", "python"], ["unknown option '--bugdet'", "did you mean '--budget'?"]),
    (["cmd", "--budget", "3", "--jsno", "--", "python"], ["unknown option '--jsno'", "did you mean '--json'?"]),
])
def test_usage_errors(toy, capsys, words, expected):
    assert main.main(words) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith("error[E200] ")
    for part in expected:
        assert part in captured.err
    assert toy.seen == []


@pytest.mark.parametrize(("words", "said", "help_"), [
    (["optimize", "m:build", "--imputs", "m:loader"], "saturate optimize: unknown option '--imputs'", "did you mean '--inputs'?"),
    (["optimize", "m:build", "--imputs=m:loader"], "unknown option '--imputs'", "did you mean '--inputs'?"),
    (["optimize", "m:build"], "arguments are required: --inputs", "saturate optimize --help"),
    (["optimize", "m:build", "--threads", "0"], "not a number of threads", "saturate optimize --help"),
    (["run", "--strct", "--", "python"], "unknown option '--strct'", "did you mean '--strict'?"),
    (["checkpoint", "--jsno"], "unknown option '--jsno'", "did you mean '--json'?"),
])
def test_an_option_that_is_misspelt_is_named_before_what_is_missing(capsys, words, said, help_):
    assert main.main(words) == 2
    shown = capsys.readouterr().err
    assert said in shown and help_ in shown


def test_help_for_a_verb_by_its_name(toy, capsys):
    assert main.main(["help", "toy"]) == 0
    assert capsys.readouterr().out.startswith("usage: saturate toy")


def test_the_command_arrives_untouched(toy):
    command = ["python", "-u", "t.py", "--budget", "9", "--", "--json", "--help", ""]
    assert main.main(["cmd", "--budget", "3", "--", *command]) == 0
    assert toy.seen[0].command == command
    assert toy.seen[0].budget == 3 and toy.seen[0].json is False


def test_help_of_a_verb_shows_where_the_command_goes(toy, capsys):
    assert main.main(["cmd", "--help"]) == 0
    assert capsys.readouterr().out.startswith("usage: saturate cmd [-h] [--budget BUDGET] [--json] -- COMMAND [ARGUMENT ...]")


def test_a_description_is_filled_to_the_terminal_and_lines_to_copy_are_not(toy, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "50")
    monkeypatch.setattr(sys.modules["cmd_verb"], "__doc__", f"First line.\n\n{'many words ' * 12}\nand more\n\n    saturate cmd {'x' * 60}\n")
    assert main.main(["cmd", "--help"]) == 0
    lines = capsys.readouterr().out.split("\n")
    assert "                    -- COMMAND [ARGUMENT ...]" in lines and "First line." in lines
    assert [line for line in lines if len(line) > 50] == [f"    saturate cmd {'x' * 60}"]


def test_an_error_becomes_a_card_and_its_exit_code(toy, capsys):
    def execute(arguments):
        raise EnvironmentProblem("the folder is read-only", cause="mount option ro", remedy="move")

    toy.module.execute = execute
    assert main.main(["toy"]) == 3
    assert capsys.readouterr().err == (
        "error[E300] the folder is read-only\ncause: mount option ro\nhelp: move\nmore: saturate explain E300\n")


@pytest.mark.parametrize("error", [
    EnvironmentProblem("a\x1b[31m", cause="b\x9b2J", evidence="c\x07", remedy="d\u202e"), ValueError("\x1b]0;title\x07")])
def test_texts_of_files_do_not_drive_the_terminal(toy, capsys, error):
    def fail(arguments):
        raise error

    toy.module.execute = fail
    main.main(["toy"])
    said = capsys.readouterr().err
    assert "\ufffd" in said and not set(said) & set("\x1b\x07\x9b\u202e")


def test_an_interrupt_is_one_line(toy, capsys):
    def execute(arguments):
        raise KeyboardInterrupt

    toy.module.execute = execute
    assert main.main(["toy"]) == 130
    assert capsys.readouterr().err == "interrupted\n"


def test_a_reader_that_left_is_no_error():
    reader, writer = os.pipe()
    os.close(reader)
    try:
        done = subprocess.run([*SATURATE, "--help"], stdout=writer, stderr=subprocess.PIPE, text=True)
    finally:
        os.close(writer)
    assert done.stderr == ""
    assert done.returncode == 128 + signal.SIGPIPE


def test_an_error_that_nobody_reads_keeps_its_exit_code():
    """`saturate ... 2>&1 | head -1`, and a terminal that was closed."""
    reader, writer = os.pipe()
    os.close(reader)
    try:
        done = subprocess.run([*SATURATE, "tuna"], stdout=subprocess.PIPE, stderr=writer)
    finally:
        os.close(writer)
    assert done.returncode == 2


@pytest.mark.parametrize(("environment", "terminal", "expected"), [
    ({}, True, True), ({}, False, False), ({"NO_COLOR": "1"}, True, False), ({"NO_COLOR": ""}, True, True), ({"TERM": "dumb"}, True, False),
])
def test_colour(monkeypatch, environment, terminal, expected):
    for name in ("NO_COLOR", "TERM"):
        monkeypatch.delenv(name, raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    stream = types.SimpleNamespace(isatty=lambda: terminal)
    assert _output.coloured(stream) is expected
    assert ("\x1b" in _output.paint("x", "bold", stream=stream)) is expected


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="no /dev/full here")
@pytest.mark.parametrize("words", [["techniques"], ["explain", "E200"], ["--help"]])
def test_a_full_disk_under_standard_output_is_named(words):
    with open("/dev/full", "w") as full:
        done = subprocess.run([*SATURATE, *words], stdout=full, stderr=subprocess.PIPE, text=True, timeout=60)
    assert done.returncode == 3 and "error[E300] standard output cannot be written" in done.stderr
    assert "No space left" in done.stderr and "Traceback" not in done.stderr and "Exception ignored" not in done.stderr


def test_another_failed_write_is_not_called_standard_output(capfd, monkeypatch):
    monkeypatch.setattr(main, "_dispatch", lambda words: (_ for _ in ()).throw(OSError(28, "No space left on device")))
    assert main.main(["x"]) == 3 and "error[E370]" in capfd.readouterr().err


def test_a_command_that_is_not_executable_is_there(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "e.toml").touch(), (tmp_path / "train.sh").touch()
    assert main.main(["run", "e.toml", "--", "./train.sh"]) == 2
    assert "'./train.sh' is not executable\nhelp: chmod +x ./train.sh" in capsys.readouterr().err
    assert main.main(["run", "e.toml", "--", "./none.sh"]) == 2 and "there is no command" in capsys.readouterr().err
    for verb in (["run", "e.toml"], ["drill"], ["tune"], ["fit", "--memory", "1GiB"], ["profile"], ["checkpoint", "advise"]):
        assert main.main([*verb, "--", sys.executable, "-m", "saturate", "run", "e.toml", "--", "true"]) == 2, verb
        assert "the command is saturate itself" in capsys.readouterr().err


def test_an_interruption_that_nobody_could_be_told_of_is_one(monkeypatch):
    """The terminal was closed: SIGHUP, and then no place to say what was found. That ended as a machine without standard output (3)."""
    def interrupted(words):
        try:
            raise KeyboardInterrupt
        finally:
            raise OSError(5, "Input/output error")

    left = []
    monkeypatch.setattr(main, "_dispatch", interrupted)
    monkeypatch.setattr(main, "_to_nowhere", left.append)
    assert main.main(["x"]) == 130 and left == [sys.stdout]
